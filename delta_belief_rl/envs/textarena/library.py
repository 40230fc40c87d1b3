"""The one place that imports and calls ``textarena``.

Three habits of its games are kept in here. They draw from the global random generator: each call
runs on a generator state of its game's own, and leaves the global one as it was. They load lists of
words through ``nltk``, which tries to download them: they get the list of this package, or the
user's, and nothing is downloaded. They print: what they print is dropped.
"""

from __future__ import annotations

import copy
import difflib
import random
import re
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from delta_belief_rl.envs.textarena.catalogue import GAMES, REFUSED, Game
from delta_belief_rl.envs.textarena.settings import TextArenaSettings
from delta_belief_rl.types import UserError

GAME_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a mistake in a game's code can raise."""

RandomState = Any
"""What ``random.getstate`` returns."""

T = TypeVar("T")

# Word lists and puzzles of a game: large, and never changed by play.
_READ_ONLY = ("word_list", "dictionary", "word_data", "game_board_data")
# The generator that the games share is one per process.
_LOCK = threading.RLock()
_CUSTOM_WORD = re.compile(r"[a-z]+")


def on_random_state(state: RandomState, call: Callable[[], T]) -> tuple[T, RandomState]:
    """Call a game on a state of the global random generator, which is then put back.

    Returns:
        What the call returns, and the state that it leaves.
    """
    with _LOCK:
        outside = random.getstate()
        random.setstate(state)
        try:
            result = call()
            return result, random.getstate()
        finally:
            random.setstate(outside)


def copied(env: Any) -> Any:
    """A copy of a game that shares nothing with it but its lists of words."""
    own: dict[str, Any] = env.__dict__
    shared = {id(own[name]): own[name] for name in _READ_ONLY if name in own}
    return copy.deepcopy(env, shared)


@dataclass(frozen=True, slots=True)
class Opening:
    """A game that was begun; to be copied and never played.

    Attributes:
        env: The game.
        random: State of its random generator.
        text: What it shows before the first move.
    """

    env: Any
    random: RandomState
    text: str


@lru_cache(maxsize=64)
def begin(settings: TextArenaSettings, seed: int) -> Opening:
    """Begin the game of a seed.

    Raises:
        UserError: The game cannot be played, or fails with these settings.
    """
    prototype, _ = prototype_of(settings)
    env = copied(prototype)
    try:
        _, state = on_random_state(
            random.Random(seed).getstate(), lambda: env.reset(num_players=1, seed=seed)
        )
    except GAME_FAULTS as error:
        raise UserError(f"{settings.game} cannot begin: {fault(error)}.") from error
    if settings.error_allowance is not None:
        env.state.error_allowance = settings.error_allowance
    return Opening(env, state, shown(env))


def shown(env: Any) -> str:
    """What a game has shown since it was last looked at, the agent's own moves left out."""
    _, observations = env.get_observation()
    # Some games mix up the fields of a move; its kind is then the agent's text.
    kinds = [getattr(kind, "name", "PLAYER_ACTION") for _, _, kind in observations]
    parts = [
        str(text)
        for (_, text, _), kind in zip(observations, kinds, strict=True)
        if kind != "PLAYER_ACTION"
    ]
    return "\n".join(part.strip() for part in parts if part.strip())


