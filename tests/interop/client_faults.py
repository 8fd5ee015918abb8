"""Plants faults in copies of the clients, and checks that the conformance dialogues find each one.

    client_faults.py LUA [PART...] LANGUAGE=COMMAND...

LUA is a copy of lua/ in which the clients are built; COMMAND starts a worker there. PART is a part
of a fault's name. Each fault names the dialogue that must find it. Exit status 1: one is missed.
Without a command, nothing is planted: the texts that the faults replace must be in the clients.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = {
    "python": "python/redlatch/__init__.py",
    "node": "node/redlatch.mjs",
    "go": "go/redlatch.go",
    "java": "java/src/main/java/redlatch/Redlatch.java",
}
# What a copy of a client needs and a fault cannot change.
SHARED = {"node": ["node_modules"], "java": ["target/lib", "target/test-classes"]}
BESIDE = 4  # faults at the same time

# The fault, the dialogue that finds it, and for each language the text and what it becomes.
FAULTS = [
    ("the deadline counts from the answer", "deadline: counts from", {
        "python": ("        self._move(sent)\n        self.locks._start(", "        self._move(clock())\n        self.locks._start("),
        "node": ("[lease.token, elapsed] = [answer, sent];", "[lease.token, elapsed] = [answer, stopwatch()];"),
        "go": ("\t\t\tl.Token = token\n", "\t\t\tl.Token = token\n\t\t\tlater := time.Now()\n\t\t\tl.sent.Store(&later)\n"),
        "java": ("        sent = now;\n        renewIn(", "        sent = Moment.now();\n        renewIn("),
    }),
    ("the deadline of a renewal counts from the answer", "deadline: of a renewal", {
        "python": ("            self._move(sent)\n        if", "            self._move(clock())\n        if"),
        "node": ("if (sent() < elapsed()) elapsed = sent;", "elapsed = stopwatch();"),
        "go": ("\t\tl.c.observe(now)\n\t\tl.sent.Store(&sent)", "\t\tl.c.observe(now)\n\t\tsent = time.Now()\n\t\tl.sent.Store(&sent)"),
        "java": ("        sent = now;\n        return isValid();", "        sent = Moment.now();\n        return isValid();"),
    }),
    ("no reserve for the speed of clocks", "deadline: less one percent", {
        "python": ("self.ttl * 0.99 - 0.002", "self.ttl"),
        "node": ("ttl * 0.99 - 2 - elapsed()", "ttl - elapsed()"),
        "go": ("return l.TTL - l.TTL/100 - 2*time.Millisecond - monotonic", "return l.TTL - monotonic"),
        "java": ("ttlMs * 99 / 100 - (wallOffset == 0 ? 12 : 1002)", "ttlMs - 0"),
    }),
    ("min_token is 0", "mutex: the words", {
        "python": ("self._ttl_ms, locks._observe()]", "self._ttl_ms, 0]"),
        "node": ('[queuedAt, "", ttl, client.minToken(), ...queue]', '[queuedAt, "", ttl, 0, ...queue]'),
        "go": ('l.place, "", l.ttl, c.minToken(), l.claim', 'l.place, "", l.ttl, 0, l.claim'),
        "java": ("ttlMs, minToken(), claimMs, wakeUps).get()", "ttlMs, 0, claimMs, wakeUps).get()"),
    }),
    ("min_token of a release is 0", "mutex: the words", {
        "python": ("[last_token, self.locks._observe(), remember,", "[last_token, 0, remember,"),
        "node": ('...head, "", client.minToken(), ...rest)', '...head, "", 0, ...rest)'),
        "go": ('"release", "", l.c.minToken(), 1,', '"release", "", 0, 1,'),
        "java": ('"release", attempt, lock.owner, "", minToken(),', '"release", attempt, lock.owner, "", 0,'),
    }),
    ("min_token is of the machine's clock", "mutex: the words", {
        "python": ("            return self._min_token\n", "            return int(time.time() * 1e6)\n"),
        "node": ("return Math.floor((now + this.#offset) / TOKEN_STEP) * TOKEN_STEP;", "return Date.now() * 1000;"),
        "go": ("return (c.offset.Load() + micros()) / 5_000_000 * 5_000_000", "return time.Now().UnixMicro()"),
        "java": ("return (Moment.now().ms * 1000 + offset) / STEP * STEP;", "return System.currentTimeMillis() * 1000;"),
    }),
    ("min_token ignores the times of answers", "min_token: follows", {
        "python": ("max(self._clock_offset, seconds * 1_000_000 + micros - now)", "self._clock_offset or seconds * 1_000_000 + micros - now"),
        "node": ("Math.max(this.#offset, seen - now)", "this.#offset || seen - now"),
        "go": ("old < next && !c.offset.CompareAndSwap(old, next)", "old == 0 && !c.offset.CompareAndSwap(old, next)"),
        "java": ('offset = Math.max(offset, Long.parseLong("" + micros) - 10_000 - Moment.now().ms * 1000);', 'if (offset == Long.MIN_VALUE) offset = Long.parseLong("" + micros) - 10_000 - Moment.now().ms * 1000;'),
    }),
    ("min_token falls with the server's clock", "min_token: never falls", {
        "python": ("            self._clock_offset = max(self._clock_offset, seconds * 1_000_000 + micros - now)\n            if now + self._clock_offset > self._min_token + TOKEN_STEP:\n",
                   "            if seconds or micros:\n                self._clock_offset = seconds * 1_000_000 + micros - now\n            if True:\n"),
        "node": ("this.#offset = Math.max(this.#offset, seen - now);", "if (seen) this.#offset = seen - now;"),
        "go": ("old < next && !c.offset.CompareAndSwap(old, next)", "!c.offset.CompareAndSwap(old, next)"),
        "java": ('Math.max(offset, Long.parseLong("" + micros) - 10_000 - Moment.now().ms * 1000)', 'Long.parseLong("" + micros) - 10_000 - Moment.now().ms * 1000'),
    }),
    ("no remember", "release: no answer", {
        "python": ('clock() + max(self.ttl, CLAIM), "", 1', 'clock() + max(self.ttl, CLAIM), "", ""'),
        "node": ("callRelease(1, ...queue)", 'callRelease("", ...queue)'),
        "go": ("l.c.minToken(), 1, l.claim", 'l.c.minToken(), "", l.claim'),
        "java": ("          1, claimMs, wakeUps).thenApply", '          "", claimMs, wakeUps).thenApply'),
    }),
    ("no queued_at", "poll: the same attempt", {
        "python": ('self._queued_at or answer[1] or ""', '""'),
        "node": ('queuedAt ||= answer[1] || "";', ""),
        "go": ("l.place = cmp.Or(l.place, fmt.Sprint(busy[1])) // the first one", ""),
        "java": ('if (queuedAt.equals("")) queuedAt = busy.get(1);', ""),
    }),
    ("queued_at of the last answer", "poll: the same attempt", {
        "python": ('self._queued_at or answer[1] or ""', 'answer[1] or ""'),
        "node": ('queuedAt ||= answer[1] || "";', 'queuedAt = answer[1] || queuedAt;'),
        "go": ("cmp.Or(l.place, fmt.Sprint(busy[1]))", "fmt.Sprint(busy[1])"),
        "java": ('if (queuedAt.equals("")) queuedAt', "queuedAt"),
    }),
    ("a new attempt for each poll", "poll: the same attempt", {
        "python": ("                self._wake.clear()\n", "                self._wake.clear()\n                self._head[0] = secrets.token_hex(16)\n"),
        "node": ("...head, ...words).catch((error)", '...[randomBytes(16).toString("hex"), ...head.slice(1)], ...words).catch((error)'),
        "go": ("\t\tl.sent.Store(&sent)\n\t\tanswer, err", "\t\tl.sent.Store(&sent)\n\t\tl.attempt = rand.Text()\n\t\tanswer, err"),
        "java": ("lock.keys, ms, lock.verb, attempt, lock.owner, queuedAt", "lock.keys, ms, lock.verb, randomId(), lock.owner, queuedAt"),
    }),
    ("the place is lost after an error", "error: a queued attempt", {
        "python": ("answer = [POLL * 1000, 0]", 'answer, self._queued_at = [POLL * 1000, 0], ""'),
        "node": ("return [POLL, 0];", 'queuedAt = "";\n        return [POLL, 0];'),
        "go": ("\t\ttime.AfterFunc(delay, wake)\n", "\t\tif err != nil {\n\t\t\tl.place = \"\"\n\t\t}\n\t\ttime.AfterFunc(delay, wake)\n"),
        "java": ("        problem = e.getCause();\n", '        problem = e.getCause();\n        queuedAt = "";\n'),
    }),
    ("polls every half claim without a subscription", "subscription: polls while", {
        "python": ("self._queue[0] / 2000 if is_notified else POLL", "self._queue[0] / 2000"),
        "node": ("queue[1] && client.isSubscribed ? claim : POLL", "claim"),
        "go": ("if l.channel == c.channel && c.isSubscribed.Load() {\n\t\t\t\tdelay", "if true {\n\t\t\t\tdelay"),
        "java": ("isSubscribed && channel.equals(wakeUps) ? Math.min(ttlMs, 3000) / 2 : POLL_MS", "Math.min(ttlMs, 3000) / 2"),
    }),
    ("polls every 100 ms with a subscription", "poll: every half claim", {
        "python": ("self._queue[0] / 2000 if is_notified else POLL", "POLL"),
        "node": ("queue[1] && client.isSubscribed ? claim : POLL", "POLL"),
        "go": ("delay = claim / 2", "delay = poll"),
        "java": ("isSubscribed && channel.equals(wakeUps) ? Math.min(ttlMs, 3000) / 2 : POLL_MS", "POLL_MS"),
    }),
    ("the holder's time left is ignored", "poll: soon if", {
        "python": ("min(max(answer[0], 1) / 1000, pause,", "min(pause,"),
        "node": ("Math.min(answer[0], claim / 2,", "Math.min(claim / 2,"),
        "go": ("delay = min(max(time.Duration(busy[0].(int64)), 1)*time.Millisecond, delay)", ""),
        "java": ("Math.max(1, Math.min((Long) busy.get(0), poll))", "poll"),
    }),
    ("the text of a script is stripped", "script: its source", {
        "python": ('.read_bytes()\n', '.read_bytes().strip()\n'),
        "node": ('this.scripts), "utf8");', 'this.scripts), "utf8").trim();'),
        "go": ("redis.NewScript(string(text))", "redis.NewScript(strings.TrimSpace(string(text)))"),
        "java": ('readScript(lua, kind + ".lua")', 'new String(readScript(lua, kind + ".lua"), UTF_8).strip().getBytes(UTF_8)'),
    }),
    ("NOSCRIPT is an error", "script: its source", {
        "python": ("except errors.NoScriptError:\n", "except ZeroDivisionError:\n"),
        "go": ("l.c.scripts[l.Kind.script()].Run(", "l.c.scripts[l.Kind.script()].EvalSha("),
        "java": ("e instanceof RedisNoScriptException", "e instanceof ArithmeticException"),
    }),
    ("the first renewal is late", "renewal: after a third", {
        "python": ("sent + self.ttl / 3", "sent + self.ttl * 0.7"),
        "node": ("ttl / 3 - elapsed()", "ttl * 0.7 - elapsed()"),
        "go": ("go l.keep()", "time.AfterFunc(l.remaining()*7/10, l.keep)"),
        "java": ("renewIn(ttlMs / 3 - now.ageMs());", "renewIn(ttlMs * 7 / 10 - now.ageMs());"),
    }),
    ("the second renewal is late", "renewal: after a third", {
        "go": ("(l.TTL-l.TTL/100)*2/3", "(l.TTL-l.TTL/100)*3/10"),
        "java": ("e == null ? ttlMs / 3 - sent.ageMs()", "e == null ? ttlMs * 7 / 10 - sent.ageMs()"),
    }),
    ("no renewal after one that failed", "renewal: an error", {
        "python": ("lease._renew_at = min(clock() + min(lease.ttl / 30, 1.0), lease._valid_until)", "lease._renew_at = lease._valid_until"),
        "node": ("renew().catch(client.onError).then(again)", "renew().then(again, client.onError)"),
        "go": ("\t\t\tl.Renew(l.ctx)\n", "\t\t\tif l.Renew(l.ctx) != nil {\n\t\t\t\treturn\n\t\t\t}\n"),
        "java": ("if (e != null || isHeld) renewIn", "if (e == null && isHeld) renewIn"),
    }),
    ("an error of a renewal ends the lease", "renewal: an error", {
        "python": ("        except Exception:  # unknown: try again before the deadline\n", "        except Exception:\n            lease._give_up()\n"),
        "node": ("await call(left() / 4, verb, ...head, ttl, ...minToken) : 0", "await call(left() / 4, verb, ...head, ttl, ...minToken).catch(() => 0) : 0"),
        "go": ("if err == nil && now <= 0 && now != -5 || !l.IsValid()", "if now <= 0 && now != -5 || !l.IsValid()"),
        "java": ("ttlMs, minToken);\n", "ttlMs, minToken).exceptionally(e -> List.<Object>of(0L));\n"),
    }),
    ("a malformed renewal ends the lease", "renewal: a malformed", {
        "python": ("        if answer == -5:\n", "        if answer == -500:\n"),
        "node": ("if (answer === -5)", "if (answer === -500)"),
        "go": ("now <= 0 && now != -5", "now <= 0"),
        "java": ("if (answer.get(0).equals(-5L))", "if (answer.get(0).equals(-500L))"),
    }),
    ("a loss that a renewal finds is ignored", "loss: a renewal", {
        "python": ("if not (is_held and self.is_valid) and", "if not self.is_valid and"),
        "node": ("} else if (!isOver) {\n      client.background", "} else if (!isOver && !isValid()) {\n      client.background"),
        "go": ("if err == nil && now <= 0 && now != -5 || !l.IsValid()", "if !l.IsValid()"),
        "java": ("if ((Long) answer.get(0) <= 0 || !isValid()) lose();", "if (!isValid()) lose();"),
    }),
    ("another kind under the key is no loss", "loss: the key", {
        "python": ("if answer == -5:\n", "if answer < 0:\n"),
        "node": ("if (answer === -5)", "if (answer < 0)"),
        "go": ("now <= 0 && now != -5", "now == 0"),
        "java": ("if (answer.get(0).equals(-5L))", "if ((Long) answer.get(0) < 0)"),
    }),
    ("a lost lease is not given up", "loss: a renewal", {
        "python": ("        self.lost.set()\n        self._give_up()\n", "        self.lost.set()\n"),
        "node": ("      client.background(end());\n", "      isOver = true;\n      clearTimeout(timer);\n"),
        "go": ("if l.giveUp(ErrLost); isCounted {", "if isCounted {"),
        "java": ("released = giveUp(Moment.now())", "released = (isLost ? completedFuture(true) : giveUp(Moment.now()))"),
    }),
    ("a renewal may take as long as the lease", "renewal: again on another", {
        "python": ("self._call((self._valid_until - sent) / 4, verb", "self._call(self._valid_until - sent, verb"),
        "node": ("await call(left() / 4, verb", "await call(left(), verb"),
        "go": ("l.call(ctx, l.remaining()/4, verb", "l.call(ctx, l.remaining(), verb"),
        "java": ("Math.max(1, sent.leftMs(ttlMs) / 4)", "Math.max(1, sent.leftMs(ttlMs))"),
    }),
    ("idle connections are kept after a silent one", "renewal: idle connections", {
        "python": ("            self.locks._drop_idle()\n", ""),
        "node": ("reject(error, this.#replaceSilent())", "reject(error)"),
        "java": ('if (isSilent || e != null && !used.connection.isOpen()) replace(used);', ""),
    }),
    ("the deadline is not watched", "deadline: it passes", {
        "java": ("Math.max(1, Math.min(ms, sent.leftMs(ttlMs)))", "Math.max(1, ms == ttlMs / 3 ? ms : ms * 60)"),
    }),
    ("a release without claim and channel", "limit: the waiter", {
        "python": ("remember, *self._queue]", "remember]"),
        "node": ("callRelease(1, ...queue)", "callRelease(1)"),
        "go": ("l.c.minToken(), 1, l.claim, l.channel)", "l.c.minToken(), 1)"),
        "java": ("          1, claimMs, wakeUps).thenApply", "          1, null, null).thenApply"),
    }),
    ("a waiter that gives up releases nothing", "limit: the waiter", {
        "python": ("        except BaseException:\n            self._give_up()\n            raise\n", "        except BaseException:\n            raise\n"),
        "node": ("    if (!timer) await end();\n", ""),
        "go": ("if err != nil && (err != ErrBusy || ", "if false && ("),
        "java": ("if (!isGranted) lease.end(false);", ""),
    }),
    ("a release is sent once", "limit: giving up", {
        "python": ("                if clock() > until:\n", "                if True:\n"),
        "node": ("      if (answer !== undefined || client.isClosed) return answer;", "      return answer;"),
        "go": ("if err == nil || ctx.Err() != nil || isFinal(err) {", "if true {"),
        "java": ("e -> isFinal(e) || start.ageMs() > ttlMs", "e -> true"),
    }),
    ("a release is sent for ever", "release: it stops", {
        "python": ("                if clock() > until:\n", "                if False:\n"),
        "node": ("    while (performance.now() < until) {", "    while (true) {"),
        "go": ("if err == nil || ctx.Err() != nil || isFinal(err) {", "if ctx = context.Background(); err == nil || isFinal(err) {"),
        "java": ("isFinal(e) || start.ageMs() > ttlMs", "isFinal(e)"),
    }),
    ("a lease is valid after its release", "mutex: the words", {
        "python": ("is_mine and not self._is_over.is_set() and", "is_mine and"),
        "node": ("isValid = () => !isOver && left() > 0;", "isValid = () => left() > 0;"),
        "go": ("return l.ctx.Err() == nil && l.remaining() > 0", "return l.remaining() > 0"),
        "java": ("return released == null && sent != null", "return sent != null"),
    }),
    ("a release that found nothing counts", "release: the server says", {
        "python": ('"release") > 0\n', '"release") >= 0\n'),
        "node": ("return answer > 0;\n", "return answer >= 0;\n"),
        "go": ("return cmp.Or(err, refusals[max(released, 0)])", "return cmp.Or(err, refusals[max(released, 1)])"),
        "java": ("answer -> (Long) answer.get(0) > 0)", "answer -> (Long) answer.get(0) >= 0)"),
    }),
    ("no PING", "subscription: a silent one", {
        "python": ("                await _result(news.ping())\n", "                message = True\n"),
        "node": ("setInterval(() => subscriber.ping().catch(() => {}), 5_000)", "setInterval(() => {}, 5_000)"),
        "go": ("\t\t\t\tpatience = time.Second\n\t\t\t\tnews.Ping(ctx)\n", ""),
        "java": ("news.async().ping().get(1, SECONDS);", "Thread.onSpinWait();"),
    }),
    ("no new subscription without an answer to PING", "subscription: a silent one", {
        "python": ("elif patience < IDLE or self._is_sentinel:\n                break\n", "elif False:\n                break\n"),
        "node": ("const WATCHED = { socketTimeout: TEST_TIMEOUT,", "const WATCHED = { socketTimeout: 600_000,"),
        "go": ("if errors.Is(err, os.ErrDeadlineExceeded) && patience == idle {", "if errors.Is(err, os.ErrDeadlineExceeded) {"),
        "java": ("news.async().ping().get(1, SECONDS);", "news.async().ping();"),
    }),
    # A waiter in Python, Go or Java polls while it is not subscribed, and once more after that.
    ("no poll after a new subscription", "subscription: a new one", {
        "node": ("for (const { poll } of this.attempts.values()) poll();", ""),
    }),
    ("the channel is named without a subscription", "subscription: none", {
        "python": ('locks._channel if locks._is_subscribed.is_set() else ""', "locks._channel"),
        "node": ('client.isSubscribed ? client.channel : ""', "client.channel"),
        "go": ("\t\tif c.isSubscribed.Load() {\n\t\t\tl.channel", "\t\tif true {\n\t\t\tl.channel"),
        "java": ('waits ? isSubscribed ? channel : "" : null', "waits ? channel : null"),
    }),
    ("the channel is never named", "message: wakes", {
        "python": ('locks._channel if locks._is_subscribed.is_set() else ""', '""'),
        "node": ('client.isSubscribed ? client.channel : ""', '""'),
        "go": ("\t\t\tl.channel = c.channel\n", ""),
        "java": ('waits ? isSubscribed ? channel : "" : null', 'waits ? "" : null'),
    }),
    ("messages are ignored", "message: wakes", {
        "python": ("                wake.set()\n            if ended", "                pass\n            if ended"),
        "node": ("(isOver ? client.background(callRelease()) : wake())", "{}"),
        "go": ("else if wake, ok := c.waiters.Load(attempt); ok {", "else if wake, ok := c.waiters.Load(attempt); ok && false {"),
        "java": ("waiters.getOrDefault(id, new Semaphore(0)).release();", ""),
    }),
    ("only the first attempt of a message is woken", "message: for several", {
        "python": ('.split(" ")[0].split(",")', '.split(" ")[0].split(",")[:1]'),
        "node": ('.split(",").forEach(notify)', '.split(",").slice(0, 1).forEach(notify)'),
        "go": ('strings.SplitSeq(attempts, ",")', 'strings.SplitSeq(strings.Split(attempts, ",")[0], ",")'),
        "java": ('text.split("[ ,]")', 'text.split("[ ,]", 2)'),
    }),
    ("a message for an ended attempt is ignored", "message: for an attempt", {
        "python": ("if ended := self._ended.get(attempt):", "if ended := None:"),
        "node": ("(isOver ? client.background(callRelease()) : wake())", "wake()"),
        "go": ("\t\tl.c.ended.Store(l.attempt, l)\n", ""),
        "java": ('if (!queuedAt.equals("")) ended.put(attempt, this);', ""),
    }),
    ("each message wakes every waiter", "message: malformed", {
        "go": ("\t\t\tcase *redis.Message:\n", "\t\t\tcase *redis.Message:\n\t\t\t\tfor _, wake := range c.waiters.Range {\n\t\t\t\t\twake.(context.CancelFunc)()\n\t\t\t\t}\n"),
    }),
    ("the claim is longer than the TTL", "claim: not longer", {
        "python": ("int(min(self.ttl, CLAIM) * 1000)", "int(CLAIM * 1000)"),
        "node": ("claim = Math.min(ttl, 3000)", "claim = 3000"),
        "go": ("claim := min(l.TTL, 3*time.Second)", "claim := 3*time.Second"),
        "java": ("claimMs = waits ? Math.min(ttlMs, 3000) : null", "claimMs = waits ? 3000 : null"),
    }),
    ("a try queues", "try: one request", {
        "python": ("        if waits:\n            channel", "        if True:\n            channel"),
        "node": ('...options, claim: "" }', "...options }"),
        "go": ("\tif !l.NoWait {\n", "\tif true {\n"),
        "java": ("claimMs = waits ? Math.min(ttlMs, 3000) : null", "claimMs = Math.min(ttlMs, 3000)"),
    }),
    ("the owner is left out", "read: the words", {
        "python": ("[self.attempt, owner] if has_owner", '[self.attempt, ""] if has_owner'),
        "node": ('kind === "mutex" ? [id] : [id, owner]', 'kind === "mutex" ? [id] : [id, ""]'),
        "go": ("\t\tl.owner = l.Owner\n", '\t\tl.owner = ""\n'),
        "java": ("attempt, lock.owner, queuedAt", 'attempt, lock.owner == null ? null : "", queuedAt'),
    }),
    ("one attempt for all leases", "attempt: a new one", {
        "python": ("self.attempt, self.token, self.lost = secrets.token_hex(16),", 'self.attempt, self.token, self.lost = "0" * 32,'),
        "node": ('const id = randomBytes(16).toString("hex");', 'const id = "0".repeat(32);'),
        "go": ("attempt: rand.Text(),", 'attempt: "00000000000000000000000000000000",'),
        "java": ("attempt = randomId() + randomId().substring(24)", 'attempt = "0".repeat(40)'),
    }),
    ("a short attempt", "attempt: a new one", {
        "python": ("self.attempt, self.token, self.lost = secrets.token_hex(16),", "self.attempt, self.token, self.lost = secrets.token_hex(4),"),
        "node": ('const id = randomBytes(16)', 'const id = randomBytes(4)'),
        "go": ("attempt: rand.Text(),", "attempt: rand.Text()[:8],"),
        "java": ("attempt = randomId() + randomId().substring(24)", "attempt = randomId().substring(24)"),
    }),
    ("an error that passes is reported", "error: a full server", {
        "python": ("if not waits or not is_transient(error):", "if True:"),
        "node": ("!TRANSIENT.test(error.message)", "true"),
        "go": ("return final.MatchString(err.Error()) && !passes.MatchString(err.Error())", "return true"),
        "java": ("return e.toString().matches(FINAL) && !e.toString().matches(PASSES);", "return true;"),
    }),
    ("the code inside an error is not seen", "error: the code is inside", {
        "python": ('r"\\b(OOM', 'r"^(OOM'),
        "node": ('RegExp("OOM|', 'RegExp("^OOM|'),
        "go": ("`\\b(OOM|", "`^(OOM|"),
        "java": ('PASSES = "(?s).*\\\\b(', 'PASSES = "(?s).*Exception: (')
    }),
    ("one code that passes is forgotten", "error: each other code", {
        "python": ("|NOREPLICAS", ""),
        "node": ("|MASTERDOWN", ""),
        "java": ("|max number of clients", ""),
    }),
    ("a missing right is waited out", "error: a missing right", {
        "python": ("return bool(passes) and not is_denied", "return True"),
        "node": ('error?.name === "ReplyError" && !TRANSIENT', "false && !TRANSIENT"),
        "go": ("return final.MatchString(err.Error()) && !passes", "return false && !passes"),
        "java": ("return e.toString().matches(FINAL) && !", "return false && !"),
    }),
    ("a request may take a quarter of a long TTL", "no answer: for five seconds", {
        # The libraries of the others have shorter limits of their own.
        "java": ("LIMIT_MS = 5000;", "LIMIT_MS = 12000;"),
    }),
    ("a request without an answer is reported", "no answer: the same request", {
        "python": ("passes = isinstance(error, TRANSIENT) or", "passes = "),
        "node": ('isFinal = (error) => error?.name === "ReplyError" &&', "isFinal = (error) => error &&"),
        "go": ("return final.MatchString(err.Error()) &&", "return"),
        "java": ("if (claimMs != null && !isFinal(e)) return POLL_MS;", ""),
    }),
    ("white space in the channel", "prefix: in the keys", {
        "python": ('re.sub(r"\\s", "_", prefix)', "prefix"),
        "node": ('prefix.replace(/\\s/g, "_")', "prefix"),
        "go": ('regexp.MustCompile(`\\s`).ReplaceAllString(prefix, "_")', "prefix"),
        "java": ('prefix.replaceAll("\\\\s", "_")', "prefix"),
    }),
    ("the limit of names counts letters", "names", {
        "python": ("len(name.encode()) > 512", "len(name) > 512"),
        "node": ("Buffer.byteLength(`${name}`) > 512", "name.length > 512"),
        "java": ("name.getBytes(UTF_8).length > 512", "name.length() > 512"),
    }),
    ("an empty name", "names", {
        "python": ("if not name or is_too_long", "if is_too_long"),
        "node": (' && name !== ""', ""),
        "go": ('l.Name == "" || ', ""),
        "java": ("!name.isEmpty() && !isTooLong", "!isTooLong"),
    }),
    ("the name of a companion", "names", {
        "python": ("|:(fence|waiters)\\Z", ""),
        "node": ("|:(fence|waiters)$/", "/"),
        "go": ("|\\}.*:(fence|waiters)$", ""),
        "java": ("(:fence|:waiters|\\\\{}node)", "(\\\\{}node)"),
    }),
    ("the end of a line is the end of a name", "names", {
        "python": ("|:(fence|waiters)\\Z", "|:(fence|waiters)$"),
        "go": ("`(?s)^\\{[^}]+\\}$", "`^\\{[^}]+\\}$"),
        "java": ('key.matches("(?s)\\\\{[^}]+}|', 'key.matches("\\\\{[^}]+}|'),
    }),
]


def plant(lua, folder, language, change):
    """A copy of the client with the fault, built."""
    clients = folder / "lua" / "clients"
    clients.mkdir(parents=True)
    scripts = sorted(lua.glob("*.lua"))
    for each in [*scripts, *lua.glob("*.go"), *lua.glob("go.*"), lua / "protocol.json"]:
        shutil.copy(each, folder / "lua")
    shutil.copytree(lua / "clients" / "conformance", clients / "conformance")
    shared = SHARED.get(language, [])
    ignored = shutil.ignore_patterns("node_modules", "target", "__pycache__", "go-worker")
    shutil.copytree(lua / "clients" / language, clients / language, ignore=ignored)
    for each in shared:
        (clients / language / each).parent.mkdir(exist_ok=True)
        (clients / language / each).symlink_to(lua / "clients" / language / each)
    source = clients / SOURCES[language]
    text = source.read_text()
    old, new = change
    if text.count(old) != 1:
        raise ValueError(f"{text.count(old)} times in {SOURCES[language]}: {old!r}")
    source.write_text(text.replace(old, new))
    if language == "go":
        run(["go", "build", "-o", "go-worker", "./worker"], clients / "go")
    if language == "java":
        words = ["javac", "-nowarn", "-d", "target/classes", "-cp", "target/lib/*", str(source)]
        run(words, clients / "java")
        for each in scripts:
            shutil.copy(each, clients / "java/target/classes/redlatch")


def run(words, folder, **environment):
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode and not environment:
        raise ValueError(f"{words[0]}: {done.stderr[-500:]}")
    return done


def find(lua, command, language, dialogue, change):
    """Returns how the dialogue finds the fault, or None."""
    with tempfile.TemporaryDirectory(prefix="redlatch-fault-") as folder:
        folder = Path(folder)
        try:
            plant(lua, folder, language, change)
        except ValueError as error:
            return None, str(error)
        command = command.replace(str(lua), str(folder / "lua"))
        runner = str(folder / "lua" / "clients" / "conformance" / "run.py")
        words = [sys.executable, "-B", runner, "--only", dialogue, f"{language}={command}"]
        done = run(words, folder, REDLATCH_LUA=str(folder / "lua"))
    found = [line for line in done.stdout.splitlines() if line.startswith("FAILED") and ": step" in line]
    return (found[0], "") if done.returncode == 1 and found else (None, done.stdout + done.stderr)


def missing(lua):
    """The texts that a fault replaces and that a client does not have once."""
    texts = {language: (lua / "clients" / source).read_text() for language, source in SOURCES.items()}
    return [
        f"{language}: {name}: {texts[language].count(old)} times {old!r}"
        for name, _, changes in FAULTS
        for language, (old, _) in changes.items()
        if texts[language].count(old) != 1
    ]


def main():
    lua, *rest = sys.argv[1:]
    commands = dict(each.split("=", 1) for each in rest if each.split("=")[0] in SOURCES)
    parts = [each for each in rest if each.split("=")[0] not in SOURCES]
    jobs = [
        (language, name, dialogue, changes[language])
        for name, dialogue, changes in FAULTS
        for language in SOURCES
        if language in commands and language in changes
        if not parts or any(part in name for part in parts)
    ]
    absent = missing(Path(lua))
    print(*absent, sep="\n", end="\n" if absent else "")
    if not commands or absent:
        return 1 if absent else 0
    missed, counts = 0, {}
    with ThreadPoolExecutor(BESIDE) as pool:
        found = [
            pool.submit(find, Path(lua).resolve(), commands[language], language, dialogue, change)
            for language, _, dialogue, change in jobs
        ]
        for (language, name, *_), future in zip(jobs, found):
            how, problem = future.result()
            missed += how is None
            planted, caught = counts.get(language, (0, 0))
            counts[language] = planted + 1, caught + (how is not None)
            what = how.split(": step", 1)[1][:200] if how else problem[:600]
            print(f"{'found ' if how else 'MISSED'}  {language}: {name}: step{what}", flush=True)
    for language, (planted, caught) in counts.items():
        print(f"{language}: {caught} of {planted} faults found")
    return 1 if missed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
