import contextlib
import json
import signal
import socket
import threading
import time

import openai
import pytest

BODY = {"model": "tiny", "prompt": "script=long", "max_tokens": 1000}


def post(server, path="/v1/completions", **changes):
    return server.http.post(path, json=BODY | changes)


@contextlib.contextmanager
def running(server, until, n=1, **changes):
    """Hold streams open that have begun."""
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            request = server.http.stream(
                "POST", "/v1/completions", json=BODY | {"stream": True} | changes
            )
            stack.enter_context(request)
        until(lambda: server.worker.n_live == n * changes.get("n", 1))
        yield


def test_a_full_queue_turns_requests_away_for_a_while(server, until):
    with running(server, until, n=8):
        until(lambda: server.engine.n_running == 3)
        response = post(server)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "queue_full"
        assert "dsv32_waiting_texts 5.0" in server.http.get("/metrics").text
    until(lambda: server.worker.n_live == 0)
    assert post(server, max_tokens=1).status_code == 200


def test_choices_are_taken_all_or_none(server, until):
    with running(server, until, n=7):
        assert post(server, n=2).status_code == 429
        assert server.worker.n_live == 7
    until(lambda: server.worker.n_live == 0)
    assert post(server, n=9).status_code == 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots_at_once(server, until, stream):
    before = server.engine.stats.drawn_tokens
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(http_request(BODY | {"stream": stream, "n": 2}))
        until(lambda: server.engine.n_running == 2)
    until(lambda: server.worker.n_live == 0 and server.engine.n_running == 0)
    assert server.engine.stats.drawn_tokens - before < 1500  # of 2000
    if not stream:
        until(lambda: 'completions",status="499"' in server.http.get("/metrics").text)


def test_a_client_that_leaves_amid_its_body_is_counted_as_that(serve, until, caplog):
    with serve() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(http_request(BODY)[:-1])
        left = 'dsv32_requests_total{path="/v1/completions",status="499"} 1.0'
        until(lambda: left in server.http.get("/metrics").text)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_waiting_request_can_be_left_too(server, until):
    with running(server, until, n=3):
        with running_more(server):
            until(lambda: server.worker.n_live == 4)
        until(lambda: server.worker.n_live == 3)
    until(lambda: server.worker.n_live == 0)


def running_more(server):
    return server.http.stream("POST", "/v1/completions", json=BODY | {"stream": True})


def test_what_nobody_reads_is_cancelled(serve, until):
    with serve(max_unread=20, send_buffer=4096) as server, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(http_request(BODY | {"stream": True}))
        until(lambda: server.worker.n_live == 1)
        until(lambda: server.worker.n_live == 0)
        assert 20 < server.engine.stats.drawn_tokens < 990
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            text += raw.recv(2**16)
    assert b"the client has left 21 tokens unread" in text[-400:]


def http_request(body):
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def test_a_request_that_takes_too_long_fails(serve, until):
    with serve(timeout=0.3, max_prompt=20, max_body=300) as server:
        response = post(server)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        *_, last, rest = post(server, stream=True).text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert rest == ""
        assert 'dsv32_failed_streams_total{code="timeout"} 1.0' in server.http.get("/metrics").text
        until(lambda: server.engine.n_running == 0)

        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(http_request(BODY)[:-1])
            assert raw.recv(100).startswith(b"HTTP/1.1 504")

        assert post(server, prompt="x" * 19, max_tokens=1).status_code == 200
        response = post(server, prompt="x" * 20, max_tokens=1)
        assert response.status_code == 400
        assert "21 tokens; it must have at most 20" in response.json()["error"]["message"]
        response = post(server, user="x" * 300)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_everything_but_the_health_needs_the_key(serve):
    with serve(api_key="sesame") as server:
        for path in ("/v1/models", "/metrics", "/nothing"):
            response = server.http.get(path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        assert server.http.get("/health").json() == {"status": "ok"}
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client.models.list()
        with server.client.with_options(api_key="sesame") as client:
            assert client.models.list()


def test_an_engine_that_fails_fails_every_request(serve, until):
    with serve() as server:
        streamed = []

        def read():
            streamed.append(post(server, stream=True).text)

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: server.engine.n_running == 1)
        server.engine._decode = lambda: 1 / 0
        reader.join(30)
        last = streamed[0].split("\n\n")[-2]
        assert "ZeroDivisionError" in json.loads(last.removeprefix("data: "))["error"]["message"]
        response = post(server)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_failed"
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["error"] == "ZeroDivisionError: division by zero"


def test_a_mistake_of_ours_is_an_error_of_the_server(serve):
    with serve() as server:
        server.worker.submit = lambda *_, **__: 1 / 0
        response = post(server)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "unexpected ZeroDivisionError"
        figures = server.http.get("/metrics").text
        assert 'dsv32_requests_total{path="/v1/completions",status="500"} 1.0' in figures


def test_after_a_signal_what_runs_is_finished_and_nothing_new_begun(serve, until):
    with serve(grace=60.0) as server:
        whole = []

        def read():
            whole.append(post(server, max_tokens=200).json())

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: server.engine.n_running == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.worker.is_draining)
        response = post(server)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")
        assert server.http.get("/health").json() == {"status": "stopping"}
        reader.join(60)
        assert whole[0]["usage"]["completion_tokens"] == 200


@pytest.mark.parametrize(("grace", "signals"), [(0.2, 1), (60.0, 2)])
def test_what_takes_longer_is_cut_off(serve, until, grace, signals):
    with serve(grace=grace) as server:
        statuses = []
        reader = threading.Thread(target=lambda: statuses.append(post(server).status_code))
        reader.start()
        until(lambda: server.engine.n_running == 1)
        begun = time.monotonic()
        for _ in range(signals):
            server.server.handle_exit(signal.SIGTERM, None)
        reader.join(30)
        assert statuses == [503]
        assert time.monotonic() - begun < 10
