"""The rule judge of Guess My City: answers open questions from the packaged data, without a model.

It is exact as far as its data go, deterministic, and says that it does not know rather than guess.
No reply contains a name of the city or of its country, or an adjective of the country. A request
for the name is refused, a wrong guess gets "No" and a hint, and a city that the data lack is an
error. Whoever names the right city in a way that is no strict guess is asked to name it alone; of
several cities the judge says nothing, so that no list can be halved.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.envs.guess_my_city.data import City, city_of, load_atlas, name_key, reveals
from delta_belief_rl.envs.guess_my_city.game import MAX_CHARACTERS, NOTICES
from delta_belief_rl.envs.guess_my_city.reading import (
    Place,
    mentions,
    names_elsewhere,
    place_of,
    read_action,
)
from delta_belief_rl.judge.guess_my_city.facts import about_facts, anywhere, in_general
from delta_belief_rl.judge.guess_my_city.lexicon import load_lexicon
from delta_belief_rl.judge.guess_my_city.nature import NATURE_TOPICS
from delta_belief_rl.judge.guess_my_city.people import PEOPLE_TOPICS
from delta_belief_rl.judge.guess_my_city.place import (
    MAP_TOPICS,
    PLACE_TOPICS,
    lies_elsewhere,
    location,
)
from delta_belief_rl.judge.guess_my_city.question import UNKNOWN, Question, read_question
from delta_belief_rl.types import Verdict


class CityJudge:
    """Answers from the packaged data (``guess_my_city.data``)."""

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """One reply for each request, in their order."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: JudgeRequest) -> JudgeReply:
        city = city_of(request.task.secret)
        if city is None:
            reason = f"The city {request.task.secret!r} is not in the data of guess_my_city."
            return JudgeReply(Verdict.ERROR, reason=reason)
        action = request.action[:MAX_CHARACTERS]
        reading = read_action(action, request.task.secret, request.task.aliases)
        if reading.strict:
            return JudgeReply(Verdict.WIN, NOTICES["finished"])
        if reading.questions > 1:
            return JudgeReply(Verdict.OTHER, NOTICES["multiple_questions"])
        if reading.is_list:
            return JudgeReply(Verdict.OTHER, NOTICES["multiple_bets"])
        place = place_of(request.task)
        if names_elsewhere(action, place):
            return JudgeReply(Verdict.OTHER, _wrong_guess(name_key(action), city))
        if mentions(action) == (city,) and (reading.guess or not _asks_land(action, city, place)):
            return JudgeReply(Verdict.OTHER, NOTICES["name_city"])
        if reading.guess:
            return JudgeReply(Verdict.OTHER, _wrong_guess(reading.guess, city))
        return _told(action, city.name)


def _asks_land(action: str, city: City, place: Place) -> bool:
    """Whether a question may be about the country that is called like its city, as Singapore is."""
    name = name_key(city.name)
    return name in place.lands and f" in {name} " in f" {name_key(action)} "


@lru_cache(maxsize=1 << 16)
def _told(action: str, city_name: str) -> JudgeReply:
    """The reply to what is no guess; a group's games ask the same things all the time."""
    city = load_atlas().cities[city_name]
    question = read_question(action, city)
    reply = _topic(question)
    if reply is None and load_lexicon().refused.search(question.text):
        return JudgeReply(Verdict.INVALID, NOTICES["invalid"], "a request for the name")
    reply = reply or _rest(question)
    # Parts that are harmless alone might give something away together.
    return JudgeReply(Verdict.OTHER, UNKNOWN if reveals(reply, city) else reply)


def _topic(question: Question) -> str | None:
    """The answer of the first topic that has one."""
    patterns = load_lexicon().topics
    for topics in (PEOPLE_TOPICS, PLACE_TOPICS, NATURE_TOPICS):
        for name, answer in topics.items():
            if patterns[name].search(question.text) and (reply := answer(question)):
                # "A port in Africa?", "a Spanish-speaking country in Asia?" ask for two things.
                return "No." if reply == "Yes." and lies_elsewhere(question) else reply
    return None


def _rest(question: Question) -> str:
    """What is left: phrases of the city, then places that are only mentioned."""
    for answer in (about_facts, *MAP_TOPICS, location, in_general, anywhere):
        if reply := answer(question):
            return reply
    return UNKNOWN


def _wrong_guess(guess: str, city: City) -> str:
    """ "No" with how near the guess is, or with a fact where the guessed city is not known."""
    other = load_atlas().city_keys.get(guess)
    if other is None:
        facts = city.facts["sights"] + city.facts["food"]
        number = int.from_bytes(hashlib.blake2b(normalise(guess).encode(), digest_size=4).digest())
        return f"No. A hint: it is known for {facts[number % len(facts)]}."
    if other.country == city.country:
        return "No, but the country is right."
    if set(other.continents) & set(city.continents):
        return "No, but the continent is right."
    return "No, it is on another continent."
