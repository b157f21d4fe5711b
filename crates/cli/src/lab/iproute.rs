//! `ip` and `tc`, a batch of commands at a time.

use super::LabError;
use super::namespace::Namespace;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// One of iproute2's programs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tool {
    /// Interfaces, addresses and routes.
    Ip,
    /// Queues.
    Tc,
}

impl Tool {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Tc => "tc",
        }
    }

    /// Where it is. A user's path often leaves out where programs for root are.
    pub(super) fn find(self) -> Result<PathBuf, LabError> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
        let mut programs = folders.map(|folder| folder.join(self.name()));
        programs.find(|program| program.is_file()).ok_or(LabError::NoTool { name: self.name() })
    }

    /// Runs `lines` in `namespace`, one after the other, until one fails.
    pub(super) fn batch(self, namespace: &Namespace, lines: &[String]) -> Result<(), LabError> {
        let mut text = lines.join("\n");
        text.push('\n');
        self.run(namespace, &["-batch", "-"], &text).map(drop)
    }

    /// What it prints in `namespace`.
    pub(super) fn ask(self, namespace: &Namespace, words: &[&str]) -> Result<Vec<u8>, LabError> {
        self.run(namespace, words, "")
    }

    fn run(self, namespace: &Namespace, words: &[&str], input: &str) -> Result<Vec<u8>, LabError> {
        let refused = |source| LabError::Start { name: self.name(), source };
        let mut command = Command::new(self.find()?);
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        namespace.host(&mut command).map_err(refused)?;
        let mut child = command.spawn().map_err(refused)?;
        if let Some(mut stdin) = child.stdin.take() {
            match stdin.write_all(input.as_bytes()) {
                // It failed early; its own words say why.
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
                result => result.map_err(refused)?,
            }
        }
        let output = child.wait_with_output().map_err(refused)?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        Err(LabError::Tool { name: self.name(), what: failed_line(&said, input, words), said })
    }
}

/// The command that failed: `-batch` says in which line it was.
fn failed_line(said: &str, input: &str, words: &[&str]) -> String {
    let number = said.rsplit_once("-:").and_then(|(_, number)| number.trim().parse::<usize>().ok());
    let line = number.and_then(|number| input.lines().nth(number.checked_sub(1)?));
    line.map_or_else(|| words.join(" "), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_failed_is_named() {
        let input = "link set a up\nlink set b up\n";
        let said = "Cannot find device \"b\"; Command failed -:2";
        assert_eq!(failed_line(said, input, &["-batch", "-"]), "link set b up");
        assert_eq!(failed_line("no such option", input, &["-x"]), "-x");
        assert_eq!(failed_line("Command failed -:9", input, &["-batch", "-"]), "-batch -");
    }
}
