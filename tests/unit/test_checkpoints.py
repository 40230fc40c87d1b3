"""Model folders against what they say of themselves, and against how they are to be served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from delta_belief_rl.config.checkpoints import (
    Checkpoint,
    Quantisation,
    TensorInfo,
    half_problems,
    quantisation_problems,
    read_checkpoint,
    read_header,
)
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import Facts, ModelShape
from delta_belief_rl.config.rules_models import allowed_splits, model_problems, split_problem
from delta_belief_rl.types import UserError
from tests.models import (
    AWQ,
    COMPRESSED,
    LAYER,
    PLAIN,
    awq_tensors,
    compressed_tensors,
    write_header,
    write_model,
)

SETTING = "judge_rollout.rollout.quantization"
QWEN_14B = ModelShape(5120, 40, 40, 8, 128, 17408, 151936, False)
GROUPED = Quantisation("awq", 4, 128, "gemm")


def read(folder: Path) -> Checkpoint:
    found = read_checkpoint(folder)
    assert found is not None
    return found


def problems(folder: Path, named: str | None = None) -> list[str]:
    return list(quantisation_problems("M", read(folder), named, SETTING))


# --- reading --------------------------------------------------------------------------------------


def test_a_header_is_read_as_the_library_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.int32)}
    save_file(tensors, file)
    header = read_header(file)
    assert header == {"a": TensorInfo("BF16", (3, 5)), "b": TensorInfo("I32", (2,))}
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    found = read(tmp_path)
    assert found.weight_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert (found.dtype, found.quantisation) == ("bfloat16", None)


@pytest.mark.parametrize("body", [b"", b"\0" * 8, b"\xff" * 16, (9).to_bytes(8, "little") + b"{"])
def test_what_is_no_header_is_not_guessed(tmp_path: Path, body: bytes) -> None:
    folder = write_model(tmp_path / "m", awq_tensors(), AWQ)
    (folder / "model-2.safetensors").write_bytes(body)
    found = read(folder)
    assert read_header(folder / "model-2.safetensors") is None
    assert not found.complete
    assert found.weight_bytes is None
    # Half of the weights are no reason to say that the others are missing.
    write_header(folder / "model.safetensors", PLAIN)
    assert problems(folder) == []


def test_a_folder_without_a_configuration_says_nothing_and_a_broken_one_is_refused(
    tmp_path: Path,
) -> None:
    assert read_checkpoint(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
def test_an_older_checkpoint_describes_itself_in_another_file(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m", awq_tensors())
    body = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    (folder / name).write_text(json.dumps(body))
    assert read(folder).quantisation == GROUPED
    assert problems(folder, "awq") == []


# --- quantised weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("named", [None, "awq", "awq_marlin", "auto_awq"])
def test_Q1_an_awq_checkpoint_is_served_under_each_of_its_names(
    tmp_path: Path, named: str | None
) -> None:
    assert problems(write_model(tmp_path / "m", awq_tensors(), AWQ), named) == []


@pytest.mark.parametrize("named", [None, "compressed-tensors"])
def test_Q1_a_compressed_checkpoint_is_served(tmp_path: Path, named: str | None) -> None:
    folder = write_model(tmp_path / "m", compressed_tensors(), COMPRESSED)
    assert read(folder).quantisation == Quantisation("compressed-tensors", 4, 128, "pack-quantized")
    assert problems(folder, named) == []


@pytest.mark.parametrize("named", [None, "fp8", "bitsandbytes"])
def test_plain_weights_may_be_quantised_while_they_are_loaded(
    tmp_path: Path, named: str | None
) -> None:
    assert problems(write_model(tmp_path / "m"), named) == []


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128, **weights}}
    return COMPRESSED | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("tensors", "quantised", "named", "part"),
    [
        (PLAIN, None, "awq", "quantization=awq but the weights of M are not quantised"),
        (PLAIN, None, "compressed-tensors", "are not quantised"),
        (awq_tensors(), None, None, f"M holds quantised weights ({LAYER}qweight) but its config"),
        (compressed_tensors(), None, None, f"({LAYER}weight_packed) but its config.json says noth"),
        (awq_tensors(), AWQ, "gptq", "quantization=gptq but the config.json of M says awq"),
        (awq_tensors(), AWQ, "compressed-tensors", "the config.json of M says awq"),
        (compressed_tensors(), COMPRESSED, "awq", "config.json of M says compressed-tensors"),
        (awq_tensors(bits=8), AWQ | {"bits": 8}, None, "awq weights of 8 bits and vLLM serves tho"),
        (awq_tensors(), AWQ | {"group_size": 48}, None, "groups of 48 and vLLM serves groups of 3"),
        (awq_tensors(), AWQ | {"version": "gemv"}, None, "AWQ weights in the layout gemv"),
        (awq_tensors(), {"quant_method": "awq"}, None, "does not tell the bits of a weight"),
        (compressed_tensors(), {"quant_method": "compressed-tensors"}, None, "does not tell the b"),
        (
            compressed_tensors(),
            compressed(num_bits=3),
            None,
            "compressed-tensors weights of 3 bits",
        ),
        (PLAIN, AWQ, None, "The config.json of M says awq but its weights hold no qweight"),
        (PLAIN, COMPRESSED, None, "compressed-tensors but its weights hold no weight_packed"),
        (awq_tensors(group=64), AWQ, None, "says groups of 128 but the scales of"),
        (awq_tensors(bits=8), AWQ, None, f"{LAYER}qweight of M is no packed weight of 4 bits (I32"),
        (compressed_tensors(group=64), COMPRESSED, None, "are for groups of 64: copy or download"),
    ],
)
def test_Q1_a_quantised_file_that_is_not_what_it_says_is_one_sentence(
    tmp_path: Path, tensors: Any, quantised: Any, named: str | None, part: str
) -> None:
    found = problems(write_model(tmp_path / "m", tensors, quantised), named)
    assert len(found) == 1
    assert part in found[0]
    assert found[0].endswith(".")
    assert "\n" not in found[0]


@pytest.mark.parametrize("part", ["scales", "qzeros"])
def test_Q1_packed_weights_without_their_scales_are_named(tmp_path: Path, part: str) -> None:
    tensors = {name: info for name, info in awq_tensors().items() if not name.endswith(part)}
    found = problems(write_model(tmp_path / "m", tensors, AWQ))
    assert found == [
        f"The weights of M hold {LAYER}qweight but no {LAYER}{part}: copy or download the model "
        "again, or quantise it anew."
    ]


def test_a_packed_weight_of_another_number_format_is_named(tmp_path: Path) -> None:
    tensors = {**awq_tensors(), f"{LAYER}qweight": ("F16", (512, 32))}
    (sentence,) = problems(write_model(tmp_path / "m", tensors, AWQ))
    assert "(F16 [512, 32])" in sentence


@pytest.mark.parametrize(
    ("named", "dtype", "stored", "refused"),
    [
        ("awq", "bfloat16", "float16", True),
        ("awq", "float32", "float16", True),
        ("awq", "float16", "bfloat16", False),
        ("awq", "auto", "float16", False),
        ("awq", "auto", "torch.bfloat16", True),
        ("awq_marlin", "bfloat16", "float16", False),
        (None, "bfloat16", "float16", False),
    ],
)
def test_Q1_the_plain_awq_kernel_computes_in_float16_alone(
    named: str | None, dtype: str, stored: str, refused: bool
) -> None:
    found = Checkpoint(stored, GROUPED)
    sentences = list(half_problems("M", found, named, dtype, "judge_rollout"))
    assert bool(sentences) is refused
    for sentence in sentences:
        assert "set judge_rollout.rollout.dtype=float16" in sentence
    assert list(half_problems("M", Checkpoint("bfloat16"), named, dtype, "p")) == []


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "parallel", "stored", "part"),
    [
        (QWEN_14B, 1, GROUPED, None),
        (QWEN_14B, 2, GROUPED, None),
        (QWEN_14B, 4, GROUPED, None),
        (QWEN_14B, 8, GROUPED, None),
        (QWEN_14B, 3, None, "does not divide its 40 attention heads"),
        (QWEN_14B, 6, None, "does not divide its 40 attention heads"),
        (QWEN_14B, 5, None, "neither divides its 8 key-value heads nor is a multiple of them"),
        # Fewer key-value heads than GPUs are copied.
        (replace(QWEN_14B, kv_heads=2), 4, None, None),
        (replace(QWEN_14B, kv_heads=3), 4, None, "neither divides its 3 key-value heads"),
        (replace(QWEN_14B, intermediate=17409), 2, None, "does not divide its feed-forward size"),
        (replace(QWEN_14B, intermediate=17408 + 128), 2, GROUPED, "its feed-forward layers to ea"),
        (replace(QWEN_14B, head_dim=16), 2, GROUPED, "inputs of its attention layers to each GPU"),
    ],
)
def test_a_model_is_split_as_its_heads_and_groups_allow(
    shape: ModelShape, parallel: int, stored: Quantisation | None, part: str | None
) -> None:
    why = split_problem(shape, parallel, stored)
    assert (why is None) == (part is None)
    assert part is None or (why is not None and part in why)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 12))
def test_allowed_splits_divide_the_pool_and_the_model(
    heads_of: int, kv: int, ffn: int, ngpus: int
) -> None:
    shape = ModelShape(64, 1, heads_of * kv, kv, 16, ffn * 4, 100, True)
    allowed = list(allowed_splits(shape, ngpus, None))
    assert allowed[0] == 1
    for parallel in allowed:
        assert ngpus % parallel == 0
        assert shape.heads % parallel == 0
        assert max(kv, parallel) % min(kv, parallel) == 0


# --- a run ----------------------------------------------------------------------------------------

JUDGED = ("experiment=train_8xa100_paper", "hardware=8xa100_dp7")


def asked(*overrides: str, **facts: Any) -> list[str]:
    config = load_config([*JUDGED, *overrides])[0]
    base: dict[str, Any] = {"model": QWEN_14B, "judge_model": QWEN_14B}
    known = Facts(1000, 198, cores=64, gpus=8, **(base | facts))
    return list(model_problems(config, known, 1))


def test_a_run_of_models_that_are_not_here_is_told_nothing() -> None:
    assert asked(model=None, judge_model=None) == []
    assert asked("judge_rollout.rollout.quantization=awq") == []


def test_the_sizes_that_are_allowed_are_the_cure() -> None:
    whole = "judge_rollout.rollout.tensor_model_parallel_size"
    plain = Checkpoint("bfloat16")
    assert asked("judge_rollout.ngpus=6", f"{whole}=3", judge_checkpoint=plain) == [
        f"{whole}=3 cannot split Qwen/Qwen3-14B, because it does not divide its 40 attention "
        "heads: set it to 1 or 2."
    ]
    assert asked("judge_rollout.ngpus=6", f"{whole}=null", judge_checkpoint=plain) == [
        f"{whole}=null (all 6 GPUs of the pool) cannot split Qwen/Qwen3-14B, because it does not "
        "divide its 40 attention heads: set it to 1 or 2."
    ]


@pytest.mark.parametrize(("version", "refused"), [(None, 1), ("0.23.0", 1), ("0.32.0", 0)])
def test_Q1_the_number_format_of_awq_goes_by_the_version(version: str | None, refused: int) -> None:
    awq = Checkpoint("float16", GROUPED)
    sentences = asked(f"{SETTING}=awq", judge_checkpoint=awq, vllm=version)
    assert len(sentences) == refused


def test_quantised_weights_cannot_be_trained_or_read_by_transformers() -> None:
    awq = Checkpoint("float16", GROUPED)
    (sentence,) = asked(checkpoint=awq)
    assert "is quantised (awq) and cannot be trained" in sentence
    (sentence,) = asked(
        "judge_rollout.name=hf",
        "judge_rollout.rollout.tensor_model_parallel_size=1",
        judge_checkpoint=awq,
    )
    assert sentence.endswith("is quantised (awq), which only judge_rollout.name=vllm serves.")
