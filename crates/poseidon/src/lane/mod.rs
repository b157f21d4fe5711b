//! A session's part on one lane: its chunks, and what it awaits from whom.
//!
//! A lane is one engine of a node and its thread, with a link to the same lane of every other node.
//! [`SessionLane`] is what one session has on a lane; the [engine](crate::engine) carries its
//! frames.
//!
//! * `plan_state`: what the session's plan makes on this lane. `board`: where lanes tell the program
//!   what is done, and what went wrong. `farewell`: how long it waits for the others at the end.

pub(crate) mod board;
pub(crate) mod plan_state;

mod farewell;

#[cfg(test)]
mod board_model;
#[cfg(test)]
mod harness;

/// What the board waits with. Its model has loom's in their place.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
    pub(super) use std::sync::{Condvar, Mutex};
}

use crate::Error;
use crate::engine::channel::{Channel, Gone, Landing, LastWords, Outgoing, Polled, Sent};
use crate::engine::outbox::{Message, Payload};
use crate::engine::traffic::{Counters, LaneCounters};
use crate::memory::exchange::Exchange;
use crate::memory::kept::KeptPiece;
use crate::memory::rule_state::RuleState;
use board::Board;
use farewell::{Farewell, Vain};
use plan_state::{Awaited, Breach, Piece, PlanState};
use poseidon_core::queue::urgency;
use poseidon_core::wire::{Header, Kind, Terms};
use poseidon_core::{
    ChannelId, ChunkKey, Clock, Cluster, Epoch, Layer, LayerId, NodeId, Violation,
};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError};
use std::time::Duration;

/// What the session asks of a lane.
pub(crate) enum Command {
    /// These elements of a layer, whole chunks, go out.
    Send(Arc<Exchange>, Range<usize>),
    /// A layer's factors go out. The session has written them to the layer's matrix.
    SendFactors { layer: LayerId, clock: Clock, rows: usize, terms: Terms },
    /// What is this lane waiting for, of this layer?
    Explain(LayerId, SyncSender<Vec<String>>),
    /// What does the update rule keep of this layer, of the chunks this lane holds?
    RuleState(LayerId, SyncSender<Vec<Piece>>),
    /// Put the update rule where it was. Answers whether the vectors fit.
    RestoreRule(LayerId, Arc<RuleState>, SyncSender<bool>),
    /// From now on the session follows another plan. Nothing is in flight, on any node.
    Replan(Box<PlanState>),
    /// Nothing more will be sent: say goodbye and serve until the others do.
    Finish,
    /// The program is unwinding: tell the others and stop.
    Abort(String),
}

/// A session on one lane of one node.
pub(crate) struct SessionLane {
    id: ChannelId,
    me: NodeId,
    cluster: Cluster,
    layers: Arc<[Layer]>,
    /// The other nodes this one exchanges anything with.
    members: Vec<NodeId>,
    state: PlanState,
    commands: Receiver<Command>,
    board: Arc<Board>,
    counters: Arc<Counters>,
    /// Where chunks go that workers asked to keep.
    keeper: Sender<KeptPiece>,
    /// A chunk that has waited this long for a worker stops the job.
    stall: Duration,
    /// By node: whether it has said goodbye.
    departed: Vec<bool>,
    finishing: bool,
    farewell: Farewell,
}

/// Everything a session's part on a lane is made of.
pub(crate) struct Parts {
    pub(crate) id: ChannelId,
    pub(crate) me: NodeId,
    pub(crate) cluster: Cluster,
    pub(crate) layers: Arc<[Layer]>,
    pub(crate) state: PlanState,
    pub(crate) commands: Receiver<Command>,
    pub(crate) board: Arc<Board>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) keeper: Sender<KeptPiece>,
    pub(crate) stall: Duration,
    /// How long nothing at all may come, on a dedicated server.
    pub(crate) idle: Duration,
}

