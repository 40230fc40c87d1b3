"""An environment of ``verifiers``, loaded: its rows, its rubric, and its conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from delta_belief_rl.envs.plugins import describe
from delta_belief_rl.envs.verifiers.library import (
    check_environment,
    import_library,
    texts,
    undisturbed,
)
from delta_belief_rl.envs.verifiers.loops import attempt
from delta_belief_rl.envs.verifiers.rubric import Scoring, leaves, watch
from delta_belief_rl.envs.verifiers.settings import VerifiersSettings
from delta_belief_rl.types import UserError

T = TypeVar("T")


class Source:
    """One environment; its games are apart from each other by the library's own design.

    Attributes:
        name: As the options name it.
        env: The library's object.
        scoring: How its rewards are read.
    """

    def __init__(self, settings: VerifiersSettings) -> None:
        self.name = settings.environment
        args = json.dumps(dict(settings.args), sort_keys=True)
        self.env: Any = _environment(self.name, args, settings.win_metric)
        self.scoring = Scoring(self.name, leaves(self.env.rubric), settings)

    def rows(self, dataset: str) -> Sequence[Mapping[str, Any]]:
        """The rows of ``train`` (the environment's dataset) or ``eval``; none where it is missing.

        Raises:
            UserError: The dataset cannot be made.
        """
        if dataset == "train":
            missing = self.env.dataset is None and self.env.dataset_source is None
            make = self.env.get_dataset
        else:
            missing = self.env.eval_dataset is None and self.env.eval_dataset_source is None
            make = self.env.get_eval_dataset
        return () if missing else _made(make, f"The {dataset} dataset of {self.name}")


def load_source(settings: VerifiersSettings) -> Source:
    """The environment that the settings name; the library's object is made once in a process.

    Raises:
        UserError: It cannot be loaded, or not be played here.
    """
    return Source(settings)


@cache
def _environment(name: str, args: str, win_metric: str) -> Any:
    library = import_library()
    kwargs: dict[str, Any] = json.loads(args)
    module, colon, function = name.partition(":")

    def load() -> Any:
        if colon:
            return getattr(import_module(module), function)(**kwargs)
        return library.load_environment(name, **kwargs)

    env = _made(load, f"The environment {name} of verifiers")
    check_environment(name, env, leaves(getattr(env, "rubric", None)))
    watch(leaves(env.rubric), win_metric)
    end_in_time(env)
    return env


def _made(make: Callable[[], T], what: str) -> T:
    with undisturbed():
        made, error = attempt(make)
    if made is None:
        cause = "it is None" if error is None else describe(error)
        raise UserError(f"{what} cannot be made: {cause}.") from error
    return made


def end_in_time(env: Any) -> None:
    """Have the environment's games end with a reply.

    Left alone, the library looks at its stop conditions before the agent's text reaches the
    environment, and asks for a text more when a reply has made one of them true. Here they are
    looked at after a reply, too, and the turn limit counts replies. What the environment said
    last then is the end of the conversation that the rubric reads.
    """
    prompts = env.get_prompt_messages

    async def get_prompt_messages(state: Any) -> Any:
        prompt = await prompts(state)
        turns = state["trajectory"]
        if not turns or state.get("final_env_response") is not None:
            return prompt
        if len(turns) >= state["client"].client.max_turns or await env.is_completed(state):
            before = [*turns[-1]["prompt"], *turns[-1]["completion"]]
            state["final_env_response"] = added(before, prompt)
        return prompt

    env.get_prompt_messages = get_prompt_messages


def added(before: list[Any], after: list[Any]) -> list[Any]:
    """The messages that came to a conversation.

    Raises:
        ValueError: It is no longer the same conversation.
    """
    if texts(after)[: len(before)] != texts(before):
        raise ValueError(
            "the environment rewrites earlier messages, which the agent's tokens cannot follow"
        )
    return list(after)[len(before) :]
