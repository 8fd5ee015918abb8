package redlatch;

import static java.nio.charset.StandardCharsets.UTF_8;
import static java.util.concurrent.CompletableFuture.*;
import static java.util.concurrent.TimeUnit.MILLISECONDS;

import io.lettuce.core.*;
import io.lettuce.core.cluster.api.async.*;
import io.lettuce.core.pubsub.*;
import java.io.IOException;
import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;

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

  private static final String FINAL = "(?s).*: (ERR|NOPERM|NOAUTH|WRONG).*"; // errors that persist
  private static final long STEP = 5_000_000; // µs; a raised min_token slows a lock's next acquire
  private final RedisClusterAsyncCommands<String, String> redis; // of a cluster, or of one server
  private final ScheduledExecutorService timer; // Lettuce's own, which no caller can block
  private final long timeoutMs;
  private final String prefix, channel;
  private final Map<String, byte[]> scripts = new HashMap<>();
  private final Map<String, Semaphore> waiters = new ConcurrentHashMap<>(); // by their attempts
  private long offset = Long.MIN_VALUE; // from the local clock to the server's, in µs

  /** For a server, Sentinel or a cluster. The connections are its own; lua: the scripts' folder. */
  public Redlatch(Path lua, String prefix, RedisClusterAsyncCommands<String, String> redis,
      StatefulRedisPubSubConnection<String, String> pubSub) throws IOException {
    this.redis = redis;
    this.prefix = prefix;
    timer = pubSub.getResources().eventExecutorGroup();
    timeoutMs = pubSub.getTimeout().toMillis();
    String mark = redis instanceof RedisAdvancedClusterAsyncCommands ? "~" : ""; // a cluster
    channel = prefix.replaceAll("\\s", "_") + "wake:" + randomId() + mark;
    for (String kind : List.of("mutex", "reentrant", "rwlock", "node", "fenced"))
      scripts.put(kind, Files.readAllBytes(lua.resolve(kind + ".lua")));
    pubSub.addListener(new RedisPubSubAdapter<>() {
      @Override public void subscribed(String channel, long count) { // also after a reconnection
        redis.time().thenAccept(time -> observe(time.get(0) + "000000"));
        waiters.values().forEach(Semaphore::release); // messages may have been lost: poll
      }
      @Override public void message(String channel, String text) { // attempt[,attempt] token ...
        for (String id : text.split("[ ,]")) waiters.getOrDefault(id, new Semaphore(0)).release();
      }
    });
    pubSub.sync().subscribe(channel); // confirmed before the first request that names it
    redis.time().thenAccept(time -> observe(time.get(0) + "000000")).toCompletableFuture().join();
  }

  // The holds of one owner, for instance a UUID, nest. For read and write, "" means no owner.
  public Lock mutex(String name) { return lock("mutex", "acquire", name, null); }
  public Lock reentrant(String name, String owner) { return lock("reentrant", "acquire", name, owner); }
  public Lock read(String name, String owner) { return lock("rwlock", "read", name, owner); }
  public Lock write(String name, String owner) { return lock("rwlock", "write", name, owner); }

  private Lock lock(String kind, String verb, String name, String owner) {
    String key = prefix + name;
    boolean isTagged = key.matches("(?s)[^{]*\\{[^}]+}.*");
    boolean isReserved = key.matches("(?s)\\{[^}]+}|[^{]*\\{[^}]+}.*(:fence|:waiters|\\{}node)");
    boolean isTooLong = name.getBytes(UTF_8).length > 512 || prefix.getBytes(UTF_8).length > 128;
    boolean isBad = name.isEmpty() || isTooLong || isReserved || key.contains("}") && !isTagged;
    if (isBad) throw new IllegalArgumentException("not a lock name: " + name);
    String base = isTagged ? key : "{" + key + "}";
    return new Lock(this, kind, verb, List.of(key, base + ":waiters", base + ":fence"),
        kind.equals("mutex") ? null : Objects.requireNonNull(owner));
  }

  private static String randomId() { return UUID.randomUUID().toString().replace("-", ""); }
  private synchronized long minToken() { return (Moment.now().ms * 1000 + offset) / STEP * STEP; }

  private synchronized void observe(Object micros) {
    offset = Math.max(offset, Long.parseLong("" + micros) - Moment.now().ms * 1000);
  }

  /** Sends the words that are not null. Lettuce makes -5, of a malformed call, a list of one. */
  CompletableFuture<List<Object>> call(String kind, List<String> keys, long ms, Object... words) {
    byte[] source = scripts.get(kind);
    String[] k = keys.toArray(String[]::new);
    String[] w = Arrays.stream(words).filter(o -> o != null).map(o -> "" + o).toArray(String[]::new);
    return within(ms, redis.evalsha(redis.digest(source), ScriptOutputType.MULTI, k, w))
        .exceptionallyCompose(e -> e instanceof RedisNoScriptException
            ? within(ms, redis.eval(source, ScriptOutputType.MULTI, k, w)) : failedFuture(e))
        .orTimeout(ms, MILLISECONDS);
  }

  private static CompletableFuture<List<Object>> within(long ms, RedisFuture<List<Object>> reply) {
    return reply.toCompletableFuture().orTimeout(ms, MILLISECONDS); // unsent requests stay unsent
  }

  public record Lock(Redlatch client, String kind, String verb, List<String> keys, String owner) {
    /** Acquires the lock; waits for at most the limit, or only tries if that is zero. */
    public Lease acquire(Duration ttl, Duration limit) throws InterruptedException {
      boolean waits = !limit.isZero();
      long maxMs = waits ? limit.toMillis() : client.timeoutMs;
      Moment start = Moment.now();
      Lease lease = client.new Lease(this, ttl.toMillis(), waits);
      try {
        do {
          if (lease.sent != null) lease = client.new Lease(this, lease.ttlMs, waits); // late grant
          long pauseMs = lease.request(maxMs - start.ageMs());
          if (lease.isValid()) return lease;
          if (waits) lease.wake.tryAcquire(Math.min(pauseMs, maxMs - start.ageMs()), MILLISECONDS);
        } while (waits && start.ageMs() < maxMs);
        throw new LockException(Reason.TIMED_OUT, this, lease.problem);
      } finally {
        if (lease.sent == null) lease.end(false);
      }
    }
  }

  /** A granted lock, renewed in the background until it is released, or {@code lost} completes. */
  public final class Lease implements AutoCloseable {
    public final CompletableFuture<Void> lost = new CompletableFuture<>();
    private final Lock lock;
    private final long ttlMs;
    private final Object claimMs; // null: the attempt does not queue
    private final String attempt = randomId() + randomId().substring(24); // a UUID has 122 bits
    private final Semaphore wake = new Semaphore(0);
    private Object queuedAt = ""; // the time of the first busy answer: the place in the queue
    private Throwable problem; // of a request that may have run, or may yet run
    private long token;
    private volatile Moment sent; // when the last grant or renewal was requested
    private volatile CompletableFuture<Boolean> released; // done if there is nothing to release

    private Lease(Lock lock, long ttlMs, boolean waits) {
      this.lock = lock;
      this.ttlMs = ttlMs;
      claimMs = waits ? Math.min(ttlMs, 3000) : null;
      if (waits) waiters.put(attempt, wake);
    }

    public long token() { return token; }
    public boolean isValid() { return released == null && sent != null && sent.leftMs(ttlMs) > 0; }

    // False: the lease is lost or released. A downgrade turns a write hold into a read hold.
    // If the server does not answer, all but close throw, and releases continue in the background.
    public boolean renew() { return join(extend("renew", null, timeoutMs)); }
    public boolean downgrade() { return join(extend("downgrade", minToken(), timeoutMs)); }
    public boolean release() { return !lost.isDone() && join(end(false)); }
    @Override public void close() {
      end(false).exceptionally(e -> false).completeOnTimeout(false, timeoutMs, MILLISECONDS).join();
    }

    private long request(long leftMs) throws InterruptedException { // returns the longest pause
      wake.drainPermits();
      Moment now = Moment.now();
      try {
        long ms = Math.min(Math.min(ttlMs, timeoutMs), leftMs);
        Object answer = call(lock.kind, lock.keys, ms, lock.verb, attempt, lock.owner, queuedAt, "",
            ttlMs, minToken(), claimMs, claimMs == null ? null : channel).get().get(0);
        if (answer instanceof List<?> busy) { // pttl and the server's clock
          observe(busy.get(1));
          if (claimMs == null) released = completedFuture(false);
          else if (queuedAt.equals("")) queuedAt = busy.get(1);
          return Math.max(1, Math.min((Long) busy.get(0), Math.min(ttlMs, 3000) / 2));
        }
        token = (Long) answer;
        if (token < 0 && problem == null && queuedAt.equals("")) released = completedFuture(false);
        if (token < 0) throw new LockException(Reason.values()[(int) -token - 1], lock, null);
        sent = now;
        renewIn(ttlMs / 3); // at once if the grant came too late, to release it
        return 1;
      } catch (ExecutionException e) { // the outcome is unknown: the same request again
        problem = e.getCause();
        if (claimMs != null && !e.toString().matches(FINAL)) return 100;
        throw new LockException(Reason.SERVER, lock, problem);
      }
    }

    private void renewIn(long ms) { // at the deadline at the latest, to report the loss
      timer.schedule(() -> extend("renew", null, ttlMs / 6).whenComplete((isHeld, e) -> {
        if (e != null || isHeld) renewIn(e == null ? ttlMs / 3 : ttlMs / 12);
      }), Math.max(1, Math.min(ms, sent.leftMs(ttlMs))), MILLISECONDS);
    }

    private CompletableFuture<Boolean> extend(String verb, Object minToken, long ms) {
      Moment now = Moment.now();
      var reply = !isValid() ? completedFuture(List.<Object>of(0L))
          : call(lock.kind, lock.keys, ms, verb, attempt, lock.owner, ttlMs, minToken);
      return reply.thenApply(answer -> {
        observe(answer.get(0));
        if (answer.get(0).equals(-5L)) return isValid(); // refused: the lease is as it was
        if ((Long) answer.get(0) <= 0 || !isValid()) end(true); // no late answer revives it
        sent = now;
        return isValid();
      });
    }

    private synchronized CompletableFuture<Boolean> end(boolean isLost) {
      waiters.remove(attempt);
      if (released != null) return released;
      released = giveUp(Moment.now()).thenApply(isHeld -> isHeld && !isLost);
      if (isLost) lost.completeAsync(() -> null);
      return released;
    }

    /** Releases until answered, or nothing is left. Remembers, since Lettuce repeats requests. */
    private CompletableFuture<Boolean> giveUp(Moment start) {
      return call(lock.kind, lock.keys, timeoutMs, "release", attempt, lock.owner, "", minToken(),
          1, claimMs, claimMs == null ? null : channel).thenApply(answer -> (Long) answer.get(0) > 0)
          .exceptionallyComposeAsync(e -> e.toString().matches(FINAL) || start.ageMs() > ttlMs
              ? failedFuture(e) : giveUp(start), delayedExecutor(500, MILLISECONDS));
    }

    private boolean join(CompletableFuture<Boolean> reply) {
      try {
        return reply.copy().orTimeout(timeoutMs, MILLISECONDS).join();
      } catch (CompletionException e) {
        throw new LockException(Reason.SERVER, lock, e.getCause());
      }
    }
  }

  /** A clock that counts suspension; without /proc/uptime, two clocks to compare. */
  private record Moment(long ms, long wallOffset) {
    static Moment now() {
      try {
        String uptime = Files.readString(Path.of("/proc/uptime")).split(" ")[0];
        return new Moment(Math.round(Double.parseDouble(uptime) * 1000), 0);
      } catch (IOException e) {
        long ms = System.nanoTime() / 1_000_000;
        return new Moment(ms, System.currentTimeMillis() - ms);
      }
    }

    long ageMs() { return now().ms - ms; }
    long leftMs(long ttlMs) { // of a lease that was requested at this moment
      return Math.abs(now().wallOffset - wallOffset) > 1000 ? 0 // a step of the wall clock
          : ttlMs * 99 / 100 - (wallOffset == 0 ? 12 : 1002) - ageMs();
    }
  }
}
