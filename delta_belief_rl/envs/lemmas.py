"""The published rule ``syntax``: the secret in any inflection, and whether a question is asked.

Lemmas and stems come from ``lightlemma``, which is imported when the rule is used and not before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType

from delta_belief_rl.types import UserError

MAX_TOKEN_CHARACTERS = 45
"""Longer tokens are passed over."""
_MAX_WORD_CHARACTERS = 100
"""The library refuses longer words."""

_PRONOUNS = ("what", "where", "when", "why", "how", "who", "whom", "whose", "which")
_MODALS = ("can", "will", "shall", "may", "might")
# The lemmatiser takes the final d of these three for an ending.
_CLIPPED = ("coul", "woul", "shoul")

QUESTION_LEMMAS = frozenset((*_PRONOUNS, "be", "do", "have", *_MODALS, *_CLIPPED))
"""Lemmas of question words and auxiliary verbs."""
QUESTION_STEMS = frozenset(
    (
        *_PRONOUNS,
        *("is", "ar", "wa", "were", "do", "doe", "did", "have", "ha", "had"),
        *("can", "could", "would", "should", "will", "shall", "mai", "might"),
    )
)
"""Stems of the same words; ``be`` is among the lemmas alone."""


@dataclass(frozen=True, slots=True)
class SyntaxReading:
    """What the rule found.

    Attributes:
        names_secret: A token has the lemma or the stem of the secret.
        asks: A token is a question word or an auxiliary verb.
        too_long_word: A token was passed over because of its length.
    """

    names_secret: bool
    asks: bool
    too_long_word: bool


def require_lemmas() -> None:
    """Make sure that the rule can be used.

    Raises:
        UserError: ``lightlemma`` is not installed.
    """
    _library()


def read_syntax(action: str, secret: str) -> SyntaxReading:
    """Apply the rule to a lower-cased, stripped action and secret.

    Tokens are maximal runs of word characters, so a secret of several words or with a hyphen is
    never found, and neither is one that is too long for the library.

    Raises:
        UserError: ``lightlemma`` is not installed.

    Source: the reference implementation's ``verify_judge``, rule ``syntax``.
    """
    library = _library()
    tokens: list[str] = library.tokenize(action)
    short = [token for token in tokens if len(token) <= MAX_TOKEN_CHARACTERS]
    forms = [_forms(token) for token in short]
    wanted = _forms(secret) if len(secret) <= _MAX_WORD_CHARACTERS else None
    return SyntaxReading(
        names_secret=wanted is not None
        and any(lemma == wanted[0] or stem == wanted[1] for lemma, stem in forms),
        asks=any(lemma in QUESTION_LEMMAS or stem in QUESTION_STEMS for lemma, stem in forms),
        too_long_word=len(short) < len(tokens),
    )


@lru_cache(maxsize=1 << 14)
def _forms(word: str) -> tuple[str, str]:
    """Lemma and stem."""
    library = _library()
    return str(library.lemmatize(word)), str(library.stem(word))


@lru_cache(maxsize=1)
def _library() -> ModuleType:
    try:
        return import_module("lightlemma")
    except ImportError as error:
        raise UserError(
            "The rule 'syntax' of multi_turn.verify_judge.methods needs lightlemma: "
            "pip install 'delta-belief-rl[lemma]', or leave the rule out."
        ) from error
