"""Composition: the Hydra tree, a file and the command line become one ``RunConfig``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from delta_belief_rl.config.convert import convert, one_line, to_plain
from delta_belief_rl.config.paths import config_dir, plugin_place
from delta_belief_rl.config.schema import RunConfig, leaves
from delta_belief_rl.config.schema_actor import ActorModel, Adapter
from delta_belief_rl.config.schema_data import REFERENCE_TRAIN_FILES, REFERENCE_VAL_FILES
from delta_belief_rl.config.schema_turns import ENVIRONMENTS
from delta_belief_rl.types import UserError

PLAIN_RANK = 8
"""Of the new adapter through which an evaluation plays a model that comes without one."""
_RESOLVED_HEAD = "# Every setting of this run. Repeat it with: python train.py --config THIS_FILE\n"


def load_config(
    overrides: Sequence[str] = (), config_name: str = "base"
) -> tuple[RunConfig, list[str]]:
    """Compose a configuration.

    Args:
        overrides: As on the command line: ``key=value``, ``+key=value`` (same meaning),
        ``group=option``. config_name: A name in ``configs/``, or the path of a YAML file laid
        over ``base``, such as the
            ``config.yaml`` of an earlier run.

    Returns:
        The configuration, and one warning for each setting that has no effect.

    Raises:
        UserError: Anything that Hydra, OmegaConf or the schema refuses, in one sentence.
    """
    groups, keys = _split(overrides)
    file = _config_file(config_name)
    tree = _compose("base" if file else config_name, groups)
    try:
        if file:
            tree.merge_with(OmegaConf.load(file))
        for override in keys:
            OmegaConf.update(
                tree, override.key_or_group, override.value(), merge=True, force_add=True
            )
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(f"The configuration cannot be composed: {one_line(error)}") from error
    config, warnings = convert(tree)
    config = resolve_auto(config)
    return config, warnings + _ignored(config, [override.key_or_group for override in keys])


def resolved_yaml(config: RunConfig) -> str:
    """The configuration as YAML that ``from_yaml`` turns into an equal object."""
    body: str = yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=100)
    return _RESOLVED_HEAD + body


def from_yaml(text: str) -> RunConfig:
    """The inverse of ``resolved_yaml``.

    Raises:
        UserError: The text is not a configuration.
    """
    try:
        tree = OmegaConf.create(text)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise UserError(f"This is not a configuration: {one_line(error)}") from error
    if not isinstance(tree, DictConfig):
        raise UserError("This is not a configuration: its top level must be a mapping.")
    return resolve_auto(convert(tree)[0])


def resolve_auto(config: RunConfig) -> RunConfig:
    """Settle what ``auto`` or a default leaves to other settings; settled ones stay."""
    data, judge, reward = config.data, config.judge_rollout, config.multi_turn.logprob_reward
    # The default files are of 20 Questions.
    if data.world is not None or config.multi_turn.env not in ENVIRONMENTS:
        if data.train_files == REFERENCE_TRAIN_FILES:
            data = replace(data, train_files=())
        if data.val_files == REFERENCE_VAL_FILES:
            data = replace(data, val_files=())
    if judge.name == "auto":
        local = "world" if data.world is not None else "vllm"
        judge = replace(judge, name="api" if judge.model.api_model_name else local)
    if judge.ngpus is None:
        judge = replace(judge, ngpus=1 if judge.name == "vllm" else 0)
    if reward.winning_turn == "auto":
        reward = replace(reward, winning_turn="drop" if reward.normalised else "keep")
    policy = config.actor_rollout_ref
    if config.trainer.val_only and policy.rollout.name != "denoiser":
        policy = replace(policy, model=_with_adapter(policy.model))
    return replace(
        config,
        plugins=tuple(map(plugin_place, config.plugins)),
        data=data,
        actor_rollout_ref=policy,
        judge_rollout=judge,
        multi_turn=replace(config.multi_turn, logprob_reward=reward),
    )


def _with_adapter(model: ActorModel) -> ActorModel:
    """The model with a new adapter, which changes no answer, where it has none."""
    if model.lora_rank or any(adapter.r for adapter in model.adapters):
        return model
    plain = Adapter("actor_lora", PLAIN_RANK, PLAIN_RANK)
    return replace(model, lora_rank=PLAIN_RANK, adapters=(plain,))


def group_options(root: Path | None = None) -> dict[str, list[str]]:
    """The groups of the tree and their options, e.g. ``{"experiment": ["quickstart", ...]}``."""
    base = root or config_dir()
    return {
        folder.name: sorted(file.name.removesuffix(".yaml") for file in folder.glob("*.yaml"))
        for folder in sorted(base.iterdir())
        if folder.is_dir()
    }


def _split(overrides: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Part the command line into choices of groups and values of keys."""
    options = group_options()
    groups: list[str] = []
    keys: list[Override] = []
    for text in overrides:
        override = _parse(text)
        name = override.key_or_group
        if override.is_delete():
            raise UserError(f"{text}: a setting cannot be removed; set it to null instead.")
        if override.is_sweep_override():
            raise UserError(
                f"{text}: several values in one setting start no sweep; a list is written [a,b]."
            )
        if name in options:
            groups.append(_group_choice(name, str(override.value()), options[name]))
        else:
            keys.append(override)
    return groups, keys


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(
            f"{text!r} is not of the form key=value; put quotes around special characters "
            f"({one_line(error)})."
        ) from error


def _group_choice(name: str, option: str, options: Sequence[str]) -> str:
    if option in options:
        return f"{name}={option}"
    close = difflib.get_close_matches(option, options, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise UserError(f"{name}={option} does not exist; choose one of {', '.join(options)}{hint}")


def _config_file(config_name: str) -> Path | None:
    if not config_name.endswith((".yaml", ".yml")):
        return None
    path = Path(config_name).expanduser()
    if not path.is_file():
        raise UserError(f"The configuration file {config_name} does not exist.")
    return path


def _compose(name: str, groups: Sequence[str]) -> DictConfig:
    root = config_dir()
    if not (root / f"{name}.yaml").is_file():
        raise UserError(f"There is no configuration {name} in {root}; use base or a YAML file.")
    try:
        with initialize_config_dir(config_dir=str(root), version_base="1.3"):
            tree = compose(config_name=name, overrides=list(groups))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"The configuration cannot be composed: {one_line(error)}") from error
    OmegaConf.set_struct(tree, False)
    return tree


def _ignored(config: RunConfig, given: Sequence[str]) -> list[str]:
    """Warn of settings on the command line that the chosen engine or judge does not read."""
    model = config.actor_rollout_ref.model
    chosen = {
        "actor_rollout_ref": "api"
        if model.api_model_name
        else config.actor_rollout_ref.rollout.name,
        "judge_rollout": config.judge_rollout.name,
    }
    warnings: list[str] = []
    for name, item, _ in leaves(RunConfig):
        needs = cast("str", item.metadata.get("needs", ""))
        backend = chosen.get(name.split(".", 1)[0], "")
        written = any(name == key or name.startswith(f"{key}.") for key in given)
        readers = needs.split(", ")
        if needs and written and backend not in readers:
            verb = "reads" if len(readers) == 1 else "read"
            warnings.append(
                f"{name} has no effect with {backend}: only {' and '.join(readers)} {verb} it."
            )
    return warnings
