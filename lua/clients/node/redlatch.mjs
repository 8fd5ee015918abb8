// Locks on Redis and Valkey: the protocol of ../../README.md, levels 1 to 6. Times are in ms.
import { createHash, randomBytes } from "node:crypto";
import { existsSync, openSync, readFileSync, readSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

const SCRIPTS = new URL("../../", import.meta.url);
const REQUEST_TIMEOUT = 5000; // a connection that answers nothing for this long is closed
const MAX_DELAY = 2 ** 31 - 1; // a longer setTimeout fires at once
const TOKEN_STEP = 5000; // each raise of min_token slows the next acquire of every lock
const TRANSIENT = /OOM|NOREPLICAS|MISCONF|READONLY|LOADING|BUSY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN/;
const REFUSALS =
  ",ended,wrong_type,wrong_type,too_deep,malformed,would_deadlock,too_many_readers".split(",");

// ioredis must not send an acquire later or again: the attempt may have ended meanwhile.
const NO_REPEATS = { autoResendUnfulfilledCommands: false, maxRetriesPerRequest: 0 };
const CONNECTION = {
  ...{ ...NO_REPEATS, enableOfflineQueue: false, enableAutoPipelining: false, lazyConnect: false },
  ...{ keyPrefix: "", stringNumbers: false, disableClientInfo: true }, // CLIENT is not in the ACL
  socketTimeout: REQUEST_TIMEOUT,
  retryStrategy: (times) => Math.min(times * 50, 1000),
  reconnectOnError: (error) => error.message.includes("READONLY"), // from a demoted master
};

/** `code`: one of REFUSALS, or "timed_out", "lost", "closed", "unavailable", "bad_name". */
export class LockError extends Error {
  constructor(code, lock, text, cause) {
    super(`lock ${JSON.stringify(lock)}: ${text}`, { cause });
    Object.assign(this, { name: "LockError", code });
  }
}

// Deadlines need a clock that counts while the machine is suspended: on Linux /proc/uptime, in
// steps of 10 ms. Elsewhere, a lease also ends when the wall clock moves against Node's clock.
const uptime = existsSync("/proc/uptime") ? openSync("/proc/uptime") : undefined;
function clock() {
  const now = performance.now();
  if (uptime === undefined) return { now, offset: Date.now() - now, margin: 1000 };
  const text = Buffer.alloc(32);
  readSync(uptime, text, 0, 32, 0);
  return { now: Number.parseFloat(text.toString()) * 1000, offset: 0, margin: 10 };
}

/** The keys of a lock, in one slot. Other names could share a key with another lock. */
export function lockKeys(name, prefix = "lock:") {
  const lock = prefix + name;
  const tag = /^[^{]*\{[^}]+\}/.test(lock);
  const reserved = tag && /^\{[^}]+\}$|\{\}node$|^[^{]*\{[^}]+\}.*:(fence|waiters)$/s.test(lock);
  const isTooLong = Buffer.byteLength(prefix) > 128 || Buffer.byteLength(name) > 512;
  if (!name || isTooLong || reserved || (!tag && lock.includes("}")) || !lock.isWellFormed()) {
    throw new LockError("bad_name", name, "not a lock name");
  }
  const base = tag ? lock : `{${lock}}`;
  return [lock, `${base}:fence`, `${base}:waiters`];
}

