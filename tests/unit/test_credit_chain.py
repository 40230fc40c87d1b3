"""Chains of credit, the views that a method asks for, and what of it travels to the losses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.algo import build_credit, find_method
from delta_belief_rl.algo.base import (
    LOGP,
    Advantage,
    Credit,
    Grain,
    Scorer,
    Stateless,
    check_requires,
    require_previous,
)
from delta_belief_rl.algo.chain import CreditChain, chain_of, elements_of
from delta_belief_rl.algo.credit.groups import total_reward, used_channels
from delta_belief_rl.algo.scorers.retry import RetryScorer
from delta_belief_rl.algo.shapers.channels import ChannelShaper, build_table
from delta_belief_rl.algo.shapers.normalise import NormaliseSettings, normalised_rewards
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer import steps
from delta_belief_rl.trainer.actor import BASE, POLICY, PolicyActor
from delta_belief_rl.trainer.hints import hinter, with_hint
from delta_belief_rl.trainer.packing import build_batch, flat_trajectories
from delta_belief_rl.trainer.rubrics import CHECKED
from delta_belief_rl.trainer.settings import credit_scorers
from delta_belief_rl.types import (
    FloatArray,
    Group,
    Message,
    StopReason,
    Task,
    Trajectory,
    Turn,
    TurnTable,
    UserError,
    Verdict,
)

AGENT = Path(fakes.__file__).parents[2] / "delta_belief_rl" / "assets" / "agent"
GROUPS = fakes.make_groups()
CFG = load_config(["experiment=quickstart"])[0]


@dataclass
class Halving:
    """Halves what it gets and counts how often."""

    calls: int = 0
    requires: ClassVar[tuple[str, ...]] = (LOGP,)
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN
    needs_group: bool = False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        before = require_previous(previous, "halving")
        self.calls += 1
        return replace(before, turns=before.turns / 2, stats={"halved": 1.0})

    def paid(self, table: TurnTable) -> FloatArray:
        raise AssertionError("only the first element pays")

    def state_dict(self) -> dict[str, object]:
        return {"calls": self.calls} if self.calls else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.calls = int(str(state.get("calls", 0)))


def table_of(groups: Sequence[Group] = tuple(GROUPS)) -> TurnTable:
    table = build_table(groups)
    rng = np.random.default_rng(0)
    return replace(table, rewards={"outcome": rng.normal(size=table.num_rows)})


def test_a_transform_changes_what_the_estimator_found_and_nothing_else() -> None:
    table, alone = table_of(), build_credit("rloo")
    chained = chain_of([("rloo", build_credit("rloo")), ("halving", Halving())])
    before, after = alone.apply(table), chained.apply(table)
    np.testing.assert_array_equal(after.turns, before.turns / 2)
    np.testing.assert_array_equal(after.weight, before.weight)
    np.testing.assert_array_equal(after.rewards, before.rewards)
    assert after.stats == {**before.stats, "halved": 1.0}


def test_a_single_element_is_itself_so_that_its_state_has_no_other_form() -> None:
    rloo = build_credit("rloo")
    assert chain_of([("rloo", rloo)]) is rloo
    assert elements_of(rloo) == (rloo,)


def test_a_chain_compares_games_where_its_estimator_does() -> None:
    def chain(name: str) -> Credit:
        return chain_of([(name, build_credit(name)), ("halving", Halving())])

    assert chain("rloo").needs_group
    assert not chain("reinforce").needs_group


def test_R2_the_state_of_each_element_survives_a_round_trip() -> None:
    first = CreditChain({"rloo": build_credit("rloo"), "halving": Halving()})
    assert first.state_dict() == {}
    first.apply(table_of())
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"halving": {"calls": 1}}
    again = Halving(calls=7)
    CreditChain({"rloo": build_credit("rloo"), "halving": again}).load_state_dict(state)
    assert again.calls == 1


def test_a_state_of_another_chain_is_refused_by_name() -> None:
    chain = CreditChain({"rloo": build_credit("rloo"), "halving": Halving()})
    with pytest.raises(UserError, match="a state of pearl, which is not among rloo, halving"):
        chain.load_state_dict({"pearl": {"memory": []}})


def test_a_transform_in_the_first_place_is_refused() -> None:
    with pytest.raises(UserError, match=r"name that in algorithm\.adv_estimator"):
        chain_of([("halving", Halving())]).apply(table_of())


def test_an_estimator_behind_another_one_is_refused() -> None:
    chain = chain_of([("rloo", build_credit("rloo")), ("grpo", build_credit("grpo"))])
    with pytest.raises(UserError, match="put it first"):
        chain.apply(table_of())


def test_a_method_stands_in_a_chain_once() -> None:
    pearl = ("pearl", build_credit("pearl", transform=True))
    with pytest.raises(UserError, match="name pearl more than once"):
        chain_of([("grpo", build_credit("grpo")), pearl, pearl])


@pytest.mark.parametrize("name", ["grpo_turn", "mt_grpo", "multi_turn_reinforce"])
def test_returns_on_one_scale_reach_every_turn_of_a_game(name: str) -> None:
    table = table_of()
    won = np.isin(table.traj, [1, 3])
    rewards = {"outcome": np.where(won & table.terminal, 1.0, 0.0)}
    table = replace(table, rewards=rewards, won=won)
    scaled = replace(table, rewards=normalised_rewards(table, NormaliseSettings("mean_std")))
    turns = build_credit(name).apply(scaled).turns
    # At later turns no sibling may be left to compare with.
    assert (turns[won & (table.turn == 0)] > 0).all()


def test_a_token_column_that_the_settings_name_is_looked_for_at_the_start() -> None:
    words = ["experiment=quickstart", "algorithm=mpo", "algorithm.mpo.signal=external"]
    told, _ = load_config([*words, "algorithm.mpo.column=view:reference"])
    assert [scorer.view for scorer in credit_scorers(told)] == ["reference"]
    wrong, _ = load_config([*words, "algorithm.mpo.column=view:refrence"])
    with pytest.raises(UserError, match="needs the view 'refrence'"):
        credit_scorers(wrong)


@pytest.mark.parametrize("rule", ["strict", "compatible"])
def test_a_view_that_no_method_tells_itself_knows_what_a_win_is(rule: str) -> None:
    class Needing(Halving):
        requires: ClassVar[tuple[str, ...]] = ("view:retry",)

    cfg, _ = load_config(["experiment=quickstart", f"multi_turn.win_rule={rule}"])
    (scorer,) = credit_scorers(cfg, Needing())
    assert isinstance(scorer, RetryScorer)
    assert scorer.settings.rule == rule


def test_estimators_and_transforms_have_lists_of_their_own() -> None:
    with pytest.raises(UserError, match=r"algorithm\.transforms is 'grpo'"):
        find_method("grpo", transform=True)
    with pytest.raises(UserError, match=r"algorithm\.adv_estimator is 'halving'"):
        find_method("halving")


def test_what_each_element_needs_is_looked_for_by_name() -> None:
    check_requires(Halving(), (), ChannelShaper.provides, "maze", [LOGP])
    with pytest.raises(UserError, match="Halving needs tokens:logp, which nothing"):
        check_requires(Halving(), (), ChannelShaper.provides, "maze")


@pytest.mark.parametrize("name", ["grpo", "grpo_turn", "mt_grpo", "multi_turn_reinforce"])
def test_the_rewards_of_an_evaluation_are_those_that_training_would_use(name: str) -> None:
    table = table_of()
    valid = np.arange(table.num_rows) % 3 != 0
    table = replace(table, valid=valid)
    credit = build_credit(name)
    np.testing.assert_array_equal(credit.paid(table), credit.apply(table).rewards)
    if name != "grpo_turn":
        np.testing.assert_array_equal(credit.paid(table), total_reward(used_channels(table), table))


# --- token columns --------------------------------------------------------------------------------


def test_A9_each_sampled_token_knows_its_row() -> None:
    table = table_of()
    rows = table.token_row()
    assert len(rows) == table.n_tokens.sum()
    np.testing.assert_array_equal(np.bincount(rows, minlength=table.num_rows), table.n_tokens)
    assert (np.diff(rows) >= 0).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("chain") / "model")


def shifted(game: Trajectory, extra: tuple[int, ...]) -> Any:
    """The view of a game with some tokens in front of its first turn."""
    from delta_belief_rl.belief.branched import View

    first = game.turns[0].start
    ids = (*game.token_ids[:first], *extra, *game.token_ids[first:])
    return View(ids, np.flatnonzero(game.action_mask()).astype(np.int64) + len(extra))


def test_a_view_is_a_plain_score_of_the_other_stream_and_touches_nothing_else(
    folder: Path,
) -> None:
    contexts = (("told", POLICY), ("told_base", BASE))
    actor = fakes.stir(PolicyActor(fakes.settings_of(folder, contexts=contexts)))
    games = flat_trajectories(GROUPS)
    requests = fakes.requests(GROUPS, None)
    told = [shifted(game, (5, 6, 7)) for game in games]
    asked = [
        replace(ask, views={} if index == 1 else {"told": view, "told_base": view})
        for index, (ask, view) in enumerate(zip(requests, told, strict=True))
    ]
    scores, plain = actor.score(asked), actor.score(requests)
    for index, (score, without) in enumerate(zip(scores, plain, strict=True)):
        np.testing.assert_array_equal(score.logp, without.logp)
        assert np.isnan(without.views["told"]).all()
        if index == 1:
            assert np.isnan(score.views["told"]).all()
            assert len(score.views["told"]) == len(score.logp)
            continue
        other = [ScoreRequest(told[index].token_ids, told[index].action_positions)]
        np.testing.assert_allclose(score.views["told"], actor.score(other)[0].logp, atol=1e-5)
        assert np.abs(score.views["told"] - score.logp).max() > 1e-3
        assert np.abs(score.views["told"] - score.views["told_base"]).max() > 1e-3


def test_columns_of_the_score_pass_lie_as_the_rows_of_the_table_do(folder: Path) -> None:
    # The base reads checks of rules in a context of its own, which is no view of any game.
    contexts = (("told", POLICY), (CHECKED, BASE))
    actor = fakes.stir(PolicyActor(fakes.settings_of(folder, contexts=contexts)))
    scores = actor.score(fakes.requests(GROUPS, None))
    columns = steps.token_columns(scores)
    assert set(columns) == {"logp", "view:told"}
    nothing = np.zeros(table_of().num_rows)
    assert set(steps.batch_columns(table_of(), Advantage(nothing, nothing), scores)) == {"told"}
    rows = table_of().token_row()
    at = 0
    for game, score in zip(flat_trajectories(GROUPS), scores, strict=True):
        for turn in game.turns:
            span = slice(at, at + turn.n_tokens)
            assert len(set(rows[span].tolist())) == 1
            at += turn.n_tokens
        np.testing.assert_array_equal(columns["logp"][at - len(score.logp) : at], score.logp)


def test_targets_and_weights_of_the_credit_reach_their_tokens(folder: Path) -> None:
    actor = PolicyActor(fakes.settings_of(folder))
    scores, table = actor.score(fakes.requests(GROUPS, None)), table_of()
    tokens = int(table.n_tokens.sum())
    advantage = Advantage(
        np.zeros(table.num_rows),
        np.ones(table.num_rows),
        targets=np.arange(tokens, dtype=np.float64),
        distil=np.arange(table.num_rows, dtype=np.float64),
    )
    columns = steps.batch_columns(table, advantage, scores)
    batch = build_batch(
        GROUPS,
        table,
        advantage.turns,
        advantage.weight,
        [score.logp for score in scores],
        columns,
    )
    sampled = batch.turn_ids >= 0
    np.testing.assert_array_equal(batch.views["targets"][sampled], np.arange(tokens))
    np.testing.assert_array_equal(batch.views["distil"][sampled], table.token_row())
    assert not batch.views["targets"][~sampled].any()


# --- hints ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Telling(Stateless):
    """Tells the games of one task something."""

    about: str
    view: str = "told"
    model: str = POLICY
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ("view:told",)
    grain: ClassVar[Grain] = Grain.TRAJECTORY
    seen: list[int] = field(default_factory=list[int])

    def hints(self, groups: Sequence[Group]) -> list[str | None]:
        self.seen.append(sum(len(group.trajectories) for group in groups))
        return [
            "It is made of wood." if group.task.id == self.about else None
            for group in groups
            for _ in group.trajectories
        ]


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.from_tokenizer(load_tokenizer(str(AGENT)))


def played(chat: ChatFormat, task: Task, questions: Sequence[str]) -> Trajectory:
    """A game of the packaged agent's format."""
    ids = list(chat.open_ids(task.messages))
    turns: list[Turn] = []
    for index, question in enumerate(questions):
        start = len(ids)
        ids += chat.assistant_ids(question)
        span = (start, len(ids), (-0.5,) * (len(ids) - start))
        turns.append(Turn(index, *span, 0, question, "No", Verdict.NO))
        ids += chat.reply_ids("No")
    return Trajectory(task, 0, tuple(ids), tuple(turns), StopReason.TURN_LIMIT)


