"""Cross-field rules: each impossible setting is refused with a sentence of cause and cure."""

from __future__ import annotations

import pytest

from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import check, problems
from delta_belief_rl.config.schema_algo import GROUP_ESTIMATORS
from delta_belief_rl.types import UserError

PAPER = "experiment=paper_qwen1.7b"
QUICK = "experiment=quickstart"
VAL_KWARGS = "actor_rollout_ref.rollout.val_kwargs"
TRIES = [QUICK, "multi_turn.logprob_sampling.enabled=true", "actor_rollout_ref.rollout.n=4"]
NO_RANK = "actor_rollout_ref.model.lora_rank=0"
THINKS = ["actor_rollout_ref.actor.thinking=true"]


def sentences(*overrides: str) -> list[str]:
    return list(problems(load_config(list(overrides))[0]))


def test_a_valid_configuration_passes() -> None:
    assert sentences(PAPER) == []
    check(load_config([QUICK])[0])


def test_check_raises_the_first_broken_rule() -> None:
    config = load_config([QUICK, "multi_turn.train.n=0", "trainer.save_freq=0"])[0]
    with pytest.raises(UserError, match=r"multi_turn\.train\.n must be at least 1, not 0"):
        check(config)


def test_a_bare_start_says_which_model_is_missing() -> None:
    assert "start from experiment=quickstart" in sentences()[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=100"],
        ["data.train_batch_size=40"],
        ["actor_rollout_ref.actor.ppo_mini_batch_size=7"],
    ],
)
def test_U1_batches_that_do_not_divide_are_refused(overrides: list[str]) -> None:
    (sentence,) = sentences(PAPER, *overrides)
    assert "secrets" in sentence
    assert "ppo_mini_batch_size" in sentence


def test_U1_more_ranks_than_games_of_an_optimizer_step_are_refused() -> None:
    (sentence,) = sentences(
        PAPER,
        "actor_rollout_ref.ngpus=8",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "multi_turn.train.n=2",
    )
    assert "2 games for 8 training ranks" in sentence


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_A16_a_group_of_one_is_refused_with_a_group_baseline(estimator: str) -> None:
    found = sentences(QUICK, "multi_turn.train.n=1", f"algorithm.adv_estimator={estimator}")
    # A method may have further needs that this run does not meet.
    (sentence,) = [one for one in found if "multi_turn.train.n must be at least 2" in one]
    assert estimator in sentence


def test_A16_a_group_of_one_is_fine_without_a_group_baseline_or_training() -> None:
    single = [QUICK, "multi_turn.train.n=1"]
    assert sentences(*single, "algorithm.adv_estimator=reinforce") == []
    assert sentences(*single, "trainer.val_only=true") == []


@pytest.mark.parametrize(
    ("overrides", "fine"),
    [
        (["judge_rollout.ngpus=6", "judge_rollout.rollout.tensor_model_parallel_size=2"], True),
        (["judge_rollout.ngpus=6", "judge_rollout.rollout.tensor_model_parallel_size=4"], False),
        (["judge_rollout.ngpus=1", "judge_rollout.rollout.tensor_model_parallel_size=2"], False),
        (["judge_rollout.ngpus=2", "judge_rollout.rollout.tensor_model_parallel_size=0"], False),
        (["judge_rollout.ngpus=4", "judge_rollout.rollout.tensor_model_parallel_size=null"], True),
    ],
)
def test_J8_replicas_times_tp_must_be_the_gpus_of_the_pool(
    overrides: list[str], fine: bool
) -> None:
    found = sentences(PAPER, *overrides)
    assert (found == []) == fine
    assert fine or "tensor_model_parallel_size" in found[0]


