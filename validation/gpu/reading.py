"""From what a check has left (a run's folder, a command's output) to its findings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from delta_belief_rl.obs.jsonl import read_records
from validation.gpu.findings import Claims, Findings

Record = Mapping[str, Any]
Counts = dict[str, tuple[float, int]]
"""Secret to (strict wins, games)."""

SYNC = ("sync/probe_gap_mean", "sync/probe_gap")
SAMPLED = ("check/sampled_gap_mean", "check/sampled_gap_max")
BELIEF = ("check/belief_gap_mean", "check/belief_gap_max")
GAPS = {"sync probe": SYNC, "sampled log-probs": SAMPLED, "beliefs": BELIEF}
"""Comparisons of engine and trainer by name: metrics of their mean and of their largest gap."""
PHASES = ("step", "sync", "gen", "old_log_prob", "check", "update_actor", "testing")
RATES = ("perf/throughput", "perf/mfu/actor", "perf/update_tflops")
MEMORY = ("memory/actor_peak_gib", "memory/actor_estimate_gib", "memory/actor_peak_over_estimate")
JUDGE = (
    "judge/calls_per_game",
    "judge/call_error_rate",
    "judge/restarts",
    "perf/judge_latency_p50_s",
    "perf/judge_latency_p95_s",
)
RATE = "val-core/strict_success_rate"


def training(run_dir: Path, steps: int, number_format: str = "bfloat16") -> Findings:
    """A run that shall have made all its steps with engine and trainer in agreement.

    Args:
        run_dir: The run's folder; a run that was stopped early has left one, too.
        steps: Training steps that were asked for.
        number_format: Of trainer and engine; their bounds are the run's own.
    """
    records = read_records(run_dir / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    events = read_records(run_dir / "events.jsonl")
    ends = [event for event in events if event["kind"] == "end"]
    last = trained[-1]["step"] if trained else 0
    figures: dict[str, Any] = {
        "steps": last,
        "end": {key: ends[-1].get(key) for key in ("status", "cause")} if ends else None,
        "starts": sum(event["kind"] == "start" for event in events),
        "validations": list(_validations(records)),
        "train_strict": [record.get("train/strict_successful") for record in trained],
        "gaps": {name: _gaps(trained, pair) for name, pair in GAPS.items()},
        "seconds": _medians(trained[1:] or trained, [f"timing_s/{name}" for name in PHASES]),
        "rates": _medians(trained[1:] or trained, RATES),
        "memory": {key: _most(trained, key) for key in MEMORY},
        "judge": _medians(trained, JUDGE),
        "engines": [
            {key: event[key] for key in ("role", "workers", "estimated_weights")}
            for event in events
            if event["kind"] == "engine_memory"
        ],
        "recovered": [event for event in events if event["kind"] == "recovered"],
    }
    claims = Claims()
    claims.add("all training steps are made", last >= steps, f"{last} of {steps}")
    _agreement(claims, trained, number_format)
    return Findings(figures, tuple(claims.made))


def learning(run_dir: Path, steps: int, number_format: str = "bfloat16") -> Findings:
    """Like ``training``, of a run whose strict win rate shall rise."""
    found = training(run_dir, steps, number_format)
    claims = Claims(list(found.claims))
    gains = {"validation secrets": validation_gain(run_dir), **final_gains(run_dir)}
    for name, gain in gains.items():
        if gain is not None:
            claims.add(f"the strict win rate rises, {name}", gain["low"] > 0, points(gain))
    if not any(gains.values()):
        claims.add("the strict win rate rises", False, "no two evaluations to compare")
    return Findings(found.figures | {"gains": gains}, tuple(claims.made))


def validation_gain(run_dir: Path) -> dict[str, Any] | None:
    """Rise of the strict win rate from the first to the last validation, paired over secrets."""
    from delta_belief_rl.eval.statistics import paired_difference

    files = sorted((run_dir / "validation").glob("*.jsonl"), key=lambda path: int(path.stem))
    if len(files) < 2:
        return None
    before, after = (_counts(path) for path in (files[0], files[-1]))
    gain = asdict(paired_difference(before, after))
    return gain | {"steps": [int(files[0].stem), int(files[-1].stem)]}


def final_gains(run_dir: Path) -> dict[str, dict[str, Any]]:
    """What the final test of a run says, by sampling; empty before it is over."""
    summary, scores = run_dir / "test" / "summary.json", run_dir / "final.json"
    if not (summary.is_file() and scores.is_file()):
        return {}
    rows = json.loads(scores.read_bytes())["scores"]
    found: dict[str, dict[str, Any]] = {}
    for sampling, gain in json.loads(summary.read_bytes())["gains"].items():
        mine = {row["player"]: row for row in rows if row["sampling"] == sampling}
        found[f"test secrets, {sampling}"] = {
            "value": gain["gain"],
            "low": gain["low"],
            "high": gain["high"],
            "start": mine["starting agent"],
            "trained": mine["trained agent"],
        }
    return found


def points(gain: Mapping[str, float]) -> str:
    """A difference of rates in percentage points, with its interval.

    Example:
        >>> points({"value": 0.1, "low": 0.05, "high": 0.15})
        '+10.0 points [+5.0, +15.0]'
    """
    value, low, high = (100 * gain[key] for key in ("value", "low", "high"))
    return f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"


def _agreement(claims: Claims, trained: Sequence[Record], number_format: str) -> None:
    """Claim that sync probe and cross-checks held at every step."""
    # Here, so that a plan of the checks loads no torch.
    from delta_belief_rl.trainer.crosscheck import BOUNDS

    bound = BOUNDS[number_format]
    for name, (mean, largest) in GAPS.items():
        for key, limit, words in ((mean, bound.mean, "mean"), (largest, bound.largest, "largest")):
            values = [record.get(key) for record in trained]
            claims.below(f"{name} at every step, {words}", values, limit, "nats")


def _validations(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for record in records:
        if record.get(RATE) is not None:
            yield {
                "step": record["step"],
                "strict": record[RATE],
                "low": record[f"{RATE}/ci_low"],
                "high": record[f"{RATE}/ci_high"],
                "games": record["val-core/games"],
                "secrets": record["val-core/secrets"],
                "turns": record["val-aux/num_questions/mean"],
            }


def _gaps(trained: Sequence[Record], pair: tuple[str, str]) -> dict[str, Any]:
    """The worst mean and the largest gap over all steps, and how many steps were compared."""
    mean, largest = pair
    return {
        "steps": sum(record.get(mean) is not None for record in trained),
        "worst_mean": _most(trained, mean),
        "largest": _most(trained, largest),
    }


def _most(records: Sequence[Record], key: str) -> float | None:
    return max((record[key] for record in records if record.get(key) is not None), default=None)


def _medians(records: Sequence[Record], keys: Sequence[str]) -> dict[str, float]:
    """Medians over the steps that have the number."""
    found: dict[str, float] = {}
    for key in keys:
        values = [record[key] for record in records if record.get(key) is not None]
        if values:
            found[key.removeprefix("timing_s/")] = statistics.median(values)
    return found


def _counts(path: Path) -> Counts:
    """Strict wins of a file of games; games without an outcome are left out."""
    found: Counts = {}
    for row in read_records(path):
        if row.get("strict_status") in (0, 1):
            wins, games = found.get(row["secret"], (0.0, 0))
            found[row["secret"]] = (wins + row["strict_status"], games + 1)
    return found


def warm_start(folder: Path, turns: int) -> Findings:
    """A warm start's own measurement; it must win some games for training to begin with."""
    body = json.loads((folder / "warmup.json").read_bytes())
    measured = body["measured"]
    rate = measured["strict_win"][str(turns)]
    low, high = measured["strict_win_interval"][str(turns)]
    claims = Claims()
    shown = f"{rate:.1%} [{low:.1%}, {high:.1%}] within {turns} turns"
    claims.add("the warm start wins games by the strict rule", low > 0, shown)
    figures = {
        "measured": measured,
        "settings": body["settings"],
        "last_line": body["log"][-1],
        "steps": body["log"][-1]["step"],
    }
    return Findings(figures, tuple(claims.made))


