"""Text rules that every environment shares: normal form, validity, wins, lists, repeats.

Two families live here. The *published* rules (``verify_question``, ``exact_match``) reproduce the
checks of the ΔBelief-RL experiments letter by letter, with their limits: a secret of several words
can never be found, and naming the secret anywhere in a valid question wins. The *strict* rules
(``strict_guess``, ``candidate_list``) count one candidate that is guessed directly.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from delta_belief_rl.types import UserError

VALIDITY_METHODS = ("length", "question", "multiple_questions", "sentence")
"""Rules that can make an action invalid, in the order in which they are tried."""
POSITIVE_METHODS = ("regex", "exact")
"""Rules that recognise the secret in an action, in the order in which they are tried."""
JUDGE_WORDS = ("yes", "no", "repeated", "invalid", "finished")
"""The words of the 20 Questions judge."""

MAX_ACTION_CHARACTERS = 500
MIN_ACTION_CHARACTERS = 2

_QUOTES = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4`\u2039\u203a", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
    }
)
_OUTER = string.punctuation + string.whitespace + "\u00a1\u00bf\u2026\u2013\u2014\u00b7\u2022"
_CONTROL = re.compile(r"[\u0000-\u001f\u007f-\u00a0\u2028\u2029]")
_NOT_WORD = re.compile(r"[^\w\s-]|\d")

_FILLER = re.compile(
    r"(?:so|okay|ok|well|hm+|um+|uh+|oh|ah|and|but|then|now|alright|all right|great|"
    r"thanks|thank you|"
    r"let me (?:see|think|ask)(?: you)?(?: this)?|i see|next question|next|"
    r"(?:my|the) (?:next |first |last )?question is|question(?: \d+)?|q ?\d+|\d+(?=\s*[.):])|"
    r"tell me(?=\s*[,:])|please(?! tell)|right(?=\s*,)|interesting|got it)"
    r"(?:\s*[,.:;!)\u2026-]+\s*|\s+)"
)
_TRAILING = re.compile(
    r"\s*[\s,.!?]\s*(?:please|thanks|thank you|then|though|by any chance|perhaps)$"
)
_OPENER = re.compile(
    r"(?:is it|is the (?:secret )?(?:word|thing|object|answer)|is the secret)\s+"
    r"(?:the (?:secret )?word\s+)?(?:(?:something |a thing )?(?:called|named)\s+)?"
)
_ARTICLE = re.compile(r"(?:an?|the|some)\s+")
_LIST = re.compile(r"\bor\b|[,/;|&]|\beither\b|\band\s+(?:also\s+)?(?:is it|an?|the)\b")
_GUESS_START = re.compile(r"\bis (?:it|the (?:secret )?(?:word|thing|object|answer)|the secret)\b")
_NAMED = re.compile(r"^(?:called|named|something called|a thing called)\b|^(?:an?|the)\s|^['\"]")


@lru_cache(maxsize=20_000)
def normalise(text: str) -> str:
    """Bring a text to the form in which texts are compared.

    Unicode NFKC, invisible format characters (zero-width spaces and joiners, direction marks)
    removed, case folded, curly quotes made straight, white space collapsed, outer quotes and
    punctuation stripped. Applying it twice changes nothing.

    Example:
        >>> normalise("  \u201cIs it\u200b a DOG?\u201d ")
        'is it a dog'
    """
    if text.isascii():
        return " ".join(text.lower().translate(_QUOTES).split()).strip(_OUTER)
    for _ in range(4):
        before = text
        visible = "".join(c for c in text if unicodedata.category(c) != "Cf")
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", visible).casefold())
        text = " ".join(folded.translate(_QUOTES).split()).strip(_OUTER)
        if text == before:
            break
    return text


def strip_fillers(text: str) -> str:
    """Remove leading interjections ("so,", "ok", "question 3:") and trailing ones ("please").

    Args:
        text: A text in normal form.
    """
    while (match := _FILLER.match(text)) and match.end() < len(text):
        text = text[match.end() :]
    while (match := _TRAILING.search(text)) and match.start() > 0:
        text = text[: match.start()]
    return text.strip(_OUTER)


@dataclass(frozen=True, slots=True)
class Verification:
    """What the published rules made of one judge word.

    Attributes:
        answer: The corrected word.
        diagnostics: Names of everything noticed, e.g. ``no_question``.
        outcome: ``true_positive`` (finished kept), ``false_positive`` (finished changed),
            ``false_negative`` (changed to finished), ``wrong_negative`` (any other change) or
            ``true_negative`` (kept).
        positive: A rule found the secret in the action.
        valid: No rule called the action invalid.
    """

    answer: str
    diagnostics: tuple[str, ...]
    outcome: str
    positive: bool
    valid: bool


def check_methods(methods: Collection[str]) -> None:
    """Refuse unknown rule names.

    Raises:
        UserError: For ``syntax``, which needs a lemmatiser, and for names that do not exist.
    """
    if "syntax" in methods:
        raise UserError(
            "verify_judge.methods contains 'syntax', which is not available in this version: "
            "remove it, or use 'exact' to recognise the secret."
        )
    unknown = sorted(set(methods) - {*VALIDITY_METHODS, *POSITIVE_METHODS})
    if unknown:
        known = ", ".join((*VALIDITY_METHODS, *POSITIVE_METHODS))
        raise UserError(
            f"verify_judge.methods contains {unknown[0]!r}; the known rules are {known}."
        )


def verify_question(
    action: str,
    judge_word: str,
    secret: str,
    methods: Collection[str] = (*VALIDITY_METHODS, "exact"),
    false_positive_behavior: str | None = "yes",
    short_circuit: bool = False,
) -> Verification:
    """Correct a judge's word by the published rules.

    A positive rule turns the word into ``finished`` unless a validity rule failed, which gives
    ``invalid``. Without a positive rule the judge's ``invalid`` and ``repeated`` stand, and a
    ``finished`` that no rule confirms becomes ``false_positive_behavior`` (None keeps it).

    Args:
        action: The agent's text. Lower-cased and stripped before the rules, as all inputs.
        judge_word: One of ``JUDGE_WORDS``; other text is kept as it is when no rule objects.
        secret: What the agent looks for. Under ``regex`` it is an unescaped regular expression.
        methods: The rules to use; their order does not matter.
        false_positive_behavior: Replacement of an unconfirmed ``finished``.
        short_circuit: Return at the first failed validity rule, with its diagnostic only.

    Raises:
        UserError: For an unknown rule, or a secret that is no regular expression under ``regex``.

    Source: the reference implementation's ``verify_judge``.
    """
    check_methods(methods)
    a, word, y = (part.lower().strip() for part in (action, judge_word, secret))
    failed: list[str] = []
    for method in VALIDITY_METHODS:
        if method in methods and (problem := _validity_problem(method, a)):
            failed.append(problem)
            if short_circuit:
                break
    cut_short = short_circuit and bool(failed)
    positive = not cut_short and _positive(a, y, methods)
    diagnostics = list(failed)
    if failed:
        answer = "invalid"
    elif positive:
        answer = "finished"
    elif word in ("invalid", "repeated"):
        answer = word
        diagnostics.append("invalid_by_judge" if word == "invalid" else "repeated")
    elif "finished" in word and false_positive_behavior is not None:
        answer = false_positive_behavior
    else:
        answer = word
    return Verification(answer, tuple(diagnostics), _outcome(word, answer), positive, not failed)


def exact_match(action: str, secret: str) -> bool:
    """The published win rule: the secret is one of the action's words.

    Characters that are neither word characters, white space nor hyphens are deleted first, and all
    digits; so a secret of several words never matches, and a possessive or plural does not either.

    Example:
        >>> exact_match("Is it a cat, or a dog?", "dog"), exact_match("Is it a dog's bone?", "dog")
        (True, False)
    """
    return secret.lower().strip() in _NOT_WORD.sub("", action.lower().strip()).split()


def strict_guess(action: str, secret: str, aliases: Iterable[str] = ()) -> bool:
    """Whether the action guesses the secret, or an alias of it, directly and alone.

    Accepted are "is it NAME?", "is the secret NAME?", "is the (secret) word NAME?", each with an
    article, "called", quotes around the name and leading interjections. The question mark is
    required. Hyphens count as spaces.

    Example:
        >>> strict_guess("Is it the 'dog'?", "dog"), strict_guess("Is it a cat or a dog?", "dog")
        (True, False)
    """
    candidate = _candidate(action)
    if candidate is None:
        return False
    names = {_name_key(name) for name in (secret, *aliases)} - {""}
    return candidate in names or _ARTICLE.sub("", candidate, count=1) in names


def guess_form(action: str) -> bool:
    """Whether the action has the form of a direct guess.

    The form is "is it" with an article, quotes or "called". Without a table of
    things nothing more can be said: "is it a tool?" has the form too.
    """
    text = strip_fillers(normalise(action))
    match = _GUESS_START.match(text)
    return bool(match and _NAMED.match(text[match.end() :].lstrip()))


def candidate_list(action: str) -> bool:
    """Whether the action offers alternatives: "or", commas, slashes, several guesses.

    Example:
        >>> candidate_list("Is it a cat, a dog or a cow?"), candidate_list("So, is it a dog?")
        (True, False)
    """
    text = strip_fillers(normalise(action))
    return bool(_LIST.search(text)) or len(_GUESS_START.findall(text)) > 1


def is_duplicate(action: str, earlier: Iterable[str]) -> bool:
    """Whether the normal form of the action equals that of an earlier one."""
    key = normalise(action)
    return any(normalise(other) == key for other in earlier)


def _validity_problem(method: str, action: str) -> str | None:
    """Name of what is wrong with a lower-cased, stripped action under one rule, or None."""
    if method == "length":
        if len(action) > MAX_ACTION_CHARACTERS:
            return "too_long_action"
        return "too_short_action" if len(action) < MIN_ACTION_CHARACTERS else None
    if method == "question":
        return None if action.endswith("?") else "no_question"
    if method == "multiple_questions":
        return "multiple_questions" if action.count("?") > 1 else None
    return "invalid_chars" if _CONTROL.search(action) else None


def _positive(action: str, secret: str, methods: Collection[str]) -> bool:
    if "regex" in methods:
        try:
            if re.search(secret, action, re.IGNORECASE):
                return True
        except re.error as error:
            raise UserError(
                f"The secret {secret!r} is not a regular expression ({error}): use 'exact' instead "
                "of 'regex' in verify_judge.methods."
            ) from error
    return "exact" in methods and exact_match(action, secret)


def _outcome(word: str, answer: str) -> str:
    if "finished" in word:
        return "true_positive" if answer == "finished" else "false_positive"
    if answer == word:
        return "true_negative"
    return "false_negative" if answer == "finished" else "wrong_negative"


def _candidate(action: str) -> str | None:
    """The text after the opening of a direct guess, as a name key; None for any other action."""
    visible = unicodedata.normalize("NFKC", action).translate(_QUOTES).rstrip().rstrip("'\" ")
    if not visible.endswith("?"):
        return None
    text = strip_fillers(normalise(action))
    match = _OPENER.match(text)
    return _name_key(text[match.end() :]) if match else None


def _name_key(name: str) -> str:
    """A name in normal form: hyphens are spaces, quotes around the bare name are gone."""
    key = re.sub(r"\s*-\s*", " ", normalise(name))
    article = _ARTICLE.match(key)
    if article and key[article.end() :].startswith(("'", '"')):
        key = article.group() + key[article.end() :].strip(_OUTER)
    return key
