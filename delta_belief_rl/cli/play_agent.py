"""One game of a language model, with its belief in the secret after every turn."""

from __future__ import annotations

import asyncio
import math

from delta_belief_rl.belief.branched import ScoreRequest, score_batch
from delta_belief_rl.belief.elicit import elicitor
from delta_belief_rl.config.paths import find_model
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.engines.hf_engine import HFEngine
from delta_belief_rl.engines.pump import EnginePump, local_calls
from delta_belief_rl.envs.worlds.game import WorldTwentyQuestions, world_settings
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.eval.report import GameView, TurnView
from delta_belief_rl.judge.pool import JudgePool, local_replica
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.models.loading import load_causal_lm, load_tokenizer
from delta_belief_rl.models.packaged import materialise
from delta_belief_rl.rollout.game import GameId, GameSettings, play_game
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Task

_TURN_TOKENS = 24
_REPLY_TOKENS = 8
"""Room for a reply of the embedded world with the template around it."""


def agent_game(
    task: Task, grammar: Grammar, turns: int, seed: int, model_path: str, temperature: float
) -> GameView:
    """Play one game on the CPU.

    Args:
        model_path: Folder or name of a model, as ``actor_rollout_ref.model.path``.
        temperature: 0 is greedy.

    Raises:
        UserError: The model cannot be loaded.
    """
    folder = materialise(find_model(model_path))
    chat = ChatFormat.from_tokenizer(load_tokenizer(folder))
    model = load_causal_lm(folder)
    room = len(chat.open_ids(task.messages)) + turns * (_TURN_TOKENS + _REPLY_TOKENS)
    settings = GameSettings(
        max_turns=turns,
        max_turn_tokens=_TURN_TOKENS,
        max_episode_tokens=room,
        sampling=SamplingParams(temperature=temperature),
    )
    engine = EnginePump(*local_calls(HFEngine(model, max_sequences=1, max_len=room)))
    judge = JudgePool([local_replica(WorldJudge(grammar.world, grammar))])
    env = WorldTwentyQuestions(task, world_settings(turns), grammar)
    game = asyncio.run(play_game(env, engine, judge, chat, settings, GameId(seed, 0, 0)))
    (scored,) = score_batch(model, [ScoreRequest.of(game, elicitor(chat)(task.secret))])
    prior, *after = (math.exp(belief) for belief in scored.beliefs)
    exchanges = zip(game.turns, after, strict=True)
    return GameView(
        secret=task.secret,
        step=0,
        won=game.strict_win,
        turns=tuple(TurnView(turn.action, turn.reply, belief) for turn, belief in exchanges),
        prior=prior,
    )