def taught_judge(folder: Path, least: float) -> Findings:
    """What a taught judge answers rightly."""
    body = json.loads((folder / "teach.json").read_bytes())
    measured = body["measured"]
    right = measured["taught"]["right"]
    claims = Claims()
    claims.add("the judge knows what it was taught", right >= least, f"{right:.1%}, least {least}")
    keys = ("settings", "parameters", "measured", "seconds", "hardware")
    return Findings({key: body[key] for key in keys}, tuple(claims.made))


def doctor(stdout: Path) -> Findings:
    """``delta-belief doctor --json``: each of its checks is a claim; one left out is none."""
    body = json.loads(stdout.read_bytes())
    claims = Claims()
    for check in body["checks"]:
        if check["passed"] is not None:
            value = "" if check["value"] is None else f"{check['value']:.3g} {check['unit']}; "
            claims.add(check["name"], check["passed"], f"{value}{check['note']}")
    return Findings(body, tuple(claims.made))


def judge_audit(stdout: Path, least: float) -> Findings:
    """``delta-belief audit judge --json`` of a judge against the table of the world."""
    body = json.loads(stdout.read_bytes())
    rate = body["agreement"]["rate"]
    claims = Claims()
    shown = f"{rate['value']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}]"
    claims.add("the judge agrees with the table", rate["value"] >= least, f"{shown}, least {least}")
    kept = {key: body[key] for key in ("judges", "agreement", "made") if key in body}
    return Findings(kept, tuple(claims.made))


