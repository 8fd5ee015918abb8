package redlatch;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.lettuce.core.RedisURI;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.reflect.Field;
import java.nio.file.Files;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;
import java.util.function.LongSupplier;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

/** One server. The oracle is a plain connection to it. */
class RedlatchTest {
  private static final Duration TTL = Duration.ofSeconds(20);
  private static final Duration LIMIT = Duration.ofSeconds(15);
  private static final Duration TRY = Duration.ZERO;
  private static Server server;
  private static Redlatch a;
  private static Redlatch b;

  @BeforeAll
  static void start() throws Exception {
    server = new Server();
    a = server.open();
    b = server.open();
  }

  @AfterAll
  static void stop() throws Exception {
    server.close();
  }

  @BeforeEach
  void empty() {
    server.send("FLUSHALL");
  }

  private static Redlatch.Reason refusal(Redlatch.Lock lock, Duration limit) {
    return assertThrows(Redlatch.LockException.class, () -> lock.acquire(TTL, limit)).reason;
  }

  private static CompletableFuture<Redlatch.Lease> acquireLater(Redlatch.Lock lock, Duration ttl) {
    return CompletableFuture.supplyAsync(() -> {
      try {
        return lock.acquire(ttl, LIMIT);
      } catch (InterruptedException e) {
        throw new IllegalStateException(e);
      }
    }, task -> new Thread(task).start());
  }

  private static Redlatch.Lease get(CompletableFuture<Redlatch.Lease> lease) throws Exception {
    return lease.get(20, TimeUnit.SECONDS);
  }

  private static void awaitWaiters(String name, long count) {
    Server.await(count + " waiters", () -> server.waiters(name) == count);
  }

  @Test
  void mutex_excludes_other_threads_and_clients() throws Exception {
    List<Thread> threads = new ArrayList<>();
    List<Long> tokens = new ArrayList<>(); // guarded by the lock alone
    for (Redlatch client : List.of(a, b, a, b)) {
      threads.add(new Thread(() -> {
        for (int i = 0; i < 25; i++) {
          try (Redlatch.Lease lease = client.mutex("x").acquire(TTL, LIMIT)) {
            long value = server.number("INCRBY", "counter", 0);
            server.send("SET", "counter", value + 1);
            tokens.add(lease.token());
          } catch (InterruptedException e) {
            return;
          }
        }
      }));
    }
    threads.forEach(Thread::start);
    for (Thread thread : threads) {
      thread.join(30_000);
    }
    assertEquals(100, server.number("GET", "counter"));
    assertEquals(tokens.stream().sorted().distinct().toList(), tokens);
    assertEquals(0, server.number("EXISTS", "lock:x"));
    assertEquals(0, server.waiters("x"));
    assertFalse(String.valueOf(server.send("INFO", "commandstats")).contains("script|load"));
  }

  @Test
  void holds_of_one_owner_nest() throws Exception {
    String owner = UUID.randomUUID().toString();
    Redlatch.Lease outer = a.reentrant("x", owner).acquire(TTL, LIMIT);
    Redlatch.Lease inner = b.reentrant("x", owner).acquire(TTL, LIMIT);
    assertEquals(outer.token(), inner.token());
    assertEquals("2", server.send("HGET", "lock:x", owner));
    assertEquals(Redlatch.Reason.TIMED_OUT, refusal(b.reentrant("x", "another"), TRY));
    assertTrue(outer.release());
    assertTrue(inner.renew());
    assertEquals("1", server.send("HGET", "lock:x", owner));
    assertTrue(inner.release());
    assertEquals(0, server.number("EXISTS", "lock:x"));
  }

  @Test
  void depth_above_255_is_refused() throws Exception {
    Redlatch.Lock lock = a.reentrant("x", "o");
    List<Redlatch.Lease> holds = new ArrayList<>();
    for (int i = 0; i < 255; i++) {
      holds.add(lock.acquire(TTL, LIMIT));
    }
    assertEquals(Redlatch.Reason.TOO_DEEP, refusal(lock, LIMIT));
    holds.forEach(Redlatch.Lease::close);
    assertEquals(0, server.number("EXISTS", "lock:x"));
  }

