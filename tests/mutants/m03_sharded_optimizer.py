"""Module 03: wrong and unusual sharded optimizers.

What a mutant gets wrong is said in its name. Most are right for one group of one dtype, with gradients on all ranks and
a constant learning rate; many are right on 2 ranks of the default group.
"""

from tests.mutants import Alternative, Mutant

RANKS = """\
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.owner: dict[Tensor, int] = {}
"""
CHOOSE = "        owners[i] = shares.index(min(shares))\n"
AVERAGE = """\
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            message = (gradient / self.world_size).contiguous()
            dist.reduce(message, group_dst=self.owner[p], group=self.group)
            if self.owner[p] == self.rank:
                p.grad = message
"""
USED = "        used = [p for p, ranks in zip(parameters, has.tolist(), strict=True) if ranks > 0]\n"
SHARE = """\
            message = p.detach().contiguous()
            dist.broadcast(message, group_src=self.owner[p], group=self.group)
            p.copy_(message)
"""
STEP = """\
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = self._average_gradients()
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            copy_options(outer, inner)
        self.inner.step()
        for p in used:
"""
INNER = """\
        self.inner = optimizer_cls([{"params": []}], **kwargs)  # an empty list of groups is refused, an empty group not
"""
OWN = """\
            number: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
"""
LOAD = """\
        state = {number: each for number, each in state_dict["state"].items() if number in mine}
        super().load_state_dict(state_dict | {"state": state})
        self.inner.state = self.state
"""
SCATTER = """\
            gradients = buffer.take_gradients().div_(self.world_size)
            shard = torch.empty_like(buffer.shard)
            reduce_scatter_flat(shard, gradients, group=self.group)
            buffer.set_gradient(shard)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            copy_options(outer, inner)
        self.inner.step()
"""
GATHER = """\
        for buffer in self.buffers:
            all_gather_flat(buffer.values, buffer.shard.clone(), group=self.group)
        return loss
"""
BUFFERS = """\
            FlatBuffer([(p, inner) for p, inner in trainable if p.dtype == dtype], self.rank, self.world_size)
            for dtype in dict.fromkeys(p.dtype for p, _ in trainable)
"""
TAKE = """\
        flat, start = torch.zeros_like(self.values), 0
        for p in self.parameters:
            if p.grad is not None:
                flat[start : start + p.numel()] = p.grad.flatten()
                p.grad = None
            start += p.numel()
        return flat
"""


def changed(problem: str, name: str, whole: str, *changes: str, check: str = "") -> Mutant:
    """A mutant in which parts of a longer text are changed: old, new, old, new, ..."""
    new = whole
    for a, b in zip(changes[::2], changes[1::2], strict=True):
        assert a in new, (name, a)
        new = new.replace(a, b)
    return Mutant(problem, name, whole, new, check)


