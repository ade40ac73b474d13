"""`autograder doctor`: what this machine has, what will be used, what is missing."""

import os
import platform
import shutil
import sys

from rich.console import Console
from rich.table import Table


def show(console: Console) -> int:
    """Print the examination; 0 when the checks can run here, 1 otherwise."""
    import torch
    import torch.distributed as dist

    from autograder.lab import ranks

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [
        (
            "python",
            platform.python_version(),
            "ok" if sys.version_info >= (3, 11) else "3.11 or newer is needed",
        ),
        ("torch", torch.__version__, "ok"),
        (
            "gloo",
            "yes" if dist.is_gloo_available() else "no",
            "ok" if dist.is_gloo_available() else "needed on a CPU",
        ),
        (
            "nccl",
            "yes" if dist.is_nccl_available() else "no",
            "usable" if gpus else "not usable: no GPU is visible",
        ),
        ("GPUs", str(gpus), ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) or "not needed"),
        ("cores", str(cores), "ok" if cores > 1 else "one core: checks take longer"),
        ("sandbox", shutil.which("bwrap") or "no bwrap", "only for grading other people's files"),
    ]
    try:
        run = ranks.run(_add, 2)
        rows.append(("2 ranks", "all_reduce gives " + str(run.values[0]), f"ok, {run.duration:.1f} s"))
    except ranks.RunFailed as failure:
        rows.append(("2 ranks", failure.status, failure.title))
    table = Table(box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    works = rows[-1][2].startswith("ok")
    console.print("The checks run here on gloo." if works else "The checks cannot run here.")
    return 0 if works else 1


def _add(context: object) -> float:
    import torch
    import torch.distributed as dist

    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()
