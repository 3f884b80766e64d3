// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens what a URL names: a directory, or a bucket with credentials from the usual places.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig};

use crate::error::{ImageStoreError, Result, reason};
use crate::profile::AwsProfile;
use crate::url::StoreUrl;

/// Time in which a server must accept a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Time in which a request must be answered as a whole: 16 MiB at half a megabit a second.
const REQUEST_LIMIT: Duration = Duration::from_secs(300);
/// Times that a request is sent again after a failure of the server or of the connection.
const RETRIES: usize = 8;
/// Time from the first attempt of a request after which it is not sent again.
const RETRY_LIMIT: Duration = Duration::from_secs(120);
/// Time before a request is sent again: it doubles from the first to the second of these.
const PAUSE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];

/// Opens a store. `create`: its directory may be missing.
pub(crate) fn connect(url: &StoreUrl, create: bool) -> Result<Arc<dyn ObjectStore>> {
    let setup = |what: String| ImageStoreError::Setup { url: url.to_string(), what };
    match url {
        StoreUrl::Directory(path) => {
            if create {
                // Memory may have secrets.
                let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
                made.map_err(|error| setup(format!("cannot make it: {error}")))?;
            }
            if !path.is_dir() {
                return Err(setup("no such directory: `rewake push` makes it".to_owned()));
            }
            let objects =
                LocalFileSystem::new_with_prefix(path).map_err(|error| setup(reason(&error.to_string())))?;
            Ok(Arc::new(objects.with_fsync(true)))
        }
        StoreUrl::S3 { bucket, prefix } => {
            let objects =
                builder(bucket).and_then(|builder| builder.build().map_err(|error| error.to_string()));
            let objects = objects.map_err(|what| setup(reason(&what)))?;
            if prefix.is_empty() {
                return Ok(Arc::new(objects));
            }
            Ok(Arc::new(PrefixStore::new(objects, prefix.as_str())))
        }
    }
}

/// Configures S3 by the environment, then by the profile files. Without credentials there, the host's are requested from
/// its metadata service.
fn builder(bucket: &str) -> Result<AmazonS3Builder, String> {
    // A second call, or another provider of the program's, is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
    let profile = AwsProfile::read(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))?;
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
            return Err("no credentials: neither in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) nor in a \
                        profile (~/.aws/credentials), and AWS_EC2_METADATA_DISABLED forbids the host's"
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
        let is_plain = endpoint.starts_with("http://");
        let allow = builder.get_config_value(&client(ClientConfigKey::AllowHttp));
        if is_plain && !is_loopback(&endpoint) && allow.as_deref() != Some("true") {
            return Err(format!(
                "{endpoint}: memory would travel unencrypted: use https, or set AWS_ALLOW_HTTP=true"
            ));
        }
        let allow = if is_plain { "true" } else { "false" };
        builder = builder.with_config(client(ClientConfigKey::AllowHttp), allow).with_endpoint(endpoint);
    }
    let seconds = |limit: Duration| format!("{} seconds", limit.as_secs());
    let backoff = BackoffConfig { init_backoff: PAUSE[0], max_backoff: PAUSE[1], base: 2.0 };
    let retry = RetryConfig { backoff, max_retries: RETRIES, retry_timeout: RETRY_LIMIT };
    Ok(builder
        .with_config(client(ClientConfigKey::ConnectTimeout), seconds(CONNECT_LIMIT))
        .with_config(client(ClientConfigKey::Timeout), seconds(REQUEST_LIMIT))
        .with_retry(retry))
}

fn client(key: ClientConfigKey) -> AmazonS3ConfigKey {
    AmazonS3ConfigKey::Client(key)
}

fn is_loopback(endpoint: &str) -> bool {
    let host = endpoint.trim_start_matches("http://");
    ["127.", "localhost:", "localhost/", "[::1]"].iter().any(|start| format!("{host}/").starts_with(start))
}
