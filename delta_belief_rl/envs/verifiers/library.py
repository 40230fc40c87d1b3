"""The library ``verifiers`` itself: which releases, and what of an environment fits.

It is imported when an environment is loaded, not before: it takes seconds.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np

from delta_belief_rl.types import UserError

INSTALL = "pip install 'delta-belief-rl[verifiers]'"
FIRST, BEFORE = (0, 1, 14), (0, 3)
"""Releases with the classes that are played here."""


def import_library() -> Any:
    """The module ``verifiers``.

    Raises:
        UserError: It is missing, cannot be imported, or is of a release that is not played here.
    """
    if find_spec("verifiers") is None:
        raise UserError(f"multi_turn.env=verifiers needs the library verifiers: {INSTALL}")
    check_release(_release())
    try:
        return import_module("verifiers")
    except ImportError as error:
        raise UserError(f"The library verifiers cannot be imported ({error}): {INSTALL}") from error


def _release() -> str:
    try:
        return version("verifiers")
    except PackageNotFoundError as error:
        raise UserError(
            f"The module verifiers that is found is not the library of that name: {INSTALL}"
        ) from error


def check_release(release: str) -> None:
    """Refuse a release whose environments are not played here.

    Raises:
        UserError: It is one.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:3])
    if not FIRST <= numbers < BEFORE:
        raise UserError(
            f"verifiers {release} is installed, and environments of 0.1.14 to 0.2 are played here: "
            f"{INSTALL}"
        )


@contextmanager
def undisturbed() -> Generator[None]:
    """Let an environment be made without lasting traces in this process.

    It would take over SIGINT and SIGTERM, which are the run's own (and can only be taken by the
    main thread), and may seed the generators that all code shares.
    """
    module: Any = import_module("verifiers.envs.environment")
    state, arrays = random.getstate(), np.random.get_state()
    module.signal = _NoHandlers()
    try:
        yield
    finally:
        module.signal = signal
        random.setstate(state)
        np.random.set_state(arrays)


class _NoHandlers:
    """The module ``signal``, less the power to set a handler."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    def signal(self, number: int, handler: object) -> None:
        """Leave the handler that there is."""


def check_environment(name: str, env: Any, rubrics: list[Any]) -> None:
    """Refuse an environment that needs what games here do not have.

    Raises:
        UserError: It does; the sentence says what.
    """
    library = import_library()
    if not isinstance(env, library.MultiTurnEnv):
        raise UserError(
            f"{name} is {type(env).__name__}, which is no MultiTurnEnv: only those are played here."
        )
    kinds = {kind.__name__ for kind in type(env).__mro__}
    if "ToolEnv" in kinds or env.tool_defs:
        raise UserError(f"{name} gives the agent tools to call, and agents here only write text.")
    if "SandboxMixin" in kinds:
        raise UserError(f"{name} needs sandboxes, which games here do not have.")
    if any(isinstance(rubric, library.JudgeRubric) for rubric in rubrics):
        raise UserError(
            f"{name} scores with a language model behind an API (JudgeRubric), and only rubrics of "
            "code are scored here."
        )
    if any(rubric.has_group_rewards or rubric.has_advantages for rubric in rubrics):
        raise UserError(
            f"{name} scores the games of a group against each other, and a game here has a score "
            "of its own."
        )
    if not env.score_rollouts:
        raise UserError(f"{name} does not score its games (score_rollouts is false).")


@cache
def seat_class() -> type[Any]:
    """A client of the library that asks ``client.ask`` for the agent's text."""
    types: Any = import_module("verifiers.types")
    base: type[Any] = import_library().OpenAIChatCompletionsClient

    async def get_response(
        self: Any, prompt: list[Any], model: str, *_: object, **__: object
    ) -> Any:
        text = await self.client.ask(prompt)
        said = types.ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        return types.Response(id="agent", created=0, model=model, message=said)

    return type("Seat", (base,), {"get_response": get_response})


def texts(messages: list[Any] | str | None) -> tuple[tuple[str, str], ...]:
    """Role and text of each message, in whatever form the library has it.

    Raises:
        ValueError: A message has something else than text.
    """
    if isinstance(messages, str):
        return (("user", messages),)
    return tuple((str(one["role"]), _content(one.get("content"))) for one in messages or ())


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif part.get("type") == "text":
            parts.append(str(part["text"]))
        else:
            raise ValueError(f"a message has content of the type {part.get('type')!r}, not text")
    return "\n".join(parts)
