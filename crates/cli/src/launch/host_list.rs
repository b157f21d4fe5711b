//! Which hosts a job runs on, and how many workers each of them has.

use anyhow::{Context, bail, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A host of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    /// As ssh is given it: `gpu1`, `me@gpu1`, `10.0.0.5`.
    pub(super) name: String,
    /// Its workers.
    pub(super) ranks: u16,
}

/// A host as it was written: with its number of workers, or without.
type Entry = (String, Option<u16>);

impl Host {
    /// The name without the user: what resolvers know.
    pub(super) fn machine(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, machine)| machine)
    }
}

/// The hosts of `--hosts` or of `--hostfile`, with `workers` workers if the user said how many.
pub(super) fn hosts(
    list: &[String],
    file: Option<&Path>,
    workers: Option<u16>,
) -> anyhow::Result<Vec<Host>> {
    let entries = match file {
        None => list.iter().map(|word| entry(word)).collect::<anyhow::Result<_>>()?,
        Some(path) => {
            let shown = path.display();
            let text = fs::read_to_string(path).with_context(|| format!("--hostfile {shown}"))?;
            parse_file(&text).with_context(|| format!("--hostfile {shown}"))?
        }
    };
    share(entries, workers)
}

/// Of every line: a host, `host:4`, or Open MPI's `host slots=4`. A `#` begins a comment.
fn parse_file(text: &str) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        let place = || format!("line {number}");
        let (name, mut ranks) = entry(first).with_context(place)?;
        for word in words {
            let Some(slots) = word.strip_prefix("slots=") else {
                bail!("line {number}: expected 'slots=N' after the host, got '{word}'");
            };
            ensure!(ranks.is_none(), "line {number}: the number of workers is given twice");
            ranks = Some(count(slots).with_context(place)?);
        }
        entries.push((name, ranks));
    }
    ensure!(!entries.is_empty(), "there is no host in it: expected one on each line");
    Ok(entries)
}

/// `host`, `host:4`, `[fe80::1]:4`.
fn entry(word: &str) -> anyhow::Result<Entry> {
    let word = word.trim();
    let (name, ranks) = match word.rsplit_once(':') {
        // An IPv6 address has colons of its own.
        Some((name, _)) if name.contains(':') && !name.ends_with(']') => (word, None),
        Some((name, ranks)) if !word.ends_with(']') => {
            let ranks = count(ranks).with_context(|| format!("'{word}'"))?;
            (name, Some(ranks))
        }
        _ => (word, None),
    };
    let name = name.replace(['[', ']'], "");
    ensure!(!name.is_empty(), "'{word}' has no host's name");
    // ssh would take it for an option.
    ensure!(!name.starts_with('-'), "'{name}' is no host's name: it begins with '-'");
    let odd = name.chars().find(|c| c.is_whitespace() || c.is_control());
    ensure!(odd.is_none(), "'{}' is no host's name", crate::terminal::printable(&name));
    Ok((name, ranks))
}

fn count(text: &str) -> anyhow::Result<u16> {
    match text.parse() {
        Ok(0) | Err(_) => bail!("expected a number of workers, at least 1, got '{text}'"),
        Ok(count) => Ok(count),
    }
}

