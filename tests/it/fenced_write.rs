//! `fenced::set`: a late write changes nothing.

use redlatch::fenced;

use crate::support::Server;

#[tokio::test]
async fn a_write_after_one_with_a_larger_token_is_refused() {
    let server = Server::start().await;
    let mutex = server.locks().await.mutex("report").unwrap();
    let mut redis = server.connection().await;
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let guard = mutex.lock().await.unwrap();
        tokens.push(guard.lease().fencing_token().unwrap());
        guard.release().await.unwrap();
    }
    let (early, late) = (tokens[0], tokens[1]);
    let mut set = async |token, value: &str| {
        fenced::set(&mut redis, "{report}:text", "{report}:token", token, value).await.unwrap()
    };
    assert!(set(early, "first").await);
    assert!(set(late, "second").await);
    assert!(!set(early, "late").await);
    assert!(set(late, "again").await, "the same holder writes on");
    assert_eq!(server.run::<String>(&["GET", "{report}:text"]).await, "again");
    assert_eq!(server.run::<u64>(&["GET", "{report}:token"]).await, late.get());
    server.run::<()>(&["SET", "{report}:token", "spoilt"]).await;
    let error = fenced::set(&mut redis, "{report}:text", "{report}:token", late, "x").await.unwrap_err();
    assert!(error.to_string().contains("does not hold a token"), "{error}");
    assert_eq!(server.run::<String>(&["GET", "{report}:text"]).await, "again");
}