impl SessionLane {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { id, me, cluster, layers, state, commands, board, counters, .. } = parts;
        let Parts { keeper, stall, idle, .. } = parts;
        let idle = cluster.role(me).is_some_and(|role| !role.worker).then_some(idle);
        let farewell = Farewell::new(cluster.nodes(), stall, idle);
        let departed = vec![false; cluster.nodes()];
        let members = cluster.partners(me);
        let finishing = false;
        board.open_lane();
        Self {
            id,
            me,
            cluster,
            layers,
            members,
            state,
            commands,
            board,
            counters,
            keeper,
            stall,
            departed,
            finishing,
            farewell,
        }
    }

    fn handle_command(
        &mut self,
        command: Command,
        now: Duration,
        out: &mut Outgoing<'_>,
    ) -> Result<(), Error> {
        // Every worker has a link to every server and to every other worker. If a link is gone, the
        // engine is about to tell this session.
        let mut send = |node, message| {
            out.send(node, message);
        };
        match command {
            Command::Replan(state) => {
                debug_assert!(self.state.is_at_rest(), "plans change between clocks");
                // A link may be writing to memory of the old plan: it has to let go of it first, which
                // it does when the session stops.
                if let Some(late) = self.state.arriving() {
                    let (expected, got) = (state.epoch, late.epoch);
                    return Err(self.fault_of(late, Violation::Epoch { expected, got }));
                }
                self.state = *state;
                out.follow(self.state.epoch);
                Ok(())
            }
            Command::Send(exchange, ready) => {
                let sent = self.state.handle_send(exchange, &ready, now, send);
                sent.map_err(|(chunk, violation)| self.own_fault(chunk, violation))
            }
            Command::SendFactors { layer, clock, rows, terms } => {
                let step = (clock, rows, terms);
                let sent = self.state.handle_send_factors(layer, step, send);
                sent.map_err(|(chunk, violation)| self.own_fault(chunk, violation))
            }
            Command::Explain(layer, reply) => {
                let awaited = self.state.awaited().filter(|awaited| awaited.chunk.layer == layer);
                let words = awaited.map(|Awaited { chunk, from, .. }| {
                    format!("chunk {} from {}", chunk.index, self.cluster.name(from))
                });
                // The thread that asks has its own deadline and may have gone. The same is true of
                // the next two commands.
                let _ = reply.try_send(words.collect());
                Ok(())
            }
            Command::RuleState(layer, reply) => {
                let _ = reply.try_send(self.state.rule_state(layer));
                Ok(())
            }
            Command::RestoreRule(layer, rule, reply) => {
                let _ = reply.try_send(self.state.restore_rule(layer, &rule));
                Ok(())
            }
            Command::Finish => {
                self.finish(&mut send);
                Ok(())
            }
            // The first reason is the one that counts: when another lane has failed, the program is
            // likely to give up because of it.
            Command::Abort(reason) => {
                let given_up = || Error::Aborted { node: self.cluster.name(self.me), reason };
                Err(self.board.failure().unwrap_or_else(given_up))
            }
        }
    }

    fn finish(&mut self, send: &mut impl FnMut(NodeId, Message)) {
        if !self.finishing {
            self.finishing = true;
            for &node in &self.members {
                let bye = Header::bare(Kind::Bye, self.me, 0);
                let urgency = urgency(Kind::Bye, LayerId(0));
                send(node, Message::new(bye, Payload::None, urgency, GOODBYE));
            }
        }
    }

    /// Whether all goodbyes are said and heard. A dedicated server says its goodbye after the last
    /// worker has.
    fn is_over(&mut self, out: &mut Outgoing<'_>) -> bool {
        let all_departed = self.members.iter().all(|node| self.departed[node.index()]);
        let serves_only = self.cluster.role(self.me).is_some_and(|r| !r.worker);
        if all_departed && serves_only {
            self.finish(&mut |node, message| {
                out.send(node, message);
            });
        }
        self.finishing && all_departed && !out.has_unsent()
    }

    /// Whether others have said nothing for too long: no goodbye at the end or, on a dedicated server,
    /// nothing at all.
    fn check_farewell(&mut self, now: Duration, out: &Outgoing<'_>) -> Result<(), Error> {
        let any_departed = self.members.iter().any(|node| self.departed[node.index()]);
        let serves_only = self.cluster.role(self.me).is_some_and(|role| !role.worker);
        let begun = self.finishing || (serves_only && any_departed);
        let Some(vain) = self.farewell.poll_vain(begun, now) else { return Ok(()) };
        let departed = |node: &NodeId| self.departed[node.index()];
        let name = |node: &NodeId| match self.farewell.last_of(node.index()) {
            _ if departed(node) => {
                format!("{}, which does not take this node's", self.cluster.name(*node))
            }
            Some((chunk, clock)) => {
                let (layer, chunk) = (self.layer_name(chunk.layer), chunk.index);
                let name = self.cluster.name(*node);
                format!(
                    "{name} (the last of it: chunk {chunk} of layer '{layer}' at clock {clock})"
                )
            }
            None => self.cluster.name(*node),
        };
        let missing = |node: &&NodeId| !departed(node) || out.is_unsent(**node);
        let nodes = self.members.iter().filter(missing).map(name).collect();
        Err(match vain {
            Vain::Goodbyes(waited) => Error::Unfinished { nodes, waited },
            Vain::Anything(waited) => Error::Idle { nodes, waited },
        })
    }

    fn check_stalls(&self, now: Duration) -> Result<(), Error> {
        let departed = |n: NodeId| self.departed[n.index()];
        if let Some(awaited) = self.state.awaited().find(|awaited| departed(awaited.from)) {
            return Err(self.lost(awaited.from, "it finished while others go on".into()));
        }
        let Some(stall) = self.state.poll_stalled(now, Duration::ZERO) else { return Ok(()) };
        let gone = |n: &NodeId| departed(*n) || (*n == self.me && self.finishing);
        if let Some(&node) = stall.missing.iter().find(|n| gone(n)) {
            let (chunk, layer) = (stall.key.index, self.layer_name(stall.key.layer));
            return Err(Error::Lost {
                node: self.cluster.name(node),
                how: "it finished while others go on".into(),
                awaited: Some(format!("chunk {chunk} of layer '{layer}' at clock {}", stall.clock)),
            });
        }
        // Those who collect know better who is missing: they speak first.
        let patience = self.stall + if stall.collected { FIRST_WORD } else { Duration::ZERO };
        if stall.waited < patience {
            return Ok(());
        }
        let through = |name: String| match stall.collected {
            true => format!("{name}, or a worker that contributes through it"),
            false => name,
        };
        Err(Error::Stalled {
            layer: self.layer_name(stall.key.layer),
            chunk: stall.key.index,
            clock: stall.clock,
            missing: stall.missing.iter().map(|&n| through(self.cluster.name(n))).collect(),
            waited: stall.waited,
        })
    }

    /// The error for a `node` that is gone: names what was awaited from the node.
    fn lost(&self, node: NodeId, how: String) -> Error {
        let concerns = |awaited: &Awaited| awaited.from == node || awaited.of == node;
        let mut awaited = self.state.awaited().filter(concerns);
        let first = awaited.next().map(|Awaited { chunk, .. }| {
            let clock: Clock = self.state.clock(chunk.layer);
            let layer = self.layer_name(chunk.layer);
            let more = match awaited.count() {
                0 => String::new(),
                n => format!(" and {n} more chunks"),
            };
            format!("chunk {} of layer '{layer}' at clock {clock}{more}", chunk.index)
        });
        // If nothing is awaited from the node as a server, perhaps a contribution is awaited from
        // its worker.
        let stalled = || {
            let stall = self.state.poll_stalled(Duration::MAX, Duration::ZERO)?;
            let layer = self.layer_name(stall.key.layer);
            let (chunk, clock) = (stall.key.index, stall.clock);
            let words = format!("its part of chunk {chunk} of layer '{layer}' at clock {clock}");
            stall.missing.contains(&node).then_some(words)
        };
        Error::Lost { node: self.cluster.name(node), how, awaited: first.or_else(stalled) }
    }

    /// A frame breaks a rule.
    fn fault_of(&self, header: &Header, violation: Violation) -> Error {
        Error::Violation {
            node: self.cluster.name(header.sender),
            layer: self.layer_name(header.chunk.layer),
            chunk: header.chunk.index,
            clock: header.clock,
            violation,
        }
    }

    /// A node has broken a rule of the roll call.
    fn out_of_turn(&self, (node, clock, violation): Breach) -> Error {
        Error::RollCall { node: self.cluster.name(node), clock, violation }
    }

    /// This node's own worker has broken a rule its shard holds it to.
    fn own_fault(&self, chunk: ChunkKey, violation: Violation) -> Error {
        Error::Violation {
            node: self.cluster.name(self.me),
            layer: self.layer_name(chunk.layer),
            chunk: chunk.index,
            clock: self.state.clock(chunk.layer),
            violation,
        }
    }

    fn layer_name(&self, layer: LayerId) -> String {
        let known = self.layers.get(layer.index());
        known.map_or_else(|| format!("#{layer}, which does not exist"), |l| l.name.clone())
    }
}

