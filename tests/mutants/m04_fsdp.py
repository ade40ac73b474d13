"""Module 04: wrong and unusual ways to shard a model.

What a mutant gets wrong is said in its name. Most of them train, and many are right in a step of one forward and one
backward over units that divide evenly, whose parameters are all used and trained.
"""

from tests.mutants import Alternative, Mutant, Rewrite

MUTANTS = [
    # flat_shard
    Mutant(
        problem="flat_shard",
        check="flat_shard_bytes",
        name="the shard is a view, which keeps the full tensor",
        old="""\
        return F.pad(part, (0, self.length - len(part))).clone()
""",
        new="""\
        return part if len(part) == self.length else F.pad(part, (0, self.length - len(part)))
""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_bytes",
        name="the parameters keep their own memory, too",
        old="""\
        self.full.untyped_storage().resize_(0)
""",
        new="""\
        self.full.untyped_storage().resize_(0)
        self.copies = [torch.empty(p.shape, dtype=p.dtype).fill_(0) for p in self.params]
""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_bytes",
        name="reshard only remembers that it was called",
        old="""\
        self.full.untyped_storage().resize_(0)
""",
        new="",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_values",
        name="parameters are copies, not views",
        old="""\
        self.work, self.gathered = None, True
""",
        new="""\
        self.work, self.gathered = None, True
        for p, part in zip(self.params, self._parts(self.full), strict=True):
            p.data = part.clone()
""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_values",
        name="elements that do not divide are left out",
        old="self.length = math.ceil(len(flat) / self.size)",
        new="self.length = max(len(flat) // self.size, 1)",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_values",
        name="one row too many on every rank",
        old="self.length = math.ceil(len(flat) / self.size)",
        new="self.length = len(flat) // self.size + 1",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_subgroup",
        name="the shard of the global rank, in a group too",
        old="dist.get_rank(group), dist",
        new="dist.get_rank(), dist",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_values",
        name="every world_size-th element",
        old="""\
        return F.pad(part, (0, self.length - len(part))).clone()
""",
        new="""\
        return F.pad(flat, (0, self.length * self.size - len(flat)))[self.rank :: self.size].clone()
""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_values",
        name="a parameter that is given twice is there twice",
        old="""\
        self.params = list(dict.fromkeys(params))
""",
        new="""\
        self.params = list(params)
""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_dtypes",
        name="several dtypes are promoted to the widest",
        old="""\
        if len({p.dtype for p in self.params}) > 1:
""",
        new="""\
        if False:
""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_values",
        name="always float32",
        old="""\
        flat = torch.cat([p.detach().flatten() for p in self.params])
        self.length""",
        new="""\
        flat = torch.cat([p.detach().float().flatten() for p in self.params])
        self.length""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_traffic",
        name="one all_gather for each parameter's worth",
        old="""\
        self.work = all_gather_single(self.full, message, self.group, async_op=True)
""",
        new="""\
        pieces = [torch.empty_like(message) for _ in range(self.size)]
        dist.all_gather(pieces, message, self.group)
        dist.all_gather(pieces, message, self.group)
        self.full.copy_(torch.cat(pieces))
        self.work = None
""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_values",
        name="unshard does not see that the shard has changed",
        old="        message = self.shard.detach().to",
        new="""\
        if not hasattr(self, 'first'):
            self.first = self.shard.detach().clone()
        message = self.first.to""",
    ),
    Mutant(
        problem="flat_shard",
        check="flat_shard_values",
        name="the shard is a plain tensor",
        old="""\
        self.shard = nn.Parameter(self._mine(flat), any(p.requires_grad for p in self.params))
""",
        new="""\
        self.shard = self._mine(flat)
""",
    ),
    # forward_backward
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="no unit is sharded: its class never matches",
        old="""\
            home = places[0] if len(places) == 1 else self.root
""",
        new="""\
            home = places[0] if len(places) == 1 else self.root
            if type(units[0]).__name__ != 'TransformerBlock':
                continue
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_order",
        name="all units are one",
        old="""\
            home = places[0] if len(places) == 1 else self.root
""",
        new="""\
            home = self.root
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="all parameters are in the first unit",
        old="""\
            home = places[0] if len(places) == 1 else self.root
""",
        new="""\
            home = 0
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_order",
        name="never frees after forward",
        old="""\
        if self.reshard_after_forward or not outputs:
""",
        new="""\
        if not outputs:
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_order",
        name="frees after forward whatever is asked",
        old="""\
        if self.reshard_after_forward or not outputs:
""",
        new="""\
        if True:
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_resident",
        name="frees nothing at all until the next forward",
        old="""\
        self.full.untyped_storage().resize_(0)
""",
        new="""\
        if self.shard.grad is None and not torch.is_grad_enabled():
            self.full.untyped_storage().resize_(0)
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_live",
        name="does not free after backward",
        old="""\
        for flat in self.units[i]:
            if flat.shard.requires_grad:
                flat.reduce_gradient()
            flat.reshard()
""",
        new="""\
        for flat in self.units[i]:
            if flat.shard.requires_grad:
                flat.reduce_gradient()
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="gradients are added up, not averaged",
        old="""\
        mine /= self.size
""",
        new="",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_subgroup",
        name="averaged over the default group",
        old="""\
        mine /= self.size
""",
        new="""\
        mine /= dist.get_world_size()
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_order",
        name="all_reduce and a slice of it",
        old="""\
        mine = torch.empty_like(self.shard)
        reduce_scatter_single(mine, flat, group=self.group)
""",
        new="""\
        dist.all_reduce(flat, group=self.group)
        mine = flat[self.rank * self.length : (self.rank + 1) * self.length].clone()
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_order",
        name="all_reduce and a view of it: full gradients stay",
        old="""\
        mine = torch.empty_like(self.shard)
        reduce_scatter_single(mine, flat, group=self.group)
""",
        new="""\
        dist.all_reduce(flat, group=self.group)
        mine = flat[self.rank * self.length : (self.rank + 1) * self.length]
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_resident",
        name="keeps full gradients",
        old="""\
            if p.grad is not None:
                part.copy_(p.grad)
                p.grad = None
""",
        new="""\
            if p.grad is not None:
                part.copy_(p.grad)
                self.kept = flat
                p.grad = None
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="does not take the first rank's weights",
        old="""\
            dist.broadcast(message, group=group, group_src=0)
""",
        new="",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="takes the weights of rank 0, in a group too",
        old="dist.broadcast(message, group=group, group_src=0)",
        new="dist.broadcast(message, group=group, group_src=-1 % dist.get_world_size(group))",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="buffers stay each rank's own",
        old="""\
        for tensor in [*module.parameters(), *module.buffers()]:
""",
        new="""\
        for tensor in module.parameters():
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_without",
        name="an old value of a forward without a backward is used",
        old="""\
        for flat in self._flat_shards():
            flat.reshard()  # what a forward without a backward has left gathered is of an earlier step
""",
        new="",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="the last shard's gradient is lost where it is padded",
        old="""\
        mine /= self.size
""",
        new="""\
        mine /= self.size
        if self.rank == self.size - 1 and len(flat) > sum(p.numel() for p in self.params):
            mine.zero_()
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_order",
        name="reduces before the unit's backward has come to its end",
        old="""\
        self.in_backward.add(i)
        for flat in self.units[i]:
            flat.unshard()
""",
        new="""\
        self.in_backward.add(i)
        for flat in self.units[i]:
            flat.unshard()
        for flat in self.units[i]:
            if flat.shard.requires_grad:
                flat.reduce_gradient()
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="the gradients of the first unit are forgotten",
        old="""\
        for i in sorted(self.in_backward):
            self.after_backward(i)
""",
        new="""\
        self.in_backward.clear()
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_live",
        name="all is reduced when backward has ended",
        old="""\
            register_multi_grad_hook(inputs, lambda gradients: self.after_backward(i))
""",
        new="""\
            pass
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="a unit is done after its first use's backward",
        old="""\
        self.in_backward.remove(i)
""",
        new="""\
        self.in_backward.remove(i)
        self.done = getattr(self, 'done', {})
        if self.done.get(i) == len(self.in_backward):
            return
        self.done[i] = len(self.in_backward)
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="nothing is waited for",
        old="""\
            self.work.wait()
        self.work, self.gathered = None, True
""",
        new="""\
            pass
        self.work, self.gathered = None, True
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_values",
        name="wraps the units in PyTorch's own",
        old="""\
        for tensor in [*module.parameters(), *module.buffers()]:
""",
        new="""\
        from torch.distributed.fsdp import fully_shard

        for unit in units:
            fully_shard(unit)
        for tensor in [*module.parameters(), *module.buffers()]:
""",
    ),
    # gradients
    Mutant(
        problem="gradients",
        check="gradients_accumulation",
        name="the last micro-batch replaces those before",
        old="""\
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
""",
        new="""\
        self.shard.grad = mine
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_sharded",
        name="parameters() are the module's own",
        old="""\
                yield f"{prefix}unit{i}.{k}", flat.shard
""",
        new="""\
                yield from [(f"{prefix}{i}.{k}", flat.shard), *self.module.named_parameters(f"m{i}{k}")]
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_frozen",
        name="a frozen weight is in one shard with the others",
        old="""\
            kinds.setdefault((home, p.dtype, p.requires_grad), []).append(p)
""",
        new="""\
            kinds.setdefault((home, p.dtype), []).append(p)
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_frozen",
        name="a frozen weight gets a gradient of zeros",
        old="""\
any(p.requires_grad for p in self.params))
""",
        new="""\
