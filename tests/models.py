"""Model folders that hold a ``config.json`` and the headers of weights, but no numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""``(number format, shape)`` by name."""

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
QWEN_14B: dict[str, Any] = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 128, "strategy": "group", "type": "int"},
        }
    },
}
LAYER = "model.layers.0.mlp.down_proj."


def awq_tensors(inputs: int = 512, outputs: int = 256, group: int = 128, bits: int = 4) -> Tensors:
    """One layer as AutoAWQ stores it."""
    each = 32 // bits
    return {
        f"{LAYER}qweight": ("I32", (inputs, outputs // each)),
        f"{LAYER}qzeros": ("I32", (inputs // group, outputs // each)),
        f"{LAYER}scales": ("F16", (inputs // group, outputs)),
        "model.embed_tokens.weight": ("F16", (512, 256)),
    }


def compressed_tensors(inputs: int = 512, outputs: int = 256, group: int = 128) -> Tensors:
    """One layer as compressed-tensors packs it."""
    return {
        f"{LAYER}weight_packed": ("I32", (outputs, inputs // 8)),
        f"{LAYER}weight_scale": ("BF16", (outputs, inputs // group)),
        f"{LAYER}weight_shape": ("I64", (2,)),
    }


PLAIN: Tensors = {f"{LAYER}weight": ("BF16", (256, 512))}


def write_header(file: Path, tensors: Tensors) -> Path:
    """A safetensors file without its numbers."""
    body = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **body}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return file


def write_model(
    folder: Path,
    tensors: Tensors = PLAIN,
    quantised: Mapping[str, Any] | None = None,
    **entries: Any,
) -> Path:
    """A model folder; ``entries`` overwrite those of a small Qwen3."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "qwen3", "dtype": "bfloat16", **SMALL, **entries}
    if quantised is not None:
        config["quantization_config"] = dict(quantised)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_header(folder / "model.safetensors", tensors)
    return folder
