//! `Owner`: text, serde, and the shortened form in `Debug` output.

use redlatch::{Error, Locks, Options, Owner, RwInspection};

use crate::support::Server;

#[test]
fn owner_survives_text_and_serde() {
    let owner = Owner::new();
    assert_ne!(owner, Owner::new());
    assert_eq!(owner.to_string().parse::<Owner>().unwrap(), owner);
    let json = serde_json::to_string(&owner).unwrap();
    assert_eq!(json, format!("\"{owner}\""));
    assert_eq!(serde_json::from_str::<Owner>(&json).unwrap(), owner);
    let plain = owner.to_string().replace('-', "");
    let capital = "0000000A-0000-0000-0000-000000000000";
    let (long, longer) = ("o".repeat(256), "o".repeat(257));
    for hostile in ["", "a b", ":fence", "mode", &longer] {
        assert!(hostile.parse::<Owner>().is_err(), "{hostile:?}");
        assert!(serde_json::from_str::<Owner>(&format!("{hostile:?}")).is_err());
    }
    // Owners of other libraries. The same UUID in another form is another owner, as on the server.
    for word in ["me", "8743c9c0-0795-4907-87fd-6c719a6b4586:61", "00000000-0000", &plain, capital, &long] {
        let other = word.parse::<Owner>().unwrap();
        assert_ne!(other, owner);
        assert_eq!(other.to_string(), word);
        assert_eq!(serde_json::from_str::<Owner>(&format!("{word:?}")).unwrap(), other);
    }
}

/// An owner read from a file may have a blank at its end.
#[test]
fn owner_error_shows_the_start_and_the_length_of_the_word() {
    let word = "8743c9c0-0795-4907-87fd-6c719a6b4586:61 ";
    let error = word.parse::<Owner>().unwrap_err();
    assert!(error.to_string().starts_with("\"8743c9c0…\" (40 bytes) is not an owner: "), "{error}");
    assert!(!error.to_string().contains("0795") && !format!("{error:?}").contains("0795"), "{error:?}");
}

fn assert_hidden(shown: &impl std::fmt::Debug, secret: &str) {
    for text in [format!("{shown:?}"), format!("{shown:#?}")] {
        let starts = secret.char_indices().map(|(end, _)| &secret[..end]);
        let shown = starts.filter(|start| text.contains(start)).map(|start| start.chars().count());
        let longest = shown.max().unwrap_or(0);
        assert!(!text.contains(secret) && longest <= 8, "{longest} characters of {secret} are in {text}");
    }
}

/// A complete owner allows its reader to enter the lock, and a complete attempt to release it.
#[tokio::test]
async fn debug_output_has_no_complete_owner() {
    let server = Server::start().await;
    let locks = server.locks().await;
    for word in
        ["8743c9c0-0795-4907-87fd-6c719a6b4586:61", "8743c9c0-0795-4907-87fd-6c719a6b4586", "tiny", "é"]
    {
        let owner = Owner::from_word(word).unwrap();
        assert_eq!(owner.to_string(), word);
        assert_hidden(&owner, word);
        if word.len() > 8 {
            assert_hidden(&Owner::from_word(&format!("{word} ")).unwrap_err(), word);
        }

        let (reentrant, rwlock) =
            (locks.reentrant("re", &Owner::new()).unwrap(), locks.rwlock("rw").unwrap());
        let (reentrant, rwlock) = (reentrant.with_owner(&owner), rwlock.with_owner(&owner));
        let inner = reentrant.lock().await.unwrap();
        let seen = reentrant.inspect().await.unwrap();
        assert_eq!(seen.holders[0].owner, word);
        assert_hidden(&(&reentrant, &rwlock, &inner, inner.lease(), &seen, &seen.holders[0]), word);
        assert!(
            serde_json::to_string(&seen).unwrap().contains(word),
            "serialized output has the complete owner"
        );
        let writing = rwlock.write().await.unwrap();
        let reading = rwlock.read().await.unwrap();
        let seen: RwInspection = rwlock.inspect().await.unwrap();
        assert_eq!(
            (seen.writer.as_ref().unwrap().owner.as_str(), seen.readers[0].owner.as_str()),
            (word, word)
        );
        assert_hidden(&(&writing, writing.lease(), &reading, reading.lease(), &seen), word);
        let deep = locks.with_options(Options::new().max_depth(1)).unwrap();
        let deep = deep.rwlock("rw").unwrap().with_owner(&owner).write().await.unwrap_err();
        assert_hidden(&(&deep, &locks), word);
        for released in [inner.release().await, writing.release().await, reading.release().await] {
            released.unwrap();
        }
    }
    let mutex = locks.mutex("m").unwrap();
    let guard = mutex.lock().await.unwrap();
    let attempt: String = server.run(&["GET", "lock:m"]).await;
    assert_hidden(&(&mutex, &guard, guard.lease(), mutex.inspect().await.unwrap(), &locks), &attempt);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn debug_output_has_no_password_or_attempt() {
    let server = Server::start().await;
    server.run::<()>(&["CONFIG", "SET", "requirepass", "s3cret"]).await;
    let url = server.url().replace("redis://", "redis://:s3cret@");
    let locks = Locks::open(&url).await.unwrap();
    let mutex = locks.mutex("quiet").unwrap();
    let guard = mutex.lock().await.unwrap();
    let shown = format!("{locks:?} {mutex:?} {guard:?} {:?}", guard.lease());
    let token: String = mutex.inspect().await.unwrap().holders[0].owner.clone();
    assert!(!shown.contains("s3cret") && !shown.contains(&token), "{shown}");
    guard.release().await.unwrap();
    let wrong = Locks::open(&url.replace("s3cret", "wr0ng")).await.unwrap_err();
    assert!(matches!(wrong, Error::Redis { .. }) && !format!("{wrong:?}").contains("wr0ng"), "{wrong:?}");
}
