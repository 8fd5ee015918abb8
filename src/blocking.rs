//! The same locks for programs without async code: each call blocks its thread.
//!
//! ```no_run
//! use redlatch::Error;
//! use redlatch::blocking::Locks;
//!
//! fn main() -> Result<(), Error> {
//!     let locks = Locks::open("redis://127.0.0.1/")?;
//!     let guard = locks.mutex("backup")?.lock()?; // renewed until it is released
//!     for part in 0..100 {
//!         let token = guard.check()?; // an error if the lease was lost
//!         println!("copying part {part} under token {token:?}");
//!     }
//!     guard.release()
//! }
//! ```
//!
//! The names, kinds, options and errors are those of the crate's root, where each method is
//! described in full. [Without async](crate::guide::without_async) is the guide's page.
//!
//! **What it promises**: a thread of the client renews its leases and releases dropped guards, so a
//! program may block for as long as it likes and keeps its locks.
//!
//! **What it does not**: run on a tokio runtime, also not in `spawn_blocking`. There each call
//! returns [`ConfigError::InsideRuntime`](crate::ConfigError::InsideRuntime) at once; use the async
//! client. A call has no cancellation but its time limit.

mod blocking_guard;
mod blocking_locks;
mod client_thread;

use std::sync::Arc;
use std::time::Duration;

use self::client_thread::ClientThread;
use crate::all::Member;
use crate::error::Error;
use crate::locks::{self, LocksBuilder};
use crate::options::Options;
use crate::owner::Owner;

pub use self::blocking_guard::{
    AllGuard, Guard, MutexGuard, ReentrantGuard, RwLockReadGuard, RwLockWriteGuard,
};
pub use self::blocking_locks::{All, Mutex, ReentrantLock, RwLock};

/// A client with a thread of its own: the twin of [`redlatch::Locks`](crate::Locks). Cheap to
/// clone; clones share everything.
///
/// # The end
/// The thread ends after the last clone, lock and guard was dropped. That drop waits until dropped
/// guards have been released, for at most two [node timeouts](Options::node_timeout); it does not
/// wait on a tokio runtime. What is not released by then is released while the process lives, and
/// the servers end it when its TTL expires.
///
/// A value in a `static` is never dropped, and `std::process::exit` drops nothing: call
/// [`close`](Locks::close) before the program ends. A process that was forked must make a client of
/// its own.
#[derive(Clone, Debug)]
pub struct Locks {
    locks: locks::Locks,
    thread: Arc<ClientThread>,
}

impl Locks {
    /// Connects to one server, with all defaults. See [`open`](crate::Locks::open).
    ///
    /// # Errors
    /// - Those of [`connect`](Locks::connect).
    pub fn open(url: &str) -> Result<Locks, Error> {
        Locks::connect(locks::Locks::builder().server(url))
    }

    /// Starts the client's thread and connects to the builder's topology. See
    /// [`connect`](LocksBuilder::connect).
    ///
    /// ```no_run
    /// # fn run() -> Result<(), redlatch::Error> {
    /// use redlatch::{Options, blocking};
    /// let options = Options::new().ttl(std::time::Duration::from_secs(10));
    /// let builder = redlatch::Locks::builder().server("redis://127.0.0.1/").options(options);
    /// let locks = blocking::Locks::connect(builder)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Config`] with [`InsideRuntime`](crate::ConfigError::InsideRuntime): the thread is
    ///   on a tokio runtime.
    /// - [`Error::Config`] with [`Thread`](crate::ConfigError::Thread): no thread could be started.
    /// - Those of [`LocksBuilder::connect`].
    pub fn connect(builder: LocksBuilder) -> Result<Locks, Error> {
        Locks::start(builder.connect())
    }

    /// Makes the client without any I/O on the network: no server need be running. See
    /// [`connect_lazily`](LocksBuilder::connect_lazily).
    ///
    /// # Errors
    /// - Those of [`connect`](Locks::connect) that are an [`Error::Config`].
    pub fn connect_lazily(builder: LocksBuilder) -> Result<Locks, Error> {
        Locks::start(async { builder.connect_lazily() })
    }

    fn start(connecting: impl Future<Output = Result<locks::Locks, Error>>) -> Result<Locks, Error> {
        let thread = Arc::new(ClientThread::start(connecting)?);
        Ok(Locks { locks: thread.locks().clone(), thread })
    }

    /// Returns the same client with other options for the locks made from it. See
    /// [`with_options`](crate::Locks::with_options).
    ///
    /// # Errors
    /// - Those of [`with_options`](crate::Locks::with_options).
    pub fn with_options(&self, options: Options) -> Result<Locks, Error> {
        Ok(Locks { locks: self.locks.with_options(options)?, thread: Arc::clone(&self.thread) })
    }

