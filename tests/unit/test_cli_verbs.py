"""The verbs that play, show and report: their output, and what they say to mistakes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.rollout.store import to_row
from delta_belief_rl.types import StopReason, Task, Trajectory, Turn, Verdict


def game(secret: str, number: int, won: bool) -> Trajectory:
    verdict = Verdict.WIN if won else Verdict.NO
    turns = (
        Turn(0, 2, 4, (-0.5, -0.5), 0, "Is it alive?", "Yes", Verdict.YES),
        Turn(1, 6, 8, (-0.5, -0.5), 0, f"Is it a {secret}?", verdict.value, verdict, won, won),
    )
    stop = StopReason.WIN if won else StopReason.TURN_LIMIT
    task = Task(f"t_{secret}", "tw_q", secret, ())
    return Trajectory(task, number, tuple(range(10)), turns, stop, (-5.0, -1.0, -0.5), "r", 3)


@pytest.fixture
def games(tmp_path: Path) -> Path:
    file = tmp_path / "run" / "rollout" / "3.jsonl"
    file.parent.mkdir(parents=True)
    played = [game("dog", 0, True), game("dog", 1, False), game("cat", 0, False)]
    lines = [json.dumps(to_row(one, max_turns=4)) for one in played]
    file.write_text("\n".join(lines) + "\n")
    return file


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(list(words)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


# --- view


def test_view_prints_every_turn_with_the_belief_after_it(
    games: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shown(capsys, "view", str(games)).split("\n\n")[0].splitlines()
    assert first[0] == "dog | won in 2 turns | step 3 | game 0"
    assert first[1].split() == ["0.674", "%"]
    assert first[2].split() == ["1", "Is", "it", "alive?", "Yes", "36.8", "%"]
    assert first[3].split() == ["2", "Is", "it", "a", "dog?", "win", "60.7", "%"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--won"], ["dog"]),
        (["--lost"], ["dog", "cat"]),
        (["--secret", "Cat"], ["cat"]),
        (["--limit", "1"], ["dog"]),
        (["--limit", "0"], ["dog", "dog", "cat"]),
    ],
)
def test_view_chooses_games(
    games: Path, words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(shown(capsys, "view", "--json", str(games), *words))
    assert [one["secret"] for one in found] == expected


def test_view_skips_and_counts_lines_that_hold_no_game(
    games: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    games.write_text(games.read_text() + '{"step": 1}\n{"torn": \n')
    assert cli(["view", str(games)]) == 0
    assert "2 lines hold no game" in capsys.readouterr().err


def test_view_of_what_is_no_file_of_games_is_one_sentence(
    games: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = games.parents[1]
    assert "there is no rollout file" in refused(capsys, "view", str(folder / "no.jsonl"))
    assert str(games) in refused(capsys, "view", str(folder))
    assert "without files of games" in refused(capsys, "view", str(games.parent))
    (folder / "config.yaml").write_text("seed: 1\n")
    error = refused(capsys, "view", str(folder / "config.yaml"))
    assert "holds no game (line 1: not JSON" in error


# --- report


def test_report_makes_the_page_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "run_id": "r", "timing_s/step": 2.0}\n')
    out = shown(capsys, "report", str(tmp_path))
    assert out.strip() == str(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()


def test_report_of_no_run_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "There is no folder" in refused(capsys, "report", str(tmp_path / "none"))
    assert "holds neither metrics.jsonl" in refused(capsys, "report", str(tmp_path))


# --- play


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_person_plays_by_the_rules_of_the_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "is it alive?\nis it alive?\nblue\nis it a dog?\nIs it a penguin?\nmore\n")
    assert cli(["play", "--json", "--secret", "penguin", "--seed", "1"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    replies = [turn["reply"] for turn in found["turns"]]
    assert replies == ["Yes", "Repeated", "Invalid", "No", "Finished"]
    assert found["won"]
    assert "Invalid (" in err, "a person is told why"
    assert "Found: penguin" in err


def test_an_empty_line_costs_no_turn_and_shows_examples_that_are_understood(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "\n")
    assert cli(["play", "--secret", "penguin", "--seed", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("penguin | not won in 0 turns")
    examples = [line.split("> ")[-1].strip() for line in err.splitlines() if line.endswith("?")]
    assert len(examples) == 5
    typed(monkeypatch, "\n".join(examples) + "\n")
    assert cli(["play", "--json", "--secret", "penguin"]) == 0
    replies = [turn["reply"] for turn in json.loads(capsys.readouterr().out)["turns"]]
    assert set(replies) <= {"Yes", "No"}
    assert len(replies) == 5


def test_the_last_turn_ends_a_persons_game(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "is it alive?\nis it a cat?\nis it a dog?\n")
    assert cli(["play", "--secret", "penguin", "--turns", "2", "--seed", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("penguin | not won in 2 turns")
    assert "It was: penguin" in err


@pytest.mark.parametrize("player", ["random", "mediocre", "splitter"])
def test_a_table_player_shows_a_game_that_its_seed_repeats(
    player: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["play", "--player", player, "--seed", "5"]
    first, second = (shown(capsys, *words) for _ in range(2))
    assert first == second
    assert f"{player} player | seed 5" in first


def test_the_agent_shows_its_belief_after_every_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["play", "--json", "--player", "agent", "--secret", "dog", "--turns", "3"]
    found = json.loads(shown(capsys, *words, "--seed", "1"))
    beliefs = [found["prior"], *(turn["belief"] for turn in found["turns"])]
    assert 1 <= len(found["turns"]) <= 3
    assert all(0.0 < belief < 1.0 for belief in beliefs)


def test_without_a_secret_one_of_the_world_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    names = {thing.name for thing in load_world("everyday").things}
    drawn = {
        json.loads(shown(capsys, "play", "--json", "--player", "splitter", "--seed", str(seed)))[
            "secret"
        ]
        for seed in range(3)
    }
    assert drawn <= names
    assert len(drawn) > 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--secret", "pengin"], "did you mean penguin"),
        (["--turns", "0"], "at least one turn"),
        (["--world", "narnia"], "narnia"),
        (["--player", "agent", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_a_game_that_cannot_be_played_is_one_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "play", *words)


# --- warmup


def test_warmup_writes_an_agent_that_plays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "agent"
    small = ["--steps", "1", "--batch-games", "4", "--eval-games", "4", "--max-turns", "3"]
    sizes = ["--hidden", "16", "--layers", "1", "--mlp", "16", "--device", "cpu"]
    found = json.loads(shown(capsys, "warmup", "--json", "--out", str(out), *small, *sizes))
    assert found["games"] == 4
    played = shown(capsys, "play", "--player", "agent", "--model", str(out), "--turns", "2")
    assert "agent player" in played


def test_warmup_with_impossible_settings_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["warmup", "--out", str(tmp_path), "--steps", "1", "--minutes", "1"]
    assert "either minutes or steps" in refused(capsys, *words)
