//! `poseidon lab`: a virtual cluster on this machine.

mod cluster;
mod iproute;
mod namespace;
mod switch;
mod switch_thread;
mod tap;

pub(crate) use cluster::{Carried, Lab, LabSpec, MOST_NODES, QUEUE};
pub(crate) use switch::Faults;

use crate::bandwidth::Bandwidth;
use crate::job_report;
use crate::plan::duration;
use crate::supervise::{self, Options};
use crate::terminal::say;
use crate::threads::Threads;
use anyhow::bail;
use cluster::MOST_RANKS;
use std::ffi::OsString;
use std::io;
use std::process::{Command, ExitCode};
use std::time::Duration;
use switch::{Counts, LATE, Probability};

/// Run CMD on every node of a virtual cluster: machines with slow links, inside this one.
///
/// Every node has a network of its own, connected to a switch by a link of --rate, each way. Nodes
/// reach each other and nothing else; files, processors and memory are this machine's. CMD finds in
/// its environment what torchrun would tell it (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT) and a secret for the cluster (POSEIDON_SECRET), so poseidon and
/// torch.distributed programs run as they are. Its lines are printed with its rank before them. If
/// OMP_NUM_THREADS is not set, all processes share this machine's cores.
///
/// When a node's command fails, the others are ended within two seconds, and the exit status is that
/// command's. Ctrl-C is passed on; a second one kills. Nothing stays behind, not even after a crash,
/// and any number of labs can run side by side.
///
/// Links with --delay, --loss, --reorder or --corrupt are joined by a switch inside this command,
/// which works on Ethernet frames of 1500 bytes and takes a processor for itself. On a quiet machine
/// with two cores it carries two nodes with 1 Gbit/s, or four with 200 Mbit/s; a frame takes about
/// 4 microseconds. At the end it says how many frames it has carried and lost, and how many it was
/// late with, and warns if those were more than one in a hundred.
///
/// Needs Linux with `ip` and `tc` (package iproute2), and either root or a kernel that lets users
/// make user namespaces. In a user namespace CMD believes to be root, with your own rights. The
/// switch needs /dev/net/tun.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Machines to pretend.
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_NODES)))]
    nodes: u16,

    /// Processes of every node, which share its link: a number for all nodes, or one for each, such
    /// as 3,1,4.
    #[arg(
        long,
        value_name = "R|R,R,…",
        default_value = "1",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_RANKS))
    )]
    ranks: Vec<u16>,

    /// Of every node's link, each way: 1gbit, 200mbit.
    #[arg(
        long,
        short = 'r',
        value_name = "RATE",
        default_value = "1gbit",
        allow_hyphen_values = true
    )]
    rate: Bandwidth,

    /// From one node to another, one way, on top of the few dozen microseconds this machine takes:
    /// 50us, 1ms.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration, allow_hyphen_values = true)]
    delay: Duration,

    /// What a port of the switch holds for a node before it drops: 256kb, 2mb (powers of 1024).
    #[arg(long, value_name = "SIZE", default_value = "2mb", value_parser = queue)]
    queue: u32,

    /// Frames that are lost by chance on the way from one node to another: 0.1%.
    #[arg(long, value_name = "PERCENT", default_value = "0%", allow_hyphen_values = true)]
    loss: Probability,

    /// Frames that skip --delay, so that they pass others.
    #[arg(long, value_name = "PERCENT", default_value = "0%", allow_hyphen_values = true)]
    reorder: Probability,

    /// Frames of which one bit is turned over.
    #[arg(long, value_name = "PERCENT", default_value = "0%", allow_hyphen_values = true)]
    corrupt: Probability,

    /// Of what happens by chance: with the same seed, the same of every node's frames are lost,
    /// counted from the first.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// TCP's congestion control between nodes.
    #[arg(long, value_name = "NAME", default_value = "cubic")]
    congestion: String,

    /// Tell CMD to encrypt everything between nodes: POSEIDON_ENCRYPT=1.
    #[arg(long)]
    encrypt: bool,

    /// Print a line per node at the end, on standard output: its number, bytes sent, bytes
    /// received, headers included.
    #[arg(long)]
    bytes: bool,

    /// The program each node runs, or each process of it, and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Why there is no virtual cluster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum LabError {
    /// A program of iproute2 is not there.
    #[error(
        "a virtual cluster needs '{name}', which is not installed: it is in the package iproute2 (Debian, \
         Ubuntu, Alpine) or iproute and iproute-tc (Fedora)"
    )]
    NoTool {
        /// Which.
        name: &'static str,
    },
    /// The kernel gives this process no network namespace.
    #[error(
        "a virtual cluster needs network namespaces: as root, or in a user namespace where users may have \
         one (check that the sysctls user.max_user_namespaces and kernel.unprivileged_userns_clone are not \
         0 and kernel.apparmor_restrict_unprivileged_userns is not 1; a container needs CAP_SYS_ADMIN)"
    )]
    Refused {
        /// What it said.
        source: io::Error,
    },
    /// There is no interface for a node.
    #[error(
        "links with delay or faults need taps, and {} gives none: as root, load the module 'tun', make \
         the device if it is not there ('mknod {} c 10 200'), and let the user open it",
        tap::DEVICE,
        tap::DEVICE
    )]
    Tap {
        /// What the system said.
        source: io::Error,
    },
    /// A program of iproute2 could not be run.
    #[error("cannot run '{name}' in a network namespace")]
    Start {
        /// Which.
        name: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A program of iproute2 did not do what it was told.
    #[error("'{name} {what}' failed: {said}{}", advice(said))]
    Tool {
        /// Which.
        name: &'static str,
        /// What it was told.
        what: String,
        /// What it said.
        said: String,
    },
    /// What `tc` counted cannot be read.
    #[error("'tc -s -j qdisc show' printed something else than its counters")]
    Counters {
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

impl LabError {
    fn refused(source: io::Error) -> Self {
        Self::Refused { source }
    }
}

/// Runs the command on every node and returns when all have ended.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let ranks = ranks_by_node(args.nodes, &args.ranks)?;
    Lab::prepare()?;
    let threads = Threads::shared_by(ranks.iter().sum());
    let lab = Lab::up(&LabSpec {
        ranks,
        rate: args.rate,
        delay: args.delay,
        congestion: args.congestion,
        queue: args.queue,
        faults: Faults {
            loss: args.loss,
            reorder: args.reorder,
            corrupt: args.corrupt,
            seed: args.seed,
        },
    })?;
    let command = || {
        let mut command = Command::new(&args.command[0]);
        command.args(&args.command[1..]);
        threads.describe(&mut command);
        if args.encrypt {
            command.env("POSEIDON_ENCRYPT", "1");
        }
        command
    };
    let outcome = supervise::run(lab.processes(command)?, Options::default())?;
    job_report::after_job();
    match lab.carried() {
        Ok(carried) if args.bytes => {
            for (node, Carried { sent, received }) in carried.iter().enumerate() {
                say(&format!("{node} {sent} {received}\n"))?;
            }
        }
        Ok(carried) => tracing::info!("{}", closing_line(&carried)),
        // How the command ended is what was asked for.
        Err(error) => tracing::warn!("bytes were not counted: {error}"),
    }
    if let Some(counts) = lab.switched() {
        if counts.late > counts.forwarded / 100 {
            tracing::warn!("{}: this machine is too slow for such links", switch_line(&counts));
        } else {
            tracing::info!("{}", switch_line(&counts));
        }
    }
    Ok(outcome.tell())
}

/// Processes of each node: one number counts for all nodes.
fn ranks_by_node(nodes: u16, ranks: &[u16]) -> anyhow::Result<Vec<u16>> {
    match ranks {
        [all] => Ok(vec![*all; nodes.into()]),
        each if each.len() == usize::from(nodes) => Ok(each.to_vec()),
        each => bail!("--ranks has numbers for {} nodes, and --nodes is {nodes}", each.len()),
    }
}

/// "each node sent 1.2 to 1.3 MB and received 1.2 MB, headers included".
fn closing_line(carried: &[Carried]) -> String {
    let range = |bytes: fn(&Carried) -> u64| {
        let shown = |bytes: Option<u64>| format!("{:.1}", bytes.unwrap_or(0) as f64 / 1e6);
        let (least, most) = (carried.iter().map(bytes).min(), carried.iter().map(bytes).max());
        match (shown(least), shown(most)) {
            (least, most) if least == most => format!("{most} MB"),
            (least, most) => format!("{least} to {most} MB"),
        }
    };
    format!(
        "each node sent {} and received {}, headers included",
        range(|c| c.sent),
        range(|c| c.received)
    )
}

/// "the switch carried 950 frames and lost 10; 40 found their queue full, …".
fn switch_line(counts: &Counts) -> String {
    let &Counts { forwarded, lost, overflowed, corrupted, late } = counts;
    format!(
        "the switch carried {forwarded} frames and lost {lost}; {overflowed} found their queue full, \
         {corrupted} were damaged, {late} came more than {} ms late",
        LATE.as_millis()
    )
}

/// A size such as 256kb that holds at least a frame.
fn queue(text: &str) -> Result<u32, String> {
    // At most 1 GB.
    crate::plan::queue(text).map(|bytes| bytes as u32)
}

/// What helps against the refusals that people meet.
fn advice(said: &str) -> &'static str {
    if said.contains("not permitted") {
        " (this process may make network namespaces but not use them: try as root, or set the sysctl \
         kernel.apparmor_restrict_unprivileged_userns to 0)"
    } else if said.contains("Unknown qdisc") || said.contains("qdisc kind is unknown") {
        " (the kernel lacks this kind of queue: it is the module sch_tbf)"
    } else {
        ""
    }
}

