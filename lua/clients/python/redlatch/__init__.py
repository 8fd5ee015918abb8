"""Locks on Redis and Valkey for threads: the redlatch protocol (lua/README.md) on redis-py.

The protocol is written once, for threads and for asyncio, as coroutines. In threads they block and
never suspend: `_run` steps each one once. `redlatch.asyncio` runs them in its event loop.

`SCRIPTS` is the folder of the Lua scripts, for other tools: `(SCRIPTS / "fenced.lua").read_text()`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import inspect
import itertools
import numbers
import os
import re
import secrets
import sys
import threading
import time
import weakref
from concurrent import futures
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

import redis
from redis import exceptions as errors

__version__ = "1.0.0"
__all__ = [
    "Locks", "Lease", "LockError", "TimedOut", "LeaseLost", "WrongType", "TooDeep",
    "Malformed", "InvalidName", "WouldDeadlock", "TooManyReaders",
    "SCRIPTS", "is_transient", "lock_keys",
]  # fmt: skip

CLAIM = 3.0  # seconds for which a released lock is reserved for a waiter; at most the TTL
POLL = 0.1  # seconds between two polls of a waiter that cannot be notified
IDLE = 5.0  # seconds without a message after which the subscription is tested by PING
LIMIT = 5.0  # seconds for an answer; a quarter of what is left of the lease, if that is less
TOKEN_STEP = 5_000_000  # microseconds; a higher minimum token slows the next acquire of each lock
TRANSIENT = (
    errors.ConnectionError, errors.TimeoutError, errors.ClusterError, errors.TryAgainError,
    errors.RedisClusterException, errors.OutOfMemoryError, errors.ReadOnlyError,
)  # fmt: skip
# redis-py has no classes for some, and Redis 6.2 wraps the error of a script in another one.
PASSES = (
    r"\b(OOM|NOREPLICAS|MISCONF|READONLY|LOADING|BUSY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN"
    r"|max number of clients)\b"
)
SCRIPTS = resources.files(__name__) / "lua"  # of the wheel; else this is in the protocol's folder
SCRIPTS = SCRIPTS if SCRIPTS.is_dir() else Path(__file__).resolve().parents[3]
T = TypeVar("T")


class LockError(Exception):
    """A lock was refused or not granted."""


class TimedOut(LockError):
    """The lock was not granted within the time limit.

    `__cause__`: None if the last answer was that it is in use; else the last failure.
    """


class LeaseLost(LockError):
    """The lease ended before its release: another client may have held the lock."""


class WrongType(LockError):
    """The key holds something else, such as a lock of another kind, or has no TTL."""


class TooDeep(LockError):
    """The owner has `max_depth` holds."""


class Malformed(LockError, ValueError):
    """An argument is not of the protocol, such as an owner with a space. Its name comes first."""


class InvalidName(Malformed):
    """The keys of a lock with this name could be those of another lock."""


class WouldDeadlock(LockError):
    """Two readers that wait to write would wait for each other: release the read hold first."""


class TooManyReaders(LockError):
    """Too many readers hold the lock or wait for it, which may pass."""


_OTHER = "choose another name, or delete the key once nothing uses it"
REFUSALS = [  # -1 to -7
    (LockError, "its attempt has ended: try again"),
    (WrongType, f"the key {{!r}} holds another kind of lock, or no lock: {_OTHER}"),
    (WrongType, f"the key {{!r}} has no TTL, so another program wrote it: {_OTHER}"),
    (TooDeep, "its owner has `max_depth` holds: release one, or raise `max_depth`"),
    (Malformed, "the server takes a word of its request for malformed: report it"),
    (WouldDeadlock, "another reader waits to write: release what this owner reads, and try again"),
    (TooManyReaders, "too many readers hold it or wait for it: try again later"),
]
# Seconds on a monotonic clock that also counts while the machine is suspended (Linux, macOS).
clock = functools.partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _is_text(value: Any) -> bool:
    """Whether it can be sent: redis-py refuses other types, and half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _require(is_right: Any, argument: str, value: Any, rule: str) -> None:
    if not is_right:
        raise Malformed(f"{argument}: it must be {rule}, not {value!r}")


