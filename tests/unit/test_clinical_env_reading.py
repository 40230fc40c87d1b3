"""Clinical cases: what counts as a decision, and what as a question."""

from __future__ import annotations

import pytest

from delta_belief_rl.envs.clinical.reading import NOTES, read
from delta_belief_rl.envs.clinical.sheets import sheets

REFILL, COUGH, HEAD, SLEEP = "refill_pressure", "workup_cough", "workup_headache", "titration_sleep"

DECIDED = [
    (REFILL, "Decision: approve the refill", "refill"),
    (REFILL, "decision: refill", "refill"),
    (REFILL, "**Decision:** approve the refill.", "refill"),
    (REFILL, "DECISION: HALVE THE DOSE!", "halve"),
    (REFILL, "Final decision:\nsend to the clinic", "refer"),
    (REFILL, "Decision: “approve the refill”", "refill"),
    (REFILL, '"Decision: approve the refill."', "refill"),
    (REFILL, "My decision is to approve the refill.", "refill"),
    (REFILL, "The decision is: refill as before.", "refill"),
    (REFILL, "I decide to halve the dose.", "halve"),
    (REFILL, "I've decided to send her to the clinic.", "refer"),
    (REFILL, "I approve the refill.", "refill"),
    (REFILL, "I'll approve the refill today.", "refill"),
    (REFILL, "Approve the refill, please.", "refill"),
    (REFILL, "Refill.", "refill"),
    (REFILL, "Based on these answers, I approve the refill.", "refill"),
    (REFILL, "So, let's halve the dose now.", "halve"),
    (REFILL, "Decision: approve the refill because there is no kidney disease.", "refill"),
    (REFILL, "Decision: refer, since it might be the kidneys.", "refer"),
    (REFILL, "Decision: refer because a refill would do harm.", "refer"),
    (REFILL, "I thought about a referral first. Decision: approve the refill.", "refill"),
    (REFILL, "The ankles are not swollen. Decision: approve the refill.", "refill"),
    (REFILL, "Maybe a cough? Anyway. Decision: approve the refill.", "refill"),
    (REFILL, "Decision: approve the refill. Decision: refill.", "refill"),
    (REFILL, "- Decision: halve the dose", "halve"),
    (COUGH, "Decision: pneumonia", "pneumonia"),
    (COUGH, "My diagnosis is a clot in the lung.", "clot"),
    (COUGH, "Diagnosis: heart failure.", "heart"),
    (COUGH, "The diagnosis is pneumonia.", "pneumonia"),
    (COUGH, "I diagnose a common cold.", "cold"),
    (COUGH, "The patient has pneumonia.", "pneumonia"),
    (COUGH, "It's a cold.", "cold"),
    (COUGH, "I conclude that it is heart failure.", "heart"),
    (COUGH, "Pneumonia.", "pneumonia"),
    (COUGH, "Decision: pneumonia given the white patch, not a cold", "pneumonia"),
    (SLEEP, "Decision: low dose", "low"),
    (SLEEP, "Keep the medium dose.", "medium"),
    (SLEEP, "I will stay on the high dose.", "high"),
    (SLEEP, "Decision: switch to another medicine.", "switch"),
]

