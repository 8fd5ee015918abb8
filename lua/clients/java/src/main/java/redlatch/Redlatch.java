package redlatch;

import static java.nio.charset.StandardCharsets.UTF_8;
import static java.util.concurrent.TimeUnit.MILLISECONDS;

import io.lettuce.core.*;
import io.lettuce.core.cluster.api.async.*;
import io.lettuce.core.pubsub.*;
import java.io.IOException;
import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicLong;

/** Locks on Redis and Valkey, by the protocol of {@code lua/README.md}. Safe for many threads. */
public final class Redlatch {
  public enum Reason {
    ENDED, WRONG_TYPE, NO_TTL, TOO_DEEP, MALFORMED, WOULD_DEADLOCK, TOO_MANY_READERS, // -1 to -7
    TIMED_OUT, SERVER // SERVER: an error reply, or no answer; the cause has the details
  }

  /** A lock was refused or not granted in time, or the server did not answer. */
  public static final class LockException extends RuntimeException {
    public final Reason reason;

    private LockException(Reason reason, Lock lock, Throwable cause) {
      super("lock " + lock.keys.get(0) + ": " + reason, cause);
      this.reason = reason;
    }
  }

  private final RedisClusterAsyncCommands<String, String> redis; // of a cluster, or of one server
  private final ScheduledExecutorService timer; // Lettuce's own
  private final long timeoutMs;
  private final String prefix, channel;
  private final Map<String, byte[]> scripts = new HashMap<>();
  private final Map<String, Lease> waiters = new ConcurrentHashMap<>(); // and for a minute after
  private final AtomicLong ahead = new AtomicLong(Long.MIN_VALUE); // the server's clock, in µs

  /** For a server, Sentinel or a cluster. The connections are its own; lua: the scripts' folder. */
  public Redlatch(Path lua, String prefix, RedisClusterAsyncCommands<String, String> redis,
      StatefulRedisPubSubConnection<String, String> pubSub) throws IOException {
    this.redis = redis;
    this.prefix = prefix;
    timer = pubSub.getResources().eventExecutorGroup();
    timeoutMs = pubSub.getTimeout().toMillis();
    String mark = redis instanceof RedisAdvancedClusterAsyncCommands ? "~" : ""; // a cluster
    channel = prefix.replaceAll("\\s", "_") + "wake:" + randomId() + mark;
    try (var files = Files.find(lua, 2, (file, a) -> file.toString().endsWith(".lua"))) {
      for (Path f : files.toList()) scripts.put("" + lua.relativize(f), Files.readAllBytes(f));
    }
    pubSub.addListener(new RedisPubSubAdapter<>() {
      @Override public void subscribed(String channel, long count) { // also after a reconnection
        readClock();
        waiters.values().forEach(w -> w.notified.release()); // messages may have been lost: poll
      }

      @Override public void message(String channel, String message) { // attempt[,attempt] token ...
        Arrays.stream(message.split(" ")[0].split(",")).map(waiters::get).filter(Objects::nonNull)
            .forEach(Lease::wake);
      }
    });
    pubSub.sync().subscribe(channel); // confirmed before the first request that names it
    readClock().join();
  }

  public Lock mutex(String name) { return lock("mutex", "", name, null); }

  /** The owner, for instance a UUID, may hold the lock several times. */
  public Lock reentrant(String name, String owner) { return lock("reentrant", "", name, owner); }

  /** One side of a read-write lock. The holds of an owner nest; an empty string is no owner. */
  public Lock read(String name, String owner) { return lock("rwlock", "read_", name, owner); }

  public Lock write(String name, String owner) { return lock("rwlock", "write_", name, owner); }

  private Lock lock(String kind, String side, String name, String owner) {
    String key = prefix + name;
    boolean isTagged = key.matches("(?s)[^{]*\\{[^}]+}.*");
    if (name.isEmpty() || name.getBytes(UTF_8).length > 512 || prefix.getBytes(UTF_8).length > 128
        || key.contains("}") && !isTagged
        || key.matches("(?s)\\{[^}]+}|[^{]*\\{[^}]+}.*(:fence|:waiters|\\{}node)")) {
      throw new IllegalArgumentException("not a lock name: " + name);
    }
    String base = isTagged ? key : "{" + key + "}";
    return new Lock(this, kind, side + "acquire", List.of(key, base + ":fence", base + ":waiters"),
        kind.equals("mutex") ? null : Objects.requireNonNull(owner));
  }

  private static String randomId() { return UUID.randomUUID().toString().replace("-", ""); }

  private CompletableFuture<Void> readClock() {
    return redis.time().toCompletableFuture().thenAccept(time -> observe(time.get(0) + "000000"));
  }

