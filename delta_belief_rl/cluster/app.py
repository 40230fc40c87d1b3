"""From a checked configuration to a finished run.

Order of the start: everything that can fail for a reason that the user can mend comes before Ray, and nothing
is written into a run's folder before it is known to be this run's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from delta_belief_rl.algo.samplers.sequential import TaskSampler
from delta_belief_rl.algo.shapers.channels import ChannelShaper
from delta_belief_rl.belief.elicit import elicitor
from delta_belief_rl.cluster.pools import Pools, max_games, start_pools
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.compose import resolved_yaml
from delta_belief_rl.config.plan import Plan
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.base import Env
from delta_belief_rl.envs.worlds.game import WORLD_NOTICES, WorldTwentyQuestions
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.eval.report import render
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.obs.exits import exit_on_sigterm
from delta_belief_rl.obs.jsonl import MetricsLog
from delta_belief_rl.obs.progress import ProgressView
from delta_belief_rl.obs.wandb_mirror import WandbMirror
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.rollout.game import GameSettings
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer import persist
from delta_belief_rl.trainer.final import final_test, starting_test
from delta_belief_rl.trainer.loop import train
from delta_belief_rl.trainer.resume import RunStart, open_run
from delta_belief_rl.trainer.services import Services, TaskSets
from delta_belief_rl.trainer.settings import (
    belief_models,
    credit_method,
    env_settings,
    reward_settings,
    template_options,
)
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.types import Task, UserError


def run(cfg: RunConfig, plan: Plan) -> int:
    """Run a configuration to its end.

    Returns:
        0 when the run finished.

    Raises:
        UserError: Anything that the user can mend.
    """
    exit_on_sigterm()
    tasks = load_tasks(cfg)
    chat = ChatFormat.from_tokenizer(
        load_tokenizer(cfg.actor_rollout_ref.model.tokenizer_path or cfg.actor_rollout_ref.model.path),
        template_options(cfg),
    )
    elicit = elicitor(chat, agg=cfg.multi_turn.logprob_reward.agg)
    if belief_models(cfg):
        for task in tasks.train:
            elicit(task.secret)
    credit_method(cfg)
    env_factory(cfg, cfg.multi_turn.max_turns.train)
    root = Path(cfg.trainer.default_local_dir)
    resume_from = cfg.trainer.resume_from_path
    start = open_run(root, cfg.trainer.resume_mode, Path(resume_from) if resume_from else None)
    run_dir = Path(cfg.trainer.output_dir)
    resolved = resolved_yaml(cfg)
    _write_facts(run_dir, resolved, plan)
    probe = probe_tokens(chat, tasks)
    # Every process books one logical CPU; on few cores they take turns.
    cpus = max(plan.cores, len(plan.placements))
    with ray_session(cfg.ray_init, cpus, plan.gpus):
        pools = start_pools(cfg, plan, probe)
        return asyncio.run(_play(cfg, plan, tasks, chat, start, run_dir, resolved, pools))


async def _play(
    cfg: RunConfig,
    plan: Plan,
    tasks: TaskSets,
    chat: ChatFormat,
    start: RunStart,
    run_dir: Path,
    resolved: str,
    pools: Pools,
) -> int:
    saved = start.checkpoint
    step = saved.step if saved else 0
    with ProgressView(plan.total_steps or 0, step) as progress:
        services = _services(cfg, plan, tasks, chat, start, run_dir, resolved, pools, progress)
        if saved is not None:
            await persist.restore(services, saved)
            progress.say(f"resumed run {start.run_id} after step {step}")
        try:
            tested = cfg.trainer.final_test and bool(tasks.test)
            before = await starting_test(services) if tested else {}
            await train(services)
            if tested:
                await final_test(services, before)
        finally:
            services.wandb.finish()
    report = render(run_dir)
    print(f"report: {report}", file=sys.stderr)
    return 0


def _services(
    cfg: RunConfig,
    plan: Plan,
    tasks: TaskSets,
    chat: ChatFormat,
    start: RunStart,
    run_dir: Path,
    resolved: str,
    pools: Pools,
    progress: ProgressView,
) -> Services:
    def driver(max_turns: int) -> RolloutDriver:
        return RolloutDriver(
            pools.router,
            pools.judge,
            chat,
            env_factory(cfg, max_turns),
            GameSettings(
                max_turns=max_turns,
                max_turn_tokens=cfg.data.max_response_length,
                max_episode_tokens=cfg.data.max_prompt_length,
            ),
            max_games=max_games(cfg, plan),
            run_seed=cfg.seed,
            run_id=start.run_id,
            on_heartbeat=lambda beat: progress.say(beat.line()),
        )

    saved_step = start.checkpoint.step if start.checkpoint else None
    return Services(
        cfg=cfg,
        run_dir=run_dir,
        run_id=start.run_id,
        total_steps=plan.total_steps or 0,
        tasks=tasks,
        sampler=TaskSampler(len(tasks.train), cfg.data.train_batch_size, cfg.seed, shuffle=cfg.data.shuffle)
        if tasks.train
        else TaskSampler(1, 1),
        rollouts=driver(cfg.multi_turn.max_turns.train),
        val_rollouts=driver(cfg.multi_turn.max_turns.val),
        policy=pools.policy,
        engines=pools.engines,
        judge=pools.judge,
        shaper=ChannelShaper(reward_settings(cfg)),
        credit=credit_method(cfg),
        elicit=elicitor(chat, agg=cfg.multi_turn.logprob_reward.agg),
        log=MetricsLog(run_dir / "metrics.jsonl", start.run_id, saved_step),
        wandb=wandb_mirror(cfg, run_dir, start.run_id, resolved),
        progress=progress,
        resolved=resolved,
    )


def wandb_mirror(cfg: RunConfig, run_dir: Path, run_id: str, resolved: str) -> WandbMirror:
    """The W&B mirror; disabled unless ``trainer.logger`` names it."""
    wanted = "wandb" in cfg.trainer.logger
    return WandbMirror(
        cfg.trainer.wandb_mode if wanted else "disabled",
        project=cfg.trainer.project_name,
        name=cfg.trainer.experiment_name,
        run_id=run_id,
        run_dir=run_dir,
        config={"resolved": resolved},
    )


def env_factory(cfg: RunConfig, max_turns: int) -> Callable[[Task], Env]:
    """A function that makes one game of a task."""
    if cfg.multi_turn.env != "twenty_questions":
        raise UserError(f"multi_turn.env={cfg.multi_turn.env} is not available: use twenty_questions.")
    if cfg.data.world is None:
        from delta_belief_rl.envs.twenty_questions import TwentyQuestions

        return partial(TwentyQuestions, settings=env_settings(cfg, max_turns))
    grammar = Grammar(load_world(cfg.data.world))
    settings = env_settings(cfg, max_turns, notices=WORLD_NOTICES)
    return lambda task: WorldTwentyQuestions(task, settings, grammar)


def probe_tokens(chat: ChatFormat, tasks: TaskSets) -> tuple[int, ...]:
    """The fixed sequence that trainer and engines are compared on: an opening and one exchange."""
    task = (tasks.train or tasks.val)[0]
    return (
        *chat.open_ids(task.messages),
        *chat.assistant_ids(f"Is it {task.secret}?"),
        chat.eot_id,
        *chat.reply_ids("No"),
    )


def _write_facts(run_dir: Path, resolved: str, plan: Plan) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, text in (("config.yaml", resolved), ("plan.txt", plan.render())):
        beside = run_dir / f".{name}.{os.getpid()}"
        beside.write_text(text, encoding="utf-8")
        beside.replace(run_dir / name)
    facts = run_dir / "facts.json"
    if not facts.exists():
        facts.write_text(json.dumps({"argv": sys.argv[1:]}), encoding="utf-8")
