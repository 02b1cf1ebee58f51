"""A world of three turns in which any policy finds something, and wins a third of the time: no training needed."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gleaner.conf.schema import Split
from gleaner.models.environments.base import Demonstration, Finding, Observation, Outcome, VerifierSpec
from gleaner.models.records import Message, Prompt
from gleaner.models.regions import Cells

ROOMS = ("hall", "attic", "cellar", "porch")
WORDS = ("look", "go", "try", "peek", "step")


def number(text: str, among: int) -> int:
    return hashlib.sha256(text.encode()).digest()[0] % among


def judge(payload: dict[str, Any], text: str, transcript: list[Message], result: dict[str, Any]) -> Outcome:
    won = number(f"{payload['index']} {text}", 3) == 0
    return Outcome(success=won, reward=float(won))


class PeekingEpisode:
    def __init__(self, index: int) -> None:
        self.index = index

    def step(self, action: str) -> Observation:
        room = ROOMS[number(action, len(ROOMS))]
        return Observation(f"The {room} has {number(f'{self.index} {room}', 9)} doors.")

    def result(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Peeking:
    name = "peeking"
    version = "1"
    max_turns = 3
    parallel_episodes = 1
    verifier = VerifierSpec(f"{__file__}:judge", version="1")

    def size(self, split: Split) -> int:
        return 64

    def prompt(self, split: Split, index: int) -> Prompt:
        content = f"Walk {index} of {split}: look into the rooms."
        prompt_id = hashlib.sha256(content.encode()).hexdigest()
        return Prompt(
            prompt_id, self.name, split, index, [{"role": "user", "content": content}], {"index": index}
        )

    def begin(self, prompt: Prompt, seed: int) -> PeekingEpisode:
        return PeekingEpisode(prompt.payload["index"])

    def findings(self, transcript: Sequence[Message]) -> list[Finding]:
        turns = [message["content"] for message in transcript if message["role"] == "assistant"]
        answers = [message["content"] for message in transcript if message["role"] == "user"]
        return [
            Finding(turn, said, said, Cells(frozenset([answer.split()[1]])), answer)
            for turn, (said, answer) in enumerate(zip(turns, answers, strict=False))
            if turn < self.max_turns - 1
        ]

    def demonstrate(self, prompt: Prompt, known: Sequence[Finding], noise: float, seed: int) -> Demonstration:
        random = np.random.default_rng(seed)
        episode = self.begin(prompt, seed)
        turns: list[Message] = []
        for turn in range(self.max_turns):
            action = " ".join(random.choice(WORDS, 2))
            turns.append({"role": "assistant", "content": action})
            if turn + 1 < self.max_turns:
                turns.append({"role": "user", "content": episode.step(action).text})
        return Demonstration(prompt, turns, judge(prompt.payload, action, [], {}).success)

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        return [
            self.demonstrate(self.prompt("train", index % 64), (), noise, seed + index)
            for index in range(count)
        ]

    def validate(self) -> list[str]:
        return []
