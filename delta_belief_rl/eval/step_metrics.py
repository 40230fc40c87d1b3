"""Metrics of one training step, by the reference's names where it has them.

Differences in meaning from the reference, on purpose: means over turns run over turns that exist,
not over unused columns; ``response_length/clip_ratio`` is the share of turns cut by the turn's
token cap; ``critic/{advantages,returns}/token_*`` are weighted by tokens; ``critic/returns`` are
rewards still to come and not the advantages again; ``num_questions`` and rates cover games with an
outcome. ``docs/metrics.md`` lists every name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.credit.groups import return_to_go
from delta_belief_rl.algo.shapers.channels import WinRule, grade_of, is_void, iter_games
from delta_belief_rl.envs.answers import JUDGE_EXTRAS
from delta_belief_rl.types import BoolArray, FloatArray, Group, Trajectory, Turn, TurnTable, Verdict

_JUDGE_WIN = "finished"
JUDGE_CLASSES = (
    "true_positives",
    "false_positives",
    "false_negatives",
    "wrong_negatives",
    "true_negatives",
    "unrecognized",
)
"""What the rules can make of a judge's word."""


def spread(prefix: str, values: FloatArray, parts: Sequence[str]) -> dict[str, float]:
    """``prefix/mean`` and so on for the named parts; empty without values."""
    if not len(values):
        return {}
    made = {"mean": values.mean(), "max": values.max(), "min": values.min(), "std": values.std()}
    return {f"{prefix}/{part}": float(made[part]) for part in parts}


def normalise_question(text: str) -> str:
    """Lower case, single spaces, no punctuation at the end: what makes two questions the same."""
    return re.sub(r"\s+", " ", text).strip().lower().rstrip(" ?.!")


def count_duplicates(game: Trajectory) -> int:
    """Turns whose question, normalised, was asked before in the same game."""
    questions = [normalise_question(turn.asked) for turn in game.turns]
    return len(questions) - len(set(questions))


def judge_classes(turns: Iterable[Turn]) -> dict[str, float]:
    """Shares of the judge's words by what the rules made of them, ``judge/<class>``.

    Only turns with a ``raw_verdict`` of a judge that answers in words count, not those of free-text
    environments and not failures, which are no words of the judge (``judge/error_rate``). A word
    that names no verdict is ``unrecognized``. Without such a turn nothing is returned.
    """
    known = {str(verdict): verdict for verdict in Verdict} | {_JUDGE_WIN: Verdict.WIN}
    counts: dict[str, int] = dict.fromkeys(JUDGE_CLASSES, 0)
    for turn in turns:
        word = turn.raw_verdict.strip().lower()
        if not word or turn.verdict in (Verdict.OTHER, Verdict.ERROR):
            continue
        raw = known.get(word)
        if raw is None:
            name = "unrecognized"
        elif raw is turn.verdict:
            name = "true_positives" if raw is Verdict.WIN else "true_negatives"
        elif raw is Verdict.WIN:
            name = "false_positives"
        else:
            name = "false_negatives" if turn.verdict is Verdict.WIN else "wrong_negatives"
        counts[name] += 1
    total = sum(counts.values())
    return {f"judge/{name}": count / total for name, count in counts.items()} if total else {}


def judge_extras(turns: Sequence[Turn]) -> dict[str, float]:
    """Shares of all questions at which something was noticed, ``judge/extra/<tag>``.

    Questions that code decided without asking the judge count, too. The published tags are always
    there, others where they occur, and reasons in prose are no tags; without a question nothing is
    returned.
    """
    if not turns:
        return {}
    counts: dict[str, int] = dict.fromkeys(JUDGE_EXTRAS, 0)
    for turn in turns:
        for tag in dict.fromkeys(turn.diagnostics):
            if tag.isidentifier():
                counts[tag] = counts.get(tag, 0) + 1
    return {f"judge/extra/{tag}": count / len(turns) for tag, count in counts.items()}


def belief_metrics(games: Iterable[Trajectory]) -> dict[str, float]:
    """Means over games of prior, final belief, net gain and sum of positive changes, in nats.

    ``belief/positive_over_net`` far above 1 says that the paid reward is oscillation.
    """
    beliefs = [game.beliefs for game in games if game.beliefs is not None and game.num_turns > 0]
    rows = [np.array(belief, dtype=np.float64) for belief in beliefs]
    if not rows:
        return {}
    prior = float(np.mean([row[0] for row in rows]))
    final = float(np.mean([row[-1] for row in rows]))
    positive = float(np.mean([np.maximum(np.diff(row), 0.0).sum() for row in rows]))
    out = {
        "belief/prior": prior,
        "belief/final": final,
        "belief/net_gain": final - prior,
        "belief/positive_sum": positive,
    }
    if final > prior:
        out["belief/positive_over_net"] = positive / (final - prior)
    return out


