// Locks on Redis and Valkey: the protocol of ../../README.md, levels 1 to 6. Times are in ms.
import { randomBytes } from "node:crypto";
import { existsSync, readFileSync } from "node:fs";
import { uptime } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { inspect } from "node:util";

const HERE = new URL("./", import.meta.url); // has the scripts if it is a package
const SCRIPTS = existsSync(new URL("mutex.lua", HERE)) ? HERE : new URL("../../", HERE);
const FILES = ["mutex", "reentrant", "rwlock", "node", "fenced"];
const KINDS = ["mutex", "reentrant", "read", "write"];
const REQUEST_TIMEOUT = 5000; // or a quarter of what is left of the lease, if that is less
const TEST_TIMEOUT = 1000; // for a connection, and for the answers on the subscription
const POLL = 100; // the pause of a waiter that cannot be notified
const TOKEN_STEP = 5_000_000; // µs; each raise of min_token slows the next acquire of every lock
const UPTIME_STEP = existsSync("/proc/uptime") ? 10 : 1000; // of os.uptime()
const MIN_TTL = UPTIME_STEP + 90; // a shorter one would have ended before its grant arrives
const TRANSIENT = new RegExp("OOM|NOREPLICAS|MISCONF|READONLY|LOADING|BUSY|MASTERDOWN|CLUSTERDOWN"
  + "|TRYAGAIN|max number of clients");
const isFinal = (error) => error?.name === "ReplyError" && !TRANSIENT.test(error.message);
const clip = (ms) => Math.min(ms, 2 ** 31 - 1); // a timer with a longer delay fires at once
const WRITTEN = "what another program wrote; use another name, or delete the key if unused";
const REFUSALS = {
  "-1": ["ended", "the server has ended this attempt; acquire the lock again"],
  "-2": ["wrong_type", `the key holds another kind of lock, or ${WRITTEN}`],
  "-3": ["wrong_type", `the key has no TTL, so it holds no lock, but ${WRITTEN}`],
  "-4": ["too_deep", "the owner holds it as often as it may; release a hold first"],
  "-5": ["malformed", "the server refused a word; take the scripts and this file of one version"],
  "-6": ["would_deadlock", "another reader waits to write; release the hold for reading first"],
  "-7": ["too_many_readers", "as many readers as it may have hold it or wait; try later"],
};
const UNKNOWN = ["unavailable", "no script answers so; look for a proxy or another version"];

// No acquire is sent later or again, since its attempt may have ended. CLIENT is not in the ACL.
const ONCE = { enableOfflineQueue: false, maxRetriesPerRequest: 0, enableAutoPipelining: false };
const PLAIN = { keyPrefix: "", stringNumbers: false, lazyConnect: false, disableClientInfo: true };
const retryStrategy = (times) => Math.min(times * 50, 1000);
const reconnectOnError = (error) => error.message.includes("READONLY"); // from a demoted master
const CONNECT = { connectTimeout: TEST_TIMEOUT, retryStrategy, reconnectOnError };
const LIMITS = { socketTimeout: REQUEST_TIMEOUT, ...CONNECT }; // the subscription inherits them
const WATCHED = { socketTimeout: TEST_TIMEOUT, retryStrategy: null, enableOfflineQueue: true };

/** `code`: of REFUSALS, or "timed_out", "lost", "closed", "unavailable", "bad_name". */
export class LockError extends Error {
  constructor(code, lock, text, cause) {
    super(`lock ${JSON.stringify(lock)}: ${text}`, { cause });
    Object.assign(this, { name: "LockError", code });
  }
}

/** Of a host with two addresses, Node has an error for each, and only a code for both. */
const reasonOf = (error) => error.message || String(error.code ?? error);

/** Measures time. Only os.uptime() counts while the machine is suspended, and only in steps. */
function stopwatch() {
  const [now, up] = [performance.now(), uptime()];
  return () => Math.max(performance.now() - now, (uptime() - up) * 1000 + UPTIME_STEP);
}

