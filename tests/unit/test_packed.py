"""Index maps, positions and visibility of packed segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.models.packed import Branch, PackedInput, PackSegment, pack


def visible_by_definition(segment: PackSegment) -> np.ndarray:
    """The visibility rule written token by token, as an oracle."""
    cells = [("trunk", i) for i in range(len(segment.token_ids))]
    for b, branch in enumerate(segment.branches):
        cells += [(b, i) for i in range(len(branch.token_ids))]
    out = np.zeros((len(cells), len(cells)), dtype=bool)
    for i, (owner, index) in enumerate(cells):
        for j, (other, position) in enumerate(cells):
            if owner == other:
                out[i, j] = position <= index
            elif other == "trunk":
                out[i, j] = position < segment.branches[owner].point
    return out


@st.composite
def segments(draw: st.DrawFn) -> list[PackSegment]:
    out = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 6))
        branches = tuple(
            Branch(draw(st.integers(1, length)), tuple(range(draw(st.integers(0, 3)))))
            for _ in range(draw(st.integers(0, 3)))
        )
        out.append(PackSegment(tuple(range(length)), branches))
    return out


def visible(packed: PackedInput, row: int, segment: PackSegment) -> np.ndarray:
    """What attention lets the tokens of a segment see, in the order of the segment's tokens."""
    first = len(segment.token_ids)
    behind = segment.num_tokens - first
    cells = np.r_[0:first, packed.trunk : packed.trunk + behind]
    out = np.tril(np.ones((packed.longest, packed.longest), dtype=bool))
    out[: packed.trunk, packed.trunk :] = False
    if packed.mask is not None:
        out[packed.trunk :] = packed.mask[row, 0].numpy()
    return out[np.ix_(cells, cells)]


@settings(max_examples=60, deadline=None)
@given(segments())
def test_visibility_equals_the_rule_written_token_by_token(batch: list[PackSegment]) -> None:
    packed = pack(batch)
    for row, segment in enumerate(batch):
        np.testing.assert_array_equal(visible(packed, row, segment), visible_by_definition(segment))


@settings(max_examples=60, deadline=None)
@given(segments())
def test_no_token_sees_padding(batch: list[PackSegment]) -> None:
    packed = pack(batch)
    if packed.mask is None:
        return
    real = np.zeros(packed.gather.shape, dtype=bool)
    real.flat[packed.scatter.numpy()] = True
    for row in range(len(batch)):
        seen = packed.mask[row, 0].numpy()[real[row, packed.trunk :]]
        assert not seen[:, ~real[row]].any()


@settings(max_examples=60, deadline=None)
@given(segments())
def test_gather_then_scatter_is_the_identity_and_no_padding_is_packed(
    batch: list[PackSegment],
) -> None:
    packed = pack(batch)
    total = sum(segment.num_tokens for segment in batch)
    assert packed.num_tokens == packed.input_ids.shape[1] == total
    index = packed.gather.flatten()[packed.scatter]
    np.testing.assert_array_equal(index.numpy(), np.arange(total))
    if packed.mask is not None:
        assert packed.mask.any(dim=-1).all(), "a row of the mask without any key makes NaN"


@settings(max_examples=60, deadline=None)
@given(segments())
def test_positions_of_a_branch_continue_from_its_point(batch: list[PackSegment]) -> None:
    packed = pack(batch)
    positions = packed.position_ids[0].numpy()
    for s, segment in enumerate(batch):
        start = packed.segment_starts[s]
        length = len(segment.token_ids)
        np.testing.assert_array_equal(positions[start : start + length], np.arange(length))
        for b, branch in enumerate(segment.branches):
            first = packed.branch_starts[s][b]
            size = len(branch.token_ids)
            np.testing.assert_array_equal(
                positions[first : first + size], branch.point + np.arange(size)
            )


def test_sources_name_the_row_that_predicts_a_token() -> None:
    batch = [PackSegment((9, 9)), PackSegment((5, 6, 7), (Branch(1, (8, 4)), Branch(3, (8, 4))))]
    packed = pack(batch)
    assert packed.input_ids.tolist() == [[9, 9, 5, 6, 7, 8, 4, 8, 4]]
    assert packed.trunk_sources(1, np.array([1, 2])).tolist() == [2, 3]
    # Offset 0 hangs on the trunk; offset 2 is one past the packed branch.
    assert packed.branch_sources(1, np.array([0, 1, 2])).tolist() == [[2, 5, 6], [4, 7, 8]]


def test_the_first_token_of_a_trunk_has_no_prediction() -> None:
    packed = pack([PackSegment((1, 2, 3))])
    with pytest.raises(IndexError):
        packed.trunk_sources(0, np.array([0]))
    with pytest.raises(IndexError):
        packed.trunk_sources(0, np.array([3]))


def test_segments_without_branches_need_no_mask() -> None:
    assert pack([PackSegment((1, 2)), PackSegment((1, 2, 3))]).mask is None
    assert pack([PackSegment((1, 2)), PackSegment((1, 2))]).full


@pytest.mark.parametrize("point", [0, 4])
def test_a_branch_outside_its_trunk_is_refused(point: int) -> None:
    with pytest.raises(ValueError, match="prefix length"):
        pack([PackSegment((1, 2, 3), (Branch(point, (1,)),))])


def test_empty_packs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one segment"):
        pack([])
    with pytest.raises(ValueError, match="trunk token"):
        pack([PackSegment(())])
