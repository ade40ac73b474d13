"""Module 02: wrong and unusual ways to train on many ranks.

What a mutant gets wrong is said in its name. Many are right on two ranks, on a model whose parameters are all used, in
one dtype and contiguous, or in a step that is one forward and one backward.
"""

from tests.mutants import Alternative, Mutant, Rewrite

START = "    message = torch.cat([p.grad.flatten() for p in parameters]).mul_(weight)\n"
HOOK = """\
            self.outdated |= parameter in self.ready
            if self.local:
                return
            self.due = True
            self.ready.add(parameter)
            while (n := len(self.messages)) < len(self.buckets) and self.ready.issuperset(self.buckets[n]):
                self.messages.append(start_average(self.buckets[n], self.weight, group))
"""
WHILE = "            while (n := len(self.messages)) < len(self.buckets) and self.ready.issuperset(self.buckets[n]):\n"
NAIVE = """\
    for p in trainable(module):
        finish_average([p], start_average([p], 1 / dist.get_world_size(group), group))
    ### END SOLUTION


def average_gradients_flat"""
BROADCAST = """\
        message = tensor.detach().contiguous()
        dist.broadcast(message, src, group)
        with torch.no_grad():
            tensor.copy_(message)
"""
OUTDATED = """\
        if self.outdated:  # by a second backward: every rank sends everything once more
            for _, work in self.messages:
                work.wait()
            self.messages = [start_average(bucket, self.weight, self.group) for bucket in self.buckets]
"""
WEIGHTED = """\
        finish_average([p], start_average([p], num_samples / total.item(), group))
"""

