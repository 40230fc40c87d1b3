"""The environments and methods of credit of the modules that ``plugins`` names.

Every process that plays, judges or assigns credit loads them by itself, once; the one place that
does is here.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TypeVar, cast

from delta_belief_rl.algo.plugin import CreditPlugin
from delta_belief_rl.config.convert import to_plain
from delta_belief_rl.config.game_settings import question_tag
from delta_belief_rl.config.paths import PLUGIN_FILE
from delta_belief_rl.config.rules import missing_files, unknown
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_algo import CREDIT_TRANSFORMS, ESTIMATORS
from delta_belief_rl.config.schema_turns import ENVIRONMENTS
from delta_belief_rl.envs.plugin import EnvOptions, EnvPlugin
from delta_belief_rl.envs.single_use import digest
from delta_belief_rl.types import Message, Task, UserError

SPLITS = ("train", "val", "test")
MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError),
    *(NameError, OSError, RuntimeError, StopIteration, SyntaxError, TypeError, ValueError),
)
"""What code raises that is not in order."""

_NAME = re.compile(r"[\w-][\w.-]*")
"""A name is also that of a folder."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Brought:
    """What a module brings, by name."""

    environments: Mapping[str, EnvPlugin]
    methods: Mapping[str, CreditPlugin]


def load_plugins(names: Sequence[str]) -> dict[str, EnvPlugin]:
    """The environments of some modules, by name.

    Args:
        names: As ``plugins`` has them: dotted names, or paths of ``.py`` files.

    Raises:
        UserError: A module cannot be imported or brings nothing, or a name is taken.
    """
    each = {name: _load(name).environments for name in names}
    return _merged("environment", each, ENVIRONMENTS)


def load_methods(names: Sequence[str]) -> dict[str, CreditPlugin]:
    """The methods of credit of some modules, by name.

    Args:
        names: As for :func:`load_plugins`.

    Raises:
        UserError: As for :func:`load_plugins`.
    """
    each = {name: _load(name).methods for name in names}
    return _merged("method", each, (*ESTIMATORS, *CREDIT_TRANSFORMS))


def _merged(
    what: str, each: Mapping[str, Mapping[str, T]], packaged: Sequence[str]
) -> dict[str, T]:
    found: dict[str, T] = {}
    origins: dict[str, str] = {}
    for name, brought in each.items():
        for own, plugin in brought.items():
            if own in packaged:
                raise UserError(
                    f"The plug-in {name!r} brings the {what} {own!r}, which this package has "
                    "already: give it another name."
                )
            if own in found:
                raise UserError(
                    f"The plug-in {name!r} brings the {what} {own!r}, which the plug-in "
                    f"{origins[own]!r} brings as well: leave one of them out."
                )
            found[own], origins[own] = plugin, name
    return found


def find_plugin(config: RunConfig) -> EnvPlugin | None:
    """What plays ``multi_turn.env``; None for an environment of this package.

    Raises:
        UserError: There is no such environment, or a plug-in cannot be loaded.
    """
    plugins, env = load_plugins(config.plugins), config.multi_turn.env
    for sentence in unknown("multi_turn.env", [env], (*ENVIRONMENTS, *plugins)):
        raise UserError(sentence)
    return plugins.get(env)


def check_plugins(config: RunConfig) -> None:
    """Load the plug-ins of a configuration and refuse what does not go with them.

    Raises:
        UserError: The first reason.
    """
    plugin, data = find_plugin(config), config.data
    if plugin is None:
        return
    if plugin.tasks is None:
        for sentence in missing_files(config):
            raise UserError(sentence)
        return
    for name in ("train_files", "val_files", "test_files"):
        if getattr(data, name):
            raise UserError(
                f"{config.multi_turn.env} makes its own tasks, and data.{name} names others: set "
                f"data.{name}=[]."
            )


def env_options(config: RunConfig, max_turns: int) -> EnvOptions:
    """What an environment of a plug-in is told."""
    kwargs = to_plain(config.multi_turn.env_kwargs)
    return EnvOptions(max_turns=max_turns, question_tag=question_tag(config), kwargs=kwargs)


