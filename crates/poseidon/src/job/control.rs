//! What is said on control connections: one JSON object a frame (`docs/wire.md` §3).

use crate::job::book::{Job, NodeFacts};
use crate::job::gather::Post;
use crate::job::link_rate::{LinkRate, Measured};
use crate::job::live::NodeSummary;
use crate::job::open::Opening;
use poseidon_core::printable::printable;
use poseidon_core::wire::{Header, HeaderError, Kind, MAX_CONTROL, NOBODY};
use poseidon_core::{ChannelId, Epoch, NodeId, Rate, Servers};
use poseidon_link::{Sealer, TAG_SIZE, Tagged};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::sync::Arc;

/// A message, either way.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Message {
    Join(Box<Join>),
    /// The book as JSON: a node looks at its version before it reads the rest.
    Book(Value),
    /// A book that is not complete: these nodes measure their ports first.
    Draft {
        book: Value,
        probers: Vec<NodeId>,
    },
    Measured(Measured),
    /// All are ready for the next round of measuring.
    Proceed,
    Refused {
        reason: String,
    },
    Query {
        key: String,
    },
    /// As text: what a job does is told every second, and as a [`Value`] it would be thousands of small
    /// allocations each time, between which the heap of a process of weeks grows.
    #[serde(skip_deserializing)]
    Answer {
        value: Option<Box<RawValue>>,
    },
    /// As text, for the same reason: a worker of `poseidon train` posts the losses of all steps of an
    /// epoch.
    #[serde(skip_deserializing)]
    Gather(Post),
    #[serde(skip_deserializing)]
    Gathered {
        values: Vec<Box<RawValue>>,
    },
    Open(Opening),
    Opened {
        channel: ChannelId,
    },
    Missing {
        nodes: Vec<NodeId>,
    },
    /// What a node has counted, about once a second.
    Summary(Box<NodeSummary>),
    /// Worker 0 follows another plan with all others: the job of that epoch.
    Replanned {
        epoch: Epoch,
        job: Box<Job>,
    },
    Leave {
        reason: Option<String>,
    },
    Lost {
        node: NodeId,
        why: String,
    },
    Stopping,
    /// What this node, or every node, may send to other hosts from now on.
    Budget {
        rate: Option<Rate>,
        node: Option<NodeId>,
    },
}

impl Message {
    /// An answer that says `value`.
    pub(crate) fn answer(value: &impl Serialize) -> Self {
        Self::Answer { value: to_raw_value(value).ok() }
    }

    /// The message's type, as the wire spells it. Errors name only the type, because what a message
    /// carries may be long.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Join(_) => "join",
            Self::Book(_) => "book",
            Self::Draft { .. } => "draft",
            Self::Measured(_) => "measured",
            Self::Proceed => "proceed",
            Self::Refused { .. } => "refused",
            Self::Query { .. } => "query",
            Self::Answer { .. } => "answer",
            Self::Gather(_) => "gather",
            Self::Gathered { .. } => "gathered",
            Self::Open(_) => "open",
            Self::Opened { .. } => "opened",
            Self::Missing { .. } => "missing",
            Self::Summary(_) => "summary",
            Self::Replanned { .. } => "replanned",
            Self::Leave { .. } => "leave",
            Self::Lost { .. } => "lost",
            Self::Stopping => "stopping",
            Self::Budget { .. } => "budget",
        }
    }
}

impl Message {
    /// Words of another process end up in errors and logs here: they must not command a terminal.
    fn make_printable(&mut self) {
        let words = match self {
            Self::Refused { reason } | Self::Leave { reason: Some(reason) } => reason,
            Self::Lost { why, .. } => why,
            Self::Query { key } => key,
            _ => return,
        };
        *words = printable(words).into_owned();
    }
}

/// What a node says when it joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Join {
    pub(crate) facts: NodeFacts,
    pub(crate) workers: u16,
    pub(crate) servers: Servers,
    pub(crate) lanes: u16,
    /// Whether that is only the most there may be.
    #[serde(default)]
    pub(crate) lanes_by_rate: bool,
    #[serde(default)]
    pub(crate) link_rate: LinkRate,
    /// The version of the information book this node reads.
    #[serde(default)]
    pub(crate) book: u16,
    /// Workers only: a dedicated server takes what it gets.
    pub(crate) job: Option<Job>,
}

