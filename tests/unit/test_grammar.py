"""The question parser understands natural wording and never answers another question."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.envs.answers import candidate_list, strict_guess
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.phrases import questions_from_statement
from delta_belief_rl.envs.worlds.table import Property, World, load_world
from delta_belief_rl.types import UserError
from tests.worlds import PROPERTIES, THINGS, small_world

WORLD = small_world()
GRAMMAR = Grammar(WORLD)
PHRASINGS = [(key, phrasing) for key, phrasings in PROPERTIES for phrasing in phrasings]
NAMES = [(name, form) for name, aliases in THINGS for form in (name, *aliases)]

WRAPPERS = (
    "{}",
    "{}?",
    "{} ?",
    "  {}??  ",
    "So, {}?",
    "ok {}?",
    "Hmm... {}?",
    "Well, {}, please?",
    "Question 3: {}?",
    "\u201c{}?\u201d",
    "Let me think. {}?",
    "Okay, so {}?",
)
GUESSES = (
    "is it a {}?",
    "Is it an {}",
    "Is it '{}'?",
    'is it "{}" ?',
    "Is it the {}?",
    "is it {}?",
    "Is the secret a {}?",
    "Is the secret word '{}'?",
    "Is the thing you are thinking of the {}?",
    "Is this thing called {}?",
    "is it something called a {}?",
    "Hmm, could it be a {}?",
    "Is that a {}?",
    "Would you say it is a {}?",
    "Do you think it's a {}?",
    "Are you thinking of a {}?",
    "IS IT A {}?!",
)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_J12_every_phrasing_means_its_property_in_any_wrapper(wrapper: str) -> None:
    for key, phrasing in PHRASINGS:
        for text in (phrasing, phrasing.upper(), phrasing.capitalize()):
            parsed = GRAMMAR.parse(wrapper.format(text))
            assert (parsed.kind, parsed.property_key) == ("property", key), wrapper.format(text)


@pytest.mark.parametrize("guess", GUESSES)
def test_J12_every_thing_and_alias_can_be_guessed_in_natural_words(guess: str) -> None:
    for name, form in NAMES:
        if guess == "is it {}?" and name == "orange":
            continue
        for spelling in (form, form.replace("-", " "), form.title()):
            parsed = GRAMMAR.parse(guess.format(spelling))
            assert (parsed.kind, parsed.thing) == ("guess", name), guess.format(spelling)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("Would you say it is alive?", "alive"),
        ("Do you think it can fly?", "flies"),
        ("Do you think that it flies?", "flies"),
        ("Can you tell me whether it has legs?", "legs"),
        ("Has it got legs?", "legs"),
        ("Does the thing have legs?", "legs"),
        ("Does this object have any legs?", "legs"),
        ("Is the secret thing alive?", "alive"),
        ("Is this alive?", "alive"),
        ("Could it be alive?", "alive"),
        ("Could it fly?", "flies"),
        ("Is it something that can fly?", "flies"),
        ("Is it something that has legs?", "legs"),
        ("Is it something with legs?", "legs"),
        ("Is it something you can eat?", "eaten"),
        ("Is it something people eat?", "eaten"),
        ("Is it something people wear?", "worn"),
        ("Is it something made of metal?", "metal"),
        ("Do we eat it?", "eaten"),
        ("Can people eat it?", "eaten"),
        ("Is it true that it is man made?", "man_made"),
        ("Is it found in a house?", None),
        ("Is it typically found indoors?", "indoors"),
        ("Is it found indoors?", "indoors"),
        ("Is it actually orange?", "orange"),
        ("Is it really orange?", "orange"),
        ("Would you call it orange?", "orange"),
        ("Does it have 2 wheels?", "two_wheels"),
        ("Does it have 1 wheel?", "one_wheel"),
        ("Is it bigger than the car?", "bigger_than_car"),
        ("Is its colour orange?", "orange"),
        ("I wonder if it's alive", "alive"),
        ("Do you wear it?", "worn"),
    ],
)
def test_wording_beyond_the_listed_phrasings_is_understood(text: str, key: str | None) -> None:
    parsed = GRAMMAR.parse(text)
    assert (parsed.kind, parsed.property_key) == ("property" if key else "invalid", key)


@pytest.mark.parametrize(
    "text",
    [
        "Isn't it alive?",
        "Is it not alive?",
        "Can't it fly?",
        "Don't you think it is alive?",
        "It is alive?",
        "Is it dead?",
        "What is it?",
        "Is it a kind of dog?",
        "Is it bigger than a dog?",
        "Does a dog chase it?",
        "Is it dogs?",
        "dog",
        "a dog?",
        "I think it is a dog",
        "Is it alive? Can it fly?",
        "Is it alive and can it fly?",
        "Is it alive or metal?",
        "Is it made of",
        "",
        "???",
        "so,",
    ],
)
def test_unreadable_and_negated_questions_are_invalid(text: str) -> None:
    assert GRAMMAR.parse(text).kind == "invalid"


def test_a_mention_outside_a_direct_guess_is_recorded() -> None:
    parsed = GRAMMAR.parse("Is it bigger than a hot dog?")
    assert (parsed.kind, parsed.mentions) == ("invalid", ("hot dog",))
    assert parsed.reason == "names a thing without guessing it"
    assert GRAMMAR.parse("is it bigger than a car?").mentions == ("car",)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("is it orange?", "property"),
        ("is it an orange?", "guess"),
        ("is it 'orange'?", "guess"),
        ("is it called orange?", "guess"),
        ("is it an orange or an apple?", "list"),
    ],
)
def test_a_word_that_is_a_thing_and_a_property_is_told_apart(text: str, kind: str) -> None:
    assert GRAMMAR.parse(text).kind == kind


@pytest.mark.parametrize(
    "text",
    [
        "Is it a dog or a cat?",
        "Is it a dog, cat, or whale?",
        "Is it a dog/cat?",
        "Is it a dog? Is it a cat?",
        "Is it a dog and a cat?",
        "Is it a dog cat?",
        "Is it either a dog or a unicorn?",
        "Would you say it is a dog or a cat?",
        "Is it a dog & a cat?",
        "Could it be a dog; a cat; a whale?",
        "Is it a dog is it a cat?",
        "Is it a dog\ncat?",
        "Is it 'dog' 'cat'?",
        "Is it a dog\uff0c cat\uff1f",
    ],
)
def test_J12_several_candidates_are_a_list(text: str) -> None:
    assert GRAMMAR.parse(text).kind == "list"


def test_a_name_with_a_conjunction_is_one_candidate() -> None:
    assert GRAMMAR.parse("Is it salt and pepper?").thing == "salt and pepper"


@settings(max_examples=300, deadline=None)
@given(
    names=st.lists(
        st.sampled_from([form for _, form in NAMES]), min_size=2, max_size=5, unique=True
    ),
    separator=st.sampled_from(
        [
            " or ",
            ", ",
            " / ",
            "/",
            " or a ",
            ", a ",
            "; ",
            " | ",
            " and ",
            "? is it a ",
            "\n",
            " & ",
            " ",
        ]
    ),
    opening=st.sampled_from(
        ["Is it a ", "is it ", "Is the secret ", "is it '", "Could it be ", "so, is it the "]
    ),
    ending=st.sampled_from(["?", "", "'?", " ??"]),
)
def test_J12_naming_several_candidates_in_one_question_is_never_a_strict_win(
    names: list[str], separator: str, opening: str, ending: str
) -> None:
    text = opening + separator.join(names) + ending
    parsed = GRAMMAR.parse(text)
    assert parsed.kind in ("list", "invalid")
    for name, aliases in THINGS:
        assert not strict_guess(text, name, aliases)
    if separator in (" or ", ", ", "/", "; "):
        assert candidate_list(text)


_WORDS = sorted({word for _, phrasing in PHRASINGS for word in phrasing.split()})
_EXTRA = [
    "not",
    "no",
    "never",
    "the",
    "a",
    "usually",
    "thing",
    "dog",
    "something",
    "that",
    "isn't",
    "than",
]


@settings(max_examples=400, deadline=None)
@given(words=st.lists(st.sampled_from(_WORDS + _EXTRA), min_size=1, max_size=7))
def test_J12_the_parser_never_answers_a_different_property(words: list[str]) -> None:
    """What is read as a property must hold all of its telling words, and no negation."""
    parsed = GRAMMAR.parse(" ".join(words))
    if parsed.kind != "property":
        return
    assert not {"not", "no", "never", "isn't"} & set(words)
    telling = {
        "alive": {"alive", "living"},
        "flies": {"fly"},
        "legs": {"legs"},
        "eaten": {"eat", "eaten"},
        "orange": {"orange"},
        "indoors": {"indoors", "house"},
        "metal": {"metal"},
        "man_made": {"man-made", "made"},
        "bigger_than_car": {"car"},
        "two_wheels": {"two"},
        "one_wheel": {"one"},
        "worn": {"wear", "worn"},
    }
    assert parsed.property_key is not None
    assert telling[parsed.property_key] & set(words)
    others = set().union(*(t for key, t in telling.items() if key != parsed.property_key))
    assert not (others - telling[parsed.property_key] - {"made"}) & set(words) or "people" in words


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_can_be_parsed(text: str) -> None:
    assert GRAMMAR.parse(text).kind in ("property", "guess", "list", "invalid")


@settings(max_examples=100, deadline=None)
@given(
    case=st.sampled_from(PHRASINGS),
    junk=st.text(alphabet="\u200b\u200d\ufeff \t\n\"'?!.", max_size=6),
)
def test_invisible_and_outer_characters_do_not_matter(case: tuple[str, str], junk: str) -> None:
    key, phrasing = case
    half = len(phrasing) // 2
    hidden = phrasing[:half] + "\u200b" + phrasing[half:]
    assert GRAMMAR.parse(junk + hidden + junk).property_key == key


@pytest.fixture(scope="module")
def everyday() -> Grammar:
    return Grammar(load_world("everyday"))


def test_every_phrasing_of_the_packaged_world_means_its_property(everyday: Grammar) -> None:
    for prop in everyday.world.properties:
        for phrasing in prop.phrasings:
            for wrapper in WRAPPERS[1:8]:
                text = wrapper.format(phrasing.capitalize())
                assert everyday.parse(text).property_key == prop.key, text


def test_every_phrasing_of_the_packaged_world_can_be_asked_politely(everyday: Grammar) -> None:
    asked = 0
    for prop in everyday.world.properties:
        for phrasing in prop.phrasings:
            first, subject, rest = phrasing.split(" ", 2)
            if subject != "it" or first not in ("is", "can", "was"):
                continue
            for opening in (
                "Would you say it",
                "Do you think that it",
                "Hmm, can you tell me if it",
            ):
                text = f"{opening} {first} {rest}?"
                assert everyday.parse(text).property_key == prop.key, text
                asked += 1
    assert asked > 300


def test_every_name_of_the_packaged_world_can_be_guessed(everyday: Grammar) -> None:
    for thing in everyday.world.things:
        for name in (thing.name, *thing.aliases):
            for guess in (*GUESSES[:5], *GUESSES[6:9]):
                assert everyday.parse(guess.format(name)).thing == thing.name, guess.format(name)


def test_negating_any_phrasing_of_the_packaged_world_is_invalid(everyday: Grammar) -> None:
    for prop in everyday.world.properties:
        for phrasing in prop.phrasings:
            words = phrasing.split()
            for text in (
                " ".join([*words[:2], "not", *words[2:]]),
                f"isn't it true that {phrasing}",
            ):
                assert everyday.parse(text).kind == "invalid", text


def test_two_properties_with_one_phrasing_are_refused() -> None:
    twice = (*WORLD.properties[:-1], Property("worn", ("Is it alive?",)))
    with pytest.raises(UserError, match="'alive' and 'worn'"):
        Grammar(replace(WORLD, properties=twice))


def test_two_things_with_one_name_are_refused() -> None:
    things = (*WORLD.things[:-1], replace(WORLD.things[-1], aliases=("the Hound",)))
    with pytest.raises(UserError, match="belongs to another thing"):
        Grammar(replace(WORLD, things=things))


def test_a_thing_whose_guess_reads_as_a_property_is_refused() -> None:
    things = (*WORLD.things[:-1], replace(WORLD.things[-1], name="living thing"))
    with pytest.raises(UserError, match="cannot be guessed"):
        Grammar(replace(WORLD, things=things))


def test_phrasings_that_differ_in_a_hedge_only_stay_apart() -> None:
    world = World(
        name="hedges",
        properties=(
            Property("red", ("is it red",)),
            Property("mostly_red", ("is it mostly red",)),
        ),
        things=WORLD.things[:1],
        values=np.zeros((1, 2), dtype=np.bool_),
        splits={},
    )
    grammar = Grammar(world)
    found = [grammar.parse(text).property_key for text in ("is it red?", "is it mostly red?")]
    assert found == ["red", "mostly_red"]
    assert grammar.parse("is it usually red?").kind == "invalid"


def test_statements_become_questions() -> None:
    assert questions_from_statement("it is alive") == ["is it alive"]
    assert questions_from_statement("it has legs") == ["does it have legs"]
    assert questions_from_statement("people wear it") == ["do people wear it"]
    assert "does it fly" in questions_from_statement("it flies")
    assert questions_from_statement("alive") == []


def test_equal_questions_share_an_action_key() -> None:
    keys = {
        GRAMMAR.parse(text).action_key
        for text in ("can it fly?", "Does it fly?", "is it able to fly")
    }
    assert keys == {"property:flies"}
    pairs = itertools.product(("Is it a bike?", "is it 'bicycle'?"), repeat=2)
    assert all(GRAMMAR.parse(a).action_key == GRAMMAR.parse(b).action_key for a, b in pairs)
