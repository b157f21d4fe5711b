//! What a node's port to the network carries, and what follows for the number of lanes and for the
//! windows of links.

use serde::{Deserialize, Serialize};
use std::time::Duration;
use std::{fmt, str::FromStr};

/// What a port carries each way, in bits per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "u64", try_from = "u64")]
pub struct Rate(u64);

/// The port of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// The port's number. Nodes of one host share a port, and so have the same number.
    pub number: u16,
    /// What the port carries.
    pub rate: Rate,
}

impl Rate {
    /// `bits` per second. `None` if no network is that slow or that fast.
    pub fn new(bits: u64) -> Option<Self> {
        (LEAST..=MOST).contains(&bits).then_some(Self(bits))
    }

    /// The rate nearest to `bits` per second that a network can have.
    pub fn nearest(bits: f64) -> Self {
        // The conversion of what is too large, or infinite, stops at the limit.
        Self((bits.round() as u64).clamp(LEAST, MOST))
    }

    /// The rate at which `bytes` take `seconds`.
    pub fn of(bytes: u64, seconds: f64) -> Self {
        Self::nearest(bytes as f64 * 8.0 / seconds)
    }

    /// Bits per second.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The bytes that go through in so many `seconds`.
    fn bytes_in(self, seconds: f64) -> u64 {
        (self.0 as f64 / 8.0 * seconds) as u64
    }
}

/// Makes rates equal that are nearly so: measurements of equal ports differ by chance.
///
/// The fastest rate and all that are at least four fifths of it become one, which is their median. So
/// do the fastest of the others and those near it, and so on.
pub fn merge_rates(rates: &mut [Rate]) {
    let mut order: Vec<usize> = (0..rates.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(rates[i]));
    let mut rest = &order[..];
    while let Some(&fastest) = rest.first() {
        let near = |&i: &usize| u128::from(rates[i].0) * 5 >= u128::from(rates[fastest].0) * 4;
        let (class, slower) = rest.split_at(rest.iter().take_while(|i| near(i)).count());
        let median = rates[class[class.len() / 2]];
        class.iter().for_each(|&i| rates[i] = median);
        rest = slower;
    }
}

/// Makes the measured rates of `ports` equal that are not far from the fastest: they become their upper
/// median. Where a port carries more than 2.75 Gbit/s, far is less than a quarter, and what passes between
/// racks, the `core`, counts like a port. Elsewhere far is less than half: ports are sold with 1 and 2.5
/// Gbit/s. There a core is raised with the ports if it was measured at two thirds of the slowest of them: half
/// a port is a usual link between racks. A rate above 11 Gbit/s counts as 11 Gbit/s here, because it may be that of the cores: beside one of
/// 40 Gbit/s, 3.5 Gbit/s were measured at a port that is its equal.
///
/// A measurement is as much of the cores as of the port. Four equal ports of 10 Gbit/s on two cores were
/// measured at 5.6 to 9 Gbit/s, and beside other load at 2.4 to 6.2. Eight of 1 Gbit/s were measured at 0.6
/// and 1 Gbit/s while other programs started. A node whose port is taken for slow gets a smaller shard, or
/// none, and there is no ring: exchanges then took up to 1.4 times as long. Ports that really differ by less
/// have their rates given.
pub fn level_measured<'a>(ports: impl Iterator<Item = &'a mut Rate>, core: Option<&'a mut Rate>) {
    let mut near: Vec<&mut Rate> = ports.collect();
    let fastest = near.iter().map(|rate| rate.0.min(OF_CORES)).max().unwrap_or(0);
    let is_fast = fastest > MULTI_GIGABIT;
    let far = if is_fast { 4 } else { 2 };
    near.retain(|rate| rate.0.saturating_mul(far) >= fastest);
    near.sort_by(|a, b| b.cmp(a));
    let Some(slowest) = near.last().map(|rate| rate.0) else { return };
    let median = |near: &[&mut Rate]| *near[(near.len() - 1) / 2];
    let is_near = |core: &Rate| match is_fast {
        true => core.0.saturating_mul(far) >= fastest,
        // It was as wide as the ports, and is not any more when they are raised.
        false => core.0 * 3 >= slowest * 2 && core.0 * 3 < median(&near).0 * 2,
    };
    if let Some(core) = core.filter(|core| is_near(core)) {
        near.push(core);
        near.sort_by(|a, b| b.cmp(a));
    }
    let median = median(&near);
    near.into_iter().for_each(|rate| *rate = median);
}

/// One connection that carries more may be at the limit of the cores, and not of the port.
const OF_CORES: u64 = 11_000_000_000;
/// A measurement of a port of 2.5 Gbit/s may be a little above it.
const MULTI_GIGABIT: u64 = 2_750_000_000;

