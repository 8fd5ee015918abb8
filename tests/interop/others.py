"""Other libraries and the crate on the same keys: the cells of docs/other-libraries.md.

    others.py [WORD...] rust=COMMAND LANGUAGE=COMMAND...

COMMAND starts the worker of a language: worker.rs for "ours", others/* for "theirs". A language
without a worker is a notice. WORD is a part of a library's name or of a cell's; without one, all
cells run.

The servers are private: $REDLATCH_SERVER, or redis-server. Exit status 1: a cell failed,
so either the crate or the library has changed, and the page is wrong.
"""

import itertools
import os
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from stage import LIMIT, MARKS, TTL, Failure, Server, Worker, check, wait_for

SHORT_TTL = 6000  # milliseconds, of leases that expire; python-redis-lock has whole seconds
POLL = 1.0  # seconds between two polls of ours, at most: the default of `Options::poll_cap`
SHORT_CAP = 50  # milliseconds: a `poll_cap` for keys that are shared with other libraries
SLACK = 1.5  # seconds: the machine is shared
ROUNDS = 5
BUSY = 3.0  # seconds for which three clients are busy
WORK = 0.01  # seconds for which a busy client holds the lock
AT_ONCE = 6  # libraries whose cells run at the same time: they sleep most of it
RETRY = 0.05  # seconds after each try and each turn of ours that does not queue


@dataclass
class Library:
    name: str
    language: str
    kind: str = "mutex"  # ours, on the same key
    prefix: str = "lock:"
    pause: float = 0.0  # seconds between two polls, at most; 0: it sleeps until it is notified
    late: tuple = ()  # what a late release answers: whether it held, and the error
    remains: set = field(default_factory=set)  # keys that it leaves, all with a TTL
    notify: object = None  # wakes its waiter by hand


def notify_list(client, name):
    """What a release of python-redis-lock does."""
    client.pipeline().delete(f"lock-signal:{name}").lpush(f"lock-signal:{name}", 1).pexpire(
        f"lock-signal:{name}", 1000
    ).execute()


def notify_channel(client, name):
    client.publish("redisson_lock__channel:{lock:%s}" % name, 0)


def notify_first(client, name):
    """The fair lock notifies the first thread of its list, on a channel of its own."""
    first = client.lindex("redisson_lock_queue:{lock:%s}" % name, 0)
    client.publish("redisson_lock__channel:{lock:%s}:%s" % (name, first), 0)


def notify_all(client, name):
    client.publish("redisson_rwlock:{lock:%s}" % name, 1)


REFUSED = (False, "IllegalMonitorStateException")
LIBRARIES = [
    Library("redis-py", "python", pause=0.1, late=(False, "LockNotOwnedError")),
    Library(
        "python-redis-lock",
        "python",
        late=(False, "NotAcquired"),
        remains={"lock-signal"},
        notify=notify_list,
    ),
    Library("redsync", "go", pause=0.25, late=(False, "lock already taken")),
    Library("bsm/redislock", "go", pause=0.1, late=(False, "redislock: lock not held")),
    Library("redis-semaphore", "node", prefix="mutex:", pause=0.01, late=(True, None)),
    Library("node-redlock 4", "node", pause=0.3, late=(False, "LockError")),
    Library("node-redlock 5", "node", pause=0.3, late=(False, "ExecutionError")),
    Library("Redisson RLock", "java", "reentrant", late=REFUSED, notify=notify_channel),
    Library("Redisson fair lock", "java", "reentrant", late=REFUSED, notify=notify_first),
    Library("Redisson read lock", "java", "read", late=REFUSED, notify=notify_all),
    Library("Redisson write lock", "java", "write", late=REFUSED, notify=notify_all),
]


def milliseconds(seconds):
    median = statistics.median(seconds)
    return f"median {median * 1000:.0f} ms, longest {max(seconds) * 1000:.0f} ms"


