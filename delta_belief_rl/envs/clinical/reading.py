"""Reads an agent's text as a decision, a question, or neither.

A question is read leniently: the first phrase of a sheet's questions that a sentence without a
negation has; further ones are passed over. A decision is read strictly, because it ends the case:

* it stands at the beginning of a sentence, or of a clause behind a comma, as "Decision: ...", "My
  diagnosis is ...", "I decide to ...", "I will ...", "The patient has ..."; at the beginning of a
  sentence the bare phrase counts as well, if nothing else stands there;
* the sentence has no negation, hedge, condition or question mark, except in a reason ("because");
* it names one decision. A sentence that names two, or a text that decides for two, decides nothing;
* words of others, in quotation marks, do not count; the text as a whole, or what follows
  "Decision:", may be quoted;
* a sentence that takes it back ("Wait, ...") undoes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from delta_belief_rl.envs.clinical.sheets import Sheet, sheets

Kind = Literal["decide", "ask", "unknown", "nothing"]

NOTES = ("several_decisions", "hedged_decision", "negated_decision", "several_questions")


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_LONGEST = 4000
"""Characters that are read; a text beyond them is cut."""
_CONTRACTIONS = (
    (re.compile(r"\b(?:can't|cannot)\b"), "can not"),
    (re.compile(r"\bwon't\b"), "will not"),
    (re.compile(r"(?<=[a-z])n't\b"), " not"),
    (re.compile(r"\b(i|we|you|they|he|she|it)'ll\b"), r"\1 will"),
    (re.compile(r"\b(i|we|you|they|he|she|it)'d\b"), r"\1 would"),
    (re.compile(r"\b(i|we|you|they)'ve\b"), r"\1 have"),
    (re.compile(r"\b(it|this|that|he|she|there)'s\b"), r"\1 is"),
    (re.compile(r"\bi'm\b"), "i am"),
    (re.compile(r"\blet's\b"), "let us"),
    (re.compile(r"(?<=\w)'s\b"), ""),
)
_STYLED = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019", "'"),
        **dict.fromkeys("`\u201c\u201d\u201e\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2013\u2014", "-"),
        "\uff1a": ":",
    }
)
"""Quotation marks, dashes and colons of other styles to plain ones."""
_MARKUP = re.compile(r"[*_#~>]+")
_WHOLE = re.compile(r'\s*(["\'])(?P<text>[^"]*)\1\s*')
_QUOTED = re.compile(r'"[^"]*"?|(?<!\w)\'(?:[^\']|(?<=\w)\'(?=\w))*\'(?!\w)')
_ANNOUNCED = re.compile(r"\b(?:decision|diagnosis|answer|conclusion)(?: is)?\s*:?\s*$")
_SENTENCE = re.compile(r"[^.!?;\n]+[.!?;]*")
_BULLET = re.compile(r"^\s*(?:[-+\u2022]|\(?\d{1,2}\)|\(?[a-d]\))\s+")
_TOKEN = re.compile(r"[a-z0-9]+|[,:()/&+-]")

_ARTICLES = _set("a an the his her their my your our")
_OPENERS = _set(
    "so therefore thus hence ok okay then now finally and well overall please right good yes "
    "but sure hereby quite all "
)
_FILLERS = _set(
    "now today please then tablets tablet medicine medication pills prescription packet "
    "patient here indeed clearly this that there serenol tarvex dolorant calmadril drug right "
    "away immediately it "
)
_JOINTS = _set(
    ", : ( ) - / & + for in at with and by of to on as after before until once from while so "
)
_REASON = re.compile(r"\b(?:because|since|given|due to|owing to)\b")
_NEGATIONS = _set(
    "not no never without neither nor none against instead rather unlikely exclude excluded "
    "wrong false except hardly kidding skip avoid cancel withdraw "
)
_HEDGES = _set(
    "if unless maybe perhaps might may could would possibly probably likely presumably unsure "
    "uncertain or either whether provided assuming suppose supposing pending tentative "
    "tentatively provisional provisionally considering consider think guess leaning lean "
    "until when once otherwise suspect suspected should before after later versus vs depends "
    "depending seems apparently tempted preliminary "
)
_REPORTS = _set(
    "said says say told wrote writes wants asked asks according advised advises suggests "
    "suggested claims believes thinks hoped "
)
"""What others say is no decision of the agent's."""
_RETRACTION = re.compile(
    r"^(?:but )?(?:wait|actually|no\b|scratch that|never mind|on second thought|correction|forget"
    r"|just kidding|undo|cancel|i take (?:that|it) back|strike that|not so fast|hold on)"
)
_MARKER = re.compile(
    r"(?:(?:final |clinical )?(?:decision|diagnosis|answer|conclusion)(?: is)?(?: [:-])?(?: to)?"
    r"|(?:i|we)(?: now| hereby| have| therefore)* (?:decide|decided|diagnose|diagnosed|conclude"
    r"|concluded|commit|settle|choose|chose|go|recommend)(?: to| on| for| with| that(?: it is"
    r"| this is| patient has| you have)?)?"
    r"|(?:this|it) is|(?:you|patient|he|she) (?:have|has)|cause is) (?=[^ ])"
)
_SUBJECT = re.compile(
    r"(?:(?:i|we)(?: will| shall| am going to| are going to| now| hereby)*|let us) (?=[^ ])"
)
_ASKING = re.compile(
    r"(?:what|how|when|where|who|which|why|is|are|do|does|did|have|has|can|could|any)\b"
    r"|(?:(?:please|i|we|let|us|will|would|like|to|want|now|can|could|you|me)[ ,]+)*"
    r"(?:ask|order|measure|test|check|tell|describe|examine)\b"
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text says.

    Attributes:
        kind: ``decide`` or ``ask`` with a ``key``; ``unknown`` for a question that no sheet knows;
            ``nothing`` else.
        key: Of the decision or the question.
        notes: Of ``NOTES``, what was noticed.
    """

    kind: Kind
    key: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Sentence:
    """A sentence in lower case, with its words and signs one space apart.

    Attributes:
        claims: Without what is quoted; ``text`` has it all.
    """

    claims: str
    text: str
    is_question: bool


@lru_cache(maxsize=1 << 14)
def read(text: str, sheet: str) -> Reading:
    """Read a text.

    Args:
        text: What the agent says.
        sheet: Name of the sheet that it is said of.

    Example:
        >>> read("Thanks. Have your ankles been swollen lately?", "refill_pressure").key
        'ankles'
        >>> read("Decision: approve the refill.", "refill_pressure")
        Reading(kind='decide', key='refill', notes=())
        >>> read("Maybe I should approve the refill.", "refill_pressure").kind
        'nothing'
    """
    table = sheets()[sheet]
    sentences = _sentences(text)
    decided, notes = _decided(sentences, table)
    if decided:
        return Reading("decide", decided)
    if "several_decisions" in notes:
        return Reading("nothing", notes=notes)
    asked = list(dict.fromkeys(key for one in sentences for key in _asked(one, table)))
    if asked:
        more = ("several_questions",) if len(asked) > 1 else ()
        return Reading("ask", asked[0], notes + more)
    if any(one.is_question or _ASKING.match(one.text) for one in sentences):
        return Reading("unknown", notes=notes)
    return Reading("nothing", notes=notes)


def _plain(text: str) -> str:
    """Lower case, plain quotation marks, no markup, no contractions."""
    plain = _MARKUP.sub(" ", text[:_LONGEST].translate(_STYLED)).lower()
    for pattern, full in _CONTRACTIONS:
        plain = pattern.sub(full, plain)
    whole = _WHOLE.fullmatch(plain)
    return whole["text"] if whole else plain


def _sentences(text: str) -> list[_Sentence]:
    plain = re.sub(r":\s*\n+\s*", ": ", _plain(text))
    found: list[_Sentence] = []
    # Quoted words stay where they are announced as the decision itself, and are one word elsewhere.
    masked = _QUOTED.sub(lambda quote: _mask(quote, plain), plain)
    for piece in _SENTENCE.findall(masked):
        words = _words(_BULLET.sub("", piece))
        found.append(_Sentence(words, words, piece.rstrip().endswith("?")))
    # A question may be said in quotation marks, a decision may not.
    return [*found, *_quoted_questions(plain)]


def _mask(quote: re.Match[str], plain: str) -> str:
    if _ANNOUNCED.search(plain[: quote.start()]):
        return quote[0].strip("\"'.! ") + " "
    return " quotation "


def _quoted_questions(plain: str) -> list[_Sentence]:
    return [
        _Sentence("", _words(piece), piece.rstrip(' "').endswith("?"))
        for quote in _QUOTED.findall(plain)
        for piece in _SENTENCE.findall(quote.strip("\"'"))
    ]


def _words(text: str) -> str:
    """Words and signs one space apart, without articles."""
    tokens = _TOKEN.findall(text.replace("x-ray", "x ray").replace("d-dimer", "d dimer"))
    return " ".join(token for token in tokens if token not in _ARTICLES)


# --- decisions ----------------------------------------------------------------------------------


_SPEAKER = re.compile(r"(?:patient|mr|ms|mrs)(?: \w+)? :")
"""What follows is said by somebody else."""


def _decided(sentences: Sequence[_Sentence], sheet: Sheet) -> tuple[str, tuple[str, ...]]:
    """The one decision of a text and what was noticed; an empty key where there is none."""
    known = _phrases(sheet.name)
    chosen: list[str] = []
    notes: list[str] = []
    for one in sentences:
        if chosen and _RETRACTION.match(one.claims):
            chosen.clear()
            notes.append("negated_decision")
        if chosen and one.claims.startswith("or ") and _named(one.claims, known["words"]):
            notes.append("several_decisions")
        key, note = _claim(one, known)
        chosen += [key] if key else []
        notes += [note] if note else []
    if len(set(chosen)) > 1 or "several_decisions" in notes:
        return "", ("several_decisions",)
    return (chosen[0] if chosen else ""), tuple(dict.fromkeys(notes))


def _claim(one: _Sentence, known: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
    """The decision that a sentence makes, or why a sentence that seems to make one does not."""
    words = _without_openers(one.claims)
    if not words or one.is_question or _SPEAKER.match(words):
        return "", ""
    claim, *_ = _REASON.split(words)
    start, named = _start(claim), _named(claim, known["words"])
    if start is None:
        # The bare phrase is the whole sentence, and so has no room for a second one.
        found = _at_start(claim, known["bare"])
        alone = found is not None and set(found[1].split()) <= {*_FILLERS, ","}
        return (found[0], "") if found is not None and alone else ("", "")
    if not named:
        return "", ""
    if len(named) > 1:
        return "", "several_decisions"
    others = set(_blanked(claim, known["words"]).split())
    if (_HEDGES | _REPORTS) & others:
        return "", "hedged_decision"
    if _NEGATIONS & others:
        return "", "negated_decision"
    found = _at_start(claim[start:], known["words"])
    return (found[0], "") if found is not None and _is_closed(found[1]) else ("", "")


def _start(claim: str) -> int | None:
    """Where the words begin that say what is decided; None where the claim decides nothing."""
    at = 0
    while True:
        clause = claim[at:]
        for pattern in (_MARKER, _SUBJECT):
            found = pattern.match(clause)
            if found:
                return at + found.end()
        comma = claim.find(" , ", at)
        if comma < 0:
            return None
        at = comma + 3
        at += len(claim[at:]) - len(_without_openers(claim[at:]))


def _without_openers(words: str) -> str:
    """Without the words before a claim that say nothing."""
    tokens = words.split()
    while tokens and (tokens[0] in _OPENERS or tokens[0] in (",", "-", ":", "(")):
        tokens = tokens[1:]
    return " ".join(tokens)


def _at_start(words: str, known: Mapping[str, str]) -> tuple[str, str] | None:
    """The decision whose phrase stands at the beginning, and the words behind it."""
    tokens = words.split()
    while tokens and tokens[0] in (*_FILLERS, ":", "-", ","):
        tokens = tokens[1:]
    text = " ".join(tokens) + " "
    for phrase, key in known.items():
        if text.startswith(f"{phrase} "):
            return key, text[len(phrase) :].strip()
    return None


def _is_closed(tail: str) -> bool:
    """Whether a phrase ends here: behind it are words that say nothing, then a joint or the end."""
    for word in tail.split():
        if word in _JOINTS:
            return True
        if word not in _FILLERS:
            return False
    return True


def _named(words: str, known: Mapping[str, str]) -> tuple[str, ...]:
    """All decisions whose phrases occur; a longer phrase hides the shorter ones inside it."""
    text, found = f" {words} ", list[str]()
    for phrase, key in known.items():
        if f" {phrase} " in text:
            found.append(key)
            text = text.replace(f" {phrase} ", " ; ")
    return tuple(dict.fromkeys(found))


def _blanked(words: str, known: Mapping[str, str]) -> str:
    """Without the phrases of decisions, whose own words are neither hedges nor negations."""
    text = f" {words} "
    for phrase in known:
        text = text.replace(f" {phrase} ", " ; ")
    return text


# --- questions ----------------------------------------------------------------------------------


def _asked(one: _Sentence, sheet: Sheet) -> list[str]:
    """The questions of a sentence in the order of their phrases."""
    text = f" {one.text} "
    found: list[tuple[int, int, str]] = []
    for phrase, key in _phrases(sheet.name)["questions"].items():
        at = text.find(f" {phrase} ")
        if at >= 0 and (one.is_question or not _NEGATIONS & set(text[:at].split())):
            found.append((at, -len(phrase), key))
    keys: list[str] = []
    end = -1
    for at, length, key in sorted(found):
        # A phrase inside a longer one that was found is a part of it.
        if at >= end:
            keys.append(key)
            end = at - length
    return keys


@lru_cache(maxsize=64)
def _phrases(name: str) -> Mapping[str, Mapping[str, str]]:
    """Phrases of a sheet as they are compared, to keys; longer ones first."""
    sheet = sheets()[name]
    groups = {
        "words": [(word, key) for key, one in sheet.decisions.items() for word in one.words],
        "bare": [(word, key) for key, one in sheet.decisions.items() for word in one.bare],
        "questions": [(word, key) for key, one in sheet.questions.items() for word in one.words],
    }
    return {
        group: {_words(_plain(word)): key for word, key in sorted(pairs, key=_longest_first)}
        for group, pairs in groups.items()
    }


def _longest_first(pair: tuple[str, str]) -> tuple[int, str]:
    return -len(pair[0]), pair[0]
