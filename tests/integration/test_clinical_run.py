"""Clinical cases train and validate through the same loop as everything else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.envs.clinical.game import ClinicalCase
from delta_belief_rl.envs.clinical.report import by_stratum
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.types import StopReason, Verdict
from tests.runs import play, words

STEPS = 2


def command(out: Path, model: Path, *more: str) -> list[str]:
    """A run of two steps, each with two games of four cases."""
    return [
        *words(out, Path("null")),
        "env=clinical",
        "judge=rules",
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=3000",
        "data.max_response_length=12",
        "multi_turn.env_kwargs.tasks={train: 8, val: 3}",
        "multi_turn.train.n=2",
        f"trainer.total_training_steps={STEPS}",
        "trainer.final_test=false",
        *more,
    ]


def test_the_configured_environment_keeps_the_contract(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli(["check-env", "env=clinical", "judge=rules", "--tasks", "12"]) == 0
    said = capsys.readouterr().out
    assert "keeps the contract" in said
    assert "of 288 tasks" in said
    assert said.count("of 72 tasks") == 2


@pytest.mark.slow
def test_clinical_cases_train_and_validate_through_the_loop(
    tmp_path: Path, any_text_model: Path
) -> None:
    out = tmp_path / "run"
    status, _ = play(command(out, any_text_model))
    assert status == 0
    records = read_records(out / "metrics.jsonl")
    trained = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, STEPS]
    assert all(record["judge/error_rate"] == 0.0 for record in trained)
    assert all(record["actor/grad_norm"] > 0 for record in trained)
    games = read_trajectories(out / "rollout" / f"{STEPS}.jsonl").trajectories
    assert len(games) == 8
    assert {game.task.source for game in games} <= {"clinical_low", "clinical_high"}
    assert {game.stop for game in games} <= {
        StopReason.WIN, StopReason.ENDED, StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL
    }  # fmt: skip
    assert all(game.count(Verdict.ERROR) == 0 for game in games)
    for game in games:
        fresh = ClinicalCase(game.task, max_turns=3)
        for turn in game.turns:
            # What is stored is what a replay of the case finds.
            assert turn.uncertainty is not None
            assert turn.truth_logp is not None
            assert math.isclose(turn.uncertainty[0], fresh.uncertainty()[0], abs_tol=1e-12)
            outcome = fresh.apply(fresh.parse(turn.action), None)
            assert (outcome.verdict, outcome.reply) == (turn.verdict, turn.reply)
            assert math.isclose(turn.truth_logp[1], fresh.uncertainty()[1], abs_tol=1e-12)
    assert by_stratum(games)["all"].games == len(games)
    validated = read_trajectories(out / "validation" / f"{STEPS}.jsonl").trajectories
    assert len(validated) == 3 * 2


@pytest.mark.slow
def test_A13_questions_are_paid_in_a_run(tmp_path: Path, any_text_model: Path) -> None:
    out = tmp_path / "run"
    more = ["algorithm=clinical", "algorithm.clinical.cost=0.25"]
    status, _ = play(command(out, any_text_model, *more))
    assert status == 0
    records = read_records(out / "metrics.jsonl")
    assert all("critic/channel_sum/question" in record for record in records if record["step"] > 0)
    names = {name for record in records for name in record}
    assert any(name.startswith("val-aux/clinical_low/score/mean@") for name in names)


def test_A13_an_environment_without_a_posterior_is_refused(
    tmp_path: Path, any_text_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["env=errands", "algorithm.clinical.enabled=true"]
    status, _ = play([*command(tmp_path / "run", any_text_model), *more])
    assert status == 2
    assert "needs the hook uncertainty" in capsys.readouterr().err


@pytest.fixture(scope="module")
def any_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of a few thousand weights that can write any text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from delta_belief_rl.text.word_tokenizer import CHAT_TEMPLATE

    folder = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
