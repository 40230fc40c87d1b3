"""What a language model that judges is asked in each environment, and how its text is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.envs.parquet import SOURCES
from delta_belief_rl.judge.customer_service import script as customer_service
from delta_belief_rl.judge.guess_my_city import script as guess_my_city
from delta_belief_rl.judge.murder_mystery import script as murder_mystery
from delta_belief_rl.judge.parsing import PARSERS, Parser, ParserName
from delta_belief_rl.judge.prompts import JudgeMode, judge_messages
from delta_belief_rl.judge.user_personalization import script as user_personalization
from delta_belief_rl.types import Message, UserError


@dataclass(frozen=True, slots=True)
class JudgeScript:
    """The part of a judge that differs from environment to environment.

    Attributes:
        messages: ``(request, mode, with_history)`` to system and user message; the system message
            is the same for all requests of a mode and a kind, so that an engine with a prefix cache
            reads it once.
        parsers: What ``judge_rollout.parser`` names.
    """

    messages: Callable[[JudgeRequest, JudgeMode, bool], tuple[Message, Message]]
    parsers: Mapping[ParserName, Parser]


SCRIPTS: Mapping[str, JudgeScript] = {
    "twenty_questions": JudgeScript(judge_messages, PARSERS),
    "guess_my_city": JudgeScript(guess_my_city.messages, guess_my_city.PARSERS),
    "murder_mystery": JudgeScript(murder_mystery.messages, murder_mystery.PARSERS),
    "customer_service": JudgeScript(customer_service.messages, customer_service.PARSERS),
    "user_personalization": JudgeScript(
        user_personalization.messages, user_personalization.PARSERS
    ),
}
"""By environment."""


def has_script(source: str) -> bool:
    """Whether a language model can judge tasks of a source (``Task.source``)."""
    return SOURCES.get(source, source) in SCRIPTS


def script_of(source: str) -> JudgeScript:
    """The script of the environment that plays tasks of a source (``Task.source``).

    Raises:
        UserError: No script is known for them.
    """
    script = SCRIPTS.get(SOURCES.get(source, source))
    if script is None:
        raise UserError(
            f"A language model can judge {', '.join(SCRIPTS)}, and no task with the data_source "
            f"{source!r}."
        )
    return script
