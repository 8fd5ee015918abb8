package redlatch;

import static io.lettuce.core.ScriptOutputType.MULTI;
import static java.nio.charset.StandardCharsets.UTF_8;
import static java.util.concurrent.CompletableFuture.*;
import static java.util.concurrent.TimeUnit.*;

import io.lettuce.core.*;
import io.lettuce.core.api.StatefulConnection;
import io.lettuce.core.cluster.RedisClusterClient;
import io.lettuce.core.cluster.api.async.RedisClusterAsyncCommands;
import io.lettuce.core.pubsub.*;
import java.io.*;
import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicInteger;

/** Locks on Redis and Valkey, by the protocol of {@code lua/README.md}. Safe for many threads. */
public final class Redlatch implements AutoCloseable {
  public enum Reason { // -1 to -7 first
    ENDED("its attempt has ended: try again"),
    WRONG_TYPE("its key holds another kind of lock, or no lock: " + Reason.OTHER),
    NO_TTL("its key has no TTL, so another program wrote it: " + Reason.OTHER),
    TOO_DEEP("its owner has as many holds as it may: release one"),
    MALFORMED("the server takes a word of its request for malformed: report it"),
    WOULD_DEADLOCK("another reader waits to write: release what this owner reads, and try again"),
    TOO_MANY_READERS("too many readers hold it or wait for it: try again later"),
    TIMED_OUT("not granted in time"),
    SERVER("an error reply, or no answer: the cause has the details"),
    CLOSED("the client was closed");

    private static final String OTHER = "choose another name, or delete the key once it is unused";
    private final String text;
    Reason(String text) { this.text = text; }
  }

  /** A lock was refused or not granted in time, or the server did not answer. */
  public static final class LockException extends RuntimeException {
    public final Reason reason;
    private LockException(Reason reason, Lock lock, Throwable cause) {
      super("lock \"" + lock.keys.get(0) + "\": " + reason.text, cause);
      this.reason = reason;
    }
  }

  private static final String FINAL = "(?s).*: (ERR|NOPERM|NOAUTH|WRONG).*"; // but for PASSES:
  private static final String PASSES = "(?s).*\\b(OOM|NOREPLICAS|MISCONF|READONLY|LOADING|BUSY"
      + "|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|max number of clients)\\b.*";
  private static final long STEP = 5_000_000; // µs; a raised min_token slows a lock's next acquire
  private static final long LIMIT_MS = 5000; // of a request: a quarter of the lease, if it is less
  private static final Duration LONGEST = Duration.ofMillis(9_999_999_999L); // a TTL, or a wait
  private static final int POLL_MS = 100; // the pause of a waiter that cannot be notified
  private static final ScheduledThreadPoolExecutor TIMER = new ScheduledThreadPoolExecutor(1,
      Redlatch::thread); // not Lettuce's, and not that of orTimeout: others may block those
  static { TIMER.setRemoveOnCancelPolicy(true); }
  private final AbstractRedisClient client;
  private final long timeoutMs;
  private final String prefix, channel;
  private final Map<String, byte[]> scripts = new HashMap<>();
  private final Map<String, Semaphore> waiters = new ConcurrentHashMap<>(); // by their attempts
  private final Map<String, Lease> ended = new ConcurrentHashMap<>(); // a failover may revive them
  private final CompletableFuture<Void> confirmed = new CompletableFuture<>();
  private final Thread subscriber;
  private long offset = Long.MIN_VALUE; // from the local clock to the server's, in µs
  private volatile CompletableFuture<Link> link; // not done while one is replaced
  private volatile boolean isSubscribed, isClosed;
  private volatile Semaphore broken = new Semaphore(0); // of the present subscription
  private final AtomicInteger underWay = new AtomicInteger(); // acquires and releases
  private final AtomicInteger breaks = new AtomicInteger(); // of all connections of `client`
  private final RedisConnectionStateListener onBreak = new RedisConnectionStateAdapter() {
    @Override public void onRedisDisconnected(RedisChannelHandler<?, ?> connection) {
      breaks.incrementAndGet();
    }
  };

