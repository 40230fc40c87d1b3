"""Games of verifiers environments, by the library itself: a published game and ones made here.

Loaders are named ``test_verifiers_games:...``, as a user names those of a module of their own.
"""

# pyright: basic

from __future__ import annotations

import asyncio
import gc
import json
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

vf: Any = pytest.importorskip(
    "verifiers", reason="the library verifiers is not installed; docs/verifiers.md says how"
)
datasets: Any = pytest.importorskip("datasets", reason="comes with the library verifiers")

from delta_belief_rl.envs.base import Env, Outcome  # noqa: E402
from delta_belief_rl.envs.check import check_env  # noqa: E402
from delta_belief_rl.envs.plugin import EnvOptions  # noqa: E402
from delta_belief_rl.envs.verifiers import ENVIRONMENTS  # noqa: E402
from delta_belief_rl.envs.verifiers.game import FAILED  # noqa: E402
from delta_belief_rl.envs.verifiers.loops import loop_thread  # noqa: E402
from delta_belief_rl.types import Message, Task, UserError, Verdict  # noqa: E402

PLUGIN = ENVIRONMENTS["verifiers"]
FREE = threading.Event()
"""Ends the reply of a game that blocks."""


class HigherLower(vf.MultiTurnEnv):
    """Find a number; some words make the environment misbehave."""

    async def setup_state(self, state: Any) -> Any:
        state["replies"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        await asyncio.sleep(0)
        said, number = messages[-1]["content"].strip(), int(state["answer"])
        state["replies"] += 1
        match said:
            case "crash":
                raise KeyError("no such move")
            case "known crash":
                raise vf.ToolError("out of order")
            case "hang":
                await asyncio.sleep(3600)
            case "block":
                FREE.wait()
            case "forget":
                del messages[0]
                messages[0]["content"] = "Another question."
            case "nothing":
                return []
            case "picture":
                part = {"type": "image_url", "image_url": {"url": "data:,"}}
                state["final_env_response"] = [{"role": "user", "content": [part]}]
                return state["final_env_response"]
            case _:
                pass
        state["solved"] = said == str(number)
        if not said.isdecimal():
            word = "What?"
        elif state["solved"]:
            word = f"Yes, {number}."
        else:
            word = "higher" if number > int(said) else "lower"
        return [{"role": "user", "content": word}, {"role": "user", "content": "Next?"}][
            : 1 + (said == "twice")
        ]

    async def get_prompt_messages(self, state: Any) -> Any:
        prompt = await super().get_prompt_messages(state)
        rewrites = state["trajectory"] and prompt[-2]["content"] == "forget"
        return prompt[1:] if rewrites else prompt

    @vf.stop
    async def is_solved(self, state: Any) -> bool:
        return bool(state.get("solved"))


async def exact(completion: Any, answer: str) -> float:
    await asyncio.sleep(0)
    return float(any(one["content"].strip() == answer for one in completion))


def quick(state: Any) -> float:
    return 1.0 if len(state["trajectory"]) <= 2 else 0.0


def heard(completion: Any) -> float:
    return float(completion[-1]["role"] == "user")


def broken(**_: Any) -> float:
    raise ZeroDivisionError("no turns")


async def broken_later(state: Any) -> float:
    raise ZeroDivisionError(f"{len(state['trajectory'])} turns")


def no_number(completion: Any) -> Any:
    return {"completion": len(completion)}


def together(completions: Any) -> list[float]:
    return [1.0 for _ in completions]


FUNCS: dict[str, Callable[..., Any]] = {
    func.__name__: func for func in (exact, quick, heard, broken, broken_later, no_number, together)
}


def rows(count: int, first: int = 0) -> Any:
    numbers = range(first, first + count)
    return datasets.Dataset.from_list(
        [
            {"question": f"Which number? ({n})", "answer": str(n), "info": {"half": n / 2}}
            for n in numbers
        ]
    )


def number_game(
    rubric: dict[str, float] | None = None, held_out: int = 0, count: int = 20, **kwargs: Any
) -> Any:
    weights = rubric or {"exact": 0.8, "quick": 0.2}
    return HigherLower(
        dataset=rows(count),
        eval_dataset=rows(held_out, 100) if held_out else None,
        rubric=vf.Rubric(funcs=[FUNCS[name] for name in weights], weights=[*weights.values()]),
        system_prompt="Find the number.",
        **kwargs,
    )


def options(max_turns: int = 5, loader: str = "number_game", **kwargs: Any) -> EnvOptions:
    return EnvOptions(max_turns=max_turns, kwargs={"environment": f"{__name__}:{loader}", **kwargs})


def new_game(number: int = 7, how: EnvOptions | None = None) -> Env:
    how = how or options()
    task = next(task for task in tasks("train", how) if task.secret == str(number))
    return PLUGIN.make(how)(task)


def tasks(split: str, how: EnvOptions) -> list[Task]:
    assert PLUGIN.tasks is not None
    return list(PLUGIN.tasks(split, how))


def say(game: Env, text: str) -> Outcome:
    return game.apply(game.parse(text), None)


def play(*moves: str, how: EnvOptions | None = None) -> list[Outcome]:
    game = new_game(how=how)
    return [say(game, move) for move in moves]


def test_a_game_is_won_with_the_weighted_sum_of_two_functions() -> None:
    first, last = play("3", "7")
    assert (first.verdict, first.reply, first.done, first.score) == (
        Verdict.OTHER,
        "higher",
        False,
        None,
    )
    assert (last.verdict, last.done, last.score) == (Verdict.WIN, True, 1.0)
    assert last.strict_win
    assert last.compatible_win


def test_a_win_that_is_not_worth_everything_needs_win_at() -> None:
    late = ("3", "4", "7")
    end = play(*late)[-1]
    assert (end.verdict, end.done, end.score) == (Verdict.OTHER, True, 0.8)
    assert not end.strict_win
    assert play(*late, how=options(win_at=0.8))[-1].verdict is Verdict.WIN
    named = play(*late, how=options(win_metric="exact"))[-1]
    assert (named.verdict, named.score) == (Verdict.WIN, 0.8)


def test_a_game_is_lost_at_the_turn_limit_after_the_last_reply() -> None:
    *before, last = play("1", "2", "3", how=options(max_turns=3))
    assert [outcome.done for outcome in before] == [False, False]
    assert (last.reply, last.done, last.verdict, last.score) == (
        "higher",
        True,
        Verdict.OTHER,
        0.0,
    )
    assert play("1", "2", "7", how=options(max_turns=3))[-1].score == 0.8


def test_the_environments_own_turn_limit_is_kept_where_it_is_smaller() -> None:
    how = options(max_turns=9, args={"max_turns": 2})
    _, last = play("1", "2", how=how)
    assert (last.done, last.reply, last.score) == (True, "The game is over.", 0.2)


def test_a_stop_condition_ends_the_game_with_the_reply_that_makes_it_true() -> None:
    how = options(args={"rubric": {"exact": 0.5, "heard": 0.5}})
    last = play("5", "7", how=how)[-1]
    assert last.done
    # The rubric reads the reply, too.
    assert last.score == 1.0


def test_a_last_reply_that_tells_the_secret_is_not_shown() -> None:
    end = play("7")[-1]
    assert end.reply == "The game is over."
    assert "secret_told" in end.diagnostics


def test_a_game_can_be_played_inside_of_a_running_loop() -> None:
    async def inside() -> list[Outcome]:
        await asyncio.sleep(0)
        return play("3", "7")

    assert asyncio.run(inside()) == play("3", "7")


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        ("crash", "KeyError: 'no such move'"),
        ("known crash", "ToolError('out of order')"),
        ("forget", "rewrites earlier messages"),
    ],
)
def test_a_crash_is_a_failure_and_never_a_reward(move: str, reason: str) -> None:
    game = new_game()
    say(game, "3")
    end = say(game, move)
    assert (end.verdict, end.done, end.score) == (Verdict.ERROR, True, None)
    assert not end.strict_win
    assert end.diagnostics[0] == FAILED
    assert reason in end.diagnostics[1]
    with pytest.raises(ValueError, match="game is over"):
        say(game, "7")


