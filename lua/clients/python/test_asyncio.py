"""Tests of redlatch.asyncio on private servers. The oracle is the server, by a plain client."""

import asyncio
import contextlib
import functools
import gc
import os
import signal
import time
import uuid

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel

import redlatch
import redlatch.asyncio
from test_redlatch import RARELY, Server, cluster_nodes, force, page_blocks, waiter_count


@pytest.fixture(scope="module")
def shared_server():
    with Server() as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.client.flushall()
    yield shared_server


def in_loop(test):
    """Runs a coroutine as a test."""

    @functools.wraps(test)
    def run(*arguments, **options):
        asyncio.run(test(*arguments, **options))

    return run


def client_of(server, **options):
    return redis.asyncio.Redis(port=server.port, **{"socket_timeout": 2, **options})


@contextlib.asynccontextmanager
async def locks_of(server, **options):
    client = client_of(server, **options)
    async with redlatch.asyncio.Locks(client) as locks:
        yield locks
    await client.aclose()


@pytest.fixture
def rare_polls(monkeypatch):
    monkeypatch.setattr(redlatch, "CLAIM", 2 * RARELY)


@pytest.fixture
def patient(monkeypatch):
    """Where the client waits for releases for a second, it waits for 20: for a busy machine."""
    wait = redlatch.asyncio.Locks._wait
    longer = staticmethod(lambda task, seconds: wait(task, 20 * seconds))
    monkeypatch.setattr(redlatch.asyncio.Locks, "_wait", longer)
    monkeypatch.setattr(redlatch.asyncio, "clock", lambda: redlatch.clock() / 20)


async def soon(condition, limit=20.0):
    """Waits until the condition is true, and returns its value; a false one after the limit."""
    end = time.monotonic() + limit
    while not (value := condition()) and time.monotonic() < end:
        await asyncio.sleep(0.005)
    return value


def is_free(server, name):
    return not server.client.exists(f"lock:{name}") and not waiter_count(server, name)


@in_loop
async def test_counter_loses_no_increment_beside_threads(server):
    threads = redlatch.Locks(redis.Redis(port=server.port, socket_timeout=2))
    plain, turns = server.client, 30

    def in_thread():
        for _ in range(turns):
            with threads.mutex("c", timeout=20):
                plain.set("counter", int(plain.get("counter") or 0) + 1)

    async def in_task(locks):
        for _ in range(turns):
            async with locks.mutex("c", timeout=20):
                value = int(await locks.client.get("counter") or 0)
                await locks.client.set("counter", value + 1)

    async with locks_of(server) as a, locks_of(server, protocol=3) as b:
        tasks = [in_task(a), in_task(a), in_task(b), asyncio.to_thread(in_thread)]
        await asyncio.gather(*tasks)
    threads.close()
    assert int(plain.get("counter")) == turns * 4
    assert is_free(server, "c")


@in_loop
async def test_every_kind_in_every_manner(server):
    owner = str(uuid.uuid4())
    async with locks_of(server) as locks:
        async with locks.reentrant("r", owner=owner) as outer:
            async with await locks.reentrant("r", owner=owner, timeout=0) as inner:
                assert inner.token == outer.token > 0
                assert server.client.hget("lock:r", owner) == "2"
        writer = await asyncio.create_task(locks.write("rw", timeout=5))
        with pytest.raises(redlatch.TimedOut):
            await locks.read("rw", timeout=0)
        assert await writer.renew() and await writer.downgrade()
        async with locks.read("rw", timeout=5):
            assert await writer.release() and not await writer.release()
    assert is_free(server, "r") and is_free(server, "rw")


async def handover_seconds(locks, name, is_waiting):
    holder = await locks.mutex(name, timeout=5)
    waiter = asyncio.create_task(locks.mutex(name, timeout=20))
    assert await soon(is_waiting)
    begin = time.monotonic()
    assert await holder.release()
    await (await waiter).release()
    return time.monotonic() - begin


@in_loop
async def test_handover_is_notified_and_not_polled(server, rare_polls):
    async with locks_of(server) as locks:
        for i in range(7):
            is_waiting = functools.partial(waiter_count, server, f"h{i}")
            assert await handover_seconds(locks, f"h{i}", is_waiting) < RARELY / 2
        assert len(server.client.client_list("pubsub")) == 1
    assert await soon(lambda: not server.client.client_list("pubsub"))


