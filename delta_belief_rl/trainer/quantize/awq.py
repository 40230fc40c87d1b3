"""From a model folder to one with 4-bit weights, by llm-compressor's AWQ, checked by reading it.

Scales are chosen so that the layers' outputs on a judge's own prompts change least. The result is
read back from its files and asked held-out prompts before its folder appears.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from delta_belief_rl.config.checkpoints import quantisation_problems, read_checkpoint
from delta_belief_rl.config.paths import find_model
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer, stored_dtype
from delta_belief_rl.models.packaged import materialise
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.quantize.settings import (
    LinearShape,
    QuantizeSettings,
    choose_group_size,
)
from delta_belief_rl.trainer.quantize.texts import JudgeTexts, judge_texts
from delta_belief_rl.types import FloatArray, UserError

REPORT_FILE = "awq.json"
KEPT = ("lm_head",)
"""Layers whose weights stay as they are: vLLM reads them so, and tied embeddings need it."""


class TooFar(UserError):
    """The quantised model answers too differently from the original."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the written folder is from the original.

    Attributes:
        prompts: Held-out prompts.
        mean, largest: Of the absolute differences of the answers' log-probs, nats.
        same: Share of the prompts with the same most likely answer.
    """

    prompts: int
    mean: float
    largest: float
    same: float


def quantize(settings: QuantizeSettings) -> dict[str, Any]:
    """Quantise a model; the folder appears when it has passed the comparison, or not at all.

    Returns:
        What ``awq.json`` of the folder holds.

    Raises:
        UserError: The folder exists, the library or the model is not there, or vLLM could not
            serve the result.
        TooFar: The result is too far from the original.
    """
    if settings.out.exists():
        raise UserError(f"{str(settings.out)!r} exists already: give another --out, or remove it.")
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("There is no CUDA device: use --device cpu.")
    world = load_world(settings.world)
    folder = materialise(find_model(settings.model))
    tokenizer = load_tokenizer(folder)
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{settings.model} is quantised already: give the original model.")
    layers = linear_layers(config)
    group_size = choose_group_size(settings.model, layers, settings.group_size)
    _require_library()
    chat = ChatFormat.from_tokenizer(tokenizer, {"enable_thinking": False})
    texts = judge_texts(world, chat, settings.samples, settings.checked, settings.seed)
    # Most CPUs have no fast products in half precision.
    stored = stored_dtype(folder)
    used = torch.float32 if settings.device == "cpu" else stored
    model = load_causal_lm(folder, used, settings.device)
    model.set_attn_implementation("sdpa")
    before = answer_logprobs(model, texts)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{settings.out.name}-", dir=settings.out.parent))
    try:
        began = time.perf_counter()
        _apply(model, texts, settings, group_size)
        model.to(stored).save_pretrained(beside, save_compressed=True)
        tokenizer.save_pretrained(beside)
        for weights in beside.glob("*.safetensors"):
            weights.chmod(0o644)
        seconds = time.perf_counter() - began
        del model
        found = compare_folder(beside, texts, before, settings)
        report = {
            "settings": asdict(settings) | {"out": settings.out.name, "group_size": group_size},
            "world": {"name": world.name, "checksum": world.checksum},
            "layers": len(layers),
            "bytes": sum(file.stat().st_size for file in beside.glob("*.safetensors")),
            "difference": asdict(found),
            "seconds": seconds,
            "hardware": _hardware(settings.device),
            "versions": {
                "python": platform.python_version(),
                **{
                    name: version(name)
                    for name in ("torch", "transformers", "llmcompressor", "compressed-tensors")
                },
            },
        }
        (beside / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        beside.chmod(0o755)
        os.rename(beside, settings.out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return report


def linear_layers(config: Any) -> list[LinearShape]:
    """The layers of a model that are quantised, without its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [
        LinearShape(name, module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] not in KEPT
    ]


