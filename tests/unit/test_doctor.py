"""The doctor finds a healthy configuration healthy, and each fault by the check that is for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_belief_rl.cli.doctor import table
from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.versions import Window
from delta_belief_rl.engines.base import Completion, FinishReason
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer import doctor
from delta_belief_rl.trainer.crosscheck import BOUNDS
from delta_belief_rl.trainer.doctor import CHECKS
from delta_belief_rl.trainer.doctor_engine import MOVED, Check, DoctorSettings
from delta_belief_rl.types import Verdict

ROOT = Path(__file__).resolve().parents[2]
THREADS = "actor_rollout_ref.num_threads=1"
QUICK = ("experiment=quickstart", THREADS, "--games", "2", "--turns", "2")
NAMES = [
    *("versions_libraries", "versions_device"),
    *("templates_render", "templates_vocabulary", "templates_length"),
    *("adapter_version", "adapter_checksum", "adapter_moved", "adapter_probe"),
    *("sampled_logp_T0.7", "sampled_logp_T1"),
    *("belief_naive", "belief_engine", "belief_cached"),
    "prefix_after_sync",
    "judge_table",
]


def examined(
    capsys: pytest.CaptureFixture[str], *more: str, status: int = 0
) -> dict[str, dict[str, Any]]:
    """The doctor's checks of the quick start, by name."""
    assert cli(["doctor", "--json", *QUICK, *more]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is (status == 0)
    return {check["name"]: check for check in found["checks"]}


def failed(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, check in checks.items() if check["passed"] is False]


def test_B11_a_healthy_configuration_passes_every_check_far_inside_its_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = examined(capsys)
    assert list(checks) == NAMES
    nats = {name: check for name, check in checks.items() if check["unit"] == "nats"}
    assert len(nats) == 7
    for name, check in nats.items():
        assert 0 <= check["value"] < check["bound"] / 10, name
    assert checks["adapter_moved"]["value"] >= checks["adapter_moved"]["bound"]
    assert checks["adapter_version"]["value"] == 1


def test_the_page_explains_every_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    for name in (*NAMES, "judge_facts"):
        assert f"`{name.split('_T')[0]}" in page, name


def test_every_bound_is_well_below_what_an_engine_without_the_adapter_differs_by() -> None:
    assert max(bound.mean for bound in BOUNDS.values()) < MOVED / 2


# --- faults: (what goes wrong, checks that must fail)


def ignores_adapters(patch: pytest.MonkeyPatch) -> None:
    def load(self: HFEngine, state: Any, version: int) -> None:
        self._version = version

    patch.setattr(HFEngine, "load_adapter", load)


def keeps_its_version(patch: pytest.MonkeyPatch) -> None:
    real = HFEngine.load_adapter
    patch.setattr(HFEngine, "load_adapter", lambda self, state, _: real(self, state, 0))


def writes_into_the_adapter(patch: pytest.MonkeyPatch) -> None:
    real = HFEngine.load_adapter

    def load(self: HFEngine, state: Any, version: int) -> None:
        real(self, state, version)
        next(iter(state.values()))[...] += 1.0

    patch.setattr(HFEngine, "load_adapter", load)


def forgets_nothing_at_a_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HFEngine, "_drop_sessions", lambda self: None)


def reports_raw_log_probs(patch: pytest.MonkeyPatch) -> None:
    """Log-probs as if the temperature had not divided the logits; right at temperature 1."""
    real = HFEngine.step

    def step(self: HFEngine, new: Sequence[Any]) -> list[Completion]:
        kinds = {request.session: request.sampling.temperature for request in new}
        table = self.__dict__.setdefault("_temperatures", {})
        table.update(kinds)
        return [
            replace(c, logprobs=tuple(x * table[c.session] for x in c.logprobs))
            for c in real(self, new)
        ]

    patch.setattr(HFEngine, "step", step)


def tails(patch: pytest.MonkeyPatch, wrong: Callable[[str], bool]) -> None:
    real = HFEngine.score_tails

    def score(self: HFEngine, requests: Sequence[Any]) -> list[Any]:
        found = real(self, requests)
        return [
            logp + 0.1 * wrong(request.session)
            for request, logp in zip(requests, found, strict=True)
        ]

    patch.setattr(HFEngine, "score_tails", score)


def believes_otherwise(patch: pytest.MonkeyPatch) -> None:
    tails(patch, lambda session: True)


def believes_otherwise_from_its_cache(patch: pytest.MonkeyPatch) -> None:
    tails(patch, lambda session: session.startswith("doctor/own"))


def counts_branches_wrongly(patch: pytest.MonkeyPatch) -> None:
    from delta_belief_rl.trainer import doctor_engine

    real = doctor_engine.naive_scores

    def scores(*args: Any) -> list[Any]:
        return [replace(one, beliefs=one.beliefs + 0.1) for one in real(*args)]

    patch.setattr(doctor_engine, "naive_scores", scores)


def samples_nothing(patch: pytest.MonkeyPatch) -> None:
    def step(self: HFEngine, new: Sequence[Any]) -> list[Completion]:
        return [
            Completion(one.session, (), (), FinishReason.ERROR, 1, "the logits are not finite")
            for one in new
        ]

    patch.setattr(HFEngine, "step", step)


