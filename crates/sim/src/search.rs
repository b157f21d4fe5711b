//! What a job needs, found by simulating it again and again.

use crate::{Error, Setup, simulate};

/// The least bandwidth, in bytes per second and to a percent, at which the workers of `setup` are
/// `efficiency` times as fast as if nothing had to be sent. `None` if no bandwidth is enough.
pub fn least_bandwidth(setup: &Setup, efficiency: f64) -> Result<Option<f64>, Error> {
    let workers = setup.cluster.workers() as f64;
    let mut at = setup.clone();
    let mut is_enough = |bandwidth: f64| {
        at.network.bandwidth = bandwidth;
        Ok(simulate(&at)?.speedup >= efficiency * workers)
    };
    if !is_enough(MOST)? {
        return Ok(None);
    }
    if is_enough(LEAST)? {
        return Ok(Some(LEAST));
    }
    let (mut too_little, mut enough) = (LEAST, MOST);
    while enough / too_little > 1.01 {
        let middle = (too_little * enough).sqrt();
        *(if is_enough(middle)? { &mut enough } else { &mut too_little }) = middle;
    }
    Ok(Some(enough))
}

/// 1 Mbit/s and 10 Tbit/s.
const LEAST: f64 = 1e6 / 8.0;
const MOST: f64 = 1e13 / 8.0;
