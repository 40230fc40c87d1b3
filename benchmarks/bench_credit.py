"""What credit costs between rollout and update, for every method, at the published batch size.

    python benchmarks/bench_credit.py
    python benchmarks/bench_credit.py --secrets 240 --games 16 --turns 20 --step-seconds 64 --json

Games are random (about 560 tokens with 20 turns, 240 of them sampled), won now and then, with
states that are met again. Timed is the processor time of one thread, so that other work on the
machine counts little: the turn table and its rewards, which all methods share; the method itself;
and the packing of the batch with the plan of the update, which all share again. Calls of models
are none of credit's and are not made: log-probs, beliefs, values and views are random numbers.

``--step-seconds`` is what the shares are of. Its default is the time that scoring and updating
3,840 games of this shape alone would take at the rates of docs/results_gpu.md on one H200, without
any play, so a real step has smaller shares.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from gpu_games import random_games
from measuring import hardware

from delta_belief_rl.algo import CREDITS, SCORERS, TRANSFORMS, build_credit
from delta_belief_rl.algo.base import Advantage, Credit
from delta_belief_rl.algo.shapers.channels import ChannelShaper, RewardSettings, build_table
from delta_belief_rl.belief.shaping import ShapingOptions, belief_grid, shape_rows
from delta_belief_rl.trainer.actor import GameScore
from delta_belief_rl.trainer.packing import build_batch, plan_update
from delta_belief_rl.trainer.steps import batch_columns, token_columns
from delta_belief_rl.types import Group, StopReason, Trajectory, TurnTable, Verdict

T = TypeVar("T")
STATES = 12
"""States of a turn index that a group's games may be in."""
OWN = ("values", "contribution", "archer_q", "archer_v")
"""Columns of a critic and of learners that are random here; ``prm`` is near the policy's."""
SCORE_GAMES_PER_SECOND = 64 / 0.370
UPDATE_GAMES_PER_SECOND = 32 / 0.352
"""One H200, Qwen3-1.7B shape: docs/results_gpu.md."""


def games_of(secrets: int, games: int, turns: int, seed: int) -> list[Group]:
    """Groups of random games, a quarter of them won at some turn."""
    rng = np.random.default_rng(seed)
    made = random_games(secrets * games, turns, 32_000, seed)
    groups: list[Group] = []
    for number in range(secrets):
        mine = made[number * games : (number + 1) * games]
        ready = [_finish(game, rng, index) for index, game in enumerate(mine)]
        groups.append(Group(replace(ready[0].task, id=f"t{number}"), tuple(ready)))
    return groups


def _finish(game: Trajectory, rng: np.random.Generator, index: int) -> Trajectory:
    """States, actions and progress for every turn, and a win for some games."""
    won = rng.random() < 0.25
    count = int(rng.integers(4, len(game.turns) + 1)) if won else len(game.turns)
    turns = [
        replace(
            turn,
            state_key=f"{turn.index}:{rng.integers(STATES)}" if turn.index else "start",
            action_key=f"a{rng.integers(STATES)}",
            progress=turn.index / len(game.turns),
        )
        for turn in game.turns[:count]
    ]
    if won:
        turns[-1] = replace(turns[-1], verdict=Verdict.WIN, compatible_win=True, strict_win=True)
    stop = StopReason.WIN if won else StopReason.TURN_LIMIT
    return replace(game, game=index, turns=tuple(turns), stop=stop)


def scores_of(groups: Sequence[Group], seed: int) -> list[GameScore]:
    """Random numbers in place of a score pass."""
    rng = np.random.default_rng(seed)
    out: list[GameScore] = []
    for group in groups:
        for game in group.trajectories:
            tokens = sum(turn.n_tokens for turn in game.turns)
            logp = -rng.random(tokens)
            views = {name: logp + 0.1 * rng.normal(size=tokens) for name in SCORERS}
            beliefs = {"actor": np.cumsum(rng.normal(size=game.num_turns + 1))}
            out.append(GameScore(logp, 1.0, views, beliefs))
    return out


