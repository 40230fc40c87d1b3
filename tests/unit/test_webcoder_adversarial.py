"""Hostile and unlucky projects and messages: none is paid for what its application does not do.

Four tables: projects that must not build, applications that must not meet a requirement, unusual
ones that do meet it, and messages that must be refused or must change nothing.
"""

from __future__ import annotations

import json
from itertools import chain

import pytest

from delta_belief_rl.envs.webcoder.app import App, build
from delta_belief_rl.envs.webcoder.game import WebCoder
from delta_belief_rl.envs.webcoder.page import MOST_DEPTH, MOST_ELEMENTS
from delta_belief_rl.envs.webcoder.project import MOST_CHARACTERS
from delta_belief_rl.envs.webcoder.reading import read
from delta_belief_rl.envs.webcoder.requirements import requirement_from_json
from delta_belief_rl.envs.webcoder.tasks import make_tasks
from delta_belief_rl.types import Verdict

PAGE = '<h1>Tea</h1><span id="count">0</span><button id="plus">Add</button>'
RULES = '{"rules": [{"on": "click", "of": "#plus", "do": [{"increment": "#count", "by": 1}]}]}'
ADD = {"increment": "#count", "by": 1}
COUNTS = requirement_from_json(
    {
        "id": "counts",
        "weight": 1,
        "since": "generate",
        "steps": [
            {"holds": ["text", "h1", "Tea"]},
            {"holds": ["text", "span#count", "0"]},
            {"holds": ["text", "button#plus", "Add"]},
            {"events": [["click", "#plus"]], "holds": ["text", "#count", "1"]},
            {"events": [["click", "#plus"]], "holds": ["text", "#count", "2"]},
        ],
    }
)


def rule(**parts: object) -> str:
    """A behaviour file whose rule has some other parts."""
    whole = {"on": "click", "of": "#plus", "do": [{"increment": "#count", "by": 1}], **parts}
    return json.dumps({"rules": [whole]})


def met(page: str, rules: str | None = RULES) -> float:
    made = build({"index.html": page} | ({} if rules is None else {"app.json": rules}))
    return 0.0 if made.app is None else COUNTS.check(made.app)


NOT_BUILT_PAGES = {
    "unclosed_div": ("<div>" + PAGE, "<div> of line 1 is never closed"),
    "unclosed_inside": ("<p><b>x</p>", "</p> where <b> of line 1 is open"),
    "crossed": ("<b><i>x</b></i>", "</b> where <i>"),
    "end_without_beginning": (PAGE + "</div>", "</div> where nothing is open"),
    "self_closed_div": ("<div/>" + PAGE, "never closed"),
    "paragraph_left_open": ("<p>one<p>two</p>", "never closed"),
    "item_left_open": ("<ul><li>one<li>two</ul>", "</ul> where <li>"),
    "script": (PAGE + "<script>document.title = 1</script>", "<script> is not allowed"),
    "script_in_capitals": (PAGE + "<SCRIPT>1</SCRIPT>", "<script> is not allowed"),
    "script_file": (PAGE + '<script src="x.js"></script>', "<script> is not allowed"),
    "iframe": (PAGE + '<iframe src="http://x"></iframe>', "<iframe> is not allowed"),
    "svg": (PAGE + "<svg><text>0</text></svg>", "<svg> is not allowed"),
    "made_up_element": (PAGE + "<check-passed></check-passed>", "is not allowed"),
    "template": (f"<template>{PAGE}</template>", "<template> is not allowed"),
    "event_attribute": (PAGE.replace("<button", '<button onclick="f()"'), "scripts are not run"),
    "event_attribute_case": (PAGE + '<b oNcLiCk="f()">x</b>', "scripts are not run"),
    "script_address": (PAGE + '<a href="javascript:f()">x</a>', "scripts are not run"),
    "script_address_hidden": (PAGE + '<a href=" java\nscript:f()">x</a>', "scripts are not run"),
    "id_twice": (PAGE + '<b id="count">5</b>', "the id count stands twice"),
    "id_twice_in_one": ('<b id="a" id="b">x</b>', "attribute id stands twice"),
    "empty_id": ('<b id="">x</b>', "is no id"),
    "id_with_space": ('<b id="a b">x</b>', "is no id"),
    "id_too_long": (f'<b id="{"a" * 65}">x</b>', "is no id"),
    "open_comment": (PAGE + "<!-- the rest", "a comment is never closed"),
    "abrupt_comment": (PAGE + "<!-->", "a comment begins with"),
    "abrupt_comment_with_dash": (PAGE + "<!--->", "a comment begins with"),
    "odd_end_of_comment": (PAGE + "<!-- x --!> y -->", "a comment begins with"),
    "comment_eats_end": ("<div>" + PAGE + "<!-- </div> -->", "never closed"),
    "ends_inside_tag": (PAGE + '<b class="x"', "ends inside a tag"),
    "ends_at_bracket": (PAGE + "</", "ends inside a tag"),
    "title_with_elements": ("<title><b>x</b></title>" + PAGE, "holds text only"),
    "textarea_with_elements": (f"<textarea>{PAGE}</textarea>", "holds text only"),
    "cdata": (PAGE + "<![CDATA[<b>x</b>]]>", "is not allowed"),
    "php": ("<?php echo 1; ?>" + PAGE, "is not allowed"),
    "entity_declaration": ('<!ENTITY x "y">' + PAGE, "is not allowed"),
    "too_deep": ("<div>" * (MOST_DEPTH + 1) + "</div>" * (MOST_DEPTH + 1), "32 deep"),
    "too_many": ("<br>" * (MOST_ELEMENTS + 1), "at most 200 elements"),
}