MUTANTS = [
    # partition
    changed("partition", "in turn", CHOOSE, "shares.index(min(shares))", "i % world_size", check="partition_balance"),
    changed(
        "partition",
        "blocks with as many tensors each",
        CHOOSE,
        "shares.index(min(shares))",
        "i * world_size // len(numels)",
        check="partition_balance",
    ),
    changed("partition", "always the rank that has the most", CHOOSE, "min", "max", check="partition_balance"),
    changed(
        "partition",
        "each rank begins with itself",
        CHOOSE,
        "shares.index(min(shares))",
        "(shares.index(min(shares)) + dist.get_rank()) % world_size",
        check="partition_owners",
    ),
    changed("partition", "everything to rank 0", CHOOSE, "shares.index(min(shares))", "0", check="partition_balance"),
    Mutant(
        "partition",
        "in the order given, not the longest first",
        "    for i in sorted(range(len(numels)), key=lambda i: -numels[i]):\n",
        "    for i in range(len(numels)):\n",
        check="partition_balance",
    ),
    Mutant(
        "partition",
        "the shortest first",
        "    for i in sorted(range(len(numels)), key=lambda i: -numels[i]):\n",
        "    for i in sorted(range(len(numels)), key=lambda i: numels[i]):\n",
        check="partition_balance",
    ),
    Mutant(
        "partition",
        "chance decides among equals",
        "    for i in sorted(range(len(numels)), key=lambda i: -numels[i]):\n",
        "    import random\n\n    for i in sorted(range(len(numels)), key=lambda i: (-numels[i], random.random())):\n",
        check="partition_owners",
    ),
    Mutant(
        "partition",
        "sorts the caller's list",
        "    for i in sorted(range(len(numels)), key=lambda i: -numels[i]):\n",
        "    if isinstance(numels, list):\n        numels.sort(reverse=True)\n    for i in range(len(numels)):\n",
        check="partition_owners",
    ),
    Mutant(
        "partition",
        "owners in the order of sizes, not of parameters",
        "    return owners\n",
        "    return [owners[i] for i in sorted(range(len(numels)), key=lambda i: -numels[i])]\n",
        check="partition_balance",
    ),
    Mutant(
        "partition",
        "no owner for an empty parameter",
        "    return owners\n",
        "    return [owner for owner, n in zip(owners, numels) if n]\n",
        check="partition_owners",
    ),
    # sharded_optimizer
    Mutant(
        "sharded_optimizer",
        "not sharded: every rank updates and keeps everything",
        '        mine = {"params": [p for p in parameters if self.owner[p] == self.rank]}\n',
        '        mine = {"params": list(parameters)}\n',
        check="sharded_memory",
    ),
    Mutant(
        "sharded_optimizer",
        "only pretends: keeps the full state beside the inner optimizer",
        "        self.inner.add_param_group(mine)\n",
        """\
        self.inner.add_param_group(mine)
        self.hidden = [*getattr(self, "hidden", []), *[p.new_zeros(3, p.numel()) for p in parameters]]
""",
        check="sharded_memory",
    ),
    Mutant(
        "sharded_optimizer",
        "a second, full optimizer does the work",
        "        self.inner.step()\n        for p in used:\n",
        """\
        if not hasattr(self, "full"):
            options = {k: v for k, v in self.defaults.items() if k != "decoupled_weight_decay"}
            self.full = type(self.inner)(list(self.owner), **options)
        for p in self.owner:
            if self.owner[p] != self.rank and p.grad is None and p in used:
                p.grad = torch.zeros_like(p)
        self.full.step()
        for p in used:
""",
        check="sharded_memory",
    ),
    changed(
        "sharded_optimizer",
        "adds up",
        AVERAGE,
        "gradient / self.world_size",
        "gradient.clone()",
        check="sharded_values",
    ),
    changed(
        "sharded_optimizer",
        "divides by the size of the default group",
        AVERAGE,
        "self.world_size",
        "dist.get_world_size()",
        check="sharded_subgroup",
    ),
    changed(
        "sharded_optimizer",
        "divides twice",
        AVERAGE,
        "p.grad = message",
        "p.grad = message / self.world_size",
        check="sharded_values",
    ),
    changed(
        "sharded_optimizer",
        "divides by the number of ranks that have the gradient",
        AVERAGE,
        "gradient / self.world_size",
        "gradient / has[[q is p for q in parameters].index(True)]",
        check="sharded_missing",
    ),
    changed(
        "sharded_optimizer",
        "never averages",
        AVERAGE,
        "            dist.reduce(message, group_dst=self.owner[p], group=self.group)\n",
        "",
        "message = (gradient / self.world_size)",
        "message = gradient",
        check="sharded_values",
    ),
    changed(
        "sharded_optimizer",
        "sends gradients as they are, contiguous or not",
        AVERAGE,
        ".contiguous()",
        "",
        check="sharded_kinds",
    ),
    changed(
        "sharded_optimizer",
        "the owner's global rank as destination",
        AVERAGE,
        "group_dst",
        "dst",
        check="sharded_subgroup",
    ),
    changed(
        "sharded_optimizer",
        "a rank without the gradient does not take part",
        USED,
        "ranks > 0",
        "p.grad is not None",
        check="sharded_missing",
    ),
    changed(
        "sharded_optimizer",
        "zeros for what has no gradient anywhere: weight decay moves it",
        USED,
        "ranks > 0",
        "ranks >= 0",
        check="sharded_missing",
    ),
    changed(
        "sharded_optimizer",
        "only gradients that all ranks have",
        USED,
        "ranks > 0",
        "ranks == self.world_size",
        check="sharded_missing",
    ),
    changed(
        "sharded_optimizer",
        "updates without telling the others",
        SHARE,
        "            dist.broadcast(message, group_src=self.owner[p], group=self.group)\n",
        "",
        check="sharded_values",
    ),
    changed(
        "sharded_optimizer",
        "sends parameters as they are, contiguous or not",
        SHARE,
        ".contiguous()",
        "",
        check="sharded_kinds",
    ),
    changed(
        "sharded_optimizer",
        "does not copy back what arrives in a contiguous copy",
        SHARE,
        "            p.copy_(message)\n",
        "",
        check="sharded_kinds",
    ),
    changed(
        "sharded_optimizer", "the owner's global rank as source", SHARE, "group_src", "src", check="sharded_subgroup"
    ),
    changed("sharded_optimizer", "always from the first rank", SHARE, "self.owner[p]", "0", check="sharded_values"),
    changed(
        "sharded_optimizer",
        "never waits for the broadcasts",
        SHARE,
        "group=self.group)",
        "group=self.group, async_op=True)",
        check="sharded_values",
    ),
    changed(
        "sharded_optimizer",
        "owners by the global rank, in a subgroup too",
        RANKS,
        "dist.get_rank(group)",
        "dist.get_rank()",
        check="sharded_subgroup",
    ),
    changed(
        "sharded_optimizer",
        "shares for the default group",
        RANKS,
        "dist.get_world_size(group)",
        "dist.get_world_size()",
        check="sharded_subgroup",
    ),
    changed(
        "sharded_optimizer",
        "averages before the closure computes",
        STEP,
        "        used = self._average_gradients()\n",
        "",
        "        loss = None\n",
        "        used = self._average_gradients()\n        loss = None\n",
        check="sharded_closure",
    ),
    changed(
        "sharded_optimizer",
        "the closure runs without gradients",
        STEP,
        "torch.enable_grad()",
        "torch.no_grad()",
        check="sharded_closure",
    ),
    changed(
        "sharded_optimizer",
        "the closure runs twice",
        STEP,
        "self.inner.step()",
        "self.inner.step(closure)",
        check="sharded_closure",
    ),
    changed(
        "sharded_optimizer",
        "a rank that owns nothing has nothing to do",
        STEP,
        "        loss = None\n",
        "        loss = None\n        if not any(g['params'] for g in self.inner.param_groups):\n"
        "            return loss\n",
        check="sharded_few",
    ),
    changed(
        "sharded_optimizer",
        "the inner optimizer is handed the closure, after averaging",
        STEP,
        "        if closure is not None:\n            with torch.enable_grad():\n                loss = closure()\n",
        "",
        "self.inner.step()",
        "loss = self.inner.step(closure)",
        check="sharded_closure",
    ),
    Mutant(
        "sharded_optimizer",
        "drops the closure's loss",
        "            p.copy_(message)\n        return loss\n",
        "            p.copy_(message)\n        return None\n",
        check="sharded_closure",
    ),
    Mutant(
        "sharded_optimizer",
        "zero_grad for its own parameters only",
        "    def _average_gradients(self)",
        """\
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def _average_gradients(self)""",
        check="sharded_add_group",
    ),
    Mutant(
        "sharded_optimizer",
        "a later group is never updated",
        "        self.inner.add_param_group(mine)\n",
        """\
        if not self.inner.param_groups:
            self.inner.add_param_group(mine)
        else:
            self.inner.add_param_group(mine | {"params": []})
""",
        check="sharded_add_group",
    ),
    Mutant(
        "sharded_optimizer",
        "refuses a rank that owns nothing",
        "        self.inner.add_param_group(mine)\n",
        """\
        if not mine["params"]:
            raise ValueError("optimizer got an empty parameter list")
        self.inner.add_param_group(mine)
""",
        check="sharded_few",
    ),
    Mutant(
        "sharded_optimizer",
        "PyTorch's own",
        INNER,
        "        from torch.distributed.optim import ZeroRedundancyOptimizer\n\n"
        "        ZeroRedundancyOptimizer([torch.zeros(1)], optimizer_cls, **kwargs)\n" + INNER,
        check="sharded_values",
    ),
    # schedules_and_groups
    changed(
        "schedules_and_groups",
        "what is set at the wrapper never arrives",
        STEP,
        "            copy_options(outer, inner)\n",
        "            pass\n",
        check="groups_schedules",
    ),
    changed(
        "schedules_and_groups",
        "only the learning rate arrives",
        STEP,
        "copy_options(outer, inner)",
        "inner['lr'] = outer['lr']",
        check="groups_schedules",
    ),
    changed(
        "schedules_and_groups",
        "only the first group's options arrive",
        STEP,
        "copy_options(outer, inner)",
        "copy_options(self.param_groups[0], inner)",
        check="groups_options",
    ),
    changed(
        "schedules_and_groups",
        "the other way round: the inner options overwrite the wrapper's",
        STEP,
        "copy_options(outer, inner)",
        "copy_options(inner, outer)",
        check="groups_schedules",
    ),
    changed(
        "schedules_and_groups",
        "scales the learning rate with the number of ranks",
        STEP,
        "copy_options(outer, inner)\n",
        "copy_options(outer, inner)\n            inner['lr'] *= self.world_size\n",
        check="groups_options",
    ),
    changed(
        "schedules_and_groups",
        "a change arrives one step late",
        STEP,
        "        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):\n"
        "            copy_options(outer, inner)\n"
        "        self.inner.step()\n",
        "        self.inner.step()\n"
        "        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):\n"
        "            copy_options(outer, inner)\n",
        check="groups_schedules",
    ),
    Mutant(
        "schedules_and_groups",
        "knows only the options that were passed, not the inner defaults",
        "        super().__init__(params, self.inner.defaults)  # adds the groups, one by one\n",
        "        super().__init__(params, kwargs)\n",
        check="groups_options",
    ),
    Mutant(
        "schedules_and_groups",
        "no defaults at all: a scheduler finds no lr",
        "        super().__init__(params, self.inner.defaults)  # adds the groups, one by one\n",
        "        super().__init__(params, {})\n",
        check="groups_options",
    ),
    Mutant(
        "schedules_and_groups",
        "uses up a generator before the base class sees it",
        "        super().add_param_group(param_group)  # makes",
        "        list(param_group['params'])\n        super().add_param_group(param_group)  # makes",
        check="groups_given",
    ),
    Mutant(
        "schedules_and_groups",
        "goes through params twice",
        INNER,
        "        params = (p for p in params)\n        assert len(list(params)) >= 0\n" + INNER,
        check="groups_options",
    ),
    Mutant(
        "schedules_and_groups",
        "the wrapper's groups have this rank's parameters only",
        "        self.inner.add_param_group(mine)\n",
        """\
        self.inner.add_param_group(mine)
        self.param_groups[-1]["params"] = mine["params"]
""",
        check="groups_options",
    ),
    Mutant(
        "schedules_and_groups",
        "one inner optimizer for the whole process",
        INNER,
        INNER.replace("self.inner = optimizer_cls", "self.inner = globals().setdefault('INNER', None) or optimizer_cls")
        + "        globals()['INNER'] = self.inner\n",
        check="groups_options",
    ),
    # state_dict
    Mutant(
        "state_dict",
        "each rank saves its own part",
        '        return mine | {"state": dict(sorted(everything.items()))}\n',
        '        return mine | {"state": own}\n',
        check="state_dict_format",
    ),
    Mutant(
        "state_dict",
        "the inner optimizer's own",
        '        return mine | {"state": dict(sorted(everything.items()))}\n',
        "        return self.inner.state_dict()\n",
        check="state_dict_format",
    ),
    Mutant(
        "state_dict",
        "the full state on the first rank only",
        '        return mine | {"state": dict(sorted(everything.items()))}\n',
        '        return mine | {"state": dict(sorted(everything.items())) if self.rank == 0 else {}}\n',
        check="state_dict_format",
    ),
    Mutant(
        "state_dict",
        "numbered in the order of the ranks",
        '        return mine | {"state": dict(sorted(everything.items()))}\n',
        '        return mine | {"state": dict(enumerate(everything.values()))}\n',
        check="state_dict_format",
    ),
    Mutant(
        "state_dict",
        "numbers as text",
        '        return mine | {"state": dict(sorted(everything.items()))}\n',
        '        return mine | {"state": {str(number): each for number, each in everything.items()}}\n',
        check="state_dict_format",
    ),
    Mutant(
        "state_dict",
        "the options of construction, not of now",
        '        return mine | {"state": dict(sorted(everything.items()))}\n',
        """\
        for saved in mine["param_groups"]:
            saved["lr"] = self.defaults["lr"]
        return mine | {"state": dict(sorted(everything.items()))}
""",
        check="state_dict_format",
    ),
    changed(
        "state_dict",
        "without the step counters",
        OWN,
        "in state.items()}",
        "in state.items() if key != 'step'}",
        check="state_dict_format",
    ),
    changed(
        "state_dict",
        "two moments only: amsgrad's third is lost",
        OWN,
        "in state.items()}",
        "in state.items() if 'max' not in key}",
        check="state_dict_format",
    ),
    changed(
        "state_dict",
        "a rank keeps the full state that it loads",
        LOAD,
        " if number in mine",
        "",
        check="state_dict_from_plain",
    ),
    changed(
        "state_dict",
        "what is loaded does not reach the inner optimizer",
        LOAD,
        "        self.inner.state = self.state\n",
        "",
        check="state_dict_other_world",
    ),
    changed(
        "state_dict",
        "loads what was at the same place in turn",
        LOAD,
        "if number in mine",
        "if number % self.world_size == self.rank",
        check="state_dict_other_world",
    ),
    changed(
        "state_dict",
        "loads no options",
        LOAD,
        '{"state": state}',
        '{"state": state, "param_groups": super().state_dict()["param_groups"]}',
        check="state_dict_other_world",
    ),
    changed(
        "state_dict", "loads only options", LOAD, '{"state": state}', '{"state": {}}', check="state_dict_other_world"
    ),
    # zero2
    changed(
        "zero2",
        "an all-reduce, of which it takes its shard",
        SCATTER,
        "            reduce_scatter_flat(shard, gradients, group=self.group)\n",
        "            dist.all_reduce(gradients, group=self.group)\n"
        "            shard = gradients[buffer.first : buffer.first + len(shard)].clone()\n",
        check="zero2_traffic",
    ),
    changed("zero2", "adds up", SCATTER, ".div_(self.world_size)", "", check="zero2_values"),
    changed(
        "zero2",
        "divides by the size of the default group",
        SCATTER,
        "self.world_size",
        "dist.get_world_size()",
        check="zero2_closure",
    ),
    changed("zero2", "reduces over the default group", SCATTER, ", group=self.group", "", check="zero2_closure"),
    changed(
        "zero2",
        "keeps the flat gradients",
        SCATTER,
        "            buffer.set_gradient(shard)\n",
        "            buffer.set_gradient(shard)\n            buffer.gradients = gradients\n",
        check="zero2_memory",
    ),
    changed(
        "zero2",
        "what is set at the wrapper never arrives",
        SCATTER,
        "            copy_options(outer, inner)\n",
        "            pass\n",
        check="zero2_groups",
    ),
    changed(
        "zero2",
        "updates without telling the others",
        GATHER,
        "all_gather_flat(buffer.values, buffer.shard.clone(), group=self.group)",
        "pass",
        check="zero2_values",
    ),
    changed(
        "zero2",
        "a broadcast of each shard",
        GATHER,
        "all_gather_flat(buffer.values, buffer.shard.clone(), group=self.group)",
        "for r, part in enumerate(buffer.values.chunk(self.world_size)):\n"
        "                dist.broadcast(part, group_src=r, group=self.group)",
        check="zero2_traffic",
    ),
    changed("zero2", "drops the closure's loss", GATHER, "return loss", "return None", check="zero2_closure"),
    changed(
        "zero2",
        "gathers twice",
        GATHER,
        "        for buffer in self.buffers:\n",
        "        for buffer in self.buffers * 2:\n",
        check="zero2_traffic",
    ),
    changed(
        "zero2",
        "buffers for each group",
        BUFFERS,
        "if p.dtype == dtype]",
        "if p.dtype == dtype and inner is which]",
        "for dtype in dict.fromkeys(p.dtype for p, _ in trainable)",
        "for dtype in dict.fromkeys(p.dtype for p, _ in trainable)\n            "
        "for which in self.inner.param_groups\n            "
        "if any(p.dtype == dtype and inner is which for p, inner in trainable)",
        check="zero2_traffic",
    ),
    changed(
        "zero2",
        "the first group's options for all",
        BUFFERS,
        "[(p, inner) for p, inner",
        "[(p, trainable[0][1]) for p, inner",
        check="zero2_traffic",
    ),
    changed(
        "zero2", "keeps the parameters' gradients", TAKE, "                p.grad = None\n", "", check="zero2_memory"
    ),
    changed(
        "zero2",
        "gradients in another order than parameters",
        TAKE,
        "in self.parameters",
        "in reversed(self.parameters)",
        check="zero2_values",
    ),
    changed(
        "zero2",
        "a gradient that is missing is the last step's",
        TAKE,
        "        flat, start = torch.zeros_like(self.values), 0\n",
        "        if not hasattr(self, 'flat'):\n            self.flat = torch.zeros_like(self.values)\n"
        "        flat, start = self.flat.clone(), 0\n",
        "        return flat\n",
        "        self.flat = flat.clone()\n        return flat\n",
        check="zero2_memory",
    ),
    Mutant(
        "zero2",
        "no padding: what does not divide is left over",
        "        size = -(-total // world_size)\n",
        "        size = total // world_size\n",
        check="zero2_values",
    ),
    Mutant(
        "zero2",
        "pads to 64 elements for each rank",
        "        size = -(-total // world_size)\n",
        "        size = -(-total // (64 * world_size)) * 64\n",
        check="zero2_traffic",
    ),
    Mutant(
        "zero2",
        "frozen parameters decay",
        'trainable += [(p, inner) for p in outer["params"] if p.requires_grad]',
        'trainable += [(p, inner) for p in outer["params"]]',
        check="zero2_missing",
    ),
    Mutant(
        "zero2",
        "loads moments, not options",
        "            copy_options(inner, outer)\n",
        "            pass\n",
        check="zero2_state",
    ),
    Mutant(
        "zero2",
        "parts of two parameters, one gradient",
        "            part.grad = shard[place]\n",
        "            part.grad = shard[: part.numel()]\n",
        check="zero2_values",
    ),
    Mutant(
        "zero2",
        "not sharded: every rank has all moments",
        "# The ledger\n",
        """\
class ZeroOptimizer(ZeroOptimizer):
    def __init__(self, params, optimizer_cls, *, group=None, **kwargs):
        super().__init__(params, optimizer_cls, group=group, **kwargs)
        for inner in self.inner.param_groups:
            inner["params"] = []
        self.full = optimizer_cls([p for g in self.param_groups for p in g["params"]], **kwargs)

    @torch.no_grad()
    def step(self, closure=None):
        for buffer in self.buffers:
            gradients = buffer.take_gradients().div_(self.world_size)
            dist.all_reduce(gradients, group=self.group)
            start = 0
            for p in buffer.parameters:
                p.grad = gradients[start : start + p.numel()].view_as(p)
                start += p.numel()
        self.full.step()
        self.full.zero_grad()


# The ledger
""",
        check="zero2_traffic",
    ),
    # ledger
    Mutant(
        "ledger",
        "one stage too far",
        "        if stage >= first_stage:\n",
        "        if stage + 1 >= first_stage:\n",
        check="ledger_published",
    ),
    Mutant(
        "ledger",
        "one stage too few",
        "        if stage >= first_stage:\n",
        "        if stage > first_stage:\n",
        check="ledger_published",
    ),
    Mutant(
        "ledger", "no master copy", "(1, master_bytes + moment_bytes)", "(1, moment_bytes)", check="ledger_published"
    ),
    Mutant(
        "ledger",
        "stage 2 divides parameters, stage 3 gradients",
        "((3, param_bytes), (2, grad_bytes)",
        "((2, param_bytes), (3, grad_bytes)",
        check="ledger_others",
    ),
    Mutant(
        "ledger",
        "master copy on every rank",
        "(1, master_bytes + moment_bytes)",
        "(1, moment_bytes), (9, master_bytes)",
        check="ledger_published",
    ),
    Mutant(
        "ledger",
        "any stage will do",
        "    if stage not in (0, 1, 2, 3) or world_size < 1:\n",
        "    if world_size < 1:\n",
        check="ledger_others",
    ),
    Mutant(
        "ledger",
        "mixed precision whatever is passed",
        "(3, param_bytes), (2, grad_bytes), (1, master_bytes + moment_bytes)",
        "(3, 2), (2, 2), (1, 12)",
        check="ledger_others",
    ),
    # parts of a rule that are easily left out
    Mutant(
        "sharded_optimizer",
        "a gradient of zeros is no gradient",
        "has = torch.tensor([p.grad is not None for p in parameters]",
        "has = torch.tensor([p.grad is not None and bool(p.grad.any()) for p in parameters]",
        check="sharded_missing",
    ),
    Mutant(
        "sharded_optimizer",
        "a step without any gradient fails",
        """\
        for p in used:
            message = p.detach""",
        """\
        torch.stack([p.detach().sum() for p in used])
        for p in used:
            message = p.detach""",
        check="sharded_missing",
    ),
    Mutant(
        "sharded_optimizer",
        "what is frozen at construction stays so",
        "if self.owner[p] == self.rank]}",
        "if self.owner[p] == self.rank and p.requires_grad]}",
        check="sharded_missing",
    ),
    Mutant(
        "schedules_and_groups",
        "on one rank, the inner optimizer without its options",
        """\
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = self._average""",
        """\
        if self.world_size == 1:
            return self.inner.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used = self._average""",
        check="groups_schedules",
    ),
    Mutant(
        "state_dict",
        "the state of all ranks, in a group too",
        """\
        parts: list[dict] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(parts, own, group=self.group)
""",
        """\
        parts: list[dict] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, own)
""",
        check="state_dict_format",
    ),
    Mutant(
        "state_dict",
        "what was there before the load stays",
        """\
        self.inner.state = self.state
        ### END SOLUTION


# ZeRO-2""",
        """\
        self.inner.state.update(self.state)
        ### END SOLUTION


# ZeRO-2""",
        check="state_dict_refused",
    ),
    Mutant(
        "state_dict",
        "a state of other groups is taken",
        'super().load_state_dict(state_dict | {"state": state})',
        'super().load_state_dict(super().state_dict() | {"state": state})',
        check="state_dict_refused",
    ),
    Mutant(
        "state_dict",
        "the number of steps in the parameter's dtype",
        """\
        self.inner.state = self.state
        ### END SOLUTION


# ZeRO-2""",
        """\
        self.inner.state = self.state
        for p, each in self.state.items():
            each["step"] = each["step"].to(p.dtype) if "step" in each else None
        ### END SOLUTION


# ZeRO-2""",
        check="state_dict_refused",
    ),
    Mutant(
        "zero2",
        "a frozen parameter's dtype travels, too",
        'trainable += [(p, inner) for p in outer["params"] if p.requires_grad]',
        'trainable += [(p, inner) for p in outer["params"]]',
        check="zero2_traffic",
    ),
    Mutant(
        "zero2",
        "bf16 gradients are sent in float32",
        """\
            shard = torch.empty_like(buffer.shard)
            reduce_scatter_flat(shard, gradients, group=self.group)
""",
        """\
            gradients = gradients.float() if gradients.dtype == torch.bfloat16 else gradients
            shard = torch.empty_like(buffer.shard, dtype=gradients.dtype)
            reduce_scatter_flat(shard, gradients, group=self.group)
            shard = shard.to(buffer.shard.dtype)
""",
        check="zero2_traffic",
    ),
    Mutant(
        "zero2",
        "what was there before the load stays",
        """\
        self.inner.load_state_dict(state_dict)
        for""",
        """\
        before = dict(self.inner.state)
        self.inner.load_state_dict(state_dict)
        for p in before.keys() - self.inner.state.keys():
            self.inner.state[p] = before[p]
        for""",
        check="zero2_state",
    ),
    Mutant(
        "partition",
        "an empty parameter goes to a rank that is not there",
        """\
        owners[i] = shares.index(min(shares))
""",
        """\
        owners[i] = shares.index(min(shares)) if numels[i] or not any(numels) else world_size
""",
        check="partition_owners",
    ),
    Mutant(
        "sharded_optimizer",
        "owners in turn, not by partition_parameters",
        """\
        owners = partition_parameters([p.numel() for p in parameters], self.world_size)
""",
        """\
        owners = [i % self.world_size for i in range(len(parameters))]
""",
        check="sharded_memory",
    ),
    Mutant(
        "partition",
        "sorted, then dealt back and forth",
        """\
        owners[i] = shares.index(min(shares))
""",
        """\
        k = sum(1 for s in range(len(numels)) if (-numels[s], s) < (-numels[i], i))
        owners[i] = k % world_size if k // world_size % 2 == 0 else world_size - 1 - k % world_size
""",
        check="partition_balance",
    ),
    Mutant(
        "zero2",
        "the first buffer is always there",
        """\
        for buffer in self.buffers:
            all_gather_flat""",
        """\
        self.buffers[0].shard.add_(0)
        for buffer in self.buffers:
            all_gather_flat""",
        check="zero2_missing",
    ),
    Mutant(
        "ledger",
        "the world size is looked at where something is divided",
        """\
    if stage not in (0, 1, 2, 3) or world_size < 1:
""",
        """\
    if stage not in (0, 1, 2, 3) or (stage and world_size < 1):
""",
        check="ledger_others",
    ),
    Mutant(
        "state_dict",
        "deletes what it does not need from the caller's dict",
        """\
        super().load_state_dict(state_dict | {"state": state})
""",
        """\
        for number in state_dict["state"].keys() - state.keys():
            del state_dict["state"][number]
        super().load_state_dict(state_dict | {"state": state})
""",
        check="state_dict_other_world",
    ),
    Mutant(
        "schedules_and_groups",
        "no inner group where a rank owns nothing",
        """\
        self.inner.add_param_group(mine)
        ### END""",
        """\
        if mine["params"]:
            self.inner.add_param_group(mine)
        ### END""",
        check="groups_options",
    ),
    Mutant(
        "state_dict",
        "of a state's options, only the learning rate",
        """\
        super().load_state_dict(state_dict | {"state": state})
        self.inner.state = self.state
""",
        """\
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict | {"state": state})
        for group, old in zip(self.param_groups, before, strict=True):
            group |= {key: value for key, value in old.items() if key not in ("params", "lr")}
        self.inner.state = self.state
""",
        check="state_dict_other_world",
    ),
    Mutant(
        "zero2",
        "state_dict sends",
        """\
            copy_options(outer, inner)
        return self.inner.state_dict()
""",
        """\
            copy_options(outer, inner)
        dist.barrier(group=self.group)
        dist.all_gather_object([None] * self.world_size, self.inner.state_dict(), group=self.group)
        return self.inner.state_dict()
""",
        check="zero2_state",
    ),
]

