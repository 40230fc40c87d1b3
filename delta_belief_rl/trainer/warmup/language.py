"""From a world and a tokenizer to everything the generator needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from delta_belief_rl.envs.worlds.game import WORLD_NOTICES
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.players import GUESS_FORMS, sentence
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.text.word_tokenizer import build_word_tokenizer
from delta_belief_rl.trainer.warmup.actions import enumerate_actions
from delta_belief_rl.trainer.warmup.games import Language
from delta_belief_rl.types import BoolArray, Message


class PropertyLike(Protocol):
    """A yes/no property and the ways to ask for it, the canonical one first."""

    @property
    def key(self) -> str:
        """Unique name."""
        ...

    @property
    def phrasings(self) -> Sequence[str]:
        """Lower-case questions without question marks."""
        ...


class ThingLike(Protocol):
    """A thing that can be guessed."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...


class WorldLike(Protocol):
    """What the warm-up reads of a world."""

    @property
    def properties(self) -> Sequence[PropertyLike]:
        """``P`` of them."""
        ...

    @property
    def things(self) -> Sequence[ThingLike]:
        """``S`` of them."""
        ...

    @property
    def values(self) -> BoolArray:
        """``[S, P]``."""
        ...


def guess_texts(world: WorldLike) -> tuple[tuple[str, ...], ...]:
    """Each thing's guess in natural words and in the form in which belief is elicited."""
    return tuple(
        tuple(
            form.format(article="an" if thing.name[0] in "aeiou" else "a", name=thing.name)
            for form in GUESS_FORMS
        )
        for thing in world.things
    )


def corpus(world: WorldLike, messages: Sequence[Message]) -> list[str]:
    """Every text of a world's games."""
    texts = [message.content for message in messages]
    texts += [sentence(text) for prop in world.properties for text in prop.phrasings]
    texts += [text for forms in guess_texts(world) for text in forms]
    return [*texts, *WORLD_NOTICES.values()]


def world_tokenizer(world: WorldLike, messages: Sequence[Message]) -> PreTrainedTokenizerBase:
    """The word tokenizer of a world's games."""
    return build_word_tokenizer(corpus(world, messages))


def build_language(
    world: WorldLike, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> Language:
    """Prepare a world for the game generator.

    Args:
        tokenizer: Any tokenizer with a chat template.
        messages: The messages that open every game.

    Raises:
        UserError: The tokenizer cannot tell two sentences of the world apart.
    """
    chat = ChatFormat.from_tokenizer(tokenizer, template_options(tokenizer))
    questions = [[sentence(text) for text in prop.phrasings] for prop in world.properties]
    pad = cast("int | None", tokenizer.pad_token_id)
    return Language(
        values=np.asarray(world.values, dtype=np.bool_),
        actions=enumerate_actions(
            questions, guess_texts(world), lambda text: chat.assistant_ids(text)[:-1], chat.eot_id
        ),
        prompt=chat.open_ids(messages),
        yes=chat.reply_ids(WORLD_NOTICES["yes"]),
        no=chat.reply_ids(WORLD_NOTICES["no"]),
        repeated=chat.reply_ids(WORLD_NOTICES["repeated"]),
        invalid=chat.reply_ids(WORLD_NOTICES["invalid"]),
        end=chat.eot_id,
        pad=chat.eot_id if pad is None else pad,
    )


def template_options(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Switch thinking off where the template knows the switch."""
    template = tokenizer.chat_template
    known = isinstance(template, str) and "enable_thinking" in template
    return {"enable_thinking": False} if known else {}


def reader(
    world: WorldLike, tokenizer: PreTrainedTokenizerBase, grammar: Grammar
) -> Callable[[Sequence[int]], tuple[int, int]]:
    """Reads sampled tokens as (property, thing), -1 where it is not that, by the world's own
    grammar."""
    columns = {prop.key: p for p, prop in enumerate(world.properties)}
    rows = {thing.name: s for s, thing in enumerate(world.things)}

    @cache
    def read(tokens: tuple[int, ...]) -> tuple[int, int]:
        text = cast(str, tokenizer.decode(list(tokens), skip_special_tokens=True))
        parsed = grammar.parse(text.strip())
        if parsed.kind == "property" and parsed.property_key is not None:
            return columns[parsed.property_key], -1
        if parsed.kind == "guess" and parsed.thing is not None:
            return -1, rows[parsed.thing]
        return -1, -1

    return lambda tokens: read(tuple(tokens))


def elicitation_tokens(
    world: WorldLike, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """For each thing, the tokens of the elicitation before its name, and those of its name."""
    quoted = [forms[-1] for forms in guess_texts(world)]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in quoted]
    before = _common(rows)
    after = _common([row[::-1] for row in rows])
    return [(row[:before], row[before : len(row) - after]) for row in rows]


def _common(rows: Sequence[Sequence[int]]) -> int:
    shortest = min(len(row) for row in rows)
    same = [all(row[i] == rows[0][i] for row in rows) for i in range(shortest)]
    return same.index(False) if False in same else shortest
