// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rules for Rust files.

use super::source::{code_only, is_word};
use super::{Document, Finding};

const SPDX: &str = "// SPDX-License-Identifier: MIT OR Apache-2.0";
/// Lines of a file before its test module.
const FILE_LINES: usize = 500;
/// Lines of a file with its tests, and of a file of tests.
const WHOLE_FILE_LINES: usize = 900;
const FUNCTION_LINES: usize = 70;
/// What a library must not do with its host's terminal.
const PRINTING: [&str; 5] = ["println!", "eprintln!", "print!", "eprint!", "dbg!"];
/// Where tests are that depend on the machine.
const MACHINE_TESTS: [&str; 3] = ["tests/tests/", "tests/softgpu/tests/", "bench/tests/"];

pub(super) fn check(document: &Document) -> Vec<Finding> {
    let code = code_only(&document.text);
    let file = File {
        document,
        code: code.lines().collect(),
        lines: document.text.lines().collect(),
        whole: &code,
        generated: document.text.lines().take(5).any(|line| line.contains("@generated")),
    };
    let mut findings = file.licence();
    if !file.generated {
        findings.extend(file.length());
        findings.extend(file.functions());
    }
    findings.extend(file.unsafety());
    findings.extend(file.printing());
    findings.extend(file.silent_skips());
    findings
}

/// One file, both as written and as code only, line by line.
struct File<'a> {
    document: &'a Document,
    lines: Vec<&'a str>,
    code: Vec<&'a str>,
    whole: &'a str,
    generated: bool,
}

