"""The household: solvable, deterministic, fair to the policy, and won only by doing the task."""

import json
import random
import re
import time
from typing import Any

import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import HouseholdEnvironment
from gleaner.models.environments.household import NOTHING_HAPPENS, Expert, Household, HouseholdEpisode, verify

MUG_WORLD: dict[str, Any] = {
    "task": "clean",
    "object": "mug",
    "target": "shelf",
    "contents": {"cabinet 1": ["mug", "pan"], "shelf 1": ["key"], "sink 1": []},
}


def household(seed: int = 0, **changes: Any) -> Household:
    return Household(HouseholdEnvironment(**changes), seed)


def play(world: dict[str, Any], actions: list[str]) -> tuple[HouseholdEpisode, list[str]]:
    episode = HouseholdEpisode(world)
    return episode, [episode.step(action).text for action in actions]


def test_a_whole_episode_word_by_word() -> None:
    episode, observations = play(
        MUG_WORLD,
        [
            "go to cabinet 1",
            "open cabinet 1",
            "take mug from cabinet 1",
            "go to sink 1",
            "clean mug",
            "go to shelf 1",
        ],
    )
    assert observations == [
        "cabinet 1 is closed.",
        "In cabinet 1: mug, pan.",
        "You take mug.",
        "In sink 1: nothing.",
        "You clean mug.",
        "On shelf 1: key.",
    ]
    assert episode.result() == {"won": False, "turns": 6}
    last = episode.step("put mug on shelf 1")
    assert (last.text, last.done, last.result) == ("You put mug on shelf 1.", True, {"won": True, "turns": 7})
    assert verify(MUG_WORLD, "", [], last.result).reward == 1.0


@pytest.mark.parametrize(
    "action",
    [
        "", "open cabinet 1", "take mug from cabinet 1", "put mug on shelf 1", "clean mug", "go to cabinet 2",
        "go to the cabinet 1", "I will go to shelf 1", "go to shelf 1\nopen shelf 1", "look", "go to", "take from",
        "\x00", "go to shelf 1 and take key", "x" * 10_000,
    ],
)  # fmt: skip
def test_what_is_malformed_or_impossible_changes_nothing(action: str) -> None:
    episode, (observation,) = play(MUG_WORLD, [action])
    assert observation == NOTHING_HAPPENS
    fresh = HouseholdEpisode(MUG_WORLD)
    fresh.turns = 1
    assert episode == fresh


def test_case_spaces_and_a_full_stop_do_not_matter() -> None:
    _, observations = play(MUG_WORLD, ["  Go to  Cabinet 1. ", "OPEN cabinet 1"])
    assert observations[1] == "In cabinet 1: mug, pan."


@pytest.mark.parametrize(
    "actions",
    [
        ["take pan from cabinet 1", "go to shelf 1", "put pan on shelf 1"],
        ["take mug from cabinet 1", "go to shelf 1", "put mug on shelf 1"],
        ["take mug from cabinet 1", "take pan from cabinet 1", "clean mug", "put mug in cabinet 1"],
    ],
)
def test_another_object_a_dirty_one_and_another_place_do_not_win(actions: list[str]) -> None:
    episode, _ = play(MUG_WORLD, ["go to cabinet 1", "open cabinet 1", *actions])
    assert episode.result()["won"] is False


def test_a_second_object_is_not_taken_while_one_is_held() -> None:
    _, observations = play(
        MUG_WORLD, ["go to cabinet 1", "open cabinet 1", "take mug from cabinet 1", "take pan from cabinet 1"]
    )
    assert observations[3] == NOTHING_HAPPENS


def test_running_into_a_turn_limit_is_not_success() -> None:
    episode, _ = play(MUG_WORLD, ["go to shelf 1", "go to sink 1"] * 25)
    outcome = verify(MUG_WORLD, "", [], episode.result())
    assert (outcome.success, outcome.reward) == (False, 0.0)
    assert verify(MUG_WORLD, "", [], {}).success is False
    assert verify(MUG_WORLD, "", [], {"won": "yes", "done": True}).success is False


def expert_turns(world: dict[str, Any]) -> int:
    """Turns of an expert that sees the observations alone."""
    episode = HouseholdEpisode(json.loads(json.dumps(world)))
    blind = {**world, "contents": dict.fromkeys(world["contents"])}  # the places, without what is in them
    expert = Expert(blind)
    for turn in range(1, 100):
        action = expert.action()
        observation = episode.step(action)
        if observation.done:
            return turn
        assert observation.text != NOTHING_HAPPENS
        expert.see(action, observation.text)
    return 100


