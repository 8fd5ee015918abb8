"""Tests clients through their workers, with a fake server: what they send, and when.

    run.py [--only PART]... LANGUAGE=COMMAND...
    run.py --list

COMMAND starts a worker, which takes the commands of ../README.md. PART is a part of a dialogue's
name; without one, all dialogues run, each beside the others. --list prints each dialogue, and the
harm that it prevents. Exit status 1: a dialogue failed, or
one that must fail passed. README.md describes the dialogues. It needs Python 3.9, and nothing else.
"""

import argparse
import asyncio
import contextlib
import json
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

from server import Server

HERE = Path(__file__).resolve().parent
LIMIT = 20.0  # seconds without stalls for an event that has no other limit; with them, thrice that
BESIDE = 30  # dialogues at the same time
OPENING = 4  # of them that open their client at the same time: the first ones load its libraries
LAG = 6_000_000  # microseconds by which a minimum token may be behind the server's clock: steps


class Failure(Exception):
    pass


class Stalls:
    """How long this process was kept waiting, and how long it or the worker was."""

    STEP = 0.02

    def __init__(self, worker=None):
        self.before, self.start = 0.0, time.monotonic()
        self.worker, self.own = worker, Stalls() if worker else None

    @property
    def total(self):
        return self.before + max(0.0, time.monotonic() - self.start - self.STEP - 0.005)

    async def measure(self):
        with contextlib.suppress(Failure):  # the worker ended
            while True:
                await asyncio.sleep(self.STEP)
                if self.worker:
                    await self.worker.send(do="nothing")  # unknown, which is answered at once
                self.before, self.start = self.total, time.monotonic()


