"""Module 03's optimizers, judged: what comes out of them beside the plain one, what a rank holds, what was sent, what
is saved; and what is said where it is not as it should be."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autograder.lab import ranks as lab_ranks
from autograder.lab.ranks import PerRank, Run
from autograder.suites.kit import Expect, difference, expect_nothing_left, fail, numbers_agree
from autograder.suites.sharded_optimizer_calls import (
    Case,
    call_ledger,
    gradients,
    hold,
    owners,
    play,
    unpacked,
    values,
)

# --------------------------------------------------------------------------------------------------------------- values


def sent(case: Case) -> dict:
    """A case as it travels to a rank."""
    return {name: getattr(case, name) for name in
            ("name", "tensors", "frozen", "optimizer", "options", "groups", "given", "program")}  # fmt: skip


def alone(fn: Callable, *args: object) -> object:
    """What a function gives on a rank of its own, which has nothing of the student's."""
    return lab_ranks.run(fn, 1, *args).values[0]


def reference(cases: list[Case]) -> list[list[dict]]:
    """What the plain optimizer gives."""
    return alone(play, None, [sent(c) for c in cases], None)


@dataclass
class Batch:
    """Cases that are played together on p ranks.

    Args:
        cases: of one optimizer each.
        p: number of ranks.
        members: the ranks of the optimizer's group; None: all.
        wanted: what one device would do; by default the same programs with averaged gradients.
    """

    cases: list[Case]
    p: int
    members: list[int] | None = None
    wanted: list[Case] | None = None


def make_all(ranks: Callable, batches: list[Batch], wrapper: str = "ShardedOptimizer") -> list[tuple[Run, list]]:
    """Play batches on ranks and compare all looks; hand back each run, and what the plain optimizer gave."""
    zeros = wrapper == "ZeroOptimizer"
    wanted = [batch.wanted or [c.averaged(zeros) for c in batch.cases] for batch in batches]
    singles = iter(reference([case for cases in wanted for case in cases]))
    found = []
    for batch in batches:
        places, own = batch.members or list(range(batch.p)), [None] * batch.p
        for i, rank in enumerate(places):
            own[rank] = [sent(c.of(i)) for c in batch.cases]
        run = ranks(play, batch.p, wrapper, PerRank(own), batch.members, of=wrapper)
        found.append((run, [next(singles) for _ in batch.cases]))
        for number, (case, single) in enumerate(zip(batch.cases, found[-1][1], strict=True)):
            for i, rank in enumerate(places):
                verdict = Verdict(ranks, run, wrapper, case, number, rank, i, len(places))
                verdict.compare(single, run.values[places[0]][number])
        expect_nothing_left(run)
    return found


def make(
    ranks: Callable, cases: list[Case], p: int, wrapper: str = "ShardedOptimizer", wanted: list[Case] | None = None
) -> Run:
    """Play the cases on p ranks, compare all looks, and hand back the run for more."""
    return make_all(ranks, [Batch(cases, p, wanted=wanted)], wrapper)[0][0]


