"""From a checked configuration to a finished run.

Order of the start: everything that can fail for a reason that the user can mend comes before Ray,
and nothing is written into a run's folder before it is known to be this run's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from delta_belief_rl.algo.base import HOOK_COLUMNS, LOGP, VALUES, VIEW, check_requires
from delta_belief_rl.algo.chain import elements_of, reads_of
from delta_belief_rl.algo.samplers.sequential import TaskSampler
from delta_belief_rl.algo.shapers.channels import ChannelShaper
from delta_belief_rl.belief.elicit import elicitor, template_of
from delta_belief_rl.cluster.endings import STOPS
from delta_belief_rl.cluster.footprints import tell_footprints
from delta_belief_rl.cluster.judges import API, MODELS, restart_teller, tell_self_tests
from delta_belief_rl.cluster.pools import Pools, max_games, start_pools
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.cluster.recovery import Recovery
from delta_belief_rl.cluster.stacks import dump_on_signal
from delta_belief_rl.cluster.supervisor import Supervisor, pulse_of, to_its_end
from delta_belief_rl.config.compose import resolved_yaml
from delta_belief_rl.config.gpu_memory import check_gpus
from delta_belief_rl.config.gpus import read_gpus
from delta_belief_rl.config.paths import find_file
from delta_belief_rl.config.plan import Plan
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.versions import check_versions
from delta_belief_rl.engines.api_client import Endpoint
from delta_belief_rl.envs.check import available_hooks
from delta_belief_rl.envs.twenty_questions import PUBLISHED_NOTICES
from delta_belief_rl.envs.worlds.game import WORLD_NOTICES
from delta_belief_rl.eval.report import render
from delta_belief_rl.judge.api_judge import probe_service
from delta_belief_rl.judge.hf_judge import judge_chat
from delta_belief_rl.judge.packaged import RULES, rules_judge
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.models.packaged import materialise
from delta_belief_rl.obs.events import EventLog, config_diff
from delta_belief_rl.obs.exits import ExitStatus, Terminated, exit_on_sigterm
from delta_belief_rl.obs.heartbeat import Heartbeat, Pulse
from delta_belief_rl.obs.jsonl import MetricsLog
from delta_belief_rl.obs.progress import ProgressView
from delta_belief_rl.obs.run_facts import tell_run_facts
from delta_belief_rl.obs.wandb_mirror import WandbMirror
from delta_belief_rl.rollout.candidates import check_rewindable, chooser_factory
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.rollout.game import Chooser, GameSettings
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer import persist
from delta_belief_rl.trainer.actor_settings import BASE
from delta_belief_rl.trainer.api_policy import api_player, api_policy_settings, is_api_policy
from delta_belief_rl.trainer.checkpoint import Checkpoint
from delta_belief_rl.trainer.environments import EnvFactory, env_factory
from delta_belief_rl.trainer.final import final_test, is_tested, starting_games, starting_test
from delta_belief_rl.trainer.hints import hinter
from delta_belief_rl.trainer.judge_settings import api_settings, judge_mode
from delta_belief_rl.trainer.loop import train
from delta_belief_rl.trainer.own_failures import guarded
from delta_belief_rl.trainer.policy_kinds import check_kind, least_turn_tokens, score_columns
from delta_belief_rl.trainer.preflight import check_owner, check_tokenizer, check_weights
from delta_belief_rl.trainer.resume import RunStart, open_run
from delta_belief_rl.trainer.rubric_settings import (
    check_rubrics,
    close_roles,
    probe_verifier,
    rubric_roles,
)
from delta_belief_rl.trainer.services import Services, TaskSets
from delta_belief_rl.trainer.settings import (
    belief_models,
    candidate_settings,
    credit_method,
    credit_scorers,
    critic_settings,
    learner_settings,
    prior_exchange,
    sampling_params,
    template_options,
)
from delta_belief_rl.trainer.settings_rewards import (
    kl_reward,
    prices,
    question_settings,
    reward_shaper,
    variance_settings,
)
from delta_belief_rl.trainer.sole_start import sole_start
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.trainer.trees import check_trees, is_tree
from delta_belief_rl.types import Task, UserError


def run(cfg: RunConfig, plan: Plan) -> int:
    """Run a configuration to its end.

    Returns:
        A value of ``ExitStatus``: 0 when the run finished, or had finished before.

    Raises:
        UserError: Anything that the user can mend.
    """
    exit_on_sigterm()
    try:
        return _run(cfg, plan)
    except Terminated:
        # Before anything was written there is nothing more to say.
        print("The run was told to end (SIGTERM) before it began.", file=sys.stderr)
        return ExitStatus.TERMINATED
    except KeyboardInterrupt:
        print("The run was interrupted before it began.", file=sys.stderr)
        return ExitStatus.INTERRUPTED


def _run(cfg: RunConfig, plan: Plan) -> int:
    check_versions(cfg)
    resolved = resolved_yaml(cfg)
    cfg = _located(cfg)
    tasks = load_tasks(cfg)
    chat = _check_model(cfg, tasks)
    _check_judge(cfg)
    make_env = env_factory(cfg, cfg.multi_turn.max_turns.train)
    _check_credit(cfg, tasks, make_env)
    check_rubrics(cfg, chat)
    prices(cfg, plan.total_steps or 1)
    variance_settings(cfg)
    if cfg.multi_turn.logprob_sampling.enabled:
        check_rewindable(make_env((tasks.train or tasks.val)[0]))
    if is_tree(cfg) and tasks.train:
        check_trees(cfg, make_env(tasks.train[0]))
    root, run_dir = Path(cfg.trainer.default_local_dir), Path(cfg.trainer.output_dir)
    check_owner(run_dir, root)
    with sole_start(root):
        resume_from = cfg.trainer.resume_from_path
        start = open_run(root, cfg.trainer.resume_mode, Path(resume_from) if resume_from else None)
        if _is_complete(cfg, plan, start, run_dir):
            return 0
        if plan.gpus and cfg.ray_init.address == "local":
            check_gpus(plan, read_gpus() or ())
        if _tests(cfg) and start.checkpoint is not None and start.checkpoint.step > 0:
            starting_games(run_dir, start.run_id)
        _probe_services(cfg, start)
        _write_facts(run_dir, resolved, plan)
        print(plan.render(), file=sys.stderr)
        course = Course.of(cfg, plan, start, run_dir, resolved)
        return to_its_end(partial(_in_ray, course, tasks, chat), course.events, lambda: course.step)


@dataclass(slots=True)
class Course:
    """One start of a run.

    Attributes:
        step: Training steps that are done.
        recorded: The run has a record, which a report can be made of.
    """

    cfg: RunConfig
    plan: Plan
    start: RunStart
    run_dir: Path
    resolved: str
    events: EventLog
    step: int
    recorded: bool = False

    @classmethod
    def of(
        cls, cfg: RunConfig, plan: Plan, start: RunStart, run_dir: Path, resolved: str
    ) -> Course:
        """Begin the run's list of events anew."""
        saved = start.checkpoint
        step = saved.step if saved else 0
        events = EventLog(run_dir / "events.jsonl", start.run_id)
        changed = _changes(saved, resolved)
        events.write("start", step, resumed_from=saved and saved.path, changed=changed)
        for sentence in start.damaged:
            events.write("checkpoint_damaged", step, reason=sentence)
        return cls(cfg, plan, start, run_dir, resolved, events, step)