@pytest.mark.parametrize(
    "changes", [{}, {"receptacles": 3, "objects": 1}, {"receptacles": 10, "objects": 8, "max_turns": 20}]
)
def test_the_expert_solves_every_task_within_the_turn_limit(changes: dict[str, Any]) -> None:
    environment = household(**changes)
    turns = [expert_turns(environment.prompt("train", index).payload) for index in range(500)]
    assert max(turns) <= environment.max_turns
    assert min(turns) >= 3


def test_a_random_policy_rarely_succeeds_and_steps_are_fast() -> None:
    environment, draw = household(), random.Random(0)
    worlds = [environment.prompt("train", index).payload for index in range(500)]
    wins, steps, started = 0, 0, time.perf_counter()
    for world in worlds:
        episode = HouseholdEpisode(world)
        for _ in range(environment.max_turns):
            episode.step(draw.choice(episode.possible_actions()))
            steps += 1
        wins += episode.won
    assert wins / 500 < 0.03
    assert steps / (time.perf_counter() - started) > 3000


def test_prompts_follow_the_seed_and_the_test_is_the_same_for_all_seeds() -> None:
    assert household(0).prompt("train", 5) == household(0).prompt("train", 5)
    assert household(0).prompt("train", 5) != household(1).prompt("train", 5)
    assert household(0).prompt("test", 5) == household(1).prompt("test", 5)
    one, other = household(), household()
    assert one.begin(one.prompt("test", 3), seed=1) == other.begin(other.prompt("test", 3), seed=2)


def test_splits_share_no_task() -> None:
    environment = household(receptacles=3, objects=1, size=2000)
    ids = {
        split: {environment.prompt(split, index).prompt_id for index in range(environment.size(split))}
        for split in ("train", "validation", "test")
    }
    assert environment.size("train") + environment.size("validation") + environment.size("test") == 2000
    assert not ids["train"] & ids["validation"]
    assert not ids["train"] & ids["test"]
    assert not ids["validation"] & ids["test"]


def test_the_prompt_does_not_say_where_anything_is() -> None:
    environment = household()
    for index in range(100):
        prompt = environment.prompt("train", index)
        shown = set(re.findall(r"\w+", prompt.messages[0]["content"]))
        hidden = {thing for things in prompt.payload["contents"].values() for thing in things}
        assert shown & hidden == {prompt.payload["object"]}


def test_an_episode_does_not_change_its_prompt() -> None:
    environment = household()
    prompt = environment.prompt("train", 0)
    before = json.dumps(prompt.payload)
    environment.demonstrations(1, noise=0.5, seed=0)
    episode = environment.begin(prompt, 0)
    for action in ("go to sink 1", *episode.possible_actions()):
        episode.step(action)
    assert json.dumps(prompt.payload) == before


def test_demonstrations_alternate_and_win_and_noise_makes_some_fail() -> None:
    environment = household()
    clean = environment.demonstrations(200, noise=0.0, seed=0)
    for demonstration in clean:
        roles = [turn["role"] for turn in demonstration.turns]
        assert roles == (["assistant", "user"] * len(roles))[: len(roles)]
        assert roles[-1] == "assistant"
        episode = environment.begin(demonstration.prompt, 0)
        for action, answer in zip(demonstration.turns[::2], [*demonstration.turns[1::2], None], strict=True):
            observation = episode.step(action["content"])
            assert answer is None or observation.text == answer["content"]
        assert episode.won
    assert environment.demonstrations(50, 0.3, seed=1) == environment.demonstrations(50, 0.3, seed=1)
    won = 0
    for demonstration in environment.demonstrations(200, noise=0.3, seed=1):
        episode = environment.begin(demonstration.prompt, 0)
        for action in demonstration.turns[::2]:
            episode.step(action["content"])
        won += episode.won
        assert len(demonstration.turns) <= 2 * environment.max_turns - 1
    assert 50 <= won <= 160


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"receptacles": 2}, "choose 3 to 15"),
        ({"objects": 13}, "at most 12"),
    ],
)
def test_a_household_that_makes_no_sense_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        household(**changes)


def test_a_turn_limit_that_no_task_fits_is_a_sentence() -> None:
    assert household().validate() == []
    sentences = household(max_turns=2).validate()
    assert len(sentences) == 1
    assert "environment.max_turns=2 is too few" in sentences[0]
