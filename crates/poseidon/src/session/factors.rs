//! Layers by factors: what a worker contributes instead of a gradient.

use crate::memory::factors::{FactorBytes, Factors, HalfFactors};
use crate::session::layers::InFlight;
use crate::{Buffer, Error, Session};
use poseidon_core::{Encoding, LayerId, Scheme};

impl Session {
    /// Contributes to the layer's next clock by factors. This worker has as many rows of them as
    /// its batch has samples, perhaps in several parts. Returns as soon as the rows are copied. If
    /// the layer's contributions travel as numbers of two bytes, the rows are rounded to them.
    ///
    /// What [`receive`](Session::receive) gives back is `values`: overwritten with the reduced
    /// gradient or, with an optimizer that updates parameters, taken one step on. In that case
    /// `values` must be the layer's parameters as the last `receive` gave them, because no shard
    /// has the parameters.
    pub fn send_factors(
        &self,
        layer: LayerId,
        parts: &[Factors<'_>],
        values: Buffer,
    ) -> Result<(), Error> {
        let parts: Vec<_> = parts.iter().map(|part| FactorBytes::from(*part)).collect();
        self.contribute_factors(layer, &parts, values)
    }

    /// As [`send_factors`](Session::send_factors), for rows that have the type already that the
    /// layer's contributions travel as.
    pub fn send_half_factors(
        &self,
        layer: LayerId,
        parts: &[HalfFactors<'_>],
        values: Buffer,
    ) -> Result<(), Error> {
        let parts: Vec<_> = parts.iter().map(|part| FactorBytes::from(*part)).collect();
        self.contribute_factors(layer, &parts, values)
    }

    fn contribute_factors(
        &self,
        layer: LayerId,
        parts: &[FactorBytes<'_>],
        values: Buffer,
    ) -> Result<(), Error> {
        let (begin, mut state) = (self.parts.trace.now(), self.state(layer)?);
        let Some(matrices) = self.layers.matrices(layer) else {
            let instead = "send its gradient instead of factors";
            let (layer, scheme) = (self.name(layer), Scheme::Ps);
            return Err(Error::Scheme { layer, scheme, instead });
        };
        self.check_buffer(layer, "buffer of values", &values, Encoding::F32)?;
        let rows = matrices
            .count_rows(parts)
            .map_err(|why| Error::Factors { layer: self.name(layer), why })?;
        self.check_landed(layer, &state)?;
        let terms = self.check_step(layer, &state)?;
        self.check_running()?;
        let clock = state.clock.next();
        // SAFETY: the layer's state is locked, and the layer is not in flight: `check_landed` has
        // seen it. The lanes hear of the clock below.
        unsafe { matrices.write_own(self.node.me, clock, parts) };
        state.untaken.push_back((clock, terms));
        self.parts.dispatch_factors(matrices, clock, rows, terms);
        let in_flight = InFlight::Factors { clock, values, rebuilt: None };
        self.note_sent(&mut state, layer, in_flight, begin);
        Ok(())
    }
}
