package redlatch;

import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisURI;
import io.lettuce.core.cluster.RedisClusterClient;
import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.function.BooleanSupplier;
import java.util.logging.Level;
import java.util.logging.Logger;
import java.util.stream.Stream;

/** A private server on a free port, and a plain RESP2 connection to it: the oracle of the tests. */
final class Server implements AutoCloseable {
  static final Path LUA = Path.of("../..");
  static final Path VECTORS = LUA.resolve("vectors");
  private static final Logger LETTUCE = Logger.getLogger("io.lettuce");
  final int port;
  final Process process;
  private Socket socket;
  private DataInputStream in;
  private final Path folder;
  private Server news; // another connection to the same server, with the subscription

  /** An error reply. */
  record Failure(String message) {}

  Server() throws Exception {
    this("save \"\"");
  }

  Server(String config, String... options) throws Exception {
    LETTUCE.setLevel(Level.SEVERE); // tests cut connections on purpose
    port = freePort();
    folder = Files.createTempDirectory("redlatch-java-");
    Path file = Files.writeString(folder.resolve("server.conf"),
        "bind 127.0.0.1\ndir " + folder + "\nport " + port + "\n" + config + "\n");
    String binary = System.getenv().getOrDefault("REDLATCH_SERVER", "redis-server");
    List<String> command = new ArrayList<>(List.of(binary, file.toString()));
    Collections.addAll(command, options);
    process = new ProcessBuilder(command).redirectErrorStream(true)
        .redirectOutput(folder.resolve("log").toFile()).start();
    Runtime.getRuntime().addShutdownHook(new Thread(process::destroyForcibly));
    await("the server started", () -> canConnect() || !process.isAlive());
    connect();
  }

  private void connect() throws IOException {
    socket = new Socket("127.0.0.1", port);
    in = new DataInputStream(new BufferedInputStream(socket.getInputStream()));
  }

  private static int freePort() throws IOException {
    try (ServerSocket free = new ServerSocket(0)) {
      int port = free.getLocalPort(); // a cluster also uses port + 10000
      return port < 55_000 ? port : freePort();
    }
  }

  private boolean canConnect() {
    try (Socket probe = new Socket("127.0.0.1", port)) {
      return true;
    } catch (IOException e) {
      return false;
    }
  }

  RedisURI uri() {
    return RedisURI.builder().withHost("127.0.0.1").withPort(port).withTimeout(Duration.ofSeconds(10)).build();
  }

  /** A client of its own, as another process would have. */
  Redlatch open() throws IOException {
    return open(uri());
  }

  static Redlatch open(RedisURI uri) throws IOException {
    return new Redlatch(LUA, "lock:", RedisClient.create(uri));
  }

  static Redlatch openCluster(RedisURI uri) throws IOException {
    return new Redlatch(LUA, "lock:", RedisClusterClient.create(uri));
  }

  synchronized Object send(Object... words) {
    try {
      return exchange(words);
    } catch (IOException e) { // a failover cuts connections
      try {
        connect();
        return exchange(words);
      } catch (IOException again) {
        throw new UncheckedIOException(again);
      }
    }
  }

  private Object exchange(Object... words) throws IOException {
    StringBuilder request = new StringBuilder("*" + words.length + "\r\n");
    for (Object word : words) {
      int size = word.toString().getBytes(StandardCharsets.UTF_8).length;
      request.append("$").append(size).append("\r\n").append(word).append("\r\n");
    }
    socket.getOutputStream().write(request.toString().getBytes(StandardCharsets.UTF_8));
    return read();
  }

  /** Reads a reply: Long, String, null, List or Failure. */
  private Object read() throws IOException {
    StringBuilder line = new StringBuilder();
    for (int c = in.readByte(); c != '\r'; c = in.readByte()) {
      line.append((char) (c & 0xff));
    }
    in.readByte();
    String text = line.substring(1);
    switch (line.charAt(0)) {
      case ':':
        return Long.valueOf(text);
      case '-':
        return new Failure(text);
      case '$':
        if (text.equals("-1")) return null;
        byte[] bytes = in.readNBytes(Integer.parseInt(text) + 2);
        return new String(bytes, 0, bytes.length - 2, StandardCharsets.UTF_8);
      case '*':
        if (text.equals("-1")) return null;
        List<Object> list = new ArrayList<>();
        for (int i = Integer.parseInt(text); i > 0; i--) {
          list.add(read());
        }
        return list;
      default:
        return text;
    }
  }

  /** STOP: it hangs until CONT, and its connections stay. */
  void signal(String name) throws Exception {
    new ProcessBuilder("kill", "-" + name, "" + process.pid()).start().waitFor();
  }

  long number(Object... words) {
    return Long.parseLong(String.valueOf(send(words)));
  }

  /** The server's clock in microseconds. */
  long time() {
    List<?> time = (List<?>) send("TIME");
    return Long.parseLong("" + time.get(0)) * 1_000_000 + Long.parseLong("" + time.get(1));
  }

  /** Subscribes on a connection of its own, and returns the confirmation. */
  Object subscribe(String channel) throws IOException {
    news = new Server(this);
    return news.send("SUBSCRIBE", channel);
  }

  /** Reads the next message that comes within a second, or null. */
  Object nextMessage() throws IOException {
    news.socket.setSoTimeout(1000);
    try {
      return ((List<?>) news.read()).get(2);
    } catch (java.net.SocketTimeoutException e) {
      return null;
    } finally {
      news.socket.setSoTimeout(0);
    }
  }

  /** Ends the subscription, and deletes all keys. */
  void reset() throws IOException {
    if (news != null) news.socket.close();
    send("FLUSHALL");
  }

  /** Another plain connection to the same server. */
  private Server(Server other) throws IOException {
    port = other.port;
    process = other.process;
    folder = other.folder;
    connect();
  }

  /** The reply to a script that the client's own code sends; of an integer, a list of one. */
  static Object run(Redlatch client, String file, String[] keys, String[] words) {
    return client.call(file, List.of(keys), 5000, (Object[]) words)
        .<Object>handle((reply, e) -> e == null ? reply : new Failure(e.toString())).join();
  }

  /** Sends lua/&lt;file&gt;.lua for the lock {@code name}, as any other client would. */
  Object run(String file, String name, Object... arguments) throws IOException {
    String key = "lock:" + name;
    String source = Files.readString(LUA.resolve(file + ".lua"));
    List<Object> words = new ArrayList<>(List.of("EVAL", source, 3, key, "{" + key + "}:waiters", "{" + key + "}:fence"));
    Collections.addAll(words, arguments);
    return send(words.toArray());
  }

  /** The number of live or dead waiters of a lock; marks do not count. */
  long waiters(String name) {
    return number("ZCOUNT", "{lock:" + name + "}:waiters", "-inf", "(4503599627370496");
  }

  static void await(String what, BooleanSupplier condition) {
    long end = System.nanoTime() + 30_000_000_000L;
    while (!condition.getAsBoolean()) {
      if (System.nanoTime() > end) throw new AssertionError("not within 30 s: " + what);
      java.util.concurrent.locks.LockSupport.parkNanos(2_000_000);
    }
  }

  @Override
  public void close() throws Exception {
    socket.close();
    process.destroyForcibly().waitFor();
    try (Stream<Path> files = Files.walk(folder)) {
      files.sorted(Collections.reverseOrder()).forEach(file -> file.toFile().delete());
    }
  }
}
