//! [`Exit`]: how this program ends. [`Failure`]: why a command failed, with its exit code. What
//! goes to stderr and stdout.

use std::borrow::Cow;
use std::error::Error as _;
use std::io::{self, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitCode, ExitStatus};

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use rustix::process::{Signal, kill_current_process_group};

use crate::messages;

/// The exit codes, as the help and the manual page show them. Those of failures are of sysexits.h.
pub(crate) const CODES: &str = "\
Exit codes of every command:
  0    done
  64   the arguments, the name or the settings are invalid; nothing was sent
  69   the servers cannot be reached, do not reply, or refuse for what may pass by itself: they
       load their data, their memory is full
  71   the system refused a process, a pipe or a signal
  77   the servers refuse the password, a right, a certificate or the database, are not what they
       were said to be, or hold something else under the name: that lasts until it is mended

`redlatch COMMAND --help` lists those of the command.";

pub(crate) const USAGE: u8 = 64;
pub(crate) const UNAVAILABLE: u8 = 69;
const SYSTEM: u8 = 71;
/// The lease ended before the command did.
pub(crate) const LOST: u8 = 75;
/// The servers refuse, until it is mended.
const REFUSED: u8 = 77;
pub(crate) const NOT_EXECUTABLE: u8 = 126;
pub(crate) const NOT_FOUND: u8 = 127;
/// Plus the number of the signal.
const SIGNALED: u8 = 128;

/// How this program ends.
#[derive(Clone, Copy)]
pub(crate) enum Exit {
    Code(u8),
    /// This signal has ended the wait for the lock.
    Interrupted(Signal),
    /// A signal has ended the command.
    Killed(i32),
    /// A key of the terminal has sent this signal to the command alone.
    KilledByKey(Signal),
}

impl Exit {
    /// As a command ended.
    pub(crate) fn of(status: ExitStatus) -> Exit {
        let code = |code: i32| Exit::Code(u8::try_from(code).unwrap_or(u8::MAX));
        status.code().map_or_else(|| Exit::Killed(status.signal().unwrap_or(0)), code)
    }

