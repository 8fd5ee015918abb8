//! Takes a future step by step, so that it can be dropped after each step.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::network::{ConnectionOwner, Network, TICK};

pub(super) type Work = Pin<Box<dyn Future<Output = ()>>>;

/// The longest sleep while nothing is delivered: well below the node timeout.
const PAUSE: Duration = Duration::from_millis(200);

/// The longest time that a future may take, on the paused clock.
const LONGEST: Duration = Duration::from_secs(120);

/// Where the steps ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The future was done after this many steps.
    Done(usize),
    /// The future was not done after the last step.
    Stopped,
}

/// The future, and the number of its steps.
///
/// A step is one of: the future is about to be polled; it was polled and is pending; one of its
/// requests or replies was delivered; an event happened elsewhere. Every point at which the future
/// can be dropped is before, between or after these steps.
struct Stepper {
    future: Work,
    waker: Arc<WakeFlag>,
    steps: usize,
    last: usize,
}

struct WakeFlag {
    flag: AtomicBool,
    driver: Waker,
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.flag.store(true, Ordering::SeqCst);
        self.driver.wake_by_ref();
    }
}

impl Stepper {
    /// Counts a step. True if it was the last one.
    fn count_step(&mut self) -> bool {
        self.steps += 1;
        self.steps > self.last
    }
}

impl Future for Stepper {
    type Output = End;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<End> {
        while self.waker.flag.swap(false, Ordering::SeqCst) {
            if self.count_step() {
                return Poll::Ready(End::Stopped);
            }
            let waker = Waker::from(Arc::clone(&self.waker));
            if self.future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return Poll::Ready(End::Done(self.steps));
            }
            if self.count_step() {
                return Poll::Ready(End::Stopped);
            }
        }
        Poll::Pending
    }
}

/// Takes `last` steps, unless the future is done before, and returns it. The events of `world`
/// happen one after the other, each once nothing can be delivered; or `early`, after that many
/// steps.
pub(super) async fn take_steps(
    net: &Network,
    future: Work,
    world: &mut VecDeque<Work>,
    early: Option<usize>,
    last: usize,
) -> (End, Work) {
    let driver = std::future::poll_fn(|context| Poll::Ready(context.waker().clone())).await;
    let waker = Arc::new(WakeFlag { flag: AtomicBool::new(true), driver });
    let mut stepper = Stepper { future, waker, steps: 0, last };
    let start = Instant::now();
    let mut pause = TICK;
    loop {
        tokio::select! {
            biased;
            end = &mut stepper => return (end, stepper.future),
            () = sleep(pause) => {}
        }
        net.record_in_flight();
        while net.step(ConnectionOwner::Rival) {}
        let now = early.is_some_and(|early| stepper.steps >= early) && !world.is_empty();
        if now || !net.step(ConnectionOwner::Subject) {
            match world.pop_front() {
                Some(event) => net.flow_beside("the next event", event).await,
                None => {
                    assert!(start.elapsed() < LONGEST, "not done within {LONGEST:?}");
                    pause = (pause * 2).min(PAUSE);
                    continue;
                }
            }
        }
        pause = TICK;
        if stepper.count_step() {
            return (End::Stopped, stepper.future);
        }
    }
}
