"""What a game depends on: the one list of settings by which games are told to be of one kind.

Games that were played with other values of these settings are never counted together: a folder of
an evaluation is refused, and games that are kept for a resumed run are played again. What is not in
the list (time-outs, error rates, replicas, memory, logging, folders, the update) may change while
an evaluation or a step of training is under way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Literal

from delta_belief_rl.config.convert import to_plain
from delta_belief_rl.config.schema import RunConfig, leaves, lookup

Kind = Literal["train", "val"]

_POLICY, _JUDGE = "actor_rollout_ref", "judge_rollout"

OF_EVERY_GAME = (
    "seed",
    "plugins",
    "multi_turn",
    "data.world",
    "data.world_prompt",
    "data.prompt_key",
    "data.system_key",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{_POLICY}.model.path",
    f"{_POLICY}.model.tokenizer_path",
    f"{_POLICY}.model.trust_remote_code",
    f"{_POLICY}.model.chat_template_kwargs",
    f"{_POLICY}.model.api_model_name",
    f"{_POLICY}.model.api_extra_body",
    f"{_POLICY}.model.lora_rank",
    f"{_POLICY}.model.lora_alpha",
    f"{_POLICY}.model.target_modules",
    f"{_POLICY}.model.exclude_modules",
    f"{_POLICY}.model.adapters",
    f"{_POLICY}.actor.cot",
    f"{_POLICY}.actor.thinking",
    f"{_POLICY}.actor.thinking_history",
    f"{_POLICY}.actor.dtype",
    f"{_POLICY}.rollout.name",
    f"{_POLICY}.rollout.dtype",
    f"{_POLICY}.rollout.n",
    f"{_POLICY}.rollout.tokens_per_step",
    f"{_POLICY}.rollout.deterministic",
    f"{_POLICY}.rollout.engine_kwargs",
    f"{_JUDGE}.name",
    f"{_JUDGE}.repeated_prompt",
    f"{_JUDGE}.cot",
    f"{_JUDGE}.thinking",
    f"{_JUDGE}.parser",
    f"{_JUDGE}.model.path",
    f"{_JUDGE}.model.api_model_name",
    f"{_JUDGE}.model.api_extra_body",
    f"{_JUDGE}.rollout.prompt_length",
    f"{_JUDGE}.rollout.response_length",
    f"{_JUDGE}.rollout.dtype",
    f"{_JUDGE}.rollout.quantization",
    f"{_JUDGE}.rollout.engine_kwargs",
    f"{_JUDGE}.rollout.val_kwargs",
)
"""Settings of any game; a name stands for all settings below it."""

OF_A_KIND: Mapping[Kind, tuple[str, ...]] = {
    "train": (
        f"{_POLICY}.rollout.temperature",
        f"{_POLICY}.rollout.top_p",
        f"{_POLICY}.rollout.top_k",
        f"{_POLICY}.rollout.do_sample",
    ),
    "val": ("data.val_files", "data.sample_count.val", f"{_POLICY}.rollout.val_kwargs"),
}
"""Further settings of the games of training, whose tasks are compared themselves, and of an
evaluation with its set of secrets."""

_OTHERS: Mapping[Kind, tuple[str, ...]] = {
    "train": ("multi_turn.max_turns.val", "multi_turn.val"),
    "val": ("multi_turn.max_turns.train", "multi_turn.train"),
}
"""Settings under those names that belong to the games of the other kind."""


def game_settings(cfg: RunConfig, kind: Kind) -> dict[str, object]:
    """The settings that a game depends on, by dotted name, as plain values.

    Example:
        >>> game_settings(RunConfig(), "val")["multi_turn.max_turns.val"]
        20
    """
    wanted = OF_EVERY_GAME + OF_A_KIND[kind]
    return {
        name: to_plain(lookup(cfg, name))
        for name, _, _ in leaves(RunConfig)
        if _below(name, wanted) and not _below(name, _OTHERS[kind])
    }


def game_digest(cfg: RunConfig, kind: Kind) -> str:
    """Checksum of ``game_settings``."""
    text = json.dumps(game_settings(cfg, kind), sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def question_tag(cfg: RunConfig) -> bool:
    """Whether the policy reasons first and puts its action in tags."""
    return cfg.actor_rollout_ref.actor.cot or cfg.actor_rollout_ref.actor.thinking


def _below(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)
