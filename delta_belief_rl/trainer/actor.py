"""The policy that is trained: score finished games, update on them, hand out the adapter.

One object is one rank. With several ranks the model is sharded by FSDP2 and every public method is
called on all ranks together. All make the same collectives: the driver plans the forward and
backward calls of an update, and before scoring the ranks agree on the number of forwards.

The base model is frozen; LoRA adapters hold what is learnt. Without LoRA (``rank == 0``) every
parameter is trained and "adapter" means the whole model.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from delta_belief_rl.algo.losses.aggregate import Metrics, merge_metrics
from delta_belief_rl.algo.losses.entropy import entropy_loss
from delta_belief_rl.algo.losses.kl import kl_loss
from delta_belief_rl.algo.losses.policy import PolicyInputs, PolicyLossSettings
from delta_belief_rl.algo.losses.registry import LOSSES
from delta_belief_rl.belief.branched import (
    ScoreRequest,
    ScoreResult,
    plan_passes,
    score_batch,
    score_beliefs,
)
from delta_belief_rl.models.flops import ModelSize, update_flops
from delta_belief_rl.models.liger import apply_liger
from delta_belief_rl.models.loading import (
    adapter_names,
    adapter_state,
    add_lora,
    copy_adapter,
    load_adapter_state,
    load_causal_lm,
    state_checksum,
    use_adapter,
)
from delta_belief_rl.models.logprobs import token_logprobs
from delta_belief_rl.models.packed import PackedInput, PackSegment, pack
from delta_belief_rl.models.slow import update_slow
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.optimizer import (
    OptimizerSettings,
    at_hand,
    build_optimizer,
    gradient_norm,
    learning_rate,
    set_learning_rate,
)
from delta_belief_rl.trainer.usage import UPDATE, RankUsage, UsageMeter
from delta_belief_rl.types import FloatArray, TrainBatch, UserError

POLICY, EMA, BASE = "actor", "ema", "base"
"""Names of the models that a belief or a view can be asked of."""

STAND_IN = ScoreRequest(token_ids=(0, 0), action_positions=np.ones(1, dtype=np.int64))
"""The game of a forward that a rank makes only because another rank has one more to make."""

WHOLE = sys.maxsize
"""Token budget of games that are one pass already."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """LoRA of the policy; ``rank`` 0 trains all weights."""

    rank: int = 0
    alpha: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: tuple[str, ...] = ()
    ema: bool = False
    ema_beta: float = 0.95
    ema_warmup_steps: int = 0

    def put_on(
        self, model: Any, name: str = POLICY, *, trainable: bool = False, seed: int = 0
    ) -> Any:
        """The model with one more adapter of this kind; see ``models.adapters.add_lora``."""
        return add_lora(
            model,
            self.rank,
            self.alpha,
            self.target_modules,
            name=name,
            exclude=self.exclude_modules,
            trainable=trainable,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """Everything that one rank needs to know.

    Attributes:
        views: Models whose log-probs of the games' own tokens are wanted beside the policy's.
        beliefs: Models whose beliefs are wanted.
        score_tokens: Token budget of one forward of the score pass.
        contexts: Names of the other contexts that games may have (``ScoreRequest.views``), and the
            model that reads each.
        use_liger: On a GPU, use Liger kernels where they are installed and fit the model.
        old_is_new: The batch is used for one optimizer step, so the old policy is the current one.
    """

    model_path: str
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loss: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    loss_name: str = "ppo"
    seed: int = 42
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int | None = None
    gradient_checkpointing: bool = False
    use_liger: bool = False
    grad_clip: float = 1.0
    temperature: float = 1.0
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    views: tuple[str, ...] = ()
    contexts: tuple[tuple[str, str], ...] = ()
    beliefs: tuple[str, ...] = ()
    score_tokens: int = 16384
    old_is_new: bool = False


@dataclass(frozen=True, slots=True)
class GameScore:
    """What the score pass found about one game.

    Attributes:
        logp: ``[sampled tokens]`` of the policy.
        entropy: Mean entropy of the policy at its sampled tokens, in nats.
        views: Log-probs of the same tokens by name, under other models and behind other contexts;
            NaN where the game does not have the context.
        beliefs: ``[k + 1]`` per belief model, in nats.
    """

    logp: FloatArray
    entropy: float
    views: Mapping[str, FloatArray]
    beliefs: Mapping[str, FloatArray]


@dataclass(frozen=True, slots=True)
class AdapterSnapshot:
    """Adapter weights in owned memory, with their version and checksum."""

    state: Mapping[str, np.ndarray]
    version: int
    checksum: str


class PolicyActor:
    """One training rank.

    Args:
        settings: What it needs to know.
        rank: Its number.
        world_size: How many there are.
        base: The loaded base model; None loads ``settings.model_path``.
    """

    def __init__(
        self, settings: ActorSettings, rank: int = 0, world_size: int = 1, base: Any = None
    ) -> None:
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(settings.device)
        self.version = 0
        self._meter = UsageMeter(self.device)
        if base is None:
            dtype = getattr(torch, settings.dtype)
            base = load_causal_lm(settings.model_path, dtype, self.device)
        self.model = self._build(base)
        self.optimizer = build_optimizer(self.model.parameters(), settings.optimizer)

    def _build(self, model: Any) -> Any:
        settings = self.settings
        if settings.use_liger and self.device.type == "cuda":
            reason = apply_liger(model)
            if reason and self.rank == 0:
                print(reason, file=sys.stderr)
        lora = settings.adapter
        if lora.rank:
            model.requires_grad_(False)
            names = [POLICY, EMA] if lora.ema else [POLICY]
            for name in names:
                model = lora.put_on(model, name, trainable=name == POLICY, seed=settings.seed)
            if lora.ema:
                copy_adapter(model, POLICY, EMA)
        elif lora.ema or {EMA, BASE} & {*settings.views, *settings.beliefs}:
            raise UserError(
                "A base or slow belief model needs LoRA adapters: "
                "set actor_rollout_ref.model.lora_rank."
            )
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        self._size = ModelSize.of(model)
        if self.world_size > 1:
            from delta_belief_rl.trainer.sharding import shard_model

            model = shard_model(model, self.device.type)
        # Adding an adapter leaves parts of the model in training mode.
        return model.eval()

    # --- scoring ---------------------------------------------------------------------------------

    def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        """Log-probs of each game's own tokens and its beliefs; ranks may have any games, even none.

        The policy's log-probs and its beliefs come from one forward per micro-batch; each further
        model costs one more.
        """
        settings = self.settings
        plain = [replace(game, elicitation=None, belief_points=()) for game in games]
        asked = games if POLICY in settings.beliefs else plain
        score = partial(
            score_batch,
            self.model,
            max_tokens_per_pass=WHOLE,
            temperature=settings.temperature,
        )
        own = self._passes(asked, partial(score, with_entropy=True))
        beliefs: dict[str, list[FloatArray]] = {}
        for name in settings.beliefs:
            if name == POLICY:
                beliefs[name] = [result.beliefs for result in own]
            else:
                ask = partial(
                    score_beliefs, self.model, max_tokens_per_pass=WHOLE, belief_model=name
                )
                with self._meter.measure("belief_model"):
                    beliefs[name] = self._passes(games, ask)
        views: dict[str, list[FloatArray]] = {}
        for name in settings.views:
            with self._meter.measure("ref"), self._reading(name):
                results = self._passes(plain, score)
            views[name] = [result.logp for result in results]
        for name, reader in settings.contexts:
            with self._meter.measure("views"), self._reading(reader):
                views[name] = self._behind(name, games, score)
        return [
            GameScore(
                logp=result.logp,
                entropy=_mean(result.entropy),
                views={name: rows[index] for name, rows in views.items()},
                beliefs={name: rows[index] for name, rows in beliefs.items()},
            )
            for index, result in enumerate(own)
        ]

    def _behind(
        self,
        name: str,
        games: Sequence[ScoreRequest],
        score: Callable[[Sequence[ScoreRequest]], Sequence[ScoreResult]],
    ) -> list[FloatArray]:
        """Log-probs of the games' tokens behind one of their other contexts."""
        out = [np.full(len(game.action_positions), np.nan) for game in games]
        have = [index for index, game in enumerate(games) if name in game.views]
        asked = [games[index].views[name] for index in have]
        results = self._passes(
            [ScoreRequest(view.token_ids, view.action_positions) for view in asked], score
        )
        for index, result in zip(have, results, strict=True):
            out[index] = result.logp
        return out

    def _reading(self, reader: str) -> AbstractContextManager[None]:
        """Use one of the models that a view can be asked of."""
        if reader == POLICY:
            return nullcontext()
        return use_adapter(self.model, None if reader == BASE else reader)

    def _passes(
        self,
        games: Sequence[ScoreRequest],
        score: Callable[[Sequence[ScoreRequest]], Sequence[Result]],
    ) -> list[Result]:
        """Score games in passes within the token budget, equally many on every rank.

        A sharded model needs every rank in every forward, so a rank with fewer passes than another
        makes up for them with a stand-in (A19).
        """
        lengths = [_num_tokens(game) for game in games]
        padded = not runs_ragged(self.model)
        parts = plan_passes(lengths, self.settings.score_tokens, padded)
        # Agreed before the first forward: later, this collective would meet another rank's forward.
        missing = self._most(len(parts)) - len(parts)
        results: dict[int, Result] = {}
        for part in parts:
            results.update(zip(part, score([games[index] for index in part]), strict=True))
        for _ in range(missing):
            score([STAND_IN])
        return [results[index] for index in range(len(games))]

    def _most(self, count: int) -> int:
        """The largest ``count`` of all ranks; a collective."""
        if self.world_size == 1:
            return count
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def probe(self, token_ids: Sequence[int]) -> FloatArray:
        """Log-probs at temperature 1 of a fixed token sequence, ``[len(token_ids) - 1]``."""
        ids = np.asarray(token_ids, dtype=np.int64)
        packed = self._pack([PackSegment(tuple(ids.tolist()))])
        positions = np.arange(1, len(ids))
        with torch.no_grad():
            scores = token_logprobs(
                self.model,
                packed,
                torch.from_numpy(packed.trunk_sources(0, positions)).to(self.device),
                torch.from_numpy(ids[1:]).to(self.device),
            )
        return scores.logp.double().cpu().numpy()

    # --- updating --------------------------------------------------------------------------------

    def update(
        self,
        steps: Sequence[tuple[Sequence[TrainBatch | None], Mapping[str, float]]],
        training_step: int,
    ) -> dict[str, tuple[float, float]]:
        """Run the optimizer steps of one training step on this rank's micro-batches.

        Args:
            steps: Per optimizer step, this rank's micro-batches and the global denominators. None
                is a micro-batch without games: it still runs a forward and a backward, so that
                ranks stay in step. No steps at all (every token masked) leave the policy, the slow
                adapter and the version as they are, on every rank (A18).
            training_step: Number of the training step, from 1; decides the learning rate.

        Returns:
            Metrics as (sum, count) pairs over this rank's tokens.
        """
        with self._meter.measure(UPDATE):
            return self._update(steps, training_step)

    def usage(self) -> RankUsage:
        """Time, operations and memory since the last call."""
        return self._meter.drain()

    def _update(
        self,
        steps: Sequence[tuple[Sequence[TrainBatch | None], Mapping[str, float]]],
        training_step: int,
    ) -> dict[str, tuple[float, float]]:
        rate = learning_rate(self.settings.optimizer, training_step)
        set_learning_rate(self.optimizer, rate)
        parts: list[Metrics] = []
        norms: list[float] = []
        self.model.train()
        for micro_batches, denominators in steps:
            self.optimizer.zero_grad(set_to_none=True)
            parts += [self._backward(batch, denominators) for batch in micro_batches]
            norm = gradient_norm(self.optimizer, self.settings.grad_clip)
            norms.append(norm)
            if np.isfinite(norm):
                with at_hand(self.optimizer, self.settings.optimizer.offload):
                    self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()
        slow: dict[str, float] = {}
        if steps:
            slow = self._update_ema(training_step)
            self.version += 1
        merged = {name: (float(s), float(n)) for name, (s, n) in merge_metrics(parts).items()}
        finite = [norm for norm in norms if np.isfinite(norm)]
        # Every rank knows the global norm; one reports it, or merging would count it several times.
        if self.rank == 0:
            merged["actor/grad_norm"] = (float(np.sum(finite)), float(len(finite)))
            merged["actor/lr"] = (rate, 1.0)
            merged["actor/optimizer_steps"] = (float(len(norms)), 1.0)
            merged["actor/skipped_updates"] = (float(len(norms) - len(finite)), 1.0)
            merged["actor/empty_updates"] = (float(not steps), 1.0)
            merged |= {name: (value, 1.0) for name, value in slow.items()}
            if self.settings.kl_coef:
                merged["actor/kl_coef"] = (self.settings.kl_coef, 1.0)
        return merged

    def _backward(self, batch: TrainBatch | None, denominators: Mapping[str, float]) -> Metrics:
        if batch is None or not batch.weight.any():
            # One token that is not trained: the same collectives, no contribution.
            packed = self._pack([PackSegment((0, 0))])
            one = torch.ones(1, dtype=torch.int64, device=self.device)
            loss = token_logprobs(self.model, packed, one * 0, one * 0).logp.sum() * 0.0
            loss.backward()
            return {}
        loss, metrics = self._loss(batch, denominators)
        scored = int(np.count_nonzero((batch.turn_ids >= 0) & (batch.weight != 0)))
        self._meter.add_flops(update_flops(self._size, batch.lengths(), scored))
        # FSDP averages gradients over ranks; the loss is already divided by global counts.
        (loss * self.world_size).backward()
        return metrics

    def _loss(
        self, batch: TrainBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        settings = self.settings
        games = [PackSegment(tuple(batch.token_ids[span].tolist())) for span in batch.games()]
        packed = self._pack(games)
        # Trunks only, so a token's index in the batch is its index in the packed row.
        index = np.flatnonzero((batch.turn_ids >= 0) & (batch.weight != 0))
        row_of = np.repeat(np.arange(batch.num_games), batch.lengths())
        rows = self._tensor(row_of[index])
        width = int(batch.turn_ids.max()) + 1
        turns = self._tensor(row_of[index] * width + batch.turn_ids[index])
        scores = token_logprobs(
            self.model,
            packed,
            self._tensor(index - 1),
            self._tensor(batch.token_ids[index]),
            settings.temperature,
            with_entropy=True,
        )
        assert scores.entropy is not None
        weight = self._tensor(batch.weight[index], torch.float32)
        inputs = PolicyInputs(
            logp=scores.logp,
            old_logp=self._tensor(batch.old_logp[index], torch.float32),
            advantages=self._tensor(batch.advantages[index], torch.float32),
            weight=weight,
            rows=rows,
            turns=turns,
            rollout_logp=self._tensor(batch.rollout_logp[index], torch.float32),
            old_is_new=settings.old_is_new,
        )
        mode = settings.loss.loss_agg_mode
        loss, metrics = LOSSES[settings.loss_name](inputs, settings.loss, denominators)
        bonus, entropy_metrics = entropy_loss(
            scores.entropy, weight, rows, mode, denominators, turns
        )
        metrics |= entropy_metrics
        if settings.entropy_coeff:
            loss = loss + settings.entropy_coeff * bonus
        if settings.kl_coef:
            reference = self._tensor(batch.views[BASE][index], torch.float32)
            term, kl_metrics = kl_loss(
                scores.logp, reference, weight, rows, settings.kl_type, mode, denominators, turns
            )
            loss = loss + settings.kl_coef * term
            metrics |= kl_metrics
        return loss, metrics

    def _pack(self, segments: Sequence[PackSegment]) -> PackedInput:
        return pack(segments, self.device, runs_ragged(self.model))

    def _tensor(self, array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.as_tensor(array, dtype=dtype, device=self.device)

    def _update_ema(self, training_step: int) -> dict[str, float]:
        """Move the slow adapter, where there is one; its figures, the same on every rank."""
        lora = self.settings.adapter
        if not lora.ema:
            return {}
        beta = 0.0 if training_step <= lora.ema_warmup_steps else lora.ema_beta
        with self._meter.measure("update_ema"):
            return update_slow(self.model, POLICY, EMA, beta, ranks=self.world_size)

    # --- weights and state -----------------------------------------------------------------------

    def snapshot(self, name: str = POLICY) -> AdapterSnapshot:
        """The adapter as owned arrays; a collective when the model is sharded."""
        if not adapter_names(self.model):
            raise UserError(
                "Full fine-tuning cannot be synchronised to an engine yet: set "
                "actor_rollout_ref.model.lora_rank to at least 1."
            )
        state = adapter_state(self.model, name)
        return AdapterSnapshot(state=state, version=self.version, checksum=state_checksum(state))

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain arrays and tensors.

        A collective when the model is sharded; the state does not depend on the number of ranks.
        """
        with at_hand(self.optimizer, self.settings.optimizer.offload):
            optimizer = self.optimizer.state_dict()
            if self.world_size > 1:
                from delta_belief_rl.trainer.sharding import gather_optimizer_state

                optimizer = gather_optimizer_state(optimizer)
        state: dict[str, Any] = {
            "version": self.version,
            "adapter": dict(self.snapshot(POLICY).state),
            "optimizer": optimizer,
        }
        if self.settings.adapter.ema:
            state["ema"] = dict(self.snapshot(EMA).state)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, on any number of ranks.

        A state without an optimizer, which a policy that is only evaluated has, leaves it as it is.

        Raises:
            UserError: The state was saved with other adapters.
        """
        load_adapter_state(self.model, POLICY, state["adapter"])
        if self.settings.adapter.ema:
            if "ema" not in state:
                raise UserError(
                    "The checkpoint has no slow adapter: resume with the belief models it was "
                    "saved with, or start a new run."
                )
            load_adapter_state(self.model, EMA, state["ema"])
        self.version = int(state["version"])
        optimizer = state.get("optimizer")
        if optimizer is None:
            return
        if self.world_size > 1:
            from delta_belief_rl.trainer.sharding import scatter_optimizer_state

            optimizer = scatter_optimizer_state(optimizer, self.optimizer)
        with at_hand(self.optimizer, self.settings.optimizer.offload):
            self.optimizer.load_state_dict(optimizer)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def dump_state(state: Mapping[str, Any]) -> bytes:
    """Serialise ``PolicyActor.state``."""
    buffer = io.BytesIO()
    torch.save(_to_tensors(state), buffer)
    return buffer.getvalue()


def parse_state(data: bytes) -> dict[str, Any]:
    """The inverse of ``dump_state``; loads tensors and plain values only, never code."""
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for name in ("adapter", "ema"):
        if name in state:
            state[name] = {key: value.numpy() for key, value in state[name].items()}
    return state


def _num_tokens(game: ScoreRequest) -> int:
    """Tokens of a game and of the guesses that hang on it."""
    if game.elicitation is None:
        return len(game.token_ids)
    asked = game.elicitation
    guesses = len(game.belief_points) * len(asked.branch_ids)
    return len(game.token_ids) + guesses + len(asked.lead_ids)


def _mean(values: FloatArray | None) -> float:
    return float(values.mean()) if values is not None and len(values) else 0.0


def _to_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {key: _to_tensors(item) for key, item in value.items()}
    return value
