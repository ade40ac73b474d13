"""Module 04: wrong and unusual ways to shard a model.

What a mutant gets wrong is said in its name. Most of them train, and many are right in a step of one forward and one
backward over units that divide evenly, whose parameters are all used and trained.
"""

from tests.mutants import Alternative, Mutant

GATHER = "        self.work = all_gather_single(self.full, message, self.group, async_op=True)\n"
RESIZE = "        self.full.untyped_storage().resize_(0)\n"
MINE = "        return F.pad(part, (0, self.length - len(part))).clone()\n"
PARTS = "            p.data = part\n"
SHARD = "        self.shard = nn.Parameter(self._mine(flat), any(p.requires_grad for p in self.params))\n"
ADD = "        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine\n"
COPY_GRADIENT = """\
            if p.grad is not None:
                part.copy_(p.grad)
                p.grad = None
"""
SCATTER = """\
        mine = torch.empty_like(self.shard)
        reduce_scatter_single(mine, flat, group=self.group)
"""
BROADCAST = "        for tensor in [*module.parameters(), *module.buffers()]:\n"
HOME = "            home = places[0] if len(places) == 1 else self.root\n"
KINDS = "            kinds.setdefault((home, p.dtype, p.requires_grad), []).append(p)\n"
RESET = """\
        for flat in self._flat_shards():
            flat.reshard()  # what a forward without a backward has left gathered is of an earlier step
"""
LEFT = """\
            if flat.work is not None:  # gathered ahead for a unit that was not called
                flat.reshard()
"""
AHEAD = """\
        if self.prefetch and i + 1 < self.root:
            for flat in self.units[i + 1]:
                flat.start_unshard()
"""
BACK_AHEAD = """\
        if self.prefetch and 0 < i < self.root:
            for flat in self.units[i - 1]:
                flat.start_unshard()
"""
CAST = "            if self.param_dtype is not None and x.is_floating_point():\n"
FREE = "        if self.reshard_after_forward or not outputs:\n"
BEFORE_BACKWARD = """\
        self.in_backward.add(i)
        for flat in self.units[i]:
            flat.unshard()
"""
DONE = """\
        for flat in self.units[i]:
            if flat.shard.requires_grad:
                flat.reduce_gradient()
            flat.reshard()
"""
END = """\
        for i in sorted(self.in_backward):
            self.after_backward(i)
"""
TOTAL = "        dist.all_reduce(total, group=self.group)\n"
STATE = "        return {name: values.get(tensor, tensor).detach().clone() for name, tensor in names.items()}\n"
CHECKPOINT = "        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)\n"
LOAD = "            self.shard.copy_(self._mine(flat))\n"

