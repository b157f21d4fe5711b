//! What the terminal shows while a model is trained.
//!
//! A terminal that is gone is no reason to stop training. What could not be written is told at the
//! end.

use crate::report::{EpochReport, LayerReport, Report, units};
use crate::terminal::{Paint, printable, said, table, terminal_width};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// How much is shown, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A moving bar on stderr, and lines that stay.
    Live,
    /// Lines only: for logs.
    Plain,
    /// Nothing.
    Silent,
}

impl Kind {
    /// [`Kind::Live`] if stderr is a terminal.
    pub(crate) fn detect() -> Self {
        if io::stderr().is_terminal() { Self::Live } else { Self::Plain }
    }
}

/// How far the epoch is after a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepProgress {
    pub(crate) step_in_epoch: u64,
    pub(crate) loss: f64,
    pub(crate) accuracy: f64,
    pub(crate) images_per_second: f64,
    /// Until the end of training.
    pub(crate) seconds_left: f64,
}

/// Shows the plan, the progress and the result of a run.
pub(crate) struct Screen {
    kind: Kind,
    out: Box<dyn Write + Send>,
    paint: Paint,
    width: usize,
    epoch: Epoch,
    bar: Option<ProgressBar>,
    /// When the last line about progress was printed; only [`Kind::Plain`] prints such lines.
    told: Option<Instant>,
    /// Why lines are missing. A reader that is gone has seen enough: that is no reason.
    unwritten: Option<io::Error>,
}

/// The epoch under way.
#[derive(Clone, Copy, Debug, Default)]
struct Epoch {
    number: u64,
    of: u64,
    steps: u64,
}

impl Screen {
    /// A screen of this process: lines that stay go to `out`, the bar to stderr.
    pub(crate) fn new<W>(kind: Kind, out: W) -> Self
    where
        W: Write + IsTerminal + Send + 'static,
    {
        let paint = Paint { on: crate::wants_colour(&out) };
        Self::with(kind, Box::new(out), paint, terminal_width())
    }

    fn with(kind: Kind, out: Box<dyn Write + Send>, paint: Paint, width: usize) -> Self {
        Self {
            kind,
            out,
            paint,
            width,
            epoch: Epoch::default(),
            bar: None,
            told: None,
            unwritten: None,
        }
    }

    /// What is about to happen, in one line.
    pub(crate) fn headline(&mut self, line: &str) {
        self.lines(&[self.paint.bold(&printable(line)), String::new()]);
    }

    /// The plan as a table.
    pub(crate) fn plan(&mut self, layers: &[LayerReport]) {
        let lines = table::plan(layers, self.width, self.paint);
        self.lines(&lines);
        self.lines(&[String::new()]);
    }

    /// Epochs are counted from 1.
    pub(crate) fn epoch_begin(&mut self, now: Instant, epoch: u64, epochs: u64, steps: u64) {
        self.epoch = Epoch { number: epoch, of: epochs, steps };
        self.told = Some(now);
        self.start_bar(steps, &self.epoch.label());
    }

    /// After each step, or as often as there is news.
    pub(crate) fn step(&mut self, now: Instant, progress: StepProgress) {
        let StepProgress { step_in_epoch, loss, accuracy, images_per_second, seconds_left } =
            progress;
        let news = format!(
            "loss {}  acc {}  {} img/s  {} left",
            units::loss(loss),
            units::percent(accuracy),
            units::rate(images_per_second),
            whole_seconds(seconds_left),
        );
        if let Some(bar) = &self.bar {
            bar.set_position(step_in_epoch);
            bar.set_message(news);
            return;
        }
        let due = self.told.is_none_or(|told| now.saturating_duration_since(told) >= NEWS);
        if self.kind == Kind::Plain && due {
            self.told = Some(now);
            let Epoch { steps, .. } = self.epoch;
            self.lines(&[format!("{}  step {step_in_epoch}/{steps}  {news}", self.epoch.label())]);
        }
    }