def _check(script: str, ttl: Any, timeout: Any, owner: Any, max_depth: Any) -> None:
    """Refuses before any request: the server answers only -5, whichever argument is wrong."""
    # A lease of 1 ms has passed when it is granted: without a limit, a call tried again for ever.
    is_seconds = isinstance(ttl, numbers.Real) and 100 <= ttl * 1000 < 1e10
    _require(is_seconds, "ttl", ttl, "from 0.1 to 9999999.999 seconds")
    is_limit = timeout is None or isinstance(timeout, numbers.Real) and timeout >= 0  # no NaN
    _require(is_limit, "timeout", timeout, "a number of seconds from 0 on, or None")
    if script == "reentrant":
        # Without an owner that both know, a nested call would wait for the hold around it.
        is_own = owner not in (None, "", "mode")
        _require(is_own, "owner", owner, "a text that all holds share, as str(uuid.uuid4())")
    is_word = _is_text(owner) and not re.search(r"^:|\s", owner, re.ASCII)
    is_word = is_word and len(owner.encode()) <= 256
    rule = "a str of up to 256 bytes without white space that does not begin with a colon"
    _require(owner is None or is_word, "owner", owner, rule)
    is_depth = isinstance(max_depth, numbers.Integral) and 1 <= max_depth <= 1024
    _require(max_depth is None or is_depth, "max_depth", max_depth, "an int from 1 to 1024")


def lock_keys(name: str, prefix: str) -> list[str]:
    """The keys lock, waiters and fence, in one slot. Refuses names whose keys could collide."""
    if not _is_text(name) or not _is_text(prefix):
        raise InvalidName(f"name: it must be a str, as the prefix, not {prefix!r} and {name!r}")
    lock = prefix + name
    tag = re.match(r"[^{]*\{[^}]+\}", lock)
    is_reserved = tag and re.search(r"^\{[^}]+\}\Z|:(fence|waiters)\Z|\{\}node\Z", lock)
    is_too_long = len(prefix.encode()) > 128 or len(name.encode()) > 512
    if not name or is_too_long or is_reserved or ("}" in lock and not tag):
        rule = "1 to 512 bytes, the prefix up to 128, and braces only as one {tag}: lua/README.md"
        raise InvalidName(f"name: it must have {rule}, names and keys; not {name!r}")
    base = lock if tag else f"{{{lock}}}"
    return [lock, f"{base}:waiters", f"{base}:fence"]


def is_transient(error: Exception) -> bool:
    """Whether a call that waits sends its request again."""
    is_denied = isinstance(error, (errors.AuthenticationError, errors.AuthorizationError))
    passes = isinstance(error, TRANSIENT) or re.search(PASSES, str(error))
    return bool(passes) and not is_denied


async def _result(answer):
    """What redis-py answers: a value in threads, an awaitable in asyncio."""
    return await answer if inspect.isawaitable(answer) else answer


