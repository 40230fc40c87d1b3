"""``report.html``: a run on one page that needs nothing but a browser.

The page is made from the files of the run's folder alone, so it can be made again at any time:
``metrics.jsonl``, ``validation/<step>.jsonl``, ``final.json`` (the scores of the players) and
``config.yaml``. Each of them may be missing; its part of the page is then left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from delta_belief_rl.eval.charts import COLOURS, Series, line_chart, running_mean, stacked_bar
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.obs.metrics import NESTED_TIMINGS
from delta_belief_rl.rollout.store import read_rows
from delta_belief_rl.types import UserError

FINAL = "final.json"
REPORT = "report.html"
TIMING_PARTS = 7
"""Parts of a step that the time bar shows one by one; the smaller ones are summed."""

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class PlayerScore:
    """How one player did on the test secrets.

    Attributes:
        player: e.g. ``"random player"``.
        sampling: e.g. ``"temperature 1"``; empty for players that do not sample from a model.
        strict_win: Share of games won under the strict rule, with its 95 % interval over secrets.
        compatible_win: Share under the published rule; None where it does not apply.
        mean_turns: Turns of a game, lost ones included.
    """

    player: str
    sampling: str
    games: int
    secrets: int
    strict_win: float
    low: float
    high: float
    mean_turns: float
    compatible_win: float | None = None


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn as a reader sees it. ``belief`` is the probability of the secret after the turn."""

    question: str
    reply: str
    belief: float | None = None


@dataclass(frozen=True, slots=True)
class GameView:
    """One game as a reader sees it."""

    secret: str
    step: int
    won: bool
    turns: tuple[TurnView, ...]
    prior: float | None = None


@dataclass(frozen=True, slots=True)
class GamePair:
    """A validation game of the latest policy, with the same secret played by the first one."""

    label: str
    latest: GameView
    first: GameView | None


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything the page shows."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    scores: tuple[PlayerScore, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()
    pairs: tuple[GamePair, ...] = ()
    config: str = ""


def save_scores(run_dir: Path, scores: Sequence[PlayerScore], facts: Mapping[str, str]) -> Path:
    """Write ``final.json``: the table's rows in the order they are shown, and facts of the run."""
    path = run_dir / FINAL
    beside = path.with_name(f".{FINAL}.{os.getpid()}")
    body = {"facts": dict(facts), "scores": [asdict(score) for score in scores]}
    beside.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return path


def render(run_dir: Path) -> Path:
    """Make ``report.html`` of a run's folder anew and return its path.

    Raises:
        UserError: the folder holds nothing of a run, or one of its files is damaged.
    """
    data = load(run_dir)
    path = run_dir / REPORT
    beside = path.with_name(f".{REPORT}.{os.getpid()}")
    beside.write_text(to_html(data), encoding="utf-8")
    os.replace(beside, path)
    return path


def load(run_dir: Path) -> ReportData:
    """Read a run's folder.

    Raises:
        UserError: as for :func:`render`.
    """
    records = read_records(run_dir / "metrics.jsonl")
    final = _read_final(run_dir / FINAL)
    validation = _validation_files(run_dir / "validation")
    if not records and not final and not validation:
        raise UserError(
            f"{run_dir} holds neither metrics.jsonl nor validation games; name a run's folder."
        )
    config = run_dir / "config.yaml"
    facts = {"folder": f"{run_dir.parent.name}/{run_dir.name}"}
    if records:
        seconds = sum(r.get("timing_s/step") or 0.0 for r in records)
        facts |= {"run": str(records[-1].get("run_id", "")), "last step": str(records[-1]["step"])}
        facts |= {"time in steps": f"{seconds / 60:.1f} min"} if seconds else {}
    return ReportData(
        title=run_dir.name,
        facts=facts | final.get("facts", {}),
        scores=tuple(PlayerScore(**score) for score in final.get("scores", [])),
        records=tuple(records),
        pairs=_choose_games(validation),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
    )


def _read_final(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is no JSON ({error}); remove it to leave its table out."
        ) from error
    return dict(body)


# -------------------------------------------------------------------------------------------- games


def _validation_files(folder: Path) -> list[Path]:
    """``<step>.jsonl`` in order of the step."""
    return sorted(
        (path for path in folder.glob("*.jsonl") if path.stem.isdigit()),
        key=lambda path: int(path.stem),
    )


