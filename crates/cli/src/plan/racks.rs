//! Whether sums are made inside racks.
//!
//! By bytes it costs a host's port nothing where every host holds as much as any other. With H
//! hosts, h to a rack in R racks, a port carries 2 (H - 1) / H layers each way, with and without. A
//! rack's link carries 2 (R - 1) / R layers with it. Without it, that is h times as many of what goes
//! straight, and 2 (H - 1) / H of what goes round the ring. So it helps where the racks' links are what
//! a step waits for, which needs an oversubscription above 1. Elsewhere it only adds a hop, unless a model has so few chunks that some hosts serve all others: they have
//! fewer to serve then. Both are simulated, and the faster one is the plan.

use super::links::LinkUse;
use crate::report::units;
use poseidon_sim::{Error, Outcome, Places, Setup, simulate};
use serde::Serialize;

/// Whether sums are made inside racks, and why.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RackChoice {
    /// Whether it pays.
    pub(crate) adds_up_inside: bool,
    pub(crate) hosts_per_rack: usize,
    pub(crate) oversubscription: f64,
    /// A step with sums inside racks, and without.
    pub(crate) iteration_seconds_inside: f64,
    pub(crate) iteration_seconds_flat: f64,
    /// The busiest rack's link with sums inside racks, and without.
    pub(crate) link_inside: LinkUse,
    pub(crate) link_flat: LinkUse,
    pub(crate) reason: String,
}

/// Simulates `setup`, whose outcome without sums inside racks is `flat`, also with them. Returns
/// the faster of both and its outcome, and why it is that, if there are racks of several hosts.
pub(super) fn choose(
    setup: Setup,
    flat: Outcome,
) -> Result<(Setup, Outcome, Option<RackChoice>), Error> {
    let Some(racks) = setup.network.racks.filter(|racks| racks.hosts_per_rack > 1) else {
        return Ok((setup, flat, None));
    };
    let Some(link_flat) = LinkUse::of_rack(&setup, &flat) else { return Ok((setup, flat, None)) };
    let places =
        Places { hosts_per_rack: Some(racks.hosts_per_rack as u16), ..Places::of(&setup.cluster) };
    let named = Setup { cluster: places.place(setup.cluster.clone()), ..setup.clone() };
    let inside = simulate(&named)?;
    let Some(link_inside) = LinkUse::of_rack(&named, &inside) else {
        return Ok((setup, flat, None));
    };
    let adds_up_inside = inside.iteration_seconds < flat.iteration_seconds * (1.0 - WORTH);
    let [port_flat, port_inside] =
        [LinkUse::of_port(&setup, &flat), LinkUse::of_port(&named, &inside)];
    let uses = format!(
        "a rack's link is in use for {} of a step with it and {} without, a host's port for {} and {}",
        units::duration(link_inside.seconds),
        units::duration(link_flat.seconds),
        units::duration(port_inside.seconds),
        units::duration(port_flat.seconds),
    );
    let fewer = link_flat.bytes_sent as f64 / link_inside.bytes_sent.max(1) as f64;
    let reason = match adds_up_inside {
        true => format!("{fewer:.1} times fewer bytes pass the racks' links: {uses}"),
        false if link_flat.seconds <= port_flat.seconds => {
            format!("{uses}, so the link is not the limit, and another hop is all it adds")
        }
        false => format!("{uses}, but what the link takes is not waited for"),
    };
    let choice = RackChoice {
        adds_up_inside,
        hosts_per_rack: racks.hosts_per_rack,
        oversubscription: racks.oversubscription,
        iteration_seconds_inside: inside.iteration_seconds,
        iteration_seconds_flat: flat.iteration_seconds,
        link_inside,
        link_flat,
        reason,
    };
    let (setup, outcome) = if adds_up_inside { (named, inside) } else { (setup, flat) };
    Ok((setup, outcome, Some(choice)))
}

impl RackChoice {
    /// For people: whether adding up inside racks pays. [`reason`](Self::reason) says why.
    pub(crate) fn words(&self) -> String {
        format!(
            "adding up inside racks {}: a step takes {} with it and {} without",
            if self.adds_up_inside { "pays" } else { "does not pay" },
            units::duration(self.iteration_seconds_inside),
            units::duration(self.iteration_seconds_flat),
        )
    }
}

/// A gain that is worth naming racks for.
const WORTH: f64 = 0.002;
