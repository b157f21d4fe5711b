//! What may be asked of a group, and whether it can be.

use super::members::LEAST_ROUND;
use super::tensor::Tensor;
use crate::Error;
use poseidon_core::wire::Signature;
use poseidon_core::{Dtype, ReduceOp};
use std::fmt;

/// One operation, as one rank sees it. Collectives are begun by every rank of the group, in the same
/// order.
#[derive(Debug)]
pub enum Request {
    /// Everybody's tensors become their reduction, in place.
    AllReduce {
        /// The contribution, and the result.
        tensor: Tensor,
        /// How they are combined.
        op: ReduceOp,
    },
    /// Everybody gets the root's tensor.
    Broadcast {
        /// What is sent, or overwritten.
        tensor: Tensor,
        /// Whose tensor it is.
        root: u16,
    },
    /// The root's tensor becomes everybody's reduction; the others' stay as they are.
    Reduce {
        /// The contribution, and at the root the result.
        tensor: Tensor,
        /// Who gets the result.
        root: u16,
        /// How they are combined.
        op: ReduceOp,
    },
    /// Everybody gets everybody's tensor.
    AllGather {
        /// This rank's.
        input: Tensor,
        /// One for each rank, its own among them.
        outputs: Vec<Tensor>,
    },
    /// Rank r gets the reduction of everybody's r-th tensor.
    ReduceScatter {
        /// One for each rank.
        inputs: Vec<Tensor>,
        /// The result for this rank.
        output: Tensor,
        /// How they are combined.
        op: ReduceOp,
    },
    /// The root gets everybody's tensor.
    Gather {
        /// This rank's.
        input: Tensor,
        /// At the root one for each rank; empty elsewhere.
        outputs: Vec<Tensor>,
        /// Who gets them.
        root: u16,
    },
    /// Rank r gets the root's r-th tensor.
    Scatter {
        /// At the root one for each rank; empty elsewhere.
        inputs: Vec<Tensor>,
        /// This rank's.
        output: Tensor,
        /// Who has them.
        root: u16,
    },
    /// Rank r's s-th input becomes rank s's r-th output. Lengths may all be different.
    AllToAll {
        /// One for each rank.
        inputs: Vec<Tensor>,
        /// One for each rank.
        outputs: Vec<Tensor>,
    },
    /// Nobody goes on before everybody has come here.
    Barrier,
    /// A message to another rank. Messages of a tag are received in the order they were sent in.
    Send {
        /// What is sent.
        tensor: Tensor,
        /// To whom.
        to: u16,
        /// What the receiver asks for.
        tag: u32,
    },
    /// A message from another rank.
    Receive {
        /// Where it goes; the message has exactly its length.
        tensor: Tensor,
        /// From whom; from anybody if `None`.
        from: Option<u16>,
        /// What the sender called it.
        tag: u32,
    },
}

impl Request {
    /// What every frame of a collective says about it.
    pub(super) fn signature(&self) -> Signature {
        let (dtype, op, root, count) = match self {
            Self::AllReduce { tensor, op } => (tensor.dtype, *op, 0, tensor.count()),
            Self::Broadcast { tensor, root } => {
                (tensor.dtype, ReduceOp::Sum, *root, tensor.count())
            }
            Self::Reduce { tensor, root, op } => (tensor.dtype, *op, *root, tensor.count()),
            Self::ReduceScatter { output, op, .. } => (output.dtype, *op, 0, 0),
            Self::Gather { input, root, .. } => (input.dtype, ReduceOp::Sum, *root, 0),
            Self::Scatter { output, root, .. } => (output.dtype, ReduceOp::Sum, *root, 0),
            Self::AllGather { input, .. } => (input.dtype, ReduceOp::Sum, 0, 0),
            Self::AllToAll { .. } | Self::Barrier | Self::Send { .. } | Self::Receive { .. } => {
                (Dtype::Bytes, ReduceOp::Sum, 0, 0)
            }
        };
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        Signature { operation: self.number(), dtype, op, root, count }
    }

