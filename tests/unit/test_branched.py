"""The branched pass against the naive one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from delta_belief_rl.belief.branched import (
    ScoreRequest,
    plan_passes,
    score_batch,
    score_beliefs,
)
from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.belief.naive import naive_scores
from delta_belief_rl.models.loading import add_lora, build_causal_lm, tiny_qwen3_config, use_adapter
from delta_belief_rl.types import StopReason, Task, Trajectory, Turn, UserError, Verdict

VOCAB = 61
SECRETS = (
    Elicitation("one token", (7, 8, 9, 20), (3,)),
    Elicitation("three tokens", (7, 8, 9, 21, 22, 23), (3, 4, 5), "mean"),
    Elicitation("first token", (30,), (0,)),
)
LEAD = (50, 51, 52, 53)
"""An exchange in front of the first guess."""


def sharp(model: Any) -> Any:
    """Larger weights, so that log-probs differ by nats between contexts."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.25)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return sharp(build_causal_lm(tiny_qwen3_config(VOCAB)))


def game(seed: int, turns: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, rng.integers(2, 12)).tolist()
    made = []
    for k in range(turns):
        start = len(ids)
        ids += rng.integers(0, VOCAB, rng.integers(1, 7)).tolist()
        made.append(Turn(k, start, len(ids), (), 0, "q", "a", Verdict.NO))
        ids += rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()
    task = Task("t", "tw_q", "s", ())
    return Trajectory(task, 0, tuple(ids), tuple(made), StopReason.TURN_LIMIT)


def ragged() -> list[ScoreRequest]:
    lengths = (3, 0, 7, 1, 5, 2)
    return [ScoreRequest.of(game(i, k), SECRETS[i % 3]) for i, k in enumerate(lengths)]


def assert_equal(got: Any, want: Any, atol: float = 1e-4) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.beliefs, b.beliefs, atol=atol, rtol=0)
        np.testing.assert_allclose(a.logp, b.logp, atol=atol, rtol=0)


def led(games: list[ScoreRequest]) -> list[ScoreRequest]:
    """The same games, asked for their prior behind an exchange."""
    asked = [replace(game.elicitation, lead_ids=LEAD) for game in games if game.elicitation]
    return [replace(game, elicitation=e) for game, e in zip(games, asked, strict=True)]


@pytest.mark.parametrize("budget", [1, 10**6])
def test_B5_a_prior_asked_behind_an_exchange_equals_a_reforward(model: Any, budget: int) -> None:
    games = led(ragged())
    got, plain = score_batch(model, games, budget), score_batch(model, ragged(), budget)
    assert_equal(got, naive_scores(model, games))
    for with_lead, without in zip(got, plain, strict=True):
        assert abs(with_lead.beliefs[0] - without.beliefs[0]) > 1e-2
        # Nothing else of the game sees the exchange.
        np.testing.assert_allclose(with_lead.beliefs[1:], without.beliefs[1:], atol=1e-5)
        np.testing.assert_allclose(with_lead.logp, without.logp, atol=1e-5)


def test_B10_the_exchange_stands_where_a_turn_and_its_reply_would(model: Any) -> None:
    """The prior behind an exchange is the belief after a turn that says the same."""
    request = led([ScoreRequest.of(game(2, 3), SECRETS[1])])[0]
    start = request.belief_points[0]
    played = (*request.token_ids[:start], *LEAD)
    twin = ScoreRequest(played, np.zeros(0, np.int64), SECRETS[1], (start, len(played)))
    prior = score_batch(model, [request])[0].beliefs[0]
    assert prior == pytest.approx(score_batch(model, [twin])[0].beliefs[1], abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [1, 120, 10**6])
def test_B5_one_packed_pass_equals_a_reforward_for_every_turn(
    model: Any, budget: int, temperature: float
) -> None:
    games = ragged()
    got = score_batch(model, games, budget, temperature)
    want = naive_scores(model, games, temperature)
    assert_equal(got, want)
    spread = np.ptp(np.concatenate([result.beliefs for result in want]))
    assert spread > 1.0, "the test needs beliefs that differ"


def test_scores_do_not_depend_on_the_rest_of_the_batch(model: Any) -> None:
    games = ragged()
    together = score_batch(model, games)
    alone = [score_batch(model, [request])[0] for request in games]
    assert_equal(together, alone, atol=1e-5)
    backwards = score_batch(model, games[::-1])[::-1]
    assert_equal(together, backwards, atol=1e-5)


