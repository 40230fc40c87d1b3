"""``delta-belief eval`` where a cell fails, is damaged, was moved, or is of something else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import training_fakes as fakes

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.config.compose import load_config, resolved_yaml
from delta_belief_rl.config.plan import Plan
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.obs.disk import DiskRefused
from delta_belief_rl.rollout.store import write_groups
from delta_belief_rl.types import Group, UserError

AGENT = "delta_belief_rl/assets/agent"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("eval") / "other")


def groups() -> list[Group]:
    return [
        Group(g.task, tuple(replace(t, task=g.task, run_id="r", step=0) for t in g.trajectories))
        for g in fakes.make_groups(((3, 1), (9, 1)))
    ]


def played(cfg: RunConfig, _plan: Plan) -> int:
    """What a run leaves that played to its end."""
    folder = Path(cfg.trainer.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(resolved_yaml(cfg))
    write_groups(Path(cfg.trainer.validation_data_dir) / "0.jsonl", groups(), max_turns=20)
    (folder / "metrics.jsonl").write_text(json.dumps({"run_id": "r", "step": 0}) + "\n")
    return 0


def breaks(at: str, error: UserError) -> Callable[[RunConfig, Plan], int]:
    """A run that ends in an error for the player of that name."""

    def run(cfg: RunConfig, plan: Plan) -> int:
        if cfg.trainer.output_dir.endswith(at):
            raise error
        return played(cfg, plan)

    return run


def evaluate(
    patch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: Path,
    *words: str,
    run: Callable[[RunConfig, Plan], int] = played,
) -> tuple[int, Any, str]:
    """Status, document and messages of the command; the document is None where there is none."""
    patch.setattr("delta_belief_rl.cluster.app.run", run)
    capsys.readouterr()
    status = cli(["eval", *words, "--out", str(out), "--json"])
    said, err = capsys.readouterr()
    return status, json.loads(said) if said else None, err


def names(body: Any) -> list[str]:
    return [cell["player"]["name"] for cell in body["cells"]]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with two complete cells."""
    out = tmp_path_factory.mktemp("complete") / "eval"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("delta_belief_rl.cluster.app.run", played)
        models = ("--model", AGENT, "--model", str(model))
        assert cli(["eval", "everyday", *models, "--out", str(out)]) == 0
    return out


@pytest.fixture
def copied(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "copied"))


def test_V9_a_cell_that_cannot_be_played_is_named_and_the_others_have_their_table(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
) -> None:
    words = ("everyday", "--model", AGENT, "--model", str(model))
    run = breaks("agent", UserError("GPU 0 is taken."))
    status, body, said = evaluate(monkeypatch, capsys, tmp_path, *words, run=run)
    assert status == 1
    assert names(body) == ["other"]
    assert body["not_complete"] == [
        {"name": "everyday, agent", "status": 2, "reason": "GPU 0 is taken."}
    ]
    assert "everyday, agent: GPU 0 is taken." in said
    assert (tmp_path / "eval.json").is_file()
    # The same command goes on with what is missing.
    status, body, _ = evaluate(monkeypatch, capsys, tmp_path, *words)
    assert (status, names(body), body["not_complete"]) == (0, ["agent", "other"], [])


def test_a_full_disk_ends_the_command_with_the_table_of_what_is_complete(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
) -> None:
    words = ("everyday", "--model", str(model), "--model", AGENT)
    error = DiskRefused("The disk is full.")
    run = breaks("other", error)
    status, body, _ = evaluate(monkeypatch, capsys, tmp_path, *words, run=run)
    assert (status, names(body)) == (6, [])
    assert [one["name"] for one in body["not_complete"]] == ["everyday, other"]


