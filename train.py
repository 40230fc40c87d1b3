"""Train or evaluate an agent: compose the configuration, validate it, show the plan, run it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cli.parser import OneLineParser
from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.types import UserError

EXAMPLE = """examples:
  python train.py experiment=quickstart
  python train.py experiment=quickstart trainer.total_training_steps=5 seed=7
  python train.py --dry-run experiment=train_8xa100_paper data.train_batch_size=120 \\
      actor_rollout_ref.actor.ppo_mini_batch_size=40
  python train.py --config outputs/quickstart/delta_belief/config.yaml

docs/config.md explains every setting."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status.

    Returns:
        0 done, 1 a check failed, 2 bad input, 3 the run stopped itself (``trainer.abort``).
    """
    parser = OneLineParser(
        prog="train.py",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings and groups")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--config", default="base", metavar="NAME", help="name or YAML file")
    args = parser.parse_intermixed_args(argv)
    try:
        config, plan, warnings = prepare(args.overrides, args.config)
        for warning in warnings:
            print(f"train.py: warning: {warning}", file=sys.stderr)
        if args.dry_run:
            print(plan.render())
            for sentence in unavailable(config):
                print(f"not runnable here: {sentence}")
            return 0
        plan.check()
        for sentence in unavailable(config):
            raise UserError(sentence)
        from delta_belief_rl.cluster.app import run

        return run(config, plan)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
