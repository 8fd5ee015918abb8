// node --test: starts its own servers on free ports, from REDLATCH_SERVER or `redis-server`.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { randomBytes, randomUUID } from "node:crypto";
import { once } from "node:events";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { inspect } from "node:util";
import { Cluster, Redis } from "ioredis";
import { LockError, Redlatch, lockKeys } from "./redlatch.mjs";

const BINARY = process.env.REDLATCH_SERVER ?? "redis-server";
const VECTORS = new URL("../../vectors/", import.meta.url);
const NEVER_POLLED = { ttl: 60_000, claim: 60_000 }; // a poll every 30 s: later than any deadline
const folder = mkdtempSync(join(tmpdir(), "redlatch-node-"));
const cleanups = [];
let server; // the port of the main server
let redis; // the oracle: a plain connection to it
let client;

/** Registers what to undo after all tests, in reverse order. */
function undoLater(action) {
  cleanups.push(action);
}

function isFree(port) {
  return new Promise((resolve) => {
    const probe = createServer().once("error", () => resolve(false));
    probe.listen(port, "127.0.0.1", () => probe.close(() => resolve(true)));
  });
}

async function freePort() {
  for (;;) {
    const port = 15_000 + Math.floor(Math.random() * 15_000);
    if ((await isFree(port)) && (await isFree(port + 10_000))) return port; // for a cluster's bus
  }
}

async function startServer(...args) {
  const port = await freePort();
  const dir = mkdtempSync(join(folder, "server-"));
  const base = ["--port", port, "--bind", "127.0.0.1", "--dir", dir];
  const isSentinel = args.includes("--sentinel");
  const words = isSentinel ? [...args, ...base] : [...base, "--save", "", ...args];
  const process = spawn(BINARY, words.map(String), { stdio: "ignore" });
  const stop = async () => {
    if (process.exitCode !== null || process.signalCode !== null) return;
    process.kill("SIGKILL");
    await once(process, "exit");
  };
  undoLater(stop);
  const probe = open(port, { retryStrategy: () => 20, maxRetriesPerRequest: null });
  const exited = once(process, "exit").then(([code]) => assert.fail(`${BINARY} exited: ${code}`));
  exited.catch(() => {});
  await Promise.race([probe.ping(), exited]);
  probe.disconnect();
  return { port, stop };
}

function open(port, options) {
  const connection = new Redis({ port, host: "127.0.0.1", ...options });
  connection.on("error", () => {});
  undoLater(() => connection.disconnect());
  return connection;
}

function openClient(connection = redis, options) {
  const opened = new Redlatch(connection, options);
  undoLater(() => opened.close(100));
  return opened;
}

/** Calls `use` with the connection that a client makes from `connection`, and each subscription. */
function onCopy(connection, use) {
  const duplicate = connection.duplicate.bind(connection);
  connection.duplicate = (...options) => {
    const copy = duplicate(...options);
    onCopy(copy, use);
    use(copy);
    return copy;
  };
}

/** Calls `check` until it answers something true. */
async function until(check, ms = 15_000) {
  const end = performance.now() + ms;
  for (;;) {
    const found = await check();
    if (found) return found;
    assert.ok(performance.now() < end, `not within ${ms} ms: ${check}`);
    await sleep(5);
  }
}

/** Fails unless `promise` settles within `ms`. */
async function within(ms, promise) {
  const late = new AbortController();
  const { signal } = late;
  const expire = async () => {
    await sleep(ms, undefined, { signal });
    assert.fail(`not within ${ms} ms`);
  };
  try {
    return await Promise.race([promise, expire()]);
  } finally {
    late.abort();
  }
}

const countWaiters = (name, connection = redis) =>
  connection.zcount(lockKeys(name)[1], "-inf", "(4503599627370496");
const isQueued = (name, connection) => until(() => countWaiters(name, connection));
/** Revokes a mutex. The empty words are the defaults from `last_token` to `tokens`. */
function force(name) {
  const words = ["release", randomBytes(16).toString("hex"), "", "", "", "", "", "", "", 1];
  return client.send("mutex", lockKeys(name), words);
}
const hasCode = (code) => (error) => error instanceof LockError && error.code === code;

/** A worker process: `ask` resolves to the answer of a command. */
function startWorker() {
  const worker = spawn(process.execPath, [new URL("worker.mjs", import.meta.url).pathname]);
  const waiting = [];
  createInterface({ input: worker.stdout }).on("line", (line) => waiting.shift()(JSON.parse(line)));
  undoLater(() => worker.kill("SIGKILL"));
  const ask = (command) => {
    worker.stdin.write(`${JSON.stringify(command)}\n`);
    return new Promise((resolve) => waiting.push(resolve));
  };
  return { ask, kill: (signal) => worker.kill(signal), exit: once(worker, "exit") };
}

/** A process that runs a program: `line` resolves to its next line. */
function startProgram(program) {
  const child = spawn(process.execPath, ["--input-type=module", "--eval", program], {
    cwd: new URL("./", import.meta.url),
    stdio: ["pipe", "pipe", "inherit"],
  });
  undoLater(() => child.kill("SIGKILL"));
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const { stdin } = child;
  const line = async () => (await within(60_000, lines.next())).value;
  return { stdin, line, kill: (signal) => child.kill(signal), exit: once(child, "exit") };
}

async function openWorker(options) {
  const worker = startWorker();
  const url = `redis://127.0.0.1:${server}`;
  const command = { do: "open", url, topology: "server", prefix: "lock:", ...options };
  assert.deepEqual(await worker.ask(command), { ok: true });
  return worker;
}

/** A proxy that can hold back what the server answers, and that delays all of it by `delay` ms. */
async function startProxy(port, delay = 0) {
  const sockets = new Set();
  let isHolding = false;
  const proxy = createServer((near) => {
    const far = connect(port, "127.0.0.1");
    near.pipe(far);
    if (delay) far.on("data", (chunk) => setTimeout(() => near.write(chunk), delay));
    else far.pipe(near);
    // Both: one that is held back reads no end, and would keep the process of the tests alive.
    for (const socket of [near, far])
      socket.on("error", () => {}).on("close", () => [near, far].forEach((one) => one.destroy()));
    sockets.add(far);
    if (isHolding) far.pause();
  });
  const hold = (state, held = sockets) => {
    isHolding = state; // of later connections
    for (const far of held) state ? far.pause() : far.resume();
  };
  await new Promise((resolve) => proxy.listen(0, "127.0.0.1", resolve));
  undoLater(() => proxy.close());
  const cut = () => sockets.forEach((far) => far.destroy());
  return { port: proxy.address().port, hold, cut, countConnections: () => sockets.size };
}

before(async () => {
  server = (await startServer()).port;
  redis = open(server);
  client = openClient();
});

after(async () => {
  for (const action of cleanups.reverse()) await action();
  rmSync(folder, { recursive: true, force: true });
});

test("processes_and_tasks_exclude_each_other", async () => {
  const workers = await Promise.all([openWorker(), openWorker()]);
  const command = { do: "count", kind: "mutex", name: "count", key: "counter", seconds: 1 };
  const counts = workers.map((worker) => worker.ask(command));
  let increments = 0;
  const end = performance.now() + 1000;
  const task = async () => {
    while (performance.now() < end) {
      const lease = await client.acquire("mutex", "count", { timeout: 10_000 });
      await redis.set("counter", Number(await redis.get("counter")) + 1);
      await lease.release();
      increments += 1;
    }
  };
  await Promise.all([task(), task(), task()]);
  for (const answer of await Promise.all(counts)) {
    assert.ok(answer.ok && answer.tokens_ascending, JSON.stringify(answer));
    assert.ok(answer.increments > 0);
    increments += answer.increments;
  }
  assert.equal(Number(await redis.get("counter")), increments);
});

