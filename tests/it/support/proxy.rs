//! TCP proxies that lose, hold and cut what passes through them.
//!
//! Each server on 127.0.0.1 has one on 127.0.0.2, at the same port. What the servers say of where they are is
//! changed on its way, so a client that came in through a proxy meets all of them through proxies.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use super::moved::Moved;

/// Where the servers are, and where the proxies are: as long as each other, so that lengths stay right.
pub const DIRECT: &str = "127.0.0.1";
pub const PROXIED: &str = "127.0.0.2";

/// What a proxy says that has passed a request on and then failed.
const UPSTREAM_FAILURE: &[u8] = b"-ERR upstream failure\r\n";

/// Stands between clients and all servers of a deployment.
pub struct Proxy {
    host: String,
    ports: Vec<u16>,
    faults: Arc<Faults>,
    tasks: Vec<JoinHandle<()>>,
}

struct Faults {
    /// So many replies to scripts are dropped and their connections cut, whichever server they are from.
    lose_any: AtomicUsize,
    /// So many of each server, since the beginning.
    lose_each: AtomicUsize,
    /// So many replies to scripts are replaced by an error.
    fail_any: AtomicUsize,
    /// Cut after this many more bytes to the servers.
    cut_after: Mutex<Option<usize>>,
    /// The same for bytes to the clients.
    cut_replies_after: Mutex<Option<usize>>,
    /// Replies wait while this is set.
    hold_replies: watch::Sender<bool>,
    /// Requests wait on all connections up to this one.
    hold_requests: watch::Sender<usize>,
    /// New connections are accepted and then ignored.
    deaf: AtomicBool,
    /// Where new connections go instead.
    elsewhere: Mutex<Option<u16>>,
    /// What passes waits so long, piece by piece.
    slow: Mutex<Option<Duration>>,
    /// On new connections, servers do not say who they are.
    hides: AtomicBool,
    /// Servers have no `INFO`.
    no_info: AtomicBool,
    cut: Notify,
    /// Whether those that are cut are reset, and not just closed.
    resets: AtomicBool,
    connections: AtomicUsize,
    closed: AtomicUsize,
    lost: AtomicUsize,
    /// So many bytes were held back, swallowed or passed slowly.
    held: AtomicUsize,
}

impl Proxy {
    /// In front of one server.
    pub async fn start(port: u16) -> Proxy {
        Proxy::before(vec![port]).await
    }

    pub async fn before(ports: Vec<u16>) -> Proxy {
        Proxy::at(PROXIED, ports).await
    }

    /// At an address of its own, as long as the others: clients that come in there fail without others.
    pub async fn at(host: &str, ports: Vec<u16>) -> Proxy {
        assert_eq!(host.len(), DIRECT.len());
        let faults = Arc::new(Faults {
            lose_any: AtomicUsize::new(0),
            lose_each: AtomicUsize::new(0),
            fail_any: AtomicUsize::new(0),
            cut_after: Mutex::new(None),
            cut_replies_after: Mutex::new(None),
            hold_replies: watch::Sender::new(false),
            hold_requests: watch::Sender::new(0),
            deaf: AtomicBool::new(false),
            elsewhere: Mutex::new(None),
            slow: Mutex::new(None),
            hides: AtomicBool::new(false),
            no_info: AtomicBool::new(false),
            cut: Notify::new(),
            resets: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            closed: AtomicUsize::new(0),
            lost: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
        });
        let mut tasks = Vec::new();
        for &port in &ports {
            let listener = TcpListener::bind((host, port)).await.unwrap();
            tasks.push(tokio::spawn(accept(listener, host.to_owned(), port, Arc::clone(&faults))));
        }
        Proxy { host: host.to_owned(), ports, faults, tasks }
    }

    /// The way to the first server.
    pub fn url(&self) -> String {
        format!("redis://{}:{}/", self.host, self.ports[0])
    }

    /// The next reply to a script is dropped after the server has sent it, and its connection is reset.
    pub fn lose_next_reply(&self) {
        self.lose_replies(1);
    }

    /// The same for the next reply of each server.
    pub fn lose_next_replies(&self) {
        self.faults.lose_each.fetch_add(1, Ordering::SeqCst);
    }

    /// How many replies were lost so far, and requests and replies cut.
    pub fn lost(&self) -> usize {
        self.faults.lost.load(Ordering::SeqCst)
    }

    /// How many bytes were held back, swallowed or passed slowly so far.
    pub fn held(&self) -> usize {
        self.faults.held.load(Ordering::SeqCst)
    }

    /// The connection is reset after this many more bytes from clients, in the middle of a request.
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

