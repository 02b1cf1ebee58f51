"""The rollout bank: every rollout of every run, read through the journals. For people and for export."""

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gleaner.conf.errors import ConfigurationError
from gleaner.models.records import Prompt, Segment, Verdict
from gleaner.models.tables import PROMPTS, ROLLOUTS, VERDICTS
from gleaner.tasks import journal
from gleaner.tasks.journal import Journal
from gleaner.tasks.store import ObjectStore


@dataclass(frozen=True)
class RunSummary:
    """One line of `gleaner bank ls`. `success_share` is successes over scored; None if nothing was scored."""

    run: str
    steps: int
    rollouts: int
    scored: int
    successes: int
    success_share: float | None
    started: str


@dataclass(frozen=True)
class GroupSummary:
    prompt_id: str
    rollouts: int
    scored: int
    successes: int


@dataclass(frozen=True)
class Member:
    """One episode: its segments in order, and its verdict (None if it was never verified)."""

    sample: int
    segments: list[Segment]
    verdict: Verdict | None


@dataclass(frozen=True)
class Group:
    run: str
    step: int
    prompt: Prompt
    members: list[Member]


def counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """What a journal entry's `counts` holds, so that `runs` needs no table: rollouts, scored, successes."""
    return {
        "rollouts": len(verdicts),
        "scored": sum(v.status == "scored" for v in verdicts),
        "successes": sum(bool(v.success) for v in verdicts),
    }


def runs(store: ObjectStore) -> list[RunSummary]:
    """Every run in the store, by name. Entries without `counts` have their verdicts read."""
    return [_summary(store, run) for run in journal.runs(store)]


def groups(store: ObjectStore, run: str, step: int) -> list[GroupSummary]:
    """The groups of a step, in the order of their prompts.

    Raises:
        ConfigurationError: no such run or step.
    """
    episodes = _episodes(store, _entry(store, run, step))
    verdicts = {
        prompt_id: [m.verdict for m in members if m.verdict] for prompt_id, (_, members) in episodes.items()
    }
    return [
        GroupSummary(
            prompt_id,
            len(members),
            counts(verdicts[prompt_id])["scored"],
            counts(verdicts[prompt_id])["successes"],
        )
        for prompt_id, (_, members) in episodes.items()
    ]


def group(store: ObjectStore, run: str, step: int, prompt_id: str) -> Group:
    """All rollouts of one prompt in one step, with their verdicts.

    Args:
        prompt_id: the whole id, or a prefix that only one prompt of the step has.

    Raises:
        ConfigurationError: no such run, step or prompt, or an ambiguous prefix.
    """
    episodes = _episodes(store, _entry(store, run, step))
    found = [name for name in episodes if name.startswith(prompt_id)]
    if len(found) != 1:
        known = ", ".join(name[:12] for name in episodes)
        raise ConfigurationError(
            f"{len(found)} prompts of step {step} of run {run} start with {prompt_id!r}: give enough of one of these "
            f"ids: {known}"
        )
    prompt, members = episodes[found[0]]
    return Group(run, step, prompt, members)


def all_groups(store: ObjectStore, run: str, step: int) -> dict[str, Group]:
    """Every group of a step by prompt_id, with its verdicts.

    Raises:
        ConfigurationError: no such run or step.
    """
    episodes = _episodes(store, _entry(store, run, step))
    return {prompt_id: Group(run, step, prompt, members) for prompt_id, (prompt, members) in episodes.items()}


def export(store: ObjectStore, run: str, path: Path, *, include_answers: bool = False) -> int:
    """Write a run's rollouts as JSONL, one episode a line, with its prompt and verdict. The file appears whole.

    Without `include_answers` nothing that a verifier knows is written: no payload, no verdict details, no
    environment result. What is written is what the policy saw and did, and its reward.

    Returns:
        The number of lines.

    Raises:
        ConfigurationError: no such run.
    """
    history = _journal(store, run)
    lines = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for step, entry in history.entries():
                for prompt, members in _episodes(store, entry).values():
                    for member in members:
                        line = _line(run, step, prompt, member, include_answers)
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                        lines += 1
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return lines


