//! Opens a client of each topology.

use redlatch::deadpool_redis::{Config, Runtime};
use redlatch::{Error, Locks, Options};

use super::{Deployment, Protocol, Server, Topology, Wake};

/// A client that connects to this address of the machine: the servers' or the proxies'.
pub async fn open(
    deployment: &Deployment,
    host: &str,
    protocol: Protocol,
    wake: Wake,
    options: Options,
) -> Result<Locks, Error> {
    let ports: Vec<u16> = deployment.entrances().iter().map(Server::port).collect();
    open_at(deployment.topology(), host, &ports, protocol, wake, options).await
}

/// The same for servers of which only the ports are known.
pub async fn open_at(
    topology: Topology,
    host: &str,
    ports: &[u16],
    protocol: Protocol,
    wake: Wake,
    options: Options,
) -> Result<Locks, Error> {
    let protocol = match protocol {
        Protocol::Resp2 => "resp2",
        Protocol::Resp3 => "resp3",
    };
    let urls: Vec<String> =
        ports.iter().map(|port| format!("redis://{host}:{port}/?protocol={protocol}")).collect();
    match topology {
        Topology::Standalone => match wake {
            Wake::Push => Locks::builder().server(&urls[0]).options(options).connect().await,
            Wake::Poll => {
                let pool = Config::from_url(&urls[0]).create_pool(Some(Runtime::Tokio1)).unwrap();
                Locks::builder().pool(pool).options(options.wakeups(wakeups(wake))).connect().await
            }
        },
        Topology::Cluster => {
            Locks::builder().cluster(urls).options(options.wakeups(wakeups(wake))).connect().await
        }
        Topology::Sentinel => {
            let urls = ports.iter().map(|port| format!("redis://{host}:{port}/"));
            // The URL applies to the master; the sentinels may use another protocol.
            let master = format!("redis://{}/?protocol={protocol}", super::sentinel::MASTER);
            Locks::builder().sentinel(urls, &master).options(options.wakeups(wakeups(wake))).connect().await
        }
        Topology::Quorum3 | Topology::Quorum5 => {
            Locks::builder().quorum(urls).options(options.wakeups(wakeups(wake))).connect().await
        }
    }
}

fn wakeups(wake: Wake) -> redlatch::Wakeups {
    match wake {
        Wake::Push => redlatch::Wakeups::Push,
        Wake::Poll => redlatch::Wakeups::Poll,
    }
}

impl Topology {
    /// Whether a call failed because of the servers: one server, or a majority of a quorum.
    pub fn failed<T>(self, outcome: &Result<T, Error>) -> bool {
        match (self, outcome) {
            (_, Ok(_)) => false,
            (Topology::Quorum3 | Topology::Quorum5, Err(error)) => matches!(error, Error::NoQuorum { .. }),
            (_, Err(error)) => matches!(error, Error::Redis { .. }),
        }
    }
}
