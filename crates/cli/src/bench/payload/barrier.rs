//! How workers meet before an exchange is timed.

use poseidon::collectives::{Request, Terms};
use poseidon::{Buffer, Group, LayerId, Session};
use std::sync::Arc;

/// A barrier of all workers, by the same means as what is exchanged: an engine that carries both a
/// session and a group would be measured as well otherwise.
pub(crate) enum Barrier {
    /// A layer of one number.
    Layer { layer: LayerId, beat: Buffer },
    /// A collective.
    Group(Arc<Group>),
}

impl Barrier {
    /// By a layer. All workers call it. `stateful` is whether layers have to be initialised.
    pub(super) fn of_layer(
        session: &Session,
        layer: LayerId,
        stateful: bool,
    ) -> anyhow::Result<Self> {
        let mut beat = Buffer::zeroed(1);
        if stateful {
            session.broadcast(layer, beat)?;
            beat = session.receive(layer)?.result;
        }
        Ok(Self::Layer { layer, beat })
    }

    /// Waits until every worker is here.
    pub(crate) fn pass(&mut self, session: &Session) -> anyhow::Result<()> {
        match self {
            Self::Layer { layer, beat } => {
                session.send(*layer, std::mem::take(beat))?;
                *beat = session.receive(*layer)?.result;
            }
            Self::Group(group) => {
                let terms = Terms { timeout: session.timeout(), waits: true };
                let work = group.begin(Request::Barrier, terms, Box::new(()))?;
                while !work.wait(terms.timeout)? {}
            }
        }
        Ok(())
    }
}
