//! Frames that nobody had asked for when they came, and what becomes of them later.

use super::{Channels, Landing, Peer, State};
use poseidon_core::wire::{Header, Kind};
use std::time::Duration;

/// Most bytes of frames that nobody has asked for, kept aside for one peer so that other frames can
/// pass. Beyond it the next such frame is parked, and the link waits until its channel asks for it.
pub(super) const MOST: usize = 64 << 20;

impl Peer {
    /// A channel may have a place now for frames that had to wait. True if something has moved.
    pub(in crate::engine) fn reconsider(
        &mut self,
        channels: &mut Channels,
        scratch: &mut [u64],
        now: Duration,
    ) -> bool {
        let mut moved = self.replay(channels, scratch, now);
        if let State::Parked(header) = self.state
            && self.gone.is_none()
        {
            self.state = State::Header;
            self.open(header, channels, now);
            moved |= !self.is_parked();
            while self.advance(channels, scratch, now) {}
        }
        moved
    }

    /// Gives the channels the frames that were put aside, as far as they want them now. True if
    /// they took any.
    pub(super) fn replay(
        &mut self,
        channels: &mut Channels,
        scratch: &mut [u64],
        now: Duration,
    ) -> bool {
        // A channel takes one frame of a node at a time.
        let half_there = match &self.state {
            State::Assign { channel, .. } | State::Combine { channel, .. } => Some(*channel),
            _ => None,
        };
        let mut moved = false;
        let mut index = 0;
        while let Some((header, bytes)) = self.aside.get(index) {
            let header = *header;
            if !channels.admits(header.channel, self.node) {
                self.stranger(&header);
                return moved;
            }
            let landing = match header.kind {
                _ if half_there == Some(header.channel) => {
                    self.postponed = true;
                    Some(Landing::Later)
                }
                Kind::Bye | Kind::Abort => {
                    let before = self.aside.iter().take(index);
                    let first = before.clone().all(|(first, _)| first.channel != header.channel);
                    (!first || !channels.is_known(header.channel)).then_some(Landing::Later)
                }
                _ => channels.open(&header, now),
            };
            match landing {
                Some(Landing::Later) => {
                    index += 1;
                    continue;
                }
                None if header.kind == Kind::Bye => channels.goodbye(header.channel, self.node),
                None if header.kind == Kind::Abort => self.deliver_abort(&header, bytes, channels),
                None => {}
                Some(Landing::Assign { region, .. }) => {
                    // SAFETY: the channel has just given the region for this payload.
                    unsafe { region.bytes_mut() }.copy_from_slice(bytes);
                    channels.landed(header.channel, self.node);
                }
                Some(Landing::Combine { width }) => {
                    // The kept bytes may lie at any address, but elements have to be aligned: they
                    // go through the scratch.
                    let aligned: &mut [u8] = bytemuck::cast_slice_mut(scratch);
                    for piece in bytes.chunks(aligned.len() / width * width) {
                        aligned[..piece.len()].copy_from_slice(piece);
                        channels.combine(header.channel, self.node, &aligned[..piece.len()]);
                    }
                    channels.landed(header.channel, self.node);
                }
            }
            moved = true;
            self.aside_bytes -= Header::SIZE + bytes.len();
            self.aside.remove(index);
        }
        moved
    }

    pub(super) fn put_aside(&mut self, header: Header, bytes: Vec<u8>) {
        self.aside_bytes += Header::SIZE + bytes.len();
        self.aside.push_back((header, bytes));
        if self.aside_bytes > 2 * MOST {
            self.garbage(format!("{} frames that nobody has asked for", self.aside.len()));
        }
    }
}
