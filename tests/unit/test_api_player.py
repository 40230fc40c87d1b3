"""A model behind an API plays: its conversation, its texts, its failures, and whole evaluations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout_fakes import CharChat, ScriptedEnv, ScriptedJudge, make_task

import train
from delta_belief_rl.cluster import app
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import problems
from delta_belief_rl.engines.api_client import ApiClient, ApiSettings, Endpoint
from delta_belief_rl.engines.base import GenRequest, SamplingParams
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.api_player import ApiPlayer, NoEngine
from delta_belief_rl.rollout.driver import RolloutDriver
from delta_belief_rl.rollout.game import GameSettings
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.types import StopReason, Trajectory
from tests.api_server import KEY, FakeApi, Fault, guessing, serving
from tests.runs import play, words, write_world

CHAT = CharChat()
PLAYER = "stand-in/player"
SAID = ["  Is it “BIG”?\n\n", "Hm... <|im_end|> is it red?", "win"]


def next_said(body: dict[str, Any]) -> str:
    return SAID[sum(message["role"] == "assistant" for message in body["messages"])]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with serving(FakeApi(answer=next_said)) as service:
        monkeypatch.setenv("OPENAI_BASE_URL", service.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield service


def encode(text: str) -> tuple[int, ...]:
    return (*CHAT.encode(text), CHAT.eot_id)


def games(
    api: FakeApi, count: int, settings: GameSettings | None = None, **more: Any
) -> tuple[Sequence[Trajectory], dict[str, float]]:
    """Games of one task, all at once, and what the player counted."""

    async def main() -> tuple[Sequence[Trajectory], dict[str, float]]:
        quick = {"concurrency": 4, "backoff": 0.001, "max_backoff": 0.01, "max_attempts": 20}
        settled = ApiSettings(PLAYER, deadline=60.0, **quick | more)
        client = ApiClient(Endpoint(api.url, KEY), settled)
        player = ApiPlayer(client, encode)
        driver = RolloutDriver(
            NoEngine(),
            ScriptedJudge(),
            CHAT,
            ScriptedEnv,
            settings or GameSettings(max_turns=4, max_turn_tokens=30, max_episode_tokens=500),
            max_games=count,
            run_seed=7,
            make_chooser=player.chooser,
        )
        sampling = SamplingParams(temperature=0.7, top_p=0.9)
        try:
            (group,) = await driver.collect([make_task()], count, 0, sampling, phase="val")
            return group.trajectories, player.metrics()
        finally:
            await player.close()

    return asyncio.run(main())


def test_the_conversation_goes_out_as_messages_and_each_text_is_played_as_it_came(
    api: FakeApi,
) -> None:
    api.cost = 0.002
    (game,), counted = games(api, 1)
    assert game.stop is StopReason.WIN
    assert [turn.action for turn in game.turns] == SAID
    last = api.requests[-1]
    opening = [message.as_dict() for message in game.task.messages]
    heard = [turn.reply for turn in game.turns]
    assert last["messages"] == [
        *opening,
        {"role": "assistant", "content": SAID[0]},
        {"role": "user", "content": heard[0]},
        {"role": "assistant", "content": SAID[1]},
        {"role": "user", "content": heard[1]},
    ]
    assert (last["temperature"], last["top_p"], last["max_tokens"]) == (0.7, 0.9, 30)
    assert len({body["seed"] for body in api.requests}) == 3
    assert (counted["val-aux/player/calls"], counted["val-aux/player/tokens"]) == (3, 300)
    assert counted["val-aux/player/cost"] == pytest.approx(0.006)


def test_tokens_are_kept_for_the_record_and_no_log_prob_is_made_up(api: FakeApi) -> None:
    (game,), _ = games(api, 1)
    stream = list(CHAT.open_ids(game.task.messages))
    for turn in game.turns:
        assert turn.start == len(stream)
        stream += encode(turn.action)
        assert turn.end == len(stream)
        stream += CHAT.reply_ids(turn.reply)
        assert turn.logprobs == ()
    assert list(game.token_ids) == stream


def test_an_answer_that_was_cut_off_is_a_truncated_turn(api: FakeApi) -> None:
    api.faults = [Fault("cut"), Fault("thought_only")]
    (game,), _ = games(api, 1)
    first, second, *_ = game.turns
    assert (first.truncated, first.n_tokens) == (True, len(SAID[0]))
    assert (second.truncated, second.action, second.n_tokens) == (True, "", 1)
    assert game.stop is StopReason.WIN


@pytest.mark.fault
def test_games_are_the_same_through_a_service_that_misbehaves(api: FakeApi) -> None:
    api.chaos, api.seed = 0.3, 2
    played, counted = games(api, 12)
    assert [[turn.action for turn in game.turns] for game in played] == [SAID] * 12
    assert {game.stop for game in played} == {StopReason.WIN}
    assert counted["val-aux/player/api_faults"] == len(api.met) > 5
    kinds = [n for name, n in counted.items() if name.startswith("val-aux/player/api_faults/")]
    assert sum(kinds) == len(api.met)
    assert counted["val-aux/player/errors"] == 0


@pytest.mark.fault
def test_a_call_without_an_answer_ends_its_game_and_no_other(api: FakeApi) -> None:
    api.faults = [Fault("filtered")]
    played, counted = games(api, 12)
    stops = sorted(game.stop.value for game in played)
    assert stops == sorted(["engine_failed", *["win"] * 11])
    (failed,) = [game for game in played if game.stop is StopReason.ENGINE_FAILED]
    assert failed.turns == ()
    assert counted["val-aux/player/errors"] == 1
    assert counted["val-aux/player/api_faults/filtered"] == 1


@pytest.mark.fault
@pytest.mark.parametrize("failed", [2, 3])
def test_an_evaluation_ends_when_too_many_games_have_no_outcome_however_few_the_calls(
    failed: int, api: FakeApi
) -> None:
    # Of 60 calls the first two or three fail, and with each of them a game.
    api.faults = [Fault("no_money")] * failed
    if failed == 3:
        with pytest.raises(EngineFailure, match=r"^3 of 20 games ended because .*: HTTP 402: I"):
            games(api, 20)
    else:
        played, _ = games(api, 20)
        assert sum(game.stop is StopReason.ENGINE_FAILED for game in played) == 2
    api.faults = [Fault("no_money")] * 19
    played, _ = games(api, 19)
    assert {game.stop for game in played} == {StopReason.ENGINE_FAILED}


@pytest.mark.fault
def test_the_share_of_failed_games_is_taken_over_all_that_have_begun(api: FakeApi) -> None:
    api.chaos, api.kinds = 1.0, ("no_money",)
    with pytest.raises(EngineFailure, match=r"^4 of 30 games ended because .*more than .* 10%"):
        games(api, 30)


def test_where_an_engine_would_be_nothing_answers() -> None:
    request = GenRequest("val/1", (1,), 0, SamplingParams())
    with pytest.raises(EngineFailure, match="the policy is an API's"):
        asyncio.run(NoEngine().generate(request))


# --- an evaluation --------------------------------------------------------------------------------


def evaluation(folder: Path, *more: str) -> list[str]:
    return words(
        folder / "run",
        write_world(folder / "tiny.yaml"),
        f"actor_rollout_ref.model.api_model_name={PLAYER}",
        "trainer.val_only=true",
        "multi_turn.logprob_reward.enabled=false",
        "multi_turn.max_turns={train: 5, val: 5}",
        *more,
    )


def test_an_api_model_is_evaluated_like_any_policy(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = evaluation(tmp_path)
    things = load_world(str(tmp_path / "tiny.yaml")).splits["val"]
    api.answer = guessing(things)
    status, trace = play(command)
    assert status == 0
    assert {name.partition(".")[0] for name in trace.names} & {
        "EngineWorker",
        "ActorWorker",
    } == set()
    out = tmp_path / "run"
    (record,) = read_records(out / "metrics.jsonl")
    # Three things are guessed one after the other, and one of them is the secret.
    assert record["val-core/strict_success_rate"] == 1.0
    assert record["val-aux/player/calls"] > 0
    assert record["val-aux/player/errors"] == 0
    played = read_trajectories(out / "validation" / "0.jsonl").trajectories
    assert {game.turns[0].action for game in played} == {"Is it ALIVE?"}
    assert {len(game.turns) for game in played} == {2, 3, 4}
    assert (out / "report.html").exists()
    assert KEY not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ("trainer.val_only=false", "can only be evaluated: set trainer.val_only=true"),
        ("multi_turn.logprob_reward.enabled=true", "which an API does not give"),
        ("multi_turn.logprob_sampling.enabled=true", "scores no candidates"),
        ("actor_rollout_ref.model.path=''", "model.tokenizer_path is not set"),
        ("actor_rollout_ref.model.api_extra_body={seed: 1}", "must not hold seed"),
    ],
)
def test_U2_what_an_api_policy_cannot_do_is_refused(more: str, part: str, tmp_path: Path) -> None:
    config, _ = load_config([*evaluation(tmp_path), more])
    assert any(part in sentence for sentence in problems(config))


@pytest.mark.fault
def test_U2_a_key_or_model_that_is_wrong_ends_the_evaluation_at_its_start(
    api: FakeApi,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reached(*_args: Any) -> None:
        raise AssertionError("Ray was about to start")

    monkeypatch.setattr(app, "ray_session", reached)
    monkeypatch.setattr(app, "exit_on_sigterm", lambda: None)
    api.faults = [Fault("no_model"), Fault("thought_only")]
    assert train.main(evaluation(tmp_path)) == 2
    assert train.main(evaluation(tmp_path)) == 2
    monkeypatch.delenv("OPENAI_API_KEY")
    assert train.main(evaluation(tmp_path)) == 2
    first, thinks, second = capsys.readouterr().err.strip().splitlines()
    assert "does not answer for the model stand-in/player (HTTP 404: The model" in first
    assert "actor_rollout_ref.model.api_model_name" in first
    assert "raise the limit data.max_response_length" in thinks
    assert "OPENAI_API_KEY is not set" in second
    assert not (tmp_path / "run" / "plan.txt").exists()