  /** A connection for requests: to one server, or to a cluster. */
  private record Link(StatefulConnection<String, String> connection,
      RedisClusterAsyncCommands<String, String> redis) {}

  /** A client of one server, Sentinel or a cluster, with the scripts of the jar. */
  public Redlatch(String prefix, AbstractRedisClient client) throws IOException {
    this(null, prefix, client);
  }

  /** The same; lua: the folder of the scripts. A missing script is an {@link IOException}. */
  public Redlatch(Path lua, String prefix, AbstractRedisClient client) throws IOException {
    this.client = client;
    this.prefix = prefix;
    channel = prefix.replaceAll("\\s", "_") + "wake:" + randomId()
        + (client instanceof RedisClusterClient ? "~" : "");
    for (String kind : List.of("mutex", "reentrant", "rwlock", "node", "fenced"))
      scripts.put(kind, readScript(lua, kind + ".lua"));
    Link first = connect();
    link = completedFuture(first);
    long ms = millis(first.connection.getTimeout());
    timeoutMs = ms == 0 ? 60_000 : ms; // 0: no timeout, for Lettuce
    try {
      limit(first.redis.time(), timeoutMs)
          .thenAccept(time -> observe(time.get(0) + "000000")).join();
    } catch (RuntimeException e) {
      first.connection.closeAsync(); // the caller has nothing to close
      throw e;
    }
    client.addListener(onBreak);
    subscriber = start(this::subscribe);
    limit(confirmed, 1000).exceptionally(e -> null).join();
  }

  private static byte[] readScript(Path lua, String file) throws IOException {
    if (lua != null) return Files.readAllBytes(lua.resolve(file));
    try (var stream = Redlatch.class.getResourceAsStream(file)) {
      if (stream == null) throw new NoSuchFileException(file, null, "the jar has no such script");
      return stream.readAllBytes();
    }
  }

  private Link connect() {
    if (client instanceof RedisClusterClient cluster) {
      var connection = cluster.connect();
      return new Link(connection, connection.async());
    }
    var connection = ((RedisClient) client).connect();
    return new Link(connection, connection.async());
  }

  private static Thread thread(Runnable task) {
    Thread thread = new Thread(task, "redlatch");
    thread.setDaemon(true);
    return thread;
  }

  private static Thread start(Runnable task) {
    Thread thread = thread(task);
    thread.start();
    return thread;
  }

  /** As orTimeout, by the timer of this class. */
  private static <T> CompletableFuture<T> limit(CompletionStage<T> stage, long ms) {
    var reply = stage.toCompletableFuture(); // itself: a request that is unsent then stays unsent
    var end = TIMER.schedule(() -> reply.completeExceptionally(new TimeoutException()), ms,
        MILLISECONDS);
    reply.whenComplete((answer, e) -> end.cancel(false));
    return reply;
  }

  /**
   * Replaces a connection that did not answer in time. Requests wait for the new one, for 1 s; then
   * another one may be made, since this one may be silent as well. The first to come is used.
   */
  private synchronized void replace(Link silent) {
    if (link.isCompletedExceptionally() || link.getNow(null) != silent) return;
    var next = new CompletableFuture<Link>();
    link = next;
    TIMER.schedule(() -> next.complete(silent), 1, SECONDS);
    // A master that hangs closes nothing, so Lettuce would not ask which one has its slots now.
    if (client instanceof RedisClusterClient cluster) cluster.refreshPartitionsAsync();
    start(() -> {
      try {
        Link made = connect();
        synchronized (this) {
          boolean isLate = link.isCompletedExceptionally() || link.getNow(silent) != silent;
          if (isLate) made.connection.closeAsync(); // closed meanwhile, or replaced
          else if (!link.complete(made)) link = completedFuture(made);
        }
        TIMER.schedule(silent.connection::closeAsync, LIMIT_MS, MILLISECONDS); // others use it
      } catch (RuntimeException e) { // Lettuce connects again as well
        next.complete(silent);
      }
    });
  }

