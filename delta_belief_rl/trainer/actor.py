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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from delta_belief_rl.algo.losses.aggregate import Metrics, merge_metrics
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.models.adapters import adapter_parameters
from delta_belief_rl.models.flops import ModelSize, update_flops
from delta_belief_rl.models.liger import apply_liger
from delta_belief_rl.models.loading import (
    adapter_names,
    adapter_state,
    copy_adapter,
    load_adapter_state,
    load_causal_lm,
    state_checksum,
)
from delta_belief_rl.models.logprobs import hidden_states, score_rows, token_logprobs
from delta_belief_rl.models.packed import PackedInput, PackSegment, pack
from delta_belief_rl.models.slow import update_slow
from delta_belief_rl.models.varlen import runs_ragged
from delta_belief_rl.trainer.actor_settings import (
    BASE,
    EMA,
    POLICY,
    ActorSettings,
    AdapterSettings,
)
from delta_belief_rl.trainer.critic import CRITIC, Critic
from delta_belief_rl.trainer.learner import Learner
from delta_belief_rl.trainer.optimizer import (
    at_hand,
    build_optimizer,
    gradient_norm,
    learning_rate,
    restore_optimizer,
    saved_optimizer,
    set_learning_rate,
    update_figures,
)
from delta_belief_rl.trainer.policy_terms import Scored, loss_terms
from delta_belief_rl.trainer.scoring import GameScore, ScorePass
from delta_belief_rl.trainer.usage import UPDATE, RankUsage, UsageMeter
from delta_belief_rl.types import FloatArray, TrainBatch, UserError

