//! A job that goes on from a checkpoint ends where it would have ended without an interruption.

use crate::cluster::{Layout, without_hanging};
use poseidon::checkpoint::{Checkpoint, Keep, TensorFacts, open};
use poseidon::session::{Builder, Description};
use poseidon::{
    Buffer, CheckpointAt, Checkpoints, ChunkSize, Clock, Encoding, Error, Factors, Layer,
    LayerKind, Optimizer, Policy, Servers, Session,
};
use serde_json::json;
use std::path::Path;

const M: usize = 60;
const N: usize = 30;
const BATCH: usize = 2;
const LAYERS: [(&str, usize); 2] = [("conv", 500), ("fc", M * N + M)];

/// A job, and where its state goes and comes from.
#[derive(Clone)]
struct Setup {
    layout: Layout,
    rule: &'static str,
    scheme: Policy,
    down: Encoding,
    checkpoints: Checkpoints,
}

impl Setup {
    fn new(layout: Layout, rule: &'static str, scheme: Policy) -> Self {
        let checkpoints = Checkpoints::default();
        Self { layout, rule, scheme, down: Encoding::F32, checkpoints }
    }

    fn to(mut self, place: &Path) -> Self {
        self.checkpoints.to = Some(text(place));
        self
    }

    fn from(mut self, place: &Path, step: u64) -> Self {
        self.checkpoints.from = Some(CheckpointAt { place: text(place), step });
        self
    }

    fn describe(&self, builder: Builder) -> Builder {
        let conv = Layer { down: self.down, ..Layer::new(LAYERS[0].0, LAYERS[0].1) };
        let kind = LayerKind::Fc { m: M, n: N };
        builder
            .layer(conv)
            .layer(Layer { kind, ..Layer::new(LAYERS[1].0, LAYERS[1].1) })
            .chunk_size(ChunkSize { min: 64, max: 400 })
            .scheme(self.scheme)
            .batch(BATCH)
            .optimizer(self.rule.parse::<Optimizer>().unwrap())
            .learning_rate(0.125)
            .deterministic(true)
            .checkpoints(self.checkpoints.clone())
    }

