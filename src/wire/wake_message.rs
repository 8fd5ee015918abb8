//! [`WakeMessage`]: what a script publishes when it grants a lock to waiters, as `lua/README.md`
//! specifies it. This is the only parser of it.

use uuid::Uuid;

use crate::fencing::FencingToken;
use crate::labels::attempt_id;

/// A message: the attempts that it is for, separated by commas, and what it announces to them.
pub(super) struct WakeMessage<'a> {
    attempts: &'a str,
    /// `None`: it only makes the waiters poll.
    pub(super) grant: Option<AnnouncedGrant>,
}

/// A grant as its message says: `token time key`. Every user with the right to publish can say
/// that, so it proves nothing by itself.
#[derive(Clone, Debug)]
pub(crate) struct AnnouncedGrant {
    pub(crate) token: u64,
    /// The server's clock, in microseconds.
    pub(crate) time: u64,
    /// The key of the lock.
    pub(crate) key: String,
}

impl<'a> WakeMessage<'a> {
    /// `None`: not ours, since other users may publish in the same channel.
    pub(super) fn parse(payload: &'a [u8]) -> Option<WakeMessage<'a>> {
        let (attempts, rest) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
        Some(WakeMessage { attempts, grant: AnnouncedGrant::parse(rest) })
    }

    /// The ids of the attempts. An attempt is its id, followed by the labels of its client.
    pub(super) fn attempts(&self) -> impl Iterator<Item = Uuid> {
        self.attempts.split(',').filter_map(attempt_id)
    }
}

impl AnnouncedGrant {
    fn parse(text: &str) -> Option<AnnouncedGrant> {
        let mut words = text.splitn(3, ' ');
        let mut number = || words.next()?.parse().ok().filter(|number| *number < FencingToken::LIMIT);
        let (token, time) = (number()?, number()?);
        let key = words.next()?.to_owned();
        Some(AnnouncedGrant { token, time, key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_script_sends_are_no_grant() {
        let id = Uuid::nil().simple();
        let grant = |rest: &str| {
            let text = format!("{id} {rest}");
            WakeMessage::parse(text.as_bytes()).and_then(|message| message.grant)
        };
        assert_eq!(grant("7 1800000000000000 lock:a").map(|grant| grant.token), Some(7));
        for rest in ["9007199254740992 1 lock:a", "7 9007199254740992 lock:a", "-1 1 lock:a", "7 lock:a", ""]
        {
            assert!(grant(rest).is_none(), "{rest}");
        }
    }
}
