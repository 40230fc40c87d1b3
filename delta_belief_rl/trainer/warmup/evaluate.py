"""Plays whole games with a warmed-up model and measures what the later training relies on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from delta_belief_rl.trainer.warmup.games import Language
from delta_belief_rl.types import FloatArray, IntArray

MAX_TURN_TOKENS = 24
HORIZONS = (12, 14, 16, 20)

Reading = tuple[int, int]
"""(property, thing) of an action, -1 where it is not that; (-1, -1) is an invalid action."""


@dataclass(slots=True)
class PlayedTurn:
    """One turn; ``remaining`` counts the consistent things before it."""

    start: int
    prop: int
    thing: int
    repeated: bool
    contradicts: bool
    remaining: int


@dataclass(slots=True)
class PlayedGame:
    """One game: its stream, and the state that its replies imply."""

    secret: int
    tokens: list[int]
    consistent: np.ndarray
    turns: list[PlayedTurn] = field(default_factory=list)
    asked: set[Reading] = field(default_factory=set)
    forced: list[int] = field(default_factory=list)
    action_start: int = 0
    won: bool = False
    done: bool = False

    def take_turn(self, reading: Reading, language: Language, max_turns: int) -> None:
        """Apply one action and queue the reply's tokens."""
        prop, thing = reading
        valid = reading != (-1, -1)
        repeated = valid and reading in self.asked
        self.turns.append(
            PlayedTurn(
                start=self.action_start,
                prop=prop,
                thing=thing,
                repeated=repeated,
                contradicts=thing >= 0 and not self.consistent[thing],
                remaining=int(self.consistent.sum()),
            )
        )
        self.asked.add(reading)
        reply = language.no
        if repeated or not valid:
            reply = language.repeated if repeated else language.invalid
        elif thing >= 0:
            self.won = thing == self.secret
            self.consistent[thing] &= self.won
        else:
            yes = bool(language.values[self.secret, prop])
            reply = language.yes if yes else language.no
            self.consistent &= language.values[:, prop] == yes
        self.done = self.won or len(self.turns) >= max_turns
        if not self.won:
            self.forced.extend(reply)
        self.action_start = len(self.tokens) + len(self.forced)


def read_by_tokens(language: Language) -> Callable[[Sequence[int]], Reading]:
    """Reads an action by looking its tokens up among the known sentences."""
    actions = language.actions
    table = {
        tokens: (int(p), int(s))
        for tokens, p, s in zip(actions.tokens, actions.property_of, actions.thing_of, strict=True)
    }
    return lambda tokens: table.get(tuple(tokens), (-1, -1))


@torch.no_grad()
def play(
    model: PreTrainedModel,
    language: Language,
    secrets: Sequence[int],
    max_turns: int = 20,
    seed: int = 0,
    temperature: float = 1.0,
    read: Callable[[Sequence[int]], Reading] | None = None,
) -> list[PlayedGame]:
    """Play one game for every secret, in lock step with one key-value cache.

    All rows advance by one token at a time, each by its own next sampled or given token, so no row
    is ever padded; rows whose game is over are dropped now and then.

    Args:
        secrets: Indices of things, one game each.
        read: Tokens of an action (end included) to what it asks; exact look-up when None.
    """
    device = next(model.parameters()).device
    read = read or read_by_tokens(language)
    generator = torch.Generator(device).manual_seed(seed)
    things = len(language.values)
    games = [
        PlayedGame(
            secret=int(secret),
            tokens=list(language.prompt),
            consistent=np.ones(things, dtype=np.bool_),
            action_start=len(language.prompt),
        )
        for secret in secrets
    ]
    rows = list(games)
    cache = DynamicCache(config=model.config)
    keyword = cache_keyword(model)
    feed = torch.tensor([language.prompt] * len(rows), device=device)
    while rows:
        logits = model(input_ids=feed, use_cache=True, **{keyword: cache}).logits[:, -1]
        sampled = draw_tokens(logits.float(), temperature, generator).tolist()
        fed = [
            _advance(game, token, language, max_turns, read)
            for game, token in zip(rows, sampled, strict=True)
        ]
        open_rows = [i for i, game in enumerate(rows) if not game.done]
        if len(open_rows) <= 0.75 * len(rows):
            keep = torch.tensor(open_rows, device=device, dtype=torch.long)
            rows = [rows[i] for i in open_rows]
            fed = [fed[i] for i in open_rows]
            if rows:
                cache.batch_select_indices(keep)
        feed = torch.tensor(fed, device=device)[:, None]
    return games


