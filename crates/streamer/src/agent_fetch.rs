// SPDX-License-Identifier: MIT OR Apache-2.0
//! Asks the node agent for the memory of an image in the node's cache: for a socket to the image's fetcher,
//! and for its presence map.
//!
//! The agent may have ended: the processes of a session wait for the next one then, as they wait for a
//! fetcher.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use tokio::time::sleep;
use tracing::warn;

use crate::control::client::{Client, ClientError};

/// Time for an agent that brings the memory, when the agent that had the fetcher has ended. A service manager
/// needs seconds to start one, and a user may need minutes.
pub(crate) const AGENT_LIMIT: Duration = Duration::from_secs(300);
/// Pause between two looks for an agent. A look is one attempt to connect.
const AGENT_INTERVAL: Duration = Duration::from_millis(100);
/// Pause until an agent that refuses is asked again. It is longer than [`AGENT_INTERVAL`], because the agent
/// may ask its store each time.
const REFUSED_INTERVAL: Duration = Duration::from_secs(1);

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

/// Asks again, when the fetcher or the agent has ended. An agent that refuses for now is asked again, too:
/// its store may be away, or the next agent has the cache.
///
/// # Errors
/// The agent refuses for good, or none has answered in time.
pub(crate) async fn ask_again(agent: &Path, id: &str) -> anyhow::Result<AgentFetch> {
    ask_within(agent, id, AGENT_LIMIT).await
}

async fn ask_within(agent: &Path, id: &str, limit: Duration) -> anyhow::Result<AgentFetch> {
    let (began, mut worked, mut has_warned) = (Instant::now(), Duration::ZERO, false);
    loop {
        let asked = Instant::now();
        let error = match ask(agent, id).await {
            Ok(answer) => return Ok(answer),
            Err(ClientError::RefusedForGood(reason)) => bail!("{reason}"),
            Err(error) => error,
        };
        let has_refused = matches!(error, ClientError::Refused(_));
        if !has_refused {
            // An agent has worked, and has ended then: the next one gets the same time.
            worked += asked.elapsed();
        }
        if began.elapsed().saturating_sub(worked) >= limit {
            return Err(error).with_context(|| format!("no memory from an agent for {} s", limit.as_secs()));
        }
        if !std::mem::replace(&mut has_warned, true) {
            warn!("{error}: missing memory waits for the agent, {} s at most", limit.as_secs());
        }
        sleep(if has_refused { REFUSED_INTERVAL } else { AGENT_INTERVAL }).await;
    }
}

/// Checks that the agent's presence map is for the files of this plan.
///
/// # Errors
/// The agent has laid them out otherwise.
pub(crate) fn check_layout(agent: u64, own: u64) -> anyhow::Result<()> {
    ensure!(
        agent == own,
        "the agent's presence map is for other files than this restore's: is the agent another version? \
         Restart it, and restore again"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;
    use crate::control::MESSAGE_LIMIT;
    use crate::control::accept::greet;
    use crate::control::frame::{receive, send};
    use crate::control::proto::{Failure, Fetched, Reply, Request, reply};

    /// An agent that gives these answers, one to each client.
    async fn answers(listener: UnixListener, answers: Vec<reply::Kind>) {
        for kind in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(greet(&mut stream).await.unwrap());
            receive::<Request>(&mut stream, MESSAGE_LIMIT).await.unwrap();
            send(&mut stream, &Reply { kind: Some(kind) }).await.unwrap();
        }
    }

    fn refusal(lasting: bool) -> reply::Kind {
        reply::Kind::Failure(Failure { reason: format!("lasting: {lasting}"), lasting })
    }

    async fn asked(kinds: Vec<reply::Kind>, limit: Duration) -> anyhow::Result<AgentFetch> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let agent = tokio::spawn(answers(UnixListener::bind(&path).unwrap(), kinds));
        let answer = ask_within(&path, "a7", limit).await;
        agent.abort();
        answer
    }

    #[tokio::test]
    async fn an_agent_that_refuses_for_now_is_asked_again() {
        let complete = || reply::Kind::Fetched(Fetched { complete: true, layout: 0 });
        let answer = asked(vec![refusal(false), complete()], AGENT_LIMIT).await;
        assert!(matches!(answer, Ok(AgentFetch::Complete)), "{answer:?}");
        let lasting = asked(vec![refusal(true), complete()], AGENT_LIMIT).await.unwrap_err();
        assert_eq!(lasting.to_string(), "lasting: true");
        let late = asked(vec![refusal(false), complete()], Duration::ZERO).await.unwrap_err();
        assert_eq!(format!("{late:#}"), "no memory from an agent for 0 s: lasting: false");
    }
}
