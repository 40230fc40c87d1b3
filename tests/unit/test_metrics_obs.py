"""Sums, timers and progress."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_belief_rl.obs.metrics import MetricSums, StepTimers, perf_metrics, token_timings
from delta_belief_rl.obs.progress import ProgressView, format_seconds, split_text


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(1, 5))
def test_mean_does_not_depend_on_how_items_are_spread_over_ranks(
    values: list[float], ranks: int
) -> None:
    total = MetricSums()
    for rank in range(ranks):
        mine = values[rank::ranks]
        part = MetricSums()
        part.add("x", sum(mine), len(mine))
        total.merge(part)
    assert total.means()["x"] == pytest.approx(np.mean(values), abs=1e-9)


def test_mean_of_nothing_is_nan_and_known_by_name() -> None:
    sums = MetricSums()
    sums.add("x", 0.0, 0)
    assert np.isnan(sums.means()["x"])


def test_timers_are_those_of_one_step_alone() -> None:
    ticks = iter([0.0, 2.0, 2.0, 3.0, 10.0, 10.5])
    timers = StepTimers(clock=lambda: next(ticks))
    with timers.measure("gen"):
        pass
    with timers.measure("gen"):
        pass
    assert timers.drain() == {"timing_s/gen": 3.0}
    with timers.measure("gen"):
        pass
    assert timers.drain() == {"timing_s/gen": 0.5}
    assert timers.drain() == {}


def test_time_counts_when_the_block_raises() -> None:
    ticks = iter([0.0, 1.0])
    timers = StepTimers(clock=lambda: next(ticks))
    with pytest.raises(KeyError), timers.measure("gen"):
        raise KeyError
    assert timers.drain() == {"timing_s/gen": 1.0}


def test_throughput_is_tokens_per_second_and_device() -> None:
    metrics = perf_metrics(1200, 2.0, num_devices=3)
    assert metrics["perf/throughput"] == 200.0
    assert metrics["perf/time_per_step"] == 2.0


def test_host_memory_is_that_of_the_driver_and_of_the_ranks() -> None:
    alone, more = perf_metrics(1, 1.0), perf_metrics(1, 1.0, ranks_gb=4.0)
    gained = more["perf/cpu_memory_used_gb"] - alone["perf/cpu_memory_used_gb"]
    assert gained == pytest.approx(4.0, abs=0.1)
    assert 0.01 < alone["perf/cpu_memory_used_gb"] < 100


def test_playing_is_timed_per_sampled_token_and_the_rest_per_token_of_the_games() -> None:
    timings = {"timing_s/gen": 2.0, "timing_s/adv": 1.0, "timing_s/testing": 9.0, "x": 1.0}
    assert token_timings(timings, 100, 1000) == {
        "timing_per_token_ms/gen": 20.0,
        "timing_per_token_ms/adv": 1.0,
    }
    assert token_timings(timings, 0, 0) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7260, "2 h 01 min"),
    ],
)
def test_durations_read_at_a_glance(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_split_names_the_largest_parts_first_and_leaves_the_whole_out() -> None:
    timings = {
        "timing_s/step": 9.0,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 5.0,
        "timing_s/update_ema": 4.0,
        "timing_s/adv": 0.0,
    }
    assert split_text(timings) == "update_actor 5.0 s, gen 3.0 s"


def test_off_a_terminal_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    with ProgressView(total_steps=10, start_step=4, stream=stream) as view:
        view.set_phase("rollout")
        view.finish_step(5, 0.25, {"timing_s/step": 8.0, "timing_s/gen": 6.0})
        assert view.eta_seconds() == 40.0
        view.finish_step(6, 0.5, {"timing_s/step": 4.0})
        assert view.eta_seconds() == 24.0
        view.say("note")
    text = stream.getvalue()
    assert "\x1b" not in text
    assert text.splitlines()[0] == "step 5/10  strict win 25.0 %  8.0 s (gen 6.0 s)  left 40.0 s"
    assert text.splitlines()[-1] == "note"


def test_on_a_terminal_progress_is_one_line_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with ProgressView(total_steps=2, stream=stream) as view:
        view.set_phase("rollout")
        view.finish_step(1, 1.0, {"timing_s/step": 1.0})
        view.say("a line that stays")
    assert "a line that stays" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
