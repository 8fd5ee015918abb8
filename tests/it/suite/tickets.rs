//! Tickets: a hold is handed over to another client.

use std::time::Duration;

use redlatch::{Error, LeaseEnd, Ticket};
use tokio::task::JoinSet;

use crate::support::{KINDS, Setup, eventually, renewed_by, soon, ttl};

/// As another process receives it.
fn sent(ticket: &Ticket) -> Ticket {
    serde_json::from_str(&serde_json::to_string(ticket).unwrap()).unwrap()
}

pub async fn a_hold_is_adopted_from_its_ticket(setup: Setup) {
    let (lock, next, rival) =
        (setup.lock("handed").await, setup.lock("handed").await, setup.rival("handed").await);
    let guard = lock.lock().await.unwrap();
    let (lease, token) = (guard.lease().clone(), guard.lease().fencing_token());
    let ticket = guard.into_ticket().unwrap();
    assert_eq!((ticket.name(), ticket.kind()), ("handed", setup.kind.name()));
    assert_eq!(ticket.fencing_token(), token);
    assert!(ticket.valid_for() > Duration::from_secs(1) && ticket.valid_for() < Duration::from_secs(30));
    assert_eq!(lease.end(), Some(LeaseEnd::Leaked));
    assert!(setup.deployment.is_locked(&rival).await, "it is not released");
    assert!(rival.try_lock().await.unwrap().is_none());
    let guard = next.adopt(&sent(&ticket)).await.unwrap();
    assert_eq!(guard.lease().fencing_token(), token);
    assert!(setup.deployment.is_held_by(&next, &guard).await && next.is_held_by(&guard).await);
    assert_eq!(setup.deployment.holds_and_token(&next).await.0, [1], "the same hold, not one more");
    setup.assert_conservative(&next, &guard).await;
    assert!(rival.try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
    assert!(!setup.deployment.is_locked(&rival).await, "nothing is left of the first guard");
    drop((lock, next, rival));
    setup.finish().await;
}

/// On a quorum, several that adopt a ticket at the same moment may divide the nodes: then none
/// succeeds, and the lock is free.
pub async fn one_of_several_adopts_a_ticket(setup: Setup) {
    let lock = setup.lock("contested").await;
    let rival = setup.rival("contested").await;
    for _ in 0..3 {
        let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
        let mut adopting = JoinSet::new();
        for _ in 0..4 {
            let patient = ttl(30_000).node_timeout(Duration::from_secs(30));
            let (lock, ticket) = (setup.lock_with("contested", patient).await, ticket.clone());
            adopting.spawn(async move { lock.adopt(&ticket).await });
        }
        let mut guards = Vec::new();
        for outcome in adopting.join_all().await {
            match outcome {
                Ok(guard) => guards.push(guard),
                Err(error) => {
                    let is_split = setup.nodes() > 1 && matches!(error, Error::NoQuorum { .. });
                    assert!(is_split || matches!(error, Error::Lost { .. }), "{error:?}");
                }
            }
        }
        assert!(guards.len() <= 1, "{guards:?}");
        if let Some(guard) = guards.pop() {
            assert!(setup.deployment.is_held_by(&lock, &guard).await);
            let late = setup.lock("contested").await.adopt(&ticket).await;
            assert!(matches!(late, Err(Error::Lost { .. })), "{late:?}");
            assert!(setup.deployment.is_held_by(&lock, &guard).await, "the late one changes nothing");
            guard.release().await.unwrap();
        } else {
            assert!(setup.nodes() > 1, "one server decides");
        }
        // What a loser had on a minority of the nodes is released in the background.
        soon("the lock is free", rival.lock()).await.unwrap().release().await.unwrap();
    }
    drop((lock, rival));
    setup.finish().await;
}

pub async fn an_adopted_hold_is_renewed_and_handed_on(setup: Setup) {
    let (lock, next) =
        (setup.lock_with("renewed", ttl(6_000)).await, setup.lock_with("renewed", ttl(6_000)).await);
    let mut guard = lock.lock().await.unwrap();
    let token = guard.lease().fencing_token();
    for adopter in [&next, &lock, &next] {
        guard = adopter.adopt(&guard.into_ticket().unwrap()).await.unwrap();
        renewed_by(guard.lease(), Duration::from_millis(1_500)).await;
        assert_eq!(guard.lease().fencing_token(), token);
        assert_eq!(setup.deployment.holds_and_token(&lock).await.0, [1]);
    }
    guard.release().await.unwrap();
    assert!(!setup.deployment.is_locked(&lock).await);
    drop((lock, next));
    setup.finish().await;
}

pub async fn a_ticket_ends_with_its_ttl(setup: Setup) {
    let lock = setup.lock_with("late", ttl(2_000)).await;
    let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
    eventually("the TTL ends the hold", || async { !setup.deployment.is_locked(&lock).await }).await;
    let late = lock.adopt(&ticket).await;
    assert!(matches!(late, Err(Error::Lost { .. })), "{late:?}");
    assert!(!setup.deployment.is_locked(&lock).await, "a ticket acquires nothing");
    drop(lock);
    setup.finish().await;
}

pub async fn a_ticket_of_a_revoked_hold_is_lost(setup: Setup) {
    let lock = setup.lock("revoked").await;
    let rival = setup.rival("revoked").await;
    let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
    assert!(lock.force_release().await.unwrap());
    let held = rival.lock().await.unwrap();
    let late = lock.adopt(&ticket).await;
    assert!(matches!(late, Err(Error::Lost { .. })), "{late:?}");
    assert!(setup.deployment.is_held_by(&rival, &held).await);
    assert!(!held.lease().is_lost());
    held.release().await.unwrap();
    let guard = lock.lock().await.unwrap();
    assert!(lock.force_release().await.unwrap());
    assert!(matches!(guard.lease().renew().await, Err(Error::Lost { .. })));
    let refused = guard.into_ticket();
    assert!(matches!(refused, Err(Error::Lost { .. })), "{refused:?}");
    drop((lock, rival));
    setup.finish().await;
}

pub async fn a_ticket_for_another_lock_is_refused(setup: Setup) {
    let locks = setup.client().await;
    let lock = setup.kind.lock(&locks, "this");
    let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
    setup.is_held_on_all_nodes(&lock).await;
    let before = setup.deployment.scripts_run().await;
    let mut refused = vec![(setup.kind.lock(&locks, "other").adopt(&ticket).await, "name")];
    for kind in KINDS {
        if kind != setup.kind {
            refused.push((kind.lock(&locks, "this").adopt(&ticket).await, "kind"));
        }
    }
    for (outcome, what) in refused {
        let is_named = matches!(&outcome, Err(Error::WrongTicket { differs, .. }) if *differs == what);
        assert!(is_named, "{what}: {outcome:?}");
    }
    let scripts = setup.deployment.scripts_run().await - before;
    assert!(scripts <= setup.repairs(), "no request was sent: {scripts}");
    lock.adopt(&ticket).await.unwrap().release().await.unwrap();
    drop((lock, locks));
    setup.finish().await;
}

/// The server gave the hold to the adopter, its reply is lost, and the request is sent again.
pub async fn adopt_counts_once_if_its_reply_is_lost(setup: Setup) {
    let proxy = setup.proxy().await;
    let lock = setup.lock("lossy").await;
    let next = setup.lock_behind(&proxy, "lossy", ttl(30_000)).await;
    next.lock().await.unwrap().release().await.unwrap(); // connected
    for _ in 0..4 {
        let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
        setup.lose_next_answer(&proxy);
        let guard = soon("the hold is adopted", next.adopt(&ticket)).await.unwrap();
        assert!(setup.deployment.is_held_by(&lock, &guard).await);
        assert_eq!(setup.deployment.holds_and_token(&lock).await.0, [1]);
        guard.release().await.unwrap();
        assert!(!setup.deployment.is_locked(&lock).await);
    }
    drop((lock, next));
    setup.finish().await;
}

pub async fn a_close_leaves_the_hold_of_a_ticket(setup: Setup) {
    let locks = setup.client().await;
    let lock = setup.kind.lock(&locks, "closed");
    let next = setup.lock("closed").await;
    let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
    locks.close(Duration::from_secs(60)).await.unwrap();
    let closed = lock.adopt(&ticket).await;
    assert!(matches!(closed, Err(Error::Closed { .. })), "{closed:?}");
    let guard = next.adopt(&ticket).await.unwrap();
    assert!(setup.deployment.is_held_by(&next, &guard).await);
    guard.release().await.unwrap();
    drop((lock, locks, next));
    setup.finish().await;
}
