"""Tracking in MLflow that can neither stop nor slow a run.

The run appends to a spool on its own disk (spool.py); a second process (replay.py) tells MLflow, whenever MLflow
answers, and ends with the run's process. MLflow is never imported here, so neither its start (seconds of import and
of database migrations) nor its calls (about 0.1 s each) take the training process's time.
"""

import atexit
import contextlib
import getpass
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, SupportsFloat

import yaml

from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import AnyStorage, S3Storage, TrackingSettings
from gleaner.tasks.spool import ReplayState, Spool

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

SPOOL_ROOT = Path(".gleaner/spool")
PARAM_LENGTH = 500
"""Characters of a parameter that every MLflow server accepts; the whole value becomes an artifact."""
TAG_LENGTH = 5_000
KEY_LENGTH = 250
STARTING_SECONDS = 60.0
"""How long `finish` waits for a replay that is still loading MLflow or creating its database."""
LONGEST_WAIT_SECONDS = 120.0

_PACKAGE = Path(__file__).resolve().parents[1]
_REFUSED_IN_KEYS = re.compile(r"[^\w\-. :/]")
_CREDENTIALS_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s\"']+@", re.IGNORECASE)
_SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|secret|api_?key|access_?key|(auth|access)_?token)$", re.IGNORECASE
)


