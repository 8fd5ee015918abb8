//! What errors say: what failed and why, each once.

use std::error::Error as _;

use redlatch::{Error, Locks};

use crate::support::Server;

/// As `{:#}` of `anyhow` prints it.
fn chain(error: &Error) -> String {
    let sources = std::iter::successors(error.source(), |&source| source.source());
    std::iter::once(error.to_string()).chain(sources.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}

fn says(error: &Error, word: &str, times: usize) {
    let (text, chain) = (error.to_string(), chain(error));
    assert_eq!(text.matches(word).count(), times, "{text}");
    assert_eq!(chain.matches(word).count(), times, "{chain}");
}

#[tokio::test]
async fn errors_say_why_and_say_it_once() {
    // Nobody listens there.
    let (one, other) = ("redis://127.0.0.1:1/", "redis://127.0.0.1:2/");
    says(&Locks::open(one).await.unwrap_err(), "Connection refused", 1);
    let too_few = Locks::builder().quorum([one, other]).connect().await.unwrap_err();
    says(&too_few, "Connection refused", 2);
    let Error::NoQuorum { nodes, .. } = too_few else { panic!("{too_few:?}") };
    assert!(nodes.iter().all(|node| node.source().is_none() && node.to_string().contains("refused")));
    says(&Locks::open("http://127.0.0.1/").await.unwrap_err(), "URL did not parse", 1);

    let server = Server::start().await;
    server.run::<()>(&["ACL", "SETUSER", "shy", "on", ">secret", "~*", "+@all", "-eval", "-evalsha"]).await;
    let url = server.url().replace("redis://", "redis://shy:wrong@");
    says(&Locks::open(&url).await.unwrap_err(), "authentication failed", 1);
    let locks = Locks::open(&url.replace("wrong", "secret")).await.unwrap();
    let refused = locks.mutex("why").unwrap().try_lock().await.unwrap_err();
    says(&refused, "no permissions", 1);
    says(&refused, "mutex/acquire", 1);
    assert!(matches!(&refused, Error::Redis { cause, .. } if cause.code() == Some("NOPERM")), "{refused:?}");
    let unnamed = Error::from(locks.mutex("").unwrap_err());
    assert!(unnamed.source().is_none(), "{unnamed:?}");
}
