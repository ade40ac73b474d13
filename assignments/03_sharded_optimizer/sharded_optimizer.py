"""Module 03: sharded optimizers. Every rank has the whole model, and a part of the optimizer's state.

What may be used: all of torch.distributed and torch.optim except ZeroRedundancyOptimizer, which is what you build.

What holds for both optimizers:

* Every rank of `group` makes the optimizer and calls its methods; `None` is the default group, of all ranks. N is the
  size of the group, and any number from 1. The parameters are the same on all ranks to begin with: of the same shapes,
  in the same order and groups, with the same values.
* `params` is what a torch optimizer takes: an iterable of parameters, a generator too, or of dicts with `params` and
  the group's own options. `optimizer_cls(params, **kwargs)` would make the plain optimizer; what is not in `kwargs` has
  its defaults. (Pairs of name and parameter need not be taken.)
* `param_groups` has all parameters with all options, those that the inner optimizer fills in too. What somebody sets
  there, a learning-rate scheduler for instance, holds from the next step on.
* Parameters may be of several dtypes, empty, not contiguous (gloo takes such a tensor without complaint and mixes its
  elements up, so send contiguous copies), tied (used in several places: one parameter) or frozen. There may be fewer
  parameters, or fewer elements, than ranks. A frozen parameter has no gradient, and never changes.
* A step averages the gradients over the group, in their dtype, updates, and leaves the same parameters on every rank,
  bit for bit, in the tensors that they were in. What `.grad` holds after `step` is open.
* `step(closure)` calls the closure once, with gradients enabled, before it averages the gradients that the closure
  computes, and returns the closure's loss, this rank's own. `step()` returns None.
* Ranks have gradients for different parameters, as their data need them. A gradient that is missing on some ranks
  counts as zero there. Which messages are sent, and in which order, must not depend on it.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# The collectives of flat tensors, by the names that they have since torch 2.13, so that nothing warns:
# reduce_scatter_flat(output, input, group=...) and all_gather_flat(output, input, group=...).
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Who owns what


def partition_parameters(numels: Sequence[int], world_size: int) -> list[int]:
    """Choose an owner for every parameter so that the ranks' shares are about equally large.

    The largest share, in elements, is at most 4/3 of that of the best possible choice. Longest first does it: go
    through the parameters from the largest to the smallest, and give each to the rank that has the least so far. The
    answer depends on the arguments only, so that all ranks find the same one without a word. Parameters may be empty,
    and fewer than ranks.

    Args:
        numels: number of elements of each parameter; left as it is.
        world_size: number of ranks, at least 1.

    Returns:
        For each parameter, in the order given, the rank that owns it: 0 to world_size - 1.
    """
    raise NotImplementedError("not implemented yet")


def copy_options(source: dict, target: dict) -> None:
    """Give one parameter group all options of another, but not its parameters.

    A step that the two optimizers can share: it has no points, and you may do without.
    """
    raise NotImplementedError("not implemented yet")


# ZeRO-1: the state is sharded


class ShardedOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, with the state of each parameter on one rank only: its owner.

    A step averages the gradients over the group, lets each owner update its parameters, and gives these to all. What
    is asked, besides what the head of this file says:

    * The parameters are those that the plain optimizer has after the same steps with the averaged gradients.
    * `partition_parameters` is applied group by group, and decides who owns what, or another rule that is as even.
    * Between steps a rank holds, besides parameters and gradients, the state of the parameters that it owns; what a
      step needs beyond that is made in it and given up again (one flat copy of the parameters may be kept).
    * A parameter without gradient on any rank is left as it is, weight and state: the plain optimizer passes it over,
      too. Ranks may send one element for each parameter to find out. A frozen one may be thawed between steps.
    * Reducing a gradient to its owner alone is enough.
    * It is a `torch.optim.Optimizer`: `zero_grad` clears the gradients of all parameters, on every rank, and
      `add_param_group` adds a group at any time.

    Args:
        params: see above.
        optimizer_cls: a class of torch.optim that keeps its state by parameter, such as AdamW or SGD.
        group: the ranks that take part.
        kwargs: options of `optimizer_cls`.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **kwargs: object,
    ) -> None:
        raise NotImplementedError("not implemented yet")

    def add_param_group(self, param_group: dict) -> None:
        """Add a group of parameters: all of them here, those that this rank owns to the inner optimizer.

        Args:
            param_group: `params` and the group's own options.
        """
        raise NotImplementedError("not implemented yet")

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Average the gradients, update the parameters that this rank owns, and exchange them.

        Args:
            closure: computes the loss and the gradients, and returns the loss; None: the gradients are there.

        Returns:
            The closure's loss on this rank; None without a closure.
        """
        raise NotImplementedError("not implemented yet")

    def _average_gradients(self) -> list[Tensor]:
        """Leave the average of each gradient with its owner: a step of `step`, without points.

        Returns:
            The parameters that have a gradient on any rank: the same list on every rank.
        """
        raise NotImplementedError("not implemented yet")

    def state_dict(self) -> dict:
        """The full state, of all parameters: on every rank what the plain optimizer's `state_dict()` would be.

        A collective: every rank of the group calls it, and each gets all of it. So a plain optimizer can load it, and a
        `ShardedOptimizer` on any number of ranks. Whether it holds copies, and in which order its entries are, is open;
        its tensors are on the CPU or where the parameters are.

        Returns:
            {"state": number of a parameter -> its state, "param_groups": options and numbers of each group}.
        """
        raise NotImplementedError("not implemented yet")

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over a full state, that of a plain optimizer or of any number of ranks, with the groups' options.

        Of the state, this rank keeps only what belongs to its own parameters.

        Args:
            state_dict: as `state_dict()` returns it; the same on every rank, perhaps from a file. Left as it is.

        Raises:
            ValueError: its groups have other numbers of parameters than this optimizer's.
        """
        raise NotImplementedError("not implemented yet")


# ZeRO-2: the gradients are sharded, too


class ZeroOptimizer(torch.optim.Optimizer):
    """Any element-wise torch optimizer, with 1/N of the state and of the averaged gradients on each rank.

    All parameters of a dtype are one flat buffer, padded to a multiple of N and cut into N shards of equal size,
    wherever the borders fall. A step reduce-scatters the gradients, so that each rank has the average of its shard,
    updates this shard, and all-gathers the parameters. What is asked, besides what the head of this file says:

    * The parameters are those that the plain optimizer has after the same steps with the averaged gradients. A
      parameter that no rank used counts as one with a gradient of zeros.
    * For each dtype among the parameters that require a gradient two collectives for each step, a reduce-scatter and
      an all-gather, whatever the number of groups. Their padding is less than N elements. So a rank sends
      2 (N-1)/N S bytes in a step, S being the bytes of these parameters. Nothing else is sent.
    * After `step`, full gradients are not kept: neither in `.grad` nor elsewhere. Between steps a rank holds its share
      of the state, at most two more shards (a gradient, a copy of the parameters), and the parameters, of which one
      flat copy may be kept; or they are views of it.
    * Groups with options of their own and schedulers work. Which parameters require a gradient, and which groups there
      are, is settled at construction.

    Args:
        params: see above.
        optimizer_cls: a class of torch.optim that treats each element by itself, such as AdamW or SGD.
        group: the ranks that take part.
        kwargs: options of `optimizer_cls`.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **kwargs: object,
    ) -> None:
        raise NotImplementedError("not implemented yet")

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Reduce-scatter the gradients, update this rank's shard, and all-gather the parameters.

        Args:
            closure: computes the loss and the gradients, and returns the loss; None: the gradients are there.

        Returns:
            The closure's loss on this rank; None without a closure.
        """
        raise NotImplementedError("not implemented yet")

    def state_dict(self) -> dict:
        """The state of this rank's shard, with the groups' options. Nothing is sent; what it looks like is open."""
        raise NotImplementedError("not implemented yet")

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on from what `state_dict()` returned on the same rank of as many, with its options."""
        raise NotImplementedError("not implemented yet")