@in_loop
async def test_cancelled_waiter_leaves_the_queue(server):
    async with locks_of(server) as locks:
        holder = await locks.mutex("x", ttl=30)
        for end in ("cancel", "wait_for"):
            waiter = asyncio.ensure_future(locks.mutex("x", ttl=30))
            if end == "wait_for":
                waiter = asyncio.ensure_future(asyncio.wait_for(waiter, 2))
            assert await soon(lambda: waiter_count(server, "x") == 1)
            if end == "cancel":
                waiter.cancel()
            with pytest.raises((asyncio.CancelledError, asyncio.TimeoutError)):
                await waiter
            assert await soon(lambda: waiter_count(server, "x") == 0)
        assert await holder.release()
        assert is_free(server, "x")


@in_loop
async def test_acquire_that_is_cancelled_at_any_step_holds_nothing(server):
    async with locks_of(server) as locks:
        for steps in range(60):
            acquiring = asyncio.create_task(locks.mutex(f"s{steps}", ttl=60))
            for _ in range(steps):
                await asyncio.sleep(0)
            acquiring.cancel()
        del acquiring  # a lease that was granted before ends with its task
        assert await soon(lambda: not server.client.keys("lock:s*")), server.client.keys("*")


@in_loop
async def test_lease_without_references_is_released(server):
    async with locks_of(server) as locks:
        await locks.mutex("dropped", timeout=0)
        assert server.client.exists("{lock:dropped}:fence")
        assert await soon(lambda: is_free(server, "dropped"))


@in_loop
async def test_lease_forgotten_before_the_end_of_the_block_is_released(server, patient):
    async def forgets(locks):
        assert (await locks.mutex("forgotten", timeout=0)).is_valid

    async with locks_of(server) as locks:
        await forgets(locks)
    assert server.client.exists("{lock:forgotten}:fence")
    assert is_free(server, "forgotten")


def test_error_that_ends_the_program_leaves_no_lock(server, patient):
    async def fails(error):
        locks = await redlatch.asyncio.Locks(client_of(server)).open()
        async with locks.mutex("fails", ttl=60):
            raise error

    for error in (ValueError, asyncio.CancelledError):
        with pytest.raises(error):
            asyncio.run(fails(error))
        assert is_free(server, "fails")


def test_task_that_outlives_the_block_of_locks_releases_when_it_is_cancelled(
    server, caplog, patient
):
    async def refresh(locks, holds):
        async with locks.mutex("outlives", ttl=60):
            holds.set()
            await asyncio.Event().wait()

    async def ends_before_its_task():
        async with locks_of(server) as locks:
            holds = asyncio.Event()
            task = asyncio.create_task(refresh(locks, holds))
            await holds.wait()
        assert not task.done() and server.client.exists("lock:outlives")

    asyncio.run(ends_before_its_task())
    assert is_free(server, "outlives")
    assert "destroyed" not in caplog.text


def test_interrupted_program_leaves_no_lock_and_no_waiter(server, caplog, patient):
    async def interrupted():
        async with locks_of(server) as locks:
            holder = await locks.mutex("held", ttl=60)
            waiting = [asyncio.create_task(locks.mutex("held", ttl=60)) for _ in range(3)]
            assert await soon(lambda: waiter_count(server, "held") == len(waiting))
            async with locks.mutex("work", ttl=60):
                assert holder.is_valid
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert is_free(server, "work") and waiter_count(server, "held") == 0
    assert "destroyed" not in caplog.text


@in_loop
async def test_close_ends_waits(server, patient):
    async with locks_of(server) as locks:
        async with locks.mutex("x"):
            waiter = asyncio.create_task(locks.mutex("x"))
            assert await soon(lambda: waiter_count(server, "x") == 1)
            await locks.close()
            assert waiter_count(server, "x") == 0
            with pytest.raises(redlatch.LockError):
                await waiter