class Pair:
    """One library and ours, on the names of one cell."""

    def __init__(self, library, server, ours, theirs, name):
        self.library, self.server, self.client = library, server, server.client
        self.ours, self.them, self.name = ours, theirs, name
        self.key = library.prefix + name

    # Both sides have the same calls, so that a cell runs in both directions.

    def start(self, side, handle=None, worker=0, **fields):
        kind = self.library.kind if side == "ours" else self.library.name
        worker = self.ours[worker] if side == "ours" else self.them
        return worker.start_acquire(kind, self.name, handle=handle or side, **fields)

    def worker(self, side):
        return self.ours[0] if side == "ours" else self.them

    def acquire(self, side, refusal=None, **fields):
        return self.worker(side).result(self.start(side, **fields), refusal)

    def release(self, side):
        self.worker(side).release(side)

    def holder(self):
        """What the server has under the key."""
        if self.client.type(self.key) == "hash":
            return self.client.hgetall(self.key)
        return self.client.get(self.key)

    def wait_queued(self):
        queue = "{%s}:waiters" % self.key
        wait_for(lambda: self.client.zcount(queue, "-inf", MARKS) == 1, "our waiter is queued")

    def calls(self, name):
        return self.client.info("commandstats").get(f"cmdstat_{name}", {}).get("calls", 0)

    def wait_asleep(self, calls):
        """Waits until their waiter has found the lock busy, and sleeps if it does not poll.

        `calls` are those of PTTL before it came. Redisson asks once more after its subscription.
        """
        if self.library.language == "java":
            wait_for(lambda: self.calls("pttl") >= calls + 2, "their waiter tries twice")
        elif not self.library.pause:
            wait_for(lambda: self.client.info("clients")["blocked_clients"], "their waiter blocks")

    def wait_theirs(self, ttl_ms, phase=0.0, notify=None):
        """The seconds from our release until their waiter has the lock."""
        self.acquire("ours", ttl_ms=ttl_ms)
        before = self.calls("pttl")
        waiting = self.start("theirs", ttl_ms=ttl_ms)
        self.wait_asleep(before)
        time.sleep(phase)
        start = time.monotonic()
        self.release("ours")
        if notify:
            notify(self.client, self.name)
        self.them.result(waiting)
        seconds = time.monotonic() - start
        self.release("theirs")
        return seconds

    def wait_ours(self, phase, **fields):
        """The seconds from their release until our waiter has the lock."""
        self.acquire("theirs")
        waiting = self.start("ours", **fields)
        self.wait_queued()
        time.sleep(phase)
        start = time.monotonic()
        self.release("theirs")
        self.ours[0].result(waiting)
        seconds = time.monotonic() - start
        self.release("ours")
        return seconds

    def turns(self, side, place, end, worker=0, is_queued=True, **fields):
        """Acquires, works and releases until the end: the turns, and the longest wait in seconds.

        A second holder would lose increments.
        """
        client, handle, turns, longest = self.client, f"{side} {place}", 0, 0.0
        target = self.ours[worker] if side == "ours" else self.them
        since = time.monotonic()
        while (left := end - time.monotonic()) > 0:
            limit = max(1, int(left * 1000)) if is_queued else 0
            waiting = self.start(side, handle, worker, limit_ms=limit, **fields)
            answer = waiting.result(LIMIT)
            longest = max(longest, time.monotonic() - since)
            if answer.get("error") == "timed_out":
                time.sleep(0 if is_queued else RETRY)
                continue  # `since` is still the first try
            check(answer["ok"], f"{side} answered {answer}")
            number = int(client.get(f"n-{self.name}") or 0)
            time.sleep(WORK)
            client.set(f"n-{self.name}", number + 1)
            turns += 1
            target.release(handle)
            time.sleep(0 if is_queued else RETRY)
            since = time.monotonic()
        return turns, longest

    def compete(self, busy, waiting, is_queued=True, **fields):
        """The turns of three busy clients of one side; turns and longest wait of one of the other."""
        end = time.monotonic() + BUSY
        more = {"ours": fields, "theirs": {"ttl_ms": 3000}}
        with ThreadPoolExecutor(4) as pool:
            runs = [
                pool.submit(self.turns, busy, place, end, place, is_queued, **more[busy])
                for place in range(3)
            ]
            runs.append(pool.submit(self.turns, waiting, 3, end, 3, True, **more[waiting]))
            *turns, (one, longest) = [run.result() for run in runs]
        turns = sum(count for count, _ in turns)
        value = int(self.client.get(f"n-{self.name}"))
        check(value == turns + one, f"{turns + one} increments, but it is {value}")
        self.client.delete(f"n-{self.name}")
        return turns, one, longest


def exclusion(pair):
    """While one side holds, a try of the other one is refused and changes nothing."""
    for holder, other in itertools.permutations(["ours", "theirs"]):
        pair.acquire(holder)
        before = pair.holder()
        pair.acquire(other, refusal="timed_out", limit_ms=0)
        check(pair.holder() == before, f"{other} changed {before} to {pair.holder()}")
        check(pair.client.pttl(pair.key) > TTL / 2, "the TTL is another one")
        pair.release(holder)
        check(not pair.client.exists(pair.key), f"{pair.key} is not free")
    return "each excludes the other"


