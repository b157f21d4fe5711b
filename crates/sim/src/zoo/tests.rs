use super::*;

fn model(name: &str) -> Model {
    Model::named(name).unwrap()
}

/// Poseidon 2017, Table 3. It says 5M for GoogLeNet, which is Szegedy et al.'s count of an early
/// variant; what Caffe trains, without the two auxiliary classifiers, has 7.0M.
#[test]
fn parameters_are_those_of_the_papers_table_3() {
    let table = [
        ("cifar10-quick", 145.6e3),
        ("inception-v3", 27e6),
        ("vgg19", 143e6),
        ("vgg19-22k", 229e6),
        ("resnet152", 60.2e6),
    ];
    for (name, paper) in table {
        let ours = model(name).parameters() as f64;
        assert!((ours / paper - 1.0).abs() < 0.01, "{name}: {ours} against {paper}");
    }
    assert_eq!(model("googlenet").parameters(), 6_998_552);
    // Poseidon 2017 §5.2: "only has one thin FC layer (1000×1024)".
    let fc = |layer: &&ModelLayer| matches!(layer.kind, LayerKind::Fc { .. });
    let googlenet = model("googlenet");
    let only: Vec<_> = googlenet.layers.iter().filter(fc).map(|layer| layer.kind).collect();
    assert_eq!(only, [LayerKind::Fc { m: 1000, n: 1024 }]);
}

/// The published totals of the others.
#[test]
fn parameters_are_exact() {
    let totals = [
        ("cifar10-quick", 145_578),
        ("alexnet", 60_965_224),
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
        ("resnext50", 25_028_904),
        ("bert-base", 109_482_240),
        ("gpt2-small", 124_439_808),
    ];
    for (name, total) in totals {
        assert_eq!(model(name).parameters(), total, "{name}");
    }
}

/// A net's multiply-adds as the literature has them: VGG19 19.6G, ResNet-50 4.1G, ResNet-152 11.5G,
/// Inception-V3 5.7G, GoogLeNet 1.6G.
#[test]
fn flops_are_two_per_multiply_add() {
    let published = [
        ("vgg19", 19.6e9),
        ("resnet50", 4.1e9),
        ("resnet152", 11.5e9),
        ("inception-v3", 5.7e9),
        ("googlenet", 1.6e9),
    ];
    for (name, multiply_adds) in published {
        let forward: f64 = model(name).layers.iter().map(|layer| layer.forward_flops).sum();
        assert!((forward / 2.0 / multiply_adds - 1.0).abs() < 0.02, "{name}: {forward}");
    }
    for name in names() {
        let model = model(name);
        for (i, layer) in model.layers.iter().enumerate() {
            let times = if i == 0 { 1.0 } else { 2.0 };
            assert_eq!(layer.backward_flops, times * layer.forward_flops, "{name} {}", layer.name);
        }
    }
}

/// A matrix product's FLOPs follow from its shape.
#[test]
fn fully_connected_layers_compute_what_their_shape_says() {
    for name in ["vgg19-22k", "alexnet", "cifar10-quick"] {
        for layer in model(name).layers {
            if let LayerKind::Fc { m, n } = layer.kind {
                assert_eq!(layer.forward_flops, 2.0 * m as f64 * n as f64, "{}", layer.name);
                assert_eq!((layer.rows, layer.parameters), (1, m * n + m));
            }
        }
    }
    let bert = model("bert-base");
    let up = bert.layers.iter().find(|layer| layer.name == "layers.0.up").unwrap();
    assert_eq!((up.kind, up.rows), (LayerKind::Fc { m: 3072, n: 768 }, 128));
    assert_eq!(up.forward_flops, 2.0 * 3072.0 * 768.0 * 128.0);
    // Only the first token goes to the pooler.
    assert_eq!(bert.layers.last().unwrap().rows, 1);
}

