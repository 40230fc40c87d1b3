"""Checkpoints on the hub: one commit each, nothing twice, and what comes back resumes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import pytest

from delta_belief_rl.cli import backup
from delta_belief_rl.cli import hub as hub_module
from delta_belief_rl.cli.backup import checkpoint_root, restore, upload, verify
from delta_belief_rl.cli.hub import Hub, Patience
from delta_belief_rl.cli.main import main
from delta_belief_rl.cli.upload_lock import LOCK_FILE, upload_lock
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.trainer.resume import open_run
from delta_belief_rl.types import UserError
from tests import runs
from tests.hub_server import TOKEN, FakeHub, Fault, serve
from tests.runs import (
    STEPS,
    assert_same_state,
    metrics_of,
    play,
    state_of,
    words,
    write_world,
)

REPO = "me/runs"
QUICK = Patience(tries=4, first_s=0.02, longest_s=0.1)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(backup, "exit_on_sigterm", lambda: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two checkpoints of two files each."""
    root = tmp_path / "run" / "checkpoints"
    open_run(root, "disable", run_id="r1")
    put(root, 1)
    put(root, 2)
    return tmp_path / "run"


def put(
    root: Path,
    step: int,
    keep: int | None = None,
    text: str = "",
    kind: checkpoint.Kind = checkpoint.Kind.MILESTONE,
    best: int = -1,
) -> Path:
    files: dict[str, checkpoint.Content] = {
        "actor/state.pt": f"weights {step} {text}".encode() * 50,
        "credit.json": json.dumps({"step": step}).encode(),
    }
    meta = {"config": "", "best": {"step": best}}
    return checkpoint.save(root, step, files, meta, run_id="r1", keep=keep, kind=kind, best=best)


def opened(told: list[str] | None = None) -> Hub:
    return Hub(REPO, (told if told is not None else []).append, QUICK)


def commits(server: FakeHub) -> list[str]:
    return server.repositories[REPO].commits[1:]


def test_F3_what_stands_only_until_the_next_save_is_not_copied(
    server: FakeHub, run_dir: Path
) -> None:
    root, recovery = checkpoint_root(run_dir), checkpoint.Kind.RECOVERY
    put(root, 3, kind=recovery, best=3)
    put(root, 4, kind=recovery, best=3)
    assert upload(run_dir, opened()) == ([1, 2, 3], [])
    assert {row.step for row in verify(root, opened())} == {1, 2, 3}


def test_F3_every_checkpoint_is_one_commit_of_all_its_files(server: FakeHub, run_dir: Path) -> None:
    root = checkpoint_root(run_dir)
    assert upload(run_dir, opened()) == ([1, 2], [])
    assert commits(server) == [f"Checkpoint of step {step} of run r1" for step in (1, 2)]
    repository = server.repositories[REPO]
    assert repository.private
    assert json.loads(repository.files["r1/run.json"]) == {"format": 1, "run_id": "r1", "step": 2}
    there = {path for path in repository.files if path.startswith("r1/global_step_")}
    names = ("actor/state.pt", "credit.json", "manifest.json")
    assert there == {f"r1/global_step_{step}/{name}" for step in (1, 2) for name in names}
    for path in there:
        assert repository.files[path] == (root / path.removeprefix("r1/")).read_bytes()


def test_F3_nothing_is_uploaded_twice_and_the_listing_is_the_record(
    server: FakeHub, run_dir: Path
) -> None:
    root = checkpoint_root(run_dir)
    upload(run_dir, opened())
    server.calls.clear()
    assert upload(run_dir, opened()) == ([], [])
    assert server.calls == ["tree"]
    # Somebody emptied a file there: that checkpoint goes up again, the other one does not.
    server.repositories[REPO].files["r1/global_step_1/credit.json"] = b"{}"
    assert upload(run_dir, opened()) == ([1], [])
    # The run went back and saved a step anew.
    put(root, 2, text="anew")
    assert upload(run_dir, opened()) == ([2], [])
    assert len(commits(server)) == 4


@pytest.mark.parametrize(
    "fault",
    [
        Fault("commit", times=2, status=500),
        Fault("commit", times=1, status=0),
        Fault("create", times=1, status=503),
    ],
    ids=["500", "dropped", "503"],
)
def test_F3_a_call_that_failed_is_made_again(fault: Fault, server: FakeHub, run_dir: Path) -> None:
    server.faults.append(fault)
    told: list[str] = []
    assert upload(run_dir, opened(told)) == ([1, 2], [])
    assert fault.times == 0
    assert len(commits(server)) == 2
    assert any("trying again" in line for line in told)


def test_F3_a_commit_whose_answer_was_lost_is_not_made_again(
    server: FakeHub, run_dir: Path
) -> None:
    server.faults.append(Fault("commit", status=0, after=True))
    upload(run_dir, opened())
    assert len(commits(server)) == 2


