//! The training part's tables, with what the wire allows, and its targets.

use super::lab::Lab;
use super::training::{Case, Results, Turn};
use crate::bench::finding::Finding;
use crate::bench::ratio::{Ratio, Verdict as Beside};
use crate::bench::targets::Verdict;
use crate::bench::torch::contender::Contender;

/// Where Gloo's step takes longer than this many times what it needs at least, ours has to be faster.
const ROOM: f64 = 1.05;
/// What a step of ours should take at most, in times of what it needs at least.
const AIM: f64 = 1.10;
/// Seconds that a step of VGG19 on four ranks should take at most at 10 Gbit/s, in float32.
const VGG19: f64 = 0.16;

/// Bytes of a full Ethernet frame, and of the payload in it: IP and TCP with timestamps take the
/// rest. A port counts all of it.
const FRAME: f64 = 1514.0;
const PAYLOAD: f64 = 1448.0;

/// Contenders that are judged.
const OURS: [Contender; 2] = [Contender::Poseidon, Contender::PoseidonServer];

/// What the turns so far show.
pub(super) fn finding(results: &Results, lab: &Lab) -> Finding {
    let mut text = format!(
        "All ranks share this machine's GPU. Nodes are network namespaces, whose ports have the given rate each way. P is \
         the number of nodes, with a rank each, or nodes x ranks on each. Ranks are processes that start once; the contenders take turns in them, {} round(s) of at most {} \
         steps and about {} s. A step ends when the device has done all of it, and takes as long as on its slowest \
         rank. A turn is the median of its steps, and the median of the turns counts. `apart` is the same without \
         synchronisation. The wire's bound is the time that a port needs for the bytes of a step with their \
         headers: for an all-reduce and for parameter servers 2(P-1)/P times the gradients, for our plan what it \
         sends, factors where it chose factors. NCCL's kernels spin while they wait and so slow down the other ranks \
         on the shared GPU: it would do better on a cluster with a GPU for every rank.\n",
        lab.rounds,
        lab.turn_steps(),
        lab.turn_seconds,
    );
    let mut precisions: Vec<&str> = Vec::new();
    for case in &results.cases {
        if !precisions.contains(&case.precision.as_str()) {
            precisions.push(&case.precision);
        }
    }
    for precision in precisions {
        text += &format!("\n### {}\n\n", words_of(precision));
        text += &overview(results, precision);
    }
    text += "\n### All turns\n\n";
    text += "In brackets: the interval that has the median with 95% confidence, or the range of fewer than 6 rounds. \
             `times its bound` is the time by the larger of `apart` and the wire's bound. CPU seconds are those of all \
             ranks together, MB those of the rank that sent most.\n\n\
             | net | | P | Gbit/s | | seconds per step | times its bound | Gloo's time by this | samples/s in total | \
             CPU s per step | MB sent | layers by factors |\n\
             | --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for case in &results.cases {
        for &contender in &results.contenders {
            text += &details(results, case, contender);
        }
    }
    text += "\n![seconds per step](training.svg)\n";
    if !results.failures.is_empty() {
        text += &format!("\nWhat did not run:\n\n- {}\n", results.failures.join("\n- "));
    }
    Finding { text, verdicts: verdicts(results) }
}

fn words_of(precision: &str) -> &str {
    match precision {
        "fp32" => "float32",
        "autocast" => "bf16 autocast, gradients in float32",
        "bf16" => "parameters and gradients in bf16",
        other => other,
    }
}

