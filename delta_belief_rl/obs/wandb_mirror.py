"""A mirror of the metrics on Weights & Biases.

``metrics.jsonl`` is the record; this copy may fail. No error of the service or its client reaches
the run: it is counted, and said once.
"""

from __future__ import annotations

import atexit
import importlib
import netrc
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from delta_belief_rl.types import UserError

_PASS_AT_K = re.compile(r"pass@k/(\d+)")

FINISH_SECONDS = 60.0
"""How long the end of a run waits for the last upload."""


class WandbMode(StrEnum):
    """``auto`` mirrors when a key is there and stays silent otherwise."""

    AUTO = "auto"
    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


def parse_mode(text: str) -> WandbMode:
    """Read a mode's name.

    Raises:
        UserError: there is no such mode.
    """
    try:
        return WandbMode(text)
    except ValueError:
        raise UserError(
            f"W&B mode {text!r} is unknown; use one of {', '.join(WandbMode)}."
        ) from None


def has_key(environ: Mapping[str, str] | None = None) -> bool:
    """True when W&B can log in without asking: ``WANDB_API_KEY`` or an entry in netrc."""
    env = os.environ if environ is None else environ
    if env.get("WANDB_API_KEY"):
        return True
    path = Path(env.get("NETRC") or Path(env.get("HOME", "/nonexistent")) / ".netrc")
    try:
        hosts = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    base = env.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return base.split("//")[-1].split("/")[0].split(":")[0] in hosts


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class WandbMirror:
    """One W&B run that shadows ours under the same id; a resumed run goes on in the same curve.

    Attributes:
        mode: What is really done, after ``auto`` was decided.
        failures: Calls that did not get through.
    """

    def __init__(
        self,
        mode: str,
        *,
        project: str,
        name: str,
        run_id: str,
        run_dir: Path,
        config: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = _say,
    ) -> None:
        """Start the mirror; never fails for any reason but an unknown mode.

        Raises:
            UserError: there is no such mode.
        """
        self.failures = 0
        self.mode = self._decide(parse_mode(mode), say)
        self._say = say
        self._run: Any = None
        if self.mode is WandbMode.DISABLED:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run = self._guard(
            "start",
            lambda: importlib.import_module("wandb").init(
                mode=str(self.mode),
                project=project,
                name=name,
                id=run_id,
                resume="allow",
                dir=str(run_dir),
                # A resumed run may change its settings; the change is in the run's own events.
                config=dict(config or {}),
                allow_val_change=True,
            ),
        )
        if self._run is not None:
            atexit.register(self.finish)

    @staticmethod
    def _decide(mode: WandbMode, say: Callable[[str], None]) -> WandbMode:
        if mode in (WandbMode.AUTO, WandbMode.ONLINE) and not has_key():
            say(
                "W&B: no API key found (WANDB_API_KEY), nothing is mirrored; metrics.jsonl has all."
            )
            return WandbMode.DISABLED
        return WandbMode.ONLINE if mode is WandbMode.AUTO else mode

    @property
    def active(self) -> bool:
        """True while a run is open."""
        return self._run is not None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Mirror the metrics of a step; a failure is counted and forgotten.

        A pass@k curve among them is shown as the table ``pass@k/pass@k_table`` as well.
        """
        run = self._run
        if run is not None:
            self._guard("log", lambda: run.log({**metrics, **_tables(metrics)}, step=step))

    def finish(self) -> None:
        """Flush and close, at most once, waiting no longer than ``FINISH_SECONDS``."""
        run, self._run = self._run, None
        if run is None:
            return
        atexit.unregister(self.finish)
        # A thread, because the client has no deadline of its own for the last upload.
        closing = threading.Thread(target=self._guard, args=("finish", run.finish), daemon=True)
        closing.start()
        closing.join(FINISH_SECONDS)
        if closing.is_alive():
            self._count("finish", TimeoutError(f"no answer in {FINISH_SECONDS:.0f} s"))

    def last_step(self) -> int:
        """The last step that the open run has, -1 when it has none."""
        run = self._run
        if run is None:
            return -1
        return int(self._guard("read", lambda: run.step) or 0) - 1

    def _guard(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (
            Exception
        ) as error:  # the client raises anything, from network errors to its own bugs
            self._count(what, error)
            return None

    def _count(self, what: str, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            self._say(
                f"W&B: {what} failed ({type(error).__name__}: {error}); training goes on, "
                "metrics.jsonl has it all, further failures are only counted."
            )


def _tables(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that W&B shows best as a table: one row for each ``k`` of ``pass@k/<k>``."""
    found = [(_PASS_AT_K.fullmatch(name), value) for name, value in metrics.items()]
    rows = sorted((int(match[1]), value) for match, value in found if match)
    if not rows:
        return {}
    table = importlib.import_module("wandb").Table
    return {"pass@k/pass@k_table": table(columns=["k", "pass@k"], data=[list(r) for r in rows])}


def replay(records: Iterable[Mapping[str, Any]], mirror: WandbMirror) -> int:
    """Send the records of ``metrics.jsonl`` that the mirror does not have yet; returns how many.

    Steps are explicit, so doing it twice changes nothing.
    """
    newest = mirror.last_step()
    sent = 0
    for record in records:
        step = int(record["step"])
        if step > newest:
            mirror.log(
                step, {key: value for key, value in record.items() if key not in ("step", "run_id")}
            )
            sent += 1
    return sent
