"""The final test: the policy of the start against the trained one on the test secrets.

The first policy is version 0 of the same adapter: LoRA starts at zero, so it *is* the model that
the run began with. Both play the same secrets with the same random numbers, and the difference is
paired over secrets. Players that need no model bound both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from delta_belief_rl.algo.shapers.channels import WinRule
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.players import (
    PlayerFactory,
    RandomPlayer,
    SplitterPlayer,
    play,
)
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.eval.metrics import (
    cluster_bootstrap,
    paired_difference,
    secret_counts,
    success_rate,
)
from delta_belief_rl.eval.report import PlayerScore, save_scores
from delta_belief_rl.obs.disk import writing
from delta_belief_rl.rollout.store import read_trajectories, write_groups
from delta_belief_rl.trainer.checkpoint import write_atomic
from delta_belief_rl.trainer.services import Services
from delta_belief_rl.trainer.validation import evaluate, stamped
from delta_belief_rl.types import Group, Trajectory, UserError

SAMPLINGS = {"train": "training sampling", "val": "validation sampling"}
PLAYER_GAMES = 10
"""Games per secret of the players that need no model."""


async def test_policy(run: Services, label: str) -> dict[str, list[Group]]:
    """Play all test secrets with the policy as it stands, under both samplings; keeps the games."""
    run.progress.set_phase(f"test {label}")
    out: dict[str, list[Group]] = {}
    for sampling in SAMPLINGS:
        groups = await evaluate(
            run, run.tasks.test, run.cfg.trainer.test_games, sampling, f"test-{label}-{sampling}"
        )
        path = test_path(run.run_dir, label, sampling)
        with writing("The games", path):
            write_groups(
                path,
                stamped(groups, run.state.step),
                max_turns=run.cfg.multi_turn.max_turns.val,
                run_seed=run.cfg.seed,
            )
        out[sampling] = groups
    return out


def score(groups: Sequence[Group], player: str, sampling: str) -> PlayerScore:
    """One row of the final table."""
    rate = success_rate(groups, WinRule.STRICT)
    games = [game for group in groups for game in group.trajectories]
    return PlayerScore(
        player=player,
        sampling=sampling,
        games=len(games),
        secrets=len(groups),
        strict_win=rate.value,
        low=rate.low,
        high=rate.high,
        mean_turns=float(np.mean([game.num_turns for game in games])),
        compatible_win=success_rate(groups, WinRule.COMPATIBLE).value,
    )


def reference_scores(run: Services) -> tuple[PlayerScore | None, PlayerScore | None]:
    """The random player and the greedy splitter on the same secrets; None without a world."""
    if run.cfg.data.world is None:
        return None, None
    random_player = player_score(run, "random player", RandomPlayer)
    return random_player, player_score(run, "optimal splitter", SplitterPlayer)


def player_score(run: Services, name: str, factory: PlayerFactory) -> PlayerScore:
    """One row of the final table for a player that reads the table instead of a model."""
    assert run.cfg.data.world is not None
    world = load_world(run.cfg.data.world)
    grammar = Grammar(world)
    turns = run.cfg.multi_turn.max_turns.val
    records = [
        [
            play(
                factory(grammar, turns),
                world,
                task.secret,
                turns,
                np.random.default_rng([run.cfg.seed, index, game]),
                grammar,
            )
            for game in range(PLAYER_GAMES)
        ]
        for index, task in enumerate(run.tasks.test)
    ]
    wins = [float(sum(record.won for record in games)) for games in records]
    rate = cluster_bootstrap(wins, [float(PLAYER_GAMES)] * len(wins))
    return PlayerScore(
        player=name,
        sampling="",
        games=PLAYER_GAMES * len(records),
        secrets=len(records),
        strict_win=rate.value,
        low=rate.low,
        high=rate.high,
        mean_turns=float(np.mean([record.turns for games in records for record in games])),
    )


def gain(before: Sequence[Group], after: Sequence[Group]) -> dict[str, float]:
    """Difference of the strict win rates, paired over secrets, with its interval."""
    difference = paired_difference(
        secret_counts(before, WinRule.STRICT), secret_counts(after, WinRule.STRICT)
    )
    return {"gain": difference.value, "low": difference.low, "high": difference.high}


def points(gained: Mapping[str, float]) -> str:
    """A gain with its interval, in percentage points."""
    value, low, high = (100 * gained[name] for name in ("gain", "low", "high"))
    return f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"


async def starting_test(run: Services) -> dict[str, list[Group]]:
    """The first policy's test: played at the start of a run, read from its files on a resume."""
    if run.state.step == 0:
        return await test_policy(run, "start")
    return starting_games(run.run_dir, run.run_id)


