"""Rewriting of English yes/no questions into the few forms that a phrase table can be looked up by.

Nothing here knows a world. Every function maps text to text; the grammar then looks results up
exactly, so a rewriting that produces nonsense finds nothing, and never another question's answer.

Two levels of canonical text exist. ``plain`` keeps every word of content and only unifies spelling
of the same sentence (case, quotes, fillers, what "it" is called). ``loose`` also drops articles and
hedges and unifies who acts ("people", "you", "one").
"""

from __future__ import annotations

import re

from delta_belief_rl.envs.answers import normalise, strip_fillers

_AUX = "is|are|can|could|may|might|do|does|did|will|would|should|has|have|was|were"
_THING = "(?:secret )?(?:thing|object|item|word|answer|secret|target)"

_CONTRACTIONS = (
    (re.compile(r"(?<=\w) ?' (?=(?:s|t|re|ve|d|ll)\b)"), "'"),
    (re.compile(r"\bit's got\b"), "it has"),
    (re.compile(r"\b(it|that|this|what|there)'s\b"), r"\1 is"),
    (re.compile(r"\b(you|they|we)'re\b"), r"\1 are"),
    (re.compile(r"\b(i|you)'d\b"), r"\1 would"),
    (re.compile(r"\bi'm\b"), "i am"),
    (re.compile(r"\b(?:can't|cannot)\b"), "can not"),
    (re.compile(r"\bwon't\b"), "will not"),
    (re.compile(r"(?<=[a-z])n't\b"), " not"),
)
_SUBJECTS = (
    re.compile(rf"\b(?:the )?{_THING}(?: that)? you(?: are|'re)? (?:thinking of|have in mind)\b"),
    re.compile(r"\b(?:what|something|the thing) you are thinking of\b"),
    re.compile(rf"\b(?:the|this|that|your|our) (?:secret |mystery )?{_THING}\b"),
)
_DEMONSTRATIVE = re.compile(rf"^({_AUX}) (?:this|that) (?=\S)")

_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMBERS = {str(value): word for value, word in enumerate(_NUMBER_WORDS.split())}
_SPELLING = {
    **_NUMBERS,
    "colour": "color",
    "colours": "colors",
    "coloured": "colored",
    "colourful": "colorful",
    "grey": "gray",
    "aluminium": "aluminum",
    "fibre": "fiber",
    "fibres": "fibers",
    "centre": "center",
    "metre": "meter",
    "metres": "meters",
    "centimetre": "centimeter",
    "centimetres": "centimeters",
    "litre": "liter",
    "jewellery": "jewelry",
    "tyre": "tire",
    "tyres": "tires",
    "favourite": "favorite",
    "flavour": "flavor",
    "flavoured": "flavored",
    "odour": "odor",
    "neighbour": "neighbor",
    "moustache": "mustache",
    "plough": "plow",
}
_DROPPED_WORDS = (
    "a an the any usually normally typically generally commonly mostly mainly primarily actually "
    "really basically perhaps maybe possibly ever"
)
_DROPPED = frozenset(_DROPPED_WORDS.split())
_GENERIC = re.compile(
    rf"^(?:({_AUX}) )(?:most people|some people|people|humans|persons|we|one|someone|"
    r"somebody|anyone|anybody|i) "
)
_LOOSE_OPENINGS = (
    (re.compile(r"^(?:has|have) it (?:got )?(?!been )"), "does it have "),
    (re.compile(r"^(?:could|might|may) it be "), "is it "),
    (re.compile(r"^could it "), "can it "),
    (re.compile(r"^is it able to "), "can it "),
    (re.compile(r"^does you "), "do you "),
    (re.compile(r"\b(?:type|sort) of (?!thing)"), "kind of "),
)

_SAY = (
    re.compile(
        r"^(?:would|do|could|can) (?:you|we) (?:please )?"
        r"(?:say|think|agree|believe|suppose|confirm|tell me|guess)(?: that| if| whether)? "
    ),
    re.compile(r"^(?:please )?tell me (?:if|whether) "),
    re.compile(
        r"^i (?:wonder|am wondering|want to know|would like to (?:know|ask)) (?:if|whether) "
    ),
    re.compile(r"^is it (?:true|correct|right|the case|fair to say|accurate to say) that "),
    re.compile(r"^would it be (?:fair|right|correct|true|accurate)(?: to say)? that "),
)
_CALL = re.compile(
    r"^(?:would|do|can|could) you (?:call|consider|describe|classify|regard) it (?:to be |as )?"
)
_SOMETHING = re.compile(
    r"^(?:is|could) it (?:be )?"
    r"(?:something|a thing|an object|an item|(?:the|a) (?:kind|sort|type) of thing)"
    r"(?: that| which)? "
)
_THINKING = re.compile(r"^are you thinking (?:of|about) (?=\S)")
_MODALS = frozenset(
    ("is", "can", "could", "has", "was", "will", "would", "should", "may", "might", "does")
)
_PERSONS = frozenset(("you", "people", "we", "one", "someone", "somebody", "humans"))


