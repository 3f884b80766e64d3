// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake manual`: the manual pages of the commands, and completions for shells. Packages call it.

use std::fs::{self, File};
use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli::{Cli, ManualArgs};

/// The section of commands for administrators.
const SECTION: &str = "8";
/// Each shell loads the file of its own name.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Runs the command; gives the exit code.
///
/// # Errors
/// The directory cannot be made, or a file cannot be written.
pub fn run(options: &ManualArgs) -> anyhow::Result<u8> {
    let directory = &options.directory;
    fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
    write_all(directory).with_context(|| format!("writing into {}", directory.display()))?;
    Ok(0)
}

fn write_all(directory: &Path) -> anyhow::Result<()> {
    let mut visible = visible();
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut visible, "rewake", directory)?;
    }
    visible.build();
    page(visible.clone(), directory)?;
    // Commands of a command are on its page.
    visible.get_subcommands().try_for_each(|command| page(command.clone(), directory))
}

/// Returns the command line without what users do not type.
fn visible() -> clap::Command {
    let all = Cli::command();
    let commands = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let visible = clap::Command::new("rewake").subcommands(commands);
    visible
        .about(all.get_about().cloned().unwrap_or_default())
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .disable_help_subcommand(true)
}

/// Writes the page of a command: `rewake-restore.8`.
fn page(command: clap::Command, directory: &Path) -> anyhow::Result<()> {
    let page = Man::new(command)
        .section(SECTION)
        .manual("Rewake")
        .source(concat!("rewake ", env!("CARGO_PKG_VERSION")));
    let mut file = File::create(directory.join(page.get_filename()))?;
    page.render(&mut file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_command_that_users_type_has_a_page_and_shells_know_it() {
        let folder = tempfile::tempdir().unwrap();
        run(&ManualArgs { directory: folder.path().to_owned() }).unwrap();
        let names = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name());
        let names: BTreeSet<String> = names.map(|name| name.into_string().unwrap()).collect();
        let completions = ["_rewake", "rewake.bash", "rewake.fish"].map(str::to_owned);
        let all = Cli::command();
        let commands = all.get_subcommands().filter(|command| !command.is_hide_set());
        let pages = commands.map(|command| format!("rewake-{}.8", command.get_name()));
        let expected: BTreeSet<String> =
            pages.chain(["rewake.8".to_owned()]).chain(completions.clone()).collect();
        assert_eq!(names, expected);
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        for name in completions {
            let text = read(&name);
            assert!(text.contains("restore") && !text.contains("planner"), "{name}");
        }
        let page = read("rewake-restore.8");
        assert!(page.contains(".TH rewake-restore 8") && page.contains("wait"), "{page}");
    }
}
