//! `poseidon man`: the pages of the manual, made of the same words as `--help`.

use crate::terminal::say;
use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Print the manual page of the command, or of a subcommand; or write all pages to a folder.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The subcommand whose page is wanted, such as 'launch' or 'bench exchange' [default: the
    /// command's own].
    #[arg(value_name = "SUBCOMMAND", conflicts_with = "out")]
    subcommand: Vec<String>,

    /// Write the pages of all subcommands to this folder, poseidon.1, poseidon-train.1 and so on.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Prints the page, or writes all of them.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut command = crate::Cli::command();
    command.build();
    if let Some(folder) = args.out {
        fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
        write_all(&named(&command, "poseidon"), &folder)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (mut found, mut name) = (&command, "poseidon".to_owned());
    for word in &args.subcommand {
        let known = || {
            let words = visible(found).map(Command::get_name).collect::<Vec<_>>().join(", ");
            format!("'{name}' has no subcommand '{word}': expected one of {words}")
        };
        let next = visible(found).find(|c| c.get_name() == word).with_context(known)?;
        name = format!("{name}-{word}");
        found = next;
    }
    say(&page(&named(found, &name))?)?;
    Ok(ExitCode::SUCCESS)
}

/// The command under the name of its page.
fn named(command: &Command, name: &str) -> Command {
    // clap keeps names for as long as the process lives.
    let name: &'static str = Box::leak(name.to_owned().into_boxed_str());
    command.clone().name(name).display_name(name)
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help")
}

fn write_all(command: &Command, folder: &Path) -> anyhow::Result<()> {
    let path = folder.join(format!("{}.1", command.get_name()));
    fs::write(&path, page(command)?).with_context(|| format!("{}", path.display()))?;
    for next in visible(command) {
        let name = format!("{}-{}", command.get_name(), next.get_name());
        write_all(&named(next, &name), folder)?;
    }
    Ok(())
}

fn page(command: &Command) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    Man::new(command.clone()).render(&mut bytes)?;
    Ok(String::from_utf8(bytes)?)
}

const EXAMPLES: &str = "\
Examples:
  Read a page at once:
    poseidon man launch | man -l -

  Install all of them for yourself:
    poseidon man --out ~/.local/share/man/man1";
