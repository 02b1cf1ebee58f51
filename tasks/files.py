"""Files of the object store, on a local disk and on S3, with the one promise that everything else rests on:

`create` writes a whole file under a name that nobody has taken, or says that somebody has. Locally a temporary
file is linked to its final name; on S3 the put is conditional (If-None-Match: *). A crash at any moment leaves no
half file with a final name.
"""

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tenacity

from gleaner.conf.errors import ConfigurationError, StoreUnavailableError
from gleaner.conf.schema import AnyStorage, LocalStorage, S3Storage

T = TypeVar("T")

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READ_BYTES = 32 * 2**20
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Stat:
    """A file as listed. `signature` changes when the file is written again; `modified` is the storage's own clock."""

    path: str
    size: int
    modified: float
    signature: str


class Files(Protocol):
    """Paths are relative to the store, with forward slashes. A missing file raises FileNotFoundError."""

    where: str

    def read(self, path: str) -> bytes: ...

    def read_many(self, paths: list[str]) -> list[bytes]: ...

    def write(self, path: str, data: bytes) -> None:
        """Replace the file as a whole."""
        ...

    def create(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        """Write the file if its name is free; False if it is taken. `durable`: survives a loss of power."""
        ...

    def upload(self, source: Path, path: str) -> None: ...

    def download(self, path: str, target: Path) -> None: ...

    def stat(self, path: str) -> Stat | None: ...

    def sha256(self, path: str) -> str:
        """Digest of the file's bytes, without holding a large one in memory."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the files and folders right inside `folder`, sorted; empty where there is none."""
        ...

    def walk(self, folder: str) -> Iterator[Stat]:
        """Every file below `folder`."""
        ...

    def move(self, path: str, target: str) -> None: ...

    def delete(self, path: str) -> None:
        """Delete the file; a missing one is no error."""
        ...


def open_files(storage: AnyStorage, *, attempts: int = 5, timeout_seconds: float = 60.0) -> Files:
    if isinstance(storage, S3Storage):
        return S3Files(storage, attempts=attempts, timeout_seconds=timeout_seconds)
    return LocalFiles(storage)


# --------------------------------------------------------------------------------------------------- local


class LocalFiles:
    """A folder on a POSIX file system that several processes, and machines, may share."""

    def __init__(self, storage: LocalStorage) -> None:
        self._root = Path(storage.path)
        self.where = str(self._root)

    def read(self, path: str) -> bytes:
        with self._clear_errors():
            return (self._root / path).read_bytes()

    def read_many(self, paths: list[str]) -> list[bytes]:
        return [self.read(path) for path in paths]

    def write(self, path: str, data: bytes) -> None:
        with self._clear_errors(), self._temporary(data, durable=True) as temporary:
            self._place(os.replace, temporary, path)

    def create(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        with self._clear_errors(), self._temporary(data, durable=durable) as temporary:
            try:
                self._place(os.link, temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in NO_LINKS:
                    raise ConfigurationError(
                        f"the file system of {self._root} has no hard links, which the store needs to publish files "
                        "safely: set storage.path to a folder on another disk"
                    ) from error
                raise
        return True

    def upload(self, source: Path, path: str) -> None:
        with self._clear_errors():
            temporary = self._temporary_path()
            try:
                shutil.copyfile(source, temporary)
                _flush(temporary)
                self._place(os.replace, temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def download(self, path: str, target: Path) -> None:
        with self._clear_errors():
            shutil.copyfile(self._root / path, target)

    def stat(self, path: str) -> Stat | None:
        with self._clear_errors():
            try:
                found = os.stat(self._root / path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return self._stat(path, found)

    def sha256(self, path: str) -> str:
        with self._clear_errors():
            return file_sha256(self._root / path)

    def names(self, folder: str) -> list[str]:
        with self._clear_errors():
            try:
                return sorted(os.listdir(self._root / folder))
            except FileNotFoundError:
                return []

    def walk(self, folder: str) -> Iterator[Stat]:
        for parent, _, names in os.walk(self._root / folder):
            for name in names:
                found = self.stat(os.path.relpath(os.path.join(parent, name), self._root))
                if found is not None:
                    yield found

    def move(self, path: str, target: str) -> None:
        with self._clear_errors():
            self._place(os.replace, self._root / path, target)

    def delete(self, path: str) -> None:
        with self._clear_errors():
            (self._root / path).unlink(missing_ok=True)
        with suppress(OSError):  # an empty folder of leases or attempts goes too
            parent = (self._root / path).parent
            # Not the folder that every write goes through: another process may just have seen that it is there.
            if parent not in (self._root, self._root / "tmp") and not any(parent.iterdir()):
                parent.rmdir()

    @staticmethod
    def _stat(path: str, found: os.stat_result) -> Stat:
        return Stat(
            path, found.st_size, found.st_mtime, f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
        )

    def _temporary_path(self) -> Path:
        path = self._root / "tmp" / uuid.uuid4().hex
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _temporary(self, data: bytes, durable: bool) -> Iterator[Path]:
        path = self._temporary_path()
        try:
            with open(path, "xb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    # The folder is not flushed: file systems keep the order of renames, so after a loss of power an
                    # early name may be there without a later one, never a key without its object.
                    os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _place(self, action: Callable[[Path, Path], None], source: Path, path: str) -> None:
        target = self._root / path
        for _ in range(10):
            try:
                return action(source, target)
            except FileNotFoundError:
                if not source.exists():
                    raise
                target.parent.mkdir(
                    parents=True, exist_ok=True
                )  # missing, or just removed because it was empty
        return action(source, target)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            if error.errno in NO_SPACE:
                raise ConfigurationError(
                    f"no space left for the store {self._root} ({error.strerror}): free some, or set storage.path to a "
                    "folder on another disk; the same command then resumes"
                ) from error
            if isinstance(error, PermissionError | NotADirectoryError | IsADirectoryError):
                raise ConfigurationError(
                    f"the store {self._root} cannot be used ({error}): set storage.path to a folder that you can write"
                ) from error
            raise StoreUnavailableError(
                f"the store {self._root} failed ({error}): check the disk, then start the same command again"
            ) from error


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------------ s3


class S3Files:
    """A prefix of a bucket, through s3fs. Transient faults are retried `attempts` times in all, with backoff; the
    retries of s3fs and botocore are off, so that the three do not multiply."""

    def __init__(self, storage: S3Storage, *, attempts: int, timeout_seconds: float) -> None:
        self._storage = storage
        self._attempts = attempts
        self._timeout_seconds = timeout_seconds
        self._base = "/".join(part for part in (storage.bucket, storage.prefix.strip("/")) if part)
        self.where = f"s3://{self._base}" + (f" at {storage.endpoint_url}" if storage.endpoint_url else "")

    def read(self, path: str) -> bytes:
        # One connection: with more, s3fs asks for the size first, and small files take two requests instead of one.
        return self._call(lambda fs: fs.cat_file(self._full(path), max_concurrency=1))

    def read_many(self, paths: list[str]) -> list[bytes]:
        if not paths:
            return []
        full = [self._full(path) for path in paths]
        found = self._call(lambda fs: fs.cat(full, on_error="raise", max_concurrency=1))
        return [found[path] for path in full] if isinstance(found, dict) else [found]

    def write(self, path: str, data: bytes) -> None:
        self._call(lambda fs: fs.pipe_file(self._full(path), data))

    def create(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        try:
            self._call(lambda fs: fs.pipe_file(self._full(path), data, mode="create"))
        except FileExistsError:
            # A put whose answer was lost has succeeded, and its retry finds its own file.
            try:
                return self.read(path) == data
            except FileNotFoundError:
                return False  # taken then, and given back since
        return True

    def upload(self, source: Path, path: str) -> None:
        self._call(lambda fs: fs.put_file(str(source), self._full(path)))

    def download(self, path: str, target: Path) -> None:
        self._call(lambda fs: fs.get_file(self._full(path), str(target)))

    def stat(self, path: str) -> Stat | None:
        try:
            return self._stat(self._call(lambda fs: fs.info(self._full(path))))
        except FileNotFoundError:
            return None

    def sha256(self, path: str) -> str:
        def read(fs: Any) -> str:
            with fs.open(self._full(path), "rb", block_size=READ_BYTES, cache_type="readahead") as file:
                digest = hashlib.sha256()
                while block := file.read(READ_BYTES):
                    digest.update(block)
                return digest.hexdigest()

        return self._call(read)

    def names(self, folder: str) -> list[str]:
        try:
            found = self._call(lambda fs: fs.ls(self._full(folder), detail=False, refresh=True))
        except FileNotFoundError:
            return []
        paths = {path.rstrip("/") for path in found} - {
            self._full(folder)
        }  # some servers list the folder itself
        return sorted(path.rsplit("/", 1)[-1] for path in paths)

    def walk(self, folder: str) -> Iterator[Stat]:
        found = self._call(lambda fs: fs.find(self._full(folder), detail=True))
        for name, info in found.items():
            if info["type"] == "file" and not name.endswith("/"):  # some servers list folders, empty ones too
                yield self._stat(info)

    def move(self, path: str, target: str) -> None:
        self._call(lambda fs: fs.copy(self._full(path), self._full(target)))
        self.delete(path)

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._call(lambda fs: fs.rm_file(self._full(path)))

    def _full(self, path: str) -> str:
        return f"{self._base}/{path}"

    def _stat(self, info: dict[str, Any]) -> Stat:
        path = info["name"].removeprefix(f"{self._base}/")
        return Stat(
            path,
            int(info["size"]),
            info["LastModified"].timestamp(),
            f"{info['ETag']}-{info['LastModified']}",
        )

    def _filesystem(self) -> Any:
        """The process's file system for these settings. fsspec keeps one per process, a forked child gets its own."""
        import s3fs

        config: dict[str, Any] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": min(10.0, self._timeout_seconds),
            "read_timeout": self._timeout_seconds,
        }
        if (
            self._storage.endpoint_url
        ):  # servers of one's own rarely know bucket names as host names, or checksums
            config["s3"] = {"addressing_style": "path"}
            config["request_checksum_calculation"] = "when_required"
            config["response_checksum_validation"] = "when_required"
        filesystem = s3fs.S3FileSystem(
            endpoint_url=self._storage.endpoint_url, use_listings_cache=False, config_kwargs=config
        )
        filesystem.retries = 1
        return filesystem

    def _call(self, action: Callable[[Any], T]) -> T:
        """Run `action` on the file system, and again after transient faults.

        Raises:
            FileNotFoundError, FileExistsError: an answer, not a fault.
            ConfigurationError: credentials, bucket or clock are wrong.
            StoreUnavailableError: the attempts are used up.
        """
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
            retry=tenacity.retry_if_exception_type(StoreUnavailableError),
            reraise=True,
        )
        return retrying(self._attempt, action)

    def _attempt(self, action: Callable[[Any], T]) -> T:
        try:
            return action(self._filesystem())
        except Exception as error:
            answer = self._meaning(error)
            if answer is error:
                raise
            raise answer from error

    def _meaning(self, error: Exception) -> Exception:
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            NoCredentialsError,
            PartialCredentialsError,
        )

        client = error if isinstance(error, ClientError) else error.__cause__
        if isinstance(client, ClientError):
            code = str(client.response.get("Error", {}).get("Code", ""))
            status = int(client.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if code == "NoSuchBucket":
                return ConfigurationError(
                    f"bucket {self._storage.bucket} does not exist on {self._storage.endpoint_url or 'S3'}: create it, "
                    "or set storage.bucket"
                )
            if code == "RequestTimeTooSkewed":
                return ConfigurationError(
                    "S3 refuses this machine's clock: set the clock right, then start again"
                )
            if status in (401, 403):
                return self._refused(code or str(status))
            if status == 404:
                return FileNotFoundError(str(error))
            if status == 412:
                return FileExistsError(str(error))
            if 400 <= status < 500 and status not in (408, 409, 429) and code not in TRANSIENT_CODES:
                return ConfigurationError(
                    f"{self.where} refuses the request ({code or status}): check storage.*"
                )
            return self._unavailable(f"{code or status}")
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return self._refused("no credentials")
        if isinstance(error, FileNotFoundError | FileExistsError):
            return error
        if isinstance(error, PermissionError):
            return self._refused("access denied")
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return ConfigurationError(
                f"no space left on this machine for a copy from {self.where}: free some"
            )
        if isinstance(error, BotoCoreError | OSError | TimeoutError) or type(error).__module__.startswith(
            ("aiohttp", "botocore", "aiobotocore", "fsspec")
        ):
            return self._unavailable(type(error).__name__)
        return error

    def _refused(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.where} refuses the credentials ({reason}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and "
            "AWS_SESSION_TOKEN, if they expire) to ones that may read and write the bucket"
        )

    def _unavailable(self, reason: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.where} did not answer after {self._attempts} attempts ({reason}): check the server and "
            "storage.endpoint_url, then start the same command again"
        )


TRANSIENT_CODES = ("SlowDown", "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch")
