//! Gradients that go through the shards.

use super::Payload;
use anyhow::ensure;
use poseidon::{Buffer, Clock, LayerId, Optimizer, Session};
use poseidon_core::optim::{Step, state_of};

/// A model: gradients of its layers. The last layer's goes first, as in a backward pass.
pub(super) struct Gradients(Vec<Gradient>);

/// One layer of a session.
struct Gradient {
    layer: LayerId,
    rank: u16,
    gradient: Buffer,
    /// Where results go, if the update rule keeps parameters.
    parameters: Option<Buffer>,
    reference: Reference,
}

/// The learning rate of every step.
pub(crate) const RATE: f32 = 0.01;
/// Values repeat with this period, so that results can be checked against a small reference.
const PERIOD: usize = 64;

impl Gradients {
    /// `layers` are those of the model, and how many numbers each has.
    pub(super) fn new(
        session: &Session,
        layers: &[(LayerId, usize)],
        optimizer: &Optimizer,
    ) -> anyhow::Result<Self> {
        let gradient =
            |&(layer, len): &(LayerId, usize)| Gradient::new(session, layer, len, optimizer);
        Ok(Self(layers.iter().map(gradient).collect::<anyhow::Result<_>>()?))
    }
}

impl Payload for Gradients {
    fn fill(&mut self, iteration: u32) {
        for Gradient { gradient, rank, .. } in &mut self.0 {
            fill(gradient, *rank, iteration);
        }
    }

    fn exchange(&mut self, session: &Session) -> anyhow::Result<()> {
        self.0.iter_mut().rev().try_for_each(|layer| layer.send(session))?;
        self.0.iter_mut().try_for_each(|layer| layer.receive(session))
    }

    fn check(&mut self, iteration: u32) -> anyhow::Result<()> {
        for layer in &mut self.0 {
            let result = layer.parameters.as_ref().unwrap_or(&layer.gradient);
            layer.reference.check(result, iteration)?;
        }
        Ok(())
    }
}

impl Gradient {
    fn new(
        session: &Session,
        layer: LayerId,
        len: usize,
        optimizer: &Optimizer,
    ) -> anyhow::Result<Self> {
        let mut parameters = None;
        if !optimizer.is_stateless() {
            session.broadcast(layer, Buffer::zeroed(len))?;
            parameters = Some(session.receive(layer)?.result);
        }
        let reference = Reference::new(session.workers(), optimizer);
        let gradient = Buffer::zeroed(len);
        Ok(Self { layer, rank: session.rank(), gradient, parameters, reference })
    }

    fn send(&mut self, session: &Session) -> anyhow::Result<()> {
        let gradient = std::mem::take(&mut self.gradient);
        match self.parameters.take() {
            Some(old) => session.send_into(self.layer, gradient, old)?,
            None => session.send(self.layer, gradient)?,
        }
        Ok(())
    }

    fn receive(&mut self, session: &Session) -> anyhow::Result<()> {
        let received = session.receive(self.layer)?;
        match received.gradient {
            Some(gradient) => {
                (self.gradient, self.parameters) = (gradient, Some(received.result));
            }
            None => self.gradient = received.result,
        }
        Ok(())
    }
}

/// Writes what `rank` contributes to `iteration`.
pub(super) fn fill(gradient: &mut [f32], rank: u16, iteration: u32) {
    let shift = usize::from(rank) * 13 + iteration as usize * 7;
    for (i, value) in gradient.iter_mut().enumerate() {
        *value = ((i + shift) % PERIOD) as f32;
    }
}

/// The same exchange done by one process on one period of the values.
pub(super) struct Reference {
    workers: usize,
    optimizer: Optimizer,
    parameters: Vec<f32>,
    state: Vec<Vec<f32>>,
}

impl Reference {
    pub(super) fn new(workers: usize, optimizer: &Optimizer) -> Self {
        Self {
            workers,
            optimizer: optimizer.clone(),
            parameters: vec![0.0; PERIOD],
            state: vec![vec![0.0; PERIOD]; optimizer.state_vectors()],
        }
    }

    /// Takes the step of `iteration` and compares. Every iteration comes here, once and in order.
    pub(super) fn check(&mut self, result: &[f32], iteration: u32) -> anyhow::Result<()> {
        let mut sum = vec![0.0; PERIOD];
        for rank in 0..self.workers as u16 {
            let mut contribution = [0.0; PERIOD];
            fill(&mut contribution, rank, iteration);
            sum.iter_mut().zip(contribution).for_each(|(s, c)| *s += c);
        }
        let scale = self.optimizer.reduction().scale(self.workers);
        if self.optimizer.is_stateless() {
            self.parameters = sum.iter().map(|s| s * scale).collect();
        } else {
            self.optimizer.step(Step {
                parameters: &mut self.parameters,
                sum: &sum,
                scale,
                rate: RATE,
                clock: Clock(u64::from(iteration) + 1),
                state: state_of(&mut self.state),
            });
        }
        // Integers sum exactly in any order, so there is nothing to round.
        let wrong = result.chunks(PERIOD).position(|got| *got != self.parameters[..got.len()]);
        ensure!(
            wrong.is_none(),
            "iteration {iteration}: elements from {} on are {:?}, expected {:?}",
            wrong.unwrap_or(0) * PERIOD,
            result.chunks(PERIOD).nth(wrong.unwrap_or(0)),
            self.parameters,
        );
        Ok(())
    }
}
