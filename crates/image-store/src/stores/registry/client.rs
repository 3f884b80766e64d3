// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is asked of a repository of a registry: each request is sent again after a failure that may pass.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use reqwest::header::{ACCEPT, CONTENT_RANGE, CONTENT_TYPE, RANGE};
use reqwest::{Method, StatusCode, Url};
use ring::digest::{Context, SHA256};
use tokio::time::sleep;

use super::answers;
use super::artifact::Blob;
use super::credentials::Login;
use super::document::{DOCKER, INDEX, MANIFEST};
use super::requests::{MAX_ANSWER, RegistryError, RegistryRequests, body};
use crate::connect::{PAUSE, RETRIES, RequestLimits};

/// Bytes of one request that writes a blob. A longer blob is written in parts.
const PART: u64 = 16 << 20;
/// Bytes of a long blob that are in memory.
const READ: u64 = 4 << 20;
/// The most tags that are listed.
const MAX_TAGS: usize = 10_000;
/// Tags of one listing.
const TAGS: usize = 1000;
/// The type of a blob.
const BYTES: &str = "application/octet-stream";

type Result<T, E = RegistryError> = std::result::Result<T, E>;

/// A repository of a registry.
#[derive(Clone)]
pub(super) struct RegistryClient {
    /// For messages.
    name: Arc<str>,
    limits: RequestLimits,
    requests: Arc<RegistryRequests>,
}

impl fmt::Debug for RegistryClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RegistryClient").field(&self.name).finish()
    }
}

impl RegistryClient {
    /// `write`: for a push.
    pub(super) fn new(
        registry: &str,
        repository: &str,
        login: Option<Login>,
        write: bool,
        limits: RequestLimits,
    ) -> Result<Self, String> {
        let requests = RegistryRequests::new(registry, repository, login, write, limits)?;
        Ok(Self { name: format!("{registry}/{repository}").into(), limits, requests: Arc::new(requests) })
    }

    /// Reads what a tag or a digest names: its bytes, which have that digest. `None` if there is nothing.
    pub(super) async fn manifest(&self, name: &str) -> Result<Option<Bytes>> {
        match self.retried(|| self.read_manifest(name)).await {
            Err(RegistryError::Missing) => Ok(None),
            read => read.map(Some),
        }
    }

    async fn read_manifest(&self, name: &str) -> Result<Bytes> {
        // A tag with an image of Docker's is not free: a registry may say that it is, if its types are not
        // accepted.
        let types = [INDEX, MANIFEST, DOCKER[0], DOCKER[1]].join(", ");
        let address = self.requests.address(&format!("manifests/{name}"))?;
        let answer = self.requests.send(Method::GET, &address, |get| get.header(ACCEPT, &types)).await?;
        let bytes = body(answer, MAX_ANSWER, "a manifest").await?;
        if name.contains(':') && blob_of(&bytes).digest != name {
            return Err(RegistryError::Refused(format!("the registry's answer is not the manifest {name}")));
        }
        Ok(bytes.into())
    }

    /// Writes a manifest or an index of this type.
    pub(super) async fn put_manifest(
        &self,
        name: &str,
        media_type: &'static str,
        bytes: Vec<u8>,
    ) -> Result<()> {
        let (address, bytes) = (self.requests.address(&format!("manifests/{name}"))?, Bytes::from(bytes));
        let put = async || {
            let put = self
                .requests
                .send(Method::PUT, &address, |put| put.header(CONTENT_TYPE, media_type).body(bytes.clone()));
            put.await.map(drop)
        };
        self.retried(put).await
    }

    /// Lists the tags of the repository.
    pub(super) async fn tags(&self) -> Result<Vec<String>> {
        let mut tags: Vec<String> = Vec::new();
        while tags.len() < MAX_TAGS {
            let mut address = self.requests.address("tags/list")?;
            address.query_pairs_mut().append_pair("n", &TAGS.to_string());
            if let Some(last) = tags.last() {
                address.query_pairs_mut().append_pair("last", last);
            }
            let list = async || {
                let answer = self.requests.send(Method::GET, &address, |get| get).await?;
                answers::tags(&body(answer, MAX_ANSWER, "a list of tags").await?)
                    .map_err(RegistryError::Refused)
            };
            let more = self.retried(list).await?;
            // A registry without pages sends the same again.
            if more.is_empty() || more.last() <= tags.last() {
                break;
            }
            tags.extend(more);
        }
        tags.sort();
        Ok(tags)
    }

