//! What to train and how: flags over a file over defaults.

use super::inputs::Inputs;
use super::pace::{PaceFlags, Pretence};
use super::saving::{self, Resumed};
use anyhow::{Context, bail, ensure};
use poseidon::config::Carriers;
use poseidon::{ChunkSize, Config, Consistency, Optimizer, Placement, Policy, Servers};
use poseidon_nn::data::{self, Grey, Samples, Source, Split};
use poseidon_nn::train::{Overlap, Task};
use poseidon_nn::{Model, Schedule};
use poseidon_sim::{read_text, zoo};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// What can be said on the command line. What is not said comes from the file or the defaults.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Flags {
    /// A TOML file with any of these settings; flags win over it. See --print-config.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Worker processes to start [default: 4].
    #[arg(long, short = 'n', value_name = "P", value_parser = crate::launch::at_least_1, help_heading = CLUSTER)]
    pub(super) workers: Option<u16>,

    /// Where parameters live: 'colocated' on the workers [default], on M dedicated servers, or
    /// 'colocated+M'.
    #[arg(long, value_name = "colocated|M", help_heading = CLUSTER)]
    servers: Option<Servers>,

    /// Threads that compute in each worker; their gradients are summed before they leave it
    /// [default: 1].
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u16).range(1..), help_heading = CLUSTER)]
    threads_per_worker: Option<u16>,

    /// Threads that move data in each process [default: each process decides].
    #[arg(long, value_name = "L", value_parser = crate::launch::at_least_1, help_heading = CLUSTER)]
    lanes: Option<u16>,

    /// What carries links: 'auto' is shared memory within a machine and TCP between machines
    /// [default: auto, or POSEIDON_LINK].
    #[arg(long, value_name = "auto|tcp|unix", help_heading = CLUSTER)]
    pub(super) link: Option<Carriers>,

    /// fashion-cnn, cifar10-quick, alexnet-small, lenet, mlp, or a TOML file of your own
    /// [default: fashion-cnn].
    #[arg(long, value_name = "NAME|FILE", help_heading = TASK)]
    model: Option<String>,

    /// fashion-mnist-mini (bundled), cifar10:DIR, idx:DIR, lmdb:DIR, images:DIR, or a folder whose
    /// format is recognised [default: fashion-mnist-mini].
    #[arg(long, value_name = "SOURCE", help_heading = TASK)]
    data: Option<String>,

    /// Whether --data is one data set that all workers share, or this worker's own partition;
    /// '{rank}' in --data then stands for its rank [default: shared].
    #[arg(long, value_name = "shared|private", hide_possible_values = true, help_heading = TASK)]
    partition: Option<Partition>,

    /// Samples per worker and step [default: 32].
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..), help_heading = TASK)]
    batch: Option<u32>,

    /// How often to go through the data [default: 10].
    #[arg(long, value_name = "E", conflicts_with = "steps", value_parser = clap::value_parser!(u64).range(1..), help_heading = TASK)]
    epochs: Option<u64>,

    /// How many steps to take, instead of --epochs.
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..), help_heading = TASK)]
    steps: Option<u64>,

    /// Learning rate [default: 0.02].
    #[arg(long, value_name = "RATE", help_heading = TASK)]
    lr: Option<f32>,

    /// How it changes: 'fixed', 'step:size=1000,gamma=0.1', 'multistep:…', 'poly:…',
    /// 'cosine:steps=500,warmup=20' [default: fixed].
    #[arg(long, value_name = "SCHEDULE", help_heading = TASK)]
    schedule: Option<Schedule>,

    /// 'sgd:momentum=0.9,weight-decay=0.0005' [default], 'caffe-sgd:…', 'adam', 'adamw:…'.
    #[arg(long, value_name = "RULE", help_heading = TASK)]
    optimizer: Option<Optimizer>,

    /// Where initial parameters, dropout and the order of samples come from [default: 1].
    #[arg(long, value_name = "SEED", help_heading = TASK)]
    seed: Option<u64>,

    /// When to test: 'epoch', 'end' or 'never' [default: epoch].
    #[arg(long, value_name = "WHEN", hide_possible_values = true, help_heading = TASK)]
    test: Option<Test>,

    /// How layers are synchronised: 'auto' takes the cheapest exact way for each, 'ps' and 'sfb' force
    /// one [default: auto].
    #[arg(long, value_name = "auto|ps|sfb", help_heading = SYNC)]
    scheme: Option<Policy>,

    /// What may run beside synchronisation: 'none', 'backward', or 'full', which is the next forward
    /// too [default: full].
    #[arg(long, value_name = "none|backward|full", help_heading = SYNC)]
    overlap: Option<Overlap>,

    /// Largest chunk of a layer, such as 64k or 2MB. The default suits the cache and the wire; 2MB is the
    /// 2017 paper's, to see what that is worth [default: 256k].
    #[arg(long, value_name = "SIZE", help_heading = SYNC)]
    chunk: Option<ChunkSize>,

    /// How chunks are spread over servers: 'balanced' gives each as many bytes; 'per-tensor' puts whole
    /// layers on one server each, as other frameworks do, to see what that costs [default: balanced].
    #[arg(long, value_name = "balanced|per-tensor", help_heading = SYNC)]
    placement: Option<Placement>,

    /// How far apart workers may be: 'bsp', all take every step together; 'ssp:S', nobody is more than
    /// S steps ahead of anybody; 'asp', nobody waits. They meet at the end of an epoch, and where the
    /// state is saved [default: bsp].
    #[arg(long, value_name = "bsp|ssp:S|asp", help_heading = SYNC)]
    sync: Option<Consistency>,

    /// Take every step without the B slowest workers, if they are late: their work is dropped, and they
    /// go on with what the others have. All workers meet at the end of an epoch, and where the state is
    /// saved. The same as --sync drop-slowest:B.
    #[arg(long, value_name = "B", value_parser = clap::value_parser!(u16).range(1..))]
    #[arg(conflicts_with = "sync", help_heading = SYNC)]
    drop_slowest: Option<u16>,

    /// Add contributions in rank order, so that a run repeats bit by bit.
    #[arg(long, help_heading = SYNC)]
    deterministic: bool,

    /// Compare all replicas' parameters after every step. Slow; the report has the digests.
    #[arg(long, help_heading = SYNC)]
    verify_replicas: bool,

    /// Save the training's state here, also when it is stopped by SIGTERM or Ctrl-C: a folder that all
    /// nodes reach, or s3://BUCKET/PREFIX.
    #[arg(long, value_name = "PLACE", help_heading = SAVE)]
    checkpoint: Option<String>,

    /// Save after every N steps [default: after every epoch].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), requires = "checkpoint", help_heading = SAVE)]
    every: Option<u64>,

    /// Keep at most so many checkpoints [default: all].
    #[arg(long, value_name = "COUNT", requires = "checkpoint", help_heading = SAVE)]
    keep: Option<usize>,

    /// Delete checkpoints that are older, such as 12h or 7d; the newest always stays.
    #[arg(long, value_name = "AGE", requires = "checkpoint", help_heading = SAVE)]
    keep_for: Option<Age>,

    /// Go on from the newest checkpoint of PLACE, or from PLACE@STEP. Settings are the checkpoint's,
    /// unless other flags say otherwise. Without PLACE: from the newest one of --checkpoint, or from
    /// the beginning if there is none.
    #[arg(long, value_name = "PLACE[@STEP]", num_args = 0..=1, default_missing_value = "", help_heading = SAVE)]
    resume: Option<String>,

    #[command(flatten)]
    pub(super) pace: PaceFlags,

    /// Where to put report.html and report.json [default: poseidon-report].
    #[arg(long, value_name = "DIR", help_heading = TASK)]
    report: Option<PathBuf>,

    /// Train in this process without Poseidon: what its overhead is measured against.
    #[arg(long, conflicts_with_all = ["workers", "servers", "scheme", "overlap", "chunk"])]
    #[arg(conflicts_with_all = ["placement", "sync", "drop_slowest"], help_heading = SYNC)]
    bare: bool,
}

