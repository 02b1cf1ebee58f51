"""A whole run whose store and MLflow artifacts lie in a bucket: killed, started again, read through the bank."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs
import yaml

from gleaner.conf.schema import S3Storage
from gleaner.tasks.faults import VARIABLE, fail_at
from gleaner.tasks.journal import Journal
from gleaner.tasks.store import ObjectStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

RUN = "on-s3"
SHARD = 24
ROLLOUTS = 3 * 6 * 8
OVERRIDES = [
    "environment=household",
    "policy=tiny",
    "policy.hidden=32",
    f"run.name={RUN}",
    "run.steps=3",
    "run.prompts_per_step=6",
    "run.group_size=8",
    "run.checkpoint_every=4",  # none before the end: a resume reads and applies the stored signals again
    f"sampling.rows_per_shard={SHARD}",  # two shards of three groups in a step
    "sampling.max_new_tokens=8",
    "environment.max_turns=8",
    "environment.layout=fixed",
    "environment.receptacles=3",
    "warmstart.demonstrations=300",  # long enough that some groups succeed in part: updates that move weights
    "warmstart.steps=400",
    "warmstart.batch=8",
    "warmstart.lr=0.003",
]


@dataclass(frozen=True)
class Place:
    """A prefix of the bucket, and the local folder that commands run in."""

    folder: Path
    storage: S3Storage

    def begin(self, *words: str, fail_at: str = "") -> subprocess.Popen[str]:
        """Start the command line with this store in a process of its own; its credentials come from AWS_*."""
        settings = {name: value for name, value in self.storage.model_dump().items() if name != "kind"}
        store = ["storage=s3", *(f"storage.{name}={value}" for name, value in settings.items())]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "gleaner.flows.cli", *words, *store],
            cwd=self.folder,
            env={**os.environ, VARIABLE: fail_at, "COLUMNS": "200"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def command(self, *words: str, fail_at: str = "") -> tuple[int, str]:
        return ended(self.begin(*words, fail_at=fail_at))

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.storage)

    @property
    def journal(self) -> Journal:
        return Journal(self.store, RUN)

    @property
    def summary(self):
        return json.loads((self.folder / f".gleaner/runs/{RUN}/summary.json").read_text())

    def rows(self, query: str):
        """Of MLflow's database."""
        with sqlite3.connect(self.folder / ".gleaner/mlflow.db") as database:
            return database.execute(query).fetchall()


@dataclass(frozen=True)
class Runs:
    killed: Place
    codes: tuple[int, int]
    uninterrupted: Place
    secret: str
    bucket: s3fs.S3FileSystem


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, output)."""
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    return process.returncode, output


@pytest.fixture(scope="module")
def runs(prefect_api, seaweed, tmp_path_factory):
    """A run killed with a shard sampled and not yet stored, then started again; beside it one that nothing stops."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seaweed.environment().items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # it keeps an earlier test's credentials
        bucket = s3fs.S3FileSystem(endpoint_url=seaweed.url, use_listings_cache=False)
        name = f"bucket-{uuid.uuid4().hex}"
        bucket.mkdir(name)

        def place(prefix: str) -> Place:
            storage = S3Storage(bucket=name, prefix=prefix, endpoint_url=seaweed.url)
            return Place(tmp_path_factory.mktemp(prefix), storage)

        killed, uninterrupted = place("killed"), place("uninterrupted")
        train = ("run", "grpo", *OVERRIDES)
        beside = uninterrupted.begin(*train)
        try:
            first, output = killed.command(*train, fail_at=fail_at("sample", 2, "shard_1_sampled"))
            assert killed.journal.steps() == [0, 1], output
            second, output = killed.command(*train)
            assert second == 0, output
        finally:
            code, output = ended(beside)
        assert code == 0, output
        yield Runs(killed, (first, second), uninterrupted, seaweed.secret_key, bucket)


def test_a_killed_run_ends_where_an_uninterrupted_one_ends(runs):
    assert runs.codes == (-9, 0)
    mine, theirs = runs.killed, runs.uninterrupted
    assert mine.summary["version"] == theirs.summary["version"]
    checkpoints = [
        place.store.lookup(f"checkpoint-{place.summary['version']}").objects["state"]
        for place in (mine, theirs)
    ]
    assert checkpoints[0] == checkpoints[1]  # digests: the same weights, optimizer and RNG, bit for bit
    norms = [mine.journal.read(step)["metrics"]["update/grad_norm"] for step in (0, 1)]
    assert max(norms) > 0  # the resume had an update to repeat
    assert mine.journal.steps() == theirs.journal.steps() == [0, 1, 2]
    for step in range(3):
        for part in ("rollouts", "verdicts", "signal"):
            assert mine.journal.read(step)[part] == theirs.journal.read(step)[part]


