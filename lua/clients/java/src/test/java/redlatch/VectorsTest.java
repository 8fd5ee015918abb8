package redlatch;

import static org.junit.jupiter.api.Assertions.assertTrue;

import com.fasterxml.jackson.databind.*;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.CompletionException;
import java.util.regex.Pattern;
import java.util.stream.*;
import org.junit.jupiter.api.Test;

/** Runs lua/vectors/*.jsonl; the scripts are sent by the client's own code. */
class VectorsTest {
  private final Map<String, Object> names = new HashMap<>();
  private Server news;

  @Test
  void each_vector_is_answered_as_written() throws Exception {
    try (Server server = new Server(); Stream<Path> files = Files.list(Path.of("../../vectors"))) {
      Redlatch locks = server.open();
      for (Path file : files.filter(f -> f.toString().endsWith(".jsonl")).sorted().toList()) {
        for (String line : Files.readAllLines(file)) {
          JsonNode vector = new ObjectMapper().readTree(line);
          server.send("FLUSHALL");
          names.clear();
          if (news != null) news.disconnect();
          for (JsonNode step : (Iterable<JsonNode>) Stream.of("steps", "after")
              .flatMap(part -> StreamSupport.stream(vector.get(part).spliterator(), false))::iterator) {
            Object got = reply(server, locks, step);
            JsonNode want = step.has("answer") ? step.get("answer") : new ObjectMapper().createObjectNode();
            assertTrue(equal(want, got), () -> file + " " + vector.get("name") + " " + step + "\n" + got);
          }
        }
      }
    }
  }

  private List<String> fill(JsonNode texts) {
    return StreamSupport.stream(texts.spliterator(), false).map(text -> fill(text.asText())).toList();
  }

  private String fill(String text) {
    return Pattern.compile("\\$(\\w+)([+-]\\d+)?").matcher(text).replaceAll(m -> m.group(2) == null
        ? "" + names.get(m.group(1)) : "" + (number(names.get(m.group(1))) + number(m.group(2))));
  }

  private static long number(Object text) { return Long.parseLong(String.valueOf(text)); }

  private Object reply(Server server, Redlatch locks, JsonNode step) throws Exception {
    if (step.has("wait")) Thread.sleep(step.get("wait").asLong());
    if (step.has("command")) return server.send(fill(step.get("command")).toArray());
    if (step.has("subscribe")) return (news = new Server(server)).send("SUBSCRIBE", step.get("subscribe").asText());
    if (step.has("message")) return news.nextMessage();
    if (step.has("time")) names.put(step.get("time").asText(), server.time());
    try {
      return step.has("run") ? locks.run(step.get("run").asText(), fill(step.get("keys")), 5000,
          fill(step.get("args")).toArray()).join() : "";
    } catch (CompletionException e) {
      return new Server.Failure(e.getCause().getMessage());
    }
  }

  private boolean equal(JsonNode want, Object got) { // Lettuce makes an integer a list of one
    if (want.isArray()) return got instanceof List<?> list && list.size() == want.size()
        && IntStream.range(0, want.size()).allMatch(i -> equal(want.get(i), list.get(i)));
    Object one = got instanceof List<?> list && list.size() == 1 ? list.get(0) : got;
    if (want.has("bind")) names.put(want.get("bind").asText(), one);
    if (want.isObject()) return want.has("error") == got instanceof Server.Failure
        && (!want.has("min") || one instanceof Long n && number(fill(want.get("min").asText())) <= n)
        && (!want.has("max") || one instanceof Long n && n <= number(fill(want.get("max").asText())));
    return want.isTextual() ? fill(want.asText()).equals(String.valueOf(one))
        : want.isNull() ? one == null : one instanceof Long n && n == want.asLong();
  }
}
