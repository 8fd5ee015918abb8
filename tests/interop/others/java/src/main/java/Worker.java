import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Locks of Redisson, for ../../../../others.py: a JSON object per line, in and out. Its
 * asynchronous methods name a thread, so each handle has one of its own, or the `thread` of the
 * command.
 */
public final class Worker {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final AtomicLong THREADS = new AtomicLong(1000);
    private static final Map<String, Hold> HOLDS = new ConcurrentHashMap<>();
    private static RedissonClient client;
    private static String prefix;

    private record Hold(RLock lock, long thread) {}

    private Worker() {}

    private static RLock lock(String kind, String key) {
        return switch (kind) {
            case "Redisson RLock" -> client.getLock(key);
            case "Redisson fair lock" -> client.getFairLock(key);
            case "Redisson read lock" -> client.getReadWriteLock(key).readLock();
            case "Redisson write lock" -> client.getReadWriteLock(key).writeLock();
            default -> throw new IllegalArgumentException("no such lock: " + kind);
        };
    }

    private static CompletableFuture<ObjectNode> run(JsonNode command) {
        ObjectNode answer = JSON.createObjectNode();
        String handle = command.path("as").asText();
        switch (command.path("do").asText()) {
            case "open" -> {
                Config config = new Config();
                config.useSingleServer().setAddress(command.path("url").asText())
                    .setConnectionMinimumIdleSize(4).setConnectionPoolSize(8);
                prefix = command.path("prefix").asText();
                client = Redisson.create(config);
                String version = Redisson.class.getPackage().getImplementationVersion();
                ObjectNode versions = answer.putObject("versions");
                for (String kind : new String[] {"RLock", "fair lock", "read lock", "write lock"}) {
                    versions.put("Redisson " + kind, version);
                }
            }
            case "acquire" -> {
                RLock lock = lock(command.path("kind").asText(), prefix + command.path("name").asText());
                long thread = command.path("thread").asLong(THREADS.incrementAndGet());
                long limit = command.path("limit_ms").asLong();
                long ttl = command.path("ttl_ms").asLong();
                return lock.tryLockAsync(limit, ttl, TimeUnit.MILLISECONDS, thread).toCompletableFuture()
                    .thenApply(isLocked -> {
                        if (isLocked) {
                            HOLDS.put(handle, new Hold(lock, thread));
                            return answer;
                        }
                        return answer.put("error", "timed_out");
                    });
            }
            case "release" -> {
                Hold hold = HOLDS.remove(handle);
                return hold.lock.unlockAsync(hold.thread).toCompletableFuture().handle((nothing, failure) -> {
                    if (failure == null) {
                        return answer.put("held", true);
                    }
                    Throwable cause = failure instanceof CompletionException ? failure.getCause() : failure;
                    return answer.put("held", false).put("says", cause.getClass().getSimpleName());
                });
            }
            case "close" -> client.shutdown();
            default -> answer.put("error", "unknown");
        }
        return CompletableFuture.completedFuture(answer);
    }

    private static CompletableFuture<Void> answer(JsonNode command) {
        CompletableFuture<ObjectNode> outcome;
        try {
            outcome = run(command);
        } catch (RuntimeException failure) {
            outcome = CompletableFuture.failedFuture(failure);
        }
        return outcome.exceptionally(failure -> JSON.createObjectNode().put("error", failure.toString()))
            .thenAccept(answer -> {
                answer.set("id", command.path("id"));
                answer.put("ok", !answer.has("error"));
                System.out.println(answer);
            });
    }

    public static void main(String[] arguments) throws IOException {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode command = JSON.readTree(line);
            CompletableFuture<Void> answered = answer(command);
            if (!command.path("async").asBoolean()) {
                answered.join();
            }
            if (command.path("do").asText().equals("close")) {
                break;
            }
        }
        System.exit(0); // threads of the client may still run
    }
}