@pytest.mark.parametrize("damage", ["games", "record", "empty record", "cell", "config"])
def test_R6_a_damaged_cell_is_named_and_the_others_have_their_table(
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    copied: Path,
) -> None:
    folder = copied / "everyday" / "agent"
    name, text = {
        "games": ("validation/0.jsonl", "{}\n"),
        "record": ("metrics.jsonl", "torn\n{}\n"),
        "empty record": ("metrics.jsonl", "{}\n"),
        "cell": ("cell.json", "{"),
        "config": ("config.yaml", "seed: [\n"),
    }[damage]
    (folder / name).write_text(text)
    status, body, _ = evaluate(monkeypatch, capsys, copied)
    assert (status, names(body)) == (1, ["other"])
    (lost,) = body["not_complete"]
    assert lost["name"] == "everyday, agent"
    assert str(folder) in lost["reason"]
    assert "\n" not in lost["reason"]


def test_a_folder_of_cells_can_be_copied_and_read_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    first = evaluate(monkeypatch, capsys, copied)[1]
    moved = copied.rename(copied.with_name("moved"))
    for config in moved.rglob("config.yaml"):
        # Where the cells were played there is nothing any more.
        text = config.read_text()
        text, places = re.subn("validation_data_dir: .*", "validation_data_dir: /none", text)
        assert places == 1
        config.write_text(text)
    status, body, _ = evaluate(monkeypatch, capsys, moved)
    assert status == 0
    for cell, before in zip(body["cells"], first["cells"], strict=True):
        name = cell["player"]["name"]
        assert cell == {**before, "folder": str(moved / "everyday" / name)}


@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref.rollout.dtype=float16",
        "actor_rollout_ref.actor.thinking_history=strip",
        "judge_rollout.repeated_prompt=false",
        "judge_rollout.rollout.response_length=77",
        "+actor_rollout_ref.model.chat_template_kwargs={a: 1}",
    ],
)
def test_V4_a_complete_cell_of_other_settings_is_refused(
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    complete: Path,
) -> None:
    words = ("everyday", "--model", AGENT, word)
    status, _, said = evaluate(monkeypatch, capsys, complete, *words)
    assert status == 2
    assert "was begun with other settings" in said
    assert word.lstrip("+").split("=")[0] in said


def test_settings_that_change_no_game_leave_a_complete_cell_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], complete: Path
) -> None:
    words = ["judge_rollout.timeout_s=7", "judge_rollout.max_error_rate=0.5", "trainer.logger=[]"]
    found = evaluate(monkeypatch, capsys, complete, "everyday", "--model", AGENT, *words)
    assert found[0] == 0
    assert "complete, and not played again" in found[2]


def test_a_model_that_was_trained_again_in_its_folder_is_another_player(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(model, folder)
    words = ("everyday", "--model", str(folder))
    assert evaluate(monkeypatch, capsys, tmp_path / "out", *words)[0] == 0
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    status, _, said = evaluate(monkeypatch, capsys, tmp_path / "out", *words)
    assert status == 2
    assert "whose weights or service were others" in said


def test_the_same_name_at_another_service_is_another_player(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("everyday", "--api", "vendor/big", f"actor_rollout_ref.model.path={AGENT}")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://one.example/v1")
    assert evaluate(monkeypatch, capsys, tmp_path, *words)[0] == 0
    about = (tmp_path / "everyday" / "big" / "cell.json").read_text()
    assert json.loads(about)["player"]["identity"] == "one.example"
    assert "secret-key" not in about
    monkeypatch.setenv("OPENAI_BASE_URL", "https://two.example/v1")
    status, _, said = evaluate(monkeypatch, capsys, tmp_path, *words)
    assert status == 2
    assert "belongs to another player" in said


def test_more_turns_than_its_opening_names_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = "user_personalization"
    own = load_config([f"experiment=eval_{name}"])[0].multi_turn.max_turns.val
    words = (name, "--model", AGENT, "--turns", str(own + 1))
    status, body, said = evaluate(monkeypatch, capsys, tmp_path / "out", *words)
    assert (status, body) == (2, None)
    assert f"--turns {own + 1} is more than the {own} of user_personalization" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
