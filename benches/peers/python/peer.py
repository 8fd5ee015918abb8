"""Measures redis-py's Lock and python-redis-lock, as ../README.md describes."""

import asyncio
import json
import platform
import sys
import threading
import time
from importlib.metadata import version

import redis
import redis.asyncio
import redis_lock

# All locks have the TTL that is the default of redlatch.
TTL = 30
MUTEX = ["mutex"]
LIBRARIES = [
    {
        "name": "redis-py",
        "version": version("redis"),
        "client": "redis-py " + version("redis"),
        "kinds": MUTEX,
        "turns": MUTEX,
        "most_clients": 64,
        "fencing": "no",
        "renewal": "by hand",
        "waiting": "polls",
        "settings": "asyncio, hiredis; a pool of 64 connections; timeout, sleep",
    },
    {
        "name": "python-redis-lock",
        "version": version("python-redis-lock"),
        "client": "redis-py " + version("redis"),
        "kinds": MUTEX,
        "turns": MUTEX,
        "most_clients": 64,
        "fencing": "no",
        "renewal": "optional",
        "waiting": "notified (BLPOP)",
        "settings": "threads, hiredis; expire, no auto_renewal",
    },
]


def say(value):
    print(json.dumps(value), flush=True)


def wait_for_go():
    say({"ready": True})
    line = sys.stdin.readline()
    if line.strip() != "go":
        raise SystemExit(f"{line!r} instead of go")


class Flag:
    """Detects two holders of one lock."""

    def __init__(self):
        self.held = False
        self.overlaps = 0

    def enter(self):
        if self.held:
            self.overlaps += 1
        self.held = True

    def leave(self):
        self.held = False


class Turns:
    """Counts turns: acquisitions by another client than the one before."""

    def __init__(self, clients):
        self.flag = Flag()
        self.stop = False
        self.last = None
        self.acquisitions = 0
        self.counts = [0] * clients

    def acquired(self, client):
        self.flag.enter()
        self.acquisitions += 1
        if self.last != client:
            self.last = client
            self.counts[client] += 1
        self.flag.leave()

    def begin(self):
        self.start, self.before = time.perf_counter(), (self.acquisitions, list(self.counts))

    def end(self):
        seconds = time.perf_counter() - self.start
        acquisitions, counts = self.before
        turns = [after - before for after, before in zip(list(self.counts), counts)]
        self.result = {
            "seconds": seconds,
            "acquisitions": self.acquisitions - acquisitions,
            "turns": sum(turns),
            "fewest": min(turns),
            "most": max(turns),
            "overlaps": 0,
        }
        self.stop = True


class RedisPy:
    """Tasks of one event loop."""

    def __init__(self, url):
        self.url = url

    def connect(self, poll):
        pool = redis.asyncio.BlockingConnectionPool.from_url(self.url, max_connections=64, timeout=None)
        self.poll = poll
        return redis.asyncio.Redis.from_pool(pool)

    def lock(self, client, name):
        return client.lock(f"redis-py:{name}", timeout=TTL, sleep=self.poll)

    async def pairs_of(self, lock, start, span):
        flag, pairs = Flag(), 0
        while pairs == 0 or time.perf_counter() - start < span:
            await lock.acquire()
            flag.enter()
            flag.leave()
            await lock.release()
            pairs += 1
        return pairs, flag.overlaps

    async def run(self, client, tasks, span):
        start = time.perf_counter()
        locks = [self.lock(client, f"own:{task}") for task in range(tasks)]
        results = await asyncio.gather(*(self.pairs_of(lock, start, span) for lock in locks))
        pairs, overlaps = (sum(column) for column in zip(*results))
        return {"seconds": time.perf_counter() - start, "pairs": pairs, "overlaps": overlaps}

    def pairs(self, tasks, span):
        async def measure():
            client = self.connect(0.1)
            await self.run(client, tasks, span / 5)
            wait_for_go()
            result = await self.run(client, tasks, span)
            await client.aclose()
            return result

        return asyncio.run(measure())

    async def contend(self, client, number, turns):
        lock = self.lock(client, "contended")
        while not turns.stop:
            await lock.acquire()
            turns.acquired(number)
            await lock.release()

    def turns(self, clients, span, poll):
        async def measure():
            turns = Turns(clients)
            connections = [self.connect(poll) for _ in range(clients)]
            running = [asyncio.create_task(self.contend(one, number, turns)) for number, one in enumerate(connections)]
            await asyncio.sleep(span / 5)
            # Another thread waits, so that the tasks continue meanwhile.
            await asyncio.to_thread(wait_for_go)
            turns.begin()
            await asyncio.sleep(span)
            turns.end()
            await asyncio.gather(*running)
            for connection in connections:
                await connection.aclose()
            return turns.result | {"overlaps": turns.flag.overlaps}

        return asyncio.run(measure())


class PythonRedisLock:
    """Threads: this library has no asyncio."""

    def __init__(self, url):
        self.url = url

    def lock(self, client, name):
        return redis_lock.Lock(client, f"python-redis-lock:{name}", expire=TTL)

    def run(self, client, tasks, span):
        results, barrier = [None] * tasks, threading.Barrier(tasks + 1)

        def repeat(task):
            lock, flag, pairs = self.lock(client, f"own:{task}"), Flag(), 0
            barrier.wait()
            while pairs == 0 or time.perf_counter() - start < span:
                lock.acquire()
                flag.enter()
                flag.leave()
                lock.release()
                pairs += 1
            results[task] = (pairs, flag.overlaps)

        threads = [threading.Thread(target=repeat, args=(task,)) for task in range(tasks)]
        for thread in threads:
            thread.start()
        start = time.perf_counter()
        barrier.wait()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        pairs, overlaps = (sum(column) for column in zip(*results))
        return {"seconds": seconds, "pairs": pairs, "overlaps": overlaps}

    def pairs(self, tasks, span):
        # The default pool fails with more than 100 threads.
        pool = redis.BlockingConnectionPool.from_url(self.url, max_connections=64, timeout=None)
        with redis.Redis.from_pool(pool) as client:
            self.run(client, tasks, span / 5)
            wait_for_go()
            return self.run(client, tasks, span)

    def turns(self, clients, span, _poll):
        turns = Turns(clients)

        def contend(client, number):
            lock = self.lock(client, "contended")
            while not turns.stop:
                lock.acquire()
                turns.acquired(number)
                lock.release()

        connections = [redis.Redis.from_url(self.url) for _ in range(clients)]
        threads = [threading.Thread(target=contend, args=(one, number)) for number, one in enumerate(connections)]
        for thread in threads:
            thread.start()
        time.sleep(span / 5)
        wait_for_go()
        turns.begin()
        time.sleep(span)
        turns.end()
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()
        return turns.result | {"overlaps": turns.flag.overlaps}


def main():
    url = sys.argv[1]
    programs = {"redis-py": RedisPy(url), "python-redis-lock": PythonRedisLock(url)}
    for line in iter(sys.stdin.readline, ""):
        match line.split():
            case ["libraries"]:
                say({"language": "Python " + platform.python_version(), "libraries": LIBRARIES})
            case ["pairs", library, "mutex", tasks, seconds]:
                say(programs[library].pairs(int(tasks), float(seconds)))
            case ["turns", library, "mutex", clients, seconds, poll_ms]:
                say(programs[library].turns(int(clients), float(seconds), int(poll_ms) / 1000))
            case _:
                raise SystemExit(f"unknown command: {line}")


main()
