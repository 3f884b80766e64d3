// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names in files of `/proc`: they are bytes.
//!
//! The kernel cuts the name of a command at 15 bytes, often in the middle of a character, and a path has the
//! bytes that its user chose. So a file with names is read as bytes, and text is made of them for people
//! only.

use std::fmt::Write as _;

/// Returns the lines of a file, without their ends.
pub fn lines(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file.split(|byte| *byte == b'\n')
}

/// Returns what follows `key` in the first line that begins with it, without the blanks around it. None:
/// there is no such line, or its value is no text.
#[must_use]
pub fn field<'a>(file: &'a [u8], key: &str) -> Option<&'a str> {
    let value = lines(file).find_map(|line| line.strip_prefix(key.as_bytes()))?;
    str::from_utf8(value).ok().map(str::trim)
}

/// Returns a path of a list of mounts without the kernel's escapes: the kernel writes spaces, tabs, newlines
/// and backslashes in octal (`fs/proc_namespace.c: mangle`).
#[must_use]
pub fn unescaped(path: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut rest = path;
    while let [first, after @ ..] = rest {
        let digits = after.first_chunk::<3>().and_then(|digits| str::from_utf8(digits).ok());
        let byte = digits.filter(|_| *first == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    plain
}

/// Returns a name as text for people: what is not UTF-8 is replaced, and control characters are escaped, so
/// that a name does not command a terminal.
#[must_use]
pub fn printable(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    let mut clean = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() {
            // A write to a string cannot fail.
            let _ = write!(clean, "{}", letter.escape_default());
        } else {
            clean.push(letter);
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_whatever_bytes_the_other_lines_have() {
        let file = b"Name:\tserveur-\xc3\xa9l\xc3\xa9v\xc3\nGroups:\t0 \nexp_name:\t\xff\n";
        assert_eq!(field(file, "Groups:"), Some("0"));
        assert_eq!(field(file, "exp_name:"), None, "no text");
        assert_eq!(field(file, "PPid:"), None);
    }

    #[test]
    fn the_kernel_s_octal_digits_become_bytes() {
        assert_eq!(unescaped(br"/a\040b\011c\012d\134e"), b"/a b\tc\nd\\e");
        assert_eq!(unescaped(b"/caf\xe9\\04"), b"/caf\xe9\\04");
    }

    #[test]
    fn a_name_for_people_is_one_line_of_text() {
        assert_eq!(printable(b"a\x1b[2J\nb \xc3\xa9\xc3"), "a\\u{1b}[2J\\nb é\u{fffd}");
    }
}
