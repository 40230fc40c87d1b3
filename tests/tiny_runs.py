"""What the runs of two steps in every environment share: a tiny policy, settings, what they leave.

The policy is random and of a few thousand weights, so that such a run shows that an environment is
connected with everything, and not that anything is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.text.word_tokenizer import CHAT_TEMPLATE
from delta_belief_rl.types import Trajectory
from tests.runs import play, words

STEPS = 2
NO_WORLD = Path("null")


def text_tokenizer(texts: Sequence[str] = (), most: int = 600) -> PreTrainedTokenizerFast:
    """Reads and writes any text; pieces of some texts are tokens, of none the bytes alone."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=most,
            special_tokens=["<|im_end|>", "<|im_start|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )


def write_policy(
    folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, context: int = 4096
) -> Path:
    """A random policy with the tokens of a tokenizer, by default of the bytes alone."""
    tokenizer = tokenizer or text_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def command(out: Path, model: Path, env: str, *more: str) -> list[str]:
    """A run of two steps, each with two games of four tasks.

    Args:
        out: The run's folder.
        model: The policy.
        env: Group of settings.
        more: Settings behind those.
    """
    return [
        *words(out, NO_WORLD),
        f"env={env}",
        "judge=rules",
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=3000",
        "data.max_response_length=12",
        "multi_turn.train.n=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.final_test=false",
        *more,
    ]


@dataclass(frozen=True)
class Played:
    """What a run of two steps has left.

    Attributes:
        records: All of them.
        trained: Those of training steps.
        games: Of the last training step.
        validated: Of the last validation.
    """

    records: list[dict[str, Any]]
    trained: list[dict[str, Any]]
    games: Sequence[Trajectory]
    validated: Sequence[Trajectory]


def played(out: Path, asked: list[str]) -> Played:
    """Play a run of two steps to its end, and read what it leaves."""
    status, _ = play(asked)
    assert status == 0
    records = read_records(out / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    return Played(
        records,
        trained,
        read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories,
        read_trajectories(out / "validation" / f"{STEPS}.jsonl").trajectories,
    )
