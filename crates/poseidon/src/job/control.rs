//! What is said on control connections: one JSON object a frame (`docs/wire.md` §3).

use crate::job::book::{Book, Job, NodeFacts};
use crate::job::gather::Post;
use poseidon_core::wire::{Header, HeaderError, Kind, MAX_CONTROL, NOBODY};
use poseidon_core::{NodeId, Servers};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{self, Read};
use std::sync::Arc;

/// A message, either way.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Message {
    Join(Box<Join>),
    Book(Box<Book>),
    Refused { reason: String },
    Query { key: String },
    Answer { value: Option<Value> },
    Gather(Post),
    Gathered { values: Vec<Value> },
    Missing { nodes: Vec<NodeId> },
}

impl Message {
    /// Its type, as the wire says it: what it carries may be long.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Join(_) => "join",
            Self::Book(_) => "book",
            Self::Refused { .. } => "refused",
            Self::Query { .. } => "query",
            Self::Answer { .. } => "answer",
            Self::Gather(_) => "gather",
            Self::Gathered { .. } => "gathered",
            Self::Missing { .. } => "missing",
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
    /// Workers only: a dedicated server takes what it gets.
    pub(crate) job: Option<Job>,
}

/// A frame of the coordinator's, ready to be written: those who wait for one thing share it.
pub(crate) type Answer = Arc<Vec<u8>>;

/// What the coordinator writes: `message`, or a refusal if that is too large.
pub(crate) fn answer(message: &Message) -> io::Result<Answer> {
    let refusal = |e: io::Error| frame(NOBODY, &Message::Refused { reason: e.to_string() });
    frame(NOBODY, message).or_else(refusal).map(Arc::new)
}

/// `message` with its header.
pub(crate) fn frame(sender: NodeId, message: &Message) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; Header::SIZE];
    serde_json::to_writer(&mut bytes, message)?;
    let got = bytes.len() - Header::SIZE;
    if got > MAX_CONTROL {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("a control message of {got} bytes, at most {MAX_CONTROL}"),
        ));
    }
    let header = Header::bare(Kind::Control, sender, got as u32);
    bytes[..Header::SIZE].copy_from_slice(&header.encode());
    Ok(bytes)
}

pub(crate) fn receive(stream: &mut impl Read) -> io::Result<Message> {
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
    // Grows as bytes really come: an announced length alone reserves nothing.
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
