"""Tables of docs/results_gpu.md as functions of the records of the checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_belief_rl.types import UserError
from validation.gpu.reading import GAPS, points

GIB, MIB = 2**30, 2**20
Row = Sequence[str]

TRAININGS = {
    "train_rules": "table as judge",
    "train_llm_judge": "language model as judge",
    "train_llm_judge_early": "a better language model as judge",
}
RUNS = TRAININGS | {
    "paper_awq_dp2": "policy on one card, two AWQ judges on the other",
    "paper_bf16_tp2": "policy over two cards, bfloat16 judge of TP 2 beside it",
    "paper_awq_shared": "policy and AWQ judge on one card",
    "paper_bf16_shared": "policy and bfloat16 judge on one card",
}
"""Training runs among the checks, in the words of the page."""


@dataclass(frozen=True, slots=True)
class Records:
    """The records in a folder, by the name of their check."""

    folder: Path

    def __call__(self, name: str) -> Mapping[str, Any]:
        """One record.

        Raises:
            UserError: It is not there.
        """
        path = self.folder / f"{name}.json"
        if not path.is_file():
            raise UserError(f"{path} does not exist: run the check {name}, or copy its record.")
        return json.loads(path.read_bytes())

    def figures(self, name: str) -> Mapping[str, Any]:
        """The figures of one record; a record that was put together by hand is all figures.

        Raises:
            UserError: It is not there, or its check has left nothing.
        """
        body = self(name)
        if "check" not in body:
            return body
        if not body.get("figures"):
            raise UserError(f"The check {name} has no figures: {body['status']}, {body['reason']}")
        return body["figures"]

    def present(self, names: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Words and figures of those that are there."""
        for name, words in names.items():
            if (self.folder / f"{name}.json").is_file() and self(name).get("figures"):
                yield words, self.figures(name)


def markdown(head: Row, rows: Sequence[Row]) -> str:
    """A table in Markdown.

    Raises:
        UserError: It has no rows.
    """
    if not rows:
        raise UserError("No record has a row for it.")
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


# --- the benchmark --------------------------------------------------------------------------------


def _part(records: Records, name: str) -> tuple[str, list[Mapping[str, Any]]]:
    (part,) = [one for one in records.figures("actor_bench")["parts"] if one["part"] == name]
    return part["what"], part["ways"]


def update(records: Records) -> str:
    """One optimizer step, packed against padded."""
    what, ways = _part(records, "update")
    head = [
        what.split(" (")[0],
        "seconds",
        "tokens/s",
        "share",
        "peak memory",
        "against padding",
    ]
    packed = ways[-1]
    rate, share = packed["tokens_per_s"], packed["share_of_matrix_rate_counted_as_6N"]
    rows: list[Row] = []
    for way in ways:
        # What is padding trains nothing: every way has the tokens of the packed one.
        pace = way.get("tokens_per_s", packed["tokens"] / way["median_s"])
        rows.append(
            [
                way["name"].replace("2500", "2,500"),
                f"{way['median_s']:.3f}",
                f"{pace:,.0f}",
                f"{share * pace / rate:.3f}",
                f"{way['peak_gib']:.1f} GiB",
                f"{way['speedup']:.2f} x",
            ]
        )
    return markdown(head, rows)


def belief(records: Records) -> str:
    """Log-probs and beliefs, branched against re-reading."""
    what, ways = _part(records, "belief")
    head = [
        what.split(" of 20 turns")[0],
        "seconds",
        "tokens read",
        "peak memory",
        "against re-reading",
    ]
    rows = [
        [
            way["name"],
            f"{way['median_s']:.3f}",
            f"{way['tokens']:,}",
            f"{way['peak_gib']:.1f} GiB",
            f"{way['speedup']:.2f} x",
        ]
        for way in ways
    ]
    return markdown(head, rows)


# --- engine against trainer -----------------------------------------------------------------------


