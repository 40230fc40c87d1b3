"""A model's weights become 4 bits wide, and a bad request or a bad result is one sentence."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from delta_belief_rl.config.checkpoints import read_checkpoint
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.quantize import awq
from delta_belief_rl.trainer.quantize.awq import (
    TooFar,
    answer_logprobs,
    compare_folder,
    difference,
    linear_layers,
    quantize,
)
from delta_belief_rl.trainer.quantize.settings import (
    LinearShape,
    QuantizeSettings,
    choose_group_size,
)
from delta_belief_rl.trainer.quantize.texts import ANSWERS, JudgeTexts, judge_texts
from delta_belief_rl.trainer.teach.cases import CaseMaker, hold_out
from delta_belief_rl.trainer.teach.main import judge_tokenizer
from delta_belief_rl.trainer.warmup.model import ModelSizes, build_model
from delta_belief_rl.types import UserError

ROOT = Path(__file__).resolve().parents[2]
WORLD = load_world("everyday")
SMOLLM2 = [
    LinearShape("model.layers.0.self_attn.q_proj", 576, 576),
    LinearShape("model.layers.0.self_attn.k_proj", 576, 192),
    LinearShape("model.layers.0.mlp.down_proj", 1536, 576),
]
QWEN3_14B = [
    LinearShape("model.layers.0.self_attn.q_proj", 5120, 5120),
    LinearShape("model.layers.0.self_attn.k_proj", 5120, 1024),
    LinearShape("model.layers.0.mlp.down_proj", 17408, 5120),
]
needs_library = pytest.mark.skipif(
    find_spec("llmcompressor") is None, reason="llmcompressor is not installed (the extra awq)"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny judge with random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = judge_tokenizer(WORLD, CaseMaker(WORLD, hold_out(WORLD, 0.0, 0)))
    sizes = ModelSizes(
        hidden=64, layers=2, heads=2, kv_heads=2, head_dim=32, mlp=128, max_positions=2048
    )
    build_model(sizes, tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat_of(folder: Path) -> ChatFormat:
    return ChatFormat.from_tokenizer(awq.load_tokenizer(folder), {"enable_thinking": False})


# --- which models


@pytest.mark.parametrize(
    ("layers", "asked", "size"),
    [(SMOLLM2, None, 64), (SMOLLM2, 32, 32), (QWEN3_14B, None, 128), (QWEN3_14B, 64, 64)],
)
def test_the_group_size_divides_every_layer(
    layers: list[LinearShape], asked: int | None, size: int
) -> None:
    assert choose_group_size("it", layers, asked) == size


@pytest.mark.parametrize(
    ("layers", "asked", "parts"),
    [
        (SMOLLM2, 128, ("q_proj", "576 inputs", "use --group-size 64")),
        ([LinearShape("a.up", 144, 64)], None, ("144 inputs", "without quantisation")),
        ([LinearShape("a.up", 128, 40)], None, ("a.up", "40 outputs", "multiples of 32")),
        ([], None, ("no linear layers",)),
    ],
)
def test_Q3_a_shape_that_vllm_cannot_serve_is_refused_before_any_work(
    layers: list[LinearShape], asked: int | None, parts: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        choose_group_size("it", layers, asked)
    assert all(part in str(caught.value) for part in parts)


def test_the_layers_are_read_without_weights_and_the_head_is_none_of_them(model: Path) -> None:
    layers = linear_layers(AutoConfig.from_pretrained(model))
    assert len(layers) == 2 * 7
    assert not any("lm_head" in layer.name for layer in layers)
    down = next(layer for layer in layers if layer.name.endswith("down_proj"))
    assert (down.inputs, down.outputs) == (128, 64)


# --- what is read


def test_prompts_are_a_function_of_the_seed_and_things_are_split(model: Path) -> None:
    chat = chat_of(model)
    texts = judge_texts(WORLD, chat, 24, 12, 3)
    assert texts == judge_texts(WORLD, chat, 24, 12, 3)
    assert texts.samples != judge_texts(WORLD, chat, 24, 12, 4).samples
    assert (len(texts.samples), len(texts.checked)) == (24, 12)
    assert len(set(texts.answers)) == len(ANSWERS)

    def secrets(rows: tuple[tuple[int, ...], ...]) -> set[str]:
        shown = [chat.tokenizer.decode(row) for row in rows]
        return {text.split("Secret word")[1].split("Question 1")[0] for text in shown}

    read, held = secrets(tuple(texts.samples)), secrets(tuple(texts.checked))
    assert len(read) == 24
    assert len(held) == 12
    assert not read & held
    assert texts.samples[0][-1] == chat.eot_id
    assert texts.checked[0][-1] != chat.eot_id


# --- the comparison


def test_a_difference_is_of_absolute_values_and_of_the_likeliest_answer() -> None:
    before = np.array([[-1.0, -2.0], [-3.0, -1.0]])
    after = np.array([[-2.5, -2.0], [-3.0, -0.5]])
    found = difference(before, after)
    assert (found.prompts, found.mean, found.largest, found.same) == (2, 0.5, 1.5, 0.5)
    assert difference(before, before).mean == 0.0


def test_log_probs_are_those_of_the_whole_vocabulary(model: Path) -> None:
    loaded = awq.load_causal_lm(model)
    loaded.set_attn_implementation("sdpa")
    size = loaded.config.vocab_size
    prompts = [(5, 6, 7), (5, 8)]
    every = answer_logprobs(loaded, JudgeTexts([], prompts, tuple(range(size))))
    assert every.shape == (2, size)
    np.testing.assert_allclose(np.exp(every).sum(axis=1), 1.0, rtol=1e-5)
    some = answer_logprobs(loaded, JudgeTexts([], prompts, (3, 1)))
    np.testing.assert_array_equal(some, every[:, [3, 1]])


def test_a_folder_with_other_weights_is_not_called_done(model: Path, tmp_path: Path) -> None:
    texts = judge_texts(WORLD, chat_of(model), 2, 8, 0)
    loaded = awq.load_causal_lm(model)
    loaded.set_attn_implementation("sdpa")
    before = answer_logprobs(loaded, texts)
    settings = QuantizeSettings(str(model), tmp_path / "out", max_difference=0.05)
    assert compare_folder(model, texts, before, settings).mean < 1e-5
    with torch.no_grad():
        for name, weight in loaded.named_parameters():
            if name.endswith("down_proj.weight"):
                weight.copy_(weight.flip(0) * 4)
    broken = tmp_path / "broken"
    loaded.save_pretrained(broken)
    with pytest.raises(TooFar, match="nothing was written"):
        compare_folder(broken, texts, before, settings)
    entries = json.loads((broken / "config.json").read_text())
    weights = {"num_bits": 4, "strategy": "group", "group_size": 64}
    entries["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (broken / "config.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match="weight_packed"):
        compare_folder(broken, texts, before, settings)


# --- the command


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--model", "./nowhere"), "nowhere"),
        (("--group-size", "100"), "groups of 32, 64, 128"),
        (("--group-size", "128"), "64 inputs"),
        (("--samples", "0"), "above 0"),
        (("--world", "narnia"), "narnia"),
        (("--scheme", "W2"), "W2"),
    ],
)
def test_bad_arguments_are_one_sentence(
    model: Path,
    words: tuple[str, ...],
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    assert run(["--model", str(model), "--out", str(out), *words], monkeypatch) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in said if "quantize_awq.py:" in line]) == 1
    assert part in said[-1]
    assert not out.exists()


def test_a_folder_that_exists_is_left_alone(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "note").write_text("mine")
    assert run(["--model", str(model), "--out", str(tmp_path)], monkeypatch) == 2
    assert "exists already" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["note"]


@pytest.mark.skipif(find_spec("llmcompressor") is not None, reason="llmcompressor is installed")
def test_without_the_library_the_extra_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"delta-belief-rl\[awq\]"):
        quantize(QuantizeSettings(str(model), tmp_path / "out"))
    assert not list(tmp_path.iterdir())


@needs_library
@pytest.mark.slow
def test_a_tiny_model_is_quantised_read_back_and_compared(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "awq"
    words = ["--model", str(model), "--out", str(out), "--samples", "4", "--checked", "8"]
    assert run(words, monkeypatch) == 0
    assert "8 held-out prompts" in capsys.readouterr().out
    report = json.loads((out / "awq.json").read_text())
    assert report["settings"]["group_size"] == 64
    assert report["layers"] == 14
    assert 0 < report["difference"]["mean"] < 0.5
    written = read_checkpoint(out)
    assert written is not None
    assert written.quantisation is not None
    assert (written.quantisation.bits, written.quantisation.group_size) == (4, 64)
    assert sum(name.endswith("weight_packed") for name in written.tensors) == 14
    assert run(["--model", str(out), "--out", str(tmp_path / "again")], monkeypatch) == 2
    assert "quantised already" in capsys.readouterr().err


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The script's own way, whatever it exits with."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = runpy.run_path(str(ROOT / "scripts" / "quantize_awq.py"))
    try:
        return int(script["main"](words))
    except SystemExit as ended:
        return int(ended.code or 0)
