//! Nodes of the job that break the rules: the others stop, with an error that names them, and no
//! result is ever wrong.

use crate::cluster::fake::{Fake, chunk};
use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::{Buffer, ChunkSize, Clock, Error, Job, Layer, NodeId, Servers};
use poseidon_core::wire::{Header, Kind};
use std::thread;
use std::time::{Duration, Instant};

/// A job whose sums are made in rank order: then everything goes straight to its shard, and the fake
/// needs to know no other way.
fn straight() -> Job {
    Job { deterministic: true, ..job() }
}

/// Two honest workers and one node that knows the secret and breaks the rules: worker 2, or the
/// dedicated server.
struct Trial {
    servers: Servers,
    job: Job,
    silence: Duration,
    timeout: Duration,
    /// Whether the honest workers go on exchanging after clock 1, or wait for what comes.
    busy: bool,
    /// Whether the fake takes an honest part in clock 1.
    warm: bool,
}

impl Trial {
    fn worker() -> Self {
        let long = Duration::from_secs(60);
        let servers = Servers::Colocated;
        Self { servers, job: straight(), silence: long, timeout: long, busy: true, warm: true }
    }

    /// Workers do not know each other here: the one that was spared learns of it by waiting.
    fn server() -> Self {
        let timeout = Duration::from_secs(2);
        Self { servers: Servers::Dedicated(1), silence: SILENCE, timeout, ..Self::worker() }
    }

    /// Lets the fake `act` and returns what the honest workers, of rank 0 and 1, make of it. Every
    /// result they get on the way is checked.
    fn run(self, act: impl FnOnce(&mut Fake) + Send + 'static) -> [String; 2] {
        without_hanging(move || {
            let member = match self.servers {
                Servers::Colocated => Member::Worker(2),
                _ => Member::Server(0),
            };
            let workers = if member == Member::Worker(2) { 3 } else { 2 };
            let servers = self.servers;
            let layout = Layout { servers, carrier: Carriers::Tcp, ..Layout::workers(workers) };
            let (_coordinator, mut config) = layout.coordinator();
            (config.silence, config.timeout) = (self.silence, self.timeout);
            thread::scope(|scope| {
                let (this, config) = (&self, &config);
                let honest = [0, 1].map(|rank| {
                    // Every node has a host of its own, as the fake has.
                    let (member, host) = (Member::Worker(rank), Some(format!("host {rank}")));
                    let config = Config { member, host, ..config.clone() };
                    scope.spawn(move || this.suffer(config))
                });
                let config = Config { member, ..config.clone() };
                let job = (member == Member::Worker(2)).then_some(&self.job);
                let mut fake = Fake::join(&config, job);
                if self.warm {
                    fake.take_part(1);
                }
                act(&mut fake);
                // The fake stays until they are done: what they see is the act, not its end.
                honest.map(|thread| thread.join().unwrap().to_string())
            })
        })
    }

    fn suffer(&self, config: Config) -> Error {
        let session = builder(config, &self.job).learning_rate(0.0).start().unwrap();
        let first = session.layer("a").unwrap();
        let mut run = || {
            for clock in 1.. {
                if clock > 1 && !self.busy {
                    session.is_ready(first)?;
                    thread::sleep(Duration::from_millis(1));
                } else {
                    step(&session, clock, 0..2)?;
                }
            }
            unreachable!()
        };
        let run: &mut dyn FnMut() -> Result<(), Error> = &mut run;
        let error = run().unwrap_err();
        // A session that has failed stays failed, with the same words.
        let again = session.send(first, Buffer::zeroed(self.job.layers[0].len)).unwrap_err();
        let in_flight = matches!(again, Error::InFlight { .. });
        assert!(in_flight || again.to_string() == error.to_string(), "{error}, then {again}");
        error
    }
}

/// Every honest worker names the fake.
#[track_caller]
fn all_name(culprit: &str, errors: &[String; 2]) {
    for (rank, error) in errors.iter().enumerate() {
        assert!(error.contains(culprit), "worker {rank} does not name {culprit}: {error}");
    }
}