def differences(records: Records) -> str:
    """Differences of engine and trainer over several rounds of the doctor's comparisons."""
    head = ["check", "numbers", "mean", "median", "99 %", "largest", "mean of the worst round"]
    keys = ("mean", "p50", "p99", "max", "worst_mean")
    rows = [
        [f"`{name}`", f"{found['count']:,}", *(f"{found[key]:.3f}" for key in keys)]
        for name, found in records.figures("doctor_differences")["differences"].items()
    ]
    return markdown(head, rows)


def doctor(records: Records) -> str:
    """The doctor's checks, number against bound."""
    rows = [
        [
            f"`{check['name']}`",
            {True: "holds", False: "**does not hold**", None: "left out"}[check["passed"]],
            "" if check["value"] is None else f"{check['value']:.3g} {check['unit']}",
            "" if check["bound"] is None else f"{check['bound']:g}",
        ]
        for check in records.figures("doctor_bf16")["checks"]
    ]
    return markdown(["check", "", "found", "bound"], rows)


def gaps(records: Records) -> str:
    """Sync probe and cross-checks of the training runs, the worst over all steps."""
    rows = [
        [words, name, str(found["steps"]), _nats(found["worst_mean"]), _nats(found["largest"])]
        for words, figures in records.present(RUNS)
        for name in GAPS
        if (found := figures["gaps"][name])["steps"]
    ]
    return markdown(["run", "compared", "steps", "mean of the worst step", "largest"], rows)


