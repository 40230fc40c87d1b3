"""What is known of each game of TextArena that can be played here, and why others cannot.

Games are named by the folder they stand in (``Wordle``), which all their variants share
(``Wordle-v0``, ``Wordle-v0-long``, ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Game:
    """One game.

    Attributes:
        secret: Reads the hidden answer out of a game that was begun; None where the game has none.
        guess: Finds in a move the answer that it names; None where the game has no hidden answer.
        completion: The game's own method that says how much of it is solved, in [0, 1]; empty where
            it has none.
        top: The reward of a game that is solved.
        word_list: Whether its words come from a list.
    """

    secret: Callable[[Any], str] | None = None
    guess: re.Pattern[str] | None = None
    completion: str = "_get_percentage_completion"
    top: float = 1.0
    word_list: bool = False


def _state(key: str) -> Callable[[Any], str]:
    return lambda env: str(env.state.game_state[key])


def _code(env: Any) -> str:
    return " ".join(str(number) for number in env.state.game_state["secret_code"])


GAMES: Mapping[str, Game] = {
    "Wordle": Game(_state("secret_word"), re.compile(r"\[(\w+)\]"), word_list=True),
    # A single letter between brackets asks for a letter; more letters are a guess.
    "Hangman": Game(_state("target_word"), re.compile(r"\[([a-zA-Z]{2,})\]"), word_list=True),
    "GuessTheNumber": Game(_state("game_number"), re.compile(r"\[(\d+)\]")),
    "Mastermind": Game(_code, re.compile(r"\[(\d+(?:\s+\d+)*)\]")),
    "Blackjack": Game(),
    "Countdown": Game(completion="_calculate_progress"),
    "Crosswords": Game(),
    "Cryptarithm": Game(completion="_progress"),
    "FrozenLake": Game(),
    "Game2048": Game(),
    "LightsOut": Game(),
    "LogicPuzzle": Game(),
    "Minesweeper": Game(),
    "PegJump": Game(),
    "RushHour": Game(),
    "Secretary": Game(completion=""),
    "Set": Game(completion="", top=20.0),
    "Slitherlink": Game(completion="_progress"),
    "Sokoban": Game(),
    "Sudoku": Game(),
    "ThreeCardMonte": Game(completion=""),
    "TowerOfHanoi": Game(),
    "WordSearch": Game(word_list=True),
}

_GAME_MASTER = (
    "a language model behind a paid service answers its questions; "
    "multi_turn.env=twenty_questions is such a game with a judge of this package"
)

REFUSED: Mapping[str, str] = {
    "TwentyQuestions": _GAME_MASTER,
    "GuessWho": _GAME_MASTER,
    "Bandit": "it compares the chosen button with a table of all buttons, so that nobody wins",
    "FifteenPuzzle": "it fails at the move that solves the puzzle",
    "Klondike": "its code is no valid Python",
    "UltimateTexasHoldem": "its code is no valid Python 3.11",
    "WordLadder": "it searches without end where its list of words has no ladder",
}
"""Single-player games that cannot be played, with the reason."""
