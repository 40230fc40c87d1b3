"""A denoiser as the policy that is trained: scores, updates, state, what does not go with it."""

from __future__ import annotations

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
from delta_belief_rl.trainer import denoiser_actor
from delta_belief_rl.trainer.actor import ActorSettings, PolicyActor, dump_state, parse_state
from delta_belief_rl.trainer.denoiser_actor import COLUMNS, DenoiserActor
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.policy_engine import EngineSettings
from delta_belief_rl.trainer.policy_kinds import (
    build_actor,
    build_engine,
    check_kind,
    least_turn_tokens,
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
from tests.unit.denoiser_fakes import CONFIG, ask, tiny
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


def first_moments(actor: DenoiserActor) -> dict[str, np.ndarray]:
    """What one update has left of its gradient, by name."""
    return {
        name: actor.optimizer.state[parameter]["exp_avg"].numpy()
        for name, parameter in actor.model.named_parameters()
    }


def sparse_batch(actor: DenoiserActor) -> TrainBatch:
    """Three games, in the first two of which one token has an advantage, in the third none."""
    played = games(3)
    batch = batch_of(played, actor.score(requests(played)), [1.0, -1.0, 0.0])
    firsts = [span.start + played[n].turns[0].start for n, span in enumerate(batch.games())]
    only = np.isin(np.arange(len(batch.token_ids)), firsts)
    return replace(batch, advantages=np.where(only, batch.advantages, 0.0))


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "turn-mean"])
def test_A11_tokens_without_advantage_stay_in_the_means_of_their_game_and_turn(
    settings: ActorSettings, mode: str
) -> None:
    loss = replace(settings.loss, loss_agg_mode=mode)
    actor, plain = DenoiserActor(replace(settings, loss=loss)), DenoiserActor(settings)
    batch = sparse_batch(actor)
    counts = [len(batch.token_ids[span][batch.turn_ids[span] >= 0]) for span in batch.games()]
    if mode == "turn-mean":
        turns = [batch.turn_ids[span] for span in batch.games()]
        counts = [int((turn == 0).sum()) for turn in turns]
    ones = {"tokens": 1.0, "rows": 1.0, "turns": 1.0}
    actor.update([([batch], ones)], 1)
    # The same loss as a plain sum, each advantage divided by the tokens of its game or turn.
    sizes = np.repeat(np.array(counts, dtype=float), batch.lengths())
    plain.update([([replace(batch, advantages=batch.advantages / sizes)], ones)], 1)
    for name, value in first_moments(actor).items():
        assert_allclose(value, first_moments(plain)[name], atol=1e-6, err_msg=name)


def test_metrics_count_every_token_of_a_game_that_is_trained(settings: ActorSettings) -> None:
    actor = DenoiserActor(settings)
    batch = sparse_batch(actor)
    metrics = actor.update([([batch], batch.denominators)], 1)
    used = sum(int((batch.turn_ids[span] >= 0).sum()) for span in list(batch.games())[:2])
    assert metrics["actor/pg_loss"][1] == metrics["actor/ppo_kl"][1] == used


@pytest.mark.parametrize("entropy", [0.0, 0.01])
def test_M1_the_gradient_does_not_depend_on_how_many_states_are_asked_at_once(
    settings: ActorSettings, monkeypatch: pytest.MonkeyPatch, entropy: float
) -> None:
    settings = replace(settings, entropy_coeff=entropy)
    found: list[dict[str, np.ndarray]] = []
    told: list[dict[str, tuple[float, float]]] = []
    for size in (10**6, 1, 3):
        monkeypatch.setattr(denoiser_actor, "rows_at_once", lambda *_, size=size: size)
        actor = DenoiserActor(settings)
        batch = sparse_batch(actor)
        told.append(actor.update([([batch], batch.denominators)], 1))
        found.append(first_moments(actor))
    assert any(np.abs(value).max() > 1e-3 for value in found[0].values())
    for other, metrics in zip(found[1:], told[1:], strict=True):
        assert metrics.keys() == told[0].keys()
        for name, pair in metrics.items():
            assert_allclose(pair, told[0][name], rtol=1e-4, atol=1e-5, err_msg=name)
        for name, value in other.items():
            assert_allclose(value, found[0][name], atol=1e-6, err_msg=name)


def test_M1_no_forward_of_an_update_has_more_tokens_than_the_micro_batch(
    settings: ActorSettings,
) -> None:
    actor = DenoiserActor(settings)
    played = games()
    batch = batch_of(played, actor.score(requests(played)), [1.0] * 6)
    asked: list[int] = []
    actor.model.register_forward_hook(lambda _model, given, _out: asked.append(given[0].numel()))
    actor.update([([batch], batch.denominators)], 1)
    steps = sum(max(turn.order) + 1 for game in played for turn in game.turns)
    assert max(asked) <= len(batch.token_ids)
    # Each part twice: for the loss, and for its gradient.
    assert len(asked) >= 4
    assert sum(asked) >= 2 * steps * CONFIG.answer_length


def test_A18_no_steps_leave_the_policy_as_it_is(settings: ActorSettings) -> None:
    actor = DenoiserActor(settings)
    before = actor.snapshot()
    metrics = actor.update([], 1)
    assert (actor.version, metrics["actor/empty_updates"]) == (0, (1.0, 1.0))
    assert actor.snapshot().checksum == before.checksum


def test_a_saved_and_loaded_actor_makes_the_same_next_update(settings: ActorSettings) -> None:
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


