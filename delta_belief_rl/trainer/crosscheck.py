"""Do engine and trainer give the same tokens the same log-probs?

Two comparisons, in nats. The log-probs that the engine reported when it sampled are held against
those of the score pass, at the temperature of the sampler. And the belief in the secret is asked
twice: of the engine, which reads game and guess as a text, and of the trainer, whose guesses are
branches of one pass.

A training run makes them every ``trainer.check_freq`` steps, between the score pass and the update,
so that a policy is never updated with numbers that do not hold. ``delta-belief doctor`` makes them
before a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.config.rules_denoiser import DENOISER
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import BranchEngine, TailRequest
from delta_belief_rl.trainer.actor import POLICY, GameScore
from delta_belief_rl.trainer.collect import Collected
from delta_belief_rl.trainer.packing import flat_trajectories
from delta_belief_rl.trainer.services import Services
from delta_belief_rl.trainer.settings import number_format
from delta_belief_rl.types import FloatArray, Trajectory

NUM_GAMES = 4
"""Games of a step whose beliefs are asked of the engine; each costs it a prefill a turn."""
DOCTOR = " (delta-belief doctor says where they part)"


class CheckFailed(RuntimeError):
    """Engine and trainer disagree; the message is one sentence that names the number."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What two ways to the same log-probs may differ by, in nats: on average, and at most."""

    mean: float
    largest: float


BOUNDS = {
    "float32": Bound(1e-4, 1e-3),
    "float16": Bound(0.02, 0.5),
    "bfloat16": Bound(0.12, 2.0),
}
"""By number format. In float32 only the order of sums differs. A half format rounds every layer: in
bfloat16 up to 0.09 nats on average were measured, and 0.19 and more for an adapter that is one sync
old (``docs/doctor.md``). float16, whose steps are an eighth, is not measured."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two arrays of log-probs are apart, in nats; NaN where one of them has no number."""

    count: int
    mean: float
    largest: float

    @classmethod
    def of(cls, one: FloatArray, other: FloatArray) -> Gap:
        """Compare two arrays of one shape; nothing differs where there is nothing.

        Raises:
            ValueError: The shapes differ: a log-prob is missing.
        """
        if one.shape != other.shape:
            raise ValueError(f"{one.shape} log-probs are compared with {other.shape}")
        if not one.size:
            return cls(0, 0.0, 0.0)
        # Equal infinities have no difference either: such a log-prob is no number to go on with.
        with np.errstate(invalid="ignore"):
            gaps = np.abs(one - other)
        return cls(gaps.size, float(gaps.mean()), float(gaps.max()))

    def within(self, bound: Bound) -> bool:
        """Whether both numbers hold; NaN never does."""
        return self.mean <= bound.mean and self.largest <= bound.largest

    def __str__(self) -> str:
        return f"{self.mean:.3g} nats on average and {self.largest:.3g} at most"


def sampled_gap(games: Sequence[Trajectory], scores: Sequence[GameScore]) -> Gap:
    """The engine's log-probs of its own samples against the score pass."""
    reported = [turn.logprobs for game in games for turn in game.turns]
    scored = [score.logp for score in scores]
    return Gap.of(
        np.array([logp for row in reported for logp in row], dtype=np.float64),
        np.concatenate(scored) if scored else np.zeros(0),
    )


def belief_tails(game: Trajectory, guess: Elicitation, name: str) -> list[TailRequest]:
    """The guess at every belief point of a game as texts of their own, ``k + 1`` of them.

    Args:
        game: A finished game.
        guess: The secret's elicitation.
        name: Begins the names of the sessions, which no game may have.
    """
    tails: list[TailRequest] = []
    for number, point in enumerate(game.belief_points):
        # Only the first guess sees the exchange that may stand in front of it.
        lead = guess.lead_ids if number == 0 else ()
        head = (*game.token_ids[:point], *lead)
        start = len(head) + guess.scored[0]
        tails.append(TailRequest(f"{name}/{number:03d}", (*head, *guess.token_ids), start))
    return tails


def tail_beliefs(guess: Elicitation, tails: Sequence[FloatArray]) -> FloatArray:
    """Beliefs from an engine's answers to ``belief_tails``, ``[k + 1]`` in nats."""
    rows = guess.offsets - guess.scored[0]
    return np.array([float(guess.aggregate(tail[rows])) for tail in tails])