def _in_ray(course: Course, tasks: TaskSets, chat: ChatFormat) -> None:
    """Everything between the start of Ray and its end, and the report."""
    cfg, plan, run_dir = course.cfg, course.plan, course.run_dir
    probe = probe_tokens(chat, tasks)
    dump_on_signal(run_dir / "logs")
    # Every process books one logical CPU; on few cores they take turns.
    cpus = max(plan.cores, len(plan.placements))
    supervisor, began = Supervisor(), time.monotonic()
    heart = Heartbeat(
        run_dir,
        course.start.run_id,
        lambda: Pulse("start", time.monotonic() - began, course.step),
        partial(print, file=sys.stderr, flush=True),
        cfg.trainer.heartbeat_seconds,
    )
    heart.on_failure = supervisor.fail
    try:
        with heart, ray_session(cfg.ray_init, cpus, plan.gpus, supervisor.fail, plan.machines):
            pools = start_pools(cfg, plan, probe)
            supervisor.play(lambda: _play(course, tasks, chat, pools, supervisor, heart))
    except STOPS:
        # A run that stopped before its first record leaves nothing to report.
        if course.recorded:
            print(f"report: {render(run_dir)}", file=sys.stderr)
        raise
    print(f"report: {render(run_dir)}", file=sys.stderr)


