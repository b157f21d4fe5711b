use super::*;
use serde_json::Value;

fn sample() -> Report {
    let layer = |name: &str, parameters, scheme: &str| LayerReport {
        name: name.into(),
        kind: "fc 512x10".into(),
        parameters,
        scheme: scheme.into(),
        reason: "fewer bytes".into(),
        bytes_sent_per_step: 1000,
    };
    let span = |track, what, start, end| Span { track, layer: "fc1".into(), what, start, end };
    Report {
        model: "lenet".into(),
        data: "mnist".into(),
        workers: 4,
        servers: "colocated".into(),
        threads_per_worker: 1,
        batch: 64,
        steps: 3,
        epochs: 1.0,
        seconds: 2.0,
        images_per_second: 384.0,
        step_seconds: Quantiles { median: 0.1, p10: 0.09, p90: 0.2 },
        final_loss: 0.25,
        test_accuracy: Some(0.98),
        overlap_hidden_fraction: 0.75,
        digests: Vec::new(),
        parameter_digest: "0123456789abcdef".into(),
        scheme: "hybrid".into(),
        overlap: "on".into(),
        sync: "bsp".into(),
        seed: 1,
        deterministic: true,
        version: "0.1.0".into(),
        command: "poseidon train lenet".into(),
        date: "2026-11-16T12:00:00Z".into(),
        host: "node0".into(),
        steps_before: 0,
        partial: None,
        layers: vec![layer("conv1", 500, "ps"), layer("fc1", 1_000_000, "sfb")],
        nodes: vec![NodeReport {
            rank: 0,
            role: "worker".into(),
            bytes_sent: 6000,
            bytes_received: 6000,
            compute_seconds: 1.5,
            stall_seconds: 0.25,
            turnout: None,
        }],
        curve: (0..3)
            .map(|step| CurvePoint { step, epoch: 0.0, seconds: 0.0, loss: 1.0 })
            .collect(),
        epochs_done: vec![EpochReport {
            epoch: 1,
            seconds: 2.0,
            train_loss: 0.5,
            train_accuracy: 0.9,
            test_accuracy: Some(0.98),
            images_per_second: 384.0,
        }],
        timeline: Timeline {
            step: 2,
            rank: 0,
            seconds: 0.5,
            spans: vec![
                span(Track::Compute, What::Forward, 0.0, 0.1),
                span(Track::Compute, What::Backward, 0.1, 0.3),
                span(Track::Network, What::Sync, 0.3, 0.5),
                span(Track::Compute, What::Wait, 0.3, 0.5),
            ],
        },
        config: "[train]\nseed = 1\n".into(),
    }
}

/// Puts `value` in place of every number that a run measures.
fn with_all_numbers(value: f64) -> Report {
    let mut report = sample();
    report.epochs = value;
    report.seconds = value;
    report.images_per_second = value;
    report.final_loss = value;
    report.test_accuracy = Some(value);
    report.overlap_hidden_fraction = value;
    for node in &mut report.nodes {
        (node.compute_seconds, node.stall_seconds) = (value, value);
    }
    for point in &mut report.curve {
        (point.epoch, point.seconds, point.loss) = (value, value, value);
    }
    for epoch in &mut report.epochs_done {
        (epoch.seconds, epoch.train_loss, epoch.train_accuracy) = (value, value, value);
        (epoch.test_accuracy, epoch.images_per_second) = (Some(value), value);
    }
    report.timeline.seconds = value;
    for span in &mut report.timeline.spans {
        (span.start, span.end) = (value, value);
    }
    report
}

/// Every attribute that positions something must hold a number.
fn assert_sound(page: &str) {
    for word in ["NaN%", "inf%", "\"NaN\"", "\"inf\"", "=\"-inf"] {
        assert!(!page.contains(word), "the page contains {word}");
    }
    for path in page.split(" d=\"").skip(1).map(|rest| rest.split('"').next().unwrap()) {
        assert!(!path.contains("NaN") && !path.contains("inf"), "{path}");
    }
    for tag in ["svg", "figure", "div", "ul", "table", "details", "g", "dl", "main"] {
        let opened =
            page.matches(&format!("<{tag} ")).count() + page.matches(&format!("<{tag}>")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "<{tag}>");
    }
}

