"""From what a judge writes to a verdict.

``parse_published`` reads as the published experiments do: one exact word, and whatever else the
judge writes makes the question invalid. ``parse_answer`` reads an answer however it is spelled and
marked; where none can be found, or two contradict each other, the judge has failed
(``Verdict.ERROR``), which costs the player nothing.

The grammar of ``parse_answer``, for the text behind the last thinking block::

    reply   := tagged | untagged
    tagged  := <answer> answer </answer>    the last tag decides, no other may contradict it; the
                                            closing tag may lack, and the opening one
    untagged:= answer                       the whole text
             | WORD stop anything           "Yes. A dog is an animal."
             | anything label WORD stop     "... so the answer is: **no**."
             | anything stop WORD           a last sentence or line of one word
             | anything, link WORD          "..., so yes."
    answer  := WORD | WORD stop anything | label WORD
    WORD    := yes | no | repeated | invalid | finished, in any case and markup

A word at the very end of a text that was cut off may be the beginning of another word, so it does
not count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.envs.answers import JUDGE_WORDS, UNRECOGNISED
from delta_belief_rl.envs.goal_phrase import GOAL_PHRASE
from delta_belief_rl.types import Verdict

ParserName = Literal["grammar", "published"]

VERDICTS: Mapping[str, Verdict] = {
    "yes": Verdict.YES,
    "no": Verdict.NO,
    "repeated": Verdict.REPEATED,
    "invalid": Verdict.INVALID,
    "finished": Verdict.WIN,
}


@dataclass(frozen=True, slots=True)
class Parsed:
    """What was read.

    Attributes:
        word: One of the judge's five words; empty for an error and for a free reply.
        reason: Why there is no answer; empty where there is one.
        text: A free reply, as the player is to read it.
        score: A grade in [0, 1]; None where none was given.
    """

    verdict: Verdict
    word: str = ""
    reason: str = ""
    text: str = ""
    score: float | None = None


Parser = Callable[[str, bool, bool], Parsed]
"""``(text, tagged, finished)``: see ``parse_answer``."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_PUBLISHED_DROPS = re.compile(r"[^A-Za-z0-9., ]")

_AROUND = (
    r"(?:[\s.!,;:*_`\"'\u2018\u2019\u201c\u201d#()\[\]\u2013\u2014-]|</?(?:b|i|em|strong|p)>)*"
)
"""Punctuation and markup that change nothing of a phrase. A question mark does."""
_GOAL_SAID = re.compile(rf"{_AROUND}goal[\s_*-]+reached{_AROUND}", re.IGNORECASE)
_GOAL_SPOKEN = re.compile(r"goal[\W_]{0,5}reached", re.IGNORECASE)

_THOUGHT = re.compile(r".*</think(?:ing)?>", re.IGNORECASE | re.DOTALL)
_THINKING = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_FREE_OPEN = re.compile(r"<\s*answer\s*>", re.IGNORECASE)
_FREE_CLOSE = re.compile(r"<\s*/\s*answer\s*>", re.IGNORECASE)
_GOES_ON = re.compile(r"[^\S\n]*[,;:\u2013\u2014-]?[^\S\n]*[^\W\d_A-Z]")
_OPEN, _CLOSE = re.compile(r"<\s*answer\s*>"), re.compile(r"<\s*/\s*answer\s*>")
_MARKUP = re.compile(
    r"[*_`\"'#~$\u2018\u2019\u201c\u201d\u00ab\u00bb\u300c\u300d]+|\\(?:boxed|text)"
)
_BRACES = str.maketrans("{}[]()", "      ")