NOT_BUILT_RULES = {
    "empty": ("", "no JSON"),
    "broken": (RULES[:-1], "no JSON"),
    "trailing_comma": ('{"rules": [],}', "no JSON"),
    "comment": ("// mine\n" + RULES, "no JSON"),
    "script": ("document.getElementById('plus').onclick = f", "no JSON"),
    "python": ("__import__('os').system('true')", "no JSON"),
    "fenced": (f"```json\n{RULES}\n```", "no JSON"),
    "list": ("[]", "an object with the keys rules"),
    "null": ("null", "an object with the keys rules"),
    "more_keys": ('{"rules": [], "score": 1}', "an object with the keys rules"),
    "key_twice": ('{"rules": [], "rules": []}', "a key stands twice"),
    "not_a_number": (RULES.replace("1}", "NaN}"), "NaN is no JSON"),
    "nested": ("[" * 11_000, "nested too deeply"),
    "long_number": ('{"rules": ' + "9" * 6000 + "}", "number that is too long"),
    "rules_no_list": ('{"rules": {}}', "a list of 0 to 24"),
    "too_many": (json.dumps({"rules": [1] * 25}), "a list of 0 to 24"),
    "no_deed": (rule(do=[]), "a list of 1 to 4"),
    "missing_selector": (rule(of="#missing"), "nothing on the page is #missing"),
    "missing_target": (rule(do=[{"hide": "#gone"}]), "nothing on the page is #gone"),
    "selector_no_text": (rule(of=7), "is no selector"),
    "selector_list": (rule(of="#plus, #count"), "is no selector"),
    "selector_child": (rule(of="body > #plus"), "is no selector"),
    "selector_pseudo": (rule(of="#plus:hover"), "is no selector"),
    "selector_empty": (rule(of=" "), "is no selector"),
    "other_event": (rule(on="load"), "one of click, submit"),
    "submit_of_button": (rule(on="submit"), "only a form"),
    "rule_key": (rule(then="win"), "keys on, of, do"),
    "two_deeds_in_one": (rule(do=[{"show": "h1", "hide": "h1"}]), "exactly one of"),
    "unknown_deed": (rule(do=[{"eval": "1"}]), "exactly one of"),
    "deed_key": (rule(do=[{"show": "h1", "after": 3}]), "keys show"),
    "step_zero": (rule(do=[{"increment": "#count", "by": 0}]), "whole number"),
    "step_true": (rule(do=[{"increment": "#count", "by": True}]), "whole number"),
    "step_text": (rule(do=[{"increment": "#count", "by": "1"}]), "whole number"),
    "step_half": (rule(do=[{"increment": "#count", "by": 0.5}]), "whole number"),
    "step_large": (rule(do=[{"increment": "#count", "by": 1001}]), "whole number"),
    "append_to_span": (rule(do=[{"append": "#count", "text": "x"}]), "append needs a list"),
    "no_such_input": (rule(do=[{"set": "h1", "text": "{#who}"}]), "no input #who"),
    "other_braces": (rule(do=[{"set": "h1", "text": "{{7*7}}"}]), "braces"),
    "long_text": (rule(do=[{"set": "h1", "text": "x" * 201}]), "at most 200"),
    "class_with_space": (rule(do=[{"toggle": "h1", "class": "a b"}]), "one name"),
}

