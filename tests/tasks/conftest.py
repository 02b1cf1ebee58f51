"""Stores for the tests: a local folder, and moto's S3 server in a thread."""

import uuid

import pytest

from gleaner.conf.schema import LocalStorage, S3Storage
from gleaner.tasks.store import ObjectStore, forget_decoded


@pytest.fixture(scope="session")
def moto_url():
    """Address of an S3 server that takes any key; for request shapes and faults, not for consistency."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def moto_storage(moto_url, monkeypatch):
    """A fresh bucket of the moto server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    bucket = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(endpoint_url=moto_url).mkdir(bucket)
    return S3Storage(bucket=bucket, prefix="store", endpoint_url=moto_url)


@pytest.fixture
def local_store(tmp_path):
    forget_decoded()
    return ObjectStore(LocalStorage(path=str(tmp_path / "store")))


@pytest.fixture(params=["local", "moto"])
def store(request):
    forget_decoded()
    if request.param == "local":
        return request.getfixturevalue("local_store")
    return ObjectStore(request.getfixturevalue("moto_storage"), attempts=3, timeout_seconds=10)