#[test]
fn the_json_has_the_keys_of_the_contract() {
    let json = serde_json::to_value(sample()).unwrap();
    let keys = [
        "model",
        "workers",
        "batch",
        "steps",
        "seconds",
        "images_per_second",
        "final_loss",
        "test_accuracy",
        "overlap_hidden_fraction",
        "parameter_digest",
        "layers",
        "nodes",
    ];
    let layer = ["name", "kind", "parameters", "scheme", "reason", "bytes_sent_per_step"];
    let node = ["rank", "bytes_sent", "bytes_received", "compute_seconds", "stall_seconds"];
    for (value, keys) in
        [(&json, &keys[..]), (&json["layers"][0], &layer[..]), (&json["nodes"][0], &node[..])]
    {
        for key in keys {
            assert!(!value[key].is_null(), "{key} is missing in {value}");
        }
    }
    assert_eq!(json["timeline"]["spans"][3]["what"], "wait");
    assert_eq!(json["timeline"]["spans"][2]["track"], "network");
}

#[test]
fn both_files_are_written_and_nothing_else_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("deep/report");
    sample().write(&out).unwrap();
    let html = sample().write(&out).unwrap();
    assert_eq!(html, out.join("report.html"));
    let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["report.html", "report.json"]);
    let back: Report = serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
    assert_eq!(serde_json::to_value(back).unwrap(), serde_json::to_value(sample()).unwrap());
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = sample().write(&file.path().join("report")).unwrap_err();
    assert!(error.to_string().contains("report"), "{error:#}");
}

#[test]
fn numbers_that_are_not_finite_break_neither_the_json_nor_the_page() {
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, -f64::MAX, 5e-324, 0.0] {
        let report = with_all_numbers(value);
        let text = serde_json::to_string(&report).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["final_loss"].is_null(), !value.is_finite());
        let back: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(back.final_loss.is_finite(), value.is_finite());
        assert_sound(&page::page(&report));
    }
}

#[test]
fn no_string_of_a_run_gets_into_the_page_unescaped() {
    let evil = "<img src=x onerror='alert(1)'>\"&";
    let mut report = sample();
    for text in [
        &mut report.model,
        &mut report.data,
        &mut report.servers,
        &mut report.parameter_digest,
        &mut report.scheme,
        &mut report.overlap,
        &mut report.version,
        &mut report.command,
        &mut report.config,
        &mut report.nodes[0].role,
    ] {
        *text = evil.into();
    }
    let layer = &mut report.layers[0];
    for text in [&mut layer.name, &mut layer.kind, &mut layer.scheme, &mut layer.reason] {
        *text = evil.into();
    }
    report.timeline.spans.iter_mut().for_each(|span| span.layer = evil.into());
    let page = page::page(&report);
    assert!(!page.contains("<img"), "an element got in");
    assert!(!page.contains("onerror='"), "an attribute got in");
    assert_sound(&page);
}

#[test]
fn the_page_is_whole_and_self_contained() {
    let page = page::page(&sample());
    assert_sound(&page);
    for part in ["98.0 %", "75.0 %", "0123456789ab", "seed = 1", "poseidon train lenet", "conv1"] {
        assert!(page.contains(part), "{part} is not on the page");
    }
    assert!(!page.contains("http://") && !page.contains("https://"));
    assert_eq!(page.matches("role=\"img\"").count(), page.matches("<desc").count());
}

#[test]
fn an_empty_run_has_a_page_too() {
    let mut report = sample();
    report.test_accuracy = None;
    report.parameter_digest.clear();
    report.layers.clear();
    report.nodes.clear();
    report.curve.clear();
    report.epochs_done.clear();
    report.timeline = Timeline::default();
    assert_sound(&page::page(&report));
}

#[test]
fn a_large_run_has_a_page_of_bearable_size() {
    let mut report = sample();
    report.layers = vec![report.layers[1].clone(); 200];
    report.nodes = vec![report.nodes[0].clone(); 64];
    report.curve = vec![report.curve[0]; 100_000];
    let size = page::page(&report).len();
    assert!(size < 300 << 10, "{size} bytes");
}

#[test]
fn factors_are_compared_with_the_parameter_server_where_its_cost_is_known() {
    let mut report = sample();
    // Three quarters of the gradient go out, three quarters of what the node holds as well.
    assert_eq!(report.bytes_as_ps(&report.layers[1]), Some(6_000_000));
    assert_eq!(report.bytes_as_ps(&report.layers[0]), None);
    report.servers = "2".into();
    assert_eq!(report.bytes_as_ps(&report.layers[1]), None);
}
