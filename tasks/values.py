"""How good a critic's values are, on fresh rollouts, with the policy's own continuations as the truth."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from gleaner.conf.errors import ConfigurationError
from gleaner.models import tables
from gleaner.models.continuations import Probe, against_truth, continued, probes
from gleaner.models.critic import Judged, value_quality
from gleaner.models.signal import Floats
from gleaner.models.verification import judge as judge_rollouts
from gleaner.tasks.context import RunContext
from gleaner.tasks.critics import judge, load_values
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.residents import resident
from gleaner.tasks.sampling import first_prompts, sample
from gleaner.tasks.signals import Batch, load_groups
from gleaner.tasks.store import Record
from gleaner.tasks.verification import verify

FRESH = 10**9
"""Step whose seeds no training step uses."""


@dataclass(frozen=True)
class ValueReport:
    """Metrics of `value_quality` and `against_truth`, and for each place the value, the truth and where in its rollout
    it lies (0 to 1)."""

    metrics: dict[str, float]
    values: tuple[float, ...]
    truths: tuple[float, ...]
    positions: tuple[float, ...]


def measure_values(
    context: RunContext, version: str, critic: str, prompts: int, places: int, continuations: int
) -> ValueReport:
    """Judge fresh groups on validation prompts, then continue the first rollout of each from `places` prefixes.

    Raises:
        ConfigurationError: episodes have several turns, so their middle cannot be continued.
    """
    if context.environment.max_turns > 1:
        raise ConfigurationError(
            f"{context.environment.name} has episodes of several turns, and a world cannot be put back into the middle "
            "of one: measure values on single-turn environments (value/… of the run's steps hold for all)"
        )
    table = first_prompts(context, "validation", prompts)
    rollouts = sample(context, version, table, "train", FRESH, context.settings.run.group_size)
    batch = Batch((rollouts,), (verify(context, rollouts, "train", FRESH),))
    values = judge(context, critic, batch, FRESH)
    groups, _ = load_groups(context, batch)
    found, _ = load_values(context, groups, values)
    judged = [
        Judged(
            group.prompt_id,
            found[(group.prompt_id, episode.sample, 0)],
            float(episode.verdict.reward or 0.0),
            bool(episode.verdict.success),
        )
        for group in groups
        for episode in group.episodes
    ]
    chosen = [probe for group in groups for probe in probes(group.episodes[0].segments[0], places)]
    rewards_NM = continue_rollouts(context, version, table, chosen, continuations)
    known = [bool(np.isfinite(rewards_M).all()) for rewards_M in rewards_NM]
    values_N = np.array([found[(p.segment.prompt_id, p.segment.sample, 0)][p.token] for p in chosen])[known]
    rewards_NM = rewards_NM[known]
    kept = [probe for probe, scored in zip(chosen, known, strict=True) if scored]
    return ValueReport(
        metrics=value_quality(judged) | against_truth(values_N, rewards_NM),
        values=tuple(values_N.tolist()),
        truths=tuple(rewards_NM.mean(axis=1).tolist()),
        positions=tuple(probe.token / len(probe.segment.sampled_ids) for probe in kept),
    )


def continue_rollouts(
    context: RunContext, version: str, prompts: str, chosen: list[Probe], continuations: int
) -> Floats:
    """(N, M) rewards of the continuations of each place; NaN where one could not be scored."""
    tensors = _continue(context, version, prompts, chosen, continuations)
    return context.store.get_tensors(tensors)[0]["rewards"].numpy()


@phase(gpu=True)
def _continue(
    context: RunContext, version: str, prompts: str, chosen: list[Probe], continuations: int
) -> Made[str]:
    store, settings = context.store, context.settings
    code = code_version(
        "gleaner.models.engines", "gleaner.models.continuations", "gleaner.models.verification"
    )
    key = cache_key(
        "continuations",
        code,
        policy=version,
        prompts=prompts,
        places=[
            [probe.segment.prompt_id, probe.segment.sample, probe.segment.seed, probe.token]
            for probe in chosen
        ],
        continuations=continuations,
        sampling=settings.sampling,
        seed=settings.run.seed,
    )

    def make() -> Record:
        started = time.perf_counter()
        holder = resident(context)
        segments = continued(
            holder.engine_at(version),
            holder.chat,
            chosen,
            continuations,
            settings.sampling,
            settings.run.seed,
        )
        rows = store.get_rows(tables.PROMPTS, prompts)
        verdicts = judge_rollouts(
            context.environment, rows, segments, settings.verification, settings.rewards, context.verifiers
        )
        reward_of = {(v.prompt_id, v.sample): v.reward for v in verdicts}
        rewards = [reward_of[(s.prompt_id, s.sample)] for s in segments]
        flat = torch.tensor([np.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
        tensors = store.put_tensors({"rewards": flat.reshape(len(chosen), continuations)})
        return Record({"rewards": tensors}, {"seconds": time.perf_counter() - started}, code)

    record, hit = store.memoise(key, make)
    return Made(record.objects["rewards"], hit)
