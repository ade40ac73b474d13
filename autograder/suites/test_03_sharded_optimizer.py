"""The public checks of module 03: optimizers whose state, and gradients, are divided among the ranks.

An optimizer is judged by what comes out of it beside the plain one, which is played with averaged gradients on a rank
of its own (see `sharded_optimizer_calls`); by what a rank holds, measured in the rank; and by what was sent.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from autograder.lab import gpt
from autograder.lab.ledger import MARKS
from autograder.lab.ranks import OPTIMIZERS, PerRank
from autograder.suites.kit import Expect, Module, Problem, check, difference, expect_nothing_left, fail
from autograder.suites.sharded_optimizer_calls import Case, gradients, play_two, steps, train, unpacked, values
from autograder.suites.sharded_optimizer_judging import (
    Batch,
    alone,
    expect_ledger,
    expect_owners,
    expect_state,
    expect_state_memory,
    expect_two_collectives,
    make,
    make_all,
    reference,
    sent,
)

MODULE = Module(
    "03_sharded_optimizer",
    "Sharded optimizers",
    files=["sharded_optimizer.py"],
    problems=[
        Problem("partition", 10, "Who owns what", "Who owns what"),
        Problem("sharded_optimizer", 28, "The state on its owner only", "ZeRO-1: the state is sharded"),
        Problem("schedules_and_groups", 18, "Groups and schedules", "The schedule that never arrives"),
        Problem("state_dict", 16, "Save and load the full state", "Saving and loading"),
        Problem("zero2", 20, "Flat buffers and sharded gradients", "ZeRO-2: the gradients are sharded, too"),
        Problem("ledger", 8, "What each stage holds", "The three stages"),
    ],
    refused_names={
        "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": "it is what this module builds; "
        "an inner optimizer over the parameters that a rank owns is enough",
    },
    preload=(*OPTIMIZERS, "torch.distributed.optim.zero_redundancy_optimizer"),
)

SGD = {"optimizer": "SGD", "options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
ADAMW = {"optimizer": "AdamW", "options": {"lr": 0.1, "weight_decay": 0.1}}
AMSGRAD = {"optimizer": "Adam", "options": {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True}}
OPTIMIZER_KINDS = (SGD, ADAMW, AMSGRAD)
SHAPES = [(5, 3), (7,), (1,), (2, 2, 2), (11,), (3,)]


def tensors(rng: torch.Generator, shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list:
    return [values(rng, shape, dtype) for shape in shapes]


# ----------------------------------------------------------------------------------------------------------- partition


@check("partition", "every parameter has one owner, the same on every rank", weight=4)
def test_partition_owners(ranks, rng):
    calls = [([8, 3, 3, 2], 2), ([4, 4, 4], 5), ([], 3), ([0, 0, 7], 2), ([7, 0], 2), ([0, 0, 0], 2), ([5], 1)]
    calls.append(([1] * 20, 4))
    calls += [(torch.randint(0, 1000, (n,), generator=rng).tolist(), p) for n, p in ((30, 3), (2, 7), (17, 4))]
    expect_owners(ranks, calls)


@check("partition", "the largest share is at most 4/3 of the best possible", weight=6)
def test_partition_balance(ranks, rng):
    calls, best = [], []
    for p, pieces in ((2, 3), (3, 4), (4, 2), (5, 5), (8, 3)):
        whole = 1000  # of each rank's share, if the pieces are put together again: the best possible
        numels = []
        for _ in range(p):
            cuts = torch.randint(1, whole, (pieces - 1,), generator=rng).sort().values.tolist()
            numels += [b - a for a, b in zip([0, *cuts], [*cuts, whole], strict=True)]
        order = torch.randperm(len(numels), generator=rng).tolist()
        calls.append(([numels[i] for i in order], p))
        best.append(whole)
    calls += [
        ([10] + [1] * 10, 2),
        ([100, 1, 1, 1, 100, 1, 1, 1, 100, 1, 1, 1], 3),
        ([1, 1, 1, 1, 1, 1, 6], 2),
        ([9] * 8, 4),
        ([5, 3], 4),
    ]
    best += [10, 103, 6, 18, 5]
    for (numels, p), most, found in zip(calls, best, expect_owners(ranks, calls), strict=True):
        shares = [sum(n for n, r in zip(numels, found, strict=True) if r == rank) for rank in range(p)]
        if 3 * max(shares) > 4 * most:
            perhaps = "go from the longest to the shortest, and give each to the rank that has the least so far"
            if found == one_by_one(numels, p):
                perhaps = "in the order given, a long one may come last, when all shares are full: " + perhaps
            elif found == [i % p for i in range(len(numels))]:
                perhaps = "in turn, the ranks get as many tensors, not as many elements: " + perhaps
            fail(
                case=f"partition_parameters({numels}, {p})",
                expected=f"a largest share of at most {math.floor(4 * most / 3)} elements; the best possible is {most}",
                found=f"shares of {shares}",
                line=ranks.definition("partition_parameters"),
                perhaps=perhaps,
            )


def one_by_one(numels: list[int], p: int) -> list[int]:
    """The owners if each parameter, in the order given, goes to the rank that has the least so far."""
    owners, shares = [], [0] * p
    for n in numels:
        owners.append(shares.index(min(shares)))
        shares[owners[-1]] += n
    return owners


# ------------------------------------------------------------------------------------------------- what both are asked


def expect_plain(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """The plain optimizer's parameters, for three optimizers on 3, 2, 4 and 1 ranks."""
    batches = []
    for p in (3, 2, 4, 1):
        batches.append(Batch([], p))
        for kind in OPTIMIZER_KINDS:
            start = tensors(rng)
            name = f"{kind['optimizer']}, {len(start)} parameters, {p} ranks"
            batches[-1].cases.append(Case(name, start, steps(rng, start, p, 4 if p == 3 else 2), **kind))
    make_all(ranks, batches, wrapper)


