"""Whom a detective's text accuses, and of what it speaks in proof.

Everyone whom a text accuses counts: "I accuse A or B", "I accuse A. Or it was B.", "I accuse A; my
reserve is B" and "A and B did it" accuse two people. Whoever comes behind a reason ("because",
"who", ...) only helps to explain, and questions, hedges ("A may be the murderer"), what somebody
else says, and quotations accuse nobody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from delta_belief_rl.envs.murder_mystery.clauses import ASK_VERBS, sentences, with_people
from delta_belief_rl.envs.murder_mystery.data import Case
from delta_belief_rl.envs.murder_mystery.words import speaks_of, tokens

EVERYONE = "everyone"
"""Stands among the accused for "all of them", "both", "everybody"."""

MANY_PEOPLE = re.compile(
    r"\b(?:everyone|everybody|all(?= (?:but|except|other))|"
    r"all (?:of )?(?:the |them|these|those|suspect|people|witness|person)|"
    r"each (?:of |suspect|person|witness)|every (?:suspect|person|witness|one|body)|"
    r"the suspect(?= (?:one by one|in turn))|anyone|anybody|both of (?:them|these))"
)

_MURDER = (
    r"(?:(?:killed|murdered|poisoned|did it|did this|did the (?:murder|deed|crime))\b|"
    r"committed (?:the|this) (?:murder|crime)|(?:shot|stabbed|strangled|pushed|drowned|smothered|"
    r"bludgeoned|struck|slew|drugged|electrocuted|suffocated|choked|crushed|gassed|blew up) "
    r"(?:#v|him|her|the victim|down (?:#v|him|her)))"
)
_GUILTY = (
    r"(?:killer|murderer|murderess|culprit|guilty|perpetrator|assassin|"
    r"one who (?:did|killed|murdered|poisoned|committed))"
)
_CUT = re.compile(
    r"\b(?:because|since|given|for|of|as|due|whose|based|"
    r"who(?! (?:did|killed|murdered|poisoned|committed))|"
    r"when|while|so|in|at|on|by|using|from|after|that|to|with(?! #))\b| : "
)
_VERB_OF_ACCUSING = re.compile(
    r"\b(?:(?:i|we)(?: \w+){0,3}|^(?:\W|\b(?:so|now|then|please|therefore|and|final|action|:)\b)*)"
    r"\s*(?P<verb>\baccuse|\barrest|\bcharge|\baccusing|\barresting|\bcharging)\b(?P<rest>.*)"
)
_NAMED_GUILTY = re.compile(
    rf"\b(?:{_GUILTY}(?: (?:party|person|in this case))?|accusation|verdict|conclusion|"
    r"final answer|answer|accused) ?(?:is|are|was|were|:|must be|has to be)(?: (?:that|it|is|was|"
    r"clearly|:|the|our|none|other|than|both|either|against))* (?P<rest>#.*)"
)
_GUILT = re.compile(
    rf"(?P<names>#\w+(?: (?:,|and|or|&|/|the|both|maybe|perhaps|#\w+))*)"
    rf"(?: (?:,|both|all))*(?: (?:is|are|was|were|must be|has to be) "
    rf"(?:(?:the|clearly|really|true|real|actual|our|my|a|indeed|only|person|also)\s)*{_GUILTY}\b|"
    rf" (?:clearly |really |indeed |must have |has |have |who )?{_MURDER}\b)"
)
_BY = re.compile(r"\b(?:killed|murdered|poisoned|shot|stabbed|strangled) by (?P<rest>#.*)")
_RESPONSIBLE = re.compile(
    r"(?P<rest>#\w+(?: (?:,|and|or|#\w+))*) (?:is|are|was|were) (?:\w+ )?responsible for "
    r"(?:(?:the|this|#v|his|her) )*(?:murder|death|crime|killing)\b"
)
_AS_THE_KILLER = re.compile(
    rf"(?P<rest>#\w+(?: (?:,|and|or|#\w+))*) as (?:the|our|my) (?:true |real )?{_GUILTY}\b"
)
_IT_WAS = re.compile(
    r"^(?:(?:so|therefore|then|thus|and|,) )*"
    r"(?:(?:i|we) (?:think|believe|conclude|know|am (?:sure|certain|convinced))(?: that)? )?"
    r"it (?:is|was|must have been|has to be|must be) (?P<rest>#\w+(?: (?:,|and|or|#\w+))*)"
    r"(?= (?:who|that|because|since|,|:|and|or|with|by|all)\b|\W*$)"
)
_ONE_MORE = re.compile(
    r"#\w+ (?:, )?(?:together with|along with|alongside|as well as|plus|and also|or else|aided by|"
    r"helped by|with the help of|with help from|or(?: \w+){1,3}|if not|alternatively|otherwise) "
    r"(?:also |else |maybe |perhaps |it was )*(?P<who>#\w+)"
)
_ACCOMPLICE = re.compile(r"(?P<who>#\w+) (?:is|was|as) (?:the |an |her |his |their )?accomplice\b")
_OR_RATHER = re.compile(
    r"^(?:(?:or|alternatively|otherwise|failing that|if (?:not|(?:that|this) (?:is|was) \w+|"
    r"(?:he|she) (?:is|was) (?:not|innocent)(?: \w+)?))\b(?: (?!not\b)(?:,|\w+)){0,4}? "
    r"(?P<who>#\w+)(?= (?:did|killed|murdered|is)\b|\W*$)|"
    r"(?:maybe|perhaps|possibly|also|and also|plus|as well as|then|next|secondly|after that)"
    r"(?: (?:,|also|even|it was))* "
    r"(?P<also>#\w+)\W*$)"
    r"|\b(?:second|other|next|alternative|backup|third) (?:choice|guess|accusation|option)\b"
    r"[^#]*(?P<next>#\w+)"
    r"|^(?:it |the \w+ )?(?:could|may|might) (?:also |well |equally )*(?:be|have been) (?P<or>#\w+)"
)
"""Alone such a sentence accuses nobody; behind an accusation it adds to the accused."""
_RESERVE_NOUN = (
    r"(?:reserve|fall ?back|back ?up|stand in|substitute|runner up|plan b|alternative|"
    r"(?:second|next|third) (?:suspect|culprit|candidate|pick|name|best))"
)
_RESERVE = re.compile(
    r"\b(?:failing (?:that|this|which|him|her|#\w+)|in case|in the event|unless|instead(?! of)|"
    rf"otherwise|{_RESERVE_NOUN}|(?:if|should|supposing|where|when)\b(?: (?!because)\S+){{0,6}}? "
    r"(?:innocent|wrong|mistaken|incorrect|not|fail\w*|acquitted|cleared))\b(?P<rest>.*)"
)
"""What comes behind a first choice; whoever is named behind it is a second one."""
_IS_RESERVE = re.compile(
    r"(?P<who>#\w+)(?: ,)?(?: \w+){0,2}? (?:instead(?! of)|otherwise)\b|"
    rf"(?P<noun>#\w+)(?: ,)? (?:is|as|being|would be|remain)(?: \w+){{0,2}} {_RESERVE_NOUN}\b"
)
_OR = re.compile(r"\bor\b(?: (?!because|since|who|whose|not|nor)[^#\s]+){0,8} (?P<who>#\w+)")
_OR_AT_THE_END = re.compile(r", or(?: [^#\s]+){0,8} (?P<who>#\w+)\W*$")
_PLAIN_REASON = re.compile(r"\b(?:because|since|for|given|as|who|whose)\b| : ")
_CHOSEN = re.compile(
    r"(?P<who>#\w+)(?!(?: ,)? (?:has|have|had|was|were|does|cannot|never|did(?! (?:it|this|the))|"
    r"is (?:not|innocent)|(?:would|could|might|can|will)(?: not)? (?:have|not))\b)"
)
"""A person of whom nothing is told that would explain or clear."""
_JOINED_REASON = re.compile(
    r"(?:\band|\bor|,)(?: also| then)? (?P<who>#\w+) (?:of|because|since)\b"
)
_NOT = re.compile(r"\b(?:not|never|nobody|neither|cannot|innocent|no)\b")
_NOT_THEM = re.compile(
    r"\b(?:and not|not|rather than|instead of|neither)(?: the)? #\w+"
    r"(?: (?:, )?(?:or|nor|and|,) #\w+)*"
)
_HEDGE = re.compile(
    r"\b(?:might|may|maybe|could|perhaps|possibly|if|suspect|wonder|whether|unless|seem|appear|"
    r"suppose|thought|say|said|claim|claimed|told|heard|saw|mentioned|asked|why|how|"
    r"according|would|should|did you)\b"
)
_QUOTED = re.compile(
    r"\"[^\"]*\"|\u201c[^\u201d]*\u201d|\u00ab[^\u00bb]*\u00bb|(?<!\w)'[^']{12,}'(?!\w)"
)
_OWNED = re.compile(r"['\u2019]s(?=\s*(?:[.,;:!?]|$))")


@dataclass(frozen=True, slots=True)
class Accusation:
    """What an accusing text says.

    Attributes:
        accused: Names in order; the victim or ``EVERYONE`` may be among them. Empty where the
            text accuses somebody whom the case does not know.
        named: Decisive clues that the text names, whether found or not.
        motive: The text names the motive.
        means: The text names the means.
    """

    accused: tuple[str, ...]
    named: tuple[str, ...] = ()
    motive: bool = False
    means: bool = False


def read_accusation(case: Case, text: str) -> Accusation | None:
    """Whom a text accuses and why; None for a text that accuses nobody."""
    # "It is Mary's." accuses nobody.
    words = tokens(_OWNED.sub(" property", _QUOTED.sub(" ", text)))
    marks: list[str] = []
    further: list[str] = []
    accusing = False
    # Only sentences are cut here: "A, and B, did it" is one.
    for clause in sentences(case, words):
        if clause.ends == "?" or clause.verb in ASK_VERBS:
            continue
        sentence = with_people(case, clause)
        found, explicit = _accused(sentence)
        accusing = accusing or explicit
        marks += found
        if match := _OR_RATHER.search(sentence):
            further += [mark for mark in match.groups() if mark]
        further += [match["who"] for match in _ACCOMPLICE.finditer(sentence)]
        if marks:
            further += _reserves(sentence)
            further += _after_or(sentence) if found else []
    if not marks:
        return Accusation(()) if accusing else None
    marks += further
    # "A, nephew of the victim" accuses A alone.
    marks = [mark for mark in marks if mark != "#v"] or ["#v"]
    names = [_name(case, mark) for mark in dict.fromkeys(marks)]
    everything = tokens(text)
    return Accusation(
        accused=tuple(names),
        named=tuple(key for key, own in case.decisive.items() if speaks_of(everything, own)),
        motive=speaks_of(everything, case.motive.words),
        means=speaks_of(everything, case.means.words),
    )


def _accused(text: str) -> tuple[list[str], bool]:
    """Marks of the people that a sentence accuses, and whether it has a verb of accusing."""
    text = MANY_PEOPLE.sub("#all ", _NOT_THEM.sub(" ", text))
    text = re.sub(r" +", " ", text)
    text = re.sub(r"\b(?:both|they all|all three|all four)\b(?= (?:#|of|are|did))", "", text)
    marks: list[str] = []
    explicit = False
    for match in _VERB_OF_ACCUSING.finditer(text):
        if _NOT.search(match[0][: match.start("rest") - match.start()]):
            continue
        explicit = True
        marks += re.findall(r"#\w+", _until_reason(match["rest"]))
    plain = _until_reason(text)
    if not _NOT.search(plain) and not _HEDGE.search(plain):
        for pattern in (_NAMED_GUILTY, _IT_WAS, _BY, _RESPONSIBLE, _AS_THE_KILLER):
            if match := pattern.search(text):
                marks += re.findall(r"#\w+", _until_reason(match["rest"]))
        for match in _GUILT.finditer(plain):
            marks += re.findall(r"#\w+", match["names"])
    if marks:
        marks += [match["who"] for match in _ONE_MORE.finditer(text)]
        marks += [match["who"] for match in _JOINED_REASON.finditer(text)]
    return marks, explicit


def _reserves(text: str) -> list[str]:
    """Marks of the people whom a sentence names in case that the first choice is wrong."""
    text = _NOT_THEM.sub(" ", text)
    marks = [mark for match in _IS_RESERVE.finditer(text) for mark in match.groups() if mark]
    if match := _RESERVE.search(text):
        marks += [chosen["who"] for chosen in _CHOSEN.finditer(match["rest"])]
    return marks


def _after_or(text: str) -> list[str]:
    """Marks of the people that come behind an "or" of an accusing sentence.

    In a reason only who ends the sentence: "because A or B told me" accuses neither.
    """
    text = _NOT_THEM.sub(" ", text)
    plain = _PLAIN_REASON.split(text, maxsplit=1)[0]
    marks = [match["who"] for match in _OR.finditer(plain)]
    return marks + [match["who"] for match in _OR_AT_THE_END.finditer(text)]


def _until_reason(text: str) -> str:
    """The part before the first "because", "of", colon and the like that follows a name."""
    for match in _CUT.finditer(text):
        # "I accuse, of all people, A" has nobody before the first of them.
        if "#" in text[: match.start()]:
            return text[: match.start()]
    return text


def _name(case: Case, mark: str) -> str:
    if mark == "#v":
        return case.victim
    return EVERYONE if mark == "#all" else case.people[int(mark[1:])].name
