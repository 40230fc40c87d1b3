"""Games of TextArena: the real package, its rules, its seeds, and what is refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from delta_belief_rl.envs.base import JudgeReply, Outcome
from delta_belief_rl.envs.check import check_env
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.textarena import ENVIRONMENTS, library
from delta_belief_rl.envs.textarena.catalogue import GAMES, REFUSED
from delta_belief_rl.envs.textarena.game import FAILED, LOST, NO_MOVE, TextArenaGame
from delta_belief_rl.envs.textarena.settings import SPLITS, read_settings
from delta_belief_rl.types import Task, UserError, Verdict

pytest.importorskip("textarena")

PLUGIN = ENVIRONMENTS["textarena"]
ROOT = Path(__file__).resolve().parents[2]
WORDS = ("crane", "slate", "house", "storm", "cloud", "apple", "tiger", "plant", "money", "bread")
# The smallest variant of each game; those with words have a list of their own here.
VARIANTS = {
    "2048-v0": ("[Up]", "[Left]", "[Down]", "x", "[Right]"),
    "Blackjack-v0": ("[hit]", "[stand]", "x", "[stand]"),
    "Countdown-v0": ("[0 1 +]", "[0 1 *]", "x", "[0 1 -]"),
    "Crosswords-v0": ("[0 0 d]", "[1 2 G]"),
    "Cryptarithm-v0": ("[S 9]", "[E 5]", "x", "[N 6]"),
    "FrozenLake-v0": ("[right]", "[down]", "[down]"),
    "GuessTheNumber-v0": ("[3]", "[17]", "x", "[9]"),
    "Hangman-v0": ("[e]", "[a]", "x", "[o]"),
    "LightsOut-v0": ("[1 1]", "[2 2]", "x"),
    "LogicPuzzle-v0": ("x", "[y]"),
    "Mastermind-v0": ("[1 2 3 4]", "[4 3 2 1]", "x", "[1 2 5 6]"),
    "Minesweeper-v0": ("[2 2]", "[5 5]", "x"),
    "PegJump-v0": ("[1 4]", "[4 1]", "x"),
    "RushHour-v0": ("[A+]", "[X+]", "x"),
    "Secretary-v0": ("[continue]", "x", "[accept]"),
    "Set-v0": ("[0 1 2]", "x"),
    "Slitherlink-v0": ("[h 0 0]", "[v 0 0]", "x"),
    "Sokoban-v0": ("[up]", "[left]", "x", "[down]"),
    "Sudoku-v0-very-easy": ("[1 1 1]", "[2 2 2]"),
    "ThreeCardMonte-v0": ("x", "[1]"),
    "TowerOfHanoi-v0": ("[A B]", "[A C]", "x", "[B C]"),
    "WordSearch-v0": ("[1 1 1 5]", "x", "[0 0 0 3]"),
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short list, in which every word is one that a game can draw."""
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join((*WORDS, "Paris", "o'clock")))
    return str(path)


def options(game: str, max_turns: int = 12, tag: bool = False, **more: Any) -> EnvOptions:
    return EnvOptions(max_turns, tag, {"game": game, "tasks": {"train": 3, "val": 2}, **more})


def tasks(given: EnvOptions, split: str = "train") -> list[Task]:
    assert PLUGIN.tasks is not None
    return list(PLUGIN.tasks(split, given))


def begin(given: EnvOptions, index: int = 0) -> TextArenaGame:
    game = PLUGIN.make(given)(tasks(given)[index])
    assert isinstance(game, TextArenaGame)
    return game


def play(game: TextArenaGame, *texts: str) -> list[Outcome]:
    return [game.apply(game.parse(text), None) for text in texts]


def wrong_codes(code: str) -> list[str]:
    """Four codes of Mastermind that are not the hidden one."""
    numbers = code.split()
    turned = [numbers[i:] + numbers[:i] for i in range(1, 4)]
    return [" ".join(other) for other in (*turned, [numbers[1], numbers[0], *numbers[2:]])]