    /// A shell shows both ends by SIGINT as 130. But bash goes on with its script after an exit
    /// with 130, and ends it if Ctrl-C has ended the program:
    /// <https://www.cons.org/cracauer/sigint.html>.
    pub(crate) fn now(self) -> ExitCode {
        let signal = match self {
            Exit::Code(code) => return ExitCode::from(code),
            Exit::Interrupted(signal) => signal.as_raw(),
            Exit::Killed(signal) => signal,
            Exit::KilledByKey(signal) => {
                // A script that called this program is to end too.
                let _ = kill_current_process_group(signal);
                signal.as_raw()
            }
        };
        if signal == Signal::INT.as_raw() {
            // A handler stays until another program is executed. The shell exits where the signal
            // is ignored. Its environment is empty: bash takes functions from there, as of `kill`.
            let mut shell = Command::new("/bin/sh");
            let _no_shell = shell.args(["-c", "command kill -s INT $$; exit 130"]).env_clear().exec();
        }
        ExitCode::from(SIGNALED.saturating_add(u8::try_from(signal).unwrap_or(0)))
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Lock(#[from] redlatch::Error),
    #[error("could not {what} {server}")]
    Server {
        what: &'static str,
        server: String,
        /// For a reason that does not pass by itself.
        is_refusal: bool,
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The reader of stdout has ended.
    #[error("stdout is not read any more")]
    Unread,
    #[error("could not {what}")]
    System {
        what: &'static str,
        #[source]
        cause: io::Error,
    },
}

impl Failure {
    /// Makes a failure of the system's error.
    pub(crate) fn os<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Failure {
        move |cause| Failure::System { what, cause: cause.into() }
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Failure::Usage(_) | Failure::Lock(redlatch::Error::Name(_) | redlatch::Error::Config(_)) => USAGE,
            Failure::Lock(error) if is_refusal(error) => REFUSED,
            Failure::Server { is_refusal: true, .. } => REFUSED,
            Failure::Lock(_) | Failure::Server { .. } => UNAVAILABLE,
            Failure::Unread => SIGNALED + 13,
            Failure::System { .. } => SYSTEM,
        }
    }

    /// The failure and its sources, on one line.
    pub(crate) fn text(&self) -> String {
        let (mut text, mut source) = (self.to_string(), self.source());
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Errors of the client library repeat the text of their own sources.
            if !text.ends_with(&cause_text) {
                text += &format!(": {cause_text}");
            }
            source = cause.source();
        }
        if matches!(self, Failure::Lock(redlatch::Error::Config(_))) {
            for option in ["max_hold", "hold_at_least", "outage_limit", "node_timeout"] {
                text = text.replace(option, &format!("--{}", option.replace('_', "-")));
            }
            for option in ["ttl", "label"] {
                text = text.replace(&format!("{option} is"), &format!("--{option} is"));
            }
            text = text.replace("1day", "24h");
        }
        text = text.replace("call Locks::rejoin", "run `redlatch quorum rejoin`");
        text += match self {
            Failure::Lock(redlatch::Error::WrongType { found, .. }) if is_no_lock(found) => {
                "; delete the key once the program that wrote it has ended"
            }
            Failure::Lock(redlatch::Error::WrongType { .. }) => {
                "; if it is a lock, its commands must all use --reentrant, or --shared and --exclusive, or neither; \
                 if not, delete it"
            }
            Failure::Lock(redlatch::Error::Redis { cause, .. }) => match cause.code() {
                Some("MOVED" | "CROSSSLOT") => "; the server is a node of a cluster: use --cluster",
                Some("READONLY") => "; the server is a replica: name its master",
                _ => "",
            },
            _ => "",
        };
        one_line(&text)
    }
}

/// Whether the servers have refused for a reason that does not pass by itself.
fn is_refusal(error: &redlatch::Error) -> bool {
    use redlatch::Error::{Corrupt, NoQuorum, NotAdmitted, Redis, Reply, WrongType};
    let is_of_servers = matches!(
        error,
        Redis { .. }
            | NoQuorum { .. }
            | WrongType { .. }
            | Corrupt { .. }
            | NotAdmitted { .. }
            | Reply { .. }
    );
    is_of_servers && !error.is_transient()
}

/// Whether a key without a TTL was found: of no kind of lock.
pub(crate) fn is_no_lock(found: &str) -> bool {
    found.contains("without a TTL")
}

/// On one line, without the control characters that a terminal obeys: a server may say anything.
pub(crate) fn one_line(text: &str) -> String {
    text.replace("\r\n", "; ").replace('\n', "; ").replace(char::is_control, "\u{fffd}")
}

/// Writes a message to stderr. A closed stderr is no reason to end.
pub(crate) fn say(text: &str) {
    messages::write(format!("redlatch: {}\n", one_line(&mask_passwords(text))));
}

/// Writes to stdout. If its reader has ended, as `head` does, this program ends as other programs
/// do then, which SIGPIPE ends.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
    written.map_err(|cause| match cause.kind() {
        io::ErrorKind::BrokenPipe => Failure::Unread,
        _ => Failure::System { what: "write to stdout", cause },
    })
}

/// Writes a value to stdout as one line of JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    print(&serde_json::to_string(value).map_err(Failure::os("write JSON"))?)
}

/// Prints the help that was asked for, or what is wrong with the arguments.
pub(crate) fn usage<Program: CommandFactory>(mut error: clap::Error) -> ExitCode {
    correct_tip::<Program>(&mut error);
    let mut text = error.render().to_string();
    if error.use_stderr() {
        // An argument in the wrong place is repeated in the message, and a password may contain any
        // character: a quote or a space would end the URL there.
        for argument in std::env::args_os() {
            let argument = argument.to_string_lossy();
            text = text.replace(&*argument, &masked_argument(&argument));
        }
        let _ = io::stderr().write_all(mask_passwords(&text).as_bytes());
        ExitCode::from(USAGE)
    } else {
        let _ = io::stdout().write_all(text.as_bytes());
        ExitCode::SUCCESS
    }
}

