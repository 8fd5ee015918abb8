//! Records which options were set: the others are taken from the client or from the defaults.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use super::{Fencing, Nesting, Options, Renewal, RestartGuard, Wakeups};
use crate::error::ConfigError;

/// The options that were set. All values compare equal, so that `Options` compares only settings.
#[derive(Clone, Copy, Default)]
pub(super) struct SetFields(u32);

impl PartialEq for SetFields {
    fn eq(&self, _: &SetFields) -> bool {
        true
    }
}

/// Hidden: `Debug` of [`Options`] is for the settings.
impl fmt::Debug for SetFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

/// An option, as a bit of [`SetFields`].
#[derive(Clone, Copy)]
pub(super) enum Field {
    Ttl,
    ReadTtl,
    WriteTtl,
    Renewal,
    MaxHold,
    Fencing,
    Nesting,
    MaxDepth,
    MaxReaders,
    PollCap,
    NodeTimeout,
    Drift,
    Prefix,
    Wakeups,
    RestartGuard,
    TokenTtl,
    GrantWithin,
    OutageLimit,
    Replicas,
    ReplicaTimeout,
}

impl SetFields {
    fn has(self, field: Field) -> bool {
        self.0 & (1 << field as u32) != 0
    }
}

impl Options {
    /// Records that an option was set.
    pub(super) fn mark_set(mut self, field: Field) -> Options {
        self.set_fields.0 |= 1 << field as u32;
        self
    }

    /// Returns these options, with those that are not set taken from `base`.
    pub(crate) fn over(self, base: &Options) -> Options {
        let set_fields = self.set_fields;
        let mut all = base.clone();
        all.set_fields.0 |= set_fields.0;
        macro_rules! take {
            ($($field:ident $option:ident,)+) => {
                $(if set_fields.has(Field::$field) {
                    all.$option = self.$option;
                })+
            };
        }
        take! {
            Ttl ttl,
            ReadTtl read_ttl,
            WriteTtl write_ttl,
            Renewal renewal,
            MaxHold max_hold,
            Fencing fencing,
            Nesting nesting,
            MaxDepth max_depth,
            MaxReaders max_readers,
            PollCap poll_cap,
            NodeTimeout node_timeout,
            Drift drift,
            Prefix prefix,
            Wakeups wakeups,
            RestartGuard restart_guard,
            TokenTtl token_ttl,
            GrantWithin grant_within,
            OutageLimit outage_limit,
            Replicas replicas,
            ReplicaTimeout replica_timeout,
        }
        all
    }

    /// Returns an error if an option differs that belongs to the existing connections.
    pub(crate) fn check_connections(&self, connected: &Options) -> Result<(), ConfigError> {
        let differs = [
            ("node_timeout", self.node_timeout != connected.node_timeout),
            ("wakeups", self.wakeups != connected.wakeups),
            ("restart_guard", self.restart_guard != connected.restart_guard),
        ];
        match differs.into_iter().find(|(_, differs)| *differs) {
            Some((option, _)) => Err(ConfigError::ConnectionOption { option }),
            None => Ok(()),
        }
    }
}

/// A duration in milliseconds.
struct Millis(Duration);

impl<'de> Deserialize<'de> for Millis {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Millis, D::Error> {
        u64::deserialize(from).map(|millis| Millis(Duration::from_millis(millis)))
    }
}

