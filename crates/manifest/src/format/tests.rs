// SPDX-License-Identifier: MIT OR Apache-2.0
//! Damaged and hostile manifests.

use std::fs;
use std::io::Write as _;

use super::*;

const SUM: Digest = Digest([7; 32]);

fn head(name: &str, length: u64) -> SealedFile {
    SealedFile { name: name.to_owned(), length, memory: true }
}

fn segment(length: u32, chunks: &[u32], blocks: usize) -> SealedSegment {
    let chunks = chunks.iter().map(|length| SealedChunk { length: *length, digest: SUM }).collect();
    SealedSegment { offset: 0, length, chunks, checksums: vec![5; blocks] }
}

/// Writes a manifest with `records`, and a hash that fits.
fn written(records: impl FnOnce(&mut ManifestWriter)) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(MANIFEST_NAME);
    let mut writer = ManifestWriter::new(File::create(&path).unwrap()).unwrap();
    records(&mut writer);
    writer.finish().unwrap();
    (dir, path)
}

fn read(path: &Path) -> Result<Vec<ManifestRecord>> {
    let file = File::open(path).unwrap();
    let length = file.metadata().unwrap().len();
    let mut reader = ManifestReader::of(file, length, path)?;
    let mut records = Vec::new();
    while let Some(record) = reader.next_record()? {
        records.push(record);
    }
    Ok(records)
}

/// The error of a manifest with these records: what was expected.
fn refused(records: impl FnOnce(&mut ManifestWriter)) -> String {
    let (_dir, path) = written(records);
    match read(&path) {
        Err(ManifestError::Damaged { expected, found, .. }) => format!("{expected}; {found}"),
        other => panic!("{other:?}"),
    }
}

fn two_files(writer: &mut ManifestWriter) {
    writer.parent(&SealedParent { target: b"../1".to_vec(), id: Some(SUM) }).unwrap();
    writer.file(&head("a.img", (4 << 20) + 9)).unwrap();
    writer.segment(&segment(4 << 20, &[2 << 20, 2 << 20], 64)).unwrap();
    writer.segment(&segment(9, &[9], 1)).unwrap();
    writer.file(&SealedFile { memory: false, ..head("b.img", 5) }).unwrap();
    writer.segment(&segment(5, &[], 0)).unwrap();
    writer.file(&head("c.img", 0)).unwrap();
}

#[test]
fn what_is_written_is_read() {
    let (_dir, path) = written(two_files);
    let at = |offset, segment| ManifestRecord::Segment(SealedSegment { offset, ..segment });
    let expected = [
        ManifestRecord::Parent(SealedParent { target: b"../1".to_vec(), id: Some(SUM) }),
        ManifestRecord::File(head("a.img", (4 << 20) + 9)),
        at(0, segment(4 << 20, &[2 << 20, 2 << 20], 64)),
        at(4 << 20, segment(9, &[9], 1)),
        ManifestRecord::File(SealedFile { memory: false, ..head("b.img", 5) }),
        at(0, segment(5, &[], 0)),
        ManifestRecord::File(head("c.img", 0)),
    ];
    assert_eq!(read(&path).unwrap(), expected);
}

#[test]
fn every_flipped_byte_and_every_cut_is_found() {
    let (_dir, path) = written(two_files);
    let whole = fs::read(&path).unwrap();
    let is_damaged = || matches!(read(&path), Err(ManifestError::Damaged { .. }));
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        fs::write(&path, &bytes).unwrap();
        assert!(is_damaged(), "byte {at}");
        fs::write(&path, &whole[..at]).unwrap();
        assert!(is_damaged(), "cut at {at}");
    }
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    fs::write(&path, &whole).unwrap();
    file.write_all(b"more").unwrap();
    assert!(is_damaged());
}

#[test]
fn a_manifest_of_a_later_version_is_refused_by_its_version() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(MANIFEST_NAME);
    let record = Record { what: Some(What::Start(raw::Start { version: 2 })) }.encode_to_vec();
    let mut bytes = [&MAGIC[..], &u32::try_from(record.len()).unwrap().to_le_bytes(), &record].concat();
    bytes.extend(blake3::hash(&bytes).as_bytes());
    fs::write(&path, bytes).unwrap();
    assert!(matches!(read(&path), Err(ManifestError::Version { expected: 1, found: 2, .. })));
}

#[test]
fn names_that_leave_the_directory_or_repeat_are_refused() {
    let paths = [&[""][..], &["../a.img"], &["a/b.img"], &[".."], &["parent"], &["rewake-manifest"]];
    for names in paths.into_iter().chain([&["b.img", "a.img"][..], &["a.img", "a.img"]]) {
        let said = refused(|writer| names.iter().for_each(|name| writer.file(&head(name, 0)).unwrap()));
        assert!(said.starts_with("the name of an image's file after"), "{names:?}: {said}");
    }
}