class BaseLocks(Generic[T]):
    """What the clients for threads and for asyncio share: all but how to run and to wait."""

    _is_async: bool
    _event: Any  # the class of events
    _lease: Any  # makes an attempt
    _start: Any  # runs a coroutine in the background
    _wait: Any  # for its end, for some seconds
    _pause: Any  # until an event, for some seconds
    _drop_idle: Any
    _releases: set  # under way

    def __init__(self, client: Any, prefix: str = "lock:", scripts: Any = SCRIPTS):
        """`scripts`: a folder that replaces the scripts of the package."""
        send = getattr(client, "execute_command", None)
        if not send or inspect.iscoroutinefunction(send) != self._is_async:
            rule = "of redis.asyncio for redlatch.asyncio.Locks, and of redis for redlatch.Locks"
            raise TypeError(f"client: it must be {rule}, not {type(client).__name__}")
        _require(_is_text(prefix), "prefix", prefix, "a str")
        self.client, self.prefix, self._scripts, self._pid = client, prefix, {}, os.getpid()
        folder = Path(scripts) if isinstance(scripts, str) else scripts
        for kind in ("mutex", "reentrant", "rwlock", "node", "fenced"):
            source = (folder / f"{kind}.lua").read_bytes()
            sha = hashlib.sha1(source, usedforsecurity=False).hexdigest()
            self._scripts[kind] = sha, source
        self._is_cluster, prefix = hasattr(client, "get_nodes"), re.sub(r"\s", "_", prefix)
        self._channel = f"{prefix}wake:{secrets.token_hex(16)}" + "~" * self._is_cluster
        self._is_sentinel = hasattr(getattr(client, "connection_pool", None), "sentinel_manager")
        self._lock = threading.RLock()  # a handler of a signal may release while this is held
        self._is_subscribed, self._closed = self._event(), self._event()
        self._waiters, self._min_token, self._clock_offset, self._reader = {}, 0, 0, None
        self._ended = {}  # for a minute: a failover may revive an attempt that was queued

    # Holds of one owner nest: a random text, as str(uuid.uuid4()). A re-entrant lock needs one.

    def mutex(self, name: str, ttl: float = 30.0, timeout: float | None = None) -> T:
        """Acquires a mutex. `timeout`, in seconds, ends the wait by `TimedOut`; 0: tries once."""
        return self._begin("mutex", "acquire", name, ttl, timeout)

    def reentrant(
        self,
        name: str,
        ttl: float = 30.0,
        timeout: float | None = None,
        owner: str | None = None,
        max_depth: int | None = None,
    ) -> T:
        """Acquires a re-entrant lock. Its owner, a random text, may acquire it again."""
        return self._begin("reentrant", "acquire", name, ttl, timeout, owner, max_depth)

    def read(
        self,
        name: str,
        ttl: float = 30.0,
        timeout: float | None = None,
        owner: str | None = None,
        max_depth: int | None = None,
    ) -> T:
        """Acquires a read-write lock for reading, with other readers."""
        return self._begin("rwlock", "read", name, ttl, timeout, owner, max_depth)

    def write(
        self,
        name: str,
        ttl: float = 30.0,
        timeout: float | None = None,
        owner: str | None = None,
        max_depth: int | None = None,
    ) -> T:
        """Acquires a read-write lock for writing, alone."""
        return self._begin("rwlock", "write", name, ttl, timeout, owner, max_depth)

    def _begin(self, *lock: Any) -> T:
        raise NotImplementedError

    async def _acquire(self, script, verb, name, ttl, timeout, owner=None, max_depth=None):
        if os.getpid() != self._pid:
            raise LockError("this process was forked: create Locks in it")
        _check(script, ttl, timeout, owner, max_depth)
        until = clock() + (1e9 if timeout is None else min(timeout or ttl, 1e9))
        while True:
            lease = self._lease(self, script, verb, name, ttl, owner or "", max_depth)
            if await lease._acquire(until, waits=timeout != 0):
                return lease

    async def _open(self) -> None:
        await self._ask_time()
        self._reader = self._start(self._subscribe(), or_here=False)
        await self._pause(self._is_subscribed, 1.0)

    async def _ask_time(self) -> None:
        # A server that hangs kept the program here until redis-py had tried for the last time: for
        # ever without a socket timeout, and for ten socket timeouts with its usual retries. And the
        # reader of the subscription, for as long: waiters were not notified meanwhile.
        async def ask() -> None:
            self._observe(*await _result(self.client.time()))

        request = self._start(ask())
        try:
            if not await self._wait(request, LIMIT):
                raise errors.TimeoutError(f"TIME was not answered within {LIMIT} s")
        finally:
            request.cancel()  # of a thread, it continues until the socket timeout
        request.result()

    def _end_waits(self) -> None:
        self._closed.set()
        self._wake_all()

    def _wake_all(self) -> None:
        for wake in list(self._waiters.values()):
            wake.set()

    async def _send(self, script: str, keys: list, words: list):
        """Sends a script by its SHA1, or its source if the server does not know it."""
        sha, source = self._scripts[script]
        try:
            return await _result(self.client.evalsha(sha, len(keys), *keys, *words))
        except errors.NoScriptError:
            return await _result(self.client.eval(source, len(keys), *keys, *words))

    def _observe(self, seconds: int = 0, micros: int = 0) -> int:
        """The minimum token: the largest server time plus what has passed since, in steps."""
        with self._lock:
            now = int(clock() * 1e6)
            self._clock_offset = max(self._clock_offset, seconds * 1_000_000 + micros - now)
            if now + self._clock_offset > self._min_token + TOKEN_STEP:
                self._min_token = now + self._clock_offset
            return self._min_token

    def _remember_end(self, lease: BaseLease) -> None:
        if os.getpid() != self._pid:  # a thread of the parent may have held the lock at the fork
            return
        with self._lock:
            if lease._queued_at:
                self._ended[lease.attempt] = clock() + 60.0, lease
            for attempt, (until, _) in list(itertools.islice(self._ended.items(), 2)):
                if until < clock():
                    self._ended.pop(attempt, None)  # unless a handler of a signal has

    async def _subscribe(self) -> None:
        """Reads the subscription. With Sentinel, a silent one may lead to a former master."""
        while not self._closed.is_set():
            try:
                # In a cluster any node will do, and the one of the channel's slot may be down.
                node = {"node": secrets.choice(self.client.get_nodes())} if self._is_cluster else {}
                news = self.client.pubsub(**node)
                try:
                    await _result(news.subscribe(self._channel))
                    await self._read(news)
                finally:
                    if self._is_subscribed.is_set():
                        self._is_subscribed.clear()
                        self._wake_all()  # to poll at once, not at the end of half a claim
                    await _result(getattr(news, "aclose", news.close)())
            except Exception as error:
                await self._pause(self._closed, POLL if is_transient(error) else IDLE)

    async def _read(self, news: Any) -> None:
        patience = 1.0  # for the confirmation, or the answer to a PING
        while not self._closed.is_set():
            message = await _result(news.get_message(timeout=patience))
            if message:
                await self._receive(message["type"], message["data"])
            elif patience < IDLE or self._is_sentinel:
                break
            else:
                await _result(news.ping())
            patience = IDLE if message else 1.0

    async def _receive(self, kind: str, data) -> None:
        if kind == "subscribe":  # also after redis-py has connected again
            await self._ask_time()
            self._is_subscribed.set()
            attempts = list(self._waiters)
        else:  # attempt[,attempt...] token time lock
            attempts = (data if isinstance(data, str) else data.decode()).split(" ")[0].split(",")
        for attempt in attempts:
            if wake := self._waiters.get(attempt):
                wake.set()
            if ended := self._ended.get(attempt):
                self._start(ended[1]._release_again())


