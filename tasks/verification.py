"""Verification: a verdict for every episode, made once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gleaner.conf.schema import RewardSettings
from gleaner.models import tables
from gleaner.models.records import Verdict
from gleaner.models.verification import judge
from gleaner.tasks.context import RunContext
from gleaner.tasks.faults import fault_point
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.sampling import Purpose, Rollouts, load_rollouts
from gleaner.tasks.store import Record


@dataclass(frozen=True)
class Verdicts:
    """What a verification phase made: digest of the Verdicts table, counts by status, successes, seconds."""

    table: str
    scored: int
    timeouts: int
    errors: int
    successes: int
    seconds: float


@phase()
def verify(context: RunContext, rollouts: Rollouts, purpose: Purpose, step: int) -> Made[Verdicts]:
    """Verify every episode in killable processes. Unscored (timeout, error) is not wrong: it is left open."""
    settings, store = context.settings, context.store
    # Evaluation reports the verifier's success; rewards of one's own are for training.
    rewards = settings.rewards if purpose == "train" else [RewardSettings()]
    functions = [context.environment.verifier.function, *(reward.function for reward in rewards)]
    code = code_version("gleaner.models.verification", *_sources(functions))
    key = cache_key(
        "verdicts",
        code,
        shards=list(rollouts.shards),
        prompts=rollouts.prompts,
        verifier=context.environment.verifier.version,
        environment=context.environment_digest,
        rewards=rewards,
        deadline_seconds=settings.verification.deadline_seconds,
        retries=settings.verification.retries if settings.verification.on_unscored == "retry" else 0,
    )

    def make() -> Record:
        started = time.perf_counter()
        fault_point("verify", step, "before")
        prompts = store.get_rows(tables.PROMPTS, rollouts.prompts)
        segments = load_rollouts(context, rollouts.shards)
        verdicts = judge(
            context.environment, prompts, segments, settings.verification, rewards, context.verifiers
        )
        fault_point("verify", step, "after")
        table = store.put_rows(tables.VERDICTS, verdicts)
        return Record(
            {"verdicts": table}, {"seconds": time.perf_counter() - started, **_counts(verdicts)}, code
        )

    record, hit = store.memoise(key, make)
    return Made(Verdicts(table=record.objects["verdicts"], **record.facts), hit)


def load_verdicts(context: RunContext, verdicts: Verdicts) -> list[Verdict]:
    return context.store.get_rows(tables.VERDICTS, verdicts.table)


def _counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    status = [verdict.status for verdict in verdicts]
    return {
        "scored": status.count("scored"),
        "timeouts": status.count("timeout"),
        "errors": status.count("error"),
        "successes": sum(verdict.success is True for verdict in verdicts),
    }


def _sources(functions: Sequence[str]) -> list[str]:
    """Modules and files of the verifier and of the user's own rewards: an edited one may judge otherwise."""
    return [function.rpartition(":")[0] for function in functions if function != "verifier"]
