//! Grants that count only once replicas have them.

mod confirmation;
mod grants;
