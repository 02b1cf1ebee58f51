"""What must be true of a process before Prefect and MLflow are imported: both read the environment as they load."""

import os
from pathlib import Path


def prepare_process(folder: Path = Path(".gleaner")) -> None:
    """Keep Prefect's files in `folder`, give its server time to start, and send nobody any telemetry.

    Whatever the user has set already stays as it is, an API address of a Prefect server among it.
    """
    prefect_home = folder.resolve() / "prefect"
    if "PREFECT_HOME" not in os.environ:
        prefect_home.mkdir(parents=True, exist_ok=True)
    defaults = {
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_MEMO_STORE_PATH": str(prefect_home / "memo_store.toml"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Terminals show progress bars; every log line still goes to the Prefect UI.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
