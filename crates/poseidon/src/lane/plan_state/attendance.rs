//! A lane's part in the [roll call](poseidon_core::roll), where slow workers may be dropped. There is one
//! lane then, so that all layers agree on who counts.

use super::PlanState;
use crate::engine::outbox::{Message, Payload};
use poseidon_core::queue::urgency;
use poseidon_core::roll::{CALLER, Member, Part, Roll, RollCall};
use poseidon_core::wire::{Header, Kind, Marks};
use poseidon_core::{Clock, Cluster, Consistency, LayerId, NodeId, Violation};
use std::collections::VecDeque;
use std::time::Duration;

/// What this node knows of who counts.
pub(super) struct Attendance {
    me: NodeId,
    workers: usize,
    nodes: Vec<NodeId>,
    /// Of the worker on this node.
    member: Member,
    /// On the node that calls the roll.
    caller: Option<RollCall>,
    /// Words that have come or are this node's own, in order.
    words: VecDeque<Word>,
}

enum Word {
    Ready {
        worker: NodeId,
        clock: Clock,
        marks: Marks,
    },
    Late {
        worker: NodeId,
        clock: Clock,
    },
    Roll(Roll),
    /// Bytes that are no roll.
    Nonsense(Clock),
}

/// Who broke a rule of the roll call, at which clock, and which rule.
pub(crate) type Breach = (NodeId, Clock, Violation);

impl Attendance {
    /// None if nobody is dropped. `parts` are the chunks that this node's worker sends at each clock.
    pub(super) fn new(
        me: NodeId,
        cluster: &Cluster,
        consistency: Consistency,
        parts: usize,
    ) -> Option<Self> {
        let (drops, workers) = (consistency.drops(), cluster.workers());
        let caller = || RollCall::new(workers, drops);
        (drops > 0).then(|| Self {
            me,
            workers,
            nodes: cluster.node_ids().collect(),
            member: Member::new(me, parts),
            caller: (me == CALLER).then(caller),
            words: VecDeque::new(),
        })
    }

    /// This node's worker sends some chunks.
    pub(super) fn handle_send(
        &mut self,
        clock: Clock,
        marks: Marks,
        parts: usize,
    ) -> Result<(), Violation> {
        if self.member.handle_send(clock, parts)? {
            self.words.push_back(Word::Ready { worker: self.me, clock, marks });
        }
        Ok(())
    }

    /// Judges a frame before its payload is taken.
    pub(super) fn judge(&self, header: &Header) -> Result<(), Violation> {
        let (expected, from_caller) = match header.kind {
            Kind::Roll => (self.workers, true),
            _ => (0, false),
        };
        let got = header.length as usize;
        if got != expected {
            return Err(Violation::Length { expected, got });
        }
        match from_caller {
            true if header.sender != CALLER => {
                Err(Violation::WrongWay { expected: CALLER, got: header.sender })
            }
            false if self.caller.is_none() => Err(Violation::WrongKind),
            _ => Ok(()),
        }
    }

    /// A frame has come that was judged.
    pub(super) fn handle_word(&mut self, header: Header, bytes: Vec<u8>) {
        let Header { sender: worker, clock, marks, .. } = header;
        self.words.push_back(match header.kind {
            Kind::Ready => Word::Ready { worker, clock, marks },
            Kind::Late => Word::Late { worker, clock },
            _ => Roll::read(clock, marks, &bytes, self.workers)
                .map_or(Word::Nonsense(clock), Word::Roll),
        });
    }

    /// Tells other nodes what they have to hear, and returns rolls for this node's shard.
    fn attend(
        &mut self,
        now: Duration,
        send: &mut impl FnMut(NodeId, Message),
    ) -> Result<Vec<Roll>, Breach> {
        let mut rolls = Vec::new();
        while let Some(word) = self.words.pop_front() {
            match (word, &mut self.caller) {
                (Word::Ready { worker, clock, marks }, Some(caller)) => {
                    let heard = caller.handle_ready(worker, clock, marks, now);
                    heard.map_err(|violation| (worker, clock, violation))?;
                }
                (Word::Late { worker, clock }, Some(caller)) => {
                    let heard = caller.handle_late(worker, clock);
                    heard.map_err(|violation| (worker, clock, violation))?;
                }
                (Word::Ready { clock, marks, .. }, None) => {
                    send(CALLER, word_of(Kind::Ready, clock, marks, Payload::None));
                }
                (Word::Late { clock, .. }, None) => {
                    send(CALLER, word_of(Kind::Late, clock, Marks::NONE, Payload::None));
                }
                (Word::Roll(roll), _) => rolls.push(roll),
                (Word::Nonsense(clock), _) => return Err((CALLER, clock, Violation::NotARoll)),
            }
        }
        while let Some(roll) = self.caller.as_mut().and_then(|caller| caller.poll(now)) {
            let bytes: Box<[u8]> = roll.bytes().into();
            for &node in self.nodes.iter().filter(|node| **node != self.me) {
                let payload = Payload::Text(bytes.clone());
                send(node, word_of(Kind::Roll, roll.clock, roll.marks, payload));
            }
            rolls.push(roll);
        }
        Ok(rolls)
    }
}

impl PlanState {
    /// Takes part in the roll call, where there is one.
    pub(crate) fn attend(
        &mut self,
        now: Duration,
        mut send: impl FnMut(NodeId, Message),
    ) -> Result<(), Breach> {
        if self.attendance.is_none() {
            return Ok(());
        }
        let all_sent = self.is_all_sent();
        let Some(attendance) = &mut self.attendance else { return Ok(()) };
        loop {
            for roll in attendance.attend(now, &mut send)? {
                attendance.member.handle_roll(&roll);
                self.board.note_roll(roll.those(Part::Counts), roll.those(Part::Joins));
                let clock = roll.clock;
                let heard = self.store.handle_roll(roll);
                heard.map_err(|violation| (CALLER, clock, violation))?;
            }
            let Some(clock) = attendance.member.poll_late(all_sent) else { return Ok(()) };
            attendance.words.push_back(Word::Late { worker: attendance.me, clock });
        }
    }

    /// Whether links and this node's shard have all that the worker has sent.
    pub(super) fn is_all_sent(&self) -> bool {
        self.own.is_empty() && self.unsent.iter().all(|unsent| *unsent == 0)
    }

    /// When the roll is called, if nobody says anything before.
    pub(crate) fn next_roll(&self) -> Option<Duration> {
        self.attendance.as_ref()?.caller.as_ref()?.wake()
    }
}

fn word_of(kind: Kind, clock: Clock, marks: Marks, payload: Payload) -> Message {
    let bare = Header::bare(kind, NodeId(0), payload.len() as u32);
    let header = Header { clock, marks, ..bare };
    Message::new(header, payload, urgency(kind, LayerId(0)), super::HELD_RESULT)
}
