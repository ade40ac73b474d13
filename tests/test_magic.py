"""The notebook magic `%%ranks`: what a cell shows, what it keeps, and how a mistake in it reads."""

import re
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from autograder.lab import magic, ranks


class Shell:
    """A notebook: `cell` runs one and gives what it displayed and printed."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell, self.names = shell, shell.user_ns

    def __call__(self, text: str) -> None:
        assert self.shell.run_cell(text, store_history=True).success

    def cell(self, line: str, body: str) -> list:
        with capture_output() as captured:
            self.shell.run_cell_magic("ranks", line, body)
        assert captured.stderr == ""
        assert captured.stdout == ""
        return captured.outputs

    def text(self, line: str, body: str) -> str:
        return "\n".join(output.data["text/plain"] for output in self.cell(line, body))


@pytest.fixture
def notebook() -> Iterator[Shell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "autograder.lab.magic")
    yield Shell(shell)
    shell.reset()
    InteractiveShell.clear_instance()


def test_outputs_stand_side_by_side(notebook: Shell) -> None:
    (shown,) = notebook.cell("2", "print('<b> & rank', rank, 'of', world_size)\nprint(torch.ones(1))\n")
    assert shown.data["text/plain"] == (
        "rank 0 | <b> & rank 0 of 2\nrank 0 | tensor([1.])\nrank 1 | <b> & rank 1 of 2\nrank 1 | tensor([1.])"
    )
    page = shown.data["text/html"]
    assert "<b> & rank" not in page
    assert page.count("&lt;b&gt; &amp; rank") == 2
    assert page.count("<td") == 2
    assert page.count("<tr>") == 1


def test_a_cell_without_output_says_so(notebook: Shell) -> None:
    assert notebook.text("1", "x = 3\n") == "(no output)"


def test_a_lot_of_output_is_cut(notebook: Shell) -> None:
    (shown,) = notebook.cell("1", "print('x' * 100_000)\n")
    assert "bytes more" in shown.data["text/html"]


def test_values_and_events_are_saved(notebook: Shell) -> None:
    notebook.cell("3 --save run", "x = torch.tensor(rank + 1.)\ndist.all_reduce(x)\nresult = {'x': x}\n")
    run = notebook.names["run"]
    assert [v["x"].item() for v in run.values] == [6, 6, 6]
    assert [(e.op, e.where, e.code) for e in run.of(1)] == [("all_reduce", "cell:2", "dist.all_reduce(x)")]


def test_names_of_the_notebook_travel(notebook: Shell) -> None:
    notebook("import math\nimport torch\nimport torch.distributed as dist\nfrom threading import Lock\n")
    notebook("scale = 3\nunused = Lock()\nrank = 'mine'\n\ndef helper(x):\n    return scale * x + math.floor(1.5)\n")
    notebook("class Box:\n    def __init__(self, x):\n        self.x = helper(x)\n")
    body = "def twice(x):\n    return 2 * Box(x).x\nresult = [twice(10), math.pi > 3, str(rank)]\n"
    notebook.cell("1 --save run", body)
    assert notebook.names["run"].values == [[62, True, "0"]]


def test_a_notebook_s_function_is_named_with_its_line(notebook: Shell) -> None:
    notebook("import torch\nimport torch.distributed as dist\n\ndef mine(x):\n    dist.all_reduce(x)\n")
    notebook.cell("2 --save run", "mine(torch.ones(1))\n")
    (event,) = notebook.names["run"].of(0)
    assert event.where == "mine:5"
    assert event.code == "dist.all_reduce(x)"


def test_what_cannot_travel_is_a_plain_name_error(notebook: Shell) -> None:
    notebook("from threading import Lock\nlock = Lock()\n")
    text = notebook.text("1", "lock.acquire()\n")
    assert "NameError: name 'lock' is not defined" in text


def test_the_ledger_is_shown(notebook: Shell) -> None:
    body = "x = torch.ones(6)\nfor _ in range(2):\n    dist.all_reduce(x)\n"
    body += "if rank:\n    dist.send(x, 0)\nelse:\n    dist.recv(x, 1)\n"
    _, shown = notebook.cell("2 --ledger", body)
    lines = shown.data["text/plain"].splitlines()
    assert lines[0].split() == ["rank", "operator", "line", "calls", "elements", "bytes", "sent"]
    assert [re.split("  +", line) for line in lines[1:]] == [
        ["0", "all_reduce", "cell:3", "dist.all_reduce(x)", "2", "12", "48"],
        ["1", "all_reduce", "cell:3", "dist.all_reduce(x)", "2", "12", "48"],
        ["1", "send to 0", "cell:5", "dist.send(x, 0)", "1", "6", "24"],
    ]
    assert shown.data["text/html"].count("<tr>") == 4


def test_the_timeline_is_shown(notebook: Shell) -> None:
    body = "with span('work'):\n    pass\ndist.barrier()\n"
    _, shown = notebook.cell("2 --timeline", body)
    assert shown.data["image/svg+xml"].startswith("<svg")
    assert shown.data["text/plain"] == "timeline of 2 ranks, 4 events"


def test_an_error_reads_like_the_grader_s(notebook: Shell) -> None:
    (shown,) = notebook.cell("2", "print('before')\nif rank:\n    [1, 2][<7>]\n".replace("<7>", "7"))
    assert shown.data["text/plain"].endswith(
        "failed  rank 1 raised IndexError: list index out of range\n  your line  cell:3   [1, 2][7]"
    )
    assert "rank 0 | before" in shown.data["text/plain"]
    assert "Traceback" not in shown.data["text/plain"]
    assert "<pre" in shown.data["text/html"]


def test_an_error_in_a_notebook_s_function_shows_both_lines(notebook: Shell) -> None:
    notebook("def mine(x):\n    return x[9]\n")
    text = notebook.text("1", "mine([1])\n")
    assert "your line    mine:2   return x[9]" in text
    assert "called from  cell:1   mine([1])" in text


def test_a_deadlock_reads_like_the_grader_s(notebook: Shell) -> None:
    text = notebook.text("2 --ledger --timeline", "dist.send(torch.ones(1), 1 - rank)\n")
    assert text.startswith("deadlock  no rank could go on for 2.0 s\n")
    assert "rank 0   waits in send to 1  cell:1  its 1st message  dist.send(torch.ones(1), 1 - rank)" in text
    assert "both send before either receives" in text


def test_an_endless_loop_ends_at_the_time_limit(notebook: Shell) -> None:
    text = notebook.text("1 --timeout 0.5", "while True:\n    pass\n")
    assert text.startswith("timeout  the code was still running")
    assert re.search(r"your line  cell:[12]   (while True:|pass)", text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "%%ranks needs the number of ranks: %%ranks 4"),
        ("--ledger", "%%ranks needs the number of ranks"),
        ("two", "invalid int value: 'two'"),
        ("2 --legder", "%%ranks does not know --legder"),
        ("2 3", "%%ranks does not know 3"),
        ("2 --save", "--save: expected one argument"),
        ("2 --save 'not a name'", "--save needs a name, and 'not a name' is none"),
        ("0", "world_size must be at least 1, not 0"),
        ("2 --timeout soon", "--timeout: invalid float value: 'soon'"),
        ("2 'unbalanced", "No closing quotation"),
    ],
)
def test_a_wrong_line_is_explained(notebook: Shell, line: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        notebook.cell(line, "pass\n")
    assert message in str(caught.value)


def test_a_syntax_error_is_the_cell_s(notebook: Shell) -> None:
    with pytest.raises(SyntaxError) as caught:
        notebook.cell("2", "x = = 3\n")
    assert (caught.value.filename, caught.value.lineno) == ("cell", 1)


def test_a_run_does_not_travel() -> None:
    assert not magic._travels(ranks.run(lambda context: None, 1))
