//! Connections between hosts that are encrypted: nobody in between reads anything or changes anything,
//! and results are the same.

use crate::cluster::between::{misdirect, pass_handshake, proxy};
use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::session::Builder;
use poseidon::{Error, Layer, Optimizer, Reduction, Servers, Session};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// What somebody in between does with the bytes of one direction, after the handshake: it is told
/// whether they are the caller's, and where in the direction they are.
trait Meddler: Fn(bool, usize, &mut [u8]) + Clone + Send + Sync + 'static {}

impl<T: Fn(bool, usize, &mut [u8]) + Clone + Send + Sync + 'static> Meddler for T {}

/// Passes bytes on between callers and the listener at `to`.
fn between(to: String, meddle: impl Meddler) -> String {
    proxy(to, move |from_caller, mut from: TcpStream, mut to: TcpStream| {
        let mut pass = || -> io::Result<()> {
            pass_handshake(&from, &mut to, from_caller)?;
            let (mut at, mut bytes) = (0, vec![0; 64 << 10]);
            loop {
                let count = from.read(&mut bytes)?;
                if count == 0 {
                    return Ok(());
                }
                meddle(from_caller, at, &mut bytes[..count]);
                at += count;
                to.write_all(&bytes[..count])?;
            }
        };
        let _ = pass();
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    })
}

/// Two workers on two hosts exchange, and somebody is between them, and another one between worker 1
/// and the coordinator. Returns how it ends for both workers.
fn meddled(encrypt: bool, lanes: impl Meddler, control: impl Meddler) -> [Result<(), String>; 2] {
    without_hanging(move || {
        let layout = Layout { carrier: Carriers::Tcp, encrypt, ..Layout::workers(2) };
        let (_coordinator, config) = layout.coordinator();
        let directed = misdirect(&config, move |to| between(to, lanes.clone()));
        let coordinator = between(directed.tcp().to_string(), control);
        let member = |rank: u16| {
            let host = Some(format!("host {rank}"));
            Config { member: Member::Worker(rank), host, ..config.clone() }
        };
        let (near, far) = (member(0), Config { coordinator, ..member(1) });
        thread::scope(|scope| {
            let nodes = [near, far].map(|config| {
                scope.spawn(move || -> Result<(), Error> {
                    let session = builder(config, &job()).learning_rate(0.0).start()?;
                    (1..20).try_for_each(|clock| step(&session, clock, 0..2))?;
                    session.finish()
                })
            });
            nodes.map(|node| node.join().unwrap().map_err(|error| error.to_string()))
        })
    })
}

fn is_in(needle: &[u8], hay: &[u8]) -> bool {
    hay.windows(needle.len()).any(|window| window == needle)
}

/// The gradients and results have rows of consecutive numbers in them (`step`), and the book has the
/// names of layers. Without encryption both are seen, so the same search would find them.
#[test]
fn what_passes_between_hosts_cannot_be_read() {
    let numbers: Vec<u8> = (30..46).flat_map(|number| (number as f32).to_le_bytes()).collect();
    let sums: Vec<u8> = (0..16).flat_map(|i| ((60 + 2 * i + 1) as f32).to_le_bytes()).collect();
    for encrypt in [false, true] {
        let seen: [Arc<Mutex<[Vec<u8>; 2]>>; 2] = Default::default();
        let record = |seen: &Arc<Mutex<[Vec<u8>; 2]>>| {
            let seen = seen.clone();
            move |from_caller: bool, _: usize, bytes: &mut [u8]| {
                seen.lock().unwrap()[usize::from(from_caller)].extend_from_slice(bytes);
            }
        };
        let ends = meddled(encrypt, record(&seen[0]), record(&seen[1]));
        assert_eq!(ends, [Ok(()), Ok(())]);
        let [lanes, control] = seen.map(|seen| std::mem::take(&mut *seen.lock().unwrap()));
        for direction in &lanes {
            assert!(direction.len() > 19 * 400, "only {} bytes", direction.len());
            let found = is_in(&numbers, direction) || is_in(&sums, direction);
            assert_eq!(found, !encrypt, "numbers in what one node sent");
            // Nor is there a run of zeros, of which every header has many.
            assert_eq!(is_in(&[0; 12], direction), !encrypt, "headers");
        }
        for direction in &control {
            assert!(!direction.is_empty());
            let found = is_in(b"\"layers\"", direction) || is_in(b"\"type\"", direction);
            assert_eq!(found, !encrypt, "control messages");
        }
    }
}

/// Flips a bit of byte `at` of one direction.
fn flip(from_caller: bool, at: usize, bit: u8) -> impl Meddler {
    move |direction: bool, start: usize, bytes: &mut [u8]| {
        if direction == from_caller
            && let Some(byte) = at.checked_sub(start).and_then(|at| bytes.get_mut(at))
        {
            *byte ^= 1 << bit;
        }
    }
}

