"""Module 02: data-parallel training. Every rank has the whole model and a part of each batch.

What may be used: all of torch.distributed except DistributedDataParallel, which is what you build.

What holds for every function and class:

* Every rank of `group` calls it; `None` is the default group, of all ranks. p is the size of the group.
* p may be any number from 1. With p = 1 the results are those of one device.
* The gradients of a module are those of its parameters that require one; a parameter that is used in several places
  (tied) has one gradient. Parameters may be of several dtypes and may be non-contiguous (transposed, a column of a
  matrix): gloo takes such a tensor without complaint and mixes its elements up, or those behind it. Send contiguous
  copies.
* Averages are formed in the dtype of the gradients, in any order; whether you divide before or after adding is open.
* A parameter can be without a gradient on some ranks, because their data did not need it: there it counts as zero,
  and afterwards every rank has the average. Without one on any rank, it may end as None or as zeros (an optimizer with
  weight decay then shrinks it all the same).
* An averaged gradient is in `p.grad`; whether that is the tensor of before or a new one is open.
* Where all ranks must first agree which gradients there are, one more message may be sent, of at most one element for
  each parameter.
* Whatever has been started is waited for before a function returns, `forward` and backward excepted.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from baseline import TrainConfig  # your module 00

Message = tuple[Tensor, dist.Work]  # what is being summed, and the all-reduce that is under way


# The batch


def shard_batch(batch: Tensor | tuple | list | dict, rank: int, world_size: int) -> Tensor | tuple | list | dict:
    """This rank's part of a batch: of B rows, rows rank·B/world_size up to (rank+1)·B/world_size.

    Whether the parts are views or copies is open. Nothing is sent.

    Args:
        batch: a tensor of shape (B, ...), or a tuple, list or dict of such tensors.
        rank: 0 to world_size - 1.
        world_size: number of parts.

    Returns:
        Of the same kind as `batch`: a tensor, or a tuple, list or dict (with the same keys) of this rank's parts.

    Raises:
        ValueError: world_size does not divide B; the message says both numbers.
    """
    raise NotImplementedError("not implemented yet")


# The replicas


def broadcast_module(module: nn.Module, src: int | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Make all ranks' modules equal to that of one rank: parameters, frozen ones too, and buffers.

    The values change in place, so that an optimizer which knows the parameters stays right; gradients are left alone.
    Asked beyond the values: the tensors travel by broadcast, one that several places share is sent once, nothing is
    sent in another dtype. In how many messages is open.

    Args:
        module: of the same structure on every rank.
        src: global rank of the source; None is the first rank of the group.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


# Gradients, after backward


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient, each once, in the order in which they were registered.

    A step that the functions below can share, as are the next two: they have no points, and you may do without them.
    """
    raise NotImplementedError("not implemented yet")


def start_average(parameters: Sequence[nn.Parameter], weight: float, group: dist.ProcessGroup | None = None) -> Message:
    """Start one all-reduce over the gradients of some parameters of one dtype, each multiplied by `weight`.

    What travels is a contiguous copy: the gradients themselves stay as they are, so that backward may go on adding to
    them. A gradient that is None becomes zeros first.

    Returns:
        The flat copy, which holds the sum as soon as the work is done, and the work.
    """
    raise NotImplementedError("not implemented yet")


def finish_average(parameters: Sequence[nn.Parameter], message: Message) -> None:
    """Wait for a message that `start_average` has started, and put the parts of the sum into the gradients."""
    raise NotImplementedError("not implemented yet")


def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient by its average over the ranks: one all-reduce for each, after backward.

        g = (g_0 + g_1 + ... + g_{p-1}) / p

    Asked beyond the values: one all-reduce for each gradient, of its elements and in its dtype.

    Args:
        module: after backward.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