#[test]
fn segments_that_do_not_fit_the_file_are_refused() {
    let lone = |of: SealedSegment| {
        refused(|writer| {
            writer.file(&head("a.img", 5 << 20)).unwrap();
            writer.segment(&of).unwrap();
        })
    };
    let two = 2 << 20;
    for (what, of) in [
        ("0 bytes", segment(0, &[], 0)),
        ("longer than a segment", segment(5 << 20, &[], 0)),
        ("a chunk of zero bytes", segment(two, &[0, two], 32)),
        ("a chunk of 3 MiB", segment(3 << 20, &[3 << 20], 48)),
        ("chunks that are less", segment(two, &[two - 1], 32)),
        ("chunks whose sum overflows 32 bits", segment(0, &[u32::MAX, 1], 0)),
        ("too few checksums", segment(two, &[two], 31)),
        ("checksums without chunks", segment(two, &[], 32)),
    ] {
        assert!(lone(of).starts_with("a segment of the file"), "{what}");
    }
    let early = refused(|writer| writer.file(&head("a.img", 1)).unwrap());
    assert!(early.starts_with("a segment at 0 of a.img; the end"), "{early}");
    let late = refused(|writer| {
        writer.file(&head("a.img", 4)).unwrap();
        writer.segment(&segment(4, &[4], 1)).unwrap();
        writer.segment(&segment(4, &[4], 1)).unwrap();
    });
    assert!(late.starts_with("a segment of the file; 4 bytes, where 0 are left"), "{late}");
    let lone = refused(|writer| writer.segment(&segment(4, &[4], 1)).unwrap());
    assert!(lone.starts_with("a segment of the file"), "{lone}");
}

#[test]
fn chunks_and_segments_of_a_few_bytes_are_refused() {
    let of_file = |length, segments: &[SealedSegment]| {
        refused(|writer| {
            writer.file(&SealedFile { memory: false, ..head("a.img", length) }).unwrap();
            segments.iter().for_each(|of| writer.segment(of).unwrap());
        })
    };
    let tiny = of_file(8192, &[segment(8192, &[8; 1024], 0)]);
    assert_eq!(tiny, "a segment of the file; 1024 chunks of the first 8192 bytes, where 4 are the most");
    let zeros = of_file(9, &vec![segment(1, &[], 0); 9]);
    assert_eq!(zeros, "a segment of the file; 3 chunks of the first 3 bytes, where 2 are the most");
    // A header and a rest of a few bytes are what files of GPU memory have.
    let (_dir, path) = written(|writer| {
        writer.file(&SealedFile { memory: false, ..head("a.img", 8 + 4096 + 7) }).unwrap();
        writer.segment(&segment(8 + 4096 + 7, &[8, 4096, 7], 0)).unwrap();
    });
    assert_eq!(read(&path).unwrap().len(), 2);
}

#[test]
fn a_manifest_of_more_files_than_an_image_has_is_refused() {
    let (_dir, path) = written(|writer| {
        for name in ["a.img", "b.img"] {
            writer.file(&head(name, 0)).unwrap();
        }
    });
    let file = File::open(&path).unwrap();
    let length = file.metadata().unwrap().len();
    let mut reader = ManifestReader::of(file, length, &path).unwrap();
    reader.files = MAX_FILES - 1;
    assert!(reader.next_record().unwrap().is_some());
    let refused = reader.next_record().unwrap_err().to_string();
    assert!(refused.contains("expected at most 1048576 files, found \"b.img\""), "{refused}");
}

#[test]
fn a_file_of_exabytes_and_a_late_parent_are_refused() {
    let said = refused(|writer| writer.file(&head("a.img", MAX_FILE + 1)).unwrap());
    assert!(said.starts_with("a length of at most"), "{said}");
    let parent = SealedParent { target: Vec::new(), id: None };
    let said = refused(|writer| {
        writer.parent(&parent).unwrap();
        writer.parent(&parent).unwrap();
    });
    assert_eq!(said, "a file or the end; a parent");
}

#[test]
fn an_end_that_counts_other_files_or_bytes_is_refused() {
    let counted = |count: fn(&mut ManifestWriter)| {
        refused(|writer| {
            writer.file(&head("a.img", 0)).unwrap();
            count(writer);
        })
    };
    let files = counted(|writer| writer.files += 1);
    assert_eq!(files, "2 files of 0 bytes and the end; 1 files of 0 bytes, 0 bytes before the end");
    let bytes = counted(|writer| writer.bytes += 9);
    assert_eq!(bytes, "1 files of 9 bytes and the end; 1 files of 0 bytes, 0 bytes before the end");
    let early = counted(|writer| writer.record(What::End(raw::End { files: 1, bytes: 0 })).unwrap());
    assert!(early.starts_with("1 files of 0 bytes and the end; "), "an end before the end: {early}");
}

#[test]
fn a_manifest_that_is_written_while_it_is_read_is_not_of_its_id() {
    /// Files without bytes: more records than a reader has in memory at once.
    const FILES: usize = 2000;
    let (_dir, path) = written(|writer| {
        for number in 0..FILES {
            writer.file(&head(&format!("{number:04}.img"), 0)).unwrap();
        }
    });
    let open = || {
        let file = File::open(&path).unwrap();
        let length = file.metadata().unwrap().len();
        ManifestReader::of(file, length, &path).unwrap()
    };
    let mut reader = open();
    // A name that is as good as the one that was hashed.
    let bytes = fs::read(&path).unwrap();
    let at = bytes.windows(8).position(|name| name == b"1990.img").unwrap();
    File::options().write(true).open(&path).unwrap().write_all_at(b"199.", at as u64).unwrap();
    let refused = std::iter::from_fn(|| reader.next_record().transpose()).find_map(Result::err);
    let refused = refused.map(|error| error.to_string()).unwrap_or_default();
    assert!(refused.contains("other bytes, written meanwhile"), "{refused}");
}
