"""A masked denoiser trains and validates through the loop, on a CPU, and resumes bit for bit."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ATTEMPTS, RAY_IS_LATE, START_SECONDS

from delta_belief_rl.cluster.app import probe_tokens
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.models.denoiser import load_denoiser, read_config
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.types import StopReason, Verdict
from tests.runs import ROOT, Killed, assert_same_run, play

STEPS = 2
MODEL = Path(__file__).resolve().parents[2] / "delta_belief_rl" / "assets" / "agreement_denoiser"


def command(out: Path, *more: str) -> list[str]:
    """A run of two steps, each with eight games of six tasks and two updates."""
    return [
        "experiment=agreement_quickstart",
        f"trainer.output_dir={out}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.rollout_freq=1",
        "trainer.check_freq=1",
        "trainer.test_freq=2",
        "trainer.test_games=1",
        "trainer.resume_mode=auto",
        "multi_turn.train.n=8",
        "multi_turn.val.n=2",
        "multi_turn.env_kwargs.tasks={train: 12, val: 3, test: 3}",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "actor_rollout_ref.num_threads=1",
        *more,
    ]


def test_the_packaged_denoiser_is_small_and_fits_its_environment() -> None:
    size = sum(file.stat().st_size for file in MODEL.iterdir())
    assert size < 2 * 2**20
    config = read_config(MODEL)
    assert config.vocab_size <= 64
    assert config.answer_length <= 16
    load_denoiser(MODEL)
    cfg, _ = load_config(["experiment=agreement_quickstart"])
    assert cfg.data.max_response_length == config.answer_length
    chat = ChatFormat.from_tokenizer(load_tokenizer(MODEL))
    sets = load_tasks(cfg)
    assert len(probe_tokens(chat, sets)) <= config.max_position_embeddings
    for task in (*sets.train, *sets.val, *sets.test):
        opening, answer = chat.open_ids(task.messages), chat.assistant_ids(task.secret)
        assert len(answer) <= config.answer_length
        assert len(opening) + config.answer_length <= cfg.data.max_prompt_length
        assert all(config.categories[token] >= 0 for token in answer)
        assert chat.decode(answer) == task.secret


def check_run(out: Path) -> None:
    """Records, games and validation of a run of two steps."""
    trained = [record for record in read_records(out / "metrics.jsonl") if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    for record in trained:
        assert record["actor/grad_norm"] > 0
        assert record["actor/optimizer_steps"] == 2
        assert record["sync/probe_gap"] < 1e-5
        assert record["check/sampled_gap_max"] < 1e-4
        assert 0.4 < record["critic/trained_token_share"] < 0.8
        assert record["critic/token_weight_std"] > 0
        assert math.isfinite(record["critic/confidence_gain"])
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert len(games) == 48
    assert {game.stop for game in games} <= {StopReason.WIN, StopReason.TURN_LIMIT}
    turns = [turn for game in games for turn in game.turns]
    assert {turn.verdict for turn in turns} == {Verdict.WIN, Verdict.OTHER}
    assert all(len(turn.order) == turn.n_tokens for turn in turns)
    # Not said from left to right.
    assert any(list(turn.order) != sorted(turn.order) for turn in turns)
    validated = read_trajectories(out / "validation" / f"{STEPS}.jsonl").trajectories
    assert len(validated) == 3 * 2


def through_ray(out: Path, scratch: str) -> tuple[int, str]:
    """Exit status of ``train.py``, and what it printed."""
    done = subprocess.run(
        [sys.executable, "train.py", *command(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": scratch},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_denoiser_trains_and_validates_through_ray(tmp_path: Path) -> None:
    # Short, because Ray's sockets lie below it.
    scratch = tempfile.mkdtemp(prefix="db", dir="/tmp")
    status, said = 1, RAY_IS_LATE
    try:
        for _ in range(ATTEMPTS):
            if status and RAY_IS_LATE in said:
                status, said = through_ray(tmp_path / "run", scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    assert status == 0, said[-4000:]
    check_run(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_is_cut_off_and_resumed_is_the_straight_one(tmp_path: Path) -> None:
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    _, trace = play(command(straight, "trainer.final_test=true"))
    second = [at for at, name in enumerate(trace.names) if name == "ActorWorker.update"][1]
    with pytest.raises(Killed):
        play(command(cut, "trainer.final_test=true"), kill_at=second)
    status, _ = play(command(cut, "trainer.final_test=true"))
    assert status == 0
    assert_same_run(straight, cut)


@pytest.mark.slow
def test_several_tokens_a_step_and_plain_grpo_train_as_well(tmp_path: Path) -> None:
    words = ("algorithm.transforms=[]", "actor_rollout_ref.rollout.tokens_per_step=3")
    status, _ = play(command(tmp_path / "run", *words))
    assert status == 0
    trained = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["step"] > 0]
    assert all(record["check/sampled_gap_max"] < 1e-4 for record in trained)
    games = read_trajectories(tmp_path / "run" / "rollout" / f"{STEPS}.jsonl").trajectories
    assert max(step for game in games for turn in game.turns for step in turn.order) <= 4


@pytest.mark.slow
def test_the_model_of_another_kind_is_refused_before_anything_starts(tmp_path: Path) -> None:
    causal = "actor_rollout_ref.model.path=delta_belief_rl/assets/agent"
    status, trace = play(command(tmp_path / "run", causal))
    assert (status, trace.names) == (2, [])
