//! Wakers that poll their task at once, on the thread that wakes it. The client must hold none of
//! its locks then, since the task may use the client.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::support::{LONGEST_WAIT, Server, patient};

struct Inline {
    task: Mutex<Pin<Box<dyn Future<Output = ()> + Send>>>,
    is_woken: AtomicBool,
}

impl Inline {
    fn run(task: impl Future<Output = ()> + Send + 'static) {
        let task: Mutex<Pin<Box<dyn Future<Output = ()> + Send>>> = Mutex::new(Box::pin(task));
        Arc::new(Inline { task, is_woken: AtomicBool::new(false) }).wake();
    }
}

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Ordering::SeqCst);
        while self.is_woken.load(Ordering::SeqCst) {
            // Another thread polls it, or this one does: that looks again.
            let Ok(mut task) = self.task.try_lock() else { return };
            if self.is_woken.swap(false, Ordering::SeqCst) {
                let waker = Waker::from(Arc::clone(&self));
                let _done = task.as_mut().poll(&mut Context::from_waker(&waker));
            }
        }
    }
}

/// Runs the test in a thread with a runtime of its own, which are left behind if they hang.
fn ends(test: impl AsyncFnOnce(Server) + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let _left = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = Server::start().await;
            test(server).await;
        });
        done.send(()).unwrap();
    });
    ended.recv_timeout(LONGEST_WAIT).expect("the client hangs");
}

#[test]
fn the_end_of_a_release_wakes_tasks_outside_of_all_locks() {
    ends(async |server: Server| {
        let locks = server.locks_with(patient()).await;
        let lock = locks.mutex("x").unwrap();
        for _ in 0..20 {
            drop(lock.lock().await.unwrap()); // released in the background
            let (done, ended) = tokio::sync::oneshot::channel();
            let settling = locks.clone();
            Inline::run(async move {
                settling.settled().await;
                done.send(settling.is_idle()).unwrap();
            });
            assert!(ended.await.unwrap());
        }
    });
}

#[test]
fn a_renewal_wakes_tasks_outside_of_all_locks() {
    ends(async |server: Server| {
        let locks = server.locks_with(patient().ttl(Duration::from_millis(300))).await;
        let guard = locks.mutex("x").unwrap().lock().await.unwrap();
        let (lease, client) = (guard.lease().clone(), locks.clone());
        let (done, ended) = tokio::sync::oneshot::channel();
        let mut polls = 0;
        Inline::run(async move {
            let work = poll_fn(|_| {
                polls += 1;
                // Each renewal polls it once or twice. It asks what takes the client's locks.
                if !client.is_idle() && polls < 6 { Poll::Pending } else { Poll::Ready(()) }
            });
            done.send(lease.while_held(work).await.is_ok()).unwrap();
        });
        let _is_held = ended.await.unwrap(); // on a busy machine, such a short lease may be lost
        let _ = guard.release().await;
    });
}
