"""piPPO: a critic that reads verified and failed siblings of the rollout it judges (arXiv 2609.37825).

draw prompts → sample groups → verify → the critic judges every token beside siblings of its rollout → advantages are
reward minus value → an update of the policy, and one of the critic

In the warm-up the critic alone learns. With method.critic.context=none it is PPO.
"""

from typing import Any

from prefect import flow

from gleaner.conf.schema import GleanerSettings
from gleaner.flows.grpo import scores_needed, verified_groups
from gleaner.flows.loop import Progress, RunSummary, entry_of, train
from gleaner.flows.naming import flow_run_name
from gleaner.tasks.context import RunContext
from gleaner.tasks.critics import check_reading, critic_context, judge, make_pippo_signal, method_of
from gleaner.tasks.residents import CRITIC
from gleaner.tasks.signals import Batch
from gleaner.tasks.starting import start_key
from gleaner.tasks.updating import Updated, update


@flow(name="pippo", flow_run_name=flow_run_name, persist_result=False)
def pippo(settings: GleanerSettings) -> RunSummary:
    """Train a policy by token-level advantages against a critic that read the rollout's siblings."""
    return train(settings, pippo_step)


def pippo_step(context: RunContext, before: Progress) -> dict[str, Any]:
    """One round: verified groups, their values, the signal, an update of each."""
    critic = critic_context(context)
    version = before.method_state.get("critic") or start_key(critic)
    warming_up = before.step < method_of(context).critic.warmup_steps
    batch, cursor = verified_groups(context, before)
    values = judge(context, version, batch, before.step)
    reading = reading_checked(context, version, batch, before.step)
    old, reference = scores_needed(context, before, batch)
    signal = make_pippo_signal(context, batch, before.step, values, not warming_up, old, reference)
    updated = (
        Updated(before.version, {}, 0.0)
        if warming_up
        else update(context, before.version, signal.ref, before.step)
    )
    learned = update(critic, version, signal.ref, before.step, CRITIC)
    scores = [part for part in (old, reference, values.cost) if part is not None]
    entry = entry_of(
        before, batch, cursor, signal, updated, scores, before.method_state | {"critic": learned.version}
    )
    entry["metrics"] |= reading | {
        f"critic/{name.removeprefix('update/')}": figure
        for name, figure in learned.metrics.items()
        if name.startswith("update/")
    }
    entry["metrics"]["seconds/update"] += learned.seconds
    return entry


def reading_checked(context: RunContext, version: str, batch: Batch, step: int) -> dict[str, float]:
    """Just before the policy learns from the critic for the first time: that it reads its references at all."""
    critic = method_of(context).critic
    if step != critic.warmup_steps or not critic.require_reading or critic.context == "none":
        return {}
    own = judge(context, version, batch, step)
    return check_reading(context, own, judge(context, version, batch, step, mismatched=True), step)
