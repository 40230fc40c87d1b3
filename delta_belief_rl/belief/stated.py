"""Beliefs that a model states when it is asked: how likely is this answer, what is the answer?

Beside the log-probability of the secret, which is read off the model, these are said in words. What
is said may be no probability at all, which is a typed value and never a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from delta_belief_rl.envs.answers import normalise, strict_guess

CONFIDENCE_REQUEST = (
    "Before the game goes on: how likely is it that the answer is '{secret}'? "
    "Reply with a probability between 0 and 1 and with nothing else."
)
ANSWER_REQUEST = (
    "Before the game goes on: what is the answer, as far as you can tell? "
    "Reply with its name and with nothing else."
)


class NoProbability(StrEnum):
    """Why a text states no probability."""

    EMPTY = "empty"
    NO_NUMBER = "no_number"
    OUT_OF_RANGE = "out_of_range"


_N = r"(?:\d+(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    r"(?<![\w.])(?<!\d,)(?P<minus>-)?(?:"
    rf"(?P<above>{_N})\s*(?:/|out of)\s*(?P<below>{_N})"
    rf"|(?P<percent>{_N})\s*(?:%|per\s?cent\b)"
    r"|(?P<decimal>\d*\.\d+(?:e-?\d+)?|\d+e-\d+|0,\d+)"
    r"|(?P<whole>\d+)"
    r")(?!\w|,\d)",
    re.IGNORECASE,
)
_THOUGHT = re.compile(r"^.*</think>", re.DOTALL)
_PREAMBLE = re.compile(
    r"^(?:(?:i think|i guess|i believe|my guess is|my answer is)(?: that)?\s+)?"
    r"(?:it is|it's|it might be|the (?:answer|secret(?: word)?|word) is)\s+"
)


def parse_probability(text: str) -> float | NoProbability:
    """The probability that a text states.

    The first decimal number, percentage or fraction decides. Where there is none, the first whole
    number does, if it is 0 or 1: other whole numbers may count anything. A thinking block is passed
    over.

    Example:
        >>> parse_probability("0.3"), parse_probability("30 %"), parse_probability("After 9: 1/4")
        (0.3, 0.3, 0.25)
        >>> parse_probability("70"), parse_probability("Very likely.")
        (<NoProbability.OUT_OF_RANGE: 'out_of_range'>, <NoProbability.NO_NUMBER: 'no_number'>)
    """
    said = _THOUGHT.sub("", text).strip()
    if not said:
        return NoProbability.EMPTY
    numbers = list(_NUMBER.finditer(said))
    if not numbers:
        return NoProbability.NO_NUMBER
    first = next((match for match in numbers if match["whole"] is None), numbers[0])
    value = _value(first)
    if value is None or not 0.0 <= value <= 1.0 or (first["minus"] and value > 0):
        return NoProbability.OUT_OF_RANGE
    return value


def names_secret(text: str, secret: str, aliases: Iterable[str] = ()) -> bool:
    """Whether an answer names the secret, or an alias, and nothing else.

    It may be the bare name, a sentence such as "It is a dog.", or a direct guess; a thinking block
    and everything after the first line are passed over.

    Example:
        >>> names_secret("The answer is a Dog.", "dog"), names_secret("a dog or a cat", "dog")
        (True, False)
    """
    lines = _THOUGHT.sub("", text).strip().splitlines()
    if not lines:
        return False
    names = tuple(aliases)
    bare = _PREAMBLE.sub("", normalise(lines[0]))
    return strict_guess(lines[0], secret, names) or strict_guess(f"Is it {bare}?", secret, names)


def _value(match: re.Match[str]) -> float | None:
    """The number of a match, without its sign; None for a division by zero."""
    if match["above"] is not None:
        below = float(match["below"])
        return float(match["above"]) / below if below else None
    if match["percent"] is not None:
        return float(match["percent"]) / 100
    return float((match["decimal"] or match["whole"]).replace(",", "."))
