// SPDX-License-Identifier: MIT OR Apache-2.0
//! A directory with images, a server of them in this process, and room for copies.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rewake_criu_images::{Inventory, write};
use rewake_image_transfer::pull::{ImageSource, PullReport, pull};
use rewake_image_transfer::server::connection::serve;
use rewake_image_transfer::server::exports::{Exports, ImageDirectory};
use rewake_manifest::{seal, verify};

pub(crate) const CHUNK: usize = 2 << 20;

pub(crate) fn inventory(image: &Path, run: u8) {
    let inventory = Inventory { version: 2, plugins: Vec::new(), run_id: Some(format!("run {run}").into()) };
    write::inventory(image, &inventory).unwrap();
}

/// A directory with the sealed image `web/1`, and room for copies of it.
pub(crate) struct Scene {
    pub(crate) dir: tempfile::TempDir,
}

impl Scene {
    /// Four chunks of memory without a pagemap: the third is zeros, and the fourth is the first again.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("exports/web/1");
        fs::create_dir_all(&image).unwrap();
        inventory(&image, 1);
        let chunk = |seed: usize| (0..CHUNK).map(move |at| u8::try_from((at / 7 + at * seed) % 251).unwrap());
        let memory: Vec<u8> =
            chunk(1).chain(chunk(2)).chain(std::iter::repeat_n(0, CHUNK)).chain(chunk(1)).collect();
        fs::write(image.join("pages-1.img"), memory).unwrap();
        seal(&image).unwrap();
        Self { dir }
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.dir.path().join("exports/web/1")
    }

    pub(crate) fn copy(&self) -> PathBuf {
        self.dir.path().join("copies/1")
    }

    /// Opens an image. Each connection is cut after `cut_after` bytes to the client.
    pub(crate) fn source(
        &self,
        image: &str,
        cut_after: usize,
    ) -> anyhow::Result<(ImageSource, Arc<AtomicUsize>)> {
        let exports =
            Arc::new(Exports::new(Arc::new(ImageDirectory::new(&self.dir.path().join("exports"))?)));
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        let connect = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            let (ours, mut theirs) = UnixStream::pair()?;
            let exports = Arc::clone(&exports);
            std::thread::spawn(move || serve(&exports, &mut theirs, |_, _| Ok(())));
            Ok(Box::new(Cut { stream: ours, left: cut_after }) as Box<_>)
        };
        Ok((ImageSource::open(connect, image)?, connections))
    }

    pub(crate) fn pull(&self) -> anyhow::Result<PullReport> {
        pull(&mut self.source("web/1", usize::MAX)?.0, &self.copy(), None, &[])
    }

    pub(crate) fn assert_copied(&self) {
        let report = verify(&self.copy(), |difference| panic!("{difference}")).unwrap();
        assert_eq!(report.id, verify(&self.image(), |_| ()).unwrap().id);
        for name in ["inventory.img", "pages-1.img", "rewake-manifest"] {
            assert!(
                fs::read(self.image().join(name)).unwrap() == fs::read(self.copy().join(name)).unwrap(),
                "{name}"
            );
        }
    }
}

/// A stream that ends after a number of bytes.
pub(crate) struct Cut {
    pub(crate) stream: UnixStream,
    pub(crate) left: usize,
}

impl Read for Cut {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(self.left);
        let read = self.stream.read(&mut into[..most])?;
        self.left -= read;
        Ok(read)
    }
}

impl Write for Cut {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