/// A message with the number that tells requests of one connection apart.
#[derive(Debug, Deserialize)]
pub(crate) struct Numbered {
    #[serde(default)]
    pub(crate) request: Option<u64>,
    #[serde(flatten)]
    pub(crate) message: Message,
}

/// A message, as far as it has to be known before it is read.
#[derive(Deserialize)]
struct Glimpse<'a> {
    #[serde(default)]
    request: Option<u64>,
    #[serde(rename = "type", borrow)]
    name: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    value: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Gathered {
    values: Vec<Box<RawValue>>,
}

impl Numbered {
    /// The message that `body` is. The derived code takes it apart into many small pieces before it
    /// knows the type. So it reads only what is said seldom.
    pub(crate) fn parse(body: &[u8]) -> serde_json::Result<Self> {
        let Glimpse { request, name } = serde_json::from_slice(body)?;
        let message = match &*name {
            "answer" => {
                let Answer { value } = serde_json::from_slice(body)?;
                Message::Answer { value }
            }
            "gather" => Message::Gather(serde_json::from_slice(body)?),
            "gathered" => {
                let Gathered { values } = serde_json::from_slice(body)?;
                Message::Gathered { values }
            }
            "summary" => Message::Summary(serde_json::from_slice(body)?),
            _ => return serde_json::from_slice(body),
        };
        Ok(Self { request, message })
    }
}

/// Where the coordinator's answer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asker {
    /// The coordinator's number of the connection.
    pub(crate) connection: u64,
    /// The asker's number of the request; none in news that nobody asked for.
    pub(crate) request: Option<u64>,
}

/// What the coordinator has to say to somebody.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) to: Asker,
    pub(crate) body: Body,
}

impl Reply {
    pub(crate) fn new(to: Asker, message: &Message) -> Self {
        Self { to, body: Body::answer(message) }
    }

    pub(crate) fn refusal(to: Asker, reason: String) -> Self {
        Self::new(to, &Message::Refused { reason })
    }

    /// The same message for all `askers`, encoded once.
    pub(crate) fn to_all(askers: impl IntoIterator<Item = Asker>, message: &Message) -> Vec<Self> {
        let body = Body::answer(message);
        askers.into_iter().map(|to| Self { to, body: body.clone() }).collect()
    }
}

/// A message as JSON, ready to be written. Askers that wait for the same answer share the bytes.
#[derive(Clone, Debug)]
pub(crate) struct Body(Arc<Vec<u8>>);

impl Body {
    /// Fails if the message does not fit into a frame.
    pub(crate) fn new(message: &Message) -> io::Result<Self> {
        let body = serde_json::to_vec(message)?;
        let got = body.len();
        if got > MAX_CONTROL - NUMBER {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("a control message of {got} bytes, at most {MAX_CONTROL}"),
            ));
        }
        Ok(Self(Arc::new(body)))
    }

    /// What the coordinator writes: `message`, or a refusal if the message is too large for a
    /// frame.
    fn answer(message: &Message) -> Self {
        Self::new(message).unwrap_or_else(|e| {
            let refusal = Message::Refused { reason: e.to_string() };
            Self::new(&refusal).expect("a sentence fits into a frame and is JSON")
        })
    }

    /// The frame that answers `request`, with the next tags of `sealer` if there is one. It has to be
    /// written before any other frame that gets tags.
    pub(crate) fn frame(
        &self,
        sender: NodeId,
        request: Option<u64>,
        sealer: Option<&mut Sealer>,
    ) -> Frame<'_> {
        // A message is a JSON object that has at least a type. So what follows the opening brace
        // begins with a field, and the number can go in front of it.
        let rest = &self.0[1..];
        let brace = match request {
            Some(request) => format!("{{\"request\":{request},"),
            None => "{".into(),
        };
        let header = Header::bare(Kind::Control, sender, (brace.len() + rest.len()) as u32);
        let mut head = header.encode().to_vec();
        let mut foot = Vec::new();
        if let Some(sealer) = sealer {
            let tag = sealer.seal(&head);
            head.extend(tag);
            let mut tagging = sealer.begin();
            tagging.update(brace.as_bytes());
            tagging.update(rest);
            foot.extend(tagging.finish());
        }
        head.extend_from_slice(brace.as_bytes());
        Frame { head, rest, foot }
    }

    /// Writes the coordinator's answer to `request`.
    pub(crate) fn write(
        &self,
        request: Option<u64>,
        to: &mut (impl Write + Tagged),
    ) -> io::Result<()> {
        let Frame { mut head, rest, foot } = self.frame(NOBODY, request, to.sealer());
        if rest.len() <= SMALL {
            head.extend_from_slice(rest);
            head.extend_from_slice(&foot);
            return to.write_all(&head);
        }
        to.write_all(&head)?;
        to.write_all(rest)?;
        to.write_all(&foot)
    }

    #[cfg(test)]
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap()
    }

    #[cfg(test)]
    pub(crate) fn value(&self) -> Value {
        serde_json::from_slice(&self.0).unwrap()
    }
}

