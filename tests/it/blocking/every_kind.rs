//! Every kind of lock, several together, and tickets, from threads without a runtime.

use std::time::Duration;

use redlatch::{Context, Error, LeaseEnd, Member, Mode, Name, Owner};

use super::{Fixture, LONG};
use crate::support::{Topology, patient};

fn every_kind_is_acquired_and_released_on(topology: Topology) {
    let fixture = Fixture::start(topology);
    let options = patient().ttl(LONG);
    let (locks, other) = (fixture.locks(options.clone()), fixture.locks(options));
    let limit = Duration::from_millis(1);

    let (mutex, rival) = (locks.mutex("mutex").unwrap(), other.mutex("mutex").unwrap());
    let guard = mutex.lock().unwrap();
    assert!(fixture.has("lock:mutex"));
    assert!(rival.try_lock().unwrap().is_none());
    assert!(matches!(rival.lock_timeout(limit), Err(Error::TimedOut { .. })));
    assert!(rival.is_locked().unwrap() && rival.is_held_by(guard.lease()).unwrap());
    let (last, token) = (rival.inspect().unwrap().fencing_token, guard.check().unwrap());
    // A node that is the last to grant the lock may have accepted the rival's token before.
    let is_later = topology == Topology::Quorum3 && last > token;
    assert!(last == token || is_later, "{last:?} after {token:?}");
    guard.release().unwrap();
    assert!(!fixture.has("lock:mutex"));
    let first = mutex.run(|lease| lease.check()).unwrap();
    assert!(rival.run_timeout(LONG, |lease| lease.check()).unwrap() > first);

    let owner = Owner::new();
    let reentrant = locks.reentrant("reentrant", &owner).unwrap();
    let outer = reentrant.lock().unwrap();
    let inner = reentrant.try_lock().unwrap().unwrap();
    assert_eq!((inner.owner(), inner.check().unwrap()), (&owner, outer.check().unwrap()));
    inner.release().unwrap();
    let rival = other.reentrant("reentrant", &Owner::new()).unwrap();
    assert!(rival.try_lock().unwrap().is_none());
    assert!(reentrant.is_held_by(&owner).unwrap());
    assert!(rival.force_release().unwrap());
    assert!(matches!(outer.release(), Err(Error::NotHeld { .. } | Error::Lost { .. })));
    assert!(!fixture.has("lock:reentrant"));

    let (rw, rival) = (locks.rwlock("rw").unwrap(), other.rwlock("rw").unwrap());
    let writing = rw.write().unwrap();
    assert!(rival.try_read().unwrap().is_none() && rival.try_write().unwrap().is_none());
    let reading = writing.downgrade().unwrap();
    let beside = rival.read().unwrap();
    assert_eq!(rival.inspect().unwrap().mode, Mode::Read);
    assert!(matches!(rival.write_timeout(limit), Err(Error::TimedOut { .. })));
    reading.release().unwrap();
    beside.release().unwrap();
    rival.run_write(|lease| lease.check()).unwrap();
    rival.run_read(|lease| lease.check()).unwrap();
    assert!(!fixture.has("lock:rw"));

    let names = ["a", "b"].map(|name| locks.mutex(name).unwrap());
    let rival = other.mutex("b").unwrap();
    let both = locks.all(names).unwrap();
    let guard = both.lock().unwrap();
    guard.check().unwrap();
    assert_eq!(guard.leases().iter().count(), 2);
    assert!(fixture.has("lock:a") && rival.try_lock().unwrap().is_none());
    guard.release().unwrap();
    assert!(!fixture.has("lock:[ab]"));
    let guard = rival.lock().unwrap();
    assert!(both.try_lock().unwrap().is_none());
    let timed_out = both.run_timeout(limit, |_| -> Result<(), Error> { panic!("it holds one of two") });
    assert!(matches!(timed_out, Err(Error::TimedOut { .. })), "{timed_out:?}");
    fixture.is_released("lock:a");
    guard.release().unwrap();
    let kinds = [
        locks.mutex("a").unwrap().into(),
        locks.reentrant("c", &owner).unwrap().into(),
        Member::Read(locks.rwlock("d").unwrap().into()),
        Member::Write(locks.rwlock("e").unwrap().into()),
    ];
    let all = locks.all(kinds).unwrap();
    let names: Vec<_> = all.names().map(|name| name.as_str().to_owned()).collect();
    assert_eq!(names, ["a", "c", "d", "e"]);
    let lost = all.run(|leases| {
        assert!(other.rwlock("e")?.force_release_write()?);
        let of_e = leases.get("e").unwrap();
        assert_eq!(locks.block_on(of_e.lost())?, LeaseEnd::Revoked);
        Err::<(), _>(leases.check().unwrap_err())
    });
    let lost_name = lost.as_ref().unwrap_err().context().and_then(Context::lock).map(Name::as_str);
    assert!(matches!(&lost, Err(Error::Lost { .. })) && lost_name == Some("e"), "{lost:?}");
    assert!(!fixture.has("lock:[a-e]"));

    // Calls that were given up are undone in the background.
    for client in [&locks, &other] {
        client.settled().unwrap();
        assert!(client.is_idle(), "{client:?}");
    }
}

