// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rules for Rust files, line by line. Clippy has those for functions and for unsafe code (`clippy.toml`, and
//! `[workspace.lints]` in `Cargo.toml`).

use super::{Document, Finding};

const SPDX: &str = "// SPDX-License-Identifier: MIT OR Apache-2.0";
/// Lines of a file before its test module.
const FILE_LINES: usize = 500;
/// Lines of a file with its tests, and of a file of tests.
const WHOLE_FILE_LINES: usize = 900;
/// Characters of a line: `max_width` in `rustfmt.toml`, because rustfmt does not wrap comments, strings and
/// arguments of macros.
const WIDTH: usize = 110;
/// Characters of a test's name.
const NAME: usize = 60;
/// Macros that print, and panic when the terminal or the pipe is closed.
const PRINTING: [&str; 5] = ["println!", "eprintln!", "print!", "eprint!", "dbg!"];
/// Files of `/proc` with numbers and words of the kernel's only: neither a program nor a user chooses a byte
/// of them.
const NUMBERS: [&str; 10] = [
    "/children",
    "/cpuinfo",
    "/limits",
    "/meminfo",
    "/net/{name}",
    "/schedstat",
    "/smaps_rollup",
    "/statm",
    "/sys/",
    "/syscall",
];
/// Lines up to a read in which its path may be made.
const PATH_LINES: usize = 8;
/// Folders of tests that depend on the machine.
const MACHINE_TESTS: [&str; 3] = ["tests/tests/", "tests/softgpu/tests/", "bench/tests/"];

pub(super) fn check(document: &Document) -> Vec<Finding> {
    let lines: Vec<&str> = document.text.lines().collect();
    let mut findings = Vec::new();
    findings.extend(licence(document, &lines));
    if !lines.iter().take(5).any(|line| line.contains("@generated")) {
        findings.extend(length(document, &lines));
        findings.extend(wide_lines(document, &lines));
    }
    findings.extend(printing(document, &lines));
    findings.extend(silent_skips(document, &lines));
    findings.extend(long_names(document, &lines));
    findings.extend(text_of_proc(document, &lines));
    findings
}

fn licence(document: &Document, lines: &[&str]) -> Option<Finding> {
    let first = lines.iter().find(|line| !line.starts_with("#!/"));
    (first != Some(&SPDX)).then(|| document.finding(0, "spdx", format!("begin the file with `{SPDX}`")))
}

fn length(document: &Document, lines: &[&str]) -> Option<Finding> {
    let (whole, before) = (lines.len(), first_test_line(lines));
    let too_long = if whole > WHOLE_FILE_LINES {
        format!("{whole} lines, at most {WHOLE_FILE_LINES} with tests")
    } else if before > FILE_LINES && !is_test_file(&document.path) {
        format!("{before} lines before the tests, at most {FILE_LINES}")
    } else {
        return None;
    };
    Some(document.finding(0, "file-length", format!("{too_long}: move a part to its own file")))
}

/// Lines that are too wide, except for the text of raw strings, which has no line breaks of its own.
fn wide_lines(document: &Document, lines: &[&str]) -> Vec<Finding> {
    let width = |line: &str| line.chars().count();
    let mut is_raw = false;
    let mut findings = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let has_raw = is_raw || opens_raw_string(line);
        is_raw = if is_raw { !line.contains("\"#") } else { leaves_raw_string_open(line) };
        if !has_raw && width(line) > WIDTH {
            let advice = format!("{} characters, at most {WIDTH}: wrap the line", width(line));
            findings.push(document.finding(number, "width", advice));
        }
    }
    findings
}

fn opens_raw_string(line: &str) -> bool {
    line.contains("r#\"") && !line.trim_start().starts_with("//")
}

fn leaves_raw_string_open(line: &str) -> bool {
    opens_raw_string(line) && line.rsplit("r#\"").next().is_some_and(|rest| !rest.contains("\"#"))
}

