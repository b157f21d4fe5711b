//! Layers that go by factors end up where full gradients would have taken them.

use crate::cluster::{Layout, without_hanging};
use poseidon::config::Carriers;
use poseidon::session::Builder;
use poseidon::{
    Buffer, ChunkSize, Error, Factors, Layer, LayerKind, Optimizer, Policy, Reduction, Scheme,
    Servers, Session,
};

const M: usize = 6;
const N: usize = 10;
const BATCH: usize = 8;

/// Small integers, so that sums of products are exact in any order.
fn number(rank: u16, row: usize, column: usize, clock: u64) -> f32 {
    ((rank as usize * 5 + row * 3 + column * 7 + clock as usize * 11) % 9) as f32 - 4.0
}

/// How many rows `rank` has: batches are uneven from time to time, and larger than announced.
fn rows(rank: u16, clock: u64) -> usize {
    match clock {
        2 => (usize::from(rank) * 3) % (BATCH + 1),
        4 => BATCH + usize::from(rank) % 3 * 7,
        5 => 10 * BATCH,
        _ => BATCH,
    }
}

fn factors(rank: u16, clock: u64) -> (Vec<f32>, Vec<f32>) {
    let matrix = |columns: std::ops::Range<usize>| -> Vec<f32> {
        let row = |row| columns.clone().map(move |column| number(rank, row, column, clock));
        (0..rows(rank, clock)).flat_map(row).collect()
    };
    (matrix(0..M), matrix(M..M + N))
}

/// uᵀv of one worker and the sum of u's rows.
fn gradient(rank: u16, clock: u64) -> Vec<f32> {
    let (u, v) = factors(rank, clock);
    let mut sum = vec![0.0; M * N + M];
    for (u, v) in u.chunks_exact(M).zip(v.chunks_exact(N)) {
        for i in 0..M {
            for j in 0..N {
                sum[i * N + j] += u[i] * v[j];
            }
            sum[M * N + i] += u[i];
        }
    }
    sum
}

fn total(workers: u16, clock: u64) -> Vec<f32> {
    let mut sum = vec![0.0; M * N + M];
    for rank in 0..workers {
        sum.iter_mut().zip(gradient(rank, clock)).for_each(|(s, g)| *s += g);
    }
    sum
}

fn describe(builder: Builder) -> Builder {
    let kind = LayerKind::Fc { m: M, n: N };
    builder
        .layer(Layer::new("conv", 50))
        .layer(Layer { kind, ..Layer::new("fc", M * N + M) })
        .chunk_size(ChunkSize { min: 64, max: 200 })
        .scheme(Policy::Sfb)
        .batch(BATCH)
}

/// Both layers, sent in backward order and received in forward order.
fn exchange(session: &Session) -> Result<(), Error> {
    let (conv, fc) = (session.layer("conv")?, session.layer("fc")?);
    let workers = session.workers() as u16;
    let rank = session.rank();
    for clock in 1..=6 {
        if session.scheme(fc)? == Scheme::Sfb {
            let (u, v) = factors(rank, clock);
            let half = u.len() / M / 2;
            let parts = [
                Factors { u: &u[..half * M], v: &v[..half * N] },
                Factors { u: &u[half * M..], v: &v[half * N..] },
            ];
            session.send_factors(fc, &parts, Buffer::zeroed(M * N + M))?;
            if clock % 3 != 0 {
                session.rebuild(fc)?;
            }
        } else {
            session.send(fc, gradient(rank, clock).into())?;
        }
        session.send(conv, vec![f32::from(rank); 50].into())?;
        let sum: f32 = (0..workers).map(f32::from).sum();
        assert_eq!(session.receive(conv)?.result[..], [sum; 50]);
        let received = session.receive(fc)?;
        assert_eq!(received.result[..], total(workers, clock), "worker {rank} clock {clock}");
        assert_eq!(received.rebuilt.is_some(), session.scheme(fc)? == Scheme::Sfb);
    }
    Ok(())
}

