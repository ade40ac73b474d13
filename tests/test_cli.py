"""The command line as it is used: exit statuses, report files, selections, watching."""

import html.parser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer import testing

from autograder.grading import catalog, cli, page, session
from autograder.lab.findings import STATUSES
from tests.mutants.m01_collectives import MUTANTS

pytestmark = pytest.mark.xdist_group("cli")  # one worker runs them all, so that they share what was graded once

ROOT = Path(__file__).parents[1]
MODULE = "01_collectives"
REFERENCE = (ROOT / "solutions" / MODULE / "collectives.py").read_text()
COMMAND = [sys.executable, "-m", "autograder.grading.cli"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "110"}


def autograder(*arguments: object) -> subprocess.CompletedProcess:
    """Run the command to its end in a process of its own; it never shows a traceback."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def called(monkeypatch, *arguments: object) -> testing.Result:
    """Call the command in this process, which has imported torch already."""
    monkeypatch.chdir(ROOT)
    return testing.CliRunner().invoke(cli.app, list(map(str, arguments)))


def submission(folder: Path, text: str) -> Path:
    """A submission whose collectives.py has this text."""
    file = folder / MODULE / "collectives.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return folder


def mutant(problem: str, name: str) -> str:
    return next(m for m in MUTANTS if m.problem == problem and name in m.name).apply(REFERENCE)


# One run of each serves several tests.


@pytest.fixture(scope="session")
def skeleton(tmp_path_factory):
    """The untouched skeleton, every problem: the process and its JSON report."""
    report = tmp_path_factory.mktemp("skeleton") / "report.json"
    done = autograder("check", MODULE, "--json", report)
    return done, json.loads(report.read_text())


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The reference, one problem: the process, its JSON report, its page."""
    folder = tmp_path_factory.mktemp("reference")
    files = folder / "report.json", folder / "page.html"
    arguments = "check", MODULE, "--submission", "solutions", "-k", "broadcast"
    done = autograder(*arguments, "--json", files[0], "--html", files[1])
    return done, json.loads(files[0].read_text()), files[1].read_text()


@pytest.fixture(scope="session")
def deadlocked(tmp_path_factory):
    """A mutant that hangs: the process, its JSON report, its page."""
    folder = tmp_path_factory.mktemp("deadlocked")
    text = mutant("ring_reduce_scatter", "blocking send before blocking recv")
    files = folder / "report.json", folder / "page.html"
    arguments = "check", MODULE, "--submission", submission(folder, text), "-k", "ring_reduce_scatter", "--seed", 5
    done = autograder(*arguments, "--json", files[0], "--html", files[1])
    return done, json.loads(files[0].read_text()), files[1].read_text()


# ---------------------------------------------------------------------------------------------- exit status, JSON


def test_reference_exits_with_0(reference):
    done, report, _ = reference
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["score"] == report["max_score"] == 10
    assert "10 / 10 points" in done.stdout


