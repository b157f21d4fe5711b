//! What comes out of an exchange equals what one process would have computed.

use crate::cluster::Layout;
use poseidon::config::{Carriers, LinkRate};
use poseidon::{
    Buffer, ChunkSize, Clock, Error, LaneId, Layer, Optimizer, Reduction, Servers, Session,
};

const CHUNK: usize = 256;
const PER_CHUNK: usize = CHUNK / 4;

/// A value that sums exactly in `f32` whatever the order.
fn value(rank: u16, layer: usize, i: usize, clock: u64) -> f32 {
    (rank as usize * 7 + layer * 3 + i % 101 + clock as usize) as f32
}

/// Sends every layer, then receives every layer, for a few clocks; checks each element.
fn exchange(session: &Session, sizes: &[usize]) -> Result<(), Error> {
    let rank = session.rank();
    let workers = session.workers() as u16;
    for clock in 1..=3 {
        for (layer, &size) in sizes.iter().enumerate().rev() {
            let id = session.layer(&format!("layer{layer}"))?;
            let values: Vec<f32> = (0..size).map(|i| value(rank, layer, i, clock)).collect();
            session.send(id, values.into())?;
        }
        for (layer, &size) in sizes.iter().enumerate() {
            let received = session.receive(session.layer(&format!("layer{layer}"))?)?;
            assert_eq!(received.clock, Clock(clock));
            for i in 0..size {
                let expected: f32 = (0..workers).map(|r| value(r, layer, i, clock)).sum();
                assert_eq!(received.result[i], expected, "layer {layer} element {i} clock {clock}");
            }
        }
    }
    Ok(())
}

fn check(layout: Layout, deterministic: bool) {
    let sizes = [0, 1, PER_CHUNK - 1, PER_CHUNK, PER_CHUNK + 1, 40 * PER_CHUNK + 13];
    let describe = |builder: poseidon::session::Builder| {
        let layers = sizes.iter().enumerate().map(|(n, &len)| Layer::new(format!("layer{n}"), len));
        builder
            .layers(layers)
            .optimizer(Optimizer::Reduce(Reduction::Sum))
            .chunk_size(ChunkSize::at_most(CHUNK))
            .deterministic(deterministic)
    };
    for result in layout.run(describe, |session| exchange(session, &sizes)) {
        result.unwrap_or_else(|e| panic!("{layout:?}: {e}"));
    }
}

#[test]
fn sums_are_exact_on_every_carrier_and_any_number_of_ranks() {
    for carrier in [Carriers::Tcp, Carriers::Unix, Carriers::Auto] {
        for workers in [1, 2, 3, 5, 8] {
            check(Layout { carrier, ..Layout::workers(workers) }, false);
        }
    }
}

#[test]
fn sums_are_exact_with_several_lanes() {
    for lanes in [2, 3] {
        for workers in [1, 2, 5] {
            check(Layout { lanes, ..Layout::workers(workers) }, false);
        }
    }
}

#[test]
fn sums_are_exact_with_dedicated_and_mixed_servers() {
    for servers in [Servers::Dedicated(1), Servers::Dedicated(3), Servers::Mixed(2)] {
        for workers in [1, 2, 3] {
            check(Layout { servers, lanes: 2, ..Layout::workers(workers) }, false);
        }
    }
}

#[test]
fn sums_are_exact_across_hosts_and_racks() {
    for hosts in [&[4, 4, 4, 4][..], &[8, 8], &[3, 1, 4], &[1, 2]] {
        check(Layout::hosts(hosts), false);
        check(Layout { lanes: 2, ..Layout::hosts(hosts) }, true);
        check(Layout { carrier: Carriers::Tcp, ..Layout::hosts(hosts) }, false);
    }
    for racks in [&[0, 0, 1, 1], &[0, 1, 1, 1], &[0, 1, 0, 1]] {
        check(Layout { racks, ..Layout::hosts(&[2, 3, 1, 2]) }, false);
        check(Layout { racks, ..Layout::hosts(&[2, 3, 1, 2]) }, true);
    }
    // So many hosts are in rows: two of eight, and two of nine with two workers on some hosts.
    check(Layout::hosts(&[1; 16]), true);
    check(Layout::hosts(&[2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]), false);
    // A server beside workers, and one on a host of its own.
    let servers = Servers::Dedicated(2);
    check(Layout { servers, hosts: &[3, 3, 1], ..Layout::workers(5) }, false);
    check(Layout { servers, hosts: &[3, 3, 1], ..Layout::workers(5) }, true);
    let servers = Servers::Mixed(1);
    check(Layout { servers, hosts: &[2, 2, 2], racks: &[0, 0, 1], ..Layout::workers(5) }, true);
}