const EXAMPLES: &str = "\
Examples:
  Train on eight nodes with links of 1 Gbit/s:
    poseidon lab --nodes 8 --rate 1gbit -- poseidon train

  Train over long links that lose one packet in a thousand:
    poseidon lab --nodes 4 --rate 200mbit --delay 5ms --loss 0.1% -- poseidon train

  The same by PyTorch's own means, to compare:
    poseidon lab --nodes 8 --rate 1gbit -- python train_ddp.py

  How long 100 MB of gradients take on 200 Mbit/s:
    poseidon lab -n 4 -r 200mbit -- poseidon bench exchange --in-cluster --bytes 100MB

  Four machines with four processes each, which share their machine's link:
    poseidon lab -n 4 --ranks 4 -- poseidon bench exchange --in-cluster --bytes 10MB

  Look around on a node:
    poseidon lab -n 2 -- sh -c 'hostname; ip addr show eth0; env | grep MASTER'";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_has_a_range_where_nodes_differ() {
        let carried =
            [Carried { sent: 1_200_000, received: 5 }, Carried { sent: 1_260_000, received: 9 }];
        assert_eq!(
            closing_line(&carried),
            "each node sent 1.2 to 1.3 MB and received 0.0 MB, headers included"
        );
    }

    #[test]
    fn ranks_are_of_all_nodes_or_of_each() {
        assert_eq!(ranks_by_node(3, &[4]).unwrap(), [4, 4, 4]);
        assert_eq!(ranks_by_node(3, &[3, 1, 4]).unwrap(), [3, 1, 4]);
        let words = ranks_by_node(3, &[3, 1]).unwrap_err().to_string();
        assert_eq!(words, "--ranks has numbers for 2 nodes, and --nodes is 3");
    }

    #[test]
    fn a_queue_holds_at_least_a_frame() {
        assert_eq!(queue("256kb"), Ok(262_144));
        assert_eq!(queue("2MB"), Ok(2 << 20));
        assert_eq!(queue("4096"), Ok(4096));
        for bad in ["", "kb", "1kb", "-2kb", "2 parsecs", "1.5mb", "2gb", "9999999999gb"] {
            assert!(queue(bad).unwrap_err().contains("expected a size"), "{bad}");
        }
    }

    #[test]
    fn refusals_come_with_advice() {
        let error = LabError::Tool {
            name: "ip",
            what: "link add bridge type bridge".into(),
            said: "RTNETLINK answers: Operation not permitted".into(),
        };
        assert!(error.to_string().contains("try as root"), "{error}");
        assert!(LabError::NoTool { name: "tc" }.to_string().contains("iproute2"));
    }
}
