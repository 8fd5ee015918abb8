"""Runs conformance vectors: run.py HOST:PORT [FILE...]. It empties the server. Needs redis-py."""
import json, pathlib, re, redis, sys, time

here = pathlib.Path(__file__).parent
server = redis.Redis.from_url(f"redis://{sys.argv[1]}?protocol=2", decode_responses=True)

def fill(text, names):
    value = lambda m: str(int(names[m[1]]) + int(m[2])) if m[2] else str(names[m[1]])
    return re.sub(r"\$(\w+)([+-]\d+)?", value, text) if isinstance(text, str) else text

def equal(want, got, names):
    if isinstance(want, dict):
        names[want.get("bind")] = got
        end = lambda key: int(fill(want.get(key, got), names))
        in_range = "min" not in want or isinstance(got, int) and end("min") <= got <= end("max")
        begins = str(got).startswith(want.get("begins", ""))
        return isinstance(got, redis.ResponseError) == ("error" in want) and in_range and begins
    if isinstance(want, list):
        return isinstance(got, list) and len(want) == len(got) and all(map(equal, want, got, [names] * len(got)))
    return str(got) == fill(want, names) if isinstance(want, str) else got == want

def send(*words):
    try: return server.execute_command(*words)
    except redis.ResponseError as error: return error

def step(each, names, news):
    words, got = [fill(word, names) for word in each.get("keys", []) + each.get("args", [])], None
    if "time" in each: names[each["time"]] = "%d%06d" % server.time()
    if "wait" in each: time.sleep(each["wait"] / 1000)
    if "subscribe" in each: news.subscribe(each["subscribe"]), news.get_message(timeout=1)
    if "message" in each: got = (news.get_message(timeout=1) or {}).get("data")
    if "command" in each: got = send(*(fill(word, names) for word in each["command"]))
    if "run" in each: got = send("EVAL", (here.parent / f"{each['run']}.lua").read_bytes(), len(each["keys"]), *words)
    return equal(each.get("answer", {}), got, names) or sys.exit(f"{file}: {vector['name']}: {each}\n{got!r}")

count, files = 0, sys.argv[2:] or sorted(here.glob("*.jsonl"))
for file in files:
    for vector in map(json.loads, open(file, newline="\n", encoding="utf-8")):
        server.flushall(), (names := {}), (news := server.pubsub())
        for each in vector["steps"] + vector["after"]: [step(each, names, news) for _ in range(each.get("times", 1))]
        news.close()
        count += 1
print(f"{count} vectors in {len(files)} files passed")