/// Deserializes an option that is present: it counts as set, even if it is `null`.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// Options as they are deserialized: each may be missing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Partial {
    #[serde(default, deserialize_with = "given")]
    ttl_ms: Option<Millis>,
    #[serde(default, deserialize_with = "given")]
    read_ttl_ms: Option<Option<Millis>>,
    #[serde(default, deserialize_with = "given")]
    write_ttl_ms: Option<Option<Millis>>,
    #[serde(default, deserialize_with = "given")]
    renewal: Option<Renewal>,
    #[serde(default, deserialize_with = "given")]
    max_hold_ms: Option<Option<Millis>>,
    #[serde(default, deserialize_with = "given")]
    fencing: Option<Fencing>,
    #[serde(default, deserialize_with = "given")]
    nesting: Option<Nesting>,
    #[serde(default, deserialize_with = "given")]
    max_depth: Option<u32>,
    #[serde(default, deserialize_with = "given")]
    max_readers: Option<u32>,
    #[serde(default, deserialize_with = "given")]
    poll_cap_ms: Option<Millis>,
    #[serde(default, deserialize_with = "given")]
    node_timeout_ms: Option<Millis>,
    #[serde(default, deserialize_with = "given")]
    drift: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    prefix: Option<String>,
    #[serde(default, deserialize_with = "given")]
    wakeups: Option<Wakeups>,
    #[serde(default, deserialize_with = "given")]
    restart_guard: Option<RestartGuard>,
    #[serde(default, deserialize_with = "given")]
    token_ttl_ms: Option<Millis>,
    #[serde(default, deserialize_with = "given")]
    grant_within_ms: Option<Option<Millis>>,
    #[serde(default, deserialize_with = "given")]
    outage_limit_ms: Option<Option<Millis>>,
    #[serde(default, deserialize_with = "given")]
    replicas: Option<u32>,
    #[serde(default, deserialize_with = "given")]
    replica_timeout_ms: Option<Millis>,
}

impl From<Partial> for Options {
    fn from(partial: Partial) -> Options {
        let mut options = Options::new();
        if let Some(value) = partial.ttl_ms {
            options.ttl = value.0;
            options = options.mark_set(Field::Ttl);
        }
        if let Some(value) = partial.read_ttl_ms {
            options.read_ttl = value.map(|span| span.0);
            options = options.mark_set(Field::ReadTtl);
        }
        if let Some(value) = partial.write_ttl_ms {
            options.write_ttl = value.map(|span| span.0);
            options = options.mark_set(Field::WriteTtl);
        }
        if let Some(value) = partial.renewal {
            options.renewal = value;
            options = options.mark_set(Field::Renewal);
        }
        if let Some(value) = partial.max_hold_ms {
            options.max_hold = value.map(|span| span.0);
            options = options.mark_set(Field::MaxHold);
        }
        if let Some(value) = partial.fencing {
            options.fencing = value;
            options = options.mark_set(Field::Fencing);
        }
        if let Some(value) = partial.nesting {
            options.nesting = value;
            options = options.mark_set(Field::Nesting);
        }
        if let Some(value) = partial.max_depth {
            options.max_depth = value;
            options = options.mark_set(Field::MaxDepth);
        }
        if let Some(value) = partial.max_readers {
            options.max_readers = value;
            options = options.mark_set(Field::MaxReaders);
        }
        if let Some(value) = partial.poll_cap_ms {
            options.poll_cap = value.0;
            options = options.mark_set(Field::PollCap);
        }
        if let Some(value) = partial.node_timeout_ms {
            options.node_timeout = value.0;
            options = options.mark_set(Field::NodeTimeout);
        }
        if let Some(value) = partial.drift {
            options.drift = value;
            options = options.mark_set(Field::Drift);
        }
        if let Some(value) = partial.prefix {
            options.prefix = value;
            options = options.mark_set(Field::Prefix);
        }
        if let Some(value) = partial.wakeups {
            options.wakeups = value;
            options = options.mark_set(Field::Wakeups);
        }
        if let Some(value) = partial.restart_guard {
            options.restart_guard = value;
            options = options.mark_set(Field::RestartGuard);
        }
        if let Some(value) = partial.token_ttl_ms {
            options.token_ttl = value.0;
            options = options.mark_set(Field::TokenTtl);
        }
        if let Some(value) = partial.grant_within_ms {
            options.grant_within = value.map(|span| span.0);
            options = options.mark_set(Field::GrantWithin);
        }
        if let Some(value) = partial.outage_limit_ms {
            options.outage_limit = value.map(|span| span.0);
            options = options.mark_set(Field::OutageLimit);
        }
        if let Some(value) = partial.replicas {
            options.replicas = value;
            options = options.mark_set(Field::Replicas);
        }
        if let Some(value) = partial.replica_timeout_ms {
            options.replica_timeout = value.0;
            options = options.mark_set(Field::ReplicaTimeout);
        }
        options
    }
}