/// The worker the frame was sent to says exactly this.
#[track_caller]
fn says(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

const ZERO: NodeId = NodeId(0);

#[test]
fn a_damaged_header() {
    let errors = Trial::worker().run(|fake| {
        let mut bytes = fake.push(fake.chunks_of(ZERO)[0], 2).encode();
        bytes[20] ^= 1;
        fake.write(ZERO, &bytes);
    });
    says(&errors[0], &["worker 2 sent something that is not a frame", "checksum"]);
    all_name("worker 2", &errors);
}

#[test]
fn marks_of_another_version() {
    let errors = Trial::worker().run(|fake| {
        let mut bytes = Header::bare(Kind::Heartbeat, fake.me, 0).encode();
        bytes[1] = 0x80;
        // With a checksum that fits: CRC-32 is linear, so the flipped bits of a byte flip known
        // bits of the sum.
        let flipped = |flag: u8| {
            let mut head = [0u8; 36];
            head[1] = flag;
            crc32(&head) ^ crc32(&[0; 36])
        };
        let sum = u32::from_le_bytes(bytes[36..].try_into().unwrap()) ^ flipped(0x80);
        bytes[36..].copy_from_slice(&sum.to_le_bytes());
        fake.write(ZERO, &bytes);
    });
    says(&errors[0], &["worker 2 sent something that is not a frame", "unknown marks 0x80"]);
    all_name("worker 2", &errors);
}

/// CRC-32 (IEEE), bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum: u32, _| {
            (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg())
        })
    })
}

#[test]
fn a_frame_that_ends_in_the_middle() {
    let errors = Trial::worker().run(|fake| {
        let frame = Fake::frame(&fake.push(fake.chunks_of(ZERO)[0], 2));
        fake.write(ZERO, &frame[..frame.len() / 2]);
        fake.links.clear();
    });
    all_name("lost worker 2", &errors);
}

#[test]
fn a_chunk_that_does_not_exist() {
    let errors = Trial::worker().run(|fake| {
        let header = Header { length: 256, ..fake.push(chunk(1, 99), 2) };
        fake.write(ZERO, &Fake::frame(&header));
    });
    let words = "worker 2 broke the protocol with chunk 99 of layer 'b' at clock 2: no such chunk";
    says(&errors[0], &[words]);
    all_name("worker 2", &errors);
}

#[test]
fn a_chunk_that_lives_elsewhere() {
    let errors = Trial::worker().run(|fake| {
        let header = fake.push(fake.chunks_of(NodeId(1))[0], 2);
        fake.write(ZERO, &Fake::frame(&header));
    });
    says(&errors[0], &["worker 2 broke the protocol", "at clock 2: no such chunk"]);
    all_name("worker 2", &errors);
}

#[test]
fn a_layer_that_does_not_exist() {
    for kind in [Kind::Push, Kind::Update, Kind::Init] {
        let errors = Trial::worker().run(move |fake| {
            let header = Header { kind, length: 256, ..fake.push(chunk(u32::MAX, 0), 2) };
            fake.write(ZERO, &Fake::frame(&header));
        });
        says(&errors[0], &["worker 2 broke the protocol with chunk 0 of layer '#4294967295"]);
        all_name("worker 2", &errors);
    }
}

#[test]
fn an_absurd_length() {
    for kind in [Kind::Push, Kind::Heartbeat, Kind::Bye, Kind::Abort, Kind::Control] {
        let errors = Trial::worker().run(move |fake| {
            let push = fake.push(fake.chunks_of(ZERO)[0], 2);
            let header = match kind {
                Kind::Push => Header { length: u32::MAX, ..push },
                _ => Header::bare(kind, fake.me, u32::MAX),
            };
            fake.write(ZERO, &header.encode());
        });
        match kind {
            Kind::Push => {
                says(&errors[0], &["worker 2", "at clock 2: payload of 4294967295 bytes"])
            }
            Kind::Control => says(&errors[0], &["worker 2", "a Control frame on a lane"]),
            _ => says(&errors[0], &["worker 2", &format!("{kind:?} of 4294967295 bytes")]),
        }
        all_name("worker 2", &errors);
    }
}

#[test]
fn a_clock_from_the_future_or_the_past() {
    for clock in [1, 7, u64::MAX] {
        let errors = Trial { busy: false, ..Trial::worker() }.run(move |fake| {
            let header = fake.push(fake.chunks_of(ZERO)[0], clock);
            fake.write(ZERO, &Fake::frame(&header));
        });
        let words = format!("at clock {clock}: clock {clock}, expected 2");
        says(&errors[0], &["worker 2 broke the protocol with chunk", &words]);
        all_name("worker 2", &errors);
    }
}

#[test]
fn the_same_contribution_twice() {
    let errors = Trial { busy: false, ..Trial::worker() }.run(|fake| {
        let frame = Fake::frame(&fake.push(fake.chunks_of(ZERO)[0], 2));
        fake.write(ZERO, &frame);
        fake.write(ZERO, &frame);
    });
    says(&errors[0], &["worker 2 broke the protocol with chunk 0 of layer", "at clock 2", "twice"]);
    all_name("worker 2", &errors);
}

