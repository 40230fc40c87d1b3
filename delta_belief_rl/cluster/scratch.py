"""The private folder of a run's Ray: made here, and cleared away for runs that could not do it.

A run's folder goes with the run; its reaper sees to that where the driver is killed. Where both are
killed together nobody is left, so every start removes folders whose owner is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from delta_belief_rl.cluster.ray_env import is_short
from delta_belief_rl.cluster.reaper import is_marked, look_up, processes
from delta_belief_rl.types import UserError

PREFIX = "dbrl-"
OWNER = "owner.json"
"""File in a private folder that says whose it is."""


def make_scratch(wanted: str | None) -> tuple[Path, bool]:
    """The scratch folder, and whether it is ours to remove.

    Raises:
        UserError: It is too long for the paths of Ray's sockets.
    """
    if wanted:
        folder = Path(wanted).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        private = False
    else:
        clear_abandoned(Path(tempfile.gettempdir()))
        folder, private = Path(tempfile.mkdtemp(prefix=PREFIX)), True
    if not is_short(str(folder)):
        if private:
            folder.rmdir()
        raise UserError(
            f"Ray's scratch folder {str(folder)!r} is too long for a socket path: set "
            "ray_init.temp_dir to a short one such as /tmp/ray-me."
        )
    return folder, private


def note_owner(folder: Path, mark: str) -> None:
    """Say in a private folder that this process owns it, and what marks those of its run."""
    process = look_up(os.getpid())
    owner = {"pid": os.getpid(), "born": process and process.born, "mark": mark, **_here()}
    beside = folder / f".{OWNER}"
    beside.write_text(json.dumps(owner), encoding="utf-8")
    beside.replace(folder / OWNER)


def clear_abandoned(parent: Path) -> list[Path]:
    """Remove the private folders of runs of which nothing is alive; returns them.

    Those of other users, other machines and other process namespaces are left alone, and so are
    those that do not say whose they are.
    """
    gone: list[Path] = []
    for folder in sorted(parent.glob(f"{PREFIX}*")):
        owner = _owner(folder)
        if owner is None or _is_alive(owner):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        gone.append(folder)
    return gone


def _owner(folder: Path) -> dict[str, Any] | None:
    """Whose a folder is; None where that cannot be told from here."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return None
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(owner, dict) or any(owner.get(key) != is_ for key, is_ in _here().items()):
        return None
    return owner if isinstance(owner.get("pid"), int) and owner.get("mark") else None


def _is_alive(owner: dict[str, Any]) -> bool:
    """Whether the driver or anything that carries its run's mark is there."""
    process = look_up(owner["pid"])
    if process is not None and process.born == owner["born"]:
        return True
    return any(is_marked(pid, owner["mark"]) for pid in processes())


def _here() -> dict[str, str]:
    """What tells this machine, since it was started, and this process namespace from others."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "namespace": os.readlink("/proc/self/ns/pid"),
    }
