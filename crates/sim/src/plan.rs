//! From a setup to core's plan.

use crate::setup::{SchemeRule, Setup};
use poseidon_core::plan::{Placement, Way};
use poseidon_core::scheme::{Choice, choose};
use poseidon_core::{Cluster, LayerId, LayerKind, Plan, Policy, Scheme};

impl Setup {
    /// How every layer is synchronised and where its chunks live: the plan a session would follow.
    pub fn plan(&self) -> Plan {
        let ids = (0..self.layers.len() as u32).map(LayerId);
        let apart = (!self.consistency.is_bsp()).then(|| self.cluster.clone().apart());
        let cluster = apart.as_ref().unwrap_or(&self.cluster);
        let ways = ids.map(|layer| self.way(cluster, layer));
        Plan::along(cluster, &self.layers, self.chunk, ways).with_consistency(self.consistency)
    }

    /// The rule that `layer` follows.
    pub fn rule(&self, layer: LayerId) -> SchemeRule {
        let other = self.overrides.iter().rev().find(|(l, _)| *l == layer);
        other.map_or(self.scheme, |(_, rule)| *rule)
    }

    /// Bytes of factors that a worker sends to the server of `layer` instead of its gradient, if
    /// that is how the layer is synchronised.
    pub fn adam_push(&self, layer: LayerId) -> Option<usize> {
        let adam = self.rule(layer) == SchemeRule::Adam && self.cluster.workers() > 1;
        match self.layers[layer.index()].kind {
            LayerKind::Fc { m, n } if adam => {
                let up = self.layers[layer.index()].up;
                Some(self.factor_rows(layer) * up.bytes(m + n))
            }
            _ => None,
        }
    }

    /// Rows of factors of one worker's batch.
    pub(crate) fn factor_rows(&self, layer: LayerId) -> usize {
        self.batch * self.rows[layer.index()].max(1)
    }

    fn way(&self, cluster: &Cluster, id: LayerId) -> Way {
        let layer = &self.layers[id.index()];
        let batch = Some(self.factor_rows(id));
        let policy = match self.rule(id) {
            SchemeRule::Auto => Policy::Auto,
            SchemeRule::Ps | SchemeRule::Adam => Policy::Ps,
            SchemeRule::Sfb => Policy::Sfb,
        };
        if self.adam_push(id).is_some() {
            let reason = "as told: factors to one server, matrices back".into();
            let choice = Choice { scheme: Scheme::Ps, reason };
            return Way { choice, placement: Placement::PerTensor, batch };
        }
        let choice = choose(layer, cluster, batch, policy);
        Way { choice, placement: self.placement, batch }
    }
}
