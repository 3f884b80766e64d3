// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens what a URL names: a directory, or a bucket or a registry with credentials from the usual places.

use std::fs::DirBuilder;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredential, AwsCredentialProvider};
use object_store::local::LocalFileSystem;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ClientConfigKey, CredentialProvider, ObjectStore, RetryConfig};
use reqwest::Url;

use crate::answer::reason;
use crate::error::{ImageStoreError, Result};
use crate::profile::AwsProfile;
use crate::registry::ImageRepository;
use crate::store::{MARKER, inside_another};
use crate::url::StoreUrl;

/// The limits of one request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestLimits {
    /// Time in which a server must accept a connection.
    pub(crate) connect: Duration,
    /// Time in which a server must send bytes. It includes the time in which a request is sent.
    pub(crate) silence: Duration,
    /// Time in which a request must be answered as a whole.
    pub(crate) request: Duration,
    /// Time from the first attempt of a request after which it is not sent again.
    pub(crate) retry: Duration,
}

/// Of commands that read: a request is short.
pub(crate) const READ_LIMITS: RequestLimits = RequestLimits {
    connect: Duration::from_secs(5),
    silence: Duration::from_secs(20),
    request: Duration::from_secs(60),
    retry: Duration::from_secs(200),
};
/// Of a push, which sends four packs of 16 MiB at once: a link of 10 Mbit/s takes 54 s.
const PUSH_LIMITS: RequestLimits = RequestLimits { silence: Duration::from_secs(60), ..READ_LIMITS };
/// A request that hangs is sent again three times.
const _: () = assert!(READ_LIMITS.retry.as_secs() > 3 * READ_LIMITS.request.as_secs());
/// Times that a request is sent again after a failure of the server or of the connection.
pub(crate) const RETRIES: usize = 8;
/// Time before a request is sent again: it doubles from the first to the second of these.
pub(crate) const PAUSE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];
/// A proxy, and the hosts that are reached without it, which are all hosts. With these, a client does not use
/// the environment's proxies. For such a proxy, an address of this host would mean another server, and it
/// would see all bytes in clear.
pub(crate) const NO_PROXY: [&str; 2] = ["http://127.0.0.1:9", "*,0.0.0.0/0,::/0"];

/// What a URL names.
#[derive(Debug)]
pub(crate) enum Connected {
    /// A bucket or a directory.
    Objects {
        objects: Arc<dyn ObjectStore>,
        /// The folders above it in its bucket, with their URLs, if this is for a push. A directory has none
        /// here, because its parent folders have been checked already.
        above: Vec<(String, Arc<dyn ObjectStore>)>,
    },
    /// A repository of a registry.
    Repository(Arc<ImageRepository>),
}

/// Opens a store. `create`: for a push; its directory may be missing.
pub(crate) fn connect(url: &StoreUrl, create: bool) -> Result<Connected> {
    let setup = |what: String| ImageStoreError::Setup { url: url.to_string(), what };
    let limits = if create { PUSH_LIMITS } else { READ_LIMITS };
    match url {
        StoreUrl::Registry { registry, repository } => {
            let repository = ImageRepository::open(registry, repository, create, limits)?;
            Ok(Connected::Repository(Arc::new(repository)))
        }
        StoreUrl::Directory(path) => {
            if create {
                let is_store = |path: &Path| path.join(MARKER).is_file();
                let mut above = path.ancestors().skip(1);
                if !is_store(path)
                    && let Some(outer) = above.find(|path| is_store(path))
                {
                    return Err(setup(inside_another(&format!("file://{}", outer.display()))));
                }
                // Memory may have secrets.
                let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
                made.map_err(|error| setup(format!("cannot make it: {error}")))?;
            }
            if !path.is_dir() {
                return Err(setup("no such directory: `rewake push` makes it".to_owned()));
            }
            let objects =
                LocalFileSystem::new_with_prefix(path).map_err(|error| setup(reason(&error.to_string())))?;
            Ok(Connected::Objects { objects: Arc::new(objects.with_fsync(true)), above: Vec::new() })
        }
        StoreUrl::S3 { bucket, prefix } => {
            let objects = builder(bucket).and_then(|builder| bucket_of(limited(builder, limits)));
            let objects = objects.map_err(|what| setup(reason(&what)))?;
            let bucket_objects: Arc<dyn ObjectStore> = Arc::new(objects);
            Ok(Connected::Objects {
                objects: folder(&bucket_objects, prefix),
                above: if create { above(&bucket_objects, bucket, prefix) } else { Vec::new() },
            })
        }
    }
}