  /** Keeps a subscription. It is replaced if it breaks, or does not answer within a second. */
  private void subscribe() {
    while (!isClosed && !client.getResources().eventExecutorGroup().isShutdown()) {
      try (var news = client instanceof RedisClusterClient cluster ? cluster.connectPubSub()
          : ((RedisClient) client).connectPubSub()) {
        Semaphore mine = broken = new Semaphore(0);
        news.addListener(new RedisConnectionStateAdapter() {
          @Override public void onRedisDisconnected(RedisChannelHandler<?, ?> connection) {
            endSubscription();
            mine.release();
          }
        });
        news.addListener(new RedisPubSubAdapter<>() {
          @Override public void message(String channel, String text) { // attempt[,attempt] token …
            for (String id : text.split("[ ,]")) {
              Lease lease = ended.get(id); // first: a waiter that is woken may end at once
              if (lease != null) lease.releaseAgain();
              waiters.getOrDefault(id, new Semaphore(0)).release();
            }
          }
        });
        news.async().subscribe(channel).get(1, SECONDS);
        link.thenCompose(used -> used.redis.time())
            .thenAccept(time -> observe(time.get(0) + "000000"));
        isSubscribed = true;
        confirmed.complete(null);
        waiters.values().forEach(Semaphore::release); // messages may have been lost: poll
        while (!isClosed && !mine.tryAcquire(5, SECONDS)) news.async().ping().get(1, SECONDS);
      } catch (Exception e) { // connect again
      }
      endSubscription();
      if (isClosed) return;
      java.util.concurrent.locks.LockSupport.parkNanos(POLL_MS * 1_000_000L);
    }
  }

  private void endSubscription() {
    boolean wasSubscribed = isSubscribed;
    isSubscribed = false;
    if (wasSubscribed) waiters.values().forEach(Semaphore::release); // no message comes: poll
  }

  /**
   * Ends waiting calls, and closes the connections. Before, waits for releases that are under way,
   * for 5 s at most: an attempt that is not given up may hold its lock for a TTL. Release the
   * leases before.
   */
  @Override public void close() {
    isClosed = true;
    broken.release();
    waiters.values().forEach(Semaphore::release);
    long end = System.nanoTime() + Math.min(LIMIT_MS, timeoutMs) * 1_000_000;
    try {
      while (underWay.get() > 0 && System.nanoTime() < end) Thread.sleep(5);
      subscriber.join(1000); // its connection is closed too, before the caller shuts Lettuce down
    } catch (InterruptedException e) {
      Thread.currentThread().interrupt();
    }
    client.removeListener(onBreak);
    CompletableFuture<Link> last;
    synchronized (this) {
      last = link;
      link = failedFuture(new IllegalStateException("closed"));
    }
    last.thenAccept(used -> used.connection.close()); // waits for a thread that may want the lock
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
    String of = "not a lock name: it must ";
    require(!name.isEmpty() && !isTooLong, of + "be 1 to 512 bytes, its prefix up to 128", name);
    require(isTagged || !key.contains("}"), of + "have a hash tag if it has \"}\", as \"{a}b\"", name);
    require(!isReserved, of + "not make a key of another lock", name);
    require(isUnicode(key), of + "be encodable: a lone surrogate would become \"?\"", name);
    String base = isTagged ? key : "{" + key + "}";
    boolean isNone = kind.equals("mutex") || kind.equals("rwlock") && "".equals(owner);
    boolean isText = owner != null && owner.matches("(?s)[^ :][^ ]*");
    boolean isField = kind.equals("reentrant") && "mode".equals(owner); // of that hash
    boolean isOwner = isText && !isField && owner.getBytes(UTF_8).length <= 256 && isUnicode(owner);
    String rule = "owner must be 1 to 256 bytes of UTF-8 without a space, not \":…\" or \"mode\"";
    require(isNone || isOwner, rule, owner);
    return new Lock(this, kind, verb, List.of(key, base + ":waiters", base + ":fence"), owner);
  }

