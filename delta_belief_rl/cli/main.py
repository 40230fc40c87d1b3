"""The console script ``delta-belief VERB``: results on stdout, progress and logs on stderr.

A verb lives in a module of its own that defines ``VERB``; one line in ``VERBS`` registers it.
Modules are imported when their verb is used, so ``delta-belief plan`` never loads torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import cast

from delta_belief_rl.cli.parser import OneLineParser
from delta_belief_rl.cli.verb import Verb
from delta_belief_rl.types import UserError

PROG = "delta-belief"

VERBS: dict[str, tuple[str, str]] = {
    "check-env": ("delta_belief_rl.cli.check_env", "run an environment through its contract"),
    "compare": ("delta_belief_rl.cli.compare", "train methods at one budget and compare them"),
    "data": ("delta_belief_rl.cli.data", "make, fetch, check and compare task files"),
    "analyze": ("delta_belief_rl.cli.analyze", "count, check and compare files of stored games"),
    "audit": ("delta_belief_rl.cli.audit", "measure a judge, from stored games or by asking it"),
    "backup": ("delta_belief_rl.cli.backup", "copy checkpoints to the Hugging Face hub and back"),
    "belief": ("delta_belief_rl.cli.belief", "what a model believes in stored conversations"),
    "doctor": ("delta_belief_rl.cli.doctor", "check the numbers of a configuration before a run"),
    "eval": ("delta_belief_rl.cli.eval", "play benchmarks with models, resume, compare"),
    "export": ("delta_belief_rl.cli.export", "write a policy as a PEFT adapter or a model"),
    "node": ("delta_belief_rl.cli.node", "be one machine of a run on several machines"),
    "plan": ("delta_belief_rl.cli.plan", "show what a configuration would run"),
    "play": ("delta_belief_rl.cli.play", "play a game, or watch one"),
    "recount": ("delta_belief_rl.cli.recount", "count win rates anew from stored games"),
    "report": ("delta_belief_rl.cli.report", "make a run's report.html anew"),
    "teach-judge": ("delta_belief_rl.cli.teach_judge", "make a small judge of a world"),
    "view": ("delta_belief_rl.cli.view", "read stored games"),
    "warmup": ("delta_belief_rl.cli.warmup", "make the small agent of a world"),
    "watchdog": ("delta_belief_rl.cli.watchdog", "run a training for days, starting it again"),
}
"""Name to (module, one line of help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit status: 0 done, 1 a check failed, 2 bad input or configuration.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    words = list(sys.argv[1:] if argv is None else argv)
    top = _top_parser()
    if not words or words[0] not in VERBS:
        top.parse_args(words or ["--help"])
        return 0
    verb = load_verb(words[0])
    own = words[1:]
    command: list[str] = []
    if verb.takes_command and "--" in own:
        border = own.index("--")
        own, command = own[:border], own[border + 1 :]
    args = _verb_parser(verb).parse_intermixed_args(own)
    if verb.takes_command:
        args.command = command
    try:
        result = verb.run(args)
    except UserError as error:
        print(f"{PROG} {verb.name}: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result.value, indent=2, ensure_ascii=False) if args.json else result.text
    try:
        if text:
            print(text, flush=True)
    except BrokenPipeError:
        # Who reads has seen enough (``| head``); nothing may be written to the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return result.status


def load_verb(name: str) -> Verb:
    """Import a verb by its name."""
    return cast("Verb", import_module(VERBS[name][0]).VERB)


def _top_parser() -> OneLineParser:
    verbs = "\n".join(f"  {name:<11} {words}" for name, (_, words) in VERBS.items())
    parser = OneLineParser(
        prog=PROG,
        description="Work with runs of delta_belief_rl.",
        epilog=f"verbs:\n{verbs}\n\nexample:\n  {PROG} plan experiment=quickstart",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=list(VERBS), metavar="VERB", help="see below")
    return parser


def _verb_parser(verb: Verb) -> OneLineParser:
    parser = OneLineParser(
        prog=f"{PROG} {verb.name}",
        description=verb.help,
        epilog=f"example:\n  {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    verb.add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
