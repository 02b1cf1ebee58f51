"""Runs in processes of their own. Sibling subflows that retry can adopt each other's results, and one process trains
with all its threads; so concurrent runs are separate processes that share the store and one Prefect server. They are
forked from a process that has imported everything, which spares each of them the ten seconds that imports take."""

import contextlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from gleaner.conf.compose import run_name
from gleaner.conf.errors import GleanerError
from gleaner.conf.schema import GleanerSettings
from gleaner.flows.child import run_child
from gleaner.flows.services import end_family
from gleaner.tasks.context import RunContext
from gleaner.tasks.publishing import RUNS_FOLDER, run_key

LOG_LINES = 15

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gleaner.flows.preload"])

Summary = dict[str, Any]
"""A run's `RunSummary`, as JSON."""


class ChildFailedError(GleanerError):
    """A run in a process of its own failed; the message ends with the last lines of its log."""


def run_children(
    runs: Sequence[GleanerSettings], parallel: int, needs: Mapping[str, Sequence[str]] | None = None
) -> list[Summary]:
    """Run each in its own process of one thread, `parallel` at a time, the earlier ones first.

    Every run is given its chance before a failure is raised, but for those that build on a failed one. A run that had
    finished with the same settings is not started again.

    Args:
        needs: of a run's name, the names of the runs among `runs` that must have ended before it starts.

    Returns:
        the runs' summaries, in order.

    Raises:
        ChildFailedError: one or more failed.
    """
    children = _Children()
    waiting = {run_name(settings): settings for settings in runs}
    names = list(waiting)
    missing = {name: set((needs or {}).get(name, ())) for name in names}
    running: dict[Future[Summary | ChildFailedError], str] = {}
    ended: dict[str, Summary | ChildFailedError] = {}
    with ThreadPoolExecutor(parallel) as pool:
        try:
            while waiting or running:
                for name in [name for name in waiting if not missing[name]][: parallel - len(running)]:
                    running[pool.submit(children.run, waiting.pop(name))] = name
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future)
                    ended[name] = future.result()
                    _settle(name, ended, waiting, missing)
        finally:
            children.stop()
    failures = [str(result) for result in ended.values() if isinstance(result, ChildFailedError)]
    if failures:
        raise ChildFailedError("\n".join(failures))
    return [result for name in names if not isinstance(result := ended[name], ChildFailedError)]


def _settle(
    name: str,
    ended: dict[str, Summary | ChildFailedError],
    waiting: dict[str, GleanerSettings],
    missing: dict[str, set[str]],
) -> None:
    """Nobody waits for an ended run any more; who needed a failed one has failed too."""
    failed = isinstance(ended[name], ChildFailedError)
    for other in [other for other in waiting if name in missing[other]]:
        missing[other].discard(name)
        if failed:
            del waiting[other]
            ended[other] = ChildFailedError(f"run {other} was not started: it builds on {name}, which failed")
            _settle(other, ended, waiting, missing)


def prepare_children() -> None:
    """Begin to load what runs import, in the process that they will be forked from. Returns at once."""
    with _one_thread():  # numerical libraries read it as they load
        forkserver.ensure_running()


class _Children:
    """The processes that run, so that all of them end when this one is told to."""

    def __init__(self) -> None:
        self._started: list[ForkServerProcess] = []
        self._lock = threading.Lock()
        self._stopping = False
        prepare_children()

    def run(self, settings: GleanerSettings) -> Summary | ChildFailedError:
        folder = RUNS_FOLDER / run_name(settings)
        folder.mkdir(parents=True, exist_ok=True)
        order, log, summary = folder / "order.json", folder / "log.txt", folder / "summary.json"
        found = finished(settings)
        if found is not None:
            return found
        order.write_text(settings.model_dump_json())
        summary.unlink(missing_ok=True)
        code = self._run(order.resolve(), log.resolve())
        if code != 0 or not summary.is_file():
            tail = (
                "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if log.is_file() else ""
            )
            return ChildFailedError(f"run {folder.name} ended with code {code}; the end of {log}:\n{tail}")
        made: Summary = json.loads(summary.read_text())
        return made

    def _run(self, order: Path, log: Path) -> int | None:
        with self._lock:
            if self._stopping:
                return None
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = FORKS.Process(target=run_child, args=(order, log, Path.cwd(), variables))
            process.start()
            self._started.append(process)
        process.join()
        return process.exitcode

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
        for process in self._started:
            if process.is_alive() and process.pid is not None:
                end_family(process.pid)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def finished(settings: GleanerSettings) -> Summary | None:
    """The summary that a run of exactly these settings left when it ended, if its policy is still in the store."""
    folder = RUNS_FOLDER / run_name(settings)
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: Summary = json.loads((folder / "summary.json").read_text())
        if (folder / "order.json").read_text() != settings.model_dump_json():
            return None
        if not {"steps", "validated"} <= found.keys():  # written by an earlier version of Gleaner
            return None
        store = RunContext.of(run_name(settings), settings).store
        return found if store.lookup(run_key(run_name(settings), found["steps"])) else None
    return None
