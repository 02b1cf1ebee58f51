"""Runs in processes of their own, so that they can be killed."""

import atexit
import json
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gleaner.conf.schema import LocalStorage
from gleaner.flows.children import FORKS
from gleaner.tasks.faults import VARIABLE
from gleaner.tasks.journal import Journal
from gleaner.tasks.store import ObjectStore

OVERRIDES = (
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
    "warmstart.demonstrations=300",
    "warmstart.steps=400",
    "warmstart.batch=8",
    "warmstart.lr=0.003",  # long enough to succeed at times: otherwise no gradient moves the weights that tests compare
)


class Started:
    """A run in a process of its own. Processes are forked from a server that has imported everything, which saves the
    ten seconds that imports take; from there on it is the command line, from its arguments to its exit code."""

    def __init__(self, folder: Path, words: list[str], variables: dict[str, str]) -> None:
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}.txt"
        self._process = FORKS.Process(target=_command_line, args=(folder, words, variables, self.log))
        self._process.start()

    def wait(self, timeout: float = 240) -> int:
        """The exit code; -9 after SIGKILL."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            pytest.fail(f"the run did not end within {timeout} s:\n{self.output}")
        code = self._process.exitcode
        assert code is not None
        return code

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _command_line(folder: Path, words: list[str], variables: dict[str, str], log: Path) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    with log.open("wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    sys.argv = ["gleaner", *words]
    from gleaner.flows.cli import main

    try:
        main()
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        raise
    finally:
        # A forked child leaves without them; the command line's own process closes its verifiers here.
        atexit._run_exitfuncs()


@dataclass
class Workplace:
    """A folder in which a run is started, killed and started again."""

    folder: Path
    overrides: Sequence[str] = OVERRIDES
    output: str = ""

    def start(self, *overrides: str, fail_at: str | None = None, method: str = "grpo") -> int:
        """Start the run and wait for its end; returns the exit code (-9 after SIGKILL)."""
        started = self.begin(*overrides, fail_at=fail_at, method=method)
        code = started.wait()
        self.output = started.output
        return code

    def begin(self, *overrides: str, fail_at: str | None = None, method: str = "grpo") -> Started:
        return Started(self.folder, ["run", method, *self.overrides, *overrides], {VARIABLE: fail_at or ""})

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
    return place.folder / ".gleaner"


def begin_warm(
    warm: Path, folder: Path, overrides: Sequence[str] = OVERRIDES, without: Sequence[str] = ("runs",)
) -> Workplace:
    """A folder that holds what `warm` has stored, but for its runs."""
    shutil.copytree(warm, folder / ".gleaner", ignore=shutil.ignore_patterns("spool", "prefect", *without))
    return Workplace(folder, overrides)


@pytest.fixture
def workplace(warm_store: Path, tmp_path: Path) -> Workplace:
    return begin_warm(warm_store, tmp_path)


@pytest.fixture(scope="session")
def uninterrupted(warm_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The same run, never killed."""
    place = begin_warm(warm_store, tmp_path_factory.mktemp("uninterrupted"))
    assert place.start() == 0, place.output
    norms = [entry["metrics"]["update/grad_norm"] for _, entry in place.journal.entries()]
    assert min(norms) > 0, f"a step without a gradient shows nothing of how updates are resumed: {norms}"
    return place