class FlatBuffer:
    """Parameters of one dtype as views of one flat tensor, which is padded and cut into shards.

    A part of `ZeroOptimizer`, without points: build it in another way, or do without.

    Attributes:
        values: shape (N · size,): all parameters, one after the other, and zeros.
        shard: shape (size,): this rank's part of `values`, a view.
    """

    def __init__(self, members: list[tuple[Tensor, dict]], rank: int, world_size: int) -> None:
        """Lay out the parameters, and add to each one's inner group its part of this rank's shard.

        Args:
            members: parameters of one dtype, each with a dict that has a list `params`.
            rank: of the N shards, the one that is this rank's.
            world_size: N.
        """
        raise NotImplementedError("not implemented yet")

    def take_gradients(self) -> Tensor:
        """All gradients in one new flat tensor, zeros where there is none; the parameters' own are given up."""
        raise NotImplementedError("not implemented yet")

    def set_gradient(self, shard: Tensor) -> None:
        """Give each part of the shard its part of the shard's gradient."""
        raise NotImplementedError("not implemented yet")


# The ledger


def model_state_bytes(
    num_params: float,
    world_size: int,
    stage: int,
    *,
    param_bytes: int = 2,
    grad_bytes: int = 2,
    master_bytes: int = 4,
    moment_bytes: int = 8,
) -> float:
    """Bytes of model state that each rank holds, when all can be divided evenly.

    For each parameter that is param_bytes + grad_bytes + master_bytes + moment_bytes. What is divided by world_size:

        stage 0   nothing (plain data parallelism)
        stage 1   the optimizer's state: the master copy and the moments
        stage 2   the gradients, too
        stage 3   the parameters, too

    Args:
        num_params: number of parameters.
        world_size: number of ranks, at least 1.
        stage: 0, 1, 2 or 3.
        param_bytes, grad_bytes, master_bytes, moment_bytes: of one parameter; by default those of mixed precision with
            Adam.

    Returns:
        Bytes, as an int or a float.

    Raises:
        ValueError: another stage, or a world_size below 1.
    """
    raise NotImplementedError("not implemented yet")
