"""How far answers to one question agree: with each other, and with those of another source.

An answer is a word ("yes", "no", ...) to a question about a secret. Two rates are used, each of
them the chance that two answers to one question are the same word:

``Consistency``  of one source with itself: both answers are drawn from all pairs of answers of one
                 question, and every pair counts once. A question that is asked often counts much.
``Agreement``    of two sources: one answer of each, and every question that both answered counts
                 once, however often it was asked.

Cohen's kappa is the rate above what the two margins would give by chance, as a share of what is
possible above it: 0 is chance, 1 is full agreement. Intervals are bootstraps over secrets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.eval.statistics import Interval, cluster_bootstrap
from delta_belief_rl.types import FloatArray

DRAWS = 2000
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Said:
    """One answer.

    Attributes:
        source: Number of the game, file or round that it belongs to.
    """

    source: int
    word: str


AnswerTable = Mapping[tuple[str, str], Sequence[Said]]
"""Answers by (secret, question)."""


@dataclass(frozen=True, slots=True)
class Consistency:
    """Agreement of a source with itself, over pairs of answers to one question.

    Attributes:
        pairs: Pairs of answers; NaN rates where there is none.
        questions: Questions that were answered more than once.
        rate: Share of pairs that agree.
        within: The same over pairs that belong to one game (file, round).
        between: The same over pairs of different ones.
    """

    pairs: int
    questions: int
    rate: Interval
    within: Interval
    between: Interval
    kappa: Interval


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of two sources.

    Attributes:
        questions: Questions that both answered.
        rate: Mean over these questions of the chance that an answer of each is the same.
    """

    questions: int
    rate: Interval
    kappa: Interval


def consistency(answers: AnswerTable, *, draws: int = DRAWS, seed: int = 0) -> Consistency:
    """How far a source agrees with itself.

    Example:
        >>> table = {("dog", "is it big"): [Said(0, "yes"), Said(0, "yes"), Said(1, "no")]}
        >>> found = consistency(table)
        >>> found.pairs, round(found.rate.value, 2), found.within.value, found.between.value
        (3, 0.33, 1.0, 0.0)
    """
    words = _words(answers)
    everything, inside = _Tables(words), _Tables(words)
    questions = 0
    for (secret, _), said in answers.items():
        if len(said) < 2:
            continue
        questions += 1
        everything.add(secret, _ordered_pairs(words, [one.word for one in said]))
        games: dict[int, list[str]] = {}
        for one in said:
            games.setdefault(one.source, []).append(one.word)
        for game in games.values():
            inside.add(secret, _ordered_pairs(words, game))
    both, within = everything.stacked(), inside.stacked()
    return Consistency(
        pairs=int(both.sum()) // 2,
        questions=questions,
        rate=_rate(both, draws, seed),
        within=_rate(within, draws, seed),
        between=_rate(both - within, draws, seed),
        kappa=cluster_kappa(both, draws=draws, seed=seed),
    )


def agreement(
    first: AnswerTable, second: AnswerTable, *, draws: int = DRAWS, seed: int = 0
) -> Agreement:
    """How far two sources agree on the questions that both answered.

    Example:
        >>> ours = {("dog", "is it big"): [Said(0, "yes"), Said(1, "no")]}
        >>> theirs = {("dog", "is it big"): [Said(0, "yes")]}
        >>> agreement(ours, theirs).rate.value
        0.5
    """
    words = _words(first, second)
    tables = _Tables(words)
    shared = [key for key in first if key in second and first[key] and second[key]]
    for key in shared:
        ours, theirs = (
            _counts(words, [one.word for one in table[key]]) for table in (first, second)
        )
        tables.add(key[0], np.outer(ours / ours.sum(), theirs / theirs.sum()))
    stacked = tables.stacked()
    return Agreement(
        questions=len(shared),
        rate=_rate(stacked, draws, seed),
        kappa=cluster_kappa(stacked, draws=draws, seed=seed),
    )


def kappa(table: FloatArray) -> float:
    """Cohen's kappa of a joint table ``[C, C]`` of words; NaN where only one word occurs.

    Example:
        >>> kappa(np.array([[20.0, 5.0], [10.0, 15.0]]))
        0.4
    """
    return float(_kappas(table[np.newaxis])[0])


def cluster_kappa(tables: FloatArray, *, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Kappa of the summed joint tables of all secrets, with an interval over secrets.

    Args:
        tables: One joint table for each secret, ``[S, C, C]``; secrets without a pair are left out.
        draws: Bootstrap samples; those without a kappa are left out.
        seed: Names the draws.
    """
    used = tables[tables.sum(axis=(1, 2)) > 0]
    if not len(used):
        return Interval(_NAN, _NAN, _NAN, _NAN, 0)
    size = len(used)
    weights = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=draws)
    drawn = (weights @ used.reshape(size, -1)).reshape(draws, *used.shape[1:])
    samples = _kappas(drawn)
    samples = samples[~np.isnan(samples)]
    value = kappa(used.sum(axis=0))
    if not len(samples):
        return Interval(value, _NAN, _NAN, _NAN, size)
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(value, float(low), float(high), float(samples.std()), size)


def _kappas(tables: FloatArray) -> FloatArray:
    """Kappa of each joint table, ``[N, C, C] -> [N]``."""
    total = tables.sum(axis=(1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        seen = np.trace(tables, axis1=1, axis2=2) / total
        chance = (tables.sum(axis=1) * tables.sum(axis=2)).sum(axis=1) / total**2
        return np.where(chance < 1, (seen - chance) / (1 - chance), _NAN)


class _Tables:
    """Joint tables of words, summed by secret."""

    def __init__(self, words: Sequence[str]) -> None:
        self._shape = (len(words), len(words))
        self._by_secret: dict[str, FloatArray] = {}

    def add(self, secret: str, table: FloatArray) -> None:
        self._by_secret[secret] = self._by_secret.get(secret, np.zeros(self._shape)) + table

    def stacked(self) -> FloatArray:
        """``[S, C, C]``, secrets in order of their names."""
        tables = [self._by_secret[secret] for secret in sorted(self._by_secret)]
        return np.array(tables) if tables else np.zeros((0, *self._shape))


def _words(*tables: AnswerTable) -> list[str]:
    return sorted({one.word for table in tables for said in table.values() for one in said})


def _counts(words: Sequence[str], said: Iterable[str]) -> FloatArray:
    found = Counter(said)
    return np.array([found[word] for word in words], dtype=np.float64)


def _ordered_pairs(words: Sequence[str], said: Sequence[str]) -> FloatArray:
    """Ordered pairs of different answers by their words, ``[C, C]``."""
    counts = _counts(words, said)
    return np.outer(counts, counts) - np.diag(counts)


def _rate(tables: FloatArray, draws: int, seed: int) -> Interval:
    """Share on the diagonal over all tables ``[S, C, C]``."""
    same, pairs = np.trace(tables, axis1=1, axis2=2), tables.sum(axis=(1, 2))
    return cluster_bootstrap(same, pairs, draws=draws, seed=seed)
