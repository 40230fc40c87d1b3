"""Machines of one start find each other by files, and believe nothing of another start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from delta_belief_rl.cli import node as verb
from delta_belief_rl.cluster import node
from delta_belief_rl.cluster.meeting import Head, Meeting
from delta_belief_rl.cluster.node import Settings, check_reach, play, rank_and_nodes
from delta_belief_rl.types import UserError


def pair(folder: Path) -> tuple[Meeting, Meeting]:
    """Rank 0 and rank 1 of one start, the latter known to the former."""
    first, second = Meeting(folder, 0), Meeting(folder, 1)
    second.announce()
    first.publish("10.0.0.1:5", "secret")
    return first, second


def test_ranks_meet_part_and_leave_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "meet"
    first, second = pair(folder)
    head = second.find_head()
    assert head is not None
    assert (head.address, head.token) == ("10.0.0.1:5", "secret")
    assert first.joined() == []
    second.join(head)
    assert first.joined() == [1]
    assert second.end(head) is None
    assert not first.end_wanted()
    second.join(head, end=True)
    assert first.end_wanted()
    first.finish(143)
    assert second.end(head) == 143
    second.leave()
    assert first.joined() == []
    first.clear()
    assert not folder.exists()


def test_a_head_of_an_earlier_start_is_never_believed(tmp_path: Path) -> None:
    """Neither where it died before, nor by a rank that starts again, nor by its rank's old file."""
    first, second = pair(tmp_path)
    old = second.find_head()
    assert old is not None
    second.join(old, end=True)
    first.finish(0)
    # All of these files lie about still.
    again = Meeting(tmp_path, 1)
    again.announce()
    assert again.find_head() is None
    new = Meeting(tmp_path, 0)
    assert new.joined() == []
    assert not new.end_wanted()
    new.publish("10.0.0.1:6", "other")
    head = again.find_head()
    assert head is not None
    assert head.address == "10.0.0.1:6"
    assert again.end(head) is None
    again.join(head)
    assert new.joined() == [1]


def test_a_rank_that_comes_after_the_head_was_published_is_answered(tmp_path: Path) -> None:
    first = Meeting(tmp_path, 0)
    first.publish("10.0.0.1:5", "secret")
    late = Meeting(tmp_path, 1)
    late.announce()
    assert late.find_head() is None
    first.publish("10.0.0.1:5", "secret")
    assert late.find_head() is not None


def test_a_head_that_has_cleared_up_is_over_for_who_was_slow(tmp_path: Path) -> None:
    first, second = pair(tmp_path / "meet")
    head = second.find_head()
    assert head is not None
    second.join(head)
    first.finish(0)
    first.clear()
    assert second.end(head) is None
    assert second.is_cleared(head)


def test_a_folder_that_cannot_be_read_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = pair(tmp_path / "meet")
    head = second.find_head()
    assert head is not None
    second.join(head)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_a, **_k: (_ for _ in ()).throw(OSError(116)))
        patch.setattr(Path, "read_bytes", lambda *_a, **_k: (_ for _ in ()).throw(OSError(116)))
        assert second.end(head) is None
    assert second.end(head) is None
    assert not second.is_cleared(head)


def test_two_machines_of_one_rank_and_two_starts_in_one_folder_are_told(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    twin = Meeting(tmp_path, 1)
    twin.announce()
    with pytest.raises(UserError, match=r"rank 1 .* as well: give each machine a rank"):
        second.find_head()
    other = Meeting(tmp_path, 0)
    other.publish("10.0.0.9:5", "secret")
    with pytest.raises(UserError, match="Another start of several machines meets in"):
        first.publish("10.0.0.1:5", "secret")


def test_only_the_user_may_read_what_lets_one_into_the_cluster(tmp_path: Path) -> None:
    pair(tmp_path)
    (head,) = [path for path in tmp_path.iterdir() if "secret" in path.read_text()]
    assert head.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot meet in .* name a writable folder"):
        Meeting(tmp_path / "file" / "meet", 1).announce()


# --- the program, with a Ray that is none ---------------------------------------------------------


@dataclass
class FakeRay:
    """Ray of a machine: starts at once, and ends when a test says so."""

    environment: dict[str, str] = field(default_factory=dict)
    joined: str | None = None
    begun: bool = False
    gone: threading.Event = field(default_factory=threading.Event)

    def start(
        self, name: str, token: str, cpus: int, gpus: int | None, head: str | None = None
    ) -> None:
        self.begun, self.joined = True, head

    def address(self) -> str | None:
        return self.joined or "10.0.0.1:5"

    def has_started(self) -> bool:
        return self.begun

    def is_gone(self) -> bool:
        return self.gone.is_set()

    def last_words(self) -> str:
        return "it said no more"


@dataclass
class Rank:
    """One rank in a thread of its own."""

    settings: Settings
    ray: FakeRay
    outcome: list[int | Exception] = field(default_factory=list)

    def run(self) -> None:
        try:
            self.outcome.append(play(self.settings))
        except UserError as error:
            self.outcome.append(error)


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Rank, threading.Thread]]]:
    monkeypatch.setattr(node, "POLL_SECONDS", 0.01)
    rays: dict[int, FakeRay] = {}

    @contextmanager
    def fake(interface: str | None) -> Iterator[FakeRay]:
        yield rays[threading.get_ident()]

    monkeypatch.setattr(node, "ray_node", fake)
    threads: list[threading.Thread] = []

    def begin(
        rank: int, nodes: int, *command: str, deadline: float = 60
    ) -> tuple[Rank, threading.Thread]:
        meet = tmp_path / "meet"
        one = Rank(Settings(rank, nodes, meet, deadline, 1, None, None, command), FakeRay())

        def work() -> None:
            rays[threading.get_ident()] = one.ray
            one.run()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        threads.append(thread)
        return one, thread

    yield begin
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(("end", "status"), [("exit 5", 5), ("kill -9 $$", 137), ("true", 0)])
def test_H6_the_commands_end_is_the_end_of_all_and_its_status_that_of_rank_0(
    end: str, status: int, start: Callable[..., tuple[Rank, threading.Thread]], tmp_path: Path
) -> None:
    note = tmp_path / "note"
    command = ("sh", "-c", f'echo "$RAY_ADDRESS" >{note}; {end}')
    second, other = start(1, 2, *command)
    first, thread = start(0, 2, *command)
    thread.join(60)
    other.join(60)
    assert first.outcome == second.outcome == [status]
    assert second.ray.joined == "10.0.0.1:5"
    assert note.read_text() == "10.0.0.1:5\n"
    assert not (tmp_path / "meet" / "head.json").exists()