def test_a_hint_changes_the_opening_and_leaves_every_sampled_token_in_its_order(
    chat: ChatFormat,
) -> None:
    task = Task("t", "tw_q", "oak", (Message("user", "guess the thing"),))
    game = played(chat, task, ["is it alive ?", "is it a tree ?"])
    view = hinter(chat)(game, "it is alive")
    mask = game.action_mask()
    ids = np.asarray(view.token_ids)
    np.testing.assert_array_equal(ids[view.action_positions], np.asarray(game.token_ids)[mask])
    opening = chat.open_ids((Message("user", "guess the thing\n\nit is alive"),))
    assert tuple(view.token_ids[: len(opening)]) == opening
    assert tuple(view.token_ids[len(opening) :]) == game.token_ids[game.turns[0].start :]
    assert len(opening) > game.turns[0].start


def test_a_hint_goes_to_the_end_of_the_last_opening_message() -> None:
    messages = (Message("system", "rules"), Message("user", "begin"))
    told = with_hint(messages, "hint")
    assert told == (messages[0], Message("user", "begin\n\nhint"))


def test_only_games_with_something_to_tell_get_a_view(chat: ChatFormat) -> None:
    tasks = [Task(name, "tw_q", "oak", (Message("user", "begin"),)) for name in ("a", "b")]
    groups = [Group(task, (played(chat, task, ["is it alive ?"]),)) for task in tasks]
    scorer = Telling("b")
    assert isinstance(scorer, Scorer)
    run: Any = SimpleNamespace(scorers=(scorer,), hinted=hinter(chat))
    requests = [ScoreRequest.of(game) for game in flat_trajectories(groups)]
    asked = steps.with_views(run, groups, requests)
    assert [set(ask.views) for ask in asked] == [set(), {"told"}]
    assert [ask.token_ids for ask in asked] == [ask.token_ids for ask in requests]
    assert scorer.seen == [2]


def test_a_view_that_nothing_makes_is_refused_by_name() -> None:
    class Needing(Halving):
        requires: ClassVar[tuple[str, ...]] = ("view:nowhere",)

    with pytest.raises(UserError, match="needs the view 'nowhere'"):
        credit_scorers(CFG, Needing())
    assert credit_scorers(CFG, Halving()) == ()