NOT_MET = {
    "says_it_is_done": ("<p>All requirements are met. Task complete. Score 1.0.</p>", None),
    "says_it_in_place": (PAGE.replace(">0<", ">done<"), RULES),
    "text_of_the_check": ('<p>["text", "#count", "1"]</p><p>counts: true</p>' + PAGE, None),
    "no_rule": (PAGE, None),
    "rule_for_another": (PAGE, rule(of="h1")),
    "wrong_step": (PAGE, rule(do=[{"increment": "#count", "by": 2}])),
    "right_once": (PAGE, rule(do=[{"set": "#count", "text": "1"}])),
    "answer_in_advance": (PAGE.replace(">0<", ">1<"), RULES),
    "class_for_id": (PAGE.replace("id=\"count", "class=\"count"), RULES.replace("#c", ".c")),
    "two_headings": (PAGE + "<h1>Tea</h1>", RULES),
    "all_headings": ("".join(f"<h1>{word}</h1>" for word in ("Tea", "Coffee")) + PAGE, RULES),
    "in_a_comment": (f"<!-- {PAGE} --><p>x</p>", None),
    "heading_in_a_comment": (PAGE.replace("<h1>Tea</h1>", "<!-- <h1>Tea</h1> -->"), RULES),
    "comment_that_opens_twice": ("<!-- <!-- --> <p>x</p>", None),
    "as_text": (PAGE.replace("<", "&lt;"), None),
    "in_an_attribute": ("<p title='" + PAGE.replace('"', "") + "'>x</p>", None),
    "in_the_head": (f"<head>{PAGE}</head>", RULES),
    "hidden": (f"<div hidden>{PAGE}</div>", RULES),
    "hidden_by_class": (f'<div class="a hidden">{PAGE}</div>', RULES),
    "hidden_by_style": (f'<div style="color: red; DISPLAY : none">{PAGE}</div>', RULES),
    "invisible_by_style": (f'<div style="visibility:hidden">{PAGE}</div>', RULES),
    "switched_off": (PAGE.replace("<button", "<button disabled"), RULES),
    "other_case": (PAGE.replace("Tea", "TEA"), RULES),
    "id_in_other_case": (PAGE.replace("count", "Count"), RULES.replace("count", "Count")),
    "look_alike_letter": (PAGE.replace("Tea", "T\u0435a"), RULES),
    "invisible_letter": (PAGE.replace("Tea", "Te\u200ba"), RULES),
    "full_width_digit": (PAGE.replace(">0<", ">\uff10<"), RULES),
    "other_digits": (PAGE.replace(">0<", ">\u0660<"), RULES),
    "link_for_button": (PAGE.replace("button", "a"), RULES),
    "input_for_span": (PAGE.replace("<span", "<input value=0").replace("0</span>", ""), RULES),
    "count_in_text": (PAGE.replace(">0<", ">0 clicks<"), RULES),
    "hides_after_click": (PAGE, rule(do=[ADD, {"hide": "#plus"}])),
    "undone_by_a_second_deed": (PAGE, rule(do=[ADD, {"set": "#count", "text": "0"}])),
    "counts_at_two_depths": (f"<div>{PAGE}</div>", json.dumps({"rules": [
        {"on": "click", "of": of, "do": [ADD]} for of in ("#plus", "div")
    ]})),
    "empty_page": ("", None),
    "blank_page": ("   \n", None),
    "plain_text": ("Tea 0 Add", None),
}  # fmt: skip

MET = {
    "as_it_is": PAGE,
    "whole_document": f"<!DOCTYPE html><html><head><title>x</title></head>{PAGE}</html>",
    "tags_in_capitals": "<H1>Tea</H1><SPAN ID='count'>0</SPAN><BUTTON id=plus>Add</BUTTON>",
    "single_quotes": PAGE.replace('"', "'"),
    "quotes_in_quotes": PAGE.replace("<h1", "<h1 title='say \"Tea\" > 0'"),
    "white_space": PAGE.replace("Tea", "\n  Tea\t").replace("Add", " Add "),
    "comment_beside": "<!-- <h1>Coffee</h1> -->" + PAGE,
    "comment_inside": PAGE.replace("Tea", "T<!-- x -->ea"),
    "inner_element": PAGE.replace("Tea", "<em>T</em>ea"),
    "entity": PAGE.replace("Tea", "&#84;ea"),
    "void_elements": PAGE + "<br><hr/><img src='x'>",
    "style_is_not_text": PAGE + "<style>h1 { color: red } /* <b> */</style>",
    "other_unicode": PAGE + "<p>\u00fc\u4e2d\U0001f375</p>",
    "inside_a_form": f"<form id='f'>{PAGE}</form>",
    "minus_sign_beside": PAGE + "<p>a < b</p>",
}

