"""A checkpoint's policy as a PEFT adapter or as a whole model that other programs load.

The folder is written under a hidden name and read back from the disk by PEFT or transformers, with
their own attention. It gets its name only when its logits are those of the trainer's model with the
adapter on. Both sides compute in float32, so what differs is what the files hold.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from delta_belief_rl.config.compose import from_yaml
from delta_belief_rl.config.paths import find_model
from delta_belief_rl.config.rules_denoiser import DENOISER
from delta_belief_rl.models.adapters import AdapterArrays, load_adapter_state, use_adapter
from delta_belief_rl.models.loading import load_causal_lm, stored_dtype
from delta_belief_rl.models.packaged import materialise
from delta_belief_rl.models.weight_files import broken_weights, write_merged
from delta_belief_rl.trainer.actor import EMA, POLICY, AdapterSettings, parse_state
from delta_belief_rl.trainer.checkpoint import Checkpoint, lease, load
from delta_belief_rl.trainer.persist import ACTOR_FILE
from delta_belief_rl.trainer.settings import adapter_settings
from delta_belief_rl.types import UserError

ADAPTERS = {POLICY: "adapter", EMA: "ema"}
"""The adapters that can be exported, and their places in the actor's state."""
BOUNDS = {"float32": 1e-3, "float16": 0.125, "bfloat16": 1.0}
"""Largest difference of a logit, by the number format of what is written."""
LOST = 0.5
"""Of what the adapter changes on average, the share that an export may lose."""
NOISE = 1e-5
"""A mean change of logits that two ways of computing attention in float32 can make."""
PROMPTS = (
    "Let us play 20 questions. I think of a thing, and you ask.",
    "Is it alive? Yes\nCan it fly? No\nIs it bigger than a car? No\nIs it",
    "user\nAsk one question that can be answered with yes or no.\nassistant\n",
)


class TooFar(Exception):
    """What was written does not hold the policy."""


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """What is exported, and how.

    Attributes:
        checkpoint: A folder ``global_step_<N>``.
        out: Folder to make.
        merged: A whole model instead of an adapter.
        adapter: ``actor`` or ``ema``.
        dtype: Number format of the weights; None keeps the adapter's (float32), or the base
            model's when merged.
        base: The base model; None takes the one that the checkpoint names.
    """

    checkpoint: Path
    out: Path
    merged: bool = False
    adapter: str = POLICY
    dtype: str | None = None
    base: str | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how near it is to the trainer's model.

    Attributes:
        rank: Of the adapter.
        alpha: The adapter is scaled by ``alpha / rank``.
        largest: Largest difference of a logit over all prompts.
        mean: Mean difference.
        effect: Mean difference that the adapter itself makes.
        bound: What ``largest`` had to keep.
    """

    out: str
    step: int
    run_id: str
    adapter: str
    merged: bool
    dtype: str
    base: str
    rank: int
    alpha: float
    files: tuple[str, ...]
    largest: float
    mean: float
    effect: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Policy:
    """A checkpoint's policy: its base model, where that lies, and the adapter."""

    saved: Checkpoint
    base: str
    tokenizer: str
    lora: AdapterSettings
    state: AdapterArrays


def export(settings: ExportSettings) -> Exported:
    """Write the folder ``settings.out``, whole and compared, or nothing.

    Raises:
        UserError: The folder exists, the checkpoint is not intact or has no such adapter, or the
            base model cannot be read.
        TooFar: What was read back is not the policy.
    """
    out = settings.out
    if out.exists():
        raise UserError(f"{str(out)!r} exists already: name another folder, or remove it.")
    policy = _read(settings)
    model = _trainer_model(policy)
    stored = torch.float32 if not settings.merged else stored_dtype(policy.base)
    dtype = settings.dtype or str(stored).removeprefix("torch.")
    if dtype not in BOUNDS:
        raise UserError(
            f"The base model's number format {dtype} is none to export to: give --dtype "
            f"{', '.join(BOUNDS)}."
        )
    rows = _rows(policy, model.config.vocab_size)
    wanted = _logits(model, rows)
    with use_adapter(model, None):
        plain = _logits(model, rows)
    modules = model.peft_config[POLICY].target_modules
    del model
    gc.collect()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UserError(
            f"{str(out)!r} cannot be written ({error.strerror}): name another folder."
        ) from error
    try:
        if settings.merged:
            _write_model(policy, beside, getattr(torch, dtype))
        else:
            _write_adapter(policy, beside, getattr(torch, dtype), modules)
        AutoTokenizer.from_pretrained(policy.tokenizer).save_pretrained(beside)
        found = _compare(wanted, plain, _reload(policy, beside, settings.merged, rows))
        if reason := _refusal(found, BOUNDS[dtype], dtype):
            raise TooFar(reason)
        beside.chmod(0o755)
        os.rename(beside, out)
    except OSError as error:
        raise UserError(
            f"{str(out)!r} could not be written ({error.strerror or error}): free space or name "
            "another folder."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Exported(
        str(out),
        policy.saved.step,
        policy.saved.run_id,
        settings.adapter,
        settings.merged,
        dtype,
        policy.base,
        policy.lora.rank,
        policy.lora.alpha,
        tuple(sorted(file.name for file in out.iterdir())),
        *found,
        BOUNDS[dtype],
    )


# --- the trainer's side -------------------------------------------------------------------------


def _read(settings: ExportSettings) -> _Policy:
    with ExitStack() as stack:
        # A folder in which no lease can be left is read all the same; checksums guard it.
        with suppress(OSError):
            stack.enter_context(lease(settings.checkpoint))
        saved = load(settings.checkpoint)
        state = parse_state(saved.read(ACTOR_FILE))
    cfg = from_yaml(saved.meta["config"])
    lora, model = adapter_settings(cfg), cfg.actor_rollout_ref.model
    if cfg.actor_rollout_ref.rollout.name == DENOISER:
        raise UserError(
            f"{settings.checkpoint} holds a masked denoiser, and only adapters of causal models "
            "are exported: go on from it with trainer.resume_mode=resume_path and "
            "trainer.resume_from_path."
        )
    if not lora.rank:
        raise UserError(
            f"{settings.checkpoint} was trained without LoRA, and only adapters are exported: "
            "set actor_rollout_ref.model.lora_rank."
        )
    arrays = state.get(ADAPTERS[settings.adapter])
    if arrays is None:
        raise UserError(
            f"{settings.checkpoint} has no slow adapter: give --adapter {POLICY}, or train with "
            "a slow belief model."
        )
    base = _whole(materialise(find_model(settings.base or model.path)))
    tokenizer = find_model(model.tokenizer_path) if model.tokenizer_path else base
    return _Policy(saved, base, tokenizer, lora, arrays)


def _whole(path: str) -> str:
    """A folder's whole path, which means the same from everywhere; an id of the hub as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _trainer_model(policy: _Policy) -> Any:
    """The model as a training rank has it, with the adapter on, in float32."""
    model = policy.lora.put_on(load_causal_lm(policy.base))
    load_adapter_state(model, POLICY, policy.state)
    return model.eval()


def _rows(policy: _Policy, vocabulary: int) -> list[list[int]]:
    """Token ids of the prompts."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(policy.tokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"The tokenizer {policy.tokenizer!r} cannot be loaded: check the path, or give --base."
        ) from error
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
    return [[int(token) % vocabulary for token in row] for row in rows]