#[test]
fn names_are_found_as_people_write_them() {
    for (written, name) in
        [("VGG19-22K", "vgg19-22k"), ("ResNet_50", "resnet50"), ("VGG-16", "vgg16")]
    {
        assert_eq!(model(written).name, name);
    }
    let error = Model::named("vgg91").unwrap_err().to_string();
    assert!(error.contains("'vgg91' (did you mean 'vgg19'?)"), "{error}");
    assert!(error.contains("gpt2-small"), "{error}");
    for strange in ["qqq", "net", "x"] {
        assert!(!Model::named(strange).unwrap_err().to_string().contains("did you mean"));
    }
    assert!(Model::named("vgg20").unwrap_err().to_string().contains("did you mean 'vgg"));
}

#[test]
fn a_model_round_trips() {
    let model = model("resnext50");
    let text = serde_json::to_string(&model).unwrap();
    assert_eq!(Model::parse(&text, "x").unwrap(), model);
}

#[test]
fn what_may_be_left_out_has_a_value() {
    let text =
        r#"{"name":"m","layers":[{"name":"a","kind":"other","parameters":7,"forward_flops":3}]}"#;
    let layer = Model::parse(text, "x").unwrap().layers.remove(0);
    assert_eq!((layer.rows, layer.backward_flops), (1, 6.0));
}

#[test]
fn malformed_models_are_refused_with_file_line_and_field() {
    let layer = |fields: &str| format!("{{\"name\":\"m\",\n\"layers\":[\n{{{fields}}}\n]}}");
    let cases = [
        ("{\n\"name\": 3}".into(), 2, "expected a string"),
        ("{\"name\":\"m\"}".into(), 1, "missing field `layers`"),
        ("{\"name\":\"m\",\n\"layers\":[]}".into(), 2, "field `layers` is empty"),
        (layer(r#""name":"a","kind":"conv","forward_flops":1"#), 3, "missing field `parameters`"),
        (
            layer(r#""name":"a","kind":"cone","parameters":1,"forward_flops":1"#),
            3,
            "unknown variant `cone`",
        ),
        (
            layer(r#""name":"a","kind":"conv","parameters":-1,"forward_flops":1"#),
            3,
            "invalid value: integer `-1`",
        ),
        (
            layer(r#""name":"a","kind":"conv","parameters":1,"forward_flops":-1"#),
            3,
            "layer 'a': `forward_flops`",
        ),
        (
            layer(r#""name":"a","kind":"conv","parameters":1,"rows":0,"forward_flops":1"#),
            3,
            "`rows` must be",
        ),
        (layer(r#""name":"a","kind":"conv","parameters":1,"flops":1"#), 3, "unknown field `flops`"),
        (
            layer(r#""name":"a","kind":{"fc":{"m":2,"n":3}},"parameters":5,"forward_flops":1"#),
            3,
            "m is 2, n is 3, got 5",
        ),
        (
            layer(r#""name":"","kind":"conv","parameters":1,"forward_flops":1"#),
            3,
            "`name` of a layer is empty",
        ),
        (
            layer(r#""name":"a","kind":"conv","parameters":0,"forward_flops":1"#),
            4,
            "no layer has `parameters`",
        ),
        (
            layer(
                r#""name":"a","kind":"conv","parameters":1,"forward_flops":1},
           {"name":"a","kind":"conv","parameters":1,"forward_flops":1"#,
            ),
            5,
            "two layers have the `name` 'a'",
        ),
        (String::new(), 1, "EOF"),
    ];
    for (text, line, words) in cases {
        let error = Model::parse(&text, "net.json").unwrap_err().to_string();
        assert!(error.starts_with(&format!("net.json:{line}: ")), "{error} for {text}");
        assert!(error.contains(words), "'{words}' is not in: {error}");
        assert!(!error.contains(" at line "), "{error}");
    }
    let error = Model::read("no/such/model.json").unwrap_err();
    assert!(error.to_string().contains("no/such/model.json"));
}
