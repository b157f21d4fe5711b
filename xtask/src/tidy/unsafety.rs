//! `unsafe` only in named files, and only with its proof above it.

/// Files that may contain `unsafe`, each with the reason.
const UNSAFE_FILES: &[(&str, &str)] = &[
    (
        "crates/poseidon/src/memory/buffer.rs",
        "lanes read and write the training program's own tensors",
    ),
    ("crates/poseidon/src/memory/exchange.rs", "the same tensors, chunk by chunk"),
    ("crates/poseidon/src/memory/factors.rs", "the matrices where factors meet, block by block"),
    ("crates/poseidon/src/session/layers.rs", "the same, when they are rebuilt"),
    ("crates/poseidon/src/collectives/tensor.rs", "tensors of a collective, by address"),
    ("crates/poseidon/src/collectives/course.rs", "regions of them, as an operation goes on"),
    ("crates/poseidon/src/collectives/desk.rs", "regions of them that frames go to"),
    ("crates/poseidon/src/collectives/peer.rs", "regions of them, read from and written to links"),
    ("crates/poseidon/tests/group.rs", "lends tensors to a group"),
    ("crates/matrix/src/vectors.rs", "a call of gemm, which takes addresses"),
    ("crates/matrix/src/tiles.rs", "threads that write to columns of one matrix"),
    ("crates/matrix/src/tiles/unit.rs", "instructions that the compiler does not know"),
    ("crates/matrix/src/tiles/pack.rs", "vector instructions"),
    ("crates/nn/src/data/mapped.rs", "data files that workers of one host share"),
    ("crates/nn/src/data/lmdb.rs", "opening a database that others may map too"),
    ("bindings/python/src/lib.rs", "tensors of Python programs, by address"),
    ("bindings/python/src/group.rs", "the same, for collectives"),
    ("crates/link/src/shared.rs", "rings in memory two processes share"),
    ("crates/link/src/past_cache.rs", "writes that do not pass through the cache"),
    ("crates/cli/src/orphan.rs", "a hook between fork and exec"),
    ("crates/cli/src/lab/namespace.rs", "namespaces, and a hook between fork and exec"),
];

/// How far above `unsafe` its proof may begin.
const REACH: usize = 40;

/// Uses of `unsafe` in a file that may not have any, or without a `SAFETY:` comment (a `# Safety`
/// section for functions and traits) directly above.
pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    let allowed = UNSAFE_FILES.iter().any(|(file, _)| *file == path);
    let code = code_only(text);
    let code: Vec<_> = code.lines().collect();
    let lines: Vec<_> = text.lines().collect();
    let mut violations = Vec::new();
    for (index, line) in code.iter().enumerate() {
        if !has_word(line, "unsafe") {
            continue;
        }
        let place = format!("{path}:{}", index + 1);
        if !allowed {
            violations.push(format!("{place} has `unsafe`, and the file is not on the list"));
        } else if !is_proved(&lines, &code, index) {
            violations.push(format!("{place} has `unsafe` without `// SAFETY:` above it"));
        }
    }
    violations
}

/// A crate root that does not forbid `unsafe`.
pub(crate) fn missing_forbid(path: &str, text: &str) -> Option<String> {
    let attribute = "#![forbid(unsafe_code)]";
    let present = code_only(text).lines().any(|line| line.trim() == attribute);
    (!present).then(|| format!("{path} lacks {attribute}"))
}

