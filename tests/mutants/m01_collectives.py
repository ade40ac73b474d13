"""Module 01: wrong and unusual collectives.

What a mutant gets wrong is said in its name: values, traffic (bytes, messages, rounds, peers), a deadlock,
work that nobody waits for, or a built-in collective. Several show on three or more ranks only, a few only on
subgroups, on non-contiguous tensors or on sizes that p does not divide.
"""

from tests.mutants import Alternative, Mutant
from tests.mutants.m01_rewrites import REWRITES

MUTANTS = [
    # The step that all functions share: one mistake here spoils several problems; the one named must fail.
    Mutant(
        problem="ring_all_gather",
        name="waits for the send before it starts to receive, on every rank: a deadlock",
        old="""\
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
""",
        new="""\
    for op in ops:
        op.op(op.tensor, op.peer, group).wait()
""",
    ),
    Mutant(
        problem="ring_reduce_scatter",
        name="blocking send before blocking recv, on every rank: a deadlock",
        old="""\
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
""",
        new="""\
    for op in ops:
        (dist.send if op.op is dist.isend else dist.recv)(op.tensor, op.peer, group)
""",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="never waits",
        old="""\
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
""",
        new="""\
    if ops:
        dist.batch_isend_irecv(ops)
""",
    ),
    Mutant(
        problem="scatter_gather",
        name="forgets to wait for the isend",
        old="for work in dist.batch_isend_irecv(ops) if ops else []:",
        new="for work in dist.batch_isend_irecv(ops)[len(sends) :] if ops else []:",
    ),
    Mutant(
        problem="broadcast",
        name="forgets to wait for the irecv",
        old="for work in dist.batch_isend_irecv(ops) if ops else []:",
        new="for work in dist.batch_isend_irecv(ops)[: len(sends)] if ops else []:",
    ),
    Mutant(
        problem="broadcast",
        name="forgets to copy back into a strided target",
        old="""\
    landings = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor, _ in receives]
""",
        new="""\
    receives = [(tensor.contiguous(), source) for tensor, source in receives]
    landings = [tensor for tensor, _ in receives]
""",
    ),
    Mutant(
        problem="scatter_gather",
        name="sends a strided tensor as it is",
        old="dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=to)",
        new="dist.P2POp(dist.isend, tensor, group=group, group_peer=to)",
    ),
    Mutant(
        problem="all_to_all",
        name="receives straight into a strided tensor",
        old="[torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor, _ in receives]",
        new="[tensor for tensor, _ in receives]",
    ),
    # broadcast
    Mutant(
        problem="broadcast",
        name="treats src as a group rank",
        old="p, root = dist.get_world_size(group), group_rank(src, group)",
        new="p, root = dist.get_world_size(group), src",
    ),
    Mutant(
        problem="broadcast",
        name="the tree starts at rank 0 whatever src is",
        old="p, root = dist.get_world_size(group), group_rank(src, group)",
        new="p, root = dist.get_world_size(group), 0",
    ),
    Mutant(
        problem="broadcast",
        name="the binomial tree works for powers of two only",
        old="if me < reach and me + reach < p:",
        new="if me < reach:",
    ),
    Mutant(
        problem="broadcast",
        name="the source sends to everybody, one after the other",
        old="    reach = 1  # ranks 0 to reach-1 have the tensor\n",
        new="""\
    for r in range(1, p) if me == 0 else []:
        exchange([(tensor, (r + root) % p)], [], group)
    if me != 0:
        exchange([], [(tensor, root)], group)
    reach = p
""",
    ),
    Mutant(
        problem="broadcast",
        name="the source sends to everybody, all at once",
        old="    reach = 1  # ranks 0 to reach-1 have the tensor\n",
        new="""\
    if me == 0:
        exchange([(tensor, (r + root) % p) for r in range(1, p)], [], group)
    else:
        exchange([], [(tensor, root)], group)
    reach = p
""",
    ),
    Mutant(
        problem="broadcast",
        name="passes the tensor along a chain of p-1 hops",
        old="    reach = 1  # ranks 0 to reach-1 have the tensor\n",
        new="""\
    if me > 0:
        exchange([], [(tensor, (me - 1 + root) % p)], group)
    if me + 1 < p:
        exchange([(tensor, (me + 1 + root) % p)], [], group)
    reach = p
""",
    ),
    Mutant(
        problem="broadcast",
        name="calls the built-in collective",
        old="    reach = 1  # ranks 0 to reach-1 have the tensor\n",
        new="""\
    landing = tensor.contiguous()
    dist.broadcast(landing, src, group)
    tensor.copy_(landing)
    reach = p
""",
    ),
    # scatter, gather
    Mutant(
        problem="scatter_gather",
        name="scatter treats src as a group rank",
        old="rank, root = dist.get_rank(group), group_rank(src, group)",
        new="rank, root = dist.get_rank(group), src",
    ),
    Mutant(
        problem="scatter_gather",
        name="scatter forgets the source's own chunk",
        old="        tensor.copy_(scatter_list[root])\n",
        new="",
    ),
    Mutant(
        problem="scatter_gather",
        name="scatter sends the whole list to everybody, who keep their part",
        old="""\
        exchange([(chunk, r) for r, chunk in enumerate(scatter_list) if r != root], [], group)
        tensor.copy_(scatter_list[root])
    else:
        exchange([], [(tensor, root)], group)
""",
        new="""\
        everything = torch.stack(scatter_list)
        exchange([(everything, r) for r in range(len(scatter_list)) if r != root], [], group)
    else:
        everything = torch.stack([tensor] * dist.get_world_size(group))
        exchange([], [(everything, root)], group)
    tensor.copy_(everything[rank])
""",
    ),
    Mutant(
        problem="scatter_gather",
        name="scatter passes the chunks along a chain",
        old="""\
    if rank == root:
        exchange([(chunk, r) for r, chunk in enumerate(scatter_list) if r != root], [], group)
        tensor.copy_(scatter_list[root])
    else:
        exchange([], [(tensor, root)], group)
""",
        new="""\
    p = dist.get_world_size(group)
    me = (rank - root) % p
    chunks = [tensor if r == rank else torch.empty_like(tensor) for r in range(p)]
    if me == 0:
        for chunk, given in zip(chunks, scatter_list, strict=True):
            chunk.copy_(given)
    for later in range(p - 1, 0, -1):
        r = (root + later) % p
        if 0 < me <= later:
            exchange([], [(chunks[r], (rank - 1) % p)], group)
        if me < later:
            exchange([(chunks[r], (rank + 1) % p)], [], group)
""",
    ),
    Mutant(
        problem="scatter_gather",
        name="gather treats dst as a group rank",
        old="rank, root = dist.get_rank(group), group_rank(dst, group)",
        new="rank, root = dist.get_rank(group), dst",
    ),
    Mutant(
        problem="scatter_gather",
        name="gather leaves the destination's own place empty",
        old="        gather_list[root].copy_(tensor)\n",
        new="",
    ),
    Mutant(
        problem="scatter_gather",
        name="gather receives everybody's tensor into one buffer",
        old="""\
        exchange([], [(chunk, r) for r, chunk in enumerate(gather_list) if r != root], group)
""",
        new="""\
        buffer = torch.empty_like(tensor)
        exchange([], [(buffer, r) for r in range(len(gather_list)) if r != root], group)
        for chunk in gather_list:
            chunk.copy_(buffer)
""",
    ),
    Mutant(
        problem="scatter_gather",
        name="gather files the tensors counted from the destination",
        old="exchange([], [(chunk, r) for r, chunk in enumerate(gather_list) if r != root], group)",
        new="""\
p = len(gather_list)
        exchange([], [(gather_list[(r - root) % p], r) for r in range(p) if r != root], group)""",
    ),
    # reduce
    Mutant(
        problem="reduce",
        name="treats dst as a group rank",
        old="p, root = dist.get_world_size(group), group_rank(dst, group)",
        new="p, root = dist.get_world_size(group), dst",
    ),
    Mutant(
        problem="reduce",
        name="the root receives p-1 tensors",
        old="    while distance < p:\n",
        new="""\
    if me > 0:
        exchange([(total, root)], [], group)
        return
    for r in range(1, p):
        exchange([], [(arriving, (r + root) % p)], group)
        total += arriving
    distance = p
    while distance < p:
""",
    ),
    Mutant(
        problem="reduce",
        name="accumulates into the caller's tensor on ranks that only read it",
        old="total, arriving = tensor.clone(), torch.empty_like(tensor)",
        new="total, arriving = tensor, torch.empty_like(tensor)",
    ),
    Mutant(
        problem="reduce",
        name="the tree works for powers of two only",
        old="        if me + distance < p:\n",
        new="        if not me & distance:\n",
    ),
    Mutant(
        problem="reduce",
        name="keeps the last arrival only",
        old="            total += arriving\n",
        new="            total = tensor + arriving\n",
    ),
    Mutant(
        problem="reduce",
        name="leaves the sum in a local variable",
        old="    tensor.copy_(total)  # only the root comes this far\n",
        new="    tensor = total\n",
    ),
    Mutant(
        problem="reduce",
        name="passes its own tensor up in place of the sum of its subtree",
        old="exchange([(total, (me - distance + root) % p)], [], group)",
        new="exchange([(tensor, (me - distance + root) % p)], [], group)",
    ),
    # ring_all_gather
    Mutant(
        problem="ring_all_gather",
        name="passes on its own chunk in every step",
        old="leaving, arriving = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]",
        new="leaving, arriving = chunks[rank], chunks[(rank - step - 1) % p]",
    ),
    Mutant(
        problem="ring_all_gather",
        name="sends the whole output every hop",
        old="        exchange([(leaving, right)], [(arriving, left)], group)\n",
        new="""\
        buffer = torch.empty_like(output)
        exchange([(output, right)], [(buffer, left)], group)
        arriving.copy_(buffer.view(p, *tensor.shape)[(rank - step - 1) % p])
""",
    ),
    Mutant(
        problem="ring_all_gather",
        name="goes round to the left",
        old="""\
        leaving, arriving = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        exchange([(leaving, right)], [(arriving, left)], group)
""",
        new="""\
        leaving, arriving = chunks[(rank + step) % p], chunks[(rank + step + 1) % p]
        exchange([(leaving, left)], [(arriving, right)], group)
""",
    ),
    Mutant(
        problem="ring_all_gather",
        name="sends its chunk to everybody directly",
        old="""\
        leaving, arriving = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        exchange([(leaving, right)], [(arriving, left)], group)
""",
        new="""\
        to, source = (rank + step + 1) % p, (rank - step - 1) % p
        exchange([(tensor, to)], [(chunks[source], source)], group)
""",
    ),
    Mutant(
        problem="ring_all_gather",
        name="one receive buffer for all chunks",
        old="""\
    for step in range(p - 1):
        leaving, arriving = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        exchange([(leaving, right)], [(arriving, left)], group)
""",
        new="""\
    buffer, got = torch.empty_like(tensor), [tensor]
    for _ in range(p - 1):
        exchange([(got[-1], right)], [(buffer, left)], group)
        got.append(buffer)
    for step, chunk in enumerate(got):
        chunks[(rank - step) % p].copy_(chunk)
""",
    ),
    Mutant(
        problem="ring_all_gather",
        name="forgets its own chunk in the output",
        old="""\
    chunks[rank].copy_(tensor)
    for step in range(p - 1):
        leaving, arriving = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
""",
        new="""\
    for step in range(p - 1):
        leaving, arriving = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        leaving = leaving if step else tensor
""",
    ),
    Mutant(
        problem="ring_all_gather",
        name="one step too few",
        old="""\
    for step in range(p - 1):
        leaving""",
        new="""\
    for step in range(p - 2):
        leaving""",
    ),
    Mutant(
        problem="ring_all_gather",
        name="one step too many",
        old="""\
    for step in range(p - 1):
        leaving""",
        new="""\
    for step in range(p):
        leaving""",
    ),
    Mutant(
        problem="ring_all_gather",
        name="finds its place by its global rank",
        old="    chunks[rank].copy_(tensor)\n",
        new="    rank = dist.get_rank() % p\n    chunks[rank].copy_(tensor)\n",
    ),
    Mutant(
        problem="ring_all_gather",
        name="fills a contiguous copy of a strided output",
        old="chunks = output.view(p, *tensor.shape)  # splits",
        new="chunks = output.contiguous().view(p, *tensor.shape)  # splits",
    ),
    # ring_reduce_scatter
    Mutant(
        problem="ring_reduce_scatter",
        name="each rank ends with its right neighbour's chunk",
        old="""\
    partial, arriving = chunks[left].clone(), torch.empty_like(chunks[left])
    for step in range(p - 1):
        exchange([(partial, right)], [(arriving, left)], group)
        partial = arriving + chunks[(rank - step - 2) % p]
""",
        new="""\
    partial, arriving = chunks[rank].clone(), torch.empty_like(chunks[rank])
    for step in range(p - 1):
        exchange([(partial, right)], [(arriving, left)], group)
        partial = arriving + chunks[(rank - step - 1) % p]
""",
    ),
    Mutant(
        problem="ring_reduce_scatter",
        name="adds up in the caller's input",
        old="partial = arriving + chunks[(rank - step - 2) % p]",
        new="partial = chunks[(rank - step - 2) % p].add_(arriving)",
    ),
    Mutant(
        problem="ring_reduce_scatter",
        name="adds the chunk of the wrong step",
        old="partial = arriving + chunks[(rank - step - 2) % p]",
        new="partial = arriving + chunks[(rank - step - 1) % p]",
    ),
    Mutant(
        problem="ring_reduce_scatter",
        name="passes on what arrived without adding",
        old="partial = arriving + chunks[(rank - step - 2) % p]",
        new="partial = arriving.clone()",
    ),
    Mutant(
        problem="ring_reduce_scatter",
        name="sends the whole tensor every hop and keeps a chunk",
        old="""\
    partial, arriving = chunks[left].clone(), torch.empty_like(chunks[left])
    for step in range(p - 1):
        exchange([(partial, right)], [(arriving, left)], group)
        partial = arriving + chunks[(rank - step - 2) % p]
""",
        new="""\
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(p - 1):
        exchange([(passing, right)], [(passing, left)], group)
        total += passing
    partial = total.view(p, *output.shape)[rank]
""",
    ),
    Mutant(
        problem="ring_reduce_scatter",
        name="sends each chunk straight to its owner",
        old="""\
    partial, arriving = chunks[left].clone(), torch.empty_like(chunks[left])
    for step in range(p - 1):
        exchange([(partial, right)], [(arriving, left)], group)
        partial = arriving + chunks[(rank - step - 2) % p]
""",
        new="""\
    partial, arriving = chunks[rank].clone(), torch.empty_like(chunks[rank])
    for shift in range(1, p):
        to, source = (rank + shift) % p, (rank - shift) % p
        exchange([(chunks[to], to)], [(arriving, source)], group)
        partial += arriving
""",
    ),
    Mutant(
        problem="ring_reduce_scatter",
        name="forgets that the output is to be filled in place",
        old="    output.copy_(partial)\n",
        new="    output = partial\n",
    ),
    # ring_all_reduce
    Mutant(
        problem="ring_all_reduce",
        name="sends the whole tensor every hop",
        old="    p, n = dist.get_world_size(group), tensor.numel()\n",
        new="""\
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    passing = tensor.clone()
    for _ in range(p - 1):
        exchange([(passing, (rank + 1) % p)], [(passing, (rank - 1) % p)], group)
        tensor += passing
    return
    n = tensor.numel()
""",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="gathers all tensors and adds them up",
        old="    p, n = dist.get_world_size(group), tensor.numel()\n",
        new="""\
    p, n = dist.get_world_size(group), tensor.numel()
    table = tensor.new_empty(p, *tensor.shape)
    ring_all_gather(table, tensor[None], group)
    tensor.copy_(table.sum(0))
    return
""",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="reduces on one rank and broadcasts",
        old="    p, n = dist.get_world_size(group), tensor.numel()\n",
        new="""\
    p, n = dist.get_world_size(group), tensor.numel()
    first = dist.get_global_rank(group or dist.group.WORLD, 0)
    reduce(tensor, first, group)
    broadcast(tensor, first, group)
    return
""",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="works only where p divides the number of elements",
        old="share = tensor.new_empty((n + p - 1) // p)",
        new="share = tensor.new_empty(n // p)",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="leaves the remainder out of the sum",
        old="""\
    share = tensor.new_empty((n + p - 1) // p)
""",
        new="""\
    n = n // p * p
    share = tensor.new_empty(n // p)
    whole, tensor = tensor, tensor.flatten()[:n]
    padded = tensor.clone()
    ring_reduce_scatter(share, padded, group)
    ring_all_gather(padded, share, group)
    whole.copy_(torch.cat([padded, whole.flatten()[n:]]).view(whole.shape))
    return
""",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="averages where the sum is asked for",
        old="    tensor.copy_(padded[:n].view(tensor.shape))\n",
        new="    tensor.copy_(padded[:n].view(tensor.shape) / p)\n",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="rebinds the name in place of writing into the tensor",
        old="    tensor.copy_(padded[:n].view(tensor.shape))\n",
        new="    tensor = padded[:n].view(tensor.shape)\n",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="writes to a flattened copy of a strided tensor",
        old="    tensor.copy_(padded[:n].view(tensor.shape))\n",
        new="    tensor.flatten().copy_(padded[:n])\n",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="adds up in float32 whatever the dtype",
        old="    padded = tensor.new_zeros(p * share.numel())\n",
        new="""\
    share = share.float()
    padded = share.new_zeros(p * share.numel())
""",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="calls the built-in collective",
        old="    p, n = dist.get_world_size(group), tensor.numel()\n",
        new="""\
    landing = tensor.contiguous()
    dist.all_reduce(landing, group=group)
    tensor.copy_(landing)
    return
    p, n = dist.get_world_size(group), tensor.numel()
""",
    ),
    Mutant(
        problem="ring_all_reduce",
        name="puts a barrier between its two halves",
        old="    ring_reduce_scatter(share, padded, group)\n",
        new="    ring_reduce_scatter(share, padded, group)\n    dist.barrier(group)\n",
    ),
    # all_to_all
    Mutant(
        problem="all_to_all",
        name="sizes the receive buffer by what it sends",
        old="        exchange([(inputs[to], to)], [(outputs[source], source)], group)\n",
        new="""\
        arriving = torch.empty_like(inputs[to])
        exchange([(inputs[to], to)], [(arriving, source)], group)
        outputs[source].copy_(arriving)
""",
    ),
    Mutant(
        problem="all_to_all",
        name="forgets what stays on the rank",
        old="    outputs[rank].copy_(inputs[rank])\n",
        new="",
    ),
    Mutant(
        problem="all_to_all",
        name="receives from the rank it sends to, in an order in which nobody gets on",
        old="to, source = (rank + shift) % p, (rank - shift) % p",
        new="to, source = (rank + shift) % p, (rank + shift) % p",
    ),
    Mutant(
        problem="all_to_all",
        name="everybody sends everything, blocking, before receiving",
        old="    for shift in range(1, p):  # in each round",
        new="""\
    others = [r for r in range(p) if r != rank]
    for r in others:
        exchange([(inputs[r], r)], [], group)
    for r in others:
        exchange([], [(outputs[r], r)], group)
    for shift in range(0):  # in each round""",
    ),
    Mutant(
        problem="all_to_all",
        name="files what it gets under the rank it sends to",
        old="exchange([(inputs[to], to)], [(outputs[source], source)], group)",
        new="exchange([(inputs[to], to)], [(outputs[to], source)], group)",
    ),
    Mutant(
        problem="all_to_all",
        name="sends every tensor to everybody",
        old="        exchange([(inputs[to], to)], [(outputs[source], source)], group)\n",
        new="""\
        for r in range(p):
            ours = inputs[r]
            size = torch.zeros(2, dtype=torch.int64)
            exchange([(torch.tensor([ours.numel(), r]), to)], [(size, source)], group)
            theirs = outputs[source].new_empty(int(size[0]))
            exchange([(ours.flatten(), to)], [(theirs, source)], group)
            if r == rank:
                outputs[source].copy_(theirs.view(outputs[source].shape))
""",
    ),
    # recursive_doubling_all_reduce
    Mutant(
        problem="recursive_doubling_all_reduce",
        name="works for powers of two only",
        old="core = 1 << (p.bit_length() - 1)",
        new="core = p",
    ),
    Mutant(
        problem="recursive_doubling_all_reduce",
        name="leaves the ranks beyond the power of two out",
        old="    if rank >= core:\n",
        new="    p = core\n    if rank >= core:\n        return\n    if rank >= core:\n",
    ),
    Mutant(
        problem="recursive_doubling_all_reduce",
        name="never sends the result to the ranks beyond the power of two: they wait for ever",
        old="""\
    if has_guest:
        exchange([(tensor, rank + core)], [], group)
""",
        new="",
    ),
    Mutant(
        problem="recursive_doubling_all_reduce",
        name="takes its partner by addition: nobody's partner answers",
        old="partner = rank ^ distance",
        new="partner = (rank + distance) % core",
    ),
    Mutant(
        problem="recursive_doubling_all_reduce",
        name="the same partner in every round",
        old="partner = rank ^ distance",
        new="partner = rank ^ 1",
    ),
    Mutant(
        problem="recursive_doubling_all_reduce",
        name="a reduce and a broadcast: twice the rounds",
        old="    core = 1 << (p.bit_length() - 1)",
        new="""\
    first = dist.get_global_rank(group or dist.group.WORLD, 0)
    reduce(tensor, first, group)
    broadcast(tensor, first, group)
    return
    core = 1 << (p.bit_length() - 1)""",
    ),
    Mutant(
        problem="recursive_doubling_all_reduce",
        name="forgets the tensor of its guest",
        old="""\
        exchange([], [(arriving, rank + core)], group)
        tensor += arriving
""",
        new="""\
        exchange([], [(arriving, rank + core)], group)
""",
    ),
    # accounting
    Mutant(
        problem="accounting",
        name="counts an all-reduce once in place of twice",
        old='"all_reduce": 2 * all_but_one,',
        new='"all_reduce": all_but_one,',
    ),
    Mutant(
        problem="accounting",
        name="counts the bytes of all ranks together",
        old="all_but_one = (p - 1) / p",
        new="all_but_one = p - 1",
    ),
    Mutant(
        problem="accounting",
        name="takes nbytes of a reduce-scatter for a shard",
        old='"reduce_scatter": all_but_one,',
        new='"reduce_scatter": p - 1,',
    ),
    Mutant(
        problem="accounting",
        name="a broadcast on one rank sends something",
        old="return share[op] * nbytes if p > 1 else 0.0",
        new="return share[op] * nbytes",
    ),
    Mutant(
        problem="accounting",
        name="an unknown collective is a KeyError",
        old="raise ValueError(f\"unknown collective {op!r}: expected one of {', '.join(share)}\")",
        new="raise KeyError(op)",
    ),
    Mutant(
        problem="accounting",
        name="bandwidth in GiB/s",
        old="return bytes_sent(op, nbytes, p) / seconds",
        new="return bytes_sent(op, nbytes, p) / seconds / 2**30",
    ),
    Mutant(
        problem="accounting",
        name="bandwidth of the tensor's bytes in place of the bytes sent",
        old="return bytes_sent(op, nbytes, p) / seconds",
        new="return nbytes / seconds",
    ),
    Mutant(
        problem="accounting",
        name="the ring's messages are the whole tensor",
        old="chunk = alpha + nbytes / bandwidth, alpha + nbytes / p / bandwidth",
        new="chunk = alpha + nbytes / bandwidth, alpha + nbytes / bandwidth",
    ),
    Mutant(
        problem="accounting",
        name="pays the latency once in place of once a step",
        old='("ring", "all_reduce"): 2 * (p - 1) * chunk,',
        new='("ring", "all_reduce"): alpha + 2 * (p - 1) * nbytes / p / bandwidth if p > 1 else 0.0,',
    ),
    Mutant(
        problem="accounting",
        name="rounds the logarithm down",
        old="rounds = (p - 1).bit_length()",
        new="rounds = p.bit_length() - 1",
    ),
    Mutant(
        problem="accounting",
        name="forgets the extra round where p is no power of two",
        old="fold = 1 if p & (p - 1) else 0",
        new="fold = 0",
    ),
    Mutant(
        problem="accounting",
        name="a tree all-reduce is only the reduce",
        old='("tree", "all_reduce"): 2 * rounds * whole,',
        new='("tree", "all_reduce"): rounds * whole,',
    ),
    Mutant(
        problem="accounting",
        name="an unknown algorithm takes no time",
        old="""\
    if (algorithm, op) not in times:
        raise ValueError(f"no formula for {op!r} by {algorithm!r}")
    return times[algorithm, op]
""",
        new="    return times.get((algorithm, op), 0.0)\n",
    ),
    Mutant(
        problem="accounting",
        name="the fit returns seconds per byte",
        old="return float(alpha), float(1 / slope)",
        new="return float(alpha), float(slope)",
    ),
    Mutant(
        problem="accounting",
        name="the fit mixes up slope and intercept",
        old="slope, alpha = np.polyfit(nbytes, seconds, deg=1)",
        new="alpha, slope = np.polyfit(nbytes, seconds, deg=1)",
    ),
    Mutant(
        problem="accounting",
        name="the fit draws the line through the first and the last point",
        old="    slope, alpha = np.polyfit(nbytes, seconds, deg=1)\n",
        new="""\
    slope = (seconds[-1] - seconds[0]) / (nbytes[-1] - nbytes[0])
    alpha = seconds[0] - slope * nbytes[0]
""",
    ),
    Mutant(
        problem="accounting",
        name="one size is enough for a fit",
        old="    if len({float(size) for size in nbytes}) < 2:\n",
        new="    if len(nbytes) < 2:\n",
    ),
    *REWRITES,
]


