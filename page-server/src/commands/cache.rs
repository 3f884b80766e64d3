// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake cache`: shows and changes the images that the node agent keeps.

use std::path::absolute;

use rewake_streamer::control::client::Client;
use rewake_streamer::control::proto::{Acquire, CachedImage};
use rewake_streamer::units;

use super::{bytes_of, control_socket, print};
use crate::cli::{CacheAct, CacheArgs};
use crate::logging;

/// Runs the command; gives the exit code.
///
/// # Errors
/// No agent runs, or it has no cache, or refuses.
pub fn run(options: &CacheArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    let socket = control_socket(options.socket.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut client = Client::connect(&socket).await?;
        match &options.act {
            CacheAct::Warm { image, id, signers } => {
                let signers = signers.iter().map(absolute).collect::<Result<Vec<_>, _>>()?;
                let id = id.clone().unwrap_or_default();
                let acquired = client
                    .acquire(Acquire { url: image.to_string(), id, whole: true, signers: bytes_of(signers) })
                    .await?;
                print::done(format!("{image}: the cache has image {}", acquired.image_id));
            }
            CacheAct::Ls => {
                for image in client.cached().await? {
                    print::done(line(&image));
                }
            }
            CacheAct::Rm { id } => {
                let bytes = client.remove_cached(id).await?;
                print::done(format!("image {id}: {} are free", units::bytes(bytes)));
            }
        }
        Ok(0)
    })
}

fn line(image: &CachedImage) -> String {
    let CachedImage { image_id, url, bytes, complete, unused_s, in_use } = image;
    let state = if *complete { "complete" } else { "partial" };
    let used = if *in_use { "in use".to_owned() } else { format!("used {unused_s} s ago") };
    format!("{image_id} {state:<8} {:>10}  {used:<18} {url}", units::bytes(*bytes))
}
