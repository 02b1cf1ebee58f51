"""One protocol for whatever samples tokens and scores them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from gleaner.conf.schema import SamplingSettings
from gleaner.models.vision import ImagePlace


@dataclass(frozen=True)
class Turn:
    """A request for one turn of one rollout.

    Attributes:
        row: the rollout's index in its session. From one turn to the next the context of a row only grows.
        context_ids: everything before the turn, as token ids: never decoded and encoded again.
        images: where images stand in it, for a policy that sees.
        seed: seed of this turn's tokens: the same (weights, shard, seed) gives the same tokens.
    """

    row: int
    context_ids: Sequence[int]
    seed: int
    images: Sequence[ImagePlace] = ()


@dataclass(frozen=True)
class Completion:
    """Sampled ids (the stop token included, if it came) and log-probabilities of the sampling distribution."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of `ids`, and where asked for, per token the support's ids and log-probabilities (K each)."""

    logprobs: list[float]
    support_ids: list[list[int]] | None = None
    support_logprobs: list[list[float]] | None = None


class Session(Protocol):
    """A batch of rollouts in progress; keeps what may be reused between turns (key-value caches)."""

    def sample(self, turns: Sequence[Turn]) -> list[Completion]:
        """One turn for each request, in order. Rows that are left out have finished or wait."""
        ...


class Engine(Protocol):
    version: str | None
    """Version of the weights in use."""

    @property
    def exact(self) -> bool:
        """The sampler's log-probabilities equal the trainer's to float tolerance: no second forward is needed."""
        ...

    def load(self, folder: Path, version: str) -> None:
        """Take the weights of an exported policy folder, drop every cached prefix, and check the canary.

        Raises:
            StaleWeightsError: a fixed sequence scores differently under the new weights than the folder's own model.
        """
        ...

    def session(self, sampling: SamplingSettings) -> AbstractContextManager[Session]:
        """Start a batch of rollouts. The shared context of a group is prefilled once."""
        ...

    def score(
        self,
        context_ids: Sequence[Sequence[int]],
        ids: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        support: int = 0,
    ) -> list[Scored]:
        """Log-probabilities of given tokens at `temperature`; with `support` K also the K likeliest at each place."""
        ...
