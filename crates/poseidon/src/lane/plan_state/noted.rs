//! When layers came to a lane, left it and were done.

use super::PlanState;
use crate::trace::{Record, SessionTrace, What};
use poseidon_core::{Clock, LaneId, LayerId};
use std::sync::Arc;

/// What a lane remembers of its layers until they are done and noted.
pub(super) struct Noted {
    trace: Arc<SessionTrace>,
    lane: LaneId,
    /// By layer.
    layers: Vec<Times>,
}

/// Times are the recorder's. 0: not yet.
#[derive(Clone, Copy, Default)]
struct Times {
    clock: Clock,
    begun: u64,
    /// When links had taken the last message that there was so far.
    out: u64,
}

impl PlanState {
    /// What happens to layers on this lane is noted in `trace`.
    pub(crate) fn recorded(self, trace: Arc<SessionTrace>) -> Self {
        let noted = Some(Noted::new(trace, self.me.lane, self.unsent.len()));
        Self { noted, ..self }
    }

    /// A link has taken a message about `layer`.
    pub(super) fn note_out(&mut self, layer: LayerId) {
        if self.unsent[layer.index()] == 0 {
            self.noted.iter_mut().for_each(|noted| noted.out(layer));
        }
    }
}

impl Noted {
    pub(super) fn new(trace: Arc<SessionTrace>, lane: LaneId, layers: usize) -> Self {
        Self { trace, lane, layers: vec![Times::default(); layers] }
    }

    /// The program has given `layer` to this lane.
    pub(super) fn begun(&mut self, layer: LayerId, clock: Clock) {
        if let Some(begun) = self.trace.now() {
            self.layers[layer.index()] = Times { clock, begun, out: 0 };
        }
    }

    /// Links have taken all messages about `layer` that there are so far.
    pub(super) fn out(&mut self, layer: LayerId) {
        if let Some(now) = self.trace.now() {
            self.layers[layer.index()].out = now;
        }
    }

    /// The lane has finished its part of `layer`.
    pub(super) fn done(&mut self, layer: LayerId) {
        let Some(rings) = self.trace.recorder.on() else { return };
        let Times { clock, begun, out } = std::mem::take(&mut self.layers[layer.index()]);
        if begun > 0 {
            rings.note_on_lane(Record {
                what: What::Part,
                channel: self.trace.channel,
                layer: layer.0,
                clock: clock.0,
                begin: begun,
                end: rings.now(),
                thread: self.lane.0.into(),
                more: out,
            });
        }
    }
}