True)
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_frozen",
        name="a unit with a frozen weight is not trained at all",
        old="""\
            kinds.setdefault((home, p.dtype, p.requires_grad), []).append(p)
        self.units""",
        new="""\
            kinds.setdefault((home, p.dtype), []).append(p)
        for params in kinds.values():
            if not all(p.requires_grad for p in params):
                for p in params:
                    p.requires_grad_(False)
        self.units""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_unused",
        name="an unused parameter keeps its unit from being reduced",
        old="""\
        for flat in self.units[i]:
            if flat.shard.requires_grad:
                flat.reduce_gradient()
            flat.reshard()
""",
        new="""\
        for flat in self.units[i]:
            if flat.shard.requires_grad and all(p.grad is not None for p in flat.params):
                flat.reduce_gradient()
            flat.reshard()
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_unused",
        name="ranks without a gradient do not take part",
        old="""\
        for flat in self.units[i]:
            if flat.shard.requires_grad:
                flat.reduce_gradient()
            flat.reshard()
""",
        new="""\
        for flat in self.units[i]:
            if flat.shard.requires_grad and all(p.grad is not None for p in flat.params):
                flat.reduce_gradient()
            flat.reshard()
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_tied",
        name="a shared parameter belongs to the last unit that has it, and is gathered with it only",
        old="""\
            home = places[0] if len(places) == 1 else self.root