def _located(cfg: RunConfig) -> RunConfig:
    """The configuration with whole paths, for processes that work elsewhere."""

    def whole(path: str) -> str:
        found = find_file(path)
        return str(found.resolve()) if found.exists() else path

    model, world = cfg.actor_rollout_ref.model, cfg.data.world
    model = replace(
        model,
        path=whole(materialise(model.path)),
        tokenizer_path=model.tokenizer_path and whole(model.tokenizer_path),
    )
    judge = cfg.judge_rollout
    if judge.name in MODELS:
        path = whole(materialise(judge.model.path))
        judge = replace(judge, model=replace(judge.model, path=path))
    # A bare name is a packaged world, even where a file of that name lies about.
    world = whole(world) if world and {"/", "."} & {*world} else world
    return replace(
        cfg,
        actor_rollout_ref=replace(cfg.actor_rollout_ref, model=model),
        judge_rollout=judge,
        data=replace(cfg.data, world=world),
    )


def _check_model(cfg: RunConfig, tasks: TaskSets) -> ChatFormat:
    """The chat format, after a look at weights and secrets that costs no time."""
    model = cfg.actor_rollout_ref.model
    source = model.tokenizer_path or model.path
    check_tokenizer(source)
    if not is_api_policy(cfg):
        check_weights(model.path)
    chat = ChatFormat.from_tokenizer(
        load_tokenizer(source), template_options(cfg), cfg.actor_rollout_ref.actor.thinking_history
    )
    if not is_api_policy(cfg):
        check_kind(cfg, chat, (*tasks.train, *tasks.val, *tasks.test))
    elicit = elicitor(chat, template_of(cfg.multi_turn.env), agg=cfg.multi_turn.logprob_reward.agg)
    believes = belief_models(cfg) or cfg.multi_turn.logprob_sampling.enabled
    guesses = cfg.multi_turn.env == "twenty_questions" and not is_api_policy(cfg)
    if believes or guesses:
        # A secret that cannot be said can be neither believed nor guessed.
        for task in (*tasks.train, *tasks.val, *tasks.test):
            elicit(task.secret)
    return chat


def _check_credit(cfg: RunConfig, tasks: TaskSets, make_env: EnvFactory) -> None:
    """Whether the estimator gets what it needs, of which an evaluation needs nothing."""
    credit, shaper = credit_method(cfg), reward_shaper(cfg)
    if cfg.trainer.val_only:
        return
    parts, paid = elements_of(credit), question_settings(cfg) is not None
    channels = (*ChannelShaper.provides, *shaper.provides)
    # A game is made only where somebody asks what it has.
    asked = any(name in HOOK_COLUMNS for part in parts for name in part.requires)
    hooks = available_hooks(make_env(tasks.train[0])) if asked or paid else ()
    if paid and "uncertainty" not in hooks:
        raise UserError(
            f"algorithm.clinical.enabled needs the hook uncertainty, which the environment "
            f"{cfg.multi_turn.env} does not have: add uncertainty() to it, or set "
            "algorithm.clinical.enabled=false."
        )
    tokens = [
        LOGP,
        *((VALUES,) if critic_settings(cfg) else ()),
        *score_columns(cfg),
        *(name for learner in learner_settings(cfg) for name in learner.columns),
        *(f"{VIEW}{scorer.view}" for scorer in credit_scorers(cfg, credit)),
    ]
    if cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward:
        tokens.append(VIEW + BASE)
    if VALUES in tokens:
        tokens.append("tokens:end_value")
    for part in parts:
        check_requires(part, hooks, channels, cfg.multi_turn.env, tokens)
        for needed in reads_of(part):
            if needed not in tokens:
                raise UserError(
                    f"{type(part).__name__} is told to read {needed.removeprefix('tokens:')!r}, "
                    "which nothing in this run makes: name another column."
                )


