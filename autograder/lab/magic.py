"""The notebook magic `%%ranks`: run a cell on ranks and show each rank's output side by side.

    %load_ext autograder.lab.magic

    %%ranks 4 --ledger
    x = torch.arange(4.) + rank
    dist.all_reduce(x)
    print(x)

In the cell, `torch`, `dist`, `rank`, `world_size` and `span` (a context manager that marks work in the timeline) are
there, and so are the notebook's own functions and plain values that the cell uses. What the cell leaves in `result`
comes back with `--save NAME` as `NAME.values[rank]`; `NAME.events` are the events of all ranks. An error or a deadlock
is shown as the autograder would show it.
"""

import argparse
import html
import linecache
import os
import shlex
import tempfile
import types
from collections import defaultdict
from pathlib import Path

from autograder.lab import agent_client, palette, ranks, timeline
from autograder.lab.findings import fact_lines
from autograder.lab.ledger import Event

CELL = "cell"  # the "file name" of a cell's code in messages: cell:3 is its third line
# How the names of other cells' "files" begin, in IPython and in Jupyter.
CELLS = ("<ipython-input", str(Path(tempfile.gettempdir(), f"ipykernel_{os.getpid()}")))


def load_ipython_extension(ipython) -> None:
    """Register the magic and start the agent, so that the first cell need not wait for it."""
    agent_client.start()
    ipython.register_magic_function(lambda line, cell: _magic(ipython, line, cell), "cell", "ranks")


def _arguments(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser("%%ranks", exit_on_error=False, add_help=False)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--ledger", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--save", metavar="NAME")
    parser.add_argument("--timeout", type=float, default=ranks.TIMEOUT)
    try:
        options, unknown = parser.parse_known_args(shlex.split(line))
    except (argparse.ArgumentError, ValueError) as error:
        raise ValueError(f"%%ranks: {error}") from None
    except SystemExit:
        raise ValueError("%%ranks needs the number of ranks: %%ranks 4 [--ledger] [--timeline] [--save NAME]") from None
    if options.save is not None and not options.save.isidentifier():
        raise ValueError(f"%%ranks: --save needs a name, and {options.save!r} is none")
    if unknown:
        raise ValueError(f"%%ranks does not know {' '.join(unknown)}")
    return options


def _magic(ipython, line: str, cell: str) -> None:
    from IPython.display import display

    options = _arguments(line)
    code = compile(cell, CELL, "exec")
    used = {n: ipython.user_ns[n] for n in _names(code) if n in ipython.user_ns and _travels(ipython.user_ns[n])}
    folder = str(Path.cwd())
    _remember(cell)
    run = ranks.run(
        run_cell,
        options.world_size,
        cell,
        used,
        folder,
        timeout=options.timeout,
        roots=[CELL, folder, *CELLS],
        check=False,
    )
    if options.save:
        ipython.user_ns[options.save] = run
    display(Outputs(run))
    if run.outcome == "done":
        if options.ledger:
            display(Ledger(run))
        if options.timeline:
            display(Picture(run))


def run_cell(context: ranks.rank_files.RankContext, cell: str, used: dict, folder: str) -> object:
    """On a rank: execute the cell's text. Returns what it leaves in `result`."""
    import torch
    import torch.distributed as dist

    ranks.rank_files.import_from(Path(folder))
    _remember(cell)
    namespace = used | {
        "torch": torch, "dist": dist, "rank": context.rank, "world_size": context.world_size, "span": context.span,
        "__name__": "__main__",
    }  # fmt: skip
    exec(compile(cell, CELL, "exec"), namespace)  # the cell is the notebook's own code
    return namespace.get("result")


def _remember(cell: str) -> None:
    """Let tracebacks and reports find the text of the cell's lines."""
    linecache.cache[CELL] = (len(cell), None, cell.splitlines(keepends=True), CELL)


