"""Tiny runs of ``train.py``: their settings, a run inside this process, and what to compare.

A run inside this process goes through everything that a real one does but Ray: the workers' own
classes answer the calls that Ray would carry. Every such call, and every write of a file, is a
point at which the run can be cut off.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import yaml
from ray.exceptions import ActorDiedError

from delta_belief_rl.cluster import app, pools
from delta_belief_rl.envs.worlds.table import DATA_DIR, load_world
from delta_belief_rl.obs.jsonl import MetricsLog, read_records
from delta_belief_rl.trainer import checkpoint, final, loop, pending, persist, validation
from delta_belief_rl.trainer.actor import parse_state
from delta_belief_rl.trainer.background import Background

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4
STEPS_PER_EPOCH = 2


def write_world(path: Path, sizes: tuple[int, int, int] = (8, 3, 3)) -> Path:
    """The first things of each split of the packaged world, as a world of their own."""
    world = load_world("everyday")
    splits = ("train", "val", "test")
    kept = [world.splits[name][:size] for name, size in zip(splits, sizes, strict=True)]
    document = yaml.load((DATA_DIR / "everyday.yaml").read_text(encoding="utf-8"), yaml.BaseLoader)
    document["name"] = "tiny"
    things = {name for names in kept for name in names}
    document["things"] = {k: v for k, v in document["things"].items() if k in things}
    document["splits"] = {"val": list(kept[1]), "test": list(kept[2])}
    path.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    return path


def words(out: Path, world: Path, *more: str) -> list[str]:
    """Command line of a run of four steps, two an epoch, that tests and saves often."""
    adapter = "{name: actor_lora, r: 4, alpha: 4, target_modules: all-linear}"
    return [
        "experiment=quickstart",
        f"data.world={world}",
        f"trainer.output_dir={out}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.rollout_freq=1",
        f"trainer.test_freq={STEPS_PER_EPOCH}",
        "trainer.test_games=1",
        "trainer.resume_mode=auto",
        "multi_turn.max_turns={train: 3, val: 3}",
        "multi_turn.train.n=4",
        "multi_turn.val.n=2",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.num_threads=1",
        "actor_rollout_ref.model.lora_rank=4",
        f"actor_rollout_ref.model.adapters=[{adapter}]",
        *more,
    ]


# --- a run inside this process ------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code may catch it."""


@dataclass
class Trace:
    """What a run does, in order, and where it is cut off.

    Attributes:
        names: e.g. ``"EngineWorker.sync"``, ``"checkpoint.save"``, ``"checkpoint.save done"``.
        kill_at: Number of the point that raises ``Killed``; -1 for none.
        deaths: Calls that end the worker that gets them, as numbers from 0 of all calls by name,
            e.g. ``{"ActorWorker.update": [1, 2]}``.
        hangs: Calls after which the worker that gets them says nothing more.
        threads: Checkpoints are written in a thread, as in a real run; else where they begin, so
            that what happens is in one order.
    """

    names: list[str] = field(default_factory=list)
    kill_at: int = -1
    deaths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    hangs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    threads: bool = False

    @property
    def killed(self) -> bool:
        return 0 <= self.kill_at < len(self.names)

    def point(self, name: str) -> None:
        self.names.append(name)
        if self.killed:  # and whatever still runs does nothing more
            raise Killed(name)

    def falls_on(self, faults: Mapping[str, Sequence[int]], name: str) -> bool:
        """Whether a fault is meant for the call that was told last."""
        return self.names.count(name) - 1 in faults.get(name, ())

    def order(self, *wanted: str) -> list[str]:
        """The names among ``wanted``, in order; a row of equal ones counts as one."""
        return [name for name, _ in groupby(name for name in self.names if name in wanted)]


class _Method:
    def __init__(self, handle: _Handle, owner: Any, name: str, trace: Trace) -> None:
        self._handle, self._call, self._trace = handle, getattr(owner, name), trace
        self._label = f"{type(owner).__name__.removeprefix('Modified')}.{name}"

    async def remote(self, *args: Any) -> Any:
        await asyncio.sleep(0)
        self._trace.point(self._label)
        handle, trace = self._handle, self._trace
        handle.dead |= trace.falls_on(trace.deaths, self._label)
        handle.silent |= trace.falls_on(trace.hangs, self._label)
        if handle.silent and not handle.dead:
            await asyncio.sleep(3600)
        if handle.dead:
            raise ActorDiedError
        return self._call(*args)


class _Handle:
    """A worker of this process with the face of a Ray actor's handle."""

    def __init__(self, worker: Any, trace: Trace) -> None:
        self._worker, self._trace = worker, trace
        self.dead = self.silent = False

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, self._worker, name, self._trace)

    def end(self) -> None:
        """What ``ray.kill`` does."""
        self.dead = True


class _Bound:
    """An actor class bound to its place."""

    def __init__(self, actor_class: Any, trace: Trace) -> None:
        self._class, self._trace = actor_class.__ray_metadata__.modified_class, trace

    def remote(self, *args: Any) -> _Handle:
        return _Handle(self._class(*args), self._trace)


