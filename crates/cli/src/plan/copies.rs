//! Copies between a worker's device and its host: what was asked, and what they cost.

use crate::report::units;
use poseidon_sim::{CopySpeed, Error, Outcome, Setup, simulate};
use serde::Serialize;
use std::str::FromStr;

/// What `--copy-speed` says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CopyFlag {
    /// Gradients are taken to be in the host's memory.
    Nothing,
    /// Bytes per second, each way.
    Speed(f64),
}

impl CopyFlag {
    pub(crate) fn speed(self) -> Option<CopySpeed> {
        match self {
            Self::Nothing => None,
            Self::Speed(speed) => Some(CopySpeed { to_host: speed, to_device: speed }),
        }
    }
}

impl FromStr for CopyFlag {
    type Err = String;

    /// `25GB/s`, `900 MB/s`, `none`. In bytes: that is how copies are told everywhere.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("expected a speed such as 25GB/s or 900MB/s, or 'none', got '{text}'");
        let lower = text.trim().to_ascii_lowercase();
        if lower == "none" {
            return Ok(Self::Nothing);
        }
        let end = lower.find(|c: char| !(c.is_ascii_digit() || c == '.')).ok_or_else(wrong)?;
        let (number, unit) = lower.split_at(end);
        let factor = match unit.trim() {
            "mb/s" => 1e6,
            "gb/s" => 1e9,
            "tb/s" => 1e12,
            _ => return Err(wrong()),
        };
        let speed = number.parse::<f64>().map_err(|_| wrong())? * factor;
        match (SLOWEST..=FASTEST).contains(&speed) {
            true => Ok(Self::Speed(speed)),
            false => Err(format!("no device copies at {text}: expected from 1MB/s to 10TB/s")),
        }
    }
}

/// What one worker copies in a step, and what a step would be without copies. Of several workers it is
/// the one whose copies take longest.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct CopyUse {
    pub(crate) bytes_to_host: u64,
    pub(crate) bytes_to_device: u64,
    /// How long the copy engine is in use that is in use for longer.
    pub(crate) seconds: f64,
    /// Bytes per second.
    pub(crate) speed_to_host: f64,
    /// Bytes per second.
    pub(crate) speed_to_device: f64,
    pub(crate) iteration_seconds_without: f64,
    /// The share of an iteration by which it is longer than without copies.
    pub(crate) waiting_fraction: f64,
}

impl CopyUse {
    /// `None` if nothing is copied. Otherwise the job is simulated once more, without copies.
    pub(crate) fn new(setup: &Setup, outcome: &Outcome) -> Result<Option<Self>, Error> {
        let Some(speed) = setup.copies else { return Ok(None) };
        let longest = |copied: &&poseidon_sim::outcome::Copied| copied.seconds(speed);
        let most = outcome.copies.iter().max_by(|a, b| longest(a).total_cmp(&longest(b)));
        let Some(copied) = most else { return Ok(None) };
        let without = simulate(&Setup { copies: None, ..setup.clone() })?.iteration_seconds;
        let longer = (outcome.iteration_seconds - without).max(0.0);
        Ok(Some(Self {
            bytes_to_host: copied.to_host,
            bytes_to_device: copied.to_device,
            seconds: copied.seconds(speed),
            speed_to_host: speed.to_host,
            speed_to_device: speed.to_device,
            iteration_seconds_without: without,
            waiting_fraction: longer / outcome.iteration_seconds,
        }))
    }

    /// For people.
    pub(crate) fn words(&self) -> String {
        let speeds = match self.speed_to_host == self.speed_to_device {
            true => speed(self.speed_to_host),
            false => format!("{} and {}", speed(self.speed_to_host), speed(self.speed_to_device)),
        };
        format!(
            "{} to the host and {} to the device per step, in use for {} at {speeds}; {} of an \
             iteration waits for them ({} without)",
            units::bytes(self.bytes_to_host),
            units::bytes(self.bytes_to_device),
            units::duration(self.seconds),
            units::percent(self.waiting_fraction),
            units::duration(self.iteration_seconds_without),
        )
    }
}

/// `25 GB/s`.
fn speed(bytes_per_second: f64) -> String {
    match bytes_per_second < 1e9 {
        true => format!("{} MB/s", (bytes_per_second / 1e5).round() / 10.0),
        false => format!("{} GB/s", (bytes_per_second / 1e8).round() / 10.0),
    }
}

const SLOWEST: f64 = 1e6;
const FASTEST: f64 = 1e13;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_read_as_people_write_them() {
        let cases = [("25GB/s", 25e9), ("900 mb/s", 9e8), ("1.5TB/s", 1.5e12), ("12gb/s", 12e9)];
        for (text, expected) in cases {
            assert_eq!(text.parse(), Ok(CopyFlag::Speed(expected)), "{text}");
        }
        assert_eq!("none".parse(), Ok(CopyFlag::Nothing));
        for bad in ["", "25", "25gbit", "GB/s", "-1GB/s", "1.2.3GB/s", "fast"] {
            let error = bad.parse::<CopyFlag>().unwrap_err();
            assert!(error.contains("such as 25GB/s"), "{bad}: {error}");
        }
        for bad in ["0GB/s", "0.5MB/s", "11TB/s"] {
            let error = bad.parse::<CopyFlag>().unwrap_err();
            assert!(error.contains("no device copies at"), "{bad}: {error}");
        }
    }

    #[test]
    fn speeds_are_shown_as_people_write_them() {
        assert_eq!(
            [25e9, 4.7e10, 1.25e9, 9e8].map(speed),
            ["25 GB/s", "47 GB/s", "1.3 GB/s", "900 MB/s"]
        );
    }
}
