//! The futures of calls, which the tasks of a program carry, are small.

use crate::support::Server;

/// About two kilobytes: what only some calls need is allocated by those.
#[tokio::test]
async fn futures_of_calls_are_small() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let (mutex, rwlock) = (locks.mutex("mutex").unwrap(), locks.rwlock("rwlock").unwrap());
    let acquiring = [
        size_of_val(&mutex.lock()),
        size_of_val(&mutex.try_lock()),
        size_of_val(&rwlock.read()),
        size_of_val(&rwlock.try_write()),
    ];
    assert!(acquiring.iter().all(|size| *size <= 2_560), "{acquiring:?}");
    let (guard, reading) = (mutex.lock().await.unwrap(), rwlock.read().await.unwrap());
    let (releasing, leaving) = (guard.release(), reading.release());
    let sizes = [size_of_val(&releasing), size_of_val(&leaving)];
    assert!(sizes.iter().all(|size| *size <= 2_048), "{sizes:?}");
    releasing.await.unwrap();
    leaving.await.unwrap();
}