    /// Requests on the connections that there are now are held back, or let go: they arrive late, even if
    /// their client has gone. New connections are not held.
    pub fn hold_requests(&self, hold: bool) {
        self.faults.hold_requests.send_replace(if hold { self.connections() } else { 0 });
    }

    /// New connections are accepted and never answered, or are served again.
    pub fn be_deaf(&self, deaf: bool) {
        self.faults.deaf.store(deaf, Ordering::SeqCst);
    }

    /// New connections go to another server.
    pub fn lead_to(&self, port: u16) {
        *self.faults.elsewhere.lock().unwrap() = Some(port);
    }

    /// What passes is held up for so long, 512 bytes at a time.
    pub fn slow_down(&self, by: Option<Duration>) {
        *self.faults.slow.lock().unwrap() = by;
    }

    /// The next so many replies to scripts are dropped after a server has sent them, and their connections are cut.
    pub fn lose_replies(&self, number: usize) {
        self.faults.lose_any.store(number, Ordering::SeqCst);
    }

    /// The next so many replies to scripts are replaced by an error of the proxy, after a server
    /// has run them.
    pub fn fail_replies(&self, number: usize) {
        self.faults.fail_any.store(number, Ordering::SeqCst);
    }

    /// How many of them are still to be replaced.
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

    /// Resets all connections: what is under way in either direction is thrown away.
    pub fn reset(&self) {
        self.faults.resets.store(true, Ordering::SeqCst);
        self.faults.cut.notify_waiters();
    }

    /// How many tasks it has itself.
    pub fn tasks(&self) -> usize {
        self.tasks.len() + self.connections() - self.faults.closed.load(Ordering::SeqCst)
    }

    /// Waits until all clients have gone. Without a way to the servers, one that still has something to give
    /// back would try to until its ttl is over.
    pub async fn outlive_clients(self) {
        super::eventually("the clients have gone", || async {
            self.connections() == self.faults.closed.load(Ordering::SeqCst)
        })
        .await;
    }

    /// How many connections were made so far.
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
    /// Whether a reply to a script is to be lost, by a server that has lost so many.
    fn loses(&self, lost: &AtomicUsize) -> bool {
        let each = self.lose_each.load(Ordering::SeqCst);
        let mine = lost.fetch_max(each, Ordering::SeqCst) < each;
        let loses = mine || take_one(&self.lose_any);
        self.lost.fetch_add(usize::from(loses), Ordering::SeqCst);
        loses
    }

    /// How many of these bytes may pass, and whether the connection is cut after them.
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

/// Until one of the two ends it, or it is cut.
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
    if faults.deaf.load(Ordering::SeqCst) {
        tokio::select! {
            () = cut => {}
            () = swallow(&mut client, faults) => {}
        }
        return;
    }
    let mut server = tokio::select! {
        () = &mut cut => return,
        server = TcpStream::connect((DIRECT, faults.elsewhere.lock().unwrap().unwrap_or(port))) => match server {
            Ok(server) => server,
            Err(_) => return,
        },
    };
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let asked = AtomicBool::new(false);
    let is_cut = tokio::select! {
        () = cut => true,
        () = requests(from_client, to_server, number, faults, &asked) => false,
        () = replies(from_server, to_client, host, faults, lost, &asked) => false,
    };
    if is_cut && faults.resets.load(Ordering::SeqCst) {
        // One that the other side has closed needs no more.
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

/// `asked` tells whether a script was among them.
async fn requests(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    number: usize,
    faults: &Faults,
    asked: &AtomicBool,
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
        // What is sent behind it is held as well, and counted.
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
        asked.fetch_or(bytes[..passed].windows(4).any(|word| word == b"EVAL"), Ordering::SeqCst);
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
    asked: &AtomicBool,
) {
    let mut buffer = vec![0; 1 << 16];
    let mut held = faults.hold_replies.subscribe();
    let mut moved = Moved::to(host, faults.hides.load(Ordering::SeqCst));
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
        // Others than scripts are asked in the background, and nobody misses their replies.
        let is_of_script = asked.swap(false, Ordering::SeqCst);
        if is_of_script && faults.loses(lost) {
            return;
        }
        let fails = is_of_script && take_one(&faults.fail_any);
        let heard = if fails { UPSTREAM_FAILURE.to_vec() } else { moved.pass(&buffer[..count]) };
        let (passed, is_cut) = faults.passes(&faults.cut_replies_after, heard.len());
        if faults.write(&mut to, &heard[..passed]).await.is_err() || is_cut {
            return;
        }
    }
}
