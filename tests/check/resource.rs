//! The resources that a lock protects: a value with a comparison of fencing tokens, and a number
//! without any comparison.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

/// The script that the crate ships for resources with a comparison.
const SET: &str = include_str!("../../lua/fenced.lua");

/// A connection to the server of the resources, which has no faults.
pub struct Resource {
    connection: MultiplexedConnection,
    set: redis::Script,
}

impl Resource {
    pub async fn open(url: &str) -> Resource {
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(10)))
            .set_response_timeout(Some(Duration::from_secs(10)));
        let client = redis::Client::open(url).unwrap();
        let connection = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
        Resource { connection, set: redis::Script::new(SET) }
    }

    /// Writes the value. Returns whether this token was accepted.
    pub async fn write(&self, lock: &str, token: u64, hold: u64) -> bool {
        let mut connection = self.connection.clone();
        let mut call = self.set.key(format!("{{{lock}}}:value"));
        call.key(format!("{{{lock}}}:token")).arg(token).arg(hold);
        call.invoke_async::<u64>(&mut connection).await.unwrap() == 1
    }

    /// Adds one as only a sole holder may: it reads, waits and writes, without a comparison.
    pub async fn add(&self, lock: &str, pause: Duration) {
        let mut connection = self.connection.clone();
        let key = format!("{lock}:number");
        let number: Option<u64> = redis::cmd("GET").arg(&key).query_async(&mut connection).await.unwrap();
        sleep(pause).await;
        let next = number.unwrap_or(0) + 1;
        redis::cmd("SET").arg(&key).arg(next).query_async::<()>(&mut connection).await.unwrap();
    }

    /// The number of additions that were not overwritten.
    pub async fn number(&self, lock: &str) -> u64 {
        let mut connection = self.connection.clone();
        let number: Option<u64> =
            redis::cmd("GET").arg(format!("{lock}:number")).query_async(&mut connection).await.unwrap();
        number.unwrap_or(0)
    }
}
