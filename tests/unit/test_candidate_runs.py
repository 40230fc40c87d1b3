"""Whole runs on workers of this process: questions chosen among candidates, and reasoning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_chat import QWEN3_THINKING, tokenizer

from delta_belief_rl.belief.branched import ScoreRequest, score_batch
from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.cluster import app, pools
from delta_belief_rl.cluster.workers import EngineSettings
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import gather_facts
from delta_belief_rl.config.plan import make_plan
from delta_belief_rl.models.loading import build_causal_lm, load_causal_lm, tiny_qwen3_config
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message, Trajectory, Turn, UserError, Verdict
from tests.runs import (
    assert_same_state,
    games_of,
    metrics_of,
    play,
    state_of,
    words,
    write_world,
)

TRIES = ("multi_turn.logprob_sampling.enabled=true", "actor_rollout_ref.rollout.n=4")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


def games(out: Path, name: str) -> tuple[Trajectory, ...]:
    report = read_trajectories(out / name)
    assert report.damaged == ()
    return report.trajectories


def chosen(turn: Turn) -> float:
    (taken,) = (candidate for candidate in turn.candidates if candidate.chosen)
    assert taken.action == turn.action
    assert taken.delta is not None
    return taken.delta


def deltas(turn: Turn) -> list[float]:
    return [candidate.delta for candidate in turn.candidates if candidate.delta is not None]


# --- candidates -----------------------------------------------------------------------------------


def test_an_evaluation_alone_takes_the_best_candidate_in_every_game(
    tmp_path: Path, world: Path
) -> None:
    out = tmp_path / "best"
    assert play(words(out, world, "trainer.val_only=true", *TRIES))[0] == 0
    found = games(out, "validation/0.jsonl")
    turns = [turn for game in found for turn in game.turns]
    assert turns
    assert all(len(turn.candidates) == 4 for turn in turns)
    assert all(chosen(turn) == max(deltas(turn)) for turn in turns)
    assert any(len(set(deltas(turn))) > 1 for turn in turns)
    plain = tmp_path / "plain"
    assert play(words(plain, world, "trainer.val_only=true"))[0] == 0
    alone = games(plain, "validation/0.jsonl")
    assert all(turn.candidates == () for game in alone for turn in game.turns)
    # The first candidate of a game's first turn is what the policy would have asked.
    assert [game.turns[0].candidates[0].action for game in found] == [
        game.turns[0].action for game in alone
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, world: Path) -> Path:
    """Two steps with candidates, with two engines and a validation at the end."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert play(words(out, world, *TRIES, *SHORT))[0] == 0
    return out


SHORT = (
    "trainer.total_training_steps=2",
    "trainer.final_test=false",
    "multi_turn.logprob_sampling.best_n=1",
    "multi_turn.logprob_sampling.worst_n=2",
)


def test_in_training_the_games_of_a_group_take_the_best_the_worst_and_a_draw(
    trained: Path,
) -> None:
    drawn: list[int] = []
    for step in (1, 2):
        for game in games(trained, f"rollout/{step}.jsonl"):
            for turn in game.turns:
                if game.game == 3:
                    drawn.append([c.chosen for c in turn.candidates].index(True))
                else:
                    pick = max if game.game == 0 else min
                    assert chosen(turn) == pick(deltas(turn))
    assert len(set(drawn)) > 1


def test_B1_the_engines_choice_is_measured_with_the_adapter_and_the_belief_of_the_trainer(
    trained: Path,
) -> None:
    for step in (1, 2):
        for game in games(trained, f"rollout/{step}.jsonl"):
            assert game.beliefs is not None
            for turn, before, after in zip(
                game.turns, game.beliefs[:-1], game.beliefs[1:], strict=True
            ):
                assert turn.adapter_version == step - 1
                assert chosen(turn) == pytest.approx(after - before, abs=1e-4)


def test_validations_of_a_training_run_measure_the_policy_alone(trained: Path) -> None:
    for step in (0, 2):
        turns = [t for game in games(trained, f"validation/{step}.jsonl") for t in game.turns]
        assert turns
        assert all(turn.candidates == () for turn in turns)


def test_R15_a_run_with_candidates_can_be_repeated_bit_for_bit(
    tmp_path: Path, world: Path, trained: Path
) -> None:
    again = tmp_path / "run"
    assert play(words(again, world, *TRIES, *SHORT))[0] == 0
    assert games_of(again) == games_of(trained)
    assert metrics_of(again) == metrics_of(trained)
    assert_same_state(state_of(again), state_of(trained))


