package redlatch;

import static java.lang.Long.parseLong;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static redlatch.Server.VECTORS;

import com.fasterxml.jackson.databind.*;
import java.nio.file.*;
import java.util.*;
import java.util.regex.Pattern;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;

/** Runs lua/vectors/*.jsonl; the scripts are sent by the client's own code. */
class VectorsTest {
  private static final ObjectMapper JSON = new ObjectMapper();

  @Test void each_vector_is_answered_as_written() throws Exception {
    try (Server server = new Server(); var files = Files.newDirectoryStream(VECTORS, "*.jsonl")) {
      Redlatch locks = server.open();
      for (Path file : files) for (String line : Files.readAllLines(file)) {
        Map<String, String> names = new HashMap<>();
        server.reset();
        for (var part : List.of("steps", "after")) for (var each : JSON.readTree(line).get(part)) {
          JsonNode step = JSON.readTree(fill(each.toString(), names));
          if (step.has("wait")) Thread.sleep(step.get("wait").asLong());
          if (step.has("time")) names.put(step.get("time").asText(), "" + server.time());
          if (step.has("subscribe")) server.subscribe(step.get("subscribe").asText());
          for (int left = step.path("times").asInt(1); left > 0; left--) {
            Object got = step.has("message") ? server.nextMessage()
                : step.has("command") ? server.send((Object[]) words(step.get("command")))
                : step.has("run") ? Server.run(locks, step.get("run").asText(),
                    words(step.get("keys")), words(step.get("args"))) : "";
            assertTrue(equal(step.path("answer"), got, names), file + line + step + "\n" + got);
          }
        }
      }
    }
  }

  private static String[] words(JsonNode texts) { return JSON.convertValue(texts, String[].class); }

  private static String fill(String text, Map<String, String> names) { // $name, $name+5, $name-5
    return Pattern.compile("\\$(\\w+)([+-]\\d+)?").matcher(text).replaceAll(m -> m.group(2) == null
        ? names.get(m.group(1)) : "" + (parseLong(names.get(m.group(1))) + parseLong(m.group(2))));
  }

  private static boolean equal(JsonNode want, Object got, Map<String, String> names) {
    if (want.isArray()) return got instanceof List<?> list && list.size() == want.size()
        && IntStream.range(0, list.size()).allMatch(i -> equal(want.get(i), list.get(i), names));
    Object one = got instanceof List<?> list && list.size() == 1 ? list.get(0) : got;
    if (want.isTextual()) return want.asText().equals("" + one);
    if (want.isValueNode()) return want.asText().equals("" + one) && !(one instanceof String);
    names.put(want.path("bind").asText(), "" + one);
    return want.has("error") == one instanceof Server.Failure
        && ("" + one).startsWith(want.path("begins").asText())
        && (!want.has("min") || one instanceof Long n && want.get("min").asLong() <= n)
        && (!want.has("max") || one instanceof Long n && n <= want.get("max").asLong());
  }
}