/// Racks whose links carry as much as a port are in one ring, however their hosts are numbered.
#[test]
fn sums_are_exact_in_a_ring_through_racks() {
    let layout = Layout { racks: &[0, 1, 0, 1, 2], ..Layout::hosts(&[2, 1, 1, 2, 1]) };
    // Large enough to go round, and small: that goes straight.
    let sizes = [100_000, 13];
    let describe = |builder: poseidon::session::Builder| {
        let layers = sizes.iter().enumerate().map(|(n, &len)| Layer::new(format!("layer{n}"), len));
        builder.layers(layers).optimizer(Optimizer::Reduce(Reduction::Sum))
    };
    // A stream that has to wait for busy cores looks slow, and then the racks have no ring.
    let has_a_ring = || {
        let (_coordinator, mut config) = layout.coordinator();
        config.link_rate = LinkRate::Measured;
        let results = layout.run_with(&config, describe, |session| {
            exchange(&session, &sizes)?;
            let is_ring = session.book().cluster.is_ring();
            session.finish().map(|()| is_ring)
        });
        results.into_iter().all(|result| result.unwrap())
    };
    assert!((0..10).any(|_| has_a_ring()), "no ring in ten jobs");
}

/// A machine with several interfaces has lanes on all of them. Here they are addresses of the
/// loopback interface.
#[test]
fn lanes_are_spread_over_interfaces() {
    let layout = Layout { carrier: Carriers::Tcp, lanes: 3, ..Layout::workers(3) };
    let (_coordinator, mut config) = layout.coordinator();
    config.address = Some("127.0.0.1, 127.0.0.2".into());
    let sizes = [40 * PER_CHUNK + 13];
    let describe = |builder: poseidon::session::Builder| {
        builder.layer(Layer::new("layer0", sizes[0])).chunk_size(ChunkSize::at_most(CHUNK))
    };
    let describe = |builder| describe(builder).optimizer(Optimizer::Reduce(Reduction::Sum));
    let results = layout.run_with(&config, describe, |session| {
        for facts in &session.book().nodes {
            let on = |lane| facts.address(LaneId(lane)).rsplit_once(':').map(|(ip, _)| ip);
            let lanes = [0, 1, 2].map(on);
            assert_eq!(lanes, [Some("127.0.0.1"), Some("127.0.0.2"), Some("127.0.0.1")]);
        }
        exchange(&session, &sizes)?;
        session.finish()
    });
    results.into_iter().for_each(|result| result.unwrap());
    config.address = Some("127.0.0.1,127.0.0.1".into());
    let twice = layout.run_with(&config, describe, |session| session.finish());
    let words = twice[0].as_ref().unwrap_err().to_string();
    assert!(words.contains("names 127.0.0.1 twice"), "{words}");
}

#[test]
fn sums_are_exact_in_rank_order() {
    check(Layout::workers(3), true);
    check(Layout { servers: Servers::Dedicated(2), ..Layout::workers(3) }, true);
}

