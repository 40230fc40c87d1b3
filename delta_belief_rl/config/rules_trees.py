"""Rules on trees of games; see ``rules``. Ranges of single knobs are those of ``algo.samplers``."""

from __future__ import annotations

from collections.abc import Iterator

from delta_belief_rl.config.schema import RunConfig

TREE_ESTIMATORS = ("tree_grpo", "at2po")
"""These compare turns of trees."""


def trees(config: RunConfig) -> Iterator[str]:
    """What cannot work together with ``algorithm.tree``."""
    algorithm = config.algorithm
    tree, size = algorithm.tree, config.multi_turn.train.n
    if config.trainer.val_only:
        return
    if tree.rule == "none":
        if algorithm.adv_estimator in TREE_ESTIMATORS:
            yield (
                f"algorithm.adv_estimator={algorithm.adv_estimator} compares games that share "
                f"turns: set algorithm.tree.rule, or algorithm={algorithm.adv_estimator}."
            )
        return
    if config.multi_turn.logprob_sampling.enabled:
        yield (
            "algorithm.tree and multi_turn.logprob_sampling both choose what is played: set "
            "algorithm.tree.rule=none or multi_turn.logprob_sampling.enabled=false."
        )
    if size < 2:
        yield (
            f"algorithm.tree.rule={tree.rule} needs games to share turns between: set "
            "multi_turn.train.n to at least 2."
        )
    elif tree.rule == "arpo":
        yield from _arpo(config)
    elif tree.rule == "tree_grpo":
        yield from _tree_grpo(config)
    else:
        yield from _at2po(config)


def _arpo(config: RunConfig) -> Iterator[str]:
    knobs, size = config.algorithm.tree.arpo, config.multi_turn.train.n
    if knobs.initial is not None and not 1 <= knobs.initial <= size:
        yield (
            f"algorithm.tree.arpo.initial must lie between 1 and multi_turn.train.n={size}, not "
            f"{knobs.initial}."
        )
    if knobs.first_tokens < 1:
        yield f"algorithm.tree.arpo.first_tokens must be at least 1, not {knobs.first_tokens}."


def _tree_grpo(config: RunConfig) -> Iterator[str]:
    knobs, size = config.algorithm.tree.tree_grpo, config.multi_turn.train.n
    if knobs.trees >= 1 and size % knobs.trees:
        yield (
            f"multi_turn.train.n={size} games cannot be divided among "
            f"algorithm.tree.tree_grpo.trees={knobs.trees} trees: change one of them."
        )
    elif knobs.trees >= 1 and size // knobs.trees < 2:
        yield (
            f"algorithm.tree.tree_grpo.trees={knobs.trees} trees of multi_turn.train.n={size} "
            "games have one game each, so no turn is shared: lower trees or raise the other."
        )
    elif knobs.expand is not None and knobs.trees * (1 + knobs.rounds * knobs.expand) < size:
        yield (
            f"algorithm.tree.tree_grpo makes {knobs.trees} trees of "
            f"{1 + knobs.rounds * knobs.expand} games, fewer than multi_turn.train.n={size}: "
            "raise rounds or expand."
        )
    elif knobs.expand is None and knobs.rounds < 1 and knobs.trees < size:
        yield (
            f"algorithm.tree.tree_grpo makes {knobs.trees} games without a round of growth, fewer "
            f"than multi_turn.train.n={size}: raise rounds or trees."
        )


def _at2po(config: RunConfig) -> Iterator[str]:
    knobs, size = config.algorithm.tree.at2po, config.multi_turn.train.n
    if knobs.beam is not None and knobs.rounds * knobs.beam >= size:
        yield (
            f"algorithm.tree.at2po grows {knobs.rounds * knobs.beam} branches, which leaves no "
            f"game of multi_turn.train.n={size} to begin with: lower rounds or beam."
        )
