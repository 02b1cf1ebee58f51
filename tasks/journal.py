"""The run journal: what a run did, one immutable file a step, from which a later start resumes.

    runs/<run>/header.json           the settings, so that another configuration cannot continue this run
    runs/<run>/steps/<step>.json     that step's rollouts, verdicts, signal, versions, method state, budget

A step is committed when its file is there, and it is created by put-if-absent: of two processes that run the same
run, one commits and the other adopts the committed entry.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from gleaner.conf.errors import ConfigurationError, CorruptArtifactError, JournalConflictError
from gleaner.tasks.keys import canonical_json, digest_json
from gleaner.tasks.store import ObjectStore, seal, unseal

OBSERVATIONS = ("metrics", "budget")
"""Parts of an entry that may differ between two processes that do the same step; everything else is history."""
ENTRIES_KEPT = 1024
READ_AT_ONCE = 256
DIFFERENCES_SHOWN = 10
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Journal:
    """The journal of one run. Cheap to make; keeps the last entries that it read."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        if not NAME.fullmatch(run_id):
            raise ConfigurationError(
                f"{run_id!r} is no name of a run: use letters, digits, dots, dashes (set run.name)"
            )
        self.run_id = run_id
        self._files = store.files
        self._folder = f"runs/{run_id}"
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def header(self, settings: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
        """Write the run's header, or check that it is this run's. Pass only what must stay the same between starts.

        Returns:
            {"run_id", "settings", "settings_digest", "started"}; `started` is the first start, UTC.

        Raises:
            ConfigurationError: the run was started with other settings; the message lists them.
            CorruptArtifactError: the header was altered.
        """
        plain = json.loads(canonical_json(settings if isinstance(settings, BaseModel) else dict(settings)))
        header = {
            "run_id": self.run_id,
            "settings": plain,
            "settings_digest": digest_json(plain),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if self._files.create(f"{self._folder}/header.json", seal(header)):
            return header
        stored = self.stored_header()
        if stored["settings_digest"] != header["settings_digest"]:
            differences = list(_differences(stored["settings"], plain))
            hidden = len(differences) - DIFFERENCES_SHOWN
            raise ConfigurationError(
                f"run {self.run_id} was started with other settings: {'; '.join(differences[:DIFFERENCES_SHOWN])}"
                + (f"; and {hidden} more" if hidden > 0 else "")
                + ". Give them back to resume it, or set run.name to a new name to start another run"
            )
        return stored

    def stored_header(self) -> dict[str, Any]:
        """
        Raises:
            FileNotFoundError: no such run.
            CorruptArtifactError: the header was altered.
        """
        return unseal(self._files.read(f"{self._folder}/header.json"), f"the header of run {self.run_id}")

    def append(self, step: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Commit a step. Returns the committed entry, which is another process's if that came first: go on from
        what is returned.

        Raises:
            JournalConflictError: the step is committed with another history (anything but OBSERVATIONS differs).
            ConfigurationError: the entry is no JSON.
        """
        if step < 0:
            raise ConfigurationError(f"step {step} of run {self.run_id} is negative: count steps from 0 or 1")
        plain = json.loads(canonical_json(dict(entry)))
        data = seal(plain)
        if self._files.create(self._path(step), data):
            self._keep(step, data)
            return plain
        stored = self.read(step)
        differences = list(_differences(_history(stored), _history(plain)))
        if differences:
            raise JournalConflictError(
                f"step {step} of run {self.run_id} is committed with another history: "
                f"{'; '.join(differences[:DIFFERENCES_SHOWN])}. Two runs of one name do not compute the same: set "
                "run.name of one of them to a new name (or delete the run's folder to start it anew)"
            )
        return stored

    def steps(self) -> list[int]:
        """The committed steps, in order; one listing.

        Raises:
            CorruptArtifactError: a step between two others is missing.
        """
        names = self._files.names(f"{self._folder}/steps")
        steps = sorted(int(name.removesuffix(".json")) for name in names if re.fullmatch(r"\d+\.json", name))
        if steps and steps[-1] - steps[0] + 1 != len(steps):
            missing = next(step for step in range(steps[0], steps[-1]) if step not in set(steps))
            raise CorruptArtifactError(
                f"step {missing} of run {self.run_id} is missing while later ones are there: restore its file "
                f"{self._path(missing)}, or delete the later ones to resume before it"
            )
        return steps

    def read(self, step: int) -> dict[str, Any]:
        """
        Raises:
            FileNotFoundError: the step is not committed.
            CorruptArtifactError: the entry was altered.
        """
        data = self._kept.get(step)
        if data is None:
            data = self._files.read(self._path(step))
        return self._open(step, data)

    def entries(self, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """(step, entry) of every committed step from `start` on, read as the iteration goes."""
        steps = [step for step in self.steps() if step >= start]
        for first in range(0, len(steps), READ_AT_ONCE):
            batch = steps[first : first + READ_AT_ONCE]
            unread = [step for step in batch if step not in self._kept]
            found = dict(
                zip(unread, self._files.read_many([self._path(step) for step in unread]), strict=True)
            )
            for step in batch:
                yield step, self._open(step, found[step]) if step in found else self.read(step)

    def last(self) -> tuple[int, dict[str, Any]] | None:
        steps = self.steps()
        return (steps[-1], self.read(steps[-1])) if steps else None

    def _path(self, step: int) -> str:
        return f"{self._folder}/steps/{step:08d}.json"

    def _open(self, step: int, data: bytes) -> dict[str, Any]:
        entry = unseal(data, f"step {step} of run {self.run_id}")
        self._keep(step, data)
        return entry

    def _keep(self, step: int, data: bytes) -> None:
        """Bytes are kept, not objects, so that a caller may change what it was given."""
        self._kept[step] = data
        self._kept.move_to_end(step)
        while len(self._kept) > ENTRIES_KEPT:
            self._kept.popitem(last=False)


def runs(store: ObjectStore) -> list[str]:
    """Names of the runs in the store."""
    return store.files.names("runs")


def _history(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in OBSERVATIONS}


def _differences(stored: Any, given: Any, path: str = "") -> Iterator[str]:
    """`a.b: stored X, now Y` for every leaf that differs."""
    if isinstance(stored, dict) and isinstance(given, dict):
        for name in sorted(stored.keys() | given.keys()):
            yield from _differences(
                stored.get(name, MISSING), given.get(name, MISSING), f"{path}.{name}" if path else name
            )
    elif stored != given or type(stored) is not type(given):
        yield f"{path}: stored {_short(stored)}, now {_short(given)}"


MISSING = object()


def _short(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"
