// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a registry answers, read: addresses, challenges, tokens, tags and reasons. All of it is hostile
//! input.

use std::net::IpAddr;

use http_auth::parse_challenges;
use reqwest::header::HeaderValue;
use reqwest::{StatusCode, Url};
use serde::Deserialize;

use crate::answer::bounded;
use crate::url::is_image_name;

/// The most bytes of a text from a registry that an error quotes.
const QUOTED: usize = 80;

/// Whether a registry is one of this host: it needs no TLS.
pub(super) fn is_loopback(registry: &str) -> bool {
    let host = registry.split(':').next().unwrap_or_default();
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Refuses an address that a registry names if bytes would travel to it unencrypted. `is_own`: the registry
/// is one of this host, and may name other servers of this host. No other registry may: a server of this host
/// trusts its clients.
pub(super) fn permitted(url: &Url, is_own: bool) -> Result<(), String> {
    let host = url.host_str().unwrap_or_default();
    if url.scheme() == "https" || (url.scheme() == "http" && is_own && is_loopback(host)) {
        return Ok(());
    }
    // The rest of an address may have a signature.
    let named = bounded(&format!("{}://{host}", url.scheme()));
    Err(format!(
        "the registry names {named}, to which bytes would travel unencrypted: expected https; if a proxy \
         encrypts for the registry, it has to send X-Forwarded-Proto"
    ))
}

/// Reads the `Location` of an answer to a request to `base`: a reference as in RFC 3986, so relative to the
/// path, to the host or to nothing. None: there is no such header, or an empty one.
pub(super) fn location(base: &Url, header: Option<&[u8]>, is_own: bool) -> Result<Option<Url>, String> {
    let Some(bytes) = header.filter(|bytes| !bytes.is_empty()) else { return Ok(None) };
    let wrong = |what: &str| {
        let quoted = bytes[..bytes.len().min(QUOTED)].escape_ascii();
        format!("the registry's Location \"{quoted}\" is no address: {what}")
    };
    let text = str::from_utf8(bytes).map_err(|_| wrong("it is not UTF-8"))?;
    let mut url = base.join(text).map_err(|error| wrong(&error.to_string()))?;
    let is_same = url.host() == base.host() && (url.port().is_none() || url.port() == base.port());
    if url.scheme() == "http" && base.scheme() == "https" && is_same {
        // The registry does not know that a proxy encrypts for it.
        if url.set_scheme("https").and_then(|()| url.set_port(base.port())).is_err() {
            return Err(wrong("it has no host"));
        }
    }
    permitted(&url, is_own).map(|()| Some(url))
}

/// What a registry wants to see before it answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    /// A user and a password.
    Basic,
    /// A token of this server.
    Bearer {
        /// The server's address.
        realm: Url,
        /// The name by which that server knows the registry.
        service: Option<String>,
    },
}

/// Reads the `WWW-Authenticate` headers of an answer. None: there is no challenge that is known here.
pub(super) fn challenge<'a>(
    headers: impl Iterator<Item = &'a [u8]>,
    is_own: bool,
) -> Result<Option<Challenge>, String> {
    let mut found = None;
    for header in headers {
        let text = str::from_utf8(header).unwrap_or_default();
        for challenge in parse_challenges(text).unwrap_or_default() {
            if challenge.scheme.eq_ignore_ascii_case("bearer") {
                let value = |name: &str| {
                    let mut params = challenge.params.iter();
                    params
                        .find(|(key, _)| key.eq_ignore_ascii_case(name))
                        .map(|(_, value)| value.to_unescaped())
                };
                let realm = value("realm").and_then(|realm| Url::parse(&realm).ok());
                let realm = realm.ok_or("the registry wants a token, and names no server that gives one")?;
                permitted(&realm, is_own)?;
                return Ok(Some(Challenge::Bearer { realm, service: value("service") }));
            }
            if challenge.scheme.eq_ignore_ascii_case("basic") {
                found = Some(Challenge::Basic);
            }
        }
    }
    Ok(found)
}