REFUSED = {
    "nothing": ("", "no_block"),
    "says_it_is_done": ("I have done everything. All requirements are met.", "no_block"),
    "done_in_a_sentence": ("The task is done", "no_block"),
    "page_without_a_block": (PAGE, "no_block"),
    "block_without_a_name": (f"```\n{PAGE}\n```", "no_path"),
    "block_with_a_language": (f"```html\n{PAGE}\n```", "no_path"),
    "two_names": ("```index.html app.json\nx\n```", "no_path"),
    "open_block": (f"```index.html\n{PAGE}", "unclosed_block"),
    "open_second_block": (f"```index.html\n{PAGE}\n```\n```app.json\n{{", "unclosed_block"),
    "path_up": ("```../index.html\nx\n```", "bad_path"),
    "path_up_inside": ("```a/../../index.html\nx\n```", "bad_path"),
    "path_from_root": ("```/etc/passwd.txt\nx\n```", "bad_path"),
    "path_with_backslash": ("```..\\index.html\nx\n```", "bad_path"),
    "path_with_drive": ("```C:index.html\nx\n```", "bad_path"),
    "path_encoded": ("```%2e%2e/index.html\nx\n```", "bad_path"),
    "path_with_nul": ("```index.html\0.txt\nx\n```", "bad_path"),
    "path_hidden": ("```.git/config.txt\nx\n```", "bad_path"),
    "path_of_a_program": ("```run.sh\nx\n```", "bad_path"),
    "path_too_deep": ("```a/b/c/d.txt\nx\n```", "bad_path"),
    "path_address": ("```http://x/index.html\nx\n```", "bad_path"),
    "path_not_ascii": ("```\u0456ndex.html\nx\n```", "bad_path"),
    "show_path_up": ("show ../secret.txt", "bad_path"),
    "show_what_is_not_there": ("show checks.json", "no_such_file"),
    "delete_what_is_not_there": ("delete notes.txt", "no_such_file"),
    "edit_what_is_not_there": ("```edit index.html\na\n=====\nb\n```", "no_such_file"),
    "edit_without_a_middle": ("```edit index.html\na\n```", "bad_edit"),
    "edit_with_two_middles": ("```edit index.html\na\n=====\nb\n=====\nc\n```", "bad_edit"),
    "edit_of_nothing": ("```index.html\na\n```\n```edit index.html\n=====\nb\n```", "no_place"),
    "edit_in_two_places": (
        "```index.html\naa\n```\n```edit index.html\na\n=====\nb\n```",
        "no_place",
    ),
    "huge_file": ("```index.html\n" + "x" * (MOST_CHARACTERS + 1) + "\n```", "too_large"),
    "grown_by_an_edit": (
        "```index.html\nab\n```\n```edit index.html\nab\n=====\n" + "x" * MOST_CHARACTERS + "\n```",
        "too_large",
    ),
    "many_files": ("\n".join(f"```n{n}.txt\nx\n```" for n in range(9)), "too_large"),
    "many_blocks": ("\n".join("```n.txt\nx\n```" for _ in range(17)), "too_large"),
    "done_beside_a_bad_block": (
        f"```../x.txt\nx\n```\n```index.html\n{PAGE}\n```\ndone",
        "bad_path",
    ),
}  # fmt: skip

(TASK,) = make_tasks("val", 1, 0)


@pytest.mark.parametrize("name", NOT_BUILT_PAGES)
def test_a_page_that_is_wrong_is_not_built(name: str) -> None:
    page, problem = NOT_BUILT_PAGES[name]
    made = build({"index.html": page, "app.json": '{"rules": []}'})
    assert made.app is None
    assert made.rest is None
    assert made.problem.startswith("index.html: ")
    assert problem in made.problem


@pytest.mark.parametrize("name", NOT_BUILT_RULES)
def test_a_behaviour_file_that_is_wrong_is_not_built(name: str) -> None:
    rules, problem = NOT_BUILT_RULES[name]
    made = build({"index.html": PAGE, "app.json": rules})
    assert made.app is None
    assert isinstance(made.rest, App)
    assert made.problem.startswith("app.json: ")
    assert problem in made.problem


