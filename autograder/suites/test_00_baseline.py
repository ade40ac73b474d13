"""The public checks of module 00: the training run on a single device."""

import random
import re
from collections.abc import Callable

import numpy as np
import torch

from autograder.suites.baseline_calls import (
    GENERATORS,
    batch_case,
    batches,
    distinct_tokens,
    draw_schedule,
    draw_settings,
    errors_of_short_files,
    expect_batch,
    expect_losses,
    expect_rates,
    expect_same_losses,
    expect_seeded,
    initial_weights,
    load_saved,
    losses_of,
    lr_misread,
    memory_growth,
    model_with,
    settings_case,
    start_train,
    text,
)
from autograder.suites.checkpoint_calls import (
    DRAWS,
    NEIGHBOURS,
    SAVES,
    TARGETS,
    draws,
    draws_after_saving_and_loading,
    killed_at_each_line,
    load_mischief,
    loaded_into,
    practised,
    replaced_files,
    round_trips,
    saved_on_a_gpu,
    saved_on_full_disks,
    widths_case,
)
from autograder.suites.kit import (
    SCHEDULE,
    Module,
    Problem,
    as_is,
    check,
    difference,
    draw_int,
    fail,
    numbers_agree,
    reference_run,
)

MODULE = Module(
    "00_baseline",
    "Training on a single device",
    files=["baseline.py"],
    problems=[
        Problem("get_batch", 20, "Random windows of a file of tokens", "Data"),
        Problem("seed_everything", 10, "Seeding every generator", "Seeds"),
        Problem("cosine_lr", 20, "Warm-up and cosine cycles", "The learning rate"),
        Problem("checkpoint", 25, "Checkpoints that survive a crash", "Checkpoints"),
        Problem("train", 25, "The run, and the run resumed", "The training run"),
    ],
    timeout=20.0,
)

# ------------------------------------------------------------------------------------------------------------ get_batch


@check(
    "get_batch", "x are windows of the tokens, y the tokens that follow, in int64 whatever the file's dtype", weight=6
)
def test_get_batch_windows(ranks, rng):
    for dtype in (np.uint16, np.int32, np.uint8, np.int64, np.uint32):
        tokens = distinct_tokens(rng, 40, dtype)
        calls = [{"batch_size": b, "context_length": t} for b, t in ((5, 7), (1, 1), (3, 39), (2, 12))]
        run = ranks(batches, 1, tokens, calls)
        for call, found in zip(calls, run.values[0], strict=True):
            expect_batch(found, call, tokens, ranks.definition("get_batch"))


@check("get_batch", "every start that leaves room for the last target occurs, equally often, and none beyond", weight=5)
def test_get_batch_starts(ranks, rng):
    for length, context_length in ((12, 4), (6, 5), (9, 1)):
        tokens, count = distinct_tokens(rng, length), length - context_length
        call = {"batch_size": 500 * count, "context_length": context_length}
        run = ranks(batches, 1, tokens, [call])
        starts = expect_batch(run.values[0][0], call, tokens, ranks.definition("get_batch"))
        often = [starts.count(s) for s in range(count)]
        if min(often) < 350 or max(often) > 650:  # each is 500, give or take 22
            fail(
                case=batch_case(call, length),
                expected=f"each of the starts 0 to {count - 1} about 500 times: {context_length} + 1 tokens fit there",
                found=", ".join(f"{n} times {s}" for s, n in enumerate(often)),
                line=ranks.definition("get_batch"),
                perhaps="torch.randint(0, n) draws from 0 to n - 1; the last start is len(tokens) - context_length - 1"
                if often[-1] == 0
                else "draw from the starts that are possible only; what is moved into range is not equally likely",
            )


