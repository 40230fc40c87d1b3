"""Make the embedded agent: ``python -m delta_belief_rl.trainer.warmup.main --out DIR``.

Example: ``python -m delta_belief_rl.trainer.warmup.main --out agent --seed 0 --minutes 5
    --workers 12``
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.table import World, load_world
from delta_belief_rl.envs.worlds.tasks import DEFAULT_PROMPT
from delta_belief_rl.trainer.warmup.evaluate import WarmupReport, elicited_beliefs, play, report
from delta_belief_rl.trainer.warmup.games import Language
from delta_belief_rl.trainer.warmup.language import (
    WorldLike,
    build_language,
    elicitation_tokens,
    reader,
    world_tokenizer,
)
from delta_belief_rl.trainer.warmup.model import build_model
from delta_belief_rl.trainer.warmup.train import WarmupLog, WarmupSettings, pick_device, train
from delta_belief_rl.types import Message, UserError

REPORT_FILE = "warmup.json"
_BELIEF_GAMES = 64


def warm_up(
    settings: WarmupSettings,
    world: WorldLike,
    messages: Sequence[Message],
    out: Path,
    model_path: str | None = None,
    eval_games: int = 320,
) -> WarmupReport:
    """Train an agent on teacher games of a world, measure it and write it as a Hugging Face folder.

    Args:
        settings: See :class:`WarmupSettings`.
        world: What can be asked and guessed; every thing of it is a secret here.
        messages: The messages that open every game, those of the later training.
        out: Folder to write; made when missing.
        model_path: A causal language model to start from, with its own tokenizer; a new one when
            None.
        eval_games: Games to measure with, spread over all things.

    Returns:
        What was measured; also in ``warmup.json`` of the folder.

    Raises:
        UserError: Settings or model do not fit.
    """
    device = pick_device(settings.device)
    if model_path is None:
        tokenizer = world_tokenizer(world, messages)
        model: PreTrainedModel = build_model(settings.sizes, tokenizer, settings.seed)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    language = build_language(world, tokenizer, messages)
    model.to(device)  # type: ignore[arg-type]
    trained = _with_lora(model, settings.lora_rank) if settings.lora_rank else model
    logs = train(trained, language, settings)
    if settings.lora_rank:
        model = trained.merge_and_unload()  # type: ignore[operator]
    measured = measure(model, language, world, tokenizer, eval_games, settings)
    save(model, tokenizer, settings, world, logs, measured, out)
    return measured


def measure(
    model: PreTrainedModel,
    language: Language,
    world: WorldLike,
    tokenizer: PreTrainedTokenizerBase,
    games: int,
    settings: WarmupSettings,
) -> WarmupReport:
    """Play games at temperature 1 on secrets spread evenly over all things."""
    things = len(world.things)
    secrets = [(i * things) // games if games < things else i % things for i in range(games)]
    model.eval()
    read = reader(world, tokenizer, Grammar(world)) if isinstance(world, World) else None
    played = play(model, language, secrets, settings.max_turns, settings.seed, read=read)
    some = played[:: max(1, games // _BELIEF_GAMES)]
    beliefs = elicited_beliefs(model, language, some, elicitation_tokens(world, tokenizer))
    return report(played, beliefs, settings.seed)


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: WarmupSettings,
    world: WorldLike,
    logs: Sequence[WarmupLog],
    measured: WarmupReport,
    out: Path,
) -> None:
    """Write weights, tokenizer, generation settings and ``warmup.json``."""
    out.mkdir(parents=True, exist_ok=True)
    model = model.to("cpu").float()  # type: ignore[arg-type]
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o644)
    tokenizer.save_pretrained(out)
    record = {
        "seed": settings.seed,
        "settings": asdict(settings),
        "world": getattr(world, "name", ""),
        "world_checksum": getattr(world, "checksum", ""),
        "measured": measured.as_dict(),
        "log": [asdict(line) for line in logs[:: max(1, len(logs) // 50)]],
    }
    (out / REPORT_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _with_lora(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return cast(PreTrainedModel, get_peft_model(model, config))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m delta_belief_rl.trainer.warmup.main",
        description="Warm up an agent on games of a mediocre player.",
        epilog="example: python -m delta_belief_rl.trainer.warmup.main --out agent --minutes 5",
    )
    add_arguments(parser)
    return parser.parse_args(arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that ``settings_from`` and ``run`` read."""
    default = WarmupSettings()
    parser.add_argument("--out", required=True, type=Path, help="folder to write the model to")
    parser.add_argument("--world", default="everyday", help="name or path of the world")
    parser.add_argument("--model", help="start from this causal language model")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--device", default=default.device, help="auto, cpu, cuda")
    parser.add_argument("--minutes", type=float, help="train for so long (default 5)")
    parser.add_argument("--steps", type=int, help="train for so many steps: reproducible")
    parser.add_argument("--workers", type=int, default=0, help="processes that make the games")
    parser.add_argument("--batch-games", type=int, default=default.batch_games)
    parser.add_argument("--micro-games", type=int, default=default.micro_games)
    parser.add_argument("--max-turns", type=int, default=default.max_turns)
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--hidden", type=int, default=default.sizes.hidden)
    parser.add_argument("--layers", type=int, default=default.sizes.layers)
    parser.add_argument("--mlp", type=int, default=default.sizes.mlp)
    parser.add_argument(
        "--informative",
        type=float,
        default=default.teacher.informative,
        help="share of the teacher's questions that are sure to tell things apart",
    )
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--eval-games", type=int, default=320)


def settings_from(options: argparse.Namespace) -> WarmupSettings:
    """Settings of a command line."""
    minutes = options.minutes
    if minutes is None and options.steps is None:
        minutes = 5.0
    default = WarmupSettings()
    return replace(
        default,
        seed=options.seed,
        device=options.device,
        minutes=minutes,
        steps=options.steps,
        workers=options.workers,
        batch_games=options.batch_games,
        micro_games=options.micro_games,
        max_turns=options.max_turns,
        lr=options.lr,
        lora_rank=options.lora_rank,
        teacher=replace(default.teacher, informative=options.informative),
        sizes=replace(default.sizes, hidden=options.hidden, layers=options.layers, mlp=options.mlp),
    )


def run(options: argparse.Namespace) -> WarmupReport:
    """Warm up as a command line says.

    Raises:
        UserError: Settings, world or model do not fit.
    """
    return warm_up(
        settings_from(options),
        load_world(options.world),
        DEFAULT_PROMPT,
        options.out,
        options.model,
        options.eval_games,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = parse_arguments(arguments)
    try:
        measured = run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(measured.as_dict(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
