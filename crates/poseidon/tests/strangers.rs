//! Strangers at the door of a running job: they are turned away, and nobody notices.

mod cluster;

use cluster::{Layout, builder, fake, job, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::{Book, Layer, NodeId, Secret};
use poseidon_core::wire::{Challenge, Header, Hello, Kind, NOBODY, Purpose, Status};
use poseidon_core::{Epoch, JobId, LaneId};
use poseidon_link::{Address, Caller, ConnectError, Credentials, HandshakeError, connect};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// Two workers exchange, clock after clock, while `visit` does something to them; afterwards they
/// exchange some more and finish.
fn undisturbed_by(visit: impl FnOnce(&Config, &Book) + Send + 'static) {
    without_hanging(move || {
        let layout = Layout { carrier: Carriers::Tcp, ..Layout::workers(2) };
        let (_coordinator, config) = layout.coordinator();
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
            let book: Book = book.recv().expect("the job starts");
            visit(config, &book);
            let before = clocks.load(Ordering::Relaxed);
            while clocks.load(Ordering::Relaxed) < before + 6
                && workers.iter().all(|w| !w.is_finished())
            {
                thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
            for worker in workers {
                worker.join().unwrap().expect("the job goes on");
            }
        });
    });
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
        Err(ConnectError::Handshake { reason: HandshakeError::Refused(status), .. }) => {
            Some(status)
        }
        Err(other) => panic!("{other}"),
    }
}

fn hello(purpose: Purpose, credentials: &Credentials) -> Hello {
    let (node, lane, cluster) = (NodeId(1), LaneId(0), credentials.cluster);
    let (identity, epoch, nonce) = (JobId::default(), Epoch(0), [7; 32]);
    Hello { purpose, node, lane, cluster, identity, epoch, nonce }
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
            let mut odd = hello(purpose, &ours).encode();
            odd[10] = 3;
            assert_eq!(knock(&door, &odd), Status::Purpose);
            let mut wishful = hello(purpose, &ours).encode();
            wishful[11] = 1;
            assert_eq!(knock(&door, &wishful), Status::Features);
            let mut other = hello(purpose, &ours);
            other.cluster = [1; 16];
            assert_eq!(knock(&door, &other.encode()), Status::Cluster);

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
        let answer = poseidon::coordinator::query(
            &config.coordinator,
            &config.credentials(),
            key,
            Duration::from_secs(60),
        );
        assert_eq!(answer.unwrap(), Some(2.into()));
    });
}

#[test]
fn nonsense_to_the_coordinator_from_one_who_knows_the_secret_is_harmless() {
    undisturbed_by(|config, _| {
        let say = |header: Header, body: &[u8]| {
            let mut stream = fake::control(config, NOBODY);
            stream.write_all(&header.encode()).unwrap();
            stream.write_all(body).unwrap();
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
