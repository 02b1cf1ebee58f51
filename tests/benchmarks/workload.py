"""The work that both trainers are given: short prompts, and a reward that differs between any two answers.

An untrained policy never solves a task, so a task's own reward would leave every group without a signal, and the
trainer that skips such groups would win by doing nothing. Here every group has one.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import Split
from gleaner.models.environments.base import Demonstration, Episode, Outcome, VerifierSpec
from gleaner.models.records import Message, Prompt

SIZES = {"train": 4096, "validation": 8, "test": 8}
OBJECTS = ("apples", "stones", "coins", "letters", "stamps", "shells")


def reward_of(text: str) -> float:
    """In [0, 1], and as good as random."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:2], "big") / 65535


def judge(payload: dict[str, Any], text: str, transcript: list[Message], result: dict[str, Any]) -> Outcome:
    reward = reward_of(text)
    return Outcome(success=reward > 0.5, reward=reward)


class Counting:
    """Prompts of 20 to 60 words."""

    name = "counting"
    version = "1"
    max_turns = 1
    parallel_episodes = 1
    verifier = VerifierSpec(f"{__file__}:judge", version="1")

    def size(self, split: Split) -> int:
        return SIZES[split]

    def prompt(self, split: Split, index: int) -> Prompt:
        parts = [
            f"box {place} holds {(index * 7 + place * 13) % 97} {OBJECTS[(index + place) % len(OBJECTS)]}"
            for place in range(3 + index % 6)
        ]
        content = f"Question {index}. In the hall {', '.join(parts)}. How many things are there in all?"
        prompt_id = hashlib.sha256(f"{split}/{content}".encode()).hexdigest()
        return Prompt(prompt_id, self.name, split, index, [{"role": "user", "content": content}], {})

    def begin(self, prompt: Prompt, seed: int) -> Episode:
        raise NotImplementedError("one turn")

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        raise ConfigurationError("the benchmark's work has no expert: start from the policy as it is")

    def validate(self) -> list[str]:
        return []
