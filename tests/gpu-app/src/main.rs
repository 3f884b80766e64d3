// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gpu-app`: see the library's page.

#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use gpu_app::model::Model;
use gpu_app::shape::Shape;
use gpu_app::{client, family, rendered, serve};

#[derive(Debug, Parser)]
#[command(about = "A small inference server on GPUs, for tests to dump and restore")]
struct Arguments {
    #[command(subcommand)]
    act: Act,
}

#[derive(Debug, Subcommand)]
enum Act {
    /// Serves; prints READY when it does
    Serve {
        /// Where clients connect
        #[arg(long)]
        socket: PathBuf,
        #[command(flatten)]
        shape: Shape,
    },
    /// One of the server's other processes
    #[command(hide = true)]
    Stage {
        #[arg(long)]
        process: u64,
        #[command(flatten)]
        shape: Shape,
    },
    /// The server's process with render nodes only
    #[command(hide = true)]
    Rendered {
        #[command(flatten)]
        shape: Shape,
    },
    /// Asks a server for tokens
    Ask {
        #[arg(long)]
        socket: PathBuf,
        #[arg(long, default_value_t = 8)]
        tokens: usize,
        prompt: Vec<u32>,
    },
    /// Sends a server one line: start, progress, result, check, rendered, own or quit
    Tell {
        #[arg(long)]
        socket: PathBuf,
        words: Vec<String>,
    },
    /// Computes what a server of this shape answers, without any GPU
    Expect {
        #[arg(long, default_value_t = 8)]
        tokens: usize,
        #[command(flatten)]
        shape: Shape,
        prompt: Vec<u32>,
    },
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().act {
        Act::Serve { socket, shape } => serve::serve(&shape, &socket),
        Act::Stage { process, shape } => family::work(&shape, process),
        Act::Rendered { shape } => rendered::work(&shape),
        Act::Ask { socket, tokens, prompt } => {
            print_tokens(&client::generate(&socket, &prompt, tokens)?);
            Ok(())
        }
        Act::Tell { socket, words } => {
            println!("{}", client::ask(&socket, &words.join(" "))?);
            Ok(())
        }
        Act::Expect { tokens, shape, prompt } => {
            shape.check()?;
            print_tokens(&Model::new(&shape).generate(&prompt, tokens));
            Ok(())
        }
    }
}

fn print_tokens(tokens: &[u32]) {
    let words: Vec<String> = tokens.iter().map(u32::to_string).collect();
    println!("{}", words.join(" "));
}