/** One attempt: resolves to its lease, or to null if the lock is busy and `claim` is empty. */
function obtain(client, kind, keys, { ttl, claim, timeout, signal, owner = "" }) {
  const isRwlock = kind === "read" || kind === "write";
  const [folder, acquire] = isRwlock ? ["rwlock", `${kind}_acquire`] : [kind, "acquire"];
  const [owners, depth] = kind === "mutex" ? [[], []] : [[owner], [""]];
  const id = randomBytes(16).toString("hex"); // the same in all requests, like claim and channel
  const lost = new AbortController();
  const fail = (code, text, cause) => new LockError(code, keys[0], text, cause);
  let [channel, queuedAt, deadline, wake] = ["", "", { at: 0 }, () => {}];
  let isOver, isUncertain, released, timer;

  async function send(verb, keys, ...args) {
    const answer = await client.send(`${folder}/${verb}`, keys, [id, ...args]);
    const isRefused = answer === -5 || (answer < 0 && verb === acquire);
    if (isRefused) throw fail(REFUSALS[-answer], `${folder}/${verb} answered ${answer}`);
    return answer;
  }

  const sendRelease = (...queue) => send("release", keys, ...owners, client.minToken, ...queue);

  /** Releases, leaves the queue, and makes the server refuse late requests: until answered. */
  async function giveUp(pause = 50, since = performance.now()) {
    const answer = await sendRelease(1, claim, channel).catch(client.onError);
    const isFutile = client.isClosed || performance.now() - since > Math.max(ttl, claim);
    if (answer !== undefined || isFutile) return answer;
    await sleep(pause);
    return giveUp(Math.min(pause * 2, 1000), since);
  }

  /** Releases a valid lease: without a mark, unless an acquire may arrive and be granted later. */
  async function releaseHeld() {
    if (isUncertain || client.isCluster) return giveUp();
    const first = await sendRelease().catch(client.onError);
    if (first !== undefined) return first;
    const second = await giveUp();
    return second === 0 ? 1 : second; // 0: the first one has released it
  }

  function end(release) {
    isOver = true;
    clearInterval(timer);
    setTimeout(() => client.attempts.delete(id), queuedAt ? 60_000 : 0).unref(); // see `notify`
    const mayHold = lease.token !== undefined || queuedAt || isUncertain;
    return mayHold && client.background(release());
  }

  function lose() {
    if (isOver) return false;
    end(giveUp);
    lost.abort(fail("lost", "the lease has expired or was revoked"));
    return false;
  }

  function isValid() {
    const { now, offset } = clock();
    return !isOver && now < deadline.at && Math.abs(offset - deadline.offset) < 1000;
  }

  /** A lease counts from before its request left, less 1 % for drift and 2 ms for rounding. */
  function extend(sent) {
    const at = sent.now + ttl * 0.99 - 2 - sent.margin;
    if (at > deadline.at) deadline = { at, offset: sent.offset };
  }

  async function prolong(verb, keys, ...args) {
    const sent = clock();
    const answer = isValid() ? await send(verb, keys, ttl, ...owners, ...args) : 0;
    if (answer <= 0 || !isValid()) return lose();
    client.observe(answer);
    extend(sent);
    return true;
  }

  async function release() {
    if (!isValid()) return lose();
    const answer = await Promise.race([
      end(releaseHeld),
      sleep(REQUEST_TIMEOUT, undefined, { ref: false }),
    ]);
    if (answer === undefined) throw fail("unavailable", "no answer to its release; retries continue");
    return answer > 0;
  }

  const lease = {
    owner: owner || id,
    signal: lost.signal, // aborted when the lease is lost
    isValid,
    renew: () => prolong("renew", keys.slice(0, 1)),
    async downgrade() {
      if (kind !== "write") throw new TypeError("only a write lock can be downgraded");
      return prolong("downgrade", keys, client.minToken);
    },
    release: () => (released ??= release()), // false: it was lost before
    [Symbol.asyncDispose]: () => lease.release(),
  };

  /** After an error, polls again; throws if the caller does not wait, or must repair something. */
  function postpone(error) {
    if (error instanceof LockError) throw error;
    isUncertain = true; // it may have run, and may yet run
    const isFinal = error.name === "ReplyError" && !TRANSIENT.test(error.message);
    if (!claim || isFinal || client.isClosed) throw fail("unavailable", error.message, error);
    return [100, 0];
  }

  async function run() {
    await client.ready;
    if (claim && client.isSubscribed) channel = client.channel;
    while (!isOver) {
      const woken = new Promise((resolve) => (wake = resolve));
      const sent = clock();
      const queue = [client.minToken, claim, channel, ...depth, queuedAt];
      const answer = await send(acquire, keys, ttl, ...owners, ...queue).catch(postpone);
      if (!Array.isArray(answer)) {
        lease.token = answer;
        extend(sent);
        if (!isValid()) throw fail("timed_out", "granted after its deadline");
        const renew = () => lease.renew().catch(client.onError);
        timer = setInterval(renew, Math.min(ttl * 0.33, MAX_DELAY));
        return lease;
      }
      if (!claim) return null;
      client.observe(answer[1]);
      queuedAt ||= answer[1] || "";
      const pause = Math.min(answer[0], claim / 2, channel && client.isSubscribed ? claim : 100);
      const poll = setTimeout(wake, Math.max(pause, 1));
      await woken;
      clearTimeout(poll);
    }
  }

  return new Promise((resolve, reject) => {
    const cancel = (reason) => {
      if (timer) return; // it is held
      isOver = true;
      reject(reason);
      wake();
    };
    const abort = () => cancel(signal.reason);
    const late = fail("timed_out", `no lease within ${timeout} ms`);
    const limit = setTimeout(cancel, Math.min(timeout, MAX_DELAY), late);
    signal?.addEventListener("abort", abort);
    if (signal?.aborted) abort();
    // A message for an attempt that has ended: a failover has revived it, or it is being released.
    const notify = () => (isOver ? client.background(sendRelease()) : wake());
    client.attempts.set(id, { lock: keys[0], notify, cancel });
    const task = run()
      .then(resolve, reject)
      .finally(() => {
        clearTimeout(limit);
        signal?.removeEventListener("abort", abort);
        return timer || end(giveUp);
      });
    client.background(task);
  });
}

