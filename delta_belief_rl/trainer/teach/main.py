"""From a world to the folder of a judge that was taught it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from delta_belief_rl.envs.worlds.players import sentence
from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.judge.build import HfJudgeSettings, build_judge
from delta_belief_rl.judge.llm_judge import LlmJudgeSettings
from delta_belief_rl.judge.prompts import judge_messages
from delta_belief_rl.models.adapters import add_lora
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer, stored_dtype
from delta_belief_rl.models.packaged import materialise
from delta_belief_rl.rollout.seeds import named_seed
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.text.word_tokenizer import build_word_tokenizer
from delta_belief_rl.trainer.teach.cases import (
    GUESSES,
    INVALID,
    INVALID_HELD,
    Case,
    CaseMaker,
    hold_out,
)
from delta_belief_rl.trainer.teach.measure import Measured, measure
from delta_belief_rl.trainer.teach.settings import SIZES, TeachSettings
from delta_belief_rl.trainer.teach.train import TeachPoint, teach
from delta_belief_rl.trainer.warmup.model import build_model
from delta_belief_rl.types import UserError

REPORT_FILE = "teach.json"
ADAPTER_FOLDER = "adapter"
"""Where the folder of a judge that was taught with an adapter also keeps it, in PEFT's format."""
_LONGEST = 2000


def teach_judge(world: World, settings: TeachSettings, out: Path) -> dict[str, Any]:
    """Teach a judge, write its folder and measure it; the folder appears whole or not at all.

    Args:
        world: The table that it is taught.
        settings: How.
        out: The folder, which must not exist yet.

    Returns:
        What ``teach.json`` of the folder holds.

    Raises:
        UserError: The folder exists, the base model cannot be loaded or asked, or the device is
            not there.
    """
    if out.exists():
        raise UserError(f"{str(out)!r} exists already: give another --out, or remove it.")
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("There is no CUDA device: use --device cpu.")
    cases = CaseMaker(world, hold_out(world, settings.held_pairs, settings.seed))
    tokenizer, model, stored = _pupil(world, cases, settings)
    chat = ChatFormat.from_tokenizer(tokenizer, {"enable_thinking": False})
    wrapped: Any = None
    if settings.lora_rank:
        model.to(getattr(torch, settings.precision))
        wrapped = add_lora(model, settings.lora_rank, 2 * settings.lora_rank, seed=settings.seed)
    began, worked = time.perf_counter(), time.process_time()
    curve = teach(model, chat, cases, settings, print_point)
    taught, worked = time.perf_counter() - began, time.process_time() - worked
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        if wrapped is not None:
            wrapped.save_pretrained(beside / ADAPTER_FOLDER)
            model = wrapped.float().merge_and_unload()
        _save(model.to("cpu", stored), tokenizer, beside)
        began = time.perf_counter()
        measured = _measure(beside, cases, settings)
        report = {
            "settings": asdict(settings),
            "world": {"name": world.name, "checksum": world.checksum},
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "held_out": {
                "phrasings": dict(cases.held.phrasings),
                "pairs": int(cases.held.pairs.sum()),
            },
            "measured": {kind: found.as_dict() for kind, found in measured.items()},
            "seconds": {
                "teach": taught,
                "teach_cpu": worked,
                "measure": time.perf_counter() - began,
            },
            "hardware": _hardware(settings.device),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
            },
            "curve": [asdict(point) for point in curve],
        }
        (beside / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        beside.chmod(0o755)
        os.rename(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return report


def judge_tokenizer(world: World, cases: CaseMaker) -> PreTrainedTokenizerBase:
    """The word tokenizer of a world's judge: its prompts and answers, questions included."""
    first = cases.case(0, "Is it?")
    messages = [
        message
        for history in (True, False)
        for message in judge_messages(first.request, "direct", history)
    ]
    texts = [message.content for message in messages]
    texts += ["Your answer: Yes No Invalid Repeated Finished", "Is Could it a an the"]
    texts += [sentence(text) for prop in world.properties for text in prop.phrasings]
    texts += [name for thing in world.things for name in (thing.name, *thing.aliases)]
    texts += [
        form.format(article="a", name="it", other_article="an", other="it")
        for form in (*GUESSES, *INVALID, *INVALID_HELD)
    ]
    texts += [str(number) for number in range(1, 21)]
    return build_word_tokenizer(texts, model_max_length=_LONGEST)


def print_point(point: TeachPoint) -> None:
    """One line of progress to stderr."""
    print(
        f"teach {point.share:5.1%} step {point.step:6d} {point.seconds:6.0f} s  "
        f"lr {point.lr:.1e}  loss {point.loss:.4f}  heads {point.heads:.3f}  "
        f"right {point.right:.3f}  {point.questions_per_second:.0f} questions/s  "
        f"waited {point.waited:.0%}",
        file=sys.stderr,
        flush=True,
    )


def _pupil(
    world: World, cases: CaseMaker, settings: TeachSettings
) -> tuple[PreTrainedTokenizerBase, Any, torch.dtype]:
    """Tokenizer, the model before it is taught, in float32, and how its weights are stored."""
    if settings.base is not None:
        folder = materialise(settings.base)
        tokenizer, model = load_tokenizer(folder), load_causal_lm(folder)
        return tokenizer, model, stored_dtype(folder)
    tokenizer = judge_tokenizer(world, cases)
    return tokenizer, build_model(SIZES[settings.size], tokenizer, settings.seed), torch.float32


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights as they are, tokenizer and greedy generation settings."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
    tokenizer.save_pretrained(folder)


def _measure(folder: Path, cases: CaseMaker, settings: TeachSettings) -> dict[str, Measured]:
    """What the written folder answers when it is loaded as a judge."""
    rng = np.random.default_rng(named_seed("teach", "measure", settings.seed))
    kinds: dict[str, Sequence[Case]] = dict(cases.measured(settings.measured, rng))
    judge = build_judge(
        HfJudgeSettings(
            str(folder),
            LlmJudgeSettings(mode="direct", prompt_length=_LONGEST, response_length=8),
            device=settings.device,
            lanes=settings.lanes,
        )
    )
    return measure(judge, kinds, settings.seed, 4 * settings.lanes)


def _hardware(device: str) -> dict[str, str | int]:
    """Where it was taught."""
    found: dict[str, str | int] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
