//! TCP proxies that lose, delay and cut requests and replies.
//!
//! Each server on 127.0.0.1 has a proxy on 127.0.0.2, at the same port. The proxies rewrite the
//! addresses in the servers' replies, so a client that connects to one proxy reaches all servers
//! through proxies.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use super::address_rewriter::AddressRewriter;
use super::text_replies::length_of_texts;

/// The addresses of servers and of proxies. They have the same length, so replacing one by the
/// other keeps the lengths in replies right.
pub const DIRECT: &str = "127.0.0.1";
pub const PROXIED: &str = "127.0.0.2";

/// The error of a proxy that has forwarded a request and failed afterwards.
const UPSTREAM_FAILURE: &[u8] = b"-ERR upstream failure\r\n";

pub struct Proxy {
    host: String,
    ports: Vec<u16>,
    faults: Arc<Faults>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Faults {
    /// The number of replies to scripts to drop, with their connections, from any server.
    lose_any: AtomicUsize,
    /// The same from each server; counted since the start of the proxy.
    lose_each: AtomicUsize,
    /// The number of replies to scripts to replace by an error.
    fail_any: AtomicUsize,
    cut_after: Mutex<Option<usize>>,
    cut_replies_after: Mutex<Option<usize>>,
    /// Replies are held back while this is set.
    hold_replies: watch::Sender<bool>,
    /// Requests are held back on all connections up to this number.
    hold_requests: watch::Sender<usize>,
    drops_requests: AtomicBool,
    /// Where new connections lead instead.
    elsewhere: Mutex<Option<(String, u16)>>,
    /// The delay of each piece of data.
    slow: Mutex<Option<Duration>>,
    hides: AtomicBool,
    no_info: AtomicBool,
    cut: Notify,
    /// Whether connections that are cut are reset, and not just closed.
    resets: AtomicBool,
    connections: AtomicUsize,
    closed: AtomicUsize,
    lost: AtomicUsize,
    held: AtomicUsize,
}

impl Proxy {
    /// A proxy in front of one server.
    pub async fn start(port: u16) -> Proxy {
        Proxy::before(vec![port]).await
    }

    pub async fn before(ports: Vec<u16>) -> Proxy {
        Proxy::at(PROXIED, ports).await
    }

    /// A proxy at another address of the same length: its faults affect only the clients that
    /// connect there.
    pub async fn at(host: &str, ports: Vec<u16>) -> Proxy {
        assert_eq!(host.len(), DIRECT.len());
        let faults = Arc::new(Faults::default());
        let mut tasks = Vec::new();
        for &port in &ports {
            let listener = TcpListener::bind((host, port)).await.unwrap();
            tasks.push(tokio::spawn(accept(listener, host.to_owned(), port, Arc::clone(&faults))));
        }
        Proxy { host: host.to_owned(), ports, faults, tasks }
    }

    /// The URL that leads to the first server.
    pub fn url(&self) -> String {
        format!("redis://{}:{}/", self.host, self.ports[0])
    }

    /// The next reply to a script is dropped after the server has sent it, and its connection is
    /// closed.
    pub fn lose_next_reply(&self) {
        self.lose_replies(1);
    }

    /// The same for the next reply of each server.
    pub fn lose_next_replies(&self) {
        self.faults.lose_each.fetch_add(1, Ordering::SeqCst);
    }

    /// The number of replies lost, and of requests and replies cut, so far.
    pub fn lost(&self) -> usize {
        self.faults.lost.load(Ordering::SeqCst)
    }

    /// The number of bytes held back, swallowed or delayed so far.
    pub fn held(&self) -> usize {
        self.faults.held.load(Ordering::SeqCst)
    }

    /// The connection is closed after this many more bytes from clients, in the middle of a
    /// request.
    pub fn cut_after(&self, bytes: Option<usize>) {
        *self.faults.cut_after.lock().unwrap() = bytes;
    }

    /// The same for bytes to clients, in the middle of a reply.
    pub fn cut_replies_after(&self, bytes: Option<usize>) {
        *self.faults.cut_replies_after.lock().unwrap() = bytes;
    }

    /// Replies are held back, or let go.
    pub fn hold_replies(&self, hold: bool) {
        self.faults.hold_replies.send_replace(hold);
    }

    /// Requests on the present connections are held back, or let go: they arrive late, even if
    /// their client has disconnected. Later connections are not affected.
    pub fn hold_requests(&self, hold: bool) {
        self.faults.hold_requests.send_replace(if hold { self.connections() } else { 0 });
    }

    /// New connections are accepted and then ignored, or are served again.
    pub fn set_drops_requests(&self, drops_requests: bool) {
        self.faults.drops_requests.store(drops_requests, Ordering::SeqCst);
    }

