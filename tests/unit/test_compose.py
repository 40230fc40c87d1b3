"""Composition: groups, overrides, files, round trips, and errors in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.config.compose import (
    from_yaml,
    group_options,
    load_config,
    resolve_auto,
    resolved_yaml,
)
from delta_belief_rl.config.paths import PACKAGE, config_dir, find_file, find_model
from delta_belief_rl.config.schema import RunConfig, leaves
from delta_belief_rl.types import UserError


def test_base_yaml_holds_the_defaults_of_the_schema() -> None:
    assert load_config()[0] == resolve_auto(RunConfig())


def test_base_yaml_shows_every_setting() -> None:
    shown = yaml.safe_load((config_dir() / "base.yaml").read_text(encoding="utf-8"))

    def has(path: str) -> bool:
        place = shown
        for name in path.split("."):
            if not isinstance(place, dict) or name not in place:
                return False
            place = place[name]
        return True

    assert [name for name, _, _ in leaves(RunConfig) if not has(name)] == []


def test_a_plus_before_a_setting_or_a_group_changes_nothing() -> None:
    plain = load_config(["experiment=quickstart", "trainer.save_freq=3"])
    assert load_config(["+experiment=quickstart", "+trainer.save_freq=3"]) == plain
    assert load_config(["experiment=quickstart", "++trainer.save_freq=3"]) == plain


def test_the_command_line_wins_over_groups_and_groups_over_base() -> None:
    config, _ = load_config(["trainer.save_freq=3", "experiment=quickstart", "judge=api"])
    assert config.trainer.save_freq == 3
    assert config.multi_turn.train.n == 8
    assert config.judge_rollout.name == "api"


def test_interpolations_follow_their_source() -> None:
    config, _ = load_config(
        [
            "actor_rollout_ref.ngpus=4",
            "actor_rollout_ref.model.lora_rank=8",
            "trainer.experiment_name=mine",
            "data.max_response_length=30",
            "data.train_batch_size=${data.max_response_length}",
        ]
    )
    actor = config.actor_rollout_ref
    assert actor.rollout.tensor_model_parallel_size == 4
    assert [(a.r, a.alpha) for a in actor.model.adapters] == [(8, 8), (8, 8)]
    assert config.trainer.default_local_dir == "outputs/delta_belief_rl/mine/checkpoints"
    assert config.data.train_batch_size == 30


def test_an_adapter_list_is_read_from_the_command_line() -> None:
    text = "actor_rollout_ref.model.adapters=[{name: a, r: 4, alpha: 8, target_modules: [q_proj]}]"
    (adapter,) = load_config([text])[0].actor_rollout_ref.model.adapters
    assert (adapter.name, adapter.r, adapter.alpha) == ("a", 4, 8)
    assert adapter.target_modules == ("q_proj",)


def test_auto_settings_are_settled_from_their_neighbours() -> None:
    world = load_config(["data.world=everyday"])[0]
    assert (world.judge_rollout.name, world.judge_rollout.ngpus) == ("world", 0)
    assert world.data.train_files == world.data.val_files == ()
    assert load_config()[0].judge_rollout.name == "vllm"
    api = load_config(["+judge_rollout.model.api_model_name=m"])[0]
    assert (api.judge_rollout.name, api.judge_rollout.ngpus) == ("api", 0)
    raw = load_config()[0].multi_turn.logprob_reward
    shaped = load_config(["multi_turn.logprob_reward.normalised=true"])[0].multi_turn.logprob_reward
    assert (raw.winning_turn, shaped.winning_turn) == ("keep", "drop")


@pytest.mark.parametrize("experiment", group_options()["experiment"])
def test_U3_the_resolved_file_of_a_run_gives_the_identical_object(
    experiment: str, tmp_path: Path
) -> None:
    config, _ = load_config([f"experiment={experiment}", "seed=7"])
    text = resolved_yaml(config)
    assert from_yaml(text) == config
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    assert load_config([], str(file)) == (config, [])
    assert load_config(["seed=8"], str(file))[0] == replace(config, seed=8)


@settings(max_examples=50, deadline=None)
@given(
    lr=st.floats(1e-12, 1e6),
    name=st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20),
    seed=st.integers(-(2**63), 2**63),
    extra=st.dictionaries(
        st.text("abc_", min_size=1), st.none() | st.booleans() | st.integers() | st.text("x1 :-")
    ),
)
def test_U3_any_number_and_text_survives_the_round_trip(
    lr: float, name: str, seed: int, extra: dict[str, object]
) -> None:
    base = resolve_auto(RunConfig())
    actor = base.actor_rollout_ref
    update = replace(actor.actor, optim=replace(actor.actor.optim, lr=lr))
    engine = replace(actor.rollout, engine_kwargs=replace(actor.rollout.engine_kwargs, vllm=extra))
    config = replace(
        base,
        seed=seed,
        trainer=replace(base.trainer, experiment_name=name),
        actor_rollout_ref=replace(actor, actor=update, rollout=engine),
    )
    assert from_yaml(resolved_yaml(config)) == config


def test_a_users_file_is_laid_over_base_and_may_hold_published_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "trainer: {save_freq: 4}\ncritic: {ppo_epochs: 2}\n"
        "multi_turn: {verify_judge: {false_positive_behavior: no}}\n"
        "actor_rollout_ref: {rollout: {prompt_length: '${data.max_prompt_length}'}}\n"
    )
    config, warnings = load_config(["experiment=quickstart"], str(file))
    assert config.trainer.save_freq == 4
    assert config.multi_turn.train.n == 8
    assert config.multi_turn.verify_judge.false_positive_behavior == "no"
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("experiment=quikstart", "did you mean quickstart?"),
        ("seed", "is not of the form key=value"),
        ("trainer.logger=[a", "is not of the form key=value"),
        ("seed=1,2", "start no sweep"),
        ("~seed", "set it to null instead"),
        ("data.train_batch_size=${no.such}", "cannot be resolved"),
        ("data.train_batch_size=${data.train_batch_size}", "cannot be resolved"),
        ("data.train_batch_size=???", "cannot be resolved"),
        ("actor_rollout_ref.model.adapters.9.r=3", "cannot be composed"),
        ("trainer.save_frq=1", "did you mean trainer.save_freq?"),
    ],
)
def test_U2_every_composition_error_is_one_sentence(override: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config([override])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_config([], "nowhere.yaml")
    with pytest.raises(UserError, match="There is no configuration nowhere"):
        load_config([], "nowhere")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(UserError, match="cannot be composed"):
        load_config([], str(broken))
    for text in ("a: [1", "[1, 2]"):
        with pytest.raises(UserError, match="This is not a configuration"):
            from_yaml(text)


def test_U2_a_setting_that_the_chosen_back_end_ignores_is_warned_of() -> None:
    _, warnings = load_config(
        ["experiment=quickstart", "judge_rollout.rollout.enforce_eager=false"]
    )
    assert warnings == [
        "judge_rollout.rollout.enforce_eager has no effect with world: only vllm reads it."
    ]
    assert load_config(["experiment=paper_qwen4b", "judge_rollout.rollout.dtype=float16"])[1] == []


def test_packaged_files_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_dir().name == "configs"
    assert find_file("delta_belief_rl/types.py") == PACKAGE / "types.py"
    assert find_file("nothing/here.txt") == Path("nothing/here.txt")
    assert find_model("owner/name") == "owner/name"
    (tmp_path / "local").mkdir()
    assert find_model("local") == "local"
