"""Every YAML composes and validates, every published launch line works, entry points behave."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from delta_belief_rl.algo import AGGREGATIONS, CREDITS, KL, LOSSES
from delta_belief_rl.algo.samplers.informative import METRICS
from delta_belief_rl.algo.shapers.kl_reward import CONTROLLERS, DIVERGENCES
from delta_belief_rl.belief.shaping import METHODS
from delta_belief_rl.cli.main import VERBS, load_verb
from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.config.compose import from_yaml, group_options, load_config, resolved_yaml
from delta_belief_rl.config.facts import Facts
from delta_belief_rl.config.plan import make_plan
from delta_belief_rl.config.reference_names import REFERENCE_NAMES
from delta_belief_rl.config.rules import check
from delta_belief_rl.config.schema import RunConfig, leaves, lookup
from delta_belief_rl.config.schema_algo import ESTIMATORS
from delta_belief_rl.config.schema_turns import BELIEF_METHODS, VERIFY_METHODS
from delta_belief_rl.envs.answers import POSITIVE_METHODS, VALIDITY_METHODS
from tests.launch_lines import EVALUATION_LINES, LINES, filled

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ("actor_rollout_ref.model.path=p", "judge_rollout.model.path=p", "multi_turn.train.n=2")
"""What every option but an experiment leaves open."""

EVERY_OPTION = [(group, option) for group, names in group_options().items() for option in names]


@pytest.mark.parametrize(("group", "option"), EVERY_OPTION)
def test_every_yaml_composes_and_validates(group: str, option: str) -> None:
    more = []
    if group != "experiment":
        more = [
            "experiment=quickstart" if option in ("world", "cpu") else "experiment=paper_qwen1.7b"
        ]
        if group == "env" and option != "twenty_questions":
            more = [*LOCAL, "trainer.val_only=true", "actor_rollout_ref.ngpus=1"]
        if group == "actor" and option in ("agent", "smollm2"):
            more = ["experiment=quickstart"]
        if option in ("denoiser", "dtca"):
            more = ["experiment=agreement_quickstart"]
        if option == "rules":
            more.append("env=guess_my_city_packaged")
        if option == "one_gpu":
            more.append("judge=qwen3_14b_awq")
    config, warnings = load_config([*more, f"{group}={option}"])
    check(config)
    assert warnings == []
    make_plan(config, Facts(1000, 100, cores=4, gpus=8)).check()


@pytest.mark.parametrize("name", LINES)
def test_every_published_launch_line_composes_and_validates(name: str) -> None:
    config, warnings = load_config(filled(name))
    check(config)
    assert make_plan(config, Facts(1000, 198, cores=64, gpus=8)).problems == ()
    for warning in warnings:
        assert warning.startswith(("multi_turn.debug", "judge_rollout.rollout.")), warning


@pytest.mark.parametrize("name", LINES)
def test_what_a_published_launch_line_sets_arrives_in_the_configuration(name: str) -> None:
    config, _ = load_config(filled(name))
    known = {leaf for leaf, _, _ in leaves(RunConfig)}
    for text in filled(name):
        key, value = text.lstrip("+").split("=", 1)
        if key in known and not value.startswith("["):
            found = lookup(config, key)
            shown = found[0] if isinstance(found, tuple) else found
            wanted = (
                json.loads(value) if value[0] in '0123456789-"' or value in "truefalse" else value
            )
            assert shown == (None if wanted == "null" else wanted), text


@pytest.mark.parametrize(
    ("experiment", "line"),
    [
        ("paper_qwen1.7b", "train_delta_belief_qwen1.7b"),
        ("paper_qwen4b", "train_delta_belief_qwen4b"),
        ("starpo_qwen1.7b", "train_grpo_qwen1.7b"),
        ("starpo_qwen4b", "train_grpo_qwen4b"),
        ("train_8xa100_paper", "train_8xa100_paper"),
        ("train_8xa100_awq_dp7", "train_8xa100_awq_dp7"),
        ("eval_twenty_questions", "twenty_questions"),
        ("eval_guess_my_city", "guess_my_city"),
        ("eval_murder_mystery", "murder_mystery"),
        ("eval_customer_service", "customer_service"),
    ],
)
def test_an_experiment_equals_the_launch_line_of_its_name(experiment: str, line: str) -> None:
    ours, _ = load_config([f"experiment={experiment}"])
    theirs, _ = load_config(filled(line))
    free = ("trainer.", "data.train_files", "actor_rollout_ref.model.")
    if experiment.startswith("starpo"):
        free = (*free, "data.val_files")
    if experiment.startswith("eval"):
        free = (*free, "actor_rollout_ref.actor.fsdp_config", "judge_rollout.model.api_model_name")
        # A judge behind an API is sampled by its own published numbers.
        free = (
            (*free, "judge_rollout.rollout.val_kwargs") if ours.judge_rollout.ngpus == 0 else free
        )
    for name, _, _ in leaves(RunConfig):
        if not name.startswith(free) and name != "judge_rollout.model.path":
            assert lookup(ours, name) == lookup(theirs, name), name
    for name in ("total_epochs", "test_freq", "save_freq", "val_only", "resume_mode"):
        assert getattr(ours.trainer, name) == getattr(theirs.trainer, name), name


EVALUATIONS = [name for name in group_options()["experiment"] if name.startswith("eval_")]


@pytest.mark.parametrize(
    "words",
    [
        *([f"experiment={name}"] for name in EVALUATIONS),
        *(filled(name) for name in EVALUATION_LINES),
        ["experiment=eval_twenty_questions", "actor_rollout_ref.model.lora_rank=0"],
    ],
    ids=lambda words: words[0],
)
def test_an_evaluation_of_a_model_without_an_adapter_is_not_refused(words: list[str]) -> None:
    config, _ = load_config(words)
    model = config.actor_rollout_ref.model
    assert unavailable(config) == []
    assert model.lora_rank == model.adapters[0].r > 0
    assert from_yaml(resolved_yaml(config)) == config


@pytest.mark.parametrize("env", ["guess_my_city", "murder_mystery", "customer_service"])
def test_packaged_games_are_won_as_the_table_of_environments_says(env: str) -> None:
    words = ["experiment=smollm2_cpu", "judge=rules", f"env={env}_packaged"]
    assert load_config(words)[0].multi_turn.win_rule == "strict"
    assert load_config([f"experiment=eval_{env}"])[0].multi_turn.win_rule == "compatible"


def test_all_published_settings_are_accounted_for() -> None:
    assert len(REFERENCE_NAMES) == len(set(REFERENCE_NAMES)) == 324


def test_the_names_that_rules_accept_are_those_that_the_rooms_provide() -> None:
    assert set(ESTIMATORS) == set(CREDITS)
    assert set(BELIEF_METHODS) == {*METHODS, "pacr", "potential"}
    assert set(VERIFY_METHODS) == {*VALIDITY_METHODS, *POSITIVE_METHODS, "multiple_bets"}
    choices = {name: get_args(kind) for name, _, kind in leaves(RunConfig)}
    assert set(choices["actor_rollout_ref.actor.loss_agg_mode"]) == set(AGGREGATIONS)
    assert set(choices["actor_rollout_ref.actor.kl_loss_type"]) == set(KL)
    assert set(choices["actor_rollout_ref.actor.policy_loss"]) == set(LOSSES)
    assert set(choices["algorithm.kl_penalty"]) == set(DIVERGENCES)
    assert set(choices["algorithm.kl_ctrl.type"]) == set(CONTROLLERS)
    assert set(choices["algorithm.filter_groups.metric"]) == set(METRICS)


ABLATIONS: dict[str, dict[str, Any]] = {
    "relu": {},
    "tanh": {"methods": ("tanh",)},
    "naive": {"methods": (), "normalised": False, "winning_turn": "keep"},
    "ema": {"base_model": "ema"},
    "pacr": {"methods": ("pacr",)},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_shaping_ablation_is_the_published_run_but_for_its_shaping(name: str) -> None:
    base, _ = load_config(["experiment=paper_qwen1.7b"])
    ours, _ = load_config([f"experiment=ablation_{name}"])
    shaped = replace(base.multi_turn.logprob_reward, **ABLATIONS[name])
    assert ours.multi_turn.logprob_reward == shaped
    free = ("multi_turn.logprob_reward.", "trainer.", "actor_rollout_ref.model.adapters")
    for setting, _, _ in leaves(RunConfig):
        if not setting.startswith(free):
            assert lookup(ours, setting) == lookup(base, setting), setting


def test_the_guards_of_the_belief_reward_are_off_where_a_published_run_is_repeated() -> None:
    published, _ = load_config(["experiment=paper_qwen1.7b"])
    quick, _ = load_config(["experiment=guarded_quickstart"])
    plain, behind = (c.multi_turn.logprob_reward for c in (published, quick))
    assert (plain.prior_form, plain.first_turn, plain.dead_band) == ("prompt", "keep", 0.0)
    assert (plain.base_model, plain.step_model) == ("actor", "actor")
    assert (behind.prior_form, behind.dead_band, behind.methods) == ("reply", 0.1, ("pacr",))
    assert (behind.base_model, behind.step_model) == ("base", "base")


def test_the_quick_start_family_differs_only_in_credit_and_belief() -> None:
    base, _ = load_config(["experiment=quickstart"])
    for name, estimator in (("starpo_quickstart", "grpo"), ("grpo_turn_quickstart", "grpo_turn")):
        other, _ = load_config([f"experiment={name}"])
        assert other.algorithm.adv_estimator == estimator
        assert not other.multi_turn.logprob_reward.enabled
        assert other.data == base.data
        assert other.actor_rollout_ref.actor.optim == base.actor_rollout_ref.actor.optim
        assert other.multi_turn.reward.signals == base.multi_turn.reward.signals


def train(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_U4_a_dry_run_prints_the_plan_without_importing_torch_or_ray() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'ray', 'vllm', 'transformers'): sys.modules[name] = None\n"
        "import train\n"
        "sys.exit(train.main(['--dry-run', 'experiment=quickstart', 'seed=5']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "Plan of quickstart/delta_belief (seed 5)" in done.stdout


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trainer.save_frq=1"], "did you mean trainer.save_freq?"),
        (["--no-such-option"], "unrecognized arguments"),
        (
            ["experiment=quickstart", "multi_turn.train.n=1"],
            "multi_turn.train.n must be at least 2",
        ),
        (["experiment=quickstart", "data.world=no_such_world"], "no_such_world"),
        (
            ["experiment=paper_qwen1.7b", "data.train_files=/no.parquet"],
            "/no.parquet does not exist",
        ),
    ],
)
def test_bad_input_is_one_sentence_on_stderr_and_status_two(words: list[str], part: str) -> None:
    done = train(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert part in done.stderr


def test_help_shows_a_command_that_works() -> None:
    done = train("--help")
    assert done.returncode == 0
    assert "python train.py experiment=quickstart" in done.stdout


def test_every_verb_loads_and_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in VERBS:
        verb = load_verb(name)
        assert verb.name == name
        assert verb.example.startswith("delta-belief ")
        with pytest.raises(SystemExit) as caught:
            cli([name, "--help"])
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert verb.example in out
        assert "--json" in out


def test_the_plan_verb_gives_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli(["plan", "--json", "experiment=quickstart"])
    found = json.loads(capsys.readouterr().out)
    assert status == (1 if found["problems"] else 0)
    assert found["games_per_step"] == 192
    assert cli(["plan", "experiment=quickstart"]) == status
    assert "One training step" in capsys.readouterr().out


def test_a_bad_verb_or_setting_is_one_sentence_and_status_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli(["plan", "seed=abc"]) == 2
    assert capsys.readouterr().err == (
        "delta-belief plan: seed must be a whole number, not 'abc'.\n"
    )
    with pytest.raises(SystemExit) as caught:
        cli(["no-such-verb"])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
