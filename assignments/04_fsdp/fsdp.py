"""Module 04: fully sharded data parallelism. Every rank has a part of each parameter, and the whole one only while it
is needed.

What may be used: all of torch.distributed except `fully_shard` and FullyShardedDataParallel, which are what you build.

What holds for everything here:

* Every rank of `group` takes part; `None` is the default group, of all ranks. N is the size of the group, S the bytes
  of the parameters. N may be any number from 1; with N = 1 the results are those of one device.
* A shard is 1-D. The parameters of a unit are laid one after the other, flattened, and padded at the end with less than
  N elements; rank r has the r-th of N equal parts, of ceil(elements / N) elements.
* Parameters are floating-point, may be of several dtypes, frozen (requires_grad False), unused, or used in several
  places (tied): a tied one counts, is sent and is updated once.
* Each rank computes on its own part of the batch, and calls the same units in the same order as the others do.
* Whatever has been started is waited for by the end of forward or backward.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

# Called all_gather_into_tensor and reduce_scatter_tensor before torch 2.13
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# One unit's parameters


class FlatShard:
    """Parameters of one dtype as one flat buffer, of which each rank keeps a part.

    On construction the given parameters hold their values, the same on all ranks; afterwards this rank holds `shard`
    and nothing else: the full values are freed, and the bytes that stay are ceil(elements / N) times the size of one.

    What the parameters hold while they are not gathered is open: to read them then is an error, of which a process may
    die (their memory is not there).

    Attributes:
        shard: this rank's part, an nn.Parameter of shape (ceil(elements / N),) in the parameters' dtype: what an
            optimizer updates. The padding in it is zeros and stays so.

    Args:
        params: of one dtype, at least one; one that is given twice counts once.
        group: the ranks that share them.
        param_dtype: what they are gathered in; None is their own dtype. `shard` keeps its dtype whatever this is. (A
            parameter takes on the dtype of what is put into its `.data`.)

    Raises:
        ValueError: the parameters are of several dtypes.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        raise NotImplementedError("not implemented yet")

    def _mine(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor, padded with zeros where it ends early: a copy."""
        raise NotImplementedError("not implemented yet")

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the shapes of the parameters; the padding is left over."""
        raise NotImplementedError("not implemented yet")

    def start_unshard(self) -> None:
        """Start what `unshard` does, and do not wait for it. A step towards prefetching: it has no points of its own.

        Where the parameters are gathered already or on their way, nothing is sent.
        """
        raise NotImplementedError("not implemented yet")

    def unshard(self) -> None:
        """Gather the full values, with one all-gather: afterwards the parameters are views of one flat buffer."""
        raise NotImplementedError("not implemented yet")

    def reshard(self) -> None:
        """Free the full buffer. Where it is freed already, nothing happens."""
        raise NotImplementedError("not implemented yet")

    def reduce_gradient(self) -> None:
        """Add this rank's part of the average of the gradients to `shard.grad`, and free the full gradients.

        The average is over all ranks, in the shard's dtype; a gradient that is None counts as zeros. A step of `FSDP`,
        without points of its own.
        """
        raise NotImplementedError("not implemented yet")

    def gather_values(self) -> list[Tensor]:
        """The full values in the shard's own dtype, one tensor for each parameter; nothing stays gathered. A step."""
        raise NotImplementedError("not implemented yet")

    def load_values(self, values: Sequence[Tensor]) -> None:
        """Take this rank's part of the given values, one tensor for each parameter, into `shard`. A step."""
        raise NotImplementedError("not implemented yet")


# The wrapper


class FSDP(nn.Module):
    """Fully sharded data parallelism: a step is forward, backward and an optimizer's step, as on one device.

        model = FSDP(module, units=module.blocks)
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).sum().backward()
        optimizer.step()

    What is asked:

    * Construction takes the weights and buffers of the group's first rank, wherever the others start, and shards the
      parameters of each unit, dtype by dtype. Parameters in no unit form one more, the root's; so may those that
      several units share, or a unit and the rest of the module. Frozen parameters may have a shard of their own.
    * `parameters()` are the shards, 1-D and each once: an optimizer is made from them. After backward, `.grad` of a
      shard is its part of the gradients' average over the ranks, in the shard's dtype, and no rank keeps a full
      gradient. Each backward adds to it, until it is cleared: so micro-batches are accumulated. A parameter that is not
      used in a unit that is used has a zero gradient; of a unit that is not used at all, zero or None.
    * Each unit is gathered before its forward, freed after it, gathered again before its backward; after that its
      gradients are reduce-scattered and it is freed. Each of these is one collective, or one for each dtype. With
      reshard_after_forward=False it stays gathered from forward to backward. So a step sends 3(N-1)/N·S bytes per rank,
      or 2(N-1)/N·S. The root's unit may stay gathered from forward to backward in any case. A unit that is used twice
      in a forward may be gathered twice.
    * Besides the root's, when the computation of a unit starts, in forward or in backward, at most one unit is
      gathered, and full gradients are held of at most one unit; with prefetch of two each. It is measured in live
      bytes, whatever way the others were freed.
    * With `prefetch`, the all-gather of the next unit is issued before the computation of this one starts, and not
      waited for before: in forward of the next in `units`, in backward of the previous one.
    * With `param_dtype`, parameters are gathered and computed with in this dtype; floating-point inputs of the module
      and its units are cast to it, buffers and other inputs are not. The shards, their gradients and so the optimizer
      keep the parameters' own dtype. In which of the two gradients are reduced is open.
    * Forward under `no_grad`, and a forward that no backward follows, leave nothing gathered that the next forward
      would take for new; two forwards may be followed by one backward of both.

    Args:
        module: the model, of the same structure on every rank. It is called with tensors, or tuples, lists and dicts
            of them, by position or by keyword, and returns such, as do the units.
        units: submodules in the order of execution, none inside another.
        group: the ranks that take part.
        reshard_after_forward: whether units are freed between forward and backward.
        param_dtype: what is gathered and computed in; None is the parameters' own dtype.
        prefetch: whether the next unit is gathered while this one computes.

    Raises:
        ValueError: a unit is not a submodule of `module`.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        *,
        group: dist.ProcessGroup | None = None,
        reshard_after_forward: bool = True,
        param_dtype: torch.dtype | None = None,
        prefetch: bool = False,
    ) -> None:
        super().__init__()
        raise NotImplementedError("not implemented yet")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, with a name for each; `parameters()` and `zero_grad()` go by this."""
        raise NotImplementedError("not implemented yet")

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the module."""
        raise NotImplementedError("not implemented yet")

    def _flat_shards(self) -> list[FlatShard]:
        """Those of all units."""
        raise NotImplementedError("not implemented yet")

    # The four moments of a unit: steps, without points of their own

    def before_forward(self, i: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather unit i, start the next one's gathering, and return the unit's inputs in the right dtype.

        When backward has come to the gradients of these inputs, it is done with the unit.
        """
        raise NotImplementedError("not implemented yet")

    def after_forward(self, i: int, output: object) -> None:
        """Free unit i, and have it gathered again when backward comes to its output."""
        raise NotImplementedError("not implemented yet")

    def before_backward(self, i: int) -> None:
        """Gather unit i, and start the previous one's gathering."""
        raise NotImplementedError("not implemented yet")

    def after_backward(self, i: int) -> None:
        """Reduce-scatter unit i's gradients, and free it."""
        raise NotImplementedError("not implemented yet")

    def end_of_backward(self) -> None:
        """What `after_backward` has not done, since the inputs of a unit need no gradient: the first one's, usually.

        `torch.autograd.Variable._execution_engine.queue_callback(f)`, called during backward, has f called at its end.
        """
        raise NotImplementedError("not implemented yet")

    # The whole model

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all ranks such that the norm of the whole model's gradient is at most max_norm.

            norm = sqrt(sum of the squares of all elements of all gradients), scale = min(1, max_norm / (norm + 1e-6))

        Called after backward, on every rank; a gradient that is None counts as zeros.

        Returns:
            The norm before scaling, a tensor with one element, the same on all ranks.
        """
        raise NotImplementedError("not implemented yet")

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict of the plain module: every rank calls it, and every rank gets all of it.

        Returns:
            Name -> full tensor, in its own dtype, whatever param_dtype is: all parameters, under each of its names
            where one is tied, and the buffers that `module.state_dict()` has. `load_state_dict` of the plain module
            takes it.
        """
        raise NotImplementedError("not implemented yet")

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a full state dict, of the plain module or of any number of ranks.

        The shards stay the same objects, so that an optimizer which knows them stays right.

        Args:
            state: the same on every rank, as `full_state_dict` returns it.

        Raises:
            ValueError: a name or a shape is not the module's; nothing has been changed then.
        """
        raise NotImplementedError("not implemented yet")


# Activations


def checkpoint_units(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let each unit save its input only, and compute its activations again in backward: in place, before wrapping.

    Outputs and gradients stay what they were, dropout included. Of a unit that saves A bytes of activations and has an
    input of B bytes, B are left between forward and backward; those of one unit at a time come back in backward.
    Wrapped in `FSDP` with the same units, a unit's parameters are gathered when it is computed again.

    Args:
        module: the plain module; what it is called with, its names and its parameters stay the same.
        units: submodules of it, none inside another.

    Raises:
        ValueError: a unit is not a submodule of `module`.
    """
    raise NotImplementedError("not implemented yet")
