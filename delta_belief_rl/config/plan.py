"""What a run will do, computed before anything starts: places, batches, steps and memory.

``make_plan`` is a pure function of the configuration and the facts. A plan whose ``problems`` are
not empty can be shown but not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from delta_belief_rl.config.engine_memory import (
    EngineNeeds,
    judge_engine_needs,
    policy_engine_needs,
)
from delta_belief_rl.config.facts import Facts
from delta_belief_rl.config.memory import MemoryLine, estimate_judge_memory, estimate_memory
from delta_belief_rl.config.published import published_file
from delta_belief_rl.config.rules_models import model_problems
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.types import UserError

FETCH_HINT = "fetch the published files with `delta-belief data fetch`"
PACKAGED_HINT = (
    "set data.train_files=package:twenty_questions/train and "
    "data.val_files=package:twenty_questions/val to use the packaged ones"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """One process and where it runs.

    Attributes:
        pool: ``actor``, ``engine`` or ``judge``.
        replica: Number inside the pool.
        gpus: Numbers of its GPUs, empty on a CPU.
        runs: What it does, in words.
    """

    pool: str
    replica: int
    gpus: tuple[int, ...]
    runs: str


@dataclass(frozen=True, slots=True)
class MachineNeeds:
    """What the machines of a run must be.

    Attributes:
        count: Of them (``trainer.nnodes``).
        gpus: GPUs that the plan counts on each of them; the first machine has the first numbers.
    """

    count: int
    gpus: int

    def machine(self, gpu: int) -> int:
        """Number of the machine that has a GPU of the plan."""
        return gpu // self.gpus if self.count > 1 and self.gpus else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The derived numbers of a run.

    Attributes:
        device: ``cpu`` or ``cuda``, for the policy.
        cores: CPU cores of the run.
        gpus: GPUs that all pools need together.
        machines: Those that the run is on.
        threads: CPU threads of the policy.
        steps_per_epoch: None where the number of training tasks is not known.
        total_steps: Training steps; 0 for an evaluation, None where not known.
        engine_needs, judge_needs: Of one GPU of the vLLM engines; None without such an engine.
        tokens_per_micro_batch: Bound on the tokens of one forward and backward pass on one GPU.
        val_games: Games of one validation, greedy ones included.
        problems: One sentence each.
    """

    config: RunConfig
    facts: Facts
    device: str
    cores: int
    gpus: int
    machines: MachineNeeds
    threads: int
    placements: tuple[Placement, ...]
    secrets_per_step: int
    games_per_step: int
    games_per_optimizer_step: int
    optimizer_steps: int
    tokens_per_micro_batch: int
    steps_per_epoch: int | None
    total_steps: int | None
    val_games: int | None
    memory: tuple[MemoryLine, ...]
    judge_memory: tuple[MemoryLine, ...]
    engine_needs: EngineNeeds | None
    judge_needs: EngineNeeds | None
    problems: tuple[str, ...]

    def steps(self, start: int = 0) -> range:
        """Numbers of the training steps left after ``start`` finished ones; the first is 1."""
        return range(start + 1, (self.total_steps or 0) + 1)

    def epoch(self, step: int) -> int:
        """Epoch of a training step, from 0."""
        return (step - 1) // (self.steps_per_epoch or 1)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return self._due(step, self.config.trainer.save_freq)

    def validates(self, step: int) -> bool:
        """Whether a validation is due after this step; step 0 is before training."""
        if step == 0:
            return self.config.trainer.val_before_train or self.config.trainer.val_only
        return self._due(step, self.config.trainer.test_freq)

    def writes_games(self, step: int) -> bool:
        """Whether the training games of this step are written."""
        return self._due(step, self.config.trainer.rollout_freq)

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.total_steps)

    def check(self) -> None:
        """Refuse to run a plan that has a problem.

        Raises:
            UserError: The first problem.
        """
        for sentence in self.problems:
            raise UserError(sentence)

    def pool(self, name: str) -> tuple[Placement, ...]:
        """The placements of one pool."""
        return tuple(place for place in self.placements if place.pool == name)

    def render(self) -> str:
        """The plan as text."""
        from delta_belief_rl.config.plan_text import render_plan

        return render_plan(self)


