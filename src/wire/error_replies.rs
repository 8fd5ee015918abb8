//! What the errors of a connection mean, among them which error replies refuse a script before it
//! runs.

use std::error::Error;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind};

/// Error codes with which a server refuses a request before it has written anything.
///
/// A server checks all but the last four before it runs a script. Those four stop a script at its
/// first write: whether memory is short is decided as the script starts, and the other three
/// conditions do not change while it runs (`scriptVerifyWriteCommandAllow` and `scriptVerifyOOM` in
/// Redis 7, `luaRedisGenericCommand` in Redis 6.2).
const REFUSED: &[&str] = &[
    "NOSCRIPT",    // unknown SHA1
    "NOAUTH",      // not authenticated
    "WRONGPASS",   // authentication failed
    "NOPERM",      // the user may not run EVALSHA, or not with these keys
    "DENIED",      // protected mode
    "LOADING",     // the data set is being loaded
    "BUSY",        // another script is running
    "MASTERDOWN",  // a replica that must not serve stale data
    "CLUSTERDOWN", // slots are not served
    "MOVED",       // another node serves the slot
    "ASK",         // another node has the keys
    "TRYAGAIN",    // keys of one request are on two nodes while their slot moves
    "CROSSSLOT",   // keys of one request are in several slots
    "READONLY",    // a replica
    "OOM",         // maxmemory is reached
    "MISCONF",     // the server cannot save
    "NOREPLICAS",  // min-replicas-to-write
];

/// Codes that Redis 6.2 wraps into the error of the script that they stopped.
const STOP_AT_FIRST_WRITE: &[&str] = &["READONLY", "OOM", "MISCONF", "NOREPLICAS"];

/// Errors without a code with which a server refuses a request that it cannot run.
const UNKNOWN_COMMAND: &[&str] =
    &["unknown command", "wrong number of arguments for 'eval", TOO_MANY_CLIENTS];

/// What a server with `maxclients` connections says to one more, as it closes it, begins with this:
/// "... reached" or, on a node of a cluster, "... + cluster connections reached".
const TOO_MANY_CLIENTS: &str = "max number of clients";

/// Whether the server sent an error reply.
pub(super) fn is_error_reply(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

/// Whether this error reply says that the request has not run.
pub(super) fn was_refused(error: &RedisError) -> bool {
    if !is_error_reply(error) {
        return false;
    }
    let detail = error.detail().unwrap_or_default();
    let code = error.code().unwrap_or_default();
    let is_wrapped = |code: &&str| detail.contains(&format!(": -{code} "));
    if detail.starts_with("Error running script") && STOP_AT_FIRST_WRITE.iter().any(is_wrapped) {
        return true;
    }
    // Redis reports a refused command within a script as ERR, other servers with this code. By then
    // the script may have written.
    let is_of_script = |text: &str| text.starts_with("ACL failure in script") || text.contains(" script: ");
    if code == "NOPERM" && is_of_script(&without_user(detail)) {
        return false;
    }
    REFUSED.contains(&code) || code == "ERR" && UNKNOWN_COMMAND.iter().any(|text| detail.starts_with(text))
}

/// Whether the user lacks a right.
pub(super) fn is_forbidden(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm)
}

/// Whether that right is one of a key, not of a command or a channel.
pub(super) fn names_key(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| without_user(detail).contains(" key"))
}

/// The text of a refusal without the name of the user, which may be any word.
fn without_user(detail: &str) -> String {
    let parts = detail.split_once("User ").zip(detail.rsplit_once(" has no permissions "));
    parts.map_or_else(|| detail.to_owned(), |((before, _), (_, after))| format!("{before}{after}"))
}

/// Whether a server says this as it accepts a connection, which it then closes.
pub(super) fn refuses_connection(error: &RedisError) -> bool {
    error.code() == Some("DENIED") || has_too_many_clients(error)
}

fn has_too_many_clients(error: &RedisError) -> bool {
    is_error_reply(error) && error.detail().is_some_and(|detail| detail.starts_with(TOO_MANY_CLIENTS))
}

/// Whether a server that runs another script refused to select a database on a new connection. The
/// client library keeps only the text of that reply, not its code.
fn refuses_database(error: &RedisError) -> bool {
    is_error_reply(error) && error.detail().is_some_and(|detail| detail.contains("is busy running a script"))
}

/// Errors of a server that starts, fails over, moves slots, cannot write for now, or runs another
/// script.
pub(super) fn is_transient_reply(source: &RedisError) -> bool {
    use ServerErrorKind as Kind;
    matches!(source.kind(), ErrorKind::Server(Kind::BusyLoading | Kind::MasterDown))
        || source.code() == Some("BUSY")
        || was_redirected(source)
        || is_demoted(source)
        || refuses_writes(source)
        || has_too_many_clients(source)
        || refuses_database(source)
}

