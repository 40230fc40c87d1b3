"""The embedded world: what the shipped table promises, and what the loader refuses."""

import pickle
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from delta_belief_rl.envs.worlds.table import World, WorldError, load_world

SMALL = """\
name: pets
properties:
  flies: {ask: [can it fly, does it fly]}
  barks: {ask: [does it bark]}
categories:
  animal: {}
  winged: {parent: animal, yes: [flies]}
things:
  sparrow: {in: winged}
  dog: {in: animal, yes: [barks], aliases: [hound]}
  hen: {in: winged, no: [flies]}
splits: {val: [dog], test: [hen]}
"""

HOLDS = [
    ("dog", "eats_meat"),
    ("bat", "mammal"),
    ("bat", "flies"),
    ("whale", "mammal"),
    ("whale", "in_water"),
    ("penguin", "bird"),
    ("ostrich", "wings"),
    ("snake", "lays_eggs"),
    ("spider", "legs"),
    ("snail", "moves"),
    ("rose", "sharp"),
    ("bamboo", "grows"),
    ("tomato", "vegetable"),
    ("banana", "yellow"),
    ("coconut", "fruit"),
    ("pea", "green"),
    ("honey", "sweet"),
    ("milk", "liquid"),
    ("pizza", "round"),
    ("iceberg", "white"),
    ("volcano", "hot"),
    ("sun", "light"),
    ("knife", "sharp"),
    ("refrigerator", "electric"),
    ("table", "four_legs"),
    ("sock", "worn"),
    ("piano", "music"),
    ("bicycle", "wheels"),
    ("airplane", "flies"),
    ("submarine", "in_water"),
    ("skyscraper", "person"),
]

DOES_NOT_HOLD = [
    ("penguin", "flies"),
    ("ostrich", "flies"),
    ("whale", "legs"),
    ("snake", "legs"),
    ("monkey", "four_legs"),
    ("gorilla", "tail"),
    ("frog", "tail"),
    ("elephant", "fur"),
    ("shark", "mammal"),
    ("dog", "wild"),
    ("lemon", "sweet"),
    ("watermelon", "hand"),
    ("tomato", "fruit"),
    ("honey", "man_made"),
    ("snow", "man_made"),
    ("bicycle", "heavy"),
    ("submarine", "wheels"),
    ("rope", "metal"),
    ("tent", "hard"),
    ("ant", "wings"),
]


@pytest.fixture(scope="module")
def world() -> World:
    return load_world("everyday")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def questions_needed(values: NDArray[np.bool_], rows: NDArray[np.intp]) -> list[int]:
    """Questions until one thing is left, for each row, always asking the most even split."""
    if len(rows) == 1:
        return [0]
    held = values[rows].sum(axis=0)
    answer = values[rows, int(np.argmin(np.abs(2 * held - len(rows))))]
    return [
        1 + more
        for side in (rows[answer], rows[~answer])
        for more in questions_needed(values, side)
    ]


# --- the shipped table -----------------------------------------------------------------------


def test_world_has_256_things_and_at_least_68_properties(world: World) -> None:
    assert len(world.things) == 256
    assert 68 <= len(world.properties) <= 76
    assert world.values.shape == (len(world.things), len(world.properties))
    assert world.values.dtype == np.bool_