  /** Names the argument and its rule, since the server answers only -5. */
  private static void require(boolean isMet, String rule, Object value) {
    if (!isMet) throw new IllegalArgumentException(rule + ", not " + value);
  }

  private static boolean isUnicode(String text) { return UTF_8.newEncoder().canEncode(text); }

  private static long millis(Duration time) { // toMillis of 292 million years or more throws
    return (time.compareTo(LONGEST) > 0 ? LONGEST : time).toMillis();
  }

  private static String randomId() { return UUID.randomUUID().toString().replace("-", ""); }
  private synchronized long minToken() { return (Moment.now().ms * 1000 + offset) / STEP * STEP; }

  private synchronized void observe(Object micros) { // the local clock may be 10 ms behind
    offset = Math.max(offset, Long.parseLong("" + micros) - 10_000 - Moment.now().ms * 1000);
  }

  /** Sends the words that are not null. Lettuce makes -5, of a malformed call, a list of one. */
  CompletableFuture<List<Object>> call(String kind, List<String> keys, long ms, Object... words) {
    byte[] source = scripts.get(kind);
    String[] k = keys.toArray(String[]::new);
    String[] w = Arrays.stream(words).filter(o -> o != null).map(o -> "" + o).toArray(String[]::new);
    return limit(link.thenCompose(used ->
        limit(used.redis.<List<Object>>evalsha(used.redis.digest(source), MULTI, k, w), ms)
        .exceptionallyCompose(e -> e instanceof RedisNoScriptException
            ? limit(used.redis.<List<Object>>eval(source, MULTI, k, w), ms) : failedFuture(e))
        .whenComplete((answer, e) -> { // the last 5 ms of a time limit say nothing about it
          boolean isSilent = ms >= POLL_MS && ("" + e).contains("TimeoutException");
          if (isSilent || e != null && !used.connection.isOpen()) replace(used);
        })), ms);
  }

  private static boolean isFinal(Throwable e) {
    return e.toString().matches(FINAL) && !e.toString().matches(PASSES);
  }

  public record Lock(Redlatch client, String kind, String verb, List<String> keys, String owner) {
    /** Acquires the lock; waits for at most the limit, or only tries if that is zero. */
    public Lease acquire(Duration ttl, Duration limit) throws InterruptedException {
      Moment start = Moment.now();
      long shortest = start.wallOffset == 0 ? 14 : 1014; // no shorter lease is ever valid: see leftMs
      boolean isTtl = ttl.compareTo(Duration.ofMillis(shortest)) >= 0 && ttl.compareTo(LONGEST) <= 0;
      require(isTtl, "ttl must be " + shortest + " to 9999999999 ms", ttl);
      require(!limit.isNegative(), "limit must be 0 or more", limit);
      boolean waits = !limit.isZero();
      long maxMs = waits ? millis(limit) : client.timeoutMs;
      client.underWay.incrementAndGet();
      Lease lease = client.new Lease(this, ttl.toMillis(), waits);
      boolean isGranted = false;
      try {
        do {
          if (lease.sent != null) { // granted too late, or while the client is closed
            lease.end(false);
            lease = client.new Lease(this, lease.ttlMs, waits);
          }
          long pauseMs = lease.request(maxMs - start.ageMs());
          isGranted = lease.isValid() && !client.isClosed;
          if (isGranted) return lease;
          if (waits) lease.wake.tryAcquire(Math.min(pauseMs, maxMs - start.ageMs()), MILLISECONDS);
        } while (waits && start.ageMs() < maxMs);
        throw new LockException(Reason.TIMED_OUT, this, lease.problem);
      } finally {
        if (!isGranted) lease.end(false);
        client.underWay.decrementAndGet();
      }
    }
  }

