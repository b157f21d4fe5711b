//! The switch's decisions, in virtual time.

use super::*;

const MS: Duration = Duration::from_millis(1);

/// A link that takes a millisecond for 1000 bytes, and 5 ms to arrive.
fn links() -> Links {
    Links {
        rate: Bandwidth::from_bytes(1e6),
        delay: 5 * MS,
        queue: 1 << 20,
        faults: Faults::default(),
    }
}

fn with_faults(faults: Faults) -> Links {
    Links { faults, ..links() }
}

/// A frame of `len` bytes that ends with a tag to know it by.
fn frame(to: [u8; 6], len: usize, tag: u8) -> Vec<u8> {
    let mut frame = vec![0; len];
    frame[..6].copy_from_slice(&to);
    frame[len - 1] = tag;
    frame
}

/// Everything that arrives at a node, as times in microseconds and tags.
fn arrivals(switch: &mut Switch, node: u16) -> Vec<(u128, u8)> {
    let mut seen = Vec::new();
    while let Some(now) = switch.poll_timeout() {
        let before = seen.len();
        while let Some(frame) = switch.poll_frame(now, node) {
            seen.push((now.as_micros(), *frame.last().unwrap()));
        }
        if seen.len() == before {
            break;
        }
    }
    seen
}

#[test]
fn a_frame_goes_to_the_node_it_names_and_to_no_other() {
    let mut switch = Switch::new(3, links());
    switch.handle_frame(Duration::ZERO, 0, frame(hardware_address(2), 100, 1));
    let late = Duration::from_secs(1);
    assert_eq!(switch.poll_frame(late, 0), None);
    assert_eq!(switch.poll_frame(late, 1), None);
    assert!(switch.poll_frame(late, 2).is_some());
    assert_eq!(switch.delivered(), [0, 0, 100]);
}

#[test]
fn a_frame_for_everybody_goes_to_all_but_its_sender() {
    let mut switch = Switch::new(3, links());
    switch.handle_frame(Duration::ZERO, 1, frame([0xff; 6], 100, 1));
    assert_eq!(arrivals(&mut switch, 0), [(5100, 1)]);
    assert_eq!(arrivals(&mut switch, 1), []);
    assert_eq!(arrivals(&mut switch, 2), [(5100, 1)]);
}

#[test]
fn an_address_that_no_node_has_gets_nothing() {
    let mut switch = Switch::new(2, links());
    switch.handle_frame(Duration::ZERO, 0, frame([0x02, 1, 2, 3, 4, 5], 100, 1));
    switch.handle_frame(Duration::ZERO, 0, frame(hardware_address(2), 100, 1));
    switch.handle_frame(Duration::ZERO, 0, Vec::new());
    assert_eq!(switch.poll_timeout(), None);
}

#[test]
fn frames_arrive_in_order_at_the_rate_of_the_link_and_a_delay_later() {
    let mut switch = Switch::new(3, links());
    let to = hardware_address(2);
    switch.handle_frame(Duration::ZERO, 0, frame(to, 1000, 1));
    switch.handle_frame(Duration::ZERO, 1, frame(to, 2000, 2));
    switch.handle_frame(Duration::ZERO, 0, frame(to, 1000, 3));
    // The link is idle from 4 ms to 10 ms.
    switch.handle_frame(10 * MS, 1, frame(to, 1000, 4));
    assert_eq!(switch.poll_frame(6 * MS - Duration::from_nanos(1), 2), None);
    assert_eq!(arrivals(&mut switch, 2), [(6000, 1), (8000, 2), (9000, 3), (16_000, 4)]);
    assert_eq!(switch.counts(), Counts { forwarded: 4, ..Counts::default() });
}

#[test]
fn a_full_queue_drops_until_the_link_has_sent_some_of_it() {
    let mut switch = Switch::new(2, Links { queue: 3000, ..links() });
    let to = hardware_address(1);
    for tag in 1..=5 {
        switch.handle_frame(Duration::ZERO, 0, frame(to, 1000, tag));
    }
    assert_eq!(switch.counts().overflowed, 2);
    // Half of a frame is sent: no room yet for a whole one.
    switch.handle_frame(MS / 2, 0, frame(to, 1000, 6));
    assert_eq!(switch.counts().overflowed, 3);
    switch.handle_frame(MS, 0, frame(to, 1000, 7));
    assert_eq!(arrivals(&mut switch, 1), [(6000, 1), (7000, 2), (8000, 3), (9000, 7)]);
}

