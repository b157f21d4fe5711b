//! `unsafe` only in named files, and only with its proof above it.

use super::reader::code_only;

/// Files that may contain `unsafe`, each with the reason.
const UNSAFE_FILES: &[(&str, &str)] = &[
    (
        "crates/poseidon/src/memory/buffer.rs",
        "lanes read and write the training program's own tensors",
    ),
    ("crates/poseidon/src/memory/exchange.rs", "the same tensors, chunk by chunk"),
    ("crates/poseidon/src/memory/factors.rs", "the matrices where factors meet, block by block"),
    ("crates/poseidon/src/session/layers.rs", "the same, when they are rebuilt"),
    ("crates/poseidon/src/session/factors.rs", "the same, when a worker's own rows are written"),
    ("crates/poseidon/src/lane/plan_state/gathering.rs", "says which rows belong to a lane"),
    ("crates/poseidon/src/lane/plan_state.rs", "says which chunks and rows belong to a lane"),
    ("crates/poseidon/src/lane/mod.rs", "promises which memory an engine is given"),
    ("crates/poseidon/src/engine/channel.rs", "the promise of whoever gives memory to an engine"),
    ("crates/poseidon/src/engine/tests.rs", "the same, of a channel without memory"),
    ("crates/poseidon/src/engine/peer/aside.rs", "regions that payloads are copied to"),
    ("crates/poseidon/src/collectives/tensor.rs", "tensors of a collective, by address"),
    ("crates/poseidon/src/collectives/operation.rs", "regions of them, as an operation goes on"),
    ("crates/poseidon/src/collectives/flow.rs", "regions of them, and of scratch for their sums"),
    (
        "crates/poseidon/src/collectives/device.rs",
        "the same on a device, and where they are staged",
    ),
    ("crates/poseidon/src/collectives/channel.rs", "regions of them that frames are added to"),
    ("crates/poseidon/src/memory/region.rs", "bytes that were lent, by address"),
    ("crates/poseidon/src/engine/peer.rs", "regions that links are read into"),
    ("crates/poseidon/src/engine/outbox.rs", "regions that links are written from"),
    ("crates/poseidon/src/session/replan.rs", "lends an update rule's vectors to a group"),
    ("crates/poseidon/tests/it/group.rs", "lends tensors to a group"),
    ("crates/poseidon/tests/it/engine.rs", "lends tensors to a group"),
    ("crates/poseidon/src/collectives/tests.rs", "lends tensors to a group"),
    ("crates/poseidon/src/collectives/tests/flows.rs", "lends tensors to operations"),
    ("crates/poseidon/src/session/device.rs", "stages that a device copies to and from"),
    ("crates/poseidon/src/memory/on_device.rs", "tensors on a device, by address"),
    ("crates/poseidon/tests/it/device.rs", "lends memory of a device that is made of host memory"),
    ("crates/device/src/lib.rs", "what is asked of a device: copies, by address"),
    ("crates/device/src/cuda.rs", "calls of CUDA's driver"),
    ("crates/device/src/late.rs", "a device made of host memory"),
    ("crates/device/src/copier.rs", "orders copies"),
    ("crates/device/src/copier/tests.rs", "the same"),
    ("crates/device/src/pinned.rs", "memory that a device copies to and from"),
    ("crates/device/src/speed.rs", "orders copies, to time them"),
    ("bindings/python/src/device.rs", "tensors of Python programs, by address"),
    ("crates/matrix/src/vectors.rs", "a call of gemm, which takes addresses"),
    ("crates/matrix/src/tiles.rs", "threads that write to columns of one matrix"),
    ("crates/matrix/src/tiles/unit.rs", "instructions that the compiler does not know"),
    ("crates/matrix/src/tiles/pack.rs", "vector instructions"),
    ("crates/nn/src/data/lmdb.rs", "tests write databases with LMDB's own library"),
    ("crates/poseidon/tests/fork.rs", "forks"),
    ("crates/poseidon/tests/allocations.rs", "an allocator that counts"),
    ("crates/cli/src/supervise/heap.rs", "a call of the C library, with two numbers"),
    ("bindings/python/src/lib.rs", "tensors of Python programs, by address"),
    ("bindings/python/src/group.rs", "the same, for collectives"),
    ("crates/link/src/shared.rs", "rings in memory two processes share"),
    ("crates/link/src/shared/access.rs", "the bytes of these rings, by address"),
    ("crates/link/src/shared/ring.rs", "copies from and to them"),
    ("crates/link/src/shared/model.rs", "the same, with cells that loom watches"),
    ("crates/poseidon/src/lane/board_model.rs", "memory of lanes, as cells that loom watches"),
    (
        "crates/poseidon/src/memory/landings_model.rs",
        "memory of chunks, as cells that loom watches",
    ),
    ("crates/poseidon/src/collectives/fuzzed.rs", "lends tensors to a group"),
    ("crates/link/src/window.rs", "options of sockets"),
    ("crates/link/src/past_cache.rs", "writes that do not pass through the cache"),
    ("crates/cli/src/bench/payload/tensor.rs", "lends a tensor to a group"),
    ("crates/cli/src/orphan.rs", "a hook between fork and exec"),
    ("crates/cli/src/lab/namespace.rs", "namespaces, and a hook between fork and exec"),
    ("crates/cli/src/lab/tap.rs", "a request to the kernel that makes a network interface"),
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
