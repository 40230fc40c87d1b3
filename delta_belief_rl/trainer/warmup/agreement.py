"""Make the small denoiser of ``env=agreement``: supervised learning on noisy answers.

Each example is a problem and a sentence that is right but for two mistakes: with probability
``miscount`` the result is drawn from one and the numbers next to the right one (where that is one,
half of these draws are right), with probability ``slip`` the verb does not agree. Some
places of the answer are masked, and the model learns to fill them. Places behind the end of an
answer are masked as long as the end is, and there it learns to be unsure, so that they are not
filled before the end is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from delta_belief_rl.algo.base import require_range
from delta_belief_rl.engines.base import GenRequest, SamplingParams
from delta_belief_rl.engines.denoiser_engine import DenoiserEngine
from delta_belief_rl.envs.agreement.game import Agreement
from delta_belief_rl.envs.agreement.language import CATEGORIES, LONGEST, Problem, tag, words
from delta_belief_rl.envs.agreement.tasks import draw, make_tasks, split_of
from delta_belief_rl.models.denoiser import NEVER, Denoiser, DenoiserConfig, build_denoiser
from delta_belief_rl.models.denoising import States
from delta_belief_rl.rollout.seeds import turn_seed
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.text.word_tokenizer import CHAT_TEMPLATE, IM_END, PAD, UNKNOWN, special_tokens
from delta_belief_rl.trainer.warmup.train import pick_device
from delta_belief_rl.types import BoolArray, IntArray, Message, UserError, Verdict

MASK = "<|mask|>"
_PLACES = 48
_HEADS = 4
_LOGGED = 20


@dataclass(frozen=True, slots=True)
class AgreementWarmup:
    """How the denoiser is made.

    Attributes:
        seed: Of weights, problems and masks.
        steps: Updates.
        device: ``auto``, ``cpu`` or ``cuda``.
        batch: Examples of an update.
        examples: Different ones.
        lr: Largest rate; it rises over a twentieth of the steps and falls to zero.
        hidden, layers, mlp: Sizes.
        miscount: Share of examples whose result is drawn; see ``noisy_answer``.
        slip: Share of examples whose verb does not agree.
        unsure: Weight of the loss at places behind the end.
        eval_games: Answers to measure with, over the validation problems in turn.
    """

    seed: int = 0
    steps: int = 450
    device: str = "auto"
    batch: int = 64
    examples: int = 4096
    lr: float = 3e-3
    hidden: int = 64
    layers: int = 2
    mlp: int = 192
    miscount: float = 0.25
    slip: float = 0.25
    unsure: float = 0.3
    eval_games: int = 320

    def __post_init__(self) -> None:
        require_range("--seed", self.seed, 0)
        require_range("--steps", self.steps, 1)
        require_range("--batch-games", self.batch, 1, self.examples)
        require_range("--lr", self.lr, 0.0, open_low=True)
        require_range("--miscount", self.miscount, 0.0, 1.0)
        require_range("--slip", self.slip, 0.0, 1.0)
        for name in ("hidden", "layers", "mlp"):
            require_range(f"--{name}", getattr(self, name), 1)
        if self.hidden % _HEADS:
            raise UserError(f"--hidden is {self.hidden}; it must be a multiple of {_HEADS}.")
        require_range("--eval-games", self.eval_games, 1)


@dataclass(frozen=True, slots=True)
class AgreementReport:
    """What the denoiser says at temperature 1, one place a step.

    Attributes:
        games: Answers measured.
        strict_win: Share that is right.
        wrong_sum, wrong_agreement, wrong_words: Shares by mistake.
    """

    games: int
    strict_win: float
    wrong_sum: float
    wrong_agreement: float
    wrong_words: float

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def agreement_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word of the language, and the control tokens of ChatML and of masking."""
    known = [*special_tokens(), MASK, *words()]
    tokenizer = Tokenizer(WordLevel({text: i for i, text in enumerate(known)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"[A-Za-z]+|[^\sA-Za-z]"), behavior="removed", invert=True
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    added = [AddedToken(text, special=True, normalized=False) for text in (*special_tokens(), MASK)]
    cast(Any, tokenizer).add_special_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=IM_END,
        mask_token=MASK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=_PLACES,
        padding_side="left",
    )


def denoiser_config(tokenizer: PreTrainedTokenizerFast, warmup: AgreementWarmup) -> DenoiserConfig:
    """Sizes, and the part of speech of every token."""
    texts = cast("list[str]", tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    tags = ["end" if text == IM_END else tag(text) for text in texts]
    return DenoiserConfig(
        vocab_size=len(texts),
        answer_length=LONGEST,
        mask_token_id=texts.index(MASK),
        end_token_id=texts.index(IM_END),
        categories=tuple(CATEGORIES.index(name) if name else NEVER for name in tags),
        category_names=CATEGORIES,
        hidden_size=warmup.hidden,
        num_hidden_layers=warmup.layers,
        num_attention_heads=_HEADS,
        intermediate_size=warmup.mlp,
        max_position_embeddings=_PLACES,
    )


def warm_up_agreement(
    warmup: AgreementWarmup,
) -> tuple[Denoiser, PreTrainedTokenizerFast, dict[str, object], AgreementReport]:
    """Make the denoiser.

    Returns:
        The model, its tokenizer, what is known of its making, and what was measured.
    """
    tokenizer = agreement_tokenizer()
    chat = ChatFormat.from_tokenizer(tokenizer)
    model = build_denoiser(denoiser_config(tokenizer, warmup), warmup.seed)
    model.to(pick_device(warmup.device))
    log = _train(model, chat, warmup)
    measured = measure(model, chat, warmup)
    record = {
        "env": "agreement",
        "settings": asdict(warmup),
        "measured": measured.as_dict(),
        "log": log,
    }
    return model.cpu(), tokenizer, record, measured


def noisy_answer(problem: Problem, warmup: AgreementWarmup, rng: np.random.Generator) -> str:
    """An answer with the mistakes that the examples have."""
    result = problem.result
    if rng.random() < warmup.miscount:
        # The nearest numbers, and the one that changes what agrees, be it right or not.
        result = int(
            rng.choice([number for number in (1, result - 1, result + 1) if _fits(number)])
        )
    return problem.answer(result, slip=bool(rng.random() < warmup.slip))


def measure(model: Denoiser, chat: ChatFormat, warmup: AgreementWarmup) -> AgreementReport:
    """Answer validation problems."""
    engine = DenoiserEngine(model)
    tasks = make_tasks("val", min(warmup.eval_games, 64), 0)
    games = [tasks[index % len(tasks)] for index in range(warmup.eval_games)]
    sampling = SamplingParams(max_tokens=LONGEST, stop_token_ids=(chat.eot_id,))
    done = engine.step(
        [
            GenRequest(
                f"{index}",
                chat.open_ids(task.messages),
                turn_seed(warmup.seed, task.id, 0, index, 0),
                sampling,
            )
            for index, task in enumerate(games)
        ]
    )
    notes: list[str] = []
    for task, answer in zip(games, done, strict=True):
        game = Agreement(task)
        outcome = game.apply(game.parse(chat.decode(answer.token_ids)), None)
        notes.append("win" if outcome.verdict is Verdict.WIN else outcome.diagnostics[0])
    share = {name: notes.count(name) / len(notes) for name in dict.fromkeys(notes)}
    return AgreementReport(
        games=len(games),
        strict_win=share.get("win", 0.0),
        wrong_sum=share.get("wrong_sum", 0.0),
        wrong_agreement=share.get("wrong_agreement", 0.0),
        wrong_words=share.get("wrong_words", 0.0) + share.get("no_words", 0.0),
    )


def _train(model: Denoiser, chat: ChatFormat, warmup: AgreementWarmup) -> list[dict[str, float]]:
    """Supervised updates; the loss now and then."""
    rng = np.random.default_rng([warmup.seed, 1])
    prompts, answers = _examples(chat, warmup, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=warmup.lr, weight_decay=0.01)
    rise = max(warmup.steps // 20, 1)

    def factor(step: int) -> float:
        return min((step + 1) / rise, (warmup.steps - step) / max(warmup.steps - rise, 1))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    log: list[dict[str, float]] = []
    model.train()
    for step in range(warmup.steps):
        chosen = rng.choice(len(prompts), warmup.batch, replace=False)
        loss = _loss(
            model, [prompts[i] for i in chosen], [answers[i] for i in chosen], warmup.unsure, rng
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(warmup.steps // _LOGGED, 1) == 0 or step == warmup.steps - 1:
            log.append({"step": step, "loss": round(float(loss.detach()), 4)})
    model.eval()
    return log


def _examples(
    chat: ChatFormat, warmup: AgreementWarmup, rng: np.random.Generator
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Openings and answers as tokens."""
    problems = [_training_problem(rng) for _ in range(warmup.examples)]
    return (
        [chat.open_ids([Message("user", problem.question())]) for problem in problems],
        [chat.assistant_ids(noisy_answer(problem, warmup, rng)) for problem in problems],
    )


def _loss(
    model: Denoiser,
    prompts: Sequence[tuple[int, ...]],
    answers: Sequence[tuple[int, ...]],
    unsure_weight: float,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Of one batch of examples."""
    config, device = model.config, model.bias.device
    blocks = np.full((len(answers), config.answer_length), config.end_token_id, dtype=np.int64)
    for row, answer in enumerate(answers):
        blocks[row, : len(answer)] = answer
    lengths = np.array([len(answer) for answer in answers], dtype=np.int64)
    known = some_known(lengths, config.answer_length, rng)
    states = States.of(prompts, blocks, known, config, device)
    logits = model(states.ids, states.starts + config.answer_length)
    places = torch.arange(config.answer_length, device=device)
    index = (states.starts[:, None] + places[None])[:, :, None].expand(-1, -1, config.vocab_size)
    logp = logits.gather(1, index).log_softmax(-1)
    said = -logp.gather(-1, torch.from_numpy(blocks).to(device)[:, :, None])[:, :, 0]
    behind = torch.from_numpy(np.arange(config.answer_length)[None] >= lengths[:, None]).to(device)
    masked = ~states.known
    asked, idle = masked & ~behind, masked & behind
    words_only = [
        token
        for token, kind in enumerate(config.categories)
        if kind != NEVER and token != config.end_token_id
    ]
    unsure = -logp[:, :, words_only].mean(-1)
    loss = said[asked].mean()
    return loss + unsure_weight * unsure[idle].mean() if bool(idle.any()) else loss


def some_known(lengths: IntArray, places: int, rng: np.random.Generator) -> BoolArray:
    """Filled places of each block: any number of them, and those behind the end with the end."""
    count = np.floor(rng.random(len(lengths)) * lengths).astype(np.int64)
    luck = rng.random((len(lengths), places))
    where = np.arange(places)[None]
    luck[where >= lengths[:, None]] = 2.0
    rank = luck.argsort(axis=1).argsort(axis=1)
    known = rank < count[:, None]
    ended = known[np.arange(len(lengths)), lengths - 1]
    return known | (ended[:, None] & (where >= lengths[:, None]))


def _training_problem(rng: np.random.Generator) -> Problem:
    while True:
        problem = draw(rng)
        if split_of(problem) == "train":
            return problem


def _fits(number: int) -> bool:
    return 1 <= number <= 9
