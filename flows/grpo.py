"""GRPO, and its relatives by option (DAPO, Dr.GRPO, GSPO, CISPO, dynamic sampling).

draw prompts → sample groups → verify → [score] → advantages within groups → update
"""

from typing import Any

from prefect import flow

from gleaner.conf.schema import GleanerSettings, TinyShape
from gleaner.flows.loop import Progress, RunSummary, entry_of, train
from gleaner.flows.naming import flow_run_name
from gleaner.tasks.context import RunContext
from gleaner.tasks.sampling import Drawn, Rollouts, draw_prompts, sample
from gleaner.tasks.scoring import Scores, score
from gleaner.tasks.signals import Batch, informative_groups, make_signal
from gleaner.tasks.updating import update
from gleaner.tasks.verification import Verdicts, verify


@flow(name="grpo", flow_run_name=flow_run_name, persist_result=False)
def grpo(settings: GleanerSettings) -> RunSummary:
    """Train a policy by group-relative advantages over verified rollouts."""
    return train(settings, grpo_step)


def grpo_step(context: RunContext, before: Progress) -> dict[str, Any]:
    """One round: verified groups, their signal, one update."""
    batch, cursor = verified_groups(context, before)
    old, reference = scores_needed(context, before, batch)
    signal = make_signal(context, batch, before.step, old, reference)
    updated = update(context, before.version, signal.ref, before.step)
    scores = [part for part in (old, reference) if part is not None]
    return entry_of(before, batch, cursor, signal, updated, scores)


def verified_groups(context: RunContext, before: Progress) -> tuple[Batch, int]:
    """Sample and verify a group for each prompt; with dynamic sampling, refill until enough groups are informative.

    Returns:
        the batch, and the place in the order of prompts where the next step starts.
    """
    run, dynamic = context.settings.run, context.settings.method.dynamic_sampling
    draws: list[Drawn] = []
    rollouts: list[Rollouts] = []
    verdicts: list[Verdicts] = []
    cursor = before.cursor
    for _ in range(dynamic.max_rounds if dynamic else 1):
        drawn = draw_prompts(context, cursor, run.prompts_per_step, draws)
        if drawn.count == 0:
            break
        draws.append(drawn)
        cursor = drawn.cursor
        rollouts.append(sample(context, before.version, drawn.prompts, "train", before.step, run.group_size))
        verdicts.append(verify(context, rollouts[-1], "train", before.step))
        batch = Batch(tuple(rollouts), tuple(verdicts))
        if dynamic is None or informative_groups(context, batch) >= run.prompts_per_step:
            break
    return Batch(tuple(rollouts), tuple(verdicts)), cursor


def scores_needed(context: RunContext, before: Progress, batch: Batch) -> tuple[Scores | None, Scores | None]:
    """Old log-probabilities where the sampler's are not exact, and the reference's where a KL term reads them."""
    settings = context.settings
    recompute = settings.update.recompute_old == "always" or not sampler_is_exact(settings)
    old = score(context, before.version, batch.shards, "old") if recompute else None
    reference = score(context, before.version, batch.shards, "reference") if settings.method.kl_coef else None
    return old, reference


def sampler_is_exact(settings: GleanerSettings) -> bool:
    """The sampler's log-probabilities are the trainer's own: one module in memory, in full precision."""
    in_full = isinstance(settings.policy, TinyShape) or settings.policy.dtype == "float32"
    return settings.engine.kind == "transformers" and in_full
