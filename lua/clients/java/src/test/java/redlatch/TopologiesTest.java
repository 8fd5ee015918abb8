package redlatch;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.lettuce.core.RedisURI;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;

/** A cluster of three masters; a master with a replica and a Sentinel. */
class TopologiesTest {
  private static final Duration TTL = Duration.ofSeconds(60); // longer than a failover
  private static final Duration LIMIT = Duration.ofSeconds(60);

  private static CompletableFuture<Redlatch.Lease> acquireLater(Redlatch.Lock lock) {
    CompletableFuture<Redlatch.Lease> lease = new CompletableFuture<>();
    new Thread(() -> {
      try {
        lease.complete(lock.acquire(TTL, LIMIT));
      } catch (Exception e) {
        lease.completeExceptionally(e);
      }
    }).start();
    return lease;
  }

  /** Three masters, and nodes without a slot. */
  private static void join(List<Server> nodes, int count) throws Exception {
    for (int i = 0; i < count; i++) {
      nodes.add(new Server("save \"\"\ncluster-enabled yes"));
      assumeTrue(nodes.get(i).process.isAlive(), "the server has no cluster mode");
      List<Object> slots = new ArrayList<>(List.of("CLUSTER", "ADDSLOTS"));
      for (int slot = i; i < 3 && slot < 16384; slot += 3) {
        slots.add(slot);
      }
      if (i < 3) assertEquals("OK", nodes.get(i).send(slots.toArray()));
    }
    for (Server node : nodes) {
      node.send("CLUSTER", "SET-CONFIG-EPOCH", nodes.indexOf(node) + 1);
      nodes.get(0).send("CLUSTER", "MEET", "127.0.0.1", node.port);
    }
    for (String text : List.of("cluster_state:ok", "cluster_known_nodes:" + count)) {
      Server.await(text, () -> nodes.stream().allMatch(node ->
          String.valueOf(node.send("CLUSTER", "INFO")).contains(text)));
    }
  }

  /** It closes no connection, so Lettuce by itself would not ask which master has its slots now. */
  @Test
  void master_of_a_cluster_that_hangs_is_left() throws Exception {
    List<Server> nodes = new ArrayList<>();
    try {
      join(nodes, 4);
      Server replica = nodes.get(3);
      replica.send("CLUSTER", "REPLICATE", nodes.get(0).send("CLUSTER", "MYID"));
      Server.await("the replica is synchronized", () -> String.valueOf(
          replica.send("INFO", "replication")).contains("master_link_status:up"));
      String name = IntStream.range(0, 100).mapToObj(i -> "x" + i).filter(each ->
          nodes.get(0).send("EXISTS", "lock:" + each) instanceof Long).findFirst().get();
      RedisURI uri = nodes.get(1).uri();
      uri.setTimeout(Duration.ofSeconds(5)); // of questions to the nodes that hang, too
      Redlatch a = Server.openCluster(uri);
      Duration ttl = Duration.ofSeconds(8); // a request may take 2 s
      assertTrue(a.mutex(name).acquire(ttl, LIMIT).release());
      nodes.get(0).signal("STOP");
      replica.send("CLUSTER", "FAILOVER", "TAKEOVER");
      Server.await("the replica is the master", () ->
          String.valueOf(replica.send("ROLE")).contains("master"));
      assertTrue(a.mutex(name).acquire(ttl, LIMIT).release());
    } finally {
      for (Server node : nodes) {
        node.close();
      }
    }
  }

  @Test
  void cluster_locks_in_every_slot_and_is_notified_by_every_node() throws Exception {
    List<Server> nodes = new ArrayList<>();
    try {
      join(nodes, 3);
      Redlatch a = Server.openCluster(nodes.get(0).uri());
      Redlatch b = Server.openCluster(nodes.get(1).uri());
      List<Long> pauses = new ArrayList<>();
      for (int i = 0; i < 9; i++) {
        String name = "x" + i;
        Redlatch.Lease lease = a.mutex(name).acquire(TTL, LIMIT);
        var waiter = acquireLater(b.mutex(name));
        Server.await("queued", () -> waiters(nodes, name) == 1);
        long start = System.nanoTime();
        assertTrue(lease.release());
        assertTrue(waiter.get(20, TimeUnit.SECONDS).release());
        pauses.add((System.nanoTime() - start) / 1_000_000);
        assertEquals(0, waiters(nodes, name));
      }
      RedlatchTest.assertNotified(pauses);
    } finally {
      for (Server node : nodes) {
        node.close();
      }
    }
  }

  /** The number of waiters, asked at the node that has the slot; the others answer MOVED. */
  private static long waiters(List<Server> nodes, String name) {
    return nodes.stream().map(node -> node.send("ZCOUNT", "{lock:" + name + "}:waiters", "-inf",
        "(4503599627370496")).filter(Long.class::isInstance).mapToLong(Long.class::cast).sum();
  }

  @Test
  void sentinel_failover_keeps_the_lease_and_the_waiter() throws Exception {
    try (Server master = new Server();
        Server replica = new Server("save \"\"\nreplicaof 127.0.0.1 " + master.port)) {
      Server.await("the replica is synchronized", () -> String.valueOf(
          replica.send("INFO", "replication")).contains("master_link_status:up"));
      try (Server sentinel = new Server("sentinel monitor main 127.0.0.1 " + master.port
          + " 1\nsentinel down-after-milliseconds main 60000", "--sentinel")) {
        assumeTrue(sentinel.process.isAlive(), "the server has no Sentinel mode");
        Server.await("Sentinel knows the replica", () ->
            sentinel.send("SENTINEL", "REPLICAS", "main") instanceof List<?> list && list.size() == 1);
        // A machine that stalls for 2 s must not make it refuse to act for 30 s; from 7.0 on.
        sentinel.send("SENTINEL", "DEBUG", "tilt-trigger", "60000");
        RedisURI uri = RedisURI.builder().withSentinel("127.0.0.1", sentinel.port)
            .withSentinelMasterId("main").withTimeout(Duration.ofSeconds(10)).build();
        Redlatch a = Server.open(uri);
        Redlatch b = Server.open(uri);
        Redlatch.Lease lease = a.mutex("x").acquire(TTL, LIMIT);
        var waiter = acquireLater(b.mutex("x"));
        Server.await("replicated", () -> replica.waiters("x") == 1);
        // Only now: a machine that stalls must not make it promote the replica of a living master.
        sentinel.send("SENTINEL", "SET", "main", "down-after-milliseconds", 1000);
        master.process.destroyForcibly();
        Server.await("the replica is the master", () ->
            String.valueOf(replica.send("ROLE")).contains("master"));
        Server.await("both subscribed again", () ->
            ((List<?>) replica.send("PUBSUB", "CHANNELS", "lock:wake:*")).size() == 2);
        assertTrue(lease.renew());
        assertTrue(lease.release());
        try (Redlatch.Lease next = waiter.get(60, TimeUnit.SECONDS)) {
          assertTrue(next.token() > lease.token());
          assertEquals(1, replica.number("EXISTS", "lock:x"));
        }
      }
    }
  }
}
