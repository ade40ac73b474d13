"""The public checks of module 02: data-parallel training."""

from collections import Counter

import torch
from torch import Tensor, nn

from autograder.suites.ddp_averages import (
    by_dtype,
    expect_averages,
    expect_group_averages,
    expect_missing,
    expect_strided_averages,
    in_dtypes,
    one_average,
    weighted,
)
from autograder.suites.ddp_calls import (
    Case,
    Terms,
    carried,
    draw,
    everything,
    everything_strided,
    expect_broadcast,
    expect_messages,
    expect_shards,
    listed,
    make,
    sent_in_step,
    shard_all,
    terms,
)
from autograder.suites.ddp_training import (
    B,
    Training,
    draw_settings,
    expect_losses,
    random_tokens,
    run_training,
    small_gpt,
)
from autograder.suites.ddp_wrappers import (
    SIZES,
    expect_accumulation,
    expect_any_order,
    expect_buckets,
    expect_checkpointing,
    expect_construction,
    expect_gpt,
    expect_group_wrapped,
    expect_no_waiting,
    expect_sent_in_backward,
    expect_strided_wrapped,
    expect_two_backwards,
    expect_unused,
    expect_wrapped_averages,
    fill,
    mb,
    steps,
)
from autograder.suites.kit import Module, Problem, as_is, check, difference, draw_int, dtype_name, fail, reference_run

MODULE = Module(
    "02_ddp",
    "Data-parallel training",
    files=["ddp.py"],
    problems=[
        Problem("shard_batch", 8, "Cut the batch", "The batch"),
        Problem("broadcast_module", 12, "Equal replicas", "What is replicated"),
        Problem("naive_sync", 12, "One all-reduce for each gradient", "One message for each gradient"),
        Problem("flat_sync", 12, "One all-reduce for all gradients", "One message for all"),
        Problem("weighted_sync", 12, "Uneven batches", "Why the average, and when not"),
        Problem("overlapped", 16, "Send while backward computes", "Overlap"),
        Problem("bucketed", 18, "Send in buckets", "Buckets"),
        Problem("train_ddp", 10, "The training run on many ranks", "The run"),
    ],
    refused_names={
        "torch.nn.parallel.DistributedDataParallel": "it is what this module builds; hooks on the parameters and "
        "all_reduce are enough",
    },
)

# ---------------------------------------------------------------------------------------------------------- shard_batch


@check("shard_batch", "rank r has the r-th block of rows", weight=3)
def test_shard_batch_tensor(ranks, rng):
    batches = []
    for p in (2, 3, 4, 1):
        b = p * draw_int(rng, 2, 5)
        for shape, dtype in (((b,), torch.float32), ((b, 3), torch.int64), ((p, 2, 2), torch.float64)):
            batches.append((f"shape {list(shape)}", draw(rng, shape, dtype), p))
    expect_shards(ranks, batches)


@check("shard_batch", "a tuple, list or dict comes back as one, of parts", weight=2)
def test_shard_batch_kinds(ranks, rng):
    x, y = draw(rng, (6, 4), torch.int64), draw(rng, (6,))
    batches = [("a tuple", (x, y), 3), ("a list", [x, y, x], 3), ("a dict", {"tokens": x, "weights": y}, 2)]
    expect_shards(ranks, batches)


@check("shard_batch", "a batch that does not divide is a ValueError that says why", weight=2)
def test_shard_batch_uneven(ranks, rng):
    x = draw(rng, (7, 4))
    batches = [("7 rows", x, 4), ("2 rows", draw(rng, (2,)), 4), ("a dict, 7 rows", {"x": x}, 4)]
    run = ranks(shard_all, 1, batches)
    for (name, _, _), parts in zip(batches, run.values[0], strict=True):
        for rank, (kind, text) in enumerate(parts):
            rows = "7" if "7" in name else "2"
            if kind != "ValueError":
                fail(
                    case=f"{name}, rank {rank} of 4",
                    expected="a ValueError",
                    found=f"a {kind}",
                    line=ranks.definition("shard_batch"),
                    perhaps="rows that are left over would be trained on by nobody, and averages would be wrong",
                )
            if rows not in text or "4" not in text:
                fail(
                    case=f"{name}, rank {rank} of 4",
                    expected=f"a message with both numbers, {rows} and 4",
                    found=repr(text[:200]),
                    line=ranks.definition("shard_batch"),
                )


