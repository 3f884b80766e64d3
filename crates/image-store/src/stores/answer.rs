// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a store has answered, for messages: in one line, and without secrets.

use crate::error::ImageStoreError;

/// Where hosts of a cloud get credentials.
const METADATA: &str = "169.254.169.254";

/// The most characters of a text that a store has sent.
const MAX_TEXT: usize = 300;

/// Returns a closure for `map_err` that adds the request and the object.
pub(crate) fn request(
    act: &'static str,
    object: &str,
) -> impl FnOnce(object_store::Error) -> ImageStoreError {
    let object = object.to_owned();
    move |error| ImageStoreError::Request { act, object, reason: reason(&error.to_string()) }
}

/// Returns what a store answered, in one line. An answer of S3 may have the id of the key and the text that
/// was signed: of its XML, only code and message are kept.
pub(crate) fn reason(text: &str) -> String {
    let line = bounded(&without_xml(text));
    if !text.contains(METADATA) {
        return line;
    }
    format!(
        "no credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in a profile \
         (~/.aws), and the host has none: {line}"
    )
}

/// Returns a text of a store as one line that a terminal can show, of [`MAX_TEXT`] characters at most.
pub(crate) fn bounded(text: &str) -> String {
    let printable = |char: char| if char.is_control() { ' ' } else { char };
    // What follows is not looked at: it may be long.
    let mut chars = text.chars().map(printable);
    let mut line: String = chars.by_ref().take(MAX_TEXT).collect();
    if chars.next().is_some() {
        line.push_str("...");
    }
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn without_xml(text: &str) -> String {
    let start = text.find("<?xml").or_else(|| text.find("<Error"));
    let Some(start) = start else { return text.to_owned() };
    let (before, xml) = text.split_at(start);
    let tag = |name: &str| {
        let (_, rest) = xml.split_once(&format!("<{name}>"))?;
        Some(rest.split_once(&format!("</{name}>"))?.0)
    };
    let parts = [Some(before.trim()), tag("Code"), tag("Message")];
    parts.into_iter().flatten().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_s3_is_shown_without_the_key_and_what_was_signed() {
        let answer = "Server returned non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?>\n<Error>\n\
                      <Code>SignatureDoesNotMatch</Code><Message>The signature is wrong</Message>\
                      <AWSAccessKeyId>AKIAEXAMPLE</AWSAccessKeyId><StringToSign>AWS4 \
                      x</StringToSign></Error>";
        assert_eq!(
            reason(answer),
            "Server returned non-2xx status code: 403 Forbidden: SignatureDoesNotMatch The signature is wrong"
        );
    }

    #[test]
    fn other_answers_are_one_line() {
        assert_eq!(reason("no\n  route to\thost"), "no route to host");
    }

    #[test]
    fn a_long_answer_with_control_characters_is_short_and_printable() {
        let shown =
            reason(&format!("404: <html>\u{1b}[2J\u{7}{}</html>", "a page of a proxy ".repeat(100_000)));
        assert!(shown.starts_with("404: <html> [2J a page of a proxy "), "{shown}");
        assert!(shown.ends_with("...") && shown.chars().count() <= MAX_TEXT + 3, "{shown}");
        assert!(!shown.contains(char::is_control), "{shown:?}");
    }
}
