"""The pages: Prefect's and MLflow's, on the runs of this folder."""

import os
import signal
import threading
from pathlib import Path

from rich.console import Console

from gleaner.flows.services import mlflow_server, prefect_server

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
FOLDER = Path(".gleaner")


def ui() -> None:
    """Serve both pages on loopback until interrupted."""
    console = Console()
    console.print("starting Prefect and MLflow (up to a minute) …")
    database = FOLDER.resolve() / "mlflow.db"
    prefect_port, mlflow_port = (
        int(os.environ.get(n, p))
        for n, p in (("GLEANER_PREFECT_PORT", PREFECT_PORT), ("GLEANER_MLFLOW_PORT", MLFLOW_PORT))
    )
    with (
        prefect_server(FOLDER / "prefect-server.log", prefect_port) as api,
        mlflow_server(
            FOLDER / "mlflow-server.log", f"sqlite:///{database}", FOLDER / "mlartifacts", mlflow_port
        ) as url,
    ):
        console.print(f"Prefect  {api.removesuffix('/api')}", highlight=False)
        console.print(f"MLflow   {url}", highlight=False)
        console.print("Ctrl-C ends both.")
        interrupted = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: interrupted.set())
        interrupted.wait()