# ----------------------------------------------------------------------------------------------------- broadcast_module


@check("broadcast_module", "all ranks have the source's parameters, of every dtype", weight=3)
def test_broadcast_module_parameters(ranks, rng):
    for p in (3, 4, 1):
        models = [everything(rng) for _ in range(p)]
        for model in models:
            model.frozen.requires_grad_(True)
        names = set(dict(models[0].named_parameters()))
        expect_broadcast(ranks, models, [None, p - 1], only=lambda name, names=names: name in names)


@check("broadcast_module", "frozen parameters and buffers are part of the model", weight=3)
def test_broadcast_module_frozen(ranks, rng):
    expect_broadcast(ranks, [everything(rng) for _ in range(3)], [None, 1])


@check("broadcast_module", "tensors that are not contiguous", weight=2)
def test_broadcast_module_strided(ranks, rng):
    expect_broadcast(ranks, [everything_strided(rng) for _ in range(3)], [None, 2])


@check("broadcast_module", "src is a global rank, and by default the first of the group", weight=2)
def test_broadcast_module_subgroup(ranks, rng):
    expect_broadcast(ranks, [everything(rng) for _ in range(2)], [None, 3, 1], members=[1, 3])


@check("broadcast_module", "each tensor is sent once, in its own dtype", weight=2)
def test_broadcast_module_traffic(ranks, rng):
    models = [everything(rng) for _ in range(3)]
    run = expect_broadcast(ranks, models, [None])
    tensors = [*models[0].parameters(), *models[0].buffers()]
    wanted = sum(t.nbytes for t in tensors)
    for rank in range(3):
        calls = [e for e in run.of(rank) if e.is_collective]
        found = sum(e.nbytes for e in calls)
        if found == wanted:
            continue
        shared = models[0].embedding.nbytes
        fail(
            expected=f"{wanted} bytes in all: each of {len(tensors)} parameters and buffers once",
            found=f"{found} bytes in {len(calls)} messages (rank {rank})",
            line=max(calls, key=lambda e: e.nbytes) if calls else ranks.definition("broadcast_module"),
            perhaps="state_dict() names the shared parameter twice; parameters() and buffers() name it once"
            if found > wanted and (found - wanted) % shared <= 72
            else None,
        )


# ----------------------------------------------------------------------------------------------------------- naive_sync


@check("naive_sync", "every rank has the average of the gradients", weight=3)
def test_naive_sync_values(ranks, rng):
    expect_averages(ranks, rng, "average_gradients")


@check("naive_sync", "a gradient that a rank has not is zero there, and averaged", weight=3)
def test_naive_sync_missing(ranks, rng):
    expect_missing(ranks, rng, "average_gradients")


@check("naive_sync", "gradients that are not contiguous", weight=1)
def test_naive_sync_strided(ranks, rng):
    expect_strided_averages(ranks, rng, "average_gradients")


@check("naive_sync", "in a group the average is over the group", weight=2)
def test_naive_sync_subgroup(ranks, rng):
    expect_group_averages(ranks, rng, "average_gradients")


@check("naive_sync", "one all_reduce for each gradient, of its size", weight=3)
def test_naive_sync_traffic(ranks, rng):
    run, case = one_average(ranks, rng, "average_gradients")
    expect_messages(run, case, in_dtypes(case.models[0]), "one all_reduce for each gradient")


# ------------------------------------------------------------------------------------------------------------ flat_sync


@check("flat_sync", "every rank has the average of the gradients", weight=3)
def test_flat_sync_values(ranks, rng):
    expect_averages(ranks, rng, "average_gradients_flat", (3, 4, 1))


@check("flat_sync", "a gradient that a rank has not is zero there, and averaged", weight=3)
def test_flat_sync_missing(ranks, rng):
    expect_missing(ranks, rng, "average_gradients_flat")


@check("flat_sync", "gradients that are not contiguous", weight=1)
def test_flat_sync_strided(ranks, rng):
    expect_strided_averages(ranks, rng, "average_gradients_flat")


@check("flat_sync", "in a group the average is over the group", weight=2)
def test_flat_sync_subgroup(ranks, rng):
    expect_group_averages(ranks, rng, "average_gradients_flat")


@check("flat_sync", "one all_reduce for each dtype", weight=3)
def test_flat_sync_traffic(ranks, rng):
    run, case = one_average(ranks, rng, "average_gradients_flat")
    wanted = [(numel, dtype) for dtype, numel in by_dtype(in_dtypes(case.models[0])).items()]
    expect_messages(run, case, wanted, "one all_reduce for each dtype")


