//! The delay of a live waiter behind dead ones, after the lock is released.

use redlatch::Options;

use super::{BOUND, NAME, queued, waiters, waiting};
use crate::support::{
    AnyLock, Deployment, Kind, Protocol, Stopwatch, Topology, Wake, Worker, open_at, patient, soon,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    /// The connections remain: the server continues to count the waiter as a subscriber.
    Stopped,
}

/// Dead waiters queued before a live one.
#[derive(Clone, Copy, Debug)]
struct Case {
    topology: Topology,
    holder: Kind,
    /// Groups of waiters, in the order in which they queue.
    dead: &'static [(Kind, Wake, usize)],
    end: End,
    living: (Kind, Wake),
    may_publish: bool,
}

const POLLING_MUTEXES: Case = Case {
    topology: Topology::Standalone,
    holder: Kind::Mutex,
    dead: &[(Kind::Mutex, Wake::Poll, 20)],
    end: End::Killed,
    living: (Kind::Mutex, Wake::Push),
    may_publish: true,
};

/// The user's part of a URL. A user without the right to publish has all other rights.
async fn user(deployment: &Deployment, may_publish: bool) -> &'static str {
    if may_publish {
        return "";
    }
    for server in deployment.masters() {
        server
            .run::<()>(&["ACL", "SETUSER", "quiet", "on", ">secret", "~*", "&*", "+@all", "-publish"])
            .await;
    }
    "quiet:secret@"
}

struct QueuedWaiters {
    deployment: Deployment,
    holder: AnyLock,
    user: &'static str,
    workers: Vec<Worker>,
}

impl Case {
    async fn lock(
        self,
        deployment: &Deployment,
        user: &str,
        kind: Kind,
        wake: Wake,
        options: Options,
    ) -> AnyLock {
        let ports: Vec<u16> = deployment.entrances().iter().map(|server| server.port()).collect();
        let host = format!("{user}127.0.0.1");
        let opened = open_at(self.topology, &host, &ports, Protocol::Resp3, wake, options);
        kind.lock(&opened.await.unwrap(), NAME)
    }

    /// Queues the waiters that are to die behind a holder.
    async fn prepare(self) -> (QueuedWaiters, crate::support::AnyGuard) {
        let deployment = Deployment::start(self.topology).await;
        let user = user(&deployment, self.may_publish).await;
        let holder = self.lock(&deployment, user, self.holder, Wake::Push, patient()).await;
        let guard = holder.lock().await.unwrap();
        let (mut workers, mut count) = (Vec::new(), 0);
        for (kind, wake, number) in self.dead {
            workers.push(waiters(&deployment, user, *kind, *wake, *number));
            count += *number as u64;
            queued(&deployment, count).await;
        }
        (QueuedWaiters { deployment, holder, user, workers }, guard)
    }

    fn dead_count(self) -> u64 {
        self.dead.iter().map(|(_, _, number)| *number as u64).sum()
    }

    /// The time from the release until the live waiter acquires.
    async fn delay(self) -> Stopwatch {
        let (mut prepared, guard) = self.prepare().await;
        let (kind, wake) = self.living;
        let living = self.lock(&prepared.deployment, prepared.user, kind, wake, waiting()).await;
        let living = tokio::spawn(async move { living.lock().await });
        queued(&prepared.deployment, self.dead_count() + 1).await;
        prepared.end(self.end);
        let start = Stopwatch::start();
        guard.release().await.unwrap();
        let granted = soon("the live waiter acquires", living).await.unwrap().unwrap();
        let took = start.stop();
        drop(granted);
        drop(prepared);
        took
    }

    async fn is_at_most_one_claim(self) {
        let took = self.delay().await;
        println!("FIG {took:?}: {self:?}");
        assert!(took.undisturbed() < BOUND, "{took:?}: {self:?}");
    }
}

impl QueuedWaiters {
    fn end(&mut self, end: End) {
        match end {
            End::Killed => self.workers.drain(..).for_each(Worker::kill),
            End::Stopped => self.workers.iter().for_each(Worker::stop),
        }
    }
}

macro_rules! delays {
    ($($name:ident = $case:expr;)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                $case.is_at_most_one_claim().await;
            }
        )+
    };
}

