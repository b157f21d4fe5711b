//! Models that come with the crate, models that people write, and what is wrong with some.

mod batch;

use batch::Batch;
use poseidon_nn::{Draw, Filler, LayerSpec, LoadError, Model, ModelError, Net, Phase, Shape};

fn net(name: &str) -> Net {
    Net::new(&Model::builtin(name).unwrap(), 2).unwrap()
}

fn parameters(net: &Net) -> usize {
    net.layers().iter().map(|layer| layer.parameters).sum()
}

#[test]
fn every_builtin_computes_a_finite_loss_and_finite_gradients() {
    for name in Model::builtins() {
        let model = Model::builtin(name).unwrap();
        assert_eq!(model.name, *name);
        let mut net = Net::new(&model, 2).unwrap();
        let parameters = batch::parameters(&net, 1);
        let mut gradients = parameters.clone();
        Batch::new(&model, 2, 1).load(&mut net);
        let loss = batch::step(&mut net, &parameters, &mut gradients);
        assert!(loss.sum.is_finite(), "{name}: {loss:?}");
        assert!(gradients.iter().flatten().all(|g| g.is_finite()), "{name}");
        let trained = gradients.iter().filter(|g| g.iter().any(|g| *g != 0.0)).count();
        assert_eq!(trained, parameters.iter().filter(|p| !p.is_empty()).count(), "{name}");
    }
    assert!(Model::builtin("resnet-9000").is_none());
}

/// Caffe's numbers: conv 2432, 25632, 51264, inner products 65600 and 650.
#[test]
fn cifar10_quick_has_caffes_parameters() {
    let net = net("cifar10-quick");
    assert_eq!(parameters(&net), 145_578);
    let sizes: Vec<_> = net.layers().iter().map(|l| l.parameters).filter(|&p| p > 0).collect();
    assert_eq!(sizes, [2_432, 25_632, 51_264, 65_600, 650]);
    let shapes: Vec<_> = net.layers().iter().map(|l| l.output.to_string()).collect();
    let expected = "32x32x32 32x16x16 32x16x16 32x16x16 32x16x16 32x8x8 64x8x8 64x8x8 64x4x4 \
                    64x1x1 10x1x1";
    assert_eq!(shapes.join(" "), expected);
    assert_eq!(net.layers()[0].kind, "conv 5x5x32");
    assert_eq!(net.layers()[9].fc, Some((64, 1024)));
    assert!(net.layers()[3].is_conv && !net.layers()[4].is_conv);
    assert_eq!(net.layers()[0].flops, 32 * 1024 * (2 * 75 + 1));
}

#[test]
fn the_other_builtins_have_the_parameters_their_files_state() {
    assert_eq!(parameters(&net("lenet")), 431_080);
    assert_eq!(parameters(&net("mlp")), 669_706);
    assert_eq!(parameters(&net("fashion-cnn")), 207_178);
    let net = net("alexnet-small");
    let fc: usize = net.layers().iter().filter(|l| l.fc.is_some()).map(|l| l.parameters).sum();
    assert!(fc * 100 > parameters(&net) * 90, "{fc} of {}", parameters(&net));
    assert_eq!(parameters(&net), 7_750_442);
}

const SMALL: &str = r#"
name = "small"
input = [1, 8, 8]
classes = 3

[[layer]]
name = "conv"
kind = "conv"
outputs = 4
kernel = 3
weights = { gaussian = 0.01 }

[[layer]]
name = "scores"
kind = "fc"
outputs = 3
bias = { constant = 0.5 }
"#;

#[test]
fn a_model_is_read_from_a_file_and_written_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.toml");
    std::fs::write(&path, SMALL).unwrap();
    let model = Model::read(&path).unwrap();
    assert_eq!(model.input, Shape::new(1, 8, 8));
    let LayerSpec::Conv { stride, pad, weights, bias, .. } = &model.layers[0] else {
        panic!("{:?}", model.layers[0]);
    };
    assert_eq!((*stride, *pad), (1, 0));
    assert_eq!((*weights, *bias), (Filler::Gaussian(0.01), Filler::Constant(0.0)));
    let text = toml::to_string(&model).unwrap();
    assert_eq!(Model::parse(&text, "again").unwrap(), model);
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = Model::read("no/such/model.toml").unwrap_err();
    assert!(error.to_string().starts_with("no/such/model.toml: "), "{error}");
}

/// What is said about `SMALL` with `from` replaced by `to`.
fn complaint(from: &str, to: &str) -> String {
    assert!(SMALL.contains(from));
    Model::parse(&SMALL.replace(from, to), "small.toml").unwrap_err().to_string()
}

