// SPDX-License-Identifier: MIT OR Apache-2.0
//! URLs of stores and of images in them. The last part of an image's URL is its name, and what is before it
//! is the store.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::ImageStoreError;
use crate::names::is_image_name;

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
        let rest = text.strip_prefix("s3://").ok_or_else(|| wrong("no URL of a store"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        let parts_are_names = prefix.is_empty() || prefix.split('/').all(is_image_name);
        if !is_image_name(bucket) || !parts_are_names {
            return Err(wrong(
                "letters, digits, `.`, `_` and `-` make a bucket's name, and those of folders",
            ));
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
        }
    }
}

impl FromStr for ImageUrl {
    type Err = ImageStoreError;

    fn from_str(text: &str) -> Result<Self, ImageStoreError> {
        let wrong = |what| ImageStoreError::Url { url: text.to_owned(), what };
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
        write!(f, "{}/{}", self.store, self.name)
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
        ] {
            let message = image(text).unwrap_err();
            assert!(
                message.contains("expected s3://BUCKET/... or file:///DIRECTORY/..."),
                "{text}: {message}"
            );
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
}
