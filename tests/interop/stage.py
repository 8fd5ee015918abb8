"""For scenes.py and others.py: a private server that shows its locks, and workers."""

import itertools
import json
import os
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future, TimeoutError
from pathlib import Path

import redis

LUA = Path(__file__).resolve().parents[2] / "lua"
TTL = 9000  # milliseconds, of leases that do not expire in a scene
LIMIT = float(os.environ.get("SCENE_LIMIT", "120"))  # seconds for anything: machines are shared
MARKS = "(4503599627370496"  # the lowest score in a queue that is not a waiter's place


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


def wait_for(condition, text):
    """Waits until the condition is true, and returns its value. `text` may be a function."""
    end = time.monotonic() + LIMIT
    while not (value := condition()):
        if time.monotonic() > end:
            raise Failure(f"not within {LIMIT} s: {text() if callable(text) else text}")
        time.sleep(0.002)
    return value


class Stalls(threading.Thread):
    """How long this process was kept waiting: then the machine was busy, or stood still."""

    STEP = 0.02

    def __init__(self):
        super().__init__(daemon=True)
        self.before, self.start_of_step = 0.0, time.monotonic()
        self.start()

    def run(self):
        while True:
            time.sleep(self.STEP)
            self.before, self.start_of_step = self.total(), time.monotonic()

    def total(self):
        step = time.monotonic() - self.start_of_step
        return self.before + max(0.0, step - self.STEP - 0.005)


class Stopwatch:
    """The seconds since its start, without those in which the machine stalled."""

    stalls = Stalls()

    def __init__(self):
        self.start, self.stalled = time.monotonic(), self.stalls.total()

    def stalled_for(self):
        return self.stalls.total() - self.stalled

    def undisturbed(self):
        return time.monotonic() - self.start - self.stalled_for()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return port if port < 55000 else free_port()  # the bus of a cluster node: the port plus 10000


class Server:
    """A private server, and what it shows of its locks."""

    def __init__(self, *options):
        self.folder = tempfile.TemporaryDirectory(prefix="redlatch-scenes-")
        binary = os.environ.get("REDLATCH_SERVER", "redis-server")
        for _ in range(5):  # another process may take the port first
            self.port = free_port()
            command = [binary, "--port", str(self.port), "--save", "", *options]
            self.process = subprocess.Popen(
                command, cwd=self.folder.name, stdout=subprocess.DEVNULL
            )
            self.client = redis.Redis(port=self.port, decode_responses=True)
            while self.process.poll() is None:
                try:
                    self.client.ping()
                    return
                except redis.ConnectionError:
                    time.sleep(0.01)
        raise Failure(f"{binary} does not start")

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def run(self, script, keys, *words):
        return self.client.eval((LUA / f"{script}.lua").read_text(), len(keys), *keys, *words)

    def waiters(self, name):
        return self.client.zcount(f"{{lock:{name}}}:waiters", "-inf", MARKS)

    def wait_queued(self, name, count=1):
        wait_for(lambda: self.waiters(name) == count, f"{count} wait for {name}")

    def sides(self, name):
        """The sides of the holders of a read-write lock."""
        keys = [f"lock:{name}", f"{{lock:{name}}}:waiters", f"{{lock:{name}}}:fence"]
        return self.run("rwlock", keys, "inspect")[0][6::4]

    def expiry(self, name):
        """The attempt that holds a mutex, and the server's time at which its lease expires."""
        read = self.client.pipeline().time().pttl(f"lock:{name}").get(f"lock:{name}")
        (seconds, micros), pttl, attempt = read.execute()
        return attempt, seconds + micros / 1e6 + pttl / 1000

    def channels(self):
        return len(self.client.pubsub_channels("lock:wake:*"))

    def calls(self):
        """The numbers of scripts and of messages so far."""
        stats = self.client.info("commandstats")
        names = ("evalsha", "eval", "publish")
        calls = [stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names]
        return calls[0] + calls[1], calls[2]

    def write(self, key, lease, value):
        """Writes with a fencing token: 1, or 0 if the token is too small."""
        return self.run("fenced", [key, f"{key}:token"], lease["token"], value)

    def remains(self):
        """The locks that are held, and the locks that have waiters."""
        queues = self.client.keys("{lock:*}:waiters")
        names = [queue[len("{lock:") : -len("}:waiters")] for queue in queues]
        return self.client.keys("lock:*") + [name for name in names if self.waiters(name)]

    def wait_clean(self):
        wait_for(lambda: not self.remains(), lambda: f"nothing is left, but {self.remains()}")


