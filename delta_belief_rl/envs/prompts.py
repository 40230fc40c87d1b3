"""First messages of this project's own 20 Questions tasks: one wording for every split."""

from __future__ import annotations

from collections.abc import Mapping

from delta_belief_rl.types import Message

SYSTEM = Message(
    "system",
    "You play 20 Questions and you are the one who asks. The secret is a common English noun.\n"
    "\n"
    "Find the secret with clear yes-or-no questions. Begin with broad questions, let every answer "
    "guide the next one, and leave as few possibilities as you can with each question.",
)

_TAGGED = (
    "Never ask twice: the same question always gets the same answer. Ask one question at a time, "
    "and name your guess as soon as you are confident. Put the question between <question> and "
    "</question>"
)

PROMPTS: Mapping[str, tuple[Message, Message]] = {
    "direct": (
        SYSTEM,
        Message(
            "user",
            "Write one brief question that can be answered with yes or no, either to learn more "
            "about the secret or to guess it. Write nothing but the question.",
        ),
    ),
    "cot": (
        SYSTEM,
        Message(
            "user",
            "Ask a question that can be answered with yes or no, either to learn more about the "
            "secret or to guess it. Before it, reason in at most two brief sentences about what "
            f"the answers so far tell you.\n\n{_TAGGED}.",
        ),
    ),
    "thinking": (
        SYSTEM,
        Message(
            "user",
            "Ask a question that can be answered with yes or no, either to learn more about the "
            "secret or to guess it. Before it, think in at most two brief sentences between "
            f"<think> and </think> about what the answers so far tell you.\n\n{_TAGGED}, after "
            "your thoughts.",
        ),
    ),
}
"""Mode of answering to the messages that open every game: the bare question; a short reason before
a question in tags (``actor_rollout_ref.actor.cot``); the same with the reason in tags, too
(``actor_rollout_ref.actor.thinking``)."""
