//! What the 2017 paper's Table 1 says about a layer of a report, for nodes that are workers and servers.

use super::report::{Layer, Report};

/// A layer on `workers` nodes, with `batch` samples on each.
pub(super) struct Setting {
    pub(super) workers: u16,
    pub(super) batch: u64,
}

const BYTES: f64 = size_of::<f32>() as f64;

impl Setting {
    /// That of `report`.
    pub(super) fn of(report: &Report) -> Self {
        Self { workers: report.workers, batch: report.batch }
    }

    /// The scheme with the smaller cost: factors where 2 (P-1) K (M+N) ≤ 2 MN (2P-2) / P.
    pub(super) fn choice(&self, layer: &Layer) -> &'static str {
        let Some((m, n)) = layer.factors() else { return "ps" };
        let (p, k) = (f64::from(self.workers), self.batch as f64);
        let factors = 2.0 * (p - 1.0) * k * (m + n);
        let matrices = 2.0 * m * n * (2.0 * p - 2.0) / p;
        if factors <= matrices { "sfb" } else { "ps" }
    }

    /// Bytes a node sends for `layer` in a step, by the scheme it went with; as many arrive. A matrix:
    /// gradients to the other shards, parameters of its own to the other workers.
    pub(super) fn bytes(&self, layer: &Layer) -> f64 {
        let (p, k) = (f64::from(self.workers), self.batch as f64);
        match (layer.scheme.as_str(), layer.factors()) {
            ("sfb", Some((m, n))) => (p - 1.0) * k * (m + n) * BYTES,
            _ => 2.0 * layer.parameters as f64 * (p - 1.0) / p * BYTES,
        }
    }

    /// Bytes a node sends in a step.
    pub(super) fn total(&self, layers: &[Layer]) -> f64 {
        layers.iter().map(|layer| self.bytes(layer)).sum()
    }
}

impl Layer {
    /// M and N of a fully connected layer: M outputs, each with N weights and a bias.
    fn factors(&self) -> Option<(f64, f64)> {
        let m: u64 = self.kind.strip_prefix("fc ")?.trim().parse().ok()?;
        let n = (self.parameters / m.max(1)).checked_sub(1)?;
        (m * (n + 1) == self.parameters).then_some((m as f64, n as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    /// CIFAR-10 quick's ip1 is 64 x 1024: on 8 nodes factors are smaller up to K = 15 (2 · 65536 / 8 / 1088).
    #[test]
    fn the_choice_turns_where_the_costs_cross() {
        let ip1 = &report().layers[1];
        assert_eq!(Setting { workers: 8, batch: 15 }.choice(ip1), "sfb");
        assert_eq!(Setting { workers: 8, batch: 16 }.choice(ip1), "ps");
        assert_eq!(Setting { workers: 8, batch: 1 }.choice(&report().layers[0]), "ps");
    }

    #[test]
    fn bytes_by_either_scheme() {
        let report = report();
        let setting = Setting { workers: 8, batch: 8 };
        assert_eq!(setting.bytes(&report.layers[0]), 2.0 * 2432.0 * 7.0 / 8.0 * 4.0);
        assert_eq!(setting.bytes(&report.layers[1]), 7.0 * 8.0 * 1088.0 * 4.0);
        assert_eq!(setting.total(&report.layers), 17_024.0 + 243_712.0);
    }
}
