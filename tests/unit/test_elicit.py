"""Which tokens of a guess are scored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from delta_belief_rl.belief.elicit import Elicitation, elicitor
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import UserError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEADING_SPACE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}[/I]"
    "{% else %}{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}"
)


def byte_tokenizer(template: str = TEMPLATE, text: str = "Is it 'Is it oak'? it's") -> ChatFormat:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [text] * 9,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return ChatFormat.from_tokenizer(tokenizer)


def word_tokenizer() -> ChatFormat:
    words = ["[UNK]", "Is", "it", "'", "oak", "?", "user", "assistant"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    tokenizer.chat_template = TEMPLATE
    return ChatFormat.from_tokenizer(tokenizer)


CHAT = byte_tokenizer()


def test_an_exchange_in_front_of_the_first_guess_is_rendered_like_a_turn_and_its_reply() -> None:
    guess = elicitor(CHAT, exchange=("Is it big?", "Yes"))("oak")
    plain = Elicitation.build(CHAT, "oak")
    assert plain.lead_ids == ()
    assert guess.lead_ids == (*CHAT.assistant_ids("Is it big?"), *CHAT.reply_ids("Yes"))
    shown = CHAT.decode_exact(guess.lead_ids)
    assert shown.startswith("Is it big?<|im_end|>")
    assert shown.endswith("Yes<|im_end|>\n<|im_start|>assistant\n")
    assert (guess.token_ids, guess.scored) == (plain.token_ids, plain.scored)


def test_the_scored_tokens_spell_the_secret() -> None:
    guess = Elicitation.build(CHAT, "oak")
    assert CHAT.decode_exact(guess.targets.tolist()) in ("oak", "'oak")
    assert CHAT.decode_exact(guess.token_ids) == "Is it 'oak"
    assert guess.scored[-1] == len(guess.token_ids) - 1
    assert guess.branch_ids == guess.token_ids[:-1]


@pytest.mark.parametrize("secret", ["it", "Is it", "is", "'", "s"])
def test_B10_a_secret_that_occurs_earlier_in_the_guess_is_not_mistaken(secret: str) -> None:
    guess = Elicitation.build(CHAT, secret)
    before = CHAT.decode_exact(guess.token_ids[: guess.scored[0]])
    assert before.startswith("Is it")
    assert CHAT.decode_exact(guess.targets.tolist()).endswith(secret)


@settings(max_examples=80, deadline=None)
@given(st.text(min_size=1, max_size=8).filter(lambda s: "�" not in s))
def test_any_secret_is_covered_exactly(secret: str) -> None:
    guess = Elicitation.build(CHAT, secret)
    assert CHAT.decode_exact(guess.token_ids).startswith("Is it '" + secret)
    assert np.array_equal(np.diff(guess.offsets), np.ones(len(guess.scored) - 1))
    ids, ranges = CHAT.encode_with_offsets(f"Is it '{secret}'?")
    assert ids[: len(guess.token_ids)] == guess.token_ids
    covered = {c for i in guess.scored for c in range(*ranges[i])}
    assert set(range(7, 7 + len(secret))) <= covered
    outside = [ranges[i] for i in range(len(ids)) if i not in guess.scored]
    assert all(right <= 7 or left >= 7 + len(secret) for left, right in outside)


def test_T6_a_secret_with_a_control_token_is_plain_text() -> None:
    guess = Elicitation.build(CHAT, "<|im_end|>")
    assert CHAT.eot_id not in guess.token_ids


def test_an_unknown_token_is_an_error_that_names_the_secret() -> None:
    chat = word_tokenizer()
    with pytest.raises(UserError, match="'birch'"):
        Elicitation.build(chat, "birch", template="Is it ' {secret} ' ?")


def test_a_secret_that_does_not_decode_back_is_an_error() -> None:
    chat = word_tokenizer()
    Elicitation.build(chat, "oak", template="Is it ' {secret} ' ?")
    with pytest.raises(UserError, match="'oak  oak'"):
        Elicitation.build(chat, "oak  oak", template="Is it ' {secret} ' ?")


def test_the_templates_own_leading_space_belongs_to_the_guess() -> None:
    chat = byte_tokenizer(LEADING_SPACE)
    guess = Elicitation.build(chat, "oak")
    assert chat.decode_exact(guess.token_ids).startswith(" Is it 'oak")


def test_aggregates_are_sum_and_mean_over_tokens() -> None:
    logp = np.array([[-1.0, -2.0, -4.5], [-0.5, -0.5, -0.5]])
    total = Elicitation("x", (1, 2, 3), (0, 1, 2), "sum")
    mean = Elicitation("x", (1, 2, 3), (0, 1, 2), "mean")
    np.testing.assert_allclose(total.aggregate(logp), [-7.5, -1.5])
    np.testing.assert_allclose(mean.aggregate(logp), [-2.5, -0.5])


def test_a_secret_is_built_once() -> None:
    build = elicitor(CHAT, "The answer is {secret}.", "mean")
    assert build("oak") is build("oak")
    assert build("oak").agg == "mean"


def test_unusable_options_are_one_sentence() -> None:
    with pytest.raises(UserError, match="exactly once"):
        Elicitation.build(CHAT, "oak", template="Is it?")
    with pytest.raises(UserError, match="'max'"):
        Elicitation.build(CHAT, "oak", agg="max")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="empty secret"):
        Elicitation.build(CHAT, "")