class RunTracker:
    """One run's metrics, artifacts and status, on their way to MLflow.

    No method but `start` raises for anything that MLflow, the network or the disk does: what is lost is counted and
    told by `finish`. One process may track several runs.
    """

    def __init__(self, spool: Spool, run_id: str, command: dict[str, Any]):
        self.run_id = run_id
        self._spool = spool
        self._command = command
        self._lost = 0

    @classmethod
    def start(
        cls,
        tracking: TrackingSettings,
        run_id: str,
        settings_yaml: str,
        tags: Mapping[str, str] | None = None,
        *,
        storage: AnyStorage | None = None,
        root: Path = SPOOL_ROOT,
    ) -> "RunTracker":
        """Start tracking, or go on with the MLflow run of `run_id`, replaying first what an earlier start left.

        Args:
            run_id: the run's name; its MLflow run is found by the tag gleaner.run_id in the experiment.
            settings_yaml: becomes the artifact settings.yaml and, flattened, the parameters. Passwords in URLs and
                values under names like `password` or `api_key` are blanked first.
            tags: added to gleaner.run_id, .method, .environment, .policy, .seed, .code, .version and Prefect's flow
                run.
            storage: where artifacts go if MLflow is a bare database: S3 puts them in the same bucket. Elsewhere they
                lie beside the database, and a tracking server decides for itself.
            root: folder of the spools.

        Raises:
            ConfigurationError: the run's name is no folder name, or the spool cannot be written.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", run_id):
            raise ConfigurationError(
                f"run.name={run_id!r} is no folder name: use letters, digits, '.', '_' and '-'"
            )
        spool = Spool(root / run_id)
        try:
            uri, artifact_root = _locate(tracking.uri, storage)
            spool.open()
        except OSError as error:
            raise ConfigurationError(
                f"tracking cannot write under {error.filename or spool.folder} ({error.strerror}): run from a folder "
                "that you may write to, or set tracking.uri"
            ) from error
        settings = _without_secrets(yaml.safe_load(settings_yaml) or {})
        command = {
            "do": "open",
            "folder": str(spool.folder),
            "run_id": run_id,
            "uri": uri,
            "experiment": tracking.experiment,
            "parent_run": tracking.parent_run,
            "artifact_root": artifact_root,
            "s3_endpoint_url": storage.endpoint_url if isinstance(storage, S3Storage) else None,
        }
        tracker = cls(spool, run_id, command)
        tracker._begin(settings, {**_tags_of(settings), **_tags_of_prefect(), **(tags or {})})
        tracker._tell(command)
        return tracker

    def metrics(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Record metrics of a step; of a (key, step) that is recorded again, as after a resume, the first stays.

        Values that are not finite are left out, and tracking/not_finite counts them.
        """
        finite: dict[str, float] = {}
        left_out = 0
        for key, value in values.items():
            number = float(value)
            if math.isfinite(number):
                finite[_key(key)] = number
            else:
                left_out += 1
        if left_out:
            finite["tracking/not_finite"] = float(left_out)
        self._append("metrics", step=step, values=finite)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a copy of a file, and upload it under its own name to `folder`."""
        self._keep(f"{folder}/{path.name}" if folder else path.name, path)

    def content(self, path: str, data: bytes | str) -> None:
        """Upload `data` as the artifact `path`, such as plots/learning.png."""
        self._keep(path, data.encode() if isinstance(data, str) else data)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Upload rows as `<name>.json`, which MLflow shows as a table. A later table of the same name replaces it."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[_cell(row.get(column)) for column in columns] for row in rows]
        self.content(f"{name}.json", json.dumps({"columns": columns, "data": cells}, default=str))
        self._append("table", path=f"{name}.json")

    def data_set(self, name: str, digest: str, counts: Mapping[str, int], source: str = "") -> None:
        """Name the prompts that the run learns from: digest of the environment, prompts per split."""
        self._append(
            "data_set", name=name, digest=digest[:36], counts=dict(counts), source=_blank_urls(source)
        )

    def tags(self, tags: Mapping[str, str]) -> None:
        self._append("tags", tags=_tags(tags))

    @property
    def url(self) -> str | None:
        """Page of the MLflow run; None until MLflow answered, and where MLflow is a database without a server."""
        return self._spool.state().url

    @property
    def mlflow_run_id(self) -> str | None:
        """None until MLflow answered."""
        return self._spool.state().mlflow_run_id or None

    def finish(self, status: RunStatus = "FINISHED", wait_seconds: float = 10.0) -> dict[str, Any]:
        """Set the run's status and wait until MLflow has everything, or has given no sign for `wait_seconds`.

        Returns:
            status, delivered, url, mlflow_run_id, pending_bytes, pending_artifacts, lost (records that this disk
            refused), rejected (entries that MLflow refused), error, spool, and `message`, a sentence or two for people.
            What is pending stays in the spool; the next start of the same run delivers it.
        """
        self._append("finish", status=status)
        end = self._spool.size()
        self._tell({"do": "finish", "folder": self._command["folder"]})
        state, delivered = self._await(end, wait_seconds)
        if not delivered:
            self._tell({"do": "close", "folder": self._command["folder"]}, respawn=False)
        self._spool.close()
        pending_bytes, pending_artifacts = max(0, end - state.offset), len(self._spool.waiting())
        return {
            "status": status,
            "delivered": delivered,
            "url": state.url,
            "mlflow_run_id": state.mlflow_run_id or None,
            "pending_bytes": pending_bytes,
            "pending_artifacts": pending_artifacts,
            "lost": self._lost,
            "rejected": state.rejected,
            "error": state.error,
            "spool": str(self._spool.folder),
            "message": _message(
                state, delivered, pending_bytes, pending_artifacts, self._lost, self._spool.folder
            ),
        }

    # ---------------------------------------------------------------------------------------------- inside

    def _begin(self, settings: dict[str, Any], tags: Mapping[str, str]) -> None:
        params: dict[str, str] = {}
        for name, value in _flatten(settings):
            key = _key(name)
            params[key] = value
            if len(value) > PARAM_LENGTH:
                params[key] = value[: PARAM_LENGTH - 1] + "…"
                self.content(f"params/{key.replace('/', '_')}.txt", value)
        self.content("settings.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        self._append("start", params=params, tags=_tags({**tags, "gleaner.run_id": self.run_id}))

    def _append(self, kind: str, **fields: Any) -> None:
        try:
            self._spool.append({"kind": kind, "time": int(time.time() * 1000), **fields})
        except (OSError, TypeError, ValueError):
            self._lost += 1

    def _keep(self, path: str, source: Path | bytes) -> None:
        try:
            self._spool.put_file(path, source)
        except (OSError, ValueError):
            self._lost += 1

    def _tell(self, command: dict[str, Any], respawn: bool = True) -> None:
        """Hand a command to the replay process; a new one is told of this run first."""
        log = self._spool.folder.parent / "replay.log"
        with contextlib.suppress(OSError):
            process, fresh = _replay_process(log, respawn)
            if process is None:
                return
            if fresh and command["do"] != "open":
                _send(process, self._command)
            _send(process, command)

    def _await(self, end: int, wait_seconds: float) -> tuple[ReplayState, bool]:
        started = changed = time.monotonic()
        state = self._spool.state()
        while True:
            if state.offset >= end and not self._spool.waiting():
                return state, True
            now = time.monotonic()
            patience = max(wait_seconds, STARTING_SECONDS) if state.starting else wait_seconds
            is_late = now - changed > patience or now - started > max(wait_seconds, LONGEST_WAIT_SECONDS)
            if is_late or _process is None or _process.poll() is not None:
                return state, False
            time.sleep(0.05)
            latest = self._spool.state()
            if latest != state:
                state, changed = latest, time.monotonic()


def budget_metrics(
    rollouts: int, generated_tokens: int, forward_tokens: Mapping[str, int], seconds: Mapping[str, float]
) -> dict[str, float]:
    """The second axis of every plot: what was spent up to and including a step, and the step's seconds by phase.

    Args:
        rollouts, generated_tokens: sampled since the run began, refills and repeated shards included.
        forward_tokens: by role (teacher, peer, critic, advisor), since the run began.
        seconds: by phase, of this step alone.
    """
    return {
        "budget/rollouts": float(rollouts),
        "budget/generated_tokens": float(generated_tokens),
        **{f"budget/forward_tokens/{role}": float(tokens) for role, tokens in forward_tokens.items()},
        **{f"seconds/{phase}": duration for phase, duration in seconds.items()},
    }


# ----------------------------------------------------------------------------------------- replay process

_process: subprocess.Popen[bytes] | None = None
_process_owner = 0


def _replay_process(log: Path, respawn: bool) -> tuple[subprocess.Popen[bytes] | None, bool]:
    """This process's replay process, and whether it was just started. A forked child gets its own."""
    global _process, _process_owner
    if _process is not None and _process_owner == os.getpid() and _process.poll() is None:
        return _process, False
    if not respawn:
        return None, False
    environment = {
        # One bounded attempt a call: the replay itself comes back as often as it takes.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }
    with log.open("ab") as sink:
        _process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gleaner.tasks.replay"],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the run, which then tells MLflow so
        )
    _process_owner = os.getpid()
    return _process, True


