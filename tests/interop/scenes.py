"""Scenes in which clients in several languages share locks. The oracle is the server.

    scenes.py [SCENE...] LANGUAGE=COMMAND...

COMMAND starts the worker of a language; lua/clients/*/worker* accept the same commands as
worker.rs. A language without a worker is a notice. SCENE is a part of a title; without one, all
scenes run.

The servers are private: $REDLATCH_SERVER, or redis-server. A counter is incremented for
$COUNTED_SECONDS, or 2 s. Exit status 1: a scene failed.
"""

import itertools
import os
import signal
import statistics
import sys
import time
import uuid

import redis

import faults
from stage import LIMIT, TTL, Server, Stage, Stopwatch, check, wait_for

LANGUAGES = ["rust", "python", "node", "go", "java"]
# The crate's guard is consumed by its release: the handle is unknown then.
AFTER_RELEASE = [("is_valid", {"as": "lease"}, {"valid": False})]
RESP2_ONLY = ["node"]  # ioredis 5 has no RESP3
COUNTED = float(os.environ.get("COUNTED_SECONDS", "2"))  # for how long a counter is incremented
SHORT_TTL = 6000  # milliseconds, of leases that expire in a scene
CLAIM = 3.0  # seconds for which a released lock is reserved for a waiter
POLL = CLAIM / 2  # seconds between two polls of a waiter that is notified
CLOCK_STEP = 0.01  # seconds between the server's clock and its PTTL in one reading, at most


def milliseconds(*seconds):
    return ", ".join(f"{value * 1000:.1f} ms" for value in seconds)


def count(stage, kind, client, seconds=COUNTED):
    """All languages increment one number by GET and SET: a second holder would lose increments."""
    command = {"kind": kind, "name": f"counter-{kind}", "key": f"n-{kind}", "ttl_ms": TTL}
    client.delete(command["key"])
    answers = [
        worker.send("count", **command, seconds=seconds, owner=str(uuid.uuid4()))
        for worker in stage.workers
    ]
    counts = [worker.result(answer) for worker, answer in zip(stage.workers, answers)]
    increments = [count["increments"] for count in counts]
    value = int(client.get(command["key"]))
    check(value == sum(increments), f"{sum(increments)} increments, but the value is {value}")
    is_fair = min(increments) > 0 or value < 50  # on a busy machine, some may have no turn
    check(is_fair, f"a language had no turn: {increments}")
    check(all(count["tokens_ascending"] for count in counts), "tokens do not ascend")
    longest = max(count["longest_ms"] for count in counts)
    return f"{value} increments, none lost; longest wait {longest} ms"


def counter_mutex(stage):
    return count(stage, "mutex", stage.server.client)


def counter_reentrant(stage):
    return count(stage, "reentrant", stage.server.client)


def counter_write(stage):
    return count(stage, "write", stage.server.client)


