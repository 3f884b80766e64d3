// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads from the machine's apt configuration where packages come from. It parses both file formats of
//! sources.list(5), only as far as set-up needs them, to ask the same archive for another suite.

use std::path::Path;

use crate::files;

/// Debian's own keys, for entries that name none.
const DEBIAN_KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Options that choose what to download from an entry: set-up chooses by itself.
const SELECTING: [&str; 6] = ["architectures", "arch", "languages", "lang", "targets", "target"];

/// One enabled entry for binary packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    /// Everything else (keys, proxies, trust), as fields of the deb822 format; values keep their lines.
    options: Vec<(String, String)>,
}

impl Entry {
    /// The same archive, keys and options for another suite, as a deb822 file.
    pub(crate) fn for_suite(&self, suite: &str) -> String {
        let mut text = format!(
            "Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\nArchitectures: amd64\n",
            self.uris.join(" ")
        );
        for (name, value) in &self.options {
            text += &format!("{name}: {value}\n");
        }
        if self.option("signed-by").is_none() {
            text += &format!("Signed-By: {DEBIAN_KEYRING}\n");
        }
        text
    }

    /// The first address, for messages.
    pub(crate) fn address(&self) -> &str {
        self.uris.first().map_or("(no address)", String::as_str)
    }

    fn option(&self, name: &str) -> Option<&str> {
        let found = self.options.iter().find(|(other, _)| other.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// How surely this is Debian's archive, and not extra packages under the same suite name.
    fn likelihood(&self, all: &[Self], codename: &str) -> u32 {
        let updates = format!("{codename}-updates");
        let same = |other: &&Self| other.uris.iter().any(|uri| self.uris.contains(uri));
        let with_updates = all.iter().filter(same).any(|other| other.suites.contains(&updates));
        let debian_keys = self.option("signed-by").is_none_or(|keys| keys.contains("debian-archive"));
        let named = self.uris.iter().any(|uri| uri.trim_end_matches('/').ends_with("/debian"));
        4 * u32::from(with_updates) + 2 * u32::from(debian_keys) + u32::from(named)
    }
}

/// Entries that may be Debian's archive for this release, the most likely first.
pub(crate) fn archives(entries: &[Entry], codename: &str) -> Vec<Entry> {
    let fits = |entry: &&Entry| {
        entry.suites.iter().any(|suite| suite == codename)
            && entry.components.iter().any(|component| component == "main")
    };
    let mut found: Vec<Entry> = entries.iter().filter(fits).cloned().collect();
    found.sort_by_key(|entry| std::cmp::Reverse(entry.likelihood(entries, codename)));
    found
}

/// All entries under an apt configuration directory (`/etc/apt`).
pub(crate) fn read(etc_apt: &Path) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let single = etc_apt.join("sources.list");
    if single.exists() {
        entries.extend(parse_one_line(&files::read(&single)?));
    }
    let parts = etc_apt.join("sources.list.d");
    for path in if parts.is_dir() { files::list(&parts)? } else { Vec::new() } {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("list") => entries.extend(parse_one_line(&files::read(&path)?)),
            Some("sources") => entries.extend(parse_deb822(&files::read(&path)?)),
            _ => {}
        }
    }
    Ok(entries)
}

/// `deb [option=value ...] uri suite component ...`; lines of any other shape are ignored.
fn parse_one_line(text: &str) -> Vec<Entry> {
    text.lines().filter_map(|line| one_line(line.split('#').next().unwrap_or_default().trim())).collect()
}

fn one_line(line: &str) -> Option<Entry> {
    let rest = line.strip_prefix("deb")?;
    if !rest.starts_with([' ', '\t', '[']) {
        return None;
    }
    let rest = rest.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(inside) => inside.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace();
    let uri = words.next()?;
    let suite = words.next()?;
    if uri.starts_with("cdrom:") {
        return None;
    }
    let option = |word: &str| {
        let (name, value) = word.split_once('=')?;
        // `arch+=` and `arch-=` too select what to download.
        let name = name.trim_end_matches(['+', '-']);
        (!selects(name)).then(|| (name.to_owned(), value.replace(',', " ")))
    };
    Some(Entry {
        uris: vec![uri.to_owned()],
        suites: vec![suite.to_owned()],
        components: words.map(str::to_owned).collect(),
        options: options.split_whitespace().filter_map(option).collect(),
    })
}

/// Stanzas of `Name: value` fields, with continuation lines, parted by blank lines.
fn parse_deb822(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')).chain([""]) {
        if line.trim().is_empty() {
            entries.extend(stanza(std::mem::take(&mut fields)));
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.trim().to_owned(), value.trim().to_owned()));
        }
    }
    entries
}

fn stanza(fields: Vec<(String, String)>) -> Option<Entry> {
    let mut entry = Entry { uris: vec![], suites: vec![], components: vec![], options: vec![] };
    let (mut enabled, mut binary) = (true, false);
    for (name, value) in fields {
        let words = || value.split_whitespace().map(str::to_owned).collect();
        match name.to_ascii_lowercase().as_str() {
            "types" => binary = value.split_whitespace().any(|kind| kind == "deb"),
            "enabled" => enabled = !matches!(value.to_ascii_lowercase().as_str(), "no" | "false" | "0"),
            "uris" => entry.uris = words(),
            "suites" => entry.suites = words(),
            "components" => entry.components = words(),
            other if selects(other) || other.starts_with("x-") => {}
            _ => entry.options.push((name, value)),
        }
    }
    (enabled && binary && !entry.uris.is_empty() && !entry.suites.is_empty()).then_some(entry)
}