MUTANTS = [
    # shard_batch
    Mutant(
        problem="shard_batch",
        check="shard_batch_tensor",
        name="every world_size-th row",
        old="    return batch[rank * rows : (rank + 1) * rows]\n",
        new="    return batch[rank::world_size]\n",
    ),
    Mutant(
        problem="shard_batch",
        check="shard_batch_uneven",
        name="drops the rows that are left over",
        old="    if rest:\n",
        new="    if False:\n",
    ),
    Mutant(
        problem="shard_batch",
        check="shard_batch_uneven",
        name="gives the rows that are left over to some ranks",
        old="    if rest:\n",
        new="    if rest:\n        return batch.tensor_split(world_size)[rank]\n    if rest:\n",
    ),
    Mutant(
        problem="shard_batch",
        check="shard_batch_kinds",
        name="a tuple comes back as a list",
        old="return type(batch)(shard_batch(part, rank, world_size) for part in batch)",
        new="return [shard_batch(part, rank, world_size) for part in batch]",
    ),
    Mutant(
        problem="shard_batch",
        check="shard_batch_kinds",
        name="knows no dict",
        old="""\
    if isinstance(batch, dict):
        return {key: shard_batch(part, rank, world_size) for key, part in batch.items()}
""",
        new="",
    ),
    Mutant(
        problem="shard_batch",
        check="shard_batch_tensor",
        name="cuts the last dimension",
        old="    return batch[rank * rows : (rank + 1) * rows]\n",
        new="    return batch[..., rank * rows : (rank + 1) * rows]\n",
    ),
    # broadcast_module
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_frozen",
        name="parameters only, no buffers",
        old="[*module.parameters(), *module.buffers()]",
        new="[*module.parameters()]",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_frozen",
        name="no frozen parameters",
        old="[*module.parameters(), *module.buffers()]",
        new="[*trainable(module), *module.buffers()]",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_frozen",
        name="sends a shared parameter twice, and no buffer that is not saved",
        old="[*module.parameters(), *module.buffers()]",
        new="module.state_dict().values()",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_traffic",
        name="sends a shared parameter twice",
        old="[*module.parameters(), *module.buffers()]",
        new="[*dict(module.named_parameters(remove_duplicate=False)).values(), *module.buffers()]",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_subgroup",
        name="src is a group rank",
        old="        dist.broadcast(message, src, group)\n",
        new="        dist.broadcast(message, group=group, group_src=src)\n",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_subgroup",
        name="the default source is rank 0, in a group too",
        old="src = dist.get_global_rank(group or dist.group.WORLD, 0)",
        new="src = 0",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_strided",
        name="sends tensors as they are, contiguous or not",
        old=BROADCAST,
        new="        dist.broadcast(tensor.data, src, group)\n",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_strided",
        name="does not copy back what arrives in a contiguous copy",
        old=BROADCAST,
        new="        dist.broadcast(tensor.data.contiguous(), src, group)\n",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_traffic",
        name="everything in one float32 message",
        old="""\
    for tensor in [*module.parameters(), *module.buffers()]:  # neither names a shared one twice
"""
        + BROADCAST,
        new="""\
    tensors = [*module.parameters(), *module.buffers()]
    message = torch.cat([t.detach().flatten().float() for t in tensors])
    dist.broadcast(message, src, group)
    for tensor, part in zip(tensors, message.split([t.numel() for t in tensors])):
        with torch.no_grad():
            tensor.copy_(part.view(tensor.shape))
""",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_parameters",
        name="new parameters, which no optimizer knows",
        old="        with torch.no_grad():\n            tensor.copy_(message)\n",
        new="""\
        with torch.no_grad():
            tensor.copy_(message)
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))
""",
    ),
    # average_gradients
    Mutant(
        problem="naive_sync",
        check="naive_sync_values",
        name="the sum, not the average",
        old="        finish_average([p], start_average([p], 1 / dist.get_world_size(group), group))\n",
        new="        finish_average([p], start_average([p], 1.0, group))\n",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_subgroup",
        name="divides by the size of the default group",
        old="        finish_average([p], start_average([p], 1 / dist.get_world_size(group), group))\n",
        new="        finish_average([p], start_average([p], 1 / dist.get_world_size(), group))\n",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_missing",
        name="skips a gradient that is None: a deadlock, or a mix-up",
        old=NAIVE,
        new=NAIVE.replace("trainable(module)", "[p for p in trainable(module) if p.grad is not None]"),
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_missing",
        name="gives a rank without the gradient no average",
        old=NAIVE,
        new="""\
    for p in trainable(module):
        had = p.grad is not None
        finish_average([p], start_average([p], 1 / dist.get_world_size(group), group))
        if not had:
            p.grad = None
    ### END SOLUTION


def average_gradients_flat""",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_missing",
        name="divides by the number of ranks that have the gradient",
        old=NAIVE,
        new="""\
    for p in trainable(module):
        has = torch.tensor(0.0 if p.grad is None else 1.0)
        dist.all_reduce(has, group=group)
        finish_average([p], start_average([p], 1 / max(has.item(), 1.0), group))
    ### END SOLUTION


def average_gradients_flat""",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_values",
        name="a frozen parameter gets a gradient of zeros",
        old="    return [p for p in module.parameters() if p.requires_grad]\n",
        new="    return list(module.parameters())\n",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_traffic",
        name="sends a tied gradient twice",
        old="    return [p for p in module.parameters() if p.requires_grad]\n",
        new="    return [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]\n",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_strided",
        name="sends gradients as they are, contiguous or not",
        old=NAIVE,
        new="""\
    for p in trainable(module):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad /= dist.get_world_size(group)
        dist.all_reduce(p.grad, group=group)
    ### END SOLUTION


def average_gradients_flat""",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_values",
        name="sends float32 whatever the dtype",
        old=START,
        new=START
        + """\
    if message.dtype != torch.float32:
        message = message.float()
""",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_values",
        name="never waits",
        old="    work.wait()\n    for p, part",
        new="    for p, part",
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_values",
        name="wraps the module in PyTorch's own DDP",
        old=NAIVE,
        new="    from torch.nn.parallel import DistributedDataParallel as Wrapped\n\n    Wrapped(module)\n" + NAIVE,
    ),
    Mutant(
        problem="naive_sync",
        check="naive_sync_values",
        name="averages the parameters",
        old=NAIVE,
        new=NAIVE.replace(
            "    for p in trainable(module):\n",
            "    for p in trainable(module):\n        p.grad, p = p.grad, nn.Parameter(p.detach().clone())\n",
        ),
    ),
    # average_gradients_flat
    Mutant(
        problem="flat_sync",
        check="flat_sync_traffic",
        name="one message for each gradient",
        old="""\
        alike = [p for p in parameters if p.dtype == dtype]
        finish_average(alike, start_average(alike, 1 / dist.get_world_size(group), group))
""",
        new="""\
        for p in [p for p in parameters if p.dtype == dtype]:
            finish_average([p], start_average([p], 1 / dist.get_world_size(group), group))
""",
    ),
    Mutant(
        problem="flat_sync",
        check="flat_sync_traffic",
        name="all dtypes in one message of the widest",
        old="""\
    for dtype in dict.fromkeys(p.dtype for p in parameters):  # in the order of the model: the same on every rank
        alike = [p for p in parameters if p.dtype == dtype]
""",
        new="""\
    for alike in [parameters]:
""",
    ),
    Mutant(
        problem="flat_sync",
        check="flat_sync_missing",
        name="only the gradients that this rank has",
        old="        alike = [p for p in parameters if p.dtype == dtype]\n",
        new="        alike = [p for p in parameters if p.dtype == dtype and p.grad is not None]\n",
    ),
    Mutant(
        problem="flat_sync",
        check="flat_sync_values",
        name="dtypes in the order in which a rank has gradients",
        old="    for dtype in dict.fromkeys(p.dtype for p in parameters):",
        new="""\
    for dtype in sorted({p.dtype for p in parameters}, key=lambda d: (len(str(d)) + dist.get_rank()) % 3):""",
    ),
    Mutant(
        problem="flat_sync",
        check="flat_sync_values",
        name="puts the parts back in the wrong order",
        old="        finish_average(alike, start_average(alike, 1 / dist.get_world_size(group), group))\n",
        new="        finish_average(alike[::-1], start_average(alike, 1 / dist.get_world_size(group), group))\n",
    ),
    Mutant(
        problem="flat_sync",
        check="flat_sync_subgroup",
        name="averages over the default group",
        old="        finish_average(alike, start_average(alike, 1 / dist.get_world_size(group), group))\n",
        new="        finish_average(alike, start_average(alike, 1 / dist.get_world_size(), group))\n",
    ),
    # average_gradients_weighted
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_values",
        name="the mean of the means",
        old=WEIGHTED,
        new="        finish_average([p], start_average([p], 1 / dist.get_world_size(group), group))\n",
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_empty",
        name="0 * nan on a rank without samples",
        old="""\
    if num_samples == 0:
        for p in parameters:
            p.grad = None  # 0 * nan is nan
""",
        new="",
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_empty",
        name="a rank without samples stays away: a deadlock",
        old="""\
    if num_samples == 0:
        for p in parameters:
            p.grad = None  # 0 * nan is nan
""",
        new="""\
    if num_samples == 0:
        return
""",
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_large",
        name="multiplies by n before adding, divides by the total after: overflow in float16",
        old=WEIGHTED,
        new="        finish_average([p], start_average([p], num_samples, group))\n        p.grad /= total.item()\n",
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_large",
        name="counts in the dtype of the gradients",
        old="    total = torch.tensor(num_samples, device=device)\n",
        new="    total = torch.tensor(float(num_samples), device=device, dtype=parameters[0].dtype)\n",
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_values",
        name="divides once more by the number of ranks",
        old=WEIGHTED,
        new=WEIGHTED.replace("total.item()", "total.item() / dist.get_world_size(group)"),
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_values",
        name="the total of the default group",
        old="    dist.all_reduce(total, group=group)\n    for p in parameters:\n",
        new="    for p in parameters:\n        total = torch.tensor(num_samples * dist.get_world_size())\n",
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_traffic",
        name="asks for the number of samples again with each gradient, and sends the gradient twice",
        old=WEIGHTED,
        new="        start_average([p], 1.0, group)[1].wait()\n" + WEIGHTED,
    ),
    # OverlappedDDP
    Mutant(
        problem="overlapped",
        check="overlapped_construction",
        name="no broadcast at construction",
        old="        broadcast_module(module, group=group)\n        self.module",
        new="        self.module",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_order",
        name="the hooks only collect, and finish sends",
        old=WHILE,
        new="            while (n := len(self.messages)) < 0:\n",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_order",
        name="each gradient is sent when the next one comes",
        old="            self.ready.add(parameter)\n",
        new="""\
            self.ready.add(getattr(self, "previous", parameter))
            self.__dict__["previous"] = parameter
""",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_waiting",
        name="a blocking all_reduce in the hook",
        old="                self.messages.append(start_average(self.buckets[n], self.weight, group))\n\n",
        new="""\
                self.messages.append(start_average(self.buckets[n], self.weight, group))
                self.messages[-1][1].wait()

""",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_unused",
        name="sends each gradient as it becomes ready, in another order on each rank",
        old=HOOK,
        new=HOOK.replace(
            WHILE,
            """\
            n = len(self.messages)
            k = next((k for k in range(n, len(self.buckets)) if any(parameter is p for p in self.buckets[k])), None)
            if k is not None:
                self.buckets[n], self.buckets[k] = self.buckets[k], self.buckets[n]
""",
        ),
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_unused",
        name="does not send unused parameters in finish: a deadlock where another rank uses them",
        old="""\
        for bucket in self.buckets[len(self.messages) :]:
            self.messages.append(start_average(bucket, self.weight, self.group))
        if""",
        new="""\
        for bucket in self.buckets[len(self.messages) :]:
            if bucket[0].grad is not None:
                self.messages.append(start_average(bucket, self.weight, self.group))
        self.buckets = self.buckets[: len(self.messages)]
        if""",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_no_sync",
        name="no_sync is asked in finish only",
        old="            if self.local:\n                return\n",
        new="",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_no_sync",
        name="finish after a backward in no_sync averages",
        old="        if self.local or not self.due:\n            return\n",
        new="        if self.local:\n            return\n",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_no_sync",
        name="finish inside no_sync averages",
        old="        if self.local or not self.due:\n            return\n",
        new="        if not self.due and not self.local:\n            return\n",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_no_sync",
        name="no_sync is never left",
        old="            self.local = before\n",
        new="            pass\n",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_order",
        name="averages what the last backward adds, and adds it to the local sum",
        old=HOOK,
        new=HOOK
        + """\

        def divide(gradient: Tensor) -> Tensor:
            if self.local:
                return gradient
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=group)
            return gradient * self.weight

        for p in trainable(module):
            p.register_hook(divide)
""",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_values",
        name="the hook averages the parameter itself, in place",
        old="                self.messages.append(start_average(self.buckets[n], self.weight, group))\n\n",
        new="""\
                self.messages.append(start_average(self.buckets[n], self.weight, group))
                parameter.data *= self.weight
                dist.all_reduce(parameter.data + 0, group=group, async_op=True)

""",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_values",
        name="the hook sends the parameter that it is handed",
        old="                self.messages.append(start_average(self.buckets[n], self.weight, group))\n\n",
        new="""\
                message = parameter.detach().clone().flatten() * self.weight
                self.messages.append((message, dist.all_reduce(message, group=group, async_op=True)))

""",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_two_backwards",
        name="a second backward is not sent",
        old=OUTDATED,
        new="",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_no_sync",
        name="forgets which gradients were ready in the last step",
        old="        self.messages, self.ready, self.outdated = [], set(), False\n",
        new="        self.messages, self.outdated = [], False\n",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_two_backwards",
        name="works on p.grad itself while backward goes on: a second backward adds to a sum",
        old="""\
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    message = torch.cat([p.grad.flatten() for p in parameters]).mul_(weight)
    return""",
        new="""\
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    message = p.grad.view(-1).mul_(weight) if len(parameters) == 1 else torch.cat(
        [p.grad.flatten() for p in parameters]
    ).mul_(weight)
    return""",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_subgroup",
        name="divides by the size of the default group",
        old="        self.weight = 1 / dist.get_world_size(group)\n",
        new="        self.weight = 1 / dist.get_world_size()\n",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_values",
        name="forward takes no further arguments",
        old="        return self.module(*args, **kwargs)\n",
        new="        return self.module(args[0])\n",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_values",
        name="finish does not wait",
        old="    work.wait()\n    for p, part",
        new="    for p, part",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_construction",
        name="is PyTorch's own DDP",
        old="        self.module, self.group = module, group\n",
        new="""\
        from torch.nn import parallel

        self.module, self.group = module, group
        self.inner = parallel.DistributedDataParallel(module, process_group=group)
""",
    ),
    # BucketedDDP
    Mutant(
        problem="bucketed",
        check="bucketed_composition",
        name="filled in the order of registration",
        old="fill_buckets(trainable(module)[::-1], bucket_cap_mb * 2**20)",
        new="fill_buckets(trainable(module), bucket_cap_mb * 2**20)",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_composition",
        name="filled in the order of registration, sent from the last one on",
        old="fill_buckets(trainable(module)[::-1], bucket_cap_mb * 2**20)",
        new="[b[::-1] for b in fill_buckets(trainable(module), bucket_cap_mb * 2**20)[::-1]]",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_composition",
        name="MB of 10^6 bytes",
        old="bucket_cap_mb * 2**20",
        new="bucket_cap_mb * 10**6",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_composition",
        name="a bucket is closed by the gradient that exceeds the cap, and holds it",
        old="        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > cap:\n",
        new="        if bucket is None or sum(q.nbytes for q in bucket) > cap:\n",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_composition",
        name="a bucket is never full to the last byte",
        old="        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > cap:\n",
        new="        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes >= cap:\n",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_dtypes",
        name="counts elements, not bytes",
        old="        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > cap:\n",
        new="        if bucket is None or sum(4 * q.numel() for q in bucket) + 4 * p.numel() > cap:\n",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_dtypes",
        name="several dtypes in one bucket",
        old="bucket = current.get(p.dtype)",
        new="bucket = current.get(torch.float32)",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_composition",
        name="the cap is ignored",
        old="        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > cap:\n",
        new="        if bucket is None:\n",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_values",
        name="sends a bucket as soon as its first gradient is there",
        old="self.ready.issuperset(self.buckets[n]):\n",
        new="self.ready.intersection(self.buckets[n]):\n",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_order",
        name="sends all buckets in finish",
        old=WHILE,
        new="            while (n := len(self.messages)) < len(self.buckets) and not isinstance(self, BucketedDDP):\n",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_order",
        name="sends a bucket before those in front of it, as each becomes complete",
        old=WHILE,
        new="""\
            n = len(self.messages)
            k = next((k for k in range(n, len(self.buckets)) if self.ready.issuperset(self.buckets[k])), None)
            if k is not None:
                self.buckets.insert(n, self.buckets.pop(k))
""",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_unused",
        name="a bucket without all its gradients is never sent",
        old="""\
        for bucket in self.buckets[len(self.messages) :]:
            self.messages.append(start_average(bucket, self.weight, self.group))
        if""",
        new="        if",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_unused",
        name="skips a gradient that is None inside a bucket",
        old="""\
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    message = torch.cat([p.grad.flatten() for p in parameters]).mul_(weight)
""",
        new="""\
    message = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None] or [torch.zeros(0)]).mul_(weight)
""",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_two_backwards",
        name="a second backward is not sent",
        old=OUTDATED,
        new="",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_waiting",
        name="waits for the bucket before in the hook",
        old="                self.messages.append(start_average(self.buckets[n], self.weight, group))\n\n",
        new="""\
                if self.messages:
                    self.messages[-1][1].wait()
                self.messages.append(start_average(self.buckets[n], self.weight, group))

""",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_no_sync",
        name="no_sync is asked in finish only",
        old="            if self.local:\n                return\n",
        new="",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_construction",
        name="forgets the group",
        old="        super().__init__(module, group)\n",
        new="        super().__init__(module, None)\n",
    ),
    # train_ddp
    Mutant(
        problem="train_ddp",
        check="train_ddp_losses",
        name="tells the loss of its own rows",
        old="        dist.all_reduce(mean, group=group)\n        losses",
        new="        mean *= size\n        losses",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_losses",
        name="every rank draws a batch of its own",
        old="    seed_everything(config.seed)\n",
        new="    seed_everything(config.seed, rank)\n",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_rows",
        name="every rank computes on the whole batch",
        old="        loss = model.loss(*shard_batch(batch, rank, size))\n",
        new="        loss = model.loss(*batch)\n",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_losses",
        name="does not average the gradients",
        old="        ddp.finish_gradient_synchronization()\n        optimizer",
        new="        optimizer",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_losses",
        name="averages before it computes",
        old="        loss.backward()\n        ddp.finish_gradient_synchronization()\n",
        new="        ddp.finish_gradient_synchronization()\n        loss.backward()\n",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_losses",
        name="ranks keep their own initial weights",
        old="    ddp = BucketedDDP(model, bucket_cap_mb=25, group=group)\n",
        new="""\
    own = [p.detach().clone() for p in model.parameters()]
    ddp = BucketedDDP(model, bucket_cap_mb=25, group=group)
    with torch.no_grad():
        for p, value in zip(model.parameters(), own):
            p.copy_(value)
""",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_resume",
        name="every rank saves",
        old=" and due and rank == 0:",
        new=" and due:",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_subgroup",
        name="global rank 0 saves, in a group without it nobody",
        old=" and due and rank == 0:",
        new=" and due and dist.get_rank() == 0:",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_resume",
        name="no checkpoint after the last step",
        old="        due = done % config.checkpoint_interval == 0 or done == config.steps\n",
        new="        due = done % config.checkpoint_interval == 0\n",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_resume",
        name="saves the wrapped model, which train cannot resume from",
        old="            save_checkpoint(model, optimizer, done, config.checkpoint_path)\n",
        new="            save_checkpoint(ddp, optimizer, done, config.checkpoint_path)\n",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_resume",
        name="seeds after the checkpoint is loaded",
        old="    losses = []\n    for step in range(first, config.steps):\n",
        new="    seed_everything(config.seed)\n    losses = []\n    for step in range(first, config.steps):\n",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_resume",
        name="only the first rank loads the checkpoint",
        old="    first = 0 if resume is None else load_checkpoint(resume, model, optimizer)\n",
        new="    first = 0 if resume is None or rank else load_checkpoint(resume, model, optimizer)\n",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_losses",
        name="divides the batch size by the number of ranks, and then the batch",
        old="        batch = get_batch(tokens, config.batch_size, config.context_length, device)\n",
        new="        batch = get_batch(tokens, config.batch_size // size * size // 2, config.context_length, device)\n",
    ),
    # parts of a rule that are easily left out
    Mutant(
        problem="bucketed",
        check="bucketed_composition",
        name="a gradient over the cap leaves the open bucket open",
        old="""\
            bucket = current[p.dtype] = []
""",
        new="""\
            bucket = []
            if p.nbytes <= cap:
                current[p.dtype] = bucket
""",
    ),
    Mutant(
        problem="bucketed",
        check="bucketed_composition",
        name="frozen parameters take up room",
        old="""\
        self.buckets = fill_buckets(trainable(module)[::-1], bucket_cap_mb * 2**20)
""",
        new="""\
        buckets = fill_buckets(list(module.parameters())[::-1], bucket_cap_mb * 2**20)
        self.buckets = [kept for b in buckets if (kept := [p for p in b if p.requires_grad])]
""",
    ),
    Rewrite(
        problem="bucketed",
        check="bucketed_order",
        name="buckets are filled anew in the order of the first backward",
        source="""\
class BucketedDDP(BucketedDDP):
    def __init__(self, module, bucket_cap_mb, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.seen, self.cap = [], bucket_cap_mb * 2**20
        for p in trainable(module):
            p.register_post_accumulate_grad_hook(self.seen.append)

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        if sorted(map(id, self.seen)) == sorted(id(p) for b in self.buckets for p in b):
            self.buckets = fill_buckets(self.seen, self.cap)
        self.seen.clear()
""",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_two_backwards",
        name="a second backward counts where all gradients were there",
        old="        if self.outdated:  # by",
        new="        if self.outdated and len(self.ready) == len(self.buckets):  # by",
    ),
    Mutant(
        problem="overlapped",
        check="overlapped_values",
        name="arguments by keyword are lost",
        old="""\
        return self.module(*args, **kwargs)
""",
        new="""\
        return self.module(*args)
""",
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_empty",
        name="clears nan, but not inf",
        old="""\
    if num_samples == 0:
        for p in parameters:
            p.grad = None  # 0 * nan is nan
""",
        new="""\
    for p in parameters:
        if num_samples == 0 and p.grad is not None:
            p.grad = torch.where(p.grad.isnan(), 0.0, p.grad)
""",
    ),
    Mutant(
        problem="weighted_sync",
        check="weighted_sync_large",
        name="the total in bfloat16",
        old="total = torch.tensor(num_samples, device=device)",
        new="total = torch.tensor(num_samples, device=device, dtype=torch.bfloat16)",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_resume",
        name="saves after the last step only",
        old="due = done % config.checkpoint_interval == 0 or done == config.steps",
        new="due = done == config.steps",
    ),
    Mutant(
        problem="train_ddp",
        check="train_ddp_returns",
        name="no barrier after the last checkpoint",
        old="""\
    dist.barrier(group)  # nobody is ahead of the last checkpoint
""",
        new="",
    ),
    Mutant(
        problem="broadcast_module",
        check="broadcast_module_parameters",
        name="gradients are cleared",
        old="""\
            tensor.copy_(message)
""",
        new="""\
            tensor.copy_(message)
        tensor.grad = None
""",
    ),
]