/// Reads the answer of a server of tokens, as the value of the header `Authorization`.
pub(super) fn token(body: &[u8]) -> Result<HeaderValue, String> {
    #[derive(Deserialize)]
    struct Tokens {
        token: Option<String>,
        access_token: Option<String>,
    }
    let wrong = |what: &str| Err(format!("the server of the registry's tokens sent {what}"));
    let Ok(Tokens { token, access_token }) = serde_json::from_slice(body) else {
        return wrong("no JSON with a token");
    };
    let given = token.or(access_token).filter(|token| !token.is_empty());
    let Some(given) = given else { return wrong("JSON without a token") };
    match HeaderValue::from_str(&format!("Bearer {given}")) {
        Ok(mut value) => {
            value.set_sensitive(true);
            Ok(value)
        }
        Err(_) => wrong("a token with characters that no header has: expected printable ASCII"),
    }
}

/// Reads a page of tags. A registry may send null where a repository has none. What is no tag is left out: it
/// would become a part of an address, and be shown.
pub(super) fn tags(body: &[u8]) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Page {
        tags: Option<Vec<Option<String>>>,
    }
    let page: Page = serde_json::from_slice(body).map_err(|error| {
        bounded(&format!("the registry's list of tags is not {{\"tags\": [...]}}: {error}"))
    })?;
    let tags = page.tags.unwrap_or_default().into_iter().flatten();
    Ok(tags.filter(|tag| is_image_name(tag)).collect())
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    /// In one line.
    pub(super) reason: String,
    /// The registry does not have what was asked for.
    pub(super) is_missing: bool,
    /// The same request may succeed later.
    pub(super) may_pass: bool,
}

/// Reads an answer that is no success.
pub(super) fn refusal(status: StatusCode, body: &[u8]) -> Refusal {
    const UNAUTHORIZED: &str = "401 Unauthorized: it needs other credentials, which are in \
                                $REGISTRY_AUTH_FILE, podman's auth.json or ~/.docker/config.json: `skopeo \
                                login` writes them";
    const MISSING: [&str; 3] = ["BLOB_UNKNOWN", "MANIFEST_UNKNOWN", "NAME_UNKNOWN"];
    let errors = errors(body);
    let has = |codes: &[&str]| errors.iter().any(|(code, _)| codes.contains(&&**code));
    let reason = if status == StatusCode::UNAUTHORIZED {
        UNAUTHORIZED.to_owned()
    } else if errors.is_empty() {
        format!("the registry answered {}: {}", status.as_u16(), String::from_utf8_lossy(body))
    } else {
        let errors = errors.iter().map(|(code, message)| format!("{code}: {message}"));
        format!("the registry refused: {}", errors.collect::<Vec<_>>().join("; "))
    };
    Refusal {
        reason: bounded(reason.trim_end_matches(": ")),
        is_missing: status == StatusCode::NOT_FOUND || has(&MISSING),
        may_pass: status.is_server_error()
            || status == StatusCode::TOO_MANY_REQUESTS
            || has(&["TOOMANYREQUESTS"]),
    }
}