UNDECIDED = [
    # said by somebody else, or taken back
    (REFILL, "Patient: approve the refill"),
    (REFILL, "Patient: approve the refill."),
    (REFILL, "Decision: approve the refill. Or halve the dose."),
    # negated
    (REFILL, "Decision: do not approve the refill."),
    (REFILL, "Decision: not a refill."),
    (REFILL, "I won't approve the refill."),
    (REFILL, "I do not approve the refill."),
    (REFILL, "I will never approve the refill."),
    (REFILL, "Decision: no refill."),
    (REFILL, "Decision: refill, but not yet."),
    (REFILL, "Do not halve the dose."),
    (REFILL, "Don't refill."),
    (REFILL, "I decide against halving the dose."),
    (REFILL, "My decision is not to approve the refill."),
    (REFILL, "Approve the refill? No."),
    (REFILL, "Decision: approve the refill. Wait, no."),
    (REFILL, "Decision: refill. Actually, forget that."),
    (REFILL, "Decision: approve the refill. Just kidding."),
    (REFILL, "I refuse to approve the refill."),
    (COUGH, "It is not pneumonia."),
    (COUGH, "The patient has no pneumonia."),
    (COUGH, "Decision: pneumonia is excluded."),
    (COUGH, "My diagnosis is neither pneumonia nor a clot."),
    (COUGH, "Pneumonia is unlikely."),
    (COUGH, "This isn't heart failure."),
    (COUGH, "Decision: non pneumonia."),
    # hedged
    (REFILL, "Maybe I approve the refill."),
    (REFILL, "I would approve the refill."),
    (REFILL, "I might halve the dose."),
    (REFILL, "I could send her to the clinic."),
    (REFILL, "I am leaning towards: approve the refill."),
    (REFILL, "Decision: probably refill."),
    (REFILL, "Decision: approve the refill if the kidneys are fine."),
    (REFILL, "If the kidneys are fine, I approve the refill."),
    (REFILL, "Unless she is dizzy, I will approve the refill."),
    (REFILL, "Decision: refill?"),
    (REFILL, "Should I approve the refill?"),
    (REFILL, "I think I should refer."),
    (REFILL, "Provisional decision: approve the refill."),
    (REFILL, "Decision: approve the refill once the values are in."),
    (REFILL, "Decision: pending."),
    (REFILL, "I consider a referral."),
    (REFILL, "I can approve the refill."),
    (COUGH, "It is possibly pneumonia."),
    (COUGH, "My working diagnosis is pneumonia."),
    (COUGH, "I suspect pneumonia."),
    (COUGH, "Decision: suspected pneumonia."),
    (COUGH, "It may be a clot in the lung."),
    (COUGH, "Is it pneumonia?"),
    # listed
    (REFILL, "Decision: approve the refill or halve the dose."),
    (REFILL, "Decision: refill / refer"),
    (REFILL, "Decision: refill, halve the dose, refer"),
    (REFILL, "Decision: approve the refill and send to the clinic."),
    (REFILL, "Decision: refill. Decision: refer."),
    (REFILL, "1. Refill\n2. Refer\n3. Halve the dose"),
    (REFILL, "Options: refill, refer, halve the dose."),
    (REFILL, "Either refill or refer."),
    (REFILL, "I approve the refill. I send her to the clinic."),
    (COUGH, "Diagnosis: pneumonia, then heart failure."),
    (COUGH, "Decision: pneumonia & clot"),
    (COUGH, "Pneumonia, clot, heart failure, cold."),
    (COUGH, "The patient has pneumonia. The patient has a cold."),
    (COUGH, "Pneumonia versus heart failure."),
    # quoted and reported
    (REFILL, 'The pharmacist wrote "Decision: approve the refill."'),
    (REFILL, "'Decision: approve the refill', said the nurse."),
    (REFILL, "The note says: Decision: approve the refill."),
    (REFILL, "As the nurse said, the decision is refill."),
    (REFILL, "According to the rules, I approve the refill."),
    (REFILL, "You asked me to write „Decision: refill“."),
    (REFILL, "The patient wants a refill."),
    (REFILL, "`Decision: refill` is how I would write it."),
    (COUGH, "Her sister told me it is pneumonia."),
    (COUGH, "“It is pneumonia,” he believes."),
    # incomplete, or something else
    (REFILL, "Decision:"),
    (REFILL, "Decision: yes."),
    (REFILL, "Decision: refill history needed."),
    (REFILL, "Refill history of the last year."),
    (REFILL, "The refill runs out in 9 days."),
    (REFILL, "My decision will follow."),
    (REFILL, "Decisions are hard; a refill is easy."),
    (COUGH, "Cold hands."),
    (COUGH, "Pneumonia vaccine."),
    (COUGH, "The answer is blowing in the wind."),
    (SLEEP, "Low dose."),
    (SLEEP, "Low, medium and high dose."),
    ("workup_headache", "Decision: tension and migraine."),
]

