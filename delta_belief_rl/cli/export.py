"""``delta-belief export``: a checkpoint's policy as a PEFT adapter or as a whole model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from delta_belief_rl.cli.verb import Result, Verb

_DTYPES = ("float32", "bfloat16", "float16")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a folder global_step_<N>")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument(
        "--merged", action="store_true", help="a whole model, the adapter merged into its weights"
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of the weights written; default: float32, or with --merged the base model's",
    )
    parser.add_argument(
        "--adapter", choices=("actor", "ema"), default="actor", help="the policy, or its slow copy"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="the base model, where it has moved since the run"
    )


def _run(args: argparse.Namespace) -> Result:
    # Here, so that --help does not load torch.
    from delta_belief_rl.trainer.export import ExportSettings, TooFar, export

    settings = ExportSettings(
        args.checkpoint, args.out, args.merged, args.adapter, args.dtype, args.base
    )
    try:
        made = export(settings)
    except TooFar as error:
        return Result({"out": str(args.out), "error": str(error)}, str(error), status=1)
    kind = "whole model" if made.merged else "PEFT adapter"
    lines = (
        f"{made.out}: {kind} in {made.dtype}, step {made.step} of run {made.run_id}",
        f"adapter {made.adapter}, rank {made.rank}, alpha {made.alpha:g}, base model {made.base}",
        f"logits read back differ by at most {made.largest:.2g} (bound {made.bound:g}), "
        f"{made.mean:.2g} on average; the adapter changes them by {made.effect:.2g} on average",
    )
    return Result(asdict(made), "\n".join(lines))


VERB = Verb(
    name="export",
    help="Write a checkpoint's policy as a PEFT adapter or a whole model, and compare it.",
    example="delta-belief export outputs/quickstart/delta_belief/checkpoints/global_step_30 out",
    add_arguments=_add_arguments,
    run=_run,
)