/// A folder of a bucket.
fn folder(bucket: &Arc<dyn ObjectStore>, prefix: &str) -> Arc<dyn ObjectStore> {
    match prefix {
        "" => Arc::clone(bucket),
        _ => Arc::new(PrefixStore::new(Arc::clone(bucket), prefix)),
    }
}

/// The folders above one of a bucket, with their URLs.
fn above(objects: &Arc<dyn ObjectStore>, bucket: &str, prefix: &str) -> Vec<(String, Arc<dyn ObjectStore>)> {
    let ends = prefix.match_indices('/').map(|(end, _)| end).rev();
    let outer = ends.map(|end| &prefix[..end]).chain((!prefix.is_empty()).then_some(""));
    let url =
        |prefix: &str| StoreUrl::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() }.to_string();
    outer.map(|prefix| (url(prefix), folder(objects, prefix))).collect()
}

/// Configures S3 by the environment, then by the profile files. Without credentials there, the host's are
/// requested from its metadata service.
fn builder(bucket: &str) -> Result<AmazonS3Builder, String> {
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
    let profile = AwsProfile::read(|name| std::env::var_os(name).filter(|value| !value.is_empty()))?;
    let has = |builder: &AmazonS3Builder, key| builder.get_config_value(&key).is_some();
    let has_credentials = [
        AmazonS3ConfigKey::AccessKeyId,
        AmazonS3ConfigKey::SecretAccessKey,
        AmazonS3ConfigKey::WebIdentityTokenFile,
        AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
        AmazonS3ConfigKey::ContainerCredentialsFullUri,
    ];
    if !has_credentials.into_iter().any(|key| has(&builder, key)) {
        if let Some(keys) = profile.keys()? {
            builder = builder.with_access_key_id(keys.id).with_secret_access_key(keys.secret);
            if let Some(token) = keys.token {
                builder = builder.with_token(token);
            }
        } else if std::env::var("AWS_EC2_METADATA_DISABLED").is_ok_and(|value| value == "true") {
            return Err("no credentials: neither in the environment (AWS_ACCESS_KEY_ID, \
                        AWS_SECRET_ACCESS_KEY) nor in a profile (~/.aws/credentials), and \
                        AWS_EC2_METADATA_DISABLED forbids the host's"
                .to_owned());
        }
    }
    if let Some(region) = profile.region.filter(|_| {
        !has(&builder, AmazonS3ConfigKey::Region) && !has(&builder, AmazonS3ConfigKey::DefaultRegion)
    }) {
        builder = builder.with_region(region);
    }
    let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
        .into_iter()
        .find_map(|key| builder.get_config_value(&key))
        .or(profile.endpoint);
    if let Some(endpoint) = endpoint {
        let allow = builder.get_config_value(&client(ClientConfigKey::AllowHttp));
        let is_plain = is_plain(&endpoint, allow.as_deref() == Some("true"))?;
        builder = builder
            .with_config(client(ClientConfigKey::AllowHttp), is_plain.to_string())
            .with_endpoint(&endpoint);
        if Url::parse(&endpoint).is_ok_and(|url| is_loopback(&url)) {
            builder = builder
                .with_config(client(ClientConfigKey::ProxyUrl), NO_PROXY[0])
                .with_config(client(ClientConfigKey::ProxyExcludes), NO_PROXY[1]);
        }
    }
    Ok(builder)
}

/// Opens a bucket. `object_store` makes headers of credentials and of the region, and panics where a
/// character fits in no header: what it gets is looked at before.
fn bucket_of(builder: AmazonS3Builder) -> Result<AmazonS3, String> {
    for key in [AmazonS3ConfigKey::Region, AmazonS3ConfigKey::DefaultRegion] {
        if let Some(region) = builder.get_config_value(&key).filter(|region| !is_printable(region)) {
            return Err(format!("the region {region:?}: expected printable ASCII"));
        }
    }
    let build = |builder: AmazonS3Builder| builder.build().map_err(|error| error.to_string());
    let credentials = Arc::clone(build(builder.clone())?.credentials());
    build(builder.with_credentials(Arc::new(PrintableCredentials(credentials))))
}

/// Refuses credentials that fit in no header. They come from a profile, a server of tokens or the metadata
/// service.
#[derive(Debug)]
struct PrintableCredentials(AwsCredentialProvider);

