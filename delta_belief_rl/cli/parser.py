"""An argument parser whose complaints are one sentence."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Prints ``prog: message`` to stderr and exits with status 2; no usage block."""

    def error(self, message: str) -> NoReturn:
        """End the program over a bad command line."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)
