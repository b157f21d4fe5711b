//! A page about any job, of what its nodes have noted: where it waits, what it sends, and single steps.

use super::page::{TIPS, figure, open, plan};
use super::recorded::{LayerSummary, NodeTrace, SessionSummary};
use super::rows::{Bar, Chart, Row};
use super::svg::{self, Escaped};
use super::{LayerReport, NodeReport, Timeline, bars, timeline, units};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A job, as far as its nodes have told.
pub(crate) struct JobReport {
    workers: u16,
    hosts: usize,
    version: String,
    /// By node: why it failed.
    failures: Vec<(String, String)>,
    /// Workers whose traces are missing.
    missing: Vec<u16>,
    steps: u64,
    /// Of the longest node.
    seconds: f64,
    layers: Vec<LayerReport>,
    /// By layer, as above: seconds a step that a worker waited for it, the mean and the most.
    waits: Vec<(f64, f64)>,
    nodes: Vec<NodeReport>,
    /// By name: collective operations of all nodes, and seconds they took, added up.
    operations: BTreeMap<String, (u64, f64)>,
    /// What can be chosen from.
    timelines: Vec<Shown>,
}

/// One step of one worker.
struct Shown {
    /// What the step is called.
    step: String,
    waited: f64,
    timeline: Timeline,
}

/// Timelines on one page: each takes about 30 KB.
const TIMELINES: usize = 96;

impl JobReport {
    /// The last `steps` steps of a job whose nodes have noted `nodes`.
    pub(crate) fn of(nodes: &[NodeTrace], steps: usize) -> Self {
        let workers = nodes.first().map_or(0, |node| node.summary.workers);
        let here: BTreeSet<u16> = nodes.iter().map(|node| node.node).collect();
        let hosts: BTreeSet<&str> = nodes.iter().map(|node| node.summary.host.as_str()).collect();
        let failure =
            |node: &NodeTrace| Some((node.summary.name.clone(), node.summary.failure.clone()?));
        let (layers, waits) = by_layer(nodes);
        Self {
            workers,
            hosts: hosts.len(),
            version: nodes.first().map_or(String::new(), |node| node.summary.version.clone()),
            failures: nodes.iter().filter_map(failure).collect(),
            missing: (0..workers).filter(|rank| !here.contains(rank)).collect(),
            steps: sessions(nodes).map(|(_, session)| session.steps).max().unwrap_or(0),
            seconds: nodes.iter().map(|node| node.summary.seconds).fold(0.0, f64::max),
            layers,
            waits,
            nodes: nodes.iter().map(node_report).collect(),
            operations: operations(nodes),
            timelines: timelines(nodes, steps),
        }
    }
}

/// All sessions that have taken a step, and whose they are.
fn sessions(nodes: &[NodeTrace]) -> impl Iterator<Item = (&NodeTrace, &SessionSummary)> {
    nodes
        .iter()
        .flat_map(|node| node.summary.sessions.iter().map(move |session| (node, session)))
        .filter(|(_, session)| session.steps > 0)
}

fn by_layer(nodes: &[NodeTrace]) -> (Vec<LayerReport>, Vec<(f64, f64)>) {
    let several = sessions(nodes).map(|(_, s)| s.session).collect::<BTreeSet<_>>().len() > 1;
    // By session and position: the layer, what nodes sent for it, and how long workers waited.
    type Found<'a> = (&'a LayerSummary, Vec<f64>, Vec<f64>);
    let mut found: BTreeMap<(u64, usize), Found<'_>> = BTreeMap::new();
    for (_, session) in sessions(nodes) {
        for (position, layer) in session.layers.iter().enumerate() {
            let key = (session.session, position);
            let (_, sent, waited) = found.entry(key).or_insert((layer, Vec::new(), Vec::new()));
            sent.push(layer.bytes_sent as f64 / session.steps as f64);
            waited.push(layer.wait_seconds / session.steps as f64);
        }
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let rows = found.into_iter().map(|((session, _), (layer, sent, waited))| {
        let name = match several {
            true => format!("{} (session {session})", layer.name),
            false => layer.name.clone(),
        };
        let report = LayerReport {
            name,
            kind: String::new(),
            parameters: layer.parameters,
            scheme: layer.scheme.clone().unwrap_or_default(),
            reason: layer.reason.clone().unwrap_or_default(),
            bytes_sent_per_step: mean(&sent) as u64,
        };
        (report, (mean(&waited), waited.into_iter().fold(0.0, f64::max)))
    });
    rows.unzip()
}

