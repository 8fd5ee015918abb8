//! Records which options were set: the others are taken from the client or from the defaults.

use std::fmt;
use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Fencing, Nesting, Options, Renewal, RestartGuard, Wakeups};
use crate::error::ConfigError;

/// The options that were set. All values compare equal, so that `Options` compares only settings.
#[derive(Clone, Copy, Default)]
pub(super) struct SetFields(u32);

impl SetFields {
    fn has(self, field: Field) -> bool {
        self.0 & (1 << field as u32) != 0
    }
}

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

/// The value of an option, as a file has it.
trait Setting: Sized {
    type InFile: Serialize + for<'de> Deserialize<'de>;

    fn from_file(value: Self::InFile) -> Self;
    fn to_file(&self) -> Self::InFile;
}

/// In milliseconds.
impl Setting for Duration {
    type InFile = u64;

    fn from_file(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn to_file(&self) -> u64 {
        u64::try_from(self.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Setting for Option<Duration> {
    type InFile = Option<u64>;

    fn from_file(millis: Option<u64>) -> Option<Duration> {
        millis.map(Duration::from_file)
    }

    fn to_file(&self) -> Option<u64> {
        self.as_ref().map(Duration::to_file)
    }
}

macro_rules! stored_as_they_are {
    ($($value:ty)+) => {
        $(impl Setting for $value {
            type InFile = $value;

            fn from_file(value: $value) -> $value {
                value
            }

            fn to_file(&self) -> $value {
                self.clone()
            }
        })+
    };
}

stored_as_they_are! { u32 f64 String Renewal Fencing Nesting Wakeups RestartGuard }

/// Deserializes an option that is present: it counts as set, even if it is `null`.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// Everything that must know all options: which are set, where the others come from, and files.
macro_rules! options {
    ($($field:ident $option:ident: $value:ty, $name:ident in a file;)+) => {
        /// An option, as a bit of [`SetFields`].
        #[derive(Clone, Copy)]
        pub(super) enum Field {
            $($field,)+
        }

        impl Options {
            /// Returns these options, with those that are not set taken from `base`.
            pub(crate) fn with_defaults(self, base: &Options) -> Options {
                let set_fields = self.set_fields;
                let mut all = base.clone();
                all.set_fields.0 |= set_fields.0;
                $(if set_fields.has(Field::$field) {
                    all.$option = self.$option;
                })+
                all
            }
        }

        /// Options as they are deserialized: each may be missing.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct Partial {
            $(#[serde(default, deserialize_with = "given")]
            $name: Option<<$value as Setting>::InFile>,)+
        }

        impl From<Partial> for Options {
            fn from(partial: Partial) -> Options {
                let mut options = Options::new();
                $(if let Some(value) = partial.$name {
                    options.$option = <$value>::from_file(value);
                    options = options.mark_set(Field::$field);
                })+
                options
            }
        }

        impl Serialize for Options {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let mut fields = to.serialize_struct("Options", [$(Field::$field),+].len())?;
                $(fields.serialize_field(stringify!($name), &self.$option.to_file())?;)+
                fields.end()
            }
        }
    };
}

options! {
    Ttl ttl: Duration, ttl_ms in a file;
    ReadTtl read_ttl: Option<Duration>, read_ttl_ms in a file;
    WriteTtl write_ttl: Option<Duration>, write_ttl_ms in a file;
    Renewal renewal: Renewal, renewal in a file;
    MaxHold max_hold: Option<Duration>, max_hold_ms in a file;
    Fencing fencing: Fencing, fencing in a file;
    Nesting nesting: Nesting, nesting in a file;
    MaxDepth max_depth: u32, max_depth in a file;
    MaxReaders max_readers: u32, max_readers in a file;
    PollCap poll_cap: Duration, poll_cap_ms in a file;
    NodeTimeout node_timeout: Duration, node_timeout_ms in a file;
    Drift drift: f64, drift in a file;
    Prefix prefix: String, prefix in a file;
    Wakeups wakeups: Wakeups, wakeups in a file;
    RestartGuard restart_guard: RestartGuard, restart_guard in a file;
    TokenTtl token_ttl: Duration, token_ttl_ms in a file;
    GrantWithin grant_within: Option<Duration>, grant_within_ms in a file;
    OutageLimit outage_limit: Option<Duration>, outage_limit_ms in a file;
    Replicas replicas: u32, replicas in a file;
    ReplicaTimeout replica_timeout: Duration, replica_timeout_ms in a file;
}

impl Options {
    /// Records that an option was set.
    pub(super) fn mark_set(mut self, field: Field) -> Options {
        self.set_fields.0 |= 1 << field as u32;
        self
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
