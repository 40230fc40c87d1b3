"""Checkpoints that survive a kill at any instant.

A checkpoint is a folder ``global_step_<N>`` of plain files and a ``manifest.json`` that lists each
file with its size and SHA-256. It is written under a hidden name, every file is flushed to disk,
the manifest comes last, and one rename makes it visible; only then are older ones removed. A folder
without a valid manifest does not exist for a reader, so a half-written one can never be resumed
from.

One process writes a root folder at a time (rank 0 of a run); any number may read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, cast

from delta_belief_rl.obs.disk import DiskRefused
from delta_belief_rl.types import UserError

Content = bytes | Callable[[Path], None]
"""The bytes of a file, or a function that writes the file at the path it is given."""

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = 1
LEASE_SECONDS = 6 * 3600
"""A lease not renewed for this long belongs to a reader that died."""
RECOVERY_KEPT = 2
"""The newest may be damaged; then there is one before it."""

STEP_FOLDER = re.compile(r"global_step_(\d+)$")
"""Name of a finished checkpoint's folder."""
_REPLACED = re.compile(r"\.replaced-(\d+)-\d+$")
_LEFTOVER = re.compile(r"\.(?:tmp|pruned|replaced)-\d+-\d+$")


class Kind(StrEnum):
    """What a checkpoint is kept for."""

    MILESTONE = "milestone"
    """As one of the run's, by ``keep``."""
    RECOVERY = "recovery"
    """To go on from after a fault, until two newer ones are there."""


