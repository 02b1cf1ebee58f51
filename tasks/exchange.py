"""Exchange between policies (GRAFT): which groups go from a source to a receiver, and their trajectories in the
receiver's tokens."""

import functools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import GraftMethod
from gleaner.models import tables
from gleaner.models.chat import Chat
from gleaner.models.methods.gats import with_guidance
from gleaner.models.methods.graft import (
    Counts,
    Graft,
    GraftedGroup,
    candidates,
    graft_signal,
    select_with_ties,
)
from gleaner.models.records import Prompt, Segment, Verdict
from gleaner.models.rollout import retokenised
from gleaner.models.signal import Episode, Group
from gleaner.tasks import bank
from gleaner.tasks.context import RunContext
from gleaner.tasks.faults import fault_point
from gleaner.tasks.journal import Journal
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.residents import resident
from gleaner.tasks.sampling import Rollouts
from gleaner.tasks.scoring import Scores, load_scores
from gleaner.tasks.signals import Batch, Signal, Taught, load_groups, signal_made, signal_record
from gleaner.tasks.store import Record
from gleaner.tasks.teachers import published_policy
from gleaner.tasks.verification import load_verdicts, verify


@dataclass(frozen=True)
class Source:
    """Verified groups that may be grafted: a peer's batch of this step, or another run's.

    Attributes:
        stop_ids: ids that end one of its turns.
        quarantined: episodes whose stored reward was not confirmed when they were verified again.
    """

    batch: Batch
    stop_ids: tuple[int, ...]
    quarantined: int = 0


@dataclass(frozen=True)
class Exchange:
    """Groups on their way to a receiver.

    Attributes:
        rollouts: digest of the table of their trajectories in the receiver's tokens; None without any.
        metrics: graft/candidates, graft/exchanged, graft/solved_by_peer (share of the receiver's all-fail groups that
            are candidates), graft/too_long (trajectories that the receiver's context does not hold), graft/quarantined.
    """

    rollouts: str | None
    metrics: dict[str, float]


def method_of(context: RunContext) -> GraftMethod:
    method = context.settings.method
    assert isinstance(method, GraftMethod), "an exchange belongs to method.kind=graft"
    return method


@phase(gpu=True)
def exchange(
    context: RunContext, own: Batch, source: Source, step: int, other_direction: int | None
) -> Made[Exchange]:
    """Choose the groups that the receiver takes, and write their trajectories in its tokens.

    Args:
        context: the receiver's.
        own: its verified groups.
        other_direction: candidates of the opposite direction, which balancing looks at; None in stored mode.
    """
    store, method = context.store, method_of(context)
    code = code_version("gleaner.models.methods.graft", "gleaner.models.rollout", "gleaner.models.chat")
    key = cache_key(
        "exchange",
        code,
        rule=[method.balance, method.prompts],
        on_unscored=[
            context.settings.verification.on_unscored,
            context.settings.verification.keep_at_least,
        ],
        own=[own.shards, [part.table for part in own.verdicts]],
        source=[source.batch.shards, [part.table for part in source.batch.verdicts], source.stop_ids],
        policy=context.settings.policy,
        environment=context.environment_digest,
        other_direction=other_direction,
        seed=context.settings.run.seed,
        step=step,
    )

    def make() -> Record:
        fault_point("exchange", step, "before")
        receiver = {group.prompt_id: Counts.of(group) for group in load_groups(context, own)[0]}
        groups = {group.prompt_id: group for group in load_groups(context, source.batch)[0]}
        found = {prompt: Counts.of(group) for prompt, group in groups.items()}
        solved = candidates(receiver, found)
        count = len(solved)
        if method.balance and other_direction is not None:
            count = min(count, other_direction)
        chosen = select_with_ties(solved, count)
        if method.prompts == "random":
            mixed = [prompt for prompt in receiver if prompt in found and found[prompt].mixed]
            random = np.random.Generator(np.random.Philox(key=[context.settings.run.seed, step]))
            places = random.choice(len(mixed), size=min(len(chosen), len(mixed)), replace=False)
            chosen = [mixed[place] for place in sorted(places)]
        holder = resident(context)
        prompts = {
            prompt.prompt_id: prompt for part in own.rollouts for prompt in load_prompts(context, part)
        }
        rows: list[Segment] = []
        too_long = 0
        for prompt_id in chosen:
            written, lost = _in_own_tokens(
                groups[prompt_id], prompts[prompt_id], holder.chat, source.stop_ids, holder.policy.context
            )
            rows += written
            too_long += lost
        failed = sum(count.successes == 0 for count in receiver.values())
        metrics = {
            "graft/candidates": float(len(solved)),
            "graft/exchanged": float(len(chosen)),
            "graft/solved_by_peer": len(solved) / failed if failed else 0.0,
            "graft/too_long": float(too_long),
            "graft/quarantined": float(source.quarantined),
        }
        objects = {"rollouts": store.put_rows(tables.ROLLOUTS, rows)} if rows else {}
        return Record(objects, {"metrics": metrics}, code)

    record, hit = store.memoise(key, make)
    return Made(Exchange(record.objects.get("rollouts"), record.facts["metrics"]), hit)