#[test]
fn every_kind_is_acquired_and_released_on_one_server() {
    every_kind_is_acquired_and_released_on(Topology::Standalone);
}

#[test]
fn every_kind_is_acquired_and_released_on_a_cluster() {
    every_kind_is_acquired_and_released_on(Topology::Cluster);
}

#[test]
fn every_kind_is_acquired_and_released_behind_sentinel() {
    every_kind_is_acquired_and_released_on(Topology::Sentinel);
}

#[test]
fn every_kind_is_acquired_and_released_on_a_quorum() {
    every_kind_is_acquired_and_released_on(Topology::Quorum3);
}

/// The client that made the ticket has ended by then, with its thread.
fn tickets_of_every_kind_continue_on(topology: Topology) {
    let fixture = Fixture::start(topology);
    let options = patient().ttl(LONG);
    let (locks, other) = (fixture.locks(options.clone()), fixture.locks(options));
    let owner = Owner::new();
    let mutex = locks.mutex("mutex").unwrap().lock().unwrap();
    let nested = locks.reentrant("nested", &owner).unwrap().lock().unwrap();
    let reading = locks.rwlock("read").unwrap().with_owner(&owner).read().unwrap();
    let writing = locks.rwlock("write").unwrap().write().unwrap();
    let token = mutex.check().unwrap();
    drop(locks);
    let [mutex, nested, reading, writing] = [
        mutex.into_ticket().unwrap(),
        nested.into_ticket().unwrap(),
        reading.into_ticket().unwrap(),
        writing.into_ticket().unwrap(),
    ];
    let guard = other.mutex("mutex").unwrap().adopt(&mutex).unwrap();
    assert_eq!(guard.check().unwrap(), token);
    let again = other.mutex("mutex").unwrap().adopt(&mutex).map(drop);
    assert!(matches!(again, Err(Error::Lost { .. })), "{again:?}");
    guard.release().unwrap();
    let guard = other.reentrant("nested", &Owner::new()).unwrap().adopt(&nested).unwrap();
    assert_eq!(guard.owner(), &owner);
    guard.release().unwrap();
    other.rwlock("read").unwrap().adopt_read(&reading).unwrap().release().unwrap();
    other.rwlock("write").unwrap().adopt_write(&writing).unwrap().release().unwrap();
    assert!(!fixture.has("lock:*"));
}

#[test]
fn tickets_of_every_kind_continue_on_one_server() {
    tickets_of_every_kind_continue_on(Topology::Standalone);
}

#[test]
fn tickets_of_every_kind_continue_on_a_cluster() {
    tickets_of_every_kind_continue_on(Topology::Cluster);
}

#[test]
fn tickets_of_every_kind_continue_behind_sentinel() {
    tickets_of_every_kind_continue_on(Topology::Sentinel);
}

#[test]
fn tickets_of_every_kind_continue_on_a_quorum() {
    tickets_of_every_kind_continue_on(Topology::Quorum3);
}

#[test]
fn a_lost_lease_becomes_no_ticket_and_its_guard_is_returned() {
    let fixture = Fixture::start(Topology::Standalone);
    let locks = fixture.locks(patient().ttl(LONG));
    let mutex = locks.mutex("x").unwrap();
    let guard = mutex.lock().unwrap();
    assert!(mutex.force_release().unwrap());
    let revoked = guard.renew();
    assert!(matches!(revoked, Err(Error::Lost { .. })), "{revoked:?}");
    let refused = guard.into_ticket().unwrap_err();
    assert!(matches!(refused.error(), Error::Lost { .. }), "{refused:?}");
    let guard = refused.into_guard();
    assert_eq!(guard.lease().end(), Some(LeaseEnd::Revoked));
    assert!(matches!(guard.release(), Err(Error::Lost { .. } | Error::NotHeld { .. })));
}
