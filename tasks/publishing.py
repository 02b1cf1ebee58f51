"""Publishing: the trained policy as a folder that transformers and vLLM load, in the store and on this disk."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gleaner.models.policy import save_policy, tokenizer_digest
from gleaner.tasks.context import RunContext
from gleaner.tasks.keys import cache_key, code_version
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.residents import Resident, resident
from gleaner.tasks.store import Record
from gleaner.tasks.versions import has_checkpoint, write_checkpoint

RUNS_FOLDER = Path(".gleaner/runs")


@dataclass(frozen=True)
class Published:
    """Key of the policy in the store, and the local folder that holds a copy."""

    key: str
    folder: str


@phase(gpu=True)
def publish(context: RunContext, version: str, name: str = "policy") -> Made[Published]:
    """Store a version's policy (LoRA merged) and a checkpoint to go on from; copy it to the folder `name` of the run's
    folder. The run's own policy, called `policy`, can then be named as a teacher or a peer."""
    store = context.store
    key = policy_key(version)
    code = code_version("gleaner.models.policy")

    def make() -> Record:
        holder = resident(context)
        holder.bring_to(version)
        if not has_checkpoint(store, version):
            write_checkpoint(store, version, holder.learner, context.settings.run.steps)
        folder = RUNS_FOLDER / context.run_id / f"publishing-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        save_policy(holder.policy, folder)
        objects = store.put_folder(folder)
        shutil.rmtree(folder)
        facts = {"version": version, "run_id": context.run_id, "training": _training_record(context, holder)}
        return Record(objects, facts, code)

    record, hit = store.memoise(key, make)
    if name == "policy":
        store.publish(run_key(context.run_id, len(context.journal.steps())), record)
    # Not emptied before: two processes of one run may be here at once, and each file is replaced whole.
    folder = RUNS_FOLDER / context.run_id / name
    store.fetch_folder(record.objects, folder)
    return Made(Published(key, str(folder)), hit)


def _training_record(context: RunContext, holder: Resident) -> dict[str, Any]:
    """What a later student must know of its teacher: (successes, scored) of each training step, and under which
    conditions they came about."""
    counts = [entry["counts"] for _, entry in context.journal.entries()]
    return {
        "environment": context.settings.environment.model_dump(mode="json"),
        "temperature": context.settings.sampling.temperature,
        "tokenizer": tokenizer_digest(holder.policy.tokenizer),
        "stop_ids": sorted(holder.chat.stop_ids),
        "steps": [[count["successes"], count["scored"]] for count in counts],
    }


def run_key(run: str, steps: int) -> str:
    """Key under which a run of so many steps published its policy."""
    return cache_key("published", "1", run=run, steps=steps)


def policy_key(version: str) -> str:
    """Key of a version's published policy."""
    return cache_key("policy", "2", version=version)
