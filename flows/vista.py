"""VISTA: what one rollout discovers teaches its failed siblings (arXiv 2609.38086; the equations are this project's).

draw prompts → sample groups → verify → the policy reads what siblings found, at every decision of the failed rollouts →
GRPO signal with those routed to distillation → update
"""

from typing import Any

from prefect import flow

from gleaner.conf.schema import GleanerSettings
from gleaner.flows.grpo import scores_needed, verified_groups
from gleaner.flows.loop import Progress, RunSummary, entry_of, train
from gleaner.flows.naming import flow_run_name
from gleaner.tasks.context import RunContext
from gleaner.tasks.experience import check_reading, learn_from_siblings, make_vista_signal, method_of
from gleaner.tasks.signals import Batch
from gleaner.tasks.updating import update


@flow(name="vista", flow_run_name=flow_run_name, persist_result=False)
def vista(settings: GleanerSettings) -> RunSummary:
    """Train a policy by its rewards where it succeeded, and by what its siblings found where it failed."""
    return train(settings, vista_step)


def vista_step(context: RunContext, before: Progress) -> dict[str, Any]:
    """One round: verified groups, the teacher's lessons from them, the signal, one update."""
    batch, cursor = verified_groups(context, before)
    reading = reading_checked(context, before, batch)
    lessons = learn_from_siblings(context, before.version, batch, before.step)
    old, reference = scores_needed(context, before, batch)
    signal = make_vista_signal(context, batch, before.step, lessons, old, reference)
    updated = update(context, before.version, signal.ref, before.step)
    scores = [part for part in (old, reference, lessons.cost) if part is not None]
    entry = entry_of(before, batch, cursor, signal, updated, scores)
    entry["metrics"] |= reading
    return entry


def reading_checked(context: RunContext, before: Progress, batch: Batch) -> dict[str, float]:
    """Before the first update: that the policy can read experience at all."""
    if before.step > 0 or not method_of(context).experience.require_reading:
        return {}
    return check_reading(context, before.version, batch, before.step)
