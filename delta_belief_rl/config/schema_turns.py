"""Settings of the game: turns, belief reward, judge rules and reward signals (``multi_turn.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt

ENVIRONMENTS = (
    "twenty_questions",
    "guess_my_city",
    "murder_mystery",
    "customer_service",
    "user_personalization",
)
"""Environments of this package (``multi_turn.env``); plug-ins bring others."""
BELIEF_METHODS = (
    "episode_centering",
    "batch_centering",
    "group_centering",
    "group_min_max",
    "batch_std",
    "group_std",
    "tanh",
    "sigmoid",
    "min_max",
    "positive",
    "pacr",
    "potential",
)
VERIFY_METHODS = (
    "exact",
    "regex",
    "syntax",
    "sentence",
    "question",
    "multiple_questions",
    "length",
    "multiple_bets",
)


@dataclass(frozen=True, slots=True)
class MaxTurns:
    """Turn budgets."""

    train: int = opt(20, "Turns a game may take in training.")
    val: int = opt(20, "Turns a game may take in validation and in the final test.")


@dataclass(frozen=True, slots=True)
class Games:
    """Games per secret."""

    n: int = opt(1, "Games played for each secret; in training this is the group size.")


@dataclass(frozen=True, slots=True)
class LogprobReward:
    """The belief reward: how the change of log p(secret) becomes a reward of each turn."""

    enabled: bool = opt(False, "Pay each turn for the change of the belief in the secret.")
    agg: Literal["sum", "mean"] = opt("sum", "Add or average over the tokens of the secret.")
    base_model: Literal["actor", "ref", "ema", "base"] = opt(
        "actor",
        "Model of the belief before the turn: the policy (actor), the slow adapter (ema, also "
        "called ref) or the frozen model without adapter (base).",
        corrected="the slow adapter really moves, and base is a further choice",
    )
    step_model: Literal["actor", "ref", "ema", "base"] = opt(
        "actor", "Model of the belief after the turn; as base_model."
    )
    normalised: bool = opt(
        False, "Apply the transforms in methods; false pays the raw change, which may be negative."
    )
    methods: tuple[str, ...] = opt(
        ("episode_centering", "min_max"),
        "Transforms of the change: " + ", ".join(BELIEF_METHODS) + ".",
    )
    clip_min: float = opt(-2.0, "Lower bound of min_max, in nats.")
    clip_max: float = opt(2.0, "Upper bound of min_max, in nats.")
    tau: float = opt(1.0, "Slope of tanh.")
    std_floor: float = opt(
        1e-8,
        "Smallest standard deviation, in nats, that group_std and batch_std divide by.",
        new=True,
    )
    prior_form: Literal["prompt", "reply"] = opt(
        "prompt",
        "What the first belief is asked behind: the prompt, or a neutral exchange as well, so that "
        "it stands behind a reply like all later ones.",
        new=True,
    )
    first_turn: Literal["keep", "drop"] = opt(
        "keep", "Whether the first turn is paid for its change of belief.", new=True
    )
    dead_band: float = opt(
        0.0, "Changes of at most this many nats count as no change (numeric noise).", new=True
    )
    winning_turn: Literal["auto", "drop", "keep"] = opt(
        "auto",
        "Whether the winning turn is paid for its change of belief; auto drops it with "
        "normalised=true and keeps it otherwise, as published.",
        new=True,
    )


@dataclass(frozen=True, slots=True)
class LogprobSampling:
    """Choosing each question among several candidates by the change of belief it brings."""

    enabled: bool = opt(
        False,
        "Sample rollout.n candidate questions a turn and choose among them by the change of belief "
        "that each would bring. The choice looks at the secret: it is made in training and, with "
        "trainer.val_only, in the evaluation; validations of a training run play the policy alone.",
        corrected="the judge is given the scenario, and the chosen change of belief is paid only "
        "with multi_turn.logprob_reward.enabled",
    )
    best_n: int = opt(2, "Games of each group that take the candidate with the largest change.")
    worst_n: int = opt(
        2, "Games of each group that take the one with the smallest change; the rest draw."
    )
    p_best: float = opt(
        1.0,
        "With single games and in an evaluation: probability of the largest change, else a draw.",
    )


@dataclass(frozen=True, slots=True)
class VerifyJudge:
    """Rules that correct the judge's verdict."""

    enabled: bool = opt(True, "Let text rules correct the judge.")
    methods: tuple[str, ...] = opt(
        ("exact", "syntax", "sentence", "question", "multiple_questions", "length"),
        "Rules to apply: " + ", ".join(VERIFY_METHODS) + "; syntax needs the extra [lemma].",
    )
    false_positive_behavior: Literal["yes", "no", "invalid"] | None = opt(
        "yes",
        "Answer that replaces a win which no rule confirms; null keeps the judge's word.",
        corrected="an unquoted yes or no in YAML means the word",
    )
    short_circuit: bool = opt(False, "Stop at the first rule that fails (fewer diagnostics).")


@dataclass(frozen=True, slots=True)
class Signals:
    """Reward of each kind of event."""

    win: float = opt(2.0, "Reward of a win.")
    invalid_action: float = opt(-5.0, "Reward of an invalid turn.")
    repeated_action: float = opt(-1.0, "Reward of a repeated question.")
    traj_len: float = opt(-0.05, "Reward per turn of the game, paid at the end if it had several.")
    all_valid: float = opt(0.0, "Reward of a turn that is neither invalid nor repeated.")
    wrong_guess: float = opt(0.0, "Reward of a guess that is not the secret.", new=True)


@dataclass(frozen=True, slots=True)
class Reward:
    """Weights of the reward channels."""

    weight_elicit: float = opt(1.0, "Weight of the belief reward.")
    weight_tasks: float = opt(
        0.0,
        "Weight of the rewards that an environment of a plug-in gives to the turns that end one of "
        "several tasks of a game, as webcoder does; 0 does not pay them.",
        new=True,
    )
    signals: Signals = field(default_factory=Signals)


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """The game and its rewards."""

    env: str = opt(
        "twenty_questions",
        "Environment: twenty_questions, guess_my_city, murder_mystery, customer_service, "
        "user_personalization, or one that a module in plugins brings.",
    )
    env_kwargs: Mapping[str, object] = field(
        default_factory=dict[str, object],
        metadata={
            "help": "Settings of an environment that a plug-in brings, for it to check and to "
            "read.",
            "new": True,
        },
    )
    max_turns: MaxTurns = field(default_factory=MaxTurns)
    train: Games = field(default_factory=Games)
    val: Games = field(default_factory=Games)
    logprob_reward: LogprobReward = field(default_factory=LogprobReward)
    logprob_sampling: LogprobSampling = field(default_factory=LogprobSampling)
    verify_judge: VerifyJudge = field(default_factory=VerifyJudge)
    win_rule: Literal["compatible", "strict"] = opt(
        "compatible",
        "Which win ends and pays a game: compatible (the secret stands as a word in a valid "
        "question) or strict (one candidate, guessed directly). Both are always reported.",
        new=True,
    )
    win_rating: float = opt(
        8.0,
        "Rating of the answer, from 1 to 10, from which a game of user_personalization is won.",
        new=True,
    )
    candidate_lists: Literal["report", "penalise", "refuse"] = opt(
        "report",
        "Questions that name several candidates: only counted, paid signals.invalid_action as "
        "well, "
        "or answered as invalid.",
        new=True,
    )
    duplicates: Literal["judge", "code"] = opt(
        "judge", "Who finds repeated questions: the judge, or an exact comparison first.", new=True
    )
    reward: Reward = field(default_factory=Reward)
