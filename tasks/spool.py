"""A run's tracking spool: what MLflow is to be told, on this machine's disk first.

    <root>/<run_id>/spool.jsonl   one record a line, only ever appended
                    state.json    how far the replay got, and which MLflow run it writes to
                    files/        artifacts that wait; a file that was uploaded is gone
                    uploading/    the one that is under way
                    lock          held by the process that replays

The run's process appends, the replay process (replay.py) reads. Both may die at any moment.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

Record = dict[str, Any]


@dataclass
class ReplayState:
    """What the replay has achieved; written by the holder of the lock alone.

    Attributes:
        target: digest of tracking URI and experiment; another target starts again from the first record.
        offset: bytes of spool.jsonl that MLflow has acknowledged.
        starting: the replay is loading MLflow or creating its database: slow, but no sign of an outage.
        error: why the last attempt failed; None after one that worked.
        rejected: metrics that MLflow refuses for good.
        unreadable: lines that a crash or a full disk cut.
    """

    target: str = ""
    offset: int = 0
    experiment_id: str = ""
    mlflow_run_id: str = ""
    url: str | None = None
    starting: bool = False
    error: str | None = None
    rejected: int = 0
    unreadable: int = 0


class Spool:
    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self._log = self.folder / "spool.jsonl"
        self._state = self.folder / "state.json"
        self._files = self.folder / "files"
        self._uploading = self.folder / "uploading"
        self._descriptor: int | None = None
        self._line_is_whole = True

    # ------------------------------------------------------------------------------------- the run's side

    def open(self) -> None:
        """Create the folder and open the log for appending.

        Raises:
            OSError: the folder cannot be written.
        """
        self._files.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self.state().offset > self.size():  # the log was deleted, the state was not
            self._state.unlink(missing_ok=True)
        self._line_is_whole = self._ends_with_newline()

    def append(self, record: Record) -> None:
        """One write of one line, so that lines of two processes never mix. Not synced: a power cut may lose the tail.

        Raises:
            OSError: the disk is full, or gone.
        """
        if self._descriptor is None:
            raise OSError("the spool is not open")
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if not self._line_is_whole:
            line = b"\n" + line
        self._line_is_whole = False
        if os.write(self._descriptor, line) != len(line):
            raise OSError("the disk took half a line")
        self._line_is_whole = True

    def put_file(self, path: str, source: Path | bytes) -> None:
        """Keep a copy of `source` until it is uploaded as artifact `path`. A later one of the same path replaces it.

        Raises:
            ValueError: `path` is absolute or leaves the run's artifacts.
            OSError: the source cannot be read, or the disk is full.
        """
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or not parts.name:
            raise ValueError(
                f"artifact path {path!r} leaves the run's artifacts: use a relative path without '..'"
            )
        target = self._files / parts
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".incoming-")
        try:
            with os.fdopen(descriptor, "wb") as sink:
                if isinstance(source, bytes):
                    sink.write(source)
                else:
                    with source.open("rb") as stream:
                        shutil.copyfileobj(stream, sink, 1 << 20)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def waiting(self) -> list[str]:
        """Paths of artifacts that are not uploaded yet."""
        return sorted({*self._paths(self._files), *self._paths(self._uploading)})

    def state(self) -> ReplayState:
        """The replay's last word; a fresh one where there is none or it cannot be read."""
        try:
            return ReplayState(**json.loads(self._state.read_text()))
        except (OSError, ValueError, TypeError):
            return ReplayState()

    # ---------------------------------------------------------------------------------- the replay's side

    def records(self, offset: int) -> Iterator[tuple[Record | None, int]]:
        """(record, offset after it) of every whole line from `offset`; None for a line that cannot be read."""
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(offset)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if record is None and not line.strip():
                    continue
                yield (record if isinstance(record, dict) else None), offset

    def take(self, path: str) -> Path:
        """Move a waiting artifact aside for its upload; a newer one of the same path may then arrive."""
        target = self._uploading / path
        source = self._files / path
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
        return target

    def write_state(self, state: ReplayState) -> None:
        temporary = self._state.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(state)))
        os.replace(temporary, self._state)

    @contextlib.contextmanager
    def lock(self, stop: threading.Event) -> Iterator[bool]:
        """Hold the right to replay; False if `stop` was set while another process held it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with file_lock(self.folder / "lock", stop) as held:
            yield held

    def _paths(self, folder: Path) -> list[str]:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def _ends_with_newline(self) -> bool:
        size = self.size()
        if not size:
            return True
        with self._log.open("rb") as log:
            log.seek(size - 1)
            return log.read() == b"\n"


@contextlib.contextmanager
def file_lock(path: Path, stop: threading.Event) -> Iterator[bool]:
    """Hold an exclusive lock on `path`, which ends with the process; False if `stop` came first."""
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.is_set():
                    yield False
                    return
                time.sleep(0.1)
        yield True
