//! The gate: a copy of this program that becomes the command once it may start.
//!
//! The command must not run before the watchdog knows its process group and the terminal is its
//! own. So `run` first starts a copy of itself in the new group.
//!
//! Its stdin is a socket, over which it receives the real stdin; then it executes the command. If
//! `run` dies before, the socket closes, and the copy ends.

use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitCode, Stdio};

use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::exit::{NOT_EXECUTABLE, NOT_FOUND, say};
use crate::machine::program;

/// The first argument of the copy; the command follows.
pub(crate) const ROLE: &str = "__gate";

/// A command that waits to be started, in a process group of its own.
pub(crate) struct Gate {
    pub(crate) child: Child,
    socket: UnixStream,
}

impl Gate {
    pub(crate) fn start(command: &[OsString], variables: &[(&str, String)]) -> io::Result<Gate> {
        let (socket, other) = UnixStream::pair()?;
        let mut copy = Command::new(program()?);
        copy.arg0("redlatch").arg(ROLE).args(command).envs(variables.iter().cloned());
        let child = copy.stdin(Stdio::from(OwnedFd::from(other))).process_group(0).spawn()?;
        Ok(Gate { child, socket })
    }

    /// Lets the copy become the command.
    pub(crate) fn open(self) -> io::Result<Child> {
        let stdin = io::stdin();
        let descriptors = [stdin.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        rights.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(&self.socket, &[IoSlice::new(b"!")], &mut rights, SendFlags::empty())?;
        Ok(self.child)
    }
}

/// The copy: waits for its stdin, and executes the command.
pub(crate) fn main(command: &[OsString]) -> ExitCode {
    let Some((name, arguments)) = command.split_first() else { return ExitCode::from(NOT_FOUND) };
    // Without a descriptor, `run` has given the command up, and says so itself.
    let Ok(Some(stdin)) = receive_stdin() else { return ExitCode::FAILURE };
    let error = Command::new(name).args(arguments).stdin(Stdio::from(stdin)).exec();
    say(&format!("cannot run {}: {error}", name.display()));
    ExitCode::from(match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    })
}

fn receive_stdin() -> io::Result<Option<OwnedFd>> {
    let (socket, mut byte) = (io::stdin(), [0]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    loop {
        let mut parts = [IoSliceMut::new(&mut byte)];
        match recvmsg(&socket, &mut parts, &mut rights, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
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
