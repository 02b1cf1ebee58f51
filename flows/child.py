"""One run in a process of its own: `python -P -m gleaner.flows.child settings.json`. It ends when its input does."""

import contextlib
import importlib
import os
import sys
import threading
from pathlib import Path

from gleaner.conf.errors import GleanerError
from gleaner.conf.schema import GleanerSettings
from gleaner.flows.runtime import prepare_process


def main() -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    settings = GleanerSettings.model_validate_json(Path(sys.argv[1]).read_text())
    prepare_process()
    method = settings.method.kind
    flow = getattr(importlib.import_module(f"gleaner.flows.{method}"), method)
    try:
        flow(settings)
    except GleanerError as error:
        sys.exit(f"gleaner: {error}")


def _end_with_the_parent() -> None:
    """The parent holds the other end of this pipe. Without this, a killed comparison would leave its runs behind, and
    its next start would run them a second time beside themselves."""
    os.read(sys.stdin.fileno(), 1)
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    os._exit(1)


if __name__ == "__main__":
    main()
