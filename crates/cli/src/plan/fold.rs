//! Long lists of layers made short: layers that are alike share a row.

use super::forecast::LayerForecast;
use crate::report::LayerReport;

/// A row for each layer, or for several that are alike, in forward order and at most about
/// [`ROWS`].
///
/// Neighbours of the same kind and with the same reason are joined first. Where that is not enough,
/// as in transformers, layers whose names differ only in their numbers are: one block stands for all.
pub(super) fn folded(layers: &[LayerForecast]) -> Vec<LayerReport> {
    if layers.len() <= ROWS {
        return layers.iter().map(|layer| row(&[layer])).collect();
    }
    let mut runs: Vec<Vec<&LayerForecast>> = Vec::new();
    for layer in layers {
        match runs.last_mut() {
            Some(run) if alike(run[0], layer) => run.push(layer),
            _ => runs.push(vec![layer]),
        }
    }
    if runs.len() <= ROWS {
        return runs.iter().map(|run| row(run)).collect();
    }
    let mut blocks: Vec<(String, Vec<&LayerForecast>)> = Vec::new();
    for layer in layers {
        let pattern = starred(&layer.name);
        match blocks.iter_mut().find(|(known, block)| *known == pattern && alike(block[0], layer)) {
            Some((_, block)) => block.push(layer),
            None => blocks.push((pattern, vec![layer])),
        }
    }
    blocks
        .iter()
        .map(|(pattern, block)| match block.as_slice() {
            [_] => row(block),
            _ => LayerReport { name: format!("{} × {pattern}", block.len()), ..row(block) },
        })
        .collect()
}

/// All of `layers` as one row.
pub(super) fn row(layers: &[&LayerForecast]) -> LayerReport {
    let first = layers[0];
    let name = match layers.len() {
        1 => first.name.clone(),
        count => format!("{count} layers from {}", first.name),
    };
    let same_shape = layers.iter().all(|layer| layer.shape == first.shape);
    let kind = match first.shape.filter(|_| same_shape) {
        Some([m, n]) => format!("{} {m}×{n}", first.kind),
        None => first.kind.into(),
    };
    LayerReport {
        name,
        kind,
        parameters: layers.iter().map(|layer| layer.parameters).sum(),
        scheme: first.scheme.into(),
        reason: first.reason.clone(),
        bytes_sent_per_step: layers.iter().map(|layer| layer.bytes_per_node).sum(),
    }
}

fn alike(a: &LayerForecast, b: &LayerForecast) -> bool {
    (a.kind, a.shape, a.scheme, &a.reason) == (b.kind, b.shape, b.scheme, &b.reason)
}

/// `layers.7.up` as `layers.*.up`.
fn starred(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        match c.is_ascii_digit() {
            true if text.ends_with('*') => {}
            true => text.push('*'),
            false => text.push(c),
        }
    }
    text
}

/// What a screen holds together with the rest.
const ROWS: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(name: String, kind: &'static str) -> LayerForecast {
        LayerForecast {
            name,
            kind,
            shape: None,
            parameters: 10,
            scheme: "ps",
            bytes_per_node: 5,
            reason: "none".into(),
        }
    }

    #[test]
    fn short_models_stay_as_they_are() {
        let layers: Vec<_> = (0..ROWS).map(|i| layer(format!("l{i}"), "conv")).collect();
        assert_eq!(folded(&layers).len(), ROWS);
    }

    #[test]
    fn neighbours_that_are_alike_share_a_row() {
        let mut layers: Vec<_> = (0..155).map(|i| layer(format!("conv{i}"), "conv")).collect();
        layers.push(layer("fc".into(), "fc"));
        let rows = folded(&layers);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].name, "155 layers from conv0");
        assert_eq!((rows[0].parameters, rows[0].bytes_sent_per_step), (1550, 775));
    }

    #[test]
    fn blocks_that_repeat_share_rows() {
        let block = |i: usize| {
            let parts = [("up", "fc"), ("norm", "other"), ("down", "fc"), ("out", "other")];
            parts.map(|(part, kind)| layer(format!("layers.{i}.{part}"), kind))
        };
        let layers: Vec<_> = (0..12).flat_map(block).collect();
        let rows = folded(&layers);
        let names: Vec<_> = rows.iter().map(|row| row.name.as_str()).collect();
        let expected = ["up", "norm", "down", "out"].map(|part| format!("12 × layers.*.{part}"));
        assert_eq!(names, expected);
    }
}
