"""A model folder of a published shape with random weights, to try a layout before any download.

    python benchmarks/random_model.py --shape qwen3-1.7b --tokenizer FOLDER --out actor --weights
    python benchmarks/random_model.py --shape qwen3-14b --awq --tokenizer FOLDER --out judge

With ``--awq``, or without ``--weights``, only the configuration and the tokenizer are written: vLLM
then makes the weights itself (``engine_kwargs.vllm.load_format=dummy``). The tokenizer is another
model's, smaller than the vocabulary; what is sampled beyond it is read as nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

# hidden, layers, heads, key-value heads, feed-forward, tied embeddings
SHAPES = {
    "qwen3-1.7b": (2048, 28, 16, 8, 6144, True),
    "qwen3-4b": (2560, 36, 32, 8, 9728, True),
    "qwen3-14b": (5120, 40, 40, 8, 17408, False),
}
HEAD_DIM, VOCABULARY, LONGEST = 128, 151_936, 40_960
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def shape_config(shape: str) -> Qwen3Config:
    """The configuration of a shape, in bfloat16."""
    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[shape]
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        intermediate_size=intermediate,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


def write(shape: str, tokenizer: str, out: Path, weights: bool, awq: bool, device: str) -> None:
    """Write the folder; refuses one that exists."""
    out.mkdir(parents=True, exist_ok=False)
    config = shape_config(shape)
    if weights:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
        model.save_pretrained(out)
    body = {**config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    if awq:
        body["quantization_config"] = AWQ
    (out / "config.json").write_text(json.dumps(body, indent=1), encoding="utf-8")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--tokenizer", required=True, help="folder or hub id of any chat model")
    parser.add_argument("--out", required=True, type=Path, help="a folder that is not there yet")
    parser.add_argument("--weights", action="store_true", help="write random weights, too")
    parser.add_argument("--awq", action="store_true", help="say that the weights are AWQ, 4 bits")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.awq and args.weights:
        parser.error("--awq writes no weights: leave --weights out")
    if args.out.exists():
        parser.error(f"{args.out} exists already: name another folder")
    write(args.shape, args.tokenizer, args.out, args.weights, args.awq, args.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