@check("get_batch", "the starts are one torch.randint from torch's global generator", weight=3)
def test_get_batch_generator(ranks, rng):
    tokens = distinct_tokens(rng, 1000)
    calls = []
    for _ in range(2):
        seeded = {"seed": draw_int(rng, 0, 10**6), "batch_size": 6, "context_length": 8}
        calls += [seeded, {"batch_size": 4, "context_length": 3}]  # goes on where the generator stands
    run = ranks(batches, 1, tokens, calls)
    generator = torch.Generator()
    for call, found in zip(calls, run.values[0], strict=True):
        if "seed" in call:
            generator.manual_seed(call["seed"])
        wanted = torch.randint(0, 1000 - call["context_length"], (call["batch_size"],), generator=generator).tolist()
        starts = expect_batch(found, call, tokens, ranks.definition("get_batch"))
        if starts != wanted:
            fail(
                case=batch_case(call, 1000) + ("" if "seed" in call else ", right after the call before"),
                expected=f"starts {wanted}: torch.randint(0, {1000 - call['context_length']}, ({call['batch_size']},))",
                found=f"starts {starts}",
                line=ranks.definition("get_batch"),
                perhaps="draw all starts at once, from torch's generator, and nothing else from it; keep their order",
            )


@check("get_batch", "a file that is too short is a ValueError", weight=2)
def test_get_batch_short(ranks, rng):
    for length in (9, 1, 0):
        lengths = [length, length + 1, length + 50]
        run = ranks(errors_of_short_files, 1, distinct_tokens(rng, length), lengths)
        for context_length, found in zip(lengths, run.values[0], strict=True):
            kind, message = found
            if kind != "ValueError" or not message:
                fail(
                    case=batch_case({"batch_size": 2, "context_length": context_length}, length),
                    expected="a ValueError that says so",
                    found=f"{kind}: {message[:100]}".removesuffix(": "),
                    line=ranks.definition("get_batch"),
                )


@check("get_batch", "of a memory-mapped file only the windows are read", weight=3)
def test_get_batch_memory(ranks, rng):
    size = 192
    grown = ranks(memory_growth, 1, size).values[0]
    if grown > size / 4:
        fail(
            case=f"a memory-mapped file of {size} MiB, uint16, 3 batches of 4 windows of 16 tokens",
            expected=f"memory for the windows only, which are small: less than {size // 4} MiB more",
            found=f"{grown:.0f} MiB more",
            line=ranks.definition("get_batch"),
            perhaps="the whole file is read, converted or copied; cut the windows out first, then convert them",
        )


@check("get_batch", "the batch is on the device that was asked for", weight=1)
def test_get_batch_device(ranks, rng):
    run = ranks(batches, 1, distinct_tokens(rng, 20), [{"batch_size": 2, "context_length": 3}], "meta")
    if run.values[0][0] != ["meta", "meta"]:
        fail(
            case='device="meta"',
            expected="x and y on that device",
            found=f"on {' and '.join(run.values[0][0])}",
            line=ranks.definition("get_batch"),
        )


# ------------------------------------------------------------------------------------------------------ seed_everything


@check("seed_everything", "Python's generator starts from the seed", weight=2)
def test_seed_python(ranks, rng):
    expect_seeded(ranks, [(draw_int(rng, 0, 10**6), 0) for _ in range(3)], ["Python"])


@check("seed_everything", "numpy's global generator starts from the seed", weight=2)
def test_seed_numpy(ranks, rng):
    expect_seeded(ranks, [(draw_int(rng, 0, 10**6), 0) for _ in range(3)], ["numpy"])


@check("seed_everything", "torch's generator starts from the seed", weight=2)
def test_seed_torch(ranks, rng):
    expect_seeded(ranks, [(draw_int(rng, 0, 10**6), 0) for _ in range(3)], ["torch"])


@check("seed_everything", "each rank draws numbers of its own, the same in every run", weight=3)
def test_seed_ranks(ranks, rng):
    seed = draw_int(rng, 0, 10**6)
    expect_seeded(ranks, [(seed, 1), (seed, 7), (seed, 1), (0, 3)], list(GENERATORS))


@check("seed_everything", "a seed may be larger than numpy takes", weight=1)
def test_seed_large(ranks, rng):
    calls = [(draw_int(rng, 2**32, 2**40), 0), (2**32 - 1, 2), (2**60 + draw_int(rng, 1, 100), 1)]
    expect_seeded(ranks, calls, list(GENERATORS))


# ------------------------------------------------------------------------------------------------------------ cosine_lr


