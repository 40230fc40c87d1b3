"""Settings of the policy update (``actor_rollout_ref.actor.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt


@dataclass(frozen=True, slots=True)
class Optim:
    """AdamW and its schedule."""

    lr: float = opt(1e-6, "Learning rate.")
    lr_warmup_steps: int = opt(-1, "Training steps of linear warm-up; -1 uses the ratio.")
    lr_warmup_steps_ratio: float = opt(0.0, "Warm-up as a share of all training steps.")
    min_lr_ratio: float | None = opt(
        None, "Floor of the cosine schedule as a share of lr.", corrected="takes effect"
    )
    warmup_style: Literal["constant", "cosine"] = opt("constant", "Schedule after the warm-up.")
    weight_decay: float = opt(0.01, "Decoupled weight decay.")
    betas: tuple[float, float] = opt((0.9, 0.95), "Averaging factors of AdamW.")


@dataclass(frozen=True, slots=True)
class Offload:
    """What waits in CPU memory between uses."""

    param_offload: bool = opt(False, "Keep parameters in CPU memory.")
    optimizer_offload: bool = opt(
        True, "Keep the optimizer's averages in CPU memory except in its step (GPUs only)."
    )


@dataclass(frozen=True, slots=True)
class Update:
    """The loss, the batches and the optimizer."""

    cot: bool = opt(
        False,
        "The policy answers with reasoning and a question in question tags, as the prompts of the "
        "tasks must ask for; an answer without the tags is invalid and not judged.",
        corrected="the rules look at the question inside the tags, and a batch without any tag "
        "does not end the run",
    )
    thinking: bool = opt(
        False,
        "As cot, with the reasoning in think tags; also the flag enable_thinking of the chat "
        "template.",
        corrected="as cot, and the judge's history holds the questions",
    )
    thinking_history: Literal["keep", "strip"] = opt(
        "keep",
        "What stays of think blocks in later prompts of a game: all that was sampled or rendered "
        "(keep), or not even the empty block of a policy that does not think (strip). Sampled "
        "thoughts cannot be stripped: every prompt goes on from the tokens of the last.",
        new=True,
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = opt(
        "auto",
        "Number format of the forward pass; auto is bfloat16 on a GPU and float32 on a CPU.",
        corrected="bfloat16 instead of float16 where nothing is set",
    )
    ppo_mini_batch_size: int = opt(16, "Secrets per optimizer step.")
    ppo_micro_batch_size_per_gpu: int = opt(16, "Games per forward and backward pass.")
    use_dynamic_bsz: bool = opt(
        False, "Fill micro-batches up to a token budget instead of a number of games."
    )
    ppo_max_token_len_per_gpu: int = opt(
        16384, "That token budget: tokens per micro-batch on one GPU."
    )
    ppo_epochs: int = opt(1, "Passes over the games of a training step.")
    policy_loss: Literal["ppo", "gspo", "turn_ratio", "cispo", "reinforce"] = opt(
        "ppo",
        "Policy loss: ppo (a ratio for each token, dual clip), gspo (one ratio for each game), "
        "turn_ratio (one for each turn), cispo (the clipped ratio only weighs) or reinforce (no "
        "ratio at all).",
        new=True,
    )
    grad_clip: float = opt(1.0, "Largest norm of the gradient.")
    clip_ratio: float = opt(
        0.2, "Width of the ratio's clip where clip_ratio_low or clip_ratio_high is null."
    )
    clip_ratio_low: float | None = opt(0.2, "Clip below 1.")
    clip_ratio_high: float | None = opt(0.28, "Clip above 1.")
    clip_ratio_c: float = opt(3.0, "Bound of the loss where the advantage is negative (dual clip).")
    tis_imp_ratio_cap: float = opt(
        -1.0,
        "Cap of the truncated importance weight between engine and trainer; -1 is off.",
        corrected="takes effect",
    )
    loss_agg_mode: Literal[
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "turn-mean",
    ] = opt(
        "token-mean",
        "How token losses are averaged; turn-mean gives each turn the same weight.",
        corrected="counts are taken over the whole mini-batch, not over each micro-batch",
    )
    entropy_coeff: float = opt(0.0, "Weight of the entropy bonus.")
    use_kl_loss: bool = opt(False, "Add a KL term to the policy without adapter.")
    kl_loss_coef: float = opt(0.001, "Weight of the KL term.")
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = opt(
        "low_var_kl", "Estimator of the KL term."
    )
    optim: Optim = field(default_factory=Optim)
    fsdp_config: Offload = field(default_factory=Offload)