delays! {
    twenty_killed_polling_mutex_waiters_take_one_claim = POLLING_MUTEXES;
    twenty_killed_notified_mutex_waiters_take_one_claim =
        Case { dead: &[(Kind::Mutex, Wake::Push, 20)], ..POLLING_MUTEXES };
    twenty_killed_mutex_waiters_take_one_claim_of_a_polling_one =
        Case { living: (Kind::Mutex, Wake::Poll), ..POLLING_MUTEXES };
    killed_polling_and_notified_mutex_waiters_take_one_claim = Case {
        dead: &[(Kind::Mutex, Wake::Push, 5), (Kind::Mutex, Wake::Poll, 5), (Kind::Mutex, Wake::Push, 5)],
        ..POLLING_MUTEXES
    };
    stopped_mutex_waiters_take_one_claim =
        Case { dead: &[(Kind::Mutex, Wake::Push, 4)], end: End::Stopped, ..POLLING_MUTEXES };
    stopped_reentrant_waiters_take_one_claim = Case {
        holder: Kind::Reentrant,
        dead: &[(Kind::Reentrant, Wake::Push, 4)],
        end: End::Stopped,
        living: (Kind::Reentrant, Wake::Push),
        ..POLLING_MUTEXES
    };
    killed_reentrant_waiters_take_one_claim = Case {
        holder: Kind::Reentrant,
        dead: &[(Kind::Reentrant, Wake::Poll, 20)],
        living: (Kind::Reentrant, Wake::Push),
        ..POLLING_MUTEXES
    };
    killed_readers_take_one_claim_of_a_writer = Case {
        holder: Kind::Write,
        dead: &[(Kind::Read, Wake::Poll, 8)],
        living: (Kind::Write, Wake::Push),
        ..POLLING_MUTEXES
    };
    killed_writers_take_one_claim_of_a_writer = Case {
        holder: Kind::Write,
        dead: &[(Kind::Write, Wake::Poll, 8)],
        living: (Kind::Write, Wake::Push),
        ..POLLING_MUTEXES
    };
    killed_writers_take_one_claim_of_a_reader = Case {
        holder: Kind::Write,
        dead: &[(Kind::Write, Wake::Poll, 8)],
        living: (Kind::Read, Wake::Push),
        ..POLLING_MUTEXES
    };
    killed_writers_take_one_claim_of_a_writer_beside_a_reader = Case {
        holder: Kind::Read,
        dead: &[(Kind::Write, Wake::Poll, 8)],
        living: (Kind::Write, Wake::Poll),
        ..POLLING_MUTEXES
    };
    killed_readers_and_writers_take_one_claim_of_a_writer = Case {
        holder: Kind::Write,
        dead: &[(Kind::Read, Wake::Poll, 4), (Kind::Write, Wake::Poll, 4), (Kind::Read, Wake::Push, 4)],
        living: (Kind::Write, Wake::Push),
        ..POLLING_MUTEXES
    };
    stopped_readers_and_writers_take_one_claim_of_a_writer = Case {
        holder: Kind::Write,
        dead: &[(Kind::Read, Wake::Push, 4), (Kind::Write, Wake::Push, 4)],
        end: End::Stopped,
        living: (Kind::Write, Wake::Push),
        ..POLLING_MUTEXES
    };
    stopped_writers_take_one_claim_of_a_reader = Case {
        holder: Kind::Write,
        dead: &[(Kind::Write, Wake::Push, 4)],
        end: End::Stopped,
        living: (Kind::Read, Wake::Push),
        ..POLLING_MUTEXES
    };
    killed_waiters_without_the_right_to_publish_take_one_claim =
        Case { dead: &[(Kind::Mutex, Wake::Push, 10)], may_publish: false, ..POLLING_MUTEXES };
    killed_writers_without_the_right_to_publish_take_one_claim = Case {
        holder: Kind::Write,
        dead: &[(Kind::Write, Wake::Push, 10)],
        living: (Kind::Write, Wake::Push),
        may_publish: false,
        ..POLLING_MUTEXES
    };
    killed_waiters_behind_sentinels_take_one_claim = Case {
        topology: Topology::Sentinel,
        dead: &[(Kind::Mutex, Wake::Poll, 8)],
        ..POLLING_MUTEXES
    };
    killed_waiters_of_a_quorum_take_one_claim = Case {
        topology: Topology::Quorum3,
        dead: &[(Kind::Mutex, Wake::Poll, 8)],
        ..POLLING_MUTEXES
    };
    stopped_waiters_of_a_quorum_take_one_claim = Case {
        topology: Topology::Quorum3,
        dead: &[(Kind::Mutex, Wake::Push, 4)],
        end: End::Stopped,
        ..POLLING_MUTEXES
    };
    killed_writers_of_a_quorum_take_one_claim = Case {
        topology: Topology::Quorum3,
        holder: Kind::Write,
        dead: &[(Kind::Write, Wake::Poll, 4), (Kind::Read, Wake::Poll, 4)],
        living: (Kind::Write, Wake::Push),
        ..POLLING_MUTEXES
    };
    killed_waiters_of_a_cluster_take_one_claim = Case {
        topology: Topology::Cluster,
        dead: &[(Kind::Mutex, Wake::Push, 8)],
        ..POLLING_MUTEXES
    };
    killed_readers_of_a_cluster_take_one_claim_of_a_writer = Case {
        topology: Topology::Cluster,
        holder: Kind::Write,
        dead: &[(Kind::Read, Wake::Push, 4), (Kind::Write, Wake::Push, 4)],
        living: (Kind::Write, Wake::Push),
        ..POLLING_MUTEXES
    };
}

/// Waiting writers keep new readers out; dead ones for at most one claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_writers_keep_readers_out_for_one_claim() {
    for end in [End::Killed, End::Stopped] {
        let case = Case {
            holder: Kind::Read,
            dead: &[(Kind::Write, Wake::Push, 8)],
            end,
            living: (Kind::Read, Wake::Push),
            ..POLLING_MUTEXES
        };
        let (mut prepared, guard) = case.prepare().await;
        let living = case.lock(&prepared.deployment, "", Kind::Read, Wake::Push, waiting()).await;
        let living = tokio::spawn(async move { living.lock().await });
        queued(&prepared.deployment, case.dead_count() + 1).await;
        prepared.end(end);
        let start = Stopwatch::start();
        let granted = soon("the reader acquires", living).await.unwrap().unwrap();
        let took = start.stop();
        println!("FIG {took:?}: {case:?}");
        assert!(took.undisturbed() < BOUND, "{took:?}: {case:?}");
        drop(granted);
        assert!(
            prepared.deployment.is_held_by(&prepared.holder, &guard).await,
            "the first reader still holds the lock"
        );
    }
}
