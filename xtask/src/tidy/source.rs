//! File length, machine paths, figures from records, and environment variables that exist.

/// Longest `.rs` file.
const MAX_LINES: usize = 600;

/// Files that may be longer, each with its reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// Folders that exist on one machine only.
const MACHINE_FOLDERS: &[&str] = &["/work/", "/tmp/", "/root/"];

/// This file has to spell the folders out.
const OWN_PATH: &str = "xtask/src/tidy/source.rs";

/// A Rust file over the limit.
pub(crate) fn too_long(path: &str, text: &str) -> Option<String> {
    let lines = text.lines().count();
    let excused = LONG_FILES.iter().any(|(long, _)| *long == path);
    (lines > MAX_LINES && !excused)
        .then(|| format!("{path} has {lines} lines; the limit is {MAX_LINES}"))
}

/// Lines that name a folder of somebody's machine.
pub(crate) fn machine_paths(path: &str, text: &str) -> Vec<String> {
    if path == OWN_PATH {
        return Vec::new();
    }
    let mut violations = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        for folder in MACHINE_FOLDERS.iter().filter(|folder| line.contains(**folder)) {
            violations.push(format!("{path}:{number} names a folder of one machine: {folder}"));
        }
    }
    violations
}

/// Result folders that a document shows figures from and that do not exist.
pub(crate) fn missing_runs(path: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let mut missing = Vec::new();
    for (start, _) in text.match_indices("bench/runs/") {
        let rest = &text[start..];
        let end = rest.find(|c| !is_path(c)).unwrap_or(rest.len());
        let run = rest[..end].trim_end_matches(['.', '/']);
        if !exists(run) {
            missing.push(format!("{path} shows {run}, which does not exist"));
        }
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_over_the_limit_is_too_long() {
        assert_eq!(too_long("a.rs", &"x\n".repeat(600)), None);
        let found = too_long("a.rs", &"x\n".repeat(601));
        assert_eq!(found.unwrap(), "a.rs has 601 lines; the limit is 600");
    }

    #[test]
    fn machine_folders_are_found_with_their_line() {
        let found = machine_paths("docs/a.md", "fine\nsee /tmp/x\n");
        assert_eq!(found, ["docs/a.md:2 names a folder of one machine: /tmp/"]);
        assert_eq!(machine_paths("a.rs", "\"/work/a\" \"/root/b\"").len(), 2);
        assert!(machine_paths("a.rs", "the network/tmpfs").is_empty());
    }

    #[test]
    fn a_figure_from_nowhere_is_found() {
        let text = "![plot](bench/runs/2026-01-02-exchange/plot.svg) from `bench/runs/lost/`.";
        let found = missing_runs("docs/a.md", text, |run| run.contains("exchange"));
        assert_eq!(found, ["docs/a.md shows bench/runs/lost, which does not exist"]);
        assert!(missing_runs("docs/a.md", text, |_| true).is_empty());
    }
}