// SAFETY: all regions are of chunks and rows that belong to this lane. `PlanState` keeps what they
// are part of until links have had all of it, and reports a layer done only then.
unsafe impl Channel for SessionLane {
    fn id(&self) -> ChannelId {
        self.id
    }

    fn epoch(&self) -> Epoch {
        self.state.epoch
    }

    fn members(&self) -> &[NodeId] {
        &self.members
    }

    fn counters(&self) -> &LaneCounters {
        self.counters.of(self.state.lane())
    }

    fn open(&mut self, header: &Header, now: Duration) -> Result<Landing, Error> {
        self.farewell.handle_frame(header);
        self.state.open(header, now).map_err(|violation| self.fault_of(header, violation))
    }

    fn combine(&mut self, from: NodeId, piece: &[u8]) {
        self.state.combine(from, piece);
    }

    fn landed(&mut self, from: NodeId) {
        self.state.landed(from);
    }

    fn sent(&mut self, sent: Sent) -> bool {
        sent.receipt != GOODBYE && self.state.sent(sent)
    }

    fn handle_goodbye(&mut self, from: NodeId) {
        self.departed[from.index()] = true;
    }

    fn handle_gone(&mut self, node: NodeId, why: &Gone, _: bool) -> Result<(), Error> {
        match why {
            _ if self.departed[node.index()] => Ok(()),
            Gone::Left => Err(self.lost(node, "it left the job while others go on".into())),
            Gone::Lost(how) => Err(self.lost(node, how.clone())),
            Gone::Garbage(why) => {
                Err(Error::Garbage { node: self.cluster.name(node), why: why.clone() })
            }
            Gone::Changed(header) => {
                let frame = match header.filter(|header| header.channel == self.id) {
                    Some(Header { kind: Kind::Abort, .. }) => "its last words".into(),
                    Some(Header { chunk, clock, .. }) => {
                        let layer = self.layer_name(chunk.layer);
                        format!("layer '{layer}', chunk {}, clock {clock}", chunk.index)
                    }
                    None => "its header".into(),
                };
                Err(Error::Changed { node: self.cluster.name(node), frame })
            }
        }
    }