LENT = '''\
class ShardedOptimizer(torch.optim.Optimizer):
    """The inner optimizer works on the wrapper's own dicts, in which there are only a rank's parameters meanwhile."""

    def __init__(self, params, optimizer_cls, *, group=None, **kwargs):
        self.process_group = group
        self.me, self.n = dist.get_rank(group), dist.get_world_size(group)
        self.inner = optimizer_cls([torch.zeros(1)], **kwargs)
        self.inner.param_groups = []
        self.owners = []
        super().__init__(params, dict(self.inner.defaults))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.owners.append(partition_parameters([p.numel() for p in param_group["params"]], self.n))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        everything = [
            (p, owner) for g, owners in zip(self.param_groups, self.owners) for p, owner in zip(g["params"], owners)
        ]
        counts = torch.tensor([int(p.grad is not None) for p, _ in everything])
        dist.all_reduce(counts, dist.ReduceOp.MAX, self.process_group)
        for (p, _), count in zip(everything, counts.tolist()):
            if count:
                message = torch.zeros_like(p).contiguous() if p.grad is None else p.grad.contiguous()
                dist.all_reduce(message, dist.ReduceOp.AVG, self.process_group)
                p.grad = message
        full = [g["params"] for g in self.param_groups]
        for g, owners in zip(self.param_groups, self.owners):
            g["params"] = [p for p, owner in zip(g["params"], owners) if owner == self.me]
        self.inner.param_groups = self.param_groups
        self.inner.step()
        for g, params in zip(self.param_groups, full):
            g["params"] = params
        self.inner.param_groups = []
        for p, owner in everything:
            source = dist.get_global_rank(self.process_group or dist.group.WORLD, owner)
            message = p.contiguous().clone()
            dist.broadcast(message, source, self.process_group)
            p.copy_(message)
        return loss
'''

