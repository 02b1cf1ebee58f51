"""VISTA's teacher: the policy before the update, reading what a rollout's siblings found."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import VistaMethod
from gleaner.models import tables
from gleaner.models.chat import text_only
from gleaner.models.environments.base import HasFindings
from gleaner.models.experience import (
    Decision,
    TeacherRow,
    experience_metrics,
    group_decisions,
    group_findings,
    shuffled,
    teacher_rows,
)
from gleaner.models.methods.grpo import EpisodeSegmentKey
from gleaner.models.methods.vista import Lesson, distilled, vista_signal
from gleaner.models.records import Message
from gleaner.models.signal import Episode, Group
from gleaner.models.statistics import mean_interval
from gleaner.tasks.context import RunContext
from gleaner.tasks.faults import fault_point
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.residents import Resident, resident
from gleaner.tasks.sampling import load_rollouts
from gleaner.tasks.scoring import Scores, load_scores
from gleaner.tasks.signals import Batch, Signal, load_groups, signal_made, signal_record
from gleaner.tasks.store import Record


@dataclass(frozen=True)
class Lessons:
    """Digest of the tensors with the teacher's distributions, what reading cost, and the metrics of what was read."""

    tensors: str
    forward_tokens: int
    seconds: float
    metrics: dict[str, float]

    @property
    def cost(self) -> Scores:
        """As a part of the step's forward tokens."""
        return Scores("experience", self.tensors, self.forward_tokens, self.seconds)


def method_of(context: RunContext) -> VistaMethod:
    method = context.settings.method
    assert isinstance(method, VistaMethod), "experience belongs to method.kind=vista"
    return method


def findings_of(context: RunContext) -> HasFindings:
    environment = context.environment
    assert isinstance(environment, HasFindings), "preflight asks for it"
    return environment


def check_experience(context: RunContext) -> list[str]:
    """What forbids learning from experience, each with its fix."""
    if isinstance(context.environment, HasFindings) and context.environment.max_turns > 1:
        return []
    return [
        f"method=vista needs an environment whose turns find things out, and {context.environment.name} does not say "
        "what its turns found: choose household or visual_search, or give it the methods of HasFindings"
    ]


# ---------------------------------------------------------------------------------------------- the teacher


@phase(gpu=True)
def learn_from_siblings(context: RunContext, version: str, batch: Batch, step: int) -> Made[Lessons]:
    """Distributions of the policy `version`, reading what a rollout's siblings found, at every decision of the
    rollouts that are to be distilled. Nothing is generated: the teacher reads the rollout's own tokens."""
    store, settings, method = context.store, context.settings, method_of(context)
    code = code_version(
        "gleaner.models.training", "gleaner.models.experience", "gleaner.models.methods.vista"
    )
    key = cache_key(
        "lessons",
        code,
        policy=version,
        reading=method.experience,
        distil=method.distil,
        support=[method.support, method.temperature, settings.sampling.temperature],
        shards=list(batch.shards),
        verdicts=[part.table for part in batch.verdicts],
        verification=[settings.verification.on_unscored, settings.verification.keep_at_least],
        environment=context.environment_digest,
    )

    def make() -> Record:
        groups, _ = load_groups(context, batch)
        holder = resident(context)
        holder.bring_to(version)
        found = [group_findings(group, findings_of(context)) for group in groups]
        messages = prompt_messages(context, batch)
        decisions = aligned_decisions(
            context, groups, messages, lambda episode, group: distilled(episode, group, method)
        )
        metrics = experience_metrics(found, decisions, method.experience.duplicate)
        if method.experience.reads == "shuffled":
            decisions = shuffled(decisions)
        rows, too_long = teacher_rows(
            decisions, messages, holder.chat, method.experience, holder.policy.context
        )
        if method.experience.reads == "nothing":
            own = {decision.key: decision.segment for decision in decisions}
            rows = [
                replace(row, context_ids=own[row.key].context_ids, image_places=own[row.key].image_places)
                for row in rows
            ]
        metrics["experience/too_long"] = float(too_long)
        started = time.perf_counter()
        tensors, keys, tokens = _distributions(context, holder, decisions, rows)
        seconds = time.perf_counter() - started
        facts = {"tokens": tokens, "seconds": seconds, "metrics": metrics}
        return Record({"lessons": store.put_tensors(tensors, {"keys": keys})}, facts, code)

    record, hit = store.memoise(key, make)
    facts = record.facts
    made = Lessons(record.objects["lessons"], int(facts["tokens"]), float(facts["seconds"]), facts["metrics"])
    return Made(made, hit)