/// Gives hosts without a number their part of `workers`: equal parts, and the first hosts one more
/// if that leaves a rest. Without `workers` it is one each.
fn share(entries: Vec<Entry>, workers: Option<u16>) -> anyhow::Result<Vec<Host>> {
    let mut seen = BTreeSet::new();
    for (name, _) in &entries {
        ensure!(seen.insert(name), "host {name} is named twice: '{name}:2' gives it two workers");
    }
    let given: u32 = entries.iter().filter_map(|(_, ranks)| *ranks).map(u32::from).sum();
    let open = entries.iter().filter(|(_, ranks)| ranks.is_none()).count() as u32;
    let rest = match workers.map(u32::from) {
        None => open,
        Some(workers) if open == 0 && workers != given => {
            bail!("-n {workers}, but the hosts have {given} workers together: leave -n out")
        }
        Some(workers) if workers < given + open => bail!(
            "-n {workers} is too few: the hosts have at least {} workers together, one each where \
             no number is given",
            given + open
        ),
        Some(workers) => workers - given,
    };
    ensure!(
        given + rest <= u32::from(u16::MAX),
        "{} workers are more than a job can have",
        given + rest
    );
    let mut turn = 0;
    let host = |(name, ranks): Entry| {
        let ranks = ranks.unwrap_or_else(|| {
            let more = u32::from(turn < rest % open);
            turn += 1;
            // The sum fits, so the parts do.
            (rest / open + more) as u16
        });
        Host { name, ranks }
    };
    Ok(entries.into_iter().map(host).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(list: &str, workers: Option<u16>) -> Result<Vec<(String, u16)>, String> {
        let words: Vec<_> = list.split(',').map(str::to_owned).collect();
        let hosts = hosts(&words, None, workers).map_err(|e| format!("{e:#}"))?;
        Ok(hosts.into_iter().map(|host| (host.name, host.ranks)).collect())
    }

    fn pairs(expected: &[(&str, u16)]) -> Result<Vec<(String, u16)>, String> {
        Ok(expected.iter().map(|(name, ranks)| ((*name).to_owned(), *ranks)).collect())
    }

    #[test]
    fn hosts_have_the_workers_that_are_asked_for() {
        assert_eq!(told("a,b,c", None), pairs(&[("a", 1), ("b", 1), ("c", 1)]));
        assert_eq!(told("a:4,me@b:2", None), pairs(&[("a", 4), ("me@b", 2)]));
        assert_eq!(told("a,b,c", Some(8)), pairs(&[("a", 3), ("b", 3), ("c", 2)]));
        assert_eq!(told("a:4,b", Some(6)), pairs(&[("a", 4), ("b", 2)]));
        assert_eq!(told("a:4,b:4", Some(8)), pairs(&[("a", 4), ("b", 4)]));
        assert_eq!(
            told("::1,[fe80::2]:3,[::5]", None),
            pairs(&[("::1", 1), ("fe80::2", 3), ("::5", 1)])
        );
    }

    #[test]
    fn nonsense_is_refused_in_words() {
        for (list, workers, words) in [
            ("a:4,b:4", Some(6), "leave -n out"),
            ("a:4,b", Some(4), "too few"),
            ("a,b", Some(1), "too few"),
            ("a,b,a", None, "'a:2' gives it two workers"),
            ("a:x", None, "expected a number of workers"),
            ("a:0", None, "at least 1"),
            ("a,,b", None, "has no host's name"),
            ("-oProxyCommand=x", None, "begins with '-'"),
            ("a b", None, "is no host's name"),
            ("a:60000,b:60000", None, "more than a job can have"),
        ] {
            let refusal = told(list, workers).unwrap_err();
            assert!(refusal.contains(words), "{list}: {refusal}");
        }
    }

    #[test]
    fn a_hostfile_has_a_host_on_each_line() {
        let text = "# the rack\n\nnode1 slots=4\nnode2:2  # slow\n  node3\n";
        let entries = parse_file(text).unwrap();
        let expected = [("node1", Some(4)), ("node2", Some(2)), ("node3", None)];
        assert_eq!(entries, expected.map(|(name, ranks)| (name.to_owned(), ranks)));
        for (text, words) in [
            ("a\nb slots", "line 2: expected 'slots=N'"),
            ("a:2 slots=2", "given twice"),
            ("a slots=none", "line 1: expected a number"),
            ("# nobody\n", "there is no host in it"),
        ] {
            let refusal = format!("{:#}", parse_file(text).unwrap_err());
            assert!(refusal.contains(words), "{refusal}");
        }
    }

    #[test]
    fn the_user_is_not_part_of_the_machine() {
        let host = Host { name: "me@gpu1".into(), ranks: 1 };
        assert_eq!(host.machine(), "gpu1");
    }
}
