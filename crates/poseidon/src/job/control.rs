//! What is said on control connections: one JSON object a frame (`docs/wire.md` §3).

use crate::job::book::{Job, NodeFacts};
use crate::job::gather::Post;
use crate::job::link_rate::{LinkRate, Measured};
use crate::job::open::Opening;
use poseidon_core::wire::{Header, HeaderError, Kind, MAX_CONTROL, NOBODY};
use poseidon_core::{ChannelId, NodeId, Rate, Servers};
use serde::{Deserialize, Serialize};
use serde_json::Value;
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
    Answer {
        value: Option<Value>,
    },
    Gather(Post),
    Gathered {
        values: Vec<Value>,
    },
    Open(Opening),
    Opened {
        channel: ChannelId,
    },
    Missing {
        nodes: Vec<NodeId>,
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
            Self::Leave { .. } => "leave",
            Self::Lost { .. } => "lost",
            Self::Stopping => "stopping",
            Self::Budget { .. } => "budget",
        }
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

    /// The frame that answers `request`: its first bytes, which have the request's number, and the
    /// rest, which is the same for all requests.
    pub(crate) fn frame(&self, sender: NodeId, request: Option<u64>) -> (Vec<u8>, &[u8]) {
        // A message is a JSON object that has at least a type. So what follows the opening brace
        // begins with a field, and the number can go in front of it.
        let rest = &self.0[1..];
        let brace = match request {
            Some(request) => format!("{{\"request\":{request},"),
            None => "{".into(),
        };
        let header = Header::bare(Kind::Control, sender, (brace.len() + rest.len()) as u32);
        let mut head = header.encode().to_vec();
        head.extend_from_slice(brace.as_bytes());
        (head, rest)
    }

    /// Writes the coordinator's answer to `request`.
    pub(crate) fn write(&self, request: Option<u64>, to: &mut impl Write) -> io::Result<()> {
        let (mut head, rest) = self.frame(NOBODY, request);
        if rest.len() <= SMALL {
            head.extend_from_slice(rest);
            return to.write_all(&head);
        }
        to.write_all(&head)?;
        to.write_all(rest)
    }

    #[cfg(test)]
    pub(crate) fn value(&self) -> Value {
        serde_json::from_slice(&self.0).unwrap()
    }
}

/// Reads one message. Whatever is not a control message is an error of kind `InvalidData`.
pub(crate) fn receive(stream: &mut impl Read) -> io::Result<Numbered> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut head = [0; Header::SIZE];
    stream.read_exact(&mut head).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(e.kind(), "the other end hung up"),
        _ => e,
    })?;
    let header = Header::decode(&head).map_err(|e: HeaderError| invalid(e.to_string()))?;
    let length = header.length as usize;
    if header.kind != Kind::Control || length > MAX_CONTROL {
        return Err(invalid(format!("expected a control message, got {header:?}")));
    }
    // The vector grows as bytes come: a length that is only announced reserves no memory.
    let mut body = Vec::new();
    stream.take(length as u64).read_to_end(&mut body)?;
    if body.len() < length {
        return Err(invalid(format!(
            "a control message of {length} bytes ended after {}",
            body.len()
        )));
    }
    serde_json::from_slice(&body).map_err(|e| invalid(format!("not a control message: {e}")))
}

/// Bytes that the number of a request takes in its message, at most.
const NUMBER: usize = 64;
/// Up to here, copying a message is cheaper than a second system call.
const SMALL: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_message_keeps_its_number_and_needs_none() {
        let body = Body::new(&Message::Gathered { values: vec![json!(0.1), json!({})] }).unwrap();
        for request in [None, Some(0), Some(u64::MAX)] {
            let mut bytes = Vec::new();
            body.write(request, &mut bytes).unwrap();
            let heard = receive(&mut &bytes[..]).unwrap();
            assert_eq!(heard.request, request);
            let Message::Gathered { values } = heard.message else { panic!("{heard:?}") };
            assert_eq!(values, [json!(0.1), json!({})]);
        }
        let mut bytes = Vec::new();
        Body::new(&Message::Stopping).unwrap().write(Some(7), &mut bytes).unwrap();
        assert!(matches!(receive(&mut &bytes[..]).unwrap().message, Message::Stopping));
    }
}
