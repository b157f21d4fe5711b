//! `poseidon completions`: what a shell needs to complete the command's words.

use crate::terminal::say;
use clap::CommandFactory;
use clap_complete::{Shell, generate};
use std::process::ExitCode;

/// Print a script that lets a shell complete subcommands and flags.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The shell.
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Prints the script.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    generate(args.shell, &mut crate::Cli::command(), "poseidon", &mut script);
    say(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}

const EXAMPLES: &str = "\
Examples:
  Where each shell looks for it:
    poseidon completions bash > ~/.local/share/bash-completion/completions/poseidon
    poseidon completions zsh > ~/.zfunc/_poseidon       # with fpath+=~/.zfunc before compinit
    poseidon completions fish > ~/.config/fish/completions/poseidon.fish";
