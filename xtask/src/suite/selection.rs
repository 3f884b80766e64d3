// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which packages have tests of a name, from the sources: `cargo xtask test NAME` builds only those.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path};

use crate::vm::PROGRAM;
use crate::{files, repository, tidy};

/// Test programs that start programs of other packages.
const START_OTHERS: [&str; 3] = ["bench", "e2e", PROGRAM];

/// Where tests of a name are.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// Packages that need nothing but themselves.
    pub(crate) packages: BTreeSet<String>,
    /// Test programs that start programs of other packages, so that the set-up and these programs are needed.
    pub(crate) programs: BTreeSet<String>,
}

/// Finds the tests whose `PROGRAM::MODULE::TEST` contains the filter.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn of(filter: &str) -> anyhow::Result<Selection> {
    let root = repository::root();
    let mut selection = Selection::default();
    for path in tidy::files(root)? {
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = files::read(&path)?;
        let Some(file) = File::of(path.strip_prefix(root).unwrap_or(&path)) else { continue };
        let manifest = root.join(&file.package).join("Cargo.toml");
        let Ok(manifest) = fs::read_to_string(manifest) else { continue };
        let name = manifest.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
        let Some(name) = name else { continue };
        // Tests inside a package are tests of a program with the package's name.
        let program = file.program.clone().unwrap_or_else(|| name.replace('-', "_"));
        if !names(&text)
            .any(|test| paths(&program, &file.module, test).iter().any(|path| path.contains(filter)))
        {
            continue;
        }
        if file.program.is_some_and(|program| START_OTHERS.contains(&program.as_str())) {
            selection.programs.insert(program);
        } else {
            selection.packages.insert(name.to_owned());
        }
    }
    Ok(selection)
}

/// A source file's place.
#[derive(Debug, PartialEq, Eq)]
struct File {
    /// The package's folder.
    package: String,
    /// The test program from outside; None for a file of the package's own code.
    program: Option<String>,
    /// The modules that lead to it, joined by `::`.
    module: String,
}

impl File {
    /// `PACKAGE/src/a/b.rs`, `PACKAGE/tests/PROGRAM/a.rs` or `PACKAGE/tests/PROGRAM.rs`.
    fn of(path: &Path) -> Option<Self> {
        let parts: Vec<&str> = path
            .components()
            .filter_map(|part| match part {
                Component::Normal(name) => name.to_str(),
                _ => None,
            })
            .collect();
        // The last one: the package `tests` has a folder `tests`.
        let place = parts.iter().rposition(|part| *part == "src" || *part == "tests")?;
        let modules = parts[place + 1..].iter().map(|part| part.strip_suffix(".rs").unwrap_or(part));
        let mut modules: Vec<&str> = modules.collect();
        let program = (parts[place] == "tests" && !modules.is_empty()).then(|| modules.remove(0).to_owned());
        modules.retain(|module| !matches!(*module, "mod" | "lib" | "main"));
        Some(Self { package: parts[..place].join("/"), program, module: modules.join("::") })
    }
}

/// The test's path, as far as its file shows it: a module inside the file is not known, except for `tests`.
fn paths(program: &str, module: &str, test: &str) -> [String; 2] {
    ["", "tests"].map(|inside| {
        let parts = [program, module, inside, test];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("::")
    })
}

/// The names of the functions that are tests.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let mut is_test = false;
    text.lines().filter_map(move |line| {
        let line = line.trim();
        is_test |= line == "#[test]";
        let name = line.split_once("fn ").and_then(|(_, rest)| rest.split_once('(')).map(|(name, _)| name)?;
        std::mem::take(&mut is_test).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_s_place_gives_program_and_module() {
        let of = |path: &str| {
            let file = File::of(Path::new(path)).unwrap();
            format!("{} {} {}", file.package, file.program.unwrap_or_default(), file.module)
        };
        assert_eq!(of("tests/tests/e2e/serve.rs"), "tests e2e serve");
        assert_eq!(of("tests/softgpu/tests/gpu/copy_engine/life.rs"), "tests/softgpu gpu copy_engine::life");
        assert_eq!(of("crates/criu-tls/tests/handshakes.rs"), "crates/criu-tls handshakes ");
        assert_eq!(of("crates/streamer/src/cpu/space.rs"), "crates/streamer  cpu::space");
    }

    #[test]
    fn tests_are_the_functions_after_the_attribute() {
        let text =
            "fn no() {}\n#[test]\n#[ignore]\nfn one() {\n}\n  fn helper() {}\n  #[test]\n  fn two() {}\n";
        assert_eq!(names(text).collect::<Vec<_>>(), ["one", "two"]);
    }

    #[test]
    fn this_test_is_found_where_it_is() {
        let selection = of("xtask::suite::selection::tests::this_test_is_found").unwrap();
        assert_eq!(Vec::from_iter(&selection.packages), ["xtask"]);
        assert!(selection.programs.is_empty());
        assert_eq!(Vec::from_iter(&of("e2e::serve::").unwrap().programs), ["e2e"]);
    }
}