/** Names the first rule that is not met. */
function demand(code, lock, rules) {
  const broken = rules.find(([isMet]) => !isMet);
  if (broken) throw new LockError(code, lock, `${broken[1]}, not ${inspect(broken[2])}`);
}

/** The keys of a lock, in one slot. Other names could share a key with another lock. */
export function lockKeys(name, prefix = "lock:") {
  const lock = prefix + name;
  const hasTag = /^[^{]*\{[^}]+\}/.test(lock);
  const reserved = /^\{[^}]+\}$|\{\}node$|:(fence|waiters)$/;
  const isTooLong = Buffer.byteLength(prefix) > 128 || Buffer.byteLength(`${name}`) > 512;
  demand("bad_name", name, [
    [typeof name === "string" && name !== "", "a name must be a text and not empty", name],
    [!isTooLong, "a name must have at most 512 bytes, and a prefix 128", lock],
    [lock.isWellFormed(), "a key must be well-formed Unicode", lock],
    [hasTag || !lock.includes("}"), 'a key with "}" must have a hash tag, as "{a}b"', lock],
    [!hasTag || !reserved.test(lock), "a key with a hash tag must be no other lock's", lock],
  ]);
  const base = hasTag ? lock : `{${lock}}`;
  return [lock, `${base}:waiters`, `${base}:fence`];
}

/** Names the argument and its rule. The server answers only -5, and a wrong kind has no script. */
function check(name, kind, { owner, signal, ttl = MIN_TTL, timeout = 0, claim = 1 }) {
  const isTime = (ms, least, most) => Number.isInteger(ms) && ms >= least && ms <= most;
  const isNone = kind === "mutex" || (kind !== "reentrant" && (owner ?? "") === "");
  // Half of a surrogate pair is sent as U+FFFD, as any other: two owners were one.
  const isText = typeof owner === "string" && owner.isWellFormed() && /^(?!:)[^ ]+$/.test(owner);
  const isReserved = kind === "reentrant" && owner === "mode"; // a field of that hash
  const isOwner = isText && !isReserved && Buffer.byteLength(owner) <= 256;
  const ownerRule = 'owner must be well-formed, 1 to 256 bytes without a space, not ":…" or "mode"';
  const isLimit = typeof timeout === "number" && timeout >= 0;
  const ttlRule = `ttl must be an integer from ${MIN_TTL} to 9999999999 ms`;
  const isSignal = typeof signal?.addEventListener === "function" && "aborted" in signal;
  const rules = [
    [KINDS.includes(kind), `kind must be one of ${KINDS.join(", ")}`, kind],
    [isTime(ttl, MIN_TTL, 9_999_999_999), ttlRule, ttl],
    [isTime(claim, 1, 60_000), "claim must be an integer from 1 to 60000 ms", claim],
    [isLimit, "timeout must be a number of ms, at least 0", timeout],
    [isNone || isOwner, ownerRule, owner],
    // Others threw where nothing caught it: the call never settled.
    [(signal ?? null) === null || isSignal, "signal must be an AbortSignal", signal],
  ];
  demand("malformed", name, rules);
}

