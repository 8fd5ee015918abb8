//! `scripts/release-lua`: the archive for other languages has all that its user needs.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

#[path = "../../conventions/links.rs"]
mod links;

use crate::support::Server;
use links::assert_links_exist;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The standard output of a command, which must succeed.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

fn git(arguments: &[&str]) -> String {
    let mut git = Command::new("git");
    for role in ["AUTHOR", "COMMITTER"] {
        git.env(format!("GIT_{role}_NAME"), "test").env(format!("GIT_{role}_EMAIL"), "test@localhost");
    }
    output(git.current_dir(root()).args(arguments)).trim().to_owned()
}

/// A commit of the changes in the work tree, or `HEAD` if there are none. `None`: the tests run in
/// a copy without a repository.
static COMMIT: LazyLock<Option<String>> = LazyLock::new(|| {
    if !root().join(".git").exists() {
        eprintln!("left out: an archive is made of a commit, and there is no repository here");
        return None;
    }
    let changes = git(&["stash", "create"]);
    Some(if changes.is_empty() { git(&["rev-parse", "HEAD"]) } else { changes })
});

/// An archive, unpacked.
struct Archive {
    commit: &'static str,
    file: PathBuf,
    folder: PathBuf,
    _temporary: tempfile::TempDir,
}

impl Archive {
    fn make() -> Option<Archive> {
        let commit = COMMIT.as_deref()?;
        let temporary = tempfile::tempdir().unwrap();
        let file = release(commit, &temporary.path().join("first"), "umask 022");
        output(Command::new("tar").arg("-xzf").arg(&file).current_dir(temporary.path()));
        let name = file.file_name().unwrap().to_str().unwrap().strip_suffix(".tar.gz").unwrap();
        let folder = temporary.path().join(name);
        Some(Archive { commit, file, folder, _temporary: temporary })
    }
}

/// Makes the archive of a commit in a folder, after a command of the shell.
fn release(commit: &str, folder: &Path, before: &str) -> PathBuf {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{before}; exec scripts/release-lua \"$@\""), "sh", commit]).arg(folder);
    output(shell.current_dir(root())).trim().into()
}

/// The files in a folder and its subfolders, relative to it.
fn files(top: &Path) -> BTreeSet<String> {
    let (mut files, mut folders) = (BTreeSet::new(), vec![top.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.insert(path.strip_prefix(top).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    files
}

#[test]
fn archive_has_the_files_of_the_repository() {
    let Some(archive) = Archive::make() else { return };
    let listed = git(&["ls-tree", "-r", "--name-only", &format!("{}:lua", archive.commit)]);
    let mut expected: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    expected.insert("VERSION".to_owned());
    assert_eq!(files(&archive.folder), expected);
    output(Command::new("sha1sum").args(["--check", "SHA1SUMS"]).current_dir(&archive.folder));
    let version = std::fs::read_to_string(archive.folder.join("VERSION")).unwrap();
    let (name, commit) = (env!("CARGO_PKG_VERSION"), archive.commit);
    assert_eq!(version, format!("redlatch-lua {name}\nprotocol 1\ncommit {commit}\n"));
}

#[test]
fn archive_has_the_same_bytes_whenever_and_wherever_it_is_made() {
    let Some(archive) = Archive::make() else { return };
    let other = archive.folder.join("../other");
    let again = release(archive.commit, &other, "umask 077; export TZ=Asia/Tokyo LC_ALL=C");
    assert!(std::fs::read(&archive.file).unwrap() == std::fs::read(again).unwrap());
}

/// A link that leads outside of the archive leads to no file here.
#[test]
fn archive_has_every_file_that_its_pages_link_to() {
    let Some(archive) = Archive::make() else { return };
    let pages = files(&archive.folder).into_iter().filter(|file| file.ends_with(".md"));
    let pages: Vec<_> = pages.map(|page| archive.folder.join(page)).collect();
    assert!(pages.len() >= 6, "{pages:?}");
    pages.iter().for_each(|page| assert_links_exist(page));
}

#[tokio::test]
async fn archive_runs_its_vectors() {
    let Some(archive) = Archive::make() else { return };
    // scripts/interop installs redis-py there.
    let installed = root().join("target/interop/venv/bin/python");
    let has_redis = |python: &&OsStr| {
        Command::new(python).args(["-c", "import redis"]).output().is_ok_and(|found| found.status.success())
    };
    let Some(python) = [installed.as_os_str(), OsStr::new("python3")].into_iter().find(has_redis) else {
        eprintln!("left out: no Python with redis-py here");
        return;
    };
    let server = Server::start().await;
    let mut runner = Command::new(python);
    runner.arg("-B").arg("vectors/run.py").arg(format!("127.0.0.1:{}", server.port()));
    runner.args(["vectors/level1.jsonl", "vectors/level3.jsonl"]).current_dir(&archive.folder);
    tokio::task::spawn_blocking(move || output(&mut runner)).await.unwrap();
}
