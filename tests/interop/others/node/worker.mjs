// Locks of redis-semaphore and of redlock (node-redlock) 4 and 5, for ../../others.py: a JSON
// object per line, in and out.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { Redis } from "ioredis";
import { Mutex } from "redis-semaphore";
import Redlock4 from "redlock";

const require = createRequire(import.meta.url);
const { default: Redlock5, ExecutionError } = require("redlock-5");
const locks = new Map();
let redis, prefix;

// Its package may not export the file package.json.
function version(name) {
  const file = new URL(`node_modules/${name}/package.json`, import.meta.url);
  return JSON.parse(readFileSync(file)).version.replace(/^v/, "");
}

// Each function acquires, and returns the function that releases; none if the lock stayed busy.
// Pauses are the defaults.
const LIBRARIES = {
  // It adds `mutex:` to the name, polls every 10 ms, and renews unless `refreshInterval` is 0.
  "redis-semaphore": async ({ name, ttl_ms, limit_ms }) => {
    const limits = limit_ms ? { acquireTimeout: limit_ms } : { acquireAttemptsLimit: 1 };
    const options = { lockTimeout: ttl_ms, refreshInterval: 0, ...limits };
    const mutex = new Mutex(redis, name, options);
    if (await mutex.tryAcquire()) return () => mutex.release();
  },
  // Polls every 200 ms and up to 100 ms more.
  "node-redlock 4": async ({ name, ttl_ms, limit_ms }) => {
    const manager = new Redlock4([redis], { retryCount: Math.ceil(limit_ms / 200) });
    const lock = await manager.lock(prefix + name, ttl_ms).catch(busy(Redlock4.LockError));
    return lock && (() => lock.unlock());
  },
  // Polls every 200 ms, 100 ms more or less.
  "node-redlock 5": async ({ name, ttl_ms, limit_ms }) => {
    const manager = new Redlock5([redis]);
    manager.on("error", () => {}); // also for a lock that is busy
    const settings = { retryCount: Math.ceil(limit_ms / 200) };
    const acquiring = manager.acquire([prefix + name], ttl_ms, settings);
    const lock = await acquiring.catch(busy(ExecutionError));
    return lock && (() => lock.release());
  },
};

function busy(kind) {
  return (error) => {
    if (!(error instanceof kind)) throw error;
  };
}

async function run(command) {
  switch (command.do) {
    case "open": {
      prefix = command.prefix;
      redis = new Redis(command.url);
      const versions = {
        "redis-semaphore": version("redis-semaphore"),
        "node-redlock 4": version("redlock"),
        "node-redlock 5": version("redlock-5"),
      };
      return { versions };
    }
    case "acquire": {
      const release = await LIBRARIES[command.kind](command);
      if (!release) return { error: "timed_out" };
      locks.set(command.as, release);
      return {};
    }
    case "release": {
      const release = locks.get(command.as);
      locks.delete(command.as);
      try {
        await release();
        return { held: true };
      } catch (error) {
        return { held: false, says: error.name };
      }
    }
    case "close":
      redis.disconnect();
      return {};
    default:
      return { error: "unknown" };
  }
}

async function answer(command) {
  const outcome = await run(command).catch((error) => ({ error: `${error.name}: ${error.message}` }));
  console.log(JSON.stringify({ ...outcome, ok: !outcome.error, id: command.id }));
}

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  const answered = answer(command);
  if (!command.async) await answered;
  if (command.do === "close") break;
}
