"""Versions: what a slot's weights are called before they exist, and how they come back after a crash.

A version's name is a digest of its parent, the signal, the update's settings and the code. `version` records form a
chain to the start; some have a checkpoint beside them. `materialise` takes the nearest checkpoint and applies the
signals since: nothing is sampled again.
"""

from collections.abc import Callable
from typing import Any

from gleaner.conf.errors import CorruptArtifactError
from gleaner.conf.schema import UpdateSettings
from gleaner.models.training import Learner
from gleaner.tasks.faults import fault_point
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.store import ObjectStore, Record
from gleaner.tasks.stored_signals import load_signal


def update_code() -> str:
    return code_version("gleaner.models.training", "gleaner.models.objective")


def version_name(parent: str, signal: str, slot: str, update: UpdateSettings) -> str:
    return cache_key("version", update_code(), parent=parent, signal=signal, slot=slot, update=update)


def write_checkpoint(store: ObjectStore, version: str, learner: Learner, step: int) -> None:
    """Make `version` a place that `materialise` can start from."""
    fault_point("checkpoint", step, "before_write")
    tensors = store.put_tensors(learner.state_tensors(), learner.state_json())
    fault_point("checkpoint", step, "before_publish")
    store.publish(_checkpoint(version), Record({"state": tensors}, {"version": version}, update_code()))


def has_checkpoint(store: ObjectStore, version: str) -> bool:
    return store.lookup(_checkpoint(version)) is not None


def materialise(
    store: ObjectStore, learner: Learner, version: str, start: str, load_start: Callable[[], None]
) -> dict[str, Any]:
    """Bring `learner` to `version`.

    Args:
        start, load_start: the run's start version, and what loads it.

    Returns:
        replayed: signals that were applied again.

    Raises:
        CorruptArtifactError: the chain of versions is broken.
    """
    pending: list[Record] = []
    while True:
        if version == start:
            # Never from a checkpoint: a policy and a critic that share a start would find each other's.
            load_start()
            break
        checkpoint = store.lookup(_checkpoint(version))
        if checkpoint is not None:
            learner.load_state(*store.get_tensors(checkpoint.objects["state"]))
            break
        record = store.lookup(version)
        if record is None:
            raise CorruptArtifactError(
                f"version {version} has neither a checkpoint nor a record of its signal: restore the store, or start "
                "the run under another run.name"
            )
        pending.append(record)
        version = record.facts["parent"]
    for record in reversed(pending):
        learner.apply(load_signal(store, record.objects["signal"]))
    return {"replayed": len(pending)}


def _checkpoint(version: str) -> str:
    return f"checkpoint-{version}"
