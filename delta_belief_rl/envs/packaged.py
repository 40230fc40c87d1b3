"""Tasks of the environments that come with data of this project's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from delta_belief_rl.envs.customer_service import data as customer_service
from delta_belief_rl.envs.guess_my_city import data as guess_my_city
from delta_belief_rl.envs.murder_mystery import data as murder_mystery
from delta_belief_rl.envs.user_personalization import data as user_personalization
from delta_belief_rl.types import Task

TASKS: Mapping[str, Callable[[str], list[Task]]] = {
    "guess_my_city": guess_my_city.tasks,
    "murder_mystery": murder_mystery.tasks,
    "customer_service": customer_service.tasks,
    "user_personalization": user_personalization.tasks,
}
"""By environment: the name of a split (``train``, ``val``, ``test``) to its tasks. The files that
``package:ENV/SPLIT`` names are written from them (``delta-belief data make``)."""
