//! A connection that is shared, and replaced when it breaks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use super::connection::{Connection, too_slow};
use super::crowd::Crowd;
use super::dial::Dial;

/// One connection that all requests share. Whoever finds it broken drops it; the next request makes another.
#[derive(Debug)]
pub(super) struct Link {
    dial: Dial,
    limit: Duration,
    runtime: Handle,
    current: Arc<RwLock<Option<Connected>>>,
    /// Held by the one that connects, while the others wait for what comes of it.
    connecting: tokio::sync::Mutex<()>,
    tries: Arc<AtomicU64>,
    last_failure: Mutex<Option<(u64, RedisError)>>,
    /// A connection to a cluster is being replaced.
    replacing: Arc<AtomicBool>,
}

/// A connection and which one it is.
#[derive(Clone, Debug)]
pub(super) struct Connected {
    pub(super) crowd: Crowd,
    pub(super) generation: u64,
    /// Which run of which server it leads to, where that was asked for.
    pub(super) run: Option<Arc<str>>,
}

impl Link {
    /// To be called on the runtime that the client lives on.
    pub(super) fn new(dial: Dial, limit: Duration) -> Link {
        Link {
            dial,
            limit,
            runtime: Handle::current(),
            current: Arc::default(),
            connecting: tokio::sync::Mutex::new(()),
            tries: Arc::default(),
            last_failure: Mutex::new(None),
            replacing: Arc::default(),
        }
    }

    /// The connection that is there. Poisoning does not matter: nothing in here panics half-way.
    pub(super) fn current(&self) -> Option<Connected> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn generation(&self) -> u64 {
        self.current.read().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, |link| link.generation)
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.dial.is_cluster()
    }

    /// The connection, made if there is none. `greet` is run on a new one before anybody else gets it.
    ///
    /// Takes at most twice the limit: for a try that is under way, and for one of its own. A crowd that
    /// waits for one try shares its failure, so a dead server costs the last of them no more.
    pub(super) async fn get<F>(&self, greet: F) -> Result<Connected, RedisError>
    where
        F: AsyncFnOnce(&Connection) -> Result<Option<Arc<str>>, RedisError>,
    {
        if let Some(link) = self.current() {
            return Ok(link);
        }
        let seen = self.tries.load(Ordering::SeqCst);
        let _turn = self.connecting.lock().await;
        if let Some(link) = self.current() {
            return Ok(link);
        }
        let failed = self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((number, error)) = failed
            && number > seen
        {
            return Err(error);
        }
        let generation = self.tries.fetch_add(1, Ordering::SeqCst) + 1;
        let connected = async {
            // On the client's runtime, where what drives the connection outlives the caller.
            let dialled = self.runtime.spawn(self.dial.clone().connect(self.limit)).await;
            let connection = dialled.map_err(|error| RedisError::from(std::io::Error::other(error)))??;
            let run = greet(&connection).await?;
            Ok((connection, run))
        };
        match timeout(self.limit, connected).await.unwrap_or_else(|_| Err(too_slow())) {
            Ok((connection, run)) => {
                let crowd = Crowd::new(connection, self.limit, &self.runtime);
                let link = Connected { crowd, generation, run };
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(link.clone());
                Ok(link)
            }
            Err(error) => {
                let failure = Some((generation, error.clone()));
                *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
                Err(error)
            }
        }
    }

    /// Forgets the connection, unless it is a newer one already.
    ///
    /// One to a cluster stays until a better one is there: most of its servers may be well. It is one at a time, so
    /// that a server that stays silent does not have all connections made again and again.
    pub(super) fn drop_generation(&self, generation: u64) {
        if !self.is_cluster() {
            let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
            if current.as_ref().is_some_and(|link| link.generation == generation) {
                *current = None;
            }
        } else if self.generation() == generation && !self.replacing.swap(true, Ordering::SeqCst) {
            let (dial, limit, runtime) = (self.dial.clone(), self.limit, self.runtime.clone());
            let (current, tries) = (Arc::clone(&self.current), Arc::clone(&self.tries));
            let replacing = Arc::clone(&self.replacing);
            self.runtime.spawn(async move {
                // It outlives its client by no more than two limits and a pause.
                if let Ok(connection) = dial.connect(limit).await
                    && connection.is_whole(limit).await
                {
                    let generation = tries.fetch_add(1, Ordering::SeqCst) + 1;
                    let crowd = Crowd::new(connection, limit, &runtime);
                    *current.write().unwrap_or_else(PoisonError::into_inner) =
                        Some(Connected { crowd, generation, run: None });
                }
                sleep(limit).await;
                replacing.store(false, Ordering::SeqCst);
            });
        }
    }
}

/// Whether a connection that failed like this is of no more use: broken, silent, or to a server that has
/// been demoted. The client library replaces a connection only in the first case.
pub(super) fn is_spent(error: &RedisError) -> bool {
    error.is_timeout() || error.is_unrecoverable_error() || is_read_only(error)
}

/// The answer of a server that is a replica. Redis 6 wraps it into the error of the script.
pub(super) fn is_read_only(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error.detail().is_some_and(|detail| detail.contains("READONLY You can't write"))
}
