"""Leases: of several processes that want to make one artifact, one makes it and the others wait.

A lease saves work; it decides nothing. What two makers publish is still settled by put-if-absent, so a maker that
was paused past its lease does no harm. Machines' clocks are never compared: a waiter watches whether the lease
file *changes*, and measures on its own clock how long it has not.

`leases/<key>/<generation>.json`: to take a lease over is to create the next generation, which one waiter can.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from gleaner.conf.errors import GleanerError
from gleaner.tasks.files import Files

POLL_SECONDS = (0.02, 1.0)
"""First and longest pause between two looks at somebody else's lease."""
BEATS_PER_LEASE = 4


class Lease:
    """A held lease. A thread renews it until the `with` block ends."""

    def __init__(self, files: Files, folder: str, generation: int, body: dict[str, Any]) -> None:
        self._files = files
        self._folder = folder
        self._generation = generation
        self._body = body
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="gleaner-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        for generation in range(self._generation, 0, -1):
            path = _path(self._folder, generation)
            if generation < self._generation and self._files.stat(path) is None:
                break
            self._files.delete(path)

    def _renew(self) -> None:
        beat = 0
        while not self._stopped.wait(self._body["seconds"] / BEATS_PER_LEASE):
            beat += 1
            try:
                self._files.write(_path(self._folder, self._generation), _encode(self._body | {"beat": beat}))
            except GleanerError:
                continue  # a store that is away now may be back at the next beat; a lost lease costs only work


def claim(files: Files, key: str, seconds: float, arrived: Callable[[], bool]) -> tuple[Lease | None, bool]:
    """Wait for the lease on `key`, or until `arrived()` says that what it guards is there.

    Returns:
        (lease, taken over): the lease, not yet renewed (use it as a context manager), and whether a dead owner had
        held it; (None, False) if `arrived()`.
    """
    folder = f"leases/{key}"
    watched: tuple[int, bytes] | None = None
    since = 0.0
    pause = POLL_SECONDS[0]
    while True:
        current = _current(files, folder)
        if current is not None and current != watched:
            watched, since = current, time.monotonic()
        free = current is None or _is_over(current[1], time.monotonic() - since)
        if free:
            generation = (current[0] if current else 0) + 1
            body = {"owner": _identity(), "seconds": seconds, "id": uuid.uuid4().hex, "beat": 0}
            if files.create(_path(folder, generation), _encode(body), durable=False):
                return Lease(files, folder, generation, body), current is not None
            continue
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_SECONDS[1])
        if arrived():
            return None, False


def _current(files: Files, folder: str) -> tuple[int, bytes] | None:
    """(generation, content) of the latest lease; None when nobody holds one."""
    while True:
        names = [name for name in files.names(folder) if name.endswith(".json")]
        if not names:
            return None
        try:
            return int(names[-1].removesuffix(".json")), files.read(f"{folder}/{names[-1]}")
        except FileNotFoundError:
            continue  # released between the two calls


def _is_over(content: bytes, unchanged_seconds: float) -> bool:
    try:
        body = json.loads(content)
        seconds, owner = float(body["seconds"]), body["owner"]
    except (ValueError, KeyError, TypeError):
        return True  # a damaged lease holds nothing
    return unchanged_seconds > seconds or _is_dead(owner)


def _is_dead(owner: dict[str, Any]) -> bool:
    """True only if the owner ran on this machine and is gone."""
    if owner.get("machine") != _machine():
        return False
    try:
        process = psutil.Process(owner["pid"])
        return bool(
            process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - owner["started"]) > 1.0
        )
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _identity() -> dict[str, Any]:
    process = psutil.Process()
    return {"machine": _machine(), "pid": process.pid, "started": process.create_time()}


def _machine() -> str:
    """This machine, since its boot, and this process's own numbering of processes (a container has another)."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("unknown")
    return " ".join(parts)


def _path(folder: str, generation: int) -> str:
    return f"{folder}/{generation:06d}.json"


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
