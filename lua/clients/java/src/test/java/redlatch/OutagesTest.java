package redlatch;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.lettuce.core.ClientOptions;
import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisURI;
import java.io.Closeable;
import java.io.FileInputStream;
import java.io.IOException;
import java.lang.reflect.Field;
import java.net.ServerSocket;
import java.net.Socket;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ForkJoinPool;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** A server that is slow or refuses, a program that is busy, and a client that is closed. */
class OutagesTest {
  private static final Duration TTL = Duration.ofSeconds(20);
  private static final Duration LIMIT = Duration.ofSeconds(15);
  private static final Duration TRY = Duration.ZERO;
  private Server server;
  private Redlatch a;
  private Redlatch b;

  @BeforeEach
  void start() throws Exception {
    server = new Server();
    a = server.open();
    b = server.open();
  }

  @AfterEach
  void stop() throws Exception {
    server.close();
  }

  private static <T> CompletableFuture<T> later(Callable<T> task) {
    CompletableFuture<T> result = new CompletableFuture<>();
    new Thread(() -> {
      try {
        result.complete(task.call());
      } catch (Throwable e) {
        result.completeExceptionally(e);
      }
    }).start();
    return result;
  }

  private static Redlatch.LockException refusal(CompletableFuture<?> call) {
    return (Redlatch.LockException) assertThrows(ExecutionException.class,
        () -> call.get(20, TimeUnit.SECONDS)).getCause();
  }

  private void awaitWaiters(long count) {
    Server.await(count + " waiters", () -> server.waiters("x") == count);
  }

  /** Until {@code writable}, scripts are refused with READONLY. */
  private void readOnly() {
    server.send("REPLICAOF", "127.0.0.1", 1);
  }

  private void writable() {
    Server.await("a refusal", () -> String.valueOf(server.send("INFO", "errorstats")).contains("READONLY"));
    server.send("REPLICAOF", "NO", "ONE");
  }

  /** Until UNPAUSE, scripts wait, while new connections are made. */
  private void pause() {
    server.send("CLIENT", "PAUSE", 20_000, "WRITE");
  }

  /** Waits for a script that waits: its connection has the flag b. */
  private void awaitBlocked() {
    Server.await("the request has come", () -> Pattern.compile("flags=\\w*b").matcher(
        String.valueOf(server.send("CLIENT", "LIST"))).find());
  }

  @Test
  void busy_common_pool_delays_neither_a_loss_nor_a_release() throws Exception {
    Redlatch.Lease lost = a.mutex("lost").acquire(Duration.ofMillis(1500), LIMIT);
    Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
    CountDownLatch end = new CountDownLatch(1);
    for (int i = 0; i < 64; i++) {
      ForkJoinPool.commonPool().submit(() -> {
        end.await();
        return null;
      });
    }
    try {
      server.send("DEL", "lock:lost");
      lost.lost.get(15, TimeUnit.SECONDS);
      readOnly();
      var released = later(lease::release);
      writable();
      assertTrue(released.get(15, TimeUnit.SECONDS));
    } finally {
      end.countDown();
    }
  }

  /** The timers of Lettuce, and the one of orTimeout, run what any code of the program waits for. */
  @Test
  void blocked_timers_of_others_delay_neither_a_limit_nor_a_loss() throws Exception {
    RedisClient client = RedisClient.create(server.uri());
    Redlatch c = new Redlatch(Server.LUA, "lock:", client);
    Redlatch.Lease lease = c.mutex("x").acquire(Duration.ofMillis(1500), LIMIT);
    CountDownLatch end = new CountDownLatch(1);
    CountDownLatch blocked = new CountDownLatch(1);
    client.getResources().eventExecutorGroup().forEach(each -> each.submit(() -> {
      end.await();
      return null;
    }));
    var timed = new CompletableFuture<>();
    timed.exceptionally(e -> { // before it is timed: afterwards, this thread itself may run it
      blocked.countDown();
      try {
        end.await();
      } catch (InterruptedException interrupted) {
        Thread.currentThread().interrupt();
      }
      return null;
    });
    timed.orTimeout(1, TimeUnit.MILLISECONDS);
    blocked.await();
    try {
      pause();
      assertEquals(Redlatch.Reason.TIMED_OUT, refusal(later(
          () -> c.mutex("y").acquire(TTL, Duration.ofMillis(500)))).reason);
      lease.lost.get(15, TimeUnit.SECONDS);
    } finally {
      end.countDown();
    }
  }

