"""What a message read of a project and what it wrote: files, and elements with an id.

An element is written where it, what it holds, or a rule for an event on it is another one than
before. It is read where a new or changed rule, or an edit of a file, needs it. Names are
``file index.html`` and ``#count``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from delta_belief_rl.envs.webcoder.app import App, build
from delta_belief_rl.envs.webcoder.behaviour import SLOT, Rule
from delta_belief_rl.envs.webcoder.page import Element, Selector
from delta_belief_rl.envs.webcoder.project import Delete, Edit, Operation, Project, Show

Footprint = tuple[frozenset[str], frozenset[str]]
NOTHING: Footprint = (frozenset[str](), frozenset[str]())


def footprint(before: Project, after: Project, operations: Sequence[Operation]) -> Footprint:
    """Names that the operations between two states of a project read and wrote."""
    reads = {f"file {one.path}" for one in operations if isinstance(one, Edit | Delete | Show)}
    paths = {*before, *after}
    writes = {f"file {path}" for path in paths if before.get(path) != after.get(path)}
    old, new = _application(before), _application(after)
    for app, other in ((old, new), (new, old)):
        if app is None:
            continue
        known = set(_elements(other))
        writes |= {name for name, content in _elements(app) if (name, content) not in known}
        for rule in _without(app, other):
            writes |= _names(rule.of, app)
            if app is new:
                reads |= _needed(rule, app)
    return frozenset(reads), frozenset(writes)


def _application(project: Project) -> App | None:
    built = build(project)
    return built.app or built.rest


def _elements(app: App | None) -> Iterator[tuple[str, str]]:
    """Each element with an id, and what it says."""
    if app is not None:
        for element in app.root.inside():
            if "id" in element.attrs:
                yield f"#{element.attrs['id']}", _content(element)


def _content(element: Element) -> str:
    inner = [child if isinstance(child, str) else _content(child) for child in element.children]
    return repr((element.tag, sorted(element.attrs.items()), inner))


def _without(app: App, other: App | None) -> list[Rule]:
    known = set(other.rules) if other is not None else set[Rule]()
    return [rule for rule in app.rules if rule not in known]


def _needed(rule: Rule, app: App) -> set[str]:
    found = _names(rule.of, app)
    for deed in rule.do:
        found |= _names(deed.to, app)
        found |= {f"#{slot}" for slot in SLOT.findall(deed.text)}
    return found


def _names(selector: Selector, app: App) -> set[str]:
    found = selector.find(app.root)
    return {f"#{element.attrs['id']}" for element in found if "id" in element.attrs}
