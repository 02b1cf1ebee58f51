"""Scoring: log-probabilities of sampled tokens under weights that did not sample them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from gleaner.models.methods.grpo import EpisodeSegmentKey
from gleaner.models.signal import Floats
from gleaner.tasks.context import RunContext
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.residents import resident
from gleaner.tasks.sampling import load_rollouts
from gleaner.tasks.starting import start_key
from gleaner.tasks.store import Record

Role = Literal["old", "reference", "teacher", "critic", "experience"]


@dataclass(frozen=True)
class Scores:
    """Digest of the tensors with one log-probability per learnable token, and what scoring cost."""

    role: Role
    tensors: str
    forward_tokens: int
    seconds: float


@phase(gpu=True)
def score(
    context: RunContext, version: str, shards: Sequence[str], role: Role, slot: str = "policy"
) -> Made[Scores]:
    """Score rollouts with the trainer's forward pass: `old` under `version`, `reference` under the start weights."""
    store, temperature = context.store, context.settings.sampling.temperature
    code = code_version("gleaner.models.training")
    scorer = version if role == "old" else start_key(context)
    key = cache_key("scores", code, scorer=scorer, shards=list(shards), temperature=temperature, slot=slot)

    def make() -> Record:
        holder = resident(context, slot)
        holder.bring_to(version)
        segments = load_rollouts(context, shards)
        started = time.perf_counter()
        scored = holder.learner.score(segments, temperature=temperature, reference=role == "reference")
        seconds = time.perf_counter() - started
        flat = torch.from_numpy(np.concatenate([*scored, np.zeros(0)]))
        tokens = sum(len(s.context_ids) + len(s.sampled_ids) for s in segments)
        return Record(
            {"logprobs": store.put_tensors({"logprobs": flat})}, {"tokens": tokens, "seconds": seconds}, code
        )

    record, hit = store.memoise(key, make)
    facts = record.facts
    return Made(Scores(role, record.objects["logprobs"], int(facts["tokens"]), float(facts["seconds"])), hit)


def load_scores(
    context: RunContext, shards: Sequence[str], scores: Scores
) -> dict[EpisodeSegmentKey, Floats]:
    """Log-probabilities of each segment's learnable tokens."""
    flat = context.store.get_tensors(scores.tensors)[0]["logprobs"].numpy()
    segments = load_rollouts(context, shards)
    ends = np.cumsum([sum(segment.loss_mask) for segment in segments])
    parts = np.split(flat, ends[:-1])
    return {(s.prompt_id, s.sample, s.segment): part for s, part in zip(segments, parts, strict=True)}
