//! Which ranks are on which host, what a host's port carries, and what this machine can show.

use crate::bench::cluster::HEADERS;
use crate::bench::links::grid::{Effort, Machine, Network};
use crate::bench::size::Size;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// Ranks by host. Written as `4x4` (hosts, ranks of each) or `3+1+4` (ranks of each host).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Layout(Vec<u64>);

/// What a port carries each way, in Mbit/s. Written as `1gbit` or `200mbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Mbit(pub(crate) u64);

/// One point of the grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) layout: Layout,
    pub(crate) port: Mbit,
    pub(crate) size: Size,
}

/// More hosts than this have no addresses in a virtual cluster.
const MOST_HOSTS: u64 = 250;
/// Ranks per core that still take their turns. Sixteen ranks on two cores are measured here, and
/// more have no record.
const RANKS_PER_CORE: u64 = 8;
/// Copies of a buffer that a rank has, all contenders together.
const COPIES: u64 = 9;

impl Layout {
    /// Number of hosts.
    pub(crate) fn hosts(&self) -> u64 {
        self.0.len() as u64
    }

    /// Number of ranks, of all hosts.
    pub(crate) fn ranks(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Ranks by host as `bench/vcluster.sh` takes them in `RANKS`.
    pub(crate) fn list(&self) -> String {
        words(&self.0, ",")
    }

    /// Why this machine cannot show anything about exchanges of `size`, if it cannot. `sizes` are
    /// all sizes that are held in memory together.
    pub(crate) fn left_out(
        &self,
        port: Mbit,
        size: Size,
        sizes: &[Size],
        machine: Machine,
        effort: Effort,
    ) -> Option<String> {
        let Machine { cores, memory } = machine;
        let ranks = self.ranks();
        if ranks > cores * RANKS_PER_CORE {
            return Some(format!(
                "{ranks} ranks are more than {RANKS_PER_CORE} for each of {cores} cores"
            ));
        }
        let held = ranks * COPIES * sizes.iter().map(|size| size.0).sum::<u64>();
        if held > memory {
            let gb = |bytes| bytes as f64 / 1e9;
            return Some(format!(
                "the buffers of all sizes up to it take about {:.1} GB, and {:.1} are free",
                gb(held),
                gb(memory)
            ));
        }
        if self.hosts() == 1 {
            return None;
        }
        let network = Network { nodes: self.hosts(), mbit: port.0, slow: None, queue: size };
        network.left_out(size, machine, effort)
    }
}

impl Case {
    /// Bytes that a port carries each way for one exchange, headers included, with one rank on
    /// every host: a host sends all but its own part of its sum, and its own part of the result to
    /// all others. Zero with one host.
    pub(crate) fn port_bytes(&self) -> f64 {
        let hosts = self.layout.hosts() as f64;
        2.0 * (hosts - 1.0) / hosts * self.size.0 as f64 * HEADERS
    }

    /// Seconds that no exchange is shorter than, because its bytes take a port so long.
    pub(crate) fn port_seconds(&self) -> f64 {
        self.port_bytes() / (self.port.0 as f64 * 1e6 / 8.0)
    }

    /// The rate of the ports, in words: nothing leaves a host that is alone.
    pub(crate) fn port_words(&self) -> String {
        if self.layout.hosts() == 1 { "-".into() } else { self.port.to_string() }
    }
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected hosts such as 4x4 or 3+1+4, got '{text}'");
        let count =
            |word: &str| word.parse::<u64>().ok().filter(|count| (1..=MOST_HOSTS).contains(count));
        let ranks: Option<Vec<u64>> = match text.split_once('x') {
            Some((hosts, ranks)) => count(hosts)
                .zip(count(ranks))
                .map(|(hosts, ranks)| (0..hosts).map(|_| ranks).collect()),
            None if !text.contains('+') => None,
            None => text.split('+').map(count).collect(),
        };
        let ranks = ranks.ok_or_else(expected)?;
        if ranks.iter().sum::<u64>() < 2 {
            return Err(format!("{}: an exchange takes at least 2 ranks", expected()));
        }
        Ok(Self(ranks))
    }
}