def test_N6_machines_that_do_not_come_are_named_in_time(
    start: Callable[..., tuple[Rank, threading.Thread]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    second, other = start(2, 4, "true")
    first, thread = start(0, 4, "touch", str(tmp_path / "ran"), deadline=10.0)
    thread.join(60)
    assert first.outcome == [1]
    other.join(60)
    assert second.outcome == [1]
    assert "2 of 4 machines came within 10 s, ranks 1, 3 did not" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_N6_a_rank_without_rank_0_ends_in_time(
    start: Callable[..., tuple[Rank, threading.Thread]], capsys: pytest.CaptureFixture[str]
) -> None:
    lonely, thread = start(1, 2, "true", deadline=0.2)
    thread.join(60)
    assert (lonely.outcome, lonely.ray.begun) == ([1], False)
    assert "Rank 0 did not answer rank 1 within 0.2 s" in capsys.readouterr().err


def test_H6_a_machine_whose_ray_is_gone_without_word_from_rank_0_says_so(
    start: Callable[..., tuple[Rank, threading.Thread]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(node, "END_SECONDS", 0.1)
    stop = tmp_path / "stop"
    wait = f"while [ ! -e {stop} ]; do sleep 0.05; done"
    first, leader = start(0, 2, "sh", "-c", wait)
    second, thread = start(1, 2)
    while second.ray.joined is None:
        threading.Event().wait(0.01)
    second.ray.gone.set()
    thread.join(60)
    assert second.outcome == [1]
    assert "Ray ended on rank 1, or its head on rank 0 is gone: it said no more" in (
        capsys.readouterr().err
    )
    stop.touch()
    leader.join(60)
    assert first.outcome == [0]


def test_a_command_that_cannot_be_run_is_one_sentence(
    start: Callable[..., tuple[Rank, threading.Thread]],
) -> None:
    first, thread = start(0, 1, "/nowhere/python")
    thread.join(60)
    (error,) = first.outcome
    assert isinstance(error, UserError)
    assert "/nowhere/python cannot be run" in str(error)


def test_N5_an_address_that_every_machine_has_is_refused_on_another_one() -> None:
    head = Head("start", "127.0.0.1:5", "secret", "one")
    check_reach(head, "one")
    check_reach(replace(head, address="10.0.0.1:5"), "other")
    with pytest.raises(UserError, match=r"at 127\.0\.0\.1:5, where other machines cannot"):
        check_reach(head, "other")


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ((1, 2), {}, (1, 2)),
        ((None, None), {"SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "4"}, (3, 4)),
        ((None, 2), {}, "--rank is needed"),
        ((0, None), {}, "--nodes is needed"),
        ((2, 2), {}, "--rank=2 must be from 0 to 1"),
    ],
)
def test_N1_rank_and_nodes_are_those_given_else_those_of_slurm(
    given: tuple[int | None, int | None],
    environ: dict[str, str],
    expected: tuple[int, int] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            rank_and_nodes(*given)
    else:
        assert rank_and_nodes(*given) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the command stands behind --"),
        (["--deadline", "0", "--", "true"], "--deadline must be above 0, not 0"),
        (["--cpus", "0", "--", "true"], "--cpus must be above 0, not 0"),
        (["--gpus", "-1", "--", "true"], "--gpus must not be negative, not -1"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from delta_belief_rl.cli.main import main

    head = [verb.VERB.name, "--rank", "0", "--nodes", "1", "--meet", str(tmp_path / "meet")]
    assert main([*head, *words]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "meet").exists()
