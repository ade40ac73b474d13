"""The pytest plugin: runs a suite's checks against a submission and turns each outcome into a `CheckResult`.

`autograder check` runs pytest with a `Grading` of its own (see `session`). Run by hand,
`pytest autograder/suites/test_01_collectives.py --submission solutions` gets one from the command line.
"""

import random
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autograder.lab.findings import Finding

KEY = pytest.StashKey["Grading"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("autograder")
    group.addoption("--submission", default="assignments", help="folder with module folders to be graded")
    group.addoption("--seed", type=int, default=None, help="repeats the random inputs of an earlier run")
    group.addoption("--backend", default="gloo", choices=["gloo", "nccl"])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check(problem, title, weight): a check of a problem of the course")
    if KEY not in config.stash:
        seed = config.getoption("--seed")
        config.stash[KEY] = Grading(
            Path(config.getoption("--submission")),
            new_seed() if seed is None else seed,
            config.getoption("--backend"),
        )


def pytest_report_header(config: pytest.Config) -> str:
    return f"autograder: submission {config.stash[KEY].folder}, --seed {config.stash[KEY].seed}"


def pytest_unconfigure(config: pytest.Config) -> None:
    if KEY in config.stash:
        config.stash[KEY].close()


def new_seed() -> int:
    return random.SystemRandom().randrange(10_000)


class Grading:
    """The settings of one grading run, what it has found, and the runner that its checks use.

    Args:
        folder: the submission.
        seed: for the random inputs.
        backend: "gloo" or "nccl".
        on_start, on_result: called with the check's name before it runs, with its `CheckResult` after.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        backend: str = "gloo",
        on_start: Callable = lambda item: None,
        on_result: Callable = lambda result: None,
    ) -> None:
        self.folder, self.seed, self.backend = folder, seed, backend
        self.on_start, self.on_result = on_start, on_result
        self.results: dict[tuple[str, str], list] = {}  # (module, problem) -> CheckResults
        self.faults: dict[str, Finding | None] = {}  # module -> what keeps all of it from being checked
        self.functions: dict[str, dict[str, str]] = {}  # module -> the functions in its file, each with its line
        self._files: dict[str, Path] = {}
        self._submission = None
        self.sizes: list[int] = []  # of the check that runs now, as is the last run
        self.run = None

    @property
    def submission(self):
        from autograder.grading.submission import Submission

        if self._submission is None:
            self._submission = Submission(self.folder)
        return self._submission

    def close(self) -> None:
        if self._submission is not None:
            self._submission.close()

    def file_of(self, module) -> Path:
        """The student's staged file, once it is known that it can be loaded. Raises the module's fault otherwise."""
        from autograder.grading import loading

        if module.name not in self.faults:
            self.faults[module.name] = None
            try:
                self._files[module.name] = self.submission.stage(module)
                self.functions[module.name] = loading.load(module, self._files[module.name])
            except Finding as fault:
                self.faults[module.name] = fault
        if self.faults[module.name] is not None:
            raise self.faults[module.name]
        return self._files[module.name]

    def record(self, item: pytest.Item, result) -> None:
        module, problem = item.module.MODULE, item.get_closest_marker("check").args[0]
        self.results.setdefault((module.name, problem), []).append(result)
        self.on_result(result)


def is_check(item: pytest.Item) -> bool:
    return item.get_closest_marker("check") is not None and hasattr(item.module, "MODULE")


@pytest.fixture
def ranks(request: pytest.FixtureRequest):
    """`ranks(fn, world_size, *args)`: run a function on ranks that can load the student's file; returns the `Run`.

    `ranks.definition(name)` is the line that defines one of the student's functions. A failure without a line of the
    student's gets the one of `of`, where that is given.
    """
    from autograder.grading import loading
    from autograder.lab import ranks as lab_ranks

    module, grading = request.module.MODULE, request.config.stash[KEY]
    file = grading.file_of(module)

    def run(fn: Callable, world_size: int, *args: object, of: str | None = None, **settings: object) -> lab_ranks.Run:
        grading.sizes.append(world_size)
        settings = {
            "timeout": module.timeout, "refuse": module.refuse, "refused_names": module.refused_names,
            "preload": module.preload, "backend": grading.backend,
        } | settings  # fmt: skip
        try:
            grading.run = lab_ranks.run(fn, world_size, *args, student=file, **settings)
        except lab_ranks.RunFailed as failure:
            grading.run = failure.run
            finding = loading.reworded(failure, file, grading.functions[module.name])
            if of and finding.status in ("failed", "crashed") and not finding.fact("your line"):
                finding.facts.append(("your line", run.definition(of)))
            raise finding from None
        return grading.run

    functions = grading.functions[module.name]
    run.definition = lambda function: functions.get(function, file.name)
    return run


@pytest.fixture
def rng(request: pytest.FixtureRequest):
    """A torch.Generator for random inputs: fresh every run, the same for the same --seed and check."""
    import torch

    seed = random.Random(f"{request.config.stash[KEY].seed}/{request.node.name}").getrandbits(48)
    return torch.Generator().manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if is_check(item):
        grading = item.config.stash[KEY]
        grading.sizes, grading.run = [], None
        grading.on_start(item)
        item.stash[STARTED] = time.monotonic()


STARTED = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if not is_check(item) or report.when == "teardown" or (report.when == "setup" and report.passed):
        return report
    from autograder.grading.report import CheckResult
    from autograder.lab import diagnosis
    from autograder.suites.kit import CheckFailed

    grading, module = item.config.stash[KEY], item.module.MODULE
    problem, title, weight, section = item.get_closest_marker("check").args
    finding = None
    if call.excinfo is not None:
        finding = call.excinfo.value
        if not isinstance(finding, Finding):
            text = f"the grader itself failed: {call.excinfo.exconly()}"
            finding = Finding("infrastructure", text, [("traceback", str(report.longrepr))])
        elif isinstance(finding, CheckFailed) and grading.run is not None:
            shown = diagnosis.printed(grading.run)
            finding.facts += [("printed", shown)] if shown else []
    section = section or module.problem(problem).section
    if getattr(finding, "status", "") == "deadlock" and module.waiting:
        section = module.waiting
    name = item.name.removeprefix("test_")
    result = CheckResult(
        name, title, weight, finding, time.monotonic() - item.stash[STARTED], sorted(set(grading.sizes)),
        _hints(grading, module, name, section), grading.run,
    )  # fmt: skip
    if isinstance(finding, Finding) and finding.status != "infrastructure":
        report.longrepr = result.message
    grading.record(item, result)
    return report


def _hints(grading: Grading, module, name: str, section: str) -> list[tuple[str, str]]:
    where = "" if str(grading.folder) == "assignments" else f" --submission {shlex.quote(str(grading.folder))}"
    return [
        ("again", f"autograder check {module.name} -k {name}{where} --seed {grading.seed}"),
        ("read", f'lectures/{module.name}.ipynb, "{section}"'),
    ]
