"""A judge through transformers: the real worker class, its settings, and a run with it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from judge_fakes import save_constant_judge
from transformers import AutoTokenizer

from delta_belief_rl.cluster.judge_worker import JudgeWorker
from delta_belief_rl.cluster.judges import is_self_tested, least_accuracy
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import Facts, ModelShape
from delta_belief_rl.config.plan import make_plan
from delta_belief_rl.config.rules import problems
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.base import Judge, JudgeReply, JudgeRequest
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.judge.build import HfJudgeSettings, WorldJudgeSettings, build_judge
from delta_belief_rl.judge.llm_judge import LlmJudgeSettings
from delta_belief_rl.judge.pool import JudgePoolSettings, ReplicaGone, question_key
from delta_belief_rl.judge.prompts import opening_key
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.judge.selftest import FACTS, Fact, self_test
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.trainer.judge_settings import judge_settings, llm_judge_settings, pool_settings
from delta_belief_rl.trainer.settings import env_settings, judge_cache_key
from delta_belief_rl.types import UserError, Verdict
from tests.runs import metrics_of, play, words, write_world
from tests.worlds import task_for

ROOT = Path(__file__).resolve().parents[2]
DIRECT = LlmJudgeSettings(mode="direct", prompt_length=4000, response_length=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_constant_judge(tmp_path_factory.mktemp("judge"))


def worker(settings: HfJudgeSettings | WorldJudgeSettings) -> Judge:
    """The actor class that Ray would start, without Ray."""
    return JudgeWorker.__ray_metadata__.modified_class(settings)  # type: ignore[attr-defined]


def test_a_judge_that_asks_no_model_loads_no_model_library() -> None:
    program = """
