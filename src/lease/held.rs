//! [`Armed`], an attempt that is answered for, and [`Held`], what it became.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Attempt, Client, Kind, Lease};
use crate::clock::Moment;
use crate::error::Error;
use crate::options::Options;
use crate::wire::{Answer, Call, Failure, Node, Reply, Script};

/// How often a release is sent before the rest is left to the keeper, or an exchange before it fails.
const TRIES: u32 = 3;

/// Answers for an attempt from before its first request: whatever it gets is given back, by
/// [`Held::release`] or, when this is dropped, by the keeper.
pub(super) struct Armed {
    pub(super) client: Arc<Client>,
    pub(super) attempt: Arc<Attempt>,
    lease: Option<Lease>,
    /// How the attempt may stand in the queue; empty: it never queued.
    waiter: String,
    /// A request has left and was not answered yet.
    in_flight: bool,
    /// A request has left that was never answered, or was sent twice: it may yet run.
    unsettled: bool,
    /// There is nothing to give back, or it is meant to stay.
    disarmed: AtomicBool,
}

impl Armed {
    pub(super) fn new(client: &Arc<Client>, attempt: Attempt) -> Armed {
        Armed {
            client: Arc::clone(client),
            attempt: Arc::new(attempt),
            lease: None,
            waiter: String::new(),
            in_flight: false,
            unsettled: false,
            disarmed: AtomicBool::new(false),
        }
    }

    /// To be called before a request leaves: from then on it must be undone.
    pub(super) fn sends(&mut self, waiter: &str) {
        self.in_flight = true;
        if self.waiter.is_empty() {
            self.waiter.push_str(waiter);
        }
    }

    /// To be called with what came of the request.
    pub(super) fn learns(&mut self, outcome: &Result<Reply, Failure>) {
        self.in_flight = false;
        self.unsettled |= match outcome {
            Ok(reply) => reply.resent.is_some(),
            Err(failure) => failure.is_unknown(),
        };
    }

    /// The attempt was granted: from now on its lease is renewed.
    pub(super) fn granted(mut self, lease: Lease) -> Held {
        // What was granted has left the queue; only a late delivery could put it back.
        if !self.unsettled {
            self.waiter.clear();
        }
        self.client.keeper.schedule(&lease);
        self.lease = Some(lease.clone());
        Held { armed: self, lease }
    }

    /// Gives back what was granted in vain.
    pub(super) fn give_back(mut self) {
        self.unsettled = true;
    }

    fn disarm(&self) {
        self.disarmed.store(true, Ordering::Relaxed);
    }

    fn is_disarmed(&self) -> bool {
        self.disarmed.load(Ordering::Relaxed)
    }

    /// Whether the server must forget the attempt and refuse what may yet arrive of it.
    fn ends_for_good(&self) -> bool {
        self.in_flight || self.unsettled
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        if let Some(lease) = &self.lease {
            self.client.keeper.forget(lease);
        }
        let nothing_to_undo = self.lease.is_none() && self.waiter.is_empty() && !self.ends_for_good();
        if !self.is_disarmed() && !nothing_to_undo {
            let for_good = self.ends_for_good();
            self.client.keeper.abandon(Arc::clone(&self.attempt), for_good, std::mem::take(&mut self.waiter));
        }
    }
}

/// A lease and the duty to give it back. Dropped, it is given back in the background.
pub(crate) struct Held {
    armed: Armed,
    lease: Lease,
}

impl Held {
    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    pub(crate) fn options(&self) -> &Options {
        &self.armed.attempt.options
    }

    /// Gives the lease back and waits for the answer.
    ///
    /// # Cancel safety
    /// Dropped, it goes on in the background.
    pub(crate) async fn release(self) -> Result<(), Error> {
        if self.armed.is_disarmed() {
            return Err(Error::Lost { name: self.lease.name().clone() }); // leaked by another guard on it
        }
        let (client, attempt) = (Arc::clone(&self.armed.client), Arc::clone(&self.armed.attempt));
        if self.lease.is_lost() {
            // The server may keep it for a while yet: dropped here, it is given back in the background.
            return Err(Error::Lost { name: self.lease.name().clone() });
        }
        client.keeper.forget(&self.lease);
        let for_good = self.armed.ends_for_good();
        let call = attempt.release(for_good, &self.armed.waiter);
        let (outcome, doubt) = insist(&client.node, &call).await;
        let reply = outcome?;
        let Answer::Final(answer) = reply.answer()? else { return Err(reply.unexpected().into()) };
        self.armed.disarm();
        match (answer, doubt) {
            (1.., _) => Ok(()),
            // Released by an earlier delivery, or lost before: never to be taken for a success.
            (0, Some(failure)) => Err(failure.into()),
            (0, None) => Err(Error::NotHeld { name: attempt.name.clone() }),
            _ => Err(attempt.refusal(answer).unwrap_or_else(|| reply.unexpected().into())),
        }
    }

    /// Makes the hold one of another kind, by a script that answers as a renewal does. The old lease is over
    /// before the request leaves; the token stays.
    ///
    /// # Cancel safety
    /// Dropped, the hold is given back in the background, of whichever kind it is by then.
    pub(crate) async fn exchange(
        mut self,
        script: &'static Script,
        kind: &'static Kind,
        options: Options,
    ) -> Result<Held, Error> {
        let (client, lease) = (Arc::clone(&self.armed.client), self.lease.clone());
        let lost = || Error::Lost { name: lease.name().clone() };
        if self.armed.is_disarmed() || lease.is_lost() {
            return Err(lost());
        }
        client.keeper.forget(&lease);
        let attempt = Arc::new(self.armed.attempt.exchanged(kind, Arc::new(options)));
        self.armed.attempt = Arc::clone(&attempt);
        let call = attempt.exchange(script);
        let sent = Moment::now();
        let reply = insist(&client.node, &call).await.0?;
        match reply.answer()? {
            Answer::Final(1..) => {
                let until = sent + attempt.trusted(attempt.options.ttl);
                if Moment::now() >= until {
                    return Err(lost());
                }
                Ok(self.armed.granted(Lease::new(attempt, lease.fencing_token(), sent, until)))
            }
            Answer::Final(0) => Err(lost()),
            Answer::Final(answer) => {
                Err(attempt.refusal(answer).unwrap_or_else(|| reply.unexpected().into()))
            }
            Answer::Busy(..) => Err(reply.unexpected().into()),
        }
    }

    /// From now on this is never released: once it is dropped, it ends with its ttl.
    pub(crate) fn leak(&self) {
        self.armed.disarm();
        self.armed.client.keeper.forget(&self.lease);
    }
}

/// Sends a request again where that may help. Beside the answer, the failure of an earlier delivery that may
/// have run.
async fn insist(node: &Node, call: &Call<'_>) -> (Result<Reply, Failure>, Option<Failure>) {
    let mut doubt = None;
    let mut tries_left = TRIES;
    loop {
        tries_left -= 1;
        match node.call(call).await {
            Err(failure) if failure.is_passing() && tries_left > 0 => {
                doubt = doubt.or(failure.is_unknown().then_some(failure));
            }
            outcome => {
                let resent = outcome.as_ref().ok().and_then(|reply| reply.resent.clone());
                return (outcome, doubt.or(resent));
            }
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease.fmt(f)
    }
}