def missing_cases(rng: torch.Generator) -> list[Case]:
    """A gradient that some of 3 ranks lack counts as zero; a parameter that is frozen stays."""
    cases = []
    for name, absent in (
        ("parameter 1 has no gradient on rank 0", {0: [1]}),
        ("parameters 0 and 2 have none on ranks 1 and 2", {1: [0, 2], 2: [0, 2]}),
        ("each rank has none for another parameter", {0: [0], 1: [1], 2: [2]}),
        ("rank 1 has none at all", {1: [0, 1, 2, 3]}),
        ("parameter 2 has none on any rank", {r: [2] for r in range(3)}),
        ("there is none at all, on any rank", {r: [0, 1, 2, 3] for r in range(3)}),
    ):
        start = tensors(rng, [(7,), (2, 4), (7,), (7,)])
        program = [
            ("step", gradients(rng, start, 3)),
            ("look",),
            *steps(rng, start, 3, 2, absent=absent),
        ]
        cases.append(Case(name, start, program, **(ADAMW if len(cases) % 2 else SGD)))
    start = tensors(rng, [(7,), (2, 4), (7,), (7,)])
    program = steps(rng, start, 3)
    for mine in program[2][1]:  # the last step: nothing later puts it right
        mine[2] = torch.zeros_like(mine[2])
    cases.append(Case("parameter 2 has a gradient of zeros", start, program, **SGD))
    cases[-1].perhaps = "a gradient of zeros is one: momentum and weight decay move the parameter"
    start = tensors(rng, [(7,), (5,), (3,), (4,)])
    frozen = {r: [1, 3] for r in range(3)}
    program = steps(rng, start, 3, absent=frozen)
    cases.append(Case("parameters 1 and 3 are frozen", start, program, frozen=frozenset([1, 3]), **ADAMW))
    everything = {r: [0, 1, 2, 3] for r in range(3)}
    program = steps(rng, start, 3, 1, absent=everything)
    return [*cases, Case("all parameters are frozen", start, program, frozen=frozenset(range(4)), **ADAMW)]


def few_cases(rng: torch.Generator) -> list[Case]:
    """Fewer parameters, or elements, than 3 ranks."""
    cases = []
    for shapes in ([(3,), (2, 2)], [(1,)], [(0,), (5,), (2, 0)], [(0,)]):
        start = tensors(rng, shapes)
        name = f"{len(shapes)} parameters, of {', '.join(str(t.numel()) for t in start)} elements, on 3 ranks"
        cases.append(Case(name, start, steps(rng, start, 3, 2), **ADAMW))
    return cases


