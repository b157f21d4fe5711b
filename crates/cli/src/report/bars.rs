//! Bytes by layer, bytes by node, and how the nodes spent their time.

use super::rows::{Bar, Chart, Row};
use super::{LayerReport, NodeReport, svg, units};

/// What each layer makes a node send per step, and what the parameter server would have.
pub(crate) fn layers(
    page: &mut String,
    layers: &[LayerReport],
    bytes_as_ps: impl Fn(&LayerReport) -> Option<u64>,
) {
    let sent = layers.iter().map(|layer| layer.bytes_sent_per_step).fold(0, u64::saturating_add);
    if sent == 0 {
        page.push_str("<p class=\"none\">Nothing was sent: a single worker trains by itself.</p>");
        return;
    }
    let (shown, rest) = largest(layers);
    let as_ps =
        |layer: &LayerReport| bytes_as_ps(layer).filter(|&ps| ps > layer.bytes_sent_per_step);
    let most = shown.iter().map(|layer| layer.bytes_sent_per_step.max(as_ps(layer).unwrap_or(0)));
    let most = most.fold(1, u64::max) as f64;
    let bar = |class: String, bytes: u64, tip: String| Bar {
        class,
        lane: 0,
        from: 0.0,
        to: bytes as f64 / most,
        tip,
    };
    let mut rows: Vec<Row> = shown
        .iter()
        .map(|layer| {
            let sent = units::bytes(layer.bytes_sent_per_step);
            let mut bars = Vec::new();
            if let Some(ps) = as_ps(layer) {
                let tip = format!("{}: parameter server, {}", layer.name, units::bytes(ps));
                bars.push(bar("ghost".into(), ps, tip));
            }
            let tip = format!("{} ({}): {sent} per step and node", layer.name, layer.scheme);
            bars.push(bar(scheme_class(&layer.scheme).into(), layer.bytes_sent_per_step, tip));
            Row { name: layer.name.clone(), value: sent, summary: false, bars }
        })
        .collect();
    if !rest.is_empty() {
        // Only a number: as a bar, the sum of a hundred small ones would dwarf those worth seeing.
        let sum = rest.iter().map(|layer| layer.bytes_sent_per_step).fold(0, u64::saturating_add);
        let name = format!("{} other layers", rest.len());
        rows.push(Row { name, value: units::bytes(sum), summary: false, bars: Vec::new() });
    }

    let mut entries: Vec<(&str, String)> = Vec::new();
    for layer in layers {
        let class = scheme_class(&layer.scheme);
        if !entries.iter().any(|(_, name)| *name == scheme_name(&layer.scheme)) {
            entries.push((class, scheme_name(&layer.scheme)));
        }
    }
    if shown.iter().any(|layer| as_ps(layer).is_some()) {
        entries.push(("ghost", "what the parameter server would have cost".into()));
    }
    let entries: Vec<_> = entries.iter().map(|(class, name)| (*class, name.as_str())).collect();
    svg::legend(page, &entries);
    let heaviest = layers.iter().max_by_key(|layer| layer.bytes_sent_per_step);
    let description = format!(
        "A node sends {} per step. {}",
        units::bytes(sent),
        heaviest.map_or(String::new(), |layer| format!(
            "The largest part, {}, belongs to layer {}.",
            units::bytes(layer.bytes_sent_per_step),
            layer.name
        )),
    );
    let title = "Bytes sent per step and node, by layer";
    let height = row_height(rows.len());
    Chart { id: "layers", title, description, axis: None, unit: "", lanes: 1, height, rows }
        .draw(page);
}

/// Bytes over the whole run.
pub(super) fn traffic(page: &mut String, nodes: &[NodeReport]) {
    let most = nodes.iter().map(|node| node.bytes_sent.max(node.bytes_received)).max().unwrap_or(0);
    if most == 0 {
        page.push_str("<p class=\"none\">No node sent anything.</p>");
        return;
    }
    let share = |bytes: u64| bytes as f64 / most as f64;
    let row = |node: &NodeReport| {
        let (sent, received) = (units::bytes(node.bytes_sent), units::bytes(node.bytes_received));
        let bar =
            |class: &str, lane, to, tip| Bar { class: class.into(), lane, from: 0.0, to, tip };
        let name = node_name(node);
        Row {
            bars: vec![
                bar("sent", 0, share(node.bytes_sent), format!("{name} sent {sent}")),
                bar(
                    "received",
                    1,
                    share(node.bytes_received),
                    format!("{name} received {received}"),
                ),
            ],
            value: format!("{sent} / {received}"),
            summary: false,
            name,
        }
    };
    let total = nodes.iter().map(|node| node.bytes_sent).fold(0, u64::saturating_add);
    svg::legend(page, &[("sent", "sent"), ("received", "received")]);
    let chart = Chart {
        id: "traffic",
        title: "Bytes sent and received by each node",
        description: format!(
            "{} sent {} in all; the busiest one moved {} one way.",
            units::plural(nodes.len() as u64, "node"),
            units::bytes(total),
            units::bytes(most)
        ),
        axis: None,
        unit: "",
        lanes: 2,
        height: row_height(nodes.len()),
        rows: nodes.iter().map(row).collect(),
    };
    chart.draw(page);
}

