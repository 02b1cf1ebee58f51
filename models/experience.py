"""What the attempts at one task found out, chosen for each decision of another attempt (VISTA, arXiv 2609.38086).

Only the paper's abstract is public: observations of same-input rollouts become shared supervision, organised with
their interaction context and aligned with individual decisions. How an observation is told, ranked and worded here is
this project's choice (methods.md 5).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gleaner.conf.errors import ContractError
from gleaner.conf.schema import ExperienceSettings
from gleaner.models.chat import Chat, text_only
from gleaner.models.environments.base import Finding, HasFindings
from gleaner.models.methods.grpo import EpisodeSegmentKey
from gleaner.models.records import Message, Segment
from gleaner.models.regions import overlap
from gleaner.models.signal import Episode, Group, Ints
from gleaner.models.vision import ImagePlace

HEADING = "What other attempts at this task found:"
CLOSING = "Your attempt:"
WORD = re.compile(r"\w+")


# ------------------------------------------------------------------------------------------------- alignment


@dataclass(frozen=True)
class Experience:
    """A finding, with whose it was and how that attempt ended."""

    sample: int
    finding: Finding
    success: bool


@dataclass(frozen=True)
class Aligned:
    """An entry of a decision's context.

    Attributes:
        score: of its relevance and novelty for the decision.
        count: findings of other attempts that it stands for, itself among them.
    """

    experience: Experience
    score: float
    count: int = 1


def words(text: str) -> frozenset[str]:
    return frozenset(WORD.findall(text.lower()))


def relevance(experience: Experience, wanted: frozenset[str]) -> float:
    """Share of the wanted words that the finding's rationale and answer have, in [0, 1]."""
    finding = experience.finding
    return len(wanted & words(f"{finding.rationale} {finding.text}")) / len(wanted) if wanted else 0.0


def align(
    pool: Sequence[Experience],
    sample: int,
    turn: int,
    own: Sequence[Finding],
    question: str,
    last_rationale: str,
    turns: int,
    settings: ExperienceSettings,
) -> tuple[Aligned, ...]:
    """The entries for one decision, best first.

        score = w1 [the attempt succeeded] + w2 relevance + w3 novelty - w4 |its turn - this turn| / turns

    Relevance is to the question's words and those of the attempt's own last turn; novelty is 1 minus the largest
    overlap with what the attempt has seen before this decision. What it has seen already (overlap of
    `settings.duplicate` or more) is left out, and entries that nearly cover the same are told once. Ties are broken by
    (sample, turn), so that the order of the pool does not matter.

    Args:
        pool: of the same prompt and step; the attempt's own entries in it are never chosen.
        own: the attempt's findings.
        turns: the environment's limit.
    """
    seen = [finding.region for finding in own if finding.turn < turn]
    wanted = words(f"{question} {last_rationale}")
    ranked: list[tuple[float, int, int, Experience]] = []
    for experience in pool:
        finding = experience.finding
        if experience.sample == sample or (settings.source == "successes" and not experience.success):
            continue
        nearest = max((overlap(finding.region, region) for region in seen), default=0.0)
        if nearest >= settings.duplicate:
            continue
        score = (
            settings.success_weight * experience.success
            + settings.relevance_weight * relevance(experience, wanted)
            + settings.novelty_weight * (1.0 - nearest)
            - settings.distance_weight * abs(finding.turn - turn) / turns
        )
        ranked.append((-score, experience.sample, finding.turn, experience))
    ranked.sort(key=lambda each: each[:3])
    chosen: list[Aligned] = []
    for negated, _, _, experience in ranked:
        region = experience.finding.region
        told = next(
            (
                place
                for place, each in enumerate(chosen)
                if overlap(each.experience.finding.region, region) >= settings.duplicate
            ),
            None,
        )
        if told is not None:
            chosen[told] = Aligned(chosen[told].experience, chosen[told].score, chosen[told].count + 1)
        elif len(chosen) < settings.entries:
            chosen.append(Aligned(experience, -negated))
    return tuple(chosen)


def rationales(transcript: Sequence[Message]) -> list[str]:
    """What the policy said in each of its turns."""
    return [str(text_only(message)["content"]) for message in transcript if message["role"] == "assistant"]


