//! Work that has ended when the server fails.

use redlatch::Error;

use crate::support::{Kind, Server, eventually};

const KINDS: [Kind; 4] = [Kind::Mutex, Kind::Reentrant, Kind::Read, Kind::Write];

/// A caller that got the error of the release would do the work again.
#[tokio::test(flavor = "multi_thread")]
async fn its_value_is_returned_although_the_release_fails_for_now() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let refuses = async |writes: bool| {
        server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", if writes { "1" } else { "0" }]).await;
    };
    for kind in KINDS {
        let lock = kind.lock(&locks, kind.name());
        let work = async |_| {
            refuses(true).await;
            Ok::<_, Error>(42)
        };
        assert_eq!(lock.run(work).await.unwrap(), 42, "{kind:?}");
        assert!(server.is_locked(&lock).await, "{kind:?}: the server has refused the release");
        refuses(false).await;
        eventually("it is released", || async { !server.is_locked(&lock).await }).await;
    }
    let both = locks.all([locks.mutex("a").unwrap(), locks.mutex("b").unwrap()]).unwrap();
    let work = async |_| {
        refuses(true).await;
        Ok::<_, Error>(42)
    };
    assert_eq!(both.run(work).await.unwrap(), 42);
    refuses(false).await;
    drop((both, locks));
    server.assert_nothing_left().await;
}