  /** A granted lock, renewed in the background until it is released, or {@code lost} completes. */
  public final class Lease implements AutoCloseable {
    public final CompletableFuture<Void> lost = new CompletableFuture<>();
    private final Lock lock;
    private final long ttlMs, limitMs;
    private final Object claimMs, wakeUps; // null: the attempt does not queue
    private final String attempt = randomId() + randomId().substring(24); // a UUID has 122 bits
    private final Semaphore wake = new Semaphore(0);
    private Object queuedAt = ""; // the time of the first busy answer: the place in the queue
    private Throwable problem; // of the last request
    private volatile boolean isLost; // a caller may complete `lost`
    private boolean isUnsure; // some request may have run, or may yet run
    private long token;
    private volatile Moment sent; // when the last grant or renewal was requested
    private volatile CompletableFuture<Boolean> released; // done if there is nothing to release

    private Lease(Lock lock, long ttlMs, boolean waits) {
      this.lock = lock;
      this.ttlMs = ttlMs;
      limitMs = Math.min(LIMIT_MS, Math.max(ttlMs / 4, POLL_MS));
      claimMs = waits ? Math.min(ttlMs, 3000) : null;
      wakeUps = waits ? isSubscribed ? channel : "" : null;
      if (waits) waiters.put(attempt, wake);
    }

    public long token() { return token; }
    public boolean isValid() { return released == null && sent != null && sent.leftMs(ttlMs) > 0; }

    // False: the lease is lost or released. A downgrade turns a write hold into a read hold.
    // If the server does not answer, all but close throw, and releases continue in the background.
    public boolean renew() { return join(extend("renew", null)); }
    public boolean downgrade() { return join(extend("downgrade", minToken())); }
    public boolean release() { return !isLost && join(end(false)); }
    @Override public void close() {
      limit(end(false).copy(), timeoutMs).exceptionally(e -> false).join();
    }

    private long request(long leftMs) throws InterruptedException { // returns the longest pause
      wake.drainPermits(); // before the look at isClosed, which close() sets before it wakes
      if (isClosed) throw refusal(Reason.CLOSED);
      Moment now = Moment.now();
      int before = breaks.get();
      try {
        long ms = Math.min(limitMs, leftMs);
        Object answer = call(lock.kind, lock.keys, ms, lock.verb, attempt, lock.owner, queuedAt, "",
            ttlMs, minToken(), claimMs, wakeUps).get().get(0);
        problem = null;
        // Lettuce has sent it again: the first copy may arrive late, and be granted to nobody.
        isUnsure |= breaks.get() != before;
        if (answer instanceof List<?> busy) { // pttl and the server's clock
          observe(busy.get(1));
          if (claimMs == null) throw refusal(Reason.TIMED_OUT);
          if (queuedAt.equals("")) queuedAt = busy.get(1);
          long poll = isSubscribed && channel.equals(wakeUps) ? Math.min(ttlMs, 3000) / 2 : POLL_MS;
          return Math.max(1, Math.min((Long) busy.get(0), poll));
        }
        token = (Long) answer;
        if (token < 0) throw refusal(Reason.values()[(int) -token - 1]);
        sent = now;
        renewIn(ttlMs / 3 - now.ageMs()); // at once if the grant came too late, to release it
        return 1;
      } catch (ExecutionException e) { // the outcome is unknown: the same request again
        problem = e.getCause();
        isUnsure = true;
        if (claimMs != null && !isFinal(e)) return POLL_MS;
        throw new LockException(Reason.SERVER, lock, problem);
      }
    }

    private LockException refusal(Reason reason) {
      if (!isUnsure && queuedAt.equals("")) released = completedFuture(false);
      return new LockException(reason, lock, problem);
    }

