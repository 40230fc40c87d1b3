"""Belief and update on a GPU, at the shape of Qwen3-1.7B: one run, one table (or ``--json``).

    python benchmarks/bench_gpu.py [--parts belief,update] [--json]

Weights and tokens are random; the classes are the project's. *belief*: one branched pass against a
forward for every turn with the logits of every position. *update*: packed sequences with logits at
the sampled tokens against rows of 2,500 tokens with logits everywhere. The first row of a part is
the old way with the layers of transformers and PEFT as they come, the second the old way with our
layers. Each part checks that both ways agree, and that they agree with float32 on a few games; exit
status 1 when they do not. A share counts 6 operations per weight and token and compares with the
bfloat16 matrix rate that the same run measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("belief", "update")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; returns 0, 1 when two ways disagree, 2 without a GPU."""
    args = parse(argv)
    import torch

    if not torch.cuda.is_available():
        print("bench_gpu.py needs a CUDA device and finds none.", file=sys.stderr)
        return 2
    from gpu_parts import belief_part, gpu_facts, update_part

    facts = gpu_facts()
    if not args.json:
        print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    makers = {"belief": belief_part, "update": update_part}
    parts = []
    for name in args.parts:
        part = makers[name](args, facts["matrix_tflops"])
        parts.append(part)
        if not args.json:
            print(f"\n{part.as_text()}", flush=True)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        body = [part.as_dict() for part in parts]
        print(json.dumps({"hardware": facts, "settings": settings, "parts": body}))
    return int(not all(check.ok for part in parts for check in part.checks))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_gpu.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/bench_gpu.py --parts update --repeats 9",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--parts", type=_names, default=PARTS, help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of the new ways")
    parser.add_argument("--old-repeats", type=int, default=2, help="and of the slow old ones")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--belief-games", type=int, default=64)
    parser.add_argument("--update-games", type=int, default=32)
    parser.add_argument("--width", type=int, default=2500, help="tokens of a padded row")
    parser.add_argument("--rows", type=int, default=4, help="padded rows of one forward")
    parser.add_argument("--layers", type=int, default=28, help="decoder layers of the shape")
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"choose from {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    sys.exit(main())