""",
        new="""\
            home = places[-1] if places else self.root
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_sharded",
        name="gradients of all dtypes in float32",
        old="""\
        flat = self.shard.new_zeros(self.size * self.length)
""",
        new="""\
        flat = self.shard.new_zeros(self.size * self.length, dtype=torch.float32)
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_dtypes",
        name="one dtype for a unit",
        old="""\
            kinds.setdefault((home, p.dtype, p.requires_grad), []).append(p)
        self.units""",
        new="""\
            p.data = p.data.to(next(module.parameters()).dtype)
            kinds.setdefault((home, p.dtype, p.requires_grad), []).append(p)
        self.units""",
    ),
    # prefetch
    Mutant(
        problem="prefetch",
        check="prefetch_forward",
        name="nothing is gathered ahead",
        old="""\
        if self.prefetch and i + 1 < self.root:
            for flat in self.units[i + 1]:
                flat.start_unshard()
""",
        new="",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_backward",
        name="nothing is gathered ahead in backward",
        old="""\
        if self.prefetch and 0 < i < self.root:
            for flat in self.units[i - 1]:
                flat.start_unshard()
""",
        new="",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_backward",
        name="in backward, the next unit",
        old="""\
        if self.prefetch and 0 < i < self.root:
            for flat in self.units[i - 1]:
                flat.start_unshard()
""",
        new="""\
        if self.prefetch and i + 1 < self.root:
            for flat in self.units[i + 1]:
                flat.start_unshard()
""",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_forward",
        name="gathers ahead and waits for it",
        old="""\
        if self.prefetch and i + 1 < self.root:
            for flat in self.units[i + 1]:
                flat.start_unshard()
""",
        new="""\
        if self.prefetch and i + 1 < self.root:
            for flat in self.units[i + 1]:
                flat.unshard()
""",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_live",
        name="gathers everything ahead",
        old="""\
        if self.prefetch and i + 1 < self.root:
            for flat in self.units[i + 1]:
                flat.start_unshard()
""",
        new="""\
        if self.prefetch:
            for flat in self._flat_shards():
                flat.start_unshard()
""",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_values",
        name="what was gathered ahead and not used stays",
        old="""\
        for flat in self._flat_shards():
            flat.reshard()  # what a forward without a backward has left gathered is of an earlier step
""",
        new="",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_values",
        name="what was gathered ahead is not waited for",
        old="""\
            if flat.work is not None:  # gathered ahead for a unit that was not called
                flat.reshard()
""",
        new="""\
            flat.work = None
""",
    ),
    # mixed_precision
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_shards",
        name="the masters are bf16",
        old="""\
        self.shard = nn.Parameter(self._mine(flat), any(p.requires_grad for p in self.params))
""",
        new="""\
        self.shard = nn.Parameter(self._mine(flat).to(param_dtype), any(p.requires_grad for p in self.params))
""",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_masters",
        name="the masters are rounded to bf16",
        old="""\
        message = self.shard.detach().to(self.full.dtype)
""",
        new="""\
        message = self.shard.detach().to(self.full.dtype)
        self.shard.data = message.to(self.shard.dtype)
""",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_traffic",
        name="gathers fp32 and casts afterwards",
        old="""\
        self.work = all_gather_single(self.full, message, self.group, async_op=True)
""",
        new="""\
        wide = self.shard.new_empty(len(self.full))
        all_gather_single(wide, self.shard.detach(), self.group)
        self.full.copy_(wide)
""",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_values",
        name="computes in fp32",
        old="""\
dtype=param_dtype)
        self.nbytes""",
        new="""\
dtype=None)
        self.nbytes""",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_values",
        name="does not cast inputs",
        old="""\
            if self.param_dtype is not None and x.is_floating_point():
""",
        new="""\
            if False:
""",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_inputs",
        name="casts whole numbers, too",
        old="""\
            if self.param_dtype is not None and x.is_floating_point():
""",
        new="""\
            if self.param_dtype is not None:
