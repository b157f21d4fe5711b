//! Who trains in the cluster.

use crate::bench::charts;
use clap::ValueEnum;
use plotters::style::RGBColor;
use serde::{Deserialize, Serialize};

/// A way to keep the workers' parameters equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Contender {
    /// One worker, plain PyTorch
    Alone,
    /// A worker on every node, each by itself: what the machine leaves for computing, nothing synchronised
    Apart,
    /// Stock DistributedDataParallel on Gloo
    Ddp,
    /// The same, with gradients rounded to 16 bits: lossy, for comparison
    DdpFp16,
    /// Stock DistributedDataParallel on NCCL, over TCP; `bench gpu` alone has it
    DdpNccl,
    /// Stock DistributedDataParallel on the `poseidon` backend
    DdpPoseidon,
    /// poseidon.torch, each layer by what is cheapest
    Poseidon,
    /// poseidon.torch, every layer through the servers
    PoseidonPs,
    /// poseidon.torch with the update rule on the shards
    PoseidonServer,
}

impl Contender {
    /// As `bench/peers/torch_train.py` calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Apart => "apart",
            Self::Ddp => "ddp",
            Self::DdpFp16 => "ddp-fp16",
            Self::DdpNccl => "ddp-nccl",
            Self::DdpPoseidon => "ddp-poseidon",
            Self::Poseidon => "poseidon",
            Self::PoseidonPs => "poseidon-ps",
            Self::PoseidonServer => "poseidon-server",
        }
    }

    /// In a table.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Apart => "apart, not synchronised",
            Self::Ddp => "stock DDP, Gloo",
            Self::DdpFp16 => "stock DDP, Gloo, fp16 hook (lossy)",
            Self::DdpNccl => "stock DDP, NCCL over TCP",
            Self::DdpPoseidon => "stock DDP, poseidon backend",
            Self::Poseidon => "poseidon.torch",
            Self::PoseidonPs => "poseidon.torch, scheme ps",
            Self::PoseidonServer => "poseidon.torch, update server",
        }
    }

    /// Under a bar.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Apart => "apart",
            Self::Ddp => "DDP",
            Self::DdpFp16 => "fp16",
            Self::DdpNccl => "NCCL",
            Self::DdpPoseidon => "backend",
            Self::Poseidon => "poseidon",
            Self::PoseidonPs => "ps",
            Self::PoseidonServer => "server",
        }
    }

    pub(crate) fn colour(self) -> RGBColor {
        match self {
            Self::Alone => charts::GREY,
            Self::Apart => RGBColor(190, 190, 190),
            Self::Ddp => charts::ORANGE,
            Self::DdpFp16 => RGBColor(230, 159, 0),
            Self::DdpNccl => RGBColor(240, 228, 66),
            Self::DdpPoseidon => RGBColor(204, 121, 167),
            Self::Poseidon => charts::BLUE,
            Self::PoseidonPs => RGBColor(86, 180, 233),
            Self::PoseidonServer => charts::GREEN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line_and_of_the_script() {
        for contender in Contender::value_variants() {
            let name = contender.name();
            assert_eq!(contender.to_possible_value().unwrap().get_name(), name);
            assert_eq!(serde_json::to_value(contender).unwrap(), name);
        }
    }
}