def _nats(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


# --- training runs --------------------------------------------------------------------------------


def training(records: Records) -> str:
    """Strict win rates before and after, intervals over secrets."""
    rows: list[Row] = []
    for words, figures in records.present(TRAININGS):
        for name, gain in figures.get("gains", {}).items():
            if gain is None:
                continue
            before, after = _evaluations(figures, gain)
            size = f"{before['secrets']:.0f} secrets, {before['games']:.0f} games"
            rows.append([words, f"{name}, {size}", _rate(before), _rate(after), points(gain)])
    return markdown(["judge", "evaluated on", "strict win before", "after", "gain"], rows)


def won(records: Records) -> str:
    """Share of the games of each training step that were won by the strict rule."""
    runs = dict(records.present(TRAININGS))
    steps = max((figures["steps"] for figures in runs.values()), default=0)
    rows = [
        [str(step + 1), *(_share(figures["train_strict"], step) for figures in runs.values())]
        for step in range(steps)
    ]
    return markdown(["step", *runs], rows)


def _share(rates: Sequence[float | None], step: int) -> str:
    rate = rates[step] if step < len(rates) else None
    return "" if rate is None else f"{100 * rate:.1f} %"


def _evaluations(
    figures: Mapping[str, Any], gain: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """The two evaluations behind a gain, under one set of names."""
    if "start" in gain:
        made = (gain["start"], gain["trained"])
        return tuple({**one, "strict": one["strict_win"]} for one in made)  # type: ignore[return-value]
    by_step = {one["step"]: one for one in figures["validations"]}
    first, last = gain["steps"]
    # The last validation of a run that was stopped is in its games alone.
    missing = {"strict": by_step[first]["strict"] + gain["value"], "low": None, "high": None}
    return by_step[first], by_step.get(last, missing)


def _rate(one: Mapping[str, Any]) -> str:
    shown = f"{100 * one['strict']:.1f} %"
    if one["low"] is None:
        return shown
    return f"{shown} [{100 * one['low']:.1f}, {100 * one['high']:.1f}]"


def seconds(records: Records) -> str:
    """Medians of a step's parts."""
    parts = {"step": "step", "gen": "play", "old_log_prob": "score", "check": "cross-check",
             "update_actor": "update", "sync": "sync"}  # fmt: skip
    rows = [
        [
            words,
            str(figures["steps"]),
            *(_seconds(figures["seconds"].get(key)) for key in parts),
            f"{figures['rates'].get('perf/throughput', 0):,.0f}",
        ]
        for words, figures in records.present(RUNS)
        if figures["steps"]
    ]
    head = ["run", "steps", *(f"{words}, s" for words in parts.values()), "tokens/s on a card"]
    return markdown(head, rows)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def memory(records: Records) -> str:
    """What every role holds of its cards against the plan's estimate."""
    rows: list[Row] = []
    for words, figures in records.present(RUNS):
        peak = figures["memory"]["memory/actor_peak_gib"]
        estimate = figures["memory"]["memory/actor_estimate_gib"]
        if peak is not None and estimate is not None:
            rows.append([words, "training rank", "", "", "", f"{peak:.1f} GiB ({estimate:.1f})"])
        for engine in figures["engines"]:
            most = max(engine["workers"], key=lambda worker: worker["reserved"])
            estimated = engine["estimated_weights"]
            rows.append(
                [
                    words,
                    engine["role"],
                    _bytes(most["weights"]),
                    "" if estimated is None else _bytes(estimated),
                    _bytes(most["cache"]),
                    _bytes(most["reserved"]),
                ]
            )
    head = ["run", "role", "weights", "estimated", "cache", "at most (estimated)"]
    return markdown(head, rows)


def _bytes(size: float) -> str:
    return f"{size / MIB:.0f} MiB" if size < GIB else f"{size / GIB:.1f} GiB"


# --- everything -----------------------------------------------------------------------------------


def warm_start(records: Records) -> str:
    """What the warm start plays like, by turn budget."""
    figures = records.figures("warm_start")
    measured, played = figures["measured"], figures["settings"]["max_turns"]
    rows = [
        [turns, f"{100 * rate:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"]
        for turns, rate in measured["strict_win"].items()
        for low, high in [measured["strict_win_interval"][turns]]
        # Games end after so many turns, so that larger budgets say nothing of their own.
        if int(turns) <= played
    ]
    return markdown(["turns", f"strict win in {measured['games']} games, temperature 1"], rows)


def taught_judge(records: Records) -> str:
    """What the taught judge answers rightly."""
    later = records.figures("taught_judge")["measured"]
    early = records.figures("taught_judge_early")["measured"]
    rows = [
        [kind, str(found["questions"]), _right(early[kind]), _right(found)]
        for kind, found in later.items()
    ]
    return markdown(["asked", "questions", "the better judge", "the other"], rows)


def _right(found: Mapping[str, float]) -> str:
    low, high = 100 * found["low"], 100 * found["high"]
    return f"{100 * found['right']:.1f} % [{low:.1f}, {high:.1f}]"


def judge_in_games(records: Records) -> str:
    """How often the language model judged games rightly, and what its mistakes cost."""
    rows = [
        [
            name,
            f"{found['answers']:,.0f}",
            f"{100 * found['right']:.1f} %",
            f"{found['clean_games']:.0f} of {found['games']:.0f}",
            f"{100 * found['clean_won']:.1f} %",
            f"{100 * found['misled_won']:.1f} %",
        ]
        for name, found in records.figures("judge_in_games")["files"].items()
    ]
    head = ["games", "answers", "right", "without a wrong one", "of these won", "of the others"]
    return markdown(head, rows)


def two_cards(records: Records) -> str:
    """The tests on two cards and the numbers that they print."""
    rows = [
        [f"`{test['name']}`", test["state"], f"{test['seconds']:.0f}", "; ".join(test["printed"])]
        for test in records.figures("fsdp_tests")["tests"]
    ]
    return markdown(["test", "", "seconds", "found"], rows)


def checks(records: Records) -> str:
    """Every check of the campaign."""
    rows: list[Row] = []
    for path in sorted(records.folder.glob("*.json")):
        body = json.loads(path.read_bytes())
        if "check" in body:
            claims = body.get("claims", [])
            held = f"{sum(claim['holds'] for claim in claims)} of {len(claims)}" if claims else ""
            time = f"{body['seconds']:.0f}" if "seconds" in body else ""
            rows.append([f"`{body['check']}`", body["about"], body["status"], held, time])
    return markdown(["check", "shows that", "", "claims that hold", "seconds"], rows)


TABLES: dict[str, Callable[[Records], str]] = {
    table.__name__: table
    for table in (
        checks,
        training,
        won,
        gaps,
        seconds,
        memory,
        warm_start,
        taught_judge,
        judge_in_games,
        update,
        belief,
        doctor,
        differences,
        two_cards,
    )
}
"""By name, as the page's marks have it."""
