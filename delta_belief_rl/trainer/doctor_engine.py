"""Every number that engine and trainer both have, by every route there is.

A training rank and a policy engine are made from a run's own settings; vLLM has a process of its
own, as in a run. The rank's adapter is moved
away from its start until the model visibly answers otherwise, because a new adapter changes
nothing: with it, an engine that ignores adapters passes every comparison. Then a few conversations
are sampled, with the environment's words made up, and their log-probs and beliefs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.belief.elicit import Elicitation, elicitor, template_of
from delta_belief_rl.belief.naive import naive_scores
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import BranchStepEngine, Completion, GenRequest, SamplingParams
from delta_belief_rl.models.adapters import load_adapter_state, state_checksum
from delta_belief_rl.models.loading import load_tokenizer
from delta_belief_rl.rollout.game import closed_ids, is_failed
from delta_belief_rl.rollout.seeds import named_seed, turn_seed
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.trainer.actor import POLICY, AdapterSnapshot, PolicyActor
from delta_belief_rl.trainer.crosscheck import (
    Bound,
    Gap,
    belief_tails,
    run_bound,
    sampled_gap,
    tail_beliefs,
)
from delta_belief_rl.trainer.policy_engine import ENGINES, Opening
from delta_belief_rl.trainer.settings import (
    actor_settings,
    prior_exchange,
    sampling_params,
    template_options,
)
from delta_belief_rl.trainer.tasks import load_tasks
from delta_belief_rl.types import FloatArray, StopReason, Task, Trajectory, Turn, Verdict

OTHER_TEMPERATURE = 0.7
"""Where a log-prob before and one after the division by the temperature differ."""
MOVED = 0.3
"""Nats by which the adapter must move the probe on average before anything is compared."""
_DOUBLINGS = 24
_CONTINUED = 8
"""Tokens of a turn that is sampled behind a finished conversation."""
ROOM = 64
"""Tokens that a conversation leaves free for a guess, or for a turn that is sampled behind it."""
REPLIES = (("Yes", Verdict.YES), ("No", Verdict.NO))


class NoAnswer(RuntimeError):
    """The engine sampled nothing; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: e.g. ``sampled_logp``; ``docs/doctor.md`` explains each.
        passed: Whether it holds; None where it was not made.
        value: The number that is compared, where there is one.
        bound: What it is compared with.
        unit: Of both.
        note: Further numbers, or why it was not made.
    """

    name: str
    passed: bool | None
    value: float | None = None
    bound: float | None = None
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """How much is looked at.

    Attributes:
        games: Conversations for each temperature.
        turns: Turns of each.
        skip: Checks to leave out; names as in ``CHECKS``.
    """

    games: int = 4
    turns: int = 4
    skip: tuple[str, ...] = ()


@dataclass(slots=True)
class Patient:
    """A configuration with its parts in place."""

    cfg: RunConfig
    settings: DoctorSettings
    chat: ChatFormat
    tasks: Sequence[Task]
    elicit: Callable[[str], Elicitation]
    actor: PolicyActor
    engine: BranchStepEngine
    bound: Bound

    def gap(self, name: str, gap: Gap, note: str = "") -> Check:
        """A comparison of log-probs as a line; the number that is nearer to its bound is shown."""
        mean_first = gap.mean / self.bound.mean >= gap.largest / self.bound.largest
        value, bound = (
            (gap.mean, self.bound.mean) if mean_first else (gap.largest, self.bound.largest)
        )
        text = f"{gap.count} numbers differ by {gap}"
        passed = gap.within(self.bound) and gap.count > 0
        return Check(name, passed, value, bound, "nats", f"{text}; {note}" if note else text)


@contextmanager
def admitted(
    cfg: RunConfig, device: str, threads: int, settings: DoctorSettings
) -> Iterator[Patient]:
    """Tokenizer, engine and training rank, for the length of the block.

    The engine is first: one that measures the free memory of its GPU finds it as in a run.

    Raises:
        UserError: A model or a task file cannot be loaded, or the engine does not start.
    """
    ref = cfg.actor_rollout_ref
    chat = ChatFormat.from_tokenizer(
        load_tokenizer(ref.model.tokenizer_path or ref.model.path),
        template_options(cfg),
        ref.actor.thinking_history,
    )
    tasks = load_tasks(cfg)
    asked = replace(
        actor_settings(cfg, device, 1, threads), beliefs=(POLICY,), views=(), old_is_new=True
    )
    with ENGINES[ref.rollout.name](Opening(cfg, device, threads, 2 * settings.games)) as engine:
        yield Patient(
            cfg=cfg,
            settings=settings,
            chat=chat,
            tasks=(tasks.train or tasks.val)[: settings.games],
            elicit=elicitor(
                chat,
                template_of(cfg.multi_turn.env),
                agg=cfg.multi_turn.logprob_reward.agg,
                exchange=prior_exchange(cfg, REPLIES[0][0]),
            ),
            actor=PolicyActor(asked),
            engine=engine,
            bound=run_bound(cfg, device),
        )


def engine_checks(patient: Patient) -> Iterator[Check]:
    """Make all comparisons, in an order in which each can fail.

    Raises:
        NoAnswer: The engine sampled nothing.
    """
    yield from _adapter(patient)
    temperature = sampling_params(patient.cfg, "train").temperature
    if temperature != OTHER_TEMPERATURE:
        games = _converse(patient, OTHER_TEMPERATURE, "doctor/other")
        yield _sampled(patient, games, OTHER_TEMPERATURE)
        patient.engine.release([_session("doctor/other", number) for number in range(len(games))])
    games = _converse(patient, temperature, "doctor/own")
    yield _sampled(patient, games, temperature)
    # From here on the conversations are in the engine's caches.
    yield from _beliefs(patient, games, "doctor/own")
    yield _stale_prefix(patient, games, "doctor/own")


def _adapter(patient: Patient) -> Iterator[Check]:
    """L1, L6, L9, L12: the engine holds the trainer's adapter, and the adapter has an effect."""
    actor, engine = patient.actor, patient.engine
    probe = _probe_ids(patient)
    before = actor.probe(probe)
    sent = _move_adapter(patient, before, probe)
    engine.load_adapter(sent.state, sent.version)
    held = engine.health().adapter_version
    yield Check(
        "adapter_version", held == sent.version, float(held), float(sent.version), "version"
    )
    same = state_checksum(sent.state) == sent.checksum == actor.snapshot().checksum
    yield Check("adapter_checksum", same, note=f"{len(sent.state)} arrays, {sent.checksum[:12]}")
    after = actor.probe(probe)
    moved = float(np.abs(after - before).mean())
    yield Check("adapter_moved", moved >= MOVED, moved, MOVED, "nats at least")
    seen = np.asarray(engine.score([probe])[0][1:], dtype=np.float64)
    yield patient.gap("adapter_probe", Gap.of(seen, after))