def test_world_splits_are_160_48_48_and_together_all_things(world: World) -> None:
    train, val, test = (set(world.split(name)) for name in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (160, 48, 48)
    assert train | val | test == {thing.name for thing in world.things}


def test_world_splits_all_hold_animals_food_and_artifacts(world: World) -> None:
    for split in ("train", "val", "test"):
        names = world.split(split)
        for key, low, high in (("animal", 0.2, 0.35), ("food", 0.1, 0.3), ("man_made", 0.4, 0.6)):
            share = sum(world.value(name, key) for name in names) / len(names)
            assert low <= share <= high, (split, key, share)


def test_world_tells_every_pair_of_things_apart_by_two_properties_or_more(world: World) -> None:
    for left, right in combinations(world.things, 2):
        rows = world.values[[world.index(left.name), world.index(right.name)]]
        assert (rows[0] != rows[1]).sum() >= 2, (left.name, right.name)


def test_world_is_found_by_a_greedy_splitter_within_nine_questions_on_average(
    world: World,
) -> None:
    needed = questions_needed(world.values, np.arange(len(world.things)))
    assert np.mean(needed) <= 8.8
    assert max(needed) <= 12


def test_world_properties_are_mostly_informative(world: World) -> None:
    share = world.values.mean(axis=0)
    assert share.min() > 0
    assert share.max() <= 0.5
    assert (share >= 0.08).mean() > 0.6
    assert (share >= 0.25).sum() >= 20


def test_world_phrasings_are_many_short_and_share_a_compact_vocabulary(world: World) -> None:
    phrasings = [phrasing for entry in world.properties for phrasing in entry.phrasings]
    assert len(phrasings) == len(set(phrasings))
    assert len({word for phrasing in phrasings for word in phrasing.split()}) <= 260
    for entry in world.properties:
        assert 4 <= len(entry.phrasings) <= 8, entry.key
        assert len(entry.phrasings[0].split()) <= 6, entry.key


def test_world_names_are_one_or_two_words_none_inside_another(world: World) -> None:
    names = [thing.name for thing in world.things]
    assert all(re.fullmatch(r"[a-z]+( [a-z]+)?", name) for name in names)
    words = {name: set(name.split()) for name in names}
    assert not [(a, b) for a, b in combinations(names, 2) if words[a] <= words[b]]


@pytest.mark.parametrize(("thing", "key"), HOLDS)
def test_fact_holds(world: World, thing: str, key: str) -> None:
    assert world.value(thing, key)


@pytest.mark.parametrize(("thing", "key"), DOES_NOT_HOLD)
def test_fact_does_not_hold(world: World, thing: str, key: str) -> None:
    assert not world.value(thing, key)


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        ("mammal", "animal"),
        ("bird", "animal"),
        ("animal", "living"),
        ("living", "grows"),
        ("plant", "grows"),
        ("fruit", "food"),
        ("vegetable", "food"),
        ("four_legs", "legs"),
        ("finger", "hand"),
        ("hand", "foot"),
        ("person", "arm"),
        ("child", "brick"),
        ("heavy", "child"),
    ],
)
def test_fact_implies_the_wider_fact(world: World, part: str, whole: str) -> None:
    narrow, wide = (world.values[:, world.property_index(key)] for key in (part, whole))
    assert not (narrow & ~wide).any()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fruit", "vegetable"),
        ("mammal", "bird"),
        ("animal", "plant"),
        ("living", "man_made"),
        ("hard", "soft"),
        ("hand", "arm"),
        ("foot", "arm"),
        ("cheap", "costly"),
        ("food", "heavy"),
    ],
)
def test_fact_excludes_its_opposite(world: World, one: str, other: str) -> None:
    left, right = (world.values[:, world.property_index(key)] for key in (one, other))
    assert not (left & right).any()


# --- the loader ------------------------------------------------------------------------------


def test_user_file_loads_with_inheritance_and_exceptions(tmp_path: Path) -> None:
    world = load_world(write(tmp_path, SMALL))
    assert world.name == "pets"
    assert [thing.name for thing in world.things] == ["sparrow", "dog", "hen"]
    assert world.things[1].aliases == ("hound",)
    assert world.properties[0].phrasings == ("can it fly", "does it fly")
    assert world.value("sparrow", "flies")
    assert not world.value("hen", "flies")
    assert (world.split("train"), world.split("test")) == (("sparrow",), ("hen",))


def test_user_file_loads_from_a_path_given_as_text(tmp_path: Path) -> None:
    assert load_world(str(write(tmp_path, SMALL))).name == "pets"


def test_world_values_are_read_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        load_world(write(tmp_path, SMALL)).values[0, 0] = False


def test_world_survives_pickling(tmp_path: Path) -> None:
    world = load_world(write(tmp_path, SMALL))
    assert pickle.loads(pickle.dumps(world)).checksum == world.checksum


def test_checksum_ignores_comments_and_follows_facts(tmp_path: Path) -> None:
    checksum = load_world(write(tmp_path, SMALL)).checksum
    assert re.fullmatch(r"[0-9a-f]{64}", checksum)
    assert load_world(write(tmp_path, "# a comment\n" + SMALL)).checksum == checksum
    changed = SMALL.replace("{in: winged, no: [flies]}", "{in: winged, yes: [barks]}")
    assert load_world(write(tmp_path, changed)).checksum != checksum


def test_unknown_names_in_a_lookup_suggest_the_nearest(tmp_path: Path) -> None:
    world = load_world(write(tmp_path, SMALL))
    with pytest.raises(WorldError, match="no thing 'sparow'; did you mean 'sparrow'"):
        world.index("sparow")
    with pytest.raises(WorldError, match="no property 'swims'; take one of its 2 names"):
        world.property_index("swims")
    with pytest.raises(WorldError, match="no split 'dev'; use train, val or test"):
        world.split("dev")


def test_unknown_packaged_world_lists_those_that_exist() -> None:
    with pytest.raises(WorldError, match=r"called 'everyda'; take one of \(.*everyday.*\)"):
        load_world("everyda")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"cannot be read.*check the path"):
        load_world(tmp_path / "absent.yaml")


def test_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(WorldError, match="not UTF-8 text; save it as UTF-8"):
        load_world(path)