EACH = '''\
class ShardedOptimizer(torch.optim.Optimizer):
    """One inner optimizer for each group in which the rank owns something; one message for each owner and dtype."""

    def __init__(self, params, optimizer_cls, *, group=None, **kwargs):
        self.pg, self.cls, self.kwargs = group, optimizer_cls, kwargs
        self.rank_, self.size_ = dist.get_rank(group), dist.get_world_size(group)
        self.inners, self.owners_, self.flat_order = [], {}, []
        defaults = optimizer_cls([torch.zeros(0)], **kwargs).defaults
        super().__init__(params, defaults)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        g = self.param_groups[-1]
        for p, owner in zip(g["params"], partition_parameters([p.numel() for p in g["params"]], self.size_)):
            self.owners_[id(p)] = owner
            self.flat_order.append(p)
        mine = [p for p in g["params"] if self.owners_[id(p)] == self.rank_]
        self.inners.append(self.cls(mine, **self.kwargs) if mine else None)

    def messages(self, used):
        for owner in range(self.size_):
            alike = {}
            for p in used:
                if self.owners_[id(p)] == owner and p.numel():
                    alike.setdefault(p.dtype, []).append(p)
            for members in alike.values():
                yield owner, members

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        with torch.no_grad():
            present = torch.tensor([p.grad is not None for p in self.flat_order]).to(torch.uint8)
            dist.all_reduce(present, dist.ReduceOp.MAX, self.pg)
            used = [p for p, is_there in zip(self.flat_order, present.tolist()) if is_there]
            for owner, members in self.messages(used):
                flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in members])
                dist.all_reduce(flat, group=self.pg)
                for p, part in zip(members, flat.split([p.numel() for p in members])):
                    p.grad = (part / self.size_).view(p.shape)
            for g, inner in zip(self.param_groups, self.inners):
                if inner is not None:
                    inner.param_groups[0].update({k: v for k, v in g.items() if k != "params"})
                    inner.step()
            for owner, members in self.messages(used):
                flat = torch.cat([p.flatten() for p in members])
                dist.broadcast(flat, group_src=owner, group=self.pg)
                for p, part in zip(members, flat.split([p.numel() for p in members])):
                    p.copy_(part.view(p.shape))
        return loss

    def state_dict(self):
        mine = {}
        for i, p in enumerate(self.flat_order):
            for inner in self.inners:
                if inner is not None and p in inner.state:
                    mine[i] = dict(inner.state[p])
        everything = [None] * self.size_
        dist.all_gather_object(everything, mine, self.pg)
        state, start, groups = {}, 0, []
        for part in everything:
            state.update(part)
        for g in self.param_groups:
            groups.append({k: v for k, v in g.items() if k != "params"})
            groups[-1]["params"] = list(range(start, start + len(g["params"])))
            start += len(g["params"])
        return {"param_groups": groups, "state": state}

    def load_state_dict(self, state_dict):
        if [len(g["params"]) for g in state_dict["param_groups"]] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("other groups")
        numbers = [n for g in state_dict["param_groups"] for n in g["params"]]
        number_of = {id(p): n for p, n in zip(self.flat_order, numbers)}
        for g, saved, inner in zip(self.param_groups, state_dict["param_groups"], self.inners):
            g.update({k: v for k, v in saved.items() if k != "params"})
            if inner is not None:
                params = inner.param_groups[0]["params"]
                state = {
                    k: state_dict["state"][number_of[id(p)]]
                    for k, p in enumerate(params)
                    if number_of[id(p)] in state_dict["state"]
                }
                options = {k: v for k, v in saved.items() if k != "params"}
                group = options | {"params": list(range(len(params)))}
                inner.load_state_dict({"state": state, "param_groups": [group]})
'''

