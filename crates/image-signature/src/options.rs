// SPDX-License-Identifier: MIT OR Apache-2.0
//! The options of a line of allowed signers (`ssh-keygen(1)`, ALLOWED SIGNERS).

use std::time::{SystemTime, UNIX_EPOCH};

use rewake_process::local_time::WrittenTime;

use crate::signature::NAMESPACE;

/// What a line says about its key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct SignerOptions {
    namespaces: Option<String>,
    /// Seconds since 1970.
    valid_after: Option<i64>,
    valid_before: Option<i64>,
}

impl SignerOptions {
    /// Reads options that commas separate.
    ///
    /// # Errors
    /// Says which option cannot be used, and why.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for option in split(text)? {
            let (name, value) =
                option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
            let value = value.map(|value| value.trim_matches('"'));
            match (name.to_ascii_lowercase().as_str(), value) {
                ("namespaces", Some(patterns)) => options.namespaces = Some(patterns.to_owned()),
                ("valid-after", Some(time)) => options.valid_after = Some(seconds(time)?),
                ("valid-before", Some(time)) => options.valid_before = Some(seconds(time)?),
                ("cert-authority", _) => {
                    return Err(
                        "cert-authority: certificates are not supported: list the signers' own keys".into()
                    );
                }
                _ => return Err(format!("the option {option:?} is not known")),
            }
        }
        Ok(options)
    }

    /// Returns why the line permits no signature of an image now; `None` if it does.
    pub(crate) fn refusal(&self, now: SystemTime) -> Option<String> {
        let now = now
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
        if let Some(patterns) = self.namespaces.as_ref().filter(|patterns| !matches_list(patterns, NAMESPACE))
        {
            return Some(format!("namespaces={patterns:?} has no {NAMESPACE}"));
        }
        if self.valid_after.is_some_and(|after| now < after) {
            return Some("the key is not valid yet (valid-after)".to_owned());
        }
        if self.valid_before.is_some_and(|before| now > before) {
            return Some("the key is not valid any more (valid-before)".to_owned());
        }
        None
    }
}

/// Splits at commas that are in no quotes.
fn split(text: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut start, mut is_quoted) = (Vec::new(), 0, false);
    for (at, char) in text.char_indices() {
        match char {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if is_quoted {
        return Err("a quote is not closed".to_owned());
    }
    parts.push(&text[start..]);
    Ok(parts)
}

/// Reads `YYYYMMDD[HHMM[SS]]`, with `Z` for UTC.
fn seconds(text: &str) -> Result<i64, String> {
    let (digits, is_utc) = text.strip_suffix('Z').map_or((text, false), |digits| (digits, true));
    let wrong =
        || format!("{text:?}: expected a time as YYYYMMDD, YYYYMMDDHHMM or YYYYMMDDHHMMSS, and Z for UTC");
    if !matches!(digits.len(), 8 | 12 | 14) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let field =
        |from: usize, to: usize| digits.get(from..to).map_or(Ok(0), str::parse::<i32>).map_err(|_| wrong());
    let fields = [field(0, 4)?, field(4, 6)?, field(6, 8)?, field(8, 10)?, field(10, 12)?, field(12, 14)?];
    WrittenTime { fields, is_utc }.seconds().ok_or_else(wrong)
}

/// Whether a name matches a list of patterns with `*` and `?`; one that begins with `!` excludes.
fn matches_list(patterns: &str, name: &str) -> bool {
    let mut is_listed = false;
    for pattern in patterns.split(',') {
        match pattern.strip_prefix('!') {
            Some(excluded) if matches(excluded.as_bytes(), name.as_bytes()) => return false,
            Some(_) => {}
            None => is_listed |= matches(pattern.as_bytes(), name.as_bytes()),
        }
    }
    is_listed
}

fn matches(pattern: &[u8], name: &[u8]) -> bool {
    // The name is a constant of a few bytes, so the depth is, too.
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => {
            let rest = &rest[rest.iter().take_while(|byte| **byte == b'*').count()..];
            (0..=name.len()).any(|from| matches(rest, &name[from..]))
        }
        (Some((one, rest)), Some((first, others))) => (*one == b'?' || one == first) && matches(rest, others),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn refusal(options: &str) -> Option<String> {
        SignerOptions::parse(options).unwrap().refusal(UNIX_EPOCH + Duration::from_secs(1_795_971_601))
    }

    #[test]
    fn a_namespace_must_be_listed() {
        for good in ["", "*", "git,rewake-image", "rewake-*", "rewake-imag?", "*-image,!git", "**e"] {
            let options = if good.is_empty() { String::new() } else { format!("namespaces=\"{good}\"") };
            let found = if options.is_empty() { None } else { refusal(&options) };
            assert_eq!(found, None, "{good}");
        }
        for wrong in ["git", "file,git", "*,!rewake-image", "rewake-image2", "rewake", "?"] {
            assert!(refusal(&format!("namespaces=\"{wrong}\"")).is_some(), "{wrong}");
        }
    }

    #[test]
    fn a_key_is_valid_in_its_time() {
        for good in ["valid-after=\"20260101Z\"", "valid-before=\"20261129170002Z\"", "valid-before=20270101"]
        {
            assert_eq!(refusal(good), None, "{good}");
        }
        assert!(refusal("valid-after=\"20261129170002Z\"").unwrap().contains("not valid yet"));
        assert!(refusal("valid-before=\"202611291700Z\"").unwrap().contains("not valid any more"));
        let both = "namespaces=\"rewake-image\",valid-after=\"20200101\",valid-before=\"20210101\"";
        assert!(refusal(both).unwrap().contains("not valid any more"));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused() {
        for (wrong, expected) in [
            ("cert-authority", "certificates are not supported"),
            ("cert-authority,namespaces=\"git\"", "certificates are not supported"),
            ("valid-before=\"2026\"", "expected a time"),
            ("valid-before=\"20260230\"", "expected a time"),
            ("valid-before=\"+2260230\"", "expected a time"),
            ("namespaces=\"git", "a quote is not closed"),
            ("no-touch-required", "is not known"),
            ("namespaces", "is not known"),
        ] {
            let error = SignerOptions::parse(wrong).unwrap_err();
            assert!(error.contains(expected), "{wrong}: {error}");
        }
    }
}
