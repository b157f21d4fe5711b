//! Which GPU this machine has, as far as there is a profile of it.

use std::fs;

/// The profile of this machine's first GPU, and what NVIDIA's driver calls the GPU.
pub(super) fn known_gpu() -> Option<(&'static str, String)> {
    let gpus = fs::read_dir("/proc/driver/nvidia/gpus").ok()?;
    let mut folders: Vec<_> = gpus.filter_map(|gpu| Some(gpu.ok()?.path())).collect();
    folders.sort();
    let facts = fs::read_to_string(folders.first()?.join("information")).ok()?;
    let model = model(&facts)?;
    Some((profile(model)?, poseidon_core::printable::printable(model).into_owned()))
}

/// The value of the line `Model: NVIDIA H200`.
fn model(facts: &str) -> Option<&str> {
    let lines = facts.lines().filter_map(|line| line.split_once(':'));
    lines.into_iter().find(|(key, _)| key.trim() == "Model").map(|(_, value)| value.trim())
}

fn profile(model: &str) -> Option<&'static str> {
    let has = |word: &str| model.split([' ', '-']).any(|part| part == word);
    let named = |(words, name): &(&[&str], &'static str)| {
        words.iter().all(|word| has(word)).then_some(*name)
    };
    PROFILES.iter().find_map(named)
}

/// Words that a GPU's name has, and the profile of such a GPU.
const PROFILES: [(&[&str], &str); 6] = [
    (&["H200"], "h200"),
    (&["H100"], "h100"),
    (&["A100"], "a100"),
    (&["L4"], "l4"),
    (&["RTX", "4090"], "rtx-4090"),
    (&["T4"], "t4"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_known_by_the_words_of_their_names() {
        let facts = "Model: \t\t NVIDIA H200\nIRQ:   \t 44\n";
        assert_eq!(model(facts), Some("NVIDIA H200"));
        let cases = [
            ("NVIDIA H200", Some("h200")),
            ("NVIDIA A100-SXM4-80GB", Some("a100")),
            ("Tesla T4", Some("t4")),
            ("NVIDIA GeForce RTX 4090", Some("rtx-4090")),
            ("NVIDIA L40S", None),
            ("NVIDIA GeForce RTX 4080", None),
        ];
        for (name, expected) in cases {
            assert_eq!(profile(name), expected, "{name}");
        }
        for (_, name) in PROFILES {
            poseidon_sim::Profile::named(name).unwrap();
        }
    }
}