@pytest.mark.parametrize(
    ("rubric", "reason"),
    [
        ({"exact": 1.0, "broken": 0.5}, "broken: ZeroDivisionError: no turns"),
        ({"broken_later": 1.0}, "broken_later: ZeroDivisionError: 1 turns"),
        ({"exact": 1.0, "no_number": -1.0}, "no_number: TypeError"),
    ],
)
def test_a_crash_of_a_reward_function_is_not_a_reward_of_zero(
    rubric: dict[str, float], reason: str
) -> None:
    end = play("7", how=options(args={"rubric": rubric}))[-1]
    assert (end.verdict, end.score) == (Verdict.ERROR, None)
    assert reason in end.diagnostics[1]


def test_a_crash_of_a_function_that_pays_nothing_costs_nothing() -> None:
    rubric = {"exact": 1.0, "broken": 0.0}
    assert play("7", how=options(args={"rubric": rubric}))[-1].score == 1.0
    named = options(args={"rubric": rubric}, win_metric="broken")
    assert play("7", how=named)[-1].verdict is Verdict.ERROR


def test_rewards_become_scores_by_their_range() -> None:
    fined = {"exact": 1.0, "quick": -1.0}
    assert play("7", how=options(args={"rubric": fined}))[-1].score == 0.5
    doubled = {"exact": 2.0}
    assert play("7", how=options(args={"rubric": doubled}, score_range=[0, 4]))[-1].score == 0.5
    outside = play("7", how=options(args={"rubric": doubled}, score_range=[0, 1]))[-1]
    assert outside.verdict is Verdict.ERROR
    assert "the reward 2 lies outside of score_range [0, 1]" in outside.diagnostics[1]