/// The bytes of a frame, in three pieces.
pub(crate) struct Frame<'a> {
    /// The header, its tag, and the request's number.
    pub(crate) head: Vec<u8>,
    /// The rest of the message, which is the same for all requests.
    pub(crate) rest: &'a [u8],
    /// The message's tag, on a connection that has tags.
    pub(crate) foot: Vec<u8>,
}

/// Reads one message. Whatever is not a control message is an error of kind `InvalidData`, and so is
/// a message that was changed on its way.
pub(crate) fn receive(stream: &mut (impl Read + Tagged)) -> io::Result<Numbered> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let changed = |e| invalid(format!("a control message is not as it was sent: {e}"));
    let mut head = [0; Header::SIZE];
    stream.read_exact(&mut head).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(e.kind(), "the other end hung up"),
        _ => e,
    })?;
    let mut tag = [0; TAG_SIZE];
    let mut payload = None;
    if stream.opener().is_some() {
        stream.read_exact(&mut tag)?;
        if let Some(opener) = stream.opener() {
            opener.open(&head, &tag).map_err(changed)?;
            payload = Some(opener.begin());
        }
    }
    let header = Header::decode(&head).map_err(|e: HeaderError| invalid(e.to_string()))?;
    let length = header.length as usize;
    if header.kind != Kind::Control || length == 0 || length > MAX_CONTROL {
        return Err(invalid(format!("expected a control message, got {header:?}")));
    }
    // The vector grows as bytes come: a length that is only announced reserves no memory.
    let mut body = Vec::new();
    stream.take(length as u64).read_to_end(&mut body)?;
    if body.len() < length {
        // No nonsense: a node may hang up at any time.
        let why = format!("a control message of {length} bytes ended after {}", body.len());
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
    }
    if let Some(mut tagging) = payload {
        stream.read_exact(&mut tag)?;
        tagging.update(&body);
        tagging.verify(&tag).map_err(changed)?;
    }
    // The parser quotes what it did not expect.
    let no_message = |e: serde_json::Error| format!("not a control message: {e}");
    let mut numbered =
        Numbered::parse(&body).map_err(|e| invalid(printable(&no_message(e)).into_owned()))?;
    numbered.message.make_printable();
    Ok(numbered)
}

