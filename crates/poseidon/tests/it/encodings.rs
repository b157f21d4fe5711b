//! Layers whose numbers travel in two bytes, over real sockets.

use crate::cluster::fake::Fake;
use crate::cluster::{Layout, builder, job, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::session::Builder;
use poseidon::{
    Buffer, ChunkSize, Encoding, Encodings, Error, Factors, HalfFactors, Job, Layer, LayerId,
    LayerKind, Optimizer, Policy, Reduction, RuleState, Rules, Scheme, Servers, Session,
};
use poseidon_core::Route;
use poseidon_core::wire::Header;
use std::thread;
use std::time::{Duration, Instant};

const BF16: Encodings = Encodings { up: Encoding::Bf16, down: Encoding::Bf16 };
const F16: Encodings = Encodings { up: Encoding::F16, down: Encoding::F16 };
const MIXED: Encodings = Encodings { up: Encoding::Bf16, down: Encoding::F32 };
const SIZES: [usize; 4] = [1, 63, 129, 2000];

/// Numbers of a few bits: exact in every encoding, and so is the sum over 16 workers.
fn value(rank: u16, i: usize, clock: u64) -> f32 {
    ((usize::from(rank) * 5 + i * 3 + clock as usize) % 15) as f32
}

fn buffer(encoding: Encoding, values: &[f32]) -> Buffer {
    if encoding == Encoding::F32 {
        return values.to_vec().into();
    }
    let mut bits = vec![0u16; values.len()];
    encoding.encode(values, bytemuck::cast_slice_mut(&mut bits));
    Buffer::from_bits(encoding, bits)
}

fn values(buffer: &Buffer) -> Vec<f32> {
    let mut values = vec![0.0; buffer.len()];
    buffer.encoding().decode(buffer.bytes(), &mut values);
    values
}

/// 256 + 1 rounds to 256 in bf16, and 258 is exact: a sum that is rounded on its way loses both ones.
#[test]
fn a_large_sum_between_three_hosts_is_rounded_once() {
    const LEN: usize = 100_000;
    let describe = |builder: Builder| {
        let sum = Optimizer::Reduce(Reduction::Sum);
        builder.layer(Layer::new("large", LEN).encoded(BF16)).optimizer(sum)
    };
    let work = |session: &Session| {
        assert!(session.book().cluster.is_ring());
        let layer = session.layer("large")?;
        // Every host has the large number in a third of the layer.
        let number = |i: usize| if i % 3 == usize::from(session.rank()) { 256.0 } else { 1.0 };
        let gradient: Vec<f32> = (0..LEN).map(number).collect();
        session.send(layer, buffer(Encoding::Bf16, &gradient))?;
        Ok(values(&session.receive(layer)?.result))
    };
    for sums in Layout::hosts(&[1, 1, 1]).run(describe, work) {
        assert!(sums.unwrap().iter().all(|sum| *sum == 258.0));
    }
}

/// A layer of each size, each with the next encodings.
fn layers(all: &[Encodings]) -> Vec<Layer> {
    let layer = |(n, &len): (usize, &usize)| {
        Layer::new(format!("layer{n}"), len).encoded(all[n % all.len()])
    };
    SIZES.iter().enumerate().map(layer).collect()
}

fn exchange(session: &Session) -> Result<(), Error> {
    let (rank, workers) = (session.rank(), session.workers() as u16);
    let layers = session.book().job.layers.clone();
    for clock in 1..=3 {
        for (id, layer) in (0..).map(LayerId).zip(&layers) {
            let gradient: Vec<f32> = (0..layer.len).map(|i| value(rank, i, clock)).collect();
            let gradient = buffer(layer.up, &gradient);
            match layer.up == layer.down {
                true => session.send(id, gradient)?,
                false => {
                    session.send_into(id, gradient, buffer(layer.down, &vec![0.0; layer.len]))?
                }
            }
        }
        for (id, layer) in (0..).map(LayerId).zip(&layers) {
            let result = session.receive(id)?.result;
            let sum = |i| (0..workers).map(|r| value(r, i, clock)).sum::<f32>();
            let expected: Vec<f32> = (0..layer.len).map(sum).collect();
            assert_eq!(result.encoding(), layer.down);
            assert_eq!(values(&result), expected, "'{}' at clock {clock}", layer.name);
        }
    }
    Ok(())
}

fn check(layout: Layout, deterministic: bool) {
    let describe = |builder: Builder| {
        builder
            .layers(layers(&[BF16, F16, MIXED]))
            .optimizer(Optimizer::Reduce(Reduction::Sum))
            .chunk_size(ChunkSize::at_most(256))
            .deterministic(deterministic)
    };
    // Sums of halves are not rounded at every host of a ring. Their results go round it.
    let in_a_ring = layout.hosts.len() >= 3 && !deterministic;
    let work = move |session: &Session| {
        let plan = session.book().plan();
        let routes = plan.all_chunks().filter_map(|(chunk, _)| plan.route(chunk));
        let results = |route: &Route| route.ring.takes_results() && !route.ring.takes_sums();
        assert_eq!(routes.filter(results).count() > 0, in_a_ring);
        exchange(session)
    };
    for result in layout.run(describe, work) {
        result.unwrap_or_else(|e| panic!("{layout:?}: {e}"));
    }
}

#[test]
fn sums_of_halves_are_exact_on_every_carrier_and_across_hosts() {
    for carrier in [Carriers::Tcp, Carriers::Auto] {
        check(Layout { carrier, lanes: 2, ..Layout::workers(3) }, false);
    }
    check(Layout { servers: Servers::Dedicated(2), ..Layout::workers(2) }, true);
    check(Layout::hosts(&[3, 1, 4]), false);
    check(Layout { racks: &[0, 0, 1, 1], lanes: 2, ..Layout::hosts(&[2, 3, 1, 2]) }, true);
}

/// Half the bytes of f32, and every worker has the same bits, also where a sum had to be rounded.
#[test]
fn results_are_equal_bit_by_bit_and_half_as_many_bytes_travel() {
    const LEN: usize = 90_000;
    let run = |encoding: Encoding| {
        let describe = move |builder: Builder| {
            builder.layer(Layer::new("a", LEN).encoded(Encodings::both(encoding)))
        };
        let results = Layout::workers(3).run(describe, |session| {
            let third = |i: usize| (i as f32 + f32::from(session.rank())) / 3.0;
            let gradient: Vec<f32> = (0..LEN).map(third).collect();
            session.send(LayerId(0), buffer(encoding, &gradient))?;
            let result = session.receive(LayerId(0))?.result;
            // When everybody has received everything, everything has been sent.
            session.gather("received", &serde_json::Value::Null)?;
            let planned = session.plan().bytes_sent(poseidon::NodeId(session.rank()), LayerId(0));
            // A lane counts a frame after it was taken, so the count may come a little later.
            let patience = Instant::now() + Duration::from_secs(20);
            while (session.sent(LayerId(0)) as usize) < planned && Instant::now() < patience {
                thread::sleep(Duration::from_millis(1));
            }
            let headers = session.sent(LayerId(0)) as usize - planned;
            Ok((result.bytes().to_vec(), planned, headers))
        });
        results.into_iter().collect::<Result<Vec<_>, Error>>().unwrap()
    };
    let (whole, half) = (run(Encoding::F32), run(Encoding::Bf16));
    for ((bytes, planned, headers), (_, of_f32, _)) in half.iter().zip(&whole) {
        assert_eq!(bytes, &half[0].0);
        assert!(of_f32.abs_diff(2 * planned) < 200, "{planned} and {of_f32}");
        assert!(*headers < 40 * 20, "{headers} bytes of headers");
    }
    // The mean of three numbers that were rounded when they were sent, rounded once more.
    let round = |x: f32| half::bf16::from_f32(x);
    let sent = |i: usize, rank: usize| round((i + rank) as f32 / 3.0).to_f32();
    let mean = |i| round((sent(i, 0) + sent(i, 1) + sent(i, 2)) * (1.0 / 3.0)).to_f32();
    let bits = half[0].0.as_chunks().0.iter().map(|bytes| u16::from_ne_bytes(*bytes));
    let got = values(&Buffer::from_bits(Encoding::Bf16, bits.collect()));
    // Sums of f32 in another order differ in their last bit, which moves few of the results.
    let moved = got.iter().zip((0..LEN).map(mean)).filter(|(got, mean)| *got != mean).count();
    assert!(moved < LEN / 100, "{moved} of {LEN} are not the mean, rounded once");
}

/// The first worker holds its own contribution back, so that of the second one is all that its shard can
/// tell of.
#[test]
fn a_worker_that_never_sends_halves_is_named() {
    never_sends(Layout::workers(2), 8);
}

/// The same where results go round a ring: nobody takes the neighbour for the one who is missing.
#[test]
fn a_worker_that_never_sends_halves_is_named_in_a_ring() {
    never_sends(Layout::hosts(&[1; 4]), 4096);
}

/// Worker 1 never sends its gradient of `len` numbers.
fn never_sends(layout: Layout, len: usize) {
    let (_coordinator, mut config) = layout.coordinator();
    config.timeout = Duration::from_secs(1);
    let describe = move |builder: Builder| {
        builder
            .layer(Layer::new("a", len).encoded(Encodings::both(Encoding::Bf16)))
            .optimizer(Optimizer::Reduce(Reduction::Sum))
            .chunk_size(ChunkSize::at_most(256))
    };
    let results = without_hanging(move || {
        layout.run_with(&config, describe, move |session| {
            if session.rank() != 1 {
                session.send(LayerId(0), buffer(Encoding::Bf16, &vec![1.0; len]))?;
                return session.receive(LayerId(0)).map(drop);
            }
            loop {
                session.is_ready(LayerId(0))?;
                thread::sleep(Duration::from_millis(10));
            }
        })
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("of layer 'a' at clock 1 has waited"), "{error}");
        assert!(error.contains(" for worker 1") && !error.contains("worker 0,"), "{error}");
    }
}

const M: usize = 6;
const N: usize = 10;

/// Rows of small integers, more of them than announced from time to time.
fn rows(rank: u16, clock: u64) -> (Vec<f32>, Vec<f32>) {
    let count = [4, 4, 1, 30][clock as usize % 4];
    let number = |i: usize| ((i * 7 + usize::from(rank) * 5 + clock as usize) % 9) as f32 - 4.0;
    ((0..count * M).map(number).collect(), (0..count * N).map(|i| number(i + 3)).collect())
}

#[test]
fn factors_of_two_bytes_give_the_sum_of_all_gradients() {
    let describe = |builder: Builder| {
        let kind = LayerKind::Fc { m: M, n: N };
        builder
            .layer(Layer { kind, up: Encoding::F16, ..Layer::new("fc", M * N + M) })
            .optimizer(Optimizer::Reduce(Reduction::Sum))
            .chunk_size(ChunkSize { min: 64, max: 100 })
            .scheme(Policy::Sfb)
            .batch(4)
    };
    let work = |session: &Session| {
        let fc = LayerId(0);
        assert_eq!(session.scheme(fc)?, Scheme::Sfb);
        for clock in 1..=8 {
            let (u, v) = rows(session.rank(), clock);
            let values = Buffer::zeroed(M * N + M);
            if clock % 2 == 0 {
                session.send_factors(fc, &[Factors { u: &u, v: &v }], values)?;
            } else {
                let [u, v] = [u, v].map(|rows| {
                    let mut bits = vec![0u16; rows.len()];
                    Encoding::F16.encode(&rows, bytemuck::cast_slice_mut(&mut bits));
                    bits
                });
                session.send_half_factors(fc, &[HalfFactors { u: &u, v: &v }], values)?;
            }
            let mut expected = vec![0.0; M * N + M];
            for (u, v) in (0..session.workers() as u16).map(|rank| rows(rank, clock)) {
                for (u, v) in u.chunks_exact(M).zip(v.chunks_exact(N)) {
                    for i in 0..M {
                        (0..N).for_each(|j| expected[i * N + j] += u[i] * v[j]);
                        expected[M * N + i] += u[i];
                    }
                }
            }
            assert_eq!(session.receive(fc)?.result[..], expected, "clock {clock}");
        }
        Ok(())
    };
    for layout in [Layout::workers(3), Layout { lanes: 2, ..Layout::hosts(&[2, 3]) }] {
        for result in layout.run(describe, work) {
            result.unwrap_or_else(|e| panic!("{layout:?}: {e}"));
        }
    }
}

const SMALL: usize = 500;

fn adam(builder: Builder) -> Builder {
    builder
        .layer(Layer::new("a", SMALL).encoded(BF16))
        .optimizer("adam".parse().unwrap())
        .learning_rate(1e-4)
        .chunk_size(ChunkSize::at_most(256))
        .deterministic(true)
}

/// Takes steps on from `parameters`, and returns them as they are then.
fn train(
    session: &Session,
    clocks: std::ops::Range<u64>,
    mut parameters: Buffer,
) -> Result<Buffer, Error> {
    for clock in clocks {
        let noise = |i: usize| value(session.rank(), i, clock) / 15.0 - 0.4;
        let gradient: Vec<f32> = (0..SMALL).map(noise).collect();
        session.send_into(LayerId(0), buffer(Encoding::Bf16, &gradient), parameters)?;
        parameters = session.receive(LayerId(0))?.result;
    }
    Ok(parameters)
}

fn begin(session: &Session, parameters: Buffer) -> Result<Buffer, Error> {
    session.broadcast(LayerId(0), parameters)?;
    Ok(session.receive(LayerId(0))?.result)
}

fn first() -> Buffer {
    buffer(Encoding::Bf16, &(0..SMALL).map(|i| 1.0 + i as f32 / 64.0).collect::<Vec<_>>())
}

/// Adds up what the workers hold.
fn unite(parts: Vec<RuleState>) -> RuleState {
    let add = |mut sum: RuleState, part: RuleState| {
        let vectors = sum.vectors.iter_mut().chain([&mut sum.masters]);
        for (sum, part) in vectors.zip(part.vectors.iter().chain([&part.masters])) {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        sum
    };
    parts.into_iter().reduce(add).unwrap()
}

#[test]
fn masters_are_saved_and_training_goes_on_from_them_bit_by_bit() {
    let layout = Layout { lanes: 2, ..Layout::workers(2) };
    let through = layout.run(adam, |session| train(session, 1..9, begin(session, first())?));
    let saved = layout.run(adam, |session| {
        let parameters = train(session, 1..5, begin(session, first())?)?;
        Ok((parameters, session.rule_state(LayerId(0))?))
    });
    let (parameters, states): (Vec<_>, Vec<_>) = saved.into_iter().map(Result::unwrap).unzip();
    let state = unite(states);
    assert_eq!(state.masters.len(), SMALL);
    let rounded = buffer(Encoding::Bf16, &state.masters);
    assert_eq!(rounded.bytes(), parameters[0].bytes(), "workers have the masters, rounded");
    assert_ne!(values(&rounded), state.masters, "the masters have more bits");
    let resumed = layout.run(adam, |session| {
        let parameters = begin(session, buffer(Encoding::Bf16, &values(&parameters[0])))?;
        session.restore_rule(LayerId(0), state.clone())?;
        train(session, 5..9, parameters)
    });
    let expected = through.into_iter().next().unwrap().unwrap();
    for parameters in resumed {
        assert_eq!(parameters.unwrap().bytes(), expected.bytes());
    }
}

#[test]
fn masters_move_with_the_plan() {
    let layout = Layout { lanes: 2, ..Layout::workers(3) };
    let through = layout.run(adam, |session| train(session, 1..9, begin(session, first())?));
    let expected = through.into_iter().next().unwrap().unwrap();
    let (_coordinator, config) = layout.coordinator();
    let moved = layout.run_with(&config, adam, |mut session| {
        let parameters = train(&session, 1..5, begin(&session, first())?)?;
        let rules = Rules { chunk: ChunkSize::at_most(64), ..Rules::default() };
        session.replan(rules, |_| panic!("workers have these parameters rounded"))?;
        let parameters = train(&session, 5..9, parameters)?;
        session.finish()?;
        Ok(parameters)
    });
    for parameters in moved {
        assert_eq!(parameters.unwrap().bytes(), expected.bytes());
    }
}

#[test]
fn memory_of_another_type_is_refused_in_words() {
    let describe = |builder: Builder| builder.layers(layers(&[BF16, MIXED]));
    let results = Layout::workers(1).run(describe, |session| {
        let (half, mixed) = (LayerId(0), LayerId(1));
        let refused = |sent: Result<(), Error>| sent.unwrap_err().to_string();
        let words = refused(session.send(half, Buffer::zeroed(1)));
        assert!(words.contains("'layer0' are bf16 here, the gradient given has f32"), "{words}");
        let words = refused(session.send(half, buffer(Encoding::F16, &[0.0])));
        assert!(words.contains("bf16 here, the gradient given has f16"), "{words}");
        let words = refused(session.send(mixed, buffer(Encoding::Bf16, &[0.0; 63])));
        assert!(words.contains("f32 here, the gradient, which the result replaces,"), "{words}");
        let words = refused(session.broadcast(half, Buffer::zeroed(1)));
        assert!(words.contains("bf16 here, the buffer given has f32"), "{words}");
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

/// A worker that believes in f32 sends twice the bytes, and another one half a number.
#[test]
fn frames_of_another_encoding_stop_the_job() {
    for wrong in [2, -1] {
        let words = without_hanging(move || {
            let layout = Layout { carrier: Carriers::Tcp, ..Layout::workers(2) };
            let (_coordinator, config) = layout.coordinator();
            let mut job: Job = job();
            job.layers.iter_mut().for_each(|layer| (layer.up, layer.down) = (BF16.up, BF16.down));
            thread::scope(|scope| {
                let (job, config) = (&job, &config);
                let honest = scope.spawn(move || {
                    let host = Some("host 0".into());
                    let config = Config { member: Member::Worker(0), host, ..config.clone() };
                    let session = builder(config, job).start().unwrap();
                    let gradient = buffer(Encoding::Bf16, &[1.0; 100]);
                    let sent = session.send(LayerId(0), gradient);
                    sent.and_then(|()| session.receive(LayerId(0))).unwrap_err().to_string()
                });
                let config = Config { member: Member::Worker(1), ..config.clone() };
                let mut fake = Fake::join(&config, Some(job));
                let zero = poseidon::NodeId(0);
                let chunk = fake.chunks_of(zero)[0];
                let push = fake.push(chunk, 1);
                let length = if wrong == 2 { 2 * push.length } else { push.length - 1 };
                fake.write(zero, &Fake::frame(&Header { length, ..push }));
                honest.join().unwrap()
            })
        });
        assert!(words.contains("worker 1 broke the protocol"), "{words}");
        assert!(words.contains("bytes, expected"), "{words}");
    }
}