def closure_cases(rng: torch.Generator) -> list[Case]:
    """On 3 ranks a closure is called once, before averaging, and its loss comes back."""
    cases = []
    for shapes in (SHAPES, [(4,)]):
        start = tensors(rng, shapes)
        losses = [values(rng, ()) for _ in range(3)]
        program = [("step", gradients(rng, start, 3)), ("look",)]
        for _ in range(2):
            program += [("closure", gradients(rng, start, 3), losses), ("look",)]
        cases.append(Case(f"step(closure), {len(shapes)} parameters on 3 ranks", start, program, **SGD))
        cases[-1].perhaps = "the closure computes new gradients: average after it, not before"
    return cases


def subgroup(rng: torch.Generator, members: list[int]) -> Batch:
    """A group of some of the ranks."""
    start = tensors(rng)
    case = Case(f"a group of ranks {members}", start, steps(rng, start, len(members)), **SGD)
    case.perhaps = "owners are numbered within the group: rank 0 of the group is not rank 0 of all"
    return Batch([case], max(members) + 1, members)


def expect_kinds(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """Several dtypes, tensors that are not contiguous."""
    layouts = [((3, 4), "transposed"), ((6,), "column"), ((4, 2), "")]
    start = [values(rng, shape, torch.float64, layout) for shape, layout in layouts]
    program = steps(rng, start, 2)
    for _, mine in program[:-1]:
        for rank, each in enumerate(mine):
            if rank:  # not on rank 0: the ranks' layouts differ
                each[0] = each[0].t().contiguous().t()
            each[1] = torch.stack([each[1], -each[1]], dim=-1)[..., 0]
    hint = "a tensor that is not contiguous: send a contiguous copy, and copy what arrives back"
    cases = [Case("parameters and gradients that are not contiguous", start, program, perhaps=hint, **SGD)]
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16]
    start = [values(rng, (5 + i,), dtype) for i, dtype in enumerate(kinds)]
    hint = "a message has one dtype: float32, float64 and bfloat16 travel apart"
    cases.append(Case("three dtypes", start, steps(rng, start, 2, 1), "SGD", {"lr": 0.1}, perhaps=hint))
    make(ranks, cases, 2, wrapper)


