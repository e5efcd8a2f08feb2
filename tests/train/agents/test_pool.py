import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsv32_jax.errors import UsageError
from train.agents import isolation, pool
from train.agents.pool import SessionPool
from train.agents.process import SandboxError
from train.agents.session import Session


class FakeSession(Session):
    """A session without a sandbox, which tells how many there are."""

    alive = most = started = 0
    fails = False
    lock = threading.Lock()

    def __init__(self, limits, *, unsafe_local):
        if self.fails:
            raise SandboxError("no room")
        cls = FakeSession
        with self.lock:
            cls.started += 1
            cls.alive += 1
            cls.most = max(cls.most, cls.alive)
            self.number = cls.started
        self._lives = True
        time.sleep(0.01)

    @property
    def is_alive(self):
        return self._lives

    def close(self):
        with self.lock:
            FakeSession.alive -= self._lives
            self._lives = False


@pytest.fixture
def fake(monkeypatch):
    for name in ("alive", "most", "started", "fails"):
        monkeypatch.setattr(FakeSession, name, 0)
    monkeypatch.setattr(pool, "Session", FakeSession)
    monkeypatch.setattr(isolation, "find_problem", lambda: None)
    return FakeSession


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_nobody_gets_a_session_that_another_used(fake):
    used = []

    def use(_):
        with sessions.session() as session:
            used.append(session.number)
            time.sleep(0.002)

    with SessionPool(3) as sessions, ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(30)))

    assert len(set(used)) == 30
    assert fake.most <= 3
    assert fake.alive == 0


def test_sessions_are_started_ahead(fake):
    with SessionPool(3):
        wait_for(lambda: fake.alive == 3)


def test_a_session_that_died_while_it_waited_is_not_lent(fake):
    with SessionPool(2) as sessions:
        wait_for(lambda: len(sessions._alive) == 2)
        for session in tuple(sessions._alive):
            session.close()
        with sessions.session() as lent:
            assert lent.is_alive


def test_a_session_that_does_not_start_is_said_and_the_next_is_tried(fake):
    with SessionPool(1) as sessions:
        fake.fails = True
        with sessions.session():
            pass
        with pytest.raises(SandboxError, match="no room"), sessions.session():
            pass
        fake.fails = False
        with contextlib.suppress(SandboxError), sessions.session():
            pass  # it may have been started before

        with sessions.session() as session:
            assert session.is_alive


def test_closing_kills_those_lent_and_tells_who_waits(fake):
    sessions = SessionPool(1)
    told = []

    def ask():
        try:
            with sessions.session():
                pass
        except SandboxError as error:
            told.append(str(error))

    with sessions.session() as lent:
        waiting = [threading.Thread(target=ask) for _ in range(3)]
        for thread in waiting:
            thread.start()
        sessions.close()
        assert not lent.is_alive
        for thread in waiting:
            thread.join(10)

    assert told == ["the pool is closed"] * 3
    assert fake.alive == 0


def test_without_isolation_there_is_no_pool(fake, monkeypatch):
    monkeypatch.setattr(isolation, "find_problem", lambda: "bwrap not found")
    with pytest.raises(UsageError, match="bwrap not found"):
        SessionPool(1)
    assert fake.started == 0
    SessionPool(1, unsafe_local=True).close()


def test_a_size_of_none_is_refused(fake):
    with pytest.raises(ValueError, match="size=0"):
        SessionPool(0)


@pytest.mark.usefixtures("_isolated")
def test_real_sessions_share_nothing():
    with SessionPool(1) as sessions:
        with sessions.session() as first:
            first.python("x = 1; open('file', 'w').close()")
        with sessions.session() as second:
            output = second.python("import os; print(os.listdir()); x")

    assert "[]" in output.text
    assert "NameError" in output.text
    assert not second.is_alive
