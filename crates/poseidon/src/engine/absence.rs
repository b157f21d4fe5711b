//! Silence of other nodes, and absence of this one.
//!
//! A node that was away (stopped, frozen, suspended, or without a processor) has heard nobody
//! meanwhile, and nobody has heard it. Its own absence does not count as silence of others. If the
//! others have given it up, it says that it was away.

use super::channel::Gone;
use super::outbox::Payload;
use super::peer::Peer;
use super::{Engine, HEARTBEAT, LINGER, TICK, message};
use crate::Error;
use poseidon_core::wire::{Header, Kind};
use std::time::Duration;

/// A time in which nobody drove the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Absence {
    /// How long it was. Absences shortly after each other count together.
    away: Duration,
    /// When it ended.
    ended: Duration,
}

impl Engine {
    /// The engine is driven at this real time. Returns the time on the engine's own clock.
    pub(super) fn run_at(&mut self, real: Duration) -> Duration {
        if let Some(away) = self.time.handle_running(real) {
            self.handle_absence(away);
        }
        self.time.now()
    }

    /// Nobody has driven the engine for a while. What has come meanwhile is read before anybody is
    /// judged, and the others hear at once that this node is there.
    fn handle_absence(&mut self, away: Duration) {
        let now = self.time.now();
        let before = self.recent_absence().map_or(Duration::ZERO, |absence| absence.away);
        self.absence = Some(Absence { away: before + away, ended: now });
        self.next_tick = self.next_tick.max(now + TICK.min(self.silence / 4));
        for peer in self.peers.iter_mut().flatten().filter(|peer| peer.gone.is_none()) {
            peer.look();
            if !peer.has_unsent() && self.closing.is_none() {
                peer.send(message(Header::bare(Kind::Heartbeat, self.me, 0), Payload::None));
            }
        }
        if away > self.silence / 2 {
            let name = &self.name;
            tracing::warn!(
                "{name} was away for {away:.1?}: stopped, frozen or without a processor"
            );
        }
    }

    /// Tells peers that stopped in the middle of a frame that this node is there.
    pub(super) fn give_signs(&mut self, now: Duration) {
        let is_due = |peer: &&mut Peer| peer.sign_due().is_some_and(|due| due <= now);
        for peer in self.peers.iter_mut().flatten().filter(is_due) {
            peer.send(message(Header::bare(Kind::Heartbeat, self.me, 0), Payload::None));
        }
    }

    /// The absence that others may have noticed just now.
    fn recent_absence(&self) -> Option<Absence> {
        self.absence.filter(|absence| self.time.now() <= absence.ended + self.silence)
    }

    /// What `error` is if this node was away for so long that others may have given it up.
    pub(super) fn after_absence(&self, error: Error) -> Error {
        let absence = self.recent_absence().filter(|absence| absence.away >= self.silence / 2);
        match (absence, &error) {
            (Some(Absence { away, .. }), Error::Lost { .. } | Error::Aborted { .. }) => {
                let (node, silence, found) = (self.name.clone(), self.silence, error.to_string());
                Error::Away { node, away, silence, found }
            }
            _ => error,
        }
    }

    /// What has to be looked at from time to time: silence, heartbeats, and what the channels await.
    pub(super) fn tick(&mut self, now: Duration) {
        self.count();
        let silence = self.silence;
        for peer in self.peers.iter_mut().flatten().filter(|peer| peer.gone.is_none()) {
            let unheard = now.saturating_sub(peer.heard);
            let unspoken = now.saturating_sub(peer.spoke);
            // A link with a parked frame is not read, so its peer cannot be heard: heartbeats are
            // behind that frame.
            if unheard > silence && !peer.is_parked() {
                let mut how = format!("not heard for {silence:?}, though the connection is open");
                if let Some(delivery) = peer.link().delivery() {
                    how += &format!("; {delivery}");
                }
                peer.gone = Some(Gone::Lost(how));
            } else if peer.is_refused() && unspoken > silence {
                // Without a network in between, there is one reason.
                let why = peer.link().delivery().map(|delivery| delivery.to_string());
                let why = why.unwrap_or_else(|| "it stopped reading".into());
                let how = format!("has not taken a byte for {silence:?}: {why}");
                peer.gone = Some(Gone::Lost(how));
            } else if let Some((at, error)) = &peer.unwritable
                && now.saturating_sub(*at) > LINGER.min(silence)
            {
                let how = format!("it reads no more ({error}), and talks on without saying why");
                peer.gone = Some(Gone::Lost(how));
            } else if !peer.has_unsent() && unspoken > HEARTBEAT.min(silence / 4) {
                let beat = Header::bare(Kind::Heartbeat, self.me, 0);
                peer.send(message(beat, Payload::None));
            }
        }
        for (&id, slot) in &mut self.channels.open {
            if let Err(error) = slot.channel.tick(now) {
                self.channels.faults.push((id, error));
            }
        }
    }
}