    /// Every worker's parameters after `steps`, counted from the beginning of the training. A
    /// checkpoint is made of the state after each of `saved`.
    fn train(&self, steps: u64, saved: &'static [u64]) -> Vec<Result<Vec<Vec<f32>>, Error>> {
        self.layout.run(|builder| self.describe(builder), |session| work(session, steps, saved))
    }
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// After this step there are no gradients any more.
const STILL: u64 = 25;

fn number(rank: u16, i: usize, step: u64) -> f32 {
    if step > STILL {
        return 0.0;
    }
    ((usize::from(rank) * 5 + i * 3 + step as usize * 11) % 9) as f32 / 8.0 - 0.5
}

fn work(session: &Session, steps: u64, saved: &[u64]) -> Result<Vec<Vec<f32>>, Error> {
    let layers: Vec<_> =
        LAYERS.iter().map(|(name, _)| session.layer(name)).collect::<Result<_, _>>()?;
    let first = session.checkpoint().map_or(0, |checkpoint| checkpoint.manifest().step);
    let mut values = Vec::new();
    for (layer, (name, len)) in layers.iter().zip(LAYERS) {
        let initial = match session.checkpoint() {
            // Worker 0's initial values are everybody's.
            Some(checkpoint) if session.rank() == 0 => {
                checkpoint.read(name, &"parameters".parse().unwrap(), 0..len).unwrap()
            }
            _ => (0..len).map(|i| number(7, i, 0)).collect(),
        };
        let down = session.plan().encodings(*layer).down;
        session.broadcast(*layer, encoded(&initial, down))?;
        values.push(session.receive(*layer)?.result);
    }
    let mut saving = None;
    for step in first + 1..=steps {
        if saved.contains(&step) {
            saving = Some(session.begin_checkpoint(step, Keep::default())?);
        }
        // Two layers are in flight at once, as in training.
        for (position, layer) in layers.iter().enumerate().rev() {
            let parameters = std::mem::take(&mut values[position]);
            let len = LAYERS[position].1;
            match session.scheme(*layer)? {
                poseidon::Scheme::Sfb => {
                    let u: Vec<f32> =
                        (0..BATCH * M).map(|i| number(session.rank(), i, step)).collect();
                    let v: Vec<f32> =
                        (0..BATCH * N).map(|i| number(session.rank(), i + 1, step)).collect();
                    session.send_factors(*layer, &[Factors { u: &u, v: &v }], parameters)?;
                }
                _ => {
                    let gradient: Vec<f32> =
                        (0..len).map(|i| number(session.rank(), i, step)).collect();
                    session.send_into(*layer, gradient.into(), parameters)?;
                }
            }
        }
        for (position, layer) in layers.iter().enumerate() {
            values[position] = session.receive(*layer)?.result;
        }
        if let Some(saving) =
            saving.as_ref().filter(|saving: &&poseidon::session::Saving| saving.step() == step)
        {
            let tensor = |name: &str, shape: &[usize]| TensorFacts {
                name: name.into(),
                shape: shape.into(),
            };
            saving.describe(Description {
                job: json!({ "seed": 7 }),
                rank: json!({ "rank": session.rank() }),
                tensors: vec![
                    Vec::new(),
                    vec![tensor("fc.weight", &[M, N]), tensor("fc.bias", &[M])],
                ],
            });
        }
        if let Some(saving) = saving.take_if(|saving| saving.is_finished() || step == steps) {
            assert_eq!(saving.wait()?.step % 5, 0);
        }
    }
    if let Some(saving) = saving {
        saving.wait()?;
    }
    Ok(values.iter().map(decoded).collect())
}

fn encoded(values: &[f32], down: Encoding) -> Buffer {
    if down == Encoding::F32 {
        return values.to_vec().into();
    }
    let mut bits = vec![0; values.len()];
    down.encode(values, bytemuck::cast_slice_mut(&mut bits));
    Buffer::from_bits(down, bits)
}

fn decoded(values: &Buffer) -> Vec<f32> {
    let mut numbers = vec![0.0; values.len()];
    values.encoding().decode(values.bytes(), &mut numbers);
    numbers
}

fn good(results: Vec<Result<Vec<Vec<f32>>, Error>>) -> Vec<Vec<f32>> {
    let mut all: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
    let first = all.remove(0);
    all.iter().for_each(|other| assert_eq!(*other, first, "replicas differ"));
    first
}

/// 20 steps at once, and 10 steps, a checkpoint and 10 more in a new job, end with the same bits.
#[test]
fn a_job_goes_on_bit_by_bit() {
    without_hanging(|| {
        let dedicated = Layout { servers: Servers::Dedicated(2), ..Layout::workers(2) };
        let mixed = Layout { servers: Servers::Mixed(1), lanes: 2, ..Layout::workers(3) };
        let hosts = Layout::hosts(&[2, 1]);
        for layout in [Layout::workers(1), Layout::workers(3), dedicated, mixed, hosts] {
            for rule in ["sgd:momentum=0.9,weight-decay=0.01", "adam"] {
                for scheme in [Policy::Ps, Policy::Sfb] {
                    let place = tempfile::tempdir().unwrap();
                    let setup = Setup::new(layout, rule, scheme);
                    let whole = good(setup.train(20, &[]));
                    let halfway = setup.clone().to(place.path()).train(10, &[5, 10]);
                    assert_ne!(good(halfway), whole);
                    let resumed = good(setup.from(place.path(), 10).train(20, &[]));
                    assert_eq!(resumed, whole, "{layout:?} {rule} {scheme}");
                }
            }
        }
    });
}

/// A checkpoint is of the step it is asked for, although the job has gone on since.
#[test]
fn a_checkpoint_is_not_touched_by_later_steps() {
    without_hanging(|| {
        let place = tempfile::tempdir().unwrap();
        let setup = Setup::new(Layout::workers(3), "adam", Policy::Sfb);
        let at_ten = good(setup.train(10, &[]));
        good(setup.to(place.path()).train(20, &[10]));
        let storage = open(&text(place.path())).unwrap();
        let checkpoint = Checkpoint::open(&storage, 10).unwrap();
        for ((name, len), expected) in LAYERS.into_iter().zip(at_ten) {
            let what = "parameters".parse().unwrap();
            assert_eq!(checkpoint.read(name, &what, 0..len).unwrap(), expected);
        }
        let manifest = checkpoint.manifest();
        assert_eq!(manifest.program["ranks"], json!([{ "rank": 0 }, { "rank": 1 }, { "rank": 2 }]));
        assert_eq!(manifest.program["job"]["seed"], 7);
        assert_eq!(manifest.parts.len(), 3);
    });
}

/// Another number of workers and servers finds everything: parameters, and the rule's state.
#[test]
fn another_number_of_nodes_goes_on() {
    without_hanging(|| {
        for scheme in [Policy::Ps, Policy::Sfb] {
            let place = tempfile::tempdir().unwrap();
            let setup = Setup::new(Layout::workers(4), "adam", scheme).to(place.path());
            let left = good(setup.train(STILL, &[STILL]));
            let moved = good(setup.clone().from(place.path(), STILL).train(STILL + 3, &[]));
            assert_ne!(moved, left);
            let server = Layout { servers: Servers::Dedicated(1), ..Layout::workers(2) };
            for layout in [Layout::workers(2), Layout::workers(5), server] {
                let other = Setup { layout, ..setup.clone() }.from(place.path(), STILL);
                assert_eq!(
                    good(other.train(STILL, &[])),
                    left,
                    "what is taken up is what was left"
                );
                // From here on gradients are zero: only the parameters and the rule's state move.
                assert_eq!(good(other.train(STILL + 3, &[])), moved, "{layout:?} {scheme}");
            }
        }
    });
}

/// The parameters of a layer that workers get rounded are saved as the shards have them.
#[test]
fn parameters_that_travel_rounded_are_saved_whole() {
    without_hanging(|| {
        let place = tempfile::tempdir().unwrap();
        let mut setup = Setup::new(Layout::workers(2), "sgd:momentum=0.9", Policy::Ps);
        setup.down = Encoding::Bf16;
        let whole = good(setup.train(20, &[]));
        good(setup.clone().to(place.path()).train(10, &[10]));
        assert_eq!(good(setup.from(place.path(), 10).train(20, &[])), whole);
    });
}

/// What does not fit is refused with the layer and the difference, on every worker.
#[test]
fn another_job_is_refused() {
    without_hanging(|| {
        let place = tempfile::tempdir().unwrap();
        let setup = Setup::new(Layout::workers(2), "adam", Policy::Ps).to(place.path());
        good(setup.train(5, &[5]));
        let other = Setup { rule: "sgd", ..setup.clone() }.from(place.path(), 5);
        for result in other.train(6, &[]) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("conv") && error.contains("adam"), "{error}");
        }
        for result in setup.clone().from(place.path(), 6).train(6, &[]) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("000006"), "{error}");
        }
        // The same step twice would replace a good checkpoint.
        for result in setup.train(5, &[5]) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("has a checkpoint of this step already"), "{error}");
        }
        Checkpoint::open(&open(&text(place.path())).unwrap(), 5).unwrap();
    });
}