def plain(text: str) -> str:
    """Unify how the same words can be written; no word of content is lost.

    Normal form, contractions written out, hyphens as spaces, fillers removed, and "the thing", "the
    secret", "this object" and the like replaced by "it".

    Example:
        >>> plain("So, is the secret thing man-made?")
        'is it man made'
    """
    text = normalise(text)
    for pattern, replacement in _CONTRACTIONS:
        text = pattern.sub(replacement, text)
    text = " ".join(re.sub(r"\s*-\s*", " ", text).split())
    text = strip_fillers(text)
    text = re.sub(r"^is it the (?:secret )?word (?=\S)", "is it ", text)
    for pattern in _SUBJECTS:
        text = pattern.sub("it", text)
    return spell(_DEMONSTRATIVE.sub(r"\1 it ", text))


def spell(text: str) -> str:
    """Write numbers up to twelve as words and British spellings as American ones."""
    return " ".join(_SPELLING.get(word, word) for word in text.split())


def loose(text: str) -> str:
    """Canonical text in which articles, hedges and the generic person no longer matter.

    Args:
        text: A result of ``plain``.

    Example:
        >>> loose("do people usually keep it in the house")
        'do you keep it in house'
    """
    text = text.replace('"', "").replace("'", "")
    text = _GENERIC.sub(r"\1 you ", text)
    for pattern, replacement in _LOOSE_OPENINGS:
        text = pattern.sub(replacement, text)
    return " ".join(word for word in text.split() if word not in _DROPPED)


def rephrasings(text: str) -> list[str]:
    """Direct questions that a question in a polite or relative wrapper may stand for.

    "Would you say it can fly" gives "can it fly"; "is it something you eat" gives "do you eat it"
    among others that mean nothing. The text itself is not among them.

    Args:
        text: A result of ``plain``.
    """
    for pattern in _SAY:
        if match := pattern.match(text):
            statement = text[match.end() :]
            return questions_from_statement(statement)
    if match := _CALL.match(text):
        return ["is it " + text[match.end() :]]
    if match := _THINKING.match(text):
        return ["is it " + text[match.end() :]]
    if match := _SOMETHING.match(text):
        return _from_relative(text[match.end() :])
    return []


def questions_from_statement(statement: str) -> list[str]:
    """Turn "it is alive", "it has legs", "people eat it" into candidate questions.

    Example:
        >>> questions_from_statement("it flies")
        ['does it flie', 'does it fly', 'does it fli']
    """
    words = statement.split()
    if len(words) < 2:
        return []
    subject, verb, rest = words[0], words[1], words[2:]
    if subject == "it" and verb == "has":
        return [" ".join(["does it have", *rest])]
    if subject == "it" and verb in _MODALS:
        return [" ".join([verb, "it", *rest])]
    if subject == "it":
        return [" ".join(["does it", stem, *rest]) for stem in _stems(verb)]
    if subject not in _PERSONS:
        return []
    if verb in _MODALS:
        return [" ".join([verb, subject, *rest])]
    return [" ".join(["do", subject, verb, *rest])]


def _from_relative(clause: str) -> list[str]:
    """Questions for "is it something CLAUSE": the clause lacks the word "it" somewhere."""
    words = clause.split()
    if words[0] == "with":
        return [" ".join(["does it have", *words[1:]])]
    found = [*questions_from_statement("it " + clause), "is it " + clause]
    if words[0] in _PERSONS:
        for at in range(2, len(words) + 1):
            found += questions_from_statement(" ".join([*words[:at], "it", *words[at:]]))
    return found


def _stems(verb: str) -> list[str]:
    """Base forms that a third-person verb may have."""
    stems: list[str] = []
    if verb.endswith("s") and not verb.endswith("ss"):
        stems.append(verb[:-1])
    if verb.endswith("ies"):
        stems.append(verb[:-3] + "y")
    if verb.endswith("es"):
        stems.append(verb[:-2])
    return stems