def test_the_chosen_change_is_not_paid_where_the_belief_reward_is_off(
    tmp_path: Path, world: Path
) -> None:
    out = tmp_path / "run"
    more = ["multi_turn.logprob_reward.enabled=false", "trainer.total_training_steps=1"]
    assert play(words(out, world, *TRIES, *SHORT, *more))[0] == 0
    found = games(out, "rollout/1.jsonl")
    assert all(len(turn.candidates) == 4 for game in found for turn in game.turns)
    assert all(game.beliefs is None for game in found)
    record = read_records(out / "metrics.jsonl")[-1]
    assert record["critic/channel_sum/belief"] == 0


def test_slots_of_the_engine_are_those_of_all_candidates(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineSettings] = []
    worker: Any = pools.EngineWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    real = worker.__init__

    def init(self: Any, settings: EngineSettings) -> None:
        seen.append(settings)
        real(self, settings)

    monkeypatch.setattr(worker, "__init__", init)
    more = ["trainer.val_only=true", "actor_rollout_ref.rollout.max_num_seqs=10"]
    out = tmp_path / "run"
    assert play(words(out, world, *TRIES, *more))[0] == 0
    # Two games of four candidates at a time, one on each of two replicas.
    assert [settings.max_sequences for settings in seen] == [4, 4]
    assert len(games(out, "validation/0.jsonl")) == 6


def test_an_environment_without_a_way_back_is_refused_before_anything_starts(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forward:
        def __init__(self, task: Any) -> None:
            self.task = task

    monkeypatch.setattr(app, "env_factory", lambda cfg, turns: Forward)
    monkeypatch.setattr(app, "start_pools", lambda *args: pytest.fail("the pools were started"))
    cfg = load_config(words(tmp_path / "run", world, *TRIES))[0]
    plan = make_plan(cfg, gather_facts(cfg, lambda name: {"train": 8, "val": 3, "test": 3}))
    with pytest.raises(UserError, match="Forward has no snapshot and restore"):
        app.run(cfg, plan)


# --- reasoning ------------------------------------------------------------------------------------

QUESTION = "Is it alive?"
SAYS = {
    "thinking": f"<think>\nHm. It is big?\n</think>\n\n<question>{QUESTION}</question>",
    "cot": f"Hm. It is big? <question>{QUESTION}</question>",
    "untagged": f"<think>\n\n</think>\n\n{QUESTION}",
}


@dataclass
class Thinker:
    """A tiny model on disk that always says the same thing, and its chat format."""

    folder: Path
    chat: ChatFormat


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Thinker]:
    """A model for each way to say the question, made once: ``thinking``, ``cot``, ``untagged``."""

    @cache
    def make(name: str) -> Thinker:
        return make_thinker(tmp_path_factory.mktemp("models") / name, name)

    return make


