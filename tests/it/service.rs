//! The example `service`, run as processes: its replies, and the keys that it leaves on its server.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, LazyLock, Mutex};

use redlatch::{Locks, Owner};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::support::tls::{Authority, is_available, url};
use crate::support::{Server, eventually, example, queued, soon};

/// The program, built once for all tests.
static PROGRAM: LazyLock<String> = LazyLock::new(|| example("service"));

/// A TLS server for the service.
struct Fixture {
    authority: Authority,
    server: Server,
    port: u16,
}

impl Fixture {
    /// Returns `None` if the server has no TLS.
    async fn new() -> Option<Fixture> {
        if !is_available().await {
            return None;
        }
        let authority = Authority::new();
        let (server, port) = authority.server(&["--tls-auth-clients", "no"]).await;
        Some(Fixture { authority, server, port })
    }

    /// Starts an instance with the example's file, adapted to this server.
    async fn service(&self) -> Service {
        let mut config = include_str!("../../examples/service/service.toml").to_owned();
        for (there, here) in [
            ("127.0.0.1:8080", "127.0.0.1:0"),
            ("rediss://127.0.0.1:6379/", &url(self.port)),
            ("ca.pem", &self.authority.path("ca")),
        ] {
            assert!(config.contains(there), "{there} is not in service.toml");
            config = config.replace(there, here);
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), config).unwrap();
        Service::start(file).await
    }

    /// The keys, without the token counters, which outlast their locks.
    async fn keys(&self) -> BTreeSet<String> {
        let keys: Vec<String> = self.server.run(&["KEYS", "*"]).await;
        keys.into_iter().filter(|key| !key.ends_with(":fence")).collect()
    }

    /// Starts a request that waits for a lock which another client holds.
    async fn waiting(
        &self,
        lock: &str,
        request: impl Future<Output = Answer> + Send + 'static,
    ) -> PendingAnswer {
        let queue = format!("{{lock:{lock}}}:waiters");
        queued(async || vec![self.server.waiters(&queue).await], request).await
    }
}

type Answer = (u16, String);
type PendingAnswer = tokio::task::JoinHandle<Answer>;

struct Service {
    process: tokio::process::Child,
    address: String,
    log: Arc<Mutex<Vec<String>>>,
    _config: tempfile::NamedTempFile,
}

impl Service {
    async fn start(config: tempfile::NamedTempFile) -> Service {
        let mut command = tokio::process::Command::new(&*PROGRAM);
        command.arg(config.path()).stdout(Stdio::piped()).stdin(Stdio::null()).kill_on_drop(true);
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let log = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&log);
        tokio::spawn(async move {
            while let Some(line) = lines.next_line().await.unwrap() {
                written.lock().unwrap().push(line);
            }
        });
        let mut service = Service { process, address: String::new(), log, _config: config };
        let line = service.logged("listening").await;
        let address = line.split_once("address=").unwrap().1;
        address.split_whitespace().next().unwrap().clone_into(&mut service.address);
        service
    }

    /// Waits for a line of the log.
    async fn logged(&self, word: &str) -> String {
        let find = || self.log.lock().unwrap().iter().find(|line| line.contains(word)).cloned();
        eventually(word, || async { find().is_some() }).await;
        find().unwrap()
    }

    /// Sends a request on a connection of its own.
    fn send(&self, line: &str, header: &str, body: &str) -> impl Future<Output = Answer> + Send + 'static {
        let (address, length) = (self.address.clone(), body.len());
        let request = format!(
            "{line} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n{header}\r\n{body}"
        );
        async move {
            let mut connection = TcpStream::connect(address).await.unwrap();
            connection.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            soon("the service responds", connection.read_to_string(&mut answer)).await.unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
            (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
        }
    }

    fn terminate(&self) {
        let id = i32::try_from(self.process.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), Signal::TERM).unwrap();
    }

    async fn exits(mut self) -> (ExitStatus, Vec<String>) {
        let status = soon("the service exits", self.process.wait()).await.unwrap();
        (status, self.log.lock().unwrap().clone())
    }

    async fn shuts_down(self) {
        self.terminate();
        let (status, log) = self.exits().await;
        assert!(status.success(), "{status}: {log:?}");
    }
}

