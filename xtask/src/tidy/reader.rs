//! Reads Rust sources as far as the checks need it: what is code, and what is not.

/// The text with comments and the insides of literals blanked out, line for line.
pub(crate) fn code_only(text: &str) -> String {
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