const CLUSTER: &str = "Cluster";
const TASK: &str = "What to train";
const SYNC: &str = "How to synchronise";
const SAVE: &str = "Checkpoints";

/// The effective configuration; what `--print-config` prints and `--config` reads.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Settings {
    pub(super) workers: u16,
    pub(super) servers: Servers,
    pub(super) threads_per_worker: u16,
    pub(super) lanes: Option<u16>,
    #[serde(with = "text")]
    pub(super) link: Carriers,
    pub(super) model: String,
    pub(super) data: String,
    pub(super) partition: Partition,
    pub(super) batch: u32,
    pub(super) epochs: u64,
    pub(super) steps: Option<u64>,
    pub(super) lr: f32,
    #[serde(with = "text")]
    pub(super) schedule: Schedule,
    #[serde(with = "text")]
    pub(super) optimizer: Optimizer,
    pub(super) seed: u64,
    pub(super) test: Test,
    pub(super) scheme: Policy,
    pub(super) overlap: Overlap,
    #[serde(with = "text")]
    pub(super) chunk: ChunkSize,
    pub(super) placement: Placement,
    pub(super) sync: Consistency,
    pub(super) deterministic: bool,
    pub(super) verify_replicas: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) checkpoint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) every: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) keep: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) keep_for: Option<Age>,
    /// The checkpoint to go on from.
    #[serde(skip)]
    pub(super) resumed: Option<Resumed>,
    pub(super) report: PathBuf,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) bare: bool,
    #[serde(skip_serializing_if = "Pretence::is_none")]
    pub(super) pretence: Pretence,
}

