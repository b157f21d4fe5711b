//! What workers share if every contribution goes straight to its server.

use crate::copies::LayerCopies;
use crate::multicast::Part;
use crate::peers::Peers;
use poseidon_core::{Cluster, LayerId, NodeId, Plan, Syncer};
use std::ops::Range;
use std::rc::Rc;

/// What a thousand workers share if every contribution goes straight to its server.
pub(crate) struct Flat {
    /// By layer and piece: the chunks that a worker pushes.
    pub(crate) pushes: Vec<Vec<Vec<Push>>>,
    /// By layer and lane: the syncer that every worker begins with.
    pub(crate) syncers: Vec<Vec<Syncer>>,
}

/// At most one chunk of a layer for each server.
pub(crate) struct Push {
    pub(crate) servers: Peers,
    /// By server: its chunk.
    pub(crate) parts: Rc<Vec<Part>>,
}

impl Flat {
    /// What the workers of `plan` share. `copies` has the layers' pieces. `payload` says of a layer
    /// how many bytes a chunk of it has on the way to its server, if these are not the gradient.
    pub(crate) fn new(
        plan: &Plan,
        cluster: &Cluster,
        copies: &[LayerCopies],
        payload: impl Fn(LayerId) -> Option<u32>,
    ) -> Self {
        let layers = || (0..plan.layers() as u32).map(LayerId);
        // Results come to all workers from the same servers.
        let syncers: Vec<_> =
            layers().map(|layer| syncers(plan, cluster, NodeId(0), layer)).collect();
        let pushes = |layer: LayerId| {
            let (syncers, payload) = (&syncers[layer.index()], payload(layer));
            let pieces = copies[layer.index()].pieces.iter();
            pieces.map(|piece| pushes(cluster, syncers, &piece.chunks, payload)).collect()
        };
        Self { pushes: layers().map(pushes).collect(), syncers }
    }
}

/// What `syncers`, those of a layer, tell a worker to send of the chunks of a `piece`; `payload` bytes
/// a chunk, if it is not the gradient.
fn pushes(
    cluster: &Cluster,
    syncers: &[Syncer],
    piece: &Range<u32>,
    payload: Option<u32>,
) -> Vec<Push> {
    let nodes = cluster.nodes();
    let mut pushes: Vec<(Peers, Vec<Part>)> = Vec::new();
    let mut chunks = vec![0; nodes];
    let parts = |syncer| Syncer::parts(syncer).iter().map(move |part| (syncer, part));
    let of_piece = |(_, part): &(_, &poseidon_core::syncer::Part)| piece.contains(&part.key.index);
    for (syncer, part) in syncers.iter().flat_map(parts).filter(of_piece) {
        let server = part.server().index();
        if chunks[server] == pushes.len() {
            pushes.push((Peers::none(nodes), vec![Part::default(); nodes]));
        }
        let (servers, parts) = &mut pushes[chunks[server]];
        chunks[server] += 1;
        servers.insert(server);
        let gradient = syncer.encodings().up.bytes(part.range.len()) as u32;
        parts[server] = Part { index: part.key.index, payload: payload.unwrap_or(gradient) };
    }
    let push = |(servers, parts): (_, Vec<_>)| Push { servers, parts: Rc::new(parts) };
    pushes.into_iter().map(push).collect()
}

/// By lane: what counts off `layer` on worker `me`, if the layer does not go by factors.
pub(crate) fn syncers(plan: &Plan, cluster: &Cluster, me: NodeId, layer: LayerId) -> Vec<Syncer> {
    let lanes = cluster.lane_ids().filter(|_| plan.factors(layer).is_none());
    let syncer = |lane| Syncer::new(plan, me, layer, lane);
    lanes.map(syncer).filter(|syncer| !syncer.is_empty()).collect()
}