class Worker:
    def __init__(self, command):
        self.command, self.answers, self.number = command, {}, 0
        self.log, self.opening = tempfile.TemporaryFile(), asyncio.Semaphore(OPENING)

    async def start(self):
        pipe = asyncio.subprocess.PIPE
        words = shlex.split(self.command)
        pipes = {"stdin": pipe, "stdout": pipe, "stderr": self.log, "limit": 2**20}
        self.process = await asyncio.create_subprocess_exec(*words, **pipes)
        self.reading = asyncio.create_task(self.read())

    async def read(self):
        async for line in self.process.stdout:
            with contextlib.suppress(ValueError, AttributeError):  # a line that is no answer
                answer = json.loads(line)
                future = self.answers.pop(answer.get("id"), None)
                if future and not future.done():
                    future.set_result((answer, time.monotonic()))
        for future in self.answers.values():
            if not future.done():
                future.set_exception(Failure("the worker ended"))
        self.answers.clear()

    def send(self, **command):
        self.number += 1
        future = self.answers[self.number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda each: each.cancelled() or each.exception())  # no reader
        text = json.dumps({**command, "async": True, "id": self.number})
        if self.reading.done():
            future.set_exception(Failure("the worker ended"))
        else:
            self.process.stdin.write(text.encode() + b"\n")
        return future

    async def stop(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


def is_match(want, got, names):
    """Whether a word or a field is as the dialogue says. README.md lists the forms."""
    if isinstance(want, str) and want.startswith("$"):
        return names.setdefault(want[1:], got) == got
    if isinstance(want, str) and want.startswith("!$"):
        return names.get(want[2:]) != got
    if isinstance(want, dict):
        is_good = re.search(want.get("matches", ""), str(got)) is not None
        if is_good and ("min" in want or "max" in want):
            low, high = (fill(want.get(each, got), names) for each in ("min", "max"))
            is_good = str(got).isdigit() and int(low) <= int(got) <= int(high)
        if is_good and "as" in want:
            is_good = is_match("$" + want["as"], got, names)
        return is_good
    return got == want or not isinstance(want, bool) and str(want) == got


def fill(text, names):
    """Replaces $name by its value, and $name+5s by the clock five seconds later."""

    def value(found):
        name, seconds = found.groups()
        return str(int(names[name]) + int(seconds) * 1_000_000) if seconds else str(names[name])

    return re.sub(r"\$(\w+)(?:([+-]\d+)s)?", value, text) if isinstance(text, str) else text


class Dialogue:
    """One dialogue with a client of its own: the steps in order, while rules serve the rest."""

    def __init__(self, data, worker, stalls):
        self.data, self.worker, self.stalls = data, worker, stalls
        self.server, self.client = Server(self), data["name"]
        self.names, self.rules, self.log, self.marks, self.calls = {}, [], [], {}, {}
        self.waiting, self.arrived = [], asyncio.Event()  # requests that no step has taken
        self.expected, self.attempts, self.problem = None, {}, None
        self.served = []  # by steps: the request, the step, and how long there had been stalls

    async def run(self):
        """Returns the failure as a text, or None."""
        await self.server.start()
        self.mark({}, time.monotonic())
        at = 0
        try:
            rules = self.data.get("rules", [])
            self.set_rules([each for each in rules if "command" in each])
            fields = {"prefix": "lock:", "resp": 0, **self.data.get("open", {})}
            url = f"redis://127.0.0.1:{self.server.port}"
            async with self.worker.opening:
                opened = self.worker.send(do="open", client=self.client, url=url, **fields)
                self.calls["open"] = opened
                await self.result({"result": "open", "is": {"ok": True}})
            if self.data.get("warm", True):
                await self.warm(fields["prefix"] + "warm")
            self.set_rules([each for each in rules if "command" not in each])
            for at, step in enumerate(self.data["steps"], 1):
                await getattr(self, next(iter(step)))(step)
                self.check_problem()
            if self.waiting:
                raise Failure(f"the client also sent: {self.waiting[0]}")
        except Failure as failure:
            step = json.dumps(self.data["steps"][at - 1])[:160] if at else "before the first"
            return f"step {at}, {step}: {failure}"
        finally:
            closed = self.worker.send(do="close", client=self.client)
            with contextlib.suppress(Failure, asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(closed), 1.0)
            self.server.stop()

    async def warm(self, key):
        """Takes and releases a lock, until the client knows that it is subscribed."""
        rules = [{"request": each, "key": key, "answer": 1} for each in ("acquire", "release")]
        self.set_rules(rules)
        subscribes = [each for each in self.rules if each.get("command") == "SUBSCRIBE"]
        is_refused, left = any("answer" in each for each in subscribes), self.limit()
        lease = {"as": f"{self.client} warm", "client": self.client}
        lock = {"kind": "mutex", "name": "warm", "ttl_ms": 20000, "limit_ms": 15000}
        while True:
            for command in ({"do": "acquire", **lock}, {"do": "release"}):
                self.calls["warm"] = self.worker.send(**command, **lease)
                await self.result({"result": "warm", "is": {"ok": True}})
            grants = [each for each in self.log if each.verb == "acquire"]
            if is_refused or grants[-1].words["channel"]:
                return
            if left() < 0:
                raise Failure(f"the client is not subscribed within {LIMIT} s")
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------------------- what the server gets

    def fail(self, text):
        self.problem = self.problem or text
        self.arrived.set()

    def check_problem(self):
        if self.problem:
            raise Failure(self.problem)

    def receive(self, request):
        """Called by the server for each request. Returns whether it is dealt with here."""
        self.log.append(request)
        if request.verb:
            self.check_always(request)
        is_expected = self.expected and self.is_for(self.expected, request)
        rule = next((each for each in reversed(self.rules) if self.is_for(each, request)), None)
        if not is_expected and rule:
            self.serve(rule, request)
            return True
        if request.verb and not is_expected and self.repeat(request):
            return True
        if request.verb or is_expected:
            self.waiting.append(request)
            self.arrived.set()
            return True
        return False

    def repeat(self, request, before=None):
        """Answers again if the client may have missed the answer while the machine stalled.

        It cannot have missed the answers before the last one, nor one whose time it sends.
        `before`: the stalls until it may have given up waiting, if that was before the answer.
        """
        same = (each for each in reversed(self.served) if self.is_same(each[0], request))
        served, step, stalled = next(same, (None, None, None))
        if not served or served.words.get("queued_at") != request.words.get("queued_at"):
            return False
        is_late = self.stalls.total - (stalled if before is None else before) > 0.05
        if not is_late or step.get("answer") in ("silent", "close"):
            return False
        if "mark" in step:
            self.mark(step, request.at)
        self.serve(step, request)
        return True

    @staticmethod
    def is_same(one, other):
        is_same = one.verb == other.verb and one.keys == other.keys
        return is_same and one.words["attempt"] == other.words["attempt"]

    def check_always(self, request):
        """What holds for every request of every dialogue."""
        words, attempt = request.words, request.words["attempt"]
        if not re.fullmatch(r"[!-~]{22,128}", attempt):
            self.fail(f"an attempt is not a word with 128 random bits: {request}")
        if words.get("proposal") or words.get("last_token"):
            self.fail(f"a proposal or a last token without a quorum: {request}")
        channel, open_channels = words.get("channel"), []
        for each in self.server.connections:
            open_channels += each.channels
        if request.verb in ("acquire", "read", "write"):
            if channel and attempt not in self.attempts and channel not in open_channels:
                self.fail(f"a new attempt names a channel without a subscription: {request}")
            kept = {name: words[name] for name in ("ttl_ms", "claim_ms", "channel")}
            kept = {**kept, "owner": words.get("owner"), "keys": request.keys}
            place = words["queued_at"]
            known, first = self.attempts.setdefault(attempt, (kept, place))
            if known != kept or first and first != place:
                self.fail(f"a repeated request has other words: {request}, not {known}")
            self.attempts[attempt] = kept, place
        if "min_token" in words:
            least, most = self.server.first_clock() - LAG, self.server.highest_clock()
            if not least <= int(words["min_token"] or 0) <= most:
                self.fail(f"min_token is not near the server's clock, {most}: {request}")

    def is_for(self, step, request):
        if "command" in step:
            return request.command == step["command"]
        key = step.get("key")
        return step["request"] == request.verb and (not key or key == request.keys[0])

    def serve(self, step, request):
        """Checks a request, and answers it as the step or the rule says."""
        if not is_match(step.get("via", request.command), request.command, self.names):
            self.fail(f"it came by {request.command}: {request}")
        if "script" in step and step["script"] != request.kind:
            self.fail(f"it is of {request.kind}.lua: {request}")
        if "keys" in step and step["keys"] != request.keys:
            self.fail(f"its keys are {request.keys}")
        if not is_match(step.get("connection", {}), request.connection.number, self.names):
            self.fail(f"it came on the wrong connection: {request}")
        for name, want in step.get("words", {}).items():
            if not is_match(want, request.words[name], self.names):
                known = self.names.get(str(want).strip("!$"), "")
                self.fail(f"{name} is {request.words[name]!r}, not {want!r} {known}: {request}")
        connection, answer = request.connection, fill(step.get("answer", "usual"), self.names)
        if answer == "silent":  # nothing more comes on this connection
            connection.is_silent = True
        elif answer == "close":
            connection.close()
        elif answer == "usual" and not request.verb:
            self.server.answer(request)
        elif answer in ("usual", "time"):  # the answer of a renewal
            connection.reply(request, [self.server.show_clock()], step.get("delay_ms", 0) / 1000)
        else:
            if isinstance(answer, dict) and "busy" in answer:
                clock = self.server.show_clock()
                if "time" in answer:
                    self.names[answer["time"].strip("$")] = str(clock)
                answer = [[answer["busy"], clock]]
            elif isinstance(answer, int):
                answer = [answer]
            elif isinstance(answer, dict) and "whole" in answer:  # the call is malformed
                answer = answer["whole"]
            connection.reply(request, answer, step.get("delay_ms", 0) / 1000)

    # ------------------------------------------------------------------------------------- steps

    def set_rules(self, rules):
        self.rules += rules
        for request in list(self.waiting):
            rule = next((each for each in reversed(rules) if self.is_for(each, request)), None)
            if rule:
                self.waiting.remove(request)
                self.serve(rule, request)

    def mark(self, step, at):
        """Remembers when the step took place, and the stalls until then and until the last step."""
        total, own = self.stalls.total, self.stalls.own.total
        _, _, before, _ = self.marks.get("last", (at, own, total, total))
        self.marks["last"] = self.marks[step.get("mark", "last")] = at, own, total, before

    def check_time(self, step, at):
        since, stalled, _, before = self.marks[step.get("since", "last")]
        elapsed = (at - since) * 1000
        undisturbed = elapsed - (self.stalls.own.total - stalled) * 1000
        # What the client sent at the mark may have been late, by as much as stalled before it.
        if elapsed + (self.stalls.total - before) * 1000 < step.get("min_ms", -1e9):
            raise Failure(f"it came {elapsed:.0f} ms after {step.get('since', 'the last step')}")
        if undisturbed > step.get("max_ms", 1e9):
            late = f"{elapsed:.0f} ms after {step.get('since', 'the last step')}"
            raise Failure(f"it came {late}, {undisturbed:.0f} ms without stalls")

    async def always(self, step):
        self.set_rules(step["always"])

    async def do(self, step):
        fields = {key: fill(value, self.names) for key, value in step.items()}
        expected = fields.pop("is", None)
        fields.pop("mark", None)
        handle = f"{self.client} {fields.get('as', 'lease')}"
        call = f"{step['do']} {step['as']}" if "as" in step else step["do"]
        self.mark(step, time.monotonic())
        self.calls[call] = self.worker.send(**{**fields, "as": handle, "client": self.client})
        if expected is not None:
            await self.result({"result": call, "is": expected})

    async def result(self, step):
        """The worker's answer to a command that was sent before."""
        future = self.calls[step["result"]]
        try:
            answer, at = await self.unless_failed(asyncio.shield(future))
        except asyncio.TimeoutError:
            raise Failure(f"{step['result']} is not answered within {LIMIT} s") from None
        for name, want in step.get("is", {}).items():
            if not is_match(want, answer.get(name), self.names):
                raise Failure(f"{step['result']} is answered with {answer}, not {name} = {want!r}")
        self.check_time(step, at)
        self.mark(step, at)

    async def pending(self, step):
        """A command is not answered yet."""
        if self.calls[step["pending"]].done():
            raise Failure(f"{step['pending']} is answered: {self.calls[step['pending']].result()}")

    def limit(self):
        """Returns a function that says how many seconds are left."""
        start, stalled = time.monotonic(), self.stalls.total

        def left():
            elapsed = time.monotonic() - start
            return min(LIMIT - elapsed + self.stalls.total - stalled, 3 * LIMIT - elapsed)

        return left

    async def unless_failed(self, future):
        """Waits for it, until a request of the client has broken a rule."""
        future, left = asyncio.ensure_future(future), self.limit()
        while left() > 0:
            self.arrived.clear()
            self.check_problem()
            arrival = asyncio.ensure_future(self.arrived.wait())
            await asyncio.wait([future, arrival], timeout=left(), return_when="FIRST_COMPLETED")
            arrival.cancel()
            if future.done():
                return future.result()
        raise asyncio.TimeoutError

    async def request(self, step):
        """The next request of a script that no rule serves."""
        await self.take(step)

    async def command(self, step):
        """The next command of this name, whatever comes before."""
        await self.take(step)

    async def take(self, step):
        self.expected, left = step, self.limit()
        try:
            while True:
                self.arrived.clear()
                self.check_problem()
                fitting = [each for each in self.waiting if self.is_for(step, each)]
                first = next((each for each in self.waiting if each.verb), None)
                if first and "command" not in step and first not in fitting[:1]:
                    raise Failure(f"the client sent instead: {first}")
                if fitting:
                    break
                if left() < 0:
                    raise Failure(f"nothing of the kind within {LIMIT} s")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.arrived.wait(), left())
        finally:
            self.expected = None
        request = fitting[0]
        self.waiting.remove(request)
        self.check_time(step, request.at)
        self.mark(step, request.at)
        self.served.append((request, step, self.stalls.total))
        self.serve(step, request)
        before = self.marks["last"][3]
        for again in list(self.waiting):  # repeated before this process saw the first one
            if again.verb and self.repeat(again, before):
                self.waiting.remove(again)

    async def quiet(self, step):
        """No request with this verb, or no command of this name, comes for a time."""
        await self.count({**step, "count": step["quiet"], "min": 0, "max": 0})

    async def count(self, step):
        """How many requests come in a time. A rate is not measured beside a stall."""
        left, what = self.limit(), step["count"]
        while True:
            first, stalled = len(self.log), self.stalls.total
            await asyncio.sleep(step["for_ms"] / 1000)  # the time in which they are counted
            new = [each for each in self.log[first:] if what in (each.verb, each.command)]
            if step["min"] <= len(new) <= step["max"]:
                return
            stalled = self.stalls.total - stalled
            if stalled < 0.1 or not step["max"] or left() < 0:
                text = f", the first is {new[0]}" if new else ""
                raise Failure(f"{len(new)} {what} in {step['for_ms']} ms{text}")

    async def calm(self, step):
        """Waits until no request with this verb has come for a time."""
        left = self.limit()
        while True:
            try:
                return await self.quiet({**step, "quiet": step["calm"]})
            except Failure:
                if left() < 0:
                    raise

    async def drift(self, step):
        """Of some leases that are not renewed, at least one loss is reported early enough.

        The reserve for the speed of clocks is shorter than what a busy machine may need for one
        report, but not for each of them. A report during a stall shows nothing, nor does a single
        one without.
        """
        times = []

        async def wait_lost(number, request):
            lease = {"as": f"{self.client} {number}", "client": self.client}
            lost = self.worker.send(do="lost", limit_ms=step["drift"] + 9000, **lease)
            await asyncio.sleep(step["drift"] / 1000 * 0.97)
            before, stalled = time.monotonic(), self.stalls.total
            _, at = await lost
            if at > before and self.stalls.total - stalled < 0.02:
                times.append((at - request) * 1000)

        waits = []
        for number in map(str, range(step["leases"])):
            acquire = {"kind": "mutex", "name": number, "ttl_ms": step["drift"], "limit_ms": 15000}
            await self.do({"do": "acquire", "as": number, **acquire})
            await self.take({"request": "acquire", "mark": "sent", "answer": 7})
            await self.result({"result": f"acquire {number}", "is": {"ok": True}})
            waits.append(asyncio.create_task(wait_lost(number, self.marks["sent"][0])))
            await asyncio.sleep(step["apart_ms"] / 1000)  # so that one stall does not delay all
        await asyncio.wait_for(asyncio.gather(*waits), 3 * LIMIT)
        if len(times) > 1 and min(times) > step["max_ms"]:
            raise Failure(f"the losses came {min(times):.0f} ms or more after the requests")

    async def publish(self, step):
        self.server.publish(fill(step["publish"], {**self.names, "now": self.server.show_clock()}))
        self.mark(step, time.monotonic())

    async def silence(self, step):
        """Nothing more comes on the connections that there are."""
        self.each_connection(step["silence"], lambda each: setattr(each, "is_silent", True))
        self.mark(step, time.monotonic())

    async def close(self, step):
        self.each_connection(step["close"], lambda each: each.close())
        self.mark(step, time.monotonic())

    def each_connection(self, kind, action):
        for each in list(self.server.connections):
            if kind == "all" or (kind == "subscription") == bool(each.channels):
                action(each)

    async def clock(self, step):
        """The server's clock is set, by so many seconds."""
        self.server.offset += step["clock"] * 1_000_000


