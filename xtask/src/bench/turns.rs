//! A contender on every node of a cluster, which is asked for one turn after the other.
//!
//! Several contenders are on the same nodes and take turns, so whatever else the machine does
//! befalls all of them.

use super::cluster::Cluster;
use super::measurement::Measurement;
use super::size::Size;
use crate::command::{drain, end, tail, wait_until};
use anyhow::{Context, Result, anyhow, bail};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The processes of a contender. They start once, because that takes longer than an exchange, and
/// wait while another contender has its turn.
pub(crate) struct Contender {
    child: Child,
    /// Rank 0's; closed at the end.
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    said: Option<JoinHandle<String>>,
}

/// What a turn showed.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) measurement: Measurement,
    /// Bytes per iteration, headers included, in the direction of the port that carried fewest.
    pub(crate) wire: f64,
    /// The same in the direction of the port that carried most.
    pub(crate) most_wire: f64,
}

/// What a contender is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) size: Size,
    /// Iterations that are counted.
    pub(crate) iters: u64,
    /// Seconds that the bytes of one iteration take a port.
    pub(crate) port_seconds: f64,
}

/// Iterations of a turn that are not counted. Contenders have the same number.
pub(crate) const WARM_UP: u64 = 1;

/// A start takes seconds; 32 interpreters that import torch on two cores take a minute or two.
const START: Duration = Duration::from_secs(300);
/// A turn that takes this long beyond the time of its bytes hangs.
const SLACK: Duration = Duration::from_secs(120);
const GOODBYE: Duration = Duration::from_secs(20);

impl Contender {
    /// Starts a command that runs on every node, and waits until it is ready.
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut contender = Self::spawn(command)?;
        contender.line(START, |line| line == "ready")?;
        Ok(contender)
    }

    fn spawn(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting a contender")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let said = Some(drain(child.stderr.take()));
        let (send, lines) = channel();
        thread::spawn(move || {
            let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
            // Whoever no longer listens has seen enough.
            lines.map_while(Result::ok).take_while(|line| send.send(line.clone()).is_ok()).count();
        });
        Ok(Self { child, input, lines, said })
    }

    /// Has the contender take a turn.
    pub(crate) fn turn(&mut self, cluster: &Cluster, ask: Ask) -> Result<Turn> {
        let Ask { size, iters, port_seconds } = ask;
        let iterations = (iters + WARM_UP) as f64;
        let limit = SLACK + Duration::from_secs_f64(20.0 * iterations * port_seconds);
        let before = cluster.carried()?;
        let measurement = self.ask(size.0, iters, limit)?;
        let after = cluster.carried()?;
        let least = grown(&before, &after).min().unwrap_or(0);
        let most = grown(&before, &after).max().unwrap_or(0);
        let [wire, most_wire] = [least, most].map(|bytes| bytes as f64 / iterations);
        Ok(Turn { measurement, wire, most_wire })
    }

    /// Has the contender take a turn of `iters` exchanges of `bytes`, which must be over within `limit`.
    pub(crate) fn ask(&mut self, bytes: u64, iters: u64, limit: Duration) -> Result<Measurement> {
        let mut input = self.input.as_ref().context("its input is closed")?;
        if let Err(error) = writeln!(input, "{bytes} {iters}") {
            return Err(self.story(&format!("it is gone ({error})")));
        }
        Measurement::find(&self.line(limit, |line| line.starts_with('{'))?)
    }

    /// The next line that is wanted.
    fn line(&mut self, limit: Duration, wanted: impl Fn(&str) -> bool) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if wanted(&line) => return Ok(line),
                Ok(_) => {}
                Err(_) => {
                    let over = wait_until(&mut self.child, Instant::now() + GOODBYE)?;
                    let limit = limit.as_secs();
                    let how = match over {
                        Some(status) => format!("it ended: {status}"),
                        None => format!("no answer within {limit} s"),
                    };
                    return Err(self.story(&how));
                }
            }
        }
    }

    /// What happened, with the end of what the contender wrote to standard error.
    fn story(&mut self, how: &str) -> anyhow::Error {
        // Standard error ends with the last process.
        let _ = end(&mut self.child);
        let said = self.said.take().and_then(|said| said.join().ok()).unwrap_or_default();
        anyhow!("{how}: {}", tail(&said))
    }
}

