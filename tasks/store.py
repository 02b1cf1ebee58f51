"""The object store: what was made, under the digest of its bytes, and keys that say what it was made from.

    objects/<sha256>         immutable bytes
    keys/<key>.json          a Record: which objects a key names; created by put-if-absent, so of two makers one wins
    leases/<key>/…           who is making it now
    attempts/<key>/<uuid>    one file a start of making, killed ones included
    quarantine/…             what failed its digest
    runs/<run>/…             journals (journal.py)

Readers check digests: what is truncated or altered is refused, never trained on. Clean-up removes keys before
objects, and a hit whose object is gone or damaged is a miss.
"""

import hashlib
import io
import json
import os
import re
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gleaner.conf.errors import ConfigurationError, CorruptArtifactError
from gleaner.conf.schema import AnyStorage, LocalStorage
from gleaner.models import tables
from gleaner.models.tables import Table
from gleaner.tasks.files import Files, file_sha256, open_files
from gleaner.tasks.keys import canonical_json
from gleaner.tasks.leases import claim

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

Row = TypeVar("Row")
Tensors = dict[str, "Tensor"]

DECODED_BYTES = 256 * 2**20
"""Upper bound of the tables that a process keeps decoded."""
DIGEST = re.compile(r"[0-9a-f]{64}")
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Record:
    """What a key names.

    Attributes:
        objects: name → digest of an object, e.g. {"rollouts": "4f…"}.
        facts: small JSON beside the objects, e.g. counts and seconds.
        code: code version of what made it.
        schemas: version of every table's schema when it was made.
        made_at: UTC time, ISO 8601; made_by: unique to one publication. The store fills both.
    """

    objects: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    schemas: dict[str, int] = field(default_factory=lambda: dict(tables.VERSIONS))
    made_at: str = ""
    made_by: str = ""


@dataclass(frozen=True)
class Swept:
    """What `sweep` removed."""

    objects: int
    bytes: int
    temporary: int


