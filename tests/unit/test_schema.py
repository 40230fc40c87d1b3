"""The typed schema: types are checked, unknown names are refused, nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from delta_belief_rl.config import docs
from delta_belief_rl.config.convert import convert, nearest, to_config
from delta_belief_rl.config.reference_keys import INERT, find_inert, status
from delta_belief_rl.config.reference_names import REFERENCE_NAMES
from delta_belief_rl.config.schema import RunConfig, leaves, lookup
from delta_belief_rl.types import UserError


def nest(name: str, value: object) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value  # type: ignore[return-value]


def test_U4_config_imports_without_torch_ray_vllm_or_transformers() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'ray', 'vllm', 'transformers', 'wandb'): sys.modules[name] = None\n"
        "import delta_belief_rl.config.compose, delta_belief_rl.config.rules\n"
        "import delta_belief_rl.config.plan_text, delta_belief_rl.config.docs\n"
        "from delta_belief_rl.config.compose import load_config\n"
        "load_config(['experiment=quickstart'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_default_tree_gives_the_default_object() -> None:
    assert to_config({}) == RunConfig()


def test_a_configuration_cannot_be_changed_after_it_was_made() -> None:
    with pytest.raises(FrozenInstanceError):
        RunConfig().seed = 3  # type: ignore[misc]


def test_every_setting_has_one_line_of_help() -> None:
    for name, item, _ in leaves(RunConfig):
        text = item.metadata.get("help", "")
        assert text.strip(), name
        assert "\n" not in text, name


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("seed", "abc", "seed must be a whole number, not 'abc'"),
        ("seed", True, "seed must be a whole number, not True"),
        ("seed", 1.5, "seed must be a whole number, not 1.5"),
        ("seed", None, "seed must be a whole number, not null"),
        ("trainer.val_only", "yes", "trainer.val_only must be true or false"),
        ("trainer.val_only", 1, "trainer.val_only must be true or false"),
        ("algorithm.gamma", "x", "algorithm.gamma must be a number"),
        ("algorithm.gamma", float("nan"), "algorithm.gamma must be a finite number"),
        ("trainer.project_name", [1], "trainer.project_name must be text"),
        ("actor_rollout_ref.actor.optim.betas", [0.9], "must be a list of 2 values"),
        ("actor_rollout_ref.actor.optim.betas", [0.9, "b"], "betas[1] must be a number"),
        ("data.train_files", [1.5], "data.train_files[0] must be text"),
        ("multi_turn", 3, "multi_turn is a group of settings"),
        ("actor_rollout_ref.model.adapters", [3], "adapters[0] must be a group such as"),
        (
            "actor_rollout_ref.model.adapters",
            [{"rnk": 3}],
            "There is no setting actor_rollout_ref.model.adapters[0].rnk",
        ),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm", 3, "must be a group of settings"),
    ],
)
def test_a_wrong_type_is_one_sentence_that_names_the_setting(
    name: str, value: object, part: str
) -> None:
    with pytest.raises(UserError) as caught:
        to_config(nest(name, value))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_W4_a_bad_wandb_mode_is_refused_and_the_choices_are_listed() -> None:
    with pytest.raises(UserError, match="one of auto, offline, online, disabled, not 'ofline'"):
        to_config(nest("trainer.wandb_mode", "ofline"))


def test_harmless_conversions_are_made() -> None:
    assert to_config(nest("algorithm.gamma", 1)).algorithm.gamma == 1.0
    assert to_config(nest("trainer.save_freq", 7.0)).trainer.save_freq == 7
    assert to_config(nest("trainer.experiment_name", 7)).trainer.experiment_name == "7"
    assert to_config(nest("data.train_files", "a.parquet")).data.train_files == ("a.parquet",)
    assert to_config(nest("data.train_files", None)).data.train_files == ()


def test_an_unquoted_yaml_yes_means_the_word() -> None:
    name = "multi_turn.verify_judge.false_positive_behavior"
    assert lookup(to_config(nest(name, True)), name) == "yes"
    assert lookup(to_config(nest(name, False)), name) == "no"
    assert lookup(to_config(nest(name, None)), name) is None


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("trainer.save_frq", "trainer.save_freq"),
        ("lora_rank", "actor_rollout_ref.model.lora_rank"),
        ("actor_rollout_ref.lora_rank", "actor_rollout_ref.model.lora_rank"),
        ("multi_turn.max_turn.train", "multi_turn.max_turns.train"),
        ("judge_rollout.gpu_memory_utilization", "judge_rollout.rollout.gpu_memory_utilization"),
    ],
)
def test_U2_an_unknown_setting_is_an_error_that_names_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        to_config(nest(wrong, 1))
    assert str(caught.value) == f"There is no setting {wrong}; did you mean {meant}?"


def test_U2_a_name_like_no_other_points_to_the_documentation() -> None:
    assert nearest("zzzqqq") == ""
    with pytest.raises(UserError, match=r"docs/config\.md"):
        to_config({"zzzqqq": 1})


def test_U2_an_inert_setting_gives_one_warning_line() -> None:
    config, warnings = convert(nest("trainer.balance_batch", True))
    assert config == RunConfig()
    assert len(warnings) == 1
    assert "trainer.balance_batch has no effect" in warnings[0]
    assert "\n" not in warnings[0]


def test_U2_a_family_without_effect_is_warned_of_once() -> None:
    tree = nest("critic.model.path", "other")
    tree["critic"]["model"]["tokenizer_path"] = "other"
    tree["critic"]["optim"] = {"lr": 1.0}
    assert convert(tree)[1] == [
        "critic.model.* settings have no effect: the critic reads the policy's model (critic.form)."
    ]


def test_U2_an_inert_value_that_describes_what_happens_anyway_is_silent() -> None:
    assert convert(nest("judge_rollout.rollout.name", "vllm"))[1] == []
    assert convert(nest("actor_rollout_ref.gen_n", 1))[1] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_rollout_ref.rollout.response_length", 99),
        ("actor_rollout_ref.gen_n", 4),
        ("actor_rollout_ref.actor.strategy", "megatron"),
        ("multi_turn.enable", False),
        ("reward_model.enable", True),
        ("actor_rollout_ref.model.override_config", {"rope_theta": 1}),
    ],
)
def test_U2_an_inert_value_that_would_mean_another_experiment_is_an_error(
    name: str, value: object
) -> None:
    with pytest.raises(UserError, match="is not possible here"):
        to_config(nest(name, value))


def test_U2_an_unknown_name_inside_an_inert_family_is_still_unknown() -> None:
    with pytest.raises(UserError, match=r"no setting critic\.optm"):
        to_config(nest("critic.optm", 1))


def test_every_published_setting_has_a_status_and_every_other_one_is_marked_new() -> None:
    known = {name: item for name, item, _ in leaves(RunConfig)}
    for name in REFERENCE_NAMES:
        kind, note = status(name)
        assert (kind == "effective") == (not note), name
        assert (kind == "inert") == (name not in known), name
    for name, item in known.items():
        assert bool(item.metadata.get("new")) == (name not in REFERENCE_NAMES), name
        assert find_inert(name) is None, name
    for name, entry in INERT.items():
        assert name in REFERENCE_NAMES
        assert not entry.follows or entry.follows in known
    with pytest.raises(KeyError):
        status("nobody.knows.this")


def test_the_committed_settings_document_is_current() -> None:
    assert docs.main(["--check"]) == 0
