"""The turn loop: one turn and many, failures, limits, images, seeds."""

import threading
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
import torch

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import SamplingSettings, TinyPolicy
from gleaner.conf.schema import TransformersEngine as Settings
from gleaner.models.chat import Chat
from gleaner.models.engines.transformers import TransformersEngine
from gleaner.models.environments.base import Observation
from gleaner.models.policy import build_policy
from gleaner.models.records import Prompt, Segment
from gleaner.models.rollout import collect, retokenised, rollout_seed
from tests.models.grid import Grid, GridEpisode

CONTEXT = 200
POLICY = build_policy(TinyPolicy(context=CONTEXT), Grid(), 0)
CHAT = Chat(POLICY.tokenizer)
ENGINE = TransformersEngine(Settings(), context_limit=CONTEXT, policy=POLICY, version="v7")


def rollouts(environment: Any, count: int = 3, group: int = 4, **changes: Any) -> list[Segment]:
    arguments: dict[str, Any] = {"run_seed": 0, "step": 0, "context_limit": CONTEXT} | changes
    sampling = arguments.pop("sampling", SamplingSettings(max_new_tokens=6))
    prompts = [environment.prompt("train", index) for index in range(count)]
    return collect(ENGINE, CHAT, environment, prompts, group, sampling, **arguments)


def learnable(segment: Segment) -> list[int]:
    return [i for i, mask in zip(segment.sampled_ids, segment.loss_mask, strict=True) if mask]


def turns_of(segment: Segment) -> list[list[int]]:
    pairs = zip(segment.sampled_ids, segment.loss_mask, strict=True)
    return [[i for i, _ in run] for mask, run in groupby(pairs, key=itemgetter(1)) if mask]


def logprobs_of(segment: Segment) -> list[float]:
    ids = segment.context_ids + segment.sampled_ids
    with torch.no_grad():
        table = POLICY.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    at = len(segment.context_ids)
    return [table[at + t - 1, ids[at + t]].item() for t, mask in enumerate(segment.loss_mask) if mask]


def test_a_single_turn_environment_never_sees_begin() -> None:
    environment = Grid(max_turns=1)
    segments = rollouts(environment)
    assert environment.episodes == []
    assert [(s.prompt_id, s.sample) for s in segments] == [
        (environment.prompt("train", p).prompt_id, g) for p in range(3) for g in range(4)
    ]
    for segment in segments:
        assert segment.loss_mask == [1] * len(segment.sampled_ids)
        assert segment.finish_reason == ("stop" if segment.sampled_ids[-1] in CHAT.stop_ids else "length")
        assert segment.transcript == [{"role": "assistant", "content": segment.text}]
        assert segment.policy_version == "v7"
        assert segment.environment_result == {}


@pytest.mark.parametrize("turns", [1, 4])
def test_logprobs_belong_to_the_sampled_tokens_in_their_full_context(turns: int) -> None:
    for segment in rollouts(Grid(max_turns=turns)):
        assert len(segment.logprobs) == sum(segment.loss_mask)
        assert len(segment.loss_mask) == len(segment.sampled_ids)
        assert segment.logprobs == pytest.approx(logprobs_of(segment), abs=1e-4)


def test_many_turns_are_one_segment_whose_observations_carry_no_loss() -> None:
    environment = Grid(max_turns=3)
    prompts = [environment.prompt("train", index) for index in range(3)]
    contexts = {prompt.prompt_id: CHAT.prompt_ids(prompt.messages) for prompt in prompts}
    for segment in rollouts(environment):
        said = [message["content"] for message in segment.transcript if message["role"] == "assistant"]
        heard = [message["content"] for message in segment.transcript if message["role"] == "user"]
        assert len(said) == len(heard) == 3
        masked = [i for i, mask in zip(segment.sampled_ids, segment.loss_mask, strict=True) if not mask]
        text = POLICY.tokenizer.decode(masked, skip_special_tokens=True)
        assert text == "".join(heard[:-1])
        # Turn by turn: bytes of two turns may join to one character when they are decoded together.
        assert [CHAT.decode(turn) for turn in turns_of(segment)] == said
        assert segment.text == said[-1]
        assert segment.context_ids == contexts[segment.prompt_id]
        assert segment.sampled_ids[-1] == learnable(segment)[-1]


@dataclass
class Obedient(GridEpisode):
    """Counts every action as a step to the right."""

    def step(self, action: str) -> Observation:
        return super().step("go right")


@dataclass
class Walk(Grid):
    kind: type[GridEpisode] = Obedient

    def begin(self, prompt: Prompt, seed: int) -> GridEpisode:
        episode = self.kind(prompt.payload["goal"])
        self.episodes.append(episode)
        return episode


