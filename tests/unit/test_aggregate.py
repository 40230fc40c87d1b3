"""Aggregation: closed forms, global denominators, layout invariance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from delta_belief_rl.algo import AGGREGATIONS
from delta_belief_rl.algo.losses.aggregate import (
    aggregate,
    count_units,
    mean_metrics,
    merge_metrics,
    pair,
    unit_mean,
)
from delta_belief_rl.types import UserError

VALUES = torch.tensor([1.0, 2.0, 4.0, 4.0, 4.0, 4.0], dtype=torch.float64)
ROWS = torch.tensor([0, 0, 1, 1, 1, 1])
TURNS = torch.tensor([0, 0, 1, 2, 2, 2])


def whole(values: Tensor, weight: Tensor, rows: Tensor, turns: Tensor, mode: str) -> Tensor:
    return aggregate(values, weight, rows, mode, count_units(weight, rows, turns, 4.0), turns)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 3.166667),
        ("seq-mean-token-sum", 9.5),
        ("seq-mean-token-mean", 2.75),
        ("seq-mean-token-sum-norm", 2.375),
        ("turn-mean", (1.5 + 4 + 4) / 3),
    ],
)
def test_A13_each_mode_matches_its_closed_form(mode: str, expected: float) -> None:
    loss = whole(VALUES, torch.ones(6, dtype=torch.float64), ROWS, TURNS, mode)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)


def test_A13_every_name_of_the_registry_has_a_closed_form_test() -> None:
    assert set(AGGREGATIONS) == {
        "token-mean",
        "turn-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    }


def random_batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, weights with holes, rows in scattered order, turns."""
    generator = torch.Generator().manual_seed(seed)
    size = 40
    rows = torch.randint(0, 7, (size,), generator=generator)
    turns = rows * 3 + torch.randint(0, 3, (size,), generator=generator)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    weight = (torch.rand(size, generator=generator) > 0.3).double()
    weight *= torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
    return values, weight, rows, turns


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), parts=st.integers(1, 7), mode=st.sampled_from(AGGREGATIONS))
def test_A11_the_sum_over_micro_batches_is_the_loss_of_the_whole(
    seed: int, parts: int, mode: str
) -> None:
    values, weight, rows, turns = random_batch(seed)
    counts = count_units(weight, rows, turns, 10.0)
    total = aggregate(values, weight, rows, mode, counts, turns)
    pieces = torch.tensor(0.0, dtype=torch.float64)
    for part in range(parts):
        mine = rows % parts == part
        pieces += aggregate(values[mine], weight[mine], rows[mine], mode, counts, turns[mine])
    torch.testing.assert_close(pieces, total)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), mode=st.sampled_from(AGGREGATIONS))
def test_A9_order_names_and_padding_do_not_matter(seed: int, mode: str) -> None:
    values, weight, rows, turns = random_batch(seed)
    total = whole(values, weight, rows, turns, mode)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    junk = torch.full((9,), float("nan"), dtype=torch.float64)
    pads = torch.arange(9)
    padded = whole(
        torch.cat([values[order], junk]),
        torch.cat([weight[order], torch.zeros(9, dtype=torch.float64)]),
        torch.cat([rows[order] * 10 + 3, pads]),
        torch.cat([turns[order] * 10 + 3, pads]),
        mode,
    )
    torch.testing.assert_close(padded, total)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_A14_padding_rows_enter_no_count(mode: str) -> None:
    weight = torch.ones(6, dtype=torch.float64)
    plain = whole(VALUES, weight, ROWS, TURNS, mode)
    padded = whole(
        torch.cat([VALUES, torch.full((3,), 1e9, dtype=torch.float64)]),
        torch.cat([weight, torch.zeros(3, dtype=torch.float64)]),
        torch.cat([ROWS, torch.tensor([2, 2, 3])]),
        torch.cat([TURNS, torch.tensor([3, 3, 4])]),
        mode,
    )
    torch.testing.assert_close(padded, plain)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_A20_rows_without_tokens_and_empty_batches_give_no_nan(mode: str) -> None:
    values = VALUES.clone().requires_grad_()
    loss = whole(values, torch.zeros(6, dtype=torch.float64), ROWS, TURNS, mode)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert values.grad is not None
    assert not values.grad.any()
    empty = torch.zeros(0)
    assert float(whole(empty, empty, empty.long(), empty.long(), mode)) == 0.0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_A9_nan_where_the_weight_is_zero_reaches_neither_value_nor_gradient(mode: str) -> None:
    values = torch.cat([VALUES, torch.tensor([float("nan")])]).requires_grad_()
    weight = torch.tensor([1.0] * 6 + [0.0], dtype=torch.float64)
    rows, turns = torch.cat([ROWS, torch.tensor([1])]), torch.cat([TURNS, torch.tensor([2])])
    loss = whole(values, weight, rows, turns, mode)
    loss.backward()
    torch.testing.assert_close(loss, whole(VALUES, weight[:6], ROWS, TURNS, mode))
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_A15_gradient_matches_finite_differences(mode: str) -> None:
    values, weight, rows, turns = random_batch(1)
    counts = count_units(weight, rows, turns, 10.0)

    def loss(x: Tensor) -> Tensor:
        return aggregate(x, weight, rows, mode, counts, turns)

    assert torch.autograd.gradcheck(loss, (values.requires_grad_(),))


def test_weights_scale_the_value_but_a_token_counts_once() -> None:
    weight = torch.tensor([0.5] * 6, dtype=torch.float64)
    loss = whole(VALUES, weight, ROWS, TURNS, "token-mean")
    assert float(loss.detach()) == pytest.approx(0.5 * 19 / 6)


def test_unknown_modes_and_missing_turns_are_refused() -> None:
    with pytest.raises(UserError, match="loss_agg_mode"):
        aggregate(VALUES, torch.ones(6), ROWS, "mean", {"tokens": 6})
    with pytest.raises(ValueError, match="turn of each token"):
        aggregate(VALUES, torch.ones(6), ROWS, "turn-mean", {"turns": 3})


def test_unit_mean_skips_dropped_tokens() -> None:
    keep = torch.tensor([True, False, True, True, False, False])
    mean = unit_mean(VALUES, ROWS, keep)
    torch.testing.assert_close(mean, torch.tensor([1, 1, 4, 4, 4, 4], dtype=torch.float64))


def test_A12_metrics_are_pairs_until_the_end() -> None:
    keep = torch.tensor([True, True, True])
    short = {"x": pair(torch.tensor([1.0]), keep[:1])}
    long = {"x": pair(torch.tensor([4.0, 4.0, 4.0]), keep), "y": pair(torch.zeros(1), keep[:1])}
    merged = mean_metrics(merge_metrics([short, long]))
    assert merged == {"x": pytest.approx(13 / 4), "y": 0.0}
    assert mean_metrics({"x": pair(torch.zeros(2), ~keep[:2])}) == {}
