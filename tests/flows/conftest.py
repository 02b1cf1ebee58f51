"""Small real runs: a tiny policy on the household world, in this process, under a real Prefect server."""

from pathlib import Path

import pytest

from gleaner.conf.compose import compose
from gleaner.conf.schema import GleanerSettings
from gleaner.tasks.residents import discard_residents

HOUSEHOLD = [
    "environment=household",
    "environment.layout=fixed",
    "environment.max_turns=8",
    "environment.receptacles=3",
]
SMALL = [
    "policy=tiny",
    "policy.hidden=32",
    "policy.heads=2",
    "run.prompts_per_step=3",
    "run.group_size=4",
    "run.steps=2",
    "sampling.max_new_tokens=8",
    "warmstart.demonstrations=40",
    "warmstart.steps=10",
    "warmstart.batch=8",
]


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for the session: runs share their warm start, as arms of a comparison do."""
    return tmp_path_factory.mktemp("flows") / "store"


@pytest.fixture
def small(prefect_api: str, shared_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """small(*overrides) gives settings of a run named after the test, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    discard_residents()

    def settings(*overrides: str) -> GleanerSettings:
        world = [] if any(override.startswith("environment=") for override in overrides) else HOUSEHOLD
        return compose(
            [*world, *SMALL, f"run.name={tmp_path.name}", f"storage.path={shared_store}", *overrides]
        )

    return settings
