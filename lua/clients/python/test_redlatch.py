"""Tests of redlatch.py on private servers. The oracle is the server, read by a plain client."""

import asyncio
import contextlib
import gc
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from redis.sentinel import Sentinel

import redlatch
import redlatch.asyncio

HERE = Path(__file__).resolve().parent
LUA = HERE.parents[1]
VECTORS = sorted(path.name for path in (LUA / "vectors").glob("*.jsonl"))
BINARY = os.environ.get("REDLATCH_SERVER", "redis-server")


class Server:
    """A private server on a free port. It is killed when the `with` block ends."""

    def __init__(self, *options, sentinel=None):
        self.options, self.sentinel = options, sentinel

    def __enter__(self):
        for _ in range(5):  # another process may take the port first
            self.folder, self.port = tempfile.mkdtemp(prefix="redlatch-python-"), free_port()
            command = [BINARY, "--port", str(self.port), "--save", "", *self.options]
            if self.sentinel:
                conf = Path(self.folder, "sentinel.conf")
                conf.write_text(f"port {self.port}\n{self.sentinel}\n")
                command = [BINARY, str(conf), "--sentinel"]
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)
            self.client = redis.Redis(port=self.port, decode_responses=True)
            if wait_for(self.answers):
                return self
            self.stop()
        raise RuntimeError(f"{BINARY} does not start")

    def answers(self):
        with contextlib.suppress(redis.ConnectionError):
            return self.process.poll() is None and redis.Redis(port=self.port, retry=None).ping()

    def stop(self):
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(self, *_):
        self.stop()