/** A client of one server, Sentinel or cluster, with one subscription for all of its locks. */
export class Redlatch {
  attempts = new Map(); // that wait or hold, and for a minute those that were queued
  isSubscribed = false;
  isClosed = false;
  #tasks = new Set();
  #scripts = new Map();
  #latest = { time: 0, at: 0 };
  #redis;
  #subscriber;
  #start;
  ready = new Promise((resolve) => (this.#start = resolve));

  /** Connects with the options of `redis`: a `Redis`, also with Sentinel, or a `Cluster`. */
  constructor(redis, { prefix = "lock:", scripts = SCRIPTS, onError = () => {} } = {}) {
    const { isCluster = false, options } = redis;
    const own = { ...CONNECTION, enableReadyCheck: Boolean(options.sentinels) }; // checks the role
    const cluster = { ...own, enableOfflineQueue: true, scaleReads: "master", redisOptions: own };
    Object.assign(this, { prefix, scripts, isCluster, failsOver: isCluster || options.sentinels });
    this.onError = (error) => void onError(error);
    const channel = `${prefix.replace(/\s/g, "_")}wake:${randomBytes(16).toString("hex")}`;
    this.channel = isCluster ? `${channel}~` : channel;
    this.#redis = isCluster ? redis.duplicate([], cluster) : redis.duplicate(own);
    this.#redis.on("error", this.onError);
    const follow = () => this.isClosed || this.#subscriber?.disconnect(); // to the new master
    this.#redis.on("close", follow);
    if (isCluster) this.#redis.on("+node", (node) => this.#greet(node));
    else this.#greet(this.#redis);
  }

  /** Waits for a lock; `kind`: "mutex", "reentrant" (needs `owner`), "read" or "write". */
  async acquire(kind, name, { ttl = 30_000, timeout = Infinity, ...options } = {}) {
    const all = { ttl, timeout, claim: Math.min(ttl, 3000), ...options };
    return obtain(this, kind, lockKeys(name, this.prefix), all);
  }

  /** Tries to get a lock; null: it is busy. */
  tryAcquire(kind, name, options) {
    return this.acquire(kind, name, { timeout: REQUEST_TIMEOUT, ...options, claim: "" });
  }

  /** Sends a script: by its SHA1, or with its source if the server does not know it. */
  async send(name, keys, args) {
    if (!this.#scripts.has(name)) {
      const source = readFileSync(new URL(`${name}.lua`, this.scripts));
      this.#scripts.set(name, { source, sha1: createHash("sha1").update(source).digest("hex") });
    }
    const script = this.#scripts.get(name);
    const words = [keys.length, ...keys, ...args];
    try {
      return await this.#redis.evalsha(script.sha1, ...words);
    } catch (error) {
      if (!error.message.startsWith("NOSCRIPT")) throw error;
    }
    if (script.loading) return script.loading.then(() => this.send(name, keys, args));
    const answer = this.#redis.eval(script.source, ...words);
    const loaded = () => (script.loading = undefined);
    script.loading = answer.then(loaded, loaded); // other requests wait for it
    return answer;
  }

  /** The least token to ask for: the largest server time seen, in steps. */
  get minToken() {
    const passed = this.failsOver ? performance.now() - this.#latest.at : 0;
    return this.#latest.time + Math.floor(passed / TOKEN_STEP) * TOKEN_STEP * 1000;
  }

  observe(time) {
    const isNext = time >= this.minToken + TOKEN_STEP * 1000;
    if (isNext) this.#latest = { time, at: performance.now() };
  }

  /** Keeps a promise for `close`; its failure is only reported. */
  background(promise) {
    const task = promise.catch(this.onError).finally(() => this.#tasks.delete(task));
    this.#tasks.add(task);
    return task;
  }

  /** Cancels waiters, waits for the releases under way, for `timeout` at most, and disconnects. */
  async close(timeout = 5000) {
    this.#start();
    for (const { lock, cancel } of this.attempts.values()) {
      cancel(new LockError("closed", lock, "the client was closed"));
    }
    await Promise.race([Promise.all(this.#tasks), sleep(timeout, undefined, { ref: false })]);
    this.isClosed = true;
    this.#redis.disconnect();
    this.#subscriber?.disconnect();
  }

  #greet(node) {
    node.on("ready", async () => {
      const [seconds, micros] = await node.time().catch(() => [0, 0]);
      this.observe(seconds * 1e6 + Number(micros));
      if (!this.#subscriber) this.#subscribe();
    });
  }

  #subscribe() {
    const retry = () => setTimeout(() => this.isClosed || this.#subscribe(), 100);
    const nodes = this.isCluster ? this.#redis.nodes("master") : [this.#redis];
    if (nodes.length === 0) return retry();
    const node = nodes[Math.floor(Math.random() * nodes.length)];
    const subscriber = node.duplicate({ retryStrategy: null, lazyConnect: false });
    const ping = setInterval(() => subscriber.ping().catch(() => {}), 10_000);
    subscriber.on("error", this.onError);
    subscriber.on("message", (_, message) => {
      const ids = message.split(" ", 1)[0].split(",");
      for (const id of ids) this.attempts.get(id)?.notify();
    });
    subscriber.on("ready", () => {
      const confirm = () => (this.isSubscribed = true);
      subscriber.subscribe(this.channel).then(confirm, this.onError).then(this.#start);
    });
    subscriber.on("end", () => {
      clearInterval(ping);
      this.isSubscribed = false;
      this.#start(); // waiters poll until the next subscription
      retry();
    });
    this.#subscriber = subscriber;
  }
}