def compare_folder(
    folder: Path, texts: JudgeTexts, before: FloatArray, settings: QuantizeSettings
) -> Difference:
    """Read a written folder back and compare it with the original.

    Args:
        folder: What was written.
        texts: The same prompts as for ``before``.
        before: ``[prompts, answers]``, log-probs of the original, nats.
        settings: Hold the bound and the device.

    Raises:
        UserError: The files are not what they say.
        TooFar: What they hold is too far from the original.
    """
    written = read_checkpoint(folder)
    if written is None:
        raise UserError(f"llmcompressor wrote no config.json into {str(folder)!r}: try again.")
    problem = next(quantisation_problems("The result", written, None, "quantization"), None)
    if problem is not None:
        raise UserError(problem)
    used = torch.float32 if settings.device == "cpu" else "auto"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=used)
    model.to(settings.device).eval()
    found = difference(before, answer_logprobs(model, texts))
    if not found.mean <= settings.max_difference:
        raise TooFar(
            f"The quantised model's log-probs of the answers are {found.mean:.2f} nats from the "
            f"original's (mean over {found.prompts} prompts, at most {settings.max_difference:g}), "
            "so nothing was written: use smaller groups, more samples, or a larger "
            "--max-difference."
        )
    return found


@torch.no_grad()
def answer_logprobs(model: Any, texts: JudgeTexts) -> FloatArray:
    """``[prompts, answers]``: log-probs of the answers' first tokens after each prompt, nats."""
    device = next(model.parameters()).device
    rows: list[torch.Tensor] = []
    for prompt in texts.checked:
        logits = model(torch.tensor([prompt], device=device), logits_to_keep=1).logits[0, -1]
        rows.append(functional.log_softmax(logits.float(), dim=-1)[list(texts.answers)].cpu())
    return torch.stack(rows).double().numpy()


def difference(before: FloatArray, after: FloatArray) -> Difference:
    """Compare log-probs ``[prompts, answers]`` of two models on the same prompts, nats."""
    apart = np.abs(before - after)
    return Difference(
        prompts=len(before),
        mean=float(apart.mean()),
        largest=float(apart.max()),
        same=float((before.argmax(axis=1) == after.argmax(axis=1)).mean()),
    )


def _require_library() -> None:
    if find_spec("llmcompressor") is None:
        raise UserError(
            "Quantising needs llmcompressor, which is not installed: run "
            "`pip install 'delta-belief-rl[awq]'`, best in an environment of its own."
        )


def _apply(model: Any, texts: JudgeTexts, settings: QuantizeSettings, group_size: int) -> None:
    """Scale and round the weights in place."""
    modifiers = import_module("llmcompressor.modifiers.quantization")
    transform = import_module("llmcompressor.modifiers.transform.awq")
    schemes = import_module("compressed_tensors.quantization")
    weights = schemes.QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=settings.scheme == "W4A16",
        strategy="group",
        group_size=group_size,
    )
    groups = {"group_0": schemes.QuantizationScheme(targets=["Linear"], weights=weights)}
    recipe = [
        transform.AWQModifier(),
        modifiers.QuantizationModifier(config_groups=groups, ignore=list(KEPT)),
    ]
    with _unpinned():
        import_module("llmcompressor").oneshot(
            model=model,
            dataset=_dataset(texts.samples),
            recipe=recipe,
            num_calibration_samples=len(texts.samples),
            max_seq_length=max(map(len, texts.samples)),
            shuffle_calibration_samples=False,
        )


def _dataset(rows: Sequence[tuple[int, ...]]) -> Any:
    return import_module("datasets").Dataset.from_dict(
        {
            "input_ids": [list(row) for row in rows],
            "attention_mask": [[1] * len(row) for row in rows],
        }
    )


@contextmanager
def _unpinned() -> Iterator[None]:
    """Keep llmcompressor from pinning memory where there is no GPU to copy it to.

    Version 0.14.0 does so without a look, and fails.
    """
    if torch.accelerator.is_available():
        yield
        return
    cache = import_module("llmcompressor.pipelines.cache").IntermediatesCache
    before = cache.pin_memory
    cache.pin_memory = lambda *_, **__: None
    try:
        yield
    finally:
        cache.pin_memory = before


def _hardware(device: str) -> dict[str, str | int]:
    found: dict[str, str | int] = {"device": device, "cores": os.cpu_count() or 1}
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
