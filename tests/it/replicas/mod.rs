//! `Options::replicas`: a grant counts only once replicas have confirmed it.

mod confirmation;
mod grants;
