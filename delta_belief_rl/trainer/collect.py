"""The games of a training step, played and scored.

A step plays one batch of secrets. With ``algorithm.filter_groups`` and its rule ``differ`` it plays
batch after batch and keeps the groups that teach something, until it has ``data.train_batch_size``
of them; what is over is left out. With its other rules it keeps of one batch what teaches most.
Which secrets a batch holds is a function of the batch's number, and the number of the next batch is
part of the run's state, so a resumed run draws what the straight one draws. Each batch is kept on
the disk until the step's checkpoint is there (``pending``), so a step that is done again plays only
what was not played.

A secret is played at most once in a step: the random numbers of a game are named by secret, step
and game, so a second group of the same secret would be the first one again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from delta_belief_rl.algo.base import Scorer
from delta_belief_rl.algo.samplers.informative import informative_groups
from delta_belief_rl.algo.samplers.variance import varied_groups
from delta_belief_rl.algo.scorers.roles import Prepares
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.config.game_settings import game_digest
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.trainer import pending, persist, steps, trees
from delta_belief_rl.trainer.actor import GameScore
from delta_belief_rl.trainer.services import Services
from delta_belief_rl.trainer.settings import belief_models, sampling_params
from delta_belief_rl.trainer.settings_rewards import variance_settings
from delta_belief_rl.types import Group, Task, TurnTable, UserError


class TooFewGroups(UserError):
    """The batches that one step may play held too few groups whose games differ."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step trains on.

    Attributes:
        groups: With their beliefs, where these are measured.
        scores: Per game, in the order of the games.
        epoch: In which the step's first batch begins.
        games: Games played, those of left out groups included.
        metrics: How much was played for it.
    """

    groups: list[Group]
    scores: list[GameScore]
    epoch: int
    games: int
    metrics: dict[str, float]


async def collect(run: Services, step: int) -> Collected:
    """Play and score the games of a step, and move the cursor of the task order.

    Raises:
        TooFewGroups: Group filtering could not fill the step.
    """
    # Calls of a validation are not this step's; a resumed run has not made them.
    run.judge.reset_stats()
    book, told = trees.Book(run.cfg), dict[str, float]()
    filtered = run.cfg.algorithm.filter_groups
    if filtered.enabled and filtered.rule == "differ":
        made = await _collect_informative(run, step, book, told)
    elif filtered.enabled:
        made = await _collect_varied(run, step, book, told)
    else:
        made = await _collect_batch(run, step, book, told)
    metrics = made.metrics | book.metrics(made.groups) | told
    return replace(made, games=book.games or made.games, metrics=metrics)


async def _collect_batch(
    run: Services, step: int, book: trees.Book, told: dict[str, float]
) -> Collected:
    """One batch as it is."""
    tasks, epoch = _draw(run, run.state.batches)
    played = await _play(run, tasks, step, run.state.batches, book)
    groups, scores = await _score(run, played, step, told)
    run.state.batches += 1
    return Collected(groups, scores, epoch, len(scores), {"train/num_gen_batches": 1.0})


async def _collect_varied(
    run: Services, step: int, book: trees.Book, told: dict[str, float]
) -> Collected:
    """Of one batch the groups whose games differ most."""
    cfg = run.cfg
    tasks, epoch = _draw(run, run.state.batches)
    groups: Sequence[Group] = await _play(run, tasks, step, run.state.batches, book)
    games = sum(len(group.trajectories) for group in groups)
    found = None
    if _filters_on_scores(cfg):
        groups, found = await _score(run, groups, step, told)
    table = _paid(run, groups, found, step)
    wanted = varied_groups(table, len(groups), variance_settings(cfg)).tolist()
    kept = [group for group, keep in zip(groups, wanted, strict=True) if keep]
    if found is None:
        kept, scores = await _score(run, kept, step, told)
    else:
        scores = _of_groups(groups, found, wanted)
    run.state.batches += 1
    share = sum(wanted) / len(wanted)
    metrics = {"train/num_gen_batches": 1.0, "train/kept_group_share": share}
    return Collected(kept, scores, epoch, games, metrics)


async def _collect_informative(
    run: Services, step: int, book: trees.Book, told: dict[str, float]
) -> Collected:
    """Batch after batch, until enough groups are kept."""
    cfg, size = run.cfg, run.cfg.data.train_batch_size
    kept: list[Group] = []
    scores: list[GameScore] = []
    seen: set[str] = set()
    batches = games = 0
    while len(kept) < size:
        if batches == _most_batches(run):
            raise TooFewGroups(
                f"Step {step} found {len(kept)} of {size} groups whose games differ in {batches} "
                "batches of secrets: raise algorithm.filter_groups.max_num_gen_batches or "
                "multi_turn.train.n, or lower data.train_batch_size."
            )
        cursor = run.state.batches + batches
        tasks, _ = _draw(run, cursor, seen)
        if batches and _filters_on_scores(cfg):
            # Scoring the batch before may have put engines to sleep; a sync wakes them.
            await run.engines.sync(run.policy)
        batches += 1
        seen.update(task.id for task in tasks)
        groups = await _play(run, tasks, step, cursor, book)
        games += sum(len(group.trajectories) for group in groups)
        if _filters_on_scores(cfg):
            # Beliefs decide which groups differ, so all of them are measured.
            groups, found = await _score(run, groups, step, told)
            wanted = _informative(run, groups, found, step)
            scores += _of_groups(groups, found, wanted)
        else:
            wanted = _informative(run, groups, None, step)
        kept += [group for group, keep in zip(groups, wanted, strict=True) if keep]
    share = len(kept) / len(seen)
    kept = kept[:size]
    if _filters_on_scores(cfg):
        scores = scores[: sum(len(group.trajectories) for group in kept)]
    else:
        kept, scores = await _score(run, kept, step, told)
    _, epoch = run.sampler.batch(run.state.batches)
    run.state.batches += batches
    metrics = {"train/num_gen_batches": float(batches), "train/kept_group_share": share}
    return Collected(kept, scores, epoch, games, metrics)


def _most_batches(run: Services) -> int:
    """Batches that one step may play; never more than an epoch has."""
    epoch = max(len(run.tasks.train) // run.cfg.data.train_batch_size, 1)
    limit = run.cfg.algorithm.filter_groups.max_num_gen_batches
    return min(limit, epoch) if limit > 0 else epoch


def _draw(run: Services, batch: int, seen: Set[str] = frozenset()) -> tuple[list[Task], int]:
    """The tasks of a batch but those that the step has played, and the batch's epoch."""
    indices, epoch = run.sampler.batch(batch)
    tasks = [run.tasks.train[index] for index in indices]
    return [task for task in tasks if task.id not in seen], epoch