/// What remains once no lock is held: the sum, and the tokens with which it was written.
fn sum_keys(name: &str) -> BTreeSet<String> {
    ["", ":begun", ":token"].map(|end| format!("{{sum:{name}}}{end}")).into()
}

/// The service reads and writes the sum on the server in two requests: without exclusion, some
/// numbers would occur twice.
#[tokio::test(flavor = "multi_thread")]
async fn service_excludes_concurrent_requests_of_two_instances() {
    const REQUESTS: usize = 60;
    let Some(fixture) = Fixture::new().await else { return };
    let instances = [fixture.service().await, fixture.service().await];
    let mut requests = JoinSet::new();
    for number in 0..REQUESTS {
        requests.spawn(instances[number % 2].send("POST /invoices", "", ""));
    }
    let mut numbers = BTreeSet::new();
    while let Some(answer) = requests.join_next().await {
        let (status, body) = answer.unwrap();
        assert_eq!(status, 200, "{body}");
        assert!(numbers.insert(body.parse::<usize>().unwrap()), "{body} occurred twice");
    }
    assert_eq!(numbers, (1..=REQUESTS).collect());
    assert_eq!(fixture.server.run::<usize>(&["GET", "{sum:invoices}"]).await, REQUESTS);
    let granted = |metrics: &str| -> usize {
        let lines = metrics.lines().filter(|line| {
            line.starts_with("redlatch_lock_acquisitions") && line.contains("outcome=\"granted\"")
        });
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<usize>().unwrap()).sum()
    };
    let mut acquired = 0;
    for instance in &instances {
        let (status, metrics) = instance.send("GET /metrics", "", "").await;
        assert_eq!(status, 200);
        acquired += granted(&metrics);
    }
    assert_eq!(acquired, REQUESTS);
    // A later lease has begun, so the next instance is late: it changes nothing.
    fixture.server.run::<()>(&["SET", "{sum:invoices}:token", &(1_u64 << 52).to_string()]).await;
    assert_eq!(instances[0].send("POST /invoices", "", "").await.0, 409);
    assert_eq!(fixture.server.run::<usize>(&["GET", "{sum:invoices}"]).await, REQUESTS);
    for instance in instances {
        instance.shuts_down().await;
    }
    assert_eq!(fixture.keys().await, sum_keys("invoices"));
}

