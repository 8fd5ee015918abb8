//! `Locks::nodes`: which nodes vote, are not admitted, or have failed.

use std::error::Error as _;
use std::time::Duration;

use redlatch::{Error, Locks, NodeState, NodeStatus, Options, RestartGuard};

use super::{Quorum, places};
use crate::support::Stopwatch;

const TTL: Duration = Duration::from_millis(400);

/// Long: a live node that is slow must not be reported.
const TIMEOUT: Duration = Duration::from_secs(4);

fn options() -> Options {
    Options::new().node_timeout(TIMEOUT)
}

fn guarded() -> Options {
    options().ttl(TTL).restart_guard(RestartGuard::On)
}

/// One letter for each node of a set: `v`otes, is `n`ot admitted, or has `f`ailed.
fn states(quorum: &Quorum, set: u32, statuses: &[NodeStatus]) -> String {
    let label = |place: usize| format!("127.0.0.1:{}", quorum.servers[place].port());
    assert_eq!(
        statuses.iter().map(|status| status.node.clone()).collect::<Vec<_>>(),
        places(set).filter(|place| *place < quorum.count()).map(label).collect::<Vec<_>>(),
    );
    let state = |status: &NodeStatus| match &status.state {
        NodeState::Voter => {
            assert!(status.is_voter() && status.to_string() == format!("{}: votes", status.node));
            'v'
        }
        NodeState::NotAdmitted => {
            assert!(status.to_string().contains("call Locks::rejoin"), "{status}");
            'n'
        }
        NodeState::Failed(error) => {
            assert!(matches!(error, Error::Redis { .. }), "{status}");
            assert!(status.to_string().starts_with(&format!("{}: ", status.node)), "{status}");
            assert!(status.to_string().contains(&error.source().unwrap().to_string()), "{status}");
            'f'
        }
        other => panic!("{other:?}"),
    };
    statuses.iter().map(state).collect()
}

async fn all(quorum: &Quorum, client: &Locks) -> String {
    let start = Stopwatch::start();
    let statuses = client.nodes().await;
    assert!(start.undisturbed() < TIMEOUT * 2, "{start:?}");
    states(quorum, quorum.all(), &statuses)
}

#[tokio::test(flavor = "multi_thread")]
async fn quorum_nodes_reports_votes_and_failures() {
    let mut quorum = Quorum::start(5).await;
    let (client, unguarded) = (quorum.client(guarded()).await, quorum.client(options()).await);
    assert_eq!(all(&quorum, &client).await, "nnnnn");
    assert_eq!(all(&quorum, &unguarded).await, "vvvvv", "without the guard, admission does not matter");
    let founded = client.rejoin().await.unwrap();
    assert_eq!(states(&quorum, quorum.all(), &founded), "vvvvv");
    assert_eq!(all(&quorum, &client).await, "vvvvv");
    quorum.kill(0b10010);
    quorum.restart(0b00010).await;
    assert_eq!(all(&quorum, &client).await, "vnvvf");
    assert_eq!(all(&quorum, &unguarded).await, "vvvvf");
    // The node that does not respond is skipped and reported.
    let rejoined = client.rejoin().await.unwrap();
    assert_eq!(states(&quorum, 0b10010, &rejoined), "vf");
    let idle = client.rejoin().await.unwrap();
    assert_eq!(states(&quorum, 0b10000, &idle), "f", "reported also if no node needs admission");
    quorum.restart(0b10000).await;
    quorum.hang(0b00001);
    assert_eq!(all(&quorum, &client).await, "fvvvn");
    assert_eq!(states(&quorum, 0b10001, &client.rejoin().await.unwrap()), "fv");
    quorum.resume(0b00001);
    assert_eq!(all(&quorum, &client).await, "vvvvv");
    assert!(client.rejoin().await.unwrap().is_empty());
}
