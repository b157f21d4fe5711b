//! A row of named stages: stops at the first that fails, and closes with a summary.

use anyhow::{Context, Result};
use std::fs;
use std::time::{Duration, Instant};

/// How a stage that did not fail ended.
pub(crate) enum Outcome {
    /// It ran.
    Passed,
    /// It did not run, and why.
    Skipped(String),
}

/// One stage: its name and what it does.
pub(crate) type Stage<'a> = (&'a str, &'a dyn Fn() -> Result<Outcome>);

/// What a stage cost.
struct Cost {
    /// Time that passed.
    took: Duration,
    /// Processor time of all programs that have ended, if the system tells it.
    cpu: Option<Duration>,
}

/// Runs the stages in order.
pub(crate) fn run(stages: &[Stage<'_>]) -> Result<()> {
    run_within(None, stages)
}

/// Runs the stages in order. None begins after so many `minutes`.
pub(crate) fn run_within(minutes: Option<u64>, stages: &[Stage<'_>]) -> Result<()> {
    let mut lines = Vec::new();
    let mut failure = None;
    let (start, cpu_before) = (Instant::now(), cpu_time());
    let since = |start: Instant, before: Option<Duration>| Cost {
        took: start.elapsed(),
        cpu: cpu_time().zip(before).map(|(now, before)| now.saturating_sub(before)),
    };
    for (name, stage) in stages {
        println!("--- {name}");
        let over = minutes.filter(|minutes| start.elapsed().as_secs() >= 60 * minutes);
        let (start, cpu_before) = (Instant::now(), cpu_time());
        let result = match over {
            Some(minutes) => Ok(Outcome::Skipped(format!("{minutes} minutes were over"))),
            None => stage(),
        };
        let line = line(name, &ended(result.as_ref()), &since(start, cpu_before));
        println!("{line}");
        lines.push(line);
        if let Err(error) = result {
            failure = Some(Err(error).with_context(|| format!("stage `{name}` failed")));
            break;
        }
    }
    println!("--- summary");
    lines.push(line("all", "", &since(start, cpu_before)));
    for line in lines {
        println!("{line}");
    }
    failure.unwrap_or(Ok(()))
}

fn ended(result: Result<&Outcome, &anyhow::Error>) -> String {
    match result {
        Ok(Outcome::Passed) => "ok".to_owned(),
        Ok(Outcome::Skipped(why)) => format!("skipped: {why}"),
        Err(_) => "FAILED".to_owned(),
    }
}

fn line(name: &str, ended: &str, cost: &Cost) -> String {
    let cpu = cost.cpu.map_or_else(|| "?".to_owned(), |cpu| format!("{:.1}", cpu.as_secs_f64()));
    let line = format!("{name:<17} {:>7.1} s {cpu:>8} s CPU  {ended}", cost.took.as_secs_f64());
    line.trim_end().to_owned()
}

/// Processor time of this process and of all that it started and that have ended. Linux counts those
/// that somebody waited for: what outlives the program that started it is left out.
fn cpu_time() -> Option<Duration> {
    ticks(&fs::read_to_string("/proc/self/stat").ok()?)
        .map(|ticks| Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND))
}

/// Of every Linux, in what it tells programs.
const TICKS_PER_SECOND: f64 = 100.0;

/// The sum of `utime`, `stime`, `cutime` and `cstime` of proc_pid_stat(5).
fn ticks(stat: &str) -> Option<u64> {
    // The name comes before, in brackets. It may have spaces.
    let (_, numbers) = stat.rsplit_once(')')?;
    let times = numbers.split_whitespace().skip(11).take(4);
    let times: Vec<u64> = times.map(|time| time.parse().ok()).collect::<Option<_>>()?;
    (times.len() == 4).then(|| times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;
    use std::cell::Cell;

    #[test]
    fn stops_at_the_first_failure_and_names_it() {
        let reached = Cell::new(false);
        let fails = || Err(anyhow!("two and two is five"));
        let last = || {
            reached.set(true);
            Ok(Outcome::Passed)
        };
        let error = run(&[("sums", &fails), ("last", &last)]).unwrap_err();
        assert_eq!(format!("{error:#}"), "stage `sums` failed: two and two is five");
        assert!(!reached.get());
    }

    #[test]
    fn no_stage_begins_when_the_time_is_over() {
        let fails = || Err(anyhow!("it has begun"));
        assert!(run_within(Some(0), &[("late", &fails)]).is_ok());
        assert!(run_within(Some(1), &[("early", &fails)]).is_err());
    }

    #[test]
    fn a_skipped_stage_says_why() {
        let outcome = Outcome::Skipped("no such tool".to_owned());
        let cost = Cost { took: Duration::from_millis(1500), cpu: Some(Duration::from_millis(40)) };
        let line = line("deny", &ended(Ok(&outcome)), &cost);
        assert_eq!(line, "deny                  1.5 s      0.0 s CPU  skipped: no such tool");
    }

    #[test]
    fn processor_time_counts_what_has_ended() {
        let stat = "7 (a) name) R 1 7 7 0 -1 4194304 81 0 0 0 1 20 300 4000 20 0 1 0 5 6 7";
        assert_eq!(ticks(stat), Some(4321));
        assert_eq!(ticks("7 (name) R 1 7"), None);
        assert!(cpu_time().is_some());
    }
}
