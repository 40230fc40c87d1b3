"""The training loop on workers of this process: what happens in which order, what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from delta_belief_rl.cluster import app
from delta_belief_rl.cluster.workers import ActorWorker, EngineWorker
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.trainer.services import Services
from delta_belief_rl.trainer.steps import due
from delta_belief_rl.types import Trajectory
from tests.runs import STEPS, Trace, games_of, metrics_of, play, state_of, words, write_world

FOUR, THREE = ("mean", "max", "min", "std"), ("mean", "max", "min")
STEP_NAMES = [
    *(f"actor/{n}" for n in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")),
    *(f"actor/{n}" for n in ("grad_norm", "lr", "entropy_loss")),
    *(f"critic/{n}/{p}" for n in ("eog", "rewards", "turn_rewards") for p in FOUR),
    *(f"critic/elicit_scores/{p}" for p in FOUR),
    *(f"critic/advantages/{n}" for n in ("mean_per_seq_mean", "mean_per_seq_std")),
    *(f"critic/advantages/token_{n}" for n in ("max", "min", "mean_global", "std_global")),
    *(f"response_length/{p}" for p in (*THREE, "clip_ratio")),
    *(f"num_questions/{p}" for p in THREE),
    *(f"train/{n}" for n in ("mean_successful", "total_invalid", "mean_invalid")),
    *(f"train/{n}" for n in ("total_repeated", "mean_repeated")),
    "state_tokens/total",
    *(f"timing_s/{n}" for n in ("step", "gen", "reward", "old_log_prob", "adv", "update_actor")),
    "timing_s/dump_rollout_generations",
    *(f"perf/{n}" for n in ("total_num_tokens", "time_per_step", "throughput")),
    "perf/cpu_memory_used_gb",
    "training/global_step",
    "training/epoch",
]
"""Published names of a training step. The published GPU figures need a GPU, and the slow adapter's
figures were never emitted."""
VALIDATION_NAMES = [
    "val-core/success_rate",
    "val-core/success_rate/mean@2",
    "val-core/success_rate/std@2",
    "val-core/invalid_total",
    "val-core/repeated_total",
    "pass@k/1",
    "pass@k/2",
    "timing_s/testing",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, world: Path) -> tuple[Path, Trace]:
    """A run of four steps that validates at 0, 2 and 4."""
    out = tmp_path_factory.mktemp("loop") / "run"
    status, trace = play(words(out, world))
    assert status == 0
    return out, trace


def games(out: Path, folder: str, step: int | str) -> tuple[Trajectory, ...]:
    return read_trajectories(out / folder / f"{step}.jsonl").trajectories


@pytest.mark.parametrize(
    ("step", "every", "last", "expected"),
    [
        (0, 2, 5, True),
        (1, 2, 5, False),
        (2, 2, 5, True),
        (5, 2, 5, True),
        (5, 9, 5, True),
        (4, 9, 5, False),
        (5, -1, 5, False),
        (0, -1, 5, False),
    ],
)
def test_something_is_due_every_so_many_steps_and_at_the_last(
    step: int, every: int, last: int, expected: bool
) -> None:
    assert due(step, every, last) is expected


def test_R4_each_step_syncs_plays_scores_updates_and_records_before_it_saves(
    run: tuple[Path, Trace],
) -> None:
    short = {
        "EngineWorker.sync": "sync",
        "EngineWorker.step": "play",
        "ActorWorker.score": "score",
        "ActorWorker.update": "update",
        "loop.write_groups done": "games",
        "validation.write_groups done": "validation",
        "final.write_groups done": "test",
        "MetricsLog.append done": "record",
        "checkpoint.save done": "save",
    }
    order = [short[name] for name in run[1].order(*short)]
    learn = ["play", "score", "update", "games"]
    tested = ["play", "test", "play", "test"]
    validated = ["play", "score", "validation", "record", "save"]
    assert order == [
        *["sync", *tested, *validated],
        *[*learn, "record", "save"],  # the engine holds the adapter of step 1 already
        *["sync", *learn, "sync", *validated],
        *[*learn, "record", "save"],
        *["sync", *learn, "sync", *validated],
        *tested,
    ]


def test_L1_nothing_is_played_with_an_adapter_that_is_not_the_trainers(
    tmp_path: Path,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker: Any = EngineWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    real, held = worker.sync, {}

    def sync(self: Any, state: Any, version: int, probe_ids: Any) -> Any:
        # Keeps the first adapter, whatever it is sent.
        return real(self, held.setdefault("state", dict(state)), version, probe_ids)

    monkeypatch.setattr(worker, "sync", sync)
    trace = Trace()
    status, _ = play(words(tmp_path / "run", world, "trainer.final_test=false"), trace=trace)
    assert status == ExitStatus.CHECK_FAILED
    assert "received other adapter bytes" in capsys.readouterr().err
    assert trace.names[-1] in ("EngineWorker.sync", "ActorWorker.probe")
    assert trace.names.count("ActorWorker.update") == 1
    assert state_of(tmp_path / "run")["run"]["step"] == 1


def test_L2_L14_every_turn_carries_the_version_of_the_adapter_that_sampled_it(
    run: tuple[Path, Trace],
) -> None:
    records = {record["step"]: record for record in metrics_of(run[0])}
    for step in range(1, STEPS + 1):
        assert records[step]["actor/empty_updates"] == 0
        assert records[step]["sync/adapter_version"] == step - 1
        versions = {t.adapter_version for g in games(run[0], "rollout", step) for t in g.turns}
        assert versions == {step - 1}
    for step in (0, 2, 4):
        found = games(run[0], "validation", step)
        assert {t.adapter_version for g in found for t in g.turns} == {step}
        assert {g.step for g in found} == {step}
    for label, version in (("start", 0), ("trained", STEPS)):
        for sampling in ("train", "val"):
            found = games(run[0], "test", f"{label}-{sampling}")
            assert {t.adapter_version for g in found for t in g.turns} == {version}


def test_J9_validation_uses_the_driver_the_engines_and_the_judge_of_training(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Services] = []
    real = app._services

    def kept(*args: Any) -> Services:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(app, "_services", kept)
    more = ["trainer.total_training_steps=1", "trainer.final_test=false"]
    status, trace = play(words(tmp_path / "run", world, *more))
    assert status == 0
    services: Any = made[0]
    training, evaluation = services.rollouts, services.val_rollouts
    assert type(training) is type(evaluation) is RolloutDriver
    assert training._judge._judge is evaluation._judge._judge is services.judge
    assert training._router is evaluation._router
    first = trace.names[: trace.names.index("validation.write_groups")]
    assert {"EngineWorker.step", "JudgeWorker.answer"} <= set(first)


def test_the_draws_of_an_evaluation_do_not_depend_on_the_step(tmp_path: Path, world: Path) -> None:
    # A rate so small that the policy stays what it is, bit for bit in what it plays.
    more = ["trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=1e-30"]
    out = tmp_path / "run"
    assert play(words(out, world, *more))[0] == 0
    played = {name: [[row["token_ids"] for row in rows]] for name, rows in games_of(out).items()}
    assert played["validation/0.jsonl"] == played["validation/2.jsonl"]
    for sampling in ("train", "val"):
        assert played[f"test/start-{sampling}.jsonl"] == played[f"test/trained-{sampling}.jsonl"]
    assert played["rollout/1.jsonl"] != played["rollout/2.jsonl"]


def test_there_is_one_record_a_step_with_the_published_names(run: tuple[Path, Trace]) -> None:
    records = read_records(run[0] / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    for record in records[1:]:
        assert [name for name in STEP_NAMES if name not in record] == []
    for step in (0, 2, 4):
        assert [name for name in VALIDATION_NAMES if name not in records[step]] == []
    for step in (1, 3):
        assert not any(name.startswith(("val-", "pass@k")) for name in records[step])
        assert "timing_s/testing" not in records[step]
    assert "timing_s/step" not in records[0]


def test_a_record_counts_the_games_and_the_judge_calls_of_its_own_step(
    run: tuple[Path, Trace],
) -> None:
    for record in metrics_of(run[0])[1:]:
        found = games(run[0], "rollout", record["step"])
        turns = [turn for game in found for turn in game.turns]
        assert record["state_tokens/sampled"] == sum(turn.n_tokens for turn in turns)
        assert record["state_tokens/total"] == sum(len(game.token_ids) for game in found)
        assert record["judge/calls"] == sum(turn.raw_verdict != "" for turn in turns)
        assert record["training/epoch"] == (record["step"] - 1) // 2


def test_R2_every_epoch_plays_every_training_secret_once(run: tuple[Path, Trace]) -> None:
    for first in (1, 3):
        epoch = [games(run[0], "rollout", step) for step in (first, first + 1)]
        secrets = [game.task.secret for part in epoch for game in part if game.game == 0]
        assert len(secrets) == len(set(secrets)) == 8


def test_an_evaluation_alone_validates_once_and_trains_nothing(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "run"
    status, trace = play(words(out, world, "trainer.val_only=true"))
    assert status == 0
    assert "ActorWorker.update" not in trace.names
    assert trace.names.count("ActorWorker.score") == 1
    assert [record["step"] for record in metrics_of(out)] == [0]
    assert list(games_of(out)) == ["validation/0.jsonl"]


def test_an_evaluation_of_a_checkpoint_leaves_the_record_of_its_run(
    tmp_path: Path, world: Path
) -> None:
    out = tmp_path / "run"
    more = ["trainer.total_training_steps=1", "trainer.final_test=false"]
    assert play(words(out, world, *more, "trainer.test_freq=-1"))[0] == 0
    before = metrics_of(out)
    status, trace = play(words(out, world, *more, "trainer.val_only=true"))
    assert status == 0
    assert "ActorWorker.update" not in trace.names
    assert metrics_of(out) == before
    found = games(out, "validation", 1)
    assert {t.adapter_version for g in found for t in g.turns} == {1}


def test_an_error_of_a_worker_ends_the_run_and_leaves_the_checkpoint_before_it(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = ActorWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    real = worker.update

    def update(self: Any, steps: Any, training_step: int) -> Any:
        if training_step == 2:
            raise RuntimeError("the optimizer has had enough")
        return real(self, steps, training_step)

    monkeypatch.setattr(worker, "update", update)
    with pytest.raises(RuntimeError, match="had enough"):
        play(words(tmp_path / "run", world, "trainer.final_test=false"))
    assert state_of(tmp_path / "run")["run"]["step"] == 1
    assert [record["step"] for record in metrics_of(tmp_path / "run")] == [0, 1]