@check("cosine_lr", "a linear warm-up from 0 at step 0 to max_lr at step warmup_steps", weight=4)
def test_lr_warmup(ranks, rng):
    schedules = [draw_schedule(rng), draw_schedule(rng, warmup_steps=1), draw_schedule(rng, warmup_steps=0)]
    expect_rates(ranks, [(step, s) for s in schedules for step in range(s["warmup_steps"] + 1)])


@check("cosine_lr", "a cosine from max_lr towards min_lr, halfway between them in the middle", weight=6)
def test_lr_cycle(ranks, rng):
    simple = {"max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 0, "cycle_steps": 10}
    rows = [(step, simple) for step in (0, 5, 9)]
    for schedule in (draw_schedule(rng), draw_schedule(rng, min_lr=0.0), draw_schedule(rng, warmup_steps=0)):
        rows += [(schedule["warmup_steps"] + t, schedule) for t in range(schedule["cycle_steps"])]
    expect_rates(ranks, rows)


@check("cosine_lr", "after cycle_steps the next cycle starts at max_lr", weight=5)
def test_lr_restart(ranks, rng):
    schedules = [draw_schedule(rng), draw_schedule(rng, cycle_mult=1.0), draw_schedule(rng, cycle_steps=1)]
    rows = []
    for schedule in schedules:
        for cycle in (1, 2, 5, 13):
            begin = schedule["warmup_steps"] + cycle * schedule["cycle_steps"]
            rows += [(begin, schedule), (begin - 1, schedule), (begin + 1, schedule), (begin + 3, schedule)]
    expect_rates(ranks, rows)


@check("cosine_lr", "each cycle has cycle_mult times the steps of the one before, rounded", weight=5)
def test_lr_growing_cycles(ranks, rng):
    doubled = draw_schedule(rng, cycle_mult=2.0)
    schedules = [
        doubled,
        doubled | {"cycle_mult": 3.0},
        draw_schedule(rng, cycle_steps=7, cycle_mult=1.3),  # 7, 9, 12, 16, 21
        draw_schedule(rng, cycle_steps=5, cycle_mult=1.3),  # 5, 6: 6.5 is rounded to an even number
        draw_schedule(rng, cycle_steps=6, cycle_mult=1.6, warmup_steps=0),  # 6, 10, 16, 26, 42
        draw_schedule(rng, cycle_steps=1, cycle_mult=3.0),
    ]
    rows = []
    for schedule in schedules:
        begin, length = schedule["warmup_steps"], schedule["cycle_steps"]
        for _ in range(6):
            begin, length = begin + length, round(length * schedule["cycle_mult"])
            rows += [(step, schedule) for step in (begin - 1, begin, begin + 1, begin + length // 2)]
    expect_rates(ranks, rows)


# ----------------------------------------------------------------------------------------------------------- checkpoint


@check("checkpoint", "the model, its buffers and the iteration come back, from a path and from a file object", weight=4)
def test_checkpoint_model(ranks, rng):
    states, iteration = practised(rng, [3, 5, 2]), draw_int(rng, 1, 10**6)
    for target, found in zip(TARGETS, ranks(round_trips, 1, states, iteration).values[0], strict=True):
        facts = {"case": target, "line": ranks.definition("load_checkpoint")}
        wrong = numbers_agree(found["iteration"], iteration)
        if not wrong and not isinstance(found["iteration"], int):
            wrong = f"{iteration}, an int,", f"of type {type(found['iteration']).__name__}"
        if wrong:
            fail(expected=f"iteration {wrong[0]} returned", found=wrong[1], **facts)
        if not found["kept"]:
            fail(
                expected="the model as it was before saving: its values, their gradients, and train or eval",
                found="saving has changed it",
                case=target,
                line=ranks.definition("save_checkpoint"),
            )
        for name, tensor in states["model"].items():
            wrong = difference(found["model"].get(name), as_is(tensor))
            if wrong:
                fail(expected=f"{name}: {wrong[0]}", found=wrong[1], **facts)
        if not found["in place"]:
            fail(
                expected="the values copied into the model's own tensors",
                found="other tensors in their place, which an optimizer made before does not know",
                **facts,
            )
        if found["folder"] != sorted(["checkpoint.pt", *NEIGHBOURS]):
            fail(
                expected=f"in the folder after saving: checkpoint.pt, and as before {' and '.join(NEIGHBOURS)}",
                found=", ".join(found["folder"]),
                case=target,
                line=ranks.definition("save_checkpoint"),
            )


@check("checkpoint", "the optimizer comes back: moments, step counts and the groups' settings", weight=4)
def test_checkpoint_optimizer(ranks, rng):
    states = practised(rng, [3, 5, 2])
    for target, found in zip(TARGETS[:3], ranks(round_trips, 1, states, 7).values[0], strict=False):
        facts = {"case": target, "line": ranks.definition("load_checkpoint")}
        for index, moments in states["moments"].items():
            for name, tensor in moments.items():
                got = found["optimizer"]["state"].get(str(index), {}).get(name)
                wrong = difference(got, as_is(tensor))
                if wrong:
                    hint = "without its moments AdamW starts anew, and the loss jumps" if got is None else None
                    fail(expected=f"{name} of parameter {index}: {wrong[0]}", found=wrong[1], perhaps=hint, **facts)
        for number, group in enumerate(found["optimizer"]["param_groups"]):
            for name, wanted in (("lr", states["lrs"][number]), ("weight_decay", [1e-2, 0.0][number])):
                wrong = numbers_agree(group[name], wanted)
                if wrong:
                    fail(expected=f"{name} of parameter group {number}: {wrong[0]}", found=wrong[1], **facts)


@check("checkpoint", "the random numbers go on where they were, in Python, numpy and torch", weight=4)
def test_checkpoint_random(ranks, rng):
    seeds = [draw_int(rng, 0, 10**6) for _ in range(3)]
    found = ranks(draws_after_saving_and_loading, 1, practised(rng, [3, 5, 2]), seeds).values[0]
    generators = random.Random(seeds[0]), np.random.RandomState(seeds[1]), torch.Generator().manual_seed(seeds[2])
    draws(*generators)
    wanted = draws(*generators)
    for name in wanted:
        whens = ("saved", "save"), ("loaded", "load"), ("loaded without an optimizer", "load")
        for (when, function), drawn in zip(whens, found, strict=True):
            got = drawn[name]
            if got != wanted[name]:
                fail(
                    case=f"{DRAWS[name]} after the checkpoint was {when}",
                    expected=", ".join(f"{x:.6g}" for x in wanted[name]) + ", as if nothing had happened",
                    found=", ".join(f"{x:.6g}" for x in got),
                    line=ranks.definition(f"{function}_checkpoint"),
                    perhaps=f"the state of {name}'s generator is not in the checkpoint, or not put back"
                    if function == "load"
                    else "saving draws random numbers or seeds the generator",
                )


@check("checkpoint", "the file is read with weights_only=True, so that nothing in it can run", weight=3)
def test_checkpoint_safe(ranks, rng):
    found = ranks(load_mischief, 1, practised(rng, [3, 5, 2])).values[0]
    if found["refused"] is not None:
        kind = re.search(r"GLOBAL (\S+)", found["refused"])
        numpy = kind is None or kind[1].startswith("numpy")
        fail(
            expected="torch.load(..., weights_only=True) reads the checkpoint",
            found="it refuses what is in it" + (f": {kind[1]}" if kind else ""),
            line=ranks.definition("save_checkpoint"),
            perhaps="save tensors, numbers, text, tuples, lists and dicts only: "
            + ("numpy's state holds an array" if numpy else "the state_dict of an object, not the object"),
        )
    if found["ran"]:
        fail(
            case="load_checkpoint of a file that holds a pickled call",
            expected="an error, and nothing of the file is run",
            found="the call was run",
            line=ranks.definition("load_checkpoint"),
            perhaps="torch.load with weights_only=False trusts whoever wrote the file",
        )


def expect_saves_again(after: object, line: str) -> None:
    if after != 3:
        fail(
            case="the save after those that failed",
            expected="a checkpoint as if nothing had happened",
            found=after if isinstance(after, str) else "the old checkpoint",
            line=line,
        )


@check("checkpoint", "killed at any line of save_checkpoint, the old file or the new one is there, whole", weight=4)
def test_checkpoint_killed(ranks, rng):
    found = ranks(killed_at_each_line, 1, practised(rng, [3, 5, 2])).values[0]
    if found["line"]:
        fail(
            case="killed when it gets to this line",
            expected="load_checkpoint of the path gives the checkpoint of before or the new one",
            found=str(found["after"]),
            line=found["line"],
            perhaps="until os.replace, nothing may touch the old file: write the new one beside it",
        )
    expect_saves_again(found["after"], ranks.definition("save_checkpoint"))


@check("checkpoint", "a full disk leaves the old file as it was", weight=2)
def test_checkpoint_disk_full(ranks, rng):
    found = ranks(saved_on_full_disks, 1, practised(rng, [3, 5, 2])).values[0]
    if found["room"] is not None:
        if found["returned"]:
            fail(
                case=f"room for {found['room']} bytes of a checkpoint of {found['size']}",
                expected="an error from save_checkpoint, which its caller then knows of",
                found="it returns as if the checkpoint were saved",
                line=ranks.definition("save_checkpoint"),
            )
        fail(
            case=f"room for {found['room']} bytes of a checkpoint of {found['size']}, over one that is whole",
            expected="load_checkpoint of the path gives the checkpoint of before",
            found=str(found["after"]),
            line=ranks.definition("save_checkpoint"),
            perhaps="write another file, and replace the old one only if nothing went wrong and the new one is whole",
        )
    expect_saves_again(found["after"], ranks.definition("save_checkpoint"))


@check("checkpoint", "the new file is beside the old one and on the disk before it takes its place", weight=1)
def test_checkpoint_synced(ranks, rng):
    saves = ranks(replaced_files, 1, practised(rng, [3, 5, 2])).values[0]
    for (name, kind), found in zip(SAVES, saves, strict=True):
        expect_replaced(found, {"case": f"saving to {name}, {kind}", "line": ranks.definition("save_checkpoint")})


def expect_replaced(found: list[dict], facts: dict) -> None:
    """A file was replaced by one that is beside it and on the disk."""
    if not found:
        fail(
            expected="os.replace puts the new file, of another name, in the place of the old one",
            found="the old one is written to",
            perhaps="while a file is written to, it is neither the old one nor the new one",
            **facts,
        )
    for replacement in found:
        if not replacement["beside"]:
            fail(
                expected="the unfinished file in the folder of the one that it replaces",
                found="it is in another folder",
                perhaps="on another file system os.replace fails, and a copy is not all at once",
                **facts,
            )
        if replacement["synced"] is None:
            fail(
                expected="os.fsync of the new file before os.replace",
                found="no os.fsync before it",
                perhaps="after a power cut, the name may be on the disk already, and the contents not",
                **facts,
            )
        if replacement["synced"] < replacement["size"]:
            fail(
                expected=f"all {replacement['size']} bytes in the file when it is synced",
                found=f"{replacement['synced']}",
                perhaps="the rest was in Python's buffer: call the file's flush() before os.fsync",
                **facts,
            )


@check("checkpoint", "a model of another shape is a ValueError that names the tensor, and stays as it was", weight=2)
def test_checkpoint_mismatch(ranks, rng):
    shapes = [([3, 5, 2], widths) for widths in ([3, 4, 2], [3, 5, 2, 2], [3, 5])]
    shapes += [({"table": a}, {"table": b}) for a, b in (([4, 6], [6, 4]), ([1, 4], [4, 1]), ([1, 4], [4]))]
    shapes += [({"module": [2, 3]}, {"model": [2, 3]})]
    pairs = [(practised(rng, a), practised(rng, b)) for a, b in shapes]
    for (states, other), found in zip(pairs, ranks(loaded_into, 1, pairs).values[0], strict=True):
        facts = {"case": widths_case(states, other), "line": ranks.definition("load_checkpoint")}
        shapes = [{name: list(t.shape) for name, t in s["model"].items()} for s in (states, other)]
        wrong = [name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name)]
        kind, message = found["raised"]
        if kind != "ValueError" or not any(name in message for name in wrong):
            fail(
                expected=f"a ValueError with the name of a tensor that does not fit, such as {wrong[0]}",
                found="nothing raised" if kind == "nothing" else f"{kind}: {' '.join(message.split())[:120]}",
                **facts,
            )
        for name, tensor in other["model"].items():
            if not torch.equal(found["model"][name], tensor):
                fail(
                    expected="the model as it was before the ValueError",
                    found=f"{name} has been changed",
                    perhaps="compare all names and shapes before anything is loaded",
                    **facts,
                )
        if not found["kept"]:
            fail(
                expected="the optimizer and the generators as they were before the ValueError",
                found="they have been changed",
                perhaps="compare all names and shapes before anything is loaded",
                **facts,
            )


@check("checkpoint", "a checkpoint from a GPU that is not there is loaded", weight=1)
def test_checkpoint_device(ranks, rng):
    states = practised(rng, [3, 5, 2])
    found = ranks(saved_on_a_gpu, 1, states).values[0]
    facts = {"case": "tensors that were saved on cuda:99", "line": ranks.definition("load_checkpoint")}
    if found["problem"]:
        fail(
            expected="their values in the model, on the device where the model is",
            found=found["problem"],
            perhaps="torch.load puts tensors back to where they came from, unless map_location says otherwise",
            **facts,
        )
    for name, tensor in states["model"].items():
        wrong = difference(found["model"][name], as_is(tensor))
        if wrong:
            fail(expected=f"{name}: {wrong[0]}", found=wrong[1], **facts)


# ---------------------------------------------------------------------------------------------------------------- train


@check("train", "the losses are those of AdamW on the batches that get_batch draws after seeding", weight=6)
def test_train_losses(ranks, rng):
    settings = draw_settings(rng, max_lr=2e-3, min_lr=2e-3, warmup_steps=0)  # constant: the schedule is checked below
    weights, tokens = initial_weights(rng, "gpt"), text(rng)
    found = start_train(ranks, "gpt", weights, tokens, settings)
    wanted = reference_run(model_with("gpt", weights), tokens, settings)
    line = ranks.definition("train")
    expect_losses(found["losses"], settings, line)
    calls = len(found["batches"])
    if calls != settings["steps"]:
        fail(
            case=settings_case(settings),
            expected=f"one call of model.loss in each step, {settings['steps']} in all",
            found=f"{calls} calls",
            line=line,
            perhaps="the loss of a step is that of its batch before the weights are updated"
            if calls
            else "the loss is what model.loss(x, y) returns, whatever the model is",
        )
    pairs = zip(found["batches"], wanted["batches"], strict=True)
    step = next((s for s, (a, b) in enumerate(pairs) if a != b.tolist()), None)
    if step is not None:
        fail(
            case=settings_case(settings),
            expected=f"step {step} on the batch number {step} after seed_everything({settings['seed']})",
            found="another batch",
            line=line,
            perhaps="seed once, before the first step, and draw nothing but one batch in each step",
        )
    expect_same_losses(found["losses"], wanted["losses"], settings, line)


@check("train", "each step has the learning rate that cosine_lr gives for it", weight=4)
def test_train_schedule(ranks, rng):
    settings = draw_settings(rng, warmup_steps=6, cycle_steps=2)  # a warm-up of more than half of the 11 steps
    weights, tokens = initial_weights(rng, "gpt"), text(rng)
    found = start_train(ranks, "gpt", weights, tokens, settings)
    wanted = reference_run(model_with("gpt", weights), tokens, settings)
    line = ranks.definition("train")
    expect_losses(found["losses"], settings, line)
    case = ", ".join(f"{name}={settings[name]}" for name in SCHEDULE)
    if len(found["lrs"]) != settings["steps"]:
        fail(
            case=case,
            expected=f"{settings['steps']} calls of the optimizer's step",
            found=str(len(found["lrs"])),
            line=line,
        )
    for step, (lrs, lr) in enumerate(zip(found["lrs"], wanted["lrs"], strict=True)):
        wrong = next((w for each in lrs if (w := numbers_agree(each, lr, rtol=1e-9))), None)
        if wrong:
            fail(
                case=case,
                expected=f"step {step} with learning rate {wrong[0]}",
                found=wrong[1],
                line=line,
                perhaps=lr_misread(lrs[0], step, {name: settings[name] for name in SCHEDULE})
                or "set the rate in optimizer.param_groups before optimizer.step(); step 0 is the first",
            )
    expect_same_losses(found["losses"], wanted["losses"], settings, line)


@check("train", "the loss falls on a text that can be learned", weight=3)
def test_train_learns(ranks, rng):
    settings = draw_settings(rng, steps=40, warmup_steps=5, cycle_steps=100, batch_size=8, max_lr=1e-2)
    found = start_train(ranks, "float32", initial_weights(rng, "float32"), text(rng), settings)
    expect_losses(found["losses"], settings, ranks.definition("train"))
    first, last = found["losses"][0], sum(found["losses"][-5:]) / 5
    if not last < 0.6 * first:
        fail(
            case=settings_case(settings),
            expected=f"a loss far below {first:.3g}, the first one, at the end",
            found=f"{last:.3g}",
            line=ranks.definition("train"),
        )


@check("train", "checkpoints after every interval and after the last step, none without a path", weight=4)
def test_train_checkpoints(ranks, rng):
    weights, tokens, line = initial_weights(rng, "gpt"), text(rng), ranks.definition("train")
    plain = draw_settings(rng, steps=5, max_lr=0.5, min_lr=0.5, warmup_steps=0)  # too high: the losses go up
    found = start_train(ranks, "gpt", weights, tokens, plain)
    expect_losses(found["losses"], plain, line)
    if found["files"]:
        fail(case="checkpoint_path=None", expected="no file", found=", ".join(found["files"]), line=line)
    settings = plain | {"checkpoint_path": "run.pt", "checkpoint_interval": 3}
    for stop_at, wanted in ((2, None), (3, 3), (4, 3), (None, 5)):
        after = f"stopped in step {stop_at}" if stop_at is not None else "after the last step, 4"
        case = f"steps=5, checkpoint_interval=3, {after} (steps are counted from 0)"
        found = start_train(ranks, "gpt", weights, tokens, settings, stop_at)
        expected = f"run.pt with iteration {wanted}" if wanted else "no checkpoint yet"
        if found["files"] != ([] if wanted is None else ["run.pt"]):
            fail(case=case, expected=expected, found=", ".join(found["files"]) or "no file", line=line)
        if wanted is None:
            continue
        iteration, state = ranks(load_saved, 1, "gpt", found["saved"]).values[0]
        wrong = numbers_agree(iteration, wanted)
        if wrong:
            hint = "the iteration is the number of steps done, so the next step is the one of that number"
            if (iteration, stop_at) == (3, None):
                hint = "this is the checkpoint of the interval; one more is saved after the last step"
            fail(case=case, expected=expected, found=f"iteration {wrong[1]}", line=line, perhaps=hint)
        if stop_at in (3, None):
            for name, tensor in found["model"].items():
                if not torch.equal(tensor, state[name]):
                    fail(
                        case=case,
                        expected=f"the weights after {wanted} steps in run.pt",
                        found=f"others: {name} differs from the model's",
                        line=line,
                    )
    expect_checkpoints_of_the_rest(ranks, weights, tokens, settings, found["saved"])


def expect_checkpoints_of_the_rest(
    ranks: Callable, weights: dict, tokens: np.ndarray, settings: dict, after_5: torch.Tensor
) -> None:
    """The run is continued from step 5: to step 6, to its end, and where nothing is left to do."""
    line = ranks.definition("train")
    for steps, stop_at, wanted in ((7, 1, 6), (7, None, 7), (5, None, None)):
        case = f"steps={steps}, checkpoint_interval=3, resumed after 5 steps"
        own = settings | {"steps": steps}
        found = start_train(ranks, "gpt", weights, tokens, own, stop_at, after_5)
        if stop_at is None:
            expect_losses(found["losses"], own, line, count=steps - 5)
        else:
            case += f", stopped after {5 + stop_at}"
        if wanted is None:
            continue
        iteration = ranks(load_saved, 1, "gpt", found["saved"]).values[0][0] if found["files"] == ["run.pt"] else None
        if iteration != wanted:
            fail(
                case=case,
                expected=f"run.pt with iteration {wanted}",
                found="no file" if iteration is None else f"iteration {iteration}",
                line=line,
                perhaps="the interval counts the steps of the whole run, and its last step is followed by a checkpoint",
            )


def expect_resumed(ranks: Callable, rng: torch.Generator, kind: str) -> None:
    """Stopped in step 7 and resumed from the checkpoint after 5, in a new process: the same from there on."""
    weights, tokens, line = initial_weights(rng, kind), text(rng), ranks.definition("train")
    settings = draw_settings(rng, checkpoint_path="run.pt", checkpoint_interval=5)
    whole = start_train(ranks, kind, weights, tokens, settings)
    expect_losses(whole["losses"], settings, line)
    stopped = start_train(ranks, kind, weights, tokens, settings, stop_at=7)
    case = "11 steps, stopped in step 7, resumed from the checkpoint after step 4 (steps are counted from 0)"
    if stopped["saved"] is None:
        fail(case=case, expected="a checkpoint after 5 steps", found="no file", line=line)
    resumed = start_train(ranks, kind, initial_weights(rng, kind), tokens, settings, checkpoint=stopped["saved"])
    if isinstance(resumed["losses"], list) and len(resumed["losses"]) != 6:
        fail(
            case=case,
            expected="6 losses, of steps 5 to 10",
            found=f"{len(resumed['losses'])} losses",
            line=line,
            perhaps="config.steps is the length of the whole run; the steps before the checkpoint are not made again",
        )
    expect_losses(resumed["losses"], settings, line, count=6)
    for step, (a, b) in enumerate(zip(whole["losses"][5:], resumed["losses"], strict=True), 5):
        if a != b:
            same_batch = whole["batches"][step] == resumed["batches"][step - 5]
            hint = "the batch is another one: seeding after load_checkpoint undoes the random states that it restored, "
            hint += "and what is drawn before the checkpoint is saved is not drawn again"
            if same_batch:
                hint = "the batch is the same; the weights, the optimizer's state or the learning rate are not"
            if same_batch and kind == "dropout":
                hint = "the batch is the same; what the model draws for its dropout may not be"
            fail(
                case=case,
                expected=f"loss {a!r} in step {step}, as without the stop",
                found=repr(b),
                line=line,
                perhaps=hint,
            )
    for name, tensor in whole["model"].items():
        if not torch.equal(tensor, resumed["model"][name]):
            fail(
                case=case,
                expected="the same weights at the end, bit for bit",
                found=f"{name} differs",
                line=line,
            )


@check("train", "stopped and resumed, the run equals the uninterrupted one bit for bit", weight=6)
def test_train_resumed(ranks, rng):
    expect_resumed(ranks, rng, "gpt")


@check("train", "a model with dropout draws what it would draw alone, and resumes bit for bit, too", weight=2)
def test_train_resumed_dropout(ranks, rng):
    weights, tokens, line = initial_weights(rng, "dropout"), text(rng), ranks.definition("train")
    settings = draw_settings(rng, steps=5, max_lr=0.0, min_lr=0.0, checkpoint_interval=2)  # the weights stay
    found = start_train(ranks, "dropout", weights, tokens, settings | {"checkpoint_path": "run.pt"})
    expect_losses(found["losses"], settings, line)
    wanted = losses_of(model_with("dropout", weights), tokens, settings)
    for step, (loss, got) in enumerate(zip(wanted, found["losses"], strict=True)):
        wrong = numbers_agree(got, loss)
        if wrong:
            fail(
                case=f"{settings_case(settings)}, step {step}, of a model in train mode that draws from all generators",
                expected=f"loss {wrong[0]}",
                found=wrong[1],
                line=line,
                perhaps="seed_everything seeds what the model draws from; "
                "get_batch alone draws besides the model, and train or eval mode stays as it is",
            )
    if not found["training"]:
        fail(expected="the model in train mode, as before", found="it is in eval mode", line=line)
    expect_resumed(ranks, rng, "dropout")