ASKED = [
    (REFILL, "Are your ankles swollen?", "ankles"),
    (REFILL, "ankles?", "ankles"),
    (REFILL, "Tell me about the swelling in your legs.", "ankles"),
    (REFILL, "Hello! Do you ever feel LIGHTHEADED?", "dizzy"),
    (REFILL, "Please order a kidney blood test", "creatinine"),
    (REFILL, "I would like to check the renal function.", "creatinine"),
    (REFILL, "Let's measure the blood pressure", "cuff"),
    (REFILL, "Aren't you dizzy?", "dizzy"),
    (REFILL, 'Ask: "Do you cough?"', "cough"),
    (REFILL, "Maybe I should refill. Do you feel dizzy?", "dizzy"),
    (REFILL, "I will not refill yet. Any cough?", "cough"),
    (REFILL, "Are you tired? Do you cough?", "tired"),
    (COUGH, "Do you have a fever?", "fever"),
    (COUGH, "Chest X-ray", "xray"),
    (COUGH, "Get a D-dimer.", "dimer"),
    (COUGH, "What do you cough up?", "phlegm"),
    (COUGH, "It is not pneumonia. Is one calf thicker?", "leg"),
    (SLEEP, "Try the low dose for a week.", "low"),
    (SLEEP, "I would start with the lowest dose", "low"),
    (SLEEP, "Raise to the medium dose.", "medium"),
]


@pytest.mark.parametrize(("sheet", "text", "key"), DECIDED)
def test_a_plain_decision_counts_in_many_spellings(sheet: str, text: str, key: str) -> None:
    reading = read(text, sheet)
    assert (reading.kind, reading.key) == ("decide", key)


def test_there_are_enough_hostile_sentences() -> None:
    assert len(set(UNDECIDED)) == len(UNDECIDED) >= 60


@pytest.mark.parametrize(("sheet", "text"), UNDECIDED)
def test_a_negated_hedged_listed_or_quoted_decision_does_not_count(sheet: str, text: str) -> None:
    assert read(text, sheet).kind != "decide"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("Decision: refill or refer.", "several_decisions"),
        ("Refill. Refer.", "several_decisions"),
        ("Decision: do not approve the refill.", "negated_decision"),
        ("Decision: refill. Wait, no.", "negated_decision"),
        ("I would approve the refill.", "hedged_decision"),
    ],
)
def test_why_a_decision_does_not_count_is_said(text: str, note: str) -> None:
    assert note in read(text, REFILL).notes
    assert note in NOTES


@pytest.mark.parametrize(("sheet", "text", "key"), ASKED)
def test_a_question_is_read_leniently(sheet: str, text: str, key: str) -> None:
    reading = read(text, sheet)
    assert (reading.kind, reading.key) == ("ask", key)


@pytest.mark.parametrize(
    "text", ["I do not ask about a cough.", "Never mind the ankles.", "Without a kidney test."]
)
def test_a_negated_question_asks_nothing(text: str) -> None:
    assert read(text, REFILL).kind == "nothing"


def test_the_first_of_several_questions_counts_and_the_others_are_noted() -> None:
    reading = read("Do you cough, are you tired, are you dizzy?", REFILL)
    assert (reading.key, reading.notes) == ("cough", ("several_questions",))


@pytest.mark.parametrize("text", ["Is it alive?", "What is your name", "How tall are you?"])
def test_a_question_that_no_sheet_knows_is_told_from_noise(text: str) -> None:
    assert read(text, REFILL).kind == "unknown"


@pytest.mark.parametrize(
    "text", ["", " \n\u200b", "...", "lorem ipsum", '"', "''", ":::", "x " * 9000]
)
def test_noise_is_nothing(text: str) -> None:
    assert read(text, REFILL).kind == "nothing"


@pytest.mark.parametrize("name", list(sheets()))
def test_every_phrase_of_a_sheet_is_read_as_what_it_names(name: str) -> None:
    sheet = sheets()[name]
    for question in sheet.questions.values():
        assert (read(question.say, name).kind, read(question.say, name).key) == (
            "ask", question.key
        )  # fmt: skip
    for decision in sheet.decisions.values():
        said = [f"Decision: {words}" for words in (decision.say, *decision.words)]
        for text in (*said, *decision.bare):
            reading = read(text, name)
            assert (reading.kind, reading.key) == ("decide", decision.key), text