def our_wait(pair):
    """Our waiter polls: it is not notified."""
    times = [pair.wait_ours(POLL * place / ROUNDS) for place in range(ROUNDS)]
    check(sorted(times)[-2] < POLL + SLACK, f"{times} s")  # one may have met a stall
    check(statistics.median(times) > POLL / 20, f"it is notified: {times} s")
    return milliseconds(times)


def our_wait_short_cap(pair):
    """The remedy: `Options::poll_cap`."""
    times = [pair.wait_ours(0.01 * place, poll_cap_ms=SHORT_CAP) for place in range(ROUNDS)]
    check(statistics.median(times) < POLL / 4, f"{times} s")
    return milliseconds(times)


def their_wait(pair):
    """A client that polls is fast; one that sleeps does so for a TTL."""
    pause = pair.library.pause
    if pause:
        times = [pair.wait_theirs(TTL, pause * place / ROUNDS) for place in range(ROUNDS)]
        check(statistics.median(times) < 2 * pause + 0.25, f"{times} s")
        return milliseconds(times)
    ttl = 3.0
    times = [pair.wait_theirs(int(ttl * 1000)) for _ in range(2)]
    check(ttl / 2 < min(times), f"it does not sleep for a TTL any more: {times} s")
    check(min(times) < ttl + SLACK, f"it sleeps for longer than a TTL: {times} s")
    return f"{milliseconds(times)}, with a TTL of {ttl:.0f} s"


def their_wait_notified(pair):
    """The remedy for a client that sleeps: the application sends what the library would send."""
    times = [pair.wait_theirs(TTL, notify=pair.library.notify) for _ in range(ROUNDS)]
    check(statistics.median(times) < 0.5, f"{times} s")
    return milliseconds(times)


def order(pair):
    """Which side overtakes the other one's waiter."""
    pair.acquire("theirs")
    waiting = pair.start("ours", poll_cap_ms=10_000)  # in fact half its claim
    pair.wait_queued()
    pair.release("theirs")
    pair.acquire("theirs", limit_ms=0)  # before the next poll of ours
    check(not waiting.done(), "ours holds as well")
    pair.release("theirs")
    pair.ours[0].result(waiting)
    # Theirs waits first, and the second one of ours is granted the lock by the release.
    before = pair.calls("pttl")
    theirs = pair.start("theirs")
    pair.wait_asleep(before)
    second = pair.start("ours", handle="second", worker=1)
    pair.wait_queued()
    pair.release("ours")
    pair.ours[1].result(second)
    check(not theirs.done(), "theirs holds as well")
    pair.ours[1].release("second")
    if pair.library.notify:
        pair.library.notify(pair.client, pair.name)
    pair.them.result(theirs)
    pair.release("theirs")
    return "theirs overtakes our waiter; ours overtakes theirs if ours releases"


def share(busy, one, longest):
    return f"{one} turns beside {busy}, longest wait {longest:.1f} s of {BUSY:.0f}"


def their_turns(pair):
    """Our release grants the lock to our next waiter: while there is one, it is never free."""
    turns, end = 0, time.monotonic() + BUSY
    pair.acquire("ours")
    before = pair.calls("pttl")
    theirs = pair.start("theirs", ttl_ms=3000)
    pair.wait_asleep(before)
    holder, waiter = ("ours", 0), ("second", 1)
    while time.monotonic() < end:
        handle, place = waiter
        waiting = pair.start("ours", handle=handle, worker=place)
        pair.wait_queued()
        pair.ours[holder[1]].release(holder[0])
        pair.ours[place].result(waiting)
        check(not theirs.done(), f"theirs had a turn beside {turns} of ours")
        time.sleep(WORK)
        turns, holder, waiter = turns + 1, waiter, holder
    start = time.monotonic()
    pair.ours[holder[1]].release(holder[0])  # no client of ours is queued
    if pair.library.notify:
        pair.library.notify(pair.client, pair.name)
    pair.them.result(theirs)
    seconds = time.monotonic() - start
    pair.release("theirs")
    check(seconds < 2 * pair.library.pause + SLACK, f"and then it waited for {seconds} s")
    return f"0 turns beside {turns} in {BUSY:.0f} s; then {seconds * 1000:.0f} ms"


def their_turns_without_queue(pair):
    """The remedy: ours try, and do not queue."""
    busy, one, longest = pair.compete("ours", "theirs", is_queued=False)
    if pair.library.pause:
        check(longest < BUSY, f"theirs waited for {longest} s, and had {one} turns beside {busy}")
    else:
        check(longest > BUSY / 3, f"it sleeps for {longest} s at most")
    return share(busy, one, longest)


