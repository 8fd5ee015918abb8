//! Work that ends by itself, as the server fails, or as the client is closed.

use std::time::Duration;

use redlatch::{Context, Error, Operation};

use crate::support::{KINDS, Server, eventually, soon};

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

/// The operation of an error says whether the work had begun.
#[tokio::test(flavor = "multi_thread")]
async fn work_that_a_close_drops_has_an_error_of_its_own() {
    for kind in KINDS {
        let server = Server::start().await;
        let locks = server.locks().await;
        let lock = kind.lock(&locks, kind.name());
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let work = lock.clone();
        let working = tokio::spawn(async move {
            let work = async |_| {
                begun.send(()).unwrap();
                std::future::pending::<Result<(), Error>>().await
            };
            lock.run(work).await
        });
        has_begun.await.unwrap();
        locks.close(Duration::from_secs(60)).await.unwrap();
        let dropped = soon("the work is dropped", working).await.unwrap().unwrap_err();
        let late = work.run(async |_| Ok::<_, Error>(())).await.unwrap_err();
        let operations = [&dropped, &late].map(|error| {
            assert!(matches!(error, Error::Closed { .. }), "{error:?}");
            error.context().map(Context::operation)
        });
        assert_eq!(operations, [Some(Operation::Hold), Some(Operation::Acquire)], "{kind:?}");
    }
}
