//! What `poseidon train` says when it cannot train, and that it always says it: every run here ends,
//! with one message that names the culprit. A run that took no step leaves no report.

use crate::trial::{Run, Running, SMALL, Trial, by_hand, eventually, kill, variables};
use crate::trial::{idx_images, idx_labels};
use rustix::process::Signal;

/// A folder with [`SMALL`] in it.
/// Trains in vain, and checks that all of `words` are said, that nobody panicked and that there is
/// no report.
fn refused(trial: &Trial, args: &str, words: &[&str]) -> Run {
    let run = trial.train(args);
    failed(&run, words);
    assert_eq!(trial.report_files(), [""; 0], "{args}");
    run
}

/// Checks that a run that took no step failed, and what it said.
fn failed(run: &Run, words: &[&str]) {
    ended_early(run, words);
    assert!(!run.stdout.contains("report"), "{}", run.stdout);
}

/// As [`failed`], of a run that may have taken steps, so that it may leave a report of them.
fn ended_early(run: &Run, words: &[&str]) {
    assert!(run.status.code().is_some_and(|code| code != 0), "{run:?}");
    for word in words {
        assert!(run.stderr.contains(word), "'{word}' is not in:\n{}", run.stderr);
    }
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
}

/// As [`refused`], before any worker is started: the message is all there is.
fn refused_at_once(trial: &Trial, args: &str, words: &[&str]) {
    let run = refused(trial, args, words);
    assert_eq!(run.stdout, "", "{args}");
    assert!(run.stderr.starts_with("error: "), "{}", run.stderr);
    assert_eq!(run.stderr.matches("error: ").count(), 1, "{}", run.stderr);
}

#[test]
fn data_that_is_not_there_is_named() {
    let trial = Trial::new();
    refused_at_once(&trial, "--data idx:no/where", &["no/where/train-images-idx3-ubyte"]);
    refused_at_once(&trial, "--data no/where", &["no/where", "fashion-mnist-mini"]);
    refused_at_once(&trial, "--data cifar10:no", &["no/data_batch_1.bin"]);
    refused_at_once(&trial, "--data mnist", &["poseidon data fetch mnist"]);
    trial.write("empty/file", "");
    refused_at_once(&trial, "--data empty", &["empty: not a data set", "train-images-idx3-ubyte"]);
    // Only what is needed has to be there.
    trial.write_idx("data", 40);
    std::fs::remove_file(trial.path("data/t10k-images-idx3-ubyte")).unwrap();
    refused_at_once(&trial, "--data idx:data", &["data/t10k-images-idx3-ubyte"]);
}

#[test]
fn a_truncated_file_is_named_with_both_lengths() {
    let trial = Trial::new();
    trial.write_idx("data", 40);
    let (images, whole) = (idx_images(40), 16 + 40 * 28 * 28);
    trial.write("data/train-images-idx3-ubyte", &images[..whole - 1]);
    let lengths = [format!("expected {whole} bytes"), format!("got {}", whole - 1)];
    let words = ["data/train-images-idx3-ubyte", &lengths[0], &lengths[1], "truncated"];
    refused_at_once(&trial, "--data idx:data", &words);
    trial.write("data/train-images-idx3-ubyte", &images[..3]);
    refused_at_once(&trial, "--data idx:data", &["train-images-idx3-ubyte", "truncated"]);

    cifar10(&trial, "cifar", |_| {});
    trial.write("cifar/data_batch_4.bin", vec![0; 2 * 3073 + 5]);
    let words = ["cifar/data_batch_4.bin, record 2", "3073 bytes", "the last 5 are no record"];
    refused_at_once(&trial, "--model cifar10-quick --data cifar10:cifar", &words);
}

#[test]
fn a_label_out_of_range_is_named_with_its_record() {
    let trial = Trial::new();
    trial.write_idx("data", 40);
    let mut labels = idx_labels(40);
    labels[8 + 5] = 12;
    trial.write("data/train-labels-idx1-ubyte", &labels);
    let words = ["data/train-labels-idx1-ubyte, record 5", "below 10", "got 12"];
    refused_at_once(&trial, "--data idx:data?classes=10", &words);
    // Without a number of classes the data has thirteen, and it is the model that knows ten.
    let words = ["'fashion-cnn' knows 10 classes", "idx:data has 13"];
    refused_at_once(&trial, "--data idx:data", &words);

    // CIFAR-10's labels stand among the pixels and are seen when they are read.
    cifar10(&trial, "cifar", |batch_2| batch_2[3 * 3073] = 200);
    let words = ["cifar/data_batch_2.bin, record 3", "below 10", "got 200"];
    let args = "--model cifar10-quick --data cifar10:cifar --workers 2 --batch 4 --steps 3";
    refused(&trial, args, &words);
}

