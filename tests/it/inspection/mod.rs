//! `inspect` and `is_held_by`.

mod holders;
mod labels;
