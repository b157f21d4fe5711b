//! The report in the terminal: tables, then what is wrong.

use super::judge::{Finding, clocks};
use super::{NodeReport, Report};
use crate::report::units;
use crate::terminal::columns::table;
use crate::terminal::{Paint, printable, terminal_width};
use poseidon::Rate;
use poseidon::check::{Way, WayFailure};
use std::io;
use unicode_width::UnicodeWidthStr;

/// Everything, the findings last: they are what stays on the screen.
pub(super) fn text(report: &Report) -> String {
    let paint = Paint { on: crate::wants_colour(&io::stdout()) };
    let mut parts = vec![machines(report)];
    if report.nodes.iter().any(|node| !node.listens.is_empty()) {
        parts.push(addresses(&report.nodes));
    }
    if report.nodes.iter().any(|node| !node.gpus.is_empty()) {
        parts.push(gpus(&report.nodes));
    }
    if !report.hosts.is_empty() {
        parts.push(hosts(report));
    }
    if report.nodes.len() > 1 {
        let shown =
            |way: &Way| way.bits_per_second.map(|bits| Rate::nearest(bits as f64).to_string());
        parts.extend(pairs(report, "What is carried, from the row to the column", shown));
        let shown = |way: &Way| way.round_trip_us.map(|us| units::duration(us / 1e6));
        parts.extend(pairs(report, "Shortest round trips", shown));
        let shown = |way: &Way| way.packet.map(|bytes| bytes.to_string());
        parts.extend(pairs(report, "Largest packets that pass, in bytes", shown));
        let shown = |way: &Way| {
            let (sent, again) = (way.segments?, way.resent?);
            Some(units::percent(f64::from(again) / f64::from(sent.max(1))))
        };
        parts.extend(pairs(report, "Packets that were sent again", shown));
    }
    parts.push(findings(&report.findings, paint, terminal_width()));
    parts.join("\n")
}

fn machines(report: &Report) -> String {
    let nodes = &report.nodes;
    let clocks = clocks(nodes.len(), &report.ways);
    let limit = |limit: Option<u64>| limit.map_or("no limit".into(), |limit| limit.to_string());
    let rows = nodes.iter().zip(&clocks).map(|(node, clock)| {
        let facts = &node.facts;
        let free = facts.memory_free_bytes.map_or("?".into(), units::bytes);
        let all = facts.memory_bytes.map_or("?".into(), units::bytes);
        let clock = clock.filter(|_| nodes.len() > 1).map_or(String::new(), |us| match us {
            us if us.abs() < 1.0 => "0".into(),
            us if us < 0.0 => format!("-{}", units::duration(-us / 1e6)),
            us => format!("+{}", units::duration(us / 1e6)),
        });
        [
            printable(&node.name),
            printable(&facts.hostname),
            printable(&facts.version),
            facts.cores.to_string(),
            printable(&facts.vectors.join(", ")),
            format!("{free} of {all}"),
            limit(facts.open_files[1]),
            clock,
        ]
    });
    let header =
        ["node", "machine", "Poseidon", "cores", "vectors", "memory free", "open files", "clock"];
    let numeric = [false, false, false, true, false, true, true, true];
    let mut text = table(header, numeric, rows);
    for (what, of) in [
        ("processor", (|node| node.facts.processor.clone()) as fn(&NodeReport) -> Option<String>),
        ("kernel   ", |node| Some(node.facts.kernel.clone())),
        ("secret   ", |node| Some(node.facts.secret.clone())),
    ] {
        for (value, names) in alike(nodes, of) {
            text += &format!("{what}  {}{}\n", printable(&value), printable(&names));
        }
    }
    text
}

/// Values that nodes have, each with who has it where not all have the same.
fn alike(nodes: &[NodeReport], of: fn(&NodeReport) -> Option<String>) -> Vec<(String, String)> {
    let mut groups: Vec<(String, Vec<&str>)> = Vec::new();
    for node in nodes {
        let value = of(node).unwrap_or_else(|| "unknown".into());
        match groups.iter_mut().find(|(other, _)| *other == value) {
            Some((_, names)) => names.push(&node.name),
            None => groups.push((value, vec![&node.name])),
        }
    }
    let all = groups.len() == 1;
    let who =
        |names: Vec<&str>| if all { String::new() } else { format!(": {}", names.join(", ")) };
    groups.into_iter().map(|(value, names)| (value, who(names))).collect()
}

fn addresses(nodes: &[NodeReport]) -> String {
    let each = nodes.iter().flat_map(|node| node.listens.iter().map(move |one| (node, one)));
    let rows = each.map(|(node, listens)| {
        [
            printable(&node.name),
            printable(&listens.address),
            printable(listens.interface.as_deref().unwrap_or("?")),
            listens.mtu.map_or("?".into(), |mtu| mtu.to_string()),
            printable(&listens.why),
        ]
    });
    let header = ["node", "listens at", "interface", "MTU", "why there"];
    table(header, [false, false, false, true, false], rows)
}