""",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_values",
        name="casts buffers, too",
        old="""\
        for tensor in [*module.parameters(), *module.buffers()]:
""",
        new="""\
        for part in module.modules():
            for name, b in list(part.named_buffers(recurse=False)):
                if param_dtype is not None:
                    setattr(part, name, b.to(param_dtype))
        for tensor in [*module.parameters(), *module.buffers()]:
""",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_masters",
        name="gradients stay bf16",
        old="""\
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
""",
        new="""\
        self.shard.grad = mine.to(self.full.dtype).to(mine.dtype).mul(0 if self.full.dtype == torch.bfloat16 else 1)
""",
    ),
    # clip_and_save
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="the norm of this rank's shards",
        old="""\
        dist.all_reduce(total, group=self.group)
""",
        new="",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="norms are added up, not squares",
        old="""\
        dist.all_reduce(total, group=self.group)
""",
        new="""\
        total = total.sqrt()
        dist.all_reduce(total, group=self.group)
        total = total.square()
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="the norm of each shard by itself",
        old="""\
            gradient *= min(1.0, max_norm / (norm.item() + 1e-6))
""",
        new="""\
            gradient *= min(1.0, max_norm / (gradient.norm().item() + 1e-6))
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="scales small gradients up",
        old="min(1.0, max_norm / (norm.item() + 1e-6))",
        new="max_norm / (norm.item() + 1e-6)",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="measures, and scales nothing",
        old="""\
            gradient *= min(1.0, max_norm / (norm.item() + 1e-6))
""",
        new="""\
            pass
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_save",
        name="the state on the first rank only",
        old="""\
        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items()}
""",
        new="""\
        if dist.get_rank(self.group):
            return {}
        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items()}
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_save",
        name="a tied weight by one of its names",
        old="""\
        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items()}
""",
        new="""\
        seen = set()
        names = {n: t for n, t in names.items() if not (id(t) in seen or seen.add(id(t)))}
        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items()}
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_save",
        name="no buffers in the state",
        old="""\
        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items()}
""",
        new="""\
        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items() if tensor in values}
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_save",
        name="buffers that are not saved, too",
        old="""\
        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items()}
""",
        new="""\
        names = dict(self.module.named_buffers()) | names
        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items()}
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_mixed",
        name="the state is rounded to bf16",
        old="""\
        all_gather_single(flat, self.shard.detach(), self.group)
        return""",
        new="""\
        all_gather_single(flat, self.shard.detach(), self.group)
        flat = flat.to(self.full.dtype).to(flat.dtype)
        return""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_load",
        name="loads the first part on every rank",
        old="""\
            self.shard.copy_(self._mine(flat))
""",
        new="""\
            self.shard.copy_(F.pad(flat, (0, self.length))[: self.length])
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_load",
        name="loads into new shards, which no optimizer knows",
        old="""\
        with torch.no_grad():
            self.shard.copy_(self._mine(flat))
""",
        new="""\
        self.shard = nn.Parameter(self._mine(flat), self.shard.requires_grad)
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_load",
        name="buffers are not loaded",
        old="""\
                    tensor.copy_(state[name])
""",
        new="""\
                    pass
""",
    ),
    # checkpointing
    Mutant(
        problem="checkpointing",
        check="checkpointing_bytes",
        name="does nothing",
        old="""\
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
""",
        new="""\
        pass
