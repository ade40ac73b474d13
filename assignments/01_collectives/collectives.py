"""Module 01: the collectives of torch.distributed, built from messages between two ranks.

What may be used: `dist.send`, `dist.recv`, `dist.isend`, `dist.irecv`, `dist.batch_isend_irecv`, and
questions about a group (`dist.get_rank`, `dist.get_world_size`, `dist.get_group_rank`,
`dist.get_global_rank`, `dist.get_process_group_ranks`). The built-in collectives are refused under any
name, `dist.barrier` too.

What holds for every function:

* It means what the function of the same name in torch.distributed means. Every rank of `group` calls it;
  `None` is the default group, of all ranks.
* `src` and `dst` are global ranks, in a subgroup too. Who is whose neighbour is decided by the rank in
  the group, 0 to p-1, where p is the size of the group. `dist.isend(..., group_dst=r)` and
  `dist.irecv(..., group_src=r)` address a rank of the group.
* p may be any number from 1, and any size may be 0.
* Any dtype is sent as it is. Sums are formed in the dtype of the tensors, in any order.
* Tensors may be non-contiguous: a column of a matrix, a transposed matrix. gloo's send and recv refuse those:
  send a contiguous copy; receive into one, then copy it to where the values belong.
* Tensors that are only read keep their values, and whatever has been started is waited for before returning.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int]  # a tensor, and the rank in the group of whoever is at the other end


def exchange(sends: list[Message], receives: list[Message], group: dist.ProcessGroup | None = None) -> None:
    """Send and receive all the given tensors, all of them under way at the same time.

    A step that the functions below can share: it has no points, and you may do without it. `dist.send`
    returns when the other side receives, so two ranks that send to each other first wait for ever; two
    that start both directions first and wait afterwards do not.

    Args:
        sends: pairs (tensor, group rank of the receiver), the tensors of any layout.
        receives: pairs (tensor to fill, group rank of the sender), the tensors of any layout.
        group: the group whose ranks the pairs speak of; None is the default group.
    """
    raise NotImplementedError("not implemented yet")


def group_rank(global_rank: int, group: dist.ProcessGroup | None) -> int:
    """The rank in `group` of the process that has `global_rank` among all (given)."""
    return dist.get_group_rank(group or dist.group.WORLD, global_rank)


# From one rank, and to one rank


def broadcast(tensor: Tensor, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the tensor of rank `src`, along a binomial tree.

    In round k, the 2^k ranks that have the tensor pass it to as many that have not: 1, 2, 4, ... ranks
    have it. Asked beyond the values: p-1 messages in all, and at most ⌈log2 p⌉ rounds on the longest
    path, where a rank sends one message in a round and receives one.

    Args:
        tensor: any shape, the same on every rank; read on `src`, overwritten in place on the others.
        src: global rank of the source.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None, src: int, group: dist.ProcessGroup | None = None
) -> None:
    """Give each rank its own one of the tensors that rank `src` holds.

    Asked beyond the values: only `src` sends, one message to each other rank; nothing goes to itself.

    Args:
        tensor: filled in place, on `src` too; the shape is that of each tensor in the list.
        scatter_list: on `src`, p tensors of one shape, the one at r for rank r of the group; they are
            only read. None or empty on the other ranks.
        src: global rank of the source.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


def gather(tensor: Tensor, gather_list: list[Tensor] | None, dst: int, group: dist.ProcessGroup | None = None) -> None:
    """Collect the tensors of all ranks on rank `dst`.

    Asked beyond the values: every rank but `dst` sends one message, to `dst`, which sends none.

    Args:
        tensor: this rank's contribution, of the same shape on every rank; only read.
        gather_list: on `dst`, p tensors of that shape, filled in place: the one at r with the tensor of
            rank r of the group. None or empty on the other ranks.
        dst: global rank of the destination.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


def reduce(tensor: Tensor, dst: int, group: dist.ProcessGroup | None = None) -> None:
    """Leave the sum of all ranks' tensors on rank `dst`.

    Asked beyond the values: `dst` receives at most ⌈log2 p⌉ tensors, so most additions happen on other
    ranks. The tree is yours to choose, a chain too. The tensors of the other ranks are unchanged at the
    end.

    Args:
        tensor: any shape, the same on every rank; overwritten by the sum on `dst`, only read on the others.
        dst: global rank of the destination.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


# Around a ring


