//! How a layer is synchronised, and which way is the cheapest exact one for it.

use crate::cost::{MESSAGE, Setting};
use crate::share::Traffic;
use crate::{Cluster, Encoding, Encodings, Layer, LayerKind, Servers, Tree};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How a layer is synchronised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Scheme {
    /// Sharded parameter server: every worker pushes its gradient's chunks to the shards that hold
    /// them and gets the results back. A node that is both sends 2·len·(P - 1)/P parameters.
    Ps,
    /// Sufficient factor broadcasting: every worker sends its batch's factors, K·(M + N) numbers, to
    /// every other one, and each rebuilds the sum of the gradients with one matrix product.
    Sfb,
}

/// Which schemes the plan may choose from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// For every layer the one that moves the fewest bytes, where that is worth messages of their own.
    #[default]
    Auto,
    /// Parameter server for every layer.
    Ps,
    /// Factors for every layer that has them.
    Sfb,
}

/// A scheme, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// How the layer is synchronised.
    pub scheme: Scheme,
    /// The reason, for people.
    pub reason: String,
}

/// The scheme for `layer`: Poseidon 2017, Algorithm 1, with the busiest node of this very cluster
/// (`docs/adr/0013-algorithm-1-with-dedicated-servers.md`) and a cost per message. `batch` is how many samples a worker
/// has per step; `None` if factors will not be sent.
///
/// By factors no result travels: a worker rebuilds it, in `f32`. So a layer whose results are of another type does not
/// go by factors.
pub fn choose(layer: &Layer, cluster: &Cluster, batch: Option<usize>, policy: Policy) -> Choice {
    match layer.down {
        Encoding::F32 => compare(layer, cluster, batch, policy),
        down => {
            let reason = format!("its results are {down}, and factors give f32");
            Choice { scheme: Scheme::Ps, reason }
        }
    }
}

/// As [`choose`], for a program that would take a result in `f32` if the layer went by factors, and in the layer's own
/// encoding otherwise.
pub fn compare(layer: &Layer, cluster: &Cluster, batch: Option<usize>, policy: Policy) -> Choice {
    let ps = |reason: &str| Choice { scheme: Scheme::Ps, reason: reason.into() };
    let LayerKind::Fc { m, n } = layer.kind else {
        return ps("its gradient has no factors");
    };
    let Some(batch) = batch else {
        return ps("the batch size is not known, so factors cannot be sent");
    };
    if cluster.workers() == 1 {
        return ps("one worker: nothing is exchanged");
    }
    if policy == Policy::Ps {
        return ps("as told");
    }
    let servers = cluster.server_ids().count();
    let setting = Setting { m, n, batch, workers: cluster.workers(), servers };
    let tree = Tree::new(cluster);
    let traffic = Traffic::new(cluster, &tree);
    // The busiest node decides: the others wait for it. Where nodes share ports, or ports differ, it
    // is the busiest port.
    let (matrices, factors, whose) = match cluster.servers() {
        _ if !tree.is_flat() || !traffic.has_equal_ports() => {
            let (matrices, factors) = setting.at_port(traffic.matrices(), traffic.factors());
            let equal = traffic.has_equal_ports();
            (matrices, factors, if equal { "per host" } else { "at the slowest port" })
        }
        Servers::Dedicated(_) => {
            let busiest = setting.ps_server().max(setting.ps_worker());
            (busiest, setting.sfb_worker(), "per node")
        }
        Servers::Colocated | Servers::Mixed(_) => {
            (setting.ps_both(), setting.sfb_worker(), "per node")
        }
    };
    // A number counts as the part of an f32 that its bytes are. Half of what crosses an interface goes up, half comes
    // down; factors go up only, to everybody.
    let Encodings { up, down } = layer.encodings();
    let part = |bytes: usize| bytes as f64 / size_of::<f32>() as f64;
    let matrices = matrices * part(up.width() + down.width()) / 2.0;
    let factors = factors * part(up.width());
    let saved = matrices - factors;
    let (factors, matrices) = (Count(factors), Count(matrices));
    let (scheme, reason) = if policy == Policy::Sfb {
        let words = format!("as told: factors {factors}, matrices {matrices} parameters {whose}");
        (Scheme::Sfb, words)
    } else if saved < 0.0 {
        (Scheme::Ps, format!("factors {factors} > matrices {matrices} parameters {whose}"))
    } else if saved < MESSAGE {
        // Half of what crosses the interface is sent.
        let bytes = |parameters: f64| parameters / 2.0 * size_of::<f32>() as f64 / 1024.0;
        let (saved, cost) = (bytes(saved), bytes(MESSAGE));
        let words = format!(
            "factors would save {saved:.1} KiB {whose}, less than messages of their own cost ({cost:.0} KiB)"
        );
        (Scheme::Ps, words)
    } else {
        (Scheme::Sfb, format!("factors {factors} ≤ matrices {matrices} parameters {whose}"))
    };
    Choice { scheme, reason }
}

