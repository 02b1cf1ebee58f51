"""Messages to token ids, without ever encoding twice what a policy already saw or sampled.

An episode's ids are: the prompt up to the generation prompt, the sampled turn, the observation up to the next
generation prompt, the next sampled turn, and so on. Only new text is encoded; its pieces are cut at the special
token that ends a turn, where no merge can cross, so the ids equal what one encoding of the same text would give.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from gleaner.conf.errors import ConfigurationError, ContractError
from gleaner.models.records import Message
from gleaner.models.vision import Eyes, ImagePlace

ASK = {"role": "user", "content": "Ask."}
PROBE = "Zq7 answer"
THOUGHT = "<think>\nZq8 thought\n</think>\n\nZq7 answer"


class Chat:
    """A tokenizer's chat template, taken apart into prompt, end of turn and observation.

    Args:
        tokenizer: with a chat template.
        multi_turn: check that the template lets an episode grow. Set it to False only for single-turn training.
        eyes: of a policy that sees; without them images are left out of what it reads.

    Raises:
        ConfigurationError: there is no chat template, its turns have no end token, or (multi-turn) it rewrites
            earlier turns when new ones are added: sampled ids would not be a prefix of the next context.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, multi_turn: bool = True, eyes: Eyes | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigurationError(
                "the policy's tokenizer has no chat template: use an instruction-tuned model, or set "
                "tokenizer.chat_template and save the folder again"
            )
        self.tokenizer = tokenizer
        self.multi_turn = multi_turn
        self.eyes = eyes
        # Templates of vision-language models take a message's parts, others its text.
        self._takes_parts = eyes is not None and str(ASK["content"]) not in str(
            tokenizer.apply_chat_template([ASK], tokenize=False)
        )
        prompt = self._render([ASK], generation=True)
        answered = self._render([ASK, {"role": "assistant", "content": PROBE}], generation=False)
        if (
            not answered.startswith(prompt[: len(self._render([ASK], generation=False))])
            or PROBE not in answered
        ):
            raise ConfigurationError(
                "the chat template changes the prompt or the answer's text once an answer follows: choose another "
                "template (policy.path) whose turns are only appended"
            )
        end = answered[answered.rindex(PROBE) + len(PROBE) :]
        end_ids = self._encode(end)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        if not end_ids or end_ids[0] not in special | set(tokenizer.all_special_ids):
            raise ConfigurationError(
                "the chat template does not end an answer with a special token, so a turn has no stop: end the "
                "assistant's turn with an end-of-turn token in tokenizer.chat_template"
            )
        self.end_id = end_ids[0]
        stops = {self.end_id, tokenizer.eos_token_id} - {None}
        self.stop_ids: frozenset[int] = frozenset(stops)
        end_token = str(tokenizer.convert_ids_to_tokens(self.end_id))
        self._after_end = end[end.index(end_token) + len(end_token) :]
        self._episode = [ASK, {"role": "assistant", "content": PROBE}]
        self._episode_text = answered
        if multi_turn:
            self._check_that_history_only_grows(prompt)
        self._observation_text = lru_cache(maxsize=8192)(self._render_observation)
        self._decode_short = lru_cache(maxsize=16384)(self._decode)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a prompt, up to and including the generation prompt."""
        return self._encode(self._render([self.written(message) for message in messages], generation=True))

    def written(self, message: Message) -> Message:
        """The message as one text: images are their placeholders for a policy that sees, and nothing for another. A
        placeholder within the text itself is broken, so that it encodes as text."""
        if self.eyes is None:
            return text_only(message)
        content, mark = message["content"], self.eyes.placeholder
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(
            self.eyes.text
            if part["type"] == "image"
            else part["text"].replace(mark, f"{mark[:1]} {mark[1:]}")
            for part in parts
        )
        return {**message, "content": text}

    def image_places(self, ids: Sequence[int], messages: Sequence[Message]) -> list[ImagePlace]:
        """Where the images of messages stand in the ids that the messages gave.

        Raises:
            ContractError: ids and messages do not belong together.
        """
        digests = image_digests(messages)
        if self.eyes is None or not digests:
            return []
        mark, count = self.eyes.image_id, self.eyes.tokens
        starts: list[int] = []
        place = 0
        while place < len(ids):
            if ids[place] != mark:
                place += 1
                continue
            starts.append(place)
            place += count
        whole = all(list(ids[start : start + count]) == [mark] * count for start in starts)
        if len(starts) != len(digests) or not whole:
            raise ContractError(
                f"{len(digests)} images were encoded to {sum(token == mark for token in ids)} placeholders instead of "
                f"{count} each: the chat template adds or drops some"
            )
        return list(zip(starts, digests, strict=True))

    def observation_ids(self, messages: Sequence[Message], after_stop: bool) -> list[int]:
        """Ids to append after a sampled turn: the new messages, up to and including the next generation prompt.

        Args:
            messages: what the environment says, usually one user message.
            after_stop: whether the sampled turn ended with a stop token. If not, the turn is closed first.
        """
        key = tuple((str(message["role"]), str(self.written(message)["content"])) for message in messages)
        ids = self._observation_text(key)
        return list(ids) if after_stop else [self.end_id, *ids]

    def answer_ids(self, text: str, ended: bool) -> list[int]:
        """Ids of a turn that somebody else wrote, with the end token if the turn `ended` by itself."""
        ids = self._encode(text)
        return [*ids, self.end_id] if ended else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without stop or other special tokens."""
        return self._decode_short(tuple(ids)) if len(ids) <= 64 else self._decode(tuple(ids))

    def _check_that_history_only_grows(self, prompt: str) -> None:
        turn: Message = {"role": "user", "content": "Next."}
        for content in (PROBE, THOUGHT):
            turns: list[Message] = [ASK, {"role": "assistant", "content": content}, turn]
            grown = self._render(turns, generation=True)
            if not grown.startswith(prompt + content):
                raise ConfigurationError(
                    "the chat template rewrites earlier answers when a turn is added (for example it drops their "
                    "reasoning), so what was sampled would not be what the next turn sees: use a template that keeps "
                    "history as it is, or train single-turn (environment.max_turns=1)"
                )

    def _render_observation(self, key: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        messages = [{"role": role, "content": content} for role, content in key]
        grown = self._render([*self._episode, *messages], generation=True)
        if not grown.startswith(self._episode_text):
            raise ConfigurationError(
                "the chat template rewrites earlier turns when an observation is added: choose a template that only "
                "appends, or train single-turn (environment.max_turns=1)"
            )
        return tuple(self._encode(self._after_end + grown[len(self._episode_text) :]))

    def _render(self, messages: Sequence[Message], *, generation: bool) -> str:
        shown: list[Message] = list(messages)
        if self._takes_parts:
            shown = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            text = self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=generation)
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigurationError(
                f"the chat template cannot render messages of roles {roles} ({error}): change the environment's "
                "messages, or choose a policy whose template knows these roles"
            ) from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _decode(self, ids: tuple[int, ...]) -> str:
        text: Any = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


def image_digests(messages: Sequence[Message]) -> list[str]:
    """Digests of the images in messages, in their order."""
    return [
        part["digest"]
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]


def text_only(message: Message) -> Message:
    """The message with its text parts joined; image parts carry no tokens for a policy that reads text alone."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "".join(part["text"] for part in content if part["type"] == "text")}