impl File<'_> {
    fn licence(&self) -> Vec<Finding> {
        let first = self.lines.iter().find(|line| !line.starts_with("#!/"));
        if first == Some(&SPDX) {
            return Vec::new();
        }
        vec![self.document.finding(0, "spdx", format!("begin the file with `{SPDX}`"))]
    }

    fn length(&self) -> Vec<Finding> {
        let whole = self.lines.len();
        if whole > WHOLE_FILE_LINES {
            let advice =
                format!("{whole} lines, at most {WHOLE_FILE_LINES} with tests: move a part to its own file");
            return vec![self.document.finding(0, "file-length", advice)];
        }
        let lines = self.first_test_line();
        if is_test_file(&self.document.path) || lines <= FILE_LINES {
            return Vec::new();
        }
        let advice =
            format!("{lines} lines before the tests, at most {FILE_LINES}: move a part to its own file");
        vec![self.document.finding(0, "file-length", advice)]
    }

    /// Where the trailing `#[cfg(test)] mod tests` begins, or the number of lines.
    fn first_test_line(&self) -> usize {
        let attribute = self.code.iter().rposition(|line| *line == "#[cfg(test)]");
        let module = |line: usize| {
            let following = self.code.get(line + 1);
            following.is_some_and(|line| line.starts_with("mod ") && line.ends_with('{'))
        };
        attribute.filter(|line| module(*line)).unwrap_or(self.lines.len())
    }

    fn functions(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for start in words(self.whole, "fn") {
            let Some(name) = name_after(&self.whole[start + 2..]) else { continue };
            let Some(end) = body_end(&self.whole[start..]) else { continue };
            let line = line_of(self.whole, start);
            let length = line_of(self.whole, start + end) - line + 1;
            if length > FUNCTION_LINES {
                let advice = format!(
                    "`{name}` has {length} lines, at most {FUNCTION_LINES}: give a part of it a name"
                );
                findings.push(self.document.finding(line, "function-length", advice));
            }
        }
        findings
    }

    fn unsafety(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for start in words(self.whole, "unsafe") {
            let rest = self.whole[start + "unsafe".len()..].trim_start();
            let line = line_of(self.whole, start);
            let (what, wanted) = match promise(rest) {
                Some(Promise::Kept(what)) => (what, &["SAFETY:"][..]),
                Some(Promise::Asked(what)) if !self.in_trait_impl(line) => {
                    (what, &["# Safety", "SAFETY:"][..])
                }
                _ => continue,
            };
            if !self.explained(line, wanted) {
                let advice =
                    format!("say why it is sound in a comment with `{}` before the {what}", wanted[0]);
                findings.push(self.document.finding(line, "safety", advice));
            }
        }
        findings
    }

    /// Whether a comment right above the statement or item around `line`, or on the line itself, has one of the words.
    fn explained(&self, line: usize, wanted: &[&str]) -> bool {
        let says = |line: &str| wanted.iter().any(|word| line.contains(word));
        if says(self.lines[line]) && !says(self.code[line]) {
            return true;
        }
        for above in (0..line).rev() {
            let (text, code) = (self.lines[above].trim(), self.code[above].trim());
            if code.is_empty() && text.is_empty() {
                return false;
            }
            if code.is_empty() {
                if says(text) {
                    return true;
                }
            } else if code.ends_with([';', '{', '}']) {
                return false;
            }
        }
        false
    }

    /// Whether the item of `line` belongs to an `impl Trait for Type`: the trait has said what callers must hold.
    fn in_trait_impl(&self, line: usize) -> bool {
        let depth = indentation(self.code[line]);
        let outer =
            self.code[..line].iter().rfind(|code| !code.trim().is_empty() && indentation(code) < depth);
        outer.is_some_and(|code| !words(code, "impl").is_empty() && !words(code, "for").is_empty())
    }

    fn printing(&self) -> Vec<Finding> {
        let path = &self.document.path;
        let library = ["crates/", "plugin/"].iter().any(|folder| path.starts_with(folder))
            && !is_test_file(path)
            && !["/src/bin/", "/examples/", "/benches/", "/fuzz/"].iter().any(|folder| path.contains(folder))
            && !path.ends_with("/build.rs");
        let mut findings = Vec::new();
        if !library {
            return findings;
        }
        for (line, code) in self.code.iter().enumerate().take(self.first_test_line()) {
            let found = PRINTING.iter().find(|name| !words(code, name).is_empty());
            if let Some(name) = found {
                let advice =
                    format!("`{name}` in a library: return an error, or record an event with tracing");
                findings.push(self.document.finding(line, "printing", advice));
            }
        }
        findings
    }

    /// Tests that need a machine, and end without a word where it lacks something.
    fn silent_skips(&self) -> Vec<Finding> {
        let path = &self.document.path;
        if !MACHINE_TESTS.iter().any(|folder| path.starts_with(folder)) {
            return Vec::new();
        }
        let silent = |(_, code): &(usize, &&str)| code.trim_end().ends_with("else { return };");
        let advice = "say that the test does not run, and why: `need!` or `skip!` of rewake_skip";
        let found = self.code.iter().enumerate().filter(silent);
        found.map(|(line, _)| self.document.finding(line, "silent-skip", advice.to_owned())).collect()
    }
}

