//! PyTorch models, described by the Python package.

use anyhow::{Context, bail};
use std::path::Path;
use std::process::{Command, Stdio};

/// The model that `factory`, which is `MODULE:FACTORY`, makes, as JSON. Runs until Python is done:
/// what a user's module does on import is the user's.
pub(super) fn describe(
    python: &Path,
    factory: &str,
    input: Option<&str>,
) -> anyhow::Result<String> {
    let mut command = Command::new(python);
    command.args(["-m", "poseidon.describe", factory]).stdin(Stdio::null());
    if let Some(shape) = input {
        command.args(["--input", shape]);
    }
    let output = command.output().with_context(|| {
        format!("cannot run {}; say which Python with --python", python.display())
    })?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        if stderr.contains("No module named 'poseidon")
            || stderr.contains("No module named poseidon")
        {
            bail!(
                "{} has no poseidon package; install bindings/python, or say which Python has it with \
                 --python",
                python.display()
            );
        }
        let last: Vec<&str> = stderr.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = last[last.len().saturating_sub(SHOWN_LINES)..].join("\n");
        bail!("{factory} could not be described: {last}");
    }
    String::from_utf8(output.stdout).context("the description is not UTF-8")
}

/// Of a traceback, the end says what went wrong.
const SHOWN_LINES: usize = 3;
