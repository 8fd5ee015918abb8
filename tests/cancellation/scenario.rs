//! Cases: a future with its scenario, the ways in which it is dropped, and what must be left
//! afterwards.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use redlatch::simulation::skip_with_the_runtime;
use redlatch::{Error, Locks, Options};
use tokio::runtime::Handle;

use super::locks::{AnyGuard, AnyLock, KINDS, Kind};
use super::network::{ALL, ConnectionOwner, Network, Order, Outage, TICK};
use super::server::Server;
use super::steps::{End, Work, take_steps};

/// The default node timeout, which no case changes.
pub(super) const NODE_TIMEOUT: Duration = Duration::from_secs(1);

/// What happens to the connections after the drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterDrop {
    /// Everything is delivered.
    Flows,
    /// The connections break. Their requests are lost.
    Breaks,
    /// The connections break. Their requests are delivered, but no reply.
    BreaksBehind,
    /// The connections break, their requests are lost, and new connections are refused for longer
    /// than a request is retried.
    BreaksForLong,
    /// The connections fall silent. Their requests arrive long after the client has reconnected.
    Hangs,
    /// Like `Hangs`, and the client has reconnected before the future is dropped. The future was
    /// not polled meanwhile.
    Overtaken,
}

const EVERYTHING: [AfterDrop; 5] =
    [AfterDrop::Flows, AfterDrop::Breaks, AfterDrop::BreaksBehind, AfterDrop::Hangs, AfterDrop::Overtaken];

/// What a scenario starts from: new clients of the same servers, and a free lock.
pub(super) struct Fixture {
    pub(super) net: Rc<Network>,
    pub(super) kind: Kind,
    pub(super) locks: Locks,
    rival_locks: Locks,
    pub(super) lock: AnyLock,
    /// The same lock through the rival, which the subject excludes.
    pub(super) rival: AnyLock,
    pub(super) name: String,
}

/// A future, and what happens around it.
pub(super) struct Scenario {
    /// The future that is dropped.
    pub(super) future: Work,
    /// Events during the future, one after the other.
    pub(super) world: VecDeque<Work>,
    /// Events after the future is dropped or done.
    pub(super) rest: Vec<Work>,
    /// Guards that the same client holds before and after.
    pub(super) kept: Vec<AnyGuard>,
}

impl Scenario {
    pub(super) fn of(future: impl Future<Output = ()> + 'static) -> Scenario {
        Scenario { future: Box::pin(future), world: VecDeque::new(), rest: Vec::new(), kept: Vec::new() }
    }

    pub(super) fn meanwhile(mut self, event: impl Future<Output = ()> + 'static) -> Scenario {
        self.world.push_back(Box::pin(event));
        self
    }

    pub(super) fn afterwards(mut self, event: impl Future<Output = ()> + 'static) -> Scenario {
        self.rest.push(Box::pin(event));
        self
    }

    pub(super) fn keeping(mut self, guard: AnyGuard) -> Scenario {
        self.kept.push(guard);
        self
    }
}

impl Fixture {
    /// Another lock of this kind through the rival.
    pub(super) fn rival_of(&self, name: &str) -> AnyLock {
        self.kind.rival().lock(&self.rival_locks, name)
    }

    /// How many waiters are queued for the lock.
    pub(super) fn queued(&self) -> usize {
        let key = format!("{{{}}}:waiters", self.lock.key());
        self.net.servers.iter().map(|server| waiters(server, &key)).min().unwrap_or(0)
    }
}

/// One way to drop the future.
#[derive(Clone, Copy)]
struct DropPoint {
    point: usize,
    /// After how many steps the events happen, if not once nothing can be delivered.
    early: Option<usize>,
    then: AfterDrop,
}

/// A future and all the ways in which it is dropped.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) nodes: usize,
    /// Whether each server has a replica.
    pub(super) has_replicas: bool,
    pub(super) kinds: &'static [Kind],
    /// How the first node fails once the scenario is prepared.
    pub(super) outage: Option<Outage>,
    pub(super) order: Order,
    pub(super) options: Options,
    /// The least number of points at which the future must be dropped.
    pub(super) least: usize,
    /// What must be in flight at some drop: parts of what the [`Network`] has
    /// [recorded](Network::record_in_flight). Otherwise the case misses its purpose.
    pub(super) passes: Vec<&'static str>,
    /// Whether the servers have no scripts, so that each is sent twice.
    pub(super) has_no_scripts: bool,
    /// If not 0, the events also happen after every n-th step.
    pub(super) early: usize,
    /// Whether connections also break for longer than requests are retried.
    pub(super) may_outlast: bool,
}

