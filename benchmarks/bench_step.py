"""What a training step costs, and against what: one run, one table (or ``--json``).

    python benchmarks/bench_step.py [--parts belief,rollout,update,step] [--json]

All inputs are games that the packaged agent plays, under the settings of ``experiment=quickstart``.
Parts: *belief* (one branched pass against a pass for every turn), *rollout* (games that go on
independently against lock-step), *update* (packed against padded), *step* (share of each phase in
a short real run). Every comparison also checks that both ways give the same result; exit status 1
when one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from measuring import Part

# As in a run's worker processes: quiet libraries, and freed memory stays in the process.
SURROUNDINGS = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
PARTS = ("belief", "rollout", "update", "step")
ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; returns 0, or 1 when two ways disagree."""
    args = parse(argv)
    import torch
    from measuring import hardware, say

    torch.set_num_threads(args.threads)
    facts = hardware()
    if not args.json:
        print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    parts: list[Part] = []
    for name in args.parts:
        say(f"{name} ...")
        made = MAKERS[name](args)
        parts += made
        if not args.json:
            print("".join(f"\n{part.as_text()}\n" for part in made), end="", flush=True)
    if args.json:
        body = [part.as_dict() for part in parts]
        print(json.dumps({"hardware": facts, "settings": settings_of(args), "parts": body}))
    return int(not all(check.ok for part in parts for check in part.checks))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_step.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/bench_step.py --parts belief --repeats 7",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--parts", type=_names, default=PARTS, help="comma-separated")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats of each way")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--belief-turns", type=int, default=20)
    parser.add_argument("--belief-games", type=int, default=8)
    parser.add_argument("--secrets", type=int, default=6, help="of rollout and update")
    parser.add_argument("--games", type=int, default=8, help="per secret")
    parser.add_argument("--turns", type=int, default=14)
    parser.add_argument(
        "--judge-ms",
        type=_numbers,
        default=(0.0, 50.0),
        help="mean answering times of the judge in the rollouts, comma-separated",
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of the short real run")
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"choose from {', '.join(PARTS)}")
    return names


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes of the run, for the JSON document."""
    return {name: value for name, value in vars(args).items() if name != "json"}


def belief_part(args: argparse.Namespace) -> list[Part]:
    """Old log-probs and all beliefs of finished games."""
    import numpy as np
    from measuring import Check, Part, interleaved
    from playing import Arena, long_games

    from delta_belief_rl.belief.branched import ScoreRequest, score_batch
    from delta_belief_rl.belief.elicit import elicitor
    from delta_belief_rl.belief.naive import naive_scores
    from delta_belief_rl.trainer.settings import score_tokens

    arena = Arena.open(args.threads)
    games = long_games(arena, args.belief_turns, args.belief_games)
    elicit = elicitor(arena.chat)
    requests = [ScoreRequest.of(game, elicit(game.task.secret)) for game in games]
    model, budget = arena.actor.model, score_tokens(arena.cfg)
    ways = [
        ("naive: one forward for every turn", partial(naive_scores, model, requests)),
        ("branched: one forward", partial(score_batch, model, requests, budget)),
    ]
    (naive, slow), (branched, fast) = interleaved(ways, args.repeats)
    gap = max(
        float(np.abs(getattr(a, field) - getattr(b, field)).max())
        for a, b in zip(naive, branched, strict=True)
        for field in ("logp", "beliefs")
    )
    guess = [len(r.elicitation.token_ids) if r.elicitation else 0 for r in requests]
    read = sum(
        len(r.token_ids) + sum(point + n for point in r.belief_points)
        for r, n in zip(requests, guess, strict=True)
    )
    packed = sum(
        len(r.token_ids) + len(r.belief_points) * len(r.elicitation.branch_ids)
        for r in requests
        if r.elicitation
    )
    work = (
        f"log-probs and {args.belief_turns + 1} beliefs of each of {len(games)} games "
        f"of {args.belief_turns} turns"
    )
    rows = (replace(slow, tokens=read), replace(fast, tokens=packed))
    return [Part("belief", work, rows, (Check("largest difference in nats", gap, 1e-4),))]


def rollout_part(args: argparse.Namespace) -> list[Part]:
    """The same games, played independently and in lock-step."""
    from measuring import Check, Part, interleaved
    from playing import Arena, Desk, counted, play_async, play_lockstep

    arena = Arena.open(args.threads)
    tasks, count = arena.tasks[: args.secrets], args.secrets * args.games
    room = args.turns * 24 + 64
    # In lock-step a call of the engine returns when all games have their question.
    together = arena.engine(count, room, min_finished=1.0)
    single = arena.engine(count, room)
    parts: list[Part] = []
    for ms in args.judge_ms:
        common = (Desk(arena.grammar, ms / 1000), tasks, args.games, args.turns)
        ways: list[tuple[str, Callable[[], Any]]] = []
        for label, keep in (("whole conversation every turn", False), ("cache kept", True)):
            call = partial(play_lockstep, arena, together, *common, keep_cache=keep)
            ways.append((f"lock-step, {label}", partial(counted, together, call)))
        for label, fixed in (("asynchronous, replayable", True), ("asynchronous", False)):
            call = partial(play_async, arena, single, *common, deterministic=fixed)
            ways.append((label, partial(counted, single, call)))
        played = interleaved(ways, args.repeats)
        streams = [found for (found, _), _ in played]
        other = max(sum(a != b for a, b in zip(s, streams[0], strict=True)) for s in streams)
        parts.append(
            Part(
                f"rollout, judge of {ms:g} ms",
                f"{args.secrets} secrets x {args.games} games of at most {args.turns} turns, "
                f"{sum(map(len, streams[0])):,} tokens in all",
                tuple(replace(row, tokens=tokens) for (_, tokens), row in played),
                # Rounding depends on which games share a forward, and may tip a draw.
                (Check("share of games that differ", other / count, 0.02),),
            )
        )
    return parts


def update_part(args: argparse.Namespace) -> list[Part]:
    """One optimizer step on the same games."""
    from measuring import Check, Part, interleaved
    from padded import padded_tokens, padded_update
    from playing import Arena
    from updating import played_batch

    arena = Arena.open(args.threads)
    batch, plan, steps = played_batch(arena, args.secrets, args.games, args.turns)
    (denominators,) = [step.denominators for step in plan.steps]
    per_pass = arena.cfg.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    width = arena.cfg.data.max_prompt_length

    def packed() -> tuple[float, float]:
        found = arena.actor.update(steps, 1)
        loss, norm = found["actor/pg_loss"], found["actor/grad_norm"]
        return loss[0] / loss[1], norm[0] / norm[1]

    def padded(columns: int | None) -> tuple[float, float]:
        return padded_update(arena.actor, batch, denominators, per_pass, columns)

    ways: list[tuple[str, Callable[[], tuple[float, float]]]] = [
        (f"padded to {width} tokens", partial(padded, width)),
        (f"padded to the longest of {per_pass} games", partial(padded, None)),
        ("packed", packed),
    ]
    done = interleaved(ways, args.repeats)
    cells = [padded_tokens(batch, per_pass, columns) for columns in (width, None)]
    cells.append(len(batch.token_ids))
    (loss, norm), _ = done[-1]
    loss_gap = max(abs(found - loss) for (found, _), _ in done)
    norm_gap = max(abs(found - norm) / norm for (_, found), _ in done)
    work = (
        f"one optimizer step on {batch.num_games} games, {len(batch.token_ids):,} tokens "
        f"(longest game {int(batch.lengths().max())})"
    )
    rows = tuple(replace(row, tokens=n) for (_, row), n in zip(done, cells, strict=True))
    checks = (
        Check("largest difference of the loss", loss_gap, 1e-5),
        Check("largest relative difference of the gradient norm", norm_gap, 1e-3),
    )
    return [Part("update", work, rows, checks)]


def step_part(args: argparse.Namespace) -> list[Part]:
    """Shares of the phases in a short real run; its first step is a warm-up and is left out."""
    from measuring import Part, Row

    from delta_belief_rl.cli.front import prepare

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [
            *(sys.executable, "train.py", "experiment=quickstart"),
            *(f"trainer.total_training_steps={args.steps + 1}", f"trainer.output_dir={folder}"),
            *("trainer.val_before_train=false", "trainer.final_test=false"),
            *("trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.recovery_freq=-1"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the run failed:\n{done.stderr[-4000:]}")
        text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()][1:]
    whole = tuple(record["timing_s/step"] for record in records)
    names = [n for n in records[0] if n.startswith("timing_s/") and n != "timing_s/step"]
    shares = {
        n.removeprefix("timing_s/"): sum(record[n] for record in records) / sum(whole)
        for n in sorted(names, key=lambda n: -records[0][n])
    }
    games = prepare(["experiment=quickstart"])[1].games_per_step
    work = f"experiment=quickstart, {len(records)} steps of {games} games"
    return [Part("step", work, (Row("whole step", whole),), shares=shares)]


MAKERS: dict[str, Callable[[argparse.Namespace], list[Part]]] = {
    "belief": belief_part,
    "rollout": rollout_part,
    "update": update_part,
    "step": step_part,
}


if __name__ == "__main__":
    if not SURROUNDINGS.keys() <= os.environ.keys():
        # The allocator reads its settings when the process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], SURROUNDINGS | dict(os.environ))
    sys.path.insert(1, str(ROOT))
    sys.exit(main())
