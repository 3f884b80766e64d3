// SPDX-License-Identifier: MIT OR Apache-2.0
//! URLs of stores and of images in them. The last part of an image's URL is its name, and what is before it
//! is the store. In a registry that part is the tag, and the store is the repository.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::ImageStoreError;

/// The longest name of an image.
const MAX_NAME: usize = 128;

/// Where a store is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// `s3://BUCKET/PREFIX`
    S3 {
        /// The bucket.
        bucket: String,
        /// The folder in it; empty for all of it.
        prefix: String,
    },
    /// `file:///DIRECTORY`
    Directory(PathBuf),
    /// `oci://REGISTRY/REPOSITORY`
    Registry {
        /// The host, and its port if it has one.
        registry: String,
        /// The repository: what holds images that differ in their tags.
        repository: String,
    },
}

/// An image in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageUrl {
    /// The store.
    pub store: StoreUrl,
    /// The image's name.
    pub name: String,
}

impl FromStr for StoreUrl {
    type Err = ImageStoreError;

    fn from_str(text: &str) -> Result<Self, ImageStoreError> {
        let wrong = |what| ImageStoreError::Url { url: text.to_owned(), what };
        if let Some(path) = text.strip_prefix("file://") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Directory(path))
            } else {
                Err(wrong("no absolute path"))
            };
        }
        if let Some(rest) = text.strip_prefix("oci://") {
            let (registry, repository) =
                rest.split_once('/').ok_or_else(|| wrong("no repository of a registry"))?;
            if !is_registry(registry) || !is_repository(repository) {
                return Err(wrong(
                    "HOST or HOST:PORT make a registry, and small letters, digits, `.`, `_` and `-` the \
                     parts of a repository",
                ));
            }
            return Ok(Self::Registry { registry: registry.to_owned(), repository: repository.to_owned() });
        }
        let rest = text.strip_prefix("s3://").ok_or_else(|| wrong("no URL of a store"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        let parts_are_names = prefix.is_empty() || prefix.split('/').all(is_image_name);
        if !is_image_name(bucket) || !parts_are_names {
            return Err(wrong("letters, digits, `.`, `_` and `-` make the names of buckets and folders"));
        }
        Ok(Self::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
            Self::Directory(path) => write!(f, "file://{}", path.display()),
            Self::Registry { registry, repository } => write!(f, "oci://{registry}/{repository}"),
        }
    }
}

impl StoreUrl {
    /// What is between the store and an image's name.
    pub(crate) fn separator(&self) -> char {
        match self {
            Self::Registry { .. } => ':',
            Self::S3 { .. } | Self::Directory(_) => '/',
        }
    }
}

/// Whether an image may have this name.
pub(crate) fn is_image_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with('.')
}

/// Whether a text is a host, or a host and a port.
fn is_registry(text: &str) -> bool {
    let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    !host.is_empty() && host.bytes().all(allowed) && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

fn is_repository(text: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'_' | b'-');
    let is_part = |part: &str| {
        let ends = [part.bytes().next(), part.bytes().next_back()];
        is_image_name(part)
            && part.bytes().all(allowed)
            && ends.into_iter().flatten().all(|byte| byte.is_ascii_alphanumeric())
    };
    text.split('/').all(is_part)
}

impl FromStr for ImageUrl {
    type Err = ImageStoreError;

    fn from_str(text: &str) -> Result<Self, ImageStoreError> {
        let wrong = |what| ImageStoreError::Url { url: text.to_owned(), what };
        if let Some(rest) = text.strip_prefix("oci://") {
            let tagged =
                rest.rsplit_once(':').filter(|(store, tag)| store.contains('/') && is_image_name(tag));
            let (store, tag) = tagged.ok_or_else(|| wrong("it has no tag"))?;
            let store = format!("oci://{store}").parse().map_err(|_| wrong("no repository of a registry"))?;
            return Ok(Self { store, name: tag.to_owned() });
        }
        let (store, name) = text.rsplit_once('/').ok_or_else(|| wrong("no URL of an image"))?;
        if store.ends_with('/') || !is_image_name(name) {
            return Err(wrong("its last part is no name of an image: letters, digits, `.`, `_` and `-`"));
        }
        let store = store.parse().map_err(|_| wrong("no URL of an image in a store"))?;
        Ok(Self { store, name: name.to_owned() })
    }
}

impl fmt::Display for ImageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.store, self.store.separator(), self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(text: &str) -> Result<(String, String), String> {
        let url: Result<ImageUrl, _> = text.parse();
        url.map(|url| (url.store.to_string(), url.name)).map_err(|error| error.to_string())
    }

    #[test]
    fn the_last_part_is_the_image_and_the_rest_the_store() {
        let both = |store: &str, name: &str| Ok((store.to_owned(), name.to_owned()));
        assert_eq!(image("s3://bucket/web"), both("s3://bucket", "web"));
        assert_eq!(image("s3://bucket/a/b/web-1.2_3"), both("s3://bucket/a/b", "web-1.2_3"));
        assert_eq!(image("file:///srv/store/web"), both("file:///srv/store", "web"));
    }

    #[test]
    fn an_image_of_a_registry_is_named_by_its_tag() {
        let both = |store: &str, name: &str| Ok((store.to_owned(), name.to_owned()));
        assert_eq!(image("oci://ghcr.io/a/b-c:v1.2_3"), both("oci://ghcr.io/a/b-c", "v1.2_3"));
        assert_eq!(image("oci://127.0.0.1:5000/web:1"), both("oci://127.0.0.1:5000/web", "1"));
        let url: ImageUrl = "oci://127.0.0.1:5000/web:1".parse().unwrap();
        assert_eq!(url.to_string(), "oci://127.0.0.1:5000/web:1");
        let (registry, repository) = ("127.0.0.1:5000".to_owned(), "web".to_owned());
        assert_eq!(url.store, StoreUrl::Registry { registry, repository });
    }

    #[test]
    fn other_texts_are_refused_in_one_line() {
        for text in [
            "",
            "web",
            "s3://bucket",
            "s3:///web",
            "s3://bucket//web",
            "s3://b/../web",
            "s3://b/.web",
            "s3://b/we b",
            "file://srv/web",
            "file:///srv/",
            "http://host/web",
            "host:web/1",
            "s3://b/a\nb",
            "oci://",
            "oci://host",
            "oci://host/web",
            "oci://host:5000/web",
            "oci://host/Web:1",
            "oci://host/a//b:1",
            "oci://host/../b:1",
            "oci://user:secret@host/web:1",
            "oci://host:port/web:1",
            "oci://host/web@sha256:0",
        ] {
            let message = image(text).unwrap_err();
            assert!(
                message.contains("expected s3://BUCKET/..., file:///DIRECTORY/... or oci://REGISTRY/"),
                "{text}: {message}"
            );
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
}
