//! One future, dropped at each of its steps: what it is made in front of, and what must be left of it.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use redlatch::simulation::skip_with_the_runtime;
use redlatch::{Error, Locks, Options};
use tokio::runtime::Handle;

use super::locks::{AnyGuard, AnyLock, Kind};
use super::network::{ALL, Away, Net, Order, TICK, Whose};
use super::server::Server;
use super::steps::{End, Work, walk};

/// The default, which no case changes.
pub(super) const NODE_TIMEOUT: Duration = Duration::from_secs(1);

/// What becomes of the connections that the future leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Everything passes.
    Flows,
    /// They break. What has been sent is lost.
    Breaks,
    /// They break. What has been sent arrives, but no answer.
    BreaksBehind,
    /// They break. What has been sent is lost, and for longer than a request is tried no others are made.
    BreaksForLong,
    /// They fall silent. What has been sent arrives when the client has long connected anew.
    Hangs,
    /// The same, and the client has connected anew before the future is dropped, which was not polled meanwhile.
    Overtaken,
}

const EVERYTHING: [Then; 5] = [Then::Flows, Then::Breaks, Then::BreaksBehind, Then::Hangs, Then::Overtaken];

/// What a case is made with: fresh clients of the same servers, and a lock that nobody has.
pub(super) struct Stage {
    pub(super) net: Rc<Net>,
    pub(super) kind: Kind,
    pub(super) locks: Locks,
    pub(super) lock: AnyLock,
    /// The same lock, for one who is excluded.
    pub(super) rival: AnyLock,
    pub(super) name: String,
}

/// What is walked through.
pub(super) struct Scene {
    /// What is dropped.
    pub(super) future: Work,
    /// What happens meanwhile.
    pub(super) world: VecDeque<Work>,
    /// What happens once it is dropped or done.
    pub(super) rest: Vec<Work>,
    /// What the same client has, before and after.
    pub(super) kept: Vec<AnyGuard>,
}

impl Scene {
    pub(super) fn of(future: impl Future<Output = ()> + 'static) -> Scene {
        Scene { future: Box::pin(future), world: VecDeque::new(), rest: Vec::new(), kept: Vec::new() }
    }

    pub(super) fn meanwhile(mut self, event: impl Future<Output = ()> + 'static) -> Scene {
        self.world.push_back(Box::pin(event));
        self
    }

    pub(super) fn afterwards(mut self, event: impl Future<Output = ()> + 'static) -> Scene {
        self.rest.push(Box::pin(event));
        self
    }

    pub(super) fn keeping(mut self, guard: AnyGuard) -> Scene {
        self.kept.push(guard);
        self
    }
}

impl Stage {
    /// How many are queued for the lock.
    pub(super) fn queued(&self) -> usize {
        let key = format!("{{{}}}:waiters", self.lock.key());
        self.net.servers.iter().map(|server| waiters(server, &key)).min().unwrap_or(0)
    }
}

/// One way to drop it.
#[derive(Clone, Copy)]
struct Fall {
    point: usize,
    /// After how many steps things happen meanwhile, if not as soon as nothing else can.
    early: Option<usize>,
    then: Then,
}

/// A future, and all the ways in which it is dropped.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) nodes: usize,
    /// Each has a replica.
    pub(super) replicated: bool,
    pub(super) kinds: &'static [Kind],
    /// How the first node is away once the scene is set.
    pub(super) away: Option<Away>,
    pub(super) order: Order,
    pub(super) options: Options,
    /// How many points it must have at least.
    pub(super) least: usize,
    /// What it must pass: parts of what a [`Net`] has [noted](Net::note). Else it does not cover what it is there for.
    pub(super) passes: Vec<&'static str>,
    /// Servers do not know the scripts: each is sent twice.
    pub(super) cold: bool,
    /// What happens meanwhile, happens at each of the points.
    pub(super) early: bool,
    /// Connections also break for longer than what was sent is sent again by itself.
    pub(super) outlasts: bool,
}

pub(super) const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