/// A rule that keeps nothing on the shards leaves nothing to save.
#[test]
fn programs_that_have_the_parameters_save_them_themselves() {
    without_hanging(|| {
        let place = tempfile::tempdir().unwrap();
        let setup = Setup::new(Layout::workers(1), "mean", Policy::Ps).to(place.path());
        let error = setup.train(5, &[5]).remove(0).unwrap_err().to_string();
        assert!(error.contains("the program has its parameters"), "{error}");
    });
}

/// When one worker asks to stop, all workers hear of it at the same clock.
#[test]
fn all_hear_at_the_same_clock_that_one_wants_to_stop() {
    without_hanging(|| {
        for scheme in [Policy::Ps, Policy::Sfb] {
            for layout in [Layout::workers(3), Layout::hosts(&[2, 2])] {
                let setup = Setup::new(layout, "sgd", scheme);
                let stops = layout.run(
                    |builder| setup.describe(builder),
                    |session| {
                        for step in 1..=30 {
                            if step == 7 && session.rank() == 1 {
                                session.ask_to_stop();
                            }
                            if step == 1 {
                                work(session, 1, &[])?;
                            } else {
                                one_more(session, step)?;
                            }
                            if session.stop_asked().is_some_and(|clock| clock.0 <= step) {
                                return Ok((step, session.stop_asked()));
                            }
                        }
                        Ok((30, None))
                    },
                );
                for stop in stops {
                    assert_eq!(stop.unwrap(), (7, Some(Clock(7))), "{scheme} {layout:?}");
                }
            }
        }
    });
}

fn one_more(session: &Session, step: u64) -> Result<(), Error> {
    for (name, len) in LAYERS.into_iter().rev() {
        let layer = session.layer(name)?;
        let parameters = Buffer::from(vec![0.0; len]);
        match session.scheme(layer)? {
            poseidon::Scheme::Sfb => {
                let (u, v) = (vec![step as f32; M], vec![1.0; N]);
                session.send_factors(layer, &[Factors { u: &u, v: &v }], parameters)?;
            }
            _ => session.send(layer, parameters)?,
        }
    }
    for (name, _) in LAYERS {
        session.receive(session.layer(name)?)?;
    }
    Ok(())
}
