//! What `poseidon plan` says of an exchange between racks.

use super::Bench;
use crate::bench::record;
use crate::bench::size::Size;
use crate::command::output;
use anyhow::{Context, Result};
use serde::Deserialize;

/// The part of the plan's answer that is about racks.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Choice {
    /// Whether the plan names the racks.
    pub(super) adds_up_inside: bool,
    pub(super) iteration_seconds_inside: f64,
    pub(super) iteration_seconds_flat: f64,
    pub(super) reason: String,
}

/// The answer, as far as it is needed.
#[derive(Deserialize)]
struct Answer {
    racks: Option<Choice>,
}

/// The model's file in the record.
const MODEL: &str = "model.json";

/// Asks the plan about a layer of `size` that takes no time to compute, on the network of the
/// benchmark. The plan knows racks that hosts are in by runs.
pub(super) fn ask(bench: &Bench<'_>, size: Size, oversubscription: u64) -> Result<Choice> {
    let args = bench.args;
    record::write(&bench.folder, MODEL, &model(size))?;
    let file = bench.folder.join(MODEL).display().to_string();
    let line = format!(
        "plan --batch 1 --profile titan-x --scheme ps --network virtual-cluster --workers {} \
         --bandwidth {}mbit --racks {} --oversubscription {oversubscription} --json --model",
        args.nodes, args.mbit, args.racks
    );
    let words = [bench.poseidon.as_str()].into_iter().chain(line.split_whitespace());
    let words: Vec<_> = words.chain([file.as_str()]).collect();
    read(&output(&words)?)
}

fn read(text: &str) -> Result<Choice> {
    let answer: Answer = serde_json::from_str(text).context("reading the plan's answer")?;
    answer.racks.context("the plan says nothing of racks")
}

/// One layer of `size`, with next to nothing to compute.
fn model(size: Size) -> String {
    let parameters = size.0 / 4;
    format!(
        "{{\"name\":\"exchange\",\"layers\":[{{\"name\":\"buffer\",\"kind\":\"other\",\
         \"parameters\":{parameters},\"forward_flops\":1}}]}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_read_and_one_without_racks_is_refused() {
        let text = r#"{"model":"m","racks":{"adds_up_inside":false,"hosts_per_rack":4,
            "iteration_seconds_inside":0.2,"iteration_seconds_flat":0.1,"reason":"a hop"}}"#;
        let choice = read(text).unwrap();
        assert!(!choice.adds_up_inside && choice.reason == "a hop");
        assert!(read(r#"{"racks":null}"#).is_err() && read("oops").is_err());
        let model: serde_json::Value = serde_json::from_str(&model(Size::mb(1))).unwrap();
        assert_eq!(model["layers"][0]["parameters"], 262_144);
    }
}
