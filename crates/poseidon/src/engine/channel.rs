//! What runs over an engine's links: a session's part on one lane, or a group.

use super::outbox::{Message, Payload};
use super::peer::Peer;
use super::traffic::Counters;
use crate::Error;
use crate::memory::region::Region;
use poseidon_core::wire::Header;
use poseidon_core::{ChannelId, Epoch, NodeId};
use std::time::Duration;

/// One session or group, as the engine that carries its frames sees it.
///
/// The engine calls it from one thread at a time. Errors close the channel: the engine lets go of the
/// channel's memory, calls [`fail`](Channel::fail) and tells the members.
pub(crate) trait Channel: Send {
    /// What its frames are told apart by.
    fn id(&self) -> ChannelId;

    /// The arrangement its frames belong to.
    fn epoch(&self) -> Epoch;

    /// The other nodes it talks to.
    fn members(&self) -> &[NodeId];

    /// Where what it exchanges is counted.
    fn counters(&self) -> &Counters;

    /// Judges a frame before a byte of its payload is taken, and says where the payload goes.
    fn open(&mut self, header: &Header, now: Duration) -> Result<Landing, Error>;

    /// The next piece of a payload from `from` that is [combined](Landing::Combine): whole elements,
    /// aligned for their type.
    fn combine(&mut self, from: NodeId, piece: &[u8]);

    /// The payload of the frame from `from` that was opened last is all there.
    fn landed(&mut self, from: NodeId);

    /// A link has taken the last byte of a message, or its receiver is gone.
    fn sent(&mut self, sent: Sent);

    /// `from` has said goodbye to this channel: nothing more comes from it.
    fn handle_goodbye(&mut self, from: NodeId);

    /// The link to `node` is gone. `undelivered`: with messages of this channel that it had not taken;
    /// unless this is an error, they count as sent.
    fn handle_gone(&mut self, node: NodeId, why: &Gone, undelivered: bool) -> Result<(), Error>;

    /// `from` has stopped the channel, with this reason. `speaker` is whose words they are.
    fn aborted(&self, from: NodeId, speaker: u32, reason: String) -> Error;

    /// Whether it needs frames from `node` now: then none of them may wait behind a frame of another
    /// channel that nobody has asked for.
    fn awaits(&self, node: NodeId) -> bool;

    /// Whether a thread has to be at the engine's side even if no program waits: frames may come
    /// unasked.
    fn needs_driver(&self) -> bool;

    /// Whether a program waits for it rather than computing.
    fn is_awaited(&self) -> bool;

    /// Takes up commands, does its own work and gives `out` what has become ready to be sent.
    fn poll(&mut self, now: Duration, out: &mut Outgoing<'_>) -> Result<Polled, Error>;

    /// Looks, twice a second, for what has waited too long.
    fn tick(&mut self, now: Duration) -> Result<(), Error>;

    /// It is closed because of `error`: tells the program. The engine has let go of its memory.
    fn fail(&mut self, error: Error) -> LastWords;
}

/// Where the payload of a frame goes.
#[derive(Debug)]
pub(crate) enum Landing {
    /// Straight into memory of exactly its length. `past_cache`: nobody looks at it soon.
    Assign { region: Region, past_cache: bool },
    /// Through the engine's scratch, piece by piece, in whole elements of `width` bytes.
    Combine { width: usize },
    /// Nowhere yet: it has to wait until the channel has done something.
    Later,
}

/// A message that has left.
pub(crate) struct Sent {
    /// The number the message was given.
    pub(crate) receipt: u64,
    /// Its last frame's payload.
    pub(crate) payload: Payload,
}

/// How a node is gone.
#[derive(Clone, Debug)]
pub(crate) enum Gone {
    /// It said goodbye to everybody.
    Left,
    /// The connection broke, or the node fell silent.
    Lost(String),
    /// It sent something that is not a frame.
    Garbage(String),
}

/// How a channel stands after a [poll](Channel::poll).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Polled {
    /// It has more to do right now.
    pub(crate) busy: bool,
    /// A program has just told it to do something.
    pub(crate) commanded: bool,
    /// It wants to be polled again at this time.
    pub(crate) wake: Option<Duration>,
    /// It may now have a place for frames that had to wait.
    pub(crate) reconsider: bool,
    /// A program that waits should look again.
    pub(crate) progressed: bool,
    /// All said and done: it may be removed.
    pub(crate) over: bool,
}

/// What the members of a channel that failed are told.
pub(crate) struct LastWords {
    pub(crate) reason: String,
    /// Whose words they are, in the channel's own numbering.
    pub(crate) speaker: u32,
}

/// Takes what one channel sends.
pub(crate) struct Outgoing<'a> {
    pub(super) me: NodeId,
    pub(super) id: ChannelId,
    pub(super) epoch: Epoch,
    pub(super) peers: &'a mut [Option<Peer>],
    /// Messages of the channel that links have not taken.
    pub(super) unsent: &'a mut usize,
}

impl Outgoing<'_> {
    /// Queues a message for `to`. False if `to` is gone: nobody takes it then.
    pub(crate) fn send(&mut self, to: NodeId, mut message: Message) -> bool {
        let peer = self.peers.get_mut(to.index()).and_then(Option::as_mut);
        let Some(peer) = peer.filter(|peer| peer.gone.is_none()) else { return false };
        message.header.sender = self.me;
        message.header.channel = self.id;
        message.header.epoch = self.epoch;
        *self.unsent += 1;
        peer.send(message);
        true
    }

    /// What is sent from now on belongs to `epoch`.
    pub(crate) fn follow(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    /// Whether links still have to take messages of this channel.
    pub(crate) fn has_unsent(&self) -> bool {
        *self.unsent > 0
    }
}