__all__ = [
    "BASE",
    "EMA",
    "POLICY",
    "ActorSettings",
    "AdapterSettings",
    "AdapterSnapshot",
    "GameScore",
    "PolicyActor",
    "dump_state",
    "parse_state",
]


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
        # The adapters of a critic and of learners are trained, too, but by these.
        others = {
            id(parameter)
            for name in _other_adapters(settings)
            for parameter in adapter_parameters(self.model, name).values()
        }
        own = [p for p in self.model.parameters() if id(p) not in others]
        self.optimizer = build_optimizer(own, settings.optimizer)
        self.critic: Critic | None = None
        if settings.critic is not None:
            self.critic = Critic(settings.critic, self.model, self.device, world_size)
        self.learners: dict[str, Learner] = {
            learner.name: learner.build(self.model, self.device, world_size)
            for learner in settings.learners
        }
        self._score = ScorePass(
            self.model,
            settings,
            self.device,
            world_size,
            self._meter,
            self.critic,
            tuple(self.learners.values()),
        )
        self._terms = loss_terms(settings)

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
            for number, name in enumerate(_other_adapters(settings), start=1):
                model = lora.put_on(model, name, trainable=True, seed=settings.seed + number)
        elif any(learner.adapter for learner in settings.learners):
            raise UserError(
                "A model that is trained beside the policy needs LoRA adapters: set "
                "actor_rollout_ref.model.lora_rank, or choose another algorithm.adv_estimator."
            )
        elif settings.critic is not None and settings.critic.own:
            raise UserError(
                "critic.form=own needs LoRA adapters: set actor_rollout_ref.model.lora_rank, or "
                "critic.form=shared."
            )
        elif lora.ema or {EMA, BASE} & {
            *(*settings.views, *settings.beliefs),
            *(reader for _, reader in settings.contexts),
        }:
            raise UserError(
                "A base or slow model of beliefs or views needs LoRA adapters: "
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
        """Log-probs of each game's own tokens, its beliefs and its values (``trainer.scoring``).

        Ranks may have any games, even none.
        """
        return replace(self._score, settings=self.settings)(games)

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
        critic = self.critic
        waits = [0 if critic is None else critic.settings.warmup_steps]
        waits += [learner.policy_waits for learner in self.settings.learners]
        trains = training_step > max(waits)
        parts: list[Metrics] = []
        norms: list[float] = []
        self.model.train()
        for micro_batches, denominators in steps:
            self.optimizer.zero_grad(set_to_none=True)
            if critic is not None:
                critic.begin(micro_batches)
            for learner in self.learners.values():
                learner.begin(micro_batches)
            parts += [self._backward(batch, denominators, trains) for batch in micro_batches]
            if trains:
                norm = gradient_norm(self.optimizer, self.settings.grad_clip)
                norms.append(norm)
                if np.isfinite(norm):
                    with at_hand(self.optimizer, self.settings.optimizer.offload):
                        self.optimizer.step()
            if critic is not None:
                critic.step(training_step)
            for learner in self.learners.values():
                learner.step(training_step)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()
        slow: dict[str, float] = {}
        if steps and trains:
            slow = self._update_ema(training_step)
            self.version += 1
        merged = {name: (float(s), float(n)) for name, (s, n) in merge_metrics(parts).items()}
        told = {} if critic is None else critic.finish(training_step)
        for learner in self.learners.values():
            told |= learner.finish(training_step)
        # Every rank knows the global norm; one reports it, or merging would count it several times.
        if self.rank == 0:
            merged |= update_figures(norms, rate)
            merged["actor/empty_updates"] = (float(not steps), 1.0)
            merged |= {name: (value, 1.0) for name, value in slow.items()} | told
            if self.settings.kl_coef:
                merged["actor/kl_coef"] = (self.settings.kl_coef, 1.0)
        return merged

    def _backward(
        self, batch: TrainBatch | None, denominators: Mapping[str, float], trains: bool = True
    ) -> Metrics:
        """Forward and backward of a micro-batch; without ``trains`` for the critic alone.

        A batch in which nothing is trained makes the same collectives and contributes nothing.
        """
        if batch is not None and not batch.weight.any():
            batch = None
        stream = [(0, 0)] if batch is None else [batch.token_ids[span] for span in batch.games()]
        packed = self._pack([PackSegment(tuple(map(int, ids))) for ids in stream])
        metrics: Metrics = {}
        critic = self.critic
        shares = critic is not None and not critic.settings.own
        if trains or shares:
            with nullcontext() if trains else torch.no_grad():
                hidden = hidden_states(self.model, packed)
            losses: list[torch.Tensor] = []
            if trains:
                loss, metrics = self._loss(hidden, batch, denominators)
                losses.append(loss)
            if critic is not None and shares:
                loss, found = critic.loss(hidden, batch, attached=trains)
                losses.append(loss)
                metrics |= found
            # FSDP averages gradients over ranks; the loss is already divided by global counts.
            (torch.stack(losses).sum() * self.world_size).backward()
        if critic is not None and critic.settings.own:
            metrics |= critic.backward(packed, batch)
            if batch is not None:
                self._meter.add_flops(update_flops(self._size, batch.lengths(), 0))
        for told, learner in zip(self.settings.learners, self.learners.values(), strict=True):
            metrics |= learner.backward(packed, batch)
            if told.adapter and batch is not None:
                self._meter.add_flops(update_flops(self._size, batch.lengths(), 0))
        return metrics

    def _loss(
        self, hidden: torch.Tensor, batch: TrainBatch | None, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        """The policy's loss on a packed row: the sum of its terms (``trainer.policy_terms``)."""
        if batch is None:
            first = torch.zeros(1, dtype=torch.int64, device=self.device)
            return score_rows(self.model, hidden, first, first).logp.sum() * 0.0, {}
        # Trunks only, so a token's index in the batch is its index in the packed row.
        index = np.flatnonzero((batch.turn_ids >= 0) & (batch.weight != 0)).astype(np.int64)
        self._meter.add_flops(update_flops(self._size, batch.lengths(), len(index)))
        scores = score_rows(
            self.model,
            hidden,
            torch.as_tensor(index - 1, device=self.device),
            torch.as_tensor(batch.token_ids[index], device=self.device),
            self.settings.temperature,
            with_entropy=True,
        )
        head = self.model.get_output_embeddings()
        scored = Scored.of(batch, index, hidden, head, scores, denominators)
        total = torch.zeros((), device=self.device)
        metrics: Metrics = {}
        for term in self._terms:
            loss, found = term(scored)
            total = total + loss
            metrics |= found
        return total, metrics

    def _pack(self, segments: Sequence[PackSegment]) -> PackedInput:
        return pack(segments, self.device, runs_ragged(self.model))

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
        offload = self.settings.optimizer.offload
        optimizer = saved_optimizer(self.optimizer, offload, self.world_size)
        state: dict[str, Any] = {
            "version": self.version,
            "adapter": dict(self.snapshot(POLICY).state),
            "optimizer": optimizer,
        }
        if self.settings.adapter.ema:
            state["ema"] = dict(self.snapshot(EMA).state)
        if self.critic is not None:
            state["critic"] = self.critic.state()
        if self.learners:
            state["learners"] = {name: learner.state() for name, learner in self.learners.items()}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, on any number of ranks.

        A state without an optimizer, which a policy that is only evaluated has, leaves it as it is,
        and the critic with it.

        Raises:
            UserError: The state was saved with other adapters, or without this critic.
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
        if self.critic is not None:
            if "critic" not in state:
                raise UserError(
                    "The checkpoint has no critic: resume with the algorithm.adv_estimator that it "
                    "was saved with, or start a new run."
                )
            self.critic.load_state(state["critic"])
        known = state.get("learners", {})
        for name, learner in self.learners.items():
            if name not in known:
                raise UserError(
                    f"The checkpoint has no state of {name}: resume with the "
                    "algorithm.adv_estimator that it was saved with, or start a new run."
                )
            learner.load_state(known[name])
        offload = self.settings.optimizer.offload
        restore_optimizer(self.optimizer, optimizer, offload, self.world_size)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def _other_adapters(settings: ActorSettings) -> tuple[str, ...]:
    """Names of the trainable adapters that are not the policy's."""
    critic = settings.critic
    return (
        *((CRITIC,) if critic is not None and critic.own else ()),
        *(learner.adapter for learner in settings.learners if learner.adapter),
    )


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
            state[name] = _to_arrays(state[name])
    critic = state.get("critic", {})
    for name in ("head", "adapter"):
        if name in critic:
            critic[name] = _to_arrays(critic[name])
    for learner in state.get("learners", {}).values():
        learner |= {name: _to_arrays(part) for name, part in learner.items() if name != "optimizer"}
    return state


def _to_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, Mapping):
        return {key: _to_arrays(item) for key, item in value.items()}
    return value


def _to_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {key: _to_tensors(item) for key, item in value.items()}
    return value
