"""What the machine is: ``python -m validation.gpu.host`` prints it as JSON.

It also imports what the checks will import, so that those who start at once find it in memory.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from delta_belief_rl.config.facts import available_cores
from delta_belief_rl.config.gpus import ask_nvidia_smi, read_gpus

PACKAGES = (
    "torch", "transformers", "peft", "vllm", "ray", "liger-kernel", "flash-attn",
    "flashinfer-python", "compressed-tensors", "humming-kernels", "triton", "tokenizers", "numpy",
)  # fmt: skip
"""Packages whose versions numbers depend on."""
IMPORTED = ("torch", "transformers", "peft", "ray", "vllm")


def hardware() -> dict[str, Any]:
    """GPUs, driver, processor and memory; asked without loading torch."""
    gpus = read_gpus() or ()
    driver = (ask_nvidia_smi(["--query-gpu=driver_version", "--format=csv,noheader"]) or "").split()
    return {
        "gpus": [
            {"name": gpu.name, "total": gpu.total, "capability": list(gpu.capability)}
            for gpu in gpus
        ],
        "driver": driver[0] if driver else None,
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cores": available_cores(),
    }


def versions() -> dict[str, str | None]:
    """Installed versions; None where a package is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> int:
    """Print hardware, versions, and how long each import took."""
    # Standard output is for the JSON; libraries write there at their import.
    kept = os.dup(1)
    os.dup2(2, 1)
    imported: dict[str, str | None] = {}
    seconds: dict[str, float] = {}
    for name in IMPORTED:
        began = time.perf_counter()
        try:
            importlib.import_module(name)
            imported[name] = None
        except (ImportError, OSError, RuntimeError) as error:
            imported[name] = f"{type(error).__name__}: {error}"
        seconds[name] = round(time.perf_counter() - began, 1)
    torch: Any = sys.modules.get("torch")
    gpus = torch.cuda.device_count() if torch is not None else 0
    sys.stdout.flush()
    os.dup2(kept, 1)
    body = {
        "torch_gpus": gpus,
        "imported": imported,
        "import_seconds": seconds,
        "hardware": hardware(),
        "versions": versions(),
    }
    print(json.dumps(body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
