//! A subscriber on a connection of its own.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::support::{Server, soon};

pub struct Subscriber {
    _connection: MultiplexedConnection,
    server: MultiplexedConnection,
    messages: UnboundedReceiver<PushInfo>,
}

impl Subscriber {
    /// Subscribes to all channels of this pattern.
    pub async fn of(server: &Server, pattern: &str) -> Subscriber {
        let (sender, messages) = unbounded_channel();
        let config = redis::AsyncConnectionConfig::new()
            .set_response_timeout(Some(Duration::from_secs(20)))
            .set_push_sender(sender);
        let client = redis::Client::open(format!("{}?protocol=resp3", server.url())).unwrap();
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
        connection.psubscribe(pattern).await.unwrap();
        Subscriber { _connection: connection, server: server.connection().await, messages }
    }

    /// The text of the next message.
    pub async fn next(&mut self) -> String {
        loop {
            let message = soon("a message", self.messages.recv()).await.unwrap();
            if message.kind == PushKind::PMessage {
                return redis::from_redis_value(message.data.last().unwrap().clone()).unwrap();
            }
        }
    }

    /// The messages that were published until now, in their order. `channel` is any of those that
    /// it has subscribed to.
    pub async fn published(&mut self, channel: &str) -> Vec<String> {
        let mut publish = redis::cmd("PUBLISH");
        let receivers: u64 = publish.arg(channel).arg("end").query_async(&mut self.server).await.unwrap();
        assert!(receivers >= 1, "no subscriber of {channel}");
        let mut texts = Vec::new();
        loop {
            match self.next().await {
                text if text == "end" => return texts,
                text => texts.push(text),
            }
        }
    }
}
