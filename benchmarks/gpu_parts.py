"""The parts of ``bench_gpu.py``."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import numpy as np
import torch
from gpu_games import Steps, random_batch, random_games, random_requests
from gpu_model import SHAPE, base_weights, build_actor, library_layers
from measuring import Check, Part, Row, say
from padded import padded_tokens, padded_update

from delta_belief_rl.belief.branched import ScoreRequest, ScoreResult, score_batch
from delta_belief_rl.belief.naive import naive_scores
from delta_belief_rl.trainer.actor import PolicyActor
from delta_belief_rl.types import FloatArray, TrainBatch

T = TypeVar("T")

FEW = 4
"""Games that are also computed in float32."""
TURNWISE = "a forward for every turn"
AGREE_MAX, AGREE_MEAN = 0.25, 0.06
"""Bounds on differences between two ways in bfloat16, in nats."""
NO_WORSE = 1.5
"""How much further from float32 than the old way a new one may be."""
UPDATE_TOKENS = 32768
"""Bound on the tokens of a packed micro-batch."""


def gpu_facts() -> dict[str, Any]:
    """What the numbers depend on, the matrix rate measured."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "matrix_tflops": round(matrix_rate() / 1e12, 1),
        "torch": torch.__version__,
        **{name: version(name) for name in ("transformers", "peft")},
        "liger-kernel": version("liger-kernel") if find_spec("liger_kernel") else None,
        "flash-attn": version("flash-attn") if find_spec("flash_attn") else None,
    }


def matrix_rate(size: int = 8192, repeats: int = 40) -> float:
    """Operations per second of a bfloat16 matrix product."""
    left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    right = torch.randn_like(left)
    _, row = timed("", lambda: [left @ right for _ in range(repeats)], 3)
    return 2 * size**3 * repeats / row.median


def timed(
    name: str,
    call: Callable[[], T],
    repeats: int,
    tokens: int = 0,
    warm: Callable[[], object] | None = None,
) -> tuple[T, Row]:
    """Time a call whose work is on the GPU, with its peak memory in GiB.

    ``warm`` is run once before; by default it is the call itself.
    """
    (warm or call)()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    result = None
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30
    row = Row(name, tuple(seconds), tokens, {"peak GiB": peak})
    if name:
        say(f"  {name}: {row.median:.3f} s, {peak:.1f} GiB")
    return cast(T, result), row


def belief_part(args: Any, _rate: float) -> Part:
    """Log-probs and all beliefs of finished games."""
    games = random_games(args.belief_games, args.turns, SHAPE["vocab_size"])
    requests = random_requests(games, SHAPE["vocab_size"])
    _, packed = _tokens_read(requests)
    rows: list[Row] = []
    actor = _actor(args, use_liger=False)
    with library_layers():
        rows.append(_naive(f"{TURNWISE}, library layers", actor, requests, args)[1])
    actor = _actor(args, actor)
    slow, row = _naive(TURNWISE, actor, requests, args)
    rows.append(row)
    budget = actor.settings.score_tokens
    branched = partial(score_batch, actor.model, requests, budget)
    fast, row = timed("branched", branched, args.repeats, packed)
    rows.append(row)
    score = partial(actor.score, requests)
    _, row = timed("branched, and entropies", score, args.repeats, packed)
    rows.append(row)
    exact = _actor(args, actor, dtype=torch.float32, use_liger=False)
    truth = score_batch(exact.model, requests[:FEW], budget)
    gap = _gap(fast, slow)
    far, base = _gap(fast[:FEW], truth).mean(), _gap(slow[:FEW], truth).mean()
    checks = (
        Check("largest difference in nats", float(gap.max()), AGREE_MAX),
        Check("mean difference in nats", float(gap.mean()), AGREE_MEAN),
        Check(
            f"mean difference from float32, over that of the old way ({base:.4f})",
            float(far / base),
            NO_WORSE,
        ),
    )
    work = (
        f"log-probs and {args.turns + 1} beliefs of each of {len(games)} games of {args.turns} "
        f"turns and {np.mean([len(game.token_ids) for game in games]):.0f} tokens"
    )
    return Part("belief", work, tuple(rows), checks)


