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

from delta_belief_rl.envs.lemmas import SyntaxReading, read_syntax, require_lemmas
from delta_belief_rl.types import UserError

VALIDITY_METHODS = ("length", "question", "multiple_questions", "sentence")
"""Rules that can make an action invalid, in the order in which they are tried."""
POSITIVE_METHODS = ("syntax", "regex", "exact")
"""Rules that recognise the secret in an action, in the order in which they are tried.

They come after the others. ``syntax`` also makes an action invalid that asks nothing.
"""
JUDGE_WORDS = ("yes", "no", "repeated", "invalid", "finished")
"""The words of the 20 Questions judge."""
UNRECOGNISED = "unrecognized"
"""Reason of a judge's "invalid" that stands for a text which the published parser cannot read."""
JUDGE_EXTRAS = (
    "possible_overfit",
    "repeated",
    "multiple_questions",
    "no_question",
    "no_question_word",
    "invalid_chars",
    "too_long_word",
    "too_long_action",
    "too_short_action",
    "invalid_by_judge",
)
"""Published names of what can be noticed about a question (``judge/extra/<name>``).

The published rules never set ``possible_overfit``. A question that code found to be repeated has
``repeated``, too.
"""

MAX_ACTION_CHARACTERS = 500
MIN_ACTION_CHARACTERS = 2