/// The errors in the body of an answer, as codes and messages; none: the body is something else.
fn errors(body: &[u8]) -> Vec<(String, String)> {
    #[derive(Deserialize)]
    struct Envelope {
        errors: Vec<OneError>,
    }
    #[derive(Deserialize)]
    struct OneError {
        code: String,
        message: Option<String>,
    }
    let Ok(Envelope { errors }) = serde_json::from_slice(body) else { return Vec::new() };
    errors.into_iter().map(|error| (error.code, error.message.unwrap_or_default())).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOST: &str = "https://registry.example:5000/v2/a/b/blobs/uploads/";
    const OWN: &str = "http://127.0.0.1:5000/v2/a/b/blobs/uploads/";

    fn located(base: &str, location: &str) -> Result<Option<String>, String> {
        let base = Url::parse(base).unwrap();
        let is_own = is_loopback(base.host_str().unwrap());
        super::location(&base, Some(location.as_bytes()), is_own).map(|url| url.map(String::from))
    }

    #[test]
    fn a_location_has_every_form_of_a_reference() {
        for (location, expected) in [
            ("u1-123", "https://registry.example:5000/v2/a/b/blobs/uploads/u1-123"),
            ("u1?state=a%2Fb", "https://registry.example:5000/v2/a/b/blobs/uploads/u1?state=a%2Fb"),
            ("?state=1", "https://registry.example:5000/v2/a/b/blobs/uploads/?state=1"),
            ("/upload/1", "https://registry.example:5000/upload/1"),
            ("../1", "https://registry.example:5000/v2/a/b/blobs/1"),
            ("//storage.example/x", "https://storage.example/x"),
            ("https://storage.example/x?sig=1", "https://storage.example/x?sig=1"),
            ("HTTPS://storage.example", "https://storage.example/"),
            ("http://registry.example/v2/1", "https://registry.example:5000/v2/1"),
            ("http://registry.example:5000/v2/1", "https://registry.example:5000/v2/1"),
        ] {
            assert_eq!(located(HOST, location), Ok(Some(expected.to_owned())), "{location}");
        }
        assert_eq!(located(HOST, ""), Ok(None));
        assert_eq!(located(OWN, "u"), Ok(Some("http://127.0.0.1:5000/v2/a/b/blobs/uploads/u".to_owned())));
        assert_eq!(located(OWN, "http://localhost:1/u"), Ok(Some("http://localhost:1/u".to_owned())));
    }

    #[test]
    fn a_location_that_is_no_address_is_one_line() {
        for location in ["http://[::1", "https://", "http://a b/", "http://host:99999/", "http://\u{1b}/"] {
            let refused = located(HOST, location).unwrap_err();
            assert!(refused.starts_with("the registry"), "{location}: {refused}");
            assert!(!refused.contains(char::is_control), "{refused:?}");
        }
        let base = Url::parse(HOST).unwrap();
        assert!(super::location(&base, Some(b"caf\xe9"), false).unwrap_err().contains("\"caf\\xe9\""));
    }

    #[test]
    fn bytes_travel_encrypted_or_within_this_host() {
        for location in [
            "http://storage.example/x?signature=s",
            "http://127.0.0.1/",
            "ftp://a/",
            "file:///etc",
            "data:,x",
        ] {
            let refused = located(HOST, location).unwrap_err();
            assert!(refused.contains("expected https") && !refused.contains("signature"), "{refused}");
        }
        assert!(located(OWN, "http://10.0.0.1/x").unwrap_err().contains("http://10.0.0.1, to which"));
    }

    fn challenged(headers: &[&str]) -> Result<Option<Challenge>, String> {
        super::challenge(headers.iter().map(|header| header.as_bytes()), false)
    }

    #[test]
    fn a_challenge_for_a_token_is_preferred() {
        let realm = Url::parse("https://auth.example/token?a=1").unwrap();
        let bearer = r#"Bearer realm="https://auth.example/token?a=1",service="re\"g",scope="x""#;
        let expected = Challenge::Bearer { realm, service: Some("re\"g".to_owned()) };
        for headers in
            [&[bearer][..], &["Basic realm=\"x\"", bearer], &["Negotiate, Basic realm=\"x\"", bearer]]
        {
            assert_eq!(challenged(headers), Ok(Some(expected.clone())), "{headers:?}");
        }
        assert_eq!(challenged(&["basic realm=\"x\""]), Ok(Some(Challenge::Basic)));
        for none in [&[][..], &[""], &["Negotiate"], &["=,=\"\\"]] {
            assert_eq!(challenged(none), Ok(None), "{none:?}");
        }
    }

    #[test]
    fn a_password_is_sent_to_no_server_in_clear() {
        assert!(challenged(&[r#"Bearer realm="http://auth.example/""#]).unwrap_err().contains("unencrypted"));
        for none in ["Bearer service=\"x\"", "Bearer realm=\"/token\"", "Bearer realm=\"\""] {
            assert!(challenged(&[none]).unwrap_err().contains("names no server"), "{none}");
        }
    }

    #[test]
    fn a_token_that_no_header_can_have_is_one_line() {
        let text = |body: &str| token(body.as_bytes()).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(text(r#"{"token":"t0k3n","expires_in":1}"#), Ok("Bearer t0k3n".to_owned()));
        assert_eq!(text(r#"{"access_token":"t"}"#), Ok("Bearer t".to_owned()));
        for wrong in
            [r#"{"token":"a\nb: c"}"#, r#"{"token":"\u0000"}"#, r#"{"token":null}"#, "{}", "[]", "", "\""]
        {
            let refused = text(wrong).unwrap_err();
            assert!(refused.starts_with("the server of the registry's tokens sent "), "{wrong}: {refused}");
        }
    }

    #[test]
    fn a_list_of_tags_may_have_null() {
        let read = |body: &str| tags(body.as_bytes());
        for none in [r#"{"name":"a","tags":null}"#, r#"{"name":"a"}"#, r#"{"tags":[]}"#, r#"{"tags":[null]}"#]
        {
            assert_eq!(read(none), Ok(Vec::new()), "{none}");
        }
        let some = r#"{"tags":["v1",null,"../../x","\u001b[2J","v2"]}"#;
        assert_eq!(read(some), Ok(vec!["v1".to_owned(), "v2".to_owned()]));
        for wrong in ["", "[]", "null", r#"{"tags":{}}"#, r#"{"tags":[1]}"#] {
            assert!(read(wrong).unwrap_err().starts_with("the registry's list of tags is not"), "{wrong}");
        }
    }

    #[test]
    fn a_refusal_is_named_by_the_registry_s_words() {
        let of = |status: u16, body: &str| refusal(StatusCode::from_u16(status).unwrap(), body.as_bytes());
        let envelope = r#"{"errors":[{"code":"DENIED","message":"no\nway","detail":{}},{"code":"X"}]}"#;
        assert_eq!(of(403, envelope).reason, "the registry refused: DENIED: no way; X");
        assert_eq!(of(503, "").reason, "the registry answered 503");
        let missing = r#"{"errors":[{"code":"NAME_UNKNOWN","message":"m"}]}"#;
        assert!(of(404, "").is_missing && of(400, missing).is_missing && !of(400, "").is_missing);
        let busy = r#"{"errors":[{"code":"TOOMANYREQUESTS"}]}"#;
        assert!(
            of(503, "").may_pass && of(429, "").may_pass && of(400, busy).may_pass && !of(403, "").may_pass
        );
    }

    #[test]
    fn only_registries_of_this_host_are_read_without_tls() {
        for own in ["127.0.0.1:5000", "localhost", "localhost:5000", "127.1.2.3"] {
            assert!(is_loopback(own), "{own}");
        }
        for other in ["registry.example", "127.example.com:80", "10.0.0.1:5000", "localhost.example.com"] {
            assert!(!is_loopback(other), "{other}");
        }
    }

    /// Texts that are nearly what a registry sends, and bytes that are nothing of it.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        const PARTS: [&str; 24] = [
            "http",
            "https",
            "://",
            "//",
            "/",
            "..",
            "[",
            "]",
            "::1",
            ":",
            "@",
            "?",
            "#",
            "%",
            "%zz",
            "host",
            "\u{e9}",
            "Bearer realm=\"",
            "\"",
            "\\",
            ",",
            "{\"tags\":[",
            "null",
            "{\"token\":\"\\n\"}",
        ];
        let near = prop::collection::vec(prop::sample::select(&PARTS[..]), 0..12);
        prop_oneof![
            near.prop_map(|parts| parts.concat().into_bytes()),
            prop::collection::vec(any::<u8>(), 0..64),
            ".{0,40}".prop_map(String::into_bytes),
        ]
    }

    proptest! {
        /// Whatever a registry sends is an address that is permitted, or one line.
        #[test]
        fn every_answer_is_read_or_refused_in_one_line(sent in bytes(), is_own: bool) {
            let base = Url::parse(if is_own { OWN } else { HOST }).unwrap();
            let one_line = |refused: String| {
                assert!(!refused.contains(char::is_control) && refused.len() < 1000, "{refused:?}");
            };
            match super::location(&base, Some(&sent), is_own) {
                Ok(Some(url)) => assert_eq!(permitted(&url, is_own), Ok(())),
                Ok(None) => assert!(sent.is_empty()),
                Err(refused) => one_line(refused),
            }
            match challenge(std::iter::once(&*sent), is_own) {
                Ok(Some(Challenge::Bearer { realm, .. })) => assert_eq!(permitted(&realm, is_own), Ok(())),
                Ok(_) => {}
                Err(refused) => one_line(refused),
            }
            token(&sent).err().map(one_line);
            match tags(&sent) {
                Ok(tags) => assert!(tags.iter().all(|tag| is_image_name(tag))),
                Err(refused) => one_line(refused),
            }
            one_line(refusal(StatusCode::FORBIDDEN, &sent).reason);
        }
    }
}
