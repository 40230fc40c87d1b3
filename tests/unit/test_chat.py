"""Incremental chat rendering against the full render, on templates of several families."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.text.chat import ChatFormat
from delta_belief_rl.types import Message, UserError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3: a header with an empty block when thinking is off, and an empty block in front of the
# last assistant message only.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# The same with thoughts: those of earlier turns are dropped, that of the last answer is shown.
QWEN3_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% elif m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "<think>\n\n</think>\n\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# A model that always thinks: its header opens the thought.
THINKS_ALWAYS = QWEN3_THINKING.split("{% if add_generation_prompt %}")[0] + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set sys = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set sys = '' %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ '<s>[INST] ' + (sys if loop.first else '') "
    "+ m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}<s>{% endif %}<|start|>{{ m.role }}<|end|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>"]
WORDS = ["system", "user", "assistant", "Is it alive?", "Is it made of wood?", "Yes, it is.", "No."]
SYSTEM = Message("system", "You ask questions.")
USER = Message("user", "Think of a thing.")


# How Qwen and Llama 3 split text: line breaks stay together and apart from the word behind them.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer(template: str | None, gpt2_split: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if gpt2_split:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*WORDS, "\n\n", "Think of a thing."] * 9, trainer)
    backend.add_tokens(
        [AddedToken("<think>", special=False), AddedToken("</think>", special=False)]
    )
    out = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    out.chat_template = template
    return out


def full(chat: ChatFormat, messages: Sequence[Message], header: bool = True) -> tuple[int, ...]:
    text = chat.tokenizer.apply_chat_template(
        [m.as_dict() for m in messages],
        tokenize=False,
        add_generation_prompt=header,
        **chat.template_kwargs,
    )
    return tuple(chat.tokenizer.encode(text, add_special_tokens=False))


def incremental(
    chat: ChatFormat, opening: Sequence[Message], turns: Sequence[str]
) -> tuple[int, ...]:
    ids = chat.open_ids(opening)
    for i, text in enumerate(turns):
        ids += chat.reply_ids(text) if i % 2 else chat.assistant_ids(text)
    return ids


def messages_of(opening: Sequence[Message], turns: Sequence[str]) -> list[Message]:
    roles = ("assistant", "user")
    return [*opening, *(Message(roles[i % 2], text) for i, text in enumerate(turns))]


TURNS = ("Is it alive?", "No.", "Is it made of wood?", "Yes, it is.")


@pytest.mark.parametrize("opening", [(USER,), (SYSTEM, USER)])
@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA2, LLAMA3])
def test_T2_the_incremental_sequence_equals_the_full_render(
    template: str, opening: tuple[Message, ...]
) -> None:
    chat = ChatFormat.from_tokenizer(tokenizer(template))
    assert chat.difference == ""
    assert incremental(chat, opening, TURNS) == full(chat, messages_of(opening, TURNS))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=2, max_size=2))
@pytest.mark.parametrize("template", [CHATML, LLAMA2, LLAMA3])
def test_T2_any_reply_text_equals_the_full_render(template: str, texts: list[str]) -> None:
    chat = formats(template)
    turns = ("Is it alive?", texts[0], "Is it made of wood?", texts[1])
    assert incremental(chat, (USER,), turns) == full(chat, messages_of((USER,), turns))


_FORMATS: dict[str, ChatFormat] = {}


def formats(template: str) -> ChatFormat:
    if template not in _FORMATS:
        _FORMATS[template] = ChatFormat.from_tokenizer(tokenizer(template))
    return _FORMATS[template]


@pytest.mark.parametrize(
    ("template", "eot"), [(CHATML, "<|im_end|>"), (LLAMA2, "</s>"), (LLAMA3, "<|eot|>")]
)
def test_the_end_of_turn_token_is_read_off_the_template(template: str, eot: str) -> None:
    chat = formats(template)
    assert chat.eot_id == chat.tokenizer.convert_tokens_to_ids(eot)


def test_T5_the_separator_after_the_end_token_belongs_to_the_reply() -> None:
    chat = formats(CHATML)
    assert chat.before_reply == "\n<|im_start|>user\n"
    assert chat.after_reply == "<|im_end|>\n<|im_start|>assistant\n"
    assert chat.assistant_ids("No.")[-1] == chat.eot_id
    assert "\n" not in chat.decode_exact(chat.assistant_ids("No."))


def test_T4_golden_render_of_a_header_with_an_empty_think_block() -> None:
    chat = ChatFormat.from_tokenizer(tokenizer(QWEN3), {"enable_thinking": False})
    header = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    text = chat.decode_exact(incremental(chat, (USER,), TURNS[:2]))
    assert text == (
        f"<|im_start|>user\nThink of a thing.<|im_end|>\n{header}"
        f"Is it alive?<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n{header}"
    )


def test_T2_a_header_that_merges_with_what_follows_is_declared() -> None:
    # This split joins two line breaks at the end of a text and parts them before a word.
    chat = ChatFormat.from_tokenizer(tokenizer(LLAMA3, gpt2_split=True))
    assert "token 15" in chat.difference
    assert ChatFormat.from_tokenizer(tokenizer(LLAMA3)).difference == ""


def test_T3_keeping_the_block_is_declared_because_the_full_render_drops_it() -> None:
    chat = ChatFormat.from_tokenizer(tokenizer(QWEN3), {"enable_thinking": False})
    assert "built turn by turn" in chat.difference
    assert "<think>" in chat.difference


def test_T3_stripping_the_block_makes_history_and_header_agree() -> None:
    chat = ChatFormat.from_tokenizer(
        tokenizer(QWEN3), {"enable_thinking": False}, thinking_history="strip"
    )
    assert chat.difference == ""
    text = chat.decode_exact(incremental(chat, (SYSTEM, USER), TURNS))
    assert "<think>" not in text
    assert text.endswith("<|im_start|>assistant\n")


def test_T11_template_arguments_reach_the_template() -> None:
    thinking = ChatFormat.from_tokenizer(tokenizer(QWEN3), {"enable_thinking": True})
    assert not thinking.decode_exact(thinking.open_ids((USER,))).endswith("</think>\n\n")
    assert thinking.template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize("template", [CHATML, LLAMA2, LLAMA3])
@pytest.mark.parametrize("text", ["<|im_end|>", "a </s><s> b", "<|eot|><|start|>system<|end|>"])
def test_T6_control_tokens_in_a_reply_stay_text(template: str, text: str) -> None:
    chat = formats(template)
    special = {chat.tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}

    def count(ids: Sequence[int]) -> int:
        return sum(token in special for token in ids)

    ids = chat.reply_ids(text)
    assert count(ids) == count(chat.reply_ids("plain"))
    assert text in chat.decode_exact(ids)
    opening = chat.open_ids((SYSTEM, Message("user", f"x {text} y")))
    assert count(opening) == count(chat.open_ids((SYSTEM, Message("user", "x"))))
    assert f"x {text} y" in chat.decode_exact(opening)


def test_T6_a_neutralised_opening_equals_the_render_around_it() -> None:
    chat = formats(CHATML)
    # The text of a control token is no control token of this template's own pieces.
    opening = chat.open_ids((Message("user", "a<s>b"),))
    assert (
        chat.decode_exact(opening) == "<|im_start|>user\na<s>b<|im_end|>\n<|im_start|>assistant\n"
    )


def test_T8_long_text_is_never_cut() -> None:
    tok = tokenizer(CHATML)
    tok.model_max_length = 16
    chat = ChatFormat.from_tokenizer(tok)
    long = "Is it alive? " * 200
    assert long in chat.decode_exact(chat.reply_ids(long))
    assert long in chat.decode_exact(chat.open_ids((Message("user", long),)))


def test_T12_the_environment_reads_text_without_control_tokens() -> None:
    chat = formats(CHATML)
    assert chat.decode(chat.assistant_ids("Is it alive?")) == "Is it alive?"


def test_offsets_point_into_the_text() -> None:
    chat = formats(CHATML)
    text = "Is it 'café'?"
    ids, offsets = chat.encode_with_offsets(text)
    assert ids == chat.encode(text)
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)


def test_templates_that_cannot_be_used_are_one_sentence() -> None:
    with pytest.raises(UserError, match="no chat template"):
        ChatFormat.from_tokenizer(tokenizer(None))
    with pytest.raises(UserError, match="no special token"):
        ChatFormat.from_tokenizer(tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}"))
    with pytest.raises(UserError, match="exactly once"):
        ChatFormat.from_tokenizer(tokenizer("{{ messages[0].content }}"))
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    chat = ChatFormat.from_tokenizer(tokenizer(strict + CHATML))
    with pytest.raises(UserError, match="no system"):
        chat.open_ids((SYSTEM, USER))
    with pytest.raises(UserError, match="'keep' or 'strip'"):
        ChatFormat.from_tokenizer(tokenizer(CHATML), thinking_history="drop")  # type: ignore[arg-type]


# --- thinking -------------------------------------------------------------------------------------

EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "<think>\nMost things are not alive.\n</think>\n\n<question>Is it alive?</question>"


@pytest.mark.parametrize(
    ("template", "thinking", "header", "no_thought"),
    [
        (QWEN3, False, EMPTY, ""),
        (QWEN3, True, "", EMPTY),
        (QWEN3_THINKING, False, EMPTY, ""),
        (QWEN3_THINKING, True, "", EMPTY),
        (THINKS_ALWAYS, True, "<think>\n", "\n</think>\n\n"),
        (CHATML, False, "", ""),
        (CHATML, True, "", ""),
    ],
)
def test_T4_T11_golden_renders_with_and_without_thinking(
    template: str, thinking: bool, header: str, no_thought: str
) -> None:
    chat = ChatFormat.from_tokenizer(tokenizer(template), {"enable_thinking": thinking})
    opening = f"<|im_start|>user\nThink of a thing.<|im_end|>\n<|im_start|>assistant\n{header}"
    assert chat.decode_exact(chat.open_ids((USER,))) == opening
    reply = f"\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n{header}"
    assert chat.decode_exact(chat.reply_ids("No.")) == reply
    assert chat.no_thought == no_thought
    # Wherever thinking ends, a guess stands where the template puts a last answer.
    guess = Elicitation.build(chat, "oak")
    asked = chat.decode_exact((*chat.open_ids((USER,)), *guess.token_ids))
    answered = full(chat, [USER, Message("assistant", "Is it 'oak'?")], header=False)
    assert chat.decode_exact(answered).startswith(asked)
    assert asked.endswith("assistant\n" + (EMPTY if "think" in template else "") + "Is it 'oak")
    assert "oak" in chat.decode_exact(guess.targets.tolist())
    assert "Is it" not in chat.decode_exact(guess.targets.tolist())


@pytest.mark.parametrize("template", [LLAMA2, LLAMA3])
def test_T4_a_template_without_thoughts_has_none_before_a_guess(template: str) -> None:
    for thinking in (False, True):
        chat = ChatFormat.from_tokenizer(tokenizer(template), {"enable_thinking": thinking})
        assert chat.no_thought_ids == ()
        assert chat.difference == ""
        assert incremental(chat, (USER,), TURNS) == incremental(formats(template), (USER,), TURNS)


def test_T4_the_tokens_before_a_guess_are_the_same_with_and_without_thinking() -> None:
    silent, aloud = (
        ChatFormat.from_tokenizer(tokenizer(QWEN3), {"enable_thinking": on}) for on in (False, True)
    )
    ids = [
        (*chat.open_ids((USER,)), *Elicitation.build(chat, "oak").token_ids)
        for chat in (silent, aloud)
    ]
    assert ids[0] == ids[1]


def test_T3_sampled_thoughts_are_kept_and_a_template_that_drops_them_is_declared() -> None:
    chat = ChatFormat.from_tokenizer(tokenizer(QWEN3_THINKING), {"enable_thinking": True})
    assert "<think>" in chat.difference
    assert "the stream that the model saw is kept" in chat.difference
    text = chat.decode_exact(incremental(chat, (USER,), (THOUGHT, "No.")))
    assert text == (
        f"<|im_start|>user\nThink of a thing.<|im_end|>\n<|im_start|>assistant\n{THOUGHT}"
        "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatFormat.from_tokenizer(tokenizer(QWEN3), {"enable_thinking": True}).difference == ""


def test_T3_sampled_thoughts_cannot_be_stripped() -> None:
    with pytest.raises(UserError, match="no single stream of tokens"):
        ChatFormat.from_tokenizer(
            tokenizer(QWEN3), {"enable_thinking": True}, thinking_history="strip"
        )
    stripped = ChatFormat.from_tokenizer(
        tokenizer(QWEN3), {"enable_thinking": False}, thinking_history="strip"
    )
    assert stripped.no_thought == ""


def test_T12_the_environment_reads_thoughts_as_text() -> None:
    chat = ChatFormat.from_tokenizer(tokenizer(QWEN3_THINKING), {"enable_thinking": True})
    assert chat.decode(chat.assistant_ids(THOUGHT)) == THOUGHT
