"""What a verb of the console script is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """What a verb found.

    Attributes:
        value: Printed with ``--json`` as one JSON document; plain dicts, lists, text and numbers.
        text: Printed to stdout without ``--json``; empty when the verb has printed as it went.
        status: 0 done, 1 a check failed.
    """

    value: object
    text: str = ""
    status: int = 0


@dataclass(frozen=True, slots=True)
class Verb:
    """One command, e.g. ``delta-belief plan``.

    Attributes:
        help: One line.
        example: A command that works, shown by ``--help``.
        add_arguments: Declares the verb's arguments; ``--json`` is there already (``args.json``).
        run: Does the work. A ``UserError`` becomes one sentence on stderr and exit status 2.
        takes_command: What stands behind the first ``--`` is another program's command line:
            ``args.command``, a list of words as they are.
    """

    name: str
    help: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Result]
    takes_command: bool = False