  @Test
  void signal_that_a_caller_completes_does_not_keep_the_lock() throws Exception {
    Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
    lease.lost.complete(null); // as orTimeout does
    assertTrue(lease.release());
    assertEquals(0, server.number("EXISTS", "lock:x"));
  }

  /** The output of a program in a process of its own, which has a limit of the shell. */
  private String run(String limit, Class<?> program) throws Exception {
    return new String(new ProcessBuilder("sh", "-c", limit + "; exec \"$0\" \"$@\"", "java",
        "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx64m", "-Xss256m", "-cp",
        System.getProperty("java.class.path"), program.getName(), "" + server.uri())
        .redirectErrorStream(true).start().getInputStream().readAllBytes());
  }

  @Test
  void program_without_free_file_descriptors_keeps_its_lease() throws Exception {
    String output = run("ulimit -n 256", OutOfFiles.class);
    assertTrue(output.contains("valid: true, then true, then true"), output);
  }

  static final class OutOfFiles {
    public static void main(String[] args) throws Exception {
      Redlatch c = Server.open(RedisURI.create(args[0]));
      Redlatch.Lease lease = c.mutex("x").acquire(TTL, LIMIT);
      boolean before = lease.isValid();
      List<Closeable> files = new ArrayList<>();
      try {
        while (true) {
          files.add(new FileInputStream("/dev/null"));
        }
      } catch (IOException e) { // none is left
      }
      boolean without = lease.isValid();
      for (Closeable file : files) {
        file.close();
      }
      System.out.println("valid: " + before + ", then " + without + ", then " + lease.isValid());
      System.exit(0);
    }
  }

  @Test
  void loss_is_signalled_where_no_thread_can_be_started() throws Exception {
    String output = run("ulimit -v 10000000; export MALLOC_ARENA_MAX=1", OutOfThreads.class);
    assertTrue(output.contains("held: false, lost: true, a thread: false"), output);
  }

  static final class OutOfThreads {
    public static void main(String[] args) throws Exception {
      RedisClient client = RedisClient.create(args[0]);
      var redis = client.connect().sync();
      Redlatch.Lease lease = new Redlatch(Server.LUA, "lock:", client).mutex("x").acquire(TTL, LIMIT);
      Semaphore end = new Semaphore(0);
      isStarted(120 << 20, end);
      for (int stack : List.of(0, 120 << 20)) { // 0: 256 MB, as one of the client
        while (isStarted(stack, new Semaphore(0))) {} // until less than 120 MB are left
      }
      end.release(); // for other uses
      redis.del("lock:x");
      boolean isHeld = lease.renew();
      System.out.println("held: " + isHeld + ", lost: " + lease.lost.isDone() + ", a thread: "
          + isStarted(0, end));
      System.exit(0);
    }

    private static boolean isStarted(long stack, Semaphore end) {
      Thread thread = new Thread(null, end::acquireUninterruptibly, "", stack);
      thread.setDaemon(true);
      try {
        thread.start();
        return true;
      } catch (OutOfMemoryError e) {
        return false;
      }
    }
  }

