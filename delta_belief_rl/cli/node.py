"""``delta-belief node``: one machine of a run on several machines; see ``cluster.node``."""

from __future__ import annotations

import argparse
from pathlib import Path

from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.cluster.node import Settings, play, rank_and_nodes
from delta_belief_rl.config.facts import available_cores
from delta_belief_rl.config.versions import find_version, release
from delta_belief_rl.types import UserError

OLDEST_RAY = (2, 60)
"""Older releases may ignore the token that lets machines into the cluster, or a folder that is not
the head's."""
LEAST_CPUS = 16
"""Logical CPUs of a machine at least: every worker books one, and on few cores they take turns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "--meet", type=Path, required=True, metavar="DIR", help="folder that all machines share"
    )
    parser.add_argument(
        "--rank", type=int, help="number of this machine, from 0; SLURM's in a step of SLURM"
    )
    parser.add_argument("--nodes", type=int, help="machines; SLURM's in a step of SLURM")
    parser.add_argument(
        "--deadline",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds until all machines must be there (300)",
    )
    parser.add_argument(
        "--cpus", type=int, help=f"workers on this machine (its cores, at least {LEAST_CPUS})"
    )
    parser.add_argument("--gpus", type=int, help="GPUs of this machine (those that Ray finds)")
    parser.add_argument(
        "--interface", metavar="NAME", help="network interface of Ray, NCCL and gloo"
    )


def run(args: argparse.Namespace) -> Result:
    """Be one machine to the end.

    Raises:
        UserError: The arguments cannot work, or the machines cannot meet.
    """
    if not args.command:
        raise UserError("the command stands behind --, for example: -- python train.py ...")
    found = find_version("ray") or "0"
    if release(found) < OLDEST_RAY:
        wanted = ".".join(map(str, OLDEST_RAY))
        raise UserError(f"Several machines need ray>={wanted}, not {found}: update it.")
    rank, nodes = rank_and_nodes(args.rank, args.nodes)
    for name, value in (("deadline", args.deadline), ("cpus", args.cpus)):
        if value is not None and value <= 0:
            raise UserError(f"--{name} must be above 0, not {value:g}.")
    if args.gpus is not None and args.gpus < 0:
        raise UserError(f"--gpus must not be negative, not {args.gpus}.")
    status = play(
        Settings(
            rank=rank,
            nodes=nodes,
            meet=args.meet.absolute(),
            deadline=args.deadline,
            cpus=args.cpus or max(LEAST_CPUS, available_cores()),
            gpus=args.gpus,
            interface=args.interface,
            command=args.command,
        )
    )
    return Result({"rank": rank, "status": int(status)}, status=int(status))


VERB = Verb(
    name="node",
    help="Be one machine of a run on several machines: start Ray by rank, run a command on rank 0.",
    example=(
        "delta-belief node --rank 0 --nodes 2 --meet /shared/meet -- python train.py "
        "experiment=train_8xa100_paper trainer.nnodes=2 ray_init.address=auto"
    ),
    add_arguments=add_arguments,
    run=run,
    takes_command=True,
)
