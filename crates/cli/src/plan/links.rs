//! What passes the busiest port, memory and rack's link in a step.

use super::Bandwidth;
use crate::report::units;
use poseidon_sim::outcome::Carried;
use poseidon_sim::{Duplex, Outcome, Setup};
use serde::Serialize;

/// What one link carries in a step. Of several links of a kind, it is the busiest.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct LinkUse {
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    /// How long the link is in use.
    pub(crate) seconds: f64,
    /// Bits per second that it carries each way, headers of the network not counted.
    pub(crate) rate: f64,
}

impl LinkUse {
    /// Of a host's port.
    pub(crate) fn of_port(setup: &Setup, outcome: &Outcome) -> Self {
        let busiest = busiest(&outcome.ports).unwrap_or_default();
        let port = Self::new(busiest, setup.network.rate());
        match setup.network.duplex {
            Duplex::Full => port,
            Duplex::Shared => {
                let both = (busiest.sent + busiest.received) as f64;
                Self { seconds: both / setup.network.rate(), ..port }
            }
        }
    }

    /// Of a node's part in its host's memory.
    pub(crate) fn of_memory(setup: &Setup, outcome: &Outcome) -> Option<Self> {
        Some(Self::new(busiest(&outcome.memory)?, setup.network.memory.rate))
    }

    /// Of the link between a rack and the others.
    pub(crate) fn of_rack(setup: &Setup, outcome: &Outcome) -> Option<Self> {
        let rate = setup.network.racks?.rate(&setup.network);
        Some(Self::new(busiest(&outcome.racks)?, rate))
    }

    fn new(carried: Carried, rate: f64) -> Self {
        let Carried { sent, received } = carried;
        let seconds = carried.most() as f64 / rate;
        Self { bytes_sent: sent, bytes_received: received, seconds, rate: rate * 8.0 }
    }

    /// For people. `who` has the link.
    pub(crate) fn words(&self, who: &str) -> String {
        format!(
            "{} out of {who} and {} into it per step, in use for {} at {}",
            units::bytes(self.bytes_sent),
            units::bytes(self.bytes_received),
            units::duration(self.seconds),
            Bandwidth::from_bytes(self.rate / 8.0),
        )
    }
}

fn busiest(links: &[Carried]) -> Option<Carried> {
    links.iter().copied().max_by_key(Carried::most)
}
