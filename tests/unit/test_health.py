"""When a run stops itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import training_fakes as fakes

from delta_belief_rl.config.schema_trainer import Abort
from delta_belief_rl.trainer.health import (
    RULES,
    RunCollapsed,
    RunStalled,
    check,
    count_broken,
    game_signals,
    repeated_chars,
)
from delta_belief_rl.types import Group, Verdict

HEALTHY = {
    "actor/skipped_updates": 0.0,
    "actor/empty_updates": 0.0,
    "actor/grad_norm": 0.4,
    "judge/timeout_rate": 0.1,
    "actor/entropy": 0.7,
    "state_tokens/sampled": 100.0,
    "health/repeated_chars": 0.04,
    "health/invalid_turns": 0.3,
}
BROKEN = {
    "zero_tokens": {"state_tokens/sampled": 0.0},
    "zero_gradients": {"actor/grad_norm": 0.0},
    "max_timeout_rate": {"judge/timeout_rate": 0.6},
    "nan_gradients": {"actor/skipped_updates": 1.0},
    "min_entropy": {"actor/entropy": 1e-6},
    "max_repeated_chars": {"health/repeated_chars": 0.9},
    "max_invalid_turns": {"health/invalid_turns": 1.0},
}
LIMITS = Abort()
PATIENCE = {"nan_gradients": 2, "zero_gradients": 5}
STALLS = {"zero_tokens", "zero_gradients", "max_timeout_rate"}


def follow(steps: list[dict[str, float]], limits: Abort = LIMITS) -> int:
    """Steps that a run makes before it stops itself; all of them if it does not."""
    broken: dict[str, int] = {}
    for number, metrics in enumerate(steps, start=1):
        broken = count_broken(broken, metrics, limits)
        try:
            check(broken, metrics, limits)
        except (RunCollapsed, RunStalled):
            return number
    return len(steps)


def test_every_rule_has_a_case_here() -> None:
    assert BROKEN.keys() == {rule.setting for rule in RULES}


@pytest.mark.parametrize("setting", BROKEN)
def test_A20_H1_a_rule_stops_the_run_after_so_many_broken_steps_in_a_row(setting: str) -> None:
    bad = HEALTHY | BROKEN[setting]
    patience = PATIENCE.get(setting, 3)
    assert follow([HEALTHY, *[bad] * 9]) == 1 + patience
    almost = [bad] * (patience - 1)
    assert follow([*almost, HEALTHY, *almost, HEALTHY]) == 2 * patience
    broken = count_broken({setting: patience - 1}, bad, LIMITS)
    kind = RunStalled if setting in STALLS else RunCollapsed
    with pytest.raises(kind, match=rf"trainer\.abort\.{setting}=null") as caught:
        check(broken, bad, LIMITS)
    assert getattr(caught.value, "setting", setting) == setting
    assert "\n" not in str(caught.value)
    assert f"{patience} training steps in a row" in str(caught.value)


@pytest.mark.parametrize("setting", BROKEN)
def test_A20_null_switches_a_rule_off_and_no_other(setting: str) -> None:
    everything = {name: value for part in BROKEN.values() for name, value in part.items()}
    off = replace(LIMITS, **{setting: None})
    broken = count_broken({}, HEALTHY | everything, off)
    # Where nothing was sampled, entropy says nothing.
    expected = {rule.setting for rule in RULES} - {setting, "min_entropy"}
    assert broken.keys() == expected
    assert follow([HEALTHY | BROKEN[setting]] * 9, off) == 9


def test_A20_a_healthy_run_is_never_stopped() -> None:
    edge = HEALTHY | {"actor/entropy": 1e-4, "health/repeated_chars": 0.5}
    assert follow([HEALTHY, edge] * 10) == 20
    slow = HEALTHY | {"judge/timeout_rate": 0.5}
    assert follow([slow] * 10) == 10


def test_H1_A3_steps_whose_groups_all_agree_stop_a_run_only_when_no_other_comes_between() -> None:
    dead = HEALTHY | {"actor/grad_norm": 0.0}
    assert follow([*[dead] * 4, HEALTHY] * 5) == 25
    assert follow([dead] * 9) == 5


def test_H1_a_step_without_an_update_has_no_gradient() -> None:
    empty = {name: value for name, value in HEALTHY.items() if name != "actor/grad_norm"}
    assert count_broken({}, empty | {"actor/empty_updates": 1.0}, LIMITS) == {"zero_gradients": 1}
    # One whose gradients were not finite has no norm either.
    assert count_broken({}, empty | {"actor/skipped_updates": 1.0}, LIMITS) == {"nan_gradients": 1}


def test_H1_a_run_that_stalls_is_not_called_collapsed() -> None:
    """Answers without a token are invalid turns, too."""
    nothing = HEALTHY | {"state_tokens/sampled": 0.0, "health/invalid_turns": 1.0}
    broken: dict[str, int] = {}
    for _ in range(3):
        broken = count_broken(broken, nothing, LIMITS)
    with pytest.raises(RunStalled) as caught:
        check(broken, nothing, LIMITS)
    assert caught.value.setting == "zero_tokens"


def test_A20_a_step_in_which_nothing_was_sampled_says_nothing_of_entropy() -> None:
    nothing = HEALTHY | {"actor/entropy": 0.0, "state_tokens/sampled": 0.0}
    assert count_broken({}, nothing, LIMITS) == {"zero_tokens": 1}
    assert count_broken({"min_entropy": 2}, {}, LIMITS) == {}


@pytest.mark.parametrize(
    ("text", "share"),
    [("!!!!!", 1.0), ("", 0.0), ("a", 0.0), ("aab", 0.5), ("Is it an apple?", 1 / 14)],
)
def test_repeated_characters_are_those_that_equal_the_one_before(text: str, share: float) -> None:
    assert repeated_chars(text) == pytest.approx(share)


def test_signals_are_means_over_turns() -> None:
    game = fakes.make_game(0, 4)
    turns = [
        replace(turn, action=action, verdict=verdict)
        for turn, action, verdict in zip(
            game.turns,
            ("!!!", "ab", "ab", "ab"),
            (Verdict.INVALID, Verdict.NO, Verdict.NO, Verdict.ERROR),
            strict=True,
        )
    ]
    group = Group(game.task, (replace(game, turns=tuple(turns)),))
    signals = game_signals([group])
    assert signals == {"health/repeated_chars": 0.25, "health/invalid_turns": 0.25}
    assert game_signals([]) == {}
