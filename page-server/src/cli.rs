// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line.

mod about;
mod address;
mod cache;
mod descriptor;
#[cfg(test)]
mod printed;
mod remote;
mod store;
mod tls;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand, ValueEnum};
use rewake_image_store::ImageUrl;

pub use about::{DoctorArgs, ManualArgs, VersionArgs};
pub use address::{PageServerAddress, RemoteImage};
use cache::bytes;
pub use cache::{CacheAct, CacheArgs};
pub use descriptor::GivenDescriptor;
pub use remote::{ExportArgs, MigrateArgs, PullArgs, ReceiveArgs, SourceArgs};
pub use store::{ExportedPlace, GcArgs, LsArgs, Place, PullSource, PushArgs, RmArgs, SealedPlace};
pub use tls::{PeerTlsArgs, TlsArgs};

/// A day in seconds: how long memory may be loaded only when it is accessed.
const DAY: u64 = 24 * 60 * 60;

/// Restores CRIU checkpoints on demand: programs run while a streamer loads their memory, page faults first.
#[derive(Debug, Parser)]
#[command(name = "rewake", version, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serves one restore, in the place of `criu lazy-pages` and with its options
    LazyPages(LazyPagesArgs),
    /// Receives the memory of dumps, or serves an image to lazy restores, in the place of `criu page-server`
    /// and with its options
    PageServer(PageServerArgs),
    /// Runs the node agent, which starts a streamer for each restore
    Serve(ServeArgs),
    /// Runs `criu dump`, with the plugin for GPUs; the new image replaces an old one as a whole
    Dump(DumpArgs),
    /// Runs `criu restore` on demand, and shows how the memory is loaded
    Restore(RestoreArgs),
    /// Moves a running program to another host, whose `rewake receive` waits for it
    Migrate(MigrateArgs),
    /// Takes one program from the `rewake migrate` of another host
    Receive(ReceiveArgs),
    /// Writes a manifest into an image of another program's: `rewake dump` does that itself
    Seal(SealArgs),
    /// Compares an image and its parents, or an image of a store, with their manifests, to the last byte
    Verify(VerifyArgs),
    /// Serves sealed images to `rewake pull` on other hosts
    Export(ExportArgs),
    /// Copies a sealed image from a store, or from `rewake export` on another host, and checks every byte
    Pull(PullArgs),
    /// Stores a sealed image in a bucket or a directory: chunks that the store has are not sent
    Push(PushArgs),
    /// Lists the images of a store
    Ls(LsArgs),
    /// Removes an image from a store: `rewake gc` frees its space
    Rm(RmArgs),
    /// Frees the space of what no image of a store uses
    Gc(GcArgs),
    /// Shows and changes the node agent's cache of images
    Cache(CacheArgs),
    /// For `rewake restore` and `rewake serve`: serves one restore
    #[command(hide = true)]
    Streamer(StreamerArgs),
    /// Shows the restores that are served, and those that wait for `rewake recover`
    Status(StatusArgs),
    /// For streamers: parses an image, and plans its restore, in a confined process
    #[command(hide = true)]
    Planner(PlannerArgs),
    /// For streamers: brings pages from a page server, in a confined process
    #[command(hide = true)]
    Fetcher,
    /// For streamers: gives targets their fd stores
    #[command(hide = true)]
    Park(ParkArgs),
    /// Serves restored processes all of whose streamer's processes were killed
    Recover(RecoverArgs),
    /// For packages: writes manual pages and completions of shells
    #[command(hide = true)]
    Manual(ManualArgs),
    /// Shows what an image contains, and whether it can be served
    Inspect(InspectArgs),
    /// Checks whether this machine has what Rewake needs
    Doctor(DoctorArgs),
    /// Shows the version, its protocols, and the versions of CRIU that it was tested with
    Version(VersionArgs),
}

/// Options that CRIU's servers share, with CRIU's names and meanings.
#[derive(Debug, Args)]
pub struct CriuServerArgs {
    /// Directory of the images
    #[arg(short = 'D', long, default_value = ".", value_name = "DIR")]
    pub images_dir: PathBuf,
    /// Directory for the socket, the log and the pidfile [default: the images directory]
    #[arg(short = 'W', long, value_name = "DIR")]
    pub work_dir: Option<PathBuf>,
    /// Log file, relative to the work directory [default: stderr]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log level: -v0 nothing but failures, -v1 errors, -v2 warnings, -v3 information, -v4 everything
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true)]
    #[arg(default_value_t = 2, default_missing_value = "1")]
    pub verbosity: u8,
    /// Go to the background once the socket is ready
    #[arg(short = 'd', long)]
    pub daemon: bool,
    /// Write the daemon's pid to this file, relative to the work directory (with -d)
    #[arg(long, value_name = "FILE")]
    pub pidfile: Option<PathBuf>,
    /// Write one zero byte to this descriptor once the socket is ready, and close it
    #[arg(long, value_name = "FD", allow_negative_numbers = true, value_parser = GivenDescriptor::of)]
    pub status_fd: Option<GivenDescriptor>,
    /// Accepted for compatibility: there is no configuration file
    #[arg(long, hide = true)]
    pub no_default_config: bool,
    /// Accepted for compatibility: CRIU would read options from this file
    #[arg(long, hide = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Options of `rewake lazy-pages`.
