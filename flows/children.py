"""Runs in processes of their own. Sibling subflows that retry can adopt each other's results, and one process trains
with all its threads; so concurrent runs are separate processes that share the store and one Prefect server."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gleaner.conf.compose import run_name
from gleaner.conf.errors import GleanerError
from gleaner.conf.schema import GleanerSettings
from gleaner.flows.services import stop
from gleaner.tasks.publishing import RUNS_FOLDER

LOG_LINES = 15


class ChildFailedError(GleanerError):
    """A run in a process of its own failed; the message ends with the last lines of its log."""


def run_children(runs: Sequence[GleanerSettings], parallel: int) -> list[dict[str, object]]:
    """Run each in its own process, `parallel` at a time, one thread each where several share the cores.

    Every run is given its chance before a failure is raised, and a run that had finished is not run again.

    Returns:
        the runs' summaries (`RunSummary` as JSON), in order.

    Raises:
        ChildFailedError: one or more failed.
    """
    started: list[subprocess.Popen[bytes]] = []

    def run(settings: GleanerSettings) -> dict[str, object] | ChildFailedError:
        return _run(settings, started, threads=1 if parallel > 1 else None)

    try:
        with ThreadPoolExecutor(parallel) as pool:
            results = list(pool.map(run, runs))
    finally:
        for process in started:
            if process.poll() is None:
                stop(process)
    failures = [result for result in results if isinstance(result, ChildFailedError)]
    if failures:
        raise ChildFailedError("\n".join(str(failure) for failure in failures))
    return [result for result in results if not isinstance(result, ChildFailedError)]


def _run(
    settings: GleanerSettings, started: list[subprocess.Popen[bytes]], threads: int | None
) -> dict[str, object] | ChildFailedError:
    folder = RUNS_FOLDER / run_name(settings)
    folder.mkdir(parents=True, exist_ok=True)
    order, log, summary = folder / "order.json", folder / "log.txt", folder / "summary.json"
    order.write_text(settings.model_dump_json())
    summary.unlink(missing_ok=True)
    variables = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    command = [sys.executable, "-P", "-m", "gleaner.flows.child", str(order)]
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=variables, start_new_session=True)
        started.append(process)
        code = process.wait()
    if code != 0 or not summary.is_file():
        tail = "\n".join(Path(log).read_text(errors="replace").splitlines()[-LOG_LINES:])
        return ChildFailedError(f"run {folder.name} ended with code {code}; the end of {log}:\n{tail}")
    found: dict[str, object] = json.loads(summary.read_text())
    return found
