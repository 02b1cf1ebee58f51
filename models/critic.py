"""What a critic reads beside the rollout that it judges, and how good its values are.

A critic of piPPO (arXiv 2609.37825; its equations after public summaries) reads verified siblings of the rollout:
other rollouts of the same prompt and step, each with its verdict. Which ones is decided by the siblings alone. A rule
that looks at the judged rollout's own text or reward would make the baseline biased (methods.md 4(f)1), however
harmless it looks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gleaner.conf.errors import ContractError
from gleaner.conf.schema import CriticSettings
from gleaner.models.chat import Chat, text_only
from gleaner.models.methods.grpo import EpisodeSegmentKey
from gleaner.models.objective import explained_variance
from gleaner.models.records import Message
from gleaner.models.signal import Episode, Floats, Group

REFERENCES = 2
CORRECT, INCORRECT = "[CORRECT]", "[INCORRECT]"
CUT = " … "
BINS = 10
"""Of positions within a rollout, and of the calibration error."""


# ----------------------------------------------------------------------------------------- which references


@dataclass(frozen=True)
class Sibling:
    """Another rollout of the judged one's prompt: its place in the group, what it said, and its verdict."""

    place: int
    text: str
    success: bool


@dataclass(frozen=True)
class Choice:
    """What the critic reads beside a rollout.

    Attributes:
        references: siblings, in the order in which they are shown.
        answer: the ground-truth answer is shown too.
        case: both, only_success, only_failure, alone (no sibling): what the siblings offered.
    """

    references: tuple[Sibling, ...]
    answer: bool
    case: str


def choose_references(
    siblings: Sequence[Sibling],
    settings: CriticSettings,
    random: np.random.Generator,
    target_text: str | None = None,
) -> Choice:
    """Choose from the siblings, never from the judged rollout.

    | successes, failures | contrast | success | failure |
    |---|---|---|---|
    | both | one of each | up to two successes | up to two failures |
    | no failure | up to two successes | up to two successes | nothing |
    | no success | up to two failures and the answer | the answer | up to two failures |

    `answer` shows the answer always, `none` nothing. The columns success and failure are this project's reading of
    the paper's same-polarity ablation; where a polarity has one member, one is shown.

    Args:
        target_text: of the judged rollout; read only with dedupe=target, which is biased and says so.
    """
    kept = list(siblings)
    if settings.dedupe != "none":
        seen: set[str] = {target_text} if settings.dedupe == "target" and target_text is not None else set()
        kept = []
        for sibling in siblings:
            if sibling.text not in seen:
                seen.add(sibling.text)
                kept.append(sibling)
    successes = [sibling for sibling in kept if sibling.success]
    failures = [sibling for sibling in kept if not sibling.success]
    case = (
        ("both" if failures else "only_success") if successes else ("only_failure" if failures else "alone")
    )

    def some(pool: Sequence[Sibling], count: int) -> list[Sibling]:
        if not pool:
            return []
        places = random.choice(len(pool), size=min(count, len(pool)), replace=False)
        return [pool[place] for place in places]

    if settings.context == "none":
        return Choice((), False, case)
    if settings.context == "answer":
        return Choice((), True, case)
    if settings.context == "success":
        return Choice(tuple(some(successes, REFERENCES)), not successes, case)
    if settings.context == "failure":
        return Choice(tuple(some(failures, REFERENCES)), False, case)
    if successes and failures:
        chosen = some(successes, 1) + some(failures, 1)
        # Else the first place would say what the label says.
        if random.random() < 0.5:
            chosen.reverse()
        return Choice(tuple(chosen), False, case)
    return Choice(tuple(some(successes or failures, REFERENCES)), not successes, case)


def shown_labels(
    references: Sequence[Sibling], settings: CriticSettings, random: np.random.Generator
) -> list[str]:
    """The label of each reference, as the settings show it: true, a fair coin's, or none."""
    if settings.labels == "hidden":
        return ["" for _ in references]
    if settings.labels == "shuffled":
        return [CORRECT if random.random() < 0.5 else INCORRECT for _ in references]
    return [CORRECT if reference.success else INCORRECT for reference in references]


# ------------------------------------------------------------------------------------------------ the prompt


