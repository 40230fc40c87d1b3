"""The warm-up of the errands' agent: words, exact targets, losses, games, the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from delta_belief_rl.envs.errands.players import Mediocre, Walk
from delta_belief_rl.envs.errands.tasks import make_tasks, split_of
from delta_belief_rl.envs.errands.world import house_from_json
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.warmup import errands
from delta_belief_rl.trainer.warmup.errand_games import (
    TASK_SEED,
    ErrandTeacher,
    TeacherGame,
    errand_tokenizer,
    teacher_games,
)
from delta_belief_rl.trainer.warmup.errands import (
    ErrandWarmup,
    batch_losses,
    play_errands,
    train_on,
)
from delta_belief_rl.trainer.warmup.main import main, parse_arguments, settings_from
from delta_belief_rl.trainer.warmup.model import ModelSizes, build_model
from delta_belief_rl.trainer.warmup.train import WarmupLog, WarmupSettings
from delta_belief_rl.types import UserError, Verdict

TINY = ModelSizes(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return errand_tokenizer()


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    return ChatFormat.from_tokenizer(tokenizer, {})


@pytest.fixture(scope="module")
def games(chat: ChatFormat) -> list[TeacherGame]:
    return teacher_games(chat, 12, 16, ErrandTeacher(), 0)


def test_every_word_of_an_errand_is_one_token(
    tokenizer: PreTrainedTokenizerBase, chat: ChatFormat
) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = {tokenizer.get_vocab()[f"##{letter}"] for letter in letters}
    for split in ("train", "val", "test"):
        for task in make_tasks(split, 24, 5, True):
            ids = chat.open_ids(task.messages)
            assert not pieces & set(ids)
            assert tokenizer.unk_token_id not in ids
            assert not pieces & set(chat.encode(task.secret))


def test_the_warm_up_plays_training_errands_and_none_of_a_run(games: list[TeacherGame]) -> None:
    own = make_tasks("train", 12, TASK_SEED, False)
    run = make_tasks("train", 256, 0, False)
    assert not {task.scenario for task in own} & {task.scenario for task in run}
    for task in own:
        house, _ = house_from_json(task.scenario or "")
        text = json.loads(task.scenario or "")["errand"]
        assert split_of(house, text) == "train"


def test_the_targets_of_every_token_are_the_teachers_shares(
    chat: ChatFormat, games: list[TeacherGame]
) -> None:
    (game,) = teacher_games(chat, 1, 16, ErrandTeacher(), 0)
    for place in np.unique(game.position):
        here = game.position == place
        assert game.share[here].sum() == pytest.approx(1.0)
        assert game.token_ids[place] in game.token[here]
        assert not game.replies[place]
    # The first token of the first command: the chances of its verb among all commands.
    task = make_tasks("train", 1, TASK_SEED, False)[0]
    house, goals = house_from_json(task.scenario or "")
    player = Mediocre(np.random.default_rng([0, 0]), wander=ErrandTeacher().wander)
    wanted: dict[int, float] = {}
    for command, chance in player.chances(Walk(house, goals, 16)).items():
        first = chat.assistant_ids(str(command))[0]
        wanted[first] = wanted.get(first, 0.0) + chance
    here = game.position == game.position.min()
    found = dict(zip(game.token[here].tolist(), game.share[here].tolist(), strict=True))
    assert found == pytest.approx(wanted)


def test_games_are_a_function_of_the_seed(chat: ChatFormat, games: list[TeacherGame]) -> None:
    again = teacher_games(chat, 12, 16, ErrandTeacher(), 0)
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(games, again, strict=True))
    other = teacher_games(chat, 12, 16, ErrandTeacher(wander=1.0), 0)
    assert not any(game.won for game in other)
    assert all(game.won for game in teacher_games(chat, 12, 16, ErrandTeacher(0.0, 0.0), 0))


def test_the_losses_do_not_depend_on_padding(
    tokenizer: PreTrainedTokenizerBase, games: list[TeacherGame]
) -> None:
    model = build_model(TINY, tokenizer, 0)
    with torch.no_grad():
        policy, replies = batch_losses(model, games, CPU)
        alone = [batch_losses(model, [game], CPU) for game in games]
    places = [len(np.unique(game.position)) for game in games]
    told = [int(game.replies.sum()) for game in games]
    assert float(policy) == pytest.approx(
        np.average([float(a) for a, _ in alone], weights=places), abs=1e-5
    )
    assert float(replies) == pytest.approx(
        np.average([float(b) for _, b in alone], weights=told), abs=1e-5
    )


def test_a_few_steps_bring_the_model_nearer_to_the_teacher_and_are_reproducible(
    tokenizer: PreTrainedTokenizerBase, games: list[TeacherGame]
) -> None:
    common = replace(
        WarmupSettings(), minutes=None, steps=30, batch_games=4, max_turns=16, sizes=TINY,
        lr_warmup_steps=2, device="cpu",
    )  # fmt: skip
    settings = ErrandWarmup(common, games=12)
    states = []
    for _ in range(2):
        model = build_model(TINY, tokenizer, 0)
        with torch.no_grad():
            before = float(batch_losses(model, games, CPU)[0])
        logs: list[WarmupLog] = []
        train_on(model, games, settings, logs.append)
        with torch.no_grad():
            after = float(batch_losses(model, games, CPU)[0])
        assert after < 0.8 * before
        assert logs[-1].step == 30
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_model_plays_whole_games_through_the_environment(
    tokenizer: PreTrainedTokenizerBase, chat: ChatFormat
) -> None:
    model = build_model(TINY, tokenizer, 0)
    tasks = make_tasks("val", 5, 0, False)
    played = play_errands(model, chat, tasks, 3, seed=1)
    assert [len(game.verdicts) for game in played] == [3] * 5
    assert all(game.done and not game.won for game in played)
    assert {verdict for game in played for verdict in game.verdicts} >= {Verdict.INVALID}
    again = play_errands(model, chat, tasks, 3, seed=1)
    assert [game.verdicts for game in again] == [game.verdicts for game in played]


def test_the_command_writes_an_agent_and_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "agent"
    words = (
        f"--env errands --out {out} --steps 2 --teacher-games 4 --batch-games 2 --hidden 16 "
        "--layers 1 --mlp 32 --max-turns 3 --eval-games 4 --device cpu"
    )
    assert main(words.split()) == 0
    measured = json.loads(capsys.readouterr().out)
    record = json.loads((out / "warmup.json").read_text())
    assert record["env"] == "errands"
    assert record["measured"] == measured
    assert measured["games"] == 4
    assert record["log"][-1]["step"] == 2
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 16
    assert AutoTokenizer.from_pretrained(out).eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--env errands --world other", "--world is an option of --env twenty_questions"),
        ("--env errands --lora-rank 4", "--lora-rank is an option"),
        ("--wander 0.5", "--wander is an option of --env errands"),
        ("--env errands --wander 1.5", "--wander is 1.5"),
        ("--env errands --teacher-games 3", "3 teacher games"),
        ("--env errands --eval-games 0", "at least one turn"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--out", str(tmp_path)]) == 2
    assert part in capsys.readouterr().err


def test_each_environment_has_sizes_of_its_own() -> None:
    own = settings_from(parse_arguments(["--out", "x", "--env", "errands"]))
    assert (own.sizes.hidden, own.batch_games, own.max_turns) == (64, 8, 20)
    world = settings_from(parse_arguments(["--out", "x"]))
    assert (world.sizes.hidden, world.batch_games, world.max_turns) == (128, 256, 20)
    assert settings_from(parse_arguments(["--out", "x", "--hidden", "32"])).sizes.hidden == 32


def test_a_cut_game_keeps_what_is_known_of_its_first_tokens(
    tokenizer: PreTrainedTokenizerBase, games: list[TeacherGame]
) -> None:
    game = max(games, key=lambda game: len(game.token_ids))
    length = len(game.token_ids)
    assert game.cut(length) is game
    part = game.cut(length // 2)
    assert np.array_equal(part.token_ids, game.token_ids[: length // 2])
    assert len(part.replies) == length // 2
    kept = game.position < length // 2
    assert 0 < kept.sum() < len(kept)
    assert np.array_equal(part.token, game.token[kept])
    assert np.array_equal(part.share, game.share[kept])
    # A causal model's losses over the first tokens are what the whole game has there.
    model = build_model(TINY, tokenizer, 0)
    with torch.no_grad():
        alone = batch_losses(model, [part], CPU)
        beside = batch_losses(model, [replace(game, position=part.position, token=part.token,
                                              share=part.share)], CPU)  # fmt: skip
    assert float(alone[0]) == pytest.approx(float(beside[0]), abs=1e-5)


def test_the_first_games_are_short_and_half_of_the_training_has_whole_ones(
    tokenizer: PreTrainedTokenizerBase,
    games: list[TeacherGame],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = max(len(game.token_ids) for game in games)
    seen: list[int] = []

    def record(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        batch = cast(list[TeacherGame], given[1])
        seen.append(max(len(game.token_ids) for game in batch))
        return batch_losses(cast(PreTrainedModel, given[0]), batch, CPU)

    monkeypatch.setattr(errands, "batch_losses", record)
    common = replace(
        WarmupSettings(), minutes=None, steps=8, batch_games=12, max_turns=16, sizes=TINY,
        device="cpu",
    )  # fmt: skip
    settings = ErrandWarmup(common, games=12, first_length=0.2)
    train_on(build_model(TINY, tokenizer, 0), games, settings, lambda line: None)
    assert seen == [math.ceil(longest * part) for part in (0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1)]


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_a_first_length_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="first_length"):
        ErrandWarmup(WarmupSettings(), first_length=share)


def test_more_turns_in_a_step_than_there_are_games_are_refused() -> None:
    with pytest.raises(UserError, match="--teacher-games"):
        ErrandWarmup(WarmupSettings(), games=8)
