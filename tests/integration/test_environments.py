"""Every environment trains, validates and resumes through the same loop, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import ENVIRONMENTS
from delta_belief_rl.envs.packaged import TASKS
from delta_belief_rl.envs.parquet import SOURCES, read_parquet
from delta_belief_rl.judge.packaged import RULE_JUDGES
from delta_belief_rl.judge.scripts import SCRIPTS
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.text.word_tokenizer import CHAT_TEMPLATE
from delta_belief_rl.trainer.environments import FACTORIES
from delta_belief_rl.types import StopReason, Verdict
from tests.runs import play, words

OTHERS = sorted({*ENVIRONMENTS} - {"twenty_questions"})
STEPS = 2


def test_every_environment_has_a_factory_a_judge_and_tasks() -> None:
    assert set(ENVIRONMENTS) == set(FACTORIES) == set(SCRIPTS) == set(SOURCES.values())
    assert set(OTHERS) == set(TASKS) == set(RULE_JUDGES)


@pytest.mark.parametrize("env", OTHERS)
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_packaged_files_hold_the_tasks_of_the_data(env: str, split: str) -> None:
    assert read_parquet(f"package:{env}/{split}", system_key=None) == TASKS[env](split)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of a few thousand weights that can write any text."""
    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = [message.content for env in OTHERS for message in TASKS[env]("val")[0].messages]
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|im_end|>", "<|im_start|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def command(env: str, out: Path, model: Path, *more: str) -> list[str]:
    """A run of two steps, each with two games of four tasks."""
    world, group = Path("null"), "user_personalization" if env == "user_personalization" else env
    group = group if env == "user_personalization" else f"{env}_packaged"
    return [
        *words(out, world),
        f"env={group}",
        "judge=rules",
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=3000",
        "data.max_response_length=12",
        "data.sample_count={train: 8, val: 3}",
        "multi_turn.train.n=2",
        "multi_turn.win_rule=compatible",
        f"trainer.total_training_steps={STEPS}",
        "trainer.final_test=false",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("env", OTHERS)
def test_an_environment_trains_and_validates_through_the_loop(
    env: str, tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "run"
    status, _ = play(command(env, out, model))
    assert status == 0
    records = read_records(out / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    assert all(record["judge/error_rate"] == 0.0 for record in records if record["step"] > 0)
    assert all(record["actor/grad_norm"] > 0 for record in trained)
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert len(games) == 8
    assert {game.task.source for game in games} == {env}
    assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in games)
    assert {game.stop for game in games} <= {
        StopReason.WIN, StopReason.ENDED, StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL
    }  # fmt: skip
    validated = read_trajectories(out / "validation" / f"{STEPS}.jsonl").trajectories
    assert len(validated) == 3 * 2


@pytest.mark.parametrize("env", OTHERS)
def test_the_configured_environment_plays_a_packaged_task(env: str, tmp_path: Path) -> None:
    cfg, _ = load_config(command(env, tmp_path, tmp_path))
    game = FACTORIES[env](cfg, 3)(TASKS[env]("val")[0])
    action = game.parse("Please tell me more about it.")
    (reply,) = (
        RULE_JUDGES[env]().answer([game.judge_request(action)]) if action.needs_judge else (None,)
    )
    outcome = game.apply(action, reply)
    assert outcome.verdict is not Verdict.ERROR
    assert outcome.reply
