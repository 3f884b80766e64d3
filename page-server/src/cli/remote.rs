// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of the commands that use another host: images that are copied, programs that move.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use rewake_image_transfer::protocol::PORT;
use rewake_peer_stream::AllowedPeer;

use super::store::image_id;
use super::{ExportedPlace, PeerTlsArgs, PullSource, RemoteImage, TlsArgs};

/// Options of `rewake export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The directory whose images are served: each one is a directory below it, and its path is its name. Or
    /// a store with images: s3://BUCKET/FOLDER or file:///DIRECTORY
    #[arg(value_name = "DIR", value_parser = OsStringValueParser::new().try_map(ExportedPlace::of))]
    pub root: ExportedPlace,
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, value_name = "ADDR")]
    pub address: Option<String>,
    /// Port to listen on
    #[arg(long, value_name = "PORT", default_value_t = PORT)]
    pub port: u16,
    #[command(flatten)]
    pub(crate) peers: PeerTlsArgs,
    /// A client that may read images: NAME is a name of its certificate; with a FOLDER below DIR, it may read
    /// the images there only. To be repeated [default: every client with a certificate of the CA may read
    /// all]
    #[arg(long, value_name = "NAME[=FOLDER]", requires = "tls")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|given| AllowedPeer::of(&given)))]
    pub allow: Vec<AllowedPeer>,
    /// Log file [default: stderr]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Log level: -v0 nothing but failures, -v1 errors, -v2 warnings, -v3 information, -v4 everything
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true)]
    #[arg(default_value_t = 2, default_missing_value = "1")]
    pub verbosity: u8,
}

/// Options of `rewake pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// The image: the server's address and the image's name, with a colon between them; its URL in a store;
    /// or the path of an archive that podman or CRI-O has made, with a / in it or with the ending .tar,
    /// .tar.gz or .tar.zst
    #[arg(value_name = "HOST:IMAGE|URL|ARCHIVE")]
    #[arg(value_parser = OsStringValueParser::new().try_map(PullSource::of))]
    pub image: PullSource,
    /// Where the image is copied to: an empty directory, or one with a copy that was cut
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// Port of the server
    #[arg(long, value_name = "PORT", default_value_t = PORT)]
    pub port: u16,
    /// Refuse any other image than the one with this id, as `rewake seal` and `rewake verify` show it, or
    /// whose id begins with these digits, 32 at least
    #[arg(long, value_name = "ID", value_parser = image_id)]
    pub id: Option<String>,
    /// Refuse an image without a valid signature of one of the signers in this file, as `ssh-keygen -Y
    /// verify -f` reads it. Where /etc/rewake/signers exists, its signers are required, too
    #[arg(long, value_name = "FILE")]
    pub signers: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
}

/// Where `rewake restore` gets an image from.
#[derive(Debug, Args)]
pub struct SourceArgs {
    /// Restore this image of another host's `rewake export` while its memory arrives. The images directory
    /// gets a copy of it: it must be empty, or have a copy of that image
    #[arg(long, value_name = "HOST:IMAGE", conflicts_with = "socket")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|given| RemoteImage::of(&given)))]
    pub from: Option<RemoteImage>,
    /// Port of the server of --from
    #[arg(long, value_name = "PORT", default_value_t = PORT, requires = "from")]
    pub port: u16,
    /// With --from or a URL: refuse any other image than the one with this id, or whose id begins with these
    /// digits, 32 at least. If the agent's cache has it, no store is asked
    #[arg(long, value_name = "ID", value_parser = image_id)]
    pub id: Option<String>,
    /// Refuse an image without a valid signature of one of the signers in this file, as `ssh-keygen -Y
    /// verify -f` reads it. Where /etc/rewake/signers exists, its signers are required, too
    #[arg(long, value_name = "FILE")]
    pub signers: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
}

/// Options of `rewake migrate`.
#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// The process to move, with its children. If an earlier `rewake migrate` of it was killed, this one
    /// continues
    #[arg(short = 't', long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub tree: i32,
    /// The other host's `rewake receive`
    #[arg(long, value_name = "ADDR:PORT", required_unless_present = "abort")]
    pub to: Option<String>,
    /// End the migration of this process that another `rewake migrate` runs. Until the program was given away
    /// it then runs on here
    #[arg(long, conflicts_with_all = ["to", "dry_run", "pre_copy_only", "max_downtime", "give_up_after"])]
    pub abort: bool,
    /// Compare both hosts only, show what a migration would be refused for, and touch nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Have all memory at the destination before the program runs there: a lost connection then loses
    /// nothing. The program is frozen longer
    #[arg(long)]
    pub pre_copy_only: bool,
    /// Move the program only if it is frozen for at most this number of milliseconds; otherwise it runs on
    /// here
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_downtime: Option<u64>,
    /// Let the program run on here if the connection is lost for this number of seconds before the program
    /// was given away [default: 5]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub give_up_after: Option<u64>,
    /// Permit an address of another host, without TLS. Memory then travels unencrypted
    #[arg(long, conflicts_with = "tls")]
    pub insecure: bool,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// The CRIU program [default: what the environment variable CRIU says, else criu from the path]
    #[arg(long, value_name = "PATH")]
    pub criu: Option<PathBuf>,
    /// Options for `criu dump`
    #[arg(last = true, value_name = "CRIU OPTIONS")]
    pub criu_options: Vec<OsString>,
}

/// Options of `rewake receive`.
#[derive(Debug, Args)]
pub struct ReceiveArgs {
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, value_name = "ADDR")]
    pub address: Option<String>,
    /// Port to listen on [default: one that the kernel chooses; stderr shows it]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    #[command(flatten)]
    pub(crate) peers: PeerTlsArgs,
    /// A host whose programs are taken: a name of its certificate. To be repeated [default: every host with a
    /// certificate of the CA]
    #[arg(long, value_name = "NAME", requires = "tls")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|given| AllowedPeer::of(&given)))]
    pub allow: Vec<AllowedPeer>,
    /// The CRIU program [default: what the environment variable CRIU says, else criu from the path]
    #[arg(long, value_name = "PATH")]
    pub criu: Option<PathBuf>,
    /// Options for `criu restore`
    #[arg(last = true, value_name = "CRIU OPTIONS")]
    pub criu_options: Vec<OsString>,
}