fn check(layout: Layout) {
    let describe = |b| describe(b).optimizer(Optimizer::Reduce(Reduction::Sum));
    for result in layout.run(describe, exchange) {
        result.unwrap_or_else(|e| panic!("{layout:?}: {e}"));
    }
}

#[test]
fn factors_give_the_sum_of_all_gradients() {
    for carrier in [Carriers::Tcp, Carriers::Unix, Carriers::Auto] {
        for workers in [1, 2, 3, 5, 8] {
            check(Layout { carrier, ..Layout::workers(workers) });
        }
    }
    for lanes in [2, 3] {
        check(Layout { lanes, ..Layout::workers(3) });
    }
}

/// Factors cross to another host once, and are handed on there.
#[test]
fn factors_reach_every_rank_of_every_host() {
    for hosts in [&[4, 4, 4, 4][..], &[8, 8], &[3, 1, 4], &[1, 2]] {
        check(Layout::hosts(hosts));
        check(Layout { lanes: 2, carrier: Carriers::Tcp, ..Layout::hosts(hosts) });
    }
    check(Layout { racks: &[0, 0, 1, 1], ..Layout::hosts(&[2, 3, 1, 2]) });
    let servers = Servers::Dedicated(2);
    check(Layout { servers, hosts: &[3, 3, 1], ..Layout::workers(5) });
}

#[test]
fn factors_are_the_same_on_encrypted_connections() {
    check(Layout { lanes: 2, encrypt: true, ..Layout::hosts(&[3, 1, 2]) });
    check(Layout { carrier: Carriers::Tcp, encrypt: true, ..Layout::workers(3) });
}

#[test]
fn workers_exchange_factors_past_dedicated_servers() {
    for servers in [Servers::Dedicated(1), Servers::Dedicated(2), Servers::Mixed(1)] {
        check(Layout { servers, lanes: 2, ..Layout::workers(3) });
    }
}

/// The steps an optimizer takes are the same by factors and through the shards, and all replicas
/// are equal bit by bit.
#[test]
fn parameters_go_the_same_way_by_either_scheme() {
    let train = |policy: Policy, optimizer: Optimizer| {
        let describe = move |b: Builder| {
            describe(b).optimizer(optimizer.clone()).learning_rate(0.125).scheme(policy)
        };
        let work = |session: &Session| {
            let (conv, fc) = (session.layer("conv")?, session.layer("fc")?);
            let start = if session.rank() == 0 { 1.0 } else { -1.0 };
            for (layer, len) in [(conv, 50), (fc, M * N + M)] {
                session.broadcast(layer, vec![start; len].into())?;
            }
            let mut conv_values = session.receive(conv)?.result;
            let mut values = session.receive(fc)?.result;
            assert_eq!(values[..], [1.0; M * N + M]);
            for clock in 1..=5 {
                let (u, v) = factors(session.rank(), clock);
                if session.scheme(fc)? == Scheme::Sfb {
                    session.send_factors(fc, &[Factors { u: &u, v: &v }], values)?;
                } else {
                    session.send_into(fc, gradient(session.rank(), clock).into(), values)?;
                }
                session.send_into(conv, Buffer::zeroed(50), conv_values)?;
                values = session.receive(fc)?.result;
                conv_values = session.receive(conv)?.result;
            }
            Ok(values.to_vec())
        };
        let results = Layout::workers(3).run(describe, work);
        let results: Vec<Vec<f32>> = results.into_iter().map(Result::unwrap).collect();
        assert!(results.iter().all(|r| r == &results[0]), "replicas differ");
        results.into_iter().next().unwrap()
    };
    for rule in ["sgd:momentum=0.5,weight-decay=0.25", "adam", "sgd:reduction=sum"] {
        let by_shards = train(Policy::Ps, rule.parse().unwrap());
        let by_factors = train(Policy::Sfb, rule.parse().unwrap());
        for (a, b) in by_shards.iter().zip(&by_factors) {
            assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{rule}: {a} and {b}");
        }
    }
}

