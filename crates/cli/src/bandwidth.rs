//! Bandwidths as people write them: `10gbit`, `200mbit`, `25GbE`.

use poseidon_core::Rate;
use std::{fmt, str::FromStr};

/// What a link carries, in bits per second.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) struct Bandwidth(f64);

impl Bandwidth {
    pub(crate) const fn gigabits(per_second: f64) -> Self {
        Self(per_second * 1e9)
    }

    pub(crate) fn from_bytes(bytes_per_second: f64) -> Self {
        Self(bytes_per_second * 8.0)
    }

    pub(crate) fn bits(self) -> f64 {
        self.0
    }

    pub(crate) fn bytes(self) -> f64 {
        self.0 / 8.0
    }

    /// The slowest Ethernet that is sold and has as much.
    pub(crate) fn as_sold(self) -> Option<String> {
        let enough = ETHERNET.into_iter().find(|gbit| gbit * 1e9 >= self.0)?;
        Some(format!("{enough}GbE"))
    }

    /// The Ethernet one can buy that is the next faster one, if there is any.
    pub(crate) fn next_faster(self) -> Option<Self> {
        // A tenth more is not a faster network.
        ETHERNET.map(Self::gigabits).into_iter().find(|next| next.0 > self.0 * 1.1)
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Rate::nearest(self.0).fmt(f)
    }
}

impl FromStr for Bandwidth {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(text.parse::<Rate>()?.bits() as f64))
    }
}

/// Of the kinds that are sold, in Gbit/s.
const ETHERNET: [f64; 8] = [1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0, 400.0];
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_are_read_as_people_write_them() {
        let cases = [
            ("10gbit", 1e10, "10 Gbit/s"),
            ("200mbit", 2e8, "200 Mbit/s"),
            ("25GbE", 25e9, "25 Gbit/s"),
            ("2.5Gbps", 2.5e9, "2.5 Gbit/s"),
            ("1 Gbit/s", 1e9, "1 Gbit/s"),
            ("64kbit", 64e3, "64 kbit/s"),
            ("1.6Tbit", 1.6e12, "1.6 Tbit/s"),
        ];
        for (text, bits, shown) in cases {
            let bandwidth: Bandwidth = text.parse().unwrap();
            assert_eq!((bandwidth.bits(), &*bandwidth.to_string()), (bits, shown), "{text}");
        }
        assert_eq!(Bandwidth::gigabits(12.34).to_string(), "12.3 Gbit/s");
        assert_eq!(Bandwidth::gigabits(400.0).to_string(), "400 Gbit/s");
    }

    #[test]
    fn what_no_network_has_is_refused() {
        let cases = [
            ("0gbit", "no network has 0gbit"),
            ("-1gbit", "no network has -1gbit"),
            ("1e9", "'e9' is not a unit"),
            ("10", "has no unit"),
            ("fast", "does not begin with a number"),
            ("", "does not begin with a number"),
            ("10GB", "'gb' is not a unit"),
            ("999999999tbit", "no network has"),
            ("nangbit", "does not begin with a number"),
        ];
        for (text, words) in cases {
            let error = text.parse::<Bandwidth>().unwrap_err();
            assert!(error.contains(words) && error.contains("10gbit"), "{text}: {error}");
        }
    }

    #[test]
    fn faster_networks_are_those_that_are_sold() {
        let next = |gbit: f64| Bandwidth::gigabits(gbit).next_faster().map(|b| b.bits() / 1e9);
        assert_eq!(
            [0.2, 1.0, 9.5, 10.0, 40.0].map(next).map(Option::unwrap),
            [1.0, 2.5, 25.0, 25.0, 100.0]
        );
        assert_eq!(next(400.0), None);
        let sold = |gbit: f64| Bandwidth::gigabits(gbit).as_sold();
        assert_eq!(
            [6.5, 10.0, 28.4, 2.2].map(sold).map(Option::unwrap),
            ["10GbE", "10GbE", "40GbE", "2.5GbE"]
        );
        assert_eq!(sold(500.0), None);
    }
}
