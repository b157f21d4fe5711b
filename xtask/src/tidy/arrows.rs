//! Which workspace crate may depend on which.

use anyhow::{Context, Result};
use serde::Deserialize;

/// The allowed arrows: a crate and the workspace crates it may depend on.
const ARROWS: &[(&str, &[&str])] = &[
    ("poseidon-core", &[]),
    ("poseidon-link", &["poseidon-core"]),
    ("poseidon-matrix", &[]),
    ("poseidon-device", &[]),
    ("poseidon-checkpoint", &[]),
    (
        "poseidon",
        &[
            "poseidon-checkpoint",
            "poseidon-core",
            "poseidon-device",
            "poseidon-link",
            "poseidon-matrix",
        ],
    ),
    ("poseidon-fuzz", &["poseidon-core", "poseidon-checkpoint", "poseidon-link", "poseidon"]),
    ("poseidon-one-build", &["poseidon-checkpoint", "poseidon"]),
    ("poseidon-nn", &["poseidon-core", "poseidon-matrix", "poseidon"]),
    (
        "poseidon-python",
        &["poseidon-core", "poseidon-checkpoint", "poseidon", "poseidon-one-build"],
    ),
    ("poseidon-sim", &["poseidon-core"]),
    (
        "poseidon-cli",
        &[
            "poseidon-checkpoint",
            "poseidon-core",
            "poseidon-link",
            "poseidon",
            "poseidon-nn",
            "poseidon-one-build",
            "poseidon-sim",
        ],
    ),
    ("xtask", &[]),
];

/// Arrows in the output of `cargo metadata --no-deps` that the table does not allow. Dependencies of
/// tests alone are free: they cannot make the built crates depend on each other.
pub(crate) fn violations(metadata: &str) -> Result<Vec<String>> {
    let Metadata { packages } = serde_json::from_str(metadata).context("cargo metadata")?;
    let members: Vec<_> = packages.iter().map(|package| package.name.as_str()).collect();
    let mut violations = Vec::new();
    for package in &packages {
        let name = package.name.as_str();
        let Some((_, allowed)) = ARROWS.iter().find(|(from, _)| *from == name) else {
            violations.push(format!("crate {name} is not in the table of crate arrows"));
            continue;
        };
        for dependency in &package.dependencies {
            let on = dependency.name.as_str();
            let for_tests = dependency.kind.as_deref() == Some("dev");
            if !for_tests && members.contains(&on) && !allowed.contains(&on) {
                violations.push(format!("crate {name} depends on {on}, against the crate arrows"));
            }
        }
    }
    Ok(violations)
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(packages: &str) -> Vec<String> {
        violations(&format!(r#"{{"packages": [{packages}]}}"#)).unwrap()
    }

    #[test]
    fn arrows_along_the_table_pass() {
        let found = check(
            r#"{"name": "poseidon-core", "dependencies": [{"name": "serde", "kind": null}]},
               {"name": "poseidon-link", "dependencies": [{"name": "poseidon-core", "kind": null}]}"#,
        );
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn an_arrow_against_the_table_names_both_crates() {
        let found = check(
            r#"{"name": "poseidon-link", "dependencies": []},
               {"name": "poseidon-sim", "dependencies": [{"name": "poseidon-link", "kind": null}]}"#,
        );
        let expected = "crate poseidon-sim depends on poseidon-link, against the crate arrows";
        assert_eq!(found, [expected]);
    }

    #[test]
    fn build_dependencies_are_arrows_and_test_dependencies_are_not() {
        let on_link = |kind| {
            check(&format!(
                r#"{{"name": "poseidon-link", "dependencies": []}},
                   {{"name": "poseidon-core",
                     "dependencies": [{{"name": "poseidon-link", "kind": "{kind}"}}]}}"#
            ))
        };
        assert_eq!(on_link("build").len(), 1);
        assert_eq!(on_link("dev").len(), 0);
    }

    #[test]
    fn an_unknown_crate_is_a_violation() {
        let found = check(r#"{"name": "poseidon-extra", "dependencies": []}"#);
        assert_eq!(found, ["crate poseidon-extra is not in the table of crate arrows"]);
    }
}
