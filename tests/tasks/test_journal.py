import time
from pathlib import Path

import pytest

from gleaner.conf.errors import ConfigurationError, CorruptArtifactError, JournalConflictError
from gleaner.conf.schema import GleanerSettings
from gleaner.tasks.journal import Journal, runs

ENTRY = {
    "rollouts": ["aa"],
    "verdicts": "bb",
    "version": "v1",
    "metrics": {"seconds": 1.0},
    "budget": {"tokens": 5},
}


@pytest.fixture
def journal(store):
    return Journal(store, "run-1")


def test_steps_come_back_in_order(journal, store):
    assert journal.last() is None
    assert list(journal.entries()) == []
    for step in range(12):
        journal.append(step, ENTRY | {"version": f"v{step}"})
    again = Journal(store, "run-1")
    assert again.steps() == list(range(12))
    assert [entry["version"] for _, entry in again.entries(start=9)] == ["v9", "v10", "v11"]
    assert again.last() == (11, ENTRY | {"version": "v11"})
    assert again.read(3) == ENTRY | {"version": "v3"}


def test_an_equal_step_is_adopted_with_the_first_ones_observations(journal):
    journal.append(0, ENTRY)
    adopted = journal.append(0, ENTRY | {"metrics": {"seconds": 2.0}, "budget": {"tokens": 6}})
    assert adopted == ENTRY
    assert journal.read(0) == ENTRY


def test_another_history_of_a_step_is_a_conflict(journal):
    journal.append(0, ENTRY)
    with pytest.raises(
        JournalConflictError, match=r'step 0 of run run-1 .*version: stored "v1", now "v2".*run\.name'
    ):
        journal.append(0, ENTRY | {"version": "v2"})
    with pytest.raises(JournalConflictError, match="signal: stored nothing"):
        journal.append(0, ENTRY | {"signal": "cc"})
    assert journal.read(0) == ENTRY


def test_what_is_read_may_be_changed_by_the_reader(journal):
    journal.append(0, ENTRY)
    journal.read(0)["rollouts"].append("changed")
    assert journal.read(0) == ENTRY


def test_an_entry_that_is_no_json_is_refused(journal):
    with pytest.raises(ConfigurationError, match=r"metrics\.loss is nan"):
        journal.append(0, ENTRY | {"metrics": {"loss": float("nan")}})
    with pytest.raises(ConfigurationError, match="negative"):
        journal.append(-1, ENTRY)
    assert journal.steps() == []


def test_an_altered_entry_is_refused(journal, store):
    journal.append(0, ENTRY)
    path = "runs/run-1/steps/00000000.json"
    data = store.files.read(path)
    for altered in (data.replace(b'"v1"', b'"v2"'), data[:-10], b""):
        store.files.write(path, altered)
        with pytest.raises(CorruptArtifactError, match="step 0 of run run-1 was truncated or altered"):
            Journal(store, "run-1").read(0)


def test_a_missing_step_in_the_middle_is_named(journal, store):
    for step in range(5):
        journal.append(step, ENTRY)
    store.files.delete("runs/run-1/steps/00000002.json")
    with pytest.raises(CorruptArtifactError, match="step 2 of run run-1 is missing"):
        Journal(store, "run-1").last()


def test_the_same_settings_may_start_a_run_again(journal, store):
    first = journal.header(GleanerSettings())
    assert Journal(store, "run-1").header(GleanerSettings()) == first
    assert first["settings"]["run"]["seed"] == 0
    assert first["run_id"] == "run-1"


def test_other_settings_under_the_same_name_are_listed_with_the_fix(journal, store):
    journal.header(GleanerSettings())
    changed = GleanerSettings.model_validate({"run": {"seed": 3}, "sampling": {"temperature": 0.7}})
    with pytest.raises(ConfigurationError) as error:
        Journal(store, "run-1").header(changed)
    message = str(error.value)
    assert "run.seed: stored 0, now 3" in message
    assert "sampling.temperature: stored 1.0, now 0.7" in message
    assert "set run.name to a new name" in message
    assert "group_size" not in message


def test_settings_that_one_version_of_the_schema_lacks_are_listed_too(journal, store):
    journal.header({"run": {"seed": 0}})
    with pytest.raises(ConfigurationError, match=r"run\.steps: stored nothing, now 5"):
        Journal(store, "run-1").header({"run": {"seed": 0, "steps": 5}})


def test_runs_are_listed_by_name(store):
    assert runs(store) == []
    for name in ("b", "a.2", "a-1"):
        Journal(store, name).header({})
    assert runs(store) == ["a-1", "a.2", "b"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101])
def test_a_name_that_is_no_folder_is_refused(name, local_store):
    with pytest.raises(ConfigurationError, match=r"run\.name"):
        Journal(local_store, name)


def test_ten_thousand_steps_are_listed_quickly(local_store):
    """This took 20 ms here; the bound leaves room for a busy machine."""
    journal = Journal(local_store, "long")
    folder = Path(local_store.storage.path) / "runs" / "long" / "steps"
    folder.mkdir(parents=True)
    for step in range(10_000):
        (folder / f"{step:08d}.json").write_bytes(b"{}")
    journal.append(10_000, ENTRY)
    start = time.perf_counter()
    again = Journal(local_store, "long")
    assert again.last() == (10_000, ENTRY)
    assert time.perf_counter() - start < 1.0
