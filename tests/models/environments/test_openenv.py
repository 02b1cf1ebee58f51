"""Worlds behind an OpenEnv server, against a real one in a child process.

The fast server speaks the protocol with websockets alone; the slow tests are the same against the openenv package's
own server (`make openenv-server`).
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gleaner.conf.compose import compose
from gleaner.conf.errors import ConfigurationError, GleanerError, TransientError
from gleaner.conf.schema import OpenEnvEnvironment, RewardSettings, VerificationSettings
from gleaner.models.environments import make_environment
from gleaner.models.environments.openenv import OpenEnv
from gleaner.models.records import Segment
from gleaner.models.verification import VerifierPool, judge

WORLD = Path(__file__).with_name("counting_world.py")
ROOT = Path(__file__).parents[3]
OPENENV_PYTHON = ROOT / ".cache/openenv-server/bin/python"
SESSIONS = 6

KINDS = [
    pytest.param("plain", id="plain"),
    pytest.param(
        "openenv",
        id="openenv",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not OPENENV_PYTHON.exists(), reason="run `make openenv-server`"),
        ],
    ),
]
Server = tuple[str, subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """start(kind, sessions) gives the address and the process of a server that ends with the test."""
    processes = []

    def start_one(kind: str = "plain", sessions: int = SESSIONS) -> Server:
        python = str(OPENENV_PYTHON) if kind == "openenv" else sys.executable
        process = subprocess.Popen(
            [python, str(WORLD), kind, str(sessions)], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{int(process.stdout.readline())}", process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def world_at(base_url: str, **changes: Any) -> OpenEnv:
    settings: dict[str, Any] = {
        "base_url": base_url,
        "action_field": "command",
        "observation_field": "screen.text",
        "reset": {"index": "{index}"},
        "max_turns": 5,
        "train_prompts": 9,
        "validation_prompts": 4,
        "test_prompts": 3,
        "sessions": SESSIONS,
        "connect_seconds": 5.0,
        "reply_seconds": 10.0,
    }
    made = make_environment(OpenEnvEnvironment(**{**settings, **changes}), seed=0)
    assert isinstance(made, OpenEnv)
    return made


def verdict_of(world: OpenEnv, prompt: Any, **fields: Any) -> Any:
    """The verdict on one rollout, as the phase of a run gives it."""
    segment = Segment(
        prompt_id=prompt.prompt_id, sample=0, segment=0, context_ids=[], sampled_ids=[], loss_mask=[], logprobs=[],
        policy_version="", sampling_digest="", seed=0, text="", transcript=[], images=[], **fields,
    )  # fmt: skip
    with VerifierPool(1, 10.0) as pool:
        return judge(world, [prompt], [segment], VerificationSettings(), [RewardSettings()], pool)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_ends_with_the_servers_reward_and_its_verdict(start, kind) -> None:
    world = world_at(start(kind)[0])
    prompt = world.prompt(
        "train", 0
    )  # after 3 test and 4 validation tasks: number 7, whose goal is 7 % 3 + 1
    assert prompt.messages == [{"role": "user", "content": "Task 7: reach 2."}]
    episode = world.begin(prompt, prompt.seed)
    assert [episode.step(" up\n").text, episode.step("nonsense").text] == ["You are at 1."] * 2
    assert episode.result()["done"] is False
    last = episode.step("up")
    episode.close()
    assert (last.text, last.done) == ("You are at 2.", True)
    assert last.result == {"done": True, "reward": 1.0, "turns": 3}
    verdict = verdict_of(world, prompt, finish_reason="environment", environment_result=last.result)
    assert (verdict.status, verdict.success, verdict.reward) == ("scored", True, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_below_the_threshold_is_a_failure_that_keeps_its_reward(start, kind) -> None:
    address, _ = start(kind)
    for success_at, success in ((1.0, False), (0.25, True)):
        world = world_at(address, success_at=success_at)
        prompt = world.prompt("test", 2)
        episode = world.begin(prompt, 0)
        last = episode.step("stop")
        episode.close()
        verdict = verdict_of(world, prompt, finish_reason="environment", environment_result=last.result)
        assert (verdict.success, verdict.reward) == (success, 0.25)


def test_an_episode_that_ran_into_the_turn_limit_has_no_reward(start) -> None:
    world = world_at(start()[0], success_at=0.0)
    prompt = world.prompt("test", 2)
    episode = world.begin(prompt, 0)
    episode.step("up")
    verdict = verdict_of(world, prompt, finish_reason="environment", environment_result=episode.result())
    episode.close()
    assert (verdict.status, verdict.success, verdict.reward) == ("scored", False, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_at_once_do_not_mix_and_give_their_places_back(start, kind) -> None:
    world = world_at(start(kind)[0])
    prompts = [world.prompt("train", index) for index in range(SESSIONS)]
    for _ in range(2):  # the second round finds no free session unless the first round's have ended
        with ThreadPoolExecutor(SESSIONS) as pool:
            episodes = list(pool.map(lambda prompt: world.begin(prompt, 0), prompts))
            seen: list[list[str]] = [[] for _ in episodes]
            for _ in range(3):
                for texts, observation in zip(seen, pool.map(lambda e: e.step("up"), episodes), strict=True):
                    texts.append(observation.text)
            list(pool.map(lambda episode: episode.close(), episodes))
        assert seen == [["You are at 1.", "You are at 2.", "You are at 3."]] * SESSIONS
        assert [episode.reward for episode in episodes] == [
            float((7 + i) % 3 + 1 == 3) for i in range(SESSIONS)
        ]


def test_splits_share_no_task_and_more_training_prompts_move_no_other(start) -> None:
    address, _ = start()
    small, large = world_at(address), world_at(address, train_prompts=20)
    tasks = {split: [small.prompt(split, i) for i in range(small.size(split))] for split in
             ("train", "validation", "test")}  # fmt: skip
    indices = {split: [p.payload["reset"]["index"] for p in prompts] for split, prompts in tasks.items()}
    assert indices == {"test": [0, 1, 2], "validation": [3, 4, 5, 6], "train": list(range(7, 16))}
    assert large.prompt("validation", 3) == small.prompt("validation", 3)
    by_split = world_at(address, reset={"index": "{index}", "wording": "{split}/{seed}"})
    first = [by_split.prompt(split, 0).payload["reset"] for split in ("train", "test")]
    assert [each["index"] for each in first] == [0, 0]
    assert first[0]["wording"] != first[1]["wording"]
    assert first[1]["wording"].startswith("test/")


@pytest.mark.parametrize("kind", KINDS)
def test_an_action_that_the_servers_schema_refuses_is_told_to_the_policy(start, kind) -> None:
    world = world_at(start(kind)[0])
    episode = world.begin(world.prompt("test", 0), 0)
    refused = episode.step("a very long command indeed")
    assert refused.text.startswith("Invalid action: ")
    assert "at most 20 characters" in refused.text
    assert episode.step("up").done
    episode.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sleep", "did not answer a step within environment.reply_seconds=0.5: raise it"),
        ("die", "closed the session at a step"),
        ("raise", "a bug in the world"),
        ("garble", "no message of OpenEnv"),
    ],
)
def test_a_broken_session_fails_and_its_episode_is_unscored(start, kind, command, message) -> None:
    if (kind, command) == ("openenv", "garble"):
        pytest.skip("the package's server keeps to its protocol")
    world = world_at(start(kind)[0], reply_seconds=0.5)
    prompt = world.prompt("test", 0)
    episode = world.begin(prompt, 0)
    began = time.monotonic()
    with pytest.raises(GleanerError, match=message) as caught:
        episode.step(command)
    episode.close()
    assert time.monotonic() - began < 2.9  # not even closing waits for the sleeper
    result = {"error": str(caught.value)}
    verdict = verdict_of(world, prompt, finish_reason="error", environment_result=result)
    assert (verdict.status, verdict.success, verdict.reward) == ("error", None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_dies_takes_all_its_episodes_and_no_new_one_begins(start, kind) -> None:
    address, process = start(kind)
    world = world_at(address)
    prompts = [world.prompt("train", index) for index in range(3)]
    episodes = [world.begin(prompt, 0) for prompt in prompts]
    episodes[0].step("down")
    process.kill()
    process.wait()
    for episode in episodes:
        with pytest.raises(TransientError, match="closed the session at a step"):
            episode.step("up")
        episode.close()
    with pytest.raises(TransientError, match=r"cannot be reached .* start the server"):
        world.begin(prompts[0], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_validation_finds_nothing_wrong_with_a_server_that_fits(start, kind) -> None:
    assert world_at(start(kind)[0]).validate() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"action_field": "act"}, "environment.action_field=act: the server's action has command; choose one"),
        ({"observation_field": "screen.html"}, "the server's observation has no html (text); choose another"),
        ({"sessions": 9}, "of environment.sessions=9 sessions, 6 could be begun together"),
        ({"sessions": 9}, "allows 6 sessions at once: set environment.sessions=6"),
        ({"train_prompts": 2000}, "the last of environment.train_prompts=2000 tasks cannot be started"),
        ({"reset": {"index": "{index}", "wording": "clock"}}, "pass arguments in environment.reset that determine"),
    ],
)  # fmt: skip
def test_validation_names_the_setting_that_does_not_fit(start, kind, changes, sentence) -> None:
    assert any(sentence in found for found in world_at(start(kind)[0], **changes).validate())


def test_validation_names_the_fix_when_there_is_no_server() -> None:
    (sentence,) = world_at("http://127.0.0.1:9").validate()
    assert "environment.base_url=http://127.0.0.1:9 cannot be reached" in sentence
    assert "start the server, or correct the address" in sentence


def test_there_is_no_expert() -> None:
    with pytest.raises(ConfigurationError, match="no expert to imitate: set warmstart=null"):
        world_at("http://127.0.0.1:9").demonstrations(1, 0.0, 0)


PRESET = [
    "environment=openenv", "environment.base_url=http://localhost:8000", "environment.action_field=message",
    "environment.observation_field=text",
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.rows_per_shard=17"], "sampling.rows_per_shard=17 opens more sessions than environment.sessions=16"),
        (["environment.sessions=4", "sampling.rows_per_shard=4"], "run.group_size=8 opens more sessions"),
        (["policy=tiny"], "environment=openenv has no expert to imitate: set warmstart=null"),
        (["environment.reset={seed: 3}"], "starts every prompt with the same task"),
        (["environment.reset={task: '{task}'}"], "environment.reset names {task}"),
        (["environment.base_url=localhost"], "environment.base_url"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_at_once(overrides, message) -> None:
    with pytest.raises(ConfigurationError) as caught:
        compose([*PRESET, *overrides])
    assert message in str(caught.value)