/// CIFAR-10's files, 10 records each, after `change` was made to the second.
fn cifar10(trial: &Trial, folder: &str, change: impl Fn(&mut Vec<u8>)) {
    let records = || -> Vec<u8> {
        (0..10 * 3073).map(|i| if i % 3073 == 0 { (i / 3073) as u8 } else { i as u8 }).collect()
    };
    for batch in 1..=5 {
        let mut records = records();
        if batch == 2 {
            change(&mut records);
        }
        trial.write(&format!("{folder}/data_batch_{batch}.bin"), records);
    }
    trial.write(&format!("{folder}/test_batch.bin"), records());
}

#[test]
fn a_partition_that_is_missing_is_named() {
    let trial = Trial::with_small_net();
    trial.write_idx("part/0", 40);
    let args = "--model small.toml --partition private --data idx:part/{rank} --workers 2 \
                --batch 4 --steps 3";
    refused(&trial, args, &["part/1/train-images-idx3-ubyte"]);
}

#[test]
fn a_model_file_that_is_wrong_is_named_with_its_line_or_layer() {
    let trial = Trial::new();
    let says = |text: &str, words: &[&str]| {
        trial.write("net.toml", text);
        refused_at_once(&trial, "--model net.toml", words);
    };
    let seven = SMALL.replace("outputs = 10", "outputs = 7");
    says(&seven, &["net.toml: layer 'fc2'", "expected 10 outputs", "got 7"]);
    let wide = SMALL.replace("kernel = 5", "kernel = 29");
    says(&wide, &["net.toml: layer 'conv'", "29"]);
    says(&SMALL.replace("name = \"fc2\"", "name = \"fc1\""), &["layer 'fc1'", "no other layer"]);
    says(&SMALL.replace("classes = 10", "classes = "), &["net.toml:4: "]);
    says(&SMALL.replace("stride = 2", "strides = 2"), &["net.toml:", "strides"]);
    says(&SMALL.replace("\"relu\"\n\n", "\"gelu\"\n\n"), &["net.toml:", "gelu", "relu"]);
    says("", &["net.toml:1: ", "name"]);
    says(&SMALL[..SMALL.find("[[layer]]").unwrap()], &["model 'small'", "at least 1 layer"]);
}

#[test]
fn a_model_that_does_not_fit_the_data_or_is_nowhere_is_named() {
    let trial = Trial::new();
    let words = ["'cifar10-quick'", "3x32x32", "fashion-mnist-mini", "1x28x28"];
    refused_at_once(&trial, "--model cifar10-quick", &words);
    let words = ["'resnet-9000'", "no such file", "cifar10-quick, alexnet-small, lenet"];
    refused_at_once(&trial, "--model resnet-9000", &words);
}

#[test]
fn a_batch_larger_than_the_partition_is_refused_with_both_numbers() {
    let trial = Trial::with_small_net();
    let args = "--model small.toml --workers 2 --steps 3";
    let words = ["a batch of 2301", "4600 samples over 2 ranks are 2300 each"];
    refused(&trial, &format!("{args} --batch 2301"), &words);
    // However absurd: memory for it must not be what fails.
    for scheme in ["ps", "sfb"] {
        let args = format!("{args} --batch 4000000000 --scheme {scheme}");
        refused(&trial, &args, &["batch", "4000000000"]);
    }
}

#[test]
fn a_loss_that_is_not_a_number_stops_everybody_and_names_step_and_layer() {
    let trial = Trial::with_small_net();
    let words = ["the loss became", "at step ", "layer '", "learning rate"];
    let args = "--model small.toml --workers 3 --batch 6 --steps 50 --lr 1e30";
    for how in ["", "--scheme ps --threads-per-worker 2", "--overlap none"] {
        refused(&trial, &format!("{args} {how}"), &words);
        eventually("all workers end", || trial.workers().is_empty());
    }
    refused(&trial, "--steps 50 --workers 2 --lr 1e30", &words);
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let trial = Trial::new();
    refused_at_once(&trial, "--lr 0", &["learning rate 0", "a positive number"]);
    refused_at_once(&trial, "--lr NaN", &["learning rate NaN", "a positive number"]);
    refused_at_once(&trial, "--optimizer mean", &["'mean' updates nothing", "sgd"]);
    refused_at_once(&trial, "--servers 0", &["at least 1"]);
    for (flags, words) in [
        ("--workers 0", &["--workers", "at least 1"][..]),
        ("--batch 0", &["--batch"]),
        ("--steps 0", &["--steps"]),
        ("--steps 3 --epochs 3", &["--steps", "--epochs"]),
        ("--scheme best", &["--scheme", "'auto', 'ps' or 'sfb'", "'best'"]),
        ("--overlap some", &["--overlap", "'some'"]),
        ("--schedule later", &["--schedule", "'later'", "cosine"]),
        ("--rank 0", &["--world", "--coordinator"]),
        ("--rank 2 --world 2 --coordinator 127.0.0.1:1", &["rank 2 of 2"]),
    ] {
        refused(&trial, flags, words);
    }
}

