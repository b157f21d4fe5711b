//! How fast a copier copies: for measurements.

use crate::cuda::Cuda;
use crate::{Cargo, Collected, Copier, Copy, Fault, Pinned, Stream};
use std::any::Any;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From host memory to the device.
    ToDevice,
    /// From the device to host memory.
    ToHost,
    /// Both at once.
    Both,
}

impl FromStr for Direction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "to device" => Ok(Self::ToDevice),
            "to host" => Ok(Self::ToHost),
            "both" => Ok(Self::Both),
            _ => Err(format!("expected 'to device', 'to host' or 'both', got '{text}'")),
        }
    }
}

/// Bytes a second between CUDA's device `ordinal` and `bytes` bytes of pinned host memory, by a copier
/// of its own. Of both directions together if both go at once.
pub fn copy_speed(ordinal: usize, direction: Direction, bytes: usize) -> Result<f64, Fault> {
    let cuda = Arc::new(Cuda::open(ordinal)?);
    let copier = Copier::start(cuda.clone(), bytes.saturating_mul(2));
    let copier = copier.map_err(|error| Fault(format!("starting a copier: {error}")))?;
    measure(&copier, direction, bytes, || {
        let memory = Cuda::allocate(&cuda, bytes)?;
        Ok((memory.address(), Box::new(memory)))
    })
}

/// Copies out are cut into pieces, as a layer's are.
const PIECE: usize = 2 << 20;
/// How often everything is copied for one measurement, after once to warm up.
const TIMES: usize = 10;
/// A link that needs longer is broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where memory on a device is, and what keeps it.
type OnDevice = (u64, Box<dyn Any + Send + Sync>);

fn measure(
    copier: &Copier,
    direction: Direction,
    bytes: usize,
    allocate: impl Fn() -> Result<OnDevice, Fault>,
) -> Result<f64, Fault> {
    if bytes == 0 {
        return Err(Fault("a speed cannot be measured with 0 bytes".into()));
    }
    let way = |is_used: bool| -> Result<Option<Arc<Ends>>, Fault> {
        if !is_used {
            return Ok(None);
        }
        let (address, keep) = allocate()?;
        Ok(Some(Arc::new(Ends { host: Pinned::new(copier.pins(), bytes), address, _keep: keep })))
    };
    let (out, back) =
        (way(direction != Direction::ToDevice)?, way(direction != Direction::ToHost)?);
    let copy = |times: usize| -> Result<f64, Fault> {
        let copies = |ends: &Option<Arc<Ends>>| -> Vec<Copy> {
            ends.iter().flat_map(|ends| (0..times).flat_map(|_| ends.copies(bytes))).collect()
        };
        let (out_copies, back_copies) = (copies(&out), copies(&back));
        let (ended, end) = channel();
        let leaving = out_copies.len().max(1);
        let _keep = (out.clone(), back.clone());
        let cargo = Timed { back: back_copies, leaving, ended, _keep };
        let arrived = copier.create_event()?;
        let begun = Instant::now();
        // SAFETY: the cargo keeps both ends, and nobody else knows of them.
        unsafe { copier.order(Box::new(cargo), out_copies, Stream::Out, &arrived)? };
        match end.recv_timeout(PATIENCE) {
            Ok(None) => Ok(begun.elapsed().as_secs_f64()),
            Ok(Some(fault)) => Err(fault),
            Err(_) => Err(Fault(format!("{bytes} bytes are not copied after {PATIENCE:?}"))),
        }
    };
    copy(1)?;
    let ways = if direction == Direction::Both { 2 } else { 1 };
    Ok((TIMES * ways * bytes) as f64 / copy(TIMES)?)
}

/// Both ends of the copies of one direction.
struct Ends {
    host: Pinned,
    address: u64,
    _keep: Box<dyn Any + Send + Sync>,
}

impl Ends {
    fn copies(&self, bytes: usize) -> impl Iterator<Item = Copy> {
        (0..bytes).step_by(PIECE).map(move |at| {
            // SAFETY: within the memory, which has `bytes` bytes.
            let host = unsafe { self.host.start().add(at) };
            Copy::whole(self.address + at as u64, host, PIECE.min(bytes - at))
        })
    }
}

/// Says when it is over: all copies are done when the copier drops it.
struct Timed {
    back: Vec<Copy>,
    leaving: usize,
    ended: Sender<Option<Fault>>,
    _keep: (Option<Arc<Ends>>, Option<Arc<Ends>>),
}

impl Cargo for Timed {
    fn left(&mut self, _: usize) {
        self.leaving -= 1;
    }

    fn collect(&mut self, copy: &mut dyn FnMut(Copy)) -> Collected {
        self.back.drain(..).for_each(copy);
        if self.leaving == 0 { Collected::All } else { Collected::More }
    }

    fn landed(&mut self) {}

    fn failed(&mut self, fault: &Fault) {
        let _ = self.ended.send(Some(fault.clone()));
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        // Whoever measures may have lost patience.
        let _ = self.ended.send(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::late::Late;
    use std::sync::Mutex;

    #[test]
    fn everything_is_copied_in_the_direction_that_is_asked_for() {
        const BYTES: usize = PIECE + 100;
        for (text, ways) in [("to device", 1), ("to host", 1), ("both", 2)] {
            let device = Arc::new(Late::new(1));
            device.work_beside();
            let copier = Copier::start(device.clone(), usize::MAX).unwrap();
            let memories = Mutex::new(0);
            let allocate = || -> Result<OnDevice, Fault> {
                *memories.lock().unwrap() += 1;
                let mut memory = vec![0u8; BYTES];
                Ok((memory.as_mut_ptr() as u64, Box::new(memory)))
            };
            let speed = measure(&copier, text.parse().unwrap(), BYTES, allocate).unwrap();
            assert!(speed.is_finite() && speed > 0.0);
            assert_eq!(device.copies(), 2 * (1 + TIMES) * ways, "{text}: two pieces each time");
            assert_eq!(*memories.lock().unwrap(), ways);
        }
        assert!("sideways".parse::<Direction>().unwrap_err().contains("'both'"));
    }

    #[test]
    fn a_device_that_fails_says_why() {
        let device = Arc::new(Late::new(1));
        let copier = Copier::start(device.clone(), usize::MAX).unwrap();
        // Creating an event, asking about the stream, another event, recording it.
        device.fail_after(4, "an illegal memory access");
        let nowhere = || -> Result<OnDevice, Fault> { Ok((0, Box::new(()))) };
        let fault = measure(&copier, Direction::ToHost, 8, nowhere).unwrap_err();
        assert_eq!(fault.0, "an illegal memory access");
    }
}
