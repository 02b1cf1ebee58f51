"""GRAFT: learning beyond what you sample (arXiv 2609.37868).

both policies sample and verify the same prompts → groups that one failed wholly and the other partly solved change
hands → each receiver scores what it got with its old policy → weighted signals → an update of each

In stored mode the other policy is a run of the rollout bank, and one direction remains.
"""

from typing import Any

from prefect import flow

from gleaner.conf.schema import GleanerSettings
from gleaner.flows.gats import next_teacher_state, taught_by_teacher, teacher_state
from gleaner.flows.grpo import scores_needed, verified_groups
from gleaner.flows.loop import Progress, RunSummary, entry_of, train
from gleaner.flows.naming import flow_run_name
from gleaner.tasks.context import RunContext
from gleaner.tasks.exchange import (
    Source,
    count_candidates,
    exchange,
    make_graft_signal,
    method_of,
    stored_source,
)
from gleaner.tasks.residents import resident
from gleaner.tasks.scoring import Scores, score
from gleaner.tasks.signals import Batch, Signal, Taught
from gleaner.tasks.starting import start_key
from gleaner.tasks.teachers import guidance_at, teacher_settings
from gleaner.tasks.updating import Updated, update


@flow(name="graft", flow_run_name=flow_run_name, persist_result=False)
def graft(settings: GleanerSettings) -> RunSummary:
    """Train a policy on its own rollouts and on a peer's where its own all failed; in co-training, the peer too."""
    if settings.method.kind == "graft" and settings.method.peer.run is not None:
        return train(settings, stored_step)
    return train(settings, cotraining_step, companions)


def cotraining_step(context: RunContext, before: Progress) -> dict[str, Any]:
    """One round of both policies, each at its own version, on the same prompts."""
    peer = peer_context(context)
    peer_before = Progress(before.step, peer_version(context, before), before.cursor)
    guidance = guidance_at(context, before.step, teacher_state(before)) if teacher_settings(context) else None
    batch, cursor = verified_groups(context, before)
    peer_batch, _ = verified_groups(peer, peer_before)
    to_policy = count_candidates(context, batch, peer_batch)
    to_peer = count_candidates(context, peer_batch, batch)
    taught = taught_by_teacher(context, batch, guidance) if guidance else None
    signal, updated, scores = learn(context, before, batch, source_of(peer, peer_batch), to_peer, taught)
    peer_signal, peer_updated, peer_scores = learn(
        peer, peer_before, peer_batch, source_of(context, batch), to_policy
    )
    state = next_teacher_state(context, before, guidance, batch) if guidance else dict(before.method_state)
    state["peer"] = peer_updated.version
    entry = entry_of(before, batch, cursor, signal, updated, scores, state)
    beside = entry_of(peer_before, peer_batch, cursor, peer_signal, peer_updated, peer_scores)
    return with_peer(before, entry, beside)


def stored_step(context: RunContext, before: Progress) -> dict[str, Any]:
    """One round of the policy alone; what the peer sampled comes from the rollout bank, verified again."""
    guidance = guidance_at(context, before.step, teacher_state(before)) if teacher_settings(context) else None
    batch, cursor = verified_groups(context, before)
    source = stored_source(context, batch, before.step)
    taught = taught_by_teacher(context, batch, guidance) if guidance else None
    signal, updated, scores = learn(context, before, batch, source, None, taught)
    state = next_teacher_state(context, before, guidance, batch) if guidance else None
    return entry_of(before, batch, cursor, signal, updated, scores, state)


def learn(
    context: RunContext,
    before: Progress,
    own: Batch,
    source: Source | None,
    other_direction: int | None,
    taught: Taught | None = None,
) -> tuple[Signal, Updated, list[Scores]]:
    """One receiver's part: take groups over, score them, make the signal, update."""
    nothing = Source(Batch((), ()), ())
    exchanged = exchange(context, own, source or nothing, before.step, other_direction)
    old, reference = scores_needed(context, before, own)
    grafted = score(context, before.version, (exchanged.rollouts,), "old") if exchanged.rollouts else None
    signal = make_graft_signal(
        context, own, source or nothing, exchanged, before.step, grafted, old, reference, taught
    )
    updated = update(context, before.version, signal.ref, before.step)
    scores = [
        part for part in (old, reference, grafted, taught.scores if taught else None) if part is not None
    ]
    return signal, updated, scores


# ------------------------------------------------------------------------------------------------- the peer


def peer_context(context: RunContext) -> RunContext:
    """The run as its peer sees it: the same but for policy, warm start and teacher."""
    settings, peer = context.settings, method_of(context).peer
    method = method_of(context).model_copy(update={"teacher": None})
    changed = {"policy": peer.policy, "warmstart": peer.warmstart, "method": method}
    return RunContext.of(context.run_id, settings.model_copy(update=changed))


def peer_version(context: RunContext, progress: Progress) -> str:
    """The peer's version after a step; its start before the first."""
    version: str = progress.method_state.get("peer") or start_key(peer_context(context))
    return version


def companions(context: RunContext, progress: Progress) -> dict[str, tuple[RunContext, str]]:
    """The peer is tested, validated and published beside the policy."""
    return {"peer": (peer_context(context), peer_version(context, progress))}


def source_of(context: RunContext, batch: Batch) -> Source:
    """A policy's own batch, as the other one may take groups from it."""
    return Source(batch, tuple(sorted(resident(context).chat.stop_ids)))


def with_peer(before: Progress, entry: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """One journal line of both: the peer's part under `peer`, its metrics and budget by that prefix."""
    seconds = {name for name in entry["metrics"] if name.startswith("seconds/")}
    together = {name: entry["metrics"][name] + beside["metrics"][name] for name in seconds}
    peer_metrics = {f"peer/{name}": value for name, value in beside["metrics"].items() if name not in seconds}
    spent = {
        f"peer/{name}": before.budget.get(f"peer/{name}", 0) + value
        for name, value in beside["budget"].items()
    }
    kept = ("rollouts", "verdicts", "signal", "parent", "version", "counts", "ledger")
    return {
        **entry,
        "metrics": {**entry["metrics"], **peer_metrics, **together},
        "budget": {**entry["budget"], **spent},
        "peer": {name: beside[name] for name in kept},
    }