/// Bytes that the number of a request takes in its message, at most.
const NUMBER: usize = 64;
/// Up to here, copying a message is cheaper than a second system call.
const SMALL: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_link::{Opener, Tags, memory};
    use std::collections::VecDeque;

    /// A connection that hears what was said on it.
    #[derive(Default)]
    struct Echo {
        bytes: VecDeque<u8>,
        tags: Option<[Tags; 2]>,
    }

    impl Read for Echo {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.bytes.read(buf)
        }
    }

    impl Write for Echo {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            self.bytes.write(buf)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Tagged for Echo {
        fn sealer(&mut self) -> Option<&mut Sealer> {
            self.tags.as_mut().map(|[near, _]| &mut near.sealer)
        }
        fn opener(&mut self) -> Option<&mut Opener> {
            self.tags.as_mut().map(|[_, far]| &mut far.opener)
        }
    }

    #[test]
    fn a_message_keeps_its_number_and_needs_none() {
        let texts = || ["0.1", "{}"].map(|text| RawValue::from_string(text.into()).unwrap());
        let body = Body::new(&Message::Gathered { values: texts().into() }).unwrap();
        for tags in [None, Some(memory::tags())] {
            let mut echo = Echo { tags, ..Echo::default() };
            for request in [None, Some(0), Some(u64::MAX)] {
                body.write(request, &mut echo).unwrap();
                let heard = receive(&mut echo).unwrap();
                assert_eq!(heard.request, request);
                let Message::Gathered { values } = heard.message else { panic!("{heard:?}") };
                let values: Vec<_> = values.iter().map(|value| value.get()).collect();
                assert_eq!(values, ["0.1", "{}"]);
            }
            Body::new(&Message::Stopping).unwrap().write(Some(7), &mut echo).unwrap();
            assert!(matches!(receive(&mut echo).unwrap().message, Message::Stopping));
            assert!(echo.bytes.is_empty());
        }
    }

    #[test]
    fn a_message_that_ends_early_is_a_connection_that_ended() {
        let body =
            Body::new(&Message::Gathered { values: vec![to_raw_value(&17).unwrap()] }).unwrap();
        let mut echo = Echo::default();
        body.write(Some(1), &mut echo).unwrap();
        while echo.bytes.pop_back().is_some() {
            let bytes = echo.bytes.clone();
            let error = receive(&mut Echo { bytes, ..Echo::default() }).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        }
    }

    /// However little it is: a digit of a gradient's length, a port of an address.
    #[test]
    fn a_message_that_was_changed_is_not_read() {
        let values = vec![to_raw_value(&17).unwrap()];
        let body = Body::new(&Message::Gathered { values }).unwrap();
        let mut whole = Echo { tags: Some(memory::tags()), ..Echo::default() };
        body.write(Some(1), &mut whole).unwrap();
        for at in 0..whole.bytes.len() {
            let mut echo = Echo { tags: Some(memory::tags()), bytes: whole.bytes.clone() };
            echo.bytes[at] ^= 1;
            let error = receive(&mut echo).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "byte {at}: {error}");
            assert!(error.to_string().contains("changed on its way"), "byte {at}: {error}");
        }
        // Nor is one that comes twice.
        let mut twice = Echo { tags: Some(memory::tags()), bytes: whole.bytes.clone() };
        twice.bytes.extend(&whole.bytes);
        receive(&mut twice).unwrap();
        assert!(receive(&mut twice).unwrap_err().to_string().contains("changed on its way"));
    }

    #[test]
    fn words_of_another_process_do_not_command_a_terminal() {
        let words = "fine\n\x1b[2Jerror: forged";
        let said = |message: &Message| {
            let mut echo = Echo::default();
            Body::new(message).unwrap().write(None, &mut echo).unwrap();
            format!("{:?}", receive(&mut echo).unwrap().message)
        };
        let reason = words.to_owned();
        let refused = said(&Message::Refused { reason: reason.clone() });
        let left = said(&Message::Leave { reason: Some(reason.clone()) });
        let lost = said(&Message::Lost { node: NodeId(1), why: reason });
        for said in [refused, left, lost] {
            assert!(said.contains("fine\u{fffd}\u{fffd}[2Jerror"), "{said}");
        }
        let body = br#"{"type":"\u001b[2J"}"#;
        let mut bytes = Header::bare(Kind::Control, NOBODY, body.len() as u32).encode().to_vec();
        bytes.extend_from_slice(body);
        let mut echo = Echo { bytes: bytes.into(), ..Echo::default() };
        let error = receive(&mut echo).unwrap_err().to_string();
        assert!(error.contains("not a control message") && !error.contains('\x1b'), "{error}");
    }
}
