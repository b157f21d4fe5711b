//! The page: one file with everything in it, which asks nothing of the network.

use super::svg::Escaped;
use super::{LayerReport, Report, bars, curves, timeline, units};
use std::fmt::Write;

/// The beginning of a page: all it needs to be shown, and nothing from the network.
pub(super) fn open(page: &mut String, title: &str) {
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src \
         'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>{}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
        Escaped(title),
    );
}

pub(super) fn page(report: &Report) -> String {
    let mut page = String::with_capacity(128 << 10);
    open(&mut page, &format!("{} on {}: training report", report.model, report.data));
    let _ = write!(
        page,
        "<header>\n<p class=\"eyebrow\">Poseidon training report</p>\n<h1>{} on {}</h1>\n\
         <p class=\"lead\">{}</p>\n</header>\n",
        Escaped(&report.model),
        Escaped(&report.data),
        Escaped(&summary(report)),
    );
    tiles(&mut page, report);

    page.push_str("<h2>Learning</h2>\n<div class=\"pair\">\n");
    figure(
        &mut page,
        "Loss",
        "How wrong the model was on the images of each step; lower is better.",
    );
    curves::loss(&mut page, &report.curve);
    page.push_str("</figure>\n");
    figure(&mut page, "Accuracy", "The share of images it classified correctly, in percent.");
    curves::accuracy(&mut page, &report.epochs_done);
    page.push_str("</figure>\n</div>\n");
    epochs(&mut page, report);

    page.push_str("<h2>Communication</h2>\n");
    figure(
        &mut page,
        "Bytes by layer",
        "What a node sends for each layer in one step, on average.",
    );
    bars::layers(&mut page, &report.layers, |layer| report.bytes_as_ps(layer));
    page.push_str("</figure>\n<div class=\"pair\">\n");
    figure(&mut page, "Bytes by node", "Over the whole run.");
    bars::traffic(&mut page, &report.nodes);
    page.push_str("</figure>\n");
    figure(&mut page, "Time by node", "Waiting is what faster communication could still save.");
    bars::time(&mut page, &report.nodes, report.seconds);
    page.push_str("</figure>\n</div>\n");
    turnout(&mut page, report);

    page.push_str("<h2>One iteration</h2>\n");
    let about = format!(
        "Step {} of worker {}, in milliseconds. The upper half of a row is computing, the lower half \
         the network; where they overlap, communication costs no time.",
        report.timeline.step, report.timeline.rank
    );
    figure(&mut page, "Computing and communication by layer, in backward order", &about);
    timeline::draw(&mut page, &report.timeline);
    page.push_str("</figure>\n");

    page.push_str(
        "<h2>The plan</h2>\n<p class=\"about\">Bytes are what was measured, with the headers of frames. \
         The table at the start of a run has what the plan expects, without them.</p>\n",
    );
    plan(&mut page, &report.layers);
    facts(&mut page, report);
    let _ = write!(
        page,
        "</main>\n<footer>\n<p>poseidon {}, {} on {}</p>\n<p><code>{}</code></p>\n</footer>\n\
         <script>\n{TIPS}</script>\n</body>\n</html>\n",
        Escaped(&report.version),
        Escaped(&report.date),
        Escaped(&report.host),
        Escaped(&report.command),
    );
    page
}

/// What happened, for somebody who sees such a report for the first time.
fn summary(report: &Report) -> String {
    let workers = u64::from(report.workers);
    let mut text = String::new();
    if let Some(why) = &report.partial {
        let _ = write!(text, "Not a whole training: {why}. ");
    }
    let _ = write!(
        text,
        "{} trained {} on {} for {}: {} of {}, in {}.",
        units::plural(workers, "worker"),
        report.model,
        report.data,
        epochs_of(report.epochs),
        units::plural(report.steps - report.steps_before, "step"),
        units::plural(workers.saturating_mul(report.batch as u64), "image"),
        units::duration(report.seconds),
    );
    if let Some(accuracy) = report.test_accuracy.filter(|accuracy| accuracy.is_finite()) {
        let _ = write!(
            text,
            " The model now classifies {} of the test images correctly, none of which it was trained \
             on.",
            units::percent(accuracy)
        );
    }
    if report.final_loss.is_nan() || report.final_loss.is_infinite() {
        text.push_str(" Its loss is no longer a finite number: training diverged.");
    }
    let sent = report.bytes_per_step();
    if sent == 0 {
        return text;
    }
    let _ = write!(
        text,
        " After each step the workers combine what they have learned, for which each node sends {}.",
        units::bytes(sent)
    );
    let saved = report
        .layers
        .iter()
        .filter_map(|layer| report.bytes_as_ps(layer)?.checked_sub(layer.bytes_sent_per_step));
    let saved = saved.fold(0, u64::saturating_add);
    // Below a tenth it is not worth a newcomer's attention.
    if saved > sent / 10 {
        let _ = write!(
            text,
            " Through parameter servers alone it would be {}.",
            units::bytes(sent.saturating_add(saved))
        );
    }
    if report.overlap_hidden_fraction.is_finite() {
        let _ = write!(
            text,
            " {} of the time this takes is hidden: it passes while the workers compute.",
            units::percent(report.overlap_hidden_fraction)
        );
    }
    text
}

