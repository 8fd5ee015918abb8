//! `Locks::doctor`: its findings, and the warnings that a client logs when it connects.

use std::time::Duration;

use redlatch::{Check, Finding, Locks, Verdict};

use crate::rights::documented_rights;
use crate::support::events::{listen, logged_with};
use crate::support::{Deployment, LONGEST_WAIT, Server, Topology, eventually, patient, soon};

/// The verdicts of one check, in words: one for each server.
fn verdicts(findings: &[Finding], check: Check) -> Vec<&'static str> {
    let word = |finding: &Finding| match finding.verdict {
        Verdict::Fine => "fine",
        Verdict::Danger { .. } => "danger",
        _ => "unknown",
    };
    findings.iter().filter(|finding| finding.check == check).map(word).collect()
}

const OF_SERVERS: [Check; 4] = [Check::Version, Check::Eviction, Check::Persistence, Check::Replicas];

#[tokio::test(flavor = "multi_thread")]
async fn doctor_checks_eviction_and_persistence() {
    for (arguments, check, expected) in [
        (&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"][..], Check::Eviction, "danger"),
        (&["--maxmemory", "100mb", "--maxmemory-policy", "volatile-ttl"], Check::Eviction, "danger"),
        (&["--maxmemory", "100mb", "--maxmemory-policy", "noeviction"], Check::Eviction, "fine"),
        (&["--maxmemory-policy", "allkeys-lru"], Check::Eviction, "fine"),
        (&["--appendonly", "no"], Check::Persistence, "danger"),
        (&["--appendonly", "yes", "--appendfsync", "everysec"], Check::Persistence, "danger"),
        (&["--appendonly", "yes", "--appendfsync", "always"], Check::Persistence, "fine"),
        (&[], Check::Replicas, "fine"),
    ] {
        let server = Server::start_with(arguments).await;
        let locks = server.locks().await;
        let findings = locks.doctor().await;
        assert_eq!(verdicts(&findings, check), [expected], "{arguments:?}: {findings:?}");
        for check in [Check::Connection, Check::Version, Check::Scripts, Check::Notifications] {
            assert_eq!(verdicts(&findings, check), ["fine"], "{arguments:?}: {findings:?}");
        }
        assert!(
            findings.iter().all(|finding| finding.server == format!("127.0.0.1:{}", server.port())),
            "{findings:?}"
        );
        drop(locks);
        server.assert_nothing_left().await;
    }
}

/// What a closed client refuses says nothing of its server.
#[tokio::test]
async fn doctor_of_a_closed_client_finds_no_danger() {
    let server = Server::start().await;
    let locks = server.locks().await;
    locks.close(LONGEST_WAIT).await.unwrap();
    assert_eq!(verdicts(&locks.doctor().await, Check::Scripts), ["unknown"]);
}

/// Its lock is not one that the options keep held.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_holds_its_lock_no_longer_than_its_check() {
    let server = Server::start().await;
    let locks = server.locks_with(patient().hold_at_least(Duration::from_secs(3600))).await;
    assert_eq!(verdicts(&locks.doctor().await, Check::Scripts), ["fine"]);
    assert_eq!(server.run::<Vec<String>>(&["KEYS", "lock:doctor-*"]).await, [""; 0]);
    drop(locks);
    server.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_warns_of_replicas_without_confirmation() {
    let deployment = Deployment::start(Topology::Sentinel).await;
    let master = &deployment.masters()[0];
    let locks = master.locks().await;
    assert_eq!(verdicts(&locks.doctor().await, Check::Replicas), ["danger"]);
    let confirmed = locks.with_options(patient().replicas(1, Duration::from_millis(500))).unwrap();
    assert_eq!(verdicts(&confirmed.doctor().await, Check::Replicas), ["fine"]);
    master.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    assert_eq!(verdicts(&locks.doctor().await, Check::Replicas), ["fine"]);
    let replica = deployment.replicas()[0].locks().await;
    let findings = replica.doctor().await;
    assert_eq!(verdicts(&findings, Check::Replicas), ["danger"]);
    assert_eq!(verdicts(&findings, Check::Scripts), ["danger"]);
}

/// Locks that wait for replicas need one right more, which the doctor tries if they do.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_names_the_right_to_wait_for_replicas() {
    let server = Server::start().await;
    server.run::<()>(&["ACL", "SETUSER", "locks", "on", ">secret", "~*", "&*", "+@all", "-wait"]).await;
    let url = server.url().replace("redis://", "redis://locks:secret@");
    let locks = Locks::builder().server(url).options(patient()).connect().await.unwrap();
    assert_eq!(verdicts(&locks.doctor().await, Check::Scripts), ["fine"]);
    let confirmed = locks.with_options(patient().replicas(1, Duration::from_millis(100))).unwrap();
    let findings = confirmed.doctor().await;
    let scripts = findings.iter().find(|finding| finding.check == Check::Scripts).unwrap().to_string();
    assert!(scripts.contains("wait") && scripts.contains("page rights"), "{scripts}");
}

