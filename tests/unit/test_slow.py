"""The slow adapter moves by its rule, and its figures are what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.cluster.groups import merge_pairs
from delta_belief_rl.trainer.actor import EMA, POLICY, PolicyActor

NAMES = [
    "ema/beta",
    "ema/changed_layers_ratio",
    *(f"ema/{half}_{figure}" for half in "AB" for figure in ("rel_l2", "cos", "linf")),
    "ema/EA_rel_l2",
    "ema/EB_rel_l2",
]
GROUPS = fakes.make_groups()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("slow") / "model")


def make(folder: Path, **changes: object) -> PolicyActor:
    adapter = replace(fakes.ADAPTER, ema=True, ema_beta=0.75, **changes)
    return PolicyActor(fakes.settings_of(folder, adapter=adapter))


def step(actor: PolicyActor, number: int) -> dict[str, float]:
    batch = fakes.make_batch(GROUPS, actor.score(fakes.requests(GROUPS)))
    plan = fakes.one_step(batch)
    return merge_pairs([actor.update(fakes.share(batch, plan), number)])


def half(actor: PolicyActor, name: str, letter: str) -> np.ndarray:
    """All matrices of one kind as one vector."""
    state = actor.snapshot(name).state
    keys = sorted(key for key in state if f".lora_{letter}." in key)
    return np.concatenate([state[key].ravel() for key in keys]).astype(np.float64)


def norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))


def test_the_published_names_are_there_once_a_step_and_only_with_a_slow_adapter(
    folder: Path,
) -> None:
    metrics = step(make(folder), 1)
    assert sorted(name for name in metrics if name.startswith("ema/")) == sorted(NAMES)
    bare = step(PolicyActor(fakes.settings_of(folder)), 1)
    assert not any(name.startswith("ema/") for name in bare)


def test_each_matrix_moves_by_beta_and_the_figures_are_those_of_the_matrices(
    folder: Path,
) -> None:
    actor = make(folder)
    for number in (1, 2):
        before = {letter: half(actor, EMA, letter) for letter in "AB"}
        metrics = step(actor, number)
        assert metrics["ema/beta"] == 0.75
        assert metrics["ema/changed_layers_ratio"] == 1.0
        for letter, old in before.items():
            fast, slow = half(actor, POLICY, letter), half(actor, EMA, letter)
            np.testing.assert_allclose(slow, 0.75 * old + 0.25 * fast, atol=1e-7)
            assert norm(slow - old) > 0
            want = {
                f"ema/{letter}_rel_l2": norm(fast - slow) / norm(fast),
                f"ema/{letter}_cos": fast @ slow / norm(fast) / norm(slow),
                f"ema/{letter}_linf": np.abs(fast - slow).max(),
                f"ema/E{letter}_rel_l2": norm(slow - old) / norm(slow),
            }
            for name, value in want.items():
                assert metrics[name] == pytest.approx(value, rel=1e-4), name
    # The trained half starts at zero, so the slow copy is far behind at first and turns after it.
    assert metrics["ema/B_rel_l2"] > 0.1 > metrics["ema/A_rel_l2"]


def test_during_the_warm_up_the_slow_adapter_is_a_copy(folder: Path) -> None:
    metrics = step(make(folder, ema_warmup_steps=1), 1)
    assert metrics["ema/beta"] == 0.0
    for letter in "AB":
        assert metrics[f"ema/{letter}_rel_l2"] == 0.0
        assert metrics[f"ema/{letter}_linf"] == 0.0
        assert metrics[f"ema/{letter}_cos"] == 1.0
        assert metrics[f"ema/E{letter}_rel_l2"] > 0.0


def test_a_slow_adapter_that_keeps_all_of_itself_does_not_move(folder: Path) -> None:
    actor = make(folder)
    actor.settings = replace(actor.settings, adapter=replace(actor.settings.adapter, ema_beta=1.0))
    start = actor.snapshot(EMA).checksum
    metrics = step(actor, 1)
    assert actor.snapshot(EMA).checksum == start
    assert metrics["ema/changed_layers_ratio"] == 0.0
    assert metrics["ema/EA_rel_l2"] == metrics["ema/EB_rel_l2"] == 0.0
    assert metrics["ema/B_cos"] == 0.0, "nothing learnt yet: the slow half is zero"