# --- games with a hidden answer -----------------------------------------------------------------


@pytest.mark.parametrize("game", ["Wordle-v0", "Hangman-v0", "GuessTheNumber-v0", "Mastermind-v0"])
def test_the_hidden_answer_wins_at_once(game: str, words: str) -> None:
    more = {"words": words} if game[0] in "WH" else {}
    env = begin(options(game, **more))
    (outcome,) = play(env, f"I think that it is [{env.task.secret}].")
    assert outcome.verdict is Verdict.WIN
    assert outcome.done
    assert outcome.strict_win
    assert outcome.compatible_win
    assert outcome.is_guess
    assert outcome.score == 1.0
    assert env.reference() == env.task.secret != ""


@pytest.mark.parametrize("game", ["Wordle-v0", "Hangman-v0", "GuessTheNumber-v0", "Mastermind-v0"])
def test_a_lost_game_is_no_win_and_does_not_show_the_answer(game: str, words: str) -> None:
    more: dict[str, Any] = {"words": words} if game[0] in "WH" else {}
    if game[0] in "GM":
        more["game_kwargs"] = {"max_turns": 3}
    env = begin(options(game, **more))
    secret = env.task.secret
    # These two games look at their limit before they count a turn, and so allow one more.
    moves = {
        "Wordle-v0": [word for word in WORDS if word != secret][:6],
        "Hangman-v0": [sign for sign in "zqxjvkwyfbghp" if sign not in secret][:6],
        "GuessTheNumber-v0": [str(n) for n in range(1, 21) if str(n) != secret][:4],
        "Mastermind-v0": wrong_codes(secret) if game[0] == "M" else [],
    }[game]
    outcomes = play(env, *(f"[{move}]" for move in moves))
    assert [outcome.done for outcome in outcomes] == [False] * (len(moves) - 1) + [True]
    last = outcomes[-1]
    assert not any(outcome.strict_win or outcome.compatible_win for outcome in outcomes)
    assert last.verdict is Verdict.OTHER
    assert last.reply.endswith(LOST)
    assert f"**{secret}**" not in last.reply
    assert f"word was : {secret}" not in last.reply
    assert f"Target: {secret}" not in last.reply
    assert last.score is not None
    assert 0.0 <= last.score < 1.0


def test_wordle_grades_its_guesses_and_a_letter_of_hangman_is_no_guess(words: str) -> None:
    wordle = begin(options("Wordle-v0", words=words))
    other = next(word for word in WORDS if word != wordle.task.secret)
    (outcome,) = play(wordle, f"[{other.upper()}]")
    assert outcome.verdict is Verdict.OTHER
    assert outcome.is_guess
    assert outcome.action_key == other
    assert "Feedback" in outcome.reply
    marks = outcome.reply.splitlines()[3].split()
    assert wordle.progress() == pytest.approx((marks.count("G") + marks.count("Y") / 2) / 5)
    hangman = begin(options("Hangman-v0", words=words))
    letter, word = play(hangman, "[e]", "[wrong]")
    assert (letter.is_guess, word.is_guess) == (False, True)
    assert not word.strict_win


def test_the_reply_leaves_the_agents_own_move_out(words: str) -> None:
    env = begin(options("GuessTheNumber-v0"))
    wrong = "1" if env.task.secret != "1" else "2"
    (outcome,) = play(env, f"A long thought. [{wrong}]")
    assert outcome.reply == "The target number is higher."


# --- invalid moves, the turn limit, failures ----------------------------------------------------


def test_two_invalid_moves_in_a_row_end_a_game_and_one_does_not(words: str) -> None:
    env = begin(options("Wordle-v0", words=words))
    first, guess, second, third = play(env, "apple", "[crane]", "no word", "[zzzzz]")
    assert first.verdict is Verdict.INVALID
    assert first.diagnostics == ("invalid_move",)
    assert not first.is_guess
    assert guess.verdict in (Verdict.OTHER, Verdict.WIN)
    assert (second.done, third.done) == (False, True)
    assert third.verdict is Verdict.INVALID
    assert not third.strict_win