#[derive(Debug, Args)]
pub struct LazyPagesArgs {
    #[command(flatten)]
    pub(crate) server: CriuServerArgs,
    /// End when no restore has connected after this many seconds [default: wait]
    #[arg(long, value_name = "SECONDS")]
    pub connect_timeout: Option<u64>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

/// Options of `criu lazy-pages` for a page server: without `--page-server` they are left out
/// ([`crate::criu_args`]).
#[derive(Debug, Args)]
pub struct Remote {
    /// Get lazy pages from a page server: `criu page-server --lazy-pages`, `criu dump --lazy-pages`, or
    /// `rewake page-server --lazy-pages`
    #[arg(long)]
    pub page_server: bool,
    /// Address of the page server; with a slash in it, the path of a unix socket [default: 127.0.0.1]
    #[arg(
        long,
        value_name = "ADDR",
        value_parser = OsStringValueParser::new().try_map(PageServerAddress::of)
    )]
    pub address: Option<PageServerAddress>,
    /// Port of the page server
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Use this socket, which is connected with the page server. CRIU does not encrypt it, so there is no TLS
    /// on it
    #[arg(long, value_name = "FD", value_parser = GivenDescriptor::of, conflicts_with = "tls")]
    pub ps_socket: Option<GivenDescriptor>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Accepted for compatibility: CRIU would punch what was read out of the images
    #[arg(long, hide = true)]
    pub auto_dedup: bool,
}

/// Options of `rewake page-server`.
#[derive(Debug, Args)]
pub struct PageServerArgs {
    #[command(flatten)]
    pub(crate) server: CriuServerArgs,
    /// Serve the images directory to `criu lazy-pages --page-server` [default: receive the memory of a dump
    /// into it]
    #[arg(long)]
    pub lazy_pages: bool,
    /// Address to listen on; with a slash in it, the path of a unix socket [default: 127.0.0.1]
    #[arg(long, value_name = "ADDR")]
    #[arg(value_parser = OsStringValueParser::new().try_map(PageServerAddress::of))]
    pub address: Option<PageServerAddress>,
    /// Port to listen on [default: one that the kernel chooses; stderr shows it]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Use this connected socket: serve the client at its other end
    #[arg(long, value_name = "FD", value_parser = GivenDescriptor::of, conflicts_with = "keep_listening")]
    pub ps_socket: Option<GivenDescriptor>,
    /// Permit an address that other hosts reach, without TLS. Memory then travels unencrypted, and any host
    /// can connect
    #[arg(long, conflicts_with = "tls")]
    pub insecure: bool,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Keep listening after the first client, until SIGTERM. CRIU's server ends after one client; the scripts
    /// that call it wait for that. Several clients are served at once. Each dump gets a folder of its own in
    /// the images directory: the pid of its first task, or PID.2, PID.3 for later ones
    #[arg(long)]
    pub keep_listening: bool,
    /// The image that the dump is incremental to, relative to the images directory
    #[arg(long, value_name = "DIR", conflicts_with = "keep_listening")]
    pub prev_images_dir: Option<PathBuf>,
    /// Remove pages from the parent images that the dump has, too
    #[arg(long, conflicts_with = "keep_listening")]
    pub auto_dedup: bool,
}

