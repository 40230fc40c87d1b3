"""``delta-belief teach-judge``: make a small language model that judges an embedded world."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.config.facts import available_cores
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.trainer.teach.main import teach_judge
from delta_belief_rl.trainer.teach.settings import SIZES, TeachSettings, suited
from delta_belief_rl.types import UserError

_KINDS = {
    "taught": "taught pairs, taught words",
    "phrasings": "taught pairs, held-out words",
    "pairs": "held-out pairs, taught words",
    "guesses": "guesses, half of them right",
    "invalid": "invalid, held-out forms",
    "history": "behind 1 to 19 questions",
    "repeats": "repeated questions",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    default = TeachSettings()
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--world", default="everyday", help="name or path of the world")
    parser.add_argument("--size", choices=list(SIZES), help="of a new model (default small)")
    parser.add_argument("--base", help="teach this chat model in place of a new one")
    parser.add_argument("--lora-rank", type=int, help="teach an adapter of the base and merge it")
    parser.add_argument(
        "--steps", type=int, help=f"train for so many steps: reproducible (default {default.steps})"
    )
    parser.add_argument("--minutes", type=float, help="train for so long in place of steps")
    parser.add_argument("--secrets", type=int, help="things of one step (32; 128 on a GPU)")
    parser.add_argument("--questions", type=int, help="questions to each of them (4; 8 on a GPU)")
    parser.add_argument("--history-every", type=int, help="one step in so many has a history (8)")
    parser.add_argument(
        "--lr", type=float, help="learning rate (3e-3; of a base 3e-4, of its adapter 1e-3)"
    )
    parser.add_argument("--workers", type=int, help="processes that prepare questions (0; GPU: 12)")
    parser.add_argument("--device", default=default.device, choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=default.seed)


def _run(args: argparse.Namespace) -> Result:
    if args.size and args.base:
        raise UserError("--size is of a new model and --base is an old one: give one of the two.")
    lora = bool(args.lora_rank)
    fields: dict[str, Any] = suited(args.base, args.device, lora, available_cores())
    given = ("size", "base", "lora_rank", "secrets", "questions", "history_every", "lr", "workers")
    fields |= {name: getattr(args, name) for name in given if getattr(args, name) is not None}
    if args.steps is not None or args.minutes is not None:
        fields |= {"steps": args.steps, "minutes": args.minutes}
    settings = TeachSettings(device=args.device, seed=args.seed, **fields)
    report = teach_judge(load_world(args.world), settings, args.out)
    return Result(value=report, text=_text(report, args.out))


def _text(report: dict[str, Any], out: Path) -> str:
    lines = [
        f"{report['parameters']:,} parameters taught in {report['seconds']['teach']:.0f} s",
        "right answers (95 % interval over things):",
    ]
    for kind, found in report["measured"].items():
        lines.append(
            f"  {_KINDS[kind]:30} {found['right']:6.1%}  "
            f"[{found['low']:.1%}, {found['high']:.1%}]  of {found['questions']}"
        )
    return "\n".join([*lines, f"written to {out}"])


VERB = Verb(
    name="teach-judge",
    help="Make a judge: teach a small language model the answers of a world.",
    example="delta-belief teach-judge --world everyday --out taught",
    add_arguments=_add_arguments,
    run=_run,
)
