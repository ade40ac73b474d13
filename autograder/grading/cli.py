"""The command line: `autograder check`, `trace`, `release`, `doctor`."""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autograder.lab import agent_client

PASSED, LOST, USAGE = 0, 1, 2

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Grade and prepare the assignments of the course.",
)  # fmt: skip
console = Console(width=min(Console().width, 110), highlight=False)


def _usage(message: str) -> typer.Exit:
    print(f"autograder: {message}", file=sys.stderr)
    return typer.Exit(USAGE)


@app.command()
def check(
    modules: Annotated[list[str] | None, typer.Argument(help="Modules; all by default.")] = None,
    submission: Annotated[Path, typer.Option(help="Folder that holds module folders.")] = Path("assignments"),
    problem: Annotated[str | None, typer.Option("-k", help="Only this problem or check.")] = None,
    backend: Annotated[str, typer.Option(help="gloo or nccl.")] = "gloo",
    seed: Annotated[int | None, typer.Option(help="Repeat the random inputs of an earlier run.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Check again after each save.")] = False,
    hidden: Annotated[bool, typer.Option("--hidden", help="With the instructor's hidden checks.")] = False,
) -> None:
    """Grade a submission. Exit status 0: every point earned; 1: some lost; 2: usage."""
    if backend not in ("gloo", "nccl"):
        raise _usage(f"--backend is gloo or nccl, not {backend!r}")
    if not submission.is_dir():
        raise _usage(f"there is no folder {submission}: run this in the course's folder, or say --submission FOLDER")
    for file in (json_file, html_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise _usage(f"there is no folder {file.absolute().parent} to write {file.name} to")
    agent_client.start()  # it imports torch while this process does
    try:
        from autograder.grading import catalog

        chosen = tuple(catalog.find_module(name) for name in modules or []) or catalog.modules()
        extra = catalog.hidden_checks(chosen) if hidden else ()
        while True:
            report = _check_once(chosen, submission, problem, seed, backend, extra)
            if json_file:
                json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
            if html_file:
                from autograder.grading import page

                html_file.write_text(page.render(report))
                console.print(f"[dim]page: {html_file}[/]")
            if not watch:
                raise typer.Exit(PASSED if report.perfect else LOST)
            _wait_for_save(chosen, submission)
            console.rule(style="dim")
    except catalog.UnknownName as error:
        raise _usage(str(error)) from None


def _check_once(chosen, submission, problem, seed, backend, extra):
    from autograder.grading import session, terminal

    with console.status("starting") as status:
        report = session.grade_modules(
            chosen, submission, select=problem, seed=seed, backend=backend, extra=extra,
            on_start=lambda name, number, total: status.update(f"{number} / {total}  {name}"),
        )  # fmt: skip
    terminal.show(report, console)
    return report


def _wait_for_save(chosen, submission: Path) -> None:
    from autograder.grading.submission import Submission

    found = Submission(submission)
    paths = [found.path(module) for module in chosen]
    found.close()

    def saved() -> list[float]:
        return [p.stat().st_mtime if p.exists() else 0 for p in paths]

    before = saved()
    console.print("[dim]waiting for a save; Ctrl-C ends[/]")
    while saved() == before:
        time.sleep(0.1)


@app.command()
def release(
    check: Annotated[bool, typer.Option("--check", help="Only say whether assignments/ is up to date.")] = False,
) -> None:
    """Regenerate assignments/ from solutions/ (needs a checkout with solutions/)."""
    from autograder.grading import release as releasing

    raise typer.Exit(releasing.release(check=check))


@app.command()
def trace(
    module: Annotated[str, typer.Argument(help="Module.")],
    problem: Annotated[str, typer.Argument(help="Problem or check.")],
    submission: Annotated[Path, typer.Option(help="Folder that holds module folders.")] = Path("assignments"),
    out: Annotated[Path, typer.Option(help="Folder for trace.svg and trace.json.")] = Path(),
    seed: Annotated[int | None, typer.Option(help="Repeat the random inputs of an earlier run.")] = None,
) -> None:
    """Run one problem's checks and draw what the ranks did: trace.svg, and trace.json for ui.perfetto.dev."""
    from autograder.grading import catalog, session
    from autograder.lab import timeline

    if not submission.is_dir():
        raise _usage(f"there is no folder {submission}")
    if not out.is_dir():
        raise _usage(f"there is no folder {out} to write trace.svg and trace.json to")
    try:
        chosen = (catalog.find_module(module),)
        report = session.grade_modules(chosen, submission, select=problem, seed=seed)
    except catalog.UnknownName as error:
        raise _usage(str(error)) from None
    check = next(c for m in report.modules for p in m.problems for c in p.checks)
    run = check.run
    if run is None or all(e.op == "case" for e in run.events):
        console.print(f"{check.name} recorded nothing: {check.message or 'it runs no ranks'}")
        raise typer.Exit(LOST)
    (out / "trace.svg").write_text(timeline.svg(run.events))
    (out / "trace.json").write_text(json.dumps(timeline.perfetto(run.events)))
    console.print(f"{check.name}: {check.status}, {run.world_size} ranks, {len(run.events)} events")
    console.print(f"picture: {out / 'trace.svg'}\ntrace:   {out / 'trace.json'} (open it at https://ui.perfetto.dev)")


@app.command()
def doctor() -> None:
    """Say what is installed, what will be used and what is missing."""
    from autograder.grading import doctor as examination

    raise typer.Exit(examination.show(console))


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    finally:
        gc.freeze()  # or the interpreter takes a second to end: it would look at every object that torch has made


if __name__ == "__main__":
    main()
