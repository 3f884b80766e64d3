// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask figures`: counts that describe the structure of the product. Tests, benchmarks and generated
//! code do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::tidy::{self, rust::first_test_line};
use crate::{files, repository};

/// Folders of the product.
const PRODUCT: [&str; 3] = ["crates", "plugin", "page-server"];
/// Folders and files inside them that are not part of the product.
const OTHERS: [&str; 5] = ["tests", "generated", "generated.rs", "tests.rs", "examples"];

/// Names that one type of each crate may have, with the reason.
const CONVENTIONS: [(&str, &str); 1] =
    [("Error", "the error of a library crate, as in the standard library")];

/// A product file without its tests.
struct Source {
    /// Relative to the root.
    path: PathBuf,
    /// The crate's `src` folder.
    home: PathBuf,
    text: String,
}

/// Prints the counts.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn run() -> anyhow::Result<()> {
    let root = repository::root();
    let sources = sources(root)?;
    let lines: usize = sources.iter().map(|source| source.text.lines().count()).sum();
    println!("{lines} product lines of Rust in {} files", sources.len());
    let mut names = names(&sources);
    for (name, reason) in CONVENTIONS {
        let places = names.get(name).map_or(&[][..], Vec::as_slice);
        let crates: BTreeSet<_> = places.iter().map(|place| place.split("/src/").next()).collect();
        println!("{} crates have a type named {name}: {reason}", crates.len());
        if crates.len() == places.len() {
            names.remove(name);
        }
    }
    println!("{} type names that several types have", names.len());
    for (name, places) in names {
        println!("  {name}: {}", places.join(", "));
    }
    let circles = circles(&sources);
    println!("{} import circles of more than two files", circles.len());
    for circle in circles {
        println!("  {}", circle.join(", "));
    }
    Ok(())
}

/// The product's files, in order.
fn sources(root: &Path) -> anyhow::Result<Vec<Source>> {
    let mut sources = Vec::new();
    for path in tidy::files(root)? {
        let inside = path.strip_prefix(root).unwrap_or(&path);
        let is_product = PRODUCT.iter().any(|folder| inside.starts_with(folder))
            && inside.extension().is_some_and(|extension| extension == "rs")
            && !inside.iter().any(|name| OTHERS.iter().any(|other| name == *other));
        let Some(home) = inside.ancestors().find(|above| above.ends_with("src")).filter(|_| is_product)
        else {
            continue;
        };
        let text = files::read(&path)?;
        let lines: Vec<&str> = text.lines().collect();
        let text = lines[..first_test_line(&lines)].join("\n");
        sources.push(Source { path: inside.to_owned(), home: home.to_owned(), text });
    }
    Ok(sources)
}

/// Names that several structs, enums or traits of the product have, with their files.
fn names(sources: &[Source]) -> BTreeMap<String, Vec<String>> {
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources {
        for line in source.text.lines() {
            let item = line.trim_start().trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
            let item = item.strip_prefix("pub ").unwrap_or(item);
            let kinds = ["struct ", "enum ", "trait ", "unsafe trait ", "union "];
            let Some(rest) = kinds.iter().find_map(|kind| item.strip_prefix(kind)) else { continue };
            let name: String = rest.chars().take_while(|letter| letter.is_alphanumeric()).collect();
            if name.is_empty() {
                continue;
            }
            names.entry(name).or_default().push(source.path.display().to_string());
        }
    }
    names.retain(|_, places| places.len() > 1);
    names
}

/// Groups of more than two files of a crate that import each other in a circle. A module and its submodules
/// count as one: imports between them are ignored.
fn circles(sources: &[Source]) -> Vec<Vec<String>> {
    let files: BTreeMap<Vec<String>, usize> =
        sources.iter().enumerate().map(|(at, source)| (module(source), at)).collect();
    let imports: Vec<BTreeSet<usize>> =
        sources.iter().enumerate().map(|(at, source)| imports_of(at, source, &files)).collect();
    let reachable: Vec<BTreeSet<usize>> = (0..sources.len()).map(|from| reach(from, &imports)).collect();
    let mut seen = BTreeSet::new();
    let mut circles = Vec::new();
    for from in 0..sources.len() {
        let circle: Vec<usize> =
            reachable[from].iter().copied().filter(|to| reachable[*to].contains(&from)).collect();
        if circle.len() > 2 && seen.insert(circle.clone()) {
            circles.push(circle.iter().map(|at| sources[*at].path.display().to_string()).collect());
        }
    }
    circles
}

/// A file's module: its crate's folder and the names from there.
fn module(source: &Source) -> Vec<String> {
    let inside = source.path.strip_prefix(&source.home).unwrap_or(&source.path).with_extension("");
    let names = inside.iter().map(|name| name.to_string_lossy().into_owned());
    let names = names.filter(|name| !matches!(name.as_str(), "mod" | "lib" | "main"));
    std::iter::once(source.home.display().to_string()).chain(names).collect()
}

fn imports_of(at: usize, source: &Source, files: &BTreeMap<Vec<String>, usize>) -> BTreeSet<usize> {
    let own = module(source);
    let mut found = BTreeSet::new();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let code: String = source.text.lines().filter(is_code).flat_map(|line| [line, "\n"]).collect();
    for (prefix, base) in [("crate::", 1), ("super::", own.len().saturating_sub(1))] {
        for (start, _) in code.match_indices(prefix) {
            let before = code[..start].chars().next_back();
            if before.is_some_and(|letter| letter.is_alphanumeric() || letter == ':' || letter == '_') {
                continue;
            }
            let rest = &code[start + prefix.len()..];
            let path: String = rest
                .chars()
                .take_while(|letter| letter.is_alphanumeric() || "_:".contains(*letter))
                .collect();
            let mut target: Vec<String> = own[..base].to_vec();
            target.extend(path.split("::").filter(|name| !name.is_empty()).map(str::to_owned));
            while target.len() > 1 && !files.contains_key(&target) {
                target.pop();
            }
            let house = target.starts_with(&own) || own.starts_with(&target);
            found.extend(files.get(&target).filter(|to| **to != at && !house));
        }
    }
    found
}

fn reach(from: usize, imports: &[BTreeSet<usize>]) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    let mut next = vec![from];
    while let Some(at) = next.pop() {
        next.extend(imports[at].iter().copied().filter(|to| found.insert(*to)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(name: &str, text: &str) -> Source {
        let home = PathBuf::from("crates/a/src");
        Source { path: home.join(name), home, text: text.to_owned() }
    }

    #[test]
    fn three_files_that_import_each_other_are_a_circle() {
        let mut sources = [
            source("lib.rs", "mod a; mod b; mod c;"),
            source("a.rs", "use crate::b::B;\nstruct A;"),
            source("b.rs", "use super::c::{C, D};\npub struct B;"),
            source("c.rs", "use crate::a::A;\npub(crate) enum A {}"),
        ];
        let [circle] = &circles(&sources)[..] else { panic!() };
        assert_eq!(circle.len(), 3);
        assert_eq!(names(&sources)["A"].len(), 2);
        sources[3].text.clear();
        assert_eq!(circles(&sources).len() + names(&sources).len(), 0);
    }
}