def prompt_messages(context: RunContext, batch: Batch) -> dict[str, list[Message]]:
    """prompt_id → what the policy was asked. The payload stays behind."""
    return {
        prompt.prompt_id: prompt.messages
        for part in batch.rollouts
        for prompt in context.store.get_rows(tables.PROMPTS, part.prompts)
    }


def aligned_decisions(
    context: RunContext,
    groups: Sequence[Group],
    messages: dict[str, list[Message]],
    wanted: Callable[[Episode, Group], bool],
) -> list[Decision]:
    """The decisions of the wanted rollouts, each with what siblings found."""
    environment = findings_of(context)
    return [
        decision
        for group in groups
        for decision in group_decisions(
            group,
            group_findings(group, environment),
            "\n".join(str(text_only(message)["content"]) for message in messages[group.prompt_id]),
            context.environment.max_turns,
            method_of(context).experience,
            wanted,
        )
    ]


def _distributions(
    context: RunContext, holder: Resident, decisions: Sequence[Decision], rows: Sequence[TeacherRow]
) -> tuple[dict[str, torch.Tensor], list[EpisodeSegmentKey], int]:
    """Tensors over the distilled tokens, the rollouts that they number, and the tokens that ran through the model: the
    policy's likeliest tokens on its own input, then the teacher's probabilities of them on its."""
    method, learner = method_of(context), holder.learner
    segments = {decision.key: decision.segment for decision in decisions}
    taught = list(dict.fromkeys(row.key for row in rows))
    likeliest = dict(
        zip(taught, learner.likeliest([segments[key] for key in taught], method.support), strict=True)
    )
    read = learner.distributions(
        rows,
        [likeliest[row.key][row.tokens] for row in rows],
        temperature=context.settings.sampling.temperature,
        support_temperature=method.temperature,
    )
    width = min((ids.shape[1] for ids in likeliest.values()), default=0)
    counts = [len(row.tokens) for row in rows]
    index = {key: place for place, key in enumerate(taught)}
    tensors = {
        "segments": torch.tensor(np.repeat([index[row.key] for row in rows], counts).astype(np.int64)),
        "tokens": torch.from_numpy(np.concatenate([*(row.tokens for row in rows), np.zeros(0, np.int64)])),
        "ids": torch.from_numpy(
            np.concatenate(
                [*(likeliest[row.key][row.tokens] for row in rows), np.zeros((0, width), np.int64)]
            )
        ),
        "support": torch.from_numpy(np.concatenate([*(part.support for part in read), np.zeros((0, width))])),
        "entropy": torch.from_numpy(np.concatenate([*(part.entropy for part in read), np.zeros(0)])),
        "teacher": torch.from_numpy(np.concatenate([*(part.logprobs for part in read), np.zeros(0)])),
    }
    forward = sum(len(row.context_ids) + len(row.sampled_ids) for row in rows)
    forward += sum(len(segments[key].context_ids) + len(segments[key].sampled_ids) for key in taught)
    return tensors, taught, forward


def load_lessons(context: RunContext, lessons: Lessons) -> dict[EpisodeSegmentKey, Lesson]:
    """What the teacher says of each rollout, token after token."""
    tensors, described = context.store.get_tensors(lessons.tensors)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    found: dict[EpisodeSegmentKey, Lesson] = {}
    for place, (prompt_id, sample, segment) in enumerate(described["keys"]):
        members = np.flatnonzero(arrays["segments"] == place)
        members = members[np.argsort(arrays["tokens"][members], kind="stable")]
        found[(prompt_id, sample, segment)] = Lesson(
            tokens=arrays["tokens"][members],
            support_ids=arrays["ids"][members],
            support_logprobs=arrays["support"][members],
            entropy=arrays["entropy"][members],
            teacher_logprobs=arrays["teacher"][members],
        )
    return found


