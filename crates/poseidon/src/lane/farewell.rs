//! How long a session's part on a lane waits for nodes that say nothing more: for their goodbyes, and
//! on a dedicated server for anything at all.

use poseidon_core::wire::Header;
use poseidon_core::{ChunkKey, Clock};
use std::time::Duration;

/// The waits at the end of a session.
pub(super) struct Farewell {
    /// How long the last goodbye may come after the first.
    patience: Duration,
    /// How long nothing at all may come. `None` on workers: their programs decide how long they
    /// compute.
    idle: Option<Duration>,
    /// When this node said goodbye or, on a dedicated server, when it heard the first one.
    since: Option<Duration>,
    /// When something came last.
    active: Duration,
    stirred: bool,
    /// By node: the last frame about a layer that came from it.
    last: Vec<Option<(ChunkKey, Clock)>>,
}

/// What has been waited for in vain, for so long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vain {
    /// The goodbyes that have not come.
    Goodbyes(Duration),
    /// Anything.
    Anything(Duration),
}

impl Farewell {
    pub(super) fn new(nodes: usize, patience: Duration, idle: Option<Duration>) -> Self {
        let last = vec![None; nodes];
        Self { patience, idle, since: None, active: Duration::ZERO, stirred: true, last }
    }

    /// A frame about a layer has come.
    pub(super) fn handle_frame(&mut self, header: &Header) {
        self.stirred = true;
        if let Some(last) = self.last.get_mut(header.sender.index()) {
            *last = Some((header.chunk, header.clock));
        }
    }

    /// The last frame about a layer that came from this node.
    pub(super) fn last_of(&self, node: usize) -> Option<(ChunkKey, Clock)> {
        self.last.get(node).copied().flatten()
    }

    /// Whether a wait has been too long. `begun`: there are goodbyes to wait for.
    pub(super) fn poll_vain(&mut self, begun: bool, now: Duration) -> Option<Vain> {
        if std::mem::take(&mut self.stirred) {
            self.active = now;
        }
        if begun {
            let waited = now.saturating_sub(*self.since.get_or_insert(now));
            return (waited > self.patience).then_some(Vain::Goodbyes(waited));
        }
        let waited = now.saturating_sub(self.active);
        (waited > self.idle?).then_some(Vain::Anything(waited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_server_waits_long_for_anything_and_not_so_long_for_the_last_goodbye() {
        let mut server = Farewell::new(2, 5 * SECOND, Some(20 * SECOND));
        assert_eq!(server.poll_vain(false, 3 * SECOND), None);
        assert_eq!(server.poll_vain(false, 23 * SECOND), None);
        server.stirred = true;
        assert_eq!(server.poll_vain(false, 24 * SECOND), None);
        assert_eq!(server.poll_vain(false, 44 * SECOND), None);
        assert_eq!(server.poll_vain(false, 45 * SECOND), Some(Vain::Anything(21 * SECOND)));
        assert_eq!(server.poll_vain(true, 50 * SECOND), None);
        assert_eq!(server.poll_vain(true, 55 * SECOND), None);
        assert_eq!(server.poll_vain(true, 56 * SECOND), Some(Vain::Goodbyes(6 * SECOND)));
        let mut worker = Farewell::new(2, 5 * SECOND, None);
        assert_eq!(worker.poll_vain(false, 1_000_000 * SECOND), None);
    }
}