class FixedChat:
    """A chat whose openings all have one length."""

    def __init__(self, opening: int = 4, eot_id: int = 2) -> None:
        self.opening, self.eot_id = opening, eot_id

    def open_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """So many tokens."""
        del messages
        return (4,) * self.opening

    def reply_ids(self, reply: str) -> tuple[int, ...]:
        """None."""
        del reply
        return ()

    def decode(self, ids: Sequence[int]) -> str:
        """Their numbers."""
        return " ".join(map(str, ids))


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
        (["actor_rollout_ref.actor.dtype=auto"], "computes in float32"),
        (["actor_rollout_ref.rollout.dtype=bfloat16"], "computes in float32"),
        (["actor_rollout_ref.model.use_liger=true"], "model.use_liger=false"),
        (
            ["actor_rollout_ref.model.enable_gradient_checkpointing=true"],
            "model.enable_gradient_checkpointing=false",
        ),
        (
            ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"],
            "fsdp_config.optimizer_offload=false",
        ),
        (
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            "rollout.tensor_model_parallel_size=1",
        ),
        (["actor_rollout_ref.rollout.tokens_per_step=14"], "more than the 13 places"),
        (["actor_rollout_ref.rollout.tokens_per_step=13"], "fills an answer in one step"),
        (["algorithm=archer"], "as archer does"),
        (["algorithm=istar"], "as istar does"),
        (["algorithm=spa_rl"], "as spa_rl does"),
        (["actor_rollout_ref.ngpus=2", "actor_rollout_ref.device=auto"], "trains on one rank"),
        (["actor_rollout_ref.rollout.tokens_per_step=0"], "tokens_per_step must be at least 1"),
        (["actor_rollout_ref.rollout.name=hf"], "algorithm.transforms=dtca reads the order"),
        (["algorithm.dtca.tau=0"], "algorithm.dtca.tau"),
        (["algorithm.dtca.decay=2"], "algorithm.dtca.decay"),
        (["algorithm.dtca.weight_low=2"], "algorithm.dtca.weight_low"),
        (["algorithm.dtca.weight_low=0"], "algorithm.dtca.weight_low"),
        (["algorithm.dtca.step_share=0"], "algorithm.dtca.step_share"),
    ],
)
def test_what_does_not_go_with_a_denoiser_is_refused_by_name(words: list[str], named: str) -> None:
    cfg, _ = load_config([QUICK, *words])
    assert [sentence for sentence in problems(cfg) if named in sentence]
    assert not list(problems(load_config([QUICK])[0]))


def test_engine_and_length_of_answers_must_be_the_models(folder: Path) -> None:
    words = [f"actor_rollout_ref.model.path={folder}", "data.max_prompt_length=16"]
    cfg, _ = load_config([QUICK, *words])
    with pytest.raises(UserError, match=r"data\.max_response_length=5"):
        check_kind(cfg, FixedChat())
    five = replace(cfg, data=replace(cfg.data, max_response_length=5))
    check_kind(five, FixedChat())
    with pytest.raises(UserError, match="ends its answers with token 2"):
        check_kind(five, FixedChat(eot_id=3))
    ref = cfg.actor_rollout_ref
    causal = replace(ref, model=replace(ref.model, path="elsewhere"))
    with pytest.raises(UserError, match=r"rollout\.name=denoiser does not play 'elsewhere'"):
        check_kind(replace(cfg, actor_rollout_ref=causal), FixedChat())
    other = replace(ref, rollout=replace(ref.rollout, name="hf"))
    with pytest.raises(UserError, match=r"set actor_rollout_ref\.rollout\.name=denoiser"):
        check_kind(replace(cfg, actor_rollout_ref=other), FixedChat())
    assert score_columns(cfg) == COLUMNS
    assert score_columns(replace(cfg, actor_rollout_ref=other)) == ()


def test_a_game_that_has_no_room_for_an_answer_is_refused_before_it_starts(folder: Path) -> None:
    words = [f"actor_rollout_ref.model.path={folder}", "data.max_response_length=5"]

    def check(room: int, opening: int) -> None:
        cfg, _ = load_config([QUICK, *words, f"data.max_prompt_length={room}"])
        check_kind(cfg, FixedChat(opening), [TASK])

    check(16, 11)
    check(14, 9)
    with pytest.raises(UserError, match=r"data\.max_prompt_length=17 .* has 16 places"):
        check(17, 4)
    with pytest.raises(UserError, match=r"'t' and an answer take 15 tokens, more than .*=14"):
        check(14, 10)


def test_a_turn_of_a_denoiser_needs_room_for_a_whole_answer() -> None:
    assert least_turn_tokens(load_config([QUICK])[0]) == 13
    assert least_turn_tokens(load_config(["experiment=quickstart"])[0]) == 1


def test_gains_are_missing_only_at_the_last_step(settings: ActorSettings) -> None:
    played = games()
    longest = 0
    for game, score in zip(played, DenoiserActor(settings).score(requests(played)), strict=True):
        ends = np.cumsum([turn.n_tokens for turn in game.turns])[:-1]
        gains = np.split(score.columns["gain"], ends)
        steps = np.split(score.columns["commit_step"], ends)
        for gain, step in zip(gains, steps, strict=True):
            assert np.isnan(gain).tolist() == (step == step.max()).tolist()
            longest = max(longest, int(np.isfinite(gain).sum()))
    assert longest > 1
