"""Games of the environment webcoder: tasks in a row, hooks, stored games, settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from webcoder_fakes import (
    ADDS,
    BUTTON,
    HEADING,
    PAGE,
    RULES,
    THREE,
    block,
    do,
    job,
    played,
    task,
)

from delta_belief_rl.envs.base import JudgeReply
from delta_belief_rl.envs.check import available_hooks, check_env
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.webcoder import ENVIRONMENTS
from delta_belief_rl.envs.webcoder.app import build
from delta_belief_rl.envs.webcoder.faults import broken
from delta_belief_rl.envs.webcoder.game import CLOSED, WebCoder
from delta_belief_rl.envs.webcoder.report import by_kind, task_rewards
from delta_belief_rl.envs.webcoder.settings import WebCoderSettings, read_settings
from delta_belief_rl.envs.webcoder.tasks import make_tasks
from delta_belief_rl.types import (
    FloatArray,
    StopReason,
    UserError,
    Verdict,
)

CARDS = make_tasks("val", 12, 0)[5]

# --- games ----------------------------------------------------------------------------------------


def test_the_worked_example_as_a_game() -> None:
    # w = [2, 1, 1]; before the last task [1, 1, 0], after it [1, 0, 1].
    shown = {**ADDS, "steps": [{"holds": ["exists", "#new"]}]}
    env = WebCoder(task(job("reproduce"), job("generate"), job("modify"),
                        requirements=(HEADING, BUTTON, shown)), 8)  # fmt: skip
    do(env, block("index.html", PAGE) + "done", "done")
    assert env.rewards == pytest.approx((0.75, 0.75))
    (end,) = do(env, block("index.html", '<h1>Tea</h1><p id="new">x</p>') + "done")
    assert env.rewards[2] == pytest.approx(0.625, abs=1e-5)
    assert end.score == pytest.approx((0.75 + 0.75 + 0.625) / 3)
    assert end.diagnostics == ("task_over", "regression")
    assert end.verdict is Verdict.OTHER
    assert end.done


def test_a_task_ends_with_done_or_with_its_last_message_and_the_next_one_is_told() -> None:
    env = WebCoder(THREE, 8)
    first, second, third = do(env, block("index.html", PAGE), "hm", "done")
    assert first.diagnostics == ()
    assert second.diagnostics == ("no_block", "task_over")
    assert "Task 2 of 3 (generate): generate it." in second.reply
    assert third.diagnostics == ("no_change", "task_over")
    assert env.rewards == pytest.approx((0.75, 0.75))


def test_a_task_may_have_more_messages() -> None:
    env = WebCoder(THREE, 30, WebCoderSettings(turns_per_task=3))
    outcomes = do(env, *("hm",) * 9)
    ends = ["task_over" in outcome.diagnostics for outcome in outcomes]
    assert ends == [False, False, True] * 3
    assert outcomes[-1].done
    assert outcomes[-1].score == 0.0
    assert outcomes[-1].reply.endswith(CLOSED)


def test_the_turn_limit_ends_a_game_and_tasks_not_reached_count_nothing() -> None:
    env = WebCoder(THREE, 1)
    (end,) = do(env, block("index.html", PAGE) + block("app.json", RULES))
    assert end.done
    assert env.rewards == (1.0,)
    assert end.score == pytest.approx(1 / 3)
    assert not end.strict_win


def test_a_failed_build_earns_nothing_with_the_gate_and_the_page_alone_without_it() -> None:
    broken_rules = block("index.html", PAGE) + block("app.json", "x") + "done"
    shut = WebCoder(THREE, 8)
    opened = WebCoder(THREE, 8, WebCoderSettings(gate=False))
    for env in (shut, opened):
        (outcome,) = do(env, broken_rules)
        assert outcome.diagnostics == ("build_failed", "task_over")
        assert outcome.reply.startswith("Build failed: app.json: line 1: it is no JSON.")
    assert shut.rewards == (0.0,)
    assert shut.progress() == 0.0
    assert opened.rewards == (0.75,)
    assert opened.progress() == 0.75


def test_the_grade_is_clamped_where_regressions_outweigh_the_rest() -> None:
    settings = WebCoderSettings(regression=4.0)
    env = WebCoder(THREE, 8, settings)
    *_, end = do(env, env.reference(), "done", block("index.html", "<p>x</p>") + "delete app.json")
    assert env.rewards == (1.0, 1.0)
    (end,) = do(env, "done")
    assert env.rewards == (1.0, 1.0, -4.0)
    assert end.score == 0.0


FAULTS = [
    ({"kind": "lost_rule", "of": "#plus"}, 0.75, True),
    ({"kind": "wrong_step", "of": "#plus"}, 0.75, True),
    ({"kind": "lost_end", "tag": "button"}, 0.0, False),
    ({"kind": "old_text", "now": "Tea", "old": "Coffee"}, 0.5, True),
]


@pytest.mark.parametrize(("fault", "left", "built"), FAULTS, ids=lambda value: str(value)[:24])
def test_something_is_broken_before_the_repair(
    fault: dict[str, str], left: float, built: bool
) -> None:
    env = WebCoder(task(job("reproduce"), job("generate"), job("modify"), job("repair", fault)), 8)
    do(env, env.reference(), "done", "done")
    assert env.progress() == left
    (looked,) = do(env, "show index.html\nshow app.json")
    assert looked.diagnostics == ("no_change",)
    assert "index.html:\n<h1>" in looked.reply
    assert (build(env.project).app is not None) is built
    (end,) = do(env, env.reference())
    assert env.rewards == (1.0,) * 4
    assert end.verdict is Verdict.WIN
    assert end.strict_win
    assert end.compatible_win
    assert end.score == 1.0


@pytest.mark.parametrize("fault", [fault for fault, *_ in FAULTS], ids=lambda fault: fault["kind"])
@pytest.mark.parametrize(
    "project",
    [{}, {"index.html": "<p>"}, {"index.html": "<i>x</i>", "app.json": "["}, {"notes.txt": "x"}],
)
def test_a_fault_leaves_alone_what_it_cannot_break(
    fault: dict[str, str], project: dict[str, str]
) -> None:
    assert broken(project, fault) == project


def test_the_same_in_vain_in_the_same_state_is_a_repetition() -> None:
    env = WebCoder(THREE, 30, WebCoderSettings(turns_per_task=8))
    write = block("index.html", PAGE)
    verdicts = [outcome.verdict for outcome in do(env, write, write, write, "show index.html")]
    assert verdicts == [Verdict.OTHER, Verdict.OTHER, Verdict.REPEATED, Verdict.OTHER]
    (other,) = do(env, write + block("n.txt", "x"))
    assert other.verdict is Verdict.OTHER


def test_replies_say_what_is_seen_and_never_what_is_checked() -> None:
    hidden = {**HEADING, "steps": [{"holds": ["text", "h1", "Marzipan"]}]}
    env = WebCoder(task(job("reproduce"), job("generate"), requirements=(hidden, ADDS)), 8)
    texts = (block("index.html", PAGE), block("app.json", RULES), "no", "done")
    for outcome in do(env, *texts):
        assert "Marzipan" not in outcome.reply
        assert "Marzipan" not in env.feedback()
        assert "require" not in outcome.reply
    env = WebCoder(THREE, 8)
    _, outcome = do(env, block("index.html", PAGE), block("app.json", RULES))
    assert outcome.reply.startswith(
        'Build ok. Page: h1 "Tea" | span#a "0" | button#plus "Add". Behaviour: click on '
        'button#plus "Add": #a "0" -> "1".'
    )
    assert env.feedback() == (
        "Message: write app.json. (task_over) 3 of 3 requirements of the task hold."
    )


def test_a_long_page_is_told_in_short() -> None:
    page = "".join(f'<button id="b{n}">{"word " * 30}</button>' for n in range(60))
    env = WebCoder(THREE, 8)
    (outcome,) = do(env, block("index.html", page) + block("app.json", json.dumps({"rules": [
        {"on": "click", "of": "button", "do": [{"set": "#b1", "text": "x"}]}]})))  # fmt: skip
    assert outcome.reply.startswith("Build ok.")
    assert len(outcome.reply) < 1000


# --- hooks ----------------------------------------------------------------------------------------

SCRIPTS = [
    ("hello", "show index.html", block("index.html", PAGE), "done", block("../x.txt", "x"), "done"),
    (
        block("index.html", "<p>"),
        block("index.html", "<p>"),
        "done",
        "done",
        "done",
        "done",
        "done",
    ),
    ("", "\n\u200b", "```", "done" * 9, block("app.json", RULES)),
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("tagged", [False, True])
def test_the_environment_keeps_its_contract(script: Sequence[str], tagged: bool) -> None:
    check_env(lambda: WebCoder(CARDS, 8, question_tag=tagged), script)


def test_the_solver_keeps_the_contract_to_the_end() -> None:
    env, script = WebCoder(CARDS, 8), list[str]()
    while not env.rewards or len(env.rewards) < 4:
        script.append(env.reference())
        do(env, script[-1])
    assert env.reference() == ""
    check_env(lambda: WebCoder(CARDS, 8), script)
    hooks = {"state_key", "progress", "footprint", "snapshot", "restore", "feedback", "reference"}
    assert hooks | {"action_key"} == available_hooks(env)


def test_states_recur_and_tell_projects_and_tasks_apart() -> None:
    one, two = WebCoder(THREE, 8), WebCoder(THREE, 8)
    start = one.state_key()
    do(one, block("index.html", PAGE))
    do(two, block("index.html", PAGE.replace("\n", " \n")))
    assert one.state_key() == two.state_key() != start
    do(two, "done")
    assert one.state_key() != two.state_key()


def test_action_keys_are_equal_for_messages_that_ask_for_the_same() -> None:
    env = WebCoder(THREE, 8)
    keys = [
        env.action_key(text)
        for text in (
            block("app.json", RULES),
            "Here:\n" + block("json app.json", RULES.replace(": ", " : ")),
            block("app.json", RULES) + "done",
            block("index.html", PAGE),
            "done",
            "no block",
            "nothing at all",
        )
    ]
    assert keys[0] == keys[1]
    assert keys[5] == keys[6] == "invalid"
    assert len(set(keys)) == 5


def test_progress_is_the_satisfied_share_of_the_task_that_is_on() -> None:
    env = WebCoder(THREE, 8)
    assert env.progress() == 0.0
    do(env, block("index.html", "<h1>Tea</h1>"))
    assert env.progress() == 0.5
    do(env, block("index.html", PAGE))
    assert env.progress() == 0.75


def test_the_footprint_names_files_and_elements() -> None:
    env = WebCoder(THREE, 30, WebCoderSettings(turns_per_task=8))
    assert env.footprint() == (frozenset(), frozenset())
    do(env, block("index.html", PAGE))
    assert env.footprint() == (frozenset(), frozenset({"file index.html", "#a", "#plus"}))
    do(env, block("app.json", RULES))
    writes = frozenset({"file app.json", "#plus"})
    assert env.footprint() == (frozenset({"#a", "#plus"}), writes)
    do(env, block("edit index.html", "Add\n=====\nMore"))
    assert env.footprint() == (
        frozenset({"file index.html"}), frozenset({"file index.html", "#plus"})
    )  # fmt: skip
    do(env, "show app.json")
    assert env.footprint() == (frozenset({"file app.json"}), frozenset())
    do(env, "nothing")
    assert env.footprint() == (frozenset(), frozenset())


# --- stored games ---------------------------------------------------------------------------------


def test_rewards_of_tasks_can_be_told_from_a_stored_game() -> None:
    settings = WebCoderSettings()
    env = WebCoder(THREE, 8)
    texts = (block("index.html", PAGE), "done", "hm", "hm", "delete index.html\ndone")
    game = played(env, *texts)
    rewards: FloatArray = task_rewards(game, settings, 8)
    assert np.isnan(rewards).tolist() == [True, False, True, False, False]
    assert rewards[[1, 3, 4]].tolist() == pytest.approx(list(env.rewards))
    ungated = task_rewards(game, WebCoderSettings(regression=1.0, gate=False), 8)
    assert ungated[4] == pytest.approx(-0.75)


def test_the_report_counts_by_kind_of_task() -> None:
    texts = (
        block("index.html", "<p>"),
        block("index.html", PAGE),
        "done",
        "delete index.html\ndone",
    )
    won = WebCoder(THREE, 8)
    games = [
        played(WebCoder(THREE, 8), *texts),
        played(won, won.reference(), "done", "done", stop=StopReason.WIN),
        replace(played(WebCoder(THREE, 8), *texts), stop=StopReason.ENGINE_FAILED),
        replace(played(WebCoder(THREE, 8), "done"), task=replace(THREE, source="tw_q")),
    ]
    report = by_kind(games, WebCoderSettings(), 8)
    assert list(report) == ["reproduce", "generate", "modify"]
    first, last = report["reproduce"], report["modify"]
    assert (first.tasks, first.reward, first.solved) == (2, 0.875, 0.5)
    assert first.failed_builds == pytest.approx(1 / 3)
    assert (last.reward, last.solved, last.regressions, last.check_errors) == (0.5, 0.5, 0.5, 0)
    assert by_kind([], WebCoderSettings(), 8) == {}


# --- calls and settings ---------------------------------------------------------------------------


def test_no_judge_is_asked_and_a_game_is_single_use() -> None:
    env = WebCoder(THREE, 1)
    action = env.parse("done")
    assert not action.needs_judge
    with pytest.raises(ValueError, match="judge"):
        env.judge_request(action)
    with pytest.raises(ValueError, match="judge"):
        env.apply(action, JudgeReply(Verdict.YES))
    do(env, "done")
    with pytest.raises(ValueError, match="over"):
        env.apply(action, None)
    with pytest.raises(TypeError):
        env.restore("x")


def test_settings_are_read() -> None:
    assert read_settings({}) == WebCoderSettings()
    given = {"seed": 3, "tasks": {"val": 2}, "kinds": ["reproduce"], "turns_per_task": 4,
             "regression": 0, "gate": False, "prompt": "short"}  # fmt: skip
    tasks = (("train", 0), ("val", 2), ("test", 0))
    wanted = WebCoderSettings(3, tasks, ("reproduce",), 4, 0.0, False, "short")
    assert read_settings(given) == wanted


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"sead": 1}, "did you mean seed"),
        ({"seed": -1}, r"env_kwargs.seed is -1"),
        ({"tasks": 5}, r"env_kwargs.tasks is 5"),
        ({"tasks": {"dev": 5}}, r"no key 'dev'"),
        ({"tasks": {"val": 5001}}, r"tasks.val is 5001"),
        ({"kinds": ["modify"]}, r"env_kwargs.kinds is"),
        ({"kinds": []}, r"env_kwargs.kinds is"),
        ({"kinds": "reproduce"}, r"env_kwargs.kinds is"),
        ({"turns_per_task": 0}, r"turns_per_task is 0"),
        ({"turns_per_task": True}, r"turns_per_task is True"),
        ({"regression": "much"}, r"regression is 'much'"),
        ({"regression": -1}, r"regression is -1"),
        ({"gate": 1}, r"gate is 1"),
        ({"prompt": "long"}, r"prompt is 'long'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(kwargs: dict[str, object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        ENVIRONMENTS["webcoder"].make(EnvOptions(8, kwargs=kwargs))


def test_a_game_needs_a_turn() -> None:
    with pytest.raises(UserError, match="at least one turn"):
        ENVIRONMENTS["webcoder"].make(EnvOptions(0))
