"""``delta-belief belief``: what a model believes in the course of stored conversations."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_belief_rl.belief.elicit import Aggregate
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.config.paths import find_model
from delta_belief_rl.envs.worlds.tasks import DEFAULT_PROMPT
from delta_belief_rl.eval.attach import attach_adapter
from delta_belief_rl.eval.belief_plots import belief_curves
from delta_belief_rl.eval.beliefs import (
    METHODS,
    BeliefOptions,
    BeliefRow,
    Measured,
    measure,
)
from delta_belief_rl.eval.calibration import summarise_beliefs
from delta_belief_rl.eval.conversations import Conversation, read_conversations
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer
from delta_belief_rl.models.packaged import materialise
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message, UserError

OUT = "belief_logprob.jsonl"
_LINE = "{:>11} {:>5} {:>8} {:>5} {:>8} {:>6} {:>6}"


@dataclass(frozen=True, slots=True)
class _Words:
    """The checked command line."""

    files: tuple[Path, ...]
    model: str
    adapter: Path | None
    options: BeliefOptions
    opening: tuple[Message, ...]
    out: Path
    plots: Path | None
    limit: int
    device: str


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, help="conversations, .jsonl or .jsonl.gz")
    parser.add_argument("--model", required=True, help="folder or hub id of the model to ask")
    parser.add_argument("--adapter", type=Path, help="a run's global_step_<N>, or a PEFT folder")
    parser.add_argument(
        "--method", default="logprob", help=f"some of {','.join(METHODS)}, with commas"
    )
    parser.add_argument(
        "--every", type=int, default=1, help="exchanges from one statement to the next"
    )
    parser.add_argument(
        "--agg", choices=("sum", "mean"), default="sum", help="over the answer's tokens"
    )
    parser.add_argument(
        "--prompt", help="first message of conversations that are stored without their opening"
    )
    parser.add_argument("--out", type=Path, default=Path(OUT), help=f"file of rows, {OUT}")
    parser.add_argument("--plots", type=Path, help="folder for curves by outcome, SVG")
    parser.add_argument("--limit", type=int, default=0, help="conversations of each file; 0 is all")
    parser.add_argument("--device", help="cpu or cuda; a GPU where there is one")


def _run(args: argparse.Namespace) -> Result:
    words = _checked(args)
    conversations = list(_read(words))
    model, chat = _load(words)
    state = Measured()
    rows: list[BeliefRow] = []
    with _writing(words.out) as write:
        for row in measure(model, chat, conversations, words.options, state):
            rows.append(row)
            write(row)
            if len(rows) == state.done:
                _say(f"{state.done + state.skipped.total()} of {len(conversations)} conversations")
        if not rows:
            raise UserError(
                f"No conversation could be measured ({state.first_skipped}): ask another model, or "
                "give other files."
            )
    if state.skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in state.skipped.items())
        _say(f"not measured: {reasons} (the first: {state.first_skipped})")
    summary = summarise_beliefs(rows, words.options.methods)
    plots = belief_curves(summary, words.plots) if words.plots else []
    value = {
        "model": words.model,
        "adapter": None if words.adapter is None else str(words.adapter),
        "rows": str(words.out),
        "plots": [str(path) for path in plots],
        "skipped": dict(state.skipped),
        **summary,
    }
    return Result(value=value, text=_text(value, words.options.methods))


def _checked(args: argparse.Namespace) -> _Words:
    methods = tuple(dict.fromkeys(word.strip() for word in args.method.split(",") if word.strip()))
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods:
        named = repr(unknown[0]) if unknown else "nothing"
        raise UserError(f"--method names {named}: choose among {', '.join(METHODS)}.")
    if args.every < 1 or args.limit < 0:
        raise UserError("--every must be at least 1 and --limit at least 0.")
    if args.out.exists():
        raise UserError(f"{args.out} exists already: name another file with --out.")
    for folder in {args.out.resolve().parent} - {Path.cwd()}:
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder} for --out: make it first.")
    agg: Aggregate = "mean" if args.agg == "mean" else "sum"
    return _Words(
        files=tuple(args.files),
        model=args.model,
        adapter=args.adapter,
        options=BeliefOptions(methods=methods, every=args.every, agg=agg),
        opening=(Message("user", args.prompt),) if args.prompt else DEFAULT_PROMPT,
        out=args.out,
        plots=args.plots,
        limit=args.limit,
        device=args.device or "",
    )


def _read(words: _Words) -> Iterator[Conversation]:
    for path in words.files:
        read = read_conversations(path, words.opening)
        if read.damaged:
            first = read.damaged[0]
            _say(
                f"{path}: {len(read.damaged)} lines were skipped (line {first.number}: "
                f"{first.reason})"
            )
        if read.bare:
            _say(
                f"{path}: {read.bare} conversations are stored without an opening; "
                f"{words.opening[0].content!r} opens them"
            )
        yield from read.conversations[: words.limit or None]


def _load(words: _Words) -> tuple[Any, ChatFormat]:
    """The model and its chat format.

    Raises:
        UserError: They cannot be loaded, or there is no such device.
    """
    import torch

    device = words.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"There is no device {device!r} here: use --device cpu.")
    folder = materialise(find_model(words.model))
    chat = ChatFormat.from_tokenizer(load_tokenizer(folder), {"enable_thinking": False})
    model = load_causal_lm(folder, torch.bfloat16 if device == "cuda" else torch.float32, device)
    return (model if words.adapter is None else attach_adapter(model, words.adapter)), chat


@contextmanager
def _writing(path: Path) -> Iterator[Callable[[BeliefRow], None]]:
    """A function that writes one row; the file appears whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:

            def write(row: BeliefRow) -> None:
                body = json.dumps(row.to_json(), ensure_ascii=False, allow_nan=False)
                file.write(body + "\n")

            yield write
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _text(value: Mapping[str, Any], methods: Sequence[str]) -> str:
    """The summary as tables."""
    lines = [
        f"{value['conversations']} conversations ({value['won']} won, {value['lost']} lost); "
        f"rows in {value['rows']}"
    ]
    for method in methods:
        found = value[method]
        head = ("after", "won", "mean", "lost", "mean", "AUC", "Brier")
        lines += ["", method, _LINE.format(*head)]
        places = {str(p["turn"]): p for p in found["by_turn"]}
        ends = {"before last": found["before_last"], "end": found["end"]}
        for name, place in (places | ends).items():
            cells = [place[key] for key in ("mean_won", "mean_lost", "auc", "brier")]
            won, lost, area, score = ("-" if c is None else f"{c:.3f}" for c in cells)
            lines.append(_LINE.format(name, place["won"], won, place["lost"], lost, area, score))
        for outcome, gain in found.get("gain", {}).items():
            lines.append(
                f"{outcome}: prior {gain['prior']:.2f}, final {gain['final']:.2f}, "
                f"net gain {gain['net_gain']:.2f}, positive changes {gain['positive_sum']:.2f} nats"
            )
        missing = {k: n for k, n in found.get("missing", {}).items() if n}
        if missing:
            reasons = ", ".join(f"{count} {reason}" for reason, count in missing.items())
            total = f"{sum(missing.values())} of {found['asked']}"
            lines.append(f"no probability in {total}: {reasons}")
    lines += [f"curves: {path}" for path in value["plots"]]
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


VERB = Verb(
    name="belief",
    help="Measure what a model believes in the course of stored conversations, turn by turn.",
    example=(
        "delta-belief belief validation/quickstart/delta_belief/seed1-val.jsonl.gz "
        "--model delta_belief_rl/assets/agent --limit 50 --plots plots"
    ),
    add_arguments=_add_arguments,
    run=_run,
)
