"""One grading run: pytest, in this process, over the chosen suites, and its outcome as a `Report`."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autograder.grading import catalog, plugin
from autograder.grading.report import CheckResult, ModuleResult, ProblemResult, Report
from autograder.lab import agent_client
from autograder.suites.kit import Module


def grade_modules(
    modules: tuple[Module, ...],
    folder: Path,
    *,
    select: str | None = None,
    seed: int | None = None,
    backend: str = "gloo",
    extra: tuple[Path, ...] = (),
    stop_at_first: bool = False,
    on_start: Callable[[str, int, int], None] = lambda name, number, total: None,
    on_result: Callable[[CheckResult], None] = lambda result: None,
) -> Report:
    """Run the checks of these modules on a submission.

    Args:
        modules: in order.
        folder: the submission, see `Submission`.
        select: name of one problem or of one check; None for all.
        seed: for the random inputs; a new one by default.
        backend: "gloo" or "nccl".
        extra: further suite files (an instructor's hidden checks).
        stop_at_first: end after the first check that fails.
        on_start: called before each check with its name, its number and how many there are.
        on_result: called after each check.

    Raises:
        catalog.UnknownName: select names nothing.
    """
    agent_client.start()  # imports torch while pytest collects
    begin = time.monotonic()
    seed = plugin.new_seed() if seed is None else seed
    selection = _Selection(modules, select)
    started = iter(range(1, 10**9))
    grading = plugin.Grading(
        folder,
        seed,
        backend,
        on_start=lambda item: on_start(item.name.removeprefix("test_"), next(started), selection.count),
        on_result=on_result,
    )
    selection.grading = grading
    files = [str(catalog.suite_file(m)) for m in modules] + [str(f) for f in extra]
    options = [
        "-c",
        os.devnull,
        "--rootdir",
        str(catalog.SUITES),
        *("-p", "no:cacheprovider"),
        *("-p", "no:terminal"),
        *("-p", "no:unraisableexception"),  # it collects garbage ten times at the end: seconds, with torch loaded
        *("--capture", "no"),
        *("--import-mode", "importlib"),  # the hidden checks of all modules are in files of one name
    ]
    options += ["--maxfail", "1"] * stop_at_first
    code = pytest.main([*options, *files], plugins=[selection])
    if selection.error:
        raise selection.error
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(f"pytest ended with {code!r}")
    return _report(modules, grading, selection, time.monotonic() - begin)


class _Selection:
    """Hands pytest the grading and picks the checks."""

    def __init__(self, modules: tuple[Module, ...], select: str | None) -> None:
        self.modules, self.select = modules, select
        self.count = 0
        self.of: dict[tuple[str, str], tuple[int, float]] = {}  # (module, problem) -> number of checks, their weights
        self.error: Exception | None = None
        self.grading: plugin.Grading | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[plugin.KEY] = self.grading
        config.option.tbstyle = "native"  # of our own faults; pytest's long form takes as much time as a check

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            problem, _, weight, _ = item.get_closest_marker("check").args
            count, weights = self.of.get((item.module.MODULE.name, problem), (0, 0.0))
            self.of[item.module.MODULE.name, problem] = count + 1, weights + weight
        if self.select is not None:
            try:
                names = [i.name.removeprefix("test_") for i in items]
                catalog.find_problem(self.select, self.modules, names)
            except catalog.UnknownName as error:
                self.error = error
            items[:] = [
                i for i in items
                if self.select in (i.name.removeprefix("test_"), i.get_closest_marker("check").args[0])
            ]  # fmt: skip
        self.count = len(items)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo) -> None:
        self.error = self.error or excinfo.value

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.error = RuntimeError(f"a suite cannot be collected: {report.longreprtext}")


def _report(modules: tuple[Module, ...], grading: plugin.Grading, selection: _Selection, duration: float) -> Report:
    results = []
    for module in modules:
        problems = [
            ProblemResult(problem, grading.results[module.name, problem.name], selection.of[module.name, problem.name])
            for problem in module.problems
            if (module.name, problem.name) in grading.results
        ]
        if problems:
            results.append(ModuleResult(module, problems, grading.faults.get(module.name)))
    return Report(results, grading.seed, grading.backend, str(grading.folder), duration)
