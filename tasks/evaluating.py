"""Evaluation: success and pass@k of a version on a split that training never sees."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gleaner.conf.schema import Split
from gleaner.models import tables
from gleaner.models.statistics import Interval, pass_at_k, success_interval
from gleaner.tasks.context import RunContext
from gleaner.tasks.sampling import Purpose, first_prompts, load_rollouts, sample
from gleaner.tasks.verification import load_verdicts, verify


@dataclass(frozen=True)
class Evaluation:
    """Success of a version on a split.

    Attributes:
        version, split, prompts, samples: what was evaluated.
        scored: episodes with a verdict; unscored ones are in neither numerator nor denominator.
        success, low, high: mean success and its 95 % interval, clustered by prompt; NaN, 0 and 1 if nothing was scored.
        pass_at: k → unbiased pass@k, over the prompts whose episodes were all scored.
        rollouts, tokens: budget that it took.
        examples: prompt, transcript and verdict of a few episodes.
    """

    version: str
    split: Split
    prompts: int
    samples: int
    scored: int
    success: float
    low: float
    high: float
    pass_at: dict[str, float]
    rollouts: int
    tokens: int
    examples: tuple[dict[str, Any], ...]

    @property
    def metrics(self) -> dict[str, float]:
        values = {"success": self.success, "low": self.low, "high": self.high, "scored": float(self.scored)}
        values |= {f"pass_at_{k}": value for k, value in self.pass_at.items()}
        return {f"{self.split}/{name}": value for name, value in values.items()}


def evaluate_version(
    context: RunContext, version: str, split: Split, prompts: int, examples: int = 3
) -> Evaluation:
    """Sample and verify `prompts` prompts of a split with a version; the same prompts and seeds at every call."""
    samples = context.settings.evaluation.samples
    table = first_prompts(context, split, prompts)
    purpose: Purpose = "validation" if split == "validation" else "test"
    rollouts = sample(context, version, table, purpose, 0, samples)
    verdicts = load_verdicts(context, verify(context, rollouts, purpose, 0))
    by_prompt: dict[str, list[bool]] = {}
    unscored: set[str] = set()
    for verdict in verdicts:
        if verdict.success is None:
            unscored.add(verdict.prompt_id)
        else:
            by_prompt.setdefault(verdict.prompt_id, []).append(verdict.success)
    groups = list(by_prompt.values())
    success = Interval(float("nan"), 0.0, 1.0, "nothing was scored")
    if groups:
        success = success_interval([sum(members) for members in groups], [len(members) for members in groups])
    whole = {prompt: members for prompt, members in by_prompt.items() if prompt not in unscored}
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= samples] if whole else []
    return Evaluation(
        version=version,
        split=split,
        prompts=len(by_prompt.keys() | unscored),
        samples=samples,
        scored=sum(len(members) for members in groups),
        success=success.estimate,
        low=success.low,
        high=success.high,
        pass_at={str(k): float(np.mean([pass_at_k(sum(m), len(m), k) for m in whole.values()])) for k in ks},
        rollouts=rollouts.rollouts,
        tokens=rollouts.tokens,
        examples=tuple(example_rollouts(context, rollouts.prompts, rollouts.shards, verdicts, examples)),
    )


def example_rollouts(
    context: RunContext, prompts: str, shards: tuple[str, ...], verdicts: list[Any], count: int
) -> list[dict[str, Any]]:
    """The first episodes of the first `count` prompts that have a verdict, for people to read."""
    messages = {
        prompt.prompt_id: prompt.messages for prompt in context.store.get_rows(tables.PROMPTS, prompts)
    }
    found = {(verdict.prompt_id, verdict.sample): verdict for verdict in verdicts}
    rows: list[dict[str, Any]] = []
    for segment in load_rollouts(context, shards):
        if len(rows) == count:
            break
        verdict = found.get((segment.prompt_id, segment.sample))
        if segment.sample or segment.segment or verdict is None:
            continue
        rows.append(
            {
                "prompt_id": segment.prompt_id,
                "messages": [*messages[segment.prompt_id], *segment.transcript],
                "finish_reason": segment.finish_reason,
                "status": verdict.status,
                "success": verdict.success,
                "reward": verdict.reward,
            }
        )
    return rows
