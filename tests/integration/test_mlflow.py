"""Tracking against a real MLflow server that stops and starts."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from gleaner.conf.schema import TrackingSettings
from gleaner.tasks.spool import Spool
from gleaner.tasks.tracking import RunTracker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Server:
    """An MLflow server on one port and one database that can be stopped and started again."""

    def __init__(self, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen | None = None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        command += ["--artifacts-destination", f"{self._folder}/artifacts"]
        environment = {
            **os.environ,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=self._folder
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self._folder / "server.log").read_text()[-3000:]) from None
                time.sleep(0.3)

    def stop(self):
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self):
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self):
        os.killpg(self._process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=server.uri)


@pytest.fixture
def start(server, tmp_path):
    return lambda run_id: RunTracker.start(
        TrackingSettings(uri=server.uri, experiment="outages"),
        run_id,
        "{run: {seed: 0}}",
        root=tmp_path / "spool",
    )


def log(tracker, steps):
    """Record steps as a run would, and return the seconds that the slowest took."""
    slowest = 0.0
    for step in steps:
        begun = time.perf_counter()
        tracker.metrics(step, {f"group/{i}": float(step) for i in range(40)})
        slowest = max(slowest, time.perf_counter() - begun)
        time.sleep(0.02)
    return slowest


def reached(tracker, tmp_path, seconds=90):
    """Wait until everything that was recorded so far is acknowledged."""
    spool = Spool(tmp_path / "spool" / tracker.run_id)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if spool.state().offset >= spool.size():
            return True
        time.sleep(0.2)
    return False


def steps_in(client, summary, key="group/7"):
    return sorted(metric.step for metric in client.get_metric_history(summary["mlflow_run_id"], key))


def test_a_run_on_a_healthy_server(start, client, server, tmp_path):
    tracker = start("healthy")
    log(tracker, range(50))
    tracker.content("plots/curve.png", b"png")
    summary = tracker.finish()
    assert summary["delivered"], summary
    assert steps_in(client, summary) == list(range(50))
    assert (
        summary["url"]
        == f"{server.uri}/#/experiments/{summary['url'].split('/')[-3]}/runs/{summary['mlflow_run_id']}"
    )
    assert Path(client.download_artifacts(summary["mlflow_run_id"], "plots/curve.png")).read_bytes() == b"png"


def test_down_at_the_start(start, client, server):
    server.stop()
    tracker = start("down-at-start")
    assert log(tracker, range(50)) < 0.1
    server.start()
    log(tracker, range(50, 60))
    summary = tracker.finish(wait_seconds=30)
    assert summary["delivered"], summary
    assert steps_in(client, summary) == list(range(60))


def test_down_in_the_middle(start, client, server, tmp_path):
    tracker = start("down-in-the-middle")
    log(tracker, range(20))
    assert reached(tracker, tmp_path)
    server.stop()
    assert log(tracker, range(20, 60)) < 0.1
    time.sleep(3)
    server.start()
    log(tracker, range(60, 70))
    summary = tracker.finish(wait_seconds=30)
    assert summary["delivered"], summary
    assert steps_in(client, summary) == list(range(70))
    assert client.get_run(summary["mlflow_run_id"]).info.status == "FINISHED"


def test_down_at_the_end_and_back_for_the_next_start(start, client, server, tmp_path):
    tracker = start("down-at-end")
    log(tracker, range(20))
    assert reached(tracker, tmp_path)
    server.stop()
    log(tracker, range(20, 40))
    tracker.content("notes.txt", "kept")
    begun = time.monotonic()
    summary = tracker.finish(wait_seconds=5)
    assert time.monotonic() - begun < 20
    assert not summary["delivered"]
    assert summary["pending_artifacts"] == 1
    server.start()

    tracker = start("down-at-end")
    log(tracker, range(38, 41))
    summary = tracker.finish(wait_seconds=30)
    assert summary["delivered"], summary
    assert steps_in(client, summary) == list(range(41))
    assert Path(client.download_artifacts(summary["mlflow_run_id"], "notes.txt")).read_text() == "kept"


def test_a_server_that_hangs_bounds_the_wait_and_repeats_nothing(start, client, server, tmp_path):
    tracker = start("hangs")
    log(tracker, range(20))
    assert reached(tracker, tmp_path)
    server.freeze()
    try:
        assert log(tracker, range(20, 60)) < 0.1
        begun = time.monotonic()
        summary = tracker.finish(wait_seconds=5)
        assert time.monotonic() - begun < 10
        assert not summary["delivered"]
    finally:
        server.thaw()
    tracker = start("hangs")
    log(tracker, range(60, 62))
    summary = tracker.finish(wait_seconds=60)
    assert summary["delivered"], summary
    assert steps_in(client, summary) == list(range(62))


S3_RUN = """
import sys
from pathlib import Path
from gleaner.conf.schema import S3Storage, TrackingSettings
from gleaner.tasks.tracking import RunTracker
folder, bucket, url = sys.argv[1:]
storage = S3Storage(bucket=bucket, prefix="store", endpoint_url=url)
tracking = TrackingSettings(uri=f"sqlite:///{folder}/mlflow.db")
tracker = RunTracker.start(tracking, "on-s3", "{}", storage=storage, root=Path(folder) / "spool")
tracker.metrics(0, {"reward/mean": 0.5})
tracker.content("plots/curve.png", b"png" * 1000)
summary = tracker.finish(wait_seconds=30)
assert summary["delivered"], summary
print(summary["mlflow_run_id"])
"""


def test_artifacts_of_a_database_without_a_server_go_to_the_runs_own_bucket(s3_storage, tmp_path):
    import s3fs

    command = [sys.executable, "-c", S3_RUN, str(tmp_path), s3_storage.bucket, s3_storage.endpoint_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.strip()
    files = s3fs.S3FileSystem(
        key=os.environ["AWS_ACCESS_KEY_ID"],
        secret=os.environ["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=s3_storage.endpoint_url,
    )
    root = f"{s3_storage.bucket}/store-mlartifacts/{run_id}/artifacts"
    assert files.cat_file(f"{root}/plots/curve.png") == b"png" * 1000
    assert files.exists(f"{root}/settings.yaml")
