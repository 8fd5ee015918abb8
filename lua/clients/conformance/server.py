"""A fake server: it speaks RESP2 and RESP3, and does with each request what a judge says."""

import asyncio
import collections
import hashlib
import itertools
import json
import time
from pathlib import Path

LUA = Path(__file__).resolve().parents[2]
SCRIPTS = {each.stem: each.read_bytes() for each in LUA.glob("*.lua")}
BY_SHA1 = {hashlib.sha1(text).hexdigest(): kind for kind, text in SCRIPTS.items()}
BY_TEXT = {text: kind for kind, text in SCRIPTS.items()}
VERBS = json.loads((LUA / "protocol.json").read_text())["verbs"]
VERBS = {(each["file"][: -len(".lua")], each["verb"]): each for each in VERBS if "verb" in each}
# The server's clock is a year ahead of the machine's: a client that reads its own is found.
YEAR = 365 * 24 * 3600
START = time.time() - time.monotonic()
INFO = "redis_version:7.4.0\r\nloading:0\r\nrole:master\r\nmaster_link_status:up\r\n"


class Malformed(Exception):
    pass


class Raw(bytes):
    """Bytes that are sent as they are."""


def encode(value):
    if isinstance(value, Raw):
        return value
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, list):
        return b"*%d\r\n%b" % (len(value), b"".join(map(encode, value)))
    if isinstance(value, dict):  # an error reply
        return b"-%b\r\n" % value["error"].encode()
    data = value.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


class Request:
    """A command of a client; if it is a script, also its kind, verb, keys and words by name."""

    def __init__(self, connection, words):
        self.connection, self.at, self.raw = connection, time.monotonic(), words
        self.command = words[0].decode().upper()
        self.arguments = [word.decode(errors="replace") for word in words[1:]]
        self.verb, self.data, self.is_ready = None, b"", False
        if self.command in ("EVAL", "EVALSHA"):
            self.read_script()

    def read_script(self):
        is_sha1 = self.command == "EVALSHA"
        kinds, script = (BY_SHA1, self.arguments[0]) if is_sha1 else (BY_TEXT, self.raw[1])
        self.kind = kinds.get(script)
        if self.kind is None:
            raise Malformed(f"{self.command} of what is not the exact text of a script")
        count = int(self.arguments[1])
        self.keys, words = self.arguments[2 : 2 + count], self.arguments[2 + count :]
        self.verb, words = words[0], words[1:]
        form = VERBS.get((self.kind, self.verb))
        if form is None or count != 3:
            raise Malformed(f"{self.kind}.lua with {count} keys and the verb {self.verb!r}")
        names = form["words"] + form["shared"]
        if len(words) > len(names) or len(words) < len(form["words"]):
            raise Malformed(f"{self.verb} with {len(words)} words")
        # A trailing word that is left out is the empty one.
        self.words = dict(zip(names, words + [""] * len(names)))

    def __str__(self):
        if not self.verb:
            return " ".join([self.command, *self.arguments])[:200]
        words = " ".join(f"{name}={word!r}" for name, word in self.words.items() if word)
        return f"{self.verb} of {self.kind} {self.keys[0]!r} with {words}"


class Connection:
    def __init__(self, server, reader, writer):
        self.server, self.reader, self.writer = server, reader, writer
        self.number = next(server.numbers)
        self.resp, self.channels, self.is_silent = 2, [], False
        self.open = collections.deque()  # requests that are not answered

    async def serve(self):
        try:
            while line := await self.reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await self.reader.readline())[1:])
                    words.append((await self.reader.readexactly(size + 2))[:-2])
                if words:
                    self.server.receive(self, words)
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            self.close()

    def reply(self, request, value, delay=0.0):
        """Answers after the delay, and after all requests before it: replies have no names."""
        request.data = encode(value)
        if delay:
            asyncio.get_running_loop().call_later(delay, self.flush, request)
        else:
            self.flush(request)

    def flush(self, request):
        request.is_ready = True
        while self.open and self.open[0].is_ready:
            self.write(self.open.popleft().data)

    def write(self, data):
        if not self.is_silent and not self.writer.is_closing():
            self.writer.write(data)

    def close(self):
        self.server.connections.discard(self)
        self.writer.close()

    def news(self, *parts):
        """A message of a subscription, which RESP3 marks."""
        data = encode(list(parts))
        return Raw(b">" + data[1:] if self.resp == 3 else data)