def said(episode: Episode) -> str:
    """What a rollout said, and what its environment answered, as a reference shows it."""
    transcript = [message for segment in episode.segments for message in segment.transcript]
    return "\n".join(str(text_only(message)["content"]) for message in transcript).strip()


def without_middle(text: str, chat: Chat, tokens: int) -> tuple[str, bool]:
    """The text in at most about `tokens` tokens, cut in the middle: what it set out to do and how it ended stay.

    Returns:
        the text, and whether it was cut.
    """
    ids = chat.answer_ids(text, ended=False)
    if len(ids) <= tokens:
        return text, False
    head = tokens // 2
    return chat.decode(ids[:head]) + CUT + chat.decode(ids[len(ids) - (tokens - head) :]), True


def critic_messages(
    messages: Sequence[Message], references: Sequence[tuple[str, str]], answer: str | None
) -> list[Message]:
    """The prompt as the critic reads it: the policy's own, then each (label, text) and the answer, in its last message.

    With nothing to add it is the policy's prompt, unchanged: a plain critic of PPO.
    """
    parts = [
        f"Reference attempt {number} {label}".rstrip() + f":\n{text}"
        for number, (label, text) in enumerate(references, 1)
    ]
    if answer is not None:
        parts.append(f"Ground-truth answer: {answer}")
    if not parts:
        return list(messages)
    last = text_only(messages[-1])
    content = "\n\n".join([str(last["content"]), *parts, "Attempt to evaluate:"])
    return [*messages[:-1], {**last, "content": content}]


@dataclass(frozen=True)
class CriticContext:
    """What stands before a rollout's sampled tokens when the critic reads it.

    Attributes:
        ids: of the critic's prompt, up to the generation prompt.
        case: of `Choice`.
        cut: references that lost their middle.
        references: how many there are.
    """

    ids: list[int]
    case: str
    cut: int
    references: int


def critic_contexts(
    group: Group,
    messages: Sequence[Message],
    answer: str | None,
    settings: CriticSettings,
    chat: Chat,
    generator_of: Callable[[int], np.random.Generator],
    lender: Group | None = None,
    lent_answer: str | None = None,
) -> dict[EpisodeSegmentKey, CriticContext]:
    """The critic's context for every rollout of a group.

    Args:
        messages: the group's prompt.
        answer: the ground truth, if the environment has one.
        generator_of: sample number → a generator of its own, so that a rollout's references depend on no other draw.
        lender: references from this other prompt's group instead (the preflight's control).

    Raises:
        ContractError: a rollout of several segments.
    """
    contexts: dict[EpisodeSegmentKey, CriticContext] = {}
    source = group if lender is None else lender
    texts = [said(episode) for episode in source.episodes]
    own_texts = texts if lender is None else [said(episode) for episode in group.episodes]
    truth = answer if lender is None else lent_answer
    for place, episode in enumerate(group.episodes):
        if len(episode.segments) != 1:
            raise ContractError(
                f"({group.prompt_id}, {episode.sample}) has {len(episode.segments)} segments: a critic judges rollouts "
                "that grow as one"
            )
        segment = episode.segments[0]
        siblings = [
            Sibling(other, texts[other], bool(member.verdict.success))
            for other, member in enumerate(source.episodes)
            if other != place
        ]
        random = generator_of(episode.sample)
        chosen = choose_references(siblings, settings, random, own_texts[place])
        labels = shown_labels(chosen.references, settings, random)
        shown = [without_middle(each.text, chat, settings.reference_tokens) for each in chosen.references]
        written = critic_messages(
            messages,
            [(label, text) for label, (text, _) in zip(labels, shown, strict=True)],
            truth if chosen.answer else None,
        )
        plain = len(written) == len(messages) and written[-1] is messages[-1]
        contexts[(segment.prompt_id, segment.sample, segment.segment)] = CriticContext(
            ids=list(segment.context_ids) if plain else chat.prompt_ids(written),
            case=chosen.case,
            cut=sum(cut for _, cut in shown),
            references=len(shown),
        )
    return contexts


