"""Arguments of vLLM engines: what the settings become, what is refused, which kernels are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_belief_rl.config.compose import from_yaml, load_config, resolved_yaml
from delta_belief_rl.config.engine_args import (
    DISABLED_KERNELS,
    EngineArgs,
    judge_engine_args,
    kernel_switches,
    policy_engine_args,
)
from delta_belief_rl.config.facts import Facts
from delta_belief_rl.config.plan import make_plan
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.types import UserError

A100, RTX3090, H100, B200 = (8, 0), (8, 6), (9, 0), (10, 0)
VERSION = "0.23.0"
POLICY, JUDGE = "actor_rollout_ref", "judge_rollout"
PASS = "rollout.engine_kwargs.vllm"
OPTIONS = """
    model tokenizer dtype quantization tensor_parallel_size gpu_memory_utilization
    kv_cache_memory_bytes max_num_seqs max_num_batched_tokens max_model_len enforce_eager
    enable_prefix_caching enable_chunked_prefill seed enable_lora max_lora_rank max_loras
    max_cpu_loras enable_sleep_mode disable_log_stats load_format trust_remote_code
    disable_cascade_attn attention_config block_size disable_custom_all_reduce
"""
"""A part of the options that vLLM 0.23 and 0.32 share."""
KNOWN = frozenset(OPTIONS.split())
AWQ = "experiment=train_8xa100_awq_dp7"
PAPER = "experiment=train_8xa100_paper"


def config(*overrides: str) -> RunConfig:
    return load_config(list(overrides))[0]


def policy(*overrides: str, capability: tuple[int, int] | None = A100) -> EngineArgs:
    return policy_engine_args(config(*overrides), KNOWN, capability, VERSION, {})


def judge(*overrides: str, capability: tuple[int, int] | None = A100) -> EngineArgs:
    return judge_engine_args(config(*overrides), KNOWN, capability, VERSION, {})


def test_the_published_quantised_judge_arrives_whole() -> None:
    path = f"{JUDGE}.model.path=/models/awq"
    args = judge(AWQ, path, "seed=7", capability=H100)
    assert args.kwargs == {
        "model": "/models/awq",
        "dtype": "float16",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.6,
        "kv_cache_memory_bytes": 35_000_000_000,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "max_model_len": 1600 + 250,
        "enforce_eager": True,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enable_sleep_mode": False,
        "disable_log_stats": True,
        "load_format": "auto",
        "seed": 7,
        "trust_remote_code": False,
    }
    assert args.env == {}


@pytest.mark.parametrize(
    ("quantization", "marlin", "handed_on"),
    [
        ("awq", "auto", None),
        ("awq", "off", "awq"),
        ("compressed-tensors", "auto", "compressed-tensors"),
    ],
)
def test_Q3_awq_by_its_plain_name_is_left_to_vllm_which_takes_its_best_kernel(
    quantization: str, marlin: str, handed_on: str | None
) -> None:
    engine = f"{JUDGE}.rollout"
    kwargs = judge(
        PAPER, f"{engine}.quantization={quantization}", f"{engine}.marlin={marlin}"
    ).kwargs
    assert kwargs.get("quantization") == handed_on


def test_the_published_full_judge_is_split_over_two_gpus() -> None:
    kwargs = judge(PAPER).kwargs
    assert (kwargs["tensor_parallel_size"], kwargs["kv_cache_memory_bytes"]) == (2, 30_000_000_000)
    assert "quantization" not in kwargs
    whole = judge(PAPER, f"{JUDGE}.rollout.tensor_model_parallel_size=null")
    assert whole.kwargs["tensor_parallel_size"] == 6


def test_the_policy_has_room_for_a_game_a_turn_and_its_adapter() -> None:
    args = policy(PAPER)
    cfg = config(PAPER)
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    assert args.kwargs["max_model_len"] == longest
    assert (args.kwargs["enable_lora"], args.kwargs["max_lora_rank"]) == (True, 64)
    assert args.kwargs["max_loras"] == 1
    assert args.kwargs["enable_sleep_mode"] is True
    assert "kv_cache_memory_bytes" not in args.kwargs
    given = policy(PAPER, f"{POLICY}.rollout.max_model_len=9000")
    assert given.kwargs["max_model_len"] == 9000


@pytest.mark.parametrize(("rank", "reserved"), [(1, 8), (8, 8), (9, 16), (65, 128), (512, 512)])
def test_an_adapter_takes_the_next_larger_rank_that_the_engine_has(
    rank: int, reserved: int
) -> None:
    adapter = f"{POLICY}.model.adapters=[{{name: a, r: {rank}, alpha: {rank}}}]"
    assert policy(PAPER, adapter).kwargs["max_lora_rank"] == reserved


def test_an_adapter_that_no_rank_of_the_engine_holds_is_refused() -> None:
    adapter = f"{POLICY}.model.adapters=[{{name: a, r: 513, alpha: 8}}]"
    with pytest.raises(UserError, match=r"rank 513 is more than the 512"):
        policy(PAPER, adapter)


def test_a_policy_without_an_adapter_reserves_no_room_for_one() -> None:
    args = policy(PAPER, f"{POLICY}.model.lora_rank=0", f"{POLICY}.model.adapters=[]")
    assert args.kwargs["enable_lora"] is False
    assert "max_loras" not in args.kwargs


# --- kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [A100, RTX3090])
@pytest.mark.parametrize("of", [policy, judge])
def test_Q5_P5_on_ampere_flash_attention_is_2_and_cascade_attention_off(
    capability: tuple[int, int], of: object
) -> None:
    args = of(PAPER, capability=capability)  # type: ignore[operator]
    assert args.kwargs["attention_config"] == {"flash_attn_version": 2}
    assert args.kwargs["disable_cascade_attn"] is True
    shown = f"compute capability {capability[0]}.{capability[1]}"
    assert args.notes[:2] == (f"FlashAttention 2 ({shown})", f"cascade attention off ({shown})")


@pytest.mark.parametrize("capability", [H100, B200, None])
def test_Q5_elsewhere_the_engine_chooses(capability: tuple[int, int] | None) -> None:
    args = policy(PAPER, capability=capability)
    assert not {"attention_config", "disable_cascade_attn"} & args.kwargs.keys()
    assert len(args.notes) == 1


def test_Q1_marlin_is_turned_off_by_the_variable_of_the_version() -> None:
    assert judge(AWQ).env == {}
    args = judge(AWQ, f"{JUDGE}.rollout.marlin=off")
    assert args.env == {DISABLED_KERNELS: "MarlinLinearKernel"}
    assert args.notes[-1] == f"Marlin off ({DISABLED_KERNELS}=MarlinLinearKernel)"


def test_Q1_kernels_that_a_user_has_turned_off_stay_off() -> None:
    for before in ("ConchLinearKernel", "ConchLinearKernel,MarlinLinearKernel"):
        switches = kernel_switches(H100, "off", VERSION, {DISABLED_KERNELS: before})
        assert switches.env == {DISABLED_KERNELS: "ConchLinearKernel,MarlinLinearKernel"}


@pytest.mark.parametrize("version", ["0.10.2", "0.33.0", "1.0"])
def test_Q1_a_version_without_a_known_switch_is_refused(version: str) -> None:
    cfg = config(AWQ, f"{JUDGE}.rollout.marlin=off")
    with pytest.raises(UserError, match=rf"marlin=off has no switch in vLLM {version}"):
        judge_engine_args(cfg, KNOWN, A100, version, {})
    judge_engine_args(config(AWQ), KNOWN, A100, version, {})


def test_an_unquoted_off_in_a_file_means_off() -> None:
    cfg = config(AWQ, f"{JUDGE}.rollout.marlin=off")
    text = resolved_yaml(cfg)
    assert "marlin: 'off'" in text
    assert from_yaml(text) == cfg
    assert from_yaml(text.replace("marlin: 'off'", "marlin: off")) == cfg


def test_Q1_Q5_P5_the_plan_prints_every_switch() -> None:
    facts = Facts(1000, 198, cores=64, gpus=8, capability=A100, vllm="0.32.0")
    text = make_plan(config(AWQ, f"{JUDGE}.rollout.marlin=off"), facts).render()
    shown = "FlashAttention 2 (compute capability 8.0); cascade attention off"
    assert "Kernels (vLLM 0.32.0)" in text
    assert f"  policy: {shown} (compute capability 8.0)\n" in text
    assert f"  judge: {shown} (compute capability 8.0); Marlin off (VLLM_DISABLED" in text
    absent = replace(facts, capability=None, vllm=None)
    text = make_plan(config(AWQ), absent).render()
    assert "Kernels (vLLM is not installed here)" in text
    assert "FlashAttention by the GPU, which is not known here" in text
    assert "Kernels" not in make_plan(config("experiment=quickstart"), facts).render()


# --- options that are passed on -----------------------------------------------------------------


def test_options_are_passed_on_and_shown_and_null_leaves_the_engines_own() -> None:
    args = judge(
        AWQ,
        f"{JUDGE}.{PASS}={{block_size: 32, max_cpu_loras: null, enable_prefix_caching: false}}",
        capability=H100,
    )
    assert args.kwargs["block_size"] == 32
    assert args.kwargs["enable_prefix_caching"] is False
    assert "max_cpu_loras" not in args.kwargs
    assert args.notes[1:] == ("block_size=32 as given", "enable_prefix_caching=False as given")


def test_a_kernel_switch_can_be_overruled() -> None:
    args = policy(PAPER, f"{POLICY}.{PASS}={{disable_cascade_attn: false}}")
    assert args.kwargs["disable_cascade_attn"] is False
    assert args.notes[-1] == "disable_cascade_attn=False as given"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("blok_size", "blok_size is no engine option of vLLM 0.23.0; did you mean block_size?"),
        ("zzz", "zzz is no engine option of vLLM 0.23.0: leave it out."),
        ("seed", "has a setting of its own: set seed instead."),
        ("model", f"set {JUDGE}.model.path instead."),
        ("max_num_seqs", f"set {JUDGE}.rollout.max_num_seqs instead."),
        ("quantization", f"set {JUDGE}.rollout.quantization instead."),
        ("enable_sleep_mode", f"set {JUDGE}.rollout.free_cache_engine instead."),
        ("trust_remote_code", "code that comes with a model is never run; leave it out."),
    ],
)
def test_an_option_that_cannot_be_passed_on_is_refused_by_name(name: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        judge(AWQ, f"{JUDGE}.{PASS}={{{name}: 1}}")
    assert part in str(caught.value)
    assert f"{JUDGE}.{PASS}.{name}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_policys_adapter_has_a_setting_of_its_own() -> None:
    for name in ("enable_lora", "max_lora_rank"):
        with pytest.raises(UserError, match=f"set {POLICY}.model.lora_rank instead"):
            policy(PAPER, f"{POLICY}.{PASS}={{{name}: 8}}")
    assert policy(PAPER, f"{POLICY}.{PASS}={{max_loras: 2}}").kwargs["max_loras"] == 2


def test_a_version_that_lacks_what_a_run_needs_is_refused_with_the_window() -> None:
    old = KNOWN - {"kv_cache_memory_bytes"}
    with pytest.raises(UserError, match=r"no engine option kv_cache_memory_bytes.*>=0\.23,<0\.33"):
        judge_engine_args(config(AWQ), old, A100, "0.10.0", {})
    policy_engine_args(config(AWQ), old, A100, "0.10.0", {})


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["max_num_batched_tokens=512"], "must not be below judge_rollout.rollout.max_num_seqs"),
        (
            ["max_num_batched_tokens=1024", "enable_chunked_prefill=false"],
            "cannot hold the longest sequence",
        ),
    ],
)
def test_limits_that_exclude_each_other_are_refused(overrides: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        judge(AWQ, *(f"{JUDGE}.rollout.{text}" for text in overrides))
