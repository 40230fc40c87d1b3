"""The fixed guess that asks a model how likely it thinks the secret is.

The guess is an assistant message, ``Is it 'SECRET'?``, that is *scored* and never sampled. It hangs
on a game right after a turn's header, where the model would speak. Which of its tokens spell the
secret is decided by character ranges when the guess is built; nothing is searched for among token
ids.

The first guess of a game follows the long prompt, all later ones a short reply, so a part of the
first change of belief is the change of form. With an exchange of a question and a reply that say
nothing about the secret in front of it, the first guess has the form of the others. Only that guess
sees the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import FloatArray, IntArray, UserError

Aggregate = Literal["sum", "mean"]

DEFAULT_TEMPLATE = "Is it '{secret}'?"
TEMPLATES: Mapping[str, str] = {
    "murder_mystery": "I accuse. {secret}",
    "customer_service": "I know what is wrong. {secret}",
    "user_personalization": "I know what matters to you. {secret}",
}
"""By environment, the guess of one whose answer is a text and not a name."""
NEUTRAL_QUESTION = "Is it something?"
"""With yes for a reply it says nothing about any secret."""
_PLACE = "{secret}"


@dataclass(frozen=True, slots=True)
class Elicitation:
    """A guess as tokens.

    Tokens behind the secret's last one have no influence on its probability and are left out.

    Attributes:
        secret: The hidden answer.
        token_ids: From the first token after the header to the secret's last token; for a model
            that thinks, the empty thought of its template comes first.
        scored: Offsets in ``token_ids`` of the tokens that overlap the secret's characters.
        agg: A belief is the sum or the mean of the scored log-probs.
        lead_ids: What stands between a game's prompt and its first guess, seen by that guess alone:
            an exchange and the header of the turn behind it. May be empty.

    Example:
        ``Is it 'oak'?`` with the tokens ``Is``, `` it``, `` '``, ``o``, ``ak`` gives ``scored ==
        [3, 4]``.
    """

    secret: str
    token_ids: tuple[int, ...]
    scored: tuple[int, ...]
    agg: Aggregate = "sum"
    lead_ids: tuple[int, ...] = ()

    @property
    def offsets(self) -> IntArray:
        """``scored`` as an array, ``[n]``."""
        return np.array(self.scored, dtype=np.int64)

    @property
    def targets(self) -> IntArray:
        """Ids of the scored tokens, ``[n]``."""
        return np.array([self.token_ids[offset] for offset in self.scored], dtype=np.int64)

    @property
    def branch_ids(self) -> tuple[int, ...]:
        """The tokens that a model has to read: all but the last scored one."""
        return self.token_ids[: self.scored[-1]]

    def aggregate(self, logp: FloatArray) -> FloatArray:
        """Beliefs from scored log-probs: ``[..., n] -> [...]``, in nats."""
        return logp.sum(axis=-1) if self.agg == "sum" else logp.mean(axis=-1)

    @classmethod
    def build(
        cls,
        chat: ChatFormat,
        secret: str,
        template: str = DEFAULT_TEMPLATE,
        agg: Aggregate = "sum",
        exchange: tuple[str, str] | None = None,
    ) -> Elicitation:
        """Turn a secret into a guess.

        Args:
            chat: The model's chat format.
            secret: The hidden answer, exactly as it is stored.
            template: Text of the guess with ``{secret}`` in it once.
            agg: ``sum`` or ``mean`` over the secret's tokens.
            exchange: Question and reply in front of a game's first guess.

        Raises:
            UserError: The template or ``agg`` is unusable, or the tokenizer cannot express the
                secret.
        """
        if template.count(_PLACE) != 1:
            raise UserError(
                f"The elicitation template {template!r} must contain {_PLACE} exactly once."
            )
        if agg not in ("sum", "mean"):
            raise UserError(f"The belief's agg must be 'sum' or 'mean', not {agg!r}.")
        if not secret:
            raise UserError("A task has an empty secret: give every task an answer to be found.")
        before, after = chat.assistant_text(template).split(_PLACE)
        start, end = len(before), len(before) + len(secret)
        ids, ranges = chat.encode_with_offsets(before + secret + after)
        scored = tuple(i for i, (left, right) in enumerate(ranges) if left < end and right > start)
        _check(chat, secret, ids, scored)
        silent, lead = chat.no_thought_ids, ()
        if exchange is not None:
            lead = (*silent, *chat.assistant_ids(exchange[0]), *chat.reply_ids(exchange[1]))
        guess = (*silent, *ids[: scored[-1] + 1])
        return cls(secret, guess, tuple(len(silent) + i for i in scored), agg, lead)


def elicitor(
    chat: ChatFormat,
    template: str = DEFAULT_TEMPLATE,
    agg: Aggregate = "sum",
    exchange: tuple[str, str] | None = None,
) -> Callable[[str], Elicitation]:
    """``secret -> Elicitation``, each secret built once."""

    @cache
    def build(secret: str) -> Elicitation:
        return Elicitation.build(chat, secret, template, agg, exchange)

    return build


def template_of(env: str) -> str:
    """The guess of an environment (``multi_turn.env``).

    Example:
        >>> template_of("guess_my_city")
        "Is it '{secret}'?"
    """
    return TEMPLATES.get(env, DEFAULT_TEMPLATE)


def _check(chat: ChatFormat, secret: str, ids: tuple[int, ...], scored: tuple[int, ...]) -> None:
    unknown = chat.tokenizer.unk_token_id
    lost = not scored or any(ids[i] == unknown for i in scored)
    if lost or secret not in chat.decode_exact(ids):
        raise UserError(
            f"The tokenizer cannot express the secret {secret!r}, so its probability is undefined: "
            "spell the secret differently or use another model."
        )
