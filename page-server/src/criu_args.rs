// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rewrites CRIU's spellings of options that clap would read differently.

use std::ffi::OsString;

/// Rewrites `-v`, `-v4` and `-vvv` to `--verbosity=N`.
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
    let rest = arg.strip_prefix("-v")?;
    if rest.bytes().all(|byte| byte == b'v') {
        return Some(rest.len() + 1);
    }
    rest.parse().ok()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn normalised(args: &[&str]) -> Vec<String> {
        normalise(args.iter().map(OsString::from)).into_iter().map(|arg| arg.into_string().unwrap()).collect()
    }

    #[test]
    fn all_of_criu_s_spellings_of_verbosity_are_read() {
        for (given, level) in [("-v", 1), ("-vv", 2), ("-vvvv", 4), ("-v4", 4), ("-v0", 0)] {
            assert_eq!(normalised(&[given]), [format!("--verbosity={level}")], "{given}");
        }
    }

    #[test]
    fn the_long_option_has_its_value_after_an_equals_sign_as_criu_s_has() {
        let level = |given: &[&str]| {
            let cli = Cli::try_parse_from([&["rewake", "serve"], given].concat()).ok()?;
            let Command::Serve(options) = cli.command else { return None };
            Some(options.verbosity)
        };
        assert_eq!(
            [level(&[]), level(&["--verbosity"]), level(&["--verbosity=3"])],
            [Some(2), Some(1), Some(3)]
        );
        assert_eq!(level(&["--verbosity", "3"]), None, "CRIU refuses the number, too");
        let help = Cli::try_parse_from(["rewake", "serve", "--help"]).unwrap_err().to_string();
        assert!(help.contains("--verbosity[=<LEVEL>]"), "{help}");
    }

    /// The command line of a unit is of this program, so a unit that is shipped starts.
    #[test]
    fn the_command_line_of_the_shipped_unit_is_read() {
        let unit = include_str!("../rewake.service");
        let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let cli = Cli::try_parse_from(normalise(line.split(' ').map(OsString::from))).unwrap();
        let Command::Serve(options) = cli.command else { panic!("{line}") };
        assert_eq!(
            (options.verbosity, options.daemon),
            (3, false),
            "systemd watches the process that it starts"
        );
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
