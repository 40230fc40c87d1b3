"""Every published metric name is emitted by a run, or docs/metrics.md says why it is not."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_rows, read_trajectories
from delta_belief_rl.types import Verdict
from tests.runs import play, words, write_world

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
N = 4
"""Validation games of a secret: enough for a best of fewer than all."""

FOUR = ("mean", "max", "min", "std")
TOKENS = ("token_max", "token_min", "token_mean_global", "token_std_global")
SEQUENCES = ("mean_per_seq_mean", "mean_per_seq_std")
CLASSES = ("true_positives", "false_positives", "false_negatives", "wrong_negatives")
JUDGED = (*CLASSES, "true_negatives", "unrecognized")
EXTRAS = (
    *("possible_overfit", "repeated", "multiple_questions", "no_question", "no_question_word"),
    *("invalid_chars", "too_long_word", "too_long_action", "too_short_action"),
    "invalid_by_judge",
)
TIMED = ("gen", "ref", "values", "adv", "update_actor")
TRAINING = [
    *(f"actor/{n}" for n in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")),
    *(f"actor/{n}" for n in ("grad_norm", "lr", "entropy_loss", "kl_loss", "kl_coef")),
    *(f"critic/{n}/{p}" for n in ("eog", "rewards", "turn_rewards", "elicit_scores") for p in FOUR),
    *(f"critic/{n}/{p}" for n in ("advantages", "returns") for p in (*SEQUENCES, *TOKENS)),
    *(f"response_length/{p}" for p in ("mean", "max", "min", "clip_ratio")),
    *(f"num_questions/{p}" for p in ("mean", "max", "min")),
    *(f"train/{n}" for n in ("mean_successful", "total_invalid", "mean_invalid")),
    *(f"train/{n}" for n in ("total_repeated", "mean_repeated")),
    "state_tokens(total)",
    "state_tokens/coverage",
    *(f"judge/{n}" for n in JUDGED),
    *(f"judge/extra/{n}" for n in EXTRAS),
    *(f"timing_s/{n}" for n in ("step", "reward", "old_log_prob", "update_ema", *TIMED)),
    *(f"timing_s/{n}" for n in ("dump_rollout_generations", "testing", "save_checkpoint")),
    *(f"timing_per_token_ms/{n}" for n in TIMED),
    *(f"perf/{n}" for n in ("total_num_tokens", "time_per_step", "throughput", "mfu/actor")),
    *(f"perf/max_memory_{n}_gb" for n in ("allocated", "reserved")),
    "perf/cpu_memory_used_gb",
    "training/global_step",
    "training/epoch",
    *(f"ema/{n}" for n in ("beta", "changed_layers_ratio", "EA_rel_l2", "EB_rel_l2")),
    *(f"ema/{half}_{n}" for half in "AB" for n in ("rel_l2", "cos", "linf")),
]
VALIDATION = [
    "val-core/success_rate",
    f"val-core/success_rate/mean@{N}",
    f"val-core/success_rate/std@{N}",
    "val-core/invalid_total",
    "val-core/repeated_total",
    *(f"val-core/judge/{n}" for n in JUDGED),
    *(f"val-core/judge/extra/{n}" for n in EXTRAS),
    *(f"pass@k/{k}" for k in range(1, N + 1)),
    "pass@k/pass@k_table",
    *(
        f"val-aux/tw_q/{variable}/{part}"
        for variable in ("invalid_count", "repeated_count", "num_questions")
        for part in (
            *(f"mean@{N}", f"std@{N}"),
            *(f"{w}@{j}/{s}" for w in ("best", "worst") for j in (2, N) for s in ("mean", "std")),
        )
    ),
    *(f"val-core/tw_q/reward/{p}" for p in (f"mean@{N}", f"best@{N}/mean", f"best@{N}/std")),
    *(f"val-aux/tw_q/reward/{p}" for p in (f"std@{N}", "best@2/mean", "best@2/std")),
    *(f"val-aux/tw_q/reward/worst@{j}/{s}" for j in (2, N) for s in ("mean", "std")),
]
NAMES = [*TRAINING, *VALIDATION]
NEEDS_GPU = {"perf/mfu/actor", "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"}
IN_WANDB = {"pass@k/pass@k_table"}


def expand(name: str) -> list[str]:
    """``a/{b,c}`` as ``a/b`` and ``a/c``; the placeholders of the page as what the runs have."""
    filled = name.replace("<source>", "tw_q").replace("@n", f"@{N}")
    choices = [part.split(",") for part in re.findall(r"\{([^}]*)\}", filled)]
    shape = re.sub(r"\{[^}]*\}", "{}", filled)
    names = [shape.format(*choice) for choice in product(*choices)]
    if any("<variable>" in one for one in names):
        variables = ("invalid_count", "repeated_count", "num_questions")
        names = [one.replace("<variable>", variable) for one in names for variable in variables]
    if any("@j" in one for one in names):
        names = [one.replace("@j", f"@{j}") for one in names for j in (2, N)]
    if name == "pass@k/k":
        names = [f"pass@k/{k}" for k in range(1, N + 1)]
    return names


def documented() -> dict[str, str]:
    """Name to status, from the tables of docs/metrics.md."""
    found: dict[str, str] = {}
    for cell, status in re.findall(r"^\| `([^`]+)` \| (\w+) \|", PAGE.read_text(), flags=re.M):
        found |= dict.fromkeys(expand(cell), status)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("names")


@pytest.fixture(scope="module")
def command(folder: Path) -> list[str]:
    """A run with everything on: belief of a slow adapter, KL, validation, saving."""
    adapters = "[{name: actor_lora, r: 4, alpha: 4}, {name: ema, r: 4, alpha: 4}]"
    return words(
        folder / "run",
        write_world(folder / "tiny.yaml"),
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.final_test=false",
        f"multi_turn.val.n={N}",
        "multi_turn.logprob_reward.base_model=ref",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"actor_rollout_ref.model.adapters={adapters}",
    )


@pytest.fixture(scope="module")
def runs(folder: Path, command: list[str]) -> list[dict[str, Any]]:
    """The records of that run, of the steps 0, 1 and 2."""
    status, _ = play(command)
    assert status == 0
    return read_records(folder / "run" / "metrics.jsonl")


def test_the_page_lists_every_published_name_with_a_status() -> None:
    page = documented()
    assert [name for name in NAMES if name not in page] == []
    assert {page[name] for name in NAMES} <= {"same", "corrected", "absent"}


def test_every_published_name_is_emitted_or_documented_as_absent(
    runs: list[dict[str, Any]],
) -> None:
    emitted = {name for record in runs for name in record}
    page = documented()
    absent = {name for name in NAMES if page[name] == "absent"}
    assert absent == {"timing_s/values", "timing_per_token_ms/values"}
    missing = set(NAMES) - emitted
    assert missing == absent | NEEDS_GPU | IN_WANDB


def test_the_page_promises_no_name_that_no_run_has(runs: list[dict[str, Any]]) -> None:
    emitted = {name for record in runs for name in record}
    promised = {name for name, status in documented().items() if status != "absent"}
    known = emitted | NEEDS_GPU | IN_WANDB
    # The best of all games stands under val-core.
    moved = {f"val-aux/tw_q/reward/best@{N}/{part}" for part in ("mean", "std")}
    assert promised - known - moved == set()


def test_names_of_methods_of_credit_are_written_by_the_package() -> None:
    """Runs of these methods are elsewhere; here each name has to stand in the code."""
    section = PAGE.read_text().split("### Methods of credit")[1].split("\n### ")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", section, flags=re.M)
    names = [
        name for cell in cells for part in re.findall(r"`([^`]+)`", cell) for name in expand(part)
    ]
    code = "".join(path.read_text() for path in (ROOT / "delta_belief_rl").rglob("*.py"))
    last = {name: name.removesuffix("/<kind>").rpartition("/")[2] for name in names}
    assert len(names) > 30
    assert [name for name, part in last.items() if f'{part}"' not in code] == []


def test_every_value_is_a_number_that_json_can_hold_or_null(runs: list[dict[str, Any]]) -> None:
    for record in runs:
        for name, value in record.items():
            if name != "run_id":
                assert value is None or math.isfinite(value), name


def test_A12_times_are_those_of_one_step(runs: list[dict[str, Any]]) -> None:
    for record in runs[1:]:
        parts = ("sync", "gen", "old_log_prob", "reward", "adv", "update_actor")
        inside = sum(record[f"timing_s/{part}"] for part in parts)
        assert 0 < inside <= record["timing_s/step"]
        assert record["timing_s/ref"] <= record["timing_s/old_log_prob"]
        assert record["timing_s/update_ema"] <= record["timing_s/update_actor"]
        per_token = record["timing_per_token_ms/gen"] * record["state_tokens(total)"]
        assert per_token == pytest.approx(1000 * record["timing_s/gen"])
    assert "timing_s/save_checkpoint" in runs[1]


def test_J16_the_cost_of_the_judge_is_told_for_training_and_for_validation(
    runs: list[dict[str, Any]],
) -> None:
    names = ("calls", "calls_per_game", "call_error_rate", "retries", "timeouts", "tokens")
    names = (*names, "tokens_per_game")
    spent = ("judge_cached_rate", "judge_latency_p50_s", "judge_latency_p95_s")
    for record in runs[1:]:
        assert [n for n in names if f"judge/{n}" not in record] == []
        assert [n for n in spent if f"perf/{n}" not in record] == []
        assert record["perf/judge_latency_p50_s"] <= record["perf/judge_latency_p95_s"]
        assert record["judge/calls_per_game"] == record["judge/calls"] / 16
    for record in (runs[0], runs[2]):
        assert [n for n in names if f"val-aux/judge/{n}" not in record] == []
        assert "perf/val_judge_cached_rate" in record
        assert record["val-aux/judge/calls_per_game"] == record["val-aux/judge/calls"] / 12
    assert not any(name.startswith("val-aux/judge") for name in runs[1])


def test_A6_the_reward_of_an_evaluated_game_is_the_sum_that_the_estimator_would_use(
    folder: Path, command: list[str], runs: list[dict[str, Any]]
) -> None:
    config = load_config(command)[0]
    turns, estimator = config.multi_turn, config.algorithm.adv_estimator
    prices = turns.reward.signals
    paid = {Verdict.INVALID: prices.invalid_action, Verdict.REPEATED: prices.repeated_action}
    file = folder / "run" / "validation" / "2.jsonl"
    games, rows = read_trajectories(file).trajectories, read_rows(file).rows
    rewards: dict[str, list[float]] = {}
    for game, row in zip(games, rows, strict=True):
        won = game.strict_win if turns.win_rule == "strict" else game.compatible_win
        outcome = prices.win * won + prices.traj_len * game.num_turns * (game.num_turns > 1)
        reward = outcome * (game.num_turns if estimator == "grpo_turn" else 1)
        for turn in game.turns:
            hit = turn.strict_win if turns.win_rule == "strict" else turn.compatible_win
            reward += paid.get(turn.verdict, prices.all_valid)
            reward += prices.wrong_guess * (turn.is_guess and not hit)
        assert len(row["log_prob_reward"]) == turns.max_turns.val + 1
        reward += turns.reward.weight_elicit * sum(row["log_prob_diff"])
        assert row["score"] == row["reward"] == pytest.approx(reward)
        rewards.setdefault(game.task.id, []).append(reward)
    assert len(rewards) == 3
    table = np.array(list(rewards.values()))
    found = runs[2]
    assert found[f"val-core/tw_q/reward/mean@{N}"] == pytest.approx(table.mean())
    assert found[f"val-aux/tw_q/reward/std@{N}"] == pytest.approx(table.std(axis=1).mean())
    assert found[f"val-core/tw_q/reward/best@{N}/mean"] == pytest.approx(table.max(1).mean())
    assert found[f"val-aux/tw_q/reward/worst@{N}/mean"] == pytest.approx(table.min(1).mean())
