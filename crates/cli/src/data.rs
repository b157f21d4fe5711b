//! `poseidon data`: what data sets there are, what is in them, and how to get them.

use crate::terminal::say;
use anyhow::{Context, bail};
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use poseidon_nn::data::fetch::{FetchEvent, WELL_KNOWN, WellKnown, fetch};
use poseidon_nn::data::{DataError, Samples, Source, Split, Statistics, open};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Get data sets, and look into them.
///
/// One small data set, fashion-mnist-mini, is part of this program and needs no download. Others are
/// fetched by name, or are yours: a folder in one of these formats.
///
///   cifar10:FOLDER  CIFAR-10, binary version: data_batch_1.bin ... data_batch_5.bin, test_batch.bin
///                   (?batches=1,3 takes some of the training files)
///   idx:FOLDER      MNIST's format: train-images-idx3-ubyte ... t10k-labels-idx1-ubyte, or with .gz
///                   (?classes=47 if not the largest label tells)
///   lmdb:FOLDER     as Caffe writes it: NAME_train_lmdb and NAME_test_lmdb, or train and test
///                   (?classes=1000 saves reading all labels at the start)
///   images:FOLDER   train/CLASS/FILE and test/CLASS/FILE: PNG, JPEG, BMP
///                   (?size=32x32 resizes; without it all must be of one size)
///   FOLDER          whichever of these its files say
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Download a well-known data set; goes on where an earlier download was cut.
    ///
    /// Files are checked against the checksums of what was published. What is there already is not
    /// downloaded again. Prints how the data set is named from now on.
    Fetch {
        /// mnist, fashion-mnist or cifar10.
        name: String,

        /// The folder to put it in (default: data/NAME in this user's cache folder for poseidon).
        #[arg(long, value_name = "FOLDER")]
        into: Option<PathBuf>,

        /// Where to look for the files instead of where they were published.
        #[arg(long, value_name = "URL")]
        mirror: Option<String>,
    },
    /// List the data sets that are known by name, and where they are.
    List,
    /// Show what is in a data set: samples, shape, classes, mean pixel.
    Show {
        /// A data set: a name from the list, FORMAT:FOLDER or a folder.
        source: String,
    },
}

/// Does what was asked for.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let text = match args.command {
        Command::Fetch { name, into, mirror } => {
            let set = well_known(&name)
                .with_context(|| format!("expected one of {}, got '{name}'", names()))?;
            let folder = into.map_or_else(|| fetched_folder(set), Ok)?;
            // Kept in checkpoints and passed to other programs, which may run elsewhere.
            let folder = std::path::absolute(folder)?;
            download(set, &folder, mirror.as_deref())?;
            format!("{}\n", set.source(&folder))
        }
        Command::List => list()?,
        Command::Show { source } => {
            let source = match resolve(&source)? {
                Source::Folder(folder) => Source::recognise(&folder)?,
                source => source,
            };
            let train = open(&source, Split::Train)?;
            let test = match open(&source, Split::Test) {
                Err(DataError::Missing { .. }) => None,
                test => Some(test?),
            };
            show(&source, &*train, test.as_deref())?
        }
    };
    say(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The data set that `text` names: as [`Source`] says, or one that was fetched by this name.
pub(crate) fn resolve(text: &str) -> anyhow::Result<Source> {
    match well_known(text) {
        Some(set) if !Path::new(text).exists() => {
            let folder = fetched_folder(set)?;
            if !folder.is_dir() {
                bail!(
                    "{text} is not in {}: get it by `poseidon data fetch {text}`",
                    folder.display()
                );
            }
            Ok(set.source(&folder))
        }
        _ => Ok(text.parse()?),
    }
}

fn well_known(name: &str) -> Option<&'static WellKnown<'static>> {
    WELL_KNOWN.iter().find(|set| set.name == name)
}

fn names() -> String {
    WELL_KNOWN.iter().map(|set| set.name).collect::<Vec<_>>().join(", ")
}

fn fetched_folder(set: &WellKnown<'_>) -> anyhow::Result<PathBuf> {
    let cache = cache_folder(|name| std::env::var_os(name))
        .context("no cache folder: set HOME or XDG_CACHE_HOME, or say --into FOLDER")?;
    Ok(cache.join("poseidon").join("data").join(set.name))
}

/// Where this user's programs keep what they can get again.
fn cache_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    // As its specification says, a relative path is to be ignored.
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME").or_else(|| {
        let home = absolute("HOME")?;
        Some(home.join(if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" }))
    })
}

fn download(set: &WellKnown<'_>, folder: &Path, mirror: Option<&str>) -> anyhow::Result<()> {
    let mut display = Display::new(io::stderr().is_terminal());
    fetch(set, folder, mirror, &mut |progress| display.show(progress))?;
    Ok(())
}

/// A bar per file for people, a line now and then for logs.
struct Display {
    /// `None`: stderr is not a terminal.
    bar: Option<ProgressBar>,
    /// Tenths of the file that have been told to a log.
    told: u64,
}

