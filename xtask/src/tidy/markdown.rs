//! Reads Markdown as far as the checks need it: headings, links, and blocks of code.

use std::collections::HashMap;

/// What a document says about itself and others.
#[derive(Debug, Default)]
pub(crate) struct Document {
    /// Names that `#name` may lead to: one for each heading, and those of HTML.
    pub(crate) anchors: Vec<String>,
    /// Links and pictures, in order.
    pub(crate) links: Vec<Link>,
    /// `[text][name]` whose name is defined nowhere in the document, with their lines.
    pub(crate) undefined: Vec<(usize, String)>,
    /// Lines of fenced code that have no language, or one of a shell's, with their numbers. A line
    /// that ends with a backslash is one with the next.
    pub(crate) commands: Vec<(usize, String)>,
    /// Headings as they are written, with their lines.
    pub(crate) headings: Vec<(usize, String)>,
}

/// Where a document leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Counted from 1.
    pub(crate) line: usize,
    /// As written: `file`, `file#anchor`, `#anchor` or an address on the web.
    pub(crate) target: String,
}

impl Link {
    /// The file, if the link leads to one of this repository, or to the document itself (empty).
    pub(crate) fn file(&self) -> Option<&str> {
        let elsewhere = self.target.contains("://") || self.target.starts_with("mailto:");
        (!elsewhere).then(|| self.target.split('#').next().unwrap_or_default())
    }

    /// The heading, if one is named.
    pub(crate) fn anchor(&self) -> Option<&str> {
        self.target.split_once('#').map(|(_, anchor)| anchor)
    }
}

/// Reads a document.
pub(crate) fn read(text: &str) -> Document {
    let mut document = Document::default();
    let mut seen = HashMap::new();
    let mut uses = Vec::new();
    let mut defined = Vec::new();
    let mut fence: Option<Fence> = None;
    for (line, text) in (1..).zip(text.lines()) {
        if let Some(open) = &mut fence {
            if open.is_closed_by(text) {
                fence = None;
            } else if open.is_shell {
                document.add_command(line, text, &mut open.goes_on);
            }
            continue;
        }
        if let Some(opened) = Fence::opened_by(text) {
            fence = Some(opened);
            continue;
        }
        if let Some(heading) = heading(text) {
            document.anchors.push(anchor(heading, &mut seen));
            document.headings.push((line, heading.to_owned()));
        }
        let plain = without_code(text);
        document.anchors.extend(html_anchors(&plain));
        if let Some((name, target)) = definition(&plain) {
            defined.push(name);
            document.links.push(Link { line, target });
            continue;
        }
        document.links.extend(targets(&plain).map(|target| Link { line, target }));
        uses.extend(references(&plain).map(|name| (line, name)));
    }
    document.undefined = uses.into_iter().filter(|(_, name)| !defined.contains(name)).collect();
    document
}

impl Document {
    fn add_command(&mut self, line: usize, text: &str, goes_on: &mut bool) {
        let text = text.trim();
        let (words, more) = text.strip_suffix('\\').map_or((text, false), |words| (words, true));
        match self.commands.last_mut().filter(|_| *goes_on) {
            Some((_, command)) => *command = format!("{} {}", command.trim_end(), words.trim()),
            None => self.commands.push((line, words.to_owned())),
        }
        *goes_on = more;
    }
}

/// A block of code that has begun.
struct Fence {
    mark: char,
    length: usize,
    is_shell: bool,
    goes_on: bool,
}

impl Fence {
    fn opened_by(line: &str) -> Option<Self> {
        let line = line.trim_start();
        let mark = line.chars().next().filter(|c| "`~".contains(*c))?;
        let length = line.chars().take_while(|c| *c == mark).count();
        let language = line[length..].trim();
        let is_shell = ["", "console", "sh", "shell", "bash"].contains(&language);
        (length >= 3 && !language.contains('`')).then_some(Self {
            mark,
            length,
            is_shell,
            goes_on: false,
        })
    }

    fn is_closed_by(&self, line: &str) -> bool {
        let line = line.trim();
        line.len() >= self.length && line.chars().all(|c| c == self.mark)
    }
}

/// The words of a heading.
fn heading(line: &str) -> Option<&str> {
    let level = line.chars().take_while(|c| *c == '#').count();
    let words = line[level..].strip_prefix(' ')?;
    (1..=6).contains(&level).then(|| words.trim().trim_end_matches('#').trim())
}

