import type { Cluster, Redis } from "ioredis";

export type Kind = "mutex" | "reentrant" | "read" | "write";

/** The reasons for which a call fails; the README has what to do. */
export type Code =
  | "timed_out"
  | "lost"
  | "closed"
  | "unavailable"
  | "bad_name"
  | "ended"
  | "wrong_type"
  | "too_deep"
  | "malformed"
  | "would_deadlock"
  | "too_many_readers";

/** The message has the name of the lock as the caller gave it, the reason and the remedy. */
export class LockError extends Error {
  readonly code: Code;
  constructor(code: Code, lock: string, text: string, cause?: unknown);
}

/** Times are in milliseconds. An option that is undefined has its default. */
export interface AcquireOptions {
  /**
   * How long the lock stays held without a renewal: 30,000. An integer, on Linux at least 100, and
   * elsewhere 1,090.
   */
  ttl?: number | undefined;
  /** How long a call waits; without one, for ever. Zero tries once. */
  timeout?: number | undefined;
  /** Ends the wait. */
  signal?: AbortSignal | undefined;
  /** Holds of one owner nest: a random text. A re-entrant lock needs one. */
  owner?: string | undefined;
  /** For how long a released lock is reserved for this waiter: 3,000, or the TTL if it is less. */
  claim?: number | undefined;
}

export interface Lease {
  /** The fencing token: larger than that of each earlier holder. */
  readonly token: number;
  readonly owner: string;
  /** Aborted when the lease is lost. */
  readonly signal: AbortSignal;
  /** Whether the lock is held now, by the client's clock. */
  isValid(): boolean;
  /** Resolves to whether the lock is held. */
  renew(): Promise<boolean>;
  /** Turns a write hold into a read hold; others are `malformed`. Resolves like `renew`. */
  downgrade(): Promise<boolean>;
  /** Resolves to false if the lease was lost before. A second call has the same answer. */
  release(): Promise<boolean>;
}

export interface RedlatchOptions {
  /** What the keys begin with: `lock:`. */
  prefix?: string | undefined;
  /** The folder of the scripts, which ends in `/`. */
  scripts?: URL | undefined;
  /** Receives what no call reports. What it throws is printed. */
  onError?: ((error: Error) => void) | undefined;
}

/** The keys lock, waiters and fence, in one slot. Throws a `LockError` for other names. */
export function lockKeys(name: string, prefix?: string): [string, string, string];

/** A client of one server, Sentinel or a cluster. */
export class Redlatch {
  constructor(redis: Redis | Cluster, options?: RedlatchOptions);
  /** Waits for a lock. Arguments are checked first: a `LockError` names what is `malformed`. */
  acquire(kind: Kind, name: string, options?: AcquireOptions): Promise<Lease>;
  /**
   * Resolves to `null` if the lock is busy. `unavailable`: no answer within a quarter of the TTL,
   * at least 100, at most `timeout` or 5,000.
   */
  tryAcquire(
    kind: Kind,
    name: string,
    options?: Omit<AcquireOptions, "claim">,
  ): Promise<Lease | null>;
  /** Sends a script. `words`: a verb, those of each lock, those of the call. */
  send(
    script: string,
    keys: string[],
    words: (string | number | Uint8Array)[],
    limit?: number,
  ): Promise<unknown>;
  /**
   * Cancels waiters, releases the leases that are held, waits for that for `timeout` at most
   * (5,000), and disconnects.
   */
  close(timeout?: number): Promise<void>;
}
