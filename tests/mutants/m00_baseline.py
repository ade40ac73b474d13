"""Module 00: wrong and unusual ways to draw batches, seed, schedule, save and train.

Most of these mistakes train well enough to go unnoticed: the loss falls, and only a crash, a resumed run, a large file
or a second rank brings them out.
"""

from tests.mutants import Alternative, Mutant

MUTANTS = [
    # get_batch
    Mutant(
        problem="get_batch",
        check="get_batch_windows",
        name="the target is not shifted",
        old="return windows[:, :-1], windows[:, 1:]",
        new="return windows[:, :-1], windows[:, :-1].clone()",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_windows",
        name="the target is shifted the other way",
        old="return windows[:, :-1], windows[:, 1:]",
        new="return windows[:, 1:], windows[:, :-1]",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_starts",
        name="never draws the last start",
        old="starts = torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()",
        new="starts = torch.randint(0, max(1, len(tokens) - context_length - 1), (batch_size,)).tolist()",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_windows",
        name="draws a start that is one too far",
        old="starts = torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()",
        new="starts = torch.randint(0, len(tokens) - context_length + 1, (batch_size,)).tolist()",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_starts",
        name="draws any start and moves those that are too far to the last one",
        old="starts = torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()",
        new="""\
starts = torch.randint(0, len(tokens), (batch_size,))
    starts = starts.clamp(max=len(tokens) - context_length - 1).tolist()""",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_generator",
        name="draws from numpy's generator",
        old="starts = torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()",
        new="starts = np.random.randint(0, len(tokens) - context_length, batch_size).tolist()",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_generator",
        name="draws from a generator of its own",
        old="starts = torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()",
        new="""\
generator = torch.Generator()
    generator.seed()
    starts = torch.randint(0, len(tokens) - context_length, (batch_size,), generator=generator).tolist()""",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_generator",
        name="draws once more than it needs",
        old="starts = torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()",
        new="starts = torch.randint(0, len(tokens) - context_length, (batch_size + 1,))[:-1].tolist()",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_generator",
        name="one start for the whole batch",
        old="starts = torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()",
        new="""\
start = torch.randint(0, len(tokens) - context_length, (1,)).item()
    starts = [(start + i) % (len(tokens) - context_length) for i in range(batch_size)]""",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_memory",
        name="converts the whole file",
        old="    windows = np.stack([tokens[start",
        new="    tokens = tokens.astype(np.int64)\n    windows = np.stack([tokens[start",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_memory",
        name="copies the whole file into a tensor",
        old="""\
    windows = np.stack([tokens[start : start + context_length + 1] for start in starts])
    windows = torch.from_numpy(windows.astype(np.int64)).to(device)
""",
        new="""\
    everything = torch.from_numpy(np.array(tokens))
    windows = torch.stack([everything[start : start + context_length + 1].long() for start in starts]).to(device)
""",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_windows",
        name="int32 tokens, which an embedding takes as well and a loss does not",
        old="torch.from_numpy(windows.astype(np.int64))",
        new="torch.from_numpy(windows.astype(np.int32))",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_windows",
        name="goes through int16, too small for the upper half of uint16",
        old="torch.from_numpy(windows.astype(np.int64))",
        new="torch.from_numpy(windows.astype(np.int16).astype(np.int64))",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_windows",
        name="goes through int32, too small for the upper half of uint32",
        old="torch.from_numpy(windows.astype(np.int64))",
        new="torch.from_numpy(windows.astype(np.int32).astype(np.int64))",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_windows",
        name="goes through uint32, too small for int64",
        old="torch.from_numpy(windows.astype(np.int64))",
        new="torch.from_numpy(windows.astype(np.uint32).astype(np.int64))",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_device",
        name="draws on the device",
        old="torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()",
        new="torch.randint(0, len(tokens) - context_length, (batch_size,), device=device).tolist()",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_short",
        name="says nothing of a file that is too short",
        old="    if len(tokens) < context_length + 1:\n",
        new="    if len(tokens) < 0:\n",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_short",
        name="accepts a file without room for the last target",
        old="    if len(tokens) < context_length + 1:\n",
        new="    if len(tokens) < context_length:\n",
    ),
    Mutant(
        problem="get_batch",
        check="get_batch_device",
        name="leaves the batch on the CPU",
        old="torch.from_numpy(windows.astype(np.int64)).to(device)",
        new="torch.from_numpy(windows.astype(np.int64))",
    ),
    # seed_everything
    Mutant(
        problem="seed_everything",
        check="seed_python",
        name="forgets Python's generator",
        old="    random.seed(seed + rank)\n",
        new="",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_numpy",
        name="makes a new numpy generator instead of seeding the global one",
        old="    np.random.seed((seed + rank) % 2**32)\n",
        new="    np.random.default_rng((seed + rank) % 2**32)\n",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_torch",
        name="makes a new torch generator instead of seeding the global one",
        old="    torch.manual_seed(seed + rank)  # all devices\n",
        new="    torch.Generator().manual_seed(seed + rank)\n",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_ranks",
        name="ignores the rank",
        old="    torch.manual_seed(seed + rank)  # all devices\n",
        new="    torch.manual_seed(seed)\n",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_python",
        name="multiplies by the rank, so that all seeds are 0 on rank 0",
        old="    random.seed(seed + rank)\n",
        new="    random.seed(seed * rank)\n",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_large",
        name="numpy refuses a large seed",
        old="np.random.seed((seed + rank) % 2**32)",
        new="np.random.seed(seed + rank)",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_large",
        name="torch gets the seed modulo 2**32 too, and a GPU other numbers",
        old="torch.manual_seed(seed + rank)",
        new="torch.manual_seed((seed + rank) % 2**32)",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_large",
        name="numpy's seed goes through a float",
        old="np.random.seed((seed + rank) % 2**32)",
        new="np.random.seed(int(math.fmod(seed + rank, 2**32)))",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_torch",
        name="seeds torch on the CPU only",
        old="torch.manual_seed(seed + rank)",
        new="torch.default_generator.manual_seed(seed + rank)",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_torch",
        name="asks for deterministic algorithms as well",
        old="    torch.manual_seed(seed + rank)  # all devices\n",
        new="    torch.manual_seed(seed + rank)\n    torch.use_deterministic_algorithms(True)\n",
    ),
    Mutant(
        problem="seed_everything",
        check="seed_torch",
        name="sets cudnn's flags as well",
        old="    torch.manual_seed(seed + rank)  # all devices\n",
        new="    torch.manual_seed(seed + rank)\n    torch.backends.cudnn.deterministic = True\n",
    ),
    # cosine_lr
    Mutant(
        problem="cosine_lr",
        check="lr_warmup",
        name="the warm-up is one step ahead",
        old="return max_lr * step / warmup_steps",
        new="return max_lr * (step + 1) / warmup_steps",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_warmup",
        name="the warm-up has one step more",
        old="    if step < warmup_steps:\n        return max_lr * step / warmup_steps",
        new="    if step <= warmup_steps:\n        return max_lr * step / (warmup_steps + 1)",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_warmup",
        name="divides by a warm-up of no steps",
        old="    if step < warmup_steps:\n",
        new="    if step <= warmup_steps:\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_warmup",
        name="the warm-up starts from min_lr",
        old="return max_lr * step / warmup_steps",
        new="return min_lr + (max_lr - min_lr) * step / warmup_steps",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_warmup",
        name="the cosine counts from step 0",
        old="t, length = step - warmup_steps, cycle_steps",
        new="t, length = step, cycle_steps",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_cycle",
        name="the warm-up is a part of the first cycle",
        old="t, length = step - warmup_steps, cycle_steps",
        new="t, length = step - warmup_steps, max(1, cycle_steps - warmup_steps)",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_restart",
        name="never restarts and stays at min_lr",
        old="    while t >= length:\n",
        new="    if t >= length:\n        return min_lr\n    while t >= length:\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_restart",
        name="restarts one step late",
        old="    while t >= length:\n",
        new="    while t > length:\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_restart",
        name="never restarts: the cosine rises again",
        old="    while t >= length:\n",
        new="    while False:\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_growing_cycles",
        name="ignores cycle_mult",
        old="        length = round(cycle_mult * length)\n",
        new="",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_growing_cycles",
        name="cuts the length of a cycle off instead of rounding it",
        old="        length = round(cycle_mult * length)\n",
        new="        length = int(cycle_mult * length)\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_growing_cycles",
        name="rounds halves up",
        old="        length = round(cycle_mult * length)\n",
        new="        length = int(cycle_mult * length + 0.5)\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_growing_cycles",
        name="remembers the cycles of another cycle_mult",
        old="""\
    while t >= length:
        t -= length
        length = round(cycle_mult * length)
""",
        new="""\
    known = globals().setdefault("known", {}).setdefault((warmup_steps, cycle_steps), [])
    for n in range(step):
        if t < length:
            break
        t -= length
        if len(known) == n:
            known.append(round(cycle_mult * length))
        length = known[n]
""",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_growing_cycles",
        name="finds the cycle by a logarithm, which may be just below a whole number",
        old="    while t >= length:\n",
        new="""\
    if cycle_mult == 3:
        cycle = int(math.log(2 * t / length + 1, 3))
        t -= length * (3**cycle - 1) // 2
        return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * t / length / 3**cycle)) / 2
    while t >= length:
""",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_restart",
        name="ten cycles at most",
        old="    while t >= length:\n",
        new="    for _ in range(10):\n        if t < length:\n            break\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_cycle",
        name="the rate as a tensor",
        old="(1 + math.cos(math.pi * t / length)) / 2",
        new="(1 + torch.tensor(math.pi * t / length, dtype=torch.float64).cos()) / 2",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_growing_cycles",
        name="does not round the length of a cycle",
        old="        length = round(cycle_mult * length)\n",
        new="        length = cycle_mult * length\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_growing_cycles",
        name="multiplies only once",
        old="        length = round(cycle_mult * length)\n",
        new="        length = round(cycle_mult * cycle_steps)\n",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_cycle",
        name="ignores min_lr",
        old="return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * t / length)) / 2",
        new="return max_lr * (1 + math.cos(math.pi * t / length)) / 2",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_cycle",
        name="a whole period of the cosine in a cycle",
        old="math.cos(math.pi * t / length)",
        new="math.cos(2 * math.pi * t / length)",
    ),
    Mutant(
        problem="cosine_lr",
        check="lr_cycle",
        name="a straight line instead of a cosine",
        old="(1 + math.cos(math.pi * t / length)) / 2",
        new="(1 - t / length)",
    ),
    # checkpoint
    Mutant(
        problem="checkpoint",
        check="checkpoint_optimizer",
        name="saves only weights",
        old='        "optimizer": optimizer.state_dict(),\n',
        new='        "optimizer": {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]},\n',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="saves the parameters and not the buffers",
        old="    model.load_state_dict(state",
        new="""\
    for name, buffer in model.named_buffers():
        state["model"][name] = buffer.clone()
    model.load_state_dict(state""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_optimizer",
        name="does not load the optimizer",
        old='        optimizer.load_state_dict(state["optimizer"])\n',
        new="        pass\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_optimizer",
        name="loads the moments and not the groups' settings",
        old='        optimizer.load_state_dict(state["optimizer"])\n',
        new="""\
        groups = [{**group} for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = own["lr"]
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_random",
        name="does not load the random states",
        old='    set_random_states(state["random"])\n',
        new="",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_random",
        name="forgets numpy's random state",
        old='    np.random.set_state(states["numpy"])\n',
        new="",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_random",
        name="forgets Python's random state",
        old='    random.setstate(states["python"])\n',
        new="",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_random",
        name="saves a seed drawn from torch in place of its state",
        old='"torch": torch.get_rng_state(),',
        new='"torch": torch.manual_seed(torch.randint(0, 2**31, ()).item()).get_state(),',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_random",
        name="forgets half of a pair of normal numbers in numpy's state",
        old='"numpy": (name, keys.tolist(), *rest),',
        new='"numpy": (name, keys.tolist(), rest[0]),',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="returns the iteration after the one that was saved",
        old='    return state["iteration"]\n',
        new='    return state["iteration"] + 1\n',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_safe",
        name="trusts the pickle: weights_only=False",
        old='map_location="cpu", weights_only=True)',
        new='map_location="cpu", weights_only=False)',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="saves numpy's array, which weights_only=True refuses",
        old='"numpy": (name, keys.tolist(), *rest),',
        new='"numpy": (name, keys, *rest),',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_device",
        name="no map_location",
        old='torch.load(source, map_location="cpu", weights_only=True)',
        new="torch.load(source, weights_only=True)",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="puts the loaded tensors in the place of the model's",
        old='    model.load_state_dict(state["model"])\n',
        new='    model.load_state_dict(state["model"], assign=True)\n',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_disk_full",
        name="writes straight to the path",
        old="""\
    unfinished = Path(f"{os.fspath(out)}.unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(out)
""",
        new="    torch.save(state, out)\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_killed",
        name="opens the path itself",
        old='    unfinished = Path(f"{os.fspath(out)}.unfinished")\n',
        new="    unfinished = Path(out)\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_killed",
        name="removes the old file before the new one takes its place",
        old="    unfinished.replace(out)\n",
        new="    Path(out).unlink(missing_ok=True)\n    unfinished.rename(out)\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="moves the old file out of the way first",
        old='    unfinished = Path(f"{os.fspath(out)}.unfinished")\n',
        new="""\
    unfinished = Path(f"{os.fspath(out)}.unfinished")
    if Path(out).exists():
        Path(out).replace(f"{os.fspath(out)}.old")
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_synced",
        name="copies the new file over the old one",
        old="    unfinished.replace(out)\n",
        new="    Path(out).write_bytes(unfinished.read_bytes())\n    unfinished.unlink()\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_disk_full",
        name="replaces even when writing failed",
        old="""\
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(out)
""",
        new="""\
    file = unfinished.open("wb")
    try:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    finally:
        unfinished.replace(out)
        file.close()
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_killed",
        name="after a crash, the file that was left keeps it from saving again",
        old='    with unfinished.open("wb") as file:\n',
        new='    with unfinished.open("xb") as file:\n',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_synced",
        name="writes the unfinished file to another folder",
        old='    unfinished = Path(f"{os.fspath(out)}.unfinished")\n',
        new="""\
    import tempfile

    unfinished = Path(tempfile.mkdtemp()) / "unfinished"
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_disk_full",
        name="does not notice that only a part was written: a raw write may be short",
        old="""\
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
""",
        new="""\
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    with unfinished.open("wb", buffering=0) as file:
        file.write(buffer.getvalue())
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="leaves the unfinished file behind",
        old="    unfinished.replace(out)\n",
        new="""\
    beside = Path(f"{os.fspath(out)}.beside")
    beside.write_bytes(unfinished.read_bytes())
    beside.replace(out)
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_synced",
        name="no fsync",
        old="        os.fsync(file.fileno())\n",
        new="",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_synced",
        name="fsync with a part of the file still in the buffer",
        old='    with unfinished.open("wb") as file:\n        torch.save(state, file)\n        file.flush()\n',
        new="""\
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    with unfinished.open("wb", buffering=2**20) as file:
        file.write(buffer.getvalue())
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_mismatch",
        name="load_state_dict's own error for a model of another shape",
        old="        if saved.get(name) != shapes.get(name):\n",
        new="        if False:\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_mismatch",
        name="does not notice a tensor that is too many",
        old="    for name in saved | shapes:\n",
        new="""\
    for name in [n for n in state["model"] if n not in shapes]:
        del state["model"][name], saved[name]
    for name in saved | shapes:
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_mismatch",
        name="loads what fits and leaves the rest as it is",
        old="        if saved.get(name) != shapes.get(name):\n",
        new="""\
        if saved.get(name) != shapes.get(name):
            model.load_state_dict({n: t for n, t in state["model"].items() if saved[n] == shapes.get(n)}, strict=False)
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_disk_full",
        name="takes paths of one type only",
        old="    if not isinstance(out, str | os.PathLike):\n",
        new="    if not isinstance(out, os.PathLike):\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="writes a file object from its beginning",
        old="""\
    if not isinstance(out, str | os.PathLike):
        torch.save(state, out)
""",
        new="""\
    if not isinstance(out, str | os.PathLike):
        out.seek(0)
        torch.save(state, out)
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="reads a file object from its beginning",
        old="    state = torch.load(source, map",
        new="""\
    if not isinstance(source, str | os.PathLike):
        source.seek(0)
    state = torch.load(source, map""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="closes the file object that it was given",
        old="""\
    if not isinstance(out, str | os.PathLike):
        torch.save(state, out)
""",
        new="""\
    if not isinstance(out, str | os.PathLike):
        torch.save(state, out)
        out.close()
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="leaves the model in eval mode",
        old='        "model": model.state_dict(),\n',
        new='        "model": model.eval().state_dict(),\n',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="drops the gradients",
        old='        "model": model.state_dict(),\n',
        new='        "model": optimizer.zero_grad() or model.state_dict(),\n',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="saves float32, whatever the model has",
        old='        "model": model.state_dict(),\n',
        new='        "model": {name: tensor.float() for name, tensor in model.state_dict().items()},\n',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="the iteration as a tensor",
        old='    return state["iteration"]\n',
        new='    return torch.tensor(state["iteration"])\n',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_random",
        name="restores the generators only where there is an optimizer",
        old='    set_random_states(state["random"])\n',
        new="""\
    if optimizer is not None:
        set_random_states(state["random"])
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_random",
        name="draws the name of the unfinished file",
        old='{os.fspath(out)}.unfinished")',
        new='{os.fspath(out)}.{random.randrange(10**9)}")',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_random",
        name="draws the name of the unfinished file from numpy",
        old='{os.fspath(out)}.unfinished")',
        new='{os.fspath(out)}.{np.random.randint(10**9)}")',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_mismatch",
        name="compares the numbers of elements only",
        old="""\
    saved = {name: list(tensor.shape) for name, tensor in state["model"].items()}
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
""",
        new="""\
    for name, tensor in model.state_dict().items():
        if name in state["model"] and state["model"][name].numel() == tensor.numel():
            state["model"][name] = state["model"][name].reshape(tensor.shape)
    saved = {name: list(tensor.shape) for name, tensor in state["model"].items()}
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_mismatch",
        name="goes by the order of the tensors, not by their names",
        old="    saved = {name: list(",
        new="""\
    if len(state["model"]) == len(model.state_dict()):
        state["model"] = dict(zip(model.state_dict(), state["model"].values(), strict=True))
    saved = {name: list(""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_mismatch",
        name="sets the generators before it looks at the model",
        old="    saved = {name: list(",
        new='    set_random_states(state["random"])\n    saved = {name: list(',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_disk_full",
        name="says nothing when the disk is full",
        old="""\
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(out)
""",
        new="""\
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(out)
    except (OSError, RuntimeError):
        pass
""",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_synced",
        name="replaces texts and Paths only",
        old="    if not isinstance(out, str | os.PathLike):\n",
        new="    if not isinstance(out, str | Path):\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_synced",
        name="the unfinished file has the name of one that ends in .tmp",
        old='Path(f"{os.fspath(out)}.unfinished")',
        new='Path(out).with_suffix(".tmp")',
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_synced",
        name="the unfinished file has one fixed name",
        old='Path(f"{os.fspath(out)}.unfinished")',
        new='Path(out).with_name("checkpoint.pt.tmp")',
    ),
    # train
    Mutant(
        problem="train",
        check="train_schedule",
        name="the schedule is not applied",
        old='            group["lr"] = cosine_lr(\n',
        new="            cosine_lr(\n",
    ),
    Mutant(
        problem="train",
        check="train_schedule",
        name="the rate of the step after",
        old="                step,\n                max_lr=config.max_lr,\n",
        new="                step + 1,\n                max_lr=config.max_lr,\n",
    ),
    Mutant(
        problem="train",
        check="train_schedule",
        name="forgets cycle_mult",
        old="                cycle_mult=config.cycle_mult,\n",
        new="",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="weight decay at AdamW's default",
        old="lr=config.max_lr, weight_decay=config.weight_decay)",
        new="lr=config.max_lr)",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="Adam in place of AdamW",
        old="    optimizer = torch.optim.AdamW(model.parameters(), lr",
        new="    optimizer = torch.optim.Adam(model.parameters(), lr",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="gradients add up",
        old="        optimizer.zero_grad()\n",
        new="",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="zeroes the gradients before they are used",
        old="        loss.backward()\n        optimizer.step()\n",
        new="        loss.backward()\n        optimizer.zero_grad()\n        optimizer.step()\n",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="the loss after the update",
        old="        losses.append(loss.item())\n",
        new="        losses.append(model.loss(x, y).item())\n",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="the loss of one extra step",
        old="    for step in range(first, config.steps):\n",
        new="    for step in range(first, config.steps + 1):\n",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="losses as tensors that keep their graphs",
        old="        losses.append(loss.item())\n",
        new="        losses.append(loss)\n",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="seeds in every step, so that all batches are the same",
        old="        x, y = get_batch(",
        new="        seed_everything(config.seed)\n        x, y = get_batch(",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="does not seed",
        old="    seed_everything(config.seed)\n",
        new="",
    ),
    Mutant(
        problem="train",
        check="train_resumed",
        name="resumes but redraws data: seeds after loading",
        old="    first = 0 if resume is None else load_checkpoint(resume, model, optimizer)\n",
        new="""\
    first = 0 if resume is None else load_checkpoint(resume, model, optimizer)
    seed_everything(config.seed)
""",
    ),
    Mutant(
        problem="train",
        check="train_resumed_dropout",
        name="resumes with the right batches and other dropout: draws the batches before once more",
        old="    first = 0 if resume is None else load_checkpoint(resume, model, optimizer)\n",
        new="""\
    first = 0 if resume is None else load_checkpoint(resume, model, optimizer)
    seed_everything(config.seed)
    for _ in range(first):
        get_batch(tokens, config.batch_size, config.context_length, device)
""",
    ),
    Mutant(
        problem="train",
        check="train_resumed",
        name="drops the optimizer's state on resuming",
        old="load_checkpoint(resume, model, optimizer)\n",
        new="load_checkpoint(resume, model)\n",
    ),
    Mutant(
        problem="train",
        check="train_resumed",
        name="makes config.steps more steps after resuming",
        old="    for step in range(first, config.steps):\n",
        new="    for step in range(first, first + config.steps):\n",
    ),
    Mutant(
        problem="train",
        check="train_resumed",
        name="starts the schedule anew after resuming",
        old="                step,\n                max_lr=config.max_lr,\n",
        new="                step - first,\n                max_lr=config.max_lr,\n",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="saves the number of the step, one less than the steps done",
        old="            save_checkpoint(model, optimizer, done, config.checkpoint_path)\n",
        new="            save_checkpoint(model, optimizer, step, config.checkpoint_path)\n",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="saves before the update",
        old="        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n",
        new="""\
        optimizer.zero_grad()
        loss.backward()
        if config.checkpoint_path is not None and (step + 1) % config.checkpoint_interval == 0:
            save_checkpoint(model, optimizer, step + 1, config.checkpoint_path)
            optimizer.step()
            losses.append(loss.item())
            continue
        optimizer.step()
""",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="no checkpoint after the last step",
        old="(done % config.checkpoint_interval == 0 or done == config.steps)",
        new="done % config.checkpoint_interval == 0",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="a checkpoint after the last step only",
        old="(done % config.checkpoint_interval == 0 or done == config.steps)",
        new="done == config.steps",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="counts the interval from 0",
        old="(done % config.checkpoint_interval == 0 or done == config.steps)",
        new="(step % config.checkpoint_interval == 0 or done == config.steps)",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="zeroes the gradients after each step only: those from before the run count",
        old="""\
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
        new="""\
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    Mutant(
        problem="train",
        check="train_losses",
        name="adds up the losses of the rows of a batch, each by a call of its own",
        old="        loss = model.loss(x, y)\n",
        new="        loss = torch.stack([model.loss(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]).mean()\n",
    ),
    Mutant(
        problem="train",
        check="train_resumed_dropout",
        name="seeds torch only",
        old="    seed_everything(config.seed)\n",
        new="    torch.manual_seed(config.seed)\n",
    ),
    Mutant(
        problem="train",
        check="train_resumed_dropout",
        name="draws a number from Python's generator in each step",
        old="        x, y = get_batch(",
        new="        random.random()\n        x, y = get_batch(",
    ),
    Mutant(
        problem="train",
        check="train_resumed_dropout",
        name="draws a number where checkpoints are saved",
        old="        losses.append(loss.item())\n",
        new="""\
        losses.append(loss.item())
        if config.checkpoint_path is not None:
            torch.rand(1)
""",
    ),
    Mutant(
        problem="train",
        check="train_resumed_dropout",
        name="trains in eval mode",
        old="    losses = []\n",
        new="""\
    losses = []
    model.eval()
""",
    ),
    Mutant(
        problem="train",
        check="train_resumed_dropout",
        name="leaves the model in eval mode",
        old="    return losses\n",
        new="""\
    model.eval()
    return losses
""",
    ),
    Mutant(
        problem="train",
        check="train_resumed_dropout",
        name="resumes from paths only",
        old="load_checkpoint(resume, model, optimizer)\n",
        new="load_checkpoint(Path(resume), model, optimizer)\n",
    ),
    Mutant(
        problem="train",
        check="train_schedule",
        name="a warm-up of half of the steps at most",
        old="                warmup_steps=config.warmup_steps,\n",
        new="                warmup_steps=min(config.warmup_steps, config.steps // 2),\n",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="counts the interval from where the run was resumed",
        old="(done % config.checkpoint_interval == 0 or done == config.steps)",
        new="((done - first) % config.checkpoint_interval == 0 or done == config.steps)",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="no checkpoint after the last step of a run that was resumed",
        old="(done % config.checkpoint_interval == 0 or done == config.steps)",
        new="(done % config.checkpoint_interval == 0 or done == config.steps and resume is None)",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="has no result where nothing is left to do",
        old="    return losses\n",
        new="    return losses or None\n",
    ),
    Mutant(
        problem="checkpoint",
        check="checkpoint_model",
        name="keeps the last checkpoint only, by deleting all others",
        old="    unfinished.replace(out)\n",
        new="""\
    unfinished.replace(out)
    for other in Path(out).parent.glob("*.pt"):
        if other != Path(out):
            other.unlink()
""",
    ),
    Mutant(
        problem="train",
        check="train_checkpoints",
        name="saves where the loss is the lowest so far",
        old="            save_checkpoint(model, optimizer, done, config.checkpoint_path)\n",
        new="""\
            if losses[-1] == min(losses):
                save_checkpoint(model, optimizer, done, config.checkpoint_path)
""",
    ),
]

ALTERNATIVES = [
    Alternative(
        problem="get_batch",
        name="torch from the first token on, x and y cut separately, one draw at a time",
        function="get_batch",
        source='''\
def get_batch(tokens, batch_size, context_length, device):
    """Each window becomes a tensor of its own."""
    room = len(tokens) - context_length
    if room <= 0:
        raise ValueError("too few tokens")
    starts = [int(torch.randint(room, (1,))) for _ in range(batch_size)]
    x = torch.stack([torch.from_numpy(np.array(tokens[i : i + context_length], dtype=np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(np.array(tokens[i + 1 : i + 1 + context_length], np.int64)) for i in starts])
    return x.to(device), y.to(device)
''',
    ),
    Alternative(
        problem="get_batch",
        name="one index array, no loop",
        function="get_batch",
        source='''\
def get_batch(tokens, batch_size, context_length, device):
    """The positions of all tokens of the batch at once."""
    if not context_length < len(tokens):
        raise ValueError(f"{len(tokens)} tokens for {context_length}")
    starts = torch.randint(high=len(tokens) - context_length, size=(batch_size, 1)).numpy()
    batch = torch.tensor(tokens[starts + np.arange(context_length + 1)].astype("int64"), device=device)
    return batch[:, :context_length].contiguous(), batch[:, 1:].contiguous()
''',
    ),
    Alternative(
        problem="seed_everything",
        name="each device by itself",
        function="seed_everything",
        source='''\
def seed_everything(seed, rank=0):
    """The legacy numpy generator is set through its bit generator's state."""
    seed += rank
    random.seed(seed)
    np.random.set_state(np.random.RandomState(seed & 0xFFFFFFFF).get_state())
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
''',
    ),
    Alternative(
        problem="cosine_lr",
        name="recursive, with the half-angle form of the cosine",
        function="cosine_lr",
        source='''\
def cosine_lr(step, *, max_lr, min_lr, warmup_steps, cycle_steps, cycle_mult=1.0):
    """(1 + cos a) / 2 = cos(a/2)²; a step beyond the first cycle is one of a schedule that begins with the second."""
    step -= warmup_steps
    if step < 0:
        return max_lr * (1 + step / warmup_steps)
    if step < cycle_steps:
        share = math.cos(math.pi / 2 * step / cycle_steps) ** 2
        return share * max_lr + (1 - share) * min_lr
    return cosine_lr(
        step - cycle_steps,
        max_lr=max_lr,
        min_lr=min_lr,
        warmup_steps=0,
        cycle_steps=round(cycle_steps * cycle_mult),
        cycle_mult=cycle_mult,
    )
''',
    ),
    Alternative(
        problem="checkpoint",
        name="random states as tensors, a flat dict with other names",
        function="save_checkpoint",
        source='''\
def save_checkpoint(model, optimizer, iteration, out):
    """A temporary file with a name of its own; the bytes are made in memory first."""
    import io
    import tempfile

    version, state, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    everything = {
        "weights": dict(model.state_dict()),
        "groups": optimizer.state_dict(),
        "step": torch.tensor(iteration),
        "py": torch.tensor(state, dtype=torch.int64),
        "py_rest": [version, gauss],
        "np": torch.from_numpy(keys.astype(np.int64)),
        "np_rest": [name, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    buffer = io.BytesIO()
    torch.save(everything, buffer)
    if hasattr(out, "write"):
        out.write(buffer.getvalue())
        return
    folder = os.path.dirname(os.path.abspath(out))
    handle, unfinished = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fdatasync(handle) if hasattr(os, "fdatasync") else os.fsync(handle)
        os.rename(unfinished, out)
    except BaseException:
        os.unlink(unfinished)
        raise


def load_checkpoint(source, model, optimizer=None):
    """Names, shapes, then everything with copy_."""
    def nowhere(storage, location):
        return storage

    state = torch.load(source, map_location=nowhere)  # weights_only=True is the default
    own = model.state_dict(keep_vars=True)
    wrong = set(own) ^ set(state["weights"])
    wrong |= {n for n in set(own) & set(state["weights"]) if own[n].shape != state["weights"][n].shape}
    if wrong:
        raise ValueError("does not fit: " + ", ".join(sorted(wrong)))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state["weights"][name])
    if optimizer:
        optimizer.load_state_dict(state["groups"])
    version, gauss = state["py_rest"]
    random.setstate((version, tuple(state["py"].tolist()), gauss))
    name, *rest = state["np_rest"]
    np.random.set_state((name, state["np"].numpy().astype(np.uint32), *rest))
    torch.random.set_rng_state(state["torch"])
    return int(state["step"])
''',
    ),
    Alternative(
        problem="checkpoint",
        name="torch.save to a path beside, synced afterwards",
        function="save_checkpoint",
        source='''\
def save_checkpoint(model, optimizer, iteration, out):
    """Opens the finished file once more to sync it."""
    state = dict(
        model=model.state_dict(), optimizer=optimizer.state_dict(), iteration=iteration, random=random_states()
    )
    if not isinstance(out, (str, os.PathLike)):
        return torch.save(state, out)
    beside = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.{os.getpid()}")
    torch.save(state, beside)
    handle = os.open(beside, os.O_RDWR)
    os.fsync(handle)
    os.close(handle)
    os.replace(beside, out)
''',
    ),
    Alternative(
        problem="train",
        name="LambdaLR for the schedule, and its own loop",
        function="train",
        source='''\
def train(model, tokens, config, *, resume=None):
    """The scheduler is made after loading and told where the run is."""
    seed_everything(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay)
    done = load_checkpoint(resume, model, optimizer) if resume else 0
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1.0
    names = ("max_lr", "min_lr", "warmup_steps", "cycle_steps", "cycle_mult")
    settings = {name: getattr(config, name) for name in names}
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: cosine_lr(s, **settings), last_epoch=done - 1)
    losses = []
    while done < config.steps:
        batch = get_batch(tokens, config.batch_size, config.context_length, next(model.parameters()).device)
        model.zero_grad(set_to_none=False)
        loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        done += 1
        losses.append(float(loss.detach()))
        if config.checkpoint_path and (done == config.steps or not done % config.checkpoint_interval):
            save_checkpoint(model, optimizer, done, config.checkpoint_path)
    return losses
''',
    ),
    Alternative(
        problem="train",
        name="a new optimizer after loading, its state put in through a checkpoint in memory",
        function="train",
        source='''\
def train(model, tokens, config, *, resume=None):
    """Foreach off, tensors of the losses read at the end."""
    def make():
        return torch.optim.AdamW(list(model.parameters()), weight_decay=config.weight_decay, lr=0.0, foreach=False)

    seed_everything(config.seed, rank=0)
    optimizer, start, losses = make(), 0, []
    if resume is not None:
        start = load_checkpoint(resume, model, optimizer)
    for step in range(config.steps):
        if step < start:
            continue
        x, y = get_batch(tokens, config.batch_size, config.context_length, next(model.parameters()).device)
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(x, y)
        loss.backward()
        lr = cosine_lr(
            step, max_lr=config.max_lr, min_lr=config.min_lr, warmup_steps=config.warmup_steps,
            cycle_steps=config.cycle_steps, cycle_mult=config.cycle_mult,
        )
        optimizer.param_groups[0].update(lr=lr)
        optimizer.step()
        losses.append(loss.detach())
        if config.checkpoint_path is None:
            continue
        if (step + 1) % config.checkpoint_interval == 0 or step + 1 == config.steps:
            save_checkpoint(model, optimizer, step + 1, config.checkpoint_path)
    return [loss.item() for loss in losses]
''',
    ),
]
