//! What can be asked about a lock of any kind, and revoking it. [`HolderId`]: identifies a holder.

use std::borrow::Cow;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;

use crate::error::{Error, Operation};
use crate::fencing::FencingToken;
use crate::inspection::Inspection;
use crate::lease::{Kind, Lease, LockRequest, decide};
use crate::name::Name;
use crate::owner::Owner;
use crate::wire::{Answer, Failure, WaitFor};

/// Identifies a holder of a lock for `is_held_by`. It is implemented for two types, and cannot be
/// implemented for others:
///
/// - A [`Lease`] identifies the hold that it was granted for. A lease of another lock, or of
///   another kind of lock, never holds this one. The server counts the holds of one owner without
///   distinguishing them, so with an owner the answer is whether that owner still has any.
/// - An [`Owner`] identifies all holds of this owner, through any client. A hold without an owner,
///   as on a [`Mutex`](crate::Mutex), is identified by its lease alone.
pub trait HolderId: Sealed {}

impl HolderId for Lease {}
impl HolderId for Owner {}

pub trait Sealed {
    fn holder_id(&self) -> SoughtHolder<'_>;
}

impl Sealed for Lease {
    fn holder_id(&self) -> SoughtHolder<'_> {
        SoughtHolder {
            owner: self.owner(),
            of: Some((self.name(), self.kind())),
            is_passed: self.is_passed(),
        }
    }
}

impl Sealed for Owner {
    fn holder_id(&self) -> SoughtHolder<'_> {
        SoughtHolder { owner: Cow::Owned(self.to_string()), of: None, is_passed: false }
    }
}

/// The holder that a call asks about, as the server names it.
#[allow(missing_debug_implementations, reason = "it cannot be named outside the crate")]
pub struct SoughtHolder<'a> {
    owner: Cow<'a, str>,
    /// The only lock that it may hold.
    of: Option<(&'a Name, &'static Kind)>,
    /// Another task of its client has the hold.
    is_passed: bool,
}

impl SoughtHolder<'_> {
    pub(crate) fn owner(&self) -> &str {
        &self.owner
    }

    pub(crate) fn may_hold(&self, name: &Name, kind: &'static Kind) -> bool {
        !self.is_passed && self.of.is_none_or(|(of, by)| of == name && std::ptr::eq(by, kind))
    }
}

impl LockRequest {
    pub(crate) async fn inspect(&self) -> Result<Inspection, Error> {
        self.query(None, Inspection::from_reply, Inspection::merge).await
    }

    pub(crate) async fn is_held_by(&self, holder_id: &SoughtHolder<'_>) -> Result<bool, Error> {
        let may_hold = holder_id.may_hold(&self.name, self.kind);
        Ok(may_hold && self.inspect().await?.is_held_by(holder_id.owner()))
    }

    /// Returns what the nodes report about the lock, or about one owner's holds. `read` receives
    /// the last token, the number of waiters, and the rest of the reply; `agree` receives the
    /// reports of several nodes, and how many form a majority.
    pub(crate) async fn query<T>(
        &self,
        owner: Option<&str>,
        read: fn(Option<FencingToken>, u64, &[String]) -> Option<T>,
        agree: fn(&[T], usize) -> T,
    ) -> Result<T, Error> {
        let call = Arc::new(self.kind.inspect(&self.name).read_only().shared(owner));
        let (nodes, context) = (&self.client.nodes, self.client.context(Operation::Inspect, &self.name));
        let in_flight = Arc::default();
        let asking = pin!(async { Ok(nodes.ask(&call, nodes.all_nodes(), &in_flight, WaitFor::All).await) });
        let votes = self.client.run(asking, || context.clone()).await?;
        // The call writes nothing, so a lost reply is not indeterminate.
        let error = |failure: Failure| self.client.error(failure.of_other_request(), context.clone());
        let (mut views, mut refusal) = (Vec::new(), None);
        for (node, outcome) in &votes.received {
            let Ok(reply) = outcome else { continue };
            let texts = reply.texts().map_err(error)?;
            let numbers: Option<Vec<i64>> = texts.iter().take(4).map(|text| text.parse().ok()).collect();
            let Some([status, fence, waiters, time]) = numbers.as_deref() else {
                return Err(error(reply.unexpected()));
            };
            if *status != 1 {
                let refused = self.attempt().refusal(*status, context.clone());
                refusal = Some(refused.unwrap_or_else(|| error(reply.unexpected())));
                continue;
            }
            nodes.node(*node).observe(time.unsigned_abs());
            let token = FencingToken::new(fence.unsigned_abs());
            let view = read(token, waiters.unsigned_abs(), &texts[4..]);
            views.push(view.ok_or_else(|| error(reply.unexpected()))?);
        }
        let majority = votes.deployment.majority();
        if majority == 1
            && let Some(only) = views.pop()
        {
            return Ok(only); // of one node
        }
        match refusal {
            _ if views.len() >= majority => Ok(agree(&views, majority)),
            Some(refusal) => Err(refusal),
            None => Err(error(votes.failure())),
        }
    }

    /// Revokes the lock, from one holder only if it is named as the server knows it.
    pub(crate) async fn force_release(&self, holder: Option<&str>) -> Result<bool, Error> {
        let attempt = LockRequest { owner: None, ..self.clone() }.attempt();
        let context = || self.client.context(Operation::ForceRelease, &self.name);
        let call = attempt.force(holder);
        let _revoked = Revoked(self);
        let deciding = pin!(async {
            let decided = decide(&self.client, &attempt, &call, false).await;
            decided.map_err(|failure| self.client.error(failure, context()))
        });
        let decision = self.client.run(deciding, context).await?;
        match decision.answer {
            Answer::Final(revoked @ 0..) => Ok(revoked > 0),
            _ => Err(self.client.refusal(&attempt, &decision.reply, context())),
        }
    }

    pub(crate) fn describe(&self, kind: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct(kind);
        text.field("name", &self.name);
        if let Some(owner) = &self.owner {
            text.field("owner", owner);
        }
        text.field("options", &self.options).finish_non_exhaustive()
    }
}

/// A request to revoke the lock. The server may have served it although its reply was lost, or the
/// call was dropped.
struct Revoked<'a>(&'a LockRequest);

impl Drop for Revoked<'_> {
    fn drop(&mut self) {
        self.0.client.note_revoked(&self.0.name);
    }
}
