"""Model folders as they say they are: ``config.json`` and the headers of safetensors files.

Headers tell the name, number format and shape of every tensor and cost some kilobytes to read, so a
model that an engine would refuse only after minutes of loading is refused before anything starts:
tensor parallelism that does not divide it, quantised weights that vLLM does not serve, and a folder
whose weights are not what its ``config.json`` promises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from delta_belief_rl.types import UserError

AWQ, COMPRESSED = "awq", "compressed-tensors"
GROUP_SIZES = (-1, 32, 64, 128)
"""Weights of one scale that vLLM's kernels know; -1 is a whole row."""
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of a number by its name in a header; 1 for all others."""
QUANTISED_FILES = ("quant_config.json", "quantize_config.json")
"""Older checkpoints describe their quantisation in a file of its own."""

_LONGEST_HEADER = 100 * 2**20
_PACKED = ("qweight", "weight_packed")

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a header: its number format by the header's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * WIDTHS.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a checkpoint says that its weights are stored.

    Attributes:
        method: ``awq``, ``compressed-tensors``, ``gptq``, ...
        bits: Of a weight; None where it is not told.
        group_size: Weights that share a scale; -1 for a whole row, None where it is not told.
        layout: How they lie: ``version`` of AutoAWQ, ``format`` of compressed-tensors.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder.

    Attributes:
        dtype: Number format that ``config.json`` names; empty where it names none.
        quantisation: None for plain weights.
        tensors: By name; of the files whose header can be read.
        complete: Whether the headers of all weight files were read.
    """

    dtype: str = ""
    quantisation: Quantisation | None = None
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])
    complete: bool = False

    @property
    def weight_bytes(self) -> int | None:
        """Size of all weights as they are stored, None where it is not known."""
        if not self.complete:
            return None
        return sum(tensor.bytes for tensor in self.tensors.values())


# --- reading --------------------------------------------------------------------------------------


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """What a model folder says of itself; None without a ``config.json``.

    A weight file that cannot be read is left out: whether the files are whole is another check.

    Raises:
        UserError: A file is not JSON.
    """
    entries = _read_json(folder / "config.json")
    if entries is None:
        return None
    described = entries.get("quantization_config")
    found = (_read_json(folder / name) for name in QUANTISED_FILES)
    described = described or next((body for body in found if body is not None), None)
    tensors: dict[str, TensorInfo] = {}
    files = sorted(folder.glob("*.safetensors"))
    headers = [read_header(file) for file in files]
    for header in headers:
        tensors |= header or {}
    return Checkpoint(
        dtype=str(entries.get("dtype") or entries.get("torch_dtype") or ""),
        quantisation=_quantisation(cast("Json", described)) if described else None,
        tensors=tensors,
        complete=bool(files) and None not in headers,
    )