#[async_trait]
impl CredentialProvider for PrintableCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let found = self.0.get_credential().await?;
        if is_printable(&found.key_id) && found.token.as_deref().is_none_or(is_printable) {
            return Ok(found);
        }
        let source = "the credentials have characters that no header can have: expected printable ASCII in \
                      the key's id (AWS_ACCESS_KEY_ID) and in the token (AWS_SESSION_TOKEN)";
        Err(object_store::Error::Generic { store: "S3", source: source.into() })
    }
}

fn is_printable(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

/// Adds the limits of requests.
fn limited(builder: AmazonS3Builder, limits: RequestLimits) -> AmazonS3Builder {
    // A second call, or another provider of the program's, is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let time = |limit: Duration| format!("{}ms", limit.as_millis());
    let backoff = BackoffConfig { init_backoff: PAUSE[0], max_backoff: PAUSE[1], base: 2.0 };
    let retry = RetryConfig { backoff, max_retries: RETRIES, retry_timeout: limits.retry };
    builder
        // The answer to a request that removes many objects names them, and `object_store` panics if it names
        // another.
        .with_disable_bulk_delete(true)
        .with_config(client(ClientConfigKey::ConnectTimeout), time(limits.connect))
        .with_config(client(ClientConfigKey::ReadTimeout), time(limits.silence))
        .with_config(client(ClientConfigKey::Timeout), time(limits.request))
        .with_retry(retry)
}

fn client(key: ClientConfigKey) -> AmazonS3ConfigKey {
    AmazonS3ConfigKey::Client(key)
}

/// Whether a server's URL is one without TLS: only of this host, unless `allowed`. It is parsed as the client
/// does it.
fn is_plain(endpoint: &str, allowed: bool) -> Result<bool, String> {
    let url = Url::parse(endpoint).map_err(|error| format!("the endpoint is no URL: {error}"))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(
            "the endpoint has a user or a password: expected https://HOST or https://HOST:PORT".to_owned()
        );
    }
    match url.scheme() {
        "https" => Ok(false),
        "http" if allowed || is_loopback(&url) => Ok(true),
        "http" => {
            Err(format!("{endpoint}: memory would travel unencrypted: use https, or set AWS_ALLOW_HTTP=true"))
        }
        _ => Err("the endpoint is no URL of a server: expected https://HOST or https://HOST:PORT".to_owned()),
    }
}

