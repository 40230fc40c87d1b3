"""The training model on a GPU: its numbers against float32 on the CPU, and both ways of each thing.

Models are small but have the widths that the kernels want (heads of 64), and their log-probs differ
by nats between contexts.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from delta_belief_rl.belief.branched import ScoreRequest, score_batch
from delta_belief_rl.belief.naive import naive_scores
from delta_belief_rl.models.adapters import adapter_parameters
from delta_belief_rl.models.loading import build_causal_lm, load_causal_lm, tiny_qwen3_config
from delta_belief_rl.models.logprobs import output_logits
from delta_belief_rl.models.low_rank import LoraLinear, float32_product
from delta_belief_rl.models.packed import Branch, PackSegment, pack
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.actor import POLICY, AdapterSettings, PolicyActor
from delta_belief_rl.types import TrainBatch
from tests.unit import training_fakes as fakes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
ADAPTER = AdapterSettings(rank=8, alpha=16.0)
GAMES = [fakes.make_game(seed, turns) for seed, turns in enumerate((9, 4, 1, 6, 7))]
REQUESTS = [ScoreRequest.of(game, fakes.GUESS) for game in GAMES]
LIGER = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are numbers of bfloat16, so that every dtype means the same model."""
    folder = tmp_path_factory.mktemp("gpu") / "model"
    config = tiny_qwen3_config(fakes.VOCAB, 256, 3, 4, 2, 64, 512)
    model = build_causal_lm(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_((noise * 0.08).bfloat16().float())
    model.save_pretrained(folder)
    return folder


def make(folder: Path, **changes: Any) -> PolicyActor:
    actor = PolicyActor(fakes.settings_of(folder, **({"adapter": ADAPTER} | changes)))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in adapter_parameters(actor.model, POLICY).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return actor


def numbers(results: Any) -> np.ndarray:
    return np.concatenate([np.concatenate([r.beliefs, r.logp]) for r in results])


def gradients(actor: PolicyActor, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Of the policy loss over a batch, on the CPU."""
    ((micro, counts),) = fakes.share(batch, fakes.one_step(batch))
    actor.model.train()
    for part in micro:
        actor._backward(part, counts)
    found = {
        name: parameter.grad.detach().cpu()
        for name, parameter in adapter_parameters(actor.model, POLICY).items()
        if parameter.grad is not None
    }
    actor.optimizer.zero_grad(set_to_none=True)
    actor.model.eval()
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    gap = sum(float((a[name].float() - b[name]).square().sum()) for name in b)
    return (gap / sum(float(x.square().sum()) for x in b.values())) ** 0.5


def batch_of(folder: Path) -> TrainBatch:
    scores = make(folder).score(REQUESTS)
    return fakes.make_batch([fakes.Group(game.task, (game,)) for game in GAMES], scores)


def test_half_precision_models_run_without_padding_and_float32_ones_on_padded_rows(
    folder: Path,
) -> None:
    assert runs_ragged(load_causal_lm(folder, torch.bfloat16, "cuda"))
    assert not runs_ragged(load_causal_lm(folder, torch.float32, "cuda"))


@torch.no_grad()
@pytest.mark.parametrize("branches", [False, True])
def test_attention_without_padding_gives_the_logits_of_padded_rows_and_of_float32(
    folder: Path, branches: bool
) -> None:
    guess = (Branch(1, (7, 8)), Branch(20, (7,)), Branch(33, (7, 8, 9))) if branches else ()
    rng = np.random.default_rng(0)
    segments = [
        PackSegment(rng.integers(0, fakes.VOCAB, n).tolist(), guess if n > 32 else ())
        for n in (40, 3, 300, 129)
    ]
    found: list[torch.Tensor] = []
    for device, dtype, ragged in (
        ("cpu", torch.float32, False),
        ("cuda", torch.bfloat16, False),
        ("cuda", torch.bfloat16, True),
    ):
        model = load_causal_lm(folder, dtype, device)
        packed = pack(segments, device, ragged)
        out = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            packed=packed,
            use_cache=False,
        )
        found.append(out.logits[0].float().cpu())
    exact, padded, flat = found
    old, new = (padded - exact).abs(), (flat - exact).abs()
    assert new.mean() <= 1.2 * old.mean()
    assert new.max() <= 2.0 * old.max()


def test_branched_scores_are_those_of_a_forward_for_every_turn_and_of_the_cpu(folder: Path) -> None:
    exact = numbers(score_batch(make(folder).model, REQUESTS))
    model = make(folder, **GPU).model
    naive = np.abs(numbers(naive_scores(model, REQUESTS)) - exact)
    branched = np.abs(numbers(score_batch(model, REQUESTS, 200)) - exact)
    assert naive.mean() < 0.1
    assert branched.mean() <= 1.2 * naive.mean()
    assert branched.max() <= 2.0 * naive.max()


def test_adapter_gradients_are_float32_and_near_those_of_float32_on_the_cpu(folder: Path) -> None:
    batch = batch_of(folder)
    exact = gradients(make(folder), batch)
    ours = gradients(make(folder, **GPU), batch)
    assert {gradient.dtype for gradient in ours.values()} == {torch.float32}
    theirs_actor = make(folder, **GPU)
    for module in theirs_actor.model.modules():
        if isinstance(module, LoraLinear):
            module.__class__ = LoraLinear.__base__  # type: ignore[assignment]
    theirs = gradients(theirs_actor, batch)
    assert distance(theirs, exact) < 0.1
    assert distance(ours, exact) <= 1.2 * distance(theirs, exact)


def test_gradient_checkpointing_changes_no_gradient(folder: Path) -> None:
    batch = batch_of(folder)
    plain = gradients(make(folder, **GPU), batch)
    again = gradients(make(folder, **GPU, gradient_checkpointing=True), batch)
    # Attention's backward adds in any order.
    assert distance(again, plain) < 0.005


@LIGER
@pytest.mark.parametrize("checkpointing", [False, True])
def test_liger_kernels_give_the_scores_and_gradients_of_the_library_layers(
    folder: Path, checkpointing: bool
) -> None:
    batch = batch_of(folder)
    exact, exact_scores = gradients(make(folder), batch), numbers_of(make(folder))
    plain, fused = make(folder, **GPU), make(folder, **GPU, use_liger=True)
    if checkpointing:
        fused = make(folder, **GPU, use_liger=True, gradient_checkpointing=True)
    off = np.abs(numbers_of(plain) - exact_scores)
    on = np.abs(numbers_of(fused) - exact_scores)
    assert on.mean() <= 1.2 * off.mean()
    far = distance(gradients(fused, batch), exact)
    assert far <= 1.2 * distance(gradients(plain, batch), exact)


def numbers_of(actor: PolicyActor) -> np.ndarray:
    return numbers(score_batch(actor.model, REQUESTS))


def test_a_cuda_float32_run_gives_the_numbers_of_the_cpu(folder: Path) -> None:
    cpu, gpu = make(folder), make(folder, device="cuda")
    np.testing.assert_allclose(numbers_of(gpu), numbers_of(cpu), atol=1e-3)
    batch = batch_of(folder)
    assert distance(gradients(gpu, batch), gradients(cpu, batch)) < 1e-3


def test_M2_eight_micro_batches_need_no_more_memory_than_two(folder: Path) -> None:
    """What a micro-batch kept would add up: nothing of one is alive in the next."""
    actor = make(folder, gradient_checkpointing=False, **GPU)
    one = batch_of(folder).select(np.array([0]))
    peaks = []
    for count in (2, 8):
        batch = one.select(np.zeros(count, dtype=np.int64))
        plan = fakes.one_step(batch, max_tokens=int(one.lengths()[0]))
        assert len(plan.steps[0].ranks[0]) == count
        actor.update(fakes.share(batch, plan), 1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        actor.update(fakes.share(batch, plan), 2)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.05 * peaks[0]


def test_logits_are_kept_in_float32_and_their_gradients_reach_rows_and_weights() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(64, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    head = torch.nn.Linear(256, 1000, bias=False, device="cuda", dtype=torch.bfloat16)
    logits = output_logits(head, rows)
    assert logits.dtype == torch.float32
    exact = rows.detach().double() @ head.weight.detach().double().t()
    assert (logits - exact).abs().max() < 1e-4
    grad = torch.randn(logits.shape, device="cuda", generator=generator).bfloat16().float()
    logits.backward(grad)
    assert rows.grad is not None
    assert head.weight.grad is not None
    for got, want in (
        (rows.grad, grad.double() @ head.weight.detach().double()),
        (head.weight.grad, grad.double().t() @ rows.detach().double()),
    ):
        # Both are rounded to bfloat16 once.
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_scores_and_their_gradients_are_those_of_float64(temperature: float) -> None:
    from delta_belief_rl.models.fused_head import fused_scores

    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(33, 256, device="cuda", generator=generator).bfloat16().requires_grad_()
    # More than one block of logits, and a last one that is not full.
    weight = (torch.randn(9001, 256, device="cuda", generator=generator) * 0.2).bfloat16()
    weight.requires_grad_()
    targets = torch.randint(0, 9001, (33,), device="cuda", generator=generator)
    logp, entropy = fused_scores(rows, weight, targets, temperature)
    leaves = [x.detach().double().requires_grad_() for x in (rows, weight)]
    exact = torch.log_softmax(leaves[0] @ leaves[1].t() / temperature, -1)
    want = exact.gather(-1, targets[:, None])[:, 0]
    want_entropy = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(logp.double(), want, rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=1e-4)
    pull, bonus = torch.randn(2, 33, device="cuda", generator=generator)
    (logp @ pull + entropy @ bonus).backward()
    (want @ pull.double() + want_entropy @ bonus.double()).backward()
    for got, leaf in zip((rows.grad, weight.grad), leaves, strict=True):
        assert got is not None
        assert leaf.grad is not None
        assert (got.double() - leaf.grad).norm() < 0.01 * leaf.grad.norm()


def test_float32_products_of_half_precision_matrices_are_not_rounded() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    left = torch.randn(4096, 96, device="cuda", generator=generator).bfloat16()
    right = torch.randn(4096, 32, device="cuda", generator=generator).bfloat16()
    got = float32_product(left.t(), right)
    assert got.dtype == torch.float32
    want = left.double().t() @ right.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-2)
