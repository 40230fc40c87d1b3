"""Make the embedded agent: ``python -m delta_belief_rl.trainer.warmup.main --out DIR``.

Example: ``python -m delta_belief_rl.trainer.warmup.main --out agent --seed 0 --minutes 5
    --workers 12``. With ``--env errands`` or ``--env agreement`` it is the agent of that
environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
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
from delta_belief_rl.models.denoiser import save_denoiser
from delta_belief_rl.trainer.warmup.agreement import (
    AgreementReport,
    AgreementWarmup,
    warm_up_agreement,
)
from delta_belief_rl.trainer.warmup.errands import (
    SIZES,
    ErrandReport,
    ErrandWarmup,
    record_of,
    warm_up_errands,
)
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
ENVIRONMENTS = ("twenty_questions", "errands", "agreement")
_ONLY_OF = {
    "errands": ("teacher_games", "wander"),
    "agreement": ("miscount", "slip"),
    "twenty_questions": ("world", "model", "workers", "micro_games", "informative", "lora_rank"),
}
"""Options that only one environment has."""
_NOT_OF = {"agreement": ("minutes", "max_turns")}
"""Options that one environment alone has not."""
_BELIEF_GAMES = 64
_ERRAND_GAMES, _ERRAND_TURNS = 8, 20


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
    record = {
        "seed": settings.seed,
        "settings": asdict(settings),
        "world": getattr(world, "name", ""),
        "world_checksum": getattr(world, "checksum", ""),
        "measured": measured.as_dict(),
        "log": [asdict(line) for line in logs[:: max(1, len(logs) // 50)]],
    }
    write_agent(model, tokenizer, record, out)


def write_agent(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    record: Mapping[str, object],
    out: Path,
) -> None:
    """Write a model folder and what is known of its training."""
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
    parser.add_argument(
        "--env", choices=ENVIRONMENTS, default=ENVIRONMENTS[0], help="what the agent will play"
    )
    parser.add_argument("--world", default="everyday", help="name or path of the world")
    parser.add_argument("--model", help="start from this causal language model")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--device", default=default.device, help="auto, cpu, cuda")
    parser.add_argument("--minutes", type=float, help="train for so long (default 5)")
    parser.add_argument("--steps", type=int, help="train for so many steps: reproducible")
    parser.add_argument("--workers", type=int, default=0, help="processes that make the games")
    parser.add_argument(
        "--batch-games",
        type=int,
        help="games of a step (default 256; errands: 8; agreement: 64 answers)",
    )
    parser.add_argument("--micro-games", type=int, default=default.micro_games)
    parser.add_argument("--max-turns", type=int, help="(default 20)")
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--hidden", type=int, help="(default 128; errands, agreement: 64)")
    parser.add_argument("--layers", type=int, help="(default 4; errands: 3; agreement: 2)")
    parser.add_argument("--mlp", type=int, help="(default 384; errands, agreement: 192)")
    parser.add_argument(
        "--informative",
        type=float,
        default=default.teacher.informative,
        help="share of the teacher's questions that are sure to tell things apart",
    )
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--eval-games", type=int, default=320)
    errands = ErrandWarmup(replace(default, batch_games=_ERRAND_GAMES))
    parser.add_argument(
        "--teacher-games", type=int, default=errands.games, help="errands: different games"
    )
    parser.add_argument(
        "--wander",
        type=float,
        default=errands.teacher.wander,
        help="errands: share of the teacher's commands that are any that change something",
    )
    agreement = AgreementWarmup()
    parser.add_argument(
        "--miscount",
        type=float,
        default=agreement.miscount,
        help="agreement: share of the examples whose result is one or next to the right one",
    )
    parser.add_argument(
        "--slip",
        type=float,
        default=agreement.slip,
        help="agreement: share of the examples whose verb does not agree",
    )


def settings_from(options: argparse.Namespace) -> WarmupSettings:
    """Settings of a command line; of the environment errands those that both share."""
    minutes = options.minutes
    if minutes is None and options.steps is None:
        minutes = 5.0
    default = WarmupSettings()
    if options.env == "errands":
        default = replace(default, sizes=SIZES, batch_games=_ERRAND_GAMES, max_turns=_ERRAND_TURNS)
    names = ("batch_games", "max_turns")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    names = ("hidden", "layers", "mlp")
    sizes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return replace(
        default,
        seed=options.seed,
        device=options.device,
        minutes=minutes,
        steps=options.steps,
        workers=options.workers,
        micro_games=options.micro_games,
        lr=options.lr,
        lora_rank=options.lora_rank,
        teacher=replace(default.teacher, informative=options.informative),
        sizes=replace(default.sizes, **sizes),
        **given,
    )


def run(options: argparse.Namespace) -> WarmupReport | ErrandReport | AgreementReport:
    """Warm up as a command line says.

    Raises:
        UserError: Settings, world or model do not fit.
    """
    _check_options(options)
    if options.env == "agreement":
        return _run_agreement(options)
    settings = settings_from(options)
    if options.env == "errands":
        return _run_errands(options, settings)
    return warm_up(
        settings,
        load_world(options.world),
        DEFAULT_PROMPT,
        options.out,
        options.model,
        options.eval_games,
    )


def _run_errands(options: argparse.Namespace, common: WarmupSettings) -> ErrandReport:
    settings = ErrandWarmup(common, options.teacher_games, eval_games=options.eval_games)
    settings = replace(settings, teacher=replace(settings.teacher, wander=options.wander))
    model, tokenizer, logs, measured = warm_up_errands(settings)
    write_agent(model, tokenizer, record_of(settings, logs, measured), options.out)
    return measured


def _run_agreement(options: argparse.Namespace) -> AgreementReport:
    default = AgreementWarmup()
    names = ("hidden", "layers", "mlp", "steps")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    warmup = replace(
        default,
        seed=options.seed,
        device=options.device,
        batch=default.batch if options.batch_games is None else options.batch_games,
        lr=options.lr,
        miscount=options.miscount,
        slip=options.slip,
        eval_games=options.eval_games,
        **given,
    )
    model, tokenizer, record, measured = warm_up_agreement(warmup)
    save_denoiser(model, tokenizer, options.out)
    (options.out / REPORT_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return measured


def _check_options(options: argparse.Namespace) -> None:
    """Refuse an option that the environment does not have."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for env, names in _ONLY_OF.items():
        for name in names if env != options.env else ():
            if getattr(options, name) != parser.get_default(name):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{flag} is an option of --env {env} and has no meaning for {options.env}: "
                    "leave it out."
                )
    for name in _NOT_OF.get(options.env, ()):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} has no meaning for {options.env}: leave it out.")


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
