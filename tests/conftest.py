"""Fixtures that every part of the suite shares."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the suite's figures must not depend on the machine's cores


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server for the session; flows of this process and of children talk to it."""
    from gleaner.flows.runtime import prepare_process
    from gleaner.flows.services import prefect_server

    folder: Path = tmp_path_factory.mktemp("prefect")
    os.environ["PREFECT_HOME"] = str(folder)
    os.environ["PREFECT_MEMO_STORE_PATH"] = str(folder / "memo_store.toml")
    prepare_process(folder)
    with prefect_server(folder / "server.log") as api:
        yield api