def turn_spans(segment: Segment) -> list[tuple[int, int]]:
    """(start, end) of each sampled turn within the segment's sampled ids.

    Raises:
        ContractError: the turns of the transcript are not those of the loss mask.
    """
    mask = segment.loss_mask
    starts = [place for place, on in enumerate(mask) if on and (place == 0 or not mask[place - 1])]
    ends = [
        place + 1 for place, on in enumerate(mask) if on and (place + 1 == len(mask) or not mask[place + 1])
    ]
    said = len(rationales(segment.transcript))
    if len(starts) != said:
        raise ContractError(
            f"({segment.prompt_id}, {segment.sample}) has {said} turns in its transcript and {len(starts)} in its "
            "tokens: experience is aligned to rollouts whose turns can be told apart"
        )
    return list(zip(starts, ends, strict=True))


@dataclass(frozen=True)
class Decision:
    """A turn of a rollout, and the entries that its teacher reads before it."""

    segment: Segment
    turn: int
    entries: tuple[Aligned, ...]

    @property
    def key(self) -> EpisodeSegmentKey:
        return (self.segment.prompt_id, self.segment.sample, self.segment.segment)


def group_findings(group: Group, environment: HasFindings) -> dict[int, list[Finding]]:
    """sample → what that rollout found.

    Raises:
        ContractError: a rollout of several segments.
    """
    found: dict[int, list[Finding]] = {}
    for episode in group.episodes:
        if len(episode.segments) != 1:
            raise ContractError(
                f"({group.prompt_id}, {episode.sample}) has {len(episode.segments)} segments: experience is aligned to "
                "rollouts that grow as one"
            )
        found[episode.sample] = environment.findings(episode.segments[0].transcript)
    return found


def group_decisions(
    group: Group,
    findings_of: Mapping[int, Sequence[Finding]],
    question: str,
    turns: int,
    settings: ExperienceSettings,
    wanted: Callable[[Episode, Group], bool],
) -> list[Decision]:
    """Every decision of the wanted rollouts, with the entries aligned to it (perhaps none)."""
    pool = [
        Experience(episode.sample, finding, bool(episode.verdict.success))
        for episode in group.episodes
        for finding in findings_of[episode.sample]
    ]
    decisions: list[Decision] = []
    for episode in group.episodes:
        if not wanted(episode, group):
            continue
        segment = episode.segments[0]
        said = rationales(segment.transcript)
        own = findings_of[episode.sample]
        decisions += [
            Decision(
                segment,
                turn,
                align(
                    pool, episode.sample, turn, own, question, said[turn - 1] if turn else "", turns, settings
                ),
            )
            for turn in range(len(said))
        ]
    return decisions


def shuffled(decisions: Sequence[Decision]) -> list[Decision]:
    """Each decision with the entries of another prompt's: the same contexts, at the wrong places. Needs two prompts;
    with one, decisions of the same prompt swap."""
    order = sorted(range(len(decisions)), key=lambda place: decisions[place].key[0])
    blocks: dict[str, int] = {}
    for decision in decisions:
        blocks[decision.key[0]] = blocks.get(decision.key[0], 0) + 1
    shift = max(blocks.values(), default=0) if len(blocks) > 1 else 1
    swapped = list(decisions)
    for place, index in enumerate(order):
        other = decisions[order[(place + shift) % len(order)]]
        swapped[index] = replace(decisions[index], entries=other.entries)
    return swapped


# ------------------------------------------------------------------------------------------------ the teacher's input


def told(entry: Aligned, chat: Chat, tokens: int) -> list[dict[str, Any]]:
    """An entry in words and images: how its attempt ended, in which turn, what was done and what was answered."""
    finding = entry.experience.finding
    outcome = "succeeded" if entry.experience.success else "failed"
    ids = chat.answer_ids(finding.text, ended=False)
    text = finding.text if len(ids) <= tokens else chat.decode(ids[:tokens]) + " …"
    images = [{"type": "image", "digest": digest} for digest in finding.images]
    line = f"\n[{outcome}, turn {finding.turn + 1}] {finding.action}: "
    return [{"type": "text", "text": line}, *images, {"type": "text", "text": text}]


