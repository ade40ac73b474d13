"""What several of the tests of the lab share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autograder.lab import agent_client


@pytest.fixture
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that nobody else writes to."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def nothing_remains(own_temp: Path) -> Iterator[None]:
    """After the test no process is left below the agent, none of an agent that was killed, and no temporary file."""
    agent_client.start()
    mark = agent_client._agent.mark
    yield
    now = agent_client._agent
    assert now is None or psutil.Process(now.process.pid).children(recursive=True) == []
    if now is None or now.mark != mark:
        assert not [p for p in psutil.process_iter() if _mark(p) == mark]
    assert list(own_temp.iterdir()) == []


def _mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(agent_client.MARK)
    except (psutil.Error, OSError):
        return None