impl Case {
    pub(super) fn new(name: &'static str, least: usize, passes: &[&'static str]) -> Case {
        let order = Order::RequestsFirst;
        Case {
            name,
            nodes: 1,
            replicated: false,
            kinds: &KINDS,
            away: None,
            order,
            options: Options::new(),
            least,
            passes: passes.to_vec(),
            cold: false,
            early: false,
            outlasts: false,
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
        Case { cold: true, ..self }
    }

    pub(super) fn early(self) -> Case {
        Case { early: true, ..self }
    }

    pub(super) fn outlasting(self) -> Case {
        Case { outlasts: true, ..self }
    }

    /// In front of a quorum.
    pub(super) fn of_three(self) -> Case {
        Case { nodes: 3, ..self }
    }

    /// In front of a server with a replica.
    pub(super) fn replicated(self) -> Case {
        Case { replicated: true, ..self }
    }

    /// In front of a quorum of which one node is not reached, for which there is a word.
    pub(super) fn without_one(mut self, how: Away) -> Case {
        self.passes.push(if how == Away::Silent { "held back" } else { "connect refused" });
        Case { away: Some(how), ..self.of_three() }
    }

    pub(super) fn ordered(self, order: Order) -> Case {
        Case { order, ..self }
    }

    /// Drops the future at each of its points, in each way.
    pub(super) fn run(self, scene: impl AsyncFn(&Stage) -> Scene) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        // What is let pass is let pass at once, however much that is.
        runtime.block_on(tokio::task::unconstrained(async {
            skip_with_the_runtime();
            let start = if self.replicated { Server::start_replicated } else { Server::start };
            let servers = std::iter::repeat_with(start).take(self.nodes).collect();
            let net = Rc::new(Net::before(servers, self.order));
            // Whatever replicas have, what is left on the server is in its way.
            let options = self.options.clone().replicas(0, TICK);
            let rival = net.flow("the rival opens", open(&net, Whose::Rival, &options)).await;
            net.flow("the rival listens", listen(&rival)).await;
            for kind in self.kinds {
                self.drop_everywhere(&net, &rival, *kind, &scene).await;
            }
        }));
    }

    async fn drop_everywhere(
        &self,
        net: &Rc<Net>,
        rival: &Locks,
        kind: Kind,
        scene: &impl AsyncFn(&Stage) -> Scene,
    ) {
        // Once without a drop: from then on, servers know the scripts.
        let whole = Fall { point: usize::MAX, early: None, then: Then::Flows };
        let end = self.play(net, rival, kind, whole, scene).await;
        let End::Done(steps) = end else { panic!("{end:?}") };
        let mut falls: Vec<_> = EVERYTHING.iter().map(|then| (0, None, *then)).collect();
        falls.extend(self.outlasts.then_some((0, None, Then::BreaksForLong)));
        if self.early {
            // A drop before is as any other.
            let early =
                (0..steps).flat_map(|at| [Then::Flows, Then::Overtaken].map(|then| (at, Some(at), then)));
            falls.extend(early);
        }
        net.passed();
        for (first, early, then) in falls {
            let mut point = first;
            while self.play(net, rival, kind, Fall { point, early, then }, scene).await == End::Stopped {
                point += 1;
            }
            println!("{} of {}, {then:?}, early {early:?}: {point} points", self.name, kind.name());
            assert!(point >= self.least || early.is_some(), "{point} points: is anything enumerated at all?");
        }
        let passed = net.passed();
        for word in &self.passes {
            let is_passed = passed.iter().any(|it| it.contains(word));
            assert!(
                is_passed,
                "{} of {} was never dropped at {word:?}, but at {passed:?}",
                self.name,
                kind.name()
            );
        }
    }

    async fn play(
        &self,
        net: &Rc<Net>,
        rival: &Locks,
        kind: Kind,
        fall: Fall,
        scene: &impl AsyncFn(&Stage) -> Scene,
    ) -> End {
        let Fall { point, early, then } = fall;
        let tasks = || Handle::current().metrics().num_alive_tasks();
        net.flow("quiet", tokio::time::sleep(TICK)).await;
        let tasks_before = tasks();
        let early_at = early.unwrap_or(usize::MAX);
        let name = format!("{}-{}-{then:?}-{point}-{early_at}", self.name, kind.name());
        let locks = net.flow("it opens", open(net, Whose::Subject, &self.options)).await;
        let stage = Stage {
            net: Rc::clone(net),
            kind,
            lock: kind.lock(&locks, &name),
            rival: kind.rival().lock(rival, &name),
            locks,
            name: name.clone(),
        };
        let Scene { future, mut world, rest, kept } = net.flow("its scene is set", scene(&stage)).await;
        if let Some(how) = self.away {
            net.lose(0, how);
        }
        if self.cold {
            net.servers.iter().for_each(|server| server.run(&["SCRIPT", "FLUSH"]));
        }
        let (end, future) = walk(net, future, &mut world, early, point).await;
        let at = format!("{name} {end:?}");
        match then {
            Then::Flows => {}
            Then::Breaks => net.cut(true),
            Then::BreaksBehind => net.cut(false),
            Then::BreaksForLong => {
                net.cut(true);
                net.lose(ALL, Away::Refuses);
            }
            Then::Hangs => net.hang(true),
            Then::Overtaken => {
                net.hang(true);
                let other = stage.locks.mutex("other").unwrap();
                let connected = async { while other.is_locked().await.is_err() {} };
                net.flow(&format!("{at}: connected anew"), connected).await;
            }
        }
        drop(future);
        if then == Then::BreaksForLong {
            net.flow("tried in vain", tokio::time::sleep(3 * NODE_TIMEOUT)).await;
            net.restore();
        }
        net.flow(&format!("{at}: settled"), stage.locks.settled()).await;
        for event in world.into_iter().chain(rest) {
            net.flow(&format!("{at}: the world goes on"), event).await;
        }
        net.restore();
        let Stage { rival, locks, .. } = stage;
        for guard in kept {
            let got = net.flow("a try", rival.try_lock()).await;
            assert!(matches!(got, Ok(None)), "{at}: what was held before is held no more: {got:?}");
            let released = net.flow("given back", guard.release()).await;
            assert!(released.is_ok(), "{at}: {released:?}");
        }
        net.eventually(&format!("{at}: nothing is left"), || left(net, &name).is_empty()).await;
        let got = net.flow("a try", rival.try_lock()).await;
        let Ok(Some(guard)) = got else { panic!("{at}: the lock is not free: {got:?}") };
        net.flow("given back", guard.release()).await.unwrap();
        net.eventually(&format!("{at}: idle"), || locks.is_idle()).await;
        drop((rival, locks, stage.lock));
        net.eventually(&format!("{at}: no task is left"), || tasks() <= tasks_before).await;
        assert_eq!(left(net, &name), [""; 0], "{at}");
        end
    }
}

