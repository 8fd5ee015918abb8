//! `Lease`: renewal, and the end of a lease.

mod end;
mod renewal;
mod wakers;
