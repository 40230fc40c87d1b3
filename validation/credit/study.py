"""The two studies: environment, settings, methods and size, the same for every method.

Everything but the credit is set alike: one optimizer step on what was just played, the mean over
tokens, the clipped ratios of tokens. With one update on fresh games every ratio is 1, so methods
that only change ratios (``gspo``, ``cispo``, ``turn_ratio``) would repeat ``grpo``: they are left
out. What a method learns from (beliefs, a critic, a teacher, a tree of games) is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

SEEDS = (1, 2, 3, 4, 5)
BASELINE = "grpo"

FIRST = (
    *("grpo", "rloo", "reinforce_plus_plus_baseline"),
    *("grpo_turn", "mt_grpo", "delta_belief", "igpo"),
    *("gigpo", "hgpo", "graphgpo", "state_progress"),
    *("hcapo", "relace", "graph_opd", "pearl"),
    *("ppo", "turn_ppo", "mpo"),
    *("tree_grpo", "at2po"),
    *("opsd", "rlsd"),
)
"""Every family has a member here: these are run before any other."""
THEN = (
    *("dr_grpo", "opo", "grpo_passk", "decay", "bilevel_gae", "arpo", "sdpo"),
    *("sdar", "opid", "orsd", "dapo", "starpo_s"),
    *("spa_rl", "istar", "archer"),
)
METHODS = (*FIRST, *THEN)

FAMILIES = {
    "whole games": (
        *("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline"),
        *("dapo", "starpo_s"),
    ),
    "turns by index": ("grpo_turn",),
    "belief in the answer": ("delta_belief", "mt_grpo", "igpo", "decay"),
    "states that recur": ("gigpo", "hgpo", "graphgpo", "state_progress", "pearl"),
    "hindsight": ("hcapo", "relace"),
    "learnt values": (
        *("ppo", "turn_ppo", "bilevel_gae", "mpo"),
        *("spa_rl", "istar", "archer"),
    ),
    "trees of games": ("tree_grpo", "at2po", "arpo"),
    "teacher with a hint": ("opsd", "sdpo", "rlsd", "sdar", "opid", "orsd", "graph_opd"),
}
"""What the page calls a method's source of credit."""

COMMON = (
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "actor_rollout_ref.actor.policy_loss=ppo",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    # What one belief is worth belongs to the environment: groups of methods set it apart.
    "multi_turn.reward.weight_elicit=1.0",
    # What is learnt beside the policy, at the size of these runs; other methods do not read it.
    "critic.optim.lr=0.01",
    "algorithm.istar.lr=0.01",
    "algorithm.archer.lr=0.001",
    "algorithm.spa_rl.warmup_steps=6",
    # Validation samples as training does: a narrower one hides what is learnt at first.
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.val_kwargs.top_p=1.0",
    "actor_rollout_ref.rollout.val_kwargs.top_k=-1",
    # A policy that collapses shall count with what it wins, and not as a run that failed.
    "trainer.abort.nan_gradients=null",
    "trainer.abort.min_entropy=null",
    "trainer.abort.max_repeated_chars=null",
    "trainer.abort.max_invalid_turns=null",
    "trainer.abort.zero_gradients=null",
    # One core for a run (Ray wants one for each of its three processes, which take turns on it),
    # and nothing on the disk that the comparison does not read.
    "actor_rollout_ref.num_threads=1",
    "actor_rollout_ref.rollout.replicas=1",
    "ray_init.num_cpus=3",
    "trainer.check_freq=0",
    "trainer.save_freq=-1",
    "trainer.keep_best=false",
    "trainer.save_rollout=false",
    "trainer.rollout_freq=-1",
    "trainer.logger=[console]",
)
"""Settings of both studies."""


@dataclass(frozen=True, slots=True)
class Study:
    """One environment with the settings of all its runs.

    Attributes:
        name: Of its record.
        title: As the page calls it.
        words: Settings of every run, as for ``train.py``.
        steps: Training steps of a run.
        methods: Those that the environment can serve, the most wanted first.
    """

    name: str
    title: str
    words: tuple[str, ...]
    steps: int
    methods: tuple[str, ...] = METHODS


EVERYDAY = Study(
    "everyday",
    "20 Questions over the embedded world",
    (
        "experiment=starpo_quickstart",
        "data.train_batch_size=6",
        "multi_turn.train.n=8",
        "multi_turn.val.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "trainer.test_freq=11",
        *COMMON,
    ),
    steps=33,
)
ERRANDS = Study(
    "errands",
    "Household errands",
    (
        "experiment=errands_quickstart",
        "data.train_batch_size=6",
        "data.sample_count.val=48",
        "multi_turn.train.n=8",
        "multi_turn.val.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "trainer.test_freq=8",
        *COMMON,
    ),
    steps=24,
)
STUDIES = {study.name: study for study in (EVERYDAY, ERRANDS)}