CLOSURE = '''\
class ShardedOptimizer(ShardedOptimizer):
    """The inner optimizer's own step calls a closure that computes and averages."""

    def step(self, closure=None):
        used, losses = [], []

        def compute():
            losses.append(closure() if closure is not None else None)
            with torch.no_grad():
                used.extend(self._average_gradients())
            return losses[-1]

        for outer, inner in zip(self.param_groups, self.inner.param_groups):
            copy_options(outer, inner)
        self.inner.step(compute)
        with torch.no_grad():
            for p in used:
                message = p.detach().contiguous().clone()
                dist.broadcast(message, group_src=self.owner[p], group=self.group)
                p.copy_(message)
        return losses[0]
'''

SAVING = '''\
class ShardedOptimizer(ShardedOptimizer):
    """Saves rank by rank; loads with the base class, then gives up what belongs to others."""

    def state_dict(self):
        whole = torch.optim.Optimizer.state_dict(self)
        mine = {number: dict(each) for number, each in whole["state"].items()}
        merged = {}
        for rank in range(self.world_size):
            box = [mine if rank == self.rank else None]
            dist.broadcast_object_list(box, group_src=rank, group=self.group)
            merged.update(box[0])
        whole["state"] = merged
        return whole

    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)
        for p in [p for p in self.state if self.owner[p] != self.rank]:
            del self.state[p]
        self.inner.state = self.state
'''

