"""Fetch the task files of the published experiments into ``data/published`` of this clone.

The same as ``delta-belief data fetch``; with arguments, only the files that they name.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from delta_belief_rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["data", "fetch", *sys.argv[1:]]))
