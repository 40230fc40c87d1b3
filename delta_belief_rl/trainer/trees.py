"""The games of a step as trees: some are continued from the middle of others.

All secrets of a batch are played together, round after round: first the games that begin at the
opening, then those that the rule (``algo.samplers``) sends off from turns of finished games. A
secret whose rule names no further game waits for the others. A round is played by the driver like
any batch of games, so that an engine that fails is mended and the round played again.

Every game is a whole trajectory, with the turns that it shares at its beginning; its ``lineage``
says who played them. ``pruned`` takes out the games that are played and not trained on. It is a
function of the games and of names, so that games that were kept on the disk give the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from delta_belief_rl.algo.samplers.at2po_expansion import Expansion, ExpansionSettings
from delta_belief_rl.algo.samplers.branches import (
    ALONE,
    BranchRule,
    Draw,
    Leave,
    Played,
    mean_surprisal,
)
from delta_belief_rl.algo.samplers.entropy_branching import Arpo, ArpoSettings
from delta_belief_rl.algo.samplers.uniform_branching import TreeGrowth, TreeGrowthSettings
from delta_belief_rl.algo.shapers.channels import FAILED_STOPS
from delta_belief_rl.config.convert import to_plain
from delta_belief_rl.config.rules_trees import trees
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.envs.base import Env
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.rollout.branching import Memory, Origin, Way, lineage_of, rewind_way
from delta_belief_rl.rollout.driver import RolloutDriver, Start
from delta_belief_rl.rollout.game import OPENING, Beginning
from delta_belief_rl.rollout.seeds import named_uniform
from delta_belief_rl.types import Group, Task, Trajectory, UserError


def is_tree(cfg: RunConfig) -> bool:
    """Whether the games of a secret share turns."""
    return cfg.algorithm.tree.rule != "none"


def branch_rule(cfg: RunConfig) -> BranchRule:
    """The rule of ``algorithm.tree``, which is not none.

    Raises:
        UserError: A knob is out of range, or does not go with another setting.
    """
    for sentence in trees(cfg):
        raise UserError(sentence)
    tree = cfg.algorithm.tree
    if tree.rule == "arpo":
        model, knobs = cfg.actor_rollout_ref.model, tree.arpo
        settings = ArpoSettings(
            vocab=_vocabulary(model.tokenizer_path or model.path),
            initial=knobs.initial,
            beam=knobs.beam,
            base_probability=knobs.base_probability,
            entropy_weight=knobs.entropy_weight,
        )
        return Arpo(settings)
    if tree.rule == "tree_grpo":
        growth = tree.tree_grpo
        return TreeGrowth(TreeGrowthSettings(growth.trees, growth.rounds, growth.expand))
    knobs = tree.at2po
    return Expansion(ExpansionSettings(knobs.rounds, knobs.beam, knobs.branch_penalty))


def digest(cfg: RunConfig, settings: str) -> str:
    """Checksum of all settings that the games of a step depend on.

    Args:
        cfg: The configuration.
        settings: Checksum of those without trees, which is returned where there are none.
    """
    if not is_tree(cfg):
        return settings
    text = json.dumps([settings, to_plain(cfg.algorithm.tree)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_trees(cfg: RunConfig, env: Env) -> None:
    """Refuse, before anything is played, what cannot be played as trees.

    Args:
        cfg: The configuration.
        env: Any game of the run.

    Raises:
        UserError: A setting does not fit, or the environment cannot be brought back to a state.
    """
    if is_tree(cfg) and not cfg.trainer.val_only:
        branch_rule(cfg)
        rewind_way(env)


@dataclass(slots=True)
class _Grown:
    """One secret's games while they are played; number ``i`` of every list is game ``i``."""

    task: Task
    draw: Draw
    games: list[Trajectory] = field(default_factory=list[Trajectory])
    memories: dict[int, Memory] = field(default_factory=dict[int, Memory])
    rounds: list[int] = field(default_factory=list[int])

    def witness(self, number: int, way: Way, origin: Origin | None) -> Memory:
        """A new memory of a game; one that is played again is remembered anew."""
        self.memories[number] = Memory(way, origin)
        return self.memories[number]

    def start(self, number: int, leave: Leave, way: Way) -> Start:
        """How a game begins that the rule has named."""
        if leave.parent == ALONE:
            return self._opening(number, OPENING, way)
        if leave.parent >= len(self.games):
            # Of the same round, so nothing but the opening can be shared.
            lineage = ((leave.parent, 0), (number, 0))
            return self._opening(number, Beginning(lineage=lineage), way)
        game = self.games[leave.parent]
        if leave.turn == 0:
            lineage = lineage_of(game, 0, number)
            return self._opening(number, Beginning(lineage=lineage), way)
        origin = Origin(game, self.memories[leave.parent], leave.turn)
        return Start(
            self.task,
            number,
            origin.beginning(number),
            origin.restore,
            partial(self.witness, number, way, origin),
        )

    def _opening(self, number: int, beginning: Beginning, way: Way) -> Start:
        witness = partial(self.witness, number, way, None)
        return Start(self.task, number, beginning, witness=witness)


