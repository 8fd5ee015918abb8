//! [`Cgroup`]: a control group of Linux, which no process of the command leaves by itself.
//!
//! Whatever a process does with its group, its session, its parent or its environment, its children
//! are in the same cgroup, and one write kills all of them at once, of all users.

use std::fs::{read_dir, read_to_string, write};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use uuid::Uuid;

use crate::proc::number;

/// How long to try to remove a cgroup. A process that has just ended is counted until its memory is
/// freed, and cannot be moved; others may fork.
const LIMIT: Duration = Duration::from_secs(1);

/// How a cgroup of a `run` is named.
const PREFIX: &str = "redlatch-";

#[derive(Clone, Debug)]
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// Where [`create`](Cgroup::create) makes one, inside of this process's own. `None`: the system
    /// has no version 2.
    pub(crate) fn planned() -> Option<Cgroup> {
        let mounts = read_to_string("/proc/self/mountinfo").ok()?;
        let own = read_to_string("/proc/self/cgroup").ok()?;
        // Not the id of the `run`: every user can read this name, and could give a process that
        // id, for which the lock would stay held.
        let name = format!("{PREFIX}{}-{}", std::process::id(), Uuid::new_v4().simple());
        Some(Cgroup(folder(&mounts, &own)?.join(name)))
    }

    /// Makes it, with this process in it. False if the system has no `cgroup.kill`, as Linux before
    /// 5.14, or this user may not do so.
    pub(crate) fn create(&self, first: Pid) -> bool {
        if std::fs::create_dir(&self.0).is_err() {
            return false;
        }
        let is_usable = self.0.join("cgroup.kill").exists()
            && read_to_string(self.0.join("cgroup.type")).is_ok_and(|kind| kind.trim() == "domain")
            && self.add(first).is_ok();
        if !is_usable {
            self.remove();
        }
        is_usable
    }

    /// That which another process has made.
    pub(crate) fn at(path: &str) -> Option<Cgroup> {
        (!path.is_empty()).then(|| Cgroup(path.into()))
    }

    /// On one line; empty if that is impossible.
    pub(crate) fn path(&self) -> &str {
        self.0.to_str().filter(|path| !path.contains('\n')).unwrap_or_default()
    }

    /// Moves a process into it.
    fn add(&self, pid: Pid) -> io::Result<()> {
        write(self.0.join("cgroup.procs"), pid.as_raw_nonzero().to_string())
    }

    /// Kills all of its processes, also those that start meanwhile.
    pub(crate) fn kill(&self) {
        // An error means that the cgroup was removed, with its last process.
        let _ = write(self.0.join("cgroup.kill"), "1");
    }

    /// Its processes, also those of cgroups inside of it.
    pub(crate) fn members(&self) -> Vec<Pid> {
        members(&self.0)
    }

    /// Removes it. Processes that run on without the lock move to the cgroup around it. It may take
    /// a while: release the lock before.
    pub(crate) fn remove(&self) {
        let Some(around) = self.0.parent() else { return };
        let start = Instant::now();
        loop {
            match remove_nested(&self.0) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return,
                Err(_) => {}
            }
            let members = own_members(&self.0);
            // A `run` that was started within lives on in its own cgroup, and removes both later.
            if start.elapsed() > LIMIT || members.is_empty() && !self.members().is_empty() {
                return;
            }
            for pid in members {
                // An error means that it has ended.
                let _ = write(around.join("cgroup.procs"), pid.as_raw_nonzero().to_string());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if is_of_run(around) {
            // Left by a `run` around this one that has ended. Otherwise its processes keep it.
            let _ = std::fs::remove_dir(around);
        }
    }
}

fn is_of_run(folder: &Path) -> bool {
    folder.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PREFIX))
}

/// Removes a cgroup, and those in it of a `run` that was killed with its watchdog. Fails while a
/// process is in one of them.
fn remove_nested(folder: &Path) -> io::Result<()> {
    for entry in read_dir(folder)?.flatten().filter(|entry| is_of_run(&entry.path())) {
        let _ = remove_nested(&entry.path());
    }
    std::fs::remove_dir(folder)
}

/// Where the cgroup of version 2 that this process belongs to is mounted.
fn folder(mounts: &str, own: &str) -> Option<PathBuf> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mount = mounts.lines().find_map(|line| {
        let (mount, _) = line.split_once(" - cgroup2 ")?;
        let mut words = mount.split(' ').skip(3);
        let (root, point) = (words.next()?, words.next()?);
        // A backslash begins the code of a character such as a space.
        (!point.contains('\\')).then_some((root, point))
    })?;
    let inside = own.strip_prefix(mount.0.trim_end_matches('/'))?;
    // With `..`, this process is outside of what this container shows.
    (!inside.contains("..")).then(|| Path::new(mount.1).join(inside.trim_start_matches('/')))
}

fn own_members(folder: &Path) -> Vec<Pid> {
    // A process outside of this container is 0 there.
    let list = read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    list.lines().filter_map(number).collect()
}

fn members(folder: &Path) -> Vec<Pid> {
    let mut found = own_members(folder);
    for entry in read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(members(&entry.path()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_cgroup_is_found_where_it_is_mounted() {
        let mount = |root: &str, point: &str| {
            format!(
                "24 1 0:22 / /proc rw - proc proc rw\n30 24 0:27 {root} {point} rw,relatime shared:9 - cgroup2 cgroup rw\n"
            )
        };
        for (root, point, own, found) in [
            (
                "/",
                "/sys/fs/cgroup",
                "0::/system.slice/cron.service\n",
                Some("/sys/fs/cgroup/system.slice/cron.service"),
            ),
            ("/", "/sys/fs/cgroup/unified", "4:memory:/x\n0::/\n", Some("/sys/fs/cgroup/unified")),
            ("/docker/7", "/sys/fs/cgroup", "0::/docker/7/job\n", Some("/sys/fs/cgroup/job")),
            ("/docker/7", "/sys/fs/cgroup", "0::/docker/8\n", None),
            ("/", "/sys/fs/cgroup", "0::/../outside\n", None),
            ("/", "/sys/fs/a\\040b", "0::/\n", None),
            ("/", "/sys/fs/cgroup", "4:memory:/x\n", None),
        ] {
            assert_eq!(folder(&mount(root, point), own).as_deref(), found.map(Path::new), "{root} {own}");
        }
        assert_eq!(folder("24 1 0:22 / /proc rw - proc proc rw\n", "0::/\n"), None);
    }
}