def tests(junit: Path) -> Findings:
    """A report of pytest: every test ran and none failed; what the tests printed is kept."""
    claims = Claims()
    cases: list[dict[str, Any]] = []
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        state = bad[0].tag if bad else "passed"
        printed = "".join(child.text or "" for child in case if child.tag == "system-out")
        name = case.get("name", "")
        cases.append(
            {
                "name": name,
                "state": state,
                "seconds": float(case.get("time", "0")),
                "printed": [line for line in printed.splitlines() if _told(line)],
            }
        )
        message = (bad[0].get("message") or "").splitlines()[:1] if bad else []
        claims.add(name, state == "passed", " ".join([state, *message]))
    claims.add("tests were found", bool(cases), f"{len(cases)} tests")
    return Findings({"tests": cases}, tuple(claims.made))


def _told(line: str) -> bool:
    """Whether a line is the test's own rather than a log's or a heading of pytest's."""
    # Ray colours what it prints of its processes; a report in XML writes the escape out.
    coloured = "\x1b" in line or "#x1B" in line
    heads = ("(", "[", "INFO", "WARNING", "ERROR", "-")
    return ": " in line and not coloured and not line.startswith(heads)


def bench(stdout: Path) -> Findings:
    """``bench_gpu.py --json``: ways of the same work, the first one the baseline."""
    body = json.loads(stdout.read_bytes())
    claims = Claims()
    parts: list[dict[str, Any]] = []
    for part in body["parts"]:
        for check in part["checks"]:
            shown = f"{check['value']:.3g}, bound {check['bound']:g}"
            claims.add(f"{part['title']}: {check['name']}", check["ok"], shown)
        parts.append(
            {
                "part": part["title"],
                "what": part["work"],
                "ways": [_way(row) for row in part["rows"]],
                "checks": part["checks"],
            }
        )
    figures = {"hardware": body["hardware"], "settings": body["settings"], "parts": parts}
    return Findings(figures, tuple(claims.made))


def _way(row: Record) -> dict[str, Any]:
    names = {
        "median_s": "median_s",
        "fastest_s": "min_s",
        "slowest_s": "max_s",
        "tokens": "tokens",
        "speedup": "speedup",
        "peak_gib": "peak GiB",
        "tokens_per_s": "tokens/s",
        "share_of_matrix_rate_counted_as_6N": "6N share",
    }
    return {"name": row["name"]} | {key: row[own] for key, own in names.items() if own in row}


def host(stdout: Path, gpus: int) -> Findings:
    """What ``validation.gpu.host`` prints."""
    body = json.loads(stdout.read_bytes())
    claims = Claims()
    claims.add("torch sees the GPUs", body["torch_gpus"] >= gpus, f"{body['torch_gpus']} of {gpus}")
    for name in ("vllm", "ray"):
        claims.add(f"{name} can be imported", body["imported"][name] is None, "")
    return Findings(body, tuple(claims.made))
