// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's way of writing options that clap reads otherwise.

use std::ffi::OsString;

/// Rewrites `-v`, `-v4`, `-vvv` and `--verbosity` without a value to `--verbosity=N`.
pub fn normalise(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut ours = true; // up to `--`; what follows is for another program
    args.map(|arg| {
        ours &= arg != "--";
        match arg.to_str().and_then(verbosity) {
            Some(level) if ours => format!("--verbosity={level}").into(),
            _ => arg,
        }
    })
    .collect()
}

/// CRIU: `-v` and `-v` repeated count, `-vN` sets.
fn verbosity(arg: &str) -> Option<usize> {
    let rest = match arg {
        "--verbosity" => "",
        _ => arg.strip_prefix("-v")?,
    };
    if rest.bytes().all(|byte| byte == b'v') {
        return Some(rest.len() + 1);
    }
    rest.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalised(args: &[&str]) -> Vec<String> {
        normalise(args.iter().map(OsString::from)).into_iter().map(|arg| arg.into_string().unwrap()).collect()
    }

    #[test]
    fn verbosity_in_all_of_crius_spellings() {
        for (given, level) in
            [("-v", 1), ("-vv", 2), ("-vvvv", 4), ("-v4", 4), ("-v0", 0), ("--verbosity", 1)]
        {
            assert_eq!(normalised(&[given]), [format!("--verbosity={level}")], "{given}");
        }
    }

    #[test]
    fn options_for_another_program_are_left_alone() {
        assert_eq!(normalised(&["-v", "--", "-v4"]), ["--verbosity=1", "--", "-v4"]);
    }

    #[test]
    fn other_arguments_are_left_alone() {
        let args = ["lazy-pages", "--verbosity=4", "-D", "-dir-with-v", "--version", "-o", "v4"];
        assert_eq!(normalised(&args), args);
    }
}