def _send(process: subprocess.Popen[bytes], command: dict[str, Any]) -> None:
    if process.stdin is not None:
        process.stdin.write(json.dumps(command).encode() + b"\n")
        process.stdin.flush()


@atexit.register
def _hang_up() -> None:
    """The end of its input tells the replay process to finish what it can and go."""
    if _process is not None and _process_owner == os.getpid() and _process.stdin is not None:
        with contextlib.suppress(OSError):
            _process.stdin.close()


# ---------------------------------------------------------------------------------- addresses and secrets


def _locate(uri: str, storage: AnyStorage | None) -> tuple[str, str | None]:
    """The tracking URI with an absolute path, and where a bare database's artifacts go (None: the server decides)."""
    scheme = uri.split(":", 1)[0].split("+")[0]
    if scheme not in ("sqlite", "postgresql", "mysql", "mssql"):
        return uri, None
    folder = Path(".gleaner").absolute()
    if scheme == "sqlite" and ":memory:" not in uri:
        prefix, _, path = uri.partition(":///")
        database = Path(path).absolute()
        database.parent.mkdir(parents=True, exist_ok=True)
        uri, folder = f"{prefix}:///{database}", database.parent
    if isinstance(storage, S3Storage):
        return uri, f"s3://{storage.bucket}/{storage.prefix.strip('/')}-mlartifacts"
    return uri, (folder / "mlartifacts").as_uri()


def _blank_urls(text: str) -> str:
    return _CREDENTIALS_IN_URL.sub(r"\1***@", text)


def _without_secrets(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item, name) for item in value]
    if value is not None and _SECRET_NAME.search(name):
        return "***"
    return _blank_urls(value) if isinstance(value, str) else value


# ------------------------------------------------------------------------------------ parameters and tags


def _flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    """(dotted name, text) of every leaf; a list is one leaf, as JSON."""
    if isinstance(value, dict) and value:
        return [
            leaf
            for key, item in value.items()
            for leaf in _flatten(item, f"{name}.{key}" if name else str(key))
        ]
    if isinstance(value, str):
        return [(name, value)]
    return [(name, json.dumps(value, default=str))] if name else []


def _key(name: str) -> str:
    return _REFUSED_IN_KEYS.sub("_", name)[:KEY_LENGTH]


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {_key(name): _blank_urls(str(text))[:TAG_LENGTH] for name, text in tags.items()}


def _cell(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tags_of(settings: dict[str, Any]) -> dict[str, str]:
    def kind(section: str) -> str:
        part = settings.get(section)
        return str(part.get("kind", "")) if isinstance(part, dict) else ""

    run = settings.get("run")
    commit = _git_commit()
    code = _package_digest()
    tags = {
        "gleaner.method": kind("method"),
        "gleaner.environment": kind("environment"),
        "gleaner.policy": kind("policy"),
        "gleaner.seed": str(run.get("seed", "")) if isinstance(run, dict) else "",
        "gleaner.version": version("gleaner"),
        "gleaner.code": commit or f"sha256:{code}",
        "gleaner.code_digest": code,
        "mlflow.source.name": "gleaner",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": (commit or "").removesuffix("-dirty"),
        "mlflow.user": _user(),
    }
    return {name: text for name, text in tags.items() if text}


def _package_digest() -> str:
    """sha256 over Gleaner's sources, names and contents."""
    digest = hashlib.sha256()
    for package in ("conf", "flows", "models", "tasks"):
        for path in sorted((_PACKAGE / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _git_commit() -> str | None:
    """Commit of Gleaner's own checkout, `-dirty` if tracked files differ; None for an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != _PACKAGE:
            return None  # a user's repository that holds the installed package
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _tags_of_prefect() -> dict[str, str]:
    """Id and page of the flow run that this is called from; nothing outside of one."""
    if "prefect" not in sys.modules:
        return {}
    from prefect.runtime import flow_run

    if not flow_run.id:
        return {}
    return {"prefect.flow_run_id": str(flow_run.id), "prefect.flow_run_url": str(flow_run.ui_url or "")}


def _message(
    state: ReplayState, delivered: bool, pending_bytes: int, pending_artifacts: int, lost: int, folder: Path
) -> str:
    parts = []
    if delivered:
        parts.append("MLflow has everything.")
    else:
        reason = state.error or "it is slow or does not answer"
        parts.append(
            f"MLflow has not everything yet ({reason}): {pending_bytes} bytes of records and {pending_artifacts} "
            f"artifacts wait in {folder}. Start the same run again and they are delivered."
        )
    if state.rejected:
        parts.append(f"MLflow refused {state.rejected} entries.")
    if lost:
        parts.append(f"{lost} records could not be written to {folder}: free disk space.")
    return " ".join(parts)
