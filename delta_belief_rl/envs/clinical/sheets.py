"""The simulators: ``data/clinical_*.yaml`` as frozen objects, and Bayes' rule over them.

A sheet is a table. It has hidden states ``h`` with a prior for each stratum, questions with the
probability ``p(reply | h)`` of every reply, and decisions with a value in [-1, 1] for each ``h``.
Given ``h``, replies to different questions are independent, so after the replies ``o_1 .. o_n`` to
``n`` different questions::

    b(h) = prior(h) * prod_i p_i(o_i | h) / sum_h' prior(h') * prod_i p_i(o_i | h')

which is exact. The reply itself is a function of the case and the question: asked twice, a question
has the same reply, and the second one tells nothing.

Shapes: ``H`` hidden states, ``O`` replies of a question.

Source: the setting of question credit for clinical dialogue. Confidence: reconstructed from a short
description; the tables, every number in them and their form are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from delta_belief_rl.envs.single_use import digest
from delta_belief_rl.types import FloatArray

FOLDER = Path(__file__).parents[1] / "data"
SIMULATORS = ("refill", "workup", "titration")
"""Each has a file, and its sheets begin with its name."""
STRATA = ("low", "high")
"""Low and high risk."""
TEST = "test"

Facts = tuple[tuple[str, int], ...]
"""Questions that were answered and the numbers of their replies, in the order of asking."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Something that can be asked, or ordered.

    Attributes:
        kind: ``ask`` or ``test``; both are answered alike.
        say: How it is said in full.
        words: Phrases that are read as it.
        replies: What is said back, ``O`` of them.
        chance: ``p(reply | h)``, ``[H, O]``.
        after: A question that must have been answered before; empty for none.
    """

    key: str
    kind: str
    say: str
    words: tuple[str, ...]
    replies: tuple[str, ...]
    chance: FloatArray
    after: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Something that ends a case.

    Attributes:
        say: How it is said in full.
        words: Phrases that are read as it where the text says that it decides.
        bare: Phrases that are read as it where it does not.
        value: By hidden state, ``[H]``, in [-1, 1].
    """

    key: str
    say: str
    words: tuple[str, ...]
    bare: tuple[str, ...]
    value: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Sheet:
    """One simulator's table.

    Attributes:
        states: Key of a hidden state to its name in words, ``H`` of them.
        prior: By stratum, ``[H]``.
        risk: By stratum, what an opening says of it.
        openings: Texts with ``{name}``, ``{age}`` and ``{days}``.
    """

    name: str
    states: Mapping[str, str]
    prior: Mapping[str, FloatArray]
    risk: Mapping[str, tuple[str, ...]]
    openings: tuple[str, ...]
    questions: Mapping[str, Question]
    decisions: Mapping[str, Decision]

    @property
    def simulator(self) -> str:
        """``refill``, ``workup`` or ``titration``."""
        return self.name.split("_")[0]

    def index(self, state: str) -> int:
        """Number of a hidden state.

        Raises:
            ValueError: There is no such state.
        """
        return tuple(self.states).index(state)

    def posterior(self, stratum: str, facts: Iterable[tuple[str, int]]) -> FloatArray:
        """``b`` of the module's head, ``[H]``; with no facts the prior.

        Args:
            stratum: One of ``STRATA``.
            facts: Different questions with the numbers of their replies.
        """
        belief = self.prior[stratum].copy()
        for key, reply in facts:
            belief = belief * self.questions[key].chance[:, reply]
        return belief / belief.sum()

    def reply(self, case: str, state: str, question: str) -> int:
        """Number of the reply: a draw from ``p(. | state)`` that case and question name.

        Args:
            case: Name of the case.
            state: The case's hidden state.
            question: A key of ``questions``.
        """
        draw = int(digest(f"{case}|{question}"), 16) / 2.0**64
        bounds = np.cumsum(self.questions[question].chance[self.index(state)])
        return min(int(np.searchsorted(bounds, draw, side="right")), len(bounds) - 1)

    def best_decision(self, belief: FloatArray) -> str:
        """The decision of the largest expected value; the first one of several."""
        return max(self.decisions, key=lambda key: float(belief @ self.decisions[key].value))


@lru_cache(maxsize=1)
def sheets() -> Mapping[str, Sheet]:
    """All sheets by name, in the order of the simulators."""
    found: dict[str, Sheet] = {}
    for simulator in SIMULATORS:
        path = FOLDER / f"clinical_{simulator}.yaml"
        raw: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        found |= {name: _sheet(name, entry) for name, entry in raw.items()}
    return found


def _sheet(name: str, raw: Mapping[str, Any]) -> Sheet:
    states: dict[str, str] = raw["states"]
    return Sheet(
        name=name,
        states=states,
        prior={stratum: _column(states, raw["prior"][stratum]) for stratum in STRATA},
        risk={stratum: tuple(raw["risk"][stratum]) for stratum in STRATA},
        openings=tuple(raw["openings"]),
        questions={key: _question(key, entry, states) for key, entry in raw["questions"].items()},
        decisions={key: _decision(key, entry, states) for key, entry in raw["decisions"].items()},
    )


def _column(states: Mapping[str, str], raw: Mapping[str, float]) -> FloatArray:
    return np.array([raw[state] for state in states], dtype=np.float64)


def _question(key: str, raw: Mapping[str, Any], states: Mapping[str, str]) -> Question:
    rows: list[float | list[float]] = [raw["chance"][state] for state in states]
    chance = [[row, 1.0 - row] if isinstance(row, float) else row for row in rows]
    return Question(
        key=key,
        kind=raw.get("kind", "ask"),
        say=raw["say"],
        words=tuple(raw["words"]),
        replies=tuple(raw["replies"]),
        chance=np.array(chance, dtype=np.float64),
        after=raw.get("after", ""),
    )


def _decision(key: str, raw: Mapping[str, Any], states: Mapping[str, str]) -> Decision:
    words = tuple(raw["words"])
    bare = tuple(raw.get("bare", words))
    return Decision(key, raw["say"], words, bare, _column(states, raw["value"]))
