"""The environment webcoder: messages, projects, applications, checks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from webcoder_fakes import (
    ADDS,
    HEADING,
    PAGE,
    RULES,
    THREE,
    block,
    do,
    job,
    task,
)

from delta_belief_rl.envs.webcoder.app import App, build
from delta_belief_rl.envs.webcoder.game import WebCoder
from delta_belief_rl.envs.webcoder.page import SelectorError, parse_page
from delta_belief_rl.envs.webcoder.project import (
    Delete,
    Edit,
    Project,
    Refused,
    Show,
    Write,
    canonical,
    changed,
    fingerprint,
)
from delta_belief_rl.envs.webcoder.reading import read
from delta_belief_rl.envs.webcoder.requirements import (
    Application,
    CheckError,
    Event,
    Seen,
    examine,
    requirement_from_json,
)
from delta_belief_rl.types import (
    UserError,
)

# --- messages and projects ------------------------------------------------------------------------


def test_a_message_may_hold_talk_files_edits_and_commands() -> None:
    reading = read(
        "First the page.\n"
        + block("html index.html", "<p>a</p>")
        + block("edit app.json", "old\n=====\nnew")
        + "SHOW index.html\ndelete notes.txt\nDone."
    )
    assert reading.operations == (
        Write("index.html", "<p>a</p>\n"),
        Edit("app.json", "old", "new"),
        Show("index.html"),
        Delete("notes.txt"),
    )
    assert reading.done
    assert not reading.note


def test_operations_are_done_in_order_or_not_at_all() -> None:
    files: Project = {"index.html": "<p>a</p>"}
    edits = [Edit("index.html", "a", "b"), Write("n.txt", "x"), Delete("n.txt")]
    assert changed(files, edits) == {"index.html": "<p>b</p>"}
    with pytest.raises(Refused, match="not there"):
        changed(files, [Write("n.txt", "x"), Edit("index.html", "c", "d")])
    assert files == {"index.html": "<p>a</p>"}


def test_equal_projects_have_one_fingerprint_and_others_another() -> None:
    same: list[Project] = [
        {"index.html": PAGE, "app.json": RULES},
        {"app.json": RULES.replace(" ", "\n"), "index.html": PAGE.replace("\n", "  \r\n") + "\n"},
    ]
    assert len({fingerprint(project) for project in same}) == 1
    other: list[Project] = [
        {},
        {"index.html": PAGE},
        {"index.html": PAGE.replace("Tea", "tea"), "app.json": RULES},
        {"index.html": RULES, "app.json": PAGE},
        {"index.html": PAGE, "app.json": RULES[:-1]},
    ]
    assert len({fingerprint(project) for project in (*same, *other)}) == 1 + len(other)
    assert canonical("app.json", '{"a": 1, "a": 2}') != canonical("app.json", '{"a": 2}')


# --- applications ---------------------------------------------------------------------------------


def app(page: str, rules: object = ()) -> App:
    made = build({"index.html": page, "app.json": json.dumps({"rules": rules})}).app
    assert made is not None
    return made


def sees(seen: Seen | None, selector: str) -> tuple[str, ...]:
    assert seen is not None
    return seen.visible(selector)


@pytest.mark.parametrize(
    ("selector", "texts"),
    [
        ("b", ("1", "2", "3")),
        ("#x b", ("1", "2")),
        ("div.k.l b", ("2",)),
        ("b[title]", ("1",)),
        ('b[title="t"]', ("1",)),
        ("b[title=u]", ()),
        ("section div b.m", ("2",)),
        ("div section b", ()),
        ("#none", ()),
    ],
)
def test_selectors_mean_what_they_mean_in_css(selector: str, texts: tuple[str, ...]) -> None:
    page = (
        '<section id="x"><b title="t">1</b><div class="l k"><b class="m n">2</b></div></section>'
        "<b>3</b>"
    )
    assert sees(app(page).after(()), selector) == texts


def test_every_deed_does_what_it_says_on_a_copy() -> None:
    page = (
        '<p id="t">a</p><p id="n">1</p><ul id="l"></ul><p id="h" hidden>h</p>'
        '<input id="i" value="v"><p id="c">c</p><button id="go">go</button>'
    )
    deeds = [
        [{"set": "#t", "text": "{#i}!"}, {"set": "#i", "text": "w"}],
        [{"append": "#l", "text": "{#i}"}, {"increment": "#n", "by": -3}],
        [{"show": "#h"}, {"toggle": "#c", "class": "hidden"}, {"increment": "#t", "by": 1}],
    ]
    rules = [{"on": "click", "of": "#go", "do": some} for some in deeds]
    made = app(page, rules)
    once, twice = made.after((Event("click", "#go"),)), made.after((Event("click", "#go"),) * 2)
    assert sees(once, "p") == ("v!", "-2", "h")
    assert sees(once, "#l li") == ("v",)
    assert sees(twice, "p") == ("w!", "-5", "h", "c")
    assert sees(twice, "#l li") == ("v", "w")
    assert sees(made.after(()), "p") == ("a", "1", "c")


def test_a_click_goes_to_what_is_around_and_submits_a_form_with_all_it_needs() -> None:
    page = (
        '<div id="d"><form id="f"><input id="i" required><button id="s">s</button>'
        '<button id="p" type="button">p</button></form></div><p id="in">0</p><p id="sent">0</p>'
    )
    rules = [
        {"on": "click", "of": "#d", "do": [{"increment": "#in", "by": 1}]},
        {"on": "submit", "of": "#f", "do": [{"increment": "#sent", "by": 1}]},
    ]
    made = app(page, rules)
    fill = Event("fill", "#i", "x")

    def after(*events: Event) -> tuple[str, ...]:
        return sees(made.after(events), "p")

    assert after(Event("click", "#s")) == ("1", "0")
    assert after(fill, Event("click", "#s")) == ("1", "1")
    assert after(fill, Event("click", "#p")) == ("1", "0")
    assert after(fill, Event("submit", "#f")) == ("0", "1")
    assert after(Event("fill", "#i", "  "), Event("submit", "#f")) == ("0", "0")


@pytest.mark.parametrize(
    "event",
    [
        Event("click", "#none"),
        Event("click", "#hidden"),
        Event("click", "b"),
        Event("click", "#off"),
        Event("fill", "#t", "x"),
        Event("submit", "#t"),
    ],
)
def test_what_cannot_be_done_leaves_nothing_to_be_said(event: Event) -> None:
    made = app(
        '<b>1</b><b>2</b><p id="t">t</p><i id="hidden" hidden>x</i><a id="off" disabled>x</a>'
    )
    assert made.after((event,)) is None


def test_a_page_without_a_behaviour_file_is_built_and_a_project_without_a_page_is_not() -> None:
    assert build({"index.html": PAGE}).app is not None
    assert build({"app.json": RULES}).problem == "there is no index.html"
    failed = build({"index.html": PAGE, "app.json": "x"})
    assert failed.app is None
    assert failed.rest is not None
    assert [child.tag for child in parse_page(PAGE).inside()] == ["h1", "span", "button"]


# --- checks ---------------------------------------------------------------------------------------


@dataclass
class Scripted:
    """A check that gives one number after another, or breaks."""

    numbers: list[float | None] = field(default_factory=list[float | None])

    def check(self, app: Application) -> float:
        number = self.numbers.pop(0)
        if number is None:
            raise CheckError("broken")
        return number


def test_a_flaky_check_counts_its_lower_number_and_a_broken_one_nothing() -> None:
    made = app(PAGE)
    checks = [Scripted([1.0, 1.0]), Scripted([1.0, 0.0]), Scripted([0.5, 1.0]), Scripted([None])]
    examined = examine([*checks, Scripted([1.0, None])], made)
    assert examined.met == (1.0, 0.0, 0.5, 0.0, 0.0)
    assert examined.errors == (3, 4)
    assert examine(checks, None).met == (0.0,) * 4


@pytest.mark.parametrize("holds", [["text", "a >> b", "x"], ["count", "#a", "two"]])
def test_a_requirement_that_is_broken_itself_is_reported_apart(holds: list[str]) -> None:
    bad = {"id": "bad", "weight": 1, "since": "reproduce", "steps": [{"holds": holds}]}
    env = WebCoder(task(job("reproduce"), requirements=(HEADING, bad)), 4)
    (outcome,) = do(env, block("index.html", PAGE))
    assert outcome.diagnostics == ("check_error",)
    assert env.progress() == pytest.approx(2 / 3)


def test_another_kind_of_application_can_stand_behind_the_checks() -> None:
    class Live:
        def visible(self, selector: str) -> tuple[str, ...]:
            return ("Tea",) if selector == "h1" else ()

        def after(self, events: Sequence[Event]) -> Live | None:
            return None if events else self

    assert requirement_from_json(HEADING).check(Live()) == 1.0
    assert requirement_from_json(ADDS).check(Live()) == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 0},
        {"weight": -1},
        {"since": "never"},
        {"until": "never"},
        {"steps": []},
        {"steps": [{"holds": ["looks", "h1"]}]},
        {"steps": [{"holds": ["text", "h1"]}]},
        {"steps": [{"holds": ["exists", "h1", "x"]}]},
        {"steps": [{"events": [["run", "h1"]], "holds": ["exists", "h1"]}]},
    ],
)
def test_a_task_with_a_requirement_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="'t' has no project that can be written"):
        WebCoder(task(job("reproduce"), requirements=({**HEADING, **change},)), 4)


@pytest.mark.parametrize("scenario", ["", "{}", "[]", '{"jobs": [], "requirements": []}'])
def test_a_task_without_a_project_is_refused(scenario: str) -> None:
    with pytest.raises(UserError, match="'t' has no project that can be written"):
        WebCoder(replace(THREE, scenario=scenario), 4)
    with pytest.raises(UserError, match="its tasks are generate"):
        WebCoder(task(job("generate")), 4)


def test_an_event_on_what_is_no_selector_is_an_error_of_the_caller() -> None:
    with pytest.raises(SelectorError):
        app(PAGE).after((Event("click", "a >> b"),))


def test_a_walk_and_an_outline_tell_what_is_seen() -> None:
    page = (
        '<p>one<br>two</p><button id="a" disabled>A</button><button id="b">B</button>'
        '<form><input id="i"><button>Go</button></form><p id="t">-</p><p id="h" hidden>x</p>'
    )
    rules = [
        {"on": "click", "of": "button", "do": [{"toggle": "#t", "class": "x"}]},
        {"on": "click", "of": "#b", "do": [{"show": "#h"}]},
        {"on": "submit", "of": "form", "do": [{"set": "#t", "text": "{#i}"}]},
    ]
    made = app(page, rules)
    assert made.outline() == (
        'p "one two" | button#a "A" | button#b "B" | input#i | button "Go" | p#t "-"'
    )
    assert made.walk() == (
        'click on button#a "A": it is switched off; '
        'click on button#b "B": #h hidden -> "x"; '
        'click on button "Go": #t "-" -> "sample"'
    )
    assert sees(made.after(()), "p") == ("one two", "-")
    assert app("<p>x</p>").walk() == "nothing answers to a click"
    assert app("<p hidden>x</p>").outline() == "nothing"


def test_a_task_that_requires_nothing_is_refused() -> None:
    late = {**HEADING, "since": "modify"}
    with pytest.raises(UserError, match="a task requires nothing"):
        WebCoder(task(job("reproduce"), requirements=(late,)), 4)
