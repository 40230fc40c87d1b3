"""The task sampler: order as a function of (seed, epoch), nothing skipped in silence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo.base import Sampler
from delta_belief_rl.algo.samplers.sequential import TaskSampler
from delta_belief_rl.types import UserError

sizes = st.integers(1, 40)


@settings(max_examples=25, deadline=None)
@given(tasks=sizes, batch=sizes, seed=st.integers(0, 5), step=st.integers(0, 60))
def test_R2_a_step_is_a_pure_function_of_seed_and_step(
    tasks: int, batch: int, seed: int, step: int
) -> None:
    straight = TaskSampler(tasks, batch, seed, drop_last=False)
    for earlier in range(min(step, 3)):
        straight.batch(earlier)
    resumed = TaskSampler(tasks, batch, seed, drop_last=False)
    first, second = straight.batch(step), resumed.batch(step)
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1] == second[1]
    assert len(first[0]) == batch


@settings(max_examples=25, deadline=None)
@given(tasks=sizes, batch=sizes, epochs=st.integers(1, 4))
def test_carry_over_plays_every_task_once_in_each_epoch(
    tasks: int, batch: int, epochs: int
) -> None:
    sampler = TaskSampler(tasks, batch, seed=1, drop_last=False)
    steps = sampler.total_steps(epochs)
    stream = np.concatenate([sampler.batch(step)[0] for step in range(steps)])
    assert len(stream) >= epochs * tasks > len(stream) - batch
    for epoch in range(epochs):
        part = stream[epoch * tasks : (epoch + 1) * tasks]
        np.testing.assert_array_equal(np.sort(part), np.arange(tasks))
        np.testing.assert_array_equal(part, sampler.order(epoch))


def test_drop_last_leaves_out_the_rest_of_each_epoch_and_says_how_many() -> None:
    sampler = TaskSampler(num_tasks=1000, batch_size=240, seed=42)
    assert sampler.dropped_per_epoch == 40
    assert sampler.total_steps(15) == 60
    for epoch in range(2):
        steps = [sampler.batch(4 * epoch + k) for k in range(4)]
        assert [e for _, e in steps] == [epoch] * 4
        played = np.concatenate([indices for indices, _ in steps])
        np.testing.assert_array_equal(played, sampler.order(epoch)[:960])
        assert len(np.unique(played)) == 960


def test_epochs_and_seeds_have_different_orders() -> None:
    sampler = TaskSampler(50, 10, seed=1)
    assert not np.array_equal(sampler.order(0), sampler.order(1))
    assert not np.array_equal(sampler.order(0), TaskSampler(50, 10, seed=2).order(0))


def test_the_global_generator_does_not_matter() -> None:
    sampler = TaskSampler(50, 10, seed=1)
    np.random.seed(0)
    first = sampler.batch(3)[0]
    np.random.seed(1)
    np.testing.assert_array_equal(first, sampler.batch(3)[0])


def test_without_shuffle_tasks_come_in_file_order() -> None:
    sampler = TaskSampler(5, 2, drop_last=False, shuffle=False)
    assert [sampler.batch(s)[0].tolist() for s in range(3)] == [[0, 1], [2, 3], [4, 0]]
    assert [sampler.batch(s)[1] for s in range(4)] == [0, 0, 0, 1]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UserError, match="no task"):
        TaskSampler(0, 1)
    with pytest.raises(UserError, match="at least 1"):
        TaskSampler(5, 0)
    with pytest.raises(UserError, match="only 5 tasks"):
        TaskSampler(5, 6)
    with pytest.raises(ValueError, match="count from 0"):
        TaskSampler(5, 2).batch(-1)


def test_the_sampler_meets_its_protocol() -> None:
    assert isinstance(TaskSampler(5, 2), Sampler)
