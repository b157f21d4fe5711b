//! Which modules of its own crate a Rust source names, by a simple reader.

use super::reader::code_only;

/// A module of this crate that a file names.
#[derive(Debug, PartialEq)]
pub(crate) struct Import {
    /// From the crate's root, such as `["model", "Model"]`. `["*"]` is everything in the root.
    pub(crate) path: Vec<String>,
    pub(crate) line: usize,
}

/// What a file says about the modules of its crate.
#[derive(Debug, Default)]
pub(crate) struct FileImports {
    /// Paths that begin with `crate`, `self` or `super`, in `use` or anywhere else.
    pub(crate) imports: Vec<Import>,
    /// What `use` makes known under a name, with the path as it is written. Only a crate's root
    /// needs it: `use model::Model` makes `crate::Model` another name for a part of `model`.
    pub(crate) names: Vec<(String, Vec<String>)>,
    /// Modules in files of their own that exist in tests only.
    pub(crate) test_modules: Vec<String>,
}

/// Reads a file that is the module `module` of its crate. Items under `#[cfg(test)]` are free and
/// left out.
pub(crate) fn read(module: &[&str], text: &str) -> FileImports {
    let code = code_only(text);
    let mut reader = Reader {
        tokens: tokens(&code),
        module: module.iter().map(|name| (*name).to_owned()).collect(),
        found: FileImports::default(),
    };
    reader.items();
    reader.found
}

/// A word, `::`, or a single other character.
struct Token<'a> {
    text: &'a str,
    line: usize,
}

fn tokens(code: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    for (line, text) in (1..).zip(code.lines()) {
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let length = if is_word(first) {
                rest.find(|c| !is_word(c)).unwrap_or(rest.len())
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            tokens.push(Token { text: &rest[..length], line });
            rest = rest[length..].trim_start();
        }
    }
    tokens
}

struct Reader<'a> {
    tokens: Vec<Token<'a>>,
    /// Where the reader is: the file's module, and the modules written out inside the file.
    module: Vec<String>,
    found: FileImports,
}

