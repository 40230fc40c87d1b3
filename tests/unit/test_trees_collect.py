"""A batch of secrets played as trees: rounds, budgets, what is kept and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_fakes import HEADER, VOCAB, CharChat, HookedEnv, ScriptedEnv, ScriptedJudge, make_task

from delta_belief_rl.config import rules_trees
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.engines.fake_engine import FakeEngine, Fault, FaultKind
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.pump import EngineFailure, EnginePump, EngineRouter, local_calls
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.models.loading import build_causal_lm, tiny_qwen3_config
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.rollout.game import GameId, GameSettings
from delta_belief_rl.rollout.store import read_trajectories, write_groups
from delta_belief_rl.trainer import trees
from delta_belief_rl.types import Group, StopReason, Task, Trajectory, UserError, Verdict

CHAT = CharChat()
TASKS = [make_task(f"t{number}") for number in range(3)]
TURNS = 4
SETTINGS = GameSettings(
    max_turns=TURNS, max_turn_tokens=5, max_episode_tokens=300, clock=lambda: 0.0
)
RULES: Mapping[str, tuple[str, ...]] = {
    "arpo": ("multi_turn.train.n=8",),
    "tree_grpo": ("multi_turn.train.n=6", "algorithm.tree.tree_grpo.expand=4"),
    "at2po": ("multi_turn.train.n=8",),
}
PLAYED = {"arpo": 8, "tree_grpo": 10, "at2po": 8}


class RewindEnv(HookedEnv):
    def snapshot(self) -> object:
        return tuple(self.history)

    def restore(self, snapshot: Any) -> None:
        self.history = list(snapshot)


class ReplayEnv(HookedEnv):
    def replayable(self) -> bool:
        return True


def tiny_model() -> Any:
    """Weights large enough that tokens are neither sure nor all alike."""
    model = build_causal_lm(tiny_qwen3_config(VOCAB))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model.eval()


MODEL = tiny_model()


def config(rule: str, *more: str) -> RunConfig:
    words = ["experiment=quickstart", f"algorithm.tree.rule={rule}", *RULES.get(rule, ()), *more]
    return load_config(words)[0]


def delays(salt: str) -> Callable[[JudgeRequest], float]:
    def delay(request: JudgeRequest) -> float:
        text = f"{salt}/{request.task.id}/{request.action}/{len(request.history)}"
        return hashlib.sha256(text.encode()).digest()[0] / 255 * 0.005

    return delay


def driver_of(
    make: Callable[[Task], Any] = RewindEnv, salt: str = "", **options: Any
) -> tuple[RolloutDriver, ScriptedJudge]:
    judge = ScriptedJudge(delay=delays(salt) if salt else None)
    pump = EnginePump(
        *local_calls(HFEngine(MODEL, max_sequences=32, max_len=320), threaded=False),
        deterministic=True,
    )
    settings: dict[str, Any] = {"max_games": 64, "run_seed": 42, "run_id": "run-a"} | options
    return RolloutDriver(EngineRouter([pump]), judge, CHAT, make, SETTINGS, **settings), judge


def grown(cfg: RunConfig, step: int = 2, tasks: Any = TASKS, **options: Any) -> list[Group]:
    driver, _ = driver_of(**options)
    return asyncio.run(trees.grow(driver, cfg, tasks, step, SamplingParams()))


@pytest.fixture(scope="module")
def forests() -> dict[str, list[Group]]:
    return {rule: grown(config(rule)) for rule in RULES}


def check_lineage(group: Group) -> int:
    """Every branch begins as the game that it left; returns the number of branches."""
    games, branches = group.trajectories, 0
    assert [game.game for game in games] == list(range(len(games)))
    for game in games:
        if game.lineage:
            assert game.lineage[-1][0] == game.game
        if game.branch_of is None:
            continue
        branches += 1
        number, turn = game.branch_of
        parent = games[number]
        assert number < game.game
        assert game.turns[:turn] == parent.turns[:turn]
        end = parent.turns[turn].start
        assert game.token_ids[:end] == parent.token_ids[:end]
        assert game.tree == parent.tree
        assert [turn.index for turn in game.turns] == list(range(game.num_turns))
    return branches


@pytest.mark.parametrize("rule", RULES)
def test_T1_every_branch_has_its_parents_beginning_token_by_token(
    rule: str, forests: dict[str, list[Group]]
) -> None:
    assert [group.task.id for group in forests[rule]] == [task.id for task in TASKS]
    assert [len(group.trajectories) for group in forests[rule]] == [PLAYED[rule]] * 3
    assert sum(check_lineage(group) for group in forests[rule]) > 0


def test_trees_have_the_shape_that_their_rule_gives_them(
    forests: dict[str, list[Group]],
) -> None:
    for group in forests["at2po"]:
        assert {game.tree for game in group.trajectories} == {0}
        # 4 from the opening, then twice 2.
        assert sum(not game.num_shared for game in group.trajectories[:4]) == 4
        assert group.trajectories[0].lineage == ()
        assert group.trajectories[1].lineage == ((0, 0), (1, 0))
    for group in forests["tree_grpo"]:
        assert Counter(game.tree for game in group.trajectories) == {0: 5, 1: 5}
    for group in forests["arpo"]:
        left = Counter(game.branch_of[0] for game in group.trajectories if game.branch_of)
        assert max(left.values()) == 1


@pytest.mark.parametrize("rule", RULES)
def test_R2_a_step_is_a_function_of_seed_secret_and_step(
    rule: str, forests: dict[str, list[Group]]
) -> None:
    choices: tuple[dict[str, Any], ...] = ({"salt": "x"}, {"salt": "y"}, {"max_games": 3})
    for options in choices:
        again = grown(config(rule), **options)
        assert [[game.token_ids for game in group.trajectories] for group in again] == [
            [game.token_ids for game in group.trajectories] for group in forests[rule]
        ]
        assert [[game.lineage for game in group.trajectories] for group in again] == [
            [game.lineage for game in group.trajectories] for group in forests[rule]
        ]
    alone = grown(config(rule), tasks=TASKS[1:2])
    assert [g.token_ids for g in alone[0].trajectories] == [
        g.token_ids for g in forests[rule][1].trajectories
    ]
    other = grown(config(rule), step=3)
    assert [g.token_ids for g in other[0].trajectories] != [
        g.token_ids for g in forests[rule][0].trajectories
    ]


@pytest.mark.parametrize("rule", RULES)
def test_an_environment_that_replays_gives_what_one_with_snapshots_gives(
    rule: str, forests: dict[str, list[Group]]
) -> None:
    assert grown(config(rule), make=ReplayEnv) == forests[rule]


@pytest.mark.parametrize("rule", RULES)
def test_the_environment_is_asked_once_for_each_turn_that_is_counted_as_played(
    rule: str, forests: dict[str, list[Group]]
) -> None:
    driver, judge = driver_of()
    groups = asyncio.run(trees.grow(driver, config(rule), TASKS, 2, SamplingParams()))
    assert groups == forests[rule]
    played = trees.played_turns(groups)
    silent = sum(
        turn.verdict is Verdict.INVALID
        for group in groups
        for game in group.trajectories
        for turn in game.turns[game.num_shared :]
    )
    assert len(judge.requests) == played - silent
    total = sum(game.num_turns for group in groups for game in group.trajectories)
    assert played < total


@pytest.mark.parametrize("rule", RULES)
def test_a_book_counts_all_games_and_passes_on_those_that_are_trained_on(
    rule: str, forests: dict[str, list[Group]]
) -> None:
    cfg, played = config(rule), forests[rule]
    book = trees.Book(cfg)
    kept = book.enter(played, 2)
    size = cfg.multi_turn.train.n
    assert [len(group.trajectories) for group in kept] == [size] * 3
    assert book.games == 3 * PLAYED[rule]
    if rule == "tree_grpo":
        for group, all_of in zip(kept, played, strict=True):
            assert Counter(game.tree for game in group.trajectories) == {0: 3, 1: 3}
            assert set(group.trajectories) < set(all_of.trajectories)
    else:
        assert kept == played
    metrics = book.metrics(kept)
    turns = [game.num_turns for group in kept for game in group.trajectories]
    shared = [game.num_shared for group in kept for game in group.trajectories]
    assert metrics == {
        "state_turns/played": float(trees.played_turns(played)),
        "state_turns/total": float(sum(turns)),
        "train/branch_share": sum(n > 0 for n in shared) / (3 * size),
        "train/shared_turn_share": sum(shared) / sum(turns),
    }
    # A second batch of the same step adds up.
    book.enter(played, 2)
    assert book.metrics(kept)["state_turns/played"] == 2 * metrics["state_turns/played"]


def test_without_a_rule_a_book_is_empty(forests: dict[str, list[Group]]) -> None:
    book = trees.Book(config("none"))
    assert book.enter(forests["arpo"], 1) is forests["arpo"]
    assert book.metrics(forests["arpo"]) == {}
    assert book.games == 0


def test_lineages_survive_the_disk_and_other_games_have_no_such_field(
    tmp_path: Path, forests: dict[str, list[Group]]
) -> None:
    path = tmp_path / "games.jsonl"
    write_groups(path, forests["tree_grpo"], max_turns=TURNS)
    read = read_trajectories(path)
    games = [game for group in forests["tree_grpo"] for game in group.trajectories]
    assert read.damaged == ()
    assert list(read.trajectories) == games
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [("lineage" in row) for row in rows] == [bool(game.lineage) for game in games]


# --- failures ------------------------------------------------------------------------------------


class Mended:
    """Lets a failed round be played again."""

    def __init__(self) -> None:
        self.began = 0
        self.failures = 0

    def begin(self) -> None:
        self.began += 1

    async def failed(self, failure: EngineFailure, games: int) -> None:
        self.failures += 1


def fake_driver(
    faults: dict[tuple[str, int], Fault] | None = None, crash: tuple[str, int] | None = None
) -> tuple[RolloutDriver, Mended]:
    """Every game says its own number and turn; one call may lose the engine once."""
    left = [crash] if crash else []

    def say(request: Any) -> str:
        place = (request.session, request.prompt_ids.count(HEADER) - 1)
        if place in left:
            left.remove(place)
            raise EngineFailure("lost")
        return f"{request.session[-2:]}.{place[1]}"

    engine = FakeEngine(say, CHAT.encode, faults=faults)
    mended = Mended()
    driver = RolloutDriver(
        engine, ScriptedJudge(), CHAT, RewindEnv, SETTINGS, max_games=64, run_seed=42
    )
    driver.replay = mended
    return driver, mended


def test_a_round_that_loses_its_engine_is_played_again_from_the_same_states() -> None:
    cfg = config("at2po")
    driver, mended = fake_driver()
    straight = asyncio.run(trees.grow(driver, cfg, TASKS, 2, SamplingParams()))
    assert mended.began == 3
    # Game 7 is of the last round, and leaves one that is a branch itself.
    branch = straight[0].trajectories[7]
    assert len(branch.lineage) > 1
    again, lost = fake_driver(crash=(GameId(42, 2, 7).session("t0"), branch.num_turns - 1))
    assert asyncio.run(trees.grow(again, cfg, TASKS, 2, SamplingParams())) == straight
    assert (lost.began, lost.failures) == (3, 1)


def test_a_game_that_a_failure_ended_is_not_continued() -> None:
    sessions = [GameId(42, 2, number).session("t0") for number in range(8)]
    faults = {(sessions[0], 2): Fault(FaultKind.ERROR), (sessions[1], 0): Fault(FaultKind.ERROR)}
    driver, _ = fake_driver(faults)
    (group,) = asyncio.run(trees.grow(driver, config("at2po"), TASKS[:1], 2, SamplingParams()))
    assert [game.stop for game in group.trajectories[:2]] == [StopReason.ENGINE_FAILED] * 2
    assert len(group.trajectories) == 8
    assert all(game.branch_of is None or game.branch_of[0] > 1 for game in group.trajectories)
    assert check_lineage(group) == 4


def test_a_group_without_a_game_that_can_be_left_begins_games_from_the_opening() -> None:
    sessions = [GameId(42, 2, number).session("t0") for number in range(8)]
    faults = {(session, 0): Fault(FaultKind.ERROR) for session in sessions}
    for rule, trees_of in (("at2po", {0: 8}), ("arpo", dict.fromkeys(range(8), 1))):
        driver, _ = fake_driver(faults)
        (group,) = asyncio.run(trees.grow(driver, config(rule), TASKS[:1], 2, SamplingParams()))
        assert [game.num_turns for game in group.trajectories] == [0] * 8
        assert Counter(game.tree for game in group.trajectories) == trees_of


def test_no_tasks_make_no_groups() -> None:
    driver, _ = fake_driver()
    assert asyncio.run(trees.grow(driver, config("arpo"), [], 1, SamplingParams())) == []


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rule=arpo", "arpo.initial=9"], "arpo.initial must lie between 1 and .*n=8, not 9"),
        (["rule=arpo", "arpo.initial=0"], "arpo.initial must lie between 1"),
        (["rule=arpo", "arpo.first_tokens=0"], "arpo.first_tokens must be at least 1, not 0"),
        (["rule=arpo", "arpo.beam=0"], "algorithm.tree.arpo.beam is 0"),
        (["rule=arpo", "arpo.base_probability=2"], "algorithm.tree.arpo.base_probability is 2"),
        (["rule=arpo", "arpo.entropy_weight=-1"], "algorithm.tree.arpo.entropy_weight is -1"),
        (["rule=tree_grpo", "tree_grpo.trees=3"], "n=8 games cannot be divided among .*trees=3"),
        (["rule=tree_grpo", "tree_grpo.trees=0"], "algorithm.tree.tree_grpo.trees is 0"),
        (["rule=tree_grpo", "tree_grpo.expand=2"], "2 trees of 3 games, fewer than .*n=8"),
        (["rule=tree_grpo", "tree_grpo.rounds=0"], "2 games without a round of growth"),
        (["rule=tree_grpo", "tree_grpo.rounds=-1"], "2 games without a round of growth"),
        (["rule=at2po", "at2po.beam=4"], "grows 8 branches, which leaves no game of .*n=8"),
        (["rule=at2po", "at2po.rounds=-1"], "algorithm.tree.at2po.rounds is -1"),
        (["rule=at2po", "at2po.branch_penalty=-1"], "algorithm.tree.at2po.branch_penalty is -1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(words: list[str], said: str) -> None:
    cfg = load_config(["experiment=quickstart", *(f"algorithm.tree.{word}" for word in words)])[0]
    with pytest.raises(UserError, match=said) as caught:
        trees.check_trees(cfg, RewindEnv(TASKS[0]))
    assert "\n" not in str(caught.value)


def test_trees_and_other_choices_of_what_is_played_exclude_each_other() -> None:
    more = ["multi_turn.logprob_sampling.enabled=true", "actor_rollout_ref.rollout.n=2"]
    cfg = config("arpo", *more)
    assert any("both choose what is played" in text for text in rules_trees.trees(cfg))
    alone = config("arpo", "multi_turn.train.n=1")
    (text,) = rules_trees.trees(alone)
    assert "multi_turn.train.n to at least 2" in text


@pytest.mark.parametrize("method", rules_trees.TREE_ESTIMATORS)
def test_methods_that_compare_turns_of_trees_need_some(method: str) -> None:
    cfg = config("none")
    cfg = replace(cfg, algorithm=replace(cfg.algorithm, adv_estimator=method))
    (text,) = rules_trees.trees(cfg)
    assert f"algorithm.adv_estimator={method}" in text
    evaluation = replace(cfg, trainer=replace(cfg.trainer, val_only=True))
    assert list(rules_trees.trees(evaluation)) == []


@pytest.mark.parametrize("rule", [*RULES, "none"])
def test_an_environment_that_cannot_be_brought_back_is_refused_at_the_start(rule: str) -> None:
    check = partial(trees.check_trees, config(rule))
    check(RewindEnv(TASKS[0]))
    check(ReplayEnv(TASKS[0]))
    if rule == "none":
        check(ScriptedEnv(TASKS[0]))
        return
    with pytest.raises(UserError, match="ScriptedEnv has neither"):
        check(ScriptedEnv(TASKS[0]))
    with pytest.raises(UserError, match="ScriptedEnv has neither"):
        grown(config(rule), make=ScriptedEnv)


def test_R14_games_of_another_rule_or_knob_are_not_those_of_this_one() -> None:
    plain = trees.digest(config("none"), "games")
    assert plain == "games"
    assert trees.digest(config("none", "algorithm.tree.arpo.beam=5"), "games") == plain
    kinds = [
        config("arpo"),
        config("arpo", "algorithm.tree.arpo.beam=3"),
        config("at2po"),
        config("at2po", "algorithm.tree.at2po.branch_penalty=0.1"),
    ]
    assert len({trees.digest(cfg, "games") for cfg in kinds}) == len(kinds)
    assert trees.digest(kinds[0], "games") != trees.digest(kinds[0], "others")
    # The update alone may change.
    more = config("arpo", "actor_rollout_ref.actor.optim.lr=0.1")
    assert trees.digest(more, "games") == trees.digest(kinds[0], "games")


def test_the_games_that_a_failed_judge_ended_keep_their_reply() -> None:
    """Errors of the judge in the shared turns are part of a branch's own count."""

    def fails(request: JudgeRequest) -> JudgeReply:
        failed = request.action.endswith(".1")
        return JudgeReply(Verdict.ERROR, reason="no") if failed else JudgeReply(Verdict.NO, "no")

    driver, _ = fake_driver()
    driver._judge = ScriptedJudge(fails)  # type: ignore[assignment]
    (group,) = asyncio.run(trees.grow(driver, config("at2po"), TASKS[:1], 2, SamplingParams()))
    games: tuple[Trajectory, ...] = group.trajectories
    assert check_lineage(group) == 4
    assert all(game.count(Verdict.ERROR) >= 1 for game in games)