fn operations(nodes: &[NodeTrace]) -> BTreeMap<String, (u64, f64)> {
    let mut found = BTreeMap::new();
    for operation in nodes.iter().flat_map(|node| &node.summary.operations) {
        let (count, seconds) = found.entry(operation.name.clone()).or_insert((0, 0.0));
        *count += operation.count;
        *seconds += operation.seconds;
    }
    found
}

fn node_report(node: &NodeTrace) -> NodeReport {
    let sessions = &node.summary.sessions;
    let waits = sessions.iter().flat_map(|session| &session.layers);
    let stall_seconds = waits.map(|layer| layer.wait_seconds).sum::<f64>();
    let workers = node.summary.workers;
    let is_server = node.summary.role == "server";
    let of_sessions = |of: fn(&SessionSummary) -> u64| sessions.iter().map(of).sum::<u64>();
    let [sent, received] = match sessions.is_empty() {
        true => node.summary.link_bytes,
        false => [of_sessions(|s| s.bytes_sent), of_sessions(|s| s.bytes_received)],
    };
    NodeReport {
        rank: if is_server { node.node.saturating_sub(workers) } else { node.node },
        role: node.summary.role.clone(),
        bytes_sent: sent,
        bytes_received: received,
        compute_seconds: sessions.iter().filter_map(|session| session.compute_seconds).sum(),
        stall_seconds,
        turnout: None,
    }
}

/// The last steps of all workers, or of as many as fit on a page.
fn timelines(nodes: &[NodeTrace], steps: usize) -> Vec<Shown> {
    let all: BTreeSet<(u64, u64)> =
        nodes.iter().flat_map(|node| node.steps.keys()).copied().filter(|key| key.1 > 0).collect();
    let several = all.iter().map(|(session, _)| session).collect::<BTreeSet<_>>().len() > 1;
    // By the last number of each session, the latest steps first.
    let mut last: Vec<_> = all.into_iter().collect();
    last.sort_by_key(|&(session, step)| (std::cmp::Reverse(step), session));
    last.truncate(steps.max(1));
    let mut shown = Vec::new();
    for (session, step) in last {
        for node in nodes {
            let Some(of) = node.steps.get(&(session, step)) else { continue };
            let spans = of.spans();
            let seconds = spans.iter().map(|span| span.end).fold(0.0, f64::max);
            let name = match several {
                true => format!("step {step} of session {session}"),
                false => format!("step {step}"),
            };
            let timeline = Timeline { step, rank: node.node, seconds, spans };
            shown.push(Shown { step: name, waited: of.waited(), timeline });
        }
    }
    shown.truncate(TIMELINES);
    shown
}