  private void observe(Object micros) {
    ahead.accumulateAndGet(Long.parseLong("" + micros) - Moment.now().nanos / 1000, Math::max);
  }

  /** The server's time in steps, as each costs every lock a new counter; never ahead of it. */
  private long minToken() {
    return (Moment.now().nanos / 1000 + ahead.get()) / 5_000_000 * 5_000_000;
  }

  /** Runs a script. Lettuce makes an integer a list of one. Null arguments are left out. */
  CompletableFuture<List<Object>> run(String file, List<String> keys, long ms, Object... args) {
    byte[] source = scripts.get(file + ".lua");
    String[] k = keys.toArray(String[]::new);
    String[] a = Arrays.stream(args).filter(o -> o != null).map(o -> "" + o).toArray(String[]::new);
    return within(ms, redis.evalsha(redis.digest(source), ScriptOutputType.MULTI, k, a))
        .exceptionallyCompose(e -> e instanceof RedisNoScriptException
            ? within(ms, redis.eval(source, ScriptOutputType.MULTI, k, a))
            : CompletableFuture.failedFuture(e));
  }

  /** Lettuce never sends a command that was still unsent at this timeout. */
  private static CompletableFuture<List<Object>> within(long ms, RedisFuture<List<Object>> reply) {
    return reply.toCompletableFuture().orTimeout(ms, MILLISECONDS);
  }

  private static boolean isFinal(Throwable e) { // neither passing nor without an answer
    return e.toString().matches("(?s).*: (ERR|NOPERM|NOAUTH|WRONG).*");
  }

  public record Lock(Redlatch client, String kind, String verb, List<String> keys, String owner) {
    /** Acquires the lock; waits for at most the limit, or only tries if that is zero. */
    public Lease acquire(Duration ttl, Duration limit) throws InterruptedException {
      boolean queues = !limit.isZero();
      long limitMs = queues ? limit.toMillis() : client.timeoutMs;
      Moment start = Moment.now();
      Lease lease = client.new Lease(this, ttl.toMillis(), queues);
      LockException problem = null;
      try {
        do {
          long pauseMs = 100;
          try {
            pauseMs = lease.request(Math.min(lease.ttlMs, limitMs - start.ageMs()));
            if (lease.isValid()) return lease.renewIn(lease.ttlMs / 3);
          } catch (LockException e) {
            if (!queues || e.reason != Reason.SERVER || isFinal(e.getCause())) throw e;
            problem = e; // repeat the request
          }
          if (lease.released != null) lease = client.new Lease(this, lease.ttlMs, queues);
          pauseMs = Math.min(pauseMs, limitMs - start.ageMs());
          if (queues) lease.notified.tryAcquire(pauseMs, MILLISECONDS);
        } while (queues && start.ageMs() < limitMs);
        throw new LockException(Reason.TIMED_OUT, this, problem);
      } finally {
        if (lease.mayBeKnown && !lease.isValid()) lease.end(false);
      }
    }
  }

  /** A granted lock, renewed in the background until it is released or lost. */
  public final class Lease implements AutoCloseable {
    /** Completed when the lease is lost; not when it is released. */
    public final CompletableFuture<Void> lost = new CompletableFuture<>();
    private final Lock lock;
    private final long ttlMs;
    private final Object claimMs, wakeups; // both empty: the attempt does not queue
    private final String attempt = randomId() + randomId().substring(24); // a UUID has 122 bits
    private final Semaphore notified = new Semaphore(0);
    private Object queuedAt = "";
    private boolean mayBeKnown = true; // to the server
    private long token;
    private volatile Moment sent; // when the last grant or renewal was requested
    private volatile CompletableFuture<Boolean> released;

    private Lease(Lock lock, long ttlMs, boolean queues) {
      this.lock = lock;
      this.ttlMs = ttlMs;
      claimMs = queues ? Math.min(ttlMs, 3000) : "";
      wakeups = queues ? channel : "";
      if (queues) waiters.put(attempt, this);
    }

    public long token() { return token; }

    public boolean isValid() { return released == null && sent != null && sent.leftMs(ttlMs) > 0; }

    /** Renews the lease now. False: it is lost or released. */
    public boolean renew() { return join(extend("renew", null, timeoutMs)); }

    /** Turns a write hold into a read hold. False: it is lost or released. */
    public boolean downgrade() { return join(extend("downgrade", minToken(), timeoutMs)); }

    /** Releases the lock. False: it was lost before. */
    public boolean release() { return join(end(false)); }

    /** Releases the lock; if the server does not answer, this continues in the background. */
    @Override public void close() {
      end(false).exceptionally(e -> false).completeOnTimeout(false, timeoutMs, MILLISECONDS).join();
    }

