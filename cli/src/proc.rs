//! The processes of this machine, as /proc of Linux shows them.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, waitid};

/// The flag of a thread of the kernel.
const KERNEL_THREAD: u32 = 0x0020_0000;

/// How often to look at a process that executes another program, and how long it takes.
const EXECUTE: (usize, Duration) = (50, Duration::from_micros(200));

/// A process that has not ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stat {
    pub(crate) pid: Pid,
    pub(crate) parent: Option<Pid>,
    /// `None`: its leader is outside of this container.
    pub(crate) group: Option<Pid>,
    /// When it started, in ticks: with the number, it is that of no other process.
    pub(crate) start: u64,
}

/// Whether /proc is that of Linux, and shows the process ids of this process's namespace. Those of
/// another one are the numbers of unrelated processes here.
pub(crate) fn is_own() -> bool {
    let own = std::fs::read_link("/proc/self").ok();
    own.and_then(|own| number(own.to_str()?)) == Some(getpid())
}

/// All processes that have not ended, without threads of the kernel. Fails where /proc is not that
/// of Linux.
pub(crate) fn stats() -> io::Result<Vec<Stat>> {
    if !is_own() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let names = std::fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter_map(|name| stat(number(&name)?)).collect())
}

/// One of them. `None`: it has ended.
pub(crate) fn stat(pid: Pid) -> Option<Stat> {
    parse(pid, &String::from_utf8_lossy(&std::fs::read(path(pid, "stat")).ok()?))
}

fn path(pid: Pid, file: &str) -> PathBuf {
    format!("/proc/{}/{file}", pid.as_raw_nonzero()).into()
}

fn parse(pid: Pid, text: &str) -> Option<Stat> {
    // After the name of the program, which may contain any character.
    let mut words = text.rsplit_once(") ")?.1.split(' ');
    let state = words.next()?;
    let mut number = || Some(number(words.next()?));
    let (parent, group) = (number()?, number()?);
    // Behind the session and the terminal.
    let flags: u32 = words.nth(3)?.parse().ok()?;
    let threads: u32 = words.nth(10)?.parse().ok()?;
    let start = words.nth(1)?.trim().parse().ok()?;
    // A process whose main thread has ended is shown as a zombie, while its other threads work: it
    // would run beside the next holder. One that waits to be reaped has one thread.
    let is_alive = state != "X" && (state != "Z" || threads > 1);
    (is_alive && flags & KERNEL_THREAD == 0).then_some(Stat { pid, parent, group, start })
}

/// A process id. The group of a process that was just reaped is -1, for which `Pid` panics.
pub(crate) fn number(word: &str) -> Option<Pid> {
    word.trim().parse().ok().filter(|number| *number > 0).and_then(Pid::from_raw)
}

/// A variable that a process has started with. `None` also if the process has ended, or belongs to
/// another user.
pub(crate) fn variable(pid: Pid, name: &str) -> Option<String> {
    let environment = environment(pid)?;
    let mut entries = environment.split(|byte| *byte == 0);
    let value = entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    Some(String::from_utf8_lossy(value).into_owned())
}

fn environment(pid: Pid) -> Option<Vec<u8>> {
    for _ in 0..EXECUTE.0 {
        let environment = match std::fs::read(path(pid, "environ")) {
            // Its main thread has ended: older systems show an empty environment.
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {
                return environment_of_threads(pid);
            }
            other => other.ok()?,
        };
        // Without arguments too, it is between two programs.
        if !environment.is_empty() || !std::fs::read(path(pid, "cmdline")).ok()?.is_empty() {
            return Some(environment);
        }
        if let Some(environment) = environment_of_threads(pid) {
            return Some(environment);
        }
        std::thread::sleep(EXECUTE.1);
    }
    None
}

/// A main thread that has ended has no environment any more, but the other threads have.
fn environment_of_threads(pid: Pid) -> Option<Vec<u8>> {
    let threads = std::fs::read_dir(path(pid, "task")).ok()?.flatten();
    let mut found = threads.filter_map(|thread| std::fs::read(thread.path().join("environ")).ok());
    found.find(|environment| !environment.is_empty())
}

/// The children of this process, also those that have ended but are not reaped.
pub(crate) fn children() -> Vec<Pid> {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let threads = threads.filter(|_| is_own());
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(number).collect::<Vec<_>>()).collect()
}

/// Reaps the children of this process that have ended, but for those that it waits for itself.
pub(crate) fn reap(waited_for: &[Option<Pid>]) {
    for child in children() {
        if !waited_for.contains(&Some(child)) {
            // An error means that it was reaped meanwhile.
            let _ = waitid(WaitId::Pid(child), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        }
    }
}

/// The number of the process that started last.
pub(crate) fn newest() -> Option<i32> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "that is how a test fails")]
    use super::*;

    #[test]
    fn processes_are_read_from_proc() {
        let read_with = |threads: u32, text: &str| {
            let flags = if text.contains("kthreadd") { 2_129_984 } else { 4_194_304 };
            parse(getpid(), &format!("7 {text} 5 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 {threads} 0 77 0"))
        };
        let read = |text: &str| read_with(1, text);
        let group = |text: &str| read(text).map(|stat| stat.group.map(|group| group.as_raw_nonzero().get()));
        assert_eq!(group("(a) b) S 1 5"), Some(Some(5)));
        assert_eq!(group("(kthreadd) S 0 0"), None);
        assert_eq!(group("(outside) S 0 0"), Some(None));
        assert_eq!(group("(reaped) R 0 -1"), Some(None));
        assert_eq!(group("(sh) Z 1 5"), None);
        assert!(read_with(2, "(sh) Z 1 5").is_some() && read_with(2, "(sh) X 1 5").is_none());
        assert_eq!(read("(a) S 1 5").unwrap().start, 77);
        let own = stat(getpid()).unwrap();
        assert_eq!(own.group, Some(rustix::process::getpgrp()));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(children().contains(&pid) && stat(pid).unwrap().start >= own.start);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