MUTANTS = [
    # flat_shard
    Mutant("flat_shard", "the shard is a view, which keeps the full tensor", MINE,
           "        return part if len(part) == self.length else F.pad(part, (0, self.length - len(part)))\n"),
    Mutant("flat_shard", "the parameters keep their own memory, too", RESIZE,
           RESIZE + "        self.copies = [torch.empty(p.shape, dtype=p.dtype).fill_(0) for p in self.params]\n"),
    Mutant("flat_shard", "reshard only remembers that it was called", RESIZE, ""),
    Mutant("flat_shard", "parameters are copies, not views", "        self.work, self.gathered = None, True\n",
           "        self.work, self.gathered = None, True\n"
           "        for p, part in zip(self.params, self._parts(self.full), strict=True):\n"
           "            p.data = part.clone()\n"),
    Mutant("flat_shard", "elements that do not divide are left out", "self.length = math.ceil(len(flat) / self.size)",
           "self.length = max(len(flat) // self.size, 1)"),
    Mutant("flat_shard", "one row too many on every rank", "self.length = math.ceil(len(flat) / self.size)",
           "self.length = len(flat) // self.size + 1"),
    Mutant("flat_shard", "the shard of the global rank, in a group too", "dist.get_rank(group), dist",
           "dist.get_rank(), dist"),
    Mutant("flat_shard", "every world_size-th element", MINE,
           "        return F.pad(flat, (0, self.length * self.size - len(flat)))[self.rank :: self.size].clone()\n"),
    Mutant("flat_shard", "a parameter that is given twice is there twice",
           "        self.params = list(dict.fromkeys(params))\n", "        self.params = list(params)\n"),
    Mutant("flat_shard", "several dtypes are promoted to the widest", "        if len({p.dtype for p in self.params}) > 1:\n",
           "        if False:\n"),
    Mutant("flat_shard", "always float32", "        flat = torch.cat([p.detach().flatten() for p in self.params])\n"
           "        self.length",
           "        flat = torch.cat([p.detach().float().flatten() for p in self.params])\n        self.length"),
    Mutant("flat_shard", "one all_gather for each parameter's worth", GATHER,
           "        pieces = [torch.empty_like(message) for _ in range(self.size)]\n"
           "        dist.all_gather(pieces, message, self.group)\n"
           "        dist.all_gather(pieces, message, self.group)\n"
           "        self.full.copy_(torch.cat(pieces))\n        self.work = None\n"),
    Mutant("flat_shard", "unshard does not see that the shard has changed", "        message = self.shard.detach().to",
           "        if not hasattr(self, 'first'):\n            self.first = self.shard.detach().clone()\n"
           "        message = self.first.to"),
    Mutant("flat_shard", "the shard is a plain tensor", SHARD, "        self.shard = self._mine(flat)\n"),
    # forward_backward
    Mutant("forward_backward", "no unit is sharded: its class never matches", HOME,
           HOME + "            if type(units[0]).__name__ != 'TransformerBlock':\n                continue\n"),
    Mutant("forward_backward", "all units are one", HOME, "            home = self.root\n"),
    Mutant("forward_backward", "all parameters are in the first unit", HOME, "            home = 0\n"),
    Mutant("forward_backward", "never frees after forward", FREE, "        if not outputs:\n"),
    Mutant("forward_backward", "frees after forward whatever is asked", FREE, "        if True:\n"),
    Mutant("forward_backward", "frees nothing at all until the next forward", RESIZE,
           "        if self.shard.grad is None and not torch.is_grad_enabled():\n    " + RESIZE),
    Mutant("forward_backward", "does not free after backward", DONE, DONE.replace("            flat.reshard()\n", "")),
    Mutant("forward_backward", "gradients are added up, not averaged", "        mine /= self.size\n", ""),
    Mutant("forward_backward", "averaged over the default group", "        mine /= self.size\n",
           "        mine /= dist.get_world_size()\n"),
    Mutant("forward_backward", "all_reduce and a slice of it", SCATTER,
           "        dist.all_reduce(flat, group=self.group)\n"
           "        mine = flat[self.rank * self.length : (self.rank + 1) * self.length].clone()\n"),
    Mutant("forward_backward", "all_reduce and a view of it: full gradients stay", SCATTER,
           "        dist.all_reduce(flat, group=self.group)\n"
           "        mine = flat[self.rank * self.length : (self.rank + 1) * self.length]\n"),
    Mutant("forward_backward", "keeps full gradients", COPY_GRADIENT,
           COPY_GRADIENT.replace("                p.grad = None\n", "                self.kept = flat\n                p.grad = None\n")),
    Mutant("forward_backward", "does not take the first rank's weights", "            dist.broadcast(message, group=group, group_src=0)\n",
           ""),
    Mutant("forward_backward", "takes the weights of rank 0, in a group too", "dist.broadcast(message, group=group, group_src=0)",
           "dist.broadcast(message, group=group, group_src=-1 % dist.get_world_size(group))"),
    Mutant("forward_backward", "buffers stay each rank's own", BROADCAST, "        for tensor in module.parameters():\n"),
    Mutant("forward_backward", "an old value of a forward without a backward is used", RESET, ""),
    Mutant("forward_backward", "the last shard's gradient is lost where it is padded", "        mine /= self.size\n",
           "        mine /= self.size\n        if self.rank == self.size - 1 and len(flat) > sum(p.numel() for p in self.params):\n"
           "            mine.zero_()\n"),
    Mutant("forward_backward", "reduces before the unit's backward has come to its end", BEFORE_BACKWARD,
           BEFORE_BACKWARD + "        for flat in self.units[i]:\n            if flat.shard.requires_grad:\n"
           "                flat.reduce_gradient()\n"),
    Mutant("forward_backward", "the gradients of the first unit are forgotten", END, "        self.in_backward.clear()\n"),
    Mutant("forward_backward", "all is reduced when backward has ended", "            register_multi_grad_hook(inputs, lambda gradients: self.after_backward(i))\n",
           "            pass\n"),
    Mutant("forward_backward", "a unit is done after its first use's backward", "        self.in_backward.remove(i)\n",
           "        self.in_backward.remove(i)\n        self.done = getattr(self, 'done', {})\n"
           "        if self.done.get(i) == len(self.in_backward):\n            return\n        self.done[i] = len(self.in_backward)\n"),
    Mutant("forward_backward", "nothing is waited for", "            self.work.wait()\n        self.work, self.gathered = None, True\n",
           "            pass\n        self.work, self.gathered = None, True\n"),
    Mutant("forward_backward", "wraps the units in PyTorch's own", BROADCAST,
           "        from torch.distributed.fsdp import fully_shard\n\n        for unit in units:\n            fully_shard(unit)\n"
           + BROADCAST),
    # gradients
    Mutant("gradients", "the last micro-batch replaces those before", ADD, "        self.shard.grad = mine\n"),
    Mutant("gradients", "parameters() are the module's own", "                yield f\"{prefix}unit{i}.{k}\", flat.shard\n",
           "                yield from [(f\"{prefix}{i}.{k}\", flat.shard), *self.module.named_parameters(f\"m{i}{k}\")]\n"),
    Mutant("gradients", "a frozen weight is in one shard with the others", KINDS,
           "            kinds.setdefault((home, p.dtype), []).append(p)\n"),
    Mutant("gradients", "a frozen weight gets a gradient of zeros", "any(p.requires_grad for p in self.params))\n", "True)\n"),
    Mutant("gradients", "a unit with a frozen weight is not trained at all", KINDS + "        self.units",
           "            kinds.setdefault((home, p.dtype), []).append(p)\n"
           "        for params in kinds.values():\n            if not all(p.requires_grad for p in params):\n"
           "                for p in params:\n                    p.requires_grad_(False)\n        self.units"),
    Mutant("gradients", "an unused parameter keeps its unit from being reduced", DONE,
           DONE.replace("if flat.shard.requires_grad:", "if flat.shard.requires_grad and all(p.grad is not None for p in flat.params):")),
    Mutant("gradients", "ranks without a gradient do not take part", DONE,
           DONE.replace("if flat.shard.requires_grad:", "if flat.shard.requires_grad and flat.params[-1].grad is not None:")),
    Mutant("gradients", "a shared parameter belongs to the last unit that has it, and is gathered with it only", HOME,
           "            home = places[-1] if places else self.root\n"),
    Mutant("gradients", "gradients of all dtypes in float32", "        flat = self.shard.new_zeros(self.size * self.length)\n",
           "        flat = self.shard.new_zeros(self.size * self.length, dtype=torch.float32)\n"),
    Mutant("gradients", "one dtype for a unit", KINDS + "        self.units",
           "            p.data = p.data.to(next(module.parameters()).dtype)\n" + KINDS + "        self.units"),
    # prefetch
    Mutant("prefetch", "nothing is gathered ahead", AHEAD, ""),
    Mutant("prefetch", "nothing is gathered ahead in backward", BACK_AHEAD, ""),
    Mutant("prefetch", "in backward, the next unit", BACK_AHEAD,
           BACK_AHEAD.replace("0 < i < self.root", "i + 1 < self.root").replace("i - 1", "i + 1")),
    Mutant("prefetch", "gathers ahead and waits for it", AHEAD, AHEAD.replace("start_unshard", "unshard")),
    Mutant("prefetch", "gathers everything ahead", AHEAD,
           "        if self.prefetch:\n            for flat in self._flat_shards():\n                flat.start_unshard()\n"),
    Mutant("prefetch", "what was gathered ahead and not used stays", RESET, ""),
    Mutant("prefetch", "what was gathered ahead is not waited for", LEFT,
           "            flat.work = None\n"),
    # mixed_precision
    Mutant("mixed_precision", "the masters are bf16", SHARD,
           "        self.shard = nn.Parameter(self._mine(flat).to(param_dtype), any(p.requires_grad for p in self.params))\n"),
    Mutant("mixed_precision", "the masters are rounded to bf16", "        message = self.shard.detach().to(self.full.dtype)\n",
           "        message = self.shard.detach().to(self.full.dtype)\n        self.shard.data = message.to(self.shard.dtype)\n"),
    Mutant("mixed_precision", "gathers fp32 and casts afterwards", GATHER,
           "        wide = self.shard.new_empty(len(self.full))\n"
           "        all_gather_single(wide, self.shard.detach(), self.group)\n        self.full.copy_(wide)\n"),
    Mutant("mixed_precision", "computes in fp32", "dtype=param_dtype)\n        self.nbytes", "dtype=None)\n        self.nbytes"),
    Mutant("mixed_precision", "does not cast inputs", CAST, "            if False:\n"),
    Mutant("mixed_precision", "casts whole numbers, too", CAST, "            if self.param_dtype is not None:\n"),
    Mutant("mixed_precision", "casts buffers, too", BROADCAST,
           "        for part in module.modules():\n            for name, b in list(part.named_buffers(recurse=False)):\n"
           "                if param_dtype is not None:\n                    setattr(part, name, b.to(param_dtype))\n" + BROADCAST),
    Mutant("mixed_precision", "gradients stay bf16", ADD,
           "        self.shard.grad = mine.to(self.full.dtype).to(mine.dtype).mul(0 if self.full.dtype == torch.bfloat16 else 1)\n"),
    # clip_and_save
    Mutant("clip_and_save", "the norm of this rank's shards", TOTAL, ""),
    Mutant("clip_and_save", "norms are added up, not squares", TOTAL,
           "        total = total.sqrt()\n        dist.all_reduce(total, group=self.group)\n        total = total.square()\n"),
    Mutant("clip_and_save", "the norm of each shard by itself", "            gradient *= min(1.0, max_norm / (norm.item() + 1e-6))\n",
           "            gradient *= min(1.0, max_norm / (gradient.norm().item() + 1e-6))\n"),
    Mutant("clip_and_save", "scales small gradients up", "min(1.0, max_norm / (norm.item() + 1e-6))",
           "max_norm / (norm.item() + 1e-6)"),
    Mutant("clip_and_save", "measures, and scales nothing", "            gradient *= min(1.0, max_norm / (norm.item() + 1e-6))\n",
           "            pass\n"),
    Mutant("clip_and_save", "the state on the first rank only", STATE,
           STATE.replace("return ", "return {} if dist.get_rank(self.group) else ")),
    Mutant("clip_and_save", "a tied weight by one of its names", STATE,
           "        seen = set()\n        names = {n: t for n, t in names.items() if not (id(t) in seen or seen.add(id(t)))}\n" + STATE),
    Mutant("clip_and_save", "no buffers in the state", STATE,
           STATE.replace(" in names.items()}", " in names.items() if tensor in values}")),
    Mutant("clip_and_save", "buffers that are not saved, too", STATE,
           "        names = dict(self.module.named_buffers()) | names\n" + STATE),
    Mutant("clip_and_save", "the state is rounded to bf16", "        all_gather_single(flat, self.shard.detach(), self.group)\n        return",
           "        all_gather_single(flat, self.shard.detach(), self.group)\n        flat = flat.to(self.full.dtype).to(flat.dtype)\n        return"),
    Mutant("clip_and_save", "loads the first part on every rank", LOAD,
           "            self.shard.copy_(F.pad(flat, (0, self.length))[: self.length])\n"),
    Mutant("clip_and_save", "loads into new shards, which no optimizer knows", "        with torch.no_grad():\n" + LOAD,
           "        self.shard = nn.Parameter(self._mine(flat), self.shard.requires_grad)\n"),
    Mutant("clip_and_save", "buffers are not loaded", "                    tensor.copy_(state[name])\n", "                    pass\n"),
    # checkpointing
    Mutant("checkpointing", "does nothing", CHECKPOINT, "        pass\n"),
    Mutant("checkpointing", "only the first unit", "    for unit in units:\n        # Not the unit", "    for unit in units[:1]:\n        # Not the unit"),
    Mutant("checkpointing", "draws other random numbers", "use_reentrant=False)\n", "use_reentrant=False, preserve_rng_state=False)\n"),
    Mutant("checkpointing", "the whole model at once, kept until the end", "    for unit in units:\n        # Not the unit",
           "    for unit in [p for u in units for p in u.children()]:\n        # Not the unit"),
    Mutant("checkpointing", "units are replaced by wrappers, with other names", CHECKPOINT,
           "        class Wrapped(nn.Module):\n            def __init__(self, inner):\n                super().__init__()\n"
           "                self.inner = inner\n\n            def forward(self, *args, **kwargs):\n"
           "                return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)\n\n"
           "        for parent in list(module.modules()):\n            for name, child in list(parent.named_children()):\n"
           "                if child is unit:\n                    setattr(parent, name, Wrapped(unit))\n"),
    Mutant("checkpointing", "activations are kept and computed again", CHECKPOINT,
           "        def twice(*args, forward=unit.forward, unit=unit, **kwargs):\n            unit.kept = forward(*args, **kwargs)\n"
           "            return checkpoint(forward, *args, use_reentrant=False, **kwargs)\n\n        unit.forward = twice\n"),
]  # fmt: skip

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
        if norm > max_norm:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad = p.grad * (max_norm / norm).to(p.dtype)
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
    for unit in units:

        def forward(*args, inner=unit.forward, **kwargs):
            return checkpoint(lambda *xs: inner(*xs, **kwargs), *args, use_reentrant=True)

        unit.forward = forward
''',
    ),
]
