//! The client: how it is built, what it reports, and how it is closed.

mod builder;
mod closing;
mod doctor;
mod pools;
#[cfg(all(feature = "cluster", feature = "sentinel", feature = "tls"))]
mod tls;
