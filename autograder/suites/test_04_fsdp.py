"""The public checks of module 04: fully sharded data parallelism.

`fsdp_calls` has the models, plays them on ranks and on one device, and compares. A model's layers report from inside
their forward and backward, so that it is seen which values they compute with, which collectives came before, and how
many bytes are held at that moment.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from autograder.lab import gpt, memory
from autograder.lab.ranks import OPTIMIZERS
from autograder.suites.fsdp_calls import (
    Case,
    Played,
    checkpointed_bytes,
    checkpointed_gradients,
    foreign_unit,
    judge,
    listed,
    make,
    marks,
    of_unit,
    on_ranks,
    play,
    repeated,
    shard_all,
    shard_mixed,
    step_events,
)
from autograder.suites.fsdp_judging import (
    SMALL,
    expect_ahead,
    expect_bounded,
    expect_flat,
    expect_flat_bytes,
    expect_norm,
    expect_order,
    expect_state,
    expect_traffic,
    flat_cases,
    shards,
)
from autograder.suites.fsdp_models import ROOT, Chain, chain, drawing, of_all_kinds, tie_across, two_dtypes, unit_sizes
from autograder.suites.kit import Expect, Module, Problem, check, difference, expect_nothing_left, fail, timeline

INSTEAD = "it is what this module builds; an all-gather and a reduce-scatter are enough"
MODULE = Module(
    "04_fsdp",
    "Fully sharded data parallelism",
    files=["fsdp.py"],
    problems=[
        Problem("flat_shard", 14, "One flat buffer, cut into shards", "A shard"),
        Problem("forward_backward", 24, "Gather, compute, free", "The order of events"),
        Problem("gradients", 18, "Gradients go to their owners", "Gradients"),
        Problem("prefetch", 10, "Gather ahead", "Prefetch"),
        Problem("mixed_precision", 12, "Compute in bf16, update in fp32", "Mixed precision"),
        Problem("clip_and_save", 14, "The norm and the state of the whole model", "The whole model"),
        Problem("checkpointing", 8, "Activations computed again", "Activations"),
    ],
    refused_names={
        "torch.distributed.fsdp.fully_shard": INSTEAD,
        "torch.distributed.fsdp.FullyShardedDataParallel": INSTEAD,
    },
    preload=(*OPTIMIZERS, "torch.utils.checkpoint", "torch.distributed.fsdp", "autograder.lab.live"),
)


# --------------------------------------------------------------------------------------------------------- flat_shard


@check("flat_shard", "each rank has its part, and unshard gives all of them", weight=4)
def test_flat_shard_values(ranks, rng):
    for n in (3, 1):
        expect_flat(ranks, rng, n)


@check("flat_shard", "only the shard stays: ceil(S/N) bytes, measured", weight=4)
def test_flat_shard_bytes(ranks, rng):
    cases = flat_cases(rng)
    run = on_ranks(ranks, "FlatShard", shard_all, 4, cases, None)
    expect_flat_bytes(ranks, run, cases, 4)


@check("flat_shard", "unshard is one all_gather", weight=2)
def test_flat_shard_traffic(ranks, rng):
    run = expect_flat(ranks, rng, 2)
    for number, (name, tensors, _) in enumerate(flat_cases(rng)):
        total = sum(t.numel() for t in tensors)
        for rank in (0, 1):
            events = timeline(run, rank, number)
            first = marks(events, "unshard")[0]
            calls = [e for e in events if e.is_collective and first.order < e.order < first.done_order]
            if len(calls) == 1 and of_unit(calls[0], "all_gather", total, 2):
                continue
            fail(
                case=f"{name}: {total} elements on 2 ranks",
                expected=f"unshard is one all_gather of {2 * shards(total, 2)} elements",
                found=listed(calls) or "nothing is sent",
                line=calls[-1] if calls else ranks.definition("FlatShard"),
            )


@check("flat_shard", "a group of some of the ranks", weight=2)
def test_flat_shard_subgroup(ranks, rng):
    expect_flat(ranks, rng, 3, members=[0, 2])


@check("flat_shard", "parameters of several dtypes are a ValueError", weight=1)
def test_flat_shard_dtypes(ranks, rng):
    run = ranks(shard_mixed, 1, [drawing(rng, torch.float32)(3), drawing(rng, torch.bfloat16)(3)])
    if run.values[0] != "ValueError":
        fail(
            expected="a ValueError for parameters of float32 and bfloat16",
            found="no error",
            line=ranks.definition("FlatShard"),
            perhaps="torch.cat promotes them all to the widest, silently: twice the bytes",
        )


# --------------------------------------------------------------------------------------------------- forward_backward

STEP, UPDATE, EVAL = ("step",), ("update",), ("eval",)
TWO_STEPS = [STEP, UPDATE, STEP, UPDATE, EVAL]
KEEP, AHEAD, BF16 = {"reshard_after_forward": False}, {"prefetch": True}, {"param_dtype": torch.bfloat16}


def one_case(
    rng: torch.Generator, world_size: int, name: str, program: list, model: Callable = chain, **fields
) -> Case:
    """The same program on every rank, each with inputs and initial weights of its own."""
    models = [model(rng) for _ in range(world_size)]
    dtype = next(models[0].parameters()).dtype
    return Case(name, models, repeated(rng, world_size, program, dtype), **fields)


@check("forward_backward", "two steps are those of one device on the whole batch", weight=4)
def test_forward_backward_values(ranks, rng):
    for n in (3, 1):
        cases = [
            one_case(rng, n, "two steps", TWO_STEPS),
            one_case(rng, n, "two steps, reshard_after_forward=False", TWO_STEPS,
                     settings={"reshard_after_forward": False}),
        ]  # fmt: skip
        make(ranks, cases, n)


@check("forward_backward", "the padded last shard moves like the others", weight=2)
def test_forward_backward_padding(ranks, rng):
    def model(rng: torch.Generator) -> Chain:
        return chain(rng, torch.float32, (1, 2, 4))

    make(ranks, [one_case(rng, 4, "units of 17, 28 and 50 elements, float32", TWO_STEPS, model, terms=2000)], 4)


def expect_in_two_steps(ranks: Callable, rng: torch.Generator, expect: Callable, world_size: int, **settings) -> None:
    """What is expected of the order or the bytes of a step holds in the first one and in the second."""
    cases = [
        one_case(rng, world_size, f"two steps{name}", [STEP, UPDATE, STEP], settings=settings | keep)
        for name, keep in (("", {}), (", reshard_after_forward=False", KEEP))
    ]
    run = make(ranks, cases, world_size)
    for number, case in enumerate(cases):
        for step in (0, 1):
            expect(ranks, run, case, number, step)


@check("forward_backward", "gather before forward, again before backward, scatter after", weight=4)
def test_forward_backward_order(ranks, rng):
    expect_in_two_steps(ranks, rng, expect_order, 2)


@check("forward_backward", "3(N-1)/N·S bytes a step, 2(N-1)/N·S without freeing", weight=3)
def test_forward_backward_traffic(ranks, rng):
    expect_in_two_steps(ranks, rng, expect_traffic, 4)


def wide(rng: torch.Generator) -> Chain:
    """Six equal units of 33 KB: next to them activations are small. Every other one gets its input by keyword."""
    model = Chain(drawing(rng, torch.float32), 64, [64] * 6)
    model.by_keyword = True
    return model


def measured(
    rng: torch.Generator, world_size: int, name: str, program: list, frozen_units: bool = False, **fields
) -> Case:
    models = [wide(rng) for _ in range(world_size)]
    for model in models:
        model.layers.requires_grad_(not frozen_units)
    return Case(name, models, repeated(rng, world_size, program, torch.float32, 64), measured=True, **fields)


REST = ("rest",)


def expect_resident(ranks: Callable, rng: torch.Generator, settings: dict) -> None:
    """Between steps 1/N of the parameters is held, and of the gradients where there are any."""
    n, keep = 3, settings == KEEP  # what a forward under no_grad leaves gathered is open there
    case = measured(rng, n, "one step", [REST, STEP, REST, *([] if keep else [UPDATE, EVAL, REST])], settings=settings)
    run = play(ranks, [case], n)
    sizes = unit_sizes(case.models[0])
    whole = 4 * sum(sizes.values())
    buffers = sum(b.nbytes for b in case.models[0].buffers())
    mine = sum(4 * shards(numel, n) for numel in sizes.values())
    for rank in range(n):
        steps = run.values[rank][0]
        for at, limit, what in (
            (0, mine, "after construction"),
            (2, 2 * mine, "after backward, with the gradients' shards,"),
            (5, mine, "after a forward under no_grad"),
        ):
            if at >= len(steps):
                continue
            found = steps[at]["held"] - buffers
            if found <= limit + 0.05 * whole:
                continue
            fail(
                case=f"{case.name}, {', '.join(f'{k}={v}' for k, v in settings.items()) or 'plain'}, {n} ranks",
                expected=f"{limit} bytes {what} on rank {rank}: 1/N of {whole}, for each kind",
                found=f"{found} bytes",
                line=ranks.definition("FSDP"),
                perhaps="nothing is sharded: does every unit of the list get its shard, whatever its class is?"
                if found >= 0.9 * whole * (1 if at != 2 else 2)
                else "some of the full parameters or gradients stay alive: a view of them is enough for that",
            )


@check("forward_backward", "between steps only shards are held, measured", weight=3)
def test_forward_backward_resident(ranks, rng):
    expect_resident(ranks, rng, {})
    expect_resident(ranks, rng, KEEP)


@check("forward_backward", "never more than one unit is gathered, measured", weight=4, section="A shard")
def test_forward_backward_live(ranks, rng):
    boxed = ("step", {"boxed": True})
    cases = [
        measured(rng, 2, "two steps of six equal units", [REST, STEP, REST, STEP, REST]),
        measured(rng, 2, "two steps, units called with a list in a dict", [REST, boxed, REST, boxed, REST]),
        measured(rng, 2, "two steps of six equal units, frozen", [REST, STEP, REST, STEP, REST], frozen_units=True),
    ]
    run = play(ranks, cases, 2)
    for number, case in enumerate(cases):
        expect_bounded(ranks, run, case, number)


@check("forward_backward", "the first rank's weights and buffers; a group of some of the ranks", weight=2)
def test_forward_backward_subgroup(ranks, rng):
    make(ranks, [one_case(rng, 2, "a group of ranks [1, 3]", TWO_STEPS, of_all_kinds)], 4, members=[1, 3])


@check("forward_backward", "evaluation, and a forward without a backward, leave nothing old behind", weight=3)
def test_forward_backward_without(ranks, rng):
    programs = [
        ("no_grad, a step, no_grad", [EVAL, STEP, UPDATE, EVAL, EVAL]),
        ("a step, a forward without backward, the update", [STEP, ("forward",), ("forget",), UPDATE, EVAL, STEP, UPDATE,
                                                            EVAL]),
        ("two forwards, one backward of both", [("forward",), ("forward",), ("backward",), UPDATE, EVAL]),
        ("no_grad between a forward and its backward", [("forward",), EVAL, ("backward",), UPDATE, EVAL]),
    ]  # fmt: skip
    for keep in (False, True):
        settings = {"reshard_after_forward": not keep}
        perhaps = "what an earlier forward gathered is old after the optimizer's step: gather anew in every forward"
        cases = [
            one_case(rng, 2, f"{name}, reshard_after_forward={not keep}", program, settings=settings, perhaps=perhaps)
            for name, program in programs[keep:]
        ]
        make(ranks, cases, 2)


@check("forward_backward", "a unit that is used twice, one that is not used", weight=3)
def test_forward_backward_twice(ranks, rng):
    def program(order: list[int]) -> list:
        return [("step", {"order": order}), UPDATE, ("step", {"order": order}), UPDATE, EVAL]

    cases = []
    for order, keep in (([0, 1, 0, 2], False), ([0, 1, 0, 2], True), ([0, 0, 2], False)):
        perhaps = (
            "does the second use find the unit gathered, and do the gradients of both uses count? Hooks on one tensor "
            "run in the order in which they were registered: give each use an input of its own (x.view_as(x))"
        )
        name = f"units in the order {order}" + (", reshard_after_forward=False" if keep else "")
        settings = {"reshard_after_forward": not keep}
        cases.append(one_case(rng, 2, name, program(order), settings=settings, perhaps=perhaps))
    make(ranks, cases, 2)


@check("forward_backward", "units take and return tuples and dicts; the gradient of the model's input", weight=2)
def test_forward_backward_outputs(ranks, rng):
    perhaps = (
        "a unit's backward begins with the first gradient of any of its outputs, and has ended when the gradients of "
        "its inputs are there, also of those in lists and dicts"
    )
    cases = []
    for name, option in (("that return a tensor and a dict", "aside"), ("called with a list in a dict", "boxed")):
        step = ("step", {option: True, "asked": True})
        cases.append(one_case(rng, 2, f"units {name}", [step, UPDATE, step, UPDATE, EVAL], perhaps=perhaps))
    make(ranks, cases, 2)


def expect_foreign_unit(ranks: Callable, rng: torch.Generator, name: str) -> None:
    run = ranks(foreign_unit, 1, chain(rng), chain(rng))
    found = run.values[0][("FSDP", "checkpoint_units").index(name)]
    if found != "a ValueError":
        fail(
            case=f"{name}(module, units), one unit of another model",
            expected="a ValueError",
            found=found,
            line=ranks.definition(name),
            perhaps="it would be computed and never seen: its parameters are not the module's",
        )


@check("forward_backward", "a unit of another model is a ValueError", weight=1)
def test_forward_backward_foreign(ranks, rng):
    expect_foreign_unit(ranks, rng, "FSDP")


# ---------------------------------------------------------------------------------------------------------- gradients


@check("gradients", "only shards of gradients are left, in the shards' shape", weight=3)
def test_gradients_sharded(ranks, rng):
    n = 3
    case = one_case(rng, n, "one step", [STEP, ("look",)])
    part = one_case(rng, n, "a frozen unit", [STEP, ("look",)], lambda rng: frozen(rng, ("layers.1",)))
    run = make(ranks, [case, part], n)
    sizes = unit_sizes(case.models[0])
    mine, padding = sum(shards(numel, n) for numel in sizes.values()), len(sizes)
    whole = sum(sizes.values())
    for number, each in enumerate((case, part)):
        found = [sum(p.numel() for p, _ in run.values[rank][number][1]["shards"]) for rank in range(n)]
        if sum(found) < whole:
            fail(
                case=each.name,
                expected=f"parameters() of all ranks together have the {whole} elements of the model, frozen ones too",
                found=f"{found} elements",
                line=ranks.definition("FSDP"),
            )
    for rank in range(n):
        found = run.values[rank][0][1]["shards"]
        total = sum(p.numel() for p, _ in found)
        if not total <= mine + padding or any(p.ndim != 1 for p, _ in found):
            fail(
                case=case.name,
                expected=f"parameters() are 1-D shards, {mine} of {whole} elements on rank {rank}",
                found=f"{len(found)} tensors of {total} elements, shapes {[list(p.shape) for p, _ in found][:6]}",
                line=ranks.definition("FSDP"),
                perhaps="parameters() of a wrapper finds those of the module in it: override named_parameters",
            )
        for p, gradient in found:
            if not isinstance(gradient, Tensor) or gradient.shape != p.shape or gradient.dtype != p.dtype:
                fail(
                    case=case.name,
                    expected=f"after backward, the gradient of a shard of {p.numel()} elements, of the same shape",
                    found="none" if gradient is None else f"shape {list(gradient.shape)}, {gradient.dtype}",
                    line=ranks.definition("FSDP"),
                )


@check("gradients", "micro-batches are added up until the optimizer's step", weight=4)
def test_gradients_accumulation(ranks, rng):
    program = [STEP, STEP, STEP, UPDATE, STEP, STEP, UPDATE, EVAL]
    perhaps = (
        "each backward adds its own gradients to shard.grad, once: one that writes it keeps the last micro-batch only, "
        "and full gradients that are not cleared count again"
    )
    make(ranks, [one_case(rng, 3, "three micro-batches, then two", program, perhaps=perhaps)], 3)


def frozen(rng: torch.Generator, names: tuple[str, ...]) -> Chain:
    model = chain(rng)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(names))
    return model


@check("gradients", "frozen parameters stay, in a unit, as a unit, in the root", weight=4)
def test_gradients_frozen(ranks, rng):
    cases = []
    for name, names in (
        ("a frozen weight in each of two units", ("layers.0.up", "layers.1.bias")),
        ("a frozen unit in the middle", ("layers.1",)),
        ("all but the last unit and the head frozen", ("scale", "layers.0", "layers.1")),
        ("a frozen head", ("head",)),
    ):
        perhaps = (
            "weight decay moves what has a gradient, zeros too: frozen parameters need a shard of their own; and "
            "gradients go through a frozen unit to those before it"
        )
        cases.append(
            one_case(rng, 2, name, TWO_STEPS, lambda rng, names=names: frozen(rng, names), decay=0.1, perhaps=perhaps)
        )
    make(ranks, cases, 2)


@check("gradients", "unused parameters, on one rank or on all; an unused unit", weight=3)
def test_gradients_unused(ranks, rng):
    cases = []
    for name, bare in (
        ("a parameter of unit 1 is unused", [(1,), (1,)]),
        ("a parameter of unit 1 is unused on rank 0", [(1,), ()]),
    ):
        case = one_case(rng, 2, name, [STEP, STEP, UPDATE, STEP, UPDATE, EVAL])
        for program, unused in zip(case.programs, bare, strict=True):
            for k in (0, 3):  # the others use it
                program[k] = ("step", program[k][1], {"bare": unused})
        case.perhaps = "a parameter without a gradient counts as zeros, and all ranks must send the same"
        cases.append(case)
    order = {"order": [0, 2]}
    program = [("step", order), UPDATE, STEP, UPDATE, ("step", order), UPDATE, EVAL]
    cases.append(one_case(rng, 2, "unit 1 is not used in the first and the third step", program))
    make(ranks, cases, 2)


@check("gradients", "tied parameters, in one unit and across units", weight=3)
def test_gradients_tied(ranks, rng):
    def head(rng: torch.Generator) -> Chain:
        model = chain(rng)
        model.layers[1].down = model.layers[1].up = torch.nn.Parameter(drawing(rng)(5, 5))
        model.layers[1].spare = torch.nn.Parameter(drawing(rng)(5))
        return model

    perhaps = (
        "a tied weight has one gradient, the sum over its uses: it belongs to one shard, counts and moves once. One "
        "that two units share is the root's: else one of them frees it while the other computes"
    )
    cases = [
        one_case(rng, 2, "a weight used twice in a unit", TWO_STEPS, head, perhaps=perhaps),
        one_case(rng, 2, "a bias that two units share", TWO_STEPS, lambda rng: tie_across(chain(rng)), perhaps=perhaps),
        one_case(rng, 2, "the same, gathered ahead", TWO_STEPS, lambda rng: tie_across(chain(rng)), perhaps=perhaps,
                 settings={"prefetch": True}),
    ]  # fmt: skip
    make(ranks, cases, 2)


@check("gradients", "a unit of several dtypes", weight=2)
def test_gradients_dtypes(ranks, rng):
    cases = [
        one_case(rng, 3, "float32 and float64 in each unit", TWO_STEPS, two_dtypes, terms=10**10),
        one_case(rng, 3, "the float32 one of unit 1 is unused on rank 0", TWO_STEPS, two_dtypes, terms=10**10),
    ]
    cases[1].perhaps = "a parameter without a gradient counts as zeros, and all ranks must send the same"
    cases[1].programs[0][0][-1]["bare"] = (1,)
    for program in cases[0].programs:
        program.append(("look",))
    names = make(ranks, cases, 3).values[0][0][-1]["names"]
    if len(set(names)) < len(names):
        fail(
            case=cases[0].name,
            expected="named_parameters() has a name of its own for each shard",
            found=f"{names}",
            line=ranks.definition("FSDP"),
        )


# ----------------------------------------------------------------------------------------------------------- prefetch


@check("prefetch", "in forward, the next unit is on its way while this one computes", weight=3)
def test_prefetch_forward(ranks, rng):
    cases = [
        one_case(rng, 2, "two steps", [STEP, UPDATE, STEP, EVAL], settings=AHEAD),
        one_case(rng, 2, "one step, reshard_after_forward=False", [STEP], settings=AHEAD | KEEP),
        one_case(rng, 2, "one step, units of two dtypes", [STEP], two_dtypes, settings=AHEAD, terms=10**10),
    ]
    run = make(ranks, cases, 2)
    for number, case in enumerate(cases):
        expect_ahead(ranks, run, case, number, "forward")
    expect_ahead(ranks, run, cases[0], 0, "forward", step=1)
    expect_ahead(ranks, run, cases[0], 0, "forward", of="eval")


@check("prefetch", "in backward, the previous one", weight=3)
def test_prefetch_backward(ranks, rng):
    cases = [
        one_case(rng, 2, "two steps", [STEP, UPDATE, STEP], settings=AHEAD),
        one_case(rng, 2, "one step, units of two dtypes", [STEP], two_dtypes, settings=AHEAD, terms=10**10),
    ]
    run = make(ranks, cases, 2)
    for number, case in enumerate(cases):
        expect_ahead(ranks, run, case, number, "backward")
    expect_ahead(ranks, run, cases[0], 0, "backward", step=1)


@check("prefetch", "what is gathered ahead is not gathered again: as many bytes as without", weight=2)
def test_prefetch_traffic(ranks, rng):
    expect_in_two_steps(ranks, rng, expect_traffic, 2, **AHEAD)


@check("prefetch", "a group of some of the ranks", weight=1)
def test_prefetch_subgroup(ranks, rng):
    make(ranks, [one_case(rng, 2, "a group of ranks [1, 3]", TWO_STEPS, settings=AHEAD)], 4, members=[1, 3])


@check("prefetch", "the values stay what they are, whatever order the units come in", weight=3)
def test_prefetch_values(ranks, rng):
    cases = []
    for order, keep in (([0, 2], False), ([0, 2], True), ([2, 1, 0], False), ([0, 1, 0, 2], False)):
        used = {"order": order}
        last = ("step" if keep else "eval", used)  # nothing comes after it that would wait for what it has started
        program = [EVAL, ("step", used), ("forward",), ("forget",), UPDATE, STEP, UPDATE, EVAL, last]
        name = f"units in the order {order}" + (", reshard_after_forward=False" if keep else "")
        perhaps = "what was gathered ahead and not used is old in the next step: wait for it and free it"
        settings = AHEAD | {"reshard_after_forward": not keep}
        cases.append(one_case(rng, 2, name, program, settings=settings, perhaps=perhaps))
    make(ranks, cases, 2)


@check("prefetch", "never more than two units are gathered, and none between steps, measured", weight=2)
def test_prefetch_live(ranks, rng):
    cases = [
        measured(rng, 2, f"two steps of six equal units{name}", [REST, STEP, REST, STEP, REST], settings=AHEAD,
                 frozen_units=bool(name))
        for name in ("", ", frozen")
    ]  # fmt: skip
    run = play(ranks, cases, 2)
    for number, case in enumerate(cases):
        expect_bounded(ranks, run, case, number, most=2)
    expect_resident(ranks, rng, AHEAD)


# ---------------------------------------------------------------------------------------------------- mixed_precision

CAST = "parameters are gathered in param_dtype, and floating inputs of the module and of each unit are cast to it"


def chain32(rng: torch.Generator) -> Chain:
    return chain(rng, torch.float32)


@check("mixed_precision", "layers compute in bf16, with weights rounded from the fp32 ones", weight=3)
def test_mixed_precision_values(ranks, rng):
    cases = [
        one_case(rng, 2, "a forward", [EVAL, ("step", {}), EVAL], chain32, settings=BF16, perhaps=CAST),
        one_case(rng, 2, "a forward, gathered ahead", [EVAL], chain32, settings=BF16 | AHEAD, perhaps=CAST),
        one_case(rng, 2, "a forward of a float64 model", [EVAL], settings=BF16, perhaps=CAST),
    ]
    make(ranks, cases, 2)


@check("mixed_precision", "floating inputs are cast, whole numbers and buffers are not", weight=2)
def test_mixed_precision_inputs(ranks, rng):
    more = {"ids": [torch.arange(4)], "wide": [torch.ones(2), torch.ones(2, dtype=torch.float64)]}
    program = [("step", {"more": more})]
    name = "a step with a tensor of whole numbers; units called with x=..."
    case = one_case(rng, 2, name, program, chain32, settings=BF16, perhaps=CAST)
    for model in case.models:
        model.by_keyword = True
    run = play(ranks, [case], 2)
    for rank in (0, 1):
        for kind, i, tensors, _ in run.values[rank][0][0]["seen"]:
            if kind != "forward":
                continue
            for name, tensor in tensors.items():
                asked = {"ids 0": torch.int64, "offset": torch.float32}.get(name, torch.bfloat16)
                if tensor.dtype != asked:
                    where = "the module" if i == ROOT else f"unit {i}"
                    what = {
                        "x": "the input of", "ids 0": "a tensor of whole numbers for", "offset": "a buffer of",
                        "wide 0": "a float32 tensor in a list for", "wide 1": "a float64 tensor in a list for",
                    }  # fmt: skip
                    fail(
                        case=case.name,
                        expected=f"{what.get(name, f'the parameter {name} of')} {where} is {asked}",
                        found=f"{tensor.dtype} (rank {rank})",
                        line=ranks.definition("FSDP"),
                        perhaps=CAST,
                    )


@check("mixed_precision", "shards, their gradients and sums of gradients are fp32", weight=2)
def test_mixed_precision_shards(ranks, rng):
    case = one_case(rng, 2, "the same micro-batch, once and three times", [STEP, ("look",)], chain32, settings=BF16)
    case.programs = [[step, look, step, step, look] for step, look in case.programs]
    run = play(ranks, [case], 2)
    for rank in (0, 1):
        once, thrice = run.values[rank][0][1]["shards"], run.values[rank][0][4]["shards"]
        for (p, gradient), (_, total) in zip(once, thrice, strict=True):
            for what, tensor in (("shard", p), ("gradient", gradient), ("sum of gradients", total)):
                if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                    fail(
                        case=case.name,
                        expected=f"the {what} is float32",
                        found=f"{tensor.dtype if isinstance(tensor, Tensor) else tensor} (rank {rank})",
                        line=ranks.definition("FSDP"),
                        perhaps="only what is gathered is bf16: the optimizer's own numbers keep their precision",
                    )
            wrong = difference(total, Expect(3 * gradient, torch.float32, 100))
            if wrong:
                fail(
                    case=case.name,
                    expected=f"a gradient of a shard three times that of one micro-batch: {wrong[0]}",
                    found=f"{wrong[1]} (rank {rank})",
                    line=ranks.definition("FSDP"),
                    perhaps="add up in fp32: a sum in bf16 keeps 8 bits, and small terms vanish in it",
                )


@check("mixed_precision", "small updates are not lost: they arrive in fp32", weight=3)
def test_mixed_precision_masters(ranks, rng):
    steps = 6
    program = [*[STEP, UPDATE] * steps, ("look",)]
    case = one_case(rng, 2, f"{steps} small steps", program, chain32, settings=BF16, lr=2e-3)
    run = play(ranks, [case], 2)
    played = Played(case).model
    plain = torch.cat([p.detach().flatten() for p in played.parameters()])
    start = torch.cat([p.detach().flatten() for p in case.models[0].parameters()]).double()
    found = torch.cat([p.flatten() for rank in (0, 1) for p, _ in run.values[rank][0][-1]["shards"]]).double()
    padding = found.new_zeros(len(found) - len(plain))
    moved = float((plain - start).abs().max())
    off = (found.sort().values - torch.cat([plain, padding]).sort().values).abs()
    if float(off.max()) > 0.2 * moved:
        fail(
            case=f"{case.name}: weights move by up to {moved:.2g}",
            expected=f"all shards together are the weights of one device in fp32, to within {0.2 * moved:.2g}",
            found=f"one is off by {float(off.max()):.2g}; {int((off > 0.2 * moved).sum())} are off by too much",
            line=ranks.definition("FSDP"),
            perhaps="a bf16 number near 1 moves in steps of 2^-8: smaller updates vanish where weights are kept in it",
        )


@check("mixed_precision", "half the bytes are gathered", weight=2)
def test_mixed_precision_traffic(ranks, rng):
    n = 2
    case = one_case(rng, n, "one step", [STEP], chain32, settings=BF16)
    run = play(ranks, [case], n)
    sizes = unit_sizes(case.models[0])
    most = 2 * sum(n * shards(numel, n) for numel in sizes.values()) * 2 * (n - 1) // n + SMALL
    least = (2 * sum(sizes.values()) - sizes[ROOT]) * 2 * (n - 1) // n
    for rank in range(n):
        gathers = [e for e in step_events(run, rank, 0) if e.op == "all_gather"]
        for e in gathers:
            if e.dtype != "bfloat16":
                fail(
                    case=case.name,
                    expected="all_gathers of bfloat16",
                    found=f"one of {e.numel} elements of {e.dtype} (rank {rank})",
                    line=e,
                    perhaps="cast the shard before it is gathered, not the whole after",
                )
        sent = sum(e.sent for e in gathers)
        if not least <= sent <= most:
            fail(
                case=case.name,
                expected=f"each unit gathered for forward and again for backward: {least} to {most} bytes",
                found=f"{sent} bytes: {listed(gathers)} (rank {rank})",
                line=(gathers or [ranks.definition("FSDP")])[-1],
                perhaps="param_dtype changes what is gathered, not when: units are freed after forward as without it",
            )


@check("mixed_precision", "between steps only shards are held, measured", weight=1)
def test_mixed_precision_resident(ranks, rng):
    expect_resident(ranks, rng, BF16)


# ------------------------------------------------------------------------------------------------------ clip_and_save


def faint(rng: torch.Generator) -> Chain:
    """A chain whose outputs are so small that the norm of its gradient is less than 1e-6."""
    model = chain(rng)
    with torch.no_grad():
        model.head *= 1e-7
    return model


@check("clip_and_save", "the norm of the whole model's gradient, the same on all ranks", weight=3)
def test_clip_and_save_clip(ranks, rng):
    cases = []
    perhaps = "every gradient is multiplied by min(1, max_norm / (norm + 1e-6)), on every rank"
    for name, limits in (("clipped to 0.01", (0.01, 0.02)), ("not clipped", (1e3, 1e3))):
        program = [STEP, STEP, ("clip", limits[0]), UPDATE, STEP, ("clip", limits[1]), UPDATE, EVAL]
        cases.append(one_case(rng, 3, name, program, perhaps=perhaps, terms=10**9))
    program, used = [], {"order": [0, 2]}
    for limit in (0.01, 0.02):
        program += [("step", used), ("step", used), ("clip", limit), UPDATE]
    name = "unit 1 is not used"
    cases.append(one_case(rng, 3, name, [*program, EVAL], perhaps=perhaps, terms=10**9))
    program = [STEP, STEP, ("clip", 1e-8), UPDATE, STEP, ("clip", 1e-8), UPDATE, EVAL]
    cases.append(one_case(rng, 3, "small gradients", program, faint, perhaps=perhaps, terms=10**9, lr=1e6))
    mixed = [STEP, STEP, ("clip", 0.01), UPDATE, STEP, ("clip", 0.02), UPDATE, EVAL]
    cases.append(one_case(rng, 3, "parameters of two dtypes", mixed, two_dtypes, perhaps=perhaps, terms=10**10))
    run = play(ranks, cases, 3)
    for number, case in enumerate(cases):
        expect_norm(ranks, run, case, number, step=2)
    judge(ranks, run, cases)
    for number, case in enumerate(cases):
        expect_norm(ranks, run, case, number, step=6 if case.name == name else 5)
    expect_nothing_left(run)
    case = one_case(
        rng, 2, "a group of ranks [0, 2]", [STEP, ("clip", 0.01), UPDATE, EVAL], perhaps=perhaps, terms=10**9
    )
    make(ranks, [case], 3, members=[0, 2])


def state_model(rng: torch.Generator) -> Chain:
    model = frozen(rng, ("layers.2.up",))
    model.register_buffer("scratch", drawing(rng)(3), persistent=False)
    return tie_across(model)


@check("clip_and_save", "the full state dict on every rank: all names, buffers, tied and frozen weights", weight=4)
def test_clip_and_save_save(ranks, rng):
    for n, members in ((3, None), (2, [0, 2])):
        program = [STEP, UPDATE, ("save",), EVAL]
        case = one_case(rng, n, "a step, then full_state_dict", program, state_model)
        case.perhaps = "a tied weight has its value under each of its names"
        run = make(ranks, [case], n if members is None else 3, members)
        for step, wanted in enumerate(Played(case).steps):
            for rank in members or range(n):
                if wanted.state:
                    expect_state(ranks, case, run.values[rank][0][step]["state"], wanted.state, rank, "the state")


@check("clip_and_save", "saving and loading leave nothing gathered behind, measured", weight=1)
def test_clip_and_save_held(ranks, rng):
    case = measured(rng, 2, "full_state_dict, then load_full_state_dict", [])
    given = case.models[0].state_dict()
    case.programs = [[REST, ("save",), REST, ("load", given), REST] for _ in range(2)]
    run = play(ranks, [case], 2)
    state = sum(t.nbytes for t in given.values())
    whole = 4 * sum(unit_sizes(case.models[0]).values())
    for rank in (0, 1):
        before, _, saved, _, loaded = (step.get("held") for step in run.values[rank][0])
        for what, found, allowed, perhaps in (
            ("full_state_dict", saved, state, "what was gathered for it: free each unit when its values are copied"),
            (
                "load_full_state_dict",
                loaded,
                2 * state,
                "a slice of a full tensor keeps all of it: copy into the shard",
            ),
        ):
            if found - before - allowed > 0.05 * whole:
                fail(
                    case=case.name,
                    expected=f"after {what} no more is held than before, besides {allowed // state} states of {state} "
                    "bytes",
                    found=f"{found - before} bytes more (rank {rank})",
                    line=ranks.definition("FSDP"),
                    perhaps=perhaps,
                )


@check("clip_and_save", "a state of three ranks goes on on two, and in the plain module", weight=4)
def test_clip_and_save_load(ranks, rng):
    first = one_case(rng, 3, "a step on three ranks, then full_state_dict", [STEP, UPDATE, ("save",)], state_model)
    run = make(ranks, [first], 3)
    state = run.values[0][0][2]["state"]
    expect_state(ranks, first, state, Played(first).steps[2].state, 0, "the state")
    case = one_case(rng, 2, "the state of three ranks, loaded on two",
                    [STEP, ("load", state), ("eval",), ("save",), UPDATE, STEP, UPDATE, EVAL], state_model)  # fmt: skip
    case.perhaps = (
        "is every value copied, into the shards and buffers that are there? The optimizer goes on with the shards it "
        "has, and the caller with the state"
    )
    run = make(ranks, [case], 2)
    expect_state(ranks, case, run.values[1][0][3]["state"], Played(case).steps[3].state, 1, "the state")
    case = one_case(rng, 2, "loaded in a group of ranks [1, 2]", [("load", state), EVAL], state_model)
    case.perhaps = "which part is this rank's: by its number in the group, not among all ranks"
    make(ranks, [case], 3, members=[1, 2])


@check("clip_and_save", "a state that does not fit is a ValueError, and changes nothing", weight=1)
def test_clip_and_save_refused(ranks, rng):
    state, name, buffer = state_model(rng).state_dict(), "layers.2.down", "layers.2.offset"
    refused = {
        "a name is missing": {k: t for k, t in state.items() if k != name},
        "there is a name too many": state | {"more": torch.zeros(2)},
        "a tensor has another shape, of as many elements": state | {name: state[name].t()},
        "a buffer is missing": {k: t for k, t in state.items() if k != buffer},
        "a buffer has another shape": state | {buffer: state[buffer][:1]},
    }
    program = [*[("refused", other) for other in refused.values()], EVAL]
    case = one_case(rng, 2, "states that do not fit, then a forward", program, state_model)
    case.perhaps = "compare all names and shapes before anything is loaded"
    run = play(ranks, [case], 2)
    for step, what in enumerate(refused):
        if run.values[0][0][step]["refused"] != "ValueError":
            fail(
                case=f"load_full_state_dict of a state in which {what}",
                expected="a ValueError",
                found=run.values[0][0][step]["refused"],
                line=ranks.definition("FSDP"),
                perhaps=case.perhaps,
            )
    judge(ranks, run, [case])


@check("clip_and_save", "under mixed precision the state is fp32", weight=2)
def test_clip_and_save_mixed(ranks, rng):
    case = one_case(rng, 2, "param_dtype bfloat16", [("save",), EVAL], chain32, settings=BF16, terms=1)
    run = make(ranks, [case], 2)
    expect_state(ranks, case, run.values[1][0][0]["state"], Played(case).steps[0].state, 1, "the fp32 state")


# ------------------------------------------------------------------------------------------------------ checkpointing

RNG_STATE = 6_000  # bytes: each checkpoint may keep the random state, for dropout


@check(
    "checkpointing", "a unit leaves its input behind, not its activations; they come back one unit at a time", weight=3
)
def test_checkpointing_bytes(ranks, rng):
    torch.manual_seed(int(torch.randint(0, 1000, (), generator=rng)))
    models = [gpt.tiny(layers=layers, width=32, vocab_size=64, context_length=32) for layers in (2, 4)]
    models[1].eval()  # gradients are asked for all the same
    tokens = torch.randint(0, 64, (3, 32), generator=rng)
    run = ranks(checkpointed_bytes, 1, [(f"a GPT of {m.config.layers} blocks", m, tokens, "blocks") for m in models])
    for number, model in enumerate(models):
        config, (plain, most, found, peak) = model.config, run.values[0][number]
        layers = config.layers
        block = memory.block_activation_bytes(config, *tokens.shape, element_size=8)
        blocks, inputs = layers * block, layers * tokens.numel() * config.width * 8
        wanted = plain - blocks + inputs
        if found > wanted + layers * RNG_STATE:
            fail(
                case=f"a GPT of {layers} blocks, {tokens.shape[0]} sequences of {tokens.shape[1]} tokens",
                expected=f"forward leaves {wanted} bytes: {plain} without checkpointing, less {blocks} of the blocks' "
                f"activations, plus {inputs} of their inputs",
                found=f"{found} bytes",
                line=ranks.definition("checkpoint_units"),
                perhaps="nothing changes: is the unit's forward replaced where it is called?"
                if found == plain
                else None,
            )
        gradients = sum(p.nbytes for p in model.parameters())
        bound = most - blocks + block + inputs + gradients  # plain gradients come when activations are gone
        if peak > bound:
            fail(
                case=f"backward of a GPT of {layers} blocks",
                expected=f"the activations of one block at a time are there: at most {bound} bytes",
                found=f"{peak} bytes; without checkpointing {most}",
                line=ranks.definition("checkpoint_units"),
                perhaps="each unit is computed again by itself; the whole module at once brings all activations back",
            )


@check("checkpointing", "outputs and gradients stay what they were, dropout included", weight=3)
def test_checkpointing_values(ranks, rng):
    x = torch.randn(4, 5, generator=rng, dtype=torch.float64)
    cases = [
        ("a chain of three units", chain(rng), x, {"bare": (1,)}),
        ("with dropout", Chain(drawing(rng), 5, (7, 9, 12), dropout=0.5), x, {}),
        ("a unit used twice", chain(rng), x, {"order": [0, 1, 0]}),
    ]
    run = ranks(checkpointed_gradients, 1, cases)
    where = ranks.definition("checkpoint_units")
    for number, (name, *_) in enumerate(cases):
        (y, plain, drawn), (again, found, drawn_again), kept = run.values[0][number]
        if not kept:
            fail(
                case=name,
                expected="the names and parameters of the module stay the same",
                found="they changed",
                line=where,
                perhaps="replace the unit's forward, not the unit: a wrapper would rename what is in it",
            )
        for what, value, got in [
            ("output", y, again),
            *[(f"gradient of {k}", v, found.get(k)) for k, v in plain.items()],
            ("what torch.rand gives after backward", drawn, drawn_again),
        ]:
            wrong = difference(got, Expect(value, value.dtype, 1000, float(value.abs().max()) + 1e-3))
            if wrong:
                fail(
                    case=name,
                    expected=f"{what}: {wrong[0]}",
                    found=wrong[1],
                    line=where,
                    perhaps="what is computed again must draw the same random numbers, and leave the generator alone"
                    if "dropout" in name or "rand" in what
                    else "is each unit computed with its own forward? A lambda in a loop sees the loop's last value",
                )


@check("checkpointing", "a unit of another model is a ValueError", weight=1)
def test_checkpointing_foreign(ranks, rng):
    expect_foreign_unit(ranks, rng, "checkpoint_units")


@check("checkpointing", "under FSDP parameters are gathered for the second computation, too", weight=3)
def test_checkpointing_fsdp(ranks, rng):
    perhaps = "the recomputation runs in backward: the unit must be gathered by then, and not freed again in between"
    cases = [
        one_case(rng, 2, "checkpointed units", TWO_STEPS, checkpointed=True, perhaps=perhaps),
        one_case(rng, 2, "checkpointed units, gathered ahead, bf16", [EVAL, STEP, UPDATE], chain32, checkpointed=True,
                 settings=AHEAD | BF16, perhaps=perhaps),
        measured(rng, 2, "checkpointed units, measured", [REST, STEP, REST, STEP, REST], checkpointed=True),
    ]  # fmt: skip
    run = play(ranks, cases, 2)
    judge(ranks, run, cases[:2])
    expect_nothing_left(run)
    n, sizes = 2, unit_sizes(cases[0].models[0])
    for rank in range(n):
        found = sum(e.sent for e in step_events(run, rank, 0))
        most = 4 * sum(n * shards(numel, n) for numel in sizes.values()) * 8 * (n - 1) // n + SMALL
        if found > most:
            fail(
                case=cases[0].name,
                expected=f"at most 4(N-1)/N·S = {most} bytes a step: a gather for forward, two in backward, a scatter",
                found=f"{found} bytes (rank {rank})",
                line=ranks.definition("FSDP"),
            )
    expect_bounded(ranks, run, cases[2], 2)
