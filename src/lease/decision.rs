//! [`decide`]: a request that takes effect if a majority of the nodes says so.

use super::attempt::Attempt;
use super::client::Client;
use crate::wire::{Answer, Call, Failure, Reply, Votes, WaitFor};

/// How often [`retry`] sends a request before it fails.
const TRIES: u32 = 3;

/// The outcome of a request that needs a majority.
pub(crate) struct Decision {
    pub(crate) answer: Answer,
    /// One of the replies with this answer.
    pub(crate) reply: Reply,
    pub(super) votes: Votes,
}

/// Sends a request to all nodes and finds the answer of a majority; a positive number means "yes".
/// With `trusts_silence`, as for a valid lease, nodes that do not respond may have held the lock,
/// provided that a majority responds.
pub(crate) async fn decide(
    client: &Client,
    attempt: &Attempt,
    call: &Call<'_>,
    trusts_silence: bool,
) -> Result<Decision, Failure> {
    let nodes = &client.nodes;
    let mut votes = nodes.ask(call, nodes.all_nodes(), &attempt.in_flight, WaitFor::Majority(1)).await;
    votes.doubt_negatives();
    let deployment = nodes.deployment;
    let (mut yes, mut no) = (Vec::new(), Vec::new());
    for (index, (_, outcome)) in votes.received.iter().enumerate() {
        match outcome.as_ref().map(Reply::answer) {
            Ok(Ok(answer @ Answer::Final(1..))) => yes.push((index, answer)),
            Ok(Ok(answer)) => no.push((index, answer)),
            Ok(Err(failure)) if deployment.decides_alone() => return Err(failure),
            _ => {}
        }
    }
    let some_did = !yes.is_empty();
    let (silent, answered) = (votes.missing().len(), deployment.nodes - votes.missing().len());
    let may_count_silent = trusts_silence && some_did && answered >= deployment.majority();
    let decided = if yes.len() >= deployment.majority()
        || may_count_silent && yes.len() + silent >= deployment.majority()
    {
        yes.into_iter().max_by_key(|(_, answer)| if let Answer::Final(number) = answer { *number } else { 0 })
    } else if no.len() > deployment.max_failures() {
        no.into_iter().next() // the other nodes cannot change that
    } else {
        None
    };
    match decided {
        Some((index, answer)) => match votes.received[index].1.clone() {
            Ok(reply) => Ok(Decision { answer, reply, votes }),
            Err(failure) => Err(failure),
        },
        // A second delivery may find nothing to do on the nodes that did it.
        None if some_did => Err(votes.failure().with_effect()),
        None => Err(votes.failure()),
    }
}

/// Sends a request again while that may help.
pub(super) async fn retry(client: &Client, attempt: &Attempt, call: &Call<'_>) -> Result<Decision, Failure> {
    let (mut tries_left, mut unknown) = (TRIES, false);
    loop {
        tries_left -= 1;
        match decide(client, attempt, call, true).await {
            Err(failure) if failure.is_transient() && tries_left > 0 => unknown |= failure.is_indeterminate(),
            outcome => return outcome.map_err(|failure| failure.with_effect_if(unknown)),
        }
    }
}