  @Test
  void readers_share_and_a_writer_excludes() throws Exception {
    Redlatch.Lease one = a.read("x", "").acquire(TTL, LIMIT);
    Redlatch.Lease two = b.read("x", "").acquire(TTL, LIMIT);
    assertEquals(one.token(), two.token());
    assertEquals(Redlatch.Reason.TIMED_OUT, refusal(a.write("x", ""), TRY));
    var writer = acquireLater(a.write("x", ""), TTL);
    awaitWaiters("x", 1);
    assertTrue(one.release());
    assertFalse(writer.isDone());
    assertTrue(two.release());
    try (Redlatch.Lease lease = get(writer)) {
      assertTrue(lease.token() > one.token());
      assertEquals(Redlatch.Reason.TIMED_OUT, refusal(b.read("x", ""), TRY));
    }
    assertEquals(0, server.number("EXISTS", "lock:x"));
  }

  @Test
  void downgraded_writer_reads_beside_others() throws Exception {
    Redlatch.Lease writer = a.write("x", "o").acquire(TTL, LIMIT);
    var reader = acquireLater(b.read("x", ""), TTL);
    awaitWaiters("x", 1);
    assertTrue(writer.downgrade());
    try (Redlatch.Lease lease = get(reader)) {
      assertEquals(writer.token(), lease.token());
      assertEquals(Redlatch.Reason.TIMED_OUT, refusal(b.write("x", ""), TRY));
      assertTrue(writer.renew());
    }
    assertTrue(writer.release());
    assertEquals(0, server.number("EXISTS", "lock:x"));
  }

  @Test
  void second_reader_that_waits_to_write_is_refused() throws Exception {
    try (Redlatch.Lease one = a.read("x", "o1").acquire(TTL, LIMIT)) {
      Redlatch.Lease two = b.read("x", "o2").acquire(TTL, LIMIT);
      var upgrade = acquireLater(a.write("x", "o1"), TTL);
      awaitWaiters("x", 1);
      assertEquals(Redlatch.Reason.WOULD_DEADLOCK, refusal(b.write("x", "o2"), LIMIT));
      two.release();
      get(upgrade).release();
    }
    assertEquals(0, server.waiters("x"));
  }

  @Test
  void handover_is_notified_and_not_polled() throws Exception {
    List<Long> pauses = new ArrayList<>();
    for (int i = 0; i < 9; i++) {
      Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
      var waiter = acquireLater(b.mutex("x"), TTL);
      awaitWaiters("x", 1);
      long start = System.nanoTime();
      lease.release();
      get(waiter).release();
      pauses.add((System.nanoTime() - start) / 1_000_000);
    }
    assertNotified(pauses);
  }

  /** A busy machine delays some waiters, by any time; one that has just polled waits 1500 ms. */
  static void assertNotified(List<Long> pauses) {
    pauses.sort(null);
    long median = pauses.get(pauses.size() / 2);
    assertTrue(median < 1000, "a waiter polls every 1500 ms, and had to wait " + pauses);
  }

  @Test
  void killed_holder_is_succeeded_when_its_ttl_has_passed() throws Exception {
    try (WorkerProcess holder = new WorkerProcess()) {
      holder.ask("{'do':'acquire','kind':'mutex','name':'x','ttl_ms':3000,'as':'h'}");
      holder.kill();
      long start = System.nanoTime(); // before its TTL is asked for
      long left = server.number("PTTL", "lock:x");
      Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
      long waited = (System.nanoTime() - start) / 1_000_000;
      assertTrue(left > 0 && waited >= left - 100, waited + " ms for a TTL of " + left);
      assertTrue(lease.release());
    }
  }

