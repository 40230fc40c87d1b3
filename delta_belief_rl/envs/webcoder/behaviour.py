"""What a page does on events: rules as data, strictly read, in place of a script.

``app.json`` is ``{"rules": [...]}``. A rule says on what event (``click`` or ``submit``) of which
elements which deeds follow::

    {"on": "click", "of": "#plus", "do": [{"increment": "#count", "by": 1}]}

| deed | what it does to all elements that its selector means |
|---|---|
| ``{"set": S, "text": T}`` | their text becomes T; of an input, its value |
| ``{"append": S, "text": T}`` | a list gets an item with the text T |
| ``{"increment": S, "by": N}`` | a whole number as text becomes larger by N |
| ``{"toggle": S, "class": C}`` | the class C comes or goes; the class ``hidden`` hides |
| ``{"show": S}``, ``{"hide": S}`` | they are seen, or not |

In T, ``{#name}`` stands for the value of the input with that id at the time of the event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from delta_belief_rl.envs.webcoder.page import (
    FIELDS,
    BuildError,
    Element,
    Selector,
    SelectorError,
)

EVENTS = ("click", "submit")
DEEDS: Mapping[str, str] = {
    "set": "text",
    "append": "text",
    "increment": "by",
    "toggle": "class",
    "show": "",
    "hide": "",
}
"""Kinds of deeds, and the further key that each has."""
MOST_RULES = 24
MOST_DEEDS = 4
MOST_TEXT = 200
MOST_STEP = 1000
SLOT = re.compile(r"\{#([\w-]+)\}")

_CLASS = re.compile(r"[A-Za-z][\w-]{0,31}")


@dataclass(frozen=True, slots=True)
class Deed:
    """One change to the page.

    Attributes:
        kind: A key of ``DEEDS``.
        to: The elements.
        text: Of ``set`` and ``append``; the class of ``toggle``.
        by: Of ``increment``.
    """

    kind: str
    to: Selector
    text: str = ""
    by: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """Deeds that follow on an event."""

    on: str
    of: Selector
    do: tuple[Deed, ...]


def parse_rules(text: str, root: Element) -> tuple[Rule, ...]:
    """The rules of a behaviour file for a page.

    Raises:
        BuildError: It is no such file, or means elements that the page does not have.
    """
    try:
        document = cast(
            object, json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        )
        # Half of a surrogate pair is no character: no reply can hold it.
        json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise BuildError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise BuildError("it has half of a surrogate pair") from error
    except json.JSONDecodeError as error:
        raise BuildError(f"line {error.lineno}: it is no JSON") from error
    except BuildError:
        raise
    except ValueError as error:
        raise BuildError("it has a number that is too long") from error
    rules = _list(_mapping(document, "it", ("rules",))["rules"], "rules", 0, MOST_RULES)
    return tuple(_rule(rule, f"rule {n}", root) for n, rule in enumerate(rules, 1))


def _rule(given: object, name: str, root: Element) -> Rule:
    rule = _mapping(given, name, ("on", "of", "do"))
    event = rule["on"]
    if event not in EVENTS:
        raise BuildError(f'{name}: "on" is one of {", ".join(EVENTS)}')
    of = _selector(rule["of"], f'{name}: "of"', root)
    if event == "submit" and any(element.tag != "form" for element in of.find(root)):
        raise BuildError(f'{name}: only a form has the event "submit"')
    deeds = _list(rule["do"], f'{name}: "do"', 1, MOST_DEEDS)
    return Rule(str(event), of, tuple(_deed(deed, name, root) for deed in deeds))


def _deed(given: object, name: str, root: Element) -> Deed:
    entries = cast(dict[str, object], given) if isinstance(given, dict) else {}
    kinds = [kind for kind in DEEDS if kind in entries]
    if len(kinds) != 1:
        raise BuildError(f"{name}: a deed has exactly one of {', '.join(DEEDS)}")
    kind, more = kinds[0], DEEDS[kinds[0]]
    deed = _mapping(entries, f"{name}: {kind}", (kind, more) if more else (kind,))
    to = _selector(deed[kind], f"{name}: {kind}", root)
    if kind == "append" and any(element.tag not in ("ul", "ol") for element in to.find(root)):
        raise BuildError(f"{name}: append needs a list, <ul> or <ol>")
    if more == "by":
        return Deed(kind, to, by=_step(deed["by"], name))
    if more == "text":
        return Deed(kind, to, _template(deed["text"], name, root))
    if more == "class":
        return Deed(kind, to, _class(deed["class"], name))
    return Deed(kind, to)


def _selector(given: object, name: str, root: Element) -> Selector:
    if not isinstance(given, str):
        raise BuildError(f"{name} is no selector")
    try:
        selector = Selector.parse(given)
    except SelectorError as error:
        raise BuildError(f"{name}: {error}") from error
    if not selector.find(root):
        raise BuildError(f"{name}: nothing on the page is {selector.text}")
    return selector


def _template(given: object, name: str, root: Element) -> str:
    if not isinstance(given, str) or len(given) > MOST_TEXT:
        raise BuildError(f'{name}: "text" is a text of at most {MOST_TEXT} characters')
    if re.search(r"[{}]", SLOT.sub("", given)):
        raise BuildError(f'{name}: braces in "text" hold the id of an input, e.g. {{#name}}')
    fields = {element.attrs.get("id") for element in root.inside() if element.tag in FIELDS}
    for slot in SLOT.findall(given):
        if slot not in fields:
            raise BuildError(f"{name}: there is no input #{slot}")
    return given


def _class(given: object, name: str) -> str:
    if not isinstance(given, str) or not _CLASS.fullmatch(given):
        raise BuildError(f'{name}: "class" is one name')
    return given


def _step(given: object, name: str) -> int:
    whole = isinstance(given, int) and not isinstance(given, bool)
    if not whole or not 0 < abs(cast(int, given)) <= MOST_STEP:
        raise BuildError(f'{name}: "by" is a whole number up to {MOST_STEP}, and not 0')
    return cast(int, given)


def _mapping(given: object, name: str, keys: Sequence[str]) -> Mapping[str, object]:
    """A JSON object with exactly these keys."""
    if not isinstance(given, dict) or sorted(cast(dict[str, object], given)) != sorted(keys):
        raise BuildError(f"{name} is an object with the keys {', '.join(keys)}")
    return cast(dict[str, object], given)


def _list(given: object, name: str, least: int, most: int) -> list[object]:
    if not isinstance(given, list) or not least <= len(cast(list[object], given)) <= most:
        raise BuildError(f"{name} is a list of {least} to {most} entries")
    return cast(list[object], given)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BuildError("a key stands twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise BuildError(f"{name} is no JSON")