#[test]
fn a_configuration_file_that_is_wrong_is_named_with_its_line() {
    let trial = Trial::new();
    let says = |text: &str, words: &[&str]| {
        trial.write("job.toml", text);
        refused_at_once(&trial, "--config job.toml", &[&["job.toml"], words].concat());
    };
    says("batch = 32\nbathc = 7\n", &["line 2", "bathc", "`batch`"]);
    says("workers = 2\nbatch = -1\n", &["line 2", "-1"]);
    says("\noptimizer = \"mud\"\n", &["line 2", "mud", "sgd"]);
    says("batch = ", &["line 1"]);
    refused_at_once(&trial, "--config none.toml", &["none.toml", "No such file"]);
    trial.write("job.toml", "steps = 0\n");
    refused_at_once(&trial, "--config job.toml", &["0 epochs or steps"]);
}

#[test]
fn more_workers_than_the_launcher_started_are_refused() {
    let trial = Trial::new();
    let launched = variables(&[
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ]);
    let run = trial.start_with("--workers 4", &launched).finish();
    failed(&run, &["--workers 4", "one of 2"]);
}

#[test]
fn workers_that_are_not_told_the_same_find_out() {
    disagree(["--batch 6", "--batch 8"], &["batch size is", "6 on worker 0", "8 on worker 1"]);
    disagree(
        ["--lr 0.5", "--lr 0.25"],
        &["the learning rate is 0.5 on worker 0 but 0.25 on worker 1"],
    );
    disagree(["--optimizer adam", "--optimizer sgd"], &["worker 0", "worker 1", "adam", "sgd"]);
    disagree(["--model mlp", "--model lenet"], &["worker 0", "worker 1", "'fc1'", "'conv1'"]);
}

/// Each of these would train, but not on the samples or as long as anybody thinks.
#[test]
fn workers_agree_on_the_samples_and_the_steps() {
    disagree(["--seed 1", "--seed 2"], &["seed"]);
    disagree(["--steps 9", "--steps 8"], &["steps"]);
}

/// Two workers are told different things, and both end and say so.
fn disagree(told: [&str; 2], words: &[&str]) {
    let trial = Trial::with_small_net();
    let (flags, mut known) = by_hand(2);
    // Whoever waits for a step that never comes waits this long.
    known.insert("POSEIDON_TIMEOUT".into(), "20".into());
    let start = |(flags, told): (&String, &str)| {
        let steps = if told.contains("--steps") { "" } else { "--steps 50" };
        let model = if told.contains("--model") { "" } else { "--model small.toml" };
        trial.start_with(&format!("{model} {steps} --test never {told} {flags}"), &known)
    };
    let processes: Vec<_> = flags.iter().zip(told).map(start).collect();
    for run in processes.into_iter().map(Running::finish) {
        failed(&run, words);
    }
    assert_eq!(trial.report_files(), [""; 0]);
}

/// So long that nobody sees the end of it.
const ENDLESS: &str = "--model small.toml --batch 6 --steps 100000000 --test never";

#[test]
fn a_worker_that_is_killed_is_named_and_the_others_end() {
    let trial = Trial::with_small_net();
    let mut job = trial.start(&format!("{ENDLESS} --workers 3"));
    job.wait_for("3 layers");
    kill(trial.workers()[&2], Signal::KILL);
    let run = job.finish();
    ended_early(&run, &["worker 2 was killed by signal 9 (SIGKILL)"]);
    assert_eq!(run.status.code(), Some(128 + 9));
    eventually("all workers end", || trial.workers().is_empty());
}

#[test]
fn without_a_launcher_the_others_say_who_is_gone() {
    let trial = Trial::with_small_net();
    let (flags, secret) = by_hand(3);
    let start = |flags: &String| trial.start_with(&format!("{ENDLESS} {flags}"), &secret);
    let mut processes: Vec<_> = flags.iter().map(start).collect();
    processes[0].wait_for("3 layers");
    kill(processes[1].pid(), Signal::KILL);
    for rank in [2, 0] {
        ended_early(&processes.remove(rank).finish(), &["worker 1"]);
    }
}

#[test]
fn ctrl_c_ends_everybody() {
    let trial = Trial::with_small_net();
    let mut job = trial.start(&format!("{ENDLESS} --workers 2"));
    job.wait_for("3 layers");
    assert_eq!(trial.workers().len(), 2);
    kill(job.pid(), Signal::INT);
    let run = job.finish();
    assert_eq!(run.status.code(), Some(128 + 2));
    ended_early(&run, &["error: stopped by signal 2 (SIGINT)"]);
    eventually("all workers end", || trial.workers().is_empty());
}

#[test]
fn a_report_that_cannot_be_written_is_named() {
    let trial = Trial::with_small_net();
    trial.write("report", "a file where a folder should be");
    let run = trial.train("--model small.toml --workers 2 --batch 6 --steps 3 --test never");
    failed(&run, &["report"]);
}
