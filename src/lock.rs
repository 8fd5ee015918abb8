//! [`Lock`]: what the locks of all kinds are made of.

use std::fmt;
use std::sync::Arc;

use crate::error::Error;
use crate::fencing::FencingToken;
use crate::inspection::Inspection;
use crate::lease::{Attempt, Client, Kind, Target, settle};
use crate::name::Name;
use crate::options::Options;
use crate::owner::Owner;
use crate::wire::{Answer, Call, Until};

/// A name, with the client and the options to lock it with.
#[derive(Clone)]
pub(crate) struct Lock {
    pub(crate) client: Arc<Client>,
    pub(crate) options: Arc<Options>,
    pub(crate) name: Name,
}

impl Lock {
    pub(crate) fn target(&self, kind: &'static Kind, owner: Option<&Owner>) -> Target {
        Target {
            client: Arc::clone(&self.client),
            kind,
            name: self.name.clone(),
            options: Arc::clone(&self.options),
            owner: owner.map(Owner::to_string),
        }
    }

    fn attempt(&self, kind: &'static Kind) -> Attempt {
        Attempt::new(kind, self.name.clone(), Arc::clone(&self.options), None)
    }

    pub(crate) async fn inspect(&self, kind: &'static Kind) -> Result<Inspection, Error> {
        self.look(kind, None, Inspection::from_reply, Inspection::agreed).await
    }

    /// What the nodes see of the lock, or of one owner's part in it. `read` is given the last token, the number
    /// of waiters, and the rest of the answer; `agree` all that the nodes see, and how many decide.
    pub(crate) async fn look<T>(
        &self,
        kind: &'static Kind,
        owner: Option<&str>,
        read: fn(Option<FencingToken>, u64, &[String]) -> Option<T>,
        agree: fn(Vec<T>, usize) -> T,
    ) -> Result<T, Error> {
        let keys = [self.name.key(), self.name.fence(), self.name.waiters()];
        let call = Call::new(&kind.inspect, &keys);
        let call = owner.into_iter().fold(call, Call::text);
        let nodes = &self.client.nodes;
        let votes = nodes.ask(&call, nodes.everyone(), &Arc::default(), Until::Answered).await;
        let (mut views, mut refusal) = (Vec::new(), None);
        for (node, outcome) in &votes.cast {
            let Ok(reply) = outcome else { continue };
            let texts = reply.texts()?;
            let numbers: Option<Vec<i64>> = texts.iter().take(4).map(|text| text.parse().ok()).collect();
            let Some([status, fence, waiters, time]) = numbers.as_deref() else {
                return Err(reply.unexpected().into());
            };
            if *status != 1 {
                let error = self.attempt(kind).refusal(*status);
                refusal = Some(error.unwrap_or_else(|| reply.unexpected().into()));
                continue;
            }
            nodes.node(*node).observe(time.unsigned_abs());
            let token = FencingToken::from_reply(fence.unsigned_abs());
            views.push(read(token, waiters.unsigned_abs(), &texts[4..]).ok_or_else(|| reply.unexpected())?);
        }
        match refusal {
            _ if views.len() >= votes.majority() => Ok(agree(views, votes.majority())),
            Some(refusal) => Err(refusal),
            None => Err(votes.failure().into()),
        }
    }

    pub(crate) async fn force_release(&self, kind: &'static Kind) -> Result<bool, Error> {
        let attempt = self.attempt(kind);
        let settled = settle(&self.client, &attempt, &attempt.force()).await?;
        match settled.answer {
            Answer::Final(0) => Ok(false),
            Answer::Final(1..) => Ok(true),
            Answer::Final(answer) => {
                Err(attempt.refusal(answer).unwrap_or_else(|| settled.reply.unexpected().into()))
            }
            Answer::Busy(..) | Answer::TooLow(_) => Err(settled.reply.unexpected().into()),
        }
    }

    pub(crate) fn describe(&self, kind: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(kind).field("name", &self.name).field("options", &self.options).finish_non_exhaustive()
    }
}
