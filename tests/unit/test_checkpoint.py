"""Checkpoints: what is written is what is read, and what is damaged is not."""

import asyncio
import json
import os
import threading
import time
from pathlib import Path

import pytest

from delta_belief_rl.obs.disk import DiskRefused
from delta_belief_rl.trainer import checkpoint as ckpt
from delta_belief_rl.trainer.background import Background
from delta_belief_rl.trainer.checkpoint import (
    CheckpointDamaged,
    Kind,
    find_latest,
    lease,
    list_valid,
    load,
    prune,
    save,
)
from delta_belief_rl.trainer.resume import open_run, read_run_id
from delta_belief_rl.types import UserError


def put(
    root: Path, step: int, run_id: str = "run", keep: int | None = None, text: str = ""
) -> Path:
    files: dict[str, ckpt.Content] = {
        "adapter.safetensors": f"adapter {step} {text}".encode(),
        "state/rng.json": lambda path: path.write_text(str(step)) and None,
    }
    return save(root, step, files, {"cursor": step * 10}, run_id=run_id, keep=keep)


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_valid(root)]


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = put(tmp_path, 7)
    assert path == tmp_path / "global_step_7"
    loaded = load(path)
    assert (loaded.step, loaded.run_id, loaded.meta) == (7, "run", {"cursor": 70})
    assert loaded.read("adapter.safetensors") == b"adapter 7 "
    assert loaded.read("state/rng.json") == b"7"


def test_tracker_file_holds_the_last_step_as_the_reference_writes_it(tmp_path: Path) -> None:
    put(tmp_path, 3)
    put(tmp_path, 12)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        put(tmp_path, step, keep=2)
    assert steps(tmp_path) == [3, 4]
    assert not list(tmp_path.glob(".pruned*"))


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep nothing"):
        put(tmp_path, 1, keep=0)


def test_latest_is_the_one_saved_last_even_after_going_back(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step)
    put(tmp_path, 25)
    latest = find_latest(tmp_path)
    assert latest is not None
    assert latest.step == 25


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    put(tmp_path, 5, text="old")
    path = put(tmp_path, 5, text="new")
    assert load(path).read("adapter.safetensors") == b"adapter 5 new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "global_step_5",
        "latest_checkpointed_iteration.txt",
    ]


def test_numeric_order_not_text_order_decides(tmp_path: Path) -> None:
    put(tmp_path, 9)
    put(tmp_path, 10)
    latest = find_latest(tmp_path)
    assert latest is not None
    assert latest.step == 10


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "digit", "foreign", "list"])
def test_R6_folder_without_a_valid_manifest_does_not_exist(tmp_path: Path, damage: str) -> None:
    put(tmp_path, 1)
    manifest = put(tmp_path, 2) / "manifest.json"
    text = manifest.read_text()
    if damage == "missing":
        manifest.unlink()
    else:
        changed = {
            "empty": "",
            "cut": text[:-20],
            "digit": text.replace('"cursor": 20', '"cursor": 21'),
            "foreign": json.dumps({"step": 2}),
            "list": "[]",
        }
        manifest.write_text(changed[damage])
    assert steps(tmp_path) == [1]
    with pytest.raises(CheckpointDamaged, match="no complete checkpoint"):
        load(tmp_path / "global_step_2")


@pytest.mark.parametrize("how", ["missing", "shorter"])
def test_R6_folder_with_a_file_missing_or_cut_does_not_exist(tmp_path: Path, how: str) -> None:
    put(tmp_path, 1)
    file = put(tmp_path, 2) / "adapter.safetensors"
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert steps(tmp_path) == [1]


def test_R11_bit_flip_is_found_on_load_and_the_file_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, 2)
    file = path / "adapter.safetensors"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointDamaged, match=r"adapter\.safetensors does not match") as error:
        load(path)
    assert isinstance(error.value, UserError)


def test_R11_bit_flip_after_the_load_is_found_on_read(tmp_path: Path) -> None:
    loaded = load(put(tmp_path, 2))
    (loaded.path / "adapter.safetensors").write_bytes(b"adapter 3 ")
    with pytest.raises(CheckpointDamaged):
        loaded.read("adapter.safetensors")
    with pytest.raises(CheckpointDamaged):
        loaded.read("unknown")


def test_names_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    for name in ("../escape", "manifest.json"):
        with pytest.raises(ValueError, match="cannot be the name"):
            save(tmp_path, 1, {name: b""}, {}, run_id="run")
    assert steps(tmp_path) == []


# ------------------------------------------------------------------------------------------ pruning


