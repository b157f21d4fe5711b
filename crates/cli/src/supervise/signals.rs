//! The signals that ask a run to end.

use rustix::process::Signal;
use signal_hook::iterator::{Handle, Signals};
use std::{fs, io, thread};

/// Hands on every termination signal until it is dropped.
///
/// After that the signals do not get their default action back: the supervising process is about to
/// end.
pub(crate) struct SignalListener(Handle);

impl SignalListener {
    /// Starts listening. `hand_on` says whether anybody still wants signals. Signals that were
    /// ignored when this process started stay ignored: that is how `nohup`, and a shell that runs a
    /// job in the background, protect it.
    pub(crate) fn start(hand_on: impl Fn(Signal) -> bool + Send + 'static) -> io::Result<Self> {
        let ignored = ignored();
        let wanted = [Signal::HUP, Signal::INT, Signal::TERM].map(Signal::as_raw);
        let mut signals =
            Signals::new(wanted.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0))?;
        let listener = Self(signals.handle());
        thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever().filter_map(Signal::from_named_raw) {
                if !hand_on(signal) {
                    break;
                }
            }
        })?;
        Ok(listener)
    }
}

impl Drop for SignalListener {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The name of a signal, or nothing if it has none.
pub(super) fn name(signal: i32) -> Option<&'static str> {
    signal_hook::low_level::signal_name(signal)
}

/// The signals this process ignores, bit `n - 1` for signal `n`. None where the system does not
/// tell.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