def average_gradients_flat(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The same average in as few messages as can be: all gradients of one dtype travel as one flat tensor.

    Asked beyond the values: one all-reduce for each dtype among the gradients, of their elements and in their dtype.

    Args:
        module: after backward.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


def average_gradients_weighted(module: nn.Module, num_samples: int, group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient by that of the mean over all samples of all ranks, of which some have more than others.

    The gradients that a rank comes with are of the mean over its own n_r samples:

        g = (n_0·g_0 + n_1·g_1 + ... + n_{p-1}·g_{p-1}) / (n_0 + n_1 + ... + n_{p-1})

    A rank without samples adds nothing, whatever its gradients are: the mean of no numbers is nan. No intermediate
    result is much larger than the gradients, so that nothing overflows in float16. Asked beyond the values: the
    gradients' elements travel once, by all_reduce in their dtype, in as many messages as you like; the numbers of
    samples in one further small one.

    Args:
        module: after backward of a mean; on a rank without samples, backward may not have been called.
        num_samples: n_r, how many samples (or tokens) this rank's mean is over; 0 on some ranks, but not on all.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


# Gradients, during backward


class OverlappedDDP(nn.Module):
    """Data parallelism in which each gradient travels as soon as it is there, while backward computes the others.

    A step is a call of the wrapper, backward, `finish_gradient_synchronization()`, then the optimizer. What is asked:

    * Construction makes the ranks' modules equal to that of the group's first rank.
    * Each gradient has one all-reduce, of its elements and in its dtype. Where gradients become ready in the reverse
      order of registration, each one's all-reduce is issued before the next gradient is computed. In backward nothing
      is waited for.
    * Ranks may compute their gradients in different orders, and some not at all; a rank without a batch in a step calls
      `finish_gradient_synchronization` only. What is sent, and in which order, must be the same on every rank all the
      same. Whatever has not been sent by the end of backward is sent in `finish_gradient_synchronization`.
    * What has been accumulated in `p.grad` is averaged, not only what the last backward has added: in steps of several
      micro-batches all but the last run in `no_sync`. It makes no difference whether gradients were None or zeros
      before.
    * Backward may be called twice before a step is finished (two losses; a tied weight in two reentrant checkpoints is
      twice ready in one backward): on every rank then, and with parameters that are reached twice on all of them. The
      sum of both is averaged. How often it is sent then is open.
    * `parameters()` of the wrapper are those of the module.

    Args:
        module: the model, of the same structure on every rank. Which parameters require a gradient stays as it is.
        group: the ranks that take part.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        raise NotImplementedError("not implemented yet")

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the module."""
        raise NotImplementedError("not implemented yet")

    def finish_gradient_synchronization(self) -> None:
        """Send what has not been sent, wait for everything, and leave the averages in the gradients.

        It may be called after every backward: where the last forward and backward ran in `no_sync`, it does nothing,
        neither inside `no_sync` nor after it.
        """
        raise NotImplementedError("not implemented yet")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which forward and backward only accumulate gradients: nothing is sent.

        What happens when forward runs inside it and backward outside, or the other way round, is open.
        """
        raise NotImplementedError("not implemented yet")


def fill_buckets(parameters: Sequence[nn.Parameter], cap: float) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets, in the order given: a step of `BucketedDDP`, without points.

    Each goes into the open bucket of its dtype, unless it would take that beyond `cap` bytes: then the bucket is closed
    and a new one opened with it.

    Returns:
        The buckets, in the order in which they were opened.
    """
    raise NotImplementedError("not implemented yet")


class BucketedDDP(OverlappedDDP):
    """`OverlappedDDP` with fewer messages: gradients travel in buckets, each of which is one flat tensor.

    All that is asked of `OverlappedDDP` is asked here, of buckets in place of gradients (derive it from `nn.Module` if
    your `OverlappedDDP` is of no use for it):

    * Buckets are filled in the reverse order of registration. A gradient goes into the open bucket of its dtype; one
      that would take this bucket beyond the cap closes it and opens the next. So a gradient larger than the cap has a
      bucket of its own, and the buckets are the same on every rank, whatever happens in backward.
    * Each bucket has one all-reduce, issued in backward as soon as its gradients and those of all buckets before it are
      ready: before the next gradient is computed. The last bucket may also be left to
      `finish_gradient_synchronization`.
    * In which order buckets of different dtypes follow each other is open.

    Args:
        module: the model, of the same structure on every rank. Which parameters require a gradient stays as it is.
        bucket_cap_mb: the most that a bucket of several gradients holds, in MB of 2^20 bytes; may be a fraction.
        group: the ranks that take part.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float, group: dist.ProcessGroup | None = None) -> None:
        raise NotImplementedError("not implemented yet")


# The run


def train_ddp(
    model: nn.Module,
    tokens: np.ndarray,
    config: "TrainConfig",
    *,
    resume: str | os.PathLike | BinaryIO | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """The run of module 00's `train`, on many ranks: the same batches, losses and weights, up to rounding.

    `get_batch`, `seed_everything`, `cosine_lr` and the checkpoints are yours, from module 00: import them from
    `baseline` inside this function, so that the other problems do without them. All that the docstring of `train` says
    holds here, and besides:

    * The run starts from the weights that the group's first rank has, wherever the others start.
    * Every rank draws the whole global batch, of config.batch_size sequences, from the same random numbers, and
      computes on its own block of rows of it (`shard_batch`) only.
    * A checkpoint is saved by the group's first rank only, of the bare model: one that `train` can resume from. When
      this function returns on any rank, the last one is on the disk. Resumed from a checkpoint of any number of ranks,
      the run goes on as if it had never stopped.

    Args:
        model: with a method `loss(tokens, targets)` that returns the mean over a batch; trained in place. Its wrapper
            need not be called: hooks on the parameters do their work whoever computes the loss.
        tokens: the same on every rank; see `get_batch`.
        config: the same on every rank; see `TrainConfig`. The number of ranks divides config.batch_size.
        resume: a checkpoint to go on from, readable on every rank.
        group: the ranks that take part.

    Returns:
        For each step that this call has made, the mean loss of the global batch before the weights were updated: the
        same numbers on every rank.
    """
    raise NotImplementedError("not implemented yet")
