"""What every phase of a run needs to know, in a form that any process can take up."""

import functools
from dataclasses import dataclass

from gleaner.conf.schema import AnyStorage, GleanerSettings
from gleaner.models.environments import make_environment
from gleaner.models.environments.base import Environment
from gleaner.models.verification import VerifierPool
from gleaner.tasks.journal import Journal
from gleaner.tasks.keys import code_version, digest_json
from gleaner.tasks.store import ObjectStore


@dataclass(frozen=True)
class RunContext:
    """A run's name and settings. Two short strings: Prefect walks through every argument of a task."""

    run_id: str
    settings_json: str

    @classmethod
    def of(cls, run_id: str, settings: GleanerSettings) -> "RunContext":
        return cls(run_id, settings.model_dump_json())

    @property
    def settings(self) -> GleanerSettings:
        return _settings(self.settings_json)

    @property
    def store(self) -> ObjectStore:
        return _store(self.settings.storage)

    @property
    def journal(self) -> Journal:
        return _journal(self.settings.storage, self.run_id)

    @property
    def environment(self) -> Environment:
        return _environment(self.settings_json)

    @property
    def shared_environment(self) -> Environment:
        """The environment of seed 0: what must be alike for every seed (a tiny policy's tokenizer) is made from it."""
        return _shared_environment(self.settings_json)

    @property
    def environment_digest(self) -> str:
        """Digest of everything about the environment that a rollout may depend on."""
        return _environment_digest(self.settings_json)

    @property
    def verifiers(self) -> VerifierPool:
        """The process's pool of verifier processes, started once."""
        verification = self.settings.verification
        return _verifiers(verification.workers, verification.deadline_seconds)


@functools.lru_cache(maxsize=16)
def _settings(settings_json: str) -> GleanerSettings:
    return GleanerSettings.model_validate_json(settings_json)


@functools.lru_cache(maxsize=16)
def _store(storage: AnyStorage) -> ObjectStore:
    return ObjectStore(storage)


@functools.lru_cache(maxsize=16)
def _journal(storage: AnyStorage, run_id: str) -> Journal:
    return Journal(_store(storage), run_id)


@functools.lru_cache(maxsize=4)
def _environment(settings_json: str) -> Environment:
    settings = _settings(settings_json)
    return make_environment(settings.environment, settings.run.seed)


@functools.lru_cache(maxsize=4)
def _shared_environment(settings_json: str) -> Environment:
    return make_environment(_settings(settings_json).environment, 0)


@functools.lru_cache(maxsize=16)
def _environment_digest(settings_json: str) -> str:
    environment = _settings(settings_json).environment
    return digest_json(
        {
            "settings": environment,
            "version": _environment(settings_json).version,
            "code": code_version(type(_environment(settings_json)).__module__),
        }
    )


@functools.lru_cache(maxsize=2)
def _verifiers(workers: int, deadline_seconds: float) -> VerifierPool:
    return VerifierPool(workers, deadline_seconds).__enter__()