def our_turns(pair):
    """Theirs take a lock that is free, also while ours is queued: ours is lucky, or waits."""
    busy, one, longest = pair.compete("theirs", "ours")
    check(pair.library.notify or longest > POLL / 5, f"ours waited for {longest} s at most")
    return share(busy, one, longest)


def our_turns_short_cap(pair):
    """The remedy: `Options::poll_cap`."""
    busy, one, longest = pair.compete("theirs", "ours", poll_cap_ms=10)
    check(longest < BUSY, f"ours waited for {longest} s, and had {one} turns beside {busy}")
    return share(busy, one, longest)


def their_late_release(pair):
    """After its TTL, while ours holds."""
    library = pair.library
    pair.acquire("theirs", ttl_ms=SHORT_TTL)
    if library.kind in ("read", "write"):  # ours does not wait for these
        wait_for(lambda: not pair.client.exists(pair.key), "their lease has expired")
    pair.acquire("ours")
    before = pair.holder()
    answer = pair.them.do("release", "theirs")
    check(pair.holder() == before, f"{before} became {pair.holder()}")
    check(pair.client.pttl(pair.key) > TTL / 2, "the TTL is another one")
    is_held, error = library.late
    is_same = answer["held"] == is_held and (error or "") in answer.get("says", "")
    check(is_same, f"{library.name} answered {answer}")
    pair.release("ours")
    return "ours stays; " + ("it reports nothing" if is_held else f"it reports {answer['says']!r}")


def our_late_release(pair, start_ours):
    """SIGSTOP for longer than the TTL, then SIGCONT."""
    stopped = start_ours()
    stopped.acquire(pair.library.kind, pair.name, ttl_ms=SHORT_TTL)
    waiting = pair.start("theirs", ttl_ms=6000)
    stopped.process.send_signal(signal.SIGSTOP)
    pair.them.result(waiting)
    before = pair.holder()
    stopped.process.send_signal(signal.SIGCONT)
    stopped.release(pair.name, is_held=False)
    check(pair.holder() == before, f"{before} became {pair.holder()}")
    pair.release("theirs")
    stopped.kill()
    return "theirs stays; ours reports that the lease was lost"


def no_ttl(pair):
    """Their default. Ours neither waits nor changes the key."""
    pair.acquire("theirs", ttl_ms=0)
    before = pair.holder()
    pair.acquire("ours", refusal="wrong_type")
    check(pair.holder() == before and pair.client.pttl(pair.key) == -1, "ours changed the key")
    pair.release("theirs")
    pair.acquire("ours")
    pair.release("ours")
    return "WrongType at once; the key is unchanged"


def reset_all(pair):
    """It deletes every key `lock:*`, of whatever library and kind."""
    pair.acquire("ours")
    pair.them.result(pair.them.send("reset_all"))
    check(not pair.client.exists(pair.key), "it spares ours")
    pair.ours[0].release("ours", is_held=False)
    return "it deletes locks of ours; ours reports that the lease was lost"


def nesting(pair):
    """A hold of ours inside a hold of Redisson, by the field of its hash as the owner."""
    thread = 7
    pair.acquire("theirs", thread=thread)
    (owner,) = pair.holder()
    pair.acquire("ours", owner=owner)
    check(pair.holder()[owner] == "2", f"the holds are {pair.holder()}")
    pair.acquire("theirs", handle="inner", thread=thread, ttl_ms=3000)
    left = pair.client.pttl(pair.key)
    check(left <= 3000, f"Redisson's nested lock leaves the TTL at {left} ms")
    pair.them.release("inner")
    pair.release("ours")
    check(pair.holder() == {owner: "1"}, f"ours left {pair.holder()}")
    pair.release("theirs")
    check(not pair.client.exists(pair.key), f"{pair.key} is not free")
    return "both have holds of one owner; Redisson's nested lock sets the TTL to its own"


def refused(pair):
    """Redisson's read-write lock: it waits for ours, but ours refuses its hash."""
    library = pair.library
    for kind in ("read", "write"):
        pair.ours[0].acquire(kind, pair.name, handle="ours")
        before = pair.holder()
        pair.acquire("theirs", refusal="timed_out", limit_ms=0)
        check(pair.holder() == before, f"Redisson changed {before} to {pair.holder()}")
        pair.release("ours")
        pair.acquire("theirs")
        before = pair.holder()
        pair.ours[0].acquire(kind, pair.name, handle="ours", refusal="wrong_type")
        check(pair.holder() == before, f"ours changed {before} to {pair.holder()}")
        pair.release("theirs")
    return "Redisson waits for ours; ours: WrongType at once"


