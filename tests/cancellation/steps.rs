//! A future that is taken step by step, so that it can be dropped at each of them.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::network::{Net, TICK, Whose};

pub(super) type Work = Pin<Box<dyn Future<Output = ()>>>;

/// The longest sleep at a time while nothing passes: well within the time limit of a request.
const PAUSE: Duration = Duration::from_millis(200);

/// The longest that a walk takes, on the paused clock.
const LONGEST: Duration = Duration::from_secs(120);

/// Where a walk ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The future was done after so many steps.
    Done(usize),
    /// It was not done.
    Stopped,
}

/// The future, and how many steps it has left.
///
/// A step is: it is about to be polled; it was polled, and is pending; something passed of what it sends and hears;
/// something happened elsewhere. Before, between and after them is every point at which it can be dropped.
struct Walk {
    future: Work,
    waker: Arc<Woken>,
    steps: usize,
    last: usize,
}

struct Woken {
    is: AtomicBool,
    driver: Waker,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.is.store(true, Ordering::SeqCst);
        self.driver.wake_by_ref();
    }
}

impl Walk {
    /// True if it was the last one.
    fn steps(&mut self) -> bool {
        self.steps += 1;
        self.steps > self.last
    }
}

impl Future for Walk {
    type Output = End;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<End> {
        while self.waker.is.swap(false, Ordering::SeqCst) {
            if self.steps() {
                return Poll::Ready(End::Stopped);
            }
            let waker = Waker::from(Arc::clone(&self.waker));
            if self.future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return Poll::Ready(End::Done(self.steps));
            }
            if self.steps() {
                return Poll::Ready(End::Stopped);
            }
        }
        Poll::Pending
    }
}

/// Takes `last` steps, unless the future is done before, and gives it back. What the `world` does it does one after the other,
/// each time that nothing else can happen but that time passes; or `early`, after so many steps.
pub(super) async fn walk(
    net: &Net,
    future: Work,
    world: &mut VecDeque<Work>,
    early: Option<usize>,
    last: usize,
) -> (End, Work) {
    let driver = std::future::poll_fn(|context| Poll::Ready(context.waker().clone())).await;
    let waker = Arc::new(Woken { is: AtomicBool::new(true), driver });
    let mut walk = Walk { future, waker, steps: 0, last };
    let start = Instant::now();
    let mut pause = TICK;
    loop {
        tokio::select! {
            biased;
            end = &mut walk => return (end, walk.future),
            () = sleep(pause) => {}
        }
        net.note();
        while net.step(Whose::Rival) {}
        let now = early.is_some_and(|early| walk.steps >= early) && !world.is_empty();
        if now || !net.step(Whose::Subject) {
            match world.pop_front() {
                Some(event) => net.flow_beside("the world goes on", event).await,
                None => {
                    assert!(start.elapsed() < LONGEST, "not done within {LONGEST:?}");
                    pause = (pause * 2).min(PAUSE);
                    continue;
                }
            }
        }
        pause = TICK;
        if walk.steps() {
            return (End::Stopped, walk.future);
        }
    }
}
