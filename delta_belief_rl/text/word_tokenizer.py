"""A word-level tokenizer for agents that speak a closed language.

Every word of a given corpus is one token, every character of printable ASCII is a fallback,
anything else is the unknown token. Spaces are not stored: decoding puts them back, none before ``?
. , '``, none after an opening quote. An opening quote is its own token, so ``Is it 'dog'?`` and
``Is it a dog?`` share ``dog``.

The chat template is ChatML. A role's header (``<|im_start|>user`` and its newline) is one token and
the newline after ``<|im_end|>`` is none, so a turn costs four tokens more than its words.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|endoftext|>"
UNKNOWN = "<|unk|>"
ROLES = ("system", "user", "assistant")
OPEN_QUOTE = "\u2039"

_CONTINUATION = "##"
_WORD = r"[A-Za-z0-9]+(?:['-]+[A-Za-z0-9]+)*"
_PIECE = _WORD + r"|[^\sA-Za-z0-9]"
_OPENING = r"(?<=\s)'"
"""Only what stands before decides, so that text may be encoded in pieces cut anywhere but at a
space."""
_MAX_WORD = 10_000

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def corpus_words(texts: Iterable[str]) -> tuple[str, ...]:
    """The distinct words and punctuation marks of some texts, sorted.

    Example:
        >>> corpus_words(["Is it alive?", "Is it 'dog'?"])
        ("'", '?', 'Is', 'alive', 'dog', 'it')
    """
    found: set[str] = set()
    for text in texts:
        found.update(re.findall(_PIECE, text))
    return tuple(sorted(found))


def special_tokens() -> tuple[str, ...]:
    """The special tokens in the order of their ids: padding is 0, unknown 1, end of turn 2."""
    headers = tuple(f"{IM_START}{role}\n" for role in ROLES)
    return (PAD, UNKNOWN, IM_END, IM_START, *headers)


def build_word_tokenizer(
    texts: Iterable[str], model_max_length: int = 1024
) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a closed language.

    Args:
        texts: Words or sentences; each word in them becomes one token, case kept.
        model_max_length: Recorded in the tokenizer's configuration.

    Returns:
        A tokenizer that ``save_pretrained`` writes and ``AutoTokenizer`` reads without remote code.
    """
    vocabulary = _vocabulary(corpus_words(texts))
    tokenizer = Tokenizer(
        WordPiece(
            vocabulary,
            unk_token=UNKNOWN,
            max_input_chars_per_word=_MAX_WORD,
            continuing_subword_prefix=_CONTINUATION,
        )
    )
    tokenizer.normalizer = normalizers.Replace(Regex(_OPENING), OPEN_QUOTE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix=_CONTINUATION, cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r" (?=[?.,!;:'])"), ""),
            decoders.Replace(Regex(OPEN_QUOTE + " ?"), "'"),
        ]
    )
    added = [AddedToken(text, special=True, normalized=False) for text in special_tokens()]
    cast(Any, tokenizer).add_special_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=IM_END,
        extra_special_tokens=[text for text in special_tokens() if text.startswith(IM_START)],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
        padding_side="left",
    )


def _vocabulary(words: tuple[str, ...]) -> dict[str, int]:
    characters = [c for c in string.printable if not c.isspace()]
    entries = [
        *special_tokens(),
        OPEN_QUOTE,
        *words,
        *characters,
        *(_CONTINUATION + c for c in characters),
    ]
    return {text: index for index, text in enumerate(dict.fromkeys(entries))}