def _move_adapter(patient: Patient, before: FloatArray, probe: tuple[int, ...]) -> AdapterSnapshot:
    """Give the trainer's adapter weights under which the probe's log-probs are others.

    Noise goes to the half of each pair that begins at zero, twice as much each time.
    """
    actor = patient.actor
    start = actor.snapshot()
    rng = np.random.default_rng(named_seed("doctor", patient.cfg.seed, start.version))
    noise = {name: rng.standard_normal(value.shape) for name, value in start.state.items()}
    size = 1e-3
    for _ in range(_DOUBLINGS):
        state = {
            name: (value + size * noise[name] * (".lora_B." in name)).astype(np.float32)
            for name, value in start.state.items()
        }
        load_adapter_state(actor.model, POLICY, state)
        if float(np.abs(actor.probe(probe) - before).mean()) >= MOVED:
            break
        size *= 2
    actor.version += 1
    return actor.snapshot()


def _probe_ids(patient: Patient) -> tuple[int, ...]:
    chat, task = patient.chat, patient.tasks[0]
    asked = chat.assistant_ids(f"Is it {task.secret}?")
    return (*chat.open_ids(task.messages), *asked, *chat.reply_ids("No"))


def _sampled(patient: Patient, games: Sequence[Trajectory], temperature: float) -> Check:
    """P1, P3: what the engine reports of its samples is what the trainer computes of them."""
    actor = patient.actor
    actor.settings = replace(actor.settings, temperature=temperature)
    scores = actor.score([ScoreRequest.of(game) for game in games])
    gap = sampled_gap(games, scores)
    reported = np.array([logp for game in games for t in game.turns for logp in t.logprobs])
    ratio = np.exp(np.concatenate([score.logp for score in scores]) - reported)
    note = f"ratios {ratio.min():.6f} to {ratio.max():.6f}"
    return patient.gap(f"sampled_logp_T{temperature:g}", gap, note)