def count_candidates(context: RunContext, own: Batch, source: Batch) -> int:
    """Prompts that the receiver failed wholly and the source partly solved."""
    receiver = {group.prompt_id: Counts.of(group) for group in load_groups(context, own)[0]}
    found = {group.prompt_id: Counts.of(group) for group in load_groups(context, source)[0]}
    return len(candidates(receiver, found))


def load_prompts(context: RunContext, rollouts: Rollouts) -> list[Prompt]:
    return context.store.get_rows(tables.PROMPTS, rollouts.prompts)


def _in_own_tokens(
    group: Group, prompt: Prompt, chat: Chat, stop_ids: Sequence[int], context_limit: int
) -> tuple[list[Segment], int]:
    """A group's trajectories in the receiver's tokens, and how many its context does not hold."""
    rows: list[Segment] = []
    too_long = 0
    for episode in group.episodes:
        if len(episode.segments) > 1:
            continue
        written = retokenised(episode.segments[0], prompt, chat, frozenset(stop_ids))
        if written is None:
            continue
        if len(written.context_ids) + len(written.sampled_ids) > context_limit:
            too_long += 1
            continue
        rows.append(written)
    return rows, too_long


# ------------------------------------------------------------------------------------------------- the signal


@phase()
def make_graft_signal(
    context: RunContext,
    own: Batch,
    source: Source,
    exchanged: Exchange,
    step: int,
    grafted_old: Scores | None,
    old: Scores | None,
    reference: Scores | None,
    taught: Taught | None = None,
) -> Made[Signal]:
    """The receiver's GRPO signal with the exchanged trajectories in it; and the ledger.

    Args:
        grafted_old: the receiver's log-probabilities of the exchanged trajectories; None without any.
    """
    settings, store, method = context.settings, context.store, method_of(context)
    code = code_version(
        "gleaner.models.methods.graft", "gleaner.models.methods.gats", "gleaner.models.signal"
    )
    key = cache_key(
        "signal",
        code,
        method=method,
        verification=[settings.verification.on_unscored, settings.verification.keep_at_least],
        own=[own.shards, [part.table for part in own.verdicts]],
        source=[source.batch.shards, [part.table for part in source.batch.verdicts]],
        exchanged=exchanged.rollouts,
        scores=[scores.tensors if scores is not None else None for scores in (grafted_old, old, reference)],
        taught=[taught.guidance.metrics, taught.scores.tensors if taught.scores else None]
        if taught
        else None,
        minibatches=settings.update.minibatches,
        sampling=[settings.sampling.max_new_tokens, settings.sampling.temperature],
        max_turns=context.environment.max_turns,
        seed=settings.run.seed,
        step=step,
    )

    def make() -> Record:
        fault_point("signal", step, "before")
        groups, counts = load_groups(context, own)
        grafted = _load_grafts(context, source, exchanged, grafted_old)
        shard_of = {
            segment.prompt_id: shard
            for shard in own.shards
            for segment in store.get_rows(tables.ROLLOUTS, shard)
        }
        started = time.perf_counter()
        signal, metrics = graft_signal(
            groups,
            grafted,
            method,
            rollouts=shard_of,
            minibatches=settings.update.minibatches,
            max_new_tokens=settings.sampling.max_new_tokens * context.environment.max_turns,
            temperature=settings.sampling.temperature,
            random=np.random.Generator(np.random.Philox(key=[settings.run.seed, step])),
            old_logprobs=load_scores(context, own.shards, old) if old else None,
            reference_logprobs=load_scores(context, own.shards, reference) if reference else None,
        )
        if taught is not None:
            teacher = load_scores(context, own.shards, taught.scores) if taught.scores else {}
            signal, guided = with_guidance(signal, teacher, taught.guidance.weight)
            metrics |= taught.guidance.metrics | guided
        return signal_record(store, signal, groups, {**metrics, **counts, **exchanged.metrics}, started, code)

    return signal_made(*store.memoise(key, make))