def test_a_last_reply_that_is_no_text_is_a_failure() -> None:
    end = play("picture", how=options(args={"rubric": {"quick": 1.0}}))[-1]
    assert (end.verdict, end.score) == (Verdict.ERROR, None)
    assert "content of the type 'image_url', not text" in end.diagnostics[1]


class Unsure(vf.Rubric):
    """Scores by itself, and not always."""

    async def score_rollout(self, state: Any) -> None:
        state["reward"] = 2.0 if state.get("solved") else None
        state["metrics"] = {}


def scores_by_itself() -> Any:
    return HigherLower(dataset=rows(20), rubric=Unsure())


def test_a_rubric_that_scores_by_itself_needs_a_range_and_a_number() -> None:
    with pytest.raises(UserError, match="score_range"):
        PLUGIN.make(options(loader="scores_by_itself"))
    how = options(1, loader="scores_by_itself", score_range=[0, 2])
    assert play("7", how=how)[-1].verdict is Verdict.WIN
    unscored = play("3", how=how)[-1]
    assert (unscored.verdict, unscored.score) == (Verdict.ERROR, None)


def test_a_reply_that_does_not_come_in_time_is_a_failure() -> None:
    end = play("3", "hang", how=options(timeout_s=0.3))[-1]
    assert (end.verdict, end.done, end.score) == (Verdict.ERROR, True, None)
    assert "no reply in 0.3 s" in end.diagnostics[1]


def test_code_that_blocks_is_a_failure_and_later_games_go_on() -> None:
    try:
        end = play("3", "block", how=options(timeout_s=0.3))[-1]
        assert (end.verdict, end.score) == (Verdict.ERROR, None)
        assert "does not await" in end.diagnostics[1]
        assert play("3", "7")[-1].verdict is Verdict.WIN
    finally:
        FREE.set()


def test_two_interleaved_games_are_the_two_played_alone() -> None:
    moves = ("3", "9", "crash 3", "7")
    other = ("12", "15", "11", "13")
    alone = [[say(game, move) for move in moves] for game in [new_game(7)]]
    alone += [[say(game, move) for move in other] for game in [new_game(13)]]
    first, second = new_game(7), new_game(13)
    both = [(say(first, a), say(second, b)) for a, b in zip(moves, other, strict=True)]
    assert [list(side) for side in zip(*both, strict=True)] == alone


def test_the_contract_holds() -> None:
    check_env(new_game, ("3", "", "9", "twice", "7"))
    check_env(new_game, ("3", "nothing", "crash"))


def test_replies_of_any_shape_are_one_text() -> None:
    twice, nothing = play("twice", "nothing")
    assert twice.reply == "What?\n\nNext?"
    assert nothing.reply == "There is no reply."


def test_only_the_text_in_the_tag_reaches_the_environment() -> None:
    how = EnvOptions(5, True, options().kwargs)
    game = new_game(how=how)
    untagged = say(game, "I think that it is 7")
    assert (untagged.verdict, untagged.reply) == (Verdict.INVALID, "What?")
    assert untagged.diagnostics == ("no_question",)
    assert say(game, "It may be 3. <question>3</question>").reply == "higher"
    assert say(game, "So <question> 7 </question>").verdict is not Verdict.INVALID


