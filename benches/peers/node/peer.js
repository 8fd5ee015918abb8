// Measures redis-semaphore and redlock, as ../README.md describes.

import { once } from "node:events";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { performance } from "node:perf_hooks";
import { setTimeout as sleep } from "node:timers/promises";
import { Redis } from "ioredis";
import { Mutex } from "redis-semaphore";
import Redlock from "redlock";

// All locks have the TTL that is the default of redlatch.
const TTL_MS = 30_000;

const require = createRequire(import.meta.url);
const version = (name) => require(`${name}/package.json`).version;
const common = {
  client: `ioredis ${version("ioredis")}`,
  kinds: ["mutex"],
  turns: ["mutex"],
  most_clients: 256,
  fencing: "no",
  waiting: "polls",
};

// Requests of one turn of the event loop travel together.
const connect = (url) => new Redis(url, { enableAutoPipelining: true });

// Each function connects a client. Its locks wait for `acquire` and `release`.
const LIBRARIES = {
  "redis-semaphore": (url, pollMs) => {
    const redis = connect(url);
    const options = { lockTimeout: TTL_MS, acquireTimeout: Infinity, retryInterval: pollMs };
    return { redis, lock: (name) => new Mutex(redis, name, options) };
  },
  redlock: (url, pollMs) => {
    const redis = connect(url);
    const manager = new Redlock([redis], { retryCount: -1, retryDelay: pollMs, retryJitter: pollMs });
    const lock = (name) => {
      let held;
      return {
        acquire: async () => void (held = await manager.lock(`redlock:${name}`, TTL_MS)),
        release: () => held.unlock(),
      };
    };
    return { redis, lock };
  },
};

const DESCRIPTION = {
  language: `Node ${process.versions.node}`,
  libraries: [
    {
      ...common,
      name: "redis-semaphore",
      version: version("redis-semaphore"),
      renewal: "yes",
      settings: "Mutex; enableAutoPipelining; lockTimeout, retryInterval",
    },
    {
      ...common,
      name: "redlock",
      version: version("redlock"),
      renewal: "by hand",
      settings: "one server; enableAutoPipelining; retryDelay, retryJitter",
    },
  ],
};

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = (value) => console.log(JSON.stringify(value));

// Reports that the measurement is prepared, and waits for the line `go`.
async function waitForGo() {
  say({ ready: true });
  const { value } = await lines.next();
  if (value !== "go") throw new Error(`${value} instead of go`);
}

// Uncontended locks: tasks of one client, each with a lock name of its own.
async function pairs(url, library, tasks, seconds) {
  const client = LIBRARIES[library](url, 100);
  await once(client.redis, "ready");
  await runPairs(client, tasks, seconds / 5);
  await waitForGo();
  const result = await runPairs(client, tasks, seconds);
  client.redis.disconnect();
  return result;
}

async function runPairs(client, tasks, seconds) {
  const result = { seconds: 0, pairs: 0, overlaps: 0 };
  const start = performance.now();
  const end = start + seconds * 1000;
  const repeat = async (task) => {
    const lock = client.lock(`own:${task}`);
    let held = false;
    do {
      await lock.acquire();
      if (held) result.overlaps += 1;
      held = true;
      held = false;
      await lock.release();
      result.pairs += 1;
    } while (performance.now() < end);
  };
  await Promise.all(Array.from({ length: tasks }, (_, task) => repeat(task)));
  result.seconds = (performance.now() - start) / 1000;
  return result;
}

// Clients that contend for one lock name. A turn is an acquisition by another client than the one
// before.
async function turns(url, library, size, seconds, pollMs) {
  const clients = Array.from({ length: size }, () => LIBRARIES[library](url, pollMs));
  await Promise.all(clients.map((client) => once(client.redis, "ready")));
  const counts = new Array(size).fill(0);
  let [stop, held, last, acquisitions, overlaps] = [false, false, -1, 0, 0];
  const contend = async (client, number) => {
    const lock = client.lock("contended");
    while (!stop) {
      await lock.acquire();
      if (held) overlaps += 1;
      held = true;
      acquisitions += 1;
      if (last !== number) counts[number] += 1;
      last = number;
      held = false;
      await lock.release();
    }
  };
  const running = Promise.all(clients.map(contend));
  await sleep(seconds * 200);
  await waitForGo();
  const [start, before, first] = [performance.now(), [...counts], acquisitions];
  await sleep(seconds * 1000);
  const own = counts.map((count, number) => count - before[number]);
  const result = {
    seconds: (performance.now() - start) / 1000,
    acquisitions: acquisitions - first,
    turns: own.reduce((sum, count) => sum + count, 0),
    fewest: Math.min(...own),
    most: Math.max(...own),
  };
  stop = true;
  await running;
  clients.forEach((client) => client.redis.disconnect());
  return { ...result, overlaps };
}

const url = process.argv[2];
for (let next = await lines.next(); !next.done; next = await lines.next()) {
  const [command, library, , size, seconds, pollMs] = next.value.split(" ");
  if (command === "libraries") say(DESCRIPTION);
  else if (command === "pairs") say(await pairs(url, library, Number(size), Number(seconds)));
  else if (command === "turns") say(await turns(url, library, Number(size), Number(seconds), Number(pollMs)));
  else throw new Error(`unknown command: ${next.value}`);
}
