"""One run in a process of its own, forked from a process that has loaded `flows.preload`. It ends when the process that
ordered it does."""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from gleaner.conf.errors import GleanerError
from gleaner.conf.schema import GleanerSettings


def run_child(order: Path, log: Path, folder: Path, variables: Mapping[str, str]) -> None:
    """Run the flow of the settings in `order`.

    Args:
        log: gets the process's output and errors, after what it holds.
        folder: the working folder.
        variables: the environment of the process that ordered the run, which may have changed since the fork server
            was started.
    """
    os.setsid()
    with log.open("ab") as sink:
        for stream in (1, 2):
            os.dup2(sink.fileno(), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    settings = GleanerSettings.model_validate_json(order.read_text())
    method = settings.method.kind
    flow = getattr(importlib.import_module(f"gleaner.flows.{method}"), method)

    import prefect.context

    # Prefect read its settings when the fork server loaded it; the server's address may be another one by now.
    prefect.context.GLOBAL_SETTINGS_CONTEXT = prefect.context.root_settings_context()
    try:
        flow(settings)
    except GleanerError as error:
        sys.exit(f"gleaner: {error}")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without them; the tracker's process waits for its hang-up


def _end_with_the_parent() -> None:
    """Without this, a killed comparison would leave its runs behind, and its next start would run them a second time
    beside themselves."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a run's process is started by multiprocessing"
    parent.join()
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    os._exit(1)