async def names_dialogue(worker, stalls):
    """The vectors of names: the keys of each, or its refusal without a request."""
    dialogues = {}
    lines = (HERE / "names.jsonl").read_text().splitlines()
    for number, line in enumerate(lines, 1):
        vector = json.loads(line)
        name, prefix = expand(vector["name"]), expand(vector.get("prefix", "lock:"))
        new = {"name": f"names {len(dialogues)}", "open": {"prefix": prefix}, "warm": False}
        new["steps"] = []
        # A try whose answer came late is given up, if the library may have repeated its request.
        new["rules"] = [{"request": "release", "answer": 0}]
        dialogue = dialogues.setdefault(prefix, new)
        handle = {"as": str(number)}
        acquire = {"do": "acquire", "kind": "mutex", "name": name, "limit_ms": 0}
        acquire |= {"ttl_ms": 20000, **handle}
        if "refuse" in vector:
            steps = [{**acquire, "is": {"ok": False, "error": "invalid_name"}}]
        else:
            request = {"request": "acquire", "answer": {"busy": 30000}}
            request["keys"] = [expand(key) for key in vector["keys"]]
            steps = [acquire, request]
            steps += [{"result": f"acquire {number}", "is": {"ok": False, "error": "timed_out"}}]
        dialogue["steps"] += steps
    runs = [Dialogue(each, worker, stalls).run() for each in dialogues.values()]
    problems = [each for each in await asyncio.gather(*runs) if each]
    return "; ".join(problems) or None


