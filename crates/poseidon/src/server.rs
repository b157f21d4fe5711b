use crate::job::config::{Config, Member};
use crate::node::Node;
use crate::node::checkpoint::{PartWriter, Places, keep_serving};
use crate::node::session_parts::SessionParts;
use crate::{Error, Traffic};
use poseidon_core::ChannelId;
use std::sync::PoisonError;

/// Runs a dedicated server until the last worker has said goodbye. Returns what it has exchanged. It
/// gives up when the last goodbye comes too long after the first, or when nothing about any layer
/// comes for very long.
pub fn serve(config: &Config) -> Result<Traffic, Error> {
    if let Member::Worker(rank) = config.member {
        return Err(Error::Config(format!(
            "this process is worker {rank}, not a server: set POSEIDON_SERVER to a server's index"
        )));
    }
    let node = Node::start(config, None, None)?;
    let places = Places::open(&node.book.job)?;
    let (id, book) = (ChannelId::FIRST, node.book.clone());
    let parts = SessionParts::attach(&node, id, book.clone(), places.from.as_deref())?;
    let kept = parts.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
    let keeper = places.to.zip(kept).map(|(storage, kept)| {
        let writer = PartWriter::new(node.clone(), parts.board.clone(), book, storage);
        let serve = move || keep_serving(&writer, &kept);
        std::thread::Builder::new().name("poseidon-checkpoint".into()).spawn(serve)
    });
    let keeper = keeper.transpose().map_err(Error::io("starting a thread for checkpoints"))?;
    let ended = parts.wait_closed(None);
    if let Some(keeper) = keeper {
        // It ends with the session. A panic is a bug; its message is on standard error already.
        let _ = keeper.join();
    }
    node.observed.close(id, ended.as_ref().err());
    ended?;
    Ok(parts.counters.traffic())
}
