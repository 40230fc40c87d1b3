"""Settings that change rewards between a game's end and credit (``algorithm.*``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.config.fields import opt


@dataclass(frozen=True, slots=True)
class FilterGroups:
    """Leaving out groups that teach little (DAPO, StarPO-S)."""

    enabled: bool = opt(
        False,
        "Train on some of the groups only.",
        corrected="works",
    )
    metric: Literal["seq_reward", "seq_final_reward"] = opt(
        "seq_reward", "What must differ: the sum of rewards or the outcome."
    )
    max_num_gen_batches: int = opt(
        10, "Batches that may be played for one step, which then stops the run; 0 has no limit."
    )
    rule: Literal["differ", "top_k", "share"] = opt(
        "differ",
        "Which groups stay: those whose games differ, and more are played until the batch is full; "
        "or, of one batch, the share keep of largest spread (top_k), or those of largest spread "
        "that have the share keep of all variance (share).",
        new=True,
    )
    keep: float = opt(0.25, "That share, of top_k and share.", new=True)


@dataclass(frozen=True, slots=True)
class Overlong:
    """A soft price on long games (DAPO)."""

    enabled: bool = opt(False, "Charge games whose sampled tokens come near max_tokens.", new=True)
    max_tokens: int = opt(
        0,
        "Sampled tokens at which the whole price is charged; 0 takes data.max_prompt_length, with "
        "unit=turn data.max_response_length.",
        new=True,
    )
    buffer_tokens: int = opt(128, "Tokens before that from which on it rises.", new=True)
    factor: float = opt(1.0, "The whole price, in reward.", new=True)
    unit: Literal["game", "turn"] = opt(
        "game", "What is measured: all turns of a game, or each turn.", new=True
    )


@dataclass(frozen=True, slots=True)
class ProcessReward:
    """A reward of turns whose weight fades over training."""

    channel: Literal["", "belief", "validity"] = opt(
        "", "Reward channel that fades; empty for none.", new=True
    )
    weight: float = opt(0.5, "Its weight before the first update.", new=True)
    schedule: Literal["linear", "cosine", "exp"] = opt(
        "linear", "How the weight falls to zero.", new=True
    )
    aggregation: Literal["mean", "sum"] = opt(
        "mean", "Pay a game the mean of its turns or their sum, which pays for length.", new=True
    )
    horizon: int = opt(
        0, "Updates after which nothing is paid; 0 takes half of those planned.", new=True
    )
    half_life: float = opt(50.0, "Updates in which the weight halves, with exp.", new=True)


@dataclass(frozen=True, slots=True)
class Clinical:
    """Pay for questions, where an environment knows exactly what is still uncertain."""

    enabled: bool = opt(
        False,
        "Pay a question for the uncertainty that its answer removed, by the environment's own "
        "posterior; needs the hook uncertainty.",
        new=True,
    )
    form: Literal["entropy", "logp", "positive"] = opt(
        "entropy",
        "What is paid: the fall of the posterior's entropy, the rise of the truth's log-prob in "
        "nats, or the falls of the entropy without its rises.",
        new=True,
    )
    beta: float = opt(0.5, "Reward of the whole entropy, or of one nat.", new=True)
    cost: float = opt(0.0, "Price of a question.", new=True)


@dataclass(frozen=True, slots=True)
class RewardNormalisation:
    """Returns on one scale before credit (StarPO)."""

    method: Literal["identity", "mean", "mean_std", "mean_std_clamp"] = opt(
        "identity", "What is taken off a game's return, and what it is divided by.", new=True
    )
    over: Literal["group", "batch"] = opt(
        "group", "Whose mean and deviation: the games of a secret or all of a step.", new=True
    )
    clamp_low: float = opt(-1.0, "Lower bound of mean_std_clamp, in deviations.", new=True)
    clamp_high: float = opt(3.0, "Upper bound of it.", new=True)
