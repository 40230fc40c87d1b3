"""The warm-up of the small denoiser: its examples, its masks, its folder, and its options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import problems
from delta_belief_rl.envs.agreement.language import CATEGORIES, Problem, words
from delta_belief_rl.models.denoiser import NEVER, is_denoiser, load_denoiser
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.trainer.warmup.agreement import (
    AgreementWarmup,
    agreement_tokenizer,
    denoiser_config,
    noisy_answer,
    some_known,
)
from delta_belief_rl.trainer.warmup.main import main
from delta_belief_rl.types import UserError

MANY = Problem(2, "plus", 3, "goose", "run")


def test_every_word_is_one_token_and_control_tokens_cannot_be_said() -> None:
    tokenizer = agreement_tokenizer()
    assert len(tokenizer) <= 64
    for word in words():
        ids = tokenizer.encode(word, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids) == word
    config = denoiser_config(tokenizer, AgreementWarmup())
    said = [token for token, kind in enumerate(config.categories) if kind != NEVER]
    assert config.mask_token_id not in said
    assert tokenizer.pad_token_id not in said
    kind = config.categories[tokenizer.encode("geese", add_special_tokens=False)[0]]
    assert config.category_names[kind] == "noun"
    assert config.category_names[config.categories[config.end_token_id]] == "end"
    assert config.category_names == CATEGORIES


def test_examples_have_the_mistakes_that_they_are_told_to_have() -> None:
    rng = np.random.default_rng(0)
    plain = AgreementWarmup(miscount=0.0, slip=0.0)
    assert {noisy_answer(MANY, plain, rng) for _ in range(20)} == {MANY.answer()}
    wrong = AgreementWarmup(miscount=1.0, slip=1.0)
    said = {noisy_answer(MANY, wrong, rng) for _ in range(200)}
    assert said == {MANY.answer(result, slip=True) for result in (1, 4, 6)}


def test_a_result_that_is_drawn_may_be_the_right_one_where_that_is_one() -> None:
    rng = np.random.default_rng(0)
    one = Problem(3, "minus", 2, "cat", "run")
    drawn = AgreementWarmup(miscount=1.0, slip=0.0)
    said = [noisy_answer(one, drawn, rng) for _ in range(400)]
    assert set(said) == {one.answer(), one.answer(result=2)}
    assert 0.4 < said.count(one.answer()) / 400 < 0.6


def test_places_behind_the_end_are_filled_exactly_with_the_end() -> None:
    lengths = np.tile([3, 6, 8], 200)
    known = some_known(lengths, 8, np.random.default_rng(0))
    for length, row in zip(lengths, known, strict=True):
        assert (row[length:] == row[length - 1]).all()
        # Something is left to say.
        assert not row[:length].all()
    shares = known[lengths == 8].mean(axis=0)
    assert 0.3 < shares.min() <= shares.max() < 0.6


def test_the_command_writes_a_denoiser_and_what_is_known_of_it(tmp_path: Path) -> None:
    words_ = ["--env", "agreement", "--out", str(tmp_path), "--device", "cpu", "--steps", "3"]
    sizes = ["--hidden", "16", "--mlp", "16", "--batch-games", "8", "--eval-games", "4"]
    assert main([*words_, *sizes]) == 0
    assert is_denoiser(tmp_path)
    assert load_denoiser(tmp_path).config.hidden_size == 16
    assert load_tokenizer(tmp_path).decode([2], skip_special_tokens=True) == ""
    record = json.loads((tmp_path / "warmup.json").read_text())
    assert record["settings"]["steps"] == 3
    measured = record["measured"]
    shares = [value for name, value in measured.items() if name != "games"]
    assert measured["games"] == 4
    assert sum(shares) == pytest.approx(1.0)
    assert [line["step"] for line in record["log"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("words_", "named"),
    [
        (["--env", "agreement", "--minutes", "1"], "--minutes has no meaning for agreement"),
        (["--env", "agreement", "--max-turns", "2"], "--max-turns has no meaning for agreement"),
        (["--env", "agreement", "--wander", "0.5"], "--wander is an option of --env errands"),
        (["--env", "errands", "--slip", "0.5"], "--slip is an option of --env agreement"),
        (["--env", "agreement", "--slip", "2"], "--slip is 2.0"),
        (["--env", "agreement", "--steps", "0"], "--steps is 0"),
        (["--env", "agreement", "--seed", "-1"], "--seed is -1"),
        (["--env", "agreement", "--hidden", "10"], "--hidden is 10"),
        (["--env", "agreement", "--hidden", "0"], "--hidden is 0"),
        (["--env", "agreement", "--layers", "0"], "--layers is 0"),
        (["--env", "agreement", "--mlp", "-4"], "--mlp is -4"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(
    words_: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words_, "--out", str(tmp_path / "out")]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_knobs_out_of_range_are_refused() -> None:
    for knobs in ({"batch": 5000}, {"lr": 0.0}, {"eval_games": 0}, {"miscount": -0.1}):
        with pytest.raises(UserError):
            AgreementWarmup(**knobs)  # type: ignore[arg-type]


def test_an_evaluation_of_a_denoiser_gets_no_adapter() -> None:
    cfg, _ = load_config(["experiment=agreement_quickstart", "trainer.val_only=true"])
    assert cfg.actor_rollout_ref.model.lora_rank == 0
    assert list(problems(cfg)) == []
