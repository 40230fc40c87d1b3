"""What is broken in a project before it is to be repaired.

| fault | what it does |
|---|---|
| ``lost_rule`` | the rules for a click on an element, or for the submission of a form, are gone |
| ``wrong_step`` | numbers that an element's rules add are one more |
| ``lost_end`` | the last end of an element is gone, so that the page is not built |
| ``old_text`` | a text of the page is again what it was once |

A fault works on whatever an agent has written. Where its project has nothing that the fault could
break, it stays as it is: what was to be repaired is not there then anyhow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import cast

from delta_belief_rl.envs.webcoder.app import build
from delta_belief_rl.envs.webcoder.page import Selector
from delta_belief_rl.envs.webcoder.project import BEHAVIOUR, MOST_CHARACTERS, PAGE, Project

_HEADING = re.compile(r"(<h1\b[^>]*>).*?(</h1\s*>)", re.IGNORECASE | re.DOTALL)


def broken(project: Project, fault: Mapping[str, str]) -> Project:
    """The project with a fault in it.

    Raises:
        KeyError: There is no such fault, or it lacks a part.
    """
    return FAULTS[fault["kind"]](project, fault)


def _lost_end(project: Project, fault: Mapping[str, str]) -> Project:
    page = project.get(PAGE, "")
    ends = list(re.finditer(rf"</{fault['tag']}\s*>", page, re.IGNORECASE))
    for end in reversed(ends if build(project).app is not None else []):
        without = {**project, PAGE: page[: end.start()] + page[end.end() :]}
        # One in a comment is the end of nothing.
        if build(without).app is None:
            return without
    return project


def _old_text(project: Project, fault: Mapping[str, str]) -> Project:
    now, old = fault["now"], fault["old"]
    text = project.get(PAGE, "").replace(now, old)
    app = build({PAGE: text}).app
    # Written with references to characters, a heading does not stand there literally.
    if app is not None and any(e.tag == "h1" and e.text() == now for e in app.root.inside()):
        text = _HEADING.sub(lambda found: f"{found[1]}{old}{found[2]}", text)
    return {**project, PAGE: text} if PAGE in project and len(text) <= MOST_CHARACTERS else project


def _lost_rule(project: Project, fault: Mapping[str, str]) -> Project:
    def keep(rule: dict[str, object], meant: bool) -> bool:
        return not meant

    return _with_rules(project, fault, keep)


def _wrong_step(project: Project, fault: Mapping[str, str]) -> Project:
    def count_wrongly(rule: dict[str, object], meant: bool) -> bool:
        if meant:
            for deed in cast(list[dict[str, object]], rule["do"]):
                if "increment" in deed:
                    by = cast(int, deed["by"])
                    deed["by"] = by + 1 if by != -1 else -2
        return True

    return _with_rules(project, fault, count_wrongly)


def _with_rules(
    project: Project, fault: Mapping[str, str], keep: Callable[[dict[str, object], bool], bool]
) -> Project:
    """Change or drop rules of a project that is built; others stay as they are."""
    app = build(project).app
    if app is None or BEHAVIOUR not in project:
        return project
    # A click also goes to the rules of everything around its target.
    found = Selector.parse(fault["of"]).find(app.root)
    elements = [node for element in found for node in element.lineage()]
    document = cast(dict[str, list[dict[str, object]]], json.loads(project[BEHAVIOUR]))
    rules = [
        rule
        for rule, built in zip(document["rules"], app.rules, strict=True)
        if keep(rule, any(built.of.matches(element) for element in elements))
    ]
    text = json.dumps({"rules": rules}, indent=1, ensure_ascii=False)
    # Laid out anew, a long file could come to be too long.
    return {**project, BEHAVIOUR: text} if len(text) <= MOST_CHARACTERS else project


FAULTS: Mapping[str, Callable[[Project, Mapping[str, str]], Project]] = {
    "lost_rule": _lost_rule,
    "wrong_step": _wrong_step,
    "lost_end": _lost_end,
    "old_text": _old_text,
}
