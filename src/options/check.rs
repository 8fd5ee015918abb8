//! Checks of options, before anything is sent.

use std::time::Duration;

use super::{Options, RestartGuard};
use crate::error::ConfigError;

impl Options {
    /// The longest TTL of a lease with these options, on either side of a read-write lock.
    pub(crate) fn longest_ttl(&self) -> Duration {
        [Some(self.ttl), self.read_ttl, self.write_ttl].into_iter().flatten().max().unwrap_or(self.ttl)
    }

    /// Checks what depends on the nodes.
    pub(crate) fn check_for(&self, is_alone: bool, has_cluster: bool) -> Result<(), ConfigError> {
        match self.restart_guard {
            RestartGuard::On if is_alone => Err(ConfigError::GuardOfOneNode),
            _ if has_cluster && self.replicas > 0 => Err(ConfigError::ReplicasOfCluster),
            _ => Ok(()),
        }
    }

    pub(crate) fn wants_replicas(&self) -> Option<(u32, Duration)> {
        (self.replicas > 0).then_some((self.replicas, self.replica_timeout))
    }

    /// For how long a lock stays held from its grant, if it does so at all.
    pub(crate) fn minimum_hold(&self) -> Option<Duration> {
        self.hold_at_least.filter(|span| !span.is_zero())
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let (shortest, longest) = (Duration::from_millis(100), Duration::from_secs(24 * 3600));
        let (read_ttl, write_ttl) = (self.read_ttl.unwrap_or(self.ttl), self.write_ttl.unwrap_or(self.ttl));
        let hold_at_least = self.hold_at_least.unwrap_or_default();
        let spans = [
            ("ttl", self.ttl, shortest, longest),
            ("read_ttl", read_ttl, shortest, longest),
            ("write_ttl", write_ttl, shortest, longest),
            ("poll_cap", self.poll_cap, Duration::from_millis(10), Duration::from_secs(10)),
            ("node_timeout", self.node_timeout, Duration::from_millis(10), Duration::from_secs(60)),
            ("token_ttl", self.token_ttl, Duration::from_secs(1), longest),
            ("grant_within", self.grant_within.unwrap_or(longest), shortest, longest),
            ("outage_limit", self.outage_limit.unwrap_or(longest), Duration::ZERO, longest),
            ("local_turn", self.local_turn, Duration::ZERO, Duration::from_secs(10)),
            ("hold_at_least", hold_at_least, Duration::ZERO, longest),
            ("replica_timeout", self.replica_timeout, Duration::from_millis(1), longest),
        ];
        for (option, value, least, most) in spans {
            if value < least || value > most {
                return Err(ConfigError::Span { option, value, least, most });
            }
        }
        let max_hold = ("max_hold", self.max_hold);
        let node_timeout = ("node_timeout", (self.replicas > 0).then_some(self.node_timeout));
        let limits = [
            ("ttl", self.ttl, max_hold),
            ("read_ttl", read_ttl, max_hold),
            ("write_ttl", write_ttl, max_hold),
            ("hold_at_least", hold_at_least, max_hold),
            ("replica_timeout", self.replica_timeout, node_timeout),
        ];
        for (option, value, (limit, most)) in limits {
            if let Some(most) = most.filter(|most| value > *most) {
                return Err(ConfigError::Longer { option, value, limit, most });
            }
        }
        if !(0.0..=0.5).contains(&self.drift) {
            return Err(ConfigError::Drift { drift: self.drift });
        }
        if self.max_depth == 0 {
            return Err(ConfigError::NoDepth);
        }
        if self.max_depth > 1_024 {
            return Err(ConfigError::LargeDepth { depth: self.max_depth });
        }
        if self.max_readers > 100_000 {
            return Err(ConfigError::ManyReaders { readers: self.max_readers });
        }
        if self.max_readers == 0 {
            return Err(ConfigError::NoReaders);
        }
        if self.prefix.len() > 128 {
            return Err(ConfigError::LongPrefix { bytes: self.prefix.len() });
        }
        Ok(())
    }
}