    /// Reads a range of a blob. It has fewer bytes where the blob ends.
    pub(super) async fn range(&self, blob: &Blob, range: Range<u64>) -> Result<Bytes> {
        self.retried(|| self.read(blob, range.clone())).await
    }

    async fn read(&self, blob: &Blob, range: Range<u64>) -> Result<Bytes> {
        let Some(last) = range.end.checked_sub(1) else { return Ok(Bytes::new()) };
        let (address, length) = (self.blob(blob)?, range.end.saturating_sub(range.start));
        let wanted = format!("bytes={}-{last}", range.start);
        let mut answer = self.requests.send(Method::GET, &address, |get| get.header(RANGE, &wanted)).await?;
        // A registry without ranges sends all of the blob.
        let is_part = answer.status() == StatusCode::PARTIAL_CONTENT;
        let (mut bytes, mut skipped) = (Vec::new(), if is_part { 0 } else { range.start });
        while (bytes.len() as u64) < length
            && let Some(part) = answer.chunk().await?
        {
            let skip = skipped.min(part.len() as u64);
            skipped -= skip;
            let left = length - bytes.len() as u64;
            bytes.extend(part.iter().skip(as_usize(skip)).take(as_usize(left)));
        }
        Ok(bytes.into())
    }

    fn blob(&self, blob: &Blob) -> Result<Url> {
        self.requests.address(&format!("blobs/{}", blob.digest))
    }

    /// Whether the registry has a blob.
    pub(super) async fn has(&self, blob: &Blob) -> Result<bool> {
        let address = self.blob(blob)?;
        match self.retried(async || self.requests.send(Method::HEAD, &address, |head| head).await).await {
            Err(RegistryError::Missing) => Ok(false),
            found => found.map(|_| true),
        }
    }

    /// Writes a blob, if the registry does not have it.
    pub(super) async fn put_bytes(&self, bytes: Bytes) -> Result<Blob> {
        let blob = blob_of(&bytes);
        if self.has(&blob).await? {
            return Ok(blob);
        }
        let put = async || {
            let upload = self.begin_upload().await?;
            self.end_upload(upload, &blob, bytes.clone()).await
        };
        self.retried(put).await?;
        Ok(blob)
    }

    /// Writes the bytes of a file as a blob, if the registry does not have it.
    pub(super) async fn put_file(&self, file: File, length: u64) -> Result<Blob> {
        if length <= PART {
            return self.put_bytes(part(&file, 0, length)?).await;
        }
        let mut context = Context::new(&SHA256);
        for offset in (0..length).step_by(as_usize(READ)) {
            context.update(&part(&file, offset, READ.min(length - offset))?);
        }
        let blob = Blob { digest: digest_of(context), length };
        if self.has(&blob).await? {
            return Ok(blob);
        }
        self.retried(|| self.put_parts(&file, &blob)).await?;
        Ok(blob)
    }

    async fn put_parts(&self, file: &File, blob: &Blob) -> Result<()> {
        let mut upload = self.begin_upload().await?;
        for offset in (0..blob.length).step_by(as_usize(READ)) {
            let bytes = part(file, offset, READ.min(blob.length - offset))?;
            let range = format!("{offset}-{}", offset + bytes.len() as u64 - 1);
            let patch = self.requests.send(Method::PATCH, &upload, |patch| {
                patch.header(CONTENT_RANGE, &range).header(CONTENT_TYPE, BYTES).body(bytes.clone())
            });
            if let Some(next) = self.requests.location(&patch.await?)? {
                upload = next;
            }
        }
        self.end_upload(upload, blob, Bytes::new()).await
    }

    async fn begin_upload(&self) -> Result<Url> {
        let address = self.requests.address("blobs/uploads/")?;
        let answer = self.requests.send(Method::POST, &address, |post| post.body(Bytes::new())).await?;
        self.requests.location(&answer)?.ok_or_else(|| {
            let status = answer.status().as_u16();
            RegistryError::Refused(format!("the registry answered {status} to an upload, without a Location"))
        })
    }

    async fn end_upload(&self, mut upload: Url, blob: &Blob, bytes: Bytes) -> Result<()> {
        upload.query_pairs_mut().append_pair("digest", &blob.digest);
        let put = self
            .requests
            .send(Method::PUT, &upload, |put| put.header(CONTENT_TYPE, BYTES).body(bytes.clone()));
        put.await.map(drop)
    }