fn tiles(page: &mut String, report: &Report) {
    let images = f64::from(report.workers) * report.batch as f64 * report.steps as f64;
    let accuracy = match report.test_accuracy {
        Some(accuracy) => (units::percent(accuracy), "of images it never saw"),
        None => ("none".into(), "the model was not tested"),
    };
    let hidden = match report.bytes_per_step() {
        0 => ("none".into(), "there was no communication"),
        _ => (units::percent(report.overlap_hidden_fraction), "of communication, behind computing"),
    };
    let digest: String = report.parameter_digest.chars().take(12).collect();
    let total = report.nodes.iter().map(|node| node.bytes_sent).fold(0, u64::saturating_add);
    let images = format!("{} images in all", units::count(images as u64));
    let total = format!("by each node; {} in all", units::bytes(total));
    let tiles = [
        ("Test accuracy", accuracy.0, accuracy.1),
        ("Images per second", units::rate(report.images_per_second), &images),
        ("Final loss", units::loss(report.final_loss), "on training images"),
        ("Hidden share", hidden.0, hidden.1),
        ("Sent per step", units::bytes(report.bytes_per_step()), &total),
    ];
    page.push_str("<dl class=\"tiles\">\n");
    for (name, value, about) in tiles {
        let _ = writeln!(
            page,
            "<div><dt>{name}</dt><dd class=\"big\">{}</dd><dd class=\"small\">{}</dd></div>",
            Escaped(&value),
            Escaped(about)
        );
    }
    let _ = write!(
        page,
        "<div><dt>Parameter digest</dt><dd class=\"big mono\" title=\"{}\">{}</dd>\
         <dd class=\"small\">equal digests, equal models</dd></div>\n</dl>\n",
        Escaped(&report.parameter_digest),
        Escaped(if digest.is_empty() { "none" } else { &digest }),
    );
}

/// Opens a figure; the caller closes it.
pub(crate) fn figure(page: &mut String, title: &str, about: &str) {
    let _ = write!(
        page,
        "<figure>\n<figcaption><h3>{}</h3><p class=\"about\">{}</p></figcaption>\n",
        Escaped(title),
        Escaped(about)
    );
}

fn epochs(page: &mut String, report: &Report) {
    if report.epochs_done.is_empty() {
        return;
    }
    page.push_str(
        "<details><summary>All epochs as a table</summary><div class=\"card\"><table><thead><tr>\
         <th class=\"num\">epoch</th><th class=\"num\">training loss</th>\
         <th class=\"num\">training accuracy</th><th class=\"num\">test accuracy</th>\
         <th class=\"num\">images/s</th><th class=\"num\">time</th></tr></thead><tbody>\n",
    );
    for epoch in &report.epochs_done {
        let cells = [
            epoch.epoch.to_string(),
            units::loss(epoch.train_loss),
            units::percent(epoch.train_accuracy),
            epoch.test_accuracy.map_or("–".into(), units::percent),
            units::rate(epoch.images_per_second),
            units::duration(epoch.seconds),
        ];
        let cells = cells.map(|cell| format!("<td class=\"num\">{cell}</td>"));
        let _ = writeln!(page, "<tr>{}</tr>", cells.concat());
    }
    page.push_str("</tbody></table></div></details>\n");
}