def make_thinker(folder: Path, name: str) -> Thinker:
    """Teach a tiny model one text that it says in every turn of a game of three."""
    words_of = tokenizer(QWEN3_THINKING)
    words_of.save_pretrained(folder)
    chat = ChatFormat.from_tokenizer(words_of, {"enable_thinking": name != "cot"})
    model = build_causal_lm(tiny_qwen3_config(len(words_of)))
    said = chat.assistant_ids(SAYS[name])
    streams: list[tuple[torch.Tensor, torch.Tensor]] = []
    for replies in (("Yes", "Repeated"), ("No", "Repeated"), ("Invalid", "Invalid")):
        ids = [*chat.open_ids((Message("user", "Begin."),)), *said]
        rows = [*range(len(ids) - len(said), len(ids))]
        for reply in replies:
            ids += [*chat.reply_ids(reply), *said]
            rows += range(len(ids) - len(said), len(ids))
        streams.append((torch.tensor(ids), torch.tensor(rows)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(120):
        losses = [
            torch.nn.functional.cross_entropy(model(ids[None]).logits[0, rows - 1], ids[rows])
            for ids, rows in streams
        ]
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        if max(loss.item() for loss in losses) < 2e-3:
            break
    model.save_pretrained(folder)
    return Thinker(folder, chat)


def reasoning(out: Path, world: Path, thinker: Thinker, mode: str, *more: str) -> list[str]:
    return words(
        out,
        world,
        f"actor_rollout_ref.actor.{mode}=true",
        f"actor_rollout_ref.model.path={thinker.folder}",
        "trainer.total_training_steps=1",
        "trainer.final_test=false",
        "data.world_prompt=Begin.",
        "data.max_response_length=80",
        "data.max_prompt_length=600",
        "actor_rollout_ref.rollout.temperature=0.2",
        *more,
    )


@pytest.mark.parametrize("mode", ["thinking", "cot"])
def test_T3_T12_a_policy_that_reasons_is_trained_end_to_end(
    mode: str, tmp_path: Path, world: Path, thinkers: Callable[[str], Thinker]
) -> None:
    thinker = thinkers(mode)
    out = tmp_path / "run"
    assert play(reasoning(out, world, thinker, mode))[0] == 0
    found = games(out, "rollout/1.jsonl")
    fluent = [g for g in found if all(turn.action == SAYS[mode] for turn in g.turns)]
    assert len(fluent) > len(found) / 2
    said = thinker.chat.assistant_ids(SAYS[mode])
    for game in fluent:
        first, *later = game.turns
        # The judge heard the question alone; its answer is that of the table.
        assert first.verdict in (Verdict.YES, Verdict.NO)
        assert first.question == first.asked == QUESTION
        assert first.raw_verdict in ("Yes", "No")
        # Asked again it is found out, which takes a history of questions and not of empty texts.
        assert {turn.verdict for turn in later} <= {Verdict.REPEATED}
        for turn in game.turns:
            # Thoughts stay where they were sampled, and are trained.
            assert game.token_ids[turn.start : turn.end] == said
            assert len(turn.logprobs) == len(said)
        header = thinker.chat.open_ids(game.task.messages)
        assert game.token_ids[: first.start] == header
        shown = thinker.chat.decode_exact(header)
        assert shown.endswith("assistant\n" if mode == "thinking" else "</think>\n\n")
        assert game.beliefs is not None
        assert all(math.isfinite(belief) for belief in game.beliefs)
    record = read_records(out / "metrics.jsonl")[-1]
    assert record["actor/empty_updates"] == 0
    assert record["state_tokens/sampled"] == sum(t.n_tokens for g in found for t in g.turns)


def test_J4_an_answer_without_tags_is_invalid_and_never_judged(
    tmp_path: Path, world: Path, thinkers: Callable[[str], Thinker]
) -> None:
    thinker = thinkers("untagged")
    out = tmp_path / "run"
    assert play(reasoning(out, world, thinker, "thinking"))[0] == 0
    found = games(out, "rollout/1.jsonl")
    turns = [turn for game in found for turn in game.turns if "<question>" not in turn.action]
    assert len(turns) > 0.9 * sum(game.num_turns for game in found)
    assert {(turn.verdict, turn.question, turn.raw_verdict) for turn in turns} == {
        (Verdict.INVALID, "", "")
    }
    assert read_records(out / "metrics.jsonl")[-1]["judge/calls"] == sum(
        turn.raw_verdict != "" for game in found for turn in game.turns
    )


def test_T4_the_belief_of_a_thinking_policy_is_asked_behind_an_empty_thought(
    tmp_path: Path, world: Path, thinkers: Callable[[str], Thinker]
) -> None:
    thinker = thinkers("thinking")
    out = tmp_path / "run"
    assert play(reasoning(out, world, thinker, "thinking"))[0] == 0
    model = load_causal_lm(str(thinker.folder))
    for game in games(out, "rollout/1.jsonl")[:4]:
        guess = Elicitation.build(thinker.chat, game.task.secret)
        empty = thinker.chat.no_thought_ids
        assert thinker.chat.decode_exact(empty) == "<think>\n\n</think>\n\n"
        assert guess.token_ids[: len(empty)] == empty
        (scored,) = score_batch(model, [ScoreRequest.of(game, guess)])
        # A new adapter changes no answer.
        np.testing.assert_allclose(game.beliefs, scored.beliefs, atol=1e-3)
        bare = Elicitation(
            guess.secret,
            guess.token_ids[len(empty) :],
            tuple(offset - len(empty) for offset in guess.scored),
        )
        (other,) = score_batch(model, [ScoreRequest.of(game, bare)])
        assert not np.allclose(other.beliefs, scored.beliefs, atol=1e-2)


def test_candidates_and_thoughts_go_together(
    tmp_path: Path, world: Path, thinkers: Callable[[str], Thinker]
) -> None:
    thinker = thinkers("thinking")
    out = tmp_path / "run"
    command = reasoning(out, world, thinker, "thinking", "trainer.val_only=true", *TRIES)
    assert play(command)[0] == 0
    found = games(out, "validation/0.jsonl")
    assert all(len(turn.candidates) == 4 for game in found for turn in game.turns)
    row = json.loads((out / "validation" / "0.jsonl").read_text().splitlines()[0])
    assert row["turns"][0]["question"] == QUESTION