def expect_gpt(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """A real model, with a weight in two places, on 2 ranks: equal to one device on the whole batch."""
    torch.manual_seed(int(torch.randint(0, 10**6, (), generator=rng)))
    model = gpt.tiny(layers=1, width=16, vocab_size=32, context_length=8, tied=True)
    tokens = torch.randint(0, 32, (3, 6, 9), generator=rng)
    single = alone(train, None, model, tokens)
    run = ranks(train, 2, wrapper, model, tokens)
    for rank in range(2):
        for name, wanted in single.items():
            wrong = difference(run.values[rank].get(name), Expect(wanted, torch.float64, 1000, 10.0))
            if wrong:
                events = run.in_case(0)
                fail(
                    case="3 steps of a GPT with tied embeddings, 2 ranks",
                    expected=f"{name} on rank {rank}, as one device has it: {wrong[0]}",
                    found=wrong[1],
                    line=events[-1] if events else ranks.definition(wrapper),
                    perhaps="a weight in two places must stay one parameter" if "head" in name else None,
                )
    expect_nothing_left(run)


# --------------------------------------------------------------------------------------------------- sharded_optimizer


@check("sharded_optimizer", "the parameters are the plain optimizer's, on every rank", weight=6)
def test_sharded_values(ranks, rng):
    expect_plain(ranks, rng, "ShardedOptimizer")


@check("sharded_optimizer", "a rank holds the state of what it owns, and no more", weight=6)
def test_sharded_memory(ranks, rng):
    expect_state_memory(ranks, rng, "ShardedOptimizer", 4)
    expect_state_memory(ranks, rng, "ShardedOptimizer", 3)
    start = [values(rng, (n,), torch.float32) for n in [16_000, 10, 10, 10] * 2]
    expect_state_memory(ranks, rng, "ShardedOptimizer", 4, start=start, largest=16_000)


FAULTS = "The schedule that never arrives"


@check("sharded_optimizer", "gradients that are missing, frozen parameters", weight=4, section=FAULTS)
def test_sharded_missing(ranks, rng):
    start = tensors(rng, [(7,), (5,), (3,), (4,)])
    program = steps(rng, start, 3, 2, absent={r: [1, 3] for r in range(3)})
    program += [("unfreeze", [1]), *steps(rng, start, 3, 2, absent={r: [3] for r in range(3)})]
    thawed = Case("parameter 1 is frozen for two steps", start, program, frozen=frozenset([1, 3]), **ADAMW)
    thawed.perhaps = "which parameters have a gradient is asked in every step"
    make(ranks, [*missing_cases(rng), thawed], 3)


@check("sharded_optimizer", "fewer parameters than ranks, empty ones", weight=3)
def test_sharded_few(ranks, rng):
    make(ranks, few_cases(rng), 3)


@check("sharded_optimizer", "a closure is called once, and step returns its loss", weight=3, section=FAULTS)
def test_sharded_closure(ranks, rng):
    make(ranks, closure_cases(rng), 3)


@check("sharded_optimizer", "zero_grad clears all gradients, on every rank; a group that is added later", weight=4)
def test_sharded_add_group(ranks, rng):
    start = tensors(rng)
    absent = {r: [1, 3, 5] for r in range(3)}
    program = [
        ("step", gradients(rng, start, 3, absent)), ("zero",),
        ("add", [3, 1], {"lr": 0.02}), ("add", [5], {}), ("step", gradients(rng, start, 3)), ("zero",), ("look",),
        *steps(rng, start, 3, 2), ("zero",),
    ]  # fmt: skip
    case = Case("a group that is added after a step", start, program, groups=[([0, 2, 4], {})], **ADAMW)
    case.perhaps = "a later group belongs to the outer and to the inner optimizer, with its own options"
    make(ranks, [case], 3)


@check("sharded_optimizer", "a group of some of the ranks", weight=2)
def test_sharded_subgroup(ranks, rng):
    make_all(ranks, [subgroup(rng, [1, 3]), subgroup(rng, [1, 2, 4])])


@check("sharded_optimizer", "several dtypes, and tensors that are not contiguous", weight=2)
def test_sharded_kinds(ranks, rng):
    expect_kinds(ranks, rng, "ShardedOptimizer")


@check("sharded_optimizer", "a GPT with tied weights trains as on one device", weight=2)
def test_sharded_gpt(ranks, rng):
    expect_gpt(ranks, rng, "ShardedOptimizer")


# ------------------------------------------------------------------------------------------------ schedules_and_groups

# Two groups whose parameters are not next to each other in the model.
INTERLEAVED = [([0, 2, 4], {"lr": 0.03, "weight_decay": 0.2}), ([1, 3, 5], {"weight_decay": 0.0})]


def schedule_cases(rng: torch.Generator, p: int) -> list[Case]:
    """Learning rates and other options that change at the wrapper take effect."""
    cases = []
    for kind, name, options in (
        (SGD, "CosineAnnealingLR", {"T_max": 4}),
        (ADAMW, "OneCycleLR", {"max_lr": 0.2, "total_steps": 6}),
        (ADAMW, "StepLR", {"step_size": 1, "gamma": 0.3}),
    ):
        start = tensors(rng)
        program = [("schedule", name, options)]
        for _ in range(4):
            program += [("step", gradients(rng, start, p)), ("advance",)]
        cases.append(Case(f"{kind['optimizer']} under {name}", start, [*program, ("look",)], **kind))
    start = tensors(rng)
    program = [
        ("step", gradients(rng, start, p)), ("set", 0, {"lr": 0.0}), ("set", 1, {"lr": 0.5, "momentum": 0.0}),
        ("step", gradients(rng, start, p)), ("look",), ("set", 0, {"lr": 0.2}), *steps(rng, start, p, 1),
    ]  # fmt: skip
    return [*cases, Case("lr and momentum set by hand, one lr to 0", start, program, groups=INTERLEAVED, **SGD)]


def group_cases(rng: torch.Generator, p: int) -> list[Case]:
    """Each group has its own options, the others' defaults, and both can be read."""
    cases = []
    for kind in OPTIMIZER_KINDS:
        start = tensors(rng)
        case = Case(f"{kind['optimizer']}, two groups that interleave", start, steps(rng, start, p, 2), **kind)
        cases.append(replace(case, groups=INTERLEAVED, given="dicts"))
    start = tensors(rng)
    case = Case("SGD, a first group of one parameter", start, steps(rng, start, p, 2), **SGD)
    case.groups = [([2], {"lr": 0.03}), ([0, 1, 3, 4, 5], {"weight_decay": 0.0})]
    case.perhaps = "a rank that owns nothing of a group still has the group, empty: else the others' options shift"
    cases.append(case)
    start = tensors(rng)
    return [*cases, Case("AdamW with no options at all", start, steps(rng, start, p, 2), "AdamW", {})]


@check("schedules_and_groups", "each group has its own learning rate and weight decay", weight=4)
def test_groups_options(ranks, rng):
    make(ranks, group_cases(rng, 3), 3)


@check("schedules_and_groups", "what a scheduler sets in the wrapper takes effect", weight=7)
def test_groups_schedules(ranks, rng):
    make_all(ranks, [Batch(schedule_cases(rng, p), p) for p in (2, 1)])


@check("schedules_and_groups", "parameters given as a list, a generator, dicts, dicts with generators", weight=4)
def test_groups_given(ranks, rng):
    cases = []
    for given in ("list", "generator", "dicts", "generators in dicts", "tensors in dicts"):
        start = tensors(rng)
        groups = None if given in ("list", "generator") else INTERLEAVED
        if given == "tensors in dicts":
            groups = [([0], {}), ([3], {"lr": 0.02}), ([1, 2, 4, 5], {})]
        cases.append(
            Case(f"params given as {given}", start, steps(rng, start, 2, 2), groups=groups, given=given, **SGD)
        )
    make(ranks, cases, 2)


@check("schedules_and_groups", "two optimizers in one process; each is a torch.optim.Optimizer", weight=3)
def test_groups_two_optimizers(ranks, rng):
    cases = []
    for shapes, kind in ((SHAPES, ADAMW), ([(4,), (9,)], SGD)):
        start = tensors(rng, shapes)
        cases.append(Case("one of two optimizers", start, steps(rng, start, 2, 2), **kind))
    single = alone(play_two, None, *[sent(c.averaged(False)) for c in cases])
    own = [PerRank([sent(c.of(r)) for r in range(2)]) for c in cases]
    run = ranks(play_two, 2, "ShardedOptimizer", *own)
    line = ranks.definition("ShardedOptimizer")
    for rank in range(2):
        kinds, *found = run.values[rank]
        if not all(kinds):
            fail(
                expected="a subclass of torch.optim.Optimizer",
                found="another class",
                line=line,
                perhaps="schedulers, GradScaler and many others take nothing but an Optimizer",
            )
        for number, case in enumerate(cases):
            for i, (wanted, got) in enumerate(zip(single[number + 1], found[number], strict=True)):
                wrong = difference(got, Expect(wanted, torch.float64, 64, 10.0))
                if wrong:
                    fail(
                        case=f"{case.optimizer}, by turns with another optimizer",
                        expected=f"parameter {i} on rank {rank}: {wrong[0]}",
                        found=wrong[1],
                        line=line,
                        perhaps="what belongs to one optimizer is kept in the class, or in a global",
                    )
    expect_nothing_left(run)


# ---------------------------------------------------------------------------------------------------------- state_dict


def state_case(rng: torch.Generator, p: int, kind: dict, rest: list[tuple]) -> Case:
    """Two groups that interleave, two steps of which one leaves parameter 4 out, and what follows."""
    start = tensors(rng)
    program = [("step", gradients(rng, start, p, {r: [4] for r in range(p)})), ("step", gradients(rng, start, p))]
    groups = [([0, 2, 4], {"lr": 0.03, "weight_decay": 0.2}), ([5, 1, 3], {})]
    return Case(f"{kind['optimizer']}, two groups", start, [*program, *rest], groups=groups, **kind)


@check("state_dict", "the full state on every rank, in the plain optimizer's format", weight=5)
def test_state_dict_format(ranks, rng):
    batches = []
    for p in (3, 2, 1):
        rest = [("set", 0, {"lr": 0.07}), ("save",), ("look",)]
        batches.append(Batch([state_case(rng, p, kind, rest) for kind in OPTIMIZER_KINDS], p))
    start = tensors(rng, [(4,), (5,)])
    program = [("step", gradients(rng, start, 1, {0: [1]})), ("save",), ("look",)]
    batches[-1].cases.append(Case("parameter 1 has had no gradient", start, program, **ADAMW))
    start = tensors(rng, [(4,), (5,), (3,), (6,)])
    program = [("step", gradients(rng, start, 1)), ("add", [3], {"lr": 0.02}), ("add", [0], {})]
    program += [("step", gradients(rng, start, 1)), *rest]
    later = Case("two groups are added after a step", start, program, groups=[([1, 2], {})], **ADAMW)
    batches[-1].cases.append(later)
    batches.append(Batch([state_case(rng, 2, SGD, rest)], 4, [1, 3]))
    line = ranks.definition("ShardedOptimizer")
    for batch, (run, singles) in zip(batches, make_all(ranks, batches), strict=True):
        for number, (case, single) in enumerate(zip(batch.cases, singles, strict=True)):
            for rank in batch.members or range(batch.p):
                name = f"{case.name}, state_dict() on rank {rank} of {batch.members or batch.p}"
                expect_state(item(run.values[rank][number], "saved"), item(single, "saved"), name, line)


def item(looks: list[dict], kind: str) -> object:
    """The first thing of a kind that a rank handed back for a case."""
    return next(look[kind] for look in looks if kind in look)


@check("state_dict", "a plain optimizer goes on from it", weight=3)
def test_state_dict_to_plain(ranks, rng):
    cases, wanted = [], []
    for kind in OPTIMIZER_KINDS:
        case = state_case(rng, 2, kind, [("save",), ("look",)])
        case.perhaps = "the plain optimizer loads this state and goes on otherwise: it is not its own format"
        rest = gradients(rng, case.tensors, 1)  # the same on both ranks: the plain optimizer averages nothing
        program = [("plain",), ("step", rest * 2), ("look",)]
        cases.append(replace(case, program=[*case.program, *program]))
        wanted.append(replace(case, program=[*case.program, ("again",), ("step", rest * 2), ("look",)]).averaged(False))
    make(ranks, cases, 2, wanted=wanted)


def resumed(case: Case, name: str, looks: list[dict], rest: list[tuple]) -> tuple[Case, Case]:
    """A case that loads what another one saved and goes on; and what one device does, from the start to the end."""
    saved, start = unpacked(item(looks, "saved")), item(looks, "parameters")
    later = Case(f"{case.name}, {name}", start, [("load", saved), *rest], case.optimizer, case.options, case.groups)
    before = case.averaged(False)
    first = [step for step in before.program if step[0] not in ("save", "look")]
    return later, replace(before, program=first + later.averaged(False).program[1:])


@check("state_dict", "it loads on another number of ranks", weight=4)
def test_state_dict_other_world(ranks, rng):
    rest = [("set", 1, {"lr": 0.02, "weight_decay": 0.05}), ("save",), ("look",)]
    cases = [state_case(rng, 3, kind, rest) for kind in OPTIMIZER_KINDS]
    run = make(ranks, cases, 3)
    batches = []
    for p in (2, 4, 1):
        batches.append(Batch([], p, wanted=[]))
        for case, looks in zip(cases, run.values[0], strict=True):
            if isinstance(item(looks, "saved"), str):
                fail(expected="a state dict", found=item(looks, "saved"), line=ranks.definition("ShardedOptimizer"))
            name = f"saved on 3 ranks, loaded on {p}"
            later, wanted = resumed(case, name, looks, steps(rng, case.tensors, p, 2))
            later.perhaps = "on another number of ranks a rank owns other parameters: choose them from the full state; "
            later.perhaps += "learning rates come with it"
            batches[-1].cases.append(later)
            batches[-1].wanted.append(wanted)
    make_all(ranks, batches)


@check("state_dict", "a state of other groups is a ValueError; a fresh one clears what was there", weight=1)
def test_state_dict_refused(ranks, rng):
    cases = []
    for kind in (SGD, ADAMW):
        case = state_case(rng, 2, kind, [])
        old = case.averaged(False)
        full, fresh = (
            unpacked(item(looks, "saved"))
            for looks in reference([replace(old, program=[*before, ("save",)]) for before in (old.program, [])])
        )
        one, two = fresh["param_groups"]
        longer = [one, two | {"params": [3, 4, 5, 6]}]
        shifted = [one | {"params": [0, 1]}, two | {"params": [2, 3, 4, 5]}]
        refused = [("refused", fresh | {"param_groups": other}) for other in ([one], [], longer, shifted)]
        again = [("load", full), ("set", 1, {"lr": 0.01}), *steps(rng, case.tensors, 2, 2)]
        program = [*case.program, *refused, ("load", fresh), *steps(rng, case.tensors, 2, 2), *again]
        name = f"{case.name}: a state without entries is loaded, then a full one"
        cases.append(replace(case, name=name, program=program))
        cases[-1].perhaps = (
            "after load_state_dict the state is what was loaded, nothing of what was there before, and what is set in "
            "the wrapper's groups afterwards still reaches the inner optimizer"
        )
    make(ranks, cases, 2)
    start = [values(rng, (n,), torch.bfloat16) for n in (6, 3)]
    program = [("step", gradients(rng, start, 1)), ("save",)]
    state = unpacked(item(reference([Case("", start, program, **ADAMW).averaged(False)])[0], "saved"))
    for entry in state["state"].values():
        entry["step"] += 1000.0  # a bfloat16 number has no room for 1001
    name = "a state of bfloat16 parameters, loaded and saved"
    case = Case(name, start, [("load", state), ("save",), ("look",)], **ADAMW)
    run = make(ranks, [case], 2)
    for rank in (0, 1):
        saved = item(run.values[rank][0], "saved")
        steps_taken = [float(entry["step"]) for _, entry in saved["state"]]
        if steps_taken != [1001.0, 1001.0]:
            fail(
                case=case.name,
                expected=f"the number of steps, 1001, in state_dict() on rank {rank}",
                found=f"{steps_taken}",
                line=ranks.definition("ShardedOptimizer"),
                perhaps="moments may take the parameter's dtype; `step` counts, and stays float32",
            )


@check("state_dict", "a plain optimizer's state loads, and a rank keeps its own part of it", weight=4)
def test_state_dict_from_plain(ranks, rng):
    before = [state_case(rng, 3, kind, [("set", 0, {"lr": 0.05}), ("save",), ("look",)]) for kind in OPTIMIZER_KINDS]
    cases, wanted = [], []
    for case, looks in zip(before, reference([c.averaged(False) for c in before]), strict=True):
        later, single = resumed(case, "a plain optimizer's state", looks, steps(rng, case.tensors, 3, 2))
        later.perhaps = "learning rates come with the state, and each rank takes its parameters' part of it"
        cases.append(later)
        wanted.append(single)
    make(ranks, cases, 3, wanted=wanted)
    start = [values(rng, (3000,), torch.float32) for _ in range(8)]
    options = {"lr": 0.01, "amsgrad": True}
    case = Case("", start, [("step", gradients(rng, start, 1)[0]), ("save",)], "Adam", options)
    saved = unpacked(item(reference([case])[0], "saved"))
    expect_state_memory(ranks, rng, "ShardedOptimizer", 4, saved, start)


# --------------------------------------------------------------------------------------------------------------- zero2


@check("zero2", "the parameters are the plain optimizer's, on every rank", weight=4)
def test_zero2_values(ranks, rng):
    expect_plain(ranks, rng, "ZeroOptimizer")


@check("zero2", "a reduce-scatter and an all-gather for each dtype, and no byte more", weight=4)
def test_zero2_traffic(ranks, rng):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float64, torch.float32, torch.float16]
    for p in (4, 3):
        start = [values(rng, (n,), dtype) for n, dtype in zip((50, 31, 7, 12, 90, 8), dtypes, strict=True)]
        groups = [([0, 3, 4, 5], {"lr": 0.01}), ([2, 1], {})]
        name, absent = "three dtypes in two groups, and a frozen one; one step", {r: [5] for r in range(p)}
        program = steps(rng, start, p, 1, absent=absent)
        case = Case(name, start, program, "SGD", {"lr": 0.1}, groups, frozen=frozenset([5]))
        run = make(ranks, [case], p, "ZeroOptimizer")
        for rank in range(p):
            calls = [e for e in run.in_case(0) if e.rank == rank and e.op not in ("barrier", *MARKS)]
            expect_two_collectives(calls, start[:5], p, rank, case.name, ranks.definition("ZeroOptimizer"))


