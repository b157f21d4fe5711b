//! A row of named stages: stops at the first that fails, and closes with a summary.

use anyhow::{Context, Result};
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

/// Runs the stages in order.
pub(crate) fn run(stages: &[Stage<'_>]) -> Result<()> {
    let mut lines = Vec::new();
    let mut failure = None;
    for (name, stage) in stages {
        println!("--- {name}");
        let start = Instant::now();
        let result = stage();
        lines.push(line(name, result.as_ref(), start.elapsed()));
        if let Err(error) = result {
            failure = Some(Err(error).with_context(|| format!("stage `{name}` failed")));
            break;
        }
    }
    println!("--- summary");
    for line in lines {
        println!("{line}");
    }
    failure.unwrap_or(Ok(()))
}

fn line(name: &str, result: Result<&Outcome, &anyhow::Error>, took: Duration) -> String {
    let ended = match result {
        Ok(Outcome::Passed) => "ok".to_owned(),
        Ok(Outcome::Skipped(why)) => format!("skipped: {why}"),
        Err(_) => "FAILED".to_owned(),
    };
    format!("{name:<16} {:>7.1} s  {ended}", took.as_secs_f64())
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
    fn a_skipped_stage_says_why() {
        let outcome = Outcome::Skipped("no such tool".to_owned());
        let line = line("deny", Ok(&outcome), Duration::from_millis(1500));
        assert_eq!(line, "deny                 1.5 s  skipped: no such tool");
    }
}
