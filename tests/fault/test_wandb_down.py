"""W&B's own client against a service that is there and of no use: training does not notice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runs import ROOT

pytestmark = [pytest.mark.fault, pytest.mark.slow]

TRAINING = """
import json, sys
from pathlib import Path
from delta_belief_rl.obs.wandb_mirror import WandbMirror

mirror = WandbMirror("online", project="p", name="n", run_id="r", run_dir=Path(sys.argv[1]))
for step in range(3):
    mirror.log(step, {"x": 1.0})
mirror.finish()
told = {"failures": mirror.failures, "active": mirror.active}
Path(sys.argv[1], "told.json").write_text(json.dumps(told))
"""


@pytest.fixture(params=["never answers", "hangs up"])
def service(request: pytest.FixtureRequest) -> Iterator[tuple[int, list[socket.socket]]]:
    """Port of a service that takes connections, and those that it took."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # the server is closed
                while True:
                    connection, _ = server.accept()
                    taken.append(connection)
                    if request.param == "hangs up":
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], taken
        server.shutdown(socket.SHUT_RDWR)
    for connection in taken:
        connection.close()


def test_W2_a_service_that_is_down_is_one_counted_failure(
    tmp_path: Path, service: tuple[int, list[socket.socket]]
) -> None:
    port, taken = service
    environ = os.environ | {
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_INIT_TIMEOUT": "3",
        "WANDB_MODE": "online",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert json.loads((tmp_path / "told.json").read_text()) == {"failures": 1, "active": False}
    assert done.stderr.count("training goes on") == 1
    assert taken
