"""A small model is taught a world's answers, and its folder judges as any other model does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from test_chat import CHATML, tokenizer
from transformers import PreTrainedModel

from delta_belief_rl.cli import main as cli
from delta_belief_rl.config.checkpoints import read_checkpoint
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.players import sentence
from delta_belief_rl.envs.worlds.table import World, load_world
from delta_belief_rl.judge.build import HfJudgeSettings, build_judge
from delta_belief_rl.judge.llm_judge import LlmJudgeSettings
from delta_belief_rl.judge.prompts import judge_messages
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.models.loading import load_causal_lm
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.teach import main as teach_main
from delta_belief_rl.trainer.teach.cases import CaseMaker, HeldOut, hold_out
from delta_belief_rl.trainer.teach.feed import PromptEncoder, lesson, lessons, step_cases
from delta_belief_rl.trainer.teach.main import judge_tokenizer, teach_judge
from delta_belief_rl.trainer.teach.measure import measure
from delta_belief_rl.trainer.teach.settings import Precision, TeachSettings, suited
from delta_belief_rl.trainer.teach.train import Heads, TeachPoint, answer_loss, teach
from delta_belief_rl.trainer.teach.tree import TREE_ATTENTION, tree_batch
from delta_belief_rl.trainer.warmup.model import ModelSizes, build_model
from delta_belief_rl.types import UserError, Verdict
from tests.worlds import small_world, task_for

WORLD = small_world()
SETTINGS = TeachSettings(
    size="tiny",
    steps=40,
    secrets=4,
    questions=8,
    longest_history=3,
    held_pairs=0.1,
    lr_warmup_steps=5,
    measured=24,
    curve_points=8,
)
DIRECT = LlmJudgeSettings(mode="direct", prompt_length=2000, response_length=8)


def maker(world: World = WORLD, seed: int = 0) -> CaseMaker:
    return CaseMaker(world, hold_out(world, SETTINGS.held_pairs, seed))


def pupil(cases: CaseMaker, seed: int = 0) -> tuple[PreTrainedModel, ChatFormat]:
    tokenizer = judge_tokenizer(cases.world, cases)
    sizes = ModelSizes(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp=64)
    model = build_model(replace(sizes, max_positions=2048), tokenizer, seed)
    return model, ChatFormat.from_tokenizer(tokenizer, {"enable_thinking": False})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("taught") / "judge"
    teach_judge(WORLD, SETTINGS, out)
    return out


# --- what is taught and what is not


@pytest.mark.parametrize("name", ["small", "everyday"])
def test_held_out_phrasings_and_pairs_are_never_taught(name: str) -> None:
    world = WORLD if name == "small" else load_world(name)
    cases = maker(world)
    held, grammar = cases.held, Grammar(world)
    assert held.phrasings
    assert held.pairs.any()
    never = {sentence(text) for text in held.phrasings.values()}
    seen: set[str] = set()
    for step in range(30):
        groups, _ = step_cases(cases, replace(SETTINGS, secrets=8, longest_history=19), step)
        for case in (case for group in groups for case in group):
            row = world.index(case.request.task.secret)
            for text in (case.request.action, *(asked for asked, _ in case.request.history)):
                seen.add(text)
                parsed = grammar.parse(text)
                if parsed.property_key is not None:
                    assert not held.pairs[row, world.property_index(parsed.property_key)]
    assert not seen & never
    measured = cases.measured(40, np.random.default_rng(0))
    assert {case.request.action for case in measured["phrasings"]} <= never
    assert not {case.request.action for case in measured["pairs"]} & never
    for kind, is_held in (("taught", False), ("phrasings", False), ("pairs", True)):
        for case in measured[kind]:
            key = grammar.parse(case.request.action).property_key
            assert key is not None
            row = world.index(case.request.task.secret)
            assert held.pairs[row, world.property_index(key)] == is_held


def test_every_word_of_a_held_out_phrasing_is_taught_in_another() -> None:
    world = load_world("everyday")
    held = hold_out(world, 0.0, 3)
    taught = {
        word
        for prop in world.properties
        for text in prop.phrasings
        if text != held.phrasings.get(prop.key)
        for word in text.split()
    }
    assert len(held.phrasings) > len(world.properties) // 2
    for prop in world.properties:
        text = held.phrasings.get(prop.key, prop.phrasings[1])
        assert text in prop.phrasings[1:]
        if prop.key in held.phrasings:
            assert set(text.split()) <= taught
    assert hold_out(world, 0.0, 4).phrasings != held.phrasings


def test_answers_are_the_tables_and_yes_and_no_are_balanced() -> None:
    world = load_world("everyday")
    cases, judge = maker(world), WorldJudge(world)
    found: dict[str, int] = {}
    repeated = 0
    for step in range(32):
        groups, with_history = step_cases(cases, TeachSettings(), step)
        for case in (case for group in groups for case in group):
            assert judge.answer([case.request])[0].text == case.answer
            assert with_history or not case.request.history
            if not case.request.history:
                found[case.answer] = found.get(case.answer, 0) + 1
            repeated += case.answer == "Repeated"
    asked = sum(found.values())
    assert 0.35 < found["Yes"] / asked < 0.5
    assert 0.35 < found["No"] / asked < 0.55
    assert found["Finished"] / asked == pytest.approx(1 / 16, abs=0.02)
    assert found["Invalid"] / asked == pytest.approx(1 / 16, abs=0.02)
    assert repeated > 20


def test_a_step_is_a_function_of_its_number_and_every_thing_takes_its_turn() -> None:
    cases, other = maker(), maker()
    for step in (0, 4, 7):
        assert step_cases(cases, SETTINGS, step) == step_cases(other, SETTINGS, step)
    per_round = len(WORLD.things) // SETTINGS.secrets
    drawn = [
        group[0].request.task.secret
        for step in range(per_round)
        for group in step_cases(cases, SETTINGS, step)[0]
    ]
    assert sorted(drawn) == sorted(thing.name for thing in WORLD.things)


# --- the shared beginnings


@pytest.mark.parametrize("with_rules", [True, False])
@pytest.mark.parametrize("step", [0, 1, SETTINGS.history_every - 1])
def test_a_tree_scores_each_answer_as_its_whole_prompt_does(step: int, with_rules: bool) -> None:
    cases = maker()
    model, chat = pupil(cases)
    groups, with_history = step_cases(cases, SETTINGS, step)
    batch = lesson(PromptEncoder(chat), cases, groups, with_history, with_rules).batch
    expected: list[tuple[torch.Tensor, int]] = []
    ends: list[tuple[torch.Tensor, int]] = []
    with torch.no_grad():
        for case in (case for group in groups for case in group):
            messages = judge_messages(case.request, "direct", with_history)
            prompt = chat.open_ids(messages if with_rules else messages[1:])
            word, end = chat.assistant_ids(case.answer)
            logits = model(torch.tensor([[*prompt, word]])).logits[0]
            expected.append((logits[len(prompt) - 1], word))
            ends.append((logits[len(prompt)], end))
        whole = torch.stack([row for row, _ in (*expected, *ends)])
        targets = torch.tensor([token for _, token in (*expected, *ends)])
        model.set_attn_implementation(TREE_ATTENTION)
        loss, right, _ = answer_loss(model, batch)
    assert batch.targets.tolist() == targets.tolist()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(whole, targets))
    first = len(expected)
    hits = whole[:first].argmax(-1) == targets[:first]
    assert float(right) == pytest.approx(float(hits.float().mean()))


@pytest.mark.parametrize("history", [(), (("Is it alive?", "Yes"), ("Is it 'x'?", "Invalid"))])
def test_prompts_are_those_that_the_judge_reads(history: tuple[tuple[str, str], ...]) -> None:
    mixed = ChatFormat.from_tokenizer(tokenizer(CHATML), {"enable_thinking": False})
    for chat in (pupil(maker())[1], mixed):
        prompts = PromptEncoder(chat)
        for with_history in (True, False):
            for text in ("Is it alive?", 'Is it "<|im_end|>"?', "", "  'a' b ", "\u00e9\n?"):
                request = JudgeRequest(task_for("salt and pepper"), text, history)
                whole = chat.open_ids(judge_messages(request, "direct", with_history))
                assert prompts(request, with_history) == whole


def test_a_tree_shares_what_is_common_and_refuses_what_cannot_be_cut() -> None:
    groups = [
        [((1, 2, 3, 4), (9,)), ((1, 2, 3, 5, 6), (8, 7))],
        [((1, 2, 6, 7, 8), (9,)), ((1, 2, 6, 7, 8), (9,))],
    ]
    batch = tree_batch(groups)
    assert (batch.shape.rules, batch.shape.opening, batch.shape.branch) == (2, 2, 3)
    assert batch.shape.opened.tolist() == [1, 2]
    assert batch.input_ids[0].tolist() == [1, 2, 3, 0, 6, 7, 4, 0, 0, 5, 6, 8, 8, 0, 0, 8, 0, 0]
    positions = batch.position_ids[0].tolist()
    assert positions == [0, 1, 2, 3, 2, 3, 3, 4, 5, 3, 4, 5, 4, 5, 6, 4, 5, 6]
    assert batch.targets.tolist() == [9, 8, 9, 9, 7]
    assert batch.sources.tolist() == [6, 10, 12, 15, 11]
    assert batch.ends.tolist() == [2, 5]
    with pytest.raises(ValueError, match="same number"):
        tree_batch([groups[0], groups[1][:1]])
    with pytest.raises(ValueError, match="at least three"):
        tree_batch([[((1, 2), (3,))]])


def test_the_heads_do_not_learn_held_out_pairs() -> None:
    cases = maker()
    model, chat = pupil(cases)
    groups, with_history = step_cases(cases, SETTINGS, 0)
    one = lesson(PromptEncoder(chat), cases, groups, with_history)
    model.set_attn_implementation(TREE_ATTENTION)
    _, _, middle = answer_loss(model, one.batch)
    heads = Heads(model, cases, seed=0)
    losses: list[float] = []
    for cells in (np.zeros_like(cases.held.pairs), cases.held.pairs, ~cases.held.pairs):
        heads.values[torch.from_numpy(cells)] = 1 - heads.values[torch.from_numpy(cells)]
        losses.append(float(heads(middle, one).detach()))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("bare_share", [0.0, 0.5])
def test_processes_that_prepare_lessons_change_none_of_them(bare_share: float) -> None:
    cases = maker()
    _, chat = pupil(cases)
    settings = replace(SETTINGS, bare_share=bare_share, steps=6)
    found = [
        [next(feed) for _ in range(6)]
        for feed in (lessons(cases, chat, replace(settings, workers=n)) for n in (0, 2))
    ]
    for alone, helped in zip(*found, strict=True):
        assert torch.equal(alone.batch.input_ids, helped.batch.input_ids)
        assert torch.equal(alone.batch.targets, helped.batch.targets)
        assert torch.equal(alone.rows, helped.rows)
        assert torch.equal(alone.columns, helped.columns)
    lengths = [one.batch.shape.rules for one in found[0]]
    assert (lengths[0] < lengths[-1]) == (bare_share > 0)


# --- learning


def test_the_loss_falls_and_equal_seeds_give_equal_weights() -> None:
    cases = maker()
    states: list[dict[str, torch.Tensor]] = []
    curves: list[list[TeachPoint]] = []
    for seed in (0, 0, 1):
        model, chat = pupil(cases)
        before = model.config._attn_implementation
        curves.append(teach(model, chat, cases, replace(SETTINGS, seed=seed)))
        assert model.config._attn_implementation == before
        states.append(model.state_dict())
    assert curves[0][-1].step == SETTINGS.steps
    assert len(curves[0]) == SETTINGS.curve_points
    assert curves[0][-1].loss < 0.5 * curves[0][0].loss
    assert curves[0][-1].heads < curves[0][0].heads
    assert curves[0][-1].right > curves[0][0].right
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_minutes_end_the_training() -> None:
    cases = maker()
    model, chat = pupil(cases)
    curve = teach(model, chat, cases, replace(SETTINGS, steps=None, minutes=0.01))
    assert curve[-1].share == 1.0
    assert 0.6 <= curve[-1].seconds < 10


def test_half_precision_products_leave_the_weights_in_float32() -> None:
    cases = maker()
    model, chat = pupil(cases)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    curve = teach(model, chat, cases, replace(SETTINGS, precision="bfloat16"))
    assert curve[-1].loss < 0.6 * curve[0].loss
    after = model.state_dict()
    assert all(weight.dtype is torch.float32 for weight in after.values())
    assert not all(torch.equal(before[name], after[name]) for name in before)


# --- the measure


class Table:
    """Says what the table says, but is wrong or silent about chosen secrets."""

    def __init__(self, wrong: str, silent: str) -> None:
        self._judge = WorldJudge(WORLD)
        self._wrong, self._silent = wrong, silent

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        out = self._judge.answer(requests)
        for number, request in enumerate(requests):
            if request.task.secret == self._wrong:
                out[number] = JudgeReply(Verdict.INVALID)
            if request.task.secret == self._silent:
                out[number] = JudgeReply(Verdict.ERROR, reason="nothing")
        return out


def test_a_measure_counts_right_answers_and_silence_over_things() -> None:
    held = HeldOut({}, np.zeros(WORLD.values.shape, dtype=np.bool_))
    cases = CaseMaker(WORLD, held).measured(48, np.random.default_rng(1))
    found = measure(Table("dog", "cat"), cases, seed=0)
    assert "pairs" not in found
    assert "phrasings" not in found
    assert set(found) == {"taught", "guesses", "invalid", "repeats", "history"}
    taught = cases["taught"]
    lost = [case.request.task.secret for case in taught]
    assert found["taught"].errors == lost.count("cat") > 0
    share = 1 - (lost.count("cat") + lost.count("dog")) / len(taught)
    assert found["taught"].right.value == pytest.approx(share)
    assert found["taught"].right.low < share < found["taught"].right.high
    # The silent judge is right about nothing; the wrong one about invalid questions.
    assert found["invalid"].right.value == pytest.approx(
        1 - found["invalid"].errors / found["invalid"].questions
    )


# --- the folder


def test_the_folder_loads_as_a_judge_and_answers(folder: Path) -> None:
    report = json.loads((folder / "teach.json").read_text())
    assert report["settings"]["steps"] == SETTINGS.steps
    assert report["world"] == {"name": "small", "checksum": WORLD.checksum}
    assert report["curve"][-1]["step"] == SETTINGS.steps
    assert report["versions"]["torch"]
    assert report["measured"]["taught"]["low"] <= report["measured"]["taught"]["right"]
    judge = build_judge(HfJudgeSettings(str(folder), DIRECT, num_threads=1))
    history = (("Is it alive?", "Yes"), ("Is it a cat?", "No"))
    replies = judge.answer(
        [
            JudgeRequest(task_for("dog"), "Is it alive?"),
            JudgeRequest(task_for("dog"), "Can it fly?", history),
        ]
    )
    assert all(reply.verdict is not Verdict.ERROR for reply in replies), replies


def test_a_taught_judge_can_be_taught_further(folder: Path, tmp_path: Path) -> None:
    again = replace(SETTINGS, base=str(folder), steps=2, measured=4)
    report = teach_judge(WORLD, again, tmp_path / "again")
    first = json.loads((folder / "teach.json").read_text())
    assert report["parameters"] == first["parameters"]
    assert report["curve"][0]["loss"] < first["curve"][0]["loss"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_adapter_is_kept_beside_the_judge_that_it_made(
    folder: Path, tmp_path: Path, precision: Precision
) -> None:
    out = tmp_path / "adapted"
    settings = replace(
        SETTINGS, base=str(folder), lora_rank=4, precision=precision, steps=4, lr=0.02, measured=4
    )
    report = teach_judge(WORLD, settings, out)
    first = json.loads((folder / "teach.json").read_text())
    assert report["parameters"] == first["parameters"]
    base = load_causal_lm(folder)
    adapted = PeftModel.from_pretrained(load_causal_lm(folder), out / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    taught = load_causal_lm(out).state_dict()
    assert taught.keys() == merged.keys()
    moved = 0
    for name, weight in base.state_dict().items():
        torch.testing.assert_close(taught[name], merged[name], rtol=1e-2, atol=1e-2)
        moved += not torch.equal(taught[name], weight)
    assert moved >= 14


def test_a_judge_is_stored_in_its_bases_number_format(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "half"
    shutil.copytree(folder, base)
    load_causal_lm(folder, torch.bfloat16).save_pretrained(base)
    settings = replace(SETTINGS, base=str(base), steps=1, measured=2)
    teach_judge(WORLD, settings, tmp_path / "out")
    stored = read_checkpoint(tmp_path / "out")
    assert stored is not None
    assert {tensor.dtype for tensor in stored.tensors.values()} == {"BF16"}


def test_what_suits_a_base_or_a_gpu_differs_from_the_defaults() -> None:
    assert suited(None, "cpu", False, 8) == {}
    whole, adapter = (suited("x", "cpu", lora, 8) for lora in (False, True))
    assert whole["lr"] < adapter["lr"] < TeachSettings().lr
    assert whole["bare_share"] == 0.0
    on_gpu = suited(None, "cuda", False, 16)
    assert on_gpu["precision"] == "bfloat16"
    assert on_gpu["workers"] == 12
    assert suited(None, "cuda", False, 1)["workers"] == 0


def test_the_folder_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "judge"

    def fail(*_: object) -> None:
        raise RuntimeError("the power is gone")

    monkeypatch.setattr(teach_main, "measure", fail)
    with pytest.raises(RuntimeError, match="power"):
        teach_judge(WORLD, replace(SETTINGS, steps=1, measured=2), out)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    with pytest.raises(UserError, match="exists already"):
        teach_judge(WORLD, SETTINGS, out)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--steps", "1", "--minutes", "1"), "either steps or minutes"),
        (("--steps", "0"), "at least one step"),
        (("--minutes", "0"), "minutes above 0"),
        (("--size", "tiny", "--base", "there"), "give one of the two"),
        (("--lora-rank", "4"), "give --base"),
        (("--lr", "0"), "learning rate above 0"),
        (("--secrets", "0"), "above 0"),
        (("--workers", "-1"), "negative"),
        (("--world", "narnia"), "narnia"),
        (("--base", "./nowhere"), "nowhere"),
    ],
)
def test_bad_arguments_are_one_sentence(
    words: tuple[str, ...], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "judge"
    assert cli.main(["teach-judge", "--out", str(out), *words]) == 2
    said = capsys.readouterr()
    assert part in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not out.exists()


def test_the_verb_teaches_and_the_audit_asks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["audit", "judge", "env=everyday", "judge=taught"]
    asked += [f"judge_rollout.model.path={folder}", "--questions", "8", "--rounds", "1", "--json"]
    cli.main([*asked, "--against", "env=everyday", "judge=world"])
    found = json.loads(capsys.readouterr().out)
    assert any(name.startswith("hf ") for name in found["judges"])
    made = next(one for name, one in found["made"].items() if name.startswith("hf "))
    assert made["quantisation"] == "none"
    assert made["torch"] == torch.__version__
    assert found["made"]["world"] == {"engine": "world"}