class BaseLease:
    """An attempt to get a lock, until its release, also by the end of the last reference to it."""

    name: str
    ttl: float  # seconds
    token: int  # the fencing token: larger than that of each earlier holder

    def __init__(self, locks, script, verb, name, ttl, owner, max_depth):
        self.locks, self._script, self._verb, self.name, self.ttl = locks, script, verb, name, ttl
        self.attempt, self.token, self.lost = secrets.token_hex(16), None, locks._event()
        self._keys, self._ttl_ms = lock_keys(name, locks.prefix), int(ttl * 1000)
        has_owner = script != "mutex"
        self._head = [self.attempt, owner] if has_owner else [self.attempt]
        self._queue = ["", "", max_depth] if has_owner and max_depth else []  # claim_ms, channel
        self._wake, self._is_over, self._may_hold = locks._event(), locks._event(), True
        self._valid_until, self._renew_at, self._queued_at = 0.0, 0.0, ""
        self._was_late = False  # seen past its deadline
        self._released = self._failure = None  # the release under way, and its last failure

    @property
    def is_valid(self) -> bool:
        """Whether the lock is held now. For writes, compare `token` at the resource as well."""
        is_mine = os.getpid() == self.locks._pid  # not that of a parent
        # Else a renewal answered just before the deadline, and stored just after it, would make a
        # lease valid again that another thread has seen end. No lock: a signal handler asks, too.
        if clock() >= self._valid_until:
            self._was_late = True
        return is_mine and not self._is_over.is_set() and not self._was_late

    def __del__(self) -> None:
        is_mine = os.getpid() == self.locks._pid  # not that of a parent
        # Not whether it is over: an interrupt may end `_give_up` before the release has begun.
        is_held = getattr(self, "token", None) is not None and self._released is None
        if is_held and is_mine and not sys.is_finalizing():
            self._forgotten()

    async def _release_within(self, limit: float) -> bool:
        if self.is_valid:
            return await self._within(limit, self._give_up(), "release") > 0
        if not self._is_over.is_set():  # in the background: the server may be away
            self._lose()
        return False

    async def _exit(self, error) -> None:
        if error:
            # Without the wait, a program that the error ends has not sent its release: the loop of
            # asyncio ends first. A silent server must not hide the error for long.
            await self.locks._wait(self._give_up(), 1.0)
        elif not await self._release_within(LIMIT):
            raise LeaseLost(f"lock {self.name!r}: the lease was lost before its release")

    async def _call(self, limit: float, verb: str, *words):
        """Sends a request for one lock. After the limit, the next one takes another connection."""
        words = [verb, *self._head, *words]  # the words of the lock, then the shared words
        request = self.locks._start(self.locks._send(self._script, self._keys, words))
        try:
            answer = await self._within(min(limit, LIMIT), request, verb)
        finally:
            request.cancel()  # if asyncio waits for it; a thread continues until the socket timeout
        return answer[0] if isinstance(answer, list) else answer  # -5: the call is malformed

    async def _within(self, limit: float, reply: Any, verb: str):
        if not await self.locks._wait(reply, max(0.0, limit)):
            self.locks._drop_idle()
            text = f"lock {self.name!r}: {verb} was not answered within {limit:.3f} s"
            if reply is not self._released or not self._failure:
                raise errors.TimeoutError(text)
            # Without it, a user who may no longer run scripts saw nothing but a slow server.
            text += f"; last failure: {self._failure}"
            raise errors.TimeoutError(text) from self._failure
        return reply.result()

    async def _acquire(self, until: float, waits: bool) -> bool:
        """Returns whether the grant came in time, or too late. Raises if there is none."""
        locks, proposal, is_unsure = self.locks, "", False
        failure: Exception | None = errors.TimeoutError("the server has not answered")
        if waits:
            channel = locks._channel if locks._is_subscribed.is_set() else ""
            self._queue[:2] = [int(min(self.ttl, CLAIM) * 1000), channel]
            locks._waiters[self.attempt] = self._wake
        try:
            while clock() < until:
                self._wake.clear()
                if locks._closed.is_set():
                    raise LockError(f"lock {self.name!r}: the client was closed")
                sent, words = clock(), [self._queued_at, proposal, self._ttl_ms, locks._observe()]
                try:
                    limit = min(until - sent, max(self.ttl / 4, POLL))
                    answer = await self._call(limit, self._verb, *words, *self._queue)
                except Exception as error:
                    # A refusal says that nothing was done: the call sent releases, each of which
                    # was refused as well, for a whole TTL. An error that passes may answer a
                    # request that redis-py has repeated, as any error with a cluster's client.
                    is_refusal = isinstance(error, errors.ResponseError) and not locks._is_cluster
                    is_unsure |= is_transient(error) or not is_refusal
                    if not waits or not is_transient(error):
                        self._may_hold = is_unsure or bool(self._queued_at)
                        raise
                    # One that the time limit cuts short says nothing new: a poll in the last moment
                    # reported a lock in use as an outage. Without the traceback, which has this
                    # frame: a lease that was granted later, and forgotten, was kept for long.
                    if failure or limit >= POLL:
                        failure = error.with_traceback(None)
                    answer = [POLL * 1000, 0]
                else:
                    failure = None  # else a lock in use, after an outage, was reported as one
                if isinstance(answer, int):
                    return self._grant(answer, sent)
                self._may_hold = waits
                if not waits:
                    break
                self._queued_at = self._queued_at or answer[1] or ""
                locks._observe(0, answer[1])
                is_notified = self._queue[1] and locks._is_subscribed.is_set()
                pause = self._queue[0] / 2000 if is_notified else POLL
                pause = min(max(answer[0], 1) / 1000, pause, max(0.0, until - clock()))
                await locks._pause(self._wake, pause)
            text = f"; last failure: {failure}" if failure else ": it is in use"
            text = f"lock {self.name!r}: not granted within the time limit{text}"
            raise TimedOut(text) from failure
        except BaseException:
            self._give_up()
            raise

    def _grant(self, answer: int, sent: float) -> bool:
        if answer < 0:
            raise self._refusal(answer)
        self.token = answer
        self.locks._waiters.pop(self.attempt, None)
        # Without a thread, it raises: run in this one, it would renew the lease and never return.
        renewals = _keep(weakref.ref(self), self._is_over, self.locks._pause)
        self._move(sent)
        self.locks._start(renewals, or_here=False)
        return self.is_valid

    def _refusal(self, answer: int) -> LockError:
        kind, text = REFUSALS[-answer - 1]
        return kind(f"lock {self.name!r}: {text.format(self._keys[0])}")

    def _move(self, sent: float) -> None:
        self._valid_until = max(self._valid_until, sent + self.ttl * 0.99 - 0.002)
        self._renew_at = sent + self.ttl / 3

    async def _extend(self, verb: str) -> bool:
        if verb == "downgrade":
            _require(self._verb == "write", verb, self.name, "of a hold of `locks.write`")
        sent, answer = clock(), 0
        if self.is_valid:
            words = [self.locks._observe()] if verb == "downgrade" else []
            answer = await self._call((self._valid_until - sent) / 4, verb, self._ttl_ms, *words)
        if answer == -5:
            raise self._refusal(answer)
        is_held = answer > 0 and self.is_valid
        if is_held:
            self.locks._observe(0, answer)
            self._move(sent)
        if not (is_held and self.is_valid) and not self._is_over.is_set():
            self._lose()
        return self.is_valid

    def _lose(self) -> None:
        self._is_over.set()  # before those that `lost` wakes ask whether it is valid
        self.lost.set()
        self._give_up()

    def _give_up(self) -> Any:
        """Releases in the background: until answered, or until nothing can be left to release."""
        self._is_over.set()
        self.locks._waiters.pop(self.attempt, None)
        released = self._released = self.locks._start(self._release())
        self.locks._remember_end(self)
        self.locks._releases.add(released)
        released.add_done_callback(self.locks._releases.discard)
        return released

    async def _release(self) -> int:
        until, last_token, remember = clock() + max(self.ttl, CLAIM), "", 1
        while self._may_hold and os.getpid() == self.locks._pid:
            words = [last_token, self.locks._observe(), remember, *self._queue]
            try:
                return await self._call(max(self.ttl / 4, POLL), "release", *words)
            except Exception as error:
                if clock() > until:
                    raise
                self._failure = error
                await self.locks._pause(self.locks._event(), POLL)
        return 0

    async def _release_again(self) -> None:
        """For a message that names this attempt after its end: a failover may have revived it.

        Or the message that granted the lock is read late, after a poll was granted it as well. If
        this request then came before the release that is under way, that one would be answered 0,
        and a lease that was held reported as lost.
        """
        await self.locks._wait(self._released, max(self.ttl, CLAIM) + LIMIT)
        await self._call(LIMIT, "release", "", self.locks._observe())


