"""Ids only grow: prompts, turns and observations of different templates, and the templates that are refused."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import TinyPolicy
from gleaner.models.chat import Chat
from gleaner.models.policy import SMOLLM2_TEMPLATE, TINY_TEMPLATE, build_policy
from tests.models.grid import Grid

QWEN3_LIKE = """{%- for message in messages -%}
{%- if message.role == 'assistant' and not loop.last and '</think>' in message.content -%}
{%- set content = message.content.split('</think>')[-1].lstrip('\n') -%}
{%- else -%}
{%- set content = message.content -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
NO_END = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = [{"role": "user", "content": "Where is the mug?"}]
ANSWER, OBSERVATION = "go to shelf 12", {"role": "user", "content": "The shelf holds:\n a mug, a pan."}


def byte_tokenizer(
    template: str | None, merges: list[tuple[str, str]] | None = None
) -> PreTrainedTokenizerBase:
    """Bytes, the given merges, and ChatML's special tokens."""
    merges = merges or []
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        chat_template=template,
    )


TOKENIZERS: dict[str, Any] = {
    "tiny": lambda: build_policy(TinyPolicy(), Grid(), 0).tokenizer,
    "smollm2": lambda: byte_tokenizer(SMOLLM2_TEMPLATE),
    "end is not eos": lambda: byte_tokenizer(TINY_TEMPLATE),
}


def whole(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_equal_the_encoding_of_the_whole_episode(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    chat = Chat(tokenizer)
    ids = chat.prompt_ids(PROMPT)
    assert ids == whole(tokenizer, PROMPT)
    messages = list(PROMPT)
    for _ in range(2):
        answer = tokenizer.encode(ANSWER, add_special_tokens=False)
        ids = [*ids, *answer, chat.end_id, *chat.observation_ids([OBSERVATION], after_stop=True)]
        messages += [{"role": "assistant", "content": ANSWER}, OBSERVATION]
        assert ids == whole(tokenizer, messages)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_turn_that_was_cut_off_is_closed_first(name: str) -> None:
    chat = Chat(TOKENIZERS[name]())
    stopped = chat.observation_ids([OBSERVATION], after_stop=True)
    assert chat.observation_ids([OBSERVATION], after_stop=False) == [chat.end_id, *stopped]
    assert chat.end_id in chat.stop_ids


def test_the_stop_is_the_templates_end_of_turn_and_the_tokenizers_end() -> None:
    tokenizer = byte_tokenizer(TINY_TEMPLATE)
    assert Chat(tokenizer).stop_ids == {
        tokenizer.convert_tokens_to_ids("<|end|>"),
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }


def test_a_default_system_prompt_appears_once() -> None:
    tokenizer = byte_tokenizer(SMOLLM2_TEMPLATE)
    chat = Chat(tokenizer)
    assert "You are a helpful AI assistant" in tokenizer.decode(chat.prompt_ids(PROMPT))
    observation = tokenizer.decode(chat.observation_ids([OBSERVATION], after_stop=True))
    assert observation == (
        "\n<|im_start|>user\nThe shelf holds:\n a mug, a pan.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_ambiguous_merges_never_change_what_was_sampled() -> None:
    # "hello" encodes to one token; a policy may as well sample "he" + "llo".
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = byte_tokenizer(SMOLLM2_TEMPLATE, merges)
    chat = Chat(tokenizer)
    sampled = [tokenizer.convert_tokens_to_ids(piece) for piece in ("he", "llo")]
    assert chat.decode(sampled) == "hello"
    assert tokenizer.encode("hello", add_special_tokens=False) == [tokenizer.convert_tokens_to_ids("hello")]
    before = [*chat.prompt_ids(PROMPT), *sampled, chat.end_id]
    after = before + chat.observation_ids([OBSERVATION], after_stop=True)
    assert after[: len(before)] == before
    assert after != whole(tokenizer, [*PROMPT, {"role": "assistant", "content": "hello"}, OBSERVATION])


def test_a_template_that_rewrites_history_is_refused_for_many_turns_only() -> None:
    tokenizer = byte_tokenizer(QWEN3_LIKE)
    with pytest.raises(ConfigurationError, match="max_turns=1"):
        Chat(tokenizer)
    assert Chat(tokenizer, multi_turn=False).prompt_ids(PROMPT) == whole(tokenizer, PROMPT)


@pytest.mark.parametrize(("template", "message"), [(None, "no chat template"), (NO_END, "end-of-turn token")])
def test_a_template_without_what_is_needed_is_refused_with_the_fix(
    template: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Chat(byte_tokenizer(template))


def test_a_role_that_the_template_does_not_know_is_named() -> None:
    with pytest.raises(ConfigurationError, match="tool"):
        Chat(TOKENIZERS["tiny"]()).prompt_ids([{"role": "tool", "content": "x"}])


def test_decoded_text_has_no_special_tokens_and_keeps_its_spaces() -> None:
    tokenizer = TOKENIZERS["tiny"]()
    chat = Chat(tokenizer)
    text = " go  right , then .\n"
    assert chat.decode([*tokenizer.encode(text, add_special_tokens=False), chat.end_id]) == text
    long = "x 1 " * 200
    assert chat.decode(tokenizer.encode(long, add_special_tokens=False)) == long


def test_text_parts_of_a_message_with_images_are_joined() -> None:
    chat = Chat(TOKENIZERS["tiny"]())
    parts = [{"type": "image", "digest": "0"}, {"type": "text", "text": OBSERVATION["content"]}]
    plain = chat.observation_ids([OBSERVATION], after_stop=True)
    assert chat.observation_ids([{"role": "user", "content": parts}], after_stop=True) == plain
