// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rust text with comments and the insides of literals blanked out: every line and column stays where it was.

/// Replaces comments and the contents of string and character literals by spaces.
pub(super) fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let length = skipped(bytes, at);
        if length == 0 {
            code.push(bytes[at]);
            at += 1;
        } else {
            let skipped = &bytes[at..at + length];
            code.extend(skipped.iter().map(|byte| if *byte == b'\n' { b'\n' } else { b' ' }));
            at += length;
        }
    }
    // Only whole comments and literals were replaced, so what is left is UTF-8.
    String::from_utf8_lossy(&code).into_owned()
}

/// Bytes of the comment or literal that begins at `at`; 0 if none does.
fn skipped(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        return block_comment(rest);
    }
    let inside_word = at > 0 && is_word(bytes[at - 1]);
    match rest[0] {
        b'"' => quoted(rest, 1),
        b'\'' => character(rest),
        b'r' if !inside_word => raw_string(rest, 1),
        b'b' | b'c' if !inside_word && rest.get(1) == Some(&b'r') => raw_string(rest, 2),
        _ => 0,
    }
}

pub(super) fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// Block comments nest.
fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// A string up to its closing quote, from `start` on.
fn quoted(rest: &[u8], start: usize) -> usize {
    let mut at = start;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// `'x'` and `'\n'`, but not the lifetime `'a`.
fn character(rest: &[u8]) -> usize {
    if rest.get(1) == Some(&b'\\') {
        let end = rest.iter().skip(3).position(|byte| *byte == b'\'');
        return end.map_or(0, |end| end + 4);
    }
    // One character of up to four bytes.
    let end = rest.iter().skip(2).take(4).position(|byte| *byte == b'\'');
    match end {
        Some(0) => 3,
        Some(more) if rest[1] >= 0x80 => more + 3,
        _ => 0,
    }
}

/// `r"..."` and `r#"..."#`, after a prefix of `prefix` bytes; 0 for raw identifiers and other words.
fn raw_string(rest: &[u8], prefix: usize) -> usize {
    let hashes = rest[prefix..].iter().take_while(|byte| **byte == b'#').count();
    if rest.get(prefix + hashes) != Some(&b'"') {
        return 0;
    }
    let end = [&b"\""[..], &b"#".repeat(hashes)].concat();
    let body = prefix + hashes + 1;
    let found = rest[body..].windows(end.len()).position(|window| window == end);
    found.map_or(rest.len(), |position| body + position + end.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn blanked(text: &str, expected: &str) {
        let code = code_only(text);
        assert_eq!(code, expected);
        assert_eq!(code.lines().count(), text.lines().count());
    }

    #[test]
    fn comments_are_blanked_and_lines_stay() {
        blanked("a // {\nb", "a     \nb");
        blanked("a /* { /* } */\n{ */ b", "a             \n     b");
    }

    #[test]
    fn literals_are_blanked_with_their_escapes() {
        blanked(r#"f("a\"{", b'{', '\'', '}')"#, r"f(      , b   ,     ,    )");
        blanked("f(\"//\"); g()", "f(    ); g()");
        blanked("'é' {", "     {");
        blanked(r"'\u{1F600}' {", "            {");
    }

    #[test]
    fn raw_strings_end_at_their_own_hashes() {
        blanked(r###"x(r#"a"{"#, br"\", r)"###, "x(        ,      , r)");
        blanked(r#"var"{""#, "var   ");
    }

    #[test]
    fn lifetimes_are_code() {
        blanked("fn f<'a>(x: &'a str) { 'x' }", "fn f<'a>(x: &'a str) {     }");
    }
}