def ring_all_gather(output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Concatenate the tensors of all ranks on every rank, passing them round a ring.

    In each of p-1 steps a rank passes to its right neighbour the chunk that it got in the step before, at
    first its own. Asked beyond the values: each rank sends exactly (p-1)·n elements, n = tensor.numel(),
    all of them to rank (rank + 1) mod p of the group.

    Args:
        output: shape (p·m, ...), filled in place: rows r·m to (r+1)·m are the tensor of rank r of the group.
        tensor: shape (m, ...), this rank's chunk; only read.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


def ring_reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Leave on each rank its own chunk of the sum of all ranks' tensors, summed on the way round a ring.

    In each of p-1 steps a rank passes a partial sum to its right neighbour, which adds its own chunk to it;
    the sum for rank r sets out at rank r+1 and gets its last summand at rank r. Asked beyond the values:
    each rank sends exactly (p-1)·n elements, n = output.numel(), all of them to rank (rank + 1) mod p of
    the group.

    Args:
        output: shape (m, ...), filled in place with rows r·m to (r+1)·m of the sum, on rank r of the group.
        tensor: shape (p·m, ...), this rank's summand; only read.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace every rank's tensor by the sum of all, as a ring reduce-scatter followed by a ring all-gather.

    Asked beyond the values: all that a rank sends goes to rank (rank + 1) mod p of the group. With S the
    bytes of the tensor, it is at most 2·(p-1)/p·S bytes, plus less than p elements in each of the 2·(p-1)
    steps where p does not divide the number of elements. It may travel in as many messages as you like.

    Args:
        tensor: any shape and any number of elements, the same on every rank; overwritten in place by the sum.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


# Between all pairs


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Send the tensor at r of every rank's `inputs` to rank r: a transposition of the table of all inputs.

    Asked beyond the values: a rank sends only what leaves it, each tensor straight to where it belongs,
    and in an order in which no rank waits for ever. Whether a message is sent for a tensor without
    elements is left open.

    Args:
        outputs: p tensors; the one at r is filled in place with what rank r of the group sends to this rank.
        inputs: p tensors, of different sizes and some empty; the one at r goes to rank r of the group, whose
            outputs[this rank] has its shape. They are only read.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


def recursive_doubling_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace every rank's tensor by the sum of all in few rounds, each with the whole tensor.

    In round k, ranks whose numbers differ in bit k only exchange their sums, and each adds the other's:
    after log2 p rounds everybody has everything. Where p is not a power of two, some ranks hand in their
    tensors first and get the result at the end. Asked beyond the values: at most ⌊log2 p⌋ + 2 rounds on
    the longest path, where a rank sends one message in a round and receives one.

    Args:
        tensor: any shape, the same on every rank; overwritten in place by the sum.
        group: the ranks that take part.
    """
    raise NotImplementedError("not implemented yet")


# What it costs


def bytes_sent(op: str, nbytes: float, p: int) -> float:
    """Bytes that one rank sends in a collective on p ranks; 0 for p = 1.

        all_reduce                                   2·(p-1)/p · nbytes   a reduce-scatter and an all-gather
        all_gather, reduce_scatter, all_to_all         (p-1)/p · nbytes   all chunks but one
        broadcast, reduce                                        nbytes   each rank but the last passes it on
        scatter                                        (p-1)/p · nbytes   the source: all chunks but its own
        gather                                             1/p · nbytes   each rank but the destination

    These are the rings' figures where there is a ring. Where not all ranks send, they are those of a rank
    that sends most.

    Args:
        op: name of the collective as in the table.
        nbytes: bytes of the full tensor, not of a shard: the output of an all-gather, the input of a
            reduce-scatter, the whole list of a scatter or gather, all inputs of one rank in an all-to-all.
        p: number of ranks.

    Returns:
        The bytes, as a float.

    Raises:
        ValueError: op is not in the table.
    """
    raise NotImplementedError("not implemented yet")


def effective_bandwidth(op: str, nbytes: float, p: int, seconds: float) -> float:
    """Bytes per second that one rank sent in a collective that took so long: bytes_sent / seconds.

    Args:
        op: name of the collective, as in `bytes_sent`.
        nbytes: bytes of the full tensor, as in `bytes_sent`.
        p: number of ranks.
        seconds: duration of the call.

    Returns:
        Bytes (not GB, not GiB) per second.

    Raises:
        ValueError: op is not one that `bytes_sent` knows.
    """
    raise NotImplementedError("not implemented yet")


def collective_time(op: str, nbytes: float, p: int, alpha: float, bandwidth: float, algorithm: str) -> float:
    """Predicted duration of a collective, where a message of b bytes takes alpha + b/bandwidth; 0 for p = 1.

    With T(b) = alpha + b/bandwidth and L = ⌈log2 p⌉:

        ring                 all_reduce                   2·(p-1) · T(nbytes/p)
                             all_gather, reduce_scatter     (p-1) · T(nbytes/p)
                             broadcast, reduce              (p-1) · T(nbytes)      passed from rank to rank
        tree                 broadcast, reduce                  L · T(nbytes)
                             all_reduce                       2·L · T(nbytes)      a reduce and a broadcast
        recursive_doubling   all_reduce                         L · T(nbytes)      p a power of two
                                                          (L + 1) · T(nbytes)      any other p
                             all_gather, reduce_scatter   L·alpha + (p-1)/p · nbytes/bandwidth

    Args:
        op: name of the collective, as in `bytes_sent`.
        nbytes: bytes of the full tensor, as in `bytes_sent`.
        p: number of ranks.
        alpha: seconds that a message takes whatever its size.
        bandwidth: bytes per second.
        algorithm: "ring", "tree" or "recursive_doubling".

    Returns:
        Seconds.

    Raises:
        ValueError: the table has no such op and algorithm.
    """
    raise NotImplementedError("not implemented yet")


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth of a link from measured messages: least squares of T = alpha + b/bandwidth.

    Args:
        nbytes: bytes of each message.
        seconds: duration of each message, in the same order.

    Returns:
        alpha in seconds, bandwidth in bytes per second; two floats.

    Raises:
        ValueError: fewer than two different sizes, through which no one line is the best.
    """
    raise NotImplementedError("not implemented yet")
