//! Somebody between two nodes who changes what they say after a genuine handshake: the job ends with
//! an error that says so, and no result is ever wrong.

use crate::cluster::between::{self, misdirect};
use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::{Clock, Error};
use poseidon_core::wire::{Header, Kind};
use poseidon_link::TAG_SIZE;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;

/// A frame on its way, with its tags, as the one in between sees it.
struct Passing {
    header: Header,
    bytes: Vec<u8>,
}

impl Passing {
    fn read(from: &mut TcpStream) -> io::Result<Self> {
        let mut bytes = vec![0; Header::SIZE + TAG_SIZE];
        from.read_exact(&mut bytes)?;
        let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
        if header.length > 0 {
            let mut rest = vec![0; header.length as usize + TAG_SIZE];
            from.read_exact(&mut rest)?;
            bytes.extend(rest);
        }
        Ok(Self { header, bytes })
    }

    fn payload(&mut self) -> &mut [u8] {
        let end = self.bytes.len() - TAG_SIZE;
        &mut self.bytes[Header::SIZE + TAG_SIZE..end]
    }

    fn set_header(&mut self, header: Header) {
        self.bytes[..Header::SIZE].copy_from_slice(&header.encode());
    }
}

/// What is written instead of a frame that came. What it keeps, it gets back with the next frame.
type Attack = fn(Passing, &mut Vec<Passing>) -> Vec<Passing>;

/// Passes bytes on between a caller and the listener at `to`, and has `attack` change the frames of
/// one direction: control messages, and what is exchanged from clock 2 on.
fn proxy(to: String, from_caller: bool, attack: Attack) -> String {
    between::proxy(to, move |asks, from, to| {
        let honest: Attack = |frame, _| vec![frame];
        pass_on((from, to), asks, if asks == from_caller { attack } else { honest });
    })
}

/// Passes the handshake on as it is, and then frames.
fn pass_on((mut from, mut to): (TcpStream, TcpStream), from_caller: bool, attack: Attack) {
    let mut pass = || -> io::Result<()> {
        between::pass_handshake(&from, &mut to, from_caller)?;
        let mut kept = Vec::new();
        loop {
            let frame = Passing::read(&mut from)?;
            let is_control = frame.header.kind == Kind::Control;
            let frames = match is_control || frame.header.clock >= Clock(2) {
                true => attack(frame, &mut kept),
                false => vec![frame],
            };
            frames.iter().try_for_each(|frame| to.write_all(&frame.bytes))?;
        }
    };
    let _ = pass();
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// Two workers exchange, and `attack` changes what one of them says to the other. Returns how it ends
/// for both. Every result they get on the way is checked.
fn attacked(from_caller: bool, attack: Attack) -> [String; 2] {
    without_hanging(move || {
        let layout = Layout { carrier: Carriers::Tcp, ..Layout::workers(2) };
        let (_coordinator, config) = layout.coordinator();
        let between = misdirect(&config, move |to| proxy(to, from_caller, attack));
        let member = |rank: u16| {
            let host = Some(format!("host {rank}"));
            Config { member: Member::Worker(rank), host, ..config.clone() }
        };
        let near = member(0);
        let far = Config { coordinator: between.tcp().to_string(), ..member(1) };
        thread::scope(|scope| {
            let nodes = [near, far].map(|config| {
                scope.spawn(move || -> Result<(), Error> {
                    let session = builder(config, &job()).learning_rate(0.0).start()?;
                    (1..50).try_for_each(|clock| step(&session, clock, 0..2))?;
                    session.finish()
                })
            });
            nodes.map(|node| match node.join().unwrap() {
                Ok(()) => "it has not noticed".into(),
                Err(error) => error.to_string(),
            })
        })
    })
}

/// The receiver says that a frame was changed, and which, and the sender hears of it.
fn is_noticed(what: &str, attack: Attack, expected: &str) {
    for (from_caller, receiver, sender) in [(true, 0, 1), (false, 1, 0)] {
        let errors = attacked(from_caller, attack);
        let told = format!("a frame from worker {sender} was changed on its way");
        let said = errors[receiver].contains(&told) && errors[receiver].contains(expected);
        assert!(said, "{what}: {errors:?}");
        assert!(errors[sender].contains(&format!("worker {receiver}")), "{what}: {errors:?}");
    }
}

#[test]
fn nobody_in_between_changes_nothing() {
    let errors = attacked(true, |frame, _| vec![frame]);
    assert_eq!(errors, ["it has not noticed", "it has not noticed"]);
}

#[test]
fn a_bit_of_a_gradient_or_of_a_result() {
    let attack: Attack = |mut frame, _| {
        if let [first, ..] = frame.payload() {
            *first ^= 1;
        }
        vec![frame]
    };
    is_noticed("a bit", attack, "(layer '");
    is_noticed("a bit", attack, "clock 2)");
}

/// TCP's checksum is a sum of 16-bit words, and is the same in any order of them.
#[test]
fn two_words_that_have_changed_places() {
    let attack: Attack = |mut frame, _| {
        if let [a, b, .., y, z] = frame.payload() {
            std::mem::swap(a, y);
            std::mem::swap(b, z);
        }
        vec![frame]
    };
    is_noticed("two words", attack, ", clock 2)");
}

#[test]
fn another_header_with_a_checksum_that_fits() {
    is_noticed(
        "the clock",
        |mut frame, _| {
            let header = Header { clock: Clock(frame.header.clock.0 + 1), ..frame.header };
            frame.set_header(header);
            vec![frame]
        },
        "its header",
    );
    is_noticed(
        "the learning rate",
        |mut frame, _| {
            frame.set_header(Header { value: 0.5, ..frame.header });
            vec![frame]
        },
        "its header",
    );
    is_noticed(
        "a goodbye instead",
        |mut frame, _| {
            frame.set_header(Header { kind: Kind::Bye, length: 0, ..frame.header });
            vec![frame]
        },
        "its header",
    );
}

#[test]
fn a_frame_that_comes_twice() {
    let attack: Attack = |frame, _| {
        let again = Passing { bytes: frame.bytes.clone(), ..frame };
        vec![frame, again]
    };
    is_noticed("a frame twice", attack, "its header");
}

#[test]
fn a_frame_that_is_left_out() {
    is_noticed(
        "left out",
        |frame, kept| match kept.is_empty() {
            true => {
                kept.push(frame);
                Vec::new()
            }
            false => vec![frame],
        },
        "its header",
    );
}

#[test]
fn frames_in_another_order() {
    is_noticed(
        "another order",
        |frame, kept| match kept.pop() {
            Some(before) => vec![frame, before],
            None => {
                kept.push(frame);
                Vec::new()
            }
        },
        "its header",
    );
}

/// The book says where everybody is and what is trained. It comes over the control connection.
#[test]
fn the_book() {
    for from_caller in [false, true] {
        let error = without_hanging(move || {
            let layout = Layout { carrier: Carriers::Tcp, ..Layout::workers(1) };
            let (_coordinator, config) = layout.coordinator();
            let attack: Attack = |mut frame, _| {
                let digit = frame.payload().iter_mut().rfind(|byte| byte.is_ascii_digit());
                *digit.expect("a message with a number") ^= 1;
                vec![frame]
            };
            let between = proxy(config.coordinator.clone(), from_caller, attack);
            let config = Config { coordinator: between, ..config };
            builder(config, &job()).start().map(drop).unwrap_err().to_string()
        });
        // A coordinator that hears something changed hangs up.
        let words = if from_caller { "hung up" } else { "changed on its way" };
        assert!(error.contains(words), "{error}");
    }
}
