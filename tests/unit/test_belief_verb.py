"""Beliefs on given conversations: the measures, their calibration, and the verb."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.belief.naive import naive_scores
from delta_belief_rl.belief.stated import ANSWER_REQUEST, CONFIDENCE_REQUEST, NoProbability
from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.eval import beliefs
from delta_belief_rl.eval.belief_plots import belief_curves
from delta_belief_rl.eval.beliefs import (
    BeliefOptions,
    BeliefRow,
    Measured,
    greedy_texts,
    measure,
    prompt_ids,
    render,
    turns_asked,
)
from delta_belief_rl.eval.calibration import auc, brier, calibrate, summarise_beliefs
from delta_belief_rl.eval.conversations import Conversation, read_conversations
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message, UserError

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "delta_belief_rl" / "assets" / "agent"
GAMES = ROOT / "validation" / "quickstart" / "delta_belief" / "seed1-val.jsonl.gz"
OPENING = (Message("user", "Find the secret thing."),)
TALK = (("Is it alive?", "Yes"), ("Is it wild?", "No"), ("Is it 'dog'?", "Finished"))


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.from_tokenizer(load_tokenizer(AGENT))


@pytest.fixture(scope="module")
def model() -> Any:
    return load_causal_lm(AGENT)


def talk(turns: int = 3, secret: str = "dog", won: bool | None = True) -> Conversation:
    return Conversation("a.jsonl", 1, secret, OPENING, TALK[:turns], won)


# --- measures -------------------------------------------------------------------------------------


def test_a_rendered_conversation_is_the_stream_that_a_game_builds(chat: ChatFormat) -> None:
    stream = render(chat, talk())
    ids = list(chat.open_ids(OPENING))
    for point, before, (said, reply) in zip(stream.points, stream.before_reply, TALK, strict=False):
        assert point == len(ids)
        ids += chat.assistant_ids(said)
        assert before == len(ids)
        ids += chat.reply_ids(reply)
    assert stream.token_ids == tuple(ids)
    assert stream.points[-1] == len(ids)
    assert chat.difference == "", "so the stream is also the full render"


def test_B5_log_probs_are_those_of_reading_the_conversation_again_for_every_turn(
    chat: ChatFormat, model: Any
) -> None:
    talks = [talk(), talk(0, "cat"), talk(1, "oak")]
    rows = list(measure(model, chat, talks, BeliefOptions()))
    for row, one in zip(rows, talks, strict=True):
        stream, guess = render(chat, one), Elicitation.build(chat, one.secret)
        request = ScoreRequest(stream.token_ids, np.zeros(0, np.int64), guess, stream.points)
        (want,) = naive_scores(model, [request])
        np.testing.assert_allclose(row.log_probs, want.beliefs, atol=1e-4)
        assert len(row.log_probs) == one.num_turns + 1
        np.testing.assert_allclose(row.diffs(), np.diff(want.beliefs), atol=2e-4)
    assert rows[0].log_probs[2] > rows[0].log_probs[0] + 1, "two answers point to a dog"


def test_the_mean_over_tokens_is_an_option(chat: ChatFormat, model: Any) -> None:
    long = replace(talk(1), secret="polar bear")
    (summed,) = measure(model, chat, [long], BeliefOptions())
    (mean,) = measure(model, chat, [long], BeliefOptions(agg="mean"))
    tokens = len(Elicitation.build(chat, "polar bear").scored)
    assert tokens > 1
    np.testing.assert_allclose(np.array(mean.log_probs) * tokens, summed.log_probs, atol=1e-6)


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_request_follows_the_last_message_and_sees_nothing_after_it(
    turn: int, chat: ChatFormat
) -> None:
    asked = prompt_ids(chat, talk(), render(chat, talk()), turn, "How sure about '{secret}'?")
    messages = list(talk(turn).messages())
    last = messages.pop()
    request = Message("user", f"{last.content}\n\nHow sure about 'dog'?")
    full = ChatFormat.open_ids(chat, [*messages, request])
    assert asked == full


def test_statements_are_asked_now_and_then_and_at_the_end() -> None:
    assert turns_asked(0, 3) == (0,)
    assert turns_asked(7, 3) == (0, 3, 6, 7)
    assert turns_asked(6, 3) == (0, 3, 6)


def stated(
    monkeypatch: pytest.MonkeyPatch, model: Any, chat: ChatFormat, words: Sequence[str]
) -> tuple[BeliefRow, list[list[str]]]:
    """A row in which the model says ``words`` at every request, and what it was asked."""
    asked: list[list[str]] = []

    def say(_model: Any, _chat: Any, prompts: Sequence[Any], *_more: Any) -> list[str]:
        asked.append([chat.decode_exact(ids) for ids in prompts])
        return list(words)

    monkeypatch.setattr(beliefs, "greedy_texts", say)
    options = BeliefOptions(methods=("confidence", "accuracy"), every=2)
    (row,) = measure(model, chat, [talk()], options)
    return row, asked


def test_statements_become_probabilities_answers_and_typed_gaps(
    monkeypatch: pytest.MonkeyPatch, model: Any, chat: ChatFormat
) -> None:
    row, asked = stated(monkeypatch, model, chat, ["0.25", "no idea", "a dog"])
    assert row.asked == (0, 2, 3)
    assert row.confidence == (0.25, NoProbability.NO_NUMBER, NoProbability.NO_NUMBER)
    assert row.right == (False, False, True)
    assert [len(prompts) for prompts in asked] == [3, 3]
    body = row.to_json()
    assert body["confidence"] == [0.25, None, None]
    assert body["confidence_missing"] == [None, "no_number", "no_number"]
    assert body["accuracy"] == [0, 0, 1]
    assert "log_prob_reward" not in body


def test_greedy_texts_come_in_the_order_of_the_prompts_and_do_not_depend_on_it(
    chat: ChatFormat, model: Any
) -> None:
    stored = read_conversations(GAMES, OPENING).conversations[0]
    stream = render(chat, stored)
    prompts = [stream.token_ids[:point] for point in stream.points[::3]]
    together = greedy_texts(model, chat, prompts, 8, sequences=2)
    alone = [greedy_texts(model, chat, [prompt], 8)[0] for prompt in prompts]
    assert together == alone
    assert len(set(together)) > 1
    assert all(text.startswith("Is it") or text.endswith("?") for text in together)


def test_what_the_model_cannot_read_is_counted_and_the_rest_is_measured(
    chat: ChatFormat, model: Any
) -> None:
    state = Measured()
    endless = replace(talk(), exchanges=TALK[:1] * 5000)
    talks = [talk(secret="犬"), talk(), endless]
    rows = list(measure(model, chat, talks, BeliefOptions(), state))
    assert [row.conversation for row in rows] == [talks[1]]
    assert state.skipped == {"not expressible": 1, "too long": 1}
    assert "犬" in state.first_skipped
    assert state.done == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (BeliefOptions(methods=("guess",)), "'guess'"),
        (BeliefOptions(methods=()), "nothing"),
        (BeliefOptions(every=0), "at least 1"),
    ],
)
def test_impossible_options_are_one_sentence(
    options: BeliefOptions, says: str, chat: ChatFormat, model: Any
) -> None:
    with pytest.raises(UserError, match=says):
        list(measure(model, chat, [talk()], options))


def test_requests_ask_for_the_secret_only_where_they_must() -> None:
    assert "{secret}" in CONFIDENCE_REQUEST
    assert "{secret}" not in ANSWER_REQUEST


# --- calibration ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12))
def test_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([float(score) for score, _ in pairs])
    won = np.array([outcome for _, outcome in pairs], dtype=bool)
    wins, losses = scores[won], scores[~won]
    value = auc(scores, won)
    if not len(wins) or not len(losses):
        assert value is None
        return
    order = [(w > l) + 0.5 * (w == l) for w in wins for l in losses]  # noqa: E741
    assert value == pytest.approx(np.mean(order))


def test_brier_of_certainty_and_of_indifference() -> None:
    won = np.array([True, False])
    assert brier(np.array([1.0, 0.0]), won) == 0.0
    assert brier(np.array([0.5, 0.5]), won) == 0.25
    assert brier(np.zeros(0), np.zeros(0, dtype=bool)) is None


def rows() -> list[BeliefRow]:
    """A game won in two turns, one lost in three, one without an outcome."""
    half, tenth = math.log(0.5), math.log(0.1)
    return [
        BeliefRow(talk(2, won=True), log_probs=(tenth, half, -0.0)),
        BeliefRow(talk(3, won=False), log_probs=(half, tenth, half, tenth)),
        BeliefRow(talk(1, won=None), log_probs=(-9.0, -9.0)),
    ]


def test_beliefs_are_split_by_outcome_at_every_place() -> None:
    found = calibrate(rows(), "logprob")
    start, before, end = found["start"], found["before_last"], found["end"]
    assert (start["won"], start["lost"]) == (1, 1)
    assert start["mean_won"] == pytest.approx(math.log(0.1))
    assert start["auc"] == 0.0
    assert start["brier"] == pytest.approx((0.9**2 + 0.5**2) / 2)
    assert before["mean_won"] == before["mean_lost"] == pytest.approx(math.log(0.5))
    assert before["auc"] == 0.5
    assert end["brier"] == pytest.approx((0.0 + 0.1**2) / 2)
    turns = [(place["turn"], place["won"], place["lost"]) for place in found["by_turn"]]
    assert turns == [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 0, 1)]
    assert found["by_turn"][3]["auc"] is None


def test_statements_asked_now_and_then_make_no_curve_of_games_that_just_ended() -> None:
    games = [
        BeliefRow(talk(2, won=True), asked=(0, 2), right=(False, True)),
        BeliefRow(talk(3, won=False), asked=(0, 2, 3), right=(False, False, False)),
        BeliefRow(talk(1, won=True), asked=(0, 1), right=(False, True)),
    ]
    found = calibrate(games, "accuracy")
    assert [place["turn"] for place in found["by_turn"]] == [0, 2, 3]
    assert found["end"]["mean_won"] == 1.0
    assert found["before_last"]["mean_won"] == 0.0


def test_the_summary_shows_gains_by_outcome_and_gaps_by_reason() -> None:
    stated_row = replace(rows()[0], asked=(0, 2), confidence=(0.5, NoProbability.OUT_OF_RANGE))
    found = summarise_beliefs([stated_row, *rows()[1:]], ("logprob", "confidence"))
    assert (found["conversations"], found["won"], found["lost"]) == (3, 1, 1)
    gain = found["logprob"]["gain"]["lost"]
    assert gain["net_gain"] == pytest.approx(math.log(0.1) - math.log(0.5))
    assert gain["positive_sum"] == pytest.approx(math.log(5))
    assert found["logprob"]["gain"]["unknown"]["prior"] == -9.0
    assert found["confidence"]["missing"] == {"empty": 0, "no_number": 0, "out_of_range": 1}
    json.dumps(found, allow_nan=False)


def test_curves_are_files_that_stand_alone(tmp_path: Path) -> None:
    summary = summarise_beliefs(rows(), ("logprob",))
    (path,) = belief_curves(summary, tmp_path / "new")
    text = path.read_text()
    assert path.name == "logprob_by_turn.svg"
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert text.count("<polyline") == 2
    assert "won: 1 games" in text
    assert belief_curves(summarise_beliefs([], ("logprob",)), tmp_path) == []


# --- the verb -------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli(["belief", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_stored_games_of_the_quick_start_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    words = [str(GAMES), "--model", str(AGENT), "--limit", "6", "--every", "5", "--out", str(out)]
    method = ["--method", "logprob,confidence,accuracy", "--plots", str(tmp_path)]
    found = run(capsys, *words, *method)
    assert found["conversations"] == 6
    assert found["confidence"]["asked"] > 12
    assert all(Path(path).exists() for path in found["plots"])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        turns = sum(message["role"] == "assistant" for message in line["messages"])
        assert len(line["log_prob_reward"]) == turns + 1
        assert len(line["diff_logprob"]) == turns
        assert line["game_status"] in (0, 1)
        assert len(line["answers"]) == len(line["asked_after"])
    won = [line for line in lines if line["game_status"]]
    assert found["won"] == len(won) > 0


def test_the_summary_is_a_table_that_a_person_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    words = [str(GAMES), "--model", str(AGENT), "--limit", "3", "--out", str(out)]
    assert cli(["belief", *words]) == 0
    shown, said = capsys.readouterr()
    assert shown.startswith("3 conversations")
    assert "before last" in shown
    assert "stored without an opening" in said


def test_what_cannot_be_measured_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    games = tmp_path / "a.jsonl"
    row = {"ground_truth": "犬", "messages": [{"role": "user", "content": "?"}]}
    games.write_text(json.dumps(row) + "\n")
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine\n")
    common = [str(games), "--model", str(AGENT)]
    for words, says in (
        ([*common, "--out", str(tmp_path / "x.jsonl")], "No conversation could be measured"),
        ([*common, "--out", str(taken)], "exists already"),
        ([*common, "--out", str(tmp_path / "no" / "x.jsonl")], "make it first"),
        ([*common, "--method", "feeling"], "'feeling'"),
        ([*common, "--every", "0"], "at least 1"),
        ([*common, "--device", "tpu"], "'tpu'"),
        ([str(games), "--model", "/nowhere", "--out", str(tmp_path / "y")], "/nowhere"),
        ([str(tmp_path / "none.jsonl"), *common[1:]], "none.jsonl"),
        ([*common, "--adapter", str(tmp_path), "--out", str(tmp_path / "z")], "holds no adapter"),
    ):
        assert cli(["belief", *words]) == 2, words
        said = capsys.readouterr()
        assert said.out == ""
        last = said.err.splitlines()[-1]
        assert says in last, last
    assert taken.read_text() == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "taken.jsonl"]