/// Without the right to read a setting, its verdict is unknown. Without a right that locks need,
/// the verdict is danger.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_missing_rights() {
    let server = Server::start().await;
    let url = |user: &str| server.url().replace("redis://", &format!("redis://{user}:secret@"));
    let enough = "on >secret resetkeys ~lock:* ~{lock:* resetchannels &lock:wake:* +@all -info -config";
    for (user, more, scripts, notifications) in [
        ("enough", "+@all -info -config", "fine", "fine"),
        ("mute", "+@all -info -config -publish", "fine", "danger"),
        ("unsubscribed", "+@all -info -config -subscribe", "fine", "danger"),
        ("useless", "+@all -info -config -evalsha -eval", "danger", "fine"),
    ] {
        let mut words = vec!["ACL", "SETUSER", user];
        words.extend(enough.split(' ').chain(more.split(' ')));
        server.run::<()>(&words).await;
        let locks = Locks::builder().server(url(user)).options(patient()).connect().await.unwrap();
        let findings = locks.doctor().await;
        for check in OF_SERVERS {
            assert_eq!(verdicts(&findings, check), ["unknown"], "{user}: {findings:?}");
        }
        assert_eq!(verdicts(&findings, Check::Scripts), [scripts], "{user}: {findings:?}");
        assert_eq!(verdicts(&findings, Check::Notifications), [notifications], "{user}: {findings:?}");
    }
}

/// Of a user with the documented rights, the doctor misses none; without one, it names that.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_names_each_right_that_is_missing() {
    let server = Server::start().await;
    let url = server.url().replace("redis://", "redis://locks:secret@");
    let documented = documented_rights();
    let commands = documented.split_whitespace().filter(|word| word.starts_with('+'));
    // These two are for the connection for wake-ups alone.
    let commands = commands.filter(|right| !["+ping", "+hello"].contains(right));
    for right in [None].into_iter().chain(commands.map(Some)) {
        let mut words = vec!["ACL", "SETUSER", "locks", "reset", "on", ">secret"];
        words.extend(documented.split_whitespace().filter(|word| Some(*word) != right));
        server.run::<()>(&words).await;
        let locks = Locks::builder().server(url.as_str()).options(patient()).connect_lazily().unwrap();
        let findings = locks.doctor().await;
        let dangers = findings.iter().filter(|finding| finding.verdict.is_danger());
        let ours = dangers.filter(|finding| !OF_SERVERS.contains(&finding.check));
        let text = ours.map(Finding::to_string).collect::<Vec<_>>().join("; ");
        match right.map(|right| right.trim_start_matches('+')) {
            None => {
                assert_eq!(text, "", "{findings:?}");
                assert_eq!(verdicts(&findings, Check::Scripts), ["fine"], "{findings:?}");
            }
            Some(command @ ("publish" | "subscribe" | "eval" | "evalsha")) => {
                assert!(text.contains(command), "{command}: {text}");
            }
            Some(command) => assert!(text.contains(&format!("+{command}:")), "{command}: {text}"),
        }
        // A health check that runs every few seconds must not fill the server's memory.
        for key in server.run::<Vec<String>>(&["KEYS", "*"]).await {
            let left: i64 = server.run(&["PTTL", &key]).await;
            assert!((-2..=1_000).contains(&left) && left != -1, "{right:?}: {key}: {left}");
        }
    }
}

/// A right to a key is none to a command.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_takes_no_key_for_a_command() {
    let server = Server::start().await;
    for patterns in ["~app:* ~{app:*", "~lock:*"] {
        let words = format!("ACL SETUSER locks reset on >secret +@all {patterns}");
        server.run::<()>(&words.split(' ').collect::<Vec<_>>()).await;
        let url = server.url().replace("redis://", "redis://locks:secret@");
        let locks = Locks::builder().server(url).options(patient()).connect().await.unwrap();
        let findings = locks.doctor().await;
        let scripts = findings.iter().find(|finding| finding.check == Check::Scripts).unwrap();
        let text = scripts.to_string();
        assert!(text.contains(" key") && !text.contains("+eval"), "{patterns}: {text}");
    }
}

