//! One frame of `poseidon top`.

use crate::report::units;
use crate::terminal::printable;
use poseidon::LiveJob;
use poseidon::live::{LiveEvent, LiveLevel, LiveNode, LiveNodeState};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Sparkline, Table};
use std::time::Instant;

/// What is on the screen.
pub(super) struct View {
    /// The job's name.
    name: String,
    job: Option<LiveJob>,
    /// When the job was heard last.
    heard: Option<Instant>,
    /// Why it was not heard since, if it was not.
    error: Option<String>,
    /// The first node that is shown.
    first: usize,
}

impl View {
    pub(super) fn new(name: String) -> Self {
        Self { name, job: None, heard: None, error: None, first: 0 }
    }

    /// The coordinator has answered, or has not. What was heard last stays on the screen.
    pub(super) fn handle(&mut self, told: anyhow::Result<LiveJob>, now: Instant) {
        match told {
            Ok(job) => {
                (self.job, self.heard, self.error) = (Some(job), Some(now), None);
            }
            Err(error) => self.error = Some(printable(&format!("{error:#}"))),
        }
    }

    pub(super) fn scroll(&mut self, by: isize) {
        let last = self.job.as_ref().map_or(0, |job| job.nodes.len().saturating_sub(1));
        self.first = self.first.saturating_add_signed(by).min(last);
    }
}

/// Lines that a frame takes to show all of `job`.
pub(super) fn height(job: &LiveJob) -> u16 {
    let nodes = u16::try_from(job.nodes.len()).unwrap_or(u16::MAX).min(500);
    HEAD + TREND + nodes + 3 + BELOW
}

const HEAD: u16 = 3;
const TREND: u16 = 4;
const BELOW: u16 = 12;

/// Draws what is known.
pub(super) fn draw(frame: &mut Frame<'_>, view: &mut View, now: Instant) {
    let nodes = view.job.as_ref().map_or(0, |job| job.nodes.len());
    let room = Constraint::Max(u16::try_from(nodes).unwrap_or(u16::MAX).saturating_add(3));
    let parts = [Constraint::Length(HEAD), Constraint::Length(TREND), room, Constraint::Min(BELOW)];
    let [head, trend, table, below] = Layout::vertical(parts).areas(frame.area());
    frame.render_widget(Paragraph::new(heading(view, now)), head);
    let Some(job) = &view.job else { return };
    draw_trend(frame, job, trend);
    draw_nodes(frame, job, view.first, table);
    let halves = [Constraint::Length(46), Constraint::Min(20)];
    let [layers, events] = Layout::horizontal(halves).areas(below);
    frame.render_widget(Paragraph::new(layer_lines(job)).block(titled("waited for most")), layers);
    let room = usize::from(events.height.saturating_sub(2));
    let lines = event_lines(job, room);
    frame.render_widget(Paragraph::new(lines).block(titled("what happened")), events);
}

fn titled(title: &str) -> Block<'_> {
    Block::bordered().border_style(Style::new().dim()).title(title)
}

fn heading<'a>(view: &'a View, now: Instant) -> Vec<Line<'a>> {
    let mut first = vec![Span::raw("poseidon top ").bold(), Span::raw(view.name.as_str()).dim()];
    let Some(job) = &view.job else { return vec![Line::from(first)] };
    if let (Some(error), Some(heard)) = (&view.error, view.heard) {
        let ago = units::duration(now.duration_since(heard).as_secs_f64().round());
        let words = format!("  no news for {ago}: {error}");
        first.push(Span::raw(words).fg(Color::Red).bold());
    } else if !job.missing.is_empty() {
        let words = format!("  waiting for {}", job.missing.join(", "));
        first.push(Span::raw(words).fg(Color::Yellow));
    } else {
        let nodes = units::plural(job.nodes.len() as u64, "node");
        let words = format!("  {nodes}, running for {}", units::duration(job.seconds.round()));
        first.push(Span::raw(words));
    }
    let mut second = vec![
        Span::raw(units::rate(job.steps_per_second)).bold(),
        Span::raw(" steps/s  "),
        Span::raw(job.waiting.map_or("?".into(), percent)).bold(),
        Span::raw(" of the time waiting  "),
        Span::raw(per_second(job.sent)).bold(),
        Span::raw(" to other hosts, "),
        Span::raw(per_second(job.sent_inside)).bold(),
        Span::raw(" within hosts"),
    ];
    if job.operations_per_second > 0.0 {
        let words = format!("  {} operations/s", units::rate(job.operations_per_second));
        second.push(Span::raw(words));
    }
    let third = match (&job.slowest, job.concerns().first()) {
        (_, Some((level, words))) => Line::from(Span::raw(words.clone()).style(style(*level))),
        (Some(slowest), None) => {
            let words = format!("slowest: {}: {}", slowest.name, slowest.why);
            Line::from(Span::raw(words).fg(Color::Yellow))
        }
        (None, None) if job.nodes.len() > 1 => {
            Line::from("no worker is slower than the others".dim())
        }
        (None, None) => Line::default(),
    };
    vec![Line::from(first), Line::from(second), third]
}