#[test]
fn mistakes_in_the_text_are_found_with_file_and_line() {
    let error = complaint("classes = 3", "classes = three");
    assert!(error.starts_with("small.toml:4: "), "{error}");
    let error = complaint("classes = 3", "clases = 3");
    assert!(error.starts_with("small.toml:4: ") && error.contains("clases"), "{error}");
    let error = complaint("input = [1, 8, 8]", "input = [1, 8]");
    assert!(error.starts_with("small.toml:3: "), "{error}");
    // A wrong key of a layer is found at the line where the layer begins.
    let error = complaint("kernel = 3", "kernle = 3");
    assert!(error.starts_with("small.toml:6: ") && error.contains("kernle"), "{error}");
    let error = complaint("kind = \"fc\"", "kind = \"dense\"");
    assert!(error.starts_with("small.toml:15: ") && error.contains("dense"), "{error}");
}

#[test]
fn layers_that_do_not_fit_are_named_with_what_would() {
    for (from, to, expected) in [
        (
            "kernel = 3",
            "kernel = 9",
            "layer 'conv': expected a kernel of at most 8, the padded input's size, got 9",
        ),
        ("kernel = 3", "kernel = 0", "layer 'conv': expected a kernel of at least 1, got 0"),
        (
            "kernel = 3",
            "kernel = 3\nstride = 0",
            "layer 'conv': expected a stride of at least 1, got 0",
        ),
        (
            "kernel = 3",
            "kernel = 3\npad = 3",
            "layer 'conv': expected a pad smaller than the kernel, 3, got 3",
        ),
        (
            "outputs = 4",
            "outputs = 0",
            "layer 'conv': expected a number of outputs of at least 1, got 0",
        ),
        (
            "outputs = 4",
            "outputs = 9000000000000000000",
            "layer 'conv': expected a number of outputs of at most 2147483647, got 9000000000000000000",
        ),
        (
            "outputs = 4",
            "outputs = 2000000000",
            "layer 'conv': expected at most 2147483647 values with padding, got more",
        ),
        (
            "kernel = 3",
            "kernel = 2000000000\npad = 1999999999",
            "layer 'conv': expected at most 2147483647 values with padding, got more",
        ),
        (
            "outputs = 3",
            "outputs = 5",
            "layer 'scores': expected 3 outputs, the number of classes, got 5x1x1",
        ),
        (
            "\"scores\"",
            "\"conv\"",
            "layer 'conv': expected a name that no other layer has, got conv",
        ),
        (
            "gaussian = 0.01",
            "gaussian = -1.0",
            "layer 'conv': expected a finite deviation of at least 0, got -1",
        ),
        (
            "[1, 8, 8]",
            "[1, 0, 8]",
            "model 'small': expected a non-empty input that fits in memory, got 1x0x8",
        ),
        ("classes = 3", "classes = 0", "model 'small': expected at least 1 class, got 0"),
    ] {
        assert_eq!(complaint(from, to), format!("small.toml: {expected}"));
    }
    let no_layers = "name = 'none'\ninput = [1, 1, 1]\nclasses = 1";
    let error = Model::parse(no_layers, "none.toml").unwrap_err().to_string();
    assert_eq!(error, "none.toml: model 'none': expected at least 1 layer, got none");
}

#[test]
fn other_kinds_of_layers_are_checked_too() {
    for (layer, expected) in [
        ("kind = 'lrn'\nsize = 4", "expected an odd size, got 4"),
        ("kind = 'lrn'\nsize = 9", "expected a size of at most twice the channels, 4, got 9"),
        ("kind = 'lrn'\nk = 0.0", "expected a finite k greater than 0, got 0"),
        ("kind = 'dropout'\nratio = 1.0", "expected a ratio of at least 0 and less than 1, got 1"),
        (
            "kind = 'pool'\nmethod = 'max'\nkernel = 7",
            "expected a kernel of at most 6, the padded input's size, got 7",
        ),
    ] {
        let to = format!("[[layer]]\nname = 'odd'\n{layer}\n\n[[layer]]\nname = \"scores\"");
        let error = complaint("[[layer]]\nname = \"scores\"", &to);
        assert_eq!(error, format!("small.toml: layer 'odd': {expected}"));
    }
}

#[test]
fn a_net_has_room_for_one_sample_at_least() {
    let model = Model::parse(SMALL, "small").unwrap();
    assert!(matches!(Net::new(&model, 0), Err(ModelError::Model { .. })));
    assert!(matches!(Net::new(&model, usize::MAX), Err(ModelError::Model { .. })));
}

