"""Write a model with 4-bit weights (AWQ) into a folder that vLLM serves.

The work is llm-compressor's (the extra ``awq``); what it reads meanwhile are a judge's prompts over
an embedded world. The written folder is read back and compared with the original on other prompts.

    python scripts/quantize_awq.py --model taught-judge --out taught-judge-awq
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from delta_belief_rl.cli.parser import OneLineParser
from delta_belief_rl.types import UserError


def parse(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(prog="quantize_awq.py", description="Write a model with 4-bit weights.")
    parser.add_argument("--model", required=True, help="folder, hub id or packaged name")
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--world", default="everyday", help="whose questions are read meanwhile")
    parser.add_argument(
        "--scheme",
        default="W4A16",
        choices=["W4A16", "W4A16_ASYM"],
        help="around zero (default), or with a zero point for each group",
    )
    parser.add_argument(
        "--group-size", type=int, help="weights that share a scale (default: the largest that fits)"
    )
    parser.add_argument("--samples", type=int, default=128, help="prompts that are read (128)")
    parser.add_argument("--checked", type=int, default=64, help="prompts to compare on (64)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--max-difference",
        type=float,
        default=1.0,
        help="mean difference of log-probs, nats, above which nothing is written (1)",
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.device == "cpu":
        # The library takes a GPU wherever it sees one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from delta_belief_rl.trainer.quantize.awq import TooFar, quantize
    from delta_belief_rl.trainer.quantize.settings import QuantizeSettings

    try:
        report = quantize(QuantizeSettings(**vars(args)))
    except UserError as error:
        print(f"quantize_awq.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, TooFar) else 2
    found = report["difference"]
    print(
        f"{report['layers']} layers in groups of {report['settings']['group_size']}, "
        f"{report['bytes'] / 2**20:.0f} MiB, in {report['seconds']:.0f} s\n"
        f"log-probs of the answers on {found['prompts']} held-out prompts: "
        f"{found['mean']:.4f} nats from the original's on average, {found['largest']:.4f} at most; "
        f"the same answer is likeliest in {found['same']:.1%}\n"
        f"written to {args.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