    fn aborted(&self, from: NodeId, speaker: u32, reason: String) -> Error {
        let speaker = self.cluster.node_ids().find(|node| u32::from(node.0) == speaker);
        Error::Aborted { node: self.cluster.name(speaker.unwrap_or(from)), reason }
    }

    /// As long as `node` has not said goodbye: contributions come unasked.
    fn awaits(&self, node: NodeId) -> bool {
        !self.departed[node.index()] && self.members.contains(&node)
    }

    fn needs_driver(&self) -> bool {
        true
    }

    fn is_awaited(&self) -> bool {
        self.board.is_awaited()
    }

    fn poll(&mut self, now: Duration, out: &mut Outgoing<'_>) -> Result<Polled, Error> {
        let mut polled = Polled::default();
        loop {
            match self.commands.try_recv() {
                Ok(command) => {
                    polled.commanded = true;
                    // Frames of the new plan may have come before this command.
                    polled.reconsider |= matches!(command, Command::Replan(_));
                    self.handle_command(command, now, out)?;
                }
                Err(TryRecvError::Empty) => break,
                // The session is gone: nobody will ever send or receive again.
                Err(TryRecvError::Disconnected) => break,
            }
        }
        let worked = self.state.work(now);
        worked.map_err(|(chunk, violation)| self.own_fault(chunk, violation))?;
        let attended = self.state.attend(now, |node, message| {
            out.send(node, message);
        });
        attended.map_err(|breach| self.out_of_turn(breach))?;
        self.state.poll_completed(now, |node, message| {
            out.send(node, message);
        });
        let wakes = [self.state.next_roll(), self.state.next_beginning()];
        polled.wake = wakes.into_iter().flatten().min();
        while let Some(kept) = self.state.poll_kept() {
            // A program that has stopped writing its checkpoint needs it no more.
            let _ = self.keeper.send(kept);
        }
        polled.busy = self.state.has_own_work();
        polled.over = self.is_over(out);
        if !polled.over {
            self.check_farewell(now, out)?;
        }
        Ok(polled)
    }

    fn tick(&mut self, now: Duration) -> Result<(), Error> {
        if let Some(failure) = self.board.failure() {
            return Err(failure); // of another lane of this node
        }
        let departed = self.members.iter().find(|node| self.departed[node.index()]);
        if let Some(&node) = departed {
            self.board.note_departed(node);
        }
        self.check_stalls(now)
    }

    fn fail(&mut self, error: Error) -> LastWords {
        // The words of another node are passed on as that node's. Whoever hears them puts its name
        // before them.
        let (speaker, reason) = match &error {
            Error::Aborted { node, reason } => {
                let named = |id: &NodeId| self.cluster.name(*id) == *node;
                (self.cluster.node_ids().find(named).unwrap_or(self.me), reason.clone())
            }
            error => (self.me, error.to_string()),
        };
        self.board.fail(error);
        LastWords { reason, speaker: speaker.0.into() }
    }
}

impl Drop for SessionLane {
    fn drop(&mut self) {
        self.board.close_lane();
    }
}

/// How much longer than its limit a node waits for others that collect.
const FIRST_WORD: Duration = Duration::from_secs(2);
/// The receipt of a goodbye. Other messages have the receipts that [`PlanState`] gives.
const GOODBYE: u64 = u64::MAX - 1;