""",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_bytes",
        name="only the first unit",
        old="""\
    for unit in units:
        # Not the unit""",
        new="""\
    for unit in units[:1]:
        # Not the unit""",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_values",
        name="draws other random numbers",
        old="""\
use_reentrant=False)
""",
        new="""\
use_reentrant=False, preserve_rng_state=False)
""",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_bytes",
        name="the whole model at once, kept until the end",
        old="""\
    for unit in units:
        # Not the unit""",
        new="""\
    for unit in [p for u in units for p in u.children()]:
        # Not the unit""",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_values",
        name="units are replaced by wrappers, with other names",
        old="""\
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
""",
        new="""\
        class Wrapped(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, *args, **kwargs):
                return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)

        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if child is unit:
                    setattr(parent, name, Wrapped(unit))
""",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_bytes",
        name="activations are kept and computed again",
        old="""\
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
""",
        new="""\
        def twice(*args, forward=unit.forward, unit=unit, **kwargs):
            unit.kept = forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        unit.forward = twice
""",
    ),
    # parts of a rule that are easily left out
    Mutant(
        problem="gradients",
        check="gradients_dtypes",
        name="a shard without any gradient on this rank is not reduced",
        old="""\
        flat = self.shard.new_zeros(self.size * self.length)
        for p, part in zip(self.params, self._parts(flat), strict=True):
            if p.grad is not None:
""",
        new="""\
        if all(p.grad is None for p in self.params):
            return
        flat = self.shard.new_zeros(self.size * self.length)
        for p, part in zip(self.params, self._parts(flat), strict=True):
            if p.grad is not None:
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_live",
        name="inputs by keyword are not looked at",
        old="for x in tree_leaves((args, kwargs)) if",
        new="for x in tree_leaves(args) if",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_subgroup",
        name="only floating-point tensors of the state dict come from the first rank",
        old="""\
        for tensor in [*module.parameters(), *module.buffers()]:
""",
        new="""\
        for tensor in [t for t in module.state_dict(keep_vars=True).values() if t.is_floating_point()]:
""",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_subgroup",
        name="what is received for a transposed parameter is dropped",
        old="""\
            with torch.no_grad():
                tensor.copy_(message)

""",
        new="""\

""",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_values",
        name="what was gathered ahead for a unit that is not called is never waited for",
        old="""\
        for flat in self._flat_shards():
            if flat.work is not None:  # gathered ahead for a unit that was not called
                flat.reshard()
""",
        new="",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_forward",
        name="of several dtypes the first is gathered ahead",
        old="""\
            for flat in self.units[i + 1]:
""",
        new="""\
            for flat in self.units[i + 1][:1]:
""",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_forward",
        name="nothing is gathered ahead where units stay gathered",
        old="if self.prefetch and i + 1 < self.root:",
        new="if self.prefetch and self.reshard_after_forward and i + 1 < self.root:",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_values",
        name="only float32 is cast",
        old="self.units[i].append(FlatShard(params, group, param_dtype))",
        new="self.units[i].append(FlatShard(params, group, param_dtype if params[0].dtype == torch.float32 else None))",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_inputs",
        name="inputs by keyword are not cast",
        old="args, kwargs = tree_map_only(Tensor, enter, (args, kwargs))",
        new="args = tree_map_only(Tensor, enter, args)",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="divides by the norm alone",
        old="max_norm / (norm.item() + 1e-6)",
        new="max_norm / norm.item()",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_bytes",
        name="only while training",
        old="""\
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
""",
        new="""\
        if unit.training:
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
""",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_bytes",
        name="the whole module is computed again at once",
        old="""\
    for unit in units:
        # Not the unit as a whole: hooks on it, such as FSDP's, stay outside and are called once.
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
""",
        new="""\
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="norms are added up over the default group",
        old="dist.all_reduce(total, group=self.group)",
        new="dist.all_reduce(total)",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_refused",
        name="names are not compared",
        old="""\
        if names.keys() != state.keys():
            raise ValueError(f"names that are not in both: {sorted(names.keys() ^ state.keys())}")
""",
        new="",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_refused",
        name="shapes are not compared",
        old="            if tensor.shape != state[name].shape:\n                raise ValueError",
        new="            if tensor.numel() != state[name].numel():\n                raise ValueError",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_outputs",
        name="a unit's backward begins when the gradients of all its outputs are there",
        old='lambda gradient: self.before_backward(i), mode="any")',
        new="lambda gradients: self.before_backward(i))",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_outputs",
        name="no gradient for the model's input",
        old="            return x.view_as(x)  # a tensor",
        new="            return x.detach() if i == self.root else x.view_as(x)  # a tensor",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_foreign",
        name="units of another model are taken",
        old="""\
        if not set(units) <= set(module.modules()):
            raise ValueError("a unit is not a submodule of the module")
        self.module""",
        new="        self.module",
    ),
    Mutant(
        problem="gradients",
        check="gradients_unused",
        name="gradients that are there, one after the other",
        old="""\
        for p, part in zip(self.params, self._parts(flat), strict=True):
            if p.grad is not None:
                part.copy_(p.grad)
                p.grad = None
""",
        new="""\
        there = [p.grad.flatten() for p in self.params if p.grad is not None]
        if there:
            flat[: sum(map(len, there))] = torch.cat(there)
        for p in self.params:
            p.grad = None
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_sharded",
        name="frozen shards are not among the parameters",
        old="""\
            for k, flat in enumerate(shards):
                yield f"{prefix}unit{i}.{k}", flat.shard
""",
        new="""\
            for k, flat in enumerate(shards):
                if flat.shard.requires_grad:
                    yield f"{prefix}unit{i}.{k}", flat.shard
""",
    ),
    Mutant(
        problem="gradients",
        check="gradients_dtypes",
        name="one name for all shards of a unit",
        old='yield f"{prefix}unit{i}.{k}", flat.shard',
        new='yield f"{prefix}unit{i}", flat.shard',
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_inputs",
        name="tensors in lists and dicts are not cast",
        old="args, kwargs = tree_map_only(Tensor, enter, (args, kwargs))",
        new="""\
args = tuple(enter(x) if isinstance(x, Tensor) else x for x in args)
        kwargs = {name: enter(x) if isinstance(x, Tensor) else x for name, x in kwargs.items()}""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="a shard without a gradient is not expected",
        old="gradients = [p.grad for p in self.parameters() if p.grad is not None]",
        new="gradients = [p.grad for p in self.parameters() if p.requires_grad]",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_held",
        name="full_state_dict leaves the units gathered",
        old="""\
            values.update(zip(flat.params, flat.gather_values(), strict=True))
""",
        new="""\
            values.update(zip(flat.params, flat.gather_values(), strict=True))
            flat.unshard()
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_held",
        name="after loading, a shard is a view of all",
        old="""\
        with torch.no_grad():
            self.shard.copy_(self._mine(flat))
""",
        new="""\
        flat = F.pad(flat, (0, self.size * self.length - len(flat)))
        self.shard.data = flat[self.rank * self.length : (self.rank + 1) * self.length]
""",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_values",
        name="the generator is left as it was when the unit was computed",
        old="""\
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
""",
        new="""\
        def computed(*args, inner=unit.forward, **kwargs):
            state = torch.get_rng_state()

            def once_more(*args, **kwargs):
                torch.set_rng_state(state)
                return inner(*args, **kwargs)

            return checkpoint(once_more, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        unit.forward = computed
""",
    ),
    Mutant(
        problem="checkpointing",
        check="checkpointing_foreign",
        name="units of another model are taken",
        old="""\
    if not set(units) <= set(module.modules()):
        raise ValueError("a unit is not a submodule of the module")
    for unit""",
        new="    for unit",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_values",
        name="what was gathered ahead in backward for a unit that is not in it stays under way",
        old="""\
        for flat in self._flat_shards():
            flat.reshard()  # gathered ahead, and not used
""",
        new="",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_live",
        name="inputs in lists and dicts are not looked at",
        old="for x in tree_leaves((args, kwargs)) if",
        new="for x in [*args, *kwargs.values()] if",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_shards",
        name="micro-batches are added up in bf16",
        old="else self.shard.grad + mine",
        new="else (self.shard.grad + mine).to(self.full.dtype).to(mine.dtype)",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_load",
        name="buffers are the tensors of the state that was loaded",
        old="tensor.copy_(state[name])",
        new="tensor.data = state[name]",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_traffic",
        name="with prefetch, units are freed after forward whatever was asked",
        old="        if self.reshard_after_forward or not outputs:",
        new="        if self.reshard_after_forward or self.prefetch or not outputs:",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_forward",
        name="nothing is gathered ahead under no_grad",
        old="        if self.prefetch and i + 1 < self.root:",
        new="        if self.prefetch and i + 1 < self.root and torch.is_grad_enabled():",
    ),
    Mutant(
        problem="prefetch",
        check="prefetch_live",
        name="three units are gathered ahead in backward",
        old="            for flat in self.units[i - 1]:\n                flat.start_unshard()\n",
        new="""\
            for j in range(max(0, i - 3), i):
                for flat in self.units[j]:
                    flat.start_unshard()
""",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_traffic",
        name="with param_dtype, units stay gathered after forward",
        old="        if self.reshard_after_forward or not outputs:",
        new="        if (self.reshard_after_forward and self.param_dtype is None) or not outputs:",
    ),
    Mutant(
        problem="mixed_precision",
        check="mixed_precision_resident",
        name="keeps a full fp32 copy beside what is gathered",
        old="        self.work, self.gathered = None, True\n",
        new="        self.work, self.gathered = None, True\n        self.copy = self.full.to(self.shard.dtype)\n",
    ),
    Mutant(
        problem="forward_backward",
        check="forward_backward_order",
        name="from the second step on, everything is gathered at the start of forward",
        old="        self.in_backward, self.end_is_known = set(), False\n",
        new="""\
        self.in_backward, self.end_is_known = set(), False
        if self.__dict__.get("warm"):
            for flat in self._flat_shards():
                flat.unshard()
                flat.reshard()
        self.warm = True
""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_refused",
        name="only the names and shapes of parameters are compared",
        old="""\
        names = self.module.state_dict(keep_vars=True)
        if names""",
        new="""\
        own = self.module.state_dict(keep_vars=True)
        names = {name: tensor for name, tensor in own.items() if isinstance(tensor, nn.Parameter)}
        state = {name: tensor for name, tensor in state.items() if name in names or name not in own}
        if names""",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_clip",
        name="the norm of the gradients of one dtype only",
        old="        for gradient in gradients:\n            total +=",
        new="        for gradient in [g for g in gradients if g.dtype == gradients[0].dtype]:\n            total +=",
    ),
    Mutant(
        problem="clip_and_save",
        check="clip_and_save_load",
        name="loads the part of its number among all ranks",
        old="            self.shard.copy_(self._mine(flat))\n",
        new="""\
            first = dist.get_rank() * self.length
            self.shard.copy_(F.pad(flat, (0, first + self.length))[first : first + self.length])
""",
    ),
    Rewrite(
        problem="clip_and_save",
        check="clip_and_save_refused",
        name="loads the units that it can before it refuses",
        source="""\
class FSDP(FSDP):
    def load_full_state_dict(self, state):
        names = self.module.state_dict(keep_vars=True)
        for flat in self._flat_shards():
            mine = [name for p in flat.params for name, tensor in names.items() if tensor is p]
            if all(name in state and state[name].shape == names[name].shape for name in mine):
                flat.load_values([next(state[n] for n in mine if names[n] is p) for p in flat.params])
        super().load_full_state_dict(state)
""",
    ),
    Rewrite(
        problem="forward_backward",
        check="forward_backward_live",
        name="each unit is freed one unit late in backward",
        source="""\
class FSDP(FSDP):
    late = ()

    def after_backward(self, i):
        if i not in self.in_backward:
            return
        self.in_backward.remove(i)
        for flat in self.units[i]:
            if flat.shard.requires_grad:
                flat.reduce_gradient()
        for flat in self.late:
            flat.reshard()
        self.late = [] if i == self.root else self.units[i]
""",
    ),
    Rewrite(
        problem="forward_backward",
        check="forward_backward_resident",
        name="with reshard_after_forward=False, units are never freed",
        source="""\
class FSDP(FSDP):
    def after_backward(self, i):
        if i in self.in_backward:
            self.in_backward.remove(i)
            for flat in self.units[i]:
                if flat.shard.requires_grad:
                    flat.reduce_gradient()
                if self.reshard_after_forward:
                    flat.reshard()

    def end_of_backward(self):
        self.end_is_known = False
        for i in sorted(self.in_backward):
            self.after_backward(i)
""",
    ),
    Rewrite(
        problem="prefetch",
        check="prefetch_forward",
        name="gathers ahead in the first step only",
        source="""\
class FSDP(FSDP):
    def end_of_backward(self):
        super().end_of_backward()
        self.prefetch = False
""",
    ),
    Rewrite(
        problem="prefetch",
        check="prefetch_subgroup",
        name="what is gathered ahead is gathered from all ranks",
        source="""\
class FSDP(FSDP):
    def before_forward(self, i, args, kwargs):
        if self.prefetch and i + 1 < self.root:
            for flat in self.units[i + 1]:
                flat.group, group = None, flat.group
                flat.start_unshard()
                flat.group = group
        return super().before_forward(i, args, kwargs)
""",
    ),
]

