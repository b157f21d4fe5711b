//! The operations under way, and which of them a frame belongs to.

use super::course::{Course, Key, Mode, Run};
use super::request::Words;
use super::tensor::Region;
use crate::Error;
use poseidon_core::reduce::reduce;
use poseidon_core::wire::{Header, Kind, Place, Signature};
use std::collections::VecDeque;

pub(super) struct Desk {
    pub(super) me: u16,
    /// What ranks are called in errors.
    pub(super) names: Vec<String>,
    /// In the order they were begun.
    pub(super) courses: VecDeque<Course>,
    /// The number of the next collective.
    pub(super) sequence: u64,
    /// What has become ready to be sent, and to whom.
    pub(super) outgoing: Vec<(usize, Run)>,
}

/// Where a frame's payload goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landing {
    pub(super) ticket: u64,
    pub(super) place: Place,
    pub(super) region: Region,
    pub(super) mode: Mode,
}

impl Desk {
    /// The place of a frame from `rank`. `None`: no operation here has asked for it yet.
    pub(super) fn route(&mut self, rank: usize, header: &Header) -> Result<Option<Landing>, Error> {
        match header.kind {
            Kind::Collective => self.route_collective(rank, header),
            _ => self.route_message(rank, header),
        }
    }

    fn route_collective(&mut self, rank: usize, header: &Header) -> Result<Option<Landing>, Error> {
        let garbage = |why| Error::Garbage { node: self.names[rank].clone(), why };
        let Some((theirs, place)) = Signature::read(header) else {
            return Err(garbage("a collective of an unknown type or operation".into()));
        };
        let at = |c: &&Course| matches!(c.key, Key::Collective { sequence, .. } if sequence == place.sequence);
        let Some(course) = self.courses.iter().find(at) else {
            if place.sequence >= self.sequence {
                return Ok(None);
            }
            let words = format!("{} (collective {})", Words(theirs), place.sequence);
            return Err(garbage(format!("a piece of {words}, which is over here")));
        };
        let Key::Collective { signature, .. } = course.key else { return Ok(None) };
        let mismatch = |theirs: String| Error::Mismatch {
            sequence: place.sequence,
            mine: format!("{} on {}", Words(signature), self.names[usize::from(self.me)]),
            theirs: format!("{theirs} on {}", self.names[rank]),
        };
        if signature != theirs {
            return Err(mismatch(Words(theirs).to_string()));
        }
        let opened = course.open(rank, place, header.length as usize);
        let (region, mode) = opened
            .map_err(|why| mismatch(format!("{} with other lengths ({why})", Words(theirs))))?;
        Ok(Some(Landing { ticket: course.ticket, place, region, mode }))
    }

    fn route_message(&mut self, rank: usize, header: &Header) -> Result<Option<Landing>, Error> {
        let (place, tag) = (Place::read(header), header.chunk.layer.0);
        let sender = rank as u16;
        let mine = |course: &&mut Course| match course.key {
            Key::Receive { bound: Some(bound), .. } => bound == (sender, place.sequence),
            Key::Receive { from, tag: wanted, bound: None } => {
                place.piece == 0 && wanted == tag && from.is_none_or(|from| from == sender)
            }
            _ => false,
        };
        let Some(course) = self.courses.iter_mut().find(mine) else { return Ok(None) };
        if place.piece == 0 {
            course.bind(sender, place.sequence);
            course.progress.set_source(sender);
        }
        let sent = header.value.to_bits();
        let opened = course.open(rank, place, header.length as usize);
        let (region, mode) = opened.map_err(|why| {
            let node = self.names[rank].clone();
            Error::Message { node, tag, sent, why: why.to_string() }
        })?;
        Ok(Some(Landing { ticket: course.ticket, place, region, mode }))
    }

    /// A frame's payload is where it belongs.
    pub(super) fn landed(&mut self, rank: usize, landing: &Landing) {
        let outgoing = &mut self.outgoing;
        if let Some(course) = self.courses.iter_mut().find(|c| c.ticket == landing.ticket) {
            course.landed(rank, landing.place, |to, run| outgoing.push((to, run)));
        }
    }

    /// A link has taken the last byte of a run.
    pub(super) fn sent(&mut self, ticket: u64) {
        if let Some(course) = self.courses.iter_mut().find(|c| c.ticket == ticket) {
            course.sent();
        }
    }

    /// The first operation that still needs something from `rank`.
    pub(super) fn awaiting(&self, rank: usize) -> Option<&Course> {
        self.courses.iter().find(|course| course.awaits(rank))
    }

    /// Puts a payload that was kept aside into its place.
    pub(super) fn land(&mut self, rank: usize, landing: &Landing, payload: &[u8]) {
        // SAFETY: the operation owns the region, and the engine is one thread at a time.
        let region = unsafe { landing.region.bytes_mut() };
        match landing.mode {
            Mode::Assign => region.copy_from_slice(payload),
            Mode::Reduce(dtype, op) => {
                // A payload kept aside is bytes wherever they happened to be allocated.
                let mut aligned = vec![0u64; payload.len().div_ceil(size_of::<u64>())];
                let bytes = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut aligned)[..payload.len()];
                bytes.copy_from_slice(payload);
                reduce(dtype, op, region, bytes);
            }
        }
        self.landed(rank, landing);
    }
}