/// A row for each case: everybody's seconds beside the bounds.
fn overview(results: &Results, precision: &str) -> String {
    let mut head = "| net | P | Gbit/s |".to_owned();
    let mut line = "| --- | ---: | ---: |".to_owned();
    for contender in &results.contenders {
        head += &format!(" {} |", contender.words());
        line += " ---: |";
    }
    let ours = |contender: &&Contender| OURS.contains(contender);
    for contender in results.contenders.iter().filter(ours) {
        head += &format!(" Gloo's time by {}'s |", contender.words());
        line += " ---: |";
    }
    let mut text = format!(
        "{head} wire's bound, all-reduce | wire's bound, our plan |\n{line} ---: | ---: |\n"
    );
    for case in results.cases.iter().filter(|case| case.precision == precision) {
        let (places, gbit) = (case.places(), case.mbit as f64 / 1000.0);
        text += &format!("| {} | {places} | {gbit} |", case.net);
        for &contender in &results.contenders {
            text += &format!(" {} |", shown(results.median(case, contender, seconds), 3));
        }
        for &contender in results.contenders.iter().filter(ours) {
            text += &format!(" {} |", ratio_words(beside_gloo(results, case, contender)));
        }
        let planned = planned_wire(results, case, Contender::Poseidon);
        text += &format!(" {:.3} | {} |\n", all_reduce_wire(case), shown(planned, 3));
    }
    text
}

fn details(results: &Results, case: &Case, contender: Contender) -> String {
    let Case { net, precision, nodes, ranks_per_node, mbit, batch, .. } = case;
    let times: Vec<_> = results.of(case, contender).map(seconds).collect();
    let Some(times) = Ratio::of(times) else { return String::new() };
    let Ratio { median, low, high, .. } = times;
    let bound = bound(results, case, contender).map(|bound| median / bound);
    format!(
        "| {net} | {precision} | {} | {} | {} | {median:.4} ({low:.4} to {high:.4}) | {} | {} | {:.1} | {} | {} | {} |\n",
        case.places(),
        *mbit as f64 / 1000.0,
        contender.words(),
        shown(bound, 2),
        ratio_words(beside_gloo(results, case, contender)),
        (batch * nodes * ranks_per_node) as f64 / median,
        shown(results.median(case, contender, |turn| turn.cpu), 3),
        shown(results.median(case, contender, |turn| turn.sent / 1e6), 2),
        shown(results.median(case, contender, |turn| turn.by_factors as f64), 0),
    )
}

fn verdicts(results: &Results) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for case in &results.cases {
        for ours in OURS.into_iter().filter(|ours| results.contenders.contains(ours)) {
            let Case { net, precision, nodes, mbit, .. } = case;
            let words = ours.words();
            let (places, gbit) = (case.places(), *mbit as f64 / 1000.0);
            let at = format!("{net} {precision}, {words}, P={places}, {gbit} Gbit/s");
            let time = results.median(case, ours, seconds);
            let gloo = results.median(case, Contender::Ddp, seconds);
            let room =
                gloo.zip(bound(results, case, Contender::Ddp)).map(|(gloo, bound)| gloo / bound);
            let beside = beside_gloo(results, case, ours);
            let asked = match room {
                Some(room) if room > ROOM => {
                    format!("faster than Gloo, which is at {room:.2}x its bound")
                }
                Some(room) => format!("no slower than Gloo, which is at {room:.2}x its bound"),
                None => "faster than Gloo".to_owned(),
            };
            let met = beside.zip(room).map(|(beside, room)| match beside.verdict() {
                Beside::Faster => true,
                Beside::Equal => room <= ROOM,
                Beside::Slower => false,
            });
            let measured = ratio_words(beside);
            verdicts.push(Verdict { target: format!("{at}: {asked}"), measured, met });

            let times = time.zip(bound(results, case, ours)).map(|(time, bound)| time / bound);
            verdicts.push(Verdict {
                target: format!("{at}: at most {AIM:.2}x the larger of apart and the wire's bound"),
                measured: shown(times, 2),
                met: times.map(|times| times <= AIM),
            });
            let places = (*nodes, case.ranks_per_node, *mbit);
            if (net.as_str(), precision.as_str(), places) == ("vgg19", "fp32", (4, 1, 10_000)) {
                verdicts.push(Verdict {
                    target: format!("{at}: at most {VGG19} s"),
                    measured: shown(time, 3),
                    met: time.map(|time| time <= VGG19),
                });
            }
        }
    }
    verdicts
}

