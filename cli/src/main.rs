//! The program `redlatch`: runs commands under locks, and inspects and repairs locks. Its page is
//! docs/cli.md.

#[cfg(not(unix))]
compile_error!("the program needs Unix: signals and process groups");

mod admin;
mod bench;
mod certificates;
mod cgroup;
mod child_state;
mod deadline;
mod exit;
mod foreground;
mod gate;
mod generate;
mod list;
mod lock_args;
mod machine;
mod messages;
mod proc;
mod processes;
mod run;
mod servers;
mod signals;
mod span;
mod supervise;
mod view;
mod wait;
mod watch;
mod watchdog;

use std::ffi::OsString;
use std::process::ExitCode;
use std::{io, panic};

use clap::{Parser, Subcommand};
use tokio::runtime::{Builder, Runtime};

use exit::{Exit, Failure, say};
use servers::ServerArgs;

/// Locks on Redis and Valkey for shell scripts and operators.
#[derive(Parser)]
#[command(name = "redlatch", bin_name = "redlatch", version, disable_help_subcommand = true)]
#[command(after_help = exit::CODES)]
struct Arguments {
    #[command(flatten)]
    servers: ServerArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::RunArgs),
    Inspect(view::InspectArgs),
    List(list::ListArgs),
    Watch(watch::WatchArgs),
    Release(admin::ReleaseArgs),
    ForceRelease(admin::ForceReleaseArgs),
    Doctor(admin::DoctorArgs),
    Quorum(admin::QuorumArgs),
    Bench(bench::BenchArgs),
    Completions(generate::CompletionsArgs),
    Man(generate::ManArgs),
}

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    // Copies of this program, which `run` starts: they have other words than a user's.
    match words.get(1).and_then(|word| word.to_str()) {
        Some(gate::ROLE) => return gate::main(&words[2..]),
        Some(watchdog::ROLE) => return watchdog::main(&words[2..]),
        Some(foreground::ROLE) => return foreground::main(&words[2..]),
        _ => {}
    }
    match Arguments::try_parse_from(words) {
        Ok(arguments) => conclude(execute(arguments)),
        Err(error) => exit::usage::<Arguments>(error),
    }
}

fn execute(arguments: Arguments) -> Result<Exit, Failure> {
    let runtime = runtime().map_err(Failure::os("start the runtime"))?;
    let outcome = runtime.block_on(async {
        let code = match arguments.command {
            Command::Run(run) => return run.execute(&arguments.servers).await,
            Command::Inspect(inspect) => inspect.execute(&arguments.servers).await,
            Command::List(list) => list.execute(&arguments.servers).await,
            Command::Watch(watch) => watch.execute(&arguments.servers).await,
            Command::Release(release) => release.execute(&arguments.servers).await,
            Command::ForceRelease(force) => force.execute(&arguments.servers).await,
            Command::Doctor(doctor) => doctor.execute(&arguments.servers).await,
            Command::Quorum(quorum) => quorum.execute(&arguments.servers).await,
            Command::Bench(bench) => bench.execute(&arguments.servers).await,
            Command::Completions(completions) => completions.execute::<Arguments>(),
            Command::Man(man) => man.execute::<Arguments>(),
        };
        code.map(Exit::Code)
    });
    // A name lookup that hangs must not keep the program alive.
    runtime.shutdown_background();
    outcome
}

/// The main thread runs the command, and blocks while it starts processes. Leases are renewed on
/// the worker thread.
fn runtime() -> io::Result<Runtime> {
    // Some of what the system refuses is an error of tokio, and some a panic.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let built = panic::catch_unwind(|| Builder::new_multi_thread().worker_threads(1).enable_all().build());
    panic::set_hook(hook);
    built.unwrap_or_else(|_| Err(io::Error::other("too few processes or open files are allowed (ulimit)")))
}

fn conclude(outcome: Result<Exit, Failure>) -> ExitCode {
    match outcome {
        Ok(exit) => exit.now(),
        Err(failure) => {
            if !matches!(failure, Failure::Unread) {
                say(&failure.text());
            }
            ExitCode::from(failure.code())
        }
    }
}