def says_the_opposite(patch: pytest.MonkeyPatch) -> None:
    real = WorldJudge.answer
    turned = {Verdict.YES: Verdict.NO, Verdict.NO: Verdict.YES}

    def answer(self: WorldJudge, requests: list[Any]) -> list[Any]:
        return [replace(r, verdict=turned.get(r.verdict, r.verdict)) for r in real(self, requests)]

    patch.setattr(WorldJudge, "answer", answer)


def cuts_long_texts(patch: pytest.MonkeyPatch) -> None:
    real = ChatFormat.encode
    patch.setattr(ChatFormat, "encode", lambda self, text: real(self, text)[-512:])


def is_too_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "needed", lambda cfg: (Window("torch", (9, 0), (10, 0), ("torch",)),))


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], set[str]] = {
    ignores_adapters: {
        *("adapter_probe", "sampled_logp_T0.7", "sampled_logp_T1"),
        *("belief_engine", "prefix_after_sync"),
    },
    keeps_its_version: {"adapter_version", "prefix_after_sync"},
    writes_into_the_adapter: {"adapter_checksum"},
    forgets_nothing_at_a_sync: {"prefix_after_sync"},
    reports_raw_log_probs: {"sampled_logp_T0.7"},
    believes_otherwise: {"belief_engine"},
    believes_otherwise_from_its_cache: {"belief_cached"},
    counts_branches_wrongly: {"belief_naive"},
    samples_nothing: {"sampled_tokens"},
    says_the_opposite: {"judge_table"},
    cuts_long_texts: {"templates_length"},
    is_too_old: {"versions_libraries"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_L1_L9_L12_L13_B1_B4_P1_T2_a_fault_fails_the_check_that_is_for_it(
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault(monkeypatch)
    judged = fault is says_the_opposite
    left = [name for name in CHECKS if (name != "judge") is judged]
    skip = [word for name in left for word in ("--skip", name)]
    assert set(failed(examined(capsys, *skip, status=1))) == FAULTS[fault]


# --- the command


def test_a_group_that_is_skipped_is_shown_as_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    engine = [word for name in CHECKS if name != "judge" for word in ("--skip", name)]
    checks = examined(capsys, *engine)
    assert checks["judge_table"]["passed"] is True
    left = {name for name, check in checks.items() if check["passed"] is None}
    assert left == set(CHECKS) - {"judge"}


def test_the_table_shows_the_number_beside_its_bound() -> None:
    text = table(
        [
            Check("belief_engine", False, 0.25, 1e-4, "nats", "9 numbers differ"),
            Check("templates_render", True, note="equal"),
            Check("judge", None, note="left out by --skip"),
        ]
    )
    lines = text.splitlines()
    assert lines[1].split() == [
        *("FAILED", "belief_engine", "0.25", "0.0001", "nats"),
        *("9", "numbers", "differ"),
    ]
    assert lines[2].split() == ["ok", "templates_render", "equal"]
    assert lines[3].startswith("left out  judge")
    assert lines[4].startswith("1 of 2 checks hold")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--skip", "jugde"], "There is no check 'jugde'"),
        (["--games", "0"], "at least one game"),
        (["actor_rollout_ref.model.path=/nowhere"], "no tokenizer folder '/nowhere'"),
    ],
)
def test_what_cannot_be_examined_ends_with_status_two_and_one_sentence(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["doctor", *QUICK, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    sentence = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(sentence) == 1
    assert expected in sentence[0]


def test_what_the_doctor_has_no_check_of_is_named_in_the_table() -> None:
    cfg, _ = load_config(["experiment=quickstart"])
    ref = cfg.actor_rollout_ref
    odd: Any = replace(
        cfg,
        actor_rollout_ref=replace(ref, rollout=replace(ref.rollout, name="other")),
        judge_rollout=replace(cfg.judge_rollout, name="fake"),
    )
    found = doctor.examine(odd, "cpu", 1, DoctorSettings(skip=("versions",)))
    notes = {check.name: check.note for check in found if check.passed is None}
    assert len(notes) == len(found) == len(CHECKS)
    assert notes.pop("judge").endswith("judge_rollout.name=fake")
    assert notes.pop("versions") == "left out by --skip"
    assert all(note.endswith("actor_rollout_ref.rollout.name=other") for note in notes.values())


def test_standard_output_holds_the_result_alone() -> None:
    """Processes that the doctor starts write where they like."""
    code = (
        "import os, sys\n"
        "from delta_belief_rl.cli import doctor\n"
        "with doctor._told_apart():\n"
        "    os.system('echo of a child')\n"
        "    print('of a library')\n"
        "print('the result')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "the result\n"
    assert done.stderr.split() == ["of", "a", "child", "of", "a", "library"]


def test_a_number_that_is_none_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    def nan(self: HFEngine, texts: Sequence[Any]) -> list[Any]:
        return [np.full(len(text), np.nan) for text in texts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFEngine, "score", nan)
        checks = examined(capsys, "--skip", "judge", status=1)
    assert failed(checks) == ["adapter_probe"]
    assert checks["adapter_probe"]["value"] is None