/// Whether a URL names this host.
fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;
    use std::time::Instant;

    use object_store::ObjectStoreExt as _;

    use super::*;
    use crate::store::ImageStore;
    use crate::testing::run;

    #[test]
    fn only_addresses_of_this_host_need_no_tls() {
        for own in [
            "http://127.0.0.1:8333",
            "http://localhost",
            "http://[::1]:80/x",
            "http://[::1]",
            "http://127.1.2.3/",
        ] {
            assert_eq!(is_plain(own, false), Ok(true), "{own}");
        }
        for other in [
            "http://127.example.com",
            "http://127.0.0.1.example.com",
            "http://10.0.0.1:80",
            "http://localhost.example.com/",
            "http://[fe80::1]",
            "http:///example.com",
            "HTTP://example.com",
        ] {
            let refused = is_plain(other, false).unwrap_err();
            assert!(refused.contains("memory would travel unencrypted"), "{other}: {refused}");
            assert_eq!(is_plain(other, true), Ok(true), "{other}");
        }
        assert_eq!(is_plain("https://example.com", false), Ok(false));
    }

    #[test]
    fn an_endpoint_with_a_user_is_refused_and_not_shown() {
        for endpoint in
            ["http://127.0.0.1@example.com", "http://localhost:secret@example.com", "https://a:secret@b"]
        {
            let refused = is_plain(endpoint, true).unwrap_err();
            assert!(refused.contains("a user or a password") && !refused.contains("secret"), "{refused}");
        }
        assert!(is_plain("localhost:8333", false).unwrap_err().contains("expected https://HOST"));
        assert!(is_plain("no URL", false).unwrap_err().contains("no URL"));
    }

    #[test]
    fn no_store_is_made_inside_another_one_of_the_bucket() {
        let bucket: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
        let store = |prefix: &str| {
            let objects = folder(&bucket, prefix);
            let url = StoreUrl::S3 { bucket: "b".to_owned(), prefix: prefix.to_owned() };
            ImageStore::connected(Connected::Objects { objects, above: above(&bucket, "b", prefix) }, &url)
        };
        run(async {
            for made in ["a", "x/y", "x/z", "a"] {
                store(made).mark().await.unwrap();
            }
            for (inside, outer) in [("a/b", "s3://b/a"), ("a/b/c", "s3://b/a"), ("x/y/z", "s3://b/x/y")] {
                let refused = store(inside).mark().await.unwrap_err().to_string();
                let expected = format!("s3://b/{inside}: {outer} is a store, and no store is made inside");
                assert!(refused.starts_with(&expected), "{refused}");
                assert!(matches!(store(inside).require().await, Err(ImageStoreError::NoStore { .. })));
            }
            store("").mark().await.unwrap();
            assert!(store("new").mark().await.unwrap_err().to_string().contains("s3://b is a store"));
        });
    }

    #[test]
    fn no_directory_is_made_for_a_store_inside_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let url = |name: &str| StoreUrl::Directory(folder.path().join(name));
        run(async {
            ImageStore::create(&url("store")).unwrap().mark().await.unwrap();
            ImageStore::create(&url("store")).unwrap().mark().await.unwrap();
            ImageStore::create(&url("beside")).unwrap().mark().await.unwrap();
            let refused = ImageStore::create(&url("store/new/one")).unwrap_err().to_string();
            assert!(refused.contains("/store is a store, and no store is made inside"), "{refused}");
            assert!(!folder.path().join("store/new").exists());
        });
    }

    #[test]
    fn a_request_to_a_silent_server_is_sent_again() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            let (silent, _) = listener.accept().unwrap();
            let (mut second, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            assert!(second.read(&mut request).unwrap() > 0);
            let answer = "HTTP/1.1 200 OK\r\nContent-Length: 15\r\nETag: \"1\"\r\n\
                          Last-Modified: Thu, 26 Nov 2026 06:00:00 GMT\r\n\r\nrewake-store 1\n";
            second.write_all(answer.as_bytes()).unwrap();
            drop(silent);
        });
        let builder = AmazonS3Builder::new().with_bucket_name("bucket").with_region("here");
        let builder = builder.with_access_key_id("id").with_secret_access_key("key");
        let builder = builder.with_endpoint(endpoint).with_allow_http(true);
        let limits = RequestLimits { silence: Duration::from_millis(300), ..READ_LIMITS };
        let objects = Arc::new(limited(builder, limits).build().unwrap());
        let start = Instant::now();
        run(async {
            let read = ImageStore::of(objects);
            tokio::time::timeout(Duration::from_secs(20), read.require()).await.unwrap().unwrap();
        });
        assert!(start.elapsed() >= Duration::from_millis(300));
        server.join().unwrap();
    }

    /// A bucket on a server that gives each request this answer.
    fn bucket(answer: &'static str, configured: impl Fn(AmazonS3Builder) -> AmazonS3Builder) -> AmazonS3 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            while let Ok((mut client, _)) = listener.accept() {
                let _ = client.read(&mut [0; 4096]);
                let _ = client.write_all(answer.as_bytes());
            }
        });
        let builder = AmazonS3Builder::new().with_bucket_name("bucket").with_region("here");
        let builder = builder.with_access_key_id("id").with_secret_access_key("key");
        let builder = builder.with_endpoint(endpoint).with_allow_http(true);
        bucket_of(limited(configured(builder), READ_LIMITS)).unwrap()
    }

    #[test]
    fn credentials_that_fit_in_no_header_are_one_line() {
        const ANSWER: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        run(async {
            for configured in [
                (|builder| builder.with_access_key_id("i\nd")) as fn(AmazonS3Builder) -> AmazonS3Builder,
                |builder| builder.with_token("caf\u{e9}"),
            ] {
                let store = ImageStore::of(Arc::new(bucket(ANSWER, configured)));
                let refused = store.require().await.unwrap_err().to_string();
                assert!(refused.contains("no header") && refused.lines().count() == 1, "{refused}");
            }
        });
        let builder = AmazonS3Builder::new().with_bucket_name("bucket").with_region("he\nre");
        assert!(bucket_of(builder).unwrap_err().contains("\"he\\nre\": expected printable ASCII"));
    }

    #[test]
    fn a_bucket_that_answers_about_another_object_is_no_panic() {
        const BODY: &str =
            "<DeleteResult><Error><Key>other</Key><Code>No</Code><Message>m</Message></Error></DeleteResult>";
        let answer =
            format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{BODY}", BODY.len());
        let bucket = bucket(answer.leak(), |builder| builder);
        run(async move { bucket.delete(&object_store::path::Path::from("packs/a")).await.unwrap() });
    }
}
