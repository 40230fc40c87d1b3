"""Settings of the run: schedule, folders, mirrors (``trainer.*``, ``ray_init.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt


@dataclass(frozen=True, slots=True)
class Validation:
    """What validation adds."""

    greedy: bool = opt(False, "Also play one greedy game for each secret.", new=True)


@dataclass(frozen=True, slots=True)
class Abort:
    """When a run stops by itself: with exit status 5 because its steps do nothing (the first three
    limits), with 3 because the policy has collapsed."""

    zero_tokens: int | None = opt(
        3, "Training steps in a row without one sampled token; null never.", new=True
    )
    zero_gradients: int | None = opt(
        5, "Training steps in a row with a gradient that is exactly zero; null never.", new=True
    )
    max_timeout_rate: float | None = opt(
        0.5,
        "Share of the attempts to ask the judge that miss its deadline, above which it is; null "
        "never.",
        new=True,
    )
    nan_gradients: int | None = opt(
        2, "Training steps in a row with a gradient that is not finite; null never.", new=True
    )
    min_entropy: float | None = opt(
        1e-4, "Mean entropy of a sampled token, in nats, below which it is; null never.", new=True
    )
    max_repeated_chars: float | None = opt(
        0.5,
        "Share of the questions' characters that repeat the one before, above which it is; null "
        "never.",
        new=True,
    )
    max_invalid_turns: float | None = opt(
        0.98, "Share of invalid turns above which it is; null never.", new=True
    )
    patience: int = opt(
        3, "Training steps in a row that the limits take that are no number of steps.", new=True
    )


@dataclass(frozen=True, slots=True)
class Trainer:
    """The schedule and the run's folder."""

    project_name: str = opt(
        "delta_belief_rl", "Project, first part of the run's folder.", corrected="default"
    )
    experiment_name: str = opt(
        "default", "Name of the run, second part of its folder.", corrected="default"
    )
    output_dir: str = opt(
        "outputs/delta_belief_rl/default", "Folder of the run: everything is kept here.", new=True
    )
    total_epochs: int = opt(30, "Passes over the training secrets.")
    total_training_steps: int | None = opt(
        None, "Training steps; null is total_epochs times the steps of an epoch."
    )
    val_only: bool = opt(False, "Validate once and stop.")
    val_before_train: bool = opt(
        True,
        "Validate before the first step.",
        corrected="a resumed run does not repeat it",
    )
    critic_warmup: int = opt(
        0,
        "Training steps, from the first, in which only the critic is trained.",
        corrected="is the number of such steps; published: one fewer",
    )
    test_freq: int = opt(25, "Validate every so many steps and at the last; -1 never.")
    save_freq: int = opt(25, "Write a checkpoint every so many steps and at the last; -1 never.")
    recovery_freq: int = opt(
        1,
        "Write a checkpoint every so many steps, and at the last, that stays until two newer ones "
        "are there; -1 never.",
        new=True,
    )
    save_rollout: bool = opt(
        True,
        "Keep the games of the step in progress on the disk, so that a crash before its checkpoint "
        "does not cost them.",
        new=True,
    )
    rollout_freq: int = opt(10, "Write the games of every so many steps and of the last; -1 never.")
    check_freq: int = opt(
        0,
        "Hold the engine's log-probs and beliefs against the trainer's every so many steps, and "
        "stop the run (status 1) where they differ; 0 never.",
        new=True,
    )
    validation: Validation = field(default_factory=Validation)
    abort: Abort = field(default_factory=Abort)
    final_test: bool = opt(
        False, "At the end, play the test secrets with the first and the trained policy.", new=True
    )
    test_games: int = opt(8, "Games per secret of the final test.", new=True)
    resume_mode: Literal["disable", "auto", "must", "resume_path"] = opt(
        "disable",
        "Continue from the newest checkpoint (auto; must insists on one), from "
        "resume_from_path, or "
        "start anew.",
    )
    resume_from_path: str | None = opt(
        None, "Checkpoint folder for resume_mode=resume_path; its name holds global_step_."
    )
    default_local_dir: str = opt(
        "outputs/delta_belief_rl/default/checkpoints",
        "Folder of the checkpoints.",
        corrected="default inside output_dir",
    )
    rollout_data_dir: str = opt(
        "outputs/delta_belief_rl/default/rollout",
        "Folder of the training games.",
        corrected="default inside output_dir",
    )
    validation_data_dir: str = opt(
        "outputs/delta_belief_rl/default/validation",
        "Folder of the validation games.",
        corrected="default inside output_dir",
    )
    max_actor_ckpt_to_keep: int | None = opt(
        None, "Checkpoints of save_freq to keep; null keeps all."
    )
    keep_best: bool = opt(
        True,
        "Also write and keep the checkpoint of the best validation so far (val-core/success_rate).",
        new=True,
    )
    max_staleness: int = opt(
        0, "Steps by which the policy that plays may lag behind; 0 alternates.", new=True
    )
    logger: tuple[Literal["console", "wandb"], ...] = opt(
        ("console", "wandb"), "Mirrors of the metrics; metrics.jsonl is always written."
    )
    wandb_mode: Literal["auto", "offline", "online", "disabled"] = opt(
        "auto",
        "W&B: auto goes online where a key is set up and is disabled otherwise.",
        new=True,
    )
    log_val_generations: int = opt(0, "Validation games shown as a table in W&B.")
    nnodes: int = opt(
        1, "Machines of the run; more than one need a Ray cluster to join (ray_init.address)."
    )
    n_gpus_per_node: int | None = opt(
        None, "GPUs of each machine; checked against the two pools. null asks the machine."
    )
    heartbeat_seconds: float = opt(
        30.0,
        "Seconds between two writes of heartbeat.json, and after which a phase that lasts longer "
        "gives a line in the log.",
        new=True,
    )
    max_recoveries: int = opt(
        3,
        "Lost training ranks and policy engines that are started again without a new training step "
        "in between; the next loss ends the run (status 1). 0 never starts one again.",
        new=True,
    )
    heartbeat_timeout: float = opt(
        60.0,
        "Seconds that every worker has for a sign of life, before each training step and again "
        "and again while a call lasts; one that gives none counts as lost.",
        new=True,
    )
    ray_wait_register_center_timeout: int = opt(
        300,
        "Seconds that workers may take to start.",
        corrected="names the worker that is late, and stops the run in order",
    )


@dataclass(frozen=True, slots=True)
class RayInit:
    """How Ray is started."""

    num_cpus: int | None = opt(
        None,
        "CPUs given to Ray, never fewer than it has workers; null uses the allocation.",
        corrected="takes effect",
    )
    address: str = opt(
        "local",
        "local starts a private Ray; auto joins the cluster that RAY_ADDRESS names; any other "
        "value is the address of a cluster to join.",
        new=True,
    )
    temp_dir: str | None = opt(
        None, "Ray's scratch folder; null is RAY_TMPDIR, else a short private one.", new=True
    )
    interface: str | None = opt(
        None,
        "Network interface that a private Ray, NCCL and gloo use, such as eth0; null leaves each "
        "its own choice.",
        new=True,
    )