def _names(code: types.CodeType) -> set[str]:
    """All names that a piece of code and the functions in it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _travels(value: object) -> bool:
    import cloudpickle

    if isinstance(value, types.ModuleType | ranks.Run):
        return isinstance(value, types.ModuleType)
    try:
        return len(cloudpickle.dumps(value)) < 2**26
    except Exception:
        return False


# ------------------------------------------------------------------------------------------- what a cell displays

STYLE = f"font-family: monospace; font-size: 12px; color: {palette.INK}; text-align: left; vertical-align: top;"


class Outputs:
    """Each rank's output side by side, or why the run failed."""

    def __init__(self, run: ranks.Run) -> None:
        self.run = run

    def _failure(self) -> str | None:
        if self.run.outcome == "done":
            return None
        from autograder.lab import diagnosis

        status, title, facts = diagnosis.explain(self.run)
        facts = [(label, text) for label, text in facts if label != "printed"]
        return "\n".join([f"{status}  {title}", *fact_lines(facts)])

    def __repr__(self) -> str:
        lines = []
        for rank, text in enumerate(self.run.output):
            lines += [f"rank {rank} | {line}" for line in text.splitlines()]
        return "\n".join([*lines, self._failure() or ""]).strip() or "(no output)"

    def _repr_html_(self) -> str:
        cells, failure = "", self._failure()
        if any(self.run.output):
            for rank, text in enumerate(self.run.output):
                color = palette.RANK[rank % len(palette.RANK)]
                more = f"\n... {self.run.dropped[rank]} bytes more" if self.run.dropped[rank] else ""
                box = f"{STYLE} border-top: 3px solid {color}; padding: 4px 12px 4px 4px; white-space: pre-wrap"
                cells += (
                    f'<td style="{box}">'
                    f'<b style="color: {color}">rank {rank}</b>\n{html.escape(text.rstrip() + more)}</td>'
                )
        table = f'<table style="border-collapse: collapse; margin: 0"><tr>{cells}</tr></table>' if cells else ""
        if failure:
            box = f"{STYLE} border-left: 4px solid {palette.KIND['error']}; padding: 4px 10px; margin: 6px 0"
            table += f'<pre style="{box}">{html.escape(failure)}</pre>'
        return table


class Ledger:
    """What each rank sent: one line per operator, line of code and peer, calls of the same kind added up."""

    COLUMNS = ("rank", "operator", "line", "calls", "elements", "bytes sent")

    def __init__(self, run: ranks.Run) -> None:
        self.rows = []
        groups: dict[tuple, list[Event]] = defaultdict(list)
        for e in run.events:
            if e.op == "send" or e.is_collective:
                groups[e.rank, str(e), f"{e.where}  {e.code}"[:60]].append(e)
        for (rank, operator, line), events in groups.items():
            self.rows.append(
                (rank, operator, line, len(events), sum(e.numel for e in events), sum(e.sent for e in events))
            )

    def __repr__(self) -> str:
        rows = [self.COLUMNS, *[tuple(map(str, row)) for row in self.rows]]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.COLUMNS))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        cell = "padding: 2px 12px 2px 4px; border: none;"
        head = "".join(f'<th style="{STYLE} {cell}">{c}</th>' for c in self.COLUMNS)
        body = ""
        for row in self.rows:
            color = palette.RANK[row[0] % len(palette.RANK)]
            values = [f'<b style="color: {color}">{row[0]}</b>', *[html.escape(str(v)) for v in row[1:3]]]
            values += [f"{v:,}" for v in row[3:]]
            body += "<tr>" + "".join(f'<td style="{STYLE} {cell}">{v}</td>' for v in values) + "</tr>"
        return f'<table style="border-collapse: collapse; margin: 4px 0"><tr>{head}</tr>{body}</table>'


class Picture:
    """The timeline of a run."""

    def __init__(self, run: ranks.Run) -> None:
        self.run = run

    def __repr__(self) -> str:
        return f"timeline of {self.run.world_size} ranks, {len(self.run.events)} events"

    def _repr_svg_(self) -> str:
        return timeline.svg(self.run.events)
