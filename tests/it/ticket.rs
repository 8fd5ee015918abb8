//! `Ticket`: what it is read from is checked, and `Debug` hides the attempt and the owner.

use std::time::Duration;

use redlatch::{Owner, Ticket};
use serde_json::{Value, json};

use crate::support::{AnyLock, KINDS, Server};

const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

fn with(field: &str, value: Value) -> Result<Ticket, String> {
    let mut ticket = json!({
        "name": "n", "kind": "reentrant", "attempt": ATTEMPT, "owner": "o", "token": 7, "left_ms": 5,
    });
    ticket[field] = value;
    serde_json::from_value(ticket).map_err(|error| error.to_string())
}

#[test]
fn a_ticket_that_breaks_a_rule_is_refused_by_its_field() {
    let read = with("left_ms", json!(1_500)).unwrap();
    assert_eq!(
        (read.name(), read.kind(), read.valid_for()),
        ("n", "reentrant", Duration::from_millis(1_500))
    );
    assert_eq!(read.fencing_token().unwrap().get(), 7);
    assert_eq!(read.owner(), Some(&Owner::from_word("o").unwrap()));
    let longest = "a".repeat(128);
    assert!(with("attempt", json!(longest)).is_ok() && with("token", Value::Null).is_ok());
    assert!(with("token", json!((1u64 << 53) - 1)).is_ok() && with("spare_tokens", json!(999)).is_ok());
    for (field, value) in [
        ("name", json!("")),
        ("kind", json!("latch")),
        ("kind", json!("mutex")), // which has no owner
        ("attempt", json!("")),
        ("attempt", json!("two words")),
        ("attempt", json!("a".repeat(129))),
        ("owner", Value::Null),
        ("owner", json!("two words")),
        ("owner", json!("mode")),
        ("token", json!(0)),
        ("token", json!(1u64 << 53)),
        ("spare_tokens", json!(1_000)),
    ] {
        let error = with(field, value.clone()).expect_err(&format!("{field}: {value}"));
        let named = if value == "mutex" { "owner" } else { field };
        assert!(error.contains(&format!("`{named}`")), "{field}: {value}: {error}");
    }
    for (field, value) in
        [("left_ms", json!(-1)), ("token", json!("7")), ("more", json!(1)), ("name", json!(1))]
    {
        assert!(with(field, value.clone()).is_err(), "{field}: {value}");
    }
    assert!(serde_json::from_str::<Ticket>("{}").is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn debug_output_of_a_ticket_has_no_secret() {
    let server = Server::start().await;
    let locks = server.locks().await;
    for kind in KINDS {
        let lock: AnyLock = kind.lock(&locks, kind.name());
        let ticket = lock.lock().await.unwrap().into_ticket().unwrap();
        let (text, shown) = (serde_json::to_value(&ticket).unwrap(), format!("{ticket:?} {ticket:#?}"));
        let attempt = text["attempt"].as_str().unwrap();
        assert!(attempt.len() == 32 && !shown.contains(attempt), "{shown}");
        if let Some(owner) = text["owner"].as_str() {
            assert!(!shown.contains(owner), "{shown}");
        }
        assert!(shown.contains(kind.name()), "{shown}");
        lock.adopt(&serde_json::from_value(text).unwrap()).await.unwrap().release().await.unwrap();
    }
    drop(locks);
    server.assert_nothing_left().await;
}