impl Case {
    pub(super) fn new(name: &'static str, least: usize, passes: &[&'static str]) -> Case {
        let order = Order::RequestsFirst;
        Case {
            name,
            nodes: 1,
            has_replicas: false,
            kinds: &KINDS,
            outage: None,
            order,
            options: Options::new(),
            least,
            passes: passes.to_vec(),
            has_no_scripts: false,
            early: 0,
            may_outlast: false,
        }
    }

    pub(super) fn kinds(self, kinds: &'static [Kind]) -> Case {
        Case { kinds, ..self }
    }

    pub(super) fn with(mut self, change: impl FnOnce(Options) -> Options) -> Case {
        self.options = change(self.options);
        self
    }

    pub(super) fn cold(self) -> Case {
        Case { has_no_scripts: true, ..self }
    }

    pub(super) fn early(self, every: usize) -> Case {
        Case { early: every, ..self }
    }

    pub(super) fn outlasting(self) -> Case {
        Case { may_outlast: true, ..self }
    }

    /// With a quorum of three servers.
    pub(super) fn of_three(self) -> Case {
        Case { nodes: 3, ..self }
    }

    /// With a server that has a replica.
    pub(super) fn replicated(self) -> Case {
        Case { has_replicas: true, ..self }
    }

    /// With a quorum of which one node fails, which must be recorded.
    pub(super) fn without_one(mut self, how: Outage) -> Case {
        self.passes.push(if how == Outage::Silent { "held back" } else { "connect refused" });
        Case { outage: Some(how), ..self.of_three() }
    }

    pub(super) fn ordered(self, order: Order) -> Case {
        Case { order, ..self }
    }

    /// Drops the future at each of its points, in each way.
    pub(super) fn run(self, scenario: impl AsyncFn(&Fixture) -> Scenario) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        // Deliver everything at once, without tokio's cooperative budget.
        runtime.block_on(tokio::task::unconstrained(async {
            skip_with_the_runtime();
            let start = if self.has_replicas { Server::start_replicated } else { Server::start };
            let servers = std::iter::repeat_with(start).take(self.nodes).collect();
            let net = Rc::new(Network::before(servers, self.order));
            // The rival does not wait for replicas: a key on the master alone must block it, too.
            // Its releases leave nothing held.
            let options = self.options.clone().replicas(0, TICK).hold_at_least(Duration::ZERO);
            let rival = net.flow("the rival connects", open(&net, ConnectionOwner::Rival, &options)).await;
            net.flow("the rival subscribes", subscribe(&rival)).await;
            for kind in self.kinds {
                self.drop_everywhere(&net, &rival, *kind, &scenario).await;
            }
        }));
    }

    async fn drop_everywhere(
        &self,
        net: &Rc<Network>,
        rival: &Locks,
        kind: Kind,
        scenario: &impl AsyncFn(&Fixture) -> Scenario,
    ) {
        // Once without a drop: this loads the scripts.
        let no_drop = DropPoint { point: usize::MAX, early: None, then: AfterDrop::Flows };
        let end = self.run_once(net, rival, kind, no_drop, scenario).await;
        let End::Done(steps) = end else { panic!("{end:?}") };
        let mut drops: Vec<_> = EVERYTHING.iter().map(|then| (0, None, *then)).collect();
        drops.extend(self.may_outlast.then_some((0, None, AfterDrop::BreaksForLong)));
        if self.early > 0 {
            // The point at which the events happen is also where the future is dropped first.
            let early = (0..steps)
                .step_by(self.early)
                .flat_map(|at| [AfterDrop::Flows, AfterDrop::Overtaken].map(|then| (at, Some(at), then)));
            drops.extend(early);
        }
        net.take_recorded();
        for (first, early, then) in drops {
            let mut point = first;
            while self.run_once(net, rival, kind, DropPoint { point, early, then }, scenario).await
                == End::Stopped
            {
                point += 1;
            }
            println!("{} of {}, {then:?}, early {early:?}: {point} points", self.name, kind.name());
            assert!(point >= self.least || early.is_some(), "only {point} points");
        }
        let recorded = net.take_recorded();
        for expected in &self.passes {
            let is_recorded = recorded.iter().any(|name| name.contains(expected));
            assert!(
                is_recorded,
                "{} of {} was never dropped at {expected:?}, but at {recorded:?}",
                self.name,
                kind.name()
            );
        }
    }

    async fn run_once(
        &self,
        net: &Rc<Network>,
        rival: &Locks,
        kind: Kind,
        drop_point: DropPoint,
        scenario: &impl AsyncFn(&Fixture) -> Scenario,
    ) -> End {
        let DropPoint { point, early, then } = drop_point;
        let tasks = || Handle::current().metrics().num_alive_tasks();
        net.flow("the runtime is idle", tokio::time::sleep(TICK)).await;
        let tasks_before = tasks();
        let early_at = early.unwrap_or(usize::MAX);
        let name = format!("{}-{}-{then:?}-{point}-{early_at}", self.name, kind.name());
        let locks =
            net.flow("the subject connects", open(net, ConnectionOwner::Subject, &self.options)).await;
        let fixture = Fixture {
            net: Rc::clone(net),
            kind,
            lock: kind.lock(&locks, &name),
            rival: kind.rival().lock(rival, &name),
            rival_locks: rival.clone(),
            locks,
            name: name.clone(),
        };
        let Scenario { future, mut world, rest, kept } =
            net.flow("the scenario is prepared", scenario(&fixture)).await;
        if let Some(how) = self.outage {
            net.fail(0, how);
        }
        if self.has_no_scripts {
            net.servers.iter().for_each(|server| server.run(&["SCRIPT", "FLUSH"]));
        }
        let (end, future) = take_steps(net, future, &mut world, early, point).await;
        let at = format!("{name} {end:?}");
        match then {
            AfterDrop::Flows => {}
            AfterDrop::Breaks => net.cut(true),
            AfterDrop::BreaksBehind => net.cut(false),
            AfterDrop::BreaksForLong => {
                net.cut(true);
                net.fail(ALL, Outage::Refuses);
            }
            AfterDrop::Hangs => net.silence(true),
            AfterDrop::Overtaken => {
                net.silence(true);
                let other = fixture.locks.mutex("other").unwrap();
                let connected = async { while other.is_locked().await.is_err() {} };
                net.flow(&format!("{at}: reconnected"), connected).await;
            }
        }
        drop(future);
        if then == AfterDrop::BreaksForLong {
            net.flow("the retries end", tokio::time::sleep(3 * NODE_TIMEOUT)).await;
            net.restore();
        }
        net.flow(&format!("{at}: settled"), fixture.locks.settled()).await;
        for event in world.into_iter().chain(rest) {
            net.flow(&format!("{at}: the next event"), event).await;
        }
        net.restore();
        let Fixture { rival, locks, .. } = fixture;
        for guard in kept {
            let got = net.flow("the rival tries", rival.try_lock()).await;
            assert!(matches!(got, Ok(None)), "{at}: the hold from before is lost: {got:?}");
            let released = net.flow("the release", guard.release()).await;
            assert!(released.is_ok(), "{at}: {released:?}");
        }
        net.eventually(&format!("{at}: nothing is left"), || left(net, &name).is_empty()).await;
        let got = net.flow("the rival tries", rival.try_lock()).await;
        let Ok(Some(guard)) = got else { panic!("{at}: the lock is not free: {got:?}") };
        net.flow("the release", guard.release()).await.unwrap();
        net.eventually(&format!("{at}: idle"), || locks.is_idle()).await;
        drop((rival, fixture.rival_locks, locks, fixture.lock));
        net.eventually(&format!("{at}: no task is left"), || tasks() <= tasks_before).await;
        assert_eq!(left(net, &name), [""; 0], "{at}");
        // Token counters and marks remain for a while: thousands of runs would make KEYS slow.
        net.servers.iter().for_each(|server| server.run(&["FLUSHDB"]));
        end
    }
}

