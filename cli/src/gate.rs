//! The gate: a copy of this program that becomes the command once it may start.
//!
//! The command must not run before the watchdog knows its process group and the terminal is its
//! own. So `run` first starts a copy of itself in the new group.
//!
//! Its stdin is a socket, over which it receives the real stdin; then it executes the command. If
//! `run` dies before, the socket closes, and the copy ends.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

use rustix::fs::{Access, access};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_setfd, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::exit::{NOT_EXECUTABLE, NOT_FOUND, say};
use crate::machine::program;

/// The first argument of the copy; the command follows.
pub(crate) const ROLE: &str = "__gate";

/// Before a command that waits to be started. If it is dropped, the copy ends. Once the command has
/// started, it says nothing any more.
pub(crate) struct Gate(UnixStream);

impl Gate {
    /// Starts the copy, in a process group of its own.
    pub(crate) fn start(command: &[OsString], variables: &[(&str, String)]) -> io::Result<(Gate, Child)> {
        let (socket, other) = UnixStream::pair()?;
        let mut copy = Command::new(program()?);
        copy.arg0("redlatch").arg(ROLE).args(command).envs(variables.iter().cloned());
        let child = copy.stdin(Stdio::from(OwnedFd::from(other))).process_group(0).spawn()?;
        Ok((Gate(socket), child))
    }

    /// Lets the copy become the command.
    pub(crate) fn open(&self) -> io::Result<()> {
        let stdin = io::stdin();
        let descriptors = [stdin.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        rights.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(&self.0, &[IoSlice::new(b"!")], &mut rights, SendFlags::empty())?;
        Ok(())
    }

    /// Why the copy that has ended could not become the command, if it could not.
    pub(crate) fn failure(&mut self) -> Option<io::Error> {
        let mut number = [0; 4];
        self.0.set_nonblocking(true).ok()?;
        self.0.read_exact(&mut number).ok()?;
        Some(io::Error::from_raw_os_error(i32::from_ne_bytes(number)))
    }
}

/// The copy: waits for its stdin, and executes the command.
pub(crate) fn main(command: &[OsString]) -> ExitCode {
    let Some((name, arguments)) = command.split_first() else { return ExitCode::from(NOT_FOUND) };
    // Without a descriptor, `run` has given the command up, and says so itself.
    let Ok(Some(stdin)) = receive_stdin() else { return ExitCode::FAILURE };
    let Ok(socket) = fcntl_dupfd_cloexec(io::stdin(), 3) else { return ExitCode::FAILURE };
    let error = Command::new(name).args(arguments).stdin(Stdio::from(stdin)).exec();
    // Not to stderr: that may block, while `run` holds the lock.
    let number = error.raw_os_error().unwrap_or_default();
    let _ = UnixStream::from(socket).write_all(&number.to_ne_bytes());
    ExitCode::from(code_of(&error))
}

/// For a word that begins with `-` behind the `--`.
pub(crate) const OPTION_TIP: &str = "; an option of `run` stands before `--`";

/// For a line with arguments in the place of a command.
const LINE_TIP: &str = "; a command line needs a shell: redlatch run NAME sh -c 'LINE'";

/// Says why a command cannot be executed, and returns the exit code. The command before it may have
/// been taken for the name of the lock.
pub(crate) fn refuse(name: &OsStr, error: &io::Error, taken: Option<&str>) -> u8 {
    let tip = match (taken, name.as_bytes()) {
        (Some(taken), _) => {
            &*format!("; {taken} was taken for the name of the lock: redlatch run NAME COMMAND")
        }
        (None, [b'-', ..]) => OPTION_TIP,
        (None, _) if error.kind() == io::ErrorKind::NotFound && find(name).is_ok() => {
            "; the file is there, but not the interpreter that it names"
        }
        (None, bytes) if bytes.contains(&b' ') && error.kind() == io::ErrorKind::NotFound => LINE_TIP,
        (None, _) => "",
    };
    say(&format!("cannot run {}: {error}{tip}", name.display()));
    code_of(error)
}

fn code_of(error: &io::Error) -> u8 {
    match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    }
}

/// Looks for a command as the system will. One that is missing must not take the lock: with
/// `--hold-at-least`, the other machines would find it held, and no machine would do the work.
pub(crate) fn find(name: &OsStr) -> io::Result<()> {
    let executable = |path: &Path| -> io::Result<()> {
        access(path, Access::EXEC_OK)?;
        if path.is_dir() { Err(Errno::ACCESS.into()) } else { Ok(()) }
    };
    let Some(paths) = env::var_os("PATH").filter(|_| !name.as_bytes().contains(&b'/')) else {
        // Without a PATH, the system has one of its own.
        return if name.as_bytes().contains(&b'/') { executable(Path::new(name)) } else { Ok(()) };
    };
    let mut missing = Err(Errno::NOENT.into());
    for folder in env::split_paths(&paths) {
        match executable(&folder.join(name)) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => missing = Err(error),
            Err(_) => {}
        }
    }
    missing
}

fn receive_stdin() -> io::Result<Option<OwnedFd>> {
    let (socket, mut byte) = (io::stdin(), [0]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    retry_on_intr(|| recvmsg(&socket, &mut [IoSliceMut::new(&mut byte)], &mut rights, RecvFlags::empty()))?;
    for message in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message
            && let Some(stdin) = descriptors.next()
        {
            // The command gets it as its stdin, and not a second time.
            fcntl_setfd(&stdin, FdFlags::CLOEXEC)?;
            return Ok(Some(stdin));
        }
    }
    Ok(None)
}