/// What PCIe, or whatever is in its place, carries.
fn gpus(nodes: &[NodeReport]) -> String {
    let each = nodes.iter().flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)));
    let speed = |speed: Option<f64>| {
        speed.map_or("?".into(), |speed| format!("{}/s", units::bytes(speed as u64)))
    };
    let rows = each.map(|(node, gpu)| {
        let (to_host, to_device) = (speed(gpu.to_host), speed(gpu.to_device));
        [printable(&node.facts.hostname), gpu.number.to_string(), to_host, to_device]
    });
    let header = ["machine", "GPU", "copies to the host", "copies to the GPU"];
    table(header, [false, true, true, true], rows)
}

fn hosts(report: &Report) -> String {
    let rows = report.hosts.iter().map(|host| {
        let known = |text: &Option<String>| printable(text.as_deref().unwrap_or("-"));
        [
            printable(&host.host),
            known(&host.address),
            known(&host.from),
            host.seconds.map_or("-".into(), units::duration),
            if host.failure.is_none() { "answers" } else { "does not answer" }.into(),
        ]
    });
    let header = ["host", "is", "called from", "took", "its port"];
    table(header, [false, false, false, true, false], rows)
}

/// A matrix of all pairs, or the list of the ways for which there is no room in one. Nothing if
/// nothing is known.
fn pairs(report: &Report, title: &str, shown: impl Fn(&Way) -> Option<String>) -> Option<String> {
    let count = report.nodes.len();
    if !report.ways.iter().any(|way| shown(way).is_some()) {
        return None;
    }
    let cell = |from: usize, to: usize| {
        let way = report.ways.iter().find(|w| (w.from.index(), w.to.index()) == (from, to));
        match way {
            _ if from == to => "·".into(),
            Some(way) => match (shown(way), &way.failure) {
                (Some(text), _) => text,
                (None, Some(WayFailure::Unreached { .. })) => "no connection".into(),
                (None, Some(WayFailure::Stalled { .. })) => "stalled".into(),
                (None, _) => "-".into(),
            },
            None => "-".into(),
        }
    };
    if count > WIDEST_MATRIX {
        let told = report.ways.iter().filter_map(|way| {
            let names = [way.from, way.to].map(|node| report.nodes[node.index()].name.clone());
            Some(format!("{} to {}: {}", names[0], names[1], shown(way)?))
        });
        let told: Vec<String> = told.collect();
        let more = told.len().saturating_sub(MOST_TOLD);
        let mut text = format!("{title}\n");
        told.iter().take(MOST_TOLD).for_each(|line| text += &format!("  {}\n", printable(line)));
        if more > 0 {
            text += &format!("  and {more} more: --json has all of them\n");
        }
        return Some(text);
    }
    let mut rows = vec![(0..count).map(|node| node.to_string()).collect::<Vec<_>>()];
    rows.extend((0..count).map(|from| (0..count).map(|to| cell(from, to)).collect()));
    let width = |column: usize| rows.iter().map(|row| row[column].width()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let names: Vec<String> = report.nodes.iter().map(|node| printable(&node.name)).collect();
    let first = names.iter().map(|name| name.width()).max().unwrap_or(0);
    let mut text = format!("{title}\n");
    let names = std::iter::once(String::new()).chain(names);
    for (name, row) in names.zip(&rows) {
        text += &format!("{name}{}", " ".repeat(first - name.width()));
        for (cell, width) in row.iter().zip(&widths) {
            text += &format!("  {}{cell}", " ".repeat(width - cell.width()));
        }
        text.push('\n');
    }
    Some(text)
}

fn findings(findings: &[Finding], paint: Paint, width: usize) -> String {
    let wrong = findings.iter().filter(|finding| finding.wrong).count();
    let mut lines = vec![match (wrong, findings.len() - wrong) {
        (0, 0) => paint.bold("Nothing is wrong."),
        (0, _) => paint.bold("Nothing is wrong; worth a look:"),
        (wrong, 0) => paint.bold(&format!("{} wrong:", units::plural(wrong as u64, "thing"))),
        (wrong, _) => paint
            .bold(&format!("{} wrong, others worth a look:", units::plural(wrong as u64, "thing"))),
    }];
    let mut ordered: Vec<&Finding> = findings.iter().collect();
    ordered.sort_by_key(|finding| !finding.wrong);
    for finding in ordered {
        let mark = if finding.wrong { "WRONG" } else { "note " };
        let what = format!("{mark} {}: {}", finding.topic.name(), printable(&finding.what));
        lines.extend(wrapped(&what, "      ", width));
        let fix = format!("      fix: {}", printable(&finding.fix));
        lines.extend(wrapped(&fix, "           ", width).into_iter().map(|line| paint.dim(&line)));
    }
    lines.join("\n") + "\n"
}

/// Breaks `text` between words; later lines begin with `indent`. A word that is too long stays whole:
/// it may be an address to copy.
fn wrapped(text: &str, indent: &str, width: usize) -> Vec<String> {
    let lead: String = text.chars().take_while(|c| *c == ' ').collect();
    let mut lines = vec![lead.clone()];
    let mut is_empty = true;
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a line");
        if is_empty {
            line.push_str(word);
            is_empty = false;
        } else if line.width() + 1 + word.width() <= width.max(40) {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(format!("{indent}{word}"));
        }
    }
    lines
}

/// Nodes that a matrix has room for.
const WIDEST_MATRIX: usize = 12;
/// Ways that are listed where there is no matrix.
const MOST_TOLD: usize = 24;
