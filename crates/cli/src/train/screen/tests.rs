use super::*;
use std::sync::{Arc, Mutex};

/// Everything that was written.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn screen(kind: Kind, colour: bool) -> (Screen, Log) {
    let log = Log::default();
    (Screen::with(kind, Box::new(log.clone()), Paint { on: colour }, 100), log)
}

fn progress(step_in_epoch: u64) -> StepProgress {
    StepProgress {
        step_in_epoch,
        loss: 0.5,
        accuracy: 0.9,
        images_per_second: 1234.0,
        seconds_left: 61.2,
    }
}

fn epoch(epoch: u64, test_accuracy: Option<f64>) -> EpochReport {
    EpochReport {
        epoch,
        seconds: 12.0,
        train_loss: 0.5,
        train_accuracy: 0.9,
        test_accuracy,
        images_per_second: 1234.0,
    }
}

fn report(bytes: u64) -> Report {
    let json = serde_json::json!({
        "model": "lenet", "data": "mnist", "workers": 2, "servers": "colocated",
        "threads_per_worker": 1, "batch": 64, "steps": 938, "epochs": 1.0, "seconds": 12.0,
        "images_per_second": 10_006.0, "step_seconds": {"median": 0.1, "p10": 0.1, "p90": 0.1},
        "final_loss": null, "test_accuracy": 0.981,
        "overlap_hidden_fraction": 0.83, "parameter_digest": "00ff", "scheme": "hybrid",
        "overlap": "on", "sync": "bsp", "seed": 1, "deterministic": false, "version": "0.1.0", "command": "",
        "layers": [{
            "name": "fc1", "kind": "fc", "parameters": 10, "scheme": "ps", "reason": "",
            "bytes_sent_per_step": bytes,
        }],
        "nodes": [], "curve": [], "epochs_done": [],
        "timeline": {"step": 0, "rank": 0, "seconds": 0.0, "spans": []}, "config": "",
    });
    serde_json::from_value(json).unwrap()
}

#[test]
fn a_log_has_a_line_now_and_then_and_one_for_each_epoch() {
    let (mut screen, log) = screen(Kind::Plain, false);
    let start = Instant::now();
    screen.epoch_begin(start, 1, 10, 300);
    for second in 1..=25 {
        screen.step(start + Duration::from_secs(second), progress(second));
    }
    screen.evaluation(5, 10);
    screen.epoch_end(&epoch(1, Some(0.95)));
    assert_eq!(
        log.text(),
        "epoch  1/10  step 10/300  loss 0.5000  acc 90.0 %  1,234 img/s  1 min 01 s left\n\
         epoch  1/10  step 20/300  loss 0.5000  acc 90.0 %  1,234 img/s  1 min 01 s left\n\
         epoch  1/10  loss  0.5000  train acc 90.0 %  test acc 95.0 %   1,234 img/s   12.0 s\n"
    );
}

#[test]
fn silence_is_silent() {
    let (mut screen, log) = screen(Kind::Silent, false);
    screen.plan(&report(1000).layers);
    screen.epoch_begin(Instant::now(), 1, 1, 10);
    screen.step(Instant::now() + 2 * NEWS, progress(1));
    screen.epoch_end(&epoch(1, None));
    screen.finish(&report(1000), Some(Path::new("report.html")));
    assert_eq!(log.text(), "");
}

#[test]
fn the_summary_lines_up_and_names_the_report() {
    let (mut screen, log) = screen(Kind::Plain, false);
    screen.finish(&report(1_700_000), Some(Path::new("runs/report.html")));
    assert_eq!(
        log.text(),
        "\n\
         test accuracy  98.1 %\n\
         final loss     NaN\n\
         speed          10,006 images/s; 938 steps in 12.0 s\n\
         communication  83.0 % of it hidden behind computation\n\
         sent           1.70 MB per step and node, 0 B in all\n\
         parameters     00ff\n\
         report         runs/report.html\n"
    );
}

#[test]
fn a_single_worker_is_not_told_about_communication() {
    let (mut screen, log) = screen(Kind::Plain, false);
    screen.finish(&report(0), Some(Path::new("report.html")));
    assert!(!log.text().contains("communication") && !log.text().contains("sent"));
}

#[test]
fn colours_are_there_only_when_wanted() {
    for wanted in [true, false] {
        let (mut screen, log) = screen(Kind::Plain, wanted);
        screen.plan(&report(1000).layers);
        screen.finish(&report(1000), Some(Path::new("report.html")));
        assert_eq!(log.text().contains('\x1b'), wanted);
    }
}

/// Refuses every byte.
struct Refusing(io::ErrorKind);

impl Write for Refusing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Err(self.0.into())
    }
}

/// A reader that is gone has seen enough. A disk that is full is told at the end.
#[test]
fn a_terminal_that_takes_nothing_stops_nothing() {
    for (kind, quiet) in [(io::ErrorKind::BrokenPipe, true), (io::ErrorKind::StorageFull, false)] {
        let out = Box::new(Refusing(kind));
        let mut screen = Screen::with(Kind::Live, out, Paint { on: true }, 100);
        screen.plan(&report(1000).layers);
        screen.epoch_begin(Instant::now(), 1, 1, 10);
        screen.step(Instant::now(), progress(3));
        screen.evaluation(1, 2);
        screen.epoch_end(&epoch(1, None));
        screen.finish(&report(1000), Some(Path::new("report.html")));
        assert_eq!(screen.outcome().is_ok(), quiet);
    }
}

#[test]
fn a_report_that_was_not_written_is_not_named() {
    let (mut screen, log) = screen(Kind::Plain, false);
    screen.finish(&report(0), None);
    assert!(log.text().contains("parameters") && !log.text().contains("report"));
}