def counter_cluster(stage):
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "15000"]
    masters, cluster = [], None
    try:
        for place in range(3):
            masters.append(Server(*options, "--cluster-announce-ip", "127.0.0.1"))
            command = masters[place].client.execute_command
            command("CLUSTER SET-CONFIG-EPOCH", place + 1)
            slots = (slot for slot in range(16384) if slot * 3 // 16384 == place)
            command("CLUSTER ADDSLOTS", *slots)
        for master, other in itertools.permutations(masters, 2):
            master.client.execute_command("CLUSTER MEET", "127.0.0.1", other.port)
        for master in masters:
            wait_for(lambda: is_complete(master), "the cluster is complete")
        cluster = Stage(stage.commands, masters[0], "cluster")
        client = redis.RedisCluster("127.0.0.1", masters[0].port, decode_responses=True)
        figure = count(cluster, "mutex", client)
        for master in masters:
            master.wait_clean()
        cluster.close()
        return figure
    finally:
        if cluster:
            cluster.kill()
        for master in masters:
            master.stop()


def resp(stage, version):
    """Requests in one version of RESP. CLIENT LIST shows it, from Redis 7.0 on."""
    client, commands = stage.server.client, dict(stage.commands)
    for language in RESP2_ONLY if version == 3 else []:
        commands.pop(language, None)
    last = max(int(connection["id"]) for connection in client.client_list())
    speakers = Stage(commands, stage.server, resp=version)
    try:
        figure = count(speakers, "mutex", client, seconds=1)
        pairs = itertools.permutations(speakers.workers, 2)
        times = [speakers.hand_over(*pair, f"resp{version}") for pair in pairs]
        check(statistics.median(times) < POLL / 2, f"{times} s")
        for connection in client.client_list():
            # The subscription of the crate speaks RESP3 always.
            is_request = int(connection["id"]) > last and connection["sub"] == "0"
            spoken = connection.get("resp", str(version))
            check(not is_request or spoken == str(version), f"speaks another RESP: {connection}")
        speakers.close()
    finally:
        speakers.kill()
    return f"{', '.join(commands)}: {figure}"


def resp2(stage):
    return resp(stage, 2)


def resp3(stage):
    return resp(stage, 3)


def is_complete(master):
    info = master.client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3"


def hand_over(stage, rounds=5):
    times = {}
    for holder, waiter in itertools.permutations(stage.workers, 2):
        pair = f"{holder.language} to {waiter.language}"
        times[pair] = [stage.hand_over(holder, waiter, pair) for _ in range(rounds)]
        check(statistics.median(times[pair]) < POLL / 2, f"{pair}: {times[pair]} s")
    pair = max(times, key=lambda pair: max(times[pair]))
    median = statistics.median(itertools.chain(*times.values()))
    return f"median {milliseconds(median)}, longest {milliseconds(max(times[pair]))} ({pair})"


def requests_while_waiting(stage):
    """A client that polls every 100 ms would send 15 requests in 1.5 s; a notified one, two."""
    requests = []
    for name, holder, waiter in stage.ring(stage.workers, stage.workers):
        holder.acquire("mutex", name, ttl_ms=20_000, handle="holder")
        waiting = waiter.start_acquire("mutex", name, handle="waiter")
        stage.server.wait_queued(name)
        before, _ = stage.server.calls()
        time.sleep(POLL)  # the time in which requests are counted
        requests.append(stage.server.calls()[0] - before)
        check(requests[-1] <= 3, f"{waiter.language} sent {requests[-1]} requests in {POLL} s")
        holder.release("holder")
        waiter.result(waiting)
        waiter.release("waiter")
    return f"at most {max(requests)} requests of a waiter in {POLL} s"


def killed_holder(stage):
    """SIGKILL. The grant by the server's clock: the time, plus the TTL that is left, less all of it.

    A waiter that has sent its poll before the expiry would be granted the lock too early.
    """
    server, rows, delays = stage.server, [], []
    for name, holder, waiter in stage.ring(stage.start_workers(), stage.workers):
        holder.acquire("mutex", name, ttl_ms=SHORT_TTL)
        rows.append((name, holder, waiter, waiter.start_acquire("mutex", name)))
        server.wait_queued(name)
    before = [server.expiry(name) for name, *_ in rows]
    for _, holder, *_ in rows:
        holder.kill()
    after = [server.expiry(name) for name, *_ in rows]  # a renewal may have come in between
    watch = Stopwatch()
    for (name, _, waiter, waiting), old, new in zip(rows, before, after):
        expiry = new[1] if new[0] == old[0] else old[1]
        waiter.result(waiting)
        delays.append(server.expiry(name)[1] - TTL / 1000 - expiry)
        check(delays[-1] > -CLOCK_STEP, f"{waiter.language}: {-delays[-1]} s before the expiry")
        is_late = delays[-1] - watch.stalled_for() >= CLAIM
        check(not is_late, f"{waiter.language}: {delays[-1]} s after the expiry")
        waiter.release(name)
    return f"granted {milliseconds(min(delays), max(delays))} after the expiry (first, last)"


def killed_waiter(stage):
    server, rows, delays = stage.server, [], []
    cast = stage.ring(stage.workers, stage.start_workers(), stage.workers)
    for name, holder, killed, waiter in cast:
        holder.acquire("mutex", name, handle="holder")
        killed.start_acquire("mutex", name)
        server.wait_queued(name)
        waiting = waiter.start_acquire("mutex", name, handle="waiter")
        server.wait_queued(name, 2)
        killed.kill()
        rows.append((name, holder, waiter, waiting))
    for name, holder, waiter, waiting in rows:
        watch = Stopwatch()
        holder.release("holder")
        waiter.result(waiting)
        delays.append(watch.undisturbed())
        check(delays[-1] < CLAIM + 1, f"{waiter.language} waited for {delays[-1]} s")
        waiter.release("waiter")
    return f"the next waiter was granted the lock after {milliseconds(max(delays))} at most"


def stopped_holder(stage):
    """SIGSTOP for longer than the TTL, then SIGCONT: the late release and write are refused."""
    server, rows = stage.server, []
    for name, stopped, waiter in stage.ring(stage.start_workers(), stage.workers):
        lease = stopped.acquire("mutex", name, ttl_ms=SHORT_TTL)
        check(server.write(f"value-{name}", lease, stopped.language) == 1, "no early write")
        rows.append((name, stopped, lease, waiter, waiter.start_acquire("mutex", name)))
        server.wait_queued(name)
        stopped.process.send_signal(signal.SIGSTOP)
    for name, stopped, lease, waiter, waiting in rows:
        later, key = waiter.result(waiting), f"value-{name}"
        check(later["token"] > lease["token"], f"{waiter.language}: the token is not larger")
        check(server.write(key, later, waiter.language) == 1, f"{waiter.language}: no write")
        attempt, _ = server.expiry(name)
        stopped.process.send_signal(signal.SIGCONT)
        stopped.release(name, is_held=False)
        check(server.write(key, lease, stopped.language) == 0, f"{stopped.language} wrote late")
        check(server.client.get(key) == waiter.language, "a late write changed the value")
        check(server.expiry(name)[0] == attempt, f"{stopped.language} released another's lock")
        waiter.release(name)
        stopped.kill()
    return "each late release and each late write was refused"


def one_owner(stage):
    owner, length = str(uuid.uuid4()), len(stage.workers)
    for first in range(length):
        name, cast = f"nested-{first}", stage.workers[first:] + stage.workers[:first]
        tokens = [worker.acquire("reentrant", name, owner=owner)["token"] for worker in cast]
        check(len(set(tokens)) == 1, f"the holds of one owner have the tokens {tokens}")
        for left, worker in zip(range(length, 0, -1), cast):
            holds = stage.server.client.hget(f"lock:{name}", owner)
            check(holds == str(left), f"{holds} holds, not {left}")
            fields = {"limit_ms": 0, "owner": str(uuid.uuid4()), "handle": "another"}
            worker.acquire("reentrant", name, refusal="timed_out", **fields)
            worker.release(name)
        check(not stage.server.client.exists(f"lock:{name}"), f"{name} is not free")
    return f"{length} holds on the server, then free"


def readers_and_writer(stage):
    server = stage.server
    for writer in stage.workers:
        name, readers = f"rw-{writer.language}", [w for w in stage.workers if w != writer]
        for reader in readers:
            reader.acquire("read", name, ttl_ms=30_000)
        waiting = writer.start_acquire("write", name, ttl_ms=30_000)
        server.wait_queued(name)
        readers[0].acquire("read", name, limit_ms=0, handle="new", refusal="timed_out")
        new = readers[0].start_acquire("read", name, handle="new")
        server.wait_queued(name, 2)
        for left, reader in zip(range(len(readers), 0, -1), readers):
            check(server.sides(name) == ["read"] * left, f"it has {server.sides(name)}")
            check(not waiting.done(), f"{writer.language} writes while others read")
            reader.release(name)
        writer.result(waiting)
        check(server.sides(name) == ["write"], f"it has {server.sides(name)}")
        check(not new.done(), f"{readers[0].language} reads while {writer.language} writes")
        writer.release(name)
        readers[0].result(new)
        readers[0].release("new")
    return "each writer waited for all readers, each new reader for the writer"


def downgrade(stage):
    for writer, reader in itertools.permutations(stage.workers, 2):
        name = f"downgrade {writer.language} {reader.language}"
        writer.acquire("write", name)
        waiting = reader.start_acquire("read", name)
        stage.server.wait_queued(name)
        check(writer.do("downgrade", name)["held"], f"{writer.language} could not downgrade")
        reader.result(waiting)
        check(stage.server.sides(name) == ["read"] * 2, f"it has {stage.server.sides(name)}")
        reader.acquire("write", name, limit_ms=0, handle="writer", refusal="timed_out")
        writer.release(name)
        reader.release(name)
    return "the waiting reader was admitted beside the former writer"


def fencing_tokens(stage, rounds=5):
    for kind in ("mutex", "reentrant", "write"):
        name, last = f"tokens-{kind}", 0
        for worker in stage.workers * rounds:
            token = worker.acquire(kind, name, owner=str(uuid.uuid4()))["token"]
            check(token > last, f"{worker.language}, {kind}: token {token} after {last}")
            last = token
            worker.release(name)
    return f"each one larger, in {rounds} rounds of three kinds"


def killed_connections(stage):
    """CLIENT KILL of all connections: leases are still renewed, waiters are notified again."""
    server, subscriptions = stage.server, len(stage.workers)
    ring = stage.ring(stage.workers, stage.workers)
    for name, *cast in ring:
        stage.hand_over(*cast, f"first {name}")  # Rust subscribes when it waits for the first time
    wait_for(lambda: server.channels() == subscriptions, "each client has subscribed")
    for worker in stage.workers:
        worker.acquire("mutex", f"kept-{worker.language}")
    for kind in ("normal", "pubsub"):
        server.client.client_kill_filter(_type=kind, skipme=True)
    start = time.monotonic()
    for worker in stage.workers:
        name = f"kept-{worker.language}"
        answer = wait_for(lambda: renewed(worker, name), f"{worker.language} renews")
        check(answer["held"], f"{worker.language} lost its lease with its connection")
        worker.release(name)
    wait_for(lambda: server.channels() == subscriptions, "each client has subscribed again")
    seconds = time.monotonic() - start
    times = [stage.hand_over(*cast, f"again {name}") for name, *cast in ring for _ in range(3)]
    check(statistics.median(times) < POLL / 2, f"{times} s")
    median = milliseconds(statistics.median(times))
    return f"subscribed again after {milliseconds(seconds)}; then median {median}"


def renewed(worker, name):
    """The answer, or nothing while there is no connection."""
    answer = worker.send("renew", **{"as": name}).result(LIMIT)
    return answer if answer["ok"] else None


def worker_commands(stage):
    """Each worker gives the same answers to the commands of lua/clients/README.md."""
    client, lease = stage.server.client, {"as": "lease"}
    client.set("lock:text", "of another application")
    command = {"kind": "mutex", "name": "commands", "owner": "me", **lease}
    steps = [
        ("acquire", command, {}),
        ("is_valid", lease, {"valid": True}),
        ("renew", lease, {"held": True}),
        ("acquire", {**command, "limit_ms": 0, "as": "other"}, "timed_out"),
        ("acquire", {**command, "limit_ms": 100, "as": "other"}, "timed_out"),
        ("lost", {"limit_ms": 1, **lease}, "timed_out"),
        ("acquire", {**command, "name": "a}b"}, "invalid_name"),
        ("acquire", {**command, "name": "text"}, "wrong_type"),
        ("release", {"as": "none"}, "failed"),
        ("is_valid", {"as": "none"}, "failed"),
        ("nonsense", {}, "unknown"),
        ("release", lease, {"held": True}),
        ("is_valid", lease, {"valid": False}),
        ("acquire", {**command, "kind": "write"}, {}),
        ("downgrade", lease, {"held": True}),
        ("release", lease, {"held": True}),
        ("acquire", {**command, "ttl_ms": 1000}, {}),
        ("DEL", {}, {}),
        ("lost", lease, {}),
        ("is_valid", lease, {"valid": False}),
        ("release", lease, {"held": False}),
    ]
    for worker in stage.workers:
        for verb, fields, wanted in steps:
            if verb == "DEL":
                client.delete("lock:commands")
                continue
            if worker.language == "rust" and (verb, fields, wanted) in AFTER_RELEASE:
                continue
            answer = worker.send(verb, **fields).result(LIMIT)
            if isinstance(wanted, str):
                wanted = {"ok": False, "error": wanted}
            wanted = {"ok": True, **wanted}
            has = {key: answer[key] for key in answer if key not in ("id", "text", "token")}
            text = f"{worker.language}: {verb} {fields} answered {answer}, not {wanted}"
            check(has == wanted, text)
            check(("token" in answer) == (verb == "acquire" and answer["ok"]), text)
    client.delete("lock:text")
    return f"{len(steps)} steps, the same answers"


SCENES = {
    "commands of workers": ("each after another", worker_commands),
    "one counter, mutex": ("all at once", counter_mutex),
    "one counter, re-entrant": ("all at once", counter_reentrant),
    "one counter, write": ("all at once", counter_write),
    "one counter, cluster": ("all at once", counter_cluster),
    "RESP2": ("those that speak it", resp2),
    "RESP3": ("those that speak it", resp3),
    "hand-over": ("all ordered pairs", hand_over),
    "requests while waiting": ("each after another", requests_while_waiting),
    "killed holder": ("each before another", killed_holder),
    "killed waiter": ("each before another", killed_waiter),
    "stopped holder": ("each before another", stopped_holder),
    "one owner everywhere": ("each as the first", one_owner),
    "readers and a writer": ("each as the writer", readers_and_writer),
    "downgrade": ("all ordered pairs", downgrade),
    "fencing tokens": ("in turn", fencing_tokens),
    "killed connections": ("all at once", killed_connections),
    "silent connections": ("all at once", faults.silent_connections),
    "silent server": ("all at once", faults.silent_server),
    "silent subscription": ("all at once", faults.silent_subscription),
    "no subscription": ("each after another", faults.no_subscription),
    "errors that pass": ("all at once", faults.passing_errors),
    "errors of a cluster": ("all at once", faults.passing_cluster_errors),
}


def run(title, scene, stage):
    """Runs a scene, prints its row, and returns whether it passed."""
    start, is_passed = time.monotonic(), False
    try:
        figure = scene(stage)
        stage.server.wait_clean()
        is_passed = True
    except Exception as error:
        figure = f"FAILED: {type(error).__name__}: {error}"
    cast, seconds = SCENES[title][0], time.monotonic() - start
    print(f"{title:23}  {cast:19}  {seconds:5.1f} s  {figure}", flush=True)
    return is_passed


def main(words):
    commands = dict(word.split("=", 1) for word in words if "=" in word)
    parts = [word for word in words if "=" not in word]
    if len(commands) < 2:
        sys.exit("usage: scenes.py [SCENE...] LANGUAGE=COMMAND LANGUAGE=COMMAND...")
    for language in LANGUAGES:
        if language not in commands:
            print(f"left out: {language} has no worker")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the processes are ended below
    server, failed, stage = Server(), [], None
    try:
        for title, (_, scene) in SCENES.items():
            if parts and not any(part in title for part in parts):
                continue
            stage = stage or Stage(commands, server)
            if not run(title, scene, stage):
                failed.append(title)
                stage.kill()  # commands may still be in flight
                for language, log in stage.logs():
                    print(f"  log of {language}: {log}")
                server.client.flushall()
                stage = None
        if stage:
            stage.close()
    finally:
        if stage:
            stage.kill()
        server.stop()
    print(f"failed: {', '.join(failed)}" if failed else "All scenes passed.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