def test_an_episode_ends_when_the_environment_says_so_and_is_closed_once() -> None:
    environment = Walk(max_turns=5)
    segments = rollouts(environment)
    for segment, episode in zip(segments, environment.episodes, strict=True):
        assert segment.finish_reason == "environment"
        assert segment.environment_result == {"won": True, "turns": episode.goal}
        assert segment.transcript[-1] == {"role": "user", "content": "You are at the goal."}
        assert len(segment.transcript) == 2 * episode.goal
        assert episode.closed == 1


def test_reaching_the_turn_limit_is_no_success() -> None:
    environment = Walk(max_turns=2)
    by_goal = {e.goal: s for s, e in zip(rollouts(environment), environment.episodes, strict=True)}
    assert [by_goal[goal].environment_result["won"] for goal in (1, 2, 3)] == [True, True, False]
    assert by_goal[3].finish_reason == "environment"


@dataclass
class Breaks(GridEpisode):
    def step(self, action: str) -> Observation:
        if self.goal == 2:
            raise RuntimeError("the world fell down")
        return super().step(action)

    def close(self) -> None:
        super().close()
        if self.goal == 3:
            raise OSError("stuck")


def test_a_failing_episode_is_an_error_segment_and_harms_nobody() -> None:
    environment = Walk(max_turns=3, kind=Breaks)
    segments = rollouts(environment)
    assert [segment.finish_reason for segment in segments] == ["environment"] * 4 + ["error"] * 4 + [
        "environment"
    ] * 4
    for segment in segments[4:8]:
        assert segment.environment_result == {"error": "RuntimeError: the world fell down"}
        assert len(segment.logprobs) == sum(segment.loss_mask) > 0
    assert segments[8].environment_result["close_error"] == "OSError: stuck"
    assert all(episode.closed == 1 for episode in environment.episodes)
    # The neighbours sampled what they sample without the failures.
    alone = rollouts(Grid(max_turns=3))
    assert [s.sampled_ids for s in segments[:4]] == [s.sampled_ids for s in alone[:4]]


def test_an_episode_that_cannot_begin_is_an_error_segment_without_tokens() -> None:
    @dataclass
    class Absent(Grid):
        def begin(self, prompt: Prompt, seed: int) -> GridEpisode:
            if prompt.payload["goal"] == 1:
                raise ConnectionError("no server")
            return super().begin(prompt, seed)

    segments = rollouts(Absent())
    assert segments[0].finish_reason == "error"
    assert segments[0].environment_result == {"error": "ConnectionError: no server"}
    assert segments[0].sampled_ids == segments[0].logprobs == segments[0].loss_mask == []
    assert segments[4].finish_reason == "environment"


def test_a_full_context_ends_an_episode_with_length() -> None:
    environment = Grid(max_turns=50)
    for segment, episode in zip(rollouts(environment), environment.episodes, strict=True):
        assert segment.finish_reason == "length"
        assert len(segment.context_ids) + len(segment.sampled_ids) <= CONTEXT
        assert segment.environment_result["won"] is False
        assert episode.closed == 1


def test_a_prompt_that_fills_the_context_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"policy\.context"):
        rollouts(Grid(), context_limit=10)


