"""The replay process: tells MLflow what the spools hold, whenever MLflow answers (`python -m gleaner.tasks.replay`).

Commands come as JSON lines on standard input: open, finish, close a spool. When the input ends, or the parent is
gone, a run that never finished is marked KILLED and the process exits within GRACE_SECONDS.

Each (key, step) reaches MLflow once: a run that this process did not create, or a batch whose answer was lost, has
its metric history asked for before anything more is sent.
"""

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from gleaner.tasks.spool import Record, Spool, file_lock

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run, RunTag

RUN_TAG = "gleaner.run_id"
TABLES_TAG = "mlflow.loggedArtifacts"
FLUSH_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 15.0
"""Pauses between attempts during an outage double up to this."""
GRACE_SECONDS = 8.0
METRICS_PER_BATCH = 1_000
OTHERS_PER_BATCH = 100
KEY_LENGTH = 250
REFUSED_FOR_GOOD = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST")


class RunUnavailableError(Exception):
    """The MLflow run or its experiment was deleted, or its creation is locked. A deleted run is created anew and told
    everything again; a deleted experiment waits for the user."""


class ArtifactsWaitError(Exception):
    """MLflow takes records but not an artifact: its artifact store is down, or its library is missing."""


class Replay:
    """One spool and its MLflow run. `run` is the thread; `catch_up` is one pass of it."""

    def __init__(self, command: dict[str, Any]):
        self.wake = threading.Event()
        self.finishing = threading.Event()
        """The run has written its last record: end after a pass that delivered everything."""
        self.abandoned = threading.Event()
        """The run's process is gone: the same, and a run that did not finish was killed."""
        self.closed = threading.Event()
        """Nobody waits any more: end now."""
        self._spool = Spool(Path(command["folder"]))
        self._run_name: str = command["run_id"]
        self._uri: str = command["uri"]
        self._experiment: str = command["experiment"]
        self._parent_run: str | None = command["parent_run"]
        self._artifact_root: str | None = command["artifact_root"]
        self._target = hashlib.sha256(f"{self._uri}\n{self._experiment}".encode()).hexdigest()
        self._state = self._spool.state()
        self._connected: MlflowClient | None = None
        self._steps_in_mlflow: dict[str, set[int]] = {}
        self._history_is_known = False
        """MLflow holds no metric of this run but those in _steps_in_mlflow."""
        self._is_running = False

    def run(self) -> None:
        with self._spool.lock(self.closed) as held:
            if not held:
                return
            self._state = self._spool.state()
            self._state.starting, self._state.error = True, None
            self._spool.write_state(self._state)
            pause = 1.0
            while not self.closed.is_set():
                last = self.finishing.is_set() or self.abandoned.is_set()
                try:
                    self.catch_up()
                except Exception as error:  # whatever MLflow does is an outage: come back later
                    self._note(error)
                    self._rest(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                    continue
                pause = 1.0
                if last:
                    break
                self._rest(FLUSH_SECONDS)
            if self.abandoned.is_set() and self._is_running and self._connected is not None:
                with contextlib.suppress(Exception):
                    self._connected.set_terminated(self._state.mlflow_run_id, "KILLED")

    def catch_up(self) -> None:
        """Send every record, then every artifact that waits.

        Raises:
            ArtifactsWaitError: the records arrived, an artifact did not.
            Exception: whatever MLflow raises; what it acknowledged before is kept in the state.
        """
        client = self._connected = self._connected or self._connect()
        batch: list[Metric] = []
        reached = self._state.offset
        for record, offset in self._spool.records(self._state.offset):
            if record is None:
                self._state.unreadable += 1
            elif record["kind"] == "metrics":
                batch += self._unsent(client, record)
                if len(batch) >= METRICS_PER_BATCH:
                    self._send(client, "metrics", batch)
                    self._acknowledge(offset)
                    batch = []
            else:
                self._send(client, "metrics", batch)
                self._acknowledge(reached)
                batch = []
                self._apply(client, record)
                self._acknowledge(offset)
            reached = offset
        self._send(client, "metrics", batch)
        self._acknowledge(reached)
        self._upload(client)
        if self._state.error is not None:
            self._state.error = None
            self._spool.write_state(self._state)

    # --------------------------------------------------------------------------------------------- records

    def _unsent(self, client: "MlflowClient", record: Record) -> list["Metric"]:
        """The record's metrics that MLflow does not hold, marked as sent."""
        from mlflow.entities import Metric

        step, unsent = int(record["step"]), []
        for key, value in record["values"].items():
            steps = self._steps_in_mlflow.get(key)
            if steps is None:
                steps = self._steps_in_mlflow[key] = set()
                if not self._history_is_known:
                    steps.update(
                        metric.step for metric in client.get_metric_history(self._state.mlflow_run_id, key)
                    )
            if step not in steps:
                steps.add(step)
                unsent.append(Metric(key, value, record["time"], step))
        return unsent

    def _apply(self, client: "MlflowClient", record: Record) -> None:
        """Anything but metrics. Applied twice, it changes nothing more."""
        from mlflow.entities import Dataset, DatasetInput, Param

        run_id, kind = self._state.mlflow_run_id, record["kind"]
        if kind == "start":
            client.update_run(run_id, status="RUNNING")
            self._is_running = True
            held = client.get_run(
                run_id
            ).data.params  # immutable: a resumed run's changed settings become tags
            self._send(
                client,
                "params",
                [Param(key, value) for key, value in record["params"].items() if key not in held],
            )
            changed = {
                f"gleaner.changed.{key}"[:KEY_LENGTH]: value
                for key, value in record["params"].items()
                if held.get(key, value) != value
            }
            self._send(client, "tags", _run_tags({**record["tags"], **changed}))
        elif kind == "tags":
            self._send(client, "tags", _run_tags(record["tags"]))
        elif kind == "table":
            tables = json.loads(client.get_run(run_id).data.tags.get(TABLES_TAG, "[]"))
            entry = {"path": record["path"], "type": "table"}
            if entry not in tables:
                self._send(client, "tags", _run_tags({TABLES_TAG: json.dumps([*tables, entry])}))
        elif kind == "data_set":
            name, digest, counts = record["name"], record["digest"], record["counts"]
            source = json.dumps({"uri": record["source"] or name})
            data_set = Dataset(name, digest, "gleaner", source, profile=json.dumps(counts))
            with self._unless_refused(client):
                client.log_inputs(run_id, [DatasetInput(data_set, [])])
            prompts = {f"gleaner.prompts.{split}": str(count) for split, count in counts.items()}
            tags = {"gleaner.data_set": name, "gleaner.data_digest": digest, **prompts}
            self._send(client, "tags", _run_tags(tags))
        elif kind == "finish":
            client.set_terminated(run_id, record["status"], record["time"])
            self._is_running = False

    def _send(
        self, client: "MlflowClient", kind: Literal["metrics", "params", "tags"], entities: list[Any]
    ) -> None:
        size = METRICS_PER_BATCH if kind == "metrics" else OTHERS_PER_BATCH
        for start in range(0, len(entities), size):
            self._log_or_reject(client, kind, entities[start : start + size])

    def _log_or_reject(self, client: "MlflowClient", kind: str, entities: list[Any]) -> None:
        """Send a batch; of one that MLflow refuses for good, send what it does take and count the rest."""
        batch: dict[str, Any] = {kind: entities}
        with self._unless_refused(client, count=len(entities) == 1) as refusal:
            client.log_batch(self._state.mlflow_run_id, **batch)
        if refusal and len(entities) > 1:
            middle = len(entities) // 2
            self._log_or_reject(client, kind, entities[:middle])
            self._log_or_reject(client, kind, entities[middle:])

    @contextlib.contextmanager
    def _unless_refused(self, client: "MlflowClient", count: bool = True) -> Iterator[list[str]]:
        """Swallow a refusal that no repetition would change, so that one bad entity does not block all that follow;
        the list that it yields then holds the reason."""
        from mlflow.exceptions import MlflowException

        refusal: list[str] = []
        try:
            yield refusal
        except MlflowException as error:
            if error.error_code not in REFUSED_FOR_GOOD:
                raise
            if client.get_run(self._state.mlflow_run_id).info.lifecycle_stage != "active":
                raise RunUnavailableError(
                    f"MLflow's run {self._state.mlflow_run_id} was deleted meanwhile"
                ) from error
            refusal.append(str(error))
            self._state.rejected += count

    def _upload(self, client: "MlflowClient") -> None:
        failures: list[Exception] = []
        for path in self._spool.waiting():
            local = self._spool.take(path)
            folder = str(PurePosixPath(path).parent)
            try:
                client.log_artifact(self._state.mlflow_run_id, str(local), None if folder == "." else folder)
            except Exception as error:  # the other artifacts may fare better
                failures.append(error)
            else:
                local.unlink()
        if failures:
            raise ArtifactsWaitError(_reason(failures[0])) from failures[0]

    def _acknowledge(self, offset: int) -> None:
        if offset != self._state.offset:
            self._state.offset, self._state.error = offset, None
            self._spool.write_state(self._state)

    # ---------------------------------------------------------------------------------- the run in MLflow

    def _connect(self) -> "MlflowClient":
        """Find or create the experiment and the run.

        One process of this machine at a time: MLflow creates a fresh SQLite database and an experiment without
        guarding against a second one that does the same.
        """
        from mlflow import MlflowClient

        is_server = self._uri.startswith(("http:", "https:", "databricks"))
        if is_server:
            self._started()
        with file_lock(self._spool.folder.parent / "create.lock", self.closed) as held:
            if not held:
                raise RunUnavailableError("another process holds the lock for creating runs")
            client = MlflowClient(tracking_uri=self._uri)
            experiment = self._find_experiment(client)
            self._started()
            run, created = self._find_run(client, experiment)
            if self._parent_run is not None:
                parent = self._find_parent(client, experiment)
                client.set_tag(run.info.run_id, "mlflow.parentRunId", parent)
        if self._state.target != self._target or self._state.mlflow_run_id != run.info.run_id:
            self._state.offset = 0  # another MLflow, or a run that somebody removed: tell everything again
        self._history_is_known = created
        self._steps_in_mlflow = {}
        self._state.target, self._state.mlflow_run_id = self._target, run.info.run_id
        self._state.experiment_id = experiment
        if self._uri.startswith(("http:", "https:")):
            address = self._uri.split("://", 1)
            page = f"{address[0]}://{address[1].rsplit('@', 1)[-1].rstrip('/')}"
            self._state.url = f"{page}/#/experiments/{experiment}/runs/{run.info.run_id}"
        else:
            self._state.url = None
        self._spool.write_state(self._state)
        return client

    def _find_experiment(self, client: "MlflowClient") -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            with contextlib.suppress(MlflowException):  # another machine was faster
                return client.create_experiment(self._experiment, artifact_location=self._artifact_root)
            experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None or experiment.lifecycle_stage != "active":
            raise RunUnavailableError(
                f"MLflow's experiment {self._experiment} was deleted: restore it, or set tracking.experiment"
            )
        return str(experiment.experiment_id)

    def _find_run(self, client: "MlflowClient", experiment: str) -> tuple["Run", bool]:
        """The run, and whether it was created here and now."""
        found = self._search(client, experiment, self._run_name)
        if found is not None:
            return found, False
        return self._create(client, experiment, self._run_name), True

    def _find_parent(self, client: "MlflowClient", experiment: str) -> str:
        """MLflow id of the parent, which is named by that id or by its own gleaner.run_id; created if it is not there
        yet, because its own process may not have reached MLflow."""
        from mlflow.exceptions import MlflowException

        name = str(self._parent_run)
        if len(name) == 32 and set(name) <= set("0123456789abcdef"):
            with contextlib.suppress(MlflowException):
                return str(client.get_run(name).info.run_id)
        found = self._search(client, experiment, name) or self._create(client, experiment, name)
        return str(found.info.run_id)

    def _search(self, client: "MlflowClient", experiment: str, name: str) -> "Run | None":
        runs = client.search_runs(
            [experiment], f"tags.`{RUN_TAG}` = '{name}'", order_by=["attributes.start_time ASC"]
        )
        return runs[0] if runs else None

    def _create(self, client: "MlflowClient", experiment: str, name: str) -> "Run":
        return client.create_run(experiment, tags={RUN_TAG: name}, run_name=name)

    def _started(self) -> None:
        if self._state.starting:
            self._state.starting = False
            self._spool.write_state(self._state)

    def _note(self, error: Exception) -> None:
        """Remember the reason. The answer to the last call is unknown, so MLflow is asked again what it holds."""
        self._state.error = _reason(error)
        self._state.starting = False
        if not isinstance(error, ArtifactsWaitError):
            self._connected = None
        with contextlib.suppress(OSError):
            self._spool.write_state(self._state)

    def _rest(self, seconds: float) -> None:
        self.wake.wait(seconds)
        self.wake.clear()


def _run_tags(tags: dict[str, str]) -> list["RunTag"]:
    from mlflow.entities import RunTag

    return [RunTag(key, value) for key, value in tags.items()]


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def serve() -> None:
    """Replay the spools that the parent opens, until it is gone."""
    os.nice(5)  # the run's own processes come first
    parent = os.getppid()
    parent_is_gone = threading.Event()
    replays: dict[str, tuple[Replay, threading.Thread]] = {}

    def obey() -> None:
        for line in sys.stdin.buffer:
            command = json.loads(line)
            if command["do"] == "open":
                if command["s3_endpoint_url"]:
                    os.environ.setdefault("MLFLOW_S3_ENDPOINT_URL", command["s3_endpoint_url"])
                replay = Replay(command)
                thread = threading.Thread(target=replay.run, daemon=True)
                replays[command["folder"]] = (replay, thread)
                thread.start()
            elif command["folder"] in replays:
                replay, _ = replays[command["folder"]]
                (replay.finishing if command["do"] == "finish" else replay.closed).set()
                replay.wake.set()
        parent_is_gone.set()

    threading.Thread(target=obey, daemon=True).start()
    while not parent_is_gone.wait(1.0):
        if os.getppid() != parent:  # a forked child of the parent may keep the pipe open
            break
    deadline = time.monotonic() + GRACE_SECONDS
    for replay, _ in replays.values():
        replay.abandoned.set()
        replay.wake.set()
    for _, thread in replays.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    os._exit(0)  # a call that hangs must not keep the process


if __name__ == "__main__":
    serve()