def test_B7_beliefs_ignore_the_sampling_temperature(model: Any) -> None:
    games = ragged()
    hot, cold = (score_batch(model, games, temperature=t) for t in (1.0, 0.5))
    for a, b in zip(hot, cold, strict=True):
        np.testing.assert_array_equal(a.beliefs, b.beliefs)
    assert not np.allclose(hot[0].logp, cold[0].logp)


def test_B9_there_is_one_belief_more_than_turns(model: Any) -> None:
    for k, result in zip((3, 0, 7, 1, 5, 2), score_batch(model, ragged()), strict=True):
        assert result.beliefs.shape == (k + 1,)
        assert np.isfinite(result.beliefs).all()
        assert (result.beliefs < 0).all()


def test_B6_scores_cover_exactly_the_sampled_tokens(model: Any) -> None:
    trajectory = game(3, 4)
    (result,) = score_batch(model, [ScoreRequest.of(trajectory)], with_entropy=True)
    sampled = sum(turn.n_tokens for turn in trajectory.turns)
    assert result.logp.shape == (sampled,)
    assert result.beliefs.shape == (0,)
    assert result.entropy is not None
    assert result.entropy.shape == (sampled,)
    assert ((result.entropy > 0) & (result.entropy < np.log(VOCAB))).all()


def test_asking_for_beliefs_changes_no_log_prob_of_the_game(model: Any) -> None:
    trajectories = [game(i, 3) for i in range(3)]
    with_belief = score_batch(model, [ScoreRequest.of(t, SECRETS[1]) for t in trajectories])
    without = score_batch(model, [ScoreRequest.of(t) for t in trajectories])
    for a, b in zip(with_belief, without, strict=True):
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)


def test_later_turns_never_change_an_earlier_belief(model: Any) -> None:
    request = ScoreRequest.of(game(5, 4), SECRETS[0])
    cut = request.belief_points[2]
    early = ScoreRequest(
        request.token_ids[:cut], np.zeros(0, np.int64), SECRETS[0], request.belief_points[:3]
    )
    full, short = score_batch(model, [request])[0], score_batch(model, [early])[0]
    np.testing.assert_allclose(short.beliefs, full.beliefs[:3], atol=1e-5)


def test_the_belief_model_is_chosen_by_name() -> None:
    base = sharp(build_causal_lm(tiny_qwen3_config(VOCAB)))
    games = ragged()
    frozen = naive_scores(base, games)
    model = add_lora(base, rank=2, alpha=4, name="policy")
    model = add_lora(model, rank=2, alpha=4, name="ema", trainable=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.fill_(0.2 if ".policy." in name else 0.1)
    own = naive_scores(model, games)
    assert_equal(score_batch(model, games), own)
    with use_adapter(model, "ema"):
        slow = naive_scores(model, games)
    for name, want in (("base", frozen), ("ema", slow)):
        got = score_batch(model, games, belief_model=name)
        for a, b, c in zip(got, want, own, strict=True):
            np.testing.assert_allclose(a.beliefs, b.beliefs, atol=1e-4)
            np.testing.assert_allclose(a.logp, c.logp, atol=1e-4)
            assert not np.allclose(b.beliefs, c.beliefs, atol=1e-2)
    for a, b in zip(score_beliefs(model, games), own, strict=True):
        np.testing.assert_allclose(a, b.beliefs, atol=1e-4)
    with pytest.raises(UserError, match="'slow'"):
        score_batch(model, games, belief_model="slow")


@pytest.mark.parametrize("points", [(3, 3), (0, 4), (4, 99), ()])
def test_B9_points_that_do_not_fit_the_game_are_an_error(
    model: Any, points: tuple[int, ...]
) -> None:
    request = ScoreRequest((1, 2, 3, 4, 5), np.array([2]), SECRETS[0], points)
    with pytest.raises(ValueError, match="belief points"):
        score_batch(model, [request])


def test_B6_positions_without_a_prediction_are_an_error(model: Any) -> None:
    for position in (0, 5):
        with pytest.raises(ValueError, match="action positions"):
            score_batch(model, [ScoreRequest((1, 2, 3, 4, 5), np.array([position]))])


def test_passes_partition_the_games_within_the_budget() -> None:
    lengths = [5, 30, 7, 7, 12, 1, 100]
    parts = plan_passes(lengths, 40)
    assert sorted(i for part in parts for i in part) == list(range(7))
    for part in parts:
        longest = max(lengths[i] for i in part)
        assert longest * len(part) <= 40 or len(part) == 1
    assert plan_passes([], 40) == []
    assert score_batch(None, []) == []
