"""The training loop.

One step: sync the adapter, play, score (old log-probs and beliefs in one pass), reward, credit,
update; then validate, save and log when they are due. Every choice is made elsewhere and handed in;
the loop does not know which environment, judge, credit method or engine is running.
"""

from __future__ import annotations

from delta_belief_rl.eval.metrics import rollout_metrics
from delta_belief_rl.obs.disk import writing
from delta_belief_rl.obs.metrics import perf_metrics, token_timings
from delta_belief_rl.rollout.driver import count_games
from delta_belief_rl.rollout.store import write_groups
from delta_belief_rl.trainer import health, kept, persist, steps
from delta_belief_rl.trainer.collect import collect
from delta_belief_rl.trainer.crosscheck import cross_check
from delta_belief_rl.trainer.distil import with_tops
from delta_belief_rl.trainer.packing import build_batch, flat_trajectories, plan_update
from delta_belief_rl.trainer.services import Services
from delta_belief_rl.trainer.settings import games_per_update, micro_batch_tokens
from delta_belief_rl.trainer.steps import due
from delta_belief_rl.trainer.validation import validate


async def train(run: Services) -> None:
    """Run all steps that are left, from ``run.state`` on."""
    trainer = run.cfg.trainer
    first = run.state.step == 0
    if trainer.val_only or (trainer.val_before_train and first and run.state.validated < 0):
        record_evaluation(run, await validate(run, step=run.state.step))
    if trainer.val_only:
        kept.remove(run.cfg, run.state.step)
        return
    if first:
        await persist.save_due(run)
    run.settle()
    for step in range(run.state.step + 1, run.total_steps + 1):
        await run.check_workers()
        metrics = await train_step(run, step)
        run.state.step = step
        run.state.broken = health.count_broken(run.state.broken, metrics, trainer.abort)
        if due(step, trainer.test_freq, run.total_steps):
            metrics |= await validate(run, step=step)
        metrics |= run.timers.drain()
        record(run, step, metrics)
        health.check(run.state.broken, metrics, trainer.abort)
        run.settle()
        await persist.save_due(run)
    await persist.finish(run)


async def train_step(run: Services, step: int) -> dict[str, float]:
    """One training step; returns its metrics without timings."""
    cfg, timers = run.cfg, run.timers
    with timers.measure("step"):
        with timers.measure("sync"):
            run.progress.set_phase("sync")
            synced = await run.engines.sync(run.policy)
        played = await cross_check(run, await collect(run, step), step)
        groups, scores = played.groups, played.scores
        run.border = None
        with timers.measure("reward"):
            paid = steps.reward_table(run, groups, scores, update=step - 1)
            table, priced = steps.finish_rewards(run, paid, scores)
        with timers.measure("adv"):
            advantage = run.credit.apply(table)
            batch = build_batch(
                groups,
                table,
                advantage.turns,
                advantage.weight,
                [score.logp for score in scores],
                steps.batch_columns(table, advantage, scores),
                advantage.tokens,
            )
            batch = with_tops(batch, [score.top for score in scores])
            plan = plan_update(
                batch,
                ranks=run.policy.num_ranks,
                max_tokens=micro_batch_tokens(cfg),
                games_per_step=games_per_update(cfg),
                epochs=cfg.actor_rollout_ref.actor.ppo_epochs,
                length=float(cfg.data.max_prompt_length),
            )
        with timers.measure("update_actor"):
            run.progress.set_phase("update")
            updated = await run.policy.update(batch, plan, step)
        if due(step, cfg.trainer.rollout_freq, run.total_steps):
            path = steps.rollout_path(run, step)
            with (
                timers.measure("dump_rollout_generations"),
                writing("The games", path, "trainer.rollout_data_dir"),
            ):
                write_groups(
                    path,
                    groups,
                    max_turns=cfg.multi_turn.max_turns.train,
                    score_of=steps.scorer(
                        groups,
                        table,
                        advantage.rewards,
                        steps.belief_changes(run, table, scores),
                    ),
                    run_seed=cfg.seed,
                )
    weight = cfg.multi_turn.reward.weight_elicit
    counts = count_games(flat_trajectories(groups))
    return {
        "training/global_step": float(step),
        "training/epoch": float(played.epoch),
        **played.metrics,
        **rollout_metrics(groups, table, advantage, weight),
        **health.game_signals(groups),
        **priced,
        **updated,
        **synced,
        **await run.policy.usage(),
        **steps.judge_metrics(run, played.games),
        "actor/entropy": steps.mean_entropy(scores),
        "actor/micro_batches": float(plan.num_micro_batches),
        "state_tokens/sampled": float(counts.sampled_tokens),
        "state_tokens/total": float(counts.stream_tokens),
    }


def record_evaluation(run: Services, metrics: dict[str, float]) -> None:
    """Write the record of an evaluation that belongs to no training step.

    The record of a training step stands as it is; its evaluation is in the games' file.
    """
    step = run.state.step
    metrics = metrics | run.timers.drain()
    if run.log.last_step is None or step > run.log.last_step:
        run.log.append(step, metrics)
        run.wandb.log(step, metrics)


def record(run: Services, step: int, metrics: dict[str, float]) -> None:
    """Write the step's record first, then tell the mirrors and the person who watches."""
    seconds = metrics.get("timing_s/step", 0.0)
    tokens = int(metrics.get("state_tokens/total", 0.0))
    ranks_gb = metrics.get("perf/ranks_memory_used_gb", 0.0)
    metrics |= perf_metrics(tokens, seconds, run.policy.num_ranks, ranks_gb)
    metrics |= token_timings(metrics, metrics.get("state_tokens/sampled", 0.0), tokens)
    run.log.append(step, metrics)
    run.wandb.log(step, metrics)
    timings = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
    run.progress.finish_step(step, metrics.get("train/strict_successful", 0.0), timings)