/// Gloo's seconds by the contender's.
fn beside_gloo(results: &Results, case: &Case, contender: Contender) -> Option<Ratio> {
    Ratio::of(results.ratios(case, Contender::Ddp, contender))
}

/// What a step takes at least: computing, or the wire. None without a turn of `apart`, or of the
/// contender if it has a plan.
fn bound(results: &Results, case: &Case, contender: Contender) -> Option<f64> {
    let computing = results.median(case, Contender::Apart, seconds)?;
    let wire = match contender {
        Contender::Apart | Contender::Alone => 0.0,
        Contender::Poseidon | Contender::PoseidonPs | Contender::PoseidonServer => {
            planned_wire(results, case, contender)?
        }
        Contender::Ddp | Contender::DdpFp16 | Contender::DdpNccl | Contender::DdpPoseidon => {
            all_reduce_wire(case)
        }
    };
    Some(computing.max(wire))
}

/// Seconds that a node's port needs for its part of an exact all-reduce.
fn all_reduce_wire(case: &Case) -> f64 {
    let nodes = case.nodes as f64;
    wire(2.0 * (nodes - 1.0) / nodes * case.gradient_bytes, case.mbit)
}

/// Seconds that a port needs for what the plan sends. A plan tells the bytes of a rank, and what ranks of one
/// node send each other passes no port.
fn planned_wire(results: &Results, case: &Case, contender: Contender) -> Option<f64> {
    if case.ranks_per_node > 1 {
        return None;
    }
    let planned = results.of(case, contender).find_map(|turn| turn.planned)?;
    Some(wire(planned, case.mbit))
}

fn wire(payload: f64, mbit: u64) -> f64 {
    payload * FRAME / PAYLOAD * 8.0 / (mbit as f64 * 1e6)
}

fn seconds(turn: &Turn) -> f64 {
    turn.seconds
}

fn shown(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

fn ratio_words(ratio: Option<Ratio>) -> String {
    ratio.map_or("-".to_owned(), |ratio| ratio.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::training::tests::results;
    use super::*;

    fn judged(gloo: f64, ours: f64) -> Vec<Option<bool>> {
        // The wire's bound of an all-reduce is 0.1255 s, that of the plan 0.0837 s.
        let results = results(1e8, |contender| {
            Some(match contender {
                Contender::Apart => 0.05,
                Contender::Ddp => gloo,
                _ => ours,
            })
        });
        verdicts(&results).iter().map(|verdict| verdict.met).collect()
    }

    #[test]
    fn bounds_are_those_of_the_issue() {
        // ResNet-50 on two ranks and GPT-2 on four at 10 Gbit/s.
        assert!((wire(2.0 * 0.5 * 25.557e6 * 4.0, 10_000) - 0.086).abs() < 0.001);
        assert!((wire(2.0 * 0.75 * 124.44e6 * 4.0, 10_000) - 0.63).abs() < 0.01);
    }

    #[test]
    fn ours_has_to_be_faster_only_where_gloo_leaves_room() {
        assert_eq!(judged(0.2, 0.09), [Some(true); 3]);
        assert_eq!(judged(0.2, 0.2), [Some(false), Some(false), Some(false)]);
        assert_eq!(judged(0.13, 0.13), [Some(true), Some(false), Some(true)]);
        assert_eq!(judged(0.13, 0.14), [Some(false), Some(false), Some(true)]);
    }

    #[test]
    fn nothing_is_claimed_without_a_turn() {
        let results = results(1e8, |contender| (contender != Contender::Poseidon).then_some(0.1));
        assert!(verdicts(&results).iter().all(|verdict| verdict.met.is_none()));
        assert_eq!(details(&results, &results.cases[0], Contender::Poseidon), "");
        let row = overview(&results, "fp32");
        assert!(row.contains("| vgg19 | 4 | 10 | 0.100 | 0.100 | - | - | 0.125 | - |"), "{row}");
    }
}
