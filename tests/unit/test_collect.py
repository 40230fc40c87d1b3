"""Playing a step's games: one batch, or as many as it takes to find groups that teach something."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import training_fakes as fakes

from delta_belief_rl.algo.samplers.sequential import TaskSampler
from delta_belief_rl.algo.shapers.channels import ChannelShaper
from delta_belief_rl.algo.shapers.prices import Prices
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.obs.metrics import StepTimers
from delta_belief_rl.trainer.actor import POLICY, GameScore
from delta_belief_rl.trainer.collect import Collected, TooFewGroups, collect
from delta_belief_rl.trainer.services import RunState
from delta_belief_rl.trainer.settings_rewards import reward_settings
from delta_belief_rl.types import Group, StopReason, Task, Verdict
from tests.runs import Killed, assert_same_run, metrics_of, play, state_of, words, write_world

GAMES = 2
FILTER = ["algorithm.filter_groups.enabled=true"]
OUTCOME = [*FILTER, "algorithm.filter_groups.metric=seq_final_reward"]


def group_of(task: Task, wins: int, step: int) -> Group:
    """Games of two turns, the first ``wins`` of them won."""
    games = []
    for number in range(GAMES):
        game = fakes.make_game(10 * int(task.id) + number, 2, number, task.id)
        if number < wins:
            last = replace(
                game.turns[-1], verdict=Verdict.WIN, strict_win=True, compatible_win=True
            )
            game = replace(game, turns=(*game.turns[:-1], last), stop=StopReason.WIN)
        games.append(replace(game, task=task, step=step))
    return Group(task, tuple(games))


@dataclass
class Table:
    """Stands for engines, policy and judge; remembers what was asked of them.

    Engines sleep from a score pass to the next sync, as on a GPU that they share with the policy.
    """

    wins: Callable[[str, int], int]
    batches: list[list[str]] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter[str])
    adapter: str = "checksum"
    asleep: bool = False

    async def sync(self, policy: Any) -> dict[str, float]:
        assert policy is self
        self.asleep = False
        return {}

    async def collect(self, tasks: Sequence[Task], games: int, step: int, _s: Any) -> list[Group]:
        assert games == GAMES
        assert not self.asleep
        self.batches.append([task.id for task in tasks])
        self.asked["calls"] += len(tasks)
        return [group_of(task, self.wins(task.id, step), step) for task in tasks]

    async def score(self, requests: Sequence[ScoreRequest]) -> list[GameScore]:
        self.asleep = True
        self.scored.append(len(requests))
        return [self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> GameScore:
        beliefs = {POLICY: np.zeros(len(request.belief_points))} if request.elicitation else {}
        # The first token of the stream tells whose score it is.
        logp = np.full(len(request.action_positions), -float(request.token_ids[0]))
        return GameScore(logp, 1.0, {}, beliefs)

    def reset_stats(self) -> None:
        self.asked.clear()

    def mark(self) -> tuple[Counter[str], Counter[str]]:
        return self.asked.copy(), Counter()

    def rewind(self, mark: tuple[Counter[str], Counter[str]]) -> None:
        self.asked = mark[0].copy()


def run_of(
    wins: Callable[[str, int], int], *overrides: str, tasks: int = 10, size: int = 2
) -> tuple[Any, Table]:
    table = Table(wins)
    cfg, _ = load_config(
        [
            "experiment=quickstart",
            f"multi_turn.train.n={GAMES}",
            f"data.train_batch_size={size}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={size}",
            "multi_turn.logprob_reward.enabled=false",
            "trainer.save_rollout=false",
            *overrides,
        ]
    )
    run = SimpleNamespace(
        cfg=cfg,
        tasks=SimpleNamespace(train=tuple(Task(str(i), "tw_q", "oak", ()) for i in range(tasks))),
        sampler=TaskSampler(tasks, size, seed=0, shuffle=False),
        rollouts=table,
        policy=table,
        judge=table,
        engines=table,
        run_id=fakes.make_game(0, 2, 0, "0").run_id,
        shaper=ChannelShaper(reward_settings(cfg)),
        elicit=lambda _secret: fakes.GUESS,
        scorers=(),
        prices=Prices(),
        hinted=None,
        progress=SimpleNamespace(set_phase=lambda _name: None, say=lambda _text: None),
        timers=StepTimers(),
        state=RunState(),
    )
    return run, table


def steps_of(run: Any, count: int) -> list[Collected]:
    async def play_all() -> list[Collected]:
        made: list[Collected] = []
        for step in range(1, count + 1):
            await run.engines.sync(run.policy)
            made.append(await collect(run, step))
        return made

    return asyncio.run(play_all())


def ids(step: Collected) -> list[str]:
    return [group.task.id for group in step.groups]


def odd_wins_one(task: str, _step: int) -> int:
    """Odd secrets: one of two games is won. Even ones: all are won, or none."""
    return 1 if int(task) % 2 else 2 * (int(task) % 4 == 0)


def test_without_a_filter_a_step_is_one_batch_and_the_cursor_counts_steps() -> None:
    run, table = run_of(odd_wins_one)
    made = steps_of(run, 3)
    assert [ids(step) for step in made] == table.batches == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert run.state.batches == 3
    assert table.scored == [4, 4, 4]
    assert all(step.metrics == {"train/num_gen_batches": 1.0} for step in made)
    assert [step.games for step in made] == [4, 4, 4]


def test_filtering_plays_on_until_enough_groups_differ_and_scores_only_these() -> None:
    run, table = run_of(odd_wins_one, *OUTCOME)
    first, second = steps_of(run, 2)
    assert ids(first) == ["1", "3"]
    # Two batches a step; the second step crosses into the next epoch's order.
    assert ids(second) == ["5", "7"]
    assert table.batches == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert table.scored == [4, 4]
    assert run.state.batches == 4
    assert first.metrics == {"train/num_gen_batches": 2.0, "train/kept_group_share": 0.5}
    assert first.games == 8
    assert len(first.scores) == 4


def test_groups_beyond_the_batch_size_are_left_out() -> None:
    run, table = run_of(lambda task, _: 1 - (task == "0"), *OUTCOME)
    (step,) = steps_of(run, 1)
    assert table.batches == [["0", "1"], ["2", "3"]]
    assert ids(step) == ["1", "2"]
    assert step.metrics["train/kept_group_share"] == 0.75


@pytest.mark.parametrize(("metric", "scored"), [("seq_reward", [4, 4]), ("seq_final_reward", [4])])
def test_scores_stay_with_their_games(metric: str, scored: list[int]) -> None:
    """With beliefs in the reward every batch is scored before it is filtered."""
    run, table = run_of(
        odd_wins_one,
        *FILTER,
        f"algorithm.filter_groups.metric={metric}",
        "multi_turn.logprob_reward.enabled=true",
    )
    (step,) = steps_of(run, 1)
    assert ids(step) == ["1", "3"]
    assert table.scored == scored
    games = [game for group in step.groups for game in group.trajectories]
    for game, score in zip(games, step.scores, strict=True):
        assert (score.logp == -game.token_ids[0]).all()
        assert game.beliefs == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("metric", "scored"), [("seq_reward", [8]), ("seq_final_reward", [4])])
def test_of_one_batch_the_groups_that_differ_most_are_trained(
    metric: str, scored: list[int]
) -> None:
    run, table = run_of(
        odd_wins_one,
        "algorithm.filter_groups.enabled=true",
        "algorithm.filter_groups.rule=top_k",
        "algorithm.filter_groups.keep=0.5",
        f"algorithm.filter_groups.metric={metric}",
        "multi_turn.logprob_reward.enabled=true",
        size=4,
    )
    first, second = steps_of(run, 2)
    assert (ids(first), ids(second)) == (["1", "3"], ["5", "7"])
    assert table.batches == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert table.scored == [*scored, *scored]
    assert run.state.batches == 2
    assert first.metrics == {"train/num_gen_batches": 1.0, "train/kept_group_share": 0.5}
    assert first.games == 8
    games = [game for group in first.groups for game in group.trajectories]
    for game, score in zip(games, first.scores, strict=True):
        assert (score.logp == -game.token_ids[0]).all()
        assert game.beliefs == (0.0, 0.0, 0.0)


def test_R14_a_step_that_is_done_again_plays_only_the_batches_that_were_not_played(
    tmp_path: Path,
) -> None:
    kept = ["trainer.save_rollout=true", f"trainer.default_local_dir={tmp_path}"]
    straight, table = run_of(odd_wins_one, *OUTCOME, *kept)
    (whole,) = steps_of(straight, 1)
    assert table.batches == [["0", "1"], ["2", "3"]]
    # The first start died while it played the second batch.
    (tmp_path / "pending_1_1.json").unlink()
    resumed, again = run_of(odd_wins_one, *OUTCOME, *kept)
    (step,) = steps_of(resumed, 1)
    assert again.batches == [["2", "3"]]
    assert again.asked == table.asked == {"calls": 4}
    assert (step.groups, step.metrics, step.games) == (whole.groups, whole.metrics, whole.games)
    assert resumed.state.batches == straight.state.batches == 2


def test_R2_what_a_step_draws_depends_on_the_cursor_alone() -> None:
    straight, table = run_of(odd_wins_one, *OUTCOME)
    whole = [ids(step) for step in steps_of(straight, 2)]
    resumed, again = run_of(odd_wins_one, *OUTCOME)
    resumed.state.batches = 2
    assert ids(asyncio.run(collect(resumed, 2))) == whole[1]
    assert again.batches == table.batches[2:]


def test_a_secret_is_played_at_most_once_in_a_step() -> None:
    """The cursor stands in the middle of an epoch, so the batches cross into the next one."""
    run, table = run_of(lambda task, _: int(task in "25"), *OUTCOME, tasks=6)
    run.state.batches = 1
    (step,) = steps_of(run, 1)
    assert table.batches == [["2", "3"], ["4", "5"]]
    assert ids(step) == ["2", "5"]
    run, table = run_of(lambda task, _: int(task == "0"), *OUTCOME, tasks=5)
    run.state.batches = 1
    with pytest.raises(TooFewGroups):
        steps_of(run, 1)
    assert table.batches == [["2", "3"], ["0", "1"]]


@pytest.mark.parametrize(("limit", "played"), [(2, 2), (0, 5), (99, 5)])
def test_too_few_groups_end_the_run_in_one_sentence(limit: int, played: int) -> None:
    """No limit still ends with the epoch: by then every secret has been played."""
    run, table = run_of(
        lambda task, _: int(task == "1"),
        *OUTCOME,
        f"algorithm.filter_groups.max_num_gen_batches={limit}",
    )
    with pytest.raises(TooFewGroups, match=f"found 1 of 2 groups .* in {played} batches") as caught:
        steps_of(run, 1)
    assert "\n" not in str(caught.value)
    assert len(table.batches) == played
    assert table.scored == []
    assert run.state.batches == 0


# --- through the whole program --------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


LEARNT = [
    "algorithm.adv_estimator=reinforce_plus_plus",
    "algorithm.gamma=0.95",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_penalty=abs",
    "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, horizon: 20, target_kl: 0.0001}",
    "algorithm.filter_groups.enabled=true",
    "multi_turn.logprob_reward.prior_form=reply",
    "actor_rollout_ref.actor.policy_loss=gspo",
    "data.train_batch_size=2",
]


def test_R2_A6_a_resumed_run_draws_and_prices_what_the_straight_one_does(
    tmp_path: Path, world: Path
) -> None:
    command = words(tmp_path / "straight", world, *LEARNT)
    status, trace = play(command)
    assert status == 0
    records = metrics_of(tmp_path / "straight")[1:]
    coefs = [record["actor/reward_kl_penalty_coeff"] for record in records]
    assert coefs[0] == 0.1
    assert len(set(coefs)) == len(coefs), "the controller moves after every step that has moved"
    for record in records:
        parts = [v for name, v in record.items() if name.startswith("critic/reward_sum/")]
        assert record["critic/reward_sum"] == pytest.approx(sum(parts))
        assert record["critic/reward_sum/kl"] == pytest.approx(record["critic/channel_sum/kl"])
    assert records[1]["critic/reward_sum/kl"] < 0
    saves = [i for i, name in enumerate(trace.names) if name == "checkpoint.save done"]
    cut = words(tmp_path / "cut", world, *LEARNT)
    with pytest.raises(Killed):
        play(cut, kill_at=saves[2])
    saved = state_of(tmp_path / "cut")["run"]
    assert saved["step"] == 2
    assert saved["batches"] == sum(r["train/num_gen_batches"] for r in records[:2])
    assert play(cut)[0] == 0
    assert_same_run(tmp_path / "straight", tmp_path / "cut")


def test_A20_a_collapsed_run_stops_itself_and_so_does_the_resumed_one(
    tmp_path: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = words(
        out,
        world,
        "trainer.abort.min_entropy=50",
        "trainer.abort.patience=2",
        "trainer.test_freq=-1",
    )
    for _ in range(2):
        assert play(command)[0] == 3
        assert "trainer.abort.min_entropy=null" in capsys.readouterr().err
        # The step is on record, and the checkpoint before it is the last.
        assert [record["step"] for record in metrics_of(out)] == [0, 1, 2]
        state = state_of(out)["run"]
        assert (state["step"], state["broken"]) == (1, {"min_entropy": 1})
    assert play([*command, "trainer.abort.min_entropy=null"])[0] == 0