@pytest.mark.parametrize("name", NOT_MET)
def test_J12_an_application_is_not_paid_for_what_it_does_not_do(name: str) -> None:
    page, rules = NOT_MET[name]
    assert build({"index.html": page}).app is not None
    assert met(page, rules) == 0.0


@pytest.mark.parametrize("name", MET)
def test_an_unusual_page_that_does_what_it_must_is_accepted(name: str) -> None:
    assert met(MET[name]) == 1.0


@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_cannot_be_carried_out_changes_nothing(name: str) -> None:
    text, note = REFUSED[name]
    env = WebCoder(TASK, 8)
    outcome = env.apply(env.parse(text), None)
    assert outcome.verdict is Verdict.INVALID
    assert outcome.diagnostics == (note,)
    assert outcome.reply.startswith("Nothing is changed: ")
    assert outcome.reply.isprintable()
    assert env.project == {}
    assert not env.rewards


def test_there_are_many_cases() -> None:
    tables = (NOT_BUILT_PAGES, NOT_BUILT_RULES, NOT_MET, MET, REFUSED)
    assert len(list(chain(*tables))) >= 150


def test_a_page_at_the_limits_is_built() -> None:
    deep = "<div>" * MOST_DEPTH + "</div>" * MOST_DEPTH
    assert build({"index.html": deep}).app is not None
    assert build({"index.html": "<br>" * MOST_ELEMENTS}).app is not None


def test_what_a_user_types_is_never_read_as_anything_but_text() -> None:
    page = PAGE + '<input id="who"><ul id="list"></ul><p id="out">-</p>'
    rules = rule(do=[{"append": "#list", "text": "{#who}"}, {"set": "#out", "text": "{#who}"}])
    typed = '<b id="count">1</b> {#who} {#count}'
    check = requirement_from_json(
        {
            "id": "typed",
            "weight": 1,
            "since": "generate",
            "steps": [
                {
                    "events": [["fill", "#who", typed], ["click", "#plus"]],
                    "holds": ["text", "#out", typed],
                },
                {"holds": ["text", "#list li", typed]},
                {"holds": ["count", "#count", "1"]},
            ],
        }
    )
    app = build({"index.html": page, "app.json": rules}).app
    assert app is not None
    assert check.check(app) == 1.0


def test_an_application_that_grows_without_end_stays_within_its_limit() -> None:
    lists = "".join(f'<ul id="u{n}"></ul>' for n in range(100))
    deeds = [{"append": "ul", "text": "x"}] * 4
    text = json.dumps({"rules": [{"on": "click", "of": "#go", "do": deeds}] * 24})
    app = build({"index.html": f'{lists}<button id="go">x</button>', "app.json": text}).app
    assert app is not None
    grows = {"events": [["click", "#go"]] * 3, "holds": ["count", "li", "199"]}
    check = requirement_from_json({"id": "n", "weight": 1, "since": "repair", "steps": [grows]})
    assert check.check(app) == 1.0


def test_a_fence_inside_a_longer_fence_belongs_to_the_file() -> None:
    reading = read("````notes.md\n```index.html\nx\n```\n````")
    assert [operation.path for operation in reading.operations] == ["notes.md"]


@pytest.mark.parametrize("depth", [50, 300, 900, 970, 990, 1100, 5000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_a_file_nested_however_deep_is_a_failed_build(depth: int, brackets: str) -> None:
    opening = "[" if brackets == "[]" else '{"a":'
    depth = min(depth, 11_900 // (len(opening) + 1))
    nested = opening * depth + "1" + brackets[1] * depth
    env = WebCoder(TASK, 8)
    text = f"```index.html\n{PAGE}\n```\n```app.json\n{nested}\n```"
    outcome = env.apply(env.parse(text), None)
    assert outcome.diagnostics == ("build_failed",)
    assert env.state_key() != WebCoder(TASK, 8).state_key()
    assert env.action_key(text) == outcome.action_key


@pytest.mark.parametrize("deed", [{"set": "#plus", "text": "\ud83d"}, {"show": '[a="\ud83d"]'}])
def test_half_a_surrogate_pair_is_a_failed_build(deed: dict[str, str]) -> None:
    page = '<h1>Count</h1><button id="plus">+</button>'
    rules = json.dumps({"rules": [{"on": "click", "of": "#plus", "do": [deed]}]})
    made = build({"index.html": page, "app.json": rules})
    assert made.problem.endswith("half of a surrogate pair")
    made.problem.encode()