/// Where the trailing `#[cfg(test)] mod tests` begins, or the number of lines.
pub(crate) fn first_test_line(lines: &[&str]) -> usize {
    let module =
        |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{');
    lines.windows(2).rposition(module).unwrap_or(lines.len())
}

fn printing(document: &Document, lines: &[&str]) -> Vec<Finding> {
    let path = &document.path;
    let product = ["crates/", "plugin/", "page-server/"].iter().any(|folder| path.starts_with(folder))
        && !is_test_file(path)
        && !["/src/bin/", "/examples/", "/benches/", "/fuzz/"].iter().any(|folder| path.contains(folder))
        && !path.ends_with("/build.rs");
    if !product {
        return Vec::new();
    }
    let code = lines.iter().take(first_test_line(lines)).enumerate();
    let found = code.filter_map(|(number, line)| {
        let code = line.split("//").next().unwrap_or_default();
        let macros = PRINTING.iter().find(|name| code.contains(**name))?;
        let advice = format!(
            "`{macros}` panics when its pipe is closed: return an error, record an event with tracing, or \
             say it as commands/print.rs does"
        );
        Some(document.finding(number, "printing", advice))
    });
    found.collect()
}

/// Tests that need a machine, and end without output where it lacks something.
fn silent_skips(document: &Document, lines: &[&str]) -> Vec<Finding> {
    if !MACHINE_TESTS.iter().any(|folder| document.path.starts_with(folder)) {
        return Vec::new();
    }
    let silent = |(_, line): &(usize, &&str)| line.trim_end().ends_with("else { return };");
    let advice = "say that the test does not run, and why: `need!` or `skip!` of rewake_skip";
    let found = lines.iter().enumerate().filter(silent);
    found.map(|(number, _)| document.finding(number, "silent-skip", advice)).collect()
}

/// Tests with names that fill a line of a report.
fn long_names(document: &Document, lines: &[&str]) -> Vec<Finding> {
    let in_tests = document.path.starts_with("tests/");
    let name = |line: &str| line.trim_start().strip_prefix("fn ")?.split(['(', '<']).next().map(str::len);
    let is_long = |line: &str| in_tests && name(line).is_some_and(|length| length > NAME);
    let found = lines.iter().enumerate().filter(|(_, line)| is_long(line));
    found.map(|(number, _)| document.finding(number, "long-name", "at most 60 characters")).collect()
}

/// Reads of `/proc` as text: they fail where a program or a file has a name that is not UTF-8.
fn text_of_proc(document: &Document, lines: &[&str]) -> Vec<Finding> {
    let path = &document.path;
    let is_product = ["crates/", "page-server/", "plugin/"].iter().any(|folder| path.starts_with(folder));
    if !is_product || is_test_file(path) {
        return Vec::new();
    }
    let code = &lines[..first_test_line(lines)];
    let may_have_names = |read: &usize| {
        let above = code[(read + 1).saturating_sub(PATH_LINES)..=*read].iter().rev();
        let path = above.copied().find(|line| line.contains("\"/proc"));
        let path = path.filter(|_| code[*read].contains("read_to_string("));
        path.is_some_and(|path| !NUMBERS.iter().any(|file| path.contains(file)))
    };
    let advice = "names in /proc are bytes: read it with `fs::read` and `rewake_process::names`";
    let found = (0..code.len()).filter(may_have_names);
    found.map(|number| document.finding(number, "text-of-proc", advice)).collect()
}

/// A test file of its own: `tests/*.rs` of a package, or a test module's file. The package `tests` is code.
fn is_test_file(path: &str) -> bool {
    let inside = path.strip_prefix("tests/").unwrap_or(path);
    inside.starts_with("tests/") || inside.contains("/tests/") || inside.ends_with("tests.rs")
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
    fn a_test_that_ends_without_a_word_is_found() {
        let text = "fn f() {\n    let Some(x) = x() else { return };\n}\n";
        assert_eq!(found_in("tests/softgpu/tests/a.rs", text), ["3 silent-skip"]);
        assert_eq!(found_in("tests/softgpu/tests/a.rs", "fn f() {\n    let x = need!(x());\n}\n"), [""; 0]);
        assert_eq!(found_in("crates/a/src/a.rs", text), [""; 0]);
    }

    #[test]
    fn a_test_with_a_long_name_is_found() {
        let named = |length| format!("fn {}() {{}}\n", "a".repeat(length));
        assert_eq!(found_in("tests/tests/a.rs", &named(61)), ["2 long-name"]);
        assert_eq!(found_in("tests/tests/a.rs", &named(60)), [""; 0]);
    }

    #[test]
    fn lines_of_code_and_comments_that_are_too_wide_are_found() {
        for begin in ["    // ", "    a(\"", "/// | a "] {
            let line = |length| format!("{begin}{}\n", "é".repeat(length - begin.len()));
            assert_eq!(found(&line(WIDTH + 1)), ["2 width"], "{begin}");
            assert_eq!(found(&line(WIDTH)), [""; 0], "{begin}");
            assert_eq!(found(&format!("// @generated\n{}", line(WIDTH + 1))), [""; 0], "{begin}");
        }
    }

    #[test]
    fn texts_of_raw_strings_may_be_wide() {
        let wide = "a".repeat(WIDTH);
        let raw = format!("const A: &str = r#\"{wide}\n{wide} a\n{wide}\"#;\n");
        assert_eq!(found(&raw), [""; 0]);
        assert_eq!(found(&format!("const A: &str = r#\"{wide}\"#;\n// {wide}\n")), ["3 width"]);
        assert_eq!(found(&format!("{raw}// {wide}\n")), ["5 width"]);
    }

    #[test]
    fn a_file_of_proc_with_names_is_not_read_as_text() {
        let read =
            |path: &str| format!("fn f() {{\n    let path = {path:?};\n    fs::read_to_string(&path);\n}}\n");
        for path in ["/proc/{pid}/status", "/proc/{pid}/comm", "/proc/self/mounts"] {
            assert_eq!(found(&read(path)), ["4 text-of-proc"], "{path}");
        }
        for path in ["/proc/{pid}/statm", "/proc/sys/kernel/osrelease", "/etc/os-release"] {
            assert_eq!(found(&read(path)), [""; 0], "{path}");
        }
        assert_eq!(found_in("xtask/src/a.rs", &read("/proc/self/status")), [""; 0]);
        assert_eq!(found_in("crates/a/tests/a.rs", &read("/proc/self/status")), [""; 0]);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", read("/proc/self/status"));
        assert_eq!(found(&tests), [""; 0]);
    }

    #[test]
    fn printing_is_found_where_a_closed_pipe_must_cost_nothing() {
        let text = "fn f() {\n    println!(\"x\");\n}\n";
        assert_eq!(found(text), ["3 printing"]);
        assert_eq!(found("fn f() {\n    dbg!(1);\n}\n"), ["3 printing"]);
        assert_eq!(found_in("page-server/src/main.rs", text), ["3 printing"]);
        assert_eq!(found("fn f() {\n    Err(error) => eprintln!(\"x\"),\n}\n"), ["3 printing"]);
        assert_eq!(found_in("xtask/src/main.rs", text), [""; 0]);
        assert_eq!(found_in("crates/a/tests/all.rs", text), [""; 0]);
        assert_eq!(found_in("crates/a/build.rs", text), [""; 0]);
        assert_eq!(
            found("#[cfg(test)]\nmod tests {\n    fn f() {\n        println!();\n    }\n}\n"),
            [""; 0]
        );
    }
}