def test_R8_lease_protects_a_checkpoint_while_it_is_read(tmp_path: Path) -> None:
    first = put(tmp_path, 1)
    with lease(first):
        put(tmp_path, 2, keep=1)
        assert steps(tmp_path) == [1, 2]
    put(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [3]


def test_R8_lease_of_a_dead_reader_runs_out(tmp_path: Path) -> None:
    first = put(tmp_path, 1)
    marker = first / ".lease-999"
    marker.touch()
    os.utime(marker, (0, 0))
    put(tmp_path, 2, keep=1)
    assert steps(tmp_path) == [2]


def test_R8_pruning_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        put(tmp_path, step)

    def refuse(source: object, target: object) -> None:
        raise OSError("busy")

    monkeypatch.setattr(ckpt.os, "rename", refuse)
    assert prune(tmp_path, keep=1) == []
    assert steps(tmp_path) == [1, 2, 3]


def test_R8_pruning_beside_a_reader_that_opens_files_never_raises(tmp_path: Path) -> None:
    ended = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        while not ended.is_set():
            try:
                list_valid(tmp_path)
            except OSError as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 12):
        put(tmp_path, step, keep=1)
    ended.set()
    reader.join()
    assert errors == []
    assert steps(tmp_path) == [11]


def test_two_recovery_checkpoints_the_milestones_and_the_best_are_kept(tmp_path: Path) -> None:
    def put_kind(step: int, best: int) -> list[int]:
        kind = Kind.MILESTONE if step % 4 == 0 else Kind.RECOVERY
        save(tmp_path, step, {"a": b""}, {}, run_id="run", keep=2, kind=kind, best=best)
        return steps(tmp_path)

    assert [put_kind(step, 1) for step in (0, 1, 2, 3)][-1] == [0, 1, 2, 3]
    assert put_kind(4, 1) == [0, 1, 3, 4]
    assert put_kind(5, 1) == [0, 1, 4, 5]
    assert put_kind(6, 6) == [0, 4, 5, 6]
    assert [put_kind(step, 6) for step in (7, 8)][-1] == [4, 6, 7, 8]
    assert put_kind(9, 6) == [4, 6, 8, 9]
    assert {c.step: c.kind for c in list_valid(tmp_path)}[9] is Kind.RECOVERY


def test_checkpoints_of_before_there_were_kinds_are_milestones(tmp_path: Path) -> None:
    manifest = put(tmp_path, 1) / "manifest.json"
    body = json.loads(manifest.read_text())
    del body["kind"], body["digest"]
    manifest.write_text(json.dumps(body | {"digest": ckpt._body_digest(body)}))
    put(tmp_path, 2, keep=2)
    assert [c.kind for c in list_valid(tmp_path)] == [Kind.MILESTONE] * 2


def test_R5_R8_a_clock_that_jumps_changes_neither_the_order_nor_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(tmp_path, 5)
    now = time.time()
    with lease(first):
        for entry in (first, *first.rglob("*")):
            os.utime(entry, (now, now))
        monkeypatch.setattr(ckpt.time, "time", lambda: now - 86400)
        os.utime(put(tmp_path, 3), (now - 86400, now - 86400))
        latest = find_latest(tmp_path)
        assert latest is not None
        assert latest.step == 3
        put(tmp_path, 4, keep=1)
        assert steps(tmp_path) == [5, 4]
    put(tmp_path, 2, keep=1)
    assert steps(tmp_path) == [2]


# ------------------------------------------------------------------------------------- in a thread


def test_H2_what_fails_beside_the_training_is_raised_at_the_next_border() -> None:
    async def run() -> None:
        saver, may_end = Background(), threading.Event()

        def fail() -> None:
            may_end.wait(10)
            raise DiskRefused("full")

        await saver.start(fail)
        saver.check()  # it goes on, and so does the training
        may_end.set()
        with pytest.raises(DiskRefused):
            await saver.start(lambda: None)
        await saver.finish()

    asyncio.run(run())


def test_R5_an_exit_waits_for_the_write_whoever_was_cancelled() -> None:
    written: list[int] = []

    def write() -> None:
        time.sleep(0.3)
        written.append(1)

    async def run() -> None:
        saver = Background()
        await saver.start(write)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(saver.finish(), 0.01)
        await saver.finish()
        assert written == [1]
        await saver.start(write)

    asyncio.run(run())
    assert written == [1, 1]


# ------------------------------------------------------------------------------------- resume modes