class CheckpointDamaged(UserError):
    """A checkpoint's files do not match its manifest.

    Attributes:
        what: What is wrong with it, in a few words.
    """

    def __init__(self, sentence: str, what: str) -> None:
        super().__init__(sentence)
        self.what = what


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest is valid.

    Attributes:
        serial: Counts the saves of a root folder; the highest is the latest, even after a run went
            back to an earlier step.
        meta: What the writer put beside the files, JSON values only.
        files: SHA-256 by file name.
        sizes: Bytes by file name.
    """

    path: Path
    step: int
    serial: int
    run_id: str
    meta: Mapping[str, Any]
    files: Mapping[str, str]
    sizes: Mapping[str, int]
    kind: Kind = Kind.MILESTONE

    def read(self, name: str) -> bytes:
        """The bytes of one file, checked against the manifest.

        Raises:
            CheckpointDamaged: the file is missing, unknown to the manifest or different from it.
        """
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise self.damaged(f"{name} cannot be read ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != self.files.get(name):
            raise self.damaged(f"{name} does not match its checksum")
        return data

    def damaged(self, what: str) -> CheckpointDamaged:
        """The error for a fault found in this checkpoint, with its cure."""
        return CheckpointDamaged(
            f"Checkpoint {self.path} is damaged, {what}; move that folder away to resume from the "
            "one before.",
            what,
        )


# ------------------------------------------------------------------------------------------ writing


def save(
    root: Path,
    step: int,
    files: Mapping[str, Content],
    meta: Mapping[str, Any],
    *,
    run_id: str,
    keep: int | None = None,
    kind: Kind = Kind.MILESTONE,
    best: int | None = None,
) -> Path:
    """Write one checkpoint and remove those that are no longer kept; see :func:`prune`.

    A kill at any point leaves the checkpoints that were valid before, or this one. A checkpoint of
    the same step that is already there is replaced.

    Args:
        files: Content by file name; names may hold ``/`` for subfolders.
        meta: JSON values, returned by :func:`load`.
        keep: How many milestones to keep, the new one included; None keeps all.
        kind: What this one is kept for.
        best: Step of the checkpoint that is kept in any case.

    Raises:
        UserError: ``keep`` is below 1.
        DiskRefused: The disk refuses the write.
    """
    if keep is not None and keep < 1:
        raise UserError(
            f"trainer.max_actor_ckpt_to_keep={keep} would keep nothing; use null or at least 1."
        )
    temporary = root / f".tmp-{step}-{os.getpid()}"
    final = root / f"global_step_{step}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        serial = 1 + max((c.serial for c in list_valid(root)), default=0)
        _write_folder(temporary, step, serial, files, meta, run_id, kind)
        _publish(temporary, final)
        write_atomic(root / TRACKER, str(step).encode())
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise DiskRefused.of(
            error, f"The checkpoint of step {step}", root, "trainer.default_local_dir"
        ) from error
    prune(root, keep, best)
    return final


def _write_folder(
    folder: Path,
    step: int,
    serial: int,
    files: Mapping[str, Content],
    meta: Mapping[str, Any],
    run_id: str,
    kind: Kind,
) -> None:
    folder.mkdir()
    digests: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, content in files.items():
        target = folder / name
        if name == MANIFEST or not target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name!r} cannot be the name of a checkpoint file")
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            _write_synced(target, content)
        else:
            content(target)
            _sync(target)
        digests[name], sizes[name] = _digest(target), target.stat().st_size
    for directory in sorted({(folder / name).parent for name in files} - {folder}):
        _sync(directory)
    body = {
        "format": FORMAT,
        "step": step,
        "serial": serial,
        "run_id": run_id,
        "kind": kind,
        "files": digests,
        "sizes": sizes,
        "meta": dict(meta),
    }
    body["digest"] = _body_digest(body)
    _write_synced(folder / MANIFEST, json.dumps(body, indent=1, sort_keys=True).encode())
    _sync(folder)


def _publish(temporary: Path, final: Path) -> None:
    """Rename into place; an older valid folder of the same step stays readable until then."""
    root = final.parent
    if final.exists():
        if read_manifest(final) is None:
            shutil.rmtree(final)
        else:
            step = final.name.rsplit("_", 1)[1]
            os.rename(final, root / f".replaced-{step}-{os.getpid()}")
    os.rename(temporary, final)
    _sync(root)
    _remove_leftovers(root)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a small file so that a reader sees the old or the new content, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_synced(beside, data)
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            os.unlink(beside)
        raise
    _sync(path.parent)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Flush a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------ pruning


def prune(root: Path, keep: int | None, best: int | None = None) -> list[Path]:
    """Remove checkpoints that are no longer kept; returns what was removed.

    Kept are the ``keep`` latest milestones (None: all), the checkpoint of step ``best``, and the
    two latest of any kind but for milestones that are too many.

    Never raises: a folder that cannot be removed, or that a reader holds a lease on, stays for the
    next time.
    """
    removed: list[Path] = []
    with suppress(OSError):
        valid = list_valid(root)
        milestones = [c for c in valid if c.kind is Kind.MILESTONE]
        kept = milestones if keep is None else milestones[-keep:]
        kept = [*kept, *(c for c in valid[-RECOVERY_KEPT:] if c.kind is Kind.RECOVERY)]
        for checkpoint in valid:
            if checkpoint in kept or checkpoint.step == best:
                continue
            hidden = root / f".pruned-{checkpoint.step}-{os.getpid()}"
            with suppress(OSError):
                if _is_leased(checkpoint.path):
                    continue
                # The rename makes the removal atomic for readers; the slow part follows.
                os.rename(checkpoint.path, hidden)
                removed.append(checkpoint.path)
                shutil.rmtree(hidden, ignore_errors=True)
    return removed


@contextmanager
def lease(checkpoint: Path) -> Iterator[None]:
    """Protect a checkpoint from pruning while it is read, e.g. by an upload.

    A shell script does the same by touching ``<checkpoint>/.lease-<pid>`` and removing it
    afterwards.
    """
    marker = checkpoint / f".lease-{os.getpid()}"
    marker.touch()
    try:
        yield
    finally:
        marker.unlink(missing_ok=True)


def _is_leased(checkpoint: Path) -> bool:
    horizon = time.time() - LEASE_SECONDS
    return any(marker.stat().st_mtime > horizon for marker in checkpoint.glob(".lease-*"))


def _remove_leftovers(root: Path) -> None:
    """Clear what earlier kills left behind, but never the only copy of a step."""
    for entry in root.iterdir():
        if not _LEFTOVER.match(entry.name):
            continue
        replaced = _REPLACED.match(entry.name)
        if replaced and read_manifest(root / f"global_step_{replaced[1]}") is None:
            continue
        shutil.rmtree(entry, ignore_errors=True)


# ------------------------------------------------------------------------------------------ reading


def list_valid(root: Path) -> list[Checkpoint]:
    """All checkpoints with a valid manifest, in the order they were saved."""
    if not root.is_dir():
        return []
    visible: dict[int, Checkpoint] = {}
    hidden: dict[int, Checkpoint] = {}
    for entry in root.iterdir():
        for pattern, found in ((STEP_FOLDER, visible), (_REPLACED, hidden)):
            match = pattern.match(entry.name)
            checkpoint = read_manifest(entry) if match else None
            if match and checkpoint is not None and checkpoint.step == int(match[1]):
                found[checkpoint.step] = checkpoint
    # A kill between the two renames of a replacement leaves the old folder under its hidden name.
    return sorted((hidden | visible).values(), key=lambda c: (c.serial, c.step))


def find_latest(root: Path) -> Checkpoint | None:
    """The checkpoint that was saved last, or None; those without a valid manifest do not count."""
    valid = list_valid(root)
    return valid[-1] if valid else None


def read_manifest(folder: Path) -> Checkpoint | None:
    """What a folder's manifest says; None when it, or a file that it lists, is missing or damaged.

    Sizes are compared, contents are not; :func:`load` does that.
    """
    try:
        raw: object = json.loads((folder / MANIFEST).read_bytes())
        if not isinstance(raw, dict):
            return None
        body = cast(dict[str, Any], raw)
        if body.pop("digest", None) != _body_digest(body) or body["format"] != FORMAT:
            return None
        sizes = cast(dict[str, int], body["sizes"])
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return None
        return Checkpoint(
            folder,
            body["step"],
            body["serial"],
            body["run_id"],
            body["meta"],
            body["files"],
            sizes,
            Kind(body.get("kind", Kind.MILESTONE)),
        )
    except (OSError, ValueError, KeyError):
        return None


def load(folder: Path) -> Checkpoint:
    """Open a checkpoint and compare every file with its checksum.

    Raises:
        CheckpointDamaged: no valid manifest, or a file differs from it.
    """
    checkpoint = read_manifest(folder)
    if checkpoint is None:
        what = f"its {MANIFEST} is missing or does not fit the files"
        raise CheckpointDamaged(
            f"{folder} is no complete checkpoint, {what}; choose another folder or set "
            "trainer.resume_mode=auto.",
            what,
        )
    for name, expected in checkpoint.files.items():
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise checkpoint.damaged(f"{name} cannot be read ({error.strerror})") from error
        if found != expected:
            raise checkpoint.damaged(f"{name} does not match its checksum")
    return checkpoint


def list_broken(root: Path) -> list[Path]:
    """Folders of steps whose manifest is there but does not fit; no kill leaves such a one."""
    return [
        entry
        for entry in sorted(root.glob("global_step_*"))
        if STEP_FOLDER.match(entry.name)
        and (entry / MANIFEST).exists()
        and read_manifest(entry) is None
    ]


def set_aside(folder: Path) -> Path:
    """Hide a damaged checkpoint under a name that nothing reads or removes; returns its place.

    Raises:
        DiskRefused: It cannot be renamed.
    """
    step = folder.name.rpartition("_")[2]
    names = (folder.with_name(f".damaged-{step}-{number}") for number in count())
    hidden = next(name for name in names if not name.exists())
    try:
        os.rename(folder, hidden)
        _sync(folder.parent)
    except OSError as error:
        raise DiskRefused.of(
            error, "The new name of a damaged checkpoint", folder, "trainer.default_local_dir"
        ) from error
    return hidden


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _body_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
