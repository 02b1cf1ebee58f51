"""The policy that a run starts from: built, loaded or warm-started, once, and stored under its version."""

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

from gleaner.conf.schema import PretrainedPolicy, TinyShape
from gleaner.models.policy import build_policy, save_policy
from gleaner.models.warmstart import warmstart
from gleaner.tasks.context import RunContext
from gleaner.tasks.keys import cache_key, code_version, digest_json
from gleaner.tasks.phase import Made, phase
from gleaner.tasks.store import Record
from gleaner.tasks.tokenizers import tokenizer_of


@phase(gpu=True)
def start_policy(context: RunContext) -> Made[dict[str, Any]]:
    """Build or load the policy, warm-start it if the settings say so, and store it.

    A pretrained policy without a warm start is not copied into the store: its path and the digest of its files
    name it.

    Returns:
        version, and metrics of the warm start (empty without one).
    """
    record, hit = ensure_start(context)
    return Made({"version": record.facts["version"], "metrics": record.facts["metrics"]}, hit)


def ensure_start(context: RunContext) -> tuple[Record, bool]:
    """The start version's record, made if there is none; and whether it was there."""
    key = start_key(context)
    return context.store.memoise(key, lambda: _make(context, key))


@functools.lru_cache(maxsize=16)
def start_key(context: RunContext) -> str:
    """The name of the start version: a digest of policy, warm start, environment, seed and code."""
    settings = context.settings
    needs_environment = isinstance(settings.policy, TinyShape) or settings.warmstart is not None
    return cache_key(
        "start",
        code_version("gleaner.models.policy", "gleaner.models.warmstart"),
        policy=settings.policy,
        weights=_local_weights(settings.policy.path)
        if isinstance(settings.policy, PretrainedPolicy)
        else None,
        warmstart=settings.warmstart,
        environment=context.environment_digest if needs_environment else None,
        seed=settings.run.seed,
    )


def _make(context: RunContext, version: str) -> Record:
    settings = context.settings
    code = code_version("gleaner.models.policy", "gleaner.models.warmstart")
    if isinstance(settings.policy, PretrainedPolicy) and settings.warmstart is None:
        return Record({}, {"version": version, "metrics": {}}, code)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "policy"
        tokenizer = tokenizer_of(context, settings.policy) if isinstance(settings.policy, TinyShape) else None
        policy = build_policy(settings.policy, context.shared_environment, settings.run.seed, tokenizer)
        metrics: dict[str, float] = {}
        if settings.warmstart is not None:
            started = time.perf_counter()
            trained = warmstart(
                policy,
                context.environment,
                settings.warmstart,
                settings.run.seed,
                Path(scratch) / "warmstart",
            )
            metrics = {f"warmstart/{name}": value for name, value in trained.items()}
            metrics["seconds/warmstart"] = time.perf_counter() - started
        save_policy(policy, folder)
        return Record(context.store.put_folder(folder), {"version": version, "metrics": metrics}, code)


def _local_weights(path: str) -> str | None:
    """Digest of a local checkpoint's file names, sizes and times: enough to notice another checkpoint at one path."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    return digest_json(
        [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted(folder.iterdir())
            if file.is_file()
        ]
    )
