//! A web service whose instances share locks: axum, a pool, TLS with a private CA, options from a
//! file, tracing, metrics, and a shutdown that leaves no lock behind. `tests/it/service.rs` runs
//! it, or `cargo run --example service --features metrics,pool,tls,tracing -- FILE`, for instance
//! with `examples/service/service.toml`.
use std::time::Duration;

use axum::extract::{FromRequestParts, Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::{BoxError, Router, response, routing};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use redlatch::deadpool_redis::{Manager, Pool, Runtime};
use redlatch::redis::{AsyncCommands as _, Client, TlsCertificates};
use redlatch::{Lease, Locks, Options, Owner, OwnerError, fenced};

const WAIT: Duration = Duration::from_secs(10); // for a lock: less than the client waits

#[derive(serde::Deserialize)]
struct Config {
    listen: String,
    label: String,
    redis: String,
    ca: String,
    pool: usize,
    locks: Options,
}

#[derive(Clone)]
struct Service {
    locks: Locks,
    redis: Pool,
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    // Lost leases and outages are events: without a subscriber they would go unnoticed.
    tracing_subscriber::fmt().init();
    let file = std::env::args().nth(1).ok_or("usage: service FILE.toml")?;
    let config: Config = toml::from_str(&std::fs::read_to_string(file)?)?;
    let listener = tokio::net::TcpListener::bind(&config.listen).await?;
    let prometheus = install_metrics()?; // before the first lock
    let service = connect(config).await?;
    #[cfg(unix)]
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = tokio::signal::windows::ctrl_c()?;
    tracing::info!(address = %listener.local_addr()?, "listening");
    let app = Router::new()
        .route("/invoices", routing::post(invoice))
        .route("/accounts/{name}/{amount}", routing::post(deposit))
        .route("/prices/{product}", routing::get(price).put(set_price))
        .with_state(service.clone())
        .route("/metrics", routing::get(async move || prometheus.render()));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async { _ = stopped.await });
    let server = tokio::spawn(server.into_future());
    terminate.recv().await;
    tracing::info!("draining: no new connections, running requests finish");
    drop(stop);
    // Less than an orchestrator waits from SIGTERM to SIGKILL.
    if tokio::time::timeout(Duration::from_secs(20), server).await.is_err() {
        tracing::warn!("some requests did not finish: their leases end now");
    }
    // Not before the drain: it ends the leases of running requests, and fails those that wait for a
    // lock. If it fails, its error names the locks that stay held until their TTL expires.
    Ok(service.locks.close(Duration::from_secs(5)).await?)
}

/// Returns the next invoice number: no number twice, over all instances of the service. A request
/// that fails may leave a gap.
async fn invoice(service: State<Service>) -> Answer {
    let guard = service.locks.mutex("invoices")?.lock_timeout(WAIT).await?;
    // `while_held` drops the work if the lease is lost: another instance may have the lock then.
    let lease = guard.lease();
    let number = lease.while_held(add(&service.redis, lease, "invoices", 1)).await??;
    // Dropping the guard would release it as well, but only `release` reports a lost lease.
    guard.release().await?;
    Ok(number)
}

/// Makes a deposit. A caller in another service that already holds the account's lock sends its
/// owner: the deposit then nests inside the caller's hold. Without the owner, each would wait for
/// the other.
async fn deposit(service: State<Service>, path: Path<(String, i64)>, Caller(owner): Caller) -> Answer {
    let (account, amount) = (format!("account:{}", path.0.0), path.0.1);
    let guard = service.locks.reentrant(&account, &owner)?.lock_timeout(WAIT).await?;
    let lease = guard.lease();
    let balance = lease.while_held(add(&service.redis, lease, &account, amount)).await??;
    guard.release().await?;
    Ok(balance)
}

/// The owner that a request names; a new one if it names none. An owner grants the right to enter:
/// accept it from your own services, not from the internet.
struct Caller(Owner);

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, Failure> {
        let owner = parts.headers.get(Owner::HEADER).map(|word| word.to_str().unwrap_or_default());
        Ok(Caller(owner.map_or_else(|| Ok(Owner::new()), str::parse)?))
    }
}