import sys
from delta_belief_rl.cluster.judge_worker import JudgeWorker
from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.judge.build import RulesJudgeSettings, WorldJudgeSettings
from tests.worlds import task_for
make = JudgeWorker.__ray_metadata__.modified_class
replies = make(WorldJudgeSettings("everyday")).answer([JudgeRequest(task_for("dog"), "Is it?", ())])
assert len(replies) == 1, replies
make(RulesJudgeSettings("murder_mystery"))
print([name for name in ("torch", "transformers", "peft", "vllm") if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def requests(*questions: str) -> list[JudgeRequest]:
    history = (("Is it alive?", "yes"), ("Is it red?", "no"))
    return [JudgeRequest(task_for("dog"), question, history) for question in questions]


@pytest.mark.parametrize(("lanes", "reuse"), [(1, False), (3, True)])
def test_the_worker_answers_through_a_real_model(model: Path, lanes: int, reuse: bool) -> None:
    judge = worker(HfJudgeSettings(str(model), DIRECT, lanes=lanes, reuse=reuse, num_threads=1))
    assert judge.answer([]) == []
    for _ in range(2):
        replies = judge.answer(requests("Is it big?", "Can it fly?", "<|im_end|>", "", "Is it?"))
        assert [reply.verdict for reply in replies] == [Verdict.YES] * 5
        assert [reply.text for reply in replies] == ["yes"] * 5
        assert all(reply.tokens > 100 for reply in replies)


def test_C1_a_long_game_is_an_error_of_one_call(model: Path) -> None:
    size = worker(HfJudgeSettings(str(model), DIRECT)).answer(requests("Is it?"))[0].tokens
    asked = replace(DIRECT, prompt_length=size)
    short, long = worker(HfJudgeSettings(str(model), asked)).answer(
        requests("Is it?", "Is it " + "very " * 50 + "big?")
    )
    assert short.verdict is Verdict.YES
    assert long.verdict is Verdict.ERROR
    assert f"more than {size} tokens" in long.reason


def test_J14_a_model_that_says_something_else_gives_errors(tmp_path: Path) -> None:
    folder = save_constant_judge(tmp_path, "perhaps")
    reply = worker(HfJudgeSettings(str(folder), DIRECT)).answer(requests("Is it big?"))[0]
    assert (reply.verdict, reply.text) == (Verdict.ERROR, "perhaps")


def test_the_worker_of_a_world_answers_from_its_table() -> None:
    judge = worker(WorldJudgeSettings("everyday"))
    assert isinstance(build_judge(WorldJudgeSettings("everyday")), WorldJudge)
    assert judge.answer(requests("Is it an animal?"))[0].verdict is Verdict.YES


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = save_constant_judge(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="no chat template"):
        worker(HfJudgeSettings(str(folder), DIRECT))


# --- the self-test ------------------------------------------------------------------------------


def test_Q2_the_facts_are_many_balanced_and_distinct() -> None:
    assert len(FACTS) >= 50
    assert len({(fact.secret, fact.question) for fact in FACTS}) == len(FACTS)
    assert sum(fact.holds for fact in FACTS) * 2 == len(FACTS)


def test_Q2_the_facts_agree_with_the_table_of_the_embedded_world() -> None:
    world = load_world("everyday")
    grammar = Grammar(world)
    known = [
        fact
        for fact in FACTS
        if grammar.thing_of(fact.secret) and grammar.parse(fact.question).kind == "property"
    ]
    assert len(known) > 30
    report = self_test(WorldJudge(world, grammar), known)
    assert report.misses == ()
    assert report.accuracy == 1.0
    assert report.passes(1.0)


def test_Q2_a_judge_that_always_says_yes_is_right_for_half(model: Path) -> None:
    report = self_test(worker(HfJudgeSettings(str(model), DIRECT, lanes=8)))
    assert report.accuracy == 0.5
    assert report.errors == 0
    assert report.finite
    assert report.passes(0.5)
    assert not report.passes(0.51)
    assert {miss.said for miss in report.misses} == {"yes"}
    assert report.sentence() == (
        f"{len(FACTS) // 2} of {len(FACTS)} plain facts answered rightly (50%), 0 without an answer"
    )


def test_Q2_logits_that_are_not_finite_fail_the_self_test(tmp_path: Path) -> None:
    folder = save_constant_judge(tmp_path, broken=True)
    report = self_test(worker(HfJudgeSettings(str(folder), DIRECT)), FACTS[:4])
    assert not report.finite
    assert (report.errors, report.accuracy) == (4, 0.0)
    assert not report.passes(0.0)
    assert report.sentence().endswith("4 without an answer; logits were not finite")
    with pytest.raises(ValueError, match="at least one fact"):
        self_test(worker(WorldJudgeSettings("everyday")), ())
    unknown = self_test(worker(WorldJudgeSettings("everyday")), [Fact("qzx", "Is it?", True)])
    assert (unknown.errors, unknown.finite) == (1, True)


# --- settings -----------------------------------------------------------------------------------

JUDGE = "judge_rollout"
HF = ("experiment=quickstart", f"{JUDGE}.name=hf", f"{JUDGE}.model.path=some/model")
CPU = f"{JUDGE}.rollout.dtype=auto"


def config(*overrides: str) -> RunConfig:
    return load_config(list(overrides))[0]


def test_the_settings_of_the_judge_arrive() -> None:
    cfg = config(
        *HF,
        CPU,
        f"{JUDGE}.cot=true",
        f"{JUDGE}.repeated_prompt=false",
        f"{JUDGE}.parser=published",
        f"{JUDGE}.rollout.prompt_length=700",
        f"{JUDGE}.rollout.response_length=60",
        f"{JUDGE}.rollout.max_num_batched_tokens=512",
        f"{JUDGE}.rollout.val_kwargs.temperature=0.5",
        "seed=7",
    )
    settings = judge_settings(cfg, threads=3)
    assert isinstance(settings, HfJudgeSettings)
    asked = settings.asked
    assert (asked.mode, asked.with_history, asked.parser) == ("cot", False, "published")
    assert (asked.prompt_length, asked.response_length, asked.seed) == (700, 60, 7)
    assert asked.sampling.temperature == 0.5
    assert (settings.model_path, settings.device, settings.dtype) == (
        "some/model",
        "cpu",
        "float32",
    )
    assert (settings.max_batch_tokens, settings.num_threads) == (512, 3)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ((f"{JUDGE}.cot=false",), "direct"),
        ((f"{JUDGE}.cot=true",), "cot"),
        ((f"{JUDGE}.cot=false", f"{JUDGE}.thinking=true"), "thinking"),
    ],
)
def test_the_flags_of_the_judge_choose_its_mode(flags: tuple[str, ...], mode: str) -> None:
    assert llm_judge_settings(config(*HF, *flags)).mode == mode


