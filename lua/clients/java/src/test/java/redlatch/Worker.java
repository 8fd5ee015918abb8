package redlatch;

import com.fasterxml.jackson.databind.*;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.lettuce.core.*;
import io.lettuce.core.cluster.RedisClusterClient;
import io.lettuce.core.cluster.api.sync.RedisClusterCommands;
import io.lettuce.core.protocol.ProtocolVersion;
import io.lettuce.core.resource.ClientResources;
import java.nio.file.Path;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;

/** Runs the commands of lua/clients/README.md: a JSON object per line in, one per command out. */
public final class Worker {
  private static final ObjectMapper JSON = new ObjectMapper();
  private final Map<String, Redlatch.Lease> leases = new ConcurrentHashMap<>();
  private final Map<String, Redlatch> clients = new ConcurrentHashMap<>(); // by their names, or ""
  private final Map<String, RedisClusterCommands<String, String>> redis = new ConcurrentHashMap<>();
  private final ClientResources resources = ClientResources.create(); // threads, for all clients

  public static void main(String[] args) {
    Worker worker = new Worker();
    Scanner lines = new Scanner(System.in, "UTF-8");
    while (lines.hasNextLine()) {
      String line = lines.nextLine();
      try {
        JsonNode command = JSON.readTree(line);
        if (command.path("async").asBoolean()) {
          new Thread(() -> print(worker.answer(command))).start();
          continue;
        }
        print(worker.answer(command));
        if (command.path("do").asText().equals("close") && !command.has("client")) break;
      } catch (Exception e) { // not JSON
        print(failure("unknown"));
      }
    }
    System.exit(0); // other commands may still wait
  }

  private static synchronized void print(JsonNode answer) { System.out.println(answer); }

  private static ObjectNode ok() { return JSON.createObjectNode().put("ok", true); }

  private static ObjectNode failure(String error) {
    return JSON.createObjectNode().put("ok", false).put("error", error);
  }

  private ObjectNode answer(JsonNode c) {
    ObjectNode answer = run(c);
    return c.has("id") ? answer.set("id", c.get("id")) : answer;
  }

  private ObjectNode run(JsonNode c) {
    try {
      Redlatch.Lease lease = leases.get(c.path("as").asText());
      return switch (c.path("do").asText()) {
        case "open" -> open(c);
        case "acquire" -> ok().put("token", acquire(c, limitMs(c)).token());
        case "release" -> ok().put("held", lease.release());
        case "renew" -> ok().put("held", lease.renew());
        case "downgrade" -> ok().put("held", lease.downgrade());
        case "is_valid" -> ok().put("valid", lease.isValid());
        case "lost" -> {
          lease.lost.get(limitMs(c), TimeUnit.MILLISECONDS);
          yield ok();
        }
        case "count" -> count(c);
        case "close" -> {
          clients.get(client(c)).close();
          yield ok();
        }
        default -> failure("unknown");
      };
    } catch (Redlatch.LockException e) {
      String error = switch (e.reason) {
        case ENDED, NO_TTL -> "wrong_type";
        case CLOSED -> "failed";
        case SERVER -> e.getCause() instanceof RedisCommandExecutionException ? "failed" : "no_answer";
        default -> e.reason.name().toLowerCase();
      };
      return failure(error).put("text", e + ": " + e.getCause());
    } catch (IllegalArgumentException e) {
      boolean isName = e.getMessage().startsWith("not a lock name");
      return failure(isName ? "invalid_name" : "malformed").put("text", e.toString());
    } catch (Exception e) {
      String error = e instanceof TimeoutException ? "timed_out" : "failed";
      return failure(error).put("text", e.toString());
    }
  }

  private ObjectNode open(JsonNode c) throws Exception {
    String prefix = c.path("prefix").asText("lock:");
    String topology = c.path("topology").asText("server");
    RedisURI uri = RedisURI.create(c.get("url").asText());
    if (topology.startsWith("sentinel:")) {
      uri = RedisURI.Builder.sentinel(uri.getHost(), uri.getPort(), topology.substring(9)).build();
    }
    uri.setTimeout(Duration.ofSeconds(20));
    if (topology.equals("cluster")) {
      RedisClusterClient client = RedisClusterClient.create(resources, uri);
      clients.put(client(c), new Redlatch(prefix, client));
      redis.put(client(c), client.connect().sync());
    } else {
      RedisClient client = RedisClient.create(resources, uri);
      int resp = c.path("resp").asInt(); // 0: what is usual
      if (resp != 0) {
        var version = resp == 2 ? ProtocolVersion.RESP2 : ProtocolVersion.RESP3;
        client.setOptions(ClientOptions.builder().protocolVersion(version).build());
      }
      clients.put(client(c), new Redlatch(prefix, client));
      redis.put(client(c), client.connect().sync());
    }
    return ok();
  }

  private static String client(JsonNode c) { return c.path("client").asText(); }

  private static long limitMs(JsonNode c) { return c.path("limit_ms").asLong(5000); }

  private Redlatch.Lease acquire(JsonNode c, long limitMs) throws InterruptedException {
    String name = c.path("name").asText();
    String owner = c.path("owner").asText();
    Redlatch locks = clients.get(client(c));
    Redlatch.Lock lock = switch (c.path("kind").asText()) {
      case "mutex" -> locks.mutex(name);
      case "reentrant" -> locks.reentrant(name, owner);
      case "read" -> locks.read(name, owner);
      default -> locks.write(name, owner);
    };
    long ttlMs = c.path("ttl_ms").asLong(3000);
    Redlatch.Lease lease = lock.acquire(Duration.ofMillis(ttlMs), Duration.ofMillis(limitMs));
    leases.put(c.path("as").asText(), lease);
    return lease;
  }

  private ObjectNode count(JsonNode c) throws InterruptedException {
    long longestMs = 0, increments = 0, last = 0;
    boolean isAscending = true;
    long end = System.nanoTime() + (long) (c.path("seconds").asDouble() * 1e9);
    while (System.nanoTime() < end) {
      long start = System.nanoTime();
      try (Redlatch.Lease lease = acquire(c, 10_000)) {
        longestMs = Math.max(longestMs, (System.nanoTime() - start) / 1_000_000);
        isAscending &= lease.token() > last;
        last = lease.token();
        String value = redis.get(client(c)).get(c.path("key").asText());
        redis.get(client(c)).set(c.path("key").asText(), "" + (value == null ? 1 : Long.parseLong(value) + 1));
        increments++;
      }
    }
    return ok().put("increments", increments).put("longest_ms", longestMs)
        .put("tokens_ascending", isAscending);
  }
}