@phase()
def make_vista_signal(
    context: RunContext,
    batch: Batch,
    step: int,
    lessons: Lessons,
    old: Scores | None,
    reference: Scores | None,
) -> Made[Signal]:
    """GRPO's advantages, with the taught rollouts routed to distillation; and the ledger."""
    settings, store = context.settings, context.store
    code = code_version(
        "gleaner.models.methods.grpo", "gleaner.models.methods.vista", "gleaner.models.signal"
    )
    key = cache_key(
        "signal",
        code,
        method=settings.method,
        verification=[settings.verification.on_unscored, settings.verification.keep_at_least],
        shards=list(batch.shards),
        verdicts=[part.table for part in batch.verdicts],
        scores=[scores.tensors if scores is not None else None for scores in (old, reference)],
        lessons=lessons.tensors,
        minibatches=settings.update.minibatches,
        sampling=[settings.sampling.max_new_tokens, settings.sampling.temperature],
        max_turns=context.environment.max_turns,
    )

    def make() -> Record:
        fault_point("signal", step, "before")
        groups, counts = load_groups(context, batch)
        shard_of = {
            segment.prompt_id: shard for shard in batch.shards for segment in load_rollouts(context, [shard])
        }
        started = time.perf_counter()
        signal, metrics = vista_signal(
            groups,
            method_of(context),
            load_lessons(context, lessons),
            rollouts=shard_of,
            minibatches=settings.update.minibatches,
            max_new_tokens=settings.sampling.max_new_tokens * context.environment.max_turns,
            temperature=settings.sampling.temperature,
            old_logprobs=load_scores(context, batch.shards, old) if old else None,
            reference_logprobs=load_scores(context, batch.shards, reference) if reference else None,
        )
        return signal_record(store, signal, groups, {**metrics, **counts, **lessons.metrics}, started, code)

    return signal_made(*store.memoise(key, make))


@phase(gpu=True)
def check_reading(context: RunContext, version: str, batch: Batch, step: int) -> Made[dict[str, float]]:
    """Whether successful actions are likelier beside what siblings found than beside what was found for another
    prompt: the mean over prompts of the difference in mean log-probability, with its 95 % t interval.

    Raises:
        ConfigurationError: the interval is not above zero, or too few prompts have a success and experience for it.
    """
    groups, _ = load_groups(context, batch)
    holder = resident(context)
    holder.bring_to(version)
    messages = prompt_messages(context, batch)
    own = aligned_decisions(context, groups, messages, lambda episode, _: bool(episode.verdict.success))
    own = [decision for decision in own if decision.entries]

    def mean_logprobs(decisions: Sequence[Decision]) -> dict[str, float]:
        rows, _ = teacher_rows(
            decisions, messages, holder.chat, method_of(context).experience, holder.policy.context
        )
        scored = holder.learner.score(rows, temperature=context.settings.sampling.temperature)
        by_prompt: dict[str, list[float]] = {}
        for row, logprobs in zip(rows, scored, strict=True):
            by_prompt.setdefault(row.key[0], []).extend(logprobs.tolist())
        return {prompt: float(np.mean(logprobs)) for prompt, logprobs in by_prompt.items()}

    true, false = mean_logprobs(own), mean_logprobs(shuffled(own))
    differences = [true[prompt] - false[prompt] for prompt in true if prompt in false]
    if len(differences) < 2:
        raise ConfigurationError(
            f"{len(differences)} prompts of step {step} have a success and experience for it, which does not show "
            "whether the policy can read experience: raise run.prompts_per_step, give it a warm start that succeeds "
            "sometimes, or set method.experience.require_reading=false"
        )
    gain = mean_interval(differences)
    if not gain.low > 0:
        raise ConfigurationError(
            f"the policy does not read experience: successful actions are {gain.estimate:+.4f} likelier (mean "
            f"log-probability) beside what siblings found than beside another prompt's findings, with an interval that "
            f"begins at {gain.low:+.4f} over {len(differences)} prompts. Warm-start it on demonstrations with "
            "experience (warmstart.informed=0.5), raise run.prompts_per_step, or set "
            "method.experience.require_reading=false"
        )
    return Made(
        {"experience/reading_gain": gain.estimate, "experience/reading_gain_low": gain.low}, hit=False
    )