def starting_games(run_dir: Path, run_id: str) -> dict[str, list[Group]]:
    """The first policy's test as an earlier start of this run has played it.

    Raises:
        UserError: There is none, it is damaged, or another run played it.
    """
    out: dict[str, list[Group]] = {}
    for sampling in SAMPLINGS:
        path = test_path(run_dir, "start", sampling)
        if not path.is_file():
            raise UserError(
                f"trainer.final_test compares with the games of the first policy, but {path} does "
                "not exist: set trainer.final_test=false, or start the run anew."
            )
        report = read_trajectories(path, run_id)
        if report.damaged:
            raise UserError(
                f"{path}, line {report.damaged[0].number}, is damaged: set "
                "trainer.final_test=false, or start the run anew."
            )
        out[sampling] = regroup(report.trajectories)
    return out


def regroup(games: Sequence[Trajectory]) -> list[Group]:
    """Games in file order as groups; games of a task are contiguous."""
    return [Group(task, tuple(part)) for task, part in groupby(games, key=lambda game: game.task)]


def test_path(run_dir: Path, label: str, sampling: str) -> Path:
    """File of one test's games."""
    return run_dir / "test" / f"{label}-{sampling}.jsonl"


async def final_test(run: Services, before: dict[str, list[Group]]) -> Path:
    """Play the test secrets with the trained policy.

    Writes ``final.json`` and, at last, ``test/summary.json``.

    Args:
        before: What ``test_policy`` gave at the start of the run.
    """
    after = await test_policy(run, "trained")
    random_player, splitter = reference_scores(run)
    rows = [random_player] if random_player else []
    for label, played in (("starting agent", before), ("trained agent", after)):
        rows += [score(played[sampling], label, words) for sampling, words in SAMPLINGS.items()]
    rows += [splitter] if splitter else []
    gains = {
        words: gain(before[sampling], after[sampling]) for sampling, words in SAMPLINGS.items()
    }
    facts = {f"gain, {words}": points(found) for words, found in gains.items()}
    for row in rows:
        run.progress.say(
            f"{row.player:16s} {row.sampling:20s} strict win {100 * row.strict_win:5.1f} % "
            f"[{100 * row.low:.1f}, {100 * row.high:.1f}]  mean turns {row.mean_turns:.1f}  "
            f"({row.games} games)"
        )
    for name, text in facts.items():
        run.progress.say(f"{name}: {text}")
    scores = save_scores(run.run_dir, rows, facts)
    # Last, because it says that the test is done.
    body = {"run_id": run.run_id, "step": run.state.step, "seed": run.cfg.seed, "gains": gains}
    write_atomic(summary_path(run.run_dir), (json.dumps(body, indent=1) + "\n").encode())
    return scores


def summary_path(run_dir: Path) -> Path:
    """File that says which policy the final test has tested."""
    return run_dir / "test" / "summary.json"


def is_tested(run_dir: Path, run_id: str, step: int) -> bool:
    """Whether the final test of this run's policy after ``step`` is complete."""
    try:
        body = json.loads(summary_path(run_dir).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(body, dict) and (body.get("run_id"), body.get("step")) == (run_id, step)