/// Options of `rewake streamer`.
#[derive(Debug, Args)]
pub struct StreamerArgs {
    /// CRIU's work directory (its -W, else its -D): CRIU, its plugin and clients connect there
    #[arg(short = 'W', long, default_value = ".", value_name = "DIR")]
    pub work_dir: PathBuf,
    /// Remove the work directory at the end, unless the command that made it uses it, or memory was lost
    #[arg(long)]
    pub remove_work_dir: bool,
    /// Directory of the images: serve CPU memory, for a `criu restore --lazy-pages`
    #[arg(short = 'D', long, value_name = "DIR")]
    pub images_dir: Option<PathBuf>,
    /// The image has no GPU state, and CRIU loads its memory: the work directory is all that is served
    #[arg(long, conflicts_with = "images_dir")]
    pub no_gpus: bool,
    /// Record the working set in the image directory: as of `rewake restore`
    #[arg(long)]
    pub record: bool,
    /// Load CPU memory only when it is accessed: as of `rewake restore`
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=DAY))]
    pub on_demand_only: Option<u64>,
    /// The image needs a signature of one of these signers
    #[arg(long, value_name = "FILE")]
    pub signers: Vec<PathBuf>,
    /// Address of the image server that has what the image lacks
    #[arg(long, value_name = "ADDR:PORT", requires_all = ["from_image", "images_dir"])]
    pub from_address: Vec<SocketAddr>,
    /// The name of the image there
    #[arg(long, value_name = "IMAGE", requires_all = ["from_address", "from_id"])]
    pub from_image: Option<PathBuf>,
    /// Control socket of the node agent whose cache has the image, and brings what it lacks
    #[arg(
        long,
        value_name = "PATH",
        requires_all = ["from_id", "images_dir"],
        conflicts_with = "from_address"
    )]
    pub from_agent: Option<PathBuf>,
    /// The id of that image
    #[arg(long, value_name = "ID")]
    pub from_id: Option<String>,
    /// The host that the server's certificate must be for
    #[arg(long, value_name = "HOST", requires = "tls")]
    pub from_host: Option<String>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Log file [default: stderr]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log level: as of `rewake lazy-pages`
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true)]
    #[arg(default_value_t = 2, default_missing_value = "1")]
    pub verbosity: u8,
    /// Write one zero byte to this descriptor once all sockets are ready, and close it
    #[arg(long, value_name = "FD", allow_negative_numbers = true, value_parser = GivenDescriptor::of)]
    pub status_fd: Option<GivenDescriptor>,
    /// End when no restore has connected after this many seconds [default: wait]
    #[arg(long, value_name = "SECONDS")]
    pub connect_timeout: Option<u64>,
}

/// Options of `rewake planner`. The socket is standard input, the plan's file standard output.
#[derive(Debug, Args)]
pub struct PlannerArgs {
    /// Directory of the images
    #[arg(value_name = "IMG")]
    pub images_dir: PathBuf,
    /// A page server has the lazy pages
    #[arg(long)]
    pub remote: bool,
    /// An image server has some blocks of the image
    #[arg(long, conflicts_with = "remote")]
    pub partial: bool,
    /// The image is in the node's cache, and may lack some of its blocks
    #[arg(long, conflicts_with_all = ["remote", "partial"])]
    pub in_cache: bool,
    /// The image needs a signature of one of these signers
    #[arg(long, value_name = "FILE")]
    pub signers: Vec<PathBuf>,
}

/// Options of `rewake park`. The fd store is standard input.
#[derive(Debug, Args)]
pub struct ParkArgs {
    /// Processes, each as PID-START=NUMBER, with the number of the fd store
    #[arg(value_name = "PID-START=NUMBER")]
    pub targets: Vec<String>,
    /// Takes these fd stores from every process, each as INODE or, when its session is over, INODE-COOKIE
    #[arg(long, value_name = "STORE", num_args = 1.., conflicts_with = "targets")]
    pub unpark: Vec<String>,
}

/// Options of `rewake recover`.
#[derive(Debug, Args)]
pub struct RecoverArgs {
    /// Log file [default: stderr]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log level: as of `rewake lazy-pages`
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true)]
    #[arg(default_value_t = 2, default_missing_value = "1")]
    pub verbosity: u8,
    /// Return once the processes are served, and load their memory in the background
    #[arg(short = 'd', long)]
    pub daemon: bool,
}

/// Options of `rewake inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Directory of the images
    #[arg(value_name = "IMG")]
    pub images_dir: PathBuf,
    /// Show every mapping
    #[arg(long)]
    pub vmas: bool,
    /// Print everything as JSON, for programs (docs/diagnose.md)
    #[arg(long)]
    pub json: bool,
}

/// Options of `rewake seal`.
#[derive(Debug, Args)]
pub struct SealArgs {
    /// Directory of the images
    #[arg(value_name = "IMG")]
    pub images_dir: PathBuf,
    /// Sign the image with this private key, an Ed25519 key of OpenSSH without a passphrase
    #[arg(long, value_name = "KEY")]
    pub sign: Option<PathBuf>,
}

/// Options of `rewake verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Directory of the images, or the URL of an image in a store
    #[arg(value_name = "IMG", value_parser = OsStringValueParser::new().try_map(SealedPlace::of))]
    pub image: SealedPlace,
}