/// How many waiters a queue has. Above them are marks, which have scores of 2^52 and more.
fn waiters(server: &Server, queue: &str) -> usize {
    server.run(&["ZCOUNT", queue, "-inf", "(4503599627370496"])
}

/// The keys of a lock, except for its fencing counter and a queue that only has marks: both must
/// have a TTL.
fn left(net: &Net, name: &str) -> Vec<String> {
    let keys = net.servers.iter().flat_map(|server| {
        let keys = server.run::<Vec<String>>(&["KEYS", &format!("*{name}*")]);
        keys.into_iter().filter(|key| {
            let is_marks = key.ends_with(":waiters") && waiters(server, key) == 0;
            let may_stay = key.ends_with(":fence") || is_marks;
            // It may have expired since the keys were listed.
            !may_stay || server.run::<i64>(&["PTTL", key]) == -1
        })
    });
    keys.collect()
}

pub(super) async fn open(net: &Net, whose: Whose, options: &Options) -> Locks {
    let urls = net.urls(whose);
    match urls.as_slice() {
        [url] => Locks::builder().server(url).options(options.clone()).connect().await.unwrap(),
        _ => Locks::builder().quorum(urls).options(options.clone()).connect().await.unwrap(),
    }
}

/// Waits in vain, and has a subscription from then on.
async fn listen(locks: &Locks) {
    let lock = locks.mutex("listened").unwrap();
    let guard = lock.lock().await.unwrap();
    let waited = lock.lock_timeout(Duration::from_millis(100)).await;
    assert!(matches!(waited, Err(Error::TimedOut { .. })), "{waited:?}");
    guard.release().await.unwrap();
}
