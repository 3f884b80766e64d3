// SPDX-License-Identifier: MIT OR Apache-2.0
//! Asks the node agent for the memory of an image in the node's cache: for a socket to the image's fetcher, and for its
//! presence map.
//!
//! The agent may have ended: the processes of a session wait for the next one then, as they wait for a fetcher.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use tokio::time::sleep;
use tracing::warn;

use crate::control::client::{Client, ClientError};

/// Time for another agent to be started, when the one that had the fetcher has ended.
const AGENT_TIME: Duration = Duration::from_secs(300);
/// Time between two looks for an agent.
const AGENT_PAUSE: Duration = Duration::from_millis(100);

/// What the agent has of an image.
#[derive(Debug)]
pub(crate) enum AgentFetch {
    /// All of it.
    Complete,
    /// Some of it: a fetcher brings the rest.
    Partial {
        /// The presence map.
        presence: OwnedFd,
        /// The socket to the fetcher.
        socket: OwnedFd,
        /// Where the files are in the presence map: see [`rewake_fetcher::plan::FetchPlan::layout`].
        layout: u64,
    },
}

/// Asks an agent that runs.
///
/// # Errors
/// No agent runs, or it refuses.
pub(crate) async fn ask(agent: &Path, id: &str) -> Result<AgentFetch, ClientError> {
    let answer = Client::connect(agent).await?.fetch(id).await?;
    Ok(answer.map_or(AgentFetch::Complete, |([presence, socket], layout)| AgentFetch::Partial {
        presence,
        socket,
        layout,
    }))
}

/// Asks again, when the fetcher or the agent has ended.
///
/// # Errors
/// The agent refuses, or none was started in time.
pub(crate) async fn ask_again(agent: &Path, id: &str) -> anyhow::Result<AgentFetch> {
    let began = Instant::now();
    let mut has_warned = false;
    loop {
        match ask(agent, id).await {
            Ok(answer) => return Ok(answer),
            Err(ClientError::Refused(reason)) => bail!("{reason}"),
            Err(error) if began.elapsed() >= AGENT_TIME => {
                return Err(error).with_context(|| format!("no agent for {} s", AGENT_TIME.as_secs()));
            }
            Err(error) => {
                if !std::mem::replace(&mut has_warned, true) {
                    warn!(
                        "{error}: missing memory waits for the next agent, {} s at most",
                        AGENT_TIME.as_secs()
                    );
                }
                sleep(AGENT_PAUSE).await;
            }
        }
    }
}

/// Checks that the agent's presence map is for the files of this plan.
///
/// # Errors
/// The agent has laid them out otherwise.
pub(crate) fn check_layout(agent: u64, own: u64) -> anyhow::Result<()> {
    ensure!(
        agent == own,
        "the agent's presence map is for other files than this restore's: is the agent another version? Restart it, and \
         restore again"
    );
    Ok(())
}
