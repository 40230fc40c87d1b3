"""Exact posterior bookkeeping: what the answers so far say about which thing is the secret."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.types import BoolArray, FloatArray, UserError


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """The facts learnt in one game. Immutable: learning returns a new object.

    The prior is uniform over ``candidates``; the posterior is uniform over what is consistent with
    the facts.

    Attributes:
        candidates: Things that were possible before the first answer, bool ``[things]``.
        consistent: Things that still are, bool ``[things]``.
        facts: (property key, answer) pairs.
        excluded: Names of things that were guessed and were wrong.
    """

    world: World
    candidates: BoolArray
    consistent: BoolArray
    facts: frozenset[tuple[str, bool]] = frozenset()
    excluded: frozenset[str] = frozenset()

    @classmethod
    def start(cls, world: World, candidates: Iterable[str] | None = None) -> Knowledge:
        """Nothing learnt yet.

        Args:
            world: The table.
            candidates: Names of the possible secrets; all things when None.

        Raises:
            UserError: For an empty set of candidates.
        """
        mask = np.ones(len(world.things), dtype=np.bool_)
        if candidates is not None:
            mask[:] = False
            mask[[world.index(name) for name in candidates]] = True
        if not mask.any():
            raise UserError("The set of candidates is empty: name at least one thing of the world.")
        return cls(world, mask, mask)

    def learn(self, property_key: str, answer: bool) -> Knowledge:
        """Add one answered property."""
        column = self.world.values[:, self.world.property_index(property_key)]
        return replace(
            self,
            consistent=self.consistent & (column == answer),
            facts=self.facts | {(property_key, bool(answer))},
        )

    def rule_out(self, thing: str) -> Knowledge:
        """Add one wrong guess."""
        consistent = self.consistent.copy()
        consistent[self.world.index(thing)] = False
        return replace(self, consistent=consistent, excluded=self.excluded | {thing})

    @property
    def num_consistent(self) -> int:
        """Number of things that are still possible."""
        return int(self.consistent.sum())

    @property
    def known(self) -> frozenset[str]:
        """Keys of the properties that were answered."""
        return frozenset(key for key, _ in self.facts)

    def names(self) -> tuple[str, ...]:
        """Names of the consistent things, in the world's order."""
        return tuple(self.world.things[i].name for i in np.flatnonzero(self.consistent))

    def posterior(self) -> FloatArray:
        """Probability of each thing, ``[things]``.

        Facts that contradict each other, as a noisy judge may give, say nothing: the prior is
        returned.
        """
        support = self._support()
        return support / support.sum()

    def belief(self) -> Mapping[str, float]:
        """The posterior by name, without the things of probability zero."""
        posterior = self.posterior()
        return {self.world.things[i].name: float(posterior[i]) for i in np.flatnonzero(posterior)}

    def progress(self) -> float:
        """Bits gained: ``log2(candidates / consistent)``; 0 for contradicting facts."""
        return math.log2(int(self.candidates.sum()) / int(self._support().sum()))

    def _support(self) -> BoolArray:
        return self.consistent if self.consistent.any() else self.candidates

    def state_key(self) -> str:
        """Name of the set of facts: equal for games that learnt the same in another order."""
        facts = [f"{key}={int(value)}" for key, value in sorted(self.facts)]
        text = "\n".join((*facts, "--", *sorted(self.excluded)))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def split(self) -> FloatArray:
        """Share of the consistent things that each property holds for, ``[props]``."""
        return self.world.values[self.consistent].sum(axis=0) / max(self.num_consistent, 1)

    def useful_facts(self) -> frozenset[str]:
        """Keys of the facts that rule something out which no other fact does."""
        columns = {
            key: self.world.values[:, self.world.property_index(key)] == value
            for key, value in self.facts
        }
        violations = sum(
            (~column for column in columns.values()), np.zeros(len(self.candidates), dtype=np.int64)
        )
        only = self.candidates & (violations == 1)
        return frozenset(key for key, column in columns.items() if (only & ~column).any())

    def supporting_facts(self, property_key: str) -> frozenset[str]:
        """Keys of the facts that each make a question more informative than at the start.

        "Is it a mammal" is a better question once "is it an animal" was answered yes; the
        second fact then supports the first question.
        """
        column = self.world.values[:, self.world.property_index(property_key)]
        before = _entropy(column[self.candidates])
        found: set[str] = set()
        for key, value in self.facts - {(property_key, True), (property_key, False)}:
            holds = self.world.values[:, self.world.property_index(key)] == value
            if _entropy(column[self.candidates & holds]) > before + 1e-12:
                found.add(key)
        return frozenset(found)


def _entropy(answers: BoolArray) -> float:
    """Bits that the answer carries when all things are equally likely."""
    share = float(answers.mean()) if len(answers) else 0.0
    if share in (0.0, 1.0):
        return 0.0
    return -share * math.log2(share) - (1.0 - share) * math.log2(1.0 - share)
