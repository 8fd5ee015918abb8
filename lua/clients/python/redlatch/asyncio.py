"""Locks on Redis and Valkey for asyncio, on `redis.asyncio`, with the promises of `redlatch`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import redis.asyncio

from . import SCRIPTS, BaseLease, BaseLocks, LeaseLost, clock

__all__ = ["Acquire", "Lease", "Locks"]
T = TypeVar("T")


class Acquire(Coroutine[Any, Any, "Lease"]):
    """`lease = await locks.mutex(...)`, or `async with locks.mutex(...) as lease:`."""

    def __init__(self, coroutine: Any):
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Lease]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    async def __aenter__(self) -> Lease:
        self._lease = await self._coroutine
        return self._lease

    async def __aexit__(self, *error: Any) -> None:
        await self._lease.__aexit__(*error)


class Locks(BaseLocks[Acquire]):
    """Acquires locks through one client of `redis.asyncio`, in one event loop.

    `async with Locks(client) as locks:`, or `open` and `close`. All locks share one subscription.
    """

    _is_async, _event = True, asyncio.Event

    def __init__(
        self,
        client: redis.asyncio.Redis | redis.asyncio.RedisCluster,
        prefix: str = "lock:",
        scripts: Any = SCRIPTS,
    ):
        super().__init__(client, prefix, scripts)
        self._loop, self._tasks, self._releases = None, set(), set()

    async def open(self) -> Locks:
        """Asks the server for its time, for 5 s at most, and subscribes."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Ends waits by `LockError`, and the subscription. It releases no lease that is held.

        It waits for releases under way, for a second at most.
        """
        self._end_waits()
        # A lease that nothing refers to any more begins its release in the next turn of the loop.
        # Without that turn, a function that forgot its lease just before left it for a whole TTL.
        await asyncio.sleep(0)
        until = clock() + 1.0
        while (self._waiters or self._releases) and clock() < until:
            await asyncio.sleep(0.005)  # a waiter that ends begins a release
        if self._reader:
            self._reader.cancel()
            await asyncio.wait({self._reader}, timeout=1.0)

    async def send(self, script: str, keys: list[Any], words: list[Any]) -> Any:
        """Sends a script, as `("fenced", [value_key, token_key], [token, value])`: 1 if written."""
        return await self._send(script, keys, words)

    async def __aenter__(self) -> Locks:
        return await self.open()

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    def _begin(self, *lock: Any) -> Acquire:
        if self._loop is None:
            raise RuntimeError("Locks are not open: use `async with`, or `await locks.open()`")
        return Acquire(self._acquire(*lock))

    def _lease(self, *lock: Any) -> Lease:
        return Lease(*lock)

    def _start(self, coroutine: Any, or_here: bool = True) -> asyncio.Task:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop's own reference is a weak one
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # is not logged
        return task

    @staticmethod
    async def _wait(task: asyncio.Task, seconds: float) -> bool:
        done, _ = await asyncio.wait({task}, timeout=seconds)  # unlike wait_for, cancels nothing
        return bool(done)

    @staticmethod
    async def _pause(event: asyncio.Event, seconds: float) -> bool:
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({waiting}, timeout=seconds)
        finally:
            waiting.cancel()
        return event.is_set()

    def _drop_idle(self) -> None:
        """Disconnects idle connections: where one has fallen silent, the others may have."""
        if self._is_cluster:
            idle = [free for node in self.client.get_nodes() for free in node._free]
        else:
            idle = list(self.client.connection_pool._available_connections)
        # redis-py's own methods do it in a later turn of the loop: by then, commands of the user
        # ran on some of them, and failed.
        for connection in idle:
            with contextlib.suppress(StopIteration):
                connection.disconnect(nowait=True).send(None)


class Lease(BaseLease):
    """A hold of a lock, renewed until its release. `lost` is an `asyncio.Event`."""

    lost: asyncio.Event

    async def renew(self) -> bool:
        """Renews at once. Returns whether the lock is held; raises without an answer."""
        return await self._extend("renew")

    async def downgrade(self) -> bool:
        """Turns a write hold into a read hold. Returns whether the lock is held."""
        return await self._extend("downgrade")

    async def release(self, timeout: float = 5.0) -> bool:
        """Returns whether the lock was held until now: a second time `False`.

        Without an answer: raises, and continues in the background.
        """
        return await self._release_within(timeout)

    async def while_held(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work. If the lease ends before, cancels it, waits for it, raises `LeaseLost`."""
        working, over = asyncio.ensure_future(work), asyncio.ensure_future(self._is_over.wait())
        try:
            if self.is_valid:  # else the work does not even begin
                await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return working.result()
        finally:
            working.cancel(), over.cancel()
            await asyncio.gather(working, over, return_exceptions=True)
        raise LeaseLost(f"lock {self.name!r}: the lease ended before its work")

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(self, error: Any, *_: Any) -> None:
        await self._exit(error)

    def _forgotten(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.locks._loop.call_soon_threadsafe(self._give_up)