class Verdict:
    """One rank's part of one case, against what it must be.

    Args:
        ranks: the fixture.
        run: on the student's ranks.
        wrapper: the class.
        case: with its `number`.
        rank: global, and `i` in the group of `p`.
    """

    def __init__(
        self, ranks: Callable, run: Run, wrapper: str, case: Case, number: int, rank: int, i: int, p: int
    ) -> None:
        self.ranks, self.run, self.wrapper, self.case = ranks, run, wrapper, case
        self.number, self.rank, self.i, self.p = number, rank, i, p
        self.line = ranks.definition(wrapper)

    def compare(self, single: list[dict], first: list[dict]) -> None:
        """All that the rank handed back: with what one device gives, and with the group's first rank."""
        found = self.run.values[self.rank][self.number]
        for k, wanted in enumerate(single):
            kind = next(iter(wanted))
            got = found[k] if k < len(found) else {}
            if kind not in got:
                self.fail(expected="step() without a closure returns None", found="something else")
            if kind == "parameters":
                self.compare_parameters(k, wanted, got, first[k])
            elif kind == "closure":
                self.compare_closure(got["closure"])
            elif kind == "refused" and got["refused"] != wanted["refused"]:
                self.fail(
                    expected="load_state_dict raises a ValueError: the state's groups have other numbers of parameters",
                    found=got["refused"],
                    perhaps="loaded all the same, entries land at the wrong parameters, without a word",
                    line=self.line,
                )
            elif kind == "left" and any(got["left"]):
                self.fail(
                    expected=f"zero_grad clears the gradients of all parameters (rank {self.rank})",
                    found=f"those of parameters {[i for i, size in enumerate(got['left']) if size]} are left",
                    perhaps="the inner optimizer knows only the parameters that this rank owns; the others' gradients "
                    "would be added to for ever",
                    line=self.line,
                )

    def compare_parameters(self, k: int, wanted: dict, got: dict, first: dict) -> None:
        if wanted["sizes"] != got["sizes"]:
            self.fail(
                expected=f"param_groups with {wanted['sizes']} parameters",
                found=f"{got['sizes']}",
                perhaps="a generator can be gone through only once: was it used up before Optimizer got it?"
                if "generator" in self.case.given
                else "param_groups of the wrapper has all parameters, whoever owns them",
            )
        for i, (tensor, value) in enumerate(zip(self.case.tensors, wanted["parameters"], strict=True)):
            size = float(value.abs().max()) + 1 if value.numel() else 1.0
            mine = got["parameters"][i]
            wrong = difference(mine, Expect(value, tensor.dtype, 64 if tensor.dtype.itemsize > 2 else 4, size))
            if wrong:
                self.fail(
                    expected=f"parameter {i} on rank {self.rank}, as the plain optimizer has it: {wrong[0]}",
                    found=wrong[1],
                    perhaps=self.misconception(k, i, mine, value) or self.case.perhaps,
                )
            if not torch.equal(mine, first["parameters"][i]):
                self.fail(
                    expected=f"the same parameter {i} on all ranks, bit for bit",
                    found=f"rank {self.rank} has another one, by rounding",
                    perhaps="the owner's parameter is what all ranks have to take over; who computes it for himself "
                    "may round in another way",
                )
        for group, (options, mine) in enumerate(zip(wanted["options"], got["options"], strict=False)):
            for key, value in options.items():
                have = tuple(mine[key]) if isinstance(mine.get(key), list) else mine.get(key)
                if have != (tuple(value) if isinstance(value, list) else value):
                    self.fail(
                        expected=f"param_groups[{group}][{key!r}] is {value}, as in the plain optimizer",
                        found="it is not there" if key not in mine else f"{have}",
                        perhaps=self.why_option(key in mine),
                        line=self.line,
                    )

    def why_option(self, there: bool) -> str:
        """The likely reason why an option in the wrapper's param_groups is missing, or is not what it should be."""
        if not there:
            return (
                "param_groups has all options, those that the inner optimizer fills in too: pass its `defaults` to "
                "Optimizer.__init__"
            )
        if {step[0] for step in self.case.program} & {"load", "back", "again"}:
            return "the options in a state belong to the wrapper's param_groups, too: load_state_dict sets them there"
        return "is it copied from the inner optimizer's group? the wrapper's is the one that counts"

    def compare_closure(self, got: list) -> None:
        calls, returned = got
        loss = next(step[2] for step in self.case.program if step[0] == "closure")[self.i]
        if len(calls) != 1:
            self.fail(
                expected=f"the closure is called once on every rank (rank {self.rank})",
                found=f"{len(calls)} calls",
                perhaps="a rank that owns nothing computes a part of the gradient all the same" if not calls else None,
            )
        if not calls[0]:
            self.fail(
                expected="the closure runs with gradients enabled",
                found="without: its backward fails",
                perhaps="step runs in no_grad; open torch.enable_grad() around the closure",
            )
        wrong = difference(returned, Expect(loss, loss.dtype, 0))
        if wrong:
            self.fail(
                expected=f"step returns the closure's loss (rank {self.rank}): {wrong[0]}",
                found=wrong[1],
                perhaps="step ends without returning the loss, as it may well on a rank that owns nothing"
                if returned is None
                else None,
            )

    def misconception(self, k: int, i: int, found: object, wanted: Tensor) -> str | None:
        """What would have given this parameter: other readings of the program, played by the plain optimizer."""
        suspects = list(self.suspects())
        if not isinstance(found, Tensor) or not suspects:
            return None
        played = reference([case for _, case in suspects])
        for (text, _), looks in zip(suspects, played, strict=True):
            value = looks[k]["parameters"][i]
            if torch.allclose(value, wanted, rtol=1e-4, atol=1e-6):
                continue  # this reading makes no difference here
            if found.shape == value.shape and torch.allclose(found.double(), value, rtol=1e-5, atol=1e-7):
                return text
        return None

    def suspects(self) -> Iterator[tuple[str, Case]]:
        """Wrong readings of the case, each with what is thought in it."""
        case, zeros = self.case, self.wrapper == "ZeroOptimizer"
        right = case.averaged(zeros)
        kinds = {step[0] for step in case.program}
        if kinds & {"save", "load", "back", "again", "plain", "unfreeze"}:
            return

        def scaled(case: Case, factor: float) -> Case:
            return case._with(lambda s: (s[0], [None if g is None else g.double() * factor for g in s[1]], *s[2:]))

        if "closure" not in kinds:
            yield (
                "nothing has updated this parameter here: has its owner's new value been sent to all, in place?",
                replace(right, program=[s for s in right.program if s[0] != "step"]),
            )
        if self.p > 1:
            yield f"the gradients are added up over {self.p} ranks; their average is asked for", scaled(right, self.p)
            own = replace(case.of(self.i), tensors=right.tensors)
            yield "this rank's own gradients, not the average", scaled(own, 1)
            yield "divided twice by the number of ranks", scaled(right, 1 / self.p)
        if self.run.world_size != self.p:
            yield (
                f"divided by the {self.run.world_size} ranks of the default group; this group has {self.p}",
                scaled(right, self.p / self.run.world_size),
            )
        if kinds & {"set", "advance"}:
            yield (
                "what is set in the wrapper's param_groups, by a scheduler for instance, never reaches the inner "
                "optimizer, which does the work: they have different dicts",
                replace(right, program=[s for s in right.program if s[0] not in ("set", "advance")]),
            )
            yield (
                "what is set takes effect one step late: copy the options before the inner step, not after it",
                replace(right, program=late(right.program)),
            )
            yield (
                "only lr reaches the inner optimizer; schedulers set betas and momentum as well: copy all options",
                replace(right, program=only_lr(right)),
            )
        if case.groups and any(options for _, options in case.groups):
            yield (
                "the groups' own options are lost on the way to the inner optimizer",
                replace(right, groups=[(positions, {}) for positions, _ in case.groups]),
            )
        if zeros and case.frozen:
            yield (
                "a frozen parameter is in the buffer with a gradient of zeros, and weight decay or momentum moves it",
                replace(case, frozen=frozenset()).averaged(zeros=True),
            )
        if not zeros:
            yield (
                "a parameter that no rank has a gradient for is given zeros, and weight decay or momentum moves it",
                case.averaged(zeros=True),
            )

    def fail(self, *, expected: str, found: str, perhaps: str | None = None, line: str | None = None) -> None:
        events = [e for e in self.run.in_case(self.number) if e.rank == self.rank]
        line = line or (events[-1] if events else self.line)
        fail(case=self.case.name, expected=expected, found=found, line=line, perhaps=perhaps)


