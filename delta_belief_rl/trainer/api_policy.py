"""From the configuration to a policy behind an API."""

from __future__ import annotations

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.api_client import ApiClient, ApiSettings, Endpoint
from delta_belief_rl.rollout.api_player import ApiPlayer
from delta_belief_rl.text.chat import ChatFormat

CALL_SECONDS = 300.0
"""A turn may think for long; a game that waits longer is lost."""


def is_api_policy(cfg: RunConfig) -> bool:
    """Whether the policy is a model of a service."""
    return bool(cfg.actor_rollout_ref.model.api_model_name)


def api_policy_settings(cfg: RunConfig, games: int) -> ApiSettings:
    """How the policy's model is called.

    Args:
        cfg: The configuration.
        games: Alive at a time, each of which waits for one call.
    """
    model = cfg.actor_rollout_ref.model
    return ApiSettings(
        model.api_model_name or "",
        deadline=CALL_SECONDS,
        concurrency=games,
        extra=model.api_extra_body,
    )


def api_player(cfg: RunConfig, games: int, chat: ChatFormat) -> ApiPlayer | None:
    """The policy behind an API; None where the policy is a model of this run.

    Args:
        cfg: The configuration.
        games: See ``api_policy_settings``.
        chat: Counts tokens.

    Raises:
        UserError: The environment names no service, or a library is missing.
    """
    if not is_api_policy(cfg):
        return None
    client = ApiClient(Endpoint.from_environment(), api_policy_settings(cfg, games))
    return ApiPlayer(client, chat.assistant_ids)