/// Whether a server of a cluster replied that another one serves the slot, or none at the moment:
/// it has not run the request. Errors of other kinds may be those of another request: the library
/// fails all requests in flight when it cannot learn the slots.
pub(super) fn was_redirected(error: &RedisError) -> bool {
    use ServerErrorKind as Kind;
    matches!(error.kind(), ErrorKind::Server(Kind::Moved | Kind::Ask | Kind::TryAgain | Kind::ClusterDown))
}

/// Whether no server of the cluster serves the slot.
pub(super) fn is_unserved(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ClusterDown)
}

/// Whether another server of a cluster serves the slot.
pub(super) fn is_moved(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::Moved)
}

/// That reply to a client that takes the server for the only one: none of its requests will be
/// redirected.
pub(super) fn node_of_a_cluster(moved: &RedisError) -> RedisError {
    let text = "the server is a node of a cluster: call LocksBuilder::cluster";
    RedisError::from((ErrorKind::InvalidClientConfig, text, moved.to_string()))
}

/// Whether TLS failed, as with a certificate of an authority that one side does not know: the next
/// attempt fails as well.
pub(super) fn is_of_tls(error: &RedisError) -> bool {
    io_error(error).is_some_and(|error| error.kind() == std::io::ErrorKind::InvalidData)
}

/// The error of the operating system or of a runtime, which the client library shares.
pub(super) fn io_error(error: &RedisError) -> Option<&std::io::Error> {
    let source = error.source()?.downcast_ref::<Arc<dyn Error + Send + Sync>>()?;
    source.downcast_ref::<std::io::Error>()
}

/// Whether the server is a replica: its reply to a script, which Redis 6 wraps into the script's
/// error, and to `WAIT`, before and while it waits.
pub(super) fn is_demoted(error: &RedisError) -> bool {
    let says = |text: &str| error.detail().is_some_and(|detail| detail.contains(text));
    error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error.code() == Some("UNBLOCKED")
        || says("READONLY You can't write")
        || says("WAIT cannot be used with replica")
}

/// Whether a master refuses writes, for lack of replicas or of memory, or because it cannot save:
/// the request has written nothing.
pub(super) fn refuses_writes(error: &RedisError) -> bool {
    lacks_replicas(error) || says(error, "MISCONF") || is_out_of_memory(error)
}

/// Whether a master has no memory for more: it still renews and releases.
pub(super) fn is_out_of_memory(error: &RedisError) -> bool {
    says(error, "OOM")
}

pub(super) fn lacks_replicas(error: &RedisError) -> bool {
    says(error, "NOREPLICAS")
}

/// Whether an error has this code, by itself or wrapped by Redis 6 into the script's error.
fn says(error: &RedisError, code: &str) -> bool {
    error.code() == Some(code) || error.detail().is_some_and(|detail| detail.contains(&format!("-{code} ")))
}

/// Whether no reply came.
pub(super) fn is_broken(error: &RedisError) -> bool {
    error.is_timeout() || error.is_unrecoverable_error()
}

/// Whether a connection that failed with this error is of no further use: broken, silent, or to a
/// server that was demoted. The client library replaces a connection only in the first case.
pub(super) fn is_spent(error: &RedisError) -> bool {
    is_broken(error) || is_demoted(error) || says(error, "MASTERDOWN")
}

/// Nothing more is sent on this connection.
pub(super) fn closed() -> RedisError {
    RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe))
}

/// A failure to reach a server of a cluster, or one that a sentinel names: the caller may not know
/// its address, which may be one of another network.
pub(super) fn at_announced(address: impl std::fmt::Display, failure: RedisError) -> RedisError {
    let named = |io: &std::io::Error| std::io::Error::new(io.kind(), format!("{address}: {io}"));
    io_error(&failure).map(named).map_or(failure, RedisError::from)
}