class Server:
    """`judge.receive(request)` returns whether it has dealt with the request."""

    def __init__(self, judge):
        self.judge, self.connections, self.offset = judge, set(), YEAR * 1_000_000
        self.first, self.highest_offset, self.numbers = None, self.offset, itertools.count()

    async def start(self):
        self.listener = await asyncio.start_server(self.accept, "127.0.0.1", 0, limit=2**20)
        self.port = self.listener.sockets[0].getsockname()[1]

    async def accept(self, reader, writer):
        connection = Connection(self, reader, writer)
        self.connections.add(connection)
        await connection.serve()

    def stop(self):
        self.listener.close()
        for each in list(self.connections):
            each.close()

    def clock(self):
        """Microseconds."""
        return int((START + time.monotonic()) * 1e6) + self.offset

    def show_clock(self):
        """The clock for an answer, which the client then knows."""
        self.first = self.first or self.clock()
        self.highest_offset = max(self.highest_offset, self.offset)
        return self.clock()

    def first_clock(self):
        """What the first answer with a time said."""
        return self.first or 0

    def highest_clock(self):
        """The clock as a client may know it: it goes on if the server's is set back."""
        return self.clock() - self.offset + self.highest_offset

    def receive(self, connection, words):
        if connection.is_silent:  # nothing passes, in either direction
            return
        try:
            request = Request(connection, words)
            connection.open.append(request)
            if not self.judge.receive(request):
                self.answer(request)
        except (Malformed, IndexError, KeyError, ValueError) as error:
            self.judge.fail(f"{type(error).__name__}: {error}")

    def publish(self, text):
        for each in list(self.connections):
            for channel in each.channels:
                each.write(each.news("message", channel, text))

    def answer(self, request):
        """What any server answers."""
        connection, command = request.connection, request.command
        first = (request.arguments or [""])[0]
        if command == "HELLO":
            connection.resp = int(first or 2)
            about = ["server", "redis", "version", "7.4.0", "proto", connection.resp, "id", 1]
            about += ["mode", "standalone", "role", "master", "modules", []]
            data = encode(about)
            is_map = connection.resp == 3
            connection.reply(request, Raw(b"%7" + data[3:] if is_map else data))
        elif command == "PING" and connection.channels and connection.resp == 2:
            connection.reply(request, ["pong", first])
        elif command == "PING":
            connection.reply(request, first or Raw(b"+PONG\r\n"))
        elif command == "SUBSCRIBE":
            connection.channels += request.arguments  # a client subscribes to one at a time
            news = connection.news("subscribe", first, len(connection.channels))
            connection.reply(request, news)
        elif command == "UNSUBSCRIBE":
            connection.channels.clear()
            connection.reply(request, connection.news("unsubscribe", first, 0))
        elif command == "TIME":
            clock = self.show_clock()
            connection.reply(request, [str(clock // 1_000_000), str(clock % 1_000_000)])
        elif command == "INFO":
            connection.reply(request, INFO)
        elif command == "PUBLISH":
            connection.reply(request, 0)
        elif command == "SCRIPT" and first.upper() == "LOAD":
            connection.reply(request, hashlib.sha1(request.raw[2]).hexdigest())
        elif command == "CLIENT" and first.upper() == "MAINT_NOTIFICATIONS":
            connection.reply(request, {"error": "ERR unknown subcommand"})
        else:
            connection.reply(request, Raw(b"+OK\r\n"))