impl<'a> Reader<'a> {
    fn items(&mut self) {
        // How many braces are open, and at which counts a module written out in the file closes.
        let mut depth = 0_usize;
        let mut closes = Vec::new();
        let mut at = 0;
        while at < self.tokens.len() {
            match self.text(at) {
                "{" => depth += 1,
                "}" => {
                    depth = depth.saturating_sub(1);
                    if closes.last() == Some(&depth) {
                        closes.pop();
                        self.module.pop();
                    }
                }
                "#" if self.is_test_attribute(at) => {
                    at = self.after_test_item(at);
                    continue;
                }
                "mod" if self.text(at + 2) == "{" => {
                    self.module.push(self.text(at + 1).to_owned());
                    closes.push(depth);
                }
                "use" => {
                    at = self.tree(at + 1, &[], true);
                    continue;
                }
                "crate" | "self" | "super" if self.begins_path(at) => {
                    at = self.tree(at, &[], false);
                    continue;
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Reads a path from `at` on, with the groups in it if it is one of a `use`; returns where it
    /// ends.
    fn tree(&mut self, start: usize, before: &[String], in_use: bool) -> usize {
        let mut path = before.to_vec();
        let line = self.tokens.get(start).map_or(0, |token| token.line);
        let mut at = start;
        loop {
            match self.text(at) {
                "::" => at += 1,
                "{" if in_use => {
                    at += 1;
                    while !["}", ""].contains(&self.text(at)) {
                        at = self.tree(at, &path, true);
                        if self.text(at) == "," {
                            at += 1;
                        }
                    }
                    return at + 1;
                }
                word if word == "*" || is_name(word) => {
                    path.push(word.to_owned());
                    at += 1;
                    if self.text(at) != "::" {
                        break;
                    }
                }
                // Such as `Vec::<T>`, or the end of a file that does not compile.
                _ => break,
            }
        }
        let mut name = path.last().cloned().unwrap_or_default();
        if in_use && self.text(at) == "as" {
            name = self.text(at + 1).to_owned();
            at += 2;
        }
        if let Some(path) = self.seen_from_root(&path) {
            self.found.imports.push(Import { path, line });
        }
        if in_use && !path.is_empty() {
            self.found.names.push((name, path));
        }
        // A token that no path begins with is stepped over, so that the reader always goes on.
        at.max(start + 1)
    }

    /// The path as seen from the root; nothing for one that begins with another crate or a name
    /// in scope.
    fn seen_from_root(&self, path: &[String]) -> Option<Vec<String>> {
        let mut place = match path.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => self.module.clone(),
            _ => return None,
        };
        for name in path {
            match name.as_str() {
                "crate" | "self" => {}
                "super" => drop(place.pop()),
                _ => place.push(name.clone()),
            }
        }
        Some(place)
    }

    /// Whether the word at `at` begins a path: `crate::x`, and neither `pub(crate)` nor `a.self`.
    fn begins_path(&self, at: usize) -> bool {
        self.text(at + 1) == "::" && (at == 0 || self.text(at - 1) != "::")
    }

    fn is_test_attribute(&self, at: usize) -> bool {
        ["#", "[", "cfg", "(", "test", ")", "]"]
            .iter()
            .zip(at..)
            .all(|(expected, at)| self.text(at) == *expected)
    }

    /// Where the item after `#[cfg(test)]` ends: at its semicolon, or where its braces close.
    fn after_test_item(&mut self, attribute: usize) -> usize {
        let mut depth = 0_usize;
        for at in attribute..self.tokens.len() {
            match self.text(at) {
                "{" => depth += 1,
                "}" if depth == 1 => return at + 1,
                "}" => depth = depth.saturating_sub(1),
                ";" if depth == 0 => return at + 1,
                "mod" if depth == 0 && self.text(at + 2) == ";" => {
                    let name = self.text(at + 1).to_owned();
                    self.found.test_modules.push(name);
                }
                _ => {}
            }
        }
        self.tokens.len()
    }

    fn text(&self, at: usize) -> &'a str {
        self.tokens.get(at).map_or("", |token| token.text)
    }
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths with their lines, as `line path`.
    fn imports(module: &[&str], text: &str) -> Vec<String> {
        let found = read(module, text).imports;
        found.iter().map(|import| format!("{} {}", import.line, import.path.join("::"))).collect()
    }

    #[test]
    fn groups_and_paths_in_expressions_are_read() {
        let text = "use crate::a;\nuse crate::{b::B, c::{self, D as E}, f::*};\n\
            fn g() -> crate::h::H { crate::i::J::new(crate::k::<u8>()) }\n";
        let expected = ["1 a", "2 b::B", "2 c", "2 c::D", "2 f::*", "3 h::H", "3 i::J::new", "3 k"];
        assert_eq!(imports(&["x"], text), expected);
    }

    #[test]
    fn super_leads_out_of_the_file_and_of_modules_written_out_in_it() {
        assert_eq!(imports(&["x"], "use super::a;\n"), ["1 a"]);
        assert_eq!(imports(&["x", "y"], "use super::{a, super::b};\n"), ["1 x::a", "1 b"]);
        let text = "mod inner {\n    use super::super::a;\n}\nuse self::b;\nuse super::c;\n";
        assert_eq!(imports(&["x"], text), ["2 a", "4 x::b", "5 c"]);
    }

    #[test]
    fn comments_strings_visibility_and_other_crates_are_no_imports() {
        let text = "// use crate::a;\n/* crate::b */\nlet s = \"crate::c\";\npub(crate) fn d() {}\n\
            use std::fmt;\nuse other::crate_like::E;\nlet f = self.g();\n";
        assert_eq!(imports(&["x"], text), Vec::<String>::new());
    }

    #[test]
    fn what_exists_in_tests_only_is_left_out() {
        let text = "#[cfg(test)]\nmod tests {\n    use crate::a;\n    fn f() { loop {} }\n}\n\
            #[cfg(test)]\nuse crate::b;\n#[cfg(test)]\n#[path = \"x\"]\nmod trials;\n\
            use crate::c;\n";
        assert_eq!(imports(&["x"], text), ["11 c"]);
        assert_eq!(read(&["x"], text).test_modules, ["trials"]);
    }

    #[test]
    fn names_that_use_makes_known_are_read() {
        let found = read(&[], "pub use model::{Model, ModelError as Error};\nuse data;\n");
        let names: Vec<_> =
            found.names.iter().map(|(name, path)| format!("{name}={}", path.join("::"))).collect();
        assert_eq!(names, ["Model=model::Model", "Error=model::ModelError", "data=data"]);
    }
}
