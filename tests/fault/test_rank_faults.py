"""Training ranks that die or hang: one sentence that names the rank, and never a hang."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.exceptions import ActorDiedError, RayTaskError

from delta_belief_rl.cluster import ranks
from delta_belief_rl.cluster.groups import RayPolicyGroup
from delta_belief_rl.cluster.ranks import RankFailure, RankLimits, ask_all, explain
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.trainer import checkpoint
from delta_belief_rl.types import UserError
from tests.rank_faults import fail_in, start_pair
from tests.runs import play, state_of, words, write_world
from tests.unit import training_fakes as fakes

pytestmark = pytest.mark.fault

TIMEOUT = 8.0
"""Seconds that a collective of these tests may take where a rank hangs."""


# --- real ranks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(RayInit(), 4, 0):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.save_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.mark.slow
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("phase", "fault", "words_of_it"),
    [
        ("score", "kill", "died while games were scored"),
        ("update", "kill", "died in the update of the policy"),
        ("update", "hang", f"hangs in the update of the policy: the others waited {TIMEOUT:g} s"),
    ],
)
def test_L11_a_rank_that_is_killed_or_hangs_is_named_with_its_phase(
    phase: str,
    fault: str,
    words_of_it: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "GRACE", 3.0)
    patience = TIMEOUT if fault == "hang" else 60.0
    pair = start_pair(fakes.settings_of(model), patience, tmp_path)
    try:
        outcome = fail_in(pair, phase, fault, rank=1)
    finally:
        pair.end()
    failure = outcome.failure
    assert str(failure).startswith(f"Training rank 1 of 2 {words_of_it}")
    assert "start the run again" in str(failure)
    assert "\n" not in str(failure)
    assert (failure.ranks, failure.phase) == ((1,), phase)
    assert outcome.seconds < 60
    if fault == "hang":
        assert outcome.seconds >= TIMEOUT
        # The log says where it hangs.
        assert "in fail" in (tmp_path / "rank_1.log").read_text()


# --- what ranks say, and what it means ------------------------------------------------------------


class Rank:
    """A rank that answers after some seconds, or raises, or never answers (None)."""

    def __init__(self, seconds: float | None = 0.0, error: BaseException | None = None) -> None:
        self._seconds, self._error = seconds, error

    @property
    def score(self) -> Rank:
        return self

    async def remote(self, value: int) -> int:
        await asyncio.sleep(3600 if self._seconds is None else self._seconds)
        if self._error is not None:
            raise self._error
        return value


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("score", str(cause), cause)


CLOSED = task_error(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
LATE = task_error(RuntimeError("Timed out waiting 4000ms for recv operation to complete"))
LIMITS = RankLimits(timeout=0.2)


def ask(*workers: Rank, limits: RankLimits = LIMITS) -> list[int]:
    return asyncio.run(ask_all(workers, "score", [(i,) for i in range(len(workers))], limits))


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.2)


@pytest.mark.usefixtures("_short_grace")
def test_answers_come_in_the_order_of_the_ranks() -> None:
    assert ask(Rank(0.1), Rank(0.0), Rank(0.05)) == [0, 1, 2]
    assert ask(Rank(0.1), limits=RankLimits()) == [0]


@pytest.mark.usefixtures("_short_grace")
@pytest.mark.parametrize(
    ("workers", "blamed", "part"),
    [
        # The one that is dead may be the second to tell.
        ([Rank(0.0, CLOSED), Rank(0.1, ActorDiedError())], (1,), "rank 1 of 2 died while games"),
        ([Rank(None), Rank(0.0, ActorDiedError())], (1,), "rank 1 of 2 died while games"),
        ([Rank(0.0, LATE), Rank(None)], (1,), "rank 1 of 2 hangs while games"),
        ([Rank(0.0, LATE), Rank(None), Rank(None)], (1, 2), "ranks 1, 2 of 3 hang while games"),
        ([Rank(0.0), Rank(None)], (1,), "rank 1 of 2 hangs while games"),
        # It woke up too late and found nobody.
        ([Rank(0.0, LATE), Rank(0.1, CLOSED)], (1,), "rank 1 of 2 hangs while games"),
        ([Rank(0.0, LATE), Rank(0.0, LATE)], (), "All training ranks hang while games"),
        ([Rank(0.0, CLOSED), Rank(0.0, CLOSED)], (0,), "rank 0 of 2 lost the connection"),
        ([Rank(0.0, ActorDiedError())], (0,), "rank 0 of 1 died while games were scored"),
    ],
)
def test_L11_the_rank_that_is_named_is_the_one_that_was_waited_for(
    workers: list[Rank], blamed: tuple[int, ...], part: str
) -> None:
    with pytest.raises(RankFailure) as caught:
        ask(*workers)
    assert caught.value.ranks == blamed
    assert part in str(caught.value)
    assert str(caught.value).count(". ") == 0


@pytest.mark.usefixtures("_short_grace")
def test_U1_too_little_memory_of_a_rank_is_a_sentence_with_a_cure() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(RankFailure) as caught:
        ask(Rank(None), Rank(0.0, task_error(full)))
    assert caught.value.ranks == (1,)
    assert str(caught.value) == (
        "Training rank 1 of 2 ran out of GPU memory while games were scored (CUDA out of memory; "
        "Tried to allocate 2.00 GiB): lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or "
        "leave it more of the GPU with a smaller gpu_memory_utilization of engine and judge."
    )


@pytest.mark.usefixtures("_short_grace")
@pytest.mark.parametrize("error", [KeyError("typo"), UserError("No adapter: add one.")])
def test_H2_a_ranks_own_error_is_raised_as_it_is(error: Exception) -> None:
    with pytest.raises(RayTaskError) as caught:
        ask(Rank(0.0, CLOSED), Rank(0.1, task_error(error)))
    assert caught.value.cause is error


@pytest.mark.parametrize(
    ("text", "blamed"),
    [
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)", (1,)),
        ("Segmentation fault", (0,)),
    ],
)
def test_L11_a_process_that_nccl_aborted_for_waiting_is_told_from_one_that_crashed(
    text: str, blamed: tuple[int, ...], tmp_path: Path
) -> None:
    logs = (tmp_path / "rank_0.log", tmp_path / "rank_1.log")
    logs[0].write_text(f"something\n{text}\n")
    limits = RankLimits(600.0, logs)
    failure = explain("update", {0: ActorDiedError()}, [1], 2, seconds=601.0, limits=limits)
    assert isinstance(failure, RankFailure)
    assert failure.ranks == blamed
    assert str(logs[blamed[0]]) in str(failure)
    # The one that was waited for goes down with the one that waited.
    logs[1].write_text("Received a dump signal due to a collective timeout from rank 0")
    both = {0: ActorDiedError(), 1: ActorDiedError()}
    together = explain("update", both, [], 2, seconds=601.0, limits=limits)
    assert isinstance(together, RankFailure)
    assert together.ranks == (blamed if blamed == (1,) else (0, 1))
    assert ("hangs" in str(together)) == (blamed == (1,))
    # Within the time nobody is late, whatever an older line says.
    early = explain("update", {0: ActorDiedError()}, [1], 2, seconds=5.0, limits=limits)
    assert isinstance(early, RankFailure)
    assert early.ranks == (0,)


def test_each_start_writes_to_a_log_of_its_own(tmp_path: Path) -> None:
    # What NCCL said before a restart must not explain what happens after it.
    log = tmp_path / "logs" / "rank_0.log"
    for text in (b"first start\n", b"second start\n"):
        stderr = os.dup(2)
        try:
            ranks.write_errors_to(log)
            os.write(2, text)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    assert log.read_text() == "second start\n"
    assert log.with_name("rank_0.log.old").read_text() == "first start\n"


def test_errors_of_the_distributed_library_are_told_by_their_type() -> None:
    error = task_error(dist.DistBackendError("remote process exited"))
    failure = explain("update", {0: error, 1: ActorDiedError()}, [], 2, 1.0, RankLimits(60.0))
    assert isinstance(failure, RankFailure)
    assert failure.ranks == (1,)
    assert math.isinf(RankLimits().timeout)


# --- the run --------------------------------------------------------------------------------------


def test_L11_R5_a_run_whose_rank_dies_ends_with_one_sentence_and_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, world = tmp_path / "run", write_world(tmp_path / "tiny.yaml")
    real = RayPolicyGroup.update

    async def dies(self: Any, batch: Any, plan: Any, step: int) -> dict[str, float]:
        if step == 2:
            await ask_all([Rank(0.0, ActorDiedError())], "update", [(0,)], RankLimits())
        return await real(self, batch, plan, step)

    monkeypatch.setattr(RayPolicyGroup, "update", dies)
    monkeypatch.setattr(Rank, "update", Rank.score, raising=False)
    command = words(out, world, "trainer.val_before_train=false", "trainer.final_test=false")
    capfd.readouterr()
    status, _ = play(command)
    assert status == 1
    shown = capfd.readouterr().err
    assert "Training rank 0 of 1 died in the update of the policy" in shown
    assert "Traceback" not in shown
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (failed,) = [event for event in events if event["kind"] == "rank_failed"]
    assert failed["ranks"] == [0]
    saved = checkpoint.find_latest(out / "checkpoints")
    assert saved is not None
    assert saved.step == 1
    assert state_of(out)["run"]["step"] == 1
