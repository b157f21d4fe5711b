//! What a training program can show of its node to people.

pub use crate::trace::Pass;

use crate::{Error, LayerId, Session};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

impl Session {
    /// From now on this node notes what it does, in memory of a fixed size: the last some ten thousand
    /// events stay. It does so from the beginning if its [observation](crate::config::Observation) asks
    /// for anything.
    pub fn record(&self) {
        self.node.observed.recorder.switch_on();
    }

    /// The program's threads compute `pass` from now on. So people can see when it computes, and not
    /// only when it waits. What a backward pass has computed belongs to the layer that is sent next.
    /// Costs nothing while nothing is [recorded](Session::record).
    pub fn begin_pass(&self, pass: Pass) {
        self.parts.trace.begin_pass(Some(pass));
    }

    /// The pass has computed `layer`: all it did since it began, or since the layer before this one.
    pub fn computed(&self, layer: LayerId) {
        self.parts.trace.computed(layer);
    }

    /// The pass that [began](Session::begin_pass) is over.
    pub fn end_pass(&self) {
        self.parts.trace.begin_pass(None);
    }

    /// Writes what this node has noted so far into `folder`, and returns the path of the file. The file
    /// is what `POSEIDON_REPORT` makes: `poseidon report` makes a page of those of all nodes, and
    /// Perfetto opens them.
    pub fn write_trace(&self, folder: &Path) -> Result<PathBuf, Error> {
        self.node.check_owner()?;
        if self.node.observed.recorder.on().is_none() {
            let fix = "call record() before the steps that matter, or set POSEIDON_REPORT";
            return Err(Error::Config(format!("nothing was recorded: {fix}")));
        }
        self.node.observed.write_into(folder)
    }

    /// Tells `value`, such as a loss, to whoever looks at this node's scalars in TensorBoard. Of each
    /// name the last value of about a second is kept. Does nothing unless the node's
    /// [observation](crate::config::Observation) asks for scalars.
    pub fn scalar(&self, name: &str, value: f64) {
        self.node.observed.scalar(name, value);
    }

    /// Where this node serves metrics, if it does.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.node.observed.metrics_address()
    }
}