/// A number of parameters as people say it.
struct Count(f64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            x if x < 1e3 => write!(f, "{x:.0}"),
            x if x < 1e6 => write!(f, "{:.1}K", x / 1e3),
            x => write!(f, "{:.1}M", x / 1e6),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ps => "ps",
            Self::Sfb => "sfb",
        })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Ps => "ps",
            Self::Sfb => "sfb",
        })
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "ps" => Ok(Self::Ps),
            "sfb" => Ok(Self::Sfb),
            _ => Err(format!("expected 'auto', 'ps' or 'sfb', got '{s}'")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Port, Rate};

    fn fc(m: usize, n: usize) -> Layer {
        Layer { kind: LayerKind::Fc { m, n }, ..Layer::new("fc", m * n + m) }
    }

    fn scheme(layer: &Layer, workers: u16, servers: Servers, batch: usize) -> Scheme {
        let cluster = Cluster::new(workers, servers, 1).unwrap();
        choose(layer, &cluster, Some(batch), Policy::Auto).scheme
    }

    /// Poseidon 2017 §5.2: VGG19's large layers go by factors at K = 32 on 8 nodes, GoogLeNet's thin
    /// classifier (1000 x 1024) at K = 128 on 16 nodes does not.
    #[test]
    fn the_papers_own_choices() {
        assert_eq!(scheme(&fc(4096, 25088), 8, Servers::Colocated, 32), Scheme::Sfb);
        assert_eq!(scheme(&fc(4096, 4096), 8, Servers::Colocated, 32), Scheme::Sfb);
        assert_eq!(scheme(&fc(21841, 4096), 32, Servers::Colocated, 32), Scheme::Sfb);
        assert_eq!(scheme(&fc(1000, 1024), 16, Servers::Colocated, 128), Scheme::Ps);
    }

    #[test]
    fn the_choice_turns_where_the_formula_does() {
        // 2K(P-1)(M+N) against 4MN(P-1)/P: with M = N and P = 4 they are equal at K = M/4, and at one less they
        // differ by 12,288 parameters, which is more than a message costs.
        let layer = fc(1024, 1024);
        assert_eq!(scheme(&layer, 4, Servers::Colocated, 255), Scheme::Sfb);
        assert_eq!(scheme(&layer, 4, Servers::Colocated, 256), Scheme::Ps);
    }

    /// ADR 0013. Nodes that only serve have other costs than nodes that are both, which is the cell of Table 1 that
    /// Algorithm 1 names; with it, the choice would turn at K = 512 with one server and at K = 256 with four.
    #[test]
    fn with_dedicated_servers_the_busiest_of_their_nodes_decides() {
        let layer = fc(1024, 1024);
        // One server for 4 workers moves 8MN: factors pay up to K = 2M/3.
        assert_eq!(scheme(&layer, 4, Servers::Dedicated(1), 682), Scheme::Sfb);
        assert_eq!(scheme(&layer, 4, Servers::Dedicated(1), 683), Scheme::Ps);
        // Four of them move 2MN each, as much as a worker: factors pay up to K = M/6.
        assert_eq!(scheme(&layer, 4, Servers::Dedicated(4), 170), Scheme::Sfb);
        assert_eq!(scheme(&layer, 4, Servers::Dedicated(4), 171), Scheme::Ps);
    }

    /// Factors that save less than 16 KiB per worker are not worth messages of their own, unless they are told to go.
    #[test]
    fn a_message_costs_something() {
        let cluster = Cluster::new(8, Servers::Colocated, 1).unwrap();
        // 64 x 64 at K = 8: 14,336 parameters either way.
        let choice = choose(&fc(64, 64), &cluster, Some(8), Policy::Auto);
        assert_eq!(choice.scheme, Scheme::Ps);
        let words =
            "factors would save 0.0 KiB per node, less than messages of their own cost (16 KiB)";
        assert_eq!(choice.reason, words);
        // 128 x 128 at K = 12 or 13: 57,344 parameters as matrices, 43,008 or 46,592 as factors; the difference is
        // 28.0 or 21.0 KiB each way. At K = 14 it is 14.0 KiB.
        for (batch, expected) in [(12, Scheme::Sfb), (13, Scheme::Sfb), (14, Scheme::Ps)] {
            let choice = choose(&fc(128, 128), &cluster, Some(batch), Policy::Auto);
            assert_eq!(choice.scheme, expected, "{}", choice.reason);
        }
        let told = choose(&fc(64, 64), &cluster, Some(8), Policy::Sfb);
        assert_eq!(told.scheme, Scheme::Sfb);
        assert!(
            told.reason.starts_with("as told: factors 14.3K, matrices 14.3K"),
            "{}",
            told.reason
        );
    }

    /// The slow port's own gradient is all that it carries for matrices, 2MN each step, and factors
    /// go to all others through it: 2K(P-1)(M+N). With equal ports factors pay up to K = M/4.
    #[test]
    fn where_ports_differ_the_slowest_decides() {
        let layer = fc(1024, 1024);
        let rate = |mbit: u64| Rate::new(mbit * 1_000_000).unwrap();
        let ports = [1000, 1000, 100, 1000].into_iter().zip(0..);
        let ports = ports.map(|(mbit, number)| Port { number, rate: rate(mbit) }).collect();
        let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap().with_ports(ports).unwrap();
        let choose = |batch| choose(&layer, &cluster, Some(batch), Policy::Auto);
        assert_eq!(choose(169).scheme, Scheme::Sfb);
        let choice = choose(171);
        assert_eq!(choice.scheme, Scheme::Ps);
        assert!(choice.reason.ends_with("parameters at the slowest port"), "{}", choice.reason);
    }

    /// On 4 hosts matrices are what they are between 4 nodes, and factors are four times as many: with
    /// M = N they are equal at K = M/16.
    #[test]
    fn ranks_of_a_host_add_to_its_factors_and_not_to_its_matrices() {
        let hosts = (0..16).map(|rank| rank / 4).collect();
        let cluster = Cluster::new(16, Servers::Colocated, 1).unwrap();
        let cluster = cluster.with_hosts(hosts, Vec::new()).unwrap();
        let choose = |batch| choose(&fc(1024, 1024), &cluster, Some(batch), Policy::Auto);
        assert_eq!(choose(63).scheme, Scheme::Sfb);
        let choice = choose(65);
        assert_eq!(choice.scheme, Scheme::Ps);
        let words = "factors 3.2M > matrices 3.1M parameters per host";
        assert_eq!(choice.reason, words);
    }

    #[test]
    fn what_has_no_factors_goes_by_parameter_server_and_says_why() {
        let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
        let conv = Layer { kind: LayerKind::Conv, ..Layer::new("conv", 800) };
        let choice = choose(&conv, &cluster, Some(32), Policy::Sfb);
        assert_eq!((choice.scheme, &*choice.reason), (Scheme::Ps, "its gradient has no factors"));
        let choice = choose(&fc(4096, 4096), &cluster, None, Policy::Auto);
        assert_eq!(choice.scheme, Scheme::Ps);
        assert!(choice.reason.contains("batch size is not known"));
        let choice = choose(&fc(10, 10), &cluster, Some(1000), Policy::Auto);
        assert!(choice.reason.starts_with("factors 120.0K > matrices 300"), "{}", choice.reason);
    }

    #[test]
    fn policies_round_trip_through_text() {
        for policy in [Policy::Auto, Policy::Ps, Policy::Sfb] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert!("both".parse::<Policy>().unwrap_err().contains("'both'"));
    }

    #[test]
    fn numbers_cost_what_their_bytes_do() {
        let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
        let layer = |up, down| fc(512, 512).encoded(Encodings { up, down });
        let reason = |layer| compare(&layer, &cluster, Some(32), Policy::Auto).reason;
        let (f32, bf16) = (Encoding::F32, Encoding::Bf16);
        // Matrices: 2 · 512² · 6 / 4 parameters. Factors: 2 · 3 · 32 · 1024.
        assert!(reason(layer(f32, f32)).contains("factors 196.6K ≤ matrices 786.4K"));
        assert!(reason(layer(bf16, bf16)).contains("factors 98.3K ≤ matrices 393.2K"));
        assert!(reason(layer(bf16, f32)).contains("factors 98.3K ≤ matrices 589.8K"));
        // What is rebuilt is f32: only a layer that takes it as such goes by factors.
        let choice = choose(&layer(bf16, bf16), &cluster, Some(32), Policy::Sfb);
        assert_eq!(choice.scheme, Scheme::Ps);
        assert!(choice.reason.contains("results are bf16"), "{}", choice.reason);
        assert_eq!(choose(&layer(bf16, f32), &cluster, Some(32), Policy::Auto).scheme, Scheme::Sfb);
    }
}