def test_skeleton_exits_with_1(skeleton):
    done, report = skeleton
    assert done.returncode == 1
    assert (report["score"], report["max_score"]) == (0, 100)
    checks = [c for p in report["modules"][0]["problems"] for c in p["checks"]]
    assert {(c["status"], c["message"]) for c in checks} == {("not_implemented", "not implemented yet")}
    assert done.stdout.count("not implemented yet") == 9
    assert "0 / 100 points" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "01_colectives"], "there is no module '01_colectives'. Did you mean 01_collectives?"),
        (["check", MODULE, "-k", "brodcast"], "there is no problem 'brodcast'. Did you mean broadcast?"),
        (["check", MODULE, "-k", "broadcast_tre"], "Did you mean broadcast_tree?"),
        (["check", MODULE, "--submission", "nowhere"], "there is no folder nowhere"),
        (["check", MODULE, "--backend", "mpi"], "--backend is gloo or nccl, not 'mpi'"),
        (["check", MODULE, "--json", "nowhere/report.json"], "nowhere to write report.json to"),
        (["check", "--sed", "3"], "--seed"),
        (["trace", MODULE, "brodcast"], "Did you mean broadcast?"),
        (["trace", MODULE, "broadcast", "--out", "nowhere"], "there is no folder nowhere"),
        (["chek"], "check"),
    ],
)
def test_wrong_use_exits_with_2(arguments, words, monkeypatch):
    done = called(monkeypatch, *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_wrong_use_ends_quietly():
    done = autograder("check", "01_colectives")
    assert done.returncode == 2
    assert done.stderr == (
        "autograder: there is no module '01_colectives'. Did you mean 01_collectives? There are: "
        f"{', '.join(m.name for m in catalog.modules())}.\n"
    )


def test_json_has_the_agreed_keys(skeleton, reference, deadlocked):
    for _, report in (skeleton, reference[:2], deadlocked[:2]):
        assert list(report) == [
            "course_version", "torch", "backend", "world_sizes", "seed", "score", "max_score", "duration_s", "modules",
        ]  # fmt: skip
        for module in report["modules"]:
            assert list(module) == ["module", "score", "max_score", "problems"]
            assert module["score"] == sum(p["points"] for p in module["problems"])
            for problem in module["problems"]:
                assert list(problem) == ["name", "title", "points", "max_points", "status", "checks"]
                assert problem["status"] in STATUSES
                for check in problem["checks"]:
                    assert list(check) == ["name", "status", "message", "duration_s"]
                    assert check["status"] in STATUSES
                    assert (check["message"] == "") == (check["status"] == "passed")
    assert reference[1]["world_sizes"] == [1, 2, 3, 4, 5]
    assert (reference[1]["backend"], reference[1]["modules"][0]["module"]) == ("gloo", MODULE)
    assert reference[1]["torch"].startswith("2.")
    assert deadlocked[1]["seed"] == 5


def test_deadlock_is_reported(deadlocked):
    done, report, _ = deadlocked
    problem = report["modules"][0]["problems"][0]
    assert done.returncode == 1
    assert (problem["name"], problem["status"], problem["points"]) == ("ring_reduce_scatter", "deadlock", 0)
    assert "waits in send to 1" in problem["checks"][0]["message"]


# ------------------------------------------------------------------------------------------------------- the page


class Page(html.parser.HTMLParser):
    """Checks that tags close in order; collects ids, references and text."""

    VOID = {"meta", "link", "br", "hr", "img"}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.references, self.tags, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name.split(":")[-1] in ("href", "src", "data", "action", "srcset"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_stands_alone(reference, deadlocked):
    for _, _, text in (reference, deadlocked):
        parsed = Page(text)
        assert len(parsed.ids) == len(set(parsed.ids))
        assert all(r.startswith("#") and r[1:] in parsed.ids for r in parsed.references)
        assert "@import" not in text
        assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parsed.tags}


def test_page_of_a_pass(reference):
    parsed = Page(reference[2])
    assert "10 / 10 points" in parsed.text
    assert "svg" not in dict(parsed.tags)
    assert [attrs for tag, attrs in parsed.tags if tag == "details"] == [{}]


def test_page_shows_failures_and_pictures(deadlocked):
    parsed = Page(deadlocked[2])
    assert [attrs for tag, attrs in parsed.tags if tag == "details"] == [{"open": None}]
    assert "waits in send to 1" in parsed.text
    assert "before it receives; post the receive first" in parsed.text
    assert [tag for tag, _ in parsed.tags].count("svg") == 4
    assert "never ended" in parsed.text


def test_page_escapes_what_the_student_wrote(tmp_path):
    source = "def reduce(tensor, dst, group=None):\n    print('<b>x</b>')\n    raise ValueError('<script>1</script>')\n"
    folder = submission(tmp_path / "<i>me", f"{REFERENCE}\n\n{source}")
    text = page.render(session.grade_modules((catalog.find_module(MODULE),), folder, select="reduce_subgroup"))
    assert "&lt;b&gt;x" in text
    assert "&lt;script&gt;1" in text
    assert not {"script", "b", "i"} & {tag for tag, _ in Page(text).tags}


# ------------------------------------------------------------------------------------- selections, seeds, folders


def test_k_selects_a_problem(reference):
    problems = reference[1]["modules"][0]["problems"]
    assert [p["name"] for p in problems] == ["broadcast"]
    assert [c["name"] for c in problems[0]["checks"]] == [
        "broadcast_values", "broadcast_strided", "broadcast_subgroup", "broadcast_tree",
    ]  # fmt: skip


def test_k_selects_a_check_and_the_folder_may_be_the_module_itself(tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    folder = ROOT / "solutions" / MODULE
    arguments = "check", "collectives", "-k", "accounting_fit", "--submission", folder, "--json", report
    assert called(monkeypatch, *arguments).exit_code == 0
    (problem,) = json.loads(report.read_text())["modules"][0]["problems"]
    assert [c["name"] for c in problem["checks"]] == ["accounting_fit"]
    assert problem["status"] == "passed"


def test_seed_repeats_the_inputs(tmp_path):
    folder = submission(tmp_path, f"{REFERENCE}\n\ndef broadcast(tensor, src, group=None):\n    tensor.zero_()\n")
    messages = []
    for seed in (3, 3, 4):
        report = session.grade_modules((catalog.find_module(MODULE),), folder, select="broadcast_tree", seed=seed)
        messages.append(report.modules[0].problems[0].checks[0].message)
    assert "expected" in messages[0]
    assert messages[0] == messages[1] != messages[2]
    assert "--seed 3" in messages[0]


# ----------------------------------------------------------------------------------------------------- the others


def test_trace_writes_picture_and_trace(tmp_path, monkeypatch):
    done = called(monkeypatch, "trace", MODULE, "broadcast_tree", "--submission", "solutions", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "broadcast_tree: passed, 5 ranks" in done.stdout
    assert (tmp_path / "trace.svg").read_text().startswith("<svg")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2, 3, 4}


def test_trace_without_messages(tmp_path, monkeypatch):
    done = called(monkeypatch, "trace", MODULE, "broadcast_tree", "--out", tmp_path)
    assert done.exit_code == 1
    assert "broadcast_tree recorded nothing: not implemented yet" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor():
    done = autograder("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all_reduce gives 2.0" in done.stdout
    assert "The checks run here on gloo." in done.stdout


def test_watch(tmp_path):
    folder = tmp_path / "assignments"
    shutil.copytree(ROOT / "assignments" / MODULE, folder / MODULE)
    output = tmp_path / "output.txt"
    arguments = ["check", MODULE, "-k", "accounting_fit", "--watch", "--submission", str(folder)]
    with output.open("w") as out:
        process = subprocess.Popen(
            [*COMMAND, *arguments], env=ENVIRONMENT, cwd=ROOT, stdout=out, stderr=out,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in a shell's background ignore it
        )  # fmt: skip
    try:
        wait_for(lambda: output.read_text().count("waiting for a save") == 1)
        assert "0 / 10 points" in output.read_text()
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        (folder / MODULE / "collectives.py").write_text(REFERENCE)
        saved = time.monotonic()
        wait_for(lambda: output.read_text().count("waiting for a save") == 2)
        assert time.monotonic() - saved < 20  # about a second on an idle machine
        assert "2 / 10 points" in output.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "Traceback" not in output.read_text()
        assert psutil.wait_procs(family, timeout=10)[1] == []
    finally:
        process.kill()
        process.wait()


def wait_for(condition, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.1)


GRADED_CELLS = f"""
import os, autograder
for folder in "solutions", "assignments":
    os.chdir("{ROOT}/" + folder + "/{MODULE}")
    score = autograder.grade("{MODULE}", "accounting", points=20)
    assert type(score) is float, type(score)
    print("SCORE", score)
"""


def test_graded_cell_of_a_worksheet():
    done = subprocess.run(
        [sys.executable, "-c", GRADED_CELLS], env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("SCORE")] == ["SCORE 20.0", "SCORE 0.0"]
    assert "  not implemented yet" in lines


def test_suite_is_plain_pytest(tmp_path):
    folder = submission(tmp_path, mutant("broadcast", "one after the other"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"autograder/suites/test_{MODULE}.py", "--submission", folder,
         "-k", "broadcast_tree or broadcast_subgroup"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "failed  p-1 messages, in at most log2 p rounds  (world size 4)" in done.stdout
    assert "  expected   at most 2 rounds on 4 ranks" in done.stdout
    assert "Traceback" not in done.stdout
    assert "def test_broadcast_tree" not in done.stdout