def cache_keyword(model: PreTrainedModel) -> str:
    """The cache's argument has two names among the supported versions of transformers."""
    known = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def draw_tokens(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token for each row, ``[B, V] -> [B]``; the likeliest at temperature 0."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def _advance(
    game: PlayedGame,
    sampled: int,
    language: Language,
    max_turns: int,
    read: Callable[[Sequence[int]], Reading],
) -> int:
    if game.done:
        return language.pad
    if game.forced:
        token = game.forced.pop(0)
        game.tokens.append(token)
        return token
    game.tokens.append(sampled)
    action = game.tokens[game.action_start :]
    if sampled == language.end or len(action) >= MAX_TURN_TOKENS:
        if sampled != language.end:
            game.forced.append(language.end)
        game.take_turn(read(action), language, max_turns)
        if game.done:
            game.tokens.extend(game.forced)
    return sampled


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What was measured; shares between 0 and 1, beliefs in nats."""

    games: int
    strict_win: dict[int, float]
    """By turn budget."""
    strict_win_interval: dict[int, tuple[float, float]]
    """95 %, bootstrap over secrets."""
    contradicting_guesses: float
    repeated_turns: float
    invalid_turns: float
    mean_turns: float
    guesses_per_game: float
    remaining_at_guess: float
    """Mean number of consistent things when guessing."""
    belief_by_turn: list[float]
    """Mean log-probability of the secret after "Is it '", by number of turns played, open games
    only."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def report(
    games: Sequence[PlayedGame], beliefs: Sequence[FloatArray], seed: int = 0
) -> WarmupReport:
    """Summarise played games.

    Args:
        beliefs: For some of the games, log-probs before each turn.
    """
    turns = [turn for game in games for turn in game.turns]
    guesses = [turn for turn in turns if turn.thing >= 0]
    won_at = np.array([len(game.turns) if game.won else 10**9 for game in games])
    secrets = np.array([game.secret for game in games])
    longest = max((len(b) for b in beliefs), default=0)
    by_turn = [[b[t] for b in beliefs if len(b) > t] for t in range(longest)]
    return WarmupReport(
        games=len(games),
        strict_win={t: float((won_at <= t).mean()) for t in HORIZONS},
        strict_win_interval={t: _interval((won_at <= t), secrets, seed) for t in HORIZONS},
        contradicting_guesses=_share([turn.contradicts for turn in guesses]),
        repeated_turns=_share([turn.repeated for turn in turns]),
        invalid_turns=_share([turn.prop < 0 and turn.thing < 0 for turn in turns]),
        mean_turns=len(turns) / len(games),
        guesses_per_game=len(guesses) / len(games),
        remaining_at_guess=_share([turn.remaining for turn in guesses]),
        belief_by_turn=[float(np.mean(values)) for values in by_turn],
    )


def _share(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _interval(won: np.ndarray, secrets: np.ndarray, seed: int) -> tuple[float, float]:
    names, index = np.unique(secrets, return_inverse=True)
    wins = np.bincount(index, weights=won.astype(float))
    counts = np.bincount(index)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(names), (1000, len(names)))
    rates = wins[draws].sum(1) / counts[draws].sum(1)
    return float(np.quantile(rates, 0.025)), float(np.quantile(rates, 0.975))


@torch.no_grad()
def elicited_beliefs(
    model: PreTrainedModel,
    language: Language,
    games: Sequence[PlayedGame],
    elicitations: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch: int = 256,
) -> list[FloatArray]:
    """Log-probability of each game's secret before each of its turns, by plain forward passes.

    Args:
        elicitations: For each thing, the tokens before its name in the elicitation and those of its
            name.

    Returns:
        One array per game, of the length of its number of turns.
    """
    device = next(model.parameters()).device
    rows: list[tuple[int, list[int], int]] = []
    for g, game in enumerate(games):
        before, name = elicitations[game.secret]
        for turn in game.turns:
            rows.append((g, [*game.tokens[: turn.start], *before, *name], len(name)))
    order = np.argsort([len(row[1]) for row in rows], kind="stable")
    values = np.zeros(len(rows))
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        values[part] = _name_scores(model, [rows[i] for i in part], language.pad, device)
    owner: IntArray = np.array([row[0] for row in rows])
    return [values[owner == g] for g in range(len(games))]


def _name_scores(
    model: PreTrainedModel,
    rows: Sequence[tuple[int, list[int], int]],
    pad: int,
    device: torch.device,
) -> FloatArray:
    longest = max(len(tokens) for _, tokens, _ in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.bool)
    for r, (_, tokens, count) in enumerate(rows):
        ids[r, : len(tokens)] = torch.tensor(tokens)
        mask[r, len(tokens) - count : len(tokens)] = True
    ids, mask = ids.to(device), mask.to(device)
    logp = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    token = logp.gather(2, ids[:, 1:, None])[..., 0]
    return (token * mask[:, 1:]).sum(1).double().cpu().numpy()
