"""From played games to a batch with real advantages, as a training step makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from playing import Arena, Desk, flat, play_async

from delta_belief_rl.algo.shapers.channels import ChannelShaper, build_table
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.belief.elicit import elicitor
from delta_belief_rl.belief.shaping import belief_grid, shape_rows
from delta_belief_rl.trainer.actor import POLICY
from delta_belief_rl.trainer.packing import UpdatePlan, build_batch, plan_update
from delta_belief_rl.trainer.settings import credit_method, micro_batch_tokens, shaping_options
from delta_belief_rl.trainer.settings_rewards import reward_settings
from delta_belief_rl.types import TrainBatch

Steps = list[tuple[list[TrainBatch | None], Mapping[str, float]]]


def played_batch(
    arena: Arena, secrets: int, games: int, max_turns: int
) -> tuple[TrainBatch, UpdatePlan, Steps]:
    """Play, score, reward and credit.

    Returns:
        The batch, its plan of one optimizer step, and that step as ``PolicyActor.update`` takes it.
    """
    cfg, tasks = arena.cfg, arena.tasks[:secrets]
    engine = arena.engine(secrets * games, max_turns * 24 + 64)
    groups = play_async(arena, engine, Desk(arena.grammar), tasks, games, max_turns)
    elicit = elicitor(arena.chat)
    scores = arena.actor.score(
        [ScoreRequest.of(game, elicit(game.task.secret)) for game in flat(groups)]
    )
    table = build_table(groups, cfg.multi_turn.win_rule)
    belief = shape_rows(
        table, belief_grid([score.beliefs[POLICY] for score in scores]), shaping_options(cfg), None
    )
    shaper = ChannelShaper(reward_settings(cfg))
    table = replace(table, rewards=shaper.shape(table, groups, belief))
    advantage = credit_method(cfg).apply(table)
    batch = build_batch(
        groups, table, advantage.turns, advantage.weight, [score.logp for score in scores]
    )
    plan = plan_update(
        batch,
        ranks=1,
        max_tokens=micro_batch_tokens(cfg),
        games_per_step=batch.num_games,
        length=float(cfg.data.max_prompt_length),
    )
    steps: Steps = [
        ([batch.select(micro.games) for micro in step.ranks[0]], step.denominators)
        for step in plan.steps
    ]
    return batch, plan, steps