def test_equal_seeds_repeat_and_every_part_of_the_seed_matters() -> None:
    first = [s.sampled_ids for s in rollouts(Grid())]
    assert first == [s.sampled_ids for s in rollouts(Grid())]
    assert first != [s.sampled_ids for s in rollouts(Grid(), step=1)]
    assert first != [s.sampled_ids for s in rollouts(Grid(), run_seed=1)]
    seeds = {
        rollout_seed(run, step, prompt, sample)
        for run in (0, 1)
        for step in (0, 1)
        for prompt in "ab"
        for sample in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    more = rollouts(Grid(max_turns=1), count=1, group=2, first_sample=2)
    assert [s.sample for s in more] == [2, 3]
    # A refill continues the group: the same rollouts as if it had been sampled whole.
    whole = rollouts(Grid(max_turns=1), count=1, group=4)
    assert [s.sampled_ids for s in more] == [s.sampled_ids for s in whole[2:]]


def test_the_digest_of_sampling_ignores_the_size_of_shards() -> None:
    environment = Grid(max_turns=1)
    digests = [
        rollouts(environment, 1, 1, sampling=SamplingSettings(max_new_tokens=4, **changes))[0].sampling_digest
        for changes in ({}, {"rows_per_shard": 7}, {"temperature": 0.5})
    ]
    assert digests[0] == digests[1] != digests[2]


def test_parallel_episodes_are_stepped_from_threads() -> None:
    barrier = threading.Barrier(2, timeout=20)
    threads: set[str] = set()

    @dataclass
    class Meets(GridEpisode):
        def step(self, action: str) -> Observation:
            barrier.wait()
            threads.add(threading.current_thread().name)
            return super().step(action)

    segments = rollouts(Walk(max_turns=2, parallel_episodes=2, kind=Meets), count=1, group=2)
    assert all(name.startswith("episode") for name in threads)
    assert len(threads) == 2
    assert [s.finish_reason for s in segments] == ["environment"] * 2
    serial = rollouts(Walk(max_turns=2, kind=GridEpisode), count=1, group=2)
    assert [s.sampled_ids for s in segments] == [s.sampled_ids for s in serial]


class Shows(GridEpisode):
    def step(self, action: str) -> Observation:
        return Observation("Look.", images=(b"png",))


def test_images_for_a_policy_that_sees_none_are_refused_and_episodes_closed() -> None:
    environment = Walk(max_turns=2, kind=Shows)
    with pytest.raises(ConfigurationError, match="sees none"):
        rollouts(environment, store_image=lambda image: "digest")
    assert all(episode.closed == 1 for episode in environment.episodes)


def test_a_chat_checked_for_one_turn_is_refused_for_many() -> None:
    environment = Grid()
    with pytest.raises(ConfigurationError, match="multi_turn=True"):
        collect(
            ENGINE,
            Chat(POLICY.tokenizer, multi_turn=False),
            environment,
            [environment.prompt("train", 0)],
            2,
            SamplingSettings(),
            run_seed=0,
            step=0,
            context_limit=CONTEXT,
        )


# ------------------------------------------------------------------------------------ in another policy's tokens

OTHER = Chat(build_policy(TinyPolicy(context=CONTEXT, vocabulary=300), Grid(), 0).tokenizer)


@pytest.mark.parametrize("environment", [Grid(max_turns=1), Grid(max_turns=4), Walk(max_turns=4)])
def test_a_rollout_in_another_policys_tokens_says_and_hears_the_same(environment: Grid) -> None:
    prompts = {environment.prompt("train", i).prompt_id: environment.prompt("train", i) for i in range(3)}
    for segment in rollouts(environment):
        prompt = prompts[segment.prompt_id]
        written = retokenised(segment, prompt, OTHER, CHAT.stop_ids)
        assert written is not None
        assert written.context_ids == OTHER.prompt_ids(prompt.messages)
        said = [message["content"] for message in segment.transcript if message["role"] == "assistant"]
        theirs, mine = turns_of(segment), turns_of(written)
        assert [OTHER.decode(turn) for turn in mine] == said
        # An end token belongs to a turn that ended by itself, and to no other: a truncated one stays open.
        assert [turn[-1] == OTHER.end_id for turn in mine] == [turn[-1] in CHAT.stop_ids for turn in theirs]
        heard = [i for i, learn in zip(written.sampled_ids, written.loss_mask, strict=True) if not learn]
        spoken = [message["content"] for message in segment.transcript if message["role"] == "user"]
        assert OTHER.tokenizer.decode(heard, skip_special_tokens=True) == "".join(spoken[: len(said) - 1])
        assert len(written.logprobs) == sum(written.loss_mask)
        mean = sum(segment.logprobs) / len(segment.logprobs)
        assert sum(written.logprobs) / len(written.logprobs) == pytest.approx(mean)


def test_writing_a_rollout_twice_changes_nothing_more() -> None:
    environment = Walk(max_turns=4)
    prompts = {environment.prompt("train", i).prompt_id: environment.prompt("train", i) for i in range(3)}
    for segment in rollouts(environment):
        prompt = prompts[segment.prompt_id]
        once = retokenised(segment, prompt, CHAT, CHAT.stop_ids)
        assert once is not None
        again = retokenised(replace(once, transcript=segment.transcript), prompt, CHAT, CHAT.stop_ids)
        assert again is not None
        assert again.sampled_ids == once.sampled_ids
        assert again.loss_mask == once.loss_mask


def test_what_was_never_sampled_or_was_rewritten_cannot_be_taken_over() -> None:
    environment = Grid(max_turns=1)
    segment, prompt = rollouts(environment)[0], environment.prompt("train", 0)
    assert retokenised(replace(segment, segment=1), prompt, OTHER, CHAT.stop_ids) is None
    silent = replace(segment, sampled_ids=[], loss_mask=[], logprobs=[], transcript=[])
    assert retokenised(silent, prompt, OTHER, CHAT.stop_ids) is None
