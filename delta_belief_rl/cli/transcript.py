"""Games as text."""

from __future__ import annotations

from delta_belief_rl.eval.report import GameView

_WIDEST = 60


def game_text(game: GameView, *notes: str) -> str:
    """A heading, then a line per turn: number, question, reply, belief after it.

    Args:
        game: The game.
        notes: Further parts of the heading.

    Example:
        >>> from delta_belief_rl.eval.report import TurnView
        >>> turn = TurnView("Is it an oak?", "Finished", 0.5)
        >>> print(game_text(GameView("oak", 3, True, (turn,))))
        oak | won in 1 turn
           1  Is it an oak?  Finished      50 %
    """
    count = len(game.turns)
    ended = f"{'won' if game.won else 'not won'} in {count} turn{'s' * (count != 1)}"
    questions = [" ".join(turn.question.split()) for turn in game.turns]
    replies = [" ".join(turn.reply.split()) for turn in game.turns]
    left = min(_WIDEST, max(map(len, questions), default=0))
    right = min(_WIDEST, max(map(len, replies), default=0))
    lines = [" | ".join((game.secret, ended, *notes))]
    if game.prior is not None:
        lines.append(f"      {'':{left}}  {'':{right}}  {_percent(game.prior)}")
    for number, (turn, question, reply) in enumerate(
        zip(game.turns, questions, replies, strict=True), start=1
    ):
        line = f"  {number:2d}  {question:{left}}  {reply:{right}}  {_percent(turn.belief)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _percent(belief: float | None) -> str:
    return "" if belief is None else f"{100 * belief:6.3g} %"
