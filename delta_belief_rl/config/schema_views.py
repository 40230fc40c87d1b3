"""Settings of the methods that read the played tokens behind another context (``algorithm.*``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.config.fields import opt

TEACHER_HELP = (
    "Who reads the other context: the policy as it is (policy), without its adapter (base), or the "
    "slow adapter (ema)."
)
WORDS_HELP = "Words of the hint, which is cut from the right."


@dataclass(frozen=True, slots=True)
class Igpo:
    """Settings of igpo alone."""

    norm: Literal["joint", "separate"] = opt(
        "separate", "Standardise gain turns and last turns together or apart.", new=True
    )
    unbiased_std: bool = opt(
        False, "Divide a group's squared deviations by one less than their number.", new=True
    )
    curriculum_steps: int = opt(
        0,
        "Updates over which the outcome's weight rises from 0.5 to 1 and the gain's falls from 1 "
        "to 0.5; 0 keeps both at 1.",
        new=True,
    )


@dataclass(frozen=True, slots=True)
class Hcapo:
    """Settings of hcapo alone."""

    hindsight_w: float = opt(1.0, "Weight of the hindsight term.", new=True)
    temperature: float = opt(5.0, "Divides the mean log-prob of a turn in hindsight.", new=True)
    clip_low: float = opt(0.8, "Smallest share of the return that a turn is given.", new=True)
    clip_high: float = opt(1.2, "Largest share of the return that a turn is given.", new=True)
    smoothing: float = opt(
        0.5, "Weight of a turn's own credit next to that of the turn after it; 1 is none.", new=True
    )
    teacher: Literal["policy", "base", "ema"] = opt("policy", TEACHER_HELP, new=True)
    hint_words: int = opt(80, WORDS_HELP, new=True)


@dataclass(frozen=True, slots=True)
class Relace:
    """Settings of relace alone."""

    outcome_w: float = opt(1.0, "Weight of the comparison of turns from the same state.", new=True)
    temperature: float = opt(
        1.0, "Divides the change of a turn's mean log-prob by the outcome.", new=True
    )
    clip_low: float = opt(0.8, "Smallest factor of a turn's return-to-go.", new=True)
    clip_high: float = opt(1.2, "Largest factor of a turn's return-to-go.", new=True)
    smoothing: float = opt(
        0.5, "Weight of a turn's own credit next to that of the turn after it; 1 is none.", new=True
    )
    teacher: Literal["policy", "base", "ema"] = opt("policy", TEACHER_HELP, new=True)


@dataclass(frozen=True, slots=True)
class Rlsd:
    """Settings of rlsd alone."""

    mix: float = opt(0.5, "Share of an advantage that the teacher weighs.", new=True)
    clip: float = opt(0.2, "How far the teacher's factor may be from 1.", new=True)
    teacher: Literal["policy", "base", "ema"] = opt("policy", TEACHER_HELP, new=True)


@dataclass(frozen=True, slots=True)
class Sdar:
    """Settings of sdar alone."""

    coefficient: float = opt(0.01, "Factor of the gated term in the loss.", new=True)
    slope: float = opt(5.0, "Steepness of the gate in the gap of log-probs.", new=True)
    teacher: Literal["policy", "base", "ema"] = opt("policy", TEACHER_HELP, new=True)


@dataclass(frozen=True, slots=True)
class Opid:
    """Settings of opid alone."""

    skill_w: float = opt(0.001, "What a nat of the skill's log-prob gap adds.", new=True)
    teacher: Literal["policy", "base", "ema"] = opt("policy", TEACHER_HELP, new=True)
    threshold: float = opt(0.5, "Least grade of a game that is shown.", new=True)
    hint_words: int = opt(80, WORDS_HELP, new=True)


@dataclass(frozen=True, slots=True)
class Orsd:
    """Settings of orsd alone."""

    mode: Literal["additive", "sign_weight"] = opt(
        "additive", "Add the gap of log-probs to an advantage, or weigh it as rlsd does.", new=True
    )
    correction_w: float = opt(0.1, "What a nat of the gap adds.", new=True)
    clip: float = opt(1.0, "Largest gap, in nats.", new=True)
    center: bool = opt(False, "Take the game's mean off an additive correction.", new=True)
    sign_mix: float = opt(0.5, "Share of an advantage that sign_weight weighs.", new=True)
    sign_clip: float = opt(0.2, "How far the factor of sign_weight may be from 1.", new=True)
    bundles: int = opt(4, "Bundles of rules to choose from.", new=True)
    max_criteria: int = opt(6, "Rules of one bundle.", new=True)
    num_best: int = opt(2, "Best games of a group that rules are read from.", new=True)
    num_worst: int = opt(2, "Worst games that they are held against.", new=True)
    min_correlation: float = opt(
        0.1, "Least correlation with the outcome of a bundle that is used.", new=True
    )
    correlation: Literal["pearson", "spearman"] = opt(
        "pearson", "Correlation of values or of ranks.", new=True
    )
    writer: Literal["rules", "model"] = opt(
        "rules", "Who writes the rules: code, or the policy on its own engines.", new=True
    )
    verifier: Literal["rules", "model"] = opt(
        "rules",
        "Who checks them: code, or verifier_model; what a model writes, a model has to check.",
        new=True,
    )
    verifier_model: str = opt(
        "base",
        "The model that checks: base, the policy's own without its adapter, or the name of a model "
        "of the service in OPENAI_BASE_URL.",
        new=True,
    )
    prompt_tokens: int = opt(
        1536, "Tokens of a prompt to either model; games are cut to fit.", new=True
    )
    writer_tokens: int = opt(384, "Tokens that the policy may write for a group.", new=True)
    writer_temperature: float = opt(1.0, "Of the policy as a writer; 0 is greedy.", new=True)
    deadline_s: float = opt(
        120.0,
        "Seconds in which all rules of a step must be written, and in which a service must have "
        "checked them.",
        new=True,
    )
    teacher: Literal["policy", "base", "ema"] = opt("policy", TEACHER_HELP, new=True)
    hint_words: int = opt(80, WORDS_HELP, new=True)


@dataclass(frozen=True, slots=True)
class Opsd:
    """Settings of opsd alone."""

    teacher: Literal["policy", "base", "ema"] = opt("base", TEACHER_HELP, new=True)
    coefficient: float = opt(1.0, "Factor of the distillation loss.", new=True)
    beta: float = opt(
        0.5, "With top_k: 0 is KL(teacher || policy), 1 is KL(policy || teacher).", new=True
    )
    top_k: int = opt(
        0, "Likeliest tokens of the teacher that are matched; 0 uses the played ones.", new=True
    )
    tail: Literal["bucket", "renormalise"] = opt(
        "bucket", "Keep the rest of the vocabulary as one token, or drop it.", new=True
    )
    ratio_cap: float = opt(
        0.0, "Largest ratio to the policy before the update as a factor; 0 is no factor.", new=True
    )


@dataclass(frozen=True, slots=True)
class Sdpo:
    """Settings of sdpo alone."""

    teacher: Literal["policy", "base", "ema"] = opt("policy", TEACHER_HELP, new=True)
    coefficient: float = opt(1.0, "Factor of the distillation loss.", new=True)
    beta: float = opt(
        0.5, "With top_k: 0 is KL(teacher || policy), 1 is KL(policy || teacher).", new=True
    )
    top_k: int = opt(
        0, "Likeliest tokens of the teacher that are matched; 0 uses the played ones.", new=True
    )
    tail: Literal["bucket", "renormalise"] = opt(
        "bucket", "Keep the rest of the vocabulary as one token, or drop it.", new=True
    )
    ratio_cap: float = opt(
        2.0, "Largest ratio to the policy before the update as a factor; 0 is no factor.", new=True
    )
    threshold: float = opt(0.5, "Least grade of a game that is shown.", new=True)
    hint_words: int = opt(80, WORDS_HELP, new=True)