/// How old a checkpoint may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Age(pub(super) Duration);

impl FromStr for Age {
    type Err = humantime::DurationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        humantime::parse_duration(text).map(Self)
    }
}

impl Serialize for Age {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(self.0))
    }
}

impl<'de> Deserialize<'de> for Age {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Flags {
    /// The checkpoint that --resume names.
    fn find_checkpoint(&self) -> anyhow::Result<Option<Resumed>> {
        match (self.resume.as_deref(), &self.checkpoint) {
            (None, _) => Ok(None),
            (Some(""), None) => bail!("--resume: from where? name a place, or give --checkpoint"),
            (Some(""), Some(place)) => Resumed::find(place),
            (Some(place), _) => {
                let found = Resumed::find(place)?;
                ensure!(found.is_some(), "there is no checkpoint in {place}");
                Ok(found)
            }
        }
    }
}

/// Whose the data is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Partition {
    /// Everybody's.
    #[default]
    Shared,
    /// This worker's alone.
    Private,
}

/// When to test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Test {
    /// After every epoch.
    #[default]
    Epoch,
    /// After training.
    End,
    /// Not at all.
    Never,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            workers: 4,
            servers: Servers::Colocated,
            threads_per_worker: 1,
            lanes: None,
            link: Carriers::Auto,
            model: "fashion-cnn".into(),
            data: "fashion-mnist-mini".into(),
            partition: Partition::Shared,
            batch: 32,
            epochs: 10,
            steps: None,
            lr: 0.02,
            schedule: "fixed".parse().expect("a schedule"),
            optimizer: "sgd:momentum=0.9,weight-decay=0.0005".parse().expect("a rule"),
            seed: 1,
            test: Test::Epoch,
            scheme: Policy::Auto,
            overlap: Overlap::Full,
            chunk: ChunkSize::default(),
            placement: Placement::default(),
            sync: Consistency::Bsp,
            deterministic: false,
            verify_replicas: false,
            checkpoint: None,
            every: None,
            keep: None,
            keep_for: None,
            resumed: None,
            report: "poseidon-report".into(),
            bare: false,
            pretence: Pretence::default(),
        }
    }
}

