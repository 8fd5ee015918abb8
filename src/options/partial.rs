//! Records which options were set: the others are taken from the client or from the defaults.

use std::fmt;
use std::time::Duration;

use serde::de::{self, MapAccess, Unexpected, Visitor};
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

/// A duration as a text with its unit, as `10s`: a number alone would be taken for seconds by one
/// reader and for milliseconds by the next.
struct Text(Duration);

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(self.0))
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Text, D::Error> {
        struct InUnits;

        impl Visitor<'_> for InUnits {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration with its unit, as \"10s\", \"500ms\" or \"1m 30s\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text, E> {
                let wrong = |_| E::invalid_value(Unexpected::Str(text), &self);
                humantime::parse_duration(text).map(Text).map_err(wrong)
            }
        }

        from.deserialize_str(InUnits)
    }
}

impl Setting for Duration {
    type InFile = Text;

    fn from_file(Text(duration): Text) -> Duration {
        duration
    }

    fn to_file(&self) -> Text {
        Text(*self)
    }
}

impl Setting for Option<Duration> {
    type InFile = Option<Text>;

    fn from_file(duration: Option<Text>) -> Option<Duration> {
        duration.map(Duration::from_file)
    }

    fn to_file(&self) -> Option<Text> {
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

/// Everything that must know all options: defaults, which are set, where the others come from, and
/// files.
macro_rules! options {
    ($($field:ident $option:ident: $value:ty = $default:expr;)+) => {
        /// An option, as a bit of [`SetFields`].
        #[derive(Clone, Copy)]
        pub(super) enum Field {
            $($field,)+
        }

        impl Default for Options {
            fn default() -> Options {
                Options { $($option: $default,)+ set_fields: SetFields::default() }
            }
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

        /// Only by their names: a list would be taken for options of which none is set.
        impl<'de> Deserialize<'de> for Options {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Options, D::Error> {
                struct ByName;

                impl<'de> Visitor<'de> for ByName {
                    type Value = Options;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str("options by their names")
                    }

                    /// An option that is present counts as set, even if it is `null`.
                    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Options, A::Error> {
                        let mut options = Options::new();
                        while let Some(name) = map.next_key::<String>()? {
                            match name.as_str() {
                                $(stringify!($option) if options.set_fields.has(Field::$field) => {
                                    return Err(de::Error::duplicate_field(stringify!($option)));
                                }
                                stringify!($option) => {
                                    options.$option = <$value>::from_file(map.next_value()?);
                                    options = options.mark_set(Field::$field);
                                })+
                                _ => return Err(de::Error::unknown_field(&name, &[$(stringify!($option)),+])),
                            }
                        }
                        Ok(options)
                    }
                }

                from.deserialize_map(ByName)
            }
        }

        impl Serialize for Options {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let mut fields = to.serialize_struct("Options", [$(Field::$field),+].len())?;
                $(fields.serialize_field(stringify!($option), &self.$option.to_file())?;)+
                fields.end()
            }
        }
    };
}

options! {
    Ttl ttl: Duration = Duration::from_secs(30);
    ReadTtl read_ttl: Option<Duration> = None;
    WriteTtl write_ttl: Option<Duration> = None;
    Renewal renewal: Renewal = Renewal::Automatic;
    MaxHold max_hold: Option<Duration> = None;
    HoldAtLeast hold_at_least: Option<Duration> = None;
    Fencing fencing: Fencing = Fencing::On;
    Nesting nesting: Nesting = Nesting::Counted;
    MaxDepth max_depth: u32 = 255;
    MaxReaders max_readers: u32 = 10_000;
    PollCap poll_cap: Duration = Duration::from_millis(2500);
    NodeTimeout node_timeout: Duration = Duration::from_secs(1);
    Drift drift: f64 = 0.01;
    Prefix prefix: String = "lock:".to_owned();
    Wakeups wakeups: Wakeups = Wakeups::Push;
    RestartGuard restart_guard: RestartGuard = RestartGuard::Off;
    TokenTtl token_ttl: Duration = Duration::from_secs(3600);
    GrantWithin grant_within: Option<Duration> = None;
    OutageLimit outage_limit: Option<Duration> = None;
    LocalTurn local_turn: Duration = Duration::from_millis(1);
    Replicas replicas: u32 = 0;
    ReplicaTimeout replica_timeout: Duration = Duration::from_millis(100);
}

impl Options {
    /// Records that an option was set.
    pub(super) fn mark_set(mut self, field: Field) -> Options {
        self.set_fields.0 |= 1 << field as u32;
        self
    }

    /// Whether tasks of one client may share a hold to read. They count as one reader, so a limit
    /// that was set excludes that, unless the turn was set as well.
    pub(crate) fn allow_joint_holds(&self) -> bool {
        !self.set_fields.has(Field::MaxReaders) || self.set_fields.has(Field::LocalTurn)
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
