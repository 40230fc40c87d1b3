"""Put what the records say into a page, between its marks, and draw its pictures.

    python -m validation.credit.render --page docs/results_credit.md
    python -m validation.credit.render --page page.md --records studies

A page that does not exist begins as ``page.md`` beside this module. A line ``<!-- part NAME -->``
stands before each part that is made here and ``<!-- end -->`` behind it. The picture of a study
lies beside the page, as ``<page>_<study>.svg``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from delta_belief_rl.cli.parser import OneLineParser
from delta_belief_rl.types import UserError
from validation.credit import records
from validation.credit.plot import study_plot
from validation.credit.reading import Findings, analyse
from validation.credit.study import STUDIES
from validation.credit.tables import All, part

FOLDER = Path(__file__).resolve().parent
"""Where the records of the page lie."""
TEMPLATE = FOLDER / "page.md"
_BLOCK = re.compile(r"(<!-- part ([\w ]+) -->\n)(.*?)(<!-- end -->)", flags=re.S)


def blocks(page: str) -> dict[str, str]:
    """The parts of a page by name, as they stand there."""
    return {name: text.strip("\n") for _, name, text, _ in _BLOCK.findall(page)}


def findings(folder: Path) -> dict[str, Findings]:
    """The studies that have a record in a folder.

    Raises:
        UserError: There is none, or one cannot be used.
    """
    paths = {name: folder / f"{name}.json" for name in STUDIES}
    found = {name: analyse(records.load(path)) for name, path in paths.items() if path.is_file()}
    if not found:
        raise UserError(f"{folder} has no record of a study: make one by validation.credit.run.")
    return found


def rendered(page: str, found: All) -> str:
    """The page with every part made anew.

    Raises:
        UserError: A record is missing, or a mark names no part.
    """

    def block(mark: re.Match[str]) -> str:
        return f"{mark[1]}{part(mark[2], found)}\n{mark[4]}"

    return _BLOCK.sub(block, page)


def pictures(page: Path, found: All) -> dict[Path, str]:
    """The picture of each study, by its file beside the page."""
    return {
        page.with_name(f"{page.stem}_{name}.svg"): study_plot(one, STUDIES[name].title)
        for name, one in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Renew a page and its pictures."""
    parser = OneLineParser(
        prog="validation.credit.render",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--page", type=Path, required=True, help="page that is made or renewed")
    parser.add_argument("--records", type=Path, default=FOLDER, help="folder of the records")
    args = parser.parse_args(argv)
    try:
        found = findings(args.records)
        source = args.page if args.page.exists() else TEMPLATE
        body = rendered(source.read_text(encoding="utf-8"), found)
        for path, text in {args.page: body, **pictures(args.page, found)}.items():
            path.write_text(text, encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"validation.credit.render: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
