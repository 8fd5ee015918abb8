//! Owners: who holds a lock, wherever he is.

use redlatch::Owner;

#[test]
fn reentrant_owners_travel_as_text_and_through_serde() {
    let owner = Owner::new();
    assert_ne!(owner, Owner::new());
    assert_eq!(owner.to_string().parse::<Owner>().unwrap(), owner);
    let json = serde_json::to_string(&owner).unwrap();
    assert_eq!(json, format!("\"{owner}\""));
    assert_eq!(serde_json::from_str::<Owner>(&json).unwrap(), owner);
    // In another form it would be another owner to the server.
    let plain = owner.to_string().replace('-', "");
    let capital = "0000000A-0000-0000-0000-000000000000";
    let (long, longer) = ("o".repeat(256), "o".repeat(257));
    for hostile in ["", "a b", ":fence", "mode", &plain, capital, &longer] {
        assert!(hostile.parse::<Owner>().is_err(), "{hostile:?}");
        assert!(serde_json::from_str::<Owner>(&format!("{hostile:?}")).is_err());
    }
    // Words of other libraries.
    for word in ["me", "8743c9c0-0795-4907-87fd-6c719a6b4586:61", "00000000-0000", &long] {
        let other = word.parse::<Owner>().unwrap();
        assert_eq!(other.to_string(), word);
        assert_eq!(serde_json::from_str::<Owner>(&format!("{word:?}")).unwrap(), other);
    }
}
