"""Signals: what a method makes of verified groups, stored so that it can be applied again."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gleaner.models.methods.gats import Guidance, with_guidance
from gleaner.models.methods.grpo import grpo_signal, informative
from gleaner.models.records import Verdict
from gleaner.models.signal import Group, LearningSignal, audit, group_rollouts
from gleaner.tasks.context import RunContext
from gleaner.tasks.faults import fault_point
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.sampling import Rollouts, load_rollouts
from gleaner.tasks.scoring import Scores, load_scores
from gleaner.tasks.store import ObjectStore, Record
from gleaner.tasks.stored_signals import store_signal
from gleaner.tasks.verification import Verdicts, load_verdicts


@dataclass(frozen=True)
class Batch:
    """The verified rollouts that a signal is made of: one pair of rollouts and verdicts for each round of sampling."""

    rollouts: tuple[Rollouts, ...]
    verdicts: tuple[Verdicts, ...]

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(shard for rollouts in self.rollouts for shard in rollouts.shards)


@dataclass(frozen=True)
class Signal:
    """Digest of a stored signal, its metrics, its ledger's entries, and the seconds that its maths took."""

    ref: str
    metrics: dict[str, float]
    ledger: tuple[dict[str, Any], ...]
    seconds: float


def load_groups(context: RunContext, batch: Batch) -> tuple[list[Group], dict[str, float]]:
    """The batch's scored groups under the settings' group policy, and the counts of what it left out."""
    segments = load_rollouts(context, batch.shards)
    verdicts: list[Verdict] = [v for part in batch.verdicts for v in load_verdicts(context, part)]
    verification = context.settings.verification
    return group_rollouts(segments, verdicts, verification.on_unscored, verification.keep_at_least)


def informative_groups(context: RunContext, batch: Batch) -> int:
    """Groups of the batch in which the verifier saw both success and failure."""
    return sum(informative(group) for group in load_groups(context, batch)[0])


@dataclass(frozen=True)
class Taught:
    """What a teacher says of a batch, and how much it counts (GATS)."""

    guidance: Guidance
    scores: Scores | None


def signal_record(
    store: ObjectStore,
    signal: LearningSignal,
    groups: Sequence[Group],
    metrics: dict[str, float],
    started: float,
    code: str,
) -> Record:
    """Store a signal; its record has the metrics, the ledger of `groups`, and the seconds since `started`."""
    ledger = audit(signal, groups)
    facts = {
        "metrics": {**metrics, **ledger.metrics},
        "ledger": [asdict(entry) for entry in ledger.entries],
        "seconds": time.perf_counter() - started,
    }
    return Record({"signal": store_signal(store, signal)}, facts, code)


def signal_made(record: Record, hit: bool) -> Made[Signal]:
    """What a phase that makes a signal returns."""
    facts = record.facts
    made = Signal(record.objects["signal"], facts["metrics"], tuple(facts["ledger"]), facts["seconds"])
    return Made(made, hit)


@phase()
def make_signal(
    context: RunContext,
    batch: Batch,
    step: int,
    old: Scores | None,
    reference: Scores | None,
    taught: Taught | None = None,
) -> Made[Signal]:
    """Advantages within groups, a teacher's part if there is one, folded with the method's averaging into
    coefficients; and the ledger."""
    settings, store = context.settings, context.store
    code = code_version("gleaner.models.methods.grpo", "gleaner.models.methods.gats", "gleaner.models.signal")
    key = cache_key(
        "signal",
        code,
        method=settings.method,
        verification=[settings.verification.on_unscored, settings.verification.keep_at_least],
        shards=list(batch.shards),
        verdicts=[part.table for part in batch.verdicts],
        scores=[scores.tensors if scores is not None else None for scores in (old, reference)],
        taught=[taught.guidance.metrics, taught.scores.tensors if taught.scores else None]
        if taught
        else None,
        minibatches=settings.update.minibatches,
        prompts_per_step=settings.run.prompts_per_step,
        sampling=[settings.sampling.max_new_tokens, settings.sampling.temperature],
        max_turns=context.environment.max_turns,
    )

    def make() -> Record:
        fault_point("signal", step, "before")
        sampled, counts = load_groups(context, batch)
        groups = sampled
        if settings.method.dynamic_sampling is not None:
            groups = [group for group in sampled if informative(group)][: settings.run.prompts_per_step]
        shard_of = {
            segment.prompt_id: shard for shard in batch.shards for segment in load_rollouts(context, [shard])
        }
        started = time.perf_counter()
        signal, metrics = grpo_signal(
            groups,
            settings.method,
            rollouts=shard_of,
            minibatches=settings.update.minibatches,
            max_new_tokens=settings.sampling.max_new_tokens * context.environment.max_turns,
            temperature=settings.sampling.temperature,
            old_logprobs=load_scores(context, batch.shards, old) if old else None,
            reference_logprobs=load_scores(context, batch.shards, reference) if reference else None,
        )
        if taught is not None:
            teacher = load_scores(context, batch.shards, taught.scores) if taught.scores else {}
            signal, guided = with_guidance(signal, teacher, taught.guidance.weight)
            metrics |= taught.guidance.metrics | guided
        return signal_record(store, signal, sampled, {**metrics, **counts}, started, code)

    return signal_made(*store.memoise(key, make))
