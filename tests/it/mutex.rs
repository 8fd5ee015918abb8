use std::time::Duration;
use crate::support::{Server, soon};

#[tokio::test(flavor = "multi_thread")]
async fn mutex_standalone_smoke() {
    let server = Server::start().await;
    let locks = server.locks().await;
    let mutex = locks.mutex("backup").unwrap();
    let guard = soon("lock", mutex.lock()).await.unwrap();
    println!("{guard:?} {:?}", mutex.inspect().await.unwrap());
    assert!(mutex.try_lock().await.unwrap().is_none());
    let waiting = tokio::spawn({ let mutex = mutex.clone(); async move { mutex.lock().await } });
    let waiting2 = tokio::spawn({ let l = server.locks().await; async move { l.mutex("backup").unwrap().lock().await } });
    tokio::time::sleep(Duration::from_millis(300)).await;
    println!("{:?}", mutex.inspect().await.unwrap());
    let t = std::time::Instant::now();
    guard.release().await.unwrap();
    let g1 = soon("first", waiting).await.unwrap().unwrap();
    println!("{:?} {g1:?}", t.elapsed());
    drop(g1);
    let g2 = soon("second", waiting2).await.unwrap().unwrap();
    println!("{:?} {g2:?}", t.elapsed());
    g2.release().await.unwrap();
    println!("{:?}", mutex.inspect().await.unwrap());
    drop((mutex, locks));
    server.assert_nothing_left().await;
}
