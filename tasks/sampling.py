"""Sampling: prompts drawn for a step, rollouts made in shards that survive a crash."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gleaner.conf.schema import SamplingSettings, Split
from gleaner.models import tables
from gleaner.models.records import Prompt, Segment
from gleaner.models.rollout import collect
from gleaner.tasks.context import RunContext
from gleaner.tasks.faults import fault_point
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.residents import library_versions, resident
from gleaner.tasks.store import Record

Purpose = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Rollouts:
    """What a sampling phase made.

    Attributes:
        shards: digests of the Rollouts tables, in the order of the prompts.
        prompts: digest of the Prompts table.
        rollouts, tokens: episodes and tokens that the policy sampled.
        attempted_rollouts, attempted_tokens: the same, shards counted as often as they were begun: a killed shard has
            spent its budget.
        seconds: time that sampling took when it was made.
        metrics: lengths, truncation and turns.
    """

    shards: tuple[str, ...]
    prompts: str
    rollouts: int
    tokens: int
    attempted_rollouts: int
    attempted_tokens: int
    seconds: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Drawn:
    """Training prompts of one draw: digest of their table, how many, and where the next draw starts."""

    prompts: str
    count: int
    cursor: int


def draw_prompts(context: RunContext, cursor: int, count: int, drawn: Sequence[Drawn] = ()) -> Drawn:
    """Draw prompts from the run's endless order (one permutation an epoch), starting at `cursor`.

    A step holds a prompt once, so what earlier draws of the step (`drawn`) or the end of an epoch repeat is passed
    over, and a training split of fewer prompts than asked for gives all it has.
    """
    environment, seed = context.environment, context.settings.run.seed
    size = environment.size("train")
    seen = {
        prompt.prompt_id for part in drawn for prompt in context.store.get_rows(tables.PROMPTS, part.prompts)
    }
    count = min(count, size - len(seen))
    rows: list[Prompt] = []
    while len(rows) < count:
        prompt = environment.prompt("train", int(_permutation(seed, cursor // size, size)[cursor % size]))
        cursor += 1
        if prompt.prompt_id not in seen:
            seen.add(prompt.prompt_id)
            rows.append(prompt)
    return Drawn(context.store.put_rows(tables.PROMPTS, rows), len(rows), cursor)


def first_prompts(context: RunContext, split: Split, count: int) -> str:
    """Store the first `count` different prompts of an evaluation split (fewer if it has no more); returns the table's
    digest."""
    environment = context.environment
    rows: dict[str, Prompt] = {}
    for index in range(environment.size(split)):
        if len(rows) == count:
            break
        prompt = environment.prompt(split, index)
        rows.setdefault(prompt.prompt_id, prompt)
    return context.store.put_rows(tables.PROMPTS, list(rows.values()))


@phase(gpu=True)
def sample(
    context: RunContext, version: str, prompts: str, purpose: Purpose, step: int, samples: int
) -> Made[Rollouts]:
    """Sample a group of rollouts for each prompt with the policy `version`, shard by shard.

    A shard's key names everything that its tokens depend on, so it is sampled once, by whichever process comes first,
    and again, identically, if that one died.

    Args:
        prompts: digest of a Prompts table.
        step: of the run; evaluations pass 0, and so share their rollouts' seeds.
        samples: rollouts of each prompt.
    """
    settings, store = context.settings, context.store
    sampling = sampling_settings(context, purpose)
    rows = store.get_rows(tables.PROMPTS, prompts)
    prompts_per_shard = max(1, sampling.rows_per_shard // samples)
    code = code_version("gleaner.models.engines", "gleaner.models.rollout", "gleaner.models.chat")
    records: list[Record] = []
    attempts: list[int] = []
    hits = 0
    for shard, first in enumerate(range(0, len(rows), prompts_per_shard)):
        members = rows[first : first + prompts_per_shard]
        key = cache_key(
            "rollouts",
            code,
            policy=version,
            engine=settings.engine,
            libraries=library_versions(settings.engine.kind),
            environment=context.environment_digest,
            max_turns=context.environment.max_turns,
            prompts=[prompt.prompt_id for prompt in members],
            samples=samples,
            sampling=sampling,
            purpose=purpose,
            seed=settings.run.seed,
            step=step,
        )
        if purpose == "train":
            fault_point("sample", step, f"before_shard_{shard}")
        make = functools.partial(
            _make_shard, context, version, members, sampling, purpose, step, samples, shard, code
        )
        record, hit = store.memoise(key, make)
        records.append(record)
        attempts.append(max(1, store.attempts(key)))
        hits += hit
    segments = [s for record in records for s in store.get_rows(tables.ROLLOUTS, record.objects["rollouts"])]
    rollouts = [int(record.facts["rollouts"]) for record in records]
    tokens = [int(record.facts["tokens"]) for record in records]
    made = Rollouts(
        shards=tuple(record.objects["rollouts"] for record in records),
        prompts=prompts,
        rollouts=sum(rollouts),
        tokens=sum(tokens),
        attempted_rollouts=sum(n * times for n, times in zip(rollouts, attempts, strict=True)),
        attempted_tokens=sum(n * times for n, times in zip(tokens, attempts, strict=True)),
        seconds=sum(float(record.facts["seconds"]) for record in records),
        metrics=_lengths(segments),
    )
    return Made(made, hits == len(records))


def sampling_settings(context: RunContext, purpose: Purpose) -> SamplingSettings:
    """Training's own settings, or evaluation's temperature and nucleus on top of them."""
    if purpose == "train":
        return context.settings.sampling
    evaluation = context.settings.evaluation
    return context.settings.sampling.model_copy(
        update={"temperature": evaluation.temperature, "top_p": evaluation.top_p, "top_k": evaluation.top_k}
    )


def load_rollouts(context: RunContext, shards: Sequence[str]) -> list[Segment]:
    return [segment for shard in shards for segment in context.store.get_rows(tables.ROLLOUTS, shard)]


def _make_shard(
    context: RunContext,
    version: str,
    prompts: list[Prompt],
    sampling: SamplingSettings,
    purpose: Purpose,
    step: int,
    samples: int,
    shard: int,
    code: str,
) -> Record:
    started = time.perf_counter()  # handing the weights over, and the canary, belong to sampling
    holder = resident(context)
    engine = holder.engine_at(version)
    segments = collect(
        engine,
        holder.chat,
        context.environment,
        prompts,
        samples,
        sampling,
        run_seed=context.settings.run.seed,
        step=step,
        context_limit=holder.policy.context,
        store_image=context.store.put_bytes,
    )
    seconds = time.perf_counter() - started
    if purpose == "train":
        fault_point("sample", step, f"shard_{shard}_sampled")
    facts = {
        "rollouts": len({(s.prompt_id, s.sample) for s in segments}),
        "tokens": sum(sum(s.loss_mask) for s in segments),
        "seconds": seconds,
    }
    return Record({"rollouts": context.store.put_rows(tables.ROLLOUTS, segments)}, facts, code)


def _lengths(segments: Sequence[Segment]) -> dict[str, Any]:
    lengths = np.array([sum(segment.loss_mask) for segment in segments])
    finished = [segment.finish_reason for segment in segments]
    return {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated": finished.count("length") / len(finished),
        "rollout/errors": finished.count("error") / len(finished),
    }


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)
