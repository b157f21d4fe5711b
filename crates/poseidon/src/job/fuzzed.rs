//! What the coordinator does with words of other processes, for fuzz targets.

use super::control::{Asker, Body, Message, receive};
use super::gather;
use super::joining::Joining;
use super::open::Openings;
use super::rounds::Rounds;
use poseidon_core::wire::{Header, Kind, NOBODY};
use poseidon_core::{Cluster, JobId};
use poseidon_link::{Opener, Sealer, Tagged};
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

/// A coordinator hears the lines of `input`, each as a control message. Lines come from a few
/// connections in turn. Whether it understood all of them; nothing if there are none.
///
/// # Panics
/// If the coordinator breaks a promise: what it has understood it can say again, and it answers in
/// words that fit a frame.
pub fn control(input: &[u8]) -> Option<bool> {
    let (now, patience) = (Instant::now(), Duration::from_secs(10));
    let mut joining = Joining::new(JobId([1; 16]), patience);
    let (mut gathers, mut openings) = (Rounds::default(), Openings::default());
    let mut all = true;
    for (line, connection) in input.split(|byte| *byte == b'\n').zip([0, 1, 2].into_iter().cycle())
    {
        let Ok(heard) = receive(&mut Echo::saying(line)) else {
            all = false;
            continue;
        };
        check_said_again(&heard.message);
        let asker = Asker { connection, request: heard.request };
        let cluster = |joining: &Joining| Some::<Cluster>(joining.book()?.cluster.clone());
        let replies = match heard.message {
            Message::Join(join) => joining.handle_join(asker, *join, "somebody".into(), now),
            Message::Measured(post) if joining.book().is_some() => {
                joining.handle_measured(asker, post, now)
            }
            Message::Gather(post) => match cluster(&joining) {
                Some(cluster) => gather::post(&mut gathers, &cluster, asker, post, now),
                None => Vec::new(),
            },
            Message::Open(opening) => match cluster(&joining) {
                Some(cluster) => openings.post(&cluster, asker, opening, now),
                None => Vec::new(),
            },
            Message::Leave { reason } => joining.handle_leave(connection, reason, now),
            Message::Query { key } => {
                joining.tell(&key);
                Vec::new()
            }
            _ => Vec::new(),
        };
        for reply in replies {
            let mut echo = Echo::default();
            reply.body.write(reply.to.request, &mut echo).expect("memory takes all");
            receive(&mut echo).expect("an answer is a message");
        }
    }
    joining.handle_time(now + 2 * patience);
    (!input.is_empty()).then_some(all)
}

fn check_said_again(message: &Message) {
    let Ok(body) = Body::new(message) else { return };
    let mut echo = Echo::default();
    body.write(Some(3), &mut echo).expect("memory takes all");
    let again = receive(&mut echo).expect("what was understood can be said again");
    assert_eq!(again.request, Some(3));
    let text = |message: &Message| serde_json::to_string(message).expect("it was JSON");
    assert_eq!(text(&again.message), text(message));
}

/// A connection without tags that hears what was said on it.
#[derive(Default)]
struct Echo(io::Cursor<Vec<u8>>);

impl Echo {
    fn saying(body: &[u8]) -> Self {
        let header = Header::bare(Kind::Control, NOBODY, body.len() as u32);
        Self(io::Cursor::new([&header.encode()[..], body].concat()))
    }
}

impl Read for Echo {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Echo {
    fn write(&mut self, said: &[u8]) -> io::Result<usize> {
        self.0.get_mut().extend_from_slice(said);
        Ok(said.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Tagged for Echo {
    fn sealer(&mut self) -> Option<&mut Sealer> {
        None
    }

    fn opener(&mut self) -> Option<&mut Opener> {
        None
    }
}