/// Everything on one page.
pub(crate) fn page(report: &JobReport) -> String {
    let mut page = String::with_capacity(256 << 10);
    open(&mut page, "What a job did");
    let _ = write!(
        page,
        "<header>\n<p class=\"eyebrow\">Poseidon: what a job did</p>\n<h1>{} on {}</h1>\n\
         <p class=\"lead\">{}</p>\n</header>\n",
        units::plural(report.workers.into(), "worker"),
        units::plural(report.hosts as u64, "host"),
        Escaped(&summary(report)),
    );
    for (node, why) in &report.failures {
        let _ = writeln!(page, "<p class=\"warn\">{} failed: {}</p>", Escaped(node), Escaped(why));
    }
    if report.layers.is_empty() && !report.operations.is_empty() {
        collectives(&mut page, report);
        close(&mut page, report);
        return page;
    }
    page.push_str("<h2>Waiting</h2>\n<div class=\"pair\">\n");
    figure(
        &mut page,
        "Waiting by layer",
        "How long a worker's program waited for each layer in one step: the mean, and the worker that \
         waited longest.",
    );
    waits(&mut page, report);
    page.push_str("</figure>\n");
    figure(&mut page, "Time by node", "From the moment the node had joined.");
    bars::time(&mut page, &report.nodes, report.seconds);
    page.push_str("</figure>\n</div>\n<h2>Communication</h2>\n");
    figure(
        &mut page,
        "Bytes by layer",
        "What a node sends for each layer in one step, on average.",
    );
    bars::layers(&mut page, &report.layers, |_| None);
    page.push_str("</figure>\n");
    figure(&mut page, "Bytes by node", "Over the whole job.");
    bars::traffic(&mut page, &report.nodes);
    page.push_str("</figure>\n<h2>Single steps</h2>\n");
    steps(&mut page, report);
    page.push_str("<h2>The plan</h2>\n");
    plan(&mut page, &report.layers);
    if !report.operations.is_empty() {
        collectives(&mut page, report);
    }
    close(&mut page, report);
    page
}

fn close(page: &mut String, report: &JobReport) {
    let _ = write!(
        page,
        "</main>\n<footer>\n<p>poseidon {}</p>\n</footer>\n<script>\n{TIPS}{CHOOSER}</script>\n\
         </body>\n</html>\n",
        Escaped(&report.version),
    );
}

/// Operations of groups, which have no steps and no layers.
fn collectives(page: &mut String, report: &JobReport) {
    page.push_str("<h2>Collective operations</h2>\n");
    page.push_str(
        "<p class=\"about\">Of all workers together. An operation takes from the moment the program begins \
         it until its result is there; operations overlap each other and computing.</p>\n\
         <div class=\"card\" tabindex=\"0\"><table><thead><tr><th>operation</th>\
         <th class=\"num\">how many</th><th class=\"num\">one takes, on average</th></tr></thead><tbody>\n",
    );
    for (name, (count, seconds)) in &report.operations {
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td></tr>",
            Escaped(name),
            units::grouped(*count),
            units::duration(seconds / (*count).max(1) as f64)
        );
    }
    page.push_str("</tbody></table></div>\n");
    if report.layers.is_empty() {
        figure(page, "Bytes by node", "Over the whole job, by all links.");
        bars::traffic(page, &report.nodes);
        page.push_str("</figure>\n");
    }
}

/// What happened, for somebody who sees such a page for the first time.
fn summary(report: &JobReport) -> String {
    let operations: u64 = report.operations.values().map(|(count, _)| count).sum();
    let done = match operations {
        1.. if report.steps == 0 => {
            let each = operations / u64::from(report.workers.max(1));
            format!("did about {} each", units::plural(each, "collective operation"))
        }
        _ => format!("took {}", units::plural(report.steps, "step")),
    };
    let mut text = format!(
        "{} {done} in {}.",
        units::plural(report.workers.into(), "worker"),
        units::duration(report.seconds),
    );
    let sent: u64 = report.layers.iter().map(|layer| layer.bytes_sent_per_step).sum();
    let waited: f64 = report.waits.iter().map(|(mean, _)| mean).sum();
    if report.steps > 0 {
        let _ = write!(
            text,
            " In each step a node sent {} on average, and a worker waited {}.",
            units::bytes(sent),
            units::duration(waited)
        );
    }
    if !report.missing.is_empty() {
        let ranks: Vec<_> = report.missing.iter().take(16).map(u16::to_string).collect();
        let _ = write!(
            text,
            " The traces of {} are missing (ranks {}{}): copy them into this folder.",
            units::plural(report.missing.len() as u64, "worker"),
            ranks.join(", "),
            if report.missing.len() > 16 { ", ..." } else { "" }
        );
    }
    text
}

