"""Rules of play that code can write and check: predicates on what happened in a game.

=============  ====================================================  ==============================
kind           in words                                              how far a game keeps it
=============  ====================================================  ==============================
``no_repeat``  Never ask the same thing twice.                       share of turns not repeated
``clear``      Ask one clear question at a time.                     share of turns not invalid
``narrows``    Let every question rule something out.                share of turns after which
                                                                     ``progress`` is higher
``guess_late`` Guess only after ``n`` answers.                       1 if the first guess came so
                                                                     late, or never
``begin``      Begin with: ``question``                              1 if the first action is that
``ask``        Ask: ``question``                                     1 if some action is that
=============  ====================================================  ==============================

Actions are equal where their ``action_key`` is. A turn that the judge failed on counts nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.types import Trajectory, Turn, Verdict

STANDING = {
    "no_repeat": "Never ask the same thing twice.",
    "clear": "Ask one clear question at a time.",
    "narrows": "Let every question rule something out.",
}
REFUSED = (Verdict.INVALID, Verdict.REPEATED)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One rule.

    Attributes:
        text: In words.
        kind: A kind of the head's table, or any name that another verifier knows.
        argument: What the kind needs: a number of answers or an action key.
    """

    text: str
    kind: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class RuleVerifier:
    """Checks the kinds of the head's table; None for another."""

    def satisfaction(self, game: Trajectory, criterion: Criterion) -> float | None:
        """See ``rubric.Verifier``."""
        turns = _judged(game)
        if not turns:
            return None
        match criterion.kind:
            case "no_repeat":
                return float(np.mean([turn.verdict is not Verdict.REPEATED for turn in turns]))
            case "clear":
                return float(np.mean([turn.verdict is not Verdict.INVALID for turn in turns]))
            case "narrows":
                return _narrowing(turns)
            case "guess_late":
                before = _answers_before_guess(turns)
                return float(before is None or before >= int(criterion.argument))
            case "begin":
                return float(turns[0].action_key == criterion.argument)
            case "ask":
                return float(criterion.argument in {turn.action_key for turn in turns})
            case _:
                return None


@dataclass(frozen=True, slots=True)
class RuleWriter:
    """Takes the rules that the best games kept more than the worst, and cuts bundles of them."""

    verifier: RuleVerifier = RuleVerifier()

    def bundles(
        self, best: Sequence[Trajectory], worst: Sequence[Trajectory], count: int, size: int
    ) -> list[list[Criterion]]:
        """See ``rubric.RubricWriter``; each bundle begins with the rule of the largest contrast."""
        ranked: list[tuple[float, Criterion]] = []
        # The same rule in other words is one rule.
        named = {(one.kind, one.argument): one for one in reversed([*_candidates(best)])}
        for criterion in reversed(named.values()):
            contrast = self._mean(best, criterion) - self._mean(worst, criterion)
            if contrast > 1e-12:
                ranked.append((contrast, criterion))
        ranked.sort(key=lambda pair: -pair[0])
        kept = _consistent([criterion for _, criterion in ranked])[:size]
        if not kept:
            return []
        sizes = np.ceil(len(kept) * np.arange(1, count + 1) / count).astype(int)
        return [kept[:length] for length in dict.fromkeys(sizes.tolist())]

    def _mean(self, games: Sequence[Trajectory], criterion: Criterion) -> float:
        found = [self.verifier.satisfaction(game, criterion) for game in games]
        return float(np.mean([0.0 if value is None else value for value in found]))


def _consistent(ranked: Sequence[Criterion]) -> list[Criterion]:
    """The rules without a second beginning, and without asking again what a game begins with."""
    first = next((one.argument for one in ranked if one.kind == "begin"), None)
    return [
        one
        for one in ranked
        if (one.kind != "begin" or one.argument == first)
        and (one.kind != "ask" or one.argument != first)
    ]


def _candidates(best: Sequence[Trajectory]) -> Iterator[Criterion]:
    """Rules that the best games may have kept, the general ones first."""
    for kind, text in STANDING.items():
        yield Criterion(text, kind)
    played = [turns for turns in map(_judged, best) if turns]
    counts = [_answers_before_guess(turns) for turns in played]
    least = min((count for count in counts if count is not None), default=0)
    if least:
        yield Criterion(f"Guess only after {least} answers.", "guess_late", str(least))
    for turns in played:
        if _can_be_named(turns[0]):
            yield Criterion(f"Begin with: {turns[0].asked}", "begin", turns[0].action_key)
    for turns in played:
        for turn in filter(_can_be_named, turns):
            yield Criterion(f"Ask: {turn.asked}", "ask", turn.action_key)


def _can_be_named(turn: Turn) -> bool:
    """Whether an action may be recommended: it has a key, was answered, and is no guess."""
    return bool(turn.action_key) and not turn.is_guess and turn.verdict not in REFUSED


def _judged(game: Trajectory) -> list[Turn]:
    return [turn for turn in game.turns if turn.verdict is not Verdict.ERROR]


def _answers_before_guess(turns: Sequence[Turn]) -> int | None:
    """Answered questions before the first guess; None where nothing was guessed."""
    answered = 0
    for turn in turns:
        if turn.is_guess:
            return answered
        answered += turn.verdict not in REFUSED
    return None


def _narrowing(turns: Sequence[Turn]) -> float | None:
    """Share of turns, the last left out, after which more is solved; None with one turn only."""
    before = np.array([turn.progress for turn in turns], dtype=np.float64)
    return float((np.diff(before) > 1e-12).mean()) if len(before) > 1 else None
