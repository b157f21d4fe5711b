//! Which module of a crate may import which: no circles in any crate, and a table for some.
//!
//! A module is a file or a folder directly in a crate's `src/`. The crate's root is free: it
//! declares all modules and gives their parts other names.

use super::imports::{self, FileImports};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A module, and the modules it may import.
type Table = [(&'static str, &'static [&'static str])];

/// The allowed arrows inside a crate: its folder, and which module may import which.
const TABLES: &[(&str, &Table)] = &[("crates/poseidon", POSEIDON)];

/// From the top down. Everything may report an error.
const POSEIDON: &Table = &[
    ("session", &["node", "lane", "collectives", "engine", "job", "memory", "trace", "error"]),
    ("server", &["node", "engine", "job", "error"]),
    ("check", &["job", "error"]),
    ("node", &["lane", "collectives", "engine", "job", "memory", "trace", "error"]),
    ("lane", &["engine", "memory", "trace", "error"]),
    ("collectives", &["engine", "memory", "trace", "error"]),
    ("engine", &["memory", "trace", "error"]),
    ("job", &["error"]),
    ("memory", &["error"]),
    ("trace", &["error"]),
    ("error", &[]),
];

/// Imports against the rules, in the sources of all crates: pairs of a path and the text.
pub(crate) fn violations(sources: &[(String, String)]) -> Vec<String> {
    let mut crates: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
    for (path, text) in sources {
        if let Some((folder, _)) = path.split_once("/src/") {
            crates.entry(folder).or_default().push((path, text));
        }
    }
    let mut violations = Vec::new();
    for (folder, files) in crates {
        let table = TABLES.iter().find(|(name, _)| *name == folder).map(|(_, table)| *table);
        violations.extend(crate_violations(folder, &files, table));
    }
    violations
}

fn crate_violations(folder: &str, files: &[(&str, &str)], table: Option<&Table>) -> Vec<String> {
    let arrows = Arrows::read(folder, files);
    let mut violations = arrows.circles(folder);
    if let Some(table) = table {
        violations.extend(arrows.against(folder, table));
    }
    violations.extend(arrows.everything);
    violations
}

/// Who imports whom in one crate.
#[derive(Default)]
struct Arrows {
    /// The modules that each module imports, and where it does so first: a file and its line.
    from: BTreeMap<String, BTreeMap<String, String>>,
    /// Imports of the whole root, of which nobody can tell what they are for.
    everything: Vec<String>,
}

impl Arrows {
    fn read(folder: &str, files: &[(&str, &str)]) -> Self {
        let read: Vec<(Vec<&str>, &str, FileImports)> = files
            .iter()
            .map(|(path, text)| {
                let module = module_of(&path[folder.len() + "/src/".len()..]);
                let found = imports::read(&module, text);
                (module, *path, found)
            })
            .collect();

        let mut arrows = Self::default();
        let mut names = BTreeMap::new();
        for (module, _, found) in &read {
            match module.first() {
                Some(name) => drop(arrows.from.entry((*name).to_owned()).or_default()),
                None => names.extend(found.names.iter().map(|(name, path)| (name, path))),
            }
        }
        let for_tests: Vec<Vec<&str>> = read
            .iter()
            .flat_map(|(module, _, found)| {
                found.test_modules.iter().map(|name| [module, &[name.as_str()][..]].concat())
            })
            .collect();

        for (module, path, found) in &read {
            let Some(from) = module.first() else { continue };
            if for_tests.iter().any(|test| module.starts_with(test)) {
                continue;
            }
            for import in &found.imports {
                let Some(first) = import.path.first() else { continue };
                let place = format!("{path}:{}", import.line);
                if first == "*" {
                    arrows.everything.push(format!("{place} imports all of the crate's root"));
                    continue;
                }
                // `crate::Model` is `crate::model::Model` if the root says so. What is neither a
                // module nor such a name is the root's own.
                let to = match names.get(first) {
                    Some(path) => path.iter().find(|part| !["crate", "self"].contains(&&***part)),
                    None => Some(first),
                };
                let Some(to) = to.filter(|to| arrows.from.contains_key(*to) && *to != from) else {
                    continue;
                };
                arrows.add(from, to, place);
            }
        }
        arrows
    }

    fn add(&mut self, from: &str, to: &str, place: String) {
        self.from.entry(from.to_owned()).or_default().entry(to.to_owned()).or_insert(place);
    }

    /// The shortest circle through each module, each circle once.
    fn circles(&self, folder: &str) -> Vec<String> {
        let mut seen = BTreeSet::new();
        let mut violations = Vec::new();
        for start in self.from.keys() {
            let Some(circle) = self.circle(start) else { continue };
            if !seen.insert(circle.iter().copied().collect::<BTreeSet<_>>()) {
                continue;
            }
            let next = circle.iter().cycle().skip(1);
            let imports: Vec<_> = circle
                .iter()
                .zip(next)
                .map(|(from, to)| format!("{} imports {to}", self.from[*from][*to]))
                .collect();
            violations.push(format!("modules of {folder} in a circle: {}", imports.join(", ")));
        }
        violations
    }

    /// The modules on a shortest way from `start` back to itself.
    fn circle<'a>(&'a self, start: &'a str) -> Option<Vec<&'a str>> {
        let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
        let mut queue = VecDeque::from([start]);
        while let Some(module) = queue.pop_front() {
            for to in self.from[module].keys().map(String::as_str) {
                if to == start {
                    let mut circle = vec![module];
                    while let Some(before) = came_from.get(circle[circle.len() - 1]) {
                        circle.push(before);
                    }
                    circle.reverse();
                    return Some(circle);
                }
                if !came_from.contains_key(to) {
                    came_from.insert(to, module);
                    queue.push_back(to);
                }
            }
        }
        None
    }

    /// Imports that a table does not allow.
    fn against(&self, folder: &str, table: &Table) -> Vec<String> {
        let mut violations = Vec::new();
        for (from, imports) in &self.from {
            let Some((_, allowed)) = table.iter().find(|(module, _)| module == from) else {
                violations.push(format!("{folder}: module {from} is not in the table of modules"));
                continue;
            };
            for (to, place) in imports {
                if !allowed.contains(&to.as_str()) {
                    violations.push(format!("{place} imports {to}, against the table of modules"));
                }
            }
        }
        violations
    }
}

/// The module that a file below `src/` is; none of them for the crate's root.
fn module_of(file: &str) -> Vec<&str> {
    let mut module: Vec<_> = file.trim_end_matches(".rs").split('/').collect();
    if module.last() == Some(&"mod") || ["lib.rs", "main.rs"].contains(&file) {
        module.pop();
    }
    module
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(files: &[(&str, &str)], table: Option<&Table>) -> Vec<String> {
        let files: Vec<_> =
            files.iter().map(|(path, text)| (format!("crates/a/src/{path}"), *text)).collect();
        let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        crate_violations("crates/a", &files, table)
    }

    #[test]
    fn imports_in_one_direction_pass() {
        let found = check(
            &[
                ("lib.rs", "mod top;\nmod low;\npub use low::Low;\npub use top::Top;"),
                ("top.rs", "use crate::Low;\nuse crate::top::inner::I;"),
                ("top/inner.rs", "use super::Top;\nuse crate::low;"),
                ("low.rs", "#[cfg(test)]\nmod tests;\n#[cfg(test)]\nmod t { use crate::top; }"),
                ("low/tests.rs", "use crate::top;"),
            ],
            None,
        );
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn a_circle_of_two_names_both_files() {
        let found = check(
            &[
                ("main.rs", "mod plan;\nmod train;"),
                ("plan.rs", ""),
                ("plan/page.rs", "\nuse crate::train::Chart;"),
                ("train/mod.rs", "fn f() { crate::plan::g() }"),
            ],
            None,
        );
        let expected = "modules of crates/a in a circle: crates/a/src/plan/page.rs:2 imports train, \
            crates/a/src/train/mod.rs:1 imports plan";
        assert_eq!(found, [expected]);
    }

    #[test]
    fn a_circle_of_three_through_a_name_of_the_root_is_found() {
        let found = check(
            &[
                ("lib.rs", "mod x; mod y; mod z;\npub use z::{Z, Other};"),
                ("x.rs", "use super::y;"),
                ("y.rs", "use crate::Z;"),
                ("z.rs", "use crate::x;"),
            ],
            None,
        );
        let expected = "modules of crates/a in a circle: crates/a/src/x.rs:1 imports y, \
            crates/a/src/y.rs:1 imports z, crates/a/src/z.rs:1 imports x";
        assert_eq!(found, [expected]);
    }

    #[test]
    fn everything_of_the_root_cannot_be_judged() {
        let found = check(&[("lib.rs", ""), ("x.rs", "use super::*;")], None);
        assert_eq!(found, ["crates/a/src/x.rs:1 imports all of the crate's root"]);
    }

    #[test]
    fn a_table_forbids_what_it_does_not_name() {
        let table: &Table = &[("x", &["y"]), ("y", &[])];
        let files = [("x.rs", "use crate::y;"), ("y.rs", ""), ("z.rs", "")];
        let found = check(&files, Some(table));
        assert_eq!(found, ["crates/a: module z is not in the table of modules"]);
        let found = check(&[("x.rs", ""), ("y.rs", "use crate::x::X;")], Some(table));
        assert_eq!(found, ["crates/a/src/y.rs:1 imports x, against the table of modules"]);
    }

    /// A table with a circle could not be kept together with the check of circles.
    #[test]
    fn the_tables_have_no_circles() {
        for (folder, table) in TABLES {
            let mut arrows = Arrows::default();
            for (from, imports) in *table {
                arrows.from.entry((*from).to_owned()).or_default();
                for to in *imports {
                    arrows.add(from, to, String::new());
                }
            }
            assert_eq!(arrows.circles(folder), Vec::<String>::new());
        }
    }
}
