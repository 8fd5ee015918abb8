//! `redlatch list`: the locks that are held.

use std::collections::BTreeSet;

use redlatch::Error;
use serde_json::json;

use crate::exit::{Failure, print, print_json, say};
use crate::servers::ServerArgs;
use crate::view::View;

/// List the locks that are held.
///
/// It scans the keys of the servers, with SCAN: a server with many other keys takes a while.
#[derive(clap::Args)]
pub(crate) struct ListArgs {
    /// Only names that begin with this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    prefix: String,
    /// The largest number of locks to list.
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    limit: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl ListArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<u8, Failure> {
        let locks = servers.connect().await?;
        let start = format!("{}{}", servers.key_prefix, self.prefix);
        let pattern = format!("{}*", escaped(&start));
        // A key may be something other than a lock, so there may be more keys than locks.
        let most_keys = self.limit.saturating_mul(10).max(1000);
        let (mut names, mut is_complete, mut failures) = (BTreeSet::new(), true, Vec::new());
        let masters = servers.masters().await?;
        let count = masters.len();
        'servers: for master in masters {
            let mut master = match master {
                Ok(master) => master,
                Err(failure) => {
                    failures.push(failure);
                    continue;
                }
            };
            let mut cursor = 0;
            loop {
                let (next, keys) = match master.scan(&pattern, cursor).await {
                    Ok(found) => found,
                    Err(failure) => {
                        failures.push(failure);
                        break;
                    }
                };
                for key in keys {
                    // A key that is no name is a companion of a lock, or of another program.
                    let name = std::str::from_utf8(&key).ok();
                    let name = name.and_then(|key| key.strip_prefix(&servers.key_prefix));
                    if let Some(name) = name.filter(|name| locks.mutex(name).is_ok()) {
                        names.insert(name.to_owned());
                    }
                }
                if names.len() > most_keys {
                    is_complete = false;
                    break 'servers;
                }
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
        }
        if failures.len() == count
            && let Some(failure) = failures.pop()
        {
            return Err(failure);
        }
        let mut views = Vec::new();
        for name in names {
            match View::of(&locks, &name).await {
                Ok(view) if view.state == "free" => {} // released meanwhile
                Ok(_) if views.len() == self.limit => {
                    is_complete = false;
                    break;
                }
                Ok(view) => views.push(view),
                // Something else that begins with the prefix.
                Err(Failure::Lock(Error::WrongType { .. })) => {}
                Err(failure) => return Err(failure),
            }
        }
        if self.json {
            let is_complete = is_complete && failures.is_empty();
            print_json(&json!({ "locks": views, "is_complete": is_complete }))?;
        } else {
            for view in &views {
                print(&view.summary())?;
            }
        }
        if !is_complete {
            say(&format!("these are not all locks: use --prefix, or a --limit above {}", self.limit));
        }
        for failure in failures {
            say(&format!("locks of one server are missing: {}", failure.text()));
        }
        Ok(0)
    }
}

/// A text as a pattern that matches only itself.
fn escaped(text: &str) -> String {
    let mut pattern = String::new();
    for letter in text.chars() {
        if "*?[]^-\\".contains(letter) {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern
}