pub(super) fn too_slow() -> RedisError {
    RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error reply as a connection parses it.
    fn error_reply(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    #[test]
    fn was_refused_knows_what_runs_before_a_script_and_at_its_first_write() {
        for line in [
            "NOSCRIPT No matching script. Please use EVAL.",
            "NOAUTH Authentication required.",
            "WRONGPASS invalid username-password pair or user is disabled.",
            "NOPERM this user has no permissions to run the 'evalsha' command or its subcommand",
            "NOPERM User app has no permissions to run the 'evalsha' command",
            "NOPERM No permissions to access a key",
            "NOPERM User script: has no permissions to run the 'evalsha' command",
            "LOADING Redis is loading the dataset in memory",
            "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            "CLUSTERDOWN Hash slot not served",
            "MOVED 3999 127.0.0.1:6381",
            "ASK 3999 127.0.0.1:6381",
            "TRYAGAIN Multiple keys request during rehashing of slot",
            "CROSSSLOT Keys in request don't hash to the same slot",
            "READONLY You can't write against a read only replica.",
            "READONLY You can't write against a read only replica. script: 47, on @user_script:9.",
            "ERR Error running script (call to f_47): @user_script:9: @user_script: 9: -READONLY You can't \
             write against a read only replica. ",
            "OOM command not allowed when used memory > 'maxmemory'. script: 47, on @user_script:9.",
            "ERR Error running script (call to f_47): @user_script:9: -OOM command not allowed when used \
             memory > 'maxmemory'.",
            "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist",
            "NOREPLICAS Not enough good replicas to write.",
            "ERR unknown command 'EVALSHA', with args beginning with: '47' ",
            "ERR unknown command `EVALSHA`, with args beginning with: `47`, ",
            "ERR wrong number of arguments for 'evalsha' command",
            "ERR max number of clients reached",
            "ERR max number of clients + cluster connections reached",
        ] {
            assert!(was_refused(&error_reply(line)), "{line}");
        }
    }

    /// The errors in the first cell of a row, and its other two cells.
    fn rows(page: &str) -> impl Iterator<Item = (Vec<&str>, &str, &str)> {
        page.lines().filter(|line| line.starts_with("| `")).filter_map(|line| {
            let [_, errors, first, second, _] = line.split('|').collect::<Vec<_>>().try_into().ok()?;
            Some((errors.split('`').skip(1).step_by(2).collect(), first.trim(), second.trim()))
        })
    }

    /// Whether the pages for Rust and for other languages agree with this file, and name each code.
    #[test]
    fn the_pages_on_errors_say_what_may_have_run_and_what_passes() {
        let for_rust = rows(include_str!("../../docs/errors.md"))
            .map(|(errors, may_have_run, passes)| (errors, may_have_run == "no", passes != "no"));
        let lua = include_str!("../../lua/README.md").split_once("\n## Errors\n").unwrap().1;
        let for_others = rows(lua.split_once("\n## ").unwrap().0).map(|(errors, meaning, do_this)| {
            (errors, meaning.contains("nothing was done"), !do_this.starts_with("report it"))
        });
        for rows in [for_rust.collect::<Vec<_>>(), for_others.collect()] {
            let mut codes = Vec::new();
            for (errors, is_refused, passes) in rows {
                // Of `READONLY`, two conditions have an explanation in backquotes.
                let errors = errors.into_iter().filter(|error| error.starts_with(char::is_uppercase));
                for error in errors.filter(|error| !["NOSCRIPT", "ERR", "WRONGTYPE"].contains(error)) {
                    let reply = error_reply(&format!("{error} for some reason"));
                    assert_eq!(was_refused(&reply), is_refused, "{error}");
                    assert_eq!(is_transient_reply(&reply), passes, "{error}");
                    codes.push(error);
                }
            }
            let is_named = |code: &&&str| **code == "NOSCRIPT" || codes.contains(code);
            let missing: Vec<_> = REFUSED.iter().filter(|code| !is_named(code)).collect();
            assert!(missing.is_empty(), "{missing:?} of {codes:?}");
            for text in ["ERR unknown command", "ERR max number of clients reached"] {
                assert!(codes.contains(&text), "{text} of {codes:?}");
            }
        }
    }

    #[test]
    fn the_name_of_a_user_is_no_reason() {
        let of_key = |line: &str| names_key(&error_reply(line));
        assert!(of_key("NOPERM No permissions to access a key"));
        assert!(of_key("NOPERM this user has no permissions to access one of the keys used as arguments"));
        assert!(!of_key("NOPERM User a key has no permissions to run the 'publish' command"));
    }

    #[test]
    fn was_refused_is_false_of_errors_that_may_come_after_a_write() {
        for line in [
            "ERR upstream failure",
            "upstream failure",
            "ERR The user executing the script can't run this command or subcommand script: 47",
            "ERR ACL failure in script: User app has no permissions to run the 'incr' command",
            "NOPERM ACL failure in script: User app has no permissions to run the 'incr' command",
            "ERR value is not an integer or out of range",
            "ERR Error running script (call to f_47): @user_script:9: WRONGTYPE Operation against a key",
            "WRONGTYPE Operation against a key holding the wrong kind of value script: 47",
            "ERR Unknown Redis command called from script script: 47",
            "ERR Wrong number of args calling Redis command from script script: 47",
            "ERR Script killed by user with SCRIPT KILL.",
            "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            "EXECABORT Transaction discarded because of previous errors.",
            "UNAVAILABLE no backend",
        ] {
            assert!(!was_refused(&error_reply(line)), "{line}");
        }
        assert!(!was_refused(&RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))));
    }
}