    /// New connections go to another server.
    pub fn lead_to(&self, port: u16) {
        *self.faults.elsewhere.lock().unwrap() = Some((DIRECT.to_owned(), port));
    }

    /// New connections go through another proxy.
    pub fn lead_through(&self, proxy: &Proxy) {
        *self.faults.elsewhere.lock().unwrap() = Some((proxy.host.clone(), proxy.ports[0]));
    }

    /// Each 512 bytes are delayed for this long.
    pub fn slow_down(&self, by: Option<Duration>) {
        *self.faults.slow.lock().unwrap() = by;
    }

    /// This many of the next replies to scripts are dropped after a server has sent them, and their
    /// connections are closed.
    pub fn lose_replies(&self, number: usize) {
        self.faults.lose_any.store(number, Ordering::SeqCst);
    }

    /// This many of the next replies to scripts are replaced by an error of the proxy, after a
    /// server has run the scripts.
    pub fn fail_replies(&self, number: usize) {
        self.faults.fail_any.store(number, Ordering::SeqCst);
    }

    /// The number of replies that are still to be replaced.
    pub fn failures_left(&self) -> usize {
        self.faults.fail_any.load(Ordering::SeqCst)
    }

    /// On new connections, answers to `INFO` have no `run_id`.
    pub fn hide_runs(&self) {
        self.faults.hides.store(true, Ordering::SeqCst);
    }

    /// `INFO` is an unknown command.
    pub fn have_no_info(&self) {
        self.faults.no_info.store(true, Ordering::SeqCst);
    }

    /// Closes all connections.
    pub fn cut(&self) {
        self.faults.resets.store(false, Ordering::SeqCst);
        self.faults.cut.notify_waiters();
    }

    /// Resets all connections: data on its way in either direction is lost.
    pub fn reset(&self) {
        self.faults.resets.store(true, Ordering::SeqCst);
        self.faults.cut.notify_waiters();
    }

    /// Stops listening. An aborted task closes its listener when the runtime drops it, which may be
    /// later.
    pub async fn close(&self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        let has_closed = || async { self.tasks.iter().all(JoinHandle::is_finished) };
        super::eventually("the proxy has closed its listeners", has_closed).await;
    }

    /// The number of the proxy's own tasks.
    pub fn tasks(&self) -> usize {
        self.tasks.len() + self.connections() - self.faults.closed.load(Ordering::SeqCst)
    }

    /// Waits until all clients have disconnected. A client that cannot reach the servers would
    /// retry its pending releases until their TTLs expire.
    pub async fn outlive_clients(self) {
        super::eventually("the clients have disconnected", || async {
            self.connections() == self.faults.closed.load(Ordering::SeqCst)
        })
        .await;
    }

