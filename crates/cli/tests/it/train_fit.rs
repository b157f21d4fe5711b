//! `poseidon train` with a built-in net and data that it was not written for: a folder of colour
//! photos of two kinds.

use crate::trial::Trial;

#[test]
fn a_builtin_net_gets_as_many_outputs_as_there_are_classes_and_colours_become_grey() {
    let trial = Trial::new();
    for split in ["train", "test"] {
        for (class, blue) in [("cats", 0), ("dogs", 200)] {
            for number in 0..8 {
                let name = format!("photos/{split}/{class}/{number}.bmp");
                trial.write(&name, bitmap([blue, 90, 10 * number]));
            }
        }
    }
    let args = "--model lenet --data images:photos --workers 2 --batch 4 --steps 2 --json";
    let run = trial.train(args);
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    for words in ["is in colour and made grey", "has 2 classes", "instead of 10"] {
        assert_eq!(run.stderr.matches(words).count(), 1, "{words}: {run:?}");
    }
    let report: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    let last = report["layers"].as_array().unwrap().last().unwrap();
    assert_eq!(last["kind"], "fc 2", "{last}");
}

#[test]
fn a_net_of_ones_own_keeps_its_outputs_and_that_is_said() {
    let trial = Trial::with_small_net();
    for split in ["train", "test"] {
        for class in ["cats", "dogs"] {
            for number in 0..4 {
                let name = format!("photos/{split}/{class}/{number}.bmp");
                trial.write(&name, bitmap([20 * number, 90, 30]));
            }
        }
    }
    let args = "--model small.toml --data images:photos --workers 1 --batch 4 --steps 1 --json";
    let run = trial.train(args);
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    assert!(run.stderr.contains("keeps the 10 outputs of its file"), "{run:?}");
}

/// A BMP file of 28x28 pixels of one colour: blue, green, red.
fn bitmap(colour: [u8; 3]) -> Vec<u8> {
    let pixels = 28 * 28 * 3u32;
    let mut bytes = b"BM".to_vec();
    for number in [54 + pixels, 0, 54, 40, 28, 28] {
        bytes.extend(number.to_le_bytes());
    }
    // One plane of 24 bits.
    bytes.extend([1, 0, 24, 0]);
    for number in [0, pixels, 2835, 2835, 0, 0u32] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(colour.repeat(28 * 28));
    bytes
}
