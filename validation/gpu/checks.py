"""The checks: what each one needs, the commands that it starts, and how its result is read.

The commands are the project's own (``train.py``, ``delta-belief``, benchmarks, tests); nothing is
done here that they do. The order is that of evidence: what other checks wait for comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from validation.gpu import reading
from validation.gpu.findings import Findings
from validation.gpu.site import Site

Command = tuple[str, ...]

TURNS = 14
"""Turn budget of ``experiment=smollm2_gpu``."""
JUDGE_LEAST = 0.9
"""Share of right answers from which a taught judge is worth training with."""
PAPER_STEPS = 2
"""The second step plays with an adapter that the first one has trained."""
GB = 1_000_000_000
ENGINES = ("actor_rollout_ref", "judge_rollout")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to show.

    Attributes:
        name: Names its folder and its record.
        about: What it shows, in one line.
        commands: Started one after another; one that fails ends the check.
        read: Makes findings of what they left.
        least: Minutes below which it is not worth beginning.
        most: Minutes after which it is ended.
        gpus: GPUs that it takes.
        share: Of the memory of each; 1.0 keeps others away, so that times are its own.
        needs: Folders that must be there, with the check that makes each.
        makes: Folders that it makes and that must not exist when it starts.
    """

    name: str
    about: str
    commands: Callable[[Site], list[Command]]
    read: Callable[[Site], Findings]
    least: float
    most: float
    gpus: int = 1
    share: float = 1.0
    needs: Callable[[Site], dict[str, Path]] = lambda site: {}
    makes: Callable[[Site], tuple[Path, ...]] = lambda site: ()


def verb(site: Site, *words: str) -> Command:
    """A ``delta-belief`` command."""
    return (site.python, "-m", "delta_belief_rl.cli.main", *words)


def stdout(site: Site, check: str) -> Path:
    """What the last command of a check printed."""
    return max(site.folder(check).glob("stdout-*.txt"), key=lambda path: int(path.stem[7:]))


# --- SmolLM2 on one GPU ---------------------------------------------------------------------------


def warm_up(site: Site) -> list[Command]:
    """Full weights on games of the mediocre player; the games are short, so batches are small."""
    return [
        verb(
            site,
            "warmup",
            f"--model={site.model}",
            f"--out={site.warm}",
            "--device=cuda",
            f"--minutes={site.warm_minutes:g}",
            f"--max-turns={TURNS}",
            "--batch-games=64",
            "--micro-games=64",
            "--lr=4e-4",
            "--eval-games=256",
            f"--workers={max(1, min(6, site.cores - 2))}",
        )
    ]


def teach(site: Site) -> list[Command]:
    """A judge out of the same model, taught with an adapter."""
    return [
        verb(
            site,
            "teach-judge",
            f"--base={site.model}",
            "--lora-rank=16",
            "--device=cuda",
            f"--minutes={site.teach_minutes:g}",
            f"--out={site.judge}",
        )
    ]


def graph_words(site: Site, engine: str) -> list[str]:
    """How an engine (``actor_rollout_ref`` or ``judge_rollout``) runs its decode steps.

    Compiled graphs make a start take minutes. Graphs of decode steps alone need no compilation.
    """
    if not site.decode_graphs:
        return [f"{engine}.rollout.enforce_eager=true"]
    graphs = "{mode: 0, cudagraph_mode: FULL_DECODE_ONLY}"
    return [
        f"{engine}.rollout.enforce_eager=false",
        f"+{engine}.rollout.engine_kwargs.vllm.compilation_config={graphs}",
    ]


def policy_words(site: Site, model: str | Path) -> list[str]:
    """``experiment=smollm2_gpu`` with engines that start soon and know the size of their cache.

    A given size spares the engine to measure what is free, which fails where another process on the
    card gives memory back meanwhile.
    """
    return [
        "experiment=smollm2_gpu",
        f"actor_rollout_ref.model.path={model}",
        *graph_words(site, "actor_rollout_ref"),
        f"actor_rollout_ref.rollout.kv_cache_memory_bytes={8 * GB}",
    ]


def judge_words(site: Site) -> list[str]:
    """The taught judge on vLLM, on the policy's card."""
    return [
        "judge=taught_vllm",
        f"judge_rollout.model.path={site.judge}",
        *graph_words(site, "judge_rollout"),
        f"judge_rollout.rollout.kv_cache_memory_bytes={8 * GB}",
        "judge_rollout.max_error_rate=0.2",
    ]


def train_words(site: Site, check: str) -> list[str]:
    """Overrides of a training that shall raise the win rate; a second start goes on from there."""
    return [
        *policy_words(site, site.warm),
        "actor_rollout_ref.actor.ppo_mini_batch_size=24",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
        "actor_rollout_ref.actor.optim.lr=5.0e-4",
        f"trainer.total_training_steps={site.steps}",
        "trainer.test_freq=10",
        f"trainer.final_test={str(site.final_test).lower()}",
        "trainer.resume_mode=auto",
        f"trainer.experiment_name={check}",
        f"trainer.output_dir={site.run(check)}",
        *(judge_words(site) if check == "train_llm_judge" else []),
    ]