    /// Whether all ranks do it together.
    pub(super) fn is_collective(&self) -> bool {
        !matches!(self, Self::Send { .. } | Self::Receive { .. })
    }

    /// The request in parts, one for each of up to `lanes` lanes, in a group of `ranks`. It stays whole
    /// if it is too small to be cut, or is of a kind that goes straight between pairs of ranks. All
    /// ranks cut alike: only lengths count that every rank knows.
    pub(super) fn cut(self, lanes: usize, ranks: u16) -> Vec<Self> {
        fn total(tensors: &[Tensor]) -> usize {
            tensors.iter().map(|tensor| tensor.region.len()).sum()
        }
        let bytes = match &self {
            Self::AllReduce { tensor, .. }
            | Self::Broadcast { tensor, .. }
            | Self::Reduce { tensor, .. } => tensor.region.len(),
            Self::AllGather { outputs, .. } => total(outputs),
            Self::ReduceScatter { inputs, .. } => total(inputs),
            _ => 0,
        };
        let least = LEAST_PART.max(usize::from(ranks) * LEAST_ROUND);
        let count = lanes.min(bytes / least);
        if count < 2 {
            return vec![self];
        }
        match self {
            Self::AllReduce { tensor, op } => {
                tensor.cut(count).map(|tensor| Self::AllReduce { tensor, op }).collect()
            }
            Self::Broadcast { tensor, root } => {
                tensor.cut(count).map(|tensor| Self::Broadcast { tensor, root }).collect()
            }
            Self::Reduce { tensor, root, op } => {
                tensor.cut(count).map(|tensor| Self::Reduce { tensor, root, op }).collect()
            }
            Self::AllGather { input, outputs } => input
                .cut(count)
                .zip(cut_all(outputs, count))
                .map(|(input, outputs)| Self::AllGather { input, outputs })
                .collect(),
            Self::ReduceScatter { inputs, output, op } => output
                .cut(count)
                .zip(cut_all(inputs, count))
                .map(|(output, inputs)| Self::ReduceScatter { inputs, output, op })
                .collect(),
            whole => vec![whole],
        }
    }

    /// Refuses what no rank could do, before anything is sent.
    pub(super) fn check(&self, me: u16, size: u16) -> Result<(), Error> {
        let refuse = |why: String| Err(Error::Request { operation: self.name(), why });
        let signature = self.signature();
        let (dtype, op) = (signature.dtype, signature.op);
        let reduces = matches!(
            self,
            Self::AllReduce { .. } | Self::Reduce { .. } | Self::ReduceScatter { .. }
        );
        if reduces && !op.applies_to(dtype) {
            return refuse(format!("{op} of {dtype} is not defined"));
        }
        let ranks = match self {
            Self::Broadcast { root, .. }
            | Self::Reduce { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => Some(*root),
            Self::Send { to, .. } => Some(*to),
            Self::Receive { from, .. } => *from,
            _ => None,
        };
        if let Some(rank) = ranks.filter(|&rank| rank >= size) {
            return refuse(format!("rank {rank} of {size}: expected less than {size}"));
        }
        if matches!(self, Self::Send { to, .. } if *to == me)
            || matches!(self, Self::Receive { from: Some(from), .. } if *from == me)
        {
            return refuse(format!("rank {me} is this one: a message goes to another"));
        }
        for (what, list) in self.lists(me) {
            if list.len() != usize::from(size) {
                let got = list.len();
                return refuse(format!("{got} {what} among {size} ranks: expected one for each"));
            }
            if let Some(other) = list.iter().find(|t| t.dtype != list[0].dtype) {
                let (a, b) = (list[0].dtype, other.dtype);
                return refuse(format!("{what} of {a} and {b}: expected one type"));
            }
        }
        fn own(list: &[Tensor], me: u16) -> Option<&Tensor> {
            list.get(usize::from(me))
        }
        let pair = match self {
            Self::AllGather { input, outputs } | Self::Gather { input, outputs, .. } => {
                own(outputs, me).map(|output| (input, output))
            }
            Self::ReduceScatter { inputs, output, .. } | Self::Scatter { inputs, output, .. } => {
                own(inputs, me).map(|input| (input, output))
            }
            Self::AllToAll { inputs, outputs } => own(inputs, me).zip(own(outputs, me)),
            _ => None,
        };
        match pair {
            Some((a, b)) if a.count() != b.count() || a.dtype != b.dtype => {
                let words = |t: &Tensor| format!("{} {}", t.count(), t.dtype);
                let (a, b) = (words(a), words(b));
                refuse(format!("this rank's own part is {a} going in and {b} coming out"))
            }
            _ => Ok(()),
        }
    }

    /// Lists that must have one tensor for each rank, here.
    fn lists(&self, me: u16) -> Vec<(&'static str, &[Tensor])> {
        match self {
            Self::AllGather { outputs, .. } => vec![("outputs", outputs)],
            Self::ReduceScatter { inputs, .. } => vec![("inputs", inputs)],
            Self::Gather { outputs, root, .. } if *root == me => vec![("outputs", outputs)],
            Self::Scatter { inputs, root, .. } if *root == me => vec![("inputs", inputs)],
            Self::AllToAll { inputs, outputs } => vec![("inputs", inputs), ("outputs", outputs)],
            _ => Vec::new(),
        }
    }

    pub(super) fn number(&self) -> u8 {
        match self {
            Self::AllReduce { .. } => 1,
            Self::Broadcast { .. } => 2,
            Self::Reduce { .. } => 3,
            Self::AllGather { .. } => 4,
            Self::ReduceScatter { .. } => 5,
            Self::Gather { .. } => 6,
            Self::Scatter { .. } => 7,
            Self::AllToAll { .. } => 8,
            Self::Barrier => 9,
            Self::Send { .. } => 10,
            Self::Receive { .. } => 11,
        }
    }

    pub(super) fn name(&self) -> &'static str {
        name(self.number())
    }
}