SHARED = {
    "exclusion": exclusion,
    "our waiter after their release": our_wait,
    f"the same, poll_cap {SHORT_CAP} ms": our_wait_short_cap,
    "their waiter after our release": their_wait,
    "order": order,
    "their waiter behind our queue": their_turns,
    "the same, three of ours try": their_turns_without_queue,
    "our waiter behind three of theirs": our_turns,
    "the same, poll_cap 10 ms": our_turns_short_cap,
    "their late release": their_late_release,
    "our late release": our_late_release,
}


def cells(library):
    if library.kind in ("read", "write"):
        return {
            "exclusion": refused,
            "their waiter after our release": their_wait,
            "the same, notified by hand": their_wait_notified,
            "their late release": their_late_release,
        }
    found = dict(SHARED)
    if library.notify:
        found["the same, notified by hand"] = their_wait_notified
    if library.language == "python":
        found["a lock without a TTL"] = no_ttl
    if library.name == "python-redis-lock":
        found["reset_all"] = reset_all
    if library.kind == "reentrant":
        found["nesting"] = nesting
    return found


def remains(library, client):
    """What the cells left. Every key has a TTL."""
    kinds = set()
    for key in client.keys("*"):
        ttl = client.pttl(key)
        check(ttl != -1, f"{key} has no TTL")
        is_companion = key.startswith("{") and key.endswith((":fence", ":waiters"))
        kind = key.rsplit(":", 1)[1] if is_companion else key.split(":", 1)[0]
        check(ttl <= (3_600_000 if kind == "fence" else 61_000), f"{key} stays for {ttl} ms")
        kinds.add(kind)
    extra = kinds - {"fence", "waiters"} - library.remains
    check(not extra, f"it leaves {extra}")
    return ", ".join(sorted(kinds))


class Cast:
    """A server, and workers for one library: four clients of ours, and one of theirs."""

    def __init__(self, library, commands, words):
        self.library, self.commands, self.words = library, commands, words
        self.started, self.lines, self.failed = [], [], []

    def start(self, language, prefix):
        url = f"redis://127.0.0.1:{self.server.port}"
        worker = Worker(language, self.commands[language], url=url, topology="server", prefix=prefix)
        self.started.append(worker)
        worker.versions = worker.result(worker.opened).get("versions", {})
        return worker

    def run_cell(self, title, cell):
        start, name = time.monotonic(), self.library.name
        try:
            figure = cell()
        except Exception as error:
            figure = f"FAILED: {type(error).__name__}: {error}"
            self.failed.append(f"{name}: {title}")
        seconds = time.monotonic() - start
        self.lines.append(f"{name:20}  {title:33}  {seconds:5.1f} s  {figure}")

    def run_cells(self, found):
        library = self.library
        ours = [self.start("rust", library.prefix) for _ in range(4)]
        theirs = self.start(library.language, library.prefix)
        self.lines.append(f"\n{library.name}: {theirs.versions[library.name]}")
        for place, (title, cell) in enumerate(found.items()):
            pair = Pair(library, self.server, ours, theirs, f"cell{place}")
            more = [lambda: self.start("rust", library.prefix)] if cell is our_late_release else []
            self.run_cell(title, partial(cell, pair, *more))
        if not self.failed:
            self.run_cell("what remains", partial(remains, library, self.server.client))
        for worker in [*ours, theirs]:
            if not self.failed:
                worker.result(worker.send("close"))

    def run(self):
        """Runs the cells of the library, prints a row for each, and returns those that failed."""
        found = cells(self.library)
        found = {title: found[title] for title in found if matches(self.words, self.library, title)}
        if not found:
            return []
        self.server = Server()
        try:
            self.run_cells(found)
        finally:
            for worker in self.started:
                worker.kill()
            self.server.stop()
        print("\n".join(self.lines), flush=True)
        return self.failed


def matches(words, library, title):
    return not words or any(word in f"{library.name} {title}" for word in words)


def main(words):
    commands = dict(word.split("=", 1) for word in words if "=" in word)
    words = [word for word in words if "=" not in word]
    if "rust" not in commands:
        sys.exit("usage: others.py [WORD...] rust=COMMAND LANGUAGE=COMMAND...")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the processes are ended below
    server = Server()
    version = server.client.info("server")["redis_version"]
    server.stop()
    print(f"server {version}, {os.cpu_count()} cores, {AT_ONCE} libraries at a time")
    casts = [Cast(library, commands, words) for library in LIBRARIES if library.language in commands]
    for library in LIBRARIES:
        if library.language not in commands:
            print(f"left out: {library.name}, {library.language} has no worker")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = [title for titles in pool.map(Cast.run, casts) for title in titles]
    print("\nfailed: " + ", ".join(failed) if failed else "\nAll cells passed.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