ALTERNATIVES = [
    Alternative(
        problem="shard_batch",
        name="views of chunks",
        function="shard_batch",
        source='''\
def shard_batch(batch, rank, world_size):
    """torch.chunk, and a comprehension for each kind."""
    if isinstance(batch, Tensor):
        if batch.shape[0] % world_size != 0:
            raise ValueError(f"{batch.shape[0]} rows, {world_size} ranks")
        return batch.chunk(world_size)[rank]
    if isinstance(batch, dict):
        return {k: shard_batch(v, rank, world_size) for k, v in batch.items()}
    parts = [shard_batch(v, rank, world_size) for v in batch]
    return tuple(parts) if isinstance(batch, tuple) else parts
''',
    ),
    Alternative(
        problem="broadcast_module",
        name="one flat message for each dtype",
        function="broadcast_module",
        source='''\
def broadcast_module(module, src=None, group=None):
    """Flattened by dtype; src as a rank of the group."""
    root = 0 if src is None else dist.get_group_rank(group or dist.group.WORLD, src)
    tensors = [*module.parameters(), *module.buffers()]
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        alike = [t.data for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in alike])
        dist.broadcast(flat, group_src=root, group=group)
        for t, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            t.copy_(part.reshape(t.shape))
''',
    ),
    Alternative(
        problem="broadcast_module",
        name="all messages under way at once, data replaced",
        function="broadcast_module",
        source='''\
def broadcast_module(module, src=None, group=None):
    """The parameters stay, their storage does not."""
    root = dist.get_process_group_ranks(group or dist.group.WORLD)[0] if src is None else src
    works = []
    for tensor in dict.fromkeys([*module.buffers(), *module.parameters()]):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        works.append(dist.broadcast(tensor.data, root, group=group, async_op=True))
    for work in works:
        work.wait()
''',
    ),
    Alternative(
        problem="naive_sync",
        name="ReduceOp.AVG, all under way at once",
        function="average_gradients",
        source='''\
def average_gradients(module, group=None):
    """New gradient tensors."""
    works = []
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = p.grad.clone(memory_format=torch.contiguous_format)
            works.append(dist.all_reduce(p.grad, dist.ReduceOp.AVG, group, async_op=True))
    for work in works:
        work.wait()
''',
    ),
    Alternative(
        problem="naive_sync",
        name="a mask of who has which gradient first; divides after adding",
        function="average_gradients",
        source='''\
def average_gradients(module, group=None):
    """A parameter unused on all ranks keeps None."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    for p, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            total = torch.zeros_like(p) if p.grad is None else p.grad
            total = total.contiguous()
            dist.all_reduce(total, group=group)
            p.grad = total / dist.get_world_size(group)
''',
    ),
    Alternative(
        problem="naive_sync",
        name="functional collectives",
        function="average_gradients",
        source='''\
def average_gradients(module, group=None):
    """A new tensor comes back from each."""
    from torch.distributed import _functional_collectives as functional

    for p in module.parameters():
        if p.requires_grad:
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            total = functional.all_reduce(mine.contiguous(), "sum", group or dist.group.WORLD)
            p.grad = functional.wait_tensor(total) / dist.get_world_size(group)
''',
    ),
    Alternative(
        problem="flat_sync",
        name="coalesced all_reduce over the gradients themselves",
        function="average_gradients_flat",
        source='''\
def average_gradients_flat(module, group=None):
    """all_reduce_coalesced, one for each dtype."""
    by_dtype = {}
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = p.grad.contiguous()
            by_dtype.setdefault(p.dtype, []).append(p.grad)
    for gradients in by_dtype.values():
        dist.all_reduce_coalesced(gradients, group=group)
        torch._foreach_div_(gradients, dist.get_world_size(group))
''',
    ),
    Alternative(
        problem="flat_sync",
        name="gradients become views of the flat tensor",
        function="average_gradients_flat",
        source='''\
def average_gradients_flat(module, group=None):
    """Nothing is copied back."""
    parameters = trainable(module)
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        alike = [p for p in parameters if p.dtype == dtype]
        parts = [torch.zeros(p.numel(), dtype=dtype) if p.grad is None else p.grad.reshape(-1) for p in alike]
        flat = torch.cat(parts)
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
        start = 0
        for p in alike:
            p.grad = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
''',
    ),
    Alternative(
        problem="weighted_sync",
        name="flat messages; the numbers of samples by all_gather",
        function="average_gradients_weighted",
        source='''\
def average_gradients_weighted(module, num_samples, group=None):
    """Every rank learns all numbers."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([num_samples]), group=group)
    share = num_samples / sum(c.item() for c in counts)
    parameters = trainable(module)
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        alike = [p for p in parameters if p.dtype == dtype]
        for p in alike:
            if p.grad is None or num_samples == 0:
                p.grad = torch.zeros_like(p)
        flat = share * torch.cat([p.grad.flatten() for p in alike])
        dist.all_reduce(flat, group=group)
        for p, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
            p.grad.copy_(part.view(p.shape))
''',
    ),
    Alternative(
        problem="overlapped",
        name="hooks on the nodes that accumulate; gradients are summed in place, a second backward waits for the first",
        function="OverlappedDDP",
        source='''\
class OverlappedDDP(nn.Module):
    """Divides after adding. A gradient that is ready again begins a second round of messages."""

    def __init__(self, module, group=None):
        super().__init__()
        broadcast_module(module, group=group)
        self.module, self.group = module, group
        self.order = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.silent, self.skip = False, False
        self.nodes = []
        self._restart()
        for p in self.order:
            p.register_hook(lambda gradient, p=p: self._about_to_add(p))
            node = p.expand_as(p).grad_fn.next_functions[0][0]
            node.register_hook(lambda *unused, p=p: self._added(p))
            self.nodes.append(node)

    def _restart(self):
        self.ready, self.works = set(), []

    def _about_to_add(self, p):
        if id(p) in self.ready and not self.silent:
            self._complete()

    def _added(self, p):
        if not self.silent:
            self.ready.add(id(p))
            while len(self.works) < len(self.order) and id(self.order[len(self.works)]) in self.ready:
                self._send(self.order[len(self.works)])

    def _send(self, p):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if not p.grad.is_contiguous():
            p.grad = p.grad.contiguous()
        self.works.append(dist.all_reduce(p.grad, group=self.group, async_op=True))

    def _complete(self):
        for p in self.order[len(self.works):]:
            self._send(p)
        for p, work in zip(self.order, self.works):
            work.wait()
            p.grad.div_(dist.get_world_size(self.group))
        self._restart()

    def forward(self, *args, **kwargs):
        self.skip = self.silent
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        if not self.silent and not self.skip:
            self._complete()

    @contextlib.contextmanager
    def no_sync(self):
        self.silent, self.skip = True, True
        try:
            yield
        finally:
            self.silent = False
''',
    ),
    Alternative(
        problem="overlapped",
        name="tensor hooks, which send what the gradient will be",
        function="OverlappedDDP",
        source='''\
class OverlappedDDP(nn.Module):
    """What is sent is p.grad + gradient. finish sends everything once more where a gradient came twice."""

    def __init__(self, module, group=None):
        super().__init__()
        broadcast_module(module, group=group)
        self.module = module
        self.group = group
        self.parameters_ = trainable(module)[::-1]
        self.inside = 0
        self.averaging = True
        self.values, self.works, self.twice = {}, [], False
        for k, p in enumerate(self.parameters_):
            p.register_hook(lambda gradient, k=k, p=p: self.come(k, p, gradient))

    def come(self, k, p, gradient):
        self.twice = self.twice or k in self.values
        if self.inside:
            return
        self.averaging = True
        self.values[k] = gradient.clone() if p.grad is None else p.grad + gradient
        while len(self.works) in self.values and len(self.works) < len(self.parameters_):
            self.send(self.values[len(self.works)])

    def send(self, value):
        flat = value.reshape(-1) / dist.get_world_size(self.group)
        self.works.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))

    def forward(self, *args, **kwargs):
        self.averaging = self.inside == 0
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        if self.inside or not self.averaging:
            return
        for p in self.parameters_[len(self.works):]:
            self.send(torch.zeros_like(p) if p.grad is None else p.grad)
        for (flat, work), p in zip(self.works, self.parameters_):
            work.wait()
            if not self.twice:
                p.grad = flat.view(p.shape)
        if self.twice:
            average_gradients(self.module, self.group)
        self.values, self.works, self.twice = {}, [], False

    @contextlib.contextmanager
    def no_sync(self):
        self.inside += 1
        self.averaging = False
        yield
        self.inside -= 1
''',
    ),
    Alternative(
        problem="bucketed",
        name="counters, the last bucket and incomplete ones in finish, ReduceOp.AVG",
        function="BucketedDDP",
        source='''\
class BucketedDDP(nn.Module):
    """Buckets are lists of places; a bucket's flat tensor is made when it is sent."""

    def __init__(self, module, bucket_cap_mb, group=None):
        super().__init__()
        broadcast_module(module, group=group)
        self.module, self.group = module, group
        self.buckets, room = [], {}
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            size = p.numel() * p.element_size()
            if p.dtype not in room or size > room[p.dtype][0]:
                self.buckets.append([])
                room[p.dtype] = [bucket_cap_mb * 1024 * 1024, self.buckets[-1]]
            room[p.dtype][0] -= size
            room[p.dtype][1].append(p)
        self.home = {p: k for k, bucket in enumerate(self.buckets) for p in bucket}
        self.quiet = False
        self.wanted = True
        self._reset()
        for p in self.home:
            p.register_post_accumulate_grad_hook(self._ready)

    def _reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.came, self.again, self.flying = set(), False, []

    def _ready(self, p):
        if p in self.came:
            self.again = True
            return
        if self.quiet:
            return
        self.came.add(p)
        self.missing[self.home[p]] -= 1
        while len(self.flying) < len(self.buckets) - 1 and self.missing[len(self.flying)] == 0:
            self._launch()

    def _launch(self):
        flat = []
        for p in self.buckets[len(self.flying)]:
            flat.append(torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten())
        flat = torch.cat(flat)
        self.flying.append((flat, dist.all_reduce(flat, dist.ReduceOp.AVG, self.group, async_op=True)))

    def _land(self):
        while len(self.flying) < len(self.buckets):
            self._launch()
        for flat, work in self.flying:
            work.wait()

    def forward(self, *args, **kwargs):
        self.wanted = not self.quiet
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        if self.quiet or not self.wanted:
            return
        self._land()
        if self.again:
            self.flying = []
            self._land()
        for (flat, _), bucket in zip(self.flying, self.buckets):
            start = 0
            for p in bucket:
                p.grad = flat[start : start + p.numel()].view_as(p).clone()
                start += p.numel()
        self._reset()

    @contextlib.contextmanager
    def no_sync(self):
        quiet, self.quiet, self.wanted = self.quiet, True, False
        try:
            yield
        finally:
            self.quiet = quiet
''',
    ),
    Alternative(
        problem="bucketed",
        name="gradients are views of the buckets; a second backward waits for the first",
        function="BucketedDDP",
        source='''\
class BucketedDDP(nn.Module):
    """As PyTorch does with gradient_as_bucket_view; dtypes are bucketed one after the other."""

    def __init__(self, module, bucket_cap_mb, group=None):
        super().__init__()
        broadcast_module(module, group=group)
        self.module, self.group = module, group
        parameters = trainable(module)[::-1]
        self.buckets = []
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            self.buckets += fill_buckets([p for p in parameters if p.dtype == dtype], bucket_cap_mb * 2**20)
        self.flats = [torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype) for b in self.buckets]
        self.views = {}
        for bucket, flat in zip(self.buckets, self.flats):
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                self.views[p] = part.view(p.shape)
        self.off, self.due = False, True
        self.ready, self.works = set(), []
        for p in parameters:
            p.register_hook(lambda gradient, p=p: self.before(p))
            p.register_post_accumulate_grad_hook(self.after)

    def before(self, p):
        if p in self.ready:
            self.complete()

    def after(self, p):
        if self.off:
            return
        self.ready.add(p)
        while len(self.works) < len(self.buckets) and self.ready.issuperset(self.buckets[len(self.works)]):
            self.send()

    def send(self):
        k = len(self.works)
        for p in self.buckets[k]:
            view = self.views[p]
            if p.grad is None:
                view.zero_()
            elif p.grad is not view:
                view.copy_(p.grad)
            p.grad = view
        self.works.append(dist.all_reduce(self.flats[k], group=self.group, async_op=True))

    def complete(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for flat, work in zip(self.flats, self.works):
            work.wait()
            flat /= dist.get_world_size(self.group)
        self.ready, self.works = set(), []

    def forward(self, *args, **kwargs):
        self.due = not self.off
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        if self.due and not self.off:
            self.complete()

    @contextlib.contextmanager
    def no_sync(self):
        self.off, self.due = True, False
        try:
            yield
        finally:
            self.off = False
''',
    ),
    Alternative(
        problem="train_ddp",
        name="averages after backward; all losses are averaged at the end",
        function="train_ddp",
        source='''\
def train_ddp(model, tokens, config, *, resume=None, group=None):
    """No wrapper."""
    import baseline

    p, rank = dist.get_world_size(group), dist.get_rank(group)
    broadcast_module(model, group=group)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay)
    baseline.seed_everything(config.seed)
    first = baseline.load_checkpoint(resume, model, optimizer) if resume else 0
    losses = []
    for step in range(first, config.steps):
        optimizer.param_groups[0]["lr"] = baseline.cosine_lr(
            step, max_lr=config.max_lr, min_lr=config.min_lr, warmup_steps=config.warmup_steps,
            cycle_steps=config.cycle_steps, cycle_mult=config.cycle_mult,
        )
        x, y = baseline.get_batch(tokens, config.batch_size, config.context_length, "cpu")
        x, y = shard_batch(x, rank, p), shard_batch(y, rank, p)
        model.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        average_gradients_flat(model, group)
        optimizer.step()
        losses.append(loss.item())
        if config.checkpoint_path and ((step + 1) % config.checkpoint_interval == 0 or step + 1 == config.steps):
            if rank == 0:
                baseline.save_checkpoint(model, optimizer, step + 1, config.checkpoint_path)
            dist.barrier(group)
    means = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(means, dist.ReduceOp.AVG, group)
    return means.tolist()
''',
    ),
]
