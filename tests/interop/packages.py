"""Installs the packages of the clients in an empty folder and shares a counter with the crate.

    packages.py LUA RUST_WORKER [LANGUAGE...]

LUA is the folder of the protocol, or a copy of it, from which the packages are built. RUST_WORKER
is the command of the crate's worker. The oracle is the value on the server: a second holder would
lose increments. Without $REDLATCH_LUA, a worker has only the scripts of its package. Exit status 1:
a language failed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scenes import counter_mutex
from stage import Server, Stage, check


COPIED = {"ignore": shutil.ignore_patterns("node_modules", "target")}


def run(folder, *words):
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    check(done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


def python(client, folder):
    """A wheel that is built from a source distribution, in an empty environment."""
    run(folder, sys.executable, "-m", "venv", "venv")
    run(folder, "venv/bin/pip", "install", "--quiet", "build")
    run(folder, "venv/bin/python", "-m", "build", "--outdir", folder, client)
    wheel = next(folder.glob("*.whl"))
    names = [name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name]
    scripts = {f"redlatch/lua/{path.name}" for path in client.parents[1].glob("*.lua")}
    files = {"redlatch/__init__.py", "redlatch/asyncio.py", "redlatch/py.typed"} | scripts
    licences = {"redlatch/lua/LICENSE-APACHE", "redlatch/lua/LICENSE-MIT"}
    check(set(names) == files | licences, f"{names}")  # and nothing of the folders around it
    run(folder, "venv/bin/pip", "install", "--quiet", wheel)
    shutil.copy(client / "worker.py", folder)
    worker = f"'{folder}/venv/bin/python' '{folder}/worker.py'"
    return {"python": worker, "asyncio": f"{worker} asyncio"}


def node(client, folder):
    archive = run(client, "npm", "pack", "--silent", "--pack-destination", folder).split()[-1]
    (folder / "package.json").write_text("{}")
    run(folder, "npm", "install", "--silent", "--no-audit", "--no-fund", f"./{archive}")
    load = "require('redlatch-node').Redlatch.name"
    run(folder, "node", "--input-type=commonjs", "--eval", load)
    types(folder, re.search(r"```ts\n(.*?)```", (client / "README.md").read_text(), re.DOTALL)[1])
    text = (client / "worker.mjs").read_text()
    (folder / "worker.mjs").write_text(text.replace("./redlatch.mjs", "redlatch-node"))
    return {"node": f"node '{folder}/worker.mjs'"}


def types(folder, nested):
    """The types describe what the package has: a program with each call, and the nested one of the
    page, compiles, a wrong one not."""
    compiler = ["typescript@5", "@types/node@20"]
    run(folder, "npm", "install", "--silent", "--no-audit", "--no-fund", *compiler)
    strict = ["--strict", "--exactOptionalPropertyTypes"]
    options = ["--noEmit", *strict, "--module", "nodenext", "--target", "es2022"]
    check_types = ["npx", "--no-install", "tsc", *options, "app.mts"]
    (folder / "app.mts").write_text(TYPED + nested)
    run(folder, *check_types)
    (folder / "app.mts").write_text(TYPED.replace('"mutex", "backup"', '"mutexx", "backup"'))
    wrong = subprocess.run(check_types, cwd=folder, capture_output=True, text=True)
    check(wrong.returncode and "mutexx" in wrong.stdout, f"a wrong kind compiles: {wrong}")


TYPED = """
import { AsyncLocalStorage } from "node:async_hooks";
import { randomUUID } from "node:crypto";
import { type IncomingMessage } from "node:http";
import { Redis } from "ioredis";
import { LockError, Redlatch, type Lease } from "redlatch-node";

const locks = new Redlatch(new Redis(), { onError: (error) => console.error(error.message) });
const lease: Lease = await locks.acquire("mutex", "backup", { ttl: 30_000, timeout: 10_000 });
const other: Lease | null = await locks.tryAcquire("read", "cache", { owner: lease.owner });
try {
  const held: boolean = lease.isValid() && await lease.renew();
  console.log(held, lease.token.toFixed(), lease.signal.aborted, await other?.downgrade());
  await locks.send("fenced", ["{report}:text", "{report}:token"], [lease.token, "text"]);
} catch (error) {
  if (error instanceof LockError && error.code === "timed_out") console.log(error.message);
} finally {
  await lease.release();
  await locks.close(1_000);
}
declare const request: IncomingMessage, url: string;
"""


def go(client, folder):
    """The module as a module proxy would serve it: its files alone, in another module's build."""
    module, app = folder / "module", folder / "app"
    shutil.copytree(client.parent.parent, module, **COPIED)
    app.mkdir()
    shutil.copy(client / "worker/main.go", app)
    shutil.copy(module / "go.sum", app)
    requirements = (module / "go.mod").read_text().split("\n", 1)
    address = requirements[0].split()[1]
    text = f"module app\n{requirements[1]}\nrequire {address} v0.0.0\n"
    text += f"replace {address} => ../module\n"
    (app / "go.mod").write_text(text)
    run(app, "go", "build", "-o", "worker", ".")
    return {"go": f"'{app}/worker'"}


def java(client, folder):
    """The jar and its dependencies; the worker is compiled against them."""
    target = folder / "target"
    copy = folder / "lua"
    shutil.copytree(client.parent.parent, copy, **COPIED)
    run(copy / "clients/java", "mvn", "--quiet", "--batch-mode", "-DskipTests", "package")
    shutil.copytree(copy / "clients/java/target/lib", target / "lib")
    shutil.copy(next((copy / "clients/java/target").glob("redlatch-client-*.jar")), target / "lib")
    worker = client / "src/test/java/redlatch/Worker.java"
    run(target, "javac", "-cp", "lib/*", "-d", "classes", worker)
    shutil.rmtree(copy)
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return {"java": f"java {options} -cp '{target}/classes:{target}/lib/*' redlatch.Worker"}


LANGUAGES = {"python": python, "node": node, "go": go, "java": java}


def main(lua, rust, *languages):
    os.environ.pop("REDLATCH_LUA", None)
    server, failed = Server(), []
    try:
        for language in languages or LANGUAGES:
            build, stage = LANGUAGES[language], None
            with tempfile.TemporaryDirectory() as name:
                try:
                    commands = build(Path(lua).resolve() / "clients" / language, Path(name))
                    stage = Stage({"rust": rust, **commands}, server)
                    print(f"{language:8}  {counter_mutex(stage)}", flush=True)
                    stage.close()
                except Exception as error:
                    failed.append(language)
                    print(f"{language:8}  FAILED: {type(error).__name__}: {error}", flush=True)
                finally:
                    if stage:
                        stage.kill()
    finally:
        server.stop()
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
