"""One run in a process of its own: `python -P -m gleaner.flows.child settings.json`."""

import importlib
import sys
from pathlib import Path

from gleaner.conf.errors import GleanerError
from gleaner.conf.schema import GleanerSettings
from gleaner.flows.runtime import prepare_process


def main() -> None:
    settings = GleanerSettings.model_validate_json(Path(sys.argv[1]).read_text())
    prepare_process()
    method = settings.method.kind
    flow = getattr(importlib.import_module(f"gleaner.flows.{method}"), method)
    try:
        flow(settings)
    except GleanerError as error:
        sys.exit(f"gleaner: {error}")


if __name__ == "__main__":
    main()
