//! A hold that was passed on to a task which comes late.

use std::time::{Duration, Instant};

use crate::suite::local_turns::{contended, waiting};
use crate::support::{Kind, Server, patient, soon};

/// While its thread is busy, a task does not receive the hold that it was left. If hardly anything
/// is left of the lease then, it asks the server, which has the key of another attempt since.
#[tokio::test]
async fn a_hold_with_little_time_left_is_not_received() {
    let server = Server::start().await;
    let options = patient().ttl(Duration::from_secs(4)).local_turn(Duration::from_secs(1));
    let locks = server.locks_with(options).await;
    for kind in [Kind::Mutex, Kind::Write] {
        let lock = kind.lock(&locks, kind.name());
        let key = format!("lock:{}", kind.name());
        let dump = async || server.run::<Vec<u8>>(&["DUMP", &key]).await;
        let guard = contended(&lock).await;
        let valid = guard.lease().valid_until() - Instant::now();
        let (next, before) = (waiting(&lock).await, dump().await);
        guard.release().await.unwrap();
        // Nothing runs on this thread meanwhile, also not the timer that ends the turn.
        std::thread::sleep(valid * 4 / 5);
        let next = soon("the next task acquires", next).await.unwrap();
        assert_ne!(dump().await, before, "{kind:?}");
        next.release().await.unwrap();
    }
}