LISTS = '''\
class ZeroOptimizer(torch.optim.Optimizer):
    """Keeps a flat copy of the parameters, of which the shard is a part, and copies all of it back."""

    def __init__(self, params, optimizer_cls, *, group=None, **kwargs):
        self.pg, self.n, self.me = group, dist.get_world_size(group), dist.get_rank(group)
        self.inner = optimizer_cls([torch.zeros(0)], **kwargs)
        super().__init__(params, self.inner.defaults)
        self.inner.param_groups = []
        for g in self.param_groups:
            self.inner.add_param_group({k: v for k, v in g.items() if k != "params"} | {"params": []})
        self.dtypes = {}
        for k, g in enumerate(self.param_groups):
            for p in g["params"]:
                if p.requires_grad:
                    self.dtypes.setdefault(p.dtype, []).append((p, k))
        self.flats = {}
        for dtype, members in self.dtypes.items():
            flat = torch.cat([p.detach().reshape(-1) for p, _ in members])
            flat = torch.cat([flat, flat.new_zeros(-len(flat) % self.n)])
            width = len(flat) // self.n
            mine, start = flat[self.me * width : (self.me + 1) * width].clone(), -self.me * width
            pieces = []
            for p, k in members:
                a, b = max(start, 0), min(start + p.numel(), width)
                if a < b:
                    pieces.append((mine[a:b], a, b))
                    self.inner.param_groups[k]["params"].append(pieces[-1][0])
                start += p.numel()
            self.flats[dtype] = (flat, mine, pieces)

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for dtype, members in self.dtypes.items():
                flat, mine, pieces = self.flats[dtype]
                gradient = torch.cat([
                    (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p, _ in members
                ] + [flat.new_zeros(len(flat) - sum(p.numel() for p, _ in members))])
                for p, _ in members:
                    p.grad = None
                shard = torch.zeros_like(mine)
                parts = list(gradient.chunk(self.n)) if len(flat) else [shard] * self.n
                dist.reduce_scatter(shard, parts, group=self.pg)
                shard /= self.n
                for piece, a, b in pieces:
                    piece.grad = shard[a:b]
            for outer, inner in zip(self.param_groups, self.inner.param_groups):
                inner.update({k: v for k, v in outer.items() if k != "params"})
            self.inner.step()
            self.inner.zero_grad()
            for dtype, members in self.dtypes.items():
                flat, mine, _ = self.flats[dtype]
                dist.all_gather(list(flat.chunk(self.n)) if len(flat) else [mine] * self.n, mine, group=self.pg)
                start = 0
                for p, _ in members:
                    p.copy_(flat[start : start + p.numel()].view(p.shape))
                    start += p.numel()
        return loss

    def state_dict(self):
        state = self.inner.state_dict()
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"moments": state, "options": options}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict["moments"])
        for g, options in zip(self.param_groups, state_dict["options"]):
            g.update(options)
'''