/// Who has to explain something unsafe.
enum Promise {
    /// The code that relies on it: why it holds.
    Kept(&'static str),
    /// The item that asks it of its callers: what they must hold.
    Asked(&'static str),
}

/// What the text after `unsafe` begins; none for function types, `extern` blocks and attributes.
fn promise(rest: &str) -> Option<Promise> {
    if rest.starts_with('{') {
        return Some(Promise::Kept("block"));
    }
    let mut words = rest.split(|c: char| c.is_whitespace()).filter(|word| !word.is_empty());
    match words.next()? {
        word if word.starts_with("impl") => Some(Promise::Kept("impl")),
        "trait" => Some(Promise::Asked("trait")),
        "fn" => Some(Promise::Asked("function")),
        "extern" => {
            // `unsafe extern "C" fn name(`; the ABI's name is blanked.
            let after = rest.strip_prefix("extern")?.trim_start().strip_prefix("fn")?;
            name_after(after).map(|_| Promise::Asked("function"))
        }
        _ => None,
    }
}

/// A test file of its own: `tests/*.rs` of a package, or a test module's file. The package `tests` is code.
fn is_test_file(path: &str) -> bool {
    let inside = path.strip_prefix("tests/").unwrap_or(path);
    inside.starts_with("tests/") || inside.contains("/tests/") || inside.ends_with("tests.rs")
}

/// Where `word` stands in `code` as a word of its own.
fn words(code: &str, word: &str) -> Vec<usize> {
    let bytes = code.as_bytes();
    let alone = |start: usize| {
        let before = start > 0 && is_word(bytes[start - 1]);
        let after = word.bytes().last().is_some_and(is_word)
            && bytes.get(start + word.len()).is_some_and(|byte| is_word(*byte));
        !before && !after
    };
    code.match_indices(word).map(|(start, _)| start).filter(|start| alone(*start)).collect()
}

/// The identifier that follows; none after a function pointer's `fn(` or a macro's `fn $name`.
fn name_after(rest: &str) -> Option<&str> {
    let rest = rest.trim_start();
    let end = rest.bytes().position(|byte| !is_word(byte)).unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

/// Where the body of the function that `code` begins with ends; none if it has no body.
fn body_end(code: &str) -> Option<usize> {
    let (mut nesting, mut braces) = (0_usize, 0_usize);
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'(' | b'[' => nesting += 1,
            b')' | b']' => nesting = nesting.saturating_sub(1),
            b';' if nesting == 0 && braces == 0 => return None,
            b'{' => braces += 1,
            b'}' if braces <= 1 => return (braces == 1).then_some(at),
            b'}' => braces -= 1,
            _ => {}
        }
    }
    None
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The line (from 0) of a position.
fn line_of(text: &str, position: usize) -> usize {
    text.as_bytes()[..position].iter().filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Findings of a file with the licence line and `text` below it, as `line rule`.
    fn found_in(path: &str, text: &str) -> Vec<String> {
        let document = Document { path: path.to_owned(), text: format!("{SPDX}\n{text}") };
        check(&document).iter().map(|finding| format!("{} {}", finding.line, finding.rule)).collect()
    }

    fn found(text: &str) -> Vec<String> {
        found_in("crates/a/src/lib.rs", text)
    }

    #[test]
    fn a_file_without_the_licence_line_is_found() {
        let document = Document { path: "a.rs".to_owned(), text: "//! Words.\n".to_owned() };
        assert_eq!(check(&document)[0].rule, "spdx");
        assert_eq!(found("//! Words.\n"), [""; 0]);
    }

    #[test]
    fn long_files_are_found_but_their_tests_do_not_count() {
        let tests = "#[cfg(test)]\nmod tests {\n}\n";
        assert_eq!(found(&"\n".repeat(500)), ["1 file-length"]);
        assert_eq!(found(&("\n".repeat(499) + tests)), [""; 0]);
        assert_eq!(found(&("\n".repeat(500) + tests)), ["1 file-length"]);
        let long_tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "\n".repeat(897));
        assert_eq!(found(&long_tests), ["1 file-length"]);
    }

    #[test]
    fn files_of_tests_may_be_longer_and_generated_files_as_long_as_they_are() {
        let text = "\n".repeat(800);
        assert_eq!(found_in("crates/a/tests/all.rs", &text), [""; 0]);
        assert_eq!(found_in("tests/tests/all.rs", &text), [""; 0]);
        assert_eq!(found_in("tests/src/all.rs", &text), ["1 file-length"]);
        assert_eq!(found(&format!("// @generated\n{}", "\n".repeat(2000))), [""; 0]);
    }

    #[test]
    fn long_functions_are_found_by_name_and_line() {
        let long = format!("struct S;\nfn long(a: [u8; 4]) {{\n{}}}\n", "    x();\n".repeat(69));
        let document = Document { path: "a.rs".to_owned(), text: format!("{SPDX}\n{long}") };
        let findings = check(&document);
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].line, findings[0].rule), (3, "function-length"));
        assert!(findings[0].advice.contains("`long` has 71 lines"), "{}", findings[0].advice);
        let fits = format!("fn fits() {{\n{}}}\n", "    x();\n".repeat(68));
        assert_eq!(found(&fits), [""; 0]);
    }

    #[test]
    fn braces_in_literals_and_functions_without_a_body_do_not_confuse_the_counter() {
        let text = format!(
            "trait T {{\n    fn declared(&self);\n}}\nfn short() {{ f(\"{{\"); }}\n{}",
            "const X: u8 = 1;\n".repeat(80)
        );
        assert_eq!(found(&text), [""; 0]);
    }

    #[test]
    fn unsafe_code_without_a_reason_is_found() {
        assert_eq!(found("fn f() {\n    unsafe { g() };\n}\n"), ["3 safety"]);
        assert_eq!(found("unsafe impl Send for S {}\n"), ["2 safety"]);
        assert_eq!(found("/// Words.\nunsafe fn f() {}\n"), ["3 safety"]);
        assert_eq!(found("/// Words.\npub unsafe extern \"C\" fn f() {}\n"), ["3 safety"]);
        assert_eq!(
            found("fn f() {\n    // SAFETY: of another.\n    a();\n    unsafe { g() };\n}\n"),
            ["5 safety"]
        );
    }

    #[test]
    fn unsafe_code_with_a_reason_is_fine() {
        let texts = [
            "fn f() {\n    // SAFETY: it holds,\n    // and why.\n    let x =\n        unsafe { g() };\n}\n",
            "fn f() {\n    // SAFETY: it holds.\n    match unsafe { g() } {\n        _ => {}\n    }\n}\n",
            "// SAFETY: System.\nunsafe impl GlobalAlloc for S {\n    unsafe fn alloc(&self) {}\n\n    unsafe fn free(&self) {}\n}\n",
            "// SAFETY: no state.\nunsafe impl Send for S {}\n",
            "/// Words.\n///\n/// # Safety\n/// The pointer lives.\n#[inline]\npub unsafe fn f() {}\n",
            "type F = unsafe fn(u32);\ntype G = unsafe extern \"C\" fn();\nunsafe extern \"C\" {}\n#[unsafe(no_mangle)]\nfn f() {}\n",
            "// the word unsafe { in a comment, and\nconst A: &str = \"unsafe {\";\n",
        ];
        for text in texts {
            assert_eq!(found(text), [""; 0], "{text}");
        }
    }

    #[test]
    fn a_test_that_ends_without_a_word_is_found() {
        let text = "fn f() {\n    let Some(x) = x() else { return };\n}\n";
        assert_eq!(found_in("tests/softgpu/tests/a.rs", text), ["3 silent-skip"]);
        assert_eq!(found_in("tests/softgpu/tests/a.rs", "fn f() {\n    let x = need!(x());\n}\n"), [""; 0]);
        assert_eq!(found_in("crates/a/src/a.rs", text), [""; 0]);
    }

    #[test]
    fn printing_is_found_in_libraries_only() {
        let text = "fn f() {\n    println!(\"x\");\n}\n";
        assert_eq!(found(text), ["3 printing"]);
        assert_eq!(found("fn f() {\n    dbg!(1);\n}\n"), ["3 printing"]);
        assert_eq!(found_in("page-server/src/main.rs", text), [""; 0]);
        assert_eq!(found_in("crates/a/tests/all.rs", text), [""; 0]);
        assert_eq!(found_in("crates/a/build.rs", text), [""; 0]);
        assert_eq!(
            found("#[cfg(test)]\nmod tests {\n    fn f() {\n        println!();\n    }\n}\n"),
            [""; 0]
        );
    }
}