def train(site: Site, check: str) -> list[Command]:
    """The training itself."""
    return [(site.python, "train.py", *train_words(site, check))]


def doctor_words(site: Site) -> list[str]:
    """Overrides of the doctor's configuration."""
    return policy_words(site, site.model)


def audit(site: Site) -> list[Command]:
    """The taught judge through vLLM against the table."""
    asked = ["--questions=2432", "--rounds=1", "--batch=256"]
    both = ["env=everyday", *judge_words(site), "--against", "env=everyday", "judge=world"]
    return [verb(site, "audit", "judge", "--json", *asked, *both)]


# --- tests and benchmarks -------------------------------------------------------------------------


def run_tests(site: Site, check: str, *files: str) -> list[Command]:
    """pytest on some files, with what the tests print in its report."""
    report = site.folder(check) / "junit.xml"
    own = ("-q", "-p", "no:cacheprovider", "-o", "junit_logging=all", f"--junitxml={report}")
    return [(site.python, "-m", "pytest", *own, *files)]


def read_tests(site: Site, check: str) -> Findings:
    """The report of pytest."""
    return reading.tests(site.folder(check) / "junit.xml")


def benchmark(site: Site) -> list[Command]:
    """Belief and update at the shape of Qwen3-1.7B."""
    own = ("--json", "--repeats=3", "--old-repeats=1", "--parts=update,belief")
    return [(site.python, "benchmarks/bench_gpu.py", *own)]


# --- published shapes with random weights ---------------------------------------------------------

ACTOR_SHAPE, JUDGE_SHAPE, AWQ_SHAPE = "qwen3-1.7b", "qwen3-14b", "qwen3-14b-awq"


def shapes(site: Site) -> list[Command]:
    """Model folders; the judges' weights are made by the engine."""

    def write(shape: str, name: str, *more: str) -> Command:
        own = (f"--shape={shape}", f"--tokenizer={site.model}", f"--out={site.made(name)}")
        return (site.python, "benchmarks/random_model.py", *own, "--device=cpu", *more)

    return [
        write(ACTOR_SHAPE, ACTOR_SHAPE, "--weights"),
        write(JUDGE_SHAPE, JUDGE_SHAPE),
        write(JUDGE_SHAPE, AWQ_SHAPE, "--awq"),
    ]


def shape_folders(site: Site) -> tuple[Path, ...]:
    """What ``shapes`` makes."""
    return tuple(site.made(name) for name in (ACTOR_SHAPE, JUDGE_SHAPE, AWQ_SHAPE))


PAPER = {
    "paper_awq_dp2": [
        "judge=qwen3_14b_awq",
        "judge_rollout.replicas=2",
        "judge_rollout.rollout.gpu_memory_utilization=0.2",
    ],
    "paper_bf16_tp2": [
        "actor_rollout_ref.ngpus=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "judge_rollout.ngpus=2",
        "judge_rollout.share_actor_gpu=true",
        "judge_rollout.rollout.tensor_model_parallel_size=2",
        "judge_rollout.rollout.gpu_memory_utilization=0.25",
    ],
    "paper_awq_shared": [
        "hardware=one_gpu",
        "judge=qwen3_14b_awq",
        "judge_rollout.rollout.gpu_memory_utilization=0.25",
    ],
    "paper_bf16_shared": [
        "hardware=one_gpu",
        "judge_rollout.rollout.tensor_model_parallel_size=1",
        "judge_rollout.rollout.gpu_memory_utilization=0.33",
    ],
}
"""Layouts of the published run: two AWQ judges on the second card; policy and judge over both
cards; everything on one card, with a judge in four bits or in bfloat16."""


def paper_words(site: Site, check: str) -> list[str]:
    """Overrides of a published run of a few steps whose models have random weights.

    A random model never stops by itself, so questions and answers are cut where usual ones end. A
    random judge's answer cannot be read, which counts as an invalid question.
    """
    judge = AWQ_SHAPE if "awq" in check else JUDGE_SHAPE
    return [
        "experiment=paper_qwen1.7b",
        *PAPER[check],
        "data.train_files=[package:twenty_questions/train]",
        "data.val_files=[package:twenty_questions/val]",
        f"actor_rollout_ref.model.path={site.made(ACTOR_SHAPE)}",
        *(word for pool in ENGINES if site.decode_graphs for word in graph_words(site, pool)),
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
        f"actor_rollout_ref.rollout.kv_cache_memory_bytes={20 * GB}",
        f"judge_rollout.model.path={site.made(judge)}",
        "+judge_rollout.rollout.engine_kwargs.vllm.load_format=dummy",
        f"judge_rollout.rollout.kv_cache_memory_bytes={10 * GB}",
        "data.max_response_length=16",
        "judge_rollout.rollout.response_length=48",
        "judge_rollout.self_test.enabled=false",
        "judge_rollout.parser=published",
        "multi_turn.verify_judge.methods=[]",
        "multi_turn.train.n=8",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        f"trainer.total_training_steps={PAPER_STEPS}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.check_freq=1",
        "trainer.resume_mode=auto",
        "trainer.logger=[console]",
        f"trainer.experiment_name={check}",
        f"trainer.output_dir={site.run(check)}",
    ]