/// Values whose sum depends on the order: in rank order every run gives the same bits.
#[test]
fn deterministic_runs_repeat_bit_by_bit() {
    let run = || {
        let describe = |builder: poseidon::session::Builder| {
            builder
                .layer(Layer::new("l", 5000))
                .chunk_size(ChunkSize::at_most(CHUNK))
                .deterministic(true)
        };
        let work = |session: &Session| {
            let layer = session.layer("l")?;
            let base = 10f32.powi(i32::from(session.rank()) * 3);
            let values: Vec<f32> = (0..5000).map(|i| base / (i + 1) as f32).collect();
            session.send(layer, values.into())?;
            Ok(session.receive(layer)?.result.to_vec())
        };
        let results = Layout::workers(5).run(describe, work);
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let first = run();
    assert!(first.iter().all(|replica| *replica == first[0]), "replicas differ");
    for _ in 0..3 {
        assert_eq!(run(), first);
    }
}

/// Values whose sum depends on the order: whatever the timing, hosts are added up one after the
/// other, and on each host the ranks.
#[test]
fn deterministic_sums_are_made_host_by_host_in_rank_order() {
    const LEN: usize = 5000;
    let value = |rank: u16, i: usize| 10f32.powi(i32::from(rank % 8) * 3) / (i + 1) as f32;
    let describe = |builder: poseidon::session::Builder| {
        builder
            .layer(Layer::new("l", LEN))
            .chunk_size(ChunkSize::at_most(CHUNK))
            .deterministic(true)
    };
    let work = |session: &Session| {
        let layer = session.layer("l")?;
        let mut results = Vec::new();
        for _ in 0..3 {
            let values: Vec<f32> = (0..LEN).map(|i| value(session.rank(), i)).collect();
            session.send(layer, values.into())?;
            results.push(session.receive(layer)?.result.to_vec());
        }
        Ok(results)
    };
    let layouts =
        [&[16][..], &[4, 4, 4, 4], &[8, 8], &[3, 1, 4]].map(|hosts| (Layout::hosts(hosts), hosts));
    for (layout, hosts) in layouts {
        let mut first = 0;
        let mut total: Option<Vec<f32>> = None;
        for &size in hosts {
            let ranks = first..first + size;
            first += size;
            let sum = |i| ranks.clone().map(|rank| value(rank, i)).reduce(|a, b| a + b).unwrap();
            let host: Vec<f32> = (0..LEN).map(sum).collect();
            total = Some(match total {
                None => host,
                Some(total) => total.iter().zip(host).map(|(a, b)| a + b).collect(),
            });
        }
        let workers = f32::from(first);
        let mean: Vec<f32> = total.unwrap().iter().map(|sum| sum * (1.0 / workers)).collect();
        for results in layout.run(describe, work) {
            for result in results.unwrap() {
                assert!(result == mean, "{layout:?}");
            }
        }
    }
}

/// Server-side optimizers against a reference in `f64`, on every layout.
#[test]
fn optimizers_on_shards_equal_one_process() {
    const LEN: usize = 1000;
    let momentum = 0.9;
    let gradient = |rank: u16, i: usize, step: u64| {
        ((i * 31 + rank as usize * 17 + step as usize * 7) % 23) as f32 / 23.0 - 0.4
    };
    let rate = |step: u64| if step < 6 { 0.1f32 } else { 0.05 };
    let mut expected: Vec<f64> = (0..LEN).map(|i| i as f64 / LEN as f64).collect();
    let mut velocity = vec![0f64; LEN];
    for step in 1..=10 {
        for i in 0..LEN {
            let mean = (0..3).map(|r| f64::from(gradient(r, i, step))).sum::<f64>() / 3.0;
            velocity[i] = if step == 1 { mean } else { momentum * velocity[i] + mean };
            expected[i] -= f64::from(rate(step)) * velocity[i];
        }
    }
    let optimizer: Optimizer = "sgd:momentum=0.9".parse().unwrap();
    let describe = |builder: poseidon::session::Builder| {
        builder
            .layer(Layer::new("w", LEN))
            .optimizer(optimizer.clone())
            .learning_rate(0.1)
            .chunk_size(ChunkSize::at_most(CHUNK))
    };
    let work = |session: &Session| {
        let layer = session.layer("w")?;
        // Only worker 0's values count.
        let scale = if session.rank() == 0 { 1.0 } else { 77.0 };
        let initial: Vec<f32> = (0..LEN).map(|i| scale * i as f32 / LEN as f32).collect();
        session.broadcast(layer, initial.into())?;
        let mut weights = session.receive(layer)?.result;
        let mut spare = Buffer::zeroed(LEN);
        for step in 1..=10 {
            session.set_learning_rate(rate(step));
            for (i, g) in spare.iter_mut().enumerate() {
                *g = gradient(session.rank(), i, step);
            }
            session.send_into(layer, spare, weights)?;
            let received = session.receive(layer)?;
            weights = received.result;
            spare = received.gradient.expect("the result had its own memory");
        }
        Ok(weights.to_vec())
    };
    let layouts = [Servers::Colocated, Servers::Dedicated(2), Servers::Mixed(1)].into_iter();
    let layouts = layouts.flat_map(|servers| {
        let one_host = Layout { servers, lanes: 2, ..Layout::workers(3) };
        // Worker 0 is alone on its host, or has a neighbour.
        [&[][..], &[1, 4], &[2, 3]].map(|hosts| Layout { hosts, ..one_host })
    });
    for layout in layouts {
        for weights in layout.run(describe, work) {
            for (i, (got, want)) in weights.unwrap().iter().zip(&expected).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(error < 1e-5, "{layout:?}: weight {i} is {got}, expected {want}");
            }
        }
    }
}