/// The lanes that ports of `rate` need, if there are cores for `most`.
///
/// Up to 2.5 Gbit/s it is one: more lanes would only add connections, which begin slowly and meet in
/// the switch's queue (ADR 0011). Above, it is a lane for every 8 Gbit/s, and two at least. One lane
/// carried 14 Gbit/s between two idle nodes; a lane beside threads that compute has half a core. At 25
/// and 40 Gbit/s three and four lanes were faster than eight, for less CPU time (ADR 0016).
pub fn lanes_for(rate: Rate, most: u16) -> u16 {
    let needed = match rate.0 {
        bits if bits <= MULTI_GIGABIT => 1,
        bits => bits.div_ceil(8_000_000_000).max(2),
    };
    needed.min(u64::from(most.max(1))) as u16
}

/// The receive window of each link of a port to which `senders` nodes send, in bytes. The links of
/// `shares` lanes and processes share the port.
///
/// A switch drops what does not fit the queue of a port, and TCP finds out too late (ADR 0017). So
/// what all senders together may have under way is bounded by a budget. It fits the queue of a small
/// switch, and keeps a port of 1 Gbit/s busy for 1.5 ms. A faster port has more.
pub fn window(senders: usize, shares: usize, rate: Option<Rate>) -> usize {
    let fast = rate.map_or(0.0, |rate| rate.0 as f64 / 8.0 * BUSY);
    let budget = LEAST_BUDGET.max(fast as usize);
    let links = senders.max(1) * shares.max(1);
    (budget / links).clamp(LEAST_WINDOW, MOST_WINDOW)
}

/// The receive window of each of `lanes` links from the only host that sends much, in bytes.
///
/// That host's port is as fast as this one, so the queue of this one does not fill up. But what is more
/// than the way holds waits in the sender's own queue, which may be short, too. So the window is twice
/// what is under way when a port of `rate` is busy for a `round_trip`, and no more than a port's budget.
/// A busy machine measures round trips that are too long. At 1 and at 10 Gbit/s on short ways, 64 KB
/// were enough to be as fast as Gloo. At 10 Gbit/s with queues of 256 KB, 128 KB were a little slower and
/// 256 KB half as fast: packets were lost (`bench/runs/2026-11-18-windows-tried`).
///
/// The host's nodes and lanes have so many `links` together. From the fifth link on, all of them share what
/// four have: a host with four ranks was measured with 64 KB for each.
pub fn lone_window(
    lanes: usize,
    links: usize,
    rate: Option<Rate>,
    round_trip: Option<Duration>,
) -> usize {
    let bytes = rate.map_or(0.0, |rate| rate.0 as f64 / 8.0);
    let time = round_trip.map_or(0.0, |time| (2.0 * time.as_secs_f64()).min(BUSY));
    let least = LONE_WINDOW.min(4 * LONE_WINDOW / links.max(1)).max(LEAST_WINDOW);
    ((bytes * time).round() as usize / lanes.max(1)).clamp(least, MOST_WINDOW)
}

/// The receive window of each of `links` links on which a host hears its neighbour in a ring, at ports of
/// `rate` that are [level](are_level), if that was measured. `queue` is what waits at most in the
/// neighbour's own port, in bytes, if it is known.
///
/// This host's acknowledgements wait in its own queue, behind what it sends itself. So a byte counts against
/// the window while it waits in the sender's queue, and while its acknowledgement waits in this host's. The
/// kernel lets a connection have little in its own host's queue (TCP small queues): two segments of up to 64
/// KB, or what the port carries in a millisecond. A window that covers two such queues never holds the
/// sender up. A smaller one is used up whenever one of the queues is long, and then the sender's port is
/// idle.
///
/// - Up to 1 Gbit/s two segments are more than a millisecond. Small switches' queues hold them. With 64
///   KB, training steps of a net of many layers took 2% longer, and exchanges cost a third more CPU time
///   (`bench/runs/2026-11-18-ring-windows`).
/// - Above, a millisecond is more. Where the queue does not hold it, packets are lost, and exchanges take
///   twice as long (`bench/runs/2026-11-18-windows-tried`). So the queue has to be known.
/// - A queue that is too short for a millisecond of a very fast port may still be long. Then three quarters
///   of it are shared out: whatever waits there fits. `None` if a link would get too little of it.
pub fn window_of_two_queues(rate: Rate, links: usize, queue: Option<u64>) -> Option<usize> {
    if MEASURED.contains(&rate.0) {
        return (links == 1).then_some(TWO_QUEUES);
    }
    if holds_what_waits(rate, queue) {
        let window = rate.bytes_in(SMALL_QUEUE + SLACK) as usize / links.max(1);
        return Some(window.clamp(LONE_WINDOW, MOST_WINDOW));
    }
    let queue = queue.filter(|_| rate.0 > OF_CORES)?;
    let window = (queue / 4 * 3) as usize / links.max(1);
    (window >= WORTH_IT).then(|| window.min(MOST_WINDOW))
}

