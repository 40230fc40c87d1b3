"""``delta-belief eval`` from the command line to its figures: killed, started again, the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ATTEMPTS, RAY_IS_LATE, START_SECONDS, RealRun
from safetensors.numpy import load_file, save_file

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.models.loading import add_lora, load_causal_lm
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.trainer import kept
from delta_belief_rl.trainer.kept import KeptGames
from delta_belief_rl.types import Trajectory
from tests.runs import ROOT, Killed, Trace, games_of, metrics_of, without_ray, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

AGENT = ROOT / "delta_belief_rl" / "assets" / "agent"
VAL, SAMPLES = 6, 4
PART = 2 * SAMPLES
"""Games of a part inside this process: two secrets, so an evaluation has three parts."""
FEW, MANY = 2, kept.PART_GAMES // 2 + 1
"""Secrets of the killed evaluation, and games of each: so many that a secret is a part."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml", (8, VAL, 3))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged agent with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(AGENT, folder)
    folder.chmod(0o755)
    file = next(folder.glob("*.safetensors"))
    file.chmod(0o644)
    weights, rng = load_file(file), np.random.default_rng(5)
    for name, value in weights.items():
        noise = rng.normal(scale=0.02, size=value.shape)
        weights[name] = (value.astype(np.float32) + noise).astype(value.dtype)
    save_file(weights, file, {"format": "pt"})
    return folder


def command(out: Path, world: Path, *players: Path | str, samples: int = SAMPLES) -> list[str]:
    """Models that play more turns than the agent was trained for; beliefs are measured."""
    models = [word for player in players for word in ("--model", str(player))]
    options = ["--turns", "26", "--samples", str(samples), "--beliefs", "--out", str(out), "--json"]
    return [
        "eval",
        "everyday",
        *models,
        *options,
        f"data.world={world}",
        "actor_rollout_ref.num_threads=1",
        "trainer.heartbeat_seconds=600",
    ]


def numbers(out: Path) -> list[dict[str, Any]]:
    """All figures of ``eval.json`` but what depends on the clock, the run's name or the folder."""
    cells = json.loads((out / "eval.json").read_text())["cells"]
    apart = ("seconds", "run_id", "folder")
    return [{k: v for k, v in cell.items() if k not in apart} for cell in cells]


def assert_same_evaluation(one: Path, two: Path, *names: str) -> None:
    """Games, records and figures agree bit for bit."""
    for name in names:
        first, second = one / "everyday" / name, two / "everyday" / name
        assert games_of(first) == games_of(second), name
        assert metrics_of(first) == metrics_of(second), name
    assert numbers(one) == numbers(two)


# --- inside this process ------------------------------------------------------------------------


def inside(
    words: list[str], capsys: pytest.CaptureFixture[str], kill_at: int = -1
) -> tuple[int, Trace, str]:
    """The command in this process; its status, the units that were kept, what it said."""
    trace = Trace(kill_at=-1)
    units = Trace(kill_at=kill_at)
    real = KeptGames.append

    def append(self: KeptGames, *args: Any) -> None:
        units.point("before")
        real(self, *args)
        units.point("after")

    with without_ray(trace), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "PART_GAMES", PART)
        patch.setattr(KeptGames, "append", append)
        capsys.readouterr()
        try:
            status = cli(words)
        finally:
            if units.killed:
                raise Killed
    return status, units, capsys.readouterr().err


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, world: Path, other: Path) -> Path:
    """An evaluation of two models that nothing disturbs."""
    out = tmp_path_factory.mktemp("straight") / "eval"
    with without_ray(Trace()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "PART_GAMES", PART)
        assert cli(command(out, world, AGENT, other)) == 0
    return out