def _choose_games(files: Sequence[Path]) -> tuple[GamePair, ...]:
    """Three games of the last validation, by a rule that does not look for pretty ones."""
    if not files:
        return ()
    latest = [view_game(row, int(files[-1].stem)) for row in read_rows(files[-1]).rows]
    first = (
        [view_game(row, int(files[0].stem)) for row in read_rows(files[0]).rows]
        if len(files) > 1
        else []
    )
    won = sorted((game for game in latest if game.won), key=lambda game: len(game.turns))
    lost = [game for game in latest if not game.won]
    chosen: list[tuple[str, GameView]] = []
    if won:
        chosen.append(("the shortest win", won[0]))
        chosen.append(("a win of median length", won[len(won) // 2]))
    if lost:
        chosen.append(("the first lost game", lost[0]))
    earlier: dict[str, GameView] = {}
    for game in first:
        earlier.setdefault(game.secret, game)
    # A short file can name one game twice; show it once.
    unique = {id(game): (label, game) for label, game in reversed(chosen)}
    return tuple(
        GamePair(label, game, earlier.get(game.secret)) for label, game in reversed(unique.values())
    )


def view_game(row: Mapping[str, Any], step: int) -> GameView:
    """Read one line of a validation or rollout file, of this project or of the published schema.

    The conversation is taken from ``turns`` where the row has them, and from the plain text of
    ``output`` otherwise; a game is won by the strict rule where the row knows it.
    """
    exchanges = _exchanges(row)
    logs = row.get("beliefs") or row.get("log_prob_reward") or []
    beliefs = [math.exp(min(float(value), 0.0)) for value in logs][: len(exchanges) + 1]
    won = row.get("strict_status", row.get("game_status", 0))
    return GameView(
        secret=str(row.get("secret", "")),
        step=step,
        won=bool(won),
        turns=tuple(
            TurnView(question, reply, beliefs[index + 1] if index + 1 < len(beliefs) else None)
            for index, (question, reply) in enumerate(exchanges)
        ),
        prior=beliefs[0] if beliefs else None,
    )


def _exchanges(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    if turns := row.get("turns"):
        return [(str(turn.get("action", "")), str(turn.get("reply", ""))) for turn in turns]
    messages: list[tuple[str, str]] = []
    for line in str(row.get("output", "")).splitlines():
        if line.strip() in ("assistant", "user"):
            messages.append((line.strip(), ""))
        elif messages:
            role, text = messages[-1]
            messages[-1] = (role, f"{text} {line}".strip())
    return _pair_messages(messages)


def _pair_messages(messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(question, reply) of each turn; what precedes the first question is the prompt."""
    pairs: list[tuple[str, str]] = []
    for role, text in messages:
        if role == "assistant":
            pairs.append((text, ""))
        elif pairs:
            pairs[-1] = (pairs[-1][0], text)
    return pairs


# ------------------------------------------------------------------------------------------- charts


def _points(records: Sequence[Mapping[str, Any]], *names: str) -> Points:
    """``(step, value)`` of the first of some metrics that the records hold."""
    for name in names:
        points = [(float(r["step"]), float(r[name])) for r in records if r.get(name) is not None]
        if points:
            return points
    return []


def _win_chart(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    train = _points(records, "train/strict_successful", "train/strict_success_rate")
    series = [
        Series("training games, each step", train, COLOURS[0], faint=True),
        Series("training games, mean of 5 steps", running_mean(train), COLOURS[0]),
        Series(
            "validation, strict",
            _points(records, "val-core/strict_success_rate"),
            COLOURS[1],
            dots=True,
        ),
        Series(
            "validation, compatible",
            _points(records, "val-core/success_rate"),
            COLOURS[2],
            dots=True,
        ),
    ]
    return _chart(
        "Games won", series, percent=True, note="Strict: one candidate, guessed directly."
    )


def _chart(
    title: str, series: Sequence[Series], note: str = "", *, percent: bool = False
) -> dict[str, Any]:
    return {
        "title": title,
        "note": note,
        "svg": line_chart(series, percent=percent),
        "legend": [(s.name, s.colour, s.faint) for s in series if s.points],
    }


def charts(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The learning curves: title, note, SVG and legend of each chart that has data."""

    def single(title: str, note: str, *names: str) -> dict[str, Any]:
        raw = _points(records, *names)
        pair = [
            Series("each step", raw, COLOURS[0], faint=True),
            Series("mean of 5 steps", running_mean(raw), COLOURS[0]),
        ]
        return _chart(title, pair, note)

    belief = [
        Series("before the first turn", _points(records, "belief/prior"), COLOURS[5]),
        Series("after the last turn", _points(records, "belief/final"), COLOURS[0]),
    ]
    found = [
        _win_chart(records),
        single(
            "Turns of a training game",
            "Lost games count with all their turns.",
            "num_questions/mean",
        ),
        _chart(
            "Belief in the secret", belief, "Log-probability in nats, mean over training games."
        ),
        single("Belief gained in a game", "Net gain in nats, last minus first.", "belief/net_gain"),
        single(
            "Entropy of the policy",
            "Nats per sampled token.",
            "actor/entropy_loss",
            "actor/entropy",
        ),
    ]
    return [chart for chart in found if chart["svg"]]


def time_split(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of each part of a step, largest first; small ones are summed as ``others``."""
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            part = name.removeprefix("timing_s/")
            if part not in (name, "step", *NESTED_TIMINGS) and value:
                totals[part] = totals.get(part, 0.0) + float(value)
    steps = sum(1 for record in records if record.get("timing_s/step")) or len(records)
    ordered = sorted(
        ((name, total / steps) for name, total in totals.items()), key=lambda item: -item[1]
    )
    split = dict(ordered[:TIMING_PARTS])
    rest = sum(value for _, value in ordered[TIMING_PARTS:])
    return split | ({"others": rest} if rest else {})


# --------------------------------------------------------------------------------------------- page


def _table(scores: Sequence[PlayerScore]) -> dict[str, Any]:
    """Rows by player, with one cell for each way of sampling."""
    samplings = list(dict.fromkeys(score.sampling for score in scores if score.sampling))
    rows: dict[str, dict[str, PlayerScore]] = {}
    for score in scores:
        rows.setdefault(score.player, {})[score.sampling] = score
    sizes = sorted({(score.games, score.secrets) for score in scores})
    texts = [f"{games} games on {secrets} secrets" for games, secrets in sizes]
    return {"samplings": samplings, "rows": rows, "sizes": texts}


def to_html(data: ReportData) -> str:
    """The page as text; nothing in it is loaded from elsewhere."""
    environment = Environment(
        loader=PackageLoader("delta_belief_rl.obs", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    split = time_split(data.records)
    return environment.get_template("report.html.j2").render(
        data=data,
        table=_table(data.scores),
        charts=charts(data.records),
        split=[
            (name, seconds, COLOURS[index % len(COLOURS)])
            for index, (name, seconds) in enumerate(split.items())
        ],
        split_svg=stacked_bar(split),
    )