/// Looks upwards from a line through comments, attributes and the unfinished statement it is in.
fn is_proved(lines: &[&str], code: &[&str], index: usize) -> bool {
    for above in (index.saturating_sub(REACH)..index).rev() {
        let (line, code) = (lines[above].trim(), code[above].trim());
        if line.starts_with("//") {
            if line.contains("SAFETY:") || line.contains("# Safety") {
                return true;
            }
        } else if code.is_empty() || (!code.starts_with("#[") && code.ends_with([';', '{', '}'])) {
            return false;
        }
    }
    false
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(start, _)| {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let before = line[..start].chars().next_back();
        let after = line[start + word.len()..].chars().next();
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

/// The text with comments and the insides of literals blanked out, line for line.
fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    let mut previous = ' ';
    while let Some(c) = rest.chars().next() {
        let literal = literal_length(rest, previous);
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment_length(rest)
        } else {
            literal
        };
        if length == 0 {
            code.push(c);
            rest = &rest[c.len_utf8()..];
        } else {
            code.extend(rest[..length].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            // A literal is still a token: `"a";` must not look like an empty line.
            if length == literal {
                code.pop();
                code.push('"');
            }
            rest = &rest[length..];
        }
        previous = c;
    }
    code
}

fn block_comment_length(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Length of the string or character literal that `text` begins with; 0 when there is none.
fn literal_length(text: &str, previous: char) -> usize {
    let hashes = text.strip_prefix('r').map(|rest| rest.chars().take_while(|c| *c == '#').count());
    if let Some(hashes) = hashes {
        let opening = 1 + hashes;
        // `b` and `c` may stand before a raw string; any other letter means `r` ends a name.
        let begins = !previous.is_alphanumeric() && previous != '_' || "bc".contains(previous);
        if begins && text[opening..].starts_with('"') {
            let closing = format!("\"{}", "#".repeat(hashes));
            let inside = &text[opening + 1..];
            let end = inside.find(&closing).map_or(inside.len(), |end| end + closing.len());
            return opening + 1 + end;
        }
    }
    if text.starts_with('"') {
        return quoted_length(text, '"');
    }
    if text.starts_with('\'') {
        // `'a'` and `'\n'` are literals; `'a` alone is a lifetime.
        let mut chars = text.chars().skip(1);
        let (first, second) = (chars.next(), chars.next());
        if first == Some('\\') || second == Some('\'') {
            return quoted_length(text, '\'');
        }
    }
    0
}

fn quoted_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if !escaped && c == quote {
            return at + 1;
        }
        escaped = !escaped && c == '\\';
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "crates/poseidon/src/memory/buffer.rs";

    #[test]
    fn unsafe_in_an_unlisted_file_is_found_even_with_its_proof() {
        let text = "fn f() {\n    // SAFETY: fine.\n    unsafe { g() }\n}\n";
        let expected = "crates/nn/src/a.rs:3 has `unsafe`, and the file is not on the list";
        assert_eq!(violations("crates/nn/src/a.rs", text), [expected]);
    }

    #[test]
    fn unsafe_without_a_proof_is_found() {
        let bad = [
            "fn f() {\n    unsafe { g() }\n}\n",
            "// SAFETY: of something else.\nlet a = 1;\nlet b = unsafe { g() };\n",
            "// SAFETY: of the whole function.\nfn f() {\n    unsafe { g() }\n}\n",
            "// Sends.\nunsafe impl Send for A {}\n",
            "/// Reads.\npub unsafe fn read() {}\n",
            "// SAFETY: not next to it.\n\nunsafe impl Send for A {}\n",
        ];
        for text in bad {
            assert_eq!(violations(LISTED, text).len(), 1, "{text}");
        }
    }

    #[test]
    fn unsafe_with_a_proof_passes() {
        let good = [
            "// SAFETY: of this,\n// at length.\nunsafe { g() }\n",
            "// SAFETY: the pointer is ours.\nlet b =\n    unsafe { g() };\n",
            "/// Reads.\n///\n/// # Safety\n/// `p` is valid.\n#[inline]\npub unsafe fn read() {}\n",
            "// SAFETY: no interior state.\nunsafe impl Send for A {}\n",
        ];
        for text in good {
            assert_eq!(violations(LISTED, text), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn the_word_in_comments_literals_and_names_is_not_code() {
        let text = "// unsafe\n/* unsafe /* unsafe */ unsafe */\nlet a = \"un\\\" unsafe\";\n\
            let b = r#\"\" unsafe \"#;\nlet c = br\"unsafe\";\nlet unsafe_code = '\"';\n\
            fn f<'a>(x: &'a str) {} // 'unsafe'\n";
        assert_eq!(violations("a.rs", text), Vec::<String>::new());
        assert_eq!(violations("a.rs", &format!("{text}unsafe fn g() {{}}")).len(), 1);
    }

    #[test]
    fn a_core_that_does_not_forbid_unsafe_is_found() {
        assert_eq!(missing_forbid("lib.rs", "//! Core.\n#![forbid(unsafe_code)]\n"), None);
        let found = missing_forbid("lib.rs", "// #![forbid(unsafe_code)]\n");
        assert_eq!(found.unwrap(), "lib.rs lacks #![forbid(unsafe_code)]");
    }
}
