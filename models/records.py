"""The contracts: what a prompt, a rollout, a verdict and a learning signal look like on disk.

Tables are Parquet, typed with pandera on polars, validated when written and when read. A violation names the row,
the column and the fix. Token lists of a signal and `logprobs` hold the *learnable* tokens only (loss_mask 1), in
order, so `len(logprobs) == sum(loss_mask)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "environment", "error"]
Status = Literal["scored", "timeout", "error"]
GroupKind = Literal["all_fail", "mixed", "all_pass"]
Message = dict[str, Any]
"""One chat message: role and content, where content is text or a list of text and image parts."""


@dataclass(frozen=True)
class Prompt:
    """A task for the policy.

    Attributes:
        prompt_id: hex digest of environment, messages and payload: equal content, equal id.
        messages: the chat that the policy sees.
        payload: what the verifier needs (gold answer, world state); JSON, never shown to a policy.
    """

    prompt_id: str
    environment: str
    split: str
    seed: int
    messages: list[Message]
    payload: dict[str, Any]


def placed(images: Sequence[dict[str, Any]], context: int) -> list[tuple[int, str]]:
    """Places of images in a row whose context has so many tokens."""
    return [(context + image["start"], image["digest"]) for image in images]


@dataclass(frozen=True)
class Segment:
    """What a policy saw and what it sampled, once. A growing episode is one segment.

    Attributes:
        context_ids: tokens before the first sampled one.
        sampled_ids: tokens after the context: the policy's, and the environment's observations between them.
        loss_mask: 1 where the policy sampled the token, 0 on observations; same length as sampled_ids.
        logprobs: of the distribution that was sampled from, learnable tokens only.
        transcript: the episode's messages after the prompt, for people and verifiers.
        environment_result: what the environment itself says of the episode (e.g. {"won": true}); empty if nothing.
        images: digest, start and length of each image that the policy saw, in tokens; start counts from the first
            sampled token, so a prompt's images begin below zero. A policy of text has none.
    """

    prompt_id: str
    sample: int
    segment: int
    context_ids: list[int]
    sampled_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    policy_version: str
    sampling_digest: str
    seed: int
    finish_reason: FinishReason
    text: str
    transcript: list[Message]
    environment_result: dict[str, Any]
    images: list[dict[str, Any]]

    @property
    def image_places(self) -> list[tuple[int, str]]:
        """(first token within context and sampled ids, digest) of each image."""
        return placed(self.images, len(self.context_ids))


@dataclass(frozen=True)
class Verdict:
    """What the verifier said of one episode. `success` and `reward` are None unless status is scored."""

    prompt_id: str
    sample: int
    status: Status
    success: bool | None
    reward: float | None
    details: dict[str, Any]
    verifier_version: str
