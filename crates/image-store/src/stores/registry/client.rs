// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests to a repository of a registry: each has a limit, and is sent again after a failure that may pass.

use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use oci_client::client::{BlobResponse, ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::manifest::{
    IMAGE_MANIFEST_LIST_MEDIA_TYPE, IMAGE_MANIFEST_MEDIA_TYPE, OCI_IMAGE_INDEX_MEDIA_TYPE,
    OCI_IMAGE_MEDIA_TYPE,
};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use reqwest::StatusCode;
use reqwest::header::HeaderValue;
use ring::digest::{Context, SHA256};
use tokio::sync::OnceCell;
use tokio::time::{sleep, timeout};

use crate::answer::bounded;
use crate::connect::{NO_PROXY, PAUSE, RETRIES, RequestLimits};

use super::artifact::Blob;

/// Bytes of one request that writes a blob. A longer blob is written in parts.
const PART: u64 = 16 << 20;
/// Bytes of a long blob that are in memory.
const READ: u64 = 4 << 20;
/// The most tags that are listed.
const MAX_TAGS: usize = 10_000;
/// Tags of one listing.
const TAGS: usize = 1000;
/// What the program calls itself.
const USER_AGENT: &str = concat!("rewake/", env!("CARGO_PKG_VERSION"));

/// Why a request failed.
#[derive(Debug)]
pub(super) enum RegistryError {
    /// The registry does not have it.
    Missing,
    /// The registry's answer, in one line and without addresses: those of redirections may have signatures.
    Refused(String),
}

impl fmt::Display for RegistryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("the registry does not have it"),
            Self::Refused(reason) => f.write_str(reason),
        }
    }
}

impl Error for RegistryError {}

/// A repository of a registry.
#[derive(Clone)]
pub(super) struct RegistryClient {
    repository: Reference,
    auth: RegistryAuth,
    operation: RegistryOperation,
    limits: RequestLimits,
    /// For manifests and tags. This client always asks which authorization is needed.
    manifests: Client,
    /// For blobs. It has no credentials where none are needed: with them, each request would be two.
    blobs: Client,
    /// For long blobs, which are written in parts.
    long_blobs: Client,
    is_ready: Arc<OnceCell<()>>,
}

impl fmt::Debug for RegistryClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RegistryClient").field(&self.repository).finish()
    }
}

type Attempt<T> = Result<T, OciDistributionError>;

