//! [`Latency`]: a way to a server on which each reply takes a while, however many there are.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Relays to a server until this is dropped.
pub struct Latency {
    port: u16,
    _tasks: JoinSet<()>,
}

impl Latency {
    pub async fn start(server: u16, latency: Duration) -> Latency {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let (port, mut tasks) = (listener.local_addr().unwrap().port(), JoinSet::new());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(relay(client, server, latency));
            }
        });
        Latency { port, _tasks: tasks }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }
}

async fn relay(client: TcpStream, server: u16, latency: Duration) {
    let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
    client.set_nodelay(true).unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (sender, mut replies) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let requests = tokio::io::copy(&mut from_client, &mut to_server);
    let read = async {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from_server.read(&mut buffer).await {
            let _gone = sender.send((Instant::now() + latency, buffer[..count].to_vec()));
        }
    };
    let write = async {
        while let Some((due, bytes)) = replies.recv().await {
            sleep_until(due).await;
            if to_client.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        _ = requests => {}
        () = read => {}
        () = write => {}
    }
}
