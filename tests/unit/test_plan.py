"""The plan: places, batch arithmetic, schedule, memory, and what stands in the way."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from delta_belief_rl.cli.front import find_overlaps, prepare
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import (
    Facts,
    ModelShape,
    available_cores,
    available_gpus,
    gather_facts,
    read_shape,
)
from delta_belief_rl.config.memory import estimate_memory, show_bytes
from delta_belief_rl.config.plan import Plan, make_plan
from delta_belief_rl.envs.parquet import write_parquet
from delta_belief_rl.envs.secrets import make_tasks
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.types import UserError
from tests.runs import ROOT

PAPER_FACTS = Facts(num_train_tasks=1000, num_val_tasks=198, cores=64, gpus=8)
QWEN = {
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def plan_of(*overrides: str, facts: Facts = PAPER_FACTS) -> Plan:
    return make_plan(load_config(list(overrides))[0], facts)


def test_U1_the_published_run_has_sixty_steps_of_three_optimizer_steps() -> None:
    plan = plan_of("experiment=train_8xa100_paper")
    assert (plan.steps_per_epoch, plan.total_steps) == (4, 60)
    assert (plan.games_per_step, plan.games_per_optimizer_step) == (3840, 1280)
    assert plan.optimizer_steps == 3
    assert plan.val_games == 792
    assert plan.problems == ()
    plan.check()


def test_J8_the_plan_lists_every_replica_with_its_gpus() -> None:
    paper = plan_of("experiment=train_8xa100_paper")
    assert [place.gpus for place in paper.pool("judge")] == [(1, 2), (3, 4), (5, 6)]
    assert [place.gpus for place in paper.pool("actor")] == [(0,)]
    assert paper.gpus == 7
    awq = plan_of("experiment=train_8xa100_awq_dp7")
    assert [place.gpus for place in awq.pool("judge")] == [(i,) for i in range(1, 8)]
    assert awq.gpus == 8
    assert "judge   2        5,6  Qwen/Qwen3-14B, tp 2" in paper.render()


def test_every_gpu_of_a_pool_serves_exactly_one_replica() -> None:
    plan = plan_of(
        "experiment=train_8xa100_paper",
        "actor_rollout_ref.ngpus=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "judge_rollout.ngpus=4",
    )
    for pool, gpus in (("actor", range(4)), ("engine", range(4)), ("judge", range(4, 8))):
        used = [gpu for place in plan.pool(pool) for gpu in place.gpus]
        assert sorted(used) == list(gpus)


def test_U6_a_shared_gpu_is_counted_once() -> None:
    plan = plan_of("experiment=paper_qwen1.7b", "judge=qwen3_14b_awq", "hardware=one_gpu")
    assert plan.gpus == 1
    assert [place.gpus for place in plan.placements] == [(0,)] * 3


def test_U4_the_quick_start_needs_no_gpu() -> None:
    facts = Facts(num_train_tasks=192, num_val_tasks=32, num_test_tasks=32, cores=2, gpus=0)
    plan = plan_of("experiment=quickstart", facts=facts)
    assert (plan.device, plan.gpus, plan.threads) == ("cpu", 0, 2)
    assert (plan.steps_per_epoch, plan.total_steps) == (8, 32)
    assert plan.problems == ()
    assert all(place.gpus == () for place in plan.placements)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (2, "cuda")])
def test_an_open_number_of_gpus_follows_the_machine(gpus: int, device: str) -> None:
    facts = replace(PAPER_FACTS, gpus=gpus)
    open_pool = ("actor_rollout_ref.ngpus=null", "actor_rollout_ref.device=auto")
    overrides = ("experiment=quickstart", *open_pool)
    plan = plan_of(*overrides, facts=facts)
    assert plan.device == device
    assert len(plan.pool("actor")) == 1


def test_an_api_policy_and_judge_need_no_process_with_a_gpu() -> None:
    plan = plan_of(
        "env=murder_mystery",
        "judge=api",
        "actor_rollout_ref.ngpus=0",
        "+actor_rollout_ref.model.api_model_name=m",
        "trainer.val_only=true",
    )
    assert plan.gpus == 0
    assert plan.pool("actor") == ()
    (player,) = plan.pool("engine")
    assert player.runs == "API model m, asked by the run's own process"
    assert (plan.memory, plan.engine_needs) == ((), None)
    assert plan.total_steps == 0
    assert "Evaluation only" in plan.render()


def test_the_steps_left_are_counted_from_the_finished_ones() -> None:
    plan = plan_of("experiment=paper_qwen1.7b", "trainer.total_training_steps=5")
    assert list(plan.steps()) == [1, 2, 3, 4, 5]
    assert list(plan.steps(start=3)) == [4, 5]
    assert list(plan.steps(start=5)) == []
    assert [plan.epoch(step) for step in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_R1_a_finished_run_has_no_steps_left_at_any_epoch_boundary() -> None:
    plan = plan_of("experiment=paper_qwen1.7b")
    for done in (0, 2, 4, 60):
        assert len(plan.steps(start=done)) == 60 - done


def test_things_are_due_at_their_frequency_and_at_the_last_step() -> None:
    plan = plan_of(
        "experiment=paper_qwen1.7b",
        "trainer.total_training_steps=7",
        "trainer.save_freq=3",
        "trainer.test_freq=-1",
        "trainer.rollout_freq=1",
    )
    assert [step for step in plan.steps() if plan.saves(step)] == [3, 6, 7]
    assert [step for step in plan.steps() if plan.validates(step)] == []
    assert plan.validates(0)
    assert all(plan.writes_games(step) for step in plan.steps())


def test_U1_tokens_per_micro_batch_come_from_games_or_from_the_budget() -> None:
    assert plan_of("experiment=paper_qwen1.7b").tokens_per_micro_batch == 16 * 2500
    dynamic = plan_of("experiment=paper_qwen1.7b", "actor_rollout_ref.actor.use_dynamic_bsz=true")
    assert dynamic.tokens_per_micro_batch == 70000


TWO_MACHINES = (
    "experiment=train_8xa100_paper",
    "trainer.nnodes=2",
    "ray_init.address=auto",
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.ngpus=4",
    "judge_rollout.ngpus=4",
    "judge_rollout.rollout.tensor_model_parallel_size=2",
)


def test_N6_gpus_of_several_machines_are_numbered_on_and_shown_by_machine() -> None:
    plan = plan_of(*TWO_MACHINES)
    plan.check()
    assert (plan.machines.count, plan.machines.gpus, plan.gpus) == (2, 4, 8)
    assert [place.gpus for place in plan.pool("judge")] == [(4, 5), (6, 7)]
    assert [plan.machines.machine(gpu) for gpu in range(8)] == [0] * 4 + [1] * 4
    rows = [line.split()[:4] for line in plan.render().splitlines()]
    assert ["pool", "replica", "machine", "GPU"] in rows
    assert ["actor", "3", "0", "3"] in rows
    assert ["judge", "1", "1", "2,3"] in rows
    assert "8 GPUs needed on 2 machines)" in plan.render()
    # What the ranks of one machine share are its own cores.
    cores = Facts(1000, 198, cores=8, gpus=2)
    three = plan_of(*TWO_MACHINES[:3], "actor_rollout_ref.ngpus=3", facts=cores)
    assert (three.machines.gpus, three.threads) == (2, 4)


def test_N6_a_replica_on_two_machines_is_a_problem() -> None:
    plan = plan_of(*TWO_MACHINES, "trainer.n_gpus_per_node=5")
    (problem,) = plan.problems
    assert problem == (
        "Judge 0 would be on GPUs 4 to 5, which are of two machines with 5 GPUs each: choose "
        "judge_rollout.ngpus and judge_rollout.rollout.tensor_model_parallel_size so that every "
        "machine holds whole replicas."
    )
    wide = ("trainer.n_gpus_per_node=6", "actor_rollout_ref.ngpus=8")
    engine = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    (problem,) = plan_of(*TWO_MACHINES, *wide, engine).problems
    assert problem.startswith("Policy engine 1 would be on GPUs 4 to 7, which are of two machines")


def test_N6_more_gpus_than_all_machines_have_are_a_problem() -> None:
    few = plan_of(*TWO_MACHINES[:3], "judge_rollout.ngpus=6", facts=Facts(1000, 198, 8, gpus=1))
    assert any(
        re.match(r"The run needs \d+ GPUs and 2 machines of 1 have 2: ", problem)
        for problem in few.problems
    )


def test_a_run_without_gpus_may_be_anywhere_on_its_machines() -> None:
    plan = plan_of("experiment=quickstart", *TWO_MACHINES[1:3], facts=Facts(99, 8, 2, gpus=0))
    assert plan.problems == ()
    assert (plan.machines.count, plan.machines.gpus) == (2, 0)
    assert ["judge", "0", "any", "CPU"] in [line.split()[:4] for line in plan.render().splitlines()]


def test_more_secrets_than_tasks_is_a_problem() -> None:
    plan = plan_of("experiment=paper_qwen1.7b", facts=replace(PAPER_FACTS, num_train_tasks=100))
    assert "exceeds the 100 training tasks" in plan.problems[0]
    with pytest.raises(UserError, match="exceeds the 100 training tasks"):
        plan.check()


def test_missing_files_and_gpus_are_named_with_a_cure_and_the_plan_is_still_shown() -> None:
    published = "delta_belief_rl/env/twenty_questions/direct/coca_plus/train_rl.parquet"
    facts = Facts(None, None, cores=2, gpus=0, missing=(published,))
    plan = plan_of("experiment=train_8xa100_paper", facts=facts)
    assert plan.total_steps is None
    assert len(plan.problems) == 2
    assert "fetch the published files with `delta-belief data fetch`" in plan.problems[0]
    assert "data.train_files=package:twenty_questions/train" in plan.problems[0]
    assert "needs 7 GPUs and 0 are visible" in plan.problems[1]
    text = plan.render()
    assert "? training steps" in text
    assert all(problem in text for problem in plan.problems)


def test_M6_expandable_segments_do_not_go_with_a_sleeping_engine() -> None:
    facts = replace(PAPER_FACTS, alloc_conf="expandable_segments:True")
    assert "expandable_segments" in plan_of("experiment=paper_qwen1.7b", facts=facts).problems[0]
    awake = "actor_rollout_ref.rollout.free_cache_engine=false"
    assert plan_of("experiment=paper_qwen1.7b", awake, facts=facts).problems == ()


def test_the_memory_account_matches_the_sizes_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    shape = read_shape(tmp_path)
    assert shape is not None
    assert shape.parameters() == pytest.approx(1.72e9, rel=0.01)
    assert shape.lora_parameters(64) == pytest.approx(69.7e6, rel=0.01)
    config = load_config(["experiment=paper_qwen1.7b"])[0]
    account = {line.what: line.bytes for line in estimate_memory(config, shape, 1, 40000)}
    assert account["weights (bfloat16)"] == shape.parameters() * 2
    assert account["trained weights, gradients, optimizer"] == shape.lora_parameters(64) * 16
    plan = make_plan(config, replace(PAPER_FACTS, model=shape))
    assert "3.2 GiB" in plan.render()
    assert show_bytes(2**20) == "1 MiB"


def test_the_memory_account_shrinks_with_ranks_and_grows_with_tokens() -> None:
    shape = ModelShape(64, 2, 4, 2, 16, 128, 100, tied=False)
    config = load_config(["experiment=paper_qwen1.7b"])[0]

    def total(gpus: int, tokens: int) -> float:
        return sum(line.bytes for line in estimate_memory(config, shape, gpus, tokens))

    assert total(2, 512) < total(1, 512) < total(1, 4096)
    assert estimate_memory(config, None, 1, 512) == ()


def test_a_model_folder_without_known_sizes_has_no_account(tmp_path: Path) -> None:
    assert read_shape(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert read_shape(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_shape(tmp_path)


def test_facts_count_rows_of_files_and_secrets_of_a_world(tmp_path: Path) -> None:
    for name, rows in (("train", 5), ("val", 3)):
        parquet.write_table(pa.table({"x": list(range(rows))}), tmp_path / f"{name}.parquet")
    files = [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files=[{tmp_path}/val.parquet,{tmp_path}/train.parquet]",
    ]
    facts = gather_facts(load_config([*files, "data.sample_count.train=4"])[0])
    assert (facts.num_train_tasks, facts.num_val_tasks, facts.missing) == (4, 8, ())
    (tmp_path / "val.parquet").write_text("nonsense")
    with pytest.raises(UserError, match="is not a parquet file"):
        gather_facts(load_config(files)[0])
    world = load_config(["data.world=everyday", "trainer.final_test=true"])[0]
    counts = gather_facts(world, lambda name: {"train": 9, "val": 4, "test": 2})
    assert (counts.num_train_tasks, counts.num_val_tasks, counts.num_test_tasks) == (9, 4, 2)


def test_facts_name_missing_files_and_folders_but_not_hub_names() -> None:
    config = load_config(
        [
            "experiment=paper_qwen1.7b",
            "data.train_files=/no/train.parquet",
            "data.val_files=/no/val.parquet",
            "judge_rollout.model.path=/no/judge",
        ]
    )[0]
    facts = gather_facts(config)
    assert facts.missing == ("/no/train.parquet", "/no/val.parquet", "/no/judge")
    evaluation = load_config(["experiment=eval_twenty_questions", "data.val_files=/no/v.parquet"])
    assert gather_facts(evaluation[0]).missing == ("/no/v.parquet",)


def test_N1_cores_and_gpus_come_from_the_allocation(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    assert available_gpus({}, tmp_path) == 4
    assert available_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 2
    assert available_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert available_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert available_cores({"SLURM_CPUS_PER_TASK": "1"}) == 1
    assert available_cores({}) >= 1


# --- secrets that two sets share ----------------------------------------------------------------

PUBLISHED = ROOT.parent / "shared" / "data" / "envs" / "twenty_questions"


def task_files(folder: Path, **secrets: str) -> list[str]:
    """Settings that name one file a split, with the secrets of a text."""
    words = []
    for split, names in secrets.items():
        write_parquet(folder / f"{split}.parquet", make_tasks(names.split(), split))
        words.append(f"data.{split}_files={folder}/{split}.parquet")
    return words


def test_the_plan_tells_which_secrets_two_sets_share(tmp_path: Path) -> None:
    sets = {"train": "owl fox elk yak", "val": "FOX hen cod", "test": "hen ox yak fox ant bee gnu"}
    words = ["experiment=paper_qwen1.7b", *task_files(tmp_path, **sets)]
    plan = prepare(words)[1]
    assert [(pair.first, pair.second, pair.shared) for pair in plan.facts.overlaps] == [
        ("training", "validation", ("fox",))
    ]
    text = plan.render()
    assert "  1 of 3 validation secrets is also a training secret (fox)" in text
    tested = prepare([*words, "trainer.final_test=true"])[1].render()
    assert "  2 of 7 test secrets are also training secrets (fox, yak)" in tested
    assert "  2 of 7 test secrets are also validation secrets (fox, hen)" in tested


def test_the_overlap_is_that_of_the_secrets_that_are_played(tmp_path: Path) -> None:
    words = ["experiment=paper_qwen1.7b", *task_files(tmp_path, train="a b c d", val="a b c d")]
    config = load_config([*words, "data.sample_count.val=2", "data.sample_count.train=2"])[0]
    tasks = load_tasks(config)
    both = {task.secret for task in tasks.val} & tasks.train_secrets()
    (pair,) = find_overlaps(config)
    assert (set(pair.shared), pair.num_second) == (both, 2)


def test_no_overlap_no_file_and_no_table_are_no_overlap(tmp_path: Path) -> None:
    words = ["experiment=paper_qwen1.7b", *task_files(tmp_path, train="owl fox", val="elk yak")]
    assert find_overlaps(load_config(words)[0]) == ()
    absent = f"data.val_files={tmp_path}/none.parquet"
    assert find_overlaps(load_config([*words, absent])[0]) == ()
    (tmp_path / "val.parquet").write_bytes(b"no parquet")
    assert find_overlaps(load_config(words)[0]) == ()
    assert gather_facts(load_config(["experiment=quickstart"])[0], None, find_overlaps) is not None


def test_the_published_validation_set_holds_45_training_secrets() -> None:
    if not PUBLISHED.exists():
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    words = [
        "experiment=paper_qwen1.7b",
        f"data.train_files={PUBLISHED}/train_rl.parquet",
        f"data.val_files={PUBLISHED}/val.parquet",
        f"data.test_files={PUBLISHED}/test.parquet",
        "trainer.final_test=true",
    ]
    plan = prepare(words)[1]
    (pair,) = plan.facts.overlaps
    assert (pair.first, pair.second, len(pair.shared)) == ("training", "validation", 45)
    sentence = "45 of 198 validation secrets are also training secrets (ankle, anniversary, aunt, "
    assert sentence in plan.render()


def test_a_missing_published_file_is_cured_by_fetching_or_by_the_packaged_secrets() -> None:
    city = "delta_belief_rl/env/guess_my_city/direct/paprika/test.parquet"
    other = "learning_to_ask/env/twenty_questions/direct/coca_plus/val.parquet"
    facts = Facts(None, None, cores=2, gpus=8, missing=(city, other, "x/mine.parquet", "x/model"))
    cures = plan_of("experiment=paper_qwen1.7b", facts=facts).problems
    assert cures[0].endswith(
        "does not exist: fetch the published files with `delta-belief data fetch`."
    )
    assert "data fetch`, or set data.train_files=package:twenty_questions/train" in cures[1]
    assert "correct the path, or set data.train_files=package:" in cures[2]
    assert cures[3].endswith("correct the path or get the model.")