# -------------------------------------------------------------------------------------------------------- weighted_sync


@check("weighted_sync", "the gradient of the mean over all samples", weight=4)
def test_weighted_sync_values(ranks, rng):
    for p in (2, 3, 4, 1):
        counts = torch.randint(1, 9, (p,), generator=rng)
        counts[0] += 10
        make(ranks, [weighted(rng, counts.tolist(), "uneven batches"), weighted(rng, [2] * p, "even batches")], p)


@check("weighted_sync", "a rank without samples adds nothing", weight=3)
def test_weighted_sync_empty(ranks, rng):
    cases = []
    for number, what in enumerate(("no gradients", "nan", "zeros", "gradients left from before", "inf")):
        case = weighted(rng, [[3, 0, 5], [0, 4, 0]][number % 2], f"{what} on a rank without samples")
        for program in case.programs:
            if program[1][2] == 0:
                fill = {"nan": torch.nan, "inf": torch.inf}.get(what)
                kept = [None if what == "no gradients" else torch.full_like(g, fill or 0.0) for g in program[0][1]]
                program[0] = ("gradients", program[0][1] if what.startswith("gradients") else kept)
        cases.append(case)
    make(ranks, cases, 3)


@check("weighted_sync", "large numbers of samples, small dtypes", weight=1)
def test_weighted_sync_large(ranks, rng):
    cases = [
        weighted(rng, [40_000, 30_000, 1000], "float16", torch.float16),
        weighted(rng, [257, 3, 514], "bfloat16", torch.bfloat16),
        weighted(rng, [1001, 3, 2], "float64", torch.float64),
    ]
    for case in cases:
        case.perhaps = (
            "neither n·g nor the total need fit into the dtype of the gradients: multiply by n / total, a plain number"
        )
    make(ranks, cases, 3)


@check("weighted_sync", "missing and frozen gradients, several dtypes, and not contiguous", weight=2)
def test_weighted_sync_missing(ranks, rng):
    expect_averages(ranks, rng, "average_gradients_weighted", (3,))
    expect_missing(ranks, rng, "average_gradients_weighted")
    expect_strided_averages(ranks, rng, "average_gradients_weighted")


@check("weighted_sync", "in a group the mean is over the group's samples", weight=1)
def test_weighted_sync_subgroup(ranks, rng):
    make(ranks, [weighted(rng, [5, 2], "a group of ranks [1, 3]")], 4, members=[1, 3])


@check("weighted_sync", "gradients travel once, the numbers of samples in one small message", weight=2)
def test_weighted_sync_traffic(ranks, rng):
    run, case = one_average(ranks, rng, "average_gradients_weighted", [4, 1, 2])
    wanted = by_dtype(in_dtypes(case.models[0]))
    for rank in range(3):
        calls = [e for e in run.of(rank) if e.is_collective]
        found = by_dtype(carried(calls))
        # The numbers of samples are told in any dtype, by all_reduce or all_gather; a mask of the gradients likewise.
        small = sum((found - wanted).values())
        if small > 3 * 3 + 6 or wanted - found:
            fail(
                case=case.name,
                expected=f"rank {rank}: {listed([(n, d) for d, n in wanted.items()])}, and a few for the samples",
                found=f"{len(calls)} messages: {listed([(n, d) for d, n in found.items()])}",
                line=max(calls, key=lambda e: e.nbytes) if calls else ranks.definition("average_gradients_weighted"),
            )


# ----------------------------------------------------------------------------------------------------------- overlapped


@check("overlapped", "construction makes the replicas equal", weight=1)
def test_overlapped_construction(ranks, rng):
    expect_construction(ranks, rng, "OverlappedDDP")


@check("overlapped", "every rank has the average of the gradients", weight=3)
def test_overlapped_values(ranks, rng):
    expect_wrapped_averages(ranks, rng, "OverlappedDDP")
    expect_gpt(ranks, rng, "OverlappedDDP")