def plugin_tasks(config: RunConfig, split: str) -> tuple[Task, ...] | None:
    """The tasks that the environment of a plug-in makes; None where files have them.

    Args:
        config: The configuration.
        split: One of ``SPLITS``.

    Raises:
        UserError: They are no tasks, or the options do not fit.
    """
    plugin, turns = find_plugin(config), config.multi_turn.max_turns
    if plugin is None or plugin.tasks is None:
        return None
    options = env_options(config, turns.train if split == "train" else turns.val)
    # A key, because options cannot be hashed.
    kwargs = json.dumps(options.kwargs, sort_keys=True)
    return _make_tasks(
        config.plugins,
        config.multi_turn.env,
        split,
        options.max_turns,
        options.question_tag,
        kwargs,
    )


@cache
def _make_tasks(
    plugins: tuple[str, ...], env: str, split: str, max_turns: int, tag: bool, kwargs: str
) -> tuple[Task, ...]:
    make = load_plugins(plugins)[env].tasks
    if make is None:
        return ()
    tasks = tuple(
        cast("Sequence[object]", make(split, EnvOptions(max_turns, tag, json.loads(kwargs))))
    )
    return tuple(_checked(env, split, task) for task in tasks)


def _checked(env: str, split: str, task: object) -> Task:
    if not isinstance(task, Task):
        raise UserError(
            f"{env} makes {split} tasks that are no Task but {type(task).__name__}: return "
            "delta_belief_rl.types.Task objects."
        )
    messages = cast("tuple[object, ...]", task.messages)
    if not messages or not all(isinstance(message, Message) for message in messages):
        raise UserError(
            f"{env} makes the {split} task {task.id!r}, whose messages are no Message objects: "
            "give it at least one, which opens the game."
        )
    if not task.id or not task.source:
        raise UserError(f"{env} makes a {split} task without id or source: give it both.")
    # A task that says nothing of its split would be one of training.
    return replace(task, split=split)


@cache
def _load(name: str) -> Brought:
    """Import a module and look at what it brings."""
    path = Path(name).expanduser() if name.endswith(PLUGIN_FILE) else None
    if path is not None and not path.is_file():
        raise UserError(f"The plug-in {name!r} does not exist: correct the path in plugins.")
    try:
        module = _import_file(path) if path else import_module(name)
    except MISTAKES as error:
        raise UserError(f"The plug-in {name!r} cannot be imported: {describe(error)}.") from error
    except SystemExit as error:
        raise UserError(
            f"The plug-in {name!r} ends the program when it is imported: let only its command line "
            "do that."
        ) from error
    brought = Brought(
        _read(name, module, "ENVIRONMENTS", "an environment", EnvPlugin),
        _read(name, module, "METHODS", "a method", CreditPlugin),
    )
    if not brought.environments and not brought.methods:
        raise UserError(
            f"The plug-in {name!r} has no mapping ENVIRONMENTS of names to EnvPlugin and none "
            "called METHODS of names to CreditPlugin: see docs/add_an_environment.md and "
            "docs/add_a_method.md."
        )
    return brought


def _read(name: str, module: ModuleType, names: str, what: str, kind: type[T]) -> Mapping[str, T]:
    """One of a module's mappings; empty where it has none."""
    brought: object = getattr(module, names, {})
    if not isinstance(brought, Mapping):
        raise UserError(
            f"The plug-in {name!r} has no mapping {names} of names to {kind.__name__} but "
            f"{type(brought).__name__}: write a dict."
        )
    for own, plugin in cast("Mapping[object, object]", brought).items():
        if not isinstance(plugin, kind):
            article = "an" if kind is EnvPlugin else "a"
            raise UserError(
                f"The plug-in {name!r} has {type(plugin).__name__} for {own!r} in {names}, where "
                f"{article} {kind.__name__} must stand."
            )
        if not isinstance(own, str) or not _NAME.fullmatch(own):
            raise UserError(
                f"The plug-in {name!r} calls {what} {own!r}: name it with letters, digits, '_', "
                "'-' and '.'."
            )
    return cast("Mapping[str, T]", brought)


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own; modules beside it can be imported, too."""
    spec = spec_from_file_location(f"{path.stem}_{digest(str(path))}", path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    folder = str(path.parent)
    if folder not in sys.path:
        # Last, so that a file of the user's hides no library.
        sys.path.append(folder)
    module = module_from_spec(spec)
    # Dataclasses look themselves up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """An exception in one line: its type, its message, and where it was raised.

    Example:
        >>> describe(ValueError("no such word"))
        'ValueError: no such word'
    """
    message = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, UserError):
        return message
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError | ImportError) or not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