def test_C2_the_cap_of_a_turn_must_be_below_the_cap_of_a_game() -> None:
    (sentence,) = sentences(QUICK, "data.max_response_length=512", "data.max_prompt_length=512")
    assert "tokens of a turn" in sentence
    assert "tokens of a game" in sentence


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([QUICK, "multi_turn.env=chess"], "multi_turn.env does not know chess"),
        ([QUICK, "algorithm.adv_estimator=grpo_trun"], "did you mean grpo_turn?"),
        ([QUICK, "multi_turn.logprob_reward.methods=[positve]"], "did you mean positive?"),
        ([QUICK, "multi_turn.verify_judge.methods=[exat]"], "did you mean exact?"),
        ([QUICK, "multi_turn.verify_judge.methods=[sintax]"], "did you mean syntax?"),
        ([QUICK, "multi_turn.logprob_reward.methods=[pacr,potential]"], "keep one of them"),
        ([QUICK, "data.train_files=a.parquet"], "exclude each other"),
        ([QUICK, "multi_turn.env=guess_my_city"], "plays twenty_questions only"),
        ([PAPER, "data.train_files=[]"], "no training tasks"),
        ([PAPER, "data.val_files=[]"], "no validation tasks"),
        ([PAPER, "trainer.final_test=true"], "set data.test_files"),
        (
            [PAPER, "actor_rollout_ref.actor.cot=true", "actor_rollout_ref.actor.thinking=true"],
            "exc",
        ),
        ([PAPER, "actor_rollout_ref.rollout.max_model_len=2000"], "shorter than a game"),
        ([QUICK, "multi_turn.logprob_reward.clip_min=3"], "clip_min must be less"),
        ([QUICK, "multi_turn.logprob_reward.dead_band=-1"], "dead_band"),
        ([QUICK, "algorithm.std_floor=-1"], "algorithm.std_floor must not be negative"),
        ([QUICK, "algorithm.mt_grpo.turn_advantage_w=-1"], "mt_grpo.turn_advantage_w must not be"),
        ([QUICK, "algorithm.gigpo.step_advantage_w=-1"], "gigpo.step_advantage_w must not be"),
        ([QUICK, "algorithm.hgpo.history=-1"], "algorithm.hgpo.history must not be negative"),
        ([QUICK, "algorithm.hgpo.length_weight_alpha=-1"], "hgpo.length_weight_alpha must not be"),
        ([QUICK, "multi_turn.logprob_reward.std_floor=-1"], "std_floor"),
        (
            [
                QUICK,
                "multi_turn.logprob_reward.methods=[pacr]",
                "multi_turn.logprob_reward.base_model=base",
            ],
            "base_model and step_model alike",
        ),
        ([QUICK, "multi_turn.logprob_sampling.p_best=2"], "p_best must lie in [0, 1]"),
        ([QUICK, "multi_turn.logprob_sampling.enabled=true"], "candidates to choose from"),
        ([QUICK, "actor_rollout_ref.rollout.n=4"], "for the group size set multi_turn.train.n"),
        (
            [
                QUICK,
                "multi_turn.logprob_sampling.enabled=true",
                "actor_rollout_ref.rollout.n=2",
                "multi_turn.logprob_sampling.best_n=7",
            ],
            "must not exceed multi_turn.train.n=8",
        ),
        ([QUICK, "multi_turn.logprob_sampling.worst_n=-1"], "worst_n must not be negative, not -1"),
        ([*TRIES, "actor_rollout_ref.rollout.max_num_seqs=3"], "no room for the 4 candidates"),
        (
            [*TRIES, "trainer.val_only=true", f"{VAL_KWARGS}.do_sample=false"],
            "makes all candidates of multi_turn.logprob_sampling equal",
        ),
        (
            [*TRIES, "trainer.val_only=true", f"{VAL_KWARGS}.temperature=0"],
            "makes all candidates of multi_turn.logprob_sampling equal",
        ),
        (
            [QUICK, *THINKS, "actor_rollout_ref.actor.thinking_history=strip"],
            "no single stream of tokens",
        ),
        (
            [
                QUICK,
                *THINKS,
                "actor_rollout_ref.model.chat_template_kwargs={enable_thinking: false}",
            ],
            "contradicts actor_rollout_ref.actor.thinking=true",
        ),
        (
            [QUICK, "actor_rollout_ref.role=rollout", "trainer.val_only=true"],
            "Beliefs need actor_rollout_ref.role",
        ),
        ([QUICK, "multi_turn.logprob_reward.base_model=ema"], "needs an adapter called ema"),
        (
            [
                PAPER,
                "multi_turn.logprob_reward.base_model=base",
                "actor_rollout_ref.model.lora_rank=0",
            ],
            "needs LoRA",
        ),
        (
            [
                PAPER,
                "actor_rollout_ref.actor.use_dynamic_bsz=true",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
            ],
            "cannot hold one game",
        ),
        ([QUICK, "actor_rollout_ref.actor.clip_ratio_low=1.5"], "clip_ratio_low"),
        ([QUICK, "actor_rollout_ref.actor.clip_ratio_c=1"], "clip_ratio_c must be above 1"),
        ([QUICK, "actor_rollout_ref.actor.optim.lr=0"], "optim.lr must be above 0"),
        ([QUICK, "actor_rollout_ref.actor.optim.betas=[0.9,1.0]"], "betas must lie in [0, 1)"),
        ([QUICK, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=2"], "lr_warmup_steps_ratio"),
        ([QUICK, "actor_rollout_ref.actor.optim.min_lr_ratio=0.1"], "needs warmup_style=cosine"),
        ([QUICK, "algorithm.gamma=1.1"], "algorithm.gamma"),
        ([QUICK, "algorithm.std_floor=-1"], "algorithm.std_floor"),
        ([QUICK, "algorithm.clip_adv_min=3"], "clip_adv_min must be less"),
        ([QUICK, "algorithm.kl_ctrl.kl_coef=-1"], "kl_coef must not be negative"),
        ([QUICK, "algorithm.kl_ctrl.horizon=0"], "horizon must be above 0"),
        ([QUICK, "algorithm.kl_ctrl.target_kl=0"], "target_kl must be above 0"),
        (
            [
                PAPER,
                "algorithm.use_kl_in_reward=true",
                "actor_rollout_ref.model.lora_rank=0",
                "actor_rollout_ref.model.adapters=[]",
            ],
            "without its adapter",
        ),
        ([QUICK, "trainer.abort.patience=0"], "abort.patience must be at least 1"),
        ([QUICK, "trainer.abort.nan_gradients=0"], "abort.nan_gradients must be at least 1"),
        ([QUICK, "trainer.abort.min_entropy=-1"], "min_entropy must not be negative"),
        ([QUICK, "trainer.abort.max_invalid_turns=1.5"], "max_invalid_turns must lie in [0, 1]"),
        ([QUICK, "actor_rollout_ref.model.ema_beta=2"], "ema_beta"),
        ([QUICK, "actor_rollout_ref.rollout.temperature=-1"], "temperature must not be negative"),
        ([QUICK, "actor_rollout_ref.rollout.top_p=0"], "top_p must be above 0"),
        ([QUICK, "actor_rollout_ref.rollout.val_kwargs.top_k=0"], "val_kwargs.top_k"),
        ([QUICK, "actor_rollout_ref.rollout.temperature=0"], "nothing can be learnt"),
        ([QUICK, "actor_rollout_ref.rollout.name=vllm"], "needs a GPU"),
        ([QUICK, "actor_rollout_ref.ngpus=1"], "device=cpu uses no GPU"),
        ([QUICK, "actor_rollout_ref.device=cuda"], "needs actor_rollout_ref.ngpus of at least 1"),
        ([QUICK, "actor_rollout_ref.role=rollout"], "cannot train"),
        ([PAPER, "actor_rollout_ref.model.adapters=[]"], "adapters is empty"),
        ([PAPER, "actor_rollout_ref.model.adapters=[{name: a}]"], "needs r and alpha"),
        (
            [QUICK, NO_RANK, "actor_rollout_ref.model.adapters=[{name: a, r: -4, alpha: 4}]"],
            "actor_rollout_ref.model.adapters must not have a negative r or alpha, not -4 and 4",
        ),
        (
            [QUICK, NO_RANK, "actor_rollout_ref.model.adapters=[{name: a, r: 4, alpha: -1}]"],
            "actor_rollout_ref.model.adapters must not have a negative r or alpha, not 4 and -1",
        ),
        (
            [PAPER, "actor_rollout_ref.model.lora_rank=-1"],
            "actor_rollout_ref.model.lora_rank must not be negative, not -1",
        ),
        (
            [QUICK, "actor_rollout_ref.model.lora_alpha=-1"],
            "actor_rollout_ref.model.lora_alpha must not be negative, not -1",
        ),
        (
            [
                PAPER,
                "actor_rollout_ref.model.adapters=[{name: a,r: 1,alpha: 1},{name: a,r: 1}]",
            ],
            "the same name",
        ),
        ([PAPER, "+actor_rollout_ref.model.api_model_name=m"], "can only be evaluated"),
        ([PAPER, "judge_rollout.thinking=true"], "judge_rollout.cot and judge_rollout.thinking"),
        ([PAPER, "judge_rollout.ngpus=0"], "needs judge_rollout.ngpus of at least 1"),
        ([PAPER, "judge_rollout.model.path=''"], "judge_rollout.model.path is not set"),
        ([QUICK, "judge_rollout.ngpus=1"], "uses no GPU"),
        ([PAPER, "judge=world"], "answers from data.world"),
        ([QUICK, "judge_rollout.name=api"], "needs judge_rollout.model.api_model_name"),
        ([QUICK, "judge_rollout.max_error_rate=2"], "max_error_rate must lie in [0, 1]"),
        ([QUICK, "judge_rollout.timeout_s=0"], "timeout_s must be above 0"),
        ([QUICK, "judge_rollout.self_test.min_accuracy=2"], "min_accuracy must lie in [0, 1]"),
        ([QUICK, "judge_rollout.max_restarts=-1"], "max_restarts must not be negative, not -1"),
        ([PAPER, "judge_rollout.rollout.max_model_len=100"], "shorter than prompt and answer"),
        ([QUICK, "judge_rollout.name=rules"], "rules judges the other environments"),
        ([PAPER, "judge_rollout.rollout.gpu_memory_utilization=1.2"], "must lie in (0, 1]"),
        ([QUICK, "judge_rollout.share_actor_gpu=true"], "share_actor_gpu needs"),
        ([PAPER, "judge_rollout.share_actor_gpu=true"], "ask for 1.20 of one GPU"),
        ([QUICK, "trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (
            [QUICK, "trainer.resume_mode=resume_path", "trainer.resume_from_path=x"],
            "global_step_N",
        ),
        ([QUICK, "trainer.resume_from_path=x"], "read with trainer.resume_mode=resume_path only"),
        ([QUICK, "trainer.experiment_name=''"], "experiment_name must not be empty"),
        ([PAPER, "trainer.n_gpus_per_node=1"], "The pools need 2 GPUs"),
        ([QUICK, "trainer.max_staleness=1"], "tis_imp_ratio_cap"),
        ([QUICK, "trainer.max_staleness=-1"], "must not be negative"),
        ([QUICK, "trainer.test_freq=0"], "positive number of steps, or -1"),
        ([QUICK, "trainer.check_freq=-1"], "trainer.check_freq must not be negative"),
        ([QUICK, "data.sample_count.val=0"], "positive, or -1 for all"),
        ([QUICK, "trainer.total_training_steps=0"], "must be at least 1"),
        ([QUICK, "actor_rollout_ref.num_threads=0"], "must be at least 1"),
    ],
)
def test_each_impossible_setting_is_refused_before_anything_starts(
    overrides: list[str], part: str
) -> None:
    found = sentences(*overrides)
    assert any(part in sentence for sentence in found), found
    for sentence in found:
        assert "\n" not in sentence
        assert sentence.endswith((".", "?"))


def test_plugins_may_bring_an_environment_and_a_method_and_nothing_else() -> None:
    own = [QUICK, "data.world=null", "judge=rules", "multi_turn.env=mine"]
    assert sentences(*own, "plugins=[my.module]") == []
    (sentence,) = sentences(*own)
    assert "multi_turn.env does not know mine" in sentence
    # Whether a plug-in has a method is known where it is loaded.
    assert sentences(*own, "plugins=[my.module]", "algorithm.adv_estimator=mine") == []
    (sentence,) = sentences(QUICK, "algorithm.adv_estimator=mine")
    assert "does not know mine" in sentence
    more = "multi_turn.logprob_reward.methods=[mine]"
    (sentence,) = sentences(*own, "plugins=[my.module]", more)
    assert "does not know mine" in sentence


def test_a_fading_belief_that_is_not_paid_is_refused() -> None:
    decay = [QUICK, "algorithm=decay"]
    assert sentences(*decay) == []
    found = sentences(*decay, "multi_turn.logprob_reward.enabled=false")
    assert any("fades a reward that is not paid" in one for one in found)


def test_as_many_trees_as_games_share_nothing() -> None:
    (sentence,) = sentences(QUICK, "algorithm=tree_grpo", "algorithm.tree.tree_grpo.trees=8")
    assert "have one game each" in sentence


def test_settings_of_a_plug_in_s_method_are_refused_where_none_reads_them() -> None:
    (sentence,) = sentences(QUICK, "algorithm.kwargs.decay=0.5", "plugins=[my.module]")
    assert sentence.startswith("algorithm.kwargs is for methods of plug-ins, and grpo_turn is none")


def test_settings_of_a_plug_in_are_refused_where_none_reads_them() -> None:
    (sentence,) = sentences(QUICK, "multi_turn.env_kwargs.size=3", "plugins=[my.module]")
    assert sentence.startswith("multi_turn.env_kwargs is for environments of plug-ins, and twenty_")


def test_an_embedded_world_is_refused_where_a_plug_in_plays() -> None:
    own = [QUICK, "judge=rules", "multi_turn.env=mine", "plugins=[my.module]"]
    (sentence,) = sentences(*own)
    assert sentence.startswith("data.world plays twenty_questions only")


def test_U6_one_gpu_holds_policy_and_quantised_judge() -> None:
    assert sentences(PAPER, "judge=qwen3_14b_awq", "hardware=one_gpu") == []


def test_a_prompt_for_the_world_without_a_world_is_refused() -> None:
    assert sentences(QUICK, "data.world_prompt=Find it.") == []
    (sentence,) = sentences(PAPER, "data.world_prompt=Find it.")
    assert sentence == "data.world_prompt opens the games of data.world, which is not set."


@pytest.mark.parametrize(
    "overrides",
    [
        TRIES,
        [*TRIES, "trainer.val_only=true", "multi_turn.logprob_sampling.best_n=99"],
        [*TRIES, "multi_turn.logprob_sampling.best_n=8", "multi_turn.logprob_sampling.worst_n=0"],
        [QUICK, *THINKS],
        [QUICK, "actor_rollout_ref.actor.cot=true"],
        [QUICK, "actor_rollout_ref.actor.thinking_history=strip"],
        [QUICK, *THINKS, "actor_rollout_ref.model.chat_template_kwargs={enable_thinking: true}"],
    ],
)
def test_candidates_and_reasoning_are_accepted_and_nothing_is_missing_for_them(
    overrides: list[str],
) -> None:
    assert sentences(*overrides) == []
    assert unavailable(load_config(overrides)[0]) == []


def test_candidates_wait_for_an_engine_that_scores_them() -> None:
    gpu = ("actor_rollout_ref.device=auto", "actor_rollout_ref.ngpus=1")
    config = load_config([*TRIES, *gpu, "actor_rollout_ref.rollout.name=vllm"])[0]
    assert any("only the hf engine scores candidates" in line for line in unavailable(config))


@pytest.mark.parametrize(
    "adapters", ["[]", "[{name: a, alpha: 4}]", "[{name: a}, {name: ema, r: 4, alpha: 4}]"]
)
def test_a_causal_policy_that_trains_no_adapter_is_refused_before_anything_starts(
    adapters: str,
) -> None:
    bare = [NO_RANK, f"actor_rollout_ref.model.adapters={adapters}"]
    (sentence,) = unavailable(load_config([QUICK, *bare])[0])
    assert sentence.startswith("actor_rollout_ref.model.lora_rank=0 is not available yet: set ")


def test_a_denoiser_needs_no_adapter() -> None:
    config = load_config(["experiment=agreement_quickstart"])[0]
    model = config.actor_rollout_ref.model
    assert (model.lora_rank, model.adapters) == (0, ())
    assert list(problems(config)) == unavailable(config) == []
