//! `Locks`: building, pools, TLS, `doctor` and `close`.

mod builder;
mod closing;
mod doctor;
mod pools;
#[cfg(all(feature = "cluster", feature = "sentinel", feature = "tls"))]
mod tls;
