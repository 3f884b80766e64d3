// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replays and mutates the fuzzers' corpus: for two seconds on stable Rust, where cargo-fuzz takes hours.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rewake_criu_images::fuzz::{FuzzKind, fuzz_one};
use rewake_testkit::Random;

/// Time for random mutations of all kinds together.
const MUTATION_TIME: Duration = Duration::from_secs(2);
/// The fewest mutants of one kind, for any time: enough that some are accepted and some are not.
const FEWEST: u64 = 1000;
/// The most mutants: on a fast machine they end the run.
const MUTANTS: u64 = 200_000;

/// Files of a kind's corpus, by name.
fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a folder is read").path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), std::fs::read(path).expect("a seed is read"))).collect()
}

/// Numbers that are hard for parsers, as bytes.
const EDGES: [&[u8]; 6] =
    [&[0], &[0xff; 4], &[0xff; 10], &[0, 0, 0, 0x80], &[0x80; 9], &[0xff, 0xff, 0xff, 0xff, 0xff, 1]];

fn mutate(seed: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len().max(1));
        let end = (at + 1 + random.below(16)).min(bytes.len());
        match random.below(6) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.number().to_le_bytes()[0],
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..end)),
            4 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            _ => drop(bytes.splice(at..at, EDGES[random.below(EDGES.len())].iter().copied())),
        }
    }
    bytes
}

#[test]
fn exactly_the_seeds_with_good_names_are_accepted() {
    for (kind, name) in FuzzKind::ALL {
        let corpus = corpus(name);
        assert!(!corpus.is_empty(), "{name} has no seeds");
        for (path, bytes) in corpus {
            let good =
                path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("good-"));
            assert_eq!(fuzz_one(kind, &bytes), good, "{}", path.display());
        }
    }
}

#[test]
fn mutants_neither_panic_nor_violate_a_parser_s_guarantees() {
    let share = MUTATION_TIME / u32::try_from(FuzzKind::ALL.len()).expect("a few kinds");
    for (kind, name) in FuzzKind::ALL {
        let corpus = corpus(name);
        let mut random = Random::new(1);
        let (start, mut accepted, mut mutants) = (Instant::now(), 0, 0);
        while mutants < FEWEST || mutants < MUTANTS && start.elapsed() < share {
            let (_, seed) = &corpus[random.below(corpus.len())];
            accepted += u64::from(fuzz_one(kind, &mutate(seed, &mut random)));
            mutants += 1;
        }
        assert!(accepted > 0 && accepted < mutants, "{name}: {accepted} of {mutants} mutants were accepted");
    }
}