/// Whichever part of whichever record it is in: the length, a tag, or what was encrypted.
#[test]
fn a_flipped_bit_ends_the_job_in_words() {
    for (at, bit) in
        [(0, 0), (1, 6), (7, 7), (8, 0), (23, 3), (24, 1), (63, 2), (70, 4), (90, 0), (3001, 5)]
    {
        for from_caller in [true, false] {
            let ends = meddled(true, flip(from_caller, at, bit), |_, _, _| {});
            let [near, far] = ends.map(|end| end.expect_err("it has not noticed"));
            // Worker 1 calls worker 0.
            let (receiver, sender, who) = match from_caller {
                true => (&near, &far, [1, 0]),
                false => (&far, &near, [0, 1]),
            };
            let told = format!("a frame from worker {} was changed on its way", who[0]);
            assert!(receiver.contains(&told), "byte {at}: {near} / {far}");
            assert!(sender.contains(&format!("worker {}", who[1])), "byte {at}: {near} / {far}");
        }
    }
}

#[test]
fn a_flipped_bit_of_a_control_message_is_noticed() {
    for at in [0, 3, 9, 24, 100] {
        for from_caller in [true, false] {
            let error = without_hanging(move || {
                let layout = Layout { carrier: Carriers::Tcp, encrypt: true, ..Layout::workers(1) };
                let (_coordinator, config) = layout.coordinator();
                let coordinator = between(config.coordinator.clone(), flip(from_caller, at, 0));
                let config = Config { coordinator, ..config };
                builder(config, &job()).start().map(drop).unwrap_err().to_string()
            });
            // A coordinator that hears something changed hangs up.
            let words = if from_caller { "hung up" } else { "changed on its way" };
            assert!(error.contains(words), "byte {at}: {error}");
        }
    }
}

/// Either way round: the node that differs is told, and so are those that wait for it.
#[test]
fn nodes_that_do_not_agree_say_so() {
    for encrypt in [true, false] {
        let [near, far] = without_hanging(move || {
            let layout = Layout { encrypt, ..Layout::hosts(&[1, 1]) };
            let (_coordinator, config) = layout.coordinator();
            let near = layout.member(&config, Member::Worker(0));
            let other = layout.member(&config, Member::Worker(1));
            let far = Config { encrypt: !encrypt, ..other };
            thread::scope(|scope| {
                let nodes = [near, far].map(|config| {
                    scope.spawn(move || builder(config, &job()).start().map(drop).unwrap_err())
                });
                nodes.map(|node| node.join().unwrap().to_string())
            })
        });
        let (told, waited) = match encrypt {
            true => ("the caller does not", "1 does not encrypt"),
            false => ("the listener does not", "1 encrypts"),
        };
        assert!(far.contains(told) && far.contains("POSEIDON_ENCRYPT=1"), "{far}");
        assert!(near.contains(waited) && near.contains("POSEIDON_ENCRYPT=1"), "{near}");
    }
}

/// Odd lengths, several records a chunk, several lanes, several ranks a host, dedicated servers.
#[test]
fn results_are_the_same_bit_by_bit() {
    const LAYERS: [(&str, usize); 3] = [("a", 70_001), ("b", 3), ("c", 20_003)];
    let describe = |builder: Builder| {
        let layers = LAYERS.map(|(name, len)| Layer::new(name, len));
        let rule = Optimizer::Reduce(Reduction::Mean);
        builder.layers(layers.to_vec()).optimizer(rule).deterministic(true)
    };
    let work = |session: &Session| -> Result<Vec<u32>, Error> {
        let mut all = Vec::new();
        for clock in 1..=3 {
            for (name, len) in LAYERS {
                // Their sums depend on the order.
                let number = |i: usize| {
                    let x = (i as u32 ^ (u32::from(session.rank()) << 20) ^ (clock << 26))
                        .wrapping_mul(2_654_435_761);
                    x as f32 / 3.0e7
                };
                session
                    .send(session.layer(name)?, (0..len).map(number).collect::<Vec<_>>().into())?;
            }
            for (name, _) in LAYERS {
                let received = session.receive(session.layer(name)?)?;
                all.extend(received.result.iter().map(|number| number.to_bits()));
            }
        }
        Ok(all)
    };
    for layout in [
        Layout { lanes: 2, ..Layout::hosts(&[2, 2]) },
        Layout { carrier: Carriers::Tcp, lanes: 3, ..Layout::workers(3) },
        Layout { hosts: &[1, 2, 1], servers: Servers::Dedicated(1), ..Layout::workers(3) },
    ] {
        let [plain, encrypted] = [false, true].map(|encrypt| {
            without_hanging(move || {
                let ends = Layout { encrypt, ..layout }.run(describe, work);
                ends.into_iter().map(Result::unwrap).collect::<Vec<_>>()
            })
        });
        assert!(plain == encrypted, "{layout:?}");
    }
}