#[test]
fn batches_that_do_not_fit_are_refused() {
    let model = Model::parse(SMALL, "small").unwrap();
    let mut net = Net::new(&model, 2).unwrap();
    let images = [0.0; 3 * 64];
    let draw = Draw { total: 2, ..Draw::default() };
    let mut load = |values, labels: &[u32], draw| net.load(&images[..values], labels, draw);
    assert_eq!(load(0, &[], draw), Err(LoadError::Batch { capacity: 2, got: 0 }));
    assert_eq!(load(192, &[0; 3], draw), Err(LoadError::Batch { capacity: 2, got: 3 }));
    let shape = Shape::new(1, 8, 8);
    assert_eq!(load(100, &[0; 2], draw), Err(LoadError::Images { samples: 2, shape, got: 100 }));
    let expected = Err(LoadError::Label { sample: 1, label: 3, classes: 3 });
    assert_eq!(load(128, &[2, 3], draw), expected);
    let one = Draw { total: 1, ..draw };
    assert_eq!(load(128, &[0; 2], one), Err(LoadError::Total { total: 1, samples: 2 }));
    assert_eq!(load(128, &[0; 2], draw), Ok(()));
}

#[test]
fn what_a_larger_batch_left_behind_does_not_matter() {
    for name in ["cifar10-quick", "alexnet-small"] {
        let model = Model::builtin(name).unwrap();
        let mut used = Net::new(&model, 7).unwrap();
        let mut fresh = Net::new(&model, 2).unwrap();
        let parameters = batch::parameters(&used, 1);
        let (mut left, mut right) = (parameters.clone(), parameters.clone());
        Batch::new(&model, 7, 1).load(&mut used);
        batch::step(&mut used, &parameters, &mut left);
        let small = Batch::new(&model, 2, 2);
        small.load(&mut used);
        small.load(&mut fresh);
        let losses = [
            batch::step(&mut used, &parameters, &mut left),
            batch::step(&mut fresh, &parameters, &mut right),
        ];
        assert_eq!(losses[0], losses[1]);
        assert!(left == right, "{name}: gradients differ");
    }
}

#[test]
fn a_nan_anywhere_is_seen_in_the_loss() {
    let model = Model::builtin("cifar10-quick").unwrap();
    let mut net = Net::new(&model, 2).unwrap();
    let parameters = batch::parameters(&net, 1);
    for layer in (0..parameters.len()).filter(|&layer| !parameters[layer].is_empty()) {
        let mut broken = parameters.clone();
        broken[layer][0] = f32::NAN;
        Batch::new(&model, 2, 1).load(&mut net);
        assert!(batch::loss(&mut net, &broken).sum.is_nan(), "layer {layer}");
    }
}

#[test]
fn dropout_drops_only_while_training() {
    let text = SMALL.replace(
        "[[layer]]\nname = \"scores\"",
        "[[layer]]\nname = \"drop\"\nkind = \"dropout\"\n\n[[layer]]\nname = \"scores\"",
    );
    let [with, without] = [&text, SMALL].map(|text| Model::parse(text, "small").unwrap());
    let scores = |model: &Model, phase| {
        let mut net = Net::new(model, 2).unwrap();
        // Fillers depend on a layer's position, which differs.
        let parameters = |len| (0..len).map(|i| (i * 37 % 11) as f32 * 0.1 - 0.5).collect();
        let lens: Vec<usize> = net.layers().iter().map(|layer| layer.parameters).collect();
        Batch::new(model, 2, 1).load(&mut net);
        for (layer, len) in lens.into_iter().enumerate() {
            let parameters: Vec<f32> = parameters(len);
            net.forward(layer, &parameters, phase);
        }
        net.scores().to_vec()
    };
    assert_eq!(scores(&with, Phase::Test), scores(&without, Phase::Train));
    assert_ne!(scores(&with, Phase::Train), scores(&without, Phase::Train));
}

/// Gradient descent on a few samples gets all of them right.
#[test]
fn a_net_learns() {
    let model = Model::builtin("fashion-cnn").unwrap();
    let mut net = Net::new(&model, 16).unwrap();
    let mut parameters = batch::parameters(&net, 1);
    let mut gradients = parameters.clone();
    let batch = Batch::new(&model, 16, 1);
    let mut losses = Vec::new();
    for _ in 0..30 {
        batch.load(&mut net);
        losses.push(batch::step(&mut net, &parameters, &mut gradients));
        for (parameters, gradients) in parameters.iter_mut().zip(&gradients) {
            parameters.iter_mut().zip(gradients).for_each(|(p, g)| *p -= 0.1 * g);
        }
    }
    let (first, last) = (losses[0], losses[29]);
    assert!(last.mean() < 0.2 * first.mean(), "{first:?} {last:?}");
    assert_eq!(last.accuracy(), 1.0);
}