async def _play(
    run: Services, tasks: Sequence[Task], step: int, cursor: int, book: trees.Book
) -> list[Group]:
    """The games of a batch that may be trained on."""
    return book.enter(await _play_all(run, tasks, step, cursor), step)


async def _play_all(run: Services, tasks: Sequence[Task], step: int, cursor: int) -> list[Group]:
    """The games of a batch: those that a start before this one has played, else new ones."""
    cfg, root = run.cfg, Path(run.cfg.trainer.default_local_dir)
    key = _pending_key(run, step, cursor)
    with run.timers.measure("gen"):
        run.progress.set_phase("play")
        found = pending.take(root, key, tasks, run.progress.say) if key else None
        if found is not None:
            groups, counts = found
            run.judge.rewind(counts)
            games = sum(len(group.trajectories) for group in groups)
            run.progress.say(f"step {step}: {games} games were played before and are not again")
            return groups
        sampling = sampling_params(cfg, "train")
        if trees.is_tree(cfg):
            groups = await trees.grow(run.rollouts, cfg, tasks, step, sampling)
        else:
            groups = await run.rollouts.collect(tasks, cfg.multi_turn.train.n, step, sampling)
    if key:
        with run.timers.measure("save_rollout"):
            turns = cfg.multi_turn.max_turns.train
            pending.keep(root, key, groups, run.judge.mark(), turns)
    return groups


def _pending_key(run: Services, step: int, cursor: int) -> pending.Key | None:
    """What the games of a batch are kept by; None where they are not kept."""
    if not (run.cfg.trainer.save_rollout and persist.saves(run.cfg)):
        return None
    settings = trees.digest(run.cfg, game_digest(run.cfg, "train"))
    return pending.Key(run.run_id, step, cursor, run.engines.adapter, settings)


async def _score(
    run: Services, groups: Sequence[Group], step: int, told: dict[str, float]
) -> tuple[list[Group], list[GameScore]]:
    """Old log-probs and beliefs in one pass; the groups with their beliefs.

    Args:
        run: The run.
        groups: The games.
        step: Of the run.
        told: Gets what scorers that ask models say of it, as metrics, added to what is there.
    """
    ready = await _prepared(run, groups, step, told)
    with run.timers.measure("old_log_prob"):
        run.progress.set_phase("score")
        asked = steps.with_views(ready, groups, steps.score_requests(run, groups))
        scores = await run.policy.score(asked)
        return steps.with_beliefs(run.cfg, groups, scores), scores


async def _prepared(
    run: Services, groups: Sequence[Group], step: int, told: dict[str, float]
) -> Services:
    """The run with scorers for these games: those that ask models first have asked."""
    if not any(isinstance(scorer, Prepares) for scorer in run.scorers):
        return run
    ready: list[Scorer] = []
    with run.timers.measure("prepare"):
        run.progress.set_phase("prepare")
        for scorer in run.scorers:
            if isinstance(scorer, Prepares):
                scorer, found = await scorer.prepare(groups, run.roles, step)
                for name, value in found.items():
                    told[name] = told.get(name, 0.0) + value
            ready.append(scorer)
    return replace(run, scorers=tuple(ready))


def _filters_on_scores(cfg: RunConfig) -> bool:
    """Whether groups are told apart by rewards that only the score pass gives."""
    return cfg.algorithm.filter_groups.metric == "seq_reward" and bool(belief_models(cfg))


def _informative(
    run: Services, groups: Sequence[Group], scores: Sequence[GameScore] | None, step: int
) -> list[bool]:
    """Which groups to keep."""
    table = _paid(run, groups, scores, step)
    sizes = [len(group.trajectories) for group in groups]
    return informative_groups(table, sizes, run.cfg.algorithm.filter_groups.metric).tolist()


def _paid(
    run: Services, groups: Sequence[Group], scores: Sequence[GameScore] | None, step: int
) -> TurnTable:
    """The turns with their rewards; without scores the belief channel is zero."""
    if scores is not None:
        return steps.reward_table(run, groups, scores, step - 1)
    table = build_table(groups, run.cfg.multi_turn.win_rule)
    rewards = run.shaper.shape(table, groups, None)
    return run.prices.change(replace(table, rewards=rewards, update=step - 1))


def _of_groups(
    groups: Sequence[Group], scores: Sequence[GameScore], wanted: Sequence[bool]
) -> list[GameScore]:
    """The scores of the games of some groups."""
    flags = [keep for group, keep in zip(groups, wanted, strict=True) for _ in group.trajectories]
    return [score for score, keep in zip(scores, flags, strict=True) if keep]
