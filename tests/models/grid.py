"""A tiny multi-turn environment for the tests of the turn loop: walk right until the goal, in few words."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gleaner.conf.schema import Split
from gleaner.models.environments.base import Demonstration, Observation, VerifierSpec
from gleaner.models.records import Prompt


@dataclass
class GridEpisode:
    goal: int
    place: int = 0
    closed: int = 0
    actions: list[str] = field(default_factory=list)

    def step(self, action: str) -> Observation:
        self.actions.append(action)
        if action == "go right":
            self.place += 1
        if self.place == self.goal:
            return Observation("You are at the goal.", done=True, result=self.result())
        return Observation(f"You are at {self.place}. The goal is {self.goal}.")

    def result(self) -> dict[str, Any]:
        return {"won": self.place == self.goal, "turns": len(self.actions)}

    def close(self) -> None:
        self.closed += 1


@dataclass
class Grid:
    """`count` training prompts; prompt i has its goal at 1 + i % 3."""

    max_turns: int = 4
    parallel_episodes: int = 1
    count: int = 12
    name: str = "grid"
    version: str = "1"
    verifier: VerifierSpec = field(
        default_factory=lambda: VerifierSpec("tests.none:none", "1", isolated=False)
    )
    episodes: list[GridEpisode] = field(default_factory=list)

    def size(self, split: Split) -> int:
        return self.count

    def prompt(self, split: Split, index: int) -> Prompt:
        goal = 1 + index % 3
        content = f"Walk. The goal is {goal}. You are at 0. Number {index}."
        return Prompt(
            hashlib.sha256(f"{split}{content}".encode()).hexdigest(),
            self.name,
            split,
            index,
            [{"role": "user", "content": content}],
            {"goal": goal},
        )

    def begin(self, prompt: Prompt, seed: int) -> GridEpisode:
        episode = GridEpisode(prompt.payload["goal"])
        self.episodes.append(episode)
        return episode

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        demonstrations = []
        for index in range(min(count, self.count)):
            prompt = self.prompt("train", index)
            goal = prompt.payload["goal"]
            turns: list[dict[str, Any]] = []
            for place in range(1, goal + 1):
                turns.append({"role": "assistant", "content": "go right"})
                if place < goal:
                    turns.append({"role": "user", "content": f"You are at {place}. The goal is {goal}."})
            demonstrations.append(Demonstration(prompt, turns))
        return demonstrations

    def validate(self) -> list[str]:
        return []