class ObjectStore:
    """Objects, keys and leases in one folder or bucket. Cheap to make, picklable, safe to use from threads.

    Methods raise StoreUnavailableError when the storage fails after bounded retries, and ConfigurationError when
    its path, bucket, credentials or free space are wrong.
    """

    def __init__(self, storage: AnyStorage, *, attempts: int = 5, timeout_seconds: float = 60.0) -> None:
        if isinstance(
            storage, LocalStorage
        ):  # a copy in a process with another working folder means the same store
            storage = LocalStorage(path=str(Path(storage.path).expanduser().absolute()))
        self.storage: AnyStorage = storage
        self._options = {"attempts": attempts, "timeout_seconds": timeout_seconds}
        self.files: Files = open_files(storage, **self._options)  # type: ignore[arg-type]
        self.counts: Counter[str] = Counter()
        """Of this object: hits, misses, waits, takeovers, damaged."""
        self._verified: dict[str, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.storage, self._options)

    def __repr__(self) -> str:
        return f"ObjectStore({self.files.where})"

    def check(self) -> None:
        """Prove that the store can be used: write, read, delete, and refuse a second `create`. For preflight.

        Raises:
            ConfigurationError: what is wrong, with the fix.
        """
        path = f"tmp/check-{uuid.uuid4().hex}"
        try:
            if (
                not self.files.create(path, b"1")
                or self.files.create(path, b"2")
                or self.files.read(path) != b"1"
            ):
                raise ConfigurationError(
                    f"{self.files.where} ignores conditional puts (If-None-Match), so two runs could overwrite each "
                    "other: use a server that supports them, such as SeaweedFS, MinIO or AWS S3"
                )
        finally:
            self.files.delete(path)

    # ------------------------------------------------------------------------------------------- objects

    def put_bytes(self, data: bytes) -> str:
        """Store bytes; returns their digest, the reference that every `get` takes."""
        digest = hashlib.sha256(data).hexdigest()
        # Written even if it is there: that repairs a damaged object, and its new age keeps `sweep` away.
        self.files.write(_object_path(digest), data)
        self._remember(digest)
        return digest

    def get_bytes(self, ref: str) -> bytes:
        """
        Raises:
            CorruptArtifactError: the object is missing, truncated or altered.
        """
        try:
            data = self.files.read(_object_path(ref))
        except FileNotFoundError:
            raise self._missing(ref) from None
        if hashlib.sha256(data).hexdigest() != ref:
            raise self._altered(ref, len(data))
        return data

    def put_json(self, value: Any) -> str:
        """Store JSON in its canonical form, so that equal values share one object."""
        return self.put_bytes(canonical_json(value))

    def get_json(self, ref: str) -> Any:
        return json.loads(self.get_bytes(ref))

    def put_table(self, table: Table[Any], frame: "pl.DataFrame") -> str:
        """Validate a frame and store it as Parquet.

        Raises:
            ContractError: naming the row, the column and the fix.
        """
        return self.put_bytes(tables.encode(table, frame))

    def get_table(self, table: Table[Any], ref: str) -> "pl.DataFrame":
        """Read, migrate to the current schema version, and validate. Decoded frames are kept: never change one.

        Raises:
            CorruptArtifactError: damaged, another table, or a schema version that is not known here.
            ContractError: the rows break the schema.
        """
        cached = _decoded.get((table.name, ref, "frame"))
        if cached is None:
            cached = tables.decode(table, self.get_bytes(ref), ref)
            _decoded.put((table.name, ref, "frame"), cached, int(cached.estimated_size()))
        return cached

    def put_rows(self, table: Table[Row], rows: Sequence[Row]) -> str:
        """`put_table` of dataclass rows, e.g. `put_rows(tables.ROLLOUTS, segments)`."""
        frame = table.to_frame(rows)
        ref = self.put_table(table, frame)
        # Whoever reads them next in this process needs no second decoding: what was validated is what comes back.
        _decoded.put(
            (table.name, ref, "rows"), list(rows), ROWS_PER_FRAME_BYTES * int(frame.estimated_size())
        )
        return ref

    def get_rows(self, table: Table[Row], ref: str) -> list[Row]:
        """`get_table` as dataclass rows. Decoded rows are kept: never change one."""
        cached = _decoded.get((table.name, ref, "rows"))
        if cached is None:
            frame = self.get_table(table, ref)
            cached = table.to_rows(frame)
            _decoded.put(
                (table.name, ref, "rows"), cached, ROWS_PER_FRAME_BYTES * int(frame.estimated_size())
            )
        return list(cached)

    def put_tensors(self, tensors: Tensors, metadata: Mapping[str, Any] | None = None) -> str:
        """Store tensors as safetensors, with JSON metadata in the same object. No pickle."""
        from safetensors.torch import save

        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        # safetensors refuses tensors that share memory (tied weights): each is stored for itself.
        owners = Counter(tensor.untyped_storage().data_ptr() for tensor in plain.values())
        plain = {n: t.clone() if owners[t.untyped_storage().data_ptr()] > 1 else t for n, t in plain.items()}
        return self.put_bytes(
            save(plain, metadata={"gleaner": canonical_json(dict(metadata or {})).decode()})
        )

    def get_tensors(self, ref: str) -> tuple[Tensors, dict[str, Any]]:
        """(tensors on the CPU, metadata)."""
        from safetensors.torch import load

        data = self.get_bytes(ref)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return load(data), json.loads(header.get("__metadata__", {}).get("gleaner", "{}"))

    def put_file(self, path: Path) -> str:
        """Store a file of any size without reading it whole."""
        digest = file_sha256(path)
        self.files.upload(path, _object_path(digest))
        self._remember(digest)
        return digest

    def fetch(self, ref: str, path: Path) -> None:
        """Copy an object to a local file, which appears whole or not at all.

        Raises:
            CorruptArtifactError: the object is missing, truncated or altered.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        try:
            self.files.download(_object_path(ref), temporary)
            if file_sha256(temporary) != ref:
                raise self._altered(ref, temporary.stat().st_size)
            os.replace(temporary, path)
        except FileNotFoundError:
            raise self._missing(ref) from None
        finally:
            temporary.unlink(missing_ok=True)

    def put_folder(self, folder: Path) -> dict[str, str]:
        """Store every file of a folder; returns relative path → digest, to be merged into a record's objects."""
        return {
            path.relative_to(folder).as_posix(): self.put_file(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    def fetch_folder(self, objects: Mapping[str, str], folder: Path) -> None:
        """The inverse of `put_folder`."""
        for name, ref in objects.items():
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise CorruptArtifactError(
                    f"a stored folder names {name}, outside of itself: do not use this store"
                )
            self.fetch(ref, target)

    # ---------------------------------------------------------------------------------------------- keys

    def lookup(self, key: str, *, verify: bool = True) -> Record | None:
        """What the key names, or None. With `verify`, a record one of whose objects is gone or damaged is no hit
        (each object is read once per process, and again when it was rewritten)."""
        record = self._record(key)
        if record is None or (verify and not self._is_intact(record)):
            return None
        return record

    def publish(self, key: str, record: Record) -> Record:
        """Give the key its record; returns the winner's, which is another's if that came first. A record that is
        damaged, or whose objects are, is replaced. Store the objects before."""
        mine = replace(
            record,
            made_at=record.made_at or datetime.now(UTC).isoformat(timespec="milliseconds"),
            made_by=record.made_by or uuid.uuid4().hex,
        )
        sealed = seal(asdict(mine))
        while not self.files.create(_key_path(key), sealed):
            winner = self.lookup(key)
            if winner is not None:
                return winner
            self._discard(key)
        return mine

    def memoise(
        self, key: str, make: Callable[[], Record], *, lease_seconds: float = 120.0
    ) -> tuple[Record, bool]:
        """The key's record, made only if there is none.

        Of several processes that ask at once one makes, the others wait and read. A maker that died (its process
        is gone, or its lease was not renewed for `lease_seconds`) is replaced; whatever it stored by then stays.

        Args:
            make: stores objects and returns the record that names them. What it raises is raised here.

        Returns:
            (record, hit): hit is False if `make` ran here.
        """
        while (found := self.lookup(key)) is None:
            lease, taken_over = claim(self.files, key, lease_seconds, lambda: self.lookup(key) is not None)
            self.counts["takeovers"] += taken_over
            if lease is None:
                self.counts["waits"] += 1
                continue
            with lease:
                # The owner before us may have finished between our look at the key and our claim.
                if self.lookup(key) is None:
                    self.counts["misses"] += 1
                    self._begin_attempt(key)
                    return self.publish(key, make()), False
        self.counts["hits"] += 1
        return found, True

    def attempts(self, key: str) -> int:
        """How often making the key was begun, by anybody: what was killed has spent budget too."""
        return len(self.files.names(f"attempts/{key}"))

    def delete(self, key: str) -> None:
        """Forget a key; its objects go with the next `sweep` unless something else names them."""
        self.files.delete(_key_path(key))

    def list_keys(self) -> list[str]:
        return [name.removesuffix(".json") for name in self.files.names("keys") if name.endswith(".json")]

    def sweep(self, *, older_than_seconds: float = 86_400.0) -> Swept:
        """Delete objects that neither a key nor a journal names, and leftovers of crashes, unless they are young
        (their key may be about to be published)."""
        objects = list(self.files.walk("objects"))  # before the keys are read: what comes later is kept
        limit = self._storage_time() - older_than_seconds
        named = self._named_objects()
        named |= self._images({found.path.rsplit("/", 1)[-1] for found in objects} & named)
        swept = Counter[str]()
        for found in objects:
            if found.path.rsplit("/", 1)[-1] not in named and found.modified < limit:
                again = self.files.stat(found.path)
                if again is not None and again.modified < limit:
                    self.files.delete(found.path)
                    swept["objects"] += 1
                    swept["bytes"] += found.size
        for folder in ("tmp", "leases", "quarantine"):
            for found in list(self.files.walk(folder)):
                if found.modified < limit:
                    self.files.delete(found.path)
                    swept["temporary"] += 1
        return Swept(swept["objects"], swept["bytes"], swept["temporary"])

    # ------------------------------------------------------------------------------------------- details

    def _record(self, key: str) -> Record | None:
        try:
            body = unseal(self.files.read(_key_path(key)), key)
            return Record(**body)
        except FileNotFoundError:
            return None
        except (CorruptArtifactError, TypeError):
            self.counts["damaged"] += 1
            return None

    def _is_intact(self, record: Record) -> bool:
        for ref in record.objects.values():
            found = self.files.stat(_object_path(ref))
            if found is None:
                self.counts["damaged"] += 1
                return False
            if self._verified.get(ref) == found.signature:
                continue
            if self._digest_of_stored(ref) != ref:
                self.counts["damaged"] += 1
                self._quarantine(ref)
                return False
            self._verified[ref] = found.signature
        return True

    def _digest_of_stored(self, ref: str) -> str | None:
        try:
            return self.files.sha256(_object_path(ref))
        except FileNotFoundError:
            return None

    def _quarantine(self, ref: str) -> None:
        try:
            self.files.move(_object_path(ref), f"quarantine/{ref}-{uuid.uuid4().hex}")
        except FileNotFoundError:
            return  # somebody else moved it

    def _discard(self, key: str) -> None:
        self.files.delete(_key_path(key))

    def _begin_attempt(self, key: str) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.files.create(
            f"attempts/{key}/{uuid.uuid4().hex}.json", json.dumps({"at": at}).encode(), durable=False
        )

    def _remember(self, digest: str) -> None:
        found = self.files.stat(_object_path(digest))
        if found is not None:
            self._verified[digest] = found.signature

    def _named_objects(self) -> set[str]:
        paths = [f"keys/{name}" for name in self.files.names("keys")]
        paths += [found.path for found in self.files.walk("runs")]
        named: set[str] = set()
        for start in range(0, len(paths), 256):
            for data in self.files.read_many(paths[start : start + 256]):
                named.update(DIGEST.findall(data.decode(errors="replace")))
        return named

    def _images(self, refs: set[str]) -> set[str]:
        """Digests that the rollouts among `refs` name in their `images` column, whatever their schema version."""
        import polars as pl

        named: set[str] = set()
        for ref in refs:
            try:
                data = self.files.read(_object_path(ref))
                if data[:4] == b"PAR1":
                    column = pl.read_parquet(io.BytesIO(data), columns=["images"])["images"]
                    named.update(DIGEST.findall(" ".join(column.cast(pl.String))))
            except (FileNotFoundError, pl.exceptions.PolarsError):
                continue  # another table, or gone
        return named

    def _storage_time(self) -> float:
        """Now, by the clock that dates the files."""
        path = f"tmp/clock-{uuid.uuid4().hex}"
        self.files.write(path, b"")
        try:
            found = self.files.stat(path)
            return found.modified if found else time.time()
        finally:
            self.files.delete(path)

    def _missing(self, ref: str) -> CorruptArtifactError:
        return CorruptArtifactError(
            f"object {ref} is not in {self.files.where}: start the run again, which makes it anew, or restore the file"
        )

    def _altered(self, ref: str, size: int) -> CorruptArtifactError:
        return CorruptArtifactError(
            f"object {ref} in {self.files.where} does not match its digest ({size} bytes were read): it was truncated "
            "or altered; start the run again, which makes it anew, or restore the file"
        )


ROWS_PER_FRAME_BYTES = 8
"""Python objects take about this many times the frame's memory."""


def _reopen(storage: AnyStorage, options: dict[str, Any]) -> ObjectStore:
    return ObjectStore(storage, **options)


def seal(body: Any) -> bytes:
    """JSON with a digest of itself, so that an altered record is noticed. Readable by a person."""
    content = canonical_json(body)
    return b'{"body":' + content + b',"sha256":"' + hashlib.sha256(content).hexdigest().encode() + b'"}'


def unseal(data: bytes, what: str) -> Any:
    """The inverse of `seal`.

    Raises:
        CorruptArtifactError: `what` was truncated or altered.
    """
    try:
        sealed = json.loads(data)
        body = sealed["body"]
        intact = hashlib.sha256(canonical_json(body)).hexdigest() == sealed["sha256"]
    except (ValueError, KeyError, TypeError, ConfigurationError):
        intact = False
    if not intact:
        raise CorruptArtifactError(
            f"the record of {what} was truncated or altered: delete or restore it, then start again"
        )
    return body


def _object_path(ref: str) -> str:
    if not DIGEST.fullmatch(ref):
        raise ConfigurationError(f"{ref!r} is no object reference: pass what a put method returned")
    return f"objects/{ref}"


def _key_path(key: str) -> str:
    if not KEY.fullmatch(key):
        raise ConfigurationError(
            f"{key!r} is no key: use cache_key(...), or letters, digits, dots and dashes"
        )
    return f"keys/{key}.json"


class _Decoded:
    """The least recently used tables leave first. Shared by the process: a digest means the same in every store."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._entries: OrderedDict[tuple[str, str, str], tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: tuple[str, str, str]) -> Any | None:
        with self._lock:
            if name not in self._entries:
                return None
            self._entries.move_to_end(name)
            return self._entries[name][0]

    def put(self, name: tuple[str, str, str], value: Any, size: int) -> None:
        with self._lock:
            if name in self._entries or size > self._limit:
                return
            self._entries[name] = (value, size)
            self._used += size
            while self._used > self._limit:
                _, (_, freed) = self._entries.popitem(last=False)
                self._used -= freed

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._used = 0


_decoded = _Decoded(DECODED_BYTES)


def forget_decoded() -> None:
    """Drop the decoded tables of this process; the next read goes to the storage."""
    _decoded.clear()