/// Whether a host's own port of `rate` holds all that the kernel lets its connections have there, as far as
/// that was measured. `queue` is what it holds in bytes, if that is known.
pub fn holds_what_waits(rate: Rate, queue: Option<u64>) -> bool {
    let is_long = queue.is_some_and(|queue| queue >= rate.bytes_in(SMALL_QUEUE));
    MEASURED.contains(&rate.0) || rate.0 > MULTI_GIGABIT && is_long
}

/// Whether all `ports` carry about as much as one of `rate`, at most: a neighbour with a faster port would
/// fill this port's queue at the switch.
pub fn are_level(rate: Rate, ports: &[Port]) -> bool {
    ports.iter().all(|port| u128::from(port.rate.0) * 4 <= u128::from(rate.0) * 5)
}

/// Ports of 200 Mbit/s and 1 Gbit/s, which may be measured as a little more or less.
const MEASURED: std::ops::RangeInclusive<u64> = 150_000_000..=1_100_000_000;
/// Two queues with two segments each, and what is on the wire.
const TWO_QUEUES: usize = 512 << 10;
/// What TCP small queues let wait at a port, in seconds: a millisecond at the rate at which the kernel
/// paces a connection, which is a fifth more than what it carries.
const SMALL_QUEUE: f64 = 1.2e-3;
/// The smallest part of a queue that is taken instead of [`LONE_WINDOW`]. A choice: smaller parts were not
/// measured.
const WORTH_IT: usize = 256 << 10;
/// If one of two queues holds all that the kernel lets wait, the other one still has half a millisecond.
const SLACK: f64 = 0.5e-3;
const LONE_WINDOW: usize = 64 << 10;
/// What may be under way to a port: a little less than the queue of a small switch's port, 256 KB.
const LEAST_BUDGET: usize = 192 << 10;
/// How long the budget of a fast port keeps it busy, in seconds.
const BUSY: f64 = 0.6e-3;
/// A few packets. With smaller windows TCP sends short segments, which cost much CPU time.
const LEAST_WINDOW: usize = 4 << 10;
const MOST_WINDOW: usize = 1 << 20;

/// What a measurement over one connection says of a port, in two significant digits.
///
/// Above 11 Gbit/s the measurement may be of the cores and not of the port. So the port carries at least
/// this: windows of this size do not overflow it, and it has lanes enough for as much.
pub fn judge_measured(rate: Rate) -> Rate {
    let mut unit = 1;
    while rate.0 / unit >= 100 {
        unit *= 10;
    }
    Rate((rate.0 + unit / 2) / unit * unit)
}

impl From<Rate> for u64 {
    fn from(rate: Rate) -> Self {
        rate.0
    }
}

impl TryFrom<u64> for Rate {
    type Error = String;

    fn try_from(bits: u64) -> Result<Self, String> {
        Self::new(bits).ok_or_else(|| format!("no network has {bits} bit/s: expected {RANGE}"))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.0 as f64;
        let (value, unit) = match bits {
            bits if bits < 1e6 => (bits / 1e3, "kbit/s"),
            bits if bits < 1e9 => (bits / 1e6, "Mbit/s"),
            bits if bits < 1e12 => (bits / 1e9, "Gbit/s"),
            bits => (bits / 1e12, "Tbit/s"),
        };
        // Three digits, without zeros that say nothing.
        let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
        let text = format!("{value:.decimals$}");
        let text =
            if decimals > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        write!(f, "{text} {unit}")
    }
}

/// As people write it: `10gbit`, `200mbit`, `25GbE`, `1 Gbit/s`.
impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("{why}; write it like 10gbit, 200mbit or 25GbE");
        let end = text.find(|c: char| !(c.is_ascii_digit() || ".-+".contains(c)));
        let (number, unit) = text.split_at(end.unwrap_or(text.len()));
        let number: f64 =
            number.parse().map_err(|_| wrong(&format!("'{text}' does not begin with a number")))?;
        let unit = unit.trim().to_ascii_lowercase();
        let factor = match unit.strip_suffix("/s").unwrap_or(&unit) {
            "kbit" | "kbps" => 1e3,
            "mbit" | "mbps" => 1e6,
            "gbit" | "gbps" | "gbe" => 1e9,
            "tbit" | "tbps" | "tbe" => 1e12,
            "" => return Err(wrong(&format!("'{text}' has no unit"))),
            _ => return Err(wrong(&format!("'{unit}' is not a unit of bandwidth"))),
        };
        // What is negative or too large for the type is outside of the range too.
        let bits = (number * factor).round() as u64;
        Self::new(bits).ok_or_else(|| wrong(&format!("no network has {text}: expected {RANGE}")))
    }
}