/// By part: that part of each tensor.
fn cut_all(tensors: Vec<Tensor>, count: usize) -> Vec<Vec<Tensor>> {
    let mut parts: Vec<Vec<Tensor>> = (0..count).map(|_| Vec::new()).collect();
    for tensor in tensors {
        parts.iter_mut().zip(tensor.cut(count)).for_each(|(part, tensor)| part.push(tensor));
    }
    parts
}

/// A part of an operation has at least so many bytes. Another lane's thread has to be woken for it.
const LEAST_PART: usize = 512 << 10;

/// Whether the ranks of an operation may have tensors of different lengths. Then each frame states
/// the length of what it is a part of.
pub(super) fn is_uneven(operation: u8) -> bool {
    // From all_gather to all_to_all.
    (4..=8).contains(&operation)
}

/// What an operation's number means.
pub(super) fn name(number: u8) -> &'static str {
    const NAMES: [&str; 12] = [
        "an unknown operation",
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "gather",
        "scatter",
        "all_to_all",
        "barrier",
        "send",
        "receive",
    ];
    NAMES.get(usize::from(number)).unwrap_or(&NAMES[0])
}

/// A collective in words: `all_reduce(sum) of 100 float32`.
pub(super) struct Words(pub(super) Signature);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Signature { operation, dtype, op, root, count } = self.0;
        let name = name(operation);
        match operation {
            1 => write!(f, "{name}({op}) of {count} {dtype}"),
            2 => write!(f, "{name} of {count} {dtype} from rank {root}"),
            3 => write!(f, "{name}({op}) of {count} {dtype} to rank {root}"),
            4 if root > 1 => write!(f, "{name} of {dtype}, long enough for {root} lanes"),
            5 if root > 1 => write!(f, "{name}({op}) of {dtype}, long enough for {root} lanes"),
            5 => write!(f, "{name}({op}) of {dtype}"),
            6 => write!(f, "{name} of {dtype} to rank {root}"),
            7 => write!(f, "{name} of {dtype} from rank {root}"),
            4 => write!(f, "{name} of {dtype}"),
            _ => f.write_str(name),
        }
    }
}
