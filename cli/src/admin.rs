//! `redlatch release`, `force-release`, `doctor` and `quorum rejoin`.

use std::io::Read as _;
use std::time::Duration;

use redlatch::{Error, Finding, Locks, NodeStatus, Owner, RestartGuard, Verdict};
use serde_json::{Value, json};

use crate::exit::{Failure, is_no_lock, one_line, print, print_json, say};
use crate::servers::{ServerArgs, variable};

/// What `Owner::from_word` takes, in bytes, and the end of a line.
const LONGEST_OWNER: u64 = 256;
const LINE_END: u64 = 2;

/// Revoke a lock from its holders, and grant it to the next waiter.
///
/// The holders notice it at their next renewal, at most a third of their TTL later, and until then
/// believe that they hold the lock. Exits with 1 if the lock was free.
#[derive(clap::Args)]
pub(crate) struct ForceReleaseArgs {
    /// Confirm it.
    #[arg(long)]
    yes: bool,
    /// The name of the lock.
    name: String,
}

impl ForceReleaseArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<u8, Failure> {
        if !self.yes {
            let text =
                "force-release takes a lock from programs that believe that they hold it: confirm with --yes";
            return Err(Failure::Usage(text.to_owned()));
        }
        let was_held = revoke(&servers.connect().await?, &self.name).await?;
        if !was_held {
            say(&format!("the lock {:?} was free", self.name));
        }
        Ok(u8::from(!was_held))
    }
}

/// Release a lock for one of its holders, which has ended without releasing it.
///
/// Unlike force-release, it never takes the lock from another holder. If the holder still works, it
/// notices at its next renewal. Exits with 1 if the lock is not this holder's.
#[derive(clap::Args)]
pub(crate) struct ReleaseArgs {
    /// The holder, as `inspect --json` prints it; "-" reads it from the standard input.
    ///
    /// Without this, $REDLATCH_OWNER: the holder, if the command of `run --reentrant` calls this.
    #[arg(long, value_name = "OWNER")]
    owner: Option<String>,
    /// The name of the lock.
    name: String,
}

impl ReleaseArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<u8, Failure> {
        let usage = |text: &str| Failure::Usage(text.to_owned());
        let word = match self.owner.as_deref() {
            Some("-") => read_owner()?,
            Some(word) => word.to_owned(),
            None => variable("REDLATCH_OWNER")?
                .ok_or_else(|| usage("whose lock? Set --owner or REDLATCH_OWNER"))?,
        };
        let owner = Owner::from_word(word.trim_end_matches(['\r', '\n']))
            .map_err(|error| usage(&format!("--owner: {error}")))?;
        let was_held = servers.connect().await?.force_release_from(&self.name, &owner).await?;
        if !was_held {
            say(&format!("the lock {:?} is not this owner's", self.name));
        }
        Ok(u8::from(!was_held))
    }
}

/// Reads an owner from stdin, which may have no end.
fn read_owner() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let limit = LONGEST_OWNER + LINE_END;
    let read = std::io::stdin().take(limit + 1).read_to_end(&mut bytes);
    if read.map_err(Failure::os("read the owner"))? as u64 > limit {
        return Err(Failure::Usage(format!(
            "the standard input is longer than an owner, {LONGEST_OWNER} bytes"
        )));
    }
    String::from_utf8(bytes).map_err(|_| Failure::Usage("the standard input is not UTF-8".to_owned()))
}

/// Revokes a lock of any kind: a request for another kind changes nothing.
async fn revoke(locks: &Locks, name: &str) -> Result<bool, Failure> {
    match locks.mutex(name)?.force_release().await {
        Err(Error::WrongType { found, .. }) if !is_no_lock(found) => {}
        other => return Ok(other?),
    }
    match locks.reentrant(name, &Owner::new())?.force_release().await {
        Err(Error::WrongType { found, .. }) if !is_no_lock(found) => {}
        other => return Ok(other?),
    }
    let lock = locks.rwlock(name)?;
    // The writer may read as well. Its holds to read go first, which lets none in: readers that
    // follow a writer would be revoked at once, and run on beside the next one.
    let is_written = lock.inspect().await?.writer.is_some();
    let read = lock.force_release_read().await?;
    Ok(is_written && lock.force_release_write().await? || read)
}

/// Look for settings and rights of the servers that endanger locks.
///
/// Exits with 1 if there is a danger, and with 2 if there is none but a check could not be made.
#[derive(clap::Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl DoctorArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<u8, Failure> {
        // A server that does not answer is a finding.
        let findings = servers.builder()?.options(servers.options()).connect_lazily()?.doctor().await;
        if self.json {
            print_json(&findings.iter().map(as_json).collect::<Vec<_>>())?;
        } else {
            for finding in &findings {
                print(&one_line(&finding.to_string()))?;
            }
        }
        let is_unknown = |finding: &Finding| matches!(finding.verdict, Verdict::Unknown { .. });
        Ok(if findings.iter().any(|finding| finding.verdict.is_danger()) {
            1
        } else if findings.iter().any(is_unknown) {
            2
        } else {
            0
        })
    }
}

fn as_json(finding: &Finding) -> Value {
    let (verdict, what, remedy) = match &finding.verdict {
        Verdict::Danger { what, remedy } => ("danger", Some(what), Some(remedy)),
        Verdict::Unknown { why } => ("unknown", Some(why), None),
        _ => ("fine", None, None),
    };
    json!({
        "server": finding.server,
        "check": finding.check,
        "verdict": verdict,
        "what": what,
        "remedy": remedy,
    })
}

/// Commands for a quorum.
#[derive(clap::Args)]
pub(crate) struct QuorumArgs {
    #[command(subcommand)]
    command: QuorumCommand,
}

#[derive(clap::Subcommand)]
enum QuorumCommand {
    Rejoin(RejoinArgs),
}

/// Admit the nodes of a quorum with --restart-guard that have no vote.
///
/// Run it once for a new quorum, and after every restart of a node. It waits for as long as the
/// longest lease lasts. Exits with 1 if a node still has no vote.
#[derive(clap::Args)]
struct RejoinArgs {
    /// The longest TTL of all clients.
    #[arg(long, value_name = "DURATION", default_value = "30s", allow_hyphen_values = true, value_parser = crate::span::parse)]
    ttl: Duration,
}

impl QuorumArgs {
    pub(crate) async fn execute(&self, servers: &ServerArgs) -> Result<u8, Failure> {
        let QuorumCommand::Rejoin(RejoinArgs { ttl }) = &self.command;
        let options = servers.options().restart_guard(RestartGuard::On).ttl(*ttl);
        let nodes = servers.builder()?.options(options).connect_lazily()?.rejoin().await?;
        if nodes.is_empty() {
            print("every node has a vote")?;
        }
        for node in &nodes {
            print(&one_line(&node.to_string()))?;
        }
        Ok(u8::from(!nodes.iter().all(NodeStatus::is_voter)))
    }
}