def update_part(args: Any, rate: float) -> Part:
    """One optimizer step on the same games."""
    games = random_games(args.update_games, args.turns, SHAPE["vocab_size"])
    requests = random_requests(games, SHAPE["vocab_size"])
    actor = _actor(args, use_liger=False, gradient_checkpointing=True)
    weights = base_weights(actor)
    logp = [r.logp for r in score_batch(actor.model, requests, actor.settings.score_tokens)]
    batch, steps = random_batch(games, logp, UPDATE_TOKENS)
    few, few_steps = random_batch(games[:FEW], logp[:FEW], UPDATE_TOKENS)
    cells = padded_tokens(batch, args.rows, args.width)
    found: list[tuple[float, float]] = []
    rows: list[Row] = []

    def measure(name: str, update: Callable[[], tuple[float, float]], tokens: int) -> None:
        new = tokens == len(batch.token_ids)
        repeats, warm = (args.repeats, None) if new else (args.old_repeats, warm_up)
        result, row = timed(name, update, repeats, tokens, warm)
        found.append(result)
        pace = len(batch.token_ids) / row.median
        facts = {"tokens/s": pace, "6N share": 6 * weights * pace / (rate * 1e12)}
        rows.append(replace(row, facts=row.facts | facts))

    def warm_up() -> None:
        padded_update(actor, few, few_steps[0][1], args.rows, args.width)

    def padded(some: PolicyActor) -> tuple[float, float]:
        return padded_update(some, batch, steps[0][1], args.rows, args.width)

    wide = f"padded to {args.width}, checkpointing"
    with library_layers():
        measure(f"{wide}, library layers", partial(padded, actor), cells)
    actor = _actor(args, actor, gradient_checkpointing=True)
    measure(wide, partial(padded, actor), cells)
    measure("packed, checkpointing", partial(packed_update, actor, steps), len(batch.token_ids))
    old = gradient_of(actor, warm_up)
    actor = _actor(args, actor)
    measure("packed", partial(packed_update, actor, steps), len(batch.token_ids))
    new = gradient_of(actor, partial(packed_update, actor, few_steps))
    actor = _actor(args, actor, dtype=torch.float32, use_liger=False)
    exact = gradient_of(actor, partial(packed_update, actor, few_steps))
    checks = (*_agreement(found), _exactness(new, old, exact))
    work = (
        f"one optimizer step on {batch.num_games} games, {len(batch.token_ids):,} tokens "
        f"({_scored(batch):,} trained), {weights / 1e9:.2f}e9 weights"
    )
    return Part("update", work, tuple(rows), checks)


def packed_update(actor: PolicyActor, steps: Steps) -> tuple[float, float]:
    """One optimizer step; the loss and the gradient norm before clipping."""
    found = actor.update(steps, 1)
    loss, norm = found["actor/pg_loss"], found["actor/grad_norm"]
    return loss[0] / loss[1], norm[0] / norm[1]


def _actor(args: Any, before: PolicyActor | None = None, **changes: Any) -> PolicyActor:
    """A new actor; the memory of the one before is freed first."""
    if before is not None:
        del before.model, before.optimizer
        gc.collect()
        torch.cuda.empty_cache()
    return build_actor(layers=args.layers, **{"use_liger": True} | changes)


def _naive(
    name: str, actor: PolicyActor, requests: list[ScoreRequest], args: Any
) -> tuple[list[ScoreResult], Row]:
    """A forward for every turn."""
    run = partial(naive_scores, actor.model)
    warm = partial(run, requests[:FEW])
    return timed(name, partial(run, requests), args.old_repeats, _tokens_read(requests)[0], warm)


def _tokens_read(requests: list[ScoreRequest]) -> tuple[int, int]:
    """Tokens that go through the model: with a forward for every turn, and branched."""
    read = packed = 0
    for request in requests:
        assert request.elicitation is not None
        length, guess = len(request.token_ids), request.elicitation
        read += length + sum(point + len(guess.token_ids) for point in request.belief_points)
        packed += length + len(request.belief_points) * len(guess.branch_ids)
    return read, packed


def _gap(some: list[ScoreResult], others: list[ScoreResult]) -> FloatArray:
    """Differences of all beliefs and log-probs."""
    return np.concatenate(
        [
            np.abs(getattr(a, field) - getattr(b, field))
            for a, b in zip(some, others, strict=True)
            for field in ("beliefs", "logp")
        ]
    )


def _agreement(found: list[tuple[float, float]]) -> tuple[Check, ...]:
    loss, norm = found[0]
    return (
        Check("largest difference of the loss", max(abs(a - loss) for a, _ in found), 0.01),
        Check(
            "largest relative difference of the gradient norm",
            max(abs(b - norm) / norm for _, b in found),
            0.03,
        ),
    )


def gradient_of(actor: PolicyActor, update: Callable[[], object]) -> torch.Tensor:
    """The whole gradient of an optimizer step, one vector."""
    found: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))

    handle = actor.optimizer.register_step_pre_hook(keep)
    update()
    handle.remove()
    (gradient,) = found
    return gradient


def _exactness(new: torch.Tensor, old: torch.Tensor, exact: torch.Tensor) -> Check:
    far, base = (float((some - exact).norm() / exact.norm()) for some in (new, old))
    return Check(
        f"distance of a gradient from float32, over that of the padded way ({base:.4f})",
        far / base,
        NO_WORSE,
    )


def _scored(batch: TrainBatch) -> int:
    return int(np.count_nonzero((batch.turn_ids >= 0) & (batch.weight != 0)))