@check("zero2", "a rank holds 1/N of the state, and no full gradients after a step", weight=4)
def test_zero2_memory(ranks, rng):
    expect_state_memory(ranks, rng, "ZeroOptimizer", 4)
    start = [values(rng, (n,), torch.float32) for n in (20_000, 10, 3_000, 6_990)]  # one is most of the model
    expect_state_memory(ranks, rng, "ZeroOptimizer", 3, start=start)


@check("zero2", "groups with their own options, and schedulers", weight=3)
def test_zero2_groups(ranks, rng):
    make(ranks, group_cases(rng, 3) + schedule_cases(rng, 3), 3, "ZeroOptimizer")


@check("zero2", "missing gradients count as zero; frozen, few and empty parameters", weight=3)
def test_zero2_missing(ranks, rng):
    make(ranks, missing_cases(rng) + few_cases(rng), 3, "ZeroOptimizer")


@check("zero2", "a closure, a group of some of the ranks, zero_grad", weight=2)
def test_zero2_closure(ranks, rng):
    start = tensors(rng)
    cleared = Case("zero_grad after a step", start, [("step", gradients(rng, start, 3)), ("zero",)], **SGD)
    make_all(ranks, [Batch([*closure_cases(rng), cleared], 3), subgroup(rng, [1, 3])], "ZeroOptimizer")