impl Settings {
    /// Flags over the file over the defaults.
    pub(crate) fn from_flags(flags: &Flags) -> anyhow::Result<Self> {
        let resumed = flags.find_checkpoint()?;
        let mut settings = match (&flags.config, &resumed) {
            (Some(path), _) => read(path)?,
            (None, Some(resumed)) => {
                let step = resumed.at.step;
                toml::from_str(&resumed.state.config)
                    .with_context(|| format!("the settings in the checkpoint of step {step}"))?
            }
            (None, None) => Self::default(),
        };
        settings.resumed = resumed;
        macro_rules! take {
            ($($field:ident),*) => {
                $(if let Some(value) = flags.$field.clone() { settings.$field = value; })*
            };
        }
        take!(workers, servers, threads_per_worker, link, model, data, partition, batch, lr);
        take!(schedule, optimizer, seed, test, scheme, overlap, chunk, placement, sync, report);
        settings.sync = flags.drop_slowest.map_or(settings.sync, Consistency::DropSlowest);
        settings.lanes = flags.lanes.or(settings.lanes);
        if let Some(place) = &flags.checkpoint {
            settings.checkpoint = Some(saving::absolute(place)?);
        }
        settings.every = flags.every.or(settings.every);
        settings.keep = flags.keep.or(settings.keep);
        settings.keep_for = flags.keep_for.or(settings.keep_for);
        settings.steps = flags.steps.or(settings.steps);
        if let Some(epochs) = flags.epochs {
            (settings.epochs, settings.steps) = (epochs, None);
        }
        settings.pretence.take(&flags.pace);
        settings.deterministic |= flags.deterministic;
        settings.verify_replicas |= flags.verify_replicas;
        settings.bare |= flags.bare;
        if settings.bare {
            settings.workers = 1;
        }
        settings.validate()?;
        Ok(settings)
    }

