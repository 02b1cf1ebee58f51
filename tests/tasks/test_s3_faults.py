"""S3 that fails: a proxy between the store and moto's server answers the first requests of a kind wrongly."""

import contextlib
import http.client
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

import pytest

from gleaner.conf.errors import ConfigurationError, StoreUnavailableError
from gleaner.conf.schema import S3Storage
from gleaner.tasks.store import ObjectStore, Record

ERROR_BODY = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>injected</Message></Error>"
CODES = {
    500: b"InternalError",
    503: b"SlowDown",
    403: b"ExpiredToken",
    409: b"ConditionalRequestConflict",
    412: b"PreconditionFailed",
}


REQUESTS_OF_3_ATTEMPTS = (3, 6)
"""aiohttp sends a request again by itself when a kept connection is reset before an answer."""


class Proxy(ThreadingHTTPServer):
    """Forwards to an S3 server. `fail(method, path part, how, times)` arms one fault.

    how: a status code; `reset` (the connection is reset before an answer); `slow` (no answer for 1.5 s); `cut` (half of
    the body, then a reset); `lost` (the request is done, its answer is not sent).
    """

    daemon_threads = True

    def __init__(self, target):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = urlparse(target)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.fault = None
        self.seen = 0
        self.lock = threading.Lock()

    def fail(self, method, part, how, times=10**6):
        self.fault, self.seen = (method, part, how, times), 0

    def fault_for(self, method, path):
        with self.lock:
            if self.fault is None or self.fault[0] != method or self.fault[1] not in path:
                return None
            self.seen += 1
            return self.fault[2] if self.seen <= self.fault[3] else None

    def handle_error(self, request, client_address):
        pass  # resets are on purpose


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        how = self.server.fault_for(self.command, self.path)
        if how == "reset":
            return self.reset()
        if how == "slow":
            time.sleep(1.5)
            return self.reset()
        if isinstance(how, int):
            return self.send(how, {"Content-Type": "application/xml"}, ERROR_BODY % CODES[how])
        upstream = http.client.HTTPConnection(self.server.target.hostname, self.server.target.port)
        upstream.request(self.command, self.path, body, dict(self.headers))
        response = upstream.getresponse()
        data = response.read()
        headers = {
            k: v for k, v in response.getheaders() if k.lower() not in ("transfer-encoding", "connection")
        }
        if how == "lost":
            return self.reset()
        if how == "cut":
            self.send(response.status, headers | {"Content-Length": str(len(data))}, data[: len(data) // 2])
            return self.reset()
        return self.send(response.status, headers, data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def send(self, status, headers, data):
        self.send_response_only(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def reset(self):
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()

    def log_message(self, *args):
        pass


@pytest.fixture
def proxy(moto_url):
    server = Proxy(moto_url)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def faulty_store(proxy, moto_storage):
    storage = S3Storage(bucket=moto_storage.bucket, prefix="store", endpoint_url=proxy.url)
    return ObjectStore(storage, attempts=3, timeout_seconds=0.5)


@pytest.fixture
def sound_store(moto_storage):
    return ObjectStore(moto_storage)


@pytest.mark.parametrize("how", [500, 503, "reset", "slow", "lost"])
def test_a_put_survives_two_faults(proxy, faulty_store, sound_store, how):
    proxy.fail("PUT", "/objects/", how, times=2)
    ref = faulty_store.put_bytes(b"data")
    assert proxy.seen == 3
    assert sound_store.get_bytes(ref) == b"data"


@pytest.mark.parametrize("how", [500, 503, "reset", "slow", "cut"])
def test_a_get_survives_two_faults(proxy, faulty_store, how):
    ref = faulty_store.put_bytes(b"data" * 1000)
    proxy.fail("GET", "/objects/", how, times=2)
    assert faulty_store.get_bytes(ref) == b"data" * 1000
    assert proxy.seen == 3


@pytest.mark.parametrize("how", [500, 503, "reset", "slow"])
def test_a_put_that_keeps_failing_ends_and_leaves_no_key(proxy, faulty_store, sound_store, how):
    proxy.fail("PUT", "/objects/", how)
    start = time.monotonic()
    with pytest.raises(
        StoreUnavailableError, match=r"after 3 attempts .*start the same command again"
    ) as error:
        faulty_store.memoise("k", lambda: Record({"x": faulty_store.put_bytes(b"data")}))
    assert error.value.retryable
    assert proxy.seen in REQUESTS_OF_3_ATTEMPTS
    assert time.monotonic() - start < 20
    assert sound_store.lookup("k") is None
    assert sound_store.list_keys() == []
    proxy.fault = None
    record, hit = faulty_store.memoise("k", lambda: Record({"x": faulty_store.put_bytes(b"data")}))
    assert not hit
    assert sound_store.get_bytes(record.objects["x"]) == b"data"
    assert sound_store.attempts("k") == 2


@pytest.mark.parametrize("how", [500, 503, "reset", "slow", "cut"])
def test_a_get_that_keeps_failing_ends(proxy, faulty_store, how):
    ref = faulty_store.put_bytes(b"data" * 1000)
    proxy.fail("GET", "/objects/", how)
    with pytest.raises(StoreUnavailableError, match="after 3 attempts"):
        faulty_store.get_bytes(ref)
    assert proxy.seen in REQUESTS_OF_3_ATTEMPTS


def test_a_key_that_cannot_be_published_is_not_there(proxy, faulty_store, sound_store):
    proxy.fail("PUT", "/keys/", 500)
    with pytest.raises(StoreUnavailableError):
        faulty_store.publish("k", Record({"x": faulty_store.put_bytes(b"data")}))
    assert sound_store.lookup("k") is None


def test_a_publication_whose_answer_was_lost_counts_as_won(proxy, faulty_store):
    """The put succeeds, its answer is lost, and the retry is told that the key is taken: by itself."""
    proxy.fail("PUT", "/keys/", "lost", times=1)
    record = faulty_store.publish("k", Record({}, {"n": 1}))
    assert record.facts == {"n": 1}
    assert faulty_store.files.create("runs/r/steps/00000000.json", b"entry") is True
    proxy.fail("PUT", "/runs/", "lost", times=1)
    assert faulty_store.files.create("runs/r/steps/00000001.json", b"entry") is True
    assert faulty_store.files.create("runs/r/steps/00000001.json", b"other") is False


def test_a_conflict_of_two_conditional_puts_is_tried_again(proxy, faulty_store):
    proxy.fail("PUT", "/keys/", 409, times=1)
    assert faulty_store.publish("k", Record({}, {"n": 1})).facts == {"n": 1}


def test_a_lease_that_is_given_back_in_between_is_asked_for_again(proxy, faulty_store):
    """The put is told that the name is taken, and a moment later nothing is there."""
    proxy.fail("PUT", "/leases/", 412, times=1)
    _, hit = faulty_store.memoise("k", lambda: Record({}))
    assert not hit


def test_an_expired_token_is_not_retried_and_names_the_variables(proxy, faulty_store):
    proxy.fail("PUT", "/objects/", 403)
    with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        faulty_store.put_bytes(b"data")
    assert proxy.seen == 1


def test_a_server_that_is_not_there_is_unavailable(moto_storage):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        store = ObjectStore(S3Storage(bucket="bucket", endpoint_url=url), attempts=2, timeout_seconds=1)
        with pytest.raises(StoreUnavailableError, match=r"storage\.endpoint_url"):
            store.get_bytes("0" * 64)


def test_a_bucket_that_is_not_there_is_a_configuration_error(moto_storage):
    storage = S3Storage(bucket="no-such-bucket", endpoint_url=moto_storage.endpoint_url)
    with pytest.raises(ConfigurationError, match=r"bucket no-such-bucket does not exist .*create it"):
        ObjectStore(storage).check()


def test_a_server_that_ignores_conditional_puts_is_refused(proxy, faulty_store, monkeypatch):
    original = Handler.answer

    def without_condition(handler):
        del handler.headers["If-None-Match"]
        return original(handler)

    monkeypatch.setattr(Handler, "do_PUT", without_condition)
    with pytest.raises(ConfigurationError, match="ignores conditional puts"):
        faulty_store.check()


def test_secrets_appear_in_no_message(proxy, faulty_store):
    import pickle

    proxy.fail("PUT", "/objects/", 403)
    with pytest.raises(ConfigurationError) as error:
        faulty_store.put_bytes(b"data")
    for text in (str(error.value), repr(faulty_store), str(pickle.dumps(faulty_store))):
        assert "testing-secret" not in text
