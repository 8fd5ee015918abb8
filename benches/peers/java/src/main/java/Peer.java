import io.netty.channel.EventLoopGroup;
import io.netty.channel.MultiThreadIoEventLoopGroup;
import io.netty.channel.nio.NioIoHandler;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.function.BooleanSupplier;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.Config;

/**
 * Measures Redisson's lock, fair lock and read-write lock, as ../../../../README.md describes. Its
 * tasks use the asynchronous methods, which need no thread each.
 */
public final class Peer {
    private static final BufferedReader COMMANDS = new BufferedReader(new InputStreamReader(System.in));

    private Peer() {}

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        for (String line = COMMANDS.readLine(); line != null; line = COMMANDS.readLine()) {
            String[] words = line.split(" ");
            switch (words[0]) {
                case "libraries" -> System.out.println(description());
                case "pairs" -> pairs(url, words[2], Integer.parseInt(words[3]), Double.parseDouble(words[4]));
                case "turns" -> turns(url, words[2], Integer.parseInt(words[3]), Double.parseDouble(words[4]));
                default -> throw new IOException("unknown command: " + line);
            }
        }
        // Threads of closed clients may still run.
        System.exit(0);
    }

    private static String description() {
        String version = Redisson.class.getPackage().getImplementationVersion();
        return """
            {"language": "Java %s", "libraries": [{"name": "Redisson", "version": "%s", "client": "Redisson",\
             "kinds": ["reentrant", "fair", "read", "write"], "turns": ["reentrant", "fair"],\
             "most_clients": 64, "fencing": "own kind of lock", "renewal": "yes",\
             "waiting": "notified; the fair lock in order",\
             "settings": "asynchronous methods, watchdog, StringCodec; default pool, one connection a client in turns"}]}\
            """.formatted(Runtime.version().feature(), version);
    }

    /** Reports that the measurement is prepared, and waits for the line go. */
    private static void waitForGo() throws IOException {
        System.out.println("{\"ready\": true}");
        String line = COMMANDS.readLine();
        if (!"go".equals(line)) {
            throw new IOException(line + " instead of go");
        }
    }

    private static Config config(String url) {
        // The default lease of 30 s, which the watchdog renews.
        Config config = new Config().setCodec(StringCodec.INSTANCE);
        config.useSingleServer().setAddress(url);
        return config;
    }

    private static RLock lock(RedissonClient client, String kind, String name) {
        String key = kind + ":" + name;
        return switch (kind) {
            case "reentrant" -> client.getLock(key);
            case "fair" -> client.getFairLock(key);
            case "read" -> client.getReadWriteLock(key).readLock();
            case "write" -> client.getReadWriteLock(key).writeLock();
            default -> throw new IllegalArgumentException("no such lock: " + kind);
        };
    }

    /** Acquires, counts and releases, again and again. The number stands for a thread's id. */
    private static CompletableFuture<Void> repeat(RLock lock, long number, BooleanSupplier more, Runnable counted) {
        CompletableFuture<Void> done = new CompletableFuture<>();
        pair(lock, number, more, counted, done);
        return done;
    }

    private static void pair(
            RLock lock, long number, BooleanSupplier more, Runnable counted, CompletableFuture<Void> done) {
        CompletionStage<Void> pair = lock.lockAsync(number).thenCompose(nothing -> {
            counted.run();
            return lock.unlockAsync(number);
        });
        pair.whenComplete((nothing, failure) -> {
            if (failure != null) {
                done.completeExceptionally(failure);
            } else if (more.getAsBoolean()) {
                pair(lock, number, more, counted, done);
            } else {
                done.complete(null);
            }
        });
    }

    /** Uncontended locks: tasks of one client, each with a lock name of its own. */
    private static void pairs(String url, String kind, int tasks, double seconds) throws IOException {
        RedissonClient client = Redisson.create(config(url));
        try {
            runPairs(client, kind, tasks, seconds / 5);
            waitForGo();
            // Before the client closes, so that this is not measured.
            System.out.println(runPairs(client, kind, tasks, seconds));
        } finally {
            client.shutdown();
        }
    }

    private static String runPairs(RedissonClient client, String kind, int tasks, double seconds) {
        AtomicLong pairs = new AtomicLong();
        AtomicLong overlaps = new AtomicLong();
        long start = System.nanoTime();
        long end = start + (long) (seconds * 1e9);
        List<CompletableFuture<Void>> running = new ArrayList<>();
        for (int task = 0; task < tasks; task++) {
            AtomicBoolean held = new AtomicBoolean();
            Runnable counted = () -> {
                if (held.getAndSet(true)) {
                    overlaps.incrementAndGet();
                }
                pairs.incrementAndGet();
                held.set(false);
            };
            running.add(repeat(lock(client, kind, "own:" + task), task + 1, () -> System.nanoTime() < end, counted));
        }
        running.forEach(CompletableFuture::join);
        return "{\"seconds\": %f, \"pairs\": %d, \"overlaps\": %d}"
            .formatted((System.nanoTime() - start) / 1e9, pairs.get(), overlaps.get());
    }

    /**
     * Clients that contend for one lock name. A turn is an acquisition by another client than the
     * one before.
     */
    private static void turns(String url, String kind, int clients, double seconds) throws Exception {
        AtomicLongArray counts = new AtomicLongArray(clients);
        AtomicInteger last = new AtomicInteger(-1);
        AtomicBoolean held = new AtomicBoolean();
        AtomicBoolean stop = new AtomicBoolean();
        AtomicLong acquisitions = new AtomicLong();
        AtomicLong overlaps = new AtomicLong();
        // All clients share these threads, or there would be hundreds.
        EventLoopGroup network = new MultiThreadIoEventLoopGroup(4, NioIoHandler.newFactory());
        ExecutorService executor = Executors.newFixedThreadPool(16);
        List<RedissonClient> open = new ArrayList<>();
        List<CompletableFuture<Void>> running = new ArrayList<>();
        for (int number = 0; number < clients; number++) {
            Config config = config(url).setExecutor(executor).setEventLoopGroup(network);
            config.useSingleServer().setConnectionMinimumIdleSize(1).setConnectionPoolSize(2)
                .setSubscriptionConnectionMinimumIdleSize(1).setSubscriptionConnectionPoolSize(2);
            open.add(Redisson.create(config));
        }
        for (int number = 0; number < clients; number++) {
            int own = number;
            Runnable counted = () -> {
                if (held.getAndSet(true)) {
                    overlaps.incrementAndGet();
                }
                acquisitions.incrementAndGet();
                if (last.getAndSet(own) != own) {
                    counts.incrementAndGet(own);
                }
                held.set(false);
            };
            running.add(repeat(lock(open.get(number), kind, "contended"), 1, () -> !stop.get(), counted));
        }
        Thread.sleep((long) (seconds * 200));
        waitForGo();
        long start = System.nanoTime();
        long first = acquisitions.get();
        long[] before = snapshot(counts);
        Thread.sleep((long) (seconds * 1000));
        long[] after = snapshot(counts);
        long acquired = acquisitions.get() - first;
        double took = (System.nanoTime() - start) / 1e9;
        stop.set(true);
        running.forEach(CompletableFuture::join);
        open.forEach(RedissonClient::shutdown);
        executor.shutdown();
        network.shutdownGracefully();
        long total = 0;
        long fewest = Long.MAX_VALUE;
        long most = 0;
        for (int number = 0; number < clients; number++) {
            long turns = after[number] - before[number];
            total += turns;
            fewest = Math.min(fewest, turns);
            most = Math.max(most, turns);
        }
        System.out.println(("{\"seconds\": %f, \"acquisitions\": %d, \"turns\": %d, \"fewest\": %d, \"most\": %d,"
            + " \"overlaps\": %d}").formatted(took, acquired, total, fewest, most, overlaps.get()));
    }

    private static long[] snapshot(AtomicLongArray counts) {
        long[] values = new long[counts.length()];
        for (int at = 0; at < values.length; at++) {
            values[at] = counts.get(at);
        }
        return values;
    }
}
