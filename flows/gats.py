"""GATS: guide, then let go (arXiv 2609.37898).

the teacher's weight → draw prompts → sample groups → verify → [teacher scores the student's tokens] → GRPO signal plus
weighted guidance → update → remember the success rate
"""

from dataclasses import asdict
from typing import Any

from prefect import flow

from gleaner.conf.schema import GleanerSettings
from gleaner.flows.grpo import scores_needed, verified_groups
from gleaner.flows.loop import Progress, RunSummary, entry_of, success_of, train
from gleaner.flows.naming import flow_run_name
from gleaner.models.methods import gats as method
from gleaner.tasks.context import RunContext
from gleaner.tasks.signals import Batch, Taught, make_signal
from gleaner.tasks.teachers import guidance_at, score_with_teacher, teacher_settings
from gleaner.tasks.updating import update


@flow(name="gats", flow_run_name=flow_run_name, persist_result=False)
def gats(settings: GleanerSettings) -> RunSummary:
    """Train a policy under a teacher's guidance, in proportion to the gap and withdrawn for good at parity."""
    return train(settings, gats_step)


def gats_step(context: RunContext, before: Progress) -> dict[str, Any]:
    """Algorithm 1 of the paper: decide on the teacher from earlier steps, then one round."""
    guidance = guidance_at(context, before.step, teacher_state(before))
    batch, cursor = verified_groups(context, before)
    old, reference = scores_needed(context, before, batch)
    taught = taught_by_teacher(context, batch, guidance)
    signal = make_signal(context, batch, before.step, old, reference, taught)
    updated = update(context, before.version, signal.ref, before.step)
    scores = [part for part in (old, reference, taught.scores) if part is not None]
    state = next_teacher_state(context, before, guidance, batch)
    return entry_of(before, batch, cursor, signal, updated, scores, state)


def taught_by_teacher(context: RunContext, batch: Batch, guidance: method.Guidance) -> Taught:
    """The teacher's forward pass, left out where its weight is zero."""
    return Taught(guidance, score_with_teacher(context, batch.shards) if guidance.weight else None)


def teacher_state(before: Progress) -> method.Progress:
    """The window of success rates and the latch, from the journal's last line."""
    stored = before.method_state.get("teacher", {"successes": [], "withdrawn_at": None})
    return method.Progress(tuple(stored["successes"]), stored["withdrawn_at"])


def next_teacher_state(
    context: RunContext, before: Progress, guidance: method.Guidance, batch: Batch
) -> dict[str, Any]:
    """Method state with this step's success rate in the window; a step in which nothing was scored adds none."""
    settings, success = teacher_settings(context), success_of(batch)
    assert settings is not None, "this method has a teacher"
    now = teacher_state(before)
    after = (
        method.Progress(now.successes, guidance.withdrawn_at)
        if success is None
        else method.after_step(now, guidance, success, settings.window)
    )
    return before.method_state | {"teacher": asdict(after)}
