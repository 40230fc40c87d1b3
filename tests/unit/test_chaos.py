"""The runner of ``make chaos`` notices what it is there for."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import faults, running
from tests.chaos.faults import FAULTS, Outcome, Wound, cut_short, inject
from tests.chaos.ledger import check_clean, played
from tests.chaos.run import Story, deck, parse
from tests.chaos.running import NotKept, Running, Starter


def append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


class Keeper:
    """Tends a run that writes what a test wants."""

    command, environ = (), {}

    def __init__(self, do: Any = lambda: None) -> None:
        self.process: Any = None
        self._do = do

    def tend(self) -> bool:
        self._do()
        return False


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A run with a record of step 3 and a checkpoint of it."""
    append(tmp_path / "run" / "metrics.jsonl", {"step": 3})
    monkeypatch.setattr(faults, "saved_step", lambda out: 3)
    (tmp_path / "scratch").mkdir()
    return Running(tmp_path / "run", tmp_path / "scratch", Keeper())


def hit(run: Running, wound: Wound | None, *events: dict[str, Any], limit: float = 5) -> Any:
    """Inject a fault after which the run writes some events and then step 5."""

    def fault(_run: Running, _rng: random.Random) -> Wound | None:
        for event in events:
            append(run.out / "events.jsonl", event)
        return wound

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAULTS, "driver killed", fault)
        return inject("driver killed", 0, run, random.Random(1), limit)


def goes_on(run: Running) -> None:
    run.keeper = Keeper(lambda: append(run.out / "metrics.jsonl", {"step": 5}))


def test_a_fault_that_costs_nothing_is_a_row(run: Running) -> None:
    goes_on(run)
    mended = {"kind": "recovered", "step": 3, "games_lost": 16}
    outcome = hit(run, Wound(), mended)
    assert (outcome.step, outcome.steps_lost, outcome.games_lost) == (3, 0, 16)


def test_a_saved_step_that_is_trained_again_is_a_broken_promise(run: Running) -> None:
    goes_on(run)
    with pytest.raises(NotKept, match="1 saved steps were lost"):
        hit(run, Wound(), {"kind": "start", "step": 2})


def test_a_step_whose_files_were_damaged_may_be_lost(run: Running) -> None:
    goes_on(run)
    assert hit(run, Wound(may_lose=1), {"kind": "start", "step": 2}).steps_lost == 1


def test_a_run_that_does_not_go_on_is_a_broken_promise(run: Running) -> None:
    with pytest.raises(NotKept, match=r"no step was finished within 0\.2 s"):
        hit(run, Wound(), limit=0.2)


def test_a_fault_that_found_nothing_to_hit_is_no_row(run: Running) -> None:
    assert hit(run, None) is None


def test_a_temporary_file_that_is_left_is_a_broken_promise(run: Running) -> None:
    (run.out / "checkpoints").mkdir()
    check_clean(run)
    (run.scratch / "dbrl-left").mkdir()
    with pytest.raises(NotKept, match="dbrl-left"):
        check_clean(run)


def test_a_run_that_gets_nowhere_or_gives_up_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(status: int) -> Starter:
        script = tmp_path / "train.py"
        script.write_text(f"raise SystemExit({status})")
        return Starter((), {}, tmp_path / "run", tmp_path / "log")

    monkeypatch.setattr(running, "ROOT", tmp_path)
    for status, text in ((1, "6 starts in a row finished no step"), (2, "gave up with status 2")):
        starter = keep(status)
        with pytest.raises(NotKept, match=text):
            running.wait_until(starter.tend, 60)
        assert set(starter.statuses) == {status}
    starter = keep(0)
    assert running.wait_until(starter.tend, 60)
    assert starter.statuses == [0]
    assert sys.executable in starter.process.args


def test_every_kind_of_fault_comes_as_often_as_any_other_and_the_seed_says_when() -> None:
    drawn = list(islice(deck(list(FAULTS), random.Random(7)), 3 * len(FAULTS)))
    assert set(Counter(drawn).values()) == {3}
    assert drawn == list(islice(deck(list(FAULTS), random.Random(7)), 3 * len(FAULTS)))


def test_a_file_that_is_cut_short_is_the_beginning_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    cut_short(path, random.Random(3))
    assert 0 <= path.stat().st_size < 100
    assert bytes(range(100)).startswith(path.read_bytes())


def test_games_are_counted_by_epoch_and_secret(tmp_path: Path) -> None:
    for step, (epoch, secret) in enumerate([(0, "cat"), (0, "dog"), (1, "cat")], start=1):
        append(tmp_path / "metrics.jsonl", {"step": step, "training/epoch": epoch})
        for _ in range(4):
            append(tmp_path / "rollout" / f"{step}.jsonl", {"secret": secret})
    assert played(tmp_path) == {0: Counter(cat=4, dog=4), 1: Counter(cat=4)}


def test_the_table_has_a_row_for_each_kind_that_hit() -> None:
    rows = [Outcome("rank killed", 0, 3, seconds, 0, 0) for seconds in (2.0, 9.0, 4.0)]
    lines = Story({}, outcomes=rows).table().splitlines()
    assert lines[1].split() == ["rank", "killed", "3", "4.0", "9.0", "0", "0"]
    assert lines[-1] == "0 rounds; longest recovery 9.0 s"


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--steps", "1"], ["--only", "weather"]])
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 2
