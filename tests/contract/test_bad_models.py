"""Models that cannot be served as asked: one sentence with status 2, on one, two and eight GPUs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import train
from delta_belief_rl.cluster import app
from delta_belief_rl.config import availability, facts
from delta_belief_rl.config.gpus import Gpu
from delta_belief_rl.config.memory import GIB
from tests.models import AWQ, COMPRESSED, QWEN_14B, awq_tensors, compressed_tensors, write_model
from tests.runs import ROOT, words, write_world

AGENT = ROOT / "delta_belief_rl" / "assets" / "agent"
LAYOUTS = {
    8: ("actor_rollout_ref.ngpus=1", "judge_rollout.ngpus=7"),
    2: ("actor_rollout_ref.ngpus=1", "judge_rollout.ngpus=1"),
    1: (
        "actor_rollout_ref.ngpus=1",
        "judge_rollout.ngpus=1",
        "judge_rollout.share_actor_gpu=true",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        "judge_rollout.rollout.gpu_memory_utilization=0.3",
    ),
}
"""Pools by the number of GPUs of the machine."""

Refuse = Callable[..., str]


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A start that gets as far as Ray has missed its mistake."""

    def reached(*_args: Any) -> None:
        raise AssertionError("Ray was about to start")

    monkeypatch.setattr(app, "ray_session", reached)
    monkeypatch.setattr(app, "exit_on_sigterm", lambda: None)
    # vLLM is not installed where these tests run, and what is said of it is tested elsewhere.
    monkeypatch.setattr(app, "check_versions", lambda config: None)
    monkeypatch.setattr(availability, "GAPS", ())
    yield
    assert not ray.is_initialized()


@pytest.fixture
def refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Refuse:
    """Start a run on a machine of some GPUs; returns the sentence that it must end with."""
    world = write_world(tmp_path / "world.yaml")

    def start(gpus: int, judge: Path | str, *more: str, total: float = 80 * GIB) -> str:
        monkeypatch.setattr(facts, "available_gpus", lambda: gpus)
        found = tuple(Gpu(i, "A100", int(total), int(total), (8, 0)) for i in range(gpus))
        for module in (facts, app):
            monkeypatch.setattr(module, "read_gpus", lambda: found)
        command = [
            *words(tmp_path / "run", world),
            "actor_rollout_ref.device=auto",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.deterministic=false",
            "judge_rollout.name=vllm",
            f"judge_rollout.model.path={judge}",
            "judge_rollout.rollout.tensor_model_parallel_size=1",
            *LAYOUTS[gpus],
            *more,
        ]
        capfd.readouterr()
        assert train.main(command) == 2
        shown = capfd.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("train.py: ")
        left = [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert set(left) <= {"run_id"}
        # The plan says the same, where it needs no look at the GPUs themselves.
        assert train.main(["--dry-run", *command]) == 0
        if "GPU 0 (" not in line and "GPU 1 (" not in line:
            assert line.removeprefix("train.py: ") in capfd.readouterr().out
        return line

    return start


def ready(folder: Path, **entries: Any) -> Path:
    """A judge that can be read, with a tokenizer; ``entries`` claim other sizes."""
    shutil.copytree(AGENT, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)  # one entry for each of its own layers
    (folder / "config.json").write_text(json.dumps({**config, **entries}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("gpus", LAYOUTS)
def test_U1_a_judge_that_is_not_there_is_refused(gpus: int, refuse: Refuse, tmp_path: Path) -> None:
    assert "no-such does not exist" in refuse(gpus, tmp_path / "no-such")
    (tmp_path / "empty").mkdir()
    assert "empty holds no model (it has no config.json)" in refuse(gpus, tmp_path / "empty")


@pytest.mark.parametrize("gpus", LAYOUTS)
@pytest.mark.parametrize(
    ("tensors", "quantised", "named", "part"),
    [
        (awq_tensors(group=64), AWQ, "awq", "says groups of 128 but the scales of"),
        (compressed_tensors(), COMPRESSED, "awq", "says compressed-tensors"),
        (compressed_tensors(), AWQ, "awq_marlin", "says awq but its weights hold no qweight"),
        (awq_tensors(), AWQ, "awq", "awq computes in float16"),
    ],
)
def test_Q1_a_quantised_judge_that_is_not_what_it_says_is_refused(
    gpus: int,
    tensors: Any,
    quantised: Any,
    named: str,
    part: str,
    refuse: Refuse,
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "judge", tensors, quantised)
    sentence = refuse(gpus, folder, f"judge_rollout.rollout.quantization={named}")
    assert part in sentence
    assert str(folder) in sentence


def test_a_split_that_does_not_divide_the_judge_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "judge", **QWEN_14B)
    size = "judge_rollout.rollout.tensor_model_parallel_size=7"
    assert "=7 cannot split" in refuse(8, folder, size)
    six = ("judge_rollout.ngpus=6", "judge_rollout.rollout.tensor_model_parallel_size=6")
    assert "its 40 attention heads: set it to 1 or 2." in refuse(8, folder, *six)


def test_a_split_that_does_not_divide_the_policy_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    heads = json.loads((AGENT / "config.json").read_text())["num_attention_heads"]
    three = (
        "actor_rollout_ref.ngpus=3",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
        "judge_rollout.ngpus=1",
    )
    assert heads % 3
    sentence = refuse(8, ready(tmp_path / "judge"), *three)
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=3 cannot split" in sentence


@pytest.mark.parametrize(("gpus", "place"), [(8, 1), (2, 1), (1, 0)])
def test_M1_a_judge_that_no_gpu_can_hold_is_refused(
    gpus: int, place: int, refuse: Refuse, tmp_path: Path
) -> None:
    vocab = json.loads((AGENT / "config.json").read_text())["vocab_size"]
    folder = ready(tmp_path / "judge", **{**QWEN_14B, "vocab_size": vocab})
    sentence = refuse(gpus, folder, total=24 * GIB)
    assert f"GPU {place} (A100, 24.0 GiB) has too little memory for judge 0" in sentence


def test_U2_nothing_is_refused_that_can_be_served(refuse: Refuse, tmp_path: Path) -> None:
    """The same start with a good judge gets as far as Ray."""
    with pytest.raises(AssertionError, match="Ray was about to start"):
        refuse(2, ready(tmp_path / "judge"))
