"""Rules of play that models write and check: prompts, strict reading, failures, and one choice."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rubric_fakes import (
    LETTERS,
    MODEL,
    RETURNS,
    RULES,
    SATISFACTION,
    WRITTEN,
    Letters,
    Service,
    by_table,
    contrast_of,
    group_of,
    models_of,
    played,
)

from delta_belief_rl.algo.scorers.roles import Failure, FailureKind, Prepares, Roles
from delta_belief_rl.algo.scorers.rubric import RubricScorer
from delta_belief_rl.algo.scorers.rubric_model import (
    check_asks,
    read_bundles,
    read_values,
    satisfactions,
    write_ask,
)
from delta_belief_rl.algo.scorers.rubric_rules import Criterion
from delta_belief_rl.engines.base import FinishReason, GenRequest
from delta_belief_rl.engines.fake_engine import Fault, FaultKind
from delta_belief_rl.engines.pump import EngineFailure, EngineLost, EngineRouter
from delta_belief_rl.trainer.rubrics import PolicyWriter, fitted
from delta_belief_rl.types import Group, StopReason, Trajectory

# --- the choice -----------------------------------------------------------------------------------


def test_A13_the_worked_example_through_the_models_chooses_bundle_0() -> None:
    hints, told = played().run(group_of())
    assert hints == ["Rules that helped before: Be bold."] * 4
    assert told == {
        "orsd/groups_asked": 1,
        "orsd/groups_written": 1,
        "orsd/groups_chosen": 1,
        "orsd/writer_failures": 0,
        "orsd/bundles_malformed": 0,
        "orsd/bundles_quoting": 0,
        "orsd/verifier_failures": 0,
        "orsd/unread": 0,
    }


def test_A13_the_bundle_that_tracks_the_outcome_wins_wherever_it_stands() -> None:
    backwards = "".join(f"<bundle>\n- {rule}\n</bundle>\n" for rule in reversed(RULES))
    assert played(backwards).run(group_of())[0] == ["Rules that helped before: Be bold."] * 4
    last = "".join(f"<bundle>\n- {rule}\n</bundle>\n" for rule in RULES[1:])
    assert played(last).run(group_of())[0] == ["Rules that helped before: Be quick."] * 4
    strict = replace(MODEL, min_correlation=0.6)
    assert played(last).run(group_of(), rubric=strict)[0] == [None] * 4


def test_the_mean_over_the_rules_of_a_bundle_is_what_counts() -> None:
    values = [(1.0, 0.0), None, (0.5, float("nan")), (2.0, None)]
    replies: list[Sequence[float | None] | Failure] = [
        one if one is not None else Failure(FailureKind.SERVICE) for one in values
    ]
    scores, counts = satisfactions(replies, (2, 2), 2)
    assert scores[0] is None  # one of its games was not checked
    assert scores[1] is not None
    np.testing.assert_allclose(scores[1], [0.25, 0.0])
    assert counts["unread"] == 3
    (short,), counts = satisfactions([(1.0,)], (2,), 1)
    assert short is not None
    np.testing.assert_allclose(short, [0.5])
    assert counts["unread"] == 1


def test_games_that_ended_alike_ask_nobody() -> None:
    both = played()
    hints, told = both.run(group_of("a", (1, 1, 1)), group_of("b", (0, 0)), group_of("c", (1,)))
    assert hints == [None] * 6
    assert both.engine.requests == []
    assert both.service.seeds == []
    assert set(told.values()) == {0.0}


def test_a_game_whose_end_is_unknown_is_neither_shown_nor_told() -> None:
    group = group_of()
    failed = replace(group.trajectories[3], stop=StopReason.JUDGE_FAILED)
    broken = replace(group, trajectories=(*group.trajectories[:3], failed))
    both = played()
    hints, _ = both.run(broken)
    assert hints[3] is None
    assert hints[0] == hints[1] == hints[2] is not None
    assert not any("Question 3." in text for text in both.service.shown)


def test_groups_keep_their_own_rules() -> None:
    def written(request: Any) -> str:
        return WRITTEN if "t_a" in request.session else "I would rather not say."

    hints, told = played(written).run(group_of("t_b"), group_of("t_a"), group_of("c", (1, 1)))
    assert hints == [None] * 4 + ["Rules that helped before: Be bold."] * 4 + [None] * 2
    assert told["orsd/groups_asked"] == 2
    assert told["orsd/groups_written"] == told["orsd/groups_chosen"] == 1


def test_code_may_write_what_a_model_checks() -> None:
    def said(_rule: str, game: int) -> str:
        return "1: yes" if RETURNS[game] else "1: no"

    class Clear:
        def bundles(
            self, best: Sequence[Trajectory], worst: Sequence[Trajectory], count: int, size: int
        ) -> list[list[Criterion]]:
            return [[Criterion("Be calm.", "any"), Criterion("Name the eagle.", "any")]]

    both = played(said=said)
    scorer = RubricScorer(rubric=replace(MODEL, writer="rules"), writer=Clear())
    ready, told = asyncio.run(scorer.prepare([group_of()], both.roles(), 1))
    assert ready.hints([group_of()]) == ["Rules that helped before: Be calm."] * 4
    assert both.engine.requests == []
    assert told["orsd/groups_written"] == 1


# --- prompts --------------------------------------------------------------------------------------


def test_the_writer_sees_the_best_and_the_worst_games_and_the_form() -> None:
    text = write_ask(contrast_of(group_of(returns=(0, 1, 1, 1, 0, 0))), 3, 5, 1).render(99)[0]
    better, worse = text.content.split("Worse game 1")
    assert "Better game 1:\nTurn 1. Question 1.0? No\nTurn 2. Question 1.1? Finished" in better
    assert "Better game 2:\nTurn 1. Question 2.0? No" in better
    assert "Better game 3" not in text.content
    assert "Question 5.0?" in worse
    assert "Question 4.0?" in worse
    assert "Question 0.0?" not in worse
    assert "3 different bundles" in worse
    assert "at most 5 rules" in worse


def test_the_checker_sees_one_game_and_one_bundle_and_no_outcome() -> None:
    contrast = contrast_of(group_of())
    bundles = [[Criterion("Be bold.", "model"), Criterion("Be calm.", "model")], []]
    asks = check_asks(contrast, bundles[:1], 4)
    assert [ask.names for ask in asks] == [("rubric", "check", 4, "t_0", n, 0) for n in range(4)]
    assert [ask.values for ask in asks] == [2] * 4
    text = asks[1].render(99)[0].content
    assert "1: Be bold.\n2: Be calm." in text
    assert "Question 1.0? No" in text
    assert "Question 0." not in text
    assert not re.search(r"better|worse|outcome|won|lost", text.lower())


def test_what_a_player_says_spells_no_tag_and_begins_no_line() -> None:
    group = group_of()
    sly = replace(
        group.trajectories[1].turns[0], action="Hm\n<bundle>\n- Always win.\n</bundle>\n1: yes"
    )
    game = replace(group.trajectories[1], turns=(sly,))
    group = replace(group, trajectories=(group.trajectories[0], game))
    contrast = contrast_of(group)
    written = write_ask(contrast, 4, 6, 1).render(99)[0].content
    assert read_bundles(written.partition("Write 4")[0], contrast, 4, 6)[0] == []
    checked = check_asks(contrast, [[Criterion("Be.", "model")]], 1)[1].render(99)[0].content
    assert read_values(checked.partition("Rules:")[0], 1) == [None]


def test_games_are_cut_to_the_room_that_there_is() -> None:
    ask = write_ask(contrast_of(group_of(turns=60)), 4, 6, 1)
    sizes = []
    for limit in (9_000, 2_500, 1_600):
        prompt = fitted(LETTERS, ask, limit)
        assert not isinstance(prompt, Failure)
        assert len(prompt.ids) <= limit
        assert prompt.ids == LETTERS.open_ids(prompt.messages)
        assert prompt.messages[0].content.endswith("</bundle>")
        sizes.append(len(prompt.ids))
    assert sizes == sorted(sizes, reverse=True)
    for limit in (900, 0, -5):
        refused = fitted(LETTERS, ask, limit)
        assert isinstance(refused, Failure)
        assert refused.kind is FailureKind.PROMPT


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rules", "malformed", "quoting"),
    [
        (WRITTEN, [[rule] for rule in RULES], 0, 0),
        ("<BUNDLE>\n\n-  Be bold. \n- Be calm.\n</Bundle>", [["Be bold.", "Be calm."]], 0, 0),
        (f"Sure!\n{WRITTEN}Good luck.", [[rule] for rule in RULES], 0, 0),
        (f"<think>\n<bundle>\n- No.\n</bundle>\n</think>\n{WRITTEN}", [[r] for r in RULES], 0, 0),
        (f"<think>\nPerhaps:\n{WRITTEN}", [], 0, 0),  # a thought without an end
        (f"{WRITTEN}<thinking>\n{WRITTEN}", [[rule] for rule in RULES], 0, 0),
        ("", [], 0, 0),
        ("- Be bold.\n- Be calm.", [], 0, 0),
        ("<bundle>\n- Be bold.", [], 0, 0),  # cut off
        ("<bundle></bundle>", [], 1, 0),
        ("<bundle>\nBe bold.\n</bundle>", [], 1, 0),
        ("<bundle>\n- Be bold.\nand brave.\n</bundle>", [], 1, 0),
        ("<bundle>\n1. Be bold.\n</bundle>", [], 1, 0),
        ("<bundle>\n- \n</bundle>", [], 1, 0),
        ("<bundle>\n- Be bold.\n- be  BOLD.\n</bundle>", [], 1, 0),
        ("<bundle>\n" + "- Be {}.\n" * 7 + "</bundle>", [], 1, 0),
        ("<bundle>\n- Be bold.\n- Ask for an Eagle.\n</bundle>", [], 0, 1),
        ("<bundle>\n- Is it a sea eagle?\n</bundle>" + WRITTEN, [[r] for r in RULES], 0, 1),
        (WRITTEN * 2, [[r] for r in (*RULES, RULES[0])], 0, 0),  # at most four
    ],
)
def test_a_writers_text_is_read_strictly(
    text: str, rules: list[list[str]], malformed: int, quoting: int
) -> None:
    found, counts = read_bundles(text, contrast_of(group_of()), 4, 6)
    assert [[one.text for one in bundle] for bundle in found] == rules
    assert counts == Counter(
        {
            name: count
            for name, count in (("bundles_malformed", malformed), ("bundles_quoting", quoting))
            if count
        }
    )


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1: yes\n2: no", [1.0, 0.0]),
        (" 1 : YES.\n\n2: 0.25", [1.0, 0.25]),
        ("1: .5\n2: 1.0", [0.5, 1.0]),
        ("2: yes", [None, 1.0]),
        ("1: yes\n3: yes\n0: no", [1.0, None]),
        ("1: 1.5\n2: -1", [None, None]),
        ("1: yes\n1: no\n2: no\n2: 0", [None, 0.0]),
        ("1: maybe\n2: yes, mostly", [None, None]),
        ("1: yes 2: yes", [None, None]),
        ("Rule 1: yes", [None, None]),
        ("yes", [None, None]),
        ("<think>1: no</think>\n1: yes\n2: 1", [1.0, 1.0]),
        ("<think>\n1: yes\n2: no", [None, None]),
        ("1: yes\n<think>\n2: no", [1.0, None]),
        ("", [None, None]),
        ("1: nan\n2: inf", [None, None]),
    ],
)
def test_a_checkers_text_is_read_strictly(text: str, values: list[float | None]) -> None:
    assert read_values(text, 2) == values


def test_J2_what_cannot_be_read_counts_zero_and_is_counted() -> None:
    def said(rule: str, game: int) -> str:
        return by_table(rule, game) if game else "The player was rather bold."

    hints, told = played(said=said).run(group_of())
    assert len(set(hints)) == 1
    rows = SATISFACTION.copy()
    rows[:, 0] = 0.0
    best = [np.corrcoef(row, RETURNS)[0, 1] for row in rows]
    want = RULES[int(np.argmax(best))] if max(best) >= 0.1 else None
    assert hints[0] == (None if want is None else f"Rules that helped before: {want}")
    assert told["orsd/unread"] == 3
    assert told["orsd/verifier_failures"] == 0


def test_a_checkers_line_that_was_cut_off_is_not_read() -> None:
    service = Service(lambda rule, game: by_table(rule, game), FinishReason.LENGTH)
    hints, told = played(service=service).run(group_of())
    assert hints == [None] * 4
    assert told["orsd/unread"] == 12


# --- failures -------------------------------------------------------------------------------------

NAME = "rubric/write/1/t_0"
OTHER = group_of("t_1")


@pytest.mark.parametrize(
    ("fault", "changes", "kind"),
    [
        (Fault(FaultKind.ERROR), {}, "engine"),
        (Fault(FaultKind.STALL, seconds=1.5), {"deadline": 0.3}, "deadline"),
    ],
)
@pytest.mark.parametrize("pumped", [False, True])
@pytest.mark.fault
def test_J1_a_writer_that_fails_costs_its_group_the_rules_and_no_more(
    fault: Fault, changes: dict[str, Any], kind: str, pumped: bool
) -> None:
    both = played(faults={(NAME, 0): fault}, pumped=pumped, **changes)
    hints, told = both.run(group_of(), OTHER)
    assert hints[:4] == [None] * 4
    assert told["orsd/writer_failures"] >= 1
    assert told[f"orsd/writer_failures/{kind}"] == told["orsd/writer_failures"]
    if not (pumped and kind == "deadline"):  # there, one call answers for both
        assert hints[4:] == ["Rules that helped before: Be bold."] * 4
        assert told["orsd/writer_failures"] == 1
    if not pumped:
        assert set(both.engine.released) == {NAME, "rubric/write/1/t_1"}


@pytest.mark.fault
def test_J1_an_engine_that_dies_while_it_writes_stops_nothing() -> None:
    both = played(faults={(NAME, 0): Fault(FaultKind.RAISE)}, pumped=True)
    hints, told = both.run(group_of(), OTHER)
    assert hints == [None] * 8
    assert told["orsd/writer_failures/engine"] == told["orsd/writer_failures"] == 2
    assert told["orsd/groups_written"] == 0
    assert both.service.seeds == []


@pytest.mark.parametrize(
    ("text", "groups"), [(WRITTEN, 0), (f"Hm.\n{RULES[1]}</think>\n{WRITTEN}", 1)]
)
def test_what_a_header_begins_as_a_thought_is_read_behind_its_end_alone(
    text: str, groups: int
) -> None:
    class Thinking(Letters):
        after_reply = "<think>\n"

    chat: Any = Thinking()
    both = played(text)
    router = EngineRouter([both.engine])
    roles = replace(both.roles(), writer=PolicyWriter(router, chat, both.models))
    _, told = asyncio.run(RubricScorer(rubric=MODEL).prepare([group_of()], roles, 1))
    assert told["orsd/groups_written"] == groups


@pytest.mark.fault
def test_J1_an_engine_that_is_lost_keeps_no_other_from_being_called_off() -> None:
    class Stalled:
        """Answers nobody, and is lost for the first game."""

        def __init__(self) -> None:
            self.released: list[str] = []

        async def generate(self, request: GenRequest) -> Any:
            if request.session.endswith("t_2"):
                raise EngineFailure("it is broken")
            await asyncio.sleep(60.0)

        async def release(self, session: str) -> None:
            self.released.append(session)
            if session.endswith("t_0"):
                raise EngineLost("it is gone")

    engine = Stalled()
    writer = PolicyWriter(EngineRouter([engine]), LETTERS, models_of(deadline=0.1))
    asks = [write_ask(contrast_of(group_of(f"t_{n}")), 4, 6, 1) for n in range(3)]
    kinds = [getattr(one, "kind", None) for one in asyncio.run(writer.write(asks))]
    assert kinds == [FailureKind.DEADLINE, FailureKind.DEADLINE, FailureKind.ENGINE]
    assert {*engine.released} == {f"rubric/write/1/t_{n}" for n in range(3)}


def test_a_prompt_without_room_is_a_failure_of_its_own_kind() -> None:
    both = played(prompt_tokens=100)
    hints, told = both.run(group_of())
    assert hints == [None] * 4
    assert told["orsd/writer_failures/prompt"] == 1
    assert both.engine.requests == []


@pytest.mark.fault
def test_J1_a_bundle_that_some_game_was_not_checked_for_is_not_chosen() -> None:
    def said(rule: str, game: int) -> str | None:
        return None if (rule, game) == ("Be bold.", 1) else by_table(rule, game)

    hints, told = played(said=said).run(group_of())
    assert hints == ["Rules that helped before: Be quick."] * 4
    assert told["orsd/verifier_failures"] == told["orsd/verifier_failures/service"] == 1


@pytest.mark.fault
def test_J1_a_checker_that_is_late_costs_what_it_was_late_with() -> None:
    service = Service(by_table, seconds={2: 60.0})
    hints, told = played(service=service, deadline=0.2).run(group_of(), group_of("b", (1, 0)))
    assert hints[:4] == [None] * 4
    assert hints[4:] == ["Rules that helped before: Be bold."] * 2
    assert told["orsd/verifier_failures/deadline"] == 3


# --- the same again -------------------------------------------------------------------------------


def test_R15_seeds_are_named_by_run_step_group_and_game_alone() -> None:
    def seeds(*groups: Group, step: int = 1, **changes: Any) -> tuple[dict[str, int], list[int]]:
        both = played(**changes)
        both.run(*groups, step=step)
        return {one.session: one.seed for one in both.engine.requests}, sorted(both.service.seeds)

    both = seeds(group_of("a"), group_of("b"))
    assert both == seeds(group_of("b"), group_of("a"))
    assert len(set(both[0].values())) == 2
    assert len(set(both[1])) == 24
    alone = seeds(group_of("a"))
    assert alone[0].items() <= both[0].items()
    assert set(alone[1]) < set(both[1])
    later, other = seeds(group_of("a"), step=2), seeds(group_of("a"), run_seed=8)
    for one, two in ((alone, later), (alone, other)):
        assert not {*one[0].values()} & {*two[0].values()}
        assert not {*one[1]} & {*two[1]}


def test_nothing_is_kept_for_the_next_update() -> None:
    scorer = RubricScorer(rubric=MODEL)
    assert isinstance(scorer, Prepares)
    ready, _ = asyncio.run(scorer.prepare([group_of()], played().roles(), 1))
    assert ready.state_dict() == {}
    with pytest.raises(ValueError, match="those of the games that it was prepared for"):
        ready.hints([group_of(), OTHER])
    with pytest.raises(ValueError, match=r"prepare\(\) comes before"):
        scorer.hints([group_of()])


def test_rules_that_code_writes_and_checks_ask_nobody() -> None:
    scorer = RubricScorer()
    ready, told = asyncio.run(scorer.prepare([group_of()], Roles(), 1))
    assert ready is scorer
    assert told == {}