#[test]
fn wrong_calls_say_what_to_do_instead() {
    let work = |session: &Session| {
        let (conv, fc) = (session.layer("conv")?, session.layer("fc")?);
        let says = |result: Result<(), Error>, words: &[&str]| {
            let error = result.unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "'{word}' is not in: {error}");
            }
        };
        let room = || Buffer::zeroed(M * N + M);
        says(session.rebuild(fc), &["'fc'", "not in flight"]);
        says(session.rebuild(conv), &["'conv' goes by ps", "receive it"]);
        says(session.send(fc, room()), &["'fc' goes by sfb", "send its factors"]);
        let (u, v) = (vec![0.0; 50 * M], vec![0.0; 50 * N]);
        let some = |rows: usize| [Factors { u: &u[..rows * M], v: &v[..rows * N] }];
        let conv_factors = session.send_factors(conv, &some(1), Buffer::zeroed(50));
        says(conv_factors, &["'conv' goes by ps", "send its gradient"]);
        // Never touched: a frame of 256 MiB has 4 Mi rows of 16 numbers.
        let (many, u, v) = (5 << 20, vec![0.0; (5 * M) << 20], vec![0.0; (5 * N) << 20]);
        let too_many = session.send_factors(fc, &[Factors { u: &u, v: &v }], room());
        says(too_many, &["'fc'", &format!("{many} rows"), "8 were announced", "at most 4194"]);
        let uneven = [Factors { u: &u[..M], v: &v[..2 * N] }];
        says(session.send_factors(fc, &uneven, room()), &["rows of 6 and 10", "got 6 and 20"]);
        let short = session.send_factors(fc, &some(1), Buffer::zeroed(3));
        says(short, &["'fc' has 66 parameters", "has 3"]);
        session.send_factors(fc, &some(1), room())?;
        says(session.send_factors(fc, &some(1), room()), &["still in flight at clock 1"]);
        session.receive(fc)?;
        Ok(())
    };
    for result in Layout::workers(2).run(describe, work) {
        result.unwrap();
    }
}

#[test]
fn layers_are_rebuilt_beside_the_program() {
    let work = |session: &Session| {
        let fc = session.layer("fc")?;
        let mut before = false;
        // How long it takes is the machine's affair; in the end it is done before anybody asks.
        for clock in 1..=10 {
            let (u, v) = factors(session.rank(), clock);
            session.send_factors(fc, &[Factors { u: &u, v: &v }], Buffer::zeroed(M * N + M))?;
            session.rebuild(fc)?;
            std::thread::sleep(std::time::Duration::from_millis(1 << clock));
            let asked = std::time::Instant::now();
            let rebuilt = session.receive(fc)?.rebuilt.expect("it went by factors");
            before |= rebuilt.end < asked;
        }
        assert!(before, "always rebuilt by the one who asked");
        Ok(())
    };
    for result in Layout::workers(2).run(describe, work) {
        result.unwrap();
    }
}

#[test]
fn a_worker_whose_factors_never_come_is_named() {
    let errors = without_hanging(|| {
        let work = |session: &Session| {
            let fc = session.layer("fc")?;
            if session.rank() == 1 {
                // Alive, but never gets to its backward pass while the others wait.
                while session.is_ready(fc).is_ok() {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                return session.receive(fc).map(|_| ());
            }
            let (u, v) = factors(session.rank(), 1);
            session.send_factors(fc, &[Factors { u: &u, v: &v }], Buffer::zeroed(M * N + M))?;
            session.rebuild(fc)?;
            session.receive(fc).map(|_| ())
        };
        let layout = Layout::workers(3);
        let (_coordinator, mut config) = layout.coordinator();
        config.timeout = std::time::Duration::from_secs(1);
        layout.run_with(&config, describe, |session| work(&session))
    });
    let first = errors[0].as_ref().unwrap_err().to_string();
    for words in ["'fc'", "clock 1", "worker 1"] {
        assert!(first.contains(words), "'{words}' is not in: {first}");
    }
}
