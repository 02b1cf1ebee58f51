"""Runs in processes of their own, so that they can be killed."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gleaner.conf.schema import LocalStorage
from gleaner.tasks.faults import VARIABLE
from gleaner.tasks.journal import Journal
from gleaner.tasks.store import ObjectStore

OVERRIDES = [
    "environment=household",
    "policy=tiny",
    "policy.hidden=32",
    "run.name=faulty",
    "run.steps=3",
    "run.prompts_per_step=4",
    "run.group_size=4",
    "run.checkpoint_every=2",
    "sampling.rows_per_shard=8",  # two shards of two groups in a step
    "sampling.max_new_tokens=8",
    "environment.max_turns=8",
    "environment.layout=fixed",
    "environment.receptacles=3",
    "warmstart.demonstrations=40",
    "warmstart.steps=10",
    "warmstart.batch=8",
]


@dataclass
class Workplace:
    """A folder in which a run is started, killed and started again."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def start(self, *overrides: str, fail_at: str | None = None, method: str = "grpo") -> int:
        """Start the run and wait for its end; returns the exit code (-9 after SIGKILL)."""
        process = self.begin(*overrides, fail_at=fail_at, method=method)
        self.output = process.communicate(timeout=240)[0].decode(errors="replace")
        return process.returncode

    def begin(
        self, *overrides: str, fail_at: str | None = None, method: str = "grpo"
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "gleaner.flows.cli", "run", method, *OVERRIDES, *overrides]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **self.variables}
        variables.pop(VARIABLE, None)
        if fail_at is not None:
            variables[VARIABLE] = fail_at
        return subprocess.Popen(
            command, cwd=self.folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(LocalStorage(path=str(self.folder / ".gleaner/store")))

    @property
    def journal(self) -> Journal:
        return Journal(self.store, "faulty")

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / ".gleaner/runs/faulty/summary.json").read_text())

    def final_state(self) -> str:
        """Digest of the last version's weights, optimizer and RNG: equal digests are equal bits."""
        record = self.store.lookup(f"checkpoint-{self.summary['version']}")
        assert record is not None
        return record.objects["state"]

    def made(self, kind: str) -> dict[str, int]:
        """Key → times that making it was begun, of every artifact of a kind."""
        store = self.store
        return {key: store.attempts(key) for key in store.list_keys() if key.startswith(f"{kind}-")}


@pytest.fixture(scope="session")
def warm_store(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the start policy, so that every test begins at the first step."""
    place = Workplace(tmp_path_factory.mktemp("warm"))
    assert place.start(method="warmstart") == 0, place.output
    return place.folder / ".gleaner/store"


@pytest.fixture
def workplace(warm_store: Path, tmp_path: Path) -> Workplace:
    shutil.copytree(warm_store, tmp_path / ".gleaner/store")
    shutil.rmtree(tmp_path / ".gleaner/store/runs", ignore_errors=True)
    return Workplace(tmp_path)


@pytest.fixture(scope="session")
def uninterrupted(warm_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The same run, never killed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    shutil.copytree(warm_store, folder / ".gleaner/store")
    shutil.rmtree(folder / ".gleaner/store/runs", ignore_errors=True)
    place = Workplace(folder)
    assert place.start() == 0, place.output
    return place
