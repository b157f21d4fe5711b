//! What the system knows about a TCP connection: whether the bytes that were sent arrive, whether
//! the other end reads them, and what the way there lets pass.

use std::fmt;
use std::time::Duration;

/// How a TCP connection stands, as its own end sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Segments that were sent and not acknowledged.
    pub unacknowledged: u32,
    /// How many times in a row the oldest of them was sent again in vain.
    pub resent: u32,
    /// Segments that were sent again since the connection was made.
    pub resent_in_all: u32,
    /// Times in a row that the other end was asked whether it has room again, without an answer.
    pub probes: u32,
    /// Since the last acknowledgement came.
    pub since_acknowledged: Duration,
    /// Since the last bytes came.
    pub since_data: Duration,
    /// How long bytes take to the other end and back, smoothed.
    pub round_trip: Duration,
}

/// What the kernel has counted of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathFacts {
    /// Bytes of data in a segment that this end sends, at most.
    pub segment: u32,
    /// The largest packet that the kernel takes to pass.
    pub mtu: u32,
    /// Segments with data that were sent.
    pub sent: u32,
    /// Segments that were sent again.
    pub resent: u32,
}

impl Delivery {
    /// Bytes of the kernel's `struct tcp_info` that are read here. Every kernel since 2.6 has them.
    pub(crate) const SIZE: usize = 104;

    /// Reads the kernel's `struct tcp_info`.
    pub(crate) fn from_info(info: &[u8; Self::SIZE]) -> Self {
        let word = |at: usize| {
            let bytes = info[at..at + 4].first_chunk().expect("four bytes are four bytes");
            u32::from_ne_bytes(*bytes)
        };
        let millis = |at| Duration::from_millis(word(at).into());
        Self {
            resent: info[2].into(),
            probes: info[3].into(),
            unacknowledged: word(24),
            since_data: millis(52),
            since_acknowledged: millis(56),
            round_trip: Duration::from_micros(word(68).into()),
            resent_in_all: word(100),
        }
    }
}

const LOSS: &str = ": is the network losing packets, or its host gone?";

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
        let acknowledged = seconds(self.since_acknowledged);
        // An answer sets the number to 0. Where it comes within the sending of a question, as on
        // one machine, that question is still counted.
        if self.probes > 1 {
            return write!(
                f,
                "its system was asked {} times whether there is room for more and did not answer, \
                 the last acknowledgement came {acknowledged} ago{LOSS}",
                self.probes,
            );
        }
        if self.probes == 1 {
            return write!(
                f,
                "its system has no room for more and answers, the last time {acknowledged} ago: \
                 its process does not read",
            );
        }
        if self.unacknowledged == 0 {
            let data = seconds(self.since_data);
            write!(
                f,
                "its system has acknowledged all that was sent, the last time {acknowledged} ago, \
                 and nothing came from it for {data}: its process is stopped or busy"
            )?;
            // What it sends, and sends again ever more rarely, may be lost as well.
            return match self.resent_in_all {
                0 => Ok(()),
                again => write!(
                    f,
                    ", or the network loses what it sends ({again} segments had to be sent again to it)"
                ),
            };
        }
        let some = if self.unacknowledged == 1 { "segment is" } else { "segments are" };
        write!(
            f,
            "{} {some} unacknowledged and {} times sent again, the last acknowledgement came \
             {acknowledged} ago, {} were sent again in all, the round trip is {:.1?}",
            self.unacknowledged, self.resent, self.resent_in_all, self.round_trip,
        )?;
        if self.resent > 0 {
            f.write_str(LOSS)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn lost_packets_are_told_from_a_process_that_does_not_read() {
        let lost = Delivery {
            unacknowledged: 5,
            resent: 7,
            resent_in_all: 412,
            since_acknowledged: 12 * SECOND,
            since_data: 14 * SECOND,
            round_trip: Duration::from_micros(300),
            probes: 0,
        };
        let words = lost.to_string();
        for fact in ["5 segments are unacknowledged", "7 times sent again", "12.0 s ago", "losing"]
        {
            assert!(words.contains(fact), "{words}");
        }
        let full = Delivery { probes: 1, since_acknowledged: SECOND, ..lost };
        let words = full.to_string();
        assert!(words.contains("does not read") && !words.contains("losing"), "{words}");
        let words = Delivery { probes: 3, ..lost }.to_string();
        assert!(words.contains("asked 3 times") && words.contains("losing"), "{words}");
        let idle = Delivery { unacknowledged: 0, resent_in_all: 0, ..lost };
        let words = idle.to_string();
        assert!(words.contains("nothing came from it for 14.0 s"), "{words}");
        assert!(words.ends_with("its process is stopped or busy"), "{words}");
        // On a way that loses packets it is not known which of the two it is.
        let words = Delivery { resent_in_all: 412, ..idle }.to_string();
        assert!(words.contains("stopped or busy, or the network loses"), "{words}");
        assert!(words.contains("412 segments"), "{words}");
    }
}
