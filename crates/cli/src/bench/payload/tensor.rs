//! A tensor that a group sums in place.

use super::Payload;
use super::gradient::{Reference, fill_whole};
use poseidon::collectives::{Request, Tensor, Terms};
use poseidon::{Dtype, Group, Optimizer, ReduceOp, Reduction, Session};
use std::ptr::NonNull;
use std::sync::Arc;

/// A tensor of float32 and the group it belongs to.
pub(super) struct GroupTensor {
    group: Arc<Group>,
    values: Vec<f32>,
    reference: Reference,
}

impl GroupTensor {
    pub(super) fn new(group: &Arc<Group>, len: usize) -> Self {
        let sum = Optimizer::Reduce(Reduction::Sum);
        let reference = Reference::new(group.size().into(), &sum);
        Self { group: group.clone(), values: vec![0.0; len], reference }
    }
}

impl Payload for GroupTensor {
    fn fill(&mut self, iteration: u32) {
        fill_whole(&mut self.values, self.group.rank(), iteration);
    }

    fn exchange(&mut self, session: &Session) -> anyhow::Result<()> {
        let start = NonNull::from(&mut *self.values).cast();
        // SAFETY: the vector is aligned and valid for its length, and `self` is borrowed until this
        // function returns. Every way out of it is after the end of the operation: an operation that
        // could not begin has touched nothing, and the loop below ends when `wait` has seen the end,
        // be it a success or a failure.
        let tensor = unsafe { Tensor::from_raw(start, self.values.len(), Dtype::F32) };
        let terms = Terms { timeout: session.timeout(), waits: true };
        let request = Request::AllReduce { tensor, op: ReduceOp::Sum };
        let work = self.group.begin(request, terms, Box::new(()))?;
        while !work.wait(terms.timeout)? {}
        Ok(())
    }

    fn check(&mut self, iteration: u32) -> anyhow::Result<()> {
        self.reference.check(&self.values, iteration)
    }
}
