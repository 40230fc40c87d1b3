"""Topics of the rule judge of Guess My City: language, money, faith, and the country."""

from __future__ import annotations

from collections.abc import Mapping

from delta_belief_rl.envs.guess_my_city.data import City, load_atlas, name_key, reveals
from delta_belief_rl.judge.guess_my_city.lexicon import load_lexicon
from delta_belief_rl.judge.guess_my_city.place import numbers
from delta_belief_rl.judge.guess_my_city.question import (
    Answer,
    Question,
    countries_in,
    joined,
    safe,
)

_CHURCHES = r"\bcatholic|\borthodox|\bprotestant|\blutheran|\banglican"


def _language(q: Question) -> str | None:
    atlas, own = load_atlas(), q.city.languages
    scripts = {atlas.languages[name][1] for name in own}
    if q.has(r"\bscript\b|\balphabet|\bwriting\b|\bwritten\b|\bcharacters\b"):
        keys = {name_key(pair[1]): pair[1] for pair in atlas.languages.values()}
        options = {name: keys[name] in scripts for name in q.named(keys)}
        shown = safe(sorted(scripts), q.city)
        statement = f"The script is {joined(shown)}." if shown else "It has its own script."
        return q.choose(options, statement) or statement
    families = {name_key(pair[0]): pair[0] for pair in atlas.languages.values()}
    keys = {name_key(name): name for name in atlas.languages}
    keys |= load_lexicon().aliases["languages"]
    options = {name: keys[name] in own for name in q.named(keys)}
    mine = {atlas.languages[name][0] for name in own}
    if not options:
        options = {name: families[name] in mine for name in q.named(families)}
    widely = q.has(r"\bwidely\b|\bcommon|\bunderst|\bsecond\b|\bmany people\b")
    if widely and q.closed and options and not any(options.values()):
        return "Not as a main language."
    if reply := q.choose(options, _languages(q.city)):
        return reply
    return (
        None
        if q.closed and not q.has(r"\blanguages?\b.*\b(?:many|several|more)")
        else (_languages(q.city))
    )


def _languages(city: City) -> str:
    """Names of the languages; one that is called like the country is described instead."""
    atlas = load_atlas()
    parts: list[str] = []
    for name in city.languages:
        if not reveals(name, city):
            parts.append(name)
            continue
        family, script = atlas.languages[name]
        article = "an" if family[0] in "AIEOU" else "a"
        kind = f"{article} {family} language" if family != "isolated" else "an isolated language"
        if reveals(family, city):
            kind = "a language of its own"
        letters = script if not reveals(script, city) else "its own"
        parts.append(f"{kind} written in {letters} letters")
    return f"People speak {joined(parts)}."


def _money(q: Question) -> str | None:
    own = q.city.currency
    kinds = {country.currency.split()[-1] for country in load_atlas().countries.values()}
    keys = {key: kind for kind in kinds for key in (kind, f"{kind}s")}
    keys |= load_lexicon().aliases["money"]
    # These two are words of other meanings as well.
    named = q.named(key for key in keys if key not in ("mark", "real"))
    if not named and not q.has(r"\bcurrency|\bmoney\b"):
        return None
    options = {name: keys[name] == own.split()[-1] for name in named}
    statement = f"People pay with the {own}." if not reveals(own, q.city) else "It has its own."
    return q.choose(options, statement) or (None if q.closed else statement)


def _religion(q: Question) -> str | None:
    own = q.city.religions
    statement = f"The main {'religion is' if len(own) == 1 else 'religions are'} {joined(own)}."
    if q.has(_CHURCHES):
        # The data know no churches inside a religion.
        return statement if "Christianity" in own or not q.closed else q.verdict(False, statement)
    if q.has(r"\btemple|\bchurch|\bmosque|\bcathedral|\bsynagogue|\bmonument|\bbuilding"):
        return None
    faiths = load_lexicon().aliases["faiths"]
    options = {name: faiths[name] in own for name in q.named(faiths)}
    if (
        len(options) == 1
        and q.closed
        and not q.negated
        and own[0] not in {faiths[name] for name in options}
    ):
        return (
            "It is not the main religion, but many follow it." if any(options.values()) else "No."
        )
    return q.choose(options, statement) or (None if q.closed else statement)


def _colony(q: Question) -> str | None:
    if q.has(r"\b(?:king|queen|monarch|emperor|president|sultan)\b"):
        return None
    own = q.city.colony
    statement = "It was no colony in modern times."
    if own:
        statement = f"It was once ruled by {joined(safe(own, q.city) or ('others',))}."
    powers = load_lexicon().aliases["powers"]
    options = {name: powers[name] in own for name in q.named(powers)}
    if reply := q.choose(options, statement):
        return reply
    if q.closed and q.has(r"\b(?:by|of|from) (?!an?\b|any\b|another\b|european)"):
        # A power that is none of the usual ones.
        return None
    return q.verdict(bool(own), statement) if q.closed else statement


