//! What runs over an engine's links: the part of a session or of a group on one lane.

use super::outbox::{Message, Payload};
use super::peer::Peer;
use super::traffic::LaneCounters;
use crate::Error;
use crate::memory::region::Region;
use poseidon_core::wire::Header;
use poseidon_core::{ChannelId, Epoch, NodeId};
use std::time::Duration;

/// One session or group, as the engine that carries its frames sees it.
///
/// The engine calls a channel from one thread at a time. If a method returns an error, the channel
/// is closed: the engine lets go of the channel's memory, calls [`fail`](Channel::fail) and tells
/// the members.
///
/// # Safety
/// The engine reads from the regions of messages, and writes to those that [`open`](Channel::open)
/// returns. A region that a message has can be read, and nobody writes to it, until the channel has
/// been told that the message is [sent](Channel::sent). A region that a payload goes to can be
/// written, and nobody else touches it, until the channel has been told that it has
/// [landed](Channel::landed); it has exactly the payload's length. Both end earlier when the
/// channel is told that it is closed ([`fail`](Channel::fail)).
pub(crate) unsafe trait Channel: Send {
    /// The number that the channel's frames have in their headers.
    fn id(&self) -> ChannelId;

    /// The epoch of the session's plan. Frames of a later epoch wait. A group has the first epoch.
    fn epoch(&self) -> Epoch;

    /// The other nodes that the channel talks to.
    fn members(&self) -> &[NodeId];

    /// Where the channel's frames and bytes are counted.
    fn counters(&self) -> &LaneCounters;

    /// Judges a frame before a byte of its payload is taken, and says where the payload goes.
    fn open(&mut self, header: &Header, now: Duration) -> Result<Landing, Error>;

    /// The next piece of a payload from `from` that is [combined](Landing::Combine): whole elements,
    /// aligned for their type.
    fn combine(&mut self, from: NodeId, piece: &[u8]);

    /// The payload of the frame from `from` that was opened last is all there.
    fn landed(&mut self, from: NodeId);

    /// A link has taken the last byte of a message; or the receiver is gone, and the channel goes
    /// on. True if the channel has something to tell its program in the next poll.
    fn sent(&mut self, sent: Sent) -> bool;

    /// `from` has said goodbye to this channel: nothing more comes from that node.
    fn handle_goodbye(&mut self, from: NodeId);

    /// The link to `node` is gone. `undelivered`: it had not taken all of this channel's messages.
    /// Unless this method returns an error, these messages count as sent.
    fn handle_gone(&mut self, node: NodeId, why: &Gone, undelivered: bool) -> Result<(), Error>;

    /// The error for a channel that `from` has stopped with this reason. `speaker` is the member
    /// whose words the reason is, in the channel's own numbering.
    fn aborted(&self, from: NodeId, speaker: u32, reason: String) -> Error;

    /// Whether the channel needs frames from `node` now. Then these frames must not wait in the
    /// link behind a frame that nobody has asked for.
    fn awaits(&self, node: NodeId) -> bool;

    /// Whether a thread has to drive the engine even if no program waits.
    fn needs_driver(&self) -> bool;

    /// Whether a program waits for the channel rather than computing.
    fn is_awaited(&self) -> bool;

    /// Takes up commands, does its own work and gives `out` what has become ready to be sent.
    fn poll(&mut self, now: Duration, out: &mut Outgoing<'_>) -> Result<Polled, Error>;

    /// Looks for what has waited too long. Called twice a second.
    fn tick(&mut self, now: Duration) -> Result<(), Error>;

    /// The channel is closed because of `error`, and tells its program so. The engine has let go of
    /// the channel's memory.
    fn fail(&mut self, error: Error) -> LastWords;
}

/// Where the payload of a frame goes.
#[derive(Debug)]
pub(crate) enum Landing {
    /// Straight into memory of exactly the payload's length. `past_cache`: nobody looks at this
    /// memory soon, so the bytes need not stay in the cache.
    Assign { region: Region, past_cache: bool },
    /// Through the engine's scratch, piece by piece, in whole elements of `width` bytes.
    Combine { width: usize },
    /// Nowhere yet: the frame has to wait until the channel asks for a [new
    /// look](Polled::reconsider).
    Later,
}

/// A message that has left.
pub(crate) struct Sent {
    /// The number the message was given.
    pub(crate) receipt: u64,
    /// The payload of the message's last frame.
    pub(crate) payload: Payload,
}

/// How a node is gone.
#[derive(Clone, Debug)]
pub(crate) enum Gone {
    /// The node said goodbye on the link.
    Left,
    /// The connection broke, or the node fell silent.
    Lost(String),
    /// The node sent something that is not a frame, or not a frame for this link.
    Garbage(String),
    /// A frame of the node was changed on its way here. This one, if its header was not changed.
    Changed(Option<Header>),
}

/// How a channel stands after a [poll](Channel::poll).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Polled {
    /// The channel has more to do right now.
    pub(crate) busy: bool,
    /// A program has just told the channel to do something.
    pub(crate) commanded: bool,
    /// The channel wants to be polled again at this time.
    pub(crate) wake: Option<Duration>,
    /// The channel may now have a place for frames that had to wait.
    pub(crate) reconsider: bool,
    /// A program that waits should look again.
    pub(crate) progressed: bool,
    /// The channel has nothing more to do and may be removed.
    pub(crate) over: bool,
}

/// What the members of a channel that failed are told.
pub(crate) struct LastWords {
    pub(crate) reason: String,
    /// Whose words they are, in the channel's own numbering.
    pub(crate) speaker: u32,
}

/// Takes the messages that one channel sends.
pub(crate) struct Outgoing<'a> {
    pub(super) me: NodeId,
    pub(super) id: ChannelId,
    pub(super) epoch: Epoch,
    pub(super) peers: &'a mut [Option<Peer>],
    /// Messages of the channel that links have not taken.
    pub(super) unsent: &'a mut usize,
}

impl Outgoing<'_> {
    /// Queues a message for `to`. False if `to` is gone: then the message is dropped.
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

    /// Whether the link to `to` still has to take messages, of any channel.
    pub(crate) fn is_unsent(&self, to: NodeId) -> bool {
        let peer = self.peers.get(to.index()).and_then(Option::as_ref);
        peer.is_some_and(|peer| peer.gone.is_none() && peer.has_unsent())
    }

    /// Whether links still have to take messages of this channel.
    pub(crate) fn has_unsent(&self) -> bool {
        *self.unsent > 0
    }
}