def game_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What happened in the games: lengths, wins, invalid, repeated and list questions, errors."""
    games = [game for _, game in iter_games(groups)]
    turns = [turn for game in games for turn in game.turns]
    if not turns:
        return {}
    invalid = np.array([game.count(Verdict.INVALID) for game in games], dtype=np.float64)
    repeated = np.array([game.count(Verdict.REPEATED) for game in games], dtype=np.float64)
    lengths = np.array([sum(t.n_tokens for t in game.turns) for game in games], dtype=np.float64)
    errors = sum(turn.verdict is Verdict.ERROR for turn in turns)
    out = {
        "train/total_invalid": float(invalid.sum()),
        "train/mean_invalid": float(invalid.mean()),
        "train/total_repeated": float(repeated.sum()),
        "train/mean_repeated": float(repeated.mean()),
        "train/list_question_share": float(np.mean([turn.is_list for turn in turns])),
        "train/guess_share": float(np.mean([turn.is_guess for turn in turns])),
        "train/duplicate_share": sum(map(count_duplicates, games)) / len(turns),
        "judge/error_turns": float(errors),
        "judge/error_rate": errors / len(turns),
        "response_length/clip_ratio": float(np.mean([turn.truncated for turn in turns])),
    }
    rule = WinRule.COMPATIBLE
    graded = any(game.score is not None for game in games)
    grades = [grade_of(game, rule) for game in games if graded and not is_void(game, rule)]
    if grades:
        out["train/mean_score"] = float(np.mean(grades))
    for rule in WinRule:
        known = [game for game in games if not is_void(game, rule)]
        out[f"train/{rule}_successful"] = (
            float(np.mean([rule.won(game) for game in known])) if known else float("nan")
        )
        if rule is WinRule.COMPATIBLE:
            out["train/error_games"] = float(len(games) - len(known))
            played = np.array([game.num_turns for game in known], dtype=np.float64)
            out |= spread("num_questions", played, ("mean", "max", "min"))
    out |= spread("response_length", lengths, ("mean", "max", "min"))
    responses = sum(len(game.token_ids) - game.turns[0].start for game in games if game.turns)
    out["state_tokens(total)"] = float(lengths.sum())
    out["state_tokens/coverage"] = float(lengths.sum() / max(responses, 1))
    return out | belief_metrics(games) | judge_classes(turns) | judge_extras(turns)


def credit_metrics(
    table: TurnTable, advantage: Advantage, belief_weight: float
) -> dict[str, float]:
    """Rewards and advantages under ``critic/``; see ``rollout_metrics``."""
    valid, four = table.valid, ("mean", "max", "min", "std")
    zeros = np.zeros(table.num_rows)
    channels = {name: table.rewards.get(name, zeros) for name in ("outcome", "length")}
    games = np.unique(table.traj[valid])
    per_game = np.bincount(
        table.traj, weights=channels["outcome"] + channels["length"], minlength=table.num_games
    )
    out = spread("critic/eog", per_game.astype(np.float64)[games], four)
    out |= spread("critic/rewards", advantage.rewards[valid], four)
    per_turn = table.rewards.get("validity", zeros) + table.rewards.get("guess", zeros)
    out |= spread("critic/turn_rewards", per_turn[valid], four)
    if "belief" in table.rewards and belief_weight != 0:
        shaped = table.rewards["belief"][valid] / belief_weight
        out |= spread("critic/elicit_scores", shaped, four)
    for name, column in table.rewards.items():
        out[f"critic/channel_sum/{name}"] = float(column[valid].sum())
    out |= {f"critic/{name}": value for name, value in advantage.stats.items()}
    used = table.valid & (advantage.weight > 0) & (table.n_tokens > 0)
    values = advantage.turns if advantage.tokens is None else advantage.tokens
    out |= token_metrics("critic/advantages", values, table, used)
    return out | token_metrics("critic/returns", returns_to_come(table), table, used)


def returns_to_come(table: TurnTable) -> FloatArray:
    """Sum of all reward channels from each turn to the end of its game, undiscounted. ``[R]``.

    Channels count where the shaper put them, so an outcome is paid once, whatever the estimator
    makes of it.
    """
    total = np.where(table.valid, np.sum([np.zeros(table.num_rows), *table.rewards.values()], 0), 0)
    if not table.num_rows:
        return total
    return return_to_go(table.grid(total), 1.0)[table.traj, table.turn]


def token_metrics(
    name: str, values: FloatArray, table: TurnTable, used: BoolArray
) -> dict[str, float]:
    """Statistics over the sampled tokens.

    Args:
        name: Prefix of the names.
        values: Of each turn, which its tokens share, ``[R]``; or of each token, all rows end to
            end, ``[n_tokens.sum()]``.
        table: The turns.
        used: Turns that count, ``[R]``.
    """
    if not used.any():
        return {}
    tokens, games = table.n_tokens, table.traj
    if len(values) != table.num_rows:
        used, games = np.repeat(used, tokens), np.repeat(games, tokens)
        tokens = np.ones(len(values), dtype=np.int64)
    turns, tokens, games = values[used], tokens[used].astype(np.float64), games[used]
    size = np.bincount(games, weights=tokens)
    kept = size > 0
    first = np.bincount(games, weights=tokens * turns)[kept] / size[kept]
    second = np.bincount(games, weights=tokens * turns**2)[kept] / size[kept]
    mean = float(np.average(turns, weights=tokens))
    return {
        f"{name}/mean_per_seq_mean": float(first.mean()),
        f"{name}/mean_per_seq_std": float(np.sqrt(np.maximum(second - first**2, 0)).mean()),
        f"{name}/token_max": float(turns.max()),
        f"{name}/token_min": float(turns.min()),
        f"{name}/token_mean_global": mean,
        f"{name}/token_std_global": float(np.sqrt(np.average((turns - mean) ** 2, weights=tokens))),
    }


def rollout_metrics(
    groups: Sequence[Group], table: TurnTable, advantages: Advantage, belief_weight: float = 1.0
) -> dict[str, float]:
    """All metrics of a step's games, rewards and advantages.

    Args:
        groups: The games.
        table: Their turn table with its reward channels.
        advantages: What the credit chain made of it; its ``stats`` appear under ``critic/``.
        belief_weight: The lambda in the belief channel; ``critic/elicit_scores`` are divided by it.
    """
    out = game_metrics(groups) | credit_metrics(table, advantages, belief_weight)
    games = np.unique(table.traj[table.valid])
    if len(games):
        won = np.zeros(table.num_games, dtype=np.bool_)
        won[table.traj] = table.won
        out["train/mean_successful"] = float(won[games].mean())
    return out