async def _keep(reference: weakref.ref, is_over: Any, pause: Any) -> None:
    """Renews until the lease has expired, and gives it up when its deadline has passed."""
    while lease := reference():
        seconds, lease = lease._renew_at - clock(), None
        # A wait stands still while the machine is suspended, and the deadline does not.
        if await pause(is_over, min(1.0, max(0.0, seconds))) or not (lease := reference()):
            return
        if clock() < lease._renew_at:
            continue
        try:
            await lease._extend("renew")
        except Exception:  # unknown: try again before the deadline
            lease._renew_at = min(clock() + min(lease.ttl / 30, 1.0), lease._valid_until)


def _run(coroutine: Any) -> Any:
    """Runs a coroutine in this thread, where none of the above suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a coroutine was suspended in a thread")


class Locks(BaseLocks["Lease"]):
    """Acquires locks through one redis-py client, for threads. All share one subscription.

    `client`: `redis.Redis`, `redis.RedisCluster`, or `Sentinel(...).master_for(...)`.
    """

    _is_async, _event, _releases = False, threading.Event, set()

    def __init__(
        self,
        client: redis.Redis | redis.RedisCluster,
        prefix: str = "lock:",
        scripts: Any = SCRIPTS,
    ):
        super().__init__(client, prefix, scripts)
        _run(self._open())

    def close(self) -> None:
        """Ends waits by `LockError`, and the subscription. Release the leases before."""
        self._end_waits()
        futures.wait(set(self._releases), 1.0)

        async def wake() -> None:
            self.client.publish(self._channel, "")

        # Wakes the thread that reads the subscription, which else sees the end within IDLE. If the
        # server hangs, a request in this thread kept the program here: without a socket timeout,
        # for ever.
        with contextlib.suppress(RuntimeError):  # no thread can be started
            futures.wait([self._start(wake(), or_here=False)], 1.0)

    def send(self, script: str, keys: list, words: list) -> Any:
        """Sends a script, as `("fenced", [value_key, token_key], [token, value])`: 1 if written."""
        return _run(self._send(script, keys, words))

    def _begin(self, *lock: Any) -> Lease:
        return _run(self._acquire(*lock))

    def _lease(self, *lock: Any) -> Lease:
        return Lease(*lock)

    @staticmethod
    def _start(coroutine: Any, or_here: bool = True) -> futures.Future:
        """Runs it in a daemon thread: it does not end with the main thread, nor keep the process.

        Where no thread can be started, runs it in this one, or raises `RuntimeError`.
        """
        future: futures.Future = futures.Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(_run(coroutine))
            except BaseException as error:
                future.set_exception(error)

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError:  # too many threads, or the process ends: Python 3.12
            if not or_here:
                coroutine.close()
                raise
            run()
        return future

    @staticmethod
    async def _wait(future: futures.Future, seconds: float) -> bool:
        return bool(futures.wait([future], seconds).done)

    @staticmethod
    async def _pause(event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)

    def _drop_idle(self) -> None:
        """Disconnects idle connections: where one has fallen silent, the others may have."""
        nodes = self.client.get_nodes() if self._is_cluster else []
        clients = [node.redis_connection for node in nodes] or [self.client]
        for client in filter(None, clients):
            with contextlib.suppress(TypeError):  # of a BlockingConnectionPool before redis-py 8
                client.connection_pool.disconnect(inuse_connections=False)


class Lease(BaseLease):
    """A hold of a lock, renewed until its release. `lost` is a `threading.Event`."""

    lost: threading.Event

    def renew(self) -> bool:
        """Renews at once. Returns whether the lock is held; raises without an answer."""
        return _run(self._extend("renew"))

    def downgrade(self) -> bool:
        """Turns a write hold into a read hold. Returns whether the lock is held."""
        return _run(self._extend("downgrade"))

    def release(self, timeout: float = 5.0) -> bool:
        """Returns whether the lock was held until now: a second time `False`.

        Without an answer: raises, and continues in the background.
        """
        return _run(self._release_within(timeout))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        _run(self._exit(error))

    def _forgotten(self) -> None:
        # In another thread: the collector runs in any one, also in one that holds a lock of this
        # client, as in _remember_end, and would wait for itself for ever. Without a new thread, the
        # lease expires.
        async def end() -> None:
            self._give_up()

        with contextlib.suppress(RuntimeError):
            self.locks._start(end(), or_here=False)


# A process that ends waits for the releases under way, for a second.
atexit.register(lambda: futures.wait(set(Locks._releases), 1.0))
os.register_at_fork(after_in_child=Locks._releases.clear)