class Worker:
    """A process that runs worker.py."""

    def __init__(self, port):
        command = [sys.executable, str(HERE / "worker.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.send("open", url=f"redis://127.0.0.1:{port}", topology="server")
        self.is_open = False

    def send(self, do, **fields):
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def read(self):
        if not self.is_open:
            self.is_open = json.loads(self.process.stdout.readline()) == {"ok": True}
            assert self.is_open
        return json.loads(self.process.stdout.readline())

    def do(self, do, **fields):
        self.send(do, **fields)
        return self.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # The bus of a cluster node has its port plus 10000.
        port = probe.getsockname()[1]
    return port if port < 55000 else free_port()


def wait_for(condition, limit=20.0):
    """Waits until the condition is true, and returns its value; a false one after the limit."""
    end = time.monotonic() + limit
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return value


def waiter_count(server, name):
    return server.client.zcount(redlatch.lock_keys(name, "lock:")[1], "-inf", "(4503599627370496")


def call(client, script, name, *words):
    source, keys = (LUA / f"{script}.lua").read_bytes(), redlatch.lock_keys(name, "lock:")
    return client.eval(source, 3, *keys, *words)


def force(server, name):
    defaults = [""] * 7  # last_token to tokens
    return call(server.client, "mutex", name, "release", secrets.token_hex(16), *defaults, 1)


@contextlib.contextmanager
def in_background(function, *arguments, **options):
    """Runs the function in a thread and yields the future of its result."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(function, *arguments, **options)


def within(seconds, function, *arguments):
    """The result of the function. If it hangs, the test fails and leaves its thread behind."""

    async def run():
        return function(*arguments)

    return redlatch.Locks._start(run()).result(seconds)


@pytest.fixture(scope="module")
def shared_server():
    with Server() as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.client.flushall()
    yield shared_server


@pytest.fixture
def locks(server):
    locks = redlatch.Locks(redis.Redis(port=server.port, socket_timeout=10, retry=None))
    yield locks
    locks.close()


RARELY = 15.0  # seconds between two polls of `rare_polls`


@pytest.fixture
def rare_polls(monkeypatch):
    """Waiters with a subscription poll so rarely that even a busy machine notifies them before."""
    monkeypatch.setattr(redlatch, "CLAIM", 2 * RARELY)


# Conformance vectors: they run in two processes beside the other tests.


def run_vectors(file):
    """Runs the vectors of a file by the client's own way to send a script."""
    with Server() as server:
        client = redis.Redis(port=server.port, protocol=2, decode_responses=True)
        locks = redlatch.Locks(client)
        for line in (LUA / "vectors" / file).read_text().splitlines():
            vector, names, news = json.loads(line), {}, client.pubsub()
            client.flushall()
            steps = [[step] * step.get("times", 1) for step in vector["steps"] + vector["after"]]
            for step in sum(steps, []):
                reply = run_step(locks, step, names, news)
                if not is_equal(step.get("answer", {}), reply, names):
                    return f"{file}: {vector['name']}: {vector['shows']}: {step}: {reply!r}"
            news.close()
        locks.close()


def run_step(locks, step, names, news):
    keys, words = ([fill(word, names) for word in step.get(part, [])] for part in ("keys", "args"))
    try:
        if "run" in step:
            return locks.send(step["run"], keys, words)
        if "command" in step:
            return locks.client.execute_command(*(fill(word, names) for word in step["command"]))
        if "message" in step:
            return (news.get_message(timeout=1) or {}).get("data")
        if "time" in step:
            seconds, micros = locks.client.time()
            names[step["time"]] = seconds * 1_000_000 + micros
        if "subscribe" in step:
            news.subscribe(step["subscribe"])
            news.get_message(timeout=1)
        time.sleep(step.get("wait", 0) / 1000)
    except redis.ResponseError as error:
        return error


def fill(text, names):
    def value(match):
        return str(int(names[match[1]]) + int(match[2])) if match[2] else str(names[match[1]])

    return re.sub(r"\$(\w+)([+-]\d+)?", value, str(text))


def is_equal(wanted, reply, names):
    if isinstance(wanted, dict):
        names[wanted.get("bind")] = reply
        if isinstance(reply, Exception) or "error" in wanted:
            return isinstance(reply, Exception) and "error" in wanted
        if "begins" in wanted:
            return isinstance(reply, str) and reply.startswith(wanted["begins"])
        if "min" not in wanted:
            return True
        bounds = [int(fill(wanted.get(end, reply), names)) for end in ("min", "max")]
        return isinstance(reply, int) and bounds[0] <= reply <= bounds[1]
    if isinstance(wanted, list):
        is_list = isinstance(reply, list) and len(wanted) == len(reply)
        return is_list and all(is_equal(*pair, names) for pair in zip(wanted, reply))
    return str(reply) == fill(wanted, names) if isinstance(wanted, str) else reply == wanted


@pytest.fixture(scope="module", autouse=True)
def vector_results():
    with ProcessPoolExecutor(2) as pool:
        yield {file: pool.submit(run_vectors, file) for file in VECTORS}


# The tests of the client.


def test_counter_loses_no_increment(server):
    command = {"kind": "mutex", "name": "c", "key": "counter", "seconds": 1.5, "owner": ""}
    with Worker(server.port) as a, Worker(server.port) as b, Worker(server.port) as c:
        workers = [a, b, c]
        for worker in workers:
            worker.send("count", **command)
        answers = [worker.read() for worker in workers]
    assert all(answer["ok"] and answer["tokens_ascending"] for answer in answers), answers
    assert all(answer["increments"] > 0 for answer in answers)
    assert int(server.client.get("counter")) == sum(answer["increments"] for answer in answers)


def test_owner_nests_and_excludes_others(server, locks):
    owner = str(uuid.uuid4())
    outer = locks.reentrant("n", owner=owner, timeout=0)
    inner = locks.reentrant("n", owner=owner, timeout=10)
    assert server.client.hget("lock:n", owner) == "2"
    assert outer.token == inner.token > 0
    with pytest.raises(redlatch.TimedOut):
        locks.reentrant("n", owner=str(uuid.uuid4()), timeout=0)
    assert inner.release() and outer.is_valid
    assert server.client.hget("lock:n", owner) == "1"
    assert outer.release()
    assert not server.client.exists("lock:n")


def test_prefix_with_white_space(server):
    client = redis.Redis(port=server.port, socket_timeout=2, retry=None)
    locks = redlatch.Locks(client, prefix="my app:")
    try:
        assert locks.mutex("n", timeout=10).release()  # queued with a channel, it was refused
    finally:
        locks.close()


def test_readers_share_and_a_writer_excludes(server, locks):
    readers = [locks.read("rw", timeout=0) for _ in range(3)]
    assert server.client.pttl("lock:rw") > 0
    with in_background(locks.write, "rw", timeout=10) as granted:
        assert wait_for(lambda: waiter_count(server, "rw") == 1)
        with pytest.raises(redlatch.TimedOut):
            locks.read("rw", timeout=0)  # a writer waits
        assert not granted.done()
        for reader in readers:
            assert reader.release()
        writer = granted.result()
    assert call(server.client, "rwlock", "rw", "inspect")[0][6] == "write"
    for acquire in (locks.read, locks.write):
        with pytest.raises(redlatch.TimedOut):
            acquire("rw", timeout=0)
    assert writer.release() and not server.client.exists("lock:rw")


def test_downgrade_admits_readers_and_no_writer(server, locks):
    writer = locks.write("d", timeout=0)
    with in_background(locks.read, "d", timeout=10) as granted:
        assert wait_for(lambda: waiter_count(server, "d") == 1)
        assert not granted.done()
        assert writer.downgrade() and writer.is_valid
        reader = granted.result()
    assert call(server.client, "rwlock", "d", "inspect")[0][5] == 2
    with pytest.raises(redlatch.TimedOut):
        locks.write("d", timeout=0)
    assert writer.renew() and writer.release() and reader.release()
    assert not server.client.exists("lock:d")


def test_owner_that_writes_may_read(server, locks):
    owner = str(uuid.uuid4())
    with locks.write("o", owner=owner, timeout=0), locks.read("o", owner=owner, timeout=0):
        assert server.client.hget("lock:o", "mode") == "several"
    assert not server.client.exists("lock:o")


def handover_seconds(server, locks, name):
    holder = locks.mutex(name, ttl=30, timeout=5)
    with in_background(locks.mutex, name, ttl=30, timeout=20) as granted:
        assert wait_for(lambda: waiter_count(server, name) == 1)
        begin = time.monotonic()
        assert holder.release()
        granted.result().release()
        return time.monotonic() - begin


def test_handover_is_notified_and_not_polled(server, locks, rare_polls):
    for i in range(7):
        assert handover_seconds(server, locks, f"h{i}") < RARELY / 2


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("is_decoded", [False, True])
def test_waiters_are_notified_by_every_kind_of_client(server, protocol, is_decoded, rare_polls):
    client = redis.Redis(port=server.port, protocol=protocol, decode_responses=is_decoded)
    locks = redlatch.Locks(client)
    for i in range(5):
        assert handover_seconds(server, locks, f"p{i}") < RARELY / 2
    locks.close()


def test_locks_share_one_subscription(server, locks):
    for i in range(3):
        handover_seconds(server, locks, f"s{i}")
    assert wait_for(lambda: server.client.pubsub_channels() == [locks._channel])
    assert len(server.client.client_list("pubsub")) == 1
    locks.close()
    assert wait_for(lambda: not server.client.client_list("pubsub"))


def test_killed_holder_is_succeeded_after_its_ttl(server, locks):
    with Worker(server.port) as holder:
        assert holder.do("acquire", kind="mutex", name="k", ttl_ms=1500, **{"as": "h"})["ok"]
        holder.process.kill()
        holder.process.wait()
        begin, left = time.monotonic(), server.client.pttl("lock:k") / 1000
        lease = locks.mutex("k", ttl=3, timeout=20)
        waited = time.monotonic() - begin
    assert left - 0.05 <= waited < left + 5
    assert server.client.get("lock:k") == lease.attempt
    lease.release()


def test_killed_waiter_delays_nobody_for_longer_than_a_claim(server, locks):
    holder = locks.mutex("w", ttl=30, timeout=0)
    with Worker(server.port) as dead:
        dead.send("acquire", kind="mutex", name="w", ttl_ms=3000, limit_ms=60000, **{"as": "h"})
        assert wait_for(lambda: waiter_count(server, "w") == 1)
        with in_background(locks.mutex, "w", timeout=20) as granted:
            assert wait_for(lambda: waiter_count(server, "w") == 2)
            dead.process.kill()
            dead.process.wait()
            begin = time.monotonic()
            assert holder.release()
            granted.result().release()
            assert time.monotonic() - begin < 2 * redlatch.CLAIM - 0.5  # after one claim at most


def test_renewal_keeps_a_lock_for_three_ttls(server, locks):
    with locks.mutex("r", ttl=3, timeout=10) as lease:
        end = time.monotonic() + 3 * 3
        holders = set()
        while time.monotonic() < end:
            holders.add(server.client.get("lock:r"))
            time.sleep(0.02)
        assert holders == {lease.attempt} and lease.is_valid
    assert not server.client.exists("lock:r")


def test_revoked_lease_is_reported_and_its_release_returns_false(server, locks):
    lease = locks.mutex("f", ttl=3, timeout=10)
    assert force(server, "f") == [1]
    with locks.mutex("f", ttl=30, timeout=0) as successor:
        assert lease.lost.wait(10)
        assert not lease.is_valid and not lease.renew() and not lease.release()
        assert server.client.get("lock:f") == successor.attempt


def test_block_whose_lease_was_lost_raises(server, locks):
    with pytest.raises(redlatch.LeaseLost):
        with locks.mutex("b", ttl=30, timeout=0):
            assert force(server, "b") == [1]


def test_block_whose_lease_ended_in_an_outage_raises_that():
    with Server() as server:
        locks = redlatch.Locks(redis.Redis(port=server.port, socket_timeout=2, retry=None))
        with pytest.raises(redlatch.LeaseLost):
            with locks.mutex("o", ttl=1, timeout=10) as lease:
                server.process.kill()
                assert lease.lost.wait(20)
        assert not lease.release()  # at once, without an error of redis-py
        locks.close()


def test_block_that_raises_releases_and_passes_its_error_on(server, locks):
    with pytest.raises(KeyError):
        with locks.mutex("e", ttl=30, timeout=0):
            raise KeyError("work")
    assert wait_for(lambda: not server.client.exists("lock:e"))


def test_lease_that_was_seen_to_expire_is_not_valid_again(server, locks, monkeypatch):
    lease, observe, seen = locks.mutex("late", ttl=1, timeout=9), locks._observe, threading.Event()

    def observe_late(*time):
        if time:  # of the answer to a renewal, which came before the deadline
            seen.wait(30)
        return observe(*time)

    monkeypatch.setattr(locks, "_observe", observe_late)
    assert wait_for(lambda: not lease.is_valid)
    seen.set()
    assert not wait_for(lambda: lease.is_valid, 0.5) and lease.lost.wait(10)
    assert wait_for(lambda: not server.client.exists("lock:late"))


def test_lost_is_signalled_once_the_lease_is_over(server, locks, monkeypatch):
    def lost_by(lease, end):
        seen = []
        monkeypatch.setattr(lease.lost, "set", lambda: seen.append(lease.is_valid))
        end()
        return seen

    lease = locks.mutex("order", ttl=600, timeout=9)
    server.client.delete("lock:order")
    assert lost_by(lease, lease.renew) == [False]
    lease = locks.mutex("order", ttl=600, timeout=9)
    lease._valid_until = 0.0  # before its renewal looks
    assert lost_by(lease, lease.release) == [False], "a release that comes too late says so"


def test_released_lease_is_not_renewed_and_a_second_release_returns_false(server, locks):
    lease = locks.mutex("l", ttl=30, timeout=0)
    assert lease.release() and not lease.release() and not lease.is_valid
    with locks.mutex("l", ttl=30, timeout=0) as successor:
        assert not lease.renew() and not lease.lost.is_set()
        assert server.client.get("lock:l") == successor.attempt


def test_killed_connections_are_replaced_and_waiters_notified_again(server, locks, rare_polls):
    lease = locks.mutex("q", ttl=30, timeout=0)
    for kind in ("normal", "pubsub"):
        server.client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
    assert wait_for(lambda: server.client.pubsub_numsub(locks._channel)[0][1] == 1)
    assert lease.renew() and lease.release()
    for i in range(5):
        assert handover_seconds(server, locks, f"q{i}") < RARELY / 2


def test_waiter_polls_where_no_notification_comes(server, locks):
    holder = locks.mutex("p", ttl=30, timeout=0)
    with in_background(locks.mutex, "p", timeout=20) as granted:
        assert wait_for(lambda: waiter_count(server, "p") == 1)
        begin = time.monotonic()
        server.client.delete("lock:p")
        granted.result().release()
        assert time.monotonic() - begin < 3 * redlatch.CLAIM  # it polls every half claim
    assert not holder.release()


def test_waiter_polls_at_once_when_it_is_subscribed_again(server, locks, rare_polls):
    for i in range(5):
        call(server.client, "mutex", f"g{i}", "acquire", "holder", "", "", 30000)
        with in_background(locks.mutex, f"g{i}", timeout=20) as granted:
            assert wait_for(lambda i=i: waiter_count(server, f"g{i}") == 1)
            with server.client.pipeline() as together:  # the message has no receiver
                together.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                call(together, "mutex", f"g{i}", "release", "holder", "").execute()
            begin = time.monotonic()
            granted.result().release()
            assert time.monotonic() - begin < RARELY / 2


def test_waiter_polls_at_once_when_its_subscription_is_lost(server, rare_polls):
    rights = "on >secret ~lock:* ~{lock:* &lock:* +@all".split()
    server.client.execute_command("ACL", "SETUSER", "reader", *rights)
    client = redis.Redis(port=server.port, username="reader", password="secret", socket_timeout=2)
    locks = redlatch.Locks(client)
    try:
        call(server.client, "mutex", "z", "acquire", "holder", "", "", 30000)
        with in_background(locks.mutex, "z", timeout=20) as granted:
            assert wait_for(lambda: waiter_count(server, "z") == 1)
            server.client.execute_command("ACL", "SETUSER", "reader", "-subscribe")
            begin = time.monotonic()
            server.client.delete("lock:z")
            server.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            granted.result().release()
            assert time.monotonic() - begin < RARELY / 2
    finally:
        locks.close()
        server.client.acl_deluser("reader")


def test_waiter_keeps_its_place_if_the_queue_is_lost(server, locks):
    queue, holder = "{lock:v}:waiters", locks.mutex("v", ttl=30, timeout=0)
    with in_background(locks.mutex, "v", timeout=20) as granted:
        assert wait_for(lambda: waiter_count(server, "v") == 1)
        place = server.client.zrange(queue, 0, 0, withscores=True)
        server.client.delete(queue)
        assert wait_for(lambda: waiter_count(server, "v") == 1)
        assert server.client.zrange(queue, 0, 0, withscores=True) == place
        assert holder.release() and granted.result().release()


def test_timeout_leaves_no_waiter_behind(server, locks, rare_polls):
    holder, begin = locks.mutex("t", ttl=30, timeout=0), time.monotonic()
    with pytest.raises(redlatch.TimedOut):
        locks.mutex("t", timeout=0.2)
    assert 0.2 <= time.monotonic() - begin < RARELY / 2
    with pytest.raises(redlatch.TimedOut):
        locks.mutex("t", timeout=0)
    assert wait_for(lambda: waiter_count(server, "t") == 0)
    assert holder.release() and not server.client.exists("lock:t")


def cause_of_timeout(locks, name, timeout):
    with pytest.raises(redlatch.TimedOut) as raised:
        locks.mutex(name, timeout=timeout)
    cause = raised.value.__cause__
    assert str(raised.value).endswith(f"last failure: {cause}" if cause else "it is in use")
    return cause


def test_timeout_has_the_failure_that_hid_the_lock_as_its_cause():
    with Server() as server:
        locks = redlatch.Locks(redis.Redis(port=server.port, socket_timeout=2, retry=None))
        _holder = locks.mutex("held", ttl=60, timeout=0)
        for timeout in (0, 1):
            assert cause_of_timeout(locks, "held", timeout) is None
        server.client.replicaof("127.0.0.1", 1)
        assert isinstance(cause_of_timeout(locks, "held", 1), redis.exceptions.ReadOnlyError)
        with in_background(cause_of_timeout, locks, "held", 3) as cause:
            time.sleep(0.3)
            server.client.replicaof("no", "one")
            assert cause.result() is None  # the failure has passed, and the lock was in use
        os.kill(server.process.pid, signal.SIGSTOP)
        assert isinstance(cause_of_timeout(locks, "free", 0.3), redis.TimeoutError)
        assert isinstance(cause_of_timeout(locks, "free", 0.05), redis.TimeoutError)
        server.process.kill()
        assert isinstance(cause_of_timeout(locks, "held", 1), redis.ConnectionError)
        assert isinstance(cause_of_timeout(locks, "held", 1e-6), redis.TimeoutError)
        locks.close()


def test_request_that_the_time_limit_cuts_short_is_no_failure(server, locks):
    holder, send, waking = locks.mutex("cut", timeout=0), locks._send, []

    async def slow(script, keys, words):
        if waking:
            time.sleep(0.5)
        elif words[0] == "acquire":
            waking.append(threading.Timer(1.25, locks._wake_all))
            waking[0].start()
        return await send(script, keys, words)

    locks._send = slow
    assert cause_of_timeout(locks, "cut", 1.3) is None
    locks._send = send
    assert holder.release()


def test_lease_that_was_granted_after_a_failure_is_released_without_references(server, locks):
    send, failures = locks._send, [redis.ConnectionError("the first request is lost")]

    async def fail_once(*request):
        if failures:
            raise failures.pop()
        return await send(*request)

    locks._send = fail_once
    gc.collect()
    gc.disable()
    try:
        locks.mutex("dropped", timeout=10)
        assert not failures
        assert wait_for(lambda: not server.client.exists("lock:dropped"))
    finally:
        gc.enable()


def test_interrupted_waiter_is_given_up(server, locks):
    def interrupt(*_):
        raise KeyboardInterrupt

    holder, previous = locks.mutex("i", ttl=30, timeout=0), signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            locks.mutex("i", timeout=20)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert wait_for(lambda: waiter_count(server, "i") == 0)
    assert holder.release() and not server.client.exists("lock:i")


def test_server_that_hangs_ends_waits_in_time_and_leases_at_their_deadline():
    with Server() as server:
        locks = redlatch.Locks(redis.Redis(port=server.port, socket_timeout=20, retry=None))
        lease = locks.mutex("s", ttl=1.5, timeout=10)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            with pytest.raises(redlatch.TimedOut):
                locks.mutex("other", ttl=30, timeout=0.5)
            assert time.monotonic() - begin < 4  # the limit of a request is 5 s
            assert lease.lost.wait(5) and not lease.is_valid
            assert time.monotonic() - begin < 4.5
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert wait_for(lambda: not server.client.exists("lock:s", "lock:other"))
        assert not lease.release()
        locks.close()


def test_opening_ends_in_time_if_the_server_hangs(monkeypatch):
    with Server() as server:
        monkeypatch.setattr(redlatch, "LIMIT", 0.3)
        client = redis.Redis(port=server.port, socket_timeout=10, retry=None)
        client.ping()
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(redis.TimeoutError, match="TIME was not answered within 0.3 s"):
            redlatch.Locks(client)


def test_close_and_the_reader_end_in_time_if_the_server_hangs(monkeypatch):
    with Server() as server:
        client = redis.Redis(port=server.port, socket_timeout=None, retry=None)
        locks = redlatch.Locks(client)
        monkeypatch.setattr(redlatch, "LIMIT", 0.3)
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(redis.TimeoutError, match="TIME was not answered within 0.3 s"):
            within(20, lambda: redlatch._run(locks._receive("subscribe", b"")))
        within(20, locks.close)


def test_release_names_the_failure_that_kept_it_from_an_answer(server):
    rights = "on >secret ~lock:* ~{lock:* &lock:* +@all".split()
    server.client.execute_command("ACL", "SETUSER", "revoked", *rights)
    client = redis.Redis(port=server.port, username="revoked", password="secret", socket_timeout=2)
    locks = redlatch.Locks(client)
    try:
        lease = locks.mutex("revoked", timeout=10)
        server.client.execute_command("ACL", "SETUSER", "revoked", "-evalsha")
        with pytest.raises(redis.TimeoutError, match="last failure: .*evalsha") as raised:
            lease.release(timeout=1.5)
        assert isinstance(raised.value.__cause__, redis.exceptions.NoPermissionError)
        server.client.execute_command("ACL", "SETUSER", "revoked", "+evalsha")
        assert wait_for(lambda: not server.client.exists("lock:revoked"))
    finally:
        locks.close()
        server.client.acl_deluser("revoked")


def test_refused_acquire_releases_nothing_unless_it_may_hold(server, monkeypatch):
    rights = "on >secret ~lock:* ~{lock:* &lock:* +@all -evalsha".split()
    server.client.execute_command("ACL", "SETUSER", "refused", *rights)
    client = redis.Redis(port=server.port, username="refused", password="secret", retry=None)
    locks, verbs = redlatch.Locks(client), []

    def send(script, keys, words):
        verbs.append(words[0])
        if words[0] == "acquire" and len(verbs) <= lost:
            raise redis.ConnectionError("no answer")
        return real(script, keys, words)

    real = locks._send
    monkeypatch.setattr(locks, "_send", send)
    monkeypatch.setattr(locks, "_releases", set())  # that of the class has those of other tests
    try:
        for lost, timeout, expected in [(0, 0, set()), (0, 9, set()), (1, 9, {"release"})]:
            verbs.clear()
            with pytest.raises(redis.exceptions.NoPermissionError):
                locks.mutex("refused", ttl=0.5, timeout=timeout)
            assert wait_for(lambda: not locks._releases)
            assert set(verbs) - {"acquire"} == expected
    finally:
        locks.close()
        server.client.acl_deluser("refused")


def test_fenced_write_is_refused_after_a_later_one(server, locks):
    keys = ["{price}:value", "{price}:token"]
    with locks.mutex("price") as early:
        pass
    with locks.mutex("price") as late:
        assert locks.send("fenced", keys, [late.token, "late"]) == 1
        assert locks.send("fenced", keys, [early.token, "early"]) == 0
    assert server.client.get(keys[0]) == "late"


@pytest.mark.parametrize(
    "prefix, name, is_accepted",
    [
        ("lock:", "", False),
        ("lock:", "a}b", False),
        ("lock:", "{}a", False),
        ("", "{a}", False),
        ("lock:", "{a}:fence", False),
        ("lock:", "x{a}y:waiters", False),
        ("lock:", "{a}{}node", False),
        ("lock:", "n" * 513, False),
        ("p" * 129, "n", False),
        ("lock:", "é" * 257, False),
        ("lock:", "a{b", True),
        ("lock:", "{a}", True),
        ("lock:", "x:fence", True),
        ("lock:", "{a}fence", True),
        ("lock:", "a\nb c", True),
        ("p" * 128, "n" * 512, True),
    ],
)
def test_names_whose_keys_may_collide_are_refused(prefix, name, is_accepted):
    if not is_accepted:
        with pytest.raises(ValueError):
            redlatch.lock_keys(name, prefix)
        return
    keys = redlatch.lock_keys(name, prefix)
    slots = {redis.cluster.key_slot(key.encode()) for key in keys}
    assert keys[0] == prefix + name and len(slots) == 1 and len(set(keys)) == 3


def test_key_of_another_application_is_wrong_type_and_unchanged(server, locks):
    server.client.rpush("lock:list", "a")
    server.client.set("lock:text", "a")
    for name in ("list", "text"):
        for acquire in (locks.mutex, locks.write):
            with pytest.raises(redlatch.WrongType, match=f"'{name}': the key 'lock:{name}'.*: ch"):
                acquire(name, timeout=1)
    assert server.client.lrange("lock:list", 0, -1) == ["a"]
    assert server.client.get("lock:text") == "a" and server.client.pttl("lock:text") == -1


def test_refusals_are_typed(server, locks):
    owner, other = str(uuid.uuid4()), str(uuid.uuid4())
    with locks.reentrant("deep", owner=owner, timeout=0, max_depth=1):
        with pytest.raises(redlatch.TooDeep):
            locks.reentrant("deep", owner=owner, timeout=10, max_depth=1)
    with locks.read("u", owner=owner), locks.read("u", owner=other):
        with in_background(locks.write, "u", owner=owner, timeout=2) as waiting:
            assert wait_for(lambda: waiter_count(server, "u") == 1)
            with pytest.raises(redlatch.WouldDeadlock):
                locks.write("u", owner=other, timeout=2)
            assert isinstance(waiting.exception(), redlatch.TimedOut)
    with locks.read("many"):
        defaults = [""] * 6  # min_token to token_ttl_ms
        words = ["read", "attempt", "", "", "", 1000, *defaults, 1]
        [answer] = call(server.client, "rwlock", "many", *words)
        with pytest.raises(redlatch.TooManyReaders, match="lock 'many': .*: try again later"):
            raise locks.read("many")._refusal(answer)


def test_each_refusal_names_the_lock_and_a_remedy(server, locks):
    lease = locks.mutex("a{b", timeout=0)  # a brace is no field of the text
    for answer in range(-7, 0):
        refused = lease._refusal(answer)
        assert re.match(r"lock 'a\{b': [^{}]+.*: [^{}]+$", str(refused)), refused
        assert ("'lock:a{b'" in str(refused)) == isinstance(refused, redlatch.WrongType)


def test_only_a_hold_for_writing_is_downgraded(server, locks):
    owner = str(uuid.uuid4())
    for lease in (locks.mutex("d"), locks.read("e"), locks.reentrant("f", owner=owner)):
        with pytest.raises(redlatch.Malformed, match="^downgrade: it must be of .*locks.write"):
            lease.downgrade()
        assert lease.is_valid and lease.release()


@pytest.mark.parametrize("make", [redlatch.Locks, redlatch.asyncio.Locks])
@pytest.mark.parametrize("client", [5, None, "redis://:secret@host"])
def test_client_of_another_type_is_refused(make, client):
    with pytest.raises(TypeError, match="^client: it must be of redis") as refused:
        make(client)
    assert "secret" not in str(refused.value)


NAN, INF = float("nan"), float("inf")
ARGUMENTS = [  # the kind, its arguments, the name of the wrong one
    ("mutex", {"name": "a}b"}, "name"),
    ("mutex", {"name": ""}, "name"),
    ("mutex", {"name": b"a"}, "name"),
    ("mutex", {"name": None}, "name"),
    ("mutex", {"name": "\ud800"}, "name"),
    *(("mutex", {"ttl": ttl}, "ttl") for ttl in (INF, NAN, 0, -1, 0.0999, 1e12, "30", None)),
    *(("read", {"timeout": timeout}, "timeout") for timeout in (NAN, -1, "5")),
    *(("write", {"max_depth": depth}, "max_depth") for depth in (0, 1025, 1.5)),
    *(("read", {"owner": owner}, "owner") for owner in (uuid.uuid4(), b"me", "a b", "a\n", ":a")),
    *(("write", {"owner": owner}, "owner") for owner in ("é" * 129, "\ud800")),
    *(("reentrant", {"owner": owner}, "owner") for owner in (None, "", "mode")),
    ("reentrant", {}, "owner"),
]


@pytest.mark.parametrize("kind, arguments, wrong", ARGUMENTS)
def test_argument_is_refused_by_its_name_before_any_request(locks, kind, arguments, wrong):
    sent, locks._send = [], lambda *request: sent.append(request)
    with pytest.raises(redlatch.Malformed, match=f"^{wrong}: .*must") as refused:
        getattr(locks, kind)(**{"name": "n", "timeout": 0, **arguments})
    assert isinstance(refused.value, ValueError) and not sent
    assert isinstance(refused.value, redlatch.InvalidName) == (wrong == "name")


def test_arguments_at_their_bounds_are_taken(locks):
    for ttl in (0.1, 9_999_999_999 / 1000):
        # On a busy machine, a lease of 0.1 s is granted too late, or not answered.
        with contextlib.suppress(redlatch.TimedOut, redis.TimeoutError):
            locks.mutex(f"ttl {ttl}", ttl=ttl, timeout=0).release()
    for timeout in (float("inf"), 5):
        assert locks.mutex("timeout", timeout=timeout).release()
    for options in ({"owner": "é" * 128, "max_depth": 1}, {"max_depth": 1024}, {"owner": ""}):
        assert locks.read("owner", timeout=5, **options).release()
        assert locks.write("owner", timeout=5, **options).release()


def test_prefix_that_is_no_text_is_refused_before_any_request():
    for prefix in (b"lock:", None, "\ud800"):
        with pytest.raises(redlatch.Malformed, match="^prefix: .*must"):
            redlatch.Locks(redis.Redis(port=1), prefix=prefix)


def test_scripts_are_sent_again_after_script_flush_and_never_loaded(server, locks):
    server.client.script_flush()
    server.client.config_resetstat()
    with locks.mutex("n", timeout=0):
        assert server.client.exists("lock:n")
    statistics = server.client.info("commandstats")
    assert statistics["cmdstat_eval"]["calls"] == 1
    assert not [name for name in statistics if "script" in name]


def test_tokens_ascend_after_the_counter_is_lost(server, locks):
    tokens = []
    for _ in range(3):
        with locks.mutex("token", timeout=0) as lease:
            tokens.append(lease.token)
        server.client.delete("{lock:token}:fence")
    seconds, micros = server.client.time()
    assert tokens == sorted(set(tokens)) and tokens[-1] <= seconds * 1_000_000 + micros


def test_user_of_the_page_may_lock_and_be_notified(server, rare_polls):
    line = re.search(r"^ACL SETUSER locks on >secret.*$", (LUA / "README.md").read_text(), re.M)
    server.client.execute_command(*line[0].split())
    client = redis.Redis(port=server.port, username="locks", password="secret", socket_timeout=2)
    locks = redlatch.Locks(client)
    server.client.script_flush()
    try:
        for acquire in (locks.read, locks.write):
            with acquire("acl", timeout=10) as lease:
                assert lease.renew()
        with locks.reentrant("acl", owner="me", timeout=10):
            assert server.client.exists("lock:acl")
        for i in range(5):
            assert handover_seconds(server, locks, f"acl{i}") < RARELY / 2
    finally:
        locks.close()
        server.client.acl_deluser("locks")


def test_waiter_without_the_right_to_subscribe_polls(server, rare_polls):
    rights = "on >secret ~lock:* ~{lock:* resetchannels +@all -subscribe".split()
    server.client.execute_command("ACL", "SETUSER", "polls", *rights)
    client = redis.Redis(port=server.port, username="polls", password="secret", socket_timeout=2)
    locks = redlatch.Locks(client)
    try:
        assert not locks._is_subscribed.is_set()
        assert handover_seconds(server, locks, "polls") < RARELY / 2
    finally:
        locks.close()
        server.client.acl_deluser("polls")


PROGRAM = """
import sys, threading, atexit, signal, redis, redlatch
locks = redlatch.Locks(redis.Redis(port=int(sys.argv[1]), socket_timeout=10, retry=None))
def work():
    with locks.mutex("program", ttl=3, timeout=10):
        held.set()
        sys.stdin.readline()
held = threading.Event()
"""


def run_program(server, text):
    """Runs the text behind PROGRAM in a process of its own, which has the path of this client."""
    command = [sys.executable, "-c", PROGRAM + text, str(server.port)]
    return subprocess.Popen(
        command, cwd=HERE, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def has_new_expiry(server, name, old):
    """Whether the lock was renewed: its expiry by the server's clock has moved."""
    now = time.monotonic()
    left = server.client.pttl(f"lock:{name}")
    return left > 0 and now + left / 1000 > old + 0.2


def wait_renewals(server, name, count):
    for _ in range(count):
        old = server.client.pttl(f"lock:{name}") / 1000 + time.monotonic()
        assert wait_for(lambda old=old: has_new_expiry(server, name, old))


# The lease is acquired before the end: Python 3.12 may start no thread after that of the main one.
AFTER_THE_MAIN_THREAD = [
    "threading.Thread(target=work).start(); held.wait()",
    "lease = locks.mutex('program', ttl=3); atexit.register(lease.release)\n"
    "atexit.register(sys.stdin.readline)",
]


@pytest.mark.parametrize("text", AFTER_THE_MAIN_THREAD)
def test_work_after_the_main_thread_is_renewed_and_released(server, text):
    with run_program(server, text) as program:
        assert wait_for(lambda: server.client.exists("lock:program"))
        wait_renewals(server, "program", 2)
        _, log = program.communicate("\n", timeout=20)
    assert program.returncode == 0 and not log
    assert not server.client.exists("lock:program")


def test_acquire_at_exit_is_granted_or_says_that_no_thread_starts(server):
    with run_program(server, "atexit.register(work)") as program:
        _, log = program.communicate("\n", timeout=20)
    assert program.returncode == 0 and ("can't create new thread" in log or not log)
    assert not log or sys.version_info[:2] == (3, 12)
    assert server.client.exists("{lock:program}:fence") and not server.client.exists("lock:program")


def test_lease_made_before_the_end_is_released_at_exit(server):
    text = 'lease = locks.mutex("exit", timeout=0); atexit.register(lease.release)'
    with run_program(server, text) as program:
        _, log = program.communicate(timeout=20)
    assert program.returncode == 0 and not log
    assert server.client.exists("{lock:exit}:fence") and not server.client.exists("lock:exit")


def test_process_whose_block_raised_has_released_when_it_ends(server):
    text = 'with locks.mutex("raised", timeout=0): raise SystemExit(3)'
    with run_program(server, text) as program:
        assert program.wait(20) == 3
    assert server.client.exists("{lock:raised}:fence")
    assert not server.client.exists("lock:raised")


def test_process_ends_while_the_server_hangs():
    with Server() as server:
        text = 'with locks.mutex("hang", timeout=0): sys.stdin.readline(); raise SystemExit(3)'
        with run_program(server, text) as program:
            assert wait_for(lambda: server.client.exists("lock:hang"))
            os.kill(server.process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            program.communicate("\n", timeout=40)
            assert program.returncode == 3 and time.monotonic() - begin < 15  # half of the TTL
            os.kill(server.process.pid, signal.SIGCONT)


def test_forked_child_neither_releases_nor_uses_the_lease_of_its_parent(server, locks):
    lease, (receiver, sender) = locks.mutex("fork", ttl=30, timeout=0), os.pipe()
    forgotten = [locks.mutex("forgotten", ttl=30, timeout=0)]
    locks._lock.acquire()  # as by another thread, which does not exist in the child
    child = os.fork()
    if child == 0:
        signal.alarm(40)
        with contextlib.suppress(BaseException):
            forgotten.clear()
            answers = [lease.is_valid, lease.renew(), lease.release()]
            with contextlib.suppress(redlatch.LockError):
                answers.append(locks.mutex("child", timeout=1))
            own = redlatch.Locks(redis.Redis(port=server.port, socket_timeout=10))
            answers.append(own.mutex("own", timeout=10).release())
            os.write(sender, json.dumps(answers).encode())
        os._exit(0)
    locks._lock.release()
    assert os.waitpid(child, 0) == (child, 0)
    os.close(sender)  # else a child that wrote nothing is read for ever
    assert json.loads(os.read(receiver, 100)) == [False, False, False, True]
    assert server.client.get("lock:fork") == lease.attempt and lease.is_valid
    assert server.client.get("lock:forgotten") == forgotten[0].attempt and forgotten[0].release()
    assert lease.renew() and lease.release()


def test_lease_without_references_is_released(server, locks):
    locks.mutex("dropped", timeout=0)
    assert wait_for(lambda: not server.client.exists("lock:dropped"))


def test_lease_that_is_collected_inside_the_client_does_not_wait_for_itself(server, locks):
    leases = [locks.mutex("inside", timeout=0)]

    def collect():
        with locks._lock:  # as _remember_end, where an allocation starts the collector
            leases.clear()

    within(20, collect)
    assert wait_for(lambda: not server.client.exists("lock:inside"))


def test_lease_whose_release_was_interrupted_is_released_without_references(
    server, locks, monkeypatch
):
    def interrupt(release, **_):
        release.close()
        raise KeyboardInterrupt

    lease = locks.mutex("interrupted", timeout=0)
    with contextlib.suppress(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(locks, "_start", interrupt)
        lease.release()
    assert server.client.exists("lock:interrupted")
    del lease
    assert wait_for(lambda: not server.client.exists("lock:interrupted"))


def test_release_in_a_signal_handler_does_not_wait_for_itself(server, locks):
    lease = locks.mutex("handler", timeout=0)

    def release(*_):
        with pytest.raises(redis.TimeoutError):
            lease.release(timeout=0.2)

    def interrupted():
        with locks._lock:  # as _observe, where a signal arrives
            release()

    within(20, interrupted)
    assert wait_for(lambda: not server.client.exists("lock:handler"))


def test_lease_that_no_thread_can_renew_is_given_up(server, locks, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    def without_threads(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                function(*arguments, **options)

    within(20, without_threads, locks.mutex, "full")
    assert not server.client.exists("lock:full") and server.client.exists("{lock:full}:fence")
    within(20, without_threads, redlatch.Locks, redis.Redis(port=server.port))
    assert locks.mutex("full", timeout=10).release()


def test_message_that_is_read_during_a_release_does_not_answer_for_it(server, locks):
    send, start, begun, own = locks._send, locks._start, [], []

    async def send_late(script, keys, words):
        if words[0] == "release" and words[1] == waiter.attempt and not own:
            own.append(words)
            count = len(begun)
            await locks._receive("message", f"{waiter.attempt} {waiter.token} lock:late")
            again = begun[count:]
            assert len(again) == 1
            wait_for(again[0].done, 0.5)  # a release that does not wait for this one overtakes it
        return await send(script, keys, words)

    def start_counted(coroutine, **options):
        begun.append(start(coroutine, **options))
        return begun[-1]

    holder = locks.mutex("late", timeout=5)
    with in_background(locks.mutex, "late", timeout=20) as granted:
        assert wait_for(lambda: waiter_count(server, "late") == 1)
        assert holder.release()
        waiter = granted.result()
    locks._send, locks._start = send_late, start_counted
    assert waiter.release() and own
    assert wait_for(lambda: all(each.done() for each in begun))  # also the one for the message
    assert not server.client.exists("lock:late")


def test_cancelled_task_leaves_no_lock(server, locks):
    async def cancel(holder):
        task = asyncio.create_task(asyncio.to_thread(locks.mutex, "task", ttl=3, timeout=20))
        while not waiter_count(server, "task"):
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert holder.release()

    asyncio.run(cancel(locks.mutex("task", ttl=30, timeout=0)))
    assert wait_for(lambda: not server.client.exists("lock:task"))
    assert waiter_count(server, "task") == 0


@pytest.mark.parametrize("half", ["threads", "asyncio"])
def test_sigterm_handled_as_the_page_says_releases(server, half):
    [threads, loop] = [block for block in page_blocks() if "SIGTERM" in block]
    [runs] = [block for block in page_blocks() if "asyncio.run(main())" in block]
    loop = "\n    ".join(["", *loop.splitlines()])
    text = f"""
import asyncio, redis.asyncio, redlatch.asyncio
async def main():{loop}
    client = redis.asyncio.Redis(port=int(sys.argv[1]), socket_timeout=10)
    async with redlatch.asyncio.Locks(client) as locks, locks.mutex("program"):
        await asyncio.Event().wait()
{runs}"""
    with run_program(server, f"{threads}\nwork()" if half == "threads" else text) as program:
        assert wait_for(lambda: server.client.exists("lock:program"))
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=20)
    assert program.returncode == 143
    assert server.client.exists("{lock:program}:fence") and not server.client.exists("lock:program")


def page_blocks():
    """The programs of the guide."""
    return re.findall(r"```python\n(.*?)```", (HERE / "guide.md").read_text(), re.S)


def test_cache_of_the_page_computes_once_and_serves_an_old_value_meanwhile(server, locks):
    [text] = [block for block in page_blocks() if "\ndef refresh" in block]
    counts, computing, page = [], threading.Event(), {"plain": server.client, "locks": locks}
    page |= {"contextlib": contextlib, "threading": threading, "redlatch": redlatch}

    def compute():
        counts.append(computing.wait(10))
        if len(counts) in failing:
            raise OSError("the source fails")
        return len(counts)

    exec(text, page)
    page["compute"], failing = compute, {1}
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(page["price"]) for _ in range(4)]
        assert wait_for(lambda: waiter_count(server, "tea") == 3)
        computing.set()
        errors = sorted(type(each.exception()).__name__ for each in first)
        assert errors == ["LookupError"] * 3 + ["OSError"] and len(counts) == 1
    counts.clear()
    computing.clear()
    failing.clear()
    server.client.delete("{tea}:asked")
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(page["price"]) for _ in range(4)]
        assert wait_for(lambda: waiter_count(server, "tea") == 3)
        computing.set()
        assert [each.result() for each in first] == ["1"] * 4 and len(counts) == 1
    computing.clear()
    server.client.delete("{tea}:asked")
    assert [page["price"]() for _ in range(3)] == ["1"] * 3  # while one thread refreshes
    computing.set()
    assert wait_for(lambda: page["price"]() == "2") and len(counts) == 2


def test_version_is_that_of_the_package_and_public_names_exist():
    text = (HERE / "pyproject.toml").read_text()
    assert f'\nversion = "{redlatch.__version__}"\n' in text
    for module in (redlatch, redlatch.asyncio):
        assert all(hasattr(module, name) for name in module.__all__)


def test_folder_without_scripts_is_refused_at_once(server, tmp_path):
    for folder in (tmp_path, str(tmp_path)):
        with pytest.raises(FileNotFoundError):
            redlatch.Locks(redis.Redis(port=server.port), scripts=folder)


def check_topology(locks, exists):
    """Locks several names in every way, with hand-overs, through the client of a topology."""
    owner = str(uuid.uuid4())
    for i in range(4):
        with locks.mutex(f"m{i}", timeout=5) as lease:
            assert exists(f"lock:m{i}") and lease.renew()
        with locks.reentrant(f"r{i}", owner=owner, timeout=5):
            with locks.reentrant(f"r{i}", owner=owner, timeout=5):
                assert exists(f"lock:r{i}")
        with locks.write(f"w{i}", timeout=5) as lease:
            assert lease.downgrade()
            with locks.read(f"w{i}", timeout=5):
                assert exists(f"lock:w{i}")
        assert not any(exists(f"lock:{kind}{i}") for kind in "mrw")


@contextlib.contextmanager
def cluster_nodes():
    options = ["--cluster-enabled", "yes"]
    with Server(*options) as a, Server(*options) as b, Server(*options) as c:
        nodes = [a, b, c]
        for i, node in enumerate(nodes):
            slots = range(i * 5462, min((i + 1) * 5462, 16384))
            node.client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            a.client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        for node in nodes:
            assert wait_for(lambda: "cluster_state:ok" in info(node) and ":3" in info(node), 20)
        yield nodes


def test_cluster_locks_and_notifies(rare_polls):
    with cluster_nodes() as nodes:
        cluster = redis.RedisCluster(host="127.0.0.1", port=nodes[0].port, socket_timeout=10)
        locks = redlatch.Locks(cluster)
        check_topology(locks, cluster.exists)
        for i in range(7):
            holder = locks.mutex(f"h{i}", timeout=5)
            waiters = redlatch.lock_keys(f"h{i}", "lock:")[1]
            with in_background(locks.mutex, f"h{i}", timeout=20) as granted:
                assert wait_for(lambda: cluster.zcount(waiters, "-inf", "(4503599627370496"))
                begin = time.monotonic()
                assert holder.release()
                granted.result().release()
                assert time.monotonic() - begin < RARELY / 2
        assert locks._channel.endswith("~")
        locks.close()


def info(node):
    text = node.client.execute_command("CLUSTER", "INFO")
    fields = text if isinstance(text, dict) else dict(re.findall(r"(\w+):(\S+)", text))
    known = fields.get("cluster_known_nodes")
    return f"cluster_state:{fields.get('cluster_state')} known:{known}"


def is_failover_begun(watcher):
    with contextlib.suppress(redis.ResponseError):  # no suitable replica yet
        return watcher.client.execute_command("SENTINEL", "FAILOVER", "locks")


def test_sentinel_follows_a_failover(rare_polls):
    with Server() as master, Server("--replicaof", "127.0.0.1", "0") as replica:
        replica.client.replicaof("127.0.0.1", master.port)
        assert wait_for(
            lambda: replica.client.info("replication")["master_link_status"] == "up", 20
        )
        monitor = f"sentinel monitor locks 127.0.0.1 {master.port} 1\n"
        with Server(sentinel=monitor + "sentinel down-after-milliseconds locks 1000") as watcher:
            assert wait_for(lambda: watcher.client.sentinel_slaves("locks"), 20)
            sentinel = Sentinel([("127.0.0.1", watcher.port)], socket_timeout=5)
            locks = redlatch.Locks(sentinel.master_for("locks", socket_timeout=5))
            check_topology(locks, master.client.exists)
            assert handover_seconds(master, locks, "before") < RARELY / 2
            assert wait_for(lambda: is_failover_begun(watcher), 20)
            assert wait_for(lambda: replica.client.role()[0] == "master", 20)
            assert wait_for(lambda: replica.client.pubsub_numsub(locks._channel)[0][1] == 1, 30)
            locks.mutex("probe", timeout=10).release()
            for i in range(5):
                assert handover_seconds(replica, locks, f"after{i}") < RARELY / 2
            locks.close()


def test_worker_answers_concurrent_and_malformed_commands(server):
    with Worker(server.port) as worker:
        request = {"kind": "mutex", "name": "x", "ttl_ms": 20000}
        assert worker.do("acquire", **request, limit_ms=0, **{"as": "h1"})["token"] > 0
        waits = {"async": True, "id": 7, "as": "h2"}
        worker.send("acquire", **request, limit_ms=10000, **waits)
        assert wait_for(lambda: waiter_count(server, "x") == 1)
        worker.send("release", **{"as": "h1"})
        answers = sorted([worker.read(), worker.read()], key=lambda answer: "id" in answer)
        assert answers[0] == {"ok": True, "held": True}
        assert answers[1]["id"] == 7 and answers[1]["token"] > 0
        assert worker.do("nonsense") == {"ok": False, "error": "unknown"}
        assert worker.do("release", **{"as": "none"})["ok"] is False
        force(server, "x")
        assert worker.do("renew", **{"as": "h2"}) == {"ok": True, "held": False}
        assert worker.do("lost", limit_ms=5000, **{"as": "h2"}) == {"ok": True}
        assert worker.do("close") == {"ok": True}
        assert worker.process.wait(20) == 0


def test_nothing_but_counters_and_marks_is_left(server, locks):
    for acquire in (locks.mutex, locks.read, locks.write):
        handovers = [in_background(acquire, "left", timeout=10) for _ in range(3)]
        with handovers[0] as a, handovers[1] as b, handovers[2] as c:
            for lease in (a, b, c):
                lease.add_done_callback(lambda done: done.result().release())
    assert wait_for(lambda: not server.client.exists("lock:left"))
    assert waiter_count(server, "left") == 0
    assert set(server.client.keys()) <= {"{lock:left}:fence", "{lock:left}:waiters"}
    assert all(server.client.pttl(key) != -1 for key in server.client.keys())  # -2: expired since


@pytest.mark.parametrize("file", VECTORS)
def test_vectors_are_answered(file, vector_results):
    assert vector_results[file].result(120) is None
