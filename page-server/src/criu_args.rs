// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rewrites CRIU's spellings of options that clap would read differently.

use std::ffi::OsString;

/// Rewrites `-v`, `-v4`, `-vvv` and `--verbosity` without a value to `--verbosity=N`.
pub fn normalise(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut ours = true; // up to `--`: the rest are arguments of another program
    args.map(|arg| {
        ours &= arg != "--";
        match arg.to_str().and_then(verbosity) {
            Some(level) if ours => format!("--verbosity={level}").into(),
            _ => arg,
        }
    })
    .collect()
}

/// Returns the level of an option: CRIU counts repeated `-v`, and `-vN` sets it.
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
    fn all_of_criu_s_spellings_of_verbosity_are_read() {
        for (given, level) in
            [("-v", 1), ("-vv", 2), ("-vvvv", 4), ("-v4", 4), ("-v0", 0), ("--verbosity", 1)]
        {
            assert_eq!(normalised(&[given]), [format!("--verbosity={level}")], "{given}");
        }
    }

    #[test]
    fn options_of_another_program_stay() {
        assert_eq!(normalised(&["-v", "--", "-v4"]), ["--verbosity=1", "--", "-v4"]);
    }

    #[test]
    fn other_arguments_stay() {
        let args = ["lazy-pages", "--verbosity=4", "-D", "-dir-with-v", "--version", "-o", "v4"];
        assert_eq!(normalised(&args), args);
    }
}
