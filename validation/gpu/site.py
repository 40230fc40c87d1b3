"""Where the checks of a machine work: the folder, the models, and how long each part may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Site:
    """One machine and what is to be made on it.

    Attributes:
        out: Folder of everything that the checks write, an absolute path.
        gpus: GPUs that may be used.
        cores: CPU cores.
        model: SmolLM2-135M-Instruct as a Hugging Face folder.
        given_warm: A warm start that is there already; else it is made.
        given_judge: A taught judge that is there already; else it is made.
        warm_minutes: Training of the warm start.
        teach_minutes: Training of the judge.
        steps: Training steps of the runs that shall raise the win rate.
        final_test: Whether these play the test secrets before and after.
        decode_graphs: Whether engines have CUDA graphs of their decode steps, without compilation.
        python: The interpreter of every command.
    """

    out: Path
    gpus: int
    cores: int
    model: str
    given_warm: Path | None = None
    given_judge: Path | None = None
    warm_minutes: float = 6.5
    teach_minutes: float = 2.0
    steps: int = 30
    final_test: bool = True
    decode_graphs: bool = False
    python: str = sys.executable

    @property
    def warm(self) -> Path:
        """The warm start that is trained."""
        return self.given_warm or self.made("smollm2-warm")

    @property
    def judge(self) -> Path:
        """The taught judge."""
        return self.given_judge or self.made("taught-judge")

    def made(self, name: str) -> Path:
        """A model that a check makes."""
        return self.out / "models" / name

    def run(self, check: str) -> Path:
        """Folder of a check's training run."""
        return self.out / "runs" / check

    def folder(self, check: str) -> Path:
        """Folder of what a check's commands print."""
        return self.out / "checks" / check

    def record(self, check: str) -> Path:
        """File of a check's record."""
        return self.out / "records" / f"{check}.json"
