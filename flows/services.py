"""Servers that a command starts for itself: bound to loopback, ended with the command."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from gleaner.conf.errors import ConfigurationError, TransientError

STARTING_SECONDS = 180.0
HOST = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def prefect_server(log: Path, port: int | None = None) -> Iterator[str]:
    """A Prefect server on the files of PREFECT_HOME; yields the address of its API. If PREFECT_API_URL is set, that
    server is used and nothing is started."""
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        yield configured
        return
    port = port or free_port()
    api = f"http://{HOST}:{port}/api"
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    command = [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    with running(command, log, {"PREFECT_SERVER_UI_API_URL": api}, f"{api}/health", "the Prefect server"):
        # The variable is for children; this process has read its settings already.
        os.environ["PREFECT_API_URL"] = api
        try:
            with temporary_settings({PREFECT_API_URL: api}):
                yield api
        finally:
            del os.environ["PREFECT_API_URL"]
            APILogWorker.drain_all(timeout=5)  # log lines still on their way would find no server


@contextlib.contextmanager
def mlflow_server(log: Path, uri: str, artifacts: Path, port: int) -> Iterator[str]:
    """An MLflow server on a tracking database; yields its address."""
    url = f"http://{HOST}:{port}"
    command = [
        sys.executable,
        "-P",
        "-m",
        "mlflow",
        "server",
        "--host",
        HOST,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    command += ["--backend-store-uri", uri, "--default-artifact-root", artifacts.resolve().as_uri()]
    with running(command, log, {}, f"{url}/health", "the MLflow server"):
        yield url


@contextlib.contextmanager
def running(
    command: list[str], log: Path, variables: dict[str, str], health: str, name: str
) -> Iterator[None]:
    """Run a server until the block ends, which begins once `health` answers.

    Raises:
        TransientError: it did not answer in time; ConfigurationError: it ended at once. Both name its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        server = subprocess.Popen(
            command, stdout=sink, stderr=sink, env={**os.environ, **variables}, start_new_session=True
        )
    try:
        _await(server, health, name, log)
        yield
    finally:
        stop(server)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    end_family(process.pid)
    process.wait()


def end_family(pid: int) -> None:
    """End a process and what it started: first asked, then killed."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        for member in psutil.wait_procs(family, timeout=10)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def _await(server: subprocess.Popen[bytes], health: str, name: str, log: Path) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ConfigurationError(
                f"{name} ended with code {server.returncode}: read {log}, then start again"
            )
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(health, timeout=5):
            return
        time.sleep(0.2)
    raise TransientError(
        f"{name} did not answer within {STARTING_SECONDS:.0f} s: read {log}, then start again"
    )