def fault(error: BaseException) -> str:
    """An error in a game's code, in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__


@lru_cache(maxsize=16)
def prototype_of(settings: TextArenaSettings) -> tuple[Any, Game]:
    """A game that has not begun, to be copied and never played, and what is known of it.

    Raises:
        UserError: ``textarena`` is not installed, or the game cannot be played.
    """
    with _LOCK, _no_download():
        path, kind = _entry_point(settings.game)
        folder = path.split(".")[-2]
        if folder in REFUSED:
            raise UserError(f"{settings.game} cannot be played: {REFUSED[folder]}.")
        if folder not in GAMES:
            raise UserError(
                f"{settings.game} cannot be played: it is for several players, and one agent plays "
                f"here; choose a single-player game ({', '.join(sorted(GAMES))})."
            )
        try:
            module = import_module(path)
        except (ImportError, SyntaxError) as error:
            raise UserError(f"{settings.game} cannot be imported: {fault(error)}.") from error
        vars(module)["print"] = _silent
        return _construct(settings, getattr(module, kind), module, GAMES[folder]), GAMES[folder]


def _entry_point(game: str) -> tuple[str, str]:
    """Module and class of a registered game, without the wrappers around it."""
    registry: dict[str, Any] = _registry()
    if game not in registry:
        close = difflib.get_close_matches(game, registry, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UserError(f"TextArena has no game {game!r}{hint}")
    module, _, kind = str(registry[game].entry_point).partition(":")
    return module, kind


def _construct(settings: TextArenaSettings, kind: Any, module: ModuleType, game: Game) -> Any:
    arguments = dict(_registry()[settings.game].kwargs) | settings.arguments()
    lists = import_module("textarena.envs.utils.word_lists")
    with ExitStack() as stack:
        if game.word_list:
            words = _Words(_word_list(settings, bool(arguments.get("hardcore"))))
            stack.enter_context(_replaced(lists, "words", words))
            stack.enter_context(_replaced(module, "words", words))
            stack.enter_context(_replaced(module, "pos_tag", _all_nouns))
        elif settings.words is not None:
            raise UserError(
                f"{settings.game} draws no words: leave multi_turn.env_kwargs.words out."
            )
        try:
            env, _ = on_random_state(random.Random(0).getstate(), lambda: kind(**arguments))
        except GAME_FAULTS as error:
            raise UserError(
                f"{settings.game} cannot be made with multi_turn.env_kwargs.game_kwargs="
                f"{settings.game_kwargs}: {fault(error)}."
            ) from error
    if getattr(env, "word_list", None) == []:
        raise UserError(f"{settings.game} finds no word that fits in its list of words.")
    return env


def _registry() -> dict[str, Any]:
    try:
        import_module("textarena")
        return import_module("textarena.envs.registration").ENV_REGISTRY
    except ModuleNotFoundError as error:
        raise UserError(
            f"The environment textarena needs the package textarena ({error.name} is missing): "
            "pip install textarena."
        ) from error


def _word_list(settings: TextArenaSettings, hardcore: bool) -> list[str]:
    if settings.words is None:
        if hardcore:
            raise UserError(
                f"{settings.game} draws from a long list of words, which this package does not "
                "bring: name a file with one word per line as multi_turn.env_kwargs.words."
            )
        text = files("delta_belief_rl.envs.textarena").joinpath("words.txt").read_text("utf-8")
        return text.split()
    try:
        words = Path(settings.words).read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"multi_turn.env_kwargs.words={settings.words} cannot be read: {fault(error)}."
        ) from error
    # Capitals are names, which no game counts as words.
    return [word for word in dict.fromkeys(words) if _CUSTOM_WORD.fullmatch(word)]


class _Words:
    """Stands in for ``nltk.corpus.words``."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def words(self, fileids: str | None = None) -> list[str]:
        """The list, whichever of the corpus is asked for."""
        return list(self._words)


def _all_nouns(tokens: list[str]) -> list[tuple[str, str]]:
    """Stands in for ``nltk.pos_tag``: every word of a list may be the answer."""
    return [(token, "NN") for token in tokens]


def _silent(*parts: object, **options: object) -> None:
    """Stands in for ``print``."""


def _downloads_nothing(*names: object, **options: object) -> bool:
    """Stands in for ``nltk.download``."""
    return False


@contextmanager
def _no_download() -> Generator[None, None, None]:
    try:
        nltk = import_module("nltk")
    except ModuleNotFoundError as error:
        raise UserError(
            "The environment textarena needs the package textarena (nltk is missing): "
            "pip install textarena."
        ) from error
    with _replaced(nltk, "download", _downloads_nothing):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Generator[None, None, None]:
    """Give a name of a module another value for a while, where the module has the name."""
    names = vars(module)
    if name not in names:
        yield
        return
    before = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = before
