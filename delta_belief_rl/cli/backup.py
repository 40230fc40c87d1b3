"""``delta-belief backup``: checkpoints copied to the Hugging Face hub, compared, and brought back.

In the repository a checkpoint is ``<run_id>/global_step_<N>/`` with the files of its manifest and
the manifest, so what is uploaded is what a run resumes from. ``<run_id>/run.json`` names the step
uploaded last, and the few records that a resumed run reads lie beside it. What the hub lists is the
only record of what was uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from delta_belief_rl.cli.hub import Hub, HubAway, RemoteFile
from delta_belief_rl.cli.upload_lock import upload_lock
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.obs.exits import ExitStatus, exit_on_sigterm
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.checkpoint import (
    MANIFEST,
    STEP_FOLDER,
    TRACKER,
    Checkpoint,
    CheckpointDamaged,
    Kind,
    lease,
    list_valid,
    load,
    write_atomic,
)
from delta_belief_rl.trainer.resume import RUN_ID_FILE, read_run_id
from delta_belief_rl.types import UserError

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
RECORDS = ("metrics.jsonl", "test/start-*.jsonl")
"""What a resumed run reads besides its checkpoint, in the run's folder."""

Fetch = Callable[[str], Path]
"""Downloads a file of the repository."""


@dataclass(frozen=True, slots=True)
class Row:
    """One file of ``verify``.

    Attributes:
        state: ``same``, ``missing`` on the hub, or ``different``.
    """

    step: int
    file: str
    size: int
    state: str


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


# --- upload -------------------------------------------------------------------------------------


def upload(run_dir: Path, hub: Hub, private: bool = True) -> tuple[list[int], list[str]]:
    """Copy every complete checkpoint that lasts and that the hub does not have, one commit each.

    Args:
        run_dir: A run's folder, or its folder of checkpoints.
        private: Of a repository that is made now.

    Returns:
        Steps uploaded now, and sentences about checkpoints that could not be.

    Raises:
        UserError: The hub refuses.
        HubAway: It cannot be reached.
    """
    root = checkpoint_root(run_dir)
    run_id = read_run_id(root)
    if run_id is None or not (waiting := lasting(root)):
        return [], []
    there = hub.files(run_id)
    if not there:
        hub.create(private)
    done: list[int] = []
    problems: list[str] = []
    for saved in waiting:
        if saved.run_id != run_id:
            problems.append(f"{saved.path} was written by run {saved.run_id}, so it stays here.")
            continue
        try:
            if _upload_one(saved, run_dir, hub, there):
                done.append(saved.step)
                say(f"uploaded step {saved.step} to {hub.repo_id}/{run_id}")
        except CheckpointDamaged as error:
            # One that was pruned or replaced meanwhile is no problem.
            if saved.path.is_dir():
                problems.append(str(error))
    return done, problems


def lasting(root: Path) -> list[Checkpoint]:
    """The valid checkpoints but those that only stand until the next ones are written."""
    return [
        saved
        for saved in list_valid(root)
        if saved.kind is Kind.MILESTONE or saved.meta.get("best", {}).get("step") == saved.step
    ]


def _upload_one(
    saved: Checkpoint, run_dir: Path, hub: Hub, there: Mapping[str, RemoteFile]
) -> bool:
    """Whether the checkpoint was uploaded now."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lease(saved.path))
            if _is_there(saved, there):
                return False
        except OSError as error:
            raise saved.damaged(f"it cannot be read or leased ({error.strerror})") from error
        saved = load(saved.path)  # what is damaged here must not be the copy
        run, folder = saved.run_id, remote_folder(saved.run_id, saved.step)
        content: dict[str, Path | bytes] = {
            f"{folder}/{name}": saved.path / name for name in (*saved.files, MANIFEST)
        }
        for file in (found for pattern in RECORDS for found in run_dir.glob(pattern)):
            # Read at once: the run goes on writing.
            content[f"{run}/{file.relative_to(run_dir).as_posix()}"] = file.read_bytes()
        told = {"format": 1, "run_id": run, "step": saved.step}
        content[f"{run}/{RUN_FILE}"] = json.dumps(told).encode() + b"\n"
        return hub.commit(
            f"Checkpoint of step {saved.step} of run {run}",
            content,
            lambda: _is_there(saved, hub.files(run)),
        )


def _is_there(saved: Checkpoint, there: Mapping[str, RemoteFile]) -> bool:
    folder = remote_folder(saved.run_id, saved.step)
    return all(
        (found := there.get(f"{folder}/{name}")) is not None
        and found.holds(saved.path / name, saved.files.get(name))
        for name in (*saved.files, MANIFEST)
    )


def remote_folder(run_id: str, step: int) -> str:
    """Where a checkpoint lies in a repository."""
    return f"{run_id}/global_step_{step}"


def _watch(run_dir: Path, hub: Hub, private: bool, seconds: float) -> tuple[list[int], list[str]]:
    """Upload again and again until the run is done; a hub that is away is only told."""
    every: list[int] = []
    told: set[str] = set()
    while True:
        ended = _has_ended(run_dir)
        try:
            done, problems = upload(run_dir, hub, private)
            every += done
            # What was saved before the end was seen has been uploaded now.
            if ended:
                return every, problems
        except HubAway as error:
            problems = [str(error)]
        for problem in problems:
            if problem not in told:
                say(problem)
        told = set(problems)
        time.sleep(seconds)


def _has_ended(run_dir: Path) -> bool:
    """Whether the run is done; one that failed may be started again."""
    records = read_records(run_dir / "events.jsonl")
    last = records[-1] if records else {}
    return last.get("kind") == "end" and last.get("status") == ExitStatus.DONE


def checkpoint_root(run_dir: Path) -> Path:
    """A run's folder of checkpoints; it may be given itself, too."""
    return run_dir if (run_dir / RUN_ID_FILE).is_file() else run_dir / CHECKPOINTS


