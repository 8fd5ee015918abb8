//! [`SlotTable`]: which master of a cluster serves which slots.

use std::collections::HashMap;
use std::sync::Arc;

use redis::{Arg, Cmd, ConnectionInfo, RedisError, Value};

use super::super::request::Slot;
use super::master::Master;
use super::seeds::{CLUSTER_DOWN, MOST_NODES, with_settings_of};
use crate::clock::Moment;

pub(super) const SLOTS: u16 = 16_384;

#[derive(Default)]
pub(super) struct SlotTable {
    pub(super) slots: HashMap<Slot, Arc<Master>>,
    /// By address.
    pub(super) masters: HashMap<String, Arc<Master>>,
    /// When the first table was adopted.
    opened: Option<Moment>,
    /// When servers were asked for the slots by the latest attempt that has ended.
    pub(super) asked: Option<Moment>,
}

impl SlotTable {
    /// Takes over which master serves which slots. Masters that are known keep their connections.
    pub(super) fn adopt(&mut self, slots: &[Vec<Value>], from: &Arc<Master>) {
        let mut known = std::mem::take(&mut self.masters);
        known.entry(from.address.clone()).or_insert_with(|| Arc::clone(from));
        let mut masters = HashMap::new();
        self.slots.clear();
        // A slot has one master, so no table is longer than this, whatever a server replies.
        let mut left = usize::from(SLOTS);
        for range in slots.iter().take(left) {
            if left == 0 {
                break;
            }
            let [Value::Int(first), Value::Int(last), master, ..] = range.as_slice() else { continue };
            let Some(info) = with_settings_of(&from.info, master) else { continue };
            let address = info.addr().to_string();
            // Each of them is connected to: a table of all slots could name as many servers.
            if masters.len() == MOST_NODES && !masters.contains_key(&address) {
                continue;
            }
            if let Some(master) = known.remove(&address) {
                masters.insert(address, master);
            }
            let master = master_at(&mut masters, info);
            for number in (*first..=*last).take(left) {
                left -= 1;
                if let Some(slot) = u16::try_from(number).ok().and_then(Slot::new) {
                    self.slots.insert(slot, Arc::clone(&master));
                }
            }
        }
        self.masters = masters;
        self.opened.get_or_insert_with(Moment::now);
    }

    /// Whether a request that was begun then may have gone to this master: it was known.
    pub(super) fn knew(&self, address: &str, begun: Moment) -> bool {
        let since = self.masters.get(address).map(|master| master.known);
        since.is_some_and(|since| since <= begun || self.opened.is_none_or(|opened| since <= opened))
    }
}

/// The master with this address, which is added if it is new.
pub(super) fn master_at(masters: &mut HashMap<String, Arc<Master>>, info: ConnectionInfo) -> Arc<Master> {
    let master = masters.entry(info.addr().to_string()).or_insert_with(|| Arc::new(Master::new(info)));
    Arc::clone(master)
}

/// The slot of the key, for the commands beside calls that this client sends.
pub(super) fn slot_of(command: &Cmd) -> Option<Slot> {
    let mut words = command.args_iter().map(|word| if let Arg::Simple(word) = word { word } else { &[] });
    match words.next()? {
        b"GET" | b"ZCOUNT" => words.next().map(Slot::for_key),
        b"EVAL" => words.nth(2).map(Slot::for_key),
        _ => None,
    }
}

pub(super) fn unserved() -> RedisError {
    RedisError::from((CLUSTER_DOWN, "no master serves the slot"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "that is how a test fails")]
    use super::*;
    use redis::IntoConnectionInfo;

    fn range(first: i64, last: i64, port: i64) -> Vec<Value> {
        let host = Value::BulkString(b"10.0.0.1".to_vec());
        vec![Value::Int(first), Value::Int(last), Value::Array(vec![host, Value::Int(port)])]
    }

    /// The number of slots and of masters after a reply.
    fn adopted(slots: &[Vec<Value>]) -> (usize, usize) {
        let from = Arc::new(Master::new("redis://10.0.0.1:7000".into_connection_info().unwrap()));
        let mut table = SlotTable::default();
        table.adopt(slots, &from);
        (table.slots.len(), table.masters.len())
    }

    #[test]
    fn a_table_is_no_longer_than_that_of_all_slots() {
        assert_eq!(adopted(&[range(0, 9, 7000), range(10, 16_383, 7001)]), (16_384, 2));
        // Work is counted by its results: each range would be the table of all slots.
        let hostile: Vec<_> = (0..200_000).map(|port| range(0, 16_383, 1 + port % 60_000)).collect();
        assert_eq!(adopted(&hostile), (16_384, 1), "nothing is left for other ranges");
        assert_eq!(adopted(&[range(i64::MIN, i64::MAX, 7000)]).0, 0);
        let servers: Vec<_> = (0..16_384).map(|slot| range(slot, slot, 1 + slot)).collect();
        assert_eq!(adopted(&servers), (1_000, 1_000), "a cluster has no more nodes");
    }
}
