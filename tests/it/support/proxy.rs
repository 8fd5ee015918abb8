//! A TCP proxy that loses, holds and cuts what passes through it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// Stands between clients and a server.
pub struct Proxy {
    port: u16,
    faults: Arc<Faults>,
    task: JoinHandle<()>,
}

struct Faults {
    /// The replies that begin with these are dropped and the connection is cut; counts down, -1 is off.
    lose_replies: AtomicI64,
    /// Cut after this many more bytes to the server; -1 is off.
    cut_after: AtomicI64,
    /// Replies wait while this is set.
    hold_replies: watch::Sender<bool>,
    /// Requests wait on all connections up to this one.
    hold_requests: watch::Sender<usize>,
    /// New connections are accepted and then ignored.
    deaf: AtomicBool,
    cut: Notify,
    connections: AtomicUsize,
    /// Only requests that contain this arm the faults.
    lost: AtomicUsize,
}

impl Proxy {
    pub async fn start(server_port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let faults = Arc::new(Faults {
            lose_replies: AtomicI64::new(-1),
            cut_after: AtomicI64::new(-1),
            hold_replies: watch::Sender::new(false),
            hold_requests: watch::Sender::new(0),
            deaf: AtomicBool::new(false),
            cut: Notify::new(),
            connections: AtomicUsize::new(0),
            lost: AtomicUsize::new(0),
        });
        let task = tokio::spawn(accept(listener, server_port, Arc::clone(&faults)));
        Proxy { port, faults, task }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// The next reply is dropped after the server has sent it, and its connection is reset.
    pub fn lose_next_reply(&self) {
        self.faults.lose_replies.store(1, Ordering::SeqCst);
    }

    /// How many replies were lost so far.
    pub fn lost(&self) -> usize {
        self.faults.lost.load(Ordering::SeqCst)
    }

    /// The connection is reset after this many more bytes from clients, in the middle of a request.
    pub fn cut_after(&self, bytes: i64) {
        self.faults.cut_after.store(bytes, Ordering::SeqCst);
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

    /// Resets all connections.
    pub fn cut(&self) {
        self.faults.cut.notify_waiters();
    }

    /// How many connections were made so far.
    pub fn connections(&self) -> usize {
        self.faults.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.faults.cut.notify_waiters();
    }
}

async fn accept(listener: TcpListener, server_port: u16, faults: Arc<Faults>) {
    while let Ok((client, _)) = listener.accept().await {
        let number = faults.connections.fetch_add(1, Ordering::SeqCst) + 1;
        let faults = Arc::clone(&faults);
        tokio::spawn(async move {
            let cut = Arc::clone(&faults);
            tokio::select! {
                () = cut.cut.notified() => {}
                () = relay(client, server_port, number, faults) => {}
            }
        });
    }
}

async fn relay(client: TcpStream, server_port: u16, number: usize, faults: Arc<Faults>) {
    if faults.deaf.load(Ordering::SeqCst) {
        std::future::pending::<()>().await;
    }
    let Ok(server) = TcpStream::connect(("127.0.0.1", server_port)).await else { return };
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = async {
        let mut buffer = vec![0; 1 << 16];
        let mut held = faults.hold_requests.subscribe();
        loop {
            let count = match from_client.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => count,
            };
            if held.wait_for(|held| *held < number).await.is_err() {
                return;
            }
            let left = faults.cut_after.load(Ordering::SeqCst);
            let passed = if left >= 0 { count.min(left as usize) } else { count };
            if to_server.write_all(&buffer[..passed]).await.is_err() {
                return;
            }
            if left >= 0 {
                faults.cut_after.store(left - passed as i64, Ordering::SeqCst);
                if passed < count || left == passed as i64 {
                    faults.cut_after.store(-1, Ordering::SeqCst);
                    faults.lost.fetch_add(1, Ordering::SeqCst);
                    return;
                }
            }
        }
    };
    let replies = async {
        let mut buffer = vec![0; 1 << 16];
        let mut held = faults.hold_replies.subscribe();
        loop {
            let count = match from_server.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => count,
            };
            if held.wait_for(|held| !held).await.is_err() {
                return;
            }
            if faults.lose_replies.load(Ordering::SeqCst) > 0 {
                faults.lose_replies.fetch_sub(1, Ordering::SeqCst);
                faults.lost.fetch_add(1, Ordering::SeqCst);
                return;
            }
            if to_client.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = requests => {}
        () = replies => {}
    }
}