fn waits(page: &mut String, report: &JobReport) {
    let mut rows: Vec<_> = report.layers.iter().zip(&report.waits).collect();
    let longest = rows.iter().map(|(_, (_, most))| *most).fold(0.0, f64::max);
    if longest <= 0.0 {
        page.push_str("<p class=\"none\">Nobody waited for a layer.</p>");
        return;
    }
    // The longest waits are what matters.
    rows.sort_by(|(_, a), (_, b)| b.0.total_cmp(&a.0));
    let layers = rows.len();
    rows.truncate(WAIT_ROWS);
    let row = |(layer, (mean, most)): &(&LayerReport, &(f64, f64))| {
        let tip = |who: &str, seconds| {
            format!("{}: {who} waited {} a step", layer.name, units::duration(seconds))
        };
        let bar = |class: &str, seconds: f64, tip| Bar {
            class: class.into(),
            lane: 0,
            from: 0.0,
            to: seconds / longest,
            tip,
        };
        Row {
            name: layer.name.clone(),
            value: units::duration(*mean),
            summary: false,
            bars: vec![
                bar("ghost", *most, tip("the slowest worker", *most)),
                bar("wait", *mean, tip("a worker", *mean)),
            ],
        }
    };
    let shown: Vec<_> = rows.iter().map(row).collect();
    svg::legend(page, &[("wait", "mean"), ("ghost", "the worker that waited longest")]);
    let description = match rows.first() {
        Some((layer, (mean, _))) => format!(
            "Of {}, '{}' is waited for longest: {} a step.",
            units::plural(layers as u64, "layer"),
            layer.name,
            units::duration(*mean)
        ),
        None => String::new(),
    };
    let (title, height) = ("Waiting by layer", 24.0);
    Chart { id: "waits", title, description, axis: None, unit: "", lanes: 1, height, rows: shown }
        .draw(page);
}

/// Timelines, one of which is seen.
fn steps(page: &mut String, report: &JobReport) {
    let longest = report.timelines.iter().max_by(|a, b| a.waited.total_cmp(&b.waited));
    figure(
        page,
        "Waiting and communication by layer, in backward order",
        "From the step's first pass, or else the first layer that is sent, until the last layer is \
         received, in milliseconds. The upper half of a row is what the program computed or waited \
         for, the lower half the network.",
    );
    let Some(longest) = longest else {
        page.push_str("<p class=\"none\">No step was recorded.</p></figure>\n");
        return;
    };
    page.push_str("<p><label>Show <select id=\"steps\">");
    let name = |shown: &Shown| {
        let Shown { step, waited, timeline } = shown;
        format!("{step}, worker {} (waited {})", timeline.rank, units::duration(*waited))
    };
    for (index, shown) in report.timelines.iter().enumerate() {
        let selected = if std::ptr::eq(shown, longest) { " selected" } else { "" };
        let _ =
            write!(page, "<option value=\"{index}\"{selected}>{}</option>", Escaped(&name(shown)));
    }
    page.push_str("</select></label></p>\n");
    if report.timelines.len() == TIMELINES {
        let _ = writeln!(
            page,
            "<p class=\"none\">The last {TIMELINES} are here. trace.json has all that was recorded, for Perfetto.</p>"
        );
    }
    for (index, shown) in report.timelines.iter().enumerate() {
        let hidden = if std::ptr::eq(shown, longest) { "" } else { " hidden" };
        let _ = write!(page, "<div class=\"step\" data-step=\"{index}\"{hidden}>");
        timeline::draw_as(page, &format!("timeline-{index}"), &shown.timeline);
        page.push_str("</div>\n");
    }
    page.push_str("</figure>\n");
}

/// About half a screenful.
const WAIT_ROWS: usize = 12;
/// Shows the step that is chosen.
const CHOOSER: &str = "
document.getElementById('steps')?.addEventListener('change', (event) => {
  for (const step of document.querySelectorAll('.step')) {
    step.hidden = step.dataset.step !== event.target.value;
  }
});
";