#[tokio::test(flavor = "multi_thread")]
async fn service_enters_the_lock_of_its_caller() {
    let Some(fixture) = Fixture::new().await else { return };
    let service = fixture.service().await;
    let (caller, owner) = (fixture.server.locks().await, Owner::new());
    let guard = caller.reentrant("account:alice", &owner).unwrap().lock().await.unwrap();
    let stranger = service.send("POST /accounts/alice/100", "", "");
    let stranger = fixture.waiting("account:alice", stranger).await;
    // The caller's owner enters at once, before the waiting request.
    let header = format!("lock-owner: {owner}\r\n");
    let inside = service.send("POST /accounts/alice/25", &header, "").await;
    assert_eq!(inside, (200, "25".to_owned()));
    assert!(!stranger.is_finished());
    guard.release().await.unwrap();
    assert_eq!(soon("the waiting request succeeds", stranger).await.unwrap(), (200, "125".to_owned()));
    assert_eq!(fixture.server.run::<i64>(&["GET", "{sum:account:alice}"]).await, 125);
    for (header, path) in [
        ("lock-owner: two words\r\n", "alice/1"),
        ("lock-owner: \u{e4}\r\n", "alice/1"),
        ("", "}/1"),
        ("", "alice/much"),
    ] {
        let (status, body) = service.send(&format!("POST /accounts/{path}"), header, "").await;
        assert_eq!(status, 400, "{header:?} {path} {body}");
    }
    assert_eq!(fixture.server.run::<i64>(&["GET", "{sum:account:alice}"]).await, 125);
    service.shuts_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn service_writes_prices_with_fencing_tokens() {
    let Some(fixture) = Fixture::new().await else { return };
    let service = fixture.service().await;
    assert_eq!(service.send("GET /prices/tea", "", "").await.0, 404);
    let mut requests = JoinSet::new();
    for number in 0..20 {
        requests.spawn(service.send("PUT /prices/tea", "", &number.to_string()));
        requests.spawn(service.send("GET /prices/tea", "", ""));
    }
    let mut counts = BTreeMap::new();
    while let Some(answer) = requests.join_next().await {
        *counts.entry(answer.unwrap().0).or_insert(0) += 1;
    }
    counts.remove(&404); // read before the first write
    assert!(counts.len() == 1 && counts[&200] >= 20, "{counts:?}");
    let current: String = fixture.server.run(&["GET", "{price:tea}"]).await;
    assert_eq!(service.send("GET /prices/tea", "", "").await, (200, current.clone()));
    // The lock's last token is the one that wrote.
    let granted: u64 = fixture.server.run(&["GET", "{lock:price:tea}:fence"]).await;
    assert_eq!(fixture.server.run::<u64>(&["GET", "{price:tea}:token"]).await, granted);
    // A reader waits for a writer, and reads the written value.
    let writer = fixture.server.locks().await;
    let guard = writer.rwlock("price:tea").unwrap().write().await.unwrap();
    let reader = fixture.waiting("price:tea", service.send("GET /prices/tea", "", "")).await;
    fixture.server.run::<()>(&["SET", "{price:tea}", "new"]).await;
    guard.release().await.unwrap();
    assert_eq!(soon("the reader succeeds", reader).await.unwrap(), (200, "new".to_owned()));
    // A later lease has written, so the next write is late.
    fixture.server.run::<()>(&["SET", "{price:tea}:token", &(1_u64 << 52).to_string()]).await;
    assert_eq!(service.send("PUT /prices/tea", "", "late").await.0, 409);
    assert_eq!(fixture.server.run::<String>(&["GET", "{price:tea}"]).await, "new");
    service.shuts_down().await;
    let expected = ["{price:tea}", "{price:tea}:token"].map(str::to_owned);
    assert_eq!(fixture.keys().await, BTreeSet::from(expected));
}

#[tokio::test(flavor = "multi_thread")]
async fn service_completes_requests_after_sigterm_and_leaves_no_lock() {
    let Some(fixture) = Fixture::new().await else { return };
    let service = fixture.service().await;
    let other: Locks = fixture.server.locks().await;
    let guard = other.mutex("invoices").unwrap().lock().await.unwrap();
    let waiting = fixture.waiting("invoices", service.send("POST /invoices", "", "")).await;
    service.terminate();
    service.logged("draining").await;
    let refused = || async { TcpStream::connect(&service.address).await.is_err() };
    eventually("no new connection is accepted", refused).await;
    assert!(!waiting.is_finished());
    guard.release().await.unwrap();
    assert_eq!(soon("the request completes", waiting).await.unwrap(), (200, "1".to_owned()));
    let (status, log) = service.exits().await;
    assert_eq!(status.code(), Some(0), "{log:?}");
    assert!(!log.iter().any(|line| line.contains("WARN") || line.contains("ERROR")), "{log:?}");
    assert_eq!(fixture.keys().await, sum_keys("invoices"));
}

/// An HTTP client disconnects, so its request is dropped and leaves the queue in the background. At
/// shutdown, the process waits for that; the server hangs, so it exits with an error.
#[tokio::test(flavor = "multi_thread")]
async fn service_exits_with_an_error_if_the_server_hangs_at_shutdown() {
    let Some(fixture) = Fixture::new().await else { return };
    let service = fixture.service().await;
    let guard = fixture.server.locks().await.mutex("invoices").unwrap().lock().await.unwrap();
    let waiting = fixture.waiting("invoices", service.send("POST /invoices", "", "")).await;
    fixture.server.pause();
    waiting.abort();
    service.terminate();
    let (status, log) = service.exits().await;
    fixture.server.resume();
    assert_eq!(status.code(), Some(1), "{log:?}");
    drop(guard);
}
