//! How much waits at most at this machine's own end of a port.
//!
//! What a program sends waits in its interface's queue (Linux: the queueing discipline) until the port has
//! room. The kernel tells everybody what these queues are, over a netlink socket. Only the few kinds that
//! ordinary machines have are read here, so no library of all kinds is needed.

/// How many bytes wait at most before they leave the interface `name` of this process's network namespace.
/// `None` if the system does not tell, or if it is a kind of queue that is not known here.
pub(crate) fn of_interface(name: &str) -> Option<u64> {
    #[cfg(target_os = "linux")]
    return linux::of_interface(name);
    #[cfg(not(target_os = "linux"))]
    {
        let _ = name;
        None
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use crate::window::interface_number;
    use socket2::{Domain, Protocol, Socket, Type};
    use std::io::{self, Read};
    use std::time::Duration;

    /// Netlink's numbers, of `linux/netlink.h` and `linux/rtnetlink.h`.
    const AF_NETLINK: i32 = 16;
    const NETLINK_ROUTE: i32 = 0;
    const GET_QDISC: u16 = 38;
    const NEW_QDISC: u16 = 36;
    const ERROR: u16 = 2;
    const DONE: u16 = 3;
    const REQUEST_DUMP: u16 = 0x301;
    const HEADER: usize = 16;
    /// `struct tcmsg`: family, interface, handle, parent, info.
    const MESSAGE: usize = 20;
    const KIND: u16 = 1;
    const OPTIONS: u16 = 2;
    const ROOT: u32 = u32::MAX;
    /// Many queues count packets. Full ones have at least so many bytes: a large segment counts as one.
    const PACKET: u64 = 1500;
    /// The kernel answers at once. This is for kernels that do not answer at all.
    const PATIENCE: Duration = Duration::from_millis(500);
    /// More parts than any machine's answer has.
    const MOST_ANSWERS: usize = 10_000;

    /// A queue of an interface, as the kernel tells.
    #[derive(Debug, PartialEq, Eq)]
    pub(super) struct Queue<'a> {
        pub(super) interface: u32,
        pub(super) parent: u32,
        pub(super) kind: &'a str,
        pub(super) options: &'a [u8],
    }

    pub(super) fn of_interface(name: &str) -> Option<u64> {
        let number = interface_number(name)?;
        let answer = ask().ok()?;
        // A card with several queues has one of each kind below a root that holds nothing itself.
        let mine = |queue: &Queue<'_>| queue.interface == number;
        let queues: Vec<Queue<'_>> = queues(&answer).filter(mine).collect();
        let root = queues.iter().find(|queue| queue.parent == ROOT)?;
        match root.kind {
            "mq" => {
                let below = queues.iter().filter(|queue| queue.parent != ROOT);
                below.map(Queue::holds).collect::<Option<Vec<_>>>()?.into_iter().min()
            }
            _ => root.holds(),
        }
    }

    /// All queues of this network namespace, as the kernel writes them.
    fn ask() -> io::Result<Vec<u8>> {
        let mut socket =
            Socket::new(Domain::from(AF_NETLINK), Type::RAW, Some(Protocol::from(NETLINK_ROUTE)))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut request = [0u8; HEADER + MESSAGE];
        request[..4].copy_from_slice(&((HEADER + MESSAGE) as u32).to_ne_bytes());
        request[4..6].copy_from_slice(&GET_QDISC.to_ne_bytes());
        request[6..8].copy_from_slice(&REQUEST_DUMP.to_ne_bytes());
        socket.send(&request)?;
        let mut answer = Vec::new();
        let mut part = vec![0; 64 << 10];
        for _ in 0..MOST_ANSWERS {
            let bytes = socket.read(&mut part)?;
            answer.extend_from_slice(&part[..bytes]);
            if messages(&part[..bytes]).any(|(kind, _)| kind == DONE || kind == ERROR) {
                break;
            }
        }
        Ok(answer)
    }

    /// The queues in what the kernel has written.
    pub(super) fn queues(answer: &[u8]) -> impl Iterator<Item = Queue<'_>> {
        messages(answer).filter(|(kind, _)| *kind == NEW_QDISC).filter_map(|(_, message)| {
            let body = message.get(MESSAGE..)?;
            let find = |wanted| attributes(body).find(|(kind, _)| *kind == wanted);
            let (_, name) = find(KIND)?;
            let name = std::str::from_utf8(name).ok()?.trim_end_matches('\0');
            let options = find(OPTIONS).map_or(&[][..], |(_, options)| options);
            let (interface, parent) = (word(message, 4)?, word(message, 12)?);
            Some(Queue { interface, parent, kind: name, options })
        })
    }

    impl Queue<'_> {
        /// How many bytes it holds.
        pub(super) fn holds(&self) -> Option<u64> {
            // In the first bytes of some options, and in an attribute of others.
            let first = || word(self.options, 0);
            let nested = |wanted: u16, at: usize| {
                let (_, value) = attributes(self.options).find(|(kind, _)| *kind == wanted)?;
                word(value, at)
            };
            let packets = |count: u32| u64::from(count) * PACKET;
            match self.kind {
                "bfifo" => first().map(u64::from),
                "pfifo" => first().map(packets),
                // `struct tc_tbf_qopt` begins with two rates of 12 bytes.
                "tbf" => nested(1, 24).map(u64::from),
                "fq_codel" => nested(2, 0).map(packets),
                "fq" => nested(1, 0).map(packets),
                // It holds as many packets as the interface says: 1000 unless somebody has changed that.
                "pfifo_fast" => Some(packets(1000)),
                _ => None,
            }
        }
    }

    /// The messages in `bytes`: what each is, and what is behind its header.
    fn messages(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
        parts(bytes, HEADER, |part| Some((word(part, 0)? as usize, half(part, 4)?)))
    }

    /// The attributes in `bytes`.
    fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
        // The two upper bits are flags.
        let header = |part: &[u8]| Some((usize::from(half(part, 0)?), half(part, 2)? & 0x3fff));
        parts(bytes, 4, header)
    }

    /// Cuts `bytes` into parts that each begin with a header, which says how long the part is, and what.
    fn parts(
        mut bytes: &[u8],
        header: usize,
        read: impl Fn(&[u8]) -> Option<(usize, u16)>,
    ) -> impl Iterator<Item = (u16, &[u8])> {
        std::iter::from_fn(move || {
            let (length, kind) = read(bytes)?;
            let part = bytes.get(header..length)?;
            bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
            Some((kind, part))
        })
    }

    fn word(bytes: &[u8], at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
    }

    fn half(bytes: &[u8], at: usize) -> Option<u16> {
        Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::linux::{Queue, queues};
    use super::of_interface;
    use proptest::prelude::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = ((4 + value.len()) as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn message(interface: u32, kind: &str, options: &[u8]) -> Vec<u8> {
        let mut body = [0, interface, 0, u32::MAX, 0].map(u32::to_ne_bytes).concat();
        body.extend(attribute(1, format!("{kind}\0").as_bytes()));
        body.extend(attribute(2, options));
        let mut bytes = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(36u16.to_ne_bytes());
        bytes.resize(16, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn queues_of_ordinary_machines_are_read() {
        let limit = |bytes: u32| bytes.to_ne_bytes();
        let tbf = [&[7; 24][..], &limit(2 << 20), &[7; 8]].concat();
        let kinds: [(&str, Vec<u8>, Option<u64>); 7] = [
            ("tbf", [attribute(5, &[1; 8]), attribute(1, &tbf)].concat(), Some(2 << 20)),
            ("bfifo", limit(256 << 10).to_vec(), Some(256 << 10)),
            ("pfifo", limit(100).to_vec(), Some(150_000)),
            ("pfifo_fast", Vec::new(), Some(1_500_000)),
            ("fq_codel", attribute(2, &limit(10_240)), Some(15_360_000)),
            ("fq", attribute(1, &limit(10_000)), Some(15_000_000)),
            ("noqueue", Vec::new(), None),
        ];
        for (number, (kind, options, holds)) in (1..).zip(kinds) {
            let all = [message(number, kind, &options), message(99, "fq", &[])].concat();
            let found: Vec<Queue<'_>> = queues(&all).collect();
            assert_eq!((found[0].interface, found[0].kind), (number, kind));
            assert_eq!(found[0].holds(), holds, "{kind}");
            assert_eq!((found[1].interface, found[1].holds()), (99, None));
        }
    }

    #[test]
    fn interfaces_have_a_queue_or_none_that_is_known() {
        // The loopback interface has no queue, and no system has an interface of this name.
        assert_eq!([of_interface("lo"), of_interface("nonesuch0")], [None; 2]);
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_read_without_a_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            at in 0..100usize,
            byte: u8,
        ) {
            for queue in queues(&bytes) {
                queue.holds();
            }
            bytes = message(3, "tbf", &attribute(1, &bytes));
            let at = at % bytes.len();
            bytes[at] = byte;
            for queue in queues(&bytes) {
                queue.holds();
            }
        }
    }
}