async def grow(
    driver: RolloutDriver,
    cfg: RunConfig,
    tasks: Sequence[Task],
    step: int,
    sampling: SamplingParams,
) -> list[Group]:
    """Play the games of a batch as trees.

    Returns:
        One group for each task, with all games that were played; see ``pruned``.

    Raises:
        UserError: See ``check_trees``.
    """
    rule, size = branch_rule(cfg), cfg.multi_turn.train.n
    way = rewind_way(driver.new_env(tasks[0])) if tasks else "snapshot"
    grown = [_Grown(task, _draws(cfg, task, step)) for task in tasks]
    plans = [rule.first(size) for _ in grown]
    number = 1
    while any(plans):
        starts = [
            tree.start(len(tree.games) + i, leave, way)
            for tree, plan in zip(grown, plans, strict=True)
            for i, leave in enumerate(plan)
        ]
        games = iter(await driver.play(starts, step, sampling))
        for tree, plan in zip(grown, plans, strict=True):
            tree.games += [next(games) for _ in plan]
            tree.rounds += [number] * len(plan)
        plans = [
            rule.more(_played(cfg, tree.games, tree.rounds), size, number, tree.draw)
            if plan
            else []
            for tree, plan in zip(grown, plans, strict=True)
        ]
        number += 1
    return [Group(tree.task, tuple(tree.games)) for tree in grown]


def pruned(cfg: RunConfig, groups: Sequence[Group], step: int) -> list[Group]:
    """The games that are trained on, ``multi_turn.train.n`` of each group."""
    rule, size, out = branch_rule(cfg), cfg.multi_turn.train.n, list[Group]()
    for group in groups:
        games = {game.game: game for game in group.trajectories}
        played = _played(cfg, group.trajectories, [1] * len(games))
        kept = rule.kept(played, size, _draws(cfg, group.task, step))
        out.append(Group(group.task, tuple(games[number] for number in kept)))
    return out


@dataclass(slots=True)
class Book:
    """What a step played beyond what it trains on.

    Attributes:
        games: All games.
        turns: Turns in which an environment was asked; a shared one counts once.
    """

    cfg: RunConfig
    games: int = 0
    turns: int = 0

    def enter(self, groups: list[Group], step: int) -> list[Group]:
        """Count the games of a batch; returns those that are trained on."""
        if not is_tree(self.cfg):
            return groups
        self.games += sum(len(group.trajectories) for group in groups)
        self.turns += played_turns(groups)
        return pruned(self.cfg, groups, step)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """What was played, and how much of what is trained on is shared; none without trees.

        Args:
            groups: That the step trains on.
        """
        if not is_tree(self.cfg):
            return {}
        games = [game for group in groups for game in group.trajectories]
        turns = sum(game.num_turns for game in games)
        return {
            "state_turns/played": float(self.turns),
            "state_turns/total": float(turns),
            "train/branch_share": sum(game.num_shared > 0 for game in games) / max(len(games), 1),
            "train/shared_turn_share": sum(game.num_shared for game in games) / max(turns, 1),
        }


def played_turns(groups: Sequence[Group]) -> int:
    """Turns in which an environment was asked; one that several games share counts once."""
    games = (game for group in groups for game in group.trajectories)
    return sum(game.num_turns - game.num_shared for game in games)


def _played(cfg: RunConfig, games: Sequence[Trajectory], rounds: Sequence[int]) -> list[Played]:
    """What a rule is told of finished games."""
    first = cfg.algorithm.tree.arpo.first_tokens
    out: list[Played] = []
    for game, number in zip(games, rounds, strict=True):
        branch = game.branch_of
        out.append(
            Played(
                game=game.game,
                tree=game.tree,
                shared=game.num_shared,
                surprisal=tuple(mean_surprisal(turn.logprobs) for turn in game.turns),
                onset=tuple(mean_surprisal(turn.logprobs, first) for turn in game.turns),
                left=ALONE if branch is None else branch[0],
                round=number,
                open=game.stop not in FAILED_STOPS,
            )
        )
    return out


def _draws(cfg: RunConfig, task: Task, step: int) -> Draw:
    return partial(named_uniform, "tree", cfg.seed, task.id, step)


@lru_cache(maxsize=1)
def _vocabulary(source: str) -> int:
    """Tokens of a model's vocabulary."""
    return len(load_tokenizer(source))