def test_F3_waits_double_are_spread_and_never_undercut_the_hubs(
    server: FakeHub, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(hub_module.time, "sleep", waits.append)
    server.faults.append(Fault("commit", status=429, retry_after=7))
    upload(run_dir, opened())
    assert len(waits) == 1
    assert 7 <= waits[0] < 8
    patience = Patience(first_s=2, longest_s=300)
    for failures, mean in ((1, 2), (2, 4), (5, 32), (20, 300)):
        drawn = [patience.wait(failures, None) for _ in range(200)]
        assert mean / 2 <= min(drawn) < max(drawn) <= mean * 1.5
        assert max(drawn) - min(drawn) > mean / 2


def test_F3_a_hub_that_stays_away_ends_with_status_1_and_no_lease_is_left(
    server: FakeHub,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hub_module, "Patience", lambda: QUICK)
    server.faults.append(Fault("commit", times=100, status=503))
    assert main(["backup", "upload", str(run_dir), REPO]) == 1
    shown = capsys.readouterr()
    assert "in 4 tries (the hub answers 503)" in shown.out
    assert [*run_dir.rglob(".lease-*"), *run_dir.glob(LOCK_FILE)] == []
    server.faults.clear()
    assert main(["backup", "upload", str(run_dir), REPO]) == 0


def test_F3_a_hub_that_stalls_is_given_up_on(
    server: FakeHub, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "TIMEOUT_S", 0.3)
    server.faults.append(Fault("commit", status=-1))
    told: list[str] = []
    assert upload(run_dir, opened(told))[0] == [1, 2]
    assert any("no answer from the hub" in line for line in told)


def test_R8_a_checkpoint_that_is_being_uploaded_is_not_pruned(
    server: FakeHub, run_dir: Path
) -> None:
    root = checkpoint_root(run_dir)
    server.faults.append(Fault("commit", status=-1))
    found: list[object] = []
    thread = Thread(target=lambda: found.append(upload(run_dir, opened())))
    thread.start()
    assert server.stalled.wait(20)
    put(root, 3, keep=1)
    assert [saved.step for saved in checkpoint.list_valid(root)] == [1, 3]
    server.released.set()
    thread.join()
    # Step 2 was pruned before its turn came, which is no problem.
    assert found == [([1], [])]
    put(root, 4, keep=1)
    assert [saved.step for saved in checkpoint.list_valid(root)] == [4]


def test_R6_what_is_half_written_damaged_or_foreign_is_not_uploaded(
    server: FakeHub, run_dir: Path
) -> None:
    root = checkpoint_root(run_dir)
    half = shutil.copytree(root / "global_step_2", root / ".tmp-3-1")
    torn = shutil.copytree(half, root / "global_step_3")
    (torn / "manifest.json").unlink()
    state = root / "global_step_1" / "actor" / "state.pt"
    state.write_bytes(state.read_bytes().replace(b"w", b"v"))
    checkpoint.save(root, 5, {"a": b"a"}, {}, run_id="other")
    done, problems = upload(run_dir, opened())
    assert done == [2]
    assert ["does not match" in problems[0], "by run other" in problems[1]] == [True, True]
    assert {path.split("/")[1] for path in server.repositories[REPO].files if "/" in path} == {
        "global_step_2",
        "run.json",
    }


@pytest.mark.parametrize("action", ["upload", "verify", "restore"])
def test_F5_a_refused_token_is_one_sentence_without_it(
    action: str,
    server: FakeHub,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_this_one_is_wrong")
    places = [REPO, str(tmp_path / "new")] if action == "restore" else [str(run_dir), REPO]
    assert main(["backup", action, *places]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "HF_TOKEN" in err
    assert "hf_this" not in err
    assert server.url not in err


def test_F5_what_the_hub_says_is_printed_without_the_token(
    server: FakeHub, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.faults.append(Fault("commit", status=413))
    assert main(["backup", "upload", str(run_dir), REPO]) == 2
    err = capfd.readouterr().err
    assert "413: no, Bearer ***" in err
    assert TOKEN not in err


def test_H5_a_second_upload_of_the_same_run_is_refused(server: FakeHub, run_dir: Path) -> None:
    root = checkpoint_root(run_dir)
    with upload_lock(run_dir, root):
        assert main(["backup", "upload", str(run_dir), REPO]) == 2
        with (
            pytest.raises(UserError, match=f"process {os.getpid()} on"),
            upload_lock(run_dir, root),
        ):
            pass
    assert not (run_dir / LOCK_FILE).exists()
    assert server.calls == []


def test_watching_goes_on_until_the_run_is_done(
    server: FakeHub, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rounds = checkpoint_root(run_dir), [0]
    monkeypatch.setattr(hub_module, "Patience", lambda: Patience(tries=1))

    def wait(seconds: float) -> None:
        assert seconds == 30
        rounds[0] += 1
        if rounds[0] == 1:
            put(root, 3)
            server.faults.append(Fault("commit", status=500))
            end = {"kind": "end", "status": 1}
        else:
            end = {"kind": "end", "status": int(rounds[0] < 3)}
        with (run_dir / "events.jsonl").open("a") as file:
            file.write(json.dumps(end) + "\n")

    monkeypatch.setattr(backup.time, "sleep", wait)
    assert main(["backup", "upload", str(run_dir), REPO, "--watch", "30"]) == 0
    assert rounds == [3]
    assert len(commits(server)) == 3


# --- verify


def test_verify_compares_every_file_with_its_manifest(
    server: FakeHub, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkpoint_root(run_dir)
    upload(run_dir, opened())
    rows = verify(root, opened())
    assert len(rows) == 6
    assert {row.state for row in rows} == {"same"}
    assert main(["backup", "verify", str(run_dir), REPO]) == 0
    assert "6 files, 0 missing or different" in capsys.readouterr().out
    # One that is here no more is compared with its manifest there.
    shutil.rmtree(root / "global_step_1")
    put(root, 3)
    files = server.repositories[REPO].files
    files["r1/global_step_1/actor/state.pt"] = b"x" * len(files["r1/global_step_1/actor/state.pt"])
    files["r1/global_step_2/credit.json"] += b" "
    wrong = {(r.step, r.file): r.state for r in verify(root, opened()) if r.state != "same"}
    names = ("actor/state.pt", "credit.json", "manifest.json")
    changed = {(1, "actor/state.pt"): "different", (2, "credit.json"): "different"}
    assert wrong == changed | dict.fromkeys([(3, name) for name in names], "missing")
    assert main(["backup", "verify", str(run_dir), REPO]) == 1


# --- restore


def test_F4_what_is_restored_is_what_was_saved(
    server: FakeHub, run_dir: Path, tmp_path: Path
) -> None:
    root = checkpoint_root(run_dir)
    upload(run_dir, opened())
    out = tmp_path / "new"
    assert restore(opened(), out) == out / "checkpoints" / "global_step_2"
    assert restore(opened(), out, step=1).name == "global_step_1"
    assert [saved.step for saved in checkpoint.list_valid(out / "checkpoints")] == [1, 2]
    files = [path for path in (out / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) == 8
    for path in files:
        assert path.read_bytes() == (root / path.relative_to(out / "checkpoints")).read_bytes()
    assert [path.name for path in (out / "checkpoints").glob(".*")] == []
    assert open_run(out / "checkpoints", "must").run_id == "r1"


def test_F4_a_damaged_copy_a_foreign_folder_and_a_missing_step_are_refused(
    server: FakeHub, run_dir: Path, tmp_path: Path
) -> None:
    upload(run_dir, opened())
    files, name = server.repositories[REPO].files, "r1/global_step_2/actor/state.pt"
    files[name] = files[name][:-1] + b"?"
    with pytest.raises(UserError, match="is damaged, so nothing was restored"):
        restore(opened(), tmp_path / "new")
    assert [*(tmp_path / "new" / "checkpoints").iterdir()] == []
    with pytest.raises(UserError, match="no step 7 of run r1, only 1, 2"):
        restore(opened(), tmp_path / "new", step=7)
    with pytest.raises(UserError, match="exists already"):
        restore(opened(), run_dir, step=1)
    open_run(tmp_path / "other" / "checkpoints", "disable", run_id="r2")
    with pytest.raises(UserError, match="holds run r2"):
        restore(opened(), tmp_path / "other")
    files["r0/run.json"] = b"{}"
    with pytest.raises(UserError, match="the runs r0, r1: name one with --run"):
        restore(opened(), tmp_path / "new", step=1)
    assert restore(opened(), tmp_path / "new", step=1, run_id="r1").is_dir()


def test_F4_a_run_resumes_from_the_hub_and_ends_as_the_one_that_went_on(
    server: FakeHub, tmp_path: Path
) -> None:
    world, out, new = write_world(tmp_path / "tiny.yaml"), tmp_path / "out", tmp_path / "new"
    assert play(words(out, world))[0] == 0
    upload(out, opened())
    restore(opened(), new, step=STEPS // 2)
    status, trace = play(words(new, world, "trainer.resume_mode=must"))
    assert status == 0
    assert trace.names.count("checkpoint.save") == STEPS - STEPS // 2
    assert_same_state(state_of(new), state_of(out))
    assert metrics_of(new) == metrics_of(out)
    assert runs.tested_of(new) == runs.tested_of(out)