def test_published_sampling_is_the_default_and_ours_is_greedy() -> None:
    published = llm_judge_settings(config("experiment=paper_qwen1.7b"))
    assert not published.greedy
    drawn = published.sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k) == (0.7, 0.8, 20)
    assert llm_judge_settings(config("experiment=quickstart", "judge=smollm2")).greedy


def test_R15_a_deterministic_run_judges_one_question_at_a_time_from_an_empty_cache() -> None:
    settings = judge_settings(config(*HF), threads=1)
    assert isinstance(settings, HfJudgeSettings)
    assert (settings.lanes, settings.reuse) == (1, False)
    free = config(*HF, "actor_rollout_ref.rollout.deterministic=false")
    settings = judge_settings(free, threads=1)
    assert isinstance(settings, HfJudgeSettings)
    assert (settings.lanes, settings.reuse) == (32, True)
    few = judge_settings(
        config(
            *HF,
            "actor_rollout_ref.rollout.deterministic=false",
            f"{JUDGE}.rollout.max_num_seqs=5",
        ),
        threads=1,
    )
    assert isinstance(few, HfJudgeSettings)
    assert few.lanes == 5


def test_J5_a_slow_judge_is_never_handed_more_than_its_deadline_allows() -> None:
    free = config(*HF, "actor_rollout_ref.rollout.deterministic=false", f"{JUDGE}.timeout_s=33")
    pool = pool_settings(free)
    assert (pool.max_batch, pool.max_outstanding, pool.deadline) == (32, 64, 33.0)
    assert pool_settings(config("experiment=quickstart")).max_batch == 256


def test_a_judge_that_is_no_world_and_no_model_is_refused() -> None:
    assert judge_settings(config("experiment=quickstart"), 1) == WorldJudgeSettings("everyday")
    with pytest.raises(UserError, match="name=fake is not available: use vllm, hf"):
        judge_settings(config("experiment=quickstart", f"{JUDGE}.name=fake"), 1)


def test_the_judge_sees_history_unless_it_is_left_out_or_exact() -> None:
    assert env_settings(config(*HF), 5).judge_history
    assert not env_settings(config(*HF, f"{JUDGE}.repeated_prompt=false"), 5).judge_history
    assert not env_settings(config("experiment=quickstart"), 5).judge_history


def test_replies_are_cached_where_they_are_a_function_of_the_question() -> None:
    assert judge_cache_key(config(*HF)) is opening_key
    assert judge_cache_key(config("experiment=quickstart")) is question_key
    assert judge_cache_key(config("experiment=quickstart", "multi_turn.duplicates=judge")) is None


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ((f"{JUDGE}.model.path=''",), "judge_rollout.model.path is not set"),
        ((f"{JUDGE}.ngpus=2",), "runs whole on one GPU"),
        (
            (f"{JUDGE}.repeated_prompt=false", "multi_turn.duplicates=judge"),
            "set multi_turn.duplicates=code",
        ),
    ],
)
def test_U2_impossible_settings_of_the_judge_are_refused(more: tuple[str, ...], part: str) -> None:
    assert any(part in sentence for sentence in problems(config(*HF, *more)))


@pytest.mark.parametrize(
    "more",
    [
        (),
        (f"{JUDGE}.repeated_prompt=false",),
        (f"{JUDGE}.ngpus=1",),
        (f"{JUDGE}.ngpus=3", f"{JUDGE}.rollout.tensor_model_parallel_size=1"),
    ],
)
def test_a_judge_through_transformers_may_have_cpus_or_gpus(more: tuple[str, ...]) -> None:
    assert list(problems(config(*HF, *more))) == []