impl RegistryClient {
    /// `write`: for a push.
    pub(super) fn new(
        registry: &str,
        repository: &str,
        auth: RegistryAuth,
        write: bool,
        limits: RequestLimits,
    ) -> Result<Self, String> {
        // A second call, or another provider of the program's, is no error.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = |is_whole| {
            let is_own = is_loopback(registry);
            let config = ClientConfig {
                protocol: if is_own { ClientProtocol::Http } else { ClientProtocol::Https },
                http_proxy: is_own.then(|| NO_PROXY[0].to_owned()),
                no_proxy: is_own.then(|| NO_PROXY[1].to_owned()),
                use_monolithic_push: is_whole,
                connect_timeout: Some(limits.connect),
                read_timeout: Some(limits.silence),
                user_agent: USER_AGENT,
                ..ClientConfig::default()
            };
            Client::try_from(config).map_err(|error| described(&error))
        };
        let repository = Reference::with_tag(registry.to_owned(), repository.to_owned(), "latest".to_owned());
        let operation = if write { RegistryOperation::Push } else { RegistryOperation::Pull };
        let (manifests, blobs, long_blobs) = (client(true)?, client(true)?, client(false)?);
        let is_ready = Arc::default();
        Ok(Self { repository, auth, operation, limits, manifests, blobs, long_blobs, is_ready })
    }

    /// Reads what a tag or a digest names: its bytes, which have that digest. `None` if there is nothing.
    pub(super) async fn manifest(&self, name: &str) -> Result<Option<Bytes>, RegistryError> {
        let named = self.named(name);
        // A tag with an image of Docker's is not free: a registry may say that it is, if its types are not accepted.
        let types = [
            OCI_IMAGE_INDEX_MEDIA_TYPE,
            OCI_IMAGE_MEDIA_TYPE,
            IMAGE_MANIFEST_LIST_MEDIA_TYPE,
            IMAGE_MANIFEST_MEDIA_TYPE,
        ];
        let read = self.retried(|| self.manifests.pull_manifest_raw(&named, &self.auth, &types)).await;
        match read {
            Err(RegistryError::Missing) => Ok(None),
            read => read.map(|(bytes, _)| Some(bytes)),
        }
    }

    /// Writes a manifest or an index of this type.
    pub(super) async fn put_manifest(
        &self,
        name: &str,
        media_type: &'static str,
        bytes: Vec<u8>,
    ) -> Result<(), RegistryError> {
        let (registry, repository) = (self.repository.registry(), self.repository.repository());
        // A digest, too, is given as a tag, which makes the same address: the client looks for the tag at the end of it
        // where a registry answers without `Location`.
        let named = Reference::with_tag(registry.to_owned(), repository.to_owned(), name.to_owned());
        let bytes = Bytes::from(bytes);
        let content = HeaderValue::from_static(media_type);
        let put = || self.blobs.push_manifest_raw(&named, bytes.clone(), content.clone());
        self.retried(put).await.map(drop)
    }

    /// Lists the tags of the repository.
    pub(super) async fn tags(&self) -> Result<Vec<String>, RegistryError> {
        let mut tags: Vec<String> = Vec::new();
        while tags.len() < MAX_TAGS {
            let last = tags.last().cloned();
            let list = || self.manifests.list_tags(&self.repository, &self.auth, Some(TAGS), last.as_deref());
            let more: Vec<_> = self.retried(list).await?.tags;
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
    pub(super) async fn range(&self, blob: &Blob, range: Range<u64>) -> Result<Bytes, RegistryError> {
        self.retried(|| self.read(blob, range.clone())).await
    }

    async fn read(&self, blob: &Blob, range: Range<u64>) -> Attempt<Bytes> {
        let length = range.end - range.start;
        let digest = &*blob.digest;
        let found = self.blobs.pull_blob_stream_partial(&self.repository, digest, range.start, Some(length));
        // A registry without ranges sends all of the blob.
        let (mut stream, mut skipped) = match found.await? {
            BlobResponse::Partial(found) => (found.stream, 0),
            BlobResponse::Full(found) => (found.stream, range.start),
        };
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length
            && let Some(part) = stream.next().await.transpose()?
        {
            let skip = skipped.min(part.len() as u64);
            skipped -= skip;
            let left = length - bytes.len() as u64;
            bytes.extend(part.iter().skip(as_usize(skip)).take(as_usize(left)));
        }
        Ok(bytes.into())
    }

    /// Whether the registry has a blob.
    pub(super) async fn has(&self, blob: &Blob) -> Result<bool, RegistryError> {
        self.retried(|| self.blobs.blob_exists(&self.repository, &blob.digest)).await
    }

    /// Writes a blob, if the registry does not have it.
    pub(super) async fn put_bytes(&self, bytes: Bytes) -> Result<Blob, RegistryError> {
        let blob = blob_of(&bytes);
        if self.has(&blob).await? {
            return Ok(blob);
        }
        let put = || self.blobs.push_blob(&self.repository, bytes.clone(), &blob.digest);
        self.retried(put).await?;
        Ok(blob)
    }

    /// Writes the bytes of a file as a blob, if the registry does not have it.
    pub(super) async fn put_file(&self, file: File, length: u64) -> Result<Blob, RegistryError> {
        let failed = |error: io::Error| RegistryError::Refused(format!("a temporary file: {error}"));
        if length <= PART {
            let mut bytes = vec![0; as_usize(length)];
            file.read_exact_at(&mut bytes, 0).map_err(failed)?;
            return self.put_bytes(bytes.into()).await;
        }
        let file = Arc::new(file);
        let mut context = Context::new(&SHA256);
        for offset in (0..length).step_by(as_usize(READ)) {
            context.update(&part(&file, offset, length).map_err(failed)?);
        }
        let blob = Blob { digest: digest_of(context), length };
        if self.has(&blob).await? {
            return Ok(blob);
        }
        // Each part of it has the limit of a silent server.
        let put = || {
            let parts = parts(Arc::clone(&file), length);
            self.long_blobs.push_blob_stream(&self.repository, parts, &blob.digest, Some(length))
        };
        self.repeated(put, |attempt| async { Ok::<_, Infallible>(attempt.await) }).await?;
        Ok(blob)
    }

    fn named(&self, name: &str) -> Reference {
        let (registry, repository) = (self.repository.registry(), self.repository.repository());
        let (registry, repository, name) = (registry.to_owned(), repository.to_owned(), name.to_owned());
        if name.starts_with("sha256:") {
            return Reference::with_digest(registry, repository, name);
        }
        Reference::with_tag(registry, repository, name)
    }

    /// Asks once which authorization the registry needs.
    async fn authorize(&self) -> Attempt<()> {
        let ready = self.is_ready.get_or_try_init(async || {
            let token = self.manifests.auth(&self.repository, &self.auth, self.operation).await?;
            if token.is_some() || !matches!(self.auth, RegistryAuth::Anonymous) {
                for client in [&self.blobs, &self.long_blobs] {
                    client.store_auth_if_needed(self.repository.resolve_registry(), &self.auth).await;
                }
            }
            Ok(())
        });
        ready.await.copied()
    }

    /// Sends a request, and again after a failure that may pass.
    async fn retried<T, F>(&self, send: impl Fn() -> F) -> Result<T, RegistryError>
    where
        F: Future<Output = Attempt<T>>,
    {
        self.repeated(send, |attempt| timeout(self.limits.request, attempt)).await
    }

    /// As [`RegistryClient::retried`]; `within` bounds an attempt.
    async fn repeated<T, F, W, L>(
        &self,
        send: impl Fn() -> F,
        within: impl Fn(F) -> W,
    ) -> Result<T, RegistryError>
    where
        F: Future<Output = Attempt<T>>,
        W: Future<Output = Result<Attempt<T>, L>>,
    {
        let (start, mut pause, mut attempts) = (Instant::now(), PAUSE[0], 0);
        loop {
            attempts += 1;
            let sent = match timeout(self.limits.request, self.authorize()).await {
                Ok(Ok(())) => within(send()).await.ok(),
                Ok(Err(error)) => Some(Err(error)),
                Err(_) => None,
            };
            let (reason, may_pass) = match sent {
                Some(Ok(found)) => return Ok(found),
                Some(Err(error)) if is_missing(&error) => return Err(RegistryError::Missing),
                Some(Err(error)) => (described(&error), may_pass(&error)),
                None => (format!("no answer within {} s", self.limits.request.as_secs()), true),
            };
            if !may_pass || attempts > RETRIES || start.elapsed() >= self.limits.retry {
                return Err(RegistryError::Refused(reason));
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

/// Reads the part of a file that begins at an offset.
fn part(file: &File, offset: u64, length: u64) -> io::Result<Bytes> {
    let mut bytes = vec![0; as_usize(READ.min(length - offset))];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes.into())
}

fn parts(file: Arc<File>, length: u64) -> impl Stream<Item = Attempt<Bytes>> + Send + 'static {
    let offsets = (0..length).step_by(as_usize(READ));
    futures::stream::iter(offsets).map(move |offset| Ok(part(&file, offset, length)?))
}

fn as_usize(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

/// Whether a registry is one of this host: it needs no TLS.
fn is_loopback(registry: &str) -> bool {
    let host = registry.split(':').next().unwrap_or_default();
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn is_missing(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::ImageManifestNotFoundError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code == 404,
        OciDistributionError::RegistryError { envelope, .. } => envelope.errors.iter().any(|error| {
            let missing =
                [OciErrorCode::BlobUnknown, OciErrorCode::ManifestUnknown, OciErrorCode::NameUnknown];
            missing.contains(&error.code)
        }),
        _ => false,
    }
}

/// Whether the same request may succeed later.
fn may_pass(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::RequestError(error) => {
            let passes =
                |status: StatusCode| status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
            error.status().is_none_or(passes) && !error.is_builder()
        }
        OciDistributionError::IoError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code >= 500 || *code == 429,
        OciDistributionError::RegistryError { envelope, .. } => {
            envelope.errors.iter().any(|error| error.code == OciErrorCode::Toomanyrequests)
        }
        _ => false,
    }
}

/// Returns what a registry answered, in one line. Addresses are left out: those of redirections may have signatures.
fn described(error: &OciDistributionError) -> String {
    const UNAUTHORIZED: &str = "401 Unauthorized: it needs other credentials, which are in $REGISTRY_AUTH_FILE, \
                                podman's auth.json or ~/.docker/config.json: `skopeo login` writes them";
    let text = match error {
        OciDistributionError::UnauthorizedError { .. } => UNAUTHORIZED.to_owned(),
        OciDistributionError::ServerError { code: 401, .. } => UNAUTHORIZED.to_owned(),
        OciDistributionError::AuthenticationFailure(reason) => {
            format!("the server of the registry's tokens refused: {reason}")
        }
        OciDistributionError::ServerError { code, message, .. } => {
            format!("the registry answered {code}: {message}")
        }
        OciDistributionError::RegistryError { envelope, .. } => {
            let errors = envelope.errors.iter().map(|error| format!("{:?}: {}", error.code, error.message));
            format!("the registry refused: {}", errors.collect::<Vec<_>>().join("; "))
        }
        OciDistributionError::RequestError(error) => match error.status() {
            Some(status) => format!("the registry answered {status}"),
            None => format!("the connection failed: {}", innermost(error)),
        },
        OciDistributionError::IoError(error) => format!("the connection failed: {}", innermost(error)),
        other => other.to_string(),
    };
    bounded(&text)
}

/// Returns the first cause: what is around it has addresses.
fn innermost(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::testing::{random_bytes, run};

    const LIMITS: RequestLimits = RequestLimits {
        connect: Duration::from_secs(5),
        silence: Duration::from_secs(5),
        request: Duration::from_secs(5),
        retry: Duration::from_millis(300),
    };

    /// Needs no authorization, and answers other requests in this order, the last one again and again. Returns its
    /// address.
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
        RegistryClient::new(address, "web", RegistryAuth::Anonymous, false, LIMITS).unwrap()
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

    /// A registry that wants a token, which is given for a password. Returns its address.
    fn registry_with_tokens() -> String {
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
                        ("200 OK", r#"{"token":"t0k3n"}"#)
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
        let address = registry_with_tokens();
        let blob = blob_of(b"0123456789");
        let read = async |password: &str| {
            let auth = RegistryAuth::Basic("user".to_owned(), password.to_owned());
            let client = RegistryClient::new(&address, "web", auth, false, LIMITS).unwrap();
            client.range(&blob, 0..10).await.map_err(|error| error.to_string())
        };
        run(async {
            assert_eq!(read("pass").await, Ok(Bytes::from_static(b"0123456789")));
            let refused = read("s3cr3t").await.unwrap_err();
            assert_eq!(refused, "the server of the registry's tokens refused: no");
        });
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
                client.put_manifest(name, OCI_IMAGE_MEDIA_TYPE, b"{}".to_vec()).await.unwrap();
            }
        });
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
}
