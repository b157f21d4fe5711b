//! The GPUs of a machine, and how fast bytes go to and from them.

use poseidon::device::speed::{Direction, copy_speed};
use serde::{Deserialize, Serialize};
use std::fs;

/// A GPU that this process may use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Gpu {
    /// As CUDA counts them.
    pub(super) number: usize,
    /// What is copied in a second, in bytes.
    pub(super) to_host: Option<f64>,
    pub(super) to_device: Option<f64>,
    /// Why that is not known.
    pub(super) fault: Option<String>,
}

impl Gpu {
    /// Copies between this host's memory and each GPU. None without NVIDIA's kernel module.
    pub(super) fn measure_all() -> Vec<Self> {
        let here = fs::read_dir(DRIVER).map_or(0, Iterator::count);
        let told = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        (0..visible(here, told.as_deref())).map(Self::measure).collect()
    }

    fn measure(number: usize) -> Self {
        let speed = |direction| copy_speed(number, direction, BYTES);
        match (speed(Direction::ToHost), speed(Direction::ToDevice)) {
            (Ok(to_host), Ok(to_device)) => {
                let (to_host, to_device) = (Some(to_host), Some(to_device));
                Self { number, to_host, to_device, fault: None }
            }
            (Err(fault), _) | (_, Err(fault)) => {
                let fault = Some(fault.to_string());
                Self { number, to_host: None, to_device: None, fault }
            }
        }
    }
}

/// How many of a machine's GPUs a process sees that is `told` which.
fn visible(here: usize, told: Option<&str>) -> usize {
    let Some(told) = told else { return here };
    let named = told.split(',').map(str::trim).take_while(|name| !name.is_empty() && *name != "-1");
    named.count().min(here)
}

/// Has an entry for each GPU.
const DRIVER: &str = "/proc/driver/nvidia/gpus";
/// As large as a large layer.
const BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_sees_the_gpus_that_it_is_told_of() {
        let told = |text| visible(4, Some(text));
        assert_eq!(visible(4, None), 4);
        assert_eq!([told("0,2"), told("3"), told(""), told("-1"), told("1,-1,2")], [2, 1, 0, 0, 1]);
        assert_eq!(visible(1, Some("0,1,2")), 1);
    }

    #[test]
    fn a_gpu_that_cannot_be_used_says_why() {
        let gpu = Gpu::measure(usize::MAX);
        assert!(gpu.to_host.is_none() && gpu.fault.is_some(), "{gpu:?}");
    }
}