    pub fn connections(&self) -> usize {
        self.faults.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        self.faults.cut.notify_waiters();
    }
}

fn take_one(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

impl Faults {
    /// Whether to lose this reply to a script; `lost` counts the server's replies in `lose_each`.
    fn loses(&self, lost: &AtomicUsize) -> bool {
        let each = self.lose_each.load(Ordering::SeqCst);
        let mine = lost.fetch_max(each, Ordering::SeqCst) < each;
        let loses = mine || take_one(&self.lose_any);
        self.lost.fetch_add(usize::from(loses), Ordering::SeqCst);
        loses
    }

    /// The number of these bytes that may pass, and whether the connection is cut after them.
    fn passes(&self, after: &Mutex<Option<usize>>, count: usize) -> (usize, bool) {
        let mut cut_after = after.lock().unwrap();
        match *cut_after {
            None => (count, false),
            Some(left) if left > count => {
                *cut_after = Some(left - count);
                (count, false)
            }
            Some(left) => {
                *cut_after = None;
                self.lost.fetch_add(1, Ordering::SeqCst);
                (left, true)
            }
        }
    }

    async fn write(&self, to: &mut WriteHalf<'_>, bytes: &[u8]) -> std::io::Result<()> {
        let slow = *self.slow.lock().unwrap();
        let Some(by) = slow else { return to.write_all(bytes).await };
        self.held.fetch_add(bytes.len(), Ordering::SeqCst);
        for piece in bytes.chunks(512) {
            tokio::time::sleep(by).await;
            to.write_all(piece).await?;
        }
        Ok(())
    }
}

async fn accept(listener: TcpListener, host: String, port: u16, faults: Arc<Faults>) {
    let lost = Arc::new(AtomicUsize::new(faults.lose_each.load(Ordering::SeqCst)));
    while let Ok((client, _)) = listener.accept().await {
        let number = faults.connections.fetch_add(1, Ordering::SeqCst) + 1;
        let (faults, lost, host) = (Arc::clone(&faults), Arc::clone(&lost), host.clone());
        tokio::spawn(async move {
            relay(client, &host, port, number, &faults, &lost).await;
            faults.closed.fetch_add(1, Ordering::SeqCst);
        });
    }
}

/// Relays until the client or the server closes the connection, or the proxy cuts it.
async fn relay(
    mut client: TcpStream,
    host: &str,
    port: u16,
    number: usize,
    faults: &Faults,
    lost: &AtomicUsize,
) {
    let cut = faults.cut.notified();
    tokio::pin!(cut);
    if faults.drops_requests.load(Ordering::SeqCst) {
        tokio::select! {
            () = cut => {}
            () = swallow(&mut client, faults) => {}
        }
        return;
    }
    let address = faults.elsewhere.lock().unwrap().clone().unwrap_or((DIRECT.to_owned(), port));
    let mut server = tokio::select! {
        () = &mut cut => return,
        server = TcpStream::connect(address) => match server {
            Ok(server) => server,
            Err(_) => return,
        },
    };
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let has_script = AtomicBool::new(false);
    let is_cut = tokio::select! {
        () = cut => true,
        () = requests(from_client, to_server, number, faults, &has_script) => false,
        () = replies(from_server, to_client, host, faults, lost, &has_script) => false,
    };
    if is_cut && faults.resets.load(Ordering::SeqCst) {
        // Fails on a connection that the other side has closed, which needs no reset.
        let _ = client.set_zero_linger();
        let _ = server.set_zero_linger();
    }
}

async fn swallow(client: &mut TcpStream, faults: &Faults) {
    let mut buffer = vec![0; 1 << 12];
    while let Ok(count @ 1..) = client.read(&mut buffer).await {
        faults.held.fetch_add(count, Ordering::SeqCst);
    }
}

/// Relays requests. Sets `has_script` if a script is among them.
async fn requests(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    number: usize,
    faults: &Faults,
    has_script: &AtomicBool,
) {
    let mut buffer = vec![0; 1 << 16];
    let mut held = faults.hold_requests.subscribe();
    loop {
        let mut bytes = match from.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(count) => buffer[..count].to_vec(),
        };
        let (mut is_held, mut has_gone) = (*held.borrow() >= number, false);
        if is_held {
            faults.held.fetch_add(bytes.len(), Ordering::SeqCst);
        }
        // Data sent meanwhile is held back and counted as well.
        while is_held {
            let let_go = async { held.wait_for(|held| *held < number).await.is_ok() };
            tokio::select! {
                true = let_go => is_held = false,
                read = from.read(&mut buffer), if !has_gone => match read {
                    Ok(0) | Err(_) => has_gone = true,
                    Ok(count) => {
                        faults.held.fetch_add(count, Ordering::SeqCst);
                        bytes.extend_from_slice(&buffer[..count]);
                    }
                },
                else => return,
            }
        }
        let info = b"$4\r\nINFO";
        let found = bytes.windows(info.len()).position(|words| words == info);
        if let Some(place) = found.filter(|_| faults.no_info.load(Ordering::SeqCst)) {
            bytes[place..place + info.len()].copy_from_slice(b"$4\r\nNONE");
        }
        let (passed, is_cut) = faults.passes(&faults.cut_after, bytes.len());
        has_script.fetch_or(bytes[..passed].windows(4).any(|word| word == b"EVAL"), Ordering::SeqCst);
        if faults.write(&mut to, &bytes[..passed]).await.is_err() || is_cut {
            return;
        }
    }
}

async fn replies(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    host: &str,
    faults: &Faults,
    lost: &AtomicUsize,
    has_script: &AtomicBool,
) {
    let mut buffer = vec![0; 1 << 16];
    let mut held = faults.hold_replies.subscribe();
    let mut moved = AddressRewriter::to(host, faults.hides.load(Ordering::SeqCst));
    loop {
        let count = match from.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(count) => count,
        };
        if *held.borrow() {
            faults.held.fetch_add(count, Ordering::SeqCst);
        }
        if held.wait_for(|held| !held).await.is_err() {
            return;
        }
        // Only replies to scripts are lost: other requests run in the background, so that losing
        // their replies would test nothing.
        let (texts, others) = buffer[..count].split_at(length_of_texts(&buffer[..count]));
        let is_of_script = !others.is_empty() && has_script.swap(false, Ordering::SeqCst);
        if is_of_script && faults.loses(lost) {
            return;
        }
        let mut bytes = moved.pass(if is_of_script { texts } else { &buffer[..count] });
        if is_of_script {
            let fails = take_one(&faults.fail_any);
            bytes.extend(if fails { UPSTREAM_FAILURE.to_vec() } else { moved.pass(others) });
        }
        let (passed, is_cut) = faults.passes(&faults.cut_replies_after, bytes.len());
        if faults.write(&mut to, &bytes[..passed]).await.is_err() || is_cut {
            return;
        }
    }
}
