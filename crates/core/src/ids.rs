use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The id as an index into a table.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A process of the cluster. Workers come first: a worker's node id is its rank.
    NodeId(u16)
}
id! {
    /// A layer's position in the forward order.
    LayerId(u32)
}
id! {
    /// One thread of a node, connected to the same lane of every other node.
    LaneId(u16)
}
id! {
    /// The iteration number of a layer. 0 is the initial value; the first step is 1.
    Clock(u64)
}
id! {
    /// Which edition of a book, and so of a plan. The first is 1; 0 is not known yet.
    Epoch(u32)
}
id! {
    /// What a frame on a link belongs to. 0 is the link itself, 1 the job's first session.
    ChannelId(u32)
}

impl ChannelId {
    /// The link itself: heartbeats, and the last words of a node.
    pub const LINK: Self = Self(0);
    /// The session a job begins with.
    pub const FIRST: Self = Self(1);
}

impl Epoch {
    /// The arrangement a job begins with.
    pub const FIRST: Self = Self(1);

    /// The epoch after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Clock {
    /// The clock after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}
