"""An engine that dies is an error of every game that waits; an owner that dies leaves no engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed: use make test-vllm")

import tiny
from owner import all_gone

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def owner(request: pytest.FixtureRequest, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "owner.py"), str(folder), request.param]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    yield process
    process.kill()
    process.communicate()


def facts(process: subprocess.Popen[str]) -> dict[str, list[int]]:
    """The next line of facts; the engine writes lines of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("the owner ended without a word")


@pytest.mark.parametrize("owner", ["lose"], indirect=True)
def test_H2_every_waiting_game_hears_that_the_engine_died(owner: subprocess.Popen[str]) -> None:
    pids = facts(owner)["pids"]
    assert pids
    assert facts(owner) == {
        "told": ["EngineLost", "EngineLost"],
        "late": True,
        "alive": False,
    }
    assert owner.wait(240) == 0
    assert all_gone(pids, 120.0)


@pytest.mark.parametrize(
    ("owner", "processes"), [("wait", 1), ("wait_wide", 3)], indirect=["owner"]
)
def test_H3_an_owner_that_is_killed_leaves_no_engine(
    owner: subprocess.Popen[str], processes: int
) -> None:
    pids = facts(owner)["pids"]
    assert len(pids) >= processes
    assert not all_gone(pids, 0.0)
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    assert all_gone(pids, 120.0)
