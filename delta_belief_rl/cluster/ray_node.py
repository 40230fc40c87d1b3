"""Ray's processes of one machine, by ``ray start``, and the certainty that none of them is left.

``ray stop`` is never used: it finds processes by their names and would end those of others, too.
What is started here carries a mark in its environment, and the reaper ends all of it.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from delta_belief_rl.cluster.network import address_of, communication_env
from delta_belief_rl.cluster.ray_env import EVERY_START, OWN_HEAD, is_short
from delta_belief_rl.cluster.reaper import MARK, Reaper
from delta_belief_rl.cluster.scratch import PREFIX, clear_abandoned, note_owner
from delta_belief_rl.cluster.stacks import FOLDER
from delta_belief_rl.types import UserError

STOP_SECONDS = 10.0
"""What Ray has for ending in order."""

_ADDRESS = "ray_current_cluster"
"""The file in which ``ray start`` leaves the cluster's address as soon as its head has started."""

_STARTED = "Ray runtime started."
"""What ``ray start`` says when it has started, on every machine."""

_OTHERS = frozenset({"RAY_ADDRESS", "RAY_AUTH_TOKEN"})
"""Variables that would lead to another cluster."""


class RayNode:
    """Ray on this machine; made by ``ray_node``.

    Attributes:
        environment: Of everything that belongs to this start on this machine.
    """

    def __init__(self, folder: Path, environment: dict[str, str], address: str | None) -> None:
        self.environment = environment
        self._folder, self._address = folder, address
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, name: str, token: str, cpus: int, gpus: int | None, head: str | None = None
    ) -> None:
        """Start the head, or join one.

        Args:
            name: Of this machine in the cluster.
            token: That the machines of the cluster show each other.
            cpus: Logical CPUs: workers that may be here.
            gpus: None for those that Ray finds.
            head: Address of the head to join.
        """
        secret = self._folder / "token"
        secret.touch(0o600)
        secret.write_text(token, encoding="utf-8")
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(secret)}
        words = [f"--temp-dir={self._folder}", f"--node-name={name}", f"--num-cpus={cpus}"]
        words += [] if gpus is None else [f"--num-gpus={gpus}"]
        words += [] if self._address is None else [f"--node-ip-address={self._address}"]
        words += [f"--address={head}"] if head else _head_words()
        # Ports that the kernel gives: two starts on one machine do not meet.
        words += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
        with (self._folder / "ray_start.log").open("wb") as log:
            # Its own session: a signal for the group of the command is none for Ray.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "ray.scripts.scripts", "start", "--block", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def address(self) -> str | None:
        """Host and port of the cluster's head, once it has started here."""
        file = self._folder / _ADDRESS
        return (file.read_text(encoding="utf-8").strip() or None) if file.exists() else None

    def has_started(self) -> bool:
        """Whether Ray has started here, be it the head or not."""
        return _STARTED in self._log()

    def is_gone(self) -> bool:
        """Whether Ray has ended here by itself."""
        return self._process is not None and self._process.poll() is not None

    def last_words(self) -> str:
        """The last line that Ray has said."""
        return (self._log().strip().splitlines() or ["nothing"])[-1].strip()[:300]

    def _log(self) -> str:
        return (self._folder / "ray_start.log").read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Let Ray end in order; what is left after that is the reaper's."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def ray_node(interface: str | None, environ: Mapping[str, str] = os.environ) -> Iterator[RayNode]:
    """A machine on which nothing is left after the block, however this process ends.

    Args:
        interface: Network interface of Ray, NCCL and gloo; None leaves each its own choice.
        environ: Of this process.

    Raises:
        UserError: There is no such interface, or no folder for Ray.
    """
    own = dict(communication_env(interface)) if interface else {}
    address = address_of(interface) if interface else None
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    folder = _scratch(environ)
    reaper = Reaper(mark, [folder])
    try:
        note_owner(folder, mark)
        stacks = folder / "stacks"
        stacks.mkdir()
        own |= {MARK: mark, FOLDER: str(stacks)}
        kept = {name: value for name, value in environ.items() if name not in _OTHERS}
        node = RayNode(folder, {**EVERY_START, **OWN_HEAD, **kept, **own}, address)
        try:
            yield node
        finally:
            node.stop()
    finally:
        reaper.finish()


def _head_words() -> list[str]:
    words = ["--head", "--port=0", "--include-dashboard=false"]
    if find_spec("grpc") is not None:
        # Where Ray's client can be served it is, at a fixed port unless one is named.
        with socket.socket() as probe:
            probe.bind(("", 0))
            words.append(f"--ray-client-server-port={probe.getsockname()[1]}")
    return words


def _scratch(environ: Mapping[str, str]) -> Path:
    """A new folder whose path is short enough for Ray's sockets."""
    wanted = [environ.get(name, "") for name in ("RAY_TMPDIR", "SLURM_TMPDIR", "TMPDIR")]
    for place in (*wanted, "/tmp", "/var/tmp", "/dev/shm"):
        if not os.path.isabs(place) or not is_short(os.path.join(place, f"{PREFIX}12345678")):
            continue
        try:
            clear_abandoned(Path(place))
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError:
            continue
    raise UserError(
        "No folder for Ray can be made in any of RAY_TMPDIR, SLURM_TMPDIR, TMPDIR, /tmp, /var/tmp "
        "and /dev/shm: set TMPDIR to a writable folder with a short path."
    )