@in_loop
async def test_renewal_keeps_a_lock_and_a_revoked_one_is_lost(server):
    async with locks_of(server) as locks:
        async with locks.mutex("r", ttl=3) as lease:
            end = time.monotonic() + 4.5
            while time.monotonic() < end:
                assert server.client.get("lock:r") == lease.attempt
                await asyncio.sleep(0.05)
        lease = await locks.mutex("f", ttl=3)
        assert force(server, "f") == [1]
        await asyncio.wait_for(lease.lost.wait(), 10)
        assert not lease.is_valid and not await lease.renew() and not await lease.release()
        with pytest.raises(redlatch.LeaseLost):
            async with locks.mutex("b", ttl=30):
                assert force(server, "b") == [1]
        with pytest.raises(KeyError):
            async with locks.mutex("e", ttl=30):
                raise KeyError("work")
        assert await soon(lambda: is_free(server, "e"))


@in_loop
async def test_work_ends_with_its_lease(server):
    async def work(seconds):
        log.append("begun")
        try:
            await asyncio.sleep(seconds)
            return "done"
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            log.append("cancelled")
            raise

    async def fail():
        raise KeyError("work")

    async with locks_of(server) as locks:
        log, lease = [], await locks.mutex("w", ttl=3)
        assert await lease.while_held(work(0)) == "done"
        with pytest.raises(KeyError):
            await lease.while_held(fail())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lease.while_held(work(60)), 0.2)
        assert log == ["begun", "begun", "cancelled"] and lease.is_valid
        assert force(server, "w") == [1]
        with pytest.raises(redlatch.LeaseLost):
            await lease.while_held(work(60))
        assert log[3:] == ["begun", "cancelled"]
        with pytest.raises(redlatch.LeaseLost):
            await lease.while_held(work(0))
        assert len(log) == 5
    assert is_free(server, "w")


@in_loop
async def test_server_that_hangs_ends_waits_in_time_and_leases_at_their_deadline():
    with Server() as server:
        async with locks_of(server, socket_timeout=20) as locks:
            lease = await locks.mutex("s", ttl=1.5, timeout=10)
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                begin = time.monotonic()
                with pytest.raises(redlatch.TimedOut):
                    await locks.mutex("other", ttl=30, timeout=0.5)
                assert time.monotonic() - begin < 4  # the limit of a request is 5 s
                await asyncio.wait_for(lease.lost.wait(), 5)
                assert not lease.is_valid and time.monotonic() - begin < 4.5
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            assert await soon(lambda: not server.client.exists("lock:s", "lock:other"))
            assert not await lease.release()


@in_loop
async def test_end_of_idle_connections_breaks_no_command(server):
    async with locks_of(server, retry=None) as locks:
        await locks.client.ping()
        [idle] = locks.client.connection_pool._available_connections
        for steps in range(5):
            locks._drop_idle()
            assert not idle.is_connected
            for _ in range(steps):
                await asyncio.sleep(0)
            assert await locks.client.ping()


@in_loop
async def test_timeout_has_the_failure_that_hid_the_lock_as_its_cause():
    async def has_cause(locks, timeout, kind):
        for _ in range(5):  # as in the test of threads
            with pytest.raises(redlatch.TimedOut) as raised:
                await locks.mutex("held", timeout=timeout)
            if isinstance(raised.value.__cause__, kind):
                return True

    with Server() as server:
        async with locks_of(server, retry=None) as locks:
            _holder = await locks.mutex("held", ttl=60)
            for timeout in (0, 0.4):
                assert await has_cause(locks, timeout, type(None))
            server.process.kill()
            assert await has_cause(locks, 0.5, redis.ConnectionError)


@in_loop
async def test_lease_that_was_granted_after_a_failure_is_released_without_references(server):
    failures = [redis.ConnectionError("the first request is lost")]

    async def fail_once(*request):
        if failures:
            raise failures.pop()
        return await send(*request)

    async with locks_of(server) as locks:
        send, locks._send = locks._send, fail_once
        gc.collect()
        gc.disable()
        try:
            await locks.mutex("dropped", timeout=10)
            assert not failures and await soon(lambda: is_free(server, "dropped"))
        finally:
            gc.enable()


@in_loop
async def test_opening_ends_in_time_if_the_server_hangs(monkeypatch):
    with Server() as server:
        monkeypatch.setattr(redlatch, "LIMIT", 0.3)
        client = client_of(server, socket_timeout=10, retry=None)
        await client.ping()
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(redis.TimeoutError, match="TIME was not answered within 0.3 s"):
            await redlatch.asyncio.Locks(client).open()
        await client.aclose()