/// How much of each worker's work counted, where slow workers may be dropped.
fn turnout(page: &mut String, report: &Report) {
    let rows: Vec<_> =
        report.nodes.iter().filter_map(|node| Some((node.rank, node.turnout?))).collect();
    if rows.is_empty() {
        return;
    }
    page.push_str(
        "<h3>Whose work counted</h3>\n<p class=\"about\">No step waited for its slowest workers. What came \
         too late was dropped; steps that are in neither column were taken while the worker was busy with \
         an earlier one.</p>\n<div class=\"card\" tabindex=\"0\"><table><thead><tr><th>worker</th>\
         <th class=\"num\">steps counted</th><th class=\"num\">came too late</th>\
         <th class=\"num\">samples counted</th></tr></thead><tbody>\n",
    );
    for (rank, of) in rows {
        let cells = [of.steps_counted, of.steps_late, of.samples_counted];
        let cells = cells.map(|n| format!("<td class=\"num\">{}</td>", units::grouped(n)));
        let _ = writeln!(page, "<tr><td>worker {rank}</td>{}</tr>", cells.concat());
    }
    page.push_str("</tbody></table></div>\n");
}

/// The plan as a table. A job that is not of the built-in engine does not say of what kind its layers
/// are.
pub(crate) fn plan(page: &mut String, layers: &[LayerReport]) {
    let has_kinds = layers.iter().any(|layer| !layer.kind.is_empty());
    let header = if has_kinds { "<th class=\"kind\">kind</th>" } else { "" };
    let _ = writeln!(
        page,
        "<p class=\"about\">How each layer is synchronised, in forward order, and why so.</p>\n\
         <div class=\"card plan\" tabindex=\"0\"><table><thead><tr><th>layer</th>{header}\
         <th class=\"num\">parameters</th><th>scheme</th><th class=\"num\">bytes per step</th>\
         <th class=\"why\">why</th></tr></thead><tbody>",
    );
    for layer in layers {
        let kind = format!("<td class=\"kind\">{}</td>", Escaped(&layer.kind));
        let kind = if has_kinds { kind.as_str() } else { "" };
        let _ = writeln!(
            page,
            "<tr><td class=\"name\">{}</td>{kind}<td class=\"num\">{}</td>\
             <td class=\"chip\"><i class=\"{}\"></i>{}</td><td class=\"num\">{}</td>\
             <td class=\"why\">{}</td></tr>",
            Escaped(&layer.name),
            units::grouped(layer.parameters as u64),
            bars::scheme_class(&layer.scheme),
            Escaped(&layer.scheme),
            units::bytes(layer.bytes_sent_per_step),
            Escaped(&layer.reason),
        );
    }
    let parameters = layers.iter().map(|layer| layer.parameters as u64);
    let bytes = layers.iter().map(|layer| layer.bytes_sent_per_step).fold(0, u64::saturating_add);
    let _ = writeln!(
        page,
        "</tbody><tfoot><tr><th colspan=\"{}\">{}</th><td class=\"num\">{}</td><td></td>\
         <td class=\"num bytes\">{}</td><td></td></tr></tfoot></table></div>",
        1 + u8::from(has_kinds),
        units::plural(layers.len() as u64, "layer"),
        units::grouped(parameters.fold(0, u64::saturating_add)),
        units::bytes(bytes),
    );
}

/// What the run was set to, for those who want to repeat it.
fn facts(page: &mut String, report: &Report) {
    let facts = [
        ("workers", report.workers.to_string()),
        ("servers", report.servers.clone()),
        ("threads per worker", report.threads_per_worker.to_string()),
        ("batch per worker", report.batch.to_string()),
        ("scheme", report.scheme.clone()),
        ("overlap", report.overlap.clone()),
        ("sync", report.sync.clone()),
        ("seed", report.seed.to_string()),
        ("deterministic", if report.deterministic { "yes" } else { "no" }.into()),
        ("parameter digest", report.parameter_digest.clone()),
    ];
    page.push_str("<details><summary>Settings and effective configuration</summary>\n");
    page.push_str("<div class=\"card\"><table><tbody>\n");
    for (name, value) in facts {
        let _ = writeln!(page, "<tr><td>{name}</td><td><code>{}</code></td></tr>", Escaped(&value));
    }
    let _ = writeln!(
        page,
        "</tbody></table></div>\n<pre tabindex=\"0\">{}</pre></details>",
        Escaped(&report.config)
    );
}

fn epochs_of(epochs: f64) -> String {
    match epochs {
        e if !e.is_finite() => "an unknown number of epochs".into(),
        e if e == e.round() => units::plural(e.max(0.0) as u64, "epoch"),
        e => format!("{e:.1} epochs"),
    }
}

/// How every report of ours looks.
pub(crate) const STYLE: &str = include_str!("style.css");
/// Shows what is under the pointer.
pub(crate) const TIPS: &str = include_str!("tips.js");