def _load_grafts(
    context: RunContext, source: Source, exchanged: Exchange, scores: Scores | None
) -> dict[str, GraftedGroup]:
    """The exchanged trajectories by prompt, joined with the source's full groups."""
    if exchanged.rollouts is None or scores is None:
        return {}
    logprobs = load_scores(context, [exchanged.rollouts], scores)
    groups = {group.prompt_id: group for group in load_groups(context, source.batch)[0]}
    written: dict[str, dict[int, Graft]] = defaultdict(dict)
    for segment in context.store.get_rows(tables.ROLLOUTS, exchanged.rollouts):
        original = next(e for e in groups[segment.prompt_id].episodes if e.sample == segment.sample)
        written[segment.prompt_id][segment.sample] = Graft(
            episode=Episode(segment.sample, [segment], original.verdict),
            old_logprobs=(logprobs[(segment.prompt_id, segment.sample, segment.segment)],),
            source_mean=segment.logprobs[0],
            rollouts=exchanged.rollouts,
        )
    return {prompt: GraftedGroup(groups[prompt], grafts) for prompt, grafts in written.items()}


# ---------------------------------------------------------------------------------------------- stored groups


def stored_source(context: RunContext, own: Batch, step: int) -> Source | None:
    """What another run sampled for this step's prompts, verified again: at the same step where it met the prompt there,
    else at the last step that did. None if it never met one of them.

    An episode whose success or reward is not what the run had recorded is quarantined: it becomes unscored, and the
    group policy decides about its group.
    """
    store, run = context.store, method_of(context).peer.run
    assert run is not None, "stored mode names a run"
    steps_of = _steps_of_prompts(context)
    wanted: dict[int, list[str]] = defaultdict(list)
    for part in own.rollouts:
        for prompt in load_prompts(context, part):
            if met := steps_of.get(prompt.prompt_id):
                wanted[step if step in met else met[-1]].append(prompt.prompt_id)
    groups = [
        bank.all_groups(store, run, at)[prompt_id] for at, ids in sorted(wanted.items()) for prompt_id in ids
    ]
    if not groups:
        return None
    rows = [segment for group in groups for member in group.members for segment in member.segments]
    stored = Rollouts(
        shards=(store.put_rows(tables.ROLLOUTS, rows),),
        prompts=store.put_rows(tables.PROMPTS, [group.prompt for group in groups]),
        rollouts=sum(len(group.members) for group in groups),
        tokens=sum(sum(row.loss_mask) for row in rows),
        attempted_rollouts=0,
        attempted_tokens=0,
        seconds=0.0,
        metrics={},
    )
    again = verify(context, stored, "train", step)
    recorded = {
        (group.prompt.prompt_id, member.sample): member.verdict
        for group in groups
        for member in group.members
    }
    checked = [_confirmed(now, recorded[now.prompt_id, now.sample]) for now in load_verdicts(context, again)]
    batch = Batch((stored,), (replace(again, table=store.put_rows(tables.VERDICTS, checked)),))
    stops: list[int] = published_policy(context, run).facts["training"]["stop_ids"]
    return Source(batch, tuple(stops), sum("quarantined" in verdict.details for verdict in checked))


def check_stored_peer(context: RunContext) -> list[str]:
    """What forbids reading the peer's run, each with its fix."""
    run = method_of(context).peer.run
    if run is None:
        return []
    try:
        trained = published_policy(context, run).facts["training"]
    except ConfigurationError as error:
        return [str(error)]
    settings = context.settings
    if trained["temperature"] != settings.sampling.temperature:
        return [
            f"method.peer.run={run} sampled at temperature {trained['temperature']}, this run at "
            f"{settings.sampling.temperature}: compatibility compares the two, so set sampling.temperature alike"
        ]
    return []


def _confirmed(now: Verdict, recorded: Verdict | None) -> Verdict:
    """The verdict, or an unscored one where it is not what was recorded. What was never scored is left as it is."""
    if recorded is None or "scored" not in (recorded.status, now.status):
        return now
    before = (recorded.status, recorded.success, recorded.reward)
    if before == (now.status, now.success, now.reward):
        return now
    details = {"quarantined": f"recorded {before}, now {(now.status, now.success, now.reward)}"}
    return replace(now, status="error", success=None, reward=None, details=details)


@functools.lru_cache(maxsize=4)
def _steps_of_prompts(context: RunContext) -> dict[str, list[int]]:
    """prompt_id → the steps at which the peer's run sampled it."""
    store, run = context.store, method_of(context).peer.run
    assert run is not None, "stored mode names a run"
    found: dict[str, list[int]] = defaultdict(list)
    for step, entry in Journal(store, run).entries():
        for table in entry["prompts"]:
            for prompt in store.get_rows(tables.PROMPTS, table):
                found[prompt.prompt_id].append(step)
    return dict(found)
