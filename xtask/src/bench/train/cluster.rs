//! A virtual cluster for `poseidon train`: every node a network namespace whose port is limited both ways.

use crate::bench::environment;
use crate::command::{command, succeed, works};
use anyhow::{Result, bail};
use std::process::Command;

const SCRIPT: &str = "bench/vcluster.sh";

/// Whether this process can make one.
pub(super) fn check() -> Result<()> {
    if !environment::is_root() || !works(&["ip", "-V"]) || !works(&["tc", "-V"]) {
        bail!("network namespaces need root and iproute2 (Debian: apt-get install iproute2)");
    }
    Ok(())
}

/// The namespaces, taken down when this goes out of scope.
pub(super) struct Cluster(());

impl Cluster {
    /// Joins `nodes` nodes, each with a port of `mbit` Mbit/s each way.
    pub(super) fn up(nodes: u16, mbit: u64) -> Result<Self> {
        // Made first, so that a half-built cluster is taken down as well.
        let cluster = Self(());
        succeed(&mut command(&[SCRIPT, "up", &nodes.to_string(), &format!("{mbit}mbit")]))?;
        Ok(cluster)
    }

    /// `program` on every node at once, each told its rank as torchrun does; arguments can be added.
    pub(super) fn on_every_node(&self, program: &str) -> Command {
        let mut all = command(&[SCRIPT, "all", program]);
        // The namespaces reach nobody else, so the secret protects nothing; nodes only have to agree.
        all.env("POSEIDON_SECRET", "bench train");
        all
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !works(&[SCRIPT, "down"]) {
            eprintln!("some namespaces are left; `{SCRIPT} down` removes them");
        }
    }
}
