"""Stands in for ``train.py``: writes what a run leaves, does what a plan says, goes on when cut.

The plan is the file that ``COMPARE_PLAN`` names: method to what its runs do. ``ok`` is nothing
special; ``fail`` ends with a sentence; ``kill`` dies at step 2 of its first start; ``hang`` stays;
``deaf`` stays and does not hear SIGTERM; ``leave`` leaves a process behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from compare_fakes import drawn_wins, write_validation

RATES = {"grpo": 0.2, "rloo": 0.8}


def main() -> None:
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    method = words.get("algorithm") or words["algorithm.adv_estimator"]
    steps, seed = int(words["trainer.total_training_steps"]), int(words["seed"])
    folder = Path(words["trainer.output_dir"].strip("'"))
    plan = json.loads(Path(os.environ["COMPARE_PLAN"]).read_text()).get(method, "ok")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starts.txt").open("a") as file:
        file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\n")
    first = len((folder / "starts.txt").read_text().splitlines()) == 1
    log = folder / "metrics.jsonl"
    done = len(log.read_text().splitlines()) if log.exists() else 0
    if plan == "fail":
        print("train.py: the disk is made of cheese", file=sys.stderr)
        sys.exit(2)
    for step in range(done, steps + 1):
        if step == 2 and plan == "kill" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        record = {"step": step, "run_id": "x", "timing_s/step": 0.5, "state_tokens/sampled": 7.0}
        if step in (0, steps):
            rate = RATES.get(method, 0.5) if step else 0.1
            rng = np.random.default_rng([seed, step, len(method)])
            write_validation(folder, step, drawn_wins(rng, rate, 30, 4))
        with log.open("a") as file:
            file.write(json.dumps(record) + "\n")
    if plan == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if plan == "leave":
        own = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", str(folder)]
        subprocess.Popen(own)
    if plan in ("hang", "deaf"):
        (folder / "ready").write_text("")
        time.sleep(600)


if __name__ == "__main__":
    main()
