"""Runs the commands of ../README.md: one JSON object per line, in and out.

With the argument asyncio, it runs them by redlatch.asyncio, in an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
import time
from urllib.parse import urlparse

import redis
import redis.asyncio
import redis.sentinel

import redlatch
import redlatch.asyncio

LOOP = asyncio.new_event_loop() if sys.argv[1:] == ["asyncio"] else None


def wait(value):
    """The value, or the result of an awaitable of the event loop."""

    async def result():
        return await value

    if not inspect.isawaitable(value):
        return value
    return asyncio.run_coroutine_threadsafe(result(), LOOP).result()


def connect(url: str, topology: str, resp: int):
    options = {"socket_timeout": 2, **({"protocol": resp} if resp else {})}
    package = redis.asyncio if LOOP else redis
    if topology == "cluster":
        return package.RedisCluster.from_url(url, **options)
    if topology.startswith("sentinel:"):
        address = urlparse(url)
        sentinel = package.sentinel.Sentinel([(address.hostname, address.port)], socket_timeout=2)
        return sentinel.master_for(topology.split(":", 1)[1], **options)
    return package.Redis.from_url(url, **options)


async def open_locks(client, prefix: str):
    return await redlatch.asyncio.Locks(client, prefix).open()


def error_name(error: Exception) -> str:
    """The name of a typed error in snake case: `TimedOut` is `timed_out`."""
    if isinstance(error, redlatch.LeaseLost):
        return "lost"
    if isinstance(error, redlatch.LockError):
        return "".join("_" * c.isupper() + c.lower() for c in type(error).__name__).lstrip("_")
    if redlatch.is_transient(error):
        return "no_answer"
    return "failed"


class Worker:
    def __init__(self):
        self.locks, self.leases = {}, {}

    def acquire_lease(self, command: dict, limit: float) -> redlatch.Lease:
        method = getattr(self.locks[command.get("client")], command["kind"])
        has_owner = command.get("owner") and command["kind"] != "mutex"
        owner = {"owner": command["owner"]} if has_owner else {}
        ttl = command.get("ttl_ms", 3000) / 1000
        return wait(method(command["name"], ttl=ttl, timeout=limit, **owner))

    def open(self, command: dict) -> dict:
        topology = command.get("topology", "server")
        client = connect(command["url"], topology, command.get("resp", 0))
        prefix = command.get("prefix", "lock:")
        locks = wait(open_locks(client, prefix)) if LOOP else redlatch.Locks(client, prefix)
        self.locks[command.get("client")] = locks
        return {}

    def acquire(self, command: dict) -> dict:
        lease = self.acquire_lease(command, command.get("limit_ms", 5000) / 1000)
        self.leases[command["as"]] = lease
        return {"token": lease.token}

    def release(self, command: dict) -> dict:
        return {"held": wait(self.leases[command["as"]].release())}

    def renew(self, command: dict) -> dict:
        return {"held": wait(self.leases[command["as"]].renew())}

    def downgrade(self, command: dict) -> dict:
        return {"held": wait(self.leases[command["as"]].downgrade())}

    def is_valid(self, command: dict) -> dict:
        return {"valid": self.leases[command["as"]].is_valid}

    def lost(self, command: dict) -> dict:
        lost, limit = self.leases[command["as"]].lost, command.get("limit_ms", 5000) / 1000
        end = time.monotonic() + limit
        while not lost.is_set() and time.monotonic() < end:  # an event of threads or of asyncio
            time.sleep(0.002)
        return {} if lost.is_set() else {"ok": False, "error": "timed_out"}

    def close(self, command: dict) -> dict:
        locks = self.locks.pop(command.get("client"), None)
        return wait(locks.close()) or {} if locks else {}

    def count(self, command: dict) -> dict:
        """Increments a counter by GET and SET under the lock: a second holder loses increments."""
        client = self.locks[command.get("client")].client
        key, tokens, longest = command["key"], [], 0.0
        end = time.monotonic() + command["seconds"]
        while time.monotonic() < end:
            begin, lease = time.monotonic(), self.acquire_lease(command, 10)
            longest = max(longest, time.monotonic() - begin)
            tokens.append(lease.token)
            wait(client.set(key, int(wait(client.get(key)) or 0) + 1))
            wait(lease.release())
        is_ascending = all(a < b for a, b in zip(tokens, tokens[1:]))
        result = {"increments": len(tokens), "longest_ms": round(longest * 1000)}
        return {**result, "tokens_ascending": is_ascending}

    def run(self, command: dict) -> None:
        verbs = "open acquire release renew downgrade is_valid lost count close".split()
        try:
            result = {"ok": False, "error": "unknown"}
            if command.get("do") in verbs:
                result = getattr(self, command["do"])(command)
        except Exception as error:
            result = {"ok": False, "error": error_name(error), "text": repr(error)}
        identity = {"id": command["id"]} if "id" in command else {}
        sys.stdout.write(json.dumps({"ok": True, **result, **identity}) + "\n")
        sys.stdout.flush()


def main() -> None:
    worker = Worker()
    if LOOP:
        threading.Thread(target=LOOP.run_forever, daemon=True).start()
    for line in sys.stdin:
        try:
            command = dict(json.loads(line))
        except (TypeError, ValueError):
            command = {}  # it is answered as unknown
        if command.get("async"):
            threading.Thread(target=worker.run, args=(command,), daemon=True).start()
        else:
            worker.run(command)
        if command.get("do") == "close" and "client" not in command:
            break


if __name__ == "__main__":
    main()