_QUOTES = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4`\u2039\u203a\u275b\u275c", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb\u275d\u275e\u301d\u301e", '"'),
    }
)
_SELECTORS = re.compile("[\u034f\u180b-\u180d\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Marks that show nothing by themselves."""
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
_LIST = re.compile(
    # The comma of Arabic and of Chinese, the slashes that are no ASCII, dots between words.
    r"[,/;|&\\\u060c\u3001\u2044\u2215\u2022\u00b7]|\s[-\u2013\u2014+]+\s"
    r"|\b(?:n?or|n?either|versus|vs|one of (?:these|those|them|the following))\b"
    r"|\b(?:and|maybe|perhaps|possibly)\s+(?:also\s+)?(?:is it|an?|the)\b"
    r"|(?<=['\"])\s+(?=['\"])"
    r"|\b(?:\d+[.):]|[a-e]\))\s*[^\W\d].*\b(?:\d+[.):]|[a-e]\))\s*[^\W\d]"
)
_BETWEEN = re.compile(
    r"\bbetween\s+(?:an?\s+|the\s+)?(?!\d|(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|"
    r"eleven|twelve|twenty|fifty|a hundred|ages|years|sizes|hours)\b)[\w' -]+?\sand\s"
)
_ASIDE = re.compile(r"\(\s*(?:an?\s+|the\s+)?(?P<first>[^\W\d]+)(?:[\s-]+[^\W\d]+)?\s*\)")
_EXPLAINS = re.compile(r"(?:for|in|of|on|with|like|as|not|at|to|from|by|about|over|under)\Z")
"""First word of brackets that explain."""
_BROKEN_LINE = re.compile(r"\bis (?:it|the)\b[^?]*[^\s?][ \t]*[\r\n]+\s*[^\s?]", re.IGNORECASE)
_GUESS_START = re.compile(r"\bis (?:it|the (?:secret )?(?:word|thing|object|answer)|the secret)\b")
_NAMED = re.compile(r"^(?:called|named|something called|a thing called)\b|^(?:an?|the)\s|^['\"]")


@lru_cache(maxsize=20_000)
def normalise(text: str) -> str:
    """Bring a text to the form in which texts are compared.

    Unicode NFKC, invisible characters (zero-width spaces and joiners, direction marks, variation
    selectors) removed, case folded, curly quotes made straight, white space collapsed, outer quotes
    and punctuation stripped. Applying it twice changes nothing.

    Example:
        >>> normalise("  \u201cIs it\u200b a DOG?\u201d ")
        'is it a dog'
    """
    if text.isascii():
        return " ".join(text.lower().translate(_QUOTES).split()).strip(_OUTER)
    for _ in range(4):
        before = text
        folded = unicodedata.normalize("NFKC", _visible(text).casefold())
        text = " ".join(folded.translate(_QUOTES).split()).strip(_OUTER)
        if text == before:
            break
    return text


def _visible(text: str) -> str:
    """NFKC without invisible characters, quotes made straight."""
    shown = "".join(c for c in _SELECTORS.sub("", text) if unicodedata.category(c) != "Cf")
    # Quotes come first: NFKC takes the acute accent for a space with a combining mark.
    return unicodedata.normalize("NFKC", shown.translate(_QUOTES)).translate(_QUOTES)


def strip_fillers(text: str) -> str:
    """Remove leading interjections ("so,", "ok", "question 3:") and trailing ones ("please").

    Args:
        text: A text in normal form.
    """
    while (match := _FILLER.match(text)) and match.end() < len(text):
        text = text[match.end() :]
    while (match := _TRAILING.search(text)) and match.start() > 0:
        # "Is it thanks?" names a word.
        if _OPENER.fullmatch(f"{text[: match.start()]} "):
            break
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
    """Refuse rules that cannot be used.

    Raises:
        UserError: For names that do not exist, and for ``syntax`` without its lemmatiser.
    """
    if "syntax" in methods:
        require_lemmas()
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
    diagnostics, positive = list(failed), False
    if "syntax" in methods and not (short_circuit and failed):
        syntax = read_syntax(a, y)
        positive = syntax.names_secret
        diagnostics += _syntax_notes(syntax)
        if not (syntax.names_secret or syntax.asks):
            failed.append("no_question_word")
    if not (short_circuit and failed):
        positive = _positive(a, y, methods) or positive
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

    Accepted are "is it NAME?", "is the secret NAME?", "is the (secret) word NAME?" (or "thing",
    "object", "answer"), each with an article, "called", quotes around the name and interjections
    before or behind it. The question mark is required. Hyphens count as spaces.

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
    """Whether the action offers alternatives.

    Seen are "or", "either", "between ... and ...", commas, slashes, dashes and other separators,
    a second guess, names in quotes side by side, numbered items, lines of a list, and a name in
    brackets behind a guess. Every comma counts, also one that lists nothing. What has no separator
    cannot be told from a name of several words and is not seen: "dog cat horse", "dog and cat"; the
    end of a sentence is no separator.

    Example:
        >>> candidate_list("Is it a cat, a dog or a cow?"), candidate_list("So, is it a dog?")
        (True, False)
    """
    text = strip_fillers(normalise(action))
    return (
        bool(_LIST.search(text) or _BETWEEN.search(text) or _BROKEN_LINE.search(action))
        or len(_GUESS_START.findall(text)) > 1
        or _names_aside(action)
    )


def _names_aside(action: str) -> bool:
    """Whether brackets behind a guess hold one more name, or several brackets stand in a row."""
    asides = list(_ASIDE.finditer(action.lower()))
    names = [match for match in asides if not _EXPLAINS.match(match["first"])]
    return len(names) > 1 or (bool(names) and guess_form(action))


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


def _syntax_notes(syntax: SyntaxReading) -> list[str]:
    """Diagnostics of the rule ``syntax``."""
    notes = ["too_long_word"] if syntax.too_long_word else []
    return notes if syntax.names_secret or syntax.asks else [*notes, "no_question_word"]


def _positive(action: str, secret: str, methods: Collection[str]) -> bool:
    """Whether ``regex`` or ``exact`` finds the secret."""
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
    if not _visible(action).rstrip().rstrip("'\" ").endswith("?"):
        return None
    text = strip_fillers(normalise(action))
    match = _OPENER.match(text)
    return _name_key(text[match.end() :]) if match else None


def _name_key(name: str) -> str:
    """A name in normal form: hyphens are spaces, quotes around the bare name are gone."""
    key = re.sub(r"\s*[-\u2010]\s*", " ", normalise(name))
    article = _ARTICLE.match(key)
    if article and key[article.end() :].startswith(("'", '"')):
        key = article.group() + key[article.end() :].strip(_OUTER)
    return key
