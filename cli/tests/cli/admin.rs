//! `redlatch release`, `force-release`, `doctor` and `quorum rejoin`; completions, and the manual
//! page.

use std::fs::File;

use redlatch::{Options, Owner, RestartGuard};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::program::{on, output, program, run_on};
use crate::support::{DURABLE, Deployment, Server, Topology, queued, soon};

#[tokio::test(flavor = "multi_thread")]
async fn release_takes_a_lock_of_any_kind_from_the_named_owner_only() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let owner = async || -> String {
        let shown = run_on(&server, &["inspect", "job", "--json"]).await;
        let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
        shown["holders"][0]["owner"].as_str().unwrap().to_owned()
    };
    let release = async |owner: &str| run_on(&server, &["release", "job", "--owner", owner]).await;
    assert_eq!(release("another").await.code, 1, "a free lock");
    let mutex = locks.mutex("job").unwrap().lock().await.unwrap();
    let former = owner().await;
    let ended = release("another").await;
    assert!(ended.code == 1 && ended.stderr.contains("not this owner's"), "{ended:?}");
    let ended = release(&former).await;
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (0, "", ""));
    mutex.release().await.unwrap_err();

    let reentrant = locks.reentrant("job", &Owner::new()).unwrap().lock().await.unwrap();
    assert_eq!(release(&former).await.code, 1);
    assert_eq!(release(&owner().await).await.code, 0);
    reentrant.release().await.unwrap_err();
    let lock = locks.rwlock("job").unwrap();
    let [first, second] = [Owner::new(), Owner::new()];
    let gone = lock.with_owner(&first).read().await.unwrap();
    let stays = lock.with_owner(&second).read().await.unwrap();
    assert_eq!(release(&first.to_string()).await.code, 0);
    gone.release().await.unwrap_err();
    stays.release().await.unwrap();
    // The owner on the standard input, and in the environment.
    let writer = lock.write().await.unwrap();
    let read = on(&server, &["release", "job", "--owner", "-"]);
    assert_eq!(output(read, &format!("{}\n", owner().await)).await.code, 0);
    writer.release().await.unwrap_err();
    let writer = lock.write().await.unwrap();
    let mut inherited = on(&server, &["release", "job"]);
    inherited.env("REDLATCH_OWNER", owner().await);
    assert_eq!(output(inherited, "").await.code, 0);
    writer.release().await.unwrap_err();

    // The standard input may be anything.
    let long = "x".repeat(128);
    for (text, code) in [(format!("{long}\r\n"), 1), (format!("{long}{long}x\n"), 64), (long.repeat(9), 64)] {
        let ended = output(on(&server, &["release", "job", "--owner", "-"]), &text).await;
        assert_eq!(ended.code, code, "{ended:?}");
    }
    let mut endless = on(&server, &["release", "job", "--owner", "-"]);
    let ended = soon("it ends", endless.stdin(File::open("/dev/zero").unwrap()).status()).await.unwrap();
    assert_eq!(ended.code(), Some(64));
    for words in [&["release", "job"][..], &["release", "job", "--owner", "two words"]] {
        assert_eq!(run_on(&server, words).await.code, 64, "{words:?}");
    }
    server.run::<()>(&["RPUSH", "lock:job", "x"]).await;
    assert_eq!(release("another").await.code, 77);
}