def late(program: list[tuple]) -> list[tuple]:
    """The program with everything that sets options moved behind the next step."""
    moved, waiting = [], []
    for step in program:
        if step[0] in ("set", "advance"):
            waiting.append(step)
            continue
        moved.append(step)
        if step[0] in ("step", "closure"):
            moved, waiting = moved + waiting, []
    return moved + waiting


def only_lr(case: Case) -> list[tuple]:
    """The program of a case with all options but lr put back to what they were, before each step."""
    first = reference([replace(case, program=[("look",)])])[0][0]["options"]
    kept = [{key: value for key, value in options.items() if key in ("betas", "momentum")} for options in first]
    back = [("set", i, options) for i, options in enumerate(kept) if options]
    return [each for step in case.program for each in ((*back, step) if step[0] == "step" else (step,))]


# --------------------------------------------------------------------------------------------------------------- memory


def expect_state_memory(
    ranks: Callable, rng: torch.Generator, wrapper: str, p: int, state: dict | None = None, start: list | None = None,
    largest: int | None = None,
) -> None:  # fmt: skip
    """Measured in the rank: state of all its optimizers, and all tensors that it has more than before.

    Args:
        state: loaded before the steps.
        start: the parameters.
        largest: elements of the largest share, where it is not 1/p of all.
    """
    if start is None:
        start = [values(rng, (n,), torch.float32) for _ in range(2) for n in [4000] * p]
    rounds = [gradients(rng, start, p) for _ in range(2)]
    own = PerRank([[mine[r] for mine in rounds] for r in range(p)])
    run = ranks(hold, p, wrapper, start, own, {"lr": 0.01, "amsgrad": True}, state)
    elements = sum(t.numel() for t in start)
    whole = 12 * elements + 4 * len(start)  # three moments of float32, and a counter for each parameter
    share = 12 * largest if largest else whole // p
    most = round(1.05 * share) + 4 * len(start)
    case = f"Adam with amsgrad, {len(start)} parameters, {elements} elements of float32, {p} ranks"
    case += ", a full state loaded" if state else ""
    line = ranks.definition(wrapper)
    for rank, held in enumerate(run.values):
        if held["state"] > most:
            fail(
                case=case,
                expected=f"optimizer state on rank {rank} after 2 steps: about "
                + (f"{share} bytes, the largest share" if largest else f"1/{p} of {whole} bytes, {share}"),
                found=f"{held['state']} bytes",
                line=line,
                perhaps="shares that are uneven in elements, or a state that is kept in part on every rank"
                if held["state"] < 0.9 * whole
                else "of a full state that is loaded, a rank keeps what belongs to its own parameters"
                if state
                else "the state of all parameters is on every rank: the inner optimizer must get only those that this "
                "rank owns",
            )
        if wrapper == "ZeroOptimizer":
            expect_no_full_gradients(held, elements, p, whole, f"rank {rank}", case, line)
        grown = held["kept"] - held["before"]
        if grown > most + 4 * elements + 8 * elements // p:
            fail(
                case=case,
                expected=f"besides parameters and gradients, rank {rank} holds about {share} bytes more than "
                "before it had an optimizer",
                found=f"{grown} bytes more, {held['state']} of them in the state of optimizers",
                line=line,
                perhaps="tensors of the size of the full state are kept somewhere else",
            )
    expect_nothing_left(run)


