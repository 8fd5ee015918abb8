"""Locks of redis-py and python-redis-lock, for ../../others.py: JSON objects, in and out."""

import json
import sys
import threading
import time
from importlib.metadata import version

import redis
import redis_lock

LIBRARIES = {"redis-py": "redis", "python-redis-lock": "python-redis-lock"}


class RedisPy:
    """Polls every 0.1 s, the default. Its token is in the thread unless `thread_local` is off."""

    def __init__(self, client, key, ttl):
        self.lock = client.lock(key, timeout=ttl, thread_local=False)
        self.release = self.lock.release

    def acquire(self, limit):
        return self.lock.acquire(blocking=limit > 0, blocking_timeout=limit or None)


class PythonRedisLock:
    """Waits for a list. It adds `lock:` to the name, and knows whole seconds only."""

    def __init__(self, client, key, ttl):
        self.expire = ttl and int(ttl)
        self.lock = redis_lock.Lock(client, key.removeprefix("lock:"), expire=self.expire)
        self.release = self.lock.release

    def acquire(self, limit):
        if limit == 0:
            return self.lock.acquire(blocking=False)
        end = time.monotonic() + limit
        while (left := end - time.monotonic()) > 0:
            # A timeout above `expire` is refused. Without one it waits for `expire` too.
            pause = min(self.expire or limit, max(1, int(left)))
            if self.lock.acquire(timeout=pause):
                return True
        return False


class Worker:
    def __init__(self):
        self.locks = {}

    def open(self, command):
        self.prefix = command["prefix"]
        # python-redis-lock waits in BLPOP for longer than the default time limit of a reply.
        self.client = redis.Redis.from_url(command["url"], socket_timeout=None)
        return {"versions": {name: version(package) for name, package in LIBRARIES.items()}}

    def acquire(self, command):
        kind = {"redis-py": RedisPy, "python-redis-lock": PythonRedisLock}[command["kind"]]
        ttl = command["ttl_ms"] / 1000 or None
        lock = kind(self.client, self.prefix + command["name"], ttl)
        if not lock.acquire(command["limit_ms"] / 1000):
            return {"error": "timed_out"}
        self.locks[command["as"]] = lock
        return {}

    def release(self, command):
        try:
            self.locks.pop(command["as"]).release()
            return {"held": True}
        except (redis.exceptions.LockError, redis_lock.NotAcquired) as error:
            return {"held": False, "says": type(error).__name__}

    def reset_all(self, _command):
        redis_lock.reset_all(self.client)
        return {}

    def close(self, _command):
        return {}

    def answer(self, command):
        try:
            answer = getattr(self, command["do"])(command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer |= {"ok": "error" not in answer, "id": command.get("id")}
        print(json.dumps(answer) + "\n", end="", flush=True)


worker = Worker()
for line in sys.stdin:
    request = json.loads(line)
    if request.get("async"):
        threading.Thread(target=worker.answer, args=(request,), daemon=True).start()
    else:
        worker.answer(request)
        if request["do"] == "close":
            break