class Worker:
    """A process that runs lock commands. Each answer is a future."""

    def __init__(self, language, command, **server):
        self.language, self.answers, self.numbers = language, {}, itertools.count()
        self.writing = threading.Lock()
        self.log = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(shlex.split(command), text=True, **pipes)
        threading.Thread(target=self.read, daemon=True).start()
        self.opened = self.send("open", **{"prefix": "lock:", **server})

    def read(self):
        for line in self.process.stdout:
            answer = json.loads(line)
            self.answers.pop(answer.get("id")).set_result(answer)
        for answer in list(self.answers.values()):
            answer.set_exception(Failure(f"the worker of {self.language} ended"))

    def send(self, verb, **fields):
        answer = Future()
        if verb not in ("open", "close"):  # these two are answered without an id
            fields.update({"async": True, "id": next(self.numbers)})
        self.answers[fields.get("id")] = answer
        with self.writing:
            self.process.stdin.write(json.dumps({"do": verb, **fields}) + "\n")
            self.process.stdin.flush()
        return answer

    def result(self, answer, refusal=None):
        try:
            answer = answer.result(LIMIT)
        except TimeoutError as error:
            raise Failure(f"{self.language} did not answer within {LIMIT} s") from error
        is_expected = answer.get("error") == refusal and answer["ok"] == (refusal is None)
        check(is_expected, f"{self.language} answered {answer}")
        return answer

    def start_acquire(self, kind, name, ttl_ms=TTL, limit_ms=40_000, owner="", handle=None, **more):
        fields = {"kind": kind, "name": name, "ttl_ms": ttl_ms, "limit_ms": limit_ms, **more}
        return self.send("acquire", **fields, **{"owner": owner, "as": handle or name})

    def acquire(self, *arguments, refusal=None, **fields):
        return self.result(self.start_acquire(*arguments, **fields), refusal)

    def do(self, verb, handle):
        return self.result(self.send(verb, **{"as": handle}))

    def release(self, handle, is_held=True):
        held = self.do("release", handle)["held"]
        check(held == is_held, f"{self.language}: release of {handle} answered held={held}")

    def kill(self):
        self.process.kill()
        self.process.wait()


class Stage:
    """A worker of each language, and their server. They speak `resp` 2 or 3, or what is usual."""

    def __init__(self, commands, server, topology="server", resp=0):
        self.commands, self.server = commands, server
        self.topology, self.resp = topology, resp
        self.started = []
        self.workers = self.start_workers()

    def start_workers(self):
        url = f"redis://127.0.0.1:{self.server.port}"
        server = {"url": url, "topology": self.topology, "resp": self.resp}
        workers = [Worker(*item, **server) for item in self.commands.items()]
        self.started += workers
        for worker in workers:
            worker.result(worker.opened)
        return workers

    def ring(self, *casts):
        """For each place: a name, a worker of the first cast, the next language of the second..."""

        def turned(cast, step):
            return cast[step % len(cast) :] + cast[: step % len(cast)]

        rows = zip(*(turned(cast, step) for step, cast in enumerate(casts)))
        return [(str(place), *row) for place, row in enumerate(rows)]

    def close(self):
        """Closes the workers of all languages in good order."""
        for worker in self.workers:
            worker.result(worker.send("close"))

    def kill(self):
        for worker in self.started:
            worker.kill()

    def logs(self):
        """The ends of what the workers have written to stderr."""
        for worker in self.started:
            worker.log.seek(0)
            if log := worker.log.read()[-500:].strip():
                yield worker.language, log

    def hand_over(self, holder, waiter, name):
        """The seconds from a release to the report of the grant, which is due to a message."""
        holder.acquire("mutex", name, handle="holder")
        waiting = waiter.start_acquire("mutex", name, handle="waiter")
        self.server.wait_queued(name)
        scripts, messages = self.server.calls()
        start = time.monotonic()
        released = holder.send("release", **{"as": "holder"})
        waiter.result(waiting)
        seconds = time.monotonic() - start
        check(holder.result(released)["held"], f"{holder.language} lost {name}")
        new_scripts, new_messages = self.server.calls()
        pair = f"from {holder.language} to {waiter.language}"
        check(new_messages - messages == 1, f"{pair}: {new_messages - messages} messages")
        # A release, an acquire, and at most one poll and one renewal that were due just then.
        check(new_scripts - scripts <= 4, f"{pair}: {new_scripts - scripts} requests")
        waiter.release("waiter")
        return seconds
