//! Strangers at the door of a running job: they are turned away, and nobody notices.

use crate::cluster::{Layout, builder, fake, job, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::{Book, Layer, NodeId, Secret, coordinator};
use poseidon_core::wire::{Challenge, Header, Hello, Kind, NOBODY, Purpose, Status};
use poseidon_core::{Epoch, JobId, LaneId};
use poseidon_link::descriptors::{self, Need};
use poseidon_link::handshake::open;
use poseidon_link::{Address, Caller, ConnectError, Credentials, HandshakeError, connect};
use serde_json::json;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// Two workers exchange, clock after clock, while `visit` does something to them; afterwards they
/// exchange some more and finish.
fn undisturbed_by(visit: impl FnOnce(&Config, &Book) + Send + 'static) {
    undisturbed_by_both(|_| {}, visit);
}

/// As [`undisturbed_by`], with somebody who is at the coordinator's door before the job starts, and
/// stays.
fn undisturbed_by_both<T>(
    before: impl FnOnce(&Config) -> T + Send + 'static,
    visit: impl FnOnce(&Config, &Book) + Send + 'static,
) {
    without_hanging(move || {
        let layout = Layout { carrier: Carriers::Tcp, ..Layout::workers(2) };
        let (_coordinator, config) = layout.coordinator();
        let _stays = before(&config);
        let (stop, clocks) = (AtomicBool::new(false), AtomicU64::new(0));
        let (tell, book) = channel();
        let work = |mut config: Config, rank| {
            config.member = Member::Worker(rank);
            let session = builder(config, &job()).layer(Layer::new("stop", 1)).start()?;
            let _ = tell.send(session.book().clone());
            let flag = session.layer("stop")?;
            for clock in 1u64.. {
                // Small enough to sum exactly.
                let factor = (clock % 100) as f32;
                // The workers agree on the last clock by exchanging whether somebody wants it.
                let wanted = f32::from(stop.load(Ordering::Relaxed));
                let layers = ["a", "b"].map(|name| session.layer(name));
                for layer in layers.into_iter().rev() {
                    let len = session.book().job.layers[layer.clone()?.index()].len;
                    let values = (0..len).map(|i| (i + usize::from(rank)) as f32 * factor);
                    session.send(layer?, values.collect::<Vec<_>>().into())?;
                }
                session.send(flag, vec![wanted].into())?;
                for layer in ["a", "b"] {
                    let sum = session.receive(session.layer(layer)?)?.result;
                    let exact = |i: usize| (2 * i + 1) as f32 * factor;
                    assert!(sum.iter().enumerate().all(|(i, got)| *got == exact(i)), "{layer}");
                }
                clocks.fetch_add(1, Ordering::Relaxed);
                if session.receive(flag)?.result[0] > 0.0 {
                    break;
                }
            }
            session.finish()
        };
        thread::scope(|scope| {
            let (work, config) = (&work, &config);
            let workers = [0, 1].map(|rank| scope.spawn(move || work(config.clone(), rank)));
            // Both of them: only then is every lane taken.
            let [book, _]: [Book; 2] = [0, 1].map(|_| book.recv().expect("the job starts"));
            // Also if the visit fails: then the test says why, instead of hanging.
            let stop = Stop(&stop);
            visit(config, &book);
            let before = clocks.load(Ordering::Relaxed);
            while clocks.load(Ordering::Relaxed) < before + 6
                && workers.iter().all(|w| !w.is_finished())
            {
                thread::yield_now();
            }
            drop(stop);
            for worker in workers {
                worker.join().unwrap().expect("the job goes on");
            }
        });
    });
}

/// Ends the exchanges when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Where this job can be knocked at: both nodes and the coordinator.
fn doors(config: &Config, book: &Book) -> [(String, Purpose); 3] {
    let node = |n: usize| (book.nodes[n].tcp.clone(), Purpose::Lane);
    [node(0), node(1), (config.coordinator.clone(), Purpose::Control)]
}

fn dial(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Says `bytes` to the listener at `address` and returns the status it answers with.
fn knock(address: &str, bytes: &[u8]) -> Status {
    let mut stream = dial(address);
    stream.write_all(bytes).unwrap();
    let mut answer = [0; Challenge::SIZE];
    stream.read_exact(&mut answer).unwrap();
    let status = Challenge::decode(&answer).unwrap().status;
    // And then it hangs up.
    assert_eq!(stream.read(&mut answer).unwrap_or(0), 0);
    status
}

/// How the listener at `address` answers a caller that knows how to shake hands.
fn call(address: &str, caller: Caller, credentials: &Credentials) -> Option<Status> {
    let deadline = Instant::now() + Duration::from_secs(60);
    match connect(&Address::Tcp(address.into()), caller, credentials, deadline) {
        Ok(_) => None,
        Err(ConnectError::Handshake { reason, .. }) => match reason {
            HandshakeError::Refused(status) => Some(status),
            // Who has another secret cannot be shown that the refusal comes from the cluster.
            HandshakeError::Unproved(Status::Secret) => Some(Status::Secret),
            other => panic!("{other}"),
        },
        Err(other) => panic!("{other}"),
    }
}

fn hello(purpose: Purpose, credentials: &Credentials) -> Hello {
    let (node, lane, cluster) = (NodeId(1), LaneId(0), credentials.cluster);
    let (identity, epoch, nonce) = (JobId::default(), Epoch(0), [7; 32]);
    Hello { purpose, node, lane, encrypt: credentials.encrypt, cluster, identity, epoch, nonce }
}

#[test]
fn strangers_are_told_why_they_are_refused() {
    undisturbed_by(|config, book| {
        let ours = config.credentials();
        for (door, purpose) in doors(config, book) {
            assert_eq!(knock(&door, &[0xa5; 64]), Status::Garbage);
            assert_eq!(knock(&door, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), Status::Garbage);
            let mut older = hello(purpose, &ours).encode();
            older[8] -= 1;
            assert_eq!(knock(&door, &older), Status::Version);
            let mut odd = open(&hello(purpose, &ours), &ours.secret);
            odd[10] = 3;
            assert_eq!(knock(&door, &odd), Status::Purpose);
            let mut wishful = open(&hello(purpose, &ours), &ours.secret);
            wishful[11] = 2;
            assert_eq!(knock(&door, &wishful), Status::Features);
            let mut other = hello(purpose, &ours);
            other.cluster = [1; 16];
            assert_eq!(knock(&door, &open(&other, &ours.secret)), Status::Cluster);
            assert_eq!(knock(&door, &[&other.encode()[..], &[0; 32]].concat()), Status::Cluster);
            let ignorant = [&hello(purpose, &ours).encode()[..], &[0; 32]].concat();
            assert_eq!(knock(&door, &ignorant), Status::Secret);

            let caller = match purpose {
                Purpose::Lane => fake::lane(book, NodeId(1), LaneId(0)),
                Purpose::Control => Caller::control(NodeId(1)),
            };
            let wrong = Credentials { secret: Secret::random().unwrap(), ..ours.clone() };
            assert_eq!(call(&door, caller, &wrong), Some(Status::Secret));
            let elsewhere = match purpose {
                Purpose::Lane => Purpose::Control,
                Purpose::Control => Purpose::Lane,
            };
            let lost = Caller { purpose: elsewhere, ..caller };
            assert_eq!(call(&door, lost, &ours), Some(Status::Purpose));
        }
    });
}

#[test]
fn a_caller_that_falls_silent_in_its_hello_is_hung_up_on() {
    undisturbed_by(|config, book| {
        let bytes = hello(Purpose::Lane, &config.credentials()).encode();
        let callers = doors(config, book).map(|(door, _)| {
            let mut stream = dial(&door);
            stream.write_all(&bytes[..20]).unwrap();
            stream
        });
        for mut stream in callers {
            assert_eq!(stream.read(&mut [0; 64]).unwrap(), 0, "no status for half a hello");
        }
    });
}

#[test]
fn nobody_gets_a_lane_that_is_taken_or_does_not_exist() {
    undisturbed_by(|config, book| {
        let ours = config.credentials();
        let lane = |node, lane| fake::lane(book, NodeId(node), LaneId(lane));
        let [zero, one] = [0, 1].map(|n| book.nodes[n].tcp.clone());
        assert_eq!(call(&zero, lane(1, 0), &ours), Some(Status::Node), "it is connected already");
        assert_eq!(
            call(&one, lane(0, 0), &ours),
            Some(Status::Node),
            "node 0 is called, not calling"
        );
        assert_eq!(call(&zero, lane(7, 0), &ours), Some(Status::Node), "there is no node 7");
        assert_eq!(call(&zero, lane(1, 9), &ours), Some(Status::Lane), "there is no lane 9");
    });
}

/// A process of an earlier run has the name and the secret, but not this run's book.
#[test]
fn a_straggler_of_another_run_is_told_so() {
    undisturbed_by(|config, book| {
        let ours = config.credentials();
        let zero = &book.nodes[0].tcp;
        let caller = fake::lane(book, NodeId(1), LaneId(0));
        let earlier_run = Caller { identity: JobId([1; 16]), ..caller };
        let earlier_epoch = Caller { epoch: Epoch(0), ..caller };
        for straggler in [earlier_run, earlier_epoch] {
            assert_eq!(call(zero, straggler, &ours), Some(Status::Run));
        }
        assert!(Status::Run.to_string().contains("belongs to another run of this job"));
        let control = Caller { purpose: Purpose::Control, ..earlier_run };
        assert_eq!(call(&config.coordinator, control, &ours), Some(Status::Run));
        let knows = Caller { purpose: Purpose::Control, ..caller };
        assert_eq!(call(&config.coordinator, knows, &ours), None);
    });
}

#[test]
fn two_hundred_strangers_at_once_disturb_nobody() {
    undisturbed_by(|config, book| {
        for (door, _) in doors(config, book) {
            let strangers: Vec<_> = (0..200).map(|_| dial(&door)).collect();
            for (n, mut stranger) in strangers.into_iter().enumerate() {
                // Half of them say something; all of them leave.
                if n % 2 == 0 {
                    let _ = stranger.write_all(b"SSH-2.0-OpenSSH_9.6\r\n");
                }
            }
        }
        // A member is still let in.
        let key = "cluster.workers";
        let answer = coordinator::query(
            &config.coordinator,
            &config.credentials(),
            key,
            Duration::from_secs(60),
        );
        assert_eq!(answer.unwrap(), Some(2.into()));
    });
}

/// Silent connections that stay, and more of them all the time: each that is hung up on is replaced.
struct Crowd {
    leave: Arc<AtomicBool>,
    arrivals: Option<thread::JoinHandle<usize>>,
}

impl Crowd {
    fn at(address: &str, size: usize) -> Self {
        let address = address.parse().unwrap();
        let leave = Arc::new(AtomicBool::new(false));
        let leaving = leave.clone();
        // A listener's queue may be full: then the next one tries.
        let come = move || TcpStream::connect_timeout(&address, Duration::from_millis(50)).ok();
        let mut crowd: VecDeque<TcpStream> = (0..size).filter_map(|_| come()).collect();
        let arrivals = thread::spawn(move || {
            let mut arrived = crowd.len();
            while !leaving.load(Ordering::Relaxed) {
                if let Some(stream) = come() {
                    arrived += 1;
                    crowd.pop_front();
                    crowd.push_back(stream);
                }
                // A thousand a second from each crowd. This thread must not take the job's cores.
                thread::sleep(Duration::from_millis(1));
            }
            arrived
        });
        Self { leave, arrivals: Some(arrivals) }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.leave.store(true, Ordering::Relaxed);
        let arrived = self.arrivals.take().unwrap().join().unwrap();
        assert!(arrived > 0, "nobody came");
    }
}

/// Another user of the machine who can connect, and knows nothing. The job starts, runs and finishes,
/// and whoever knows the secret is let in.
#[test]
fn two_thousand_silent_connections_and_more_all_the_time_stop_nobody() {
    // This process holds both ends.
    descriptors::reserve(Need { nodes: 12_000, lanes: 1 }).unwrap();
    undisturbed_by_both(
        |config| Crowd::at(&config.coordinator, 2000),
        |config, book| {
            let _crowds = [0, 1].map(|node| Crowd::at(&book.nodes[node].tcp, 2000));
            for _ in 0..5 {
                let (address, ours) = (&config.coordinator, config.credentials());
                let patience = Duration::from_secs(60);
                let asked = coordinator::query(address, &ours, "cluster.workers", patience);
                assert_eq!(asked.unwrap(), Some(2.into()));
                // A lane's door is not crowded out either: the caller hears that it is taken.
                let caller = fake::lane(book, NodeId(1), LaneId(0));
                assert_eq!(call(&book.nodes[0].tcp, caller, &ours), Some(Status::Node));
            }
        },
    );
}

#[test]
fn nonsense_to_the_coordinator_from_one_who_knows_the_secret_is_harmless() {
    undisturbed_by(|config, _| {
        let say = |header: Header, body: &[u8]| {
            let mut stream = fake::control(config, NOBODY);
            fake::write_frame(&mut stream, &[&header.encode(), body].concat()).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer
        };
        let control = |length| Header::bare(Kind::Control, NOBODY, length);
        assert_eq!(say(control(4), b"{}{}"), b"");
        assert_eq!(say(control(u32::MAX), b""), b"");
        assert_eq!(say(Header::bare(Kind::Push, NOBODY, 0), b""), b"");
        let mut stream = fake::control(config, NOBODY);
        stream.write_all(&[0xff; 64]).unwrap();
        assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0);
        let answer = fake::ask(
            &mut fake::control(config, NOBODY),
            NOBODY,
            &json!({ "type": "answer", "value": 1 }),
        );
        assert_eq!(answer["type"], "refused");

        let late = Config { member: Member::Worker(1), ..config.clone() };
        let reason = fake::register(&late, Some(&job()), "elsewhere").unwrap_err();
        assert!(reason.contains("started already"), "{reason}");
    });
}
