"""Tasks of the environments that come with data of this project's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from delta_belief_rl.envs import (
    customer_service_data,
    guess_my_city_data,
    murder_mystery_data,
    user_personalization_data,
)
from delta_belief_rl.types import Task

TASKS: Mapping[str, Callable[[str], list[Task]]] = {
    "guess_my_city": guess_my_city_data.tasks,
    "murder_mystery": murder_mystery_data.tasks,
    "customer_service": customer_service_data.tasks,
    "user_personalization": user_personalization_data.tasks,
}
"""By environment: the name of a split (``train``, ``val``, ``test``) to its tasks. The files that
``package:ENV/SPLIT`` names are written from them (``delta-belief data make``)."""
