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
    for hostile in ["", "me", "a b", ":fence", "00000000-0000-0000-0000-00000000000", &plain, capital] {
        assert!(hostile.parse::<Owner>().is_err(), "{hostile:?}");
        assert!(serde_json::from_str::<Owner>(&format!("{hostile:?}")).is_err());
    }
}