@check("zero2", "tensors that are not contiguous, three dtypes, a GPT with tied weights", weight=2)
def test_zero2_kinds(ranks, rng):
    expect_kinds(ranks, rng, "ZeroOptimizer")
    expect_gpt(ranks, rng, "ZeroOptimizer")


@check("zero2", "it goes on from its own state", weight=2)
def test_zero2_state(ranks, rng):
    cases = []
    for kind in OPTIMIZER_KINDS:
        start = tensors(rng)
        program = [("step", gradients(rng, start, 3)), ("set", 0, {"lr": 0.04}), ("save",), ("again",), ("look",)]
        program += [*steps(rng, start, 3, 2), ("set", 0, {"lr": 0.02}), *steps(rng, start, 3, 1)]
        case = Case(f"{kind['optimizer']}, saved, made anew and loaded", start, program, **kind)
        case.perhaps = "after load_state_dict moments and options, the learning rate too, are those that were saved"
        program = [("save",), *steps(rng, start, 3, 2), ("back",), *steps(rng, start, 3, 2)]
        fresh = Case(f"{kind['optimizer']}, a state from before the first step is loaded", start, program, **kind)
        fresh.perhaps = "after load_state_dict the state is what was loaded, and nothing of what was there before"
        cases += [case, fresh]
    run = make(ranks, cases, 3, "ZeroOptimizer")
    for span in (e for e in run.events if e.op == "span"):
        inside = [e for e in run.of(span.rank) if e.is_collective and span.order < e.order < span.done_order]
        if inside:
            fail(
                expected="state_dict() of a ZeroOptimizer sends nothing: it is the shard's own state",
                found=f"{inside[0]} (rank {span.rank})",
                line=inside[0],
            )