/// Layers with rules and learning rates of their own, beside one that is only added up.
#[test]
fn layers_have_rules_and_rates_of_their_own() {
    let rules = ["sgd", "sgd:weight-decay=0.5,maximize", "sum"];
    let describe = |builder: poseidon::session::Builder| {
        let layers = rules
            .map(|rule| Layer { optimizer: Some(rule.parse().unwrap()), ..Layer::new(rule, 3) });
        builder.layers(layers).learning_rate(0.5).deterministic(true)
    };
    let work = |session: &Session| {
        let mut values = Vec::new();
        for (index, rule) in rules.into_iter().enumerate() {
            let layer = session.layer(rule)?;
            let gradient = Buffer::from(vec![1.0 + f32::from(session.rank()); 3]);
            if rule == "sum" {
                session.send(layer, gradient)?;
            } else {
                session.broadcast(layer, vec![8.0; 3].into())?;
                let parameters = session.receive(layer)?.result;
                if index == 1 {
                    session.set_layer_learning_rate(layer, 0.25)?;
                }
                session.send_into(layer, gradient, parameters)?;
            }
            values.push(session.receive(layer)?.result[0]);
        }
        let unknown = session.set_layer_learning_rate(poseidon::LayerId(3), 0.5);
        assert!(matches!(unknown, Err(Error::UnknownLayer { .. })), "{unknown:?}");
        Ok(values)
    };
    for servers in [Servers::Colocated, Servers::Dedicated(1)] {
        let layout = Layout { servers, lanes: 2, ..Layout::workers(3) };
        for values in layout.run(describe, work) {
            // The mean of 1, 2 and 3 is 2; the decay of the second layer is 0.5 * 8.
            let expected = [8.0 - 0.5 * 2.0, 8.0 - 0.25 * (-2.0 + 4.0), 6.0];
            assert_eq!(values.unwrap(), expected);
        }
    }
}

/// A lane works chunks of its own off in turns. What it does of one layer must not be taken for another's.
#[test]
fn a_layer_may_be_sent_while_another_ones_first_values_are_on_their_way() {
    const LEN: usize = 200 * PER_CHUNK;
    let layout = Layout { lanes: 1, ..Layout::workers(2) };
    let describe = |builder: poseidon::session::Builder| {
        builder
            .layers([Layer::new("a", LEN), Layer::new("b", LEN)])
            .optimizer(Optimizer::Reduce(Reduction::Sum))
            .chunk_size(ChunkSize::at_most(CHUNK))
    };
    let results = layout.run(describe, |session| {
        let (a, b) = (session.layer("a")?, session.layer("b")?);
        let first = if session.rank() == 0 { 3.0 } else { 0.0 };
        session.broadcast(a, vec![first; LEN].into())?;
        session.send(b, vec![1.0; LEN].into())?;
        assert!(session.receive(a)?.result.iter().all(|value| *value == 3.0));
        assert!(session.receive(b)?.result.iter().all(|value| *value == 2.0));
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}