ALTERNATIVES = [
    Alternative(
        problem="ring_all_reduce",
        name="exchange starts its isends, receives one by one, blocking, and waits for the isends last",
        function="exchange",
        source='''\
def exchange(sends, receives, group=None):
    """isend and recv in place of a batch."""
    leaving = [tensor.contiguous() for tensor, _ in sends]
    works = [
        dist.isend(tensor, group=group, group_dst=to) for tensor, (_, to) in zip(leaving, sends, strict=True)
    ]
    for tensor, source in receives:
        if tensor.is_contiguous():
            dist.recv(tensor, group=group, group_src=source)
        else:
            landing = tensor.contiguous()
            dist.recv(landing, group=group, group_src=source)
            tensor.copy_(landing)
    for work in works:
        work.wait()
''',
    ),
    Alternative(
        problem="broadcast",
        name="halves the distance from round to round",
        function="broadcast",
        source='''\
def broadcast(tensor, src, group=None):
    """From the highest bit down: whoever has only higher bits set receives, then serves the lower bits."""
    p = dist.get_world_size(group)
    root = dist.get_process_group_ranks(group or dist.group.WORLD).index(src)
    me = (dist.get_rank(group) - root) % p
    bit = 1 << (p - 1).bit_length()
    while (bit := bit >> 1) > 0:
        if me % (2 * bit) == bit:
            exchange([], [(tensor, (me - bit + root) % p)], group)
        elif me % (2 * bit) == 0 and me + bit < p:
            exchange([(tensor, (me + bit + root) % p)], [], group)
''',
    ),
    Alternative(
        problem="broadcast",
        name="splits the ranks into halves, with blocking send and recv and global ranks",
        function="broadcast",
        source='''\
def broadcast(tensor, src, group=None):
    """The first rank of a range gives the tensor to the first of its second half."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    start = ranks.index(src)
    ranks = ranks[start:] + ranks[:start]
    me, low, high = ranks.index(dist.get_rank()), 0, len(ranks)
    landing = tensor.contiguous()
    while high - low > 1:
        middle = (low + high + 1) // 2
        if me == low:
            dist.send(landing, ranks[middle], group)
        elif me == middle:
            dist.recv(landing, ranks[low], group)
        low, high = (low, middle) if me < middle else (middle, high)
    if landing is not tensor and me != 0:
        tensor.copy_(landing)
''',
    ),
    Alternative(
        problem="scatter_gather",
        name="scatter sends one after the other, blocking, with global ranks",
        function="scatter",
        source='''\
def scatter(tensor, scatter_list=None, src=0, group=None):
    """Blocking sends, the source's own chunk first."""
    if dist.get_rank() == src:
        for chunk, peer in zip(scatter_list, dist.get_process_group_ranks(group), strict=True):
            if peer == src:
                tensor.copy_(chunk)
            else:
                dist.send(chunk.contiguous(), dst=peer, group=group)
        return
    landing = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    dist.recv(landing, src=src, group=group)
    tensor.copy_(landing)
''',
    ),
    Alternative(
        problem="scatter_gather",
        name="gather takes the tensors in whatever order they come, last rank first",
        function="gather",
        source='''\
def gather(tensor, gather_list=None, dst=0, group=None):
    """Posts all receives, from the last rank to the first, then waits."""
    me, root = dist.get_rank(group), group_rank(dst, group)
    if me != root:
        dist.isend(tensor.contiguous(), group=group, group_dst=root).wait()
        return
    landings = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in gather_list]
    landings[me].copy_(tensor)
    others = [r for r in reversed(range(len(landings))) if r != me]
    for work in [dist.irecv(landings[r], group=group, group_src=r) for r in others]:
        work.wait()
    for target, landing in zip(gather_list, landings, strict=True):
        target.copy_(landing)
''',
    ),
    Alternative(
        problem="reduce",
        name="a chain that ends at the root",
        function="reduce",
        source='''\
def reduce(tensor, dst, group=None):
    """Each rank adds its tensor to what comes from the rank behind it and passes the sum on."""
    p, root = dist.get_world_size(group), group_rank(dst, group)
    me = (dist.get_rank(group) - root) % p
    total = tensor.clone()
    if me + 1 < p:
        behind = torch.empty_like(tensor)
        exchange([], [(behind, (me + 1 + root) % p)], group)
        total += behind
    if me > 0:
        exchange([(total, (me - 1 + root) % p)], [], group)
    else:
        tensor.copy_(total)
''',
    ),
    Alternative(
        problem="reduce",
        name="the upper half hands over to the lower half, until one rank is left",
        function="reduce",
        source='''\
def reduce(tensor, dst, group=None):
    """Halving: with m ranks left, rank m-1-i sends to rank i."""
    p, root = dist.get_world_size(group), group_rank(dst, group)
    me, left = (dist.get_rank(group) - root) % p, p
    total = tensor.contiguous().clone()
    while left > 1:
        partner = left - 1 - me
        if me < partner:
            arriving = torch.empty_like(total)
            dist.recv(arriving, group=group, group_src=(partner + root) % p)
            total = total + arriving
        elif me > partner:
            dist.send(total, group=group, group_dst=(partner + root) % p)
            return
        left = (left + 1) // 2
    tensor.copy_(total)
''',
    ),
    Alternative(
        problem="ring_all_gather",
        name="blocking calls, even ranks send first and odd ranks receive first",
        function="ring_all_gather",
        source='''\
def ring_all_gather(output, tensor, group=None):
    """Two neighbours that are both even (p odd) are no deadlock: somewhere on the ring one receives first."""
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    got = [tensor.contiguous()]
    for _ in range(p - 1):
        landing = torch.empty_like(got[0])
        if rank % 2 == 0:
            dist.send(got[-1], group=group, group_dst=(rank + 1) % p)
            dist.recv(landing, group=group, group_src=(rank - 1) % p)
        else:
            dist.recv(landing, group=group, group_src=(rank - 1) % p)
            dist.send(got[-1], group=group, group_dst=(rank + 1) % p)
        got.append(landing)
    output.copy_(torch.cat([got[(rank - r) % p] for r in range(p)]))
''',
    ),
    Alternative(
        problem="ring_all_gather",
        name="two half chunks a step",
        function="ring_all_gather",
        source='''\
def ring_all_gather(output, tensor, group=None):
    """Works on a flat copy and sends each chunk in two messages."""
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = tensor.new_empty(p, tensor.numel())
    flat[rank] = tensor.flatten()
    half = tensor.numel() // 2
    for step in range(p - 1):
        leaving, arriving = flat[(rank - step) % p], flat[(rank - step - 1) % p]
        to, source = (rank + 1) % p, (rank - 1) % p
        exchange(
            [(leaving[:half], to), (leaving[half:], to)],
            [(arriving[:half], source), (arriving[half:], source)],
            group,
        )
    output.copy_(flat.view(output.shape))
''',
    ),
    Alternative(
        problem="ring_reduce_scatter",
        name="adds up in a private copy of the input",
        function="ring_reduce_scatter",
        source='''\
def ring_reduce_scatter(output, tensor, group=None):
    """isend and irecv by hand, on a contiguous copy."""
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = tensor.contiguous().clone().view(p, *output.shape)
    arriving = torch.empty_like(chunks[0])
    for step in range(1, p):
        receive = dist.irecv(arriving, group=group, group_src=(rank - 1) % p)
        send = dist.isend(chunks[(rank - step) % p], group=group, group_dst=(rank + 1) % p)
        receive.wait()
        chunks[(rank - step - 1) % p] += arriving
        send.wait()
    output.copy_(chunks[rank])
''',
    ),
    Alternative(
        problem="ring_all_reduce",
        name="uneven chunks by tensor_split, no padding",
        function="ring_all_reduce",
        source='''\
def ring_all_reduce(tensor, group=None):
    """Both halves of the ring written out, on p chunks whose sizes differ by at most one."""
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = tensor.flatten().clone()
    chunks = flat.tensor_split(p)
    for step in range(2 * (p - 1)):
        leaving, target = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        arriving = torch.empty_like(target)
        exchange([(leaving, (rank + 1) % p)], [(arriving, (rank - 1) % p)], group)
        if step < p - 1:
            target += arriving
        else:
            target.copy_(arriving)
    tensor.copy_(flat.view(tensor.shape))
''',
    ),
    Alternative(
        problem="ring_all_reduce",
        name="the last chunk is short, and a chunk without elements is not sent",
        function="ring_all_reduce",
        source='''\
def ring_all_reduce(tensor, group=None):
    """Chunks of ⌈n/p⌉ elements as far as they reach; each step sends only where there is something."""
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = tensor.flatten().clone()
    size = -(-flat.numel() // p)
    chunks = [flat[r * size : (r + 1) * size] for r in range(p)]
    for step in range(2 * (p - 1)):
        leaving, target = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        arriving = torch.empty_like(target)
        sends = [(leaving, (rank + 1) % p)] if leaving.numel() else []
        receives = [(arriving, (rank - 1) % p)] if arriving.numel() else []
        exchange(sends, receives, group)
        target.copy_(target + arriving if step < p - 1 else arriving)
    tensor.copy_(flat.view(tensor.shape))
''',
    ),
    Alternative(
        problem="all_to_all",
        name="everything at once, nothing for empty tensors",
        function="all_to_all",
        source='''\
def all_to_all(outputs, inputs, group=None):
    """One batch of all messages."""
    rank = dist.get_rank(group)
    outputs[rank].copy_(inputs[rank])
    exchange(
        [(t, r) for r, t in enumerate(inputs) if r != rank and t.numel()],
        [(t, r) for r, t in enumerate(outputs) if r != rank and t.numel()],
        group,
    )
''',
    ),
    Alternative(
        problem="all_to_all",
        name="pairs in the order of ranks, the lower rank sends first, blocking",
        function="all_to_all",
        source='''\
def all_to_all(outputs, inputs, group=None):
    """Of each pair the lower rank sends first; the pairs of the lowest ranks come first everywhere."""
    rank = dist.get_rank(group)
    for r in range(dist.get_world_size(group)):
        if r == rank:
            outputs[r].copy_(inputs[r])
        elif rank < r:
            exchange([(inputs[r], r)], [], group)
            exchange([], [(outputs[r], r)], group)
        else:
            exchange([], [(outputs[r], r)], group)
            exchange([(inputs[r], r)], [], group)
''',
    ),
    Alternative(
        problem="recursive_doubling_all_reduce",
        name="folds neighbours: of the first ranks, odd ones join the even ones before them",
        function="recursive_doubling_all_reduce",
        source='''\
def recursive_doubling_all_reduce(tensor, group=None):
    """The first 2·(p - core) ranks pair up; whoever goes on is numbered anew."""
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    core = 2 ** (p.bit_length() - 1)
    pairs = p - core
    total, arriving = tensor.clone(), torch.empty_like(tensor)
    if rank < 2 * pairs and rank % 2:
        exchange([(total, rank - 1)], [], group)
        exchange([], [(tensor, rank - 1)], group)
        return
    if rank < 2 * pairs:
        exchange([], [(arriving, rank + 1)], group)
        total += arriving
    number = rank // 2 if rank < 2 * pairs else rank - pairs
    bit = core >> 1
    while bit:
        other = number ^ bit
        partner = 2 * other if other < pairs else other + pairs
        exchange([(total, partner)], [(arriving, partner)], group)
        total = total + arriving
        bit >>= 1
    tensor.copy_(total)
    if rank < 2 * pairs:
        exchange([(total, rank + 1)], [], group)
''',
    ),
    Alternative(
        problem="recursive_doubling_all_reduce",
        name="isend, blocking recv, wait",
        function="recursive_doubling_all_reduce",
        source='''\
def recursive_doubling_all_reduce(tensor, group=None):
    """The last ranks join the first ones; the partners of all rounds are listed beforehand."""
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    bits = p.bit_length() - 1
    core = 1 << bits
    total, arriving = tensor.contiguous().clone(), tensor.contiguous().clone()
    if rank >= core:
        dist.send(total, group=group, group_dst=rank - core)
        dist.recv(total, group=group, group_src=rank - core)
        tensor.copy_(total)
        return
    if rank + core < p:
        dist.recv(arriving, group=group, group_src=rank + core)
        total += arriving
    for partner in [rank ^ (1 << k) for k in reversed(range(bits))]:
        send = dist.isend(total, group=group, group_dst=partner)
        dist.recv(arriving, group=group, group_src=partner)
        send.wait()
        total += arriving
    if rank + core < p:
        dist.send(total, group=group, group_dst=rank + core)
    tensor.copy_(total)
''',
    ),
    Alternative(
        problem="accounting",
        name="the fit in closed form, without numpy",
        function="fit_alpha_beta",
        source='''\
def fit_alpha_beta(nbytes, seconds):
    """Slope = covariance / variance."""
    n = len(nbytes)
    if n < 2:
        raise ValueError("two points at least")
    mean_b, mean_t = sum(nbytes) / n, sum(seconds) / n
    variance = sum((b - mean_b) ** 2 for b in nbytes)
    if variance == 0:
        raise ValueError("all sizes are the same")
    slope = sum((b - mean_b) * (t - mean_t) for b, t in zip(nbytes, seconds, strict=True)) / variance
    return mean_t - slope * mean_b, 1 / slope
''',
    ),
    Alternative(
        problem="accounting",
        name="times by cases, with math.log2",
        function="collective_time",
        source='''\
def collective_time(op, nbytes, p, alpha, bandwidth, algorithm):
    """The table of the docstring as a chain of cases."""
    from math import ceil, floor, log2

    def message(b):
        return alpha + b / bandwidth

    whole = op in ("broadcast", "reduce")
    halves = op in ("all_gather", "reduce_scatter")
    if algorithm == "ring" and op == "all_reduce":
        return 2 * (p - 1) * message(nbytes / p)
    if algorithm == "ring" and halves:
        return (p - 1) * message(nbytes / p)
    if algorithm == "ring" and whole:
        return (p - 1) * message(nbytes)
    if algorithm == "tree" and whole:
        return ceil(log2(p)) * message(nbytes)
    if algorithm == "tree" and op == "all_reduce":
        return 2 * collective_time("broadcast", nbytes, p, alpha, bandwidth, "tree")
    if algorithm == "recursive_doubling" and op == "all_reduce":
        rounds = log2(p)
        return (rounds if rounds.is_integer() else floor(rounds) + 2) * message(nbytes)
    if algorithm == "recursive_doubling" and halves:
        return ceil(log2(p)) * alpha + (p - 1) / p * nbytes / bandwidth
    raise ValueError((op, algorithm))
''',
    ),
]
