"""What stored games show beside who won: kinds of wins, questions, beliefs, verified relations.

Shares are fractions of 1, beliefs are in nats. The *published* classes of a winning question
(``win_kind``) are kept apart from the strict rule of ``envs.answers``, which decides the strict
rates: the former reproduce the published table of wins, the latter is what this project trains by.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np

from delta_belief_rl.envs.answers import candidate_list
from delta_belief_rl.eval.published import Form, StoredGame
from delta_belief_rl.eval.step_metrics import normalise_question

PUBLISHED_WIN = 2.0
PUBLISHED_LENGTH = -0.05
PUBLISHED_INVALID = -5.0
PUBLISHED_REPEATED = -1.0
PUBLISHED_BELIEF = 0.1
"""Prices of the published reward (arXiv 2602.12342)."""
SCORE_TOLERANCE = 1e-5
DIFF_TOLERANCE = 1e-6

_LIST = re.compile(r"\bor\b|,")
_YES_NO = ("yes", "no")
_key = lru_cache(maxsize=100_000)(normalise_question)

NAN = float("nan")


class WinKind(StrEnum):
    """How a winning question names the secret, by the published classes."""

    SINGLE = "single"
    LIST = "list"
    OTHER = "other"


def is_list_question(question: str) -> bool:
    """The published test for a list of candidates: the word "or", or a comma."""
    return bool(_LIST.search(question.lower()))


def win_kind(question: str, secret: str) -> WinKind:
    """The published class of a winning question.

    ``list`` when ``is_list_question``; else ``single`` when the question ends in a direct guess of
    the secret alone; else ``other``: the secret is only mentioned.

    Example:
        >>> [str(win_kind(q, "dog")) for q in ("Is it a dog?", "A dog or cat?", "Has it a dog in?")]
        ['single', 'list', 'other']
    """
    text, name = question.lower().strip(), re.escape(secret.lower().strip())
    if is_list_question(text):
        return WinKind.LIST
    opening = r"\b(?:is it|is the (?:secret )?word|is the secret)\s+"
    direct = rf"{opening}(?:an? |the |called |something called )?['\"]?{name}['\"]?\s*\?$"
    return WinKind.SINGLE if re.search(direct, text) else WinKind.OTHER


def win_kinds(games: Iterable[StoredGame]) -> dict[WinKind, int]:
    """Wins by the kind of the winning question; every kind is there."""
    counts = dict.fromkeys(WinKind, 0)
    for game in games:
        turn = game.win_turn()
        if turn is not None:
            counts[win_kind(game.exchanges[turn - 1].question, game.secret)] += 1
    return counts


# ---------------------------------------------------------------------------------------- questions


@dataclass(frozen=True, slots=True)
class QuestionStats:
    """Questions of a file. Shares are of all questions where nothing else is said.

    Attributes:
        list_share: Questions with "or" or a comma, the published test.
        candidate_list_share: Questions that our rule takes for a list.
        words: Mean words of a question, split at white space.
        duplicates: Questions asked word for word before in the same game.
        normalised_duplicates: The same without regard to case, spaces and final punctuation.
        unflagged: Word-for-word duplicates whose reply does not say that they are repeated.
        invalid, repeated: Totals of the stored counts.
        answer_pairs: Pairs of yes/no replies to one question about one secret, over all games.
        contradictions: Share of those pairs that disagree, NaN without a pair.
        cacheable_share: Questions that a cache by secret and normalised question would answer.
        judge_failures: Share of turns that the judge failed; None where a line cannot tell.
    """

    questions: int
    list_share: float
    candidate_list_share: float
    words: float
    duplicates: int
    normalised_duplicates: int
    unflagged: int
    invalid: int
    repeated: int
    answer_pairs: int
    contradictions: float
    cacheable_share: float
    judge_failures: float | None


def question_stats(games: Sequence[StoredGame]) -> QuestionStats:
    """Statistics over all questions of some games; shares are NaN where there is none."""
    turns = [turn for game in games for turn in game.exchanges]
    exact = [_repeats([turn.question for turn in game.exchanges]) for game in games]
    unflagged = sum(
        is_repeat and not turn.repeated
        for game, marks in zip(games, exact, strict=True)
        for turn, is_repeat in zip(game.exchanges, marks, strict=True)
    )
    normal = [_repeats([_key(turn.question) for turn in game.exchanges]) for game in games]
    answers = yes_no_answers(games)
    pairs, agreeing = _pair_counts(answers.values())
    known = all(turn.failed is not None for turn in turns)
    asked = {(game.secret, _key(turn.question)) for game in games for turn in game.exchanges}
    total = len(turns)
    return QuestionStats(
        questions=total,
        list_share=_ratio(sum(is_list_question(t.question) for t in turns), total),
        candidate_list_share=_ratio(sum(candidate_list(t.question) for t in turns), total),
        words=_ratio(sum(len(t.question.split()) for t in turns), total),
        duplicates=sum(map(sum, exact)),
        normalised_duplicates=sum(map(sum, normal)),
        unflagged=unflagged,
        invalid=sum(game.invalid for game in games),
        repeated=sum(game.repeated for game in games),
        answer_pairs=pairs,
        contradictions=_ratio(pairs - agreeing, pairs),
        cacheable_share=_ratio(total - len(asked), total),
        judge_failures=_ratio(sum(bool(t.failed) for t in turns), total) if known else None,
    )


def yes_no_answers(games: Iterable[StoredGame]) -> dict[tuple[str, str], Counter[str]]:
    """Yes and no replies by (secret, normalised question)."""
    out: dict[tuple[str, str], Counter[str]] = {}
    for game in games:
        for turn in game.exchanges:
            said = turn.reply.strip().lower().rstrip(".")
            if said in _YES_NO:
                out.setdefault((game.secret, _key(turn.question)), Counter())[said] += 1
    return out


def answer_agreement(
    first: Iterable[StoredGame], second: Iterable[StoredGame]
) -> tuple[float, int]:
    """Share of equal yes/no replies over all pairs of one question in both files, and the pairs."""
    ours, theirs = yes_no_answers(first), yes_no_answers(second)
    pairs = same = 0
    for key in ours.keys() & theirs.keys():
        pairs += ours[key].total() * theirs[key].total()
        same += sum(count * theirs[key][word] for word, count in ours[key].items())
    return _ratio(same, pairs), pairs


def _pair_counts(answers: Iterable[Counter[str]]) -> tuple[int, int]:
    """All pairs inside the counters, and those of equal words."""
    pairs = same = 0
    for counter in answers:
        pairs += counter.total() * (counter.total() - 1) // 2
        same += sum(count * (count - 1) // 2 for count in counter.values())
    return pairs, same


def _repeats(texts: Sequence[str]) -> list[bool]:
    """Whether each text stands earlier in the list."""
    seen: set[str] = set()
    out: list[bool] = []
    for text in texts:
        out.append(text in seen)
        seen.add(text)
    return out


# ------------------------------------------------------------------------------------------ beliefs


@dataclass(frozen=True, slots=True)
class BeliefStats:
    """Means over games, in nats.

    Attributes:
        positive_sum: Sum of the positive changes of a game, the winning turn's included.
        positive_over_net: ``positive_sum / net_gain``; NaN where nothing is gained. Far above 1 it
            says that most of what is paid is oscillation.
        by_turn: Belief after ``t`` turns over the games that have as many, ``t = 0 .. T``.
        games_by_turn: How many games that are.
        change_by_turn: Mean change of the belief in turn ``t``, ``t = 1 .. T``.
    """

    games: int
    prior: float
    final: float
    net_gain: float
    positive_sum: float
    positive_over_net: float
    by_turn: tuple[float, ...]
    games_by_turn: tuple[int, ...]
    change_by_turn: tuple[float, ...]


class Believed(Protocol):
    """A game with the beliefs in its course, stored or just read."""

    @property
    def beliefs(self) -> tuple[float, ...] | None:
        """``k + 1`` log-probabilities of the secret in nats, where they were measured."""
        ...

    @property
    def num_turns(self) -> int:
        """``k``."""
        ...


def belief_stats(games: Iterable[Believed]) -> BeliefStats | None:
    """Statistics over the games whose beliefs are known turn by turn; None without such a game."""
    rows = [
        np.array(game.beliefs, dtype=np.float64)
        for game in games
        if game.beliefs is not None and game.num_turns > 0
    ]
    if not rows:
        return None
    prior = float(np.mean([row[0] for row in rows]))
    final = float(np.mean([row[-1] for row in rows]))
    positive = float(np.mean([np.maximum(np.diff(row), 0.0).sum() for row in rows]))
    longest = max(map(len, rows))
    by_turn = [[row[t] for row in rows if len(row) > t] for t in range(longest)]
    changes = [[row[t] - row[t - 1] for row in rows if len(row) > t] for t in range(1, longest)]
    gain = final - prior
    return BeliefStats(
        games=len(rows),
        prior=prior,
        final=final,
        net_gain=gain,
        positive_sum=positive,
        positive_over_net=positive / gain if gain > 0 else NAN,
        by_turn=tuple(float(np.mean(values)) for values in by_turn),
        games_by_turn=tuple(map(len, by_turn)),
        change_by_turn=tuple(float(np.mean(values)) for values in changes),
    )


def prior_noise(games: Iterable[StoredGame]) -> tuple[float, float]:
    """How far the same prior is from itself, in nats: mean deviation and largest range in a secret.

    All games of a secret begin with the same text, so their first beliefs differ by arithmetic
    alone. Deviations are unbiased (``ddof=1``); NaN without a secret of two games.
    """
    priors: dict[str, list[float]] = {}
    for game in games:
        if game.beliefs is not None:
            priors.setdefault(game.secret, []).append(game.beliefs[0])
    several = [np.array(values) for values in priors.values() if len(values) > 1]
    if not several:
        return NAN, NAN
    deviation = float(np.mean([values.std(ddof=1) for values in several]))
    return deviation, float(max(np.ptp(values) for values in several))


# ---------------------------------------------------------------------------------------- relations


@dataclass(frozen=True, slots=True)
class Relation:
    """A formula of the published files and the rows that satisfy it.

    Attributes:
        checked: Rows that have what the formula needs.
    """

    name: str
    checked: int
    satisfied: int


def published_score(game: StoredGame) -> float:
    """The published score of a game under ``grpo_turn``, from its stored counts.

    ``k * (2 w - 0.05 k) - 5 invalid - repeated + 0.1 * sum(log_prob_diff)``; a game of one turn
    pays nothing for its length.
    """
    k = game.num_turns
    end = PUBLISHED_WIN * game.won + (PUBLISHED_LENGTH * k if k > 1 else 0.0)
    penalties = PUBLISHED_INVALID * game.invalid + PUBLISHED_REPEATED * game.repeated
    return k * end + penalties + PUBLISHED_BELIEF * sum(game.stored_diffs or ())


def relations(games: Sequence[StoredGame]) -> tuple[Relation, ...]:
    """Every relation that holds in the published files, counted over the rows of a file."""
    named = (
        ("score", _score_holds),
        ("score = reward", _reward_holds),
        ("log_prob_diff", _diffs_hold),
        ("log_prob_reward", _beliefs_hold),
        ("lost games use all turns", _lost_is_full),
        ("won by the exact rule", _win_holds),
        ("invalid and repeated counts", _counts_hold),
    )
    out: list[Relation] = []
    for name, holds in named:
        found = [result for result in map(holds, games) if result is not None]
        out.append(Relation(name, len(found), sum(found)))
    return tuple(out)


def _score_holds(game: StoredGame) -> bool | None:
    if game.score is None:
        return None
    return abs(game.score - published_score(game)) < SCORE_TOLERANCE


def _reward_holds(game: StoredGame) -> bool | None:
    if game.score is None or game.reward is None:
        return None
    return game.score == game.reward


def _diffs_hold(game: StoredGame) -> bool | None:
    """Positive changes, 0 on the winning turn; without zeros where the form has none."""
    if game.stored_diffs is None or game.beliefs is None:
        return None
    expected = [max(b - a, 0.0) for a, b in pairwise(game.beliefs)]
    if game.won:
        expected[-1] = 0.0
    if game.form is Form.VAL_ONLY:
        expected = [value for value in expected if value]
    padding = len(game.stored_diffs) - len(expected)
    if padding < 0:
        return False
    pairs = zip(game.stored_diffs, [*expected, *[0.0] * padding], strict=True)
    return all(abs(a - b) < DIFF_TOLERANCE for a, b in pairs)


def _beliefs_hold(game: StoredGame) -> bool | None:
    """No belief is 0 up to the last turn, all are 0 after it."""
    if game.stored_beliefs is None or game.form is Form.VAL_ONLY:
        return None
    played, rest = game.stored_beliefs[: game.num_turns + 1], game.stored_beliefs
    return all(played) and not any(rest[game.num_turns + 1 :])


def _lost_is_full(game: StoredGame) -> bool | None:
    if game.stored_diffs is None or game.form is Form.VAL_ONLY:
        return None
    return game.won or game.num_turns == len(game.stored_diffs)


def _win_holds(game: StoredGame) -> bool | None:
    """Won exactly when the last question names the secret and was answered ``finished``."""
    if not game.exchanges:
        return None
    *earlier, last = game.exchanges
    named = last.compatible_win and last.reply.strip().lower().rstrip(".") == "finished"
    return game.won == named and not any(turn.compatible_win for turn in earlier)


def _counts_hold(game: StoredGame) -> bool:
    invalid = sum(turn.invalid for turn in game.exchanges)
    return (game.invalid, game.repeated) == (invalid, sum(t.repeated for t in game.exchanges))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else NAN
