"""The timeline: a picture that is well-formed and the same for the same run, and a trace file that viewers open."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autograder.lab import palette, ranks, timeline
from autograder.lab.ranks import Run, RunFailed

HERE = [str(Path(__file__).parent)]


def body(context):
    context.case("first <case>")
    tensor = torch.ones(3)
    with context.span("forward & backward <layer 1>"):
        tensor = tensor * 2
    other = context.rank ^ 1
    works = [dist.isend(tensor, other), dist.irecv(torch.ones(3), other)]
    for work in works:
        work.wait()
    dist.new_group([0, 1])
    dist.all_reduce(tensor)
    if context.rank == 0:
        dist.isend(tensor, other)
    elif context.rank == 1:
        dist.recv(tensor, other)


@pytest.fixture(scope="module")
def finished() -> Run:
    return ranks.run(body, 4, roots=HERE)


@pytest.fixture(scope="module")
def stuck() -> Run:
    def two_sends(context):
        dist.send(torch.ones(1), 1 - context.rank)

    with pytest.raises(RunFailed) as caught:
        ranks.run(two_sends, 2, roots=HERE, stall=0.5)
    return caught.value.run


def _texts(svg: str) -> set[str]:
    return {t for e in ElementTree.fromstring(svg).iter() for t in [(e.text or "").strip()] if t}


def test_the_picture_shows_each_rank() -> None:
    run = ranks.run(body, 2, roots=HERE)
    svg = timeline.svg(run.events, "Two <ranks> & a title")
    assert svg.startswith("<svg")
    texts = _texts(svg)
    assert {"rank 0", "rank 1", "Two <ranks> & a title", "milliseconds", "send", "recv", "collective"} <= texts
    assert palette.KIND["send"].lower() in svg.lower()


def test_the_same_events_give_the_same_picture(finished: Run) -> None:
    assert timeline.svg(finished.events) == timeline.svg(finished.events)
    assert {f"rank {r}" for r in range(4)} <= _texts(timeline.svg(finished.events))


def test_no_events_and_many_ranks_can_be_drawn(finished: Run) -> None:
    ElementTree.fromstring(timeline.svg([]))
    many = [replace(e, rank=r) for r in range(20) for e in finished.of(0)]
    assert {"rank 0", "rank 19"} <= _texts(timeline.svg(many))


def test_what_never_ended_is_marked(stuck: Run) -> None:
    svg = timeline.svg(stuck.events)
    assert palette.KIND["error"].lower() in svg.lower()
    assert "never ended" in _texts(svg)


def test_operations_under_way_together_have_lanes_of_their_own(finished: Run) -> None:
    mine = [e for e in finished.of(1) if e.op not in ("case", "new_group")]
    lanes = timeline._lanes(mine)
    spans = [(lanes[e.index], e.start, timeline._finish(e)) for e in mine]
    for number, (lane, start, _) in enumerate(spans):
        assert all(end <= start for other, _, end in spans[:number] if other == lane)


@pytest.mark.parametrize("which", ["finished", "stuck"])
def test_the_trace_file_is_valid(which: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(which)
    trace = json.loads(json.dumps(timeline.perfetto(run.events), allow_nan=False))
    events = trace["traceEvents"]
    assert {e["pid"] for e in events if e["ph"] == "M"} == set(range(run.world_size))
    for e in events:
        assert e["ph"] in ("M", "X", "s", "f")
        assert isinstance(e["pid"], int)
        if e["ph"] != "M":
            assert isinstance(e["ts"], float)
            assert isinstance(e["tid"], int)
        if e["ph"] == "X":
            assert e["dur"] >= 0
    flows = [{e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"]
    assert flows[0].keys() == flows[1].keys()
    if which == "finished":
        assert len(flows[0]) == 5
        assert any(e["name"] == "forward & backward <layer 1>" for e in events)
        sends = [e for e in events if e["ph"] == "X" and e["name"].startswith("send to")]
        assert {e["args"]["bytes"] for e in sends} == {12}
        assert all(e["args"]["line"].startswith("test_timeline.py:") for e in sends)
        for number, start in flows[0].items():
            assert {start["pid"], flows[1][number]["pid"]} in ({0, 1}, {2, 3})
            assert start["ts"] <= flows[1][number]["ts"]