    /// Returns the mutex of this name, without a request.
    ///
    /// # Errors
    /// - [`Error::Name`]: the name is not allowed; [`NameProblem`](crate::NameProblem) lists the
    ///   rules.
    pub fn mutex(&self, name: impl AsRef<str>) -> Result<Mutex, Error> {
        Ok(Mutex::new(self.locks.mutex(name)?, &self.thread))
    }

    /// Returns the re-entrant lock of this name for `owner`, without a request. Calls that nest
    /// need the same owner, also in one thread.
    ///
    /// # Errors
    /// - [`Error::Name`]: the name is not allowed; [`NameProblem`](crate::NameProblem) lists the
    ///   rules.
    pub fn reentrant(&self, name: impl AsRef<str>, owner: &Owner) -> Result<ReentrantLock, Error> {
        Ok(ReentrantLock::new(self.locks.reentrant(name, owner)?, &self.thread))
    }

    /// Returns the read-write lock of this name, without a request.
    ///
    /// # Errors
    /// - [`Error::Name`]: the name is not allowed; [`NameProblem`](crate::NameProblem) lists the
    ///   rules.
    pub fn rwlock(&self, name: impl AsRef<str>) -> Result<RwLock, Error> {
        Ok(RwLock::new(self.locks.rwlock(name)?, &self.thread))
    }

    /// Returns several locks of this client that are acquired together, without a request. See
    /// [`all`](crate::Locks::all).
    ///
    /// ```no_run
    /// # use redlatch::{Error, Member, blocking::Locks};
    /// # fn run(locks: Locks) -> Result<(), Error> {
    /// let (stock, prices) = (locks.mutex("stock")?, locks.rwlock("prices")?);
    /// locks.all([stock.into(), Member::Read(prices.into())])?.run(|leases| {
    ///     leases.check()?; // before each step
    ///     let token = leases.get("stock").and_then(|lease| lease.fencing_token());
    ///     Ok::<_, Error>(()) // change the stock, at prices that stay
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Members`]: those of [`all`](crate::Locks::all).
    pub fn all<M: Into<Member>>(&self, members: impl IntoIterator<Item = M>) -> Result<All, Error> {
        Ok(All::new(self.locks.all(members)?, &self.thread))
    }

    /// Returns whether this client holds no lock, acquires none and has none to release. See
    /// [`is_idle`](crate::Locks::is_idle).
    pub fn is_idle(&self) -> bool {
        self.locks.is_idle()
    }

    /// Waits until all dropped guards have been released: while no server replies, without a limit;
    /// [`close`](Locks::close) has one. See [`settled`](crate::Locks::settled).
    ///
    /// # Errors
    /// - [`Error::Config`] with [`InsideRuntime`](crate::ConfigError::InsideRuntime): the thread is
    ///   on a tokio runtime.
    pub fn settled(&self) -> Result<(), Error> {
        self.thread.block_on(self.locks.settled())
    }

    /// Releases everything that this client holds within `limit`, and acquires nothing from now on.
    /// See [`close`](crate::Locks::close).
    ///
    /// | a later call | returns |
    /// |---|---|
    /// | `lock` and its like, `adopt`, `downgrade` | [`Error::Closed`] |
    /// | `check` and `renew` of a guard, or of its lease | [`Error::Closed`] |
    /// | `release` of a guard | `Ok`: this call reports the locks that were not released |
    /// | `inspect`, `force_release`, `settled` | what they always return |
    /// | `close` | waits again, and reports what is still unreleased |
    ///
    /// The thread lives until the last clone, lock and guard was dropped. After that, only clones
    /// of the [async client](Locks::as_async) are left, whose calls return [`Error::Closed`] or
    /// [`Error::RuntimeEnded`].
    ///
    /// # Errors
    /// - [`Error::Unreleased`]: not everything was released within `limit`.
    /// - [`Error::Config`] with [`InsideRuntime`](crate::ConfigError::InsideRuntime): nothing was
    ///   closed.
    pub fn close(&self, limit: Duration) -> Result<(), Error> {
        self.thread.call(self.locks.close(limit))
    }

    /// Returns the async client behind this one, for its other calls. Its clones do not keep the
    /// thread: after the [end](Locks#the-end) their calls return [`Error::Closed`] or
    /// [`Error::RuntimeEnded`].
    ///
    /// ```no_run
    /// # fn run(locks: redlatch::blocking::Locks) -> Result<(), redlatch::Error> {
    /// for finding in locks.block_on(locks.as_async().doctor())? {
    ///     println!("{finding}");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn as_async(&self) -> &locks::Locks {
        &self.locks
    }

    /// Waits for a call of the [async client](Locks::as_async), which is polled on this thread.
    ///
    /// # Errors
    /// - [`Error::Config`] with [`InsideRuntime`](crate::ConfigError::InsideRuntime): the thread is
    ///   on a tokio runtime; the call is dropped.
    pub fn block_on<F: Future>(&self, call: F) -> Result<F::Output, Error> {
        self.thread.block_on(call)
    }
}
