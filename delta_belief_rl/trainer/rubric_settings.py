"""From the configuration to the models that ``orsd`` asks, and what to look at before a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from delta_belief_rl.algo.scorers.roles import Roles
from delta_belief_rl.algo.scorers.rubric import BY_MODEL
from delta_belief_rl.algo.scorers.rubric_model import bare_check_messages, bare_write_messages
from delta_belief_rl.config.rules_views import BASE_VERIFIER
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_views import Orsd
from delta_belief_rl.engines.api_client import ApiClient, ApiReply, ApiSettings, Endpoint
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.engines.pump import EngineRouter
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.actor_settings import BASE
from delta_belief_rl.trainer.rubrics import (
    CHECKED,
    BaseChecker,
    PolicyWriter,
    RubricModels,
    Scores,
    ServiceChecker,
    answer_tokens,
)
from delta_belief_rl.types import Message, UserError

TOKENS_OF_A_GAME = 32
"""Least room in a prompt for each game that is shown."""
PROBE_SECONDS = 60.0
"""A service that needs longer for a word is of no use."""


def asked(cfg: RunConfig) -> Orsd | None:
    """The settings of a run whose rules of play are written or checked by a model; None else."""
    orsd = cfg.algorithm.orsd
    used = "orsd" in cfg.algorithm.transforms and not cfg.trainer.val_only
    return orsd if used and BY_MODEL in (orsd.writer, orsd.verifier) else None


def service_model(cfg: RunConfig) -> str:
    """Name of the model of a service that checks; empty where none does."""
    orsd = asked(cfg)
    if orsd is None or orsd.verifier != BY_MODEL or orsd.verifier_model == BASE_VERIFIER:
        return ""
    return orsd.verifier_model


def rubric_contexts(cfg: RunConfig) -> tuple[tuple[str, str], ...]:
    """What the training ranks read for the check, as ``ActorSettings.contexts`` has it."""
    orsd = asked(cfg)
    own = orsd is not None and orsd.verifier == BY_MODEL and not service_model(cfg)
    return ((CHECKED, BASE),) if own else ()


def rubric_models(cfg: RunConfig) -> RubricModels:
    """How the models are asked.

    Raises:
        UserError: A setting is out of its range.
    """
    orsd, data, rollout = cfg.algorithm.orsd, cfg.data, cfg.actor_rollout_ref.rollout
    room = data.max_prompt_length + data.max_response_length
    if rollout.name == "vllm" and rollout.max_model_len:
        room = rollout.max_model_len
    return RubricModels(
        run_seed=cfg.seed,
        room=room,
        prompt_tokens=orsd.prompt_tokens,
        writer_tokens=orsd.writer_tokens,
        writer_temperature=orsd.writer_temperature,
        deadline=orsd.deadline_s,
    )


def rubric_roles(cfg: RunConfig, chat: ChatFormat, engine: EngineRouter, ranks: Scores) -> Roles:
    """The models that a run lends to its scorers.

    Args:
        cfg: The configuration.
        chat: Of the policy.
        engine: The policy as it plays.
        ranks: The policy as it is trained.

    Raises:
        UserError: The environment names no service, or a library is missing.
    """
    orsd = asked(cfg)
    if orsd is None:
        return Roles()
    models = rubric_models(cfg)
    writer = PolicyWriter(engine, chat, models) if orsd.writer == BY_MODEL else None
    if orsd.verifier != BY_MODEL:
        return Roles(writer)
    if not service_model(cfg):
        return Roles(writer, BaseChecker(ranks, chat, models))
    client = ApiClient(Endpoint.from_environment(), _api_settings(cfg))
    return Roles(writer, ServiceChecker(client, chat, models))


async def close_roles(roles: Roles) -> None:
    """Nothing more is asked."""
    if isinstance(roles.checker, ServiceChecker):
        await roles.checker.client.close()


def check_rubrics(cfg: RunConfig, chat: ChatFormat) -> None:
    """Refuse a run whose models have no room for their question and some of each game.

    Raises:
        UserError: It has not, or a setting is out of its range.
    """
    orsd = asked(cfg)
    if orsd is None:
        return
    models = rubric_models(cfg)
    if service_model(cfg):
        Endpoint.from_environment()
    if orsd.writer == BY_MODEL:
        _check_writer(orsd, models, chat)
    if orsd.verifier == BY_MODEL:
        _check_verifier(cfg, models, chat)


def _check_writer(orsd: Orsd, models: RubricModels, chat: ChatFormat) -> None:
    bare = len(chat.open_ids(bare_write_messages(orsd.bundles, orsd.max_criteria)))
    need = bare + TOKENS_OF_A_GAME * (orsd.num_best + orsd.num_worst)
    if need > models.writer_room:
        raise UserError(
            f"algorithm.orsd.writer=model needs {need} tokens for its prompt and has "
            f"{max(models.writer_room, 0)}: algorithm.orsd.prompt_tokens is {orsd.prompt_tokens}, "
            f"and a game's {models.room} tokens less algorithm.orsd.writer_tokens are "
            f"{models.room - orsd.writer_tokens}; raise data.max_prompt_length or "
            "algorithm.orsd.prompt_tokens, lower algorithm.orsd.writer_tokens, or set "
            "algorithm.orsd.writer=rules."
        )


def _check_verifier(cfg: RunConfig, models: RubricModels, chat: ChatFormat) -> None:
    """Bundles of many rules, as they may be written, must be read with some of their game."""
    orsd = cfg.algorithm.orsd
    need = len(chat.open_ids(bare_check_messages(orsd.max_criteria))) + TOKENS_OF_A_GAME
    head = f"algorithm.orsd.verifier=model needs {need} tokens for the prompt of a check"
    tail = "lower algorithm.orsd.max_criteria, or set algorithm.orsd.verifier=rules."
    if orsd.writer == BY_MODEL:
        tail = tail.replace("verifier=rules", "writer=rules and algorithm.orsd.verifier=rules")
    if need > models.prompt_tokens:
        raise UserError(
            f"{head}, and algorithm.orsd.prompt_tokens is {models.prompt_tokens}: set it to "
            f"{need} or more, {tail}"
        )
    # A service has room of its own.
    answer = 0 if service_model(cfg) else answer_tokens(chat, orsd.max_criteria)
    missing = need + answer - models.room
    if answer and missing > 0:
        rollout, data = cfg.actor_rollout_ref.rollout, cfg.data
        name, value = "data.max_prompt_length", data.max_prompt_length
        if rollout.name == "vllm" and rollout.max_model_len:
            name, value = "actor_rollout_ref.rollout.max_model_len", rollout.max_model_len
        raise UserError(
            f"{head} and {answer} for its answer, and a game has {models.room}: set {name} to "
            f"{value + missing} or more, {tail}"
        )


def probe_verifier(cfg: RunConfig) -> None:
    """Ask the service that checks for one word; nothing where none does.

    Raises:
        UserError: It does not answer, with its own reason.
    """
    if not service_model(cfg):
        return
    endpoint = Endpoint.from_environment()
    reply = asyncio.run(_ask(endpoint, _api_settings(cfg)))
    if reply.answer is None:
        raise UserError(
            f"The service at {endpoint.host} does not answer for the model {service_model(cfg)} "
            f"({reply.reason}): see OPENAI_BASE_URL, OPENAI_API_KEY and "
            "algorithm.orsd.verifier_model."
        )


def _api_settings(cfg: RunConfig) -> ApiSettings:
    return ApiSettings(service_model(cfg), deadline=cfg.algorithm.orsd.deadline_s)


async def _ask(endpoint: Endpoint, settings: ApiSettings) -> ApiReply:
    quick = replace(settings, deadline=min(settings.deadline, PROBE_SECONDS))
    client = ApiClient(endpoint, quick)
    messages: Sequence[Message] = (Message("user", "Reply with one word: Yes"),)
    try:
        return await client.complete(messages, SamplingParams(temperature=0.0, max_tokens=16), 0)
    finally:
        await client.close()
