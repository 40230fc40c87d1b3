"""The plan as text for a terminal and ``plan.txt``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from delta_belief_rl.config.engine_args import kernel_lines
from delta_belief_rl.config.facts import ModelShape
from delta_belief_rl.config.memory import MemoryLine, show_bytes
from delta_belief_rl.config.plan import Plan
from delta_belief_rl.config.versions import VLLM


def render_plan(plan: Plan) -> str:
    """All sections, with a line for each problem at the end."""
    trainer = plan.config.trainer
    lines = [
        f"Plan of {trainer.project_name}/{trainer.experiment_name} (seed {plan.config.seed})",
        f"Folder: {trainer.output_dir}",
        "",
        *_places(plan),
        "",
        *(_evaluation(plan) if trainer.val_only else _step(plan)),
        "",
        *_schedule(plan),
    ]
    if plan.memory:
        lines += ["", *_memory("the policy", plan.facts.model, plan.memory)]
    if plan.judge_memory:
        name = "each judge replica"
        lines += ["", *_memory(name, plan.facts.judge_model, plan.judge_memory)]
    lines += _engines(plan)
    if kernels := list(_kernels(plan)):
        lines += ["", *kernels]
    if plan.problems:
        lines += ["", "This cannot run as it stands:", *(f"  - {line}" for line in plan.problems)]
    return "\n".join(lines)


def _places(plan: Plan) -> Iterator[str]:
    machines = plan.machines
    several = f" on {machines.count} machines" if machines.count > 1 else ""
    yield (
        f"Places ({plan.cores} CPU cores and {plan.facts.gpus} GPUs here; {plan.gpus} GPUs needed"
        f"{several})"
    )
    rows = [("pool", "replica", *(("machine",) if several else ()), "GPU", "what runs")]
    for place in plan.placements:
        first = machines.machine(place.gpus[0]) if place.gpus else None
        which = ("any" if first is None else str(first),) if several else ()
        own = (gpu - (first or 0) * machines.gpus for gpu in place.gpus)
        where = ",".join(map(str, own)) or "CPU"
        rows.append((place.pool, str(place.replica), *which, where, place.runs))
    yield from _table(rows)
    if plan.device == "cpu" and plan.pool("actor"):
        yield f"  The policy uses {plan.threads} CPU threads."


def _step(plan: Plan) -> Iterator[str]:
    config = plan.config
    turns, update = config.multi_turn, config.actor_rollout_ref.actor
    yield "One training step"
    yield (
        f"  {plan.secrets_per_step} secrets x {turns.train.n} games = {plan.games_per_step:,} "
        "games of "
        f"at most {turns.max_turns.train} turns ({plan.games_per_step * turns.max_turns.train:,} "
        "questions)"
    )
    yield (
        f"  token limits: {config.data.max_response_length} a turn, "
        f"{config.data.max_prompt_length:,} "
        "a game"
    )
    yield (
        f"  {plan.optimizer_steps} optimizer step{'s' if plan.optimizer_steps > 1 else ''} of "
        f"{update.ppo_mini_batch_size} secrets = {plan.games_per_optimizer_step:,} games"
    )
    count = f"{update.ppo_micro_batch_size_per_gpu} games, "
    kind = "" if update.use_dynamic_bsz else count
    yield f"  micro-batch on one device: {kind}at most {plan.tokens_per_micro_batch:,} tokens"
    yield (
        f"  advantage {config.algorithm.adv_estimator} ({config.algorithm.parity}), {_belief(plan)}"
    )


def _belief(plan: Plan) -> str:
    reward = plan.config.multi_turn.logprob_reward
    if not reward.enabled:
        return "no belief reward"
    methods = "+".join(reward.methods) if reward.normalised else "raw"
    weight = plan.config.multi_turn.reward.weight_elicit
    return f"belief reward {methods} of {reward.base_model}, weight {weight:g}"


def _evaluation(plan: Plan) -> Iterator[str]:
    turns = plan.config.multi_turn
    yield "Evaluation only"
    yield f"  {_count(plan.facts.num_val_tasks)} secrets x {turns.val.n} games of at most " + (
        f"{turns.max_turns.val} turns"
    )


def _schedule(plan: Plan) -> Iterator[str]:
    config, facts, trainer = plan.config, plan.facts, plan.config.trainer
    yield "Schedule"
    if not trainer.val_only:
        epochs = ""
        if plan.steps_per_epoch and plan.total_steps is not None:
            share = plan.total_steps / plan.steps_per_epoch
            epochs = f" = {share:.4g} epochs of {plan.steps_per_epoch} steps"
        tasks = _count(facts.num_train_tasks)
        yield f"  {_count(plan.total_steps)} training steps{epochs}, {tasks} training secrets"
        yield (
            f"  checkpoint {_when(trainer.save_freq)}, to recover from "
            f"{_when(trainer.recovery_freq)}; resume_mode={trainer.resume_mode}"
        )
    before = "before training and " if plan.validates(0) and not trainer.val_only else ""
    when = "once" if trainer.val_only else before + _when(trainer.test_freq)
    yield (
        f"  validation {when}: {_count(facts.num_val_tasks)} secrets x "
        f"{config.multi_turn.val.n} games"
        f"{' + 1 greedy' if trainer.validation.greedy else ''} = {_count(plan.val_games)} games"
    )
    if trainer.final_test:
        secrets = _count(facts.num_test_tasks)
        yield f"  final test: {secrets} secrets x {trainer.test_games} games, before and after"
    for overlap in facts.overlaps:
        yield f"  {overlap.sentence()}"


def _memory(name: str, shape: ModelShape | None, parts: Sequence[MemoryLine]) -> Iterator[str]:
    size = f" of {shape.parameters() / 1e6:,.1f} M weights" if shape else ""
    yield f"Memory of {name}{size}, on each device (estimate)"
    total = sum(line.bytes for line in parts)
    rows = [(line.what, show_bytes(line.bytes)) for line in parts]
    yield from _table([*rows, ("together", show_bytes(total))])


def _engines(plan: Plan) -> Iterator[str]:
    """What the weights of the vLLM engines need of the share that each engine takes."""
    config = plan.config
    ref, judge = config.actor_rollout_ref, config.judge_rollout
    judged = judge.rollout.quantization or judge.rollout.dtype
    for who, needs, what, share, on_gpu in (
        (
            "the policy's engine",
            plan.engine_needs,
            ref.rollout.dtype,
            ref.rollout.gpu_memory_utilization,
            plan.device == "cuda",
        ),
        (
            "a judge's engine",
            plan.judge_needs,
            judged,
            judge.rollout.gpu_memory_utilization,
            bool(judge.ngpus),
        ),
    ):
        if needs is None:
            continue
        taken = f", which takes {share:.0%} of it" if on_gpu else ""
        yield ""
        yield f"Memory of {who} on each {'GPU' if on_gpu else 'device'} (estimate){taken}"
        yield from _table([(line.what, show_bytes(line.bytes)) for line in needs.lines(what)])


def _kernels(plan: Plan) -> Iterator[str]:
    """Kernel switches of the vLLM engines; nothing without such engines."""
    low = f"{VLLM.low[0]}.{VLLM.low[1]}"
    lines = list(kernel_lines(plan.config, plan.facts.capability, plan.facts.vllm or low))
    if lines:
        here = f"vLLM {plan.facts.vllm}" if plan.facts.vllm else "vLLM is not installed here"
        yield f"Kernels ({here})"
        yield from (f"  {line}" for line in lines)


def _when(every: int) -> str:
    if every == -1:
        return "never"
    return "after every step" if every == 1 else f"every {every} steps and at the end"


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()