/// Options of `rewake serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Control socket [default: /run/rewake/rewake.sock for root, else $XDG_RUNTIME_DIR/rewake.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Log file [default: stderr]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log level: -v0 nothing but failures, -v1 errors, -v2 warnings, -v3 information, -v4 everything
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true)]
    #[arg(default_value_t = 2, default_missing_value = "1")]
    pub verbosity: u8,
    /// Go to the background once clients are answered
    #[arg(short = 'd', long)]
    pub daemon: bool,
    /// Write the agent's pid to this file (with -d)
    #[arg(long, value_name = "FILE")]
    pub pidfile: Option<PathBuf>,
    /// Write one zero byte to this descriptor once clients are answered, and close it
    #[arg(long, value_name = "FD", allow_negative_numbers = true, value_parser = GivenDescriptor::of)]
    pub status_fd: Option<GivenDescriptor>,
    /// Keep images of stores in this directory, and share them between restores. Only this user may access it
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Bytes that these images may have together; K, M, G and T multiply by powers of 1024 [default: half of
    /// what is free, and of what they have]
    #[arg(long, value_name = "BYTES", requires = "cache", value_parser = bytes)]
    pub cache_size: Option<u64>,
    /// Serve metrics for Prometheus on http://ADDRESS/metrics, for example 127.0.0.1:9464
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<SocketAddr>,
}

/// Which programs `rewake dump` and `rewake restore` run.
#[derive(Debug, Args)]
pub struct Programs {
    /// The CRIU program [default: what the environment variable CRIU says, else criu from the path]
    #[arg(long, value_name = "PATH")]
    pub criu: Option<PathBuf>,
    /// Folder with amdgpu_plugin.so, and no other .so than CRIU's plugins [default: where there is a GPU,
    /// $CRIU_LIBS_DIR, else the folder installed with this program]
    #[arg(long, value_name = "DIR")]
    pub plugin_dir: Option<PathBuf>,
}

/// Options of `rewake dump`.
#[derive(Debug, Args)]
pub struct DumpArgs {
    /// The process to dump, with its children
    #[arg(short = 't', long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub tree: i32,
    /// Directory for the images. An image in it stays until the new one is complete and on the disk, and is
    /// then replaced by it
    #[arg(short = 'D', long, value_name = "DIR")]
    pub images_dir: PathBuf,
    /// Directory for the log [default: the images directory]
    #[arg(short = 'W', long, value_name = "DIR")]
    pub work_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) programs: Programs,
    /// Options for `criu dump`
    #[arg(last = true, value_name = "CRIU OPTIONS")]
    pub criu_options: Vec<OsString>,
}

/// What `rewake restore` waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WaitFor {
    /// The restored processes run.
    Alive,
    /// They run, and the recorded working set is resident.
    WorkingSet,
    /// All their memory is resident.
    Resident,
}

/// Options of `rewake restore`.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// An image of a store, s3://BUCKET/FOLDER/NAME, file:///DIRECTORY/NAME or oci://REGISTRY/REPOSITORY:TAG:
    /// it is restored from the cache of the node agent, while its memory arrives there
    #[arg(value_name = "URL", conflicts_with_all = ["images_dir", "from", "record"])]
    pub image: Option<ImageUrl>,
    /// Directory of the images
    #[arg(short = 'D', long, value_name = "DIR", required_unless_present = "image")]
    pub images_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// Directory for the restore's socket, log and other files, kept afterwards [default: one for this
    /// restore alone, removed afterwards]
    #[arg(short = 'W', long, value_name = "DIR")]
    pub work_dir: Option<PathBuf>,
    /// Control socket of the agent that starts the streamer [default: that of a running `rewake serve`;
    /// without one, this command starts it]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) programs: Programs,
    /// Record the working set in the image directory (rewake-working-set.json): the memory that the program
    /// accesses first. CPU memory is loaded only when it is accessed, until no page fault came for 3 s, for
    /// 30 s at most. Later restores of the image load the working set before the rest. An earlier record is
    /// not used, and gets what is new
    #[arg(long)]
    pub record: bool,
    /// For this number of seconds, load CPU memory only when it is accessed. Then the background load begins
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=DAY))]
    pub on_demand_only: Option<u64>,
    /// When this command ends, with `-- -d`: `alive` as soon as the processes run, `working-set` when the
    /// working set that an earlier restore recorded is resident, `resident` when all memory is. The streamer
    /// continues by itself
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = WaitFor::Resident)]
    pub wait: WaitFor,
    /// Show nothing while it runs, and no timeline
    #[arg(short = 'q', long)]
    pub quiet: bool,
    /// Write the timeline to stdout as JSON
    #[arg(long)]
    pub json: bool,
    /// Options for `criu restore`
    #[arg(last = true, value_name = "CRIU OPTIONS")]
    pub criu_options: Vec<OsString>,
}

/// Options of `rewake status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Control socket [default: as for `rewake serve`]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The work directory of a restore: how much of its memory is resident
    #[arg(short = 'W', long, value_name = "DIR", conflicts_with = "socket")]
    pub work_dir: Option<PathBuf>,
    /// Print everything as JSON, for programs
    #[arg(long)]
    pub json: bool,
}
