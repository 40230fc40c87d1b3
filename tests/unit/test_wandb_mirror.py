"""The W&B mirror never reaches training."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from delta_belief_rl.obs import wandb_mirror
from delta_belief_rl.obs.wandb_mirror import WandbMirror, WandbMode, has_key, replay
from delta_belief_rl.types import UserError


class FakeRun:
    def __init__(self) -> None:
        self.step = 0
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0
        self.error: Exception | None = None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self.error:
            raise self.error
        self.logged.append((step, metrics))
        self.step = step + 1

    def finish(self) -> None:
        self.finished += 1
        if self.error:
            raise self.error


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.run = FakeRun()
        self.init_error: Exception | None = None
        self.init_args: dict[str, Any] = {}

    def Table(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def init(self, **kwargs: Any) -> FakeRun:
        self.init_args = kwargs
        if self.init_error:
            raise self.init_error
        return self.run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    return module


def mirror(tmp_path: Path, mode: str = "auto", said: list[str] | None = None) -> WandbMirror:
    lines = said if said is not None else []
    return WandbMirror(
        mode,
        project="p",
        name="n",
        run_id="r1",
        run_dir=tmp_path,
        config={"a": 1},
        say=lines.append,
    )


def test_project_name_and_run_id_are_passed_so_that_a_resume_goes_on_in_the_same_curve(
    fake: FakeWandb, tmp_path: Path
) -> None:
    m = mirror(tmp_path)
    m.log(3, {"x": 1.0})
    m.finish()
    args = fake.init_args
    assert (args["project"], args["name"], args["id"], args["resume"]) == ("p", "n", "r1", "allow")
    assert args["mode"] == "online"
    assert fake.run.logged == [(3, {"x": 1.0})]
    assert fake.run.finished == 1
    assert m.failures == 0


def test_a_pass_at_k_curve_is_a_table_as_well_also_when_it_is_replayed(
    fake: FakeWandb, tmp_path: Path
) -> None:
    curve = {"pass@k/10": 0.9, "pass@k/2": 0.4, "pass@k/2/errors_as_losses": 0.3, "x": 1.0}
    m = mirror(tmp_path)
    m.log(0, curve)
    replay([{"step": 1, "run_id": "r1", **curve}], m)
    assert m.failures == 0
    for _, logged in fake.run.logged:
        table = logged.pop("pass@k/pass@k_table")
        assert table == {"columns": ["k", "pass@k"], "data": [[2, 0.4], [10, 0.9]]}
        assert logged == curve


def test_W2_error_at_the_start_does_not_reach_training(fake: FakeWandb, tmp_path: Path) -> None:
    fake.init_error = ConnectionError("no route")
    said: list[str] = []
    m = mirror(tmp_path, said=said)
    m.log(1, {"x": 1.0})
    m.finish()
    assert not m.active
    assert m.failures == 1
    assert len(said) == 1
    assert "no route" in said[0]


def test_W2_errors_while_logging_and_finishing_are_counted_and_said_once(
    fake: FakeWandb, tmp_path: Path
) -> None:
    said: list[str] = []
    m = mirror(tmp_path, said=said)
    fake.run.error = RuntimeError("broken pipe")
    for step in range(3):
        m.log(step, {"x": 1.0})
    m.finish()
    assert m.failures == 4
    assert len(said) == 1


def test_W2_missing_client_is_a_counted_failure(
    monkeypatch: pytest.MonkeyPatch, fake: FakeWandb, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert mirror(tmp_path).failures == 1


def test_W2_end_that_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, fake: FakeWandb, tmp_path: Path
) -> None:
    monkeypatch.setattr(wandb_mirror, "FINISH_SECONDS", 0.05)
    m = mirror(tmp_path)
    monkeypatch.setattr(fake.run, "finish", lambda: time.sleep(5))
    m.finish()
    assert m.failures == 1


def test_W4_unknown_mode_is_an_error_that_lists_the_modes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="auto, online, offline, disabled"):
        mirror(tmp_path, mode="onlin")


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_N8_without_a_key_it_is_off_and_says_so_in_one_line(
    fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    said: list[str] = []
    m = mirror(tmp_path, mode, said)
    assert m.mode is WandbMode.DISABLED
    assert len(said) == 1
    assert fake.init_args == {}


def test_offline_needs_no_key(
    fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    m = mirror(tmp_path, "offline")
    m.finish()
    assert fake.init_args["mode"] == "offline"


def test_disabled_is_silent(fake: FakeWandb, tmp_path: Path) -> None:
    said: list[str] = []
    m = mirror(tmp_path, "disabled", said)
    m.log(1, {})
    m.finish()
    assert said == []
    assert fake.init_args == {}


def test_key_in_the_netrc_file_counts(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("machine api.wandb.ai login user password x\n")
    assert has_key({"NETRC": str(tmp_path / "n")})
    assert not has_key(
        {"NETRC": str(tmp_path / "n"), "WANDB_BASE_URL": "https://wandb.example.org"}
    )
    assert not has_key({"HOME": str(tmp_path)})


def test_W1_replaying_the_record_twice_sends_each_step_once(
    fake: FakeWandb, tmp_path: Path
) -> None:
    records = [{"step": step, "run_id": "r1", "x": float(step)} for step in range(1, 4)]
    m = mirror(tmp_path)
    assert replay(records, m) == 3
    assert replay(records, m) == 0
    m.finish()
    assert fake.run.logged == [(s, {"x": float(s)}) for s in (1, 2, 3)]


def test_finishing_twice_closes_once(fake: FakeWandb, tmp_path: Path) -> None:
    m = mirror(tmp_path)
    m.finish()
    m.finish()
    assert fake.run.finished == 1


@pytest.mark.fault
@pytest.mark.parametrize("ending", ["return", "raise", "sigterm"])
def test_W7_the_tail_is_flushed_on_every_exit(tmp_path: Path, ending: str) -> None:
    script = textwrap.dedent("""
        import sys, time, types
        from pathlib import Path
        from delta_belief_rl.obs.exits import exit_on_sigterm
        from delta_belief_rl.obs.wandb_mirror import WandbMirror

        folder, ending = Path(sys.argv[1]), sys.argv[2]
        class Run:
            step = 0
            def log(self, metrics, step): pass
            def finish(self): (folder / "finished").touch()
        fake = types.ModuleType("wandb")
        fake.init = lambda **kwargs: Run()
        sys.modules["wandb"] = fake
        exit_on_sigterm()
        WandbMirror("offline", project="p", name="n", run_id="r", run_dir=folder).log(1, {})
        (folder / "ready").touch()
        if ending == "raise":
            raise RuntimeError("training failed")
        if ending == "sigterm":
            time.sleep(60)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), ending], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if ending == "sigterm":
        process.send_signal(signal.SIGTERM)
    status = process.wait(timeout=60)
    assert status == {"return": 0, "raise": 1, "sigterm": 143}[ending]
    assert (tmp_path / "finished").exists()
