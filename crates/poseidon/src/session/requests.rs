//! What this worker asks of a step, beside its gradients: to keep its state, to wait for everybody, to
//! stop soon.

use crate::{Error, Session};
use poseidon_core::wire::Marks;
use poseidon_core::{Clock, LayerId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What goes with the contributions from now on. Written by the training program between steps, or
/// by a signal handler's thread.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// The clock whose state is kept. 0, which no step has, if there is none.
    keep: AtomicU64,
    /// The clock at which this worker waits for all. 0 if there is none.
    together: AtomicU64,
    stop: AtomicBool,
}

/// How often a worker counted, as far as this node knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turnout {
    /// Clocks that the worker's contribution counted at.
    pub counted: u64,
    /// Contributions of the worker that came too late and were dropped.
    pub late: u64,
}

impl Requests {
    /// The marks of a contribution to `clock`.
    pub(super) fn marks(&self, clock: Clock) -> Marks {
        let mut marks = Marks::NONE;
        if self.keep.load(Ordering::Relaxed) == clock.0 {
            marks |= Marks::KEEP;
        }
        if self.together.load(Ordering::Relaxed) == clock.0 {
            marks |= Marks::TOGETHER;
        }
        if self.stop.load(Ordering::Relaxed) {
            marks |= Marks::STOP;
        }
        marks
    }
}

impl Session {
    /// Takes the next step together with all workers, where their clocks
    /// [may be apart](crate::session::Builder::consistency): every layer comes back when all have contributed to
    /// it, and all workers get the same parameters. Every worker calls it before the same step. Without
    /// it a worker may have parameters that lack what others have contributed. Where slow workers may
    /// be dropped, a worker first receives a layer of the step before.
    pub fn step_together(&self) -> Result<(), Error> {
        if !self.parts.plan.consistency().is_bsp() {
            self.requests.together.store(self.next_step()?.0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How often each worker counted, by rank, where slow workers may be
    /// [dropped](poseidon_core::Consistency::DropSlowest).
    pub fn turnout(&self) -> Vec<Turnout> {
        let turnout = |(counted, late)| Turnout { counted, late };
        self.parts.board.rolls().map(turnout).collect()
    }

    /// Refuses what has no meaning where workers may be at different clocks.
    pub(super) fn check_bsp(&self, what: &str) -> Result<(), Error> {
        match self.parts.plan.consistency() {
            consistency if consistency.is_bsp() => Ok(()),
            consistency => Err(Error::Config(format!("{what} needs 'bsp', not '{consistency}'"))),
        }
    }

    /// Refuses what needs all contributions to `clock`, the step that this worker took last with
    /// `layer`, where other workers may still owe theirs.
    pub(super) fn check_together(&self, layer: LayerId, clock: Clock) -> Result<(), Error> {
        let asked = [&self.requests.together, &self.requests.keep];
        let consistency = self.parts.plan.consistency();
        let is_together = consistency.is_bsp()
            || clock == Clock(0)
            || asked.iter().any(|asked| asked.load(Ordering::Relaxed) == clock.0);
        if is_together {
            return Ok(());
        }
        let layer = self.name(layer);
        Err(Error::Config(format!(
            "with '{consistency}' workers may lack what others have contributed: call \
             step_together before the last step, which was clock {clock} of layer '{layer}'"
        )))
    }

    /// Asks all workers to stop soon. It travels with the next contributions of this worker. Every
    /// worker then hears of it at the same clock: [`stop_asked`](Session::stop_asked). With `asp`, and where
    /// slow workers may be dropped, only the next step that is taken together is such a clock.
    pub fn ask_to_stop(&self) {
        self.requests.stop.store(true, Ordering::Relaxed);
    }

    /// The first clock at which a worker asked all to stop. A worker that has received all layers of a
    /// clock knows for certain whether that clock, or one before it, was such a clock, and so do all
    /// other workers. Of later clocks it may know earlier than others do.
    pub fn stop_asked(&self) -> Option<Clock> {
        self.parts.board.stop()
    }

    /// The clock of the next step. It does not wait for layers that are being rebuilt: a program asks
    /// for it while the layers of the last step are on their way. All layers must be at the same clock, unless slow workers may be
    /// dropped: then the layers that are still in flight come back at the clock of one that has come back.
    pub(super) fn next_step(&self) -> Result<Clock, Error> {
        if self.parts.plan.consistency().drops() > 0 {
            let (mut sent, mut received) = (Clock(0), Clock(0));
            for layer in self.layers.ids() {
                let state = self.state(layer)?;
                received = received.max(state.clock);
                sent = sent.max(state.in_flight.as_ref().map_or(Clock(0), |sent| sent.clock()));
            }
            return match received >= sent {
                true => Ok(received.next()),
                false => Err(Error::Config(format!(
                    "which step comes next is not known before a layer of clock {sent} has been \
                     received: slow workers may be dropped"
                ))),
            };
        }
        let mut next = None;
        for layer in self.layers.ids() {
            let sent = self.layers.sent(layer);
            let first = *next.get_or_insert((layer, sent));
            if first.1 != sent {
                return Err(Error::Config(format!(
                    "this is for the time between two steps, but layer '{}' is at clock {} and layer \
                     '{}' at clock {sent}",
                    self.name(first.0),
                    first.1,
                    self.name(layer)
                )));
            }
        }
        Ok(next.map_or(Clock(0), |(_, sent)| sent).next())
    }

    /// The state after `clock`, which is the next step's, is kept: on this node by
    /// [`parts.kept`](crate::node::session_parts::SessionParts::kept).
    pub(super) fn keep(&self, clock: Clock) {
        self.requests.keep.store(clock.0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Layer};
    use poseidon_link::Secret;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    /// The thread that rebuilds a layer holds the layer's state for as long as it takes.
    #[test]
    fn the_next_step_is_known_while_a_layer_is_being_rebuilt() {
        let config = Config::alone(Secret::random().unwrap());
        let layers = [Layer::new("first", 4), Layer::new("last", 4)];
        let session = Session::builder(config).layers(layers).start().unwrap();
        let last = session.layer("last").unwrap();
        let (tell, told) = channel();
        thread::scope(|scope| {
            let held = session.layers.state(last);
            scope.spawn(|| tell.send(session.next_step().unwrap()));
            let next = told.recv_timeout(Duration::from_secs(60));
            drop(held);
            assert_eq!(next.expect("it waits for the layer"), Clock(1));
        });
        session.finish().unwrap();
    }
}