/// A modem, and more than any link there is: what lies outside is a slip of the pen.
const LEAST: u64 = 10_000;
const MOST: u64 = 100_000_000_000_000;
const RANGE: &str = "10 kbit/s to 100 Tbit/s";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rates<const N: usize>(mbit: [u64; N]) -> [Rate; N] {
        mbit.map(|mbit| Rate(mbit * 1_000_000))
    }

    #[test]
    fn rates_are_read_as_people_write_them_and_travel_as_bits() {
        for (text, bits, shown) in [
            ("100mbit", 100_000_000, "100 Mbit/s"),
            ("2.5Gbps", 2_500_000_000, "2.5 Gbit/s"),
            ("1 Gbit/s", 1_000_000_000, "1 Gbit/s"),
            ("25GbE", 25_000_000_000, "25 Gbit/s"),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.bits(), &*rate.to_string()), (bits, shown));
            assert_eq!(serde_json::to_string(&rate).unwrap(), bits.to_string());
        }
        for nonsense in ["", "fast", "-1gbit", "10", "1kbit", "1e30gbit"] {
            assert!(nonsense.parse::<Rate>().unwrap_err().contains("10gbit"), "{nonsense}");
        }
        let error = serde_json::from_str::<Rate>("7").unwrap_err().to_string();
        assert!(error.contains("no network has 7 bit/s"), "{error}");
        assert_eq!(Rate::of(1000, 0.0).bits(), MOST);
        assert_eq!(Rate::of(125_000_000, 1.0).to_string(), "1 Gbit/s");
    }

    #[test]
    fn what_chance_made_unequal_is_made_equal() {
        let merged = |mut rates: Vec<Rate>| {
            merge_rates(&mut rates);
            rates.into_iter().map(|rate| rate.bits() / 1_000_000).collect::<Vec<_>>()
        };
        assert_eq!(merged(rates([941, 873, 96, 938, 89]).to_vec()), [938, 938, 89, 938, 89]);
        assert_eq!(merged(rates([125, 125, 1234]).to_vec()), [125, 125, 1234]);
        // Four fifths are near, less is not.
        assert_eq!(merged(rates([1000, 800, 799]).to_vec()), [800, 800, 799]);
    }

    #[test]
    fn the_links_of_a_port_share_its_budget() {
        let all = |senders, shares| senders * shares * window(senders, shares, None);
        for (senders, shares) in [(2, 1), (7, 1), (15, 1), (7, 2), (3, 8)] {
            let (all, links) = (all(senders, shares), senders * shares);
            assert!(all <= LEAST_BUDGET && all + links > LEAST_BUDGET, "{links} links have {all}");
        }
        // Very many links have more than the budget: a window has a few packets.
        assert_eq!(window(200, 1, None), LEAST_WINDOW);
        // A fast port has a larger budget, a slow one has what it needs for small switches.
        let [slow, fast, fastest] = rates([100, 10_000, 100_000]);
        assert_eq!(window(7, 1, Some(slow)), window(7, 1, None));
        assert_eq!(7 * window(7, 1, Some(fast)), 749_994);
        assert_eq!(window(1, 1, Some(fastest)), MOST_WINDOW);
    }

    #[test]
    fn lanes_follow_the_speed() {
        let lanes = |mbit, most| lanes_for(rates([mbit])[0], most);
        let all = [100, 940, 2_500, 9_400, 10_000, 25_000, 37_000, 100_000];
        assert_eq!(all.map(|mbit| lanes(mbit, 8)), [1, 1, 1, 2, 2, 4, 5, 8]);
        assert_eq!(all.map(|mbit| lanes(mbit, 2)), [1, 1, 1, 2, 2, 2, 2, 2]);
        assert_eq!(lanes(40_000, 0), 1);
        // One connection between fast ports may measure the cores: that much they carry.
        let judged = |mbit| judge_measured(rates([mbit])[0]).bits() / 1_000_000;
        assert_eq!([96, 938, 9_449, 13_000, 22_000].map(judged), [96, 940, 9_400, 13_000, 22_000]);
    }

    proptest! {
        #[test]
        fn merging_keeps_the_order_and_no_rate_changes_much(
            mut all in proptest::collection::vec(1_000_000u64..50_000_000_000, 1..20),
        ) {
            all.sort_unstable();
            let mut rates: Vec<_> = all.iter().map(|&bits| Rate(bits)).collect();
            merge_rates(&mut rates);
            prop_assert!(rates.is_sorted());
            for (rate, bits) in rates.iter().zip(all) {
                let ratio = rate.bits() as f64 / bits as f64;
                prop_assert!((0.8..=1.25).contains(&ratio), "{bits} became {rate}");
            }
        }
    }
}
