// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that documents name, as `MODULE::TEST`, exist in a file of that module.

use super::text::inline_code;
use super::{Document, Finding};

/// Underscores that the name of a test has at least. Functions of the product have shorter names.
const UNDERSCORES: usize = 2;

pub(super) fn check(document: &Document, all: &[Document]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in document.text.lines().enumerate() {
        for name in inline_code(line) {
            let Some((module, test)) = module_and_test(name) else { continue };
            if !all.iter().any(|source| is_of(source, module) && source.text.contains(test)) {
                let advice =
                    format!("no file of module {module} has a test {test}: name the one that exists");
                findings.push(document.finding(number, "named-test", advice));
            }
        }
    }
    findings
}

fn module_and_test(name: &str) -> Option<(&str, &str)> {
    let (path, test) = name.rsplit_once("::")?;
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
    let is_test = name.chars().all(is_plain) && test.matches('_').count() >= UNDERSCORES;
    is_test.then(|| (path.rsplit("::").next().unwrap_or(path), test))
}

/// Whether a file is the module, or is in the module's folder.
fn is_of(source: &Document, module: &str) -> bool {
    let Some(path) = source.path.strip_suffix(".rs") else { return false };
    path.split('/').any(|part| part == module)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(path: &str, text: &str) -> Document {
        Document { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn a_test_that_a_document_names_is_in_its_module() {
        let sources =
            [document("tests/a/here.rs", "fn it_is_there() {}"), document("b/c.rs", "fn a_b_c() {}")];
        let found = |text: &str| check(&document("docs/x.md", text), &sources).len();
        assert_eq!(found("`here::it_is_there`, `e2e::here::it_is_there`, and `c::a_b_c`"), 0);
        assert_eq!(found("`here::it_was_there`, `elsewhere::it_is_there`"), 2);
        assert_eq!(found("`crate::sys::pidfd`, `fetch::FINISH_LIMIT_OF_IT`, `a b::it_is_not_code`"), 0);
    }
}