test("reentrant_owner_nests_and_excludes_others", async () => {
  const owner = randomUUID();
  const outer = await client.acquire("reentrant", "nest", { owner });
  const inner = await client.acquire("reentrant", "nest", { owner });
  assert.equal(inner.token, outer.token);
  assert.equal(await redis.hget("lock:nest", owner), "2");
  assert.equal(await client.tryAcquire("reentrant", "nest", { owner: randomUUID() }), null);
  assert.equal(await inner.release(), true);
  assert.equal(await redis.hget("lock:nest", owner), "1");
  assert.ok(outer.isValid());
  assert.equal(await outer.release(), true);
  assert.equal(await redis.exists("lock:nest"), 0);
});

test("readers_share_and_writer_waits_for_them", async () => {
  const first = await client.acquire("read", "shared");
  const second = await client.acquire("read", "shared");
  const writing = client.acquire("write", "shared", NEVER_POLLED);
  await isQueued("shared");
  assert.equal(await client.tryAcquire("read", "shared"), null); // behind the writer
  await first.release();
  await second.release();
  const writer = await within(5000, writing);
  assert.equal(await redis.hexists("lock:shared", "write"), 1);
  assert.ok(writer.token > first.token);
  assert.equal(await client.tryAcquire("write", "shared"), null);
  await writer.release();
});

test("downgrade_admits_readers_and_keeps_the_token", async () => {
  const writer = await client.acquire("write", "down");
  const reading = client.acquire("read", "down", NEVER_POLLED);
  await isQueued("down");
  assert.equal(await writer.downgrade(), true);
  const reader = await within(5000, reading);
  assert.equal(reader.token, writer.token);
  assert.equal(await redis.hget("lock:down", "readers"), "2");
  await assert.rejects(reader.downgrade(), hasCode("malformed"));
  assert.equal(await writer.renew(), true);
  assert.equal(await client.tryAcquire("write", "down"), null);
  assert.deepEqual(await Promise.all([writer.release(), reader.release()]), [true, true]);
});

test("read_hold_without_an_owner_is_upgraded_by_its_id", async () => {
  const reader = await client.acquire("read", "up");
  const writer = await client.tryAcquire("write", "up", { owner: reader.owner });
  assert.ok(writer.isValid());
  assert.deepEqual([await writer.release(), await reader.release()], [true, true]);
});

test("release_notifies_the_waiter", async () => {
  const other = openClient();
  let lease = await client.acquire("mutex", "notified", NEVER_POLLED);
  for (let round = 0; round < 10; round += 1) {
    const waiting = (round % 2 ? client : other).acquire("mutex", "notified", NEVER_POLLED);
    await isQueued("notified");
    await lease.release();
    lease = await within(5000, waiting);
  }
  await lease.release();
  assert.equal(await redis.exists("lock:notified"), 0);
});

test("first_request_of_a_client_waits_for_the_subscription", async () => {
  const holder = await client.acquire("mutex", "first");
  const other = openClient();
  const waiting = other.acquire("mutex", "first", NEVER_POLLED);
  await isQueued("first");
  const [waiter] = await redis.zrange(lockKeys("first")[1], 0, 0);
  assert.ok(waiter.includes(other.channel), waiter);
  await holder.release();
  await (await within(5000, waiting)).release();
});

test("killed_holder_is_succeeded_after_its_ttl", async () => {
  const worker = await openWorker();
  const command = {
    do: "acquire",
    kind: "mutex",
    name: "dead",
    ttl_ms: 2500,
    limit_ms: 9000,
    as: "h",
  };
  const { token } = await worker.ask(command);
  const waiting = client.acquire("mutex", "dead", { ttl: 3000 });
  await isQueued("dead");
  worker.kill("SIGKILL");
  await worker.exit;
  const start = performance.now(); // before the TTL is asked for
  const left = await redis.pttl("lock:dead");
  const lease = await within(15_000, waiting);
  assert.ok(performance.now() - start > left - 50, "granted while the holder's TTL ran");
  assert.ok(performance.now() - start < left + 5000, "granted long after the TTL");
  assert.ok(lease.token > token);
  await lease.release();
});

test("killed_waiter_delays_others_by_a_claim_at_most", async () => {
  const worker = await openWorker();
  const holder = await client.acquire("mutex", "grave");
  worker.ask({
    do: "acquire",
    kind: "mutex",
    name: "grave",
    ttl_ms: 20_000,
    limit_ms: 60_000,
    as: "h",
  });
  await isQueued("grave");
  const waiting = client.acquire("mutex", "grave");
  await until(async () => (await countWaiters("grave")) === 2);
  worker.kill("SIGKILL");
  await worker.exit;
  await holder.release();
  const lease = await within(5500, waiting); // a claim is 3 s
  await lease.release();
});

test("renewal_keeps_a_lock_for_three_ttls", async () => {
  const lease = await client.acquire("mutex", "long", { ttl: 3000 });
  const end = performance.now() + 9000;
  while (performance.now() < end) {
    assert.equal(await redis.get("lock:long"), lease.owner);
    assert.ok(lease.isValid());
    await sleep(20);
  }
  assert.equal(await lease.release(), true);
});

test("forced_release_is_reported_and_never_undone", async () => {
  const lease = await client.acquire("mutex", "forced", { ttl: 3000 });
  const reported = once(lease.signal, "abort");
  assert.deepEqual(await force("forced"), [1]);
  await within(10_000, reported);
  assert.ok(hasCode("lost")(lease.signal.reason));
  assert.equal(lease.isValid(), false);
  assert.equal(await lease.renew(), false);
  assert.equal(await lease.release(), false);
  assert.equal(await redis.exists("lock:forced"), 0);
});

test("late_release_of_a_stopped_process_answers_false", async () => {
  const worker = await openWorker();
  const command = { do: "acquire", kind: "mutex", name: "late", ttl_ms: 400, as: "h" };
  assert.equal((await worker.ask(command)).ok, true);
  worker.kill("SIGSTOP");
  await until(async () => (await redis.exists("lock:late")) === 0);
  const lease = await client.acquire("mutex", "late");
  worker.kill("SIGCONT");
  assert.deepEqual(await worker.ask({ do: "lost", as: "h", limit_ms: 9000 }), { ok: true });
  assert.deepEqual(await worker.ask({ do: "is_valid", as: "h" }), { ok: true, valid: false });
  assert.deepEqual(await worker.ask({ do: "release", as: "h" }), { ok: true, held: false });
  assert.equal(await redis.get("lock:late"), lease.owner);
  await lease.release();
});

test("release_of_a_deleted_lock_answers_false", async () => {
  const lease = await client.acquire("mutex", "deleted");
  await redis.del("lock:deleted");
  assert.equal(await lease.release(), false);
});