/// How many waiters a queue has. Marks have scores of 2^52 and more.
fn waiters(server: &Server, queue: &str) -> usize {
    server.run(&["ZCOUNT", queue, "-inf", "(4503599627370496"])
}

/// The keys of a lock, except for its token counter and a queue that has only marks, if these have
/// a TTL.
fn left(net: &Network, name: &str) -> Vec<String> {
    let keys = |server: &Server| server.run::<Vec<String>>(&["EVAL", LEFT, "0", &format!("*{name}*")]);
    net.servers.iter().flat_map(keys).collect()
}

/// One script for all keys of a server: this runs after each step of each case.
const LEFT: &str = r"
local left = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local may_remain = key:sub(-6) == ':fence'
    or key:sub(-8) == ':waiters' and redis.call('ZCOUNT', key, '-inf', '(4503599627370496') == 0
  if not may_remain or redis.call('PTTL', key) == -1 then
    left[#left + 1] = key
  end
end
return left";

pub(super) async fn open(net: &Network, whose: ConnectionOwner, options: &Options) -> Locks {
    let urls = net.urls(whose);
    match urls.as_slice() {
        [url] => Locks::builder().server(url).options(options.clone()).connect().await.unwrap(),
        _ => Locks::builder().quorum(urls).options(options.clone()).connect().await.unwrap(),
    }
}

/// Waits for a held lock until the limit, so that the client subscribes.
async fn subscribe(locks: &Locks) {
    let lock = locks.mutex("subscribe").unwrap();
    let guard = lock.lock().await.unwrap();
    let waited = lock.lock_timeout(Duration::from_millis(100)).await;
    assert!(matches!(waited, Err(Error::TimedOut { .. })), "{waited:?}");
    guard.release().await.unwrap();
}
