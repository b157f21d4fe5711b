//! One worker of `poseidon train`: reads, computes, synchronises; rank 0 also shows and reports.

mod stopping;

use super::facts::{EpochFacts, FinalFacts, gather};
use super::inputs::{Agreement, Inputs};
use super::outline::{command, plan};
use super::pace::Pace;
use super::saving::{Resumed, RunState, Saver, asked_to_end};
use super::screen::{Kind, Screen, StepProgress};
use super::settings::{Partition, Settings, Test};
use super::thinned::Thinned;
use super::turnout::Turnout;
use crate::report::{
    CurvePoint, EpochReport, LayerReport, NodeReport, Quantiles, Report, Span, Timeline, Track,
    What,
};
use crate::terminal::say;
use anyhow::ensure;
use poseidon::{Checkpoints, Config, LayerId, Session, Traffic};
use poseidon_nn::data::{Evaluation, Loader, Position, Samples, Transform};
use poseidon_nn::train::{self, Worker};
use poseidon_nn::{Loss, Net};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};
use stopping::give_up;

/// Trains as one worker of the job that `config` describes.
pub(super) fn run(settings: &Settings, config: Config, json: bool) -> anyhow::Result<()> {
    let inputs = Inputs::open(settings, config.node().0, config.workers)?;
    if config.node().0 == 0 {
        inputs.tell_notes();
    }
    let task = settings.task(inputs.model.clone());
    let builder = Session::builder(config)
        .scheme(settings.scheme)
        .deterministic(settings.deterministic)
        .consistency(settings.sync)
        .chunk_size(settings.chunk)
        .placement(settings.placement)
        .checkpoints(Checkpoints {
            to: settings.checkpoint.clone(),
            from: settings.resumed.as_ref().map(|resumed| resumed.at.clone()),
        })
        .learning_rate(settings.lr);
    let session = task.describe(builder)?.start()?;
    drive(settings, Worker::join(&task, session)?, inputs, json)
}

/// Trains in this process, without Poseidon.
pub(super) fn run_alone(settings: &Settings, json: bool) -> anyhow::Result<()> {
    let inputs = Inputs::open(settings, 0, 1)?;
    inputs.tell_notes();
    let worker = Worker::alone(&settings.task(inputs.model.clone()))?;
    drive(settings, worker, inputs, json)
}

fn drive(settings: &Settings, worker: Worker, inputs: Inputs, json: bool) -> anyhow::Result<()> {
    let rank = worker.session().map_or(0, Session::rank);
    let agreement = match inputs.agree(settings, &worker) {
        Ok(agreement) => agreement,
        Err(error) => return give_up(worker, error),
    };
    // A scheduler may start a job again that has ended.
    if let Some(words) = agreement.nothing_left() {
        if rank == 0 {
            tracing::info!("{words}");
        }
        return Ok(worker.finish()?);
    }
    let Agreement { transform, sampler, steps, samples, .. } = agreement;
    let steps_per_epoch = sampler.steps_per_epoch();
    let loader = match Loader::new(inputs.train.clone(), transform.clone(), sampler) {
        Ok(loader) => loader,
        Err(error) => return give_up(worker, error.into()),
    };
    let before = Before::of(worker.session());
    // Nobody sends before everybody has counted.
    if let Err(error) = gather(&worker, "counted", ()) {
        return give_up(worker, error);
    }
    if rank == 0 {
        crate::report::set_aside(&settings.report)?;
    }
    let done = |resumed: &Resumed| resumed.state.epochs.clone();
    let mut run = Run {
        first: Beginning {
            steps: worker.steps(),
            position: loader.position(),
            left: loader.steps_left(),
        },
        saver: Saver::new(settings),
        asked: asked_to_end()?,
        stop_at: None,
        told_when: false,
        samples,
        plan: plan(&worker, &Net::new(&inputs.model, 1)?),
        before,
        settings,
        worker,
        rank,
        loader,
        test: inputs.test,
        transform,
        screen: screen(rank, json),
        steps_per_epoch,
        steps,
        began: Instant::now(),
        stepping: Duration::ZERO,
        step_times: Thinned::new(),
        images: 0,
        turnout: Turnout::default(),
        pace: settings.pretence.of(rank, settings.seed),
        curve: Thinned::new(),
        epochs: settings.resumed.as_ref().map_or_else(Vec::new, done),
        digests: Vec::new(),
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
    };
    match run.train() {
        Ok(()) => run.finish(json),
        Err(error) => {
            run.leave_report(&format!("it failed: {error:#}"));
            give_up(run.worker, error)
        }
    }
}

