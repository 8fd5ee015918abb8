"""Locks on Redis and Valkey for threads: the redlatch protocol (lua/README.md) on redis-py."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import re
import secrets
import sys
import threading
import time
import weakref
from concurrent import futures
from pathlib import Path

from redis import exceptions as errors

CLAIM = 3.0  # seconds for which a released lock is reserved for a waiter; at most the TTL
POLL = 0.1  # seconds between two polls of a waiter that cannot be notified
IDLE = 5.0  # seconds without a message after which the subscription is tested by PING
LIMIT = 5.0  # seconds for an answer; a quarter of what is left of the lease, if that is less
TOKEN_STEP = 5_000_000  # microseconds; a higher minimum token slows the next acquire of each lock
TRANSIENT = (errors.ConnectionError, errors.TimeoutError, errors.ClusterError, errors.TryAgainError)
TRANSIENT += (errors.RedisClusterException, errors.OutOfMemoryError, errors.ReadOnlyError)
# redis-py has no classes for some, and Redis 6.2 wraps the error of a script in another one.
PASSES = r"\b(OOM|NOREPLICAS|MISCONF|READONLY|LOADING|BUSY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN)\b"
HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "redlatch_lua"  # installed by pip; else this file is in the folder of the protocol
SCRIPTS = SCRIPTS if SCRIPTS.is_dir() else HERE / "../.."

LockError = type("LockError", (Exception,), {"__module__": __name__})
NAMES = "TimedOut LeaseLost WrongType TooDeep Malformed WouldDeadlock TooManyReaders".split()
TimedOut, LeaseLost, WrongType, TooDeep, Malformed, WouldDeadlock, TooManyReaders = (
    type(name, (LockError,), {"__module__": __name__}) for name in NAMES
)
REFUSALS = [LockError, WrongType, WrongType, TooDeep, Malformed, WouldDeadlock, TooManyReaders]
# Seconds on a monotonic clock that also counts while the machine is suspended (Linux, macOS).
clock = functools.partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def lock_keys(name: str, prefix: str) -> list[str]:
    """The keys lock, waiters and fence, in one slot. Refuses names whose keys could collide."""
    lock = prefix + name
    tag = re.match(r"[^{]*\{[^}]+\}", lock)
    is_reserved = tag and re.search(r"^\{[^}]+\}\Z|:(fence|waiters)\Z|\{\}node\Z", lock)
    is_too_long = len(prefix.encode()) > 128 or len(name.encode()) > 512
    if not name or is_too_long or is_reserved or ("}" in lock and not tag):
        raise ValueError(f"not a lock name: {name!r}")
    base = lock if tag else f"{{{lock}}}"
    return [lock, f"{base}:waiters", f"{base}:fence"]


def is_transient(error: Exception) -> bool:
    """Whether a call that waits sends its request again."""
    is_denied = isinstance(error, (errors.AuthenticationError, errors.AuthorizationError))
    passes = isinstance(error, TRANSIENT) or re.search(PASSES, str(error))
    return bool(passes) and not is_denied


def _start(function, *arguments) -> futures.Future:
    """Runs it in a daemon thread, which neither ends with the main thread nor keeps the process."""
    future = futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # the process ends: atexit, from Python 3.12 on
        run()
    return future


_releases: set = set()  # under way; a process that ends waits for them, for a second
atexit.register(lambda: futures.wait(set(_releases), 1.0))
os.register_at_fork(after_in_child=_releases.clear)


class Locks:
    """Acquires locks through one redis-py client. All locks share one subscription."""

    def __init__(self, client, prefix: str = "lock:", scripts=SCRIPTS):
        self.client, self.prefix, self._scripts, self._pid = client, prefix, {}, os.getpid()
        for kind in ("mutex", "reentrant", "rwlock", "node", "fenced"):
            source = Path(scripts, f"{kind}.lua").read_bytes()
            self._scripts[kind] = client.register_script(source)  # sends nothing
        self._is_cluster, prefix = hasattr(client, "get_nodes"), re.sub(r"\s", "_", prefix)
        self._channel = f"{prefix}wake:{secrets.token_hex(16)}" + "~" * self._is_cluster
        self._is_sentinel = hasattr(getattr(client, "connection_pool", None), "sentinel_manager")
        self._lock = threading.Lock()
        self._is_subscribed, self._closed = threading.Event(), threading.Event()
        self._waiters, self._min_token, self._clock_offset = {}, 0, 0
        self._ended = {}  # for a minute: a failover may revive an attempt that was queued
        self._observe(*self.client.time())
        _start(self._subscribe)
        self._is_subscribed.wait(1.0)

    def _acquire(self, script, verb, name, ttl=30.0, timeout=None, owner="", max_depth="") -> Lease:
        """Raises TimedOut after `timeout` seconds; None: no limit, 0: try without waiting."""
        if os.getpid() != self._pid:
            raise LockError("this process was forked: create Locks in it")
        until = clock() + (1e9 if timeout is None else timeout or ttl)
        while True:
            lease = Lease(self, script, verb, name, ttl, owner, max_depth)
            if lease._acquire(until, waits=timeout != 0):
                return lease

    # Holds of one owner nest: a random text, as str(uuid.uuid4()). A re-entrant lock needs one.
    mutex = functools.partialmethod(_acquire, "mutex", "acquire")
    reentrant = functools.partialmethod(_acquire, "reentrant", "acquire")
    read = functools.partialmethod(_acquire, "rwlock", "read")
    write = functools.partialmethod(_acquire, "rwlock", "write")

    def close(self) -> None:
        """Ends the subscription. Release the leases before."""
        futures.wait(set(_releases), 1.0)
        self._closed.set()
        with contextlib.suppress(Exception):
            self.client.publish(self._channel, "")  # wakes the thread that reads the subscription

    def _drop_idle(self) -> None:
        """Disconnects idle connections: where one has fallen silent, the others may have."""
        nodes = self.client.get_nodes() if self._is_cluster else []
        clients = [node.redis_connection for node in nodes] or [self.client]
        for client in filter(None, clients):
            with contextlib.suppress(TypeError):  # of a BlockingConnectionPool before redis-py 8
                client.connection_pool.disconnect(inuse_connections=False)

    def send(self, script: str, keys: list, words: list):
        """Sends a script by its SHA1, or its source if the server does not know it."""
        script = self._scripts[script]
        try:
            return self.client.evalsha(script.sha, len(keys), *keys, *words)
        except errors.NoScriptError:
            return self.client.eval(script.script, len(keys), *keys, *words)

    def _observe(self, seconds: int = 0, micros: int = 0) -> int:
        """The minimum token: the largest server time plus what has passed since, in steps."""
        with self._lock:
            now = int(clock() * 1e6)
            self._clock_offset = max(self._clock_offset, seconds * 1_000_000 + micros - now)
            if now + self._clock_offset > self._min_token + TOKEN_STEP:
                self._min_token = now + self._clock_offset
            return self._min_token

    def _remember_end(self, lease: Lease) -> None:
        with self._lock:
            if lease._queued_at:
                self._ended[lease.attempt] = clock() + 60.0, lease
            for attempt, (until, _) in list(itertools.islice(self._ended.items(), 2)):
                if until < clock():
                    del self._ended[attempt]

    def _subscribe(self) -> None:
        """Reads the subscription. With Sentinel, a silent one may lead to a former master."""
        while not self._closed.is_set():
            try:
                # In a cluster any node will do, and the one of the channel's slot may be down.
                node = {"node": secrets.choice(self.client.get_nodes())} if self._is_cluster else {}
                with self.client.pubsub(**node) as news:
                    news.subscribe(self._channel)
                    patience = 1.0  # for the confirmation, or the answer to a PING
                    while not self._closed.is_set():
                        message = news.get_message(timeout=patience)
                        if message:
                            self._receive(message["type"], message["data"])
                        elif patience < IDLE or self._is_sentinel:
                            break
                        else:
                            news.ping()
                        patience = IDLE if message else 1.0
            except Exception as error:
                self._is_subscribed.clear()
                self._closed.wait(POLL if is_transient(error) else IDLE)
            self._is_subscribed.clear()

    def _receive(self, kind: str, data) -> None:
        if kind == "subscribe":  # also after redis-py has connected again
            self._observe(*self.client.time())
            self._is_subscribed.set()
            attempts = list(self._waiters)
        else:  # attempt[,attempt...] token time lock
            attempts = (data if isinstance(data, str) else data.decode()).split(" ")[0].split(",")
        for attempt in attempts:
            self._waiters.get(attempt, threading.Event()).set()
            if ended := self._ended.get(attempt):
                _start(ended[1]._call, LIMIT, "release", "", self._observe())


class Lease(contextlib.AbstractContextManager):
    """An attempt to get a lock, until its release, also by the end of the last reference to it."""

    def __init__(self, locks: Locks, script, verb, name: str, ttl: float, owner: str, max_depth):
        self.locks, self._script, self._verb, self.name, self.ttl = locks, script, verb, name, ttl
        self.attempt, self.token, self.lost = secrets.token_hex(16), None, threading.Event()
        self._keys, self._ttl_ms = lock_keys(name, locks.prefix), int(ttl * 1000)
        has_owner = script != "mutex"
        self._head = [self.attempt, owner] if has_owner else [self.attempt]
        self._queue = ["", "", max_depth] if has_owner and max_depth else []  # claim_ms, channel
        self._wake, self._is_over, self._may_hold = threading.Event(), threading.Event(), True
        self._valid_until, self._renew_at, self._queued_at = 0.0, 0.0, ""

    @property
    def is_valid(self) -> bool:
        """Whether the lock is held now. For writes, compare `token` at the resource as well."""
        is_mine = os.getpid() == self.locks._pid  # not that of a parent
        return is_mine and not self._is_over.is_set() and clock() < self._valid_until

    def renew(self) -> bool:
        """Renews at once. Returns whether the lock is held; raises without an answer."""
        return self._extend("renew")

    def downgrade(self) -> bool:
        """Turns a write hold into a read hold. Returns whether the lock is held."""
        return self._extend("downgrade", self.locks._observe())

    def release(self, timeout: float = 5.0) -> bool:
        """Returns whether the lock was held until now. Without an answer: raises, and continues."""
        return all([self.is_valid, self._within(timeout, self._give_up(), "release") > 0])

    def __del__(self) -> None:
        if self.token is not None and not self._is_over.is_set() and not sys.is_finalizing():
            self._give_up()

    def __exit__(self, error, *_) -> None:
        if error:
            self._give_up()
        elif not self.release():
            raise LeaseLost(f"lock {self.name!r}: the lease was lost before its release")

    def _call(self, limit: float, verb: str, *words):
        """Sends a request for one lock. After the limit, the next one takes another connection."""
        limit = min(limit, LIMIT)
        words = [verb, *self._head, *words]  # the words of the lock, then the shared words
        answer = self._within(limit, _start(self.locks.send, self._script, self._keys, words), verb)
        return answer[0] if isinstance(answer, list) else answer  # -5: the call is malformed

    def _within(self, limit: float, reply: futures.Future, verb: str):
        if not futures.wait([reply], max(0.0, limit)).done:
            self.locks._drop_idle()
            text = f"lock {self.name!r}: {verb} was not answered within {limit:.3f} s"
            raise errors.TimeoutError(text)
        return reply.result()

    def _acquire(self, until: float, waits: bool) -> bool:
        """Returns whether the grant came in time, or too late. Raises if there is none."""
        locks, proposal, failure = self.locks, "", ""
        if waits:
            channel = locks._channel if locks._is_subscribed.is_set() else ""
            self._queue[:2] = [int(min(self.ttl, CLAIM) * 1000), channel]
            locks._waiters[self.attempt] = self._wake
        try:
            while clock() < until:
                self._wake.clear()
                sent, words = clock(), [self._queued_at, proposal, self._ttl_ms, locks._observe()]
                try:
                    limit = min(until - sent, max(self.ttl / 4, POLL))
                    answer = self._call(limit, self._verb, *words, *self._queue)
                except Exception as error:
                    if not waits or not is_transient(error):
                        raise
                    failure, answer = f"; last failure: {error}", [POLL * 1000, 0]
                if isinstance(answer, int):
                    return self._grant(answer, sent)
                self._may_hold = waits
                if not waits:
                    break
                self._queued_at = self._queued_at or answer[1] or ""
                locks._observe(0, answer[1])
                is_notified = self._queue[1] and locks._is_subscribed.is_set()
                pause = self._queue[0] / 2000 if is_notified else POLL
                self._wake.wait(min(max(answer[0], 1) / 1000, pause, max(0.0, until - clock())))
            raise TimedOut(f"lock {self.name!r}: not granted within the time limit{failure}")
        except BaseException:
            self._give_up()
            raise

    def _grant(self, answer: int, sent: float) -> bool:
        if answer < 0:
            raise REFUSALS[-answer - 1](f"lock {self.name!r}: refused with {answer}")
        self.token = answer
        self._move(sent)
        _start(_keep, weakref.ref(self), self._is_over)
        return self.is_valid

    def _move(self, sent: float) -> None:
        self._valid_until = max(self._valid_until, sent + self.ttl * 0.99 - 0.002)
        self._renew_at = sent + self.ttl / 3

    def _extend(self, verb: str, *words) -> bool:
        sent, answer = clock(), 0
        if self.is_valid:
            answer = self._call((self._valid_until - sent) / 4, verb, self._ttl_ms, *words)
        if answer == -5:
            raise Malformed(f"lock {self.name!r}: {verb} was refused with -5")
        if answer > 0 and self.is_valid:
            self.locks._observe(0, answer)
            self._move(sent)
        elif not self._is_over.is_set():
            self.lost.set()
            self._give_up()
        return self.is_valid

    def _give_up(self) -> futures.Future:
        """Releases in the background: until answered, or until nothing can be left to release."""
        self._is_over.set()
        self.locks._waiters.pop(self.attempt, None)
        self.locks._remember_end(self)
        released = _start(self._release)
        _releases.add(released)
        released.add_done_callback(_releases.discard)
        return released

    def _release(self) -> int:
        until, last_token, remember = clock() + max(self.ttl, CLAIM), "", 1
        while self._may_hold and os.getpid() == self.locks._pid:
            words = [last_token, self.locks._observe(), remember, *self._queue]
            try:
                return self._call(max(self.ttl / 4, POLL), "release", *words)
            except Exception:
                if clock() > until:
                    raise
                time.sleep(POLL)
        return 0


def _keep(reference: weakref.ref, is_over: threading.Event) -> None:
    """Renews until the lease has expired, and gives it up when its deadline has passed."""
    while lease := reference():
        pause, lease = lease._renew_at - clock(), None
        if is_over.wait(max(0.0, pause)) or not (lease := reference()):
            return
        try:
            lease.renew()
        except Exception:  # unknown: try again before the deadline
            lease._renew_at = min(clock() + min(lease.ttl / 30, 1.0), lease._valid_until)