/// Answers a cached price. It waits for a change that has begun, and then answers the new price.
async fn price(service: State<Service>, product: Path<String>) -> Answer {
    let guard = service.locks.rwlock(format!("price:{}", *product))?.read_timeout(WAIT).await?;
    let price: Option<String> = service.redis.get().await?.get(format!("{{price:{}}}", *product)).await?;
    guard.release().await?;
    price.ok_or(Failure(StatusCode::NOT_FOUND))
}

async fn set_price(service: State<Service>, product: Path<String>, price: String) -> Answer {
    let guard = service.locks.rwlock(format!("price:{}", *product))?.write_timeout(WAIT).await?;
    let token = guard.lease().fencing_token().ok_or("fencing is off")?;
    // An instance that was paused past its lease does not know it. Its write is refused, since a
    // later lease has a larger token.
    let [key, tokens] = ["", ":token"].map(|end| format!("{{price:{}}}{end}", *product));
    let mut redis = service.redis.get().await?;
    let written = fenced::set(&mut redis, &key, &tokens, token, &price).await?;
    let price = written.then_some(price).ok_or(Failure(StatusCode::CONFLICT))?;
    guard.release().await?;
    Ok(price)
}

/// Collects what `/metrics` returns: `docs/metrics.md` has the names, queries and alerts.
fn install_metrics() -> Result<PrometheusHandle, BoxError> {
    // From a quarter of a millisecond to 16 s.
    let buckets: Vec<f64> = (0..17).map(|n| 0.000_25 * 2_f64.powi(n)).collect();
    let prometheus = PrometheusBuilder::new().set_buckets(&buckets)?.install_recorder()?;
    let upkeep = prometheus.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep(); // otherwise memory grows between two scrapes
        }
    });
    Ok(prometheus)
}

async fn connect(config: Config) -> Result<Service, BoxError> {
    let root_cert = Some(std::fs::read(config.ca)?);
    let client = Client::build_with_tls(config.redis, TlsCertificates { client_tls: None, root_cert })?;
    let redis = Pool::builder(Manager::new(client.get_connection_info().clone())?);
    let redis = redis.max_size(config.pool).runtime(Runtime::Tokio1).wait_timeout(Some(WAIT)).build()?;
    // The locks have connections of their own beside the pool: requests that use up the pool delay
    // no renewal. A pool cannot subscribe: waiters are notified through the client.
    let locks = Locks::builder().pool(redis.clone()).subscriber(client).options(config.locks);
    let locks = locks.client_name("service").label(config.label).connect().await?;
    Ok(Service { locks, redis })
}

/// Reads a number, then writes the sum: two requests that only a lock keeps together, and its token
/// if this instance is paused between them, past its lease.
async fn add(redis: &Pool, lease: &Lease, name: &str, amount: i64) -> Answer {
    let token = lease.fencing_token().ok_or("fencing is off")?;
    let [key, begun, tokens] = ["", ":begun", ":token"].map(|end| format!("{{sum:{name}}}{end}"));
    let mut redis = redis.get().await?;
    // Before the number is read: from here on, an earlier instance's late write is refused.
    if !fenced::set(&mut redis, &begun, &tokens, token, "").await? {
        return Err(Failure(StatusCode::CONFLICT));
    }
    let sum = redis.get::<_, Option<i64>>(&key).await?.unwrap_or(0) + amount;
    let written = fenced::set(&mut redis, &key, &tokens, token, sum).await?;
    written.then(|| sum.to_string()).ok_or(Failure(StatusCode::CONFLICT))
}

type Answer = Result<String, Failure>;
/// Answers without a text: errors name keys and servers, and belong in the log.
struct Failure(StatusCode);

impl<E: Into<BoxError>> From<E> for Failure {
    fn from(error: E) -> Failure {
        let error = error.into();
        tracing::warn!(%error, "a request failed");
        Failure(match error.downcast_ref() {
            // The lock was busy and nothing was changed: the client may try again.
            Some(redlatch::Error::TimedOut { .. }) => StatusCode::SERVICE_UNAVAILABLE,
            Some(redlatch::Error::Name(_)) => StatusCode::BAD_REQUEST,
            _ if error.is::<OwnerError>() => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        })
    }
}

impl response::IntoResponse for Failure {
    fn into_response(self) -> response::Response {
        self.0.into_response()
    }
}
