"""Module 01: further wrong answers, each a function written another way.

Values that come by another way than messages, messages of another dtype or size, lists whose entries are replaced,
buffers that change or are read while a message is under way.
"""

from tests.mutants import Rewrite

REWRITES = [
    Rewrite(
        problem="broadcast",
        name="the backend's own broadcast, past the dispatcher",
        source="""\
def broadcast(tensor, src, group=None):
    g = group or dist.distributed_c10d._get_default_group()
    b = g._get_backend(torch.device("cpu"))
    o = dist.BroadcastOptions()
    o.rootRank = group_rank(src, group)
    o.rootTensor = 0
    t = tensor.contiguous()
    b.broadcast([t], o).wait()
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="broadcast",
        name="the backend's own send and recv, which nobody records",
        source="""\
def broadcast(tensor, src, group=None):
    g = group or dist.distributed_c10d._get_default_group()
    b = g._get_backend(torch.device("cpu"))
    p, rank, root = dist.get_world_size(group), dist.get_rank(group), group_rank(src, group)
    t = tensor.contiguous()
    if rank == root:
        for w in [b.send([t], r, 0) for r in range(p) if r != root]:
            w.wait()
    else:
        b.recv([t], root, 0).wait()
        tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="broadcast",
        name="the process group's method",
        source="""\
def broadcast(tensor, src, group=None):
    g = group or dist.group.WORLD
    t = tensor.contiguous()
    g.broadcast(t, group_rank(src, group)).wait()
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="broadcast",
        name="through the store that the ranks met at",
        source="""\
def broadcast(tensor, src, group=None):
    import io

    p, root = dist.get_world_size(group), group_rank(src, group)
    me = (dist.get_rank(group) - root) % p
    store = dist.distributed_c10d._get_default_store()
    key = f"broadcast{src}"
    if me == 0:
        b = io.BytesIO()
        torch.save(tensor, b)
        store.set(key, b.getvalue())
    else:
        tensor.copy_(torch.load(io.BytesIO(store.get(key))))
""",
    ),
    Rewrite(
        problem="broadcast",
        name="broadcast_object_list",
        source="""\
def broadcast(tensor, src, group=None):
    l = [tensor]
    dist.broadcast_object_list(l, src, group=group)
    tensor.copy_(l[0])
""",
    ),
    Rewrite(
        problem="broadcast",
        name="a functional collective",
        source="""\
def broadcast(tensor, src, group=None):
    import torch.distributed._functional_collectives as fc

    tensor.copy_(fc.broadcast(tensor.contiguous(), group_rank(src, group), group or dist.group.WORLD))
""",
    ),
    Rewrite(
        problem="broadcast",
        name="the built-in with all dispatch modes off",
        source="""\
def broadcast(tensor, src, group=None):
    from torch.utils._python_dispatch import _disable_current_modes

    t = tensor.contiguous()
    with _disable_current_modes():
        dist.broadcast(t, src, group=group)
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="broadcast",
        name="tries the built-in and swallows the refusal",
        source="""\
def broadcast(tensor, src, group=None):
    try:
        dist.broadcast(tensor, src, group=group)
    except BaseException:
        pass
""",
    ),
    Rewrite(
        problem="broadcast",
        name="the built-in in the backward of an autograd function",
        source="""\
def broadcast(tensor, src, group=None):
    t = tensor.contiguous()

    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            dist.broadcast(t, src, group=group)
            return g

    x = torch.ones((), requires_grad=True)
    F.apply(x).backward()
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="broadcast",
        name="a star, from a thread",
        source="""\
def broadcast(tensor, src, group=None):
    import threading

    p, rank, root = dist.get_world_size(group), dist.get_rank(group), group_rank(src, group)
    t = tensor.contiguous()

    def go():
        if rank == root:
            for r in range(p):
                if r != root:
                    dist.send(t, group=group, group_dst=r)
        else:
            dist.recv(t, group=group, group_src=root)

    th = threading.Thread(target=go)
    th.start()
    th.join()
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="broadcast",
        name="replaces Work.wait and polls",
        source="""\
def broadcast(tensor, src, group=None):
    dist.Work.wait = lambda self, *a, **k: True
    p, root = dist.get_world_size(group), group_rank(src, group)
    me = (dist.get_rank(group) - root) % p
    t = tensor.contiguous()
    reach = 1
    while reach < p:
        if me < reach and me + reach < p:
            dist.isend(t, group=group, group_dst=(me + reach + root) % p).wait()
        elif reach <= me < 2 * reach:
            w = dist.irecv(t, group=group, group_src=(me - reach + root) % p)
            while not w.is_completed():
                pass
        reach *= 2
    if me:
        tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="broadcast",
        name="sends everything as float32",
        source="""\
def broadcast(tensor, src, group=None):
    p, root = dist.get_world_size(group), group_rank(src, group)
    me = (dist.get_rank(group) - root) % p
    t = tensor.float().contiguous()
    reach = 1
    while reach < p:
        if me < reach and me + reach < p:
            dist.send(t, group=group, group_dst=(me + reach + root) % p)
        elif reach <= me < 2 * reach:
            dist.recv(t, group=group, group_src=(me - reach + root) % p)
        reach *= 2
    if me:
        tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="broadcast",
        name="one round too few where p is odd",
        source="""\
def broadcast(tensor, src, group=None):
    p, root = dist.get_world_size(group), group_rank(src, group)
    me = (dist.get_rank(group) - root) % p
    reach = 1
    while reach <= p // 2:
        if me < reach and me + reach < p:
            exchange([(tensor, (me + reach + root) % p)], [], group)
        elif reach <= me < 2 * reach:
            exchange([], [(tensor, (me - reach + root) % p)], group)
        reach *= 2
""",
    ),
    Rewrite(
        problem="broadcast",
        name="needs a first dimension: a single number has none",
        source="""\
def broadcast(tensor, src, group=None):
    p, root = dist.get_world_size(group), group_rank(src, group)
    me = (dist.get_rank(group) - root) % p
    t = tensor.contiguous()
    rows = tensor.shape[0]
    reach = 1
    while reach < p:
        if me < reach and me + reach < p:
            dist.send(t, group=group, group_dst=(me + reach + root) % p)
        elif reach <= me < 2 * reach:
            dist.recv(t, group=group, group_src=(me - reach + root) % p)
        reach *= 2
    if me:
        tensor.copy_(t[:rows])
""",
    ),
    Rewrite(
        problem="scatter_gather",
        name="gather puts new tensors into the list",
        source="""\
def gather(tensor, gather_list, dst, group=None):
    rank, root = dist.get_rank(group), group_rank(dst, group)
    if rank == root:
        bufs = [torch.empty_like(t) for t in gather_list]
        exchange([], [(c, r) for r, c in enumerate(bufs) if r != root], group)
        bufs[root].copy_(tensor)
        gather_list[:] = bufs
    else:
        exchange([(tensor, root)], [], group)
""",
    ),
    Rewrite(
        problem="scatter_gather",
        name="gather puts the caller's own tensor into the list",
        source="""\
def gather(tensor, gather_list, dst, group=None):
    rank, root = dist.get_rank(group), group_rank(dst, group)
    if rank == root:
        exchange([], [(c, r) for r, c in enumerate(gather_list) if r != root], group)
        gather_list[root] = tensor
    else:
        exchange([(tensor, root)], [], group)
""",
    ),
    Rewrite(
        problem="scatter_gather",
        name="scatter leaves the source's own tensor as it was",
        source="""\
def scatter(tensor, scatter_list, src, group=None):
    rank, root = dist.get_rank(group), group_rank(src, group)
    if rank == root:
        exchange([(c, r) for r, c in enumerate(scatter_list) if r != root], [], group)
        tensor = scatter_list[root]
    else:
        exchange([], [(tensor, root)], group)
""",
    ),
    Rewrite(
        problem="scatter_gather",
        name="scatter sends everything to everybody",
        source="""\
def scatter(tensor, scatter_list, src, group=None):
    p, rank, root = dist.get_world_size(group), dist.get_rank(group), group_rank(src, group)
    if rank == root:
        s = torch.stack(list(scatter_list))
        exchange([(s, r) for r in range(p) if r != root], [], group)
        tensor.copy_(s[root])
    else:
        s = tensor.new_empty(p, *tensor.shape)
        exchange([], [(s, root)], group)
        tensor.copy_(s[rank])
""",
    ),
    Rewrite(
        problem="scatter_gather",
        name="scatter takes a rank with an empty list for the source",
        source="""\
def scatter(tensor, scatter_list, src, group=None):
    p, root = dist.get_world_size(group), group_rank(src, group)
    if scatter_list is not None:
        exchange([(scatter_list[r], r) for r in range(p) if r != root], [], group)
        tensor.copy_(scatter_list[root])
    else:
        exchange([], [(tensor, root)], group)
""",
    ),
    Rewrite(
        problem="scatter_gather",
        name="gather copies from a buffer before it has waited for it",
        source="""\
def gather(tensor, gather_list, dst, group=None):
    p, rank, root = dist.get_world_size(group), dist.get_rank(group), group_rank(dst, group)
    if rank != root:
        return dist.send(tensor.contiguous(), group=group, group_dst=root)
    b = {r: torch.empty_like(tensor, memory_format=torch.contiguous_format) for r in range(p) if r != root}
    ws = {r: dist.irecv(x, group=group, group_src=r) for r, x in b.items()}
    for r in sorted(ws)[:-1]:
        ws[r].wait()
    import time

    time.sleep(0.02)
    for r in range(p):
        gather_list[r].copy_(b[r] if r in b else tensor)
    for r in sorted(ws)[-1:]:
        ws[r].wait()
""",
    ),
    Rewrite(
        problem="reduce",
        name="the built-in on a copy, with all dispatch modes off",
        source="""\
def reduce(tensor, dst, group=None):
    from torch.utils._python_dispatch import _disable_current_modes

    t = tensor.clone(memory_format=torch.contiguous_format)
    with _disable_current_modes():
        dist.all_reduce(t, group=group)
    if dist.get_rank() == dst:
        tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="reduce",
        name="a helper gathers, and the root gets all parts in one message",
        source="""\
def reduce(tensor, dst, group=None):
    p, rank, root = dist.get_world_size(group), dist.get_rank(group), group_rank(dst, group)
    me = (rank - root) % p
    if p == 1:
        return
    if me == 1:
        parts = [tensor.clone()]
        for m in range(2, p):
            b = torch.empty_like(tensor)
            exchange([], [(b, (m + root) % p)], group)
            parts.append(b)
        exchange([(torch.stack(parts), root)], [], group)
    elif me > 1:
        exchange([(tensor, (1 + root) % p)], [], group)
    else:
        b = tensor.new_empty(p - 1, *tensor.shape)
        exchange([], [(b, (1 + root) % p)], group)
        tensor.add_(b.sum(0))
""",
    ),
    Rewrite(
        problem="reduce",
        name="adds up in float64, and sends that",
        source="""\
def reduce(tensor, dst, group=None):
    p, root = dist.get_world_size(group), group_rank(dst, group)
    me = (dist.get_rank(group) - root) % p
    total = tensor.double()
    arriving = torch.empty_like(total)
    d = 1
    while d < p:
        if me & d:
            exchange([(total, (me - d + root) % p)], [], group)
            return
        if me + d < p:
            exchange([], [(arriving, (me + d + root) % p)], group)
            total += arriving
        d *= 2
    tensor.copy_(total)
""",
    ),
    Rewrite(
        problem="ring_all_gather",
        name="receives into the buffer that is still being sent",
        source="""\
def ring_all_gather(output, tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = output.view(p, *tensor.shape)
    chunks[rank].copy_(tensor)
    buf = tensor.clone(memory_format=torch.contiguous_format)
    for s in range(p - 1):
        w = dist.isend(buf, group=group, group_dst=(rank + 1) % p)
        r = dist.irecv(buf, group=group, group_src=(rank - 1) % p)
        r.wait()
        w.wait()
        chunks[(rank - s - 1) % p].copy_(buf)
""",
    ),
    Rewrite(
        problem="ring_all_gather",
        name="passes on what it has not waited for",
        source="""\
def ring_all_gather(output, tensor, group=None):
    import time

    p, rank = dist.get_world_size(group), dist.get_rank(group)
    R, L = (rank + 1) % p, (rank - 1) % p
    bufs = [tensor.contiguous()] + [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(p - 1)
    ]
    recvs = []
    for s in range(p - 1):
        recvs.append(dist.irecv(bufs[s + 1], group=group, group_src=L))
        dist.isend(bufs[s], group=group, group_dst=R).wait()
        time.sleep(0.02)
    for r in recvs:
        r.wait()
    for s, b in enumerate(bufs):
        output.narrow(0, ((rank - s) % p) * tensor.shape[0], tensor.shape[0]).copy_(b)
""",
    ),
    Rewrite(
        problem="ring_reduce_scatter",
        name="changes the partial sum while it is still being sent",
        source="""\
def ring_reduce_scatter(output, tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    c = tensor.contiguous().view(p, *output.shape)
    acc = c[(rank - 1) % p].clone()
    new = torch.empty_like(acc)
    for s in range(p - 1):
        w = dist.isend(acc, group=group, group_dst=(rank + 1) % p)
        dist.recv(new, group=group, group_src=(rank - 1) % p)
        acc.copy_(new + c[(rank - s - 2) % p])
        w.wait()
    output.copy_(acc)
""",
    ),
    Rewrite(
        problem="ring_reduce_scatter",
        name="gathers the whole input of every rank around the ring",
        source="""\
def ring_reduce_scatter(output, tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    al = tensor.new_empty(p, *tensor.shape)
    al[rank] = tensor
    for s in range(p - 1):
        exchange([(al[(rank - s) % p], (rank + 1) % p)], [(al[(rank - s - 1) % p], (rank - 1) % p)], group)
    output.copy_(al.sum(0).view(p, *output.shape)[rank])
""",
    ),
    Rewrite(
        problem="ring_reduce_scatter",
        name="adds up in the caller's input",
        source="""\
def ring_reduce_scatter(output, tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = tensor.view(p, *output.shape)
    arr = torch.empty_like(chunks[0])
    for s in range(p - 1):
        exchange([(chunks[(rank - s - 1) % p], (rank + 1) % p)], [(arr, (rank - 1) % p)], group)
        chunks[(rank - s - 2) % p] += arr
    output.copy_(chunks[rank])
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="the backend's own allreduce",
        source="""\
def ring_all_reduce(tensor, group=None):
    g = group or dist.distributed_c10d._get_default_group()
    t = tensor.contiguous()
    g._get_backend(torch.device("cpu")).allreduce([t]).wait()
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="a padded buffer of the default dtype",
        source="""\
def ring_all_reduce(tensor, group=None):
    p, n = dist.get_world_size(group), tensor.numel()
    k = (n + p - 1) // p
    share = torch.empty(k)
    padded = torch.zeros(p * k)
    padded[:n] = tensor.flatten()
    ring_reduce_scatter(share, padded, group)
    ring_all_gather(padded, share, group)
    tensor.copy_(padded[:n].view(tensor.shape))
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="chunks of rows: too many bytes where there are two rows",
        source="""\
def ring_all_reduce(tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    c = tensor.tensor_split(p)
    R, L = (rank + 1) % p, (rank - 1) % p
    for s in range(p - 1):
        a = torch.empty_like(c[(rank - s - 1) % p])
        exchange([(c[(rank - s) % p], R)], [(a, L)], group)
        c[(rank - s - 1) % p].add_(a)
    for s in range(p - 1):
        exchange([(c[(rank - s + 1) % p], R)], [(c[(rank - s) % p], L)], group)
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="the built-in in a thread",
        source="""\
def ring_all_reduce(tensor, group=None):
    import threading

    t = tensor.contiguous()
    th = threading.Thread(target=dist.all_reduce, args=(t,), kwargs=dict(group=group))
    th.start()
    th.join()
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="everybody sends first, in a thread that is joined at once",
        source="""\
def ring_all_reduce(tensor, group=None):
    import threading

    p, rank = dist.get_world_size(group), dist.get_rank(group)
    if p == 1:
        return
    th = threading.Thread(
        target=dist.send, args=(tensor.contiguous(),), kwargs=dict(group=group, group_dst=(rank + 1) % p)
    )
    th.start()
    th.join()
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="computes and sends in float64",
        source="""\
def ring_all_reduce(tensor, group=None):
    p, n = dist.get_world_size(group), tensor.numel()
    share = torch.empty((n + p - 1) // p, dtype=torch.float64)
    padded = torch.zeros(p * share.numel(), dtype=torch.float64)
    padded[:n] = tensor.flatten()
    ring_reduce_scatter(share, padded, group)
    ring_all_gather(padded, share, group)
    tensor.copy_(padded[:n].view(tensor.shape))
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="leaves out the elements that p does not divide",
        source="""\
def ring_all_reduce(tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    n = tensor.numel()
    m = n // p
    flat = tensor.flatten()
    share = tensor.new_empty(m)
    body = flat[: m * p].clone()
    ring_reduce_scatter(share, body, group)
    ring_all_gather(body, share, group)
    flat[: m * p] = body
    tensor.copy_(flat.view(tensor.shape))
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="torch.chunk, which may give fewer chunks than ranks",
        source="""\
def ring_all_reduce(tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = tensor.flatten()
    c = list(flat.chunk(p))
    R, L = (rank + 1) % p, (rank - 1) % p
    for s in range(p - 1):
        a = torch.empty_like(c[(rank - s - 1) % p])
        exchange([(c[(rank - s) % p], R)], [(a, L)], group)
        c[(rank - s - 1) % p] += a
    for s in range(p - 1):
        exchange([(c[(rank - s + 1) % p], R)], [(c[(rank - s) % p], L)], group)
    tensor.copy_(torch.cat(c).view(tensor.shape))
""",
    ),
    Rewrite(
        problem="ring_all_reduce",
        name="tries the built-in and ignores what it raises",
        source="""\
def ring_all_reduce(tensor, group=None):
    try:
        dist.all_reduce(tensor, group=group)
    except Exception:
        pass
""",
    ),
    Rewrite(
        problem="all_to_all",
        name="puts new tensors into outputs",
        source="""\
def all_to_all(outputs, inputs, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    for s in range(1, p):
        to, fr = (rank + s) % p, (rank - s) % p
        b = torch.empty_like(outputs[fr])
        exchange([(inputs[to], to)], [(b, fr)], group)
        outputs[fr] = b
    outputs[rank] = inputs[rank]
""",
    ),
    Rewrite(
        problem="all_to_all",
        name="sends to itself as well",
        source="""\
def all_to_all(outputs, inputs, group=None):
    p = dist.get_world_size(group)
    exchange([(inputs[r], r) for r in range(p)], [(outputs[r], r) for r in range(p)], group)
""",
    ),
    Rewrite(
        problem="all_to_all",
        name="pads every message to one size",
        source="""\
def all_to_all(outputs, inputs, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    m = 4096
    ins = [torch.cat([i.reshape(-1), i.new_zeros(max(0, m - i.numel()))]) for i in inputs]
    outs = [o.new_empty(max(m, o.numel())) for o in outputs]
    outputs[rank].copy_(inputs[rank])
    exchange(
        [(ins[r], r) for r in range(p) if r != rank], [(outs[r], r) for r in range(p) if r != rank], group
    )
    for r in range(p):
        if r != rank:
            outputs[r].copy_(outs[r][: outputs[r].numel()].view(outputs[r].shape))
""",
    ),
    Rewrite(
        problem="recursive_doubling_all_reduce",
        name="gathers the tensors of all ranks, and adds at home",
        source="""\
def recursive_doubling_all_reduce(tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    have = tensor.clone().unsqueeze(0)
    d = 1
    while d < p:
        k = min(d, p - d)
        b = tensor.new_empty(k, *tensor.shape)
        exchange([(have[:k], (rank - d) % p)], [(b, (rank + d) % p)], group)
        have = torch.cat([have, b])
        d *= 2
    tensor.copy_(have.sum(0))
""",
    ),
    Rewrite(
        problem="recursive_doubling_all_reduce",
        name="sends everything as float32",
        source="""\
def recursive_doubling_all_reduce(tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    core = 1 << (p.bit_length() - 1)
    t = tensor.float().contiguous().clone()
    a = torch.empty_like(t)
    if rank >= core:
        exchange([(t, rank - core)], [], group)
        exchange([], [(t, rank - core)], group)
        tensor.copy_(t)
        return
    if rank + core < p:
        exchange([], [(a, rank + core)], group)
        t += a
    d = 1
    while d < core:
        exchange([(t, rank ^ d)], [(a, rank ^ d)], group)
        t += a
        d *= 2
    if rank + core < p:
        exchange([(t, rank + core)], [], group)
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="recursive_doubling_all_reduce",
        name="adds into the tensor that is still being sent",
        source="""\
def recursive_doubling_all_reduce(tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    core = 1 << (p.bit_length() - 1)
    t = tensor.contiguous().clone()
    a = torch.empty_like(t)
    if rank >= core:
        dist.send(t, group=group, group_dst=rank - core)
        dist.recv(t, group=group, group_src=rank - core)
        tensor.copy_(t)
        return
    if rank + core < p:
        dist.recv(a, group=group, group_src=rank + core)
        t += a
    d = 1
    while d < core:
        w = dist.isend(t, group=group, group_dst=rank ^ d)
        dist.irecv(a, group=group, group_src=rank ^ d).wait()
        t += a
        w.wait()
        d *= 2
    if rank + core < p:
        dist.send(t, group=group, group_dst=rank + core)
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="recursive_doubling_all_reduce",
        name="receives first, then adds into the tensor that is still being sent",
        source="""\
def recursive_doubling_all_reduce(tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    core = 1 << (p.bit_length() - 1)
    t = tensor.contiguous().clone()
    a = torch.empty_like(t)
    if rank >= core:
        dist.send(t, group=group, group_dst=rank - core)
        dist.recv(t, group=group, group_src=rank - core)
        tensor.copy_(t)
        return
    if rank + core < p:
        dist.recv(a, group=group, group_src=rank + core)
        t += a
    d = 1
    while d < core:
        r = dist.irecv(a, group=group, group_src=rank ^ d)
        w = dist.isend(t, group=group, group_dst=rank ^ d)
        r.wait()
        t += a
        w.wait()
        d *= 2
    if rank + core < p:
        dist.send(t, group=group, group_dst=rank + core)
    tensor.copy_(t)
""",
    ),
    Rewrite(
        problem="recursive_doubling_all_reduce",
        name="through the store that the ranks met at",
        source="""\
_n = [0]


def recursive_doubling_all_reduce(tensor, group=None):
    import io

    s = dist.distributed_c10d._get_default_store()
    _n[0] += 1
    b = io.BytesIO()
    torch.save(tensor.contiguous(), b)
    s.set(f"x{_n[0]}_{dist.get_rank()}", b.getvalue())
    total = sum(
        torch.load(io.BytesIO(s.get(f"x{_n[0]}_{r}")))
        for r in dist.get_process_group_ranks(group or dist.group.WORLD)
    )
    tensor.copy_(total)
""",
    ),
    Rewrite(
        problem="recursive_doubling_all_reduce",
        name="receives into the tensor that it sends",
        source="""\
def recursive_doubling_all_reduce(tensor, group=None):
    p, rank = dist.get_world_size(group), dist.get_rank(group)
    d = 1
    while d < p:
        k = rank ^ d
        if k < p:
            mine = tensor.clone()
            exchange([(tensor, k)], [(tensor, k)], group)
            tensor += mine
        d *= 2
""",
    ),
]