/** An attempt: resolves to its lease, or to null if the lock is busy and `claim` is empty. */
function obtain(client, kind, keys, options, start = performance.now()) {
  const { signal, ttl = 30_000, timeout = Infinity, claim = Math.min(ttl, 3000) } = options;
  const owner = options.owner ?? "";
  const [script, acquire] = /^(read|write)$/.test(kind) ? ["rwlock", kind] : [kind, "acquire"];
  const id = randomBytes(16).toString("hex"); // the same in all requests, like claim and channel
  const head = kind === "mutex" ? [id] : [id, owner]; // words of the lock come before shared ones
  const lost = new AbortController();
  let [queue, queuedAt, elapsed] = [[], "", () => Infinity]; // queue: claim and channel
  let isOver, isLate, isUncertain, nap, released, timer, alarm;
  let failure = new Error("Redis has not answered"); // else a hang looked like a lock in use

  const name = keys[0].slice(client.prefix.length);
  const fail = (code, text, cause) => new LockError(code, name, text, cause);
  const refuse = (answer) => {
    const [code, text] = REFUSALS[answer] ?? UNKNOWN;
    return fail(code, `${text} (${kind}, key ${JSON.stringify(keys[0])}, answer ${answer})`);
  };
  const unavailable = (error) => fail("unavailable", reasonOf(error), error);
  const call = (limit, ...words) =>
    client.send(script, keys, words, limit).then((list) => list[0] ?? list);
  const callRelease = (...rest) =>
    call(limit, "release", ...head, "", client.minToken(), ...rest);
  const limit = Math.max(ttl / 4, POLL);
  const left = () => ttl * 0.99 - 2 - elapsed(); // 1 % for drift, 2 ms for rounding
  const isValid = () => !isOver && left() > 0;
  const wake = () => nap?.abort();
  const renew = () => prolong("renew");
  const downgrade = () => prolong("downgrade", client.minToken());
  const release = () => (released ??= isValid() ? giveBack() : renew()); // false: it was lost
  const lease = { owner: owner || id, signal: lost.signal, isValid, renew, downgrade, release };

  async function run() {
    if (!claim) await client.tried;
    if (!claim && client.failure) throw unavailable(client.failure);
    await client.ready;
    if (claim) queue = [claim, client.isSubscribed ? client.channel : ""];
    while (!isOver) {
      nap = new AbortController();
      const sent = stopwatch(); // a lease counts from before its request left
      const words = [queuedAt, "", ttl, client.minToken(), ...queue]; // "": no proposal
      const answer = await call(limit, acquire, ...head, ...words).catch((error) => {
        // It may have run, and may yet run. An error reply says that nothing was done: a refused
        // call sent releases, each of which was refused and reported, for a whole TTL.
        isUncertain ||= error.name !== "ReplyError" || client.isCluster;
        failure = client.refusal ?? error; // that of a long request does not name the password
        if (!claim || isFinal(failure) || client.isClosed) throw unavailable(failure);
        return [POLL, 0];
      });
      if (answer < 0) throw refuse(answer);
      if (!Array.isArray(answer)) {
        [lease.token, elapsed] = [answer, sent];
        isLate = !isOver && left() <= 0; // the machine was suspended
        if (!isValid()) return null;
        keep();
        watch();
        return lease;
      }
      if (!claim) return null;
      client.minToken(answer[1]);
      if (answer[1]) failure = undefined; // the server answers again
      queuedAt ||= answer[1] || "";
      const pause = Math.min(answer[0], claim / 2, queue[1] && client.isSubscribed ? claim : POLL);
      await sleep(Math.max(pause, 1), undefined, { signal: nap.signal }).catch(() => {});
    }
  }

  /** Renews a third of the TTL after the last request left; soon if that was not answered. */
  function keep() {
    const pause = Math.max(ttl / 3 - elapsed(), Math.min(ttl / 30, 1000));
    const again = () => !isOver && keep();
    timer = setTimeout(() => renew().catch(client.onError).then(again), clip(pause));
  }

  /** Reports the loss at the deadline, also while a renewal hangs; timers pause in suspension. */
  function watch() {
    if (isValid()) alarm = setTimeout(watch, Math.min(left() + 1, 1000));
    else renew();
  }

  async function prolong(verb, ...minToken) {
    if (verb === "downgrade" && kind !== "write")
      throw fail("malformed", `only a write lock can be downgraded, not ${kind}`);
    const sent = stopwatch();
    const answer = isValid() ? await call(left() / 4, verb, ...head, ttl, ...minToken) : 0;
    if (answer === -5) throw refuse(answer);
    if (answer > 0 && isValid()) {
      client.minToken(answer);
      if (sent() < elapsed()) elapsed = sent;
    } else if (!isOver) {
      client.background(end());
      lost.abort(fail("lost", "the lease has expired or was revoked"));
    }
    return isValid();
  }

  async function giveBack() {
    const late = sleep(REQUEST_TIMEOUT, undefined, { ref: false });
    const answer = await Promise.race([client.background(end()), late]);
    if (answer === undefined) throw fail("unavailable", "its release continues without an answer");
    return answer > 0;
  }

  /** Ends the attempt, and releases until answered. */
  async function end() {
    isOver = true;
    clearTimeout(timer);
    clearTimeout(alarm);
    setTimeout(() => client.attempts.delete(id), queuedAt ? 60_000 : 0).unref(); // see `notify`
    const mayHold = lease.token !== undefined || queuedAt || isUncertain;
    const until = performance.now() + (mayHold ? Math.max(ttl, claim) : 0); // nothing is left then
    while (performance.now() < until) {
      // With a mark, it refuses late requests, and is answered in the same way twice.
      const answer = await callRelease(1, ...queue).catch(client.onError);
      if (answer !== undefined || client.isClosed) return answer;
      await sleep(POLL);
    }
  }

  async function settle(resolve, reject) {
    const cancel = (reason) => {
      if (timer) return; // it is held
      isOver = true;
      reject(reason);
      wake();
    };
    const expire = () => {
      const cause = client.failure ?? failure;
      const last = cause ? `; last failure: ${reasonOf(cause)}` : "";
      // A try ends with any answer: its limit passes only if there is none.
      cancel(fail(claim ? "timed_out" : "unavailable", `not within ${timeout} ms${last}`, cause));
    };
    // Without a limit, a wait ended after the longest delay of a timer, 24.8 days.
    const delay = start + timeout - performance.now();
    const expiry = delay < Infinity ? setTimeout(expire, clip(delay)) : undefined;
    const abort = () => cancel(signal.reason);
    signal?.addEventListener("abort", abort);
    if (signal?.aborted) abort();
    // A message for an attempt that has ended: a failover has revived it, or it is being released.
    const notify = () => (isOver ? client.background(callRelease()) : wake());
    // A lease that `close` left alone kept its timers: the process ended only after a TTL.
    const close = () => {
      const closed = fail("closed", "client closed");
      if (!timer) return cancel(closed);
      if (isOver) return; // released or lost before
      client.background(release());
      lost.abort(closed);
    };
    client.attempts.set(id, { notify, close, poll: wake });
    const granted = await run().catch(reject);
    clearTimeout(expiry);
    signal?.removeEventListener("abort", abort);
    resolve(isLate && !isOver ? obtain(client, kind, keys, options, start) : granted);
    if (!timer) await end();
  }

  return new Promise((...callbacks) => client.background(settle(...callbacks)));
}