def test_error_allowance_is_the_number_of_invalid_moves_that_a_game_forgives() -> None:
    strict, mild = (
        begin(options("GuessTheNumber-v0", error_allowance=number)) for number in (0, 3)
    )
    assert [o.done for o in play(strict, "x")] == [True]
    assert [o.done for o in play(mild, "x", "y", "z", "x")] == [False, False, False, True]


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_games_that_mix_up_reward_and_reason_still_end_by_invalid_moves(game: str) -> None:
    first, second = play(begin(options(game)), "x", "y")
    assert (first.verdict, second.verdict) == (Verdict.INVALID, Verdict.INVALID)
    assert second.done
    assert second.score is not None
    assert not second.strict_win


def test_no_text_is_no_move() -> None:
    env = begin(options("GuessTheNumber-v0"))
    before = env.state_key()
    for text in ("", " \n", "\u200b"):
        (outcome,) = play(env, text)
        assert (outcome.verdict, outcome.reply) == (Verdict.INVALID, NO_MOVE)
        assert outcome.diagnostics == ("no_action",)
    assert env.state_key() == before


def test_only_the_text_in_the_tags_is_played_where_questions_are_tagged() -> None:
    env = begin(options("GuessTheNumber-v0", tag=True))
    thought = f"Perhaps [{env.task.secret}]?"
    assert env.parse(thought).question is None
    (outcome,) = play(env, f"Not [99]. <question>[{env.task.secret}]</question>")
    assert outcome.strict_win


def test_the_smaller_turn_limit_wins_and_the_games_own_measure_is_the_score() -> None:
    short = begin(options("TowerOfHanoi-v0", max_turns=2))
    outcomes = play(short, "[A C]", "[A B]")
    assert [outcome.done for outcome in outcomes] == [False, True]
    assert outcomes[-1].score == short.progress()
    with pytest.raises(ValueError, match="over"):
        play(short, "[C B]")
    own = begin(options("GuessTheNumber-v0", max_turns=50, game_kwargs={"max_turns": 3}))
    wrong = [f"[{n}]" for n in range(1, 6) if str(n) != own.task.secret]
    assert [outcome.done for outcome in play(own, *wrong[:4])] == [False, False, False, True]


def test_a_solved_puzzle_without_a_hidden_answer_is_a_win() -> None:
    env = begin(options("TowerOfHanoi-v0"))
    assert env.task.secret == ""
    moves = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")
    outcomes = play(env, *moves)
    assert [outcome.strict_win for outcome in outcomes] == [False] * 6 + [True]
    assert not any(outcome.is_guess for outcome in outcomes)


def test_a_mistake_in_the_game_is_an_error_and_leaves_the_game_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = begin(options("GuessTheNumber-v0"))
    kind = type(library.begin(env.settings, 0).env)
    known = env.state_key(), env.progress()

    def broken(self: object, action: str) -> None:
        random.random()
        raise KeyError("no such cell")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "step", broken)
        state = random.getstate()
        (outcome,) = play(env, f"[{env.task.secret}]")
        assert random.getstate() == state
    assert (outcome.verdict, outcome.reply) == (Verdict.ERROR, FAILED)
    assert outcome.diagnostics == ("game_failed", "KeyError: 'no such cell'")
    assert (outcome.done, outcome.strict_win, outcome.score) == (False, False, None)
    assert (env.state_key(), env.progress()) == known
    assert play(env, f"[{env.task.secret}]")[0].strict_win


def test_no_action_asks_a_judge() -> None:
    env = begin(options("GuessTheNumber-v0"))
    action = env.parse("[1]")
    assert not action.needs_judge
    with pytest.raises(ValueError, match="judge"):
        env.judge_request(action)
    with pytest.raises(ValueError, match="judge"):
        env.apply(action, JudgeReply(Verdict.YES))