def context_metrics(contexts: Mapping[Any, CriticContext]) -> dict[str, float]:
    """critic/case_… (shares of rollouts), critic/references_cut (share of references), critic/context (mean tokens)."""
    found = list(contexts.values())
    references = sum(context.references for context in found)
    return {
        **{
            f"critic/case_{case}": float(np.mean([context.case == case for context in found]))
            for case in ("both", "only_success", "only_failure", "alone")
        },
        "critic/references_cut": sum(context.cut for context in found) / references if references else 0.0,
        "critic/context": float(np.mean([len(context.ids) for context in found])),
    }


# ------------------------------------------------------------------------------------------ how good values are


@dataclass(frozen=True)
class Judged:
    """A rollout's values (n,), before the critic learned from it, and its return."""

    prompt_id: str
    values: Floats
    reward: float
    success: bool


def explained(values_N: Floats, returns_N: Floats) -> float | None:
    """`objective.explained_variance` of arrays."""
    return explained_variance(torch.from_numpy(values_N), torch.from_numpy(returns_N))


def value_quality(judged: Sequence[Judged]) -> dict[str, float]:
    """How well values foretell returns. Every rollout weighs the same, whatever its length, and what is undefined in
    this batch is left out.

    Returns:
        value/explained_variance (of each rollout's mean value), value/explained_variance_0 to _9 (by tenth of the
        rollout), value/error (mean squared), value/contrast (mean value of successes minus that of failures),
        value/ranking (share of sibling pairs of unlike verdict in which the success has the higher mean value; ties
        count half), value/top1 (share of mixed groups whose best value is a success), value/calibration (expected
        calibration error of the last value against success).
    """
    judged = [one for one in judged if len(one.values)]
    if not judged:
        return {}
    rewards_B = np.array([one.reward for one in judged])
    success_B = np.array([one.success for one in judged])
    mean_B = np.array([one.values.mean() for one in judged])
    last_B = np.array([one.values[-1] for one in judged])
    found: dict[str, float | None] = {
        "value/explained_variance": explained(mean_B, rewards_B),
        "value/error": float(np.mean([((one.values - one.reward) ** 2).mean() for one in judged])),
        "value/mean": float(mean_B.mean()),
        "value/calibration": calibration_error(last_B, success_B),
    }
    for tenth in range(BINS):
        at_B = np.array([one.values[len(one.values) * (2 * tenth + 1) // (2 * BINS)] for one in judged])
        found[f"value/explained_variance_{tenth}"] = explained(at_B, rewards_B)
    if success_B.any() and not success_B.all():
        found["value/contrast"] = float(mean_B[success_B].mean() - mean_B[~success_B].mean())
    pairs: list[float] = []
    best: list[float] = []
    prompts = np.array([one.prompt_id for one in judged])
    for prompt in dict.fromkeys(prompts.tolist()):
        members = prompts == prompt
        won, lost = mean_B[members & success_B], mean_B[members & ~success_B]
        if len(won) and len(lost):
            difference = won[:, None] - lost[None, :]
            pairs += ((difference > 0) + 0.5 * (difference == 0)).ravel().tolist()
            best.append(float(won.max() > lost.max()) + 0.5 * float(won.max() == lost.max()))
    if pairs:
        found |= {"value/ranking": float(np.mean(pairs)), "value/top1": float(np.mean(best))}
    return {name: value for name, value in found.items() if value is not None}


def calibration_error(values_B: Floats, success_B: Any) -> float:
    """Expected calibration error over ten equal bins of [0, 1]; values outside belong to the outer bins."""
    bins_B = np.clip((values_B * BINS).astype(int), 0, BINS - 1)
    return float(
        sum(
            (bins_B == index).mean()
            * abs(values_B[bins_B == index].mean() - success_B[bins_B == index].mean())
            for index in np.unique(bins_B)
        )
    )


def squared_errors_by_prompt(judged: Sequence[Judged]) -> dict[str, float]:
    """prompt_id → mean over its rollouts of the mean squared error of their values."""
    errors: dict[str, list[float]] = {}
    for one in judged:
        if len(one.values):
            errors.setdefault(one.prompt_id, []).append(float(((one.values - one.reward) ** 2).mean()))
    return {prompt: float(np.mean(found)) for prompt, found in errors.items()}
