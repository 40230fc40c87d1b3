"""Put the tables of the records into a page, between its marks.

    python -m validation.gpu.render training memory --records checks/records
    python -m validation.gpu.render --page docs/results_gpu.md

Without ``--page`` the tables that are named are printed, or all that the records allow. A page
marks a table by a line ``<!-- table NAME -->`` before it and ``<!-- end -->`` behind it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from delta_belief_rl.cli.parser import OneLineParser
from delta_belief_rl.types import UserError
from validation.gpu.site import ROOT
from validation.gpu.tables import TABLES, Records

FOLDER = ROOT / "validation" / "gpu"
"""Where the records of the page lie."""
_BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(\n<!-- end -->)", flags=re.S)


def blocks(page: str) -> dict[str, str]:
    """The tables of a page by name, as they stand there."""
    return {name: text for _, name, text, _ in _BLOCK.findall(page)}


def rendered(page: str, records: Records) -> str:
    """The page with every marked table made anew.

    Raises:
        UserError: A record is missing, or a mark names no table.
    """

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{table(found[2], records)}{found[4]}"

    return _BLOCK.sub(block, page)


def table(name: str, records: Records) -> str:
    """One table.

    Raises:
        UserError: There is no such table, or a record is missing.
    """
    if name not in TABLES:
        raise UserError(f"There is no table {name!r}: choose from {', '.join(TABLES)}.")
    return TABLES[name](records)


def main(argv: Sequence[str] | None = None) -> int:
    """Print tables, or renew those of a page."""
    parser = OneLineParser(
        prog="validation.gpu.render",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="TABLE", help=f"from {', '.join(TABLES)}")
    parser.add_argument("--records", type=Path, default=FOLDER, help="folder of the records")
    parser.add_argument("--page", type=Path, help="page whose tables are made anew")
    args = parser.parse_intermixed_args(argv)
    records = Records(args.records)
    try:
        if args.page:
            text = args.page.read_text(encoding="utf-8")
            args.page.write_text(rendered(text, records), encoding="utf-8")
            return 0
        for name in args.names or TABLES:
            try:
                print(f"<!-- table {name} -->\n{table(name, records)}\n<!-- end -->\n")
            except UserError as error:
                if args.names:
                    raise
                print(f"{name}: {error}", file=sys.stderr)
    except (UserError, OSError) as error:
        print(f"validation.gpu.render: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
