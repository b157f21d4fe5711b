//! `poseidon top`: a running job, in a terminal.

mod frame;

use crate::running_job::{Coordinator, RunningJob};
use crate::terminal::{say, terminal_width};
use anyhow::Context;
use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use frame::{View, draw};
use poseidon::LiveJob;
use ratatui::backend::TestBackend;
use ratatui::{DefaultTerminal, Terminal};
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Watch a running job: its nodes, what they send and wait for, and what went wrong.
///
/// Shows, once a second: steps a second; for every node its share of waiting, what it sends and
/// receives, how much of its port that is, messages that wait for the network, and segments that TCP
/// sent again; the worker that others wait for; the layers that are waited for most; the plan, and
/// when it was replaced; nodes that left, failed or fell silent.
///
/// Rates are of the last five seconds. A worker waits while its program waits for a layer: what is
/// not waiting is computing, reading, or anything else that the program does.
///
/// It finds the job that you run on this machine. For a job elsewhere give --coordinator, and the
/// job's secret in POSEIDON_SECRET. The job needs no preparation, and watching costs it nothing
/// that it notices.
///
/// Keys: q or Esc ends it, up and down scroll through the nodes.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print what there is to see now, and end. So it is without a terminal, too.
    #[arg(long)]
    once: bool,

    #[command(flatten)]
    job: RunningJob,
}

/// Shows the job until the user has seen enough.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let coordinator = args.job.find()?;
    // What is wrong with the address or the secret is better said on a quiet terminal.
    let first = coordinator.live()?;
    if args.once || !io::stdout().is_terminal() {
        say(&text_of(&first)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut view = View::new(coordinator.config.cluster.clone());
    view.handle(Ok(first), Instant::now());
    let news = ask_forever(coordinator);
    let mut terminal = ratatui::try_init().context("cannot draw on this terminal")?;
    let shown = show(&mut terminal, &mut view, &news);
    ratatui::restore();
    shown?;
    Ok(ExitCode::SUCCESS)
}

/// Asks once a second, on a thread of its own: an answer may take its time.
fn ask_forever(coordinator: Coordinator) -> Receiver<anyhow::Result<LiveJob>> {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            if tell.send(coordinator.live()).is_err() {
                return;
            }
        }
    });
    told
}

fn show(
    terminal: &mut DefaultTerminal,
    view: &mut View,
    news: &Receiver<anyhow::Result<LiveJob>>,
) -> anyhow::Result<()> {
    loop {
        terminal.draw(|frame| draw(frame, view, Instant::now())).context("cannot draw")?;
        if event::poll(GLANCE).context("cannot read the keyboard")? {
            let pressed = match event::read().context("cannot read the keyboard")? {
                Event::Key(key) if key.kind == KeyEventKind::Press => Some(key),
                _ => None,
            };
            let control = pressed.is_some_and(|key| key.modifiers.contains(KeyModifiers::CONTROL));
            match pressed.map(|key| key.code) {
                Some(KeyCode::Char('q') | KeyCode::Esc) => return Ok(()),
                Some(KeyCode::Char('c')) if control => return Ok(()),
                Some(KeyCode::Down | KeyCode::Char('j')) => view.scroll(1),
                Some(KeyCode::Up | KeyCode::Char('k')) => view.scroll(-1),
                Some(KeyCode::PageDown) => view.scroll(10),
                Some(KeyCode::PageUp) => view.scroll(-10),
                _ => {}
            }
        }
        while let Ok(told) = news.try_recv() {
            view.handle(told, Instant::now());
        }
    }
}

/// One frame, as text: as high as it has to be for all nodes.
fn text_of(job: &LiveJob) -> anyhow::Result<String> {
    let mut view = View::new(String::new());
    view.handle(Ok(job.clone()), Instant::now());
    let width = u16::try_from(terminal_width()).unwrap_or(u16::MAX).clamp(40, 200);
    let mut terminal = Terminal::new(TestBackend::new(width, frame::height(job)))?;
    terminal.draw(|frame| draw(frame, &mut view, Instant::now()))?;
    let buffer = terminal.backend().buffer();
    let line = |y: u16| {
        let cells = (0..width).filter_map(|x| buffer.cell((x, y)));
        let line: String = cells.map(ratatui::buffer::Cell::symbol).collect();
        format!("{}\n", line.trim_end())
    };
    Ok((0..buffer.area.height).map(line).collect())
}

/// How soon a key or news is shown.
const GLANCE: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Examples:
  The job that you run on this machine, in another terminal:
    poseidon top

  A job whose coordinator is elsewhere; POSEIDON_SECRET is the job's:
    poseidon top --coordinator node1:29501 --cluster train

  One look, for a log:
    poseidon top --once

  The same as numbers, for a script:
    poseidon query live | jq '.nodes[] | {name, waiting}'";
