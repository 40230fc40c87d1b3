"""Estimates for vLLM engines (``config.engine_memory``) and how they are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from delta_belief_rl.cluster.footprints import Footprint, tell_footprints
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.engine_memory import judge_engine_needs, policy_engine_needs
from delta_belief_rl.config.facts import ModelShape
from delta_belief_rl.config.memory import GIB
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.obs.jsonl import read_records

QWEN_14B = ModelShape(5120, 40, 40, 8, 128, 17408, 151936, tied=False)
QWEN_1B = ModelShape(2048, 28, 16, 8, 128, 6144, 151936, tied=True)


def config(*words: str) -> RunConfig:
    return load_config(["experiment=paper_qwen1.7b", *words])[0]


def test_weights_of_the_published_judge_are_those_of_the_model_cards() -> None:
    """14.8 billion weights of 2 bytes; the AWQ checkpoint is about 10 GB."""
    plain = judge_engine_needs(config(), QWEN_14B)
    assert plain is not None
    assert plain.weights == QWEN_14B.parameters() * 2
    assert plain.weights / GIB == pytest.approx(27.5, abs=0.1)
    quantised = judge_engine_needs(config("judge=qwen3_14b_awq"), QWEN_14B)
    assert quantised is not None
    assert quantised.weights / 1e9 == pytest.approx(9.96, abs=0.05)
    assert quantised.adapters == 0


def test_two_gpus_of_an_engine_hold_half_each_and_heads_are_never_split() -> None:
    one = judge_engine_needs(config(), QWEN_14B)
    words = ("judge_rollout.ngpus=16", "judge_rollout.rollout.tensor_model_parallel_size=16")
    many = judge_engine_needs(config(*words), QWEN_14B)
    assert one is not None
    assert many is not None
    assert many.weights == one.weights / 16
    assert many.cache_per_token == one.cache_per_token / 8


def test_the_policys_engine_has_room_for_one_adapter() -> None:
    needs = policy_engine_needs(config(), QWEN_1B)
    assert needs is not None
    assert needs.adapters == QWEN_1B.lora_parameters(64) * 2
    assert needs.cache_per_token == 2 * 28 * 8 * 128 * 2


def test_other_engines_and_unknown_models_have_no_estimate() -> None:
    assert policy_engine_needs(config(), None) is None
    assert judge_engine_needs(load_config(["experiment=quickstart"])[0], QWEN_1B) is None


def test_M1_what_an_engine_holds_is_told_against_the_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = policy_engine_needs(config(), QWEN_1B)
    assert needs is not None
    needs = replace(needs, weights=3.0 * GIB)
    small = {"weights": GIB, "cache": GIB, "reserved": 2 * GIB}
    large = {"weights": 3 * GIB, "cache": 8 * GIB, "reserved": 20 * GIB}
    on_cpu = {"weights": 5, "cache": 5, "reserved": 0}
    log = EventLog(tmp_path / "events.jsonl", "run")
    tell_footprints(
        [Footprint("judge 0", [small, large], needs), Footprint("judge 1", [on_cpu], None)], log
    )
    assert capsys.readouterr().err == (
        "judge 0: weights 3.0 GiB (estimated 3.0 GiB), cache 8.0 GiB, 20.0 GiB reserved at most\n"
    )
    (event,) = read_records(tmp_path / "events.jsonl")
    assert event["workers"] == [small, large]
