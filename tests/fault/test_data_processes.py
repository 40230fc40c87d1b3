"""Processes that prepare data end with the one that wanted them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import born

pytestmark = pytest.mark.fault

SECONDS = 120.0
OWNER = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from delta_belief_rl.trainer.processes import data_processes, end_with_parent

if __name__ == "__main__":
    context = data_processes([])
    with ProcessPoolExecutor(2, mp_context=context, initializer=end_with_parent) as pool:
        print(*pool.map(who, range(2)), flush=True)
        time.sleep(600)
"""
WORK = """
def who(number):
    import os, time
    time.sleep(0.5)
    return os.getpid()
"""


def test_H3_a_pool_whose_owner_is_killed_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(WORK + OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert owner.stdout is not None
    workers = {int(pid): born(int(pid)) for pid in owner.stdout.readline().split()}
    assert workers
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate(timeout=SECONDS)
    limit = time.monotonic() + SECONDS
    while any(birth and born(pid) == birth for pid, birth in workers.items()):
        assert time.monotonic() < limit, "a process of the pool outlives its owner"
        time.sleep(0.05)
