"""A world in which any policy wins a third of the time: every kind of group turns up without training."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gleaner.conf.schema import Split
from gleaner.models.environments.base import Demonstration, Episode, Outcome, VerifierSpec
from gleaner.models.records import Message, Prompt

WORDS = ("apple", "stone", "coin", "letter", "stamp", "shell")


def judge(payload: dict[str, Any], text: str, transcript: list[Message], result: dict[str, Any]) -> Outcome:
    won = hashlib.sha256(f"{payload['index']} {text}".encode()).digest()[0] % 3 == 0
    return Outcome(success=won, reward=float(won))


class Lottery:
    name = "lottery"
    version = "1"
    max_turns = 1
    parallel_episodes = 1
    verifier = VerifierSpec(f"{__file__}:judge", version="1")

    def size(self, split: Split) -> int:
        return 64

    def prompt(self, split: Split, index: int) -> Prompt:
        content = f"Draw {index} of {split}: name some things."
        prompt_id = hashlib.sha256(content.encode()).hexdigest()
        return Prompt(
            prompt_id, self.name, split, index, [{"role": "user", "content": content}], {"index": index}
        )

    def begin(self, prompt: Prompt, seed: int) -> Episode:
        raise NotImplementedError("one turn")

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        random = np.random.default_rng(seed)
        prompts = [self.prompt("train", index % 64) for index in range(count)]
        return [
            Demonstration(prompt, [{"role": "assistant", "content": " ".join(random.choice(WORDS, 2))}])
            for prompt in prompts
        ]

    def validate(self) -> list[str]:
        return []