test("killed_connections_are_replaced_and_waiters_notified_again", async () => {
  const other = openClient();
  const holder = await client.acquire("mutex", "cut", NEVER_POLLED);
  const waiting = other.acquire("mutex", "cut", NEVER_POLLED);
  await isQueued("cut");
  const subscribers = async () => {
    const counts = await redis.pubsub("NUMSUB", client.channel, other.channel);
    return Number(counts[1]) + Number(counts[3]);
  };
  const ids = async (type) =>
    (await redis.client("LIST", "TYPE", type)).match(/(?<=^id=)\d+/gm) ?? [];
  const former = new Set([...(await ids("normal")), ...(await ids("pubsub"))]);
  await redis.client("KILL", "TYPE", "pubsub", "SKIPME", "yes");
  await redis.client("KILL", "TYPE", "normal", "SKIPME", "yes");
  await until(async () => (await ids("pubsub")).every((id) => !former.has(id)));
  await until(async () => (await subscribers()) === 2);
  await until(() => holder.renew().catch(() => false));
  assert.equal(await holder.release(), true);
  const lease = await within(5000, waiting);
  await lease.release();
});

test("time_limit_and_abort_leave_no_waiter", async () => {
  const holder = await client.acquire("mutex", "limit");
  const start = performance.now();
  await assert.rejects(client.acquire("mutex", "limit", { timeout: 200 }), hasCode("timed_out"));
  assert.ok(performance.now() - start >= 199);
  await until(async () => (await countWaiters("limit")) === 0);
  const controller = new AbortController();
  const waiting = client.acquire("mutex", "limit", { signal: controller.signal });
  await isQueued("limit");
  controller.abort(new Error("no longer needed"));
  await assert.rejects(waiting, /no longer needed/);
  await assert.rejects(
    client.acquire("mutex", "limit", { signal: controller.signal }),
    /no longer needed/,
  );
  await until(async () => (await countWaiters("limit")) === 0);
  await holder.release();
  assert.equal(await redis.exists("lock:limit"), 0);
});

test("abort_after_the_grant_has_no_effect", async () => {
  const controller = new AbortController();
  const lease = await client.acquire("mutex", "granted", { signal: controller.signal });
  controller.abort();
  assert.ok(lease.isValid());
  assert.equal(await lease.release(), true);
});

test("abort_during_the_first_request_leaves_no_lock", async () => {
  for (let round = 0; round < 50; round += 1) {
    const controller = new AbortController();
    const acquired = client.acquire("mutex", "race", { signal: controller.signal });
    setTimeout(() => controller.abort(), round % 5);
    await acquired
      .then((lease) => lease.release())
      .catch((error) => assert.equal(error.name, "AbortError"));
    await until(async () => (await redis.exists("lock:race")) === 0);
  }
});

test("unanswered_acquire_is_given_up", async () => {
  const proxy = await startProxy(server);
  const slow = openClient(open(proxy.port));
  await slow.ready;
  proxy.hold(true);
  const start = performance.now();
  await assert.rejects(slow.acquire("mutex", "hung", { timeout: 300 }), (error) => {
    assert.match(error.cause?.message ?? "in use", /Redis has not answered/);
    return hasCode("timed_out")(error);
  });
  assert.ok(performance.now() - start < 4000); // the limit of a request is 5 s
  await until(() => redis.exists("lock:hung")); // the request arrived, the answer did not
  proxy.hold(false);
  await until(async () => (await redis.exists("lock:hung")) === 0);
});

test("unanswered_acquire_is_repeated_until_answers_pass", async () => {
  const proxy = await startProxy(server);
  const slow = openClient(open(proxy.port));
  await until(() => slow.isSubscribed);
  proxy.hold(true);
  const count = proxy.countConnections();
  const acquired = slow.acquire("mutex", "stale", { ttl: 2000 });
  await until(() => proxy.countConnections() > count, 3000); // for the second request
  proxy.hold(false);
  const lease = await within(5000, acquired);
  assert.equal(await lease.release(), true);
});

test("renewal_without_an_answer_is_reported_as_lost", async () => {
  const proxy = await startProxy(server);
  const slow = openClient(open(proxy.port));
  const lease = await slow.acquire("mutex", "silent", { ttl: 600 });
  const reported = once(lease.signal, "abort");
  proxy.hold(true);
  await within(4000, reported); // the limit of a request is 5 s
  assert.equal(lease.isValid(), false);
  proxy.hold(false);
  await until(async () => (await redis.exists("lock:silent")) === 0);
});

test("release_whose_answer_is_lost_answers_true", async () => {
  const proxy = await startProxy(server);
  const slow = openClient(open(proxy.port));
  const lease = await slow.acquire("mutex", "cut-release");
  proxy.hold(true);
  const released = lease.release();
  await until(async () => (await redis.exists("lock:cut-release")) === 0);
  proxy.cut(); // before the answer passes
  proxy.hold(false);
  assert.equal(await within(5000, released), true);
});

test("release_that_is_refused_at_first_reports_a_loss", async () => {
  const { port } = await startServer();
  const admin = open(port);
  let noteRefusal;
  const refused = new Promise((resolve) => (noteRefusal = resolve));
  const other = openClient(open(port), { onError: noteRefusal });
  const lease = await other.acquire("mutex", "refused-release");
  await admin.acl("SETUSER", "default", "-evalsha");
  const released = lease.release();
  assert.match((await refused).message, /NOPERM/);
  await admin.del("lock:refused-release"); // as if it had been revoked
  await admin.acl("SETUSER", "default", "+evalsha");
  assert.equal(await within(5000, released), false);
});

test("outage_adds_no_listeners", async () => {
  const { port, stop } = await startServer();
  let failures = 0;
  const other = openClient(open(port), { onError: () => (failures += 1) });
  await other.ready;
  const warnings = [];
  const warn = (warning) => warnings.push(warning.message);
  process.on("warning", warn);
  await stop();
  await until(() => failures >= 24, 120_000); // of more connections than ten, the limit of Node
  process.off("warning", warn);
  assert.deepEqual(warnings, []);
});

test("key_prefix_of_ioredis_is_refused", () => {
  const refused = { name: "TypeError", message: /keyPrefix/ };
  const redis = open(server, { keyPrefix: "app:", lazyConnect: true });
  assert.throws(() => openClient(redis), refused);
  const redisOptions = { keyPrefix: "app:" };
  const nodes = [{ host: "127.0.0.1", port: server }];
  const cluster = new Cluster(nodes, { lazyConnect: true, redisOptions });
  assert.throws(() => openClient(cluster), refused);
});

test("attempt_revived_by_a_failover_is_released_again", async () => {
  const holder = await client.acquire("mutex", "revived");
  const waiting = client.acquire("mutex", "revived", { timeout: 2000 });
  await isQueued("revived");
  const [waiter] = await redis.zrange(lockKeys("revived")[1], 0, 0);
  const [id] = waiter.split(" ");
  await assert.rejects(waiting, hasCode("timed_out"));
  await until(async () => (await countWaiters("revived")) === 0);
  await holder.release();
  await redis.set("lock:revived", id, "PX", 60_000); // what the new master would hold
  await redis.publish(client.channel, `${id} 1 1 lock:revived`);
  await until(async () => (await redis.exists("lock:revived")) === 0);
});

test("scripts_are_sent_again_after_script_flush", async () => {
  await redis.script("FLUSH");
  const names = Array.from({ length: 50 }, (_, index) => `flushed-${index}`);
  const leases = await Promise.all(names.map((name) => client.acquire("mutex", name)));
  assert.ok((await Promise.all(leases.map((lease) => lease.release()))).every(Boolean));
});