    pub(crate) fn to_toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string(self)?)
    }

    /// Whether there are enough workers for what is asked of them.
    pub(crate) fn check_workers(&self) -> anyhow::Result<()> {
        let (drops, workers) = (self.sync.drops(), self.workers);
        ensure!(
            drops < workers,
            "without the {drops} slowest of {workers} workers nobody is left: expected fewer than {workers}"
        );
        self.pretence.check(workers)
    }

    /// Opens everything, to find out whether it can be.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let ranks = match self.partition {
            Partition::Shared => 1,
            Partition::Private => self.workers,
        };
        (0..ranks).try_for_each(|rank| Inputs::open(self, rank, self.workers).map(drop))
    }

    /// Makes the report's folder: better to find out now that it cannot be made.
    pub(crate) fn prepare_report(&self) -> anyhow::Result<()> {
        let dir = &self.report;
        ensure!(dir.to_str().is_some(), "the report's folder {dir:?} has a name that is not text");
        std::fs::create_dir_all(dir)
            .with_context(|| format!("cannot make the report's folder {}", dir.display()))
    }

    /// Name and value of what workers must agree on and the session does not compare.
    pub(crate) fn shared_by_all(&self) -> Vec<(&'static str, String)> {
        let steps = self.steps.map_or_else(|| "by epochs".into(), |steps| steps.to_string());
        vec![
            ("the seed", self.seed.to_string()),
            ("the number of epochs", self.epochs.to_string()),
            ("the number of steps", steps),
            ("the learning rate", self.lr.to_string()),
            ("the schedule", self.schedule.to_string()),
            ("when to test", format!("{:?}", self.test).to_lowercase()),
            ("the partition", format!("{:?}", self.partition).to_lowercase()),
            ("whether replicas are verified", self.verify_replicas.to_string()),
            ("how often the state is saved", format!("{:?}", self.every)),
        ]
    }

    /// The model, built in or read from a file.
    pub(crate) fn model(&self) -> anyhow::Result<Model> {
        if let Some(model) = Model::builtin(&self.model) {
            return Ok(model);
        }
        let path = Path::new(&self.model);
        let nearest = || zoo::nearest(&self.model, Model::builtins().iter().copied());
        ensure!(
            path.exists(),
            "no model '{}'{}: there is no such file, and the built-in ones are {}",
            self.model,
            zoo::did_you_mean(nearest()),
            Model::builtins().join(", ")
        );
        Ok(Model::read(path)?)
    }

    /// The samples of one split, which must be what the model expects. What was done about it is added
    /// to `notes`.
    pub(crate) fn open(
        &self,
        split: Split,
        rank: u16,
        model: &Model,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Arc<dyn Samples>> {
        let text = match self.partition {
            Partition::Shared => self.data.clone(),
            Partition::Private => self.data.replace("{rank}", &rank.to_string()),
        };
        let source: Source = crate::data::resolve(&text)?;
        let mut samples: Arc<dyn Samples> = data::open(&source, split)?.into();
        let input = [model.input.channels, model.input.height, model.input.width];
        if input[0] == 1
            && let Some(grey) = Grey::new(samples.clone())
        {
            samples = Arc::new(grey);
            if split == Split::Train {
                let name = &model.name;
                notes
                    .push(format!("{source} is in colour and made grey: '{name}' has one channel"));
            }
        }
        let [channels, height, width] = samples.shape();
        ensure!(
            samples.shape() == input,
            "model '{}' expects images of {}x{}x{}, but those of {source} are {channels}x{height}x{width}",
            model.name,
            input[0],
            input[1],
            input[2],
        );
        ensure!(
            samples.classes() <= model.classes,
            "model '{}' knows {} classes, but {source} has {}",
            model.name,
            model.classes,
            samples.classes()
        );
        Ok(samples)
    }

    pub(crate) fn task(&self, model: Model) -> Task {
        Task {
            model,
            batch: self.batch as usize,
            devices: self.threads_per_worker.into(),
            seed: self.seed,
            optimizer: self.optimizer.clone(),
            overlap: self.overlap,
        }
    }

    /// What these settings say about a node, on top of what its environment says.
    pub(crate) fn apply_to(&self, config: &mut Config) {
        // A launcher of ours has said all of this in the environment already.
        if self.servers != Servers::Colocated {
            config.servers = self.servers;
        }
        if self.link != Carriers::Auto {
            config.carrier = self.link;
        }
        if let Some(lanes) = self.lanes {
            (config.lanes, config.lanes_by_rate) = (lanes, false);
        }
    }

    /// The net for `classes` classes: a built-in one has as many outputs as the data has classes.
    pub(crate) fn model_for(&self, model: Model, classes: usize) -> Model {
        // Private data may have other classes on every worker.
        let follows = self.partition == Partition::Shared && Model::builtin(&self.model).is_some();
        match model.clone().with_classes(classes) {
            Some(fitted) if follows => fitted,
            _ => model,
        }
    }

    fn validate(&self) -> anyhow::Result<()> {
        ensure!(self.workers > 0, "workers = 0: expected at least 1");
        ensure!(self.threads_per_worker > 0, "threads-per-worker = 0: expected at least 1");
        ensure!(self.batch > 0, "batch = 0: expected at least 1");
        ensure!(self.epochs > 0 && self.steps != Some(0), "nothing to train: 0 epochs or steps");
        if !self.lr.is_finite() || self.lr <= 0.0 {
            bail!("learning rate {}: expected a positive number", self.lr);
        }
        ensure!(self.every != Some(0), "every = 0: expected at least 1");
        for (asked, what) in
            [(self.deterministic, "deterministic"), (self.verify_replicas, "verify-replicas")]
        {
            let sync = self.sync;
            ensure!(!asked || sync.is_bsp(), "{what} needs sync = \"bsp\", not \"{sync}\"");
        }
        if self.sync.drops() > 0 {
            let several = self.lanes.is_some_and(|lanes| lanes > 1);
            ensure!(
                !several,
                "where slow workers are dropped, there is one lane: leave out --lanes"
            );
            ensure!(
                self.scheme != Policy::Sfb,
                "factors of slow workers cannot be dropped: use --scheme auto or ps"
            );
        }
        let saves = self.checkpoint.is_some() || self.resumed.is_some();
        ensure!(!(self.bare && saves), "without Poseidon (--bare) there are no checkpoints");
        if self.optimizer.is_stateless() {
            bail!(
                "optimizer '{}' updates nothing: expected sgd, caffe-sgd, adam or adamw",
                self.optimizer
            );
        }
        Ok(())
    }
}

fn read(path: &Path) -> anyhow::Result<Settings> {
    let text = read_text(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("in {}", path.display()))
}

/// Settings that are text in the file, as on the command line.
pub(super) mod text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::{fmt::Display, str::FromStr};

    pub(in crate::train) fn serialize<T: Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(in crate::train) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests;
