"""The store on a real S3 server: the promises of tests/tasks/test_store.py, and what only S3 has."""

import importlib.util
import multiprocessing
import random
from pathlib import Path

import pytest
import s3fs

from gleaner.conf.errors import ConfigurationError
from gleaner.tasks.journal import Journal, runs
from gleaner.tasks.store import ObjectStore, Record, forget_decoded

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")
CONTRACT = Path(__file__).parents[1] / "tasks" / "test_store.py"
_spec = importlib.util.spec_from_file_location("store_contract", CONTRACT)
contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(contract)


@pytest.fixture
def store(s3_storage):
    forget_decoded()
    s3fs.S3FileSystem.clear_instance_cache()  # fsspec keeps connections, and an earlier test's credentials with them
    return ObjectStore(s3_storage, attempts=3, timeout_seconds=30)


@pytest.mark.parametrize("promise", contract.PROMISES, ids=lambda promise: promise.__name__)
def test_promise(promise, store, tmp_path):
    takes_folder = "tmp_path" in promise.__code__.co_varnames[: promise.__code__.co_argcount]
    promise(store, tmp_path) if takes_folder else promise(store)


def _publish_and_report(storage, number, barrier, results):
    store = ObjectStore(storage)
    store.put_bytes(b"connected")
    for key in range(5):
        barrier.wait()
        results.put((key, store.publish(f"race-{key}", Record({}, {"by": number})).facts["by"]))


def test_of_eight_processes_that_publish_at_once_one_wins(store):
    barrier, results = FORK.Barrier(8), FORK.Queue()
    children = [
        FORK.Process(target=_publish_and_report, args=(store.storage, number, barrier, results))
        for number in range(8)
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=120) for _ in range(5 * 8)]
    for child in children:
        child.join()
    for key in range(5):
        winners = {by for of, by in found if of == key}
        assert winners == {store.lookup(f"race-{key}").facts["by"]}


def test_of_eight_processes_one_makes(store):
    found = contract.race(store.storage)
    assert sorted(hit for _, hit in found) == [False] + [True] * 7
    assert len({maker for maker, _ in found}) == 1
    assert store.attempts("k") == 1


def test_wrong_credentials_name_the_variables_and_not_their_values(s3_storage, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret")
    for attempt in (lambda s: s.check(), lambda s: s.get_bytes("0" * 64), lambda s: s.lookup("k")):
        with pytest.raises(
            ConfigurationError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) as error:
            attempt(_another_store(s3_storage))
        assert "a-wrong-secret" not in str(error.value)


def test_no_credentials_name_the_variables(s3_storage, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigurationError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        _another_store(s3_storage).check()


def _another_store(storage):
    """A store that shares no connection with the earlier ones, whose credentials fsspec keeps."""
    s3fs.S3FileSystem.clear_instance_cache()
    return ObjectStore(storage, attempts=1)


def test_a_large_file_goes_in_parts_and_comes_back_whole(store, tmp_path):
    source = tmp_path / "weights.bin"
    source.write_bytes(random.Random(0).randbytes(120 * 2**20))
    ref = store.put_file(source)
    record = store.publish("checkpoint", Record({"weights": ref}))
    assert ObjectStore(store.storage).lookup("checkpoint") == record
    store.fetch(ref, tmp_path / "copy.bin")
    assert (tmp_path / "copy.bin").read_bytes() == source.read_bytes()


def test_a_journal_of_several_hundred_steps_is_listed_and_read(store):
    journal = Journal(store, "long")
    journal.header({"seed": 0})
    for step in range(300):
        journal.append(step, {"version": f"v{step}"})
    again = Journal(store, "long")
    assert runs(store) == ["long"]
    assert again.last() == (299, {"version": "v299"})
    assert [entry["version"] for _, entry in again.entries()] == [f"v{step}" for step in range(300)]