/// Rank 0 draws. With `--json`, standard output is for that alone.
fn screen(rank: u16, json: bool) -> Screen {
    let kind = match (rank, json) {
        (0, false) => Kind::detect(),
        (0, true) if Kind::detect() == Kind::Live => Kind::Live,
        _ => Kind::Silent,
    };
    match json {
        true => Screen::new(kind, io::stderr()),
        false => Screen::new(kind, io::stdout()),
    }
}

/// A training run as one worker sees it.
struct Run<'a> {
    settings: &'a Settings,
    worker: Worker,
    rank: u16,
    loader: Loader,
    test: Option<Arc<dyn Samples>>,
    transform: Transform,
    screen: Screen,
    plan: Vec<LayerReport>,
    steps_per_epoch: u64,
    steps: u64,
    /// What this worker had sent before the first step.
    before: Before,
    began: Instant,
    /// Time spent on steps, without tests.
    stepping: Duration,
    step_times: Thinned<f64>,
    images: u64,
    turnout: Turnout,
    pace: Pace,
    curve: Thinned<CurvePoint>,
    epochs: Vec<EpochReport>,
    digests: Vec<String>,
    first: Beginning,
    saver: Saver,
    /// Whether this process was asked to end.
    asked: Arc<AtomicBool>,
    /// The step that all workers stop after, if one of them was asked to end.
    stop_at: Option<u64>,
    /// Whether it was said when that will be.
    told_when: bool,
    /// Samples of an epoch.
    samples: usize,
    date: String,
}

/// Where a run began.
#[derive(Clone, Copy)]
struct Beginning {
    /// Steps that were taken before.
    steps: u64,
    /// The place in the data.
    position: Position,
    /// Steps from there to the end of the epoch.
    left: u64,
}

struct Before {
    traffic: Traffic,
    layers: Vec<u64>,
}

