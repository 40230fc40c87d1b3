"""Which GPU a worker sees, and in which order engines that share one are started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.gpus import VISIBLE, BookedGpus, book_gpus, in_order
from delta_belief_rl.cluster.judges import JudgeReplicas, loading_turns
from delta_belief_rl.cluster.machines import NODE_LABEL, Machine
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import Facts
from delta_belief_rl.config.plan import Plan, make_plan
from delta_belief_rl.judge.vllm_judge import VllmJudgeSettings
from delta_belief_rl.trainer.judge_settings import judge_calls, judge_settings, pool_settings

SHARED = (
    "experiment=paper_qwen1.7b",
    "actor_rollout_ref.ngpus=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    "judge_rollout.ngpus=2",
    "judge_rollout.rollout.tensor_model_parallel_size=2",
    "judge_rollout.rollout.gpu_memory_utilization=0.3",
    "judge_rollout.share_actor_gpu=true",
)


def plan_of(*words: str, gpus: int = 8) -> Plan:
    return make_plan(load_config(list(words))[0], Facts(1000, 198, cores=64, gpus=gpus))


def test_a_worker_sees_the_gpus_of_its_place_and_no_other() -> None:
    booked = BookedGpus(("2", "5", "GPU-abc"))
    assert booked.environment((1,))[VISIBLE] == "5"
    assert booked.environment((2, 0))[VISIBLE] == "GPU-abc,2"
    # A worker without a GPU of its own is told so; otherwise it would see those of the whole job.
    assert booked.environment(())[VISIBLE] == ""


def test_N6_a_worker_is_on_the_machine_of_its_gpus_or_on_any_of_the_runs() -> None:
    pair = (Machine("aa", "node1", "10.0.0.1"), Machine("bb", "node2", "10.0.0.2"))
    booked = BookedGpus(("0", "1", "0", "1"), machines=pair, homes=(0, 0, 1, 1))
    assert booked.place((1,)) == {NODE_LABEL: "aa"}
    assert booked.place((2, 3)) == {NODE_LABEL: "bb"}
    assert booked.environment((2, 3))[VISIBLE] == "0,1"
    assert booked.place(()) == {NODE_LABEL: "in(aa,bb)"}
    # On a private Ray there is nothing to choose.
    assert BookedGpus(("0",)).place((0,)) == {}
    assert book_gpus(0, 1.0, pair).place(()) == {NODE_LABEL: "in(aa,bb)"}


def test_a_run_without_gpus_books_none_and_changes_no_environment() -> None:
    booked = book_gpus(0, 1.0)
    assert booked.devices == ()
    assert booked.environment(()) == {}


def test_gpus_are_numbered_as_the_machine_numbers_them() -> None:
    assert in_order(["10", "9", "0"]) == ("0", "9", "10")
    assert in_order(["GPU-b", "GPU-a"]) == ("GPU-a", "GPU-b")


def test_replicas_of_one_gpu_load_one_after_another_and_the_others_side_by_side() -> None:
    loaded: list[list[str]] = []

    class Place:
        def __init__(self, name: str) -> None:
            self.name = name

        def remote(self, settings: Any) -> str:
            assert settings == "settings"
            return f"actor of {self.name}"

    def wait(actors: Sequence[Any]) -> None:
        loaded.append(list(actors))

    places = [Place(name) for name in "abc"]
    gpus = [(1,), (1,), (2,)]
    replicas = JudgeReplicas.start_by_gpu(places, "settings", gpus, wait)
    assert loaded == [["actor of a", "actor of c"], ["actor of b"]]
    assert replicas.actors == ["actor of a", "actor of b", "actor of c"]


@pytest.mark.parametrize(
    ("gpus", "turns"),
    [
        ([(0,), (1,), (2,)], [[0, 1, 2]]),
        ([(0, 1), (1, 2), (2, 3)], [[0, 2], [1]]),
        ([(0,), (0,), (0,)], [[0], [1], [2]]),
        ([], []),
    ],
)
def test_no_gpu_occurs_twice_in_a_turn(gpus: list[tuple[int, ...]], turns: list[list[int]]) -> None:
    assert loading_turns(gpus) == turns


def test_J8_two_judge_replicas_share_a_gpu_where_the_plan_says_so() -> None:
    words = ("judge_rollout.replicas=2", "judge_rollout.rollout.gpu_memory_utilization=0.45")
    plan = plan_of("experiment=paper_qwen1.7b", *words)
    assert [place.gpus for place in plan.pool("judge")] == [(1,), (1,)]
    assert plan.gpus == 2


def test_J8_a_judge_of_tensor_parallel_size_two_spans_both_gpus_of_the_policy() -> None:
    plan = plan_of(*SHARED)
    assert [place.gpus for place in plan.pool("actor")] == [(0,), (1,)]
    assert [place.gpus for place in plan.pool("engine")] == [(0,), (1,)]
    assert [place.gpus for place in plan.pool("judge")] == [(0, 1)]
    assert plan.gpus == 2


def test_U6_a_policy_of_tensor_parallel_size_two_has_one_engine_on_both_gpus() -> None:
    wide = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    plan = plan_of("experiment=paper_qwen1.7b", "actor_rollout_ref.ngpus=2", wide)
    assert [place.gpus for place in plan.pool("engine")] == [(0, 1)]


def test_only_a_judge_on_the_policys_gpus_sleeps_while_it_is_trained() -> None:
    shared, apart = load_config(list(SHARED))[0], load_config(["experiment=paper_qwen1.7b"])[0]
    sleeping = [*SHARED, "judge_rollout.rollout.free_cache_engine=true"]
    assert not pools._judge_sleeps(shared)
    assert pools._judge_sleeps(load_config(sleeping)[0])
    assert not pools._judge_sleeps(apart)


def test_J3_a_vllm_judge_is_asked_in_small_calls_that_it_batches_itself() -> None:
    cfg = load_config(["experiment=paper_qwen1.7b", "judge_rollout.rollout.max_num_seqs=256"])[0]
    settings = judge_settings(cfg, 1)
    assert isinstance(settings, VllmJudgeSettings)
    assert (settings.device, settings.model_path) == ("cuda", "Qwen/Qwen3-14B")
    pool = pool_settings(cfg)
    assert pool.max_outstanding == 256
    assert judge_calls(cfg) * pool.max_batch == 256
    assert judge_calls(load_config(["experiment=quickstart"])[0]) == 1