_WORD = rf"(?P<word>{'|'.join(JUDGE_WORDS)})"
_AHEAD = r"(?=\s*(?:[.,;:!?|<\u2026\u3002]|-+\s|[\u2013\u2014]|\n|\Z))"
_STOP = r"(?:\A|[.!?;:\n>\u2026\u3002])"
_LABEL = (
    r"\b(?:answer|verdict|reply|response|output|result|judg(?:e)?ment|conclusion)\b\s*"
    r"(?:(?:is|be|would be|should be|must be|will be)\b\s*)?[:=>\-]*\s*(?:simply\s+)?"
)
_LINK = r"(?:,|\b(?:so|therefore|thus|hence|then)\b,?)\s*"
_LEADING = re.compile(rf"\A[\s\-:]*{_WORD}{_AHEAD}")
_LEADING_CLAUSE = re.compile(r"\A\s*(?P<word>yes|no),?\s+(?:it|they|this|that)\b")
_LABELLED = re.compile(rf"{_LABEL}{_WORD}{_AHEAD}")
_CLOSING = re.compile(rf"(?:{_STOP}[\s\-]*|{_LINK}){_WORD}\s*[.!]*\s*\Z")
_STANDING = re.compile(rf"(?:\A|(?<=[\s>.,;:!?])){_WORD}{_AHEAD}")


def published_reply(text: str, tagged: bool) -> str:
    """What the published experiments keep of a judge's text, in any of their environments.

    The contents of all answer tags (or, without ``tagged``, the whole text) lose every character
    but ASCII letters, digits, points, commas and spaces, and become lower case.

    Source: the reference implementation.
    """
    if tagged:
        text = " ".join(match.strip() for match in _TAGGED.findall(text))
    return _PUBLISHED_DROPS.sub("", text).strip().lower()


def behind_thought(text: str) -> str | Parsed:
    """A text in its compatible form (NFKC) behind its last thinking block; an error inside one."""
    text = _THOUGHT.sub("", unicodedata.normalize("NFKC", text))
    if _THINKING.search(text):
        return Parsed(Verdict.ERROR, reason="the text ended before the thinking did")
    return text


@dataclass(frozen=True, slots=True)
class Tagged:
    """What stands in the last answer tag of a text.

    Attributes:
        content: Without further tags.
        closed: The tag has a closing one; else the text ends in it.
        last: The sentence does not go on behind the closing tag. A judge may well explain itself
            there, but "I would write <answer>...</answer> if ..." is no reply.
    """

    content: str
    closed: bool
    last: bool


def last_tag(text: str) -> Tagged | None:
    """The last answer tag of a text, in any case; None where it has none.

    Example:
        >>> last_tag("Hm. <answer>It is locked.</answer>")
        Tagged(content='It is locked.', closed=True, last=True)
        >>> last_tag("I would write <answer>Goal reached</answer> if it were so.").last
        False
    """
    _, *opened = _FREE_OPEN.split(text)
    if not opened:
        return None
    content, *behind = _FREE_CLOSE.split(opened[-1])
    goes_on = bool(behind) and _GOES_ON.match(behind[-1]) is not None
    return Tagged(" ".join([content, *behind[:-1]]), bool(behind), not goes_on)


def goal_reply(reply: str, whole: bool = True) -> Parsed | None:
    """What a free reply says of the goal; None where it does not speak of it.

    A win is the phrase "Goal reached" alone, but for punctuation and markup. Any other reply that
    contains it ("Goal reached? No.") is an error, so that the judge is asked again: a player may
    have said the phrase for the judge to echo it.

    Args:
        reply: Without tags and thoughts.
        whole: False for a reply whose sentence goes on, or might have gone on where the token
            limit cut it off.

    Example:
        >>> goal_reply("**Goal reached!**").verdict, goal_reply("Goal reached - not yet.").verdict
        (<Verdict.WIN: 'win'>, <Verdict.ERROR: 'error'>)
    """
    if whole and _GOAL_SAID.fullmatch(reply):
        return Parsed(Verdict.WIN, text=f"{GOAL_PHRASE.capitalize()}.")
    if _GOAL_SPOKEN.search(reply):
        return Parsed(Verdict.ERROR, reason="the goal phrase stands inside another reply")
    return None


def parse_published(text: str, tagged: bool, finished: bool = True) -> Parsed:
    """Read a judge's text as the published experiments do.

    The contents of all answer tags (or, without ``tagged``, the whole text) lose every character
    but ASCII letters, digits, points, commas and spaces. The first word must be one of the five
    exactly, so "yes." is none; anything else is invalid, with the reason ``UNRECOGNISED``.

    Args:
        text: What the judge wrote.
        tagged: The judge was told to put its answer in tags.
        finished: Not read; for the form of ``Parser``.

    Source: the reference implementation.
    """
    words = published_reply(text, tagged).split()
    if words and words[0] in VERDICTS:
        return Parsed(VERDICTS[words[0]], words[0])
    return Parsed(Verdict.INVALID, "invalid", UNRECOGNISED)