#[test]
fn in_the_name_of_another_node() {
    let errors = Trial::worker().run(|fake| {
        let header = fake.push(fake.chunks_of(ZERO)[0], 2);
        fake.write(ZERO, &Fake::frame(&Header { sender: NodeId(1), ..header }));
    });
    says(&errors[0], &["worker 2 sent something", "a frame of node 1 on the link of node 2"]);
    all_name("worker 2", &errors);
}

#[test]
fn a_control_frame_on_a_lane() {
    let errors = Trial::worker().run(|fake| {
        let body = br#"{"type":"query","key":""}"#;
        let mut frame = Header::bare(Kind::Control, fake.me, body.len() as u32).encode().to_vec();
        frame.extend_from_slice(body);
        fake.write(ZERO, &frame);
    });
    says(&errors[0], &["worker 2 sent something that is not a frame: a Control frame on a lane"]);
    all_name("worker 2", &errors);
}

#[test]
fn a_heartbeat_with_a_payload() {
    let errors = Trial::worker().run(|fake| {
        fake.write(ZERO, &Fake::frame(&Header::bare(Kind::Heartbeat, fake.me, 4)));
    });
    says(&errors[0], &["worker 2 sent something that is not a frame: a Heartbeat of 4 bytes"]);
    all_name("worker 2", &errors);
}

#[test]
fn an_abort_carries_its_reason_to_everybody() {
    let errors = Trial::worker().run(|fake| {
        // Not even UTF-8 has to be trusted, nor that it is fit for a terminal.
        let reason = b"the loss is \xff NaN\nerror: \x1b[2J";
        let mut header = fake.bare(Kind::Abort, reason.len());
        // Nobody has this number, so they are the words of who sent them.
        header.chunk.index = 77;
        let mut frame = header.encode().to_vec();
        frame.extend_from_slice(reason);
        fake.write(ZERO, &frame);
    });
    says(
        &errors[0],
        &["worker 2 stopped the job: the loss is \u{fffd} NaN\u{fffd}error: \u{fffd}[2J"],
    );
    all_name("worker 2", &errors);
}

#[test]
fn another_learning_rate() {
    let errors = Trial::worker().run(|fake| {
        // Once worker 0 has sent a layer, its own part of it is in: only the fake's can differ.
        let sent = fake.read(ZERO).0;
        assert_eq!((sent.kind, sent.clock), (Kind::Push, Clock(2)));
        let mut chunks = fake.chunks_of(ZERO).into_iter();
        let chunk = chunks.find(|chunk| chunk.layer == sent.chunk.layer).unwrap();
        let header = Header { value: 0.5, ..fake.push(chunk, 2) };
        fake.write(ZERO, &Fake::frame(&header));
    });
    says(&errors[0], &["worker 2", "of layer", "at clock 2", "learning rate", "0.5"]);
    all_name("worker 2", &errors);
}

/// A job whose pushes do not fit into the buffers of a connection.
fn large() -> Job {
    let layers = vec![Layer::new("a", 8 << 20)];
    Job { layers, chunk: ChunkSize::default(), ..straight() }
}

/// More than the interval of heartbeats, so that the honest ones do not lose each other.
const SILENCE: Duration = Duration::from_secs(5);

#[test]
fn one_that_stops_reading() {
    let trial = Trial { job: large(), silence: SILENCE, warm: false, ..Trial::worker() };
    let errors = trial.run(|fake| {
        let heartbeat = Header::bare(Kind::Heartbeat, fake.me, 0).encode();
        let until = Instant::now() + 2 * SILENCE;
        let both = [ZERO, NodeId(1)];
        while Instant::now() < until {
            both.iter().for_each(|&node| fake.write(node, &heartbeat));
            thread::sleep(Duration::from_millis(100));
        }
    });
    all_name("lost worker 2: has not taken a byte", &errors);
    all_name("of layer 'a' at clock 1", &errors);
}

#[test]
fn one_that_falls_silent() {
    let errors = Trial { silence: SILENCE, ..Trial::worker() }.run(|_| {});
    all_name("worker 2: not heard for 5s", &errors);
    all_name("at clock 2", &errors);
}

#[test]
fn one_that_leaves_without_a_goodbye() {
    let errors = Trial::worker().run(|fake| fake.links.clear());
    all_name("lost worker 2", &errors);
}

