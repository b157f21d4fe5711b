//! A worker's second processor: it rebuilds gradients from factors beside the computing.

use std::collections::VecDeque;

/// A layer that was sent by factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) layer: usize,
    pub(crate) clock: u64,
}

/// What the second processor has to do, as the thread of a session does it: layers in the order in
/// which they were sent, one at a time, each when everybody's factors of it are there. It waits for
/// the first one's factors even if another's have come. A worker that needs a layer which has come
/// and is not begun does not wait for it, but takes it and rebuilds it itself.
#[derive(Debug, Default)]
pub(crate) struct Rebuilder {
    /// Not begun, first sent first.
    queue: VecDeque<Sent>,
    under_way: Option<Sent>,
}

impl Rebuilder {
    pub(crate) fn handle_sent(&mut self, sent: Sent) {
        self.queue.push_back(sent);
    }

    /// What it begins now. To be asked whenever a layer has landed or been rebuilt; then nothing that
    /// it could begin is ever left for the worker to take.
    pub(crate) fn poll_begin(&mut self, has_landed: impl Fn(usize) -> bool) -> Option<Sent> {
        if self.under_way.is_none() {
            self.under_way = self.queue.pop_front_if(|first| has_landed(first.layer));
            return self.under_way;
        }
        None
    }

    /// It is done with what it began.
    pub(crate) fn handle_rebuilt(&mut self) -> Option<Sent> {
        self.under_way.take()
    }

    /// Whether it is at work on `layer`.
    pub(crate) fn is_at(&self, layer: usize) -> bool {
        self.under_way.is_some_and(|sent| sent.layer == layer)
    }

    /// Leaves a layer that it has not begun to the worker.
    pub(crate) fn leave(&mut self, layer: usize) -> Option<Sent> {
        let at = self.queue.iter().position(|sent| sent.layer == layer)?;
        self.queue.remove(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_sent_is_first_rebuilt_and_the_worker_takes_what_it_needs() {
        let mut rebuilder = Rebuilder::default();
        let sent = |layer| Sent { layer, clock: 1 };
        [3, 2, 1].into_iter().for_each(|layer| rebuilder.handle_sent(sent(layer)));
        // The first one's factors are awaited, whatever else is there.
        assert_eq!(rebuilder.poll_begin(|layer| layer != 3), None);
        assert_eq!(rebuilder.leave(1), Some(sent(1)));
        assert_eq!(rebuilder.leave(1), None);
        assert_eq!(rebuilder.poll_begin(|_| true), Some(sent(3)));
        assert!(rebuilder.is_at(3) && !rebuilder.is_at(2));
        assert_eq!(rebuilder.leave(3), None);
        // One at a time.
        assert_eq!(rebuilder.poll_begin(|_| true), None);
        assert_eq!(rebuilder.handle_rebuilt(), Some(sent(3)));
        assert_eq!(rebuilder.poll_begin(|_| true), Some(sent(2)));
        assert_eq!(rebuilder.handle_rebuilt(), Some(sent(2)));
        assert_eq!(rebuilder.poll_begin(|_| true), None);
    }
}
