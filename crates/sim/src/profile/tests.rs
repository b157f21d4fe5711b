use super::*;

fn model(name: &str) -> Model {
    Model::named(name).unwrap()
}

fn step(profile: &str, name: &str, batch: usize) -> f64 {
    let (times, _) = Profile::named(profile).unwrap().times(&model(name), batch).unwrap();
    times.iter().map(LayerTime::sum).sum()
}

/// Poseidon 2017 §5.1 and §2.2.
#[test]
fn a_titan_x_is_as_fast_as_the_paper_says() {
    let paper = [
        ("titan-x", "googlenet", 128, 257.0),
        ("titan-x", "vgg19", 32, 35.5),
        ("titan-x", "vgg19-22k", 32, 34.6),
        ("titan-x", "inception-v3", 32, 43.2),
        ("titan-x", "alexnet", 256, 1024.0),
        ("titan-x-tensorflow", "inception-v3", 32, 43.2),
        ("titan-x-tensorflow", "vgg19", 32, 38.5),
        ("titan-x-tensorflow", "vgg19-22k", 32, 34.8),
    ];
    for (profile, name, batch, images_per_second) in paper {
        let ours = batch as f64 / step(profile, name, batch);
        assert!((ours / images_per_second - 1.0).abs() < 1e-9, "{name} on {profile}: {ours}");
    }
}

/// The rates in the files follow from the same numbers.
#[test]
fn rates_are_what_the_paper_averages() {
    for name in names().filter(|name| name.starts_with("titan-x")) {
        let profile = Profile::named(name).unwrap();
        let flops: f64 = profile.throughput.iter().map(|t| model(&t.model).flops()).sum();
        let seconds: f64 = profile.throughput.iter().map(|t| 1.0 / t.images_per_second).sum();
        let rates = profile.rates.unwrap();
        assert!((flops / seconds / rates.conv - 1.0).abs() < 0.02, "{name}: {}", flops / seconds);
    }
    // VGG19-22K's wider classifier takes the time that it takes in Caffe.
    let rates = Profile::named("titan-x").unwrap().rates.unwrap();
    let classifier = |name| rates.time(model(name).layers.last().unwrap(), 32).sum();
    let longer = classifier("vgg19-22k") - classifier("vgg19");
    assert!((longer / (32.0 / 34.6 - 32.0 / 35.5) - 1.0).abs() < 0.05, "{longer}");
}

#[test]
fn models_the_paper_did_not_measure_take_their_flops() {
    let (_, basis) = Profile::named("titan-x").unwrap().times(&model("resnet152"), 32).unwrap();
    assert_eq!(basis, Basis::Rates);
    let expected = 32.0 * model("resnet152").flops() / 3.3e12;
    assert!((step("titan-x", "resnet152", 32) / expected - 1.0).abs() < 0.01);
}

#[test]
fn fully_connected_layers_with_few_rows_wait_for_their_weights() {
    let profile = Profile::named("titan-x").unwrap();
    let classifier = |batch| profile.times(&model("vgg19"), batch).unwrap().0.pop().unwrap();
    assert_eq!(classifier(8), classifier(150));
    assert!((classifier(300).sum() / classifier(150).sum() - 2.0).abs() < 1e-9);
    // A batch of transformers has plenty of rows.
    let bert = |batch| profile.times(&model("bert-base"), batch).unwrap().0[4];
    assert!((bert(4).sum() / bert(2).sum() - 2.0).abs() < 1e-9);
}

const MEASURED: &str = "device = \"mine\"\n\
    [[measured]]\nmodel = \"m\"\nbatch = 8\nlayers = [[\"a\", 1.0, 2.0], [\"b\", 0.5, 0.0]]\n\
    [[measured]]\nmodel = \"m\"\nbatch = 64\nlayers = [[\"a\", 6.4, 6.4], [\"b\", 0.0, 0.0]]\n";