    private void wake() {
      notified.release();
      if (released == null || !released.isDone()) return; // else a failover revived the attempt
      run(lock.kind + "/release", lock.keys, timeoutMs, attempt, lock.owner, minToken());
    }

    /** Sends acquire; returns the longest pause before the next one. */
    private long request(long ms) {
      notified.drainPermits();
      Moment now = Moment.now();
      List<Object> answer = join(run(lock.kind + "/" + lock.verb, lock.keys, ms, attempt, ttlMs,
          lock.owner, minToken(), claimMs, wakeups, lock.owner == null ? null : "", queuedAt));
      long first = (Long) answer.get(0);
      boolean isBusy = answer.size() == 2;
      if (isBusy) observe(answer.get(1));
      if (isBusy && queuedAt.equals("") && !claimMs.equals("")) queuedAt = answer.get(1);
      mayBeKnown = !queuedAt.equals("") || !isBusy && first >= 0;
      if (first < 0) throw new LockException(Reason.values()[(int) -first - 1], lock, null);
      if (isBusy) return Math.max(1, Math.min(first, Math.min(ttlMs, 3000) / 2));
      token = first;
      sent = now;
      if (!isValid()) end(false); // granted too late: another attempt begins
      return 1;
    }

    private Lease renewIn(long ms) { // or at the deadline, to report the loss
      timer.schedule(() -> extend("renew", null, ttlMs / 6).whenComplete((held, e) -> {
        if (e != null || held) renewIn(e == null ? ttlMs / 3 : ttlMs / 12);
      }), Math.max(1, Math.min(ms, sent.leftMs(ttlMs))), MILLISECONDS);
      return this;
    }

    private synchronized CompletableFuture<Boolean> extend(String verb, Object minToken, long ms) {
      Moment now = Moment.now();
      if (!isValid()) end(true);
      if (released != null) return CompletableFuture.completedFuture(false);
      List<String> keys = minToken == null ? lock.keys.subList(0, 1) : lock.keys;
      return run(lock.kind + "/" + verb, keys, ms, attempt, ttlMs, lock.owner, minToken)
          .thenApply(answer -> isExtended(now, (Long) answer.get(0)));
    }

    private synchronized boolean isExtended(Moment requested, long time) {
      if (time > 0) observe(time);
      if (time <= 0 || !isValid()) end(true); // an answer after the deadline changes nothing
      if (requested.nanos > sent.nanos) sent = requested;
      return isValid();
    }

    private synchronized CompletableFuture<Boolean> end(boolean isLost) {
      if (released != null) return released;
      if (!claimMs.equals("")) timer.schedule(() -> waiters.remove(attempt), 1, TimeUnit.MINUTES);
      var answer = giveUp(Moment.now());
      released = isLost ? CompletableFuture.completedFuture(false) : answer;
      if (isLost) lost.completeAsync(() -> null);
      return released;
    }

    /** Releases until answered, or nothing is left. Remembers, since Lettuce repeats requests. */
    private CompletableFuture<Boolean> giveUp(Moment start) {
      return run(lock.kind + "/release", lock.keys, timeoutMs, attempt, lock.owner, minToken(), 1,
          claimMs, wakeups).thenApply(answer -> (Long) answer.get(0) > 0).exceptionallyComposeAsync(
              e -> isFinal(e) || start.ageMs() > ttlMs ? CompletableFuture.failedFuture(e)
                  : giveUp(start), CompletableFuture.delayedExecutor(500, MILLISECONDS));
    }

    private <T> T join(CompletableFuture<T> future) {
      try {
        return future.copy().orTimeout(timeoutMs, MILLISECONDS).join();
      } catch (CompletionException e) {
        throw new LockException(Reason.SERVER, lock, e.getCause());
      }
    }
  }

  /** A clock that counts suspension; without /proc/uptime, two clocks to compare. */
  private record Moment(long nanos, long wallOffset) {
    static Moment now() {
      try {
        String uptime = Files.readString(Path.of("/proc/uptime"));
        return new Moment((long) (Double.parseDouble(uptime.split(" ")[0]) * 1e9), 0);
      } catch (IOException e) {
        long wall = System.currentTimeMillis() * 1_000_000;
        return new Moment(System.nanoTime(), wall - System.nanoTime());
      }
    }

    long ageMs() { return (now().nanos - nanos) / 1_000_000; }

    long leftMs(long ttlMs) { // of a lease that was requested at this moment
      boolean isStepped = Math.abs(now().wallOffset - wallOffset) > 1_000_000_000;
      return isStepped ? 0 : ttlMs * 99 / 100 - (wallOffset == 0 ? 12 : 1002) - ageMs();
    }
  }
}
