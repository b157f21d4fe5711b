//! What training in the cluster has to reach.

use super::contender::Contender;
use super::scaling::{Case, DEEP, FC, LAYERS, Results, TRANSFORMER, VGG};
use crate::bench::targets::Verdict;

/// By how much a step on several nodes may take longer than alone, where the network is fast enough.
const SLOWER_THAN_ALONE: f64 = 1.05;
/// How many times faster than stock DDP a step has to be on the slow network.
const SPEEDUP: f64 = 4.0;
/// Part of stock DDP's CPU time a step may use.
const CPU: f64 = 0.5;

/// The nodes, and the fast and the slow network that the targets are stated for.
const NODES: u64 = 8;
const FAST: u64 = 1000;
const SLOW: u64 = 200;

/// Every target of a net with its verdict.
pub(super) fn verdicts(results: &Results) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let net = results.net.name;
    let at = |contender, mbit| Case { contender, nodes: NODES, mbit };
    let has = |contender| results.contenders.contains(&contender);
    // The update on the shards is a mode of its own, judged where there is one.
    let ours = [Contender::Poseidon, Contender::PoseidonServer];
    for ours in ours.into_iter().filter(|ours| *ours == Contender::Poseidon || has(*ours)) {
        let words = ours.words();
        let beside_ddp =
            |mbit| results.ratio(at(Contender::Ddp, mbit), at(ours, mbit), |run| run.seconds);
        if [VGG, FC].contains(&results.net) {
            verdicts.push(times(
                format!("{net}, {words}, {NODES} nodes, {FAST} Mbit/s: a step at most {SLOWER_THAN_ALONE}x alone's"),
                results.ratio(at(ours, FAST), at(Contender::Alone, FAST), |run| run.seconds),
                |ratio| ratio <= SLOWER_THAN_ALONE,
            ));
            verdicts.push(times(
                format!("{net}, {words}, {NODES} nodes, {SLOW} Mbit/s: at least {SPEEDUP}x as fast as stock DDP"),
                beside_ddp(SLOW),
                |ratio| ratio >= SPEEDUP,
            ));
            for mbit in [FAST, SLOW] {
                verdicts.push(times(
                    format!("{net}, {words}, {NODES} nodes, {mbit} Mbit/s: CPU time at most {CPU}x stock DDP's"),
                    results.ratio(at(ours, mbit), at(Contender::Ddp, mbit), |run| run.cpu),
                    |ratio| ratio <= CPU,
                ));
            }
        }
        let settings = match results.net {
            TRANSFORMER | DEEP => vec![(NODES, FAST), (NODES, SLOW)],
            LAYERS => results.settings.clone(),
            _ => Vec::new(),
        };
        for (nodes, mbit) in settings {
            let case = |contender| Case { contender, nodes, mbit };
            verdicts.push(times(
                format!(
                    "{net}, {words}, {nodes} nodes, {mbit} Mbit/s: at least as fast as stock DDP"
                ),
                results.ratio(case(Contender::Ddp), case(ours), |run| run.seconds),
                |ratio| ratio >= 1.0,
            ));
        }
    }
    for &(nodes, mbit) in &results.settings {
        let case = |contender| Case { contender, nodes, mbit };
        verdicts.push(times(
            format!("{net}, {nodes} nodes, {mbit} Mbit/s: stock DDP on the poseidon backend at least as fast as on Gloo"),
            results.ratio(case(Contender::Ddp), case(Contender::DdpPoseidon), |run| run.seconds),
            |ratio| ratio >= 1.0,
        ));
    }
    verdicts
}

fn times(target: String, ratio: Option<f64>, enough: fn(f64) -> bool) -> Verdict {
    let measured = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}x"));
    Verdict { target, measured, met: ratio.map(enough) }
}

#[cfg(test)]
mod tests {
    use super::super::scaling::tests::results;
    use super::*;

    fn missed(results: &Results) -> usize {
        verdicts(results).iter().filter(|verdict| verdict.met == Some(false)).count()
    }

    fn seconds(poseidon: f64) -> impl Fn(Contender) -> f64 {
        move |contender| match contender {
            Contender::Alone => 0.5,
            Contender::Poseidon => poseidon,
            _ => 3.0,
        }
    }

    #[test]
    fn fast_enough_meets_every_target() {
        for net in [VGG, FC, TRANSFORMER, DEEP, LAYERS] {
            let results = results(net, seconds(0.52));
            assert_eq!(missed(&results), 0);
            assert!(verdicts(&results).iter().all(|verdict| verdict.met == Some(true)));
        }
    }

    #[test]
    fn each_target_is_judged() {
        assert_eq!(missed(&results(VGG, seconds(0.6))), 1, "slower than alone");
        assert_eq!(missed(&results(VGG, seconds(1.4))), 2, "and less than 4x DDP");
        assert_eq!(missed(&results(VGG, seconds(1.6))), 4, "and more than half of its CPU");
        assert_eq!(missed(&results(TRANSFORMER, seconds(1.6))), 0);
        assert_eq!(missed(&results(TRANSFORMER, seconds(3.1))), 2);
        assert_eq!(missed(&results(DEEP, seconds(3.1))), 2);
        assert_eq!(missed(&results(LAYERS, seconds(3.1))), 2, "in every setting");
    }

    #[test]
    fn nothing_is_claimed_without_a_run() {
        let mut results = results(VGG, seconds(0.5));
        results.runs.clear();
        let verdicts = verdicts(&results);
        assert!(!verdicts.is_empty() && verdicts.iter().all(|verdict| verdict.met.is_none()));
    }
}
