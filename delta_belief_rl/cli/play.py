"""``delta-belief play``: a person plays the embedded world, or watches a player.

The dialogue of a person goes to stderr, so that stdout holds the finished game alone.
"""

from __future__ import annotations

import argparse
import difflib
import secrets
import sys
from dataclasses import asdict

import numpy as np

from delta_belief_rl.cli.transcript import game_text
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.envs.worlds.game import WorldTwentyQuestions, world_settings
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.players import (
    MediocrePlayer,
    PlayerFactory,
    RandomPlayer,
    SplitterPlayer,
    play,
    sentence,
)
from delta_belief_rl.envs.worlds.table import World, load_world
from delta_belief_rl.envs.worlds.tasks import DEFAULT_PROMPT, SOURCE
from delta_belief_rl.eval.report import GameView, TurnView
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.types import Task, UserError, Verdict

AGENT = "delta_belief_rl/assets/agent"
TABLE_PLAYERS: dict[str, PlayerFactory] = {
    "random": RandomPlayer,
    "mediocre": MediocrePlayer,
    "splitter": SplitterPlayer,
}
"""Players that reason from the table."""
_EXAMPLES = 5


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    players = ("person", *TABLE_PLAYERS, "agent")
    parser.add_argument("--player", choices=players, default="person", help="who asks")
    parser.add_argument("--world", default="everyday", help="name or path of the world")
    parser.add_argument("--secret", help="what is to be found; drawn where it is not given")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seed", type=int, help="of every draw; new each time where not given")
    parser.add_argument("--model", default=AGENT, help="folder of the agent")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the agent")


def _run(args: argparse.Namespace) -> Result:
    if args.turns < 1:
        raise UserError(f"A game needs at least one turn, not --turns {args.turns}.")
    world = load_world(args.world)
    grammar = Grammar(world)
    seed = secrets.randbits(31) if args.seed is None else args.seed
    rng = np.random.default_rng(seed)
    secret = _secret(grammar, args.secret, rng)
    task = Task("game", SOURCE, secret, DEFAULT_PROMPT, aliases=_aliases(world, secret))
    if args.player == "person":
        game = person_game(task, grammar, args.turns, rng)
    elif args.player == "agent":
        from delta_belief_rl.cli.play_agent import agent_game

        game = agent_game(task, grammar, args.turns, seed, args.model, args.temperature)
    else:
        game = table_game(TABLE_PLAYERS[args.player], secret, grammar, args.turns, rng)
    value = {"player": args.player, "world": world.name, "seed": seed, **asdict(game)}
    return Result(value=value, text=game_text(game, f"{args.player} player", f"seed {seed}"))


def _secret(grammar: Grammar, name: str | None, rng: np.random.Generator) -> str:
    things = [thing.name for thing in grammar.world.things]
    if name is None:
        return things[int(rng.integers(len(things)))]
    found = grammar.thing_of(name)
    if found is None:
        close = difflib.get_close_matches(name.lower(), things, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise UserError(f"The world {grammar.world.name!r} has no thing {name!r}{hint}")
    return found


def _aliases(world: World, secret: str) -> tuple[str, ...]:
    return tuple(world.things[world.index(secret)].aliases)


def table_game(
    factory: PlayerFactory, secret: str, grammar: Grammar, turns: int, rng: np.random.Generator
) -> GameView:
    """A game of a player that reasons from the table."""
    record = play(factory(grammar, turns), grammar.world, secret, turns, rng, grammar)
    exchanges = tuple(TurnView(question, reply) for question, reply in record.texts)
    return GameView(secret, 0, record.won, exchanges)


def person_game(task: Task, grammar: Grammar, turns: int, rng: np.random.Generator) -> GameView:
    """A game of the person at the terminal, under the rules that the agent plays by."""
    env = WorldTwentyQuestions(task, world_settings(turns), grammar)
    judge = WorldJudge(grammar.world, grammar)
    say(
        f"Find one of {len(grammar.world.things)} things within {turns} yes-or-no questions.\n"
        "Guess it by name, as in: Is it a hat?  An empty line shows examples, "
        "Ctrl-D gives up."
    )
    asked: list[TurnView] = []
    won = False
    while len(asked) < turns and not won:
        question = _ask(f"{len(asked) + 1:2d} of {turns}> ")
        if question is None:
            break
        if not question:
            say("\n".join(_examples(grammar.world, rng)))
            continue
        action = env.parse(question)
        reply = judge.answer([env.judge_request(action)])[0] if action.needs_judge else None
        outcome = env.apply(action, reply)
        why = reply.reason if reply and outcome.verdict is Verdict.INVALID else ""
        say(f"    {outcome.reply}{f' ({why})' if why else ''}")
        asked.append(TurnView(question, outcome.reply))
        won = outcome.verdict is Verdict.WIN
    say(f"{'Found' if won else 'It was'}: {task.secret}")
    return GameView(task.secret, 0, won, tuple(asked))


def say(text: str, end: str = "\n") -> None:
    """A part of the dialogue."""
    print(text, end=end, file=sys.stderr, flush=True)


def _ask(prompt: str) -> str | None:
    """A line of the person's; None at the end of the input."""
    say(prompt, end="")
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    if not line:
        say("")
        return None
    return line.strip()


def _examples(world: World, rng: np.random.Generator) -> list[str]:
    count = len(world.properties)
    chosen = rng.choice(count, size=min(_EXAMPLES, count), replace=False)
    return [f"    {sentence(world.properties[int(i)].phrasings[0])}" for i in chosen]


VERB = Verb(
    name="play",
    help="Play 20 Questions over the embedded world, or watch a player.",
    example="delta-belief play --player agent --secret penguin",
    add_arguments=_add_arguments,
    run=_run,
)