  @Test
  void killed_waiter_delays_the_next_for_a_claim_at_most() throws Exception {
    try (WorkerProcess dead = new WorkerProcess()) {
      Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
      dead.send("{'do':'acquire','kind':'mutex','name':'x','ttl_ms':3000,'limit_ms':20000,'as':'h','async':true,'id':1}");
      awaitWaiters("x", 1);
      var waiter = acquireLater(b.mutex("x"), TTL);
      awaitWaiters("x", 2);
      dead.kill();
      long start = System.nanoTime();
      lease.release();
      get(waiter).release();
      assertTrue(System.nanoTime() - start < 5_500_000_000L, "a claim is 3 s");
    }
  }

  @Test
  void renewal_keeps_the_lock_beyond_its_ttl() throws Exception {
    Redlatch.Lease lease = a.mutex("x").acquire(Duration.ofSeconds(6), LIMIT);
    String holder = (String) server.send("GET", "lock:x");
    long end = server.time() + 9_000_000;
    Server.await("one and a half TTLs", () -> {
      assertEquals(holder, server.send("GET", "lock:x"));
      return server.time() > end;
    });
    assertTrue(lease.isValid());
    assertFalse(lease.lost.isDone());
    assertTrue(lease.release());
  }

  @Test
  void revoked_lease_is_reported_as_lost_and_never_revived() throws Exception {
    Redlatch.Lease lease = a.mutex("x").acquire(Duration.ofSeconds(9), LIMIT);
    Object revoked = server.run("mutex", "x", "release", "f1", "", "", "", "", "", "", "", 1);
    assertEquals(List.of(1L), revoked);
    lease.lost.get(10, TimeUnit.SECONDS);
    assertFalse(lease.isValid());
    assertFalse(lease.renew());
    assertFalse(lease.release());
    assertEquals(0, server.number("EXISTS", "lock:x"));
  }

  @Test
  void late_release_of_an_expired_lease_returns_false() throws Exception {
    Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
    server.send("DEL", "lock:x");
    Redlatch.Lease next = b.mutex("x").acquire(TTL, LIMIT);
    assertFalse(lease.release());
    assertTrue(next.renew());
    assertTrue(next.release());
    assertFalse(next.renew());
    assertFalse(next.lost.isDone());
  }

  @Test
  void works_on_and_is_notified_after_all_connections_were_killed() throws Exception {
    List<Long> pauses = new ArrayList<>();
    for (int i = 0; i < 5; i++) {
      Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
      var waiter = acquireLater(b.mutex("x"), TTL);
      awaitWaiters("x", 1);
      awaitSubscriptions(2); // a machine that stalled for a second ended one, or let one stay
      server.send("CLIENT", "KILL", "TYPE", "pubsub");
      server.send("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes");
      awaitSubscriptions(2);
      assertTrue(lease.renew());
      long start = System.nanoTime();
      lease.release();
      get(waiter).release();
      pauses.add((System.nanoTime() - start) / 1_000_000);
    }
    assertNotified(pauses);
  }

  private static void awaitSubscriptions(int count) {
    Server.await(count + " subscriptions",
        () -> ((List<?>) server.send("PUBSUB", "CHANNELS", "lock:wake:*")).size() == count);
  }

