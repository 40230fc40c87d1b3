"""The models that orsd asks: the frozen base, and settings that are refused by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rubric_fakes import LETTERS, contrast_of, group_of, models_of
from training_fakes import settings_of

from delta_belief_rl.algo.scorers.roles import Ask, Failure, FailureKind, Roles
from delta_belief_rl.algo.scorers.rubric import RubricSettings
from delta_belief_rl.algo.scorers.rubric_model import check_asks
from delta_belief_rl.algo.scorers.rubric_rules import Criterion
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import check
from delta_belief_rl.engines.fake_engine import FakeEngine
from delta_belief_rl.engines.pump import EngineRouter
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.actor import PolicyActor
from delta_belief_rl.trainer.actor_settings import BASE
from delta_belief_rl.trainer.rubric_settings import (
    check_rubrics,
    rubric_contexts,
    rubric_models,
    rubric_roles,
)
from delta_belief_rl.trainer.rubrics import CHECKED, BaseChecker, PolicyWriter, shares
from delta_belief_rl.trainer.scoring import GameScore
from delta_belief_rl.trainer.settings import actor_settings
from delta_belief_rl.types import UserError

# --- the frozen base ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.from_tokenizer(load_tokenizer("delta_belief_rl/assets/agent"))


@dataclass
class Ranks:
    """Says how likely each scored token is."""

    logp: Callable[[int], float]
    asked: list[ScoreRequest] = field(default_factory=list[ScoreRequest])

    async def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        self.asked += games
        out: list[GameScore] = []
        for number, game in enumerate(games):
            count = len(game.views[CHECKED].action_positions)
            logp = np.full(count, self.logp(number))
            out.append(GameScore(np.zeros(1), 0.0, {CHECKED: logp}, {}))
        return out


def ask_of(rules: int, game: int = 0) -> Ask:
    bundle = [Criterion(f"Be number {n}.", "model") for n in range(rules)]
    return check_asks(contrast_of(group_of()), [bundle], 1)[game]


def test_the_base_reads_both_answers_and_weighs_yes_against_no(chat: ChatFormat) -> None:
    # The answers of an ask follow each other: yes, then no.
    ranks = Ranks(lambda number: -0.5 - number)
    asks = [ask_of(2), ask_of(1, game=1)]
    values: Any = asyncio.run(BaseChecker(ranks, chat, models_of()).check(asks))
    views = [game.views[CHECKED] for game in ranks.asked]
    # The policy itself reads next to nothing.
    assert all(len(game.token_ids) == 2 for game in ranks.asked)
    sizes: list[int] = []
    for place, (view, word) in enumerate(zip(views, ("yes", "no") * 2, strict=True)):
        ask, ids = asks[place // 2], list(view.token_ids)
        opening = chat.open_ids(ask.render(400))
        assert tuple(ids[: len(opening)]) == opening
        scored = [ids[position] for position in view.action_positions]
        assert chat.decode(scored).replace(" ", "") == word * ask.values
        assert min(view.action_positions) > len(opening)
        sizes.append(len(scored) // ask.values)
    odds = [(-0.5 - place) * size for place, size in enumerate(sizes)]
    np.testing.assert_allclose(values[0], [1 / (1 + np.exp(odds[1] - odds[0]))] * 2)
    np.testing.assert_allclose(values[1], [1 / (1 + np.exp(odds[3] - odds[2]))])


def test_shares_of_a_yes_stay_in_bounds() -> None:
    yes, no = np.array([-1.0, -900.0, 0.0, np.nan]), np.array([-1.0, 0.0, -900.0, 0.0])
    assert shares(yes, no) == [0.5, 0.0, 1.0, None]


def test_the_base_stays_frozen_while_the_adapter_learns(chat: ChatFormat) -> None:
    agent = Path("delta_belief_rl/assets/agent")
    actor = PolicyActor(settings_of(agent, beliefs=(), contexts=((CHECKED, BASE),)))
    views: list[Sequence[int]] = []

    class Rank:
        async def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
            views.extend(game.views[CHECKED].token_ids for game in games)
            return actor.score(games)

    checker = BaseChecker(Rank(), chat, models_of())
    asks = [ask_of(2), ask_of(1, game=1)]
    before: Any = asyncio.run(checker.check(asks))
    read = actor.probe(views[0])
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    assert np.abs(actor.probe(views[0]) - read).max() > 0.01
    assert asyncio.run(checker.check(asks)) == before
    assert all(0.0 <= value <= 1.0 for values in before for value in values)
    # By hand, from the model as it was loaded.
    model = load_causal_lm(str(agent), torch.float32, "cpu")
    logps: list[float] = []
    for word, view in zip(("yes", "no"), views[2:4], strict=True):
        ids = torch.tensor([list(view)])
        with torch.no_grad():
            told = model(ids).logits.log_softmax(-1)[0]
        head = len(chat.encode_with_offsets("1:")[0])
        count = len(chat.encode_with_offsets(f"1: {word}")[0]) - head
        places = range(ids.shape[1] - count, ids.shape[1])
        logps.append(sum(float(told[place - 1, ids[0, place]]) for place in places))
    np.testing.assert_allclose(before[1], [1 / (1 + np.exp(logps[1] - logps[0]))], rtol=1e-4)


def test_the_base_has_no_value_where_its_log_prob_is_none(chat: ChatFormat) -> None:
    checker = BaseChecker(Ranks(lambda _number: float("nan")), chat, models_of())
    assert asyncio.run(checker.check([ask_of(2)])) == [[None, None]]


def test_the_base_is_not_asked_for_what_does_not_fit(chat: ChatFormat) -> None:
    ranks = Ranks(lambda _number: 0.0)
    checker = BaseChecker(ranks, chat, models_of(prompt_tokens=50))
    (found,) = asyncio.run(checker.check([ask_of(1)]))
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.PROMPT
    assert ranks.asked == []


# --- settings -------------------------------------------------------------------------------------

RUN = ("experiment=quickstart", "algorithm=orsd")
BOTH = ("algorithm.orsd.writer=model", "algorithm.orsd.verifier=model")
ROOM = "data.max_prompt_length=2000"


def test_settings_that_fit_are_taken() -> None:
    check(load_config([*RUN, *BOTH, ROOM])[0])
    check(load_config([*RUN, BOTH[1], "algorithm.orsd.verifier_model=some/model"])[0])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("algorithm.orsd.writer=model",), "cannot check what a model writes"),
        ((*BOTH, "algorithm.orsd.verifier_model=''"), "algorithm.orsd.verifier_model"),
        (("algorithm.orsd.deadline_s=0",), "algorithm.orsd.deadline_s must be above 0"),
        (("algorithm.orsd.writer_tokens=0",), "algorithm.orsd.writer_tokens must be at least 1"),
        (("algorithm.orsd.prompt_tokens=0",), "algorithm.orsd.prompt_tokens must be at least 1"),
        (("algorithm.orsd.writer_temperature=-1",), "algorithm.orsd.writer_temperature"),
        (("algorithm.orsd.writer=judge",), "algorithm.orsd.writer"),
        (
            (*BOTH, "actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.adapters=[]"),
            "algorithm.orsd.verifier_model=base needs LoRA",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(more: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        check(load_config([*RUN, *more])[0])


@pytest.mark.parametrize("wrong", [{"writer": "model"}, {"writer": "judge"}, {"verifier": "api"}])
def test_a_rubric_is_refused_whose_parts_do_not_fit(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"algorithm\.orsd\.(writer|verifier)"):
        RubricSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_tokens", 0), ("writer_tokens", 0), ("writer_temperature", -0.1), ("deadline", 0.0)],
)
def test_how_models_are_asked_has_ranges(name: str, value: float) -> None:
    with pytest.raises(UserError, match=r"algorithm\.orsd"):
        models_of(**{name: value})


def test_U2_a_prompt_that_no_engine_can_hold_is_refused_before_the_run(chat: ChatFormat) -> None:
    small, _ = load_config([*RUN, *BOTH])
    with pytest.raises(UserError, match=r"raise data\.max_prompt_length"):
        check_rubrics(small, chat)
    check_rubrics(load_config([*RUN, *BOTH, ROOM])[0], chat)
    check_rubrics(load_config([*RUN])[0], chat)


@pytest.mark.parametrize("writer", ["rules", "model"])
def test_U2_a_check_that_fits_no_game_is_refused_and_its_own_cure_is_one(
    writer: str, chat: ChatFormat
) -> None:
    own = (*RUN, BOTH[1], f"algorithm.orsd.writer={writer}", "algorithm.orsd.writer_tokens=8")
    # That of the quick start; and one that has room for what a writer is asked.
    more = f"data.max_prompt_length={256 if writer == 'rules' else 485}"
    with pytest.raises(UserError, match=r"algorithm\.orsd\.verifier=model needs") as caught:
        check_rubrics(load_config([*own, more])[0], chat)
    found = re.search(r"set (data\.max_prompt_length) to (\d+) or more", str(caught.value))
    assert found is not None
    cfg, _ = load_config([*own, f"{found[1]}={found[2]}"])
    check_rubrics(cfg, chat)
    # The longest rules of code leave room for some of a game.
    bundle = [Criterion("Let every question rule something out.", "model")] * 6
    group = group_of()
    games = [
        replace(game, turns=tuple(replace(one, action="Is it an animal?") for one in game.turns))
        for game in group.trajectories
    ]
    contrast = contrast_of(replace(group, trajectories=tuple(games)))
    ask = check_asks(contrast, [bundle], 1)[0]
    ranks = Ranks(lambda _number: -1.0)
    told = asyncio.run(BaseChecker(ranks, chat, rubric_models(cfg)).check([ask]))
    assert not isinstance(told[0], Failure)
    with pytest.raises(UserError, match=r"algorithm\.orsd\.verifier=model needs"):
        check_rubrics(load_config([*own, f"{found[1]}={int(found[2]) - 1}"])[0], chat)


@pytest.mark.parametrize("model", ["base", "some/model"])
def test_U2_too_few_tokens_for_a_check_are_refused_by_name(
    model: str, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    own = (*RUN, BOTH[1], ROOM, f"algorithm.orsd.verifier_model={model}")
    cfg, _ = load_config([*own, "algorithm.orsd.prompt_tokens=300"])
    with pytest.raises(UserError, match=r"algorithm\.orsd\.prompt_tokens is 300: set it to"):
        check_rubrics(cfg, chat)
    check_rubrics(load_config([*own, "algorithm.orsd.prompt_tokens=600"])[0], chat)


def test_a_service_is_asked_for_only_where_it_is_named(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    named, _ = load_config([*RUN, *BOTH, ROOM, "algorithm.orsd.verifier_model=some/model"])
    with pytest.raises(UserError, match="OPENAI_BASE_URL"):
        check_rubrics(named, chat)
    assert rubric_contexts(named) == ()


def test_ranks_read_for_the_check_only_where_the_base_checks() -> None:
    router, ranks = EngineRouter([FakeEngine(lambda _r: "", LETTERS.encode)]), Ranks(lambda _n: 0.0)
    for writer, verifier in product(("rules", "model"), repeat=2):
        if (writer, verifier) == ("model", "rules"):
            continue
        more = (f"algorithm.orsd.writer={writer}", f"algorithm.orsd.verifier={verifier}")
        cfg, _ = load_config([*RUN, ROOM, *more])
        roles = rubric_roles(cfg, LETTERS, router, ranks)
        assert isinstance(roles.writer, PolicyWriter) == (writer == "model")
        assert isinstance(roles.checker, BaseChecker) == (verifier == "model")
        contexts = actor_settings(cfg, "cpu", 1, 1).contexts
        assert ((CHECKED, BASE) in contexts) == (verifier == "model")
    off, _ = load_config([*RUN, ROOM, *BOTH, "algorithm.transforms=[]"])
    assert rubric_roles(off, LETTERS, router, ranks) == Roles()
    assert rubric_contexts(off) == ()