    private void renewIn(long ms) { // at the deadline at the latest, to report the loss
      TIMER.schedule(() -> extend("renew", null).whenComplete((isHeld, e) -> {
        long pauseMs = e == null ? ttlMs / 3 - sent.ageMs() : Math.min(ttlMs / 30, 1000);
        if (e != null || isHeld) renewIn(pauseMs);
      }), Math.max(1, Math.min(ms, sent.leftMs(ttlMs))), MILLISECONDS);
    }

    private CompletableFuture<Boolean> extend(String verb, Object minToken) {
      Moment now = Moment.now();
      long ms = Math.min(LIMIT_MS, Math.max(1, sent.leftMs(ttlMs) / 4));
      var reply = !isValid() ? completedFuture(List.<Object>of(0L))
          : call(lock.kind, lock.keys, ms, verb, attempt, lock.owner, ttlMs, minToken);
      return reply.thenApply(answer -> {
        observe(answer.get(0));
        if (answer.get(0).equals(-5L)) // refused: the lease is as it was
          throw new LockException(Reason.MALFORMED, lock, null);
        if ((Long) answer.get(0) <= 0 || !isValid()) lose(); // no late answer revives it
        sent = now;
        return isValid();
      });
    }

    private void lose() {
      end(true);
      try { // jobs that the signal stops may fill any common pool
        if (isLost) start(() -> lost.complete(null));
      } catch (OutOfMemoryError e) { // no more threads
        lost.complete(null);
      }
    }

    private synchronized CompletableFuture<Boolean> end(boolean isLost) {
      waiters.remove(attempt);
      if (released != null) return released;
      if (!queuedAt.equals("")) ended.put(attempt, this);
      underWay.incrementAndGet();
      released = giveUp(Moment.now()).whenComplete((isHeld, e) -> {
        underWay.decrementAndGet();
        if (!queuedAt.equals("")) TIMER.schedule(() -> ended.remove(attempt), 1, MINUTES);
      }).thenApply(isHeld -> isHeld && !isLost);
      this.isLost = isLost;
      return released;
    }

    /** Releases until answered, or nothing is left. Remembers, since Lettuce repeats requests. */
    private CompletableFuture<Boolean> giveUp(Moment start) {
      return call(lock.kind, lock.keys, limitMs, "release", attempt, lock.owner, "", minToken(),
          1, claimMs, wakeUps).thenApply(answer -> (Long) answer.get(0) > 0)
          .exceptionallyComposeAsync(e -> isFinal(e) || start.ageMs() > ttlMs
              || link.isCompletedExceptionally() ? failedFuture(e) : giveUp(start),
              task -> TIMER.schedule(task, POLL_MS, MILLISECONDS));
    }

    /**
     * For a message that names this attempt after its end: a failover may have revived it. Or a
     * poll was granted the lock, and the message of that grant is read late. If this request came
     * before a release under way, that one would find nothing, as if the lease had been lost.
     */
    private synchronized void releaseAgain() {
      released.whenComplete((isHeld, e) -> call(lock.kind, lock.keys, limitMs, "release", attempt,
          lock.owner, "", minToken()));
    }

    private boolean join(CompletableFuture<Boolean> reply) {
      try {
        return limit(reply.copy(), timeoutMs).join();
      } catch (CompletionException e) {
        throw e.getCause() instanceof LockException refused ? refused
            : new LockException(Reason.SERVER, lock, e.getCause());
      }
    }
  }

  /** A clock that counts suspension; without /proc/uptime, two clocks to compare. */
  private record Moment(long ms, long wallOffset) {
    // Kept open: a program that runs out of files keeps its clock. An interrupt closes a channel.
    private static final RandomAccessFile UPTIME = open();

    private static RandomAccessFile open() {
      try {
        return new RandomAccessFile("/proc/uptime", "r");
      } catch (IOException e) {
        return null;
      }
    }

    static Moment now() {
      try {
        if (UPTIME == null) throw new FileNotFoundException();
        byte[] text = new byte[64];
        synchronized (UPTIME) {
          UPTIME.seek(0);
          UPTIME.read(text);
        }
        String uptime = new String(text, UTF_8).split(" ")[0];
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
