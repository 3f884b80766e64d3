// SPDX-License-Identifier: MIT OR Apache-2.0
//! The software bill of materials of the package, in CycloneDX's format: every library that is linked in.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::{program, repository};

/// Describes the libraries of the program and of the plugins.
pub(super) fn of_workspace(version: &str) -> anyhow::Result<String> {
    let mut cargo = repository::cargo();
    cargo.args(["tree", "--edges", "normal", "--prefix", "none", "--format", "{p}|{l}"]);
    for package in ["rewake", "rewake_plugin", "amdgpu_plugin"] {
        cargo.args(["--package", package]);
    }
    Ok(bill(version, &program::capture(&mut cargo)?))
}

/// Makes the bill of cargo's lines: `NAME vVERSION (MORE)|LICENCE`. A package of this workspace names its
/// folder, and is not listed.
fn bill(version: &str, lines: &str) -> String {
    let libraries: BTreeSet<(&str, &str, &str)> = lines.lines().filter_map(library).collect();
    let mut components = String::new();
    for (name, version, licence) in libraries {
        let comma = if components.is_empty() { "" } else { "," };
        let licence = licence.replace('/', " OR ");
        let _ = write!(
            components,
            "{comma}\n    {{\"type\": \"library\", \"name\": \"{name}\", \"version\": \"{version}\", \
             \"purl\": \"pkg:cargo/{name}@{version}\", \"licenses\": [{{\"expression\": \"{licence}\"}}]}}"
        );
    }
    let own = format!(
        "{{\"type\": \"application\", \"name\": \"rewake\", \"version\": \"{version}\", \"licenses\": \
         [{{\"expression\": \"MIT OR Apache-2.0\"}}]}}"
    );
    format!(
        "{{\n  \"bomFormat\": \"CycloneDX\",\n  \"specVersion\": \"1.5\",\n  \"version\": 1,\n  \
         \"metadata\": {{\"component\": {own}}},\n  \"components\": [{components}\n  ]\n}}\n"
    )
}

/// Reads a line of cargo's.
fn library(line: &str) -> Option<(&str, &str, &str)> {
    let (package, licence) = line.split_once('|')?;
    let licence = licence.trim_end_matches(" (*)");
    let (name, rest) = package.split_once(" v")?;
    let (version, more) = rest.split_once(' ').unwrap_or((rest, ""));
    (!more.contains('/')).then_some((name, version, licence))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_others_are_listed_once_with_their_licences() {
        let lines = "rewake v0.1.0 (/src/page-server)|MIT OR Apache-2.0\nlibc v0.2.1|MIT/Apache-2.0\n\
                     syn v2.0.0 (proc-macro)|MIT OR Apache-2.0\nlibc v0.2.1|MIT/Apache-2.0 (*)\n";
        let bill = bill("0.1.0", lines);
        assert_eq!(bill.matches("\"type\": \"library\"").count(), 2, "{bill}");
        assert!(
            bill.contains("pkg:cargo/libc@0.2.1") && bill.contains("\"MIT OR Apache-2.0\"}]}}"),
            "{bill}"
        );
        assert!(!bill.contains("/src/"), "{bill}");
    }
}