/// Behind `--`, an unknown option of `run` would be the name of the lock: clap proposes that.
fn correct_tip<Program: CommandFactory>(error: &mut clap::Error) {
    let text = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    let usage = text(ContextKind::Usage);
    let is_of_no_command = usage.ends_with(" <COMMAND>") && !usage.contains("redlatch quorum");
    let is_typo = error.get(ContextKind::SuggestedArg).is_some();
    let tip = match (error.kind(), text(ContextKind::InvalidArg).as_str()) {
        (ErrorKind::InvalidSubcommand, _) => {
            "to run a command under a lock: redlatch run NAME COMMAND; to look at one: redlatch inspect NAME"
        }
        (ErrorKind::MissingRequiredArgument, _) if usage.contains("redlatch run ") => {
            "before the command stands the name of the lock: redlatch run NAME COMMAND"
        }
        (ErrorKind::UnknownArgument, option) if is_of_no_command => {
            if is_option_of_run::<Program>(option) {
                error.remove(ContextKind::SuggestedArg); // one that looks like it
            }
            "options of a command stand behind it, as in: redlatch run -n NAME COMMAND"
        }
        (ErrorKind::UnknownArgument, _) if !usage.contains("redlatch run ") => return,
        (ErrorKind::UnknownArgument, _) if is_typo => {
            error.remove(ContextKind::Suggested);
            return;
        }
        (ErrorKind::UnknownArgument, "-c") => "a command line needs a shell: redlatch run NAME sh -c 'LINE'",
        (ErrorKind::UnknownArgument, _) => {
            "`run` has no such option; if it is the command's, the name of the lock is missing: \
             redlatch run NAME COMMAND"
        }
        _ => return,
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
}

fn is_option_of_run<Program: CommandFactory>(word: &str) -> bool {
    let program = Program::command();
    let mut options = program.find_subcommand("run").into_iter().flat_map(clap::Command::get_arguments);
    let is_named = |long: &str| word.strip_prefix("--") == Some(long);
    options.any(|option| option.get_long_and_visible_aliases().into_iter().flatten().any(is_named))
}

/// An argument without what may be a password in it.
fn masked_argument(argument: &str) -> Cow<'_, str> {
    let (scheme, address) = match argument.split_once("://") {
        Some((scheme, address)) => (format!("{scheme}://"), address),
        None => (String::new(), argument),
    };
    match (address.rfind('@'), address.find("pass=")) {
        (Some(at), _) => format!("{scheme}***{}", &address[at..]).into(),
        (None, Some(password)) => format!("{scheme}{}pass=***", &address[..password]).into(),
        (None, None) => argument.into(),
    }
}

/// Hides the user and the password of every URL.
fn mask_passwords(text: &str) -> String {
    let mut masked = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        masked += before;
        masked += "://";
        let end = after.find(|letter: char| letter.is_whitespace() || "'\"`".contains(letter));
        let address = &after[..end.unwrap_or(after.len())];
        // A password may contain any character, also `@` and `/`.
        rest = match address.rfind('@') {
            Some(at) => {
                masked += "***";
                &after[at..]
            }
            None => after,
        };
    }
    masked + rest
}

#[cfg(test)]
mod tests {
    use super::{mask_passwords, masked_argument};

    #[test]
    fn passwords_in_misplaced_arguments_are_masked() {
        for (argument, shown) in [
            ("redis://user:secret'pw@host:1/", "redis://***@host:1/"),
            ("--redis=redis://:sec ret@host", "--redis=redis://***@host"),
            ("user:secret@host", "***@host"),
            ("redis+unix:///x?pass=secret&db=1", "redis+unix:///x?pass=***"),
            ("job", "job"),
        ] {
            assert_eq!(masked_argument(argument), shown);
        }
    }

    #[test]
    fn credentials_of_urls_are_masked() {
        for (text, shown) in [
            ("redis://:secret@host:1/", "redis://***@host:1/"),
            ("'rediss://user:p@ss/w@host' and redis://host", "'rediss://***@host' and redis://host"),
            ("a://b:c@d a://e:f@g", "a://***@d a://***@g"),
            ("no url @ all", "no url @ all"),
        ] {
            assert_eq!(mask_passwords(text), shown);
        }
    }
}
