"""The rule judge of Guess My City: what it says to the questions that players ask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import yaml

from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.guess_my_city.data import OPENING, SOURCE, City, load_atlas, reveals
from delta_belief_rl.envs.guess_my_city.game import NOTICES
from delta_belief_rl.judge.guess_my_city.question import UNKNOWN
from delta_belief_rl.judge.guess_my_city.rules import CityJudge
from delta_belief_rl.types import Task, Verdict

QUESTIONS = Path(__file__).parents[1] / "data" / "guess_my_city_questions.yaml"
ATLAS = load_atlas()
CITIES = tuple(ATLAS.cities.values())


def ask(city: str | City, question: str) -> JudgeReply:
    found = ATLAS.cities[city] if isinstance(city, str) else city
    task = Task("t", SOURCE, found.secret, OPENING, aliases=found.names[1:])
    return CityJudge().answer([JudgeRequest(task, question)])[0]


@cache
def questions() -> dict[str, list[str]]:
    return yaml.load(QUESTIONS.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


@pytest.mark.parametrize(
    ("city", "question", "reply"),
    [
        ("Paris", "What continent is it on?", "It is in Europe."),
        ("Istanbul", "What continent is it on?", "It lies where Europe and Asia meet."),
        ("Istanbul", "Is it in Europe?", "Yes."),
        ("Istanbul", "Is it in Asia?", "Yes."),
        ("Paris", "Is it in Asia or Europe?", "It is in Europe."),
        ("Paris", "Isn't it in Asia?", "It is in Europe."),
        ("Lima", "Is it in the Americas?", "Yes."),
        ("Lima", "Is it in Latin America?", "Yes."),
        ("Lima", "Is it in Southeast Asia?", "No."),
        ("Nairobi", "Is it in Sub-Saharan Africa?", "Yes."),
        ("Cairo", "Is it in Sub-Saharan Africa?", "No."),
        ("Oslo", "Is it a Scandinavian city?", "Yes."),
        ("Paris", "What language do people speak there?", "People speak a Romance language"),
        ("Vienna", "What language do people speak there?", "People speak German."),
        ("Vienna", "Do they speak German?", "Yes."),
        ("Athens", "What alphabet do they use?", "It has its own script."),
        ("Sofia", "Does the language use the Cyrillic alphabet?", "Yes."),
        ("Madrid", "Is a Romance language spoken there?", "Yes."),
        ("Madrid", "Is it in a Spanish-speaking country in South America?", "No."),
        ("Bruges", "Is it larger than a million?", "No."),
        ("Madrid", "Does it have between 1 and 3 million inhabitants?", "No."),
        ("Vienna", "Does it have between 1 and 3 million inhabitants?", "Yes."),
        ("Geneva", "Are there fewer than 500,000 people?", "No."),
        ("Bruges", "Is the population under 500,000?", "Yes."),
        ("Bruges", "Is it a small town?", "Yes."),
        ("Tokyo", "Is it a megacity?", "Yes."),
        ("Sydney", "Is it the capital?", "No. It is the capital of a part of its country, though."),
        ("Kyoto", "Was it once the capital?", "Yes."),
        ("Paris", "Is it the capital of Germany?", "No."),
        ("Paris", "Is it a European capital?", "Yes."),
        ("Tokyo", "Is it a European capital?", "No."),
        ("Milan", "Is it the second largest city in the country?", "Yes."),
        ("Paris", "Is it by the sea?", "No."),
        ("Lisbon", "Is it by the sea?", "Yes."),
        ("Lisbon", "Which ocean is it on?", "It lies on the Atlantic Ocean."),
        ("Dubrovnik", "Is it on the Mediterranean Sea?", "Yes."),
        ("Dubrovnik", "Is it on the Baltic Sea?", "No."),
        ("Vienna", "Is it on the Danube?", "Yes."),
        ("Paris", "Is it on the Danube?", "No."),
        ("Paris", "Which river flows through it?", "The Seine."),
        ("Chicago", "Is it on a lake?", "Yes."),
        ("Bogota", "Is it near the Andes?", "Yes."),
        ("Bogota", "Is it near the Alps?", "No."),
        ("La Paz", "Is it more than 3000 meters above sea level?", "Yes."),
        ("Rotterdam", "What is the elevation?", "It lies at about the level of the sea."),
        ("Riyadh", "Is it in a desert?", "Yes."),
        ("Singapore", "Is it on an island?", "Yes."),
        ("Moscow", "Does it snow in winter?", "Yes."),
        ("Dubai", "Does it snow in winter?", "No."),
        ("Dubai", "Is it hot?", "Yes."),
        ("Singapore", "Is the climate tropical?", "Yes."),
        ("Rome", "Does it have a Mediterranean climate?", "Yes."),
        ("Sydney", "Is it in the southern hemisphere?", "Yes."),
        ("Quito", "Is it near the equator?", "Yes."),
        ("Quito", "What is its latitude?", "It lies at about 0 degrees south."),
        ("Mumbai", "What time zone is it in?", "Its standard time is UTC+5:30."),
        ("Tokyo", "What is the currency?", "People pay with the yen."),
        ("Rome", "Do they use the euro?", "Yes."),
        ("London", "Do they use the euro?", "No."),
        ("Cairo", "Is it predominantly Muslim?", "Yes."),
        ("Rome", "Is it a Catholic city?", "The main religion is Christianity."),
        ("Rome", "Does the country border Switzerland?", "Yes."),
        ("Rome", "Does the country border Germany?", "No."),
        ("Tokyo", "Which countries border your country?", "Its country has no neighbour by land."),
        ("London", "Is the country a monarchy?", "Yes."),
        ("London", "Is the country a republic?", "No."),
        ("London", "Do people drive on the left?", "Yes."),
        ("Vienna", "Is it a landlocked country?", "Yes."),
        ("Nairobi", "Was it a British colony?", "Yes."),
        ("Nairobi", "Was it colonized by France?", "No."),
        ("Nairobi", "Was it a colony of the United States?", "No."),
        ("Nairobi", "Was it ruled by the Ottomans?", UNKNOWN),
        ("Hong Kong", "Was it a British colony?", "Yes."),
        ("Hong Kong", "Do they drive on the left?", "Yes."),
        ("Shanghai", "Do they drive on the left?", "No."),
        ("Medellin", "Is it hot?", "No."),
        ("Medellin", "Is the climate tropical?", "It is mild to cool"),
        ("Ankara", "Are winters cold?", "Yes."),
        ("Nairobi", "Who colonized it?", "It was once ruled by Britain."),
        ("Paris", "Is it in France?", "Yes."),
        ("Paris", "Is it a Spanish city?", "No."),
        ("Seattle", "Is it in Washington State?", "Yes."),
        ("Seattle", "Is it in California?", "No."),
        ("Florence", "Is it near Rome?", "No."),
        ("Rotterdam", "Is it near Amsterdam?", "Yes."),
        ("Oslo", "Is it north of Madrid?", "Yes."),
        ("Oslo", "Is it larger than London?", "No."),
        ("Athens", "Has it hosted the Olympics?", "It hosted the summer games of 1896 and 2004."),
        ("Lima", "Has it hosted the Olympics?", "No."),
        ("Prague", "Is there a famous bridge?", "Yes: a stone bridge with thirty statues."),
        ("Naples", "Is it famous for pizza?", "Yes: pizza with tomato and mozzarella."),
        ("Oslo", "Is it famous for pizza?", "Not that I know of."),
        ("Vienna", "What is the main religion there?", "The main religion is Christianity."),
        ("Milan", "Is the city a center of fashion?", "Yes: fashion and design."),
        ("Paris", "Is there a metro?", "Yes."),
        ("Paris", "What colors are on the flag?", "The colours of the flag are blue, white and"),
        ("Paris", "Is it European?", "Yes."),
        ("Paris", "Is it Mediterranean?", "No."),
        ("Paris", "Is it Buddhist?", "No."),
        ("Paris", "Is it Spanish-speaking?", "No."),
        ("Hong Kong", "Is it on the South China Sea?", UNKNOWN),
        ("Dublin", "Is it on the Irish Sea?", UNKNOWN),
        ("Manila", "Is it on the South China Sea?", "Yes."),
        ("Buenos Aires", "Is it ruled by a king?", "No."),
        ("Istanbul", "Where is it?", "It lies where Europe and Asia meet."),
        ("Istanbul", "Did the city change its name?", UNKNOWN),
        ("Istanbul", "What is the name of its most famous landmark?", "A domed church that became"),
        ("Tokyo", "Is it in a country with more than 100 million people?", "Yes."),
        ("Tokyo", "Which famous musicians come from there?", UNKNOWN),
        ("Liverpool", "Which famous musicians come from there?", "The musicians John Lennon and"),
        ("Paris", "Is it safe?", UNKNOWN),
        ("Paris", "When was the city founded?", UNKNOWN),
        ("Paris", "Is it Lyon?", "No, but the country is right."),
        ("Paris", "Is it Rome?", "No, but the continent is right."),
        ("Paris", "Is it Tokyo, Japan?", "No, it is on another continent."),
        ("Paris", "Is it Paris, Texas?", "No. A hint: it is known for"),
        ("Lyon", "Is it Paris, Texas?", "No. A hint: it is known for"),
        ("Paris", "Is it Xanadu, Mongolia?", "No. A hint: it is known for"),
        ("Paris", "Is it Lyon or Rome?", NOTICES["multiple_bets"]),
        ("Hamburg", "Is it Hamburg, Texas?", "No. A hint: it is known for"),
        ("Singapore", "Is it in Singapore?", "Yes."),
        ("Baku", "Is it in a landlocked country?", "Yes."),
        ("Baku", "Does the country have a coastline?", "Yes."),
        ("Vienna", "Does the country have a coastline?", "No."),
        ("Lisbon", "Does the country have a coastline?", "Yes."),
        ("Lisbon", "Isn't the country landlocked?", "Its country is not landlocked."),
        ("Abuja", "Is it one of the largest cities in the country?", "Yes."),
        ("Milan", "Is it a regional capital?", "Yes."),
        ("Antwerp", "Is it a provincial capital?", "Yes."),
        ("Guayaquil", "Is it a provincial capital?", "Yes."),
        ("Nice", "Is it a regional capital?", "No."),
        ("Kigali", "Is there a UNESCO World Heritage Site?", "Yes."),
        ("Phnom Penh", "Is there a UNESCO World Heritage Site?", "Yes."),
        ("Ankara", "Is there a UNESCO World Heritage Site?", "Yes."),
        ("Paris", "Is it old? Is it big?", NOTICES["multiple_questions"]),
    ],
)
def test_the_rule_judge_answers_briefly_and_truly(city: str, question: str, reply: str) -> None:
    found = ask(city, question)
    assert found.verdict is Verdict.OTHER
    assert found.text.startswith(reply), found.text
    assert len(found.text) < 250


@pytest.mark.parametrize("city", ["Paris", "Cusco", "Singapore", "Cairo", "Toronto", "Auckland"])
def test_J13_questions_in_other_words_get_the_same_answer(city: str) -> None:
    for name, group in questions().items():
        if name in ("more", "unknown", "refused"):
            continue
        replies = {ask(city, question).text for question in group}
        assert len(replies) == 1, (name, {q: ask(city, q).text for q in group})
        assert replies != {UNKNOWN}, name


@pytest.mark.parametrize(
    "action",
    [
        "Is it Hamburg, a city of northern Germany?",
        "The city is Hamburg, because of its harbour",
        "Is it Hamburg, not Bremen?",
        "Is it Hamburg and Bremen?",
        "Is it not Hamburg?",
        "Is it near Hamburg?",
        "I would say that all this speaks for Hamburg",
    ],
)
def test_J12_who_names_the_right_city_beside_a_guess_is_asked_to_name_it_alone(action: str) -> None:
    assert ask("Hamburg", action) == JudgeReply(Verdict.OTHER, NOTICES["name_city"])
    assert ask("Oslo", action).text != NOTICES["name_city"]


@pytest.mark.parametrize(
    "action",
    [
        "Is it Hamburg and Munich?",
        "Hamburg, Munich, Berlin, Oslo",
        "Is it Hamburg or Oslo?",
        "Surat in India. Hamburg in Germany. Bhopal in India.",
        "Is it Hamburg? Is it Oslo?",
    ],
)
def test_J12_the_reply_to_a_list_does_not_tell_whether_the_city_is_in_it(action: str) -> None:
    assert ask("Hamburg", action) == ask("Lima", action)


def check_replies(cities: Iterable[City], every: Iterable[str]) -> None:
    for city, question in product(cities, every):
        reply = ask(city, question)
        assert reply.verdict in (Verdict.OTHER, Verdict.INVALID), (city.name, question)
        assert not reveals(reply.text, city), (city.name, question, reply.text)
        assert reply.text


def test_no_reply_to_an_open_question_gives_a_city_or_its_country_away() -> None:
    names = ("continent", "which_river", "language", "currency", "borders", "food", "landmarks")
    names += ("industry", "sport", "history", "people", "universities", "general", "climate")
    check_replies(CITIES, [questions()[name][0] for name in names])


@pytest.mark.slow
def test_no_reply_to_any_question_gives_a_city_or_its_country_away() -> None:
    check_replies(CITIES, [question for group in questions().values() for question in group])


def test_every_city_answers_what_its_data_say() -> None:
    for city in CITIES:
        for continent in ("Europe", "Asia", "Africa", "North America", "South America", "Oceania"):
            expected = "Yes." if continent in city.continents else "No."
            assert ask(city, f"Is it in {continent}?").text == expected, (city.name, continent)
        expected = "Yes." if "sea" in city.nature else "No."
        assert ask(city, "Is it by the sea?").text == expected, city.name
        side = "northern" if city.latitude > 0 else "southern"
        assert ask(city, f"Is it in the {side} hemisphere?").text == "Yes.", city.name
        assert ask(city, f"Is it in {city.country.name}?").text == "Yes.", city.name
        for language in city.languages:
            assert ask(city, f"Do people speak {language}?").text == "Yes.", (city.name, language)
        assert (ask(city, "Is it the capital?").text == "Yes.") == ("capital" in city.tags)


def test_every_name_of_every_city_wins_and_wins_for_no_other_city() -> None:
    paris = ATLAS.cities["Paris"]
    for city in CITIES:
        for name in city.names:
            guess = f"Is it {name}, {city.country.name}?"
            assert ask(city, guess).verdict is Verdict.WIN, guess
            assert city is paris or ask(paris, guess).verdict is Verdict.OTHER, guess


@pytest.mark.parametrize("question", questions()["refused"])
def test_requests_for_the_name_are_refused(question: str) -> None:
    for city in ("Paris", "Mexico City", "Singapore"):
        assert ask(city, question) == JudgeReply(
            Verdict.INVALID, NOTICES["invalid"], "a request for the name"
        )


@pytest.mark.parametrize("question", questions()["unknown"])
def test_what_cannot_be_read_is_not_answered(question: str) -> None:
    for city in ("Paris", "Mexico City", "Singapore"):
        assert ask(city, question).text == UNKNOWN


def test_J14_a_city_that_the_data_lack_is_an_error_and_no_answer() -> None:
    task = Task("t", SOURCE, "Atlantis, Greece", ())
    reply = CityJudge().answer([JudgeRequest(task, "Is it in Europe?")])[0]
    assert reply.verdict is Verdict.ERROR
    assert "Atlantis, Greece" in reply.reason
    wrong = replace(task, secret="Paris, Germany")
    assert CityJudge().answer([JudgeRequest(wrong, "Is it big?")])[0].verdict is Verdict.ERROR
