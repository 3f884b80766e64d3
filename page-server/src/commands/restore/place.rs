// SPDX-License-Identifier: MIT OR Apache-2.0
//! The work directory of a restore, and its streamer: one that the agent starts, or this command.

use super::signers;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

use super::view::View;
use super::{RestoreRequest, loading_options};
use crate::cli::WaitFor;
use crate::commands::verify::expect_as_sealed;
use crate::commands::{control_socket, directory};
use rewake_streamer::control::client::{Client, ClientError};
use rewake_streamer::control::streamer;
use rewake_streamer::control::work_folder::{LOG, WorkFolder};
use rewake_streamer::supervise::launch::LaunchPlan;

/// A streamer that waits for the restore. Dropping this removes the work directory if it was made for the
/// restore.
#[derive(Debug)]
pub(super) struct WaitingStreamer {
    /// CRIU's work directory.
    pub(super) work: PathBuf,
    /// The session's number, if the agent serves it.
    pub(super) session: Option<u64>,
    /// Whether CRIU is to be called with `--lazy-pages`.
    pub(super) lazy_pages: bool,
    own: Option<WorkFolder>,
}

/// Time in which an agent has another streamer serve the session: it compares the image's files, and reads
/// /proc. An agent that is busy takes seconds.
const SUCCESSOR_LIMIT: Duration = Duration::from_secs(20);
const NOT_SERVED: &str = "this image cannot be served; nothing was started";

impl WaitingStreamer {
    /// Has the agent start a streamer. Without an agent, or when one that was not named refuses, this process
    /// starts it.
    ///
    /// # Errors
    /// The agent that was named does not run or refuses, or the image cannot be served.
    pub(super) async fn make(request: &RestoreRequest<'_>, view: &View) -> anyhow::Result<Self> {
        let given = request.options.work_dir.as_deref().map(|path| directory(path, "-W")).transpose()?;
        let is_named = request.options.socket.is_some() || request.options.image.is_some();
        if let Some(plan) = request.from {
            // An agent knows no other hosts.
            return Self::alone(request, plan.clone(), given).await;
        }
        match control_socket(request.options.socket.as_deref()) {
            Err(error) if is_named => return Err(error),
            // This user can have no agent.
            Err(_) => {}
            Ok(socket) => match Client::connect(&socket).await {
                Err(ClientError::NotServed(_)) if !is_named => {}
                Err(error) if is_named => return Err(error.into()),
                Err(error) => view.say(&alone(&socket, &error)),
                Ok(client) => match Self::by_agent(request, given.clone(), client, &socket, view).await {
                    Err(error) if !is_named => view.say(&alone(&socket, &error)),
                    made => return made.context(NOT_SERVED),
                },
            },
        }
        let plan = LaunchPlan::of(request.images, signers(request.options)?).context(NOT_SERVED)?;
        if let Some(reason) = &plan.eager {
            plan.check(loading_options(request.options))?;
            view.say(&loaded_first(reason));
            expect_as_sealed(request.images, &plan.signers)?;
        }
        Self::alone(request, plan, given).await
    }

    /// How long another streamer is waited for when all processes of this one were killed: the agent starts
    /// one.
    pub(super) fn successor_limit(&self) -> Duration {
        self.session.map_or(Duration::ZERO, |_| SUCCESSOR_LIMIT)
    }

    /// Leaves the work directory to the streamer and the agent, which still use it.
    pub(super) async fn leave_work(&mut self) {
        if let Some(own) = self.own.take() {
            own.leave().await;
        }
    }

    async fn by_agent(
        request: &RestoreRequest<'_>,
        given: Option<PathBuf>,
        mut client: Client,
        socket: &Path,
        view: &View,
    ) -> anyhow::Result<Self> {
        // In the folder of the agent's socket, because an agent with a /tmp of its own would not find a
        // directory in this process's /tmp.
        let (work, own) = work(given, socket.parent().unwrap_or_else(|| Path::new("/")))?;
        let opened = client
            .open(request.images, &work, loading_options(request.options), &signers(request.options)?)
            .await?;
        if !opened.lazy_pages {
            view.say(&loaded_first(&opened.reason));
        }
        Ok(Self { work, session: Some(opened.session), lazy_pages: opened.lazy_pages, own })
    }

    async fn alone(
        request: &RestoreRequest<'_>,
        plan: LaunchPlan,
        given: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        let (work, own) = work(given, &std::env::temp_dir())?;
        // One that this command does not wait for must not keep the terminal, or a script's pipe.
        let log = (request.options.wait != WaitFor::Resident).then(|| work.join(LOG));
        let loading = loading_options(request.options);
        streamer::start(request.images, &work, &plan, loading, log.as_deref(), own.is_some()).await?;
        Ok(Self { work, session: None, lazy_pages: plan.lazy_pages(), own })
    }
}

fn loaded_first(reason: &str) -> String {
    format!("all CPU memory is loaded before the processes run: {reason}\n")
}

fn alone(socket: &Path, error: &impl std::fmt::Display) -> String {
    format!("{}: {error:#}: this command starts the streamer itself\n", socket.display())
}

/// The work directory that was given, or a private one in this folder.
fn work(given: Option<PathBuf>, parent: &Path) -> anyhow::Result<(PathBuf, Option<WorkFolder>)> {
    if let Some(given) = given {
        return Ok((given, None));
    }
    let own = WorkFolder::make(parent)?;
    Ok((own.path().to_owned(), Some(own)))
}