def _line(run: str, step: int, prompt: Prompt, member: Member, include_answers: bool) -> dict[str, Any]:
    first, last = member.segments[0], member.segments[-1]
    line: dict[str, Any] = {
        "run": run,
        "step": step,
        "environment": prompt.environment,
        "split": prompt.split,
        "prompt_id": prompt.prompt_id,
        "sample": member.sample,
        "messages": prompt.messages,
        "transcript": last.transcript,
        "text": [segment.text for segment in member.segments],
        "sampled_tokens": sum(sum(segment.loss_mask) for segment in member.segments),
        "finish_reason": last.finish_reason,
        "policy_version": first.policy_version,
        "seed": first.seed,
        "verdict": None,
    }
    if member.verdict is not None:
        line["verdict"] = asdict(member.verdict)
        for name in ("prompt_id", "sample") + (() if include_answers else ("details",)):
            del line["verdict"][name]
    if include_answers:
        line |= {"payload": prompt.payload, "environment_result": last.environment_result}
    return line


def _summary(store: ObjectStore, run: str) -> RunSummary:
    history = Journal(store, run)
    totals = {"rollouts": 0, "scored": 0, "successes": 0}
    steps = 0
    for _, entry in history.entries():
        steps += 1
        found = entry.get("counts") or counts(_verdicts(store, entry))
        for name in totals:
            totals[name] += found[name]
    share = totals["successes"] / totals["scored"] if totals["scored"] else None
    try:
        started = history.stored_header()["started"]
    except FileNotFoundError:
        started = ""
    return RunSummary(run=run, steps=steps, success_share=share, started=started, **totals)


def _verdicts(store: ObjectStore, entry: dict[str, Any]) -> list[Verdict]:
    return [verdict for ref in entry.get("verdicts", []) for verdict in store.get_rows(VERDICTS, ref)]


def _episodes(store: ObjectStore, entry: dict[str, Any]) -> dict[str, tuple[Prompt, list[Member]]]:
    """prompt_id → its prompt and its episodes by sample."""
    prompts = [prompt for ref in entry.get("prompts", []) for prompt in store.get_rows(PROMPTS, ref)]
    verdicts = {(v.prompt_id, v.sample): v for v in _verdicts(store, entry)}
    segments: dict[str, dict[int, list[Segment]]] = {}
    for ref in entry.get("rollouts", []):
        for segment in store.get_rows(ROLLOUTS, ref):
            segments.setdefault(segment.prompt_id, {}).setdefault(segment.sample, []).append(segment)
    return {
        prompt.prompt_id: (prompt, list(_members(segments[prompt.prompt_id], prompt.prompt_id, verdicts)))
        for prompt in prompts
        if prompt.prompt_id in segments
    }


def _members(
    samples: dict[int, list[Segment]], prompt_id: str, verdicts: dict[tuple[str, int], Verdict]
) -> Iterator[Member]:
    for sample in sorted(samples):
        ordered = sorted(samples[sample], key=lambda segment: segment.segment)
        yield Member(sample, ordered, verdicts.get((prompt_id, sample)))


def _journal(store: ObjectStore, run: str) -> Journal:
    if run not in journal.runs(store):
        known = ", ".join(journal.runs(store)[:20]) or "none"
        raise ConfigurationError(f"{store.files.where} has no run {run}: name one of its runs ({known})")
    return Journal(store, run)


def _entry(store: ObjectStore, run: str, step: int) -> dict[str, Any]:
    history = _journal(store, run)
    try:
        return history.read(step)
    except FileNotFoundError:
        steps = history.steps()
        known = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise ConfigurationError(f"run {run} has no step {step}: its steps are {known}") from None
