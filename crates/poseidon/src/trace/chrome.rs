//! Records as a file in the trace event format of Chrome, which Perfetto and `chrome://tracing` open.
//!
//! A node is a process, with its number as the process id. Threads of the program, lanes and the
//! threads beside the program are threads. A layer in flight is an asynchronous event, because layers
//! overlap. Times are microseconds since 1970 by the machine's clock, so files of several nodes have
//! one axis.

use super::{NO_LAYER, Record, Recorder, What};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// What a file says besides its events.
pub(crate) struct Facts {
    /// The node.
    pub(crate) process: u16,
    /// What the node is called.
    pub(crate) name: String,
    /// For programs that read the file: the key `poseidon` of `otherData`.
    pub(crate) summary: Value,
}

/// What channels and what is in them are called.
pub(crate) struct Names {
    /// By channel: the names of the session's layers.
    pub(crate) layers: BTreeMap<u32, Vec<String>>,
    /// What a kind of operations is called, by its number.
    pub(crate) operation: fn(u32) -> &'static str,
}

/// Writes `records` of `recorder` to `out`.
pub(crate) fn write(
    mut out: impl Write,
    recorder: &Recorder,
    records: &[Record],
    names: &Names,
    facts: &Facts,
) -> io::Result<()> {
    let summary = json!({ "poseidon": facts.summary });
    writeln!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{summary},\"traceEvents\":[")?;
    let threads = Threads::of(records);
    let pid = facts.process;
    let about = |what: &str, tid: u32, args: Value| json!({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args});
    let named = |what: &str, tid: u32, name: &str| about(what, tid, json!({"name": name}));
    let sorted = |what: &str, tid: u32, index: u32| about(what, tid, json!({"sort_index": index}));
    write!(out, "{}", named("process_name", 0, &facts.name))?;
    write!(out, ",\n{}", sorted("process_sort_index", 0, pid.into()))?;
    for (tid, name) in &threads.names {
        write!(out, ",\n{}", named("thread_name", *tid, name))?;
        write!(out, ",\n{}", sorted("thread_sort_index", *tid, *tid))?;
    }
    for record in records {
        for event in events(record, recorder, names, (pid, threads.tid(record))) {
            write!(out, ",\n{event}")?;
        }
    }
    out.write_all(b"\n]}\n")?;
    out.flush()
}

/// The events that a record becomes, of process `pid` and thread `tid`.
fn events(
    record: &Record,
    recorder: &Recorder,
    names: &Names,
    (pid, tid): (u16, u32),
) -> Vec<Value> {
    let Record { what, channel, layer, clock, more, .. } = *record;
    let (begin, end) = (recorder.wall_micros(record.begin), recorder.wall_micros(record.end));
    let name = names.of(record);
    let args = json!({"layer": name, "step": clock, "session": channel});
    let step = if name.is_empty() { format!("#{clock}") } else { format!("{name} #{clock}") };
    let slice = |cat: &str, name: String, args: Value| {
        json!({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": begin,
               "dur": end - begin, "args": args})
    };
    let instant = |name: String, ts: u64| {
        json!({"ph": "i", "s": "t", "cat": "chunks", "name": name, "pid": pid, "tid": tid, "ts": ts,
               "args": args})
    };
    let id = |of: u32| u64::from(channel as u16) << 32 | u64::from(of);
    // Viewers give each name a row, so the step is not in it. A local id belongs to the process: Perfetto
    // puts the rows of other ids beside all processes, and not below theirs.
    let span = |cat: &str, id: u64, args: Value| {
        let event = |ph: &str, ts: u64| {
            json!({"ph": ph, "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts,
                   "id2": {"local": format!("{id:#x}")}, "args": args})
        };
        vec![event("b", begin), event("e", end)]
    };
    match what {
        What::Send => vec![slice("send", format!("send {step}"), args.clone())],
        What::Wait => vec![slice("wait", format!("wait for {step}"), args.clone())],
        What::Rebuild => vec![slice("rebuild", format!("rebuild {step}"), args.clone())],
        What::Forward => vec![slice("forward", format!("forward {step}"), args.clone())],
        What::Backward => vec![slice("backward", format!("backward {step}"), args.clone())],
        What::Busy => vec![slice("lane", "busy".into(), json!({"bytes": more}))],
        What::Flight if more > 0 => {
            span("layer", id(layer), json!({"layer": name, "step": clock, "unfinished": true}))
        }
        What::Flight => span("layer", id(layer), args),
        // Operations of a group overlap each other.
        What::Operation => span("collective", id(clock as u32), args),
        // Copies of several layers overlap.
        What::LeftDevice => span("copy out", id(layer), args),
        What::OnDevice => span("copy in", id(layer), args),
        What::Part => {
            let out = (more > 0)
                .then(|| instant(format!("{step}: last chunk out"), recorder.wall_micros(more)));
            out.into_iter().chain([instant(format!("{step}: done on this lane"), end)]).collect()
        }
    }
}

impl Names {
    /// What the record's layer or operation is called. Empty if it is about no single layer.
    fn of(&self, record: &Record) -> String {
        let Record { channel, layer, .. } = *record;
        if record.what == What::Operation {
            return (self.operation)(layer).into();
        }
        if layer == NO_LAYER {
            return String::new();
        }
        let known = self.layers.get(&channel).and_then(|layers| layers.get(layer as usize));
        known.cloned().unwrap_or_else(|| format!("layer {layer} of session {channel}"))
    }
}

/// The threads of a file, by small numbers: first the program's, then the lanes, then the rest.
struct Threads {
    names: BTreeMap<u32, String>,
    /// By the system's number.
    tids: BTreeMap<u32, u32>,
}

/// Where asynchronous events are: viewers show them apart from threads.
const NO_THREAD: u32 = 0;
const FIRST_LANE: u32 = 1_000;
const FIRST_BESIDE: u32 = 10_000;

impl Threads {
    fn of(records: &[Record]) -> Self {
        let (mut names, mut tids) = (BTreeMap::new(), BTreeMap::new());
        let (mut programs, mut besides) = (0, 0);
        let mut add = |thread: u32, is_program: bool, name: &str| {
            if tids.contains_key(&thread) {
                return;
            }
            let (first, count) = match is_program {
                true => (NO_THREAD, &mut programs),
                false => (FIRST_BESIDE, &mut besides),
            };
            *count += 1;
            tids.insert(thread, first + *count);
            let name = if *count == 1 { name.into() } else { format!("{name} {count}") };
            names.insert(first + *count, name);
        };
        // A thread that sends, waits or computes is the program's, whatever else it does.
        let is_program = |record: &&Record| {
            matches!(record.what, What::Send | What::Wait | What::Forward | What::Backward)
        };
        for record in records.iter().filter(is_program) {
            add(record.thread, true, "program");
        }
        for record in records {
            if record.what == What::Rebuild {
                add(record.thread, false, "rebuild");
            }
        }
        for record in records.iter().filter(|r| matches!(r.what, What::Part | What::Busy)) {
            let lane = record.thread;
            names.entry(FIRST_LANE + lane).or_insert_with(|| format!("lane {lane}"));
        }
        Self { names, tids }
    }

    fn tid(&self, record: &Record) -> u32 {
        match record.what {
            What::Part | What::Busy => FIRST_LANE + record.thread,
            What::Flight | What::Operation | What::LeftDevice | What::OnDevice => NO_THREAD,
            _ => self.tids.get(&record.thread).copied().unwrap_or(NO_THREAD),
        }
    }
}
