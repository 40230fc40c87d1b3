"""The warm-up learns, can be reproduced, and writes a folder that loads back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from delta_belief_rl.envs.worlds.table import World
from delta_belief_rl.envs.worlds.tasks import DEFAULT_PROMPT
from delta_belief_rl.trainer.warmup.data import BatchRecipe, BatchSource
from delta_belief_rl.trainer.warmup.evaluate import PlayedGame, elicited_beliefs, play
from delta_belief_rl.trainer.warmup.games import Language
from delta_belief_rl.trainer.warmup.language import (
    build_language,
    elicitation_tokens,
    world_tokenizer,
)
from delta_belief_rl.trainer.warmup.main import main, parse_arguments, settings_from, warm_up
from delta_belief_rl.trainer.warmup.model import ActionTensors, ModelSizes, batch_loss, build_model
from delta_belief_rl.trainer.warmup.train import (
    WarmupLog,
    WarmupSettings,
    learning_rate,
    train,
)
from delta_belief_rl.types import UserError
from tests.worlds import small_world

CPU = torch.device("cpu")
TINY = ModelSizes(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp=64)
SETTINGS = WarmupSettings(
    device="cpu",
    minutes=None,
    steps=60,
    batch_games=16,
    max_turns=4,
    lr_warmup_steps=10,
    log_seconds=0.0,
    sizes=TINY,
)


def twelve_things() -> World:
    world = small_world()
    return replace(world, things=world.things[:12], values=world.values[:12])


WORLD = twelve_things()
TOKENIZER = world_tokenizer(WORLD, DEFAULT_PROMPT)


def language() -> Language:
    return build_language(WORLD, TOKENIZER, DEFAULT_PROMPT)


def trained(settings: WarmupSettings) -> tuple[torch.nn.Module, list[WarmupLog]]:
    model = build_model(settings.sizes, TOKENIZER, settings.seed)
    lines: list[WarmupLog] = []
    train(model, language(), settings, lines.append)
    return model, lines


def test_the_loss_falls_on_a_small_world() -> None:
    _, lines = trained(SETTINGS)
    assert lines[-1].policy_kl < 0.3 * lines[0].policy_kl
    assert len(lines) == SETTINGS.steps


def test_equal_seeds_give_equal_weights_for_any_number_of_workers() -> None:
    settings = replace(SETTINGS, steps=3)
    runs = [trained(replace(settings, workers=workers))[0] for workers in (0, 0, 1)]
    other, _ = trained(replace(settings, seed=1))
    states = [run.state_dict() for run in runs]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
        assert torch.equal(value, states[2][name])
    assert not torch.equal(other.state_dict()["lm_head.weight"], states[0]["lm_head.weight"])


def test_the_loss_does_not_depend_on_micro_batches() -> None:
    batch = BatchRecipe(language(), 0, 12, 6).make(0, 0.9)
    model = build_model(TINY, TOKENIZER, 0)
    tree = ActionTensors.place(language().actions, CPU)
    whole = batch_loss(model, None, tree, batch, CPU, 0.0).loss.item()
    parts = [batch.select(np.arange(start, start + 4)) for start in (0, 4, 8)]
    losses = [batch_loss(model, None, tree, part, CPU, 0.0).loss.item() for part in parts]
    counts = [len(part.token_turn) for part in parts]
    assert np.average(losses, weights=counts) == pytest.approx(whole, rel=1e-4)


def test_the_policy_loss_is_the_divergence_from_the_exact_targets() -> None:
    batch = BatchRecipe(language(), 0, 3, 6).make(0, 0.9)
    model = build_model(TINY, TOKENIZER, 0)
    tree = ActionTensors.place(language().actions, CPU)
    loss = batch_loss(model, None, tree, batch, CPU, 0.0).loss.item()
    with torch.no_grad():
        logp = model(torch.from_numpy(batch.token_ids)).logits.double().log_softmax(-1)
    policy = batch.action_probabilities(language().actions)
    terms: list[float] = []
    for turn, node, column in zip(
        batch.token_turn, batch.token_node, batch.token_column(), strict=True
    ):
        target = language().actions.targets(policy[turn], int(node))
        row = logp[int(batch.turn_game[turn]), int(column) - 1]
        terms.append(sum(p * (np.log(p) - row[t].item()) for t, p in target.items()))
    assert loss == pytest.approx(float(np.mean(terms)), rel=1e-4)


def test_lock_step_play_samples_what_the_model_says() -> None:
    model, _ = trained(replace(SETTINGS, steps=30))
    games = play(model, language(), range(12), max_turns=3, temperature=0)
    for game in games[:4]:
        ids = torch.tensor([game.tokens])
        best = model(ids).logits[0].argmax(-1)
        for turn in game.turns:
            end = game.tokens.index(language().end, turn.start)
            assert game.tokens[turn.start : end] == best[turn.start - 1 : end - 1].tolist()


def test_elicited_beliefs_match_a_direct_computation() -> None:
    model = build_model(TINY, TOKENIZER, 0)
    games = play(model, language(), [1, 4], max_turns=2)
    elicitations = elicitation_tokens(WORLD, TOKENIZER)
    beliefs = elicited_beliefs(model, language(), games, elicitations)
    before, name = elicitations[games[1].secret]
    prefix = [*games[1].tokens[: games[1].turns[1].start], *before]
    with torch.no_grad():
        logp = model(torch.tensor([[*prefix, *name]])).logits[0].log_softmax(-1)
    expected = sum(logp[len(prefix) - 1 + i, token].item() for i, token in enumerate(name))
    assert beliefs[1][1] == pytest.approx(expected, abs=1e-4)


def test_the_written_folder_loads_back_with_equal_logits(tmp_path: Path) -> None:
    report = warm_up(replace(SETTINGS, steps=3), WORLD, DEFAULT_PROMPT, tmp_path, eval_games=12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    fresh = build_model(TINY, TOKENIZER, 0)
    train(fresh, language(), replace(SETTINGS, steps=3), lambda _: None)
    ids = torch.tensor([language().prompt])
    assert torch.allclose(model(ids).logits, fresh(ids).logits, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("Is it 'dog'?") == TOKENIZER.encode("Is it 'dog'?")
    record = json.loads((tmp_path / "warmup.json").read_text())
    assert record["world_checksum"] == WORLD.checksum
    assert record["measured"]["games"] == report.games == 12
    assert len(list(tmp_path.iterdir())) <= 7


def test_an_existing_model_is_warmed_up_with_an_adapter(tmp_path: Path) -> None:
    warm_up(replace(SETTINGS, steps=1), WORLD, DEFAULT_PROMPT, tmp_path / "a", eval_games=2)
    settings = replace(SETTINGS, steps=2, lora_rank=2)
    path = str(tmp_path / "a")
    warm_up(settings, WORLD, DEFAULT_PROMPT, tmp_path / "b", path, eval_games=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert not any("lora" in name for name in model.state_dict())


def test_the_learning_rate_rises_holds_and_falls() -> None:
    settings = replace(SETTINGS, lr=1.0, lr_warmup_steps=10, final_lr=0.02)
    rates = [learning_rate(settings, step, share) for step, share in ((0, 0), (50, 0.4), (90, 1))]
    assert rates == pytest.approx([0.1, 1.0, 0.02])


def test_minutes_and_steps_together_are_refused() -> None:
    with pytest.raises(UserError, match="minutes or steps"):
        trained(replace(SETTINGS, minutes=1.0))


def test_the_command_line_sets_minutes_unless_steps_are_given() -> None:
    assert settings_from(parse_arguments(["--out", "x"])).minutes == 5.0
    assert settings_from(parse_arguments(["--out", "x", "--steps", "9"])).minutes is None


def test_an_unknown_world_ends_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", "x", "--world", "nowhere", "--steps", "1"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_batches_arrive_in_order_from_workers() -> None:
    recipe = BatchRecipe(language(), 0, 4, 3)
    with BatchSource(recipe, workers=1) as source:
        batches = [source.take((0.5, 0.5)) for _ in range(3)]
    for step, batch in enumerate(batches):
        assert np.array_equal(batch.token_ids, recipe.make(step, 0.5).token_ids)


def test_replies_in_play_follow_the_table() -> None:
    said = language()
    actions = said.actions
    ask = int(np.flatnonzero(actions.property_of == 0)[0])
    right, wrong = (int(np.flatnonzero(actions.thing_of == thing)[0]) for thing in (3, 4))
    game = PlayedGame(3, list(said.prompt), np.ones(12, dtype=np.bool_))
    truth = said.yes if WORLD.values[3, 0] else said.no
    for action, reply in ((ask, truth), (ask, said.repeated), (wrong, said.no), (right, ())):
        game.forced.clear()
        reading = (int(actions.property_of[action]), int(actions.thing_of[action]))
        game.take_turn(reading, said, 20)
        assert tuple(game.forced) == reply
    assert game.won
    assert game.done
    assert [turn.repeated for turn in game.turns] == [False, True, False, False]
    assert not game.consistent[4]


@pytest.mark.parametrize("env", ["errands", "agreement"])
def test_a_device_that_is_not_there_is_refused_in_one_sentence(
    env: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--env", env, "--out", str(tmp_path / "agent"), "--device", "nonsense"]
    assert main(command) == 2
    assert "--device nonsense is no device" in capsys.readouterr().err
    assert not (tmp_path / "agent").exists()
