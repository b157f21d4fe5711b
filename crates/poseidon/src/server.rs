use crate::job::config::{Config, Member};
use crate::node::Node;
use crate::node::session_parts::SessionParts;
use crate::{Error, Traffic};
use poseidon_core::ChannelId;

/// Runs a dedicated server until the last worker has said goodbye. Returns what it has exchanged.
pub fn serve(config: &Config) -> Result<Traffic, Error> {
    if let Member::Worker(rank) = config.member {
        return Err(Error::Config(format!(
            "this process is worker {rank}, not a server: set POSEIDON_SERVER to a server's index"
        )));
    }
    let node = Node::start(config, None, None)?;
    let parts = SessionParts::attach(&node, ChannelId::FIRST, node.book.clone());
    parts.wait_closed()?;
    Ok(parts.counters.traffic())
}
