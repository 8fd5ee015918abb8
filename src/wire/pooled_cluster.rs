//! [`PooledCluster`]: the library's client for a cluster, with the settings of an application's
//! pool, and with limits where the library has none.

use std::collections::HashSet;
use std::time::Duration;

use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo};
use redis::{Cmd, ErrorKind, Pipeline, RedisError, Value};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::failure::too_slow;
use super::transport::RepliesByServer;

#[derive(Clone)]
pub(super) struct PooledCluster(ClusterConnection);

impl PooledCluster {
    pub(super) fn new(connection: ClusterConnection) -> PooledCluster {
        PooledCluster(connection)
    }

    pub(super) async fn send(&self, request: &Cmd, deadline: Instant) -> Result<Value, RedisError> {
        let mut connection = self.0.clone();
        let sending = request.query_async(&mut connection);
        timeout_at(deadline, sending).await.unwrap_or_else(|_| Err(too_slow()))
    }

    /// Sends a request to the server that has its keys already while their slot moves.
    pub(super) async fn ask(
        &self,
        request: &Cmd,
        (host, port): (&str, u16),
        deadline: Instant,
    ) -> Result<Value, RedisError> {
        let target = SingleNodeRoutingInfo::ByAddress { host: host.to_owned(), port };
        let mut pipeline = Pipeline::with_capacity(2);
        pipeline.add_command(redis::cmd("ASKING")).add_command(request.clone());
        let mut connection = self.0.clone();
        let sending = connection.route_pipeline(pipeline, 1, 1, target);
        let replies = timeout_at(deadline, sending).await.unwrap_or_else(|_| Err(too_slow()))?;
        let missing = || RedisError::from((ErrorKind::UnexpectedReturnType, "no reply of a pipeline"));
        replies.into_iter().next().ok_or_else(missing)?.extract_error()
    }

    /// Whether every master replies. If one is missing, the library looks for it with every request
    /// to it, while all other requests wait.
    pub(super) async fn is_whole(&self, limit: Duration) -> bool {
        timeout(limit, masters_answer(self.0.clone())).await.unwrap_or(false)
    }

    /// Sends a request to every master and returns each one's reply, by address.
    pub(super) async fn send_to_all(
        &self,
        request: &Cmd,
        deadline: Instant,
    ) -> Result<RepliesByServer, RedisError> {
        let masters = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let mut connection = self.0.clone();
        let sending = connection.route_command(request.clone(), masters);
        let Value::Map(answers) = timeout_at(deadline, sending).await.map_err(|_| too_slow())?? else {
            return Ok(Vec::new());
        };
        let named =
            |(server, answer)| Some((Some(redis::from_redis_value::<String>(server).ok()?), Ok(answer)));
        Ok(answers.into_iter().filter_map(named).collect())
    }
}

/// Whether all masters reply that one of them lists.
async fn masters_answer(mut connection: ClusterConnection) -> bool {
    let mut slots = redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    let any_node = RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random);
    let Ok(answer) = connection.route_command(slots, any_node).await else { return false };
    let Ok(slots) = redis::from_redis_value::<Vec<Vec<Value>>>(answer) else { return false };
    let masters: HashSet<_> = slots.iter().filter_map(|range| address(range.get(2)?)).collect();
    let mut queries = JoinSet::new();
    for (host, port) in masters {
        let mut connection = connection.clone();
        queries.spawn(async move {
            let master = RoutingInfo::SingleNode(SingleNodeRoutingInfo::ByAddress { host, port });
            connection.route_command(redis::cmd("PING"), master).await.is_ok()
        });
    }
    while let Some(answers) = queries.join_next().await {
        if !answers.unwrap_or(false) {
            return false;
        }
    }
    true
}

/// The address of a node in a reply to `CLUSTER SLOTS`, if the server knows it.
fn address(node: &Value) -> Option<(String, u16)> {
    let Value::Array(words) = node else { return None };
    let [Value::BulkString(host), Value::Int(port), ..] = words.as_slice() else { return None };
    let host = std::str::from_utf8(host).ok().filter(|host| !["", "?"].contains(host))?;
    Some((host.to_owned(), u16::try_from(*port).ok()?))
}