ALTERNATIVES = [
    Alternative(
        problem="flat_shard",
        name="a new buffer in every unshard, gathered into its parts; the parameters are empty meanwhile",
        function="FlatShard",
        source='''\
class FlatShard:
    """The list form of all_gather; nothing is kept but the shard."""

    def __init__(self, params, group=None, param_dtype=None):
        self.params, self.group = [], group
        for p in params:
            if not any(p is q for q in self.params):
                self.params.append(p)
        first = self.params[0]
        if any(p.dtype != first.dtype for p in self.params):
            raise ValueError("several dtypes")
        self.shapes = [p.shape for p in self.params]
        n, total = dist.get_world_size(group), sum(p.numel() for p in self.params)
        padded = torch.zeros(-(-total // n) * n, dtype=first.dtype)
        start = 0
        for p in self.params:
            padded[start : start + p.numel()] = p.detach().reshape(-1)
            start += p.numel()
        self.shard = nn.Parameter(padded.chunk(n)[dist.get_rank(group)].clone())
        self.reshard()

    def unshard(self):
        n = dist.get_world_size(self.group)
        full = self.shard.new_empty(n * self.shard.numel())
        dist.all_gather(list(full.chunk(n)), self.shard.detach(), self.group)
        start = 0
        for p, shape in zip(self.params, self.shapes):
            p.data = full[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def reshard(self):
        for p in self.params:
            p.data = torch.empty(0, dtype=p.dtype)
''',
    ),
    Alternative(
        problem="forward_backward",
        name="the root stays gathered from forward to backward",
        function="FSDP",
        source='''\
class FSDP(FSDP):
    """As PyTorch's own does."""

    def after_forward(self, i, output):
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if i == self.root and outputs:
            register_multi_grad_hook(outputs, lambda gradient: self.before_backward(i), mode="any")
            return
        super().after_forward(i, output)
''',
    ),
    Alternative(
        problem="forward_backward",
        name="wraps each unit's forward, without module hooks",
        function="FSDP",
        source='''\
class FSDP(FSDP):
    """The hooks of the class above are taken off again."""

    def __init__(self, module, units, **settings):
        super().__init__(module, units, **settings)
        for i, unit in enumerate(units):
            unit._forward_pre_hooks.clear()
            unit._forward_hooks.clear()
            unit.forward = functools.partial(self.around, i, unit.forward)

    def around(self, i, forward, *args, **kwargs):
        args, kwargs = self.before_forward(i, args, kwargs)
        output = forward(*args, **kwargs)
        self.after_forward(i, output)
        return output
''',
    ),
    Alternative(
        problem="forward_backward",
        name="a unit's reduce_scatter is waited for when the next one begins",
        function="FSDP",
        source='''\
class FSDP(FSDP):
    """One message of gradients is under way while the next unit computes."""

    flying = ()

    def land(self):
        for flat, full, mine, work in self.flying:
            work.wait()
            mine /= dist.get_world_size(self.group)
            flat.shard.grad = mine if flat.shard.grad is None else flat.shard.grad.add_(mine)
        self.flying = ()

    def after_backward(self, i):
        if i not in self.in_backward:
            return
        self.in_backward.remove(i)
        self.land()
        for flat in self.units[i]:
            if flat.shard.requires_grad:
                full = flat.shard.new_zeros(flat.size * flat.length)
                for p, part in zip(flat.params, flat._parts(full)):
                    if p.grad is not None:
                        part.copy_(p.grad)
                    p.grad = None
                mine = torch.empty_like(flat.shard)
                work = reduce_scatter_single(mine, full, group=self.group, async_op=True)
                self.flying = (*self.flying, (flat, full, mine, work))
            flat.reshard()

    def end_of_backward(self):
        super().end_of_backward()
        self.land()
''',
    ),
    Alternative(
        problem="gradients",
        name="an autograd function tells the end of a unit's backward",
        function="FSDP",
        source='''\
class Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.call()
        return (None, *gradients)


class FSDP(FSDP):
    """No hooks on inputs."""

    def before_forward(self, i, args, kwargs):
        for flat in self.units[i]:
            flat.unshard()
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        if not inputs or not torch.is_grad_enabled():
            return args, kwargs
        passed = dict(zip(inputs, Border.apply(lambda: self.after_backward(i), *inputs)))
        return tree_map_only(Tensor, lambda x: passed.get(x, x), (args, kwargs))
''',
    ),
    Alternative(
        problem="mixed_precision",
        name="gradients are reduced in bf16, and added up in fp32",
        function="FlatShard",
        source='''\
class FlatShard(FlatShard):
    """Half the bytes on the way back, too."""

    def reduce_gradient(self):
        flat = torch.zeros(self.size * self.length, dtype=self.full.dtype)
        for p, part in zip(self.params, self._parts(flat)):
            if p.grad is not None:
                part.copy_(p.grad)
                p.grad = None
        mine = flat.new_empty(self.length)
        reduce_scatter_single(mine, flat, group=self.group)
        mine = mine.to(self.shard.dtype) / self.size
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += mine
''',
    ),
    Alternative(
        problem="prefetch",
        name="the next unit is the one that came next in the last forward, or in the list",
        function="FSDP",
        source='''\
class FSDP(FSDP):
    """Starts before it waits for its own unit, where that one was started before."""

    def before_forward(self, i, args, kwargs):
        if self.prefetch and i + 1 < self.root:
            for flat in self.units[i]:
                flat.start_unshard()
            for flat in self.units[i + 1]:
                flat.start_unshard()
        return super().before_forward(i, args, kwargs)
''',
    ),
    Alternative(
        problem="clip_and_save",
        name="norms by torch.linalg, a state by names, loaded through one flat tensor",
        function="FSDP",
        source='''\
class FSDP(FSDP):
    """Other ways through the same shards."""

    def clip_grad_norm_(self, max_norm):
        norms = [torch.linalg.vector_norm(p.grad).float() for p in self.parameters() if p.grad is not None]
        total = torch.linalg.vector_norm(torch.stack(norms)).double().square().reshape(1)
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        if norm + 1e-6 > max_norm:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad = p.grad * (max_norm / (norm + 1e-6)).to(p.dtype)
        return norm

    def full_state_dict(self):
        state = {}
        for flat in self._flat_shards():
            parts = [torch.empty_like(flat.shard) for _ in range(flat.size)]
            dist.all_gather(parts, flat.shard.detach(), self.group)
            values = flat._parts(torch.cat(parts))
            for name, p in self.module.named_parameters(remove_duplicate=False):
                for q, value in zip(flat.params, values):
                    if p is q:
                        state[name] = value.clone()
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if name not in state:
                state[name] = tensor.clone()
        return state

    def load_full_state_dict(self, state):
        own = self.module.state_dict()
        if set(own) ^ set(state) or any(own[name].shape != state[name].shape for name in own):
            raise ValueError("not this module's state")
        by_id = {id(p): name for name, p in self.module.named_parameters(remove_duplicate=False)}
        for flat in self._flat_shards():
            padded = flat.shard.new_zeros(flat.size * flat.length)
            for p, part in zip(flat.params, flat._parts(padded)):
                part.copy_(state[by_id[id(p)]])
            flat.shard.data.copy_(padded.chunk(flat.size)[flat.rank])
        for name, buffer in self.module.named_buffers():
            if name in state:
                buffer.copy_(state[name])
''',
    ),
    Alternative(
        problem="checkpointing",
        name="reentrant checkpoints",
        function="checkpoint_units",
        source='''\
def checkpoint_units(module, units):
    """The older kind: backward in backward."""
    if any(unit not in list(module.modules()) for unit in units):
        raise ValueError("not the module's")
    for unit in units:

        def forward(*args, inner=unit.forward, **kwargs):
            return checkpoint(lambda *xs: inner(*xs, **kwargs), *args, use_reentrant=True)

        unit.forward = forward
''',
    ),
]