fn selects(option: &str) -> bool {
    SELECTING.iter().any(|name| name.eq_ignore_ascii_case(option))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const IMAGE: &str = "\
Types: deb
# a comment inside a stanza
URIs: http://archive.test/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://archive.test/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
";

    fn best(entries: &[Entry]) -> String {
        archives(entries, "bookworm").first().expect("an archive").for_suite("sid")
    }

    #[test]
    fn a_deb822_stanza_with_several_suites_gives_the_same_archive_for_sid() {
        assert_eq!(
            best(&parse_deb822(IMAGE)),
            "Types: deb\nURIs: http://archive.test/debian\nSuites: sid\nComponents: main\nArchitectures: \
             amd64\n\
             Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        );
    }

    #[test]
    fn security_and_updates_suites_are_not_the_archive() {
        let entries = parse_one_line(
            "deb http://a.test/debian-security bookworm-security main\ndeb http://a.test/debian \
             bookworm-updates main\n",
        );
        assert_eq!(entries.len(), 2);
        assert_eq!(archives(&entries, "bookworm"), []);
    }

    #[test]
    fn one_line_options_are_kept_but_not_the_selection() {
        let text = "# main archive\n\
            deb-src http://a.test/debian bookworm main\n\
            deb [arch=amd64,i386 signed-by=/etc/apt/keyrings/own.gpg,/b.gpg check-valid-until=no lang-=de] \
            http://a.test/debian bookworm main contrib # trailing\n";
        let entries = parse_one_line(text);
        assert_eq!(entries.len(), 1);
        assert_eq!(
            best(&entries),
            "Types: deb\nURIs: http://a.test/debian\nSuites: sid\nComponents: main\nArchitectures: amd64\n\
             signed-by: /etc/apt/keyrings/own.gpg /b.gpg\ncheck-valid-until: no\n"
        );
    }

    #[test]
    fn an_entry_without_keys_gets_debians() {
        let entries = parse_one_line("deb\thttp://a.test/debian/\tbookworm\tmain\n");
        assert!(best(&entries).ends_with(&format!("Signed-By: {DEBIAN_KEYRING}\n")));
    }

    #[test]
    fn mirror_lists_and_inline_keys_stay_as_they_are() {
        let text = "Types: deb deb-src\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: bookworm\n\
            Components: main\nArchitectures: amd64 i386\nSigned-By:\n -----BEGIN PGP-----\n .\n abcd\n \
            -----END PGP-----\n";
        let source = best(&parse_deb822(text));
        assert!(source.contains("URIs: mirror+file:///etc/apt/mirrors/debian.list\n"), "{source}");
        assert!(
            source.contains("Signed-By: \n -----BEGIN PGP-----\n .\n abcd\n -----END PGP-----\n"),
            "{source}"
        );
        assert!(!source.contains("i386") && !source.contains(DEBIAN_KEYRING), "{source}");
    }

    #[test]
    fn disabled_and_source_only_stanzas_do_not_count() {
        let fields = "URIs: http://a.test/debian\nSuites: bookworm\nComponents: main\n";
        let text = format!("Types: deb\nEnabled: no\n{fields}\n\n\nTypes: deb-src\n{fields}");
        assert_eq!(parse_deb822(&text), []);
    }

    #[test]
    fn discs_and_broken_lines_are_passed_over() {
        let text = "deb cdrom:[Debian 12]/ bookworm main\ndebris here\ndeb http://a.test\ndeb [open \
            http://a.test b main\n";
        assert_eq!(parse_one_line(text), []);
    }

    #[test]
    fn debian_is_before_third_parties_that_use_its_suite_names() {
        let third = "deb [signed-by=/usr/share/keyrings/vpn.gpg] https://vpn.test/stable/debian bookworm \
            main\n\
            deb https://docker.test/linux/debian bookworm stable\n";
        let mut entries = parse_one_line(third);
        entries.extend(parse_deb822(IMAGE));
        let order = archives(&entries, "bookworm");
        assert_eq!(order.len(), 2, "the entry without main is no candidate");
        assert_eq!(order[0].address(), "http://archive.test/debian");
        assert_eq!(order[1].address(), "https://vpn.test/stable/debian");
    }

    #[test]
    fn a_configuration_directory_is_read_by_file_extension() {
        let directory = std::env::temp_dir().join(format!("rewake-apt-{}", std::process::id()));
        let parts = directory.join("sources.list.d");
        fs::create_dir_all(&parts).unwrap();
        fs::write(directory.join("sources.list"), "deb http://one.test/debian bookworm main\n").unwrap();
        fs::write(parts.join("debian.sources"), IMAGE).unwrap();
        fs::write(parts.join("two.list"), "deb http://two.test/debian bookworm main\n").unwrap();
        fs::write(parts.join("three.list.disabled"), "deb http://three.test/debian bookworm main\n").unwrap();
        let entries = read(&directory);
        fs::remove_dir_all(&directory).unwrap();
        let addresses: Vec<String> =
            entries.unwrap().iter().map(|entry| entry.address().to_owned()).collect();
        assert_eq!(
            addresses,
            [
                "http://one.test/debian",
                "http://archive.test/debian",
                "http://archive.test/debian-security",
                "http://two.test/debian"
            ]
        );
    }
}