#[test]
fn one_that_says_goodbye_too_early() {
    let errors = Trial::worker().run(|fake| {
        let bye = fake.bare(Kind::Bye, 0).encode();
        [ZERO, NodeId(1)].iter().for_each(|&node| fake.write(node, &bye));
    });
    all_name("lost worker 2: it finished while others go on", &errors);
    all_name("at clock 2", &errors);
}

#[test]
fn an_update_of_a_chunk_the_sender_does_not_hold() {
    let errors = Trial::worker().run(|fake| {
        let header = fake.push(fake.chunks_of(NodeId(1))[0], 2);
        fake.write(ZERO, &Fake::frame(&Header { kind: Kind::Update, ..header }));
    });
    says(&errors[0], &["worker 2 broke the protocol", "must come from node 1"]);
    all_name("worker 2", &errors);
}

#[test]
fn an_update_nobody_asked_for() {
    let errors = Trial { busy: false, ..Trial::server() }.run(|fake| {
        let header = Header { kind: Kind::Update, ..fake.push(chunk(0, 0), 1) };
        fake.write(ZERO, &Fake::frame(&header));
    });
    says(
        &errors[0],
        &["server 0 (node 2) broke the protocol with chunk 0 of layer 'a' at clock 1"],
    );
    says(&errors[0], &["not in flight"]);
    all_name("server 0", &errors);
}

/// What a server may get wrong when it answers clock 2.
fn wrong_answer(change: impl Fn(&mut Header) + Send + 'static) -> [String; 2] {
    Trial::server().run(move |fake| {
        let sums = fake.collect(2);
        let first = *sums.keys().next().unwrap();
        let mut header = Header { kind: Kind::Update, ..fake.push(first, 2) };
        change(&mut header);
        fake.write(ZERO, &Fake::frame(&header));
    })
}

#[test]
fn an_update_of_the_wrong_size_clock_or_kind() {
    let errors = wrong_answer(|header| header.length -= 4);
    says(&errors[0], &["server 0 (node 2)", "chunk 0 of layer 'a' at clock 2: payload of"]);
    all_name("server 0", &errors);
    let errors = wrong_answer(|header| header.clock = Clock(3));
    says(&errors[0], &["server 0 (node 2)", "chunk 0 of layer 'a' at clock 3", "expected 2"]);
    all_name("server 0", &errors);
    let errors = wrong_answer(|header| header.kind = Kind::Push);
    says(&errors[0], &["server 0 (node 2) broke the protocol with chunk 0 of layer 'a'"]);
    all_name("server 0", &errors);
}

#[test]
fn the_same_update_twice() {
    let errors = Trial::server().run(|fake| {
        let sums = fake.collect(2);
        let (&first, sum) = sums.first_key_value().unwrap();
        let header = Header { kind: Kind::Update, ..fake.push(first, 2) };
        let mut frame = header.encode().to_vec();
        frame.extend(sum.iter().flat_map(|value| value.to_le_bytes()));
        fake.write(ZERO, &frame);
        // A wrong result must not replace the right one.
        fake.write(ZERO, &Fake::frame(&header));
    });
    says(&errors[0], &["server 0 (node 2)", "chunk 0 of layer 'a' at clock 2", "twice"]);
    all_name("server 0", &errors);
}

#[test]
fn a_server_that_says_goodbye_too_early() {
    let errors = Trial { timeout: Duration::from_secs(20), ..Trial::server() }.run(|fake| {
        let bye = fake.bare(Kind::Bye, 0).encode();
        [ZERO, NodeId(1)].iter().for_each(|&node| fake.write(node, &bye));
    });
    all_name("lost server 0 (node 2)", &errors);
    all_name("at clock 2", &errors);
}

/// Results for gradients that are still waiting to be sent: the memory of the layer must not go
/// back to the program while a link reads it.
#[test]
fn updates_before_the_gradients_have_been_read() {
    let timeout = 2 * SILENCE;
    let trial = Trial { job: large(), warm: false, timeout, ..Trial::server() };
    let errors = trial.run(|fake| {
        // Both have begun to send.
        let begun = [ZERO, NodeId(1)].map(|node| fake.read(node).0.kind);
        assert_eq!(begun, [Kind::Push; 2]);
        for node in [ZERO, NodeId(1)] {
            for key in fake.chunks_of(fake.me) {
                let header = Header { kind: Kind::Update, ..fake.push(key, 1) };
                fake.write(node, &Fake::frame(&header));
            }
        }
    });
    all_name("server 0", &errors);
}
