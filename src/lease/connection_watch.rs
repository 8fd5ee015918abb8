//! Asks about every lease once a connection to a server is new: the server may have restarted
//! without its data, or be another one. Renewals alone would find out after a third of the TTL.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::keeper::Keeper;

/// The pause between two checks of a node, while there are leases. A connection that was closed is
/// replaced, and its leases are asked about, within this and two round trips.
const CHECK_PAUSE: Duration = Duration::from_millis(500);

impl Keeper {
    /// Looks after the connections of one node, until it is aborted. The client library does not
    /// tell that a connection was closed: the next request on it finds out.
    pub(super) async fn watch_connections(self: Arc<Keeper>, place: usize) {
        loop {
            sleep(CHECK_PAUSE).await;
            if !self.schedule().leases.is_empty() {
                self.nodes.node(place).check().await;
            }
            self.notice_connection(place);
            // Here alone, and so twice a second at most: with a server that closes each connection
            // after a while, one round would cause the next.
            if self.schedule().ask_once_new() {
                self.notify.notify_one();
            }
        }
    }

    /// Notices if the connection is another one than the last time.
    pub(super) fn notice_connection(&self, place: usize) {
        let connection = self.nodes.node(place).connection_state();
        self.schedule().notice_connection(place, connection);
    }
}
