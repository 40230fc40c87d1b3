"""How the rule judge of Guess My City sees a question: its form, and what it mentions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from delta_belief_rl.envs.answers import normalise, strip_fillers
from delta_belief_rl.envs.guess_my_city.data import City, load_atlas, name_key, reveals

UNKNOWN = "I do not know."
"""What is said to everything that cannot be read for certain."""

_POLITE = re.compile(
    r"^(?:(?:can|could|would|will|may|do|did) (?:you|i)(?: please| kindly)? "
    r"(?:tell|describe|share|give|say|explain|ask|know|mention|name|list|elaborate)\w*(?: me| us)?|"
    r"(?:please )?tell me|(?:i (?:would|d) (?:like|love) to|i want to|id like to) "
    r"(?:know|ask|learn)|"
    r"i wonder|(?:would|could) you say|do you (?:think|know)|is it (?:true|correct|right) that|"
    r"please (?:tell|describe|share)(?: me)?)(?: something)?(?: more)?(?: about| that| on)?\b ?"
)
_CONDITION = re.compile(r"^(?:if|whether) ")
_AUXILIARY = re.compile(
    r"^(?:is|are|was|were|does|do|did|has|have|had|can|could|would|will|should|might|may|"
    r"isnt|arent|doesnt|wasnt|any)\b"
)
_STATEMENT = re.compile(r"^(?:it|the city|your city|your home city|the country|there|people)\b")
_OPEN = re.compile(
    r"\b(?:what|which|who|where|when|how|describe|why|whose|name some|give me|kind of|type of)\b"
)
_NEGATION = re.compile(r"\b(?:not|never|no|without|outside|isnt|arent|doesnt|dont|neither|nor)\b")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a city.

    Attributes:
        text: Its key (``name_key``) without interjections and polite openings.
        closed: It asks for yes or no.
        negated: It holds a negation, so that a bare yes or no would be unclear.
        choice: It offers alternatives.
    """

    city: City
    text: str
    closed: bool
    negated: bool
    choice: bool

    def has(self, pattern: str) -> bool:
        """Whether a regular expression is found in the text."""
        return re.search(pattern, self.text) is not None

    def named(self, words: Iterable[str]) -> tuple[str, ...]:
        """Which of some keys stand in the text as whole words; the longest of overlapping ones."""
        text, found = f" {self.text} ", list[str]()
        present = (word for word in words if f" {word} " in text)
        for word in sorted(present, key=len, reverse=True):
            if f" {word} " in text:
                found.append(word)
                text = text.replace(f" {word} ", " | ")
        return tuple(found)

    def about_country(self) -> bool:
        """Whether the country is asked about, not the city."""
        return self.has(r"\b(?:country|nation|state|kingdom|government)\b")

    def verdict(self, holds: bool, otherwise: str = "") -> str:
        """Yes or no; the plain statement where the question is negated or no yes/no question."""
        if self.negated:
            return otherwise or UNKNOWN
        return "Yes." if holds else "No."

    def choose(self, options: Mapping[str, bool], statement: str) -> str | None:
        """The answer to a question that mentions some options, each with whether it holds.

        None where nothing is mentioned. Where several are offered, or the question is open, the
        statement tells which it is.
        """
        if not options:
            return None
        if not self.closed or (self.choice and len(options) > 1):
            return statement
        return self.verdict(any(options.values()), statement)


Answer = Callable[[Question], str | None]
"""A reply, or None for a question that it cannot answer."""


def read_question(action: str, city: City) -> Question:
    """Bring an action to the form that the topics look at."""
    text = _text(action)
    return Question(
        city=city,
        text=text,
        closed=_is_closed(text),
        negated=_NEGATION.search(re.sub(r"\bor not\b", "", text)) is not None,
        choice=re.search(r"\bor\b(?! not\b)", text) is not None,
    )


@lru_cache(maxsize=1 << 14)
def _text(action: str) -> str:
    text = name_key(strip_fillers(normalise(action)))
    for _ in range(3):
        shorter = _POLITE.sub("", text)
        if shorter == text:
            break
        text = shorter
    return text


def _is_closed(text: str) -> bool:
    if _CONDITION.match(text):
        return True
    if _STATEMENT.match(text):
        return not _OPEN.search(text)
    if not _AUXILIARY.match(text):
        return False
    # "Is there anything it is known for, what ..." asks for more than yes or no.
    return not re.search(r"\b(?:what|which|who|where|how|when)\b", text)


def joined(items: Collection[str]) -> str:
    """Items in a row with "and" before the last one."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def sentence(text: str) -> str:
    """A text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def safe(words: Iterable[str], city: City) -> tuple[str, ...]:
    """Those of some words that do not give the city away."""
    return tuple(word for word in words if not reveals(word, city))


def countries_in(question: Question) -> tuple[str, ...]:
    """Countries whose name stands in a question."""
    keys = load_atlas().country_keys
    named = (keys[key] for key in question.named(key for key in keys if len(key) > 2))
    return tuple(dict.fromkeys(named))


def adjectives_in(question: Question) -> tuple[str, ...]:
    """Countries of which an adjective stands in a question."""
    keys = load_atlas().adjective_keys
    return tuple(dict.fromkeys(keys[key] for key in question.named(keys)))
