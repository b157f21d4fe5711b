//! What documents quote from the code: messages and environment variables. A message or a variable
//! that is renamed in the code is found here, before a reader searches for it in vain.

use super::markdown::Document;

/// The page whose headings are messages of the code. `…` stands for what varies.
pub(crate) const MESSAGES: &str = "docs/troubleshooting.md";

/// The shortest part of a message that says which message it is.
const TELLING: usize = 10;

/// The texts of all sources as one, with every string in one piece.
pub(crate) fn joined<'a>(sources: impl IntoIterator<Item = &'a str>) -> String {
    let mut all = String::new();
    for source in sources {
        let mut cut = false;
        for line in source.lines() {
            // Indentation after a cut is not part of a Rust string.
            let line = if cut { line.trim_start() } else { line };
            cut = line.ends_with('\\');
            all.push_str(line.strip_suffix('\\').unwrap_or(line));
            if !cut {
                all.push('\n');
            }
        }
    }
    all.replace("\\\"", "\"")
}

/// Headings that quote a message which is not in the code.
pub(crate) fn lost_messages(path: &str, document: &Document, code: &str) -> Vec<String> {
    let mut violations = Vec::new();
    for (line, heading) in &document.headings {
        let quoted = heading.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
        let Some(message) = quoted else { continue };
        let parts: Vec<_> = message.split('…').map(str::trim).filter(|p| !p.is_empty()).collect();
        if !parts.iter().any(|part| part.len() >= TELLING) {
            violations.push(format!("{path}:{line} quotes too little to be found: {message}"));
        }
        for part in parts.iter().filter(|part| !code.contains(**part)) {
            violations.push(format!("{path}:{line} quotes \"{part}\", which no source has"));
        }
    }
    violations
}

/// Variables that a document tells of and no source reads.
pub(crate) fn lost_variables(path: &str, text: &str, code: &str) -> Vec<String> {
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let mut violations = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        for (at, _) in line.match_indices("POSEIDON_") {
            let rest = &line[at..];
            let name = &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())];
            // `POSEIDON_…` and the like name no variable.
            let is_read = ['"', '\''].iter().any(|q| code.contains(&format!("{q}{name}{q}")));
            if !name.ends_with('_') && !is_read {
                violations.push(format!("{path}:{number} tells of {name}, which nothing reads"));
            }
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::super::markdown::read;
    use super::*;

    const CODE: &str = "#[error(\"lost {node}: the link to {address} \\\n    was cut\")]\n\
        env.parse(\"POSEIDON_LANES\")";

    #[test]
    fn a_message_that_the_code_no_longer_has_is_found() {
        let code = joined([CODE]);
        let there = read("### `lost …: the link to … was cut`\n### In words\n");
        assert_eq!(lost_messages("a.md", &there, &code), [""; 0]);
        let gone = read("# A\n### `lost …: the connection to …`\n### `lost …`\n");
        let expected = [
            "a.md:2 quotes \": the connection to\", which no source has",
            "a.md:3 quotes too little to be found: lost …",
        ];
        assert_eq!(lost_messages("a.md", &gone, &code), expected);
    }

    #[test]
    fn a_variable_that_nothing_reads_is_found() {
        let text = "`POSEIDON_LANES=2`, POSEIDON_…\n`POSEIDON_LANE`\n";
        let found = lost_variables("a.md", text, &joined([CODE]));
        assert_eq!(found, ["a.md:2 tells of POSEIDON_LANE, which nothing reads"]);
    }
}