    /// While the model is tested: `done` of `total` images.
    pub(crate) fn evaluation(&mut self, done: u64, total: u64) {
        if self.bar.as_ref().is_none_or(|bar| bar.prefix() != TESTING) {
            self.start_bar(total, TESTING);
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    /// Prints the line that stays when an epoch is over.
    pub(crate) fn epoch_end(&mut self, epoch: &EpochReport) {
        self.clear_bar();
        let digits = digits(self.epoch.of);
        let test = match epoch.test_accuracy {
            Some(accuracy) => {
                format!(
                    "  test acc {}",
                    self.paint.bold(&format!("{:>6}", units::percent(accuracy)))
                )
            }
            None => String::new(),
        };
        let line = format!(
            "epoch {:>digits$}/{}  loss {:>7}  train acc {:>6}{test}  {:>6} img/s  {:>7}",
            epoch.epoch,
            self.epoch.of,
            units::loss(epoch.train_loss),
            units::percent(epoch.train_accuracy),
            units::rate(epoch.images_per_second),
            units::duration(epoch.seconds),
        );
        self.lines(&[line]);
    }

    /// Prints something that happened beside the training.
    pub(crate) fn note(&mut self, line: &str) {
        self.lines(&[printable(line)]);
    }

    /// Whether all lines were written.
    pub(crate) fn outcome(&mut self) -> anyhow::Result<()> {
        said(self.unwritten.take().map_or(Ok(()), Err))
    }

    /// Prints the result of the run, and where its report lies, if it was written.
    pub(crate) fn finish(&mut self, report: &Report, page: Option<&Path>) {
        self.clear_bar();
        let total = report.nodes.iter().map(|node| node.bytes_sent).fold(0, u64::saturating_add);
        let accuracy = report.test_accuracy.map_or("not tested".into(), units::percent);
        let mut rows: Vec<_> =
            report.partial.iter().map(|why| ("not whole", printable(why))).collect();
        rows.extend([
            ("test accuracy", self.paint.bold(&accuracy)),
            ("final loss", units::loss(report.final_loss)),
            (
                "speed",
                format!(
                    "{} images/s; {} in {}",
                    units::rate(report.images_per_second),
                    units::plural(report.steps - report.steps_before, "step"),
                    units::duration(report.seconds)
                ),
            ),
        ]);
        if report.bytes_per_step() > 0 {
            let hidden = units::percent(report.overlap_hidden_fraction);
            rows.extend([
                ("communication", format!("{hidden} of it hidden behind computation")),
                (
                    "sent",
                    format!(
                        "{} per step and node, {} in all",
                        units::bytes(report.bytes_per_step()),
                        units::bytes(total)
                    ),
                ),
            ]);
        }
        let turnout = report.nodes.iter().filter_map(|node| Some((node.rank, node.turnout?)));
        let steps = report.steps - report.steps_before;
        let slow: Vec<String> = turnout
            .filter(|(_, of)| of.steps_counted < steps)
            .map(|(rank, of)| format!("worker {rank} in {}", steps - of.steps_counted))
            .collect();
        if !slow.is_empty() {
            let steps = units::plural(steps, "step");
            rows.push(("dropped", format!("{} of {steps}", slow.join(", "))));
        }
        rows.push(("parameters", printable(&report.parameter_digest)));
        let page = page.map(|page| self.paint.bold(&printable(&page.display().to_string())));
        rows.extend(page.map(|page| ("report", page)));
        let rows = rows
            .iter()
            .map(|(name, value)| format!("{}  {value}", self.paint.dim(&format!("{name:<13}"))));
        let lines: Vec<_> = std::iter::once(String::new()).chain(rows).collect();
        self.lines(&lines);
    }

    fn start_bar(&mut self, len: u64, label: &str) {
        self.clear_bar();
        if self.kind != Kind::Live {
            return;
        }
        let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr());
        bar.set_style(bar_style(self.paint, self.width));
        bar.set_prefix(label.to_owned());
        self.bar = Some(bar);
    }

    fn clear_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn lines(&mut self, lines: &[String]) {
        if self.kind == Kind::Silent {
            return;
        }
        let mut text = lines.join("\n");
        text.push('\n');
        let (out, unwritten) = (&mut self.out, &mut self.unwritten);
        let mut write = || {
            let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            if let Err(error) = written
                && error.kind() != io::ErrorKind::BrokenPipe
            {
                unwritten.get_or_insert(error);
            }
        };
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

impl Epoch {
    fn label(&self) -> String {
        format!("epoch {:>1$}/{2}", self.number, digits(self.of), self.of)
    }
}

fn digits(number: u64) -> usize {
    number.to_string().len()
}

/// An estimate: tenths of a second would only flicker.
fn whole_seconds(seconds: f64) -> String {
    if (0.0..59.5).contains(&seconds) {
        format!("{seconds:.0} s")
    } else {
        units::duration(seconds)
    }
}

fn bar_style(paint: Paint, width: usize) -> ProgressStyle {
    let bar = width.saturating_sub(NEXT_TO_BAR).clamp(4, 28);
    let colours = if paint.on { ".cyan/dim" } else { "" };
    let template = format!("{{prefix}} {{bar:{bar}{colours}}} {{pos}}/{{len}}  {{msg}}");
    // The template is ours and whole.
    ProgressStyle::with_template(&template).expect("a bad template").progress_chars("━╸─")
}

/// What the text beside the bar takes in a run of a usual size.
const NEXT_TO_BAR: usize = 76;
/// Between lines that tell of progress: often enough to see that it lives, rare enough for a log.
const NEWS: Duration = Duration::from_secs(10);
const TESTING: &str = "testing";

#[cfg(test)]
mod tests;
