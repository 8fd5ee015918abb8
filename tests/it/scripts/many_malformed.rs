//! Malformed arguments of scripts for many locks: each call is refused as a whole.

use redis::Value;

use super::client::{Client, path};
use super::many::{KINDS, LockFixture, PROPOSAL, keys};
use crate::support::Server;

#[tokio::test]
async fn scripts_for_many_locks_refuse_malformed_arguments_and_change_nothing() {
    let server = Server::start().await;
    for kind in KINDS {
        let fixture = LockFixture { client: Client::of(&server).await, kind, is_proposing: false };
        let acquire = path(kind, "acquire") + "_many";
        let own: &[&str] = if kind == "mutex" { &["a"] } else { &["a", "o"] };
        let well_formed = [&["60000", "7", "60000"], own, own].concat();
        let names = [keys("m"), keys("n")].concat();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut malformed: Vec<(Vec<&str>, Vec<&str>)> = vec![
            (names.clone(), well_formed[..well_formed.len() - 1].to_vec()),
            (names.clone(), [&well_formed[..], &["a"]].concat()),
            (names[..5].to_vec(), well_formed.clone()),
            (vec![], vec!["60000", "7", "60000"]),
        ];
        let wrong: [&[&str]; 3] = [&["", "0", "1e3", "x"], &["x", "-7", "4503599627370496"], &["0", "x"]];
        for (place, values) in wrong.into_iter().enumerate() {
            for value in values {
                let mut arguments = well_formed.clone();
                arguments[place] = value;
                malformed.push((names.clone(), arguments));
            }
        }
        for place in 3..well_formed.len() {
            let mut arguments = well_formed.clone();
            arguments[place] = "a b";
            malformed.push((names.clone(), arguments));
        }
        for (names, arguments) in malformed {
            assert_eq!(
                fixture.eval(&acquire, &names, &arguments).await,
                Value::Int(-5),
                "{kind} {arguments:?}"
            );
            assert!(fixture.client.state().await.is_empty(), "{kind} {arguments:?}");
        }
        let propose = format!("quorum/{kind}_acquire_many");
        let own_proposed = [own, &[PROPOSAL]].concat();
        let well_formed = [&["60000", "60000"], &own_proposed[..], &own_proposed].concat();
        let ahead = format!("{}", 1_u64 << 52);
        for (place, value) in [(0, "0"), (1, "x"), (2, "a b"), (well_formed.len() - 1, "-7")]
            .into_iter()
            .chain([(well_formed.len() - 1, "1e3"), (well_formed.len() - 1, &*ahead)])
        {
            let mut arguments = well_formed.clone();
            arguments[place] = value;
            assert_eq!(
                fixture.eval(&propose, &names, &arguments).await,
                Value::Int(-5),
                "{kind} {arguments:?}"
            );
            assert!(fixture.client.state().await.is_empty(), "{kind} {arguments:?}");
        }
        let release = path(kind, "release") + "_many";
        let step = if release.starts_with("rwlock") { 1 } else { 2 };
        let names: Vec<&str> = names.into_iter().take(2 * step).collect();
        for arguments in [
            &[own, own].concat()[1..],
            &[own, own, &["a"]].concat(),
            &[own, &["a b"; 2][..own.len()]].concat(),
            &[],
        ] {
            assert_eq!(
                fixture.eval(&release, &names, arguments).await,
                Value::Int(-5),
                "{kind} {arguments:?}"
            );
        }
        let renew = path(kind, "renew") + "_many";
        for arguments in [
            &[&["60000"], own].concat(),
            &[&["60000"], own, own, &["a"]].concat(),
            &[&["0"], own, own].concat(),
            &[&["60000"], own, &["a b"; 2][..own.len()]].concat(),
            &vec!["60000"],
        ] {
            let names = ["m", "n"];
            assert_eq!(fixture.eval(&renew, &names, arguments).await, Value::Int(-5), "{kind} {arguments:?}");
        }
        let too_many: Vec<String> = (0..129).flat_map(|number| keys(&number.to_string())).collect();
        let too_many: Vec<&str> = too_many.iter().map(String::as_str).collect();
        let arguments = [&["60000", "7", ""][..], &own.repeat(129)].concat();
        assert_eq!(fixture.eval(&acquire, &too_many, &arguments).await, Value::Int(-5), "{kind}");
        assert!(fixture.client.state().await.is_empty(), "{kind}");
    }
}
