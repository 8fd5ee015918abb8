//! `redlatch run`: arguments, exit codes, what the command receives, and what is left.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use redlatch::Owner;
use tokio::io::AsyncReadExt as _;

use crate::program::{RunningProgram, WORDS, is_held, on, output, program, run_on};
use crate::support::{DURABLE, Server, queued, soon};

/// A lock of each kind, as its options.
const KINDS: [&[&str]; 5] = [&[], &["--reentrant"], &["--shared"], &["--exclusive"], &["-x", "-r"]];

fn run<'a>(options: &[&'a str], command: &[&'a str]) -> Vec<&'a str> {
    [&["run"], options, &["job", "--"], command].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn command_has_stdin_stdout_stderr_and_its_exit_code() {
    let server = Server::start().await;
    for options in KINDS {
        let words = run(options, &["sh", "-c", "cat; echo problem >&2; exit 7"]);
        let ended = output(on(&server, &words), "text\n").await;
        assert_eq!((ended.code, ended.stdout.as_str()), (7, "text\n"), "{options:?}: {ended:?}");
        assert_eq!(ended.stderr, "problem\n");
    }
    server.assert_nothing_left().await;
    assert!(!server.run::<bool>(&["EXISTS", "lock:job"]).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn command_receives_name_token_and_owner() {
    let server = Server::start().await;
    let script = "echo $REDLATCH_NAME; echo $REDLATCH_TOKEN; echo $REDLATCH_OWNER";
    for options in KINDS {
        let ended = run_on(&server, &run(options, &["sh", "-c", script])).await;
        let lines: Vec<&str> = ended.stdout.lines().collect();
        let [name, token, owner] = lines.as_slice() else { panic!("{ended:?}") };
        assert_eq!(*name, "job");
        assert_eq!(*token, server.run::<String>(&["GET", "{lock:job}:fence"]).await);
        owner.parse::<Owner>().unwrap();
    }
    // A chain through another kind of lock keeps its owner.
    let mut command = on(&server, &run(&[], &["sh", "-c", script]));
    let owner = Owner::new().to_string();
    let ended = output(std::mem::replace(command.env("REDLATCH_OWNER", &owner), program(&[])), "").await;
    assert_eq!(ended.stdout.lines().nth(2), Some(owner.as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn nested_run_enters_the_lock_of_its_caller() {
    let server = Server::start().await;
    for options in [&["-r"][..], &["-r", "-x"], &["-r", "-s"]] {
        let inner = run(options, &["sh", "-c", "exit 5"]);
        // Through a lock of another name and kind.
        let middle = [&WORDS[..], &["run", "other", "--"], &WORDS, &inner].concat();
        let ended = run_on(&server, &run(options, &middle)).await;
        assert_eq!(ended.code, 5, "{options:?}: {ended:?}");
        // Another owner is not admitted, unless both read.
        let refused = run(&[options, &["-n"]].concat(), &["true"]);
        let stranger = [&["env", "-u", "REDLATCH_OWNER"], &WORDS[..], &refused].concat();
        let ended = run_on(&server, &run(options, &stranger)).await;
        assert_eq!(ended.code, i32::from(!options.contains(&"-s")), "{options:?}: {ended:?}");
    }
    // The last release decides how long the lock stays held.
    let inner = run(&["-r", "--hold-at-least", "20s"], &["true"]);
    let ended = run_on(&server, &run(&["-r"], &[&WORDS[..], &inner].concat())).await;
    assert!(ended.code == 0 && ended.stderr.contains("has no effect here if the outer"), "{ended:?}");
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_lock_has_the_conflict_exit_code_and_starts_nothing() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    for (options, code) in [
        (&["-n"][..], 1),
        (&["--nonblock"], 1),
        (&["--nb", "-E", "0"], 0),
        (&["-w", "0"], 1),
        (&["-w", "0.05", "-E", "255"], 255),
        (&["--wait", "50ms", "--conflict-exit-code", "42"], 42),
        (&["--timeout", "0"], 1),
    ] {
        let ended = run_on(&server, &run(options, &["echo", "started"])).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (code, ""), "{options:?}: {ended:?}");
        assert_eq!(ended.stderr, "", "a conflict is an answer, not an error");
    }
    guard.release().await.unwrap();
    locks.close(std::time::Duration::from_secs(5)).await.unwrap();
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_run_starts_its_command_when_the_lock_is_released() {
    let server = Server::start().await;
    let locks = server.locks().await;
    for options in [&[][..], &["-w", "60"], &["-w", "1m"]] {
        let guard = locks.mutex("job").unwrap().lock().await.unwrap();
        // The grant that a waiter receives is valid for three seconds until its first renewal:
        // less than the usual grace.
        let command = on(&server, &run(options, &["sh", "-c", "echo started"]));
        let waiting =
            queued(async || vec![server.waiters("{lock:job}:waiters").await], output(command, "")).await;
        assert!(!waiting.is_finished());
        guard.release().await.unwrap();
        let ended = waiting.await.unwrap();
        assert_eq!((ended.code, ended.stdout.as_str()), (0, "started\n"), "{ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_share_and_writers_exclude() {
    let server = Server::start().await;
    let mut reader =
        RunningProgram::start(on(&server, &run(&["-s"], &["sh", "-c", "echo in; exec sleep 1000"])));
    assert_eq!(reader.line().await, "in");
    assert_eq!(run_on(&server, &run(&["-sn"], &["true"])).await.code, 0);
    for options in [&["-xn"][..], &["-en"], &["-n", "-x", "-r"]] {
        assert_eq!(run_on(&server, &run(options, &["true"])).await.code, 1, "{options:?}");
    }
    // A mutex is another kind of lock.
    let ended = run_on(&server, &run(&["-n"], &["true"])).await;
    assert_eq!(ended.code, 77);
    assert!(ended.stderr.contains("--exclusive"), "{ended:?}");
    reader.signal(rustix::process::Signal::TERM);
    assert_eq!(reader.end().await.code, 128 + 15);
}

#[tokio::test(flavor = "multi_thread")]
async fn first_word_after_the_name_begins_the_command() {
    let server = Server::start().await;
    for words in [
        &["run", "job", "echo", "-n", "--ttl", "--", "-x"][..],
        &["run", "job", "--", "echo", "-n", "--ttl", "--", "-x"],
        &["run", "--ttl", "9s", "job", "-n", "echo", "-n", "--ttl", "--", "-x"],
        &["run", "-n", "--", "job", "echo", "-n", "--ttl", "--", "-x"],
    ] {
        let ended = run_on(&server, words).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (0, "--ttl -- -x"), "{words:?}: {ended:?}");
    }
}

/// What the message proposes has to work.
#[tokio::test(flavor = "multi_thread")]
async fn mistake_in_the_order_of_arguments_has_a_tip() {
    for (words, tip) in [
        (&["run", "job", "-c", "true"][..], "redlatch run NAME sh -c 'LINE'"),
        (&["run", "sh", "-c", "true"], "redlatch run NAME sh -c 'LINE'"),
        (&["run", "job", "-z", "true"], "the name of the lock is missing: redlatch run NAME COMMAND"),
        (&["run", "ls", "-la"], "the name of the lock is missing: redlatch run NAME COMMAND"),
        (&["run", "ls", "-n"], "before the command stands the name of the lock"),
        (&["run", "--ttl", "-5s", "job", "true"], "invalid value '-5s' for '--ttl"),
        (&["run", "--hold-at-least", "-1", "job", "true"], "invalid value '-1' for '--hold-at-least"),
        (&["watch", "--interval", "-1", "job"], "invalid value '-1' for '--interval"),
        (&["run", "--node-timeout", "-1", "job", "true"], "invalid value '-1' for '--node-timeout"),
        (&["--verbose", "run", "job", "true"], "tip: options of a command stand behind it"),
        (&["--exclusive", "run", "job", "true"], "tip: options of a command stand behind it"),
        (&["status", "job"], "redlatch inspect NAME"),
        (&["run", "-o", "job", "true"], "`run` has no such option"),
        (&["run", "--", "-n", "job", "true"], "an option of `run` stands before `--`"),
        (&["job", "true"], "redlatch run NAME COMMAND"),
        (&["-n", "run", "job", "true"], "options of a command stand behind it"),
        (&["run", "-n", "--", "job", "--", "true"], "once, between the name of the lock and the command"),
        (&["run", "job", "--shard", "true"], "'--shared'"),
        (&["inspect", "-c"], "use '-- -c'"),
    ] {
        let ended = output(program(words), "").await;
        assert!(ended.code == 64 && ended.stderr.contains(tip), "{words:?}: {ended:?}");
        assert!(words[0] == "inspect" || !ended.stderr.contains("'-- -"), "{words:?}: {ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn command_that_cannot_run_releases_the_lock() {
    let server = Server::start().await;
    for (command, code) in [("no-such-command", 127), ("-n", 127), ("/", 126), ("/etc/passwd", 126)] {
        let ended = run_on(&server, &run(&[], &[command])).await;
        assert_eq!(ended.code, code, "{ended:?}");
        assert!(ended.stderr.contains(&format!("cannot run {command}: ")), "{ended:?}");
        assert_eq!(ended.stderr.contains("stands before `--`"), command.starts_with('-'), "{ended:?}");
        is_held(&server, "job", false).await;
    }
    for (words, tip) in [
        (["echo", "no-such-command"], "echo was taken for the name of the lock"),
        (["ls", "-la"], "ls was taken for the name of the lock"),
        (["Cargo.toml", "no-such-command"], "Cargo.toml was taken for the name of the lock"),
        (["job", "ls -l"], "sh -c 'LINE'"),
    ] {
        let ended = run_on(&server, &["run", words[0], "--", words[1]]).await;
        assert_eq!((ended.code, ended.stderr.contains(tip)), (127, true), "{ended:?}");
        assert!(!ended.stderr.contains("stands before"), "{ended:?}");
    }
    let ended = run_on(&server, &run(&[], &["sh", "-c", "kill -9 $$"])).await;
    assert_eq!(ended.code, 128 + 9, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_arguments_exit_with_64_and_send_nothing() {
    let server = Server::start().await;
    let name = "x".repeat(513);
    for words in [
        &["run"][..],
        &["run", "job"],
        &["run", "job", "--"],
        &["run", "-n", "--", "job", "--", "true"],
        &["run", "-s", "-x", "job", "--", "true"],
        &["run", "-n", "-w", "1", "job", "--", "true"],
        &["run", "-w", "soon", "job", "--", "true"],
        &["run", "-E", "256", "job", "--", "true"],
        &["run", "--ttl", "10ms", "job", "--", "true"],
        &["run", "--ttl", "10s", "--grace", "6s", "job", "--", "true"],
        &["run", "--label", "two words", "job", "--", "true"],
        &["run", "--redis", "http://host/", "job", "--", "true"],
        &["run", "--cacert", "/nonexistent", "job", "--", "true"],
        &["run", "--cert", "/etc/passwd", "job", "--", "true"],
        &["run", "--sentinel", "a", "--cluster", "job", "--", "true"],
        &["run", &name, "--", "true"],
        &["run", "}", "--", "true"],
        &["walk"],
    ] {
        let ended = run_on(&server, words).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (64, ""), "{words:?}: {ended:?}");
        assert!(!ended.stderr.is_empty(), "{words:?}");
    }
    let mut command = on(&server, &["run", "job", "--", "true"]);
    command.env("REDLATCH_OWNER", "two words");
    assert_eq!(output(command, "").await.code, 64);
    // Another variable in its place would name another server than on the other machines.
    for name in ["REDLATCH_REDIS", "REDLATCH_OWNER"] {
        let mut command = on(&server, &["run", "job", "--", "true"]);
        command.env("REDIS_URL", server.url()).env(name, OsStr::from_bytes(b"redis://host/\xff"));
        let ended = output(command, "").await;
        assert!(ended.code == 64 && ended.stderr.contains(&format!("{name} is not UTF-8")), "{ended:?}");
    }
    let ended = output(program(&["run", "job", "--", "true"]), "").await;
    assert_eq!(ended.code, 64, "no server is named: {ended:?}");
    assert_eq!(server.scripts_run().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_come_from_arguments_or_the_environment() {
    let (server, other) = (Server::start().await, Server::start().await);
    let third = Server::start().await;
    let words = ["run", "job", "--", "true"];
    let quorum = [&server, &other, &third].map(Server::url).join(" ");
    for (name, value) in [
        ("REDIS_URL", server.url()),
        ("REDLATCH_REDIS", format!(" {} ", server.url())),
        ("REDLATCH_REDIS", quorum),
    ] {
        let mut command = program(&words);
        command.env("REDIS_URL", "redis://127.0.0.1:1/").env(name, value);
        assert_eq!(output(command, "").await.code, 0);
    }
    let urls = [&server, &other, &third].map(Server::url);
    let flags: Vec<&str> = urls.iter().flat_map(|url| ["--redis", url]).collect();
    let before = third.scripts_run().await;
    let mut command = program(&[flags.as_slice(), &words].concat());
    command.env("REDLATCH_REDIS", "redis://127.0.0.1:1/");
    assert_eq!(output(command, "").await.code, 0, "arguments come first");
    assert!(third.scripts_run().await > before, "three URLs are a quorum");
    // The option may also follow the command.
    let words = ["run", "--redis", &urls[0], "--key-prefix", "mine:", "job", "--", "sh", "-c", "true"];
    assert_eq!(output(program(&words), "").await.code, 0);
    assert!(server.run::<bool>(&["EXISTS", "{mine:job}:fence"]).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_server_exits_with_69_and_no_secret_is_shown() {
    let words = ["run", "job", "--", "echo", "started"];
    for url in ["redis://user:s3cret@127.0.0.1:1/", "redis://:s3cret@127.0.0.1:1/0?protocol=resp3"] {
        let mut command = program(&words);
        command.env("REDLATCH_REDIS", url);
        let ended = output(command, "").await;
        assert_eq!((ended.code, ended.stdout.as_str()), (69, ""), "{ended:?}");
        assert!(!ended.stderr.contains("s3cret"), "{ended:?}");
        assert!(ended.stderr.ends_with("; lock \"job\": nothing is started\n"), "{ended:?}");
        // In the wrong place.
        let ended = output(program(&["run", url, url, "--", "true"]), "").await;
        assert!(ended.code == 64 && !ended.stderr.contains("s3cret"), "{ended:?}");
    }
    let ended = output(program(&["run", "--redis", "s3cret://:s3cret@x", "job", "--", "true"]), "").await;
    assert!(ended.code == 64 && !ended.stderr.contains(":s3cret"), "{ended:?}");
    // Without its scheme, for a server that is no sentinel.
    let server = Server::start().await;
    for words in [&words[..], &["list"]] {
        let words = [&["--sentinel", "user:s3cret@host"], words].concat();
        let ended = run_on(&server, &words).await;
        assert!(ended.code == 64 && !ended.stderr.contains("s3cret"), "{ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn outage_limit_outlasts_a_server_that_is_away_for_a_moment() {
    let mut server = Server::start().await;
    for options in [&[][..], &["-n"], &["-w", "60"], &["-s", "-n"]] {
        server.kill();
        let port = tokio::net::TcpListener::bind(("127.0.0.1", server.port())).await.unwrap();
        let words = [&["--outage-limit", "60"], options].concat();
        let running = RunningProgram::start(on(&server, &run(&words, &["echo", "started"])));
        for _ in 0..2 {
            drop(soon("it tries, and tries again", port.accept()).await.unwrap());
        }
        drop(port);
        server.restart().await;
        let ended = running.end().await;
        assert_eq!((ended.code, ended.stdout.as_str()), (0, "started\n"), "{options:?}: {ended:?}");
    }
    // A conflict is an answer, and nothing is tried again.
    let guard = server.locks().await.mutex("job").unwrap().lock().await.unwrap();
    let ended = run_on(&server, &run(&["-n", "--outage-limit", "60"], &["true"])).await;
    assert_eq!(ended.code, 1, "{ended:?}");
    drop(guard);
    server.kill();
    for options in [&["--outage-limit", "300ms"][..], &["-n", "--outage-limit", "0.3"], &["-n"], &[]] {
        let ended = run_on(&server, &run(options, &["echo", "started"])).await;
        assert_eq!((ended.code, ended.stdout.as_str()), (69, ""), "{options:?}: {ended:?}");
    }
    let ended = run_on(&server, &run(&["--outage-limit", "25h"], &["true"])).await;
    assert_eq!(ended.code, 64, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_stays_held_after_a_short_command() {
    let server = Server::start().await;
    let ended = run_on(&server, &run(&["--hold-at-least", "1h"], &["true"])).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let left: i64 = server.run(&["PTTL", "lock:job"]).await;
    assert!(left > 3_000_000, "{left}");
    let ended = run_on(&server, &run(&["-n"], &["true"])).await;
    assert_eq!(ended.code, 1, "{ended:?}");
    let ended = run_on(&server, &run(&["--hold-at-least", "25h"], &["true"])).await;
    assert!(ended.code == 64 && ended.stderr.contains("--hold-at-least"), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn label_names_the_holder() {
    let server = Server::start().await;
    for (options, label) in [(&["--label", "web-1"][..], "web-1"), (&[], ".")] {
        let command = on(&server, &run(options, &["sh", "-c", "echo in; exec sleep 1000"]));
        let mut running = RunningProgram::start(command);
        assert_eq!(running.line().await, "in");
        let holder = server.locks().await.mutex("job").unwrap().inspect().await.unwrap().holders.remove(0);
        assert_eq!(holder.client_name(), Some("redlatch"));
        assert!(holder.label().unwrap().contains(label), "{holder}");
        running.signal(rustix::process::Signal::TERM);
        running.end().await;
    }
}

/// Without its release, the lock would end with its TTL, and the next machine would do the work
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn the_lock_stays_held_if_the_server_was_away_when_the_command_ended() {
    let mut server = Server::start_with(&DURABLE).await;
    let script = format!("kill -KILL {}; echo started; exit 1", server.process_id());
    let command = ["sh", "-c", &script];
    let mut running =
        RunningProgram::start(on(&server, &run(&["--ttl", "60s", "--hold-at-least", "1h"], &command)));
    assert_eq!(running.line().await, "started");
    server.kill(); // reaps it
    let mut stderr = String::new();
    while !stderr.contains("could not release") {
        let more = running.child.stderr.as_mut().unwrap().read_u8().await.expect("a message");
        stderr.push(char::from(more));
    }
    // Without a minimum, `run` would give up after a second.
    tokio::time::sleep(Duration::from_secs(2)).await;
    server.restart().await;
    let ended = running.end().await;
    assert_eq!(ended.code, 1, "{ended:?}");
    let left: i64 = server.run(&["PTTL", "lock:job"]).await;
    assert!(left > 60_000, "{left}: {ended:?}");
}

/// With a minimum, the lock of a command that is missing would keep the other machines from the
/// work.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_is_missing_takes_no_lock() {
    let server = Server::start().await;
    for (command, code) in [("no-such-command", 127), ("./no/such", 127), ("/", 126), ("/etc/passwd", 126)] {
        let ended = run_on(&server, &run(&["--hold-at-least", "1h"], &[command])).await;
        assert_eq!(ended.code, code, "{ended:?}");
        let used: i64 = server.run(&["EXISTS", "lock:job", "{lock:job}:fence"]).await;
        assert_eq!(used, 0, "{command}");
    }
}