def test_a_judge_has_no_part_in_a_game() -> None:
    game = new_game()
    assert not game.parse("Is it 3?").needs_judge
    with pytest.raises(ValueError, match="needs a judge"):
        game.judge_request(game.parse("3"))


def test_tasks_are_rows_and_a_game_needs_nothing_else() -> None:
    how = options(args={"held_out": 6}, tasks={"train": 4, "val": 3, "test": 2})
    train, val, test = (tasks(split, how) for split in ("train", "val", "test"))
    assert [task.id for task in train] == [f"train_{at}" for at in range(4)]
    assert [task.id for task in (*val, *test)] == [f"eval_{at}" for at in range(5)]
    assert [task.secret for task in test] == ["103", "104"]
    assert {task.split for task in test} == {"test"}
    assert val[0].messages == (
        Message("system", "Find the number."),
        Message("user", "Which number? (100)"),
    )
    game = PLUGIN.make(options(args={"held_out": 6}))(test[1])
    assert say(game, "104").verdict is Verdict.WIN


def test_the_secret_can_be_an_info_field_or_nothing() -> None:
    assert tasks("train", options(secret="info.half"))[3].secret == "1.5"
    assert tasks("train", options(secret=""))[3].secret == ""
    for name in ("solution", "info.third"):
        with pytest.raises(UserError, match=f"secret is '{name}', which a row of"):
            tasks("train", options(secret=name))


def test_a_task_of_another_dataset_is_refused() -> None:
    make = PLUGIN.make(options())
    known = tasks("train", options())[2]
    for strange in ("train_99", "eval_0", "2"):
        with pytest.raises(UserError, match="is no row of"):
            make(Task(strange, "verifiers", "2", known.messages))
    with pytest.raises(UserError, match="another one than row 2"):
        make(Task("train_2", "verifiers", "2", (Message("user", "Which?"),)))


def with_tools() -> Any:
    def look(at: str) -> str:
        """Look.

        Args:
            at: Where.
        """
        return at

    return vf.ToolEnv(tools=[look], dataset=rows(3), rubric=vf.Rubric(funcs=[quick]))


def with_api_judge() -> Any:
    from openai import AsyncOpenAI

    judge = vf.JudgeRubric(judge_client=AsyncOpenAI(api_key="none"))
    judge.add_reward_func(quick)
    return HigherLower(dataset=rows(3), rubric=judge)


def group_of_environments() -> Any:
    return vf.EnvGroup(envs=[number_game(), number_game()], env_names=["one", "two"])


def opens_otherwise() -> Any:
    class Opens(HigherLower):
        async def setup_state(self, state: Any) -> Any:
            state["prompt"] = [vf.UserMessage(content="Something else.")]
            return await super().setup_state(state)

    return Opens(dataset=rows(3), rubric=vf.Rubric(funcs=[quick]))


def cannot_start() -> Any:
    class Starts(HigherLower):
        async def setup_state(self, state: Any) -> Any:
            raise OSError("no such service")

    return Starts(dataset=rows(3), rubric=vf.Rubric(funcs=[quick]))


def with_pictures() -> Any:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    prompt = [{"role": "user", "content": [picture]}]
    return HigherLower(
        dataset=datasets.Dataset.from_list([{"prompt": prompt, "answer": "1"}] * 3),
        rubric=vf.Rubric(funcs=[quick]),
    )


