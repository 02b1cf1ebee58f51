"""Teachers: a finished run's policy with its training record, or a folder with a success rate set by hand."""

import functools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import (
    GatsMethod,
    GraftMethod,
    PretrainedPolicy,
    TeacherSettings,
    TransformersEngine,
)
from gleaner.models.engines import make_engine
from gleaner.models.engines.base import Engine
from gleaner.models.methods.gats import Guidance, Progress, guidance, mean_success
from gleaner.models.policy import (
    load_policy,
    load_pretrained,
    load_tokenizer,
    tokenizer_digest,
)
from gleaner.tasks import journal
from gleaner.tasks.context import RunContext
from gleaner.tasks.journal import Journal
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.publishing import policy_key, run_key
from gleaner.tasks.residents import frozen_engine
from gleaner.tasks.sampling import load_rollouts
from gleaner.tasks.scoring import Scores
from gleaner.tasks.store import Record
from gleaner.tasks.tokenizers import tokenizer_of


@dataclass(frozen=True)
class Teacher:
    """A frozen policy that scores the student's tokens.

    Attributes:
        name: key of the published policy, or the path: what its scores depend on.
        success: M_T.
        episodes: training episodes that M_T is a mean over; 0 where it was set by hand.
        objects: files in the store; empty for a path.
    """

    name: str
    success: float
    episodes: int
    tokenizer: str
    objects: tuple[tuple[str, str], ...] = ()


def teacher_settings(context: RunContext) -> TeacherSettings | None:
    """The method's teacher; None for a method that has none."""
    method = context.settings.method
    return method.teacher if isinstance(method, GatsMethod | GraftMethod) else None


@functools.lru_cache(maxsize=16)
def find_teacher(context: RunContext) -> Teacher:
    """The teacher that the settings name, and M_T.

    Raises:
        ConfigurationError: no such run, one that is not finished or was never successful, or one whose training record
            says nothing of this run's prompts.
    """
    settings = teacher_settings(context)
    assert settings is not None, "asked for the teacher of a method that has none"
    if settings.path is not None:
        assert settings.success is not None, "the schema asks for it"
        tokenizer = tokenizer_digest(load_tokenizer(PretrainedPolicy(path=settings.path)))
        return Teacher(settings.path, settings.success, 0, tokenizer)
    assert settings.run is not None, "the schema asks for a run or a path"
    record = published_policy(context, settings.run)
    trained: dict[str, Any] = record.facts["training"]
    success, episodes = settings.success, 0
    if success is None:
        _require_same_task(context, settings.run, trained)
        success, episodes = _training_success(settings.run, trained["steps"], settings.window)
    name = policy_key(record.facts["version"])
    return Teacher(name, success, episodes, trained["tokenizer"], tuple(sorted(record.objects.items())))


def published_policy(context: RunContext, run: str) -> Record:
    """The record of a finished run's published policy.

    Raises:
        ConfigurationError: no such run, or it is not finished.
    """
    store = context.store
    record = store.lookup(run_key(run, len(Journal(store, run).steps())))
    if record is None:
        known = ", ".join(journal.runs(store)[:20]) or "none"
        raise ConfigurationError(
            f"run {run} has not ended with a policy in {store.files.where}: let it finish, or name another of its runs "
            f"({known})"
        )
    return record


def check_teacher(context: RunContext) -> list[str]:
    """What forbids training with this teacher, each with its fix."""
    try:
        teacher = find_teacher(context)
        horizon_of(context)
    except ConfigurationError as error:
        return [str(error)]
    student = tokenizer_of(context, context.settings.policy)
    if tokenizer_digest(student) != teacher.tokenizer:
        return [
            "the teacher's tokenizer is not the policy's, so it speaks of other tokens: choose a teacher "
            "of the same family (for a tiny policy: trained with the same policy.vocabulary on the same environment)"
        ]
    return []


@functools.lru_cache(maxsize=16)
def horizon_of(context: RunContext) -> int | None:
    """N of a timed schedule: set, or the step at which the matched run withdrew its teacher.

    Raises:
        ConfigurationError: the matched run is not there, or has no step.
    """
    settings = teacher_settings(context)
    if settings is None or settings.matched_run is None:
        return settings.horizon if settings else None
    runs = journal.runs(context.store)
    last = Journal(context.store, settings.matched_run).last() if settings.matched_run in runs else None
    if last is None:
        raise ConfigurationError(
            f"method.teacher.matched_run={settings.matched_run} has no step in {context.store.files.where}: run it "
            "first"
        )
    step, entry = last
    withdrawn_at: int | None = entry["method_state"].get("teacher", {}).get("withdrawn_at")
    return step + 1 if withdrawn_at is None else withdrawn_at