impl Turn {
    /// Seconds of an iteration: the mean, because an iteration that waits for a timer counts as
    /// much as the others.
    pub(crate) fn seconds(&self) -> f64 {
        self.measurement.seconds.mean
    }

    /// CPU seconds of an iteration, of all ranks.
    pub(crate) fn cpu(&self) -> f64 {
        self.measurement.cpu_seconds_per_iter
    }
}

impl Drop for Contender {
    fn drop(&mut self) {
        drop(self.input.take());
        let over = wait_until(&mut self.child, Instant::now() + GOODBYE);
        if !matches!(over, Ok(Some(_))) && end(&mut self.child).is_err() {
            eprintln!("process {} is left, and does not end", self.child.id());
        }
    }
}

/// Busy threads of this machine, for as long as this lives: the same load beside all contenders.
pub(crate) struct Load(Child);

impl Load {
    /// `per_core` threads on each core; none for 0.
    pub(crate) fn start(poseidon: &str, per_core: u64) -> Result<Option<Self>> {
        if per_core == 0 {
            return Ok(None);
        }
        let threads = per_core * thread::available_parallelism()?.get() as u64;
        let mut busy = Command::new(poseidon);
        busy.args(["bench", "busy", "--threads", &threads.to_string()]).stdin(Stdio::piped());
        let mut load = Self(busy.spawn().context("starting busy threads")?);
        // One that cannot compute ends at once, or says so.
        if let Some(status) = wait_until(&mut load.0, Instant::now() + Duration::from_millis(200))?
        {
            bail!("busy threads ended: {status}");
        }
        Ok(Some(load))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        if !matches!(wait_until(&mut self.0, Instant::now() + GOODBYE), Ok(Some(_))) {
            // A load that stays would fall on the next case.
            let _ = end(&mut self.0);
        }
    }
}

/// By counter: what it grew by.
pub(crate) fn grown(before: &[u64], after: &[u64]) -> impl Iterator<Item = u64> {
    before.iter().zip(after).map(|(before, after)| after.saturating_sub(*before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::command;

    /// A shell in a contender's place.
    fn shell(script: &str) -> Contender {
        Contender::spawn(&mut command(&["sh", "-c", script])).unwrap()
    }

    const ANSWER: &str = r#"{"workers":2,"bytes":4,"iters":9,"link":null,"chunk":null,"lanes":null,
        "seconds":{"mean":1,"median":1,"p10":1,"p90":1},"cpu_seconds_per_iter":1,
        "bytes_sent_per_node":null,"peak_rss_bytes":null}"#;

    #[test]
    fn a_contender_answers_every_turn_it_is_asked_for() {
        let answer = ANSWER.replace('\n', " ");
        let script = format!("while read bytes iters; do echo noise; echo '{answer}'; done");
        let mut contender = shell(&script);
        for _ in 0..3 {
            assert_eq!(contender.ask(4, 9, SLACK).unwrap().iters, 9);
        }
    }

    #[test]
    fn a_contender_that_ends_is_quoted() {
        let mut contender = shell("echo no route >&2; exit 3");
        let error = contender.line(SLACK, |line| line == "ready").unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("no route"), "{error}");
    }

    #[test]
    fn bytes_of_a_turn_are_what_the_counts_grew_by() {
        assert_eq!(grown(&[10, 20, 5, 7], &[13, 22, 9, 8]).collect::<Vec<_>>(), [3, 2, 4, 1]);
    }
}
