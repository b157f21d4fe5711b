//! What a benchmark of several parts has found out, and the summary of it.

use super::record;
use super::targets::Verdict;
use anyhow::{Result, bail};
use std::path::Path;
use std::time::Instant;

/// What a part has found out.
pub(crate) struct Finding {
    /// Its section of the summary, without the heading.
    pub(crate) text: String,
    pub(crate) verdicts: Vec<Verdict>,
}

/// Measures `parts`, by name, one after the other, and writes the summary after each: a benchmark that is
/// cut short keeps what it has. A part that fails does not keep the others from being measured.
pub(crate) fn measure<P>(
    folder: &Path,
    title: &str,
    parts: impl IntoIterator<Item = (&'static str, P)>,
    cleaned: &dyn Fn(&str) -> String,
    mut part: impl FnMut(P) -> Result<Finding>,
) -> Result<()> {
    let mut findings = Vec::new();
    for (name, which) in parts {
        println!("\n== {name}");
        let start = Instant::now();
        let finding = part(which);
        if let Err(error) = &finding {
            eprintln!("{name} failed: {error:#}");
        }
        println!("== {name}: {} s", start.elapsed().as_secs());
        findings.push((name, finding));
        record::write(folder, "summary.md", &summary(title, &findings, cleaned))?;
    }
    println!("\n{}\nrecorded in {}", summary(title, &findings, cleaned), folder.display());
    let failed = findings.iter().filter(|(_, finding)| finding.is_err());
    let failed: Vec<_> = failed.map(|(name, _)| *name).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// A section for every part, and a table of all targets. `cleaned` takes the folders of this machine
/// out of an error's words: they mean nothing elsewhere.
pub(crate) fn summary(
    title: &str,
    findings: &[(&str, Result<Finding>)],
    cleaned: &dyn Fn(&str) -> String,
) -> String {
    let mut text = format!("# {title}\n");
    let mut targets = String::new();
    for (name, finding) in findings {
        text += &format!("\n## {}{}\n\n", name[..1].to_uppercase(), &name[1..]);
        match finding {
            Ok(Finding { text: section, verdicts }) => {
                text += section;
                for verdict in verdicts {
                    let (target, measured) = (&verdict.target, &verdict.measured);
                    targets +=
                        &format!("| {name} | {target} | {measured} | {} |\n", verdict.word());
                }
            }
            // The last line says what happened; the whole story was on the terminal.
            Err(error) => {
                let story = cleaned(&format!("{error:#}"));
                text += &format!("Failed: {}\n", story.lines().last().unwrap_or_default());
            }
        }
    }
    if !targets.is_empty() {
        text +=
            "\n## Targets\n\n| part | target | measured | verdict |\n| --- | --- | --- | --- |\n";
        text += &targets;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn failed_parts_are_told_without_folders_of_this_machine() {
        let finding = Finding {
            text: "Everything was fast.\n".to_owned(),
            verdicts: vec![Verdict {
                target: "at least 2x".to_owned(),
                measured: "1.50x".to_owned(),
                met: Some(false),
            }],
        };
        let error = anyhow!("long story\n/somewhere/cifar/test_batch.bin is short");
        let findings = [("overhead", Ok(finding)), ("convergence", Err(error))];
        let text = summary("Training", &findings, &|text| text.replace("/somewhere/", ""));
        assert!(text.contains("## Overhead\n\nEverything was fast.\n"), "{text}");
        assert!(text.contains("| overhead | at least 2x | 1.50x | **missed** |"), "{text}");
        assert!(text.contains("Failed: cifar/test_batch.bin is short\n"), "{text}");
    }
}
