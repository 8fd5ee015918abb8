//! [`SlotTable`]: which master of a cluster serves which slots.

use std::collections::HashMap;
use std::sync::Arc;

use redis::{Arg, Cmd, ConnectionInfo, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::super::request::Slot;
use super::master::Master;
use super::seeds::with_settings_of;

pub(super) const CLUSTER_DOWN: ErrorKind = ErrorKind::Server(ServerErrorKind::ClusterDown);

const SLOTS: u16 = 16_384;

#[derive(Debug, Default)]
pub(super) struct SlotTable {
    pub(super) slots: HashMap<Slot, Arc<Master>>,
    /// By address.
    pub(super) masters: HashMap<String, Arc<Master>>,
    pub(super) learned: Option<Instant>,
}

impl SlotTable {
    /// Takes over which master serves which slots. Masters that are known keep their connections.
    pub(super) fn adopt(&mut self, slots: &[Vec<Value>], from: &Arc<Master>) {
        let mut known = std::mem::take(&mut self.masters);
        known.entry(from.address.clone()).or_insert_with(|| Arc::clone(from));
        let mut masters = HashMap::new();
        self.slots.clear();
        for range in slots {
            let [Value::Int(first), Value::Int(last), master, ..] = range.as_slice() else { continue };
            let Some(info) = with_settings_of(&from.info, master) else { continue };
            let address = info.addr().to_string();
            if let Some(master) = known.remove(&address) {
                masters.insert(address, master);
            }
            let master = master_at(&mut masters, info);
            let slots = (*first..=*last).filter_map(|slot| Slot::new(u16::try_from(slot).ok()?));
            self.slots.extend(slots.take(SLOTS.into()).map(|slot| (slot, Arc::clone(&master))));
        }
        self.masters = masters;
        self.learned = Some(Instant::now());
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
        _ => None,
    }
}

pub(super) fn unserved() -> RedisError {
    RedisError::from((CLUSTER_DOWN, "no master serves the slot"))
}

pub(super) fn not_in_a_cluster(address: &str) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, "the server knows no slots", address.to_owned()))
}
