//! `Locks`: building, pools, TLS, `doctor`, `close` and `all`.

mod builder;
mod closing;
mod doctor;
mod pools;
mod sets;
#[cfg(all(feature = "cluster", feature = "sentinel", feature = "tls"))]
mod tls;
