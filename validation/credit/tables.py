"""Parts of docs/results_credit.md as functions of what the records say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from delta_belief_rl.eval.compare_statistics import Estimate
from delta_belief_rl.eval.eval_text import percent
from delta_belief_rl.eval.statistics import Interval
from delta_belief_rl.types import UserError
from validation.credit.reading import Findings, across, sentences
from validation.credit.study import FAMILIES, STUDIES

All = Mapping[str, Findings]
"""By name of the study."""
Row = Sequence[str]


def markdown(head: Row, rows: Sequence[Row]) -> str:
    """A table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def setting(found: All) -> str:
    """What was played, and on what, a column for each environment."""
    columns = [_facts(one) for one in found.values()]
    rows = [[name, *(facts[name] for facts in columns)] for name in columns[0]]
    return markdown(["", *(STUDIES[name].title for name in found)], rows)


def _facts(found: Findings) -> dict[str, str]:
    record, budget = found.record, found.record["budget"]
    steps = sorted({one["step"] for cell in record["cells"] for one in cell["evaluations"]})
    games = budget["steps"] * budget["secrets"] * budget["games"]
    played = record["cells"][0]["evaluations"][-1]
    each = played["games"] if len(played["games"]) == 1 else "up to " + max(played["games"])
    walls = sorted(cell["wall"] for cell in record["cells"])
    return {
        "policy": f"`{record['facts']['policy']}`",
        "steps of a run": f"{budget['steps']}, one update each",
        "games of a step": f"{budget['secrets']} secrets x {budget['games']}, "
        f"at most {budget['turns']} turns",
        "budget of a run": f"{games:,} games, {games * budget['turns']:,} turns",
        "validated": f"{len(record['secrets'])} secrets x {each} games, after steps "
        f"{', '.join(str(step) for step in steps)}",
        "methods x seeds": f"{len(found.ranked)} x {len(record['seeds'])}",
        "seconds of a run, all in all": f"{walls[0]:.0f} to {walls[-1]:.0f}",
        "machine": "; ".join(dict.fromkeys(_machine(one) for one in record["machines"])),
    }


def _machine(one: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in one["versions"].items() if value)
    place = f"{one['cores']} cores of {one['cpu']}"
    return f"{one['date']}, {one['runs at once']} runs at once on {place}; {versions}"


def settings(found: Findings) -> str:
    """The settings of every run as words of a command line."""
    words = " \\\n    ".join(found.record["settings"])
    return f"```text\n{words}\n```"


def rates(found: Findings) -> str:
    """A row for each method, the highest rate first."""
    head = [
        *("method", "credit from", "form", "strict win %", "of each seed"),
        *("gain over the start", "p", "learning curve %", "turns", "steps", "games"),
        *("budget spent %", "seconds"),
    ]
    rows: list[Row] = []
    for one in found.ranked:
        gain = found.gains[one.method]
        rows.append(
            [
                f"`{one.method}`",
                family_of(one.method),
                found.record["labels"].get(one.method, ""),
                percent(one.rate.interval),
                ", ".join(f"{100 * rate:.0f}" for _, rate in sorted(one.seed_rates.items())),
                _points(gain.rate),
                _p(gain.p),
                percent(one.area.interval),
                f"{one.turns:.1f}",
                *(f"{size:.0f}" for size in (one.steps, one.games)),
                f"{100 * found.spent[one.method]:.0f}",
                f"{one.seconds:.0f}",
            ]
        )
    return markdown(head, rows)


def differences(found: Findings) -> str:
    """Every method less the baseline, and the first method less every other one."""
    head = [
        *("method", f"less `{found.baseline}`, points", "p", "real"),
        *("learning curve, points", "p", f"`{found.leader}` less it, points", "p", "real"),
    ]
    rows: list[Row] = []
    for one in found.ranked:
        cells = ["", "", "", "", ""]
        if one.method != found.baseline:
            gap = found.against[one.method]
            cells = [_points(gap.rate), _p(gap.rate_p), _yes(gap.is_real)]
            cells += [_points(gap.area), _p(gap.area_p)]
        lead = ["", "", ""]
        if one.method != found.leader:
            gap = found.behind[one.method]
            lead = [_points(_turned(gap.rate)), _p(gap.rate_p), _yes(gap.is_real)]
        rows.append([f"`{one.method}`", *cells, *lead])
    return markdown(head, rows)


def reading(found: Findings) -> str:
    """What the numbers of one environment say."""
    return "\n".join(f"* {sentence}" for sentence in sentences(found))


def own_settings(found: Findings) -> str:
    """What methods set besides their credit."""
    lines = [
        f"* `{method}`: {'; '.join(items)}"
        for method, items in found.record["differing"].items()
        if items
    ]
    return "\n".join(lines) or "None."


def both(found: All) -> str:
    """What the environments say together."""
    first, second = found.values()
    return "\n".join(f"* {sentence}" for sentence in across(first, second))


def family_of(method: str) -> str:
    """Where a method's credit comes from."""
    for family, methods in FAMILIES.items():
        if method in methods:
            return family
    return ""


ONE: dict[str, Callable[[Findings], str]] = {
    part.__name__: part for part in (settings, rates, differences, reading, own_settings)
}
"""Parts of one environment, by name."""
EVERY: dict[str, Callable[[All], str]] = {part.__name__: part for part in (setting, both)}
"""Parts of all environments, by name."""


def part(name: str, found: All) -> str:
    """The text of one mark of a page, such as ``rates everyday`` or ``both``.

    Raises:
        UserError: There is no such part or no such record.
    """
    kind, _, study = name.partition(" ")
    if kind in EVERY and not study:
        return EVERY[kind](found)
    if kind in ONE and study in found:
        return ONE[kind](found[study])
    raise UserError(
        f"There is no part {name!r}: choose from {', '.join(EVERY)}, or one of {', '.join(ONE)} "
        f"with one of {', '.join(STUDIES)}."
    )


def _turned(estimate: Estimate) -> Interval:
    """The same difference the other way round."""
    found = estimate.interval
    return Interval(-found.value, -found.high, -found.low, found.se, found.units)


def _points(value: Estimate | Interval) -> str:
    found = value.interval if isinstance(value, Estimate) else value
    if math.isnan(found.low) and not math.isnan(found.value):
        return f"{100 * found.value:+.1f}"
    return percent(found, sign=True)


def _p(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _yes(real: bool) -> str:
    return "**yes**" if real else "no"
