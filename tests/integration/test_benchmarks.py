"""The benchmarks at their smallest size: they run, and both ways of each part agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--threads", "1", "--repeats", "1", "--secrets", "2", "--games", "2", "--turns", "3"),
    *("--belief-turns", "5", "--belief-games", "2", "--judge-ms", "0,5"),
)


@pytest.mark.slow
def test_B5_A11_every_part_compares_equal_results_and_prints_one_json_document() -> None:
    script = [sys.executable, "benchmarks/bench_step.py", "--json", *SMALL]
    done = subprocess.run(
        [*script, "--parts", "belief,rollout,update"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    document = json.loads(done.stdout)
    titles = [part["title"] for part in document["parts"]]
    assert titles == ["belief", "rollout, judge of 0 ms", "rollout, judge of 5 ms", "update"]
    for part in document["parts"]:
        assert part["checks"], part["title"]
        assert all(check["ok"] for check in part["checks"]), part
        # Tokens through the model do not depend on the machine, unlike seconds.
        first, *others = part["rows"]
        assert all(row["tokens"] < first["tokens"] for row in others)
    assert {"cpu", "cores", "torch", "transformers"} <= document["hardware"].keys()


def test_an_unknown_part_is_refused_in_one_line() -> None:
    script = [sys.executable, "benchmarks/bench_step.py", "--parts", "beleif"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "choose from belief, rollout, update, step" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the whole benchmark")
def test_the_gpu_benchmark_says_in_one_line_that_there_is_no_gpu() -> None:
    script = [sys.executable, "benchmarks/bench_gpu.py"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["bench_gpu.py needs a CUDA device and finds none."]