    /// Does something, and again after a failure that may pass.
    async fn retried<T, F>(&self, act: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let (start, mut pause, mut attempts) = (Instant::now(), PAUSE[0], 0);
        loop {
            attempts += 1;
            match act().await {
                Err(RegistryError::Failed(_))
                    if attempts <= RETRIES && start.elapsed() < self.limits.retry => {}
                done => return done,
            }
            sleep(pause).await;
            pause = PAUSE[1].min(pause * 2);
        }
    }
}

/// Returns the digest and the length of bytes.
pub(super) fn blob_of(bytes: &[u8]) -> Blob {
    let mut context = Context::new(&SHA256);
    context.update(bytes);
    Blob { digest: digest_of(context), length: bytes.len() as u64 }
}

fn digest_of(context: Context) -> String {
    let digits: String = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

/// Reads a part of a temporary file.
fn part(file: &File, offset: u64, length: u64) -> Result<Bytes> {
    let mut bytes = vec![0; as_usize(length)];
    let read = file.read_exact_at(&mut bytes, offset);
    read.map_err(|error: io::Error| RegistryError::Refused(format!("a temporary file: {error}")))?;
    Ok(bytes.into())
}

fn as_usize(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::thread;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::testing::{random_bytes, run};

    const LIMITS: RequestLimits = RequestLimits {
        connect: Duration::from_secs(5),
        silence: Duration::from_secs(5),
        request: Duration::from_secs(5),
        retry: Duration::from_millis(300),
    };

    /// Needs no authorization, and answers other requests in this order, the last one again and again.
    /// Returns its address.
    fn registry(answers: &'static [&'static str]) -> String {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let mut number = 0;
            while let Ok((mut client, _)) = listener.accept() {
                let mut request = [0; 4096];
                let length = client.read(&mut request).unwrap_or(0);
                let mut answer = UP;
                if !request[..length].starts_with(b"GET /v2/ ") {
                    answer = answers[number.min(answers.len() - 1)];
                    number += 1;
                }
                let _ = client.write_all(answer.as_bytes());
            }
        });
        address
    }

    fn client(address: &str) -> RegistryClient {
        RegistryClient::new(address, "web", None, false, LIMITS).unwrap()
    }

    fn refused(answers: &'static [&'static str]) -> String {
        let (client, mut said) = (client(&registry(answers)), String::new());
        run(async {
            let asked = timeout(Duration::from_secs(20), client.manifest("1")).await.unwrap();
            said = asked.unwrap_err().to_string();
        });
        assert_eq!(said.lines().count(), 1, "{said}");
        said
    }

    const UP: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    const DOWN: &str =
        "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 5\r\nConnection: close\r\n\r\n<a>\r\n";

    #[test]
    fn a_registry_that_always_fails_is_one_line_within_the_limit() {
        assert_eq!(refused(&[DOWN]), "the registry answered 500: <a>");
    }

    #[test]
    fn a_failure_that_passes_is_no_failure() {
        const FOUND: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
        let client = client(&registry(&[DOWN, FOUND]));
        run(async { assert_eq!(client.manifest("1").await.unwrap().as_deref(), Some(&b"{}"[..])) });
    }

    #[test]
    fn what_does_not_pass_is_not_sent_again() {
        const FORBIDDEN: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno";
        let start = Instant::now();
        assert_eq!(refused(&[FORBIDDEN]), "the registry answered 403: no");
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    /// A registry that wants a token, which is given for a password as this JSON. Returns its address.
    fn registry_with_tokens(token: &'static str) -> String {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let realm = format!("WWW-Authenticate: Bearer realm=\"http://{address}/token\",service=\"s\"\r\n");
        thread::spawn(move || {
            while let Ok((mut client, _)) = listener.accept() {
                let mut request = [0; 4096];
                let length = client.read(&mut request).unwrap_or(0);
                let request = String::from_utf8_lossy(&request[..length]).into_owned();
                let is_for_token = request.starts_with("GET /token?scope=repository%3Aweb%3Apull&");
                let (status, body) =
                    if is_for_token && request.contains("authorization: Basic dXNlcjpwYXNz\r\n") {
                        ("200 OK", token)
                    } else if request.contains("authorization: Bearer t0k3n\r\n") {
                        ("200 OK", "0123456789")
                    } else {
                        ("401 Unauthorized", "no")
                    };
                let length = body.len();
                let answer = format!(
                    "HTTP/1.1 {status}\r\n{realm}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                );
                let _ = client.write_all(answer.as_bytes());
            }
        });
        address
    }

    #[test]
    fn a_registry_with_tokens_gets_one_for_the_password() {
        let address = registry_with_tokens(r#"{"token":"t0k3n"}"#);
        let blob = blob_of(b"0123456789");
        let read = async |password: &str| {
            let login = Login { user: "user".to_owned(), password: password.to_owned() };
            let client = RegistryClient::new(&address, "web", Some(login), false, LIMITS).unwrap();
            client.range(&blob, 0..10).await.map_err(|error| error.to_string())
        };
        run(async {
            assert_eq!(read("pass").await, Ok(Bytes::from_static(b"0123456789")));
            let refused = read("s3cr3t").await.unwrap_err();
            assert_eq!(refused, "the server of the registry's tokens refused: no");
        });
    }

    #[test]
    fn an_answer_longer_than_a_token_or_a_manifest_is_refused() {
        let long = |length| &*"x".repeat(length).leak();
        let address = registry_with_tokens(long((64 << 10) + 1));
        let login = Login { user: "user".to_owned(), password: "pass".to_owned() };
        let client = RegistryClient::new(&address, "web", Some(login), false, LIMITS).unwrap();
        run(async move {
            let refused = client.range(&blob_of(b"x"), 0..1).await.unwrap_err().to_string();
            assert_eq!(refused, "the registry's answer is longer than 65536 bytes: expected a token");
        });
        let answer = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", long(MAX_ANSWER + 1));
        let answers: &'static [&'static str] = vec![&*answer.leak()].leak();
        assert_eq!(
            refused(answers),
            "the registry's answer is longer than 4194304 bytes: expected a manifest"
        );
    }

    #[test]
    fn a_token_that_no_header_can_have_is_no_panic() {
        let address = registry_with_tokens(r#"{"token":"a\r\nb: c"}"#);
        let login = Login { user: "user".to_owned(), password: "pass".to_owned() };
        let client = RegistryClient::new(&address, "web", Some(login), false, LIMITS).unwrap();
        run(async move {
            let refused = client.range(&blob_of(b"x"), 0..1).await.unwrap_err().to_string();
            assert!(refused.contains("a token with characters that no header has"), "{refused}");
        });
    }

    /// Writes a blob to a registry that gives this `Location`. Returns the line of the request that has the
    /// bytes.
    fn written_to(location: &str) -> Result<String, String> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (location, host) = (location.replace("HOST", &address), address.clone());
        let (sender, receiver) = std::sync::mpsc::channel();
        thread::spawn(move || {
            while let Ok((mut client, _)) = listener.accept() {
                let (line, _) = request(&mut client);
                let status = match line.split(' ').next().unwrap() {
                    "HEAD" => "404 Not Found",
                    "POST" => "202 Accepted",
                    _ => "201 Created",
                };
                let answer = format!(
                    "HTTP/1.1 {status}\r\nLocation: {location}\r\nContent-Length: 0\r\nConnection: \
                     close\r\n\r\n"
                );
                let _ = client.write_all(answer.as_bytes());
                if line.starts_with("PUT") {
                    let _ = sender.send(line);
                }
            }
        });
        let (client, mut put) = (client(&host), Ok(()));
        run(async { put = client.put_bytes(Bytes::from_static(b"x")).await.map(drop) });
        put.map_err(|refused| refused.to_string())?;
        let line = receiver.recv().unwrap();
        Ok(line.split(' ').nth(1).unwrap().split("digest=").next().unwrap().to_owned())
    }

    #[test]
    fn an_upload_continues_where_the_location_says() {
        for (location, put) in [
            ("u1-123", "/v2/web/blobs/uploads/u1-123?"),
            ("?state=a", "/v2/web/blobs/uploads/?state=a&"),
            ("/upload/1", "/upload/1?"),
            ("//HOST/x", "/x?"),
            ("http://HOST/y?z=1", "/y?z=1&"),
        ] {
            assert_eq!(written_to(location).as_deref(), Ok(put), "{location}");
        }
        for wrong in ["", "http://[::1", "ftp://HOST/", "http://registry.example/", "http://HOST:99999/"] {
            let refused = written_to(wrong).unwrap_err();
            assert!(
                refused.starts_with("the registry") && refused.lines().count() == 1,
                "{wrong}: {refused}"
            );
        }
    }

    #[test]
    fn a_login_does_not_go_to_a_server_that_redirects_to_the_registry() {
        let [registry, storage] = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let [host, far] = [&registry, &storage].map(|of| of.local_addr().unwrap().to_string());
        let (sender, receiver) = std::sync::mpsc::channel();
        let serve = |listener: TcpListener, answer: Box<dyn Fn(&str) -> String + Send>| {
            thread::spawn(move || {
                while let Ok((mut client, _)) = listener.accept() {
                    let mut bytes = [0; 4096];
                    let length = client.read(&mut bytes).unwrap_or(0);
                    let head = String::from_utf8_lossy(&bytes[..length]).to_lowercase();
                    let head = answer(&head) + "\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                    let _ = client.write_all(head.as_bytes());
                }
            });
        };
        let upload = format!("HTTP/1.1 202 Accepted\r\nLocation: http://{far}/u");
        serve(
            registry,
            Box::new(move |head| match head.split(' ').next() {
                Some("get") => "HTTP/1.1 200 OK".to_owned(),
                Some("head") => "HTTP/1.1 404 Not Found".to_owned(),
                Some("post") => upload.clone(),
                _ => "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"x\"".to_owned(),
            }),
        );
        let back = format!("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://{host}/v2/web/x");
        serve(
            storage,
            Box::new(move |head| {
                let _ = sender.send(head.contains("authorization:"));
                back.clone()
            }),
        );
        let login = Login { user: "user".to_owned(), password: "pass".to_owned() };
        let client = RegistryClient::new(&host, "web", Some(login), false, LIMITS).unwrap();
        run(async move {
            client.put_bytes(Bytes::from_static(b"x")).await.unwrap_err();
        });
        let logins: Vec<bool> = receiver.try_iter().collect();
        assert!(!logins.is_empty() && !logins.contains(&true), "{logins:?}");
    }

    /// Reads a request: its first line, and its body.
    fn request(client: &mut TcpStream) -> (String, Vec<u8>) {
        let (mut bytes, mut buffer) = (Vec::new(), [0; 1 << 16]);
        loop {
            let read = client.read(&mut buffer).unwrap();
            assert!(read > 0, "a request that was cut");
            bytes.extend(&buffer[..read]);
            let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
            let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if bytes.len() == end + 4 + length {
                return (head.lines().next().unwrap().to_owned(), bytes[end + 4..].to_vec());
            }
        }
    }

    #[test]
    fn a_long_blob_is_written_in_parts() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || {
            let (mut received, mut parts) = (Vec::new(), 0);
            loop {
                let (mut client, _) = listener.accept().unwrap();
                let (line, body) = request(&mut client);
                let status = match line.split(' ').next().unwrap() {
                    "HEAD" => "404 Not Found",
                    "POST" => "202 Accepted",
                    "PATCH" => {
                        parts += 1;
                        received.extend(body);
                        "202 Accepted"
                    }
                    "PUT" => "201 Created",
                    _ => "200 OK",
                };
                let answer = format!(
                    "HTTP/1.1 {status}\r\nLocation: /upload\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                );
                client.write_all(answer.as_bytes()).unwrap();
                if line.starts_with("PUT") {
                    return (received, parts, line);
                }
            }
        });
        let bytes = random_bytes("blob", as_usize(PART) + 5);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let (client, blob, length) = (client(&address), blob_of(&bytes), bytes.len() as u64);
        let digest = blob.digest.replace(':', "%3A");
        run(async move { assert_eq!(client.put_file(file, length).await.unwrap(), blob) });
        let (received, parts, line) = server.join().unwrap();
        assert!(received == bytes);
        assert_eq!(parts, 5);
        assert_eq!(line, format!("PUT /upload?digest={digest} HTTP/1.1"));
    }

    #[test]
    fn a_blob_is_read_from_a_registry_without_ranges() {
        const WHOLE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\n0123456789";
        let client = client(&registry(&[WHOLE]));
        let blob = blob_of(b"0123456789");
        assert_eq!(blob.digest, "sha256:84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882");
        run(async { assert_eq!(client.range(&blob, 3..6).await.unwrap(), &b"345"[..]) });
    }

    #[test]
    fn a_manifest_is_written_to_a_registry_without_location() {
        const CREATED: &str = "HTTP/1.1 201 Created\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        let client = client(&registry(&[CREATED]));
        let digest = blob_of(b"{}").digest;
        run(async {
            for name in [&*digest, "v1"] {
                client.put_manifest(name, MANIFEST, b"{}".to_vec()).await.unwrap();
            }
        });
    }
}