def _beliefs(patient: Patient, games: Sequence[Trajectory], name: str) -> Iterator[Check]:
    """B1, B4: the belief in the secret by every route."""
    guesses = [patient.elicit(game.task.secret) for game in games]
    requests = [ScoreRequest.of(game, guess) for game, guess in zip(games, guesses, strict=True)]
    branched = np.concatenate([score.beliefs[POLICY] for score in patient.actor.score(requests)])
    again = naive_scores(patient.actor.model, requests)
    naive = np.concatenate([result.beliefs for result in again])
    yield patient.gap("belief_naive", Gap.of(branched, naive))
    apart = _engine_beliefs(patient, games, guesses, None)
    yield patient.gap("belief_engine", Gap.of(apart, branched))
    cached = _engine_beliefs(patient, games, guesses, name)
    yield patient.gap("belief_cached", Gap.of(cached, apart))


def _engine_beliefs(
    patient: Patient,
    games: Sequence[Trajectory],
    guesses: Sequence[Elicitation],
    cached: str | None,
) -> FloatArray:
    """Beliefs of the engine, game by game, ``[sum of k + 1]``.

    Args:
        patient: The configuration's parts.
        games: The games.
        guesses: Their secrets' elicitations.
        cached: Begins the sessions of the games, whose caches are used; None opens new ones.
    """
    out: list[FloatArray] = []
    for number, (game, guess) in enumerate(zip(games, guesses, strict=True)):
        tails: list[FloatArray] = []
        for tail in belief_tails(game, guess, f"doctor/apart/{number}"):
            session = tail.session if cached is None else _session(cached, number)
            (found,) = patient.engine.score_tails([replace(tail, session=session)])
            tails.append(found)
            if cached is None:
                patient.engine.release([session])
        out.append(tail_beliefs(guess, tails))
    return np.concatenate(out)


def _stale_prefix(patient: Patient, games: Sequence[Trajectory], name: str) -> Check:
    """L13: after another adapter, a game goes on from what the new one makes of its beginning."""
    actor, engine = patient.actor, patient.engine
    probe = _probe_ids(patient)
    sent = _move_adapter(patient, actor.probe(probe), probe)
    # One more turn with the old adapter, so that the engine has the whole beginning at hand.
    read = engine.health().prefilled_tokens
    old = [_continued(patient, game, name, index) for index, game in enumerate(games)]
    read = engine.health().prefilled_tokens - read
    engine.load_adapter(sent.state, sent.version)
    new = [_continued(patient, game, name, index) for index, game in enumerate(games)]
    after = sampled_gap(new, actor.score([ScoreRequest.of(game) for game in new]))
    stale = sampled_gap(old, actor.score([ScoreRequest.of(game) for game in old]))
    versions = {turn.adapter_version for game in new for turn in game.turns}
    tokens = sum(len(game.token_ids) for game in games)
    if read >= tokens:
        note = "no conversation fills a block of the engine's cache: raise --turns"
        return Check("prefix_after_sync", None, note=note)
    note = (
        f"{tokens - read} of {tokens} tokens were cached; the adapter before differs by "
        f"{stale.mean:.3g} nats on average"
    )
    found = patient.gap("prefix_after_sync", after, note)
    telling = stale.mean > patient.bound.mean
    return replace(found, passed=bool(found.passed) and telling and versions == {sent.version})


