//! What one machine says of itself.

use poseidon::Secret;
use poseidon::config::{SecretPlace, secret_place};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Facts of one machine, read and not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts {
    /// The machine's own name.
    pub(super) hostname: String,
    /// The Poseidon that runs.
    pub(super) version: String,
    pub(super) kernel: String,
    /// The processor's model, if the system says.
    pub(super) processor: Option<String>,
    /// Cores that this process may use.
    pub(super) cores: usize,
    /// Of the vector and matrix instructions that matter here, those the processor has.
    pub(super) vectors: Vec<String>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) memory_free_bytes: Option<u64>,
    /// Files that this process may open now, and as many as it may ask for. `None` is no limit.
    pub(super) open_files: [Option<u64>; 2],
    /// The largest buffer that a program may ask for to receive in (`net.core.rmem_max`).
    #[serde(default)]
    pub(super) receive_buffer: Option<u64>,
    /// The first and the last port that the system hands out to who listens on any.
    pub(super) ports: Option<[u16; 2]>,
    /// Where the secret is, and who may read it.
    pub(super) secret: String,
    /// What is wrong with the secret, if anything is.
    pub(super) secret_fault: Option<String>,
}

impl Facts {
    pub(super) fn here() -> Self {
        let names = rustix::system::uname();
        let text = |name: &std::ffi::CStr| name.to_string_lossy().into_owned();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let ports = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok();
        let buffer = fs::read_to_string("/proc/sys/net/core/rmem_max").ok();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let (secret, secret_fault) = secret();
        Self {
            hostname: text(names.nodename()),
            version: env!("CARGO_PKG_VERSION").into(),
            kernel: text(names.release()),
            processor: field(&cpuinfo, "model name").map(String::from),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            vectors: vectors(&cpuinfo),
            memory_bytes: kilobytes(&meminfo, "MemTotal"),
            memory_free_bytes: kilobytes(&meminfo, "MemAvailable"),
            open_files: [limit.current, limit.maximum],
            receive_buffer: buffer.and_then(|bytes| bytes.trim().parse().ok()),
            ports: ports.as_deref().and_then(range),
            secret,
            secret_fault,
        }
    }
}

/// Where the secret is, in words, and what is wrong with it.
fn secret() -> (String, Option<String>) {
    let in_file = |path: &Path, what: &str| {
        let mode = fs::metadata(path).map(|file| file.permissions().mode() & 0o777);
        let mode = mode.map_or("not there".into(), |mode| format!("mode {mode:03o}"));
        let fault = match Secret::read(path) {
            Err(error) if path.exists() => Some(error.to_string()),
            _ => None,
        };
        (format!("{what} {}, {mode}", path.display()), fault)
    };
    match secret_place() {
        SecretPlace::Variable => ("the variable POSEIDON_SECRET".into(), None),
        SecretPlace::NamedFile(path) => in_file(&path, "POSEIDON_SECRET_FILE"),
        SecretPlace::UsersFile(path) => in_file(&path, "the file"),
        SecretPlace::Nowhere => ("none".into(), None),
    }
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let mut values = lines.filter(|(key, _)| key.trim() == name);
    values.next().map(|(_, value)| value.trim())
}

fn vectors(cpuinfo: &str) -> Vec<String> {
    let flags = field(cpuinfo, "flags").or_else(|| field(cpuinfo, "Features")).unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|one| one == flag);
    let known = VECTORS.iter().filter(|(flag, _)| has(flag));
    known.map(|(_, name)| String::from(*name)).collect()
}

fn kilobytes(meminfo: &str, name: &str) -> Option<u64> {
    let number = field(meminfo, name)?.split_whitespace().next()?.parse::<u64>().ok()?;
    number.checked_mul(1024)
}

fn range(text: &str) -> Option<[u16; 2]> {
    let mut numbers = text.split_whitespace().map(|number| number.parse().ok());
    Some([numbers.next()??, numbers.next()??])
}

/// Flags of `/proc/cpuinfo`, and what people call them.
const VECTORS: [(&str, &str); 5] = [
    ("avx2", "AVX2"),
    ("avx512f", "AVX-512"),
    ("amx_tile", "AMX"),
    ("asimd", "NEON"),
    ("sve", "SVE"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_read_as_linux_writes_them() {
        let cpuinfo = "processor\t: 0\nmodel name\t: A chip: fast\nflags\t\t: fpu avx2 avx512f\n";
        assert_eq!(field(cpuinfo, "model name"), Some("A chip: fast"));
        assert_eq!(vectors(cpuinfo), ["AVX2", "AVX-512"]);
        assert_eq!(vectors("Features : fp asimd sve\n"), ["NEON", "SVE"]);
        assert_eq!(kilobytes("MemTotal:   20 kB\n", "MemTotal"), Some(20 << 10));
        assert_eq!(range("32768\t60999\n"), Some([32_768, 60_999]));
        assert_eq!(range("32768"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_says_something() {
        let facts = Facts::here();
        assert!(facts.cores > 0 && facts.memory_bytes.is_some() && facts.ports.is_some());
    }
}