def timed(work: Callable[[], T], repeats: int) -> tuple[T, float]:
    """The result, and the smallest processor time of some repeats."""
    best, result = np.inf, work()
    for _ in range(repeats):
        began = time.thread_time()
        result = work()
        best = min(best, time.thread_time() - began)
    return result, float(best)


def rewarded(groups: Sequence[Group], scores: Sequence[GameScore]) -> TurnTable:
    """The turn table with its channels and token columns, as a training step makes it."""
    table = build_table(groups)
    grid = belief_grid([score.beliefs["actor"] for score in scores])
    belief = shape_rows(table, grid, ShapingOptions(), None)
    shaper = ChannelShaper(RewardSettings(weight_elicit=0.1))
    table = replace(table, rewards=shaper.shape(table, groups, belief))
    return replace(table, tokens=token_columns(scores))


def packed(
    groups: Sequence[Group], table: TurnTable, advantage: Advantage, scores: Sequence[GameScore]
) -> int:
    """The batch and the plan of its update; returns the number of micro-batches."""
    batch = build_batch(
        groups,
        table,
        advantage.turns,
        advantage.weight,
        [score.logp for score in scores],
        batch_columns(table, advantage, scores),
        advantage.tokens,
    )
    per_step = batch.num_games
    return plan_update(batch, ranks=1, max_tokens=32_768, games_per_step=per_step).num_micro_batches


def methods() -> dict[str, tuple[Credit, bool]]:
    """Every estimator with its defaults, and every transform, which are marked."""
    made = {name: (build_credit(name), False) for name in CREDITS}
    changed = {name: (build_credit(name, transform=True), True) for name in TRANSFORMS}
    return made | {f"{name} behind grpo": found for name, found in changed.items()}


def measure(groups: Sequence[Group], repeats: int) -> dict[str, Any]:
    """Seconds of the shared parts and of each method."""
    scores = scores_of(groups, 1)
    table, table_seconds = timed(lambda: rewarded(groups, scores), repeats)
    rng = np.random.default_rng(2)
    count = int(table.n_tokens.sum())
    own = {name: rng.normal(size=count) for name in OWN}
    own["prm"] = table.tokens["logp"] + 0.1 * rng.normal(size=count)
    table = replace(table, tokens={**table.tokens, **own})
    seconds: dict[str, float] = {}
    first = shown = build_credit("grpo").apply(table)
    for name, (credit, behind) in methods().items():
        before = first if behind else None
        advantage, seconds[name] = timed(
            lambda credit=credit, before=before: credit.apply(table, before), repeats
        )
        shown = advantage if advantage.tokens is not None else shown
    _, pack_seconds = timed(lambda: packed(groups, table, shown, scores), repeats)
    return {
        "games": table.num_games,
        "rows": table.num_rows,
        "sampled_tokens": int(table.n_tokens.sum()),
        "table_s": table_seconds,
        "pack_s": pack_seconds,
        "methods_s": seconds,
    }


def step_seconds(games: int) -> float:
    """Score and update of so many games on one H200, nothing else."""
    return games / SCORE_GAMES_PER_SECOND + games / UPDATE_GAMES_PER_SECOND


def show(found: Mapping[str, Any], step: float) -> str:
    """The table."""
    shared = found["table_s"] + found["pack_s"]
    lines = [
        f"{found['games']} games, {found['rows']} turns, {found['sampled_tokens']} sampled tokens; "
        f"a step of {step:.1f} s",
        f"turn table and rewards {found['table_s']:.3f} s, batch and plan {found['pack_s']:.3f} s",
        "",
        f"{'method':32}{'seconds':>9}{'with shared':>13}{'share':>9}",
    ]
    for name, seconds in sorted(found["methods_s"].items(), key=lambda item: -item[1]):
        whole = seconds + shared
        lines.append(f"{name:32}{seconds:9.3f}{whole:13.3f}{whole / step:9.2%}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--secrets", type=int, default=240)
    parser.add_argument("--games", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    groups = games_of(args.secrets, args.games, args.turns, 0)
    found = measure(groups, args.repeats)
    step = args.step_seconds or step_seconds(found["games"])
    if args.json:
        print(json.dumps({**found, "step_s": step, "hardware": hardware()}, indent=1))
    else:
        print(show(found, step))


if __name__ == "__main__":
    main()
