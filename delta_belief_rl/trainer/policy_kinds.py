"""The two kinds of policy: a causal model, and a masked denoiser.

The model's folder says which it is (``models.denoiser.is_denoiser``), and
``actor_rollout_ref.rollout.name`` must be an engine of that kind. Training ranks and engine workers
are made here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.denoiser_engine import DenoiserEngine
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.models.denoiser import DenoiserConfig, is_denoiser, load_denoiser, read_config
from delta_belief_rl.rollout.game import Chat
from delta_belief_rl.trainer.actor import ActorSettings, PolicyActor
from delta_belief_rl.trainer.denoiser_actor import COLUMNS, DenoiserActor
from delta_belief_rl.trainer.policy_engine import EngineSettings, hf_engine
from delta_belief_rl.types import Task, UserError

DENOISER = "denoiser"
"""``actor_rollout_ref.rollout.name`` of a masked denoiser."""


def build_actor(
    settings: ActorSettings, rank: int = 0, world_size: int = 1
) -> PolicyActor | DenoiserActor:
    """One training rank of the policy in ``settings.model_path``.

    Raises:
        UserError: The model cannot be loaded or trained so.
    """
    kind = DenoiserActor if is_denoiser(settings.model_path) else PolicyActor
    return kind(settings, rank, world_size)


def build_engine(settings: EngineSettings) -> HFEngine | DenoiserEngine:
    """One engine of the policy in ``settings.model_path``.

    Raises:
        UserError: The model cannot be loaded.
    """
    if not is_denoiser(settings.model_path):
        return hf_engine(settings)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    model = load_denoiser(settings.model_path, settings.device)
    rows = max(1, settings.max_batch_tokens // model.config.max_position_embeddings)
    return DenoiserEngine(model, max_rows=rows, per_step=settings.per_step)


def check_kind(cfg: RunConfig, chat: Chat, tasks: Iterable[Task] = ()) -> None:
    """Refuse an engine, or lengths of answers and games, that are not the model's.

    Args:
        cfg: The configuration, with whole paths.
        chat: Of the model's tokenizer.
        tasks: Whose first answer a denoiser must have room for.

    Raises:
        UserError: They do not go together.
    """
    path, name = cfg.actor_rollout_ref.model.path, cfg.actor_rollout_ref.rollout.name
    if is_denoiser(path) != (name == DENOISER):
        what, other = ("a masked denoiser", DENOISER) if is_denoiser(path) else ("none", "hf")
        raise UserError(
            f"actor_rollout_ref.rollout.name={name} does not play {path!r}, which is {what}: set "
            f"actor_rollout_ref.rollout.name={other}, or another actor_rollout_ref.model.path."
        )
    if name != DENOISER:
        return
    config = read_config(path)
    if cfg.data.max_response_length != config.answer_length:
        raise UserError(
            f"data.max_response_length={cfg.data.max_response_length}, but the answers of the "
            f"denoiser {path!r} have {config.answer_length} places: set "
            f"data.max_response_length={config.answer_length}."
        )
    if config.end_token_id != chat.eot_id:
        raise UserError(
            f"The denoiser {path!r} ends its answers with token {config.end_token_id}, but its "
            f"chat template with {chat.eot_id}: make the model again with this tokenizer."
        )
    _check_room(cfg, config, chat, tasks)


def _check_room(cfg: RunConfig, config: DenoiserConfig, chat: Chat, tasks: Iterable[Task]) -> None:
    """A game must fit the model, and a whole answer must fit behind every task."""
    room = cfg.data.max_prompt_length
    if room > config.max_position_embeddings:
        raise UserError(
            f"data.max_prompt_length={room} tokens of a game, but the denoiser "
            f"{cfg.actor_rollout_ref.model.path!r} has {config.max_position_embeddings} places: "
            f"set data.max_prompt_length to {config.max_position_embeddings} or less."
        )
    for task in tasks:
        needed = len(chat.open_ids(task.messages)) + config.answer_length
        if needed > room:
            raise UserError(
                f"The task {task.id!r} and an answer take {needed} tokens, more than "
                f"data.max_prompt_length={room}: raise it, at most to the model's "
                f"{config.max_position_embeddings} places, or leave such tasks out."
            )


def least_turn_tokens(cfg: RunConfig) -> int:
    """Room that a turn must have: a denoiser gives whole answers."""
    whole = cfg.actor_rollout_ref.rollout.name == DENOISER
    return cfg.data.max_response_length if whole else 1


def score_columns(cfg: RunConfig) -> tuple[str, ...]:
    """Token columns that the score pass of this kind of policy fills."""
    return COLUMNS if cfg.actor_rollout_ref.rollout.name == DENOISER else ()
