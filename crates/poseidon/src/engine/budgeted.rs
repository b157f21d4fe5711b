//! Sending within the node's budget.

use super::{BURST, Engine};
use std::time::Duration;

impl Engine {
    /// As `write_burst`, for links to other hosts while there is a budget. The peer that the budget
    /// held back first is the first one next time. Returns when the budget has room again, if it
    /// holds something back. The budget is the node's, so its times are real ones.
    pub(super) fn write_within_budget(&mut self, now: Duration) -> Option<Duration> {
        let nodes = self.peers.len();
        let mut left = BURST;
        let first = self.budget_turn;
        let mut held = None;
        for node in (0..nodes).map(|i| (first + i) % nodes) {
            let Some(peer) = &mut self.peers[node] else { continue };
            if !peer.is_budgeted() || !peer.may_write() {
                continue;
            }
            let room = match self.allowance.poll_room(self.time.real(now)) {
                Ok(room) => room,
                Err(at) => {
                    if held.replace(self.time.at(at)).is_none() {
                        self.budget_turn = node;
                    }
                    0
                }
            };
            let wrote = peer.write(&mut self.channels, room, now);
            self.allowance.handle_sent(wrote);
            left = left.saturating_sub(wrote);
            if left == 0 && held.is_none() {
                self.budget_turn = node + 1;
                break;
            }
        }
        held
    }
}