/// What a browser calls a heading: as GitHub and mdBook do it, which agree on these.
fn anchor(heading: &str, seen: &mut HashMap<String, usize>) -> String {
    let mut name = String::new();
    for c in shown(heading).chars() {
        match c {
            ' ' => name.push('-'),
            '-' | '_' => name.push(c),
            _ if c.is_alphanumeric() => name.extend(c.to_lowercase()),
            _ => {}
        }
    }
    let before = seen.entry(name.clone()).or_default();
    *before += 1;
    if *before == 1 { name } else { format!("{name}-{}", *before - 1) }
}

/// A heading's words without the targets of its links.
fn shown(heading: &str) -> String {
    let mut words = String::new();
    let mut rest = heading;
    while let Some(at) = rest.find("](") {
        words.push_str(&rest[..at]);
        rest = rest[at..].find(')').map_or("", |end| &rest[at + end + 1..]);
    }
    words + rest
}

/// The line with code and what is between its backticks blanked out.
fn without_code(line: &str) -> String {
    let mut plain = String::new();
    let mut rest = line;
    while let Some(at) = rest.find('`') {
        let ticks = rest[at..].chars().take_while(|c| *c == '`').count();
        let inside = &rest[at + ticks..];
        let Some(end) = inside.find(&rest[at..at + ticks]) else { break };
        plain.push_str(&rest[..at]);
        plain.push(' ');
        rest = &inside[end + ticks..];
    }
    plain + rest
}

/// Targets of `[text](target)` and `![text](target)`.
fn targets(line: &str) -> impl Iterator<Item = String> {
    line.match_indices("](").map(|(at, opening)| {
        let rest = &line[at + opening.len()..];
        let target = &rest[..rest.find(')').unwrap_or(rest.len())];
        // A title may follow.
        target.split_whitespace().next().unwrap_or_default().to_owned()
    })
}

/// Names of `[text][name]`.
fn references(line: &str) -> impl Iterator<Item = String> {
    line.match_indices("][").filter_map(|(at, opening)| {
        let rest = &line[at + opening.len()..];
        let name = &rest[..rest.find(']')?];
        (!name.is_empty()).then(|| name.to_lowercase())
    })
}

/// Name and target of `[name]: target`.
fn definition(line: &str) -> Option<(String, String)> {
    let (name, target) = line.strip_prefix('[')?.split_once("]:")?;
    let target = target.split_whitespace().next()?;
    (!name.contains(['[', ']'])).then(|| (name.to_lowercase(), target.to_owned()))
}

/// Names that HTML gives: `<a id="name">`.
fn html_anchors(line: &str) -> impl Iterator<Item = String> {
    ["id=\"", "name=\""].into_iter().flat_map(move |attribute| {
        line.match_indices(attribute).filter_map(move |(at, _)| {
            let rest = &line[at + attribute.len()..];
            Some(rest[..rest.find('"')?].to_owned())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_have_the_anchors_that_browsers_give_them() {
        let text = "# The wire, version 11\n## `poseidon train`\n### Speed-ups (2017, Figures 4 and 5)\n\
            ## A [link](there.md) in it\n## Twice\n## Twice\n<a id=\"by-hand\"></a>\n```\n# no heading\n```\n#none";
        let anchors = read(text).anchors;
        let expected = [
            "the-wire-version-11",
            "poseidon-train",
            "speed-ups-2017-figures-4-and-5",
            "a-link-in-it",
            "twice",
            "twice-1",
            "by-hand",
        ];
        assert_eq!(anchors, expected);
    }

    #[test]
    fn links_are_found_outside_of_code() {
        let text = "[a](b.md#c) and ![d](e.svg \"title\"), `[no](code.md)`, [f][g] [h][lost]\n\n\
            [G]: i.md\n```rust\n[no](j.md)\n```\n";
        let document = read(text);
        let targets: Vec<_> =
            document.links.iter().map(|link| (link.line, &*link.target)).collect();
        assert_eq!(targets, [(1, "b.md#c"), (1, "e.svg"), (3, "i.md")]);
        assert_eq!(document.undefined, [(1, "lost".to_owned())]);
        assert_eq!(document.links[0].file(), Some("b.md"));
        assert_eq!(document.links[0].anchor(), Some("c"));
    }

    #[test]
    fn commands_are_the_lines_of_shell_blocks() {
        let text = "```console\n$ a --b \\\n    --c\nout\n```\n```python\nd\n```\n~~~\ne\n~~~\n";
        let commands = read(text).commands;
        let expected = [(2, "$ a --b --c"), (4, "out"), (10, "e")];
        assert_eq!(commands, expected.map(|(line, words)| (line, words.to_owned())));
    }
}