def test_every_cell_has_its_games_and_one_table_has_them_all(
    straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = numbers(straight)
    assert [cell["player"]["name"] for cell in cells] == ["agent", "other"]
    for cell in cells:
        assert (cell["games"], cell["secrets"], cell["conditions"]["turns"]) == (24, VAL, 26)
        by_turn = cell["strict"]["by_turn"]
        assert len(by_turn) == 27
        assert by_turn == sorted(by_turn)
        assert cell["strict"]["budgets"]["20"]["value"] == pytest.approx(by_turn[20])
        assert cell["strict"]["budgets"]["26"]["value"] == cell["strict"]["rate"]["value"]
        assert cell["beliefs"]["all"]["games"] == 24
        assert list(cell["strict"]["pass_at_k"]) == ["1", "2", "4"]
    assert cells[0]["strict"]["rate"] != cells[1]["strict"]["rate"]
    assert "<svg" in (straight / "eval.html").read_text()
    # What was kept on the way is gone with the record.
    assert not list(straight.rglob("evaluation_*"))
    # Without a benchmark the tables are made of what is there.
    capsys.readouterr()
    assert cli(["eval", "--out", str(straight)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith("Games won")
    assert [line.split()[:2] for line in text.splitlines()].count(["everyday", "agent"]) > 3


def test_a_complete_cell_is_not_played_again(
    straight: Path, world: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in (straight / "everyday").rglob("*") if p.is_file()}
    status, units, said = inside(command(straight, world, AGENT, other), capsys)
    assert status == 0
    assert units.names == []
    assert said.count("complete, and not played again") == 2
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--samples", "2"], "multi_turn.val.n was 4 and is 2"),
        (["--temperature", "0.5"], "val_kwargs.temperature was 0.7 and is 0.5"),
        (["seed=9"], "seed was 42 and is 9"),
    ],
)
def test_V4_games_of_other_settings_are_never_counted_together(
    more: list[str], part: str, straight: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli([*command(straight, world, AGENT), *more]) == 2
    said = capsys.readouterr().err
    assert "was begun with other settings" in said
    assert part in said


def test_another_model_of_the_same_name_is_refused(
    straight: Path, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(AGENT, tmp_path / "agent")
    capsys.readouterr()
    assert cli(command(straight, world, tmp_path / "agent")) == 2
    assert "belongs to another player" in capsys.readouterr().err


@pytest.mark.fault
@pytest.mark.parametrize("kill_at", [1, 5, 7])
def test_R14_R15_an_evaluation_cut_off_at_any_part_ends_with_the_same_numbers(
    kill_at: int,
    straight: Path,
    world: Path,
    other: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = command(tmp_path / "eval", world, AGENT, other)
    with pytest.raises(Killed):
        inside(words, capsys, kill_at)
    done = (kill_at + 1) // 2
    status, units, said = inside(words, capsys)
    assert status == 0
    # Three parts of each model; those that were kept are not played again.
    assert units.names.count("after") == 6 - done
    if done % 3:
        games = PART * (done % 3)
        assert f"{games} of {VAL * SAMPLES} games were played before and are not again" in said
    assert_same_evaluation(straight, tmp_path / "eval", "agent", "other")


@pytest.mark.fault
def test_R14_without_a_fixed_order_every_game_that_ended_is_kept(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(tmp_path / "eval", world, AGENT)
    words.append("actor_rollout_ref.rollout.deterministic=false")
    with pytest.raises(Killed):
        inside(words, capsys, kill_at=2 * 9)
    status, units, said = inside(words, capsys)
    assert status == 0
    assert "9 of 24 games were played before and are not again" in said
    assert units.names.count("after") == 24 - 9
    cell = tmp_path / "eval" / "everyday" / "agent"
    games = read_trajectories(cell / "validation" / "0.jsonl").trajectories
    assert len({(game.task.id, game.game) for game in games}) == 24


def test_an_adapter_and_a_checkpoint_play_as_they_were_trained(
    straight: Path, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = add_lora(load_causal_lm(AGENT), 4, 8, name="default")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    model.save_pretrained(tmp_path / "tuned")
    words = ["--model", str(AGENT), "--adapter", str(tmp_path / "tuned")]
    status, _, _ = inside([*command(tmp_path / "eval", world), *words], capsys)
    assert status == 0
    (cell,) = numbers(tmp_path / "eval")
    assert cell["player"]["adapter"] == str(tmp_path / "tuned")
    assert cell["strict"]["rate"] != numbers(straight)[0]["strict"]["rate"]
    # The start of that cell is itself a checkpoint of a run, and plays the same games.
    start = next((tmp_path / "eval").rglob("global_step_0"))
    again = [*command(tmp_path / "again", world), "--checkpoint", str(start)]
    assert inside(again, capsys)[0] == 0
    played = [
        texts(next(out.rglob("validation/0.jsonl")))
        for out in (tmp_path / "eval", tmp_path / "again")
    ]
    assert played[0] == played[1]


def texts(path: Path) -> list[tuple[str, int, tuple[int, ...]]]:
    """Tokens of all games of a file."""
    found: tuple[Trajectory, ...] = read_trajectories(path).trajectories
    return [(game.task.id, game.game, game.token_ids) for game in found]


# --- through Ray, killed ------------------------------------------------------------------------


def begin(words: list[str]) -> RealRun:
    """Start the command in a process group of its own."""
    scratch = Path(tempfile.mkdtemp(prefix="db", dir="/tmp"))
    process = subprocess.Popen(
        [sys.executable, "-m", "delta_belief_rl.cli.main", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return RealRun(process, scratch)


def to_its_end(words: list[str]) -> str:
    """The command through Ray to its end; it must end well."""
    for _ in range(ATTEMPTS):
        run = begin(words)
        output, _ = run.process.communicate(timeout=2 * START_SECONDS)
        shutil.rmtree(run.scratch, ignore_errors=True)
        if run.process.returncode == 0 or RAY_IS_LATE not in output:
            break
    assert run.process.returncode == 0, output[-4000:]
    return output


def kept_units(out: Path) -> int:
    """Units that are on the disk now."""
    files = list(out.rglob("evaluation_0.jsonl"))
    return sum(file.read_bytes().count(b"\n") - 1 for file in files)


@pytest.mark.fault
def test_R15_H1_an_evaluation_that_is_killed_in_the_middle_goes_on_and_gives_the_same_numbers(
    world: Path, other: Path, tmp_path: Path
) -> None:
    straight, out = tmp_path / "straight", tmp_path / "eval"
    limit = ["--limit", str(FEW)]
    # By the same classes in the same order, so that no second Ray is needed.
    with without_ray(Trace()):
        assert cli([*command(straight, world, AGENT, other, samples=MANY), *limit]) == 0
    words = [*command(out, world, AGENT, other, samples=MANY), *limit]
    for _ in range(ATTEMPTS):
        run = begin(words)
        deadline = time.monotonic() + START_SECONDS
        while not kept_units(out) and run.process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if run.kill():
            break
    found = kept_units(out)
    assert found > 0, run.output[-4000:]
    assert not (out / "eval.json").exists()
    output = to_its_end(words)
    assert f"{MANY * found} of {FEW * MANY} games were played before and are not again" in output
    assert_same_evaluation(straight, out, "agent", "other")