def expand(text):
    """In a vector of names, ["a", 512] is a text of 512 letters; a list of texts is joined."""
    if isinstance(text, str):
        return text
    if len(text) == 2 and isinstance(text[1], int):
        return text[0] * text[1]
    return "".join(map(expand, text))


def load(parts):
    """The dialogues whose names have one of the parts."""
    found = []
    for file in sorted((HERE / "dialogues").glob("*.json")):
        found += json.loads(file.read_text())
    found.append({"name": "names", "harm": "Two locks share a key, or a lock is in two slots."})
    return [each for each in found if not parts or any(part in each["name"] for part in parts)]


async def run_language(language, command, dialogues):
    """Returns the number of dialogues that were not as they must be."""
    worker, beside = Worker(command), asyncio.Semaphore(BESIDE)
    await worker.start()
    stalls, start = Stalls(worker), time.monotonic()
    measuring = [asyncio.create_task(each.measure()) for each in (stalls, stalls.own)]

    async def run(data):
        async with beside:
            if data["name"] == "names":
                return await names_dialogue(worker, stalls)
            return await Dialogue(data, worker, stalls).run()

    # One that loads the worker's libraries runs alone, then the long ones begin.
    ordered = sorted(dialogues, key=lambda each: (not each.get("first"), -each.get("seconds", 0)))
    outcomes = [await run(each) for each in ordered[:1]]
    outcomes += await asyncio.gather(*(run(each) for each in ordered[1:]))
    for each in measuring:
        each.cancel()
    await worker.stop()
    bad = 0
    for data, failure in zip(ordered, outcomes):
        must_fail = data.get("must_fail")
        if must_fail:
            if not failure or must_fail not in failure:
                bad += 1
                print(f"FAILED  {language}: {data['name']} must fail with {must_fail!r}: {failure}")
        elif failure:
            bad += 1
            print(f"FAILED  {language}: {data['name']}: {failure}\n        harm: {data['harm']}")
    if bad:
        worker.log.seek(0)
        print(worker.log.read()[-500:].decode(errors="replace").strip())
    controls = sum("must_fail" in each for each in dialogues)
    counts = f"{len(dialogues) - controls} dialogues, {controls} controls, {bad} failed"
    seconds = f"{time.monotonic() - start:.1f} s, of which it stalled for {stalls.total:.1f} s"
    print(f"{'FAILED' if bad else 'ok    '}  {language}: {counts}; {seconds}")
    return bad


async def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("workers", nargs="*")
    options = parser.parse_args()
    dialogues = load(options.only)
    if options.list:
        for each in dialogues:
            print(f"{each['name']}\n    {each.get('harm', 'it must fail')}")
        return 0
    workers = [each.split("=", 1) for each in options.workers]
    runs = [run_language(language, command, dialogues) for language, command in workers]
    return 1 if sum(await asyncio.gather(*runs)) or not dialogues else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