@check("overlapped", "gradients travel while backward still computes", weight=4)
def test_overlapped_order(ranks, rng):
    models = [terms(rng, SIZES) for _ in range(3)]
    case = Case("gradients become ready from the last to the first", models, steps(rng, models))
    run = make(ranks, [case], 3, "OverlappedDDP")
    wanted = [(n, "float32") for n in SIZES]
    for rank in range(3):
        found = sent_in_step(run, rank, 0, len(SIZES))
        if Counter(carried(found)) != Counter(wanted):
            fail(
                case=case.name,
                expected=f"one all_reduce for each gradient; rank {rank}: {len(wanted)}: {listed(wanted)}",
                found=f"{len(found)}: {listed(carried(found))}",
                line=found[-1] if found else ranks.definition("OverlappedDDP"),
            )
    expect_sent_in_backward(run, case, [[i] for i in reversed(range(len(SIZES)))], SIZES)


@check("overlapped", "nothing is waited for in backward", weight=2)
def test_overlapped_waiting(ranks, rng):
    expect_no_waiting(ranks, rng, "OverlappedDDP")


@check("overlapped", "micro-batches in no_sync are accumulated, and averaged once", weight=3)
def test_overlapped_no_sync(ranks, rng):
    expect_accumulation(ranks, rng, "OverlappedDDP")


@check("overlapped", "unused parameters, on one rank or on all", weight=3)
def test_overlapped_unused(ranks, rng):
    expect_unused(ranks, rng, "OverlappedDDP")


@check("overlapped", "gradients in another order on each rank", weight=2)
def test_overlapped_any_order(ranks, rng):
    expect_any_order(ranks, rng, "OverlappedDDP")


@check("overlapped", "a second backward, and gradients that start from zeros", weight=2)
def test_overlapped_two_backwards(ranks, rng):
    expect_two_backwards(ranks, rng, "OverlappedDDP")


@check("overlapped", "checkpointed layers that share a weight", weight=1)
def test_overlapped_checkpointing(ranks, rng):
    expect_checkpointing(ranks, rng, "OverlappedDDP")


@check("overlapped", "a group of some of the ranks; parameters that are not contiguous", weight=2)
def test_overlapped_subgroup(ranks, rng):
    expect_group_wrapped(ranks, rng, "OverlappedDDP")
    expect_strided_wrapped(ranks, rng, "OverlappedDDP")


# ------------------------------------------------------------------------------------------------------------- bucketed


@check("bucketed", "construction makes the replicas equal", weight=1)
def test_bucketed_construction(ranks, rng):
    expect_construction(ranks, rng, "BucketedDDP")


@check("bucketed", "every rank has the average of the gradients", weight=3)
def test_bucketed_values(ranks, rng):
    expect_wrapped_averages(ranks, rng, "BucketedDDP")
    expect_gpt(ranks, rng, "BucketedDDP")


@check("bucketed", "buckets are filled up to the cap, from the last parameter on", weight=4)
def test_bucketed_composition(ranks, rng):
    rows = [
        ([10, 20, 30, 12, 18, 11], mb(41), "a cap of 41 numbers: one bucket is full to the last byte"),
        ([10, 20, 30, 12, 18, 11], mb(40.5), "a cap of 40.5 numbers"),
        ([11, 12, 50, 13, 14], mb(30), "one gradient is larger than the cap"),
        ([20, 6, 50, 7, 14], mb(30), "one is larger than the cap, between small ones"),
        ([11, 12, 13], mb(11), "a cap of one gradient"),
        ([11, 12, 13, 14], 25, "a cap of 25 MB"),
        ([40_000, 100_000, 150_000, 112_144], 1.0, "a cap of 1 MB, exactly full"),
    ]
    cases = []
    for sizes, cap, name in rows:
        models = [terms(rng, sizes) for _ in range(2)]
        cases.append(Case(name, models, steps(rng, models), (cap,)))
    run = make(ranks, cases, 2, "BucketedDDP")
    for number, ((sizes, cap, _), case) in enumerate(zip(rows, cases, strict=True)):
        expect_buckets(run, case, number, fill(sizes, cap), sizes, "float32")
    sizes, frozen = [11, 12, 13, 14], 2
    models = [terms(rng, [*sizes[:frozen], 15, *sizes[frozen:]]) for _ in range(2)]
    for model in models:
        model.weights[frozen].requires_grad_(False)
    case = Case("a frozen parameter between the others", models, steps(rng, models), (mb(28),))
    run = make(ranks, [case], 2, "BucketedDDP")
    expect_buckets(run, case, 0, fill(sizes, mb(28)), sizes, "float32")


