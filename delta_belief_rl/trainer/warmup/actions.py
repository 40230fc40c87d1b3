"""All the sentences an agent of a closed world can say, as token sequences and as their prefix
tree.

Legend: ``P`` properties, ``S`` things, ``A`` actions, ``M`` nodes of the tree, ``C`` most children
    of a node.

A teacher that knows the probability of every action in a state gives an exact target for every
token that
follows: the share of each child among the actions below a node. Training on these shares instead of
on one drawn token has the same expectation and much less noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.types import BoolArray, FloatArray, IntArray, UserError


@dataclass(frozen=True, slots=True)
class Actions:
    """Every action and the prefix tree over their tokens.

    Attributes:
        tokens: ``A`` token sequences, end-of-turn token included, in lexicographic order.
        texts: The sentences of ``tokens``.
        property_of: ``[A]``, index of the property asked, -1 for guesses.
        thing_of: ``[A]``, index of the thing guessed, -1 for questions.
        wording: ``[A]``, probability of this wording given what is asked or guessed; sums to one
            over the wordings of each property and of each thing.
        paths: ``A`` sequences of nodes: ``paths[a][j]`` is the node before token ``j`` (0 is the
            root).
        children: ``[M, C]``, the nodes below, -1 where none.
        child_tokens: ``[M, C]``, the token that leads to the child, 0 where none.
        first: ``[M]``, first action below the node.
        last: ``[M]``, one past the last action below the node.
    """

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    property_of: IntArray
    thing_of: IntArray
    wording: FloatArray
    paths: tuple[tuple[int, ...], ...]
    children: IntArray
    child_tokens: IntArray
    first: IntArray
    last: IntArray

    @property
    def num_nodes(self) -> int:
        """Size of the tree, the root included."""
        return len(self.first)

    def membership(self) -> BoolArray:
        """``[A, M]``, true where the action lies below the node."""
        index = np.arange(len(self.tokens))[:, None]
        return (index >= self.first[None, :]) & (index < self.last[None, :])

    def action_probabilities(
        self, ask: NDArray[np.floating[Any]], guess: NDArray[np.floating[Any]]
    ) -> FloatArray:
        """Spread probabilities of properties ``[..., P]`` and things ``[..., S]`` over actions
        ``[..., A]``."""
        asked = np.take(ask, np.maximum(self.property_of, 0), axis=-1)
        guessed = np.take(guess, np.maximum(self.thing_of, 0), axis=-1)
        return np.where(self.property_of >= 0, asked, guessed) * self.wording

    def targets(self, probabilities: FloatArray, node: int) -> dict[int, float]:
        """Exact next-token distribution at a node, as ``{token: probability}`` without zeros.

        Args:
            probabilities: ``[A]`` of the actions in the present state.
            node: The node reached so far.
        """
        mass = {
            int(self.child_tokens[node, c]): float(
                probabilities[self.first[child] : self.last[child]].sum()
            )
            for c, child in enumerate(self.children[node])
            if child >= 0
        }
        total = sum(mass.values())
        return {token: value / total for token, value in mass.items() if value > 0}


def enumerate_actions(
    questions: Sequence[Sequence[str]],
    guess_texts: Sequence[Sequence[str]],
    encode: Callable[[str], Sequence[int]],
    end_token: int,
    canonical: float = 0.6,
    forms: Sequence[float] = (0.7, 0.3),
) -> Actions:
    """List every action of a world.

    Args:
        questions: For each property, its wordings, the canonical one first.
        guess_texts: For each thing, its guess in every form, e.g. ``("Is it a dog?", "Is it
            'dog'?")``.
        encode: Text to token ids, without special tokens.
        end_token: The end-of-turn token.
        canonical: Probability of a property's first phrasing; the others share the rest.
        forms: Probabilities of the guess forms.

    Raises:
        UserError: Two actions have the same tokens, or one is a prefix of another.
    """
    rows: list[tuple[tuple[int, ...], str, int, int, float]] = []

    def add(text: str, prop: int, thing: int, weight: float) -> None:
        rows.append(((*encode(text), end_token), text, prop, thing, weight))

    for p, wordings in enumerate(questions):
        others = len(wordings) - 1
        for w, text in enumerate(wordings):
            first = canonical if others else 1.0
            add(text, p, -1, first if w == 0 else (1 - canonical) / others)
    for s, texts in enumerate(guess_texts):
        for text, weight in zip(texts, forms, strict=True):
            add(text, -1, s, weight / sum(forms))
    rows.sort(key=lambda row: row[0])
    _check_distinct(rows)
    return _with_tree(rows)


def _check_distinct(rows: Sequence[tuple[tuple[int, ...], str, int, int, float]]) -> None:
    for a, b in pairwise(rows):
        if a[0] == b[0][: len(a[0])]:
            raise UserError(
                f"the sentences {a[1]!r} and {b[1]!r} have the same tokens: "
                "reword one of them or let the tokenizer know all words of the world"
            )


def _with_tree(rows: Sequence[tuple[tuple[int, ...], str, int, int, float]]) -> Actions:
    nodes: dict[tuple[int, ...], int] = {(): 0}
    below: list[dict[int, int]] = [{}]
    spans: list[list[int]] = [[0, len(rows)]]
    paths: list[tuple[int, ...]] = []
    for a, (tokens, *_) in enumerate(rows):
        path = [0]
        for end in range(1, len(tokens) + 1):
            prefix = tokens[:end]
            node = nodes.get(prefix)
            if node is None:
                node = nodes[prefix] = len(below)
                below.append({})
                spans.append([a, a])
            below[path[-1]][tokens[end - 1]] = node
            spans[node][1] = a + 1
            path.append(node)
        paths.append(tuple(path[:-1]))
    width = max(len(kids) for kids in below)
    children = np.full((len(below), width), -1, dtype=np.int64)
    child_tokens = np.zeros((len(below), width), dtype=np.int64)
    for node, kids in enumerate(below):
        children[node, : len(kids)] = list(kids.values())
        child_tokens[node, : len(kids)] = list(kids)
    return Actions(
        tokens=tuple(row[0] for row in rows),
        texts=tuple(row[1] for row in rows),
        property_of=np.array([row[2] for row in rows], dtype=np.int64),
        thing_of=np.array([row[3] for row in rows], dtype=np.int64),
        wording=np.array([row[4] for row in rows], dtype=np.float64),
        paths=tuple(paths),
        children=children,
        child_tokens=child_tokens,
        first=np.array([span[0] for span in spans], dtype=np.int64),
        last=np.array([span[1] for span in spans], dtype=np.int64),
    )