def expect_no_full_gradients(held: dict, elements: int, p: int, whole: int, rank: str, case: str, line: str) -> None:
    """After a step of `ZeroOptimizer` there is at most a shard of the gradients, and one of the parameters."""
    if held["gradients"] > 4.2 * elements / p:
        fail(
            case=case,
            expected=f"after step no full gradients in .grad ({rank}): at most a shard, {4 * elements // p} bytes",
            found=f"{held['gradients']} bytes",
            line=line,
            perhaps="set p.grad = None once the gradients are in the buffer that is reduce-scattered",
        )
    grown = held["stepped"] - held["before"]
    if grown > 1.05 * whole / p + 8.4 * elements / p + 4.1 * elements + 100:
        fail(
            case=case,
            expected="after a step there are the state, of gradients and parameters at most a shard each, and one flat "
            f"copy of the parameters: about {(whole + 8 * elements) // p + 4 * elements} bytes on {rank}",
            found=f"{grown} bytes more than before there was an optimizer",
            line=line,
            perhaps="a buffer of all gradients, or one more copy of all parameters, is kept from one step to the next",
        )


# -------------------------------------------------------------------------------------------------------------- traffic


def expect_two_collectives(calls: list, start: list, p: int, rank: int, case: str, line: str) -> None:
    """Of each dtype's elements and less than p more: one reduce-scatter, then one all-gather."""
    for dtype in {t.dtype for t in start}:
        name = str(dtype).removeprefix("torch.")
        total = sum(t.numel() for t in start if t.dtype == dtype)
        mine = [e for e in calls if e.dtype == name]
        told = ", ".join(f"{e.op} of {e.numel}" for e in mine[:8]) or "nothing"
        right = [e.op for e in mine] == ["reduce_scatter", "all_gather"]
        if right and all(total <= e.numel < total + p for e in mine):
            continue
        perhaps = None
        ops = {e.op for e in mine}
        if ops & {"all_reduce", "reduce"}:
            perhaps = "an all-reduce gives every rank all of the gradient; a rank needs its shard only"
        elif ops & {"broadcast"}:
            perhaps = "one broadcast for each parameter is many messages; the shards are one all-gather"
        elif len(mine) > 2:
            perhaps = "one flat buffer for each dtype, whatever the number of parameters and groups"
        elif right:
            perhaps = "pad the buffer to the next multiple of the number of ranks, not further"
        bytes_each = (p - 1) * total * dtype.itemsize // p
        fail(
            case=f"{case}, {p} ranks",
            expected=f"rank {rank}, {total} elements of {name}: a reduce_scatter and an all_gather of them and fewer "
            f"than {p} more, {bytes_each} bytes sent in each",
            found=f"{told} elements",
            line=mine[-1] if mine else line,
            perhaps=perhaps,
        )
    other = [e for e in calls if e.dtype not in {str(t.dtype).removeprefix("torch.") for t in start}]
    if other:
        fail(
            case=f"{case}, {p} ranks", expected="nothing else is sent",
            found=f"{other[0].op} of {other[0].numel} elements of {other[0].dtype} (rank {rank})", line=other[0],
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- saved states


def expect_state(found: object, wanted: dict, case: str, line: str) -> None:
    """A saved state, in the plain optimizer's format."""
    if isinstance(found, str):
        fail(
            case=case, expected="a dict with `state`, by the numbers of the parameters, and `param_groups`",
            found=found, line=line,
        )  # fmt: skip
    found, wanted = unpacked(found), unpacked(wanted)
    groups = [[g.get("params") for g in each["param_groups"]] for each in (found, wanted)]
    if groups[0] != groups[1]:
        fail(
            case=case,
            expected=f"groups with the parameters {groups[1]}, numbered through in the order of the groups",
            found=f"{groups[0]}",
            line=line,
            perhaps="this is the inner optimizer's own, which knows only what this rank owns",
        )
    if sorted(found["state"]) != sorted(wanted["state"]):
        fail(
            case=case,
            expected=f"the state of parameters {sorted(wanted['state'])}",
            found=f"that of {sorted(found['state'])}",
            line=line,
            perhaps="each rank has the state of what it owns: gather all of it, under the numbers of the full groups",
        )
    for options, mine in zip(wanted["param_groups"], found["param_groups"], strict=True):
        for key, value in options.items():
            if mine.get(key) != value:
                fail(
                    case=case,
                    expected=f"option {key!r} of the group with the parameters {options['params']}: {value}",
                    found=f"{mine[key]}" if key in mine else "it is not there",
                    line=line,
                    perhaps="options come from the wrapper's param_groups as they are now: the inner optimizer's are "
                    "those of the last step",
                )
    for number, state in wanted["state"].items():
        mine = found["state"][number]
        if sorted(mine) != sorted(state):
            fail(
                case=case, expected=f"state of parameter {number}: {sorted(state)}", found=f"{sorted(mine)}", line=line
            )  # fmt: skip
        for key, value in state.items():
            if not isinstance(value, Tensor):
                if mine[key] != value:
                    fail(case=case, expected=f"{key} of parameter {number}: {value}", found=f"{mine[key]}", line=line)
                continue
            wrong = difference(mine[key], Expect(value, value.dtype, 64, float(value.abs().max()) + 1))
            if wrong:
                fail(
                    case=case,
                    expected=f"{key} of parameter {number}: {wrong[0]}",
                    found=wrong[1],
                    line=line,
                    perhaps="the entries of different parameters are mixed up: number them by their place in the full "
                    "groups",
                )


# ------------------------------------------------------------------------------------------------------ plain functions


def expect_owners(ranks: Callable, calls: list[tuple[list[int], int]]) -> list[list[int]]:
    """The owners of each call, once it is clear that they are owners."""
    run = ranks(owners, 2, PerRank([calls, calls]))
    line = ranks.definition("partition_parameters")
    for number, (numels, p) in enumerate(calls):
        first, second, kept = run.values[0][number]
        case = f"partition_parameters({numels}, {p})"
        if len(first) != len(numels) or not all(type(r) is int and 0 <= r < p for r in first):
            fail(case=case, expected=f"{len(numels)} ranks from 0 to {p - 1}", found=f"{first}", line=line)
        if not kept:
            fail(case=case, expected="numels is left as it is", found="it was changed", line=line)
        other = next((o for o in (second, *run.values[1][number][:2]) if o != first), None)
        if other is not None:
            fail(
                case=case,
                expected=f"the same owners each time and on every rank: {first}",
                found=f"{other}",
                line=line,
                perhaps="chance or the rank decides; then the ranks do not agree who owns what",
            )
    if any(e.is_collective or e.is_message for e in run.events):
        event = next(e for e in run.events if e.is_collective or e.is_message)
        fail(expected="every rank finds the owners by itself", found=f"communication: {event}", line=event)
    return [each[0] for each in run.values[0]]


def expect_ledger(ranks: Callable, table: list[tuple]) -> None:
    """Each row: arguments, options, the number or "ValueError" that they give, and a hint."""
    run = ranks(call_ledger, 1, [row[:2] for row in table])
    for (arguments, options, wanted, hint), found in zip(table, run.values[0], strict=True):
        wrong = numbers_agree(found, wanted)
        if wrong:
            fail(
                case=f"model_state_bytes({', '.join(map(repr, arguments))}"
                + "".join(f", {key}={value}" for key, value in options.items()) + ")",
                expected=wrong[0], found=wrong[1], line=ranks.definition("model_state_bytes"), perhaps=hint,
            )  # fmt: skip