@check("bucketed", "a bucket holds one dtype", weight=2)
def test_bucketed_dtypes(ranks, rng):
    kinds = [torch.float32, torch.float64, torch.bfloat16]
    sizes = [12, 13, 14, 15, 16, 17, 18, 19, 20]

    def model() -> Terms:
        return Terms([nn.Parameter(draw(rng, (n,), kinds[i % 3])) for i, n in enumerate(sizes)])

    models = [model() for _ in range(2)]
    case = Case("three dtypes by turns, a cap of 150 bytes", models, steps(rng, models), (150 / 2**20,))
    run = make(ranks, [case], 2, "BucketedDDP")
    for k, dtype in enumerate(kinds):
        mine = sizes[k::3]
        buckets = fill(mine, 150 / 2**20, dtype.itemsize)
        expect_buckets(run, case, 0, buckets, mine, dtype_name(dtype))


@check("bucketed", "each bucket is sent as soon as it and those before it are complete", weight=3)
def test_bucketed_order(ranks, rng):
    sizes, cap = [11, 12, 13, 14, 15, 16, 17, 18], mb(36)
    for name, order in (
        ("gradients become ready from the last to the first", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("the second bucket is complete before the first", [0, 1, 6, 7, 2, 3, 4, 5]),
    ):
        models = [terms(rng, sizes) for _ in range(2)]
        case = Case(name, models, steps(rng, models, [order, order]), (cap,))
        run = make(ranks, [case], 2, "BucketedDDP")
        buckets = fill(sizes, cap)
        expect_buckets(run, case, 0, buckets, sizes, "float32")
        expect_sent_in_backward(run, case, buckets, sizes)
    one, two = (steps(rng, models, [order, order]) for _ in (1, 2))
    programs = [[*a, ("zero", True), *b] for a, b in zip(one, two, strict=True)]
    case = Case("the second bucket is complete before the first, two steps", models, programs, (cap,))
    expect_buckets(make(ranks, [case], 2, "BucketedDDP"), case, 0, buckets, sizes, "float32", steps=2)


@check("bucketed", "nothing is waited for in backward", weight=1)
def test_bucketed_waiting(ranks, rng):
    expect_no_waiting(ranks, rng, "BucketedDDP")


@check("bucketed", "micro-batches in no_sync are accumulated, and averaged once", weight=2)
def test_bucketed_no_sync(ranks, rng):
    expect_accumulation(ranks, rng, "BucketedDDP")


@check("bucketed", "unused parameters, on one rank or on all", weight=3)
def test_bucketed_unused(ranks, rng):
    expect_unused(ranks, rng, "BucketedDDP")


@check("bucketed", "the buckets are the same on every rank, whatever is ready first", weight=2)
def test_bucketed_any_order(ranks, rng):
    expect_any_order(ranks, rng, "BucketedDDP")


@check("bucketed", "a second backward, and gradients that start from zeros", weight=2)
def test_bucketed_two_backwards(ranks, rng):
    expect_two_backwards(ranks, rng, "BucketedDDP")


@check("bucketed", "checkpointed layers that share a weight", weight=1)
def test_bucketed_checkpointing(ranks, rng):
    expect_checkpointing(ranks, rng, "BucketedDDP")


@check("bucketed", "a group of some of the ranks; parameters that are not contiguous", weight=2)
def test_bucketed_subgroup(ranks, rng):
    expect_group_wrapped(ranks, rng, "BucketedDDP")
    expect_strided_wrapped(ranks, rng, "BucketedDDP")


# ------------------------------------------------------------------------------------------------------------ train_ddp


@check("train_ddp", "the losses are those of one device on the global batch", weight=4)
def test_train_ddp_losses(ranks, rng):
    tokens, config, first = random_tokens(rng), draw_settings(rng, 5), small_gpt(rng)
    wanted = reference_run(first, tokens, config)["losses"]
    for p in (2, 4, 1):
        models = [first] + [small_gpt(rng) for _ in range(p - 1)]
        run = run_training(ranks, models, tokens, Training(config))
        expect_losses(ranks, run, wanted, list(range(p)), f"{p} ranks, 5 steps")


@check("train_ddp", "each rank computes on its own rows of the global batch", weight=2)
def test_train_ddp_rows(ranks, rng):
    tokens, config, p = random_tokens(rng), draw_settings(rng, 2), 3
    models = [small_gpt(rng) for _ in range(p)]
    batches = reference_run(models[0], tokens, config)["batches"]
    run = run_training(ranks, models, tokens, Training(config))
    for rank in range(p):
        seen = run.values[rank]["batches"]
        for step, whole in enumerate(batches):
            rows = whole[rank * B // p : (rank + 1) * B // p]
            got = seen[step] if step < len(seen) else None
            wrong = difference(got, as_is(rows))
            if wrong:
                perhaps = None
                if isinstance(got, Tensor) and list(got.shape) == list(whole.shape):
                    perhaps = "every rank computes on the whole batch: nothing is gained by having more ranks"
                elif isinstance(got, Tensor) and got.shape == rows.shape:
                    perhaps = (
                        "every rank draws the same global batch, from the same random numbers, and takes its rows of it"
                    )
                fail(
                    case=f"step {step} on {p} ranks, a global batch of {B}",
                    expected=f"rank {rank} computes on rows {rank * B // p} to {(rank + 1) * B // p - 1}: {wrong[0]}",
                    found=wrong[1],
                    line=ranks.definition("train_ddp"),
                    perhaps=perhaps,
                )


@check("train_ddp", "one rank saves, and the run goes on exactly on another number of ranks", weight=3)
def test_train_ddp_resume(ranks, rng):
    tokens, whole = random_tokens(rng), draw_settings(rng, 6)
    models = [small_gpt(rng) for _ in range(2)]
    wanted = reference_run(models[0], tokens, whole)["losses"]
    first = run_training(ranks, models, tokens, Training(whole | {"steps": 3, "checkpoint_interval": 2}))
    saved = [v["saved"] for v in first.values]
    where = ranks.definition("train_ddp")
    if saved[0] is None:
        fail(case="3 steps on 2 ranks", expected="a checkpoint at checkpoint_path", found="none on rank 0", line=where)
    if saved[1] is not None:
        fail(
            case="3 steps on 2 ranks",
            expected="rank 0 alone saves",
            found="rank 1 saves, too",
            line=where,
            perhaps="the ranks have one disk: two that write to one path spoil the file",
        )
    if first.values[0]["saves"] != [2, 3]:
        fail(
            case="3 steps on 2 ranks, checkpoint_interval 2",
            expected="rank 0 saves after step 2, and after the last one, 3",
            found=f"it saves after steps {first.values[0]['saves']}",
            line=where,
        )
    for p in (3, 1):
        run = run_training(ranks, [small_gpt(rng) for _ in range(p)], tokens, Training(whole, saved[0]))
        expect_losses(ranks, run, wanted[3:], list(range(p)), f"saved by 2 ranks after 3 of 6 steps, resumed on {p}")
    alone = run_training(ranks, [small_gpt(rng)], tokens, Training(whole, saved[0], single=True))
    expect_losses(ranks, alone, wanted[3:], [0], "saved by 2 ranks after 3 of 6 steps, resumed by module 00's train")


@check("train_ddp", "when it returns on any rank, the last checkpoint is on the disk", weight=1)
def test_train_ddp_returns(ranks, rng):
    config = draw_settings(rng, 2)
    models = [small_gpt(rng) for _ in range(3)]
    run = run_training(ranks, models, random_tokens(rng), Training(config, slow=True))
    absent = [rank for rank in range(3) if not run.values[rank]["there"]]
    if absent:
        fail(
            case="2 steps on 3 ranks, the disk is slow",
            expected="the file is there when train_ddp returns, on every rank",
            found=f"ranks {absent} return before rank 0 has saved it",
            line=ranks.definition("train_ddp"),
            perhaps="the others must wait for the rank that saves: a barrier after the last save",
        )


@check("train_ddp", "in a group, its first rank is the one that counts", weight=1)
def test_train_ddp_subgroup(ranks, rng):
    tokens, config = random_tokens(rng), draw_settings(rng, 3)
    models = [small_gpt(rng) for _ in range(2)]
    wanted = reference_run(models[0], tokens, config)["losses"]
    run = run_training(ranks, models, tokens, Training(config), members=[1, 2])
    expect_losses(ranks, run, wanted, [1, 2], "a group of ranks [1, 2]")
    if run.values[1]["saved"] is None or run.values[2]["saved"] is not None:
        fail(
            case="a group of ranks [1, 2]",
            expected="rank 1, the group's first, saves the checkpoint",
            found=f"saved by {[r for r in (1, 2) if run.values[r]['saved'] is not None] or 'nobody'}",
            line=ranks.definition("train_ddp"),
        )