# --- seeds --------------------------------------------------------------------------------------


def test_no_two_splits_share_a_seed() -> None:
    settings = read_settings(
        {"game": "x", "tasks": dict.fromkeys(SPLITS, 1_000_000), "words": None}
    )
    ranges = [settings.seeds(split) for split in SPLITS]
    assert [len(seeds) for seeds in ranges] == [1_000_000] * 3
    assert [seeds.stop for seeds in ranges[:2]] == [seeds.start for seeds in ranges[1:]]
    given = options("GuessTheNumber-v0")
    names = [task.id for split in SPLITS for task in tasks(given, split)]
    assert names == [f"GuessTheNumber-v0_{seed}" for seed in (0, 1, 2, 1_000_000, 1_000_001)]
    assert tasks(given, "test") == []


@pytest.mark.parametrize("game", ["2048-v0", "Minesweeper-v0"])
def test_two_interleaved_games_go_like_two_played_alone(game: str) -> None:
    given = options(game)
    moves = VARIANTS[game] * 2
    alone = []
    for index in (0, 1):
        env = begin(given, index)
        alone.append([o for text in moves if not env._state.done for o in play(env, text)])
    random.seed(7)
    pair = [begin(given, index) for index in (0, 1)]
    together: list[list[Outcome]] = [[], []]
    for text in moves:
        for env, log in zip(pair, together, strict=True):
            random.random()
            if not env._state.done:
                log += play(env, text)
    assert together == alone
    assert alone[0] != alone[1]


def test_the_global_random_generator_is_left_as_it_was() -> None:
    random.seed(3)
    state = random.getstate()
    play(begin(options("2048-v0")), "[Up]", "[Left]")
    assert random.getstate() == state


_OPENINGS = """
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.textarena import ENVIRONMENTS
plugin = ENVIRONMENTS["textarena"]
for game in ("Hangman-v0", "2048-v0", "Crosswords-v0", "WordSearch-v0", "LogicPuzzle-v0"):
    options = EnvOptions(9, False, {"game": game, "tasks": {"train": 2}})
    for task in plugin.tasks("train", options):
        env = plugin.make(options)(task)
        print(task, [env.apply(env.parse(t), None) for t in ("[a]", "[Up]") if not env._state.done])
"""