def test_settings_that_several_engines_read_are_warned_of_with_all_their_names() -> None:
    name = f"{JUDGE}.rollout.max_num_seqs"
    assert load_config([*HF, f"{name}=4"])[1] == []
    assert load_config(["experiment=quickstart", f"{name}=4"])[1] == [
        f"{name} has no effect with world: only vllm and hf read it."
    ]


SHAPE = ModelShape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100, tied=True
)


def test_the_plan_places_the_judge_and_estimates_its_memory() -> None:
    facts = Facts(100, 10, cores=4, gpus=3, judge_model=SHAPE)
    on_gpus = (f"{JUDGE}.ngpus=2", f"{JUDGE}.rollout.tensor_model_parallel_size=1")
    plan = make_plan(config(*HF, *on_gpus), facts)
    assert [place.gpus for place in plan.pool("judge")] == [(0,), (1,)]
    assert plan.gpus == 2
    plan = make_plan(config(*HF, CPU, f"{JUDGE}.replicas=2"), facts)
    assert [place.gpus for place in plan.pool("judge")] == [(), ()]
    weights, cache = plan.judge_memory
    assert weights.bytes == SHAPE.parameters() * 4
    # One lane of 1600 + 200 tokens; keys and values of two layers, two heads of sixteen.
    assert cache.bytes == 1800 * 2 * 2 * 2 * 16 * 4
    text = plan.render()
    assert "hf judge, some/model" in text
    assert "Memory of each judge replica" in text
    assert make_plan(config("experiment=quickstart"), facts).judge_memory == ()


# --- a run --------------------------------------------------------------------------------------


def run_words(out: Path, world: Path, model: Path, *more: str) -> list[str]:
    return [
        *words(out, world),
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.final_test=false",
        f"{JUDGE}.name=hf",
        f"{JUDGE}.cot=false",
        f"{JUDGE}.model.path={model}",
        f"{JUDGE}.rollout.prompt_length=4000",
        f"{JUDGE}.rollout.response_length=4",
        f"{JUDGE}.rollout.dtype=float32",
        f"{JUDGE}.rollout.val_kwargs.do_sample=false",
        # It says yes to every fact, and so is right for half of them.
        f"{JUDGE}.self_test.min_accuracy=0.5",
        *more,
    ]


def instant_restarts(settings: JudgePoolSettings) -> None:
    """Stands for the check of the settings, and takes the waits out of them."""
    object.__setattr__(settings, "restart_backoff", 0.0)
    object.__setattr__(settings, "backoff", 0.0)


def events_of(out: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_records(out / "events.jsonl") if event["kind"] == kind]


def judged_by_the_model(out: Path) -> int:
    games = read_trajectories(out / "rollout" / "1.jsonl").trajectories
    assert len(games) == 16
    turns = [turn for game in games for turn in game.turns if turn.raw_verdict]
    assert {turn.raw_verdict for turn in turns} == {"yes"}
    return len(turns)


def test_J9_a_step_on_the_embedded_world_is_judged_by_the_model(
    model: Path, tmp_path: Path
) -> None:
    world = write_world(tmp_path / "tiny.yaml")
    out = tmp_path / "run"
    status, trace = play(run_words(out, world, model))
    assert status == 0
    assert "JudgeWorker.answer" in trace.names
    assert trace.names.count("JudgeWorker.self_test") == 1
    (event,) = events_of(out, "judge_self_test")
    assert (event["replica"], event["asked"]) == (0, len(FACTS))
    assert (event["accuracy"], event["errors"], event["finite"]) == (0.5, 0, True)
    assert event["tokens_per_second"] > 0
    assert len(event["misses"]) == len(FACTS) // 2
    assert all(miss.endswith("? yes") for miss in event["misses"])
    asked = judged_by_the_model(out)
    record = metrics_of(out)[-1]
    assert 0 < asked <= record["judge/calls"]
    assert record["judge/tokens"] > 100
    assert record["judge/call_error_rate"] == 0.0
    assert record["judge/restarts"] == 0.0


