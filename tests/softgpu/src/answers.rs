// SPDX-License-Identifier: MIT OR Apache-2.0
//! The model's answers, which are kept until the machine ends: an emulated processor computes seconds for one
//! from twelve MiB of weights, and most tests ask servers of the same shape for the same answer.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;

use gpu_app::kernel::hash;
use gpu_app::model::Model;
use gpu_app::shape::Shape;

/// Root's alone, and empty when a machine starts.
const FOLDER: &str = "/run/rewake-test-answers";

/// What a server of a shape answers.
#[derive(Debug)]
pub struct Answers {
    shape: Shape,
    folder: PathBuf,
    /// Made for the first answer that is not kept.
    model: OnceLock<Model>,
}

impl Answers {
    /// Of servers of this shape.
    #[must_use]
    pub fn of(shape: &Shape) -> Self {
        Self { shape: shape.clone(), folder: FOLDER.into(), model: OnceLock::new() }
    }

    /// The answer: `count` tokens after `prompt`.
    #[must_use]
    pub fn to(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let question = format!("{:?} {prompt:?} {count} {}", self.shape, own_time());
        let file = self.folder.join(format!("{:016x}", hash(question.bytes().map(u64::from), 0)));
        kept(&file, &question).unwrap_or_else(|| {
            let answer = self.model.get_or_init(|| Model::new(&self.shape)).generate(prompt, count);
            // The next test computes the answer itself if this one cannot be kept.
            let _ = keep(&file, &question, &answer);
            answer
        })
    }
}

/// When this program was built: what another one has kept may be of another model, or of another server.
pub(crate) fn own_time() -> u128 {
    let time = std::env::current_exe().and_then(fs::metadata).and_then(|of| of.modified());
    time.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_nanos())
}

fn kept(file: &Path, question: &str) -> Option<Vec<u32>> {
    let text = fs::read_to_string(file).ok()?;
    let (asked, answer) = text.split_once('\n')?;
    (asked == question).then(|| answer.split(' ').map(|token| token.parse().ok()).collect())?
}

/// A reader sees all of it or nothing.
fn keep(file: &Path, question: &str, answer: &[u32]) -> std::io::Result<()> {
    let tokens: Vec<String> = answer.iter().map(u32::to_string).collect();
    file.parent().map_or(Ok(()), fs::create_dir_all)?;
    let unfinished = file.with_extension(std::process::id().to_string());
    fs::write(&unfinished, format!("{question}\n{}", tokens.join(" ")))?;
    fs::rename(unfinished, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_answer_is_the_model_s_and_of_its_own_question() {
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape { layers: 2, layer_kib: 8, ..Shape::small() };
        let fresh = |shape: &Shape| Answers { folder: folder.path().to_owned(), ..Answers::of(shape) };
        let right = Model::new(&shape).generate(&[1, 2], 4);
        assert_eq!(fresh(&shape).to(&[1, 2], 4), right);
        let second = fresh(&shape);
        assert_eq!(second.to(&[1, 2], 4), right);
        assert!(second.model.get().is_none(), "it was computed again");
        assert_eq!(second.to(&[1, 2], 3), right[..3]);
        assert_ne!(fresh(&Shape { seed: 9, ..shape }).to(&[1, 2], 4), right);
        assert!(fs::read_dir(folder.path()).unwrap().count() == 3);
    }
}