# -------------------------------------------------------------------------------------------------------------- ledger


STAGES = {
    1: "stage 1 divides master copy and moments; parameters and gradients are whole",
    2: "stage 2 divides the gradients, too; the parameters are whole",
    3: "stage 3 divides everything",
}


@check("ledger", "7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB", weight=4)
def test_ledger_published(ranks):
    wanted = [120e9, 31.40625e9, 16.640625e9, 1.875e9]
    expect_ledger(ranks, [([7.5e9, 64, stage], {}, n, STAGES.get(stage)) for stage, n in enumerate(wanted)])


@check("ledger", "other models, other numbers of bytes, and what is no stage", weight=4)
def test_ledger_others(ranks, rng):
    table = []
    for p in (1, 2, 3, 8):
        n = 840 * int(torch.randint(1, 10**6, (), generator=rng))
        w, g, c, m = torch.randint(1, 9, (4,), generator=rng).tolist()
        options = {"param_bytes": w, "grad_bytes": g, "master_bytes": c, "moment_bytes": m}
        wanted = [n * (w + g + c + m), n * (w + g) + n * (c + m) / p, n * w + n * (g + c + m) / p]
        wanted.append(n * (w + g + c + m) / p)
        table += [([n, p, stage], options, value, STAGES.get(stage)) for stage, value in enumerate(wanted)]
        fp32 = {"param_bytes": 4, "grad_bytes": 4, "master_bytes": 0}
        table.append(([n, p, 1], fp32, n * 8 + n * 8 / p, STAGES[1]))
    table += [([10, 2, stage], {}, "ValueError", "there are stages 0 to 3") for stage in (4, -1)]
    hint = "there is no group of 0 ranks, in whatever stage"
    table += [([10, p, stage], {}, "ValueError", hint) for p, stage in ((0, 0), (0, 1), (0, 3), (-1, 2))]
    expect_ledger(ranks, table)
