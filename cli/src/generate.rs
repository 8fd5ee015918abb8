//! `redlatch completions` and `redlatch man`: what a package installs beside the program.

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::exit::{Failure, print};

/// Print completions for a shell.
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    shell: Shell,
}

impl CompletionsArgs {
    pub(crate) fn execute<Program: CommandFactory>(&self) -> Result<u8, Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Program::command(), "redlatch", &mut script);
        print(String::from_utf8_lossy(&script).trim_end())?;
        Ok(0)
    }
}

/// Print the manual page of the program, or of one command, for man(1).
#[derive(clap::Args)]
pub(crate) struct ManArgs {
    /// A command, such as `run`, or `quorum rejoin`.
    command: Vec<String>,
}

impl ManArgs {
    pub(crate) fn execute<Program: CommandFactory>(&self) -> Result<u8, Failure> {
        let subject = page_of(Program::command(), &self.command)?;
        let mut page = Vec::new();
        let man = clap_mangen::Man::new(subject).source(concat!("redlatch ", env!("CARGO_PKG_VERSION")));
        man.render(&mut page).map_err(Failure::os("write the page"))?;
        // The generator does not know that `--` comes before the command of `run`, nor what the
        // text after the options is.
        let page = String::from_utf8_lossy(&page).replace(r"<\fICOMMAND\fR>", r"\-\- \fICOMMAND\fR...");
        let page = page.replace(".SH EXTRA", ".SH EXIT STATUS");
        print(page.trim_end())?;
        Ok(0)
    }
}

/// The command, with the options that all commands have.
fn page_of(mut program: Command, words: &[String]) -> Result<Command, Failure> {
    program.build();
    let mut found = program;
    for word in words {
        let next = found.find_subcommand(word).cloned();
        found = next.ok_or_else(|| Failure::Usage(format!("{:?} is not a command", words.join(" "))))?;
    }
    Ok(found.version(env!("CARGO_PKG_VERSION")))
}
