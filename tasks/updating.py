"""The update: one signal applied to one slot, under a name that exists before the weights do."""

import time
from dataclasses import dataclass

from gleaner.tasks.context import RunContext
from gleaner.tasks.faults import fault_point
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.residents import discard_residents, resident
from gleaner.tasks.store import Record
from gleaner.tasks.stored_signals import load_signal
from gleaner.tasks.versions import update_code, version_name, write_checkpoint


@dataclass(frozen=True)
class Updated:
    """The new version of a slot, the update's metrics, and the seconds that it took."""

    version: str
    metrics: dict[str, float]
    seconds: float


@phase(gpu=True)
def update(context: RunContext, parent: str, signal: str, step: int, slot: str = "policy") -> Made[Updated]:
    """Apply a stored signal to a slot's `parent` version.

    Running it again, after whatever crash, either finds the version or starts from `parent` as it is stored: a signal
    is never applied twice.
    """
    settings, store = context.settings, context.store
    version = version_name(parent, signal, slot, settings.update)

    def make() -> Record:
        holder = resident(context, slot)
        holder.bring_to(parent)
        fault_point("update", step, "before_optimizer")
        holder.version = ""  # unknown until the update is whole
        started = time.perf_counter()
        metrics = holder.learner.apply(load_signal(store, signal))
        seconds = time.perf_counter() - started
        fault_point("update", step, "after_optimizer")
        holder.version = version
        if (step + 1) % settings.run.checkpoint_every == 0:
            write_checkpoint(store, version, holder.learner, step)
        facts = {"parent": parent, "slot": slot, "step": step, "metrics": metrics, "seconds": seconds}
        return Record({"signal": signal}, facts, update_code())

    try:
        record, hit = store.memoise(version, make)
    except BaseException:
        discard_residents()
        raise
    return Made(Updated(version, record.facts["metrics"], record.facts["seconds"]), hit)
