"""A game of TextArena trains and validates through the loop, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.text.word_tokenizer import CHAT_TEMPLATE
from delta_belief_rl.types import StopReason, Verdict
from tests.runs import play, words

pytest.importorskip("textarena")

STEPS = 2
OPENING = "Guess the number between 1 and 20: write it in square brackets, for example [5]."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of a few thousand weights that can write any text."""
    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [OPENING],
        trainers.BpeTrainer(
            vocab_size=400,
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
    """A run of two steps, each with two games of four tasks."""
    return [
        *words(out, Path("null")),
        "env=textarena",
        "multi_turn.env_kwargs.game=GuessTheNumber-v0",
        "multi_turn.env_kwargs.tasks={train: 8, val: 3, test: 0}",
        "judge=rules",
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=3000",
        "data.max_response_length=12",
        "multi_turn.train.n=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.final_test=false",
        *more,
    ]


@pytest.mark.slow
def test_a_game_of_textarena_trains_and_validates_through_the_loop(
    tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "run"
    status, _ = play(command(out, model))
    assert status == 0
    records = read_records(out / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    assert all(record["actor/grad_norm"] > 0 for record in trained)
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert len(games) == 8
    assert {game.task.source for game in games} == {"textarena"}
    assert all(game.task.secret in {str(n) for n in range(1, 21)} for game in games)
    # The belief reward is measured like that of every other environment.
    assert all(len(game.beliefs or ()) == game.num_turns + 1 for game in games)
    # A random policy rarely writes a move: two invalid moves in a row end its games.
    assert {game.stop for game in games} <= {
        StopReason.WIN, StopReason.ENDED, StopReason.TURN_LIMIT
    }  # fmt: skip
    assert any(turn.verdict is Verdict.INVALID for game in games for turn in game.turns)
    assert not any(turn.verdict is Verdict.ERROR for game in games for turn in game.turns)
    validated = read_trajectories(out / "validation" / f"{STEPS}.jsonl").trajectories
    assert len(validated) == 3 * 2