/// Steps per second, over the last minutes.
fn draw_trend(frame: &mut Frame<'_>, job: &LiveJob, area: Rect) {
    let most = job.history.iter().map(|m| m.steps_per_second).fold(0.0, f64::max);
    let title = format!("steps/s, up to {} in the last minutes", units::rate(most));
    let room = usize::from(area.width.saturating_sub(2));
    let shown = job.history.iter().rev().take(room).rev();
    let points: Vec<u64> = shown.map(|moment| (moment.steps_per_second * 100.0) as u64).collect();
    let line = Sparkline::default().data(&points).style(Style::new().fg(Color::Cyan));
    frame.render_widget(line.block(titled(&title)), area);
}

fn draw_nodes(frame: &mut Frame<'_>, job: &LiveJob, first: usize, area: Rect) {
    let header =
        ["node", "steps/s", "waiting", "sent", "received", "in host", "port", "queue", "resent"];
    let header = Row::new(header).style(Style::new().add_modifier(Modifier::BOLD));
    let slowest = job.slowest.as_ref().map(|slowest| slowest.node);
    let rows = job.nodes.iter().skip(first).map(|node| {
        let row = Row::new(node_cells(node).map(Cell::from));
        match node.state {
            LiveNodeState::Lost => row.style(style(LiveLevel::Fault)),
            LiveNodeState::Silent => row.style(style(LiveLevel::Warning)),
            LiveNodeState::Left | LiveNodeState::Joined => row.style(Style::new().dim()),
            LiveNodeState::Running if slowest == Some(node.node) => {
                row.style(style(LiveLevel::Warning))
            }
            LiveNodeState::Running => row,
        }
    });
    let widths = [
        Constraint::Min(15),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(5),
        Constraint::Length(5),
        Constraint::Length(7),
    ];
    let title = match first {
        0 => "nodes".into(),
        _ => format!("nodes from {first}"),
    };
    let table = Table::new(rows, widths).header(header).block(titled(&title));
    frame.render_widget(table, area);
}

fn node_cells(node: &LiveNode) -> [String; 9] {
    let state = match node.state {
        LiveNodeState::Joined => ", joined",
        LiveNodeState::Running => "",
        LiveNodeState::Silent => ", silent",
        LiveNodeState::Left => ", done",
        LiveNodeState::Lost => ", LOST",
    };
    let port = node.port_use.map(|[sent, received]| percent(sent.max(received)));
    [
        printable(&node.name) + state,
        units::rate(node.steps_per_second),
        node.waiting.map_or_else(String::new, percent),
        per_second(node.sent),
        per_second(node.received),
        per_second(node.sent_inside),
        port.unwrap_or_else(|| "?".into()),
        node.queued.to_string(),
        node.resent.to_string(),
    ]
}

fn layer_lines(job: &LiveJob) -> Vec<Line<'static>> {
    let plan = &job.plan;
    let mut lines = vec![Line::from(format!(
        "plan {}: {} through shards, {} by factors",
        plan.epoch, plan.ps, plan.sfb
    ))];
    for layer in &job.layers {
        let bar = "█".repeat((layer.waiting * 16.0).round() as usize);
        let name: String = printable(&layer.layer).chars().take(12).collect();
        lines.push(Line::from(vec![
            Span::raw(format!("{name:<12} {:>6} ", percent(layer.waiting))),
            Span::raw(bar).fg(Color::Cyan),
        ]));
    }
    lines
}

/// The newest last, as in a log.
fn event_lines(job: &LiveJob, room: usize) -> Vec<Line<'static>> {
    let events = &job.events[job.events.len().saturating_sub(room)..];
    let line = |event: &LiveEvent| {
        let ago = units::duration((job.now_ms.saturating_sub(event.at_ms) / 1000) as f64);
        Line::from(vec![
            Span::raw(format!("{ago:>12} ago  ")).dim(),
            Span::raw(printable(&event.words)).style(style(event.level)),
        ])
    };
    events.iter().map(line).collect()
}