  @Test
  void close_ends_waiters_which_leave_the_queue() throws Exception {
    a.mutex("x").acquire(TTL, LIMIT);
    long fastest = Long.MAX_VALUE; // the others may have been delayed by a busy machine
    for (int i = 0; i < 4; i++) {
      Redlatch c = server.open();
      var waiter = later(() -> c.mutex("x").acquire(TTL, Duration.ofHours(1)));
      awaitWaiters(1);
      long start = System.nanoTime();
      c.close();
      assertEquals(0, server.waiters("x"));
      assertEquals("CLOSED", refusal(waiter).reason.name());
      fastest = Math.min(fastest, (System.nanoTime() - start) / 1_000_000);
      assertEquals("CLOSED", refusal(later(() -> c.mutex("y").acquire(TTL, TRY))).reason.name());
      c.close();
    }
    assertTrue(fastest < 1000, "at once, not at the next poll, after 1500 ms: " + fastest);
  }

  @Test
  void close_waits_for_a_release_that_is_repeated() throws Exception {
    Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
    readOnly();
    var released = later(lease::release);
    Server.await("a refusal", () -> String.valueOf(server.send("INFO", "errorstats")).contains("READONLY"));
    var closed = later(() -> {
      a.close();
      return server.number("EXISTS", "lock:x");
    });
    Thread.sleep(300);
    writable();
    assertEquals(0, closed.get(10, TimeUnit.SECONDS));
    assertTrue(released.get(10, TimeUnit.SECONDS));
  }

  @Test
  void lock_that_is_granted_during_close_is_released() throws Exception {
    pause();
    var attempt = later(() -> a.mutex("x").acquire(TTL, LIMIT));
    awaitBlocked();
    var closed = later(() -> {
      a.close();
      return null;
    });
    Server.await("it is closing", () -> (boolean) field(a, "isClosed"));
    server.send("CLIENT", "UNPAUSE");
    assertEquals(Redlatch.Reason.CLOSED, refusal(attempt).reason);
    closed.get(15, TimeUnit.SECONDS);
    assertEquals(0, server.number("EXISTS", "lock:x"));
  }

  @Test
  void constructor_that_fails_leaves_no_connection() throws Exception {
    server.send("ACL", "SETUSER", "u", "on", ">p", "~*", "&*", "+@all", "-time");
    RedisURI uri = RedisURI.create("redis://u:p@127.0.0.1:" + server.port);
    assertThrows(RuntimeException.class, () -> Server.open(uri));
    Server.await("it is closed", () -> !String.valueOf(server.send("CLIENT", "LIST")).contains("user=u "));
  }

  /** Passes connections on to the server, or lets them wait in their handshake. */
  private final class Relay implements AutoCloseable {
    private final ServerSocket socket = new ServerSocket(0);
    private final List<Socket> waiting = new ArrayList<>(); // guarded by this
    private boolean hangs;

    Relay() throws IOException {
      later(() -> {
        while (true) {
          accept(socket.accept());
        }
      });
    }

    private synchronized void accept(Socket from) throws IOException {
      waiting.add(from);
      if (!hangs) pass(waiting.size() - 1);
    }

    synchronized void hang() {
      hangs = true;
      waiting.clear();
    }

    synchronized int waiting() {
      return waiting.size();
    }

    /** The result is done when the client has closed the connection. */
    synchronized CompletableFuture<?> pass(int index) throws IOException {
      Socket from = waiting.get(index);
      Socket to = new Socket("127.0.0.1", server.port);
      later(() -> to.getInputStream().transferTo(from.getOutputStream()));
      return later(() -> from.getInputStream().transferTo(to.getOutputStream()));
    }

    RedisURI uri() {
      return RedisURI.create("redis://127.0.0.1:" + socket.getLocalPort() + "?timeout=60s");
    }

    @Override
    public void close() throws IOException {
      socket.close();
    }
  }