  @Test
  void timed_out_and_interrupted_waiters_leave_the_queue() throws Exception {
    try (Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT)) {
      assertEquals(Redlatch.Reason.TIMED_OUT, refusal(b.mutex("x"), Duration.ofMillis(300)));
      awaitWaiters("x", 0);
      CompletableFuture<Throwable> thrown = new CompletableFuture<>();
      Thread thread = new Thread(() -> thrown.complete(
          assertThrows(InterruptedException.class, () -> b.mutex("x").acquire(TTL, LIMIT))));
      thread.start();
      awaitWaiters("x", 1);
      thread.interrupt();
      thrown.get(10, TimeUnit.SECONDS);
      awaitWaiters("x", 0);
      assertTrue(lease.release());
    }
    assertEquals(0, server.number("EXISTS", "lock:x"));
  }

  @Test
  void answer_after_the_deadline_is_given_up() throws Exception {
    boolean isHeld = false;
    for (int i = 0; i < 100 && !isHeld; i++) { // again if the machine is late as well
      server.send("CLIENT", "PAUSE", 80); // longer than the TTL, less than the limit of a request
      Redlatch.Lease lease = a.mutex("x").acquire(Duration.ofMillis(50), LIMIT);
      boolean isValid = lease.isValid();
      isHeld = lease.release() && isValid;
    }
    assertTrue(isHeld, "no attempt has followed");
    Server.await("only end marks are left", () -> server.number("EXISTS", "lock:x") == 0 && server.waiters("x") == 0);
  }

  /** The answers of a client that is closed and of all others are read by the same threads. */
  @Test
  void close_does_not_wait_for_an_answer_that_waits_for_it() throws Exception {
    for (int i = 0; i < 100; i++) { // once its subscription is confirmed, an answer is on its way
      Redlatch client = server.open();
      CompletableFuture.runAsync(client::close, task -> new Thread(task).start())
          .get(20, TimeUnit.SECONDS);
    }
  }

  @Test
  void scripts_are_sent_again_after_script_flush() throws Exception {
    a.mutex("x").acquire(TTL, LIMIT).close();
    server.send("SCRIPT", "FLUSH");
    assertTrue(a.mutex("x").acquire(TTL, LIMIT).release());
  }

  @Test
  void tokens_ascend_after_the_counter_was_lost() throws Exception {
    Redlatch.Lease first = a.mutex("x").acquire(TTL, LIMIT);
    first.release();
    server.send("DEL", "{lock:x}:fence");
    Redlatch.Lease second = a.mutex("x").acquire(TTL, LIMIT);
    second.release();
    assertTrue(second.token() > first.token());
  }

  @Test
  void reserved_names_are_refused() {
    for (String name : List.of("", "a}b", "{}a", "{a}:fence", "x{a}y:waiters", "{a}{}node", "x".repeat(513), "x\uD800")) {
      assertThrows(IllegalArgumentException.class, () -> a.mutex(name), name);
    }
    for (String name : List.of("a{b", "{a}", "x:fence", "{a}fence", "x".repeat(512), "a b\nc", "\uD83D\uDE00")) {
      a.mutex(name);
    }
  }

  @Test
  void foreign_keys_are_refused_and_unchanged() throws Exception {
    server.send("SET", "lock:x", "data");
    assertEquals(Redlatch.Reason.NO_TTL, refusal(a.mutex("x"), LIMIT));
    server.send("DEL", "lock:x");
    server.send("RPUSH", "lock:x", "data");
    assertEquals(Redlatch.Reason.WRONG_TYPE, refusal(a.reentrant("x", "o"), LIMIT));
    assertEquals(1, server.number("DBSIZE"));
  }

  private static void refuses(String argument, Executable call) {
    String text = assertThrows(IllegalArgumentException.class, call).getMessage();
    assertTrue(text.startsWith(argument + " must be "), text);
  }

  @Test
  void arguments_are_checked_before_a_request() throws Exception {
    for (String owner : Arrays.asList("", null, "two words", ":a", "mode", "é".repeat(129), "\uDC00")) {
      refuses("owner", () -> a.reentrant("x", owner));
    }
    refuses("owner", () -> a.read("x", null));
    refuses("owner", () -> a.write("x", "two words"));
    for (Duration ttl : List.of(Duration.ZERO, Duration.ofMillis(-1), Duration.ofMillis(13),
        Duration.ofMillis(10_000_000_000L), Duration.ofSeconds(Long.MAX_VALUE))) {
      refuses("ttl", () -> a.mutex("x").acquire(ttl, LIMIT));
    }
    refuses("limit", () -> a.mutex("x").acquire(TTL, Duration.ofMillis(-1)));
    assertEquals(0, server.number("DBSIZE"));
    Duration longest = Duration.ofMillis(9_999_999_999L);
    assertTrue(a.reentrant("x", "é".repeat(128)).acquire(longest, TRY).release());
    assertTrue(a.read("x", "mode").acquire(TTL, TRY).release());
  }

  @Test
  void second_release_has_the_answer_of_the_first() throws Exception {
    Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
    assertTrue(lease.release());
    assertTrue(lease.release());
    Redlatch.Lease lost = a.mutex("x").acquire(TTL, LIMIT);
    server.send("DEL", "lock:x");
    assertFalse(lost.release());
    assertFalse(lost.release());
  }

  /**
   * A message names a lease while it is released. The client releases an ended attempt once more
   * if a message names it. If that came before the release of the lease, it got the answer of that
   * release, which itself then found nothing, as if the lease had been lost.
   */
  @Test
  void message_during_a_release_is_dealt_with_after_it() throws Exception {
    Redlatch c = server.open();
    String news = (String) OutagesTest.field(c, "channel");
    Field ended = Redlatch.class.getDeclaredField("ended");
    ended.setAccessible(true);
    Server.await("it is subscribed", () -> (boolean) OutagesTest.field(c, "isSubscribed"));
    List<Object> named = Collections.synchronizedList(new ArrayList<>());
    LongSupplier calls = () -> Pattern.compile("cmdstat_evalsha:calls=(\\d+)")
        .matcher(String.valueOf(server.send("INFO", "commandstats"))).results()
        .mapToLong(found -> Long.parseLong(found.group(1))).sum();
    ended.set(c, new ConcurrentHashMap<String, Redlatch.Lease>() {
      @Override public Redlatch.Lease put(String attempt, Redlatch.Lease lease) {
        super.put(attempt, lease);
        named.add(server.send("PUBLISH", news, attempt + " 1 1 lock:x"));
        LockSupport.parkNanos(200_000_000); // a release that does not wait would be served now
        return null;
      }
    });
    Redlatch.Lease holder = a.mutex("x").acquire(TTL, LIMIT);
    var waiter = acquireLater(c.mutex("x"), TTL);
    awaitWaiters("x", 1);
    holder.release();
    Redlatch.Lease lease = get(waiter);
    long before = calls.getAsLong();
    assertTrue(lease.release());
    assertEquals(List.of(1L), named); // the listener got the message
    Server.await("a release for it", () -> calls.getAsLong() >= before + 2);
    c.close();
  }

  @Test
  void user_with_the_rights_of_the_page_may_do_everything() throws Exception {
    Matcher line = Pattern.compile("ACL SETUSER locks .*").matcher(Files.readString(Server.LUA.resolve("README.md")));
    assertTrue(line.find());
    server.send((Object[]) line.group().split(" "));
    Redlatch c = Server.open(RedisURI.create("redis://locks:secret@127.0.0.1:" + server.port));
    for (Redlatch.Lock lock : List.of(c.mutex("m"), c.reentrant("r", "o"), c.read("w", ""), c.write("w", ""))) {
      Redlatch.Lease lease = lock.acquire(TTL, LIMIT);
      assertTrue(lease.renew());
      var waiter = acquireLater(lock.kind().equals("mutex") ? lock : c.write("w2", ""), TTL);
      assertTrue(lease.release());
      assertTrue(get(waiter).release());
    }
    Redlatch.Lease lease = c.write("w", "").acquire(TTL, LIMIT);
    assertTrue(lease.downgrade());
    assertTrue(lease.release());
    c.close();
  }

  /** The worker in a process of its own, which can be killed. */
  private static final class WorkerProcess implements AutoCloseable {
    private final Process process;
    private final BufferedReader answers;

    WorkerProcess() throws Exception {
      process = new ProcessBuilder("java", "-XX:TieredStopAtLevel=1", "-cp", System.getProperty("java.class.path"),
          "redlatch.Worker").redirectError(ProcessBuilder.Redirect.DISCARD).start();
      answers = process.inputReader();
      ask("{'do':'open','url':'redis://127.0.0.1:" + server.port + "','topology':'server','prefix':'lock:'}");
    }

    void send(String command) throws Exception {
      process.outputWriter().write(command.replace('\'', '"') + "\n");
      process.outputWriter().flush();
    }

    void ask(String command) throws Exception {
      send(command);
      String answer = answers.readLine();
      assertTrue(answer != null && answer.contains("\"ok\":true"), answer);
    }

    void kill() throws InterruptedException {
      process.destroyForcibly().waitFor();
    }

    @Override
    public void close() {
      process.destroyForcibly();
    }
  }
}