/// A user without any right can neither read a setting nor acquire a lock.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_a_user_without_rights() {
    let server = Server::start().await;
    server.run::<()>(&["ACL", "SETUSER", "none", "on", ">secret", "-@all"]).await;
    let url = server.url().replace("redis://", "redis://none:secret@");
    let locks = Locks::builder().server(url).options(patient()).connect_lazily().unwrap();
    let findings = soon("doctor() returns", locks.doctor()).await;
    for check in OF_SERVERS {
        assert_eq!(verdicts(&findings, check), ["unknown"], "{findings:?}");
    }
    for (check, expected) in
        [(Check::Connection, "fine"), (Check::Scripts, "danger"), (Check::Notifications, "danger")]
    {
        assert_eq!(verdicts(&findings, check), [expected], "{findings:?}");
    }
}

/// A refused password makes every other check fail: the doctor reports only the password.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_only_the_password_if_it_is_wrong() {
    let server = Server::start().await;
    server.run::<()>(&["CONFIG", "SET", "requirepass", "right"]).await;
    let url = server.url().replace("redis://", "redis://:wrong@");
    let locks = Locks::builder().server(url).options(patient()).connect_lazily().unwrap();
    let findings = soon("doctor() returns", locks.doctor()).await;
    let dangers: Vec<_> = findings.iter().filter(|finding| finding.verdict.is_danger()).collect();
    assert_eq!(dangers.len(), 1, "{findings:?}");
    assert_eq!(dangers[0].check, Check::Connection);
    assert!(dangers[0].to_string().contains("password"), "{findings:?}");
    for check in [Check::Scripts, Check::Notifications] {
        assert_eq!(verdicts(&findings, check), ["unknown"], "{findings:?}");
    }
}

/// The client's tasks have ended: the finding names the runtime and no server.
#[test]
fn doctor_reports_an_ended_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let server = second.block_on(Server::start());
    let connected = first.block_on(server.locks());
    let lazy = first.block_on(async { Locks::builder().server(server.url()).connect_lazily().unwrap() });
    drop(first);
    for locks in [connected, lazy] {
        let findings = second.block_on(soon("doctor() returns", locks.doctor()));
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(verdicts(&findings, Check::Connection), ["unknown"], "{findings:?}");
        assert!(findings[0].to_string().contains("runtime"), "{findings:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_checks_each_server() {
    for topology in [Topology::Cluster, Topology::Quorum3] {
        let mut deployment = Deployment::start(topology).await;
        let locks = deployment.client(patient()).await;
        let findings = locks.doctor().await;
        let mut seen: Vec<_> = findings
            .iter()
            .filter(|finding| finding.check == Check::Version)
            .map(|finding| finding.server.clone())
            .collect();
        seen.sort();
        let mut expected: Vec<_> =
            deployment.masters().iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        expected.sort();
        assert_eq!(seen, expected, "{findings:?}");
        assert!(verdicts(&findings, Check::Clock).iter().all(|verdict| *verdict == "fine"), "{findings:?}");
        deployment.masters_mut()[1].kill();
        let dead = format!("127.0.0.1:{}", deployment.masters()[1].port());
        let findings = locks.doctor().await;
        let is_named = |finding: &Finding| finding.server == dead && finding.verdict.is_danger();
        assert!(findings.iter().any(is_named), "{dead}: {findings:?}");
        assert_eq!(verdicts(&findings, Check::Version), ["fine", "fine"], "{findings:?}");
        if topology == Topology::Quorum3 {
            assert_eq!(verdicts(&findings, Check::Connection), ["fine", "danger", "fine"], "{findings:?}");
            assert_eq!(verdicts(&findings, Check::Scripts), ["fine"], "{findings:?}");
        }
    }
}

/// One warning for each client, even if it reconnects.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_warning_is_logged_once_when_a_client_connects() {
    listen();
    let server = Server::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]).await;
    let label = format!("127.0.0.1:{}: eviction: danger", server.port());
    let locks = server.locks().await;
    eventually("the warning is logged", || async { logged_with(&label).len() == 1 }).await;
    server.kill_connections().await;
    locks.mutex("again").unwrap().lock().await.unwrap().release().await.unwrap();
    assert_eq!(logged_with(&label).len(), 1);
    assert!(logged_with(&label)[0].starts_with("WARN"), "{:?}", logged_with(&label));
    // A quorum's node that loses its data may grant a held lock again.
    let deployment = Deployment::start(Topology::Quorum3).await;
    let _locks = deployment.client(patient()).await;
    for server in deployment.masters() {
        let label = format!("127.0.0.1:{}: persistence: danger", server.port());
        eventually("the warning is logged", || async { logged_with(&label).len() == 1 }).await;
    }
}