#[test]
fn queues_are_of_ports_and_one_that_is_full_stops_no_other() {
    let mut switch = Switch::new(3, Links { queue: 1000, ..links() });
    switch.handle_frame(Duration::ZERO, 0, frame(hardware_address(1), 1000, 1));
    switch.handle_frame(Duration::ZERO, 0, frame(hardware_address(1), 1000, 2));
    switch.handle_frame(Duration::ZERO, 0, frame(hardware_address(2), 1000, 3));
    assert_eq!(arrivals(&mut switch, 1), [(6000, 1)]);
    assert_eq!(arrivals(&mut switch, 2), [(6000, 3)]);
}

/// Which of 1000 frames from node 0 get through, while node 1 sends as many as `others` says.
fn survivors(seed: u64, others: usize) -> Vec<u16> {
    let loss = "10%".parse().unwrap();
    let mut switch = Switch::new(3, with_faults(Faults { loss, seed, ..Faults::default() }));
    let mut survivors = Vec::new();
    for number in 0..1000u16 {
        let now = u32::from(number) * MS;
        for _ in 0..others {
            switch.handle_frame(now, 1, frame(hardware_address(0), 100, 0));
        }
        let before = switch.counts().lost;
        switch.handle_frame(now, 0, frame(hardware_address(2), 100, 0));
        if switch.counts().lost == before {
            survivors.push(number);
        }
    }
    survivors
}

#[test]
fn the_seed_decides_which_frames_of_a_node_are_lost() {
    let first = survivors(1, 0);
    assert_eq!(survivors(1, 0), first);
    assert_eq!(survivors(1, 2), first, "what others send makes no difference");
    assert_ne!(survivors(2, 0), first);
    // 900 are expected, with a standard deviation of 9.5.
    assert!((860..=940).contains(&first.len()), "{}", first.len());
}

#[test]
fn a_frame_that_overtakes_skips_the_delay_but_not_the_link() {
    let all = Faults { reorder: "100%".parse().unwrap(), ..Faults::default() };
    let mut switch = Switch::new(2, links());
    let to = hardware_address(1);
    switch.handle_frame(Duration::ZERO, 0, frame(to, 1000, 1));
    switch.handle_frame(Duration::ZERO, 0, frame(to, 1000, 2));
    switch.links.faults = all;
    switch.handle_frame(Duration::ZERO, 0, frame(to, 1000, 3));
    assert_eq!(arrivals(&mut switch, 1), [(3000, 3), (6000, 1), (7000, 2)]);
}

#[test]
fn a_damaged_frame_differs_in_one_bit_and_arrives_where_it_was_sent() {
    let corrupt = "100%".parse().unwrap();
    let mut switch = Switch::new(2, with_faults(Faults { corrupt, ..Faults::default() }));
    let whole = frame(hardware_address(1), 1000, 1);
    switch.handle_frame(Duration::ZERO, 0, whole.clone());
    let damaged = switch.poll_frame(6 * MS, 1).unwrap();
    let bits = whole.iter().zip(&damaged).map(|(a, b)| (a ^ b).count_ones());
    assert_eq!(bits.sum::<u32>(), 1);
    assert_eq!(switch.counts().corrupted, 1);
}

#[test]
fn frames_that_leave_long_after_their_time_are_counted() {
    let mut switch = Switch::new(2, links());
    for now in [Duration::ZERO, 10 * MS] {
        switch.handle_frame(now, 0, frame(hardware_address(1), 1000, 1));
    }
    assert!(switch.poll_frame(7 * MS, 1).is_some());
    assert_eq!(switch.counts().late, 0);
    assert!(switch.poll_frame(17 * MS + MS / 10, 1).is_some());
    assert_eq!(switch.counts().late, 1);
}

#[test]
fn percentages_are_read_and_nonsense_is_refused() {
    assert_eq!("0.1%".parse(), Ok(Probability(0.001)));
    assert_eq!("100%".parse(), Ok(Probability(1.0)));
    for bad in ["", "%", "1", "0.01", "-1%", "101%", "nan%", "one%"] {
        let said = bad.parse::<Probability>().unwrap_err();
        assert!(said.contains("expected a percentage"), "{bad}: {said}");
    }
}