fn two_layers(second: &str) -> Model {
    let layer =
        |name| format!(r#"{{"name":"{name}","kind":"conv","parameters":1,"forward_flops":1}}"#);
    let text = format!(r#"{{"name":"m","layers":[{},{}]}}"#, layer("a"), layer(second));
    Model::parse(&text, "m").unwrap()
}

#[test]
fn measured_layers_come_first_and_scale_with_the_batch() {
    let profile = Profile::parse(MEASURED, "p.toml").unwrap();
    let (times, basis) = profile.times(&two_layers("b"), 16).unwrap();
    assert_eq!(basis, Basis::Measured { batch: 8 });
    assert_eq!(times[0], LayerTime { forward: 2.0, backward: 4.0 });
    let (times, basis) = profile.times(&two_layers("b"), 32).unwrap();
    assert_eq!(basis, Basis::Measured { batch: 64 });
    assert_eq!(times[0].forward, 3.2);
    let text = toml::to_string(&profile).unwrap();
    assert_eq!(Profile::parse(&text, "p.toml").unwrap(), profile);
}

#[test]
fn times_of_another_model_are_refused() {
    let profile = Profile::parse(MEASURED, "p.toml").unwrap();
    let error = profile.times(&two_layers("c"), 8).unwrap_err().to_string();
    assert!(error.contains("'b' where the model has 'c'"), "{error}");
    let error = profile.times(&model("vgg19"), 8).unwrap_err().to_string();
    assert!(error.contains("'vgg19'") && error.contains("no rates"), "{error}");
}

#[test]
fn malformed_profiles_are_refused_with_file_line_and_field() {
    let measured = |layers: &str| {
        format!("device = \"d\"\n[[measured]]\nmodel = \"m\"\nbatch = 1\nlayers = {layers}\n")
    };
    let cases = [
        ("name = \"x\"\n".into(), 1, "missing field `device`"),
        ("device = \"d\"\nspeed = 3\n".into(), 2, "unknown field `speed`"),
        ("device = \"d\"\n".into(), 1, "nothing is known"),
        (
            "device = \"d\"\n[rates]\nconv = -1.0\nfc = 1.0\nother = 1.0\n".into(),
            3,
            "above 0, got -1",
        ),
        ("device = \"d\"\n[rates]\nconv = 1.0\nother = 1.0\n".into(), 2, "missing field `fc`"),
        (
            "device = \"d\"\n[[throughput]]\nmodel = \"m\"\nbatch = 0\nimages_per_second = 1.0\n"
                .into(),
            4,
            "at least 1, got 0",
        ),
        (
            "device = \"d\"\n[[throughput]]\nmodel = \"m\"\nbatch = 1\nimages_per_second = 1.0\n"
                .into(),
            1,
            "`throughput` needs `rates`",
        ),
        (measured("[[\"a\", 1.0]]"), 5, "length 2"),
        (measured("[[\"a\", 1.0, -2.0]]"), 5, "'a' takes 1 and -2 seconds"),
        (measured("[]"), 5, "`layers` is empty"),
        (measured("[[\"a\", \"b\", 1.0]]"), 5, "expected f64"),
        ("device = \"d\"\nrates".into(), 2, "key with no value"),
    ];
    for (text, line, words) in cases {
        let error = Profile::parse(&text, "p.toml").unwrap_err().to_string();
        assert!(error.starts_with(&format!("p.toml:{line}: ")), "{error} for {text}");
        assert!(error.contains(words), "'{words}' is not in: {error}");
    }
    assert!(Profile::read("no/such.toml").unwrap_err().to_string().contains("no/such.toml"));
    let error = Profile::named("titanx2").unwrap_err().to_string();
    assert!(error.contains("did you mean 'titan-x'?"), "{error}");
}

#[test]
fn the_measured_gpu_has_times_for_every_model_of_the_zoo() {
    let profile = Profile::named("h200").unwrap();
    for name in zoo::names() {
        let (times, basis) = profile.times(&model(name), 32).unwrap();
        assert!(matches!(basis, Basis::Measured { .. }), "{name}: {basis:?}");
        assert!(times.iter().any(|t| t.forward > 0.0 && t.backward > 0.0), "{name}");
    }
    // Ten years of devices lie between them.
    assert!(step("h200", "vgg19", 32) * 10.0 < step("titan-x", "vgg19", 32));
}
