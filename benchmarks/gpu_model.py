"""The Qwen3-1.7B shape with random weights on a GPU, and the same without our layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from delta_belief_rl.belief import branched
from delta_belief_rl.models.adapters import adapter_parameters
from delta_belief_rl.models.attention import ATTENTION_NAME
from delta_belief_rl.models.low_rank import LoraLinear
from delta_belief_rl.trainer import actor as training
from delta_belief_rl.trainer.actor import POLICY, ActorSettings, AdapterSettings, PolicyActor
from delta_belief_rl.trainer.optimizer import OptimizerSettings

DEVICE = "cuda"
SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
ROTATION = modeling_qwen3.apply_rotary_pos_emb
LORA = AdapterSettings(rank=64, alpha=64.0)


def build_actor(
    dtype: torch.dtype = torch.bfloat16, layers: int = SHAPE["num_hidden_layers"], **changes: Any
) -> PolicyActor:
    """An actor around a random model, both halves of its adapter random.

    Args:
        dtype: Of the frozen weights.
        layers: Decoder layers.
        changes: Of ``ActorSettings``.
    """
    config = Qwen3Config(**SHAPE | {"num_hidden_layers": layers})
    torch.manual_seed(0)
    with torch.device(DEVICE):
        base = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
        )
    name = str(dtype).removeprefix("torch.")
    # Without a step in any direction all ways meet the same weights; the work is the same.
    still = OptimizerSettings(lr=0.0, weight_decay=0.0)
    options: dict[str, Any] = {"adapter": LORA, "device": DEVICE, "dtype": name}
    options |= {"optimizer": still, "grad_clip": 1e9} | changes
    settings = ActorSettings(model_path="", **options)
    actor = PolicyActor(settings, base=base.to(dtype).eval())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(actor.model, POLICY).values():
            # The half that starts at zero would hide the adapter's arithmetic.
            parameter.normal_(std=0.01)
    return actor


def base_weights(actor: PolicyActor) -> int:
    """Weights of the frozen model, tied ones once."""
    return sum(p.numel() for name, p in actor.model.named_parameters() if ".lora_" not in name)


@contextmanager
def library_layers() -> Iterator[None]:
    """Layers as transformers and PEFT have them: adapters in float32, attention on padded rows."""
    with (
        mock.patch.object(modeling_qwen3, "apply_rotary_pos_emb", ROTATION),
        mock.patch.object(LoraLinear, "_only_adapter", return_value=None),
        mock.patch.object(branched, "runs_ragged", return_value=False),
        mock.patch.object(training, "runs_ragged", return_value=False),
    ):
        yield
