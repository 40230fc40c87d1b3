"""``delta-belief warmup``: make an agent that knows a world's language and facts."""

from __future__ import annotations

import argparse

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.trainer.warmup.main import add_arguments, run


def _run(args: argparse.Namespace) -> Result:
    found = run(args).as_dict()
    lines = [f"{name:22} {value}" for name, value in found.items()]
    return Result(value=found, text="\n".join([*lines, f"written to {args.out}"]))


VERB = Verb(
    name="warmup",
    help="Make the small agent: supervised learning on games of a mediocre player.",
    example="delta-belief warmup --out agent --minutes 5",
    add_arguments=add_arguments,
    run=_run,
)
