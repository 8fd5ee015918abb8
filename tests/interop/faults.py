"""Scenes in which a network or a server fails: each client reaches the server through a proxy."""

import contextlib
import socket
import threading
import time

import redis

from stage import LUA, Server, Stage, Stopwatch, Worker, check, free_port, wait_for

HOLDER = 600_000  # milliseconds, of a lock that a scene itself holds
CLAIM = 3.0  # seconds for which a released lock is reserved for a waiter
POLL = CLAIM / 2  # seconds between two polls of a waiter that is notified
PONG = 7.0  # seconds after which each client has tested its subscription
MANY = 4  # refusals for each client, so that each has sent its request again
REPORTS = ["rust"]  # reports such an error at once if the attempt is not queued yet
PASSING = ["OOM", "NOREPLICAS", "MISCONF", "READONLY", "MASTERDOWN", "BUSY"]


class Connection:
    """A client's connection. If it is silent, nothing passes, and nothing is closed."""

    def __init__(self, proxy, near):
        self.proxy, self.near, self.is_silent, self.is_subscription = proxy, near, False, False
        self.far = socket.create_connection(("127.0.0.1", proxy.server_port))
        for source, target in ((near, self.far), (self.far, near)):
            threading.Thread(target=self.pass_on, args=(source, target), daemon=True).start()

    def pass_on(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if b"$9\r\nsubscribe\r\n" in data.lower():  # the command, not a comment of a script
                    self.is_subscription = True
                if source is self.far:
                    time.sleep(self.proxy.delay)  # the network is slow
                is_refused = self.proxy.refuses_subscriptions and self.is_subscription
                if not self.is_silent and not self.proxy.is_silent and not is_refused:
                    target.sendall(data)
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A proxy between one client and a server."""

    def __init__(self, server_port):
        self.server_port, self.connections, self.delay = server_port, [], 0.0
        self.is_silent = self.refuses_subscriptions = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                self.connections.append(Connection(self, near))

    def silence(self, is_subscription=None):
        """Silences the connections that there are: all, subscriptions, or the others."""
        for each in list(self.connections):
            if is_subscription in (None, each.is_subscription):
                each.is_silent = True

    def subscriptions(self):
        return sum(each.is_subscription for each in list(self.connections))


@contextlib.contextmanager
def proxied(stage, resp=0, **state):
    """Workers of all languages, each with a proxy of its own. The proxies get the state."""
    pairs = []
    try:
        for language, command in stage.commands.items():
            proxy = Proxy(stage.server.port)
            vars(proxy).update(state)
            url = f"redis://127.0.0.1:{proxy.port}"
            worker = Worker(language, command, url=url, resp=resp)
            pairs.append((worker, proxy))
        for worker, _ in pairs:
            worker.result(worker.opened)
        yield pairs
    finally:
        for worker, proxy in pairs:
            worker.kill()
            proxy.listener.close()


def keys(name):
    return [f"lock:{name}", f"{{lock:{name}}}:waiters", f"{{lock:{name}}}:fence"]


def attempt(name):
    return f"scene-{name}".replace(" ", "-")  # a word


def hold(server, name):
    answer = server.run("mutex", keys(name), "acquire", attempt(name), "", "", HOLDER)
    check(answer[0] >= 0, f"the scene cannot hold {name}: {answer}")


def release(server, name):
    server.run("mutex", keys(name), "release", attempt(name), "")


def wait_renewed(server, name, times):
    """Waits until a lock was renewed; the same attempt holds it."""
    for _ in range(times):
        attempt, old = server.expiry(name)
        wait_for(lambda: server.expiry(name)[1] > old + 0.2, f"{name} is renewed")
        check(server.expiry(name)[0] == attempt, f"{name} was lost")


def silent_connections(stage):
    """All connections fall silent, as those that a middlebox has forgotten; new ones work."""
    server, slowest = stage.server, 0.0
    with proxied(stage) as pairs:
        for worker, _ in pairs:
            worker.acquire("mutex", f"kept {worker.language}", ttl_ms=3000, handle="kept")
            hold(server, f"waited {worker.language}")
        waiting = [
            worker.start_acquire("mutex", f"waited {worker.language}", ttl_ms=3000, handle="waited")
            for worker, _ in pairs
        ]
        for worker, proxy in pairs:
            server.wait_queued(f"waited {worker.language}")
            proxy.silence()
        for worker, _ in pairs:
            wait_renewed(server, f"kept {worker.language}", 2)
            check(worker.do("is_valid", "kept")["valid"], f"{worker.language} lost its lease")
        start = time.monotonic()
        for worker, _ in pairs:
            release(server, f"waited {worker.language}")
        for answer in waiting:
            answer.result(60)
            slowest = max(slowest, time.monotonic() - start)
        for (worker, proxy), answer in zip(pairs, waiting):
            worker.result(answer)
            worker.release("waited")
            proxy.silence()
            worker.release("kept")
            proxy.silence()
            worker.acquire("mutex", f"new {worker.language}", limit_ms=20_000, handle="new")
            worker.release("new")
    check(slowest < 15, f"a waiter was granted the lock after {slowest:.1f} s")
    return f"leases renewed, released and acquired; waiters granted after {slowest:.1f} s"


def silent_server(stage, ttl=4000):
    """The grant takes 0.8 s, then all falls silent: the loss is reported at the deadline."""
    server, waits, reports = stage.server, [], {}
    with proxied(stage) as pairs:
        for worker, proxy in pairs:
            worker.acquire("mutex", "first")
            worker.release("first")  # the server knows the script, which is sent once now
            proxy.delay = 0.2 * ttl / 1000
            name = f"silent {worker.language}"
            worker.acquire("mutex", name, ttl_ms=ttl)
            proxy.is_silent = True
            expiry, now = server.expiry(name)[1], time.time()
            check(expiry > now, "the machine is too slow for this scene")
            watch = Stopwatch()
            answer = worker.send("lost", limit_ms=20_000, **{"as": name})

            def report(_, key=name, watch=watch):
                reports[key] = time.time(), watch.stalled_for()

            answer.add_done_callback(report)
            waits.append((worker, name, expiry, answer))
        for worker, name, expiry, answer in waits:
            worker.result(answer)
            at, stalled = wait_for(lambda: reports.get(name), f"{name} is reported")
            late = at - expiry
            text = f"{worker.language} reported the loss {late:.3f} s after the expiry"
            check(late - stalled < 0.75, text)
            check(late > -2, f"{worker.language} reported a loss {-late:.3f} s too early")
            check(not worker.do("is_valid", name)["valid"], f"{worker.language}: it is valid")
    return "each loss was reported in time"


def silent_subscription(stage):
    """A subscription falls silent: each client notices it, and subscribes again."""
    seconds = max(silent_subscription_of(stage, resp) for resp in (0, 2))
    return f"subscribed again after {seconds:.1f} s at most"


def silent_subscription_of(stage, resp):
    server, times = stage.server, []
    with proxied(stage, resp) as pairs:
        waiting, before = {}, {}
        for worker, proxy in pairs:
            hold(server, worker.language)
            waiting[worker] = worker.start_acquire("mutex", worker.language, ttl_ms=9000)
            server.wait_queued(worker.language)
            before[worker] = wait_for(proxy.subscriptions, f"{worker.language} subscribes")
            proxy.silence(is_subscription=True)
        start = time.monotonic()
        for worker, proxy in pairs:
            what = f"{worker.language} subscribes again"
            wait_for(lambda: proxy.subscriptions() > before[worker], what)
            times.append(time.monotonic() - start)
            check(times[-1] < 10, f"{what} after {times[-1]:.1f} s only")
        for worker, _ in pairs:
            release(server, worker.language)
            worker.result(waiting[worker])
            worker.release(worker.language)
        time.sleep(PONG)  # in which a subscription that is alive must not be replaced
        for worker, proxy in pairs:
            check(proxy.subscriptions() <= before[worker] + 1, f"{worker.language}: too many")
    return max(times)


def no_subscription(stage):
    """No subscription is ever confirmed: clients start, and poll every 50 to 100 ms."""
    server, rates, times = stage.server, [], []
    others = server.channels()  # of the workers of the stage
    with proxied(stage, refuses_subscriptions=True) as pairs:
        for worker, proxy in pairs:
            name = worker.language
            hold(server, name)
            waiting = worker.start_acquire("mutex", name)
            server.wait_queued(name)
            calls = server.calls()[0]
            start = time.monotonic()
            time.sleep(1.0)  # the time in which requests are counted
            seconds = time.monotonic() - start
            rates.append(round((server.calls()[0] - calls) / seconds))
            check(3 <= rates[-1] <= 25, f"{name} sent {rates[-1]} requests in a second")
            watch = Stopwatch()
            release(server, name)
            worker.result(waiting)
            times.append(watch.undisturbed())
            check(times[-1] < POLL / 2, f"{name} was granted the lock after {times[-1]:.3f} s")
            worker.release(name)
            proxy.refuses_subscriptions = False
            hold(server, name)
            waiting = worker.start_acquire("mutex", name)
            server.wait_queued(name)
            wait_for(lambda: server.channels() > others, f"{name} subscribes")
            release(server, name)
            worker.result(waiting)
            worker.release(name)
            worker.kill()
            wait_for(lambda: server.channels() == others, f"the subscription of {name} has ended")
    return f"{min(rates)} to {max(rates)} polls in a second; granted after {max(times):.3f} s"


@contextlib.contextmanager
def refusing(server, code):
    """A server that refuses requests with the code."""
    admin = redis.Redis(port=server.port, socket_timeout=60)

    def configure(**options):
        for name, value in options.items():
            admin.config_set(name.replace("_", "-"), value)

    if code == "OOM":
        configure(maxmemory=1)
        yield
        configure(maxmemory=0)
    elif code == "NOREPLICAS":
        configure(min_replicas_to_write=1)
        yield
        configure(min_replicas_to_write=0)
    elif code == "MISCONF":
        server.folder.cleanup()  # it cannot save there
        configure(save="3600 1")
        admin.bgsave()
        wait_for(lambda: admin.info()["rdb_last_bgsave_status"] == "err", "saving fails")
        yield
        configure(save="")
    elif code in ("READONLY", "MASTERDOWN"):
        configure(replica_serve_stale_data="no" if code == "MASTERDOWN" else "yes")
        admin.replicaof("127.0.0.1", free_port())
        yield
        admin.replicaof("NO", "ONE")
    elif code == "BUSY":
        configure(lua_time_limit=10)
        busy = redis.Redis(port=server.port, socket_timeout=60)
        script = threading.Thread(target=run_forever, args=(busy,))
        script.start()
        wait_for(lambda: is_busy(server), "a script runs")
        yield
        admin.script_kill()
        script.join()


def is_busy(server):
    try:
        return not server.client.ping()
    except redis.ResponseError:
        return True


def run_forever(client):
    with contextlib.suppress(redis.ResponseError):
        client.eval("while true do end", 0)


def refusals(server, code):
    try:
        return server.client.info("errorstats").get(f"errorstat_{code}", {}).get("count", 0)
    except redis.ResponseError:  # BUSY
        return 0


def outlasting(commands):
    return {name: command for name, command in commands.items() if name not in REPORTS}


def passing_error(commands, code):
    """Waiters, queued or not, outlast a server that refuses their requests."""
    server = Server()
    stage = Stage(outlasting(commands), server)
    try:
        answers = []
        for worker in stage.workers:
            queued, new = f"queued {worker.language}", f"new {worker.language}"
            hold(server, queued)
            answers.append((worker, queued, worker.start_acquire("mutex", queued)))
            server.wait_queued(queued)
        with refusing(server, code):
            for worker in stage.workers:
                new = f"new {worker.language}"
                answers.append((worker, new, worker.start_acquire("mutex", new)))
            if code == "BUSY":
                time.sleep(2)  # the time in which requests are refused
            else:
                many = MANY * len(stage.workers)
                wait_for(lambda: refusals(server, code) >= many, f"{many} refusals with {code}")
            for worker, name, answer in answers:
                text = answer.done() and answer.result()
                check(not text, f"{code}: {worker.language} gave up {name}: {text}")
        for worker in stage.workers:
            release(server, f"queued {worker.language}")
        for worker, name, answer in answers:
            worker.result(answer)
            worker.release(name)
        stage.close()
    finally:
        stage.kill()
        server.stop()


def passing_errors(stage):
    for code in PASSING:
        passing_error(stage.commands, code)
    return f"outlasted: {', '.join(PASSING)}"


def passing_cluster_errors(stage):
    """CLUSTERDOWN while a slot has no node, TRYAGAIN while the slot of a free lock moves."""
    nodes = [Server("--cluster-enabled", "yes") for _ in range(2)]
    cluster = None
    try:
        admin, other = (node.client.execute_command for node in nodes)
        slot = admin("CLUSTER KEYSLOT", "{moves}")
        admin("CLUSTER SET-CONFIG-EPOCH", 1)
        admin("CLUSTER ADDSLOTS", *(each for each in range(16384) if each != slot - 1))
        other("CLUSTER ADDSLOTS", slot - 1)  # redis-py knows only nodes that have slots
        admin("CLUSTER MEET", "127.0.0.1", nodes[1].port)
        for node in nodes:
            info = node.client.execute_command
            wait_for(lambda: info("CLUSTER INFO")["cluster_state"] == "ok", "the cluster is up")
        cluster = Stage(outlasting(stage.commands), nodes[0], "cluster")
        ids = [node.client.execute_command("CLUSTER MYID") for node in nodes]
        for code in ("CLUSTERDOWN", "TRYAGAIN"):
            if code == "CLUSTERDOWN":
                admin("CLUSTER DELSLOTS", slot + 1)
            else:
                other("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
                admin("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            refusing = nodes[code == "TRYAGAIN"]
            names = {each: f"{{moves}} {code} {each.language}" for each in cluster.workers}
            answers = [each.start_acquire("mutex", name) for each, name in names.items()]
            many = MANY * len(answers)
            wait_for(lambda: refusals(refusing, code) >= many, f"{many} refusals with {code}")
            if code == "CLUSTERDOWN":
                admin("CLUSTER ADDSLOTS", slot + 1)
            else:
                admin("CLUSTER SETSLOT", slot, "STABLE")
                other("CLUSTER SETSLOT", slot, "STABLE")
            for (each, name), answer in zip(names.items(), answers):
                each.result(answer)
                each.release(name)
        cluster.close()
    finally:
        if cluster:
            cluster.kill()
        for node in nodes:
            node.stop()
    return "outlasted: CLUSTERDOWN, TRYAGAIN"