# --- verify -------------------------------------------------------------------------------------


def verify(root: Path, hub: Hub) -> list[Row]:
    """Compare what the hub has of a run with the manifests, those here and those there.

    A step that is here no more is compared with its manifest on the hub.

    Raises:
        UserError: The folder holds no run, or the hub refuses.
        HubAway: It cannot be reached.
    """
    run_id = read_run_id(root)
    if run_id is None:
        raise UserError(f"{root} holds no run: name a run's folder.")
    there = hub.files(run_id)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        revision = hub.revision() if there else ""

        def fetch(path: str) -> Path:
            return hub.download(path, Path(scratch), revision)

        here = {saved.step: saved for saved in lasting(root) if saved.run_id == run_id}
        for step in sorted(here.keys() | _steps(run_id, there)):
            folder = remote_folder(run_id, step)
            saved = here.get(step)
            sizes, sums = _listed(saved, folder, there, fetch)
            for name, size in sizes.items():
                found = there.get(f"{folder}/{name}")
                state = "missing" if found is None else "different"
                if found is not None and found.size == size:
                    given = found.sha256 or _sha256(fetch(f"{folder}/{name}"))
                    state = "same" if given == sums[name] else "different"
                rows.append(Row(step, name, size, state))
    return rows


def _listed(
    saved: Checkpoint | None, folder: str, there: Mapping[str, RemoteFile], fetch: Fetch
) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes and checksums that a step's files must have, the manifest's own among them."""
    if saved is not None:
        manifest = saved.path / MANIFEST
        sizes, sums = dict(saved.sizes), dict(saved.files)
        size, checksum = manifest.stat().st_size, _sha256(manifest)
        return sizes | {MANIFEST: size}, sums | {MANIFEST: checksum}
    if f"{folder}/{MANIFEST}" not in there:
        return {MANIFEST: 0}, {MANIFEST: ""}
    manifest = fetch(f"{folder}/{MANIFEST}")
    try:
        body = json.loads(manifest.read_bytes())
        return dict(body["sizes"]), dict(body["files"])
    except (ValueError, KeyError, TypeError):
        return {MANIFEST: 0}, {MANIFEST: ""}


def _steps(run_id: str, there: Mapping[str, RemoteFile]) -> set[int]:
    parts = (path.removeprefix(f"{run_id}/").split("/")[0] for path in there)
    return {int(match[1]) for part in parts if (match := STEP_FOLDER.match(part))}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- restore ------------------------------------------------------------------------------------


def restore(hub: Hub, out: Path, step: int | None = None, run_id: str | None = None) -> Path:
    """Bring one checkpoint back, so that a run with ``trainer.output_dir=out`` resumes from it.

    Args:
        out: The run's folder; made where it is not there.
        step: Which checkpoint; None takes the one uploaded last.
        run_id: Which run of the repository; None where it has one.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: There is no such checkpoint, ``out`` belongs to another run or has it already,
            what came is damaged, or the hub refuses.
        HubAway: The hub cannot be reached.
    """
    revision = hub.revision()
    there = hub.files(revision=revision)
    if odd := [path for path in there if ".." in path.split("/")]:
        raise UserError(f"{hub.repo_id} names a file {odd[0]!r}: it is not to be trusted.")
    run_id = _choose_run(hub, there, run_id)
    root = out / CHECKPOINTS
    # Under this name, what a kill leaves is cleared by the next save and by the next restore.
    beside = root / f".tmp-{step or 0}-0"
    owner = read_run_id(root)
    if owner not in (None, run_id):
        raise UserError(f"{root} holds run {owner}, not {run_id}: name another folder.")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        if step is None:
            step = _latest(hub.download(f"{run_id}/{RUN_FILE}", beside, revision))
        final = root / f"global_step_{step}"
        if final.exists():
            raise UserError(f"{final} exists already: name another folder, or move it away.")
        folder = remote_folder(run_id, step)
        names = [path for path in there if path.startswith(f"{folder}/")]
        if not names:
            steps = ", ".join(map(str, sorted(_steps(run_id, there))))
            raise UserError(f"{hub.repo_id} has no step {step} of run {run_id}, only {steps}.")
        for name in names:
            hub.download(name, beside, revision)
            say(f"fetched {name}")
        saved = load(beside / folder)
        if (saved.step, saved.run_id) != (step, run_id):
            raise saved.damaged(f"it is step {saved.step} of run {saved.run_id}")
        for name in (path.removeprefix(f"{run_id}/") for path in there):
            if any(fnmatchcase(name, pattern) for pattern in RECORDS):
                _bring_record(hub, f"{run_id}/{name}", beside, revision, out / name)
        os.rename(saved.path, final)
        write_atomic(root / RUN_ID_FILE, run_id.encode())
        write_atomic(root / TRACKER, str(list_valid(root)[-1].step).encode())
    except CheckpointDamaged as error:
        raise UserError(
            f"Step {step} of run {run_id} on {hub.repo_id} is damaged, so nothing was restored: "
            "choose another --step."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return final


def _latest(file: Path) -> int:
    """The step that a run's ``run.json`` names."""
    try:
        return int(json.loads(file.read_bytes())["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{RUN_FILE} of the run is damaged: name the step with --step.") from error


def _bring_record(hub: Hub, path: str, beside: Path, revision: str, target: Path) -> None:
    """Put one record into the run's folder; one that is there is the run's own and stays."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(hub.download(path, beside, revision), target)


def _choose_run(hub: Hub, there: Mapping[str, RemoteFile], run_id: str | None) -> str:
    runs = sorted(path.split("/")[0] for path in there if path.endswith(f"/{RUN_FILE}"))
    if run_id in runs:
        return run_id
    if run_id is None and len(runs) == 1:
        return runs[0]
    raise UserError(
        f"{hub.repo_id} holds the runs {', '.join(runs)}: name one with --run."
        if runs
        else f"{hub.repo_id} holds no checkpoints: name a repository that a run was copied to."
    )


# --- the verb -----------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("upload", "verify", "restore"))
    parser.add_argument(
        "places",
        nargs=2,
        metavar="PLACE",
        help="upload and verify: RUN_DIR REPO_ID; restore: REPO_ID OUT",
    )
    parser.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="upload: look again after so many seconds, until the run is done",
    )
    parser.add_argument("--public", action="store_true", help="upload: make a public repository")
    parser.add_argument("--step", type=int, help="restore: which one; default: uploaded last")
    parser.add_argument("--run", metavar="RUN_ID", help="restore: which run of several")


def _run(args: argparse.Namespace) -> Result:
    first, second = args.places
    try:
        if args.action == "restore":
            found = restore(Hub(first, say), Path(second), args.step, args.run)
            return Result({"checkpoint": str(found)}, str(found))
        run_dir = Path(first)
        if not run_dir.is_dir():
            raise UserError(f"There is no folder {run_dir}: name a run's folder.")
        if args.action == "verify":
            return _table(verify(checkpoint_root(run_dir), Hub(second, say)))
        return _upload(run_dir, Hub(second, say), args)
    except HubAway as error:
        return Result({"error": str(error)}, str(error), status=1)
    except OSError as error:
        name = error.filename or "a file"
        raise UserError(f"{name} cannot be read or written ({error.strerror or error}).") from error


def _upload(run_dir: Path, hub: Hub, args: argparse.Namespace) -> Result:
    exit_on_sigterm()  # so that no lease is left behind
    if args.watch is not None and not args.watch > 0:
        raise UserError(f"--watch {args.watch:g} is no time to wait: give seconds above 0.")
    with upload_lock(run_dir, checkpoint_root(run_dir)):
        if args.watch is None:
            done, problems = upload(run_dir, hub, not args.public)
        else:
            done, problems = _watch(run_dir, hub, not args.public, args.watch)
    steps = ", ".join(map(str, done)) or "none that was not there"
    lines = [f"uploaded to {hub.repo_id}: {steps}", *problems]
    value = {"repository": hub.repo_id, "uploaded": done, "problems": problems}
    return Result(value, "\n".join(lines), status=int(bool(problems)))


def _table(rows: list[Row]) -> Result:
    width = max((len(row.file) for row in rows), default=4)
    lines = [f"{'step':>6}  {'file':<{width}}  {'bytes':>12}  state"]
    lines += [f"{r.step:>6}  {r.file:<{width}}  {r.size:>12,}  {r.state}" for r in rows]
    wrong = sum(row.state != "same" for row in rows)
    lines.append(f"{len(rows)} files, {wrong} missing or different")
    return Result([asdict(row) for row in rows], "\n".join(lines), status=int(wrong > 0))


VERB = Verb(
    name="backup",
    help="Copy a run's checkpoints to the Hugging Face hub, compare them, bring them back.",
    example="delta-belief backup upload outputs/quickstart/delta_belief me/runs --watch 600",
    add_arguments=_add_arguments,
    run=_run,
)
