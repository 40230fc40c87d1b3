"""GPUs before anything is loaded: what is read of them, and when a plan is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from delta_belief_rl.config.checkpoints import Checkpoint, Quantisation, TensorInfo
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import Facts, ModelShape
from delta_belief_rl.config.gpu_memory import (
    check_gpus,
    gpu_needs,
    gpu_problems,
    size_problems,
)
from delta_belief_rl.config.gpus import (
    Gpu,
    Holder,
    ask_nvidia_smi,
    lowest_capability,
    read_gpus,
)
from delta_belief_rl.config.memory import GIB
from delta_belief_rl.config.plan import Plan, make_plan
from delta_belief_rl.types import UserError

SHAPE = ModelShape(
    hidden=2048,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=6144,
    vocab=151936,
    tied=True,
)
TOTAL = 80 * GIB
PAPER = "experiment=paper_qwen1.7b"
ONE_GPU = (PAPER, "judge=qwen3_14b_awq", "hardware=one_gpu")


def plan_of(*overrides: str, model: ModelShape | None = SHAPE) -> Plan:
    facts = Facts(1000, 198, cores=64, gpus=8, model=model, judge_model=model)
    return make_plan(load_config(list(overrides))[0], facts)


def gpu(index: int = 0, free: float = TOTAL, *holders: Holder) -> Gpu:
    return Gpu(index, "A100", TOTAL, int(free), (8, 0), holders)


def amounts(plan: Plan, index: int = 0) -> dict[str, float]:
    return {need.who: need.bytes for need in gpu_needs(plan, gpu(index))}


# --- what the plan needs ------------------------------------------------------------------------


def test_a_sleeping_engine_and_the_update_share_a_gpu_in_turns() -> None:
    plan = plan_of(PAPER)
    weights, rank = plan.memory[0].bytes, sum(line.bytes for line in plan.memory)
    share = plan.config.actor_rollout_ref.rollout.gpu_memory_utilization * TOTAL
    assert amounts(plan) == {"policy": max(rank, weights + share)}
    assert amounts(plan, 1) == {"judge 0": pytest.approx(0.7 * TOTAL)}
    assert amounts(plan, 2) == {}


def test_an_engine_that_stays_awake_needs_its_share_beside_the_update() -> None:
    plan = plan_of(PAPER, "actor_rollout_ref.rollout.free_cache_engine=false")
    rank = sum(line.bytes for line in plan.memory)
    assert amounts(plan) == {"training rank 0": rank, "policy engine 0": 0.5 * TOTAL}


def test_U6_policy_and_judge_on_one_gpu_are_added() -> None:
    needs = amounts(plan_of(*ONE_GPU))
    assert needs.keys() == {"policy", "judge 0"}
    assert needs["judge 0"] == 0.25 * TOTAL


def test_engines_through_transformers_need_their_weights() -> None:
    plan = plan_of(
        PAPER,
        "actor_rollout_ref.rollout.name=hf",
        "judge_rollout.name=hf",
        "judge_rollout.rollout.max_num_seqs=4",
    )
    weights = SHAPE.parameters() * 2
    assert amounts(plan)["policy engine 0"] == pytest.approx(weights)
    judge = sum(line.bytes for line in plan.judge_memory)
    assert judge > weights
    assert amounts(plan, 1) == {"judge 0": judge}


def test_without_the_models_sizes_the_shares_of_the_engines_still_count() -> None:
    assert amounts(plan_of(PAPER, model=None)) == {"policy": 0.5 * TOTAL}
    awake = plan_of(PAPER, "actor_rollout_ref.rollout.name=hf", model=None)
    assert amounts(awake) == {"training rank 0": 0, "policy engine 0": 0}


# --- refusals -----------------------------------------------------------------------------------


def test_M1_a_gpu_that_another_process_fills_is_refused_with_its_name() -> None:
    plan = plan_of(PAPER)
    other = Holder(4242, "python3", 66 * GIB)
    full = gpu(1, TOTAL - 66 * GIB, other)
    with pytest.raises(UserError) as caught:
        check_gpus(plan, [gpu(0), full])
    assert str(caught.value) == (
        "GPU 1 (A100) has 14.0 GiB of 80.0 GiB free and the plan needs 56.0 GiB there (judge 0 "
        "56.0 GiB): process 4242 (python3) holds 66.0 GiB; wait for it or end it, or choose other "
        "GPUs with CUDA_VISIBLE_DEVICES."
    )


def test_M1_every_full_gpu_is_told_with_its_largest_holders() -> None:
    plan = plan_of(PAPER)
    crowd = [Holder(pid, f"p{pid}", pid * GIB) for pid in (1, 20, 3, 30)]
    found = list(gpu_problems(plan, [gpu(0, GIB, *crowd), gpu(1, GIB), gpu(2, 0)]))
    assert len(found) == 2
    assert "process 30 (p30) holds 30.0 GiB, process 20 (p20)" in found[0]
    assert "p1)" not in found[0]
    assert "a process that cannot be seen from here holds 79.0 GiB" in found[1]


def test_M1_gpus_of_another_machine_are_compared_with_what_the_plan_puts_there() -> None:
    pools = ("actor_rollout_ref.ngpus=2", "judge_rollout.ngpus=2")
    plan = plan_of(PAPER, *pools, "judge_rollout.rollout.tensor_model_parallel_size=1")
    full = [gpu(0), gpu(1, 1.0 * GIB)]
    (problem,) = gpu_problems(plan, full, 2)
    # The number is that of the machine.
    assert problem.startswith("GPU 1 (A100) has 1.0 GiB")
    assert "(judge 1 " in problem
    with pytest.raises(UserError, match="GPU 1 "):
        check_gpus(plan, full, 2)
    small = [replace(gpu(0), total=2 * GIB, free=2 * GIB)]
    assert "judge 0" in next(size_problems(plan, small, 2))
    assert list(gpu_problems(plan, full, 4)) == []


def test_M1_a_process_that_leaves_enough_is_left_alone() -> None:
    plan = plan_of(PAPER)
    needed = amounts(plan, 1)["judge 0"]
    assert list(gpu_problems(plan, [gpu(1, needed)])) == []
    assert len(list(gpu_problems(plan, [gpu(1, needed - 1)]))) == 1


def test_M1_an_empty_gpu_is_never_refused_by_an_estimate() -> None:
    plan = plan_of(PAPER, "judge_rollout.rollout.gpu_memory_utilization=1.0")
    assert amounts(plan, 1)["judge 0"] == TOTAL
    assert list(gpu_problems(plan, [gpu(1, TOTAL - GIB // 2)])) == []
    assert len(list(gpu_problems(plan, [gpu(1, TOTAL - 2 * GIB)]))) == 1


def test_a_plan_without_gpus_is_never_refused() -> None:
    check_gpus(plan_of("experiment=quickstart"), [gpu(0, 0)])


# --- reading ------------------------------------------------------------------------------------

GPUS = """\
0, GPU-aaa, NVIDIA A100-SXM4-80GB, 81920, 81000, 8.0
1, GPU-bbb, NVIDIA A100-SXM4-80GB, 81920, 14000, 8.0
2, GPU-ccc, NVIDIA H100, 81559, 81000, 9.0
"""
APPS = """\
GPU-bbb, 4242, /usr/bin/python3, 66000
GPU-bbb, 77, [Not Found], [N/A]
"""


class Smi:
    """Stands for nvidia-smi: notes what it is asked, and shows only what ``-i`` names."""

    def __init__(self, gpus: str | None = GPUS, apps: str | None = APPS) -> None:
        self.asked: list[list[str]] = []
        self._gpus, self._apps = gpus, apps

    def __call__(self, arguments: Sequence[str]) -> str | None:
        self.asked.append(list(arguments))
        asked = list(arguments)
        text = self._apps if any("compute-apps" in word for word in asked) else self._gpus
        if text is None or "-i" not in asked or text is self._apps:
            return text
        wanted = asked[asked.index("-i") + 1].split(",")
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if {*line.split(", ")[:2]} & {*wanted})


def test_every_gpu_is_read_where_the_job_has_them_all() -> None:
    found = read_gpus({}, Smi())
    assert found is not None
    assert [(one.index, one.name[7:11], one.capability) for one in found] == [
        (0, "A100", (8, 0)),
        (1, "A100", (8, 0)),
        (2, "H100", (9, 0)),
    ]
    assert found[1].free == 14000 * 2**20
    assert found[1].total == 81920 * 2**20
    assert found[1].holders == (
        Holder(4242, "python3", 66000 * 2**20),
        Holder(77, "[Not Found]", 0),
    )
    assert found[0].holders == ()
    assert lowest_capability(found) == (8, 0)


@pytest.mark.parametrize("visible", ["2,1", " GPU-ccc , GPU-bbb"])
def test_M1_only_gpus_of_the_job_are_looked_at_and_counted_from_its_first(visible: str) -> None:
    smi = Smi()
    found = read_gpus({"CUDA_VISIBLE_DEVICES": visible}, smi)
    assert found is not None
    assert [(one.index, one.capability) for one in found] == [(0, (9, 0)), (1, (8, 0))]
    assert [one.holders[:1] for one in found] == [(), (Holder(4242, "python3", 66000 * 2**20),)]
    names = visible.replace(" ", "")
    assert [words[:2] for words in smi.asked] == [["-i", names], ["-i", names]]


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_job_without_gpus_asks_nobody(visible: str) -> None:
    smi = Smi()
    assert read_gpus({"CUDA_VISIBLE_DEVICES": visible}, smi) == ()
    assert smi.asked == []
    assert lowest_capability(()) is None
    assert lowest_capability(None) is None


@pytest.mark.parametrize(
    "gpus",
    [None, "0, GPU-aaa, GB10, [N/A], [N/A], 12.1\n", "0, GPU-aaa, A100, 1, 1, [N/A]\n", "odd\n"],
)
def test_what_cannot_be_read_is_not_guessed(gpus: str | None) -> None:
    assert read_gpus({}, Smi(gpus=gpus)) is None


def test_a_part_of_a_gpu_is_not_compared() -> None:
    assert read_gpus({"CUDA_VISIBLE_DEVICES": "MIG-123"}, Smi()) is None


def test_processes_that_the_driver_does_not_tell_are_no_obstacle() -> None:
    found = read_gpus({}, Smi(apps=None))
    assert found is not None
    assert [one.holders for one in found] == [(), (), ()]


def test_a_machine_without_nvidia_smi_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_nvidia_smi(["--list-gpus"]) is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho asked $1\n")
    program.chmod(0o755)
    assert ask_nvidia_smi(["--list-gpus"]) == "asked --list-gpus\n"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert ask_nvidia_smi([]) is None


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_args: object, **_more: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 30)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert ask_nvidia_smi([]) is None


# --- models that no GPU of this kind can hold -----------------------------------------------------

QWEN_14B = ModelShape(5120, 40, 40, 8, 128, 17408, 151936, False)
WEIGHTS_14B = QWEN_14B.parameters() * 2


def judged(*overrides: str, packed: Checkpoint | None = None) -> Plan:
    config = load_config([PAPER, "judge=qwen3_14b", *overrides])[0]
    facts = Facts(1000, 198, cores=64, gpus=8, model=SHAPE, judge_model=QWEN_14B)
    return make_plan(config, replace(facts, judge_checkpoint=packed))


def sized(plan: Plan, total: float) -> list[str]:
    gpus = [Gpu(index, "A100", int(total), int(total), (8, 0)) for index in range(8)]
    return list(size_problems(plan, gpus))


def test_M1_a_judge_larger_than_its_share_is_refused_before_it_is_loaded() -> None:
    plan = judged("judge_rollout.rollout.gpu_memory_utilization=0.3")
    (sentence,) = sized(plan, TOTAL)
    assert sentence == (
        "GPU 1 (A100, 80.0 GiB) has too little memory for judge 0: its weights take 27.5 GiB and "
        "its key-value cache at least 289 MiB, but "
        "judge_rollout.rollout.gpu_memory_utilization=0.3 leaves it 24.0 GiB; give it more, split "
        "it over more GPUs (judge_rollout.rollout.tensor_model_parallel_size), or give a smaller "
        "or a quantised model."
    )
    with pytest.raises(UserError, match="too little memory for judge 0"):
        check_gpus(plan, [gpu(0), gpu(1)])


def test_M1_the_bound_is_the_weights_and_one_sequence() -> None:
    plan = judged("judge_rollout.rollout.gpu_memory_utilization=0.5")
    engine = plan.config.judge_rollout.rollout
    tokens = engine.prompt_length + engine.response_length
    needed = WEIGHTS_14B + 2 * 40 * 8 * 128 * 2 * tokens
    assert sized(plan, 2 * needed) == []
    assert len(sized(plan, 2 * needed - 4)) == 1


def test_M1_gpus_of_one_replica_share_its_weights() -> None:
    split = ("judge_rollout.ngpus=2", "judge_rollout.rollout.tensor_model_parallel_size=2")
    share = "judge_rollout.rollout.gpu_memory_utilization=0.3"
    assert sized(judged(share, *split), TOTAL) == []


def test_M1_quantised_weights_count_as_they_are_stored() -> None:
    share = "judge_rollout.rollout.gpu_memory_utilization=0.3"
    tensor = {"a.qweight": TensorInfo("I32", (2**30, 1))}
    stored = Quantisation("awq", 4, 128, "gemm")
    small = Checkpoint("float16", stored, tensor, complete=True)
    assert sized(judged(share, packed=small), TOTAL) == []
    large = Checkpoint("float16", stored, {"a.qweight": TensorInfo("I32", (2**33,))}, complete=True)
    (sentence,) = sized(judged(share, packed=large), TOTAL)
    assert "its weights take 32.0 GiB" in sentence
    # Nobody knows how large they are.
    assert sized(judged(share, packed=replace(large, complete=False)), TOTAL) == []
    assert sized(judged(share, "judge_rollout.rollout.quantization=awq"), TOTAL) == []


def test_M1_a_cache_of_a_given_size_must_fit_beside_the_weights() -> None:
    plan = judged("judge_rollout.rollout.kv_cache_memory_bytes=30000000000")
    assert sized(plan, WEIGHTS_14B + 3e10) == []
    (sentence,) = sized(plan, WEIGHTS_14B + 3e10 - 1)
    assert "at least 27.9 GiB, but there are 55.4 GiB" in sentence


def test_M1_a_policy_larger_than_its_gpu_is_refused() -> None:
    plan = judged()
    kept = plan.memory[0].bytes + plan.memory[1].bytes
    sentences = sized(plan, kept - 1)
    assert sentences[0].startswith("GPU 0 (A100) has ")
    assert "training rank 0 keeps" in sentences[0]
    assert "raise actor_rollout_ref.ngpus" in sentences[0]
    assert any("memory for policy engine 0" in sentence for sentence in sized(plan, GIB))
    assert not any("rank" in sentence for sentence in sized(plan, kept))


def test_nothing_is_said_of_models_and_gpus_that_are_not_here() -> None:
    assert list(size_problems(judged(), [])) == []
    assert sized(plan_of(PAPER, model=None), GIB) == []
    assert sized(plan_of("experiment=quickstart"), GIB) == []