/** A client of one server, Sentinel or cluster, with one subscription for all of its locks. */
export class Redlatch {
  attempts = new Map(); // that wait or hold, and for a minute those that were queued
  isSubscribed = false;
  isClosed = false;
  refusal; // an error that does not pass, until TIME is answered
  #isClosing = false;
  #failure; // the last one of a connection
  #offset = 0;
  #tasks = new Set();
  #sent = new Map(); // by an unanswered request: when it was sent
  #roundTrip = Infinity; // the shortest one of this path
  #redis;
  #subscriber;
  #start;
  ready = new Promise((resolve) => (this.#start = resolve));
  #onBroken = (error) => this.isClosed || this.onError(error); // `close` breaks those that begin

  /** Connects with the options of `redis`: a `Redis`, also with Sentinel, or a `Cluster`. */
  constructor(redis, { prefix = "lock:", scripts = SCRIPTS, onError = () => {} } = {}) {
    const { isCluster = false, options } = redis;
    if (options.keyPrefix || options.redisOptions?.keyPrefix)
      throw new TypeError("ioredis must have no keyPrefix: use the option `prefix` of Redlatch");
    // Without a detector, a client that still reaches a replaced master stays there.
    const failsOver = Boolean(options.sentinels);
    const own = {
      ...ONCE, ...PLAIN, ...LIMITS, enableReadyCheck: failsOver, failoverDetector: failsOver,
    };
    const redisOptions = { ...options.redisOptions, ...own };
    const cluster = { ...own, enableOfflineQueue: true, scaleReads: "master", redisOptions };
    const channel = `${prefix.replace(/\s/g, "_")}wake:${randomBytes(16).toString("hex")}`;
    Object.assign(this, { prefix, scripts, isCluster, failsOver: isCluster || options.sentinels });
    this.channel = isCluster ? `${channel}~` : channel;
    // One that threw ended the renewals of a lease, since they continue after its report.
    this.onError = (error) => {
      try {
        onError(error);
      } catch (thrown) {
        console.error(thrown);
      }
    };
    // All at once and first: a script that is missing later would look like an outage for ever.
    const read = (file) => readFileSync(new URL(`${file}.lua`, this.scripts), "utf8");
    const sources = FILES.map(read);
    this.#redis = isCluster ? redis.duplicate([], cluster) : redis.duplicate(own);
    sources.forEach((lua, index) => this.#redis.defineCommand(FILES[index], { lua }));
    this.#redis.on("error", (error) => {
      this.#failure = error;
      if (isFinal(error)) this.#refuse(error); // a wrong password
      this.#onBroken(error);
    });
    // With a detector, it ends for ever if the master is replaced while it connects.
    const revive = () => this.isClosed || this.#redis.connect().catch(() => {}); // "error" has it
    if (failsOver) this.#redis.on("end", () => setTimeout(revive, 50));
    // What only tries must not wait for a server that refuses connections.
    this.tried = Promise.race([this.ready, new Promise((on) => this.#redis.once("error", on))]);
    this.#redis.on("close", () => this.#subscriber?.disconnect()); // it follows to the new master
    this.#listen();
  }

  /** Why there is no connection. */
  get failure() {
    return this.#redis.status === "ready" ? undefined : this.#failure;
  }

  /** Waits for a lock; `kind`: "mutex", "reentrant" (needs `owner`), "read" or "write". */
  async acquire(kind, name, options = {}) {
    if (options.timeout !== 0) return obtain(this, kind, this.#keys(kind, name, options), options);
    const lease = await this.tryAcquire(kind, name, options); // without this, none was asked for
    if (!lease) throw new LockError("timed_out", name, "in use");
    return lease;
  }

  async tryAcquire(kind, name, options = {}) {
    const tried = { ...options, claim: "" };
    tried.timeout ||= REQUEST_TIMEOUT;
    return obtain(this, kind, this.#keys(kind, name, options), tried);
  }

  #keys(kind, name, options) {
    const keys = lockKeys(name, this.prefix);
    check(name, kind, options);
    if (this.#isClosing) throw new LockError("closed", name, "client closed");
    return keys;
  }

  /** Sends a script, by SHA1 or source. `words`: a verb, those of each lock, those of the call. */
  async send(script, keys, words, limit = Infinity) {
    const isWord = (word) => /^(string|number)$/.test(typeof word) || word instanceof Uint8Array;
    const all = [...keys, ...words];
    const odd = all.findIndex((word) => !isWord(word));
    demand("malformed", keys[0], [
      [FILES.includes(script), `script must be one of ${FILES.join(", ")}`, script],
      // ioredis sends {} as "[object Object]" and null as "", which a fenced write stored.
      [odd < 0, "a key or word must be a string, a number or a Buffer", all[odd]],
    ]);
    const sent = all.map((word) => (word instanceof Uint8Array ? Buffer.from(word) : word));
    const ms = Math.max(1, Math.min(limit, REQUEST_TIMEOUT));
    let timer;
    const late = new Promise((_, reject) => {
      const error = new Error(`${words[0]} was not answered within ${Math.round(ms)} ms`);
      const expire = () => reject(error, this.#replaceSilent());
      timer = setTimeout(setImmediate, ms, expire); // after what has arrived in a blocked process
    });
    const reply = this.#time(() => this.#redis[script](keys.length, ...sent));
    return Promise.race([reply, late]).finally(() => clearTimeout(timer));
  }

  #nodes() {
    return this.isCluster ? this.#redis.nodes("master") : [this.#redis];
  }

  async #time(request) {
    const sent = performance.now();
    this.#sent.set(request, sent);
    try {
      const answer = await request();
      this.#roundTrip = Math.min(this.#roundTrip, performance.now() - sent);
      return answer;
    } finally {
      this.#sent.delete(request);
    }
  }

  /** Closes connections with unanswered requests: ioredis opens new ones. */
  #replaceSilent() {
    // Where a round trip takes 120 ms, a TTL of 300 ms, which has limits of 100 ms, closed the
    // connection of all leases again and again: a lease with 6 s was lost.
    const [sent = Infinity] = this.#sent.values(); // of the oldest request
    const silence = performance.now() - sent + 1; // a timer may be early
    // At most: one that is silent from its start has none, and was left to the socket's timeout.
    if (silence < Math.max(POLL, Math.min(2 * this.#roundTrip, TEST_TIMEOUT))) return;
    const silent = this.#nodes().filter(({ commandQueue }) => commandQueue.length > 0);
    for (const { stream } of silent) stream?.destroy();
  }

  /** The min_token: the largest server time and, with failovers, what has passed; in steps. */
  minToken(seen = 0) {
    const now = this.failsOver ? performance.now() * 1000 : 0;
    this.#offset = Math.max(this.#offset, seen - now);
    return Math.floor((now + this.#offset) / TOKEN_STEP) * TOKEN_STEP;
  }

  /** Keeps a promise for `close`. Its failure is only reported. */
  background(promise) {
    const task = promise.catch(this.onError).finally(() => this.#tasks.delete(task));
    this.#tasks.add(task);
    return task;
  }

  /** Cancels waiters, releases leases, waits for that for `timeout` at most, and disconnects. */
  async close(timeout = 5000) {
    this.#isClosing = true;
    this.#start();
    for (const { close } of this.attempts.values()) close();
    // Each ends by itself. The message that its lock was handed to it came after the connection had
    // ended, and was answered by a release, which failed.
    this.attempts.clear();
    await Promise.race([Promise.all(this.#tasks), sleep(clip(timeout), undefined, { ref: false })]);
    this.isClosed = true;
    this.#redis.disconnect();
    this.#subscriber?.disconnect();
  }

  /** Without a password or the right to TIME, calls waited for ever: they fail by this error. */
  #refuse(error) {
    this.refusal = error;
    this.#start();
  }

  /** Keeps a subscription, in a cluster at any node. Each new one may be at another server. */
  async #listen() {
    const setSubscribed = (isSubscribed) => {
      this.isSubscribed = isSubscribed;
      for (const { poll } of this.attempts.values()) poll(); // messages may have been lost
    };
    const confirm = () => setSubscribed(true);
    const notify = (id) => this.attempts.get(id)?.notify();
    const report = (error) => {
      if (!isFinal(error)) return; // not connected
      if (error.message !== this.refusal?.message) this.onError(error);
      this.#refuse(error);
    };
    while (!this.isClosed) {
      await sleep(50);
      const nodes = this.#nodes();
      const node = nodes.at(Math.random() * nodes.length);
      if (!node) continue;
      this.#roundTrip = Infinity; // the new path may be longer
      const time = await this.#time(() => node.time()).catch(report);
      if (!time || this.isClosed) continue;
      this.refusal = undefined;
      this.minToken(time[0] * 1e6 + Number(time[1]));
      const subscriber = node.duplicate(WATCHED);
      const ping = setInterval(() => subscriber.ping().catch(() => {}), 5_000);
      subscriber.on("error", this.#onBroken);
      subscriber.on("message", (_, text) => text.split(" ", 1)[0].split(",").forEach(notify));
      subscriber.subscribe(this.channel).then(confirm, this.#onBroken).then(this.#start);
      this.#subscriber = subscriber;
      await new Promise((resolve) => subscriber.on("end", resolve));
      clearInterval(ping);
      this.#subscriber = undefined; // each further disconnect() would add a listener
      setSubscribed(false); // no message wakes who sleeps for half a claim now
    }
  }
}
