"""The closed language of the task: its words, their parts of speech, and the one right sentence.

A problem names two numbers and a bare phrase; the answer repeats the sum, gives its result, and
makes noun and verb agree with it::

    three minus two : red cat sleep quietly
    three minus two is one so one red cat sleeps quietly .
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OPERATORS = ("plus", "minus")
NOUNS: Mapping[str, str] = {
    "cat": "cats",
    "mouse": "mice",
    "goose": "geese",
}
"""Singular to plural."""
VERBS: Mapping[str, str] = {
    "sleep": "sleeps",
    "run": "runs",
    "sing": "sings",
    "jump": "jumps",
    "hide": "hides",
}
"""Form of the plural to that of the singular."""
ADJECTIVES = ("red", "small", "old")
ADVERBS = ("quietly", "slowly", "often")
CONNECTIVES = ("is", "so")
SYMBOLS = (":", ".")
REPLIES = ("right", "wrong")
LONGEST = 13
"""Tokens of the longest answer, its end included."""

CATEGORIES = (
    *("number", "operator", "noun", "verb", "adjective", "adverb", "connective"),
    *("symbol", "end"),
)
"""Parts of speech that a token of an answer may have; numbers and symbols have their own."""

_LEXICON: Mapping[str, tuple[str, ...]] = {
    "number": NUMBERS,
    "operator": OPERATORS,
    "noun": (*NOUNS, *NOUNS.values()),
    "verb": (*VERBS, *VERBS.values()),
    "adjective": ADJECTIVES,
    "adverb": ADVERBS,
    "connective": CONNECTIVES,
    "symbol": SYMBOLS,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum and the bare phrase that is to agree with its result.

    Attributes:
        left: First number.
        operator: One of ``OPERATORS``.
        right: Second number.
        noun: In the singular.
        verb: In the form of the plural.
        adjective: Empty for none.
        adverb: Empty for none.

    Raises:
        ValueError: A number has no word here.
    """

    left: int
    operator: str
    right: int
    noun: str
    verb: str
    adjective: str = ""
    adverb: str = ""

    def __post_init__(self) -> None:
        for number in (self.left, self.right, self.result):
            if not 1 <= number <= len(NUMBERS):
                raise ValueError(f"{number} has no word")

    @property
    def result(self) -> int:
        """What the sum comes to."""
        return self.left + self.right if self.operator == "plus" else self.left - self.right

    def question(self) -> str:
        """The problem in words."""
        return _joined(*self._sum(), ":", self.adjective, self.noun, self.verb, self.adverb)

    def answer(self, result: int | None = None, slip: bool = False) -> str:
        """The sentence that is asked for.

        Args:
            result: Another result than the right one.
            slip: Give the verb the form that does not agree.

        Example:
            >>> Problem(3, "minus", 2, "cat", "sleep").answer()
            'three minus two is one so one cat sleeps .'
        """
        found = self.result if result is None else result
        single = found == 1
        number = NUMBERS[found - 1]
        noun = self.noun if single else NOUNS[self.noun]
        verb = VERBS[self.verb] if single != slip else self.verb
        said = _joined(self.adjective, noun, verb, self.adverb)
        return _joined(*self._sum(), "is", number, "so", number, said, ".")

    def _sum(self) -> tuple[str, str, str]:
        return NUMBERS[self.left - 1], self.operator, NUMBERS[self.right - 1]


@lru_cache(maxsize=1)
def sums() -> tuple[tuple[int, str, int], ...]:
    """All sums of two numbers whose result is a number, too."""
    some = range(1, len(NUMBERS) + 1)
    return tuple(
        (left, operator, right)
        for operator in OPERATORS
        for left in some
        for right in some
        if (left + right if operator == "plus" else left - right) in some
    )


def words() -> tuple[str, ...]:
    """Every word of the language, each once."""
    lexicon = (word for said in _LEXICON.values() for word in said)
    return tuple(dict.fromkeys((*lexicon, *REPLIES)))


def tag(word: str) -> str:
    """Part of speech of a word; empty for one that no answer has.

    Example:
        >>> tag("mice"), tag("right")
        ('noun', '')
    """
    return next((name for name, said in _LEXICON.items() if word in said), "")


def base(word: str) -> str:
    """Noun in the singular, verb in the form of the plural; any other word as it is.

    Example:
        >>> base("mice"), base("sleeps"), base("one")
        ('mouse', 'sleep', 'one')
    """
    forms = {**{other: one for one, other in NOUNS.items()}, **{b: a for a, b in VERBS.items()}}
    return forms.get(word, word)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