def _neighbours(q: Question) -> str | None:
    country = q.city.country
    if q.has(r"\bhow many\b"):
        return f"Its country has {len(country.neighbours) or 'no'} neighbours by land."
    named = {name: name in country.neighbours for name in countries_in(q)}
    shown = safe(country.neighbours, q.city)
    statement = "Its country has no neighbour by land."
    if country.neighbours:
        statement = f"Its country borders on {joined(shown)}." if shown else "It has one neighbour."
    if reply := q.choose(named, statement):
        return reply
    if q.closed and not q.has(r"\bany\b|\bother countries\b"):
        return None
    return q.verdict(bool(country.neighbours), statement) if q.closed else statement


def _member(q: Question) -> str | None:
    tag = "nato" if q.has(r"\bnato\b") else "eu"
    holds = tag in q.city.country.tags
    name = "NATO" if tag == "nato" else "the European Union"
    return q.verdict(holds, f"Its country is {'' if holds else 'not '}a member of {name}.")


def _crown(q: Question) -> str | None:
    crown = "monarchy" in q.city.country.tags
    statement = f"Its country is {'a monarchy' if crown else 'a republic'}."
    if not q.closed or q.choice:
        return statement
    return q.verdict(crown != q.has(r"\brepublic\b"), statement)


def _traffic(q: Question) -> str | None:
    left = "left" in q.city.country.tags | q.city.tags
    statement = f"They drive on the {'left' if left else 'right'}."
    if not q.closed or q.choice:
        return statement
    return q.verdict(left == q.has(r"\bleft\b"), statement)


def _landlocked(q: Question) -> str | None:
    if not q.about_country():
        return None
    closed = "landlocked" in q.city.country.tags
    # The Caspian Sea is a coast, and those who lie on it alone are landlocked.
    coast = not closed or "sea" in q.city.nature
    if q.has(r"\blandlocked\b"):
        return q.verdict(closed, f"Its country is {'' if closed else 'not '}landlocked.")
    return q.verdict(coast, f"Its country has {'a' if coast else 'no'} coast.")


def _flag(q: Question) -> str | None:
    own = q.city.country.flag
    colours = ("red", "white", "blue", "green", "yellow", "black", "orange", "gold")
    named = q.named(colours)
    statement = f"The colours of the flag are {joined(own)}."
    if len(named) > 1 and len(named) < len(own):
        return statement
    if named and q.closed:
        return q.verdict(all(any(_same(name, part) for part in own) for name in named))
    return None if q.closed else statement


def _same(name: str, part: str) -> bool:
    return ("yellow" if name == "gold" else name) in part.split()


def _country_size(q: Question) -> str | None:
    people = q.city.country.millions
    statement = f"About {people:g} million people live in its country."
    if not q.has(r"\bcountry\b|\bnation\b"):
        return None
    if not q.closed:
        return statement if q.has(r"\bhow\b|\bpopulation\b") else None
    bounds = [value for value, unit in numbers(q.text) if unit == "people"]
    if not bounds:
        return None
    below = q.has(r"\b(?:under|below|less|fewer|smaller)\b")
    return q.verdict(people < bounds[0] if below else people >= bounds[0], statement)


def _games(q: Question) -> str | None:
    own = q.city.olympics
    statement = f"It hosted {own}." if own else "It has not hosted them."
    return q.verdict(bool(own), statement) if q.closed and not own else statement


def _heritage(q: Question) -> str | None:
    holds = "heritage" in q.city.tags
    if q.closed and holds:
        return q.verdict(True, "There is a site on the list.")
    return "There is a site on the list." if holds else "Not that I know of."


def _metro(q: Question) -> str | None:
    holds = "metro" in q.city.tags
    return q.verdict(holds, f"It has {'an' if holds else 'no'} underground railway.")


PEOPLE_TOPICS: Mapping[str, Answer] = {
    "olympics": _games,
    "heritage": _heritage,
    "colony": _colony,
    "language": _language,
    "flag": _flag,
    "union": _member,
    "crown": _crown,
    "traffic": _traffic,
    "landlocked": _landlocked,
    "neighbours": _neighbours,
    "nation": _country_size,
    "money": _money,
    "religion": _religion,
    "metro": _metro,
}
"""By the name of their words in the lexicon; tried in this order."""