test("names_are_validated", async () => {
  const tags = ["lock:{a}b", "lock:{a}b:waiters", "lock:{a}b:fence"];
  assert.deepEqual(lockKeys("{a}b"), tags);
  assert.deepEqual(lockKeys("b"), ["lock:b", "{lock:b}:waiters", "{lock:b}:fence"]);
  for (const name of ["a{b", "{a}", "x:fence", "{a}fence", "x".repeat(512), "a\nb", "{{a}}"]) {
    assert.equal(lockKeys(name)[0], `lock:${name}`);
  }
  const long = "é".repeat(257);
  const refused = [
    "",
    "x".repeat(513),
    long,
    "a}b",
    "{}a",
    "{a}:fence",
    "x{a}y:waiters",
    "{a}{}node",
  ];
  for (const name of [...refused, "{a}\n:fence"]) {
    await assert.rejects(client.acquire("mutex", name), hasCode("bad_name"), name);
  }
  for (const name of [undefined, null, 7, ["a"]])
    await assert.rejects(client.acquire("mutex", name), hasCode("bad_name"), inspect(name));
  const texts = [
    ["", 'lock "": a name must be a text and not empty, not \'\''],
    ["a}b", 'lock "a}b": a key with "}" must have a hash tag, as "{a}b", not \'lock:a}b\''],
    ["{a}:fence", /^lock "\{a\}:fence": a key with a hash tag must be no other lock's, not /],
    [long, /: a name must have at most 512 bytes, and a prefix 128, not /],
    ["\ud800", /: a key must be well-formed Unicode, not /],
  ];
  for (const [name, message] of texts) assert.throws(() => lockKeys(name), { message });
  assert.throws(() => lockKeys("{a}", ""), hasCode("bad_name"));
  assert.throws(() => lockKeys("a", "p".repeat(129)), hasCode("bad_name"));
});

test("refusals_are_typed_errors_and_change_nothing", async () => {
  await redis.set("lock:plain", "value");
  await redis.rpush("lock:list", "value");
  for (const name of ["plain", "list"]) {
    await assert.rejects(client.acquire("mutex", name), hasCode("wrong_type"));
    await assert.rejects(client.tryAcquire("write", name), hasCode("wrong_type"));
    assert.equal(await redis.exists(lockKeys(name)[1]), 0);
  }
  assert.equal(await redis.get("lock:plain"), "value");
  await redis.del("lock:plain", "lock:list");
  const malformed = client.send("mutex", lockKeys("ttl"), ["acquire", "a", "", "", 0]);
  assert.deepEqual(await malformed, -5);

  const owner = randomUUID();
  const hold = () => client.acquire("reentrant", "deep", { owner });
  const holds = await Promise.all(Array.from({ length: 255 }, hold));
  await assert.rejects(hold(), hasCode("too_deep"));
  await Promise.all(holds.map((lease) => lease.release()));
  assert.equal(await redis.exists("lock:deep"), 0);
});

test("error_names_the_lock_the_reason_and_the_remedy", async () => {
  const scripts = new URL(`file://${mkdtempSync(join(folder, "scripts-"))}/`);
  for (const file of ["mutex", "reentrant", "rwlock", "node", "fenced"])
    writeFileSync(new URL(`${file}.lua`, scripts), "return {-tonumber(KEYS[1]:match('%d+'))}");
  const other = openClient(redis, { scripts, prefix: "app:" });
  const codes = "ended wrong_type wrong_type too_deep malformed would_deadlock too_many_readers";
  const unknown = ["unavailable", "unavailable", "unavailable"];
  for (const [index, code] of [...codes.split(" "), ...unknown].entries())
    for (const verb of ["acquire", "tryAcquire"]) {
      const name = `refused ${index + 1}`;
      await assert.rejects(other[verb]("write", name), (error) => {
        assert.equal(error.code, code);
        const [start, end] = [`lock "${name}": `, ` (write, key "app:${name}", answer ${~index})`];
        assert.ok(error.message.startsWith(start) && error.message.endsWith(end), error.message);
        return /[a-z]; [a-z]/.test(error.message); // a reason and a remedy
      });
    }
  const lease = await client.acquire("mutex", "named");
  const refuses = async (message, kind, options) =>
    assert.rejects(client.acquire(kind, "named", options), { message });
  await refuses(/^lock "named": in use$/, "mutex", { timeout: 0 });
  await refuses(/^lock "named": not within 50 ms$/, "mutex", { timeout: 50 });
  await refuses(/^lock "named": kind must be/, "mutx");
  await refuses(/^lock "named": the key holds another kind of lock, or .*"lock:named"/, "read");
  await assert.rejects(lease.downgrade(), /lock "named": only a write lock/);
  assert.equal(await lease.release(), true);
});

test("second_reader_that_waits_to_write_is_refused", async () => {
  const [a, b] = [{ owner: randomUUID() }, { owner: randomUUID() }];
  const readers = [
    await client.acquire("read", "dead", a),
    await client.acquire("read", "dead", b),
  ];
  const writing = client.acquire("write", "dead", { ...a, ...NEVER_POLLED });
  await isQueued("dead");
  await assert.rejects(client.acquire("write", "dead", b), hasCode("would_deadlock"));
  await readers[1].release();
  await (await within(5000, writing)).release();
  await readers[0].release();
});

test("reader_above_the_maximum_is_refused", async () => {
  const lease = await client.acquire("read", "full");
  const keys = lockKeys("full");
  for (let first = 0; first < 9999; first += 303) {
    const ids = Array.from({ length: 303 }, (_, index) => `reader-${first + index}`);
    const read = (id) => client.send("rwlock", keys, ["read", id, "", "", "", 60_000]);
    await Promise.all(ids.map(read));
  }
  await assert.rejects(client.tryAcquire("read", "full"), hasCode("too_many_readers"));
  await lease.release();
  await redis.del(keys[0]);
});

test("user_with_the_rights_of_the_page_can_use_every_lock", async () => {
  const page = readFileSync(new URL("../../README.md", import.meta.url), "utf8");
  const [, rights] = page.match(/ACL SETUSER locks on >secret (.*)/);
  await redis.acl("SETUSER", "locks", "on", ">secret", ...rights.split(" "));
  const errors = [];
  const onError = (error) => errors.push(error.message);
  const user = { username: "locks", password: "secret", lazyConnect: true }; // never connected
  const limited = openClient(open(server, user), { onError });
  const owner = randomUUID();
  for (const kind of ["mutex", "reentrant", "read", "write"]) {
    const holder = await client.acquire(kind === "read" ? "write" : kind, `acl-${kind}`, { owner });
    const options = { ...NEVER_POLLED, owner: randomUUID() };
    const waiting = limited.acquire(kind, `acl-${kind}`, options);
    await isQueued(`acl-${kind}`);
    await holder.release();
    const lease = await within(5000, waiting);
    assert.equal(await lease.renew(), true);
    if (kind === "write") assert.equal(await lease.downgrade(), true);
    assert.equal(await lease.release(), true);
  }
  const denied = await redis.acl("LOG");
  assert.deepEqual([errors, denied.map((entry) => entry.toString())], [[], []]);
});

test("closed_client_cancels_waiters", async () => {
  const holder = await client.acquire("mutex", "closing");
  const other = openClient();
  const waiting = other.acquire("mutex", "closing");
  await isQueued("closing");
  await Promise.all([assert.rejects(waiting, hasCode("closed")), other.close()]);
  assert.equal(await countWaiters("closing"), 0);
  await holder.release();
});

test("message_after_close_is_no_error", async () => {
  const [errors, connection, controller] = [[], open(server), new AbortController()];
  let subscriber;
  onCopy(connection, (copy) => (subscriber = copy)); // the last one
  const other = openClient(connection, { onError: (error) => errors.push(error) });
  await until(() => other.isSubscribed);
  const holder = await other.acquire("mutex", "late-message");
  const options = { ...NEVER_POLLED, signal: controller.signal };
  const waiting = other.acquire("mutex", "late-message", options);
  await isQueued("late-message");
  subscriber.stream.pause();
  const released = holder.release(); // is sent before that of the waiter, which gets the lock
  controller.abort();
  await assert.rejects(waiting, { name: "AbortError" });
  assert.equal(await released, true);
  await other.close();
  assert.equal(await redis.exists("lock:late-message"), 0);
  assert.equal(await countWaiters("late-message"), 0);
  const arrived = once(subscriber, "message");
  subscriber.stream.resume();
  const [, message] = await within(5000, arrived);
  assert.match(message, / lock:late-message$/);
  await new Promise(setImmediate); // a request without a connection has failed then
  assert.deepEqual(errors, []);
});

test("close_while_connecting_is_no_error", async () => {
  const close = async (isSubscription, hasSocket) => {
    const [errors, connection] = [[], open(server)];
    let copies = 0;
    const ended = new Promise((resolve) => {
      onCopy(connection, async (copy) => {
        if (isSubscription !== (copies++ > 0)) return;
        copy.once("end", resolve);
        do await new Promise(process.nextTick); // before any socket is connected
        while (hasSocket && !copy.stream);
        await other.close();
      });
    });
    const other = openClient(connection, { onError: (error) => errors.push(error) });
    await within(5000, ended);
    await new Promise(setImmediate);
    assert.deepEqual(errors, [], inspect({ isSubscription, hasSocket, errors }));
  };
  for (const isSubscription of [false, true])
    for (const hasSocket of [false, true]) await close(isSubscription, hasSocket);
});

test("arguments_are_checked_before_a_request", async () => {
  const { port, stop } = await startServer();
  const other = openClient(open(port));
  await other.ready;
  await stop(); // whatever was sent would fail as `unavailable`, or be repeated
  const refuses = async (rule, kind, options) => {
    for (const verb of ["acquire", "tryAcquire"])
      await assert.rejects(within(5000, other[verb](kind, "args", options)), (error) => {
        assert.equal(error.code, "malformed", inspect(error));
        assert.match(error.message, rule);
        return true;
      });
  };
  for (const kind of ["mutx", "", undefined, "rwlock", "node", "fenced", "ping"])
    await refuses(/kind must be one of mutex, reentrant, read, write, not /, kind);
  for (const ttl of [0, -1, 99, 300.5, 0.5, 1e10, 1e12, NaN, Infinity, "30", null])
    await refuses(/ttl must be an integer from \d+ to 9999999999 ms, not /, "mutex", { ttl });
  for (const timeout of [-1, NaN, "30", null])
    await refuses(/timeout must be a number of ms, at least 0, not /, "mutex", { timeout });
  const rule = /owner must be well-formed, .* bytes without a space, not ":…" or "mode", not /;
  for (const owner of [undefined, "", "two words", ":a", "mode", "é".repeat(129), "\ud800", 7])
    await refuses(rule, "reentrant", { owner });
  for (const owner of ["two words", ":a", "\ud800", 7]) await refuses(rule, "read", { owner });
  for (const signal of [{}, new AbortController(), "abort", { aborted: false }])
    await refuses(/signal must be an AbortSignal, not /, "mutex", { signal });
  for (const claim of [0, 0.5, 60_001, "9"]) {
    const call = other.acquire("mutex", "args", { claim });
    await assert.rejects(call, /claim must be an integer from 1 to 60000 ms, not /);
  }
});

test("longest_and_strangest_arguments_are_accepted", async () => {
  for (const owner of ["é".repeat(128), "a:b", "moder", "{}", "a\n"]) {
    const lease = await client.tryAcquire("reentrant", "odd", { owner, ttl: 9_999_999_999 });
    assert.equal(await lease.release(), true, owner);
  }
  for (const owner of ["", null, "mode"]) {
    const reader = await client.acquire("read", "odd", { owner, claim: 60_000, ttl: 60_000 });
    assert.equal(await reader.release(), true, String(owner));
  }
});

test("missing_script_is_an_error_of_the_constructor", () => {
  const scripts = new URL("nowhere/", import.meta.url);
  assert.throws(() => openClient(redis, { scripts }), { code: "ENOENT", message: /mutex\.lua/ });
});

test("unknown_script_is_refused_by_send", async () => {
  const isRefused = (error) =>
    hasCode("malformed")(error) && /script must be one of mutex, .*, not /.test(error.message);
  for (const script of ["mutx", "ping", "constructor"]) // ioredis has a ping of its own
    await assert.rejects(client.send(script, [], ["x"]), isRefused);
});

test("word_that_is_no_text_is_refused_by_send", async () => {
  const keys = ["{words}:value", "{words}:token"];
  const isRefused = (error) =>
    hasCode("malformed")(error) && /a key or word must be .*, not /.test(error.message);
  for (const value of [{ a: 1 }, null, undefined, true, ["a"], new Date(), 1n, Symbol("a")])
    await assert.rejects(client.send("fenced", keys, [1, value]), isRefused, inspect(value));
  await assert.rejects(client.send("fenced", [null, keys[1]], [1, "text"]), isRefused);
  assert.equal(await redis.exists(...keys), 0);
  const bytes = Buffer.from([0, 255, 10]);
  for (const [index, value] of ["", 7, bytes, new Uint8Array(bytes)].entries()) {
    assert.equal(await client.send("fenced", keys, [index + 1, value]), 1);
    const stored = Buffer.from(value instanceof Uint8Array ? value : String(value));
    assert.deepEqual(await redis.getBuffer(keys[0]), stored);
  }
});

test("zero_timeout_tries_once", async () => {
  const lease = await client.acquire("mutex", "zero", { timeout: 0 });
  await assert.rejects(client.acquire("mutex", "zero", { timeout: 0 }), hasCode("timed_out"));
  assert.equal(await client.tryAcquire("mutex", "zero", { timeout: 0 }), null);
  assert.equal(await countWaiters("zero"), 0);
  assert.equal(await lease.release(), true);
  const again = await client.tryAcquire("mutex", "zero", { timeout: 0 });
  assert.equal(await again.release(), true);
});

test("try_fails_at_once_while_redis_was_never_reached", async () => {
  const other = openClient(open(await freePort()));
  for (const round of [1, 2]) {
    const long = { timeout: 3_600_000 }; // what only this limit ends is not at once
    const isRefused = ({ code, cause }) => code === "unavailable" && cause?.code === "ECONNREFUSED";
    const call = other.tryAcquire("mutex", "down", long);
    await within(60_000, assert.rejects(call, isRefused, `round ${round}`));
    await assert.rejects(other.acquire("mutex", "down", { timeout: 0 }), isRefused);
  }
});

test("timeout_names_the_last_failure", async () => {
  const { port, stop } = await startServer();
  const [never, former] = [openClient(open(await freePort())), openClient(open(port))];
  await former.ready;
  await stop();
  for (const other of [never, former]) {
    await until(() => other.failure?.code === "ECONNREFUSED");
    const call = other.acquire("mutex", "down", { timeout: 300 });
    await assert.rejects(call, (error) => {
      assert.equal(error.code, "timed_out");
      assert.match(error.message, /last failure: .*ECONNREFUSED/);
      assert.equal(error.cause?.code, "ECONNREFUSED");
      return true;
    });
  }
  const holder = await client.acquire("mutex", "busy");
  const waiting = client.acquire("mutex", "busy", { timeout: 100 });
  await assert.rejects(waiting, (error) => error.cause === undefined); // the lock is in use
  await holder.release();
});

test("close_releases_held_leases", async () => {
  const other = openClient();
  const leases = [await other.acquire("mutex", "held-1"), await other.acquire("write", "held-2")];
  await other.close();
  assert.equal(await redis.exists("lock:held-1", "lock:held-2"), 0);
  for (const lease of leases) {
    assert.equal(lease.isValid(), false);
    assert.ok(hasCode("closed")(lease.signal.reason), inspect(lease.signal.reason));
    assert.equal(await lease.release(), true); // the answer of the release by `close`
  }
  await assert.rejects(other.acquire("mutex", "held-1"), hasCode("closed"));
  await assert.rejects(other.tryAcquire("mutex", "held-1"), hasCode("closed"));
});

test("close_without_a_limit_waits_for_the_releases", async () => {
  for (const timeout of [Infinity, 2 ** 31]) {
    const proxy = await startProxy(server);
    const slow = openClient(open(proxy.port));
    const lease = await slow.acquire("mutex", "endless-close");
    proxy.hold(true);
    const closing = slow.close(timeout);
    await until(async () => (await redis.exists("lock:endless-close")) === 0);
    await sleep(20); // a timer with a longer delay than it may have fires after 1 ms
    assert.equal(slow.isClosed, false, String(timeout));
    proxy.hold(false);
    await within(60_000, closing);
    assert.equal(await lease.release(), true);
  }
});

test("closed_client_with_a_lease_lets_the_process_end_in_an_outage", async () => {
  const { port, stop } = await startServer();
  const program = `
    import { Redis } from "ioredis";
    import { Redlatch } from "./redlatch.mjs";
    const redis = new Redis(${port}, "127.0.0.1");
    redis.on("error", () => {});
    const locks = new Redlatch(redis);
    const lease = await locks.acquire("mutex", "held", { ttl: 3_600_000 });
    console.log("held");
    process.stdin.on("data", async () => {
      await locks.close(100);
      redis.disconnect();
      process.stdin.destroy();
      console.log(lease.isValid());
    });`;
  const child = startProgram(program);
  assert.equal(await child.line(), "held");
  await stop();
  child.stdin.write("close\n");
  assert.equal(await child.line(), "false");
  assert.deepEqual(await within(60_000, child.exit), [0, null]); // and not after the TTL
});

test("sigterm_handler_of_the_page_releases", async () => {
  const page = readFileSync(new URL("README.md", import.meta.url), "utf8");
  const handler = page.match(/^process\.once\("SIGTERM".*$/m)?.[0];
  assert.ok(handler, "the page has no handler");
  const program = `
    import { Redis } from "ioredis";
    import { Redlatch } from "./redlatch.mjs";
    const locks = new Redlatch(new Redis(${server}, "127.0.0.1"));
    ${handler}
    await locks.acquire("mutex", "terminated");
    console.log("held");`;
  const child = startProgram(program);
  assert.equal(await child.line(), "held");
  assert.equal(await redis.exists("lock:terminated"), 1);
  child.kill("SIGTERM");
  assert.deepEqual(await within(60_000, child.exit), [143, null]);
  assert.equal(await redis.exists("lock:terminated"), 0);
});

test("fenced_write_of_the_page_refuses_an_older_token", async () => {
  const page = readFileSync(new URL("README.md", import.meta.url), "utf8");
  const call = page.match(/locks\.send\("fenced".*\)/)?.[0];
  assert.ok(call, "the page has no fenced write");
  const run = new Function("locks", "lease", "text", `return ${call}`);
  const write = (lease, text) => run(client, lease, text);
  const before = await client.acquire("mutex", "fenced");
  await before.release();
  const lease = await client.acquire("mutex", "fenced");
  assert.equal(await write(lease, "new"), 1);
  assert.equal(await write(before, "old"), 0);
  assert.equal(await redis.get("{report}:text"), "new");
  await lease.release();
});

test("second_release_has_the_answer_of_the_first", async () => {
  const lease = await client.acquire("mutex", "twice");
  assert.deepEqual([await lease.release(), await lease.release()], [true, true]);
  const lost = await client.acquire("mutex", "twice");
  await force("twice");
  assert.deepEqual([await lost.release(), await lost.release()], [false, false]);
});

test("worker_survives_errors", async () => {
  const worker = startWorker();
  assert.deepEqual(await worker.ask({ do: "nonsense" }), { ok: false, error: "unknown" });
  assert.equal((await worker.ask({ do: "acquire", kind: "mutex", name: "a" })).ok, false);
  assert.equal((await worker.ask({ do: "release", as: "none" })).ok, false);
  assert.deepEqual(await worker.ask({ do: "close" }), { ok: true });
  assert.deepEqual(await worker.exit, [0, null]);
});

test("short_limit_leaves_the_connection_of_other_leases", async () => {
  const proxy = await startProxy(server, 800);
  const slow = openClient(open(proxy.port));
  const lease = await slow.acquire("mutex", "distant", { ttl: 12_000 });
  await until(() => slow.isSubscribed);
  const count = proxy.countConnections();
  const short = slow.acquire("mutex", "distant-short", { ttl: 300, timeout: 1500 }); // 100 ms each
  await assert.rejects(short, hasCode("timed_out"));
  assert.equal(proxy.countConnections(), count);
  assert.equal(await lease.renew(), true);
  assert.equal(await lease.release(), true);
});

test("silent_connection_is_replaced_after_a_limit", async () => {
  const proxy = await startProxy(server);
  const slow = openClient(open(proxy.port));
  const lease = await slow.acquire("mutex", "dead-path", { ttl: 12_000 });
  await until(() => slow.isSubscribed);
  const count = proxy.countConnections();
  proxy.hold(true);
  const waiting = slow.acquire("mutex", "dead-path-2", { ttl: 600, timeout: 400 }); // 150 ms each
  await assert.rejects(waiting, hasCode("timed_out"));
  await until(() => proxy.countConnections() > count, 3000); // before the lease is renewed
  proxy.hold(false);
  assert.equal(await within(5000, lease.release()), true);
});

test("connection_that_is_silent_from_its_start_is_replaced", async () => {
  const proxy = await startProxy(server);
  const connection = open(proxy.port, { lazyConnect: true }); // only its copies connect
  onCopy(connection, (copy) => {
    copy.options.socketTimeout = 600_000; // else 5 s
    undoLater(() => clearTimeout(copy.socketTimeoutTimer)); // ioredis leaves it to a closed one
  });
  const slow = openClient(connection);
  await until(() => slow.isSubscribed);
  const count = proxy.countConnections();
  proxy.hold(true);
  proxy.cut();
  await until(() => proxy.countConnections() > count);
  proxy.hold(false, []); // what connects from now on is answered
  const lease = await within(60_000, slow.acquire("mutex", "silent-start", { ttl: 2000 }));
  assert.equal(await lease.release(), true);
});

test("missing_password_or_right_is_reported_and_fails_calls", async () => {
  const { port } = await startServer();
  const admin = open(port);
  await admin.acl("SETUSER", "timeless", "on", ">secret", "~*", "&*", "+@all", "-time");
  await admin.config("SET", "requirepass", "secret");
  const cases = [
    [{}, /NOAUTH/],
    [{ password: "wrong" }, /WRONGPASS/],
    [{ username: "timeless", password: "secret" }, /NOPERM|can't run/],
  ];
  for (const [options, refusal] of cases) {
    const reports = [];
    const onError = (error) => reports.push(error.message);
    const other = openClient(open(port, options), { onError });
    const isRefused = (error) => {
      assert.equal(error.code, "unavailable");
      assert.match(error.message, refusal);
      return true;
    };
    for (const verb of ["acquire", "tryAcquire", "acquire"])
      await within(15_000, assert.rejects(other[verb]("mutex", "refused"), isRefused));
    await until(() => reports.some((text) => refusal.test(text)));
    await sleep(300); // several answers to TIME
    const count = reports.filter((text) => refusal.test(text)).length;
    if (options.password !== "wrong") assert.equal(count, 1, inspect(reports)); // else: of each try
    await other.close(100);
  }
});

test("client_without_a_password_works_once_none_is_required", async () => {
  const { port } = await startServer();
  const admin = open(port);
  await admin.config("SET", "requirepass", "secret");
  const other = openClient(open(port));
  await assert.rejects(within(15_000, other.acquire("mutex", "open")), hasCode("unavailable"));
  await admin.config("SET", "requirepass", "");
  await until(() => other.isSubscribed);
  assert.equal(await (await other.acquire("mutex", "open")).release(), true);
});

test("on_error_that_throws_does_not_end_renewals", async (t) => {
  const printed = t.mock.method(console, "error", () => {});
  const onError = () => {
    throw new Error("from onError");
  };
  const proxy = await startProxy(server);
  const slow = openClient(open(proxy.port), { onError });
  const lease = await slow.acquire("mutex", "thrown", { ttl: 6000 });
  proxy.hold(true);
  await until(() => printed.mock.callCount() > 0); // of a renewal without an answer
  proxy.hold(false);
  let last = Infinity;
  await until(async () => last < (last = await redis.pttl("lock:thrown"))); // it is renewed
  assert.ok(lease.isValid());
  assert.match(printed.mock.calls[0].arguments[0].message, /from onError/);
  assert.equal(await lease.release(), true);
});

test("answers_that_wait_in_a_blocked_process_are_read_before_a_limit_ends", async () => {
  const { port } = await startServer();
  const admin = open(port);
  const other = openClient(admin);
  await until(() => other.isSubscribed);
  const count = async () => (await admin.info("stats")).match(/connections_received:(\d+)/)[1];
  const before = await count();
  const tried = other.tryAcquire("mutex", "blocked", { ttl: 4000 });
  await new Promise(setImmediate); // the request is sent
  const end = performance.now() + 1200; // more than a quarter of the TTL
  while (performance.now() < end);
  const lease = await tried;
  assert.equal(await lease.release(), true);
  assert.equal(await count(), before);
});

test("grant_after_its_deadline_is_followed_by_a_new_attempt", async (t) => {
  const proxy = await startProxy(server);
  const slow = openClient(open(proxy.port));
  await slow.ready;
  proxy.hold(true);
  const acquired = slow.acquire("mutex", "late-grant", { ttl: 20_000 });
  const first = await until(() => redis.get("lock:late-grant"));
  const now = performance.now.bind(performance);
  t.mock.method(performance, "now", () => now() + 30_000); // as after a suspension
  proxy.hold(false);
  const lease = await within(5000, acquired);
  assert.ok(lease.isValid());
  assert.notEqual(lease.owner, first);
  assert.equal(await lease.release(), true);
  assert.equal(await redis.exists("lock:late-grant"), 0);
});

test("waiters_poll_once_the_subscription_is_lost", async () => {
  const { port } = await startServer();
  const admin = open(port);
  await admin.acl("SETUSER", "listener", "on", ">secret", "~*", "&*", "+@all");
  const other = openClient(open(port, { username: "listener", password: "secret" }));
  const holder = await openClient(admin).acquire("mutex", "deaf");
  await until(() => other.isSubscribed);
  const waiting = other.acquire("mutex", "deaf", NEVER_POLLED);
  await isQueued("deaf", admin);
  await admin.acl("SETUSER", "listener", "resetchannels"); // ends the connection that listens
  await until(() => !other.isSubscribed);
  await holder.release();
  await (await within(5000, waiting)).release();
});

test("endless_wait_has_no_timer", async (t) => {
  const delays = [];
  const { setTimeout: start } = globalThis;
  t.mock.method(globalThis, "setTimeout", (action, delay, ...rest) => {
    delays.push(delay);
    return start(action, delay, ...rest);
  });
  const lease = await client.acquire("mutex", "endless", { timeout: Infinity });
  assert.equal(await lease.release(), true);
  assert.ok(delays.length > 0);
  assert.ok(Math.max(...delays) <= 60_000, inspect(delays)); // 24.8 days are not "for ever"
});

async function startCluster() {
  const servers = [];
  for (let index = 0; index < 3; index += 1) {
    servers.push(await startServer("--cluster-enabled", "yes", "--cluster-node-timeout", "2000"));
  }
  const nodes = servers.map(({ port }) => open(port));
  for (const [index, node] of nodes.entries()) {
    const [first, last] = [Math.floor((index * 16384) / 3), Math.floor(((index + 1) * 16384) / 3)];
    const slots = Array.from({ length: last - first }, (_, offset) => first + offset);
    await node.cluster("ADDSLOTS", ...slots);
    await node.cluster("SET-CONFIG-EPOCH", index + 1);
    if (index > 0) await node.cluster("MEET", "127.0.0.1", servers[0].port);
  }
  for (const node of nodes) {
    await until(async () => (await node.cluster("INFO")).includes("cluster_state:ok"), 15_000);
    await until(
      async () => (await node.cluster("NODES")).match(/connected/g)?.length === 3,
      15_000,
    );
  }
  return servers;
}

test("cluster_grants_and_notifies_across_nodes", async (t) => {
  const servers = await startCluster().catch((error) => t.skip(`no cluster: ${error.message}`));
  if (!servers) return;
  const [first] = servers;
  const cluster = new Cluster([{ host: "127.0.0.1", port: first.port }], {});
  undoLater(() => cluster.disconnect());
  const [near, far] = [openClient(cluster), openClient(cluster)];
  assert.match(far.channel, /^lock:wake:[0-9a-f]{32}~$/);
  for (const name of ["a", "b", "c", "d", "e", "f"]) {
    const holder = await near.acquire("write", name, NEVER_POLLED);
    const waiting = far.acquire("write", name, NEVER_POLLED);
    await isQueued(name, cluster);
    assert.equal(await holder.release(), true);
    const lease = await within(5000, waiting);
    assert.ok(lease.token > holder.token);
    assert.equal(await lease.downgrade(), true);
    assert.equal(await lease.release(), true);
    assert.equal(await cluster.exists(`lock:${name}`), 0);
  }
  const worker = await openWorker({ url: `redis://127.0.0.1:${first.port}`, topology: "cluster" });
  const command = {
    do: "acquire",
    kind: "mutex",
    name: "g",
    ttl_ms: 3000,
    limit_ms: 5000,
    as: "h",
  };
  assert.equal((await worker.ask(command)).ok, true);
  assert.deepEqual(await worker.ask({ do: "release", as: "h" }), { ok: true, held: true });

  // Killed connections: requests and the subscription find their way back.
  const holder = await near.acquire("mutex", "cut", NEVER_POLLED);
  const waiting = far.acquire("mutex", "cut", NEVER_POLLED);
  await isQueued("cut", cluster);
  const channels = async () =>
    (await Promise.all(cluster.nodes("master").map((node) => node.pubsub("CHANNELS")))).flat();
  for (const type of ["pubsub", "normal"]) {
    for (const node of cluster.nodes("master"))
      await node.client("KILL", "TYPE", type, "SKIPME", "yes");
  }
  await until(async () => (await channels()).includes(far.channel));
  assert.equal(await holder.release(), true);
  await (await within(5000, waiting)).release();
});

/** A master, its replica, a sentinel, and a connection that asks the sentinel. */
async function startSentinel() {
  const master = await startServer();
  const replica = await startServer("--replicaof", "127.0.0.1", master.port);
  const probe = open(replica.port);
  await until(
    async () => (await probe.info("replication")).includes("master_link_status:up"),
    15_000,
  );
  const config = join(folder, `sentinel-${master.port}.conf`);
  const lines = [
    `sentinel monitor main 127.0.0.1 ${master.port} 1`,
    "sentinel down-after-milliseconds main 500",
    "sentinel failover-timeout main 5000",
  ];
  writeFileSync(config, lines.join("\n"));
  const sentinel = await startServer(config, "--sentinel");
  const watcher = open(sentinel.port);
  await until(async () => (await watcher.sentinel("REPLICAS", "main")).length === 1, 15_000);

  const connection = new Redis({
    sentinels: [{ host: "127.0.0.1", port: sentinel.port }],
    name: "main",
  });
  connection.on("error", () => {});
  undoLater(() => connection.disconnect());
  return { master, probe, watcher, connection };
}

test("sentinel_leads_to_the_new_master", async () => {
  const { master, probe, connection } = await startSentinel();
  const [near, far] = [openClient(connection), openClient(connection)];
  const before = await near.acquire("mutex", "ha", { ttl: 3000 });
  await master.stop();
  const lease = await within(60_000, near.acquire("mutex", "other", NEVER_POLLED));
  assert.ok(lease.token > before.token);
  assert.equal(await probe.get("lock:other"), lease.owner); // at the former replica
  await until(() => far.isSubscribed && near.isSubscribed);
  const waiting = far.acquire("mutex", "other", NEVER_POLLED);
  await isQueued("other", probe);
  assert.equal(await lease.release(), true);
  await (await within(5000, waiting)).release();
});

test("replaced_master_that_still_answers_is_left", async () => {
  const { master, probe, watcher, connection } = await startSentinel();
  const near = openClient(connection);
  await (await near.acquire("mutex", "before")).release();
  // The sentinel cannot say to the old master that it was replaced.
  await open(master.port).acl("SETUSER", "default", "-slaveof", "-replicaof");
  const failOver = () => watcher.call("SENTINEL", "FAILOVER", "main").catch(() => "");
  await until(async () => (await failOver()) === "OK", 30_000); // once it knows the replica well
  await until(async () => (await probe.role())[0] === "master", 60_000);
  await until(async () => {
    const lease = await near.acquire("mutex", "after");
    const isThere = await probe.exists("lock:after"); // at the former replica
    await lease.release();
    return isThere === 1;
  }, 60_000);
});

/** Runs the vectors of a file through the client's own `send`. */
async function runVectors(file, plain, sender) {
  const lines = readFileSync(new URL(file, VECTORS), "utf8").trimEnd().split("\n");
  for (const vector of lines.map((line) => JSON.parse(line))) {
    const [names, messages] = [{}, []];
    const news = open(plain.options.port, { protocol: 2, lazyConnect: true });
    news.on("message", (_, message) => messages.push(message));
    const fill = (_, name, by) => (by ? Number(names[name]) + Number(by) : names[name]);
    await plain.flushall();
    const repeat = (step) => Array(step.times ?? 1).fill(step);
    for (const unfilled of [...vector.steps, ...vector.after].flatMap(repeat)) {
      const step = JSON.parse(JSON.stringify(unfilled).replace(/\$(\w+)([+-]\d+)?/g, fill));
      let got = null;
      if (step.time) names[step.time] = await plain.time().then(([s, us]) => s * 1e6 + Number(us));
      if (step.wait) await sleep(step.wait);
      if (step.subscribe) await news.subscribe(step.subscribe);
      for (let wait = 0; step.message && wait < 200 && !messages.length; wait += 1) await sleep(5);
      if (step.message) got = messages.shift() ?? null;
      if (step.command) got = await plain.call(...step.command).catch((error) => error);
      if (step.run) got = await sender.send(step.run, step.keys, step.args).catch((error) => error);
      const message = `${file}: ${vector.name}: ${inspect(step)} answered ${inspect(got)}`;
      assert.ok(isEqual(step.answer ?? {}, got, names), message);
    }
    news.disconnect();
  }
}

function isEqual(want, got, names) {
  const hasEqual = (each, index) => isEqual(each, got[index], names);
  const isList = Array.isArray(got) && got.length === want?.length;
  if (Array.isArray(want)) return isList && want.every(hasEqual);
  // ioredis 6.0.0 reads integers above 2^53 - 58 as one more.
  if (got > 2 ** 53 - 58 && Number(want) === got - 1) return true;
  if (typeof want === "string") return String(got) === want;
  if (want === null || typeof want !== "object") return got === want;
  if (want.bind) names[want.bind] = got;
  const { min, max, error = false, begins = "" } = want;
  if (!String(got).startsWith(begins)) return false;
  const isInRange = (min ?? got) <= got && got <= (max ?? got);
  const isInteger = Number.isInteger(got) || (min ?? max) === undefined;
  return got instanceof Error === error && isInteger && isInRange;
}

test("conformance_vectors_give_their_answers", { concurrency: 5 }, async (t) => {
  const files = readdirSync(VECTORS).filter((name) => name.endsWith(".jsonl"));
  const run = async (file) => {
    const { port } = await startServer();
    const plain = open(port, { protocol: 2 });
    await runVectors(file, plain, openClient(plain));
  };
  await Promise.all(files.map((file) => t.test(file, () => run(file))));
});

test("no_lock_and_no_waiter_is_left_behind", async () => {
  await until(async () => {
    const keys = await redis.keys("*");
    const locks = keys.filter((key) => key.startsWith("lock:"));
    const queues = keys.filter((key) => key.endsWith("}:waiters"));
    const counts = queues.map((key) => redis.zcount(key, "-inf", "(4503599627370496"));
    return locks.length === 0 && (await Promise.all(counts)).every((count) => count === 0);
  });
  // -2: it has expired since.
  for (const key of await redis.keys("{lock:*")) assert.notEqual(await redis.pttl(key), -1, key);
});