  @Test
  void replacement_that_hangs_in_its_handshake_is_not_waited_for() throws Exception {
    try (Relay relay = new Relay()) {
      Redlatch c = Server.open(relay.uri());
      Field closed = Redlatch.class.getDeclaredField("isClosed");
      closed.setAccessible(true);
      closed.set(c, true); // ends the subscription, whose connections the relay would count
      ((Semaphore) field(c, "broken")).release();
      ((Thread) field(c, "subscriber")).join();
      Object silent = field(c, "link");
      var replace = Redlatch.class.getDeclaredMethod("replace", silent.getClass());
      replace.setAccessible(true);
      for (int used : List.of(1, 0)) { // the second one answers, then the first one
        Object before = field(c, "link");
        relay.hang();
        for (int count : List.of(1, 2)) {
          replace.invoke(c, before);
          Server.await(count + " connections", () -> relay.waiting() == count);
          assertSame(before, field(c, "link"), "used again after a second");
        }
        relay.pass(used);
        Server.await("it is used", () -> before != field(c, "link"));
        Object made = field(c, "link");
        var late = relay.pass(1 - used);
        Server.await("the late one is closed", late::isDone);
        assertSame(made, field(c, "link"));
      }
    }
  }

  @Test
  void waiters_poll_once_the_subscription_has_ended() throws Exception {
    Server.await("it is subscribed", () -> (boolean) field(a, "isSubscribed"));
    Semaphore wake = new Semaphore(0) {
      @Override public void release() { // not for the confirmation
        if (!(boolean) field(a, "isSubscribed")) super.release();
      }
    };
    @SuppressWarnings("unchecked")
    var waiters = (Map<String, Semaphore>) field(a, "waiters");
    waiters.put("another", wake);
    server.send("ACL", "SETUSER", "default", "resetchannels"); // ends it, and refuses a new one
    assertTrue(wake.tryAcquire(20, TimeUnit.SECONDS));
  }

  @Test
  void released_leases_that_never_queued_are_not_kept() throws Exception {
    var queue = ((ScheduledThreadPoolExecutor) field(null, "TIMER")).getQueue();
    int before = queue.size();
    for (int i = 0; i < 200; i++) {
      assertTrue(a.mutex("x").acquire(Duration.ofSeconds(6), LIMIT).release());
    }
    Server.await("their renewals are over", () -> queue.size() < before + 100);
  }

  /** The clock of /proc/uptime is up to 10 ms behind, so the offset to the server's is too large. */
  @Test
  void min_token_is_never_ahead_of_the_clock_of_the_server() throws Exception {
    var observe = Redlatch.class.getDeclaredMethod("observe", Object.class);
    var now = Class.forName("redlatch.Redlatch$Moment").getDeclaredMethod("now");
    var ms = now.getReturnType().getDeclaredMethod("ms");
    for (var method : List.of(observe, now, ms)) {
      method.setAccessible(true);
    }
    for (int i = 0; i < 500; i++) {
      observe.invoke(a, server.time());
      long clock = (long) ms.invoke(now.invoke(null)) * 1000 + (long) field(a, "offset");
      long ahead = clock - server.time();
      assertTrue(ahead <= 0, ahead + " µs");
    }
  }

  @Test
  void close_leaves_no_connection_that_is_made_later() throws Exception {
    RedisURI uri = server.uri();
    uri.setClientName("c");
    Redlatch c = Server.open(uri);
    Object before = field(c, "link");
    var method = Redlatch.class.getDeclaredMethod("replace", before.getClass());
    method.setAccessible(true);
    server.signal("STOP");
    method.invoke(c, before); // connects to a server that does not answer
    Thread.sleep(1200);
    var closed = later(() -> {
      c.close();
      return null;
    });
    Thread.sleep(1500);
    server.signal("CONT");
    closed.get(10, TimeUnit.SECONDS);
    Thread.sleep(1500);
    Server.await("all are closed", () -> !String.valueOf(server.send("CLIENT", "LIST")).contains(" name=c "));
  }

