"""What a student reads after a common mistake: the essential words, and nothing of the grader's own insides."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from autograder.grading import catalog, loading, session, terminal
from autograder.suites import test_01_collectives as suite

ROOT = Path(__file__).parents[1]
REFERENCE = (ROOT / "solutions/01_collectives/collectives.py").read_text()
MODULE = suite.MODULE
WAITS = "for work in dist.batch_isend_irecv(ops) if ops else []:"


def read_verdict(folder: Path, select: str) -> str:
    """Grade a folder and return what is printed, not wrapped, with one space for several."""
    report = session.grade_modules((catalog.find_module("01_collectives"),), folder, select=select, seed=7)
    console = Console(width=1000, file=io.StringIO(), highlight=False)
    terminal.show(report, console)
    text = "\n".join(" ".join(line.split()) for line in console.file.getvalue().splitlines())
    assert report.score < report.max_score
    assert not report.faults
    assert "/autograder/" not in text
    assert "Traceback" not in text
    return text


def verdict_on(folder: Path, text: str, select: str) -> str:
    file = folder / "01_collectives" / "collectives.py"
    file.parent.mkdir()
    file.write_text(text)
    return read_verdict(folder, select)


def changed(old: str, new: str) -> str:
    """The reference with one place changed."""
    assert REFERENCE.count(old) == 1
    return REFERENCE.replace(old, new)


def with_function(source: str) -> str:
    """The reference with a later definition that replaces an earlier one."""
    return f"{REFERENCE}\n\n{source}"


FILES = {  # mistake -> the file, what is checked, words that the verdict must have
    "syntax error": (
        changed("def broadcast(tensor: Tensor, src", "def broadcast(tensor: Tensor src"),
        "broadcast",
        ["01_collectives/collectives.py cannot be loaded: SyntaxError", "def broadcast(tensor: Tensor src"],
    ),
    "indentation error": (
        changed("    ops = [dist.P2POp", "      ops = [dist.P2POp"),
        "broadcast",
        ["collectives.py cannot be loaded: IndentationError: unexpected indent", "ops = [dist.P2POp"],
    ),
    "misspelt function": (
        changed("def broadcast(", "def brodcast("),
        "broadcast",
        ["collectives.py has no function `broadcast`; did you mean `brodcast`?"],
    ),
    "missing function": (
        "import torch\n",
        "accounting_fit",
        ["found collectives.py has no function `fit_alpha_beta`\n"],
    ),
    "import of a missing package": (
        f"import flash_attn\n{REFERENCE}",
        "broadcast",
        ["cannot be loaded: ModuleNotFoundError: No module named 'flash_attn'", "collectives.py:1 ", "numpy"],
    ),
    "too few parameters": (
        with_function("def broadcast(tensor, src):\n    pass\n"),
        "broadcast_values",
        ["broadcast() takes 2 positional arguments but 3 were given", "def broadcast(tensor, src):", "skeleton"],
    ),
    "exception in the function": (
        with_function("def broadcast(tensor, src, group=None):\n    print('src', src)\n    return tensor[99]\n"),
        "broadcast_values",
        ["raised IndexError: index 99 is out of bounds", "return tensor[99]", "printed", "src 1"],
    ),
    "a new tensor returned": (
        with_function(
            "def ring_all_reduce(tensor, group=None):\n"
            "    copy = tensor.clone()\n"
            "    recursive_doubling_all_reduce(copy, group)\n"
            "    return copy\n"
        ),
        "ring_all_reduce_values",
        ["nothing returned", "a tensor is returned on rank", "copy it into the one that was passed"],
    ),
    "another shape": (
        with_function(
            "_broadcast = broadcast\n\n\n"
            "def broadcast(tensor, src, group=None):\n"
            "    _broadcast(tensor, src, group)\n"
            "    tensor.resize_(1, 2)\n"
        ),
        "broadcast_values",
        ["tensor on rank 0: shape [4]", "found shape [1, 2]"],
    ),
    "another dtype": (
        with_function(
            "_gather = gather\n\n\n"
            "def gather(tensor, gather_list, dst, group=None):\n"
            "    _gather(tensor, gather_list, dst, group)\n"
            "    if gather_list:\n"
            "        gather_list[0] = gather_list[0].double()\n"
        ),
        "gather_values",
        ["the lists that were passed on rank 1", "holds other tensors", "copy_ into the one that is there"],
    ),
    "a list that is too short": (
        with_function(
            "def gather(tensor, gather_list, dst, group=None):\n    if gather_list:\n        gather_list.clear()\n"
        ),
        "gather_values",
        ["gather_list[0] on rank 1", "an entry of the list was replaced"],
    ),
    "None for a number": (
        with_function("def bytes_sent(op, nbytes, p):\n    2 * nbytes\n"),
        "accounting_bytes_sent",
        ["bytes_sent('all_reduce'", "found None", "without a `return`", "def bytes_sent(op, nbytes, p):"],
    ),
    "text for a number": (
        with_function("def bytes_sent(op, nbytes, p):\n    return str(nbytes)\n"),
        "accounting_bytes_sent",
        ["expected the number 0", "(text)"],
    ),
    "one number for two": (
        with_function("def fit_alpha_beta(nbytes, seconds):\n    return 1.5\n"),
        "accounting_fit",
        ["a tuple of 2 numbers", "found 1.5"],
    ),
    "a send that is not waited for": (
        changed(WAITS, "for work in dist.batch_isend_irecv(ops)[len(sends) :] if ops else []:"),
        "scatter_values",
        ["never waits for: send to ", "collectives.py:49", "call .wait() on each"],
    ),
    "a receive that is not waited for": (
        changed(WAITS, "for work in dist.batch_isend_irecv(ops)[: len(sends)] if ops else []:"),
        "broadcast_values",
        ["while this is under way: recv from ", "collectives.py:49", "tensor.copy_(landing)", "call .wait() first"],
    ),
    "both send first": (
        changed(
            f"{WAITS}\n        work.wait()",
            "for op in ops:\n        (dist.send if op.op is dist.isend else dist.recv)(op.tensor, op.peer, group)",
        ),
        "ring_reduce_scatter_values",
        [
            "deadlock each rank ends with its chunk of the sum",
            "rank 0 waits in send to 1 collectives.py:209 its 1st message exchange(",
            "both send before either receives",
        ],
    ),
    "one rank leaves early": (
        with_function(
            "def reduce(tensor, dst, group=None):\n"
            "    if dist.get_rank(group) == 0 and dist.get_world_size(group) > 1:\n"
            "        return\n"
            "    if dist.get_world_size(group) > 1:\n"
            "        dist.recv(tensor, group_src=0, group=group)\n"
        ),
        "reduce_values",
        ["deadlock", "rank 0 has returned", "rank 1 waits in recv from 0", "never sends what rank 1 waits for"],
    ),
    "a wrong peer": (
        with_function(
            "def gather(tensor, gather_list, dst, group=None):\n"
            "    p, rank = dist.get_world_size(group), dist.get_rank(group)\n"
            "    if rank != dst:\n"
            "        dist.send(tensor, (dst + 1) % p)\n"
            "    else:\n"
            "        for r in range(p):\n"
            "            gather_list[r].copy_(tensor)\n"
            "            if r != dst:\n"
            "                dist.recv(gather_list[r], r)\n"
        ),
        "gather_traffic",
        ["should not be the same as the rank", "dist.send(tensor, (dst + 1) % p)", "copied, not sent"],
    ),
    "peers that do not fit": (
        with_function(
            "def ring_all_gather(output, tensor, group=None):\n"
            "    p, rank = dist.get_world_size(group), dist.get_rank(group)\n"
            "    work = dist.isend(tensor, (rank + 1) % p)\n"
            "    dist.recv(torch.empty_like(tensor), (rank + 1) % p)\n"
            "    work.wait()\n"
        ),
        "ring_all_gather_traffic",
        [
            "rank 0 waits in recv from 1",
            "is the peer right?",
        ],
    ),
    "a built-in collective": (
        with_function("def ring_all_reduce(tensor, group=None):\n    dist.all_reduce(tensor, group=group)\n"),
        "ring_all_reduce_values",
        ["forbidden", "all_reduce is refused here: build it from send, recv", "dist.all_reduce(tensor, group=group)"],
    ),
    "a built-in collective in a try": (
        with_function(
            "def ring_all_reduce(tensor, group=None):\n"
            "    try:\n"
            "        dist.all_reduce(tensor, group=group)\n"
            "    except Exception:\n"
            "        recursive_doubling_all_reduce(tensor, group)\n"
        ),
        "ring_all_reduce_values",
        ["forbidden", "float32 of shape [4]", "all_reduce is refused here", "dist.all_reduce(tensor, group=group)"],
    ),
    "an endless loop": (
        with_function("def broadcast(tensor, src, group=None):\n    s = 1\n    while s < 4: s *= 1\n"),
        "broadcast_values",
        ["timeout", "still running after 1 s", "while s < 4: s *= 1", "a loop that never ends"],
    ),
    "an endless loop outside of any function": (
        f"{REFERENCE}\nwhile True: pass\n",
        "broadcast_values",
        ["timeout 01_collectives/collectives.py cannot be loaded", "while True:"],
    ),
    "much printing": (
        with_function(
            "def broadcast(tensor, src, group=None):\n"
            "    for step in range(100_000):\n"
            "        print('step', step)\n"
            "    raise ValueError('enough')\n"
        ),
        "broadcast_values",
        ["raised ValueError: enough", "MiB more than is kept", "step 6"],
    ),
    "an empty file": ("", "broadcast", ["01_collectives/collectives.py is empty"]),
}


@pytest.mark.parametrize("mistake", FILES)
def test_message(mistake, tmp_path, monkeypatch):
    text, select, words = FILES[mistake]
    if "endless" in mistake:
        monkeypatch.setattr(suite, "MODULE", dataclasses.replace(suite.MODULE, timeout=1.0))
        monkeypatch.setattr(catalog, "modules", lambda: (suite.MODULE,))
    verdict = verdict_on(tmp_path, text, select)
    for word in words:
        assert word in verdict, verdict
    assert len(verdict.splitlines()) < 25


def test_missing_function_is_told_once(tmp_path):
    verdict = verdict_on(tmp_path, REFERENCE.replace("def broadcast(", "def brodcast("), "broadcast")
    assert verdict.count("has no function") == 1
    assert "and 3 more: broadcast_strided, broadcast_subgroup, broadcast_tree" in verdict


def test_missing_file(tmp_path):
    (tmp_path / "01_collectives").mkdir()
    (tmp_path / "01_collectives" / "colectives.py").write_text(REFERENCE)
    verdict = read_verdict(tmp_path, "broadcast")
    assert "01_collectives/collectives.py is missing" in verdict
    assert "rename colectives.py to collectives.py" in verdict


def test_misspelt_module_folder(tmp_path):
    (tmp_path / "01_colectives").mkdir()
    verdict = read_verdict(tmp_path, "broadcast")
    assert "01_collectives/collectives.py is missing" in verdict
    assert "rename 01_colectives to 01_collectives" in verdict


def test_wrong_submission_folder(tmp_path):
    (tmp_path / "alice").mkdir()
    verdict = read_verdict(tmp_path, "broadcast")
    assert f"expected {tmp_path}/01_collectives/collectives.py" in verdict
    assert "--submission is to be the folder in which 01_collectives/ is" in verdict


def test_folder_for_a_file(tmp_path):
    (tmp_path / "01_collectives" / "collectives.py").mkdir(parents=True)
    assert "01_collectives/collectives.py is a folder, not a file" in read_verdict(tmp_path, "broadcast")


def test_link_for_a_file(tmp_path):
    (tmp_path / "01_collectives").mkdir()
    (tmp_path / "01_collectives" / "collectives.py").symlink_to(ROOT / "solutions/01_collectives/collectives.py")
    assert "01_collectives/collectives.py is a link" in read_verdict(tmp_path, "broadcast")


@pytest.mark.parametrize(("name", "near"), [("01_colectives", "01_collectives"), ("collective", "01_collectives")])
def test_misspelt_module(name, near):
    with pytest.raises(catalog.UnknownName, match=f"there is no module '{name}'. Did you mean {near}"):
        catalog.find_module(name)


def test_a_fault_of_the_grader_is_told_as_one(tmp_path):
    file = tmp_path / "more_checks.py"
    file.write_text(
        "from autograder.suites.kit import check\nfrom autograder.suites.test_01_collectives import MODULE\n\n\n"
        '@check("broadcast", "more")\ndef test_more():\n    assert MODULE.files == []\n'
    )
    module = catalog.find_module("01_collectives")
    report = session.grade_modules((module,), ROOT / "solutions", select="more", extra=(file,))
    (fault,) = report.faults
    assert fault.finding.title.startswith("the grader itself failed: AssertionError")
    assert 'more_checks.py", line 7, in test_more' in fault.finding.fact("traceback")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda text: b"\xef\xbb\xbf" + text.encode(), "def broadcast(tensor: Tensor"),
        (
            lambda text: b"# -*- coding: latin-1 -*-\n# \xe9\n" + text.encode("latin-1", "replace"),
            "def broadcast(tensor",
        ),
        (lambda text: b"# one page\x0c\n" + text.encode(), "def broadcast(tensor: Tensor"),
        (
            lambda text: f"{text}\n\nclass Tree:\n    def broadcast(self): ...\n".encode(),
            "def broadcast(tensor: Tensor",
        ),
        (lambda text: (text.replace("def broadcast(", "def tree(") + "\n\nbroadcast = tree\n").encode(), "def tree("),
        (lambda text: f"{text}\n\nif True:\n    def broadcast(again): ...\n".encode(), "def broadcast(again)"),
    ],
    ids=["byte-order mark", "latin-1", "form feed", "method of the same name", "another name", "under an if"],
)
def test_a_function_has_its_line_in_any_file_that_python_loads(change, line, tmp_path):
    file = tmp_path / MODULE.name / MODULE.files[0]
    file.parent.mkdir()
    file.write_bytes(change(REFERENCE))
    found = loading.load(MODULE, file)["broadcast"]
    number = int(found.split(":")[1].split()[0])
    assert file.read_bytes().split(b"\n")[number - 1].decode("latin-1").strip().startswith(line)
    assert found.split("   ")[1].startswith(line)