def check_sampled(gap: Gap, bound: Bound, when: str, hint: str = DOCTOR) -> None:
    """Hold the log-probs of sampled tokens against their bound.

    Args:
        gap: Between engine and trainer.
        bound: What it must keep.
        when: Begins the message.
        hint: Ends it.

    Raises:
        CheckFailed: They differ by more.
    """
    if not gap.within(bound):
        raise CheckFailed(
            f"{when} the engine's log-probs of {gap.count} sampled tokens differ from the "
            f"trainer's by {gap}, more than {bound.mean:g} and {bound.largest:g}: the policy that "
            f"plays is not the policy that is trained{hint}."
        )


def check_beliefs(gap: Gap, bound: Bound, when: str) -> None:
    """Hold beliefs by both routes against their bound.

    Raises:
        CheckFailed: They differ by more.
    """
    if not gap.within(bound):
        raise CheckFailed(
            f"{when} {gap.count} beliefs of the engine differ from the branched pass by {gap}, "
            f"more than {bound.mean:g} and {bound.largest:g}: one of them reads other weights or "
            "another prefix (delta-belief doctor says which)."
        )


async def cross_check(run: Services, played: Collected, step: int) -> Collected:
    """The step's games with the metrics of its cross-check; unchanged when none is due.

    Raises:
        CheckFailed: A comparison is outside its bound.
    """
    every = run.cfg.trainer.check_freq
    if every < 1 or step % every:
        return played
    with run.timers.measure("check"):
        run.progress.set_phase("check")
        bound, when = run_bound(run.cfg, run.device), f"At step {step}"
        games = flat_trajectories(played.groups)
        sampled = sampled_gap(games, played.scores)
        # The doctor examines causal models.
        hint = "" if run.cfg.actor_rollout_ref.rollout.name == DENOISER else DOCTOR
        check_sampled(sampled, bound, when, hint)
        metrics = {
            "check/sampled_tokens": float(sampled.count),
            "check/sampled_gap_mean": sampled.mean,
            "check/sampled_gap_max": sampled.largest,
        }
        if run.engine is not None and played.scores and POLICY in played.scores[0].beliefs:
            # An engine that gave its memory to the score pass sleeps until it is told otherwise.
            await run.engines.sync(run.policy)
            beliefs = await _belief_gap(run, run.engine, games, played.scores)
            check_beliefs(beliefs, bound, when)
            metrics |= {
                "check/beliefs": float(beliefs.count),
                "check/belief_gap_mean": beliefs.mean,
                "check/belief_gap_max": beliefs.largest,
            }
    return replace(played, metrics=played.metrics | metrics)


def run_bound(cfg: RunConfig, device: str) -> Bound:
    """The bound of a run's number formats: the wider one where engine and trainer differ in them.

    Args:
        cfg: The configuration.
        device: Where the policy is trained.
    """
    ref = cfg.actor_rollout_ref
    if ref.rollout.name == DENOISER:
        # It computes in float32 on every device.
        return BOUNDS["float32"]
    formats = [number_format(ref.actor.dtype, device)]
    if ref.rollout.name != "hf" and device != "cpu":
        # On CPUs, and where the engine shares the trainer's code, it shares the format, too.
        formats.append(number_format(ref.rollout.dtype, device))
    return max((BOUNDS[name] for name in formats), key=lambda bound: bound.mean)


async def _belief_gap(
    run: Services,
    engine: BranchEngine,
    games: Sequence[Trajectory],
    scores: Sequence[GameScore],
) -> Gap:
    """Beliefs of some games, spread over the step, by the engine and by the score pass."""
    asked: list[FloatArray] = []
    known: list[FloatArray] = []
    for index in np.unique(np.linspace(0, len(games) - 1, NUM_GAMES).astype(int)):
        game, guess = games[index], run.elicit(games[index].task.secret)
        tails = belief_tails(game, guess, f"check/{index:06d}")
        try:
            found = await engine.score_all(tails)
        finally:
            for tail in tails:
                await engine.release(tail.session)
        asked.append(tail_beliefs(guess, found))
        known.append(scores[index].beliefs[POLICY])
    return Gap.of(np.concatenate(asked), np.concatenate(known))