  static Object field(Redlatch client, String name) { // null: static
    try {
      Field field = Redlatch.class.getDeclaredField(name);
      field.setAccessible(true);
      Object value = field.get(client);
      return value instanceof CompletableFuture<?> future ? future.get(20, TimeUnit.SECONDS) : value;
    } catch (Exception e) {
      throw new IllegalStateException(e);
    }
  }

  @Test
  void short_time_limit_keeps_a_healthy_connection() throws Exception {
    Object link = field(a, "link");
    pause();
    assertEquals(Redlatch.Reason.TIMED_OUT, refusal(later(
        () -> a.mutex("x").acquire(TTL, Duration.ofMillis(5)))).reason);
    assertSame(link, field(a, "link"));
  }

  @Test
  void replaced_connection_still_answers_others() throws Exception {
    Object link = field(a, "link");
    pause();
    var attempt = later(() -> a.mutex("x").acquire(TTL, TRY));
    awaitBlocked();
    var repeated = later(() -> a.mutex("y").acquire(Duration.ofSeconds(6), LIMIT));
    Server.await("1.5 s without an answer replace it", () -> link != field(a, "link"));
    server.send("CLIENT", "UNPAUSE");
    assertTrue(repeated.get(15, TimeUnit.SECONDS).release());
    assertTrue(attempt.get(15, TimeUnit.SECONDS).release());
  }

  @Test
  void connection_that_lettuce_may_not_open_again_is_replaced() throws Exception {
    RedisClient client = RedisClient.create(server.uri());
    client.setOptions(ClientOptions.builder().autoReconnect(false).build());
    Redlatch c = new Redlatch(Server.LUA, "lock:", client);
    server.send("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes");
    assertTrue(c.mutex("x").acquire(TTL, LIMIT).release());
  }

  @Test
  void no_timeout_of_lettuce_and_a_huge_limit_are_usable() throws Exception {
    var uri = server.uri();
    uri.setTimeout(Duration.ZERO);
    Redlatch c = Server.open(uri);
    Redlatch.Lease lease = c.mutex("x").acquire(TTL, TRY);
    assertTrue(lease.renew());
    assertTrue(lease.release());
    assertTrue(c.mutex("x").acquire(TTL, Duration.ofSeconds(Long.MAX_VALUE)).release());
  }

  @Test
  void downgrade_of_a_mutex_is_refused() throws Exception {
    Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
    assertEquals(Redlatch.Reason.MALFORMED, refusal(later(lease::downgrade)).reason);
    assertTrue(lease.isValid());
    assertTrue(lease.renew());
    assertTrue(lease.release());
  }

  @Test
  void busy_try_is_given_up_if_the_connection_broke() throws Exception {
    // Lettuce sends the request of a broken connection again: the first one may come later.
    b.mutex("x").acquire(TTL, LIMIT);
    assertEquals(Redlatch.Reason.TIMED_OUT, refusal(later(() -> a.mutex("x").acquire(TTL, TRY))).reason);
    assertEquals(0, server.number("ZCARD", "{lock:x}:waiters"));
    pause();
    var attempt = later(() -> a.mutex("x").acquire(TTL, TRY));
    awaitBlocked();
    server.send("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes");
    server.send("CLIENT", "UNPAUSE");
    assertEquals(Redlatch.Reason.TIMED_OUT, refusal(attempt).reason);
    Server.await("an end mark", () -> server.number("ZCARD", "{lock:x}:waiters") == 1);
  }

  @Test
  void failure_that_has_passed_is_not_the_cause_of_a_timeout() throws Exception {
    b.mutex("x").acquire(TTL, LIMIT);
    readOnly();
    var waiter = later(() -> a.mutex("x").acquire(TTL, Duration.ofSeconds(5)));
    writable();
    awaitWaiters(1);
    Redlatch.LockException e = refusal(waiter);
    assertEquals(Redlatch.Reason.TIMED_OUT, e.reason);
    assertFalse(("" + e.getCause()).contains("READONLY"), "" + e.getCause());
  }
}
