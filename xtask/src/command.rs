//! Running other programs.

use anyhow::{Context, Result, anyhow, bail};
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// A command from its words: the first is the program.
pub(crate) fn command<S: AsRef<str>>(words: &[S]) -> Command {
    let mut command = Command::new(words[0].as_ref());
    command.args(words[1..].iter().map(AsRef::as_ref));
    command
}

/// Runs a command on this terminal and requires success.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("starting {}", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", shown(command));
    }
    Ok(())
}

/// Whether a command can be started and succeeds; its output is thrown away.
pub(crate) fn works(words: &[&str]) -> bool {
    command(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Standard output of a short command, trimmed.
pub(crate) fn output(words: &[&str]) -> Result<String> {
    let output = command(words).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("starting `{}`", words.join(" ")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}: {}", words.join(" "), output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Standard output of a command that must end within `limit`. The error carries the end of what it
/// wrote to standard error. A command that overstays is asked to end, then ended.
pub(crate) fn output_within(command: &mut Command, limit: Duration) -> Result<String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", shown(command)))?;
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let status = wait_until(&mut child, Instant::now() + limit)?;
    if status.is_none() {
        end(&mut child)?;
    }
    let said = stderr.join().map_err(|_| anyhow!("reading standard error"))?;
    let stdout = stdout.join().map_err(|_| anyhow!("reading standard output"))?;
    match status {
        None => bail!("no end within {} s: {}", limit.as_secs(), tail(&said)),
        Some(status) if !status.success() => bail!("{status}: {}", tail(&said)),
        Some(_) => Ok(stdout),
    }
}

/// Runs a command that must end within `limit`, and hands over each line of its standard output as
/// it comes: what was printed before a command fails or overstays is not lost. The error carries
/// the end of what it wrote to standard error.
pub(crate) fn lines_within(
    command: &mut Command,
    limit: Duration,
    mut take: impl FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", shown(command)))?;
    let deadline = Instant::now() + limit;
    let stderr = drain(child.stderr.take());
    let (send, lines) = channel();
    let output = child.stdout.take();
    thread::spawn(move || {
        let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
        // Whoever no longer listens has seen enough.
        lines.map_while(Result::ok).take_while(|line| send.send(line.clone()).is_ok()).count();
    });
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut taken = Ok(());
    while taken.is_ok() {
        // No line means that output has ended, or that the time is up.
        let Ok(line) = lines.recv_timeout(left()) else { break };
        taken = take(&line);
    }
    // Output that has ended says that the command is about to; anything else is over now.
    let status = match &taken {
        Ok(()) => wait_until(&mut child, deadline)?,
        Err(_) => None,
    };
    if status.is_none() {
        end(&mut child)?;
    }
    let said = stderr.join().map_err(|_| anyhow!("reading standard error"))?;
    taken?;
    match status {
        None => bail!("no end within {} s: {}", limit.as_secs(), tail(&said)),
        Some(status) if !status.success() => bail!("{status}: {}", tail(&said)),
        Some(_) => Ok(()),
    }
}

/// Ends a command that overstays.
pub(crate) fn end(child: &mut Child) -> Result<()> {
    // The number of a process that is over may be a stranger's by now.
    if child.try_wait()?.is_some() {
        return Ok(());
    }
    // SIGTERM first: launchers such as mpirun then end the processes they have started. Every shell
    // has `kill`; the program of that name is not everywhere.
    works(&["sh", "-c", &format!("kill -TERM {}", child.id())]);
    if wait_until(child, Instant::now() + Duration::from_secs(5))?.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(())
}

/// How a command ended, if it ends before the deadline.
pub(crate) fn wait_until(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Reads a pipe to its end on a thread of its own.
pub(crate) fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read before an error is still worth showing.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The last lines of a text.
pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}

/// Where cargo puts what it builds.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from)
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_is_named() {
        let error = succeed(&mut command(&["false", "--argument"])).unwrap_err();
        assert!(error.to_string().contains("false --argument"), "{error}");
    }

    #[test]
    fn an_overstaying_command_is_ended_and_quoted() {
        let words = ["sh", "-c", "echo stuck >&2; exec sleep 600"];
        let error = output_within(&mut command(&words), Duration::from_millis(200)).unwrap_err();
        assert_eq!(error.to_string(), "no end within 0 s: stuck");
    }

    #[test]
    fn lines_come_before_a_command_fails() {
        let mut lines = Vec::new();
        let script = "echo one; echo two; echo why >&2; exit 3";
        let limit = Duration::from_secs(60);
        let ended = lines_within(&mut command(&["sh", "-c", script]), limit, |line| {
            lines.push(line.to_owned());
            Ok(())
        });
        assert_eq!(ended.unwrap_err().to_string(), "exit status: 3: why");
        assert_eq!(lines, ["one", "two"]);
    }

    #[test]
    fn a_line_that_cannot_be_used_ends_the_command() {
        let words = ["sh", "-c", "echo nonsense; exec sleep 600"];
        let limit = Duration::from_secs(60);
        let ended = lines_within(&mut command(&words), limit, |line| bail!("not a fact: {line}"));
        assert_eq!(ended.unwrap_err().to_string(), "not a fact: nonsense");
    }

    #[test]
    fn output_comes_back_whole() {
        let text = output_within(&mut command(&["echo", "a", "b"]), Duration::from_secs(60));
        assert_eq!(text.unwrap(), "a b\n");
    }
}
