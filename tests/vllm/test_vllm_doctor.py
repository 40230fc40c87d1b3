"""The doctor on a vLLM engine: every check is made and holds, and each fault fails its own."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed: use make test-vllm")

import tiny
from owner import all_gone, engine_pids
from vllm.lora.request import LoRARequest

from delta_belief_rl.cli import doctor as verb
from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.engines.vllm_args import write_adapter
from delta_belief_rl.engines.vllm_engine import VllmEngine
from delta_belief_rl.engines.vllm_step import VllmStepEngine
from delta_belief_rl.trainer import doctor
from delta_belief_rl.trainer.doctor_engine import DoctorSettings, Patient, admitted
from delta_belief_rl.types import UserError
from tests.unit.test_doctor import NAMES, failed

SETTINGS = DoctorSettings(games=2, turns=4)
POLICY = (
    "experiment=quickstart",
    "actor_rollout_ref.num_threads=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.deterministic=false",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.max_num_batched_tokens=512",
    f"actor_rollout_ref.rollout.kv_cache_memory_bytes={64 << 20}",
)
ENGINE_NAMES = [name for name in NAMES if name.split("_")[0] in doctor.ENGINE_CHECKS]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def patient() -> Iterator[Patient]:
    """The packaged agent in a training rank and in a vLLM engine, from the run's own settings."""
    cfg, plan, _ = prepare(POLICY)
    with admitted(verb._located(cfg), plan.device, plan.threads, SETTINGS) as patient:
        yield patient


def examined(
    patient: Patient, capsys: pytest.CaptureFixture[str], *skip: str, status: int = 0
) -> dict[str, dict[str, Any]]:
    """What the command finds, by name; its patient is in place already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "admitted", lambda *_: nullcontext(patient))
        words = [word for name in skip for word in ("--skip", name)]
        assert cli(["doctor", "--json", *POLICY, *words]) == status
    found = json.loads(capsys.readouterr().out)
    return {check["name"]: check for check in found["checks"]}


def test_L9_L12_L13_B1_P1_the_packaged_agent_passes_every_check_on_vllm(
    patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(patient.engine, VllmStepEngine)
    checks = examined(patient, capsys)
    assert list(checks) == NAMES
    assert "vllm" in checks["versions_libraries"]["note"]
    nats = {name: check for name, check in checks.items() if check["unit"] == "nats"}
    assert len(nats) == 7
    for name, check in nats.items():
        assert 0 <= check["value"] < check["bound"], name
    # Two programs add in different orders: no difference at all would be one program asked twice.
    assert checks["sampled_logp_T1"]["value"] > 0
    assert checks["belief_engine"]["value"] > 0
    assert re.match(r".*; [1-9]\d* of \d+ tokens were cached", checks["prefix_after_sync"]["note"])


# --- faults: (what goes wrong, checks that must fail)


def ignores_adapters(patch: pytest.MonkeyPatch) -> None:
    async def load(self: VllmEngine, state: Any, version: int) -> None:
        self._version = version

    patch.setattr(VllmEngine, "load_adapter", load)


def reads_the_cache_of_the_adapter_before(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """An adapter that takes the place of another under its name, and no cache is dropped."""

    async def load(self: VllmEngine, state: Any, version: int) -> None:
        assert self._lora is not None
        write_adapter(folder, state, self._lora)
        await self._llm.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
        self._adapter, self._version = LoRARequest("policy", 1, str(folder)), version

    patch.setattr(VllmEngine, "load_adapter", load)


def scores_another_text(patch: pytest.MonkeyPatch) -> None:
    real = VllmEngine.score_all

    async def score(self: VllmEngine, requests: Any) -> list[Any]:
        return [tail + 0.1 for tail in await real(self, requests)]

    patch.setattr(VllmEngine, "score_all", score)


FAULTS: dict[Callable[..., None], set[str]] = {
    ignores_adapters: {
        *("adapter_probe", "sampled_logp_T0.7", "sampled_logp_T1"),
        *("belief_engine", "prefix_after_sync"),
    },
    reads_the_cache_of_the_adapter_before: {"prefix_after_sync"},
    scores_another_text: {"belief_engine"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_L1_L13_B4_a_fault_of_vllm_fails_the_check_that_is_for_it(
    fault: Callable[..., None],
    patient: Patient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    more = (tmp_path,) if fault is reads_the_cache_of_the_adapter_before else ()
    fault(monkeypatch, *more)
    found = examined(patient, capsys, "versions", "templates", "judge", status=1)
    assert set(failed(found)) == FAULTS[fault]


def test_H2_an_engine_that_dies_is_a_check_that_fails(
    patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one here: it costs the engine."""
    os.kill(engine_pids(os.getpid())[0], signal.SIGKILL)
    # Shown although the group was left out: nothing else says why the others are missing.
    found = examined(patient, capsys, "versions", "templates", "judge", "sampled", status=1)
    assert failed(found) == ["sampled_tokens"]
    assert "vLLM failed" in found["sampled_tokens"]["note"]
    assert not set(found) & {name for name in ENGINE_NAMES if name != "adapter_version"}


# --- what needs an engine of its own


def test_a_judge_on_vllm_is_asked_for_plain_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = [word for name in doctor.CHECKS if name != "judge" for word in ("--skip", name)]
    judge = [
        "judge_rollout.name=vllm",
        f"judge_rollout.model.path={tiny.save_model(tmp_path, 1024)}",
        "judge_rollout.cot=false",
        # Which takes babble for an answer.
        "judge_rollout.parser=published",
        "judge_rollout.rollout.prompt_length=1000",
        "judge_rollout.rollout.response_length=8",
        "judge_rollout.rollout.max_num_seqs=16",
        "judge_rollout.rollout.max_num_batched_tokens=1024",
        f"judge_rollout.rollout.kv_cache_memory_bytes={64 << 20}",
    ]
    assert cli(["doctor", "--json", "experiment=quickstart", *judge, *left]) == 1
    (check,) = [
        c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"][:5] == "judge"
    ]
    # A model without knowledge knows no facts.
    assert check["name"] == "judge_facts"
    assert check["passed"] is False
    assert 0.2 < check["value"] <= 1.0
    assert ", 0 without an answer" in check["note"]
    assert "attention" in check["note"]
    assert all_gone(engine_pids(os.getpid()), 20.0)


def test_M1_an_engine_that_does_not_start_is_one_sentence(tmp_path: Path) -> None:
    """The packaged agent has 1024 positions."""
    long = ("data.max_prompt_length=4000", "actor_rollout_ref.rollout.max_num_batched_tokens=8192")
    cfg, plan, _ = prepare((*POLICY, *long))
    with (
        pytest.raises(UserError, match=r"^vLLM [^\n]* did not start with [^\n]*1024[^\n]*\.$"),
        admitted(verb._located(cfg), plan.device, plan.threads, SETTINGS),
    ):
        pass
    assert all_gone(engine_pids(os.getpid()), 20.0)