def test_Q2_a_judge_below_the_bound_stops_the_run_before_the_first_game(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = write_world(tmp_path / "tiny.yaml")
    out = tmp_path / "run"
    least = f"{JUDGE}.self_test.min_accuracy=0.51"
    status, trace = play(run_words(out, world, model, f"{JUDGE}.replicas=2", least))
    assert status == 2
    *_, first, second, last = capsys.readouterr().err.strip().splitlines()
    half = f"{len(FACTS) // 2} of {len(FACTS)} plain facts answered rightly (50%), 0 without an"
    assert first.startswith(f"judge 0: {half} answer; ")
    assert first.split("; ")[1].split(" ")[1] == "tokens/s"
    assert second.startswith(f"judge 1: {half}")
    assert last.startswith(
        f"train.py: Judge replica 0 fails its self-test ({half} answer; at least"
    )
    assert last.endswith("or lower judge_rollout.self_test.min_accuracy.")
    assert len(events_of(out, "judge_self_test")) == 2
    # Both replicas were waited for with an empty call, and nobody has played.
    assert trace.names.count("JudgeWorker.answer") == 2
    assert "EngineWorker.step" not in trace.names
    assert not (out / "metrics.jsonl").exists()


def test_Q2_the_self_test_can_be_left_out_and_an_exact_judge_has_none(
    model: Path, tmp_path: Path
) -> None:
    world = write_world(tmp_path / "tiny.yaml")
    off = (f"{JUDGE}.self_test.enabled=false", f"{JUDGE}.self_test.min_accuracy=1.0")
    status, trace = play(run_words(tmp_path / "run", world, model, *off))
    assert status == 0
    assert "JudgeWorker.self_test" not in trace.names
    assert events_of(tmp_path / "run", "judge_self_test") == []
    assert not is_self_tested(config("experiment=quickstart"))
    assert is_self_tested(config("experiment=paper_qwen1.7b"))
    assert not is_self_tested(config("experiment=quickstart", "judge=smollm2"))
    assert least_accuracy(config("experiment=quickstart")) is None
    assert least_accuracy(config("experiment=paper_qwen1.7b")) == 0.8


def test_J2_a_run_whose_judges_are_all_gone_ends_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(_self: object, requests: list[JudgeRequest]) -> list[JudgeReply]:
        if requests:
            raise ReplicaGone("illegal memory access")
        return []

    monkeypatch.setattr(JudgeWorker.__ray_metadata__.modified_class, "answer", dead)  # type: ignore[attr-defined]
    monkeypatch.setattr(JudgePoolSettings, "__post_init__", instant_restarts)
    out = tmp_path / "run"
    command = words(out, write_world(tmp_path / "tiny.yaml"), f"{JUDGE}.max_restarts=2")
    status, _ = play([*command, "trainer.val_before_train=false", "trainer.final_test=false"])
    assert status == ExitStatus.CHECK_FAILED
    err = capsys.readouterr().err
    assert err.count("judge 0 died and is started again: illegal memory access") == 2
    assert "No judge replica is left and all 2 restarts" in err
    assert "Traceback" not in err
    assert len(events_of(out, "judge_restart")) == 2
    (failed,) = events_of(out, "judge_failed")
    assert failed["reason"].endswith("illegal memory access")


def test_a_step_on_parquet_tasks_is_judged_by_the_model(model: Path, tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "tw_q",
            "id": f"train_{i}",
            "golden_answers": name,
            "prompt": [{"role": "user", "content": "Find the secret thing."}],
        }
        for i, name in enumerate(("dog", "cat", "horse", "car"))
    ]
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    out = tmp_path / "run"
    status, _ = play(
        run_words(
            out,
            Path("everyday"),
            model,
            "data.world=null",
            "data.system_key=null",
            f"data.train_files=[{file}]",
            f"data.val_files=[{file}]",
            f"{JUDGE}.repeated_prompt=false",
        )
    )
    assert status == 0
    assert judged_by_the_model(out) > 0
    assert read_records(out / "metrics.jsonl")[-1]["perf/judge_cached_rate"] > 0.0