def test_equal_seeds_give_equal_games_in_every_process() -> None:
    seen = [
        subprocess.run(
            [sys.executable, "-c", _OPENINGS],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        for seed in ("1", "2")
    ]
    # What the games print is dropped; nothing is downloaded.
    assert seen[0].stdout == seen[1].stdout
    assert seen[0].stdout.count("Task(id=") == 10
    assert "nltk" not in seen[0].stderr.lower()


def test_a_task_is_played_only_by_the_settings_that_made_it(words: str) -> None:
    given = options("Hangman-v0", words=words)
    task = tasks(given)[0]
    with pytest.raises(UserError, match="another list of words"):
        PLUGIN.make(options("Hangman-v0"))(task)
    with pytest.raises(UserError, match="no task of Mastermind-v0"):
        PLUGIN.make(options("Mastermind-v0"))(task)


# --- the contract -------------------------------------------------------------------------------


@pytest.mark.parametrize("game", VARIANTS)
def test_every_game_keeps_the_contract_of_an_environment(game: str, words: str) -> None:
    given = options(game, words=words) if game in ("Wordle-v0", "Hangman-v0") else options(game)
    make, task = PLUGIN.make(given), tasks(given)[0]
    assert task.messages[0].role == "user"
    assert len(task.messages[0].content) > 50
    check_env(lambda: make(task), (*VARIANTS[game], ""))
    outcomes = play(begin(given), VARIANTS[game][0])
    assert outcomes[0].verdict is not Verdict.ERROR


def test_the_list_of_variants_covers_every_game_and_wordle_is_tested_above() -> None:
    entries = {library._entry_point(game)[0].split(".")[-2] for game in VARIANTS}
    assert entries | {"Wordle"} == set(GAMES)
    assert not set(GAMES) & set(REFUSED)


def test_wordle_keeps_the_contract_and_draws_from_the_list_of_this_package() -> None:
    given = options("Wordle-v0")
    make, task = PLUGIN.make(given), tasks(given)[0]
    check_env(lambda: make(task), ("[crane]", "x", "[house]", "[crane]", "[slate]"))
    listed = library._word_list(read_settings(given.kwargs), hardcore=False)
    assert {task.secret for task in tasks(given)} <= set(listed)
    assert len([word for word in listed if len(word) == 5]) > 300
    # Every word of the list is one that the game takes for a guess.
    env = begin(given)
    assert all(library.prototype_of(env.settings)[0]._check_word(word) for word in listed)


# --- what is refused ----------------------------------------------------------------------------

_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no game": ({}, "must name a game"),
    "no such game": ({"game": "Wordel-v0"}, "did you mean Wordle-v0"),
    "unknown key": ({"game": "Wordle-v0", "task": {}}, "did you mean tasks"),
    "unknown split": ({"game": "Wordle-v0", "tasks": {"dev": 3}}, "does not know dev"),
    "no mapping": ({"game": "Wordle-v0", "tasks": 3}, "number of tasks of each split"),
    "negative": ({"game": "Wordle-v0", "tasks": {"train": -1}}, "whole number"),
    "too many": ({"game": "Wordle-v0", "tasks": {"train": 1_000_001}}, "whole number"),
    "truth": ({"game": "Wordle-v0", "error_allowance": True}, "whole number"),
    "words": ({"game": "Hangman-v0", "words": 3}, "path of a text file"),
    "no file": ({"game": "Hangman-v0", "words": "/no/such/file"}, "cannot be read"),
    "no words": ({"game": "2048-v0", "words": "/no/such/file"}, "draws no words"),
    "hardcore": ({"game": "Hangman-v0-hardcore"}, "long list of words"),
    "arguments": ({"game": "2048-v0", "game_kwargs": [1]}, "arguments of the game by name"),
    "unknown argument": ({"game": "2048-v0", "game_kwargs": {"size": 4}}, "cannot be made with"),
    "odd argument": ({"game": "2048-v0", "game_kwargs": {"size": {1}}}, "plain number"),
    "bad value": ({"game": "Mastermind-v0", "game_kwargs": {"code_length": 9}}, "cannot begin"),
    "two players": ({"game": "Chess-v0"}, "for several players"),
    "game master": ({"game": "TwentyQuestions-v0"}, "multi_turn.env=twenty_questions"),
    "another one": ({"game": "GuessWho-v0"}, "a language model"),
    "broken": ({"game": "FifteenPuzzle-v0"}, "fails at the move"),
}


@pytest.mark.parametrize("name", _BAD)
def test_what_cannot_be_played_is_refused_in_one_sentence(name: str) -> None:
    kwargs, message = _BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        begin(EnvOptions(5, False, kwargs))
    assert "\n" not in str(caught.value)


def test_a_list_without_a_word_that_fits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("Paris\nRome\n")
    with pytest.raises(UserError, match="no word that fits"):
        PLUGIN.make(options("Hangman-v0", words=str(path)))


def test_a_missing_package_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    library.prototype_of.cache_clear()
    with pytest.raises(UserError, match="pip install textarena"):
        PLUGIN.make(options("2048-v0-3x3"))


@pytest.mark.parametrize("folder", sorted(REFUSED))
def test_the_reasons_of_refused_games_are_about_games_that_exist(folder: str) -> None:
    entries = {str(spec.entry_point).split(".")[2] for spec in library._registry().values()}
    assert folder in entries