def experience_messages(
    messages: Sequence[Message], entries: Sequence[Aligned], chat: Chat, tokens: int
) -> list[Message]:
    """The prompt as the teacher reads it: the policy's own, then the entries in its last message. Without entries it
    is the policy's prompt, unchanged.

    Args:
        tokens: of all entries' answers together, at most.
    """
    if not entries:
        return list(messages)
    last = messages[-1]
    content = last["content"]
    own = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    parts = [*own, {"type": "text", "text": f"\n\n{HEADING}"}]
    for entry in entries:
        parts += told(entry, chat, max(1, tokens // len(entries)))
    parts.append({"type": "text", "text": f"\n{CLOSING}"})
    if all(part["type"] == "text" for part in parts):
        return [*messages[:-1], {**last, "content": "".join(part["text"] for part in parts)}]
    return [*messages[:-1], {**last, "content": parts}]


@dataclass(frozen=True, eq=False)
class TeacherRow:
    """A rollout as the teacher reads it: its own tokens, unchanged, after a prompt with experience.

    Attributes:
        tokens: places of the read tokens among the rollout's learnable ones.
        loss_mask: 1 on them.
        image_places: of the prompt's images, the experience's and the rollout's.
    """

    key: EpisodeSegmentKey
    tokens: Ints
    context_ids: list[int]
    sampled_ids: list[int]
    loss_mask: list[int]
    image_places: list[ImagePlace]


def teacher_rows(
    decisions: Sequence[Decision],
    messages_of: Mapping[str, Sequence[Message]],
    chat: Chat,
    settings: ExperienceSettings,
    context_limit: int,
) -> tuple[list[TeacherRow], int]:
    """What the teacher reads: one row for the decisions of a rollout that share their entries, since each one's
    history is a prefix of the next one's.

    Args:
        messages_of: prompt_id → the prompt.
        context_limit: tokens of context and history together; a decision beyond it is left out.

    Returns:
        the rows, and how many decisions were left out.
    """
    together: dict[tuple[EpisodeSegmentKey, tuple[Experience, ...]], list[Decision]] = {}
    for decision in decisions:
        if decision.entries:
            told_of = tuple(entry.experience for entry in decision.entries)
            together.setdefault((decision.key, told_of), []).append(decision)
    rows: list[TeacherRow] = []
    too_long = 0
    for (key, _), members in together.items():
        segment = members[0].segment
        written = experience_messages(messages_of[key[0]], members[0].entries, chat, settings.tokens)
        context = chat.prompt_ids(written)
        spans = turn_spans(segment)
        fitting = [
            spans[each.turn] for each in members if len(context) + spans[each.turn][1] <= context_limit
        ]
        too_long += len(members) - len(fitting)
        if not fitting:
            continue
        end = max(stop for _, stop in fitting)
        mask = np.zeros(end, dtype=np.int64)
        for start, stop in fitting:
            mask[start:stop] = 1
        tokens = np.cumsum(segment.loss_mask) - 1
        images = chat.image_places(context, written)
        images += [
            (len(context) + image["start"], image["digest"])
            for image in segment.images
            if 0 <= image["start"] < end
        ]
        sampled = list(segment.sampled_ids[:end])
        rows.append(TeacherRow(key, tokens[:end][mask == 1], context, sampled, mask.tolist(), images))
    return rows, too_long


# -------------------------------------------------------------------------------------------------------- metrics


def coverage(findings_of: Mapping[int, Sequence[Finding]], duplicate: float) -> tuple[int, float]:
    """Different regions that a group saw, and the mean over its attempts of those that one saw."""

    def distinct(findings: Sequence[Finding]) -> int:
        kept: list[Finding] = []
        for finding in findings:
            if all(overlap(finding.region, other.region) < duplicate for other in kept):
                kept.append(finding)
        return len(kept)

    alone = [distinct(findings) for findings in findings_of.values()]
    together = distinct([finding for findings in findings_of.values() for finding in findings])
    return together, sum(alone) / len(alone) if alone else 0.0


def experience_metrics(
    findings: Sequence[Mapping[int, Sequence[Finding]]], decisions: Sequence[Decision], duplicate: float
) -> dict[str, float]:
    """experience/pool (findings of a group), experience/regions_group and experience/regions_rollout (different regions
    that a group saw, and that one of its rollouts saw), experience/informed (share of decisions with an entry),
    experience/entries (of those), experience/from_successes (share of entries), all means."""
    covered = [coverage(found, duplicate) for found in findings]
    informed = [decision.entries for decision in decisions if decision.entries]
    entries = [entry for each in informed for entry in each]
    return {
        "experience/pool": _mean([float(sum(len(each) for each in found.values())) for found in findings]),
        "experience/regions_group": _mean([float(group) for group, _ in covered]),
        "experience/regions_rollout": _mean([alone for _, alone in covered]),
        "experience/informed": len(informed) / len(decisions) if decisions else 0.0,
        "experience/entries": _mean([float(len(each)) for each in informed]),
        "experience/from_successes": _mean([float(entry.experience.success) for entry in entries]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