def _check_judge(cfg: RunConfig) -> None:
    """A look at the files of a judge that is a model of this machine, or at an API's address.

    Rules are made once here, because a worker that cannot make them only dies.
    """
    if cfg.judge_rollout.name == RULES:
        rules_judge(cfg.multi_turn.env, cfg.plugins)
    if cfg.judge_rollout.name == API or is_api_policy(cfg):
        Endpoint.from_environment()
    if cfg.judge_rollout.name in MODELS:
        path = cfg.judge_rollout.model.path
        check_tokenizer(path, "judge_rollout.model.path")
        # An engine that makes its weights at random reads no file.
        if cfg.judge_rollout.rollout.engine_kwargs.vllm.get("load_format") != "dummy":
            check_weights(path)
        judge_chat(path, judge_mode(cfg))


def _probe_services(cfg: RunConfig, start: RunStart) -> None:
    """One cheap call to each service that the run needs."""
    if is_api_policy(cfg):
        if start.checkpoint is not None:
            raise UserError(
                f"{start.checkpoint.path} is of a policy that was trained, which an API cannot "
                "load: choose another trainer.experiment_name."
            )
        sampling = sampling_params(cfg, "val")
        limit = "data.max_response_length"
        probe_service(api_policy_settings(cfg, 1), sampling, "actor_rollout_ref", limit)
    if cfg.judge_rollout.name == API:
        settings = api_settings(cfg)
        sampling = replace(settings.asked.sampling, max_tokens=settings.asked.response_length)
        limit = "judge_rollout.rollout.response_length"
        probe_service(settings.api(), sampling, "judge_rollout", limit)
    probe_verifier(cfg)


def _tests(cfg: RunConfig) -> bool:
    """Whether the run ends with a final test."""
    return cfg.trainer.final_test and not cfg.trainer.val_only


def _is_complete(cfg: RunConfig, plan: Plan, start: RunStart, run_dir: Path) -> bool:
    """Whether nothing is left to do; says so, and makes the report anew."""
    saved, total = start.checkpoint, plan.total_steps or 0
    if saved is None or cfg.trainer.val_only or saved.step < total:
        return False
    if _tests(cfg) and not is_tested(run_dir, start.run_id, saved.step):
        return False
    print(
        f"Run {start.run_id} is complete: {saved.step} of {total} training steps are done "
        "(raise trainer.total_training_steps to go on).",
        file=sys.stderr,
    )
    print(f"report: {render(run_dir)}", file=sys.stderr)
    return True


async def _play(
    course: Course,
    tasks: TaskSets,
    chat: ChatFormat,
    pools: Pools,
    supervisor: Supervisor,
    heart: Heartbeat,
) -> None:
    cfg, plan, start, events = course.cfg, course.plan, course.start, course.events
    saved, step = start.checkpoint, course.step
    pools.roster.tell(events, step)
    tell_self_tests(pools.self_tests, cfg.judge_rollout.self_test, events)
    tell_footprints(pools.footprints, events)
    pools.judge.on_restart = restart_teller(events)
    with ProgressView(plan.total_steps or 0, step) as progress:
        services = _services(course, tasks, chat, pools, progress)
        heart.say, heart.pulse = progress.say, partial(pulse_of, services, supervisor)

        async def work() -> None:
            before = await starting_test(services) if _tests(cfg) else {}
            await train(services)
            if _tests(cfg):
                await final_test(services, before)

        try:
            if saved is not None:
                await persist.restore(services, saved)
                progress.say(f"resumed run {start.run_id} after step {step}")
            await Recovery(services, pools, events, saved).play(work)
        except asyncio.CancelledError:
            await supervisor.leave(services)
            raise
        finally:
            course.step = services.state.step
            course.recorded = services.log.last_step is not None
            progress.set_phase("end")
            services.wandb.finish()
            await close_roles(services.roles)
            if services.player is not None:
                await services.player.close()


