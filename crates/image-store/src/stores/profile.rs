// SPDX-License-Identifier: MIT OR Apache-2.0
//! The profile files of AWS's programs: `~/.aws/credentials` and `~/.aws/config`.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

/// What a profile says.
#[derive(Debug, Default)]
pub(crate) struct AwsProfile {
    name: String,
    keys: Option<AwsKeys>,
    /// A setting that only AWS's programs can follow.
    other: Option<&'static str>,
    pub(crate) region: Option<String>,
    pub(crate) endpoint: Option<String>,
}

/// Keys of an account. They are in no message.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct AwsKeys {
    pub(crate) id: String,
    pub(crate) secret: String,
    pub(crate) token: Option<String>,
}

impl fmt::Debug for AwsKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AwsKeys").finish_non_exhaustive()
    }
}

/// Ways to get keys that are not followed here.
const OTHER_WAYS: [&str; 5] =
    ["role_arn", "credential_process", "sso_session", "sso_start_url", "web_identity_token_file"];

impl AwsProfile {
    /// Reads the profile that the environment names, else the default one.
    ///
    /// # Errors
    /// A file cannot be read, or has not the profile that the environment names.
    pub(crate) fn read(environment: impl Fn(&str) -> Option<OsString>) -> Result<Self, String> {
        let home = environment("HOME").map(PathBuf::from);
        let path = |variable: &str, file: &str| {
            let named = environment(variable).map(PathBuf::from);
            named.or_else(|| home.as_ref().map(|home| home.join(".aws").join(file)))
        };
        let named = environment("AWS_PROFILE").map(OsString::into_string).transpose();
        let named = named.map_err(|name| format!("AWS_PROFILE: {name:?}, expected UTF-8"))?;
        let name = named.clone().unwrap_or_else(|| "default".to_owned());
        let config_section = if name == "default" { name.clone() } else { format!("profile {name}") };
        let mut settings = section(path("AWS_CONFIG_FILE", "config"), &config_section)?;
        let credentials = section(path("AWS_SHARED_CREDENTIALS_FILE", "credentials"), &name)?;
        if settings.is_none() && credentials.is_none() {
            return match named {
                Some(name) => Err(format!("AWS_PROFILE: no profile {name:?} in the files below ~/.aws")),
                None => Ok(Self::default()),
            };
        }
        let mut all = settings.take().unwrap_or_default();
        all.extend(credentials.unwrap_or_default());
        let mut take = |key: &str| all.remove(key);
        let keys = match (take("aws_access_key_id"), take("aws_secret_access_key")) {
            (Some(id), Some(secret)) => Some(AwsKeys { id, secret, token: take("aws_session_token") }),
            _ => None,
        };
        let (region, endpoint) = (take("region"), take("endpoint_url"));
        let other = OTHER_WAYS.into_iter().find(|way| all.contains_key(*way));
        Ok(Self { name, keys, other, region, endpoint })
    }

    /// Returns the keys, or `None` if the profile says nothing about them.
    ///
    /// # Errors
    /// It has them in a way that is not followed here.
    pub(crate) fn keys(&self) -> Result<Option<AwsKeys>, String> {
        match (&self.keys, self.other) {
            (None, Some(way)) => Err(format!(
                "profile {:?} gets its keys by {way}, which is not followed here: `aws configure \
                 export-credentials --format env` gives them as environment variables",
                self.name
            )),
            (keys, _) => Ok(keys.clone()),
        }
    }
}

/// Reads a section of a file, or `None` if the file or the section does not exist.
fn section(path: Option<PathBuf>, section: &str) -> Result<Option<HashMap<String, String>>, String> {
    let Some(path) = path else { return Ok(None) };
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{}: {error}", path.display())),
    };
    let (mut found, mut is_inside) = (None, false);
    for line in text.lines() {
        // A nested setting begins with spaces: its key is none of those that are read.
        let line = line.trim();
        if let Some(title) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            is_inside = title.0.split_whitespace().eq(section.split_whitespace());
            if is_inside {
                found.get_or_insert_with(HashMap::new);
            }
        } else if is_inside
            && !line.starts_with(['#', ';'])
            && let Some((key, value)) = line.split_once('=')
            && let Some(found) = &mut found
        {
            found.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(config: &str, credentials: &str, profile: Option<&str>) -> Result<AwsProfile, String> {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join(".aws")).unwrap();
        fs::write(home.path().join(".aws/config"), config).unwrap();
        fs::write(home.path().join(".aws/credentials"), credentials).unwrap();
        AwsProfile::read(|name| match name {
            "HOME" => Some(home.path().into()),
            "AWS_PROFILE" => profile.map(OsString::from),
            _ => None,
        })
    }

    const CREDENTIALS: &str = "[default]\naws_access_key_id = ID\naws_secret_access_key=SE=CRET\n# x = y\n\
                               [ci]\naws_access_key_id = CI\naws_secret_access_key = S\naws_session_token = \
                               T\n";
    const CONFIG: &str = "[default]\nregion = eu-west-1\n[profile ci]\nendpoint_url = https://s3.example\n\
                          [profile role]\nrole_arn = arn:aws:iam::1:role/x\n";

    #[test]
    fn keys_are_read_from_the_named_profile_and_never_shown() {
        let keys = |id: &str, secret: &str, token: Option<&str>| AwsKeys {
            id: id.to_owned(),
            secret: secret.to_owned(),
            token: token.map(str::to_owned),
        };
        let profile = read(CONFIG, CREDENTIALS, None).unwrap();
        assert_eq!(profile.keys().unwrap(), Some(keys("ID", "SE=CRET", None)));
        assert_eq!(profile.region.as_deref(), Some("eu-west-1"));
        let profile = read(CONFIG, CREDENTIALS, Some("ci")).unwrap();
        assert_eq!(profile.keys().unwrap(), Some(keys("CI", "S", Some("T"))));
        assert_eq!(profile.endpoint.as_deref(), Some("https://s3.example"));
        assert!(!format!("{profile:?}").contains("\"S\"") && !format!("{profile:?}").contains("CI"));
    }

    #[test]
    fn other_ways_to_keys_and_missing_profiles_are_named() {
        let profile = read(CONFIG, CREDENTIALS, Some("role")).unwrap();
        assert!(profile.keys().unwrap_err().contains("profile \"role\" gets its keys by role_arn"));
        let message = read(CONFIG, CREDENTIALS, Some("none")).unwrap_err();
        assert_eq!(message, "AWS_PROFILE: no profile \"none\" in the files below ~/.aws");
        assert_eq!(read("", "", None).unwrap().keys(), Ok(None));
    }
}