impl FromStr for Mbit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = |unit: &str, factor: u64| {
            let count = text.strip_suffix(unit)?.parse::<u64>().ok()?;
            count.checked_mul(factor).filter(|mbit| *mbit > 0)
        };
        let mbit = read("gbit", 1000).or_else(|| read("mbit", 1));
        mbit.map(Self)
            .ok_or_else(|| format!("expected a rate such as 1gbit or 200mbit, got '{text}'"))
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [first, rest @ ..] if rest.iter().all(|ranks| ranks == first) => {
                write!(f, "{}x{first}", self.0.len())
            }
            ranks => f.write_str(&words(ranks, "+")),
        }
    }
}

impl fmt::Display for Mbit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            mbit if mbit % 1000 == 0 => write!(f, "{}gbit", mbit / 1000),
            mbit => write!(f, "{mbit}mbit"),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layout, size, .. } = self;
        match layout.hosts() {
            1 => write!(f, "{layout}, {size}"),
            _ => write!(f, "{layout}, {}, {size}", self.port),
        }
    }
}

fn words(ranks: &[u64], between: &str) -> String {
    ranks.iter().map(u64::to_string).collect::<Vec<_>>().join(between)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(text: &str) -> Layout {
        text.parse().unwrap()
    }

    #[test]
    fn layouts_are_read_and_written_alike() {
        for (text, hosts, ranks, list) in [
            ("1x16", 1, 16, "16"),
            ("4x1", 4, 4, "1,1,1,1"),
            ("2x8", 2, 16, "8,8"),
            ("3+1+4", 3, 8, "3,1,4"),
        ] {
            let layout = layout(text);
            assert_eq!((layout.hosts(), layout.ranks(), &*layout.list()), (hosts, ranks, list));
            assert_eq!(layout.to_string(), text);
        }
        assert_eq!(layout("2+2").to_string(), "2x2");
        for bad in ["", "4", "1x1", "0x4", "4x", "x4", "4x4x4", "3+", "3+0", "999x1", "-1x4"] {
            let words = bad.parse::<Layout>().unwrap_err();
            assert!(words.contains("expected hosts such as 4x4 or 3+1+4"), "{bad}: {words}");
        }
    }

    #[test]
    fn rates_are_read_and_written_alike() {
        for (text, mbit) in [("1gbit", 1000), ("200mbit", 200), ("10gbit", 10_000)] {
            assert_eq!(text.parse(), Ok(Mbit(mbit)));
            assert_eq!(Mbit(mbit).to_string(), text);
        }
        for bad in ["", "1", "gbit", "0mbit", "1.5gbit", "99999999999999999gbit"] {
            assert!(bad.parse::<Mbit>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_port_carries_what_one_rank_per_host_sends() {
        let case = |hosts: &str| Case { layout: layout(hosts), port: Mbit(1000), size: Size(1448) };
        assert_eq!(case("4x4").port_bytes(), 1.5 * 1514.0);
        assert_eq!(case("2x8").port_bytes(), 1514.0);
        assert_eq!(case("2x8").port_seconds(), 1514.0 / 125e6);
        assert_eq!((case("1x16").port_bytes(), case("1x16").port_words()), (0.0, "-".into()));
    }

    #[test]
    fn what_this_machine_cannot_show_is_left_out() {
        let machine = Machine { cores: 2, memory: 16 << 30 };
        let effort = Effort { pairs: 20, iters: None };
        let why = |hosts: &str, mbit, size| {
            layout(hosts).left_out(Mbit(mbit), size, &[size], machine, effort)
        };
        assert_eq!(why("4x4", 1000, Size::mb(10)), None);
        assert_eq!(why("1x16", 10_000, Size::mb(10)), None);
        let says = |why: Option<String>, words: &str| {
            let why = why.unwrap_or_default();
            assert!(why.contains(words), "{why}");
        };
        says(why("4x8", 1000, Size::kb(64)), "32 ranks are more than 8 for each of 2 cores");
        says(why("1x16", 1000, Size::mb(200)), "take about 30.2 GB, and 17.2 are free");
        says(why("4x4", 10_000, Size::mb(10)), "5.0 GB/s through all ports");
    }
}
