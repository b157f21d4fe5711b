//! Questions to a coordinator, of somebody who is no node of its job.

use crate::job::control::{Body, Message, Numbered, receive};
use crate::job::live::{LIVE, LiveJob};
use crate::{Error, RendezvousError};
use poseidon_core::wire::NOBODY;
use poseidon_core::{NodeId, Rate};
use poseidon_link::{Address, Caller, Credentials, connect};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Asks the coordinator at `address` for `key` of the information book: a dotted path, empty for all
/// of it. `plan` is a list of [`PlannedLayer`](crate::PlannedLayer)s, `chunks` one of
/// [`PlacedChunk`](crate::PlacedChunk)s. `live` is what the job does now, a
/// [`LiveJob`](crate::LiveJob). `None` if the key names nothing.
pub fn query(
    address: &str,
    credentials: &Credentials,
    key: &str,
    patience: Duration,
) -> Result<Option<Value>, Error> {
    ask(address, credentials, &Message::Query { key: key.into() }, patience)
}

/// Asks the coordinator at `address` what its job does now.
pub fn query_live(
    address: &str,
    credentials: &Credentials,
    patience: Duration,
) -> Result<LiveJob, Error> {
    let job = ask(address, credentials, &Message::Query { key: LIVE.into() }, patience)?;
    job.ok_or_else(|| {
        let why = "it tells nothing of its job".into();
        RendezvousError::Broken { address: address.into(), why }.into()
    })
}

/// Has the coordinator at `address` tell `node`, or every node, what it may send to other hosts from
/// now on. `None` is no limit. Returns the nodes that were told. A node that has left the job is not
/// among them.
pub fn set_bandwidth_budget(
    address: &str,
    credentials: &Credentials,
    rate: Option<Rate>,
    node: Option<NodeId>,
    patience: Duration,
) -> Result<Vec<NodeId>, Error> {
    let told = ask(address, credentials, &Message::Budget { rate, node }, patience)?;
    Ok(told.unwrap_or_default())
}

/// Says one thing to the coordinator at `address` and waits for its answer. None if it says nothing.
fn ask<T: DeserializeOwned>(
    address: &str,
    credentials: &Credentials,
    message: &Message,
    patience: Duration,
) -> Result<Option<T>, Error> {
    let deadline = Instant::now() + patience;
    let caller = Caller::control(NOBODY);
    let mut stream = connect(&Address::Tcp(address.into()), caller, credentials, deadline)
        .map_err(|e| Error::connect(format!("reaching the coordinator at {address}"), e))?;
    stream.set_deadline(Some(deadline));
    let heard = Body::new(message).and_then(|body| {
        body.write(None, &mut stream)?;
        receive(&mut stream)
    });
    let address = address.to_string();
    let why = match heard {
        Ok(Numbered { message: Message::Answer { value }, .. }) => {
            match value.map(|text| serde_json::from_str(text.get())).transpose() {
                Ok(value) => return Ok(value),
                Err(e) => format!(
                    "its answer is not what was asked for, so it may be of another version: {e}"
                ),
            }
        }
        Ok(Numbered { message: Message::Refused { reason }, .. }) => {
            return Err(RendezvousError::Refused { address, reason }.into());
        }
        Ok(other) => format!("expected an answer, got {}", other.message.name()),
        Err(e) => e.to_string(),
    };
    Err(RendezvousError::Broken { address, why }.into())
}