impl Run<'_> {
    fn train(&mut self) -> anyhow::Result<()> {
        self.screen.headline(&self.headline());
        self.screen.plan(&self.plan);
        self.began = Instant::now();
        let epochs = self.epoch_of(self.steps).ceil() as u64;
        while self.worker.steps() < self.steps && !self.is_stopped() {
            let epoch = self.loader.position().epoch;
            let steps = self.loader.steps_left().min(self.steps - self.worker.steps());
            self.screen.epoch_begin(Instant::now(), epoch + 1, epochs, steps);
            self.epoch(steps)?;
        }
        let saved = self.saver.wait();
        self.tell(saved);
        Ok(())
    }

    /// How many epochs are done after `step` steps. What was left of the first one may be no multiple of
    /// a step of this run: it may have other workers and batches than the one before.
    fn epoch_of(&self, step: u64) -> f64 {
        let Beginning { steps, position: Position { epoch, samples }, left } = self.first;
        let (epoch, taken) = (epoch as f64, step - steps);
        if taken >= left {
            return epoch + 1.0 + (taken - left) as f64 / self.steps_per_epoch as f64;
        }
        let before = samples as f64 / self.samples as f64;
        epoch + before + (1.0 - before) * taken as f64 / left as f64
    }

    fn tell(&mut self, news: Option<String>) {
        if let Some(news) = news {
            self.screen.note(&news);
        }
    }

    /// Before a step: begins a checkpoint of what it leaves, if one is due. `is_last`: workers compare
    /// results after it. `ends_epoch`: it is the last one of its epoch, too. Returns whether all workers
    /// take it together.
    fn prepare_step(&mut self, is_last: bool, ends_epoch: bool) -> anyhow::Result<bool> {
        let next = self.worker.steps() + 1;
        let ends_run = next == self.steps || self.stop_at == Some(next);
        if is_last || ends_run {
            self.worker.step_together()?;
        }
        let is_due = self.saver.is_due(next, ends_epoch, ends_run);
        if is_due {
            let last = self.saver.begin(&self.worker)?;
            self.tell(last);
        }
        Ok(is_last || ends_run || is_due)
    }

    /// After a step: describes it to a checkpoint of it, and hears whether all are to stop. `left`: steps
    /// of this epoch.
    fn stepped(&mut self, left: u64) -> anyhow::Result<()> {
        let (settings, position, samples) = (self.settings, self.loader.position(), self.samples);
        let epochs = &self.epochs;
        let state = || {
            let (config, seed, epochs) = (settings.to_toml()?, settings.seed, epochs.clone());
            Ok(RunState { config, seed, samples, position, epochs })
        };
        let ended = self.saver.stepped(&self.worker, state)?;
        self.tell(ended);
        self.hear_whether_to_stop(left);
        Ok(())
    }

    fn headline(&self) -> String {
        let Settings { model, data, batch, .. } = self.settings;
        let workers = self.worker.session().map_or(1, Session::workers);
        let (workers, much) = (crate::report::units::plural(workers as u64, "worker"), self.steps);
        let from = match &self.settings.resumed {
            Some(resumed) => format!(", goes on after step {}", resumed.at.step),
            None => String::new(),
        };
        format!("{model} on {data}: {workers} with batches of {batch}, {much} steps{from}")
    }

    /// Takes `steps` steps, then tests and tells the others.
    fn epoch(&mut self, steps: u64) -> anyhow::Result<()> {
        let began = Instant::now();
        let first = self.worker.steps();
        let epoch = self.loader.position().epoch + 1;
        let ranks = self.worker.session().map_or(1, Session::workers);
        let mut total = Loss::default();
        let mut losses = Vec::new();
        let mut times = Vec::new();
        let mut digests = Vec::new();
        let ends_epoch = steps == self.loader.steps_left();
        // Whether all workers have taken the last step.
        let mut together = false;
        while self.worker.steps() < first + steps && !self.is_stopped() {
            let start = Instant::now();
            let missed = self.worker.catch_up()?;
            self.turnout.answered(&self.worker);
            self.loader.skip(missed)?;
            self.stop_if_known(together)?;
            if let Some(time) = times.pop() {
                // The last step took as long as the missed ones, too.
                let steps = missed as usize + 1;
                times.extend(std::iter::repeat_n(time / steps as f64, steps));
                losses.resize(times.len(), (0.0, 0));
            }
            let step = self.worker.steps() - first;
            let is_last = step + 1 == steps;
            together = self.prepare_step(is_last, is_last && ends_epoch)?;
            self.worker.slow_down(self.pace.next_step());
            let batch = self.loader.next()?;
            if self.settings.sync.drops() == 0 {
                self.images += batch.total as u64;
            }
            let rate = self.settings.schedule.at(self.settings.lr, self.worker.steps());
            let loss = self.worker.step(&batch, rate)?;
            if let Some(session) = self.worker.session() {
                session.scalar("loss", loss.mean());
            }
            self.turnout.sent(batch.labels.len());
            self.stepped(first + steps - self.worker.steps())?;
            if self.settings.verify_replicas {
                digests.push(self.worker.digest()?);
            }
            total += loss;
            losses.push((loss.sum, loss.count));
            times.push(start.elapsed().as_secs_f64());
            let spent = (self.stepping + began.elapsed()).as_secs_f64();
            let (done, all) =
                (self.worker.steps() - self.first.steps, self.steps - self.first.steps);
            self.screen.step(
                Instant::now(),
                StepProgress {
                    step_in_epoch: step + 1,
                    loss: total.mean(),
                    accuracy: total.accuracy(),
                    images_per_second: (total.count * ranks) as f64 / began.elapsed().as_secs_f64(),
                    seconds_left: spent / done as f64 * (all - done) as f64,
                },
            );
        }
        self.worker.settle()?;
        self.turnout.answered(&self.worker);
        // All workers have just taken a step together, so all of them know the same.
        if self.worker.session().is_some_and(|session| session.stop_asked().is_some()) {
            self.stop_soon();
        }
        let spent = began.elapsed();
        self.stepping += spent;
        let done = self.worker.steps() >= self.steps;
        let whole = self.worker.steps() - first == steps;
        let test = self.settings.test == Test::Epoch || (self.settings.test == Test::End && done);
        let tested = if test && whole { self.evaluate()? } else { None };
        let topic = format!("epoch {}", self.epochs.len());
        let digests = std::mem::take(&mut digests);
        let counted = self.turnout.report(&self.worker).map(|of| of.samples_counted);
        let facts = EpochFacts { losses, correct: total.correct, tested, digests, counted };
        let facts = gather(&self.worker, &topic, facts)?;
        check_replicas(first, &facts)?;
        self.note_epoch(epoch, first, &facts, &times, spent);
        times.into_iter().for_each(|time| self.step_times.push(time));
        if !done {
            let steps = self.worker.steps();
            self.leave_report(&format!("this was written after step {steps} of {}", self.steps));
        }
        Ok(())
    }

    /// This worker's part of the test: samples that were right, and samples.
    fn evaluate(&mut self) -> anyhow::Result<Option<(usize, usize)>> {
        let Some(test) = &self.test else { return Ok(None) };
        let ranks = self.worker.session().map_or(1, Session::workers);
        // With private partitions every worker tests on what it has.
        let (rank, ranks) = match self.settings.partition {
            Partition::Shared => (usize::from(self.rank), ranks),
            Partition::Private => (0, 1),
        };
        let batch = self.worker.capacity();
        let mut part = Evaluation::new(test.clone(), self.transform.clone(), rank, ranks, batch)?;
        let all = (test.len() / ranks) as u64;
        let screen = &mut self.screen;
        let loss = self.worker.evaluate(&mut part, |done| screen.evaluation(done as u64, all))?;
        Ok(Some((loss.correct, loss.count)))
    }

    /// What all workers together did in an epoch.
    fn note_epoch(
        &mut self,
        epoch: u64,
        first: u64,
        facts: &[EpochFacts],
        times: &[f64],
        spent: Duration,
    ) {
        let mut sum = 0.0;
        let mut count = 0;
        let mut at = self.began.elapsed().as_secs_f64() - times.iter().sum::<f64>();
        for (step, time) in times.iter().enumerate() {
            let parts = facts.iter().filter_map(|worker| worker.losses.get(step));
            let (loss, samples) = parts.fold((0.0, 0), |(l, n), part| (l + part.0, n + part.1));
            sum += loss;
            count += samples;
            at += time;
            let number = first + step as u64;
            self.curve.push(CurvePoint {
                step: number,
                epoch: self.epoch_of(number + 1),
                seconds: at,
                loss: loss / samples as f64,
            });
        }
        // Those that were dropped are in the loss, but not in the speed.
        let counted = facts.iter().map(|worker| worker.counted).sum::<Option<u64>>();
        let images = counted.map_or(count as u64, |all| all - self.images);
        self.images = counted.unwrap_or(self.images);
        let correct: usize = facts.iter().map(|worker| worker.correct).sum();
        let tested = facts.iter().filter_map(|worker| worker.tested);
        let (right, tested) = tested.fold((0, 0), |(r, n), part| (r + part.0, n + part.1));
        let epoch = EpochReport {
            epoch,
            seconds: spent.as_secs_f64(),
            train_loss: sum / count as f64,
            train_accuracy: correct as f64 / count as f64,
            test_accuracy: (tested > 0).then(|| right as f64 / tested as f64),
            images_per_second: images as f64 / spent.as_secs_f64(),
        };
        self.digests.extend(facts.first().into_iter().flat_map(|worker| worker.digests.clone()));
        self.screen.epoch_end(&epoch);
        self.epochs.push(epoch);
    }

    /// Tells the others what this worker did, ends the job, and on rank 0 writes the report.
    fn finish(mut self, json: bool) -> anyhow::Result<()> {
        let seconds = self.began.elapsed().as_secs_f64();
        let digest = self.worker.digest()?;
        let facts = self.facts(digest);
        let all = gather(&self.worker, "result", facts)?;
        let timeline = self.timeline();
        let report = (self.rank == 0).then(|| self.report(seconds, &all, timeline)).transpose()?;
        self.worker.finish()?;
        let Some(mut report) = report else { return Ok(()) };
        if report.steps < self.steps {
            let (step, steps) = (report.steps, self.steps);
            report.partial = Some(format!("it was asked to end after step {step} of {steps}"));
        }
        let written = report.write(&self.settings.report);
        self.screen.finish(&report, written.as_deref().ok());
        if json {
            say(&(serde_json::to_string_pretty(&report)? + "\n"))?;
        }
        written?;
        self.screen.outcome()
    }

    /// Leaves a report of what there is so far, on rank 0: if nothing comes after it, people find this
    /// one. A report that cannot be written does not stop the training.
    fn leave_report(&self, why: &str) {
        if self.rank != 0 || self.curve.is_empty() {
            return;
        }
        let seconds = self.began.elapsed().as_secs_f64();
        let own = [self.facts(String::new())];
        let left = self.report(seconds, &own, self.timeline()).and_then(|report| {
            let partial = Some(why.to_owned());
            Report { partial, ..report }.write(&self.settings.report)
        });
        if let Err(error) = left {
            tracing::warn!("no report was left: {error:#}");
        }
    }

    fn facts(&self, digest: String) -> FinalFacts {
        let now = Before::of(self.worker.session());
        let stats = self.worker.stats();
        let layers = now.layers.iter().zip(&self.before.layers).map(|(now, before)| now - before);
        FinalFacts {
            node: NodeReport {
                rank: self.rank,
                role: "worker".into(),
                bytes_sent: now.traffic.bytes_sent - self.before.traffic.bytes_sent,
                bytes_received: now.traffic.bytes_received - self.before.traffic.bytes_received,
                compute_seconds: stats.compute_seconds,
                stall_seconds: stats.stall_seconds,
                turnout: self.turnout.report(&self.worker),
            },
            layers: layers.collect(),
            digest,
            hidden: stats.hidden_fraction(),
        }
    }

    fn report(
        &self,
        seconds: f64,
        workers: &[FinalFacts],
        timeline: Timeline,
    ) -> anyhow::Result<Report> {
        for other in workers {
            let (theirs, mine) = (&other.digest, &workers[0].digest);
            let rank = other.node.rank;
            ensure!(
                theirs == mine,
                "worker {rank} ended with other parameters than worker 0: {theirs} against {mine}"
            );
        }
        let settings = self.settings;
        let (steps, taken) = (self.worker.steps(), self.worker.steps() - self.first.steps);
        let mut layers = self.plan.clone();
        for (position, layer) in layers.iter_mut().enumerate() {
            let sent: u64 = workers.iter().filter_map(|w| w.layers.get(position)).sum();
            layer.bytes_sent_per_step = sent / workers.len() as u64 / taken.max(1);
        }
        let mean =
            |of: fn(&FinalFacts) -> f64| workers.iter().map(of).sum::<f64>() / workers.len() as f64;
        Ok(Report {
            model: settings.model()?.name,
            data: settings.data.clone(),
            workers: self.settings.workers,
            servers: settings.servers.to_string(),
            threads_per_worker: settings.threads_per_worker.into(),
            batch: settings.batch as usize,
            steps,
            epochs: self.epoch_of(steps),
            seconds,
            images_per_second: self.images as f64 / self.stepping.as_secs_f64(),
            step_seconds: Quantiles::of(&self.step_times.values()),
            final_loss: self.curve.last().map_or(f64::NAN, |point| point.loss),
            test_accuracy: self.epochs.last().and_then(|epoch| epoch.test_accuracy),
            overlap_hidden_fraction: mean(|w| w.hidden),
            parameter_digest: workers[0].digest.clone(),
            digests: self.digests.clone(),
            scheme: settings.scheme.to_string(),
            overlap: settings.overlap.to_string(),
            sync: settings.sync.to_string(),
            seed: settings.seed,
            deterministic: settings.deterministic,
            version: env!("CARGO_PKG_VERSION").into(),
            command: command(),
            date: self.date.clone(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            steps_before: self.first.steps,
            partial: None,
            layers,
            nodes: self
                .turnout
                .complete(workers.iter().map(|worker| worker.node.clone()), &self.worker),
            curve: self.curve.values(),
            epochs_done: self.epochs.clone(),
            timeline,
            config: settings.to_toml()?,
        })
    }

    fn timeline(&self) -> Timeline {
        let Some(iteration) = self.worker.last_iteration() else { return Timeline::default() };
        let spans = iteration.spans.into_iter().map(|span| {
            let (track, what) = match span.what {
                train::What::Forward => (Track::Compute, What::Forward),
                train::What::Backward => (Track::Compute, What::Backward),
                train::What::Rebuild => (Track::Compute, What::Rebuild),
                train::What::RebuildBeside => (Track::Beside, What::Rebuild),
                train::What::Wait => (Track::Compute, What::Wait),
                train::What::Sync => (Track::Network, What::Sync),
            };
            Span { track, layer: span.layer, what, start: span.start, end: span.end }
        });
        let spans = spans.collect();
        let (step, seconds) = (iteration.step, iteration.seconds);
        Timeline { step, rank: self.rank, seconds, spans }
    }
}

impl Before {
    fn of(session: Option<&Session>) -> Self {
        let layers = session.map_or(0, |session| session.plan().layers());
        let sent = |layer| session.map_or(0, |session| session.sent(LayerId(layer)));
        Self {
            traffic: session.map_or_else(Traffic::default, Session::traffic),
            layers: (0..layers as u32).map(sent).collect(),
        }
    }
}

/// All replicas must be equal after every step.
fn check_replicas(first: u64, workers: &[EpochFacts]) -> anyhow::Result<()> {
    for (rank, worker) in workers.iter().enumerate() {
        for (step, (theirs, mine)) in worker.digests.iter().zip(&workers[0].digests).enumerate() {
            ensure!(
                theirs == mine,
                "worker {rank} differs from worker 0 after step {}: {theirs} against {mine}",
                first + step as u64
            );
        }
    }
    Ok(())
}