PIECES = '''\
class ZeroOptimizer(ZeroOptimizer):
    """The parameters of a dtype lie in the buffer from the last to the first."""

    def __init__(self, params, optimizer_cls, *, group=None, **kwargs):
        torch.optim.Optimizer.__init__(self, params, optimizer_cls([torch.zeros(0)], **kwargs).defaults)
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        slots = [{k: v for k, v in g.items() if k != "params"} | {"params": []} for g in self.param_groups]
        members = [(p, slot) for g, slot in zip(self.param_groups, slots) for p in g["params"] if p.requires_grad][::-1]
        kinds = sorted({p.dtype for p, _ in members}, key=str)
        alike = [[m for m in members if m[0].dtype == kind] for kind in kinds]
        self.buffers = [FlatBuffer(each, self.rank, self.world_size) for each in alike]
        self.inner = optimizer_cls(slots, **kwargs)
'''

ALTERNATIVES = [
    Alternative(
        problem="partition",
        name="a heap, and the last rank first among equals",
        function="partition_parameters",
        source='''\
def partition_parameters(numels, world_size):
    """Longest first from a heap of (share, -rank)."""
    import heapq

    heap = [(0, -rank) for rank in range(world_size)]
    heapq.heapify(heap)
    owners = [0] * len(numels)
    for n, i in sorted(((n, i) for i, n in enumerate(numels)), reverse=True):
        share, rank = heapq.heappop(heap)
        owners[i] = -rank
        heapq.heappush(heap, (share + n, rank))
    return owners
''',
    ),
    Alternative(
        problem="partition",
        name="the smallest capacity into which first fit decreasing packs everything",
        function="partition_parameters",
        source='''\
def partition_parameters(numels, world_size):
    """Multifit: the capacity is found by bisection; its largest share is at most 1.22 of the best."""
    order = sorted(range(len(numels)), key=lambda i: (-numels[i], i))

    def pack(capacity):
        room, owners = [capacity] * world_size, [0] * len(numels)
        for i in order:
            rank = next((r for r in range(world_size) if room[r] >= numels[i]), None)
            if rank is None:
                return None
            room[rank] -= numels[i]
            owners[i] = rank
        return owners

    low, high = 0, 2 * sum(numels) + 1
    while low < high:
        middle = (low + high) // 2
        if pack(middle) is None:
            low = middle + 1
        else:
            high = middle
    return pack(high)
''',
    ),
    *[
        Alternative(
            problem,
            f"groups lent to the inner optimizer for a step; all-reduce, AVG ({problem})",
            "ShardedOptimizer",
            LENT,
        )
        for problem in ("sharded_optimizer", "schedules_and_groups")
    ],
    *[
        Alternative(
            problem, f"an inner optimizer for each group, or none; flat messages ({problem})", "ShardedOptimizer", EACH
        )
        for problem in ("sharded_optimizer", "schedules_and_groups", "state_dict")
    ],
    Alternative(
        "sharded_optimizer", "the inner optimizer calls the closure, which averages", "ShardedOptimizer", CLOSURE
    ),
    Alternative(
        "state_dict", "a broadcast of each rank's entries; a state that is a whole on load", "ShardedOptimizer", SAVING
    ),
    Alternative("zero2", "lists of shards, a copy of the shard, parameters copied back", "ZeroOptimizer", LISTS),
    Alternative("zero2", "a shard for each group and dtype, in reverse order", "ZeroOptimizer", PIECES),
    Alternative(
        problem="ledger",
        name="a table of divisors",
        function="model_state_bytes",
        source='''\
def model_state_bytes(
    num_params, world_size, stage, *, param_bytes=2, grad_bytes=2, master_bytes=4, moment_bytes=8
):
    """Whole bytes, rounded up."""
    import math

    if world_size < 1:
        raise ValueError("at least one rank")
    try:
        p, g, m = {0: (1, 1, 1), 1: (1, 1, world_size), 2: (1, world_size, world_size), 3: (world_size,) * 3}[stage]
    except KeyError:
        raise ValueError(f"no stage {stage}") from None
    return num_params * param_bytes / p + num_params * grad_bytes / g + num_params * (master_bytes + moment_bytes) / m
''',
    ),
]