DEFECTS = {
    "malformed YAML": ("{in: winged}", "{in: winged", "not valid YAML near line"),
    "an unknown section": (
        "name: pets",
        "name: pets\nthing: {}",
        "unknown key 'thing' in the file",
    ),
    "a missing section": ("splits: {val: [dog], test: [hen]}", "", "section 'splits' is missing"),
    "a world without a name": ("name: pets", "name: [pets]", "'name' is not a text"),
    "an unknown key of a property": ("{ask: [does it bark]}", "{asks: [x]}", "unknown key 'asks'"),
    "an unknown key of a category": ("animal: {}", "animal: {maybe: []}", "unknown key 'maybe'"),
    "an unknown key of a thing": ("aliases: [hound]", "alias: [x]", "did you mean 'aliases'"),
    "a thing given twice": ("  hen:", "  dog:", "'dog' is given twice, again on line 11"),
    "an alias of two things": ("no: [flies]}", "aliases: [hound]}", "already names 'dog'"),
    "an alias that is a thing": ("[hound]", "[sparrow]", "already names 'sparrow'"),
    "a phrasing of two properties": ("does it bark", "does it fly", "already asks for 'flies'"),
    "a phrasing given twice": ("does it fly", "can it fly", "already asks for 'flies'"),
    "a property without phrasings": ("[does it bark]", "[]", "property 'barks' has no phrasing"),
    "a property id with capitals": ("  barks: {", "  Barks: {", "'Barks' is not snake_case"),
    "an unknown property of a thing": ("yes: [barks]", "yes: [bark]", "did you mean 'barks'"),
    "an unknown property of a category": ("yes: [flies]}", "yes: [xyz]}", "property 'xyz'; define"),
    "yes and no to one property": ("no: [flies]", "no: [flies], yes: [flies]", "yes and no to"),
    "a text in place of a list": ("yes: [barks]", "yes: barks", "is not a list of texts"),
    "a mapping within a list": (
        "[hound]",
        "[{hound: x}]",
        "'aliases' of thing 'dog' is not a list",
    ),
    "a list in place of a mapping": ("sparrow: {in: winged}", "sparrow: [winged]", "not a mapping"),
    "an unknown category": (
        "sparrow: {in: winged}",
        "sparrow: {in: wing}",
        "did you mean 'winged'",
    ),
    "a thing without a category": ("sparrow: {in: winged}", "sparrow: {}", "unknown category ''"),
    "an unknown parent": ("parent: animal", "parent: beast", "unknown parent 'beast'; define it"),
    "a circle of categories": (
        "animal: {}",
        "animal: {parent: winged}",
        "animal -> winged -> animal",
    ),
    "two equal things": (", yes: [barks]", "", "no property tells 'dog' from 'hen'"),
    "a split with an unknown thing": ("val: [dog]", "val: [dgo]", "'dgo'; did you mean 'dog'"),
    "an unknown split": ("val: [dog]", "train: [dog]", "unknown key 'train' in 'splits'"),
    "overlapping splits": ("test: [hen]", "test: [dog]", "'dog' is listed in the splits"),
    "no thing left to train on": ("val: [dog]", "val: [dog, sparrow]", "no thing to train on"),
    "a phrasing with a name": ("does it bark", "is it a dog", "'barks' contains 'dog'; reword"),
    "a phrasing with names in the plural": ("does it bark", "is it one of dogs", "contains 'dog'"),
    "a phrasing with an alias": ("does it bark", "is it a hound", "contains 'hound'"),
    "a phrasing with 'or'": ("does it bark", "does it bark or howl", "reads like a list"),
    "a phrasing with 'and'": ("does it bark", "does it bark and howl", "reads like a list"),
    "a phrasing with a comma": ("does it bark", "'bark, does it'", "reads like a list"),
    "a phrasing with a question mark": ("does it bark", "'does it bark?'", "leave out capitals"),
    "a name with capitals": ("[hound]", "[Hound]", "'Hound' is not lower-case words"),
}


@pytest.mark.parametrize(("old", "new", "message"), DEFECTS.values(), ids=DEFECTS.keys())
def test_defective_file_is_refused_with_its_cause(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in SMALL
    path = write(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(WorldError) as caught:
        load_world(path)
    sentence = str(caught.value)
    assert message in sentence
    assert sentence.startswith(f"{path}: ")
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_phrasing_may_use_one_word_of_a_two_word_name(tmp_path: Path) -> None:
    text = SMALL.replace("hound", "guard dog").replace("does it bark", "does it guard")
    assert load_world(write(tmp_path, text)).value("dog", "barks")


def test_a_world_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    assert load_world(path) is load_world(path)
    write(tmp_path, SMALL.replace("name: pets", "name: zoo"))
    assert load_world(path).name == "zoo"
