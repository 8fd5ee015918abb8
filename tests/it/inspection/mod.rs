//! What `inspect` and `is_held_by` report.

mod holders;
mod labels;
