//! Scalars of a worker as TensorBoard reads them: a file of events (ADR 0028).
//!
//! A file is a sequence of records. A record is a length, its checksum, so many bytes and their
//! checksum. The bytes are a message `Event` in the encoding of Protocol Buffers. Six fields of two
//! messages are needed, so they are written here: a library would bring a compiler of its own.

use crate::job::live::NodeSummary;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A worker's file of events.
pub(super) struct ScalarFile {
    out: File,
    /// What was counted when something was written last.
    before: Option<NodeSummary>,
}

impl ScalarFile {
    /// Makes the file of the node that is called `label` in names of files, in a folder of its own: for
    /// TensorBoard each folder is a run.
    pub(super) fn create(folder: &Path, label: &str) -> io::Result<Self> {
        let folder = folder.join(label);
        fs::create_dir_all(&folder)?;
        let (now, id) = (since_1970(), std::process::id());
        let name = format!("events.out.tfevents.{:010}.{label}.{id}", now.as_secs());
        let mut out = File::create(folder.join(name))?;
        out.write_all(&record(&version(now)))?;
        Ok(Self { out, before: None })
    }

    /// Writes what `summary` says of the time since the last one, and what the program has told. Writes
    /// nothing if no step and no operation has been done since, and the program is silent.
    pub(super) fn add(
        &mut self,
        summary: &NodeSummary,
        told: &BTreeMap<String, f64>,
    ) -> io::Result<()> {
        let before = self.before.get_or_insert_with(|| summary.clone());
        let mut values = Vec::new();
        let seconds = summary.at_ms.saturating_sub(before.at_ms) as f64 / 1e3;
        let steps = summary.steps.saturating_sub(before.steps);
        let operations = summary.operations.saturating_sub(before.operations);
        if steps + operations > 0 && seconds > 0.0 {
            let waited = summary.waited_us.saturating_sub(before.waited_us) as f64 / 1e6;
            let bytes = |of: &NodeSummary, way: usize| of.outside[way] + of.inside[way];
            let per_second =
                |way| bytes(summary, way).saturating_sub(bytes(before, way)) as f64 / seconds;
            if steps > 0 {
                values.push(("poseidon/seconds_per_step", seconds / steps as f64));
                values.push(("poseidon/waiting_share", (waited / seconds).min(1.0)));
            }
            if operations > 0 {
                values.push(("poseidon/operations_per_second", operations as f64 / seconds));
            }
            values.push(("poseidon/sent_bytes_per_second", per_second(0)));
            values.push(("poseidon/received_bytes_per_second", per_second(1)));
            *before = summary.clone();
        }
        values.extend(told.iter().map(|(name, value)| (name.as_str(), *value)));
        if values.is_empty() {
            return Ok(());
        }
        // Programs that use only collectives take no steps that are known here.
        let step = if summary.steps > 0 { summary.steps } else { summary.operations };
        self.out.write_all(&record(&scalars(since_1970(), step, &values)))
    }
}

/// The first event of a file.
fn version(now: Duration) -> Vec<u8> {
    let mut event = time_and_step(now, 0);
    text(&mut event, 3, b"brain.Event:2");
    event
}

/// An event with these values.
fn scalars(now: Duration, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, number) in values {
        let mut value = Vec::new();
        text(&mut value, 1, tag.as_bytes());
        value.push(2 << 3 | FOUR_BYTES);
        value.extend((*number as f32).to_le_bytes());
        text(&mut summary, 1, &value);
    }
    let mut event = time_and_step(now, step);
    text(&mut event, 5, &summary);
    event
}

fn time_and_step(now: Duration, step: u64) -> Vec<u8> {
    let mut event = vec![1 << 3 | EIGHT_BYTES];
    event.extend(now.as_secs_f64().to_le_bytes());
    if step > 0 {
        event.push(2 << 3 | NUMBER);
        number(&mut event, step);
    }
    event
}

/// How the value of a field is written, as its first byte says.
const NUMBER: u8 = 0;
const EIGHT_BYTES: u8 = 1;
const BYTES: u8 = 2;
const FOUR_BYTES: u8 = 5;

/// A field of text, or of another message.
fn text(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | BYTES);
    number(out, bytes.len() as u64);
    out.extend(bytes);
}

/// Seven bits in each byte, the lowest first; all but the last byte have the highest bit set.
fn number(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// An event as it is in the file.
fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    let sum = |bytes: &[u8]| masked(crc32c::crc32c(bytes)).to_le_bytes();
    [&length[..], &sum(&length), event, &sum(event)].concat()
}

/// Checksums are turned and moved, so that one of bytes that have checksums in them is not trivial.
fn masked(sum: u32) -> u32 {
    sum.rotate_right(15).wrapping_add(0xa282_ead8)
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_core::NodeId;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The same bytes as TensorBoard 2.21's own `RecordWriter` makes of the same values.
    #[test]
    fn events_are_those_of_tensorboard() {
        let time = Duration::from_millis(1500);
        let event = scalars(time, 300, &[("loss", 0.25), ("a/b", -3.0)]);
        let expected = "2700000000000000bbe1b14609000000000000f83f10ac022a190a0b0a046c6f7373150000803e\
                        0a0a0a03612f6215000040c08afbe51a";
        assert_eq!(hex(&record(&event)), expected);
        let expected =
            "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c";
        assert_eq!(hex(&record(&version(time))), expected);
    }

    fn summary(at_ms: u64, steps: u64) -> NodeSummary {
        NodeSummary {
            node: NodeId(0),
            at_ms,
            steps,
            operations: 0,
            waited_us: at_ms * 250,
            layers: Vec::new(),
            outside: [at_ms * 10, 0],
            inside: [at_ms * 5, at_ms],
            queued: 0,
            resent: 0,
            failure: None,
        }
    }

    /// The tags in a file, as they stand between its other bytes.
    fn tags(folder: &Path) -> (usize, String) {
        let file = fs::read_dir(folder.join("rank3")).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(file).unwrap();
        (bytes.len(), String::from_utf8_lossy(&bytes).into_owned())
    }

    #[test]
    fn rates_are_of_the_time_since_the_last_event() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = ScalarFile::create(folder.path(), "rank3").unwrap();
        let silent = BTreeMap::new();
        file.add(&summary(1000, 0), &silent).unwrap();
        let (empty, _) = tags(folder.path());
        // Nothing happens.
        file.add(&summary(2000, 0), &silent).unwrap();
        assert_eq!(tags(folder.path()).0, empty);
        file.add(&summary(5000, 8), &silent).unwrap();
        let (_, text) = tags(folder.path());
        let names = ["seconds_per_step", "waiting_share", "sent_bytes_per", "received_bytes_per"];
        names.iter().for_each(|name| assert!(text.contains(name), "{name} in {text}"));
        assert!(!text.contains("operations"), "{text}");
        assert_eq!(file.before.as_ref().unwrap().steps, 8);
        file.add(&summary(5000, 8), &BTreeMap::from([("loss".to_owned(), 2.0)])).unwrap();
        assert!(tags(folder.path()).1.contains("loss"));
    }
}
