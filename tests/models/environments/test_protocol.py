"""The protocol fits an engine that is slow, keeps state, lives outside the process and shows images.

The engine is a child process that is spoken to over pipes, one per episode: it counts down from a start value, draws
its counter as a PNG, and answers after a delay, as a JVM or a browser would.
"""

import base64
import inspect
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from gleaner.conf.schema import RewardSettings, Split, VerificationSettings
from gleaner.models.environments.base import Demonstration, Environment, Observation, Outcome, VerifierSpec
from gleaner.models.environments.prompts import make_prompt
from gleaner.models.records import Message, Prompt, Segment
from gleaner.models.verification import VerifierPool, judge

ENGINE = """
import base64, json, struct, sys, time, zlib
left = int(sys.argv[1])
for line in sys.stdin:
    request = json.loads(line)
    time.sleep(0.1)
    if request["action"] == "crash":
        sys.exit(3)
    if request["action"] == "down" and left > 0:
        left -= 1
    image = base64.b64encode(png(left, left)).decode()
    print(json.dumps({"left": left, "image": image}), flush=True)
"""


def png(width: int, value: int) -> bytes:
    """A grey line of `width` + 1 pixels, as an encoded image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width + 1, 1, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes([0, *[value % 256] * (width + 1)]))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


class CountdownEpisode:
    def __init__(self, start: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", inspect.getsource(png) + ENGINE, str(start)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.left = start
        self.closed = 0

    def step(self, action: str) -> Observation:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"action": action}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ConnectionError("the engine ended")
        answer = json.loads(line)
        self.left = answer["left"]
        image = base64.b64decode(answer["image"])
        return Observation(f"{self.left} left", (image,), done=self.left == 0, result=self.result())

    def result(self) -> dict[str, Any]:
        return {"won": self.left == 0}

    def close(self) -> None:
        self.closed += 1
        self.process.kill()
        self.process.communicate()


class Countdown:
    """An environment as a user would write one."""

    name = "countdown-engine"
    version = "1"
    max_turns = 3
    parallel_episodes = 8
    verifier = VerifierSpec(f"{__file__}:verify", version="1", isolated=False)

    def size(self, split: Split) -> int:
        return {"train": 8, "validation": 1, "test": 1}[split]

    def prompt(self, split: Split, index: int) -> Prompt:
        start = {"train": index % 4 + 1, "validation": 5, "test": 6}[split]
        message = {"role": "user", "content": f"Count down from {start}. Task {split} {index}."}
        return make_prompt(self.name, split, [message], {"start": start})

    def begin(self, prompt: Prompt, seed: int) -> CountdownEpisode:
        return CountdownEpisode(prompt.payload["start"])

    def demonstrations(self, count: int, noise: float, seed: int) -> Sequence[Demonstration]:
        return []

    def validate(self) -> list[str]:
        return []


def verify(payload: dict[str, Any], text: str, transcript: list[Message], result: dict[str, Any]) -> Outcome:
    return Outcome(result["won"], float(result["won"]))


class TurnLoopOfOneEpisode:
    """Plays one action over and over, as a turn loop does: up to the turn limit, and closing whatever happens."""

    def __init__(self, environment: Countdown, action: str) -> None:
        self.environment, self.action = environment, action
        self.episodes: list[CountdownEpisode] = []

    def __call__(self, sample: int) -> Segment:
        prompt = self.environment.prompt("train", sample)
        episode = self.environment.begin(prompt, seed=sample)
        self.episodes.append(episode)
        transcript: list[Message] = []
        images: list[dict[str, Any]] = []
        finish: Any = "length"
        try:
            for turn in range(self.environment.max_turns):
                action = self.action if sample != 5 else "crash"
                observation = episode.step(action)
                transcript += [
                    {"role": "assistant", "content": action},
                    {"role": "user", "content": observation.text},
                ]
                images += [{"turn": turn, "bytes": image} for image in observation.images]
                if observation.done:
                    finish = "environment"
                    break
            result = episode.result()
        except ConnectionError:
            finish, result = "error", {}
        finally:
            episode.close()
        return Segment(
            prompt.prompt_id,
            sample,
            0,
            [1],
            [2],
            [1],
            [0.0],
            "v",
            "s",
            0,
            finish,
            self.action,
            transcript,
            result,
            images,
        )


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(1, 10.0) as pool:
        yield pool


def test_a_class_of_a_users_own_is_an_environment() -> None:
    assert isinstance(Countdown(), Environment)


def test_slow_outside_engines_are_stepped_in_threads_and_always_closed(pool: VerifierPool) -> None:
    environment = Countdown()
    loop = TurnLoopOfOneEpisode(environment, "down")
    with ThreadPoolExecutor(environment.parallel_episodes) as threads:
        segments = list(threads.map(loop, range(8)))
    processes = [episode.process for episode in loop.episodes]
    assert [episode.closed for episode in loop.episodes] == [1] * 8
    assert not any(psutil.pid_exists(process.pid) for process in processes)
    # Starts 1 to 4, three turns: 1, 2 and 3 reach zero, 4 runs into the limit. Sample 5 crashed in its first turn.
    by_sample = {segment.sample: segment for segment in segments}
    assert [by_sample[sample].finish_reason for sample in range(8)] == [
        "environment", "environment", "environment", "length", "environment", "error", "environment", "length",
    ]  # fmt: skip
    prompts = [environment.prompt("train", index) for index in range(8)]
    verdicts = judge(environment, prompts, segments, VerificationSettings(), [RewardSettings()], pool)
    assert [verdict.success for verdict in verdicts] == [True, True, True, False, True, None, True, False]
    assert verdicts[5].status == "error"


def test_observations_carry_the_images_of_their_turn() -> None:
    environment = Countdown()
    segment = TurnLoopOfOneEpisode(environment, "down")(1)
    assert [image["turn"] for image in segment.images] == [0, 1]
    assert [image["bytes"] for image in segment.images] == [png(1, 1), png(0, 0)]


def test_state_lives_in_the_episode_not_in_the_environment() -> None:
    environment = Countdown()
    first, second = (environment.begin(environment.prompt("train", 3), seed=0) for _ in range(2))
    try:
        assert [first.step("down").text, first.step("down").text] == ["3 left", "2 left"]
        assert second.step("down").text == "3 left"
    finally:
        first.close()
        second.close()