def crashing_loader() -> Any:
    raise SystemExit("no key in the environment")


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        (options(loader="with_tools"), "gives the agent tools to call"),
        (options(loader="with_api_judge"), "scores with a language model behind an API"),
        (options(loader="group_of_environments"), "is EnvGroup, which is no MultiTurnEnv"),
        (options(args={"rubric": {"together": 1.0}}), "scores the games of a group"),
        (options(args={"rubric": {"exact": 0.0}}), "has no function with a weight: give .*range"),
        (options(args={"score_rollouts": False}), "does not score its games"),
        (options(win_metric="won"), "the reward functions of .* are exact, num_turns, quick"),
        (options(loader="opens_otherwise"), "opens it with other messages"),
        (options(loader="cannot_start"), "cannot be started: OSError: no such service"),
        (options(loader="with_pictures"), "content of the type 'image_url', not text"),
        (options(loader="crashing_loader"), "SystemExit: no key in the environment"),
        (options(loader="no_such_loader"), "AttributeError"),
        (options(args={"colour": "red", "rubric": {"no_such": 1.0}}), "KeyError: 'no_such'"),
        (EnvOptions(5, False, {"environment": "no-such-environment"}), "Could not import"),
        (EnvOptions(5, False, {"environment": "no_such_module:load"}), "ModuleNotFoundError"),
    ],
    ids=lambda value: value.kwargs["environment"] if isinstance(value, EnvOptions) else "",
)
def test_what_cannot_be_played_is_one_sentence(how: EnvOptions, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        tasks("train", how)
    assert "\n" not in str(caught.value)


def test_an_environment_leaves_signals_and_random_numbers_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    random.seed(5)
    expected = random.random()
    random.seed(5)
    loaded: list[Task] = []
    # A worker loads it in a thread that may set no handler at all.
    thread = threading.Thread(
        target=lambda: loaded.extend(tasks("train", options(args={"count": 4})))
    )
    thread.start()
    thread.join()
    assert len(loaded) == 3
    assert random.random() == expected
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_game_that_is_not_played_on_leaves_nothing_behind() -> None:
    loop = loop_thread()

    async def running() -> int:
        for _ in range(5):
            await asyncio.sleep(0)
        return sum("Desk._play" in repr(task.get_coro()) for task in asyncio.all_tasks())

    game = new_game()
    say(game, "3")
    gc.collect()
    before = loop.call(running(), 60.0)
    del game
    gc.collect()
    assert loop.call(running(), 60.0) == before - 1


WORDS = ("apple", "bread", "chair", "crane", "house", "table", "train")

WORDLE = """
import verifiers as vf

def solved(parser, completion, answer, **kwargs):
    return 1.0 if parser.parse_answer(completion) == f"[{answer}]" else 0.0

def load_environment(rows=12):
    parser = vf.XMLParser(fields=["guess"], answer_field="guess")
    rubric = vf.Rubric(parser=parser)
    rubric.add_reward_func(solved)
    rubric.add_reward_func(parser.get_format_reward_func(), weight=0.2)
    return vf.TextArenaEnv(
        game="Wordle-v0", num_train_examples=rows, num_eval_examples=3, parser=parser, rubric=rubric
    )
"""


@pytest.fixture(scope="module")
def wordle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TextArena's Wordle, over a few words in place of the lists that NLTK would download."""
    pytest.importorskip("textarena", reason="textarena is not installed")
    folder: Path = tmp_path_factory.mktemp("wordle")
    (folder / "verifiers_wordle.py").write_text(WORDLE)
    lists = folder / "corpora" / "words"
    tagger = folder / "taggers" / "averaged_perceptron_tagger_eng"
    for path in (lists, tagger):
        path.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (lists / name).write_text("\n".join(WORDS) + "\n")
    parts = {"weights": {}, "tagdict": dict.fromkeys(WORDS, "NN"), "classes": ["NN"]}
    for name, content in parts.items():
        path = tagger / f"averaged_perceptron_tagger_eng.{name}.json"
        path.write_text(json.dumps(content))
    nltk: Any = pytest.importorskip("nltk")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(nltk.data, "path", [str(folder)])
        patch.setattr(nltk, "download", lambda *_, **__: True)
        yield EnvOptions(9, False, {"environment": "verifiers-wordle", "win_metric": "solved"})


def guess(word: str) -> str:
    return f"<guess>[{word}]</guess>"


def test_wordle_is_won_and_lost_and_keeps_the_contract(wordle: EnvOptions) -> None:
    train, val = tasks("train", wordle), tasks("val", wordle)
    assert (len(train), len(val)) == (12, 3)
    assert "Wordle" in train[0].messages[-1].content
    task, make = train[0], PLUGIN.make(wordle)
    wrong = [word for word in WORDS if word != task.secret]

    won = make(task)
    assert "Feedback" in say(won, guess(wrong[0])).reply
    end = say(won, guess(task.secret))
    assert (end.verdict, end.done, end.score) == (Verdict.WIN, True, 1.0)

    lost = make(task)
    outcomes = [say(lost, guess(word)) for word in wrong]
    assert [outcome.done for outcome in outcomes] == [False] * 5 + [True]
    assert outcomes[-1].verdict is Verdict.OTHER
    # The format is paid, and the word that the game tells at its end is not shown.
    assert outcomes[-1].score == pytest.approx(0.2 / 1.2)
    assert task.secret not in outcomes[-1].reply

    check_env(lambda: make(task), (guess(wrong[0]), "", guess(wrong[1]), guess(task.secret)))