def test_what_the_killed_process_sampled_counts(runs):
    def attempts(place):
        store = place.store
        return sorted(store.attempts(key) for key in store.list_keys() if key.startswith("rollouts-"))

    assert attempts(runs.killed) == [1, 1, 1, 1, 1, 2]
    assert attempts(runs.uninterrupted) == [1] * 6
    assert runs.uninterrupted.summary["budget"]["rollouts"] == ROLLOUTS
    assert runs.killed.summary["budget"]["rollouts"] == ROLLOUTS + SHARD


def test_the_bank_lists_and_exports_it_without_answers(runs):
    code, output = runs.killed.command("bank", "ls")
    assert code == 0, output
    assert re.search(rf"{RUN}\s*│\s*3\s*│\s*{ROLLOUTS}\s*│\s*{ROLLOUTS}\s*│", output), output

    def exported(file, *options):
        code, output = runs.killed.command("bank", "export", RUN, file, *options)
        assert code == 0, output
        return [json.loads(line) for line in (runs.killed.folder / file).read_text().splitlines()]

    plain, full = exported("plain.jsonl"), exported("full.jsonl", "--answers")
    assert len(plain) == len(full) == ROLLOUTS
    assert all(line["verdict"]["status"] == "scored" for line in plain)
    assert not any({"payload", "environment_result"} & line.keys() for line in plain)
    assert not any("details" in line["verdict"] for line in plain)
    text = (runs.killed.folder / "plain.jsonl").read_text()
    for line in full:
        assert line["payload"]
        assert json.dumps(line["payload"], ensure_ascii=False) not in text


def test_mlflow_keeps_its_artifacts_in_the_bucket(runs):
    for place in (runs.killed, runs.uninterrupted):
        storage = place.storage
        [(uri, status)] = place.rows("SELECT artifact_uri, status FROM runs")
        assert uri.startswith(f"s3://{storage.bucket}/{storage.prefix}-mlartifacts/")
        assert status == "FINISHED"
        root = uri.removeprefix("s3://")
        names = {path.removeprefix(f"{root}/") for path in runs.bucket.find(root)}
        assert names >= {
            "settings.yaml",
            "summary.md",
            "ledger.json",
            "rollouts.json",
            "plots/learning.png",
            "plots/ledger.png",
        }
        assert runs.bucket.cat_file(f"{root}/plots/learning.png").startswith(b"\x89PNG")
        settings = yaml.safe_load(runs.bucket.cat_file(f"{root}/settings.yaml"))
        assert settings["storage"] == storage.model_dump()
        assert not (place.folder / ".gleaner/mlartifacts").exists()
        assert not (place.folder / ".gleaner/store").exists()


def test_the_secret_is_nowhere_but_in_the_environment(runs):
    secret = runs.secret.encode()
    for place in (runs.killed, runs.uninterrupted):
        journal = runs.bucket.find(f"{place.storage.bucket}/{place.storage.prefix}/runs/{RUN}")
        assert len(journal) == 4  # the header and three steps
        parameters = dict(place.rows("SELECT key, value FROM params"))
        assert parameters["storage.bucket"] == place.storage.bucket
        # Names alone, so that a failure does not print what it found.
        assert [name for name, value in parameters.items() if runs.secret in value] == []
        local = [path for path in place.folder.rglob("*") if path.is_file()]
        assert {"mlflow.db", "settings.yaml", "summary.json"} <= {path.name for path in local}
        assert [str(path) for path in local if secret in path.read_bytes()] == []
    stored = runs.bucket.find(runs.killed.storage.bucket)
    assert [path for path in stored if secret in runs.bucket.cat_file(path)] == []
    prefect = [path for path in Path(os.environ["PREFECT_HOME"]).rglob("*") if path.is_file()]
    assert any(path.name == "prefect.db" for path in prefect)
    assert [str(path) for path in prefect if secret in path.read_bytes()] == []
