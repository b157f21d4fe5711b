//! The copiers of this process: one for each device.

use crate::cuda::Cuda;
use crate::{Copier, Fault};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The copier of CUDA's device `ordinal`. It is made at the first call, lives as long as the process,
/// and pins up to `limit` bytes of host memory, as its first caller says.
pub fn cuda_copier(ordinal: usize, limit: usize) -> Result<Arc<Copier>, Fault> {
    static COPIERS: Mutex<BTreeMap<usize, Arc<Copier>>> = Mutex::new(BTreeMap::new());
    let mut copiers = COPIERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(copier) = copiers.get(&ordinal) {
        return Ok(copier.clone());
    }
    let started = Copier::start(Arc::new(Cuda::open(ordinal)?), limit);
    let copier = Arc::new(started.map_err(|error| Fault(format!("starting a copier: {error}")))?);
    copiers.insert(ordinal, copier.clone());
    Ok(copier)
}

/// How much host memory the processes of this machine may pin together, unless somebody says otherwise:
/// a quarter of what there is.
pub fn pinnable_memory() -> usize {
    let system = rustix::system::sysinfo();
    (system.totalram as usize).saturating_mul(system.mem_unit as usize) / 4
}
