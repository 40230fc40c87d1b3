"""A project that was built: a page and rules, and what they do when somebody uses them.

A use is a list of events on a fresh copy of the page::

    Event("fill", "#name", "Ada"), Event("click", "#send")

A click goes to the one visible element that is meant, and to the rules of everything around it; a
click on a button inside a form then submits the form, unless a field that is ``required`` is empty.
An event on something that is not there, not visible or switched off cannot happen, and then nothing
can be said of the page after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from delta_belief_rl.envs.webcoder.behaviour import SLOT, Deed, Rule, parse_rules
from delta_belief_rl.envs.webcoder.page import (
    FIELDS,
    BuildError,
    Element,
    Selector,
    parse_page,
    plain,
)
from delta_belief_rl.envs.webcoder.project import BEHAVIOUR, PAGE, Project
from delta_belief_rl.envs.webcoder.requirements import Event

MOST_ELEMENTS_LATER = 300
MOST_TEXT_LATER = 2000
OUTLINE_LENGTH = 400
WALK_LENGTH = 400
MOST_CLICKS = 8
SAMPLE = "sample"
"""What the walk of ``App.walk`` types into every input."""

_NUMBER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Build:
    """What became of a project.

    Attributes:
        app: The application; None where the build failed.
        rest: What works of a project that failed: its page without behaviour, where there is one.
        problem: Why it failed; empty where it did not.
    """

    app: App | None
    rest: App | None = None
    problem: str = ""


def build(project: Project) -> Build:
    """Build a project; a failure is a value."""
    return _build(project.get(PAGE), project.get(BEHAVIOUR))


@lru_cache(maxsize=512)
def _build(page: str | None, behaviour: str | None) -> Build:
    """Games of a group send the same files, and using an application leaves it as it is."""
    if page is None:
        return Build(None, problem=f"there is no {PAGE}")
    try:
        root = parse_page(page)
    except BuildError as error:
        return Build(None, problem=f"{PAGE}: {error}")
    if behaviour is None:
        return Build(App(root, ()))
    try:
        rules = parse_rules(behaviour, root)
    except BuildError as error:
        return Build(None, App(root, ()), f"{BEHAVIOUR}: {error}")
    return Build(App(root, rules))


class App:
    """An application; using it leaves it as it is."""

    def __init__(self, root: Element, rules: Sequence[Rule]) -> None:
        self._root = root
        self.rules = tuple(rules)

    @property
    def root(self) -> Element:
        """The page before any event; not to be changed."""
        return self._root

    def after(self, events: Sequence[Event]) -> View | None:
        """The page after some events; None where one of them cannot happen."""
        use = _Use(self._root.copy(), self.rules)
        for event in events:
            if not use.happens(event):
                return None
        return View(use.root)

    def outline(self) -> str:
        """What can be seen on the page, in one line."""
        parts = [_shown(element) for element in self._root.inside() if _tells(element)]
        return _cut(" | ".join(parts) or "nothing", OUTLINE_LENGTH)

    def walk(self) -> str:
        """What a click on each thing with a rule does, one after the other on fresh pages."""
        parts: list[str] = []
        for number, element in enumerate(self._root.inside()):
            if len(parts) < MOST_CLICKS and element.is_visible() and self._answers(element):
                parts.append(f"click on {_shown(element)}: {self._effect(number)}")
        return _cut("; ".join(parts) or "nothing answers to a click", WALK_LENGTH)

    def _answers(self, element: Element) -> bool:
        """Whether rules are meant for a click on this very element."""
        clicked = any(rule.on == "click" and rule.of.matches(element) for rule in self.rules)
        form = _submits(element)
        return clicked or (
            form is not None
            and any(rule.on == "submit" and rule.of.matches(form) for rule in self.rules)
        )

    def _effect(self, number: int) -> str:
        use = _Use(self._root.copy(), self.rules)
        elements = list(use.root.inside())
        for element in elements:
            if element.tag in FIELDS and element.is_visible():
                element.attrs["value"] = SAMPLE
        before = _texts(use.root)
        if "disabled" in elements[number].attrs:
            return "it is switched off"
        use.click(elements[number])
        after = _texts(use.root)
        changes = [
            f"#{key} {_state(before.get(key))} -> {_state(after.get(key))}"
            for key in dict.fromkeys((*before, *after))
            if before.get(key) != after.get(key)
        ]
        return ", ".join(changes) or "no change"


class View:
    """What can be seen of an application at one moment."""

    def __init__(self, root: Element) -> None:
        self._root = root

    def visible(self, selector: str) -> tuple[str, ...]:
        """Texts of the visible elements that are meant; of an input, its value.

        Raises:
            SelectorError: It is no selector.
        """
        found = Selector.parse(selector).find(self._root)
        return tuple(_reads(element) for element in found if element.is_visible())


class _Use:
    """A page that events change."""

    def __init__(self, root: Element, rules: Sequence[Rule]) -> None:
        self.root = root
        self._rules = rules
        self._room = MOST_ELEMENTS_LATER - sum(1 for _ in root.inside())

    def happens(self, event: Event) -> bool:
        """Carry out an event; False where it cannot happen."""
        found = [e for e in Selector.parse(event.of).find(self.root) if e.is_visible()]
        if len(found) != 1 or "disabled" in found[0].attrs:
            return False
        target = found[0]
        if event.kind == "fill":
            if target.tag not in FIELDS:
                return False
            target.attrs["value"] = event.value[:MOST_TEXT_LATER]
        elif event.kind == "click":
            self.click(target)
        else:
            if target.tag != "form":
                return False
            self._submit(target)
        return True

    def click(self, target: Element) -> None:
        """A click on an element, and on all that it stands in."""
        form = _submits(target)
        self._fire("click", list(target.lineage()))
        if form is not None:
            self._submit(form)

    def _submit(self, form: Element) -> None:
        for inside in form.inside():
            if inside.tag in FIELDS and "required" in inside.attrs and not _reads(inside):
                return
        self._fire("submit", [form])

    def _fire(self, event: str, targets: Sequence[Element]) -> None:
        """All rules for an event, in their order; values are those before the first."""
        values = {
            element.attrs["id"]: _reads(element)
            for element in self.root.inside()
            if element.tag in FIELDS and "id" in element.attrs
        }
        rules = [
            rule
            for rule in self._rules
            if rule.on == event and any(rule.of.matches(target) for target in targets)
        ]
        for rule in rules:
            for deed in rule.do:
                text = SLOT.sub(lambda slot: values.get(slot[1], ""), deed.text)
                for element in deed.to.find(self.root):
                    self._do(deed, element, text[:MOST_TEXT_LATER])

    def _do(self, deed: Deed, element: Element, text: str) -> None:
        if deed.kind == "set":
            _write(element, text)
        elif deed.kind == "append":
            if self._room > 0:
                self._room -= 1
                item = Element("li", parent=element)
                item.children.append(text)
                element.children.append(item)
        elif deed.kind == "increment":
            number = _reads(element)
            if _NUMBER.fullmatch(number):
                _write(element, str(int(number) + deed.by))
        elif deed.kind == "toggle":
            _set_class(element, deed.text, deed.text not in element.classes)
        elif deed.kind == "hide":
            element.attrs["hidden"] = ""
        else:
            element.attrs.pop("hidden", None)
            _set_class(element, "hidden", False)


def _submits(element: Element) -> Element | None:
    """The form that a click on an element submits."""
    kind = element.attrs.get("type", "submit" if element.tag == "button" else "").lower()
    if element.tag not in ("button", "input") or kind != "submit":
        return None
    return next((node for node in element.lineage() if node.tag == "form"), None)


def _reads(element: Element) -> str:
    if element.tag in FIELDS:
        return plain(element.attrs.get("value", element.text()))
    return element.text()


def _write(element: Element, text: str) -> None:
    if element.tag in FIELDS:
        element.attrs["value"] = text
    else:
        for child in element.children:
            if isinstance(child, Element):
                child.parent = None
        element.children = [text]


def _set_class(element: Element, name: str, on: bool) -> None:
    names = [found for found in element.attrs.get("class", "").split() if found != name]
    element.attrs["class"] = " ".join([*names, name] if on else names)


def _tells(element: Element) -> bool:
    """Whether an element stands in the outline: seen, and with a text of its own or an id."""
    own = any(isinstance(child, str) and child.strip() for child in element.children)
    return element.is_visible() and (own or "id" in element.attrs)


def _shown(element: Element) -> str:
    name = f"#{element.attrs['id']}" if "id" in element.attrs else ""
    own = plain(" ".join(child for child in element.children if isinstance(child, str)))
    return f'{element.tag}{name} "{_cut(own, 60)}"' if own else f"{element.tag}{name}"


def _texts(root: Element) -> dict[str, str | None]:
    """What each element with an id reads; None where it is not seen."""
    return {
        element.attrs["id"]: _reads(element) if element.is_visible() else None
        for element in root.inside()
        if "id" in element.attrs
    }


def _state(text: str | None) -> str:
    return "hidden" if text is None else f'"{_cut(text, 60)}"'


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
