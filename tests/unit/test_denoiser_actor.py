"""A denoiser as the policy that is trained: scores, updates, state, what does not go with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import problems
from delta_belief_rl.engines.denoiser_engine import DenoiserEngine
from delta_belief_rl.models.adapters import state_checksum
from delta_belief_rl.models.denoiser import denoiser_state, save_denoiser
from delta_belief_rl.rollout.store import from_row, to_row
from delta_belief_rl.trainer.actor import ActorSettings, PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.denoiser_actor import COLUMNS, DenoiserActor
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.policy_engine import EngineSettings
from delta_belief_rl.trainer.policy_kinds import (
    build_actor,
    build_engine,
    check_kind,
    score_columns,
)
from delta_belief_rl.types import (
    Message,
    StopReason,
    Task,
    TrainBatch,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)
from tests.unit.denoiser_fakes import ask, tiny
from tests.unit.test_denoiser import PROMPTS, NoTokenizer

REPLY = (8, 5)
TASK = Task("t", "x", "s", (Message("user", "x"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_denoiser(tiny(), NoTokenizer(), tmp_path)
    return tmp_path


@pytest.fixture
def settings(folder: Path) -> ActorSettings:
    optimizer = OptimizerSettings(lr=1e-2, weight_decay=0.0)
    return ActorSettings(model_path=str(folder), optimizer=optimizer, temperature=0.8)


def games(count: int = 6) -> list[Trajectory]:
    """Finished games of one answer each; every third one has two turns."""
    out: list[Trajectory] = []
    engine = DenoiserEngine(tiny())
    for number in range(count):
        ids = list(PROMPTS[number % 2])
        turns: list[Turn] = []
        for index in range(1 + (number % 3 == 0)):
            request = ask(10 * number + index, tuple(ids), temperature=0.8)
            answer = engine.step([request])[0]
            assert answer.token_ids, answer.error
            start = len(ids)
            ids += [*answer.token_ids]
            turns.append(
                Turn(
                    index=index,
                    start=start,
                    end=len(ids),
                    logprobs=answer.logprobs,
                    adapter_version=0,
                    action="a",
                    reply="r",
                    verdict=Verdict.OTHER,
                    order=answer.order,
                )
            )
            ids += REPLY
            if len(ids) + 5 > 16:
                break
        out.append(Trajectory(TASK, number, tuple(ids), tuple(turns), StopReason.ENDED))
    return out


def batch_of(
    played: Sequence[Trajectory], scores: Sequence[object], advantages: Sequence[float]
) -> TrainBatch:
    """One advantage for each game."""
    lengths = [len(game.token_ids) for game in played]
    total = sum(lengths)
    turn_ids = np.full(total, -1)
    old, rollout, view = np.zeros(total), np.zeros(total), np.zeros(total)
    offset = 0
    for game, score in zip(played, scores, strict=True):
        where = np.flatnonzero(game.action_mask()) + offset
        old[where] = score.logp  # type: ignore[attr-defined]
        view[where] = score.views["commit_step"]  # type: ignore[attr-defined]
        for turn in game.turns:
            turn_ids[offset + turn.start : offset + turn.end] = turn.index
            rollout[offset + turn.start : offset + turn.end] = turn.logprobs
        offset += len(game.token_ids)
    sampled = turn_ids >= 0
    return TrainBatch(
        token_ids=np.concatenate([game.token_ids for game in played]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        turn_ids=turn_ids,
        old_logp=old,
        rollout_logp=rollout,
        advantages=np.where(sampled, np.repeat(advantages, lengths), 0.0),
        weight=sampled.astype(float),
        views={"commit_step": view},
        denominators={"tokens": float(sampled.sum()), "turns": 8.0, "rows": float(len(played))},
    )


def requests(played: Sequence[Trajectory]) -> list[ScoreRequest]:
    return [ScoreRequest.of(game) for game in played]


ADVANTAGES = [1.0, -1.0, 0.5, 0.0, -0.5, 2.0]


def test_B6_the_score_pass_gives_the_log_probs_of_the_sampler_at_each_tokens_own_step(
    settings: ActorSettings,
) -> None:
    played = games()
    scores = DenoiserActor(settings).score(requests(played))
    assert max(game.num_turns for game in played) == 2
    for game, score in zip(played, scores, strict=True):
        sampled = [logp for turn in game.turns for logp in turn.logprobs]
        assert_allclose(score.logp, sampled, atol=1e-5)
        assert {f"tokens:{name}" for name in score.columns} == set(COLUMNS)
        assert all(column.shape == score.logp.shape for column in score.columns.values())
        steps = [step for turn in game.turns for step in turn.order]
        assert score.columns["commit_step"].tolist() == steps
        assert score.entropy == pytest.approx(float(score.columns["commit_entropy"].mean()))
    assert DenoiserActor(settings).score([]) == []


def test_a_game_without_an_answer_has_no_numbers(settings: ActorSettings) -> None:
    empty = Trajectory(TASK, 0, PROMPTS[0], (), StopReason.ENGINE_FAILED)
    score = DenoiserActor(settings).score(requests([empty, *games(1)]))[0]
    assert len(score.logp) == len(score.columns["gain"]) == 0


def test_tokens_without_their_steps_are_refused(settings: ActorSettings) -> None:
    game = games(1)[0]
    bare = replace(game, turns=tuple(replace(turn, order=()) for turn in game.turns))
    with pytest.raises(ValueError, match="were said at 0 steps"):
        DenoiserActor(settings).score(requests([bare]))


def updated(
    settings: ActorSettings, cut: Sequence[Sequence[int]], order: Sequence[int] = range(6)
) -> tuple[DenoiserActor, dict[str, tuple[float, float]]]:
    """An actor after one update whose games are cut into micro-batches."""
    actor = DenoiserActor(settings)
    played = [games()[index] for index in order]
    advantages = [ADVANTAGES[index] for index in order]
    batch = batch_of(played, actor.score(requests(played)), advantages)
    parts = [batch.select(np.array(part)) for part in cut]
    return actor, actor.update([(parts, batch.denominators)], 1)


def test_an_update_makes_good_answers_likelier_and_bad_ones_less_likely(
    settings: ActorSettings,
) -> None:
    played = games()
    before = DenoiserActor(settings).score(requests(played))
    actor, metrics = updated(settings, [range(6)])
    after = actor.score(requests(played))
    moved = [b.logp.sum() - a.logp.sum() for a, b in zip(before, after, strict=True)]
    assert np.dot(moved, ADVANTAGES) > 0
    assert actor.version == 1
    assert metrics["actor/grad_norm"][0] > 0
    assert metrics["actor/ppo_kl"][0] == pytest.approx(0.0, abs=1e-4)


def test_A11_the_update_does_not_depend_on_how_the_games_are_cut_or_ordered(
    settings: ActorSettings,
) -> None:
    slow = replace(settings, optimizer=replace(settings.optimizer, lr=1e-3))
    whole, _ = updated(slow, [range(6)])
    for cut, order in (([[0, 1], [2, 3, 4], [5]], range(6)), ([range(6)], [5, 2, 0, 4, 1, 3])):
        other, _ = updated(slow, cut, order)
        for name, value in denoiser_state(whole.model).items():
            # Adam's first step has the size of the rate whatever the gradient: near zero it is
            # rounding that decides, so gradients are what is compared.
            assert_allclose(
                whole.optimizer.state[dict(whole.model.named_parameters())[name]]["exp_avg"],
                other.optimizer.state[dict(other.model.named_parameters())[name]]["exp_avg"],
                atol=1e-6,
                err_msg=f"{name} {value.shape}",
            )


def test_a_token_without_advantage_trains_nothing_unless_entropy_is_paid(
    settings: ActorSettings,
) -> None:
    played = games(2)
    for coefficient, moves in ((0.0, False), (0.1, True)):
        actor = DenoiserActor(replace(settings, entropy_coeff=coefficient))
        before = actor.snapshot().checksum
        batch = batch_of(played, actor.score(requests(played)), [0.0, 0.0])
        metrics = actor.update([([batch, None], batch.denominators)], 1)
        assert (actor.snapshot().checksum != before) is moves
        assert metrics["actor/optimizer_steps"] == (1.0, 1.0)


def test_A18_no_steps_leave_the_policy_as_it_is(settings: ActorSettings) -> None:
    actor = DenoiserActor(settings)
    before = actor.snapshot()
    metrics = actor.update([], 1)
    assert (actor.version, metrics["actor/empty_updates"]) == (0, (1.0, 1.0))
    assert actor.snapshot().checksum == before.checksum


def test_R3_a_saved_and_loaded_actor_makes_the_same_next_update(settings: ActorSettings) -> None:
    straight, _ = updated(settings, [range(6)])
    resumed = DenoiserActor(settings)
    resumed.load_state(parse_state(dump_state(straight.state())))
    played = games()
    for actor in (straight, resumed):
        batch = batch_of(played, actor.score(requests(played)), ADVANTAGES)
        actor.update([([batch], batch.denominators)], 2)
    assert resumed.version == straight.version == 2
    assert resumed.snapshot().checksum == straight.snapshot().checksum


def test_engine_and_trainer_agree_after_a_sync(settings: ActorSettings, folder: Path) -> None:
    actor, _ = updated(settings, [range(6)])
    engine = build_engine(EngineSettings(str(folder)))
    assert isinstance(engine, DenoiserEngine)
    snapshot = actor.snapshot()
    assert state_checksum(snapshot.state) == snapshot.checksum
    ids = (4, 7, 9, 5, 6)
    assert not np.allclose(engine.score([ids])[0][1:], actor.probe(ids), atol=1e-3)
    engine.load_adapter(snapshot.state, snapshot.version)
    assert engine.score([ids])[0][1:].tolist() == actor.probe(ids).tolist()
    request = ask(3, temperature=0.8)
    answer = engine.step([request])[0]
    game = replace(games(2)[1], token_ids=(*request.prompt_ids, *answer.token_ids), turns=())
    asked = ScoreRequest(game.token_ids, np.arange(4, len(game.token_ids)), order=answer.order)
    assert_allclose(actor.score([asked])[0].logp, answer.logprobs, atol=1e-5)


def test_several_ranks_are_refused_by_name(settings: ActorSettings) -> None:
    with pytest.raises(UserError, match=r"one rank, not on 2: set actor_rollout_ref\.ngpus"):
        build_actor(settings, 0, 2)


def test_the_folder_says_which_kind_of_policy_is_trained(settings: ActorSettings) -> None:
    assert isinstance(build_actor(settings), DenoiserActor)
    public = {name for name in dir(PolicyActor) if not name.startswith("_")}
    assert public <= {name for name in dir(DenoiserActor) if not name.startswith("_")}


def test_the_order_of_an_answer_survives_the_store() -> None:
    game = games(1)[0]
    assert from_row(to_row(game, max_turns=2)) == game
    row = to_row(replace(game, turns=(replace(game.turns[0], order=()),)), max_turns=2)
    assert "order" not in row["turns"][0]


# --- what goes with it --------------------------------------------------------------------------

QUICK = "experiment=agreement_quickstart"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["multi_turn.logprob_reward.enabled=true"], "logprob_reward.enabled=false"),
        (
            ["multi_turn.logprob_sampling.enabled=true", "actor_rollout_ref.rollout.n=2"],
            "scores no candidates",
        ),
        (["algorithm=ppo"], "no critic, which gae trains"),
        (["algorithm=turn_ppo"], "no critic, which turn_ppo trains"),
        (["algorithm.transforms=[opid]"], "behind another context, as opid asks"),
        (["algorithm=hcapo"], "behind another context, as hcapo asks"),
        (["actor_rollout_ref.actor.use_kl_loss=true"], "use_kl_loss"),
        (["algorithm.tree.rule=arpo"], "algorithm.tree.rule=none"),
        (["actor_rollout_ref.model.lora_rank=4"], "trains all weights"),
        (["actor_rollout_ref.actor.dtype=bfloat16"], "computes in float32"),
        (["actor_rollout_ref.ngpus=2", "actor_rollout_ref.device=auto"], "trains on one rank"),
        (["actor_rollout_ref.rollout.tokens_per_step=0"], "tokens_per_step must be at least 1"),
        (["actor_rollout_ref.rollout.name=hf"], "algorithm.transforms=dtca reads the order"),
        (["algorithm.dtca.tau=0"], "algorithm.dtca.tau"),
        (["algorithm.dtca.decay=2"], "algorithm.dtca.decay"),
        (["algorithm.dtca.weight_low=2"], "algorithm.dtca.weight_low"),
        (["algorithm.dtca.step_share=0"], "algorithm.dtca.step_share"),
    ],
)
def test_what_does_not_go_with_a_denoiser_is_refused_by_name(words: list[str], named: str) -> None:
    cfg, _ = load_config([QUICK, *words])
    assert [sentence for sentence in problems(cfg) if named in sentence]
    assert not list(problems(load_config([QUICK])[0]))


def test_engine_and_length_of_answers_must_be_the_models(folder: Path) -> None:
    cfg, _ = load_config([QUICK, f"actor_rollout_ref.model.path={folder}"])
    with pytest.raises(UserError, match=r"data\.max_response_length=5"):
        check_kind(cfg, 2)
    five = replace(cfg, data=replace(cfg.data, max_response_length=5))
    check_kind(five, 2)
    with pytest.raises(UserError, match="ends its answers with token 2"):
        check_kind(five, 3)
    ref = cfg.actor_rollout_ref
    causal = replace(ref, model=replace(ref.model, path="elsewhere"))
    with pytest.raises(UserError, match=r"rollout\.name=denoiser does not play 'elsewhere'"):
        check_kind(replace(cfg, actor_rollout_ref=causal), 2)
    other = replace(ref, rollout=replace(ref.rollout, name="hf"))
    with pytest.raises(UserError, match=r"set actor_rollout_ref\.rollout\.name=denoiser"):
        check_kind(replace(cfg, actor_rollout_ref=other), 2)
    assert score_columns(cfg) == COLUMNS
    assert score_columns(replace(cfg, actor_rollout_ref=other)) == ()


def test_gains_are_missing_only_at_the_last_step(settings: ActorSettings) -> None:
    for score in DenoiserActor(settings).score(requests(games())):
        steps = score.columns["commit_step"]
        undefined = np.isnan(score.columns["gain"])
        assert math.isnan(score.columns["gain"][steps.argmax()]) or not undefined.any()
