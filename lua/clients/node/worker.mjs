// Runs the commands of ../README.md: JSON lines on stdin, one JSON answer for each.
import { createInterface } from "node:readline";
import { Cluster, Redis } from "ioredis";
import { LockError, Redlatch } from "./redlatch.mjs";

const leases = new Map();
const clients = new Map(); // by the name of the client, or undefined

function connect(address, topology, resp) {
  const { hostname: host, port, username, password } = new URL(address);
  const node = { host, port: Number(port) };
  const user = { username: username || undefined, password: password || undefined };
  if (topology === "cluster") return new Cluster([node], { redisOptions: user });
  const name = topology?.match(/^sentinel:(.+)$/)?.[1];
  if (name) return new Redis({ sentinels: [node], name, ...user });
  // ioredis 5 speaks RESP2, whatever is asked for.
  return new Redis({ ...node, ...user, ...(resp ? { protocol: resp } : {}) });
}

function acquire({ client: from, kind, name, ttl_ms: ttl = 3000, limit_ms: timeout = 5000, owner }) {
  const { client } = clients.get(from);
  const options = { ttl, owner };
  if (timeout === 0) return client.tryAcquire(kind, name, options);
  return client.acquire(kind, name, { ...options, timeout });
}

function withLimit(promise, ms) {
  let timer;
  const expired = new Promise((resolve) => (timer = setTimeout(resolve, ms, false)));
  return Promise.race([promise, expired]).finally(() => clearTimeout(timer));
}

const CODES = ["wrong_type", "too_deep", "malformed", "would_deadlock", "too_many_readers"];
const ERRORS = { bad_name: "invalid_name", unavailable: "no_answer" };
for (const code of [...CODES, "timed_out", "lost"]) ERRORS[code] = code;

const commands = {
  async open({ client: key, url, topology, prefix, resp }) {
    const redis = connect(url, topology, resp);
    redis.on("error", (error) => console.error(error.message));
    const onError = (error) => console.error(error.message);
    const client = new Redlatch(redis, { prefix, onError });
    clients.set(key, { client, redis });
    if ((await withLimit(client.ready, 5000)) === false) throw new Error("no connection");
  },

  async acquire(command) {
    const lease = await acquire(command);
    if (!lease) return { ok: false, error: "timed_out" };
    leases.set(command.as, lease);
    return { token: lease.token };
  },

  release: async (command) => ({ held: await lease(command).release() }),
  renew: async (command) => ({ held: await lease(command).renew() }),
  downgrade: async (command) => ({ held: await lease(command).downgrade() }),
  is_valid: async (command) => ({ valid: lease(command).isValid() }),

  async lost(command) {
    const { signal } = lease(command);
    const { limit_ms: limit = 5000 } = command;
    const reported = new Promise((resolve) => signal.addEventListener("abort", resolve));
    const isLost = signal.aborted || (await withLimit(reported, limit));
    if (!isLost) return { ok: false, error: "timed_out" };
  },

  /** Adds one to a counter by GET and SET, which loses updates unless the lock excludes others. */
  async count({ key, seconds, ...command }) {
    const end = performance.now() + seconds * 1000;
    const { redis } = clients.get(command.client);
    const state = { increments: 0, longest_ms: 0, tokens_ascending: true };
    let last = 0;
    while (performance.now() < end) {
      const start = performance.now();
      const lease = await acquire({ limit_ms: 10_000, ...command });
      state.longest_ms = Math.max(state.longest_ms, Math.round(performance.now() - start));
      state.tokens_ascending &&= lease.token > last;
      last = lease.token;
      await redis.set(key, Number(await redis.get(key)) + 1);
      await lease.release();
      state.increments += 1;
    }
    return state;
  },

  async close({ client: key }) {
    const { client, redis } = clients.get(key) ?? {};
    await client?.close();
    redis?.disconnect();
  },
};

function lease({ as }) {
  const found = leases.get(as);
  if (!found) throw new LockError("unknown_handle", as, "no lease has this handle");
  return found;
}

async function answer({ do: verb, id, ...command }) {
  const isKnown = Object.hasOwn(commands, verb);
  const reply = isKnown
    ? await commands[verb](command).catch(({ code, message }) => {
        return { ok: false, error: ERRORS[code] ?? "failed", text: message };
      })
    : { ok: false, error: "unknown" };
  process.stdout.write(`${JSON.stringify({ ok: true, ...reply, id })}\n`);
}

for await (const line of createInterface({ input: process.stdin })) {
  let command;
  try {
    command = Object(JSON.parse(line));
  } catch {
    command = {};
  }
  const answered = answer(command);
  if (!command.async) await answered;
  if (command.do === "close" && !command.client) break;
}
process.exit(0);