def read_header(file: Path) -> dict[str, TensorInfo] | None:
    """Tensors of one safetensors file by name; None where it has no such header."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= _LONGEST_HEADER:
                return None
            body = cast("dict[str, Json]", json.loads(stream.read(size)))
        return {
            name: TensorInfo(str(entry["dtype"]), tuple(cast("list[int]", entry["shape"])))
            for name, entry in body.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_json(file: Path) -> Json | None:
    if not file.is_file():
        return None
    try:
        return cast("Json", json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON; download the model again.") from error


def _quantisation(body: Json) -> Quantisation:
    method = str(body.get("quant_method") or AWQ).lower()
    layout = str(body.get("version") or body.get("format") or "").lower()
    if method != COMPRESSED:
        bits, group = body.get("bits", body.get("w_bit")), body.get("group_size")
        group = body.get("q_group_size") if group is None else group
        return Quantisation(method, _number(bits), _number(group), layout)
    groups = cast("Mapping[str, Json]", body.get("config_groups") or {})
    weights: Json = {}
    for entry in groups.values():
        weights = cast("Json", entry.get("weights") or {})
        break
    bits, group = _number(weights.get("num_bits")), _number(weights.get("group_size"))
    if group is None and weights.get("strategy") in ("channel", "tensor"):
        group = -1
    return Quantisation(method, bits, group, layout)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


# --- what is wrong with them ----------------------------------------------------------------------


def quantisation_problems(
    path: str, checkpoint: Checkpoint, named: str | None, setting: str
) -> Iterator[str]:
    """One sentence for each reason why vLLM cannot serve a model as it is asked to.

    Args:
        path: The model, for the sentence.
        checkpoint: What its folder says.
        named: The quantisation that the run names, None to read the model's own.
        setting: Where it is named.
    """
    stored = checkpoint.quantisation
    if stored is None:
        if named in _NEEDS_PACKED:
            yield (
                f"{setting}={named} but the weights of {path} are not quantised (its config.json "
                "has no quantization_config): set it to null, or give the quantised model."
            )
        packed = next((name for name in checkpoint.tensors if _ending(name) in _PACKED), None)
        if packed is not None:
            yield (
                f"{path} holds quantised weights ({packed}) but its config.json says nothing of "
                "them: copy or download the model again."
            )
        return
    if named is not None and named not in _NAMES.get(stored.method, {stored.method}):
        yield (
            f"{setting}={named} but the config.json of {path} says {stored.method}: set it to "
            "null, which reads the model's own."
        )
        return
    problems = [*_unserved(path, stored), *_broken_promises(path, stored, checkpoint)]
    yield from problems[:1]


def half_problems(
    path: str, checkpoint: Checkpoint, named: str | None, dtype: str, pool: str
) -> Iterator[str]:
    """The kernel that ``quantization=awq`` names computes in float16 alone."""
    if dtype == "auto":
        dtype = checkpoint.dtype.removeprefix("torch.") or "float16"
    awq = checkpoint.quantisation is not None and checkpoint.quantisation.method == AWQ
    if awq and named == AWQ and dtype != "float16":
        yield (
            f"{pool}.rollout.quantization=awq computes in float16 and {path} would run in {dtype}: "
            f"set {pool}.rollout.dtype=float16, or {pool}.rollout.quantization=awq_marlin."
        )


_NAMES: Mapping[str, Collection[str]] = {
    AWQ: ("awq", "awq_marlin", "auto_awq", "marlin", "moe_wna16", "humming"),
    "gptq": ("gptq", "gptq_marlin", "auto_gptq", "marlin", "moe_wna16", "humming"),
    COMPRESSED: (COMPRESSED, "humming"),
}
"""Names under which vLLM reads a checkpoint, by the name that it gives itself."""

_NEEDS_PACKED = frozenset(name for names in _NAMES.values() for name in names)
"""Quantisations that are not made while plain weights are loaded."""


def _unserved(path: str, stored: Quantisation) -> Iterator[str]:
    """Formats that vLLM has no kernel for."""
    if stored.method not in (AWQ, COMPRESSED):
        return
    allowed = (4,) if stored.method == AWQ else (4, 8)
    if stored.bits is None or (stored.method == AWQ and stored.group_size is None):
        yield (
            f"The quantization_config of {path} does not tell the bits of a weight and the size of "
            "a group: copy or download the model again."
        )
    elif stored.bits not in allowed:
        shown = " or ".join(str(bits) for bits in allowed)
        yield (
            f"{path} has {stored.method} weights of {stored.bits} bits and vLLM serves those of "
            f"{shown}: quantise the model anew, or give another one."
        )
    elif stored.group_size is not None and stored.group_size not in GROUP_SIZES:
        shown = ", ".join(str(size) for size in GROUP_SIZES if size > 0)
        yield (
            f"{path} has {stored.method} weights in groups of {stored.group_size} and vLLM serves "
            f"groups of {shown}: quantise the model anew, or give another one."
        )
    elif stored.method == AWQ and stored.layout not in ("", "gemm"):
        yield (
            f"{path} has AWQ weights in the layout {stored.layout} and vLLM reads the layout gemm: "
            "quantise the model anew with version=GEMM, or give another one."
        )


def _broken_promises(path: str, stored: Quantisation, found: Checkpoint) -> Iterator[str]:
    """Weights that are not what ``config.json`` says; silent where they could not be read."""
    packed = stored.method == AWQ or stored.layout == "pack-quantized"
    if not found.complete or not packed or stored.bits is None:
        return
    ending = "qweight" if stored.method == AWQ else "weight_packed"
    partners = ("scales", "qzeros") if stored.method == AWQ else ("weight_scale",)
    modules = [n.removesuffix(ending) for n in found.tensors if _ending(n) == ending]
    again = "copy or download the model again, or quantise it anew."
    if not modules:
        yield (
            f"The config.json of {path} says {stored.method} but its weights hold no {ending}: "
            f"{again}"
        )
    for module in modules:
        absent = next((part for part in partners if module + part not in found.tensors), None)
        if absent is not None:
            yield f"The weights of {path} hold {module}{ending} but no {module}{absent}: {again}"
            return
        weights, scales = found.tensors[module + ending], found.tensors[module + partners[0]]
        told = _stored_as(stored.method, weights, scales, stored.bits)
        if told is None:
            yield (
                f"The tensor {module}{ending} of {path} is no packed weight of {stored.bits} bits "
                f"({weights.dtype} {list(weights.shape)}): {again}"
            )
            return
        if stored.group_size not in (None, -1, told):
            yield (
                f"The config.json of {path} says groups of {stored.group_size} but the scales of "
                f"{module}{ending} are for groups of {told}: {again}"
            )
            return


def _stored_as(method: str, weights: TensorInfo, scales: TensorInfo, bits: int) -> int | None:
    """Inputs that share a scale, None where weights and scales do not belong together."""
    if weights.dtype != "I32" or len(weights.shape) != 2 or len(scales.shape) != 2:
        return None
    each = 32 // bits
    if method == AWQ:  # [inputs, outputs / each] and [groups, outputs]
        inputs, outputs, groups = weights.shape[0], weights.shape[1] * each, scales.shape[0]
        matching = outputs == scales.shape[1]
    else:  # [outputs, inputs / each] and [outputs, groups]
        inputs, groups = weights.shape[1] * each, scales.shape[1]
        matching = weights.shape[0] == scales.shape[0]
    return inputs // groups if matching and groups and inputs % groups == 0 else None


def _ending(name: str) -> str:
    return name.rpartition(".")[2]