def _paper(name: str, about: str, gpus: int, share: float) -> Check:
    return Check(
        name,
        about,
        lambda site: [(site.python, "train.py", *paper_words(site, name))],
        lambda site: reading.training(site.run(name), PAPER_STEPS),
        least=3.0,
        most=9.0,
        gpus=gpus,
        share=share,
        needs=lambda site: {"shapes": shape_folders(site)[-1]},
    )


# --- all of them ----------------------------------------------------------------------------------


def all_checks(site: Site) -> tuple[Check, ...]:
    """Every check, in the order in which they are begun where there is room."""
    warm = {"warm_start": site.warm}
    return (
        Check(
            "host",
            "GPUs, driver, versions, and that the libraries can be imported",
            lambda site: [(site.python, "-m", "validation.gpu.host")],
            lambda site: reading.host(stdout(site, "host"), site.gpus),
            least=0.2,
            most=2.0,
            gpus=0,
        ),
        Check(
            "warm_start",
            "SmolLM2-135M learns the world's language and facts",
            warm_up,
            lambda site: reading.warm_start(site.warm, TURNS),
            least=site.warm_minutes + 0.7,
            most=site.warm_minutes + 3.0,
            share=0.85,
            makes=lambda site: () if site.given_warm else (site.warm,),
        ),
        Check(
            "taught_judge",
            "SmolLM2-135M learns to judge the world",
            teach,
            lambda site: reading.taught_judge(site.judge, JUDGE_LEAST),
            least=site.teach_minutes + 0.7,
            most=site.teach_minutes + 3.0,
            share=0.5,
            makes=lambda site: () if site.given_judge else (site.judge,),
        ),
        Check(
            "train_rules",
            "through vLLM with the table as judge the strict win rate rises",
            lambda site: train(site, "train_rules"),
            lambda site: reading.learning(site.run("train_rules"), site.steps),
            least=4.0,
            most=20.0,
            share=0.4,
            needs=lambda site: warm,
        ),
        Check(
            "train_llm_judge",
            "the same with a language model as judge on the same card",
            lambda site: train(site, "train_llm_judge"),
            lambda site: reading.learning(site.run("train_llm_judge"), site.steps),
            least=5.0,
            most=20.0,
            share=0.4,
            needs=lambda site: warm | {"taught_judge": site.judge},
        ),
        Check(
            "doctor_bf16",
            "engine, trainer, adapter and beliefs agree in bfloat16",
            lambda site: [verb(site, "doctor", "--json", *doctor_words(site))],
            lambda site: reading.doctor(stdout(site, "doctor_bf16")),
            least=2.0,
            most=6.0,
            share=0.35,
        ),
        Check(
            "fsdp_tests",
            "FSDP2 over two cards gives the numbers of one; a rank that dies or hangs is named",
            lambda site: run_tests(site, "fsdp_tests", "tests/gpu/test_fsdp_gpu.py"),
            lambda site: read_tests(site, "fsdp_tests"),
            least=2.0,
            most=6.0,
            gpus=2,
            share=0.1,
        ),
        Check(
            "actor_bench",
            "belief by branches against re-reading, update packed against padded",
            benchmark,
            lambda site: reading.bench(stdout(site, "actor_bench")),
            least=1.5,
            most=6.0,
        ),
        Check(
            "gpu_tests",
            "kernels, sleep, adapters by version and memory of trainer and engine",
            lambda site: run_tests(
                site, "gpu_tests", "tests/gpu/test_actor_gpu.py", "tests/gpu/test_vllm_gpu.py"
            ),
            lambda site: read_tests(site, "gpu_tests"),
            least=1.5,
            most=6.0,
            share=0.15,
        ),
        Check(
            "judge_audit",
            "the taught judge through vLLM against the table",
            audit,
            lambda site: reading.judge_audit(stdout(site, "judge_audit"), JUDGE_LEAST),
            least=1.5,
            most=5.0,
            share=0.35,
            needs=lambda site: {"taught_judge": site.judge},
        ),
        Check(
            "shapes",
            "model folders of the published shapes",
            shapes,
            lambda site: Findings({"folders": [path.name for path in shape_folders(site)]}),
            least=0.5,
            most=4.0,
            gpus=0,
            makes=shape_folders,
        ),
        _paper(
            "paper_awq_dp2",
            "published shapes: policy on one card, two AWQ judges on the other",
            gpus=2,
            share=0.45,
        ),
        _paper(
            "paper_bf16_tp2",
            "published shapes: policy over two cards, bfloat16 judge of TP 2 beside it",
            gpus=2,
            share=0.5,
        ),
        _paper(
            "paper_awq_shared",
            "published shapes: policy and AWQ judge on one card",
            gpus=1,
            share=0.5,
        ),
        _paper(
            "paper_bf16_shared",
            "published shapes: policy and bfloat16 judge on one card",
            gpus=1,
            share=0.6,
        ),
    )