def parse_answer(text: str, tagged: bool = True, finished: bool = True) -> Parsed:
    """Read a judge's text by the grammar of the module's head.

    Never raises, whatever the text. ``Verdict.INVALID`` and ``Verdict.WIN`` are the judge's own
    words, never a way to say that nothing was understood.

    Args:
        text: What the judge wrote.
        tagged: The judge was told to put its answer in tags. Tags are read without it, too.
        finished: False for a text that the token limit cut off.

    Example:
        >>> parse_answer("It barks, so it is one. <answer>**Yes**.</answer>").verdict
        <Verdict.YES: 'yes'>
        >>> parse_answer("I would rather not say.").reason
        'no answer was found'
    """
    said = behind_thought(text)
    if isinstance(said, Parsed):
        return said
    text = _clean(said)
    if not text.strip():
        return Parsed(Verdict.ERROR, reason="the text is empty")
    contents = _tag_contents(text, finished)
    if contents:
        return _from_tags(contents)
    return _verdict(_untagged(text if finished else _without_cut_word(text)))


def _clean(text: str) -> str:
    """Lower case, markup replaced by spaces, so that it never joins two words."""
    return _MARKUP.sub(" ", text.lower()).translate(_BRACES)


def _tag_contents(text: str, finished: bool) -> list[str]:
    """What stands in answer tags, in order; a tag that lacks its partner ends with the text."""
    parts = [_CLOSE.split(part, maxsplit=1) for part in _OPEN.split(text)]
    contents = [part[0] for part in parts[1:]]
    if contents and not finished and len(parts[-1]) == 1:
        contents[-1] = _without_cut_word(contents[-1])
    if not contents and len(parts[0]) > 1:
        last_line = parts[0][0].strip().rsplit("\n", 1)[-1]
        contents = [re.split(r"[.!?:]\s+(?=\S)", last_line)[-1]]
    return contents


def _from_tags(contents: list[str]) -> Parsed:
    words = [_tag_word(content) for content in contents]
    if not words[-1]:
        return Parsed(Verdict.ERROR, reason="the answer tag holds no answer")
    if len(set(words) - {""}) > 1:
        return Parsed(Verdict.ERROR, reason="the answer tags contradict each other")
    return Parsed(VERDICTS[words[-1]], words[-1])


def _tag_word(content: str) -> str:
    """The answer in a tag, or an empty string."""
    for pattern in (_LEADING, _LEADING_CLAUSE, _LABELLED):
        match = pattern.search(content)
        if match:
            return _uncontradicted(content, match)
    return ""


def _untagged(text: str) -> str:
    """The answer of a text without tags; empty where there is none, ``?`` where it is unclear.

    The word that stands last decides, and no other answer may stand behind it.
    """
    found = [*_LABELLED.finditer(text)]
    found += [m for m in (_LEADING.search(text), _LEADING_CLAUSE.search(text)) if m]
    found += [m for m in (_CLOSING.search(text),) if m]
    if not found:
        return ""
    labelled = {match["word"] for match in _LABELLED.finditer(text)}
    if len(labelled) > 1:
        return "?"
    return _uncontradicted(text, max(found, key=lambda match: match.start("word"))) or "?"


def _uncontradicted(text: str, match: re.Match[str]) -> str:
    """The word of a match; empty when another answer stands behind it."""
    later = {other["word"] for other in _STANDING.finditer(text, match.end("word"))}
    return match["word"] if later <= {match["word"]} else ""


def _without_cut_word(text: str) -> str:
    """The text without its last word unless something closes it."""
    return re.sub(r"\w+\Z", "", text)


def _verdict(word: str) -> Parsed:
    if word == "?":
        return Parsed(Verdict.ERROR, reason="the answers contradict each other")
    if not word:
        return Parsed(Verdict.ERROR, reason="no answer was found")
    return Parsed(VERDICTS[word], word)


PARSERS: Mapping[ParserName, Parser] = {
    "grammar": parse_answer,
    "published": parse_published,
}
