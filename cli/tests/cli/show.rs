//! `redlatch inspect`, `list` and `watch`.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use redlatch::{Options, Owner};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::program::{Output, RunningProgram, WORDS, is_held, on, output, program, run_on};
use crate::run_messages::full_pipe;
use crate::support::tls::{Authority, is_available, url};
use crate::support::{Deployment, Server, Topology, eventually, queued, soon};
use crate::terminal::Terminal;

fn parsed(ended: &Output) -> Value {
    assert_eq!(ended.code, 0, "{ended:?}");
    serde_json::from_str(&ended.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_shows_every_kind_of_lock() {
    let server = Server::start().await;
    let (locks, owner) = (server.locks().await, Owner::new());
    let held = |value: &Value| {
        let fields =
            ["name", "kind", "state", "holder_count", "waiters", "waiting_writers", "waiting_readers"];
        fields.map(|field| value[field].clone())
    };
    let ended = run_on(&server, &["inspect", "job", "--json"]).await;
    assert_eq!(
        held(&parsed(&ended)),
        [json!("job"), json!(null), json!("free"), json!(0), json!(0), json!(null), json!(null)]
    );

    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    let waiter = {
        let locks = locks.clone();
        async move { locks.mutex("job").unwrap().lock().await }
    };
    let waiter = queued(async || vec![server.waiters("{lock:job}:waiters").await], waiter).await;
    let value = parsed(&run_on(&server, &["inspect", "job", "--json"]).await);
    assert_eq!(
        held(&value),
        [json!("job"), json!("mutex"), json!("held"), json!(1), json!(1), json!(null), json!(null)]
    );
    assert_eq!(value["fencing_token"], json!(guard.lease().fencing_token()));
    let fields: Vec<_> = value["holders"][0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(fields, ["client_name", "count", "label", "owner", "remaining_ms"]);
    waiter.abort();
    let _ = waiter.await;
    guard.release().await.unwrap();
    locks.settled().await; // the lock may have been granted to the waiter

    let lock = locks.reentrant("job", &owner).unwrap();
    let guards = [lock.lock().await.unwrap(), lock.lock().await.unwrap()];
    let ended = run_on(&server, &["inspect", "job"]).await;
    assert!(ended.stdout.starts_with("\"job\": held (reentrant)\n  held by "), "{ended:?}");
    assert!(ended.stdout.contains("2 holds") && !ended.stdout.contains(&owner.to_string()), "{ended:?}");
    let value = parsed(&run_on(&server, &["inspect", "job", "--json"]).await);
    assert_eq!(value["holders"][0]["owner"], json!(owner));
    for guard in guards {
        guard.release().await.unwrap();
    }

    // Of two clients: readers of one client may share a hold.
    let other = server.locks().await;
    let readers = [
        locks.rwlock("job").unwrap().read().await.unwrap(),
        other.rwlock("job").unwrap().read().await.unwrap(),
    ];
    let value = parsed(&run_on(&server, &["inspect", "job", "--json"]).await);
    assert_eq!(
        held(&value),
        [json!("job"), json!("rwlock"), json!("read"), json!(2), json!(0), json!(0), json!(0)]
    );
    for guard in readers {
        guard.release().await.unwrap();
    }
    server.run::<()>(&["RPUSH", "lock:list", "x"]).await;
    assert_eq!(run_on(&server, &["inspect", "list"]).await.code, 77);
    assert_eq!(run_on(&server, &["inspect"]).await.code, 64);
    assert_eq!(
        output(on(&server, &["--redis", "redis://127.0.0.1:1/", "inspect", "job"]), "").await.code,
        69
    );
}

/// The key of a read-write lock outlasts a reader that died beside another one.
#[tokio::test(flavor = "multi_thread")]
async fn inspect_shows_no_kind_of_a_free_lock_that_has_a_key() {
    let server = Server::start().await;
    let (locks, other) = (server.locks().await, server.locks().await);
    let lock = locks.rwlock("job").unwrap();
    let guard = lock.read().await.unwrap();
    let short = other.with_options(Options::new().ttl(Duration::from_millis(100))).unwrap();
    let dead = short.rwlock("job").unwrap().read().await.unwrap();
    let _ticket = dead.into_ticket().unwrap(); // no task renews it
    eventually("a reader expires", || async { lock.inspect().await.unwrap().readers.len() == 1 }).await;
    guard.release().await.unwrap();
    assert_eq!(server.run::<u64>(&["EXISTS", "lock:job"]).await, 1);
    let value = parsed(&run_on(&server, &["inspect", "job", "--json"]).await);
    assert_eq!([&value["kind"], &value["state"]], [&json!(null), &json!("free")]);
}

/// One of three nodes is dead: the others have all locks that a majority granted.
#[tokio::test(flavor = "multi_thread")]
async fn list_shows_what_the_servers_have_that_answer() {
    let mut deployment = Deployment::start(Topology::Quorum3).await;
    let locks = deployment.client(Options::new()).await;
    let _held = locks.mutex("held").unwrap().lock().await.unwrap();
    deployment.masters_mut()[2].kill();
    let urls: Vec<String> = deployment.masters().iter().map(Server::url).collect();
    let mut command = program(&["list", "--json"]);
    command.env("REDLATCH_REDIS", urls.join(" "));
    let ended = output(command, "").await;
    let shown: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(shown["locks"][0]["name"], "held", "{ended:?}");
    assert_eq!((ended.code, &shown["is_complete"]), (0, &Value::Bool(false)), "{ended:?}");
    let dead = deployment.masters()[2].port().to_string();
    assert!(ended.stderr.contains("missing") && ended.stderr.contains(&dead), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn list_shows_held_locks_only() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mut guards = Vec::new();
    for name in ["a:1", "a:2", "a*", "{tag}x", "b"] {
        guards.push(locks.mutex(name).unwrap().lock().await.unwrap());
    }
    let freed = locks.mutex("a:free").unwrap().lock().await.unwrap();
    freed.release().await.unwrap();
    server.run::<()>(&["RPUSH", "lock:a:list", "x"]).await;
    let names = |value: &Value| -> Vec<String> {
        value["locks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|lock| lock["name"].as_str().unwrap().to_owned())
            .collect()
    };
    for (words, expected) in [
        (&["list", "--json"][..], &["a*", "a:1", "a:2", "b", "{tag}x"][..]),
        (&["list", "--json", "--prefix", "a:"], &["a:1", "a:2"]),
        (&["list", "--json", "--prefix", "a*"], &["a*"]),
        (&["list", "--json", "--prefix", "none"], &[]),
        (&["list", "--json", "--prefix", "a", "--limit", "3"], &["a*", "a:1", "a:2"]),
    ] {
        let value = parsed(&run_on(&server, words).await);
        assert_eq!(names(&value), expected, "{words:?}");
        assert_eq!(value["is_complete"], json!(true));
    }
    let ended = run_on(&server, &["list", "--json", "--limit", "2"]).await;
    assert_eq!(parsed(&ended)["is_complete"], json!(false));
    assert!(names(&parsed(&ended)).len() == 2 && ended.stderr.contains("--limit"), "{ended:?}");
    let ended = run_on(&server, &["list", "--prefix", "b"]).await;
    assert!(ended.stdout.starts_with("\"b\" held: ") && ended.stdout.ends_with("; 0 waiting\n"), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn list_finds_the_masters_of_every_topology() {
    for topology in [Topology::Cluster, Topology::Sentinel, Topology::Quorum3] {
        let deployment = Deployment::start(topology).await;
        let locks = deployment.client(redlatch::Options::new()).await;
        let expected: BTreeSet<String> = (0..8).map(|number| format!("job-{number}")).collect();
        let mut guards = Vec::new();
        for name in &expected {
            guards.push(locks.mutex(name).unwrap().lock().await.unwrap());
        }
        let urls: Vec<String> = deployment.entrances().iter().map(Server::url).collect();
        for master in ["mymaster", "redis://mymaster/0"] {
            let mut words = vec!["list", "--json"];
            match topology {
                Topology::Cluster => words.push("--cluster"),
                Topology::Sentinel => words.extend(["--sentinel", master]),
                _ => {}
            }
            let mut command = program(&words);
            command.env("REDLATCH_REDIS", urls.join(" "));
            let value = parsed(&output(command, "").await);
            let names = value["locks"].as_array().unwrap().iter();
            let names: BTreeSet<String> =
                names.map(|lock| lock["name"].as_str().unwrap().to_owned()).collect();
            assert_eq!(names, expected, "{topology:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_takes_certificates_from_files() {
    if !is_available().await {
        return;
    }
    let authority = Authority::new();
    let (_server, port) = authority.server(&[]).await;
    let [ca, cert, key] = [authority.path("ca"), authority.path("certificate"), authority.path("key")];
    let files = ["--cacert", &ca, "--cert", &cert, "--key", &key];
    for words in [&["run", "job", "--", "true"][..], &["list"]] {
        let command = |files: &[&str]| {
            let mut command = program(&[files, words].concat());
            command.env("REDLATCH_REDIS", url(port));
            command
        };
        let ended = output(command(&files), "").await;
        assert_eq!(ended.code, 0, "{words:?} {ended:?}");
        // The server asks for a certificate. Its alert or the end of the connection comes first.
        let ended = output(command(&files[..2]), "").await;
        assert!([69, 77].contains(&ended.code), "{words:?} {ended:?}");
        assert_eq!(output(command(&[]), "").await.code, 77, "no system trusts this CA");
    }
    // Whatever the server does, these files are wrong.
    let stranger = Authority::new();
    let (other, empty) = (stranger.path("key"), "/dev/null");
    for (files, says) in [
        (&["--cacert", empty][..], "no certificate"),
        (&["--cacert", &key], "no certificate"),
        (&["--cert", empty, "--key", &key], "no certificate"),
        (&["--cert", &cert, "--key", &cert], "no private key"),
        (&["--cert", &cert, "--key", &other], "not the key"),
    ] {
        for words in [&["run", "job", "--", "true"][..], &["list"], &["doctor"]] {
            let mut command = program(&[files, words].concat());
            command.env("REDLATCH_REDIS", "rediss://127.0.0.1:1/");
            let ended = output(command, "").await;
            assert!(ended.code == 64 && ended.stderr.contains(says), "{files:?} {words:?} {ended:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_prints_a_line_for_each_change() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mut running = RunningProgram::start(on(&server, &["watch", "--interval", "10ms", "job"]));
    assert_eq!(running.line().await, "\"job\" free; 0 waiting");
    let guard = locks.mutex("job").unwrap().lock().await.unwrap();
    assert!(running.line().await.starts_with("\"job\" held: "));
    guard.release().await.unwrap();
    assert_eq!(running.line().await, "\"job\" free; 0 waiting");
    server.kill_connections().await;
    running.signal(Signal::INT);
    let status = soon("the program ends", running.child.wait()).await.unwrap();
    assert_eq!(status.signal(), Some(2));
}

/// Nothing reads the pipe, as with `| less` at the end of its first screen.
#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_a_watch_whose_stdout_is_blocked() {
    let server = Server::start().await;
    let (_reader, writer) = full_pipe();
    let mut command = on(&server, &["watch", "job"]);
    let before = server.scripts_run().await;
    let mut watch = command.stdout(writer).spawn().unwrap();
    eventually("it has asked", || async { server.scripts_run().await > before }).await;
    let pid = Pid::from_raw(i32::try_from(watch.id().unwrap()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let status = soon("the program ends", watch.wait()).await.unwrap();
    assert_eq!(status.signal(), Some(15));
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_redraws_on_a_terminal() {
    let server = Server::start().await;
    let words = ["watch", "--interval", "10ms", "job"];
    let mut terminal = Terminal::start(&[&WORDS[..], &words].concat(), &server);
    terminal.shows("\"job\": free").await;
    let mut holder = RunningProgram::start(on(
        &server,
        &["run", "--label", "web-1", "job", "--", "sh", "-c", "echo in; exec sleep 1000"],
    ));
    holder.line().await;
    terminal.shows("held by redlatch:web-1").await;
    // Up over what was drawn before.
    terminal.shows("\u{1b}[2A\r\u{1b}[J").await;
    holder.signal(Signal::TERM);
    holder.end().await;
    is_held(&server, "job", false).await;
    terminal.press("\u{3}");
    assert_ne!(terminal.end().await.0, Some(0));
}
