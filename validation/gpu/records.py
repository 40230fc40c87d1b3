"""Records of checks as JSON files, and their summary."""

from __future__ import annotations

import json
import os
import shlex
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from delta_belief_rl.types import UserError
from validation.gpu.checks import Check
from validation.gpu.findings import NOTHING, Findings
from validation.gpu.jobs import Job
from validation.gpu.site import Site

Status = Literal["passed", "failed", "out of time", "left out"]
Record = dict[str, Any]

SUMMARY, ARCHIVE = "summary.json", "evidence.tar.gz"
_LONGEST_REASON = 300
"""Characters."""


def over(
    site: Site, check: Check, job: Job, gpus: Sequence[int], machine: Mapping[str, Any]
) -> Record:
    """The record of a check whose commands have ended; what they left is read."""
    findings, unread = read(site, check)
    reason = unread
    if not job.succeeded and not job.late:
        reason = last_words(job.folder, len(job.statuses) - 1) or unread
    status: Status = "passed" if job.succeeded and findings.hold and not unread else "failed"
    if job.late:
        status, reason = "out of time", f"ended at its deadline after {job.seconds:.0f} s"
    return {
        "check": check.name,
        "about": check.about,
        "status": status,
        "reason": reason,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(job.seconds, 1),
        "gpus": list(gpus),
        "commands": [shlex.join(command) for command in job.commands],
        "exit_statuses": job.statuses,
        "left_behind": job.leftover,
        **machine,
        **findings.as_dict(),
    }


def left_out(check: Check, reason: str) -> Record:
    """The record of a check that did not begin."""
    return {"check": check.name, "about": check.about, "status": "left out", "reason": reason}


def read(site: Site, check: Check) -> tuple[Findings, str]:
    """The findings of a check, or none and the reason."""
    try:
        return check.read(site), ""
    except (OSError, ValueError, LookupError, TypeError, SyntaxError, UserError) as error:
        # A command that failed leaves files that are missing, cut short or of another kind.
        return NOTHING, f"its results cannot be read ({type(error).__name__}: {error})"


def last_words(folder: Path, number: int) -> str:
    """The last line that a command wrote to standard error, else to standard output."""
    for stream in ("stderr", "stdout"):
        path = folder / f"{stream}-{number}.txt"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip()]
        if told:
            return told[-1][-_LONGEST_REASON:]
    return ""


def write(path: Path, body: object) -> None:
    """Write JSON so that the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(body, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(beside, path)


def load(path: Path) -> Record | None:
    """A record; None where there is none or where it is damaged."""
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def summary(found: Iterable[Record], machine: Mapping[str, Any], command: str) -> Record:
    """What ``summary.json`` holds: every check without its figures."""
    keys = ("check", "status", "reason", "seconds", "gpus", "date", "claims", "left_behind")
    checks = [{key: record[key] for key in keys if key in record} for record in found]
    return {"command": command, **machine, "checks": checks}


def pack(site: Site) -> Path:
    """Records, outputs and training runs in one file, models and checkpoints left out."""
    path = site.out / ARCHIVE
    beside = path.with_name(f".{path.name}.{os.getpid()}")

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inside = member.name.split("/")
        return None if "checkpoints" in inside or "rollout" in inside else member

    with tarfile.open(beside, "w:gz") as archive:
        for name in (SUMMARY, "records", "checks", "runs"):
            if (site.out / name).exists():
                archive.add(site.out / name, name, filter=kept)
    os.replace(beside, path)
    return path


def table(found: Iterable[Record]) -> str:
    """One line for each check, and one for each claim that does not hold."""
    lines = [f"{'check':<18}{'':<12}{'seconds':>8}  claims"]
    for record in found:
        claims = record.get("claims", [])
        held = sum(claim["holds"] for claim in claims)
        seconds = f"{record['seconds']:.0f}" if "seconds" in record else ""
        counted = f"{held} of {len(claims)} hold" if claims else ""
        told = "; ".join(filter(None, [counted, record["reason"]]))
        lines.append(f"{record['check']:<18}{record['status']:<12}{seconds:>8}  {told}".rstrip())
        broken = (claim for claim in claims if not claim["holds"])
        lines += [f"    NOT: {claim['text']}: {claim['found']}" for claim in broken]
    return "\n".join(lines)
