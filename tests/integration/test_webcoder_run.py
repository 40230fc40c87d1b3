"""Projects of the environment webcoder train and validate through the loop, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.envs.webcoder.game import WebCoder
from delta_belief_rl.envs.webcoder.report import by_kind, task_rewards
from delta_belief_rl.envs.webcoder.settings import WebCoderSettings
from delta_belief_rl.envs.webcoder.tasks import blueprint_from_json, make_tasks
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.text.word_tokenizer import CHAT_TEMPLATE
from delta_belief_rl.trainer.environments import env_factory
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.types import StopReason, Verdict
from tests.runs import play, words

STEPS = 2
TURNS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of a few thousand weights that can write any text."""
    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = [task.messages[0].content for task in make_tasks("val", 6, 0)]
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


def command(out: Path, model: Path, *more: str) -> list[str]:
    """A run of two steps, each with two games of four projects of four tasks."""
    return [
        *words(out, Path("null")),
        "env=webcoder",
        "judge=rules",
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=3000",
        "data.max_response_length=12",
        "multi_turn.env_kwargs.tasks={train: 8, val: 3, test: 0}",
        "multi_turn.env_kwargs.turns_per_task=1",
        "multi_turn.env_kwargs.prompt=short",
        f"multi_turn.max_turns={{train: {TURNS}, val: {TURNS}}}",
        "multi_turn.train.n=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.final_test=false",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gigpo", "delta_belief"])
def test_projects_train_and_validate_through_the_loop(
    algorithm: str, tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "run"
    status, _ = play(command(out, model, f"algorithm={algorithm}"))
    assert status == 0
    records = read_records(out / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert len(games) == 8
    assert {game.task.source for game in games} == {"webcoder"}
    assert {game.stop for game in games} <= {StopReason.TURN_LIMIT, StopReason.ENDED}
    turns = [turn for game in games for turn in game.turns]
    assert Verdict.INVALID in {turn.verdict for turn in turns}
    assert all(turn.state_key and turn.action_key for turn in turns)
    if algorithm == "gigpo":
        # What is not understood changes nothing, so that states are met again.
        assert all(record["critic/mean_state_group_size"] > 1.0 for record in trained)
    else:
        # A random policy writes nothing that is understood; its beliefs differ all the same.
        assert all(record["actor/grad_norm"] > 0 for record in trained)
        assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in games)
    # A project comes back from the file as it was, and its game can be played again.
    settings = WebCoderSettings(turns_per_task=1)
    for game in games:
        assert blueprint_from_json(game.task.scenario or "").jobs
        assert len(task_rewards(game, settings, TURNS)) == game.num_turns == TURNS
        assert game.score is not None
    assert by_kind(games, settings, TURNS)["reproduce"].tasks == 8
    validated = read_trajectories(out / "validation" / f"{STEPS}.jsonl").trajectories
    assert len(validated) == 3 * 2


def test_the_configured_environment_plays_its_tasks(tmp_path: Path, model: Path) -> None:
    cfg, _ = load_config(command(tmp_path, model))
    sets = load_tasks(cfg)
    assert (len(sets.train), len(sets.val), len(sets.test)) == (8, 3, 0)
    game = env_factory(cfg, TURNS)(sets.val[0])
    assert isinstance(game, WebCoder)
    outcome = game.apply(game.parse(game.reference()), None)
    assert outcome.reply.startswith("Build ok.")
    assert outcome.diagnostics == ("task_over",)


def test_the_environment_by_its_name_alone_has_all_tasks() -> None:
    name = ["experiment=smollm2_cpu", "env=webcoder", "judge=rules"]
    cfg, _ = load_config([*name, "data.sample_count={val: 64}", "trainer.final_test=true"])
    sets = load_tasks(cfg)
    assert (len(sets.train), len(sets.val), len(sets.test)) == (256, 64, 64)