# --- writing ------------------------------------------------------------------------------------


def _write_adapter(policy: _Policy, folder: Path, dtype: torch.dtype, modules: Any) -> None:
    tensors = {
        key: torch.from_numpy(value).to(dtype).contiguous() for key, value in policy.state.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)
    alpha = policy.lora.alpha
    config = LoraConfig(
        base_model_name_or_path=policy.base,
        r=policy.lora.rank,
        # Other programs want a whole number, where it is one.
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        target_modules=modules if isinstance(modules, str) else sorted(modules),
        exclude_modules=list(policy.lora.exclude_modules) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.save_pretrained(str(folder))


def _write_model(policy: _Policy, folder: Path, dtype: torch.dtype) -> None:
    lora = policy.lora
    write_merged(policy.base, policy.state, lora.alpha / lora.rank, folder, dtype)
    config: Any = AutoConfig.from_pretrained(policy.base)
    config.dtype = dtype
    config.save_pretrained(folder)
    with suppress(OSError):  # a model need not have one
        GenerationConfig.from_pretrained(policy.base).save_pretrained(folder)


# --- comparing ----------------------------------------------------------------------------------


def _reload(policy: _Policy, folder: Path, merged: bool, rows: Sequence[Sequence[int]]) -> Any:
    """Logits of what lies in the folder.

    Raises:
        TooFar: Files or weights are missing.
    """
    if merged and (broken := broken_weights(folder)):
        raise TooFar(f"The written model is not complete ({broken}), so it was removed.")
    source = str(folder) if merged else policy.base
    try:
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            source, dtype=torch.float32, output_loading_info=True
        )
        if not merged:
            model = PeftModel.from_pretrained(model, str(folder))
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise TooFar(
            f"The written folder cannot be loaded ({type(error).__name__}), so it was removed."
        ) from error
    odd = sorted(str(key) for name in ("missing_keys", "mismatched_keys") for key in info[name])
    if merged and odd:
        raise TooFar(f"The written model lacks {odd[0]!r}, so it was removed.")
    return _logits(model.eval(), rows)


@torch.no_grad()
def _logits(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """``[tokens of all rows, vocabulary]``."""
    parts = [model(torch.tensor([row])).logits[0].float() for row in rows]
    return torch.cat(parts)


def _compare(
    wanted: torch.Tensor, plain: torch.Tensor, got: torch.Tensor
) -> tuple[float, float, float]:
    """``(largest, mean, effect)`` of ``Exported``."""
    apart = (got - wanted).abs()
    return float(apart.max()), float(apart.mean()), float((plain - wanted).abs().mean())


def _refusal(found: tuple[float, float, float], bound: float, dtype: str) -> str:
    """Why an export does not hold the policy; empty where it does."""
    largest, mean, effect = found
    cure = "so it was removed: export with --dtype float32"
    # Not "largest > bound", which a NaN passes.
    if not largest <= bound:
        return (
            f"The export's logits differ by up to {largest:.3g} from the trainer's (at most "
            f"{bound:g} in {dtype}), {cure}."
        )
    if not mean <= max(LOST * effect, NOISE):
        return (
            f"The export's logits differ by {mean:.3g} on average from the trainer's, and all that "
            f"was learnt changes them by {effect:.3g}, {cure}, or without --merged."
        )
    return ""