@in_loop
async def test_fenced_write_is_refused_after_a_later_one(server):
    keys = ["{price}:value", "{price}:token"]
    async with locks_of(server) as locks:
        async with locks.mutex("price") as early:
            pass
        async with locks.mutex("price") as late:
            assert await locks.send("fenced", keys, [late.token, "late"]) == 1
            assert await locks.send("fenced", keys, [early.token, "early"]) == 0
    assert server.client.get(keys[0]) == "late"


@in_loop
async def test_cache_of_the_page_computes_once_and_serves_an_old_value_meanwhile(server):
    [text] = [block for block in page_blocks() if "async def price" in block]
    plain, counts, computing = client_of(server, decode_responses=True), [], asyncio.Event()

    async def compute():
        await computing.wait()
        counts.append("counted")
        if len(counts) in failing:
            raise OSError("the source fails")
        return len(counts)

    async with locks_of(server) as locks:
        page = {"plain": plain, "locks": locks, "compute": compute, "redlatch": redlatch}
        page |= {"asyncio": asyncio, "contextlib": contextlib}
        exec(text, page)
        price, failing = page["price"], {1}
        first = [asyncio.create_task(price()) for _ in range(4)]
        assert await soon(lambda: waiter_count(server, "tea") == 3)
        computing.set()
        errors = await asyncio.gather(*first, return_exceptions=True)
        assert sorted(type(error).__name__ for error in errors) == ["LookupError"] * 3 + ["OSError"]
        server.client.delete("{tea}:asked")
        assert await price() == "2" and len(counts) == 2
        computing.clear()
        server.client.delete("{tea}:asked")
        assert [await price() for _ in range(3)] == ["2"] * 3  # while one task refreshes
        assert await soon(lambda: server.client.exists("{tea}:asked"))
        gc.collect()
        computing.set()
        assert await soon(lambda: server.client.get("{tea}:price") == "3")
        assert await price() == "3" and await soon(lambda: not page["tasks"])
    await plain.aclose()


@in_loop
async def test_killed_connections_are_replaced_and_waiters_notified_again(server, rare_polls):
    async with locks_of(server) as locks:
        lease = await locks.mutex("q", ttl=30)
        for kind in ("normal", "pubsub"):
            server.client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        assert await soon(lambda: server.client.pubsub_numsub(locks._channel)[0][1] == 1)
        assert await lease.renew() and await lease.release()
        seconds = await handover_seconds(locks, "q", lambda: waiter_count(server, "q"))
        assert seconds < RARELY / 2


@in_loop
async def test_cluster_locks_and_notifies(rare_polls):
    with cluster_nodes() as nodes:
        plain = redis.RedisCluster(host="127.0.0.1", port=nodes[0].port, socket_timeout=2)

        def is_waiting(name):
            return plain.zcard(redlatch.lock_keys(name, "lock:")[1])

        cluster = redis.asyncio.RedisCluster(host="127.0.0.1", port=nodes[0].port, socket_timeout=2)
        async with redlatch.asyncio.Locks(cluster) as locks:
            for i in range(7):  # before redis-py 8, the client polls every 100 ms
                is_queued = functools.partial(is_waiting, f"h{i}")
                assert await handover_seconds(locks, f"h{i}", is_queued) < RARELY / 2
            assert not any(plain.exists(f"lock:h{i}") for i in range(7))
            idle = [free for node in cluster.get_nodes() for free in node._free]
            assert any(free.is_connected for free in idle)
            locks._drop_idle()
            assert not any(free.is_connected for free in idle)
            assert await cluster.exists("lock:h0") == 0
        await cluster.aclose()


@in_loop
async def test_misuse_is_refused_before_any_request(server, tmp_path):
    client = client_of(server)
    with pytest.raises(FileNotFoundError):
        redlatch.asyncio.Locks(client, scripts=tmp_path)
    with pytest.raises(TypeError):
        redlatch.Locks(client)
    with pytest.raises(TypeError):
        redlatch.asyncio.Locks(server.client)
    with pytest.raises(RuntimeError):
        redlatch.asyncio.Locks(client).mutex("x")
    async with locks_of(server) as locks:
        with pytest.raises(ValueError):
            await locks.mutex("a}b")
    with Server() as gone:
        gone.stop()
        with pytest.raises(redis.ConnectionError):
            await redlatch.asyncio.Locks(client_of(gone)).open()
    await client.aclose()