#[tokio::test(flavor = "multi_thread")]
async fn force_release_revokes_every_kind_of_lock() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mutex = locks.mutex("job").unwrap().lock().await.unwrap();
    let ended = run_on(&server, &["force-release", "job"]).await;
    assert!(ended.code == 64 && ended.stderr.contains("--yes"), "{ended:?}");
    assert!(locks.mutex("job").unwrap().is_held_by(mutex.lease()).await.unwrap());
    let words = ["force-release", "job", "--yes"];
    let ended = run_on(&server, &words).await;
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (0, "", ""));
    mutex.release().await.unwrap_err();
    let ended = run_on(&server, &words).await;
    assert!(ended.code == 1 && ended.stderr.contains("was free"), "{ended:?}");

    let reentrant = locks.reentrant("job", &Owner::new()).unwrap().lock().await.unwrap();
    assert_eq!(run_on(&server, &words).await.code, 0);
    reentrant.release().await.unwrap_err();
    // Of two clients: readers of one client may share a hold.
    let other = server.locks().await;
    let readers = [
        locks.rwlock("job").unwrap().read().await.unwrap(),
        other.rwlock("job").unwrap().read().await.unwrap(),
    ];
    assert_eq!(run_on(&server, &words).await.code, 0);
    for reader in readers {
        reader.release().await.unwrap_err();
    }
    let writer = locks.rwlock("job").unwrap().write().await.unwrap();
    assert_eq!(run_on(&server, &words).await.code, 0);
    writer.release().await.unwrap_err();
    // Waiters are granted the lock, and keep it.
    let writer = locks.rwlock("job").unwrap().write().await.unwrap();
    let waiting = other.rwlock("job").unwrap();
    let waiters = async || vec![server.waiters("{lock:job}:waiters").await];
    let reader = queued(waiters, async move { waiting.read().await }).await;
    assert_eq!(run_on(&server, &words).await.code, 0);
    soon("the reader is granted the lock", reader).await.unwrap().unwrap().release().await.unwrap();
    writer.release().await.unwrap_err();
    server.run::<()>(&["RPUSH", "lock:list", "x"]).await;
    assert_eq!(run_on(&server, &["force-release", "list", "--yes"]).await.code, 77);
    // No kind of lock: the advice about kinds would be wrong.
    server.run::<()>(&["SET", "lock:forever", "x"]).await;
    let ended = run_on(&server, &["force-release", "forever", "--yes"]).await;
    assert!(ended.code == 77 && ended.stderr.contains("without a TTL"), "{ended:?}");
    assert!(ended.stderr.contains("delete the key") && !ended.stderr.contains("--reentrant"), "{ended:?}");
    let released = locks.force_release_from("forever", &Owner::new()).await.unwrap_err();
    assert!(released.to_string().contains("without a TTL"), "{released}");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_has_a_verdict_in_its_exit_code() {
    let fine = Server::start_with(&DURABLE).await;
    let ended = run_on(&fine, &["doctor"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(
        ended.stdout.lines().count() >= 6 && ended.stdout.lines().all(|line| line.ends_with(": fine")),
        "{ended:?}"
    );

    // The user may not run CONFIG GET.
    let rights = ["ACL", "SETUSER", "locks", "on", ">secret", "~*", "&*", "+@all", "-config"];
    fine.run::<()>(&rights).await;
    let mut command = program(&["doctor"]);
    command.env("REDLATCH_REDIS", format!("redis://locks:secret@127.0.0.1:{}/", fine.port()));
    let ended = output(command, "").await;
    assert!(ended.code == 2 && ended.stdout.contains(": unknown: "), "{ended:?}");

    // Nor renew a lock, which one that is only acquired and released does not show.
    fine.run::<()>(&["ACL", "SETUSER", "locks", "-pexpire"]).await;
    let mut command = program(&["doctor"]);
    command.env("REDLATCH_REDIS", format!("redis://locks:secret@127.0.0.1:{}/", fine.port()));
    let ended = output(command, "").await;
    assert!(ended.code == 1 && ended.stdout.contains("rights that locks need: +pexpire:"), "{ended:?}");

    let volatile = Server::start().await;
    let ended = run_on(&volatile, &["doctor"]).await;
    assert!(ended.code == 1 && ended.stdout.contains("set appendonly yes"), "{ended:?}");
    let ended = run_on(&volatile, &["doctor", "--json"]).await;
    let findings: Vec<Value> = serde_json::from_str(&ended.stdout).unwrap();
    let danger = findings.iter().find(|finding| finding["check"] == "persistence").unwrap();
    assert_eq!(danger["verdict"], "danger");
    assert!(danger["what"].is_string() && danger["remedy"].is_string() && danger["server"].is_string());
    let other = findings.iter().find(|finding| finding["check"] == "eviction").unwrap();
    assert!(other["verdict"] == "fine" && other["what"].is_null() && other["remedy"].is_null());

    let mut command = program(&["doctor"]);
    command.env("REDLATCH_REDIS", "redis://:s3cret@127.0.0.1:1/");
    let ended = output(command, "").await;
    assert!(ended.code == 1 && ended.stdout.contains("connection: danger"), "{ended:?}");
    assert!(!format!("{ended:?}").contains("s3cret"));
}

#[tokio::test(flavor = "multi_thread")]
async fn rejoin_admits_the_nodes_of_a_new_quorum() {
    let deployment = Deployment::start(Topology::Quorum3).await;
    let urls: Vec<String> = deployment.masters().iter().map(Server::url).collect();
    let command = |words: &[&str]| {
        let mut command = program(words);
        command.env("REDLATCH_REDIS", urls.join(" "));
        command
    };
    let run = ["--restart-guard", "run", "job", "--", "true"];
    let ended = output(command(&run), "").await;
    assert_eq!(ended.code, 77, "no node has a vote: {ended:?}");
    let ended = output(command(&["--restart-guard", "doctor"]), "").await;
    let advice = ended.stdout.matches("vote: danger: it has no vote").count();
    assert!(ended.code == 1 && advice == 3 && ended.stdout.contains("quorum rejoin"), "{ended:?}");
    let ended = output(command(&["quorum", "rejoin", "--ttl", "1s"]), "").await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(ended.stdout.matches(": votes\n").count(), 3, "{ended:?}");
    let ended = output(command(&run), "").await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let ended = output(command(&["--restart-guard", "doctor"]), "").await;
    assert_eq!(ended.stdout.matches("vote: fine").count(), 3, "{ended:?}");
    let again = output(command(&["quorum", "rejoin", "--ttl", "1s"]), "").await;
    assert_eq!((again.code, again.stdout.as_str()), (0, "every node has a vote\n"), "{again:?}");
    let options = Options::new().restart_guard(RestartGuard::On);
    let locks = redlatch::Locks::builder().quorum(&urls).options(options).connect().await.unwrap();
    assert!(locks.nodes().await.iter().all(redlatch::NodeStatus::is_voter));
    // One server has no quorum.
    let ended = output(on(&deployment.masters()[0], &["quorum", "rejoin"]), "").await;
    assert_eq!(ended.code, 64, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bench_measures_the_users_server_and_leaves_nothing() {
    let server = Server::start().await;
    let ended = run_on(&server, &["bench", "--quick", "--json"]).await;
    let figures: Value = serde_json::from_str(&ended.stdout).unwrap();
    for field in ["acquire_release_p50_us", "acquire_release_p99_us", "turns_per_second", "locks_per_second"]
    {
        assert!(figures[field].as_u64().is_some_and(|figure| figure > 0), "{field}: {ended:?}");
    }
    let ended = run_on(&server, &["bench", "--quick"]).await;
    assert!(ended.code == 0 && ended.stdout.lines().count() == 3, "{ended:?}");
    let keys: Vec<String> = server.run(&["KEYS", "*"]).await;
    assert!(keys.iter().all(|key| key.ends_with(":fence") || key.ends_with(":waiters")), "{keys:?}");
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_and_the_manual_page_name_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ended = output(program(&["completions", shell]), "").await;
        assert!(ended.code == 0 && ended.stdout.contains("force-release"), "{shell}: {ended:?}");
    }
    assert_eq!(output(program(&["completions", "dos"]), "").await.code, 64);
    let page = output(program(&["man"]), "").await;
    assert!(page.code == 0 && page.stdout.contains(".TH redlatch 1"), "{page:?}");
    for word in ["run", "inspect", "list", "watch", "force\\-release", "doctor", "bench", "quorum"] {
        assert!(page.stdout.contains(word), "{word} is not in the manual page");
    }
    let page = output(program(&["man", "run"]), "").await;
    assert!(page.stdout.contains(".TH redlatch-run 1") && page.stdout.contains("REDLATCH_TOKEN"), "{page:?}");
    assert!(page.stdout.contains(r"\-\- \fICOMMAND\fR..."), "{page:?}");
    let page = output(program(&["man", "quorum", "rejoin"]), "").await;
    assert!(page.code == 0 && page.stdout.contains(".TH redlatch-quorum-rejoin 1"), "{page:?}");
    for words in [&["man", "walk"][..], &["man", "quorum", "walk"], &["man", "run", "rejoin"]] {
        assert_eq!(output(program(words), "").await.code, 64, "{words:?}");
    }
    let help = output(program(&["--help"]), "").await;
    assert!(help.code == 0 && help.stderr.is_empty() && help.stdout.contains("Exit codes"), "{help:?}");
    let version = output(program(&["--version"]), "").await;
    assert_eq!(version.stdout, format!("redlatch {}\n", env!("CARGO_PKG_VERSION")));
}

/// A terminal obeys what a server says, unless the program takes that out.
#[tokio::test(flavor = "multi_thread")]
async fn messages_have_no_control_characters_of_a_server() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while client.read(&mut buffer).await.is_ok_and(|count| count > 0) {
                    let said = b"-ERR evil \x1b[31mred\x07\r\n".repeat(8);
                    if client.write_all(&said).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    for words in [&["run", "-n", "job", "true"][..], &["doctor"]] {
        let mut command = program(words);
        command.env("REDLATCH_REDIS", &url);
        let ended = output(command, "").await;
        let text = format!("{}{}", ended.stdout, ended.stderr);
        assert!(text.contains("evil"), "{ended:?}");
        assert!(text.chars().all(|letter| letter == '\n' || !letter.is_control()), "{text:?}");
    }
}
