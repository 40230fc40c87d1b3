"""Where a run begins: at step 0, or at a checkpoint that is its own.

A checkpoint folder belongs to one run, whose name is in its file ``run_id``. A run never writes
over another one's checkpoints and never goes on from them by accident.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from delta_belief_rl.obs.disk import writing
from delta_belief_rl.trainer.checkpoint import (
    STEP_FOLDER,
    Checkpoint,
    CheckpointDamaged,
    list_broken,
    list_valid,
    load,
    set_aside,
    write_atomic,
)
from delta_belief_rl.types import UserError

RUN_ID_FILE = "run_id"


class ResumeMode(StrEnum):
    """What to do with checkpoints that are already there (``trainer.resume_mode``)."""

    DISABLE = "disable"
    AUTO = "auto"
    MUST = "must"
    RESUME_PATH = "resume_path"


@dataclass(frozen=True, slots=True)
class RunStart:
    """Where a run begins: at a checkpoint, or at step 0 when ``checkpoint`` is None.

    Attributes:
        damaged: One sentence for each damaged checkpoint that was passed over.
    """

    run_id: str
    checkpoint: Checkpoint | None
    damaged: tuple[str, ...] = ()


def new_run_id() -> str:
    """A name for a run that no other run has, e.g. ``20260801-093000-1f2e3d4c``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid4().hex[:8]}"


def open_run(
    root: Path, mode: str, resume_from_path: Path | None = None, run_id: str = ""
) -> RunStart:
    """Decide where a run starts, and mark ``root`` as its folder.

    Args:
        mode: ``disable`` starts at step 0 and refuses a folder of another run; ``auto`` resumes the
            latest intact checkpoint and starts at step 0 only when there is none at all; ``must``
            resumes or fails; ``resume_path`` resumes ``resume_from_path``.
        run_id: The name of a fresh run; made up when empty. A resumed run keeps the name it has.

    Raises:
        UserError: the mode is unknown, or what it asks for cannot be had.
        CheckpointDamaged: the checkpoint that is named is not intact, or there are some and none
            is intact.
    """
    try:
        chosen = ResumeMode(mode)
    except ValueError:
        choices = ", ".join(ResumeMode)
        raise UserError(f"trainer.resume_mode={mode} is unknown; use one of {choices}.") from None
    owner = read_run_id(root)
    checkpoint: Checkpoint | None = None
    damaged: list[tuple[Path, str]] = []
    if chosen is ResumeMode.RESUME_PATH:
        checkpoint = _resume_path(resume_from_path)
        if checkpoint.path.resolve().parent == root.resolve():
            run_id = owner or checkpoint.run_id
    elif chosen is not ResumeMode.DISABLE:
        checkpoint, damaged = _newest_intact(root)
        if checkpoint is None and chosen is ResumeMode.MUST:
            raise UserError(
                f"{root} has no valid checkpoint to resume from; set trainer.resume_mode=auto to "
                "start fresh."
            )
        run_id = owner or (checkpoint.run_id if checkpoint else run_id)
        if checkpoint and checkpoint.run_id != run_id:
            raise UserError(
                f"{checkpoint.path} was written by run {checkpoint.run_id}, but {root} belongs to "
                f"run {run_id}; move the foreign folder away."
            )
    run_id = run_id or new_run_id()
    if owner not in (None, run_id) or (
        chosen is ResumeMode.DISABLE and owner is None and list_valid(root)
    ):
        raise UserError(
            f"{root} already holds run {owner or 'without a name'}; set trainer.resume_mode=auto "
            "to continue it or another trainer.experiment_name to keep both."
        )
    with writing("The run's name", root, "trainer.default_local_dir"):
        root.mkdir(parents=True, exist_ok=True)
        write_atomic(root / RUN_ID_FILE, run_id.encode())
    return RunStart(run_id, checkpoint, tuple(_pass_over(folder, what) for folder, what in damaged))


def read_run_id(root: Path) -> str | None:
    """The run that a folder belongs to, or None."""
    with suppress(OSError):
        return (root / RUN_ID_FILE).read_text().strip() or None
    return None


def _newest_intact(root: Path) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The checkpoint saved last among the intact ones; damaged folders, and what is wrong.

    Raises:
        CheckpointDamaged: There are some, and none is intact. To begin anew would write over the
            records of finished steps, so somebody has to look.
    """
    damaged: list[tuple[Path, str]] = []
    for folder in [*list_broken(root), *(found.path for found in reversed(list_valid(root)))]:
        try:
            return load(folder), damaged
        except CheckpointDamaged as error:
            damaged.append((folder, error.what))
    if damaged:
        folder, what = damaged[0]
        raise CheckpointDamaged(
            f"No checkpoint in {root} is intact, in {folder.name} {what}; bring one back, or set "
            "another trainer.experiment_name to begin anew.",
            what,
        )
    return None, []


def _pass_over(folder: Path, what: str) -> str:
    """Put a damaged checkpoint out of the way, and say so."""
    hidden = set_aside(folder)
    sentence = (
        f"Checkpoint {folder} is damaged, {what}; the run goes on from an intact one, and the "
        f"folder is kept as {hidden.name}."
    )
    print(sentence, file=sys.stderr)
    return sentence


def _resume_path(path: Path | None) -> Checkpoint:
    if path is None or not STEP_FOLDER.match(path.name):
        raise UserError(
            f"trainer.resume_from_path={path} must name a global_step_<N> folder when "
            "trainer.resume_mode=resume_path."
        )
    return load(path)