impl Display {
    fn new(terminal: bool) -> Self {
        let style = "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let bar = terminal.then(|| {
            let style = ProgressStyle::with_template(style).expect("a template that was tried");
            ProgressBar::new(0).with_style(style)
        });
        Self { bar, told: 0 }
    }

    fn show(&mut self, progress: FetchEvent<'_>) {
        let line = match progress {
            FetchEvent::Downloading { file, done, total } => {
                if let Some(bar) = &self.bar {
                    if bar.message() != file {
                        bar.reset();
                        bar.set_message(file.to_owned());
                        // What an earlier run has got says nothing about the rate of this one.
                        bar.set_position(done);
                        bar.reset_eta();
                    }
                    bar.set_length(total.unwrap_or(done));
                    bar.set_position(done);
                    return;
                }
                let tenths = total.map_or(0, |total| done * 10 / total.max(1));
                if done > 0 && tenths <= self.told {
                    return;
                }
                self.told = tenths;
                match total {
                    Some(total) => format!("{file}: {done} of {total} bytes"),
                    None => format!("{file}: {done} bytes"),
                }
            }
            FetchEvent::Downloaded { file } => {
                self.told = 0;
                format!("{file}: downloaded, and its checksum is right")
            }
            FetchEvent::Present { file } => format!("{file}: is there already"),
            FetchEvent::Unpacking { file } => format!("{file}: unpacking"),
            _ => return,
        };
        match &self.bar {
            Some(bar) => bar.println(line),
            // Nobody is left to tell if stderr is closed.
            None => drop(writeln!(io::stderr(), "{line}")),
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn list() -> anyhow::Result<String> {
    let mut text = String::new();
    writeln!(
        text,
        "{:<20}clothes: 4,600 + 1,000 grey images of 28x28 pixels, part of this program",
        Source::FashionMnistMini.to_string()
    )?;
    for set in WELL_KNOWN {
        writeln!(text, "{:<20}{}", set.name, set.about)?;
        match fetched_folder(set) {
            Ok(folder) if folder.is_dir() => writeln!(text, "{:<20}{}", "", set.source(&folder))?,
            _ => writeln!(text, "{:<20}not here: poseidon data fetch {}", "", set.name)?,
        }
    }
    Ok(text)
}

/// More samples than this are not all looked at.
const LOOK_AT: usize = 100_000;
/// More classes than this are not all shown.
const CLASSES_SHOWN: usize = 20;
const BAR: usize = 20;

fn show(
    source: &Source,
    train: &dyn Samples,
    test: Option<&dyn Samples>,
) -> anyhow::Result<String> {
    let mut text = String::new();
    let [channels, height, width] = train.shape();
    let classes = train.classes();
    writeln!(text, "{source}")?;
    writeln!(text, "images   {channels} x {height} x {width} (channels, height, width)")?;
    writeln!(text, "classes  {classes}")?;
    let splits = [("train", Some(train)), ("test", test)];
    for (name, samples) in splits {
        let Some(samples) = samples else {
            writeln!(text, "\n{name:<8} none")?;
            continue;
        };
        let statistics = Statistics::of(samples, LOOK_AT)?;
        write!(text, "\n{name:<8} {} samples", samples.len())?;
        if statistics.samples < samples.len() {
            write!(text, "; these figures are of {} of them", statistics.samples)?;
        }
        let numbers = |numbers: &[f64]| {
            numbers.iter().map(|number| format!("{number:.1}")).collect::<Vec<_>>().join(", ")
        };
        writeln!(text, "\n  mean       {}", numbers(&statistics.mean))?;
        writeln!(text, "  deviation  {}", numbers(&statistics.deviation))?;
        let most = statistics.histogram.iter().copied().max().unwrap_or(0).max(1);
        for (label, &count) in statistics.histogram.iter().enumerate().take(CLASSES_SHOWN) {
            let name = samples.class_names().get(label).map_or("", String::as_str);
            // A class that has any samples gets some bar.
            let bar = "#".repeat((count * BAR).div_ceil(most));
            writeln!(text, "  {label:>5} {name:<16} {count:>8} {bar}")?;
        }
        if classes > CLASSES_SHOWN {
            writeln!(text, "  and {} classes more", classes - CLASSES_SHOWN)?;
        }
    }
    Ok(text)
}

const EXAMPLES: &str = "\
Examples:
  What is in the data set that comes with this program?
    poseidon data show fashion-mnist-mini

  Get CIFAR-10, and look at it:
    poseidon data fetch cifar10
    poseidon data show cifar10

  Get MNIST from a server of your own:
    poseidon data fetch mnist --into mnist --mirror http://files.example/mnist

  Is this folder of pictures what I think it is?
    poseidon data show 'images:pictures?size=64x64'

Environment:
  XDG_CACHE_HOME  fetched data sets are in poseidon/data below it (default: the cache folder in HOME)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_is_the_users() {
        let folder = |variables: &'static [(&str, &str)]| {
            let value = |name: &str| {
                let found = variables.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| OsString::from(value))
            };
            cache_folder(value)
        };
        assert_eq!(folder(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]), Some("/c".into()));
        let of_home = folder(&[("HOME", "/h"), ("XDG_CACHE_HOME", "relative")]).unwrap();
        assert!(of_home.starts_with("/h"), "{of_home:?}");
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn the_bundled_set_is_shown_with_its_classes() {
        let source = resolve("fashion-mnist-mini").unwrap();
        let train = open(&source, Split::Train).unwrap();
        let text = show(&source, &*train, None).unwrap();
        assert!(text.starts_with("fashion-mnist-mini\nimages   1 x 28 x 28 "), "{text}");
        assert!(text.contains("train    4600 samples\n  mean       7"), "{text}");
        let boots = "      9 Ankle boot            460 ####################\n";
        assert!(text.contains(boots.trim_start_matches("  ")), "{text}");
        assert!(text.ends_with("test     none\n"), "{text}");
    }

    #[test]
    fn every_set_on_the_list_can_be_fetched_by_name() {
        let text = list().unwrap();
        for set in WELL_KNOWN {
            assert!(well_known(set.name).is_some());
            assert!(text.contains(set.name), "{text}");
        }
        assert!(well_known("imagenet").is_none());
    }
}
