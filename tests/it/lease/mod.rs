//! Leases: how they are renewed, and how they end.

mod end;
mod renewal;
