"""Hints: what they tell, what they never tell, and the choice of rules of play."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from delta_belief_rl.algo import SCORERS
from delta_belief_rl.algo.base import Scorer
from delta_belief_rl.algo.scorers.hindsight import HindsightScorer
from delta_belief_rl.algo.scorers.hints import HintSettings, cut_words, exchange, outcome_of
from delta_belief_rl.algo.scorers.outcome import OutcomeScorer
from delta_belief_rl.algo.scorers.reference import ReferenceScorer
from delta_belief_rl.algo.scorers.retry import RetryScorer
from delta_belief_rl.algo.scorers.rubric import (
    RubricScorer,
    RubricSettings,
    choose_bundle,
    correlation,
    quotes_answer,
)
from delta_belief_rl.algo.scorers.rubric_rules import Criterion, RuleVerifier, RuleWriter
from delta_belief_rl.types import (
    Group,
    Message,
    StopReason,
    Task,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)

TASK = Task("t_0", "tw_q", "eagle", (Message("user", "Find it."),), aliases=("sea eagle",))


def turn_of(
    index: int,
    action: str,
    verdict: Verdict = Verdict.NO,
    *,
    progress: float = 0.0,
    key: str | None = None,
    question: str = "",
) -> Turn:
    won = verdict is Verdict.WIN
    replies = {
        Verdict.YES: "Yes",
        Verdict.NO: "No",
        Verdict.WIN: "Finished",
        Verdict.INVALID: "Invalid",
        Verdict.REPEATED: "Repeated",
        Verdict.ERROR: "Unknown",
    }
    asked = question or action
    return Turn(
        index=index,
        start=2 + 3 * index,
        end=4 + 3 * index,
        logprobs=(-0.1, -0.2),
        adapter_version=0,
        action=action,
        reply=replies[verdict],
        verdict=verdict,
        strict_win=won,
        compatible_win=won,
        is_guess=won or asked.startswith("Is it a"),
        action_key=asked.lower().strip("?") if key is None else key,
        progress=progress,
        question=question,
    )


def game_of(
    turns: Sequence[tuple[str, Verdict]] | Sequence[Turn],
    number: int = 0,
    stop: StopReason | None = None,
    task: Task = TASK,
) -> Trajectory:
    made = tuple(
        one if isinstance(one, Turn) else turn_of(index, one[0], one[1])
        for index, one in enumerate(turns)
    )
    won = bool(made) and made[-1].verdict is Verdict.WIN
    why = stop or (StopReason.WIN if won else StopReason.TURN_LIMIT)
    return Trajectory(task, number, tuple(range(2 + 3 * len(made))), made, why)


WON = game_of(
    [("Does it fly?", Verdict.YES), ("Is it big?", Verdict.YES), ("Is it an eagle?", Verdict.WIN)]
)
LOST = game_of(
    [("Is it metal?", Verdict.NO), ("Is it metal?", Verdict.REPEATED), ("Hm", Verdict.INVALID)], 1
)
DULL = game_of([("Is it metal?", Verdict.NO)], 2)
FAILED = game_of([("Does it fly?", Verdict.ERROR)], 3, StopReason.JUDGE_FAILED)
GROUP = Group(TASK, (WON, LOST, DULL, FAILED))


def told(scorer: Scorer, *groups: Group) -> list[str | None]:
    return scorer.hints(groups or (GROUP,))


# --- each of them ---------------------------------------------------------------------------------


def test_hindsight_tells_the_end_and_what_was_learnt_before_it() -> None:
    won, lost, dull, failed = told(HindsightScorer())
    assert won == (
        "The last exchange of this game will be: Is it an eagle? Finished "
        "Before it you will have learnt: Does it fly? Yes Is it big? Yes"
    )
    assert lost is not None
    assert dull is not None
    assert lost.endswith("Before it you will have learnt: Is it metal? No")
    assert dull == "The last exchange of this game will be: Is it metal? No"
    assert failed is None


def test_hindsight_says_the_secret_only_where_the_game_said_it() -> None:
    won, lost, dull, _ = told(HindsightScorer())
    assert won is not None
    assert "eagle" in won
    for hint in (lost, dull):
        assert hint is not None
        assert "eagle" not in hint


def test_hindsight_has_no_reward_in_it() -> None:
    for hint in told(HindsightScorer()):
        assert hint is None or not re.search(r"\d|reward|score|point|success|fail", hint.lower())


def test_the_outcome_is_told_in_one_form() -> None:
    hints = told(OutcomeScorer())
    assert hints == [
        "The outcome of this game will be: success.",
        "The outcome of this game will be: failure.",
        "The outcome of this game will be: failure.",
        None,
    ]
    one, other = (str(hint).split() for hint in hints[:2])
    assert sum(a != b for a, b in zip(one, other, strict=True)) == 1


def test_the_outcome_is_that_of_the_win_rule_or_of_the_grade() -> None:
    turn = turn_of(0, "An eagle is it?", Verdict.YES)
    loose = Turn(
        **{**{name: getattr(turn, name) for name in turn.__slots__}, "compatible_win": True}
    )
    game = game_of([loose])
    group = Group(TASK, (game,))
    assert told(OutcomeScorer(HintSettings("compatible")), group)[0] == (
        "The outcome of this game will be: success."
    )
    assert told(OutcomeScorer(HintSettings("strict")), group)[0] == (
        "The outcome of this game will be: failure."
    )
    graded = Turn(**{**{name: getattr(turn, name) for name in turn.__slots__}, "score": 0.4})
    assert outcome_of(game_of([graded]), "strict") == 0.4
    # The word is that by which a game's credit is protected, whatever its grade.
    scorer = OutcomeScorer(HintSettings("strict", threshold=0.4))
    hint = told(scorer, Group(TASK, (game_of([graded]),)))[0]
    assert hint == "The outcome of this game will be: failure."


def test_the_reference_is_the_secret() -> None:
    assert told(ReferenceScorer()) == ["The answer that you are looking for is: eagle."] * 4
    nameless = Task("t", "maze", "", ())
    assert told(
        ReferenceScorer(), Group(nameless, (game_of([("Go", Verdict.NO)], task=nameless),))
    ) == [None]


def test_a_retry_knows_a_success_else_what_was_refused_else_nothing() -> None:
    first = "An earlier try succeeded like this: Does it fly? Is it big? Is it an eagle?"
    alone = told(RetryScorer(), GROUP)
    # The one that succeeded has no other success to look at, and was refused nothing.
    assert alone == [None, first, first, first]
    assert told(RetryScorer(), Group(TASK, (LOST, DULL))) == [
        "In an earlier try this was not accepted: Is it metal? Repeated Hm Invalid",
        None,
    ]


def test_a_retry_takes_the_first_other_success_of_its_own_group() -> None:
    again = game_of([("Is it a sea eagle?", Verdict.WIN)], 1)
    hints = told(RetryScorer(), Group(TASK, (WON, again, DULL)), Group(TASK, (DULL,)))
    assert hints[0] == "An earlier try succeeded like this: Is it a sea eagle?"
    assert hints[1] == hints[2]
    assert hints[1] is not None
    assert hints[1].endswith("Is it big? Is it an eagle?")
    assert hints[3] is None


def test_a_demonstration_drops_thoughts_and_is_cut_from_the_right() -> None:
    turns = [
        turn_of(0, "I think it may fly. Does it fly?", Verdict.YES, question="Does it fly?"),
        turn_of(1, "Is it an eagle?", Verdict.WIN),
    ]
    group = Group(TASK, (game_of(turns), DULL))
    hint = told(RetryScorer(), group)[1]
    assert hint == "An earlier try succeeded like this: Does it fly? Is it an eagle?"
    hint = told(RetryScorer(HintSettings(words=4)), group)[1]
    assert hint == "An earlier try succeeded like this: Does it fly? Is ..."


@pytest.mark.parametrize("name", sorted(SCORERS))
def test_there_is_one_hint_for_each_game_in_order(name: str) -> None:
    scorer = SCORERS[name]()
    other = Group(TASK, (DULL, WON))
    together = told(scorer, GROUP, other)
    assert len(together) == 6
    assert together == told(scorer, GROUP) + told(scorer, other)
    assert scorer.hints(()) == []
    assert scorer.view == name
    assert scorer.model == "policy"


@pytest.mark.parametrize("name", sorted(SCORERS))
def test_hints_leave_the_games_as_they_are(name: str) -> None:
    before = [game.token_ids for game in GROUP.trajectories]
    told(SCORERS[name]())
    assert [game.token_ids for game in GROUP.trajectories] == before
    assert TASK.messages == (Message("user", "Find it."),)


def test_words_are_cut_with_a_mark() -> None:
    assert cut_words("one two  three", 3) == "one two three"
    assert cut_words("one two three", 2) == "one two ..."
    assert exchange(turn_of(0, "Does\n it  fly?", Verdict.YES)) == "Does it fly? Yes"


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"rule": "any"}, {"model": "judge"}, {"words": 0}, {"threshold": 1.5}):
        with pytest.raises(UserError):
            HintSettings(**wrong)  # type: ignore[arg-type]


# --- rules of play --------------------------------------------------------------------------------

SATISFACTION = np.array([[0.9, 0.2, 0.7, 0.3], [0.5, 0.5, 0.5, 0.5], [0.6, 0.7, 0.8, 0.1]])
RETURNS = np.array([1.0, 0.0, 1.0, 0.0])


def test_A13_the_bundle_that_tracks_the_outcome_matches_the_worked_example() -> None:
    found = [correlation(row, RETURNS) for row in SATISFACTION]
    assert found[0] == pytest.approx(0.961074, abs=1e-5)
    assert found[1] is None
    assert found[2] == pytest.approx(0.557086, abs=1e-5)
    assert choose_bundle(SATISFACTION, RETURNS, 0.1) == 0
    assert choose_bundle(SATISFACTION[1:], RETURNS, 0.1) == 1
    assert choose_bundle(SATISFACTION[1:], RETURNS, 0.6) is None
    assert choose_bundle(SATISFACTION, np.ones(4), 0.0) is None
    assert choose_bundle(-SATISFACTION, RETURNS, 0.0) is None


def test_A13_ranks_may_correlate_instead_of_values() -> None:
    outcome = np.array([0.0, 1.0, 2.0, 100.0])
    rows = np.array([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 1.0]])
    assert choose_bundle(rows, outcome, 0.1, "pearson") == 1
    assert choose_bundle(rows, outcome, 0.1, "spearman") == 0


def played(*turns: Turn) -> Trajectory:
    return game_of(turns)


def test_rules_are_predicates_on_what_happened() -> None:
    turns = [
        turn_of(0, "Does it fly?", Verdict.YES, progress=0.0),
        turn_of(1, "Does it fly?", Verdict.REPEATED, progress=1.0),
        turn_of(2, "Hm", Verdict.INVALID, progress=1.0),
        turn_of(3, "Is it a bee?", Verdict.NO, progress=1.0),
        turn_of(4, "Does it sing?", Verdict.ERROR, progress=9.0),
    ]
    game, check = played(*turns), RuleVerifier().satisfaction
    assert check(game, Criterion("", "no_repeat")) == pytest.approx(3 / 4)
    assert check(game, Criterion("", "clear")) == pytest.approx(3 / 4)
    assert check(game, Criterion("", "narrows")) == pytest.approx(1 / 3)
    assert check(game, Criterion("", "guess_late", "1")) == 1.0
    assert check(game, Criterion("", "guess_late", "2")) == 0.0
    assert check(played(turns[0]), Criterion("", "guess_late", "9")) == 1.0
    assert check(game, Criterion("", "begin", "does it fly")) == 1.0
    assert check(game, Criterion("", "begin", "hm")) == 0.0
    assert check(game, Criterion("", "ask", "is it a bee")) == 1.0
    assert check(game, Criterion("", "ask", "does it sing")) == 0.0
    assert check(game, Criterion("", "written by a model")) is None
    assert check(FAILED, Criterion("", "clear")) is None
    assert check(played(turns[0]), Criterion("", "narrows")) is None


def test_a_writer_takes_what_the_best_games_kept_and_the_worst_did_not() -> None:
    bundles = RuleWriter().bundles([WON], [LOST], 4, 6)
    kinds = [[one.kind for one in bundle] for bundle in bundles]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(kinds))
    assert len(kinds[-1]) <= 6
    named = {(one.kind, one.argument) for one in bundles[-1]}
    assert ("begin", "does it fly") in named
    assert ("ask", "is it big") in named
    assert ("ask", "is it an eagle") not in named  # a guess is no advice
    assert {one.kind for one in bundles[-1]} >= {"no_repeat", "clear"}
    assert RuleWriter().bundles([LOST], [LOST], 4, 6) == []
    assert [len(bundle) for bundle in RuleWriter().bundles([WON], [LOST], 2, 2)] == [1, 2]


def test_a_bundle_begins_in_one_way_and_asks_nothing_twice() -> None:
    other = game_of([("Is it big?", Verdict.YES), ("Is it an eagle?", Verdict.WIN)], 5)
    bundle = RuleWriter().bundles([WON, other], [LOST], 1, 9)[0]
    full = RuleWriter().bundles([WON, other], [LOST], 4, 9)[-1]
    assert bundle == full  # a single bundle holds them all
    assert [one.argument for one in full if one.kind == "begin"] == ["does it fly"]
    assert "does it fly" not in [one.argument for one in full if one.kind == "ask"]
    assert len({one.argument for one in full if one.kind == "ask"}) == len(
        [one for one in full if one.kind == "ask"]
    )


def test_only_games_that_differ_in_outcome_are_contrasted() -> None:
    class Watcher:
        def bundles(
            self, best: Sequence[Trajectory], worst: Sequence[Trajectory], count: int, size: int
        ) -> list[list[Criterion]]:
            seen.append((best, worst))
            return []

    seen: list[tuple[Sequence[Trajectory], Sequence[Trajectory]]] = []
    told(RubricScorer(writer=Watcher()), Group(TASK, (LOST, WON, DULL)))
    assert seen == [([WON], [DULL, LOST])]


@pytest.mark.parametrize(
    ("secret", "text", "told"),
    [
        ("Paris, France", "Ask whether it is Paris.", True),
        ("Paris, France", "Ask whether it is in France.", False),
        ("St. John's, Newfoundland, Canada", "Say St John's early.", True),
        ("Washington, D.C.", "Guess Washington, D.C.", True),
        ("D.C.", "Guess D.C.!", True),
        ("C++", "Ask for C++, then for more.", True),
        ("dog", "Ask about dogs.", True),
        ("dogs", "Ask about a dog.", True),
        ("box", "Think of boxes.", True),
        ("dog", "Ask about dogma.", False),
        ("New York", "Is it New-York?", True),
        ("New York", "Is it NEW  YORK?", True),
        ("New York", "Is it a new yorker?", False),
        ("ice cream", "Is it icecream?", True),
        ("ice cream", "Is it Ice_cream?", True),
        ("São Paulo", "Is it Sao Paulo?", True),
        ("Sao Paulo", "Is it S\u0061\u0303o Paulo?", True),
        ("♥", "Say ♥ at once.", True),
        ("glass", "Look at the glasses.", True),
        ("in the wardrobe in the bedroom", "Go to the bedroom and open the wardrobe.", True),
        ("in the wardrobe in the bedroom", "Look into the cupboard in the kitchen.", False),
        ("a b c d e", "Read what is there.", False),
        (" ", "Say nothing.", False),
    ],
)
def test_the_answer_is_found_however_it_is_written(secret: str, text: str, told: bool) -> None:
    assert quotes_answer(text, Task("t", "maze", secret, ())) is told
    assert quotes_answer(text, Task("t", "maze", "eagle", (), aliases=(secret,))) is told


def test_a_rule_that_names_the_answer_is_left_out() -> None:
    assert quotes_answer("Begin with: Is it an Eagle?", TASK)
    assert quotes_answer("Ask about a SEA EAGLE.", TASK)
    assert not quotes_answer("Ask about beagles.", TASK)
    assert not quotes_answer("Anything", Task("t", "maze", "", ()))
    sly = game_of(
        [
            turn_of(0, "Would an eagle eat it?", Verdict.YES),
            turn_of(1, "Is it an eagle?", Verdict.WIN),
        ]
    )
    for hint in told(RubricScorer(), Group(TASK, (sly, DULL, DULL, sly))):
        assert hint is None or "eagle" not in hint


def test_all_games_of_a_group_get_the_rules_that_track_success() -> None:
    hints = told(RubricScorer())
    assert hints[0] == hints[1] == hints[2]
    assert hints[0] is not None
    assert hints[0].startswith("Rules that helped before:")
    assert hints[3] is None


def test_A13_without_a_contrast_there_are_no_rules() -> None:
    for games in ((WON, WON), (LOST, DULL), (WON,), (FAILED, WON)):
        assert told(RubricScorer(), Group(TASK, games)) == [None] * len(games)


class Scribe:
    """A writer of rules that code cannot check, and one of its own."""

    def __init__(self, *kinds: str) -> None:
        self.kinds, self.asked = kinds, 0

    def bundles(
        self, best: Sequence[Trajectory], worst: Sequence[Trajectory], count: int, size: int
    ) -> list[list[Criterion]]:
        self.asked += 1
        assert best[0] is WON
        assert WON not in worst[:1]
        return [[Criterion(f"Be {kind}.", kind)] for kind in self.kinds]


class Reader:
    """Finds a kind in games by table."""

    def __init__(self, **found: Sequence[float | None]) -> None:
        self.found = found

    def satisfaction(self, game: Trajectory, criterion: Criterion) -> float | None:
        return self.found[criterion.kind][game.game]


def test_a_writer_and_a_verifier_of_another_kind_can_be_used() -> None:
    reader = Reader(bold=[0.9, 0.2, 0.3], calm=[0.1, 0.8, 0.9])
    scorer = RubricScorer(writer=Scribe("calm", "bold"), verifier=reader)
    group = Group(TASK, (WON, LOST, DULL))
    assert told(scorer, group) == ["Rules that helped before: Be bold."] * 3


@pytest.mark.parametrize("nonsense", [None, float("nan"), 7.0, -1.0])
def test_what_a_verifier_does_not_say_clearly_counts_as_zero(nonsense: float | None) -> None:
    group = Group(TASK, (WON, LOST, DULL))
    reader = Reader(bold=[nonsense, 0.0, 0.0], calm=[0.6, 0.5, 0.5])
    scorer = RubricScorer(writer=Scribe("bold", "calm"), verifier=reader)
    assert told(scorer, group)[0] == "Rules that helped before: Be calm."
    flat = RubricScorer(writer=Scribe("bold"), verifier=reader)
    assert told(flat, group) == [None] * 3


def test_a_writer_that_fails_stops_nothing() -> None:
    writer = Scribe()
    group = Group(TASK, (WON, LOST, DULL))
    assert told(RubricScorer(writer=writer), group) == [None] * 3
    assert writer.asked == 1


def test_rubric_settings_out_of_range_are_refused() -> None:
    for wrong in (
        {"bundles": 0},
        {"max_criteria": 0},
        {"num_best": 0},
        {"num_worst": 0},
        {"min_correlation": -0.1},
        {"correlation": "none"},
    ):
        with pytest.raises(UserError, match=r"algorithm\.orsd"):
            RubricSettings(**wrong)  # type: ignore[arg-type]