def guidance_at(context: RunContext, step: int, before: Progress) -> Guidance:
    """The teacher's weight in a step."""
    settings = teacher_settings(context)
    assert settings is not None, "asked for the guidance of a method that has no teacher"
    teacher = find_teacher(context)
    decided = guidance(settings, step, before, teacher.success, horizon_of(context))
    return replace(decided, teacher_episodes=teacher.episodes)


@phase(gpu=True)
def score_with_teacher(context: RunContext, shards: Sequence[str]) -> Made[Scores]:
    """Log-probabilities that the teacher gives to the student's tokens: one forward pass, nothing is generated."""
    store, temperature = context.store, context.settings.sampling.temperature
    teacher = find_teacher(context)
    code = code_version("gleaner.models.engines")
    key = cache_key("scores", code, scorer=teacher.name, shards=list(shards), temperature=temperature)

    def make() -> Record:
        engine = frozen_engine(teacher.name, lambda: _teacher_engine(context, teacher))
        segments = load_rollouts(context, shards)
        started = time.perf_counter()
        scored = engine.score(
            [segment.context_ids for segment in segments],
            [segment.sampled_ids for segment in segments],
            temperature=temperature,
        )
        learnable = [
            np.asarray(part.logprobs, dtype=np.float64)[np.asarray(segment.loss_mask) == 1]
            for segment, part in zip(segments, scored, strict=True)
            if segment.sampled_ids
        ]
        seconds = time.perf_counter() - started
        flat = torch.from_numpy(np.concatenate([*learnable, np.zeros(0)]))
        tokens = sum(len(segment.context_ids) + len(segment.sampled_ids) for segment in segments)
        return Record(
            {"logprobs": store.put_tensors({"logprobs": flat})}, {"tokens": tokens, "seconds": seconds}, code
        )

    record, hit = store.memoise(key, make)
    facts = record.facts
    return Made(
        Scores("teacher", record.objects["logprobs"], int(facts["tokens"]), float(facts["seconds"])), hit
    )


def _teacher_engine(context: RunContext, teacher: Teacher) -> Engine:
    settings = context.settings
    if teacher.objects:
        with tempfile.TemporaryDirectory() as scratch:
            context.store.fetch_folder(dict(teacher.objects), Path(scratch))
            policy = load_policy(Path(scratch), context=settings.policy.context)
    else:
        policy = load_pretrained(PretrainedPolicy(path=teacher.name, context=settings.policy.context))
    if torch.cuda.is_available():
        policy.model.to("cuda")  # type: ignore[arg-type]
    engine = TransformersEngine(tokens_per_forward=settings.update.tokens_per_microbatch)
    return make_engine(engine, context_limit=policy.context, policy=policy, version=teacher.name)


def _training_success(run: str, steps: Sequence[Sequence[int]], window: int) -> tuple[float, int]:
    """M_T and the episodes that it is a mean over, from (successes, scored episodes) of a run's steps."""
    recent = steps[-window:]
    if not recent:
        raise ConfigurationError(
            f"method.teacher.run={run} has no training step, so it has no training success: train it (gleaner run "
            "grpo), or "
            "set method.teacher.success by hand"
        )
    success = mean_success([successes / max(1, scored) for successes, scored in recent], window)
    if success <= 0:
        raise ConfigurationError(
            f"method.teacher.run={run} never succeeded in its last {len(recent)} steps, so there is no gap to close: "
            "train it "
            "longer, or choose another teacher"
        )
    return success, sum(scored for _, scored in recent)


def _require_same_task(context: RunContext, run: str, trained: dict[str, Any]) -> None:
    settings = context.settings
    now = {
        "environment": settings.environment.model_dump(mode="json"),
        "temperature": settings.sampling.temperature,
    }
    before = {name: trained[name] for name in now}
    if before != now:
        differing = [name for name in now if before[name] != now[name]]
        if "environment" in differing and isinstance(before["environment"], dict):
            theirs, ours = before["environment"], settings.environment.model_dump(mode="json")
            differing += [
                f"environment.{name}: {theirs.get(name)}, now {ours.get(name)}"
                for name in sorted(theirs.keys() | ours.keys())
                if theirs.get(name) != ours.get(name)
            ]
        raise ConfigurationError(
            f"method.teacher.run={run} was trained with another {'; '.join(differing)}: its success rate says "
            "nothing of "
            "these prompts. Train one on this environment at this temperature, or set method.teacher.success by hand"
        )