def make_plan(config: RunConfig, facts: Facts) -> Plan:
    """Derive the plan of a valid configuration."""
    actor_gpus = _actor_gpus(config, facts)
    placements, gpus = _place(config, actor_gpus)
    machines = _machines(config, facts, gpus)
    update, turns, trainer = config.actor_rollout_ref.actor, config.multi_turn, config.trainer
    batch, mini, group = config.data.train_batch_size, update.ppo_mini_batch_size, turns.train.n
    tokens = update.ppo_max_token_len_per_gpu
    if not update.use_dynamic_bsz:
        tokens = update.ppo_micro_batch_size_per_gpu * config.data.max_prompt_length
    per_epoch, total = _schedule(config, facts)
    model = None if config.actor_rollout_ref.model.api_model_name else facts.model
    val_each = turns.val.n + (1 if trainer.validation.greedy else 0)
    cores = config.ray_init.num_cpus or facts.cores
    sharing = max(1, min(actor_gpus, machines.gpus))
    return Plan(
        config=config,
        facts=facts,
        device="cuda" if actor_gpus else "cpu",
        cores=cores,
        gpus=gpus,
        machines=machines,
        threads=config.actor_rollout_ref.num_threads or max(1, facts.cores // sharing),
        placements=placements,
        secrets_per_step=batch,
        games_per_step=batch * group,
        games_per_optimizer_step=mini * group,
        optimizer_steps=math.ceil(batch / mini) * update.ppo_epochs,
        tokens_per_micro_batch=tokens,
        steps_per_epoch=per_epoch,
        total_steps=total,
        val_games=None if facts.num_val_tasks is None else facts.num_val_tasks * val_each,
        memory=estimate_memory(config, model, actor_gpus, tokens),
        judge_memory=estimate_judge_memory(config, facts.judge_model),
        engine_needs=policy_engine_needs(config, model),
        judge_needs=judge_engine_needs(config, facts.judge_model),
        problems=(
            *_problems(config, facts, gpus, actor_gpus, per_epoch),
            *_machine_problems(config, placements, gpus, machines),
        ),
    )


def _actor_gpus(config: RunConfig, facts: Facts) -> int:
    actor = config.actor_rollout_ref
    if actor.ngpus is not None:
        return actor.ngpus
    if actor.device == "cpu" or actor.model.api_model_name:
        return 0
    return 1 if facts.gpus or actor.device == "cuda" or actor.rollout.name == "vllm" else 0


def _machines(config: RunConfig, facts: Facts, gpus: int) -> MachineNeeds:
    trainer = config.trainer
    if trainer.nnodes == 1:
        return MachineNeeds(1, gpus)
    each = trainer.n_gpus_per_node
    return MachineNeeds(trainer.nnodes, (facts.gpus if each is None else each) if gpus else 0)


def _machine_problems(
    config: RunConfig, placements: tuple[Placement, ...], gpus: int, machines: MachineNeeds
) -> Iterator[str]:
    """GPUs that several machines do not have, and processes that would be on two of them."""
    offered = machines.count * machines.gpus
    if gpus > offered:
        yield (
            f"The run needs {gpus} GPUs and {machines.count} machines of {machines.gpus} have "
            f"{offered}: lower the pools, or raise trainer.nnodes or trainer.n_gpus_per_node."
        )
        return
    for place in placements:
        if len({machines.machine(gpu) for gpu in place.gpus}) > 1:
            pool = "judge_rollout" if place.pool == "judge" else "actor_rollout_ref"
            yield (
                f"{'Judge' if place.pool == 'judge' else 'Policy engine'} {place.replica} would be "
                f"on GPUs {place.gpus[0]} to {place.gpus[-1]}, which are of two machines with "
                f"{machines.gpus} GPUs each: choose {pool}.ngpus and "
                f"{pool}.rollout.tensor_model_parallel_size so that every machine holds whole "
                "replicas."
            )
            return


def _schedule(config: RunConfig, facts: Facts) -> tuple[int | None, int | None]:
    """``(steps of an epoch, all steps)``."""
    trainer = config.trainer
    if trainer.val_only:
        return None, 0
    per_epoch = None
    if facts.num_train_tasks is not None:
        per_epoch = facts.num_train_tasks // config.data.train_batch_size
    if trainer.total_training_steps is not None:
        return per_epoch, trainer.total_training_steps
    return per_epoch, None if per_epoch is None else per_epoch * trainer.total_epochs


def _place(config: RunConfig, actor_gpus: int) -> tuple[tuple[Placement, ...], int]:
    """Every process, and the number of GPUs that all need together.

    The policy's GPUs come first; judge replicas follow in blocks, or share the policy's GPUs.
    """
    actor, judge = config.actor_rollout_ref, config.judge_rollout
    places: list[Placement] = []
    ranks: int = actor_gpus or (0 if actor.model.api_model_name else 1)
    task = "plays" if config.trainer.val_only else _training_words(config)
    for rank in range(ranks):
        places.append(Placement("actor", rank, (rank,) if actor_gpus else (), task))
    parallel = (actor.rollout.tensor_model_parallel_size or actor_gpus) if actor_gpus else 1
    engine = actor.rollout.name
    replicas = max(1, actor_gpus // parallel) if actor_gpus else actor.rollout.replicas
    if not ranks:
        runs = f"API model {actor.model.api_model_name}, asked by the run's own process"
        places.append(Placement("engine", 0, (), runs))
        replicas = 0
    for replica in range(replicas):
        block = range(replica * parallel, (replica + 1) * parallel) if actor_gpus else range(0)
        words = f"{engine} engine, tp {parallel}" if actor_gpus else f"{engine} engine"
        if actor_gpus and actor.rollout.name == "vllm" and actor.rollout.free_cache_engine:
            words += ", sleeps while training"
        places.append(Placement("engine", replica, tuple(block), words))
    first = 0 if judge.share_actor_gpu else actor_gpus
    places.extend(_judges(config, first))
    return tuple(places), max([actor_gpus, *(gpu + 1 for place in places for gpu in place.gpus)])


def _judges(config: RunConfig, first: int) -> Iterator[Placement]:
    judge = config.judge_rollout
    if judge.name == "hf":
        for replica in range(judge.ngpus or judge.replicas):
            gpus = (first + replica,) if judge.ngpus else ()
            yield Placement("judge", replica, gpus, f"hf judge, {judge.model.path}")
        return
    if judge.name != "vllm":
        source = {
            "world": config.data.world,
            "rules": config.multi_turn.env,
            "api": judge.model.api_model_name,
        }.get(judge.name)
        for replica in range(judge.replicas):
            yield Placement(
                "judge", replica, (), f"{judge.name} judge" + (f", {source}" if source else "")
            )
        return
    quantised = f", {judge.rollout.quantization}" if judge.rollout.quantization else ""
    if not judge.ngpus:
        for replica in range(judge.replicas):
            yield Placement("judge", replica, (), f"vllm judge, {judge.model.path}{quantised}")
        return
    pool = judge.ngpus
    parallel = judge.rollout.tensor_model_parallel_size or pool
    blocks = [block for block in range(pool // parallel) for _ in range(judge.replicas)]
    for replica, block in enumerate(blocks):
        start = first + block * parallel
        yield Placement(
            "judge",
            replica,
            tuple(range(start, start + parallel)),
            f"{judge.model.path}, tp {parallel}{quantised}",
        )


def _training_words(config: RunConfig) -> str:
    rank = config.actor_rollout_ref.model.lora_rank
    words = f"trains LoRA r={rank}" if rank else "trains all weights"
    return words + (", scores beliefs" if config.multi_turn.logprob_reward.enabled else "")


def _problems(
    config: RunConfig, facts: Facts, gpus: int, actor_gpus: int, per_epoch: int | None
) -> Iterator[str]:
    for path in facts.missing:
        yield f"{path} does not exist: {_cure(path)}."
    yield from model_problems(config, facts, actor_gpus)
    remote = config.ray_init.address != "local" or config.trainer.nnodes > 1
    if gpus > facts.gpus and not remote:
        yield (
            f"The run needs {gpus} GPUs and {facts.gpus} are visible here; lower the pools, or use "
            "experiment=quickstart, which needs none."
        )
    if per_epoch == 0:
        yield (
            f"data.train_batch_size={config.data.train_batch_size} exceeds the "
            f"{facts.num_train_tasks} training tasks; lower it."
        )
    if facts.num_val_tasks == 0 and config.trainer.val_only:
        yield "There is no validation task to play; set data.val_files or data.world."
    sleeps = config.actor_rollout_ref.rollout.free_cache_engine
    vllm = config.actor_rollout_ref.rollout.name == "vllm" and actor_gpus > 0
    if vllm and sleeps and "expandable_segments:true" in facts.alloc_conf.lower():
        yield (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True does not go with an engine that "
            "sleeps; "
            "unset it, or set actor_rollout_ref.rollout.free_cache_engine=false."
        )


def _cure(path: str) -> str:
    """What to do about a file or folder that is missing."""
    if published_file(path) is not None:
        return f"{FETCH_HINT}, or {PACKAGED_HINT}" if "/twenty_questions/" in path else FETCH_HINT
    if path.endswith(".parquet"):
        return f"correct the path, or {PACKAGED_HINT}"
    return "correct the path or get the model"