@contextmanager
def without_ray(trace: Trace) -> Iterator[None]:
    """``cluster.app`` with workers in this process, every point told to ``trace``."""

    def place(_name: str, worker: Any, places: Sequence[Any], *_more: Any) -> list[_Bound]:
        return [_Bound(worker, trace) for _ in places]

    def wait(_name: str, calls: list[Any], _deadline: float) -> list[Any]:
        async def all_of() -> list[Any]:
            return [await call for call in calls]

        return asyncio.run(all_of())

    @contextmanager
    def no_session(*_args: Any) -> Iterator[None]:
        yield

    async def at_once(_saver: Background, write: Callable[[], None]) -> None:
        write()

    def tap(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        label = f"{getattr(owner, '__name__', '').rpartition('.')[2]}.{name}"

        def tapped(*args: Any, **kwargs: Any) -> Any:
            trace.point(label)
            result = real(*args, **kwargs)
            trace.point(f"{label} done")
            return result

        patch.setattr(owner, name, tapped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "_place", place)
        patch.setattr(pools, "_wait", wait)
        patch.setattr(app, "ray_session", no_session)
        patch.setattr(ray, "kill", _Handle.end)
        patch.setattr(app, "exit_on_sigterm", lambda: None)
        if not trace.threads:
            patch.setattr(Background, "start", at_once)
        tap(checkpoint, "save")
        tap(pending, "keep")
        tap(persist, "restore")
        tap(MetricsLog, "append")
        for module in (loop, validation, final):
            tap(module, "write_groups")
        yield


def play(command: list[str], kill_at: int = -1, trace: Trace | None = None) -> tuple[int, Trace]:
    """Run ``train.py`` in this process; the exit status, and what it did.

    Args:
        command: Its arguments.
        kill_at: Point at which to cut it off.
        trace: Filled in, for a run that ends in an error.

    Raises:
        Killed: At the point ``kill_at``.
    """
    import train

    trace = trace or Trace(kill_at=kill_at)
    try:
        with without_ray(trace):
            status = train.main(command)
    finally:
        if trace.killed:
            # A task that dies tells its own story; here it is always this one.
            raise Killed
    return status, trace


# --- what a run leaves --------------------------------------------------------------------------


def metrics_of(out: Path, *more: str) -> list[dict[str, Any]]:
    """Records of a run without what depends on the clock or the run's name.

    Args:
        out: The run's folder.
        more: Beginnings of further names to leave out.
    """
    apart = ("timing_s/", "timing_per_token_ms/", "perf/", "run_id", *more)
    return [
        {name: value for name, value in record.items() if not name.startswith(apart)}
        for record in read_records(out / "metrics.jsonl")
    ]


def games_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    """All files of games, by path, without the run's name."""
    return {
        str(path.relative_to(out)): [{**row, "run_id": ""} for row in read_records(path)]
        for folder in ("rollout", "validation", "test")
        for path in sorted((out / folder).glob("[!.]*.jsonl"))
    }


def state_of(out: Path) -> dict[str, Any]:
    """The latest checkpoint of a run: adapter, optimizer, step."""
    saved = checkpoint.find_latest(out / "checkpoints")
    assert saved is not None
    state = parse_state(checkpoint.load(saved.path).read(persist.ACTOR_FILE))
    return {"run": saved.meta["state"], **state}


def tested_of(out: Path) -> tuple[Any, Any]:
    """The two files of the final test, without the run's name."""
    summary = json.loads((out / "test" / "summary.json").read_text())
    return json.loads((out / "final.json").read_text()), {**summary, "run_id": ""}


def assert_same_run(one: Path, other: Path, *apart: str) -> None:
    """Two folders hold the same run: records, games, weights, tests, bit for bit.

    Args:
        one: A run's folder.
        other: Another one's.
        apart: Beginnings of metrics' names that may differ.
    """
    records = metrics_of(one, *apart), metrics_of(other, *apart)
    steps = [[record["step"] for record in part] for part in records]
    assert steps[0] == steps[1], f"steps {steps[0]} and {steps[1]}"
    for left, right in zip(*records, strict=True):
        odd = {k: (left.get(k), right.get(k)) for k in left | right if left.get(k) != right.get(k)}
        assert not odd, f"records of step {left['step']} differ: {odd}"
    games = games_of(one), games_of(other)
    assert games[0].keys() == games[1].keys(), f"files {list(games[0])} and {list(games[1])}"
    odd_files = [name for name, rows in games[0].items() if rows != games[1][name]]
    assert not odd_files, f"games of {odd_files} differ"
    assert_same_state(state_of(one), state_of(other))
    assert tested_of(one) == tested_of(other), "final tests differ"


def assert_same_state(one: Any, other: Any, where: str = "state") -> None:
    """Nested containers of arrays and values agree bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same_state(value, other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, value in enumerate(one):
            assert_same_state(value, other[index], f"{where}.{index}")
    elif hasattr(one, "shape"):
        left, right = np.asarray(one), np.asarray(other)
        assert left.dtype == right.dtype, where
        assert left.tobytes() == right.tobytes(), where
    else:
        assert one == other, where