/// Computing and waiting, out of the `seconds` that the run took.
pub(super) fn time(page: &mut String, nodes: &[NodeReport], seconds: f64) {
    let spent = |node: &NodeReport| (known(node.compute_seconds), known(node.stall_seconds));
    let busy = |node: &&NodeReport| spent(node).0 + spent(node).1 > 0.0;
    let nodes: Vec<_> = nodes.iter().filter(busy).collect();
    if nodes.is_empty() {
        page.push_str("<p class=\"none\">No times were measured.</p>");
        return;
    }
    let longest = nodes.iter().map(|node| spent(node).0 + spent(node).1);
    let whole = longest.fold(known(seconds), f64::max);
    // A program need not say when it computes.
    let computes = nodes.iter().any(|node| spent(node).0 > 0.0);
    let rest = match computes {
        true => "anything else: reading data, testing",
        false => "everything else: computing, reading data, testing",
    };
    let row = |node: &&NodeReport| {
        let name = node_name(node);
        let (compute, stall) = spent(node);
        let (computed, stalled) = (compute / whole, (compute + stall) / whole);
        let bar = |class: &str, from, to, doing: &str, seconds| Bar {
            class: class.into(),
            lane: 0,
            from,
            to,
            tip: format!("{name}: {doing}, {}", units::duration(seconds)),
        };
        let other = whole - compute - stall;
        Row {
            bars: vec![
                bar("backward", 0.0, computed, "computing", compute),
                bar("wait", computed, stalled, "waiting for communication", stall),
                bar("other", stalled, 1.0, rest, other),
            ],
            value: format!("{} waiting", units::percent(stall / whole)),
            summary: false,
            name,
        }
    };
    let mean_stall = nodes.iter().map(|node| spent(node).1).sum::<f64>() / nodes.len() as f64;
    let entries =
        [("backward", "computing"), ("wait", "waiting for communication"), ("other", rest)];
    svg::legend(page, if computes { &entries } else { &entries[1..] });
    let chart = Chart {
        id: "time",
        title: "How each node spent its time",
        description: format!(
            "Of {}, a node spent {} waiting for communication, on average.",
            units::duration(whole),
            units::duration(mean_stall)
        ),
        axis: None,
        unit: "",
        lanes: 1,
        height: row_height(nodes.len()),
        rows: nodes.iter().map(row).collect(),
    };
    chart.draw(page);
}

/// The class of a scheme's marks. The known ones keep their colour in every report.
pub(super) fn scheme_class(scheme: &str) -> &'static str {
    match scheme.to_ascii_lowercase().as_str() {
        "ps" => "ps",
        "sfb" => "sfb",
        "sfps" | "sf-ps" | "adam" => "sfps",
        "onebit" | "one-bit" => "onebit",
        _ => "rest",
    }
}

fn scheme_name(scheme: &str) -> String {
    match scheme_class(scheme) {
        "ps" => "parameter server (ps)".into(),
        "sfb" => "sufficient factors (sfb)".into(),
        "sfps" => "factors to the parameter server (sf-ps)".into(),
        "onebit" => "one bit per number".into(),
        _ => scheme.into(),
    }
}

fn node_name(node: &NodeReport) -> String {
    let role = if node.role.is_empty() { "node" } else { &node.role };
    format!("{role} {}", node.rank)
}

/// The layers worth a row of their own, in their order, and the others.
fn largest(layers: &[LayerReport]) -> (Vec<&LayerReport>, Vec<&LayerReport>) {
    if layers.len() <= LAYER_ROWS {
        return (layers.iter().collect(), Vec::new());
    }
    let mut by_size: Vec<usize> = (0..layers.len()).collect();
    by_size.sort_by_key(|&i| std::cmp::Reverse(layers[i].bytes_sent_per_step));
    let mut own = vec![false; layers.len()];
    by_size[..LAYER_ROWS - 1].iter().for_each(|&i| own[i] = true);
    let (shown, rest): (Vec<_>, Vec<_>) = layers.iter().zip(own).partition(|(_, own)| *own);
    let without_mark =
        |marked: Vec<(_, bool)>| marked.into_iter().map(|(layer, _)| layer).collect();
    (without_mark(shown), without_mark(rest))
}

fn known(seconds: f64) -> f64 {
    if seconds.is_finite() { seconds.max(0.0) } else { 0.0 }
}

fn row_height(rows: usize) -> f64 {
    if rows > 24 { 14.0 } else { 28.0 }
}

const LAYER_ROWS: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(name: String, bytes: u64) -> LayerReport {
        LayerReport {
            name,
            kind: "fc".into(),
            parameters: 1,
            scheme: "ps".into(),
            reason: String::new(),
            bytes_sent_per_step: bytes,
        }
    }

    #[test]
    fn many_layers_leave_the_largest_in_their_order() {
        let layers: Vec<_> = (0..150).map(|i| layer(format!("l{i}"), i * 7 % 150)).collect();
        let (shown, rest) = largest(&layers);
        assert_eq!((shown.len(), rest.len()), (LAYER_ROWS - 1, 150 - LAYER_ROWS + 1));
        let smallest = shown.iter().map(|l| l.bytes_sent_per_step).min();
        assert!(smallest >= rest.iter().map(|l| l.bytes_sent_per_step).max());
        let number = |l: &LayerReport| l.name[1..].parse::<u64>().unwrap();
        assert!(shown.windows(2).all(|pair| number(pair[0]) < number(pair[1])));
    }
}