def _services(
    course: Course, tasks: TaskSets, chat: ChatFormat, pools: Pools, progress: ProgressView
) -> Services:
    cfg, plan, start, run_dir = course.cfg, course.plan, course.start, course.run_dir
    resolved = course.resolved
    exchange = prior_exchange(cfg, _yes(cfg))
    elicit = elicitor(
        chat, template_of(cfg.multi_turn.env), cfg.multi_turn.logprob_reward.agg, exchange
    )

    player = api_player(cfg, max_games(cfg, plan), chat)

    def chooser(*, evaluation: bool) -> Callable[[Task], Chooser] | None:
        if player is not None:
            return player.chooser
        return chooser_factory(candidate_settings(cfg, evaluation=evaluation), elicit)

    def driver(max_turns: int, *, evaluation: bool) -> RolloutDriver:
        return RolloutDriver(
            pools.router,
            pools.judge,
            chat,
            env_factory(cfg, max_turns),
            GameSettings(
                max_turns=max_turns,
                max_turn_tokens=cfg.data.max_response_length,
                max_episode_tokens=cfg.data.max_prompt_length,
                least_turn_tokens=least_turn_tokens(cfg),
            ),
            max_games=max_games(cfg, plan),
            run_seed=cfg.seed,
            run_id=start.run_id,
            make_chooser=chooser(evaluation=evaluation),
        )

    saved_step = start.checkpoint.step if start.checkpoint else None
    credit = credit_method(cfg)
    return Services(
        cfg=cfg,
        run_dir=run_dir,
        run_id=start.run_id,
        total_steps=plan.total_steps or 0,
        tasks=tasks,
        sampler=_sampler(cfg, tasks),
        rollouts=driver(cfg.multi_turn.max_turns.train, evaluation=False),
        val_rollouts=driver(cfg.multi_turn.max_turns.val, evaluation=True),
        policy=pools.policy,
        engines=pools.engines,
        judge=pools.judge,
        shaper=reward_shaper(cfg),
        credit=guarded(cfg, credit),
        scorers=credit_scorers(cfg, credit),
        hinted=hinter(chat),
        roles=rubric_roles(cfg, chat, pools.router, pools.policy),
        elicit=elicit,
        log=MetricsLog(run_dir / "metrics.jsonl", start.run_id, saved_step),
        wandb=wandb_mirror(cfg, run_dir, start.run_id, resolved),
        progress=progress,
        resolved=resolved,
        prices=prices(cfg, plan.total_steps or 1),
        kl_reward=kl_reward(cfg),
        engine=pools.router,
        player=player,
        device=plan.device,
    )


def _sampler(cfg: RunConfig, tasks: TaskSets) -> TaskSampler:
    """The order of the training tasks; an evaluation has none and never asks for any."""
    if cfg.trainer.val_only:
        return TaskSampler(1, 1)
    data = cfg.data
    return TaskSampler(len(tasks.train), data.train_batch_size, cfg.seed, shuffle=data.shuffle)


def _changes(saved: Checkpoint | None, resolved: str) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those of the checkpoint, by name: (old, new)."""
    if saved is None:
        return {}
    return config_diff(yaml.safe_load(saved.meta["config"]), yaml.safe_load(resolved))


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


def _yes(cfg: RunConfig) -> str:
    """How the environment says yes to the policy."""
    notices = PUBLISHED_NOTICES if cfg.data.world is None else WORLD_NOTICES
    return notices["yes"]


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
    tell_run_facts(run_dir)
