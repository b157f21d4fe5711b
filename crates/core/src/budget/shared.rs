//! What lanes share without a lock. `model.rs` compiles this file a second time, with loom's atomics.

use super::atomics::{AtomicU64, Ordering};
use crate::Rate;
use std::sync::Arc;
use std::time::Duration;

/// What a node may send, shared by its lanes.
#[derive(Debug)]
pub struct Budget {
    /// Bits a second; 0 if there is no limit. Written by whoever changes the budget.
    rate: AtomicU64,
    /// Which budget it is, in the upper bits, and up to when it is used up, in nanoseconds on the
    /// lanes' clock. Written by whoever changes the budget, after the rate, and by lanes that take a
    /// step. A step counts only in the budget it was taken of.
    used: AtomicU64,
    /// How many lanes share the budget.
    lanes: u64,
}

/// What one lane has taken of its node's budget and not sent yet.
#[derive(Debug)]
pub struct Allowance {
    budget: Arc<Budget>,
    /// The budget that the steps were taken of, and its rate. Steps of another budget are void.
    version: Option<u64>,
    rate: u64,
    /// Bytes. Negative if the lane has sent what could not wait.
    left: i64,
    /// When these bytes may be sent.
    from: Duration,
}

/// How far sending may run ahead of the budget. A lane that wakes up late by less than this loses
/// nothing, and a second has at most a hundredth more than its share.
const ADVANCE: Duration = Duration::from_millis(10);
/// What the lanes' steps amount to together, in time at the budget's rate. Each lane may hold one
/// step back for later, so a second may have this much more. Smaller steps cost more wake-ups: a lane
/// that is alone has 500 a second.
const STEP: Duration = Duration::from_millis(2);
/// The payload of a full packet, and the packet with its headers: 14 bytes of Ethernet, 20 of IP, 32
/// of TCP with timestamps.
pub(super) const PAYLOAD: u64 = 1448;
pub(super) const PACKET: u64 = PAYLOAD + 66;

impl Budget {
    /// The budget of a node with `lanes` lanes. `None` is no limit.
    pub fn new(rate: Option<Rate>, lanes: usize) -> Self {
        let rate = AtomicU64::new(rate.map_or(0, Rate::bits));
        Self { rate, used: AtomicU64::new(0), lanes: lanes.max(1) as u64 }
    }

    /// What may be sent. `None` is no limit.
    pub fn rate(&self) -> Option<Rate> {
        Rate::new(self.rate.load(Ordering::Relaxed))
    }

    /// Changes what may be sent from `now` on. What was taken at the old rate is forgotten.
    pub fn set_rate(&self, rate: Option<Rate>, now: Duration) {
        let rate = rate.map_or(0, Rate::bits);
        if self.rate.swap(rate, Ordering::Relaxed) == rate {
            return;
        }
        let renew = |used: u64| {
            let version = (used & !TIME).wrapping_add(TIME + 1);
            Some(version | (used & TIME).min(nanos(now)))
        };
        // Whoever sees the new version sees the new rate. The update has a new value in any case.
        let _ = self.used.fetch_update(Ordering::AcqRel, Ordering::Relaxed, renew);
    }

    /// Which budget it is, and its rate. A rate may be newer than its version; then the version is
    /// about to change, and what was taken of it is void.
    fn current(&self) -> (u64, u64) {
        let version = self.used.load(Ordering::Acquire) & !TIME;
        (version, self.rate.load(Ordering::Relaxed))
    }

    /// Takes a step at `rate`: its bytes, and when they may be sent. Nothing if the budget is another
    /// than `version` by now.
    fn take_step(&self, version: u64, rate: u64, now: Duration) -> Option<(i64, Duration)> {
        let wire = u128::from(rate) / 8 * STEP.as_nanos() / SECOND / u128::from(self.lanes);
        // Less than a packet costs a whole packet's headers.
        let bytes = (wire * u128::from(PAYLOAD) / u128::from(PACKET)).max(PAYLOAD.into());
        let bits = bytes * u128::from(PACKET) * 8;
        let cost = (bits * SECOND).div_ceil(u128::from(PAYLOAD) * u128::from(rate)) as u64;
        let start = |used: u64| (used & TIME).max(nanos(now));
        let after = |used: u64| {
            let until = start(used).saturating_add(cost).min(TIME);
            (used & !TIME == version).then_some(version | until)
        };
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).ok()?;
        Some((bytes as i64, Duration::from_nanos(start(taken)).saturating_sub(ADVANCE)))
    }
}

impl Allowance {
    /// A lane's part in `budget`.
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { budget, version: None, rate: 0, left: 0, from: Duration::ZERO }
    }

    /// Whether there is a limit now.
    pub fn is_limited(&self) -> bool {
        self.budget.rate.load(Ordering::Relaxed) != 0
    }

    /// The bytes that may be sent now, or when to ask again. Asked only if there is something to
    /// send: the answer may take a step of the budget.
    pub fn poll_room(&mut self, now: Duration) -> Result<usize, Duration> {
        loop {
            let (version, rate) = self.budget.current();
            if self.version != Some(version) || self.rate != rate {
                (self.version, self.rate) = (Some(version), rate);
                (self.left, self.from) = (0, Duration::ZERO);
            }
            if rate == 0 {
                return Ok(usize::MAX);
            }
            if self.left >= PAYLOAD as i64 {
                return if self.from > now { Err(self.from) } else { Ok(self.left as usize) };
            }
            if let Some((bytes, from)) = self.budget.take_step(version, rate, now) {
                self.left += bytes;
                self.from = from;
            }
        }
    }

    /// So many bytes were sent, in the room there was or because they could not wait.
    pub fn handle_sent(&mut self, bytes: usize) {
        if self.rate != 0 {
            self.left = self.left.saturating_sub_unsigned(bytes as u64);
        }
    }
}

const SECOND: u128 = 1_000_000_000;
/// The bits of [`Budget::used`] that are a time: 833 days of nanoseconds. Eight bits are the version,
/// so a lane would have to sleep through 256 changes in the middle of a step to miss them.
const TIME: u64 = (1 << 56) - 1;

/// Nanoseconds, as far as they fit.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).map_or(TIME, |nanos| nanos.min(TIME))
}