def test_R13_auto_starts_fresh_only_when_nothing_valid_exists(tmp_path: Path) -> None:
    (tmp_path / "global_step_4").mkdir()
    start = open_run(tmp_path, "auto", run_id="run")
    assert start.checkpoint is None
    put(tmp_path, 4)
    again = open_run(tmp_path, "auto", run_id="other name, not used")
    assert again.run_id == "run"
    assert again.checkpoint is not None
    assert again.checkpoint.step == 4


def test_R13_must_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no valid checkpoint"):
        open_run(tmp_path, "must")
    put(tmp_path, 1)
    assert open_run(tmp_path, "must").checkpoint is not None


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_R11_damaged_latest_checkpoints_are_passed_over_said_and_kept(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, 1)
    (put(tmp_path, 2) / "adapter.safetensors").write_bytes(b"adapter 3 ")
    (put(tmp_path, 3) / "manifest.json").write_text("{}")
    start = open_run(tmp_path, mode)
    assert start.checkpoint is not None
    assert start.checkpoint.step == 1
    told = capsys.readouterr().err.splitlines()
    assert tuple(told) == start.damaged
    assert "global_step_3 is damaged, its manifest.json" in told[0]
    assert "adapter.safetensors does not match its checksum" in told[1]
    # A second start meets them no more; another damaged one of the same step finds its own name.
    assert open_run(tmp_path, mode).damaged == ()
    (put(tmp_path, 2) / "adapter.safetensors").write_bytes(b"adapter 4 ")
    open_run(tmp_path, mode)
    put(tmp_path, 4, keep=1)
    kept = sorted(entry.name for entry in tmp_path.glob(".damaged*"))
    assert kept == [".damaged-2-0", ".damaged-2-1", ".damaged-3-0"]
    assert (tmp_path / ".damaged-2-1" / "adapter.safetensors").read_bytes() == b"adapter 4 "


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_R11_where_every_checkpoint_is_damaged_nothing_is_begun_anew(
    tmp_path: Path, mode: str
) -> None:
    (put(tmp_path, 1) / "adapter.safetensors").write_bytes(b"adapter 3 ")
    (put(tmp_path, 2) / "manifest.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(CheckpointDamaged, match="is intact, in global_step_2"):
            open_run(tmp_path, mode)


def test_R11_the_checkpoint_that_is_named_is_not_passed_over(tmp_path: Path) -> None:
    put(tmp_path, 1)
    path = put(tmp_path, 2)
    (path / "adapter.safetensors").write_bytes(b"adapter 3 ")
    with pytest.raises(CheckpointDamaged):
        open_run(tmp_path, "resume_path", path)
    assert path.is_dir()


def test_disable_refuses_a_folder_of_another_run(tmp_path: Path) -> None:
    first = open_run(tmp_path, "disable")
    with pytest.raises(UserError, match=first.run_id):
        open_run(tmp_path, "disable")
    assert open_run(tmp_path, "disable", run_id=first.run_id).run_id == first.run_id


def test_disable_refuses_checkpoints_without_an_owner(tmp_path: Path) -> None:
    put(tmp_path, 1)
    with pytest.raises(UserError, match="without a name"):
        open_run(tmp_path, "disable")


def test_R9_checkpoint_of_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    open_run(tmp_path, "disable", run_id="mine")
    put(tmp_path, 1, run_id="foreign")
    with pytest.raises(UserError, match="foreign"):
        open_run(tmp_path, "auto")


def test_resume_path_inside_the_folder_goes_on_as_the_same_run(tmp_path: Path) -> None:
    first = open_run(tmp_path, "disable", run_id="run")
    put(tmp_path, 1)
    put(tmp_path, 2)
    start = open_run(tmp_path, "resume_path", tmp_path / "global_step_1")
    assert start.run_id == first.run_id
    assert start.checkpoint is not None
    assert start.checkpoint.step == 1


def test_resume_path_from_another_folder_starts_a_new_run(tmp_path: Path) -> None:
    source = put(tmp_path / "a", 3, run_id="old")
    start = open_run(tmp_path / "b", "resume_path", source)
    assert start.checkpoint is not None
    assert start.run_id not in ("", "old")
    assert read_run_id(tmp_path / "b") == start.run_id


@pytest.mark.parametrize("path", [None, Path("somewhere")])
def test_resume_path_must_name_a_step_folder(tmp_path: Path, path: Path | None) -> None:
    with pytest.raises(UserError, match="global_step_<N>"):
        open_run(tmp_path, "resume_path", path)


def test_unknown_mode_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="disable, auto, must, resume_path"):
        open_run(tmp_path, "always")
