//! Which of a worker's steps counted, where slow workers may be dropped.

use crate::report::{NodeReport, TurnoutReport};
use poseidon::Session;
use poseidon_nn::train::Worker;

/// Follows whether what this worker computes counts.
#[derive(Default)]
pub(super) struct Turnout {
    /// Samples of the last two steps.
    last: [u64; 2],
    /// Steps that counted, until the last result.
    counted: u64,
    /// Samples that counted.
    samples: u64,
}

impl Turnout {
    /// This worker has sent what it computed from so many samples.
    pub(super) fn sent(&mut self, samples: usize) {
        self.last = [self.last[1], samples as u64];
    }

    /// The result of what was sent last has come.
    pub(super) fn answered(&mut self, worker: &Worker) {
        let counted = report(worker).map_or(0, |of| of.steps_counted);
        self.samples += self.since(counted);
        self.counted = counted;
    }

    /// None if nobody is ever dropped.
    pub(super) fn report(&self, worker: &Worker) -> Option<TurnoutReport> {
        let of = report(worker)?;
        let samples_counted = self.samples + self.since(of.steps_counted);
        Some(TurnoutReport { samples_counted, ..of })
    }

    /// The reports of nodes, with what this worker knows of the others' steps. The node of worker 0 calls
    /// the roll, so it knows best.
    pub(super) fn complete(
        &self,
        nodes: impl Iterator<Item = NodeReport>,
        worker: &Worker,
    ) -> Vec<NodeReport> {
        let known = worker.session().map_or_else(Vec::new, Session::turnout);
        let complete = |mut node: NodeReport| {
            if let (Some(own), Some(of)) = (&mut node.turnout, known.get(usize::from(node.rank))) {
                (own.steps_counted, own.steps_late) = (of.counted, of.late);
            }
            node
        };
        nodes.map(complete).collect()
    }

    /// Samples of the steps that have turned out to count since the last result. It may become known after
    /// the result of a step that the step counted, so there may be two.
    fn since(&self, counted: u64) -> u64 {
        match counted - self.counted {
            0 => 0,
            1 => self.last[1],
            _ => self.last[0] + self.last[1],
        }
    }
}

fn report(worker: &Worker) -> Option<TurnoutReport> {
    let session = worker.session().filter(|session| session.plan().consistency().drops() > 0)?;
    let own = session.turnout().get(usize::from(session.rank())).copied()?;
    let (steps_counted, steps_late) = (own.counted, own.late);
    Some(TurnoutReport { steps_counted, steps_late, samples_counted: 0 })
}