# --- conversations -------------------------------------------------------------------------------


def _session(name: str, number: int) -> str:
    return f"{name}/{number:03d}"


def _converse(patient: Patient, temperature: float, name: str) -> list[Trajectory]:
    """Conversations at a temperature; yes and no take turns as replies."""
    sampling = replace(sampling_params(patient.cfg, "train"), temperature=temperature)
    tasks = patient.tasks
    streams = [list(patient.chat.open_ids(task.messages)) for task in tasks]
    turns: list[list[Turn]] = [[] for _ in tasks]
    for index in range(patient.settings.turns):
        requests = [
            _request(patient, task, ids, sampling, _session(name, number), index)
            for number, (task, ids) in enumerate(zip(tasks, streams, strict=True))
        ]
        going = [request for request in requests if request is not None]
        for request, done in zip(going, _sample(patient.engine, going), strict=True):
            number = int(request.session.rpartition("/")[2])
            turns[number].append(_append(patient.chat, streams[number], done, index))
    return [
        Trajectory(task, number, tuple(ids), tuple(taken), StopReason.TURN_LIMIT)
        for number, (task, ids, taken) in enumerate(zip(tasks, streams, turns, strict=True))
    ]


def _continued(patient: Patient, game: Trajectory, name: str, number: int) -> Trajectory:
    """A game whose only turn is one that is sampled behind it, in the session that it has."""
    sampling = sampling_params(patient.cfg, "train")
    sampling = replace(
        sampling, temperature=patient.actor.settings.temperature, max_tokens=_CONTINUED
    )
    ids = list(game.token_ids)
    stops = (patient.chat.eot_id,)
    request = GenRequest(
        _session(name, number),
        tuple(ids),
        turn_seed(patient.cfg.seed, game.task.id, 0, number, game.num_turns),
        replace(sampling, stop_token_ids=stops),
    )
    (done,) = _sample(patient.engine, [request])
    turn = _append(patient.chat, ids, done, 0)
    return replace(game, token_ids=tuple(ids), turns=(turn,))


def _request(
    patient: Patient,
    task: Task,
    ids: Sequence[int],
    sampling: SamplingParams,
    session: str,
    index: int,
) -> GenRequest | None:
    """The next turn of a conversation; None where it has no room."""
    data = patient.cfg.data
    room = min(data.max_response_length, data.max_prompt_length - ROOM - len(ids))
    if room < 1:
        return None
    drawn = replace(sampling, max_tokens=room, stop_token_ids=(patient.chat.eot_id,))
    seed = turn_seed(patient.cfg.seed, task.id, 0, int(session.rpartition("/")[2]), index)
    return GenRequest(session, tuple(ids), seed, drawn)


def _sample(engine: BranchStepEngine, requests: Sequence[GenRequest]) -> list[Completion]:
    """Completions in the order of the requests.

    Raises:
        NoAnswer: The engine refuses a request or comes to no end.
    """
    done: dict[str, Completion] = {}
    new = list(requests)
    while len(done) < len(requests):
        found = engine.step(new)
        new = []
        if not found:
            raise NoAnswer("The engine made no progress: lower the doctor's --games.")
        for completion in found:
            if is_failed(completion):
                raise NoAnswer(f"The engine sampled nothing: {completion.error or 'no token'}.")
            done[completion.session] = completion
    return [done[request.session] for request in requests]


def _append(chat: ChatFormat, ids: list[int], done: Completion, index: int) -> Turn:
    """Put a completion and a reply behind a stream; the turn that they are."""
    start = len(ids)
    ids.extend(closed_ids(chat, done))
    reply, verdict = REPLIES[index % len(REPLIES)]
    ids.extend(chat.reply_ids(reply))
    return Turn(
        index=index,
        start=start,
        end=start + len(done.token_ids),
        logprobs=done.logprobs,
        adapter_version=done.adapter_version,
        action=chat.decode(done.token_ids),
        reply=reply,
        verdict=verdict,
    )
