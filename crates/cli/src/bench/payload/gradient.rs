//! Gradients that go through the shards.

use super::Payload;
use anyhow::ensure;
use poseidon::{Buffer, Clock, Encoding, LayerId, Optimizer, Session};
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
/// So many different values there are in half precision: sums of them are exact on up to 36 ranks of a host
/// or rack, which round what they have added up.
const HALF_VALUES: usize = 8;

impl Gradients {
    /// `layers` are those of the model, and how many numbers of this encoding each has.
    pub(super) fn new(
        session: &Session,
        layers: &[(LayerId, usize)],
        encoding: Encoding,
        optimizer: &Optimizer,
    ) -> anyhow::Result<Self> {
        let gradient = |&(layer, len): &(LayerId, usize)| {
            Gradient::new(session, layer, zeros(encoding, len), optimizer)
        };
        Ok(Self(layers.iter().map(gradient).collect::<anyhow::Result<_>>()?))
    }
}

impl Payload for Gradients {
    fn fill(&mut self, iteration: u32) {
        for Gradient { gradient, rank, .. } in &mut self.0 {
            match gradient.encoding() {
                Encoding::F32 => fill_whole(gradient, *rank, iteration),
                half => *gradient = filled(half, gradient.len(), *rank, iteration),
            }
        }
    }

    fn exchange(&mut self, session: &Session) -> anyhow::Result<()> {
        self.0.iter_mut().rev().try_for_each(|layer| layer.send(session))?;
        self.0.iter_mut().try_for_each(|layer| layer.receive(session))
    }

    fn check(&mut self, iteration: u32) -> anyhow::Result<()> {
        for layer in &mut self.0 {
            let result = layer.parameters.as_ref().unwrap_or(&layer.gradient);
            match result.encoding() {
                Encoding::F32 => layer.reference.check(result, iteration)?,
                half => layer.reference.check_rounded(half, result.bytes(), iteration)?,
            }
        }
        Ok(())
    }
}

impl Gradient {
    fn new(
        session: &Session,
        layer: LayerId,
        gradient: Buffer,
        optimizer: &Optimizer,
    ) -> anyhow::Result<Self> {
        let mut parameters = None;
        if !optimizer.is_stateless() {
            session.broadcast(layer, zeros(gradient.encoding(), gradient.len()))?;
            parameters = Some(session.receive(layer)?.result);
        }
        let reference = Reference::new(session.workers(), optimizer);
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

/// Writes what `rank` contributes to `iteration`: so many different `values`.
fn fill(gradient: &mut [f32], rank: u16, iteration: u32, values: usize) {
    let shift = usize::from(rank) * 13 + iteration as usize * 7;
    for (i, value) in gradient.iter_mut().enumerate() {
        *value = ((i + shift) % values) as f32;
    }
}

/// Writes what `rank` contributes to `iteration` of an exchange of `f32`.
pub(super) fn fill_whole(gradient: &mut [f32], rank: u16, iteration: u32) {
    fill(gradient, rank, iteration, PERIOD);
}

/// The same in a buffer of half precision, whose memory nobody but the lanes writes.
fn filled(encoding: Encoding, len: usize, rank: u16, iteration: u32) -> Buffer {
    let (mut values, mut bits) = ([0.0; PERIOD], [0u16; PERIOD]);
    fill(&mut values, rank, iteration, HALF_VALUES);
    encoding.encode(&values, bytemuck::cast_slice_mut(&mut bits));
    Buffer::from_bits(encoding, bits.into_iter().cycle().take(len).collect())
}

fn zeros(encoding: Encoding, len: usize) -> Buffer {
    match encoding {
        Encoding::F32 => Buffer::zeroed(len),
        half => Buffer::from_bits(half, vec![0; len]),
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
        self.step(iteration, PERIOD);
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

    /// The same for results of half precision: they are rounded once.
    fn check_rounded(
        &mut self,
        encoding: Encoding,
        result: &[u8],
        iteration: u32,
    ) -> anyhow::Result<()> {
        self.step(iteration, HALF_VALUES);
        let mut rounded = [0u16; PERIOD];
        encoding.encode(&self.parameters, bytemuck::cast_slice_mut(&mut rounded));
        let rounded: &[u8] = bytemuck::cast_slice(&rounded);
        let wrong = result.chunks(rounded.len()).position(|got| *got != rounded[..got.len()]);
        let Some(wrong) = wrong else { return Ok(()) };
        let got: &[u8] = result.chunks(rounded.len()).nth(wrong).unwrap_or_default();
        let mut values = vec![0.0; got.len() / encoding.width()];
        encoding.decode(got, &mut values);
        anyhow::bail!(
            "iteration {iteration}: elements from {} on are {values:?}, expected {:?} in {encoding}",
            wrong * PERIOD,
            self.parameters,
        )
    }

    /// Takes a step with contributions of so many different values.
    fn step(&mut self, iteration: u32, values: usize) {
        let mut sum = vec![0.0; PERIOD];
        for rank in 0..self.workers as u16 {
            let mut contribution = [0.0; PERIOD];
            fill(&mut contribution, rank, iteration, values);
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
    }
}
