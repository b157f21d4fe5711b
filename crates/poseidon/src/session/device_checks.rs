//! What may be asked of layers whose memory is on a device.

use crate::memory::factors::FactorMatrices;
use crate::memory::on_device::OnDevice;
use crate::session::Session;
use crate::session::layers::{InFlight, LayerState};
use crate::{Error, LayerId};
use poseidon_core::wire::Terms;
use poseidon_core::{Clock, Encoding, Scheme};
use poseidon_device::Copier;
use std::sync::Arc;

/// What errors call it.
const WHAT: &str = "memory on a device";

impl Session {
    /// Whether what was sent last comes back to a device, or to host memory, as it is asked for.
    pub(super) fn check_receiver(&self, layer: LayerId, on_device: bool) -> Result<(), Error> {
        let is_on_device = match &self.state(layer)?.in_flight {
            None => return Ok(()),
            Some(InFlight::Chunks(exchange)) => exchange.landings.is_some(),
            Some(InFlight::Gathered(_)) => true,
            Some(InFlight::Factors { .. }) => false,
        };
        let why = match (is_on_device, on_device) {
            (true, false) => "it was sent from the device: use receive_on_device",
            (false, true) => "it was sent from host memory: use receive",
            _ => return Ok(()),
        };
        Err(Error::Device { what: self.named(layer), why: why.into() })
    }

    /// Whether the layer's factors may be gathered now: where they meet, their clock and terms.
    pub(super) fn check_gather(
        &self,
        layer: LayerId,
        state: &LayerState,
        into: &OnDevice,
    ) -> Result<(Arc<FactorMatrices>, Clock, Terms), Error> {
        let Some(matrices) = self.layers.matrices(layer) else {
            let instead = "send its gradient instead of factors";
            let (layer, scheme) = (self.name(layer), Scheme::Ps);
            return Err(Error::Scheme { layer, scheme, instead });
        };
        let (expected, got) = (matrices.layout.len(), into.len);
        if expected != got {
            let why =
                format!("room for {expected} numbers is needed on the device, there is for {got}");
            return Err(Error::Factors { layer: self.name(layer), why });
        }
        self.check_encoding(layer, into, matrices.layout.encoding)?;
        self.check_landed(layer, state)?;
        let terms = self.check_step(layer, state)?;
        let refuse = |why: &str| {
            let layer = self.name(layer);
            Err(Error::Config(format!("layer '{layer}' is rebuilt by the program: {why}")))
        };
        if matrices.layout.lead > 0 {
            return refuse("on a device that needs 'bsp'");
        }
        self.check_running()?;
        Ok((matrices.clone(), state.clock.next(), terms))
    }

    /// Whether `memory` has the layer's length and elements of type `encoding`.
    pub(super) fn check_memory(
        &self,
        layer: LayerId,
        memory: &OnDevice,
        encoding: Encoding,
    ) -> Result<(), Error> {
        self.check_length(layer, WHAT, memory.len)?;
        self.check_encoding(layer, memory, encoding)
    }

    pub(super) fn check_encoding(
        &self,
        layer: LayerId,
        memory: &OnDevice,
        expected: Encoding,
    ) -> Result<(), Error> {
        match memory.encoding {
            got if got == expected => Ok(()),
            got => Err(Error::Encoding { layer: self.name(layer), what: WHAT, expected, got }),
        }
    }

    /// Whether `memory` is on the device of `copier`.
    pub(super) fn check_copier(
        &self,
        layer: LayerId,
        memory: &OnDevice,
        copier: &Arc<Copier>,
    ) -> Result<(), Error> {
        if Arc::ptr_eq(&memory.copier, copier) {
            return Ok(());
        }
        let why = "what is sent and where its result goes are on different devices".into();
        Err(Error::Device { what: self.named(layer), why })
    }
}