fn style(level: LiveLevel) -> Style {
    match level {
        LiveLevel::Note => Style::new(),
        LiveLevel::Warning => Style::new().fg(Color::Yellow),
        LiveLevel::Fault => Style::new().fg(Color::Red).bold(),
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn per_second(bytes: f64) -> String {
    format!("{}/s", units::bytes(bytes.max(0.0) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::time::Duration;

    /// A job of two workers, the second of which is slow.
    fn job() -> LiveJob {
        let node = |id: u16, waiting: f64| {
            serde_json::json!({
                "node": id, "name": format!("worker {id}"), "host": "h", "worker": true,
                "state": "running", "unheard": 0.2, "steps": 100, "steps_per_second": 12.5,
                "waiting": waiting, "sent": 1.25e6, "received": 2.5e6, "sent_inside": 0.0,
                "rate": 100_000_000, "port_use": [0.1, 0.2], "queued": 3, "resent": 17,
                "resent_per_second": 0.0, "failure": null,
            })
        };
        let job = serde_json::json!({
            "now_ms": 1_000_000, "seconds": 75.0, "missing": [], "steps": 100,
            "steps_per_second": 12.5, "operations_per_second": 0.0, "waiting": 0.3, "sent": 2.5e6,
            "sent_inside": 0.0,
            "slowest": {"node": 1, "name": "worker 1", "why": "it waits 2%: they wait for it"},
            "layers": [{"layer": "fc6\u{1b}[2J", "waiting": 0.25}],
            "nodes": [node(0, 0.58), node(1, 0.02)],
            "plan": {"epoch": 2, "ps": 14, "sfb": 2},
            "history": [
                {"at_ms": 1, "steps_per_second": 10.0, "waiting": 0.1, "sent": 5.0},
                {"at_ms": 2, "steps_per_second": 12.5, "waiting": 0.1, "sent": 5.0},
            ],
            "events": [{"at_ms": 995_000, "level": "note", "words": "the plan was replaced, epoch 2"}],
        });
        serde_json::from_value(job).unwrap()
    }

    fn drawn(view: &mut View, width: u16, now: Instant) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 26)).unwrap();
        terminal.draw(|frame| draw(frame, view, now)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_frame_has_nodes_layers_the_plan_and_what_happened() {
        let now = Instant::now();
        let mut view = View::new("launch-7".into());
        view.handle(Ok(job()), now);
        let text = drawn(&mut view, 100, now);
        for part in [
            "poseidon top launch-7  2 nodes, running for 1 min 15 s",
            "12.5 steps/s  30 % of the time waiting  2.50 MB/s to other hosts",
            "slowest: worker 1: it waits 2%: they wait for it",
            "plan 2: 14 through shards, 2 by factors",
            "the plan was replaced, epoch 2",
        ] {
            assert!(text.contains(part), "{part}:\n{text}");
        }
        let row = text.lines().find(|line| line.contains("worker 0")).unwrap();
        let cells: Vec<_> = row.split_whitespace().collect();
        let expected =
            ["12.5", "58", "%", "1.25", "MB/s", "2.50", "MB/s", "0", "B/s", "20", "%", "3", "17"];
        assert_eq!(cells[2..cells.len() - 1], expected, "{row}");
        assert!(text.contains("fc6") && !text.contains('\u{1b}'), "{text}");
        // Any width will do.
        for width in [1, 20, 40, 79, 200] {
            drawn(&mut view, width, now);
        }
    }

    #[test]
    fn a_job_that_is_not_heard_stays_on_the_screen_and_is_said_to_be_old() {
        let now = Instant::now();
        let mut view = View::new(String::new());
        view.handle(Ok(job()), now);
        view.handle(Err(anyhow::anyhow!("connection refused")), now);
        let text = drawn(&mut view, 100, now + Duration::from_secs(14));
        assert!(text.contains("no news for 14.0 s: connection refused"), "{text}");
        assert!(text.contains("worker 0"), "{text}");
        let mut lost = job();
        lost.nodes[0].state = LiveNodeState::Lost;
        view.handle(Ok(lost), now);
        let text = drawn(&mut view, 100, now);
        assert!(text.contains("worker 0 is lost") && text.contains("LOST"), "{text}");
        assert!(!text.contains("no news"), "{text}");
    }

    #[test]
    fn nodes_are_scrolled_and_not_past_the_last() {
        let now = Instant::now();
        let mut view = View::new(String::new());
        view.handle(Ok(job()), now);
        view.scroll(1);
        let text = drawn(&mut view, 100, now);
        let has = |text: &str, row: &str| text.lines().any(|line| line.starts_with(row));
        assert!(has(&text, "\"│worker 1") && !has(&text, "\"│worker 0"), "{text}");
        view.scroll(100);
        view.scroll(-1);
        assert!(has(&drawn(&mut view, 100, now), "\"│worker 0"));
    }
}
